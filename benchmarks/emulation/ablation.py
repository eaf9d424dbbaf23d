"""The paper's techniques one by one, where the device is fast: emulated stages leave the CPUs free.

    python -m benchmarks.emulate --ablate [TEXT] [--minutes 9] [--engines 2]

First a pipeline like vLLM's as the paper has it: tokens drawn on the last stage's device, inputs
prepared when the pass before has run, hidden states that are described, p microbatches in flight.
Then a technique more a row, and from SiPipe each taken away. What is code is taken away
(:mod:`benchmarks.ablation`, settings). What a GPU pays without it is put in: the low ends of the
paper's ranges. So a figure says what hiding such a cost is worth in a real control plane, not how
large the cost is today. Rows differ by nothing else: layers, scheduler and load are SiPipe's.

The vLLM-like one has SiPipe's slots too, and nothing that is scheduled ahead. A "- ahead" would be
"+ p + 1" again: what it loses is the inverse of "+ ahead". "+ p + 1" also has as many open as pay,
which "- p + 1" keeps: it is SiPipe with ``--inflight`` p. What vLLM has today stands beside it: the
vLLM-like pipeline, scheduled before the tokens have come.

``--engines`` a cell, about 30 seconds each, in rounds; ``TEXT``: only those whose pipeline and name
contain it. What was measured at the same commit is not measured again, unless the machine was too busy,
so that the same command goes on where it ended; the table has the pipelines that are complete.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.ablation import extension
from benchmarks.emulate import emulated
from benchmarks.emulation.profile import StockCosts
from benchmarks.harness import BUILD, ROUNDS, number, report, spread
from sipipe.tools.provenance import machine

STOCK = StockCosts(last_stage=0.22, preparation=0.12, stall=1.4e-3)
"""The low ends of 22 to 40 %, 12 to 19 % and 1.4 to 2.6 ms."""
PIPELINES = tuple(
    (f"{model}-8xh100", p, slow)
    for model, p, slow in (("llama-70b", 2, 2), ("deepseek-v2.5", 4, 2), ("mixtral-8x7b", 8, 8))
)
"""Profile, stages, slow motion: as much as two cores need."""
WAITED = 2.0
"""Threads of the engine that wait for a core, on average, above which devices are late: what two
cores that are 77 % busy make wait (M/M/2)."""
DEVICE = {"cpu_sampling": "per_row"}
FREE = {"microbatches": {"min_sequences": 0}}
"""As many open as pay, as SiPipe is served."""
AHEAD = "Ahead"
"""Scheduling before the tokens have come."""
ENGINES: dict[str, tuple[bool, dict[str, Any], list[str]]] = {
    "vLLM-like": (False, DEVICE, ["Posting", "Overlap", AHEAD]),
    "+ CPU sampling": (False, {}, ["Posting", "Overlap", AHEAD]),
    "+ TSEM": (False, {}, ["Posting", AHEAD]),
    "+ SAT": (False, {}, [AHEAD]),
    "+ p + 1": (True, {}, [AHEAD]),
    "+ ahead": (True, {}, []),
    "- CPU sampling": (True, DEVICE, []),
    "- TSEM": (True, {}, ["Overlap"]),
    "- SAT": (True, {}, ["Posting"]),
    "- p + 1": (False, FREE, []),
    "vLLM-like, ahead": (False, DEVICE, ["Posting", "Overlap"]),
}
"""Whether p + 1 are in flight; settings; parts that are taken away."""
CHAIN = list(ENGINES)[:6]
LOAD = "--requests 512 --prompt-tokens 32 --tokens 40 --sampling temperature"
"""As many requests as the paper's on 8 GPUs, shorter ones."""


def ablate(argv: Sequence[str]) -> int:
    """0: the table has every pipeline."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.emulate --ablate")
    parser.add_argument("text", nargs="*", default=[], help="of the pipeline's and engine's names")
    parser.add_argument("--minutes", type=float, default=9, help="begin no engine after (9)")
    parser.add_argument("--engines", type=int, default=2, help="of each cell (default: 2)")
    args = parser.parse_args(argv)
    # A campaign's own place is of its machine and its versions, too.
    folder = Path(os.environ.get(ROUNDS, BUILD)) / "emulation-ablation"
    folder.mkdir(parents=True, exist_ok=True)
    commit = machine()["commit"] or "+"
    end = time.monotonic() + 60 * args.minutes
    left = 0
    void = 0
    found: dict[tuple[str, int, int], dict[str, list[dict[str, Any]]]] = {}
    rounds = range(args.engines)
    for turn, pipeline, engine in itertools.product(rounds, PIPELINES, ENGINES):
        name = f"{_title(*pipeline)} {engine}"
        path = folder / f"{name} {turn}.json"
        known = json.loads(path.read_text()) if path.exists() else {}
        # With changed files (+) nobody knows of what code a figure is.
        if known.get("commit") != commit or commit.endswith("+"):
            if not all(text in name for text in args.text):
                continue
            if time.monotonic() > end:
                left += 1
                continue
            known = {"commit": commit} | measure(*pipeline, engine)
            print(f"{name}: {known['tokens_per_s']:,.0f} tokens/s, {known['waited']:.2f} waited")
            if known["waited"] > WAITED:
                print(f"VOID: {WAITED} threads or more waited for a core: devices are late")
                void += 1
                continue
            path.write_text(json.dumps(known))
        found.setdefault(pipeline, {}).setdefault(engine, []).append(known)
    if left:
        print(f"{args.minutes:g} minutes are over: {left} engines are left, run it again for them")
    rows = [
        _row(of, engines)
        for of, engines in found.items()
        if [len(each) for each in engines.values()] == [args.engines] * len(ENGINES)
    ]
    if not rows:
        print("emulate: --ablate: no pipeline is complete")
        return 1
    mean = {"pipeline": "geometric mean"}
    rows.append(mean | {name: _mean(rows, name) for name in rows[0] if name[0] in "+-S"})
    report(
        "emulation",
        "The paper's techniques on emulated H100, tokens/s while all requests decode",
        rows,
        note="vLLM-like: sampling and projection 22 % of the last stage, preparation 12 % of a pass, in "
        "its way, 1.4 ms of stall a hop (the paper's low ends), p in flight; +: of the column before; "
        "SiPipe: of vLLM-like; -: without it, of SiPipe; ahead: scheduled before the tokens have come; "
        "SiPipe, of one ahead: of the vLLM-like one that "
        f"is scheduled ahead; 512 requests, temperature; {args.engines} engines a cell, medians and ranges; "
        "slow motion N: devices take N times as long, tokens/s times N",
        file="emulation-ablation",
        columns=[name for name in rows[0] if name != "stages"],
    )
    return 1 if left or void else 0


def of(engine: str, p: int) -> tuple[list[str], dict[str, Any]]:
    """Options and settings of one of :data:`ENGINES` with ``p`` stages."""
    more, settings, without = ENGINES[engine]
    # All p are open as in vLLM, unless the engine is SiPipe's but for p.
    opened = FREE if more else {"microbatches": {"min_sequences": 1}}
    parts = [part for part in without if part != AHEAD]
    words = ["--no-async-scheduling"] * (AHEAD in without) + extension(parts)
    return words, {"inflight": p + more} | opened | settings


def _title(profile: str, p: int, slow: int) -> str:
    return f"{profile} --pp {p}" + (f" --slow-motion {slow}" if slow > 1 else "")


def measure(profile: str, p: int, slow: int, engine: str) -> dict[str, Any]:
    """Figures of the load on ``p`` stages of an emulated ``profile``, slowed down ``slow`` times."""
    argv = f"--profile {profile} --pp {p} --slow-motion {slow} {LOAD}".split()
    words, settings = of(engine, p)
    load = emulated([*argv, *words], settings, STOCK)[1]["loads"][0]
    return {
        "tokens_per_s": slow * load["tokens_per_s"],
        "waited": load["waited"],
        "busy_share": load["busy_share"],
    }


def _row(pipeline: tuple[str, int, int], found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    speeds = {engine: [one["tokens_per_s"] for one in each] for engine, each in found.items()}

    def over(engine: str, other: str) -> dict[str, float | int]:
        """Ratios of the engines of the same rounds."""
        pairs = zip(speeds[engine], speeds[other], strict=True)
        return spread([round(mine / theirs, 2) for mine, theirs in pairs])

    sipipe = CHAIN[-1]
    row: dict[str, Any] = {"pipeline": _title(*pipeline), "stages": pipeline[1]}
    row["vLLM-like tok/s"] = spread([float(round(speed)) for speed in speeds[CHAIN[0]]])
    for before, engine in itertools.pairwise(CHAIN):
        row[engine] = over(engine, before)
    row["SiPipe"] = over(sipipe, CHAIN[0])
    for engine in list(ENGINES)[len(CHAIN) :]:
        if engine.startswith("-"):
            row[engine] = over(engine, sipipe)
    row["SiPipe, of one ahead"] = over(sipipe, "vLLM-like, ahead")
    busiest = [100 * max(one["busy_share"]) for one in found[sipipe]]
    row["SiPipe's busiest stage, % busy"] = spread([round(share, 1) for share in busiest])
    every = [one for each in found.values() for one in each]
    row["threads that waited for a core"] = max(one["waited"] for one in every)
    return row


def _mean(rows: Sequence[dict[str, Any]], name: str) -> float:
    logarithms = [math.log(number(row[name])) for row in rows]
    return round(math.exp(sum(logarithms) / len(rows)), 2)
