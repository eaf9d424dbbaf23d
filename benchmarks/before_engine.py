"""One engine of :mod:`benchmarks.before`, started by ``LLM(...)``, a door that every commit has.

``python -m benchmarks.before_engine FD`` with the sources of a commit before this checkout's. Of
SiPipe it uses :func:`sipipe.tools.child.answer` alone, and errors.
"""

from __future__ import annotations

import random
import time
from functools import partial
from typing import Any

import psutil

from benchmarks.turns import turn
from sipipe.tools.child import answer

SETTLED = 15.0
"""Seconds in which a spare sampler, which starts five after the others, has compiled."""


def _measure(job: dict[str, Any]) -> dict[str, Any]:
    """``start``, seconds; and for each of ``loads`` (a way of ``sampling``, requests at once, their new
    tokens) ``speeds``, tokens/s, and ``cpu``, milliseconds of CPU time that all processes of the
    engine spent a token: as many as ``repeat``."""
    from vllm import LLM, SamplingParams

    mine = partial(turn, *job["turn"])

    def run(way: str, count: int, tokens: int) -> tuple[float, float]:
        params = [
            SamplingParams(**job["sampling"][way], seed=seed, max_tokens=tokens, ignore_eos=True)
            for seed in range(count)
        ]
        spent, began = _cpu_seconds(), time.perf_counter()
        llm.generate(prompts[:count], params, use_tqdm=False)
        seconds = time.perf_counter() - began
        total = count * tokens
        return total / seconds, 1e3 * (_cpu_seconds() - spent) / total

    with mine():
        began = time.perf_counter()
        llm = LLM(
            distributed_executor_backend="sipipe.Executor", enforce_eager=False, **job["engine"]
        )
        start = time.perf_counter() - began
        words = range(3, llm.llm_engine.vllm_config.model_config.get_vocab_size())
        chooser = random.Random(0)
        most = max(count for _, count, _ in job["loads"])
        prompts = [{"prompt_token_ids": chooser.choices(words, k=16)} for _ in range(most)]
        for way, count, _ in job["loads"]:
            run(way, count, 3)
        time.sleep(SETTLED)  # wait: SETTLED; nobody
    found = []
    for _ in range(job["repeat"]):
        for load in job["loads"]:
            with mine():
                found.append(run(*load))
    with mine():  # nobody ends beside another's last answers
        pass
    loads = len(job["loads"])
    return {
        "start": start,
        "speeds": [[speed for speed, _ in found[load::loads]] for load in range(loads)],
        "cpu": [[ms for _, ms in found[load::loads]] for load in range(loads)],
    }


def _cpu_seconds() -> float:
    me = psutil.Process()
    times = [process.cpu_times() for process in (me, *me.children(recursive=True))]
    return float(sum(spent.user + spent.system for spent in times))


if __name__ == "__main__":
    answer(_measure)
