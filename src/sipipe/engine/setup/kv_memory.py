"""What the KV caches of a CPU engine's workers get, and whether the memory has room for it.

vLLM lets each worker claim nearly all memory of its NUMA node, and refuses to start where less is
free. Here the workers of a node share what is free, and all get the share of the scarcest node:
vLLM has one size for all. It is part of what is decided (:mod:`sipipe.engine.setup.record`), so it is the
same by every way to start an engine. What the user has said counts.
"""

import math
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain

from vllm import EngineArgs, envs
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.utils import cpu_resource_utils

from sipipe.cores import CorePlan, this_machine
from sipipe.engine.layers.facts import ModelFacts
from sipipe.engine.setup.checkpoint import weight_bytes
from sipipe.errors import ConfigError, ResourceError
from sipipe.ipc.memory import group_limit, group_used

KV_CACHE_SHARE = 0.4
"""Part of a node's memory, less the weights, that its KV caches get together: the rest is for the
processes themselves, activations, and shared memory."""


def share_kv_memory(
    vllm_config: VllmConfig,
    plans: Sequence[CorePlan],
    layers: tuple[int, ...],
    facts: ModelFacts | None,
) -> int | None:
    """Bytes of KV cache for each worker of this host, whose replicas have ``plans``; None where vLLM or the
    user says how many. ``layers``: of every stage; ``facts``: of the model. Raises ResourceError: there is not so much
    memory free. ConfigError: there never is, or it is too little for one request."""
    if not current_platform.is_cpu():
        return None
    cache = vllm_config.cache_config
    nodes = worker_nodes(*plans)
    asked, share = cache.kv_cache_memory_bytes, cache.gpu_memory_utilization
    ours, stages = None, sum(len(plan.workers) for plan in plans)
    # vLLM's count files that a container has read, which the kernel gives back, as used.
    cpu_resource_utils.get_cgroup_memory_limit = group_limit
    cpu_resource_utils.get_cgroup_memory_usage = group_used
    if asked is None and share == EngineArgs.gpu_memory_utilization:
        weights = int(facts.parameters * facts.weight_bytes) if facts else weight_bytes(vllm_config)
        ours = kv_cache_bytes(nodes, weights * stages // len(layers))
    else:
        for node in set(nodes):
            memory = cpu_resource_utils.get_memory_node_info(node)
            if (wanted := asked or int(memory.total_memory * share)) > memory.available_memory:
                said = "--kv-cache-memory-bytes (VLLM_CPU_KVCACHE_SPACE)"
                raise (ConfigError if wanted > memory.total_memory else ResourceError)(
                    f"{said if asked else f'--gpu-memory-utilization {share}'}: each worker would "
                    f"take {wanted / 2**30:.1f} GiB of memory node {node}, which has "
                    f"{memory.available_memory / 2**30:.1f} GiB free: less, or leave it out"
                )
    if (size := asked or ours) and facts is not None:
        _check_longest(vllm_config, max(layers) * facts.attention.kv_elements, size)
    return ours


def _check_longest(vllm_config: VllmConfig, elements: int, size: int) -> None:
    """Refuse a ``--max-model-len`` of which one request has no room in ``size`` bytes, with so many
    ``elements`` a token. Where layers keep less than all of them, vLLM says so later."""
    model, text = vllm_config.model_config, vllm_config.model_config.hf_text_config
    whole = set(getattr(text, "layer_types", None) or ()) <= {"full_attention"}
    shared = getattr(text, "num_kv_shared_layers", 0) or model.original_max_model_len == -1
    all_keep = whole and not shared and model.attn_type == "decoder"  # an encoder keeps none
    if not all_keep or model.get_sliding_window() is not None:
        return
    widths = {"auto": model.dtype.itemsize, "bfloat16": 2, "float16": 2}
    width = widths.get(vllm_config.cache_config.cache_dtype, 0.5)  # others: no less than this
    each = elements * width / vllm_config.parallel_config.tensor_parallel_size
    if each * model.max_model_len > size:
        raise ConfigError(
            f"--max-model-len {model.max_model_len}: one request of it takes "
            f"{each * model.max_model_len / 2**30:.2f} GiB of a stage's KV cache, which has "
            f"{size / 2**30:.2f}: at most {int(size / each)}, more stages or --kv-cache-memory-bytes"
        )


def kv_cache_bytes(nodes: list[int], weights: int) -> int:
    """Bytes of KV cache for each worker, a whole number of MiB, by the workers' NUMA ``nodes``. Each
    loads an equal part of the model's ``weights``, in bytes. Raises ResourceError: a node, or the
    container, has no room for these themselves."""
    shares, places = [], []
    for node, workers in Counter(nodes).items():
        room = cpu_resource_utils.get_memory_node_info(node).available_memory
        places.append((f"memory node {node}", workers, room))
    if (limit := group_limit()) is not None:  # of all nodes together
        places.append(("this container", len(nodes), limit - (group_used() or 0)))
    for place, workers, available in places:
        loaded = weights * workers // len(nodes)
        if loaded >= available:
            raise ResourceError(
                f"{place} has {available / 2**30:.1f} GiB free, and the weights that "
                f"its {workers} workers load take {loaded / 2**30:.1f} GiB: use another node's "
                'cores ("cores"), a smaller model, or say what the KV caches get '
                "(--kv-cache-memory-bytes) if this is wrong"
            )
        shares.append(int((available - loaded) * KV_CACHE_SHARE) // workers)
    return min(shares) >> 20 << 20


def worker_nodes(*plans: CorePlan) -> list[int]:
    """The memory node of each worker as vLLM's worker finds it: that of its lowest CPU, by plan or by
    the user's own ``VLLM_CPU_OMP_THREADS_BIND``, which wins."""
    bound = envs.VLLM_CPU_OMP_THREADS_BIND
    ranks = [cpus for plan in plans for stage in plan.workers for cpus in stage]
    if bound == "nobind":
        ranks = [()] * len(ranks)
    elif bound != "auto":
        given: list[tuple[int, ...]] = []
        with suppress(ValueError):
            given = [tuple(cpu_resource_utils.parse_id_list(cpus)) for cpus in bound.split("|")]
        if len(given) < len(ranks):
            raise ConfigError(
                f'VLLM_CPU_OMP_THREADS_BIND "{bound}" must be "auto", "nobind", or CPUs such as '
                f'"0-3|4-7", for each of {len(ranks)} workers'
            )
        ranks = given
    node_of = {cpu.id: cpu.numa_node for cpu in cpu_resource_utils.get_allowed_cpu_list()}
    visible: list[int] = []
    with suppress(ValueError):
        visible = cpu_resource_utils.get_visible_memory_node()
    if not visible:
        raise ConfigError("CPU_VISIBLE_MEMORY_NODES names no memory node of this machine's")
    nodes = [node_of.get(min(cpus or node_of), visible[0]) for cpus in ranks]
    return [node if node in visible else visible[0] for node in nodes]


def spans_nodes(plan: CorePlan) -> bool:
    """Whether a worker has cores of several NUMA nodes."""
    nodes = {cpu: core.node for core in this_machine(most=math.inf) for cpu in core.cpus}
    return any(len({nodes.get(cpu) for cpu in rank}) > 1 for rank in chain(*plan.workers))
