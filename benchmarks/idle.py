"""CPU time of an idle server with two stages: SiPipe beside stock vLLM.

    python -m benchmarks.idle [--quick]      # make bench-idle

Each side is a server on loopback that has answered one request. It is left alone for some seconds,
and then for twenty more in which the CPU time of each of its processes is counted.
"""

from __future__ import annotations

import argparse
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
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import psutil

from benchmarks.harness import report
from benchmarks.make_model.checkpoint import make_model

SIDES = {
    "stock vLLM": ["vllm.entrypoints.openai.api_server", "--model"],
    "SiPipe": ["sipipe", "serve"],
}
START_SECONDS = 300.0
ROLES = {
    "stage": r"Worker",
    "scheduler": r"EngineCore",
    "sampler": r"sipipe\.sampler",
    "front end": r"api_server|vllm\S* serve|sipipe serve|engine\.server|APIServer",
}


@contextlib.contextmanager
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
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with contextlib.suppress(ProcessLookupError):
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
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 16, "temperature": 0}
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
        with contextlib.suppress(psutil.NoSuchProcess):
            words = " ".join(process.cmdline())
            role = next((r for r, pattern in ROLES.items() if re.search(pattern, words)), "other")
            times = process.cpu_times()
            found[role] += times.user + times.system
    return found


def main() -> None:
    """Both sides, one after the other."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="five seconds in place of twenty")
    seconds = 5.0 if parser.parse_args().quick else 20.0
    rows = []
    with tempfile.TemporaryDirectory(prefix="sipipe-bench-") as scratch:
        model = make_model("llama", Path(scratch) / "model")
        for side, words in SIDES.items():
            with server([*words, str(model)], Path(scratch) / "log", scratch) as (pid, address):
                complete(address)
                time.sleep(5.0)  # vLLM's readers spin for a second after a message
                before, began = spent(pid), time.monotonic()
                time.sleep(seconds)
                after, wall = spent(pid), time.monotonic() - began
            shares = {role: 100 * (after[role] - before[role]) / wall for role in after}
            rows.append({"server": side, "all processes": sum(shares.values()), **shares})
    report(
        "idle",
        "An idle server with two stages, % of one core",
        rows,
        note=f"over {seconds:.0f} s; CPU time has a resolution of 10 ms",
    )


if __name__ == "__main__":
    main()
