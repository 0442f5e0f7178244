"""Compares the results of two runs: texts and counts exactly, numbers closely."""

from __future__ import annotations

import math
from typing import Any

from conformance.differential.execute import run
from conformance.differential.rules import Rule, reference_config, rules_for
from conformance.differential.sampling import sample
from conformance.differential.sides import LightningSide, OurSide

RELATIVE = 1e-5
ABSOLUTE = 1e-5
"""Both sides compute in float32; a division by three rounds, and clipping by norm adds 1e-6 to the norm."""

_SIDES: dict[str, Any] = {}


def sides() -> tuple[Any, Any]:
    """Return the reference and our side, imported once."""
    if not _SIDES:
        _SIDES.update(reference=LightningSide(), ours=OurSide())
    return _SIDES["reference"], _SIDES["ours"]


def differences(
    seed: int | None = None, config: dict[str, Any] | None = None, rules: list[Rule] | None = None
) -> list[str]:
    """Run a seed, or a configuration, on both sides.

    Args:
        seed: The seed.
        config: A configuration in place of that of the seed.
        rules: The rules to apply, in place of all that concern the configuration.

    Returns:
        A line per difference that no rule accounts for; empty when the sides agree.
    """
    if config is None:
        config = sample(int(seed or 0))
    reference, ours = sides()
    if rules is None:
        rules = rules_for(config)

    def adapt(callbacks: list[Any]) -> list[Any]:
        for rule in rules:
            if rule.adapt is not None:
                callbacks = rule.adapt(callbacks)
        return callbacks

    expected = run(reference, reference_config(config, rules), adapt)
    # The reference's own helpers come first in its list and are not compared.
    extra = len(_added(adapt))
    expected["callbacks"] = _renumbered(expected["callbacks"], extra)
    got = run(ours, config)
    for rule in rules:
        if rule.rewrite is not None:
            rule.rewrite(config, expected, got)
    return list(compare_results(expected, got))


def _added(adapt: Any) -> list[Any]:
    return list(adapt([]))


def _renumbered(callbacks: dict[str, Any], extra: int) -> dict[str, Any]:
    out = {}
    for key, value in callbacks.items():
        index, name = key.split(".", 1)
        if int(index) >= extra:
            out[f"{int(index) - extra}.{name}"] = value
    return out


def compare_results(expected: dict[str, Any], got: dict[str, Any]) -> list[str]:
    """Return a line per difference of two results."""
    lines: list[str] = []
    if expected.get("error") != got.get("error"):
        lines.append(f"error: lightning {expected.get('error')} {_message(expected)}")
        lines.append(f"       jaxlightning {got.get('error')} {_message(got)}")
    lines += compare_events(expected.get("events"), got.get("events"))
    failed = expected.get("error") is not None
    for name in sorted(set(expected) - {"error", "events", "exception"}):
        if name == "weights" and got["counters"].get("global_step") == 0:
            # Ours are made by the first batch that calls a network; those that are there have to be equal.
            expected[name] = (expected[name] or [])[: len(got.get(name) or [])] or None
        if name == "metrics" and failed:
            continue
        if name == "counters" and failed:
            for result in (expected, got):  # a setup that raises leaves the list half filled, or empty
                result[name] = {key: each for key, each in result[name].items() if not key.startswith("num_")}
        walk(name, expected[name], got.get(name), lines)
    return lines


def _message(result: dict[str, Any]) -> str:
    error = result.get("exception")
    return "" if error is None else f"[{str(error)[:160]}]"


def compare_events(expected: Any, got: Any) -> list[str]:
    """Return lines about the first event that differs, with what came before."""
    if expected is None or got is None:
        return []
    for index in range(max(len(expected), len(got))):
        left = expected[index] if index < len(expected) else ("<end>", {})
        right = got[index] if index < len(got) else ("<end>", {})
        lines: list[str] = []
        walk("", left[1], right[1], lines)
        if left[0] != right[0] or lines:
            before = [f"    {text}" for text, _ in expected[max(0, index - 4) : index]]
            after = [f"    L+ {_text(expected, i)} | J+ {_text(got, i)}" for i in range(index + 1, index + 4)]
            return [f"event {index}:", *before, f"    L  {left[0]}", f"    J  {right[0]}", *lines, *after]
    return []


def _text(events: list[tuple[str, Any]], index: int) -> str:
    return events[index][0] if index < len(events) else "<end>"


def walk(path: str, expected: Any, got: Any, lines: list[str]) -> None:
    """Collect the differences of two nested values.

    Args:
        path: Where the values stand.
        expected: Lightning's.
        got: Ours.
        lines: Where to add a line per difference.
    """
    if isinstance(expected, dict) and isinstance(got, dict):
        if list(expected) != list(got):
            missing, extra = sorted(set(expected) - set(got)), sorted(set(got) - set(expected))
            if missing or extra:
                lines.append(f"  {path}: missing {missing}, not expected {extra}")
        for key in expected:
            if key in got:
                walk(f"{path}.{key}", expected[key], got[key], lines)
    elif isinstance(expected, list) and isinstance(got, list):
        if len(expected) != len(got):
            lines.append(f"  {path}: {len(expected)} items {expected} but {len(got)} {got}"[:600])
            return
        for index, (left, right) in enumerate(zip(expected, got, strict=True)):
            walk(f"{path}[{index}]", left, right, lines)
    elif not same(expected, got):
        lines.append(f"  {path}: lightning {expected!r}, jaxlightning {got!r}")


def same(expected: Any, got: Any) -> bool:
    """Say whether two plain values are equal, or close if both are numbers."""
    left, right = _as_number(expected), _as_number(got)
    if left is None or right is None:
        return bool(expected == got)
    if math.isnan(left) or math.isnan(right):
        return math.isnan(left) and math.isnan(right)
    return math.isclose(left, right, rel_tol=RELATIVE, abs_tol=ABSOLUTE)


def _as_number(value: Any) -> float | None:
    if isinstance(value, bool) or value is None:
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
