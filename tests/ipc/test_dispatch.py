"""The dispatch channel: content, order, late and dead peers, cut messages, joining."""

import threading

import numpy as np
import pytest

from sipipe.errors import StallError
from sipipe.ipc.errors import ChannelClosed, PeerDiedError
from sipipe.ipc.ring.dispatch import DispatchProducer, DispatchReader
from sipipe.ipc.ring.ends import RingWriter

from .crash import crash


@pytest.fixture
def make():
    """Producers and readers that are closed at the end of the test."""
    opened = []

    def producer(**options):
        made = DispatchProducer("test", **{"entries": 4, "entry_bytes": 1024, **options})
        opened.append(made)
        return made

    def reader(made, name):
        opened.append(DispatchReader(made.endpoint, name))
        return opened[-1]

    producer.reader = reader
    yield producer
    for one in reversed(opened):
        one.close()


def content(reader):
    with reader.receive() as message:
        return message.sequence, [bytes(part) for part in message.parts]


def test_parts_are_read_in_place_and_aligned(make):
    producer = make(readers=["a"], entry_bytes=1 << 12)
    a = make.reader(producer, "a")
    array = np.linspace(0, 1, 100)
    producer.publish([b"x", array])
    with a.receive() as message:
        got = np.frombuffer(message.parts[1])
        assert got.flags.aligned
        assert not got.flags.owndata
        assert not got.flags.writeable
        np.testing.assert_array_equal(got, array)
        part = message.parts[0]
    with pytest.raises(ValueError, match="released"):
        bytes(part)


@pytest.mark.parametrize("attached", [True, False])
def test_a_late_or_absent_reader_is_named_and_misses_nothing(make, attached):
    producer = make(readers=["quick", "late"])
    quick = make.reader(producer, "quick")
    late = make.reader(producer, "late") if attached else None
    for sent in range(2):  # four entries: the late reader's place, two messages, one claimed ahead
        assert producer.publish([b"%d" % sent], timeout=0) == sent
        content(quick)
    with pytest.raises(StallError, match=r"waited 0\.02 s .* that late should have left"):
        producer.publish([b"2"], timeout=0.02)
    late = late or make.reader(producer, "late")
    assert content(late) == (0, [b"0"])
    assert producer.publish([b"2"], timeout=1) == 2
    assert content(late) == (1, [b"1"])
    assert content(late) == content(quick) == (2, [b"2"])


def test_a_cut_message_given_up_midway_is_dropped_whole(make):
    producer = make(readers=["a"])
    a = make.reader(producer, "a")
    with pytest.raises(StallError, match=r"waited 0\.02 s"):
        producer.publish([bytes(10_000)], timeout=0.02)
    got = []
    thread = threading.Thread(target=lambda: got.append(content(a)))
    thread.start()
    assert producer.publish([b"next"], timeout=30) == 0
    thread.join(30)
    assert got == [(0, [b"next"])]


def test_a_removed_reader_is_let_go(make):
    producer = make(readers=["a"])
    a = make.reader(producer, "a")
    producer.remove_reader("a")
    with pytest.raises(ChannelClosed, match="was removed"):
        a.receive()
    for _ in range(10):
        producer.publish([b"x"], timeout=0)
    producer.add_reader("a")
    again = make.reader(producer, "a")
    producer.publish([b"y"])
    assert content(again) == (10, [b"y"])


def test_a_message_out_of_sequence_is_noticed(make, monkeypatch):
    producer = make(readers=["a"])
    a = make.reader(producer, "a")
    producer.publish([b"x"])
    assert content(a)[0] == 0
    publish = RingWriter.publish

    def publish_as_the_next(writer, header):
        sequence, *rest = header
        publish(writer, (sequence + 1, *rest))

    monkeypatch.setattr(RingWriter, "publish", publish_as_the_next)
    producer.publish([b"x"])
    with pytest.raises(AssertionError, match="message 2, not 1"):
        a.receive()


@pytest.mark.parametrize("end", [DispatchProducer.close, crash], ids=["close", "crash"])
def test_the_end_wakes_every_reader_that_sleeps(make, end):
    producer = make(readers=["a", "b"])
    ends = []

    def wait(reader):
        try:
            reader.receive()
        except (ChannelClosed, PeerDiedError) as error:
            ends.append(type(error))

    readers = [make.reader(producer, name) for name in "ab"]
    threads = [threading.Thread(target=wait, args=(reader,)) for reader in readers]
    for thread in threads:
        thread.start()
    end(producer)
    for thread in threads:
        thread.join(30)
    assert ends == [PeerDiedError if end is crash else ChannelClosed] * 2


def test_names(make):
    producer = make(readers=["a"])
    make.reader(producer, "a")
    with pytest.raises(AssertionError, match="no reader 'b' is declared"):
        make.reader(producer, "b")
    with pytest.raises(AssertionError, match="attached twice"):
        make.reader(producer, "a")
    with pytest.raises(AssertionError):
        producer.add_reader("a")
    for _ in range(2):
        producer.remove_reader("a")


def test_threads_take_turns_to_publish_and_to_add_readers(make):
    names = [f"late{i}" for i in range(10)]
    producer = make(readers=["a", *names], entries=32)
    for name in names:
        producer.remove_reader(name)
    a = make.reader(producer, "a")
    late = []

    def publish():
        for _ in range(200):
            producer.publish([b"x"], 30)

    def join():
        for name in names:
            producer.add_reader(name)
            reader = DispatchReader(producer.endpoint, name)
            late.append(reader.receive().sequence)
            reader.close()

    threads = [threading.Thread(target=target) for target in (publish, publish, join)]
    for thread in threads:
        thread.start()
    got = [content(a)[0] for _ in range(400)]
    while threads[2].is_alive():  # a reader that joined after the last message waits for one more
        producer.publish([b"x"], 30)
        got.append(content(a)[0])
    for thread in threads:
        thread.join(30)
    assert got == list(range(len(got)))
    assert late == sorted(late)
