"""Messages that an engine cannot read or send, at vLLM's own readers and writers."""

import queue
import threading
from functools import partial
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

import torch
import zmq
from hypothesis import given
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.v1.engine import (
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    UtilityOutput,
    core,
)
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder, UtilityResult

from sipipe.engine.iteration.admission import RefusedRequest, refusal
from sipipe.engine.start.socket_threads import (
    OutputEncoder,
    RequestDecoder,
    UnreadableRequest,
    guard_socket_threads,
)
from sipipe.ipc.last_word import last_word

VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.text(max_size=3),
    st.lists(st.one_of(st.integers(0, 9), st.text(max_size=2), st.floats()), max_size=3),
    st.dictionaries(st.one_of(st.integers(0, 9), st.text(max_size=2)), st.booleans(), max_size=2),
)
"""What a program may give, of any type that a message can have."""
PARAMETERS = [name for name in SamplingParams.__struct_fields__ if not name.startswith("_")]
FIELDS = ["prompt_token_ids", "arrival_time", "cache_salt", "priority", "trace_headers"]
FIELDS += ["data_parallel_rank", "external_req_id", "resumable", "lora_request"]


@pytest.fixture
def guarded(monkeypatch):
    """vLLM's engine with SiPipe's parts, which are vLLM's again after the test."""
    for name in ("preprocess_add_request", "process_input_sockets", "process_output_sockets"):
        monkeypatch.setattr(EngineCoreProc, name, getattr(EngineCoreProc, name))
    for name in ("MsgpackDecoder", "MsgpackEncoder"):
        monkeypatch.setattr(core, name, getattr(core, name))
    guard_socket_threads()
    guard_socket_threads()
    assert core.MsgpackDecoder is RequestDecoder
    assert core.MsgpackEncoder is OutputEncoder


def request(**fields):
    """A request of front end 3."""
    usual = {
        "request_id": "r",
        "prompt_token_ids": [5],
        "mm_features": None,
        "sampling_params": SamplingParams(),
        "pooling_params": None,
        "arrival_time": 0.0,
        "lora_request": None,
        "cache_salt": None,
        "data_parallel_rank": None,
        "client_index": 3,
    }
    return EngineCoreRequest(**usual | fields)


def received(sent):
    """What the engine reads of a request."""
    return RequestDecoder(EngineCoreRequest).decode(MsgpackEncoder().encode(sent))


def check(read, name):
    """Check that a request is read, or that it is known whose it is and where what is wrong."""
    assert read.request_id == "r"
    assert read.client_index == 3
    if isinstance(read, UnreadableRequest):
        # Checks of vLLM's own classes name no place.
        assert f"`{name}" in read.reason or " - at " not in read.reason
        assert "$" not in read.reason
    else:
        assert isinstance(read, EngineCoreRequest)


@given(name=st.sampled_from(PARAMETERS), value=VALUES)
def test_no_parameter_ends_the_reading(name, value):
    """Set behind the checks of ``SamplingParams``, which find some of them."""
    params = SamplingParams()
    setattr(params, name, value)
    check(received(request(sampling_params=params)), f"sampling_params.{name}")


@given(name=st.sampled_from(FIELDS), value=VALUES)
def test_no_other_value_ends_the_reading(name, value):
    check(received(request(**{name: value})), name)


def test_what_is_wrong_is_said():
    read = received(request(sampling_params=SamplingParams(max_tokens=5.0)))
    assert read.reason == (
        "the engine cannot read it: Expected `int | null`, got `float` - at `sampling_params.max_tokens`"
    )


def test_what_no_front_end_sends_is_an_error():
    """Nobody could be told: the engine ends."""
    for message in (b"", b"\xc1", b"\x01", b"\x91\x01", b"\x80"):
        with pytest.raises(Exception, match=r"."):
            RequestDecoder(EngineCoreRequest).decode([message])


@pytest.mark.usefixtures("guarded")
def test_an_unreadable_request_is_refused_by_the_scheduler():
    read = received(request(sampling_params=SamplingParams(ignore_eos=1), current_wave=2))
    refused, wave = EngineCoreProc.preprocess_add_request(SimpleNamespace(), read)
    assert isinstance(refused, RefusedRequest)
    assert (refused.request_id, refused.client_index, wave) == ("r", 3, 2)
    assert "sampling_params.ignore_eos" in refusal(refused, None, None)
    assert "sampling_params.ignore_eos" in refusal(
        refused, Request("r", [1], SamplingParams(max_tokens=1), None), None
    )


def test_a_result_that_cannot_be_sent_is_the_calls_failure():
    encoder = OutputEncoder()
    buffer = bytearray()
    for result in (torch.float32, object(), {1: [torch.device("cpu")]}):
        output = EngineCoreOutputs(utility_output=UtilityOutput(7, result=UtilityResult(result)))
        sent = encoder.encode_into(output, buffer)
        answer = MsgpackDecoder(EngineCoreOutputs).decode(sent).utility_output
        assert answer.call_id == 7
        assert answer.result is None
        assert answer.failure_message.startswith("the result of the call cannot be sent: Object of")
        fine = EngineCoreOutputs(utility_output=UtilityOutput(8, result=UtilityResult([1])))
        sent = encoder.encode_into(fine, buffer)
        answer = MsgpackDecoder(EngineCoreOutputs).decode(sent).utility_output
        assert (answer.call_id, answer.result.result) == (8, [1])


@pytest.mark.usefixtures("guarded", "own_last_word")
def test_an_engine_ends_with_its_threads():
    """It would answer nobody, and look healthy."""
    engine = SimpleNamespace(input_queue=queue.Queue())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core.zmq, "Context", lambda: 1 // 0)
        EngineCoreProc.process_output_sockets(engine, ["ipc:///x"], None, 0)
    assert engine.input_queue.get_nowait() == (EngineCoreRequestType.EXECUTOR_FAILED, b"")
    assert last_word() == (
        "the engine's thread that sends results has failed: ZeroDivisionError: "
        "integer division or modulo by zero"
    )


OPEN = "ignore:Destroying context with unclosed socket:ResourceWarning"
"""vLLM closes its sockets behind their context."""


@pytest.mark.filterwarnings(OPEN)
@pytest.mark.usefixtures("guarded", "own_last_word")
def test_the_thread_reads_on_behind_what_it_cannot_read(tmp_path):
    """vLLM's own ended there. What is no message of a front end at all ends the engine."""
    address = f"ipc://{tmp_path}/in"
    engine = SimpleNamespace(
        tensor_ipc_receiver=None,
        mm_receiver_cache=None,
        request_block_hasher=None,
        input_queue=queue.Queue(),
        _make_ready_response=lambda: "ready",
    )
    engine.preprocess_add_request = partial(EngineCoreProc.preprocess_add_request, engine)
    bad = request(request_id="bad", sampling_params=SamplingParams(max_tokens=5.0))
    good = request(request_id="good", sampling_params=SamplingParams(max_tokens=5))
    with zmq.Context() as context, context.socket(zmq.ROUTER) as front:
        front.bind(address)
        front.rcvtimeo = 60_000
        thread = threading.Thread(
            target=EngineCoreProc.process_input_sockets,
            args=(engine, [address], None, b"\0\0", threading.Event()),
            daemon=True,
        )
        thread.start()
        identity, _ = front.recv_multipart()
        for sent in (bad, good):
            frames = MsgpackEncoder().encode(sent)
            front.send_multipart([identity, EngineCoreRequestType.ADD.value, *frames])
        came = [engine.input_queue.get(timeout=60) for _ in range(2)]
        front.send_multipart([identity, b"?"])
        assert engine.input_queue.get(timeout=60)[0] == EngineCoreRequestType.EXECUTOR_FAILED
        thread.join(60)
    assert [kind for kind, _ in came] == [EngineCoreRequestType.ADD] * 2
    (refused, _), (taken, _) = (message for _, message in came)
    assert (refused.request_id, type(refused)) == ("bad", RefusedRequest)
    assert (taken.request_id, type(taken)) == ("good", Request)
    assert "reads requests has failed: ValueError" in last_word()


@pytest.mark.filterwarnings(OPEN)
@pytest.mark.usefixtures("guarded")
def test_the_thread_sends_on_behind_what_it_cannot_send(tmp_path):
    address = f"ipc://{tmp_path}/out"
    engine = SimpleNamespace(
        input_queue=queue.Queue(),
        output_queue=queue.Queue(),
        _send_msg_tracking_payload=EngineCoreProc._send_msg_tracking_payload,  # noqa: SLF001
    )
    for number, result in enumerate((torch.float32, [1])):
        utility = UtilityOutput(number, result=UtilityResult(result))
        engine.output_queue.put((0, EngineCoreOutputs(utility_output=utility)))
    engine.output_queue.put(EngineCoreProc.ENGINE_CORE_DEAD)
    with zmq.Context() as context, context.socket(zmq.PULL) as front:
        front.bind(address)
        front.rcvtimeo = 60_000
        EngineCoreProc.process_output_sockets(engine, [address], None, 0)
        decoder = MsgpackDecoder(EngineCoreOutputs)
        failed, fine = (decoder.decode(front.recv_multipart()).utility_output for _ in range(2))
        assert front.recv() == EngineCoreProc.ENGINE_CORE_DEAD
    assert failed.failure_message
    assert fine.result.result == [1]
    assert engine.input_queue.empty()
