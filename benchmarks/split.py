"""What a served factor consists of: not spinning, the pipeline, the sampler, the output projection.

    python -m benchmarks.split [MODEL] [--quick] [--sampling greedy] [--requests 64] [--dtype float32]

A row differs from the one above by what its name says. First stock vLLM; then readers of messages
sleep; then hidden states go through gloo, so that nothing spins (:mod:`benchmarks.asleep`). Then all
of SiPipe that has no setting here stands in their place: executor, channels, links, its preparation
of inputs, slots, p + 1 in flight, scheduling ahead, its core plan; vLLM's sampler draws on the last
stage. Then SiPipe's samplers draw, on cores that the stages leave them. Then the output projection is
shared out, as SiPipe is served. Layers are even in all rows: SiPipe cuts them by cost where samplers
draw and the last stage has the projection, and evenly where it is shared out.

Each row is an engine in a process of its own, all requests sent at once; engines start forwards, then
backwards. 40 seconds an engine.

There is no row of vLLM's second runner with asynchronous scheduling, which is stock on GPUs: its
platform for CPUs turns the latter off, and its stages pass tokens in a broadcast on a stream of
their own, in which a CPU stage would sit until the last one has drawn.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from benchmarks.harness import alone, report
from benchmarks.make_model.checkpoint import make_model
from benchmarks.serving import MODELS

LENGTH = ["--max-model-len", "2048"]
ASLEEP = ["--scheduler-cls", "benchmarks.asleep.Scheduler", "--worker-extension-cls"]
ROWS: dict[str, tuple[dict[str, Any] | None, list[str]]] = {
    "stock": (None, []),
    "+ readers sleep": (None, [*ASLEEP, "benchmarks.asleep.Readers"]),
    "+ links sleep": (None, [*ASLEEP, "benchmarks.asleep.ReadersAndLinks"]),
    "+ SiPipe's pipeline": ({"cpu_sampling": "off", "vocabulary": "last", "layers": "even"}, []),
    "+ CPU sampling": ({"cpu_sampling": "on", "vocabulary": "last", "layers": "even"}, []),
    "+ shared projection": ({"cpu_sampling": "on", "vocabulary": "shared", "layers": "even"}, []),
}
"""SiPipe's settings, None for stock, and options."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", nargs="?", help="(default: a random one)")
    parser.add_argument("--quick", action="store_true", help="one engine a row")
    parser.add_argument("--pp", default="2", help="stages (default: 2)")
    parser.add_argument("--sampling", default="greedy", help="a list (default: greedy)")
    parser.add_argument("--requests", type=int, default=64, help="sent at once (default: 64)")
    parser.add_argument("--tokens", type=int, default=32, help="new tokens (default: 32)")
    parser.add_argument("--repeat", type=int, default=5, help="answers of an engine (default: 5)")
    parser.add_argument("--dtype", default="auto", help="float32 on a CPU without AVX-512")
    args = parser.parse_args()
    ways = args.sampling.split(",")
    model = args.model or make_model("llama", MODELS / "llama-bench", size="bench")
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in ROWS}
    for name in [*ROWS, *(() if args.quick else reversed(ROWS))]:
        settings, options = ROWS[name]
        job = {
            "argv": [str(model), "-pp", args.pp, "--dtype", args.dtype, *LENGTH, *options],
            "settings": settings,
            "sampling": ways,
            "requests": args.requests,
            "prompt_tokens": 16,
            "tokens": args.tokens,
            "repeat": args.repeat,
        }
        found[name].append(alone(name, job))
    rows = [row for way in ways for row in _rows(way, found)]
    engines = len(next(iter(found.values())))
    report(
        "split",
        f"What a served factor consists of, {Path(model).name}, {args.pp} stages, --dtype {args.dtype}",
        rows,
        note=f"{args.requests} requests at once, prompts of 16 tokens, {args.tokens} new ones; "
        f"medians and ranges of {engines} engine(s) a row, {args.repeat} answers each; a row has what "
        "the one above has, and what its name says; SiPipe's pipeline: all of SiPipe but the two "
        "below; layers even in all; busy: of the machine's CPU time, by anybody",
    )


def _rows(way: str, found: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    first = before = 0.0
    for name, engines in found.items():
        speeds = [speed for engine in engines for speed in engine["tokens_per_second"][way]]
        speed = statistics.median(speeds)
        first, before = first or speed, before or speed
        row: dict[str, Any] = {"sampling": way, "engine": name, "tok/s": round(speed)}
        row["from-to"] = f"{min(speeds):,.0f}-{max(speeds):,.0f}"
        row["of the row above"], row["of stock"] = speed / before, speed / first
        busy = [share for engine in engines for share in engine["busy"][way]]
        row["busy %"] = 100 * statistics.median(busy)
        rows.append(row)
        before = speed
    return rows


if __name__ == "__main__":
    main()
