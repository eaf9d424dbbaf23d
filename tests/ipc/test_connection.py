"""One connection between hosts: who gets in, what arrives, and how its end is seen."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import socket
import threading

import numpy as np
import pytest
from tests.ipc.link.conftest import HERE, free_port

from sipipe.errors import ConfigError
from sipipe.ipc import connection
from sipipe.ipc.connection import Connection
from sipipe.ipc.errors import PeerDiedError, TransferMismatchError
from sipipe.ipc.frames import FRAME
from sipipe.ipc.secret import private_keys, read_secret
from sipipe.ipc.tcp import check_port

BOUND = 30.0


@pytest.fixture(autouse=True)
def secret(monkeypatch):
    monkeypatch.setenv("SIPIPE_SECRET", "a secret of the tests")
    monkeypatch.delenv("SIPIPE_SECRET_FILE", raising=False)


@pytest.fixture
def open_end():
    opened = []

    def open_end(port: int, *, listens: bool, **more) -> Connection:
        who = "the connecting end" if listens else "the listening end"
        opened.append(Connection(HERE, port, listens=listens, who=who, **more))
        return opened[-1]

    yield open_end
    for end in opened:
        end.close()


@pytest.fixture(params=["", "a token"], ids=["encrypted", "not encrypted"])
def token(request):
    return request.param


@pytest.fixture
def open_both(open_end, token):
    def open_both(**more):
        port = free_port(HERE)
        ends = [open_end(port, listens=listens, token=token, **more) for listens in (True, False)]
        assert all(end.wait_for_peer(BOUND) for end in ends)
        return ends

    return open_both


@pytest.fixture
def ends(open_both):
    return open_both()


def test_messages_both_ways_and_from_several_threads(ends):
    listening, connecting = ends

    def echo() -> None:
        for _ in range(300):
            connecting.send(*connecting.receive(BOUND))

    def send(n: int) -> None:
        for _ in range(100):
            listening.send(bytes([n]), b"x" * n)

    threads = [threading.Thread(target=echo)]
    threads += [threading.Thread(target=send, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    back = [listening.receive(BOUND) for _ in range(300)]
    for thread in threads:
        thread.join()
    assert sorted(map(tuple, back)) == [
        (bytes([n]), b"x" * n) for n in range(3) for _ in range(100)
    ]


def test_parts_that_go_where_they_belong(ends):
    listening, connecting = ends
    room = bytearray(6)
    connecting.send(b"head", b"abc", b"def")
    view = memoryview(room)
    assert listening.receive(BOUND, lambda head: [view[:3], view[3:]]) == [b"head"]
    assert room == b"abcdef"
    connecting.send(b"head", b"abcd")
    with pytest.raises(TransferMismatchError, match="connecting end sent another size"):
        listening.receive(BOUND, lambda head: [view[:3]])


@pytest.mark.parametrize("size", [FRAME - 1, FRAME, FRAME + 1, 3 * FRAME])
def test_parts_of_any_size(ends, size):
    listening, connecting = ends
    sent = np.random.default_rng(0).bytes(size)
    connecting.send(sent, b"", np.frombuffer(sent, np.uint8).data)
    assert listening.receive(BOUND) == [sent, b"", sent]
    room = bytearray(size)
    connecting.send(b"head", sent, b"more")
    assert listening.receive(BOUND, lambda head: [memoryview(room)]) == [b"head", b"more"]
    assert room == sent
    connecting.send(b"head", sent + b"x" * FRAME)
    with pytest.raises(TransferMismatchError):
        listening.receive(BOUND, lambda head: [memoryview(room)])


def test_nothing_comes_in_time(ends):
    assert ends[0].receive(0.01) is None


def test_what_was_sent_before_the_end_is_received(ends):
    listening, connecting = ends
    connecting.send(b"last")
    connecting.interrupt(b"bye")
    connecting.close()
    assert [listening.receive(BOUND) for _ in range(2)] == [[b"last"], [b"bye"]]
    with pytest.raises(PeerDiedError, match="the connecting end died or cannot be reached"):
        listening.receive(BOUND)
    with pytest.raises(PeerDiedError):
        listening.send(b"x")


def test_a_bound_may_be_years(ends):
    first, second = ends
    later = threading.Timer(0.2, first.send, [b"at last"])
    later.start()
    assert bytes(second.receive(1e9)[0]) == b"at last"
    later.join()


def test_interrupting_ends_a_wait(ends):
    waiting = threading.Timer(0.05, ends[0].interrupt)
    waiting.start()
    with pytest.raises(PeerDiedError):
        ends[0].receive(BOUND)
    waiting.join()


def test_another_secret_is_refused_and_a_stranger_is_no_hindrance(open_end, monkeypatch):
    port = free_port(HERE)
    listening = open_end(port, listens=True)
    with socket.create_connection((HERE, port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 20)
        monkeypatch.setenv("SIPIPE_SECRET", "another secret of the tests")
        wrong = open_end(port, listens=False)
        assert not wrong.wait_for_peer(BOUND)
        assert wrong.refused
        wrong.close()
        monkeypatch.setenv("SIPIPE_SECRET", "a secret of the tests")
        right = open_end(port, listens=False)
        assert right.wait_for_peer(BOUND)
        right.send(b"in")
        assert listening.receive(BOUND) == [b"in"]
    right.close()
    with pytest.raises(PeerDiedError):
        listening.receive(BOUND)


def knock(port: int, times: int, says: bytes = b"") -> None:
    """Connect and go."""
    for _ in range(times):
        with socket.socket() as stranger:
            stranger.setblocking(False)
            with contextlib.suppress(OSError):
                stranger.connect((HERE, port))
            if says:
                with contextlib.suppress(OSError):
                    stranger.send(says)


STRANGERS = pytest.mark.parametrize(
    "times", [1500, pytest.param(20_000, marks=pytest.mark.slow)], ids=str
)


@STRANGERS
@pytest.mark.parametrize("says", [b"", bytes(range(64))], ids=["nothing", "bytes"])
def test_strangers_hinder_nobody(open_end, times, says, token):
    """At a port that nobody looks at, before and after the peer comes."""
    port = free_port(HERE)
    listening = open_end(port, listens=True, token=token)
    slow = socket.create_connection((HERE, port))
    slow.send(b"\xff")
    with slow:
        knock(port, times, says)
        connecting = open_end(port, listens=False, token=token)
        assert connecting.wait_for_peer(BOUND)
        knock(port, times, says)
        connecting.send(b"in")
        assert listening.receive(BOUND) == [b"in"]
        listening.send(b"out")
        assert connecting.receive(BOUND) == [b"out"]


def test_once_the_peer_is_in_nobody_else_gets_to_the_port(open_end, token):
    port = free_port(HERE)
    ends = [open_end(port, listens=listens, token=token) for listens in (True, False)]
    assert all(end.wait_for_peer(BOUND) for end in ends)
    with pytest.raises(TimeoutError):
        socket.create_connection((HERE, port), timeout=1.0)


def test_no_more_than_a_frame_of_a_stranger_is_stored(open_end, token):
    port = free_port(HERE)
    open_end(port, listens=True, token=token)
    mechanism = b"PLAIN" if token else b"CURVE"
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + mechanism.ljust(20, b"\0") + bytes(32)
    sent, block = 0, bytes(1 << 20)
    with socket.create_connection((HERE, port), timeout=BOUND) as stranger:
        stranger.sendall(greeting)
        assert stranger.recv(64)
        with contextlib.suppress(ConnectionError):
            stranger.sendall(b"\x06" + (1 << 30).to_bytes(8, "big"))  # a command of a gigabyte
            while sent < 64:
                stranger.sendall(block)
                sent += 1
    assert sent < 32


def test_a_connection_that_was_lost_is_not_made_again(open_end):
    """Else an end that is about to close would be taken for the one that is awaited."""
    port = free_port(HERE)
    first, old = open_end(port, listens=True), open_end(port, listens=False)
    assert first.wait_for_peer(BOUND)
    assert old.wait_for_peer(BOUND)
    first.close()
    second = open_end(port, listens=True)
    assert not second.wait_for_peer(1.0)
    new = open_end(port, listens=False)
    assert all(end.wait_for_peer(BOUND) for end in (second, new))
    new.send(b"new")
    assert second.receive(BOUND) == [b"new"]


@pytest.mark.parametrize("leaves", ["listening", "connecting"])
def test_a_lost_peer_is_told_to_an_end_that_asks_for_nothing(open_both, leaves):
    told = queue.SimpleQueue()
    ends = open_both(lost=told.put)
    ends[leaves == "connecting"].close()
    who = f"the {leaves} end died or cannot be reached"
    assert re.match(rf"{who} \(it (closed|reset) the connection\);", str(told.get(timeout=BOUND)))


def test_an_end_that_is_refused_says_so(open_end, monkeypatch):
    told = queue.SimpleQueue()
    port = free_port(HERE)
    open_end(port, listens=True)
    monkeypatch.setenv("SIPIPE_SECRET", "another secret of the tests")
    wrong = open_end(port, listens=False, lost=told.put)
    assert "(it refused the handshake 3 times)" in str(told.get(timeout=BOUND))
    with pytest.raises(PeerDiedError):
        wrong.receive(BOUND)


def test_a_listener_that_is_not_there_yet(open_end, token):
    port = free_port(HERE)
    connecting = open_end(port, listens=False, token=token)
    assert not connecting.wait_for_peer(0.01)
    assert not connecting.refused
    open_end(port, listens=True, token=token)
    assert connecting.wait_for_peer(BOUND)


def test_what_has_come_can_be_answered(open_end, token, monkeypatch):
    """Though its sender has not been seen to come: a link's first release would be lost, and the
    sender would wait for the buffer until it takes the next stage for stalled."""
    deafen = connection.deafen

    def late(listener):  # the last thing before messages pass
        threading.Event().wait(0.5)
        deafen(listener)

    monkeypatch.setattr(connection, "deafen", late)
    port = free_port(HERE)
    listening = open_end(port, listens=True, token=token)
    connecting = open_end(port, listens=False, token=token)
    assert connecting.wait_for_peer(BOUND)
    connecting.send(b"a frame")
    while (came := listening.receive(0.001)) is None:
        pass
    listening.send(b"its release")
    assert (came, connecting.receive(BOUND)) == ([b"a frame"], [b"its release"])


@pytest.mark.parametrize("wrong", ["", "another token"], ids=["the secret", "another token"])
def test_a_token_lets_its_peer_in_alone(open_end, wrong):
    port = free_port(HERE)
    listening = open_end(port, listens=True, token="a token")
    stranger = open_end(port, listens=False, token=wrong)
    assert not stranger.wait_for_peer(BOUND)
    assert stranger.refused
    stranger.close()
    right = open_end(port, listens=False, token="a token")
    assert right.wait_for_peer(BOUND)
    right.send(b"in")
    assert listening.receive(BOUND) == [b"in"]
    late = open_end(port, listens=False, token="a token")
    assert not late.wait_for_peer(0.5)
    right.send(b"in as well")
    assert listening.receive(BOUND) == [b"in as well"]


@pytest.mark.parametrize("host", ["a" * 70, "é\u2028"])
def test_what_is_no_hosts_name_cannot_be_listened_on(host):
    with pytest.raises(ConfigError, match=r"port 80 of .* cannot be listened on .*: another"):
        check_port(host, 80, "another")


def test_a_port_that_is_taken_and_an_address_that_is_not_ours(open_end):
    with socket.socket() as taken:
        taken.bind((HERE, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} of {HERE} .*already in use"):
            open_end(port, listens=True)
    with pytest.raises(ConfigError, match=r"port 29501 of 192.0.2.7 .*an address of this host"):
        Connection("192.0.2.7", 29501, listens=True, who="x")


def test_where_the_secret_comes_from(monkeypatch, tmp_path):
    assert read_secret() == b"a secret of the tests"
    monkeypatch.setenv("SIPIPE_SECRET", "short")
    with pytest.raises(ConfigError, match="SIPIPE_SECRET has 5 characters: use 16 or more"):
        read_secret()
    monkeypatch.delenv("SIPIPE_SECRET")
    with pytest.raises(ConfigError, match="several hosts need a secret: set SIPIPE_SECRET or"):
        read_secret()
    path = tmp_path / "secret"
    monkeypatch.setenv("SIPIPE_SECRET_FILE", str(path))
    with pytest.raises(ConfigError, match=r"SIPIPE_SECRET_FILE: .*secret cannot be read"):
        read_secret()
    path.write_text("a secret in a file\n")
    for mode in (0o640, 0o604):
        path.chmod(mode)
        with pytest.raises(ConfigError, match=f"others can read {path}: chmod 600 {path}$"):
            read_secret()
    path.chmod(0o600)
    assert read_secret() == b"a secret in a file"
    path.write_bytes(bytes(range(100, 132)))
    word = read_secret()
    assert len(word) == 64, "no text: in hexadecimal"
    monkeypatch.setenv("SIPIPE_SECRET", word.decode())  # as Ray takes it to another host
    assert read_secret() == word
    monkeypatch.setitem(os.environ, "SIPIPE_SECRET", os.fsdecode(bytes(range(200, 216))))
    assert read_secret() == bytes(range(200, 216)).hex().encode()


def test_both_ends_make_the_same_keys_and_nothing_of_the_secret_is_in_them():
    keys = private_keys(b"s" * 16)
    assert private_keys(b"s" * 16) == keys
    assert len({*keys, *private_keys(b"t" * 16)}) == 4


def test_an_end_whose_thread_fails_knows_no_peer_and_closes(open_both, monkeypatch):
    told = queue.SimpleQueue()
    listening, connecting = open_both(lost=told.put)
    monkeypatch.setattr(connection, "what_was_seen", lambda *_: 1 // 0)
    connecting.close()
    assert "ZeroDivisionError" in str(told.get(timeout=BOUND))
    with pytest.raises(PeerDiedError):
        listening.receive(BOUND)
    listening.close()


def test_nothing_stays_open(open_both):
    before = set(os.listdir("/proc/self/fd"))
    for end in open_both():
        end.close()
    assert set(os.listdir("/proc/self/fd")) <= before
