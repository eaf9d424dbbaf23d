"""A CPU kernel that takes one dtype only ends the start, not the first request."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

from sipipe.errors import UnsupportedError
from sipipe.worker.hooks.kernel_dtypes import check_dtypes


class GatedDeltaRule(QwenGatedDeltaNetAttention):
    """A layer of vLLM's class, without its weights."""

    def __init__(self):
        torch.nn.Module.__init__(self)


def runner(dtype, *layers, device="cpu"):
    model = torch.nn.Sequential(torch.nn.Identity(), *layers)
    return SimpleNamespace(
        model_config=SimpleNamespace(dtype=dtype),
        device=torch.device(device),
        get_model=lambda: model,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_dtype_that_a_kernel_does_not_take_is_refused_by_its_option(dtype):
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(UnsupportedError, match=f"^--dtype {name}: .*--dtype bfloat16$"):
        check_dtypes(runner(dtype, GatedDeltaRule()))
    check_dtypes(runner(dtype))
    check_dtypes(runner(dtype, GatedDeltaRule(), device="cuda"))
    check_dtypes(runner(torch.bfloat16, GatedDeltaRule()))


def test_vllms_kernel_still_takes_that_dtype_only(monkeypatch):
    """Where a later vLLM takes others, the check has to go."""
    metadata = gdn_attention.GDNAttentionMetadata(
        num_prefills=0,
        num_prefill_tokens=0,
        num_decodes=1,
        num_decode_tokens=1,
        num_spec_decodes=0,
        num_spec_decode_tokens=0,
        num_actual_tokens=1,
    )
    context = SimpleNamespace(
        attn_metadata={"layer": metadata},
        no_compile_layers={"layer": SimpleNamespace(prefix="layer")},
    )
    monkeypatch.setattr(gdn_attention, "get_forward_context", lambda: context)
    rows = torch.zeros(1, 8)
    with pytest.raises(AssertionError, match="BF16"):
        gdn_attention.cpu_gdn_attention_core(rows, rows, rows, rows, "layer")
