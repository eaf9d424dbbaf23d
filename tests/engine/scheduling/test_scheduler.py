"""PipelineScheduler against vLLM's own scheduler, driven step by step without an engine.

The engine is the obvious one: m batches in flight, first in, first out. A "model" answers the
token that follows from the request's id and length, so outputs can be compared whatever the
batches were.
"""

from __future__ import annotations

import itertools
import random
import zlib
from collections import deque
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest

pytest.importorskip("vllm")

import torch
from benchmarks.make_model.checkpoint import make_model
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import sha256
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from sipipe.engine.iteration.iterations import Iterations
from sipipe.engine.iteration.observed_scheduler import observed
from sipipe.engine.scheduling.policy import SlotPolicy
from sipipe.engine.scheduling.scheduler import AsyncPipelineScheduler, PipelineScheduler

BLOCK = 16


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_model("llama", tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture(scope="module")
def configs(model):
    """Engine configurations by (stages, options), made once: each takes a second."""
    made = {}

    def make(stages: int, **options):
        key = (stages, repr(sorted(options.items())))
        if key not in made:
            made[key] = EngineArgs(
                model=model,
                dtype="float32",
                max_model_len=1024,
                pipeline_parallel_size=stages,
                distributed_executor_backend="mp",
                max_num_seqs=options.pop("max_num_seqs", 256),
                max_num_batched_tokens=options.pop("max_num_batched_tokens", 1024),
                enforce_eager=True,
                **options,
            ).create_engine_config()
        return made[key]

    return make


def preempt(scheduler, request) -> None:
    """Have vLLM's scheduler take a request's blocks back, which it does to one where blocks run out."""
    scheduler.running.remove(request)
    scheduler._preempt_request(request, 0.0)  # noqa: SLF001


@pytest.fixture(params=[PipelineScheduler, AsyncPipelineScheduler])
def ours(request):
    return request.param


class Engine:
    """vLLM's batch queue around a scheduler and a make-believe model."""

    def __init__(
        self, cls, config, *, blocks: int = 2000, ahead: int | None = None, windows: bool = False
    ) -> None:
        """With ``windows``, the KV cache has a second group, of layers with a window."""
        config.cache_config.num_gpu_blocks = blocks
        sizes = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 32, "dtype": torch.float32}
        groups = [KVCacheGroupSpec(["layer"], FullAttentionSpec(**sizes))]
        if windows:
            spec = SlidingWindowSpec(**sizes, sliding_window=1024)
            groups.append(KVCacheGroupSpec(["layer with a window"], spec))
        self.turns = config.max_concurrent_batches
        ahead = int(issubclass(cls, AsyncPipelineScheduler)) if ahead is None else ahead
        self.depth = self.turns + ahead
        with (
            patch.object(type(config), "max_concurrent_batches", self.depth),
            patch.object(type(config), "ahead", ahead, create=True),
        ):
            self.scheduler = cls(
                vllm_config=config,
                kv_cache_config=KVCacheConfig(
                    num_blocks=blocks,
                    kv_cache_tensors=[],
                    kv_cache_groups=groups,
                ),
                structured_output_manager=StructuredOutputManager(config),
                block_size=BLOCK,
                log_stats=True,
            )
        self.queue: deque = deque()
        self.tokens: dict[str, list[int]] = {}
        self.batches: list[dict[str, int]] = []
        self.slots: list[int] = []
        self.preempted: list[str] = []
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK, sha256)

    def add(self, id: str, prompt: int, output: int, seed=None, **options) -> Request:
        """Prompts of one ``seed`` begin alike; else each has its own."""
        rng = random.Random(id if seed is None else seed)
        request = Request(
            request_id=id,
            prompt_token_ids=[rng.randrange(1000) for _ in range(prompt)],
            sampling_params=SamplingParams(max_tokens=output, ignore_eos=True),
            pooling_params=None,
            block_hasher=self.hasher,
            **options,
        )
        self.scheduler.add_request(request)
        self.tokens[id] = []
        return request

    def add_all(self, letter: str, count: int, prompt: int, output: int) -> None:
        for index in range(count):
            self.add(f"{letter}{index}", prompt, output)

    def step(self):
        """EngineCore.step_with_batch_queue, with results that come when they are waited for."""
        output = None
        if self.scheduler.has_requests():
            # It is published when the one before the last turns of all slots is back.
            others = list(self.queue)[max(0, len(self.queue) - self.turns + 1) :]
            in_flight = {id for batch in others for id in batch.num_scheduled_tokens}
            output = self.scheduler.schedule()
            for id in output.num_scheduled_tokens:
                request = self.scheduler.requests[id]
                before = request.num_computed_tokens - output.num_scheduled_tokens[id]
                assert (
                    id not in in_flight
                    or before < request.num_prompt_tokens
                    or request.num_preemptions  # computes its prompt again, in chunks
                ), "a decode was scheduled while its last token is in flight"
            self.batches.append(dict(output.num_scheduled_tokens))
            self.slots.append(getattr(self.scheduler, "slot", -1))
            self.preempted.extend(output.preempted_req_ids)
            assert output.total_num_scheduled_tokens <= self.scheduler.max_num_scheduled_tokens
            self.queue.append(output)
            self._scheduled(output)
            executed = bool(output.num_scheduled_tokens)
            if len(self.queue) < self.depth and (executed or self.scheduler.has_requests()):
                return output
        if self.queue:
            self._complete(self.queue.popleft())
        return output

    def _scheduled(self, output) -> None:
        """EngineCore hands an output to its executor here."""

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def run(self, most: int = 20_000) -> None:
        for _ in range(most):
            if not (self.scheduler.has_requests() or self.queue):
                return
            self.step()
        raise AssertionError(f"unfinished after {most} steps")

    def _complete(self, batch) -> None:
        cached = batch.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        computed |= {new.req_id: new.num_computed_tokens for new in batch.scheduled_new_reqs}
        sampled = {}
        for id, count in batch.num_scheduled_tokens.items():
            request = self.scheduler.requests.get(id)
            end = computed[id] + count
            known = request.num_tokens if request else 0
            sampled[id] = [self.token(request, end)] if request and end >= known else []
        outputs = self.scheduler.update_from_output(batch, _drawn(sampled))
        for client in outputs.values():
            for output in client.outputs:
                self.tokens[output.request_id].extend(output.new_token_ids)

    @staticmethod
    def token(request, position: int) -> int:
        return zlib.crc32(f"{request.request_id} {position}".encode()) % 1000


def _drawn(tokens: dict[str, list[int]]) -> ModelRunnerOutput:
    return ModelRunnerOutput(
        req_ids=[*tokens],
        req_id_to_index={id: index for index, id in enumerate(tokens)},
        sampled_token_ids=[*tokens.values()],
    )


def _sizes(engine, last):
    return [len(batch) for batch in engine.batches[-last:]]


@pytest.mark.parametrize("stages", [2, 4])
def test_requests_at_once_run_in_even_microbatches(ours, configs, stages):
    config = configs(stages)
    mine, stock = Engine(ours, config), Engine(Scheduler, config)
    for engine in (mine, stock):
        engine.add("first", 6, 60)
        engine.step()
        engine.add_all("r", 63, 6, 60)
        engine.steps(30)
    assert max(_sizes(mine, 2 * stages)) - min(_sizes(mine, 2 * stages)) <= 1
    assert max(_sizes(stock, 2 * stages)) - min(_sizes(stock, 2 * stages)) > 32
    assert mine.slots == [index % stages for index in range(len(mine.slots))]
    mine.run()
    stock.run()
    assert mine.tokens == stock.tokens


def _random_run(cls, config, seed, *, blocks, steps=600, aborts=True, priorities=False):
    rng = random.Random(seed)
    engine = Engine(cls, config, blocks=blocks)
    aborted = set()
    born = 0
    for _ in range(steps):
        if rng.random() < 0.12:
            engine.add(
                f"r{born}",
                rng.choice((1, 5, 40, 300)),
                rng.randint(1, 60),
                priority=rng.randrange(3) if priorities else 0,
                arrival_time=float(born),
            )
            born += 1
        if aborts and rng.random() < 0.01 and engine.scheduler.requests:
            id = rng.choice(sorted(engine.scheduler.requests))
            engine.scheduler.finish_requests(id, RequestStatus.FINISHED_ABORTED)
            aborted.add(id)
        engine.step()
    engine.run()
    return engine, {id: t for id, t in engine.tokens.items() if id not in aborted}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("stages", "blocks", "policy"), [(2, 2000, "fcfs"), (4, 60, "fcfs"), (3, 60, "priority")]
)
def test_random_histories_give_the_tokens_of_stock(ours, configs, seed, stages, blocks, policy):
    config = configs(stages, scheduling_policy=policy)
    how = {"blocks": blocks, "aborts": False, "priorities": policy == "priority"}
    mine, tokens = _random_run(ours, config, seed, **how)
    _, expected = _random_run(Scheduler, config, seed, **how)
    assert tokens == expected
    if blocks < 100:
        assert mine.preempted, "the cache was meant to run out"


@pytest.mark.parametrize("reset", [False, True])
def test_requests_that_stop_early_leave_nothing_behind(ours, configs, reset):
    """Also where their next token is scheduled already, and where all begin anew in between."""
    engine, found = Engine(ours, configs(2)), {}
    stops = [token for token in range(1000) if token % 20 == 0]
    for index in range(40):
        id = f"r{index}"
        request = engine.add(id, 5 + 7 * (index % 9), 60)
        request.sampling_params.stop_token_ids = stops
        whole = [engine.token(request, request.num_tokens + place) for place in range(60)]
        last = next((place for place, token in enumerate(whole) if token in stops), 59)
        found[id] = whole[: last + 1]
        engine.step()
        if reset and index % 10 == 9:
            assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.run()
    assert engine.tokens == found
    assert min(map(len, found.values())) < 20
    assert engine.scheduler.kv_cache_manager.usage == 0
    assert not engine.scheduler.requests


@pytest.mark.parametrize("stages", [1, 2, 5])
def test_aborts_leave_nothing_behind(ours, configs, stages):
    if stages == 1 and ours is AsyncPipelineScheduler:
        pytest.skip("nothing is ahead of one microbatch (sipipe.engine.setup.compatibility)")
    engine, _ = _random_run(ours, configs(stages), 7, blocks=100)
    assert not engine.scheduler.requests
    assert not engine.scheduler.running
    if stages > 1:
        assert engine.scheduler.kv_cache_manager.usage == 0


@pytest.mark.parametrize("loop", [True, False])
def test_what_came_back_beside_an_empty_visit_is_scheduled_without_a_pause(
    configs, monkeypatch, loop
):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", str(int(loop)))
    engine = Engine(PipelineScheduler, configs(2))
    engine.add("r", 20, 5)
    engine.step()
    assert engine.scheduler.has_requests()
    engine.step()
    assert engine.batches == [{"r": 20}, {}], "the other slot has nothing to run"
    assert engine.queue, "so EngineCore's loop has work, whatever the scheduler says"
    # EngineCore's loop would pause now, an engine without one would schedule.
    assert engine.scheduler.has_requests() is not loop
    assert engine.scheduler.has_requests()
    engine.run()
    assert len(engine.tokens["r"]) == 5


def test_what_is_out_beside_an_empty_visit_is_scheduled_again_without_a_pause(configs, monkeypatch):
    """Ahead of its token."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    engine = Engine(AsyncPipelineScheduler, configs(3))
    engine.add("r", 20, 50)
    pauses = 0
    for _ in range(60):
        engine.step()
        pauses += not engine.batches[-1] and engine.scheduler.has_requests()
    assert pauses == 2, "while the queue was not full"


def test_an_engine_may_pause_beside_an_empty_visit_while_nothing_is_out(configs, monkeypatch):
    """As while a request waits for blocks of another engine; its loop would keep a core busy."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    engine = Engine(AsyncPipelineScheduler, configs(2))
    engine.add("first", 20, 5)
    engine.run()
    engine.add("second", 20, 5)
    engine.scheduler.requests["second"].status = RequestStatus.WAITING_FOR_REMOTE_KVS
    for _ in range(3):
        engine.step()
        assert not engine.batches[-1]
        assert engine.scheduler.has_requests()


def test_without_an_engine_that_is_ahead_tokens_are_counted_before_they_come_and_not_used(configs):
    """--scheduler-cls AsyncPipelineScheduler, by whatever executor."""
    engine = Engine(AsyncPipelineScheduler, configs(2), ahead=0)
    for index in range(9):
        engine.add(f"r{index}", 5 + index, 20 + index)
    engine.run()
    assert {id: len(tokens) for id, tokens in engine.tokens.items()} == {
        f"r{index}": 20 + index for index in range(9)
    }


def test_one_slot_schedules_exactly_as_stock(configs):
    config = configs(1)
    ours, _ = _random_run(PipelineScheduler, config, 3, blocks=80)
    stock, _ = _random_run(Scheduler, config, 3, blocks=80)
    assert ours.batches == stock.batches


def test_the_preemption_victim_may_belong_to_another_slot(ours, configs):
    engine = Engine(ours, configs(2), blocks=41)  # one block is the null block
    outputs = {f"r{index}": 30 + 7 * (index % 4) for index in range(20)}
    for index, (id, output) in enumerate(outputs.items()):
        engine.add(id, 9 + index % 5, output)
    victims, hidden = [], 0
    while engine.scheduler.has_requests() or engine.queue:
        before = [request.request_id for request in engine.scheduler.running]
        known = len(engine.preempted)
        engine.step()
        if len(engine.preempted) == known + 1:
            # First come, first served: the youngest goes, wherever it decodes.
            victims.append(engine.preempted[-1])
            running = {request.request_id for request in engine.scheduler.running}
            assert victims[-1] == [id for id in before if id in running | {victims[-1]}][-1]
            last = max(n for n, batch in enumerate(engine.batches[:-1]) if victims[-1] in batch)
            hidden += engine.slots[last] != engine.slots[-1]
    assert victims
    assert hidden, "no victim was in another slot than the visited one"
    assert {id: len(tokens) for id, tokens in engine.tokens.items()} == outputs


def test_a_long_prompt_ahead_does_not_starve_decodes_behind_it(ours, configs):
    config = configs(2, long_prefill_token_threshold=64)
    engine = Engine(ours, config)
    engine.add("long", 900, 4)
    engine.add_all("short", 8, 2, 50)
    engine.steps(8)
    assert engine.scheduler.requests["long"].is_prefill_chunk
    for batch in engine.batches[-2:]:
        assert sum(id.startswith("short") for id in batch) == 4


def _chunks(engine, id, before):
    """Starts and tokens of a prompt's chunks since that many batches."""
    sizes = [batch[id] for batch in engine.batches[before:] if id in batch]
    return list(zip(itertools.accumulate(sizes, initial=0), sizes, strict=False))


def test_prefill_is_spread_over_the_microbatches_in_equal_times(ours, configs):
    engine = Engine(ours, configs(4))
    engine.add_all("d", 8, 2, 500)
    engine.steps(16)
    engine.add("long", 800, 4)
    before = len(engine.batches)
    engine.steps(40)
    chunks = [chunk for chunk in _chunks(engine, "long", before) if chunk[0] < 800]
    assert sum(tokens for _, tokens in chunks) == 800
    assert len(chunks) >= 4
    price = engine.scheduler.controller.prices().chunk
    times = [price(*chunk) for chunk in chunks[:-1]]
    assert min(times) > 0.85 * max(times), chunks
    assert chunks[0][1] > 1.5 * chunks[-2][1], "a chunk behind a long prefix has fewer tokens"


@pytest.mark.parametrize("stages", [2, 4])
def test_chunks_of_one_prompt_are_in_consecutive_microbatches(ours, configs, stages):
    """No visit is empty while a part of the prompt is left; then only those that take no time."""
    engine = Engine(ours, configs(stages))
    engine.add("long", 900, 3)
    engine.run()
    chunks = [chunk for chunk in _chunks(engine, "long", 0) if chunk[0] < 900]
    assert len(chunks) > stages, "stages would wait for one another"
    assert all(batch for batch in engine.batches[: len(chunks)])
    decodes = [i for i, batch in enumerate(engine.batches) if batch.get("long") == 1]
    back = len(chunks) - 1 + engine.turns
    assert back <= decodes[0] < back + engine.turns
    assert not any(engine.batches[len(chunks) : decodes[0]])


def _long_and_decoding(engine, prompt=900, **options):
    """Eight sequences decode, and a long prompt comes; its chunks."""
    engine.add_all("d", 8, 2, 120)
    engine.steps(16)
    before = len(engine.batches)
    engine.add("long", prompt, 4, **options)
    engine.run()
    assert [len(engine.tokens[f"d{index}"]) for index in range(8)] == [120] * 8
    assert len(engine.tokens["long"]) == 4
    return [chunk for chunk in _chunks(engine, "long", before) if chunk[0] < prompt]


def _hybrid(cls):
    """As with a model that keeps recurrent states of whole blocks."""
    needed = property(lambda _: True, lambda *_: None)
    return type("Hybrid", (cls,), {"need_mamba_block_aligned_split": needed})


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("decoding", [False, True])
def test_a_hybrid_model_s_chunks_end_with_blocks(ours, configs, stages, decoding):
    """Its states are kept there; blocks of such models have hundreds of tokens."""
    config = configs(stages)
    block = config.cache_config.block_size
    engine = Engine(_hybrid(ours), config)
    if decoding:
        chunks = _long_and_decoding(engine)
    else:
        engine.add("long", 900, 4)
        engine.run()
        chunks = [chunk for chunk in _chunks(engine, "long", 0) if chunk[0] < 900]
    assert sum(tokens for _, tokens in chunks) == 900
    assert len(chunks) > 2
    assert not [chunk for chunk in chunks[1:] if chunk[0] % block], chunks


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("whole", [False, True])
def test_multi_modal_items_that_must_stay_whole_do(ours, configs, stages, whole):
    engine = Engine(ours, configs(stages, disable_chunked_mm_input=whole))
    engine.scheduler.max_num_encoder_input_tokens = 1024
    engine.scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=2048)
    image = partial(MultiModalFeatureSpec, data=None, modality="image")
    features = [
        image(identifier=str(offset), mm_position=PlaceholderRange(offset, 300))
        for offset in (50, 400)
    ]
    chunks = _long_and_decoding(engine, mm_features=features)
    cut = [start for start, _ in chunks if 50 < start < 350 or 400 < start < 700]
    assert bool(cut) is not whole, chunks
    assert sum(tokens for _, tokens in chunks) == 900


@pytest.mark.parametrize("leaves", ["aborted", "preempted"])
def test_a_long_prompt_that_leaves_between_chunks_delays_nobody(ours, configs, leaves):
    config = configs(4)
    engine = Engine(ours, config)
    engine.add_all("d", 8, 2, 120)
    engine.steps(16)
    long = engine.add("long", 900, 4)
    engine.steps(2)
    assert 0 < long.num_computed_tokens < 900
    if leaves == "aborted":
        engine.scheduler.finish_requests("long", RequestStatus.FINISHED_ABORTED)
    else:
        preempt(engine.scheduler, long)
    before = len(engine.batches)
    engine.run()
    assert [len(engine.tokens[f"d{index}"]) for index in range(8)] == [120] * 8
    if leaves == "aborted":
        assert not any("long" in batch for batch in engine.batches[before:])
    else:
        assert len(engine.tokens["long"]) == 4


def test_no_prompt_starts_while_the_cache_runs_out_though_another_goes_on(ours, configs):
    settings = {"sipipe": {"microbatches": {"kv_reserve": 0.8}}}
    engine = Engine(ours, configs(2, additional_config=settings), blocks=160)
    engine.add_all("d", 4, 30, 60)
    engine.steps(16)
    engine.add("long", 900, 4)
    while engine.scheduler.kv_cache_manager.usage < 0.2:
        engine.step()
    before = len(engine.batches)
    engine.add("new", 8, 4)
    engine.run()
    [first] = [number for number, batch in enumerate(engine.batches) if batch.get("new") == 8]
    chunks = [number for number, batch in enumerate(engine.batches) if batch.get("long", 0) > 1]
    assert chunks[-1] > before + 1, "it goes on"
    assert first > chunks[-1]
    assert all(engine.tokens.values())


def test_what_waits_behind_a_prompt_that_may_not_start_is_not_looked_at(ours, configs, monkeypatch):
    engine = Engine(ours, configs(3, max_num_seqs=64))
    looked, look = [], engine.scheduler.kv_cache_manager.get_computed_blocks
    monkeypatch.setattr(
        engine.scheduler.kv_cache_manager,
        "get_computed_blocks",
        lambda request, *more: looked.append(request.request_id) or look(request, *more),
    )
    engine.add_all("r", 40, 100, 4)
    most = 0
    while engine.scheduler.waiting:
        looked.clear()
        started = len(engine.scheduler.running)
        engine.step()
        most = max(most, len(looked) - (len(engine.scheduler.running) - started))
    assert most <= 4, "one that may not start, and those that ended meanwhile"
    assert engine.scheduler.max_num_active_reqs == 64
    engine.run()


def test_a_prompt_that_may_not_start_keeps_no_image_in_the_cache(ours, configs):
    """There may be no room for the image of a request that is before it later, which then never starts."""
    engine = Engine(ours, configs(3, max_num_seqs=64))
    scheduler = engine.scheduler
    scheduler.max_num_encoder_input_tokens = 1024
    cache = scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=300)
    image = MultiModalFeatureSpec(
        data=None, modality="image", identifier="logo", mm_position=PlaceholderRange(10, 50)
    )
    for index in range(40):
        engine.add(f"r{index}", 100, 4, mm_features=[image])
    waited = False
    while scheduler.waiting:
        engine.step()
        waited = waited or bool(scheduler.waiting and scheduler.running)
        holders = cache.cached.get("logo", set())
        assert holders <= {request.request_id for request in scheduler.running}
    assert waited
    engine.run()


def test_what_the_encoder_holds_back_holds_nothing_else_back(ours, configs):
    """vLLM 0.33 asks for no tokens of it, and goes on."""
    scheduler = Engine(ours, configs(3, max_num_seqs=8)).scheduler
    image = SimpleNamespace(status=RequestStatus.WAITING, num_computed_tokens=0)
    allowance = SimpleNamespace(starts=True, tokens=9, chunk=lambda _, tokens: tokens)
    # The models of tests have no encoder whose budget could be spent.
    clipped = scheduler._clip(allowance, image, 0, 0)  # noqa: SLF001
    assert (clipped, scheduler.max_num_active_reqs) == (0, 8)


def test_a_short_prompt_is_not_cut(ours, configs):
    engine = Engine(ours, configs(4))
    engine.add("short", 24, 2)
    engine.run()
    assert engine.batches[0] == {"short": 24}


def test_requests_that_cannot_run_yet_are_not_about_to_arrive(ours, configs, monkeypatch):
    engine = Engine(ours, configs(2, max_num_seqs=4))
    told, visit = [], SlotPolicy.visit
    monkeypatch.setattr(SlotPolicy, "visit", lambda *a, **k: told.append(k) or visit(*a, **k))
    engine.add_all("r", 7, 6, 200)
    engine.steps(30)
    assert (len(engine.scheduler.running), len(engine.scheduler.waiting)) == (4, 3)
    assert told[0]["arriving"] == 4
    assert (told[-1]["arriving"], told[-1]["pending_prefill"]) == (0, 0)


def test_prefix_cache_hits_are_used(ours, configs):
    engine = Engine(ours, configs(2))
    engine.add("a", 320, 4)
    engine.run()
    before = len(engine.batches)
    engine.add("b", 320, 4, seed="a")
    engine.run()
    assert sum(batch.get("b", 0) for batch in engine.batches[before:]) <= BLOCK + 4
    assert len(engine.tokens["b"]) == 4


def test_adapters_stay_within_their_limit_and_none_starves(ours, configs):
    config = configs(2, enable_lora=True, max_loras=1, max_lora_rank=8)
    engine = Engine(ours, config)
    for index in range(24):
        adapter = LoRARequest(f"adapter{index % 3}", index % 3 + 1, "nowhere")
        engine.add(f"r{index}", 5, 20, lora_request=adapter)
    while engine.scheduler.has_requests() or engine.queue:
        output = engine.step()
        if output is not None:
            used = {int(id[1:]) % 3 for id in output.num_scheduled_tokens}
            assert len(used) <= 1
        assert len(engine.batches) < 2000
    assert all(len(tokens) == 20 for tokens in engine.tokens.values())


def test_a_request_that_waits_for_its_grammar_is_picked_up(ours, configs, monkeypatch):
    engine = Engine(ours, configs(2))
    ready = []
    monkeypatch.setattr(
        engine.scheduler, "_handle_blocked_waiting_request", lambda request: bool(ready)
    )
    request = engine.add("g", 5, 3)
    engine.steps(6)
    assert not engine.tokens["g"]
    ready.append(True)
    request.status = RequestStatus.WAITING
    engine.run()
    assert len(engine.tokens["g"]) == 3


def test_blocks_are_zeroed_for_who_has_them_next_once_a_request_has_failed(configs):
    """There may be NaN in them."""
    iterations = Iterations(1, 8)
    scheduler = observed(Scheduler, iterations, Mock(), Mock())
    engine = Engine(scheduler, configs(1), blocks=8)

    def schedule(id):
        engine.add(id, 40, 4)
        output = engine.scheduler.schedule()
        assert [new.req_id for new in output.scheduled_new_reqs] == [id]
        return output

    def update(output, id, tokens):
        engine.scheduler.update_from_output(output, _drawn({id: tokens}))

    good = schedule("good")
    update(good, "good", [5])
    engine.scheduler.finish_requests("good", RequestStatus.FINISHED_ABORTED)
    bad = schedule("bad")
    assert good.new_block_ids_to_zero is bad.new_block_ids_to_zero is None
    iterations.enter(bad).outcome.errors["bad"] = "the model's logits hold NaN"
    update(bad, "bad", [])
    assert not engine.scheduler.requests
    after = schedule("next")
    assert after.new_block_ids_to_zero == list(after.scheduled_new_reqs[0].block_ids[0])
