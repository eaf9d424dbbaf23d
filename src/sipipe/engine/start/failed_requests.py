"""Reasons of failed requests, as exceptions to their clients.

Who runs here: the event loop's thread of an ``AsyncLLM``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from logging import LogRecord, getLogger
from typing import Any

from vllm.exceptions import GenerationError, VLLMValidationError
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from sipipe.engine.iteration.admission import REFUSED
from sipipe.engine.scheduling.compilations import INVALID
from sipipe.engine.start.drain import EndedFirstError, is_ending
from sipipe.engine.start.sessions import checked_turns, ends_session, is_session
from sipipe.extending import extends
from sipipe.ipc.last_word import leave_last_word


def tell_clients_why() -> None:
    """Have ``AsyncLLM.generate`` raise why a request failed, as it raises what is wrong with one.

    The scheduler puts the reason where vLLM has that of a stop (``ObservedScheduler``); the server
    looks at the finish reason only, unless it is raised. A grammar that does not compile is the
    client's error (status 400), as vLLM 0.33 has it, and so is what the engine refuses. Safe to call
    again.
    """

    @extends(AsyncLLM, "generate")
    async def generate_or_raise(
        generate: Any, self: Any, prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any
    ) -> AsyncIterator[Any]:
        session = is_session(prompt)
        if session:
            prompt = checked_turns(prompt, sampling_params)
        begun = False
        try:
            async with aclosing(
                generate(self, prompt, sampling_params, *args, **kwargs)
            ) as outputs:
                async for output in outputs:
                    for sequence in output.outputs:
                        begun = begun or bool(sequence.token_ids)
                        _raise_failure(self, sequence, begun)
                    yield output
                    if session and ends_session(output):
                        return
        except EngineGenerateError as error:
            reason = _reason(error)
            if reason is None:
                raise
            if self.errored:  # for everybody: the server ends now
                leave_last_word(reason)
            raise EngineGenerateError(reason) from error.__cause__

    getLogger(AsyncLLM.__module__).addFilter(_is_news)


def _is_news(record: LogRecord) -> bool:
    """False: that the engine is gone, which has been said, or was meant; its traceback is nobody's fault."""
    error = str(record.exc_info)
    return EngineDeadError.__name__ not in error and EndedFirstError.__name__ not in error


def _raise_failure(client: Any, sequence: Any, begun: bool) -> None:
    """Raise the reason of a failure that the output ``sequence`` of ``client`` ends with, if it does.

    Args:
        begun: True if a token of the request has come.
    """
    if sequence.finish_reason == "abort" and not begun and is_ending(client):
        raise EndedFirstError  # it came as the engine was told to end
    reason = sequence.stop_reason
    if sequence.finish_reason == "error" and reason:
        if reason.startswith((INVALID, REFUSED)):
            raise VLLMValidationError(reason)
        raise GenerationError(reason)


def _reason(error: EngineGenerateError) -> str | None:
    """The reason that vLLM's own error of ``generate`` leaves out: it has no text, and a client would
    get an empty message. None: it has one."""
    cause = error.__cause__
    if str(error) or cause is None:
        return None
    return f"vLLM's front end failed: {type(cause).__name__}: {cause}"
