"""The gather ring: order, completeness, restarts, strangers."""

import os
import socket
import struct
import threading

import pytest

from sipipe.ipc.errors import ChannelClosed, ChannelError, ChannelPeerDied, ChannelTimeout
from sipipe.ipc.gather_old.receiver import GatherReceiver
from sipipe.ipc.gather_old.sender import GatherSender
from sipipe.ipc.sockets import SocketEndpoint

ADDRESSES = [None, ("127.0.0.1", 0), ("::1", 0)]


@pytest.mark.parametrize("address", ADDRESSES, ids=["unix", "tcp", "tcp6"])
def test_complete_and_in_order(address):
    with GatherReceiver.create(["a", "b"], address) as receiver:
        a = GatherSender.connect(receiver.endpoint, "a")
        b = GatherSender.connect(receiver.endpoint, "b")
        a.send(0, [b"a0"])
        a.send(1, [b"a", memoryview(b""), bytearray(b"1")])
        b.send(1, [b"b1"])
        with pytest.raises(ChannelTimeout, match="b sent nothing") as late:
            receiver.collect(0.05)
        assert late.value.late == ("b",)
        b.send(0, [b"b0"])
        first, second = receiver.collect(5), receiver.collect(5)
        assert (first.iteration, first.payloads) == (0, {"a": b"a0", "b": b"b0"})
        assert (second.iteration, second.payloads) == (1, {"a": b"a1", "b": b"b1"})
        assert receiver.statistics().messages == 2
        a.close()
        b.close()
        with pytest.raises(ChannelTimeout):  # a farewell is no death
            receiver.collect(0.05)


def test_expected_senders_of_an_iteration():
    with (
        GatherReceiver.create(["a", "b"]) as receiver,
        GatherSender.connect(receiver.endpoint, "a") as a,
    ):
        receiver.expect(5, ["a"])
        receiver.expect(8, ["a", "b"])
        receiver.expect(9, [])
        a.send(8, [b"8"])
        a.send(5, [b"5"])
        assert receiver.collect(5).payloads == {"a": b"5"}
        receiver.expect(8, ["a"])  # b will not come: its columns went elsewhere
        assert receiver.collect(5).payloads == {"a": b"8"}
        assert receiver.collect(5).iteration == 9
        with pytest.raises(ChannelError, match="unknown senders"):
            receiver.expect(10, ["c"])


def test_restart_drops_what_came_already():
    with GatherReceiver.create(["a", "b"]) as receiver:
        a = GatherSender.connect(receiver.endpoint, "a", 0)
        b = GatherSender.connect(receiver.endpoint, "b", 0)
        a.send(0, [b"first"])
        a.send(1, [b"first"])
        b.send(0, [b"b"])
        assert receiver.collect(5).payloads["a"] == b"first"
        a._sock.close()  # killed: no farewell
        with pytest.raises(ChannelPeerDied) as died:
            receiver.collect(5)
        assert died.value.name == "a"
        again = GatherSender.connect(receiver.endpoint, "a", 1)
        again.send(0, [b"again"])  # stale: returned already
        again.send(1, [b"again"])  # duplicate: the predecessor's is kept
        again.send(2, [b"again"])
        b.send(1, [b"b"])
        b.send(2, [b"b"])
        assert receiver.collect(5).payloads == {"a": b"first", "b": b"b"}
        assert receiver.collect(5).payloads == {"a": b"again", "b": b"b"}
        assert receiver.statistics().dropped == 2
        again.close()
        b.close()


def test_an_earlier_incarnation_does_not_come_back():
    with GatherReceiver.create(["a"]) as receiver:
        new = GatherSender.connect(receiver.endpoint, "a", 2)
        with pytest.raises(ChannelPeerDied, match="does not take a in"):
            GatherSender.connect(receiver.endpoint, "a", 1)
        with pytest.raises(ChannelPeerDied, match="does not take b in"):
            GatherSender.connect(receiver.endpoint, "b")
        new.send(0, [b"new"])
        assert receiver.collect(5).payloads == {"a": b"new"}
        new.close()


def test_strangers_are_not_let_in():
    with GatherReceiver.create(["a"], ("127.0.0.1", 0)) as receiver:
        endpoint = receiver.endpoint
        wrong = SocketEndpoint(endpoint.channel, endpoint.host, endpoint.port, "00" * 32, 1 << 20)
        with pytest.raises(ChannelPeerDied, match="token"):
            GatherSender.connect(wrong, "a", timeout=5)
        with socket.create_connection((endpoint.host, endpoint.port)) as noise:
            noise.sendall(os.urandom(1000))
        assert endpoint.token not in repr(endpoint)
        assert receiver.connected() == ()


def test_a_message_beyond_the_bound_is_refused_at_both_ends():
    with GatherReceiver.create(["a"], max_bytes=1000) as receiver:
        a = GatherSender.connect(receiver.endpoint, "a")
        with pytest.raises(ChannelError, match="max_bytes"):
            a.send(0, [bytes(1001)])
        a._sock.sendall(struct.pack("<IQ", 1001, 0))
        with pytest.raises(ChannelError, match="a announced 1,001 bytes"):
            receiver.collect(5)
        a._sock.close()


def test_close_ends_both_ends():
    receiver = GatherReceiver.create(["a"])
    a = GatherSender.connect(receiver.endpoint, "a")
    receiver.close()
    receiver.close()
    with pytest.raises(ChannelClosed):
        receiver.collect(1)
    with pytest.raises(ChannelPeerDied):
        a.send(0, [b"x"])
    with pytest.raises(ChannelPeerDied, match="nobody listens"):
        GatherSender.connect(receiver.endpoint, "a", timeout=1)
    a.close()


def test_another_thread_may_expect_and_close():
    got = []
    with GatherReceiver.create(["a"]) as receiver:

        def collect():
            try:
                while True:
                    got.append(receiver.collect())
            except ChannelClosed as end:
                got.append(end)

        receiver.expect(3, ["a"])
        thread = threading.Thread(target=collect)
        thread.start()
        with GatherSender.connect(receiver.endpoint, "a") as a:
            a.send(4, [b"early"])  # kept until it is declared
            a.send(3, [b"three"])
            receiver.expect(4, ["a"])
            receiver.expect(5, [])  # complete when it is declared: the collector is woken for it
            a.send(6, [b"six"])
            receiver.expect(6, ["a"])
            while len(got) < 4:
                thread.join(0.001)
        receiver.close()
        thread.join(30)
        assert not thread.is_alive()
    assert [one.iteration for one in got[:-1]] == [3, 4, 5, 6]
    assert got[1].payloads == {"a": b"early"}
    assert isinstance(got[-1], ChannelClosed)
    assert receiver.statistics().depth == 0
