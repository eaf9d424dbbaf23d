"""Work between iterations: it goes first, and all ranks of a stage do it at the same place."""

import queue
import random
import threading
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sipipe.worker.double_buffer import DoubleBuffer, Work


class Rank:
    """A stage that notes what its device thread does; an iteration ``needs`` so many errands."""

    def __init__(self, agree=lambda work: work, needs=()):
        self.did = []
        self.needs = dict(enumerate(needs))
        self.buffer = DoubleBuffer(
            self,
            sets=2,
            stall_timeout=30.0,
            interrupt=lambda: None,
            may_run=lambda inputs: self.errands >= self.needs.get(inputs.iteration, 0),
            agree=agree,
        )
        self.errands = 0

    def prepare(self, header, buffer_set, output):
        return SimpleNamespace(iteration=header.number)

    def run(self, inputs):
        self.did.append(f"iteration {inputs.iteration}")

    def errand(self, number):
        self.did.append(f"errand {number}")
        self.errands += 1

    def message(self, kind, number):
        if kind == "errand":
            self.buffer.run_between(lambda: self.errand(number))
        else:
            self.buffer.prepare(SimpleNamespace(number=number), None)


def follow(rank, iterations, errands, seed):
    """Bring a rank its iterations and errands, each in order, in an order of ``seed`` among them."""
    rng = random.Random(seed)

    def bring(kind, count, pauses):
        for number, pause in zip(range(count), pauses, strict=True):
            for _ in range(pause):
                threading.Event().wait(0)
            rank.message(kind, number)

    threads = [
        threading.Thread(
            target=bring, args=(kind, count, [rng.randrange(40) for _ in range(count)])
        )
        for kind, count in (("iteration", iterations), ("errand", errands))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rank.buffer.drain()


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 6), max_size=8), st.integers(6, 9), st.integers(0, 1000))
def test_ranks_do_the_same_in_the_same_order(needs, errands, seed):
    """Whichever rank hears of what first; and no iteration runs before the errands that it needs."""
    needs = sorted(needs)
    chosen = queue.Queue()

    def first(work):
        chosen.put(work)
        return work

    ranks = [Rank(first, needs), Rank(lambda _: chosen.get(timeout=30), needs)]
    running = [threading.Thread(target=rank.buffer.run) for rank in ranks]
    bringing = [
        threading.Thread(target=follow, args=(rank, len(needs), errands, seed + number))
        for number, rank in enumerate(ranks)
    ]
    for thread in (*running, *bringing):
        thread.start()
    for thread in bringing:
        thread.join()
    for rank in ranks:  # errands that came behind the last iteration
        done = threading.Event()
        rank.buffer.run_between(done.set)
    for rank in ranks:
        rank.buffer.close()
    chosen.put(Work.ERRAND)
    for thread in running:
        thread.join()
    length = min(len(rank.did) for rank in ranks)
    assert ranks[0].did[:length] == ranks[1].did[:length]
    for rank in ranks:
        assert [what for what in rank.did if "iteration" in what] == [
            f"iteration {number}" for number in range(len(needs))
        ]
        for number, need in enumerate(needs):
            before = rank.did[: rank.did.index(f"iteration {number}")]
            assert sum("errand" in what for what in before) >= need


def test_an_errand_goes_before_an_iteration_that_waits():
    rank = Rank()
    rank.message("iteration", 0)
    rank.message("errand", 0)
    rank.message("iteration", 1)
    thread = threading.Thread(target=rank.buffer.run)
    thread.start()
    rank.buffer.drain()
    rank.buffer.close()
    thread.join()
    assert rank.did == ["errand 0", "iteration 0", "iteration 1"]


def test_what_an_errand_raises_ends_both_threads():
    rank = Rank()

    def fails():
        raise ValueError("no head")

    rank.buffer.run_between(fails)
    with pytest.raises(ValueError, match="no head"):
        rank.buffer.run()
    with pytest.raises(ValueError, match="no head"):
        rank.buffer.prepare(SimpleNamespace(number=0), None)
