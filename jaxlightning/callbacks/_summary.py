"""The table of a module's networks: what they are, how many parameters they have and where."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxlightning.callbacks._summary_sizes import Sizes, measure_sizes, nnx_layer_types

_UNITS = (" ", "K", "M", "B", "T")
_UNKNOWN = "?"


@dataclass(frozen=True, kw_only=True)
class LayerRow:
    """One line of the table.

    Attributes:
        name: Path on the module, for example `"encoder.Dense_0"`.
        layer_type: Class name; empty where a layer does not tell.
        num_parameters: Number of parameters below it, None while they do not exist.
        num_bytes: Their size.
        arrays: Its own parameter arrays with their shapes, or how many arrays there are below it.
        mode: `"train"` or `"eval"`.
        in_size: Shape of its input, None where not known.
        out_size: Shape of its output, None where not known.
    """

    name: str
    layer_type: str
    num_parameters: int | None
    num_bytes: int | None
    arrays: str
    mode: str
    in_size: Any = None
    out_size: Any = None


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A module's networks as rows and totals; `str()` of it is the table.

    Attributes:
        rows: The lines, a network before its layers.
        total_parameters: Number of all parameters that exist.
        trainable_parameters: Number of those that an optimizer owns.
        model_bytes: Size of all parameters.
        variables: For each other collection (batch statistics ...) its number of values.
        total_training_modes: How many networks are in which mode.
        missing: Networks that have no variables yet.
    """

    rows: tuple[LayerRow, ...]
    total_parameters: int
    trainable_parameters: int
    model_bytes: int
    variables: Mapping[str, int] = field(default_factory=dict)
    total_training_modes: Mapping[str, int] = field(default_factory=dict)
    missing: tuple[str, ...] = ()

    @property
    def layer_names(self) -> list[str]:
        """The name of each row."""
        return [row.name for row in self.rows]

    @property
    def layer_types(self) -> list[str]:
        """The class name of each row."""
        return [row.layer_type for row in self.rows]

    @property
    def param_nums(self) -> list[int | None]:
        """The number of parameters of each row."""
        return [row.num_parameters for row in self.rows]

    @property
    def in_sizes(self) -> list[Any]:
        """The input shape of each row."""
        return [row.in_size for row in self.rows]

    @property
    def out_sizes(self) -> list[Any]:
        """The output shape of each row."""
        return [row.out_size for row in self.rows]

    @property
    def model_size(self) -> float:
        """Size of all parameters in MB (10**6 bytes)."""
        return self.model_bytes * 1e-6

    def columns(self) -> dict[str, list[str]]:
        """Return the cells of the table by their column's header."""
        columns: dict[str, list[str]] = {
            "": [str(i) for i in range(len(self.rows))],
            "Name": self.layer_names,
            "Type": self.layer_types,
            "Params": [_UNKNOWN if n is None else human_readable_count(n).strip() for n in self.param_nums],
            "Size": [_UNKNOWN if row.num_bytes is None else human_readable_bytes(row.num_bytes) for row in self.rows],
            "Mode": [row.mode for row in self.rows],
            "Arrays": [row.arrays for row in self.rows],
        }
        if any(row.in_size is not None for row in self.rows):
            columns["In sizes"] = [_UNKNOWN if s is None else str(s) for s in self.in_sizes]
            columns["Out sizes"] = [_UNKNOWN if s is None else str(s) for s in self.out_sizes]
        return columns

    def totals(self) -> list[tuple[str, str]]:
        """Return the lines below the table, each as a number and what it counts."""
        modes = self.total_training_modes
        return [
            (human_readable_count(self.trainable_parameters), "Trainable params"),
            (human_readable_count(self.total_parameters - self.trainable_parameters), "Non-trainable params"),
            (human_readable_count(self.total_parameters), "Total params"),
            (f"{self.model_size:,.3f}", "Total estimated model params size (MB)"),
            *((human_readable_count(n), f"Values in `{name}`") for name, n in self.variables.items() if name != "nnx"),
            *((human_readable_count(n), "Other NNX values") for name, n in self.variables.items() if name == "nnx"),
            (str(modes.get("train", 0)), "Networks in train mode"),
            (str(modes.get("eval", 0)), "Networks in eval mode"),
        ]

    def __str__(self) -> str:
        lines = _table(self.columns())
        rule = "-" * max(map(len, lines))
        text = [lines[0], rule, *lines[1:], rule, *(f"{number:<10}{what}" for number, what in self.totals())]
        if self.missing:
            text.append(f"Not counted, because no step has called them yet: {', '.join(self.missing)}")
        return "\n".join(line.rstrip() for line in text)


def check_depth(max_depth: Any) -> None:
    """Refuse a depth that means nothing.

    Raises:
        ValueError: It is not an int >= -1.
    """
    if not isinstance(max_depth, int) or isinstance(max_depth, bool) or max_depth < -1:
        raise ValueError(f"`max_depth` can be -1, 0 or > 0, got {max_depth}.")


def summarize(
    module: Any, max_depth: int = 1, *, optimizers: Sequence[Any] = (), modes: Mapping[str, str] | None = None
) -> Summary:
    """Summarize the networks of a module that a Trainer runs.

    Args:
        module: The module, attached to an engine.
        max_depth: How many levels of layers are shown: 1 for the networks, -1 for all, 0 for none.
        optimizers: Handles of the optimizers; a parameter is trainable when one of them owns it. Without any, all are.
        modes: For each network the mode to show, `"train"` or `"eval"`; by default the current one.

    Returns:
        The summary.

    Raises:
        ValueError: `max_depth` is not an int >= -1.
        RuntimeError: The module is not attached to a Trainer.
    """
    check_depth(max_depth)
    engine = getattr(module, "_engine", None)
    if engine is None:
        raise RuntimeError(
            f"`{type(module).__name__}` has no networks bound yet: a Trainer does that in `fit`, `validate`, `test` "
            "or `predict`, and `module.init(batch)` does it by hand."
        )
    networks = engine.networks()
    sizes = measure_sizes(module, [network.name for network in networks]) if max_depth else {}
    types = nnx_layer_types(engine) if max_depth else {}
    rows: list[LayerRow] = []
    total = trainable = size = 0
    variables: dict[str, int] = {}
    shown_modes = {network.name: network.mode for network in networks} | dict(modes or {})
    for network in networks:
        leaves = dict(_leaves(network.params or {}, (network.name,)))
        total += sum(map(_count, leaves.values()))
        size += sum(map(_bytes, leaves.values()))
        trainable += sum(
            _count(leaf)
            for path, leaf in leaves.items()
            if _is_owned("/".join(path), optimizers) and not engine.is_frozen("/".join(path))
        )
        for collection, tree in (network.variables or {}).items():
            number = sum(_count(leaf) for _, leaf in _leaves({"": tree}, ()))
            variables[collection] = variables.get(collection, 0) + number
        rows.extend(_rows(network, shown_modes[network.name], max_depth, sizes, types))
    return Summary(
        rows=tuple(rows),
        total_parameters=total,
        trainable_parameters=trainable,
        model_bytes=size,
        variables={name: number for name, number in variables.items() if number},
        total_training_modes=Counter(shown_modes[network.name] for network in networks),
        missing=tuple(n.name for n in networks if n.params is None and n.variables is None),
    )


def human_readable_count(number: int) -> str:
    """Abbreviate a number of things, for example 1234 as `"1.2 K"`.

    Args:
        number: A number >= 0.

    Returns:
        The number with the unit K, M, B or T; a blank stands in the unit's place below one thousand.
    """
    groups = min(max(math.ceil(len(str(number)) / 3), 1), len(_UNITS))
    if groups == 1:
        return f"{number} {_UNITS[0]}"
    scaled = number / 1000 ** (groups - 1)
    text = f"{int(scaled):,d}" if scaled >= 100 else f"{scaled:,.1f}"
    return f"{text} {_UNITS[groups - 1]}"


def human_readable_bytes(number: int) -> str:
    """Abbreviate a number of bytes in steps of 1000, for example 52_000 as `"52.0 kB"`."""
    if number < 1000:
        return f"{number} B"
    power = min(int(math.log10(number) // 3), 4)
    return f"{number / 1000**power:.1f} {' kMGT'[power]}B"


# rows


def _rows(
    network: Any, mode: str, max_depth: int, sizes: Mapping[str, Sizes], types: Mapping[str, str]
) -> list[LayerRow]:
    if max_depth == 0:
        return []
    found: list[LayerRow] = []

    def visit(name: str, tree: Any, depth: int, layer_type: str) -> None:
        known = sizes.get(name)
        leaves = dict(_leaves(tree or {}, ()))
        found.append(
            LayerRow(
                name=name,
                layer_type=known.layer_type if known is not None and depth > 1 else types.get(name, layer_type),
                num_parameters=None if tree is None else sum(map(_count, leaves.values())),
                num_bytes=None if tree is None else sum(map(_bytes, leaves.values())),
                arrays="" if tree is None else _describe(tree, leaves),
                mode=mode,
                in_size=None if known is None else known.in_size,
                out_size=None if known is None else known.out_size,
            )
        )
        if max_depth != -1 and depth >= max_depth:
            return
        # called layers in the order of their calls: those without parameters (dropout ...) are known only from there,
        # and a parameter tree is sorted by name
        below = len(name) + 1
        known_layers = (*sizes, *types)
        called = [other[below:].partition(".")[0] for other in known_layers if other.startswith(f"{name}.")]
        stored = sorted((str(key) for key, value in (tree or {}).items() if isinstance(value, Mapping)), key=_natural)
        children = dict.fromkeys([*called, *stored])
        for key in children:
            subtree = (tree or {}).get(key, {})
            visit(f"{name}.{key}", subtree, depth + 1, _type_from_name(key))

    visit(network.name, network.params, 1, network.type_name)
    return found


def _describe(tree: Any, leaves: Mapping[tuple[str, ...], Any]) -> str:
    own = {path[0]: leaf for path, leaf in leaves.items() if len(path) == 1}
    if own and len(own) == len(leaves):
        return " ".join(f"{name}{list(leaf.shape)}" for name, leaf in own.items())
    return f"{len(leaves)} arrays" if leaves else ""


def _natural(key: str) -> list[tuple[int, str]]:
    """Sort key that puts `Dense_10` after `Dense_9`."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", key) if part]


def _type_from_name(key: str) -> str:
    """Return the class of a linen layer that was named automatically (`Dense_0`), else nothing."""
    match = re.fullmatch(r"([A-Z]\w*?)_\d+", key)
    return "" if match is None else match.group(1)


def _table(columns: Mapping[str, Sequence[str]]) -> list[str]:
    widths = [max([len(header), *map(len, cells)]) for header, cells in columns.items()]
    lines = [list(columns), *map(list, zip(*columns.values(), strict=True))]
    return [" | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]


def _leaves(tree: Any, path: tuple[str, ...]) -> list[tuple[tuple[str, ...], Any]]:
    if isinstance(tree, Mapping):
        return [leaf for key, value in tree.items() for leaf in _leaves(value, (*path, str(key)))]
    return [(path, tree)] if hasattr(tree, "shape") else []


def _count(leaf: Any) -> int:
    return int(math.prod(leaf.shape))


def _bytes(leaf: Any) -> int:
    return int(math.prod(leaf.shape)) * int(leaf.dtype.itemsize)


def _is_owned(path: str, optimizers: Sequence[Any]) -> bool:
    return not optimizers or any(handle.owns is None or handle.owns.matches(path) for handle in optimizers)
