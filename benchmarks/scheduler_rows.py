"""What the scheduler takes for a row that decodes: ours beside vLLM's, in CPU time.

    python -m benchmarks.scheduler_rows         # a minute

``schedule`` and ``update_from_output`` are called as EngineCore calls them, with the batches of a full
pipeline out, and make-believe tokens come back. Sequences have come through their prompts before the
clock runs. *Row* is one sequence of one microbatch. vLLM's microbatches are uneven, ours are not, so a
figure is of a row, not of a call. *Of vLLM's own* is the part of our time that is spent in the two
methods of vLLM's that ours inherit and call. They look at every sequence that runs, whatever the
microbatch: eight times for a row, where eight microbatches are out.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.harness import report, spread
from benchmarks.make_model.checkpoint import make_model

BLOCK = 16
"""Tokens of a block of the KV cache, vLLM's default on GPUs."""
PROMPT = 16
"""Tokens of a prompt."""
TURNS = 24
"""Tokens of each sequence that are measured in one repetition, over one and a half blocks."""
SIDES = ("stock", "sipipe", "sipipe ahead")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scheduler_rows")
    parser.add_argument("--repeat", type=int, default=5, help="repetitions (default: 5)")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        model = str(make_model("llama", Path(directory) / "tiny"))
        for stages in (2, 8):
            for sequences in (64, 256, 1024):
                rows += measure(model, stages, sequences, args.repeat)
    report(
        "scheduler_rows",
        "Scheduling a row that decodes, CPU us",
        rows,
        note=f"schedule and update_from_output, {TURNS} tokens of each sequence, {args.repeat} "
        "repetitions, sides in turn; medians and ranges",
        file="scheduler-rows",
    )


def measure(model: str, stages: int, sequences: int, repeat: int) -> list[dict[str, Any]]:
    """Rows of the table for one pipeline: every side's, measured in turn."""
    pipelines = {side: Pipeline(side, model, stages, sequences) for side in SIDES}
    figures: dict[str, list[tuple[float, float]]] = {side: [] for side in SIDES}
    for _ in range(repeat):
        for side, pipeline in pipelines.items():
            figures[side].append(pipeline.measure(TURNS * stages))
    found = []
    for side, pipeline in pipelines.items():
        a_row, _ = zip(*figures[side], strict=True)
        found.append(
            {
                "stages": stages,
                "sequences": sequences,
                "scheduler": side,
                "rows": pipeline.rows // max(1, pipeline.calls),
                "us a row": spread(a_row),
                "of stock": spread(
                    [
                        mine / stock
                        for (mine, _), (stock, _) in zip(
                            figures[side], figures["stock"], strict=True
                        )
                    ]
                ),
                "of vLLM's own": None
                if side == "stock"
                else spread([inside for _, inside in figures[side]]),
            }
        )
    return found


class Clock:
    """CPU time of this thread that is spent in some functions."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, with its time counted."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.thread_time() - began

        return timed


class Pipeline:
    """A scheduler with ``stages`` batches out, and a model that answers with one token a row."""

    def __init__(self, side: str, model: str, stages: int, sequences: int) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.core.sched.scheduler import Scheduler

        from sipipe.engine.scheduling.scheduler import AsyncPipelineScheduler, PipelineScheduler

        made = {
            "stock": Scheduler,
            "sipipe": PipelineScheduler,
            "sipipe ahead": AsyncPipelineScheduler,
        }[side]
        ahead = int(made is AsyncPipelineScheduler)
        self._depth = stages + ahead
        config = EngineArgs(
            model=model,
            dtype="float32",
            max_model_len=4096,
            pipeline_parallel_size=stages,
            distributed_executor_backend="mp",
            max_num_seqs=sequences,
            max_num_batched_tokens=8192,
            enforce_eager=True,
        ).create_engine_config()
        self._scheduler = self._make(made, config, ahead, sequences)
        self._clock = Clock()
        self._schedule = self._clock.around(self._scheduler.schedule)
        self._update = self._clock.around(self._scheduler.update_from_output)
        self._out: deque[Any] = deque()
        self.rows = 0
        """Rows scheduled since the clock ran first."""
        self.calls = 0
        """Microbatches with rows since then."""
        for number in range(sequences):
            self._scheduler.add_request(_request(number))
        # Through the prompts, and until microbatches are as they stay.
        for _ in range(40 * stages):
            self._step()

    def _make(self, made: Any, config: Any, ahead: int, sequences: int) -> Any:
        import torch
        from vllm.v1.kv_cache_interface import (
            FullAttentionSpec,
            KVCacheConfig,
            KVCacheGroupSpec,
        )
        from vllm.v1.structured_output import StructuredOutputManager

        blocks = sequences * (4096 // BLOCK)
        config.cache_config.num_gpu_blocks = blocks
        layer = FullAttentionSpec(
            block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=torch.float32
        )
        with (
            patch.object(type(config), "max_concurrent_batches", self._depth),
            patch.object(type(config), "ahead", ahead, create=True),
        ):
            return made(
                vllm_config=config,
                kv_cache_config=KVCacheConfig(
                    num_blocks=blocks,
                    kv_cache_tensors=[],
                    kv_cache_groups=[KVCacheGroupSpec(["layer"], layer)],
                ),
                structured_output_manager=StructuredOutputManager(config),
                block_size=BLOCK,
                log_stats=True,
            )

    def measure(self, calls: int) -> tuple[float, float]:
        """Microseconds a row of ``calls`` microbatches, and the share of vLLM's own two methods."""
        from vllm.v1.core.sched.scheduler import Scheduler

        inside = Clock()
        before = self.rows
        self._clock.seconds = 0.0
        with (
            patch.object(Scheduler, "schedule", inside.around(Scheduler.schedule)),
            patch.object(
                Scheduler, "update_from_output", inside.around(Scheduler.update_from_output)
            ),
        ):
            for _ in range(calls):
                self._step()
        seconds = self._clock.seconds
        return seconds / (self.rows - before) * 1e6, inside.seconds / seconds

    def _step(self) -> None:
        """One turn of EngineCore's batch queue."""
        output = self._schedule()
        self.rows += len(output.num_scheduled_tokens)
        self.calls += bool(output.num_scheduled_tokens)
        self._out.append(output)
        if len(self._out) == self._depth:
            done = self._out.popleft()
            self._update(done, self._drawn(done))

    def _drawn(self, output: Any) -> Any:
        """A token of each row that has computed its prompt."""
        from vllm.v1.outputs import ModelRunnerOutput

        cached = output.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        computed |= {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        names = [*output.num_scheduled_tokens]
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: place for place, name in enumerate(names)},
            sampled_token_ids=[
                [7] if computed[name] + count >= PROMPT else []
                for name, count in output.num_scheduled_tokens.items()
            ],
        )


def _request(number: int) -> Any:
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    return Request(
        request_id=str(number),
        prompt_token_ids=[(number * 31 + place) % 1000 for place in range(PROMPT)],
        sampling_params=SamplingParams(max_tokens=4000, ignore_eos=True),
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK, sha256),
    )


if __name__ == "__main__":
    main()
