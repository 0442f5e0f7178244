"""ER: exceptions, warnings and refusals, with Lightning beside."""

from __future__ import annotations

from typing import Any

import pytest
from support.beside import Side, caught, error, events_callback, same
from support.tracing import golden

pytestmark = [
    pytest.mark.lightning,
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::jaxlightning.utilities.warnings.PossibleUserWarning"),
]


@pytest.mark.catalogue("ER08", "ER01", "ER06", "ER02", "ER04")
def test_the_exceptions_have_lightnings_names_and_families() -> None:
    def scenario(side: Side) -> Any:
        kind = side.get("utilities.exceptions.MisconfigurationException")
        return [
            [each.__name__ for each in kind.__mro__],
            error(lambda: side.trainer().fit(object())),
            error(lambda: side.trainer().test())[0],
            error(lambda: side.trainer().predict())[0],
            error(lambda: side.trainer().fit(side.pl.LightningModule(), side.loader(2)))[0],
        ]

    same(scenario)


@pytest.mark.catalogue("ER03")
def test_half_a_validation_is_skipped_with_a_warning() -> None:
    def scenario(side: Side) -> Any:
        found = []
        for missing in ("validation_step", "val_dataloader"):
            space = {missing: getattr(side.pl.LightningModule, missing)}
            module = type("Model", (side.Tiny,), space)()
            seen: list[str] = []
            callback = events_callback(side, ["on_validation_start"], lambda hook, *args, seen=seen: seen.append(hook))
            with caught() as warned:
                side.trainer(callbacks=[callback]).fit(module)
            found.append([missing, seen, sorted({kind for kind, text in warned if "validation_step" in text})])
        return found

    same(scenario)


@pytest.mark.catalogue("ER07", adaptation="raised while the step is traced, with the user's own traceback")
@pytest.mark.parametrize("verb", ["fit", "validate", "test", "predict"])
def test_an_exception_of_the_user_comes_out_unchanged(verb: str) -> None:
    class Mine(Exception): ...

    def scenario(side: Side) -> Any:
        def fails(self: Any, batch: Any, batch_idx: Any) -> Any:
            raise Mine("of mine")

        seen: list[Any] = []
        word = {"fit": "training", "validate": "validation"}.get(verb, verb)
        module = type("Model", (side.Tiny,), {f"{word}_step": fails})()
        callback = events_callback(
            side, ["on_exception"], lambda hook, trainer, m, exception: seen.append(type(exception).__name__)
        )
        trainer = side.trainer(callbacks=[callback], limit_val_batches=0 if verb == "fit" else 1.0)
        outcome = error(lambda: getattr(trainer, verb)(module))
        return outcome, seen, trainer.state.status.value, trainer.interrupted

    assert same(scenario)[0] == ["Mine", "of mine"]


@pytest.mark.slow
@pytest.mark.catalogue("ER11")
@pytest.mark.parametrize("value", ["off", "0", "on", None])
def test_advice_can_be_switched_off(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    import os
    import subprocess
    import sys

    code = (
        "import sys, warnings, importlib\n"
        "with warnings.catch_warnings(record=True) as seen:\n"
        "    category = importlib.import_module(sys.argv[1]).PossibleUserWarning\n"
        "    importlib.import_module(sys.argv[2]).rank_zero_warn('x', category=category)\n"
        "print(len([w for w in seen if 'x' in str(w.message)]))"
    )
    environment = {k: v for k, v in os.environ.items() if k != "POSSIBLE_USER_WARNINGS"}
    if value is not None:
        environment["POSSIBLE_USER_WARNINGS"] = value

    def scenario(side: Side) -> Any:
        home = "jaxlightning.utilities.warnings" if side.ours else "lightning.fabric.utilities.warnings"
        done = subprocess.run(
            [sys.executable, "-c", code, home, f"{side.name}.utilities.rank_zero"],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.strip()

    same(scenario)


@pytest.mark.catalogue("ER10")
def test_every_recorded_refusal_is_compared_somewhere() -> None:
    """Or belongs to later work by name."""
    import ast

    from conformance import table

    texts = "".join(
        (table.TESTS / path).read_text()
        for path in (
            "trainer/test_errors.py",
            "optim/test_configure.py",
            "conformance/test_errors.py",
            "conformance/test_loops.py",
        )
    )
    compared = {
        node.value
        for node in ast.walk(ast.parse(texts.replace("from __future__ import annotations", "")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    later = {
        "swa_bad_lr", "swa_bad_start", "swa_int_start0", "swa_two_opts",  # weight averaging
        "gas_manual", "manual_backward_in_automatic", "manual_returns_float", "manual_sched_monitor_key_warns",
        "predict_default_step_uses_forward",  # torch's own refusal of a list; what the default does has a test
        "_batch_end_outputs_keys",  # not a case: what one of the cases wrote
    }  # fmt: skip
    assert golden("errors").keys() - compared - later == set()
