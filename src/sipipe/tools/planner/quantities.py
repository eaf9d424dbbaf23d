"""Numbers with units as people type them: ``50ms``, ``400G``, ``80GB``.

Every parser takes the name of the option, so that its one-line error can say where the value
came from.
"""

from __future__ import annotations

import math
import re
from typing import NoReturn

from sipipe.errors import ConfigError

__all__ = ["count", "fraction", "gigabits_per_second", "seconds"]

_NUMBER = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?)\s*([A-Za-z/µ]*)\s*")
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6}
_BITS = {"": 1.0, "g": 1.0, "gb/s": 1.0, "gbps": 1.0, "gbit/s": 1.0, "t": 1e3, "tb/s": 1e3}


def _refuse(option: str, text: object, allowed: str) -> NoReturn:
    raise ConfigError(f"{option}: expected {allowed}, not {str(text)[:60]!r}")


def seconds(option: str, text: str | float) -> float:
    """A duration in seconds from ``"50ms"``, ``"0.05s"`` or ``"200us"``; the unit is required.

    Raises:
        ConfigError: naming ``option``; not a positive duration with a unit.
    """
    match = _NUMBER.fullmatch(str(text))
    if match is None or match[2].lower() not in _SECONDS or float(match[1]) <= 0:
        _refuse(option, text, "a positive duration with its unit such as 50ms or 0.05s")
    return float(match[1]) * _SECONDS[match[2].lower()]


def gigabits_per_second(option: str, text: str | float) -> float:
    """A network rate in Gb/s from ``"400G"``, ``"400Gb/s"`` or ``"400"``.

    Raises:
        ConfigError: naming ``option``; not a positive rate.
    """
    match = _NUMBER.fullmatch(str(text))
    if match is None or match[2].lower() not in _BITS or float(match[1]) <= 0:
        _refuse(option, text, "a positive network rate in Gb/s such as 400G")
    return float(match[1]) * _BITS[match[2].lower()]


def count(option: str, value: object, *, least: int = 1) -> int:
    """A whole number of ``least`` or more.

    Raises:
        ConfigError: naming ``option``.
    """
    try:
        number = int(str(value))
    except ValueError:
        number = least - 1
    if number < least:
        _refuse(option, value, f"a whole number of {least} or more")
    return number


def fraction(option: str, value: object) -> float:
    """A share above 0 and up to 1.

    Raises:
        ConfigError: naming ``option``.
    """
    try:
        number = float(str(value))
    except ValueError:
        number = math.nan
    if not 0 < number <= 1:
        _refuse(option, value, "a share above 0 and up to 1, such as 0.9")
    return number
