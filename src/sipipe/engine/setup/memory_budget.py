"""Budget of shared memory: what an engine's channels take, against what there is.

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
    """Entries of BIC-L for ``inflight`` microbatches in flight. Every iteration that is not drawn yet
    stays readable, for a sampler that is restarted."""
    return max(3, inflight + 2)


def memory_budget(setup: Setup) -> dict[str, int]:
    """Bytes of shared memory that the channels on this host take, by their kind, of all replicas that
    are to start."""
    config = setup.vllm_config
    # The link from the host before ends on this host, and its buffers are here.
    stages = len(setup.host_stages) + (1 if setup.node > 0 else 0)
    samplers = len(setup.cores.samplers)
    sizes = {"iterations": Layout(ring_entries(setup.slots), ENTRY_BYTES).size}
    if samplers:  # where vLLM's sampler draws there is no BIC-L
        shape = LogitsShape(vocab=setup.vocab_size, dtype=setup.dtype)
        entries = logits_entries(setup.slots)
        sizes["logits"] = logits_layout(shape, setup.logits_rows, entries).size
    on_gpu = config.device_config.device_type != "cpu" and setup.config.transport != "shm"
    if not on_gpu and stages > 1:
        links = (stages - 1) * setup.ranks
        sizes["hidden states"] = links * max(2, setup.slots) * _link_buffer_bytes(setup)
    sizes["metrics"] = PageHeader(stages=stages, ranks=setup.ranks, samplers=samplers).size
    # In the foreground, all replicas are still to start. The process of each one has a size of 1.
    replicas = config.parallel_config.data_parallel_size
    return {channel: size * replicas for channel, size in sizes.items()}


def _link_buffer_bytes(setup: Setup) -> int:
    """Bytes of one buffer of a link between two stages, with that of the link of final hidden states
    from the last stage to the earlier one, where the output projection is shared out."""
    shape = (TOKENS, setup.hidden_size)
    hidden_states = TensorSpec("hidden_states", setup.dtype, shape)
    residual = TensorSpec("residual", setup.dtype, shape)
    size = buffer_bytes(TensorSchema((hidden_states, residual)), setup.link_tokens)
    if setup.vocabulary.parts:
        size += buffer_bytes(TensorSchema((hidden_states,)), setup.rows)
    return size


def describe(sizes: Mapping[str, int]) -> str:
    """One line with all kinds of channels."""
    listed = ", ".join(f"{channel} {size / 2**20:,.1f}" for channel, size in sizes.items())
    return f"shared memory: {sum(sizes.values()) / 2**20:,.1f} MiB ({listed})"


def check_budget(sizes: Mapping[str, int]) -> None:
    """Refuse channels that would run out of memory later. Raises ResourceError: it says how much memory
    is needed, and what to do."""
    check_room(sum(sizes.values()), describe(sizes))
