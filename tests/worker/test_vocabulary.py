"""The output projection shared out: whose rows, what is refused, and in which order it is done."""

from __future__ import annotations

import itertools
import os
import random
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm", reason="the module belongs to sipipe.worker")

from sipipe.worker.steps import StageSteps  # noqa: E402
from tests.worker.threaded_pipeline import (  # noqa: E402
    HAND_OVER,
    HIDDEN,
    VOCAB,
    check,
    link,
    pauses,
)
from vllm.config import VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.model_executor.layers.logits_processor import LogitsProcessor  # noqa: E402
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm  # noqa: E402
from vllm.model_executor.layers.vocab_parallel_embedding import (  # noqa: E402
    UnquantizedEmbeddingMethod,
)

from sipipe.errors import StallError  # noqa: E402
from sipipe.ipc.link.errors import LinkClosedError  # noqa: E402
from sipipe.ipc.ring.logits import LogitsChannel, LogitsWriter  # noqa: E402
from sipipe.messages.logits import LogitsShape  # noqa: E402
from sipipe.observe.phases import Phase  # noqa: E402
from sipipe.worker.device import HostDevice  # noqa: E402
from sipipe.worker.double_buffer import DoubleBuffer  # noqa: E402
from sipipe.worker.head import HeadShard, OfferedHead, time_parts  # noqa: E402
from sipipe.worker.logits import LogitsHandover, StageLogits  # noqa: E402
from sipipe.worker.vocabulary import SharedHead  # noqa: E402


@pytest.fixture(autouse=True)
def _config():
    with set_current_vllm_config(VllmConfig()), torch.inference_mode():
        yield


class Head(torch.nn.Module):
    """What vLLM's ``ParallelLMHead`` has, of one rank."""

    def __init__(self, dtype):
        super().__init__()
        # As padded as vLLM's.
        weight = torch.randn(1024, HIDDEN, dtype=dtype)
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.quant_method, self.tp_size = UnquantizedEmbeddingMethod(), 1
        self.shard_indices = SimpleNamespace(num_added_elements=0)
        dispatch_cpu_unquantized_gemm(self, remove_weight=False)


class Model(torch.nn.Module):
    def __init__(self, dtype=torch.float32, bias=None, after=lambda x: x, before=None, **options):
        super().__init__()
        self.lm_head = Head(dtype)
        self.processor = LogitsProcessor(VOCAB, **options)
        self.bias, self.after, self.before = bias, after, before or (lambda x: x)

    def compute_logits(self, hidden):
        return self.after(self.processor(self.lm_head, self.before(hidden), self.bias))


def stage_logits(model):
    config = SimpleNamespace(get_vocab_size=lambda: VOCAB)
    return StageLogits(SimpleNamespace(model=model, model_config=config, lora_config=None))


def shards(model, bounds, dtype, piece=None):
    offered = OfferedHead(stage_logits(model), torch.randn(3, HIDDEN, dtype=dtype))
    assert offered.reason == ""
    made = [
        HeadShard([offered.offer], start, stop, dtype, piece)
        for start, stop in itertools.pairwise(bounds)
    ]
    assert "sipipe-head" in Path("/proc/self/maps").read_text()
    offered.close()
    assert "sipipe-head" not in Path("/proc/self/maps").read_text()
    return made


@pytest.mark.parametrize("piece", [None, 256 * HIDDEN, 1])
@pytest.mark.parametrize("options", [{}, {"scale": 0.25}, {"soft_cap": 3.0, "scale": 2.0}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_are_the_whole_bit_for_bit(dtype, options, piece):
    model = Model(dtype, **options)
    hidden = torch.randn(5, HIDDEN, dtype=dtype) * 3
    whole = model.compute_logits(hidden)
    made = shards(model, (0, 192, 192, 704, VOCAB), dtype, piece)
    parts = [shard.whole(hidden) for shard in made]
    assert [part.shape[1] for part in parts] == [192, 0, 512, 296]
    assert torch.equal(torch.cat(parts, 1), whole)
    if piece == 1:
        assert [len(shard.pieces) for shard in made] == [3, 0, 8, 5], "blocks of 64"
    # Rows of other iterations change nothing but, by the kernel's blocks, the last bits.
    rows = torch.cat([torch.randn(30, HIDDEN, dtype=dtype), hidden])
    joined = torch.cat([shard.whole(rows) for shard in made], 1)[30:]
    torch.testing.assert_close(joined, whole)
    assert torch.equal(joined.argmax(1), whole.argmax(1))
    # The last stage has let go of its packed matrix, and scores prompts by the loaded one, which
    # adds up in another order.
    scored = model.compute_logits(hidden)
    torch.testing.assert_close(
        scored, whole, rtol=2e-5 if dtype == torch.float32 else 0.016, atol=1e-4
    )


def test_a_product_lies_where_it_should():
    model = Model()
    (shard,) = shards(model, (0, VOCAB), torch.float32)
    hidden, into = torch.randn(4, HIDDEN), torch.empty(4, VOCAB)
    assert shard.compute(hidden, 0, into).data_ptr() == into.data_ptr()


def test_rows_join_a_product_that_they_delay_by_less_than_reading_takes():
    (shard,) = shards(Model(), (0, VOCAB), torch.float32)
    assert min(shard.fixed, shard.per_row) >= 0, "measured"
    shard.fixed, shard.per_row = 6.5, 0.25
    assert [shard.joins(rows) for rows in (1, 26, 27)] == [True, True, False]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"bias": torch.randn(1024)}, "bias"),
        ({"after": torch.tanh}, "more to its logits"),
        ({"before": lambda x: x / 2}, "more to its logits"),
        (
            {"after": lambda x: x.index_fill_(1, torch.tensor([7]), -torch.inf)},
            "more to its logits",
        ),
        ({"before": lambda x: x.mul_(2)}, "more to its logits"),
        ({"quantized": True}, "quantized"),
        ({"added": 3}, "added vocabulary"),
        ({"gathered": True}, "tensor-parallel ranks"),
        ({"twice": True}, "a way of its own"),
        ({"own": True}, "a way of its own"),
    ],
)
def test_what_is_more_than_a_product_stays_on_the_last_stage(change, reason):
    quantized, added = change.pop("quantized", False), change.pop("added", 0)
    twice, own = change.pop("twice", False), change.pop("own", False)
    gathered = change.pop("gathered", False)
    model = Model(**change)
    if quantized:
        model.lm_head.quant_method = type("Other", (UnquantizedEmbeddingMethod,), {})()
    model.lm_head.shard_indices.num_added_elements = added
    if twice:
        once = model.compute_logits
        model.compute_logits = lambda hidden: once(hidden) if once(hidden) is not None else None
    if own:
        model.processor = type("Own", (LogitsProcessor,), {})(VOCAB)
    head = stage_logits(model)
    if gathered:  # as of a model that projects by its embedding itself
        model.lm_head.tp_size, model.processor._gather_logits = 2, lambda logits: logits
    assert reason in OfferedHead(head, torch.randn(3, HIDDEN)).reason


@pytest.mark.parametrize(
    ("change", "whole"),
    [
        ({"scale": 2.0}, False),
        ({"after": lambda x: x.mul_(2)}, True),
        ({"after": lambda x: x[:, :10].add(1)}, True),
    ],
)
def test_a_model_that_edits_its_logits_gets_whole_rows(change, whole):
    model = Model(**change)
    model.lm_head.tp_size, model.lm_head.tp_rank = 2, 1
    model.lm_head.num_embeddings_per_partition = 512
    model.lm_head.shard_indices = SimpleNamespace(num_added_elements=0)
    model.processor._gather_logits = lambda logits: logits
    head, hidden = stage_logits(model), torch.randn(3, HIDDEN)
    assert head.columns == (512, VOCAB)
    kept = hidden.clone()
    logits = head.settle(hidden)
    assert torch.equal(hidden, kept)
    assert torch.equal(logits, head.compute(hidden))
    assert (head.shard, head.columns) == ((None, (0, VOCAB)) if whole else (512, (512, VOCAB)))


def test_a_head_that_stays_is_left_as_it_was():
    model = Model()
    offered = OfferedHead(stage_logits(model), torch.randn(3, HIDDEN))
    packed = model.lm_head.cpu_linear
    offered.close(taken=False)
    assert model.lm_head.cpu_linear is packed


@pytest.mark.parametrize(
    ("device", "how"), [(None, {}), (HostDevice(), {"uniform_decode": True})], ids=["own", "second"]
)
def test_stages_say_how_long_their_parts_take(device, how):
    ran = []
    model = SimpleNamespace(get_hidden_size=lambda: HIDDEN, dtype=torch.float32)
    runner = SimpleNamespace(
        _dummy_run=lambda rows, **how: ran.append((rows, how)),
        model_config=model,
        vllm_config=VllmConfig(),
        device=torch.device("cpu"),
    )
    assert time_parts(runner, None, 7, device).head == 0
    assert all(seen == (7, how) for seen in ran)
    measured = time_parts(runner, stage_logits(Model()), 7, device)
    assert measured.head > 0
    assert measured.layers > 0


def inputs_of(iteration, rows=2):
    return SimpleNamespace(
        iteration=iteration,
        sampled=np.arange(rows),
        num_tokens=rows,
        num_reqs=rows,
        slot=0,
        prompt_chunks=(),
    )


class Shard:
    """A stand-in: two pieces of its columns; logit v of a row is its hidden state plus v."""

    def __init__(self, start, stop, joins=lambda _rows: True, pause=lambda: None):
        half = (stop - start) // 2
        self.start, self.pieces = start, [slice(0, half), slice(half, stop - start)]
        self.joins, self.pause, self.done = joins, pause, []
        self.fixed, self.per_row = 1.0, 0.5

    def compute(self, rows, piece, into):
        self.pause()
        self.done.append((piece, rows[:, 0].tolist()))
        columns = self.pieces[piece]
        into[:] = rows[:, :1] + self.start + torch.arange(columns.start, columns.stop)
        return into


class Other:
    """Another stage's end, and the last stage's."""

    def __init__(self, bound=HAND_OVER, joins=False):
        self.bell = os.eventfd(0)
        self.sender, receiver = link(bound)
        shape = LogitsShape(vocab=VOCAB, bounds=(0, 400, VOCAB))
        self.channel = LogitsChannel("t", shape, rows=10, entries=6, readers=["s"])
        self.logits = LogitsHandover(LogitsWriter(self.channel.endpoint))
        self.shard, self.phases = Shard(0, 400, lambda _rows: joins), []
        self.shared = SharedHead((), receiver, self.shard, self.logits, self.record, bound)
        self.last = SharedHead([self.sender], None, None, None, lambda *_: None, bound)

    def record(self, phase, inputs, began, ended):
        self.phases.append((phase, inputs.iteration, began, ended))

    def expect(self, iteration, rows=2):
        self.logits.expect(iteration, 2 * iteration % 10)
        self.shared.expect(inputs_of(iteration, rows))

    @property
    def done(self):
        """Iterations whose logits are all there."""
        return [phase[1] for phase in self.phases if phase[0] == Phase.HANDOVER]

    def spread(self, iteration):
        self.last.spread(inputs_of(iteration), torch.full((2, HIDDEN), float(iteration)))
        self.sender.wait_sent()  # a schema and what comes with it leave from a thread

    def close(self):
        for end in (self.shared, self.last, self.logits):
            end.close()
        self.channel.close()
        os.close(self.bell)


@pytest.fixture
def other(request):
    made = Other(**getattr(request, "param", {}))
    yield made
    made.close()


def test_nothing_is_waited_for_where_nothing_is_due(other):
    other.expect(0, rows=0)  # only prompts: no row samples
    other.shared.serve((other.bell,))
    other.shared.catch_up()
    other.shared.drain()


def test_the_oldest_comes_first_and_the_next_inputs_before_it(other):
    for iteration in range(3):
        other.expect(iteration)
    for iteration in range(2):
        other.spread(iteration)
    os.eventfd_write(other.bell, 1)
    other.shared.serve((other.bell,))
    assert other.shard.done == [], "a pass of decodes goes first where its inputs are there"
    other.shared.catch_up()
    assert other.done == [0, 1], "what has come is done before a pass with prompts"
    other.shared.serve((other.bell,))
    assert other.done == [0, 1], "what has not come holds nothing up"
    assert "iteration 2" in other.shared.doing()
    other.spread(2)
    os.eventfd_read(other.bell)
    other.shared.serve((other.bell,))
    assert other.done == [0, 1, 2]
    other.shared.drain()
    assert other.shared.doing() == ""


def test_a_pass_comes_between_two_pieces(other):
    other.expect(1)
    other.spread(1)
    other.shard.pause = lambda: os.eventfd_write(other.bell, 1)
    other.shared.serve((other.bell,))
    assert other.shard.done == [(0, [1.0, 1.0])]
    assert [phase[:2] for phase in other.phases] == [(Phase.LOGITS, 1), (Phase.HANDOVER, 1)]
    other.shard.pause = lambda: None
    os.eventfd_read(other.bell)
    other.shared.serve((other.bell,))
    assert [piece for piece, _ in other.shard.done] == [0, 1]
    assert len(other.phases) == 4, "each part has its time"
    other.shared.drain()


@pytest.mark.parametrize(("passing", "pieces"), [(0.9, 1), (1.1, 2), (2.1, 2)])
def test_a_pass_that_is_longer_than_the_rest_comes_behind_it(other, passing, pieces):
    other.expect(1)
    other.spread(1)
    other.shared.passing = passing
    other.shard.pause = lambda: os.eventfd_write(other.bell, 1)
    other.shared.serve((other.bell,))  # two seconds for two rows: one is left after a piece
    assert len(other.shard.done) == pieces


@pytest.mark.parametrize(
    ("passing", "left", "decodes", "pieces"),
    [(4, 0.5, True, 2), (4, 0.4, True, 0), (0, 1.0, True, 0), (0, 0.1, False, 2)],
)
def test_a_product_that_is_shorter_than_the_rest_of_a_pass_goes_between_its_layers(
    other, passing, left, decodes, pieces
):
    other.shared.passing = passing
    between = other.shared.begin_pass(1000, decodes)
    between(left)
    other.expect(1)
    between(left)
    assert other.shard.done == [], "what has not come is not waited for"
    other.spread(1)
    between(left)  # two seconds for two rows, as they were measured
    assert len(other.shard.done) == pieces
    if pieces:
        # In the record the product went before the pass, and no time counts twice.
        (_, _, began, computed), (_, _, copied, ended) = other.phases
        assert (began, computed, ended) == (1000, copied, other.shared.end_pass(decodes))
    other.shared.catch_up()
    assert other.done == [1]


@pytest.mark.parametrize("other", [{"joins": True}], indirect=True)
def test_one_product_for_what_has_come(other):
    for iteration in range(4):
        other.expect(iteration)
    for iteration in range(3):
        other.spread(iteration)
    other.shared.catch_up()
    rows = [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]
    assert other.shard.done == [(0, rows), (1, rows)], "the matrix is read once"
    assert other.done == [0, 1, 2]
    for iteration in range(3):
        place = other.logits.part(2 * iteration, 2)
        assert (place == iteration + torch.arange(400)).all()
    computed = [phase for phase in other.phases if phase[0] == Phase.LOGITS]
    assert all(a[3] == b[2] for a, b in itertools.pairwise(computed)), "no time counts twice"
    other.spread(3)
    other.shared.serve((other.bell,))
    assert other.done == [0, 1, 2, 3]


@pytest.mark.parametrize("other", [{"bound": 0.01}], indirect=True)
def test_rows_that_do_not_come_are_said(other):
    other.expect(7)
    with pytest.raises(StallError, match="iteration 7"):
        other.shared.serve((other.bell,))
    with pytest.raises(StallError, match="logits of iteration 7 are due"):
        other.shared.drain()


def test_the_end_of_the_last_stage_ends_the_wait(other):
    other.expect(0)
    other.last.close()
    with pytest.raises(LinkClosedError):
        other.shared.serve((other.bell,))


def test_an_end_from_another_thread_ends_the_wait(other):
    other.expect(0)
    thread = threading.Thread(target=other.shared.close)
    thread.start()
    with pytest.raises(LinkClosedError):
        other.shared.serve((other.bell,))
    thread.join(HAND_OVER)
    other.shared.drain()


# ---- a whole pipeline in threads ---------------------------------------------------------------


class Runner:
    """Adds one to every hidden state; stops for a moment as its script says."""

    def __init__(self, script, first):
        self.pause, self.first = pauses(script), first

    def prepare(self, output, _slot, _buffer_set, iteration):
        self.pause()
        inputs = inputs_of(iteration, output)
        inputs.num_reqs -= iteration % 3 == 0  # as if it had prompts
        return inputs

    def forward(self, inputs, received, between):
        for left in (1.0, 0.5):  # two layers
            self.pause()
            between(left)
        self.pause()
        if self.first:
            rows = torch.full((inputs.num_tokens, HIDDEN), float(inputs.iteration))
        else:
            rows = received["hidden_states"].clone()
        return {"hidden_states": rows + 1}

    def rows(self, _inputs, hidden):
        return hidden["hidden_states"]


class Stage:
    def __init__(self, pipeline, stage):
        script, last = f"{pipeline.seed}/{stage}", stage == pipeline.stages - 1
        runner = Runner(script, stage == 0)
        self.handover = LogitsHandover(LogitsWriter(pipeline.channel.endpoint, stage))
        self.steps = StageSteps(
            runner,
            None,
            pipeline.links[stage - 1][1] if stage else None,
            None if last else pipeline.links[stage][0],
            self.handover,
            report=None,
            record=lambda *_: None,
            stall_timeout=HAND_OVER,
        )
        chance = random.Random(f"{script}/joins")
        first, stop = pipeline.bounds[stage : stage + 2]
        shard = Shard(first, stop, lambda _: chance.random() < 0.5, runner.pause)
        self.steps.shared = SharedHead(
            [ends[0] for ends in pipeline.heads] if last else [],
            None if last else pipeline.heads[stage][1],
            shard,
            self.handover,
            lambda *_: None,
            HAND_OVER,
        )
        self.buffer = DoubleBuffer(
            self.steps,
            sets=2,
            stall_timeout=HAND_OVER,
            interrupt=self.steps.interrupt,
            meanwhile=self.steps.meanwhile,
        )
        self.steps.shared.passing = 0.0
        shard.fixed, shard.per_row = 1e-4, 1e-5  # passes of threads take about as long
        self.orders, self.threads = pipeline.orders[stage], (self.follow, self.buffer.run)

    def follow(self):
        while (order := self.orders.get(timeout=HAND_OVER)) is not None:
            iteration, rows, place = order
            self.handover.expect(iteration, place)
            self.buffer.prepare(iteration, 0, rows)
        self.buffer.drain()
        self.steps.shared.drain()
        self.buffer.close()

    def close(self):
        self.handover.close()


@pytest.mark.parametrize(("stages", "inflight"), [(2, 1), (2, 3), (4, 2), (4, 5), (8, 3), (8, 9)])
def test_every_iteration_comes_out_whole_whoever_is_late(stages, inflight):
    check(Stage, stages, inflight)
