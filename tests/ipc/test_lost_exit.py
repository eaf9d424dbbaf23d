"""A process that is told to end while Python throws away what is raised."""

import subprocess
import sys

import pytest

WAYS = {
    "a child of the engine": """
from sipipe.ipc.parent import Parent
ours, theirs = socket.socketpair()
parent = Parent(theirs.detach())
""",
    "a command that is interrupted": """
from sipipe.ipc.lost_exit import ask_again_for_lost_exits
ask_again_for_lost_exits()
signal.SIGTERM = signal.SIGINT
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.excepthook = lambda *_: os._exit(0)
""",
    "a server": """
from sipipe.ipc.lost_exit import ask_again_for_lost_exits
ask_again_for_lost_exits()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
""",
}


def ended(setup: str, body: str) -> subprocess.CompletedProcess:
    program = f"import os, signal, socket, sys, time\n{setup}\n{body}"
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("setup", WAYS.values(), ids=WAYS)
def test_an_end_that_was_lost_is_asked_for_again(setup):
    body = """
class Part:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        sum(range(1000))  # the handler runs amid this

Part()
try:
    time.sleep(30)
finally:
    print("cleaned up", flush=True)
"""
    process = ended(setup, body)
    assert process.returncode == 0, process.stderr
    assert process.stdout == "cleaned up\n"
    assert process.stderr == ""


def test_what_else_is_lost_is_said_as_before():
    body = """
class Part:
    def __del__(self):
        raise ValueError("a fault")

Part()
"""
    process = ended(WAYS["a server"], body)
    assert process.returncode == 0
    assert "ValueError: a fault" in process.stderr
