"""The receiving end of a link, the same for every transport.

Who runs here: threads of the stage worker; ``take`` by the one that runs the device, ``release``
when the device has consumed the data. Guarantees: ``take`` returns the iteration that was asked for,
with its tokens and the announced schema, or raises; the views stay untouched until ``release``.
Relies on: the sender, which writes a buffer again only after its release. A microbatch in pieces is
put together elsewhere, each piece's buffer given back as it is copied, the last one's by
``release``; nothing else may be held then, because the next piece may need its buffer.
"""

import threading
from collections.abc import Mapping

import torch

from sipipe.errors import StallError
from sipipe.ipc.errors import LinkClosedError, TransferMismatchError
from sipipe.ipc.link.host_copies import Arrivals
from sipipe.ipc.link.packets import Header
from sipipe.ipc.link.shm import ShmReceiving
from sipipe.messages.link import LinkEndpoint


class Receiver:
    """Receives one stage's hidden states. Made by :func:`.open_receiver`."""

    def __init__(self, endpoint: LinkEndpoint, transport: ShmReceiving) -> None:
        self._endpoint = endpoint
        self._transport = transport
        self._held: dict[int, int] = {}  # iteration -> frame, under _holding
        self._holding = threading.Lock()  # wait: held for moments; nobody waits under it
        # wait: held while hidden states are awaited; `close`, which takes it too, has ended that
        self._taking = threading.Lock()
        self._taken = 0
        self._arrivals: Arrivals | None = None
        """Copies to the GPU, where hidden states come by way of host memory."""
        if endpoint.by_host:
            self._arrivals = Arrivals(endpoint.name, self._release_frame, self._fail)
        self._error: Exception | None = None
        self._closed = False

    def take(
        self,
        iteration: int,
        num_tokens: int,
        timeout: float | None = None,
        *,
        into: Mapping[str, torch.Tensor] | None = None,
    ) -> dict[str, torch.Tensor]:
        """The hidden states of ``iteration``, in place (or on the GPU, if the link says so): each
        key's tensor, [num_tokens, ...], in the sender's order. They may be written to, and are valid
        until :meth:`release`.

        Args:
            num_tokens: padding included, as the scheduling output says.
            timeout: seconds to wait; None: the link's ``stall_timeout``.
            into: where to put what comes in pieces, by key, with ``num_tokens`` or more tokens in
                the first dimension; for other keys memory is made.

        Raises StallError: nothing came within ``timeout`` seconds; the call may be made again.
        PeerDiedError: the sender's process ended. TransferMismatchError: something else came; the
        link is broken. LinkClosedError: this end or the sender's was closed.
        """
        with self._taking:
            if self._closed:
                raise self._closed_error()
            if self._error is not None:
                raise self._error
            bound = self._endpoint.stall_timeout if timeout is None else timeout
            most = self._endpoint.buffer_tokens
            header, tensors = self._next(iteration, min(num_tokens, most), bound)
            if num_tokens > most:
                try:
                    return self._put_together(header, tensors, num_tokens, bound, into or {})
                except Exception as error:  # what was taken of the iteration is gone
                    self._error = self._error or error
                    raise
            self._hold(header)
            if self._arrivals is None:
                return tensors.copy()
            schema = self._transport.schema(header)
            assert schema is not None
            arriving = self._arrivals.room(schema.at(num_tokens).expected)
            self._arrivals.copy(header.frame, arriving.values(), tensors.values())
            self._arrivals.join(arriving)
            return arriving

    def _next(
        self, iteration: int, num_tokens: int, bound: float
    ) -> tuple[Header, dict[str, torch.Tensor]]:
        """The next frame, which is to be of ``iteration``, in place."""
        try:
            if (header := self._transport.receive(bound)) is not None:
                self._verify(header, iteration, num_tokens)
                self._taken += 1
                return header, self._transport.tensors(header)
        except Exception as error:
            if self._closed:
                raise self._closed_error() from None
            self._error = error
            raise
        raise StallError(
            f"{self._endpoint.describe()}: no hidden states of iteration {iteration} "
            f"within {bound:g} s; look at the previous stage's log"
        )

    def _put_together(
        self,
        header: Header,
        tensors: Mapping[str, torch.Tensor],
        num_tokens: int,
        bound: float,
        into: Mapping[str, torch.Tensor],
    ) -> dict[str, torch.Tensor]:
        """Receive the rest of an iteration whose first piece has come; returns the whole tensors."""
        assert not self._held, "its pieces may need the buffers that are held"
        schema = self._transport.schema(header)
        most = self._endpoint.buffer_tokens
        assert schema is not None
        expected = schema.at(num_tokens).expected
        arrivals = self._arrivals
        if arrivals is not None:
            # Not in `into`, which the iteration before may still be read from: the copies would
            # wait for that, the sender's next pieces for the copies, and this thread for the pieces.
            targets = arrivals.room(expected)
        else:
            device = next(iter(tensors.values())).device
            targets = {
                key: into[key][:num_tokens]
                if key in into
                else torch.empty(shape, dtype=dtype, device=device)
                for key, dtype, shape in expected
            }
        for k, (count, places) in enumerate(
            schema.pieces(list(targets.values()), num_tokens, most)
        ):
            if k:
                self._give_back(header.frame)
                header, tensors = self._next(header.iteration, count, bound)
            if arrivals is not None:
                arrivals.copy(header.frame, places, tensors.values())
                continue
            for place, tensor in zip(places, tensors.values(), strict=True):
                place.copy_(tensor)
        if arrivals is not None:
            arrivals.join(targets)
        self._hold(header)
        return targets

    def _hold(self, header: Header) -> None:
        with self._holding:
            self._held[header.iteration] = header.frame

    def release(self, iteration: int) -> None:
        """Give the buffer of ``iteration`` back; its tensors must not be used any more."""
        with self._holding:
            frame = self._held.pop(iteration)
        self._give_back(frame)

    def _give_back(self, frame: int) -> None:
        """Give a frame's buffer back, now or when a GPU has copied from it."""
        if self._arrivals is None:
            self._release_frame(frame)
        else:
            self._arrivals.give_back(frame)

    def _release_frame(self, frame: int) -> None:
        """Give a frame's buffer back now. The thread that takes calls it, or the arrivals' own."""
        with self._holding:
            if not self._closed:
                self._transport.release(frame)

    def _fail(self, error: Exception) -> None:
        """Have the next :meth:`take` raise what ended the arrivals' thread."""
        self._error = self._error or error

    def interrupt(self) -> None:
        """Have the sender hear that this end leaves; its buffers stay until :meth:`close`."""
        self._transport.interrupt()

    def close(self) -> None:
        """End the link; a ``take`` that waits raises :class:`LinkClosedError`. Idempotent."""
        if not self._closed:
            self._closed = True
            self._transport.interrupt()
            with self._taking:
                if self._arrivals is not None:
                    self._arrivals.close()
                with self._holding:
                    self._transport.close()

    def _closed_error(self) -> LinkClosedError:
        return LinkClosedError(f"{self._endpoint.describe()}: this receiver was closed")

    def _verify(self, header: Header, iteration: int, num_tokens: int) -> None:
        if (header.iteration, header.num_tokens) != (iteration, num_tokens):
            raise TransferMismatchError(
                f"{self._endpoint.describe()}: expected iteration {iteration} with {num_tokens} "
                f"tokens, iteration {header.iteration} with {header.num_tokens} tokens came; "
                "both stages must run the same scheduling outputs"
            )
        assert header.frame == self._taken, f"{self._endpoint.describe()}: {header}"
