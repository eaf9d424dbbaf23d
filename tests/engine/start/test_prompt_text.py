"""A prompt of token ids that ends or begins inside a character: answers have the answer's text."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: see make setup")

from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from vllm import SamplingParams
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

from sipipe.engine.start.prompt_text import MOST, keep_prompts_text_out


def _of_bytes() -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are the bytes of UTF-8, so that each character can be cut."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    names = {byte: chr(byte) for byte in printable}
    names |= {byte: chr(256 + index) for index, byte in enumerate(others)}
    assert sorted(names.values()) == letters
    made = Tokenizer(models.BPE({name: byte for byte, name in names.items()}, []))
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made)


TOKENIZER = _of_bytes()


@pytest.fixture(scope="module", autouse=True)
def begun():
    begin = FastIncrementalDetokenizer.__init__
    keep_prompts_text_out()
    yield
    FastIncrementalDetokenizer.__init__ = begin


def answered(prompt: bytes, answer: bytes) -> str:
    """The text that a client gets."""
    request = SimpleNamespace(
        request_id="a", prompt_token_ids=[*prompt], sampling_params=SamplingParams()
    )
    detokenizer = FastIncrementalDetokenizer(TOKENIZER, request)
    detokenizer.update([*answer], False)
    return detokenizer.get_next_output_text(finished=True, delta=False)


@given(st.text(max_size=12), st.text(min_size=1, max_size=6), st.data())
@example("hello é", "é", None)
def test_an_answer_is_what_follows_the_prompts_last_whole_character(before, behind, data):
    text = (before + behind + ".").encode()
    begins = 1 if data is None else data.draw(st.integers(0, min(3, len(text) - 1)))
    cut = (
        len(before.encode()) + 1 if data is None else data.draw(st.integers(begins, len(text) - 1))
    )
    prompt, answer = text[begins:cut], text[cut:]
    whole = prompt
    while whole.decode(errors="replace").endswith("\ufffd"):
        whole = whole[:-1]
    if len(prompt) - len(whole) > MOST:
        return
    expected = (prompt + answer).decode(errors="replace")[len(whole.decode(errors="replace")) :]
    assert answered(prompt, answer) == expected


@pytest.mark.parametrize("tail", [b"\xff" * 100, b"\x80", "\ufffd".encode() * 40])
def test_a_prompt_that_ends_with_no_text_is_not_said(tail):
    said = answered(b"a secret prompt " + tail, b" yes.")
    assert "secret" not in said
    assert said.endswith(" yes.")
