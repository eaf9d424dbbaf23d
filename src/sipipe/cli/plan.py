"""``sipipe plan``: rank pipeline and tensor degrees for a model, a cluster and a latency budget."""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sipipe.cli.parser import make_parser
from sipipe.errors import ConfigError

if TYPE_CHECKING:
    from sipipe.engine.layers.facts import ModelFacts
    from sipipe.tools.planner.calibration import Calibration
    from sipipe.tools.planner.hardware import Cluster
    from sipipe.tools.planner.plan import Plan
    from sipipe.tools.planner.traces import LoopCheck
    from sipipe.tools.planner.workload import Workload

__all__ = ["add_arguments", "main", "run"]

EPILOG = """\
  sipipe plan llama-3.1-70b --gpu h100 --hosts 2 --gpus-per-host 8 --tpot-slo 50ms
  sipipe plan ./my-model --gpu l40s --gpus-per-host 4 --input 2000 --output 200 --json
  sipipe plan --list
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``sipipe plan``."""
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL", help="built-in name, config.json, or its directory")
    add("--list", action="store_true", help="list the built-in models and devices, and stop")
    group = parser.add_argument_group("cluster")
    add = group.add_argument
    add("--gpu", metavar="NAME", help="device of every host, such as h100 (see --list)")
    add("--hosts", default="1", metavar="N", help="hosts (default: 1)")
    add("--gpus-per-host", default="8", metavar="N", help="devices of a host (default: 8)")
    add("--memory", metavar="GIB", help="memory of one device instead of the built-in value")
    add("--network", default="400G", metavar="RATE", help="one adapter between hosts, Gb/s (400G)")
    add("--adapters", default="1", metavar="N", help="such adapters per host (default: 1)")
    add("--cores", metavar="N", help="CPU cores of a host (default: 96, or the sockets' own)")
    group = parser.add_argument_group("workload")
    add = group.add_argument
    add("--tpot-slo", metavar="TIME", help="budget of the mean time per output token, e.g. 50ms")
    add("--input", default="1000", metavar="TOKENS", help="prompt tokens (default: 1000)")
    add("--output", default="300", metavar="TOKENS", help="output tokens (default: 300)")
    add(
        "--sampling",
        default="all",
        metavar="KIND",
        help="greedy, temperature, top-p, or all: with top-k, min-p and penalties (default: all)",
    )
    add("--batch", metavar="N", help="running sequences; default: the best number within limits")
    add("--max-num-seqs", default="1024", metavar="N", help="most running sequences (1024)")
    add("--max-num-batched-tokens", default="8192", metavar="N", help="of a microbatch (8192)")
    add("--gpu-memory-utilization", default="0.9", metavar="SHARE", help="default: 0.9")
    add("--weight-bits", metavar="BITS", help="bits per weight instead of what the config says")
    add("--kv-cache-dtype", default="auto", metavar="auto|fp8", help="default: auto")
    group = parser.add_argument_group("engine")
    add = group.add_argument
    add("--inflight", metavar="N", help="microbatches in flight (default: the better of p, p + 1)")
    add("--samplers", metavar="N", help="CPU samplers (default: as many as pay and are free)")
    add(
        "--baseline",
        default="vllm",
        metavar="NAME",
        help="compared with: vllm (synchronous, the paper's) or vllm-async (default: vllm)",
    )
    group = parser.add_argument_group("calibration")
    add = group.add_argument
    add("--calibrate", metavar="DIR", action="append", help="fit to the trace of a run of MODEL")
    add("--extrapolate", action="store_true", help="predict outside the trace's range, marked")
    group = parser.add_argument_group("output")
    add = group.add_argument
    add("--json", action="store_true", help="everything as JSON instead of the table")
    add("--details", action="store_true", help="also memory, communication and bubbles by kind")
    add("--plot", metavar="FILE", help="draw throughput and TPOT over (p, t) into an .svg file")


def main(argv: Sequence[str]) -> int:
    """Entry point of the subcommand; returns the exit status."""
    parser = make_parser(
        "plan",
        "Predict throughput and latency of every pipeline and tensor degree, and rank them.",
        epilog=EPILOG,
    )
    add_arguments(parser)
    return run(parser.parse_args(argv))


def run(args: argparse.Namespace) -> int:
    """0: a deployment was found. 1: nothing fits or meets the budget; the table says why."""
    if args.list:
        _list()
        return 0
    from sipipe.tools.planner.models import load_model
    from sipipe.tools.planner.plan import make_plan
    from sipipe.tools.planner.quantities import count

    for option, value in (("MODEL", args.model), ("--gpu", args.gpu)):
        if value is None:
            raise ConfigError(f"plan: {option} is missing (sipipe plan --list shows the names)")
    plot = _plot_path(args.plot)
    bits = None if args.weight_bits is None else _positive("--weight-bits", args.weight_bits)
    facts = load_model(args.model, weight_bits=bits)
    cluster, workload = _cluster(args), _workload(args, facts)
    calibration: Calibration | None = None
    checks: list[LoopCheck] = []
    if args.calibrate:
        from sipipe.tools.planner.traces import calibrate_from_traces

        calibration, checks = calibrate_from_traces(args.calibrate, facts, cluster, workload)
    plan = make_plan(
        facts,
        cluster,
        workload,
        costs=calibration,
        baseline=args.baseline,
        inflight=None if args.inflight is None else count("--inflight", args.inflight),
        samplers=None if args.samplers is None else count("--samplers", args.samplers),
        extrapolate=args.extrapolate,
    )
    if plot is not None:
        _write_plot(plot, plan)
    if args.json:
        _print_json(plan, calibration, checks)
    else:
        from sipipe.cli.plan_tables import print_tables

        print_tables(plan, calibration, checks, details=args.details)
        if plot is not None:
            print(f"drawn: {plot}")
    return 0 if plan.best else 1


def _positive(option: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (value > 0 and math.isfinite(value)):
        raise ConfigError(f"{option}: expected a number above 0, not {text[:60]!r}")
    return value


def _cluster(args: argparse.Namespace) -> Cluster:
    from sipipe.tools.planner.hardware import Cluster, device, local_cpu, network
    from sipipe.tools.planner.quantities import count, gigabits_per_second

    memory = None if args.memory is None else _positive("--memory", args.memory)
    per_host = count("--gpus-per-host", args.gpus_per_host)
    if args.gpu.lower() == "cpu":
        chosen = local_cpu(per_host, memory_gib=memory)
        cores = len(os.sched_getaffinity(0))
    else:
        chosen = device(args.gpu, memory_gib=memory)
        cores = chosen.cores * per_host or 96
    return Cluster(
        device=chosen,
        hosts=count("--hosts", args.hosts),
        devices_per_host=per_host,
        network=network(
            gigabits_per_second("--network", args.network), count("--adapters", args.adapters)
        ),
        cores_per_host=cores if args.cores is None else count("--cores", args.cores),
    )


def _workload(args: argparse.Namespace, facts: ModelFacts) -> Workload:
    from sipipe.tools.planner.hardware import samplings
    from sipipe.tools.planner.quantities import count, fraction, seconds
    from sipipe.tools.planner.workload import Workload

    if args.sampling not in samplings():
        raise ConfigError(f"--sampling must be one of {', '.join(samplings())}")
    if args.kv_cache_dtype not in ("auto", "fp8"):
        raise ConfigError(f"--kv-cache-dtype must be auto or fp8, not {args.kv_cache_dtype!r}")
    workload = Workload(
        input=count("--input", args.input, least=0),
        output=count("--output", args.output),
        tpot_slo=math.inf if args.tpot_slo is None else seconds("--tpot-slo", args.tpot_slo),
        max_num_seqs=count("--max-num-seqs", args.max_num_seqs),
        max_num_batched_tokens=count("--max-num-batched-tokens", args.max_num_batched_tokens),
        sampling=args.sampling,
        memory_utilization=fraction("--gpu-memory-utilization", args.gpu_memory_utilization),
        kv_element_bytes=1.0 if args.kv_cache_dtype == "fp8" else None,
        fixed_batch=None if args.batch is None else count("--batch", args.batch),
    )
    if 0 < facts.context_length < workload.longest:
        raise ConfigError(
            f"--input {workload.input} and --output {workload.output} are together over the "
            f"model's context length of {facts.context_length:,}"
        )
    return workload


def _plot_path(name: str | None) -> Path | None:
    if name is None:
        return None
    path = Path(name)
    if path.suffix.lower() != ".svg":
        raise ConfigError(f"--plot draws SVG: name the file .svg, not {name!r}")
    if not path.parent.is_dir():
        raise ConfigError(f"--plot: no directory {path.parent}")
    return path


def _write_plot(path: Path, plan: Plan) -> None:
    from sipipe.tools.planner.chart import draw

    try:
        path.write_text(draw(plan), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--plot: cannot write {path}: {error.strerror}") from None


def _list() -> None:
    from sipipe.tools.planner.hardware import device, devices
    from sipipe.tools.planner.models import builtin_models, load_model

    print("models")
    for name in builtin_models():
        facts = load_model(name)
        active = "" if facts.moe is None else f", {facts.active_parameters / 1e9:.1f}B active"
        print(f"  {name:<18} {facts.parameters / 1e9:7.1f}B{active}  {facts.layers} layers")
    print("devices")
    for name in devices():
        found = device(name)
        print(
            f"  {name:<18} {found.name}: {found.memory_gib:g} GiB, {found.memory_gbs:g} GB/s, "
            f"{found.bf16_tflops:g} TFLOPS BF16, {found.link.name}"
        )


def _print_json(plan: Plan, calibration: Calibration | None, checks: list[LoopCheck]) -> None:
    from sipipe.tools.planner.report import to_json

    more: dict[str, Any] = {}
    if calibration is not None:
        more["calibration"] = {
            **calibration.to_dict(),
            "loop": [{**dataclasses.asdict(check), "error": check.error} for check in checks],
        }
    sys.stdout.write(to_json(plan, **more) + "\n")
