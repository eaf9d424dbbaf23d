"""Served tokens and CPU time a token of this tree beside those of an earlier commit.

    python -m benchmarks.before COMMIT MODEL [MODEL ...] [--pp 1,2] [--dtype auto] [--engines 2]

The commit's tree is unpacked into ``build/bench/before``. An engine of each tree is started, the one
and then the other, and both stay and answer in turn the same loads: 1, 8, 64 and 256 requests at once,
greedy and top-p. The next pair starts in the other order. CPU time is that of the whole machine while a
load is answered.

Why both stay: an engine that is measured as soon as it serves still has its spare sampler compiling
beside it, and a machine whose speed drifts within minutes favours a side.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import statistics
import subprocess
import tarfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import in_turn
from benchmarks.harness import BUILD, report
from benchmarks.sources import ROOT

REQUESTS, TOKENS, REPEAT = (1, 8, 64, 256), 32, 3
WAYS = ("greedy", "top-p")
CORES = os.cpu_count() or 1


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("commit")
    parser.add_argument("model", nargs="+", type=Path)
    parser.add_argument("--pp", default="1,2", help="stages, a list (default: 1,2)")
    parser.add_argument("--dtype", default="auto", help="without AVX-512 and AMX: float32")
    parser.add_argument("--engines", type=int, default=2, help="of each row and side (default: 2)")
    args = parser.parse_args()
    before = _unpacked(args.commit)
    rows: list[dict[str, Any]] = []
    for model in args.model:
        for stages in args.pp.split(","):
            argv = [str(model.resolve()), "-pp", stages, "--dtype", args.dtype]
            argv += ["--max-model-len", "2048", "--gpu-memory-utilization", "0.25"]
            found = defaultdict(list)
            for pair in range(args.engines):
                for side, engine in _pair(before, argv, backwards=pair % 2 == 1).items():
                    found[side].append(engine)
            rows += _rows(model.name, int(stages), found)
    report(
        "before",
        f"Tokens/s and CPU time a token, {args.commit} and this tree",
        rows,
        note=f"SiPipe on both sides, {args.dtype}, compiled; {TOKENS} new tokens; {REPEAT} times an engine, "
        "of two that stay and answer in turn; medians of all engines' times, ratios of those side by side",
    )


def _unpacked(commit: str) -> Path:
    folder = (BUILD / "before").resolve()
    shutil.rmtree(folder, ignore_errors=True)
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True)
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        tar.extractall(folder, filter="data")
    return folder


def _pair(before: Path, argv: list[str], *, backwards: bool) -> dict[str, dict[str, Any]]:
    job = {
        "argv": argv,
        "settings": {},
        "sampling": WAYS,
        "requests": REQUESTS,
        "prompt_tokens": 16,
        "tokens": TOKENS,
        "repeat": REPEAT,
    }
    here = (before / "benchmarks" / "in_turn.py").exists()
    places = filter(None, [os.environ.get("PYTHONPATH")])  # such as vLLM's
    env = {"PYTHONPATH": os.pathsep.join([str(before), str(before / "src"), *places])}
    sides = sorted(("before", "now"), reverse=backwards)
    return in_turn.measured_in_turn(
        dict.fromkeys(sides, job),
        elsewhere={"before": (in_turn.MODULE if here else "sipipe.tools.measure", env)},
    )


def _rows(
    model: str, stages: int, found: Mapping[str, list[dict[str, Any]]]
) -> list[dict[str, Any]]:
    rows = []
    for way in WAYS:
        for count in REQUESTS:
            load = f"{way}, {count} at once"
            speeds = {
                side: [speed for engine in engines for speed in engine["tokens_per_second"][load]]
                for side, engines in found.items()
            }
            spent = {
                side: [ms for engine in engines for ms in _cpu_ms(engine, load, count)]
                for side, engines in found.items()
            }
            row = {"model": model, "stages": stages, "sampling": way, "requests": count}
            row |= {f"{side} tok/s": statistics.median(speeds[side]) for side in ("before", "now")}
            row |= _ratios("ratio", speeds)
            row |= {f"{side}, CPU ms a token": statistics.median(spent[side]) for side in spent}
            rows.append(row | _ratios("CPU ratio", spent))
    starts = {
        f"{side} tok/s": ", ".join(f"{engine['startup_seconds']:.0f} s" for engine in engines)
        for side, engines in found.items()
    }
    lead = {"model": model, "stages": stages, "sampling": "(start)", "requests": None}
    return [*rows, lead | starts]


def _ratios(name: str, figures: Mapping[str, list[float]]) -> dict[str, Any]:
    """Of this tree's figures to those of before that were taken beside them."""
    each = [now / then for now, then in zip(figures["now"], figures["before"], strict=True)]
    return {name: statistics.median(each), f"{name}s": f"{min(each):.2f} to {max(each):.2f}"}


def _cpu_ms(engine: Mapping[str, Any], load: str, count: int) -> list[float]:
    return [
        busy * CORES * (ended - began) / 1e6 / (count * TOKENS)
        for busy, (began, ended) in zip(engine["busy"][load], engine["spans"][load], strict=True)
    ]


if __name__ == "__main__":
    main()
