"""What `sipipe generate` makes of prompts that fail, of an engine that dies, of a reader that goes."""

import asyncio
import os
import signal
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.exceptions import QueueOverflowError, VLLMValidationError
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from sipipe.engine.start import generate
from sipipe.errors import SiPipeError


class Engine:
    """Answers each prompt with itself, in two pieces; some words make it fail."""

    def __init__(self):
        self.told, self.ended = [], False

    async def generate(self, prompt, params, name, *, tokenization_kwargs):
        self.told.append(tokenization_kwargs)
        await asyncio.sleep(0)
        if prompt == "long":
            raise VLLMValidationError("longer than the maximum model length")
        if prompt == "one too many":
            raise QueueOverflowError
        if prompt == "dead":
            raise EngineDeadError()
        if prompt == "odd":
            raise EngineGenerateError from UnicodeError("surrogates not allowed")
        for piece in (prompt[:2], prompt[2:]):
            yield SimpleNamespace(
                outputs=[SimpleNamespace(text=piece, token_ids=[1], finish_reason=None)]
            )

    def shutdown(self):
        self.ended = True


@pytest.fixture
def run(monkeypatch):
    engine = Engine()
    monkeypatch.setattr(generate.AsyncLLM, "from_engine_args", lambda arguments: engine)

    def answered(texts, show=lambda *_: None, *, chat=False):
        try:
            return asyncio.run(generate.complete(None, texts, None, chat, show)), engine.told
        finally:
            assert engine.ended

    return answered


def test_a_prompt_that_fails_costs_no_other_one(run):
    shown = []
    prompts = ["first", "long", "odd", "one too many", "last"]
    good, _ = run(prompts, lambda event, it, text: shown.append((event, it, text)))
    ends = [completion for event, completion, _ in shown if event == "end"]
    assert [completion.text for completion in ends] == ["first", "", "", "", "last"]
    assert "longer than the maximum" in ends[1].error
    assert ends[2].error == "surrogates not allowed"
    assert "cannot accept new requests" in ends[3].error
    assert not good
    assert run(["first"])[0]


def test_an_engine_that_dies_is_one_line(run):
    with pytest.raises(SiPipeError, match="generate: EngineCore"):
        run(["first", "dead", "last"])


def test_a_start_is_interrupted_at_once(monkeypatch):
    """A terminal interrupts the engine too, whose end is then no failure."""

    def start(_):
        os.kill(os.getpid(), signal.SIGINT)
        raise RuntimeError("the engine was interrupted")

    monkeypatch.setattr(generate.AsyncLLM, "from_engine_args", start)
    # A shell that runs the tests in the background has them ignore it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(generate.complete(None, ["first"], None, False, pytest.fail))
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_reader_that_goes_is_told_as_that(run):
    def show(event, completion, text):
        if event == "end":
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        run(["first", "last"], show)


def test_special_tokens_come_from_the_template_or_the_tokenizer(run):
    assert run(["first"], chat=True)[1] == [{"add_special_tokens": False}]
    assert run(["first"])[1][1:] == [{}]
