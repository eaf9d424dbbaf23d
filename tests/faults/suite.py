"""``python -m tests.faults.suite``: the faults, and the table of what came of them.

``make test-faults`` runs all of it and writes docs/faults.json; a test has a few of each.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from random import Random

from tests.faults.kinds import KINDS, scenario

STREAMS = 32


def scenarios(kinds, seed, scale):
    """Every kind's, in random order: a long wait of one is another's time."""
    found = []
    for kind in kinds:
        rng = Random(f"{seed} {kind.name}")
        count = max(1, round(kind.scenarios * scale))
        found += [{"kind": kind.name, "seed": 1, "streams": STREAMS, "sampling": True}
                  | kind.make(rng) for _ in range(count)]
    Random(seed).shuffle(found)
    return found


def judge(kind, outcome, expected):
    """What became of an engine, in one word, and why where it is bad."""
    if outcome["hung"]:
        return "hung", "no end within the bound"
    for request, tokens in outcome["tokens"].items():
        if tokens != expected[request][: len(tokens)]:
            return "wrong", f"request {request}: {tokens}"
    if outcome["left"]:
        return "leaked", str(outcome["left"])
    if outcome["shutdown"]:
        return "unclear", outcome["shutdown"]
    error = outcome["error"]
    if not error and outcome["exit"] == -9:
        error = "killed"
    if not error:
        if outcome["exit"]:
            return "unclear", f"exit status {outcome['exit']} without a word"
        if any(len(tokens) != len(expected[r]) for r, tokens in outcome["tokens"].items()):
            return "wrong", "a request is short of tokens"
        if kind.must_end and outcome["faults"]:
            return "unclear", "the engine did not notice"
        return "recovered", ""
    if kind.ends and re.search(kind.ends, error):
        return "error", error
    return "unclear", error


BAD = ("hung", "wrong", "leaked", "unclear")


def table(judged):
    """A row for each kind that was run: counts by injected fault."""
    rows = {}
    for kind, outcome, verdict, why in judged:
        row = rows.setdefault(
            kind.name,
            {"kind": kind.name, "injected": 0, "recovered": 0, "error": 0, "seconds": []}
            | dict.fromkeys(BAD, 0) | {"why": []},
        )
        count = len(outcome["faults"]) or (kind.name.startswith("/dev/shm"))
        row["injected"] += count
        row[verdict] += count
        if verdict == "error":
            after = outcome["gone"] if outcome["failed"] is None else outcome["failed"]
            row["seconds"].append(after)
        if verdict in BAD:
            row["why"].append(f"{why[:600]} [{outcome['log']}] {json.dumps(outcome['scenario'])}")
    for row in rows.values():
        seconds = row.pop("seconds")
        row["median_s"] = round(statistics.median(seconds), 1) if seconds else None
        row["longest_s"] = round(max(seconds), 1) if seconds else None
        if not row["why"]:
            del row["why"]
    return [rows[kind.name] for kind in KINDS if kind.name in rows]


def run(kinds, *, seed=1, scale=1.0, parallel=2, each=lambda *_: None):
    """Run the scenarios of ``kinds``; (kind, outcome, verdict, why) of each."""
    from tests.faults.rig import run_all

    by_name = {kind.name: kind for kind in kinds}
    plain = {"kind": "", "seed": 1, "streams": STREAMS, "sampling": True}
    asked = [plain | scenario(), plain | scenario(own=True), *scenarios(kinds, seed, scale)]
    expected, judged = {}, []

    def done(outcome):
        found = outcome["scenario"]
        if not found["kind"]:
            assert not outcome["error"], outcome
            expected[found["own"]] = outcome["tokens"]
            return
        kind = by_name[found["kind"]]
        judged.append((kind, outcome, *judge(kind, outcome, expected[found["own"]])))
        each(*judged[-1])

    run_all(asked, parallel=parallel, each=done)
    return judged


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--parallel", type=int, default=2)
    parser.add_argument("--only", default="", help="kinds whose name has this pattern")
    parser.add_argument("--json")
    options = parser.parse_args()
    began = time.monotonic()

    def each(kind, outcome, verdict, why):
        took = time.monotonic() - began
        print(f"{took:7.1f} {verdict:9} x{len(outcome['faults'])} {kind.name}: {why[:300]}",
              flush=True)

    kinds = [kind for kind in KINDS if re.search(options.only, kind.name)]
    judged = run(kinds, seed=options.seed, scale=options.scale, parallel=options.parallel,
                 each=each)
    rows = table(judged)
    for row in rows:
        print(json.dumps(row))
    print({key: sum(row[key] for row in rows) for key in ("injected", "recovered", "error", *BAD)})
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
