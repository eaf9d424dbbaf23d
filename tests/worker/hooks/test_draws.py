"""What draws a stage's tokens in the place of vLLM's sampling, and what brings them, without a model.

Batches of all kinds, on a device: ``test_cuda_order.py``.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm", reason="the module belongs to sipipe.worker")

from tests.worker.test_publisher import VOCAB  # noqa: E402
from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput  # noqa: E402
from vllm.v1.worker.gpu import buffer_utils  # noqa: E402
from vllm.v1.worker.gpu.kv_connector import NO_OP_KV_CONNECTOR  # noqa: E402

from sipipe.messages.stage_place import StagePlace  # noqa: E402
from sipipe.worker.device import HostDevice, Launched  # noqa: E402
from sipipe.worker.hooks import device_sampler  # noqa: E402
from sipipe.worker.hooks.device_sampler import DeviceSampler  # noqa: E402
from sipipe.worker.hooks.draws import LastRows, feedback_of  # noqa: E402
from sipipe.worker.hooks.preparation import StandInSampler, TokenFeedback  # noqa: E402
from sipipe.worker.hooks.world import PipelineStandIn  # noqa: E402
from sipipe.worker.inputs.model_input import ModelInput  # noqa: E402


@pytest.fixture
def feedback():
    found = TokenFeedback(8, 0, device="cpu")
    found.states = SimpleNamespace(
        req_id_to_index={"a": 3, "b": 0, "c": 5},
        prefill_len=SimpleNamespace(np=np.array([4, 0, 0, 9, 0, 7])),
    )
    return found


def output(req_ids, computed, token_ids):
    found = SchedulerOutput.make_empty()
    found.scheduled_cached_reqs = cached = CachedRequestData.make_empty()
    cached.req_ids, cached.num_computed_tokens, cached.new_token_ids = req_ids, computed, token_ids
    return found


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("draws", [False, True])
def test_stages_whose_models_look_at_tokens_are_brought_them(raw, stage, draws):
    """vLLM 0.33 keeps them on later stages of such models. The last one's own sampler has them."""
    runner = SimpleNamespace(
        pp_handler=TokenFeedback(8, 0, device="cpu"),
        is_first_pp_rank=stage == 0,
        is_last_pp_rank=stage == 2,
        model=SimpleNamespace(requires_raw_input_tokens=raw),
        req_states="states",
    )
    found = feedback_of(runner, draws=draws)
    assert (found.states == "states") is ((raw or stage == 0) and (draws or stage < 2))


def test_decoding_requests_get_the_token_that_the_scheduler_accepted(feedback):
    # b is in the middle of its prompt.
    feedback.output = output(["a", "b", "c"], [9, 2, 12], [[11], [5, 6], [13]])
    found = feedback.get_prev_sampled_outputs(draft_tokens=None)
    assert found["idx_mapping"].tolist() == [3, 5]
    assert found["sampled_tokens"].tolist() == [[11], [13]]
    assert found["num_sampled"].tolist() == [1, 1]
    assert found["num_rejected"].tolist() == [0, 0]
    assert found["idx_mapping"].dtype == torch.int64
    assert found["num_sampled"].dtype == torch.int32


def test_nothing_decodes(feedback):
    assert feedback.get_prev_sampled_outputs() is None, "before the first step"
    feedback.output = output(["b"], [2], [[5, 6]])
    assert feedback.get_prev_sampled_outputs() is None
    feedback.output = output(["a"], [9], [])
    assert feedback.get_prev_sampled_outputs() is None, "a warm-up brings no tokens"


def test_stages_that_get_hidden_states_need_no_tokens(feedback):
    feedback.states = None
    feedback.output = output(["a"], [9], [[11]])
    assert feedback.get_prev_sampled_outputs() is None
    assert feedback.receive(None, recv_drafts=False) is False


class Head:
    """In place of the model's: a row of logits says which row of hidden states it is of."""

    def __init__(self, _):
        self.rows = []

    def compute(self, hidden, into=None):
        self.rows.append(len(hidden))
        return hidden.clone()

    def gather_rows(self, columns):
        return columns


def last_runner():
    """What a last stage reads of vLLM's second runner."""
    return SimpleNamespace(
        is_last_pp_rank=True,
        sample_tokens=None,
        max_num_reqs=8,
        device=torch.device("cpu"),
        lora_config=None,
        kv_connector=NO_OP_KV_CONNECTOR,
        pp_handler=SimpleNamespace(embeds=False),
        prompt_logprobs_worker=SimpleNamespace(uses_prompt_logprobs=np.zeros(8, bool)),
        model_config=SimpleNamespace(use_fp64_gumbel=False),
    )


@pytest.fixture
def runner():
    return last_runner()


class Handover:
    """In place of this rank's writer of BIC-L, whose rows are not contiguous."""

    def place_for(self, row, hidden):
        return None


def last_rows(runner, *, per_row=False, reports=True):
    """Drawing on a last stage whose rank writes BIC-L, where CPU samplers draw."""
    stage = LastRows(runner, HostDevice(), Head(runner), reports=reports)
    stage = stage.take_over(per_row=per_row)
    stage.open(stage.projection, Handover())
    return stage


@pytest.fixture
def last_stage(runner):
    return last_rows(runner)


def batch(req_ids, computed, scheduled, prefill):
    """As vLLM has sorted it; the last row of each request is the one whose logits are wanted."""
    ends = np.cumsum(scheduled)
    return SimpleNamespace(
        req_ids=req_ids,
        num_reqs=len(req_ids),
        num_tokens=int(ends[-1]),
        num_computed_tokens_np=np.array(computed),
        num_scheduled_tokens=np.array(scheduled),
        prefill_len_np=np.array(prefill),
        logits_indices=torch.from_numpy(ends - 1),
        idx_mapping_np=np.arange(len(req_ids)),
        idx_mapping=torch.arange(len(req_ids)),
        positions=torch.arange(ends[-1]) * 10,
        is_prefilling_np=np.array(computed) < np.array(prefill),
    )


def inputs_of(iteration, scheduled, sampled=None):
    """``scheduled``: a scheduling output, or the names that it has, in order."""
    if not isinstance(scheduled, SchedulerOutput):
        names, scheduled = scheduled, SchedulerOutput.make_empty()
        scheduled.num_scheduled_tokens = dict.fromkeys(names, 1)
    return ModelInput(
        iteration=iteration, slot=0, buffer_set=0, output=scheduled, logits_rows=sampled
    )


def sample(stage, runner, hidden, batch, asked, *, sampled=None):
    """One iteration's ``sample``: what was launched, and the tokens on their way to the host."""
    launched = Launched(inputs=inputs_of(0, asked, sampled))
    stage.begin(launched)
    result, drawn, _ = runner.sample(hidden, batch, None)
    stage.end()
    assert not drawn.any(), "the runner is told of no token"
    return launched, result.sampled_token_ids


def row_values(logits):
    return [] if logits is None else logits.flatten().tolist()


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("lora", [False, True])
def test_rows_are_in_the_samplers_order(last_stage, runner, lora, prepared):
    """vLLM puts decoding requests first; samplers know the order of the scheduling output."""
    runner.lora_config = object() if lora else None
    sorted_batch = batch(["d1", "d2", "chunk", "p"], [9, 5, 0, 0], [1, 1, 3, 4], [9, 2, 8, 4])
    hidden = torch.arange(9.0).unsqueeze(1)
    sampled = np.array([3, 1, 0]) if prepared else None
    launched, _ = sample(
        last_stage, runner, hidden, sorted_batch, ["p", "d2", "chunk", "d1"], sampled=sampled
    )
    assert row_values(launched.logits) == [8.0, 1.0, 0.0], "p, d2, d1; chunk gets no token"
    assert last_stage.stage_logits.rows == [4 if lora else 3]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("lora", [False, True])
def test_rows_in_any_order_are_those_of_their_requests(last_stage, runner, lora, order):
    """All decode, so that each row of hidden states samples; the samplers want them in ``order``. The
    naive twin picks each: to take hidden states whole would hand tokens to other requests."""
    runner.lora_config = object() if lora else None
    decoding = batch(["a", "b", "c"], [9, 5, 7], [1, 1, 1], [9, 2, 3])
    hidden = torch.tensor([[50.0], [60.0], [70.0]])
    rows = np.array(order)
    launched, _ = sample(last_stage, runner, hidden, decoding, ["a", "b", "c"], sampled=rows)
    twin = [hidden[decoding.logits_indices[row]].item() for row in order]
    assert row_values(launched.logits) == twin


def test_padded_hidden_states_are_not_taken_for_rows(last_stage, runner):
    """A graph's are as long as it is."""
    both = batch(["a", "b"], [9, 5], [1, 1], [9, 2])
    launched, _ = sample(last_stage, runner, torch.arange(8.0).unsqueeze(1), both, ["a", "b"])
    assert row_values(launched.logits) == [0.0, 1.0]


def test_vllms_output_is_made_only_where_somebody_waits_for_it(runner):
    """For prompt scores, or where no sampler says anything; by all ranks alike."""
    calls = []
    runner.sample_tokens = lambda _: calls.append("output")
    runner.postprocess_sampled = lambda rows, *_: calls.append(rows.tolist())
    last_stage = last_rows(runner, reports=False)
    decoding, chunk = batch(["a", "b"], [9, 5], [1, 1], [9, 2]), batch(["a"], [0], [2], [9])
    for now in (decoding, chunk):
        runner.execute_model_state = SimpleNamespace(
            input_batch=now, hidden_states=torch.ones(2, 1)
        )
        now.query_start_loc = None
        last_stage.begin(Launched(inputs=inputs_of(0, now.req_ids)))
        runner.sample_tokens(None)
        last_stage.end()
    assert calls == [[0, 1], "output"]
    assert last_stage.stage_logits.rows == [2]
    runner.sample_tokens(None)
    assert calls[2:] == ["output"], "a warm-up's is vLLM's"


PLAIN, ASKS_MORE = SamplingParams(temperature=0.5, seed=-1 << 40), SamplingParams(top_p=0.9, seed=1)


@pytest.fixture
def drawn(monkeypatch):
    """What vLLM's kernel is asked to draw; it gives its rows' first logits."""
    asked = []

    def gumbel_sample(logits, rows, temperatures, seeds, positions, **how):
        assert how == {"apply_temperature": True, "is_drafting": False, "use_fp64": False}
        of = [(temperatures[row].item(), seeds[row].item()) for row in rows]
        asked.append((rows.tolist(), of, positions.tolist()))
        return logits[:, 0].long()

    monkeypatch.setattr(device_sampler.gumbel, "gumbel_sample", gumbel_sample)
    monkeypatch.setattr(buffer_utils, "is_uva_available", lambda: False)
    return asked


@pytest.mark.parametrize("lora", [False, True])
def test_each_row_has_its_place(runner, drawn, lora):
    runner.lora_config = object() if lora else None

    def drawing(*, reports):
        stage = last_rows(runner, per_row=True, reports=reports)
        for row, params in enumerate([PLAIN, ASKS_MORE, PLAIN, ASKS_MORE, PLAIN]):
            runner.sampler.add_request(row, params)
        runner.sampler.apply_staged_writes()
        return stage

    ids = ["here", "there", "chunk", "p_there", "p_here"]
    mixed = batch(ids, [9, 5, 0, 0, 0], [1, 1, 3, 4, 2], [9, 2, 8, 4, 2])
    hidden = torch.arange(11.0).unsqueeze(1)
    scheduled = ["p_there", "p_here", "chunk", "there", "here"]
    launched, tokens = sample(drawing(reports=True), runner, hidden, mixed, scheduled)
    assert row_values(launched.logits) == [8.0, 1.0], "what samplers draw, in their order"
    assert tokens.tolist() == [[10], [0]], "p_here and here, in that order too"
    assert drawn == [([4, 0], [(0.5, -1 << 40)] * 2, [100, 0])]
    assert launched.reports
    assert launched.draws

    drawn.clear()
    launched, _ = sample(drawing(reports=False), runner, hidden, mixed, scheduled)
    assert row_values(launched.logits) == [8.0, 1.0]
    assert not drawn, "one rank says the tokens"
    assert not launched.reports


def test_a_seed_of_any_size_is_drawn_with(drawn):
    sampler = DeviceSampler(last_runner())
    for row, seed in ((2, 7), (5, 2**64 - 1), (6, 2**64 + 5)):
        sampler.add_request(row, SamplingParams(seed=seed))
    sampler.apply_staged_writes()
    sampler.draw(torch.zeros(3, 4), torch.tensor([2, 5, 6]), torch.zeros(3))
    [(_, of, _)] = drawn
    assert [seed % 2**64 for _, seed in of] == [7, 2**64 - 1, 5]


def test_the_kernel_is_compiled_while_memory_is_profiled(drawn):
    sampler = DeviceSampler(last_runner())
    sampler(torch.zeros(2, 4), batch(["a", "b"], [9, 5], [1, 1], [9, 2]))
    assert drawn == [([0, 1], [(0.0, 0)] * 2, [0, 10])]


def test_scores_of_tokens_that_a_request_names_are_reported(last_stage, runner):
    """While it runs its prompt, whatever becomes of them in vLLM's runner."""
    plain, params = SamplingParams(), SamplingParams(prompt_logprob_token_ids=[[1]])

    def reports(batch, *, new=(), finished=()):
        scheduled = output([], [], [])
        scheduled.scheduled_new_reqs = [
            SimpleNamespace(req_id=name, sampling_params=asked) for name, asked in new
        ]
        scheduled.finished_req_ids = set(finished)
        scheduled.num_scheduled_tokens = dict.fromkeys(batch.req_ids, 1)
        batch.is_prefilling_np = batch.num_computed_tokens_np < batch.prefill_len_np
        hidden = torch.zeros(batch.num_reqs, VOCAB)
        launched, _ = sample(last_stage, runner, hidden, batch, scheduled)
        return launched.reports

    new = [("a", plain), ("b", params)]
    assert reports(batch(["a", "b"], [0, 0], [1, 1], [1, 2]), new=new)
    assert reports(batch(["a", "b"], [1, 1], [1, 1], [1, 2])), "b's prompt ends"
    assert not reports(batch(["a", "b"], [2, 2], [1, 1], [1, 2]))
    again = {"new": [("b", plain)], "finished": ["b"]}
    assert not reports(batch(["a", "b"], [3, 0], [1, 1], [1, 1]), **again)


def test_a_warm_up_hands_nothing_on(last_stage, runner):
    """Nor to the iteration before."""
    hidden = torch.arange(2.0).unsqueeze(1)
    prompt = batch(["a"], [0], [2], [2])
    launched, _ = sample(last_stage, runner, hidden, prompt, ["a"])
    launched.logits = None
    drawn, sampled, rejected = runner.sample(hidden, prompt, None)
    assert launched.logits is None
    assert drawn.sampled_token_ids.shape == (1, 1)
    assert sampled.tolist() == rejected.tolist() == [0]


def test_the_stand_in_sampler_keeps_nothing():
    sampler = StandInSampler(vocab_size=5, max_num_reqs=4)
    sampler.add_request(0, None)
    sampler.apply_staged_writes()
    assert sampler.penalties_state.output_bin_counts is None
    assert sampler(torch.zeros(2, 5), None) is None


def test_hidden_states_are_asked_for_when_they_are_needed():
    from vllm.v1.worker.gpu_worker import AsyncIntermediateTensors

    group = PipelineStandIn(StagePlace(stage=1, stages=3, tp_rank=0, tp_size=1))
    came, waited = [], []
    group.receive = lambda: came.append(1) or {"hidden_states": torch.ones(2)}
    tensors, handles, fill = group.irecv_tensor_dict(all_gather_group=None)
    lazy = AsyncIntermediateTensors(tensors, comm_handles=handles, comm_postprocess=fill)
    assert not came
    assert lazy.tensors["hidden_states"].tolist() == [1.0, 1.0]
    assert lazy["hidden_states"].sum() == 2
    assert came == [1]
    group.send = lambda tensors: lambda: waited.append(sorted(tensors))
    # As vLLM's worker does at the top of its next step.
    for handle in group.isend_tensor_dict({"residual": None}, all_gather_group=None)[1:]:
        handle.wait()
    assert waited == [["residual"]]
