"""The relay on loopback: same messages, dropped connections, ends that die."""

import contextlib
import multiprocessing
import socket
import threading

import numpy as np
import pytest

from sipipe.channels import (
    ChannelClosed,
    ChannelPeerDied,
    DispatchProducer,
    DispatchReader,
    LogitsChannel,
    LogitsReader,
    LogitsWriter,
    RelayReplica,
    RelaySource,
    SocketEndpoint,
    serve_replica,
    serve_source,
)

LOOPBACK = ("127.0.0.1", 0)


class Running:
    """``run`` of a source or replica in a thread; ``end`` is what came out of it."""

    def __init__(self, relay):
        self.relay = relay
        self.error = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self):
        try:
            self.relay.run()
        except BaseException as error:
            self.error = error

    def end(self):
        self.thread.join(30)
        assert not self.thread.is_alive()
        return self.error


def make(readers=("far",), retry=20.0, **options):
    producer = DispatchProducer.create("test", 8, 4096, ["near", "relay"])
    source = RelaySource.dispatch(producer.endpoint, "relay", LOOPBACK, retry=retry)
    replica = RelayReplica.dispatch(
        source.endpoint, readers=readers, slots=8, slot_bytes=4096, retry=retry, **options
    )
    return producer, source, replica


def content(reader):
    with reader.receive(30) as message:
        return message.sequence, [bytes(part) for part in message.parts]


def test_the_replica_has_the_same_messages():
    producer, source, replica = make()
    ends = [Running(source), Running(replica)]
    rng = np.random.default_rng(0)
    with (
        DispatchReader.open(producer.endpoint, "near") as near,
        DispatchReader.open(replica.endpoint, "far") as far,
    ):
        for i in range(50):
            parts = [b"%d" % i, b"", rng.bytes(int(rng.integers(0, 20_000)))]
            producer.publish(parts, 30)
            assert content(near) == content(far) == (i, parts)
        producer.close()
        with pytest.raises(ChannelClosed):
            far.receive(30)
    assert [end.end() for end in ends] == [None, None]
    assert replica.statistics().messages == source.statistics().messages == 50


def test_dropped_connections_lose_and_repeat_nothing():
    producer, source, replica = make()
    ends = [Running(source), Running(replica)]
    with (
        DispatchReader.open(producer.endpoint, "near") as near,
        DispatchReader.open(replica.endpoint, "far") as far,
    ):
        for i in range(100):
            producer.publish([b"%d" % i], 30)
            content(near)
            if i % 20 == 10:
                with contextlib.suppress(OSError, AttributeError):
                    (replica._sock if i % 40 == 10 else source._connection).shutdown(
                        socket.SHUT_RDWR
                    )
            if i % 7 == 0:
                while content(far)[0] < i:
                    pass
        assert content(far) == (99, [b"99"])
        producer.close()
        with pytest.raises(ChannelClosed):
            far.receive(30)
    assert [end.end() for end in ends] == [None, None]
    assert replica.statistics().messages == 100
    assert replica.statistics().dropped >= 3


def test_a_dead_producer_is_dead_over_there_too():
    producer, source, replica = make()
    ends = [Running(source), Running(replica)]
    with DispatchReader.open(replica.endpoint, "far") as far:
        producer.publish([b"last"], 30)
        producer.abandon()
        assert content(far) == (0, [b"last"])
        with pytest.raises(ChannelPeerDied):
            far.receive(30)
    for end in ends:
        assert isinstance(end.end(), ChannelPeerDied)


def test_a_lost_replica_is_reported_to_the_producer():
    producer, source, replica = make(retry=0.2)
    end = Running(source)
    assert "no connection from its replica" in str(end.end())
    DispatchReader.open(producer.endpoint, "near").close()
    producer._looked = 0.0
    with pytest.raises(ChannelPeerDied) as died:
        producer.publish([b"x"], 0)
    assert died.value.name == "relay"
    with DispatchReader.open(replica.endpoint, "far") as far:
        error = Running(replica).end()
        assert isinstance(error, ChannelPeerDied)
        assert "cannot reach its source" in str(error)
        with pytest.raises(ChannelPeerDied):
            far.receive(30)
    producer.close()


def test_a_wrong_token_is_not_let_in():
    producer, source, replica = make(retry=0.5)
    endpoint = source.endpoint
    replica._source = SocketEndpoint(endpoint.channel, endpoint.host, endpoint.port, "0" * 64, 1)
    ends = [Running(source), Running(replica)]
    for end in ends:
        assert isinstance(end.end(), ChannelPeerDied)
    producer.close()


def test_a_dead_reader_over_there_is_removed_and_its_successor_joins():
    producer, source, replica = make(readers=["far", "other"])
    ends = [Running(source), Running(replica)]
    near = DispatchReader.open(producer.endpoint, "near")
    far = DispatchReader.open(replica.endpoint, "far")
    other = DispatchReader.open(replica.endpoint, "other")
    producer.publish([b"0"], 30)
    assert content(near) == content(far) == content(other)
    far.abandon()
    replica._sink.producer._looked = 0.0
    producer.publish([b"1"], 30)
    assert content(near) == content(other)
    assert replica.dead_readers() == ("far",)
    replica.add_reader("far")
    again = DispatchReader.open(replica.endpoint, "far")
    producer.publish([b"2"], 30)
    assert content(near) == content(other) == content(again) == (2, [b"2"])
    producer.close()
    assert [end.end() for end in ends] == [None, None]
    for reader in (near, other, again):
        reader.close()


@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_logits(layout):
    shape = {"slots": 4, "vocab": 100, "batch": 8, "layout": layout}
    original = LogitsChannel.create("test", **shape, ranks=2, readers=["relay"])
    writers = [LogitsWriter.open(original.endpoint, rank) for rank in range(2)]
    source = RelaySource.logits(original.endpoint, "relay", LOOPBACK)
    there = LogitsChannel.create("there", **shape, readers=["sampler"])
    replica = RelayReplica.logits(source.endpoint, there)
    ends = [Running(source), Running(replica)]
    with LogitsReader.open(replica.endpoint, "sampler") as sampler:
        for i, batch in enumerate([8, 3, 0, 5, 8, 1, 8]):
            for rank, writer in enumerate(writers):
                with writer.acquire(i, batch, 30) as region:
                    region[...] = 10 * i + rank
            with sampler.receive(30) as slot:
                assert (slot.iteration, slot.batch) == (i, batch)
                array = slot.array if layout == "columns" else slot.array.T
                np.testing.assert_array_equal(array[:50], 10 * i)
                np.testing.assert_array_equal(array[50:], 10 * i + 1)
        for writer in writers:
            writer.close()
        with pytest.raises(ChannelClosed):
            sampler.receive(30)
    assert [end.end() for end in ends] == [None, None]
    original.close()


def test_as_processes():
    spawn = multiprocessing.get_context("spawn")
    producer = DispatchProducer.create("test", readers=["relay"])
    source_end, there = spawn.Pipe()
    source = spawn.Process(target=serve_source, args=(there, producer.endpoint, "relay", LOOPBACK))
    source.start()
    endpoint = source_end.recv()
    replica_end, there = spawn.Pipe()
    replica = spawn.Process(
        target=serve_replica, args=(there, endpoint), kwargs={"readers": ["far"]}
    )
    replica.start()
    with DispatchReader.open(replica_end.recv(), "far") as far:
        producer.publish([b"over there"], 30)
        assert content(far) == (0, [b"over there"])
        replica.kill()
        with pytest.raises(ChannelPeerDied):
            far.receive(30)
    producer.close()
    replica.join(30)
    source.kill()
    source.join(30)
