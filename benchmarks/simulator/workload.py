"""Arrival traces: when requests come and how long they are, recorded so that a run can be repeated.

A trace is kept at a mean rate of one request per second and replayed at any other by
:func:`at_rate`; its file is a CSV table with the columns ``arrival_s, prompt, output``. Those in
``benchmarks/traces`` are ``poisson_trace(600, 1)`` and ``bursty_trace(600, 2)``.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sipipe.errors import ConfigError

__all__ = ["Arrival", "at_rate", "bursty_trace", "load_trace", "poisson_trace"]

COLUMNS = ("arrival_s", "prompt", "output")


class Arrival(NamedTuple):
    """One request of a trace."""

    time: float
    """Seconds after the start of the trace."""
    prompt: int
    """Prompt tokens."""
    output: int
    """Tokens it generates."""


def poisson_trace(requests: int, seed: int) -> list[Arrival]:
    """Poisson arrivals, one a second on average, with lengths as in :func:`_lengths`."""
    rng = np.random.default_rng(seed)
    return _trace(rng.exponential(1.0, requests), rng)


def bursty_trace(requests: int, seed: int, shape: float = 0.25) -> list[Arrival]:
    """Gamma-distributed gaps with the same mean; a ``shape`` below 1 is burstier than Poisson.

    0.25 has twice the coefficient of variation of Poisson arrivals.
    """
    rng = np.random.default_rng(seed)
    return _trace(rng.gamma(shape, 1.0 / shape, requests), rng)


def at_rate(trace: Sequence[Arrival], rate: float) -> list[Arrival]:
    """The same requests at ``rate`` a second; ``float("inf")`` sends all at once."""
    return [arrival._replace(time=arrival.time / rate) for arrival in trace]


def load_trace(path: Path) -> list[Arrival]:
    """Read a trace from a CSV file.

    Raises:
        ConfigError: the file is not such a table.
    """
    with path.open(newline="") as file:
        rows = list(csv.reader(file))
    try:
        if tuple(rows[0]) != COLUMNS:
            raise ValueError(f"columns are {rows[0]}")
        return [Arrival(float(time), int(prompt), int(output)) for time, prompt, output in rows[1:]]
    except (ValueError, IndexError) as error:
        raise ConfigError(
            f"{path} is no arrival trace with the columns {', '.join(COLUMNS)}: {error}"
        ) from error


def _trace(gaps: np.ndarray, rng: np.random.Generator) -> list[Arrival]:
    times = np.cumsum(gaps * (len(gaps) / gaps.sum()))
    prompts, outputs = _lengths(len(gaps), rng)
    return [
        Arrival(float(time), int(prompt), int(output))
        for time, prompt, output in zip(times - times[0], prompts, outputs, strict=True)
    ]


def _lengths(requests: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Lengths like ShareGPT's: log-normal between 4 and 1,024 tokens, on average 161 in and 338 out,
    which are the means of the conversations by vLLM's paper (SOSP 2023, figure 11), and the
    planner's; their spreads, 217 and 272 tokens, are assumptions."""
    prompts = np.exp(rng.normal(np.log(78.2), 1.3, requests)).clip(4, 1024)
    outputs = np.exp(rng.normal(np.log(248.4), 0.9, requests)).clip(4, 1024)
    return prompts.astype(int), outputs.astype(int)
