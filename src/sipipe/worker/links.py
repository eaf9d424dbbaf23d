"""Hidden states in and out of a stage: its links, and the part that each tensor-parallel rank sends.

The ranks of a stage hold the same hidden states. Between hosts, rank r of t sends the r-th part, and
the receiving ranks gather the parts among themselves, as stock vLLM does: the network carries one
copy, not t. A part has a t-th of the last dimension, and a key that says so.

Who runs here: the thread that runs the device; the thread that follows BIC-I opens and closes.
"""

from __future__ import annotations

import socket
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from vllm.distributed import get_tp_group

from sipipe.ipc.link.receiver import Receiver
from sipipe.ipc.link.schema import TensorSchema
from sipipe.ipc.link.sender import Sender
from sipipe.ipc.link.trial import TriedReceiver, TriedSender
from sipipe.messages.link import LinkEndpoint, LinkTrial, Pair, TrialReport
from sipipe.messages.stage_place import StagePlace

Tensors = dict[str, torch.Tensor]

_SAMPLE_TOKENS = 7
"""Tokens of a sample of hidden states; they come first in each of its shapes."""


class NoEnd:
    """Object in the place of a link's end, before the first stage and behind the last one."""

    def take(self, *_: Any, **__: Any) -> Tensors:
        raise AssertionError("the first stage has no hidden states to wait for")

    def send(self, *_: Any) -> None:
        raise AssertionError("the last stage has nobody to send to")

    def release(self, _: int) -> None: ...

    def wait_sent(self) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


End = TriedSender | TriedReceiver


class LinkEnds:
    """One rank's ends of links, by the pair of ranks that a link joins: tried, then taken into use."""

    def __init__(
        self,
        place: StagePlace,
        sockets: Iterable[tuple[Pair, socket.socket]],
        fail: Callable[[Exception], None],
    ) -> None:
        """Take ``sockets`` over: of links within this host, one for each transport that may be tried.
        ``fail`` is told at once of a link that is lost in use."""
        self._place = place
        self._fail = fail
        self._sockets: dict[Pair, list[socket.socket]] = defaultdict(list)
        for pair, sock in sockets:
            self._sockets[pair].append(sock)
        self._tried: dict[Pair, End] = {}

    def try_out(self, trials: Sequence[LinkTrial], hung: Collection[Pair]) -> list[TrialReport]:
        """Open and try this rank's ends among ``trials``, all at once; returns their reports. Earlier
        ends of the same links are closed, those of ``hung`` ones left as they are."""
        rank = self._place.rank
        mine = [trial for trial in trials if rank in trial.pair]
        for trial in mine:
            earlier = self._tried.pop(trial.pair, None)
            if earlier is not None:
                if trial.pair in hung:
                    earlier.leave()
                else:
                    earlier.close()
        ends = [self._begin(trial) for trial in mine]
        return [end.report() for end in ends]

    def _begin(self, trial: LinkTrial) -> End:
        """Open this rank's end of a link, and begin to try it."""
        # Each socket once: both ends take them in the same order.
        sock = None if trial.endpoint.port else self._sockets[trial.pair].pop(0)
        schema = TensorSchema.decode(trial.tensors)
        if cuts(trial.endpoint, self._place):
            schema = part_of(schema, self._place.tp_rank, self._place.tp_size)
        kind = TriedSender if trial.pair[0] == self._place.rank else TriedReceiver
        end = kind(trial, schema, sock, self._fail)
        self._tried[trial.pair] = end
        return end

    def take_sender(self, receiver: int) -> tuple[LinkEndpoint, Sender]:
        """The end of the link to rank ``receiver``, which was tried; the caller closes it."""
        end = self._tried[self._place.rank, receiver]
        assert isinstance(end, TriedSender)
        return end.endpoint, end.take()

    def take_receiver(self, sender: int) -> tuple[LinkEndpoint, Receiver]:
        """The end of the link from rank ``sender``, which was tried; the caller closes it."""
        end = self._tried[sender, self._place.rank]
        assert isinstance(end, TriedReceiver)
        return end.endpoint, end.take()

    def close(self) -> None:
        """Close what nobody uses."""
        for end in self._tried.values():
            end.close()
        for spares in self._sockets.values():
            for spare in spares:
                spare.close()


class Links:
    """One rank's ends of the links with the stages before and behind, as far as there are any."""

    def __init__(
        self,
        place: StagePlace,
        receiver: Receiver | NoEnd,
        sender: Sender | NoEnd,
        *,
        cuts: bool = False,
    ) -> None:
        """Make one rank's ends. If it ``cuts``, as between hosts, it sends parts, which the next stage's ranks
        gather."""
        self._place = place
        self._cuts = cuts
        self._receiver = receiver
        self._sender = sender

    @classmethod
    def of(cls, place: StagePlace, ends: LinkEnds) -> Links:
        """The links between the stages, whose ends have been tried."""
        receiver: Receiver | NoEnd = NoEnd()
        sender: Sender | NoEnd = NoEnd()
        sends_part = False
        if not place.is_first:
            _, receiver = ends.take_receiver(place.rank - place.tp_size)
        if not place.is_last:
            link, sender = ends.take_sender(place.rank + place.tp_size)
            sends_part = cuts(link, place)
        return cls(place, receiver, sender, cuts=sends_part)

    def take(
        self, iteration: int, tokens: int, into: Mapping[str, torch.Tensor] | None = None
    ) -> Tensors:
        """The previous stage's tensors, gathered where they came in parts. As :meth:`.Receiver.take`."""
        tensors = self._receiver.take(iteration, tokens, into=into)
        ranks = self._place.tp_size
        if ranks == 1:
            return tensors
        return join(tensors, ranks, partial(get_tp_group().all_gather, dim=0))

    def release(self, iteration: int) -> None:
        """Give back the buffers of the tensors of ``iteration``, which have been read."""
        self._receiver.release(iteration)

    def send(self, iteration: int, tokens: int, tensors: Tensors) -> None:
        """Send this rank's part to the next stage. As :meth:`.Sender.send`."""
        place = self._place
        part = cut(tensors, place.tp_rank, place.tp_size) if self._cuts else tensors
        self._sender.send(iteration, tokens, part)

    def wait_sent(self) -> None:
        """Wait until everything that was sent may be overwritten. As :meth:`.Sender.wait_sent`."""
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


def cuts(link: LinkEndpoint, place: StagePlace) -> bool:
    """True if each rank of a stage sends a part on ``link``, as between hosts."""
    return bool(link.port) and place.tp_size > 1


Gather = Callable[[torch.Tensor], torch.Tensor]
"""Concatenates a tensor of all ranks along its first dimension, in order of rank."""


def cut(tensors: Mapping[str, torch.Tensor], rank: int, ranks: int) -> dict[str, torch.Tensor]:
    """The part of ``rank`` of each tensor [..., h] whose h can be divided, as [..., h / ranks]."""
    parts = {}
    for key, tensor in tensors.items():
        width, remainder = divmod(tensor.shape[-1], ranks)
        if remainder:
            parts[key] = tensor
        else:
            slices = tensor.contiguous().view(ranks, *tensor.shape[:-1], width)
            parts[f"{key}/{ranks}"] = slices[rank]
    return parts


def part_of(schema: TensorSchema, rank: int, ranks: int) -> TensorSchema:
    """The schema of what :func:`cut` makes of tensors of ``schema``."""
    shape = schema.at(_SAMPLE_TOKENS)
    tensors = {
        key: torch.empty(size, dtype=dtype, device="meta") for key, dtype, size in shape.expected
    }
    return TensorSchema.capture(cut(tensors, rank, ranks), _SAMPLE_TOKENS)


def join(
    tensors: Mapping[str, torch.Tensor], ranks: int, gather: Gather
) -> dict[str, torch.Tensor]:
    """The tensors whose parts came from :func:`cut`. All ranks call it at once, since they gather."""
    joined = {}
    for key, tensor in tensors.items():
        name, _, parts = key.partition("/")
        if parts:
            joined[name] = gather(tensor).view(*tensor.shape[:-1], tensor.shape[-1] * ranks)
        else:
            joined[name] = tensor
    return joined
