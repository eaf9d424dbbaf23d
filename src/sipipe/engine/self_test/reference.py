"""``python -m sipipe.engine.self_test.reference FD``: a model with all layers in one stage.

Stock vLLM's engine core, on CPUs, with the model's configuration as the engine of stages has it, and as
many tensor-parallel ranks: what some of vLLM's kernels compute depends on that (MLA on CPUs), and it is
the stages that are tested. Several ranks are vLLM's own processes, which end with this one. The
process lives until it has answered, ends with the one that started it, and is the kernel's first
choice where memory runs out.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sipipe.ipc.parent import Parent

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine import EngineCoreOutputs

    from sipipe.engine.self_test.prompts import Reference

KV_BYTES = 512 << 20
"""Bytes of KV cache: some blocks of the largest models."""


def alone(vllm_config: VllmConfig) -> VllmConfig:
    """Stock vLLM's configuration for the same model and ranks, without stages, uncompiled."""
    from vllm.config import CompilationConfig, CompilationMode, ParallelConfig, VllmConfig

    model = copy.copy(vllm_config.model_config)
    model.enforce_eager = True
    model.max_logprobs = -1
    # The scores of samplers: of tokens that are drawn greedily, before anything edits them.
    model.logprobs_mode = "raw_logprobs"
    # vLLM then takes as long requests as the cache has room for. The model itself is made before, by
    # the length that the engine of stages has: rotary embeddings may depend on it.
    model.original_max_model_len = -1
    cache = copy.copy(vllm_config.cache_config)
    cache.kv_cache_memory_bytes = KV_BYTES
    cache.num_gpu_blocks = None
    cache.num_gpu_blocks_override = None
    cache.enable_prefix_caching = False
    scheduler = copy.copy(vllm_config.scheduler_config)
    scheduler.scheduler_cls = None
    scheduler.async_scheduling = False
    fields = [field.name for field in dataclasses.fields(VllmConfig) if field.init]
    values: dict[str, Any] = {name: getattr(vllm_config, name) for name in fields}
    values["model_config"] = model
    values["cache_config"] = cache
    values["scheduler_config"] = scheduler
    ranks = vllm_config.parallel_config.tensor_parallel_size
    values["parallel_config"] = ParallelConfig(
        tensor_parallel_size=ranks,
        enable_expert_parallel=vllm_config.parallel_config.enable_expert_parallel,
        distributed_executor_backend="uni" if ranks == 1 else "mp",
    )
    values["compilation_config"] = CompilationConfig(mode=CompilationMode.NONE)
    values["additional_config"] = {}
    for left_out in ("speculative", "kv_transfer", "kv_events", "lora"):
        values[f"{left_out}_config"] = None
    # Of vLLM's own class, which takes the runner that stock vLLM has here.
    make: Callable[..., VllmConfig] = VllmConfig
    return make(**values)


def compute(vllm_config: VllmConfig) -> Reference:
    """Answers of the model that ``vllm_config`` names, all of its layers in one stage."""
    from vllm.tokenizers import cached_tokenizer_from_config
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor.abstract import Executor

    from sipipe.engine.self_test.prompts import Reference, answer, make_prompts, make_requests

    model = vllm_config.model_config
    prompts = make_prompts(cached_tokenizer_from_config(model), model.max_model_len)
    config = alone(vllm_config)
    core = EngineCore(config, Executor.get_class(config), log_stats=False)

    def step() -> Iterable[EngineCoreOutputs]:
        outputs, _ = core.step()
        return outputs.values() if outputs else ()

    try:
        vocabulary = vllm_config.model_config.get_vocab_size()
        answers = answer(make_requests(prompts), vocabulary, core.add_request, step)
    finally:
        core.shutdown()
    return Reference(prompts=prompts, answers=answers)


def main() -> None:
    """Answer with a :class:`~sipipe.engine.self_test.prompts.Reference`, or with why there is none."""
    parent = Parent(int(sys.argv[1]))
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    try:
        reply: Reference | str = compute(parent.receive())
    except Exception as error:
        reply = f"{type(error).__name__}: {' '.join(str(error).split())}"
    parent.let_end()
    parent.say(reply)


if __name__ == "__main__":
    main()
