"""What a sender keeps of a structure at one number of tokens, so that a frame costs few lines.

After a forward pass the interpreter's own memory is out of the caches, and a line of Python takes
a microsecond rather than a tenth of one: everything that does not change is worked out once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from sipipe.ipc.link.frames import MAX_PARTS
from sipipe.ipc.link.structure import Structure

if TYPE_CHECKING:
    import torch

    from sipipe.ipc.link.endpoint import LinkEndpoint
    from sipipe.ipc.link.transport import SendingTransport

__all__ = ["MAX_STRUCTURES", "FramePlan", "KnownStructures"]

MAX_STRUCTURES = 32
"""That a sender remembers; the receiver remembers twice as many."""
_MAX_PLANS = 1024


class FramePlan:
    """A structure at one number of tokens, on one link."""

    def __init__(
        self,
        endpoint: LinkEndpoint,
        transport: SendingTransport,
        number: int,
        structure: Structure,
        num_tokens: int,
    ) -> None:
        self.number = number
        self.fingerprint = structure.fingerprint
        self.nbytes = structure.nbytes(num_tokens)
        self.parts = len(structure.specs)
        self._transport = transport
        self._structure = structure
        self._num_tokens = num_tokens
        self._places: list[tuple[int, ...] | None] = [None] * endpoint.depth
        extents = structure.extents(num_tokens)
        self._tensors = [
            (key, dtype, extent.shape, endpoint.shard * extent.nbytes if spec.shards > 1 else 0)
            for (key, dtype), spec, extent in zip(
                structure.keys_and_dtypes, structure.specs, extents, strict=True
            )
        ]

    def addresses(self, tensors: Mapping[str, torch.Tensor]) -> list[int] | None:
        """Where ``tensors`` lie; None if they are another structure, or no plain host memory."""
        if len(tensors) != len(self._tensors):
            return None
        addresses = []
        for key, dtype, shape, shift in self._tensors:
            tensor = tensors.get(key)
            if (
                tensor is None
                or tensor.dtype is not dtype
                or tensor.shape != shape
                or not tensor.is_cpu
                or not tensor.is_contiguous()
            ):
                return None
            addresses.append(tensor.data_ptr() + shift)
        return addresses

    def places(self, slot: int) -> tuple[int, ...]:
        """What the transport says of ``slot``."""
        places = self._places[slot]
        if places is None:
            places = self._transport.places(self._structure, slot, self._num_tokens)
            self._places[slot] = places
        return places


class KnownStructures:
    """The structures that a sender has met, by number, and the plans of the current one."""

    def __init__(self, endpoint: LinkEndpoint, transport: SendingTransport) -> None:
        self.current = 0
        """Number of the structure of the last frame; 0 before the first."""
        self.plans: dict[int, FramePlan] = {}
        """Plans of the current structure, by number of tokens."""
        self._endpoint = endpoint
        self._transport = transport
        self._known: dict[int, Structure] = {}
        self._plans_of: dict[int, dict[int, FramePlan]] = {}
        self._last = 0

    @property
    def structure(self) -> Structure:
        """The current one."""
        return self._known[self.current]

    def recognize(self, tensors: Mapping[str, torch.Tensor], num_tokens: int) -> int:
        """Make the structure of ``tensors`` the current one, captured anew if it is; its number."""
        known = self._known.get(self.current)
        if known is None or not known.matches(tensors, num_tokens):
            for number, structure in self._known.items():
                if structure.matches(tensors, num_tokens):
                    self.current = number
                    break
            else:
                self._capture(tensors, num_tokens)
            self.plans = self._plans_of.setdefault(self.current, {})
        return self.current

    def _capture(self, tensors: Mapping[str, torch.Tensor], num_tokens: int) -> None:
        structure = Structure.capture(
            tensors, num_tokens, shards=self._endpoint.shards, whole=self._endpoint.whole
        )
        if len(self._known) == MAX_STRUCTURES:
            oldest = next(iter(self._known))
            del self._known[oldest]
            self._plans_of.pop(oldest, None)
        self._last += 1
        self._known[self._last] = structure
        self.current = self._last

    def plan(self, num_tokens: int) -> FramePlan | None:
        """The current structure's plan, made if need be; None if it has too many tensors."""
        structure = self.structure
        if len(structure.specs) > MAX_PARTS:
            return None
        if num_tokens not in self.plans:
            if len(self.plans) == _MAX_PLANS:
                self.plans.clear()
            self.plans[num_tokens] = FramePlan(
                self._endpoint, self._transport, self.current, structure, num_tokens
            )
        return self.plans[num_tokens]

    def forget_plans(self) -> None:
        """Forget the plans of all structures: what the transport says of places changes."""
        self._plans_of.clear()
        self.plans = self._plans_of.setdefault(self.current, {})
