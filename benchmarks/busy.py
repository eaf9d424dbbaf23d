"""How busy this machine is while something is measured."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psutil

from benchmarks.pictures import BUSY
from sipipe.tools.provenance import output

EVERY = 0.2
"""Seconds between two looks."""
LOOKS = 60
"""Of a span's looks as many are kept, each the mean of some that follow one another."""
_CSV = "--format=csv,noheader,nounits"

Look = tuple[float, dict[str, float]]
"""When on the monotonic clock, and what was busy by then since the look before, percent."""


@contextmanager
def utilization() -> Iterator[list[Look]]:
    """Looks at the CPUs and the GPUs (where ``nvidia-smi`` tells), whoever uses them."""
    found: list[Look] = []
    done = threading.Event()

    def look() -> None:
        while not done.wait(EVERY):  # wait: EVERY; the block's end
            seen = {"cpu": psutil.cpu_percent()}
            gpus = output("nvidia-smi", "--query-gpu=utilization.gpu", _CSV) or ""
            # Under MIG, "[N/A]".
            if numbers := [float(word) for word in gpus.split() if word.isdecimal()]:
                seen["gpu"] = sum(numbers) / len(numbers)
            found.append((time.monotonic(), seen))

    psutil.cpu_percent()
    thread = threading.Thread(target=look, name="Utilization")
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join()  # wait: EVERY, and 20 s for nvidia-smi; its end


def within(looks: Sequence[Look], span: Sequence[float]) -> dict[str, Any]:
    """By kind what was busy within a span of the monotonic clock, a figure each ``every_s``."""
    seen = [busy for when, busy in looks if span[0] <= when <= span[1]]
    every = -(-len(seen) // LOOKS) or 1
    figures = {kind: [busy[kind] for busy in seen if kind in busy] for kind in BUSY}
    means = {kind: _means(figures[kind], every) for kind in BUSY}
    return {**means, "every_s": EVERY * every}


def _means(figures: Sequence[float], count: int) -> list[float]:
    """Of each ``count`` figures that follow one another the mean."""
    parts = (figures[i : i + count] for i in range(0, len(figures), count))
    return [round(sum(part) / len(part), 1) for part in parts]
