"""What recording costs: the price of one record, and its share of an iteration.

python -m benchmarks.trace [--quick]    # make bench-trace
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.harness import report
from sipipe.observe.format import Header
from sipipe.observe.live import LivePage, PageHeader
from sipipe.observe.phases import Phase
from sipipe.observe.recorder import Recorder, open_recorder

PHASES = (
    Phase.WAIT_SCHEDULING,
    Phase.PREPARE,
    Phase.WAIT_HIDDEN,
    Phase.FORWARD,
    Phase.LOGITS,
)
"""What the last stage records for each iteration: no process records more."""


def recorders(base: Path, page: LivePage) -> dict[str, Callable[[], Recorder]]:
    """The recorders to compare, by name."""
    return {
        "off": lambda: open_recorder(None, Header(role="stage")),
        "file": lambda: open_recorder(base / "file", Header(role="stage", index=1)),
        "file and live page": lambda: open_recorder(
            base / "both", Header(role="stage", index=1), page.writer("stage", 1)
        ),
        "live page": lambda: open_recorder(
            None, Header(role="stage", index=1), page.writer("stage", 1)
        ),
    }


def price(make: Callable[[], Recorder], rounds: int) -> float:
    """Median CPU seconds of one iteration's records, in loops of 1,000 iterations.

    Between two loops the spiller gets the time that a real engine would leave it.
    """
    recorder = make()
    times = []
    at = 0
    for _ in range(rounds):
        began = time.thread_time()
        for _ in range(1000):
            at += 1
            now = at * 1_000_000
            for number, phase in enumerate(PHASES):
                start = now + number * 1000
                recorder.record(phase, at, at % 3, start, start + 900, 64, 64)
        times.append(time.thread_time() - began)
        time.sleep(0.3)
    recorder.close()
    return float(np.median(times)) / 1000


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trace")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    quick = parser.parse_args().quick
    base = Path(tempfile.mkdtemp(prefix="sipipe-bench-trace-"))
    page = LivePage.create(PageHeader(stages=2, samplers=0, inflight=3))
    try:
        rows = []
        for name, make in recorders(base / "price", page).items():
            seconds = price(make, 8 if quick else 20)
            rows.append(
                {
                    "recording": name,
                    "one iteration (µs)": seconds * 1e6,
                    "a record (ns)": seconds / len(PHASES) * 1e9,
                    "of a 10 ms iteration (%)": seconds / 10e-3 * 100,
                }
            )
        report(
            "trace",
            "What one record costs (CPU time of the recording thread)",
            rows,
            note=f"{len(PHASES)} records an iteration",
        )
    finally:
        page.close()
        shutil.rmtree(base)


if __name__ == "__main__":
    main()
