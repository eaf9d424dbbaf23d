"""Input preparation of a stage: SiPipe's stage runner beside vLLM's, in one process.

    python -m benchmarks.stage [--quick]

Three tables:

* time of input preparation per microbatch, under two alternating microbatches as a pipeline has
  them, in steady decode, with one sequence joining and one leaving, and with 10 % of them; beside
  ``_update_states`` + ``_prepare_inputs`` of vLLM's first model runner on the same scheduling
  outputs; with the counts of sequences removed and inserted by either;
* preparation while another thread runs forward passes of a real (tiny) model: what it waits for
  the GIL and for a core;
* the executors with a device that takes 20 ms and a preparation of 3 ms (and of 30 ms).
"""

from __future__ import annotations

import argparse
import copy
import itertools
import os
import tempfile
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.harness import report
from sipipe.stage import StageExecutor

SLOTS = 2
BLOCK = 32
PROMPT = 70


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer iterations")
    quick = parser.parse_args().quick
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="sipipe-bench-") as directory:
        worker = load_worker(directory)
        compare_preparation(worker, quick)
        measure_overlap(worker, quick)
    measure_executors(quick)


# ---- a vLLM worker without an engine ------------------------------------------------------------


def load_worker(directory: str) -> Any:
    """A CPU worker with a tiny model loaded and its KV cache set up."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.utils.network_utils import get_distributed_init_method, get_ip, get_open_port
    from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    from sipipe.models import make_model

    config = EngineArgs(
        model=str(make_model("llama", os.path.join(directory, "llama"))),
        dtype="float32",
        enforce_eager=True,
        max_model_len=2048,
        block_size=BLOCK,
        max_num_seqs=SLOTS * 512,
        max_num_batched_tokens=65536,
        enable_prefix_caching=False,
        async_scheduling=False,
        skip_tokenizer_init=True,
    ).create_engine_config()
    wrapper = WorkerWrapperBase(rpc_rank=0)
    wrapper.init_worker(
        [
            {
                "vllm_config": config,
                "local_rank": 0,
                "rank": 0,
                "distributed_init_method": get_distributed_init_method(get_ip(), get_open_port()),
                "is_driver_worker": True,
            }
        ]
    )
    wrapper.init_device()
    wrapper.load_model()
    current_platform.update_block_size_for_backend(config)
    spec = wrapper.worker.get_kv_cache_spec()
    layout = resolve_kv_cache_layout(
        config, [wrapper.worker.get_supported_kv_cache_layouts()], list(spec.values())
    )
    wrapper.worker.set_kv_cache_layout(layout.name)
    kv_cache = get_kv_cache_configs(config, [spec], [1 << 30])
    for of_rank in kv_cache:
        of_rank.kv_cache_layout = config.cache_config.kv_cache_layout
    wrapper.initialize_from_config(kv_cache)
    return wrapper.worker


# ---- scheduling outputs -------------------------------------------------------------------------


class Workload:
    """Scheduling outputs of ``SLOTS`` alternating microbatches of ``batch`` decoding sequences.

    In every iteration ``churn`` sequences leave their microbatch, and as many join it with a
    prompt; block tables grow as they would.
    """

    def __init__(self, batch: int, churn: int) -> None:
        self.batch, self.churn = batch, churn
        self.names = itertools.count()
        self.free = list(range(1, 16_000))
        self.members: list[dict[str, int]] = [{} for _ in range(SLOTS)]
        self.blocks: dict[str, list[int]] = {}
        self.prompts: dict[str, int] = {}
        self.slot = -1

    def output(self) -> Any:
        """The next scheduling output."""
        from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput

        self.slot = (self.slot + 1) % SLOTS
        members = self.members[self.slot]
        finished = list(itertools.islice(members, self.churn if len(members) else 0))
        for name in finished:
            del members[name]
            self.free.extend(self.blocks.pop(name))
        names = list(members)
        cached = CachedRequestData(
            req_ids=names,
            resumed_req_ids=set(),
            new_token_ids=[[7] for _ in names],
            all_token_ids={},
            new_block_ids=[self._grow(name, members[name]) for name in names],
            num_computed_tokens=[members[name] for name in names],
            num_output_tokens=[members[name] - self.prompts[name] + 1 for name in names],
        )
        amounts = dict.fromkeys(names, 1)
        for name in names:
            members[name] += 1
        new = [self._join(members, amounts) for _ in range(self.batch - len(names))]
        return SchedulerOutput(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=amounts,
            total_num_scheduled_tokens=sum(amounts.values()),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            finished_req_ids=set(finished),
            free_encoder_mm_hashes=[],
        )

    def _join(self, members: dict[str, int], amounts: dict[str, int]) -> Any:
        from vllm import SamplingParams
        from vllm.v1.core.sched.output import NewRequestData

        name = f"request-{next(self.names)}-0123456789abcdef"
        # Prompts of different lengths, so that blocks are not all filled at once.
        length = PROMPT + hash(name) % BLOCK
        held = [self.free.pop() for _ in range(-(-(length + 1) // BLOCK))]
        self.blocks[name] = list(held)
        self.prompts[name] = members[name] = length
        amounts[name] = length
        return NewRequestData(
            req_id=name,
            prompt_token_ids=[5] * length,
            mm_features=[],
            sampling_params=SamplingParams(temperature=0.0, max_tokens=2000),
            pooling_params=None,
            block_ids=(held,),
            num_computed_tokens=0,
            lora_request=None,
        )

    def _grow(self, name: str, computed: int) -> tuple[list[int], ...] | None:
        held = self.blocks[name]
        if computed < len(held) * BLOCK:
            return None
        held.append(self.free.pop())
        return ([held[-1]],)


def iterations(workload: Workload, count: int) -> Iterator[Any]:
    """``count`` outputs after both microbatches have been filled."""
    for _ in range(count + 2 * SLOTS):
        # Copied as if it came from another process: vLLM keeps and extends the block lists.
        yield copy.deepcopy(workload.output())


# ---- table 1 ------------------------------------------------------------------------------------


def compare_preparation(worker: Any, quick: bool) -> None:
    """Both sides on the same scheduling outputs."""
    count = 40 if quick else 200
    rows = []
    for batch in (16, 128, 512):
        for name, churn in (("steady", 0), ("1 joins, 1 leaves", 1), ("10 % churn", batch // 10)):
            stock = time_stock(worker, Workload(batch, churn), count)
            ours = time_ours(worker, Workload(batch, churn), count)
            rows.append(
                {
                    "B": batch,
                    "case": name,
                    "vLLM state ms": stock["update"],
                    "vLLM inputs ms": stock["prepare"],
                    "vLLM moved": stock["moved"],
                    "SiPipe ms": ours["inputs"],
                    "SiPipe moved": ours["moved"],
                    "ratio": (stock["update"] + stock["prepare"]) / ours["inputs"],
                    "SiPipe with attn metadata ms": ours["all"],
                }
            )
    report(
        "stage",
        "Input preparation per microbatch, two alternating microbatches (medians)",
        rows,
        note="vLLM: _update_states, _prepare_inputs of the first model runner on a stage that is "
        "not the last. moved: sequences removed or added per iteration.",
    )


def time_stock(worker: Any, workload: Workload, count: int) -> dict[str, float]:
    """vLLM's first model runner, as one stage of several."""
    import torch
    from vllm.distributed import parallel_state

    runner = worker.model_runner
    moved = Counting(runner.input_batch)
    update, prepare, moves = [], [], []
    whole, parallel_state._PP = (
        parallel_state._PP,
        SimpleNamespace(is_first_rank=True, is_last_rank=False, world_size=2, rank_in_group=0),
    )
    try:
        with torch.inference_mode(), moved:
            for output in iterations(workload, count):
                before = moved.count
                began = time.perf_counter()
                runner._update_states(output)
                between = time.perf_counter()
                amounts = np.array(
                    [output.num_scheduled_tokens[r] for r in runner.input_batch.req_ids], np.int32
                )
                runner._prepare_inputs(output, amounts)
                prepare.append(time.perf_counter() - between)
                update.append(between - began)
                moves.append(moved.count - before)
            finish_all(runner._update_states, workload)
    finally:
        parallel_state._PP = whole
    return {
        "update": median_ms(update),
        "prepare": median_ms(prepare),
        "moved": float(np.median(moves[2 * SLOTS :])),
    }


class Counting:
    """Counts the sequences that vLLM removes from and adds to its persistent batch."""

    def __init__(self, batch: Any) -> None:
        self.batch, self.count = batch, 0

    def __enter__(self) -> None:
        batch = self.batch

        def add(request: Any) -> Any:
            self.count += 1
            return type(batch).add_request(batch, request)

        def remove(req_id: str) -> Any:
            self.count += req_id in batch.req_id_to_index
            return type(batch).remove_request(batch, req_id)

        batch.add_request, batch.remove_request = add, remove

    def __exit__(self, *_: object) -> None:
        del self.batch.add_request, self.batch.remove_request


def time_ours(worker: Any, workload: Workload, count: int) -> dict[str, float]:
    """SiPipe's stage runner; the attention metadata are timed apart, as vLLM's are."""
    import torch

    from sipipe.vllm.stage_runner import StageRunner

    runner = StageRunner(worker.model_runner, slots=SLOTS)
    build = runner.preparer._build_metadata
    spent = [0.0]

    def timed(*args: Any) -> None:
        began = time.perf_counter()
        build(*args)
        spent[0] = time.perf_counter() - began

    runner.preparer._build_metadata = timed
    inputs, everything, moves = [], [], []
    with torch.inference_mode():
        for number, output in enumerate(iterations(workload, count)):
            before = runner.counters.inserted + runner.counters.removed
            began = time.perf_counter()
            prepared = runner.prepare(output, number % SLOTS, number % 2)
            took = time.perf_counter() - began
            if prepared.build_metadata is not None:  # the CPU device executor's part
                prepared.build_metadata()
                took += spent[0]
            everything.append(took)
            inputs.append(took - spent[0])
            moves.append(runner.counters.inserted + runner.counters.removed - before)
    return {
        "inputs": median_ms(inputs),
        "all": median_ms(everything),
        "moved": float(np.median(moves[2 * SLOTS :])),
    }


def finish_all(update: Any, workload: Workload) -> None:
    """Tell a runner that every sequence has finished."""
    from vllm.v1.core.sched.output import SchedulerOutput

    output = SchedulerOutput.make_empty()
    output.finished_req_ids = {name for members in workload.members for name in members}
    update(output)


def median_ms(seconds: list[float]) -> float:
    """Of all but the iterations that filled the microbatches."""
    return 1e3 * float(np.median(seconds[2 * SLOTS :]))


# ---- table 2 ------------------------------------------------------------------------------------


class TimedStage:
    """A stage of one rank: the real runner, with the preparation's wall and CPU time kept."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.wall: list[float] = []
        self.cpu: list[float] = []
        self.forwards: list[float] = []

    def prepare(self, iteration: int, slot: int, version: int, output: Any) -> Any:
        wall, cpu = time.perf_counter(), time.thread_time()
        inputs = self.runner.prepare(output, slot, version, iteration)
        self.wall.append(time.perf_counter() - wall)
        self.cpu.append(time.thread_time() - cpu)
        return inputs

    def announce(self, iteration: int, inputs: Any) -> None:
        pass

    def receive(self, iteration: int, inputs: Any) -> None:
        pass

    def forward(self, iteration: int, inputs: Any, received: Any) -> Any:
        began = time.perf_counter()
        self.runner.forward(inputs)
        self.forwards.append(time.perf_counter() - began)

    def send(self, iteration: int, inputs: Any, result: Any) -> None:
        pass


def measure_overlap(worker: Any, quick: bool) -> None:
    """Preparation while forward passes run beside it, against preparation alone."""
    from sipipe.vllm.stage_runner import StageRunner

    rows = []
    for name, versions in (("in turn", 1), ("overlapped", 2)):
        stage = TimedStage(StageRunner(worker.model_runner, slots=SLOTS, versions=versions))
        workload = Workload(128, 0)
        outputs = list(iterations(workload, 60 if quick else 300))
        with StageExecutor(stage, versions=versions, depth=SLOTS + 1) as executor:
            for number, output in enumerate(outputs):
                if number == 2 * SLOTS:
                    executor.drain()
                    began = time.perf_counter()
                executor.submit(number, number % SLOTS, output)
            executor.drain()
            took = time.perf_counter() - began
        waits = np.array(stage.wall) - np.array(stage.cpu)
        rows.append(
            {
                "B 128, steady": name,
                "prepare ms": median_ms(stage.wall),
                "of it CPU ms": median_ms(stage.cpu),
                "of it waiting (GIL, core) ms": median_ms(waits.tolist()),
                "waiting p99 ms": 1e3 * float(np.percentile(waits[2 * SLOTS :], 99)),
                "forward ms": median_ms(stage.forwards),
                "iteration ms": 1e3 * took / (len(outputs) - 2 * SLOTS),
            }
        )
    report(
        "stage",
        "Preparation beside forward passes of a tiny model (4 layers, hidden 128, float32)",
        rows,
        note="prepare includes attention metadata; waiting = wall time - the thread's CPU time",
        file="stage-overlap",
    )


# ---- table 3 ------------------------------------------------------------------------------------


class SleepingStage:
    """A device and a preparation that take their time without using a core."""

    def __init__(self, prepare: float, forward: float) -> None:
        self.takes = (prepare, forward)
        self.ends: list[float] = []

    def prepare(self, iteration: int, slot: int, version: int, output: Any) -> None:
        time.sleep(self.takes[0])

    def announce(self, iteration: int, inputs: Any) -> None:
        pass

    def receive(self, iteration: int, inputs: Any) -> None:
        pass

    def forward(self, iteration: int, inputs: Any, received: Any) -> None:
        time.sleep(self.takes[1])

    def send(self, iteration: int, inputs: Any, result: Any) -> None:
        self.ends.append(time.perf_counter())


def measure_executors(quick: bool) -> None:
    """The executors' own cost: iteration time against the longer of the two parts."""
    rows = []
    for prepare, forward, versions in ((3, 20, 2), (3, 20, 1), (30, 20, 2)):
        stage = SleepingStage(prepare / 1e3, forward / 1e3)
        with StageExecutor(stage, versions=versions, depth=3) as executor:
            for number in range(20 if quick else 100):
                executor.submit(number, 0, None)
            executor.drain()
            waiting = executor.statistics().most_waiting
        gaps = 1e3 * np.diff(stage.ends)[3:]
        rows.append(
            {
                "prepare ms": prepare,
                "device ms": forward,
                "versions": versions,
                "iteration ms": float(np.median(gaps)),
                "p95 ms": float(np.percentile(gaps, 95)),
                "most in the worker": waiting,
            }
        )
    report(
        "stage",
        "CPU executor and device executor, real threads, a device that sleeps",
        rows,
        file="stage-executors",
    )


if __name__ == "__main__":
    main()
