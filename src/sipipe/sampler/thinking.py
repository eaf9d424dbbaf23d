"""The thinking budget: after so many tokens of reasoning, force the tokens that end it.

A state machine over output tokens, a pure function of prompt and output, so that rebuilt state
continues as kept state. Semantics are those of vLLM's first model runner without speculative
decoding; where that one loses count, this one does not (a start marker of several tokens in the
prompt; an end marker that came before any start).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class ThinkingBudget:
    """Counts the tokens of the current thinking section of one sequence."""

    def __init__(
        self,
        budget: int,
        start_token_ids: Sequence[int],
        end_token_ids: Sequence[int],
        prompt_token_ids: Iterable[int],
    ) -> None:
        self.budget = budget
        self._start = list(start_token_ids)
        self._end = list(end_token_ids)
        self._tail: list[int] = []  # output tokens since the last change of state
        self._count = 0
        self._forced = 0  # end tokens already forced
        prompt = [int(token) for token in prompt_token_ids]
        start, end = _last(prompt, self._start), _last(prompt, self._end)
        self.thinking = start > end
        if self.thinking:
            self._count = len(prompt) - start - len(self._start)

    @property
    def forced(self) -> int:
        """The token that must come next, or -1."""
        if not self._end or not self.thinking or (self._count < self.budget and not self._forced):
            return -1
        return self._end[self._forced]

    def observe(self, token: int) -> None:
        """Advance by one output token."""
        if self.forced >= 0 and token == self.forced:
            self._forced += 1
            if self._forced == len(self._end):
                self._change(thinking=False)
            return
        self._forced = 0
        self._tail.append(token)
        if self.thinking:
            self._count += 1
            if self._end and self._tail[-len(self._end) :] == self._end:
                self._change(thinking=False)
        elif self._start and self._tail[-len(self._start) :] == self._start:
            self._change(thinking=True)
        del self._tail[: -max(len(self._start), len(self._end), 1)]

    def _change(self, *, thinking: bool) -> None:
        self.thinking = thinking
        self._count = 0
        self._forced = 0
        self._tail.clear()


def _last(tokens: list[int], marker: list[int]) -> int:
    """Start of the last occurrence of ``marker``, or -1."""
    if marker:
        for at in range(len(tokens) - len(marker), -1, -1):
            if tokens[at : at + len(marker)] == marker:
                return at
    return -1
