"""Long prompts: time to the first token of one, and of several beside decoding sequences.

    python -m benchmarks.prefill MODEL [--pp 2]
    python -m benchmarks.prefill --profile deepseek-v3-8xh20,deepseek-v3-32xh20 --pp 1,4

With a model: SiPipe, whose chunks take equal times, SiPipe with vLLM's scheduler, whose chunks have
equal numbers of tokens, and stock vLLM with as many stages and with one. All hold an engine at the
same time and answer every load in turn. With a profile, of so many stages: SiPipe on emulated
devices (docs/emulation.md), beside chunks of equal numbers of tokens of several sizes; the best of
these is what somebody would have found who had searched. Efficiency is that of the first profile's
time, over so many times as many devices.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from benchmarks.emulate import emulate
from benchmarks.emulation.cluster import emulation
from benchmarks.harness import of_the_checkout, report
from benchmarks.in_turn import measured_in_turn, turn
from sipipe.errors import SiPipeError
from sipipe.tools.child import answer, measured

if "EMULATED_PROFILE" in os.environ:  # also in the engine's process, which imports this anew
    import benchmarks.emulation.engine  # noqa: F401

MODULE = "benchmarks.prefill"
DECODED = 16
"""Prompt tokens of the sequences that decode beside."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("model", nargs="?", default="", help="a model; not with --profile")
    add("--profile", default="", help="of emulated devices, each with its --pp")
    add("--pp", default="2")
    add("--lengths", default="2048,8192,16384", help="of prompts")
    add(
        "--beside",
        default="",
        help="PROMPTSxLENGTH+SEQUENCES, as in 1x8192+16: prompts beside decoding sequences",
    )
    add("--chunks", default="2048,4096,8192,16384,32768", help="equal ones, of emulated devices")
    add("--budget", type=int, default=32768, help="--max-num-batched-tokens of equal times")
    add("--repeat", type=int, default=3)
    add("--quick", action="store_true", help="one length, once")
    args = parser.parse_args()
    if args.quick:
        args.lengths, args.repeat, args.chunks = args.lengths.split(",")[0], 1, "8192"
    loads = [(1, int(length), 0) for length in args.lengths.split(",")]
    for beside in filter(None, args.beside.split(",")):
        prompts, rest = beside.split("x")
        length, decoding = rest.split("+")
        loads.append((int(prompts), int(length), int(decoding)))
    (emulated if args.profile else served)(args, loads)


def served(args: argparse.Namespace, loads: list[tuple[int, int, int]]) -> None:
    """A model, on this machine."""
    longest = max(length for _, length, _ in loads) + 512
    base = [args.model, "--max-model-len", str(longest), "--no-enable-prefix-caching"]
    base += ["--max-num-seqs", "64", "--kv-cache-memory-bytes", str(1 << 30)]
    staged = [*base, "--pipeline-parallel-size", args.pp]
    jobs: dict[str, dict[str, Any]] = {
        "equal times": {"argv": staged, "settings": {}},
        "equal tokens": {"argv": staged, "settings": {"scheduler": "vllm"}},
        "stock": {"argv": staged, "settings": None},
        "stock, one stage": {"argv": base, "settings": None},
    }
    more = {"loads": loads, "repeat": args.repeat}
    found = measured_in_turn({side: job | more for side, job in jobs.items()}, MODULE)
    rows = []
    for number, load in enumerate(loads):
        for side in jobs:
            rows.append({"load": named(load), "engine": side} | figures(found[side], number))
    report(
        f"prefill-pp{args.pp}",
        f"Long prompts, {Path(args.model).name}, {args.pp} stages",
        rows,
        note=f"TTFT: seconds to the first token, median of {args.repeat} and range; time per token: "
        "ms of the decoding sequences meanwhile; chunks of 2,048 tokens at most",
    )


def emulated(args: argparse.Namespace, loads: list[tuple[int, int, int]]) -> None:
    """Devices that only take time."""
    rows: list[dict[str, Any]] = []
    first: dict[str, float] = {}
    chunks = [int(chunk) for chunk in args.chunks.split(",")]
    profiles = args.profile.split(",")
    for profile, pp in zip(profiles, args.pp.split(","), strict=True):
        sides: dict[str, tuple[int, dict[str, Any]]] = {"equal times": (args.budget, {})}
        sides |= {f"{c} tokens": (c, {"scheduler": "vllm"}) for c in chunks}
        found = {
            side: emulated_engine(profile, int(pp), *how, loads) for side, how in sides.items()
        }
        for number, load in enumerate(loads):
            devices = int(profile.split("-")[-1].split("x")[0])
            each = {side: figures(one, number) for side, one in found.items()}
            best = min((s for s in each if s != "equal times"), key=lambda s: each[s]["ttft"])
            ours = each["equal times"]["ttft"]
            first.setdefault(named(load), devices * min(one["ttft"] for one in each.values()))
            row: dict[str, Any] = {"profile": profile, "stages": int(pp), "load": named(load)}
            row |= {"TTFT, s": round(ours, 3), "best equal chunk": best}
            row |= {f"x {c}": round(each[f"{c} tokens"]["ttft"] / ours, 3) for c in chunks}
            row["x best"] = round(each[best]["ttft"] / ours, 3)
            row["efficiency"] = round(first[named(load)] / devices / ours, 3)
            if load[2]:
                row["time per token p50 / p99"] = each["equal times"]["time per token p50 / p99"]
                row["of the best chunk"] = each[best]["time per token p50 / p99"]
            rows.append(row)
    report(
        "prefill-emulated",
        "Long prompts on emulated devices: equal times and equal numbers of tokens",
        rows,
        note="x N: how many times as long chunks of N tokens take; efficiency: of the first "
        "profile's best time, by devices; time per token in ms; data-sheet times (docs/emulation.md)",
    )


def emulated_engine(
    profile: str, pp: int, chunk: int, settings: dict[str, Any], loads: list[tuple[int, int, int]]
) -> dict[str, Any]:
    longest = max(length for _, length, _ in loads) + 4096
    with tempfile.TemporaryDirectory(prefix="sipipe-prefill-") as scratch:
        made = emulation(profile, pp, jitter=0.0)
        emulate(made, Path(scratch))
        argv = [scratch, "--load-format", "dummy", "--skip-tokenizer-init", "--enforce-eager"]
        argv += ["--max-model-len", str(longest), "--max-num-seqs", "128"]
        argv += ["--pipeline-parallel-size", str(pp), "--max-num-batched-tokens", str(chunk)]
        argv += ["--no-enable-prefix-caching"]
        cut = [stage.layers for stage in made.placement.stages]
        more = {"layers": cut, "cpu_sampling": "on", "cores": "off", "vocabulary": "last"}
        job = {"argv": argv, "settings": settings | more, "loads": loads, "repeat": 1}
        return measured(f"{profile} in {pp} stages, {chunk}", job, of_the_checkout(MODULE))


def named(load: tuple[int, int, int]) -> str:
    prompts, length, decoding = load
    said = f"{prompts} x {length:,}"
    return f"{said} beside {decoding}" if decoding else said


def figures(found: dict[str, Any], number: int) -> dict[str, Any]:
    one = found["loads"][number]
    ttft = [statistics.median(times) for times in one["ttft"]]
    middle = statistics.median(ttft)
    row = {"ttft": middle, "TTFT": f"{middle:.2f} ({min(ttft):.2f}-{max(ttft):.2f})"}
    if between := sorted(one["between"]):
        p50, p99 = (1e3 * between[int(q * (len(between) - 1))] for q in (0.5, 0.99))
        row["time per token p50 / p99"] = f"{p50:.1f} / {p99:.1f}"
    return row


class Driven:
    """An engine whose outputs are timed as they come."""

    def __init__(self, job: dict[str, Any]) -> None:
        from benchmarks.measure import Job, started

        job = {"sampling": [], "requests": 1, "prompt_tokens": 1, "tokens": 1} | {
            key: job[key] for key in ("argv", "settings")
        }
        self._engine = started(Job(**job)).llm_engine
        self._words = range(3, self._engine.vllm_config.model_config.get_vocab_size())
        self._chooser = random.Random(0)
        self._asked = 0
        self.came: dict[str, list[float]] = {}
        """When tokens of a request came."""

    def ask(self, length: int, tokens: int) -> str:
        from vllm import SamplingParams

        self._asked += 1
        name = str(self._asked)
        prompt = {"prompt_token_ids": self._chooser.choices(self._words, k=length)}
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        self.came[name] = []
        self._engine.add_request(name, prompt, params)
        return name

    def step(self) -> None:
        outputs, now = self._engine.step(), time.perf_counter()
        for output in outputs:
            came = self.came[output.request_id]
            came += [now] * (len(output.outputs[0].token_ids) - len(came))

    def run(self, prompts: int, length: int, decoding: int) -> tuple[list[float], list[float]]:
        """Seconds to the first token of each prompt, and between tokens of what decodes beside."""
        beside = [self.ask(DECODED, 4000) for _ in range(decoding)]
        while any(len(self.came[name]) < 16 for name in beside):
            self.step()
        began = time.perf_counter()
        asked = [self.ask(length, 1) for _ in range(prompts)]
        while not all(self.came[name] for name in asked):
            self.step()
        first = [self.came[name][0] - began for name in asked]
        between = [
            later - earlier
            for name in beside
            for earlier, later in zip(self.came[name], self.came[name][1:], strict=False)
            if later > began
        ]
        self._engine.abort_request(beside)
        while self._engine.has_unfinished_requests():
            self.step()
        return first, between


def driven(job: dict[str, Any]) -> dict[str, Any]:
    """The other end: each load so often, behind the first of them a few times."""

    @contextmanager
    def in_turn() -> Iterator[None]:
        how: AbstractContextManager[None] = turn(*job["turn"]) if "turn" in job else nullcontext()
        with how:
            yield

    with in_turn():
        engine = Driven(job)
        for _ in range(4):
            engine.run(*job["loads"][0])
    found = []
    for load in job["loads"]:
        ttft, between = [], []
        for _ in range(job["repeat"]):
            with in_turn():
                first, times = engine.run(*load)
            ttft.append(first)
            between += times
        found.append({"ttft": ttft, "between": between})
    return {"loads": found}


if __name__ == "__main__":
    try:
        answer(driven) if all(map(str.isdigit, sys.argv[1:])) else main()
    except SiPipeError as error:
        sys.exit(str(error))
