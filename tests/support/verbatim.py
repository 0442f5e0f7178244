"""Runs a module as people write it, compiled and eagerly, and beside PyTorch Lightning on the same weights.

`check` is what most tests of `tests/verbatim` call. A body that differs between `jit=True` and `jit=False` shows that
an effect of the step was lost or done twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

import jaxlightning as pl

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


@dataclass
class Outcome:
    """What a run left behind.

    Attributes:
        logged: For each batch everything that was logged so far, and the loss that the step returned.
        state: Parameters and other variables at the end, by dotted path.
        module: The module.
        trainer: The trainer.
    """

    logged: list[dict[str, float]]
    state: dict[str, np.ndarray[Any, Any]]
    module: Any
    trainer: Any


@dataclass
class Beside:
    """The same body for PyTorch Lightning.

    Attributes:
        make: Makes the torch module (float64 is set by the harness).
        layers: Our layer to theirs, `{"net.Dense_0": "net.0"}`: dense and normalisation layers are copied over before
            training and compared after it.
        skip: Names of our parameters and statistics (their ends) that are not compared.
    """

    make: Callable[[], Any]
    layers: Mapping[str, str]
    skip: tuple[str, ...] = ()


class _Recorder:
    """Collects what was logged after each training batch; a plain callback of either library."""

    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []

    def note(self, trainer: Any, outputs: Any) -> None:
        row = {name: float(value) for name, value in trainer.callback_metrics.items()}
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if loss is not None:
            row["returned loss"] = float(loss)
        self.logged.append(row)


def _recorder(base: type) -> Any:
    class Recording(base, _Recorder):  # type: ignore[misc]
        def __init__(self) -> None:
            _Recorder.__init__(self)

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: Any) -> None:
            self.note(trainer, outputs)

    return Recording()


def batches(data: Any, batch_size: int, dtype: str) -> Any:
    """A loader over an array or a tuple or dictionary of them; floats become `dtype`."""
    cast = jax.tree.map(lambda a: np.asarray(a, dtype) if np.issubdtype(np.asarray(a).dtype, np.floating) else a, data)
    return pl.ArrayLoader(cast, batch_size=batch_size)


def run(
    make: Callable[[], Any],
    data: Any,
    *,
    jit: bool = True,
    dtype: str = "float64",
    batch_size: int = 4,
    steps: int = 20,
    prepare: Callable[[Any, Any], None] | None = None,
    val_data: Any = None,
    **flags: Any,
) -> Outcome:
    """Trains a module on some batches.

    Args:
        make: Makes the module.
        data: Arrays, equally long; epochs follow one another until `steps` batches have run.
        jit: Whether the step is compiled.
        dtype: Of the data and, in float64, of JAX's x64 mode.
        batch_size: Of the loader.
        steps: Batches in all.
        prepare: Called with the module and one batch before training.
        val_data: Arrays to validate with after each epoch.
        **flags: Of the Trainer.

    Returns:
        What the run left behind.
    """
    length = len(jax.tree.leaves(data)[0]) // batch_size
    limits = {"max_epochs": -(-steps // length)} | ({"limit_train_batches": steps} if steps < length else {})
    with jax.enable_x64(dtype == "float64"):
        module, recorder = make(), _recorder(pl.Callback)
        first = next(iter(batches(data, batch_size, dtype)))
        if dtype == "float64":
            _widen(module, first)
        if prepare is not None:
            prepare(module, first)
        trainer = pl.Trainer(**{**QUIET, **limits, "jit": jit, "callbacks": [recorder], **flags})
        loaders = [batches(data, batch_size, dtype)]
        if val_data is not None:
            loaders.append(batches(val_data, batch_size, dtype))
        trainer.fit(module, *loaders)
        state = {name: np.asarray(value) for name, value in module.state_dict().items()}
    return Outcome(recorder.logged[:steps], state, module, trainer)


def _widen(module: Any, batch: Any) -> None:
    """Creates the variables and makes them float64: Flax makes float32 ones, whatever JAX's mode."""
    module.init(batch)
    engine = module._engine

    def wide(leaf: Any) -> Any:
        return leaf.astype(np.float64) if np.issubdtype(leaf.dtype, np.floating) else leaf

    engine.take_created(jax.tree.map(wide, engine.params), jax.tree.map(wide, engine.variables))


def check(
    make: Callable[[], Any], data: Any, *, steps: int = 20, beside: Beside | None = None, **options: Any
) -> Outcome:
    """Runs a body compiled and eagerly, in float64 and float32, and compares.

    Float64 has to agree to 1e-8. In float32 the losses have to agree to 1e-5 relative: fused and unfused arithmetic
    round differently, by about one unit (6e-8) in each of some hundred operations.

    Args:
        make: Makes the module.
        data: Its training data.
        steps: Batches.
        beside: The torch counterpart, compared to 1e-7 in float64.
        **options: Of `run`.

    Returns:
        The compiled float64 run.
    """
    compiled = run(make, data, steps=steps, **options)
    eager = run(make, data, steps=steps, jit=False, **options)
    equal(compiled, eager, 1e-8)
    single = run(make, data, steps=steps, dtype="float32", **options)
    single_eager = run(make, data, steps=steps, jit=False, dtype="float32", **options)
    equal(single, single_eager, 1e-5, state=False)
    if beside is not None:
        compare_with_lightning(make, data, beside, steps=steps, **options)
    return compiled


def equal(one: Outcome, other: Outcome, tolerance: float, *, state: bool = True) -> None:
    """Two runs logged the same numbers and, with `state`, left the same parameters."""
    assert len(one.logged) == len(other.logged) > 0
    for number, (left, right) in enumerate(zip(one.logged, other.logged, strict=True)):
        assert left.keys() == right.keys(), f"batch {number}"
        for name in left:
            np.testing.assert_allclose(
                left[name], right[name], rtol=tolerance, atol=tolerance, err_msg=f"{name} after batch {number}"
            )
    if state:
        assert one.state.keys() == other.state.keys()
        for name, value in one.state.items():
            np.testing.assert_allclose(value, other.state[name], rtol=tolerance, atol=tolerance, err_msg=name)


# --- beside Lightning ---------------------------------------------------------------------------------------------

_NAMES = {"kernel": "weight", "bias": "bias", "scale": "weight", "mean": "running_mean", "var": "running_var"}


@dataclass
class _Pairs:
    """Which of our arrays is which of theirs."""

    names: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, ours: Mapping[str, Any], layers: Mapping[str, str]) -> _Pairs:
        pairs = {}
        for name in ours:
            plain = name.replace(".batch_stats.", ".")
            for layer, theirs in layers.items():
                if plain.rpartition(".")[0] == layer:
                    pairs[name] = f"{theirs}.{_NAMES[plain.rpartition('.')[2]]}"
        return cls(pairs)


def _to_theirs(name: str, value: Any) -> Any:
    value = np.asarray(value)
    if name.endswith("kernel"):
        return value.transpose(3, 2, 0, 1) if value.ndim == 4 else value.T
    return value


def compare_with_lightning(
    make: Callable[[], Any],
    data: Any,
    beside: Beside,
    *,
    steps: int = 20,
    batch_size: int = 4,
    tolerance: float = 1e-7,
    **options: Any,
) -> Outcome:
    """Trains the torch counterpart from the same weights on the same batches in float64 and compares."""
    import lightning.pytorch as lightning
    import torch

    theirs = beside.make().double()
    pairs = _Pairs()

    def copy(module: Any, batch: Any) -> None:
        ours = module.state_dict()
        pairs.names = _Pairs.of(ours, beside.layers).names
        state = theirs.state_dict()
        for name, their_name in pairs.names.items():
            state[their_name] = torch.from_numpy(np.array(_to_theirs(name, ours[name]), np.float64))
        theirs.load_state_dict(state)

    given = options.pop("prepare", None)

    def prepare(module: Any, batch: Any) -> None:
        if given is not None:
            given(module, batch)
        copy(module, batch)

    ours = run(make, data, steps=steps, batch_size=batch_size, prepare=prepare, **options)
    val_data = options.pop("val_data", None)
    loaders = [_torch_loader(data, batch_size)] + ([] if val_data is None else [_torch_loader(val_data, batch_size)])
    length = len(jax.tree.leaves(data)[0]) // batch_size
    limits = {"max_epochs": -(-steps // length)} | ({"limit_train_batches": steps} if steps < length else {})
    recorder = _recorder(lightning.Callback)
    lightning.Trainer(**{**QUIET, **limits, "callbacks": [recorder], **options}).fit(theirs, *loaders)
    for number, (mine, other) in enumerate(zip(ours.logged, recorder.logged[:steps], strict=True)):
        assert mine.keys() == other.keys(), f"batch {number}"
        for name in mine:
            np.testing.assert_allclose(
                mine[name], other[name], rtol=tolerance, atol=tolerance, err_msg=f"{name} after batch {number}"
            )
    state = {name: value.detach().numpy() for name, value in theirs.state_dict().items()}
    compared = 0
    for name, their_name in pairs.names.items():
        if not name.endswith(beside.skip or ("\0",)):
            compared += 1
            np.testing.assert_allclose(
                _to_theirs(name, ours.state[name]), state[their_name], rtol=tolerance, atol=tolerance, err_msg=name
            )
    assert compared > 0, "no layer was compared"
    return ours


def _torch_loader(data: Any, batch_size: int) -> Any:
    import torch

    def tensor(array: Any) -> Any:
        array = np.asarray(array)
        return torch.from_numpy(np.array(array, np.float64 if np.issubdtype(array.dtype, np.floating) else array.dtype))

    class Rows(torch.utils.data.Dataset):  # type: ignore[misc,type-arg]
        def __len__(self) -> int:
            return len(jax.tree.leaves(data)[0])

        def __getitem__(self, index: int) -> Any:
            return jax.tree.map(lambda array: tensor(array)[index], data)

    return torch.utils.data.DataLoader(Rows(), batch_size=batch_size)
