"""What the stage benchmark runs on: a worker without an engine, made-up scheduling outputs, stages
that keep their times. Not a benchmark by itself.
"""

from __future__ import annotations

import copy
import itertools
import os
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from sipipe.worker.double_buffer import DoubleBuffer

SLOTS = 2
BLOCK = 32
PROMPT = 70


def load_worker(directory: str) -> Any:
    """A CPU worker with a tiny model loaded and its KV cache set up."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.utils.network_utils import get_distributed_init_method, get_ip, get_open_port
    from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    from sipipe.tools.make_model.checkpoint import make_model

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


class Counting:
    """Counts the requests that are added to and removed from a runner's state.

    Keyword arguments name the methods to count; a method that takes requests away is given what
    tells whether they are known. Its first argument is one request's name, or several.
    """

    def __init__(self, owner: Any, **methods: Any) -> None:
        self.owner, self.methods, self.count = owner, methods, 0

    def __enter__(self) -> None:
        for name, known in self.methods.items():
            setattr(self.owner, name, self._counted(name, known))

    def __exit__(self, *_: object) -> None:
        for name in self.methods:
            delattr(self.owner, name)

    def _counted(self, name: str, known: Any) -> Any:
        def call(first: Any, *args: Any, **kwargs: Any) -> Any:
            if known is None:
                self.count += 1
            else:
                self.count += sum(
                    r in known for r in ([first] if isinstance(first, str) else first)
                )
            return getattr(type(self.owner), name)(self.owner, first, *args, **kwargs)

        return call


def finish_all(update: Any, workload: Workload) -> None:
    """Tell a runner that every sequence has finished."""
    from vllm.v1.core.sched.output import SchedulerOutput

    output = SchedulerOutput.make_empty()
    output.finished_req_ids = {name for members in workload.members for name in members}
    update(output)


# ---- stages ------------------------------------------------------------------------------------


class TwoThreads:
    """A double buffer whose device thread is another one; the caller's thread prepares."""

    def __init__(self, stage: Any, sets: int) -> None:
        self.buffer = DoubleBuffer(stage, sets=sets, stall_timeout=60)
        self.thread = threading.Thread(target=self.buffer.run)

    def __enter__(self) -> DoubleBuffer:
        self.thread.start()
        return self.buffer

    def __exit__(self, *_: object) -> None:
        self.buffer.close()
        self.thread.join()


class TimedStage:
    """A stage of one rank: the real runner, with the preparation's wall and CPU time kept."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.wall: list[float] = []
        self.cpu: list[float] = []
        self.forwards: list[float] = []

    def prepare(self, iteration: int, slot: int, buffer_set: int, output: Any) -> Any:
        wall, cpu = time.perf_counter(), time.thread_time()
        inputs = self.runner.prepare(output, slot, buffer_set, iteration)
        self.wall.append(time.perf_counter() - wall)
        self.cpu.append(time.thread_time() - cpu)
        return inputs

    def receive(self, inputs: Any) -> None:
        pass

    def forward(self, inputs: Any, received: Any) -> Any:
        began = time.perf_counter()
        self.runner.forward(inputs)
        self.forwards.append(time.perf_counter() - began)

    def send(self, inputs: Any, result: Any) -> None:
        pass


class SleepingStage:
    """A device and a preparation that take their time without using a core."""

    def __init__(self, prepare: float, forward: float) -> None:
        self.takes = (prepare, forward)
        self.ends: list[float] = []

    def prepare(self, iteration: int, slot: int, buffer_set: int, output: Any) -> Any:
        time.sleep(self.takes[0])
        return SimpleNamespace(iteration=iteration)

    def receive(self, inputs: Any) -> None:
        pass

    def forward(self, inputs: Any, received: Any) -> None:
        time.sleep(self.takes[1])

    def send(self, inputs: Any, result: Any) -> None:
        self.ends.append(time.perf_counter())
