"""The benchmarks that there are: the campaign's, those that are only asked for, and the canary's.

What each is for stands in its own module. :mod:`benchmarks.campaign` runs them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Benchmark(NamedTuple):
    """A command of the campaign."""

    name: str
    words: str
    """``NAME OPTIONS`` of ``python -m benchmarks.NAME OPTIONS``; MODEL stands for the model, HEAD for its
    draft head, INT8 for the model in 8 bits."""
    results: tuple[str, ...]
    """The files that it writes and that are kept."""
    minutes: float
    """About how long it takes on two cores with nothing else on them."""
    why_not: Callable[[], str] = str
    """Returns why it cannot be measured on this machine; nothing: it can."""


def _no_namespaces() -> str:
    # Only where it is asked: two hosts are made by a part of the tests.
    from benchmarks.hosts import why_not_here

    return why_not_here()


CAMPAIGN_OF = (
    Benchmark("served", "served MODEL", ("served",), 75),
    Benchmark(
        "drafts-of-a-head",
        "speculation MODEL --head HEAD --pp 2 --requests 1,8,32 --kinds chat --sampling greedy "
        "--tokens 64 --repeat 1 --engines 2 --name speculation-head",
        ("speculation-head",),
        22,
    ),
    Benchmark(
        "drafts-emulated",
        "speculation --profile llama-70b-8xh100 --pp 4,8 --requests 32,256 --engines 2 "
        "--name speculation-emulated",
        ("speculation-emulated",),
        8,
    ),
    Benchmark("ablation", "emulate --ablate --minutes 70", ("emulation-ablation",), 65),
    Benchmark("start", "start --pp 1,2 --repeat 2", ("start",), 25),
    Benchmark(
        "int8",
        "served MODEL --int8 INT8 --rows sipipe,sipipe-one --loads short --sampling greedy "
        "--no-rates --engines 2 --name served-int8",
        ("served-int8",),
        12,
    ),
    Benchmark("timeline", "timeline MODEL", ("timeline",), 8),
    Benchmark("sampling", "sampling --only strategies", ("sampling",), 2),
    Benchmark("sampling-sizes", "sampling --only sizes", ("sampling-sizes",), 1),
    Benchmark("sampling-cliffs", "sampling --only cliffs", ("sampling-cliffs",), 2),
    Benchmark("sampling-alone", "sampling_alone", ("sampling-alone",), 2),
    Benchmark("stage", "stage", ("stage", "stage-executors"), 2),
    Benchmark("transfer", "transfer", ("transfer",), 1),
    Benchmark("trace", "trace", ("trace",), 1),
    Benchmark("prompts", "prefill MODEL --quick", ("prefill-pp2",), 20),
    Benchmark(
        "prompts-emulated",
        "prefill --profile deepseek-v3-32xh200 --pp 8 --chunks 2048,8192 --repeat 2 "
        "--lengths 16384 --tpot-target 250",
        ("prefill-emulated-pp8",),
        5,
    ),
    Benchmark(
        "drafts",
        "speculation MODEL --pp 2 --requests 1,8 --sampling greedy --repeat 1 --tokens 64 "
        "--engines 2 --no-stock",
        ("speculation-pp2",),
        12,
    ),
    Benchmark(
        "drafts-many",
        "speculation MODEL --pp 2 --requests 32 --kinds chat --sampling greedy --repeat 1 "
        "--tokens 48 --no-stock --engines 3 --name speculation-pp2-32",
        ("speculation-pp2-32",),
        9,
    ),
    Benchmark(
        "scheduling",
        "scheduling",
        ("scheduling-summary", "scheduling-prompts", "scheduling-beside", "scheduling-seeds"),
        8,
    ),
    Benchmark("emulation", "emulation", ("emulation", "emulation-device"), 12),
    Benchmark("planner", "planner", ("planner-findings", "planner-published"), 1),
    Benchmark("scheduler-rows", "scheduler_rows", ("scheduler-rows",), 2),
)
"""What README quotes comes first, so that a campaign that is stopped has it."""

ASKED = (
    Benchmark("peers", "peers MODEL", ("peers",), 30),
    Benchmark(
        "hosts",
        "hosts --delays 0,20 --inflight 3 --tokens 32",
        ("hosts",),
        8,
        why_not=_no_namespaces,
    ),
)
"""What is measured only if it is named: it installs programs of others, or needs root."""

CANARY_OF = (
    Benchmark("served", "served MODEL --quick --loads short", ("served",), 7),
    Benchmark("start", "start --quick --sides 0,1", ("start",), 6),
    Benchmark("sampling", "sampling --only strategies", ("sampling",), 2),
    Benchmark(
        "prompts",
        "prefill MODEL --lengths 2048,8000 --beside none --repeat 1 --sides 0,2",
        ("prefill-pp2",),
        6,
    ),
    Benchmark(
        "drafts",
        "speculation MODEL --quick --pp 2 --kinds copy --tokens 64",
        ("speculation-pp2",),
        3,
    ),
)


class Ratio(NamedTuple):
    """A ratio that the canary watches; figures are written as in a comment of a page."""

    what: str
    figure: str
    beside: str = ""
    """What the figure is divided by; empty: it is a ratio."""


_SERVED = "served: of stock with the same stages | load=short; rate=at once; engine=sipipe; "
RATIOS = (
    Ratio("64 greedy requests, of stock", f"{_SERVED}sampling=greedy; requests=64"),
    Ratio("64 sampled requests, of stock", f"{_SERVED}sampling=chat; requests=64"),
    Ratio("one greedy request, of stock", f"{_SERVED}sampling=greedy; requests=1"),
    Ratio(
        "a warm start, of stock",
        "start: total | stages=2; side=sipipe serve; caches=warm",
        "start: total | stages=2; side=stock; caches=warm",
    ),
    Ratio(
        "copying with drafts, of without",
        "speculation-pp2: with / without | kind=copy; sampling=greedy; requests=1",
    ),
    Ratio("8,000 tokens of prompt, of stock in chunks", "prefill-pp2: of equal times | load=1 x 8,000; engine=stock, chunks of 2,048"),
    Ratio("all sampling parameters, in reads", "sampling: reads | strategy=all"),
)  # fmt: skip
