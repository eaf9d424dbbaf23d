"""From the command to the first token: both serve commands and ``LLM(...)`` with SiPipe and without.

    python -m benchmarks.start [--quick] [--pp 1,2] [--repeat 3]      # make bench-start

Each start is a server, or a script with an engine, of its own. The first of a side and degree is cold:
its caches of compiled code are empty. The sides take turns, forwards and then backwards. A phase ends
when the last process has said so in the log, or when the server answers; its seconds are those since the
one before. CPU seconds are of all processes, also those that have ended, and memory (proportional set
size) of those that live, once the first token is there.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any

import psutil

from benchmarks.first_token import SAID
from benchmarks.harness import MODELS, report, served_dtype, spread
from benchmarks.make_model.checkpoint import make_model
from sipipe.cores import equal_shares, this_machine

OURS = ["--distributed-executor-backend", "sipipe.Executor"]
SIDES = {
    "stock": ["vllm.entrypoints.cli.main", "serve"],
    "sipipe serve": ["sipipe", "serve"],
    "vllm serve, SiPipe": ["vllm.entrypoints.cli.main", "serve"],
    "LLM, stock": ["benchmarks.first_token"],
    "LLM, SiPipe": ["benchmarks.first_token"],
}
"""Module and command of each side. What ends with SiPipe is told to have SiPipe's executor."""
PHASES = {
    "server": r"Initializing a V1 LLM engine|EngineCore.* (INFO|WARNING)",
    "engine": r"\(Worker.* (INFO|WARNING)",
    "load": r"Model loading took",
    "warm up": r"Warming up done",
    "KV cache": r"init engine \(profile",
}
"""What ends each phase; then come the server's first answer and the first token."""


START_SECONDS = 300.0
ROLES = {
    "stage": r"Worker",
    "scheduler": r"EngineCore",
    "sampler": r"sipipe\.sampler",
    "front end": r"api_server|vllm\S* serve|sipipe serve|engine\.server|APIServer|first_token",
}


@contextmanager
def server(
    words: list[str],
    log: Path,
    scratch: str,
    *,
    stages: int = 2,
    more: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[tuple[int, str]]:
    """Process id and address of a running server; all its processes are gone afterwards. ``more``:
    of its environment."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    options = ["-pp", str(stages), "--max-model-len", "512"]
    options += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "tiny"]
    environment = {
        "VLLM_CPU_OMP_THREADS_BIND": "0|1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_RPC_BASE_PATH": scratch,
        **os.environ,
        **more,
    }
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", *words, *options],
            env=environment,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        while not answers(f"{address}/health"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{words[0]} did not start:\n{first_error(log)}")
            time.sleep(0.1)
        yield process.pid, address
    finally:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def library(words: list[str], log: Path, *, stages: int, more: Mapping[str, str]) -> Iterator[int]:
    """Process id of a script with an engine that has given its first answer; all its processes are
    gone afterwards. ``more``: of its environment."""
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", *words, "-pp", str(stages)],
            env={**os.environ, **more},
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        while SAID not in log.read_text(errors="replace"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{words[0]} did not start:\n{first_error(log)}")
            time.sleep(0.1)
        yield process.pid
    finally:
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=30)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def first_error(log: Path) -> str:
    """What went wrong first, or how the log ends."""
    text = log.read_text()
    found = re.search(r"\w+(Error|Exception): .*", text)
    return found.group() if found else text[-2000:]


def answers(url: str) -> bool:
    """Whether ``url`` is served."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def complete(address: str) -> None:
    """One request."""
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 1, "temperature": 0}
    request = urllib.request.Request(
        f"{address}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        answer.read()


def spent(pid: int) -> dict[str, float]:
    """CPU seconds so far, by role."""
    root = psutil.Process(pid)
    found = dict.fromkeys([*ROLES, "other"], 0.0)
    for process in (root, *root.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            words = " ".join(process.cmdline())
            role = next((r for r, pattern in ROLES.items() if re.search(pattern, words)), "other")
            times = process.cpu_times()
            ended = times.children_user + times.children_system  # such as compilers
            found[role] += times.user + times.system + ended
    return found


@contextmanager
def stamped(log: Path) -> Iterator[dict[str, float]]:
    """When the last process to say so ended each phase, since now."""
    began, seen, ended = time.monotonic(), {}, threading.Event()

    def watch() -> None:
        read = 0
        while not ended.wait(0.05):
            with suppress(OSError):
                text = log.read_text(errors="replace")
                for phase, pattern in PHASES.items():
                    if re.search(pattern, text[read:]):
                        # The first to begin, the last to end: a stage may be later than another.
                        if phase in ("server", "engine") and phase in seen:
                            continue
                        seen[phase] = time.monotonic() - began
                read = text.rfind("\n") + 1

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        ended.set()
        thread.join()


def started(side: str, stages: int, model: Path, caches: Path) -> dict[str, float]:
    """Seconds of one start's phases, CPU seconds by process and MiB."""
    cores = equal_shares(this_machine(), stages)
    environment = {"VLLM_CACHE_ROOT": str(caches / "vllm"), "SIPIPE_CACHE_DIR": str(caches)}
    environment |= {"TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor")}
    # Stock vLLM would bind nothing well on a machine with one NUMA node; SiPipe plans its own.
    environment |= {"VLLM_CPU_OMP_THREADS_BIND": cores if side.endswith("stock") else "auto"}
    environment |= {"VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "4")}
    words = [*SIDES[side], str(model), "--dtype", served_dtype()]
    words += OURS if side.endswith("SiPipe") else []
    log = caches / f"{side} {time.time():.0f}.log"
    began = time.monotonic()
    with stamped(log) as seen, tempfile.TemporaryDirectory() as scratch, ExitStack() as running:
        if side.startswith("LLM"):
            pid = running.enter_context(library(words, log, stages=stages, more=environment))
        else:
            pid, address = running.enter_context(
                server(words, log, scratch, stages=stages, more=environment)
            )
            seen["answers"] = time.monotonic() - began
            complete(address)
        seen["first token"] = time.monotonic() - began
        used = {f"{role} CPU s": seconds for role, seconds in spent(pid).items() if seconds}
        whole = psutil.Process(pid)
        memory = sum(p.memory_full_info().pss for p in (whole, *whole.children(recursive=True)))
    phases, before = {}, 0.0
    for phase in (*PHASES, "answers", "first token"):
        if phase in seen:
            phases[phase], before = seen[phase] - before, max(before, seen[phase])
    total = sum(seconds for name, seconds in used.items())
    return {"total": before, **phases, "CPU s": total, **used, "MiB": memory / 2**20}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="two stages, one warm start a side")
    parser.add_argument("--pp", help="stages, a list (default: 1,2)")
    parser.add_argument("--repeat", type=int, help="warm starts a side (default: 3)")
    parser.add_argument("--sides", default=",".join(map(str, range(len(SIDES)))), help="a list")
    args = parser.parse_args()
    model = make_model("llama", MODELS / "llama-bench", size="bench")
    sides = [list(SIDES)[int(number)] for number in args.sides.split(",")]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="sipipe-bench-") as scratch:
        for stages in map(int, (args.pp or ("2" if args.quick else "1,2")).split(",")):
            found: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
            for number in range(1 + (args.repeat or (1 if args.quick else 3))):
                for side in sides[:: -1 if number % 2 else 1]:
                    # Without spaces: compilers are called with this path.
                    caches = Path(scratch) / f"{list(SIDES).index(side)}-{stages}"
                    caches.mkdir(exist_ok=True)
                    found[side].append(started(side, stages, model, caches))
            for side, starts in found.items():
                for name, ones in (("cold", starts[:1]), ("warm", starts[1:])):
                    keys = dict.fromkeys(key for one in ones for key in one)
                    middle: dict[str, Any] = {
                        key: median(one.get(key, 0.0) for one in ones) for key in keys
                    }
                    if len(ones) > 1:
                        middle["total"] = spread([one["total"] for one in ones])
                    rows.append({"stages": stages, "side": side, "caches": name} | middle)
    keys = dict.fromkeys(key for row in rows for key in row)
    report(
        "start",
        f"Seconds from the command to the first token, llama bench, {served_dtype()}, compiled",
        [{key: row.get(key) for key in keys} for row in rows],
        note="warm: medians, of the total with its range; one KV cache size for all; CPU seconds and MiB "
        "of all processes",
    )


if __name__ == "__main__":
    main()
