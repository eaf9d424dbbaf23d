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
        if prompt.startswith("interrupted"):
            os.kill(os.getpid(), signal.SIGINT)
            if prompt == "interrupted, and the engine too":
                raise EngineDeadError()
            await asyncio.Event().wait()
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


@pytest.fixture
def interrupts():
    """A shell that runs the tests in the background has them ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def test_a_start_is_interrupted_at_once(monkeypatch, interrupts):
    """A terminal interrupts the engine too, whose end is then no failure."""

    def start(_):
        os.kill(os.getpid(), signal.SIGINT)
        raise RuntimeError("the engine was interrupted")

    monkeypatch.setattr(generate.AsyncLLM, "from_engine_args", start)
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(generate.complete(None, ["first"], None, False, pytest.fail))


@pytest.mark.parametrize("prompt", ["interrupted", "interrupted, and the engine too"])
@pytest.mark.parametrize("shown", [[], ["first"]])
def test_an_interruption_amid_prompts_ends_the_engine_and_is_no_failure(
    run, interrupts, prompt, shown
):
    """Whichever prompt is being shown, and also where the terminal's Ctrl-C has ended the engine first."""
    ends = []
    with pytest.raises(KeyboardInterrupt):
        run(
            [*shown, prompt, "last"],
            lambda event, it, _: ends.append(it.prompt) if event == "end" else None,
        )
    assert set(ends) <= set(shown)


def test_a_reader_that_goes_is_told_as_that(run):
    def show(event, completion, text):
        if event == "end":
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        run(["first", "last"], show)


def test_special_tokens_come_from_the_template_or_the_tokenizer(run):
    assert run(["first"], chat=True)[1] == [{"add_special_tokens": False}]
    assert run(["first"])[1][1:] == [{}]
