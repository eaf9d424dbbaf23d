"""What ``sipipe serve`` and ``doctor`` expect of other degrees, beside what was measured.

    python -m benchmarks.advice

Starts no engine: computes the loads of the kept results of :mod:`benchmarks.small`, greedy, on this
machine, which should be theirs. The advice is for prompts and outputs of 200 tokens.
"""

from __future__ import annotations

import json
from typing import Any

from benchmarks.harness import report
from benchmarks.make_model.checkpoint import make_model
from benchmarks.results import RESULTS
from benchmarks.serving import MODELS
from sipipe.cli.advice import on_host
from sipipe.cores import this_machine
from sipipe.tools.planner.models import load_model

STAGES = (1, 2)


def main() -> None:
    facts = load_model(str(make_model("llama", MODELS / "llama-bench", size="bench")))
    kept = json.loads((RESULTS / "small.json").read_text())
    measured = {
        (row["stages"], row["requests"]): row["SiPipe tok/s"]
        for row in kept["rows"]
        if row["sampling"] == "greedy"
    }
    rows: list[dict[str, Any]] = []
    for load in sorted({requests for _, requests in measured}):
        row: dict[str, Any] = {"requests": load}
        for stages in STAGES:
            ways = on_host(facts, "cpu", stages, this_machine(), load)
            row[f"--pp {stages} computed"] = next(c.throughput for c in ways if c.p == stages)
            row[f"--pp {stages} measured"] = measured[stages, load]
        for kind in ("computed", "measured"):
            row[f"1 / 2 {kind}"] = row[f"--pp 1 {kind}"] / row[f"--pp 2 {kind}"]
        rows.append(row)
    commit, date = kept["machine"]["commit"], kept["machine"]["date"]
    report(
        "advice",
        "SiPipe's tokens/s of few requests with one stage and with two, as serve computes them "
        "before anything has run, and measured",
        rows,
        note=f"llama bench, greedy; measured by benchmarks.small at {commit}, {date}",
    )


if __name__ == "__main__":
    main()
