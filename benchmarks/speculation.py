"""Speculative decoding: tokens a pass, tokens a second and times per token, with and without.

    sipipe make-model smollm2 build/models/smollm2
    python -m benchmarks.speculation [MODEL] [--pp 2] [--requests 1,4,8,32] [--repeat 3] [--no-stock]

A chat model copies a passage, edits a file, fills a JSON schema, and chats, greedily and with the
sampling of chat. SiPipe with ``{"method": "ngram"}``, SiPipe without, and stock vLLM on one stage with
its own n-grams hold an engine each at the same time, and answer every load in turn: so many requests are
always there, and the next begins where one ends.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import report, spread
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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", nargs="?", default="build/models/smollm2")
    parser.add_argument("--quick", action="store_true", help="one request, greedy, SiPipe alone")
    parser.add_argument("--pp", default="2", help="stages (default: 2)")
    parser.add_argument("--requests", default="1,4,8,32")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--sampling", default="greedy,chat")
    parser.add_argument("--tokens", type=int, default=128, help="new at most (default: 128)")
    parser.add_argument("--repeat", type=int, default=3, help="of each load (default: 3)")
    parser.add_argument("--no-stock", action="store_true", help="SiPipe alone")
    parser.add_argument("--name", default="", help="of the result (default: by its stages)")
    args = parser.parse_args()
    if args.quick:
        args.requests, args.sampling, args.repeat, args.no_stock = "1", "greedy", 1, True
    served(args)


def served(args: argparse.Namespace) -> None:
    """A model, on this machine."""
    loads = [
        {"kind": kind, "sampling": way, "requests": int(requests)}
        for kind in args.kinds.split(",")
        for way in args.sampling.split(",")
        for requests in args.requests.split(",")
    ]
    job = {"model": args.model, "loads": loads, "tokens": args.tokens, "repeat": args.repeat}
    jobs: dict[str, dict[str, Any]] = {
        "with": job | {"sipipe": {}, "pp": int(args.pp), "speculative": {"method": "ngram"}},
        "without": job | {"sipipe": {}, "pp": int(args.pp), "speculative": None},
    }
    if not args.no_stock:
        jobs["stock"] = job | {"sipipe": None, "pp": 1, "speculative": STOCK_NGRAMS}
    found = measured_in_turn(jobs, "benchmarks.speculation")
    rows = []
    for number, load in enumerate(loads):
        each = {side: found[side]["loads"][number] for side in jobs}
        row: dict[str, Any] = dict(load)
        row["tokens a pass"] = round(each["with"]["a_pass"], 2)
        row["accepted"] = round(each["with"]["accepted"], 2)
        row["tok/s with"] = spread(each["with"]["tokens_per_s"])
        row["tok/s without"] = spread(each["without"]["tokens_per_s"])
        pairs = zip(each["with"]["tokens_per_s"], each["without"]["tokens_per_s"], strict=True)
        row["with / without"] = spread([a / b for a, b in pairs])
        if "stock" in jobs:
            row["tok/s stock, 1 stage"] = spread(each["stock"]["tokens_per_s"])
        for side in ("with", "without"):
            row[f"ms a token {side}, p50"] = round(each[side]["ms"][0], 1)
            row[f"p99 {side}"] = round(each[side]["ms"][1], 1)
        row["same tokens"] = f"{_equal(each)}/{len(each['with']['tokens'])}"
        rows.append(row)
    report(
        f"speculation-pp{args.pp}",
        f"Speculative decoding, {Path(args.model).name}, {args.pp} stage(s), at most {args.tokens} new tokens",
        rows,
        file=args.name or f"speculation-pp{args.pp}",
        note="so many requests all the time, while three times as many end; same tokens: of the first "
        "requests, those whose tokens equal the ones without drafts (bfloat16: ties may fall otherwise)",
    )


def _equal(each: dict[str, Any]) -> int:
    return sum(
        one == other
        for one, other in zip(each["with"]["tokens"], each["without"]["tokens"], strict=True)
    )


def _answered(job: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM

    options: dict[str, Any] = {}
    if job["sipipe"] is not None:
        options = {
            "distributed_executor_backend": "sipipe.Executor",
            "additional_config": {"sipipe": job["sipipe"]},
        }
    llm = LLM(
        model=job["model"],
        pipeline_parallel_size=job["pp"],
        speculative_config=job["speculative"],
        max_model_len=1024,
        max_num_seqs=32,
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
        spent = sorted(ms for run in runs for ms in run["ms"])
        drawn, accepted, offered = (
            sum(run[name] for run in runs) for name in ("drawn", "accepted", "offered")
        )
        found.append(
            {
                "tokens_per_s": [run["tokens_per_s"] for run in runs],
                "ms": (statistics.median(spent), spent[int(0.99 * (len(spent) - 1))]),
                "a_pass": drawn / (drawn - accepted),
                "accepted": accepted / offered if offered else 0.0,
                "tokens": runs[0]["tokens"],
            }
        )
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
    answer(_answered) if all(map(str.isdigit, sys.argv[1:])) else main()
