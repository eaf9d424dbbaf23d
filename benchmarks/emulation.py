"""Idle time of the stages of emulated pipelines, with p + 1 microbatches in flight.

    python -m benchmarks.emulation [--quick] [--tokens 120] [--only NAME]

An engine a profile, ``sipipe emulate`` with a dense model and a sparse one in 4 and 8 stages, 128
and 512 requests. Where two cores cannot drive stages of 7 ms, the same in slow motion as well: the
devices take N times as long, everything else what it takes. What SiPipe costs on cores of its own
follows from the turnaround, which is in real time: while it is shorter than a stage's time, the
microbatch more hides it.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from typing import Any

from benchmarks.harness import report
from sipipe.cli.emulate import BUSY
from sipipe.errors import SiPipeError

PIPELINES = (
    ("deepseek-v2.5-8xh100", 4, 1),
    ("llama-70b-8xh100", 4, 1),
    ("llama-70b-8xh100", 4, 2),
    ("deepseek-v2.5-8xh100", 8, 1),
    ("llama-70b-8xh100", 8, 2),
)
"""Profile, stages, how many times as long devices take."""
ALL_IN_FLIGHT = '{"sipipe": {"microbatches": {"min_sequences": 1}}}'
"""Not only as many microbatches as pay."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="the first two, and 40 tokens")
    parser.add_argument("--tokens", type=int, default=120, help="new ones (default: 120)")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="profiles whose options contain it"
    )
    args = parser.parse_args()
    tokens = 40 if args.quick else args.tokens
    rows: list[dict[str, Any]] = []
    for profile, stages, slow in PIPELINES[: 2 if args.quick else None]:
        if args.only in f"{profile} --pp {stages} --slow-motion {slow}":
            rows += measured(profile, stages, slow, tokens)
    report(
        "emulation",
        "Emulated pipelines of 8 H100, all p + 1 microbatches in flight, while all requests decode",
        rows,
        note="greedy; one engine a profile; turnaround: real ms from a microbatch's end on the last "
        "stage to the dispatch of its next turn; VOID: the machine was too busy to emulate",
    )


def measured(profile: str, stages: int, slow: float, tokens: int) -> list[dict[str, Any]]:
    """A row for each load of one engine."""
    options = f"--profile {profile} --pp {stages} --slow-motion {slow} --requests 128,512"
    options += f" --prompt-tokens 32 --tokens {tokens} --json"
    command = [*shlex.split(options), "--additional-config", ALL_IN_FLIGHT]
    run = subprocess.run(
        [sys.executable, "-m", "sipipe", "emulate", *command], stdout=subprocess.PIPE, check=False
    )
    if not run.stdout:
        raise SiPipeError(f"sipipe emulate {shlex.join(command)} failed")
    result = json.loads(run.stdout)
    cores = result["machine"]["cores"]
    return [
        {
            "profile": f"{profile} --pp {stages}",
            "requests": requests,
            "slow motion": f"{slow} ×" if slow > 1 else "no",
            "sequences an iteration": round(load["batch"]),
            "iterations/s": load["iterations_per_s"],
            "turnaround p50 / p99 ms": "{p50:.1f} / {p99:.1f}".format(**load["turnaround_ms"]),
            "stages busy, %": ", ".join(f"{100 * share:.0f}" for share in load["busy_share"]),
            "idle share of the busiest, %": round(100 * (1 - max(load["busy_share"])), 1),
            "this machine's cores busy, %": round(100 * load["busy"]),
            "iterations a core-second": load["iterations_per_s"] / (load["busy"] * cores),
            "": "VOID" if load["busy"] > BUSY else "valid",
        }
        for requests, load in zip(result["job"]["requests"], result["loads"], strict=True)
    ]


if __name__ == "__main__":
    try:
        main()
    except SiPipeError as error:
        sys.exit(str(error))
