"""The core plan, applied: threads of CPU stages, samplers, and the scheduler's process."""

from __future__ import annotations

import multiprocessing
import os

from vllm import envs
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.utils.cpu_resource_utils import parse_id_list

from sipipe.config import SiPipeConfig
from sipipe.cores import CorePlan, plan_cores, this_machine
from sipipe.engine.compatibility import Choice

logger = init_logger(f"vllm.{__name__}")

BIND = "VLLM_CPU_OMP_THREADS_BIND"


def core_plan(vllm_config: VllmConfig, config: SiPipeConfig, choice: Choice) -> CorePlan:
    """The cores of an engine's processes on this machine; without samplers on vLLM's own path."""
    parallel = vllm_config.parallel_config
    return plan_cores(
        this_machine(),
        stages=parallel.pipeline_parallel_size,
        tensor_parallel=parallel.tensor_parallel_size,
        samplers=config.samplers if choice.path == "sipipe" else 0,
        placement=config.cores,
        device="cpu" if current_platform.is_cpu() else "cuda",
    )


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
    return [tuple(parse_id_list(cpus)) for cpus in bound.split("|")]


def apply_core_plan(vllm_config: VllmConfig, config: SiPipeConfig, choice: Choice) -> CorePlan:
    """Plan the cores and, on the CPU engine, tell vLLM which its workers' threads are bound to."""
    plan = core_plan(vllm_config, config, choice)
    if current_platform.is_cpu() and envs.VLLM_CPU_OMP_THREADS_BIND == "auto":
        os.environ[BIND] = plan.omp_threads_bind()
    for line in plan.describe():
        logger.info("%s", line)
    return plan


def bind_scheduler(plan: CorePlan) -> None:
    """Bind this process to the scheduler's cores, if it is vLLM's own engine process.

    Called once all other processes run: they would inherit the binding. An engine inside the
    user's process is left alone.
    """
    if plan.scheduler and not plan.shared and multiprocessing.parent_process() is not None:
        os.sched_setaffinity(0, plan.scheduler)
