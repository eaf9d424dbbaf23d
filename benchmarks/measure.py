"""Measures one engine: start-up, and tokens per second for each way of sampling.

Run as a process of its own per side (``python -m benchmarks.measure FD``), because an engine
leaves global state behind. It reads a :class:`Job` as JSON from stdin and prints what
:func:`measure` returns as JSON on stdout; the engine's log goes to stderr.

Who runs here
    The main thread measures. Another one sleeps on the socket ``FD``, whose other end is the
    parent's, and kills this process's group, with the engine in it, when the parent is gone.
"""

import dataclasses
import os
import random
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import psutil

from sipipe.tools.child import answer
from sipipe.tools.load import SAMPLING


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One side of a comparison."""

    argv: list[str]
    """``MODEL`` and vLLM's engine options."""
    settings: dict[str, Any] | None
    """SiPipe's settings; None: stock vLLM."""
    sampling: list[str]
    requests: int | list[int]
    """Requests sent at once; where there are several numbers, each is a load of its own."""
    prompt_tokens: int
    tokens: int
    """New tokens of each request."""
    repeat: int = 3


def measure(
    job: Job, turn: Callable[[], AbstractContextManager[None]] = nullcontext
) -> dict[str, Any]:
    """Start the engine, warm it up, and run the job's requests.

    ``turn``: within it the engine starts, answers all loads once, and ends.

    Returns ``startup_seconds``, ``kv_tokens`` that the KV cache holds, and ``tokens_per_second``,
    ``busy``, which share of the machine's CPU time was spent by anybody meanwhile, ``waited``, how many
    of the engine's threads waited for a core on average, ``ttft``, seconds to the first token of each
    request, and ``spans`` of the monotonic clock, ns: for each load (a way of sampling, as in "greedy", or with a number of
    requests, as in "greedy, 4 at once") a list with an entry per repetition.
    """
    from vllm import SamplingParams

    counts = [job.requests] if isinstance(job.requests, int) else job.requests
    loads = {
        way if len(counts) == 1 else f"{way}, {count} at once": (way, count)
        for way in job.sampling
        for count in counts
    }

    first: dict[str, list[list[float]]] = {load: [] for load in loads}

    def run(load: str, tokens: int) -> float:
        way, count = loads[load]
        # Each request draws from its own seed, so that both sides finish the same work.
        params = [
            SamplingParams(**SAMPLING[way], seed=i, max_tokens=tokens, ignore_eos=True)
            for i in range(count)
        ]
        start = time.perf_counter()
        outputs = llm.generate(prompts[:count], params, use_tqdm=False)
        seconds = time.perf_counter() - start
        made = sum(len(output.outputs[0].token_ids) for output in outputs)
        assert made == count * tokens
        first[load].append([output.metrics.first_token_latency for output in outputs])
        return made / seconds

    with turn():
        began = time.perf_counter()
        llm = started(job)
        startup = time.perf_counter() - began
        words = range(3, llm.llm_engine.vllm_config.model_config.get_vocab_size())
        chooser = random.Random(0)
        prompts = [
            {"prompt_token_ids": chooser.choices(words, k=job.prompt_tokens)}
            for _ in range(max(counts))
        ]
        for load in loads:
            run(load, min(job.tokens, 3))
        # Once as it will be measured: SiPipe's scheduler learns from it how many microbatches pay.
        run(next(iter(loads)), min(job.tokens, 16))
    figures: dict[str, list[float]] = {load: [] for load in loads}
    busy: dict[str, list[float]] = {load: [] for load in loads}
    waited: dict[str, list[float]] = {load: [] for load in loads}
    spans: dict[str, list[tuple[int, int]]] = {load: [] for load in loads}
    for _ in range(job.repeat):
        with turn():
            for load in loads:
                before, began_ns, waits = psutil.cpu_times(), time.monotonic_ns(), _waited()
                figures[load].append(run(load, job.tokens))
                spans[load].append((began_ns, time.monotonic_ns()))
                waited[load].append((_waited() - waits) / (spans[load][-1][1] - began_ns))
                spent = [now - then for now, then in zip(psutil.cpu_times(), before, strict=True)]
                free = psutil.cpu_times()._make(spent)
                busy[load].append(1 - (free.idle + free.iowait) / sum(spent[:8]))
    with turn():  # nobody ends beside another's last answers
        pass
    cache = llm.llm_engine.vllm_config.cache_config
    return {
        "startup_seconds": startup,
        "kv_tokens": cache.num_gpu_blocks * cache.block_size,
        "tokens_per_second": figures,
        "busy": busy,
        "waited": waited,
        "ttft": {load: times[-job.repeat :] for load, times in first.items()},
        "spans": spans,
    }


def _waited() -> int:
    """Nanoseconds for which threads of the engine could have run and had no core, up to now."""
    engine = [os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))]
    tasks = (task for pid in engine for task in Path(f"/proc/{pid}/task").glob("*/schedstat"))
    total = 0
    for task in tasks:
        with suppress(OSError):  # it has ended
            total += int(task.read_text().split()[1])
    return total


def started(job: Job) -> Any:
    """vLLM's ``LLM`` with the job's engine."""
    from vllm import LLM, EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from sipipe.cores import equal_shares, this_machine
    from sipipe.engine.setup.record import BIND
    from sipipe.engine.start.arguments import begin, parse_engine_args

    if job.settings is None:
        begin()
        parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
        args = parser.parse_args(["--model", *job.argv])
    else:  # compiled unless the job says otherwise, as stock vLLM is
        args = parse_engine_args(["--no-enforce-eager", *job.argv], job.settings)
    config = EngineArgs.from_cli_args(args).create_engine_config()
    if job.settings is None:
        workers = config.parallel_config.world_size
        os.environ.setdefault(BIND, equal_shares(this_machine(), workers))
    return LLM.from_engine_args(EngineArgs.from_cli_args(args))


if __name__ == "__main__":
    answer(lambda job: measure(Job(**job)))
