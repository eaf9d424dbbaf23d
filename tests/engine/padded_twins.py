"""As :mod:`kernel_twins`, on a runner that pads every batch, as one with CUDA graphs does: to
multiples that differ between stages."""

from dataclasses import replace

from kernel_twins import Twins  # noqa: F401
from vllm.distributed import get_pp_group
from vllm.v1.worker.gpu import model_runner

MOST = 128
"""--max-num-batched-tokens of the tests' engines: buffers have no more rows."""

dispatch = model_runner.dispatch_cg_and_sync_dp


def padded(*args, **kwargs):
    batch, state = dispatch(*args, **kwargs)
    multiple = 8 if get_pp_group().is_first_rank else 12
    tokens = -(-batch.num_tokens // multiple) * multiple
    return replace(batch, num_tokens=tokens if tokens <= MOST else batch.num_tokens), state


model_runner.dispatch_cg_and_sync_dp = padded
