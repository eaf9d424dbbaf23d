"""Streaming sessions in the front end: what vLLM's own dies of, or waits for without an end.

Who runs here: the event loop of an API server or of a program that has an ``AsyncLLM``.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

FROM_THE_FIRST_TURN = ("logprobs", "prompt_logprobs", "detokenize")
"""Parameters that vLLM's output processor reads from a session's first turn alone. Of a later turn
that has others an assertion fails, in the handler that all requests share."""


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
        asked = turn.sampling_params or params
        if first is None:
            first = asked
        for name in FROM_THE_FIRST_TURN:
            if getattr(asked, name) != getattr(first, name):
                raise VLLMValidationError(
                    f"{name} of a session is that of its first turn "
                    f"({getattr(first, name)!r}), and a later turn asks for "
                    f"{getattr(asked, name)!r}: begin another session"
                )
        yield turn


def ends_session(output: Any) -> bool:
    """Say if ``output`` is the last of a session that was aborted, as a pause does: vLLM calls it
    unfinished, because its turns have not ended, and its client would wait for ever."""
    return any(sequence.finish_reason == "abort" for sequence in output.outputs)
