"""The relay on loopback: same messages, dropped connections, ends that die."""

import contextlib
import json
import multiprocessing
import re
import socket
import threading

import msgspec
import numpy as np
import psutil
import pytest

from sipipe.channels import (
    ChannelClosed,
    ChannelPeerDied,
    ChannelTimeout,
    DispatchProducer,
    DispatchReader,
    LogitsChannel,
    LogitsReader,
    LogitsWriter,
    RelayEndpoint,
    RelayReplica,
    RelaySource,
    relay_replica,
    serve_replica,
    serve_source,
)
from sipipe.channels.handshake import receive_into
from sipipe.errors import ConfigError

from . import process

SPAWN = multiprocessing.get_context("spawn")
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
    source = RelaySource.dispatch(
        producer.endpoint, "relay", LOOPBACK, retry=retry, start_timeout=retry
    )
    replica = RelayReplica.create(
        source.endpoint, readers=readers, slots=8, slot_bytes=4096, retry=retry, **options
    )
    return producer, source, replica


def pause(producer):
    """As if the last look at the readers were long ago."""
    producer._watch._look_at = producer._watch.look_first_at = 0.0


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
    pause(producer)
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
    replica._source = msgspec.structs.replace(endpoint, token="0" * 64)
    assert endpoint.token not in repr(endpoint)
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
    pause(replica._sink._producer)
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


@pytest.fixture
def far_logits():
    """A logits channel of two ranks, its relay and the far sampler."""
    opened = []

    def make(layout="rows", **options):
        original = LogitsChannel.create(
            "test", slots=4, vocab=100, batch=8, layout=layout, ranks=2, readers=["relay"]
        )
        writers = [LogitsWriter.open(original.endpoint, rank) for rank in range(2)]
        source = RelaySource.logits(original.endpoint, "relay", LOOPBACK, retry=20)
        replica = RelayReplica.create(source.endpoint, readers=["sampler"], **options)
        sampler = LogitsReader.open(replica.endpoint, "sampler")
        opened.extend([sampler, *writers, original])
        return writers, source, replica, sampler

    yield make
    for one in opened:
        one.close()


def write(writers, iteration, batch):
    for rank, writer in enumerate(writers):
        with writer.acquire(iteration, batch, 30) as region:
            region[...] = 10 * iteration + rank


@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_logits(far_logits, layout):
    writers, source, replica, sampler = far_logits(layout)
    assert sampler.shape == source.endpoint.logits
    assert sampler.layout.slots == source.endpoint.slots == 4
    ends = [Running(source), Running(replica)]
    for i, batch in enumerate([8, 3, 0, 5, 8, 1, 8]):
        write(writers, i, batch)
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


def test_a_connection_that_drops_amid_logits_is_retried(far_logits, monkeypatch):
    writers, source, replica, sampler = far_logits()
    dropped = []

    def drop_once(sock, view):
        if len(view) > 1000 and len(dropped) < 2:
            dropped.append(sock.recv_into(view[: len(view) // 2]))
            raise EOFError
        receive_into(sock, view)

    monkeypatch.setattr(relay_replica, "receive_into", drop_once)
    ends = [Running(source), Running(replica)]
    for i in range(10):
        write(writers, i, 8)
        with sampler.receive(30) as slot:
            assert slot.iteration == i
            assert set(slot.array[:, 0]) == {10 * i}
            assert set(slot.array[:, 99]) == {10 * i + 1}
    for writer in writers:
        writer.close()
    assert [end.end() for end in ends] == [None, None]
    assert len(dropped) == replica.statistics().dropped == 2


def test_a_sampler_over_there_that_is_started_again_begins_with_the_oldest_logits(far_logits):
    writers, source, replica, sampler = far_logits()
    ends = [Running(source), Running(replica)]
    write(writers, 7, 1)
    assert sampler.receive(30).iteration == 7
    sampler.abandon()
    replica.remove_reader("sampler")
    replica.add_reader("sampler")
    with LogitsReader.open(replica.endpoint, "sampler") as again:
        assert again.receive(30).iteration == 7
        write(writers, 8, 1)
        assert again.receive(30).iteration == 8
    for writer in writers:
        writer.close()
    assert [end.end() for end in ends] == [None, None]
    assert replica.dead_readers() == ()


@pytest.mark.parametrize("kind", ["dispatch", "logits"])
def test_a_reader_over_there_that_is_stuck_ends_the_relay(far_logits, kind):
    if kind == "logits":
        writers, source, replica, sampler = far_logits(stall=0.1)

        def publish(i):
            write(writers, i, 1)
    else:
        producer, source, replica = make(stall=0.1)
        DispatchReader.open(producer.endpoint, "near").close()
        sampler = DispatchReader.open(replica.endpoint, "far")

        def publish(i):
            producer.publish([b"%d" % i], 30)

    Running(source)
    end = Running(replica)
    for i in range(4 if kind == "logits" else 8):
        publish(i)
    error = end.end()
    assert isinstance(error, ChannelTimeout)
    assert error.late == (sampler._ring.name,)
    sampler.close()


def test_bad_bounds_are_refused():
    endpoint = RelayEndpoint("test", "127.0.0.1", 1, "0" * 64, 1, slots=4, slot_bytes=64)
    for bad in ({"retry": 0}, {"stall": 0}):
        with pytest.raises(ConfigError, match="retry and stall"):
            RelayReplica.create(endpoint, readers=[], **bad)


def daemon(target, *arguments, **options):
    here, there = SPAWN.Pipe()
    started = SPAWN.Process(target=target, args=(there, *arguments), kwargs=options)
    started.start()
    there.close()
    return started, here


def test_as_processes():
    producer = DispatchProducer.create("test", readers=["relay"])
    source, source_end = daemon(serve_source, producer.endpoint, "relay", LOOPBACK)
    replica, replica_end = daemon(serve_replica, source_end.recv(), readers=["far"])
    endpoint = replica_end.recv()
    far = DispatchReader.open(endpoint, "far")
    producer.publish([b"over there"], 30)
    assert content(far) == (0, [b"over there"])
    replica_end.send(("add_reader", "far"))
    assert "is there already" in replica_end.recv()[1]
    far.abandon()
    replica_end.send(("remove_reader", "far"))
    replica_end.send(("add_reader", "far"))
    assert [replica_end.recv() for _ in range(2)] == [
        ("remove_reader", None),
        ("add_reader", None),
    ]
    with DispatchReader.open(endpoint, "far") as again:
        producer.publish([b"more"], 30)
        assert content(again) == (1, [b"more"])
        producer.close()
        with pytest.raises(ChannelClosed):
            again.receive(30)
    for end, back in ((source, source_end), (replica, replica_end)):
        assert back.recv() == ("end", None)
        end.join(30)
        assert end.exitcode == 0


def test_a_replica_that_cannot_be_made_says_why():
    source = RelayEndpoint("test", "127.0.0.1", 1, "0" * 64, 1, slots=4, slot_bytes=64)
    replica, back = daemon(serve_replica, source, readers=[], directory="/no/such/place")
    what, line = back.recv()
    assert what == "end"
    assert "name a directory that exists" in line
    replica.join(30)


@pytest.mark.parametrize("kind", ["dispatch", "logits"])
@pytest.mark.parametrize("victim", ["near", "source", "replica", "far", "everybody"])
def test_kill_9_of_either_side_is_noticed_and_leaves_nothing(kind, victim, tmp_path):
    options = {"kind": kind, "directory": str(tmp_path), "retry": 0.5}
    hosts = {"near": process.start("near", **options)}
    started = json.loads(hosts["near"].stdout.readline())
    daemons = {"source": psutil.Process(started["pid"])}
    hosts["far"] = process.start("far", **options, source=started["source"])
    daemons["replica"] = psutil.Process(json.loads(hosts["far"].stdout.readline())["pid"])
    assert hosts["far"].stdout.readline() == "running\n"
    everybody = {**hosts, **daemons}
    for one in everybody.values() if victim == "everybody" else [everybody[victim]]:
        one.kill()
    words = {name: host.communicate(timeout=60)[0] for name, host in hosts.items()}
    gone, alive = psutil.wait_procs(list(daemons.values()), timeout=60)
    for straggler in alive:
        straggler.kill()
    assert len(gone) == 2
    assert not list(tmp_path.iterdir())
    if victim not in ("far", "everybody"):
        assert words["far"] == "ChannelPeerDied\n"
    if victim not in ("near", "everybody"):
        assert re.match("relay died|source is gone|relay relay: no connection", words["near"])
