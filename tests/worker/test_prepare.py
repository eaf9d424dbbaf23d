"""Input preparation against vLLM's own, under scheduling outputs of every kind.

No engine and no model: a made-up scheduler joins, chunks, decodes, preempts, finishes and reuses
names over several slots. Each output goes through vLLM's second runner as it is, and through one in
whose place SiPipe prepares; whatever a forward pass or its metadata would read is compared.
"""

from dataclasses import fields, replace
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm", reason="vLLM's own preparation is the oracle")

from tests.scheduled import new_request  # noqa: E402
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput  # noqa: E402

from sipipe.engine.iteration.balance import Balancer  # noqa: E402
from sipipe.engine.iteration.iterations import only_decodes  # noqa: E402
from sipipe.engine.iteration.requests import RequestTracker  # noqa: E402
from sipipe.worker.device import HostDevice  # noqa: E402
from sipipe.worker.hooks import preparation  # noqa: E402
from sipipe.worker.hooks.preparation import SiPipePrepares, why_vllm_prepares  # noqa: E402
from sipipe.worker.inputs import placement  # noqa: E402
from sipipe.worker.inputs.buffers import PackedInputBuffers  # noqa: E402
from sipipe.worker.inputs.model_input import ModelInput  # noqa: E402
from sipipe.worker.inputs.prepare import InputPreparer  # noqa: E402

from .vllm_preparation import BLOCK_SIZES, MAX_LEN, PreparingRunner  # noqa: E402

ROTS = {"max_seq_len_np"}
"""Fields that only vLLM's broadcast of tokens reads."""
UNREAD = {"input_ids", "positions"}
"""Fields that hold anything behind the batch's tokens."""


class Request:
    def __init__(self, name, prompt):
        self.name, self.tokens, self.prompt_len = name, list(prompt), len(prompt)
        self.computed = 0
        self.blocks = ([], [])


def introduced(request):
    return new_request(
        request.name,
        request.tokens[: request.prompt_len],
        blocks=request.blocks,
        computed=request.computed,
        prefill=request.tokens,
    )


class MadeUpScheduler:
    """Requests live in a slot each; outputs follow vLLM's conventions for its second runner."""

    def __init__(self, rng, slots, *, tokens_given=True):
        self.rng, self.tokens_given = rng, tokens_given
        self.running = [[] for _ in range(slots)]
        self.preempted = [[] for _ in range(slots)]
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
        running, waiting = self.running[self.slot], self.preempted[self.slot]
        finished, preempted = set(), set()
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
                waiting.append(request)
                preempted.add(request.name)
        rng.shuffle(self.names)
        amounts, cached, new_blocks = {}, [], []
        for request in running:
            if not calm and rng.random() < 0.05:
                continue  # sits this iteration out
            left = len(request.tokens) - request.computed
            amounts[request.name] = left if left == 1 or calm else int(rng.integers(1, left + 1))
            blocks = self.grow(request, amounts[request.name])
            cached.append(request)
            new_blocks.append(blocks if any(blocks) else None)
        new = []
        for _ in range(0 if calm else rng.integers(0, 3)):
            if waiting and rng.random() < 0.5 and waiting[-1].name not in preempted:
                request = waiting.pop()  # as a new one, with its tokens so far
            elif self.names and len(running) < 12:
                tokens = rng.integers(0, 1000, rng.integers(1, 30)).tolist()
                request = Request(self.names.pop(), tokens)
            else:
                continue
            new.append(request)
            running.append(request)
            known = 4 * int(rng.integers(0, 2)) if len(request.tokens) > 8 else 0
            request.computed = known  # found in the prefix cache
            amounts[request.name] = int(rng.integers(1, len(request.tokens) - known + 1))
            self.grow(request, amounts[request.name])
        output = SchedulerOutput.make_empty()
        output.scheduled_new_reqs = [introduced(request) for request in new]
        output.scheduled_cached_reqs = CachedRequestData(
            req_ids=[r.name for r in cached],
            resumed_req_ids=set(),
            new_token_ids=[r.tokens[r.computed : r.computed + amounts[r.name]] for r in cached]
            if self.tokens_given
            else [],
            all_token_ids={},
            new_block_ids=new_blocks,
            num_computed_tokens=[r.computed for r in cached],
            num_output_tokens=[len(r.tokens) - r.prompt_len for r in cached],
        )
        order = list(amounts)
        if not calm and rng.random() < 0.3:
            rng.shuffle(order)
        output.num_scheduled_tokens = {name: amounts[name] for name in order}
        output.total_num_scheduled_tokens = sum(amounts.values())
        output.finished_req_ids, output.preempted_req_ids = finished, preempted
        if not calm and rng.random() < 0.2:
            output.new_block_ids_to_zero = self.free[:3]
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


def same(ours, theirs):
    if isinstance(theirs, torch.Tensor):
        return ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    if isinstance(theirs, np.ndarray):
        return ours.dtype == theirs.dtype and np.array_equal(ours, theirs)
    return type(ours) is type(theirs) and ours == theirs


def compare(ours, theirs, scheduled):
    """Of what :meth:`PreparingRunner.step` returns."""
    batch, state, uniform, tables, slots = ours
    vllm_batch, vllm_state, vllm_uniform, vllm_tables, vllm_slots = theirs
    for field in fields(vllm_batch):
        found, expected = getattr(batch, field.name), getattr(vllm_batch, field.name)
        if field.name in ROTS:
            continue
        if field.name in UNREAD:
            found, expected = found[: batch.num_tokens], expected[: batch.num_tokens]
        assert same(found, expected), (field.name, found, expected)
    for name in vllm_state._fields:
        if name not in ROTS:
            found, expected = getattr(state, name), getattr(vllm_state, name)
            assert same(found, expected), (name, found, expected)
    assert uniform == vllm_uniform
    assert torch.equal(slots, vllm_slots)
    ends = vllm_batch.num_computed_tokens_np + vllm_batch.num_scheduled_tokens
    for ids, vllm_ids, size in zip(tables, vllm_tables, BLOCK_SIZES, strict=True):
        assert ids.shape == vllm_ids.shape
        for row, end in enumerate(ends):  # what is behind a request's blocks nobody reads
            used = -(-int(end) // size)
            assert torch.equal(ids[row, :used], vllm_ids[row, :used])
        assert not ids[len(ends) :].any()
    assert batch.num_tokens == sum(scheduled.values())


def counted(owner, name):
    """Counts calls of a method of one object."""
    setattr(owner, name, Mock(wraps=getattr(owner, name)))
    return getattr(owner, name)


@pytest.fixture(params=["in place", "copied"])
def prepared(request, monkeypatch):
    """A function that makes a runner in whose place SiPipe prepares."""

    def make(slots=2, sets=2):
        runner, device = PreparingRunner(), HostDevice()
        if request.param == "copied":  # as on a GPU, with tensors of the host
            monkeypatch.setattr(preparation, "placement_of", placement.Copied)
            sizes = runner.max_num_reqs, runner.max_num_tokens
            runner.input_buffers = PackedInputBuffers(*sizes, 64, runner.device)

        def tokens(inputs):
            inputs.awaits = False
            return runner.tokens.pop(inputs.iteration)

        told = {"slots": slots, "sets": sets, "logits": 64}
        return runner, SiPipePrepares(tokens, runner, device, **told)

    return make


def prepare(by, output, slot, buffer_set, iteration, awaits=False):
    place = {"iteration": iteration, "slot": slot, "buffer_set": buffer_set}
    inputs = ModelInput(**place, output=output, awaits=awaits)
    by.prepare(inputs)
    return inputs


def padding(rng, output):
    """What a graph would pad the batch to: requests or None, and tokens."""
    tokens = output.total_num_scheduled_tokens
    reqs = len(output.num_scheduled_tokens)
    return (
        (None, 0),
        (None, tokens + int(rng.integers(0, 9))),
        (reqs + int(rng.integers(0, 5)), tokens + 8),
    )[rng.integers(3)]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("slots", [1, 3])
def test_every_field_of_every_iteration_is_vllms(prepared, seed, slots):
    rng = np.random.default_rng(seed)
    scheduler = MadeUpScheduler(np.random.default_rng(seed), slots)
    theirs = PreparingRunner()
    ours, side = prepared(slots)
    steady = added = lates = 0
    names_before = {}
    for iteration in range(150):
        output, requests = scheduler.output()
        names = list(output.num_scheduled_tokens)
        added += len(output.scheduled_new_reqs)
        steady += only_decodes(output) and names == names_before.get(iteration % slots)
        names_before[iteration % slots] = names
        padded = padding(rng, output)
        known, early = output.scheduled_cached_reqs, output
        late = bool(rng.integers(2)) and only_decodes(output) and all(known.new_token_ids)
        if late:  # its tokens come when the metadata of its batch are there
            ours.tokens[iteration] = np.concatenate(known.new_token_ids)
            early = replace(output, scheduled_cached_reqs=replace(known, new_token_ids=[]))
            lates += 1
        inputs = prepare(side, early, iteration % slots, iteration % 2, iteration, late)
        side.begin(inputs)
        found, expected = ours.step(early, *padded), theirs.step(output, *padded)
        assert ours.req_states.req_id_to_index == theirs.req_states.req_id_to_index
        assert ours.kv_block_zeroer.zeroed == theirs.kv_block_zeroer.zeroed
        if expected is not None:
            compare(found, expected, output.num_scheduled_tokens)
            names = [inputs.req_ids[row] for row in inputs.logits_rows]
            amounts = output.num_scheduled_tokens
            assert names == [
                n for n in amounts if requests[n].computed + amounts[n] == len(requests[n].tokens)
            ]
            ours.finish(found[0])
            theirs.finish(expected[0])
        scheduler.sample(output, requests)
    assert added > 20
    assert steady > 20
    assert lates > 10


@pytest.mark.parametrize("seed", range(2))
def test_tokens_that_the_scheduler_leaves_out_come_from_the_executor(prepared, seed):
    """With the tracker that SiPipe's executor has, whose rows of the logits are the same."""
    scheduler = MadeUpScheduler(np.random.default_rng(seed), 2, tokens_given=False)
    ours, side = prepared()
    theirs = PreparingRunner()
    tracker = RequestTracker(engine_seed=0, balancer=Balancer(1, vocab_size=1000))
    for iteration in range(100):
        output, requests = scheduler.output()
        told = tracker.advance(iteration, output)
        inputs = prepare(side, output, iteration % 2, iteration % 2, iteration)
        side.begin(inputs)
        found, expected = ours.step(output), theirs.step(output)
        if expected is not None:
            compare(found, expected, output.num_scheduled_tokens)
            assert [inputs.req_ids[row] for row in inputs.logits_rows] == told.sampled
            theirs.finish(expected[0])
        for name, token in scheduler.sample(output, requests).items():
            tracker.record(iteration, [(name, [token])])


def decode_output(names, computed, tokens, finished=()):
    output = SchedulerOutput.make_empty()
    output.scheduled_cached_reqs = CachedRequestData(
        req_ids=list(names),
        resumed_req_ids=set(),
        new_token_ids=tokens,
        all_token_ids={},
        new_block_ids=[None] * len(names),
        num_computed_tokens=[computed] * len(names),
        num_output_tokens=[computed - 1] * len(names),
    )
    output.num_scheduled_tokens = dict.fromkeys(names, 1)
    output.total_num_scheduled_tokens = len(names)
    output.finished_req_ids = set(finished)
    return output


def new_output(*names):
    """One-token prompts of ``names``."""
    output = SchedulerOutput.make_empty()
    for place, name in enumerate(names, start=1):
        request = Request(name, [9])
        request.blocks = ([place], [place])
        output.scheduled_new_reqs.append(introduced(request))
    output.num_scheduled_tokens = dict.fromkeys(names, 1)
    output.total_num_scheduled_tokens = len(names)
    return output


def preparer_of(runner, slots, *, logits=64, following=False):
    placed = placement.InPlace(runner, HostDevice(), 2, logits)
    return InputPreparer(
        runner, placed.buffers, groups=placed.groups, slots=slots, following=following
    )


def started(*names, **options):
    """A preparer whose slot 0 holds one-token prompts of ``names``."""
    preparer = preparer_of(PreparingRunner(), slots=2, **options)
    prepare(preparer, new_output(*names), 0, 0, 0)
    return preparer


def test_a_steady_microbatch_moves_no_sequence():
    preparer = started("a", "b")
    written = [counted(preparer.states, name) for name in ("add", "remove", "append_blocks")]
    resolved = counted(preparer.slots[0], "resolve")
    steady = counted(preparer, "_write_steady")
    for computed in (1, 2, 3):
        prepare(preparer, decode_output("ab", computed, [[5], [6]]), 0, computed % 2, 1)
    assert steady.call_count == 3
    assert [counter.call_count for counter in (*written, resolved)] == [0] * 4


def test_the_order_of_scheduling_is_that_of_the_rows_of_logits():
    preparer = started("a", "b")
    prepare(preparer, decode_output("ab", 1, [[5], [6]]), 0, 1, 1)
    output = decode_output("ab", 2, [[5], [6]])
    output.num_scheduled_tokens = {"b": 1, "a": 1}
    inputs = prepare(preparer, output, 0, 0, 2)
    assert [inputs.req_ids[row] for row in inputs.logits_rows] == ["b", "a"]


def test_a_name_that_comes_back_has_the_row_of_its_new_request():
    preparer = started("a")
    before = preparer.states.index["a"]
    prepare(preparer, new_output("x"), 1, 1, 1)
    for name in "ax":  # the row that was freed last is given first
        prepare(preparer, decode_output("", 0, [], finished=[name]), 1, 0, 2)
    (row,) = prepare(preparer, new_output("a"), 0, 1, 3).new_rows
    assert preparer.slots[0].rows.tolist() == [row] != [before]


def test_more_tokens_than_blocks_names_the_request():
    preparer = started("a", "b")
    with pytest.raises(
        AssertionError, match="request a was scheduled 5 tokens but has blocks for 4"
    ):
        prepare(preparer, decode_output("ab", 4, [[5], [6]]), 0, 1, 1)


def drafted_output():
    """One token of a and of c, and one of b with two drafts."""
    output = decode_output("abc", 1, [[5], [6, 7, 8], [9]])
    output.num_scheduled_tokens = {"a": 1, "b": 3, "c": 1}
    output.total_num_scheduled_tokens = 5
    output.scheduled_spec_decode_tokens = {"b": [7, 8]}
    return output


def test_drafts_have_the_rows_of_logits_behind_their_requests():
    preparer = started("a", "b", "c")
    inputs = prepare(preparer, drafted_output(), 0, 1, 1)
    source = preparer.buffers[1]
    places = source.logits_indices.np[inputs.logits_rows]
    assert source.input_ids.np[places].tolist() == [5, 6, 7, 8, 9]


def test_drafts_take_the_last_row_and_none_behind_it():
    prepare(started("a", "b", "c", logits=5), drafted_output(), 0, 1, 1)
    with pytest.raises(AssertionError, match="5 rows of logits, of 4 at most"):
        prepare(started("a", "b", "c", logits=4), drafted_output(), 0, 1, 1)


def test_a_head_is_given_the_prompts_token_behind_each_part():
    preparer = preparer_of(PreparingRunner(), slots=1, following=True)
    output = new_output("part", "whole")
    part, whole = output.scheduled_new_reqs
    part.prefill_token_ids, part.block_ids = [11, 12, 13, 14, 15, 16], ([1], [1])
    whole.prefill_token_ids, whole.block_ids = [21, 22, 23], ([2], [2])
    output.num_scheduled_tokens = {"part": 4, "whole": 3}
    output.total_num_scheduled_tokens = 7
    inputs = prepare(preparer, output, 0, 0, 0)
    following = dict(zip(inputs.req_ids, inputs.following.tolist(), strict=True))
    assert following == {"part": 15, "whole": 0}


def test_an_empty_output_only_forgets():
    preparer = started("a", "b")
    output = SchedulerOutput.make_empty()
    output.finished_req_ids = {"a", "never seen"}
    inputs = prepare(preparer, output, 1, 1, 1)
    assert inputs.num_tokens == inputs.num_reqs == 0
    assert set(preparer.states.index) == {"b"}


def test_a_row_that_is_not_vllms_ends_the_stage_with_the_requests_name(prepared):
    runner, side = prepared()
    runner.req_states.free_indices.reverse()  # as if vLLM had given and freed one since
    output = new_output("a")
    side.begin(prepare(side, output, 0, 0, 0))
    with pytest.raises(AssertionError, match="request a has row 63 here and 0 in vLLM's runner"):
        runner.step(output)


@pytest.mark.parametrize(
    ("window", "passed"), [(0, 0), (1, 2), (4, 2), (5, 1), (8, 1), (9, 0), (100, 0)]
)
def test_a_window_leaves_out_what_it_has_passed_and_a_state_has_no_slots(window, passed):
    """As vLLM 0.33's block tables say it; 0.32 has no windows."""
    runner = PreparingRunner()
    runner.block_tables.sliding_window_reach = torch.tensor([window, 0], dtype=torch.int32)
    runner.block_tables.slot_mapping_enabled[1] = False
    preparer = preparer_of(runner, slots=1)
    output = new_output("a")
    new = output.scheduled_new_reqs[0]
    new.prefill_token_ids, new.num_computed_tokens = list(range(13)), 12
    new.block_ids = ([5, 6, 7, 8], [9])
    prepare(preparer, output, 0, 0, 0)
    source = preparer.buffers[0]
    assert source.block_tables[0].np[0, :4].tolist() == [0] * passed + [5, 6, 7, 8][passed:]
    assert source.slot_mappings.np[:, 0].tolist() == [8 * 4, -1]
    assert source.block_tables[1].np[0, 0] == 9


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_speculative_steps": 1}, "several tokens"),
        ({"cache_config": SimpleNamespace(mamba_cache_mode="align")}, "recurrent states"),
        ({"dcp_size": 2}, "split over ranks"),
        ({"model_config": SimpleNamespace(enable_prompt_embeds=True)}, "embeddings"),
        ({"fast_prefill": object()}, "leaves tokens out"),
        ({"model_state": object()}, "brings its own inputs"),
        ({}, ""),
    ],
)
def test_who_prepares(monkeypatch, change, reason):
    runner = PreparingRunner()
    monkeypatch.setattr(preparation, "KNOWN_STATES", (type(runner.model_state),))
    for name, value in change.items():
        setattr(runner, name, value)
    found = why_vllm_prepares(runner)
    assert reason in found
    assert bool(found) is bool(reason)
