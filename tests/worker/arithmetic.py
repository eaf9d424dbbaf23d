"""Stands for vLLM's second runner on the host: its states, its order of calls, and a model of integers.

A row of hidden states is the token, its position, and what stands in its place of the KV cache,
which follows from the token and from what the request's block table says is before it. So a drawn
token depends on all tokens before it and on nothing else: not on the batch, not on the time. A stage
that has its own token ids compares what it has received with them.
"""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import torch
from benchmarks.emulation.stand_in_runner import StandInRunner
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from sipipe.worker.device import HostDevice
from sipipe.worker.hooks.draws import feedback_of
from sipipe.worker.hooks.preparation import TokenFeedback
from sipipe.worker.projection.share import ProjectionShare

VOCAB = 500
ROWS = 499
HIDDEN = 128
KEY = "hidden_states"


def logits_table():
    """[ROWS, VOCAB]: the rows of logits that there are."""
    table = np.random.default_rng(0).normal(0, 3, (ROWS, VOCAB)).astype(np.float32)
    return torch.from_numpy(table)


def look_up(table, hidden):
    return table[(hidden[:, 2].long() * 31 + hidden[:, 1].long() * 17) % ROWS]


def follow(before, token):
    """What the cache keeps of a token, of what it keeps of the one before; -1 before the first."""
    return (31 * before + int(token) + 7) % ROWS


def continuation(prompt, count):
    """``count`` greedy tokens."""
    table, tokens, kept = logits_table(), [*prompt], -1
    for token in prompt:
        kept = follow(kept, token)
    for _ in range(count):
        row = torch.tensor([[tokens[-1], len(tokens) - 1, kept]])
        tokens.append(int(look_up(table, row).argmax()))
        kept = follow(kept, tokens[-1])
    return tokens[len(prompt) :]


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self._table = logits_table()

    def compute_logits(self, hidden):
        return look_up(self._table, hidden)


class Tables:
    """In place of vLLM's ``BlockTables``, with one KV cache group."""

    def __init__(self, requests, block_size, width):
        self.block_tables = [SimpleNamespace(gpu=torch.zeros(requests, width, dtype=torch.int32))]
        self.block_sizes = [block_size]
        self.slot_mapping_enabled = torch.tensor([True])
        self._counts = [0] * requests

    def append_block_ids(self, row, block_ids, overwrite):
        (ids,), begin = block_ids, 0 if overwrite else self._counts[row]
        self.block_tables[0].gpu[row, begin : begin + len(ids)] = torch.tensor(ids)
        self._counts[row] = begin + len(ids)

    def apply_staged_writes(self):
        pass


class Output(AsyncModelRunnerOutput):
    """What ``sample_tokens`` returns on the last stage; ``tokens``: of each request, some or none."""

    def __init__(self, batch, drawn, tokens, moved):
        self.sampled_token_ids = drawn
        index = {req_id: place for place, req_id in enumerate(batch.req_ids)}
        self.model_runner_output = ModelRunnerOutput(
            req_ids=batch.req_ids,
            req_id_to_index=index,
            sampled_token_ids=tokens,
            kv_connector_output=moved,
        )
        self.model_runner_output.prompt_token_id_logprobs_dict = {}

    def get_output(self):
        return self.model_runner_output

    def get_kv_connector_output(self):
        """vLLM 0.33 asks this where ``get_output`` fails."""
        return self.model_runner_output.kv_connector_output


class Runner(StandInRunner):
    """In place of vLLM's second runner, on one stage.

    Args:
        place: which.
        config: what vLLM's configuration says: ``model_config``, ``scheduler_config``.
        block_size: tokens.
        state: makes the model state; another class than vLLM's default prepares by itself.
    """

    sampler = SimpleNamespace(add_request=lambda *_: None)

    def __init__(self, place, config, block_size, *, state=DefaultModelState):
        requests = config.scheduler_config.max_num_seqs
        tokens = config.scheduler_config.max_num_batched_tokens
        super().__init__(
            first=place.is_first,
            last=place.is_last,
            requests=requests,
            tokens=tokens,
            model=Model(),
            model_config=config.model_config,
            received={KEY: torch.zeros(tokens, HIDDEN)},
        )
        self.model_state = state(config, self.model, None, self.device)
        self.model_state.prepare_attn = lambda _: None
        self.req_states = SimpleNamespace(
            req_id_to_index={},
            free_indices=list(range(requests)),
            prefill_len=SimpleNamespace(np=np.zeros(requests, np.int32)),
            num_computed_tokens=SimpleNamespace(gpu=torch.zeros(requests, dtype=torch.int32)),
        )
        width = -(-self.model_config.max_model_len // block_size)
        self.block_tables = Tables(requests, block_size, width)
        self.pp_handler = TokenFeedback(requests, device=self.device)
        self.cache = {}
        """What the KV cache holds, by slot."""
        self._batch = None
        self._prefills = {}
        self._last_sampled = np.zeros(requests, np.int64)

    # ---- as vLLM's, in its order ----------------------------------------------------------------

    def _dummy_run(self, *_, **__):
        """Nothing: this model has no tensors that a stage could leave unread."""

    def execute_model(self, output, receive=None):
        """``receive`` gives the hidden states, and is called when they are needed."""
        begun = self.begin(output)
        if begun is None:
            return self.kv_connector.no_forward(output)
        self._finished = output.finished_req_ids
        batch, (tables, slots) = begun
        self._batch = batch
        received = None
        if receive is not None:
            received = receive()[KEY][: batch.num_tokens]
        self.kv_connector.pre_forward(output)
        self._hidden = hidden = self.forward(batch, tables, slots, received)
        self.kv_connector.finish_forward()
        return None if self.is_last_pp_rank else {KEY: hidden}

    def sample_tokens(self, grammar_output):
        batch, self._batch = self._batch, None
        if batch is None:  # nothing was scheduled
            return None
        if not self.is_last_pp_rank:
            self.postprocess_num_computed_tokens(batch)
            moved = self.kv_connector.post_forward(self._finished)
            return ModelRunnerOutput.with_kv_conn_output_only(moved)
        found, counts, rejected = self.sample(self._hidden, batch, grammar_output)
        drawn = found.sampled_token_ids
        tokens = [row[:count] for row, count in zip(drawn.tolist(), counts.tolist(), strict=True)]
        self.postprocess_sampled(batch.idx_mapping, drawn, counts, rejected, batch.query_start_loc)
        return Output(batch, drawn, tokens, self.kv_connector.post_forward(self._finished))

    def remove_request(self, req_id):
        row = self.req_states.req_id_to_index.pop(req_id, None)
        if row is not None:
            self.req_states.free_indices.append(row)

    def add_request(self, new):
        states = self.req_states
        row = states.req_id_to_index[new.req_id] = states.free_indices.pop()
        states.prefill_len.np[row] = len(new.prefill_token_ids)
        states.num_computed_tokens.gpu[row] = new.num_computed_tokens
        self._prefills[row] = new.prefill_token_ids
        return row

    def forward(self, batch, tables, slots, received):
        """The model, and what of attention's metadata it would read."""
        (table,), (slots,), size = tables, slots, self.block_tables.block_sizes[0]
        positions = batch.positions[: batch.num_tokens].tolist()
        ids = None if batch.input_ids is None else batch.input_ids[: batch.num_tokens].tolist()
        came = None if received is None else received[:, 0].int().tolist()
        assert None in (ids, came) or came == ids, f"token ids differ: {came} came, {ids} here"
        tokens, kept = came if ids is None else ids, []
        starts = batch.query_start_loc.tolist()
        for row, (begin, end) in enumerate(pairwise(starts)):
            assert int(batch.seq_lens[row]) == positions[end - 1] + 1
            blocks = table[row].tolist()
            for place in range(begin, end):
                before = positions[place] - 1
                found = (
                    self.cache[blocks[before // size] * size + before % size] if before >= 0 else -1
                )
                kept.append(follow(found, tokens[place]))
                self.cache[int(slots[place])] = kept[-1]
        hidden = torch.zeros(batch.num_tokens, HIDDEN)
        hidden[:, :3] = torch.tensor([tokens, positions, kept]).T
        assert received is None or torch.equal(received, hidden), (
            "the stage before has it otherwise"
        )
        return hidden

    # ---- what SiPipe's preparation takes the place of --------------------------------------------

    def update_pp_decode_requests(self):
        found = self.pp_handler.get_prev_sampled_outputs(None)
        if found is not None:
            rows, tokens = found["idx_mapping"], found["sampled_tokens"]
            self._last_sampled[rows.numpy()] = tokens.squeeze(1).numpy()

    def update_requests(self, output):
        cached, computed = output.scheduled_cached_reqs, self.req_states.num_computed_tokens.gpu
        for req_id, count, ids in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            row = self.req_states.req_id_to_index[req_id]
            computed[row] = count
            if ids is not None:
                self.block_tables.append_block_ids(row, ids, overwrite=False)

    def gather_batch_req_state(self, output, dummy_run):
        scheduled = output.num_scheduled_tokens
        ids = sorted(scheduled, key=lambda req_id: (scheduled[req_id] != 1, scheduled[req_id]))
        return ids, None

    def prepare_inputs(self, output, ids, desc, num_active_loras):
        states = self.req_states
        rows = np.array([states.req_id_to_index[req_id] for req_id in ids])
        counts = np.array([output.num_scheduled_tokens[req_id] for req_id in ids])
        computed = states.num_computed_tokens.gpu.numpy()[rows]
        starts, tokens, positions = np.append(0, np.cumsum(counts)), [], []
        for row, first, count in zip(rows.tolist(), computed.tolist(), counts, strict=True):
            prefill = self._prefills[row]
            known = prefill[first : first + count]
            tokens += known or [int(self._last_sampled[row])]
            positions += range(first, first + count)
        return SimpleNamespace(
            req_ids=ids,
            num_reqs=len(ids),
            num_tokens=len(positions),
            # What was drawn comes to the first stage alone.
            input_ids=torch.tensor(tokens) if self.is_first_pp_rank else None,
            positions=torch.tensor(positions),
            query_start_loc=torch.tensor(starts),
            seq_lens=torch.tensor(computed + counts),
            logits_indices=torch.tensor(starts[1:] - 1),
            idx_mapping=torch.tensor(rows),
            idx_mapping_np=rows,
            num_scheduled_tokens=counts,
            num_computed_tokens_np=computed,
            prefill_len_np=states.prefill_len.np[rows],
            is_prefilling_np=computed < states.prefill_len.np[rows],
        )

    def prepare_attn(self, batch):
        table = self.block_tables.block_tables[0].gpu[batch.idx_mapping]
        size = self.block_tables.block_sizes[0]
        rows = np.repeat(np.arange(batch.num_reqs), batch.num_scheduled_tokens)
        blocks = table[rows, batch.positions // size]
        return (table,), (blocks * size + batch.positions % size).unsqueeze(0)

    def postprocess_num_computed_tokens(self, batch):
        pass

    def postprocess_sampled(self, *_):
        pass

    # ---- what CPU samplers take the place of -----------------------------------------------------

    def sample(self, hidden, batch, grammar_output):
        """vLLM's own sampler is greedy here."""
        logits = self.model.compute_logits(hidden[batch.logits_indices])
        samples = batch.num_computed_tokens_np + batch.num_scheduled_tokens >= batch.prefill_len_np
        counts = torch.from_numpy(samples.astype(np.int32))
        drawn = SimpleNamespace(sampled_token_ids=logits.argmax(-1, keepdim=True))
        return drawn, counts, torch.zeros_like(counts)


class Worker:
    """What vLLM's worker does with the runner: mixed in, or as it is; its wrapper as well."""

    def __init__(self, group, runner, draws=True):
        self.worker, self.reserved, self.speculator = self, 0, None
        self.start(group, runner, draws)

    def start(self, group, runner, draws):
        """``group``: the stand-in of the pipeline's; ``draws``: CPU samplers do."""
        self.group, self.model_runner = group, runner
        self.feedback = feedback_of(runner, draws=draws)
        self._wait_sent = lambda: None

    def execute_model(self, output):
        self.feedback.output = output
        self._wait_sent()
        receive = None if self.model_runner.is_first_pp_rank else self.group.receive
        result = self.model_runner.execute_model(output, receive)
        if isinstance(result, dict):
            self._wait_sent, result = self.group.send(result), None
        return result

    def sample_tokens(self, grammar_output):
        return self.model_runner.sample_tokens(grammar_output)

    def parts(self, boot):
        return HostDevice(), ProjectionShare(boot, self, HostDevice())
