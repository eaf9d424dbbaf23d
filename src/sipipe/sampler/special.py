"""What few requests ask for, per column: bad words, min tokens, bias, allow lists, logprobs.

Kept in Python, because a column without any of these costs nothing here, and gathered per call into
the flat ranges that the kernels read (`Extras`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sipipe.messages.params import SequenceParams
from sipipe.sampler.kernels.state import Extras
from sipipe.sampler.thinking import ThinkingBudget

Ids = npt.NDArray[np.int32]
_NONE: Ids = np.zeros(0, np.int32)


class Special:
    """One column's rarely used parameters, and the output tail they depend on."""

    def __init__(
        self,
        params: SequenceParams,
        thinking: ThinkingBudget | None,
        output_token_ids: Sequence[int],
    ) -> None:
        words = params.bad_words_token_ids or []
        self._single = [word[-1] for word in words if len(word) == 1]
        self._words = [word for word in words if len(word) > 1]
        self._longest = max((len(word) - 1 for word in self._words), default=0)
        self._tail: list[int] = []
        self._thinking = thinking
        self.min_tokens = params.min_tokens
        self.stops = _ids(params.all_stop_token_ids) if params.min_tokens else _NONE
        self.allowed = np.unique(_ids(params.allowed_token_ids))
        bias = params.logit_bias or {}
        self.bias_tokens = np.fromiter(bias.keys(), np.int32, len(bias))
        self.bias_values = np.fromiter(bias.values(), np.float32, len(bias))
        self.named = _ids(params.logprob_token_ids)
        self.logprobs = params.logprobs
        self.needs_tokens = bool(self._words) or thinking is not None
        for token in output_token_ids if self.needs_tokens else ():
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

    def width(self, vocab_size: int) -> int:
        """Entries of a result row this column needs; 0: none."""
        if self.named.size:
            return 1 + self.named.size
        if self.logprobs is None:
            return 0
        return 1 + (vocab_size if self.logprobs == -1 else min(self.logprobs, vocab_size))


def _ids(tokens: Sequence[int] | None) -> Ids:
    return np.asarray(tokens or [], np.int32)


def is_special(params: SequenceParams) -> bool:
    """Whether a column needs a `Special`."""
    return bool(
        params.bad_words_token_ids
        or params.min_tokens
        or params.logit_bias
        or params.allowed_token_ids
        or params.logprobs is not None
        or params.logprob_token_ids
        or params.thinking_token_budget is not None
    )


class _Ranges:
    def __init__(self, n: int) -> None:
        self.offsets = np.zeros(n + 1, np.int64)
        self.parts: list[Any] = []

    def add(self, row: int, part: Any) -> None:
        if len(part):
            self.offsets[row + 1] = len(part)
            self.parts.append(part)

    def end(self, kind: type[np.generic]) -> tuple[npt.NDArray[np.int64], npt.NDArray[Any]]:
        if not self.parts:
            return self.offsets, np.zeros(0, kind)
        return np.cumsum(self.offsets), np.concatenate(self.parts).astype(kind, copy=False)


def make_extras(
    n: int,
    specials: Mapping[int, Special],
    positions: npt.NDArray[np.int64],
    vocab_size: int,
    mask: npt.NDArray[np.int32] | None,
    mask_rows: npt.NDArray[np.int32] | None,
) -> tuple[Extras, int]:
    """The kernels' view of one call's ``n`` rows, and the width of the logprobs they need (0: none).

    ``specials`` by row, for those that have one; ``positions`` (output tokens so far) are per row;
    ``mask`` is [m, words] int32 with ``mask_rows`` naming each row's, -1 for none.
    """
    bans, stops, biases, allowed, named = (_Ranges(n) for _ in range(5))
    values: list[npt.NDArray[np.float32]] = []
    forced = np.full(n, -1, np.int32)
    wanted = np.full(n, -1, np.int32)
    width = 0
    for i, special in specials.items():
        bans.add(i, special.bans())
        if positions[i] < special.min_tokens:
            stops.add(i, special.stops)
        if special.bias_tokens.size:
            biases.add(i, special.bias_tokens)
            values.append(special.bias_values)
        allowed.add(i, special.allowed)
        forced[i] = special.forced
        size = special.width(vocab_size)
        if size:
            width = max(width, size)
            wanted[i] = size - 1
            named.add(i, special.named)
    extras = Extras(
        *bans.end(np.int32),
        *stops.end(np.int32),
        *biases.end(np.int32),
        np.concatenate(values) if values else np.zeros(0, np.float32),
        *allowed.end(np.int32),
        forced,
        mask if mask is not None else np.zeros((1, 0), np.int32),
        mask_rows if mask_rows is not None else np.full(n, -1, np.int32),
        wanted,
        *named.end(np.int32),
    )
    return extras, width
