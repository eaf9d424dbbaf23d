"""SiPipe's stage runner against vLLM's, token for token, in float32, inside vLLM's own engine.

The engine, its scheduler, KV cache manager and executor are stock; only the worker changes
(`stage_test_worker.py`). Every run checks token safety and that sampled rows come in the order of
the scheduling output.
"""

import json
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
from tests.engine import engines
from tests.engine.forks import Forked

pytestmark = pytest.mark.engine
HERE = Path(__file__).parent
SECONDS = 500

ENGINE = {
    "enforce_eager": True,
    "max_model_len": 256,
    "block_size": 32,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "enable_prefix_caching": True,
}
# 30 requests that join three at a time, so that prompts are chunked between decodes; 12 usable
# blocks of 32 tokens, so that sequences are preempted and resumed; two requests that are aborted.
CROWDED = {"num_gpu_blocks_override": 13}
WORKLOAD = {
    "requests": 30,
    "prompt": [1, 60],
    "output": [3, 60],
    "at_once": 3,
    "every": 4,
    "aborts": {"3": 5, "11": 2},
}


def run(model, *, stock=(True, False), workload=WORKLOAD, engine=None, **env):
    """Runs and facts of one engine; ``stock`` says which path each run of a workload takes."""
    workloads = workload if isinstance(workload, list) else [workload]
    spec = {
        "model": str(model),
        "runs": [(path, what) for what in workloads for path in stock],
        "engine": {**ENGINE, **(engine or {})},
    }
    with tempfile.TemporaryFile("w+") as out:
        process = Forked(
            HERE / "stage_run.py", env={**os.environ, "OMP_NUM_THREADS": "1", **env}, out=out
        )
        try:
            with process.stdin as stdin:
                json.dump(spec, stdin)
            process.wait(SECONDS)
        finally:
            process.kill()
        out.seek(0)
        text = out.read()
    lines = [line for line in text.splitlines() if line.startswith("RESULT ")]
    if not lines:
        pytest.fail(f"the engine ended:\n{text[-5000:]}")
    result = json.loads(lines[-1].removeprefix("RESULT "))
    return result["runs"], result["facts"]


def assert_equal_tokens(expected, found, aborted=()):
    assert expected["tokens"].keys() == found["tokens"].keys()
    for number, tokens in expected["tokens"].items():
        other = found["tokens"][number]
        if number in aborted:  # by the time of the abort, one may be a few tokens further
            shorter = min(len(tokens), len(other))
            assert shorter
            assert tokens[:shorter] == other[:shorter]
        else:
            assert tokens == other, f"request {number}"


@pytest.mark.parametrize(
    ("family", "slots"),
    [
        ("llama", "1"),
        pytest.param("qwen3-moe", "3", marks=pytest.mark.slow),
        pytest.param("qwen2", "3", marks=pytest.mark.slow),
        pytest.param("mixtral", "2", marks=pytest.mark.slow),
    ],
)
def test_greedy_parity_with_chunks_preemption_prefix_cache_and_aborts(models, family, slots):
    (stock, ours), (facts,) = run(engines.model(models, family), engine=CROWDED, STAGE_SLOTS=slots)
    assert_equal_tokens(stock, ours, WORKLOAD["aborts"])
    assert facts["resumed"] > 0, "the workload was meant to preempt"
    assert facts["steady"] > 0
    assert facts["added"] == 30


@pytest.mark.slow
def test_greedy_parity_through_both_threads(models):
    (stock, ours), _ = run(
        engines.model(models, "llama"),
        engine=CROWDED,
        STAGE_SLOTS="2",
        STAGE_THREADS="1",
    )
    assert_equal_tokens(stock, ours, WORKLOAD["aborts"])


def test_latent_attention_parity_where_stock_agrees_with_itself(models):
    """vLLM's CPU kernels for MLA round by the batch's composition (stock alone and in a batch
    differ), so the batch is one that both runners put in the same order and that never changes."""
    together = {
        "requests": 6,
        "prompt": [20, 20],
        "output": [24, 24],
        "at_once": 6,
        "shared": False,
    }
    alone = {"requests": 6, "prompt": [1, 60], "output": [8, 24], "at_once": 1, "every": 40}
    engine = {"block_size": 16, "max_num_batched_tokens": 512, "enable_prefix_caching": False}
    (stock, ours, stock_alone, ours_alone), _ = run(
        engines.model(models, "deepseek-v3"), workload=[together, alone], engine=engine
    )
    assert_equal_tokens(stock, ours)
    assert_equal_tokens(stock_alone, ours_alone)


@pytest.mark.slow
def test_prompt_logprobs_are_vllms(models):
    workload = {**WORKLOAD, "requests": 10, "prompt_logprobs": 3, "aborts": {}}
    (stock, ours), _ = run(engines.model(models, "llama"), workload=workload)
    assert_equal_tokens(stock, ours)
    assert len(stock["prompt_logprobs"]) == 10
    for number, expected in stock["prompt_logprobs"].items():
        for at, found in zip(expected, ours["prompt_logprobs"][number], strict=True):
            assert (at is None) == (found is None)
            if at is not None:
                assert found == pytest.approx(at, abs=1e-3)


def make_adapter(directory, seed, *, hidden=128, layers=4, rank=8, heads=128, kv=64):
    """A LoRA adapter for the tiny Llama, strong enough to change tokens."""
    from safetensors.numpy import save_file

    rng = np.random.default_rng(seed)
    directory.mkdir()
    tensors = {}
    for layer in range(layers):
        for name, out in (("q_proj", heads), ("v_proj", kv)):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{prefix}.lora_A.weight"] = rng.normal(size=(rank, hidden)).astype("f4") / 8
            tensors[f"{prefix}.lora_B.weight"] = rng.normal(size=(out, rank)).astype("f4") / 4
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 16,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
        "base_model_name_or_path": "",
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return str(directory)


@pytest.mark.slow
def test_lora_parity(models, tmp_path):
    adapters = [make_adapter(tmp_path / f"adapter{seed}", seed) for seed in (1, 2)]
    workload = {**WORKLOAD, "requests": 12, "aborts": {}, "loras": adapters}
    engine = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    (stock, ours, plain, _), _ = run(
        engines.model(models, "llama"),
        workload=[workload, {**workload, "loras": []}],
        engine=engine,
        STAGE_SLOTS="2",
    )
    assert_equal_tokens(stock, ours)
    differing = sum(plain["tokens"][n] != stock["tokens"][n] for n in stock["tokens"])
    assert differing >= 6, "the adapters were meant to matter"


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3-moe"])
def test_compiled_parity(models, family):
    (stock, ours), _ = run(
        engines.model(models, family),
        engine={**CROWDED, "enforce_eager": False},
        STAGE_SLOTS="3",
    )
    assert_equal_tokens(stock, ours, WORKLOAD["aborts"])


@pytest.mark.slow
def test_two_thousand_iterations(models):
    workload = {
        "requests": 260,
        "prompt": [1, 60],
        "output": [3, 90],
        "at_once": 1,
        "every": 7,
        "aborts": {str(n): 4 for n in range(5, 260, 17)},
    }
    (stock, ours), (facts,) = run(
        engines.model(models, "llama"),
        workload=workload,
        engine=CROWDED,
        STAGE_SLOTS="3",
    )
    assert_equal_tokens(stock, ours, workload["aborts"])
    assert facts["iterations"] >= 2000
    assert facts["resumed"] >= 50, "the workload was meant to preempt"


@pytest.mark.slow
def test_tensor_parallel_parity(models):
    """Each rank computes its own columns of the logits."""
    (stock, ours), facts = run(
        engines.model(models, "llama"),
        engine={**CROWDED, "tensor_parallel_size": 2},
        VLLM_CPU_OMP_THREADS_BIND="0|1",
    )
    assert_equal_tokens(stock, ours, WORKLOAD["aborts"])
    assert facts[0] == facts[1], "both ranks did the same"


@pytest.mark.slow
@pytest.mark.parametrize("eager", [True, False])
def test_pipeline_parity(models, eager):
    """Two stages over vLLM's own pipeline group (where stock itself crashes in eager mode)."""
    (stock,), _ = run(engines.model(models, "llama"), stock=[True], engine=CROWDED)
    (ours,), facts = run(
        engines.model(models, "llama"),
        stock=[False],
        engine={**CROWDED, "pipeline_parallel_size": 2, "enforce_eager": eager},
        VLLM_CPU_OMP_THREADS_BIND="0|1",
        STAGE_SLOTS="2",
    )
    assert_equal_tokens(stock, ours, WORKLOAD["aborts"])
    assert len(facts) == 2
