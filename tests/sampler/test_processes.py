"""Real sampler processes over real channels, without vLLM: draws, errors, death, restart."""

import contextlib
import dataclasses
import os
import re
import signal
import threading
import time
from itertools import chain
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest
from tests.engine.children.named_children import NamedChildren

from sipipe.engine.children.samplers import Samplers
from sipipe.engine.iteration.bus import Bus
from sipipe.errors import WorkerDiedError
from sipipe.ipc.gather import GatherReceiver
from sipipe.ipc.ring.dispatch import DispatchProducer
from sipipe.ipc.ring.logits import LogitsChannel, LogitsWriter
from sipipe.messages.header import Kind
from sipipe.messages.logits import LogitsShape
from sipipe.messages.params import SequenceParams
from sipipe.messages.replies import Trying, Warm
from sipipe.messages.start_records import SamplerSettings, Watched
from sipipe.messages.step import (
    Added,
    Grammar,
    Snapshot,
    Step,
    decode_sampled,
    encode,
    int32_bytes,
    int32_view,
)
from sipipe.sampling import sample, sample_with_logprobs

VOCAB = 500
NAMES = ("sampler0", "sampler1")
PROMPT = [1, 2, 3]
POISONS = {"dies": 666, "hangs": 667, "cannot be added": 668}  # poisoned/sitecustomize.py
PARAMS = SequenceParams(temperature=0.9, top_p=0.9, repetition_penalty=1.2, seed=5)


SETTINGS = SamplerSettings(
    vocab_size=VOCAB,
    logprobs_mode="raw_logprobs",
    reasoning=([], [], []),
    watched=Watched(stages=1, inflight=3, model="none", run="test"),
)


def replace_poison(added, handle, reason):
    return msgspec.structs.replace(added, error=reason) if added.handle == handle else added


class Service:
    """The engine's side of two samplers, reduced to what the tests publish."""

    def __init__(self, vocab=VOCAB, batch=8, stall_timeout=300.0):
        self.errors, self.deaths, self.replaced = [], [], threading.Event()
        self.starting, self.may_go_on = threading.Event(), threading.Event()
        self.may_go_on.set()
        self.admitted = self.begun = 0
        self.poison, self.batch = [], batch
        self.snapshots = {index: Snapshot([], [], []) for index in range(2)}
        self.children = NamedChildren()
        self.samplers = Samplers(
            self.children,
            dataclasses.replace(SETTINGS, vocab_size=vocab),
            dtype="float32",
            cores=[(), ()],
            figures=[],
            events=self,
            stall_timeout=stall_timeout,
        )
        self.tokens = GatherReceiver(self.samplers.sockets)
        self.ring = DispatchProducer("bic-i", readers=NAMES)
        self.bus = Bus([self.ring])
        self.logits = LogitsChannel(
            "bic-l", LogitsShape(vocab=vocab), rows=5 * batch, entries=5, readers=NAMES
        )
        self.writer = LogitsWriter(self.logits.endpoint)
        self.children.watch(
            heard=self.heard,
            died=self.on_death,
            turn=self.samplers.end_stuck,
            failed=self.errors.append,
        )
        self.samplers.open(self.ring, self.logits, time.monotonic() + 300)

    def heard(self, child, message):
        assert isinstance(message, Trying | Warm)
        self.samplers.heard(child.name, message)

    def on_death(self, child, how):
        self.deaths.append((child.name, how))
        self.samplers.replace(child.name, how)

    def started_again(self, index, tokens, poison):
        self.starting.set()
        assert self.may_go_on.wait(60)
        self.tokens.replace(index, tokens)
        with self.bus.order:
            if poison is not None:
                self.poison.append(poison)
                added, steps, grammars = msgspec.structs.astuple(self.snapshots[index])
                added = [replace_poison(one, *poison) for one in added]
                self.snapshots[index] = Snapshot(added, steps, grammars)
            self.samplers.admit(index, self.snapshots[index])
            self.admitted += 1
            self.replaced.set()

    def failed(self, error):
        self.errors.append(error)

    def begin(self, iterations):
        """So many more of them; returns the first one's number."""
        self.begun += iterations
        return self.begun - iterations

    def pid(self, index):
        return self.children.by_name[NAMES[index]].process.pid

    def kill(self, index):
        """Kill a sampler; returns when its successor's place in the stream is known."""
        self.replaced.clear()
        os.kill(self.pid(index), signal.SIGKILL)
        assert self.replaced.wait(30)

    def publish(self, step):
        if senders := set(int32_view(step.owners).tolist()):
            self.tokens.expect(step.iteration, senders)
        self.bus.publish(Kind.SCHEDULE, step.iteration, [encode(step)])

    def write(self, iteration, logits):
        with self.writer.acquire(iteration, len(logits), iteration % 5 * self.batch, 30) as region:
            region[:] = logits

    def answers(self, iteration):
        """The frames of each sampler."""
        number, answers = self.tokens.collect()
        assert number == iteration
        return answers

    def collect(self, iteration):
        answers, drawn, errors = self.answers(iteration), {}, {}
        for part in (decode_sampled(f) for f in chain.from_iterable(answers.values())):
            for row, token in zip(int32_view(part.rows), int32_view(part.tokens), strict=True):
                drawn[int(row)] = int(token)
            errors |= dict(part.errors)
            drawn |= dict.fromkeys(dict(part.errors), -1)
        return [drawn[row] for row in sorted(drawn)], errors

    def draw(self, step, logits):
        """Publish an iteration and its logits; returns tokens and errors."""
        self.publish(step)
        self.write(step.iteration, logits)
        return self.collect(step.iteration)

    def close(self):
        self.children.expect_end()
        self.ring.close()
        self.writer.close()
        self.logits.close()
        self.tokens.close()
        self.children.close()
        assert not self.errors


@pytest.fixture
def service():
    service = Service()
    yield service
    service.close()


@pytest.fixture(scope="module")
def calm():
    """For tests that end nobody: each takes the iterations that follow (:meth:`Service.begin`)."""
    service = Service()
    yield service
    service.close()


def logits_of(iteration, rows):
    return np.random.default_rng(iteration).normal(0, 3, (rows, VOCAB)).astype(np.float32)


def step(iteration, rows, owners, **changes):
    return Step(iteration=iteration, rows=int32_bytes(rows), owners=int32_bytes(owners), **changes)


def additions(handles, owners):
    return [
        Added(handle, owner, PARAMS, int32_bytes(PROMPT))
        for handle, owner in zip(handles, owners, strict=True)
    ]


def expected(logits, outputs):
    return sample(
        logits,
        [PARAMS] * len(logits),
        prompt_token_ids=[PROMPT] * len(logits),
        output_token_ids=outputs,
    ).tolist()


def check_both_draw(service):
    """In its first iteration, a row each. On a busy machine one may be killed as stuck before it has
    drawn: as of the engine, its successor hears of the iteration by the snapshot."""
    logits = logits_of(0, 2)
    first = step(0, [1, 2], [0, 1], added=additions([1, 2], [0, 1]))
    for index, added in enumerate(first.added):
        service.snapshots[index] = Snapshot([added], [first], [])
    assert service.draw(first, logits)[0] == expected(logits, [[], []])


def test_columns_draw_what_the_facade_draws_over_many_iterations(calm):
    handles, owners = [10, 11, 12, 13], [0, 1, 0, 1]
    outputs, first = [[] for _ in handles], calm.begin(6)
    for iteration in range(first, first + 6):
        changes = {"added": additions(handles, owners)} if iteration == first else {
            "appended": int32_bytes(handles),
            "tokens": int32_bytes([tokens[-1] for tokens in outputs]),
        }  # fmt: skip
        logits = logits_of(iteration, 4)
        tokens, errors = calm.draw(step(iteration, handles, owners, **changes), logits)
        assert tokens == expected(logits, outputs)
        assert not errors
        for sequence, token in zip(outputs, tokens, strict=True):
            sequence.append(token)


def test_a_bitmask_applies_to_its_sequence_only(calm):
    now = calm.begin(1)
    calm.publish(step(now, [21, 22], [0, 1], added=additions([21, 22], [0, 1]), grammar=True))
    words = -(-VOCAB // 32)
    only = np.zeros((1, words), np.int32)
    only[0, 0] = 1 << 7
    grammar = Grammar(now, int32_bytes([22]), words, int32_bytes(only))
    calm.bus.publish(Kind.GRAMMAR, now, [encode(grammar)])
    logits = logits_of(now, 2)
    calm.write(now, logits)
    tokens, _ = calm.collect(now)
    assert tokens == [expected(logits, [[], []])[0], 7]


def test_rows_without_a_distribution_and_bad_sequences_are_errors_of_their_own(calm):
    now = calm.begin(1)
    bad = Added(33, 1, SequenceParams(allowed_token_ids=[VOCAB + 5]), int32_bytes(PROMPT))
    added = [*additions([31, 32], [0, 1]), bad]
    logits = logits_of(now, 3)
    logits[1] = np.nan
    tokens, errors = calm.draw(step(now, [31, 32, 33], [0, 1, 1], added=added), logits)
    assert tokens == [expected(logits[:1], [[]])[0], -1, -1]
    assert "NaN" in errors[1]
    assert "allowed_token_ids" in errors[2]


@pytest.mark.ci
def test_a_batch_that_asks_for_every_logprob_is_answered_in_frames():
    """70 sequences and 151,936 tokens: 85 MB."""
    vocab, rows = 151_936, 70
    with contextlib.closing(Service(vocab, rows)) as service:
        params = SequenceParams(temperature=0.0, logprobs=-1)
        added = [Added(row, row % 2, params, b"") for row in range(rows)]
        owners = [one.sampler for one in added]
        service.publish(step(0, range(rows), owners, added=added))
        line = np.random.default_rng(1).normal(size=(1, vocab)).astype(np.float32)
        service.write(0, np.roll(np.repeat(line, rows, 0), 1, axis=1))
        answers = service.answers(0)
    tokens, all_logprobs = sample_with_logprobs(np.roll(line, 1), params)
    seen = []
    for frame in chain.from_iterable(answers.values()):
        assert len(frame) < (9 << 20) + 10 * vocab
        part = decode_sampled(frame)
        assert set(int32_view(part.tokens).tolist()) == {int(tokens[0])}
        for found in part.logprobs:
            seen.append(found.row)
            assert found.rank == 1
            assert found.token_ids == all_logprobs[0].token_ids.tobytes()
            assert found.values == all_logprobs[0].logprobs.tobytes()
    assert sorted(seen) == list(range(rows))


def check_one_died_and_both_draw(service, iteration):
    tokens, _ = service.draw(step(iteration, [1, 2], [0, 1]), logits_of(iteration, 2))
    assert len(tokens) == 2
    assert [name for name, _ in service.deaths] == ["sampler1"]


@pytest.mark.parametrize("published_before_the_death", [False, True])
def test_a_killed_sampler_is_replaced_from_a_snapshot(service, published_before_the_death):
    handles, owners = [1, 2], [0, 1]
    first = step(0, handles, owners, added=additions(handles, owners))
    logits = logits_of(0, 2)
    service.publish(first)
    if published_before_the_death:  # sampler 0 has drawn and sent, sampler 1 may have
        service.write(0, logits)
    service.snapshots[1] = Snapshot([first.added[1]], [first], [])
    service.kill(1)
    if not published_before_the_death:
        service.write(0, logits)
    tokens, _ = service.collect(0)
    assert tokens == expected(logits, [[], []])
    more, changes = logits_of(1, 2), {"appended": int32_bytes(handles)}
    second = step(1, handles, owners, tokens=int32_bytes(tokens), **changes)
    assert service.draw(second, more)[0] == expected(more, [[token] for token in tokens])
    assert service.deaths == [("sampler1", "exit code -9")]


def test_a_sampler_without_rows_is_replaced_and_draws_later(service):
    """Its successor joins BIC-L later than BIC-I: nobody keeps logits in which it has no rows."""
    service.kill(1)
    outputs = []
    for iteration in range(12):  # more than BIC-L has entries, before the successor is there
        changes = {"added": additions([1], [0])} if not outputs else {
            "appended": int32_bytes([1]), "tokens": int32_bytes(outputs[-1:]),
        }  # fmt: skip
        logits = logits_of(iteration, 1)
        tokens, _ = service.draw(step(iteration, [1], [0], **changes), logits)
        assert tokens == expected(logits, [outputs])
        outputs += tokens
    changes = {"appended": int32_bytes([1]), "tokens": int32_bytes(outputs[-1:])}
    logits, both = logits_of(12, 2), step(12, [1, 2], [0, 1], added=additions([2], [1]), **changes)
    assert service.draw(both, logits)[0] == expected(logits, [outputs, []])
    assert [name for name, _ in service.deaths] == ["sampler1"]


def test_one_that_is_replaced_while_nothing_is_due_is_not_behind(service):
    """It would be killed as stuck, again and again, until somebody asks for something."""
    check_both_draw(service)
    service.snapshots[1] = Snapshot(additions([2], [1]), [], [])
    service.kill(1)
    until = time.monotonic() + 60
    while service.logits.behind():
        assert time.monotonic() < until
        time.sleep(0.05)
    check_one_died_and_both_draw(service, 1)


def test_what_a_predecessor_had_answered_and_nobody_kept_is_passed_over(service):
    """It is still owed when the snapshot is made, and has left before the successor is there."""
    check_both_draw(service)
    owed = step(0, [1, 2], [0, 1])
    service.snapshots[1] = Snapshot(additions([2], [1]), [owed], [])
    service.may_go_on.clear()
    service.starting.clear()
    os.kill(service.pid(1), signal.SIGKILL)
    assert service.starting.wait(30)
    for iteration in range(1, 8):  # a lap of BIC-L
        service.draw(step(iteration, [1], [0]), logits_of(iteration, 1))
    service.replaced.clear()
    service.may_go_on.set()
    assert service.replaced.wait(30)
    check_one_died_and_both_draw(service, 8)


def test_a_publish_that_waits_for_a_dead_sampler_goes_on(service):
    """A successor that dies before it is there: its place must not hold the stream up, nor the
    stream, which then has its order, the successor's successor."""
    service.kill(1)
    place = service.pid(1)
    os.kill(place, signal.SIGSTOP)  # declared in the ring, and never there
    publishing = threading.Thread(
        target=lambda: [service.bus.publish(Kind.CONTROL, n, [b""]) for n in range(40)]
    )
    publishing.start()
    service.replaced.clear()
    os.kill(place, signal.SIGKILL)
    assert service.replaced.wait(20)
    publishing.join(20)
    assert not publishing.is_alive()
    check_both_draw(service)


def test_a_successor_that_dies_before_its_place_is_known(service):
    """Its own successor waits for that: places and sockets are taken up in order."""
    service.may_go_on.clear()
    os.kill(service.pid(1), signal.SIGKILL)
    assert service.starting.wait(30)
    os.kill(service.pid(1), signal.SIGKILL)
    while len(service.deaths) < 2:
        time.sleep(0.01)
    service.may_go_on.set()
    while service.admitted < 2:
        assert not service.errors
        time.sleep(0.01)
    check_both_draw(service)
    assert service.deaths == [("sampler1", "exit code -9")] * 2


def test_a_sampler_that_keeps_dying_is_not_replaced_for_ever(service):
    for _ in range(4):
        service.kill(0)
    service.replaced.clear()
    os.kill(service.pid(0), signal.SIGKILL)
    while not service.errors:  # what on_death raises ends the events thread
        time.sleep(0.01)
    assert len(service.deaths) == 5
    (error,) = service.errors
    assert isinstance(error, WorkerDiedError)
    assert "sampler0 keeps dying (exit code -9, the 5th time" in str(error)
    service.errors.clear()


@pytest.mark.parametrize(
    "how",
    [
        pytest.param("cannot be added", marks=pytest.mark.ci),
        *(pytest.param(it, marks=pytest.mark.slow) for it in ("dies", "hangs")),
    ],
)
def test_what_ends_its_samplers_fails_alone(how, monkeypatch):
    """Whichever request it is, and whatever it does to the process that draws for it."""
    monkeypatch.syspath_prepend(Path(__file__).with_name("poisoned"))
    poisoned = msgspec.structs.replace(PARAMS, seed=POISONS[how])
    with contextlib.closing(Service(stall_timeout=40.0 if how == "hangs" else 300.0)) as service:
        handles, owners = [1, 2, 3, 4], [0, 1, 1, 1]
        added = additions(handles, owners)
        added[2] = msgspec.structs.replace(added[2], params=poisoned)
        first = step(0, handles, owners, added=added)
        service.snapshots[1] = Snapshot(added[1:], [first], [])
        logits = logits_of(0, 4)
        tokens, errors = service.draw(first, logits)
        fine = [0, 1, 3]
        assert [tokens[row] for row in fine] == expected(logits[fine], [[], [], []])
        assert errors.keys() == {2}
        assert re.fullmatch(
            r"it ended every sampler that drew for it \(exit code -\d+\)", errors[2]
        )
        assert service.poison == [(3, errors[2])]
        assert [name for name, _ in service.deaths] == ["sampler1"] * 3
        changes = {"removed": int32_bytes([3]), "appended": int32_bytes([1, 2, 4])}
        drawn = [tokens[row] for row in fine]
        more = logits_of(1, 3)
        second = step(1, [1, 2, 4], [0, 1, 1], tokens=int32_bytes(drawn), **changes)
        assert service.draw(second, more)[0] == expected(more, [[token] for token in drawn])


def test_samplers_are_small_and_end_with_their_parent(service):
    check_both_draw(service)
    processes = [psutil.Process(service.pid(index)) for index in range(2)]
    for process in processes:
        names = {os.path.basename(m.path) for m in process.memory_maps()}
        assert not [name for name in names if "torch" in name]
    service.children.end(NAMES)  # what the kernel does for an engine that was killed
    _, alive = psutil.wait_procs(processes, timeout=15)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]
    assert not service.deaths
