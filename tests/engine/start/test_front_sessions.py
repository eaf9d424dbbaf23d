"""What the front end does of sessions and of ids, by vLLM's own methods; no engine is started."""

import asyncio
from functools import partial
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock

import pytest

pytest.importorskip("vllm")

from vllm import SamplingParams
from vllm.engine.protocol import StreamingInput
from vllm.exceptions import VLLMValidationError
from vllm.inputs import TokensPrompt
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

from sipipe.engine.start import new_requests
from sipipe.engine.start.sessions import end_turns_with_their_session


@pytest.fixture
def front(monkeypatch):
    """A front end, whose methods that SiPipe replaces are vLLM's again after the test."""
    for name in ("_add_streaming_input_request", "add_request", "_add_request"):
        monkeypatch.setattr(AsyncLLM, name, getattr(AsyncLLM, name))
    monkeypatch.setattr(LLMEngine, "add_request", LLMEngine.add_request)
    check = InputProcessor._validate_model_input  # noqa: SLF001
    monkeypatch.setattr(InputProcessor, "_validate_model_input", check)

    return Front()


class Front(AsyncLLM):
    """An ``AsyncLLM`` without an engine, as far as sessions ask for it; ``turns`` are those that it
    took."""

    errored = False

    def __init__(self):
        self.turns = []
        self.vllm_config = SimpleNamespace(
            cache_config=SimpleNamespace(kv_sharing_fast_prefill=False), is_mm_encoder_only=False
        )
        self.model_config = SimpleNamespace(is_encoder_decoder=False, is_diffusion=False)
        self.input_processor = SimpleNamespace(
            process_inputs=lambda request_id, prompt, *_, **__: SimpleNamespace(
                request_id=request_id, prompt_embeds=None, prompt=prompt
            ),
            assign_request_id=Mock(),
        )
        self.output_processor = SimpleNamespace(external_req_ids={})

    async def get_supported_tasks(self):
        return ("generate",)

    async def _add_request(self, request, *_):
        self.turns.append(request)

    def _run_output_handler(self):
        pass

    def shutdown(self, timeout=None):
        pass


def output(reason, *tokens):
    sequence = CompletionOutput(
        index=0,
        text="",
        token_ids=list(tokens),
        cumulative_logprob=None,
        logprobs=None,
        finish_reason=reason,
    )
    return RequestOutput("s", None, [], None, [sequence], finished=False)


def test_no_turn_is_taken_behind_the_abort_of_a_session_and_nothing_is_added_to_it(front):
    """Also while its client reads nothing."""
    end_turns_with_their_session()
    said = asyncio.Event()

    async def turns():
        for _ in range(2):
            yield StreamingInput(prompt=TokensPrompt(prompt_token_ids=[1]))
            await said.wait()

    async def main():
        params = SamplingParams(output_kind=RequestOutputKind.DELTA)
        outputs = await front.add_request("s", turns(), params)
        await asyncio.sleep(0)
        outputs.put(output(None, 5))
        outputs.put(output("abort"))
        said.set()
        for _ in range(5):
            await asyncio.sleep(0)
        outputs.put(output("length", 7))
        return await outputs.get()

    last = asyncio.run(main())
    assert len(front.turns) == 1, "a second turn would begin another session"
    assert last.outputs[0].finish_reason == "abort"
    assert last.outputs[0].token_ids == [5]


def test_an_id_is_in_use_from_the_moment_that_it_is_given(front, monkeypatch):
    """vLLM knows it once the prompt is tokenized."""
    monkeypatch.setenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "1")
    tokenized = asyncio.Event()

    async def add(*_):
        await tokenized.wait()

    monkeypatch.setattr(AsyncLLM, "add_request", add)
    new_requests.check_new_requests()

    async def main():
        first = asyncio.create_task(AsyncLLM.add_request(front, "r", "prompt", None))
        await asyncio.sleep(0)
        with pytest.raises(VLLMValidationError, match="request id r is in use"):
            await AsyncLLM.add_request(front, "r", "prompt", None)
        tokenized.set()
        await first
        await AsyncLLM.add_request(front, "r", "prompt", None)

    asyncio.run(main())
    front.output_processor.external_req_ids["r"] = ["r"]
    with pytest.raises(VLLMValidationError, match="in use"):
        LLMEngine.add_request(front, "r", "prompt", None)


@pytest.mark.parametrize("disabled", ["0", "1"])
@pytest.mark.parametrize(
    ("parameters", "error"),
    [
        ({}, UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed")),
        ({}, OverflowError("can't serialize ints < -2**63 or > 2**64 - 1")),
        ({"bad_words": ["fine", "\ud800"]}, None),
        ({"stop": ["\udfff a"]}, None),
        ({"stop": "\udfff a"}, None),
    ],
)
def test_a_value_without_bytes_is_the_clients_own_error(
    front, monkeypatch, disabled, parameters, error
):
    async def add(*_):
        if error is not None:
            raise error

    monkeypatch.setenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", disabled)
    monkeypatch.setattr(AsyncLLM, "add_request", add)
    new_requests.check_new_requests()
    params = SamplingParams(**parameters)
    with pytest.raises(VLLMValidationError, match=r"cannot be sent: .*(surrogates|ints)"):
        asyncio.run(AsyncLLM.add_request(front, "a", "text", params))


def test_a_request_that_cannot_be_sent_is_forgotten(monkeypatch):
    monkeypatch.setattr(AsyncLLM, "_add_request", AsyncLLM._add_request)  # noqa: SLF001
    for owner in (AsyncLLM, LLMEngine):
        monkeypatch.setattr(owner, "add_request", owner.add_request)
    check = InputProcessor._validate_model_input  # noqa: SLF001
    monkeypatch.setattr(InputProcessor, "_validate_model_input", check)
    new_requests.check_new_requests()
    request = EngineCoreRequest(
        request_id="r-1",
        external_req_id="r",
        prompt_token_ids=[5],
        mm_features=None,
        sampling_params=SamplingParams(detokenize=False),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
    engine = Mock()
    engine.output_processor = OutputProcessor(None, log_stats=False)
    engine.abort = partial(AsyncLLM.abort, engine)
    engine.log_requests = False
    engine.engine_core.add_request_async.side_effect = TypeError("no bytes")
    engine.engine_core.abort_requests_async = AsyncMock()
    queue = RequestOutputCollector(RequestOutputKind.FINAL_ONLY, "r-1")
    with pytest.raises(TypeError, match="no bytes"):
        asyncio.run(AsyncLLM._add_request(engine, request, None, None, 0, queue))  # noqa: SLF001
    assert not engine.output_processor.request_states
    assert not engine.output_processor.external_req_ids
    engine.engine_core.abort_requests_async.assert_awaited_with(["r-1"])


@pytest.mark.usefixtures("front")
@pytest.mark.parametrize("largest", [999, 1023, 1024, 1999])
@pytest.mark.parametrize(
    ("kind", "in_tokenizer"), [("token", 2000), ("token", 1000), ("multimodal", 2000)]
)
def test_a_token_without_a_row_in_the_model_is_refused(monkeypatch, kind, in_tokenizer, largest):
    """A tokenizer may have more tokens than its model. vLLM pads the model's rows to 64."""
    monkeypatch.setattr(InputProcessor, "_validate_model_input", lambda *_: None)
    new_requests.check_new_requests()
    processor = SimpleNamespace(
        model_config=SimpleNamespace(get_vocab_size=lambda: 1000),
        tokenizer=SimpleNamespace(max_token_id=in_tokenizer - 1),
    )
    prompt = {"type": kind, "prompt_token_ids": [5, largest, 7]}
    if kind == "token" and in_tokenizer > 1000 and largest >= 1024:
        with pytest.raises(VLLMValidationError, match=f"token {largest}, .* vocabulary has 1000"):
            InputProcessor._validate_model_input(processor, prompt, "decoder")  # noqa: SLF001
    else:
        InputProcessor._validate_model_input(processor, prompt, "decoder")  # noqa: SLF001


@pytest.mark.usefixtures("front")
@pytest.mark.parametrize("token", [-1, 0, 999, 1000])
def test_without_a_tokenizer_no_token_passes_that_the_model_has_not(monkeypatch, token):
    """A pooling request that the engine refused would end vLLM's front end, at an assertion."""
    monkeypatch.setattr(InputProcessor, "_validate_model_input", lambda *_: None)
    new_requests.check_new_requests()
    model = SimpleNamespace(get_vocab_size=lambda: 1000)
    processor = SimpleNamespace(model_config=model, tokenizer=None)
    prompt = {"type": "token", "prompt_token_ids": [5, token, 7]}
    if 0 <= token < 1000:
        InputProcessor._validate_model_input(processor, prompt, "decoder")  # noqa: SLF001
    else:
        with pytest.raises(VLLMValidationError, match="none of the model's 1000"):
            InputProcessor._validate_model_input(processor, prompt, "decoder")  # noqa: SLF001
