"""How much memory the KV caches of CPU stages get, where nobody has said.

Stock vLLM lets each worker claim nearly all memory of its NUMA node; the second worker on a node
then finds too little and stops. Here each node's memory is shared by the workers that are bound to
it. All workers get the share of the scarcest node: vLLM has one size for all.
"""

import argparse
import os
from collections import Counter

from vllm import AsyncEngineArgs, envs
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.utils import cpu_resource_utils

from sipipe.cores import CorePlan
from sipipe.engine.layers.choose import model_facts
from sipipe.errors import ResourceError

KV_CACHE_SHARE = 0.4
"""Part of a node's memory, less the weights, that its KV caches get together: the rest is for the
processes themselves, activations, and shared memory."""


def share_kv_memory(
    args: argparse.Namespace | AsyncEngineArgs, vllm_config: VllmConfig, plan: CorePlan
) -> None:
    """Set ``args.kv_cache_memory_bytes`` where the CPU engine would otherwise take too much."""
    chosen = (
        args.kv_cache_memory_bytes is not None
        or os.environ.get("VLLM_CPU_KVCACHE_SPACE")
        or args.gpu_memory_utilization != AsyncEngineArgs.gpu_memory_utilization
    )
    if not current_platform.is_cpu() or chosen:
        return
    facts = model_facts(vllm_config)
    weights = int(facts.parameters * facts.weight_bytes) if facts is not None else 0
    args.kv_cache_memory_bytes = kv_cache_bytes(worker_nodes(plan), weights)


def kv_cache_bytes(nodes: list[int], weights: int) -> int:
    """Bytes of KV cache for each worker, a whole number of MiB.

    Args:
        nodes: NUMA node of each worker.
        weights: bytes of the model's weights, of which each worker loads an equal part.

    Raises:
        ResourceError: a node has no room for the weights themselves.
    """
    shares = []
    for node, workers in Counter(nodes).items():
        available = cpu_resource_utils.get_memory_node_info(node).available_memory
        loaded = weights * workers // len(nodes)
        if loaded >= available:
            raise ResourceError(
                f"memory node {node} has {available / 2**30:.1f} GiB free, and the weights that "
                f"its {workers} workers load take {loaded / 2**30:.1f} GiB: use another node's "
                'cores ("cores"), a smaller model, or say what the KV caches get '
                "(--kv-cache-memory-bytes) if this is wrong"
            )
        shares.append(int((available - loaded) * KV_CACHE_SHARE) // workers)
    return min(shares) >> 20 << 20


def worker_nodes(plan: CorePlan) -> list[int]:
    """The memory node of each worker as vLLM's worker finds it: that of its lowest CPU."""
    node_of = {cpu.id: cpu.numa_node for cpu in cpu_resource_utils.get_allowed_cpu_list()}
    visible = cpu_resource_utils.get_visible_memory_node()
    nodes = [node_of[min(cpus or node_of)] for cpus in worker_cpus(plan)]
    return [node if node in visible else visible[0] for node in nodes]


def worker_cpus(plan: CorePlan) -> list[tuple[int, ...]]:
    """CPUs that each worker's threads are bound to, by rank; empty where they are not bound.

    A binding that the user has set in ``VLLM_CPU_OMP_THREADS_BIND`` wins over the plan.
    """
    bound = envs.VLLM_CPU_OMP_THREADS_BIND
    ranks = [cpus for stage in plan.workers for cpus in stage]
    if bound == "auto":
        return ranks
    if bound == "nobind":
        return [()] * len(ranks)
    return [tuple(cpu_resource_utils.parse_id_list(cpus)) for cpus in bound.split("|")]
