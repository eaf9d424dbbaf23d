"""``sipipe plan``: rank pipeline and tensor degrees for a model, a cluster and a latency budget."""

import argparse
import difflib
import json
import math
import os
import re
from collections.abc import Callable, Sequence

from sipipe.cli.console import Console, table
from sipipe.cli.parser import adder, at_least, checked, fraction, make_parser
from sipipe.engine.layers.facts import ModelFacts
from sipipe.errors import ConfigError
from sipipe.tools.planner.costs import datasheet_costs
from sipipe.tools.planner.hardware import Assumed, Cluster, assumptions, device, names, network
from sipipe.tools.planner.models import builtin_models, load_model
from sipipe.tools.planner.placement import kv_bytes_per_token
from sipipe.tools.planner.plan import Choice, Plan
from sipipe.tools.planner.report import notes, plan_to_dict, serve_commands, worth_line
from sipipe.tools.planner.search import Search
from sipipe.tools.planner.workload import Workload

_KINDS = {"greedy": "greedy", "all": "top-k, top-p, min-p and penalties"}


def print_tables(plans: Sequence[Plan]) -> None:
    """Print for each plan the ranking, what was ruled out, which engine is fastest, and the commands
    that start it. The plans differ only in the sampling."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=140)
    facts = plans[0].facts
    cluster = plans[0].cluster
    kv = kv_bytes_per_token(facts, plans[0].workload.kv_element_bytes) / 1024
    between = ""
    if cluster.hosts > 1:
        adapters = f"{cluster.network.adapters} x {cluster.network.gigabits:g} Gb/s"
        between = f", {adapters} between hosts"
    console.print(
        f"{facts.name}: {facts.parameters / 1e9:.1f}B parameters, {facts.layers} layers, "
        f"{kv:.0f} KiB of KV cache a token"
    )
    console.print(
        f"{cluster.hosts} host(s) of {cluster.devices_per_host} x {cluster.device.name}, "
        f"{cluster.device.link.name}{between}"
    )
    for plan in plans:
        _print_plan(console, plan)
    if any(plan.choices for plan in plans):
        console.print(
            "computed from data sheets and assumed inputs (--assumptions lists them): ranges are "
            "between their ends; compare rows, and measure (sipipe bench) before relying on a number"
        )


def _print_plan(console: Console, plan: Plan) -> None:
    """Print one plan."""
    console.print()
    console.print(f"sampling: {_KINDS.get(plan.workload.sampling, plan.workload.sampling)}")
    if plan.choices:
        _print_choices(console, plan)
    ruled_out: dict[tuple[int, int, str], list[str]] = {}
    for reject in plan.rejected:
        ruled_out.setdefault((reject.p, reject.t, reject.reason), []).append(reject.engine)
    for (p, t, reason), engines in sorted(ruled_out.items()):
        console.print(f"ruled out: P{p}T{t} {' and '.join(engines)}: {reason}")
    if plan.best is None:
        console.print("no (p, t) of this cluster serves this workload")
        return
    console.print(_recommendation(plan, plan.best))
    if worth := worth_line(plan):
        console.print(worth)
    for command in serve_commands(plan, plan.best):
        print(f"  {command}")
    for note in notes(plan, plan.best):
        console.print(f"  {note}")


def _recommendation(plan: Plan, best: Choice) -> str:
    """A sentence that names the fastest engine within the budget, and compares the other's best."""
    ours = plan.fastest(True)
    other = plan.fastest(False)
    name = "SiPipe" if best is ours else f"stock vLLM ({best.engine.key})"
    text = f"fastest: {name}, P{best.p}T{best.t}"
    if ours is None or other is None or plan.gain is None:
        return f"{text}; {'SiPipe' if ours is None else 'stock vLLM'} has no row here"
    gain = plan.gain
    text += (
        f". SiPipe's best row (P{ours.p}T{ours.t}) / stock's (P{other.p}T{other.t}): "
        f"{gain.stated:.2f}x, from {gain.low:.2f} to {gain.high:.2f} with what is assumed of either"
    )
    close = gain.low < 1.0 < gain.high
    return text + (
        ": these computed figures cannot tell which is faster, measure both" if close else ""
    )


def _print_choices(console: Console, plan: Plan) -> None:
    """Print the ranking, in a narrow terminal without the columns that can be left out."""
    columns = ["engine", "p", "t", "tok/s", "range", "TPOT ms", "range", "running"]
    columns += ["KV tokens", "idle", "vocabulary", "limited by"]
    left_out = set() if console.width >= 110 else {6, 7, 9}
    if not any(choice.placement.shares_projection for choice in plan.choices):
        left_out.add(10)
    names, *rows = (
        [cell for index, cell in enumerate(row) if index not in left_out]
        for row in (columns, *map(_cells, plan.choices))
    )
    console.print(table(names, rows, left=("engine", "vocabulary", "limited by")))


def _cells(choice: Choice) -> list[str]:
    """The ranking's row of one choice."""
    low = choice.slowest
    high = choice.quickest
    # Tokens of the cache, and the share of them that the layers' cut costs (-) or gains (+).
    share = f"{-choice.kv_loss:+.0%}"
    tokens = f"{choice.memory.kv_tokens:,}" + ("" if share[1:] == "0%" else f" ({share})")
    return [
        *(choice.engine.key, str(choice.p), str(choice.t)),
        *(f"{choice.throughput:,.0f}", f"{low.throughput:,.0f}-{high.throughput:,.0f}"),
        *(f"{choice.tpot * 1e3:.1f}", f"{high.delay * 1e3:.1f}-{low.delay * 1e3:.1f}"),
        *(f"{choice.batch:,}", tokens, f"{choice.iteration.idle:.0%}"),
        *(choice.vocabulary, f"{choice.iteration.limit}; {choice.capped_by}"),
    ]


def print_assumptions() -> None:
    """Print every input that ``--assume`` takes."""
    columns = ["input", "value", "quickest", "slowest", "source"]
    rows = [
        [name, *(f"{number:g}" for number in numbers), source]
        for name, (*numbers, source) in assumptions().items()
    ]
    Console(highlight=False).print(table(columns, rows, left=("input", "source")))


EPILOG = """\
  sipipe plan llama-3.1-70b --gpu h100 --hosts 2 --gpus-per-host 8 --tpot-slo 50ms
  sipipe plan ./my-model --gpu l40s --gpus-per-host 4 --input 2000 --output 200 --json
  sipipe plan --list
"""

_NUMBER = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?)\s*([A-Za-z/µ]*)\s*")
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6}
_BITS = {"": 1.0, "g": 1.0, "gb/s": 1.0, "gbps": 1.0, "gbit/s": 1.0, "t": 1e3, "tb/s": 1e3}
_BITS |= {"GB/s": 8.0, "TB/s": 8e3}  # bytes


def _with_unit(units: dict[str, float]) -> Callable[[str], float]:
    """A function that converts text such as ``50ms`` by ``units``, and gives NaN for any other."""

    def convert(text: str) -> float:
        match = _NUMBER.fullmatch(text)
        if match is None:
            return math.nan
        unit = match[2]
        return float(match[1]) * units[unit if unit in units else unit.lower()]

    return convert


seconds = checked(
    _with_unit(_SECONDS),
    "a positive duration with its unit such as 50ms or 0.05s",
    lambda value: value > 0,
)
"""A duration in seconds from ``"50ms"``, ``"0.05s"`` or ``"200us"``; the unit is required."""
gigabits_per_second = checked(
    _with_unit(_BITS), "a positive network rate in Gb/s such as 400G", lambda value: 0 < value < 1e9
)
"""A network rate in Gb/s from ``"400G"``, ``"400Gb/s"`` or ``"400"``."""


def _parser() -> argparse.ArgumentParser:
    """The options of ``sipipe plan``."""
    parser = make_parser(
        "plan",
        "Predict throughput and latency of every pipeline and tensor degree, and rank them.",
        epilog=EPILOG,
    )
    count = at_least(1, int)
    parser.add_argument("model", nargs="?", metavar="MODEL", help="name, config.json or directory")
    parser.add_argument("--list", action="store_true", help="list models and devices, and stop")
    add = adder(parser.add_argument_group("cluster"))
    add("--gpu", str, None, "NAME", "device of every host, such as h100 (see --list)")
    add("--hosts", at_least(1, int, 4096), 1, "N", "hosts (default: 1)")
    add("--gpus-per-host", at_least(1, int, 1024), None, "N", "devices of a host (8, of CPUs 1)")
    add("--memory", at_least(0.001, most=10**6), None, "GIB", "of a device, not the built-in value")
    add("--network", gigabits_per_second, "400G", "RATE", "an adapter between hosts, Gb/s (400G)")
    add("--adapters", count, 1, "N", "such adapters per host (default: 1)")
    add("--cores", count, None, "N", "CPU cores of a host (default: 96, or the sockets' own)")
    group = parser.add_argument_group("workload")
    add = adder(group)
    add("--tpot-slo", seconds, math.inf, "TIME", "budget of time per output token, such as 50ms")
    add("--input", at_least(0, int), 1000, "TOKENS", "prompt tokens (default: 1000)")
    add("--output", count, 300, "TOKENS", "output tokens (default: 300)")
    kinds = "of greedy, temperature, top-p, all (with top-k, min-p, penalties); default: greedy,all"
    add("--sampling", _kinds, ("greedy", "all"), "KIND,KIND", kinds)
    add("--batch", count, None, "N", "running sequences; default: the best number within limits")
    add("--max-num-seqs", count, 1024, "N", "most running sequences (1024)")
    add("--max-num-batched-tokens", count, 8192, "N", "of a microbatch (8192)")
    add("--gpu-memory-utilization", fraction, 0.9, "SHARE", "of GPUs (default: 0.9)")
    add("--min-kv-tokens", at_least(0, int), 0, "N", "rule out what caches fewer tokens")
    bits = "bits per weight instead of what the config says: 8 is FP8, fewer are stored ones"
    add("--weight-bits", at_least(0.1, most=64), None, "BITS", bits)
    group.add_argument("--kv-cache-dtype", choices=("auto", "fp8"), default="auto", help="(auto)")
    engine = parser.add_argument_group("engine")
    add = adder(engine)
    add("--inflight", count, None, "N", "microbatches in flight (default: the better of p, p + 1)")
    add("--samplers", count, None, "N", "CPU samplers (default: as many as pay and are free)")
    worth = "say what a head that makes up to N is worth (default: 3; 0: do not)"
    add("--drafts", at_least(0, int, 64), 3, "N", worth)
    add("--acceptance", fraction, 0.7, "P", "probability that a draft is right (default: 0.7)")
    other = "compared with: vllm-async (the default on GPUs) or vllm, without async scheduling"
    add("--baseline", str, None, "NAME", other)
    drawn = "on: the output projection may be shared out on GPUs too, as the engine has it"
    engine.add_argument("--cpu-sampling", choices=("auto", "on"), default="auto", help=drawn)
    flag = parser.add_argument_group("inputs that nobody has measured on your cluster").add_argument
    flag("--assumptions", action="store_true", help="list them with their ranges, and stop")
    stated = "one of them, such as engine.sipipe.transfer_us=250; may be repeated"
    flag("--assume", metavar="INPUT=VALUE", action="append", default=[], help=stated)
    flag = parser.add_argument_group("output").add_argument
    flag("--json", action="store_true", help="everything as JSON instead of the table")
    return parser


def main(argv: Sequence[str]) -> int:
    """Print the plan; returns the exit status. 0: a deployment was found. 1: nothing fits or meets the
    budget, for the reasons in the table."""
    args = _parser().parse_args(argv)
    if args.list:
        _list()
        return 0
    if args.assumptions:
        print_assumptions()
        return 0
    for option, value in (("MODEL", args.model), ("--gpu", args.gpu)):
        if value is None:
            raise ConfigError(f"plan: {option} is missing (sipipe plan --list shows the names)")
    facts = load_model(args.model, weight_bits=args.weight_bits)
    stated = _given(args.assume)
    cluster = _cluster(args, Assumed(given=stated))
    workloads = [_workload(args, facts, sampling) for sampling in args.sampling]
    plans = [
        Search(
            costs=datasheet_costs(facts, cluster, workload, stated),
            workload=workload,
            baseline=args.baseline,
            inflight=args.inflight,
            samplers=args.samplers,
            cpu_sampling=args.cpu_sampling,
            given=stated,
            drafts=args.drafts,
            acceptance=args.acceptance,
        ).plan()
        for workload in workloads
    ]
    if args.json:
        print(json.dumps({plan.workload.sampling: plan_to_dict(plan) for plan in plans}, indent=2))
    else:
        print_tables(plans)
    return 0 if all(plan.choices for plan in plans) else 1


def _kinds(text: str) -> tuple[str, ...]:
    """The ``type`` of ``--sampling``. Names are checked with the workload."""
    return tuple(dict.fromkeys(kind.strip() for kind in text.split(",")))


def _given(stated: Sequence[str]) -> dict[str, float]:
    """The inputs of ``--assume``, by name. Raises ConfigError: a name is unknown, or a number wrong."""
    known = assumptions()
    values = {}
    for text in stated:
        name, _, number = text.partition("=")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else " (--assumptions lists them)"
            raise ConfigError(f'--assume: unknown input "{name}"{hint}')
        try:
            values[name] = float(number)
        except ValueError:
            values[name] = math.nan
        _, quickest, slowest, _ = known[name]
        # Of a rate more is quicker, and none would be for ever. Of a time less is quicker.
        rate = quickest > slowest
        if not (1e-9 if rate else 0) <= values[name] <= 1e9:
            least = "above 0" if rate else "of 0 or more"
            raise ConfigError(f'--assume {name}: must be a number {least}, not "{number}"')
    return values


def _cluster(args: argparse.Namespace, assumed: Assumed) -> Cluster:
    """The cluster that the options describe."""
    per_host = args.gpus_per_host or (1 if device(args.gpu).kind == "cpu" else 8)
    chosen = device(args.gpu, memory_gib=args.memory, parts=per_host, assumed=assumed)
    if args.gpu.lower() == "cpu":  # this machine's
        cores = len(os.sched_getaffinity(0))
    else:
        cores = chosen.cores * per_host or 96
    return Cluster(
        device=chosen,
        hosts=args.hosts,
        devices_per_host=per_host,
        network=network(args.network, args.adapters, assumed),
        cores_per_host=args.cores or cores,
    )


def _workload(args: argparse.Namespace, facts: ModelFacts, sampling: str) -> Workload:
    """The workload that the options describe, with one kind of ``sampling``. Raises ConfigError: it is
    longer than the model's context."""
    workload = Workload(
        input=args.input,
        output=args.output,
        tpot_slo=args.tpot_slo,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        min_kv_tokens=args.min_kv_tokens,
        weight_bits=args.weight_bits,
        sampling=sampling,
        memory_utilization=args.gpu_memory_utilization,
        kv_element_bytes=1.0 if args.kv_cache_dtype == "fp8" else None,
        fixed_batch=args.batch,
    )
    if 0 < facts.context_length < workload.longest:
        raise ConfigError(
            f"--input {workload.input} and --output {workload.output} are together over the "
            f"model's context length of {facts.context_length:,}"
        )
    return workload


def _list() -> None:
    """Print the models and devices that have names."""
    print("models")
    for name in builtin_models():
        facts = load_model(name)
        active = "" if facts.moe is None else f", {facts.active_parameters / 1e9:.1f}B active"
        print(f"  {name:<18} {facts.parameters / 1e9:7.1f}B{active}  {facts.layers} layers")
    print("devices")
    for name in names():
        kind = device(name)
        print(
            f"  {name:<18} {kind.name}: {kind.memory_gib:g} GiB, {kind.memory_gbs:g} GB/s, "
            f"{kind.bf16_tflops:g} TFLOPS BF16, {kind.link.name}"
        )
