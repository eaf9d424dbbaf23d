"""Served tokens and CPU time a token of this tree beside those of an earlier commit.

    python -m benchmarks.before COMMIT MODEL [MODEL ...] [--pp 1,2] [--dtype auto] [--engines 2]

The commit's tree is unpacked into ``build/bench/before``. An engine of each is started, the one and
then the other; both stay, and answer each load in turn: 1, 8, 64 and 256 requests at once, greedy and
chat. The next pair starts in the other order. CPU time is that of the engine's processes.

Why both stay: a machine whose speed drifts within a minute favours a side, and an engine that is
measured as soon as it serves has its spare sampler compiling beside it.
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

from benchmarks.harness import BUILD, report
from benchmarks.in_turn import measured_in_turn
from benchmarks.sources import ROOT
from sipipe.tools.load import SAMPLING

TOKENS = {1: 96, 8: 48, 64: 24, 256: 12}
"""New tokens of each request, by how many there are at once."""

LOADS = [(way, count, tokens) for way in ("greedy", "chat") for count, tokens in TOKENS.items()]
REPEAT = 3
SIDES = ("before", "now")


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
        for stages in map(int, args.pp.split(",")):
            engine = {
                "model": str(model.resolve()),
                "pipeline_parallel_size": stages,
                "dtype": args.dtype,
                "max_model_len": 2048,
                "gpu_memory_utilization": 0.25,
            }
            found = defaultdict(list)
            for pair in range(args.engines):
                for side, answered in _pair(before, engine, backwards=pair % 2 == 1).items():
                    found[side].append(answered)
            rows += _rows(model.name, stages, found)
    report(
        "before",
        f"Tokens/s and CPU time a token, {args.commit} and this tree",
        rows,
        note=f"SiPipe on both sides, {args.dtype}, compiled; {args.engines} engines a side, {REPEAT} times "
        "each, of two that stay and answer in turn; medians, and those of the ratios side by side",
        file=f"before-{'-'.join(model.name for model in args.model)}".lower(),
    )


def _unpacked(commit: str) -> Path:
    folder = (BUILD / "before").resolve()
    shutil.rmtree(folder, ignore_errors=True)
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True)
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        tar.extractall(folder, filter="data")
    return folder


def _pair(before: Path, engine: dict[str, Any], *, backwards: bool) -> dict[str, Any]:
    job = {"engine": engine, "loads": LOADS, "sampling": SAMPLING, "repeat": REPEAT}
    places = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]  # such as vLLM's
    return measured_in_turn(
        dict.fromkeys(sorted(SIDES, reverse=backwards), job),
        "benchmarks.before_engine",
        {"before": {"PYTHONPATH": os.pathsep.join([str(before / "src"), *places])}},
    )


def _rows(
    model: str, stages: int, found: Mapping[str, list[dict[str, Any]]]
) -> list[dict[str, Any]]:
    lead = {"model": model, "stages": stages}
    rows = []
    for load, (way, count, _) in enumerate(LOADS):
        speeds, spent = (
            {
                side: [time for answered in found[side] for time in answered[of][load]]
                for side in SIDES
            }
            for of in ("speeds", "cpu")
        )
        row: dict[str, Any] = lead | {"sampling": way, "requests": count}
        row |= {f"{side} tok/s": statistics.median(speeds[side]) for side in SIDES}
        row |= _ratios("ratio", speeds)
        row |= {f"{side} CPU ms": statistics.median(spent[side]) for side in SIDES}
        rows.append(row | _ratios("CPU ratio", spent))
    starts = {
        f"{side} tok/s": ", ".join(f"{answered['start']:.0f} s" for answered in found[side])
        for side in SIDES
    }
    return [*rows, lead | {"sampling": "(start)", "requests": None} | starts]


def _ratios(name: str, figures: Mapping[str, list[float]]) -> dict[str, Any]:
    """Of this tree's figures to those of before that were taken beside them."""
    each = [now / then for now, then in zip(figures["now"], figures["before"], strict=True)]
    return {name: statistics.median(each), f"{name}s": f"{min(each):.2f}-{max(each):.2f}"}


if __name__ == "__main__":
    main()
