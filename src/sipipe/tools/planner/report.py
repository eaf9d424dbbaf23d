"""A plan as JSON-ready values, and as the commands that start it."""

import dataclasses
import math
import shlex
from typing import Any

from sipipe.tools.planner.placement import kv_bytes_per_token
from sipipe.tools.planner.plan import Choice, Plan, Prediction

SEVERAL_HOSTS = (
    "HOST0 is the first host's address; every host needs the same secret in SIPIPE_SECRET "
    "(docs/multi-host.md)"
)
"""What to know about the serve commands of more than one host."""


def serve_commands(plan: Plan, choice: Choice) -> list[str]:
    """The exact commands that start ``choice``: one per host, the first host's first."""
    workload, best = plan.workload, choice.best
    words = ["sipipe", "serve", plan.facts.name, "--pp", str(choice.p), "--tp", str(choice.t)]
    words += [f"--samplers={choice.samplers}", f"--inflight={best.iteration.inflight}"]
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


def _fields(thing: Any, *names: str) -> dict[str, Any]:
    """Fields that the report calls as the thing itself does."""
    return {name: getattr(thing, name) for name in names}


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """Everything of a plan, JSON-ready; times in seconds, sizes in bytes."""
    facts, cluster, workload = plan.facts, plan.cluster, plan.workload
    model = _fields(facts, "name", "source", "parameters", "active_parameters", "layers", "hidden")
    model |= _fields(facts.attention, "heads", "kv_heads")
    model["attention"] = facts.attention.kind
    model |= _fields(facts, "vocabulary", "weight_bytes")
    model["kv_bytes_per_token"] = kv_bytes_per_token(facts, workload.kv_element_bytes)
    limited = not math.isinf(workload.tpot_slo)
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
            "tpot_slo": workload.tpot_slo if limited else None,
            **_fields(workload, "sampling", "max_num_seqs", "max_num_batched_tokens"),
        },
        "choices": [_choice(plan, choice) for choice in plan.choices],
        "rejected": [dataclasses.asdict(reject) for reject in plan.rejected],
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
    return {
        "engine": prediction.engine.name,
        **_fields(prediction, "throughput", "tpot", "lowest_tpot", "batch"),
        **_fields(prediction.iteration, "inflight", "period", "limit"),
        "capped_by": prediction.capped_by,
        "bubbles": {"total": prediction.iteration.idle, **prediction.iteration.bubbles},
        "unmeasured": list(prediction.unmeasured),
    }
