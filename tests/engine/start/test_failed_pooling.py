"""Pooling requests that end without a result, at vLLM's own output processor."""

import asyncio
from http import HTTPStatus

import pytest

pytest.importorskip("vllm")

import torch
from vllm import PoolingParams, SamplingParams
from vllm.exceptions import GracefulHTTPError, VLLMValidationError
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

from sipipe.engine.iteration.admission import REFUSED
from sipipe.engine.start.failed_pooling import tell_failed_pooling


@pytest.fixture
def processor(monkeypatch):
    process = OutputProcessor.process_outputs
    monkeypatch.setattr(OutputProcessor, "process_outputs", process)  # as it is, after the test
    tell_failed_pooling()  # an engine of another test may have done so before
    hooked = OutputProcessor.process_outputs
    tell_failed_pooling()
    assert OutputProcessor.process_outputs is hooked
    return OutputProcessor(None, log_stats=False)


def add(processor, id: str, **params) -> RequestOutputCollector:
    queue = RequestOutputCollector(RequestOutputKind.FINAL_ONLY, id)
    request = EngineCoreRequest(
        request_id=id,
        external_req_id=id,
        prompt_token_ids=[1, 2, 3],
        mm_features=None,
        sampling_params=params.get("sampling"),
        pooling_params=params.get("pooling"),
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
    processor.add_request(request, None, queue=queue)
    return queue


@pytest.mark.parametrize(
    ("reason", "finish", "kind", "status"),
    [
        (None, FinishReason.ABORT, GracefulHTTPError, HTTPStatus.SERVICE_UNAVAILABLE),
        (None, FinishReason.ERROR, GracefulHTTPError, HTTPStatus.INTERNAL_SERVER_ERROR),
        (REFUSED + "why", FinishReason.ERROR, VLLMValidationError, None),
    ],
)
def test_each_gets_an_exception_and_the_others_go_on(processor, reason, finish, kind, status):
    pooled = PoolingParams(task="embed")
    failing = add(processor, "failing", pooling=pooled)
    served = add(processor, "served", pooling=pooled)
    drawn = add(processor, "drawn", sampling=SamplingParams(detokenize=False))
    processor.process_outputs(
        [
            EngineCoreOutput("failing", [], finish_reason=finish, stop_reason=reason),
            EngineCoreOutput("gone", [], finish_reason=finish),
            EngineCoreOutput(
                "served", [], pooling_output=torch.ones(3), finish_reason=FinishReason.STOP
            ),
            EngineCoreOutput("drawn", [], finish_reason=FinishReason.ABORT),
        ]
    )

    async def outputs():
        return await served.get(), await drawn.get()

    result, aborted = asyncio.run(outputs())
    assert result.outputs.data.tolist() == [1.0] * 3
    assert aborted.outputs[0].finish_reason == "abort"
    with pytest.raises(kind) as caught:
        failing.get_nowait()
    assert getattr(caught.value, "http_status", None) == status
    assert reason is None or reason in str(caught.value)
    assert not processor.request_states
    assert not processor.external_req_ids
