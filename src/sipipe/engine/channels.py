"""The channels that an engine makes for its workers, once they have said what they need."""

from __future__ import annotations

from collections.abc import Sequence

from vllm.platforms import current_platform

from sipipe.engine.memory_budget import logits_entries
from sipipe.engine.setup import Setup
from sipipe.ipc.link.endpoint import create_link
from sipipe.ipc.ring.logits import LogitsChannel
from sipipe.messages.boots import StageDescription
from sipipe.messages.link import LinkEndpoint


def make_links(setup: Setup) -> list[LinkEndpoint]:
    """One link from every rank but the last stage's to the same rank of the next stage.

    Returned in rank order, so that rank r sends on link r and receives on link r - t.
    """
    tp = setup.ranks
    return [
        create_link(
            kind=setup.config.transport,
            max_tokens=setup.vllm_config.scheduler_config.max_num_batched_tokens,
            depth=max(2, setup.slots),
            name=f"stage{rank // tp}-{rank // tp + 1}.r{rank % tp}",
            device="cpu" if current_platform.is_cpu() else "cuda",
            stall_timeout=setup.config.stall_timeout,
        )
        for rank in range((setup.stages - 1) * tp)
    ]


def make_logits(
    setup: Setup, ranks: Sequence[StageDescription], readers: Sequence[str]
) -> LogitsChannel:
    """BIC-L, as wide as the last stage says.

    Every rank of the last stage writes its columns, or the first one whole rows where vLLM has to
    gather them.
    """
    logits = ranks[-setup.ranks].logits
    assert logits is not None, "the first rank of the last stage writes logits"
    return LogitsChannel.create(
        "bic-l",
        entries=logits_entries(setup.slots),
        vocab=logits.width,
        batch=setup.vllm_config.scheduler_config.max_num_seqs,
        dtype=logits.dtype,
        layout=setup.config.logits_layout,
        ranks=setup.ranks if logits.shard else 1,
        shard=logits.shard,
        readers=readers,
        directory=setup.config.shm_dir,
    )
