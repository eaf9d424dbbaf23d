"""Requests that an engine has when it is told to end: they end first, or their clients are told why not.

vLLM drains an engine for ``--shutdown-timeout``, with two holes. A paused engine counts as an idle one
and ends at once, with all that it holds. And whoever still waits when the engine has ended waits for
ever, as vLLM stops listening to the engine: its server then waits for that client.

Who runs here: :func:`drain_though_paused` is for the engine's process, on its thread;
:func:`tell_left_over` for the process with the ``AsyncLLM``, on its event loop's thread.
"""

from http import HTTPStatus
from typing import Any

from vllm.exceptions import GracefulHTTPError
from vllm.logger import init_logger
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCoreProc, EngineShutdownState
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
    """Say if the engine of this ``AsyncLLM`` lives and was told to end. One that is shared with other
    API servers cannot know."""
    if client is None or client.errored:
        return False
    manager = client.engine_core.resources.engine_manager
    return manager is not None and bool(manager.manager_stopped.is_set())


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
    """Have the end of an ``AsyncLLM`` tell those who still wait for it: :class:`EndedFirstError`, which the
    server answers with 503. Safe to call again."""

    @extends(AsyncLLM, "shutdown")
    def shutdown_and_tell(shutdown: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        handler = getattr(self, "output_handler", None)
        if handler is None or self.errored:  # nobody has asked, or all have been told
            shutdown(self, *args, **kwargs)
            return
        shutdown(self, *args, **kwargs)
        loop = handler.get_loop()
        if not loop.is_closed():
            loop.call_soon_threadsafe(self.output_processor.propagate_error, EndedFirstError())
