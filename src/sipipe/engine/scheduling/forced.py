"""The tokens that a grammar leaves no choice in, as drafts: field names, punctuation, ends.

A grammar allows a set of next tokens. Where each of them begins with one of them or is a beginning
of it, the longest such token is the next draft. The grammar is advanced by it, asked again, and taken
back in the end. The draft is always one that the grammar allows. It may differ from the model's token,
which cuts the text another way, or, where alternatives have their first bytes in common, is of
another one, for which the vocabulary has no token so long.

This goes through vLLM's interface of a grammar only, so it holds for every backend, and its cost is
bounded by the number of drafts, however long the forced text is. A text is compared by its tokens'
names in the vocabulary, so it may begin and end inside a character.

Rejected: xgrammar's ``find_jump_forward_string``, which raises UnicodeDecodeError where the forced
bytes end inside a character, and walks the whole text at each token (10 ms for 200,000 characters);
llguidance's ``compute_ff_tokens``, which does so in 0.1 s and more. Rejected: encoding the text with
the tokenizer, which costs as much again, and begins with a space for some tokenizers.

Who runs here: the engine's thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch
    from vllm.v1.request import Request
    from vllm.v1.structured_output import StructuredOutputManager

MANY = 32
"""Allowed tokens, above which there is a choice: a vocabulary has fewer beginnings of one text."""


class ForcedTokens:
    """Finds the forced tokens of requests with a grammar of ``manager``'s."""

    def __init__(self, manager: StructuredOutputManager) -> None:
        self._manager = manager
        self._bitmask: torch.Tensor | None = None
        """The allowed tokens of one request: [1, words] of 32 bits each, as the backend has them."""

    def of(self, request: Request, most: int) -> list[int]:
        """The next tokens of ``request``, ``most`` at most, as far as its grammar leaves no choice;
        its grammar is then as it was. Empty: there is a choice, or no grammar is in force."""
        structured = request.structured_output_request
        if structured is None:
            return []
        if self._manager.reasoner_cls is not None and not structured.reasoning_ended:
            return []
        grammar: Any = structured.grammar
        tokens: list[int] = []
        advanced = 0
        try:
            while len(tokens) < most and not grammar.is_terminated():  # bound: `most`
                token = self._next(grammar)
                if token is None:
                    break
                tokens.append(token)
                if len(tokens) < most:
                    if not grammar.accept_tokens(request.request_id, [token]):
                        break
                    advanced += 1
        finally:
            if advanced:
                grammar.rollback(advanced)
        return tokens

    def _next(self, grammar: Any) -> int | None:
        """The token that the grammar allows alone, or the longest that all allowed ones agree with."""
        if self._bitmask is None:
            assert self._manager.backend is not None, "a grammar was compiled"
            self._bitmask = self._manager.backend.allocate_token_bitmask(1)
        grammar.fill_bitmask(self._bitmask, 0)
        allowed = few_of(self._bitmask[0].numpy(), MANY)
        if len(allowed) < 2:
            return allowed[0] if allowed else None
        names: list[str | None] = self._manager.tokenizer.convert_ids_to_tokens(allowed)
        if not all(names):
            return None
        index = agreed([name for name in names if name])
        return None if index is None else allowed[index]


def few_of(bits: npt.NDArray[np.int32], most: int) -> list[int]:
    """The numbers of the bits that are set, words of 32 and lowest first; none if over ``most``."""
    words = np.flatnonzero(bits)
    if len(words) > most:
        return []
    single = np.unpackbits(bits[words].view(np.uint8), bitorder="little")
    numbers = np.flatnonzero(single)
    if len(numbers) > most:
        return []
    bits_set: list[int] = (words[numbers // 32] * 32 + numbers % 32).tolist()
    return bits_set


def agreed(names: Sequence[str]) -> int | None:
    """The index of the longest of ``names`` that every other begins with or is a beginning of."""
    longest_first = sorted(range(len(names)), key=lambda index: -len(names[index]))
    for index in longest_first:
        name = names[index]
        if all(other.startswith(name) or name.startswith(other) for other in names):
            return index
    return None
