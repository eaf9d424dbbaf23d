"""What the stage benchmark runs on: a worker without an engine, made-up scheduling outputs, stages
that keep their times. Not a benchmark by itself.
"""

from __future__ import annotations

import copy
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from sipipe.messages.header import Header
from sipipe.worker.double_buffer import DoubleBuffer

if TYPE_CHECKING:
    from sipipe.worker.sampled_stage import SampledStage

SLOTS = 2
BLOCK = 32
PROMPT = 70


class Timed:
    """CPU time that the calling thread has spent in the runner's methods."""

    def __init__(self, runner: Any, *names: str) -> None:
        self.runner, self.nanoseconds = runner, 0
        for name in names:
            setattr(runner, name, self._timed(getattr(runner, name)))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time_ns()
            try:
                return call(*args, **kwargs)
            finally:
                self.nanoseconds += time.thread_time_ns() - began

        return timed


def open_stage(directory: str, stage: int, stages: int) -> tuple[Callable[[], SampledStage], Timed]:
    """A tiny model's stage, one of ``stages``, on vLLM's second runner, on a CPU, whose iterations compute
    nothing. Returns what opens it, with the same runner each time, and the runner's time."""
    import torch
    from vllm.config import vllm as vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.utils.network_utils import get_distributed_init_method, get_ip, get_open_port
    from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    from benchmarks.make_model.checkpoint import make_model
    from sipipe.config import SiPipeConfig
    from sipipe.messages.stage_place import StagePlace

    vllm_config.HAS_TRITON = True  # what it would be needed for does nothing here
    place = StagePlace(stage=stage, stages=stages, tp_rank=0, tp_size=1)
    config = EngineArgs(
        model=str(make_model("llama", os.path.join(directory, "llama"))),
        dtype="float32",
        enforce_eager=True,
        max_model_len=2048,
        block_size=BLOCK,
        max_num_seqs=SLOTS * 128,
        max_num_batched_tokens=16384,
        pipeline_parallel_size=stages,
        gpu_memory_utilization=0.05,  # of the host: nothing is allocated by it
        distributed_executor_backend="mp",
        enable_prefix_caching=False,
        async_scheduling=False,
        skip_tokenizer_init=True,
    ).create_engine_config()
    config.parallel_config.worker_cls = "sipipe.worker.hooks.vllm_workers.CPUStageWorker"
    # It would look through all modules for Triton kernels, and stumble over what Numba brings.
    type(current_platform).register_triton_kernel_overrides = lambda *_: None
    wrapper = WorkerWrapperBase(rpc_rank=0)
    wrapper.init_worker(
        [
            {
                "vllm_config": config,
                "local_rank": 0,
                "rank": stage,
                "distributed_init_method": get_distributed_init_method(get_ip(), get_open_port()),
                "is_driver_worker": True,
            }
        ]
    )
    boot: Any = SimpleNamespace(
        place=place,
        config=SiPipeConfig(cpu_sampling="on"),
        watched=SimpleNamespace(inflight=SLOTS),
        vllm_config=config,
        rows=SLOTS * 128,
        speculates=False,
        head=None,
        draws=True,
        own_sampler=True,
    )
    wrapper.worker.boot = boot
    wrapper.init_device()
    from sipipe.observe.format import Header
    from sipipe.observe.recorder import open_recorder
    from sipipe.worker.device import HostDevice
    from sipipe.worker.hooks.draws import LastRows, NothingDrawn
    from sipipe.worker.projection.logits import StageLogits
    from sipipe.worker.projection.projection import Projection
    from sipipe.worker.sampled_stage import SampledStage, Surroundings

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
    empty_kernels()
    runner, device = wrapper.worker.model_runner, HostDevice()
    draws = NothingDrawn()
    if place.is_last:
        draws = LastRows(runner, device, StageLogits(runner), reports=True)
    draws = draws.take_over(per_row=False)
    runner.model = NoModel(runner)
    around = Surroundings(
        boot=boot,
        wrapper=wrapper,
        report=lambda *_: None,
        recorder=open_recorder(None, Header(role="stage")),
        fail=print,
    )
    torch.set_num_threads(1)
    links: Any = NoLinks()
    projection: Any = Projection()
    projection.columns = lambda *_: None

    def opened() -> SampledStage:
        return SampledStage(around, links, device, draws, projection, None)

    return opened, Timed(runner, "execute_model", "sample_tokens")


def empty_kernels() -> None:
    """Triton's of vLLM's second runner, where there is no Triton."""
    import torch
    from vllm.v1.worker.gpu import input_batch

    input_batch.triton.next_power_of_2 = lambda number: 1 << (int(number) - 1).bit_length()
    # What no kernel has written is looked at.
    input_batch.torch = SimpleNamespace(**vars(torch) | {"empty": torch.zeros})
    nothing = EmptyKernel()
    for name, module in list(sys.modules.items()):
        if name.startswith(("vllm.v1.worker.gpu", "vllm.v1.worker.utils")):
            for kernel in [each for each in vars(module) if each.endswith("_kernel")]:
                setattr(module, kernel, nothing)


class EmptyKernel:
    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *_, **__: None


class NoModel:
    """Its hidden states are there already."""

    compute_logits = None

    def __init__(self, runner: Any) -> None:
        import torch
        from vllm.sequence import IntermediateTensors

        width = runner.model_config.get_hidden_size()
        self._hidden = torch.zeros(runner.max_num_tokens, width)
        self._last, self._tensors = runner.is_last_pp_rank, IntermediateTensors

    def __call__(self, *, positions: Any, **_: Any) -> Any:
        hidden = self._hidden[: len(positions)]
        return hidden if self._last else self._tensors({"hidden_states": hidden})


class NoPublisher:
    """In place of :class:`sipipe.worker.publisher.Publisher`: what is launched is dropped."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def nothing(self, *_: Any) -> None:
        pass

    put = drain = close = nothing


class NoLinks:
    def take(self, iteration: int, tokens: int, into: dict[str, Any]) -> Any:
        return {key: tensor[:tokens] for key, tensor in into.items()}

    def nothing(self, *_: Any) -> None:
        pass

    release = send = wait_sent = flush = interrupt = close = nothing


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

    def end(self) -> Any:
        """Every sequence has finished."""
        from vllm.v1.core.sched.output import SchedulerOutput

        output = SchedulerOutput.make_empty()
        output.finished_req_ids = {name for members in self.members for name in members}
        return output

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
            prefill_token_ids=[5] * length,
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


# ---- stages ------------------------------------------------------------------------------------


class TwoThreads:
    """A double buffer whose device thread is another one; the caller's thread prepares."""

    def __init__(self, stage: Any, sets: int) -> None:
        self.buffer = DoubleBuffer(stage, sets=sets, stall_timeout=60, interrupt=lambda: None)
        self.thread = threading.Thread(target=self.buffer.run)

    def __enter__(self) -> DoubleBuffer:
        self.thread.start()
        return self.buffer

    def __exit__(self, *_: object) -> None:
        self.buffer.close()
        self.thread.join()


class SleepingStage:
    """A device and a preparation that take their time without using a core."""

    def __init__(self, prepare: float, forward: float) -> None:
        self.takes = (prepare, forward)
        self.ends: list[float] = []

    def prepare(self, header: Header, *_: Any) -> Any:
        time.sleep(self.takes[0])
        return SimpleNamespace(iteration=header.number)

    def run(self, inputs: Any) -> None:
        time.sleep(self.takes[1])
        self.ends.append(time.perf_counter())
