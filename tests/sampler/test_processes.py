"""Real sampler processes over real channels, without vLLM: draws, errors, death, restart."""

import contextlib
import os
import signal
import threading
import time

import numpy as np
import psutil
import pytest

from sipipe.engine.sampler_pool import SamplerPool
from sipipe.ipc.errors import ChannelPeerDied
from sipipe.ipc.gather_old.receiver import GatherReceiver
from sipipe.ipc.ring.dispatch import DispatchProducer
from sipipe.ipc.ring.logits import LogitsChannel, LogitsWriter
from sipipe.messages.boots import SamplerBoot
from sipipe.messages.header import Kind, encode_header
from sipipe.messages.params import SequenceParams
from sipipe.messages.step import (
    Grammar,
    Join,
    Snapshot,
    Step,
    decode_sampled,
    encode,
    int32_bytes,
    int32_view,
)
from sipipe.sampling import sample

VOCAB = 500
NAMES = ("sampler0", "sampler1")
PROMPT = [1, 2, 3]
PARAMS = SequenceParams(temperature=0.9, top_p=0.9, repetition_penalty=1.2, seed=5)


class Service:
    """The executor's side of two samplers, reduced to what the tests publish."""

    def __init__(self):
        self.steps = DispatchProducer.create("bic-i", entries=8, readers=NAMES)
        self.logits = LogitsChannel.create("bic-l", entries=5, vocab=VOCAB, batch=8, readers=NAMES)
        self.tokens = GatherReceiver.create(NAMES)
        self.writer = LogitsWriter.open(self.logits.endpoint)
        self.pool = SamplerPool(2, warm=("float32", "rows"))
        self.deaths = []
        self.died = threading.Event()
        self.pool.boot([self.boot(i, 0) for i in range(2)], time.monotonic() + 300)
        self.pool.watch(self.on_death)

    def boot(self, index, incarnation):
        return SamplerBoot(
            index=index,
            name=NAMES[index],
            incarnation=incarnation,
            bic_i=self.steps.endpoint,
            bic_l=self.logits.endpoint,
            bic_o=self.tokens.endpoint,
            vocab_size=VOCAB,
            layout="rows",
            logprobs_mode="raw_logprobs",
            reasoning=([], []),
            stages=1,
            inflight=3,
            run="test",
        )

    def on_death(self, index, incarnation, reason):
        self.deaths.append((index, incarnation, reason))
        self.died.set()

    def publish(self, step):
        senders = {NAMES[owner] for owner in int32_view(step.owners).tolist()}
        if senders:
            self.tokens.expect(step.iteration, senders)
        self.steps.publish(
            [encode_header(Kind.SCHEDULE, 0, step.iteration), encode(step)], timeout=30
        )

    def write(self, iteration, logits):
        with self.writer.acquire(iteration, len(logits), 30) as region:
            region[:] = logits

    def collect(self, iteration):
        while True:
            with contextlib.suppress(ChannelPeerDied):
                gathered = self.tokens.collect(30)
                break
        assert gathered.iteration == iteration
        drawn, errors = {}, {}
        for payload in gathered.payloads.values():
            part = decode_sampled(payload)
            for row, token in zip(int32_view(part.rows), int32_view(part.tokens), strict=True):
                drawn[int(row)] = int(token)
            errors |= dict(part.errors)
        return [drawn[row] for row in sorted(drawn)], errors

    def close(self):
        self.pool.stop_watching()
        self.steps.close()
        self.writer.close()
        self.logits.close()
        self.tokens.close()
        self.pool.close()


@pytest.fixture
def service():
    service = Service()
    yield service
    service.close()


def logits_of(iteration, rows):
    return np.random.default_rng(iteration).normal(0, 3, (rows, VOCAB)).astype(np.float32)


def step(iteration, rows, owners, **changes):
    return Step(iteration=iteration, rows=int32_bytes(rows), owners=int32_bytes(owners), **changes)


def joins(handles, owners):
    return [
        Join(handle, owner, PARAMS, int32_bytes(PROMPT))
        for handle, owner in zip(handles, owners, strict=True)
    ]


def expected(logits, outputs):
    return sample(
        logits,
        PARAMS,
        prompt_token_ids=[PROMPT] * len(logits),
        output_token_ids=outputs,
    ).tolist()


def test_columns_draw_what_the_facade_draws_over_many_iterations(service):
    handles, owners = [10, 11, 12, 13], [0, 1, 0, 1]
    outputs = [[] for _ in handles]
    for iteration in range(6):
        changes = {"joins": joins(handles, owners)} if iteration == 0 else {
            "appended": int32_bytes(handles),
            "tokens": int32_bytes([tokens[-1] for tokens in outputs]),
        }  # fmt: skip
        service.publish(step(iteration, handles, owners, **changes))
        logits = logits_of(iteration, 4)
        service.write(iteration, logits)
        tokens, errors = service.collect(iteration)
        assert tokens == expected(logits, outputs)
        assert not errors
        for sequence, token in zip(outputs, tokens, strict=True):
            sequence.append(token)


def test_a_bitmask_applies_to_its_sequence_only(service):
    masked = step(0, [1, 2], [0, 1], joins=joins([1, 2], [0, 1]), grammar=True)
    service.publish(masked)
    words = -(-VOCAB // 32)
    only = np.zeros((1, words), np.int32)
    only[0, 0] = 1 << 7
    grammar = Grammar(0, int32_bytes([2]), words, int32_bytes(only))
    service.steps.publish([encode_header(Kind.GRAMMAR, 0, 0), encode(grammar)], timeout=30)
    logits = logits_of(0, 2)
    service.write(0, logits)
    tokens, _ = service.collect(0)
    assert tokens == [expected(logits, [[], []])[0], 7]


def test_rows_without_a_distribution_and_bad_sequences_are_errors_of_their_own(service):
    bad = Join(3, 1, SequenceParams(allowed_token_ids=[VOCAB + 5]), int32_bytes(PROMPT))
    service.publish(step(0, [1, 2, 3], [0, 1, 1], joins=[*joins([1, 2], [0, 1]), bad]))
    logits = logits_of(0, 3)
    logits[1] = np.nan
    service.write(0, logits)
    tokens, errors = service.collect(0)
    assert tokens == [expected(logits[:1], [[]])[0], -1, -1]
    assert "NaN" in errors[1]
    assert "allowed_token_ids" in errors[2]


@pytest.mark.parametrize("published_before_the_death", [False, True])
def test_a_killed_sampler_is_replaced_from_a_snapshot(service, published_before_the_death):
    handles, owners = [1, 2], [0, 1]
    first = step(0, handles, owners, joins=joins(handles, owners))
    logits = logits_of(0, 2)
    service.publish(first)
    if published_before_the_death:  # sampler 0 has drawn and sent, sampler 1 may have
        service.write(0, logits)
    os.kill(service.pool.pids[1], signal.SIGKILL)
    assert service.died.wait(30)
    index, incarnation, _ = service.deaths[0]
    assert (index, incarnation) == (1, 1)
    for channel in (service.steps, service.logits):
        with contextlib.suppress(Exception):  # a publish may have removed it already
            channel.remove_reader(NAMES[1])
        channel.add_reader(NAMES[1])
    snapshot = Snapshot(1, [first.joins[1]], [first], [])
    service.pool.replace(service.boot(1, incarnation), snapshot)
    if not published_before_the_death:
        service.write(0, logits)
    tokens, _ = service.collect(0)
    assert tokens == expected(logits, [[], []])
    service.publish(step(1, handles, owners, appended=int32_bytes(handles),
                         tokens=int32_bytes(tokens)))  # fmt: skip
    more = logits_of(1, 2)
    service.write(1, more)
    assert service.collect(1)[0] == expected(more, [[token] for token in tokens])
    assert service.pool.restarts == 1


def test_samplers_are_small_and_end_with_their_parent(service):
    processes = [psutil.Process(pid) for pid in service.pool.pids]
    for process in processes:
        names = {os.path.basename(m.path) for m in process.memory_maps()}
        assert not [name for name in names if "torch" in name]
    service.pool.stop_watching()
    for process in service.pool._processes:
        process.stdin.close()  # what the kernel does for a killed executor
    _, alive = psutil.wait_procs(processes, timeout=15)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]
