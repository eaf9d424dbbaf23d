"""``python -m tests.faults``: puts faults into engines, and says what came of each.

``make test-faults`` runs all kinds and writes faults.json and the table in
README.md beside it; :mod:`tests.faults.test_faults` runs a few in every ``make test``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import time
from pathlib import Path
from random import Random

from tests.faults import (
    bombs,
    clients,
    crowd,
    replicas,
    stock,
    storage,
    strangers,
    two_hosts,
)
from tests.faults.kinds import KINDS, scenario

SERVED = (clients, replicas, storage, strangers, two_hosts, bombs, crowd)
"""Kinds about whole servers, each with ``KINDS`` and ``run``."""
SERVED_KINDS = [name for module in SERVED for name in module.KINDS]

STREAMS = 32
KEPT = Path(__file__).parent
"""Where the found is kept, and the page that shows it."""
BAD = ("hung", "wrong", "leaked", "unclear")


def scenarios(kinds, seed, scale):
    """Every kind's, in random order: a long wait of one is another's time. Every second engine
    schedules ahead of the tokens, where it can (``ahead``)."""
    found = []
    for kind in kinds:
        rng = Random(f"{seed} {kind.name}")
        for _ in range(max(1, round(kind.scenarios * scale))):
            made = {"kind": kind.name, "streams": STREAMS, "ahead": len(found) % 2 == 0}
            found.append(made | kind.make(rng))
    Random(seed).shuffle(found)
    return found


def judge(kind, outcome, expected):
    """What became of an engine, in one word, and why."""
    if outcome["hung"]:
        return "hung", "no end within the bound"
    for request, tokens in outcome["tokens"].items():
        if tokens != expected[request][: len(tokens)]:
            return "wrong", f"request {request}: {tokens}"
    if outcome["left"]:
        return "leaked", str(outcome["left"])
    if outcome["shutdown"]:
        return "unclear", outcome["shutdown"]
    error = outcome["error"] or ("killed" if outcome["exit"] == -9 else "")
    if error:
        allowed = kind.ends or kind.may_end
        clear = allowed and re.search(allowed, error)
        return "error" if clear else "unclear", error
    if outcome["exit"]:
        return "unclear", f"exit status {outcome['exit']} without a word"
    whole = {r: tokens for r, tokens in outcome["tokens"].items() if r not in outcome["aborted"]}
    if any(len(tokens) != len(expected[r]) for r, tokens in whole.items()):
        return "wrong", "a request is short of tokens"
    if kind.ends and outcome["injected"]:
        return "unclear", "the engine did not notice"
    return "recovered", ""


def table(judged):
    """A row for each kind that was run; every fault that was put in counts as its engine did."""
    rows = {}
    for kind, outcome, verdict, why in judged:
        empty = {"kind": kind.name, "injected": 0, "recovered": 0, "error": 0, "seconds": []}
        row = rows.setdefault(kind.name, empty | dict.fromkeys(BAD, 0))
        row["injected"] += outcome["injected"]
        # What is bad counts where the engine did not live to see its fault, too.
        row[verdict] += outcome["injected"] or verdict in BAD
        if verdict == "error" and outcome["injected"]:
            row["seconds"].append(
                outcome["gone"] if outcome["failed"] is None else outcome["failed"]
            )
        if verdict in BAD:
            again = json.dumps(outcome["scenario"])
            row.setdefault("why", []).append(f"{why[:600]} [{outcome['log']}] {again}")
    for row in rows.values():
        seconds = row.pop("seconds")
        row["median_s"] = round(statistics.median(seconds), 1) if seconds else None
        row["longest_s"] = round(max(seconds), 1) if seconds else None
    return [rows[kind.name] for kind in KINDS if kind.name in rows]


def run(asked, *, parallel=2, each=lambda *_: None):
    """Run scenarios; (kind, outcome, verdict, why) of each."""
    from tests.faults import engine
    from tests.faults.rig import run_all

    by_name = {kind.name: kind for kind in KINDS}
    faultless = [{"kind": "", "streams": STREAMS} | scenario(own) for own in (False, True)]
    expected, judged = {}, []

    def done(outcome):
        found = outcome["scenario"]
        if not found["kind"]:
            assert not outcome["error"], outcome
            expected[found["own"]] = outcome["tokens"]
            engine.check_greedy(outcome["tokens"], sampling=not found["own"])
            return
        outcome["injected"] = len(outcome["faults"]) or ("filled" in found and 1)
        kind = by_name[found["kind"]]
        judged.append((kind, outcome, *judge(kind, outcome, expected[found["own"]])))
        each(*judged[-1])

    run_all(faultless + asked, parallel=parallel, each=done)
    return judged


def markdown(kept):
    """The table of README.md, of what faults.json holds."""
    rows = kept["rows"]
    injected = sum(row["injected"] for row in rows)
    found = f"{injected} faults of {len(rows)} kinds, seed {kept['seed']}; {kept['machine']}"
    heads = ["what was done", "injected", "recovered", "clear error", "after, median / longest"]
    heads += ["hung", "wrong", "leaked", "stock vLLM"]
    rule = "| --- | " + "--: | " * (len(heads) - 2) + "--: |"
    lines = [f"{found}, {kept['date']}.", "", f"| {' | '.join(heads)} |", rule]
    for row in rows:
        after = "" if row["median_s"] is None else f"{row['median_s']} / {row['longest_s']} s"
        cells = (row["injected"], row["recovered"], row["error"], after)
        counts = (*cells, row["hung"], row["wrong"], row["leaked"])
        counts += (stock.cell(kept["stock"].get(row["kind"], {})),)
        lines.append(f"| {row['kind']} | " + " | ".join(map(str, counts)) + " |")
    return "\n".join(lines)


def page(text, name, table):
    """README.md with this table of ``name``."""
    begin, end = f"<!-- {name}: generated -->", f"<!-- /{name} -->"
    before, rest = text.split(begin)
    return f"{before}{begin}\n\n{table}\n\n{end}{rest.split(end)[1]}"


def keep(name, kept, table):
    """Write ``name``'s .json, and its table into the page."""
    (KEPT / f"{name}.json").write_text(json.dumps(kept, indent=1) + "\n")
    file = KEPT / "README.md"
    file.write_text(page(file.read_text(), name, table))


def machine():
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return f"{os.cpu_count()} cores, {model[1] if model else 'unknown processor'}"


def in_stock(options):
    """(kind, its cell's counts) of each kind that stock vLLM can take."""
    names = [name for name in stock.KINDS if re.search(options.only, name)]
    yield from stock.run(names, options.seed, print)
    for row in clients.run(options.only, options.seed, options.scale, print, stock=True):
        yield row["kind"], row
    bombs.run(options.only, options.seed, options.scale, print, stock=True)


def main():
    """0: no fault was hung, wrong, leaked or unclear."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--scale", type=float, default=1.0, help="share of a whole run")
    parser.add_argument("--parallel", type=int, default=4, help="engines at once")
    parser.add_argument("--only", default="", metavar="PATTERN", help="kinds of such names")
    parser.add_argument("--stock", action="store_true", help="stock vLLM's column instead")
    parser.add_argument("--scenarios", metavar="JSON", help="these instead, such as a failed one")
    parser.add_argument("--keep", action="store_true", help="write faults.json and the page")
    options = parser.parse_args()
    began = time.monotonic()

    def each(kind, outcome, verdict, why):
        took = f"{time.monotonic() - began:7.1f} s {verdict:9} x{outcome['injected']}"
        print(took, f"{kind.name}: {why[:300]}", flush=True)

    kept = {"stock": {}} | json.loads((KEPT / "faults.json").read_text())
    if options.stock:
        for name, said in in_stock(options):
            print(f"{name}: {stock.cell(said)}", flush=True)
            kept["stock"][name] = said
            if options.keep:
                keep("faults", kept, markdown(kept))
        return 0
    kinds = [kind for kind in KINDS if re.search(options.only, kind.name)]
    asked = scenarios(kinds, options.seed, options.scale)
    if options.scenarios:
        asked = json.loads(options.scenarios)
    served = []
    if not options.scenarios:
        only, seed, scale = options.only, options.seed, options.scale
        for module in SERVED:
            served += module.run(only, seed, scale, lambda *said: print(*said, flush=True))
    rows = table(run(asked, parallel=options.parallel, each=each)) if asked else []
    rows += served
    sums = {key: sum(row[key] for row in rows) for key in ("injected", "recovered", "error", *BAD)}
    for row in rows:
        for why in row.pop("why", ()):
            print(f"{row['kind']}: {why}")
    put_in = {"kinds": sum(bool(row["injected"]) for row in rows)}
    print(f"SUMS {json.dumps(sums | put_in)}")
    if options.keep:
        if options.only:  # the others' rows stay
            others = {row["kind"]: row for row in kept["rows"]}
            others |= {row["kind"]: row for row in rows}
            names = [*(kind.name for kind in KINDS), *SERVED_KINDS]
            rows = [others[name] for name in names if name in others]
        today = time.strftime("%Y-%m-%d")
        found = {"seed": options.seed, "machine": machine(), "date": today, "rows": rows}
        found["stock"] = kept["stock"]
        keep("faults", found, markdown(found))
    return int(any(sums[key] for key in BAD))
