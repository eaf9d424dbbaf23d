"""Drafts that vLLM's sampler verifies on the last stage's device."""

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm", reason="the module belongs to sipipe.worker")

from vllm.v1.worker.gpu.sample.output import SamplerOutput

from sipipe.worker.hooks import drafting_batch as module
from sipipe.worker.hooks.drafting_batch import (
    CopiedDrafts,
    DraftCopies,
    DraftingBatch,
    StrictVerifier,
    leading,
)

MOST = 3
tokens = st.integers(0, 2)
requests = st.lists(
    st.lists(tokens, max_size=MOST).flatmap(
        lambda drafts: st.tuples(
            st.just(drafts),
            st.lists(tokens, min_size=len(drafts) + 1, max_size=len(drafts) + 1),
        )
    ),
    min_size=1,
    max_size=5,
)


def batch_of(asked):
    """Rows of logits of requests, of which each has drafts, and what is drawn at its rows."""
    sizes = [len(drawn) for _, drawn in asked]
    return (
        torch.tensor([token for _, drawn in asked for token in drawn]),
        torch.tensor([token for drafts, _ in asked for token in (9, *drafts)]),
        torch.tensor([0, *np.cumsum(sizes)], dtype=torch.int32),
    )


@given(requests)
def test_a_request_gets_tokens_up_to_the_first_that_is_not_its_draft(asked):
    drawn, drafts, starts = batch_of(asked)
    found, counts = leading(drawn, drafts, starts, MOST)
    assert found.shape == (len(asked), 1 + MOST)
    assert counts.dtype == torch.int32
    for (proposed, drawn_of), row, count in zip(
        asked, found.tolist(), counts.tolist(), strict=True
    ):
        expected = []
        for place, token in enumerate(drawn_of):
            expected.append(token)
            if place == len(proposed) or token != proposed[place]:
                break
        assert row[:count] == expected


@pytest.fixture
def verifier(monkeypatch):
    """A verifier of what a sampler has drawn, a token each row; no request is amid its prompt."""

    def sampled_and_rejected(counts, _lengths, starts, *_):
        return counts, starts[1:] - starts[:-1] - counts

    monkeypatch.setattr(module, "get_num_sampled_and_rejected", sampled_and_rejected)

    def make(drawn):
        output = SamplerOutput(drawn.view(-1, 1), "logprobs", None, None, None)
        sampler = SimpleNamespace(
            req_states=SimpleNamespace(prefill_len=SimpleNamespace(gpu=None)),
            __call__=None,
        )

        class Sampler(SimpleNamespace):
            def __call__(self, logits, batch):
                return output

        return StrictVerifier(Sampler(**vars(sampler)), most=MOST)

    return make


@pytest.mark.parametrize(("invalid", "counts"), [(None, [3, 1]), ([0, 0, 1, 0, 0], [2, 1])])
def test_a_draft_that_a_grammar_does_not_allow_is_wrong(verifier, invalid, counts):
    drawn, drafts, starts = batch_of([([1, 2], [1, 2, 0]), ([5], [6, 7])])
    batch = SimpleNamespace(
        input_ids=torch.cat((torch.tensor([8, 8]), drafts)).int(),
        logits_indices=torch.arange(2, 7),
        cu_num_logits=starts,
        seq_lens=None,
        idx_mapping=None,
    )
    wrong = None if invalid is None else torch.tensor(invalid).bool()
    output = verifier(drawn)(None, batch, None, wrong)
    assert output.num_sampled.tolist() == counts
    assert output.num_rejected.tolist() == [3 - counts[0], 1]
    assert output.logprobs_tensors == "logprobs", "of each row, as vLLM's sampler has them"


class Speculator:
    num_speculative_steps = MOST

    def __init__(self, error=None):
        self.error = error

    def propose(self, batch, *, num_speculative_tokens):
        if self.error is not None:
            raise self.error
        return torch.ones(batch.num_reqs, num_speculative_tokens, dtype=torch.int64)


def runner(*, sees=False):
    states = SimpleNamespace(
        req_id_to_index={"a": 2, "b": 0, "c": 1}, draft_tokens=torch.full((4, MOST), 7)
    )
    return SimpleNamespace(
        device=torch.device("cpu"),
        model_config=SimpleNamespace(is_multimodal_model=sees),
        req_states=states,
        sampler=None,
        speculator=None,
        structured_outputs_worker=SimpleNamespace(mask_stride=1 + MOST),
    )


def test_the_runner_verifies_what_the_engine_has_scheduled(monkeypatch):
    """Fewer than were proposed, or others, which a grammar forces."""
    monkeypatch.setattr(module, "DraftCopies", lambda _: SimpleNamespace(take=lambda: "drafts"))
    made = runner()
    drawing = DraftingBatch(made, Speculator(), reports=True, stall_timeout=1.0)
    assert isinstance(made.speculator, Speculator)
    assert (made.num_speculative_steps, made.decode_query_len) == (MOST, 1 + MOST)
    scheduled = {"a": [1, 2], "c": [3, 4, 5]}
    output = SimpleNamespace(
        scheduled_spec_decode_tokens=scheduled, has_structured_output_requests=False
    )
    inputs = SimpleNamespace(output=output)
    launched = SimpleNamespace(inputs=inputs, drafts=None)
    drawing.begin(launched)
    assert made.req_states.draft_tokens[[2, 1]].tolist() == [[1, 2, 0], [3, 4, 5]]
    assert made.req_states.draft_tokens[0].tolist() == [7] * MOST, "has none this time"
    worker = SimpleNamespace(sample_tokens=lambda _: "output")
    assert drawing.finish(worker, inputs, None) == "output"
    assert launched.drafts == "drafts"


@pytest.mark.parametrize("error", [None, RuntimeError("out of memory")])
def test_a_head_that_fails_proposes_nothing_and_ends_nothing(monkeypatch, error):
    """All ranks hear how its pass has ended: in the next one are collectives."""
    monkeypatch.setattr(module, "DraftCopies", lambda _: None)
    compared = []
    made = runner()
    DraftingBatch(made, Speculator(error), reports=True, stall_timeout=1.0, compare=compared.append)
    drafts = made.speculator.propose(SimpleNamespace(num_reqs=2), num_speculative_tokens=MOST)
    assert compared == [error]
    copied = SimpleNamespace(synchronize=lambda: None)
    found = CopiedDrafts(["a", "b"], drafts.numpy(), copied).read()
    assert found == {"a": [] if error else [1] * MOST, "b": [] if error else [1] * MOST}


@dataclass
class Batch:
    num_reqs: int
    input_ids: torch.Tensor


class SeeingSpeculator:
    """Answers with the tokens that it reads."""

    num_speculative_steps = MOST
    vocab_size = 10

    def propose(self, input_batch, next_prefill_tokens, *, num_speculative_tokens):
        return torch.cat((input_batch.input_ids, next_prefill_tokens[0]))


def test_what_stands_for_an_image_is_read_as_a_token_of_the_vocabulary(monkeypatch):
    """A row of the head's embedding that is not there would end the engine on a GPU."""
    monkeypatch.setattr(module, "DraftCopies", lambda _: None)
    made = runner(sees=True)
    DraftingBatch(made, SeeingSpeculator(), reports=True, stall_timeout=1.0)
    batch = Batch(2, torch.tensor([3, 10, 9, 5_000]))
    following = torch.tensor([[10, 1, -1]])
    read = made.speculator.propose(batch, following, num_speculative_tokens=MOST)
    assert read.tolist() == [3, 9, 9, 9, 9, 1, 0]
    assert batch.input_ids.tolist() == [3, 10, 9, 5_000], "the target's own"


def test_a_runner_is_held_back_until_it_is_known_who_draws():
    made = runner()
    module.let_speculate(made, Speculator())
    module.hold_back(made)
    assert made.speculator is None
    assert (made.num_speculative_steps, made.decode_query_len) == (0, 1)
    assert made.structured_outputs_worker.mask_stride == 1, "vLLM 0.33 warms up with a bitmask"
    module.let_speculate(made, Speculator())
    assert made.structured_outputs_worker.mask_stride == 1 + MOST


def test_drafts_of_several_iterations_are_on_their_way_at_once(monkeypatch):
    """vLLM's handler keeps those of one."""
    made = []

    class Event:
        def __init__(self, **_):
            made.append(self)
            self.waited = False

        def record(self):
            pass

        def synchronize(self):
            self.waited = True

    class Stream:
        def __init__(self, *_):
            pass

        def wait_stream(self, _):
            pass

        def __enter__(self):
            pass

        def __exit__(self, *_):
            pass

    cuda = SimpleNamespace(
        Event=Event, Stream=Stream, stream=lambda it: it, current_stream=lambda _: None
    )
    monkeypatch.setattr(module.torch, "cuda", cuda)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    copies = DraftCopies(torch.device("cpu"))
    assert copies.take() is None
    copies.set_draft_tokens(SimpleNamespace(req_ids=["a", "b"]), torch.tensor([[1, 2], [3, 4]]))
    first = copies.take()
    assert copies.take() is None, "once"
    copies.set_draft_tokens(SimpleNamespace(req_ids=["a"]), torch.zeros(1, 0, dtype=torch.int64))
    second = copies.take()
    assert first.read() == {"a": [1, 2], "b": [3, 4]}
    assert first.copied.waited
    assert not second.copied.waited
    assert second.read() == {"a": []}
