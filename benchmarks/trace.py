"""What recording costs, and how long a report takes.

    python -m benchmarks.trace              # make bench-trace
    python -m benchmarks.trace --quick

Three tables: the price of one record; a worker's loop with and without recording, in turns, so that
a noisy machine slows both; a report of 100,000 iterations of 4 stages (10,000 with ``--quick``).
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
from benchmarks.made_up_trace import Example, write_example
from sipipe.observe.format import Header
from sipipe.observe.live import LivePage, PageHeader
from sipipe.observe.phases import Phase
from sipipe.observe.recorder import Recorder, open_recorder
from sipipe.tools.report.export import write_perfetto
from sipipe.tools.report.reader import read_trace
from sipipe.tools.report.render import render
from sipipe.tools.report.summary import Run

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


def loop(recorder: Recorder, matrix: np.ndarray, iterations: int) -> tuple[float, float]:
    """Wall and CPU seconds of a worker that multiplies matrices and records its phases."""
    now, record = time.monotonic_ns, recorder.record
    wall, cpu = time.perf_counter(), time.process_time()
    for i in range(iterations):
        start = now()
        record(Phase.WAIT_SCHEDULING, i, i % 3, start, start, 64, 64)
        record(Phase.PREPARE, i, i % 3, start, now(), 64, 64)
        record(Phase.WAIT_HIDDEN, i, i % 3, start, now(), 64, 64)
        begun = now()
        matrix @ matrix
        ended = now()
        record(Phase.FORWARD, i, i % 3, begun, ended, 64, 64)
        record(Phase.LOGITS, i, i % 3, ended, now(), 64, 64)
    return time.perf_counter() - wall, time.process_time() - cpu


def worker_rows(base: Path, page: LivePage, quick: bool) -> list[dict[str, object]]:
    """The loop with each recorder, in turns."""
    matrix = np.random.default_rng(0).standard_normal((512, 512), np.float32)
    found: dict[str, list[tuple[float, float]]] = {}
    made = {name: make() for name, make in recorders(base / "loop", page).items()}
    iterations = 100
    for _ in range(8 if quick else 40):
        for name, recorder in made.items():
            found.setdefault(name, []).append(loop(recorder, matrix, iterations))
    for recorder in made.values():
        recorder.close()
    rows: list[dict[str, object]] = []
    for name, times in found.items():
        # Each turn against its own neighbour without recording: the machine's mood cancels out.
        ratio = np.median([(a[1] / b[1]) for a, b in zip(times, found["off"], strict=True)])
        wall, cpu = np.median(times, axis=0)
        rows.append(
            {
                "recording": name,
                "iteration (ms)": wall / iterations * 1e3,
                "CPU (ms)": cpu / iterations * 1e3,
                "CPU cost (%)": (ratio - 1) * 100,
            }
        )
    return rows


def report_rows(base: Path, iterations: int) -> list[dict[str, object]]:
    """Seconds of each step from the files to the page."""
    spec = Example(iterations=iterations, inflight=5)
    write_example(base, spec)
    began = time.perf_counter()
    trace = read_trace(base)
    read = time.perf_counter()
    run = Run(trace)
    accounted = time.perf_counter()
    page = render([run])
    rendered = time.perf_counter()
    perfetto = base / "perfetto.json.gz"
    slices = write_perfetto(run, perfetto)
    exported = time.perf_counter()
    records = sum(len(p.records) for p in trace.processes)
    return [
        {"step": "read", "seconds": read - began, "size": f"{records:,} records"},
        {"step": "account", "seconds": accounted - read, "size": f"{spec.stages} stages"},
        {"step": "page", "seconds": rendered - accounted, "size": f"{len(page) / 1e6:.1f} MB"},
        {
            "step": "report in all",
            "seconds": rendered - began,
            "size": f"{iterations:,} iterations",
        },
        {"step": "Perfetto export", "seconds": exported - rendered, "size": f"{slices:,} slices"},
    ]


def main() -> None:
    """Run all three."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trace")
    parser.add_argument("--quick", action="store_true", help="a tenth of the work")
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
        report(
            "trace",
            "A worker's loop with and without recording",
            worker_rows(base, page, quick),
            note="matrix product of 512 x 512 as the forward; in turns, median of ratios",
            file="trace-loop",
        )
        report(
            "trace",
            "From trace files to the page",
            report_rows(base / "report", 10_000 if quick else 100_000),
            file="trace-report",
        )
    finally:
        page.close()
        shutil.rmtree(base)


if __name__ == "__main__":
    main()
