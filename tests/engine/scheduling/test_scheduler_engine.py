"""PipelineScheduler in a real engine on vLLM's own executor: the greedy tokens of stock."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from sipipe.tools.make_model.checkpoint import make_model

SCRIPT = """
import json, random, sys
from vllm import LLM, SamplingParams

def main():
    model, scheduler = sys.argv[1:3]
    llm = LLM(model, pipeline_parallel_size=2, distributed_executor_backend="mp",
              scheduler_cls=None if scheduler == "stock" else scheduler,
              dtype="float32", max_model_len=512, max_num_batched_tokens=256, max_num_seqs=48)
    rng = random.Random(5)
    prompts = [{"prompt_token_ids": [rng.randrange(3, 1000) for _ in range(rng.randint(1, 200))]}
               for _ in range(64)]
    params = [SamplingParams(temperature=0, max_tokens=rng.randint(2, 40), ignore_eos=True)
              for _ in prompts]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    print("RESULT " + json.dumps([list(o.outputs[0].token_ids) for o in outputs]))

if __name__ == "__main__":
    main()
"""


@pytest.mark.slow
@pytest.mark.engine
def test_greedy_tokens_are_those_of_stock(tmp_path):
    model = make_model("llama", tmp_path / "tiny")
    script = tmp_path / "run.py"
    script.write_text(SCRIPT)
    results = {}
    for scheduler in ("stock", "sipipe.engine.scheduling.scheduler.PipelineScheduler"):
        done = subprocess.run(
            [sys.executable, str(script), str(model), scheduler],
            env={
                **os.environ,
                "VLLM_CPU_OMP_THREADS_BIND": "0|1",
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_NO_USAGE_STATS": "1",
                "HF_HUB_OFFLINE": "1",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=400,
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        assert lines, done.stdout[-4000:]
        results[scheduler] = json.loads(lines[0][len("RESULT ") :])
    stock, ours = results.values()
    assert ours == stock
