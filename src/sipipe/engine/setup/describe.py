"""Description of a host's part of an engine, for its user."""

from __future__ import annotations

from vllm.platforms import current_platform

from sipipe import cpu_features
from sipipe.config import asked_of_sipipe
from sipipe.core_binding import claimed
from sipipe.cores import format_cpus
from sipipe.engine.layers.choose import describe_layers
from sipipe.engine.setup.kv_memory import spans_nodes
from sipipe.engine.setup.memory_budget import check_budget, describe, memory_budget
from sipipe.engine.setup.record import Setup


def describe_setup(setup: Setup) -> list[str]:
    """Lines on what this host does: cores, memory, layers, the output projection, and advice. Raises
    ResourceError: too little shared memory."""
    budget = memory_budget(setup)
    check_budget(budget)
    lines = []
    if setup.config.hosts.count > 1:
        lines.append(f"host {setup.node} of {setup.config.hosts.count}: {setup.host_parts()}")
    replicas = setup.vllm_config.replicas
    if replicas > 1:
        replica = setup.vllm_config.parallel_config.data_parallel_index
        lines.append(f"replica {replica} of {replicas}, each on its share of the cores:")
    lines += _describe_cores(setup)
    lines.append(describe(budget))
    if setup.node == 0:  # the main host decides on the layers, and says so
        by_cost = not setup.reason and not setup.vocabulary.parts
        lines.append(
            describe_layers(
                setup.vllm_config, setup.config, setup.decoder, setup.layers, by_cost=by_cost
            )
        )
    lines.append(str(setup.vocabulary))
    lines += _notes(setup)
    return [line for line in lines if line]


def _describe_cores(setup: Setup) -> list[str]:
    """Lines on the cores of this host's processes, and on those that another engine has, too."""
    elsewhere = setup.host_stages[-1] < setup.stages - 1
    lines = list(setup.cores.describe(setup.host_stages[0], elsewhere=elsewhere))
    in_use = setup.cores.cpus & claimed()
    if in_use:
        lines.append(
            f"           another engine is bound to {format_cpus(in_use)} too: "
            'give each its own (taskset -c, or "cores")'
        )
    return lines


def _notes(setup: Setup) -> list[str]:
    """Lines on who draws, and on what may be slower than the user expects."""
    notes = []
    if setup.reason:
        notes.append(f"vLLM's sampler draws on the last stage: {setup.reason}")
    if not current_platform.is_cpu():
        notes.append("SiPipe has run on one GPU only (docs/gpu.md)")
        if setup.stages == 1:
            notes.append(_why_one_stage(setup))
        return notes
    if setup.dtype != "float32" and cpu_features.slow():
        notes.append(f"{setup.dtype}: {cpu_features.HINT}")
    if spans_nodes(setup.cores):
        notes.append(
            "A worker has cores of several NUMA nodes, and its memory on one: "
            "as many workers as nodes may be quicker (--pp, --tp)"
        )
    return notes


def _why_one_stage(setup: Setup) -> str:
    """Line on why SiPipe runs one stage on a GPU, which vLLM's own executor otherwise would."""
    settings = asked_of_sipipe(setup.vllm_config.additional_config)
    why = "as nothing else can"
    if settings:
        names = " and ".join(f'"{name}"' for name in settings)
        why = f"as {names} asks"
    return (
        f"one stage on a GPU is run by SiPipe, {why}: "
        "vLLM's own executor was quicker with one stage (docs/one-stage.md)"
    )
