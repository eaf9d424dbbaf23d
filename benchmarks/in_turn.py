"""Engines that stay and answer in turn, so that a machine whose speed drifts favours none.

``python -m benchmarks.in_turn FD`` is one of them: :mod:`benchmarks.measure` with a job that has
``turn``, descriptors of two pipes: from which it is this engine's turn, and to the next engine's.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from benchmarks.harness import of_the_checkout
from benchmarks.measure import Job, measure
from sipipe.errors import SiPipeError
from sipipe.ipc.sockets import own_sockets
from sipipe.tools.child import answer, measured

SPIN = 1.5
"""Seconds after which vLLM's idle processes sleep; for one after their last message they spin."""


MODULE = "benchmarks.in_turn"


def measured_in_turn(
    jobs: Mapping[str, Mapping[str, Any]],
    module: str = MODULE,
    elsewhere: Mapping[str, tuple[str, Mapping[str, str]]] | None = None,
) -> dict[str, Any]:
    """Run ``jobs``, by side and with their settings. They must have equally many loads.

    ``elsewhere``: of sides that another module answers, that one and its environment. Returns for
    each side what ``module`` answers: what :func:`benchmarks.measure.measure` does, or what another
    one says that takes :func:`turn` s.
    """
    here: tuple[str, Mapping[str, str]] = (of_the_checkout(module), {})
    runs = {side: (elsewhere or {}).get(side, here) for side in jobs}
    pipes = [os.pipe() for _ in jobs]
    turns = [(pipes[i][0], pipes[(i + 1) % len(pipes)][1]) for i in range(len(pipes))]
    # wait: none, a byte into an empty pipe; nobody
    os.write(pipes[0][1], b".")
    with own_sockets(), ThreadPoolExecutor(len(jobs)) as pool:
        asked = {
            side: pool.submit(
                measured, side, {**job, "turn": turn}, runs[side][0], kept=turn, env=runs[side][1]
            )
            for (side, job), turn in zip(jobs.items(), turns, strict=True)
        }
        for first in as_completed(asked.values()):
            # What one raises ends the others.
            first.result()  # wait: none, it has ended; nobody
        # wait: none, all have ended; nobody
        return {side: result.result() for side, result in asked.items()}


@contextmanager
def turn(before: int, after: int) -> Iterator[None]:
    """This engine's turn."""
    # wait: none of its own, TIMEOUT of the engine; the one before, or its end
    if not os.read(before, 1):
        raise SiPipeError("the engine that it takes turns with has ended")
    yield
    time.sleep(SPIN)  # wait: SPIN; nobody
    with suppress(BrokenPipeError):  # the first is done
        # wait: none, a byte into an empty pipe; the next engine reads it
        os.write(after, b".")


def _answered(job: dict[str, Any]) -> dict[str, Any]:
    turns = job.pop("turn")
    return measure(Job(**job), partial(turn, *turns))


if __name__ == "__main__":
    answer(_answered)
