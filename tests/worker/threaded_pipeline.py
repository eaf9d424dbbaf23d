"""A pipeline whose stages are threads: real links, BIC-L, and one sampler that checks every logit.

Each stage adds one to every hidden state, and the output projection of a row gives its hidden state
plus the token, so that every logit says which iteration it is of and how many stages it came through.
"""

from __future__ import annotations

import itertools
import queue
import random
import socket
import threading

import numpy as np

from sipipe.ipc.link.endpoint import open_receiver, open_sender
from sipipe.ipc.ring.logits import LogitsChannel, LogitsReader
from sipipe.messages.link import LinkEndpoint
from sipipe.messages.logits import LogitsShape

VOCAB, HIDDEN, HAND_OVER, ROWS = 1000, 32, 60, 3


def link(bound=HAND_OVER, depth=4):
    endpoint = LinkEndpoint(kind="shm", buffer_tokens=16, depth=depth, stall_timeout=bound)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return open_sender(endpoint, ours), open_receiver(endpoint, theirs)


def pauses(script):
    """A function that stops for a moment or does not, as ``script`` has it."""
    chances = random.Random(script)

    def pause():
        if chances.random() < 0.3:
            threading.Event().wait(1e-4)  # others go first now; no result depends on it

    return pause


class Pipeline:
    """``stages`` stages, ``inflight`` iterations in flight.

    ``make_stage`` takes the pipeline and a stage's number. What it makes has ``threads``, functions
    that end once ``orders[stage]`` has brought None, and ``close``. An order is (iteration, rows that
    sample, first row in BIC-L); where nothing samples (``fewest`` 0) the iteration comes by
    ``reported``.
    """

    def __init__(self, make_stage, stages, inflight, seed, fewest=1):
        self.stages, self.inflight, self.seed, self.fewest = stages, inflight, seed, fewest
        width = VOCAB // stages
        self.bounds = (*(stage * width for stage in range(stages)), VOCAB)
        self.channel = LogitsChannel(
            "t",
            LogitsShape(vocab=VOCAB, bounds=self.bounds),
            rows=ROWS * (inflight + 1),
            entries=inflight + 2,
            readers=["s"],
        )
        self.links = [link() for _ in range(stages - 1)]
        self.heads = [link(depth=max(2, inflight)) for _ in range(stages - 1)]
        self.orders = [queue.Queue() for _ in range(stages)]
        self.failed, self.reported = [], queue.Queue()
        self.all = [make_stage(self, stage) for stage in range(stages)]

    def run(self, iterations):
        reader = LogitsReader(self.channel.endpoint, "s")
        threads = [
            threading.Thread(target=self.watched, args=(call,), daemon=True)
            for stage in self.all
            for call in stage.threads
        ]
        for thread in threads:
            thread.start()
        chosen = random.Random(self.seed)
        counts = [chosen.randint(self.fewest, ROWS) for _ in range(iterations)]
        for iteration in range(iterations + self.inflight):
            done = iteration - self.inflight
            if done >= 0 and not counts[done]:  # only prompts: no row samples
                assert self.reported.get(timeout=HAND_OVER) == done
            elif done >= 0:
                with reader.receive() as received:
                    assert (received.iteration, received.batch) == (done, counts[done])
                    expected = done + self.stages + np.arange(VOCAB)
                    assert (received.array == expected).all()
            if iteration < iterations:
                order = iteration, counts[iteration], iteration % (self.inflight + 1) * ROWS
                for orders in self.orders:
                    orders.put(order)
        for orders in self.orders:
            orders.put(None)
        for thread in threads:
            thread.join(HAND_OVER)
            assert not thread.is_alive()
        reader.close()

    def watched(self, call):
        try:
            call()
        except BaseException as error:
            self.failed.append(error)

    def close(self):
        for stage in self.all:
            stage.close()
        for end in itertools.chain(*self.links, *self.heads):
            end.close()
        self.channel.close()


def check(make_stage, stages, inflight, fewest=1):
    """Three scripts of 20 iterations, each of which comes out whole."""
    for seed in range(3):
        pipeline = Pipeline(make_stage, stages, inflight, seed, fewest)
        try:
            pipeline.run(20)
        finally:
            pipeline.close()
        assert pipeline.failed == []
