"""The core plan, applied: threads of CPU stages, samplers, and the scheduler's process."""

from __future__ import annotations

import multiprocessing
import os

from vllm import envs
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.platforms import current_platform

from sipipe.config import SiPipeConfig
from sipipe.cores import CorePlan, plan_cores, this_machine

logger = init_logger(f"vllm.{__name__}")

BIND = "VLLM_CPU_OMP_THREADS_BIND"


def apply_core_plan(vllm_config: VllmConfig, config: SiPipeConfig) -> CorePlan:
    """Plan the cores and, on the CPU engine, tell vLLM which its workers' threads are bound to.

    A binding that the user has set in ``VLLM_CPU_OMP_THREADS_BIND`` is left alone.
    """
    parallel = vllm_config.parallel_config
    on_cpu = current_platform.is_cpu()
    plan = plan_cores(
        this_machine(),
        stages=parallel.pipeline_parallel_size,
        tensor_parallel=parallel.tensor_parallel_size,
        samplers=config.samplers,
        placement=config.cores,
        device="cpu" if on_cpu else "cuda",
    )
    if on_cpu and envs.VLLM_CPU_OMP_THREADS_BIND == "auto":
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
