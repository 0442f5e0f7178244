"""Random configurations on Lightning and here; see `run.py` for the command with a range of seeds."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from conformance.differential.compare import compare_results, differences, sides
from conformance.differential.execute import run
from conformance.differential.rules import RULES, SKIPPED
from conformance.differential.sampling import sample

pytestmark = [pytest.mark.usefixtures("compiled_once"), pytest.mark.torch, pytest.mark.lightning]

QUICK, ALL = 60, 300
"""Seeds of every test run, and of the long one."""


def plain(**changes: Any) -> dict[str, Any]:
    """A small configuration without anything random."""
    loader = {"join": None, "loaders": [{"kind": "sized", "sizes": [2, 2, 2, 2, 2], "start": 3}]}
    log = {"owner": "module", "epochs": None, "batches": None, "as_dict": False, "options": {}, "value": "loss"}
    config: dict[str, Any] = {
        "seed": None,
        "verbs": ["fit"],
        "jit": True,
        "flags": {"max_epochs": 2, "num_sanity_val_steps": 0, "log_every_n_steps": 1},
        "train": loader,
        "val": {"join": None, "loaders": [{"kind": "sized", "sizes": [2, 2], "start": 5}]},
        "test": loader,
        "predict": loader,
        "owner": "passed",
        "loggers": ["record", "csv"],
        "trace": {"batch": True, "optimizer": False, "observe": ["on_train_epoch_end", "on_train_batch_end"]},
        "logs": [{**log, "hook": "training_step", "name": "a"}, {**log, "hook": "validation_step", "name": "v"}],
        "callbacks": {"checkpoints": [], "stop": None, "raise": None, "skip": None, "early_stopping": None},
        "step": {"returns": "tensor", "none_epochs": [], "quadratic": True, "lr": 0.125, "momentum": 0.0},
    }
    config = copy.deepcopy(config)
    for path, value in changes.items():
        *parents, last = path.split("__")
        place = config
        for parent in parents:
            place = place[parent]
        place[last] = value
    return config


MANUAL: dict[str, Any] = {
    "every": [1],
    "zero": "before",
    "closure": False,
    "toggle": False,
    "clip": None,
    "rates": None,
    "returns": "loss",
}

NEEDS_RULE: dict[str, dict[str, Any]] = {
    "RS11": {
        "resume": {"hook": "on_train_batch_end", "epoch": 0, "batch": 1},
        "train__loaders": [{"kind": "stateful", "sizes": [2, 2, 2, 2, 2], "start": 3}],
        "logs": [
            {
                "owner": "module",
                "hook": "training_step",
                "name": "a",
                "value": "loss",
                "options": {"on_epoch": True},
                "epochs": None,
                "batches": None,
                "as_dict": False,
            }
        ],
    },
    "GA02": {"flags__accumulate_grad_batches": 3},
    "LP18": {"train__loaders": [{"kind": "early", "sizes": [2, 2, 2], "start": 3, "claims": 5}]},
    "MC15": {
        "flags__val_check_interval": 2,
        "callbacks__checkpoints": [
            {"monitor": "v", "every_n_train_steps": 2, "save_top_k": -1, "filename": "{step}-{v:.4f}"}
        ],
    },
    "MC20": {"flags__fast_dev_run": True, "callbacks__checkpoints": [{"save_last": True}]},
    "ES06": {
        "flags__max_epochs": 4,
        "flags__min_epochs": 3,
        "callbacks__early_stopping": {"monitor": "m", "patience": 9, "stopping_threshold": 3.0},
        "logs": [
            {
                "owner": "module",
                "hook": "on_train_epoch_end",
                "name": "m",
                "value": "counter",
                "options": {},
                "epochs": None,
                "batches": None,
                "as_dict": False,
            }
        ],
    },
    "TF21": {"flags__val_check_interval": 0},
    "SC02": {
        "schedulers": {
            "form": "dict",
            "configs": [
                {
                    "scheduler": "ExponentialLR",
                    "options": {"gamma": 0.5},
                    "interval": "step",
                    "frequency": 3,
                }
            ],
        }
    },
    "SC06": {
        "flags__check_val_every_n_epoch": 2,
        "flags__max_epochs": 4,
        "schedulers": {
            "form": "lists",
            "configs": [
                {
                    "scheduler": "ReduceLROnPlateau",
                    "options": {"patience": 0, "factor": 0.5, "threshold": 8.0},
                    "monitor": "v",
                    "strict": False,
                }
            ],
        },
    },
}


def test_a_plain_run_agrees_without_any_rule() -> None:
    assert differences(config=plain(), rules=[]) == []


def test_a_step_that_optimizes_by_itself_as_the_trainer_would_is_the_same_run() -> None:
    """So that what is drawn is manual optimization, and both ways are."""
    _, ours = sides()
    automatic, manual = run(ours, plain()), run(ours, plain(manual=MANUAL))
    assert manual["weights"] == automatic["weights"]
    steps = [result["counters"]["manual"]["total"]["completed"] for result in (automatic, manual)]
    assert steps == [0, 10]


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_is_needed_and_is_enough(rule: Any) -> None:
    config = plain(**NEEDS_RULE[rule.name])
    assert rule.applies(config)
    assert not rule.applies(plain())
    assert differences(config=config, rules=[])
    assert differences(config=config) == []


@pytest.mark.parametrize(
    "change",
    [
        {"flags__log_every_n_steps": 2},
        {"flags__check_val_every_n_epoch": 2},
        {"flags__gradient_clip_val": 0.1},
        {"step__lr": 0.25},
        {"schedulers": {"form": "dict", "configs": [{"scheduler": "ExponentialLR", "options": {"gamma": 0.5}}]}},
        {"manual": {**MANUAL, "every": [2]}},
        {"callbacks__stop": {"hook": "on_train_batch_end", "epoch": 1, "batch": 1}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_the_comparison_sees_a_run_that_behaves_otherwise(change: dict[str, Any]) -> None:
    _, ours = sides()
    assert compare_results(run(ours, plain()), run(ours, plain(**change)))


def test_the_seeds_reach_every_kind_of_configuration() -> None:
    text = "\n".join(str(sample(seed)) for seed in range(ALL))
    words = "early sizeless shuffled dict min_size max_size max_size_cycle sequential accumulation lr_monitor csv"
    words += " StepLR ReduceLROnPlateau CosineAnnealingLR lists interval frequency monitor"
    flags = "overfit_batches fast_dev_run reload_dataloaders_every_n_epochs gradient_clip_algorithm val_check_interval"
    for word in (words + " " + flags).split():
        assert f"'{word}'" in text, word
    manual = [each["manual"] for each in map(sample, range(ALL)) if each["manual"]]
    assert {len(each["every"]) for each in manual} == {1, 2}
    for word in ("closure", "toggle", "clip", "rates"):
        assert {bool(each[word]) for each in manual} == {True, False}, word
    assert {sample(seed)["steps_per_dispatch"] for seed in range(ALL)} == {None, 2, 3, "auto"}
    for rule in RULES:
        assert any(rule.applies(sample(seed)) for seed in range(ALL)), rule.name


def test_what_is_left_out_is_named_with_who_tests_it() -> None:
    assert all(words and owner and not owner.startswith("issue") for words, owner in SKIPPED.items())


def test_the_command_is_where_the_documents_say() -> None:
    assert (Path(__file__).parent / "run.py").is_file()


@pytest.mark.parametrize("seed", range(QUICK))
def test_a_random_configuration_agrees(seed: int) -> None:
    lines = differences(seed)
    assert not lines, "\n".join([f"seed {seed}", *lines])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(QUICK, ALL))
def test_one_more_random_configuration_agrees(seed: int) -> None:
    lines = differences(seed)
    assert not lines, "\n".join([f"seed {seed}", *lines])
