"""PipelineScheduler in a real engine on vLLM's own executor: the greedy tokens of stock."""

import os

import pytest
from tests.engine.engines import assert_stock, greedy, model, prompts, run_engine


@pytest.mark.slow
@pytest.mark.engine
def test_greedy_tokens_are_those_of_stock(models):
    path = model(models)
    batches = [
        {
            "prompts": prompts(64, longest=200, seed=5),
            "params": greedy(64, shortest=2, longest=40, seed=5),
        }
    ]
    cores = sorted(os.sched_getaffinity(0))[:2]
    # Not eager: vLLM's own executor has no buffers for hidden states then.
    options = {"enforce_eager": False, "max_num_batched_tokens": 256, "max_num_seqs": 48}
    found = run_engine(
        path,
        batches,
        env={"VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, cores))},
        pipeline_parallel_size=2,
        distributed_executor_backend="mp",
        scheduler_cls="sipipe.engine.scheduling.scheduler.PipelineScheduler",
        **options,
    )
    assert_stock(found, path, batches, **options)


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize("ahead", [True, False])
def test_asynchronous_scheduling_is_an_option_that_changes_no_token(models, ahead):
    path = model(models)
    batches = [
        {
            "prompts": prompts(40, longest=100, seed=6),
            "params": greedy(40, shortest=1, longest=40, seed=6),
        }
    ]
    # A small cache: requests are preempted, also such as are scheduled ahead.
    options = {"max_num_seqs": 24, "block_size": 32, "num_gpu_blocks_override": 24}
    *found, counted = run_engine(
        path,
        [*batches, {"metrics": "vllm:num_preemptions"}],
        disable_log_stats=False,
        enable_prefix_caching=False,
        pipeline_parallel_size=2,
        distributed_executor_backend="sipipe.Executor",
        async_scheduling=ahead,
        **options,
    )
    assert sum(counted.values())
    assert_stock(found, path, batches, max_num_seqs=24)
