"""What is served beside stock vLLM: short requests and chats, at once and as they arrive.

    python -m benchmarks.served [MODEL] [--quick] [--engines 3] [--rows sipipe,stock,stock-one,sipipe-one]
    python -m benchmarks.served MODEL --loads short --sampling greedy,all --name served-all-parameters
    python -m benchmarks.served MODEL --int8 DIRECTORY --rows sipipe,sipipe-one --no-rates --name served-int8

Rows are those of ``sipipe bench``: two stages of SiPipe (``sipipe``) and of stock vLLM (``stock``), one
stage with both cores (``stock-one``, ``sipipe-one``). All servers of a round are alive and answer every
load in turn (:mod:`benchmarks.side_by_side`); the next round starts them in the other order, with
other prompts. A ratio is of answers that were given side by side.

``sipipe-one-chunks``, which is measured where ``--rows`` names it, does not cut chunks for the sake of
sequences that decode (settings by goal, docs/configuration.md).

``--int8``: rows of SiPipe also with the same model in 8 bits (:mod:`benchmarks.make_model.int8`).

The noise is that of a set-up against itself: the largest of its answers to a load, by rounds and
repetitions, over the smallest, where several engines answered. Each answer has other prompts.

``short``: 16 tokens in, 32 out. ``chat``: 200 to 600 in, 100 to 300 out, as long as the answers of
ShareGPT are. Both at once, and in open arrivals at three rates. All rounds answer those with most requests
at once, and the first one alone answers the others, which take longer together (``--every-load``: all
of them). ``prompt``, which is measured where ``--loads`` names it: 175 to 525 tokens in, 8 to 24 out, at
once.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import MODELS, once, report, served_dtype, spread
from benchmarks.make_model.checkpoint import make_model
from benchmarks.side_by_side import Load, Runs, answered
from sipipe.cli.bench_rows import server_job

ROWS = {
    "sipipe": ["-pp", "2"],
    "stock": ["stock", "-pp", "2"],
    "stock-one": ["stock", "-pp", "1"],
    "sipipe-one": ["-pp", "1"],
}
CHUNKS = '{"sipipe": {"microbatches": {"tpot_target_ms": 1000000}}}'
ONLY_NAMED = {"sipipe-one-chunks": ["--additional-config", CHUNKS, "-pp", "1"]}
"""Rows that are measured where ``--rows`` names them."""
INT8 = "-int8"
"""Ends the name of a row whose server has the model in 8 bits."""
STAGES = {name: options[-1] for name, options in (ROWS | ONLY_NAMED).items()}
STOCK = [name for name in ROWS if name.startswith("stock")]
SHORT = "--random-input-len 16 --random-output-len 32"
CHAT = "--random-input-len 400 --random-output-len 200 --random-range-ratio 0.5"
PROMPT = "--random-input-len 350 --random-output-len 16 --random-range-ratio 0.5"
LENGTHS = {
    name: ["--dataset-name", "random", "--ignore-eos", *words.split()]
    for name, words in (("short", SHORT), ("chat", CHAT), ("prompt", PROMPT))
}
AT_ONCE = {"short": (1, 8, 64), "chat": (8, 24), "prompt": (8, 64)}
"""Requests that are sent at once. As many chats as short ones would take most of a campaign."""
RATES = {"short": (2.0, 4.0, 8.0), "chat": (0.5, 1.0, 2.0), "prompt": ()}
"""Requests a second: some that two cores answer at leisure, and some that they hardly can."""
ARRIVING = {"short": 32, "chat": 12}
"""Requests of each rate."""
OF_THE_SAME = "of the same, not in 8 bits"
SHOWN = ["load", "sampling", "requests", "rate", "engine", "answers", "tok/s", "in + out"]
SHOWN += ["of stock with the same stages"]
SHOWN += ["of stock's best", OF_THE_SAME, "TTFT p50", "TPOT p50", "noise"]
LIMIT = 7_200.0
"""Seconds that a round of all rows may take."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("model", nargs="?", default="", help="default: a random one, vocabulary of 151,936")
    add("--quick", action="store_true", help="two stages of each, few requests at once, one engine")
    add("--loads", default="short,chat", help=f"of {', '.join(LENGTHS)} (default: short,chat)")
    add(
        "--sampling",
        default="greedy,chat",
        help="the first also with few requests; the last arrives",
    )
    add("--requests", type=int, default=64, help="at most so many at once (default: 64)")
    add("--rows", default=",".join(ROWS), help=f"of {', '.join(ROWS | ONLY_NAMED)}")
    add("--int8", default="", metavar="DIRECTORY", help="the model in 8 bits, for rows of SiPipe")
    add("--engines", type=int, default=3, help="of each row (default: 3)")
    add("--no-rates", action="store_true", help="no open arrivals")
    add("--every-load", action="store_true", help="every engine answers every load")
    add("--name", default="served", help="of the result")
    args = parser.parse_args()
    model = args.model or str(make_model("llama", MODELS / "llama-bench", size="bench"))
    rows = ["sipipe", "stock"] if args.quick else args.rows.split(",")
    if args.int8:
        rows += [f"{name}{INT8}" for name in rows if name not in STOCK]
    loads = loads_of(args)
    rounds: list[Runs] = []
    for number_of_round in range(1 if args.quick else args.engines):
        order = rows[::-1] if number_of_round % 2 else rows
        servers = {name: server(model, name, args.int8) for name in order}
        seed = 1000 * number_of_round
        asked = [
            load
            for load in loads
            if not number_of_round or args.every_load or in_all_rounds(load, args.requests)
        ]
        words = [model, rows, args.int8, number_of_round, [load.name for load in asked]]
        rounds.append(
            once(words, partial(answered, servers, model, asked, first=seed, timeout=LIMIT))
        )
    report(
        "served",
        f"Served, {Path(model).name}, {served_dtype()}, {len(rounds)} engine(s) a row, all alive, loads in turn",
        table(loads, rows, rounds),
        note="short: 16 tokens in, 32 out; chat: 200 to 600 in, 100 to 300 out; prompt: 175 to 525 in, "
        "8 to 24 out; in + out: tokens/s of prompts and answers; medians and ranges; "
        "ratios of answers side by side; answers: two of each engine to short requests at once, else "
        "one; TTFT, TPOT: ms to the first token and between later ones; noise: the largest tok/s of a "
        "row's answers over the smallest, where several engines answered, each with other prompts",
        columns=[name for name in SHOWN if args.int8 or name != OF_THE_SAME],
        file=args.name,
    )


def in_all_rounds(load: Load, most: int) -> bool:
    """Say if every round answers ``load``: that with most requests of its kind, ``most`` at most."""
    kind = load.name.partition(",")[0]
    return not load.rate and load.requests == min(max(AT_ONCE[kind]), most)


def server(model: str, row: str, int8: str = "") -> dict[str, Any]:
    """What starts one row's server; all serve ``model`` by its name."""
    served = int8 if row.endswith(INT8) else model
    words = [served, "--served-model-name", model, "--max-model-len", "2048"]
    words += ["--dtype", served_dtype()]
    return server_job(words, (ROWS | ONLY_NAMED)[row.removesuffix(INT8)])


def loads_of(args: argparse.Namespace) -> list[Load]:
    """The loads of a command, the short ones first."""
    ways = args.sampling.split(",")
    loads = []
    for name in args.loads.split(","):
        counts = sorted({min(count, args.requests) for count in AT_ONCE[name]})
        few = [count for count in counts if not args.quick or count in (1, counts[-1])]
        warmed = name != "chat"  # a chat's load is long enough to warm an engine by itself
        for way in ways:
            for count in few if way == ways[0] else few[-1:]:
                load = Load(
                    name=f"{name}, {way}, {count}, at once",
                    sampling=way,
                    requests=count,
                    rate=0.0,
                    words=LENGTHS[name],
                    repeat=2 if warmed else 1,
                    learnt=count if warmed and count > 1 else 0,
                )
                loads.append(load)
        for rate in () if args.quick or args.no_rates else RATES[name]:
            load = Load(
                name=f"{name}, {ways[-1]}, {ARRIVING[name]}, {rate:g}/s",
                sampling=ways[-1],
                requests=ARRIVING[name],
                rate=rate,
                words=LENGTHS[name],
            )
            loads.append(load)
    return loads


def table(loads: list[Load], rows: list[str], rounds: list[Runs]) -> list[dict[str, Any]]:
    """A line for each load and row, of all rounds."""
    lines = []
    for load in loads:
        found: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for runs in rounds:
            for name, answers in runs.get(load.name, {}).items():
                found[name] += answers
        speeds = {name: [run["output_throughput"] for run in runs] for name, runs in found.items()}
        best = max(
            (name for name in rows if name in STOCK),
            key=lambda name: statistics.median(speeds[name]),
            default=None,
        )
        kind, way, count, rate = load.name.split(", ")
        for name in rows:
            stages = STAGES[name.removesuffix(INT8)]
            same = next((row for row in rows if row in STOCK and STAGES[row] == stages), None)
            line: dict[str, Any] = {"load": kind, "sampling": way, "requests": int(count)}
            line |= {"rate": rate, "engine": name, "tok/s": spread(speeds[name])}
            line["answers"] = len(speeds[name])
            line["in + out"] = spread([run["total_token_throughput"] for run in found[name]])
            for column, other in (
                ("of stock with the same stages", same),
                ("of stock's best", best),
                (OF_THE_SAME, name.removesuffix(INT8) if INT8 in name else None),
            ):
                line[column] = _ratio(speeds[name], speeds[other]) if other else None
            for title in ("TTFT", "TPOT"):
                for part in ("p50", "p99"):
                    values = [run[f"{part}_{title.lower()}_ms"] for run in found[name]]
                    line[f"{title} {part}"] = spread(values)
            several = sum(load.name in runs for runs in rounds) > 1
            line["noise"] = max(speeds[name]) / min(speeds[name]) if several else None
            lines.append(line)
    return lines


def _ratio(mine: list[float], theirs: list[float]) -> dict[str, float | int]:
    return spread([one / other for one, other in zip(mine, theirs, strict=True)])


if __name__ == "__main__":
    main()
