"""A plan as JSON-ready values, and as the commands that start it."""

import math
import shlex
from typing import Any

from sipipe.tools.planner.placement import kv_bytes_per_token
from sipipe.tools.planner.plan import OURS, Choice, DraftWorth, Plan

_INTERVALS = (2, 4, 8, 16)
"""Tokens of a chunk that a reader hardly notices, at rates that need them."""
_ROOM = 0.9
"""Part of the predicted KV cache that one sequence may ask for: memory is predicted, not measured."""


def serve_commands(plan: Plan, choice: Choice) -> list[str]:
    """The exact commands that start ``choice``: one per host, the first host's first.
    ``CHECKPOINT`` stands for the model where ``--weight-bits`` asks for one that it is not."""
    facts = plan.facts
    workload = plan.workload
    gpu = plan.cluster.device.kind == "gpu"
    ours = choice.engine.key == OURS
    quantize = gpu and workload.weight_bits == 8
    name = facts.name if quantize or workload.weight_bits is None else "CHECKPOINT"
    words = ["sipipe" if ours else "vllm", "serve", name]
    words += ["-pp", str(choice.p), "-tp", str(choice.t)]
    if quantize:
        words += ["--quantization", "fp8"]
    if ours:
        words += [f"--samplers={choice.samplers}"]
        if choice.inflight != choice.p + 1:
            words += [f"--inflight={choice.inflight}"]
        layers = tuple(stage.layers for stage in choice.placement.stages)
        shares = choice.placement.shares_projection
        if choice.p > 1 and (shares or not gpu):
            words += ["--vocabulary", choice.vocabulary]
        if gpu and shares:
            words += ["--additional-config", '{"sipipe": {"cpu_sampling": "on"}}']
        if layers != choice.cut and not shares:
            words += ["--layers", ",".join(map(str, layers))]
    words += ["--max-num-seqs", str(choice.batch)]
    words += ["--max-num-batched-tokens", str(max(workload.max_num_batched_tokens, choice.batch))]
    room = int(choice.memory.kv_tokens * _ROOM)
    if facts.context_length > room:  # vLLM refuses lengths that its cache cannot hold
        words += ["--max-model-len", str(max(workload.longest, room))]
    if gpu:
        words += ["--gpu-memory-utilization", f"{workload.memory_utilization:g}"]
    if workload.kv_element_bytes == 1.0:
        words += ["--kv-cache-dtype", "fp8"]
    if gpu and choice.engine.key == "vllm":
        words += ["--no-async-scheduling"]
    servers = plan.api_servers(choice)
    front_end = ["--api-server-count", str(servers)] if servers > 1 else []
    if (hosts := plan.cluster.hosts) == 1:
        return [shlex.join(words + front_end)]
    commands = []
    for rank in range(hosts):
        more = ["--nnodes", str(hosts), "--node-rank", str(rank), "--master-addr", "HOST0"]
        commands.append(shlex.join(words + more + (["--headless"] if rank else front_end)))
    return commands


def notes(plan: Plan, choice: Choice) -> list[str]:
    """Remarks to read before the commands of ``choice`` are typed."""
    remarks = []
    if plan.cluster.hosts > 1:
        secret = "; every host needs the same secret in SIPIPE_SECRET (docs/multi-host.md)"
        remarks.append("HOST0 is the first host's address" + secret * (choice.engine.key == OURS))
    bits = plan.workload.weight_bits
    if bits is not None and not (bits == 8 and plan.cluster.device.kind == "gpu"):
        remarks.append(f"CHECKPOINT is one of {plan.facts.name} with {bits:g} bits per weight")
    remarks += _front_end_notes(plan, choice)
    return remarks


def _front_end_notes(plan: Plan, choice: Choice) -> list[str]:
    """A remark on the API servers that stream the tokens of ``choice``, and on what larger chunks save of
    them; none where one is enough."""
    servers = plan.api_servers(choice)
    if servers == 1:
        return []
    rate = plan.front_end.tokens_per_second(1)
    by_interval = {interval: plan.api_servers(choice, interval) for interval in _INTERVALS}
    interval = min(by_interval, key=lambda interval: (by_interval[interval], interval))
    fewer = by_interval[interval]
    text = f"{servers} API servers, as one streams about {rate:,.0f} tokens/s"
    if fewer < servers:
        text += f", and {fewer} {'do' if fewer > 1 else 'does'} with --stream-interval {interval}"
    return [text]


def _fields(thing: Any, *names: str) -> dict[str, Any]:
    """Fields that the report calls as the thing itself does."""
    return {name: getattr(thing, name) for name in names}


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """Everything of a plan, JSON-ready; times in seconds, sizes in bytes."""
    facts = plan.facts
    cluster = plan.cluster
    workload = plan.workload
    model = _fields(facts, "name", "source", "parameters", "active_parameters", "layers", "hidden")
    model |= _fields(facts.attention, "heads", "kv_heads")
    model["attention"] = facts.attention.kind
    model |= _fields(facts, "vocabulary", "weight_bytes")
    model["kv_bytes_per_token"] = kv_bytes_per_token(facts, workload.kv_element_bytes)
    return {
        "model": model,
        "cluster": {
            "device": cluster.device.name,
            "hosts": cluster.hosts,
            "devices_per_host": cluster.devices_per_host,
            "link": cluster.device.link.name,
            "network_gigabits": cluster.network.gigabits,
            "adapters_per_host": cluster.network.adapters,
            "cores_per_host": cluster.cores_per_host,
        },
        "workload": {
            **_fields(workload, "input", "output"),
            "tpot_slo": None if math.isinf(workload.tpot_slo) else workload.tpot_slo,
            **_fields(workload, "sampling", "max_num_seqs", "max_num_batched_tokens"),
        },
        "choices": [_choice(plan, choice) for choice in plan.choices],
        "rejected": [reject._asdict() for reject in plan.rejected],
        "gain": plan.gain._asdict() if plan.gain else None,
        "drafts": None if plan.drafts is None else _drafts(plan.drafts),
        "serve": serve_commands(plan, plan.best) if plan.best else [],
        "notes": notes(plan, plan.best) if plan.best else [],
    }


def _drafts(worth: DraftWorth) -> dict[str, Any]:
    return {
        **_fields(worth, "drafts", "batch", "acceptance", "tokens_a_pass", "longer", "gain"),
        **_fields(worth, "throughput", "tpot"),
        "layers": list(worth.layers),
    }


def worth_line(plan: Plan) -> str:
    """One sentence on what a draft head is worth; empty where that was not asked."""
    worth = plan.drafts
    if worth is None:
        return ""
    head = (
        f"a draft head: {worth.drafts} draft(s) of a sequence, each right with probability "
        f"{worth.acceptance:g} (--drafts, --acceptance), make {worth.tokens_a_pass:.2f} tokens of a "
        f"pass that takes {worth.longer:.2f} x as long"
    )
    if worth.gain <= 1.0:
        return f"{head}: not worth it with so many sequences"
    layers = ", ".join(map(str, worth.layers))
    stages = f", layers of the stages {layers}" if len(worth.layers) > 1 else ""
    ours = plan.fastest(True)
    fewer = ""
    if ours is not None and worth.batch < ours.batch:
        fewer = f", {worth.batch} sequences at once beside its weights and KV cache"
    return (
        f"{head}: {worth.gain:.2f} x SiPipe's best row, {worth.throughput:,.0f} tok/s, "
        f"TPOT {worth.tpot * 1e3:.1f} ms{stages}{fewer}"
    )


def _choice(plan: Plan, choice: Choice) -> dict[str, Any]:
    return {
        "engine": choice.engine.key,
        **_fields(choice, "p", "t", "vocabulary", "throughput", "tpot", "lowest_tpot"),
        **_fields(choice, "batch", "samplers"),
        "api_servers": plan.api_servers(choice),
        "throughput_range": [choice.slowest.throughput, choice.quickest.throughput],
        "tpot_range": [choice.quickest.delay, choice.slowest.delay],
        "kv_tokens_range": [choice.slowest.kv_tokens, choice.quickest.kv_tokens],
        "kv_loss": choice.kv_loss,
        **_fields(choice.iteration, "inflight", "period", "limit"),
        "capped_by": choice.capped_by,
        "bubbles": {"total": choice.iteration.idle, **choice.iteration.bubbles},
        "kv_tokens": choice.memory.kv_tokens,
        "weights_per_device": choice.memory.weights,
        "communication_per_device": choice.communication_bytes,
        "hops_between_hosts": choice.placement.crossings,
        "serve": serve_commands(plan, choice),
    }
