"""Stands for vLLM's second runner on the emulated device: its order of work, its kinds of buffers.

The model is integer arithmetic in float32, so that one wrong byte shows: whatever SiPipe's preparation
puts on the device is a term of every hidden state.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch
from benchmarks.emulation.stand_in_runner import StandInRunner, plain_model_state
from vllm.sequence import IntermediateTensors
from vllm.v1.outputs import LogprobsTensors, ModelRunnerOutput
from vllm.v1.worker.gpu.async_utils import AsyncOutput
from vllm.v1.worker.gpu.buffer_utils import UvaBufferPool
from vllm.v1.worker.gpu.input_batch import InputBuffers

from .emulated_cuda import Machine, poison

INFLIGHT = 3
ROWS = 3  # requests of a slot
MAX_TOKENS = 32
VOCAB, HIDDEN = 11, 4
BLOCK, WIDTH = 8, 12  # tokens of a block, blocks of a request
HEAD = torch.arange(float(HIDDEN * VOCAB)).reshape(HIDDEN, VOCAB) % 7


def first_layers(tokens, positions, rows, lengths, blocks):
    hidden = torch.stack([tokens, positions, rows, tokens + 2 * positions], 1).float()
    residual = torch.stack([rows + 1, tokens, lengths, blocks], 1).float()
    return hidden, residual


def last_layers(hidden, residual, positions, rows, lengths, blocks):
    return 2 * hidden + residual + (positions + 5 * rows + lengths + 3 * blocks).unsqueeze(1)


def gumbel_sample(logits, rows, temperatures, seeds, positions, **_):
    """In place of vLLM's kernel: every number that it is given counts."""
    return (logits.sum(1) + 10 * temperatures[rows] + seeds[rows] + 100 * positions).long()


def expected_hidden(tokens, first, row, blocks):
    """Of a request's ``tokens`` from position ``first`` on; ``blocks``: its block ids."""
    tokens = torch.tensor(tokens)
    positions = first + torch.arange(len(tokens))
    facts = [torch.full_like(tokens, x) for x in (row, first + len(tokens), sum(blocks))]
    hidden, residual = first_layers(tokens, positions, *facts)
    return last_layers(hidden, residual, positions, *facts)


class Model(torch.nn.Module):
    def __init__(self, device):
        super().__init__()
        self.head = HEAD.to(device)

    def compute_logits(self, hidden):
        return hidden @ self.head


class States:
    """In place of vLLM's request states: rows."""

    def __init__(self, requests, device):
        self.free_indices = list(range(requests))
        self.req_id_to_index = {}
        computed = torch.zeros(requests, dtype=torch.int32, device=device)
        self.num_computed_tokens = SimpleNamespace(gpu=computed)


class Tables:
    """In place of vLLM's block tables: changes are staged as its are, and kernels write them."""

    block_sizes = (BLOCK,)

    def __init__(self, requests, device, machine):
        self.table = torch.zeros(requests, WIDTH, dtype=torch.int32, device=device)
        self.batch = torch.zeros(requests, WIDTH, dtype=torch.int32, device=device)
        self.counts = [0] * requests
        # Two, as sets of input buffers: a set is free behind what was staged with it.
        self.pool = UvaBufferPool((requests * WIDTH, 3), torch.int32, 2)
        self.staged = []
        self.machine, self.index = machine, device.index

    def append_block_ids(self, row, ids, *, overwrite):
        start = 0 if overwrite else self.counts[row]
        self.staged += [(row, start + k, number) for k, number in enumerate(ids[0])]
        self.counts[row] = start + len(ids[0])

    def apply_staged_writes(self):
        if not self.staged:
            return
        staged, table = self.pool.copy_to_uva(np.array(self.staged)).memory, self.table.memory
        self.staged = []

        def write():
            rows, places, numbers = staged.long().T
            table[rows, places] = numbers.int()

        self.machine.launch(write, self.index)

    def gather(self, rows, requests):
        rows, source, target = rows.memory, self.table.memory, self.batch.memory

        def gather():
            target[:requests] = 0
            target[: len(rows)] = source[rows]

        self.machine.launch(gather, self.index)
        return (self.batch[:requests],)


class Runner(StandInRunner):
    """In place of vLLM's second runner: its order of work, and its kinds of buffers.

    ``graphs``: batches are padded, but for those that decode alone, and the model's inputs and outputs
    lie in buffers that the next replay overwrites, as with CUDA graphs; else outputs are new tensors,
    as without. ``wants_scores``: of each row, whether its prompt's scores are wanted.
    """

    def __init__(self, place, wants_scores, *, graphs):
        self.device = device = torch.device("cuda", place.stage)
        self.machine = Machine.current
        self.index = place.stage
        self.graphs = graphs
        requests = INFLIGHT * ROWS
        shape = (MAX_TOKENS, HIDDEN)
        names = ("hidden_states", "residual")
        super().__init__(
            first=place.is_first,
            last=place.is_last,
            requests=requests,
            tokens=MAX_TOKENS,
            model=Model(device),
            model_config=SimpleNamespace(
                get_vocab_size=lambda: VOCAB,
                seed=0,
                use_fp64_gumbel=False,
                rswa_window=None,
                enable_prompt_embeds=False,
            ),
            received={name: torch.zeros(shape, device=device) for name in names},
        )
        self.model_state = plain_model_state()
        self.req_states = States(requests, device)
        self.block_tables = Tables(requests, device, self.machine)
        self.input_buffers = InputBuffers(requests, MAX_TOKENS, device)
        self.prompt_logprobs_worker.uses_prompt_logprobs = wants_scores
        self.outputs = {name: torch.empty(shape, device=device) for name in names}
        self.main_stream = torch.cuda.current_stream(device)
        self.output_copy_stream = torch.cuda.Stream(device)

    def prepare_attn(self, batch):
        return self.block_tables.gather(batch.idx_mapping, batch.num_reqs_after_padding), None

    def remove_request(self, req_id):
        assert req_id not in self.req_states.req_id_to_index, "no request leaves here"

    def add_request(self, new):
        states = self.req_states
        row = states.req_id_to_index[new.req_id] = states.free_indices.pop()
        return row

    def apply_staged_writes(self):
        if self.is_last_pp_rank:
            self.sampler.apply_staged_writes()
        super().apply_staged_writes()

    def batch_descriptor(self, output):
        tokens = output.total_num_scheduled_tokens
        if not self.graphs:
            return SimpleNamespace(num_tokens=tokens, num_reqs=None)
        return SimpleNamespace(num_tokens=-(-tokens // ROWS) * ROWS, num_reqs=ROWS + 1)

    def attend(self, batch):
        [table], _ = self.prepare_attn(batch)
        # As some of vLLM's builders of attention metadata: copies of what the host has.
        lengths = batch.seq_lens_cpu_upper_bound.to(self.device, non_blocking=True)
        starts = torch.from_numpy(batch.query_start_loc_np).to(self.device, non_blocking=True)
        self.model_state.prepare_attn(batch)
        return table, lengths, starts

    def execute_model(self, output, intermediate):
        batch, attention = self.begin(output)
        tokens = self.batch_descriptor(output).num_tokens
        buffers = self.intermediate_tensors.tensors
        if intermediate is not None:
            for name, tensor in buffers.items():
                tensor[:tokens].copy_(intermediate.tensors[name][:tokens])
        outputs = self.outputs
        if not self.graphs:
            outputs = {name: torch.empty((tokens, HIDDEN), device=self.device) for name in buffers}
        self.machine.launch(self._replay(batch, *attention, outputs), self.index)
        hidden = outputs["hidden_states"][:tokens]
        self.execute_model_state = SimpleNamespace(input_batch=batch, hidden_states=hidden)
        if self.is_last_pp_rank:
            return None
        return IntermediateTensors({name: tensor[:tokens] for name, tensor in outputs.items()})

    def _replay(self, batch, table, lengths, starts, outputs):
        """What runs on the device: it knows addresses, and finds there what there is by then."""
        names = ("input_ids", "positions", "is_padding", "query_start_loc", "seq_lens")
        known = [getattr(batch, name).memory for name in (*names, "idx_mapping")]
        meta = [tensor.memory for tensor in (table, lengths, starts)]
        computed = self.req_states.num_computed_tokens.gpu.memory
        received = [tensor.memory for tensor in self.intermediate_tensors.tensors.values()]
        memories = [tensor.memory for tensor in outputs.values()]
        first = self.index == 0

        def replay():
            for memory in memories:
                poison(memory)
            input_ids, positions, is_padding, query_start_loc, seq_lens, rows = known
            blocks, bounds, edges = meta
            assert torch.equal(query_start_loc, edges), "starts"
            assert torch.equal(seq_lens, bounds), "lengths"
            n, count = int((~is_padding).sum()), len(rows)
            assert edges[count:].unique().tolist() == [n], "padded requests"
            assert not seq_lens[count:].any(), "padded requests"
            each = edges[1 : count + 1] - edges[:count]
            assert torch.equal(computed[rows] + each, seq_lens[:count]), "computed tokens"
            where = torch.repeat_interleave(torch.arange(count), each)
            facts = (rows[where], seq_lens[where], blocks.sum(1)[where])
            tokens, positions = input_ids[:n].long(), positions[:n]
            if first:
                results = first_layers(tokens, positions, *facts)
            else:
                results = [last_layers(*(r[:n] for r in received), positions, *facts)]
            for memory, result in zip(memories, results, strict=False):
                memory[:n] = result

        return replay

    @torch.inference_mode()
    def sample_tokens(self, grammar_output):
        state, self.execute_model_state = self.execute_model_state, None
        batch, hidden = state.input_batch, state.hidden_states
        if not self.is_last_pp_rank:
            self.postprocess_num_computed_tokens(batch)
            return None
        drawn, sampled, _ = self.sample(hidden, batch, grammar_output)
        scores, starts = {}, batch.query_start_loc_np
        for place, row in enumerate(batch.idx_mapping_np):
            asked = self.prompt_logprobs_worker.uses_prompt_logprobs[row]
            if asked and batch.is_prefilling_np[place]:
                new = hidden[starts[place] : starts[place + 1]] + 1
                scores[batch.req_ids[place]] = LogprobsTensors(new, new, new)
        result = ModelRunnerOutput(
            req_ids=batch.req_ids,
            req_id_to_index={},
            sampled_token_ids=None,
            prompt_logprobs_dict=scores,
        )
        output = AsyncOutput(
            result, drawn, sampled, self.main_stream, self.output_copy_stream, False, None
        )
        self.postprocess_sampled(batch.idx_mapping, drawn, sampled, sampled)
        return output
