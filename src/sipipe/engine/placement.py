"""The core plan, applied: threads of CPU stages, and the scheduler's process."""

from __future__ import annotations

import multiprocessing
import os

from vllm import envs
from vllm.platforms import current_platform
from vllm.utils.cpu_resource_utils import parse_id_list

from sipipe.cores import CorePlan

BIND = "VLLM_CPU_OMP_THREADS_BIND"


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


def bind_workers(plan: CorePlan) -> None:
    """On the CPU engine, tell vLLM which cores its workers' threads are bound to."""
    if current_platform.is_cpu() and envs.VLLM_CPU_OMP_THREADS_BIND == "auto":
        os.environ[BIND] = plan.omp_threads_bind()


def bind_scheduler(plan: CorePlan) -> None:
    """Bind this process to the scheduler's cores, if it is vLLM's own engine process.

    Called once all other processes run: they would inherit the binding. An engine inside the
    user's process is left alone.
    """
    if plan.scheduler and not plan.shared and multiprocessing.parent_process() is not None:
        os.sched_setaffinity(0, plan.scheduler)
