"""Hidden states in and out of a stage: its links, and what of them each tensor-parallel rank sends.

The ranks of a stage hold the same hidden states. Between hosts, rank r of t sends the r-th part, and
the receiving ranks gather the parts among themselves, as stock vLLM does: the network carries one
copy, not t. A part has a t-th of the last dimension, and a key that says so.

Who runs here: the thread that runs the device; whoever follows BIC-I opens and closes.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from vllm.distributed import get_tp_group

from sipipe.ipc.link.endpoint import open_receiver, open_sender
from sipipe.ipc.link.receiver import Receiver
from sipipe.ipc.link.sender import Sender
from sipipe.messages.link import LinkEndpoint
from sipipe.messages.stage_place import StagePlace

Tensors = dict[str, torch.Tensor]


class NoEnd:
    """In the place of a link's end, before the first stage and behind the last one."""

    def take(self, *_: Any, **__: Any) -> Tensors:
        raise AssertionError("the first stage has no hidden states to wait for")

    def send(self, *_: Any) -> None:
        raise AssertionError("the last stage has nobody to send to")

    def release(self, _: int) -> None: ...

    def wait_sent(self) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


class Links:
    """One rank's ends of the links with the stages before and behind, as far as there are any.
    ``cuts``: it sends a part, and the next stage's ranks gather: between hosts."""

    def __init__(
        self,
        place: StagePlace,
        receiver: Receiver | NoEnd,
        sender: Sender | NoEnd,
        *,
        cuts: bool = False,
    ) -> None:
        self._place, self._cuts = place, cuts
        self._receiver, self._sender = receiver, sender

    @classmethod
    def open(
        cls,
        place: StagePlace,
        links: Sequence[LinkEndpoint],
        sockets: list[socket.socket],
        fail: Callable[[Exception], None],
    ) -> Links:
        """Open them; ``sockets`` of links within this host are taken from the front. ``fail`` is
        told at once of one that is lost."""
        receiver: Receiver | NoEnd = NoEnd()
        sender: Sender | NoEnd = NoEnd()
        cuts = False
        if not place.is_first:
            link = links[place.rank - place.tp_size]
            receiver = open_receiver(link, None if link.port else sockets.pop(0), fail)
        if not place.is_last:
            link = links[place.rank]
            sender = open_sender(link, None if link.port else sockets.pop(0), fail)
            cuts = bool(link.port) and place.tp_size > 1
        return cls(place, receiver, sender, cuts=cuts)

    def take(
        self, iteration: int, tokens: int, into: Mapping[str, torch.Tensor] | None = None
    ) -> Tensors:
        """The previous stage's tensors, whole. As :meth:`Receiver.take`."""
        tensors, ranks = self._receiver.take(iteration, tokens, into=into), self._place.tp_size
        if ranks == 1:
            return tensors
        return join(tensors, ranks, partial(get_tp_group().all_gather, dim=0))

    def release(self, iteration: int) -> None:
        """What was taken of it has been read."""
        self._receiver.release(iteration)

    def send(self, iteration: int, tokens: int, tensors: Tensors) -> None:
        """This rank's part to the next stage. As :meth:`Sender.send`."""
        place = self._place
        part = cut(tensors, place.tp_rank, place.tp_size) if self._cuts else tensors
        self._sender.send(iteration, tokens, part)

    def wait_sent(self) -> None:
        """Return when everything that was sent may be overwritten. As :meth:`Sender.wait_sent`."""
        self._sender.wait_sent()

    def flush(self) -> None:
        """Wait until everything that was sent has left."""
        self._sender.flush()

    def interrupt(self) -> None:
        """End a :meth:`take` that waits."""
        self._receiver.close()

    def close(self) -> None:
        self._receiver.close()
        self._sender.close()


Gather = Callable[[torch.Tensor], torch.Tensor]
"""Concatenates a tensor of all ranks along its first dimension, in order of rank."""


def cut(tensors: Mapping[str, torch.Tensor], rank: int, ranks: int) -> dict[str, torch.Tensor]:
    """The part of ``rank`` of each tensor [..., h] whose h can be divided, as [..., h / ranks]."""
    parts = {}
    for key, tensor in tensors.items():
        width, rest = divmod(tensor.shape[-1], ranks)
        if rest:
            parts[key] = tensor
        else:
            whole = tensor.contiguous().view(ranks, *tensor.shape[:-1], width)
            parts[f"{key}/{ranks}"] = whole[rank]
    return parts


def join(
    tensors: Mapping[str, torch.Tensor], ranks: int, gather: Gather
) -> dict[str, torch.Tensor]:
    """The inverse of :func:`cut`; called by all ranks at once."""
    whole = {}
    for key, tensor in tensors.items():
        name, _, parts = key.partition("/")
        whole[name] = (
            gather(tensor).view(*tensor.shape[:-1], tensor.shape[-1] * ranks) if parts else tensor
        )
    return whole
