"""Numbers with units as people type them (``50ms``, ``400G``), as types of argparse options."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from typing import TypeVar

__all__ = [
    "cache_type",
    "count",
    "count_from_zero",
    "fraction",
    "gigabits_per_second",
    "positive",
    "seconds",
]

Value = TypeVar("Value")

_NUMBER = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?)\s*([A-Za-z/µ]*)\s*")
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6}
_BITS = {"": 1.0, "g": 1.0, "gb/s": 1.0, "gbps": 1.0, "gbit/s": 1.0, "t": 1e3, "tb/s": 1e3}
_CACHE_TYPES = {"auto": None, "fp8": 1.0}


def _checked(
    convert: Callable[[str], Value], allowed: str, valid: Callable[[Value], bool] = lambda _: True
) -> Callable[[str], Value]:
    """``convert``, whose ValueError or KeyError, or result that is not ``valid``, is refused."""

    def parse(text: str) -> Value:
        try:
            value = convert(text)
            if valid(value):
                return value
        except (ValueError, KeyError):
            pass
        raise argparse.ArgumentTypeError(f"expected {allowed}, not {text[:60]!r}")

    return parse


def _with_unit(units: dict[str, float]) -> Callable[[str], float]:
    def convert(text: str) -> float:
        match = _NUMBER.fullmatch(text)
        return float(match[1]) * units[match[2].lower()] if match else math.nan

    return convert


seconds = _checked(
    _with_unit(_SECONDS),
    "a positive duration with its unit such as 50ms or 0.05s",
    lambda value: value > 0,
)
"""A duration in seconds from ``"50ms"``, ``"0.05s"`` or ``"200us"``; the unit is required."""
gigabits_per_second = _checked(
    _with_unit(_BITS), "a positive network rate in Gb/s such as 400G", lambda value: value > 0
)
"""A network rate in Gb/s from ``"400G"``, ``"400Gb/s"`` or ``"400"``."""
count = _checked(int, "a whole number of 1 or more", lambda value: value >= 1)
count_from_zero = _checked(int, "a whole number of 0 or more", lambda value: value >= 0)
fraction = _checked(float, "a share above 0 and up to 1, such as 0.9", lambda x: 0 < x <= 1)
positive = _checked(float, "a number above 0", lambda value: 0 < value < math.inf)
cache_type = _checked(_CACHE_TYPES.__getitem__, "auto or fp8")
"""Bytes per cached element; None for ``auto``, as the activations."""
