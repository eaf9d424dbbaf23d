"""Rates that this machine's cores reach, measured in less than a second with all at work.

In a process of its own: NumPy's library starts threads, and the process that asks may fork later."""

import functools
import os
import sys
import timeit

import numpy as np
from numpy.typing import NDArray

from sipipe.tools.provenance import output

READ = 5120
WIDTH = 1024
TRIES = 4
"""Edges of the matrix that is read, larger than caches, and of those that are multiplied."""


@functools.cache
def measured() -> dict[str, float]:
    """One core's share of memory bandwidth and of float32's products, as
    :attr:`sipipe.tools.planner.hardware.Assumed.given` names them; empty where it cannot be measured."""
    answer = output(sys.executable, "-P", "-m", "sipipe.tools.planner.this_cpu") or ""
    try:
        read, multiplied = (float(each) / len(os.sched_getaffinity(0)) for each in answer.split())
    except ValueError:
        return {}
    return {"device.cpu.memory_gbs": read, "device.cpu.bf16_tflops": multiplied}


def _seconds(left: NDArray[np.float32], right: NDArray[np.float32]) -> float:
    return min(timeit.repeat(lambda: left @ right, number=1, repeat=TRIES))


if __name__ == "__main__":
    weights = np.ones((READ, READ), np.float32)
    part = weights[:WIDTH, :WIDTH].copy()
    print(weights.nbytes / _seconds(weights, weights[0]) / 1e9)
    print(2 * WIDTH**3 / _seconds(part, part) / 1e12)
