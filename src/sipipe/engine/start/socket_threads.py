"""Threads of an engine that read and write the sockets of vLLM's front ends: what fails there.

vLLM's two threads end at the first error, and say so in the log alone. The engine lives on and
answers nobody; ``/health`` still says 200. Here:

- A request with a value of a wrong type, such as ``SamplingParams(max_tokens=5.0)``, fails alone: the
  front end sends what the engine's typed reader does not take.
- A call whose result cannot be sent, such as a worker's method by ``/collective_rpc``, fails alone.
- Whatever else ends one of the threads ends the engine, and is its last word.

Who runs here: in the engine's process, its thread at the start, then vLLM's two threads, each with the
reader or writer that it has made.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from msgspec import Struct, convert, msgpack, structs
from vllm.logger import init_logger
from vllm.v1.engine import (
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    UtilityOutput,
    core,
)
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from sipipe.engine.iteration.admission import RefusedRequest
from sipipe.errors import one_line
from sipipe.extending import extends
from sipipe.ipc.last_word import leave_last_word

logger = init_logger(f"vllm.{__name__}")


class UnreadableRequest(Struct):
    """A request that the engine cannot read: whose it is, and why."""

    request_id: str
    client_index: int
    current_wave: int
    reason: str


class RequestDecoder(MsgpackDecoder):
    """vLLM's reader of messages; a request that it cannot read is an :class:`UnreadableRequest`."""

    def __init__(self, kind: Any = None, **options: Any) -> None:
        super().__init__(kind, **options)
        self._reads_requests = kind is EngineCoreRequest

    def decode(self, bufs: Any) -> Any:
        try:
            return super().decode(bufs)
        except Exception as error:  # whatever msgspec, and vLLM's conversion of a tensor, raise
            if not self._reads_requests:
                raise
            return _unreadable(bufs, error)


class OutputEncoder(MsgpackEncoder):
    """vLLM's writer of messages; a result of a call that it cannot write is that call's failure."""

    def encode_into(self, obj: Any, buf: bytearray) -> Any:
        try:
            return super().encode_into(obj, buf)
        except Exception as error:  # whatever msgspec, and the pickling of a result, raise
            if not (isinstance(obj, EngineCoreOutputs) and obj.utility_output is not None):
                raise
            reason = f"the result of the call cannot be sent: {one_line(error)}"
            logger.error("%s", reason)
            failure = UtilityOutput(obj.utility_output.call_id, failure_message=reason)
            return super().encode_into(structs.replace(obj, utility_output=failure), buf)


def guard_socket_threads() -> None:
    """Have this engine's process answer messages that cannot be read or sent, and end where it can no
    longer answer anybody. Safe to call again."""
    core.MsgpackDecoder = RequestDecoder
    core.MsgpackEncoder = OutputEncoder

    @extends(EngineCoreProc, "preprocess_add_request")
    def preprocess_add_request(preprocess: Any, self: Any, request: Any) -> Any:
        if isinstance(request, UnreadableRequest):
            refused = RefusedRequest(
                request.request_id, client_index=request.client_index, reason=request.reason
            )
            return refused, request.current_wave
        return preprocess(self, request)

    @extends(EngineCoreProc, "process_input_sockets")
    def process_input_sockets(process: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        with _ending(self, "reads requests"):
            process(self, *args, **kwargs)

    @extends(EngineCoreProc, "process_output_sockets")
    def process_output_sockets(process: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        with _ending(self, "sends results"):
            process(self, *args, **kwargs)


def _unreadable(bufs: Any, error: Exception) -> UnreadableRequest:
    """Return what is known of a request that cannot be read. Raises ``error`` where nothing is."""
    names = EngineCoreRequest.__struct_fields__
    try:
        first = bufs if isinstance(bufs, bytes | bytearray | memoryview) else bufs[0]
        # Fields in their order; tensors stay as they are.
        fields = dict(zip(names, msgpack.decode(first), strict=False))
        reason = one_line(error)
        for number, name in enumerate(names):
            reason = reason.replace(f"$[{number}]", name)
        known = {
            "request_id": fields["request_id"],
            "client_index": fields.get("client_index", 0),
            "current_wave": fields.get("current_wave", 0),
            "reason": f"the engine cannot read it: {reason}",
        }
        return convert(known, UnreadableRequest)
    except Exception:  # no message of a front end of this vLLM
        raise error from None


@contextmanager
def _ending(engine: Any, does: str) -> Iterator[None]:
    """End ``engine`` if the body, which one of its threads lives in, fails."""
    try:
        yield
    except Exception as error:
        leave_last_word(
            f"the engine's thread that {does} has failed: {type(error).__name__}: {error}"
        )
        logger.exception("the engine's thread that %s has failed", does)
        engine.input_queue.put_nowait((EngineCoreRequestType.EXECUTOR_FAILED, b""))
