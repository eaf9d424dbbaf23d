"""`sipipe serve` ends when it is told to, whatever its server does, and says how it ended."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import psutil
import pytest

from sipipe.errors import ConfigError
from sipipe.ipc import last_word, sockets
from sipipe.ipc.sockets import PREFIX, free_path, own_sockets, remove_dead

SCRIPT = Path(__file__).with_name("supervised.py")


@pytest.fixture
def tmp_path():
    """Short, as the paths of sockets are."""
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        yield Path(path)


@pytest.fixture
def supervised(tmp_path, monkeypatch):
    started = []
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("VLLM_RPC_BASE_PATH", raising=False)

    def start(name, *options, before=None):
        def prepare():
            # A shell that runs the tests in the background has its children ignore some of them.
            for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
                signal.signal(number, signal.SIG_DFL)
            if before is not None:
                before()

        process = subprocess.Popen(
            [sys.executable, str(SCRIPT), name, str(tmp_path / "marker"), *options],
            preexec_fn=prepare,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        server = server_of(process)
        started.append((process, server))
        return process, server

    yield start
    for process, server in started:
        process.kill()
        with contextlib.suppress(ProcessLookupError):  # it would hold the pipes read below
            os.killpg(server, signal.SIGKILL)
        process.communicate()


def server_of(process):
    word, pid = process.stdout.readline().split()
    assert word == "up"
    return int(pid)


def is_gone(pid):
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(20)
    return not psutil.pid_exists(pid)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_that_does_not_end_is_killed(supervised, number):
    process, server = supervised("ignores")
    process.send_signal(number)
    # SIGINT ends Python's stand-in by itself, as an interrupted program.
    assert process.wait(20) in (128 + number, 1)
    assert is_gone(server)


def test_a_server_that_is_killed_leaves_no_semaphore(supervised, tmp_path):
    process, server = supervised("has a semaphore")
    name = Path(f"/dev/shm/sem.{(tmp_path / 'marker').read_text().removeprefix('/')}")
    assert name.exists()
    process.terminate()
    assert process.wait(20) == 143
    assert is_gone(server)
    assert not name.exists()


def ignoring(number):
    return lambda: signal.signal(number, signal.SIG_IGN)


def blocking(*numbers):
    return lambda: signal.pthread_sigmask(signal.SIG_BLOCK, numbers)


@pytest.mark.parametrize(
    ("number", "before"),
    [
        *((number, None) for number in (signal.SIGHUP, signal.SIGQUIT)),  # of a closed terminal
        (signal.SIGTERM, blocking(signal.SIGTERM, signal.SIGINT)),
    ],
)
def test_a_signal_reaches_the_server_which_ends_in_good_order(supervised, tmp_path, number, before):
    process, server = supervised("is told", "--patient", before=before)
    process.send_signal(number)
    assert process.wait(20) == 0
    assert (tmp_path / "marker").exists()  # it was not killed
    assert is_gone(server)


def test_the_second_hangup_of_a_closed_terminal_does_not_cut_requests_off(supervised):
    process, _ = supervised("drains")
    for _ in range(20):
        process.send_signal(signal.SIGHUP)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.05)
    assert process.wait(20) == 0


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGQUIT])
def test_what_nohup_ignores_is_ignored(supervised, number):
    process, server = supervised("ends", "--patient", before=ignoring(number))
    process.send_signal(number)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    assert psutil.pid_exists(server)
    process.terminate()
    assert process.wait(20) == 0


def test_a_second_signal_ends_at_once(supervised):
    process, server = supervised("ignores", "--patient")
    process.terminate()
    process.terminate()
    ends = time.monotonic() + 30
    while process.poll() is None and time.monotonic() < ends:  # two at a time may be seen as one
        process.terminate()
    assert process.returncode in (143, -signal.SIGTERM)  # the last one may come after its end
    assert is_gone(server)


@pytest.mark.parametrize(("name", "options"), [("ends", ["--patient"]), ("drains", [])])
def test_a_server_that_ends_when_it_is_told_to_is_a_success(supervised, name, options):
    """Also one whose requests take what its shutdown timeout gives them."""
    process, _ = supervised(name, *options)
    process.terminate()
    assert process.wait(20) == 0


@pytest.mark.parametrize(
    ("name", "options", "before", "status", "last"),
    [
        ("is done", [], None, 1, ""),
        ("helps", ["--restart"], None, 0, ""),
        ("is wrong", [], ignoring(signal.SIGCHLD), 2, ""),
        ("is wrong", ["--restart"], None, 2, ""),
        ("dies", [], None, 128 + signal.SIGABRT, "sipipe: sampler0 keeps dying\n"),
    ],
)
def test_a_server_that_ends_by_itself_is_no_success_and_says_why_last(
    supervised, name, options, before, status, last
):
    process, _ = supervised(name, *options, before=before)
    assert process.wait(20) == status
    assert process.stderr.read().endswith(last)


def test_a_stopped_process_of_a_server_that_ended_is_not_left(supervised):
    process, child = supervised("leaves one")
    assert process.wait(20) == 1
    assert is_gone(child)


def test_a_dead_server_is_started_again(supervised):
    process, first = supervised("comes back", "--restart", "--patient")
    second = server_of(process)
    assert second != first
    process.terminate()
    assert process.wait(20) == 0
    said = process.stderr.read()
    assert "sipipe: the server was killed (SIGABRT)" in said
    assert re.search(r"the server ended by itself after \d+ s \(status 134\)", said)


def test_a_server_whose_engine_failed_is_started_again_with_the_status_of_a_failure(supervised):
    """vLLM's ends with 0 then, as if it had been told to."""
    process, _ = supervised("is done", "--restart")
    server_of(process)
    process.terminate()
    process.wait(20)
    assert re.search(r"ended by itself after \d+ s \(status 1\); it is", process.stderr.read())


def test_a_configuration_that_has_run_is_not_wrong(supervised):
    """What it names may be away for a while."""
    process, _ = supervised("served before", "--restart")
    for _ in range(2):
        server_of(process)
    process.terminate()
    process.wait(20)
    assert "(status 2); it is started again" in process.stderr.read()


def test_it_is_started_again_where_nobody_reads_the_log(supervised):
    process, _ = supervised("comes back", "--restart", "--log", "--patient")
    server_of(process)
    process.terminate()
    assert process.wait(20) == 0


def test_a_server_that_is_started_again_can_start_processes_where_nobody_reads_the_log(supervised):
    process, _ = supervised("starts processes", "--restart", "--no-reader", "--patient")
    server_of(process)
    process.terminate()
    assert process.wait(20) == 0


def test_a_server_that_cannot_be_started_just_then_is_started_later(supervised):
    """As when process ids ran out, which had ended the server before."""
    process, _ = supervised("comes back", "--restart", "--no-room", "--patient")
    server_of(process)
    process.terminate()
    assert process.wait(20) == 0
    said = process.stderr.read()
    assert "the server cannot be started: [Errno 11] Resource temporarily unavailable" in said


def test_an_earlier_engine_of_who_starts_it_is_not_its_reason(supervised, monkeypatch):
    """A notebook that had an engine, and runs `sipipe serve` from a cell."""
    monkeypatch.setenv(last_word.VARIABLE, "")
    monkeypatch.setattr(last_word, "_held", held := {})
    last_word.hold_last_word()
    last_word.leave_last_word("an earlier engine's")
    process, _ = supervised("dies")
    assert process.wait(20)
    assert process.stderr.read().strip() == "sipipe: sampler0 keeps dying"
    for place in held.values():
        os.close(int(place.name))


def test_a_containers_first_process_keeps_no_dead_ones(supervised):
    process, _ = supervised("leaves an orphan", "--restart", "--first", "--patient")
    second = server_of(process)
    assert {child.pid for child in psutil.Process(process.pid).children()} == {second}
    process.terminate()
    assert process.wait(20) == 0


def test_words_that_are_too_long_together_for_one_reach_the_server(tmp_path):
    """Linux takes 128 KiB a word, and a shell had no trouble with these."""
    took = "import json, sys; words, *_ = json.loads(''.join(sys.argv[2:])); sys.exit(len(words))"
    given = (
        "import sys; from sipipe.cli import supervise; "
        f"supervise.SERVER = ('-c', {took!r}); "
        "sys.exit(supervise.supervise([['x' * 100_000, 'ä' * 30_000, '\\udcff'], {}, 0], restart=False))"
    )
    process = subprocess.run(
        [sys.executable, "-c", given],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (process.returncode, process.stderr) == (3, "")


@pytest.mark.parametrize("name", ["ignores", "serves"])
def test_the_server_does_not_outlive_its_supervisor(supervised, tmp_path, name):
    process, server = supervised(name)
    process.kill()
    assert is_gone(server)
    (left,) = tmp_path.glob(f"{PREFIX}*")
    remove_dead()
    assert not left.exists()


def test_a_socket_that_was_left_is_removed_and_no_other(tmp_path):
    path = tmp_path / "socket"
    free_path(str(path))
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    free_path(str(path))
    assert not path.exists()
    with socket.socket(socket.AF_UNIX) as served:
        served.bind(str(path))
        served.listen()
        with pytest.raises(ConfigError, match=r"--uds .*socket: a server listens there"):
            free_path(str(path))
    with pytest.raises(ConfigError, match=r"--uds .*AF_UNIX path too long"):
        free_path("/tmp/" + 200 * "a")


def test_a_server_that_takes_no_more_connections_is_not_waited_for(tmp_path):
    """As one that is stopped, once its backlog is full."""
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX) as served, contextlib.ExitStack() as clients:
        served.bind(path)
        served.listen(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                client = clients.enter_context(socket.socket(socket.AF_UNIX))
                client.setblocking(False)
                client.connect(path)
        with pytest.raises(ConfigError, match=r"--uds .*socket: a server listens there"):
            free_path(path)


def test_directories_of_the_living_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("VLLM_RPC_BASE_PATH", raising=False)
    with own_sockets():
        directory = os.environ["VLLM_RPC_BASE_PATH"]
        remove_dead()
        assert Path(directory).is_dir()
    assert not Path(directory).exists()
    assert "VLLM_RPC_BASE_PATH" not in os.environ


def test_a_directory_whose_maker_was_killed_is_removed(tmp_path, monkeypatch):
    """Between its two names, which takes a moment."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    new, old = (tmp_path / f".{PREFIX}{name}" for name in ("new", "old"))
    for directory in (new, old):
        directory.mkdir()
    then = time.time() - 2 * sockets.MAKING
    os.utime(old, (then, then))
    remove_dead()
    assert list(tmp_path.iterdir()) == [new]


def test_a_long_path_for_temporary_files_has_room_for_no_socket(tmp_path, monkeypatch):
    monkeypatch.delenv("VLLM_RPC_BASE_PATH", raising=False)
    for length in range(40, 80):
        place = tmp_path / ("x" * (length - len(str(tmp_path)) - 1))
        place.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(place))
        with own_sockets(), socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"{os.environ['VLLM_RPC_BASE_PATH']}/{uuid.uuid4()}")


@pytest.fixture
def stranger():
    """A user who is not this one; only root can be another."""
    if os.geteuid():
        pytest.skip("needs root")
    return 12345


def test_what_another_user_made_is_neither_followed_nor_removed(tmp_path, monkeypatch, stranger):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    target = tmp_path / "target"
    target.touch()
    theirs = tmp_path / f"{PREFIX}theirs"
    theirs.mkdir()
    (theirs / "lock").symlink_to(target)
    os.chown(theirs, stranger, stranger)
    ours = tmp_path / f"{PREFIX}ours"  # a lock that is a link: none of ours, whose ever it is
    ours.mkdir()
    (ours / "lock").symlink_to(target)
    (tmp_path / f"{PREFIX}link").symlink_to(tmp_path)
    remove_dead()
    assert theirs.exists()
    assert ours.exists()
    assert target.exists()


FAILS = """
import sys, threading, types
argument = sys.argv.pop()
from sipipe import errors
launch = types.ModuleType("sipipe.engine.start.launch")
def serve(*_, started):
    threading.Thread(target=threading.Event().wait, daemon="Config" in argument).start()
    raise eval(argument, vars(errors))
launch.serve = serve
sys.modules["sipipe.engine.start.launch"] = launch
from sipipe.engine.start import server as front
sys.exit(front.main())
"""


SERVES = """
import json, socket, sys, threading, types
argument = sys.argv.pop()
launch = types.ModuleType("sipipe.engine.start.launch")
listener = socket.create_server(("127.0.0.1", 0))
look_up = socket.getaddrinfo
def looked_up(*asked):
    print(json.dumps(asked))
    return look_up(*listener.getsockname(), type=socket.SOCK_STREAM)
def serve(*_, started):
    socket.getaddrinfo = looked_up
    args = {"host": json.loads(argument), "port": 8000, "uds": None, "model": "m"}
    args |= {"ssl_certfile": None, "served_model_name": None, "shutdown_timeout": 0}
    started(types.SimpleNamespace(**args))
    for thread in threading.enumerate():
        if thread.name == "SiPipeStart":
            thread.join()
    return 0
launch.serve = serve
sys.modules["sipipe.engine.start.launch"] = launch
from sipipe.engine.start import server as front
sys.exit(front.main())
"""


@pytest.mark.parametrize(
    ("host", "asked", "family"),
    [
        (None, "127.0.0.1", socket.AF_INET),
        ("localhost", "localhost", socket.AF_INET),  # which may have both, and vLLM listens on one
        ("::", "::1", socket.AF_INET6),
    ],
)
def test_a_server_is_waited_for_where_vllm_listens(host, asked, family):
    """The look-up is answered with the place where the program above listens."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        done = run_front(SERVES, theirs, 0, json.dumps(host))
        theirs.close()
        assert ours.recv(10) == b"0\n", "seconds that a shutdown may take"
    assert json.loads(done.stdout) == [asked, 8000, family, socket.SOCK_STREAM]
    assert "m is served at http://localhost:8000/v1" in done.stderr
    assert done.returncode == 0


def run_front(program, control, node, argument):
    """Run a program that calls the server's main function on host ``node``, with its end of the control
    socket. The settings name hosts, so that the server does not prepare to fork."""
    arguments = json.dumps([["m"], {"hosts": {}}, node])
    return subprocess.run(
        [sys.executable, "-c", program, str(control.fileno()), arguments, argument],
        pass_fds=[control.fileno()],
        process_group=0,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        ("RuntimeError('no start')", 1, "RuntimeError: no start\n"),
        ("EngineDiedError('killed')", 1, ""),  # the supervisor says why
        ("EngineDiedError('a wrong option', wrong=True)", 2, ""),
        ("ConfigError('a wrong option')", 2, "sipipe: a wrong option\n"),
    ],
)
def test_a_start_that_fails_ends_the_server_whatever_it_leaves_behind(error, status, said):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        done = run_front(FAILS, theirs, 1, error)
    assert done.returncode == status
    assert done.stderr.endswith(said)
    assert ("Traceback" in done.stderr) == error.startswith("RuntimeError")
