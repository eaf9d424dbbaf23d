"""The output projection shared out against the best cut of the layers, on emulated GPUs.

    python -m benchmarks.vocabulary_emulated [--quick] [--requests 64]

``benchmarks.emulate`` with either, an engine each, in slow motion, so that two cores can drive the
stages; p + 1 microbatches in flight.
"""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks.emulate import BUSY
from benchmarks.emulation.__main__ import figures
from benchmarks.emulation.cluster import emulation
from benchmarks.harness import report
from sipipe.engine.layers.cut import fill, layer_split
from sipipe.tools.planner.costs import DatasheetCosts, datasheet_costs
from sipipe.tools.planner.placement import place
from sipipe.tools.planner.workload import Microbatch, Workload

GPUS = (
    ("llama-8b-4xh100", 4, 8),
    ("llama-8b-8xh100", 8, 16),
    ("qwen2.5-7b-4xh100", 4, 8),
    ("qwen2.5-7b-8xh100", 8, 16),
)
"""Profile, stages, how many times as long devices take."""
CONTEXT = 1000
"""Tokens behind each request."""


def seconds(costs: DatasheetCosts, stage: Any, rows: int) -> tuple[float, float]:
    """Of a stage's layers, and of its product."""
    work = Microbatch(batch=rows, tokens=rows, context=CONTEXT)
    parts = costs.forward(stage, work, gather=False)
    return sum(parts.values()) - parts["logits"], parts["logits"]


def cuts(
    costs: DatasheetCosts, p: int, rows: int
) -> dict[str, tuple[tuple[int, ...], tuple[float, ...]]]:
    """Layers of the stages and parts of the projection, by what microbatches of ``rows`` take."""
    layers = costs.facts.layers

    def times(cut: tuple[int, ...], parts: tuple[float, ...] = ()) -> list[tuple[float, float]]:
        stages = place(layers, p, 1, p, cut, parts).stages
        return [seconds(costs, stage, rows) for stage in stages]

    even = layer_split(layers, p)
    uneven = [(*layer_split(layers - last, p - 1), last) for last in range(even[-1], 0, -1)]
    best = min(uneven, key=lambda cut: max(map(sum, times(cut))))
    parts, _ = fill([stage[0] for stage in times(even)], [times(even)[-1][1]] * p)
    return {"even layers": (even, ()), "best cut": (best, ()), "shared": (even, parts)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="the first model at four stages")
    parser.add_argument("--requests", type=int, default=64, help="decoding (default: 64)")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for profile, p, slow in GPUS[: 1 if args.quick else None]:
        made = emulation(profile, p, jitter=0.0)
        costs = datasheet_costs(made.facts, made.cluster, Workload())
        even, best = (
            cuts(costs, p, args.requests // p)[title][0] for title in ("even layers", "best cut")
        )
        usual = tuple(stage.layers for stage in made.placement.stages)
        ways = {
            f"best cut {best}": f"--layers {','.join(map(str, best))}",
            f"default cut {usual}": "",
            f"shared {even}": "--vocabulary shared",
        }
        base: dict[int, float] = {}
        for title, way in ways.items():
            counts = [args.requests, 2 * args.requests]
            options = f"--profile {profile} --pp {p} {way} --jitter 0.02"
            options += f" --slow-motion {slow} --requests {counts[0]},{counts[1]}"
            result = figures(options, tokens=60)
            for requests, load in zip(counts, result["loads"], strict=True):
                speed = slow * load["tokens_per_s"]
                base.setdefault(requests, speed)
                rows.append(
                    {
                        "profile": f"{profile} --pp {p}",
                        "engine": title,
                        "requests": requests,
                        "slow motion": slow,
                        "tokens/s at full speed": round(speed),
                        "of the best cut": round(speed / base[requests], 2),
                        "KV cache tokens": result["profile"]["kv_tokens"],
                        "stages busy, %": ", ".join(f"{100 * s:.0f}" for s in load["busy_share"]),
                        "this machine's cores busy, %": round(100 * load["busy"]),
                        "": "VOID" if load["busy"] > BUSY else "valid",
                    }
                )
    report(
        "vocabulary_emulated",
        "Emulated H100, p + 1 microbatches in flight, while all requests decode",
        rows,
        note="slow motion: devices take so many times as long, tokens/s are multiplied by it; "
        "pass times deviate by 2 %; a product and a pass of one GPU run at half their speed beside one another; VOID: the machine "
        "was too busy to emulate",
        file="vocabulary-gpus",
    )


if __name__ == "__main__":
    main()
