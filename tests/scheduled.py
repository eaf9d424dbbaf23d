"""Parts of scheduling outputs, as vLLM's scheduler makes them."""

from __future__ import annotations

from collections.abc import Sequence

from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import NewRequestData


def new_request(
    req_id: str,
    prompt: Sequence[int],
    *,
    params: SamplingParams | None = None,
    blocks: Sequence[Sequence[int]] = ((0,),),
    computed: int = 0,
    prefill: Sequence[int] | None = None,
) -> NewRequestData:
    """A request that workers have not seen. ``prefill``: the tokens to compute; None: not told, as
    for vLLM's first runner."""
    return NewRequestData(
        req_id=req_id,
        prompt_token_ids=[*prompt],
        prefill_token_ids=None if prefill is None else [*prefill],
        mm_features=[],
        sampling_params=params or SamplingParams(),
        pooling_params=None,
        block_ids=tuple([*ids] for ids in blocks),
        num_computed_tokens=computed,
        lora_request=None,
    )
