"""What each part was built to reach, and whether the kept figures do: the table of docs/benchmarks.md.

A goal that is changed once figures are known stays here, with what it was (``was``), and one that is
given up in :data:`GIVEN_UP`.
"""

from __future__ import annotations

from typing import NamedTuple


class Goal(NamedTuple):
    """``figure`` and ``beside`` as a comment of a page has them (:mod:`benchmarks.results`)."""

    part: str
    goal: str
    figure: str
    most: float | None = None
    least: float | None = None
    beside: str = ""
    """Of the figure that the first one is divided by."""
    unit: str = ""
    was: str = ""

    def met(self, value: float) -> bool:
        return (self.most is None or value <= self.most) and (
            self.least is None or value >= self.least
        )


def _bench(sampling: str, engine: str) -> str:
    return f"bench: tok/s | sampling={sampling}; engine={engine}"


def _hosts(column: str, requests: int, delay: int) -> str:
    chosen = f"side=sipipe; in flight=3; requests={requests}; delay ms={delay}"
    return f"hosts: {column} | {chosen}"


def _drafts(kind: str, requests: int) -> str:
    chosen = f"kind={kind}; sampling=greedy; requests={requests}"
    return f"speculation-pp1-1-4-8-32: with / without | {chosen}"


_IDLE = "emulation: worst stage, % | pipeline="
_SPARSE = f"{_IDLE}deepseek-v2.5-8xh100 --pp"
_DENSE = f"{_IDLE}llama-70b-8xh100 --pp"
_EMULATED = "emulated idle time, which was all and is what SiPipe adds to an uneven cut"
_SLOTS = "slots against others"

GOALS = (
    Goal(
        "two stages, greedy",
        "1.4 × stock's two stages",
        _bench("greedy", "sipipe"),
        least=1.4,
        beside=_bench("greedy", "stock"),
        unit="tok/s",
    ),
    Goal(
        "two stages, all parameters, vocabulary of 151,936, bfloat16",
        "12 × stock's two stages",
        _bench("all", "sipipe"),
        least=12,
        beside=_bench("all", "stock"),
        unit="tok/s",
    ),
    Goal("sampling, greedy", "0.025 ms a token", "sampling: float32 | strategy=greedy", most=0.025),
    Goal("sampling, temperature", "0.05 ms", "sampling: float32 | strategy=temperature", most=0.05),
    Goal("sampling, top-p", "0.15 ms", "sampling: float32 | strategy=top-p", most=0.15),
    Goal("sampling, all parameters", "0.07 ms", "sampling: float32 | strategy=all", most=0.07),
    Goal("sampling, all parameters", "250 × stock", "sampling: ratio | strategy=all", least=250),
    Goal(
        "[requests that cost many times a plain one]"
        "(../benchmarks/results/README.md#requests-that-could-cost-many-times-a-plain-one)",
        "a limit each",
        "sampling-cliffs: count | met=yes",
        least=1,
        beside="sampling-cliffs: count | met=yes|no",
        unit="cases",
    ),
    Goal(
        "preparation in the device thread's way, last stage, one sequence",
        "a third of vLLM's own",
        "stage: ratio | stage=last; B=1",
        most=1 / 3,
    ),
    Goal(
        "the same, first stage, 128 sequences",
        "a third",
        "stage: ratio | stage=first; B=128",
        most=1 / 3,
    ),
    Goal(
        "the same, last stage",
        "a third",
        "stage: ratio | stage=last; B=128",
        most=1 / 3,
        was="launching thread, last of 4 stages: 1 × vLLM's",
    ),
    Goal(
        "the same, first stage, copied to the device as on GPUs",
        "a third",
        "stage: copied, ratio | stage=first; B=128",
        most=1 / 3,
    ),
    Goal(
        "20 ms of device, 3 ms of preparation",
        "20.4 ms an iteration",
        "stage-executors: iteration ms | prepare ms=3; sets of input buffers=2",
        most=20.4,
    ),
    Goal(
        "a message of 4 KB to two readers, p50",
        "40 µs",
        "channels-dispatch: p50 µs | channel=SiPipe dispatch",
        most=40,
    ),
    Goal(
        "the same, p99", "250 µs", "channels-dispatch: p99 µs | channel=SiPipe dispatch", most=250
    ),
    Goal(
        "hidden states, 32 rows: sender blocked",
        "50 µs",
        "transfer: blocked p50 µs | path=sipipe shm; B=32",
        most=50,
    ),
    Goal(
        "the same: usable after the copy",
        "100 µs",
        "transfer: beyond copy p50 µs | path=sipipe shm; B=32",
        most=100,
    ),
    Goal(
        "two hosts, 32 requests, no delay; layers 7, 1 against even ones",
        "1.2 × stock",
        _hosts("of stock", 32, 0),
        least=1.2,
    ),
    Goal("two hosts, 32 requests, 20 ms", "2 × stock", _hosts("of stock", 32, 20), least=2),
    Goal(
        "two hosts, one request, 20 ms",
        "2.1 delays a token",
        _hosts("delays a token", 1, 20),
        most=2.1,
    ),
    Goal(
        "simulated idle time, worst run",
        "below vLLM's rule",
        f"scheduling-summary: vLLM, worst | {_SLOTS}=idle %",
        most=1,
        unit="×",
    ),
    Goal(
        "simulated idle time, worst run",
        "below token throttling's",
        f"scheduling-summary: token throttling, worst | {_SLOTS}=idle %",
        most=1,
        unit="×",
    ),
    Goal(
        "the same with the engine's p + 1 slots, two stages, median",
        "below token throttling's",
        "scheduling-seeds: idle %, slots | stages=2",
        most=1,
        beside="scheduling-seeds: idle %, token throttling | stages=2",
        unit="%",
    ),
    Goal(
        "simulated first tokens, median, worst run",
        "1.03 × vLLM's rule",
        f"scheduling-summary: vLLM, worst | {_SLOTS}=TTFT p50",
        most=1.03,
        unit="×",
    ),
    Goal(
        "recording a trace",
        "1 % of 10 ms",
        "trace: of a 10 ms iteration (%) | recording=file",
        most=1,
        unit="%",
    ),
    Goal(
        "a report of 100,000 iterations",
        "30 s",
        "trace-report: seconds | step=report in all",
        most=30,
        unit="s",
    ),
    Goal(
        "a trace's parts against wall time",
        "within 1 %",
        "trace-served-parts: sum / wall | stage=0",
        least=0.99,
        most=1.01,
    ),
    Goal(
        "emulated, 4 stages: idle by SiPipe",
        "3 %",
        f"{_DENSE} 4 --slow-motion 2; requests=512",
        most=3,
        unit="%",
        was=_EMULATED,
    ),
    Goal(
        "the same, all parameters, one sampler",
        "3 %",
        f"{_SPARSE} 4 --sampling all --samplers 1",
        most=3,
        unit="%",
        was=_EMULATED,
    ),
    Goal(
        "emulated, 8 stages",
        "5 %",
        f"{_DENSE} 8 --slow-motion 4; requests=512",
        most=5,
        unit="%",
        was=_EMULATED,
    ),
    Goal(
        "emulated, drawn on the device",
        "3 %",
        "emulation-device: worst stage, % | "
        "pipeline=llama-70b-8xh100 --pp 4 --slow-motion 2 --draws device; requests=512",
        most=3,
        unit="%",
    ),
    Goal(
        "output projection shared out",
        "1.25 × the layer cut",
        "serving-bench-pp2: greedy tok/s | engine=shared output projection",
        least=1.25,
        beside="serving-bench-pp2: greedy tok/s | engine=layers cut by cost",
        unit="tok/s",
    ),
    Goal(
        "planner: one CPU configuration from another, worst",
        "within 20 %",
        "planner-cpu: error % | fitted to=p 1; predicted=p 2; microbatch=16",
        least=-20,
        most=20,
        unit="%",
    ),
    Goal(
        "warm start, one stage, `sipipe serve`",
        "0.4 × stock's",
        "start: total | stages=1; side=sipipe serve; caches=warm",
        beside="start: total | stages=1; side=stock; caches=warm",
        most=0.4,
        unit="s",
    ),
    Goal(
        "the same, two stages",
        "0.4 × stock's",
        "start: total | stages=2; side=sipipe serve; caches=warm",
        beside="start: total | stages=2; side=stock; caches=warm",
        most=0.4,
        unit="s",
    ),
    Goal(
        "the same, `vllm serve` with SiPipe",
        "0.4 × stock's",
        "start: total | stages=2; side=vllm serve, SiPipe; caches=warm",
        beside="start: total | stages=2; side=stock; caches=warm",
        most=0.4,
        unit="s",
    ),
    Goal(
        "the same, one stage",
        "0.4 × stock's",
        "start: total | stages=1; side=vllm serve, SiPipe; caches=warm",
        beside="start: total | stages=1; side=stock; caches=warm",
        most=0.4,
        unit="s",
    ),
    Goal(
        "cold start, two stages",
        "1 × stock's",
        "start: total | stages=2; side=sipipe serve; caches=cold",
        beside="start: total | stages=2; side=stock; caches=cold",
        most=1,
        unit="s",
    ),
    Goal(
        "the same, one stage",
        "1 × stock's",
        "start: total | stages=1; side=sipipe serve; caches=cold",
        beside="start: total | stages=1; side=stock; caches=cold",
        most=1,
        unit="s",
    ),
    Goal(
        "8,000 tokens of prompt, two stages, one repetition",
        "stock takes 1.1 × as long",
        "prefill-pp2: of equal times | load=1 x 8,000; engine=stock",
        least=1.1,
        unit="×",
    ),
    Goal(
        "drafts, one stage, one request, copying",
        "2 × without",
        _drafts("copy", 1),
        least=2,
        unit="×",
    ),
    Goal(
        "the same, editing",
        "1.6 × without",
        _drafts("edit", 1),
        least=1.6,
        unit="×",
    ),
    Goal("the same, JSON", "1.4 × without", _drafts("json", 1), least=1.4, unit="×"),
    Goal(
        "drafts, one stage, 32 requests, copying",
        "0.99 × without",
        _drafts("copy", 32),
        least=0.99,
        unit="×",
    ),
    Goal(
        "drafts, one stage, 32 requests, free chat",
        "0.99 × without",
        _drafts("chat", 32),
        least=0.99,
        unit="×",
    ),
)

GIVEN_UP = (  # with their benchmarks, in c2d772b
    "served not slower with overlap",
    "64 at once, 1.4 × stock's tokens by the scheduler alone",
)
