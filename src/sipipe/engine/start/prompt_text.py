"""Text of answers to prompts that end inside a character.

A prompt of token ids may end amid the bytes of a character. vLLM's detokenizer then takes no part of
the prompt as said, and gives a client the whole prompt's text with the first whole character
(vllm#48853). Here the stream begins at the prompt's last whole character, and goes through the
bytes behind it as if they were drawn.
"""

from collections.abc import Sequence
from typing import Any

from sipipe.extending import extends

REPLACEMENT = "\ufffd"
"""Character that a tokenizer writes for bytes that are no whole character."""
MOST = 16
"""Tokens at a prompt's end that are looked at; a character has four bytes. Where all of them are no
text, the stream begins without a prompt."""
WINDOW = 32
"""Tokens that are decoded at a time, the one that is looked at last. A character is of a few of them,
and to decode a whole prompt would take long."""


def keep_prompts_text_out() -> None:
    """Have vLLM's detokenizer, in this process, begin behind a prompt's last whole character."""
    from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

    @extends(FastIncrementalDetokenizer, "__init__")
    def begin_behind_text(begin: Any, self: Any, tokenizer: Any, request: Any) -> None:
        begin(self, tokenizer, request)
        prompt = request.prompt_token_ids or []
        cut = tokens_behind_text(self.tokenizer, prompt, self.skip_special_tokens)
        if cut == 0:
            return
        text_ids = prompt[:-cut] if cut <= MOST else []
        byte_ids = prompt[-cut:] if cut <= MOST else []
        self.stream = type(self.stream)(ids=text_ids, skip_special_tokens=self.skip_special_tokens)
        for token in byte_ids:
            self._protected_step(token)


def tokens_behind_text(tokenizer: Any, prompt: Sequence[int], skip_special_tokens: bool) -> int:
    """The number of ``prompt``'s tokens behind its last whole character; ``MOST + 1``: more than
    :data:`MOST`."""
    for cut in range(min(MOST, len(prompt)) + 1):
        end = len(prompt) - cut
        part = prompt[max(0, end - WINDOW) : end]
        text = tokenizer.decode(part, skip_special_tokens=skip_special_tokens)
        if not text.endswith(REPLACEMENT):
            return cut
    return MOST + 1
