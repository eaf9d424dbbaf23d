"""Preparation of inputs: from a scheduling output to one set of input buffers (paper section 4.2).

:class:`InputPreparer` applies what changed to the request states, resolves the slot's microbatch,
and writes one set of input buffers, with everything that vLLM's second runner wants to know of a
batch. Steady decoding is a handful of array writes. Requests that come, go or get new blocks cost by
their number.

Relies on: ``scheduled_cached_reqs.new_token_ids`` of the scheduling output holds, for each cached
request, the token ids of its positions from ``num_computed_tokens`` on, ``num_scheduled_tokens`` of
them. vLLM's scheduler fills it when ``pipeline_parallel_size`` is above 1 and scheduling is not
asynchronous; otherwise SiPipe's executor does. An entry may be empty while the request is in its
prefill, which is known here.

Who runs here: the preparing thread alone (or any thread, one call at a time).
"""

import struct
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from sipipe.worker.inputs import kernels
from sipipe.worker.inputs.buffers import InputBuffers
from sipipe.worker.inputs.kernels import Int32, Int64
from sipipe.worker.inputs.model_input import ModelInput
from sipipe.worker.inputs.placement import CacheGroup
from sipipe.worker.inputs.request_state import (
    RequestStates,
    SlotBatch,
    batch_order,
    scheduling_order,
)

T = TypeVar("T")


class InputPreparer:
    """Request states and slots, which are microbatches in flight, of one stage.

    Args:
        vllm_runner: vLLM's runner, which has no request yet.
        buffers: the sets of input buffers.
        groups: KV cache groups whose block tables and slot mappings are prepared.
        slots: microbatches in flight.
        following: true if somebody reads the token behind each part of a prompt.
        decode_tokens: as :func:`.batch_order` has it.
    """

    def __init__(
        self,
        vllm_runner: Any,
        buffers: list[InputBuffers],
        *,
        groups: list[CacheGroup],
        slots: int,
        following: bool = False,
        decode_tokens: int = 1,
    ) -> None:
        kernels.warm_up()
        states = vllm_runner.req_states
        assert not states.req_id_to_index, "vLLM's runner has requests that were not prepared here"
        self._groups = groups
        self._following = following
        self._decode_tokens = decode_tokens
        self.states = RequestStates(states.free_indices, [group.width for group in groups])
        self.slots = [SlotBatch() for _ in range(slots)]
        self.buffers = buffers
        self._batch_rows = np.arange(len(states.free_indices), dtype=np.int64)

    def prepare(self, inputs: ModelInput) -> None:
        """Apply the scheduling output of ``inputs``, and write its microbatch into its set, without the
        tokens if it awaits them. Raises KeyError: a cached request was never introduced, which is a
        fault of the scheduler."""
        output: SchedulerOutput = inputs.output
        tokens = output.total_num_scheduled_tokens
        new = output.scheduled_new_reqs
        if output.finished_req_ids or output.preempted_req_ids:
            removed = output.finished_req_ids.union(output.preempted_req_ids or ())
            self._touch(self.states.remove(removed))
        inputs.new_rows = self._add(new) if new else []
        inputs.num_tokens = tokens
        if not tokens:
            return
        batch = self.slots[inputs.slot]
        target = self.buffers[inputs.buffer_set]
        cached = output.scheduled_cached_reqs
        if (
            not new
            and batch.same(cached.req_ids)
            and batch.decoding
            and tokens == len(cached.req_ids)
            and list(output.num_scheduled_tokens) == cached.req_ids
        ):
            self._write_steady(inputs, batch, cached, target)
        else:
            self._write_mixed(inputs, batch, output, target)

    # -- the request states ---------------------------------------------------------------------

    def _add(self, new: Sequence[NewRequestData]) -> list[int]:
        """Add new requests; returns their rows."""
        rows = [self.states.add(r.req_id, r.prefill_token_ids or ()) for r in new]
        self._touch(rows)
        self.states.append_blocks(rows, [request.block_ids for request in new])
        return rows

    def _take_blocks(self, cached: CachedRequestData, rows: Sequence[int] | Int64) -> None:
        """Add the blocks that ``cached`` brings to the requests of ``rows``."""
        grown = [i for i, ids in enumerate(cached.new_block_ids) if ids is not None]
        if grown:
            self.states.append_blocks(
                [int(rows[i]) for i in grown],
                [cached.new_block_ids[i] for i in grown],
            )

    def _touch(self, rows: Sequence[int]) -> None:
        """Have no slot trust that the requests of ``rows`` are as they were."""
        for batch in self.slots:
            batch.touch(rows)

    # -- the two paths --------------------------------------------------------------------------

    def _write_steady(
        self, inputs: ModelInput, batch: SlotBatch, cached: CachedRequestData, target: InputBuffers
    ) -> None:
        """Write a microbatch of the same requests as last time in this slot, each decoding one token."""
        count = len(cached.req_ids)
        inputs.num_reqs = count
        self._take_blocks(cached, batch.rows)
        _fill(target.num_computed_tokens.np, count, cached.num_computed_tokens)
        target.num_scheduled_tokens.np[:count] = 1
        target.num_drafts.np[:count] = 0
        if not inputs.awaits:
            _fill(target.input_ids.np, count, chain.from_iterable(cached.new_token_ids))
        self._write_layout(inputs, batch, target)
        inputs.logits_rows = self._batch_rows[:count]

    def _write_mixed(
        self, inputs: ModelInput, batch: SlotBatch, output: SchedulerOutput, target: InputBuffers
    ) -> None:
        """Write any microbatch: prefills, chunks, requests that come or go.

        Requests stand in three orders. First cached ones, then new ones, as the scheduling output lists
        them. Then *scheduling order*, that of ``num_scheduled_tokens``, in which everybody else counts
        rows, and where requests that begin anew can stand before others. Then *batch order*, in which
        vLLM's runner wants them."""
        cached = output.scheduled_cached_reqs
        amounts = output.num_scheduled_tokens
        count = len(amounts)
        inputs.num_reqs = count
        rows = list(map(self.states.index.__getitem__, cached.req_ids))
        self._take_blocks(cached, rows)
        tokens = self._tokens_of_cached(cached, rows, amounts)
        tokens += self._tokens_of_new(output, inputs.new_rows)
        rows = rows + inputs.new_rows
        new = output.scheduled_new_reqs
        req_ids = cached.req_ids + [request.req_id for request in new]
        starts = cached.num_computed_tokens + [request.num_computed_tokens for request in new]
        order = None if list(amounts) == req_ids else scheduling_order(req_ids, amounts)
        scheduled = _fill(target.num_scheduled_tokens.np, count, amounts.values())
        self._write_drafts(output, target)
        in_batch = batch_order(scheduled, target.num_drafts.np[:count], self._decode_tokens)
        if in_batch is not None:
            order = in_batch if order is None else order[in_batch]
            scheduled[:] = scheduled[in_batch]
            target.num_drafts.np[:count] = target.num_drafts.np[in_batch]
        req_ids = _permuted(req_ids, order)
        if not batch.same(req_ids):
            batch.resolve(req_ids, _permuted(rows, order))
        _fill(target.num_computed_tokens.np, count, _permuted(starts, order))
        if not inputs.awaits:
            ordered_tokens = _permuted(tokens, order)
            _fill(target.input_ids.np, inputs.num_tokens, chain.from_iterable(ordered_tokens))
        samples = self._write_layout(inputs, batch, target)
        batch.decoding = samples == count
        # Rows of the batch in scheduling order.
        ordered = self._batch_rows[:count] if in_batch is None else np.argsort(in_batch)
        inputs.logits_rows = self._logits_rows(batch, target, ordered)

    def _write_drafts(self, output: SchedulerOutput, target: InputBuffers) -> None:
        """Write the number of drafts of each request, in scheduling order."""
        amounts = output.num_scheduled_tokens
        drafts = output.scheduled_spec_decode_tokens
        count = len(amounts)
        target.num_drafts.np[:count] = 0
        if drafts:
            target.num_drafts.np[:count] = [len(drafts.get(req_id, ())) for req_id in amounts]
            needed = count + sum(map(len, drafts.values()))
            room = len(target.logits_indices.np)
            # The engine fits drafts into these rows before it schedules (``Speculation.fit``), and
            # leaves all of them out where that fails.
            assert needed <= room, f"{needed} rows of logits, of {room} at most"

    def _logits_rows(self, batch: SlotBatch, target: InputBuffers, ordered: Int64) -> Int64:
        """Rows of logits from which tokens are drawn, by request in scheduling order: of each that
        samples its last token's, and behind that its drafts'. ``ordered`` are the rows of the batch in
        scheduling order."""
        sampled = ordered[self.states.decoding[batch.rows[ordered]]]
        first: Int64 = target.first_logits.np[sampled].astype(np.int64)
        drafts = target.num_drafts.np[sampled]
        if not drafts.any():
            return first
        sizes = 1 + drafts
        offsets = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        rows: Int64 = np.repeat(first, sizes) + offsets
        return rows

    def _tokens_of_new(self, output: SchedulerOutput, rows: list[int]) -> list[Sequence[int]]:
        """Token ids of each new request, which come from its prefill."""
        tokens: list[Sequence[int]] = []
        for request, row in zip(output.scheduled_new_reqs, rows, strict=True):
            first = request.num_computed_tokens
            last = first + output.num_scheduled_tokens[request.req_id]
            tokens.append(self.states.prefills[row][first:last])
        return tokens

    def _tokens_of_cached(
        self, cached: CachedRequestData, rows: list[int], amounts: dict[str, int]
    ) -> list[Sequence[int]]:
        """Token ids of each cached request. Those of a prefill, which may be left out, are filled in."""
        tokens: list[Sequence[int]] = list(cached.new_token_ids) or [()] * len(rows)
        if not all(tokens):
            for i, row in enumerate(rows):
                if not tokens[i]:
                    first = cached.num_computed_tokens[i]
                    last = first + amounts[cached.req_ids[i]]
                    tokens[i] = self.states.prefills[row][first:last]
        return tokens

    # -- parts of both paths --------------------------------------------------------------------

    def _write_layout(self, inputs: ModelInput, batch: SlotBatch, target: InputBuffers) -> int:
        """Write everything that follows from rows, computed and scheduled tokens; returns the number of
        requests that sample."""
        states = self.states
        count = inputs.num_reqs
        inputs.req_ids = batch.req_ids
        target.rows.np[:count] = batch.rows
        computed = target.num_computed_tokens.np[:count]
        scheduled = target.num_scheduled_tokens.np[:count]
        tokens, inputs.max_query_len = kernels.lay_out(
            computed,
            scheduled,
            target.num_drafts.np[:count],
            query_start_loc=target.query_start_loc.np,
            positions=target.positions.np,
            seq_lens=target.seq_lens.np,
            logits_indices=target.logits_indices.np,
            first_logits=target.first_logits.np,
        )
        inputs.num_logits = int(target.first_logits.np[count])
        # vLLM's scheduler makes the sum from the same numbers, and no request changes it.
        assert tokens == inputs.num_tokens, "the scheduling output's numbers of tokens disagree"
        target.starts.np[: count + 1] = target.query_start_loc.np[: count + 1]
        target.lengths.np[:count] = target.seq_lens.np[:count]
        known = states.prefill_lens[batch.rows]
        within = computed < known
        as_decode = within & (computed > 0) & (scheduled == 1)
        samples = computed + scheduled >= known
        states.decoding[batch.rows] = samples
        target.prefill_lens.np[:count] = known
        np.minimum(computed, known, out=target.num_computed_prefill_tokens.np[:count])
        target.is_prefilling.np[:count] = within
        target.runs_as_decode.np[:count] = as_decode
        inputs.has_prefill = bool(within.any())
        inputs.decode_graph_eligible = bool((as_decode == within).all())
        if self._following and inputs.has_prefill:
            inputs.following = self._behind(batch.rows, computed + scheduled)
        for group, (_, block_size, window, mapped) in enumerate(self._groups):
            overflow = kernels.gather_blocks(
                batch.rows,
                computed,
                scheduled,
                blocks=states.blocks[group],
                block_counts=states.block_counts[group],
                block_size=block_size,
                window=window,
                mapped=mapped,
                block_table=target.block_tables[group].np,
                slot_mapping=target.slot_mappings.np[group],
            )
            # vLLM's scheduler has blocks for what it schedules, up to ``max_model_len``. The engine
            # refuses what would be longer: prompts (``engine.iteration.admission``) and turns of
            # sessions (``SessionScheduler``), which vLLM's front end checks alone or not at all.
            assert overflow < 0, (
                f"request {inputs.req_ids[overflow]} was scheduled "
                f"{int(computed[overflow] + scheduled[overflow])} tokens but has blocks for "
                f"{int(states.block_counts[group][batch.rows[overflow]]) * block_size}"
            )
        return int(np.count_nonzero(samples))

    def _behind(self, rows: Int64, ends: Int32) -> Int64:
        """The token of each request's prompt at position ``ends``, [B]; 0 where it has no such."""
        following = np.zeros(len(rows), np.int64)
        for place, (row, end) in enumerate(zip(rows.tolist(), ends.tolist(), strict=True)):
            if end < self.states.prefill_lens[row]:
                following[place] = self.states.prefills[row][end]
        return following


def _fill(target: NDArray[Any], count: int, values: Iterable[int]) -> Int32:
    """Write exactly ``count`` numbers to the front of an int32 array; returns that part. Raises
    struct.error: there are more or fewer. There are as many tokens as were scheduled: the engine has
    some token for each that was drawn or whose request fails (``engine.iteration.resolve``)."""
    # `struct` takes half of the time of `np.fromiter`.
    struct.pack_into(f"{count}i", target.data, 0, *values)
    return target[:count]


def _permuted(values: list[T], order: Int64 | None) -> list[T]:
    """``values`` in the given order; None leaves them as they are."""
    return values if order is None else [values[i] for i in order]
