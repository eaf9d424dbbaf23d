"""Speculative decoding: tokens a pass, tokens a second and times per token, with and without.

    sipipe make-model smollm2 build/models/smollm2
    python -m benchmarks.speculation [MODEL] [--pp 2] [--requests 1,4,8,32] [--repeat 3] [--no-stock]
    python -m benchmarks.speculation MODEL --head HEAD --pp 2,4 --kinds chat    (benchmarks.make_model.eagle)
    python -m benchmarks.speculation --profile llama-70b-8xh100 --pp 4,8 --requests 32,256

A chat model copies a passage, edits a file, fills a JSON schema, and chats, greedily and with the
sampling of chat. SiPipe with ``{"method": "ngram"}``, or with a draft head, SiPipe without, and stock vLLM
on one stage with its own n-grams or the same head hold an engine each at the same time, and answer every
load in turn: so many requests are always there, and the next begins where one ends.

With a profile: a head on emulated devices (docs/emulation.md), whose drafts are right by a chance that
is chosen. It says what the pipeline makes of drafts that are right so often, and nothing of a GPU's
speed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import VOID, once, report, served_dtype, spread
from benchmarks.in_turn import measured_in_turn
from benchmarks.turns import turn
from sipipe.tools.child import answer

SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "chat": {"temperature": 0.7, "top_p": 0.9},
}
STOCK_NGRAMS = {
    "method": "ngram",
    "num_speculative_tokens": 5,
    "prompt_lookup_max": 4,
    "prompt_lookup_min": 2,
}
"""Of vLLM's own documentation."""
PASSAGES = (
    (
        "The lighthouse stood at the end of a long pier made of grey stone. Every evening the keeper "
        "climbed its ninety-two steps with a can of oil and a brush. He cleaned the lamp, filled the tank "
        "and wound the clock that turned the lens. From the gallery he could see the fishing boats come "
        "home, one after another, and he counted them until the last one was in."
    ),
    (
        "The train to the north leaves at seven in the morning. It has four carriages, and the last one "
        "is for bicycles. Behind the second tunnel the line follows the river for an hour, and in spring "
        "the water comes up to the rails. Tickets are sold at the station and by the conductor."
    ),
    (
        "Bread needs flour, water, salt and time. Mix the flour with the water and let it rest for half "
        "an hour. Add the salt and fold the dough four times, once every thirty minutes. Then leave it in "
        "a cool place for the night, and bake it in the morning in a very hot oven."
    ),
    (
        "The old map showed three islands, a reef and a bay without a name. Two of the islands were drawn "
        "too large, and the reef was a mile too far to the west. But the bay was right in every detail, "
        "and so the captain believed that somebody had stayed there for a long time."
    ),
)
FILES = (
    """def read_prices(path):
    total = 0
    count = 0
    with open(path) as file:
        for line in file:
            name, price = line.split(",")
            total = total + float(price)
            count = count + 1
    print("read", count, "prices from", path)
    return total / count
""",
    """class Counter:
    def __init__(self):
        self.values = {}

    def add(self, key):
        if key not in self.values:
            self.values[key] = 0
        self.values[key] = self.values[key] + 1

    def largest(self):
        return max(self.values, key=self.values.get)
""",
    """def find_longest(words):
    longest = words[0]
    for word in words:
        if len(word) > len(longest):
            longest = word
    print("the longest word is", longest)
    return longest
""",
    """def read_settings(path):
    settings = {}
    with open(path) as file:
        for line in file:
            if line.startswith("#"):
                continue
            name, value = line.split("=")
            settings[name.strip()] = value.strip()
    return settings
""",
)
RENAMED = (("total", "amount"), ("values", "counts"), ("longest", "best"), ("settings", "options"))
TOPICS = ("rain", "bread", "trains", "bees", "tides", "glass", "maps", "salt")
SCHEMA = {
    "type": "object",
    "properties": {
        "place": {"type": "string", "maxLength": 20},
        "day_of_the_week": {"enum": ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday"]},
        "number_of_visitors": {"type": "integer", "minimum": 0, "maximum": 99999},
        "is_open_in_the_evening": {"type": "boolean"},
    },
    "required": [
        "place",
        "day_of_the_week",
        "number_of_visitors",
        "is_open_in_the_evening",
    ],
    "additionalProperties": False,
}


def asked(kind: str, number: int) -> str:
    """What a user of the chat model says."""
    which = number % len(PASSAGES)
    match kind:
        case "copy":
            return f"Copy the following text exactly.\n\n{PASSAGES[which]}"
        case "edit":
            old, new = RENAMED[which]
            code = f"```python\n{FILES[which]}```"
            return f"Rename the variable `{old}` to `{new}` in this code:\n\n{code}"
        case "json":
            return f"Describe the place in this text as JSON.\n\n{PASSAGES[which]}"
        case _:
            topic = TOPICS[number % len(TOPICS)]
            return f"Tell me something about {topic} that few people know, in example {number}."


KINDS = ("copy", "edit", "json", "chat")


def main() -> int:
    """0: no row is void."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("model", nargs="?", default="build/models/smollm2")
    add("--quick", action="store_true", help="one request, greedy, SiPipe alone")
    add("--pp", default="2", metavar="LIST", help="stages, engines of their own (default: 2)")
    add("--head", default="", metavar="DIRECTORY", help="an EAGLE head, in place of n-grams")
    add("--drafts", type=int, default=3, help="of the head at most (default: 3)")
    add("--requests", default="1,4,8,32")
    add("--kinds", default=",".join(KINDS))
    add("--sampling", default="greedy,chat")
    add("--tokens", type=int, default=128, help="new at most (default: 128)")
    add("--repeat", type=int, default=3, help="of each load in an engine (default: 3)")
    add(
        "--engines",
        type=int,
        default=1,
        help="of each side, in reverse order each time (default: 1)",
    )
    add("--no-stock", action="store_true", help="SiPipe alone")
    add("--profile", default="", help="emulated devices with a head, in place of the model")
    add("--acceptance", type=float, default=0.7, help="chance of an emulated head's draft (0.7)")
    add("--name", default="", help="of the result (default: by its stages)")
    args = parser.parse_args()
    if args.quick:
        args.requests, args.sampling, args.repeat, args.no_stock = "1", "greedy", 1, True
    return (emulated if args.profile else served)(args)


def served(args: argparse.Namespace) -> int:
    """A model, on this machine. 0: all is measured."""
    loads = [
        {"kind": kind, "sampling": way, "requests": int(requests)}
        for kind in args.kinds.split(",")
        for way in args.sampling.split(",")
        for requests in args.requests.split(",")
    ]
    job = {"model": args.model, "loads": loads, "tokens": args.tokens, "repeat": args.repeat}
    drafts: dict[str, Any] = {"method": "ngram"}
    of_stock = STOCK_NGRAMS
    if args.head:
        drafts = {
            "method": "eagle",
            "model": args.head,
            "num_speculative_tokens": args.drafts,
        }
        of_stock = drafts
    rows = []
    for pp in map(int, args.pp.split(",")):
        jobs: dict[str, dict[str, Any]] = {
            "with": job | {"sipipe": {}, "pp": pp, "speculative": drafts},
            "without": job | {"sipipe": {}, "pp": pp, "speculative": None},
        }
        if not args.no_stock:
            jobs["stock"] = job | {"sipipe": None, "pp": 1, "speculative": of_stock}
        found = []
        for engine in range(args.engines):
            sides = dict(ordered(jobs, engine))
            ask = partial(measured_in_turn, sides, "benchmarks.speculation")
            found.append(once([engine, list(sides), sides], ask))
        for number, load in enumerate(loads):
            runs = {
                side: [run for each in found for run in each[side]["loads"][number]]
                for side in jobs
            }
            rows.append({"stages": pp} | load | row_of(runs))
    name = args.name or f"speculation-{'head-' if args.head else ''}pp{args.pp.replace(',', '-')}"
    by = f"an EAGLE head, {args.drafts} drafts at most" if args.head else "n-grams"
    report(
        name,
        f"Speculative decoding by {by}, {Path(args.model).name}, {served_dtype()}, {args.pp.replace(',', ' and ')} "
        f"stage(s), at most {args.tokens} new tokens",
        rows,
        file=name,
        note=f"{args.engines} engine(s) a side; so many requests all the time, while three times as "
        "many end; same tokens: of the first requests, those whose tokens equal the ones without "
        "drafts (bfloat16: ties may fall otherwise)",
        columns=[name for name in rows[0] if not name.startswith(("ms a token", "p99"))],
    )
    return 0


def ordered(jobs: Mapping[str, Any], engine: int) -> Sequence[tuple[str, Any]]:
    """The sides in the order in which they take turns, which the next engines reverse."""
    return list(jobs.items())[:: -1 if engine % 2 else 1]


def row_of(runs: Mapping[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """The figures of a load, of the runs in all engines of each side."""
    speeds = {side: [run["tokens_per_s"] for run in each] for side, each in runs.items()}
    drawn, accepted, offered = (
        sum(run[name] for run in runs["with"]) for name in ("drawn", "accepted", "offered")
    )
    row: dict[str, Any] = {
        "tokens a pass": round(drawn / (drawn - accepted), 2),
        "accepted": round(accepted / offered, 2) if offered else 0.0,
        "tok/s with": spread(speeds["with"]),
        "tok/s without": spread(speeds["without"]),
        "with / without": spread(
            [a / b for a, b in zip(speeds["with"], speeds["without"], strict=True)]
        ),
    }
    if "stock" in runs:
        row["tok/s stock, 1 stage"] = spread(speeds["stock"])
    for side in ("with", "without"):
        spent = sorted(ms for run in runs[side] for ms in run["ms"])
        row[f"ms a token {side}, p50"] = round(statistics.median(spent), 1)
        row[f"p99 {side}"] = round(spent[int(0.99 * (len(spent) - 1))], 1)
    first, plain = (runs[side][0]["tokens"] for side in ("with", "without"))
    equal = sum(one == other for one, other in zip(first, plain, strict=True))
    row["same tokens"] = f"{equal}/{len(first)}"
    return row


def emulated(args: argparse.Namespace) -> int:
    """A head on devices that only take time, whose drafts are right as often as is wanted. 0: no row is
    void."""
    from benchmarks import emulate

    rows = []
    for pp in map(int, args.pp.split(",")):
        # Two cores drive two stages in their own time (benchmarks.emulation).
        slow = max(1.0, pp / 2)
        common = f"--profile {args.profile} --pp {pp} --slow-motion {slow:g} --prompt-tokens 32 "
        common += f"--requests {args.requests} --tokens {args.tokens}"
        sides = {
            "with": f"{common} --drafts {args.drafts} --acceptance {args.acceptance}",
            "without": common,
        }
        runs: dict[str, list[list[dict[str, Any]]]] = {side: [] for side in sides}
        for engine in range(args.engines):
            for side, options in ordered(sides, engine):
                runs[side].append(emulate.emulated(options.split())[1]["loads"])
        for number, requests in enumerate(map(int, args.requests.split(","))):
            each = {side: [loads[number] for loads in runs[side]] for side in sides}
            rows.append(
                {"stages": pp, "requests": requests, "drafts": args.drafts}
                | {"acceptance": args.acceptance}
                | emulated_row(each, slow, emulate.BUSY)
            )
    report(
        "speculation-emulated",
        f"Drafts of a head on emulated devices, {args.profile}, while all requests decode",
        rows,
        file=args.name or "speculation-emulated",
        note=f"{args.engines} engine(s) a side; greedy; acceptance: the chance that an emulated draft "
        "has, behind right ones; drafts: at most; devices take p / 2 times as long, tok/s times as "
        "much, and SiPipe's processes what they take; data-sheet times (docs/emulation.md); VOID: the "
        "machine was too busy to emulate",
    )
    return 1 if any(row[""] == VOID for row in rows) else 0


def emulated_row(
    runs: Mapping[str, list[dict[str, Any]]], slow: float, busiest: float
) -> dict[str, Any]:
    """The figures of a load, of all engines of each side, in the devices' own time.

    Args:
        slow: how many times as long devices took.
        busiest: share of this machine's CPU time above which a run is void.
    """
    speeds = {side: [slow * load["tokens_per_s"] for load in loads] for side, loads in runs.items()}
    drafts = [load["drafts"] or {"a_pass": 1.0, "accepted": 0.0} for load in runs["with"]]
    void = any(load["busy"] > busiest for loads in runs.values() for load in loads)
    return {
        "tokens a pass": round(statistics.fmean(each["a_pass"] for each in drafts), 2),
        "accepted": round(statistics.fmean(each["accepted"] for each in drafts), 2),
        "tok/s with": spread(speeds["with"]),
        "tok/s without": spread(speeds["without"]),
        "with / without": spread(
            [a / b for a, b in zip(speeds["with"], speeds["without"], strict=True)]
        ),
        "busiest stage with, %": round(100 * max(max(e["busy_share"]) for e in runs["with"])),
        "without, %": round(100 * max(max(e["busy_share"]) for e in runs["without"])),
        "": VOID if void else "valid",
    }


def _answered(job: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM

    from sipipe.cores import equal_shares, this_machine
    from sipipe.engine.setup.record import BIND

    options: dict[str, Any] = {}
    if job["sipipe"] is not None:
        options = {
            "distributed_executor_backend": "sipipe.Executor",
            "additional_config": {"sipipe": job["sipipe"]},
        }
    else:  # by itself it would leave a core to others
        os.environ.setdefault(BIND, equal_shares(this_machine(), job["pp"]))
    most = max(load["requests"] for load in job["loads"])
    llm = LLM(
        model=job["model"],
        dtype=served_dtype(),
        pipeline_parallel_size=job["pp"],
        speculative_config=job["speculative"],
        max_model_len=1024,
        max_num_seqs=max(32, 2 * most),  # room for drafts beside what runs
        disable_log_stats=False,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=1 << 29,
        **options,
    )
    found = []
    for load in job["loads"]:
        runs = []
        for _ in range(job["repeat"]):
            with turn(*job["turn"]):
                runs.append(_kept_up(llm, load, job["tokens"]))
        found.append(runs)
    return {"loads": found}


def _kept_up(llm: Any, load: dict[str, Any], tokens: int) -> dict[str, Any]:
    """As many requests as the load has, all the time: for one that ends there is another.

    The first wave warms up; measured is until three times as many have ended. A burst would tell
    when its slowest request is done, and drafts help some requests and not others.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    template = llm.get_tokenizer().apply_chat_template
    schema = StructuredOutputsParams(json=SCHEMA) if load["kind"] == "json" else None
    engine, at_once = llm.llm_engine, load["requests"]
    came: dict[str, list[int]] = {}
    ms: list[float] = []
    began, before, ended = 0.0, (0, 0.0, 0.0), 0

    def add() -> None:
        number = len(came)
        said = [{"role": "user", "content": asked(load["kind"], number)}]
        params = SamplingParams(
            **SAMPLING[load["sampling"]],
            seed=number + 1,
            max_tokens=tokens,
            structured_outputs=schema,
            output_kind=RequestOutputKind.DELTA,
        )
        came[str(number)] = []
        engine.add_request(
            str(number), template(said, tokenize=False, add_generation_prompt=True), params
        )

    def so_far() -> tuple[int, float, float]:
        return (sum(map(len, came.values())), *_drafts(llm))

    for _ in range(at_once):
        add()
    while ended < 4 * at_once:  # bound: a request has `tokens` at most
        for output in engine.step():
            came[output.request_id] += output.outputs[0].token_ids
            if not output.finished:
                continue
            ended += 1
            if ended > at_once:
                times, made = output.metrics, len(came[output.request_id])
                ms.append(1e3 * (times.last_token_ts - times.first_token_ts) / max(made - 1, 1))
            elif ended == at_once:
                began, before = time.perf_counter(), so_far()
            add()
    took = time.perf_counter() - began
    drawn, offered, accepted = (now - then for now, then in zip(so_far(), before, strict=True))
    whole = [came[str(number)] for number in range(at_once)]
    engine.abort_request(list(came))
    while engine.has_unfinished_requests():  # bound: what is in flight
        engine.step()
    return {
        "tokens_per_s": drawn / took,
        "ms": ms,
        "drawn": drawn,
        "offered": offered,
        "accepted": accepted,
        "tokens": whole,
    }


def _drafts(llm: Any) -> tuple[float, float]:
    """Draft tokens so far, and those that were accepted."""
    values = {metric.name: getattr(metric, "value", 0.0) for metric in llm.get_metrics()}
    return (
        values.get("vllm:spec_decode_num_draft_tokens", 0.0),
        values.get("vllm:spec_decode_num_accepted_tokens", 0.0),
    )


if __name__ == "__main__":
    answer(_answered) if all(map(str.isdigit, sys.argv[1:])) else sys.exit(main())
