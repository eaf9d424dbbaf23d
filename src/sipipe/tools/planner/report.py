"""A plan as JSON-ready values, as text for people, and as the commands that start it."""

from __future__ import annotations

import json
import math
import shlex
from typing import Any

from sipipe.tools.planner.memory import kv_bytes_per_token
from sipipe.tools.planner.plan import Choice, Plan, Prediction

__all__ = ["SEVERAL_HOSTS", "limits", "plan_to_dict", "serve_commands", "to_json"]


SEVERAL_HOSTS = (
    "HOST0 is the first host's address. This SiPipe starts stages on one host only and refuses "
    "--nnodes; vLLM itself takes the same commands as `vllm serve --pipeline-parallel-size P "
    "--tensor-parallel-size T` without --samplers and --inflight"
)
"""What to know about the serve commands of more than one host, today."""


def limits(prediction: Prediction) -> str:
    """What the time goes to, and what keeps the batch from growing."""
    return f"{prediction.iteration.limit}; {prediction.capped_by}"


def serve_commands(plan: Plan, choice: Choice) -> list[str]:
    """The exact commands that start ``choice``: one per host, the first host's first."""
    workload, best = plan.workload, choice.best
    settings = {"samplers": choice.samplers, "inflight": best.iteration.inflight}
    words = ["sipipe", "serve", plan.facts.name]
    words += ["--pp", str(choice.p), "--tp", str(choice.t)]
    words += [f"--{name}={value}" for name, value in settings.items()]
    words += ["--max-num-seqs", str(best.batch)]
    words += ["--max-num-batched-tokens", str(workload.max_num_batched_tokens)]
    if plan.cluster.device.kind == "gpu":
        words += ["--gpu-memory-utilization", f"{workload.memory_utilization:g}"]
    if workload.kv_element_bytes == 1.0:
        words += ["--kv-cache-dtype", "fp8"]
    layers = tuple(stage.layers for stage in choice.placement.stages)
    if layers != choice.cut:
        words += ["--layers", ",".join(map(str, layers))]
    hosts = plan.cluster.hosts
    if hosts == 1:
        return [shlex.join(words)]
    commands = []
    for rank in range(hosts):
        more = ["--nnodes", str(hosts), "--node-rank", str(rank), "--master-addr", "HOST0"]
        commands.append(shlex.join(words + more + (["--headless"] if rank else [])))
    return commands


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """Everything of a plan, JSON-ready; times in seconds, sizes in bytes."""
    facts, cluster, workload = plan.facts, plan.cluster, plan.workload
    return {
        "model": {
            "name": facts.name,
            "source": facts.source,
            "parameters": facts.parameters,
            "active_parameters": facts.active_parameters,
            "layers": facts.layers,
            "hidden": facts.hidden,
            "heads": facts.attention.heads,
            "kv_heads": facts.attention.kv_heads,
            "attention": facts.attention.kind,
            "vocabulary": facts.vocabulary,
            "weight_bytes": facts.weight_bytes,
            "kv_bytes_per_token": kv_bytes_per_token(facts, workload.kv_element_bytes),
        },
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
            "input": workload.input,
            "output": workload.output,
            "tpot_slo": None if math.isinf(workload.tpot_slo) else workload.tpot_slo,
            "sampling": workload.sampling,
            "max_num_seqs": workload.max_num_seqs,
            "max_num_batched_tokens": workload.max_num_batched_tokens,
        },
        "choices": [_choice(plan, choice) for choice in plan.choices],
        "rejected": [{"p": r.p, "t": r.t, "reason": r.reason} for r in plan.rejected],
        "serve": serve_commands(plan, plan.best) if plan.best else [],
        "serve_note": SEVERAL_HOSTS if cluster.hosts > 1 else None,
    }


def _choice(plan: Plan, choice: Choice) -> dict[str, Any]:
    return {
        "p": choice.p,
        "t": choice.t,
        "sipipe": _prediction(choice.best),
        "baseline": _prediction(choice.baseline) if choice.baseline else None,
        "baseline_reason": choice.baseline_reason or None,
        "gain": choice.gain,
        "samplers": choice.samplers,
        "kv_tokens": choice.memory.kv_tokens,
        "weights_per_device": choice.memory.weights,
        "communication_per_device": choice.communication_bytes,
        "hops_between_hosts": choice.placement.crossings,
        "serve": serve_commands(plan, choice),
    }


def _prediction(prediction: Prediction) -> dict[str, Any]:
    iteration = prediction.iteration
    bubbles = iteration.bubbles
    return {
        "engine": prediction.engine.name,
        "throughput": prediction.throughput,
        "tpot": prediction.tpot,
        "lowest_tpot": prediction.lowest_tpot,
        "batch": prediction.batch,
        "inflight": iteration.inflight,
        "period": iteration.period,
        "limit": iteration.limit,
        "capped_by": prediction.capped_by,
        "bubbles": {
            "total": bubbles.total,
            "load_imbalance": bubbles.load_imbalance,
            "intra_stage": bubbles.intra_stage,
            "inter_stage": bubbles.inter_stage,
            "starved": bubbles.starved,
        },
        "unmeasured": list(prediction.unmeasured),
    }


def to_json(plan: Plan, **more: Any) -> str:
    """:func:`plan_to_dict` and ``more`` as indented JSON."""
    return json.dumps({**plan_to_dict(plan), **more}, indent=2)
