"""Options that few requests ask for: bad words, min tokens, bias, allow lists, logprobs, thinking.

Kept in Python, because a request without any of these costs nothing here, and gathered per call
into the flat ranges that the kernels read (`RowOptions`).
"""

import struct
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from sipipe.messages.params import SequenceParams
from sipipe.sampler.kernels.state import Ranges, RowOptions


class ThinkingBudget:
    """After so many tokens of reasoning, forces the tokens that end it. A pure function of prompt
    and output, so that rebuilt state continues as kept state. Semantics are those of vLLM's first
    model runner; where that one loses count, this one does not (a start marker of several tokens in
    the prompt; an end marker that came before any start)."""

    def __init__(
        self,
        budget: int,
        start_token_ids: Sequence[int],
        end_token_ids: Sequence[int],
        natural_end_token_ids: Sequence[int],
        prompt_token_ids: Iterable[int],
    ) -> None:
        """``end_token_ids`` are forced; a model itself may end with ``natural_end_token_ids``."""
        self.budget = budget
        self._start = list(start_token_ids)
        self._end = list(end_token_ids)
        natural = list(natural_end_token_ids)
        ends = [self._end] if natural == self._end else [self._end, natural]
        self._ends = [end for end in ends if end]
        self._tail: list[int] = []  # output tokens since the last change of state
        self._count = 0
        self._forced = 0  # end tokens already forced
        prompt = np.fromiter(prompt_token_ids, np.int64)
        start = _last(prompt, self._start)
        self.thinking = start > max((_last(prompt, end) for end in self._ends), default=-1)
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
            if any(self._tail[-len(end) :] == end for end in self._ends):
                self._change(thinking=False)
        elif self._start and self._tail[-len(self._start) :] == self._start:
            self._change(thinking=True)
        del self._tail[: -max(1, *map(len, (self._start, *self._ends)))]

    def _change(self, *, thinking: bool) -> None:
        self.thinking = thinking
        self._count = self._forced = 0
        self._tail.clear()


def _last(tokens: npt.NDArray[np.int64], marker: list[int]) -> int:
    """Start of the last occurrence of ``marker``, or -1."""
    starts = np.flatnonzero(tokens == marker[0])[::-1] if marker else ()
    occurrences = (int(at) for at in starts if tokens[at : at + len(marker)].tolist() == marker)
    return next(occurrences, -1)


Ids = npt.NDArray[np.int32]
Reasoning = tuple[Sequence[int], Sequence[int], Sequence[int]]
"""Token ids that begin thinking, that are forced to end it, and that a model ends it with."""


class RequestOptions:
    """One request's rarely used parameters, and the output tail they depend on."""

    def __init__(
        self,
        params: SequenceParams,
        prompt: Iterable[int],
        output: Sequence[int],
        reasoning: Reasoning,
        vocab_size: int,
    ) -> None:
        """Raises ValueError naming the field that holds a token id outside the vocabulary.

        A bad word or a stop token that the tokenizer has and the model has not is never drawn. It is
        left out, since it rules nothing out.
        """
        words = [word for word in params.bad_words_token_ids or () if max(word) < vocab_size]
        _ids("bad_words_token_ids", [token for word in words for token in word], vocab_size)
        self._single = [word[-1] for word in words if len(word) == 1]
        self._words = [word for word in words if len(word) > 1]
        self._longest = max((len(word) - 1 for word in self._words), default=0)
        self._tail: list[int] = []
        self._thinking: ThinkingBudget | None = None
        begins = all(token < vocab_size for token in reasoning[0])
        if params.thinking_token_budget is not None and reasoning[1] and begins:
            _ids("thinking_token_budget", reasoning[1], vocab_size)  # these are forced
            self._thinking = ThinkingBudget(
                budget=params.thinking_token_budget,
                start_token_ids=reasoning[0],
                end_token_ids=reasoning[1],
                natural_end_token_ids=reasoning[2],
                prompt_token_ids=prompt,
            )
        self.min_tokens = params.min_tokens
        stops = [token for token in params.all_stop_token_ids or () if token < vocab_size]
        self.stops = _ids("all_stop_token_ids", stops, vocab_size)
        allowed = _ids("allowed_token_ids", params.allowed_token_ids, vocab_size)
        self.allowed = _bits(allowed, vocab_size) if allowed.size else allowed
        bias = params.logit_bias or {}
        if isinstance(bias, tuple):
            ids = _ids("logit_bias", bias[0], vocab_size)
            biases = np.bincount(ids, np.frombuffer(bias[1], "<f8"))
            self.bias_tokens = np.flatnonzero(np.bincount(ids)).astype(np.int32)
            biases = biases[self.bias_tokens]
        else:
            self.bias_tokens = _ids("logit_bias", bias.keys(), vocab_size)
            biases = np.frombuffer(struct.pack(f"<{len(bias)}d", *bias.values()), "<f8")
        with np.errstate(over="ignore"):  # then it is infinite, as in vLLM
            self.bias_values = biases.astype(np.float32)
        self.named = _ids("logprob_token_ids", params.logprob_token_ids, vocab_size)
        self.logprobs = params.logprobs
        for token in output if self._words or self._thinking else ():
            self.observe(token)

    @property
    def forced(self) -> int:
        """The token the thinking budget forces, or -1."""
        return -1 if self._thinking is None else self._thinking.forced

    @property
    def remembers(self) -> bool:
        """True where it matters which tokens came, beyond their number."""
        return bool(self._words) or self._thinking is not None

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
        """Number of logprobs to return besides the drawn token's; -1: none at all."""
        if self.named.size:
            return int(self.named.size)
        if self.logprobs is None:
            return -1
        return vocab_size if self.logprobs == -1 else min(self.logprobs, vocab_size)


def _ids(field: str, tokens: Collection[int] | bytes | None, vocab_size: int) -> Ids:
    """The array of token ids, or behind the bytes of int32 ones."""
    if isinstance(tokens, bytes):
        ids: npt.NDArray[Any] = np.frombuffer(tokens, "<i4")
    else:
        # `struct` takes half as long as NumPy, which counts where a list is of 100,000 tokens.
        try:
            packed = struct.pack(f"<{len(tokens or ())}q", *(tokens or ()))
        except struct.error:
            raise ValueError(f"{field}: token ids must be integers of 64 bits at most") from None
        ids = np.frombuffer(packed, "<i8")
    if ids.size and not (ids.min() >= 0 and ids.max() < vocab_size):
        wrong = ids[(ids < 0) | (ids >= vocab_size)][:8].tolist()
        raise ValueError(f"{field}: token ids {wrong} are outside the vocabulary of {vocab_size}")
    return ids.astype(np.int32)


def _bits(ids: Ids, vocab_size: int) -> Ids:
    """A bit for each of ``ids``, in words of 32."""
    flags = np.zeros(-(-vocab_size // 32) * 32, np.bool_)
    flags[ids] = True
    return np.packbits(flags, bitorder="little").view("<i4").astype(np.int32, copy=False)


def _ranges(n: int, parts: Iterable[tuple[int, Any]], kind: type[np.generic] = np.int32) -> Ranges:
    """`Ranges` of ``n`` rows from the (row, values) that there are, rows ascending."""
    sizes = np.zeros(n + 1, np.int64)
    values: list[Any] = [np.zeros(0, kind)]
    for row, part in parts:
        if len(part):
            sizes[row + 1] = len(part)
            values.append(np.asarray(part, kind))
    return Ranges(np.cumsum(sizes), np.concatenate(values))


def row_options(
    n: int,
    given: Mapping[int, RequestOptions],
    positions: npt.NDArray[np.int64],
    vocab_size: int,
    bitmask: npt.NDArray[np.int32] | None,
    bitmask_rows: npt.NDArray[np.int32] | None,
) -> RowOptions:
    """The kernels' view of one call's ``n`` rows: ``given`` by row, ascending; ``positions`` (output
    tokens so far) per row; ``bitmask`` [m, words] int32, ``bitmask_rows`` each row's, -1 for none."""
    pairs = given.items()
    forced = np.full(n, -1, np.int32)
    wanted = np.full(n, -1, np.int32)
    for i, options in pairs:
        forced[i] = options.forced
        wanted[i] = options.wanted(vocab_size)
    return RowOptions(
        bans=_ranges(n, ((i, options.bans()) for i, options in pairs)),
        stops=_ranges(n, ((i, o.stops) for i, o in pairs if positions[i] < o.min_tokens)),
        biases=_ranges(n, ((i, options.bias_tokens) for i, options in pairs)),
        bias_values=_ranges(n, ((i, options.bias_values) for i, options in pairs), np.float32),
        allowed=_ranges(n, ((i, options.allowed) for i, options in pairs)),
        forced=forced,
        bitmask=np.zeros((1, 0), np.int32) if bitmask is None else bitmask,
        bitmask_rows=np.full(n, -1, np.int32) if bitmask_rows is None else bitmask_rows,
        wanted=wanted,
        named=_ranges(n, ((i, options.named) for i, options in pairs)),
    )


@lru_cache(maxsize=64)
def no_options(n: int) -> RowOptions:
    """`row_options` of rows that have none. Kernels only read it, so calls share it."""
    return row_options(n, {}, np.zeros(n, np.int64), 0, None, None)
