"""A worker's KV connector that raises: whatever method does, no worker ends, and no load is lost."""

import inspect
import re
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest

pytest.importorskip("vllm", reason="the module belongs to sipipe.worker")

import torch
from tests.worker.hooks.test_draws import batch, last_rows, last_runner
from tests.worker.test_publisher import VOCAB
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorTransferResults,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu import kv_connector
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from sipipe.messages.kv_load import KVLoad
from sipipe.worker.device import Launched
from sipipe.worker.hooks.draws import NothingDrawn
from sipipe.worker.hooks.kv_connector import ReportingKVConnector
from sipipe.worker.hooks.preparation import TokenFeedback
from sipipe.worker.inputs.model_input import ModelInput

NOTHING = SimpleNamespace(idx_mapping=None, req_ids=[], num_tokens=0)
"""A batch, as far as a connector is told of it."""
NOW = KVLoad(request_id="now", block_ids=(1, 2), waits=False)
LATER = KVLoad(request_id="later", block_ids=(3, 4), waits=True)
LOADING = {"bind_connector_metadata", "start_load_kv", "wait_for_layer_load"}
"""Methods without which the blocks of both loads do not come."""
TELLING = {"get_transfer_results"}
"""Methods without which nobody knows of a load that a request waits for."""
OTHER = {
    "handle_preemptions",
    "save_kv_layer",
    "finish_forward",
    "wait_for_save",
    "get_kv_connector_stats",
    "get_kv_connector_kv_cache_events",
    "build_connector_worker_meta",
    "clear_connector_metadata",
}
ERRORS = {"get_block_ids_with_load_errors"}
CALLED = sorted(LOADING | TELLING | OTHER | ERRORS)
"""Methods that vLLM's runner calls in a pass, or its model."""


class Connector(KVConnectorBase_V1):
    """A connector whose methods in ``raises`` raise, and which says next that the loads of the requests
    in ``ended`` have ended."""

    def __init__(self):
        self._connector_metadata = None
        self.raises = set()
        self.ended = set()
        self.started = []
        self.called = []
        """Names of the methods that were called, in order."""

    def start_load_kv(self, forward_context, **kwargs):
        self.started.append(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name):
        pass

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        pass

    def wait_for_save(self):
        pass

    def get_transfer_results(self, finished_req_ids):
        return KVConnectorTransferResults(finished_recving=self.ended)

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        raise NotImplementedError

    update_state_after_alloc = build_connector_meta = get_num_new_matched_tokens


def _raising(name, method):
    def called(self, *args, **kwargs):
        self.called.append(name)
        if name in self.raises:
            raise ZeroDivisionError("as asked")
        return method(self, *args, **kwargs)

    return called


for _name in CALLED:
    setattr(Connector, _name, _raising(_name, getattr(Connector, _name)))


@pytest.fixture(scope="module")
def config():
    return VllmConfig()


@pytest.fixture
def connector():
    return Connector()


@pytest.fixture
def reporting(config, connector):
    with patch.object(kv_connector, "get_kv_transfer_group", lambda: connector):
        return ReportingKVConnector(config, {})


def run(reporting, *loads, ended=()):
    """What is reported of a pass with these loads, at whose end those of ``ended`` have ended."""
    output = SimpleNamespace(
        kv_connector_metadata=KVConnectorMetadata(),
        kv_loads=list(loads),
        has_sync_kv_loads=True,
        finished_req_ids=set(),
    )
    connector = reporting.kv_connector
    connector.ended = set(ended)
    reporting.pre_forward(output, NOTHING)
    connector.wait_for_layer_load("layer")
    connector.save_kv_layer("layer", None, None)
    reporting.finish_forward()
    return reporting.post_forward(output.finished_req_ids)


def test_all_methods_that_vllms_runner_calls_in_a_pass_are_here():
    called = set(re.findall(r"self\.kv_connector\.(\w+)\(", inspect.getsource(kv_connector)))
    start = {"register_kv_caches", "set_host_xfer_buffer_ops", "reset_capture_state"}
    of_the_model = {"wait_for_layer_load", "save_kv_layer"}
    assert called - start == set(CALLED) - of_the_model


@pytest.mark.parametrize("name", CALLED)
def test_a_method_that_raises_is_no_more_than_loads_that_failed(reporting, connector, name):
    connector.raises = {name}
    result = run(reporting, NOW, LATER)
    failed = set()
    if name in LOADING | ERRORS:
        failed.update(NOW.block_ids)
    if name in LOADING | TELLING:
        failed.update(LATER.block_ids)
        assert result.finished_recving == {"later"}
    assert result.invalid_block_ids == failed
    connector.raises = set()
    result = run(reporting)
    assert result.invalid_block_ids == set()
    assert result.finished_recving is None


def test_all_methods_raise(reporting, connector):
    connector.raises = set(CALLED)
    for _ in range(2):
        result = run(reporting, NOW, LATER)
        assert result.invalid_block_ids == {1, 2, 3, 4}
        assert result.finished_recving == {"later"}


@pytest.mark.parametrize("reason", ["", "OSError: gone"])
def test_loads_that_failed_stay_so_when_nobody_knows_what_has_ended(reporting, connector, reason):
    """Their blocks would be taken for right."""
    load = KVLoad(request_id="now", block_ids=(1, 2), waits=False, reason=reason)
    connector.raises = {"get_transfer_results"} if reason else {"start_load_kv", *TELLING}
    run(reporting)
    assert run(reporting, load).invalid_block_ids == {1, 2}


def test_errors_that_are_not_told_are_those_of_loads_that_have_not_ended(reporting, connector):
    """They fail when they end, since the connector may write into the blocks until then."""
    before = KVLoad(request_id="before", block_ids=(5,), waits=True)
    assert run(reporting, before, LATER).invalid_block_ids == set()
    connector.raises = ERRORS
    result = run(reporting, NOW, ended={"before"})
    assert result.invalid_block_ids == {1, 2, 5}
    assert result.finished_recving == {"before"}
    connector.raises = set()
    other = KVLoad(request_id="other", block_ids=(6,), waits=True)
    result = run(reporting, other, ended={"later"})
    assert result.invalid_block_ids == {3, 4}
    assert result.finished_recving == {"later"}
    result = run(reporting, ended={"other"})
    assert result.invalid_block_ids == set()
    assert result.finished_recving == {"other"}


def test_a_connector_without_metadata_of_this_pass_loads_by_no_other(reporting, connector):
    connector.raises = {"bind_connector_metadata", "clear_connector_metadata"}
    connector._connector_metadata = "an earlier pass's"  # noqa: SLF001 - as vLLM binds it
    run(reporting, NOW)
    assert connector.started == []
    connector.raises = set()
    run(reporting, NOW)
    assert len(connector.started) == 1


def test_the_end_of_a_load_that_was_given_up_is_told_to_nobody_however_late(reporting, connector):
    """vLLM's scheduler asserts that it knows the request, which may have ended long ago."""
    connector.raises = TELLING
    assert run(reporting, LATER).finished_recving == {"later"}
    connector.raises = set()
    output = SimpleNamespace(
        kv_connector_metadata=KVConnectorMetadata(),
        kv_loads=[],
        has_sync_kv_loads=False,
        finished_req_ids={"later"},
    )
    reporting.no_forward(output)
    assert run(reporting, ended={"later"}).finished_recving is None
    # Another request of that name waits for a load of its own.
    run(reporting, LATER)
    assert run(reporting, ended={"later"}).finished_recving == {"later"}


def test_a_request_of_that_name_waits_for_its_own_load_also_when_no_end_was_told(
    reporting, connector
):
    connector.raises = TELLING
    assert run(reporting, LATER).finished_recving == {"later"}
    connector.raises = set()
    run(reporting, LATER)
    assert run(reporting, ended={"later"}).finished_recving == {"later"}


IN_ORDER = [
    "handle_preemptions",
    "bind_connector_metadata",
    "start_load_kv",
    "finish_forward",
    "wait_for_save",
    "get_transfer_results",
    "get_block_ids_with_load_errors",
    "get_kv_connector_stats",
    "get_kv_connector_kv_cache_events",
    "build_connector_worker_meta",
    "clear_connector_metadata",
]
"""What vLLM's runner calls in each pass, with tokens or without, on each stage."""


def vllms(reporting, **attributes):
    """vLLM's runner as far as its methods look at it here, with nothing to do but for the connector."""
    runner = Mock(spec=GPUModelRunner, kv_connector=reporting, **attributes)
    runner.aux_output_connector = runner.pcp_manager = None
    return runner


def without_tokens(reporting, output):
    """Any stage, in an iteration in which blocks alone come or go."""
    runner = vllms(reporting, block_tables=Mock())
    runner._merge_ec_connector_no_forward = lambda _, result: result  # noqa: SLF001 - vLLM's
    result = GPUModelRunner.execute_model(runner, output)
    return result.kv_connector_output


def on_an_earlier_stage(reporting, output):
    reporting.pre_forward(output, NOTHING)
    reporting.finish_forward()
    state = Mock(finished_req_ids=output.finished_req_ids)
    runner = vllms(
        reporting,
        execute_model_state=state,
        is_last_pp_rank=False,
        pp_handler=TokenFeedback(8),
        model_state=Mock(),
        eplb=Mock(),
    )
    worker = SimpleNamespace(sample_tokens=partial(GPUModelRunner.sample_tokens, runner))
    return NothingDrawn().finish(worker, None, None).kv_connector_output


def on_the_last_stage(reporting, output):
    """CPU samplers draw, so vLLM's ``sample_tokens`` does not run."""
    reporting.pre_forward(output, NOTHING)
    reporting.finish_forward()
    runner = last_runner()
    runner.kv_connector = reporting
    runner.postprocess_sampled = lambda *_: None
    drawing = last_rows(runner)
    output.scheduled_new_reqs = []
    output.num_scheduled_tokens = {"a": 1}
    inputs = ModelInput(iteration=0, slot=0, buffer_set=0, output=output)
    launched = Launched(inputs=inputs)
    drawing.begin(launched)
    decoding = batch(["a"], [7], [1], [4])
    decoding.query_start_loc = None
    runner.execute_model_state = SimpleNamespace(
        input_batch=decoding, hidden_states=torch.zeros(1, VOCAB)
    )
    assert drawing.finish(SimpleNamespace(sample_tokens=runner.sample_tokens), inputs, None) is None
    return launched.kv


@pytest.mark.parametrize("end", [without_tokens, on_an_earlier_stage, on_the_last_stage])
def test_a_connector_is_called_in_vllms_order_on_each_stage_and_without_tokens(
    reporting, connector, end
):
    """A connector that moves blocks behind the pass counts on it: it fences blocks in the first of
    these calls, and begins and ends its moves in others."""
    output = SchedulerOutput.make_empty()
    output.kv_connector_metadata = KVConnectorMetadata()
    output.kv_loads = [NOW]
    output.has_sync_kv_loads = True
    connector.ended = {"another"}
    assert end(reporting, output).finished_recving == {"another"}
    assert connector.called == IN_ORDER
