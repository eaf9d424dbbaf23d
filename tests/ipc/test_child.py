"""A child that is forked has what a new interpreter would have, and nothing else that is open."""

import json
import os
import signal
import subprocess
import sys

import psutil
import pytest

from sipipe.ipc.child import import_path

PROGRAM = """
import atexit, json, os, signal, socket, sys
from sipipe.ipc.child import start_child

sys.path.insert(0, DIRECTORY)
kept, read = socket.socketpair(), open(DIRECTORY + "/child.py")
signal.signal(signal.SIGTERM, lambda *_: None)
atexit.register(lambda: open(DIRECTORY + "/ours", "w"))
ours, theirs = socket.socketpair()
began = []
process, control = start_child(
    ("-m", "child"), ["word"], ends=[theirs], begin=lambda: began.append(os.getpid()),
    env={"ONLY": "this"},
)
assert not began and process.poll() is None
print(process.pid, flush=True)
said = json.loads(ours.recv(4096))
ours.send(b"go on")
assert process.wait(20) == 3 and process.returncode == 3
assert control.recv(1) == b"", "its end is closed"
print(json.dumps(said), flush=True)
sys.stdin.read()
process, control = start_child(("-m", "child"), ends=[kept[0]], begin=lambda: None, env={})
print(process.pid, flush=True)
signal.pause()
"""
CHILD = """
import atexit, json, os, signal, socket, sys
from sipipe.ipc.parent import Parent

parent = Parent(int(sys.argv[1]))
end = socket.socket(fileno=int(sys.argv[2]))
opened = {}
for number in os.listdir("/proc/self/fd"):
    try:
        opened[number] = os.readlink(f"/proc/self/fd/{number}")
    except OSError:
        pass
atexit.register(lambda: open(os.path.dirname(__file__) + "/its", "w"))
said = [sys.argv[3:], dict(os.environ), opened, __name__, sys.stdin.read()]
end.send(json.dumps(said).encode())
end.recv(5)
parent.let_end()
sys.exit(3)
"""


def test_what_a_forked_child_has(tmp_path):
    (tmp_path / "child.py").write_text(CHILD)
    program = f"DIRECTORY = {str(tmp_path)!r}\n{PROGRAM}"
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            first = int(process.stdout.readline())
            words, environment, opened, name, standard_input = json.loads(process.stdout.readline())
            assert (words, environment, name) == (["word"], {"ONLY": "this"}, "__main__")
            assert standard_input == ""
            sockets = [number for number, what in opened.items() if what.startswith("socket:")]
            assert len(sockets) == 2, "its control socket, and the end that it was given"
            assert not any(what.endswith("child.py") for what in opened.values())
            assert not psutil.pid_exists(first)
            assert (tmp_path / "its").exists(), "what it was to do at its end is done"
            assert not (tmp_path / "ours").exists(), "that of its parent is not"
            process.stdin.close()
            second = psutil.Process(int(process.stdout.readline()))
            os.kill(process.pid, signal.SIGKILL)  # the kernel closes its end of the control socket
            second.wait(20)
        finally:
            process.kill()


DETACHED = """
import os, sys
from pathlib import Path

from sipipe.ipc.child import start_child
from sipipe.ipc.exit_now import exit_now

process, control = start_child(
    ("-m", "named"),
    [sys.argv[1]],
    begin=(lambda: None) if sys.argv[2:] else None,
    env={**os.environ, "PYTHONPATH": sys.argv[1]},
)
word = control.recv(10)
status = process.wait(20)
Path(sys.argv[1], "parent").write_text(f"{control.fileno() > 2} {word} {status}")
exit_now(4)
"""
NAMED = """
import os, socket, sys
from pathlib import Path

socket.socket(fileno=int(sys.argv[1])).send(b"word")
print("into nothing", flush=True)
print("into nothing", file=sys.stderr, flush=True)
files = [os.readlink(f"/proc/self/fd/{number}") for number in range(3)]
Path(sys.argv[2], "child").write_text(" ".join(files))
"""


@pytest.mark.parametrize("closed", [(1,), (2,), (0, 1), (0, 1, 2)])
@pytest.mark.parametrize("forked", [False, True])
def test_a_process_that_was_started_without_standard_streams(tmp_path, closed, forked):
    """Nobody prints into a control socket, and the status of the end is the one that was said."""
    (tmp_path / "named.py").write_text(NAMED)
    redirections = [f"{number}>&-" for number in closed]
    words = [sys.executable, "-c", DETACHED, str(tmp_path), *(["forked"] * forked)]
    shell = ["sh", "-c", f'exec "$@" {" ".join(redirections)}', "sh", *words]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run(shell, env=environment, capture_output=True, timeout=60, check=False)
    assert (tmp_path / "parent").read_text() == "True b'word' 0", done.stderr
    assert done.returncode == 4
    files = (tmp_path / "child").read_text().split()
    assert all(files[number] == os.devnull for number in closed)


def test_children_import_from_where_their_starter_does_also_when_its_directory_is_gone(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(sys, "path", ["", "/a", "/b c"])
    monkeypatch.chdir(tmp_path)
    assert import_path() == f"{tmp_path}{os.pathsep}/a{os.pathsep}/b c"
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert import_path() == f"/a{os.pathsep}/b c"
