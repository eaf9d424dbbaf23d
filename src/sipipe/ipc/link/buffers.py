"""The buffers that hidden states lie in, and tensors that look into them.

A tensor starts at the same address of a buffer whatever the number of tokens, so that a graph
captured for it stays valid. A buffer has one writer: the sender until a frame's header is sent, then
the receiver until it releases the frame. The socket's system calls order memory.
"""

from typing import Any

import torch

from sipipe.ipc.link.schema import TensorSchema
from sipipe.ipc.memory import PAGE, round_up

_REMEMBERED = 4096


def buffer_bytes(schema: TensorSchema, max_tokens: int) -> int:
    """Bytes of a buffer for ``schema``."""
    return round_up(max(1, schema.offsets(max_tokens)[-1]), PAGE)


class Buffers:
    """All buffers of a link, as one process sees them: ``memory`` [depth · size], uint8, which views
    keep alive, laid out for ``max_tokens``."""

    def __init__(self, memory: torch.Tensor, size: int, max_tokens: int) -> None:
        self._memory: Any = memory
        self._size = size
        self._max_tokens = max_tokens
        self._views: dict[tuple[int, int, int], dict[str, torch.Tensor]] = {}

    def views(self, schema: TensorSchema, buffer: int, num_tokens: int) -> dict[str, torch.Tensor]:
        """The tensors of a frame, in place; the dictionary is remembered and not to be changed."""
        key = (schema.fingerprint, buffer, num_tokens)
        if (views := self._views.get(key)) is None:
            if len(self._views) == _REMEMBERED:
                self._views.clear()
            frame, start = schema.at(num_tokens), buffer * self._size
            views = self._views[key] = {
                name: self._memory[start + offset : start + offset + size].view(dtype).view(shape)
                for (name, dtype, shape), size, offset in zip(
                    frame.expected,
                    frame.sizes,
                    schema.offsets(self._max_tokens),
                    strict=False,  # the last offset is the end
                )
            }
        return views
