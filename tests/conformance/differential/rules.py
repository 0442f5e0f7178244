"""Every place where we differ from Lightning on purpose, as a named rule, and what is not drawn at all.

A rule says to which configurations it applies and does one of two things: it changes the reference run so that
Lightning does what DIFFERENCES asks for, or it rewrites or leaves out exactly the aspect that differs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from conformance.differential.data import ends_early
from conformance.differential.resuming import forget_what_lightning_loses, resumes

Config = dict[str, Any]
Result = dict[str, Any]

SKIPPED = {
    "a resume within a window, before a due validation, with a plateau or a CSV file that goes on (RS11, RS12, LO05)": (
        "tests/resume"
    ),
    "a resume after an epoch with a step limit": "Lightning takes batch 3 of 3 for one that comes; tests/resume",
    "gradients of manual optimization that wait across a resume (MO08)": "Lightning loses them; tests/compile",
    "time-based intervals and Timer (TF19, TM)": "not deterministic; own tests",
    "training_step that returns None at some batches of an epoch": "a compiled step decides it once: whole epochs here",
    "clipping by value in an epoch without gradients": "torch itself raises there",
    "0-d leaves in a batch (LG18)": "own tests",
    "a stop at the very batch after which a loader ends early (LP18)": "nobody knows yet that it was the last batch",
    "SIGTERM (LP32), detect_anomaly (TF34), bars (PB01)": "own tests",
}
"""What no configuration contains, and who tests it."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One difference.

    Attributes:
        name: Its row in DIFFERENCES.
        applies: Whether a configuration is touched.
        configure: Changes the configuration of the reference run.
        adapt: Changes the reference run's list of callbacks.
        rewrite: Gets the configuration, the reference's result and ours; changes them in place.
    """

    name: str
    applies: Callable[[Config], bool]
    configure: Callable[[Config], None] | None = None
    adapt: Callable[[list[Any]], list[Any]] | None = None
    rewrite: Callable[[Config, Result, Result], None] | None = None


# --- GA02: a window that the epoch's end cuts short is divided by its real count -----------------------------------


def _accumulates(config: Config) -> bool:
    return config["flags"].get("accumulate_grad_batches", 1) > 1 or "accumulation" in config["callbacks"]


def _divide_by_real_count(callbacks: list[Any]) -> list[Any]:
    from lightning.pytorch import Callback

    class RealCount(Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            window = trainer.accumulate_grad_batches
            count = (trainer.fit_loop.batch_idx % window) + 1
            for parameter in pl_module.parameters():
                if count != window and parameter.grad is not None:
                    parameter.grad *= window / count

    return [RealCount(), *callbacks]


# --- SC02, SC06: frequency counts optimizer steps over the run; a plateau steps at news of its metric ---------------


def _counts_steps(config: Config) -> bool:
    plan = config.get("schedulers")
    # A batch that its start hook skips is no optimizer step, at whatever frequency.
    skips = config["callbacks"]["skip"] is not None
    return plan is not None and any(
        spec.get("interval") == "step" and (spec.get("frequency", 1) > 1 or skips) for spec in plan["configs"]
    )


def _has_plateau(config: Config) -> bool:
    plan = config.get("schedulers")
    return plan is not None and any("monitor" in spec for spec in plan["configs"])


def _step_schedulers_otherwise(*, by_steps: bool, by_news: bool) -> Callable[[list[Any]], list[Any]]:
    """A change of the reference: its own method, called for one scheduler at a time and only when that one is due."""

    def adapt(callbacks: list[Any]) -> list[Any]:
        from lightning.pytorch import Callback

        class Otherwise(Callback):
            def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
                loop, seen, counted = trainer.fit_loop.epoch_loop, {}, {}
                original = getattr(loop, "_update_learning_rates")  # noqa: B009  (another rule may have replaced it)

                def update(interval: str, update_plateau_schedulers: bool) -> None:
                    configs = trainer.strategy.lr_scheduler_configs
                    try:
                        for config in configs:
                            if config.interval != interval or config.reduce_on_plateau is not update_plateau_schedulers:
                                continue
                            frequency = config.frequency
                            if by_steps and interval == "step":
                                news = counted.get(id(config), 0) != trainer.global_step
                                counted[id(config)] = trainer.global_step
                                if not news or trainer.global_step % frequency:
                                    continue
                                config.frequency = 1
                            value = trainer.callback_metrics.get(config.monitor) if by_news else None
                            if value is not None and config.reduce_on_plateau:
                                due = interval == "epoch" or by_steps or (loop.batch_idx + 1) % frequency == 0
                                if (trainer.current_epoch + 1) % frequency and interval == "epoch":
                                    due = False
                                if due and seen.get(id(config)) is value:
                                    config.frequency = frequency
                                    continue
                                if due:
                                    seen[id(config)] = value
                            trainer.strategy.lr_scheduler_configs = [config]
                            original(interval, update_plateau_schedulers)
                            config.frequency = frequency
                    finally:
                        trainer.strategy.lr_scheduler_configs = configs

                loop._update_learning_rates = update

        return [Otherwise(), *callbacks]

    return adapt


# --- LP18: a sized loader that ends early ends the epoch ----------------------------------------------------------


def _ends_early(config: Config) -> bool:
    return ends_early(config["train"], config["flags"])


def _state_true_length(config: Config) -> None:
    train = config["train"]
    shortest = min(len(spec["sizes"]) for spec in train["loaders"])
    for spec in train["loaders"]:
        spec.pop("claims", None)
        if spec["kind"] == "sizeless":
            spec["kind"] = "sized"
        if train["join"] == "min_size":
            spec["sizes"] = spec["sizes"][:shortest]


def _forget_lengths(config: Config, expected: Result, got: Result) -> None:
    for result in (expected, got):
        for name in ("num_training_batches", "val_check_batch"):  # they follow the stated length
            result["counters"].pop(name, None)
        if _accumulates(config):
            # The step that empties the window comes when the end is known: after `on_train_batch_end` of the last
            # batch, whose event therefore shows one step less. What comes out of the epoch is the same.
            for name in ("events", "csv", "callbacks", "checkpoints", "metrics", "returns"):
                result[name] = None


# --- checkpoints --------------------------------------------------------------------------------------------------


def _saves_at_steps_by_metric(config: Config) -> bool:
    return any("every_n_train_steps" in spec and spec.get("monitor") for spec in config["callbacks"]["checkpoints"])


_SAVING = (
    "callback.state_dict",
    "callback.on_save_checkpoint",
    "module.on_save_checkpoint",
    "logger.after_save_checkpoint",
)


def _drop_saving(config: Config, expected: Result, got: Result) -> None:
    for result in (expected, got):
        result["events"] = [event for event in result["events"] if not event[0].startswith(_SAVING)]
        result["checkpoints"] = None
        result["callbacks"] = {key: value for key, value in result["callbacks"].items() if not _about_saving(key)}


def _about_saving(key: str) -> bool:
    return any(word in key for word in ("_model_path", "model_score", "current_score", "kept "))


def _expect_no_checkpoint(config: Config, expected: Result, got: Result) -> None:
    expected["checkpoints"] = []
    expected["events"] = [event for event in expected["events"] if not event[0].startswith(_SAVING)]
    for key, value in expected["callbacks"].items():
        if "last_model_path" in key and value:
            expected["callbacks"][key] = ""


# --- ES06: the decision to stop is taken anew when the minimum is reached -----------------------------------------


def _stops_with_minimum(config: Config) -> bool:
    flags = config["flags"]
    return bool(config["callbacks"]["early_stopping"]) and ("min_epochs" in flags or "min_steps" in flags)


def _decide_anew(callbacks: list[Any]) -> list[Any]:
    from lightning.pytorch.callbacks import EarlyStopping
    from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason

    class Anew(EarlyStopping):
        due = False

        def _run_early_stopping_check(self, trainer: Any) -> None:
            asked, before = trainer.should_stop, self.due
            trainer.should_stop = False
            super()._run_early_stopping_check(trainer)
            self.due, trainer.should_stop = trainer.should_stop, asked
            if before and not self.due:
                self.stopped_epoch, self.stopping_reason = 0, EarlyStoppingReason.NOT_STOPPED

        def _stop(self, trainer: Any, epochs: int) -> None:
            minimum = (trainer.min_epochs or 0, trainer.min_steps or 0)
            if self.due and epochs >= minimum[0] and trainer.global_step >= minimum[1]:
                self.due, trainer.should_stop = False, True

        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            self._stop(trainer, trainer.current_epoch)

        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            super().on_validation_end(trainer, pl_module)
            if trainer.state.fn == "fit" and not trainer.sanity_checking and not self._check_on_train_epoch_end:
                self._stop(trainer, trainer.current_epoch)

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            super().on_train_epoch_end(trainer, pl_module)
            self._stop(trainer, trainer.current_epoch + 1)

    def anew(callback: Any) -> Any:
        if type(callback) is EarlyStopping:
            callback.__class__ = Anew
        return callback

    return [anew(callback) for callback in callbacks]


# --- errors -------------------------------------------------------------------------------------------------------


def _expect_misconfiguration(config: Config, expected: Result, got: Result) -> None:
    error = expected["error"] or ""
    if error.startswith("ZeroDivisionError") or (got["error"] or "").startswith("MisconfigurationException in constr"):
        expected.clear()
        got_error = got["error"]
        got.clear()
        expected["error"], got["error"] = "MisconfigurationException in construction", got_error


RULES = (
    Rule(name="GA02", applies=_accumulates, adapt=_divide_by_real_count),
    Rule(
        name="MC20",
        applies=lambda config: bool(config["flags"].get("fast_dev_run")),
        rewrite=_expect_no_checkpoint,
    ),
    Rule(name="MC15", applies=_saves_at_steps_by_metric, rewrite=_drop_saving),
    Rule(name="SC02", applies=_counts_steps, adapt=_step_schedulers_otherwise(by_steps=True, by_news=False)),
    Rule(name="SC06", applies=_has_plateau, adapt=_step_schedulers_otherwise(by_steps=False, by_news=True)),
    Rule(name="RS11", applies=resumes, rewrite=forget_what_lightning_loses),
    Rule(name="ES06", applies=_stops_with_minimum, adapt=_decide_anew),
    Rule(name="LP18", applies=_ends_early, configure=_state_true_length, rewrite=_forget_lengths),
    Rule(
        name="TF21",
        applies=lambda config: (
            config["flags"].get("val_check_interval") == 0 and not config["flags"].get("fast_dev_run")
        ),
        rewrite=_expect_misconfiguration,
    ),
)


def rules_for(config: Config) -> list[Rule]:
    """Return the rules that apply to a configuration."""
    return [rule for rule in RULES if rule.applies(config)]


def reference_config(config: Config, rules: list[Rule]) -> Config:
    """Return the configuration that the reference runs."""
    changed = copy.deepcopy(config)
    for rule in rules:
        if rule.configure is not None:
            rule.configure(changed)
    return changed
