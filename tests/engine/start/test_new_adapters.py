"""Adapters that requests bring, at vLLM's own way to take a request."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest

pytest.importorskip("vllm")

from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request

from sipipe.engine.iteration.admission import RefusedRequest, refusal
from sipipe.engine.start.new_adapters import load_adapters_first

A = LoRARequest("a", 1, "/a")
B = LoRARequest("b", 2, "/nowhere")


@pytest.fixture
def engine(monkeypatch):
    """What vLLM's engine takes requests with. ``b`` cannot be loaded."""

    def add_lora(adapter):
        if adapter.lora_name == "b":
            raise RuntimeError("No adapter found for /nowhere")

    monkeypatch.setattr(EngineCore, "add_request", EngineCore.add_request)
    load_adapters_first()
    load_adapters_first()
    engine = Mock(spec=EngineCore)
    engine.vllm_config = SimpleNamespace(lora_config=object())
    engine.add_lora = Mock(side_effect=add_lora)
    engine.scheduler = Mock()
    engine.scheduler.get_kv_connector.return_value = None
    return engine


def add(engine, adapter) -> Request:
    """The request that reaches the scheduler, of one from front end 2 with an adapter."""
    params = SamplingParams(max_tokens=1)
    request = Request("r", [5], params, None, client_index=2, lora_request=adapter)
    EngineCore.add_request(engine, request)
    (sent,) = engine.scheduler.add_request.call_args.args
    if not isinstance(sent, RefusedRequest):
        assert sent is request
    return sent


def test_each_is_loaded_once_and_one_that_fails_is_its_requests_fault(engine):
    assert add(engine, None).lora_request is None
    for _ in range(3):
        assert add(engine, A).lora_request is A
    for _ in range(2):
        sent = add(engine, B)
        assert (sent.request_id, sent.client_index) == ("r", 2)
        assert refusal(sent, None, None) == (
            'LoRA adapter "b" cannot be loaded: No adapter found for /nowhere'
        )
    assert [call.args[0] for call in engine.add_lora.call_args_list] == [A, B, B]


def test_an_engine_without_adapters_says_so(engine):
    engine.vllm_config.lora_config = None
    assert "--enable-lora" in refusal(add(engine, A), None, None)
    engine.add_lora.assert_not_called()
