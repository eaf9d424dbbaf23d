"""CPU kernels of vLLM that take one dtype only, seen before the first request.

Such a kernel asserts its dtype when it is called, and with ``--enforce-eager`` nothing calls it before
a request does. So the loaded model's layers are looked at instead.
"""

from __future__ import annotations

from typing import Any

import torch

from sipipe.errors import UnsupportedError

BFLOAT16_ONLY = "QwenGatedDeltaNetAttention"
"""vLLM's class of layers whose CPU kernel asserts bfloat16. By name: importing its module would have
every start load Triton kernels that few models use."""


def check_dtypes(runner: Any) -> None:
    """Raise UnsupportedError, naming ``--dtype``, where a layer of the loaded model has a CPU kernel
    that does not take the model's dtype. Does nothing on GPUs."""
    dtype = runner.model_config.dtype
    if runner.device.type != "cpu" or dtype == torch.bfloat16:
        return
    model = runner.get_model()
    classes = {base.__name__ for layer in model.modules() for base in type(layer).__mro__}
    if BFLOAT16_ONLY in classes:
        name = str(dtype).removeprefix("torch.")
        raise UnsupportedError(
            f"--dtype {name}: vLLM's CPU kernel for the gated delta rule, which layers of "
            f"{type(model).__name__} use, takes bfloat16 only: serve it with --dtype bfloat16"
        )
