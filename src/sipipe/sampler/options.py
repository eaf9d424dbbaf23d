"""What few requests ask for: bad words, min tokens, bias, allow lists, logprobs, thinking budgets.

Kept in Python, because a request without any of these costs nothing here, and gathered per call
into the flat ranges that the kernels read (`RowOptions`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from sipipe.messages.params import SequenceParams
from sipipe.sampler.kernels.state import Ranges, RowOptions
from sipipe.sampler.thinking import ThinkingBudget

Ids = npt.NDArray[np.int32]


class RequestOptions:
    """One request's rarely used parameters, and the output tail they depend on."""

    def __init__(
        self,
        params: SequenceParams,
        prompt: Iterable[int],
        output: Sequence[int],
        reasoning: tuple[Sequence[int], Sequence[int]],
    ) -> None:
        """``reasoning``: token ids that begin and that end thinking."""
        words = params.bad_words_token_ids or []
        self._single = [word[-1] for word in words if len(word) == 1]
        self._words = [word for word in words if len(word) > 1]
        self._longest = max((len(word) - 1 for word in self._words), default=0)
        self._tail: list[int] = []
        self._thinking: ThinkingBudget | None = None
        if params.thinking_token_budget is not None and reasoning[1]:
            self._thinking = ThinkingBudget(params.thinking_token_budget, *reasoning, prompt)
        self.min_tokens = params.min_tokens
        self.stops = _ids(params.all_stop_token_ids)
        self.allowed = np.unique(_ids(params.allowed_token_ids))
        bias = params.logit_bias or {}
        self.bias_tokens = _ids(list(bias))
        self.bias_values = np.asarray(list(bias.values()), np.float32)
        self.named = _ids(params.logprob_token_ids)
        self.logprobs = params.logprobs
        for token in output if self._words or self._thinking else ():
            self.observe(token)

    @property
    def forced(self) -> int:
        """The token the thinking budget forces, or -1."""
        return -1 if self._thinking is None else self._thinking.forced

    def observe(self, token: int) -> None:
        """Advance by one output token."""
        if self._thinking is not None:
            self._thinking.observe(token)
        if self._longest:
            self._tail.append(token)
            del self._tail[: -self._longest]

    def bans(self) -> list[int]:
        """Tokens that would complete a bad word now."""
        tail = self._tail
        return self._single + [
            word[-1]
            for word in self._words
            if len(tail) >= len(word) - 1 and tail[len(tail) - len(word) + 1 :] == word[:-1]
        ]

    def wanted(self, vocab_size: int) -> int:
        """How many logprobs to return besides the drawn token's; -1: none at all."""
        if self.named.size:
            return int(self.named.size)
        if self.logprobs is None:
            return -1
        return vocab_size if self.logprobs == -1 else min(self.logprobs, vocab_size)


def _ids(tokens: Sequence[int] | None) -> Ids:
    return np.asarray(tokens or [], np.int32)


class _RangesOf:
    """`Ranges` in the making, rows ascending."""

    def __init__(self, n: int, kind: type[np.generic] = np.int32) -> None:
        self._sizes = np.zeros(n + 1, np.int64)
        self._parts: list[Any] = [np.zeros(0, kind)]

    def put(self, row: int, part: Any) -> None:
        if len(part):
            self._sizes[row + 1] = len(part)
            self._parts.append(np.asarray(part, self._parts[0].dtype))

    def end(self) -> Ranges:
        if len(self._parts) == 1:
            return Ranges(self._sizes, self._parts[0])
        return Ranges(np.cumsum(self._sizes), np.concatenate(self._parts))


def row_options(
    n: int,
    given: Mapping[int, RequestOptions],
    positions: npt.NDArray[np.int64],
    vocab_size: int,
    bitmask: npt.NDArray[np.int32] | None,
    bitmask_rows: npt.NDArray[np.int32] | None,
) -> RowOptions:
    """The kernels' view of one call's ``n`` rows.

    ``given`` by row, for those that have any; ``positions`` (output tokens so far) are per row;
    ``bitmask`` is [m, words] int32 with ``bitmask_rows`` naming each row's, -1 for none.
    """
    if not given and bitmask is None:
        return _no_options(n)
    return _gather(n, given, positions, vocab_size, bitmask, bitmask_rows)


@lru_cache(maxsize=64)
def _no_options(n: int) -> RowOptions:
    """Kernels only read it, so calls share it."""
    return _gather(n, {}, np.zeros(n, np.int64), 0, None, None)


def _gather(
    n: int,
    given: Mapping[int, RequestOptions],
    positions: npt.NDArray[np.int64],
    vocab_size: int,
    bitmask: npt.NDArray[np.int32] | None,
    bitmask_rows: npt.NDArray[np.int32] | None,
) -> RowOptions:
    bans, stops, biases, allowed, named = (_RangesOf(n) for _ in range(5))
    bias_values = _RangesOf(n, np.float32)
    forced = np.full(n, -1, np.int32)
    wanted = np.full(n, -1, np.int32)
    for i, options in given.items():
        bans.put(i, options.bans())
        if positions[i] < options.min_tokens:
            stops.put(i, options.stops)
        biases.put(i, options.bias_tokens)
        bias_values.put(i, options.bias_values)
        allowed.put(i, options.allowed)
        forced[i] = options.forced
        wanted[i] = options.wanted(vocab_size)
        named.put(i, options.named)
    return RowOptions(
        bans=bans.end(),
        stops=stops.end(),
        biases=biases.end(),
        bias_values=bias_values.end(),
        allowed=allowed.end(),
        forced=forced,
        bitmask=np.zeros((1, 0), np.int32) if bitmask is None else bitmask,
        bitmask_rows=np.full(n, -1, np.int32) if bitmask_rows is None else bitmask_rows,
        wanted=wanted,
        named=named.end(),
    )
