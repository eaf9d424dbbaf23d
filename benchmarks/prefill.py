"""Long prompts: time to the first token of one, and of several beside decoding sequences.

    python -m benchmarks.prefill MODEL [--pp 2] [--quick]
    python -m benchmarks.prefill --profile deepseek-v3-32xh200,deepseek-v3-64xh200 --pp 4,8 [--quick]

With a model: SiPipe, whose chunks take equal times, and stock vLLM with as many stages and with one.
Stock's stages wait for one another where a prompt is one chunk, as with vLLM's default on CPUs, so there
is a side with smaller ones, too. All hold an engine at the same time and answer every load in turn.

With a profile, of so many stages: SiPipe on emulated devices (docs/emulation.md), beside chunks of equal
numbers of tokens of several sizes; the best of these is what somebody would have found who had searched.
Efficiency is that of all devices: what the stages work if the prompt is one chunk, over the stages, over
the time to the first token.

A prompt of a million tokens takes minutes, in each of six engines. So prompts alone are emulated in
quick motion: devices take a part of their time, and figures are multiplied by as much, with
what SiPipe's processes take. Beside decoding sequences devices take their own time.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.emulate import emulate
from benchmarks.emulation.cluster import Emulation, emulation
from benchmarks.emulation.profile import Profile
from benchmarks.harness import of_the_checkout, report, served_dtype
from benchmarks.in_turn import measured_in_turn
from benchmarks.pictures import PICTURES
from benchmarks.turns import turn
from sipipe.errors import SiPipeError
from sipipe.tools.child import answer, measured

if "EMULATED_PROFILE" in os.environ:  # also in the engine's process, which imports this anew
    import benchmarks.emulation.engine  # noqa: F401

MODULE = "benchmarks.prefill"
BETWEEN = "time per token p50 / p99"
DECODED = 16
"""Prompt tokens of the sequences that decode beside."""
LONG = {"served": 4096, "emulated": 1 << 17}
"""Tokens from which on a prompt is measured once."""
CHUNK = 2048
"""Tokens of stock's smaller chunks."""
WARM = 16384
"""Tokens of the prompts, at most, from which an engine learns what chunks take."""
Prompts = tuple[int, int, int]
"""How many at once, their tokens, and decoding sequences beside them."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("model", nargs="?", default="", help="a model; not with --profile")
    add("--profile", default="", help="of emulated devices, each with its --pp")
    add("--pp", default="2")
    lengths = "of prompts (default: 2048,8000,16000; emulated: to 1,000,000)"
    add("--lengths", default="", help=lengths)
    add("--beside", help="PROMPTSxLENGTH+SEQUENCES: prompts beside decoding sequences (default: "
        "1x8000+16; emulated: 4x131072+64; none: nothing)")  # fmt: skip
    add("--chunks", default="2048,4096,8192,16384,32768", help="equal ones, of emulated devices")
    add("--budget", type=int, default=32768, help="--max-num-batched-tokens of equal times")
    add("--tpot-target", type=float, default=0.0, help="beside decodes also with tpot_target_ms")
    add("--quick-motion", type=float, default=4.0, help="of prompts alone (default: 4)")
    add("--repeat", type=int, default=3, help=f"of shorter prompts than {LONG} (default: 3)")
    add("--sides", default="0,1,2,3", metavar="LIST", help="of a model's rows, by number (all)")
    add("--quick", action="store_true", help="two lengths; emulated: the first profile, two chunks")
    args = parser.parse_args()
    if args.beside is None:
        args.beside = "4x131072+64" if args.profile else "1x8000+16"
    args.lengths = args.lengths or (
        "16384,131072,524288,1000000" if args.profile else "2048,8000,16000"
    )
    if args.quick:
        args.chunks, args.repeat = "2048,8192", 2
        args.profile, args.pp = args.profile.split(",")[0], args.pp.split(",")[0]
        if not args.profile:
            args.lengths = "2048,8000"
    alone = [(1, int(length), 0) for length in args.lengths.split(",")]
    beside = []
    for load in args.beside.split(",") if args.beside != "none" else []:
        prompts, rest = load.split("x")
        length, decoding = rest.split("+")
        beside.append((int(prompts), int(length), int(decoding)))
    (emulated if args.profile else served)(args, alone, beside)


def served(args: argparse.Namespace, alone: Sequence[Prompts], beside: Sequence[Prompts]) -> None:
    """A model, on this machine."""
    loads = [*alone, *beside]
    longest = max(length for _, length, _ in loads) + 64
    base = [args.model, "--max-model-len", str(longest), "--no-enable-prefix-caching"]
    base += ["--max-num-seqs", "64", "--kv-cache-memory-bytes", str(1 << 29)]
    base += ["--dtype", served_dtype()]
    staged = [*base, "--pipeline-parallel-size", args.pp]
    jobs: dict[str, dict[str, Any]] = {
        "equal times": {"argv": staged, "settings": {}},
        "stock": {"argv": staged, "settings": None},
        f"stock, chunks of {CHUNK:,}": {
            "argv": [*staged, "--max-num-batched-tokens", str(CHUNK)],
            "settings": None,
        },
        "stock, one stage": {"argv": base, "settings": None},
    }
    jobs = {side: jobs[side] for side in [list(jobs)[int(n)] for n in args.sides.split(",")]}
    more = {"loads": loads, "repeat": args.repeat, "long": LONG["served"]}
    found = measured_in_turn({side: job | more for side, job in jobs.items()}, MODULE)
    rows = []
    title = f"Long prompts, {Path(args.model).name}, {args.pp} stages"
    for number, load in enumerate(loads):
        of = {side: figures(found[side], number) for side in jobs}
        for side, row in of.items():
            row["of equal times"] = round(row["ttft"] / of["equal times"]["ttft"], 2)
            rows.append(
                {"load": named(load), "engine": side} | row | {BETWEEN: row.get(BETWEEN, "")}
            )
    columns = ["load", "engine", "TTFT", "of equal times", "prompt tokens/s"]
    path = report(
        f"prefill-pp{args.pp}",
        title,
        rows,
        note="TTFT: seconds to the first token, median and range; time per token: ms of the decoding "
        "sequences meanwhile; of equal times: how many times as long; --max-num-batched-tokens is "
        "vLLM's default unless chunks are named",
        columns=columns + ([BETWEEN] if beside else []),
    )
    drawn(path, title, [row for row in rows if "beside" not in row["load"]])


def drawn(path: Path, title: str, rows: list[dict[str, Any]]) -> None:
    """A picture of one prompt's figures, beside the table's file."""
    picture = path.with_suffix(".svg")
    picture.write_text(PICTURES["lengths"](title, rows))
    print(f"written to {picture}")


def emulated(args: argparse.Namespace, alone: Sequence[Prompts], beside: Sequence[Prompts]) -> None:
    """Devices that only take time."""
    rows: list[dict[str, Any]] = []
    lines: list[dict[str, Any]] = []
    chunks = [int(chunk) for chunk in args.chunks.split(",")]
    for profile, pp in zip(args.profile.split(","), args.pp.split(","), strict=True):
        made = emulation(profile, int(pp), jitter=0.0)
        sides: dict[str, tuple[int, dict[str, Any]]] = {"equal times": (args.budget, {})}
        sides |= {f"{c} tokens": (c, {"scheduler": "vllm"}) for c in chunks}
        found: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
        for side, how in sides.items():
            for loads, quick in ((alone, args.quick_motion), (beside, 1.0)):
                if loads:
                    one = emulated_engine(made, *how, loads, quick, args.repeat)
                    found[side] += [figures(one, n, quick) for n in range(len(loads))]
        if beside and args.tpot_target:
            held = {"microbatches": {"tpot_target_ms": args.tpot_target}}
            one = emulated_engine(made, args.budget, held, beside, 1.0, args.repeat)
            targeted = [figures(one, number) for number in range(len(beside))]
        for number, load in enumerate([*alone, *beside]):
            each = {side: one[number] for side, one in found.items()}
            best = min((s for s in each if s != "equal times"), key=lambda s: each[s]["ttft"])
            ours = each["equal times"]["ttft"]
            row: dict[str, Any] = {"profile": profile, "stages": int(pp), "load": named(load)}
            row |= {"TTFT, s": round(ours, 3), "best equal chunk": best}
            row |= {f"x {c}": round(each[f"{c} tokens"]["ttft"] / ours, 3) for c in chunks}
            row["x best"] = round(each[best]["ttft"] / ours, 3)
            if load[2]:
                row[BETWEEN] = each["equal times"][BETWEEN]
                row["of the best chunk"] = each[best][BETWEEN]
                if args.tpot_target:
                    now = targeted[number - len(alone)]
                    row["target, ms"] = args.tpot_target
                    row["TTFT, s, with it"] = round(now["ttft"], 3)
                    row["time per token with it"] = now[BETWEEN]
            else:
                row["efficiency"] = round(once(made.profile, load[1]) / ours, 3)
                of = f"{profile}, {pp} stages"
                lines += [{"engine": s, "of": of} | each[s] for s in each]
            rows.append(row)
    title = "Long prompts on emulated devices: equal times and equal numbers of tokens"
    columns = list(dict.fromkeys(name for row in rows for name in row))
    path = report(
        f"prefill-emulated-pp{args.pp.replace(',', '-')}",
        title,
        [dict.fromkeys(columns, "") | row for row in rows],
        note="x N: how many times as long chunks of N tokens take; time per token in ms; data-sheet "
        f"times (docs/emulation.md); prompts alone in quick motion, {args.quick_motion:g}",
        columns=columns,
    )
    drawn(path, title, lines)


def once(profile: Profile, length: int) -> float:
    """Seconds of a stage's work, in the mean, for a prompt in one chunk: no pipeline is quicker."""
    one = np.zeros(1, np.int32), np.full(1, length, np.float64)
    return statistics.fmean(stage.seconds(*one) for stage in profile.stages)


def emulated_engine(
    made: Emulation,
    chunk: int,
    settings: dict[str, Any],
    loads: Sequence[Prompts],
    quick: float,
    repeat: int,
) -> dict[str, Any]:
    longest = max(length for _, length, _ in loads) + 4096
    profile, pp = made.profile, len(made.profile.stages)
    with tempfile.TemporaryDirectory(prefix="sipipe-prefill-") as scratch:
        emulate(replace(made, profile=profile.slowed(1 / quick)), Path(scratch), narrow=True)
        argv = [scratch, "--load-format", "dummy", "--skip-tokenizer-init", "--enforce-eager"]
        argv += ["--max-model-len", str(longest), "--max-num-seqs", "128"]
        argv += ["--pipeline-parallel-size", str(pp), "--max-num-batched-tokens", str(chunk)]
        argv += ["--no-enable-prefix-caching"]
        cut = [stage.layers for stage in made.placement.stages]
        more = {"layers": cut, "cpu_sampling": "on", "cores": "off", "vocabulary": "last"}
        job = {"argv": argv, "settings": settings | more, "loads": loads, "repeat": repeat}
        job["long"] = LONG["emulated"]
        side = f"{profile.name} in {pp} stages, {chunk}{'' if settings else ', equal times'}"
        return measured(side, job, of_the_checkout(MODULE))


def named(load: Prompts) -> str:
    prompts, length, decoding = load
    said = f"{prompts} x {length:,}"
    return f"{said} beside {decoding}" if decoding else said


def figures(found: dict[str, Any], number: int, quick: float = 1.0) -> dict[str, Any]:
    """Of one load, in emulated time."""
    one = found["loads"][number]
    prompts, length, _ = one["load"]
    ttft = [quick * statistics.median(times) for times in one["ttft"]]
    middle = statistics.median(ttft)
    speed = statistics.median(prompts * length / (quick * max(times)) for times in one["ttft"])
    row = {"ttft": middle, "TTFT": f"{middle:.2f} ({min(ttft):.2f}-{max(ttft):.2f})"}
    row |= {"prompt": length, "prompt tokens/s": round(speed)}
    if between := sorted(one["between"]):
        p50, p99 = (1e3 * between[int(q * (len(between) - 1))] for q in (0.5, 0.99))
        row[BETWEEN] = f"{p50:.1f} / {p99:.1f}"
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
        # Also the interval that each decoding sequence is in now, which may be the longest.
        so_far = {name: len(self.came[name]) for name in beside}
        while any(len(self.came[name]) == so_far[name] for name in beside):
            self.step()
        between = [
            later - earlier
            for name in beside
            for earlier, later in pairwise(self.came[name][: so_far[name] + 1])
            if later > began
        ]
        self._engine.abort_request(beside)
        while self._engine.has_unfinished_requests():
            self.step()
        return first, between


def driven(job: dict[str, Any]) -> dict[str, Any]:
    """The other end: each load so often, behind a few short prompts."""

    @contextmanager
    def in_turn() -> Iterator[None]:
        how: AbstractContextManager[None] = turn(*job["turn"]) if "turn" in job else nullcontext()
        with how:
            yield

    with in_turn():
        engine = Driven(job)
        for _ in range(4):
            engine.run(1, min(WARM, *(length for _, length, _ in job["loads"])), 0)
    found = []
    for load in job["loads"]:
        ttft, between = [], []
        for _ in range(job["repeat"] if load[1] < job["long"] else 1):
            with in_turn():
                first, times = engine.run(*load)
            ttft.append(first)
            between += times
        found.append({"load": load, "ttft": ttft, "between": between})
    return {"loads": found}


if __name__ == "__main__":
    try:
        answer(driven) if all(map(str.isdigit, sys.argv[1:])) else main()
    except SiPipeError as error:
        sys.exit(str(error))
