"""Every wait has a bound or a reason, and tests/waits.md shows them all."""

import runpy
from pathlib import Path

import pytest

WAITS = runpy.run_path(str(Path(__file__).parents[1] / "scripts" / "waits.py"))
SAMPLE = Path("sample.py")


def found(text):
    return WAITS["waits"](SAMPLE, text)


def test_every_wait_says_what_bounds_it():
    assert not [f"{w.where}:{w.line}: {w.call}" for w in WAITS["everything"]() if not w.bound]


def test_the_table_is_the_code():
    page = WAITS["PAGE"].read_text()
    assert page == WAITS["written"](page), "run `make waits`"


@pytest.mark.parametrize(
    "call",
    [
        "lock = threading.Lock()",
        "self._changed.wait()",
        "self._changed.wait_for(lambda: done, seconds)",
        "queue.get()",
        "data = sock.recv(1024)",
        "socket.recv_fds(sock, 1, 1)",
        "sock.sendall(data)",
        "poller.poll(left)",
        "select.select([a], [], [], seconds)",
        "fcntl.flock(file, fcntl.LOCK_EX)",
        "fcntl.fcntl(fd, _SETLKW, lock)",
        "thread.join()",
        "thread.join(timeout=left)",
        "process.wait()",
        "future.result(timeout)",
        "signal.sigwaitinfo(numbers)",
        "while True:\n    time.sleep(0.05)",
        "zmq_socket.recv_multipart()",
        "os.read(descriptor, 1)",
    ],
)
def test_a_wait_that_says_nothing_is_found(call):
    assert [wait.bound for wait in found(call)] == [""]


@pytest.mark.parametrize(
    "call",
    [
        'names = ", ".join(names)',
        "os.path.join(a, b)",
        "value = mapping.get(key)",
        "process.poll() is None",
        "sock.recv(64, socket.MSG_DONTWAIT)",
        "fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "condition = threading.Condition(self._lock)",
    ],
)
def test_what_does_not_wait_is_none(call):
    assert not found(call)


def test_where_a_wait_says_it():
    text = """
class A:
    def f(self):
        # wait: 5 s;
        # the peer
        self.thread.join()
        thread.join(5.0)
        sock.recv(1)  # wait: none: it is there
        process.wait(
            left,  # wait: the rest; its end
        )
"""
    assert [(w.where, w.bound, w.woken) for w in found(text)] == [
        ("sample.py:A.f", "5 s", "the peer"),
        ("sample.py:A.f", "5 s", "the thread's end"),
        ("sample.py:A.f", "none: it is there", ""),
        ("sample.py:A.f", "the rest", "its end"),
    ]


def test_a_comment_beside_no_wait_is_refused():
    with pytest.raises(SystemExit, match="beside nothing"):
        found("value = 1  # wait: none")
