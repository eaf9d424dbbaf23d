"""Streaming sessions in the front end, where vLLM's own dies of one, or waits for it without an end.

Who runs here: the event loop of an API server or of a program that has an ``AsyncLLM``.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from vllm.v1.engine.output_processor import RequestOutputCollector

from sipipe.extending import extends

FROM_THE_FIRST_TURN = ("logprobs", "detokenize")
"""Parameters that vLLM's output processor reads from a session's first turn alone. If a later turn has
others, an assertion fails in the handler that all requests share."""


def is_session(prompt: Any) -> bool:
    """Say if what ``AsyncLLM.generate`` is given is a session: prompts that come turn by turn."""
    return isinstance(prompt, AsyncGenerator)


async def checked_turns(turns: AsyncGenerator[Any, None], params: Any) -> AsyncIterator[Any]:
    """Hand on the turns of a session.

    ``params`` are the session's, for turns without their own. Raises VLLMValidationError: a turn asks
    for what only the first one can.
    """
    from vllm.exceptions import VLLMValidationError

    first: Any = None
    async for turn in turns:
        turns_own = turn.sampling_params or params
        if first is None:
            first = turns_own
        for name in FROM_THE_FIRST_TURN:
            if getattr(turns_own, name) != getattr(first, name):
                raise VLLMValidationError(
                    f"{name} of a session is that of its first turn "
                    f"({getattr(first, name)!r}), and a later turn asks for "
                    f"{getattr(turns_own, name)!r}: begin another session"
                )
        yield turn


def ends_session(output: Any) -> bool:
    """Say if ``output`` is the last of a session that was aborted, as a pause does: vLLM calls it
    unfinished, because its turns have not ended, and its client would wait for ever."""
    return any(sequence.finish_reason == "abort" for sequence in output.outputs)


class SessionOutputs(RequestOutputCollector):
    """Outputs of a session, whose turns end with it.

    vLLM goes on to take turns of a session that was aborted until its client has read of that. A turn
    which comes behind the abort makes a session anew, without what was said before, which nobody ends
    and which keeps its KV cache blocks. Here an abort ends the taking of turns at once, and its output
    is the last one.

    Rejected: looking at each output where it is yielded. A client that reads none meanwhile gets the
    abort and what came behind it as one output.
    """

    aborted = False

    def put(self, output: Any) -> None:
        """Keep an output for the client, unless an abort came before it."""
        if self.aborted:
            return
        super().put(output)
        if not isinstance(output, Exception) and ends_session(output):
            self.aborted = True
            self.close()  # the task that takes turns


def end_turns_with_their_session() -> None:
    """Have an ``AsyncLLM`` collect a session's outputs in :class:`SessionOutputs`. Safe to call again."""
    from vllm.v1.engine.async_llm import AsyncLLM

    @extends(AsyncLLM, "_add_streaming_input_request")
    async def add_session(add: Any, self: Any, *args: Any, **kwargs: Any) -> RequestOutputCollector:
        collector: RequestOutputCollector = await add(self, *args, **kwargs)
        # vLLM makes the object, and its task has it already; that has not run yet.
        collector.__class__ = SessionOutputs
        return collector
