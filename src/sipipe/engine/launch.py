"""Starts vLLM's own front ends with SiPipe's executor: the server, and an engine in this process.

All checks happen here, in the foreground, on the very configuration that the engine will get: a
refusal is one line, not a traceback from a child process.
"""

import argparse
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from vllm import AsyncEngineArgs, envs
from vllm.logger import configure_logging_from_args
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.utils import cpu_resource_utils

from sipipe.cores import CorePlan
from sipipe.engine.agent import run_agent
from sipipe.engine.arguments import OneLineParser, begin, checked, use_sipipe
from sipipe.engine.hosts import check_main_host
from sipipe.engine.layers.choose import model_facts
from sipipe.engine.ray_placement import place
from sipipe.engine.setup import Setup, decide
from sipipe.errors import ConfigError, ResourceError
from sipipe.ipc.tcp import check_port
from sipipe.observe.recorder import check_directory

MIDDLEWARE = "sipipe.engine.health.Health"


def serve(
    argv: Sequence[str],
    settings: dict[str, Any],
    node: int = 0,
    *,
    started: Callable[[argparse.Namespace], object],
) -> int:
    """``vllm serve`` with ``argv``, SiPipe's executor and its ``settings``; returns when it ends.

    On host ``node`` 1 and up, the host agent, which has the same command line. ``started`` is
    called with vLLM's arguments once they have passed all checks.

    Raises:
        ConfigError, UnsupportedError, ResourceError: before anything has been started.
    """
    from vllm.entrypoints.cli.serve import ServeSubcommand

    begin()
    command = ServeSubcommand()
    parser = OneLineParser(prog="sipipe")
    command.subparser_init(parser.add_subparsers(dest="subparser"))
    args = parser.parse_args(["serve", *argv])
    if args.model_tag is not None:
        args.model = args.model_tag
    elif not any(word.split("=")[0] in ("--model", "--config") for word in argv):
        raise ConfigError("serve: name the MODEL, a directory or a name on the Hugging Face hub")
    by_ray = args.distributed_executor_backend == "ray"
    if by_ray:
        args.distributed_executor_backend = None
    use_sipipe(args, settings)
    configure_logging_from_args(args)
    command.validate(args)
    vllm_config = checked(
        lambda: AsyncEngineArgs.from_cli_args(args).create_engine_config(
            usage_context=UsageContext.OPENAI_API_SERVER
        ),
        args.model,
    )
    if by_ray:
        placement = place(vllm_config)
        args.additional_config = vllm_config.additional_config
    setup = decide(vllm_config, node)
    shares = share_kv_memory(args, setup)
    announce(setup)
    if node:
        return run_agent(setup, args.kv_cache_memory_bytes)
    if not (args.uds or args.headless):  # vLLM looks too, but shares a port that allows it
        check_port(args.host or "", args.port, "choose another --port")
    check_main_host(setup.config.hosts)
    if by_ray:
        placement.start(vllm_config, shares_memory=shares)
    if not envs.VLLM_USE_RUST_FRONTEND:
        args.middleware = [*args.middleware, MIDDLEWARE]
    started(args)
    command.cmd(args)
    return 0


def announce(setup: Setup) -> None:
    """Print what SiPipe will do. ConfigError: the directory of traces cannot be written.
    ResourceError: too little shared memory."""
    if setup.config.trace is not None:
        check_directory(setup.config.trace)
    lines = setup.describe()
    if setup.reason:
        lines.append(f"vLLM's own sampler draws: {setup.reason}")
    with suppress(OSError):  # as `tell`
        print("\n".join(lines), file=sys.stderr, flush=True)


KV_CACHE_SHARE = 0.4
"""Part of a node's memory, less the weights, that its KV caches get together: the rest is for the
processes themselves, activations, and shared memory."""


def share_kv_memory(args: argparse.Namespace | AsyncEngineArgs, setup: Setup) -> bool:
    """Set ``kv_cache_memory_bytes`` where the CPU engine would otherwise take too much; returns
    whether it was set. vLLM lets each worker claim nearly all memory of its NUMA node. Here the
    workers of a node share it, and all get the share of the scarcest one: vLLM has one size for all.
    """
    chosen = (
        args.kv_cache_memory_bytes is not None
        or os.environ.get("VLLM_CPU_KVCACHE_SPACE")
        or args.gpu_memory_utilization != AsyncEngineArgs.gpu_memory_utilization
    )
    if not current_platform.is_cpu() or chosen:
        return False
    args.kv_cache_memory_bytes = shared_kv_bytes(setup)
    setup.vllm_config.cache_config.kv_cache_memory_bytes = args.kv_cache_memory_bytes
    return True


def shared_kv_bytes(setup: Setup) -> int:
    """What the KV cache of each worker on this host gets."""
    facts = model_facts(setup.vllm_config)
    weights = int(facts.parameters * facts.weight_bytes) if facts is not None else 0
    return kv_cache_bytes(worker_nodes(setup.cores), weights * len(setup.here) // setup.stages)


def kv_cache_bytes(nodes: list[int], weights: int) -> int:
    """Bytes of KV cache for each worker, a whole number of MiB, on its NUMA node; each loads an equal
    part of ``weights`` (bytes). ResourceError: a node has no room for the weights themselves."""
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
    """CPUs that each worker's threads are bound to, by rank; empty: they are not. A binding that the
    user has set in ``VLLM_CPU_OMP_THREADS_BIND`` wins over the plan."""
    bound = envs.VLLM_CPU_OMP_THREADS_BIND
    ranks = [cpus for stage in plan.workers for cpus in stage]
    if bound == "auto":
        return ranks
    if bound == "nobind":
        return [()] * len(ranks)
    return [tuple(cpu_resource_utils.parse_id_list(cpus)) for cpus in bound.split("|")]
