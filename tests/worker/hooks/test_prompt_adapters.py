"""Adapters of prompts' rows, at vLLM's own computation of a prompt's scores."""

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm")

import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.v1.worker.gpu.lora_utils import LoraState
from vllm.v1.worker.gpu.sample import prompt_logprob

from sipipe.worker.hooks.prompt_adapters import score_prompts_by_adapters

VOCABULARY = 11
CHUNK = 3
"""Rows that vLLM hands over at a time, of 1,024."""


class Runner:
    """The parts of vLLM's runner that take part. ``told`` is what its LoRA layers were told last."""

    def __init__(self, adapters):
        self.prompt_logprobs_worker = prompt_logprob.PromptLogprobsWorker(
            len(adapters), torch.device("cpu")
        )
        self.lora_state = LoraState(len(adapters))
        for row, adapter in enumerate(adapters):
            lora = LoRARequest(f"a{adapter}", adapter, "nowhere") if adapter else None
            self.lora_state.add_request(f"r{row}", row, lora)
        self.told = None

    def _set_active_loras(self, of_rows, of_tokens, active):
        self.told = (of_rows, of_tokens, active)

    def logits(self, rows):
        """Logits of some rows, each of which is the number of its adapter."""
        of_rows, of_tokens, _ = self.told
        assert len(of_rows) == len(rows)
        assert [int(row[0]) for row in rows] == list(of_rows)
        assert len(of_tokens) >= len(rows)
        return torch.zeros(len(rows), VOCABULARY)


@given(
    requests=st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 9), st.booleans(), st.booleans()),
        min_size=1,
        max_size=5,
    ),
    padding=st.integers(0, 4),
)
def test_each_row_has_its_requests_adapter(requests, padding):
    """(adapter, tokens, prompt_logprobs wanted, scores of tokens wanted) of each request of a pass."""
    adapters = [adapter for adapter, *_ in requests]
    lengths = np.array([length for _, length, *_ in requests], dtype=np.int32)
    runner = Runner(adapters)
    worker = runner.prompt_logprobs_worker
    for row, (_, length, ranked, scored) in enumerate(requests):
        params = SamplingParams(prompt_logprobs=2 if ranked else None)
        if scored:
            params.prompt_logprob_token_ids = np.ones((length - 1, 2), dtype=np.int64)
        worker.add_request(f"r{row}", row, params)
    score_prompts_by_adapters(runner)
    starts = np.concatenate(([0], np.cumsum(lengths)))
    batch = SimpleNamespace(
        req_ids=[f"r{row}" for row in range(len(requests))],
        idx_mapping_np=np.arange(len(requests)),
        num_scheduled_tokens=lengths,
        num_computed_prefill_tokens_np=np.zeros(len(requests), dtype=np.int32),
        prefill_len_np=lengths,
        query_start_loc_np=starts,
        query_start_loc=None,
        idx_mapping=None,
        num_tokens=int(lengths.sum()),
    )
    of_tokens = np.repeat(adapters, lengths)
    hidden = torch.zeros(len(of_tokens) + padding, 4)
    hidden[: len(of_tokens)] = torch.tensor(of_tokens).unsqueeze(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt_logprob, "CHUNK_SIZE", CHUNK)
        patch.setattr(  # a Triton kernel
            prompt_logprob,
            "get_prompt_logprobs_token_ids",
            lambda tokens, *_: torch.zeros(tokens, dtype=torch.int64),
        )
        patch.setattr(  # another one
            prompt_logprob,
            "compute_topk_scores",
            lambda logits, count, *_, **__: SimpleNamespace(
                logprob_token_ids=torch.zeros(len(logits), count + 1),
                logprobs=torch.zeros(len(logits), count + 1),
                selected_token_ranks=torch.zeros(len(logits)),
            ),
        )
        patch.setattr(
            prompt_logprob, "compute_token_logprobs", lambda _, ids: torch.zeros(ids.shape)
        )
        ranks = worker.compute_prompt_logprobs(runner.logits, hidden, batch, None, None, lengths)
        scores = worker.compute_prompt_token_id_logprobs(runner.logits, hidden, batch, lengths)
    wanted = {f"r{row}" for row, request in enumerate(requests) if request[2] and request[1] > 1}
    assert ranks.keys() == wanted
    assert scores.keys() == {f"r{row}" for row, request in enumerate(requests) if request[3]}
    if runner.told is not None:
        assert runner.told[1] == tuple(of_tokens)
        assert {lora.lora_int_id for lora in runner.told[2]} == {*adapters} - {0}
