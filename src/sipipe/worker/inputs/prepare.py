"""From a scheduling output to input buffers: the preparing thread's work (paper section 4.2).

:class:`InputPreparer` applies what changed to the request states, resolves the slot's microbatch,
and writes one set of input buffers. In steady decode (same requests, one token each) that is a
handful of array writes: no per-request Python, no request added or removed. Requests that come,
go or get new blocks cost in proportion to how many there are.

What it asks of the scheduling output beyond stock vLLM without pipeline parallelism:
``scheduled_cached_reqs.new_token_ids`` holds, for each cached request, the token ids of its
positions ``num_computed_tokens .. + num_scheduled_tokens``. vLLM's scheduler fills it when
``pipeline_parallel_size`` is above 1 and scheduling is not asynchronous; SiPipe's executor does
otherwise. An entry may be left empty while the request is in its prompt, which is known here.

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
from sipipe.worker.inputs.batch import Int32, Int64, SlotBatch, decodes_first, scheduling_order
from sipipe.worker.inputs.buffers import InputBuffers
from sipipe.worker.inputs.model_input import ModelInput
from sipipe.worker.inputs.request_state import RequestStates
from sipipe.worker.prompt_logprobs import find_prompt_chunks

T = TypeVar("T")


class InputPreparer:
    """Request states, slots and input buffers of one stage.

    Args:
        vllm_runner: the runner that loaded the model and set up its KV cache.
        slots: microbatches in flight.
        sets: sets of input buffers, 2 in the paper.
    """

    def __init__(self, vllm_runner: Any, *, slots: int, sets: int) -> None:
        kernels.warm_up()
        requests = int(vllm_runner.max_num_reqs)
        tables = vllm_runner.input_batch.block_table.block_tables
        self._block_sizes = [int(table.block_size) for table in tables]
        widths = [int(table.max_num_blocks_per_req) for table in tables]
        self.states = RequestStates(requests, widths)
        self.slots = [SlotBatch() for _ in range(slots)]
        self.buffers = [
            InputBuffers(int(vllm_runner.max_num_tokens), requests, widths) for _ in range(sets)
        ]
        self._lora = vllm_runner.lora_config is not None
        self._lora_requests: dict[int, Any] = {}
        self._prompt_logprobs: dict[str, int] = {}
        """Requests whose prompt is still to be scored; empty for most of an engine's life."""
        self._reorder_threshold: int | None = vllm_runner.reorder_batch_threshold
        # What is read from a scheduling output; overwritten by the next one.
        self._num_computed_tokens = np.zeros(requests, np.int32)
        self._num_scheduled_tokens = np.zeros(requests, np.int32)
        self._num_output_tokens = np.zeros(requests, np.int32)
        self._sampled = np.zeros(requests, np.int64)
        self._ones = np.ones(requests, np.int32)
        self._batch_rows = np.arange(requests, dtype=np.int64)

    def prepare(
        self, output: SchedulerOutput, slot: int, buffer_set: int, iteration: int
    ) -> ModelInput:
        """Apply a scheduling output; write the inputs of its microbatch into ``buffer_set``.

        Raises:
            KeyError: for a cached request that was never introduced (a bug of the scheduler).
        """
        tokens = output.total_num_scheduled_tokens
        new = output.scheduled_new_reqs
        if output.finished_req_ids:
            self._remove(output.finished_req_ids)
        new_rows = self._add(new) if new else []
        inputs = ModelInput(
            iteration=iteration,
            slot=slot,
            buffer_set=buffer_set,
            num_tokens=tokens,
            finished=output.finished_req_ids,
            blocks_to_zero=output.new_block_ids_to_zero,
            block_copies=output.kv_cache_block_copies,
        )
        if not tokens:
            return inputs
        batch, target = self.slots[slot], self.buffers[buffer_set]
        cached = output.scheduled_cached_reqs
        if (
            not new
            and not cached.resumed_req_ids
            and batch.same(cached.req_ids)
            and batch.decoding
            and tokens == len(cached.req_ids)
            and list(output.num_scheduled_tokens) == cached.req_ids
        ):
            self._write_steady(inputs, batch, cached, target)
        else:
            self._write_mixed(inputs, batch, output, new_rows, target)
        if self._lora:
            self._describe_lora(inputs, batch, target)
        return inputs

    # -- the request states ---------------------------------------------------------------------

    def _remove(self, req_ids: Iterable[str]) -> None:
        self._touch(self.states.remove(req_ids))
        if self._prompt_logprobs:
            for req_id in req_ids:
                self._prompt_logprobs.pop(req_id, None)

    def _add(self, new: Sequence[NewRequestData]) -> list[int]:
        rows = []
        for request in new:
            adapter = 0
            if request.lora_request is not None:
                adapter = request.lora_request.lora_int_id
                self._lora_requests[adapter] = request.lora_request
            rows.append(
                self.states.add(request.req_id, request.prompt_token_ids or (), adapter=adapter)
            )
            params = request.sampling_params
            if params is not None and params.prompt_logprobs is not None:
                self._prompt_logprobs[request.req_id] = params.prompt_logprobs
        self._touch(rows)
        self.states.append_blocks(rows, [request.block_ids for request in new])
        return rows

    def _take_blocks(self, cached: CachedRequestData, rows: Sequence[int] | Int64) -> None:
        """Resume what was preempted, and add the blocks that ``cached`` brings."""
        if cached.resumed_req_ids:
            resumed = [
                int(row)
                for req_id, row in zip(cached.req_ids, rows, strict=True)
                if req_id in cached.resumed_req_ids
            ]
            for row in resumed:
                self.states.resume(row)
            self._touch(resumed)
        grown = [place for place, ids in enumerate(cached.new_block_ids) if ids is not None]
        if grown:
            self.states.append_blocks(
                [int(rows[place]) for place in grown],
                [cached.new_block_ids[place] for place in grown],
            )

    def _touch(self, rows: Sequence[int]) -> None:
        for batch in self.slots:
            batch.touch(rows)

    # -- the two paths --------------------------------------------------------------------------

    def _write_steady(
        self, inputs: ModelInput, batch: SlotBatch, cached: CachedRequestData, target: InputBuffers
    ) -> None:
        """The same requests as last time in this slot, each decoding one token."""
        count = inputs.num_reqs = len(cached.req_ids)
        self._take_blocks(cached, batch.rows)
        computed = _fill(self._num_computed_tokens, count, cached.num_computed_tokens)
        self._write_tokens(cached, cached.new_token_ids, count, target)
        self._write_layout(inputs, batch, computed, self._ones[:count], target)
        target.is_prefilling.np[:count] = False
        target.logits_indices.np[:count] = inputs.sampled = self._batch_rows[:count]
        inputs.all_sample = True

    def _write_mixed(
        self,
        inputs: ModelInput,
        batch: SlotBatch,
        output: SchedulerOutput,
        new_rows: list[int],
        target: InputBuffers,
    ) -> None:
        """Any batch: prompts, chunks, requests that come, go, or are resumed."""
        states, cached = self.states, output.scheduled_cached_reqs
        new, amounts = output.scheduled_new_reqs, output.num_scheduled_tokens
        count = inputs.num_reqs = len(amounts)
        rows = list(map(states.index.__getitem__, cached.req_ids))
        self._take_blocks(cached, rows)
        tokens = self._tokens_of_cached(cached, rows, amounts)
        req_ids, rows = cached.req_ids, rows + new_rows
        starts, held = cached.num_computed_tokens, cached.num_output_tokens
        if new:
            req_ids = req_ids + [request.req_id for request in new]
            starts = starts + [request.num_computed_tokens for request in new]
            held = held + [0] * len(new)
            for request, row in zip(new, new_rows, strict=True):
                first = request.num_computed_tokens
                tokens.append(states.prompts[row][first : first + amounts[request.req_id]])
        # In the order of ``num_scheduled_tokens``, which is what everybody else counts rows in
        # (resumed requests can stand behind new ones there).
        order = None if list(amounts) == req_ids else scheduling_order(req_ids, amounts)
        computed = _fill(self._num_computed_tokens, count, _permuted(starts, order))
        scheduled = _fill(self._num_scheduled_tokens, count, amounts.values())
        places: Int64 | None = None
        if self._reorder_threshold is not None:
            lens = states.prompt_lens[_permuted(rows, order)]
            places = decodes_first(computed, scheduled, lens, self._reorder_threshold)
        if places is not None:
            order = places if order is None else order[places]
            computed[:], scheduled[:] = computed[places], scheduled[places]
        req_ids = _permuted(req_ids, order)
        if not batch.same(req_ids):
            batch.resolve(req_ids, _permuted(rows, order))
        outputs = _fill(self._num_output_tokens, count, _permuted(held, order))
        self._write_tokens(cached, _permuted(tokens, order), inputs.num_tokens, target)
        self._write_layout(inputs, batch, computed, scheduled, target)
        found = kernels.find_sampled(
            batch.rows,
            computed,
            outputs,
            prompt_lens=states.prompt_lens,
            query_start_loc=target.query_start_loc.np,
            seq_lens=target.seq_lens.np,
            is_prefilling=target.is_prefilling.np,
            decoding=states.decoding,
            sampled=self._sampled,
            logits_indices=target.logits_indices.np,
        )
        inputs.sampled = self._sampled[:found].copy()
        batch.decoding = found == count
        inputs.all_sample = found == inputs.num_tokens and places is None
        if places is not None:  # back to the scheduling order
            inputs.sampled = inputs.sampled[np.argsort(places[inputs.sampled])]
            target.logits_indices.np[:found] = target.query_start_loc.np[inputs.sampled + 1] - 1
        if self._prompt_logprobs:
            prompts = [states.prompts[row] for row in batch.rows]
            starts_of_rows = target.query_start_loc.np
            find_prompt_chunks(self._prompt_logprobs, inputs, prompts, computed, starts_of_rows)

    def _tokens_of_cached(
        self, cached: CachedRequestData, rows: list[int], amounts: dict[str, int]
    ) -> list[Sequence[int]]:
        """Token ids of each cached request; prompt tokens that were left out are filled in."""
        tokens: list[Sequence[int]] = list(cached.new_token_ids) or [()] * len(rows)
        if not all(tokens):
            for place, row in enumerate(rows):
                if not tokens[place]:
                    first = cached.num_computed_tokens[place]
                    last = first + amounts[cached.req_ids[place]]
                    tokens[place] = self.states.prompts[row][first:last]
        return tokens

    # -- what both paths share ------------------------------------------------------------------

    def _write_tokens(
        self,
        cached: CachedRequestData,
        tokens: Sequence[Sequence[int]],
        count: int,
        target: InputBuffers,
    ) -> None:
        try:
            _fill(target.input_ids.np, count, chain.from_iterable(tokens))
        except struct.error:
            raise ValueError(
                "the scheduling output does not carry the token ids of its cached requests "
                f"(scheduled_cached_reqs.new_token_ids has {sum(map(len, cached.new_token_ids))} "
                f"tokens for {len(cached.req_ids)} requests); SiPipe's stage runner needs them, "
                "see sipipe.engine.requests.RequestTracker.advance"
            ) from None

    def _write_layout(
        self,
        inputs: ModelInput,
        batch: SlotBatch,
        computed: Int32,
        scheduled: Int32,
        target: InputBuffers,
    ) -> None:
        """Positions, lengths, block tables and slot mappings of the batch."""
        inputs.req_ids = batch.req_ids
        inputs.max_query_len, inputs.max_seq_len = kernels.spans(
            computed,
            scheduled,
            query_start_loc=target.query_start_loc.np,
            positions=target.positions.np,
            seq_lens=target.seq_lens.np,
        )
        states = self.states
        for group, block_size in enumerate(self._block_sizes):
            overflow = kernels.gather_blocks(
                batch.rows,
                computed,
                scheduled,
                blocks=states.blocks[group],
                block_counts=states.block_counts[group],
                block_size=block_size,
                block_table=target.block_tables[group].np,
                slot_mapping=target.slot_mappings[group].np,
            )
            if overflow >= 0:
                raise RuntimeError(
                    f"request {inputs.req_ids[overflow]} was scheduled "
                    f"{int(computed[overflow] + scheduled[overflow])} tokens but has blocks for "
                    f"{int(states.block_counts[group][batch.rows[overflow]]) * block_size}"
                )

    def _describe_lora(self, inputs: ModelInput, batch: SlotBatch, target: InputBuffers) -> None:
        adapters = self.states.adapters[batch.rows]
        lengths = np.diff(target.query_start_loc.np[: inputs.num_reqs + 1])
        inputs.lora = (
            tuple(adapters[inputs.sampled].tolist()),
            tuple(np.repeat(adapters, lengths).tolist()),
            {self._lora_requests[adapter] for adapter in set(adapters.tolist()) if adapter},
        )


def _fill(target: NDArray[Any], count: int, values: Iterable[int]) -> NDArray[Any]:
    """Write exactly ``count`` numbers to the front of an int32 array; returns that part.

    ``struct`` takes half of the time of ``np.fromiter``, and raises ``struct.error`` if there
    are more or less.
    """
    struct.pack_into(f"{count}i", target.data, 0, *values)
    return target[:count]


def _permuted(values: list[T], order: Int64 | None) -> list[T]:
    return values if order is None else [values[place] for place in order]
