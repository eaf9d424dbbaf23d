"""Input preparation against a slow, obvious twin, under scheduling outputs of every kind.

No engine: a made-up scheduler joins, chunks, decodes, preempts, resumes, finishes and reuses names
over several slots, and every array that a forward pass would read is compared.
"""

from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.v1.core.sched.output import (  # noqa: E402
    CachedRequestData,
    NewRequestData,
    SchedulerOutput,
)

from sipipe.engine.balance import Balancer  # noqa: E402
from sipipe.engine.requests import RequestTracker  # noqa: E402
from sipipe.worker.attention import AttentionMetadata  # noqa: E402
from sipipe.worker.inputs.prepare import InputPreparer  # noqa: E402

BLOCK_SIZES = (4, 8)
MAX_LEN = 64


class FakeGroup:
    def __init__(self, gid):
        self.layer_names = [f"layer{gid}"]
        self.metadata_builders = [object()] * 4

    def build_metadata(self, common, buffer_set):
        return common, buffer_set


def fake_vllm_runner(*, threshold=None):
    return SimpleNamespace(
        device=torch.device("cpu"),
        vllm_config=None,
        lora_config=None,
        input_batch=SimpleNamespace(
            block_table=SimpleNamespace(
                block_tables=[
                    SimpleNamespace(block_size=size, max_num_blocks_per_req=MAX_LEN // size)
                    for size in BLOCK_SIZES
                ]
            )
        ),
        max_num_reqs=64,
        max_num_tokens=512,
        max_model_len=MAX_LEN,
        kv_cache_config=SimpleNamespace(
            kv_cache_groups=[SimpleNamespace(layer_names=[f"layer{g}"]) for g in (0, 1)]
        ),
        attn_groups=[[FakeGroup(0)], [FakeGroup(1)]],
        _kernel_block_sizes=[None, None],
        reorder_batch_threshold=threshold,
    )


class Request:
    def __init__(self, name, prompt):
        self.name, self.tokens, self.prompt_len = name, list(prompt), len(prompt)
        self.computed = 0
        self.blocks = ([], [])


class MadeUpScheduler:
    """Requests live in a slot each; outputs follow vLLM's conventions under pipelines."""

    def __init__(self, rng, slots, *, tokens_given=True):
        self.rng, self.tokens_given = rng, tokens_given
        self.running = [[] for _ in range(slots)]
        self.preempted = [[] for _ in range(slots)]
        self.finished = set()
        self.free = list(range(1, 4000))
        self.names = [f"r{i}" for i in range(40)]
        self.slot = -1
        self.made = 0

    def take(self, count):
        return [self.free.pop(self.rng.integers(len(self.free))) for _ in range(count)]

    def grow(self, request, scheduled):
        new = []
        for held, size in zip(request.blocks, BLOCK_SIZES, strict=True):
            ids = self.take(-(-(request.computed + scheduled) // size) - len(held))
            held.extend(ids)
            new.append(ids)
        return tuple(new)

    def drop(self, request):
        for held in request.blocks:
            self.free.extend(held)
        request.blocks = ([], [])

    def output(self):
        rng = self.rng
        self.made += 1
        calm = self.made // 25 % 2  # nothing but decoding, for a while
        self.slot = (self.slot + 1) % len(self.running)
        running, preempted = self.running[self.slot], self.preempted[self.slot]
        finished, self.finished = self.finished, set()
        for other in self.running:  # aborts hit any slot, in flight or not
            for request in list(other):
                full = len(request.tokens) >= MAX_LEN - 2
                if full or (not calm and rng.random() < 0.03):
                    other.remove(request)
                    self.drop(request)
                    finished.add(request.name)
                    self.names.append(request.name)
        for request in list(running):
            if not calm and rng.random() < 0.04:
                running.remove(request)
                self.drop(request)
                request.computed = 0
                preempted.append(request)
        rng.shuffle(self.names)

        amounts, rows = {}, []
        for request in running:
            if not calm and rng.random() < 0.05:
                continue  # sits this iteration out
            left = len(request.tokens) - request.computed
            amounts[request.name] = left if left == 1 or calm else int(rng.integers(1, left + 1))
            blocks = self.grow(request, amounts[request.name])
            rows.append((request, blocks if any(blocks) else None))
        resumed, new = [], []
        for _ in range(0 if calm else rng.integers(0, 3)):  # new ones and resumed ones in any order
            if preempted and rng.random() < 0.5:
                request = preempted.pop()
                resumed.append(request)
            elif self.names and len(running) < 12:
                request = Request(
                    self.names.pop(), rng.integers(0, 1000, rng.integers(1, 30)).tolist()
                )
                new.append(request)
            else:
                continue
            running.append(request)
            amounts[request.name] = int(rng.integers(1, len(request.tokens) - request.computed + 1))
            blocks = self.grow(request, amounts[request.name])
            if request in resumed:
                rows.append((request, blocks))
        cached = [request for request, _ in rows]
        output = SchedulerOutput(
            scheduled_new_reqs=[
                NewRequestData(
                    req_id=r.name,
                    prompt_token_ids=list(r.tokens),
                    mm_features=[],
                    sampling_params=SamplingParams(),
                    pooling_params=None,
                    block_ids=tuple(list(ids) for ids in r.blocks),
                    num_computed_tokens=r.computed,
                    lora_request=None,
                )
                for r in new
            ],
            scheduled_cached_reqs=CachedRequestData(
                req_ids=[r.name for r in cached],
                resumed_req_ids={r.name for r in resumed},
                new_token_ids=[r.tokens[r.computed : r.computed + amounts[r.name]] for r in cached]
                if self.tokens_given
                else [],
                all_token_ids={},
                new_block_ids=[blocks for _, blocks in rows],
                num_computed_tokens=[r.computed for r in cached],
                num_output_tokens=[len(r.tokens) - r.prompt_len for r in cached],
            ),
            num_scheduled_tokens=amounts,
            total_num_scheduled_tokens=sum(amounts.values()),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            finished_req_ids=finished,
            free_encoder_mm_hashes=[],
        )
        return output, {r.name: r for r in running if r.name in amounts}

    def sample(self, output, requests):
        """What the model and the sampler would do; returns the sampled tokens by name."""
        sampled = {}
        for name, amount in output.num_scheduled_tokens.items():
            request = requests[name]
            request.computed += amount
            if request.computed == len(request.tokens):
                sampled[name] = int(self.rng.integers(0, 1000))
                request.tokens.append(sampled[name])
        return sampled


class Counter:
    """Counts calls of a method of one object."""

    def __init__(self, owner, name):
        self.calls, self._method = 0, getattr(owner, name)
        setattr(owner, name, self)

    def __call__(self, *args, **kwargs):
        self.calls += 1
        return self._method(*args, **kwargs)


def sampled_names(inputs):
    return [inputs.req_ids[row] for row in inputs.sampled]


def check(inputs, preparer, attention, output, requests):
    """Every array against what the requests say."""
    amounts = output.num_scheduled_tokens
    target = preparer.buffers[inputs.buffer_set]
    assert sorted(inputs.req_ids) == sorted(amounts)
    start = 0
    ends = {}
    for row, name in enumerate(inputs.req_ids):
        request, amount = requests[name], amounts[name]
        first, stop = request.computed, request.computed + amount
        here = slice(start, start + amount)
        assert target.input_ids.np[here].tolist() == request.tokens[first:stop]
        assert target.positions.np[here].tolist() == list(range(first, stop))
        assert target.query_start_loc.np[row : row + 2].tolist() == [start, start + amount]
        assert target.seq_lens.np[row] == stop
        assert target.is_prefilling.np[row] == (first < request.prompt_len)
        for group, size in enumerate(BLOCK_SIZES):
            held = request.blocks[group]
            assert target.block_tables[group].np[row, : len(held)].tolist() == held
            assert target.slot_mappings[group].np[here].tolist() == [
                held[p // size] * size + p % size for p in range(first, stop)
            ]
        start += amount
        ends[name] = start - 1
    assert inputs.num_tokens == start
    samplers = [
        name
        for name, amount in amounts.items()
        if requests[name].computed + amount == len(requests[name].tokens)
    ]
    assert sampled_names(inputs) == samplers
    assert target.logits_indices.np[: len(samplers)].tolist() == [ends[name] for name in samplers]
    if inputs.all_sample:
        assert [ends[name] for name in samplers] == list(range(start))
    attention.build(inputs)
    for group in range(2):
        common, buffer_set = inputs.attn_metadata[f"layer{group}"]
        assert buffer_set == inputs.buffer_set
        assert common.num_reqs == len(amounts)
        assert common.num_actual_tokens == start
        assert common.max_query_len == max(amounts.values())
        assert common.max_seq_len == target.seq_lens.np[: len(amounts)].max()
        starts = target.query_start_loc.np[: len(amounts) + 1].tolist()
        assert common.query_start_loc.tolist() == starts
        table, mapping = target.block_tables[group].tensor, target.slot_mappings[group].tensor
        assert common.block_table_tensor.data_ptr() == table.data_ptr()
        assert inputs.slot_mapping[f"layer{group}"].data_ptr() == mapping.data_ptr()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("threshold", [None, 1, 8])
@pytest.mark.parametrize("slots", [1, 3])
def test_every_array_of_every_iteration(seed, threshold, slots):
    scheduler = MadeUpScheduler(np.random.default_rng(seed), slots)
    vllm_runner = fake_vllm_runner(threshold=threshold)
    preparer = InputPreparer(vllm_runner, slots=slots, sets=2)
    attention = AttentionMetadata(vllm_runner, preparer.buffers)
    steady = Counter(preparer, "_write_steady")
    resumed = Counter(preparer.states, "resume")
    added = Counter(preparer.states, "add")
    whole = 0
    for iteration in range(250):
        output, requests = scheduler.output()
        inputs = preparer.prepare(output, iteration % slots, iteration % 2, iteration)
        if output.total_num_scheduled_tokens:
            check(inputs, preparer, attention, output, requests)
            if threshold is not None:
                short = [
                    requests[n].computed > 0
                    and output.num_scheduled_tokens[n] <= threshold
                    and requests[n].computed >= requests[n].prompt_len
                    for n in inputs.req_ids
                ]
                assert short == sorted(short, reverse=True), "decodes come first"
        whole += inputs.all_sample
        scheduler.sample(output, requests)
    known = {r.name for group in (*scheduler.running, *scheduler.preempted) for r in group}
    assert known == set(preparer.states.index)
    assert resumed.calls > added.calls > 0
    assert whole > steady.calls > 0


@pytest.mark.parametrize("seed", range(3))
def test_tokens_that_the_scheduler_leaves_out_come_from_the_executor(seed):
    """With the tracker that SiPipe's executor has, whose rows of the logits are the same."""
    scheduler = MadeUpScheduler(np.random.default_rng(seed), 2, tokens_given=False)
    vllm_runner = fake_vllm_runner()
    preparer = InputPreparer(vllm_runner, slots=2, sets=2)
    attention = AttentionMetadata(vllm_runner, preparer.buffers)
    tracker = RequestTracker(engine_seed=0, balancer=Balancer(1, vocab_size=1000))
    for iteration in range(200):
        output, requests = scheduler.output()
        told = tracker.advance(iteration, output)
        inputs = preparer.prepare(output, iteration % 2, iteration % 2, iteration)
        if output.total_num_scheduled_tokens:
            check(inputs, preparer, attention, output, requests)
            assert sampled_names(inputs) == told.sampled
        for name, token in scheduler.sample(output, requests).items():
            tracker.record(iteration, name, token)


def decode_output(names, computed, tokens, finished=()):
    return SchedulerOutput(
        scheduled_new_reqs=[],
        scheduled_cached_reqs=CachedRequestData(
            req_ids=list(names),
            resumed_req_ids=set(),
            new_token_ids=tokens,
            all_token_ids={},
            new_block_ids=[None] * len(names),
            num_computed_tokens=[computed] * len(names),
            num_output_tokens=[computed - 1] * len(names),
        ),
        num_scheduled_tokens=dict.fromkeys(names, 1),
        total_num_scheduled_tokens=len(names),
        scheduled_spec_decode_tokens={},
        scheduled_encoder_inputs={},
        finished_req_ids=set(finished),
        free_encoder_mm_hashes=[],
    )


def new_output(*names):
    """One-token prompts of ``names``."""
    output = SchedulerOutput.make_empty()
    output.scheduled_new_reqs = [
        NewRequestData(
            req_id=name,
            prompt_token_ids=[9],
            mm_features=[],
            sampling_params=SamplingParams(),
            pooling_params=None,
            block_ids=([place], [place]),
            num_computed_tokens=0,
            lora_request=None,
        )
        for place, name in enumerate(names, start=1)
    ]
    output.num_scheduled_tokens = dict.fromkeys(names, 1)
    output.total_num_scheduled_tokens = len(names)
    return output


def started(*names):
    """A preparer whose slot 0 holds one-token prompts of ``names``."""
    preparer = InputPreparer(fake_vllm_runner(), slots=2, sets=2)
    preparer.prepare(new_output(*names), 0, 0, 0)
    return preparer


def test_a_steady_microbatch_moves_no_sequence():
    preparer = started("a", "b")
    written = [
        Counter(preparer.states, name) for name in ("add", "resume", "remove", "append_blocks")
    ]
    resolved = Counter(preparer.slots[0], "resolve")
    steady = Counter(preparer, "_write_steady")
    for computed in (1, 2, 3):
        preparer.prepare(decode_output("ab", computed, [[5], [6]]), 0, computed % 2, 1)
    assert steady.calls == 3
    assert [counter.calls for counter in (*written, resolved)] == [0] * 5


@pytest.mark.parametrize("tokens", [[], [[5], []], [[], []]])
def test_missing_tokens_are_an_error_that_says_what_to_do(tokens):
    preparer = started("a", "b")
    with pytest.raises(ValueError, match=r"new_token_ids has \d tokens for 2 .*RequestTracker"):
        preparer.prepare(decode_output("ab", 1, tokens), 0, 1, 1)


def test_more_tokens_than_blocks_names_the_request():
    preparer = started("a", "b")
    with pytest.raises(RuntimeError, match="request a was scheduled 5 tokens but has blocks for 4"):
        preparer.prepare(decode_output("ab", 4, [[5], [6]]), 0, 1, 1)


def test_an_empty_output_only_forgets():
    preparer = started("a", "b")
    output = SchedulerOutput.make_empty()
    output.finished_req_ids = {"a", "never seen"}
    inputs = preparer.prepare(output, 1, 1, 1)
    assert inputs.num_tokens == inputs.num_reqs == 0
    assert set(preparer.states.index) == {"b"}
