"""The paper's techniques one by one, where the device is fast: emulated stages leave the CPUs free.

    python -m benchmarks.emulate --ablate [TEXT] [--minutes 9]

First a pipeline like vLLM's as the paper has it: tokens drawn on the last stage's device, inputs
prepared when the pass before has run, hidden states that are described, p microbatches in flight.
Then a technique more a row, and from SiPipe each taken away. What is code is taken away
(:mod:`benchmarks.ablation`, settings). What a GPU pays without it is put in: the low ends of the
paper's ranges. So a figure says what hiding such a cost is worth in a real control plane, not how
large the cost is today. Rows differ by nothing else: layers, scheduler and load are SiPipe's.

The vLLM-like one has SiPipe's slots too, and nothing that is scheduled ahead. So "- slots" has no
"+" beside it; its scheduler, vLLM's, is never ahead here, so beside it stands "+ p + 1", not SiPipe.
A "- ahead" would be "+ p + 1" again: what it loses is the inverse of "+ ahead". "+ p + 1" also has as
many open as pay, which "- p + 1" keeps: it is SiPipe with ``--inflight`` p.

An engine a figure, about 30 seconds each; ``TEXT``: only those whose pipeline and name contain it.
What was measured of the same code is not measured again, unless the machine was too busy, so that
the same command goes on where it ended; the table has the pipelines that are complete.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.ablation import extension
from benchmarks.emulate import emulated
from benchmarks.emulation.profile import StockCosts
from benchmarks.harness import BUILD, report
from benchmarks.sources import sources

STOCK = StockCosts(last_stage=0.22, preparation=0.12, stall=1.4e-3)
"""The low ends of 22 to 40 %, 12 to 19 % and 1.4 to 2.6 ms."""
PIPELINES = tuple(
    (f"{model}-8xh100", p, slow)
    for model, slow_motion in (
        ("deepseek-v2.5", (1, 2, 4)),
        ("llama-70b", (2, 2, 4)),
        ("mixtral-8x7b", (2, 4, 8)),
    )
    for p, slow in zip((2, 4, 8), slow_motion, strict=True)
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
    "- slots": (True, {"scheduler": "vllm"}, []),
}
"""Whether p + 1 are in flight; settings; parts that are taken away."""
CHAIN = list(ENGINES)[:6]
LOAD = "--requests 512 --prompt-tokens 32 --tokens 40 --sampling temperature"
"""As many requests as the paper's on 8 GPUs, shorter ones."""


def ablate(argv: Sequence[str]) -> int:
    """0: there is a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.emulate --ablate")
    parser.add_argument("text", nargs="*", default=[], help="of the pipeline's and engine's names")
    parser.add_argument("--minutes", type=float, default=9, help="begin no engine after (9)")
    args = parser.parse_args(argv)
    folder = BUILD / "emulation-ablation"
    folder.mkdir(parents=True, exist_ok=True)
    code, end, left = sources("emulation-ablation"), time.monotonic() + 60 * args.minutes, 0
    found: dict[tuple[str, int, int], dict[str, Any]] = {}
    for pipeline, engine in itertools.product(PIPELINES, ENGINES):
        name = f"{_title(*pipeline)} {engine}"
        path = folder / f"{name}.json"
        known = json.loads(path.read_text()) if path.exists() else {}
        if known.get("code") != code:
            if not all(text in name for text in args.text):
                continue
            if time.monotonic() > end:
                left += 1
                continue
            known = {"code": code} | _measured(*pipeline, engine)
            print(f"{name}: {known['tokens_per_s']:,.0f} tokens/s, {known['waited']:.2f} waited")
            if known["waited"] > WAITED:
                print(f"VOID: {WAITED} threads or more waited for a core: devices are late")
                continue
            path.write_text(json.dumps(known))
        found.setdefault(pipeline, {})[engine] = known
    if left:
        print(f"{args.minutes:g} minutes are over: {left} engines are left, run it again for them")
    rows = [_row(of, engines) for of, engines in found.items() if len(engines) == len(ENGINES)]
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
        "slots: vLLM's scheduler in their place, not ahead; 512 requests, temperature; one engine a "
        "figure; slow motion N: devices take N times as long, tokens/s times N",
        file="emulation-ablation",
        columns=[name for name in rows[0] if name != "stages"],
    )
    return 0


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


def _measured(profile: str, p: int, slow: int, engine: str) -> dict[str, Any]:
    argv = f"--profile {profile} --pp {p} --slow-motion {slow} {LOAD}".split()
    words, settings = of(engine, p)
    load = emulated([*argv, *words], settings, STOCK)[1]["loads"][0]
    return {
        "tokens_per_s": slow * load["tokens_per_s"],
        "waited": load["waited"],
        "busy_share": load["busy_share"],
    }


def _row(pipeline: tuple[str, int, int], found: dict[str, Any]) -> dict[str, Any]:
    speed = {engine: one["tokens_per_s"] for engine, one in found.items()}
    stock, whole = speed[CHAIN[0]], speed[CHAIN[-1]]
    row: dict[str, Any] = {"pipeline": _title(*pipeline), "stages": pipeline[1]}
    row["vLLM-like tok/s"] = round(stock)
    for before, engine in itertools.pairwise(CHAIN):
        row[engine] = round(speed[engine] / speed[before], 2)
    row["SiPipe"] = round(whole / stock, 2)
    for engine in list(ENGINES)[len(CHAIN) :]:
        row[engine] = round(speed[engine] / whole, 2)
    row["SiPipe's busiest stage, % busy"] = round(100 * max(found[CHAIN[-1]]["busy_share"]), 1)
    row["threads that waited for a core"] = max(one["waited"] for one in found.values())
    return row


def _mean(rows: Sequence[dict[str, Any]], name: str) -> float:
    return round(math.exp(sum(math.log(row[name]) for row in rows) / len(rows)), 2)
