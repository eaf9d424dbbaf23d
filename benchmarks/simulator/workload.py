"""Arrival traces: when requests come and how long they are, recorded so that a run can be repeated.

A trace is kept at a mean rate of one request per second and replayed at any other by
:func:`at_rate`; its file is a CSV table with the columns ``arrival_s, prompt, output``. Those in
``benchmarks/traces`` are ``poisson_trace(600, 1)`` and ``bursty_trace(600, 2)``.
"""

from __future__ import annotations

import csv
import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sipipe.errors import ConfigError

COLUMNS = ("arrival_s", "prompt", "output")


class Arrival(NamedTuple):
    """One request of a trace."""

    time: float
    """Seconds after the start of the trace."""
    prompt: int
    """Prompt tokens."""
    output: int
    """Tokens it generates."""


def poisson_trace(requests: int, seed: int, lengths: str = "sharegpt") -> list[Arrival]:
    """Poisson arrivals, one a second on average, with lengths of :data:`LENGTHS`."""
    rng = np.random.default_rng(seed)
    return _trace(rng.exponential(1.0, requests), rng, lengths)


def bursty_trace(
    requests: int, seed: int, shape: float = 0.25, lengths: str = "sharegpt"
) -> list[Arrival]:
    """Gamma-distributed gaps with the same mean; a ``shape`` below 1 is burstier than Poisson.

    0.25 has twice the coefficient of variation of Poisson arrivals.
    """
    rng = np.random.default_rng(seed)
    return _trace(rng.gamma(shape, 1.0 / shape, requests), rng, lengths)


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


def shrunk(trace: Sequence[Arrival], times: int) -> list[Arrival]:
    """For machines that could not take it: outputs so many times shorter, and prompts cut at
    4,096 / ``times`` tokens."""
    return [
        each._replace(prompt=min(each.prompt, 4096 // times), output=max(4, each.output // times))
        for each in trace
    ]


def write_timed_trace(trace: Sequence[Arrival], path: Path) -> None:
    """For ``--trace-file`` of ``sipipe bench`` (vLLM's ``timed_trace``); no prompts are alike."""
    chunk, numbers = 16, itertools.count()  # vLLM makes up a chunk of the prompt for each number
    with path.open("w") as file:
        for time, prompt, output in trace:
            ids = list(itertools.islice(numbers, -(-prompt // chunk)))
            line = {"timestamp": time, "input_length": prompt, "output_length": output}
            file.write(json.dumps(line | {"hash_ids": ids}) + "\n")


class Lengths(NamedTuple):
    """Log-normal numbers of tokens: mean and standard deviation of the logarithms of prompts and
    of outputs, and between which they are cut."""

    prompt: tuple[float, float]
    output: tuple[float, float]
    least: int
    most: int
    source: str


LENGTHS = {
    "sharegpt": Lengths(
        (math.log(78.2), 1.3),
        (math.log(248.4), 0.9),
        4,
        1024,
        "means of 161 and 338 tokens are ShareGPT's by vLLM's paper (SOSP 2023, figure 11), and the "
        "planner's; deviations of 217 and 272 tokens are assumptions",
    ),
    "burstgpt": Lengths(
        (5.976, 1.470),
        (5.597, 0.887),
        11,
        2048,
        "mean and deviation of the logarithms of the first 38 answered requests of BurstGPT_1.csv "
        "(conversations, CC BY 4.0), whose means are 755 and 354 tokens; as drawn and cut "
        "here 689 and 389 with deviations of 690 and 371; the rest of the trace was not looked at",
    ),
}


def _trace(gaps: np.ndarray, rng: np.random.Generator, lengths: str) -> list[Arrival]:
    times = np.cumsum(gaps * (len(gaps) / gaps.sum()))
    how = LENGTHS[lengths]
    prompts, outputs = (
        np.exp(rng.normal(mean, deviation, len(gaps))).clip(how.least, how.most).astype(int)
        for mean, deviation in (how.prompt, how.output)
    )
    return [
        Arrival(float(time), int(prompt), int(output))
        for time, prompt, output in zip(times - times[0], prompts, outputs, strict=True)
    ]
