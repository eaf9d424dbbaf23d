"""A model of two stages that is arithmetic, for engines that live for a second or two.

vLLM's engine core and scheduler, SiPipe's executor, processes, channels, threads and samplers are
the real ones; what is replaced is vLLM's worker and, on SiPipe's path, the stage runner in it. A
row of hidden states is the token and its position, and a row of logits follows from them, so that
a token depends on the tokens before it and on nothing else: not on the batch, not on the time.
"""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import torch
from vllm.distributed import get_pp_group
from vllm.sequence import IntermediateTensors
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

from sipipe.messages.measured import Measured
from sipipe.tools.emulation.worker import EmulatedSharing, EmulatedWorker
from sipipe.worker.inputs.model_input import ModelInput

VOCAB = 500
ROWS = 499
HIDDEN = 128
KEY = "hidden_states"


@dataclasses.dataclass(slots=True, kw_only=True)
class Inputs(ModelInput):
    table: torch.Tensor
    """[num_tokens, 2]: tokens and positions."""
    last: torch.Tensor
    """Rows of the requests that sample."""


def logits_table():
    """[ROWS, VOCAB]: the rows of logits that there are."""
    table = np.random.default_rng(0).normal(0, 3, (ROWS, VOCAB)).astype(np.float32)
    return torch.from_numpy(table)


def look_up(table, hidden):
    return table[(hidden[:, 0].long() * 31 + hidden[:, 1].long() * 17) % ROWS]


class Arithmetic:
    """In place of :class:`sipipe.worker.runner.StageRunner`, and of its head."""

    bounds = ()

    def __init__(self, vllm_runner, *, slots=1, sets=2, check_token_safety=False):
        self._worker = vllm_runner.worker
        self.head = self if vllm_runner.is_last_pp_rank else None
        self._known = {}  # of each request: tokens that this stage has computed
        self._logits = logits_table()

    def prepare(self, output, slot=0, buffer_set=0, iteration=0):
        for req_id in output.finished_req_ids:
            self._known.pop(req_id, None)
        tokens = {
            new.req_id: new.prompt_token_ids[new.num_computed_tokens :]
            for new in output.scheduled_new_reqs
        }
        cached = output.scheduled_cached_reqs
        tokens |= dict(zip(cached.req_ids, cached.new_token_ids, strict=True))
        table, last, sampled = [], [], []
        for place, (req_id, found) in enumerate(self._worker._follow(output).items()):
            start, count, samples = found
            assert self._known.get(req_id, 0) >= start, f"{req_id} goes on at {start}"
            self._known[req_id] = start + count
            here = tokens[req_id][:count]
            assert len(here) == count, (req_id, found, tokens[req_id])
            table += [(token, start + offset) for offset, token in enumerate(here)]
            if samples:
                last.append(len(table) - 1)
                sampled.append(place)
        return Inputs(
            iteration=iteration,
            slot=slot,
            buffer_set=buffer_set,
            num_reqs=len(output.num_scheduled_tokens),
            num_tokens=len(table),
            sampled=np.array(sampled, np.int64),
            table=torch.tensor(table, dtype=torch.float32).reshape(-1, 2),
            last=torch.tensor(last, dtype=torch.int64),
        )

    def forward(self, inputs, received=None, between=None):
        hidden = inputs.table.repeat(1, HIDDEN // 2)
        if between is not None:
            between(0.5)
        if received is not None:
            assert torch.equal(received[KEY], hidden), f"iteration {inputs.iteration}"
        return hidden if self.head is not None else {KEY: hidden}

    def rows(self, inputs, hidden):
        return hidden[inputs.last]

    def compute(self, hidden, into=None):
        return look_up(self._logits, hidden)

    settle = compute


class Shard:
    """In place of :class:`sipipe.worker.head.HeadShard`: a stage's columns, in three pieces."""

    fixed, per_row = 1e-4, 1e-6

    def __init__(self, start, stop):
        self._logits = logits_table()[:, start:stop]
        edges = [(stop - start) * third // 3 for third in range(4)]
        self.pieces = [slice(*edge) for edge in pairwise(edges)]

    def compute(self, hidden, piece, into=None):
        return look_up(self._logits[:, self.pieces[piece]], hidden)

    def joins(self, rows):
        return rows < 8


class StandInSharing(EmulatedSharing):
    """Half of the columns for each stage."""

    def time_parts(self, head, sequences):
        return Measured(layers=1e-3, head=1e-3)

    def _take(self, offers, start, stop):
        return Shard(start, stop)


class StandInWorker(EmulatedWorker):
    """vLLM's worker, as far as the executor knows it."""

    use_v2_model_runner = False
    sharing = StandInSharing

    def load_model(self, *_, **__):
        self._lengths = {}
        tokens = self.scheduler_config.max_num_batched_tokens
        self.model_runner = SimpleNamespace(
            worker=self,
            device=self.device,
            is_last_pp_rank=self.place.is_last,
            max_num_tokens=tokens,
            intermediate_tensors=IntermediateTensors({KEY: torch.zeros(tokens, HIDDEN)}),
        )
        self._model = Arithmetic(self.model_runner)

    def determine_available_memory(self):
        return 1 << 20

    # ---- vLLM's own path ----------------------------------------------------------------------

    def execute_model(self, output):
        if not output.total_num_scheduled_tokens:
            return EMPTY_MODEL_RUNNER_OUTPUT
        group = get_pp_group()
        self._inputs = inputs = self._model.prepare(output)
        received = None
        if not self.place.is_first:
            received = {KEY: group.receive()[KEY][: inputs.num_tokens]}
        result = self._model.forward(inputs, received)
        self._req_ids = list(output.num_scheduled_tokens)
        if self.place.is_last:
            self._drawn = self._model.compute(self._model.rows(inputs, result)).argmax(-1).tolist()
        else:
            group.send(result)()
        return None

    def sample_tokens(self, _):
        if not self.place.is_last:
            return None
        tokens = [[] for _ in self._req_ids]
        for place, token in zip(self._inputs.sampled.tolist(), self._drawn, strict=True):
            tokens[place] = [token]
        return ModelRunnerOutput(
            req_ids=self._req_ids,
            req_id_to_index={req_id: i for i, req_id in enumerate(self._req_ids)},
            sampled_token_ids=tokens,
        )


def unsupported_reason(_):
    """In place of :func:`sipipe.worker.support.unsupported_reason`: nothing is against it."""
    return
