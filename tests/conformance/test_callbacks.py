"""CB: callbacks of the module, their states and their hooks, with Lightning beside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.beside import Side, error, events_callback, plain, same

pytestmark = [
    pytest.mark.lightning,
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::jaxlightning.utilities.warnings.PossibleUserWarning"),
]


@pytest.mark.catalogue("CB02")
@pytest.mark.parametrize("single", [True, False])
def test_callbacks_of_the_module_stay_for_later_runs(single: bool) -> None:
    def scenario(side: Side) -> Any:
        class First(side.Callback): ...  # type: ignore[name-defined,misc]

        class Second(First): ...

        class Model(side.Tiny):  # type: ignore[name-defined,misc]
            def configure_callbacks(self) -> Any:
                return mine if single else [mine, other]

        mine, other = Second(), side.get("callbacks.EarlyStopping")("x")
        given = [First(), side.get("callbacks.ModelCheckpoint")(), side.get("callbacks.Timer")()]
        trainer = side.trainer(callbacks=given, enable_checkpointing=True)
        names = []
        with side.messages() as said:
            for _ in range(2):
                trainer.validate(Model(), verbose=False)
                names.append([type(each).__name__ for each in trainer.callbacks])
        return names, sum("will override existing callbacks" in each for each in said)

    same(scenario)


@pytest.mark.catalogue("CB03")
def test_callbacks_save_and_load_their_state(tmp_path: Path) -> None:
    def scenario(side: Side) -> Any:
        class Counter(side.Callback):  # type: ignore[name-defined,misc]
            def __init__(self, what: str) -> None:
                self.what, self.count = what, 0

            @property
            def state_key(self) -> str:
                return f"Counter[what={self.what}]"

            def on_train_batch_end(self, *args: Any) -> None:
                self.count += 1

            def state_dict(self) -> dict[str, Any]:
                return {"count": self.count}

            def load_state_dict(self, state_dict: dict[str, Any]) -> None:
                seen.append([self.what, state_dict])

            def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
                checkpoint[f"extra_{self.what}"] = 1

            def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
                seen.append([self.what, checkpoint[f"extra_{self.what}"], sorted(checkpoint["callbacks"])])

        seen: list[Any] = []
        path = tmp_path / f"{side.name}.ckpt"
        trainer = side.trainer(limit_val_batches=0, callbacks=[Counter("a"), Counter("b")])
        trainer.fit(side.Tiny())
        trainer.save_checkpoint(path)
        side.trainer(limit_val_batches=0, max_epochs=2, callbacks=[Counter("a"), Counter("b")]).fit(
            side.Tiny(), ckpt_path=path
        )
        duplicate = error(lambda: side.trainer(callbacks=[Counter("a"), Counter("a")]))
        return seen, duplicate

    assert same(scenario)[1][0] == "RuntimeError"


@pytest.mark.catalogue("CB05")
def test_every_hook_may_be_a_function() -> None:
    def scenario(side: Side) -> Any:
        lambda_callback = side.get("callbacks.LambdaCallback")
        seen: list[str] = []
        hooks = ["setup", "on_fit_start", "on_train_batch_end", "on_validation_end", "on_train_end", "teardown"]
        functions = {hook: lambda *args, hook=hook, **kwargs: seen.append(hook) for hook in hooks}
        side.trainer(callbacks=[lambda_callback(**functions)], limit_train_batches=1).fit(side.Tiny())
        return seen, error(lambda: lambda_callback(on_trian_start=print))[0]

    assert same(scenario)[1] == "TypeError"


@pytest.mark.catalogue("CB06", adaptation="a table of the networks, from the paths of their variables")
@pytest.mark.parametrize("depth", [-2, 0, 1, -1, "x"])
def test_the_summary_is_printed_to_the_depth_asked_for(depth: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def scenario(side: Side) -> Any:
        def run() -> Any:
            callback = side.get("callbacks.ModelSummary")(max_depth=depth)
            capsys.readouterr()
            with side.messages() as said:
                side.trainer(callbacks=[callback], limit_train_batches=1).fit(side.Tiny())
            text = capsys.readouterr().out + "\n".join(said)
            return ["Total params" in text, "layer" in text, "10" in text]

        return error(run)

    found = same(scenario)
    assert (found[0] == "ValueError") if depth in (-2, "x") else (found == [depth != 0] * 3)


@pytest.mark.catalogue("CB12", "TA10", adaptation="the module's state after the step is what hooks read")
def test_callbacks_get_the_live_module() -> None:
    def scenario(side: Side) -> Any:
        seen: list[Any] = []

        class Model(side.Tiny):  # type: ignore[name-defined,misc]
            def training_step(self, batch: Any, batch_idx: Any) -> Any:
                return self.layer(batch[0]).sum(-1).mean()

            def configure_optimizers(self) -> Any:
                return side.sgd(self, lr=1.0)

        def note(hook: str, trainer: Any, module: Any, *args: Any, **kwargs: Any) -> None:
            state = module.state_dict() if hook == "on_train_batch_end" else {}
            bias = [np.asarray(value).tolist() for name, value in state.items() if name.endswith("bias")]
            at_start = kept.setdefault("bias", np.asarray(bias[0])) if bias else None
            moved = None if not bias else plain(np.asarray(bias[0]) - at_start)
            seen.append([hook, module is model, trainer.lightning_module is module, module.training, moved])

        hooks = ["on_train_start", "on_train_batch_start", "on_train_batch_end", "on_validation_start", "on_test_start"]
        kept: dict[str, Any] = {}
        model = Model()
        trainer = side.trainer(callbacks=[events_callback(side, hooks, note)], num_sanity_val_steps=0)
        trainer.fit(model)
        trainer.test(model, verbose=False)
        return seen

    seen = same(scenario)
    assert [each[-1] for each in seen if each[0] == "on_train_batch_end"] == [[0, 0], [-1, -1], [-2, -2]]
