"""Numbers with units as people type them (``50ms``, ``400G``), as types of argparse options."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Mapping

__all__ = [
    "cache_type",
    "count",
    "count_from_zero",
    "fraction",
    "gigabits_per_second",
    "positive",
    "seconds",
]

_NUMBER = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?)\s*([A-Za-z/µ]*)\s*")
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6}
_BITS = {"": 1.0, "g": 1.0, "gb/s": 1.0, "gbps": 1.0, "gbit/s": 1.0, "t": 1e3, "tb/s": 1e3}


def _refused(text: str, allowed: str) -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(f"expected {allowed}, not {text[:60]!r}")


def _with_unit(units: Mapping[str, float], allowed: str) -> Callable[[str], float]:
    def parse(text: str) -> float:
        match = _NUMBER.fullmatch(text)
        if match is None or match[2].lower() not in units or float(match[1]) <= 0:
            raise _refused(text, allowed)
        return float(match[1]) * units[match[2].lower()]

    return parse


seconds = _with_unit(_SECONDS, "a positive duration with its unit such as 50ms or 0.05s")
"""A duration in seconds from ``"50ms"``, ``"0.05s"`` or ``"200us"``; the unit is required."""
gigabits_per_second = _with_unit(_BITS, "a positive network rate in Gb/s such as 400G")
"""A network rate in Gb/s from ``"400G"``, ``"400Gb/s"`` or ``"400"``."""


def _whole(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least:
            raise _refused(text, f"a whole number of {least} or more")
        return number

    return parse


count = _whole(1)
count_from_zero = _whole(0)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def fraction(text: str) -> float:
    """A share above 0 and up to 1."""
    if not 0 < (number := _number(text)) <= 1:
        raise _refused(text, "a share above 0 and up to 1, such as 0.9")
    return number


def positive(text: str) -> float:
    """A finite number above 0."""
    if not 0 < (number := _number(text)) < math.inf:
        raise _refused(text, "a number above 0")
    return number


def cache_type(text: str) -> float | None:
    """Bytes per cached element; None for ``auto``, as the activations."""
    if text not in ("auto", "fp8"):
        raise _refused(text, "auto or fp8")
    return 1.0 if text == "fp8" else None
