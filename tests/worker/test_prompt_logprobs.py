"""Scores of prompt tokens against torch's own log-softmax; nothing is compiled for them."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sipipe.worker.prompt_logprobs import PromptLogprobs
from torch._dynamo.utils import counters
from vllm.v1.sample.sampler import Sampler

from sipipe.worker.inputs.model_input import ModelInput, PromptChunk

VOCAB = 500


def test_a_prompt_in_two_chunks_is_scored_without_compilation():
    hidden = torch.randn(9, VOCAB, generator=torch.Generator().manual_seed(3))
    runner = SimpleNamespace(
        model=SimpleNamespace(compute_logits=lambda rows: rows),
        model_config=SimpleNamespace(logprobs_mode="raw_logprobs"),
        sampler=Sampler(),
    )
    targets = np.array([7, 8, 9, 10, 11], np.int32)
    scores = PromptLogprobs(runner)
    before = counters["stats"]["unique_graphs"]
    first = chunk(targets[:3], first_row=1, start=0, done=False)
    assert scores.gather(first, hidden) == {}
    second = chunk(targets[3:], first_row=4, start=3, done=True)
    result = scores.gather(second, hidden)["a"]
    assert counters["stats"]["unique_graphs"] == before
    expected = torch.log_softmax(hidden[1:6], -1)
    for row, target in enumerate(targets):
        assert result.logprob_token_ids[row, 0] == target
        assert result.logprobs[row, 0].item() == pytest.approx(expected[row, target].item())
        better = int((expected[row] >= expected[row, target]).sum())
        assert result.selected_token_ranks[row] == better
        assert result.logprob_token_ids[row, 1:].tolist() == expected[row].topk(2).indices.tolist()


def chunk(targets, **more):
    inputs = ModelInput.__new__(ModelInput)
    inputs.prompt_chunks = [
        PromptChunk(req_id="a", targets=targets, num_logprobs=2, prompt_len=6, **more)
    ]
    return inputs
