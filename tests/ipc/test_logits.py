"""Logits: shapes, several writers, restarted samplers."""

import threading
from pathlib import Path

import numpy as np
import pytest

from sipipe.errors import StallError
from sipipe.ipc.errors import ChannelClosed
from sipipe.ipc.ring import ends
from sipipe.ipc.ring.logits import LogitsChannel, LogitsReader, LogitsWriter
from sipipe.ipc.ring.ring import Ring
from sipipe.messages.logits import LogitsShape

from .crash import crash

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}


@pytest.fixture
def make():
    """A channel with its writers and readers, closed at the end of the test."""
    opened = []

    def channel(**options):
        names, entries = options.pop("readers", ["s"]), options.pop("entries", 4)
        if ranks := options.pop("ranks", None):
            options["bounds"] = tuple(rank * 101 // ranks for rank in range(ranks + 1))
        rows, shape = options.pop("rows", 20), LogitsShape(**{"vocab": 101, **options})
        owner = LogitsChannel("test", shape, rows=rows, entries=entries, readers=names)
        writers = [LogitsWriter(owner.endpoint, rank) for rank in range(shape.ranks)]
        readers = [LogitsReader(owner.endpoint, name) for name in names]
        opened.extend([owner, *writers, *readers])
        return owner, writers, readers

    def attach(owner, name="s"):
        opened.append(LogitsReader(owner.endpoint, name))
        return opened[-1]

    def restart(owner, reader, name="s"):
        """The reader that takes the place of one that has died."""
        crash(reader)
        owner.remove_reader(name)
        owner.add_reader(name)
        return attach(owner, name)

    channel.attach, channel.restart = attach, restart
    yield channel
    for one in reversed(opened):
        one.close()


def write(writers, iteration, logits, row, vocab=101):
    for rank, writer in enumerate(writers):
        part = slice(rank * vocab // len(writers), (rank + 1) * vocab // len(writers))
        with writer.acquire(iteration, logits.shape[0], row, 1) as region:
            region[...] = logits[:, part]


def put(writer, iteration, timeout=60.0):
    """One row, whatever it has."""
    with writer.acquire(iteration, 1, iteration, timeout):
        pass


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_ranks_write_one_array(make, ranks, dtype):
    _, writers, readers = make(ranks=ranks, dtype=dtype, readers=["s", "t"])
    rng = np.random.default_rng(0)
    for iteration, batch in enumerate([8, 1, 5, 8, 0, 2, 7]):
        shape = (batch, 101)
        logits = (rng.normal(size=shape) * 100).astype(DTYPES[dtype])
        write(writers, iteration, logits, row=3 * iteration % 11)
        for reader in readers:
            with reader.receive() as received:
                assert (received.iteration, received.batch) == (iteration, batch)
                assert received.array.dtype == DTYPES[dtype]
                assert received.array.flags.c_contiguous
                assert not received.array.flags.writeable
                assert not received.array.flags.owndata
                np.testing.assert_array_equal(received.array, logits)
            assert received.array.size == 0


def test_ranks_write_uneven_shards(make):
    _, writers, (reader,) = make(bounds=(0, 60, 101, 101))
    widths = []
    for rank, writer in enumerate(writers):
        with writer.acquire(0, 2, 0, 1) as region:
            widths.append(region.shape[1])
            region[...] = rank + 1
    assert widths == [60, 41, 0]  # of a vocabulary of 101
    with reader.receive() as received:
        assert list(received.array[1]) == [1] * 60 + [2] * 41
    for bounds in [(0, 30, 60, 90), (30, 101), (0, 60, 30, 101)]:
        with pytest.raises(AssertionError):
            make(bounds=bounds)


def test_nothing_is_published_after_an_exception(make):
    _, (writer,), (reader,) = make()
    with pytest.raises(RuntimeError), writer.acquire(0, 1, 0):
        raise RuntimeError
    with writer.acquire(0, 1, 0) as region:
        region[...] = 3
    assert reader.receive().array[0, 0] == 3


def test_a_late_sampler_is_named(make):
    _, (writer,), (reader,) = make()
    for i in range(2):
        put(writer, i, 0)
    names_it = pytest.raises(StallError, match="that s should have left")
    with names_it, writer.acquire(2, 1, 2, 0.02):
        pass
    assert [reader.receive().iteration for _ in range(2)] == [0, 1]
    put(writer, 2, 1)
    assert reader.receive().iteration == 2


def test_who_is_behind(make):
    """Whoever has not done with what is there, so that one that hangs at it is found: also one that
    is to take a dead one's place, before it attaches and with the first that it draws again."""
    owner, (writer,), (reader,) = make()
    assert owner.behind() == {}
    put(writer, 0)
    assert owner.behind() == {"s": 0}
    with reader.receive():
        assert owner.behind() == {"s": 0}
    assert owner.behind() == {}
    crash(reader)
    owner.remove_reader("s")
    assert owner.behind() == {}
    owner.add_reader("s")
    assert owner.behind() == {"s": -1}
    again = make.attach(owner)
    assert owner.behind() == {"s": 0}
    again.catch_up()
    assert owner.behind() == {}
    put(writer, 1)
    assert owner.behind() == {"s": 1}
    with again.receive() as received:
        assert received.iteration == 0
        assert owner.behind() == {"s": 1}
    with again.receive() as received:
        assert received.iteration == 1
    assert owner.behind() == {}


def test_one_that_passes_the_first_over_is_not_behind(make):
    owner, (writer,), (reader,) = make()
    put(writer, 0)
    again = make.restart(owner, reader)
    again.receive()  # and not told that it is done with it
    waiting = threading.Thread(target=again.receive)
    waiting.start()
    while owner.behind():
        threading.Event().wait(0.001)
    with writer.acquire(1, 1, 0):
        pass
    waiting.join(30)
    assert not waiting.is_alive()


def test_sizes_and_ranks(make):
    owner, (writer,), _ = make()
    with pytest.raises(AssertionError), writer.acquire(0, 9, 12):
        pass
    with pytest.raises(AssertionError, match="has a writer already"):
        LogitsWriter(owner.endpoint, 0)
    for bad in ({"rows": 0}, {"vocab": 0}, {"entries": 2}, {"dtype": "int8"}):
        with pytest.raises(AssertionError):
            make(**bad)


def test_a_restarted_sampler_joins_while_the_ranks_are_amid_the_first_entry(make):
    owner, (first, second), (reader,) = make(ranks=2)
    put(first, 0)
    again = make.restart(owner, reader)
    put(second, 0)
    assert again.receive().iteration == 0


def test_a_restarted_sampler_begins_no_later_than_it_must(make):
    """All entries are in use: the oldest is held by another sampler."""
    owner, (writer,), (late, gone) = make(entries=4, readers=["late", "gone"])
    for iteration in range(4):
        put(writer, iteration, 0)
        for reader in (late, gone):
            with reader.receive() as received:
                assert received.iteration == iteration
    crash(gone)
    for iteration in (4, 5):
        put(writer, iteration, 0)
    owner.remove_reader("gone")
    owner.add_reader("gone")
    again = make.attach(owner, "gone")
    assert [again.receive().iteration for _ in range(3)] == [3, 4, 5]


def test_a_restarted_sampler_waits_while_one_rank_is_a_lap_ahead_of_the_first(make, monkeypatch):
    owner, (first, second), (reader,) = make(entries=4, ranks=2)
    crash(reader)
    owner.remove_reader("s")
    owner.add_reader("s")

    def write(writer):
        for iteration in range(4):
            with writer.acquire(iteration, 1, iteration, 0) as region:
                region[...] = iteration

    write(first)  # of the second rank there is nothing
    monkeypatch.setattr(ends.time, "sleep", lambda _seconds: write(second))
    again = make.attach(owner)
    monkeypatch.undo()
    for iteration in (1, 2, 3):  # entry 0 is next in turn, and so the ranks' own again
        with again.receive() as received:
            assert received.iteration == iteration
            assert np.all(received.array == iteration)


def test_a_restarted_sampler_is_not_misled_by_an_old_count(make, monkeypatch):
    """The rank publishes a lap more between a look at its count and the look at the entries."""
    owner, (writer,), (reader,) = make(entries=4)
    crash(reader)
    owner.remove_reader("s")
    for iteration in range(7):
        put(writer, iteration, 0)
    owner.add_reader("s")
    counts = iter([3, 7])
    with monkeypatch.context() as patch:
        patch.setattr(Ring, "published", lambda _ring, _rank: next(counts))
        again = make.attach(owner)
    assert [again.receive().iteration for _ in range(2)] == [5, 6]


def test_a_restarted_sampler_that_finds_nothing_holds_the_place_that_it_will_read(make):
    """No rank goes on before it has read, as with a sampler that has been there from the beginning."""
    owner, (writer,), (reader,) = make(entries=4)
    again = make.restart(owner, reader)
    for iteration in range(2):
        put(writer, iteration, 0)
    with pytest.raises(StallError, match="that s should have left"):
        put(writer, 2, 0.02)
    assert [again.receive().iteration for _ in range(2)] == [0, 1]
    put(writer, 2, 1)


def test_a_sampler_that_is_removed_while_it_joins_is_told(make, monkeypatch):
    owner, (first, second), (reader,) = make(entries=4, ranks=2)
    crash(reader)
    owner.remove_reader("s")
    owner.add_reader("s")
    for iteration in range(4):
        put(first, iteration, 0)  # of the second rank there is nothing

    def end_of_the_wait(_seconds):
        for iteration in range(4):
            put(second, iteration, 0)
        owner.remove_reader("s")

    monkeypatch.setattr(ends.time, "sleep", end_of_the_wait)
    with pytest.raises(ChannelClosed, match="was removed"):
        make.attach(owner)


def test_a_sampler_whose_name_has_been_declared_anew_is_let_go(make):
    owner, (writer,), (reader,) = make()
    owner.remove_reader("s")
    owner.add_reader("s")
    put(writer, 0)
    with pytest.raises(ChannelClosed, match="was removed"):
        reader.receive()


def test_the_end_of_the_owner_ends_the_samplers_and_frees_the_memory(make):
    owner, (writer,), (reader,) = make()
    put(writer, 0)
    memory = Path(owner.endpoint.ring.memory.path)
    assert memory.exists()
    owner.close()
    assert not memory.exists()
    crash(writer)  # it has not said that no more comes
    assert reader.receive().iteration == 0
    with pytest.raises(ChannelClosed):
        reader.receive()
