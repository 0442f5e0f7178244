"""The parameters and other variables of a module as people see them: `state_dict`, checkpoints, exported files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxlightning.compile.paths import flatten, merge
from jaxlightning.module_base import ModuleBase
from jaxlightning.utilities.model_helpers import restricted_classmethod

if TYPE_CHECKING:
    from typing import Self

__all__ = ["ModuleWeights"]


class ModuleWeights(ModuleBase):
    """`state_dict`, `load_state_dict`, `load_from_checkpoint` and `export` of a module."""

    _strict_loading: bool | None

    def state_dict(self) -> dict[str, Any]:
        """All parameters and other variables as copies, flat by dotted path (`"net.Dense_0.kernel"`).

        Of a module that is an attribute of another one: its own, by their paths on it.
        """
        engine = self._require_engine()
        flat = flatten(engine.params, separator=".")
        for network, collections in engine.variables.items():
            for collection, tree in collections.items():
                prefix = network if collection == "nnx" else f"{network}.{collection}"
                flat.update({f"{prefix}.{path}": leaf for path, leaf in flatten(tree, separator=".").items()})
        flat.update(engine.buffer_values())
        prefix = engine.prefix_of(self)
        return {path[len(prefix) :]: leaf for path, leaf in flat.items() if path.startswith(prefix)}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Sets parameters and variables from what `state_dict` gave.

        Args:
            state_dict: Arrays by dotted path.
            strict: Whether missing and unexpected paths are errors.

        Raises:
            RuntimeError: If the variables do not exist yet, or paths or shapes do not fit.
        """
        engine = self._require_engine()
        current = self.state_dict()
        if not current:
            raise RuntimeError(
                f"`{type(self).__name__}` has no variables yet, so paths cannot be matched. Call `init(batch)` first."
            )
        missing = [path for path in current if path not in state_dict]
        unexpected = [path for path in state_dict if path not in current]
        if strict and (missing or unexpected):
            raise RuntimeError(
                f"The state dict does not fit {type(self).__name__}: missing {missing[:20]}, unexpected "
                f"{unexpected[:20]}. "
                "Pass `strict=False` to set what fits."
            )
        own = engine.prefix_of(self)
        state_dict = {own + path: value for path, value in state_dict.items()}
        params, variables = flatten(engine.params, separator="."), {}
        new_params = {path: state_dict[path] for path in params if path in state_dict}
        for network, collections in engine.variables.items():
            for collection, tree in collections.items():
                prefix = network if collection == "nnx" else f"{network}.{collection}"
                for path in flatten(tree, separator="."):
                    if f"{prefix}.{path}" in state_dict:
                        variables[f"{network}.{collection}.{path}"] = state_dict[f"{prefix}.{path}"]
        # Network names may hold dots (`blocks.0`), so leaves are put in place by walking the present trees.
        engine.params = merge(engine.params, _place(engine.params, new_params))
        engine.variables = merge(engine.variables, _place(engine.variables, variables))
        engine.set_buffers({name: state_dict[name] for name in engine.buffer_values() if name in state_dict})

    def export(
        self,
        path: str | os.PathLike[str],
        *,
        format: str = "stablehlo",
        inputs: Any = None,
        batch: int | None = None,
    ) -> Any:
        """Writes `forward` with its weights for another runtime, or the weights alone.

        Args:
            path: The file, or the directory of a SavedModel.
            format: `"stablehlo"`, `"saved_model"`, `"tflite"`, `"onnx"` or `"safetensors"`.
            inputs: Example inputs of `forward`; by default `example_input_array`.
            batch: A fixed batch size; any size by default.

        Returns:
            The path.
        """
        from jaxlightning.export import export_module

        return export_module(self, path, format=format, inputs=inputs, batch=batch)

    @property
    def strict_loading(self) -> bool:
        """Whether checkpoints must fit exactly."""
        return True if self._strict_loading is None else self._strict_loading

    @strict_loading.setter
    def strict_loading(self, strict: bool) -> None:
        self._strict_loading = strict

    @restricted_classmethod
    def load_from_checkpoint(
        cls,
        checkpoint_path: str | os.PathLike[str],
        map_location: Any = None,
        hparams_file: str | os.PathLike[str] | None = None,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Self:
        """Rebuilds a module from its saved hyper-parameters and weights; needs no example input.

        Args:
            checkpoint_path: A checkpoint directory.
            map_location: Must be None: arrays go to the default device.
            hparams_file: A YAML or CSV file with hyper-parameters, in place of the saved ones.
            strict: Whether paths must fit exactly.
            **kwargs: Arguments of `__init__` that override the saved ones.

        Returns:
            The module, with its variables.

        Raises:
            FileNotFoundError: If there is no such checkpoint.
            RuntimeError: If the weights do not fit.
        """
        from jaxlightning.checkpoint import load_module_from_checkpoint

        if map_location is not None:
            raise NotImplementedError("`map_location` has no meaning here: arrays are restored on the default device.")
        return load_module_from_checkpoint(cls, checkpoint_path, hparams_file=hparams_file, strict=strict, **kwargs)


def _place(tree: Mapping[str, Any], flat: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{prefix}.{key}" if prefix else key
        if isinstance(value, Mapping):
            out[key] = _place(value, flat, path)
        elif path in flat:
            out[key] = flat[path]
    return out
