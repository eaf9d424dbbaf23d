"""Any order in which stages that share the output projection may go on, one step of one at a time.

Whole pipelines, to 8 stages and to 2 tensor-parallel ranks of each, with real links, BIC-L and
:class:`SharedHead`. Each rank's device thread is an actor (:mod:`tests.ipc.sequencer`) that stops
before whatever others can see or be late for: a poll, a piece of a product, a layer, a send. An
actor whose poll finds nothing sleeps until something has changed; where everybody sleeps, the test
ends with "deadlock". Time is counted in steps, so that a run can be repeated.
"""

from __future__ import annotations

import itertools
import os
import select
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("vllm", reason="the module belongs to sipipe.worker")

from tests.ipc.sequencer import Sequencer  # noqa: E402
from tests.worker.threaded_pipeline import HIDDEN, ROWS, link  # noqa: E402

from sipipe.errors import StallError  # noqa: E402
from sipipe.ipc.ring.logits import LogitsChannel, LogitsReader, LogitsWriter  # noqa: E402
from sipipe.messages.logits import LogitsShape  # noqa: E402
from sipipe.observe.phases import Phase  # noqa: E402
from sipipe.worker import steps, vocabulary  # noqa: E402
from sipipe.worker.logits import LogitsHandover  # noqa: E402

VOCAB, LAYERS, PIECES, TICK = 160, 3, 3, 1000


class World:
    """``batches``: of each iteration, rows that sample and whether it is of decodes only.

    ``fixed``: steps that a product is measured to take; ``joins``: answers to whether rows join.
    """

    def __init__(self, stages, ranks, inflight, batches, fixed, joins, choices):
        self.sequencer = Sequencer(choices)
        self.stages, self.ranks, self.inflight = stages, ranks, inflight
        self.batches, self.fixed, self.joins = batches, fixed * TICK / 1e9, itertools.cycle(joins)
        self.now = 0
        writers = stages * ranks
        self.bounds = tuple(VOCAB * writer // writers for writer in range(writers + 1))
        self.channel = LogitsChannel(
            "t",
            LogitsShape(vocab=VOCAB, bounds=self.bounds),
            rows=ROWS * (inflight + 1),
            entries=inflight + 2,
            readers=["s"],
        )
        depth = max(2, inflight)
        self.links = [link(depth=depth) for _ in range((stages - 1) * ranks)]
        self.heads = [link(depth=depth) for _ in range((stages - 1) * ranks)]
        self.published = [[] for _ in range(writers)]
        self.reported, self.arrived, self.seen = [], {}, set()
        self.all = [Rank(self, stage, rank) for stage in range(stages) for rank in range(ranks)]

    # ---- what the modules under test have in the place of `select` and `time` -----------------

    POLLIN = select.POLLIN

    def poll(self):
        return Poll(self)

    def monotonic_ns(self):
        self.now += 1
        return self.now

    # ---- for actors ---------------------------------------------------------------------------

    def step(self):
        self.now += TICK
        self.sequencer.step()

    def change(self):
        """Others may find now what they sleep for."""
        self.sequencer.changes += 1

    def sleep(self):
        self.sequencer.step(block=True)

    def meet(self, *place):
        """A collective of a stage's ranks."""
        self.arrived[place] = self.arrived.get(place, 0) + 1
        self.change()
        while self.arrived[place] < self.ranks:
            self.sleep()

    # ---- a run --------------------------------------------------------------------------------

    def run(self):
        self.sequencer.spawn("engine and sampler", self.serve)
        for each in self.all:
            self.sequencer.spawn(f"stage{each.stage}.{each.rank}", each.run)
        self.sequencer.run()

    def serve(self):
        reader = LogitsReader(self.channel.endpoint, "s")
        for iteration in range(len(self.batches) + self.inflight):
            if (done := iteration - self.inflight) >= 0:
                self.resolve(done, reader)
            if iteration < len(self.batches):
                for each in self.all:
                    self.step()
                    each.dispatch(iteration)
        reader.close()

    def resolve(self, iteration, reader):
        rows, _ = self.batches[iteration]
        if not rows:
            while iteration not in self.reported:
                self.sleep()
            return
        while not all(iteration in told for told in self.published):
            self.sleep()
        with reader.receive() as received:
            assert (received.iteration, received.batch) == (iteration, rows)
            assert (received.array == iteration + self.stages + np.arange(VOCAB)).all()

    def check(self):
        sampling = [i for i, (rows, _) in enumerate(self.batches) if rows]
        assert self.published == [sampling] * len(self.published), "once each, in order"
        assert self.reported == [i for i, (rows, _) in enumerate(self.batches) if not rows]
        for each in self.all:
            each.check()

    def close(self):
        for actor in self.sequencer.actors.values():  # of a run that has failed
            if not actor.done:
                actor.killed = True
                actor.go.release()
        for end in itertools.chain(*self.links, *self.heads):
            end.close()
        for each in self.all:
            each.close()
        self.channel.close()


class Poll:
    """``select.poll()`` of an actor."""

    def __init__(self, world):
        self.world, self.real = world, select.poll()
        self.register = self.real.register

    def poll(self, milliseconds):
        self.world.step()
        while not (found := self.real.poll(0)) and milliseconds:
            self.world.sleep()
        return found


class Sending:
    """A link's sender, of which everything has left when it returns."""

    def __init__(self, world, sender):
        self.world, self.sender, self.close = world, sender, sender.close

    def send(self, *frame):
        self.world.step()
        self.sender.send(*frame)
        self.sender.wait_sent()
        self.world.change()


class Receiving:
    """A link's receiver, whose bounded wait is an actor's."""

    def __init__(self, world, receiver):
        self.world, self.receiver = world, receiver
        self.release, self.close = receiver.release, receiver.close

    @property
    def descriptors(self):
        return self.receiver.descriptors

    def take(self, iteration, rows, timeout=None):
        while True:
            try:
                return self.receiver.take(iteration, rows, timeout=0)
            except StallError:
                if timeout is not None:
                    raise
            self.world.sleep()


class Logits(LogitsHandover):
    """Tells what was published, and that others may find it."""

    def __init__(self, world, writer):
        super().__init__(LogitsWriter(world.channel.endpoint, writer), "rows")
        self.world, self.told = world, world.published[writer]

    def publish(self, iteration, rows, timeout):
        self.world.step()
        super().publish(iteration, rows, timeout)
        self.told.append(iteration)
        self.world.change()


class Shard:
    """Logit v of a row is its hidden state plus v."""

    def __init__(self, world, start, stop):
        self.world, self.start = world, start
        edges = [(stop - start) * piece // PIECES for piece in range(PIECES + 1)]
        self.pieces = [slice(*edge) for edge in itertools.pairwise(edges)]
        self.fixed, self.per_row = world.fixed, 0.0

    def joins(self, _rows):
        return next(self.world.joins)

    def compute(self, rows, piece, into):
        self.world.step()
        columns = self.pieces[piece]
        into[:] = rows[:, :1] + self.start + torch.arange(columns.start, columns.stop)
        return into


class Rank:
    """A rank of a stage: its device thread, and the model, which adds one to hidden states."""

    def __init__(self, world, stage, rank):
        self.world, self.stage, self.rank = world, stage, rank
        self.bell, self.records, self.orders = os.eventfd(0, os.EFD_SEMAPHORE), [], []
        last = stage == world.stages - 1
        at, writer = stage * world.ranks + rank, rank * world.stages + stage
        self.logits = Logits(world, writer)
        before = Receiving(world, world.links[at - world.ranks][1]) if stage else None
        behind = None if last else Sending(world, world.links[at][0])
        spread = [Sending(world, ends[0]) for ends in world.heads[rank :: world.ranks]]
        self.shared = vocabulary.SharedHead(
            spread if last else [],
            None if last else Receiving(world, world.heads[at][1]),
            Shard(world, *world.bounds[writer : writer + 2]),
            self.logits,
            self.record,
            bound=1.0,
        )
        report = self.report if last and not rank else None
        self.steps = steps.StageSteps(
            self, None, before, behind, self.logits,
            report=report, record=self.record, stall_timeout=1.0,
        )  # fmt: skip
        self.steps.shared = self.shared

    def dispatch(self, iteration):
        """What the preparing thread does."""
        rows, decodes = self.world.batches[iteration]
        if rows:
            self.logits.expect(iteration, iteration % (self.world.inflight + 1) * ROWS)
        requests = max(1, rows)
        inputs = SimpleNamespace(
            iteration=iteration,
            sampled=np.arange(rows),
            num_reqs=requests,
            num_tokens=requests + (not decodes),
            prompt_chunks=(),
        )
        self.orders.append(inputs)
        os.eventfd_write(self.bell, 1)
        self.world.change()

    def run(self):
        """As :class:`sipipe.worker.double_buffer.DoubleBuffer` does it."""
        for _ in self.world.batches:
            self.steps.meanwhile((self.bell,))
            wait = self.world.poll()
            wait.register(self.bell, select.POLLIN)
            wait.poll(1)
            os.eventfd_read(self.bell)
            inputs = self.orders.pop(0)
            received = self.steps.receive(inputs)
            self.steps.send(inputs, self.steps.forward(inputs, received))
        self.steps.meanwhile(())  # until all that is due is done

    def forward(self, inputs, received, between):
        for layer in range(LAYERS):
            records = len(self.records)
            between(1 - layer / LAYERS)
            if len(self.records) > records:
                self.world.seen.add("a product between layers")
            self.world.step()
            self.world.meet(self.stage, inputs.iteration, layer)
        if received is None:
            rows = torch.full((inputs.num_tokens, HIDDEN), float(inputs.iteration))
        else:
            rows = received["hidden_states"].clone()
        return {"hidden_states": rows + 1}

    def rows(self, inputs, hidden):
        return hidden["hidden_states"][: len(inputs.sampled)]

    def report(self, iteration, _extras):
        self.world.reported.append(iteration)
        self.world.change()

    def record(self, phase, inputs, began, ended=0):
        self.records.append((began, ended or self.world.monotonic_ns(), phase, inputs.iteration))

    def check(self):
        self.shared.drain()
        assert self.shared.doing() == ""
        ordered = sorted(self.records, key=lambda record: record[:2])
        for one, other in itertools.pairwise(ordered):
            assert one[0] <= one[1] <= other[0], f"{one} and {other} overlap"
        products = [record for record in ordered if record[2] == Phase.LOGITS]
        if len(products) > len({record[3] for record in products}):
            self.world.seen.add("a pass between pieces")
        if any(a[1] == b[0] and a[3] != b[3] for a, b in itertools.pairwise(products)):
            self.world.seen.add("a product of several iterations")

    def close(self):
        self.logits.close()
        os.close(self.bell)


# Long bursts let one rank run far ahead, short ones stop it at an awkward place.
CHOICES = st.lists(
    st.tuples(st.integers(0, 16), st.integers(1, 5) | st.integers(1, 60)), max_size=40
)
BATCHES = st.lists(st.tuples(st.integers(0, ROWS), st.booleans()), min_size=1, max_size=7)
DEPTHS = st.sampled_from([(2, 1), (2, 2), (3, 1), (4, 1), (4, 2), (8, 1)])


def test_in_any_order_every_logit_comes_once():
    seen = set()

    # The rows of several iterations have come before another stage goes on.
    @example((2, 1), 3, [(2, True)] * 4, 0, [True], [(0, 99), (1, 999), (2, 999)])
    @settings(max_examples=30, deadline=None)
    @given(
        depth=DEPTHS,
        inflight=st.integers(1, 5),
        batches=BATCHES,
        fixed=st.integers(0, 30) | st.integers(0, 300),
        joins=st.lists(st.booleans(), min_size=1, max_size=5),
        choices=CHOICES,
    )
    def explore(depth, inflight, batches, fixed, joins, choices):
        world = World(*depth, inflight, batches, fixed, joins, choices)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(vocabulary, "select", world)
            for module in (vocabulary, steps):
                patch.setattr(module, "time", world)
            try:
                world.run()
                world.check()
            finally:
                world.close()
        seen.update(world.seen)

    explore()
    assert len(seen) == 3, seen
