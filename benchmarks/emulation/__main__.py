"""Idle time that SiPipe causes to the stages of emulated pipelines, and what it depends on.

    python -m benchmarks.emulation [--quick] [--tokens 60] [--only TEXT]

An engine a row of :data:`PIPELINES` (twelve minutes in all), with as many microbatches in flight as may
be: a dense model and a sparse one in 2, 4 and 8 stages; in 4 with tokens drawn on the last stage's
device; one sampler for all parameters. Where two cores cannot drive stages of 7 ms, in
slow motion: the devices take N times as long, everything else what it takes. What SiPipe costs on
cores of its own follows from the turnaround, which is in real time: while it is shorter than a
stage's time, the microbatch more hides it.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections import defaultdict
from typing import Any

import msgspec
import numpy as np

from benchmarks.emulate import BUSY, emulated
from benchmarks.emulation.profile import Profile
from benchmarks.harness import VOID, report
from sipipe.errors import SiPipeError

SPARSE, DENSE = "deepseek-v2.5-8xh100", "llama-70b-8xh100"
PIPELINES = (
    (f"{SPARSE} --pp 4 --slow-motion 2", "128,512"),
    (f"{DENSE} --pp 4 --slow-motion 3", "128,512"),
    (f"{SPARSE} --pp 8 --slow-motion 4", "128,512"),
    (f"{DENSE} --pp 8 --slow-motion 4", "128,512"),
    (f"{SPARSE} --pp 2", "128,512"),
    (f"{DENSE} --pp 2 --slow-motion 2", "128,512"),
    (f"{DENSE} --pp 4 --slow-motion 3 --draws device", "128,512"),
    (f"{SPARSE} --pp 4 --slow-motion 2 --sampling all --samplers 1", "512"),
)
"""Profile with options, and requests at once: each number is a load of the same engine."""
PROMPT = 32
ALL_IN_FLIGHT = '{"sipipe": {"microbatches": {"min_sequences": 1}}}'
"""Not only as many microbatches as pay."""


def main() -> int:
    """0: no row is void."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="the first two, and 40 tokens")
    parser.add_argument("--tokens", type=int, default=60, help="new ones (default: 60)")
    parser.add_argument("--only", default="", metavar="TEXT", help="pipelines that contain it")
    args = parser.parse_args()
    tokens = 40 if args.quick else args.tokens
    rows: list[dict[str, Any]] = []
    for pipeline, requests in PIPELINES[: 2 if args.quick else None]:
        if args.only in pipeline:
            rows += measured(pipeline, requests, tokens)
    if not rows:
        raise SiPipeError(f'--only: no pipeline contains "{args.only}"')
    for name, on_device in (("emulation", False), ("emulation-device", True)):
        if shown := [row for row in rows if ("--draws device" in row["pipeline"]) == on_device]:
            _report(name, shown)
    return 1 if any(row[""] == VOID for row in rows) else 0


def _report(name: str, rows: list[dict[str, Any]]) -> None:
    report(
        "emulation",
        "Emulated pipelines of 8 H100 while all requests decode, p + 1 microbatches in flight "
        "unless --inflight says otherwise",
        rows,
        note="greedy unless --sampling says otherwise; one engine a pipeline; idle by SiPipe: of "
        "each stage 1 - busy / (its stage time / the busiest stage's, by the profile); turnaround: "
        "real ms from a microbatch's end on the last stage to the dispatch of its next turn; VOID: "
        "the machine was too busy to emulate",
        file=name,
    )


def measured(pipeline: str, requests: str, tokens: int) -> list[dict[str, Any]]:
    """A row for each load of one engine."""
    result = figures(f"--profile {pipeline} --requests {requests}", tokens)
    profile = msgspec.convert(result["profile"], Profile)
    rows = []
    for count, load in zip(result["job"]["requests"], result["loads"], strict=True):
        idle = idle_by_sipipe(profile, load, PROMPT + tokens // 2)
        rows.append(
            {
                "pipeline": pipeline,
                "requests": count,
                "sequences an iteration": float(round(load["batch"])),
                "iterations/s": load["iterations_per_s"],
                "turnaround p50 / p99 ms": [
                    round(load["turnaround_ms"][part], 1) for part in ("p50", "p99")
                ],
                "stages busy, %": [round(100 * share) for share in load["busy_share"]],
                "idle by SiPipe, %": [round(100 * share, 1) for share in idle],
                "worst stage, %": round(100 * max(idle), 1),
                "CPU ms an iteration": cpu_by_role(load["cpu_ms"]),
                "this machine's cores busy, %": round(100 * load["busy"]),
                "iterations a core-second": load["iterations_per_s"]
                / (load["busy"] * result["machine"]["cores"]),
                "": VOID if load["busy"] > BUSY else "valid",
            }
        )
    return rows


def figures(options: str, tokens: int) -> dict[str, Any]:
    """Of :func:`benchmarks.emulate.emulated`, with as many microbatches in flight as may be."""
    options += f" --prompt-tokens {PROMPT} --tokens {tokens}"
    return emulated([*shlex.split(options), "--additional-config", ALL_IN_FLIGHT])[1]


def idle_by_sipipe(profile: Profile, load: dict[str, Any], context: int) -> list[float]:
    """Of each stage the idle share beyond what the profile's own stage times force.

    All stages run the same iterations, so that one with less work is idle for the rest of the
    busiest one's time whatever drives it. ``context``: tokens of each sequence.
    """
    batch = round(load["batch"])
    decoding = np.full(batch, context), np.ones(batch)
    times = [stage.seconds(*decoding) for stage in profile.stages]
    times[-1] += profile.stages[-1].projection(batch)
    shares = zip(load["busy_share"], times, strict=True)
    return [max(0.0, 1 - busy * max(times) / seconds) for busy, seconds in shares]


def cpu_by_role(by_process: dict[str, float]) -> str:
    """As in "executor 2.5, stage 1.1-1.4, sampler 1.5"."""
    roles = defaultdict(list)
    for process, spent in by_process.items():
        roles[process.split()[0]].append(f"{spent:.1f}")
    return ", ".join(
        f"{role} {min(spent, key=float)}"
        + (f"-{max(spent, key=float)}" if len(set(spent)) > 1 else "")
        for role, spent in roles.items()
    )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SiPipeError as error:
        sys.exit(str(error))
