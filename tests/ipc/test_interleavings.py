"""Any interleaving of a producer and its readers, and a kill after any step of any of them; the
table of an entry's life, which every step is held against."""

import re
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sipipe.errors import StallError
from sipipe.ipc.errors import ChannelClosed, PeerDiedError
from sipipe.ipc.ring.dispatch import DispatchProducer, DispatchReader
from sipipe.ipc.ring.layout import Layout
from sipipe.ipc.ring.logits import LogitsChannel, LogitsReader, LogitsWriter
from sipipe.messages.logits import LogitsShape

from .crash import crash
from .entry_states import TRANSITIONS, EntryEvent, EntryState, fire, mermaid
from .sequencer import Sequencer

DOCS = Path(__file__).resolve().parents[2] / "docs" / "channels.md"


def test_the_diagram_is_the_tables():
    assert f"```mermaid\n{mermaid()}```" in DOCS.read_text(), (
        "docs/channels.md is stale: paste what tests.ipc.entry_states.mermaid() returns"
    )


def test_every_state_is_reached_and_what_is_not_listed_is_refused():
    reached = {EntryState.FREE}
    for _ in EntryState:
        reached |= {after for (state, _), after in TRANSITIONS.items() if state in reached}
    assert reached == set(EntryState)
    with pytest.raises(AssertionError, match="PUBLISH while READING"):
        fire(EntryState.READING, EntryEvent.PUBLISH)


ENTRIES = 4
ENTRY_BYTES = 64


def body_of(number):
    """Every third message needs three entries, more than may be late."""
    return bytes([number % 251]) * (150 if number % 3 == 2 else 20)


def late(timeout):
    """Whom a writer gives up on."""
    [names] = re.findall("that (.*) should have left", str(timeout))
    return [] if names.startswith("a reader that was removed") else names.split(", ")


class Dispatch:
    """One producer that restarts dead readers, and its readers, under a sequencer."""

    def __init__(self, sequencer, messages, readers):
        self.sequencer = sequencer
        self.messages = messages
        self.first = dict.fromkeys(readers, 0)  # by incarnation
        self.received = {name: [] for name in readers}
        self.end = {}
        self.sent = 0
        self.closed = False
        self.readers = readers
        sequencer.watch(Layout(ENTRIES, ENTRY_BYTES))
        sequencer.spawn("producer", self.produce)

    def produce(self):
        producer = DispatchProducer("t", ENTRIES, ENTRY_BYTES, self.readers)
        for name in self.readers:
            self.spawn_reader(producer, name, name)
        while self.sent < self.messages:
            for name in self.readers:  # as an engine hears it from the processes' descriptors
                if self.last(name).killed:
                    self.restart(producer, name)
            try:
                producer.publish([b"head", body_of(self.sent)], timeout=5)
                self.sent += 1
            except StallError as timeout:
                for name in late(timeout):
                    assert self.last(name).killed, f"{name} was given up, but it lives"
        producer.close()
        self.closed = True

    def last(self, name):
        """The incarnation that reads now."""
        return self.sequencer.actors[[who for who in self.first if who.split(".")[0] == name][-1]]

    def restart(self, producer, name):
        incarnations = [who for who in self.first if who.split(".")[0] == name]
        producer.remove_reader(name)
        producer.add_reader(name)
        who = f"{name}.{len(incarnations)}"
        self.first[who] = self.sent
        self.received[who] = []
        self.spawn_reader(producer, name, who)

    def spawn_reader(self, producer, name, who):
        def consume():
            reader = DispatchReader(producer.endpoint, name)
            try:
                while True:
                    with reader.receive() as message:
                        for _ in range(2):  # what was received stays as it is while it is read
                            self.sequencer.step()
                            want = [b"head", body_of(message.sequence)]
                            assert [bytes(part) for part in message.parts] == want
                        self.received[who].append(message.sequence)
            except (ChannelClosed, PeerDiedError) as end:
                self.end[who] = type(end)
            reader.close()

        self.sequencer.spawn(who, consume)

    def check(self):
        killed = {name for name, actor in self.sequencer.actors.items() if actor.killed}
        for who, got in self.received.items():
            if who not in self.sequencer.actors:
                continue  # the producer died before it could start it
            first = self.first[who]
            assert got == list(range(first, first + len(got)))
            if who in killed:
                continue
            if "producer" in killed and not self.closed:
                # It may have died between publishing a message and counting it, or after close.
                assert first + len(got) in (self.sent, self.sent + 1)
            else:
                assert first + len(got) == self.messages
                assert self.end[who] is ChannelClosed


def explore(scene, *arguments, choices=(), kills=(), **more):
    """One run of a scene; returns the number of steps of each actor."""
    with pytest.MonkeyPatch.context() as patch:
        sequencer = Sequencer(choices, kills)
        sequencer.patch(patch)
        made = scene(sequencer, *arguments, **more)
        sequencer.run()
        made.check()
    return {name: actor.steps for name, actor in sequencer.actors.items()}


# Long bursts let one actor run far ahead, short ones stop it at an awkward place.
CHOICES = st.lists(
    st.tuples(st.integers(0, 5), st.integers(1, 6) | st.integers(1, 90)), max_size=30
)
KILLS = st.dictionaries(
    st.sampled_from(["a", "b", "a.1", "b.1", "producer"]), st.integers(0, 150), max_size=3
)
RELAXED = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@RELAXED
@given(choices=CHOICES)
def test_any_interleaving(choices):
    explore(Dispatch, 7, ["a", "b"], choices=choices)


@RELAXED
@given(choices=CHOICES, kills=KILLS)
def test_any_interleaving_with_kills(choices, kills):
    explore(Dispatch, 7, ["a", "b"], choices=choices, kills=kills)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(RELAXED, max_examples=2000)
@given(choices=CHOICES, kills=KILLS)
def test_many_interleavings_with_kills(choices, kills):
    explore(Dispatch, 9, ["a", "b", "c"], choices=choices, kills=kills)


class Leaves:
    """A reader comes and dies, or closes; ``remover``: another thread says that it is gone."""

    def __init__(self, sequencer, end, remover=False):
        sequencer.watch(Layout(ENTRIES, ENTRY_BYTES))

        def produce():
            producer = DispatchProducer("t", ENTRIES, ENTRY_BYTES, ["a"])
            sequencer.spawn("a", lambda: end(DispatchReader(producer.endpoint, "a")))
            if remover:
                sequencer.spawn("remover", lambda: producer.remove_reader("a"))
            for _ in range(7):
                producer.publish([b"x"], timeout=5)
            producer.close()

        sequencer.spawn("producer", produce)

    def check(self):
        """That it has come to its end is all."""


def test_a_reader_is_removed_at_any_step_of_a_publish():
    """The producer begins, the reader comes and dies, and the remover stops at each step."""
    for before, steps, between in product(range(0, 40, 4), range(1, 5), (3, 9, 30)):
        choices = [(0, 45), (1, 99), (0, before), (2, steps), (0, between), (2, 99)]
        explore(Leaves, crash, True, choices=choices)


def test_a_reader_that_leaves_at_any_step_of_a_publish_is_no_death():
    def run(steps, between):
        choices = [(0, 45), (1, steps), (0, between), (1, 99)]
        return explore(Leaves, DispatchReader.close, choices=choices)["a"]

    total = run(99, 1)
    for steps, between in product(range(max(0, total - 8), total), range(1, 30)):
        run(steps, between)


class Logits:
    """Two ranks that write, two samplers that read, of which one may be started again."""

    def __init__(self, sequencer, iterations, restart=False):
        self.sequencer = sequencer
        self.iterations = iterations
        self.restart = restart
        self.received = {"s": [], "t": []}
        self.written = {0: 0, 1: 0}
        self.end = {}
        self.came = set()
        sequencer.watch(Layout(3, 0, ranks=2, arena=6 * 64))
        sequencer.spawn("owner", self.own)

    def own(self):
        owner = LogitsChannel(
            "t",
            LogitsShape(vocab=4, bounds=(0, 2, 4)),
            rows=6,
            entries=3,
            readers=list(self.received),
        )
        for rank in self.written:
            self.sequencer.spawn(f"rank {rank}", lambda rank=rank: self.write(owner, rank))
        for name in self.received:
            self.sequencer.spawn(name, lambda name=name: self.read(owner, name, name))
        self.owner = owner
        if self.restart:
            first = self.sequencer.actors["t"]
            while not first.done:
                self.sequencer.step(block=True, deadline=self.sequencer.now + 1)
            if not first.killed:
                return
            owner.remove_reader("t")
            owner.add_reader("t")
            self.received["t.1"] = []
            self.sequencer.spawn("t.1", lambda: self.read(owner, "t", "t.1"))

    def write(self, owner, rank):
        writer = LogitsWriter(owner.endpoint, rank)
        self.came.add(rank)
        for iteration in range(self.iterations):
            try:
                with writer.acquire(iteration, 2, iteration % 3 * 2, timeout=5) as region:
                    region[...] = iteration
            except StallError as timeout:
                actors = [self.sequencer.actors[who] for who in late(timeout)]
                assert all(actor.killed or actor.done for actor in actors), timeout  # noqa: PT017
                break
            self.written[rank] += 1
        writer.close()

    def read(self, owner, name, who):
        while to_come := self.written.keys() - self.came:  # an engine opens samplers' ends last
            if any(self.sequencer.actors[f"rank {rank}"].done for rank in to_come):
                return
            self.sequencer.step(block=True, deadline=self.sequencer.now + 1)
        reader = LogitsReader(owner.endpoint, name)
        try:
            while True:
                with reader.receive() as logits:
                    for _ in range(2):
                        self.sequencer.step()
                        assert np.all(logits.array == logits.iteration)
                    self.received[who].append(logits.iteration)
        except (ChannelClosed, PeerDiedError) as end:
            self.end[who] = type(end)
        reader.close()

    def check(self):
        killed = {name for name, actor in self.sequencer.actors.items() if actor.killed}
        for name, got in self.received.items():
            first = got[0] if got and name == "t.1" else 0
            assert got == list(range(first, first + len(got)))
            if name not in killed and (got or name != "t.1"):
                complete = min(self.written.values())
                assert first + len(got) in (complete, complete + 1)
                if not killed:
                    assert len(got) == 5
                    assert self.end[name] is ChannelClosed
        self.sequencer.spawn("the owner's end", self.owner.close)
        self.sequencer.run()


TWO_RANKS = (Logits, 5)


@RELAXED
@given(
    choices=CHOICES,
    kills=st.dictionaries(
        st.sampled_from(["s", "t", "rank 0", "rank 1"]), st.integers(0, 120), max_size=2
    ),
)
def test_logits_with_two_ranks_and_kills(choices, kills):
    explore(*TWO_RANKS, choices=choices, kills=kills)


@RELAXED
@given(choices=CHOICES, step=st.integers(0, 120))
def test_a_sampler_that_is_started_again(choices, step):
    explore(*TWO_RANKS, choices=choices, kills={"t": step}, restart=True)


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("scene", "victim"),
    [((Dispatch, 4, ["a", "b"]), who) for who in ("producer", "a")]
    + [(TWO_RANKS, who) for who in ("rank 0", "rank 1", "s")],
)
def test_a_kill_after_every_step(scene, victim, every):
    total = explore(*scene)[victim]
    assert total > 30
    for step in range(0, total + 1, every):
        explore(*scene, kills={victim: step})
