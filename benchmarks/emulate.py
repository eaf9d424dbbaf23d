"""A pipeline of GPUs, emulated, with SiPipe's own processes around it.

    python -m benchmarks.emulate --profile llama-70b-8xh100 --pp 4 [--trace DIR] [--json]
    python -m benchmarks.emulate --profile deepseek-v3-32xh200 --pp 4 --requests 1 --tokens 1 --prompt-tokens 131072
    python -m benchmarks.emulate --ablate [TEXT]    the paper's techniques (benchmarks.emulation.ablation)

SiPipe's scheduler, executor, channels, links and samplers run as they do with GPUs; a device
only takes the time that the data sheets' model (sipipe plan) gives. So it says what SiPipe itself
adds to a pipeline, and nothing of a GPU's speed or of a gain over another engine (docs/emulation.md).
With one stage, on one or two cores, give --async-scheduling: a GPU's has it by itself.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from rich.console import Console

from benchmarks.emulation.cluster import Emulation, emulation
from benchmarks.emulation.profile import StockCosts
from benchmarks.emulation.replay import replayed
from benchmarks.harness import of_the_checkout
from sipipe.cli.parser import at_least, counts, fraction, parse_engine_command
from sipipe.cli.trace import bubbles
from sipipe.errors import ConfigError, SiPipeError
from sipipe.observe.phases import Phase
from sipipe.tools.child import measured
from sipipe.tools.load import SAMPLING
from sipipe.tools.provenance import machine
from sipipe.tools.report.reader import ProcessTrace, Trace, read_trace
from sipipe.tools.report.summary import Run

CHUNK = 8192
"""Tokens of a prompt's chunk at most, unless an option says otherwise: vLLM's default on GPUs."""
BUSY = 0.85
"""Share of the machine's CPU time above which emulated devices are late by themselves."""


def main() -> int:
    """0: measured. 1: the machine was too busy for it."""
    if sys.argv[1:2] == ["--ablate"]:
        from benchmarks.emulation.ablation import ablate

        return ablate(sys.argv[2:])
    as_json = "--json" in sys.argv
    argv = [word for word in sys.argv[1:] if word != "--json"]
    made, result = emulated(argv)
    runs = [load.pop("run") for load in result["loads"]]
    if as_json:
        print(json.dumps(result, indent=1))
    else:
        _show(made, runs, result)
    return 1 if any(load["busy"] > BUSY for load in result["loads"]) else 0


def emulated(
    argv: Sequence[str], given: Mapping[str, Any] | None = None, stock: StockCosts | None = None
) -> tuple[Emulation, dict[str, Any]]:
    """Run the pipeline of a command line: what it stands for; ``job``, ``machine``, ``profile``, and
    the figures of each of its ``loads``, with its trace as ``run``.

    Args:
        given: settings of SiPipe that are no options.
        stock: what stages pay for techniques that are taken away.

    Raises:
        SiPipeError: an option does not fit, or the engine failed.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.emulate",
        description=(__doc__ or "").split("\n")[0],
        add_help=False,
        allow_abbrev=False,
    )
    add, count = parser.add_argument, at_least(1, int)
    add("--profile", required=True, help="MODEL-NxGPU, of sipipe plan --list")
    add("--requests", type=counts, default=[128], help="at once, a load each (default: 128)")
    add("--prompt-tokens", type=count, default=128, help="default: 128")
    add("--tokens", type=count, default=200, help="new ones (default: 200)")
    add("--sampling", choices=SAMPLING, default="greedy", help="default: greedy")
    device = "on the last stage's emulated device, but for parameters beyond a temperature"
    add("--draws", choices=("cpus", "device"), default="cpus", help=f"device: {device}")
    add("--jitter", type=fraction, default=0.0, help="deviation of forward passes (default: none)")
    chance = (
        "drafts are proposed, and about so many are right; by n-grams 0.5 to 1, above 0.6 fewer"
    )
    add("--acceptance", type=fraction, default=0.0, help=chance)
    head = "with --acceptance: a head on the last stage makes so many of each request (default: n-grams)"
    add("--drafts", type=at_least(0, int), default=0, help=head)
    slow = "devices take N times as long, where this machine's cores are too few (default: 1)"
    add("--slow-motion", type=at_least(0.01), default=1.0, help=slow)
    add("--replay", help="directory of a trace of a real run with these stages: their times")
    add("--json", action="store_true", help="the figures as JSON")
    own, settings, rest = parse_engine_command(parser, argv)
    settings |= ({"cpu_sampling": "per_row"} if own.draws == "device" else {}) | (given or {})
    if own.tp is not None:
        raise ConfigError("emulate: --tp follows from --profile and --pp")
    layers, vocabulary = settings.get("layers"), settings.setdefault("vocabulary", "last")
    if vocabulary == "auto":
        raise ConfigError("emulate: --vocabulary is shared or last (default: last)")
    if own.drafts and not own.acceptance:
        raise ConfigError("emulate: --drafts wants --acceptance: how many of them are right")
    if own.acceptance:
        if settings["vocabulary"] == "shared":
            raise ConfigError("emulate: --acceptance is with --vocabulary last")
        if own.acceptance < 0.5 and not own.drafts:
            raise ConfigError("emulate: --acceptance is 0.5 or more, without --drafts")
    made = emulation(
        own.profile,
        int(own.pp or 1),
        cut=tuple(layers) if isinstance(layers, list) else None,
        shared=vocabulary == "shared",
        drafts=own.drafts,
        jitter=own.jitter,
    )
    if own.replay:
        made = replace(made, profile=replayed(made.profile, read_trace(own.replay)))
    if stock is not None:
        made = replace(made, profile=msgspec.structs.replace(made.profile, stock=stock))
    if own.acceptance:
        profile = msgspec.structs.replace(made.profile, acceptance=own.acceptance)
        made = replace(made, profile=profile)
    if own.slow_motion != 1:
        made = replace(made, profile=made.profile.slowed(own.slow_motion))
    with tempfile.TemporaryDirectory(prefix="sipipe-emulate-") as scratch:
        trace = settings.setdefault("trace", str(Path(scratch) / "trace"))
        result = _run(made, own, settings, rest, Path(scratch))
        loads = figures_of_loads(read_trace(trace), result)
    profile = msgspec.to_builtins(made.profile)
    return made, {"job": vars(own), "machine": machine(), "profile": profile, "loads": loads}


def _run(
    made: Emulation,
    own: argparse.Namespace,
    settings: dict[str, Any],
    rest: Sequence[str],
    scratch: Path,
) -> dict[str, Any]:
    """Start the engine and run the load; what :func:`benchmarks.measure.measure` returns."""
    emulate(made, scratch, narrow=own.tokens == 1)
    longest = own.prompt_tokens + own.tokens
    cut = [stage.layers for stage in made.placement.stages]
    most = max(own.requests)
    options = {
        "--load-format": "dummy",
        "--max-num-seqs": most,
        "--max-model-len": longest,
        "--max-num-batched-tokens": max(min(longest, CHUNK), 2048, most),
    }
    words = [str(word) for option in options.items() for word in option]
    if own.acceptance:
        words += ["--speculative-config", json.dumps(_drafts(scratch, own.drafts))]
    job = {
        "argv": [str(scratch), *words, "--skip-tokenizer-init", "--enforce-eager", *rest],
        "sampling": [own.sampling],
        "requests": own.requests,
        "prompt_tokens": own.prompt_tokens,
        "tokens": own.tokens,
        "repeat": 1,
    }
    more = {
        "layers": cut,
        "cpu_sampling": settings.get("cpu_sampling", "on"),
        "cores": settings.get("cores", "off"),
    }
    module = of_the_checkout("benchmarks.emulation.engine")
    return measured("sipipe", job | {"settings": settings | more}, module) | job


def _drafts(model: Path, drafts: int) -> dict[str, Any]:
    """``--speculative-config`` of ``drafts`` drafts of a head, which is written beside ``model``, or of
    n-grams."""
    if not drafts:
        return {"method": "ngram"}
    head = model / "head"
    head.mkdir()
    config = json.loads((model / "config.json").read_text()) | {"num_hidden_layers": 1}
    (head / "config.json").write_text(json.dumps(config))
    return {"method": "eagle", "model": str(head), "num_speculative_tokens": drafts}


def emulate(made: Emulation, model: Path, *, narrow: bool) -> None:
    """Engines that are started next have emulated devices; ``model`` is a directory for theirs.

    To vLLM every model is a dense one of the same size: nothing of it is loaded. ``narrow``: hidden
    states have 128 columns. CPUs copy those of long prompts here, which no CPU does between GPUs.
    """
    heads = 1 if narrow else max(1, made.facts.hidden // 128)
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": heads * 128,
        "num_hidden_layers": made.facts.layers,
        "num_attention_heads": heads,
        "intermediate_size": heads * 128,
        "vocab_size": made.facts.vocabulary,
        "max_position_embeddings": max(made.facts.context_length, 1 << 20),
        "torch_dtype": "bfloat16",
    }
    (model / "config.json").write_text(json.dumps(config))
    profile = model / "profile.json"
    profile.write_bytes(msgspec.json.encode(made.profile))
    os.environ["EMULATED_PROFILE"] = str(profile)


def figures_of_loads(trace: Trace, result: dict[str, Any]) -> list[dict[str, Any]]:
    """Of each load, the part in which all its requests decode; all of it where none does."""
    keys = ("spans", "busy", "waited", "ttft")
    return [
        (_steady if result["tokens"] > 1 else _prompts)(trace, span, busy)
        | {"waited": waited, "ttft_p50": statistics.median(ttft)}
        for (span,), (busy,), (waited,), (ttft,) in zip(
            *(result[key].values() for key in keys), strict=True
        )
    ]


def _prompts(trace: Trace, span: tuple[int, int], busy: float) -> dict[str, Any]:
    start = trace.window()[0]
    run = Run(trace, (span[0] - start) / 1e9, (span[1] - start) / 1e9)
    records = trace.of("stage")[0].phase(Phase.FORWARD, window=span)
    return {
        "run": run,
        "iterations": len(records),
        "tokens_per_s": float(records["tokens"].sum()) / (span[1] - span[0]) * 1e9,
        "busy_share": [stage["share"]["busy"] for stage in run.summary["stage_table"]],
        "busy": busy,
    }


def _steady(trace: Trace, span: tuple[int, int], busy: float) -> dict[str, Any]:
    records = trace.of("stage")[0].phase(Phase.FORWARD, window=span)
    prompts = (records["tokens"] > records["batch"]).nonzero()[0]
    decoding = records[prompts.max(initial=-1) + 1 :]
    if len(decoding) < 2 * trace.inflight:
        raise ConfigError("emulate: nothing steady to look at: raise --tokens")
    run = Run(trace, *((int(ns) - trace.window()[0]) / 1e9 for ns in span))
    drafts = run.summary["drafts"]
    if drafts is None:
        # Not those of a burst's begin, which are larger, or of its end.
        decoding = decoding[decoding["batch"] >= 0.9 * np.median(decoding["batch"])]
    start = trace.window()[0]
    begin, end = int(decoding["end_ns"][0]), int(decoding["end_ns"][-1])
    run = Run(trace, (begin - start) / 1e9, (end - start) / 1e9)
    stages = run.summary["stage_table"]
    back = _turnaround(trace, run.window)
    rate = run.summary["iterations"] / run.summary["wall_s"]
    return {
        "run": run,
        "iterations": len(records),
        "iterations_per_s": rate,
        "tokens_per_s": run.summary["tokens_per_s"],
        "busy_share": [stage["share"]["busy"] for stage in stages],
        "batch": float(decoding["batch"].mean()),
        "drafts": drafts,
        "turnaround_ms": {f"p{q}": float(np.percentile(back, q)) / 1e6 for q in (50, 99)},
        "cpu_ms": {p.header.name: _cpu_ms(p, run.window) / rate for p in trace.processes},
        "busy": busy,
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


def _show(made: Emulation, runs: list[Run], result: dict[str, Any]) -> None:
    placement, slow = made.placement, result["job"]["slow_motion"]
    layers = ", ".join(str(stage.layers) for stage in placement.stages)
    print(
        f"emulated: {made.facts.name} on {made.cluster.devices} x {made.cluster.device.name}, "
        f"{placement.p} stages of {placement.t}, layers {layers}"
        + (", output projection shared out" if placement.shares_projection else "")
        + (f"; in slow motion, {slow:g} times as long" if slow != 1 else "")
    )
    for run, load in zip(runs, result["loads"], strict=True):
        Console().print(bubbles(run))
        said = f"{load['iterations']:,} iterations; "
        if result["job"]["tokens"] > 1:
            said += (
                f"while all requests decode: {load['iterations_per_s']:.1f} iterations/s of "
                f"{load['batch']:.0f} sequences; from a microbatch's end to its next turn's dispatch "
                "{p50:.1f} ms, 99 of 100 within {p99:.1f} ms; ".format(**load["turnaround_ms"])
            )
        else:
            said += f"{load['tokens_per_s']:,.0f} prompt tokens/s, "
            said += f"first token after {load['ttft_p50']:.3f} s in the median; "
        if load["drafts"]:
            said += "{a_pass:.2f} tokens a pass; ".format(**load["drafts"])
        print(
            f"{said}busiest stage {max(load['busy_share']):.1%} busy; "
            f"{load['busy']:.0%} of this machine's {os.cpu_count()} cores were busy"
        )
        if load["busy"] > BUSY:
            print(
                f"VOID: above {BUSY:.0%} emulated devices are late by themselves; use a machine "
                "with more cores, fewer stages or --slow-motion 2"
            )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SiPipeError as error:
        sys.exit(str(error))
