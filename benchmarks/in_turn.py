"""Engines that stay and answer in turn, so that a machine whose speed drifts favours none.

``python -m benchmarks.in_turn FD`` is one of them: :mod:`benchmarks.measure` with a job that has
``turn``, descriptors of two pipes: from which it is this engine's turn, and to the next engine's.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from typing import Any

from benchmarks.harness import of_the_checkout
from benchmarks.measure import Job, measure
from benchmarks.turns import turn
from sipipe.ipc.sockets import own_sockets
from sipipe.tools.child import answer, measured


def measured_in_turn(
    jobs: Mapping[str, Mapping[str, Any]],
    module: str = "benchmarks.in_turn",
    env: Mapping[str, Mapping[str, str]] | None = None,
) -> dict[str, Any]:
    """Run ``jobs``, by side and with their settings. They must have equally many loads.

    ``env``: of sides that have more than this process's. Returns for each side what ``module``
    answers: what :func:`benchmarks.measure.measure` does, or what another one says that takes
    :func:`~benchmarks.turns.turn` s.
    """
    module = of_the_checkout(module)
    pipes = [os.pipe() for _ in jobs]
    turns = [(pipes[i][0], pipes[(i + 1) % len(pipes)][1]) for i in range(len(pipes))]
    # wait: none, a byte into an empty pipe; nobody
    os.write(pipes[0][1], b".")
    with own_sockets(), ThreadPoolExecutor(len(jobs)) as pool:
        asked = {
            side: pool.submit(
                measured,
                side,
                {**job, "turn": ends},
                module,
                descriptors=ends,
                env=(env or {}).get(side),
            )
            for (side, job), ends in zip(jobs.items(), turns, strict=True)
        }
        for first in as_completed(asked.values()):
            # What one raises ends the others.
            first.result()  # wait: none, it has ended; nobody
        # wait: none, all have ended; nobody
        return {side: result.result() for side, result in asked.items()}


def _answered(job: dict[str, Any]) -> dict[str, Any]:
    turns = job.pop("turn")
    return measure(Job(**job), partial(turn, *turns))


if __name__ == "__main__":
    answer(_answered)
