"""How much shared memory an engine's channels take, and whether there is that much.

All of it lies in memory files (memfd), which count as memory of the machine and of the container,
never against ``/dev/shm``. Hidden states that travel on a GPU take none. A model whose hidden states
are more than two tensors takes more, when its links are opened.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from sipipe.engine.iteration.bus import ENTRY_BYTES, ring_entries
from sipipe.ipc.link.schema import TOKENS, TensorSchema, TensorSpec, buffer_bytes
from sipipe.ipc.memory import check_room
from sipipe.ipc.ring.layout import Layout
from sipipe.ipc.ring.logits import logits_layout
from sipipe.messages.logits import LogitsShape
from sipipe.observe.live import PageHeader

if TYPE_CHECKING:
    from sipipe.engine.setup.record import Setup


def logits_entries(inflight: int) -> int:
    """Entries of BIC-L: every undrawn iteration stays readable, for a sampler that is restarted."""
    return max(3, inflight + 2)


def memory_budget(setup: Setup) -> dict[str, int]:
    """Bytes that the channels on this host take, by their kind, of all replicas that are to start."""
    config, inflight, dtype = setup.vllm_config, setup.slots, setup.dtype
    stages = len(setup.here) + (setup.node > 0)  # the link from the host before ends here
    samplers = len(setup.cores.samplers)
    sizes = {"iterations": Layout(ring_entries(inflight), ENTRY_BYTES).size}
    if samplers:  # else vLLM's draws, and there is no BIC-L
        shape = LogitsShape(vocab=setup.vocab_size, dtype=dtype)
        sizes["logits"] = logits_layout(shape, setup.logits_rows, logits_entries(inflight)).size
    on_gpu = config.device_config.device_type != "cpu" and setup.config.transport != "shm"
    if not on_gpu and stages > 1:
        hidden = (TOKENS, setup.hidden_size)
        specs = [TensorSpec(name, dtype, hidden) for name in ("hidden_states", "residual")]
        link = buffer_bytes(TensorSchema(tuple(specs)), setup.link_tokens)
        if setup.vocabulary.parts:  # final hidden states go from the last stage to all others
            link += buffer_bytes(TensorSchema(tuple(specs[:1])), setup.rows)
        sizes["hidden states"] = (stages - 1) * setup.ranks * max(2, inflight) * link
    sizes["metrics"] = PageHeader(stages=stages, ranks=setup.ranks, samplers=samplers).size
    starts = config.parallel_config.data_parallel_size  # 1 where one has begun
    return {what: size * starts for what, size in sizes.items()}


def describe(sizes: Mapping[str, int]) -> str:
    """One line with all kinds of channels."""
    listed = ", ".join(f"{what} {size / 2**20:,.1f}" for what, size in sizes.items())
    return f"shared memory: {sum(sizes.values()) / 2**20:,.1f} MiB ({listed})"


def check_budget(sizes: Mapping[str, int]) -> None:
    """Refuse what would run out of memory later. ResourceError: the memory needed, and what to do."""
    check_room(sum(sizes.values()), describe(sizes))
