"""Memory for the KV caches of a CPU engine's workers.

vLLM lets each worker claim nearly all memory of its NUMA node, and refuses to start where less is
free. Here the workers of a node share what is free. All workers get the share of the scarcest node,
because vLLM has one size for all. The size is part of what is decided
(:mod:`sipipe.engine.setup.record`), so it is the same by every way to start an engine. A size that the
user has named counts, and is only checked.
"""

import math
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain

from vllm import EngineArgs, envs
from vllm.config import ModelConfig, VllmConfig
from vllm.platforms import current_platform
from vllm.utils import cpu_resource_utils

from sipipe.cores import CorePlan, this_machine
from sipipe.engine.layers.facts import ModelFacts
from sipipe.engine.setup.checkpoint import weight_bytes
from sipipe.engine.setup.draft_head import head_of
from sipipe.errors import ConfigError, ResourceError
from sipipe.ipc.memory import group_limit, group_used

MIB = 1 << 20
GIB = 1 << 30

NAMED = "--kv-cache-memory-bytes (VLLM_CPU_KVCACHE_SPACE)"
"""The option, and the variable, by which a user names the size."""
KV_CACHE_SHARE = 0.4
"""Part of a node's memory, less the weights, that its KV caches get together. The rest is for the
processes themselves, activations, and shared memory."""


def share_kv_memory(
    vllm_config: VllmConfig,
    plans: Sequence[CorePlan],
    layers: tuple[int, ...],
    facts: ModelFacts | None,
) -> int | None:
    """Bytes of KV cache for each worker of this host, or None where vLLM or the user says how many.

    Args:
        vllm_config: the configuration, with what the user says of memory.
        plans: the cores of each replica on this host.
        layers: decoder layers of every stage, those of other hosts among them.
        facts: sizes of the model's weights, if they are known.

    Raises ResourceError: so much memory is not free. ConfigError: there never is so much, or it is too
    little for one request, or none."""
    if not current_platform.is_cpu():
        return None
    cache = vllm_config.cache_config
    named_bytes: int | None = cache.kv_cache_memory_bytes
    if named_bytes is not None and named_bytes <= 0:
        raise ConfigError(f"{NAMED} must be above 0, not {named_bytes}: leave it out")
    nodes = worker_nodes(*plans)
    # vLLM counts files that a container has read as used memory, which the kernel would give back.
    cpu_resource_utils.get_cgroup_memory_limit = group_limit
    cpu_resource_utils.get_cgroup_memory_usage = group_used
    planned: int | None = None
    if named_bytes is None and cache.gpu_memory_utilization == EngineArgs.gpu_memory_utilization:
        planned = kv_cache_bytes(nodes, _weights_of_host(vllm_config, plans, layers, facts))
    else:
        _check_memory(nodes, named_bytes, cache.gpu_memory_utilization)
    size = named_bytes or planned
    if size and facts is not None:
        check_longest(vllm_config, max(layers) * facts.attention.kv_elements, size)
    return planned


def _weights_of_host(
    vllm_config: VllmConfig,
    plans: Sequence[CorePlan],
    layers: tuple[int, ...],
    facts: ModelFacts | None,
) -> int:
    """Bytes of the weights that the stages of this host load, in all replicas, with those of a draft
    model. Where the model's configuration does not tell their sizes, those of its files count."""
    load = vllm_config.load_config
    if facts is None:
        weights = weight_bytes(vllm_config.model_config, load)
    else:
        weights = int(facts.parameters * facts.weight_bytes)
    head = head_of(vllm_config)
    if head is not None and head.draft_model_config.model != vllm_config.model_config.model:
        weights += weight_bytes(head.draft_model_config, load)
    stages_here = sum(len(plan.workers) for plan in plans)
    return weights * stages_here // len(layers)


def _check_memory(nodes: list[int], named_bytes: int | None, share: float) -> None:
    """Refuse KV caches that a memory node has no room for, of ``named_bytes`` for each worker or of
    ``share`` of the node's memory. Raises ConfigError: the node has never so much. ResourceError: it
    has not so much free."""
    for node in set(nodes):
        memory = cpu_resource_utils.get_memory_node_info(node)
        wanted = named_bytes or int(memory.total_memory * share)
        if wanted <= memory.available_memory:
            continue
        option = f"--gpu-memory-utilization {share}"
        if named_bytes:
            option = NAMED
        refusal = ConfigError if wanted > memory.total_memory else ResourceError
        raise refusal(
            f"{option}: each worker would take {wanted / GIB:.1f} GiB of memory node {node}, which "
            f"has {memory.available_memory / GIB:.1f} GiB free: less, or leave it out"
        )


def check_longest(vllm_config: VllmConfig, elements: int, size: int) -> None:
    """Refuse a ``--max-model-len`` of which one request has no room in the cache of the largest stage,
    of ``size`` bytes, where a token has so many ``elements``. Where layers keep less than all tokens,
    vLLM finds it out later. Raises ConfigError."""
    model = vllm_config.model_config
    if not _keeps_all_tokens(model):
        return
    widths = {"auto": model.dtype.itemsize, "bfloat16": 2, "float16": 2}
    width = widths.get(vllm_config.cache_config.cache_dtype, 0.5)  # no other dtype is narrower
    token_bytes = elements * width / vllm_config.parallel_config.tensor_parallel_size
    needed = token_bytes * model.max_model_len
    if needed > size:
        raise ConfigError(
            f"--max-model-len {model.max_model_len}: one request of it takes "
            f"{needed / GIB:.2f} GiB of a stage's KV cache, which has {size / GIB:.2f}: "
            f"at most {int(size / token_bytes)}, more stages or --kv-cache-memory-bytes"
        )


def _keeps_all_tokens(model: ModelConfig) -> bool:
    """True if every layer of the model keeps every token of a request in a KV cache of its own."""
    text = model.hf_text_config
    kinds = set(getattr(text, "layer_types", None) or ())
    if kinds - {"full_attention"} or model.get_sliding_window() is not None:
        return False
    if getattr(text, "num_kv_shared_layers", 0):
        return False
    if model.original_max_model_len == -1:  # vLLM makes the longest request fit
        return False
    return bool(model.attn_type == "decoder")  # an encoder keeps none


def kv_cache_bytes(nodes: list[int], weights: int) -> int:
    """Bytes of KV cache for each worker, a whole number of MiB, by the workers' NUMA ``nodes``. Each
    worker loads an equal part of ``weights``, in bytes. Raises ResourceError: a node, or the
    container, has no room for the weights themselves."""
    places = []
    for node, workers in Counter(nodes).items():
        room = cpu_resource_utils.get_memory_node_info(node).available_memory
        places.append((f"memory node {node}", workers, room))
    limit = group_limit()
    if limit is not None:  # the container's, which holds for all nodes together
        places.append(("this container", len(nodes), limit - (group_used() or 0)))
    shares = []
    for place, workers, available in places:
        loaded = weights * workers // len(nodes)
        if loaded >= available:
            raise ResourceError(
                f"{place} has {available / GIB:.1f} GiB free, and the weights that "
                f"its {workers} workers load take {loaded / GIB:.1f} GiB: use another node's "
                'cores ("cores"), a smaller model, or say what the KV caches get '
                "(--kv-cache-memory-bytes) if this is wrong"
            )
        shares.append(int((available - loaded) * KV_CACHE_SHARE) // workers)
    return min(shares) // MIB * MIB


def worker_nodes(*plans: CorePlan) -> list[int]:
    """The memory node of each worker as vLLM's worker finds it: that of its lowest CPU, by plan or by
    the user's own ``VLLM_CPU_OMP_THREADS_BIND``, which wins. Raises ConfigError: that variable has no
    CPUs for each worker, or ``CPU_VISIBLE_MEMORY_NODES`` no node of this machine."""
    node_of = {cpu.id: cpu.numa_node for cpu in cpu_resource_utils.get_allowed_cpu_list()}
    visible: list[int] = []
    with suppress(ValueError):
        visible = cpu_resource_utils.get_visible_memory_node()
    cpus_of_workers = _cpus_of_workers(plans)
    if not visible:
        raise ConfigError("CPU_VISIBLE_MEMORY_NODES names no memory node of this machine's")
    nodes = []
    for cpus in cpus_of_workers:
        node = node_of.get(min(cpus or node_of), visible[0])
        nodes.append(node if node in visible else visible[0])
    return nodes


def _cpus_of_workers(plans: Sequence[CorePlan]) -> list[tuple[int, ...]]:
    """The CPUs that each worker's threads are bound to; none where they are not bound. Raises
    ConfigError: ``VLLM_CPU_OMP_THREADS_BIND`` has no CPUs for each worker."""
    planned = [cpus for plan in plans for stage in plan.workers for cpus in stage]
    bind = envs.VLLM_CPU_OMP_THREADS_BIND
    if bind == "auto":
        return planned
    if bind == "nobind":
        return [()] * len(planned)
    named: list[tuple[int, ...]] = []
    with suppress(ValueError):
        named = [tuple(cpu_resource_utils.parse_id_list(cpus)) for cpus in bind.split("|")]
    if len(named) < len(planned):
        raise ConfigError(
            f'VLLM_CPU_OMP_THREADS_BIND "{bind}" must be "auto", "nobind", or CPUs such as '
            f'"0-3|4-7", for each of {len(planned)} workers'
        )
    return named


def spans_nodes(plan: CorePlan) -> bool:
    """True if a worker has cores of several NUMA nodes."""
    nodes = {cpu: core.node for core in this_machine(most=math.inf) for cpu in core.cpus}
    nodes_of_workers = [{nodes.get(cpu) for cpu in cpus} for cpus in chain(*plan.workers)]
    return any(len(nodes_of_worker) > 1 for nodes_of_worker in nodes_of_workers)
