"""PipelineScheduler in a real engine on vLLM's own executor: the greedy tokens of stock."""

import os

import pytest
from tests.engine.engines import assert_stock, greedy, model, prompts, run_engine

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_greedy_tokens_are_those_of_stock(models):
    path = model(models)
    params = greedy(64, shortest=2, longest=40, seed=5)
    batches = [{"prompts": prompts(64, longest=200, seed=5), "params": params}]
    cores = map(str, sorted(os.sched_getaffinity(0))[:2])
    ours = {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}
    ours["scheduler_cls"] = "sipipe.engine.scheduling.scheduler.PipelineScheduler"
    ours["env"] = {"VLLM_CPU_OMP_THREADS_BIND": "|".join(cores)}
    # Not eager: vLLM's own executor has no buffers for hidden states then.
    options = {"enforce_eager": False, "max_num_batched_tokens": 256, "max_num_seqs": 48}
    assert_stock(run_engine(path, batches, **ours, **options), path, batches, **options)


@pytest.mark.parametrize("ahead", [True, False])
def test_asynchronous_scheduling_is_an_option_that_changes_no_token(models, ahead):
    path = model(models)
    params = greedy(40, shortest=1, longest=40, seed=6)
    batches = [{"prompts": prompts(40, longest=100, seed=6), "params": params}]
    # A small cache: requests are preempted, also such as are scheduled ahead.
    options = {"max_num_seqs": 24, "block_size": 32, "num_gpu_blocks_override": 24}
    options |= {"pipeline_parallel_size": 2, "distributed_executor_backend": "sipipe.Executor"}
    options |= {"async_scheduling": ahead, "disable_log_stats": False}
    preempted = {"metrics": "vllm:num_preemptions"}
    *found, counted = run_engine(path, [*batches, preempted], **options)
    assert sum(counted.values())
    assert_stock(found, path, batches, max_num_seqs=24)
