"""Stands for vLLM's second runner on the emulated device: its order of work, its kinds of buffers.

The model is integer arithmetic in float32, so that one wrong byte shows.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch
from vllm.sequence import IntermediateTensors
from vllm.utils import torch_utils
from vllm.v1.outputs import LogprobsTensors, ModelRunnerOutput
from vllm.v1.worker.gpu.async_utils import AsyncOutput
from vllm.v1.worker.gpu.buffer_utils import UvaBufferPool

from sipipe.worker.token_feedback import TokenFeedback

from .emulated_cuda import Machine, poison

INFLIGHT = 3
ROWS = 3  # requests of a slot
MAX_TOKENS = 32
VOCAB, HIDDEN = 11, 4
HEAD = torch.arange(float(HIDDEN * VOCAB)).reshape(HIDDEN, VOCAB) % 7


def first_layers(tokens, positions, rows):
    hidden = torch.stack([tokens, positions, rows, tokens + 2 * positions], 1).float()
    residual = torch.stack([rows + 1, tokens, 0 * rows, positions], 1).float()
    return hidden, residual


def last_layers(hidden, residual, positions, rows):
    return 2 * hidden + residual + (positions + 5 * rows).unsqueeze(1)


def gumbel_sample(logits, rows, temperatures, seeds, positions, **_):
    """In place of vLLM's kernel: every number that it is given counts."""
    return (logits.sum(1) + 10 * temperatures[rows] + seeds[rows] + 100 * positions).long()


def expected_hidden(tokens, positions, row):
    tokens, positions = torch.tensor(tokens), torch.tensor(positions)
    rows = torch.full_like(tokens, row)
    return last_layers(*first_layers(tokens, positions, rows), positions, rows)


class Model(torch.nn.Module):
    def __init__(self, device):
        super().__init__()
        self.head = HEAD.to(device)

    def compute_logits(self, hidden):
        return hidden @ self.head


class Runner:
    """In place of vLLM's second runner: its order of work, and its kinds of buffers.

    ``graphs``: the model's inputs and outputs lie in buffers that the next replay overwrites, as
    with CUDA graphs; else outputs are new tensors, as without.
    """

    def __init__(self, place, states, asked, *, graphs):
        self.device = device = torch.device("cuda", place.stage)
        self.machine = Machine.current
        self.index = place.stage
        self.graphs = graphs
        self.is_first_pp_rank, self.is_last_pp_rank = place.is_first, place.is_last
        self.max_num_reqs = self.rows = INFLIGHT * ROWS
        self.max_num_tokens = MAX_TOKENS
        self.req_states = states
        self.pp_handler = TokenFeedback(self.rows, 0, device=device)
        self.model = Model(device)
        self.model_config = SimpleNamespace(
            get_vocab_size=lambda: VOCAB, seed=0, use_fp64_gumbel=False
        )
        self.lora_config = None
        self.is_pooling_model = False
        self.prompt_logprobs_worker = SimpleNamespace(uses_prompt_logprobs=asked)
        shape = (MAX_TOKENS, HIDDEN)
        names = ("hidden_states", "residual")
        kept = {name: torch.zeros(shape, device=device) for name in names}
        self.intermediate_tensors = IntermediateTensors(kept)
        self.inputs = torch.zeros(3, MAX_TOKENS, dtype=torch.int64, device=device)
        self.outputs = {name: torch.empty(shape, device=device) for name in names}
        self.last_sampled = torch.zeros(self.rows, dtype=torch.int64, device=device)
        self.staging = UvaBufferPool((MAX_TOKENS, 3), torch.int64, INFLIGHT)
        self.main_stream = torch.cuda.current_stream(device)
        self.output_copy_stream = torch.cuda.Stream(device)
        self.batch = None

    def execute_model(self, output, intermediate):
        found = self.pp_handler.get_prev_sampled_outputs(None)
        if found is not None:
            self.last_sampled[found["idx_mapping"]] = found["sampled_tokens"].squeeze(1)
        if self.is_last_pp_rank:
            for req_id, params in output.params.items():
                self.sampler.add_request(self.req_states.req_id_to_index[req_id], params)
            self.sampler.apply_staged_writes()
        batch = self.batch = self.sorted_batch(output)
        n = batch.num_tokens
        staged = self.staging.copy_to_uva(batch.table).memory
        inputs, last_sampled = self.inputs.memory, self.last_sampled.memory

        def prepare():
            tokens, positions, rows = staged.T
            inputs[:, :n] = torch.stack(
                [torch.where(tokens < 0, last_sampled[rows], tokens), positions, rows]
            )

        self.machine.launch(prepare, self.index)
        kept = self.intermediate_tensors.tensors
        if intermediate is not None:
            for name, tensor in kept.items():
                tensor[:n].copy_(intermediate.tensors[name][:n])
        outputs = self.outputs
        if not self.graphs:
            outputs = {name: torch.empty((n, HIDDEN), device=self.device) for name in kept}
        memories = [tensor.memory for tensor in outputs.values()]
        received = [tensor.memory for tensor in kept.values()]

        def replay():
            for memory in memories:
                poison(memory)
            tokens, positions, rows = inputs[:, :n]
            if intermediate is None:
                results = first_layers(tokens, positions, rows)
            else:
                results = [last_layers(*(r[:n] for r in received), positions, rows)]
            for memory, result in zip(memories, results, strict=False):
                memory[:n] = result

        self.machine.launch(replay, self.index)
        self.hidden = outputs["hidden_states"][:n]
        if self.is_last_pp_rank:
            return None
        return IntermediateTensors({name: tensor[:n] for name, tensor in outputs.items()})

    @torch.inference_mode()
    def sample_tokens(self, grammar_output):
        if not self.is_last_pp_rank:
            return None
        hidden, batch, self.hidden = self.hidden, self.batch, None
        drawn, sampled, _ = self.sample(hidden, batch, grammar_output)
        scores = {}
        for place, row in enumerate(batch.idx_mapping_np):
            chosen = slice(batch.ends[place] - batch.num_scheduled_tokens[place], batch.ends[place])
            asked = self.prompt_logprobs_worker.uses_prompt_logprobs[row]
            if asked and batch.is_prefilling_np[place]:
                new = hidden[chosen] + 1
                scores[batch.req_ids[place]] = LogprobsTensors(new, new, new)
        result = ModelRunnerOutput(
            req_ids=batch.req_ids,
            req_id_to_index={},
            sampled_token_ids=None,
            prompt_logprobs_dict=scores,
        )
        return AsyncOutput(
            result, drawn, sampled, self.main_stream, self.output_copy_stream, False, None
        )

    def sorted_batch(self, output):
        """As vLLM's: decoding requests first."""
        scheduled = output.num_scheduled_tokens
        ids = sorted(scheduled, key=lambda req_id: (scheduled[req_id], req_id))
        states, computed = self.req_states, output.computed
        rows = np.array([states.req_id_to_index[req_id] for req_id in ids])
        counts = np.array([scheduled[req_id] for req_id in ids])
        starts = np.array([computed[req_id] for req_id in ids])
        table = [
            (token, start + offset, row)
            for req_id, start, row in zip(ids, starts, rows, strict=True)
            for offset, token in enumerate(output.prompt_tokens.get(req_id) or [-1])
        ]
        ends = np.cumsum(counts)
        return SimpleNamespace(
            req_ids=ids,
            num_reqs=len(ids),
            num_tokens=len(table),
            table=np.array(table),
            ends=ends,
            num_computed_tokens_np=starts,
            num_scheduled_tokens=counts,
            prefill_len_np=states.prefill_len.np[rows],
            logits_indices=torch_utils.async_tensor_h2d(ends - 1, device=self.device),
            idx_mapping_np=rows,
            idx_mapping=torch_utils.async_tensor_h2d(rows, device=self.device),
            positions=self.inputs[1],
            is_prefilling_np=starts < states.prefill_len.np[rows],
        )
