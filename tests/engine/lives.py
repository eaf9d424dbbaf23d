"""Kills one process of an engine's start, at random, and sees what is left.

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
"""After which nothing may be left."""
WHOLE = 600
"""For a start that goes on after a kill, on a busy machine."""
MARK = "SIPIPE_TESTS_START"
SPAWNS = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
OURS = ["--distributed-executor-backend", "sipipe.Executor"]
SMALL = ["--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "4", "--dtype", "float32"]
REPLICAS = ["-pp", "1", "--data-parallel-size", "2"]


@dataclass(frozen=True, kw_only=True)
class Door:
    """A way to start an engine."""

    command: tuple[str, ...]
    """Python's arguments before the model."""
    options: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    cpu_seconds: float
    """That its start takes, about."""
    hosts: int = 1


def _served(*command: str, options=("-pp", "2"), environment=None, **more) -> Door:
    more_options = OURS if VLLM in command else []
    return Door(
        command=("-m", *command, "serve"),
        options=(*options, *SMALL, *more_options),
        environment=tuple((environment or {}).items()),
        **more,
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
    """One command of a door: a host of two, or all."""

    def __init__(self, door: Door, path: Path, log: Path, host: int, port: int, main: int) -> None:
        self.mark = uuid.uuid4().hex
        self.log = log
        self.address = "" if "lives_llm" in door.command[0] else f"http://127.0.0.1:{port}"
        words = [*door.command, str(path), *door.options]
        words += ["--host", "127.0.0.1", "--port", str(port)] if self.address else []
        if door.hosts > 1:
            words += ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(main)]
            words += ["--node-rank", str(host), *(["--headless"] if host else [])]
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
        """What this command has started and runs, whoever is its parent by now."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                marked = f"{MARK}={self.mark}".encode()
                # Not psutil's: a process that has named itself has written over its arguments.
                environment = Path(f"/proc/{process.pid}/environ").read_bytes()
                inherited = marked in environment or os.getsid(process.pid) == self.process.pid
                if inherited and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def is_ready(self) -> bool:
        if self.address:
            return health(self.address) == 200
        return "READY" in self.log.read_text(errors="replace").splitlines()

    def end(self) -> None:
        """As a user ends it."""
        self.process.stdin.close()
        if self.address:
            self.process.terminate()

    def last_line(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""


def cpu_seconds(processes: list[psutil.Process]) -> float:
    total = 0.0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def kind(start: Start, process: psutil.Process) -> str:
    """What a process is, as far as it says."""
    with contextlib.suppress(psutil.Error):
        command = " ".join(process.cmdline())
        if process.pid == start.process.pid:
            return "front end" if "sipipe serve" not in command else "supervisor"
        for word in ("resource_tracker", "sipipe.sampler", "sipipe.worker", "VLLM::[A-Za-z]+"):
            if found := re.search(word, command):
                return found.group()
        if "engine.start.server" in command:
            return "server, or a fork of it"
        return process.name()
    return "ended meanwhile"


REPLACED = "sampler|resource_tracker"
"""What an engine goes on without, or replaces."""
CAUSE = (
    r"stage worker|sampler\d|spare|the engine process|was killed|the process that started|"
    r"main host|host \d|Failed frontend|died|[Rr]esource tracker|EOFError|ended"
)


@dataclass
class Outcome:
    door: str
    victim: str
    moment: float
    """In CPU seconds of the start."""
    seconds: float
    """From the kill, or from the end of a start that went on, until nothing was left."""
    left: list[str]
    went_on: bool
    last: str

    @property
    def good(self) -> bool:
        names_it = self.went_on or self.victim in ("front end", "supervisor")
        return not self.left and (names_it or re.search(CAUSE, self.last) is not None)


def kill_one(name: str, path: Path, folder: Path, rng: random.Random) -> Outcome:
    """Start by a door, kill one process of it at random, and wait for the end."""
    door = DOORS[name]
    port, main = free_port(), free_port()
    starts = [
        Start(door, path, folder / f"log{host}", host, port + 0 * host, main)
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
    moment = rng.uniform(0, DOORS[name].cpu_seconds)
    while True:
        running = [(start, process) for start in starts for process in start.everybody()]
        spent = cpu_seconds([process for _, process in running])
        if spent >= moment or starts[0].is_ready() or starts[0].process.poll() is not None:
            break
        time.sleep(0.1)
    of, victim = rng.choice([pair for pair in running if pair[1].is_running()])
    what = kind(of, victim)
    with contextlib.suppress(psutil.Error):
        victim.kill()
    began = time.monotonic()
    went_on = False
    if re.search(REPLACED, what) or len(starts) > 1:
        # An engine may go on without it, and another host waits for this one: they are ended.
        while not went_on and starts[0].process.poll() is None:
            went_on = starts[0].is_ready()
            waits = len(starts) > 1 and time.monotonic() - began > SECONDS
            assert time.monotonic() - began < WHOLE, "it neither ended nor became ready"
            if waits:
                assert not of.everybody() or of.process.poll() is None, kinds(of)
                went_on = True
            time.sleep(0.2)
        if went_on or len(starts) > 1:
            for start in starts:
                with contextlib.suppress(ProcessLookupError):
                    start.end()
            began = time.monotonic()
    deadline = began + SECONDS
    while (left := [p for s in starts for p in s.everybody()]) and time.monotonic() < deadline:
        starts[0].process.poll()
        gone(left, min(0.5, max(0.0, deadline - time.monotonic())))
    return Outcome(
        door=name,
        victim=what,
        moment=spent,
        seconds=time.monotonic() - began,
        left=[kind(of, process) for process in left],
        went_on=went_on,
        last=of.last_line(),
    )


def kinds(start: Start) -> list[str]:
    return [kind(start, process) for process in start.everybody()]


def main() -> None:
    count, seed = int(sys.argv[1]), int([*sys.argv, "0"][2])
    doors = sys.argv[3:] or list(DOORS)
    path = model(Path(tempfile.gettempdir()) / f"lives-{os.getuid()}")
    bad = 0
    for number in range(count):
        rng = random.Random(f"{seed} {number}")
        with tempfile.TemporaryDirectory() as folder:
            outcome = kill_one(doors[number % len(doors)], path, Path(folder), rng)
            bad += not outcome.good
            word = "good" if outcome.good else "BAD"
            print(f"{number} {word} {vars(outcome)}", flush=True)
            if not outcome.good:
                for log in Path(folder).iterdir():
                    print(log.read_text(errors="replace")[-6000:], flush=True)
    print(f"{count} kills, {bad} bad", flush=True)


if __name__ == "__main__":
    main()
