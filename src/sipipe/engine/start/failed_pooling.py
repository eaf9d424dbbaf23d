"""Pooling requests that end without a result: each gets an exception with the reason.

vLLM's front end takes an output without a result for that of a request that generates. For one that is
pooled an assertion fails then, in the handler that all requests share: the server ends. The engine
sends such outputs where it ends while requests are pooled (SIGTERM), where a pause aborts them, and for
what it refuses.

Who runs here: the event loop's thread of an ``AsyncLLM``.
"""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from vllm.exceptions import GracefulHTTPError, VLLMValidationError
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor

from sipipe.engine.iteration.admission import REFUSED
from sipipe.extending import extends

WITHOUT_RESULT = (FinishReason.ABORT, FinishReason.ERROR)
"""Ends of a request that has no result."""


def tell_failed_pooling() -> None:
    """Have an ``AsyncLLM`` tell pooling requests without a result why they have none. Safe to call
    again."""

    @extends(OutputProcessor, "process_outputs")
    def process_outputs(
        process: Any,
        self: Any,
        engine_core_outputs: Sequence[EngineCoreOutput],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        outputs = [output for output in engine_core_outputs if not _is_told(self, output)]
        return process(self, outputs, *args, **kwargs)


def _is_told(processor: Any, output: EngineCoreOutput) -> bool:
    """Tell the client of a pooling request without a result; False: ``output`` is none of one."""
    if output.finish_reason not in WITHOUT_RESULT or output.pooling_output is not None:
        return False
    state = processor.request_states.get(output.request_id)
    # vLLM has an answer of its own for an image that its cache has lost.
    if state is None or state.detokenizer is not None or output.mm_cache_miss_hashes:
        return False
    if state.queue is None:  # an ``LLM``, which raises vLLM's assertion where it was called
        return False
    processor.abort_requests([output.request_id], internal=True)
    state.queue.put(_failure(output))  # in the place of an empty result
    return True


def _failure(output: EngineCoreOutput) -> Exception:
    """The exception that the server answers the client of ``output`` with."""
    error: Exception
    reason = str(output.stop_reason or "the engine could not serve this request: see its log")
    if output.finish_reason == FinishReason.ABORT:
        error = GracefulHTTPError(
            "the engine was paused or has ended, and this request did not end before it",
            HTTPStatus.SERVICE_UNAVAILABLE,
        )
    elif reason.startswith(REFUSED):
        error = VLLMValidationError(reason)
    else:
        error = GracefulHTTPError(reason, HTTPStatus.INTERNAL_SERVER_ERROR)
    return error
