"""Served tokens and CPU time a token of this tree beside those of an earlier commit.

    python -m benchmarks.before COMMIT MODEL [MODEL ...] [--pp 1,2] [--dtype auto] [--engines 2]

The commit's tree is unpacked into ``build/bench/before``. Engines of the two trees are started in
turn, each in a process of its own, and answer the same loads: 1, 8, 64 and 256 requests at once,
greedy and top-p. CPU time is that of the whole machine while a load is answered.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import subprocess
import tarfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.harness import BUILD, report
from benchmarks.sources import ROOT
from sipipe.tools.child import measured

REQUESTS, TOKENS = (1, 8, 64, 256), 32
WAYS = ("greedy", "top-p")
CORES = os.cpu_count() or 1
PLACES = tuple(filter(None, [os.environ.get("PYTHONPATH")]))
"""Such as vLLM's."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("commit")
    parser.add_argument("model", nargs="+", type=Path)
    parser.add_argument("--pp", default="1,2", help="stages, a list (default: 1,2)")
    parser.add_argument("--dtype", default="auto", help="without AVX-512 and AMX: float32")
    parser.add_argument("--engines", type=int, default=2, help="of each row and side (default: 2)")
    args = parser.parse_args()
    trees = {"before": _unpacked(args.commit), "now": ROOT}
    rows: list[dict[str, Any]] = []
    for model in args.model:
        for stages in args.pp.split(","):
            argv = [str(model.resolve()), "-pp", stages, "--dtype", args.dtype]
            argv += ["--max-model-len", "2048", "--gpu-memory-utilization", "0.4"]
            found = defaultdict(list)
            for turn in range(args.engines):
                # Back and forth, so that a machine whose speed drifts favours no side.
                for side in sorted(trees, reverse=turn % 2 == 1):
                    found[side].append(_measured(side, trees[side], argv))
            rows += _rows(model.name, int(stages), found)
    report(
        "before",
        f"Tokens/s and CPU time a token, {args.commit} and this tree",
        rows,
        note=f"SiPipe on both sides, {args.dtype}, compiled; {TOKENS} new tokens; all engines' figures, "
        "ratio of the quickest; CPU ms: of all cores, of the engine that spent least",
    )


def _unpacked(commit: str) -> Path:
    folder = (BUILD / "before").resolve()
    shutil.rmtree(folder, ignore_errors=True)
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True)
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        tar.extractall(folder, filter="data")
    return folder


def _measured(side: str, tree: Path, argv: list[str]) -> dict[str, Any]:
    job = {
        "argv": argv,
        "settings": {},
        "sampling": WAYS,
        "requests": REQUESTS,
        "prompt_tokens": 16,
        "tokens": TOKENS,
        "repeat": 1,
    }
    here = (tree / "benchmarks" / "measure.py").exists()
    # Its processes find it from now on, as :func:`benchmarks.harness.of_the_checkout` has it.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(tree), str(tree / "src"), *PLACES])
    return measured(side, job, "benchmarks.measure" if here else "sipipe.tools.measure")


def _rows(model: str, stages: int, found: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    rows = []
    for way in WAYS:
        for count in REQUESTS:
            row: dict[str, Any] = {"model": model, "stages": stages, "sampling": way}
            row["requests"], load = count, f"{way}, {count} at once"
            best = {}
            for side, engines in found.items():
                speeds = [engine["tokens_per_second"][load][0] for engine in engines]
                best[side] = max(speeds)
                row[f"{side} tok/s"] = ", ".join(f"{speed:.0f}" for speed in speeds)
            row["ratio"] = best["now"] / best["before"]
            for side, engines in found.items():
                row[f"{side}, CPU ms a token"] = min(_cpu_ms(e, load, count) for e in engines)
            rows.append(row)
    starts = {
        f"{side} tok/s": ", ".join(f"{engine['startup_seconds']:.0f} s" for engine in engines)
        for side, engines in found.items()
    }
    lead = {"model": model, "stages": stages, "sampling": "(start)", "requests": None}
    return [*rows, lead | starts | {"ratio": None}]


def _cpu_ms(engine: dict[str, Any], load: str, count: int) -> float:
    busy, (began, ended) = engine["busy"][load][0], engine["spans"][load][0]
    return float(busy * CORES * (ended - began) / 1e6 / (count * TOKENS))


if __name__ == "__main__":
    main()
