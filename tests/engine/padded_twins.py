"""As :mod:`sampler_twins`, on a runner that pads every batch, as one with CUDA graphs does: to
multiples that differ between stages. Where CPU samplers draw, the worker also runs vLLM's warm-up
of GPUs first; for its own sampler that launches kernels that have no twins."""

from dataclasses import replace

from sampler_twins import Twins  # noqa: F401
from vllm.distributed import get_pp_group
from vllm.v1.worker import cpu_worker
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.warmup import warmup_kernels

MOST = 128
"""--max-num-batched-tokens of the tests' engines: buffers have no more rows."""

dispatch = model_runner.dispatch_cg_and_sync_dp


def padded(*args, **kwargs):
    batch, state = dispatch(*args, **kwargs)
    multiple = 8 if get_pp_group().is_first_rank else 12
    tokens = -(-batch.num_tokens // multiple) * multiple
    return replace(batch, num_tokens=tokens if tokens <= MOST else batch.num_tokens), state


model_runner.dispatch_cg_and_sync_dp = padded


compile_or_warm_up = cpu_worker.CPUWorker.compile_or_warm_up_model


def warmed_up(worker):
    times = compile_or_warm_up(worker)
    if worker.boot.draws:
        warmup_kernels(worker.model_runner, worker.execute_model, worker.sample_tokens)
    return times


cpu_worker.CPUWorker.compile_or_warm_up_model = warmed_up
