"""How much shared memory an engine's channels take, and whether there is that much.

All of it lies in memory files (memfd), which count as memory of the machine and of the container,
never against ``/dev/shm``. Hidden states that travel on a GPU take none. A model whose hidden states
are more than two tensors makes its links grow at the first microbatch.
"""

from collections.abc import Sequence
from typing import NamedTuple

from sipipe.engine.bus import ring_sizes
from sipipe.engine.logits_room import rows_needed
from sipipe.ipc.link.buffers import buffer_bytes
from sipipe.ipc.link.schema import TOKENS, TensorSchema, TensorSpec
from sipipe.ipc.memory import check_room
from sipipe.ipc.ring.layout import Layout
from sipipe.ipc.ring.logits import logits_layout
from sipipe.messages.link import buffer_tokens
from sipipe.messages.logits import LogitsShape
from sipipe.observe.live import PageHeader


class Part(NamedTuple):
    """One kind of channel."""

    what: str
    size: int
    """Bytes."""


def logits_entries(inflight: int) -> int:
    """Entries of BIC-L: every undrawn iteration stays readable, for a sampler that is restarted."""
    return max(3, inflight + 2)


def memory_budget(
    *,
    stages: int,
    ranks: int,
    samplers: int,
    inflight: int,
    vocabulary: int,
    dtype: str,
    sequences: int,
    tokens: int,
    hidden: int,
    shares_projection: bool = False,
    on_gpu: bool = False,
) -> list[Part]:
    """What the channels of an engine take.

    Args:
        samplers: 0 where vLLM's draws, and there is no BIC-L.
        dtype: of activations and logits, such as ``"bfloat16"``.
        sequences: most rows of logits in flight: running requests, and drafts.
        tokens: most tokens of a microbatch.
        shares_projection: whether final hidden states go from the last stage to all others.
        on_gpu: whether hidden states stay on devices.
    """
    itemsize = 4 if dtype == "float32" else 2
    parts = [Part("BIC-I", Layout(**ring_sizes(inflight)).size)]
    if samplers:
        rows, entries = rows_needed(sequences, inflight), logits_entries(inflight)
        layout = logits_layout(LogitsShape(vocab=vocabulary, dtype=dtype), rows, entries)
        parts.append(Part("logits", layout.size))
    if not on_gpu and stages > 1:
        names, shape = ("hidden_states", "residual"), (TOKENS, hidden)
        specs = tuple(TensorSpec(name, dtype, itemsize, shape) for name in names)
        link = buffer_bytes(TensorSchema(specs), buffer_tokens(sequences, tokens))
        if shares_projection:
            link += buffer_bytes(TensorSchema(specs[:1]), sequences)
        parts.append(Part("hidden states", (stages - 1) * ranks * max(2, inflight) * link))
    page = PageHeader(stages=stages, ranks=ranks, samplers=samplers)
    parts.append(Part("figures", page.size))
    return parts


def describe(parts: Sequence[Part]) -> str:
    """One line with all parts."""
    sizes = ", ".join(f"{part.what} {part.size / 2**20:,.1f}" for part in parts)
    return f"shared memory: {sum(part.size for part in parts) / 2**20:,.1f} MiB ({sizes})"


def check_budget(parts: Sequence[Part]) -> None:
    """Refuse what would run out of memory later. Raises ResourceError: in one line the memory
    needed, what there is, and what to do."""
    check_room(sum(part.size for part in parts), describe(parts))
