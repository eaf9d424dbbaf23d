"""Drafts of a head on the last stage: what is kept of an iteration until its tokens are drawn.

A head reads the target's hidden state at each position together with the token that follows it. Of a
prompt that token is known, so the head runs over prompts at once, behind the target (:meth:`Drafter.keep`).
Where a token is drawn, the rows that could be its last (one a request, and one a draft) wait for the
samplers: their hidden states, positions and block tables are copied, since the next iteration writes
the buffers that they lie in. They are as many as the rows of logits, however long prompts are. Then
the engine says what was drawn (:class:`sipipe.messages.drafts.DraftRequest`), and the head proposes.

Who runs here: the device thread.
Invariant: a request for drafts is run before any iteration that was published after it was sent. So the
    blocks that its rows write to are still those of its requests.
Relies on: the ranks of a stage run requests and iterations in the same order (:class:`.DoubleBuffer`),
    for there are collectives in the head; for the same reason they compare whether a pass has failed
    (:mod:`.agreement`).
Rejected: keeping whole iterations, which for prompts are hidden states of thousands of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.v1.worker.gpu.spec_decode.utils import get_drafter_hidden_states

from sipipe.best_effort import BestEffort
from sipipe.messages.drafts import LEFT_OUT, Drafted, DraftRequest
from sipipe.messages.step import int32_bytes, int32_view
from sipipe.worker.agreement import run_alike
from sipipe.worker.device import Device
from sipipe.worker.hooks.head import Head, HeadBatch
from sipipe.worker.inputs.buffers import InputBuffers
from sipipe.worker.inputs.model_input import ModelInput

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

NOTHING_KEPT = LookupError("nothing is kept of the iteration")
"""Outcome of a request for drafts that a rank cannot run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One pass of the target, in the buffers that it was prepared in."""

    source: InputBuffers
    input_ids: torch.Tensor
    """[T] int32."""
    positions: torch.Tensor
    """[T] int64."""
    hidden: torch.Tensor
    """[T, H], as the target's norm leaves them."""
    taps: list[torch.Tensor] | None
    """[T, H] of each layer that an EAGLE-3 head reads."""
    tables: Sequence[torch.Tensor]
    """[B, W] int32 block table of each KV cache group."""
    slots: torch.Tensor
    """[G, T] int64."""
    block_sizes: Sequence[int]
    """Tokens of a block of each group."""
    beyond: int
    """Positions behind the pass that the head writes."""

    def part(self, rows: Int64, ends: Int32, lengths: Int32) -> Part:
        """Copy some tokens of some requests.

        Args:
            rows: [B'] rows of the batch, those with fewer tokens first.
            ends: [B] where in the pass the tokens of each request end.
            lengths: [B] tokens of each request before that place.
        """
        device = self.positions.device
        counts = lengths[rows].astype(np.int32)
        starts = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(counts, out=starts[1:])
        total = int(starts[-1])
        offsets = np.repeat(ends[rows] - counts - starts[:-1], counts)
        places = torch.from_numpy((offsets + np.arange(total)).astype(np.int64)).to(device)
        sequences = (self.source.positions.np[ends[rows] - 1] + 1).astype(np.int32)
        upper = torch.from_numpy(sequences)
        index = torch.from_numpy(rows).to(device)
        last = int(sequences.max()) + self.beyond
        tables = [
            table[index, : min(table.shape[1], -(-last // size))]
            for table, size in zip(self.tables, self.block_sizes, strict=True)
        ]
        batch = HeadBatch(
            num_reqs=len(rows),
            num_tokens=total,
            num_tokens_after_padding=total,
            num_scheduled_tokens=counts,
            query_start_loc_np=starts,
            query_start_loc=torch.from_numpy(starts).to(device),
            seq_lens=upper.to(device),
            seq_lens_cpu_upper_bound=upper,
            idx_mapping=torch.arange(len(rows), device=device),
            input_ids=self.input_ids[places],
            positions=self.positions[places],
            tables=tables,
            slots=self.slots[:, places],
        )
        taps = None if self.taps is None else [tap[places] for tap in self.taps]
        return Part(batch=batch, hidden=self.hidden[places], taps=taps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Some tokens of a pass, in memory of their own."""

    batch: HeadBatch
    hidden: torch.Tensor
    """[T', H]."""
    taps: list[torch.Tensor] | None
    """[T', H] each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The rows of one iteration that wait for their tokens."""

    part: Part
    places: Int64
    """[B] place of each row of the batch among the requests that get a token, as they are scheduled."""
    drafts: Int32
    """[B] drafts that are verified of each, by row of the batch."""


class Drafter:
    """The last stage's head, and what is kept of iterations in flight."""

    def __init__(
        self,
        head: Head,
        runner: Any,
        buffers: Sequence[InputBuffers],
        *,
        stage_device: Device,
        slots: int,
        answer: Callable[[Drafted], None],
        compare: Callable[[Exception | None], None] = lambda _: None,
    ) -> None:
        """Make it with nothing kept.

        Args:
            head: of the runner's stage.
            runner: vLLM's, whose inputs SiPipe prepares.
            buffers: sets that iterations are prepared in.
            stage_device: measures what the head takes.
            slots: microbatches in flight.
            answer: sends drafts to the engine; of other ranks than the first it does nothing.
            compare: takes what a pass of the head has raised on this rank, or None, and raises where
                the other ranks' passes ended in another way.
        """
        self._head = head
        self._runner = runner
        self._buffers = buffers
        self._slots = slots
        self._answer = answer
        self._kept: dict[int, Kept] = {}
        self._device = runner.device
        self._stage_device = stage_device
        self._compare = compare
        self._keeping = BestEffort("keeping what a draft head reads", bounded=False)
        self._proposing = BestEffort("drafts of a head", bounded=False)
        self.done = 0
        """Number of the last request for drafts that was run."""

    def keep(self, inputs: ModelInput) -> None:
        """The runner has launched the pass of ``inputs``, and has not sampled."""
        # An iteration begins when the one of its slot's last turn has left: these were asked for, or
        # none of their requests is there any more.
        for number in [number for number in self._kept if number <= inputs.iteration - self._slots]:
            del self._kept[number]
        state = self._runner.execute_model_state
        if state is None:
            return
        samples, waiting = self._tokens_of(inputs)
        if waiting.sum() < inputs.num_tokens:
            run_alike(
                self._compare, self._keeping, None, self._keep, inputs, state, samples, waiting
            )
        elif inputs.output.num_spec_tokens_to_schedule:
            # The head does not run, so there is nothing to compare.
            self._keeping(None, self._keep, inputs, state, samples, waiting)

    def _tokens_of(self, inputs: ModelInput) -> tuple[NDArray[np.bool_], Int32]:
        """Requests of an iteration that get a token, [B], and how many tokens of each wait for it, [B]."""
        source = self._buffers[inputs.buffer_set]
        count = inputs.num_reqs
        scheduled = source.num_scheduled_tokens.np[:count]
        computed = source.num_computed_tokens.np[:count]
        samples = computed + scheduled >= source.prefill_lens.np[:count]
        waiting = np.where(samples, 1 + source.num_drafts.np[:count], 0).astype(np.int32)
        return samples, waiting

    def _keep(
        self, inputs: ModelInput, state: Any, samples: NDArray[np.bool_], waiting: Int32
    ) -> None:
        source = self._buffers[inputs.buffer_set]
        count = inputs.num_reqs
        batch = state.input_batch
        tables, slots = self._runner.prepare_attn(batch)
        forward = Pass(
            source=source,
            input_ids=batch.input_ids,
            positions=batch.positions,
            hidden=get_drafter_hidden_states(self._runner.model, state.hidden_states),
            taps=state.aux_hidden_states,
            tables=tables,
            slots=slots,
            block_sizes=self._runner.block_tables.block_sizes,
            beyond=self._head.steps,
        )
        ends = source.starts.np[1 : count + 1]
        scheduled = source.num_scheduled_tokens.np[:count]
        drafts = source.num_drafts.np[:count]
        if (scheduled > waiting).any():
            self._read(forward, inputs, samples, ends - waiting, scheduled - waiting)
        if samples.any() and inputs.output.num_spec_tokens_to_schedule:  # else nobody will ask
            rows = np.flatnonzero(samples)
            rows = rows[np.argsort(waiting[rows], kind="stable")]
            self._kept[inputs.iteration] = Kept(
                part=forward.part(rows, ends, waiting),
                places=_places(inputs, source.first_logits.np[rows]),
                drafts=drafts[rows].copy(),
            )

    def _read(
        self,
        forward: Pass,
        inputs: ModelInput,
        samples: NDArray[np.bool_],
        ends: Int32,
        lengths: Int32,
    ) -> None:
        """Run the head over tokens whose next ones are known; nothing is proposed."""
        rows = np.flatnonzero(lengths)
        rows = rows[np.argsort(lengths[rows], kind="stable")]
        part = forward.part(rows, ends, lengths)
        # Amid a prompt the next token is the prompt's. Where the prompt ends in this iteration, it is
        # the one in the pass that waits for the samplers.
        assert inputs.following is not None, "the last stage prepares them with prompts"
        waits = torch.from_numpy(ends[rows].astype(np.int64)).to(self._device)
        last_ids = forward.input_ids[waits.clamp(max=len(forward.input_ids) - 1)].long()
        of_prompt = torch.from_numpy(inputs.following[rows]).to(self._device)
        none = torch.zeros(len(rows), dtype=torch.int32, device=self._device)
        self._head.run(
            part.batch,
            part.hidden,
            part.taps,
            drawn=none,
            rejected=none,
            following=torch.where(
                torch.from_numpy(samples[rows]).to(self._device), last_ids, of_prompt
            ),
            steps=0,
        )

    def propose(self, request: DraftRequest) -> None:
        """Run a request for drafts and answer it, with none where something fails."""
        self.done = request.number
        # By the device's own marks: this thread also waits for iterations that were launched before.
        began = self._stage_device.mark()
        pending = self._kept.pop(request.iteration, None)
        drafts = b""
        if pending is not None:
            drafts = run_alike(self._compare, self._proposing, b"", self._propose, request, pending)
        else:
            self._compare(NOTHING_KEPT)
        ended = self._stage_device.mark()
        seconds = 0.0
        if drafts:
            self._stage_device.wait(ended)  # wait: none: the drafts have come from the device
            seconds = self._stage_device.nanoseconds(began, ended) * 1e-9
        self._answer(
            Drafted(
                iteration=request.iteration,
                steps=request.steps,
                drafts=drafts,
                seconds=seconds,
            )
        )

    def _propose(self, request: DraftRequest, pending: Kept) -> bytes:
        device = self._device
        batch = pending.part.batch
        drawn = int32_view(request.drawn)[pending.places]
        following = int32_view(request.last)[pending.places].astype(np.int64)
        rejected = np.where(drawn > 0, pending.drafts + 1 - drawn, 0).astype(np.int32)
        if (drawn == LEFT_OUT).any():
            _write_nowhere(batch, np.flatnonzero(drawn == LEFT_OUT))
        proposals = self._head.run(
            batch,
            pending.part.hidden,
            pending.part.taps,
            drawn=torch.from_numpy(drawn).to(device),
            rejected=torch.from_numpy(rejected).to(device),
            following=torch.from_numpy(following).to(device),
            steps=request.steps,
        )
        ordered = np.empty((len(drawn), request.steps), np.int32)
        ordered[pending.places] = proposals.cpu().numpy()
        return int32_bytes(ordered)


def _places(inputs: ModelInput, first_logits: Int32) -> Int64:
    """Place of each row among the requests that get a token, as they are scheduled, [B].

    Args:
        first_logits: [B] the first of each row's places among the batch's rows of logits.
    """
    assert inputs.logits_rows is not None, "SiPipe prepares the inputs"
    order = np.zeros(inputs.num_logits, np.int64)
    order[inputs.logits_rows] = np.arange(len(inputs.logits_rows))
    places: Int64 = order[first_logits].argsort().argsort()
    return places


def _write_nowhere(batch: HeadBatch, rows: Int64) -> None:
    """Have the head write what it keeps of ``rows`` into block 0, which is nobody's: their own blocks
    may be another request's by now."""
    for row in rows.tolist():
        for table in batch.tables:
            table[row] = 0
        start, stop = batch.query_start_loc_np[row : row + 2]
        batch.slots[:, start:stop] = 0
