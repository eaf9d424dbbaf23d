"""What a host does, for its user."""

from __future__ import annotations

from vllm.platforms import current_platform

from sipipe import cpu_features
from sipipe.config import asked_of_sipipe
from sipipe.cores import (
    claimed,
    format_cpus,
)
from sipipe.engine.layers.choose import describe_layers
from sipipe.engine.setup.kv_memory import spans_nodes
from sipipe.engine.setup.memory_budget import check_budget, describe, memory_budget
from sipipe.engine.setup.record import Setup


def _asked(setup: Setup) -> list[str]:
    """Settings by which SiPipe runs what vLLM's own executor otherwise would."""
    return asked_of_sipipe(setup.vllm_config.additional_config)


def describe_setup(setup: Setup) -> list[str]:
    """What this host does, for its user. Raises ResourceError: too little shared memory."""
    budget = memory_budget(setup)
    check_budget(budget)
    notes = [f"vLLM's sampler draws on the last stage: {setup.reason}"] if setup.reason else []
    if not current_platform.is_cpu():
        notes.append("SiPipe has run on one GPU only (docs/gpu.md)")
        if setup.stages == 1:
            asked = " and ".join(f'"{name}"' for name in _asked(setup))
            why = f"as {asked} asks" if asked else "as nothing else can"
            quicker = "vLLM's own executor was quicker with one stage (docs/one-stage.md)"
            notes.append(f"one stage on a GPU is run by SiPipe, {why}: {quicker}")
    elif setup.dtype != "float32" and cpu_features.slow():
        notes.append(f"{setup.dtype}: {cpu_features.HINT}")
    if current_platform.is_cpu() and spans_nodes(setup.cores):
        spans = "A worker has cores of several NUMA nodes, and its memory on one"
        notes.append(f"{spans}: as many workers as nodes may be quicker (--pp, --tp)")
    elsewhere = setup.here[-1] < setup.stages - 1
    cores: tuple[str, ...] = setup.cores.describe(setup.here[0], elsewhere=elsewhere)
    if both := setup.cores.cpus & claimed():
        own = 'give each its own (taskset -c, or "cores")'
        cores += (f"           another engine is bound to {format_cpus(both)} too: {own}",)
    cut, by_cost = "", not setup.reason and not setup.vocabulary.parts
    if not setup.node:  # the main host decides
        cut = describe_layers(setup.vllm_config, setup.config, setup.layers, by_cost=by_cost)
    lines = [*cores, describe(budget), cut, str(setup.vocabulary), *notes]
    if (replicas := setup.vllm_config.replicas) > 1:
        number = setup.vllm_config.parallel_config.data_parallel_index
        lines.insert(0, f"replica {number} of {replicas}, each on its share of the cores:")
    if setup.config.hosts.count > 1:
        lines.insert(0, f"host {setup.node} of {setup.config.hosts.count}: {setup.has()}")
    return [line for line in lines if line]
