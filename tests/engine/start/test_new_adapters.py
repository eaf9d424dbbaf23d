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


@pytest.fixture
def files(tmp_path):
    """The directory of an adapter."""
    (tmp_path / "adapter_config.json").write_text("{}")
    return tmp_path


def test_one_whose_files_are_gone_is_loaded_anew(engine, files):
    """A stage that has given it up for others would load it in a pass, and end."""
    adapter = LoRARequest("a", 1, str(files))
    for _ in range(2):
        assert add(engine, adapter).lora_request is adapter
    assert engine.add_lora.call_count == 1
    (files / "adapter_config.json").unlink()
    engine.add_lora.side_effect = RuntimeError("No adapter found")
    assert refusal(add(engine, adapter), None, None).endswith("cannot be loaded: No adapter found")
    other = LoRARequest("a", 1, "/elsewhere")
    assert refusal(add(engine, other), None, None).endswith("cannot be loaded: No adapter found")


def test_one_that_is_loaded_in_place_is_loaded_once_for_each_request(engine, files):
    """vLLM's stages would load it in each pass."""
    adapter = LoRARequest("a", 1, str(files), load_inplace=True)
    for count in (1, 2):
        assert not add(engine, adapter).lora_request.load_inplace
        assert engine.add_lora.call_count == count
        assert engine.add_lora.call_args.args[0].load_inplace


def test_an_id_that_no_stage_can_keep_is_refused(engine):
    add(engine, LoRARequest("a", 2**31 - 1, "/a"))
    reason = refusal(add(engine, LoRARequest("a", 2**31, "/a")), None, None)
    assert reason.startswith('LoRA adapter "a" has the id 2147483648: give it a lora_int_id below')


def test_an_engine_without_adapters_says_so(engine):
    engine.vllm_config.lora_config = None
    assert "--enable-lora" in refusal(add(engine, A), None, None)
    engine.add_lora.assert_not_called()
