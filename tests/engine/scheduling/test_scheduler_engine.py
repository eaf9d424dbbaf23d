"""PipelineScheduler in a real engine on vLLM's own executor: the greedy tokens of stock."""

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
    # Not eager: vLLM's own executor has no buffers for hidden states then.
    options = {"enforce_eager": False, "max_num_batched_tokens": 256, "max_num_seqs": 48}
    found = run_engine(
        path,
        batches,
        env={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
        pipeline_parallel_size=2,
        distributed_executor_backend="mp",
        scheduler_cls="sipipe.engine.scheduling.scheduler.PipelineScheduler",
        **options,
    )
    assert_stock(found, path, batches, **options)
