"""From the command to the first token: `sipipe serve` and `vllm serve` with SiPipe beside stock vLLM.

    python -m benchmarks.start [--quick] [--pp 1,2] [--repeat 3]      # make bench-start

Each start is a server of its own. The first of a side and degree is cold: its caches of compiled
code are empty. The sides take turns. A phase ends when its line first comes in the server's log, or
when the server answers; a phase's seconds are those since the one before. CPU seconds and memory
(proportional set size) are of all processes, once the first token is there.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from benchmarks.harness import report
from benchmarks.idle import complete, server, spent
from benchmarks.make_model.checkpoint import make_model
from benchmarks.serving import MODELS
from sipipe.cores import equal_shares, this_machine

OURS = ["--distributed-executor-backend", "sipipe.Executor"]
SIDES = {
    "stock": ["vllm.entrypoints.cli.main", "serve"],
    "sipipe serve": ["sipipe", "serve"],
    "vllm serve, SiPipe": ["vllm.entrypoints.cli.main", "serve"],
}
PHASES = {
    "server": r"Initializing a V1 LLM engine|EngineCore.* (INFO|WARNING)",
    "engine": r"\(Worker.* (INFO|WARNING)",
    "load": r"Model loading took",
    "warm up": r"Warming up done",
    "KV cache": r"init engine \(profile",
}
"""What ends each phase; then come the server's first answer and the first token."""


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
    environment |= {"VLLM_CPU_OMP_THREADS_BIND": cores if side == "stock" else "auto"}
    environment |= {"VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "4")}
    words = [*SIDES[side], str(model), *(OURS if side.startswith("vllm") else [])]
    log = caches / f"{side} {time.time():.0f}.log"
    began = time.monotonic()
    with (
        stamped(log) as seen,
        tempfile.TemporaryDirectory() as scratch,
        server(words, log, scratch, stages=stages, more=environment) as (pid, address),
    ):
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
            for _ in range(1 + (args.repeat or (1 if args.quick else 3))):
                for side in sides:
                    # Without spaces: compilers are called with this path.
                    caches = Path(scratch) / f"{list(SIDES).index(side)}-{stages}"
                    caches.mkdir(exist_ok=True)
                    found[side].append(started(side, stages, model, caches))
            for side, starts in found.items():
                for name, ones in (("cold", starts[:1]), ("warm", starts[1:])):
                    keys = dict.fromkeys(key for one in ones for key in one)
                    middle = {key: median(one.get(key, 0.0) for one in ones) for key in keys}
                    rows.append({"stages": stages, "side": side, "caches": name} | middle)
    keys = dict.fromkeys(key for row in rows for key in row)
    report(
        "start",
        "Seconds from the command to the first token, llama bench, bf16, compiled",
        [{key: row.get(key) for key in keys} for row in rows],
        note="warm: medians; one KV cache size for all; CPU seconds and MiB of all processes",
    )


if __name__ == "__main__":
    main()
