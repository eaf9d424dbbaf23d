"""``sipipe emulate``: a pipeline of GPUs, emulated, with SiPipe's own processes around it."""

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from rich.console import Console

from sipipe.cli.parser import (
    adder,
    at_least,
    counts,
    fraction,
    make_parser,
    parse_engine_command,
)
from sipipe.cli.trace import bubbles
from sipipe.errors import ConfigError
from sipipe.observe.phases import Phase
from sipipe.tools.child import measured
from sipipe.tools.emulation.emulate import Emulation, emulation
from sipipe.tools.emulation.replay import replayed
from sipipe.tools.measure import SAMPLING
from sipipe.tools.provenance import machine
from sipipe.tools.report.reader import ProcessTrace, Trace, read_trace
from sipipe.tools.report.summary import Run
from sipipe.versions import require_vllm

EPILOG = """\
vLLM's scheduler, SiPipe's executor, channels, links and samplers run as they do with GPUs; a device
only takes the time that the data sheets' model (sipipe plan) gives. So it says what SiPipe itself
adds to a pipeline, and nothing of a GPU's speed or of a gain over another engine (docs/emulation.md).

  sipipe emulate --profile llama-70b-8xh100 --pp 4 --trace traces/emulated
  sipipe trace report traces/emulated
  sipipe emulate --profile llama-8b-4xh100 --pp 4 --vocabulary shared     # default here: last
"""
BUSY = 0.85
"""Share of the machine's CPU time above which emulated devices are late by themselves."""


def main(argv: Sequence[str]) -> int:
    """0: measured. 1: the machine was too busy for it."""
    parser = make_parser(
        "emulate",
        "Run a pipeline whose GPUs are emulated, and account for its stages' time.",
        usage="sipipe emulate --profile MODEL-NxGPU --pp N [options]",
        epilog=EPILOG,
        add_help=False,
    )
    group = parser.add_argument_group("pipeline and load")
    add, count = adder(group), at_least(1, int)
    named = "MODEL-NxGPU, such as llama-70b-8xh100 (sipipe plan --list)"
    add("--profile", str, None, "NAME", named)
    add("--requests", counts, [128], "LIST", "at once (default: 128)")
    add("--prompt-tokens", count, 128, "N", "default: 128")
    add("--tokens", count, 200, "N", "new ones (default: 200)")
    group.add_argument("--sampling", choices=SAMPLING, default="greedy", help="default: greedy")
    add("--jitter", fraction, None, "SHARE", "deviation of forward passes (default: none)")
    slow = "devices take N times as long, where this machine's cores are too few (default: 1)"
    add("--slow-motion", at_least(1), 1.0, "N", slow)
    recorded = "stage times from the trace of a real run with these stages"
    add("--replay", str, None, "DIR", recorded)
    group.add_argument("--json", action="store_true", help="the figures as JSON")
    own, settings, rest = parse_engine_command(parser, argv)
    if own.profile is None:
        raise ConfigError("emulate: --profile is missing, such as --profile llama-70b-8xh100")
    if own.tp is not None:
        raise ConfigError("emulate: --tp follows from --profile and --pp")
    layers, vocabulary = settings.get("layers"), settings.setdefault("vocabulary", "last")
    if vocabulary == "auto":
        raise ConfigError("emulate: --vocabulary is shared or last (default: last)")
    made = emulation(
        own.profile,
        int(own.pp or 1),
        cut=tuple(layers) if isinstance(layers, list) else None,
        shared=vocabulary == "shared",
        jitter=own.jitter or 0.0,
    )
    if own.replay:
        made = replace(made, profile=replayed(made.profile, read_trace(own.replay)))
    if own.slow_motion > 1:
        made = replace(made, profile=made.profile.slowed(own.slow_motion))
    require_vllm()
    with tempfile.TemporaryDirectory(prefix="sipipe-emulate-") as scratch:
        trace = Path(settings.get("trace") or Path(scratch) / "trace")
        result = _run(made, own, settings | {"trace": str(trace)}, rest, Path(scratch))
        found = _figures(read_trace(str(trace)), result)
        if own.json:
            loads = [each["json"] for each in found]
            profile = msgspec.to_builtins(made.profile)
            kept = {"job": vars(own), "machine": machine(), "profile": profile, "loads": loads}
            print(json.dumps(kept, indent=1))
        else:
            _show(made, found, own.slow_motion)
    return 1 if any(each["json"]["busy"] > BUSY for each in found) else 0


def _run(
    made: Emulation,
    own: argparse.Namespace,
    settings: dict[str, Any],
    rest: Sequence[str],
    scratch: Path,
) -> dict[str, Any]:
    """Start the engine and run the load; what :func:`sipipe.tools.measure.measure` returns."""
    # To vLLM every model is a dense one of the same size: nothing of it is loaded.
    heads = max(1, made.facts.hidden // 128)
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": heads * 128,
        "num_hidden_layers": made.facts.layers,
        "num_attention_heads": heads,
        "intermediate_size": heads * 128,
        "vocab_size": made.facts.vocabulary,
        "max_position_embeddings": made.facts.context_length,
        "torch_dtype": "bfloat16",
    }
    (scratch / "config.json").write_text(json.dumps(config))
    profile = scratch / "profile.json"
    profile.write_bytes(msgspec.json.format(msgspec.json.encode(made.profile)))
    longest = own.prompt_tokens + own.tokens
    cut = [stage.layers for stage in made.placement.stages]
    most = max(own.requests)
    options = {
        "--load-format": "dummy",
        "--max-num-seqs": most,
        "--max-model-len": longest,
        "--max-num-batched-tokens": max(longest, 2048, most),
    }
    words = [str(word) for option in options.items() for word in option]
    job = {
        "argv": [str(scratch), *words, "--skip-tokenizer-init", "--enforce-eager", *rest],
        "sampling": [own.sampling],
        "requests": own.requests,
        "prompt_tokens": own.prompt_tokens,
        "tokens": own.tokens,
        "repeat": 1,
    }
    more = {
        "emulate": str(profile),
        "layers": cut,
        "cpu_sampling": "on",
        "cores": settings.get("cores", "off"),
    }
    return measured("sipipe", job | {"settings": settings | more})


def _figures(trace: Trace, result: dict[str, Any]) -> list[dict[str, Any]]:
    """Of each load, the part in which all its requests decode."""
    loads = zip(result["spans"].values(), result["busy"].values(), strict=True)
    return [_steady(trace, span, busy) for (span,), (busy,) in loads]


def _steady(trace: Trace, span: tuple[int, int], busy: float) -> dict[str, Any]:
    records = trace.of("stage")[0].phase(Phase.FORWARD, window=span)
    prompts = (records["tokens"] > records["batch"]).nonzero()[0]
    decoding = records[prompts.max(initial=-1) + 1 :]
    if len(decoding) < 2 * trace.inflight:
        raise ConfigError("emulate: nothing steady to look at: raise --tokens")
    decoding = decoding[decoding["batch"] >= 0.9 * decoding["batch"].max()]
    start = trace.window()[0]
    begin, end = int(decoding["end_ns"][0]), int(decoding["end_ns"][-1])
    run = Run(trace, (begin - start) / 1e9, (end - start) / 1e9)
    stages = run.summary["stage_table"]
    back = _turnaround(trace, run.window)
    rate = run.summary["iterations"] / run.summary["wall_s"]
    return {
        "run": run,
        "json": {
            "iterations": len(records),
            "iterations_per_s": rate,
            "tokens_per_s": run.summary["tokens_per_s"],
            "busy_share": [stage["share"]["busy"] for stage in stages],
            "batch": float(decoding["batch"].mean()),
            "turnaround_ms": {f"p{q}": float(np.percentile(back, q)) / 1e6 for q in (50, 99)},
            "cpu_ms": {p.header.name: _cpu_ms(p, run.window) / rate for p in trace.processes},
            "busy": busy,
        },
    }


def _cpu_ms(process: ProcessTrace, window: tuple[int, int]) -> float:
    """Milliseconds of CPU time a second, by what was noted within the window."""
    noted = process.cpu[
        (process.cpu["start_ns"] >= window[0]) & (process.cpu["end_ns"] <= window[1])
    ]
    return 1e3 * float(noted["cpu_ns"].sum() / max(1, (noted["end_ns"] - noted["start_ns"]).sum()))


def _turnaround(trace: Trace, window: tuple[int, int]) -> npt.NDArray[np.int64]:
    """Nanoseconds from the end of each microbatch on the last stage's device until its next turn
    is dispatched: copy, drawing, gathering, scheduling."""
    assert trace.executor is not None
    left = trace.of("stage")[-1].phase(Phase.FORWARD, window=window)
    sent = trace.executor.phase(Phase.DISPATCH, window=window)
    found = [np.zeros(0, np.int64)]
    for slot in np.unique(left["slot"]):
        mine, next_ones = (of[of["slot"] == slot] for of in (left, sent))
        places = np.searchsorted(next_ones["iteration"], mine["iteration"], side="right")
        there = places < len(next_ones)
        found.append(next_ones["end_ns"][places[there]] - mine["end_ns"][there])
    return np.concatenate(found)


def _show(made: Emulation, found: list[dict[str, Any]], slow: float) -> None:
    placement = made.placement
    layers = ", ".join(str(stage.layers) for stage in placement.stages)
    print(
        f"emulated: {made.facts.name} on {made.cluster.devices} x {made.cluster.device.name}, "
        f"{placement.p} stages of {placement.t}, layers {layers}"
        + (", output projection shared out" if placement.shares_projection else "")
        + (f"; in slow motion, {slow:g} times as long" if slow > 1 else "")
    )
    for load in found:
        figures, shares = load["json"], load["json"]["busy_share"]
        Console().print(bubbles(load["run"]))
        print(
            f"{figures['iterations']:,} iterations; while all requests decode: "
            f"{figures['iterations_per_s']:.1f} iterations/s of {figures['batch']:.0f} sequences; "
            f"busiest stage {max(shares):.1%} busy"
        )
        print(
            "from a microbatch's end to its next turn's dispatch: {p50:.1f} ms, 99 of 100 within "
            "{p99:.1f} ms".format(**figures["turnaround_ms"])
        )
        print(f"{figures['busy']:.0%} of this machine's {os.cpu_count()} cores were busy")
        if figures["busy"] > BUSY:
            print(
                f"VOID: above {BUSY:.0%} emulated devices are late by themselves; use a machine "
                "with more cores, fewer stages or --slow-motion 2"
            )
    print(
        "This is SiPipe's own share of the time. Nothing of it was measured on a GPU, and it says "
        "nothing of a gain over another engine."
    )
