"""Kill of one process of an engine's start, at random, and a look at what is left.

The moment is drawn in CPU seconds of all processes of the start, so that it means the same on a busy
machine. ``python -m tests.engine.lives COUNT [SEED [DOOR ...]]`` prints a line for each kill.
"""

import contextlib
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import psutil
from tests.engine.engines import HERE, engine_environment, gone, model
from tests.engine.servers import VLLM, health
from tests.ipc.link.conftest import free_port

SECONDS = 20
"""Time after the end of an engine, in seconds, in which all of its processes have to end."""

START_SECONDS = 600
"""Bound on a start that goes on after a kill, on a busy machine."""

MARK = "SIPIPE_TESTS_START"
"""Variable that the processes of a start have in their environment, with its mark."""

SPAWNS = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
OURS = ["--distributed-executor-backend", "sipipe.Executor"]
SMALL = ["--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "4", "--dtype", "float32"]
REPLICAS = ["-pp", "1", "--data-parallel-size", "2"]


@dataclass(frozen=True, kw_only=True)
class Door:
    """A way to start an engine."""

    command: tuple[str, ...]
    """Arguments of Python's, before the model."""
    options: tuple[str, ...] = ()
    """Arguments behind the model."""
    environment: tuple[tuple[str, str], ...] = ()
    """More variables of the environment, with their values."""
    cpu_seconds: float
    """CPU seconds that its start takes, about."""
    hosts: int = 1
    """Number of hosts, each of which is a command."""


def _served(module: str, *, cpu_seconds, options=("-pp", "2"), environment=None, hosts=1) -> Door:
    """The door of a server by the command of ``module``."""
    executor = OURS if module == VLLM else []
    return Door(
        command=("-m", module, "serve"),
        options=(*options, *SMALL, *executor),
        environment=tuple((environment or {}).items()),
        cpu_seconds=cpu_seconds,
        hosts=hosts,
    )


DOORS = {
    "sipipe serve": _served("sipipe", cpu_seconds=22),
    "sipipe serve, spawned": _served("sipipe", environment=SPAWNS, cpu_seconds=50),
    "vllm serve": _served(VLLM, cpu_seconds=24),
    "vllm serve, spawned": _served(VLLM, environment=SPAWNS, cpu_seconds=50),
    "LLM, forked": Door(command=(str(HERE / "lives_llm.py"),), cpu_seconds=35),
    "LLM, spawned": Door(
        command=(str(HERE / "lives_llm.py"),), environment=tuple(SPAWNS.items()), cpu_seconds=50
    ),
    "replicas, sipipe serve": _served("sipipe", options=REPLICAS, cpu_seconds=45),
    "replicas, vllm serve": _served(VLLM, options=REPLICAS, cpu_seconds=45),
    "two hosts": _served("sipipe", hosts=2, cpu_seconds=35),
}


class Start:
    """One command of a door: one of two hosts, or all of an engine."""

    def __init__(
        self, door: Door, path: Path, log: Path, host: int, port: int, main_port: int
    ) -> None:
        self.mark = uuid.uuid4().hex
        self.log = log
        is_server = "lives_llm" not in door.command[0]
        self.address = f"http://127.0.0.1:{port}" if is_server else ""
        words = [*door.command, str(path), *door.options]
        if is_server:
            words += ["--host", "127.0.0.1", "--port", str(port)]
        if door.hosts > 1:
            words += ["--nnodes", "2", "--node-rank", str(host)]
            words += ["--master-addr", "127.0.0.1", "--master-port", str(main_port)]
        if host > 0:
            words.append("--headless")
        environment = {**engine_environment(), **dict(door.environment), MARK: self.mark}
        environment["SIPIPE_SECRET"] = "a secret of sixteen characters"
        with log.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, *words],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def everybody(self) -> list[psutil.Process]:
        """The processes that this command has started and that run, whoever is their parent by now."""
        mark = f"{MARK}={self.mark}".encode()
        processes = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                # psutil reads no environment of a process that has named itself, as the name is
                # written over it in part.
                environment = Path(f"/proc/{process.pid}/environ").read_bytes()
                is_of_start = mark in environment or os.getsid(process.pid) == self.process.pid
                if is_of_start and process.status() != psutil.STATUS_ZOMBIE:
                    processes.append(process)
        return processes

    def is_ready(self) -> bool:
        """True if requests can be sent to the engine."""
        if self.address:
            return health(self.address) == 200
        return "READY" in self.log.read_text(errors="replace").splitlines()

    def end(self) -> None:
        """End the command as a user does."""
        self.process.stdin.close()
        if self.address:
            self.process.terminate()

    def last_line(self) -> str:
        """The last line of the log; empty if there is none."""
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""


def cpu_seconds(processes: list[psutil.Process]) -> float:
    """CPU seconds that the processes have used together."""
    total = 0.0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def kind(start: Start, process: psutil.Process) -> str:
    """The kind of a process, as far as its command line says."""
    with contextlib.suppress(psutil.Error):
        command = " ".join(process.cmdline())
        if process.pid == start.process.pid:
            return "front end" if "sipipe serve" not in command else "supervisor"
        for word in ("resource_tracker", "sipipe.sampler", "sipipe.worker", "VLLM::[A-Za-z]+"):
            match = re.search(word, command)
            if match is not None:
                return match.group()
        if "engine.start.server" in command:
            return "server, or a fork of it"
        return process.name()
    return "ended meanwhile"


REPLACED = "sampler|resource_tracker"
"""Kinds of processes that an engine goes on without, or replaces."""

CAUSE = (
    r"stage worker|sampler\d|spare|the engine process|was killed|the process that started|"
    r"main host|host \d|Failed frontend|died|[Rr]esource tracker|EOFError|ended"
)
"""Pattern of the last line of an engine that ends for a process that was killed."""


@dataclass
class Outcome:
    """The outcome of one kill."""

    door: str
    victim: str
    """Kind of the process that was killed."""
    moment: float
    """Moment of the kill, in CPU seconds of the start."""
    seconds: float
    """Seconds from the kill, or from the end of a start that went on, until nothing was left."""
    left: list[str]
    """Kinds of the processes that were left after :data:`SECONDS`."""
    went_on: bool
    """True if the start went on after the kill, and was ended as a user ends it."""
    last: str
    """Last line of the log of the victim's command."""

    @property
    def good(self) -> bool:
        """True if nothing is left, and the last line names the cause where somebody could write it."""
        if self.left:
            return False
        if self.went_on or self.victim in ("front end", "supervisor"):
            return True
        return re.search(CAUSE, self.last) is not None


def kill_one(name: str, path: Path, folder: Path, rng: random.Random) -> Outcome:
    """Start by a door, kill one process of it at random, and wait for the end."""
    door = DOORS[name]
    port = free_port()
    main_port = free_port()
    starts = [
        Start(door, path, folder / f"log{host}", host, port, main_port)
        for host in range(door.hosts)
    ]
    try:
        return _kill_one(name, starts, rng)
    finally:
        for start in starts:
            for process in start.everybody():
                with contextlib.suppress(psutil.Error):
                    process.kill()
            start.process.wait()
            if not start.process.stdin.closed:
                start.process.stdin.close()


def _kill_one(name: str, starts: list[Start], rng: random.Random) -> Outcome:
    running, moment = _wait_for_moment(starts, rng.uniform(0, DOORS[name].cpu_seconds))
    start, victim = rng.choice([pair for pair in running if pair[1].is_running()])
    victim_kind = kind(start, victim)
    with contextlib.suppress(psutil.Error):
        victim.kill()
    began = time.monotonic()
    went_on = False
    # An engine may go on without such a process, and another host waits for this one: a user ends
    # them.
    if re.search(REPLACED, victim_kind) or len(starts) > 1:
        went_on = _wait_for_end_or_start(starts, start)
    if went_on or len(starts) > 1:
        for each_start in starts:
            with contextlib.suppress(ProcessLookupError):
                each_start.end()
        began = time.monotonic()
    left = _wait_for_all_ends(starts, began + SECONDS)
    return Outcome(
        door=name,
        victim=victim_kind,
        moment=moment,
        seconds=time.monotonic() - began,
        left=[kind(start, process) for process in left],
        went_on=went_on,
        last=start.last_line(),
    )


def _running(starts: list[Start]) -> list[tuple[Start, psutil.Process]]:
    """All processes of the commands, each with its command."""
    return [(start, process) for start in starts for process in start.everybody()]


def _wait_for_moment(
    starts: list[Start], moment: float
) -> tuple[list[tuple[Start, psutil.Process]], float]:
    """Wait until the processes have used ``moment`` CPU seconds, or the start is over. Returns the
    processes, each with its command, and the CPU seconds that they have used."""
    while True:
        running = _running(starts)
        spent = cpu_seconds([process for _, process in running])
        if spent >= moment or starts[0].is_ready() or starts[0].process.poll() is not None:
            return running, spent
        time.sleep(0.1)


def _wait_for_end_or_start(starts: list[Start], hit: Start) -> bool:
    """Wait until the first command has ended or is ready. Returns True if it goes on: it is ready, or
    waits for another host, whose command ``hit`` must have ended with all of its processes."""
    began = time.monotonic()
    while starts[0].process.poll() is None:
        if starts[0].is_ready():
            return True
        waited = time.monotonic() - began
        assert waited < START_SECONDS, "it neither ended nor became ready"
        if len(starts) > 1 and waited > SECONDS:
            assert not hit.everybody() or hit.process.poll() is None, kinds(hit)
            return True
        time.sleep(0.2)
    return False


def _wait_for_all_ends(starts: list[Start], deadline: float) -> list[psutil.Process]:
    """The processes that are left at ``deadline``, in monotonic seconds; none as soon as all ended."""
    left = [process for _, process in _running(starts)]
    while left and time.monotonic() < deadline:
        starts[0].process.poll()
        gone(left, min(0.5, max(0.0, deadline - time.monotonic())))
        left = [process for _, process in _running(starts)]
    return left


def kinds(start: Start) -> list[str]:
    """The kinds of all processes of a command."""
    return [kind(start, process) for process in start.everybody()]


def main() -> None:
    """Kill as many processes as the first argument says, and print a line for each."""
    count = int(sys.argv[1])
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    doors = sys.argv[3:] or list(DOORS)
    path = model(Path(tempfile.gettempdir()) / f"lives-{os.getuid()}")
    bad = 0
    for number in range(count):
        rng = random.Random(f"{seed} {number}")
        with tempfile.TemporaryDirectory() as folder:
            outcome = kill_one(doors[number % len(doors)], path, Path(folder), rng)
            word = "good" if outcome.good else "BAD"
            print(f"{number} {word} {vars(outcome)}", flush=True)
            if not outcome.good:
                bad += 1
                for log in Path(folder).iterdir():
                    print(log.read_text(errors="replace")[-6000:], flush=True)
    print(f"{count} kills, {bad} bad", flush=True)


if __name__ == "__main__":
    main()
