"""The links between stages, as the executor makes them."""

from __future__ import annotations

from vllm.config import VllmConfig
from vllm.platforms import current_platform

from sipipe.config import SiPipeConfig
from sipipe.ipc.link.endpoint import LinkEndpoint, create_link
from sipipe.messages.boots import StageDescription


def make_links(
    vllm_config: VllmConfig, config: SiPipeConfig, ranks: list[StageDescription], *, slots: int
) -> list[LinkEndpoint]:
    """One link from every rank but the last stage's to the same rank of the next stage.

    ``ranks`` is what the workers say of themselves (``StageLoop.describe``). Returned in rank
    order, so that rank r sends on link r and receives on link r - t.
    """
    tp = vllm_config.parallel_config.tensor_parallel_size
    return [
        create_link(
            kind=config.transport,
            max_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
            bytes_per_token_hint=ranks[rank].activation_bytes,
            depth=max(2, slots),
            name=f"stage{rank // tp}-{rank // tp + 1}.r{rank % tp}",
            device="cpu" if current_platform.is_cpu() else "cuda",
            start_timeout=config.start_timeout,
            stall_timeout=config.stall_timeout,
        )
        for rank in range(len(ranks) - tp)
    ]
