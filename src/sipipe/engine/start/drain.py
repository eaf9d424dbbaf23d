"""Requests that an engine has when it is told to end: they end first, or their clients are told why not.

vLLM drains an engine for ``--shutdown-timeout``, with three holes. A paused engine counts as an idle one
and ends at once, with all that it holds. Whoever still waits when the engine has ended waits for ever,
as vLLM stops listening to the engine: its server then waits for that client. And who waits as vLLM stops
listening, or comes a moment later, as from a tokenizer, is told of an engine that "encountered an issue"
(status 500). Calls that wait for an engine, ended or dead, are :mod:`sipipe.engine.start.unanswered`.

Who runs here: :func:`drain_though_paused` is for the engine's process, on its thread;
:func:`tell_left_over` for the process with the ``AsyncLLM``, on its event loop's thread.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

from vllm.exceptions import GracefulHTTPError
from vllm.logger import init_logger
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCoreProc, EngineShutdownState
from vllm.v1.engine.core_client import MPClient
from vllm.v1.request import RequestStatus

from sipipe.extending import extends

logger = init_logger(f"vllm.{__name__}")


class EndedFirstError(GracefulHTTPError):
    """The server has ended before the request did. The request may be sent to another one."""

    def __init__(self) -> None:
        super().__init__(
            "the server has ended, and this request did not end before it",
            HTTPStatus.SERVICE_UNAVAILABLE,
        )


def is_ending(client: Any) -> bool:
    """Say if the engine of this ``AsyncLLM`` was told to end, and did not end by itself before. One that
    is shared with other API servers knows it when its own server ends."""
    if client is None:
        return False
    if has_ended(client):
        return True
    if client.errored:
        return False
    manager = client.engine_core.resources.engine_manager
    return manager is not None and bool(manager.manager_stopped.is_set())


def has_ended(client: Any) -> bool:
    """Say if this ``AsyncLLM`` has ended because it was told to."""
    return was_told_to_end(getattr(client, "engine_core", None))


def was_told_to_end(engine_core: Any) -> bool:
    """The same, of an ``AsyncLLM``'s own client of its engine."""
    return getattr(engine_core, "_sipipe_told_to_end", False)


@contextmanager
def telling_of_the_end(client: Any) -> Iterator[None]:
    """Raise EndedFirstError where what is done with ``client``, an ``AsyncLLM``, fails as it has ended.

    It is shut down on another thread than its event loop's: each step may be the first that fails.
    """
    try:
        yield
    except Exception as error:
        if has_ended(client):
            raise EndedFirstError from error
        raise


def drain_though_paused() -> None:
    """Have an engine that is told to end while it is paused resume, so that its requests end within
    ``--shutdown-timeout``. Without time for them vLLM aborts them, paused or not. Safe to call again."""

    @extends(EngineCoreProc, "_handle_shutdown")
    def handle_shutdown(handle: Any, self: EngineCoreProc) -> Any:
        ending = self.shutdown_state == EngineShutdownState.REQUESTED
        if ending and self.vllm_config.shutdown_timeout and self.is_scheduler_paused():
            _resume(self)
        return handle(self)


def _resume(engine: Any) -> None:
    """Let the paused requests of ``engine`` run; abort them where the model's weights are not there.

    Rejected: ``engine.resume_scheduler()``. Replicas of a model with experts wait for one another in
    it, and each is told to end by itself.
    """
    if engine.model_executor.is_sleeping:
        aborted = engine.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        engine._send_abort_outputs(aborted)
        return
    logger.info("the engine was paused: it resumes, so that its requests end before it does")
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)


def tell_left_over() -> None:
    """Have the end of an ``AsyncLLM`` tell those who still wait for it, and who comes later:
    :class:`EndedFirstError`, which the server answers with 503. Safe to call again."""

    @extends(AsyncLLM, "shutdown")
    def shutdown_and_tell(shutdown: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        # vLLM also ends one whose start has failed, without an engine yet.
        if getattr(self, "engine_core", None) is None or self.errored:  # all have been told
            shutdown(self, *args, **kwargs)
            return
        self.engine_core._sipipe_told_to_end = True
        shutdown(self, *args, **kwargs)
        handler = getattr(self, "output_handler", None)
        if handler is None:  # nobody has asked
            return
        loop = handler.get_loop()
        if not loop.is_closed():
            loop.call_soon_threadsafe(self.output_processor.propagate_error, EndedFirstError())

    @extends(MPClient, "_format_exception")
    def error_of_the_end(error: Any, self: Any, *args: Any) -> Exception:
        """Raised to the task that hands out the engine's outputs, which may hear of the end as vLLM stops
        listening, before ``shutdown`` stops that task."""
        return EndedFirstError() if was_told_to_end(self) else error(self, *args)

    @extends(AsyncLLM, "dead_error")
    def dead_error(error: Any, self: Any) -> BaseException:
        """Raised by vLLM where it looks before it asks the engine."""
        return EndedFirstError() if has_ended(self) else error(self)
