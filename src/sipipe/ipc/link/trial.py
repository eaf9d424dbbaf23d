"""The trial of a link before its first iteration.

A transport between GPUs can fail in four ways: CUDA refuses it, with an error; it moves other bytes
than were sent, and says nothing (peer copies where an IOMMU or PCIe's access control is in the way); it
never ends; or it works. So both ends open the link as it will be used, and known bytes cross it:

1. every buffer full, each with bytes of its own, compared at the other end;
2. every buffer again with one token, which only an event or a release of the first round makes free;
3. one full buffer, timed, and not compared.

Who runs here: a thread for each end. Whatever hangs, in CUDA too, holds up that thread alone, and who
asked for the trial goes on after its bound.

Guarantees: after a good trial all buffers are free, and iterations are counted from the beginning. On a
GPU everything runs on a stream of the trial's own: a wait that never ends is in no stream of a stage.
Relies on: the engine, which has both ends tried at the same time, and reads both reports.

Rejected: to believe ``cudaDeviceCanAccessPeer`` (it is the driver's word, not the machine's); bytes
that the receiver's GPU compares (the comparison would be another kernel that can be wrong, and the
host's takes milliseconds once); to close a link that hangs (unmapping and freeing its memory wait for
the copy that hangs): it is left as it is, and its memory with it.
"""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from sipipe.errors import SiPipeError, StallError
from sipipe.ipc.errors import LinkClosedError, PeerDiedError, TransferMismatchError
from sipipe.ipc.link.endpoint import open_receiver, open_sender
from sipipe.ipc.link.receiver import Receiver
from sipipe.ipc.link.schema import TensorSchema
from sipipe.ipc.link.sender import Sender
from sipipe.ipc.link.shm import Lost
from sipipe.messages.link import LinkEndpoint, LinkTrial, TrialReport

CLOSE_SECONDS = 5.0
"""Seconds for closing an end whose trial has failed; then it counts as one that hangs."""
_MULTIPLIER = 0x9E3779B1
"""Odd, so that the words of a pattern are all different for 2³² words (Knuth's multiplicative hash)."""

E = TypeVar("E", Sender, Receiver)

_left: list[Any] = []
"""Ends that hang. They are kept: to free their memory would wait for what hangs."""


class TriedEnd(Generic[E]):
    """One end of a link, opened and tried from the constructor on, in a thread of its own."""

    def __init__(
        self, trial: LinkTrial, schema: TensorSchema, sock: socket.socket | None, fail: Lost
    ) -> None:
        self.endpoint = trial.endpoint
        self._trial = trial
        self._schema = schema
        self._sock = sock
        self._fail = fail
        self._end: E | None = None
        self._report = TrialReport(
            pair=trial.pair,
            failure=f"it had not finished after {trial.seconds:g} s",
            hangs=True,
        )
        self._reported = threading.Event()
        self._lost: Exception | None = None
        self._in_use = False
        self._taking = threading.Lock()  # wait: held for moments; nobody waits under it
        # A new thread's GPU is GPU 0, whichever its parent's is.
        self._gpu = torch.cuda.current_device() if self.endpoint.device == "cuda" else None
        self._began = time.monotonic()
        threading.Thread(
            target=self._run, name=f"sipipe-trial-{self.endpoint.name}", daemon=True
        ).start()

    def report(self) -> TrialReport:
        """The report of the trial, once it has ended or its time is up."""
        left = self._trial.seconds - (time.monotonic() - self._began)
        # wait: the trial's, 30 s or the rest of `stall_timeout`; its thread
        self._reported.wait(max(0.0, left))
        return self._report

    def take(self) -> E:
        """The end, to be used and closed by the caller, after a good trial. From now on ``fail`` is
        told what ends the link, and now what has ended it since the trial."""
        assert self._end is not None, "it was not opened"
        with self._taking:
            self._in_use = True
            lost = self._lost
        if lost is not None:
            self._fail(lost)
        return self._end

    def close(self) -> None:
        """Close the end unless it is in use. One that hangs is left as it is."""
        if self._in_use:
            return
        closing = threading.Thread(target=self._close, daemon=True)
        if self._reported.is_set():
            closing.start()
            # wait: 5 s (`CLOSE_SECONDS`); the thread that closes the end
            closing.join(CLOSE_SECONDS)
        if not self._reported.is_set() or closing.is_alive():
            self.leave()

    def leave(self) -> None:
        """Leave the end as it is, and keep its memory. The other one hears that it is gone."""
        _left.append(self)
        if self._sock is not None:
            with contextlib.suppress(OSError):  # it is closed
                self._sock.shutdown(socket.SHUT_RDWR)

    # ---- the trial's thread ---------------------------------------------------------------------

    def _run(self) -> None:
        pair = self._trial.pair
        try:
            with _on_gpu(self._gpu):
                end = self._end = self._open()
                seconds = self._exchange(end)
            self._report = TrialReport(pair=pair, seconds=seconds)
        except Exception as error:  # whatever it is, another transport may do
            # An end that does not come back from this has no report, and so hangs.
            self._give_up()
            self._report = TrialReport(
                pair=pair,
                failure=_in_one_line(error),
                echoes=isinstance(error, LinkClosedError | PeerDiedError),
                hangs=isinstance(error, StallError),
            )
        self._reported.set()

    def _open(self) -> E:
        raise NotImplementedError

    def _exchange(self, end: E) -> float:
        """Do this end's part of the trial; returns the seconds of a report."""
        raise NotImplementedError

    def _give_up(self) -> None:
        """Have the other end hear that the trial has failed."""
        raise NotImplementedError

    def _hear(self, error: Exception) -> None:
        """Take in what a thread of the link says ends it."""
        with self._taking:
            if not self._in_use:
                self._lost = self._lost or error
                return
        self._fail(error)

    def _close(self) -> None:
        with contextlib.suppress(Exception):  # what failed in the trial may fail again
            if self._end is not None:
                self._end.close()
        if self._sock is not None:
            self._sock.close()


class TriedSender(TriedEnd[Sender]):
    """The sender's end."""

    def _open(self) -> Sender:
        return open_sender(self.endpoint, self._sock, self._hear)

    def _exchange(self, end: Sender) -> float:
        bound = self._trial.seconds
        for frame, pattern in enumerate(_compared(self.endpoint, self._schema)):
            # wait: the trial's, 30 s or `stall_timeout`; the receiver, its death
            end.send(frame, pattern.tokens, self._tensors(pattern, frame), timeout=bound)
            end.flush(bound)  # the next frame's bytes take the place of these
        end.wait_released(bound)
        timed = Pattern(self._schema, self.endpoint.buffer_tokens)
        tensors = self._tensors(timed, 0)
        began = time.monotonic()
        # wait: the trial's, 30 s or `stall_timeout`; the receiver, its death
        end.send(0, timed.tokens, tensors, timeout=bound)
        end.wait_released(bound)
        return time.monotonic() - began

    def _tensors(self, pattern: Pattern, frame: int) -> dict[str, torch.Tensor]:
        return {
            key: torch.from_numpy(flat).view(dtype).view(shape).to(self.endpoint.device)
            for (key, dtype, shape), flat in pattern.of(frame)
        }

    def _give_up(self) -> None:
        # Its copies into the receiver's memory have ended before it reports, and the receiver frees
        # the memory after the reports.
        self._close()


class TriedReceiver(TriedEnd[Receiver]):
    """The receiver's end."""

    def _open(self) -> Receiver:
        return open_receiver(self.endpoint, self._sock, self._hear)

    def _exchange(self, end: Receiver) -> float:
        bound = self._trial.seconds
        for frame, pattern in enumerate(_compared(self.endpoint, self._schema)):
            tensors = end.take(frame, pattern.tokens, bound)
            compare(self.endpoint, pattern, frame, tensors)
            end.release(frame)
        end.take(0, self.endpoint.buffer_tokens, bound)
        if self._gpu is not None:
            # wait: the trial's; the device
            torch.cuda.current_stream().synchronize()
        end.release(0)
        return 0.0

    def _give_up(self) -> None:
        if self._end is not None:
            self._end.interrupt()
        elif self._sock is not None:
            self._sock.close()


Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class Pattern:
    """The bytes of a trial's frames with ``tokens`` tokens. No two frames, and no two words of a frame's
    tensor, are the same: what is stale, or at another place, is seen. The host makes them, without
    torch, whose first operator in a thread would start a team of threads."""

    def __init__(self, schema: TensorSchema, tokens: int) -> None:
        self.tokens = tokens
        shape = schema.at(tokens)
        self._expected = shape.expected
        self._sizes = shape.sizes
        words = np.arange(math.ceil(max(shape.sizes, default=0) / 4), dtype=np.uint32)
        words *= np.uint32(_MULTIPLIER)
        self._words = words
        # Made once: new memory for each frame would cost more, by its page faults, than the bytes.
        self._frames = [np.empty(math.ceil(size / 4), np.uint32) for size in shape.sizes]

    def of(self, frame: int) -> Iterator[tuple[tuple[str, Any, tuple[int, ...]], Bytes]]:
        """For each tensor its key, dtype and shape, and its bytes [n], uint8: valid until the next
        frame is asked for."""
        tensors = zip(self._expected, self._sizes, self._frames, strict=True)
        for number, (expected, nbytes, words) in enumerate(tensors):
            key = np.uint32((number << 16) + frame + 1)
            np.bitwise_xor(self._words[: len(words)], key, out=words)
            yield expected, words.view(np.uint8)[:nbytes]


def compare(
    endpoint: LinkEndpoint, pattern: Pattern, frame: int, tensors: Mapping[str, torch.Tensor]
) -> None:
    """Raise TransferMismatchError where a trial's frame is not as it was sent."""
    for (key, dtype, shape), sent in pattern.of(frame):
        tensor = tensors.get(key)
        if tensor is None or (tensor.dtype, tensor.shape) != (dtype, shape):
            raise TransferMismatchError(f"{endpoint.describe()}: tensor {key!r} did not come")
        came = tensor.cpu().reshape(-1).view(torch.uint8).numpy()
        words = len(sent) // 8 * 8  # eight bytes at a time; the rest of them below
        if np.array_equal(came[:words].view(np.uint64), sent[:words].view(np.uint64)) and (
            np.array_equal(came[words:], sent[words:])
        ):
            continue
        raise TransferMismatchError(
            f"{np.count_nonzero(came != sent)} of {len(sent)} bytes in buffer "
            f"{frame % endpoint.depth} were not those that were sent"
        )


def _compared(endpoint: LinkEndpoint, schema: TensorSchema) -> list[Pattern]:
    """The frames that are compared: all buffers full, then again with one token each."""
    full = Pattern(schema, endpoint.buffer_tokens)
    return [full] * endpoint.depth + [Pattern(schema, 1)] * endpoint.depth


def _on_gpu(index: int | None) -> AbstractContextManager[object]:
    """While active, the calling thread works on a stream of its own of that GPU; None: on the host."""
    if index is None:
        return contextlib.nullcontext()
    torch.cuda.set_device(index)
    stream: AbstractContextManager[object] = torch.cuda.stream(torch.cuda.Stream(index))
    return stream


def _in_one_line(error: Exception) -> str:
    text = str(error).partition("\n")[0]
    return text if isinstance(error, SiPipeError) else f"{type(error).__name__}: {text}"
