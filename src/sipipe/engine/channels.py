"""The channels that an engine makes for its workers, once they have said what they need."""

from __future__ import annotations

from collections.abc import Sequence

from vllm.config import VllmConfig
from vllm.platforms import current_platform

from sipipe.config import SiPipeConfig
from sipipe.engine.memory_budget import logits_entries
from sipipe.ipc.link.endpoint import create_link
from sipipe.ipc.ring.logits import LogitsChannel
from sipipe.messages.boots import StageDescription
from sipipe.messages.link import LinkEndpoint


def make_links(
    vllm_config: VllmConfig, config: SiPipeConfig, ranks: Sequence[StageDescription], *, slots: int
) -> list[LinkEndpoint]:
    """One link from every rank but the last stage's to the same rank of the next stage.

    Returned in rank order, so that rank r sends on link r and receives on link r - t.
    """
    tp = vllm_config.parallel_config.tensor_parallel_size
    return [
        create_link(
            kind=config.transport,
            max_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
            depth=max(2, slots),
            name=f"stage{rank // tp}-{rank // tp + 1}.r{rank % tp}",
            device="cpu" if current_platform.is_cpu() else "cuda",
            stall_timeout=config.stall_timeout,
        )
        for rank in range(len(ranks) - tp)
    ]


def make_logits(
    vllm_config: VllmConfig,
    config: SiPipeConfig,
    ranks: Sequence[StageDescription],
    *,
    slots: int,
    readers: Sequence[str],
) -> LogitsChannel:
    """BIC-L, as wide as the last stage says.

    Every rank of the last stage writes its columns, or the first one whole rows where vLLM has to
    gather them.
    """
    tp = vllm_config.parallel_config.tensor_parallel_size
    logits = ranks[-tp].logits
    assert logits is not None, "the first rank of the last stage writes logits"
    return LogitsChannel.create(
        "bic-l",
        entries=logits_entries(slots),
        vocab=logits.width,
        batch=vllm_config.scheduler_config.max_num_seqs,
        dtype=logits.dtype,
        layout=config.logits_layout,
        ranks=tp if logits.shard else 1,
        shard=logits.shard,
        readers=readers,
        directory=config.shm_dir,
    )
