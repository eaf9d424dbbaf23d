"""From a scheduling output to device inputs: the CPU executor's work (paper section 4.2).

:class:`InputPreparer` applies what changed to the sequence cache, resolves the slot's microbatch,
and writes one version of the inputs. In steady decode (same sequences, one token each) that is a
handful of array writes: no per-sequence Python, no sequence removed or inserted. Joins, leaves
and new blocks cost in proportion to how many there are.

What it asks of the scheduling output beyond stock vLLM without pipeline parallelism:
``scheduled_cached_reqs.new_token_ids`` holds, for each cached request, the token ids of its
positions ``num_computed_tokens .. + num_scheduled_tokens``. vLLM's scheduler fills it when
``pipeline_parallel_size`` is above 1 and scheduling is not asynchronous; SiPipe's executor does
otherwise (:meth:`sipipe.engine.requests.RequestTracker.advance`). An entry may be left empty while
the request is in its prompt, which is known here.

Who runs here: the CPU executor's thread alone (or any thread, one call at a time).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch

from sipipe.worker.inputs.batch import SlotBatch
from sipipe.worker.inputs.buffers import InputVersion
from sipipe.worker.inputs.model_input import ModelInput
from sipipe.worker.inputs.order import decodes_first, scheduling_order
from sipipe.worker.inputs.prompt_rows import PromptRequests
from sipipe.worker.inputs.request_state import SequenceCache
from sipipe.worker.inputs.safety import TokenSafety


class InputPreparer:
    """Sequence cache, slots and versioned inputs of one stage.

    Args:
        stock: the vLLM runner that loaded the model and set up its KV cache.
        slots: microbatches in flight.
        versions: input versions, 2 in the paper.
        safety: stamps to keep, or None.
    """

    def __init__(
        self, stock: Any, *, slots: int, versions: int, safety: TokenSafety | None
    ) -> None:
        # Not at the top: vLLM's CPU worker scans all modules at its start for Triton kernels to
        # replace, and trips over llvmlite (part of Numba) if that is imported before.
        from sipipe.worker.inputs import kernels

        kernels.warm_up()
        self._kernels = kernels
        device: torch.device = stock.device
        sequences = int(stock.max_num_reqs)
        tables = stock.input_batch.block_table.block_tables
        self._block_sizes = [int(table.block_size) for table in tables]
        widths = [int(table.max_num_blocks_per_req) for table in tables]
        self.cache = SequenceCache(sequences, widths)
        self.slots = [SlotBatch(slot) for slot in range(slots)]
        self.versions = [
            InputVersion(int(stock.max_num_tokens), sequences, widths, device)
            for _ in range(versions)
        ]
        self._safety = safety
        self.padded_size: Callable[[int], int | None] = lambda _batch: None
        """The captured size that a decode batch is to be padded to; see `StageGraphs`."""
        self._lora = stock.lora_config is not None
        self._lora_requests: dict[int, Any] = {}
        self._prompt_requests = PromptRequests()
        self._threshold: int | None = stock.reorder_batch_threshold
        # What is read from a scheduling output; overwritten by the next one.
        self._computed = np.zeros(sequences, np.int32)
        self._scheduled = np.zeros(sequences, np.int32)
        self._outputs = np.zeros(sequences, np.int32)
        self._sampled = np.zeros(sequences, np.int64)
        self._ones = np.ones(sequences, np.int32)
        self._rows = np.arange(sequences, dtype=np.int64)

    def prepare(self, output: Any, slot: int, version: int, iteration: int) -> ModelInput:
        """Apply a scheduling output; write the inputs of its microbatch into ``version``.

        Raises:
            TokenSafetyError: with the check on, if the device may still read ``version``.
            KeyError: for a cached request that was never introduced (a bug of the scheduler).
        """
        tokens = output.total_num_scheduled_tokens
        if self._safety is not None and tokens:
            self._safety.begin_write(version, iteration)
        new = output.scheduled_new_reqs
        if output.finished_req_ids:
            self._forget(output.finished_req_ids)
        new_rows = self._introduce(new) if new else []
        inputs = ModelInput(
            iteration=iteration,
            slot=slot,
            version=version,
            num_tokens=tokens,
            finished=output.finished_req_ids,
            blocks_to_zero=output.new_block_ids_to_zero,
            block_copies=output.kv_cache_block_copies,
        )
        if not tokens:
            return inputs
        target = self.versions[version]
        target.wait_until_free()
        batch = self.slots[slot]
        cached = output.scheduled_cached_reqs
        if (
            not new
            and not cached.resumed_req_ids
            and batch.same(cached.req_ids)
            and batch.decoding
            and tokens == len(cached.req_ids)
            and list(output.num_scheduled_tokens) == cached.req_ids
        ):
            self._steady(inputs, batch, cached, target)
        else:
            self._mixed(inputs, batch, output, new_rows, target)
        self._finish(inputs, batch, target)
        if self._safety is not None:
            self._safety.end_write(version, iteration)
        return inputs

    # -- the sequence cache ---------------------------------------------------------------------

    def _forget(self, req_ids: Iterable[str]) -> None:
        self._touch(self.cache.remove(req_ids))
        if self._prompt_requests:
            for req_id in req_ids:
                self._prompt_requests.forget(req_id)

    def _introduce(self, new: Sequence[Any]) -> list[int]:
        rows = []
        for request in new:
            adapter = 0
            if request.lora_request is not None:
                adapter = request.lora_request.lora_int_id
                self._lora_requests[adapter] = request.lora_request
            rows.append(
                self.cache.insert(request.req_id, request.prompt_token_ids or (), adapter=adapter)
            )
            params = request.sampling_params
            if params is not None and params.prompt_logprobs is not None:
                self._prompt_requests.ask(request.req_id, params.prompt_logprobs)
        self._touch(rows)
        self.cache.append_blocks(rows, [request.block_ids for request in new])
        return rows

    def _take_blocks(self, cached: Any, rows: Sequence[int] | np.ndarray) -> None:
        """Resume what was preempted, and add the blocks that ``cached`` brings."""
        if cached.resumed_req_ids:
            resumed = [
                int(row)
                for req_id, row in zip(cached.req_ids, rows, strict=True)
                if req_id in cached.resumed_req_ids
            ]
            for row in resumed:
                self.cache.resume(row)
            self._touch(resumed)
        grown = [place for place, ids in enumerate(cached.new_block_ids) if ids is not None]
        if grown:
            self.cache.append_blocks(
                [rows[place] for place in grown], [cached.new_block_ids[place] for place in grown]
            )

    def _touch(self, rows: Sequence[int]) -> None:
        for batch in self.slots:
            batch.touch(rows)

    # -- the two paths --------------------------------------------------------------------------

    def _steady(
        self, inputs: ModelInput, batch: SlotBatch, cached: Any, target: InputVersion
    ) -> None:
        """The same sequences as last time in this slot, each decoding one token."""
        count = inputs.num_reqs = len(cached.req_ids)
        self._take_blocks(cached, batch.rows)
        computed = _fill(self._computed, count, cached.num_computed_tokens)
        self._write_tokens(cached, cached.new_token_ids, count, target)
        self._describe(inputs, batch, computed, self._ones[:count], target)
        target.prefilling.np[:count] = False
        target.last_tokens.np[:count] = inputs.sampled = self._rows[:count]
        inputs.all_sample = inputs.steady = True
        inputs.graph_size = self.padded_size(count)

    def _mixed(
        self,
        inputs: ModelInput,
        batch: SlotBatch,
        output: Any,
        new_rows: list[int],
        target: InputVersion,
    ) -> None:
        """Any batch: prompts, chunks, resumed sequences, joins and leaves."""
        cache, cached, new = self.cache, output.scheduled_cached_reqs, output.scheduled_new_reqs
        amounts = output.num_scheduled_tokens
        count = inputs.num_reqs = len(amounts)
        rows = list(map(cache.index.__getitem__, cached.req_ids))
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
                tokens.append(cache.prompts[row][first : first + amounts[request.req_id]])
        # In the order of ``num_scheduled_tokens``, which is what everybody else counts rows in
        # (resumed requests can stand behind new ones there).
        order = None if list(amounts) == req_ids else scheduling_order(req_ids, amounts)
        computed = _fill(self._computed, count, _permuted(starts, order))
        scheduled = _fill(self._scheduled, count, amounts.values())
        places: np.ndarray | None = None
        if self._threshold is not None:
            lens = cache.prompt_lens[_permuted(rows, order)]
            places = decodes_first(computed, scheduled, lens, self._threshold)
        if places is not None:
            order = places if order is None else order[places]
            computed[:], scheduled[:] = computed[places], scheduled[places]
        req_ids = _permuted(req_ids, order)
        if not batch.same(req_ids):
            batch.resolve(req_ids, _permuted(rows, order), cache)
        outputs = _fill(self._outputs, count, _permuted(held, order))
        self._write_tokens(cached, _permuted(tokens, order), inputs.num_tokens, target)
        self._describe(inputs, batch, computed, scheduled, target)
        found = self._kernels.find_sampled(
            batch.rows,
            computed,
            outputs,
            prompt_lens=cache.prompt_lens,
            query_start=target.query_start.np,
            seq_lens=target.seq_lens.np,
            prefilling=target.prefilling.np,
            decoding=cache.decoding,
            sampled=self._sampled,
            last_tokens=target.last_tokens.np,
        )
        inputs.sampled = self._sampled[:found].copy()
        batch.decoding = found == count
        inputs.all_sample = found == inputs.num_tokens and places is None
        if places is not None:  # back to the scheduling order
            inputs.sampled = inputs.sampled[np.argsort(places[inputs.sampled])]
            target.last_tokens.np[:found] = target.query_start.np[inputs.sampled + 1] - 1
        if self._prompt_requests:
            prompts = [cache.prompts[row] for row in batch.rows]
            self._prompt_requests.find(inputs, prompts, computed, target.query_start.np)

    def _tokens_of_cached(
        self, cached: Any, rows: list[int], amounts: dict[str, int]
    ) -> list[Sequence[int]]:
        """Token ids of each cached request; prompt tokens that were left out are filled in."""
        tokens: list[Sequence[int]] = list(cached.new_token_ids) or [()] * len(rows)
        if not all(tokens):
            for place, row in enumerate(rows):
                if not tokens[place]:
                    first = cached.num_computed_tokens[place]
                    last = first + amounts[cached.req_ids[place]]
                    tokens[place] = self.cache.prompts[row][first:last]
        return tokens

    # -- what both paths share ------------------------------------------------------------------

    def _write_tokens(
        self, cached: Any, tokens: Sequence[Sequence[int]], count: int, target: InputVersion
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

    def _describe(
        self,
        inputs: ModelInput,
        batch: SlotBatch,
        computed: np.ndarray,
        scheduled: np.ndarray,
        target: InputVersion,
    ) -> None:
        """Positions, lengths, block tables and KV cache slots of the batch."""
        inputs.req_ids = batch.req_ids
        inputs.longest_query, inputs.longest_seq = self._kernels.spans(
            computed,
            scheduled,
            query_start=target.query_start.np,
            positions=target.positions.np,
            seq_lens=target.seq_lens.np,
        )
        cache = self.cache
        for group, block_size in enumerate(self._block_sizes):
            overflow = self._kernels.gather_blocks(
                batch.rows,
                computed,
                scheduled,
                blocks=cache.blocks[group],
                counts=cache.counts[group],
                block_size=block_size,
                table=target.tables[group].np,
                slots=target.slots[group].np,
            )
            if overflow >= 0:
                raise RuntimeError(
                    f"request {inputs.req_ids[overflow]} was scheduled "
                    f"{int(computed[overflow] + scheduled[overflow])} tokens but has blocks for "
                    f"{int(cache.counts[group][batch.rows[overflow]]) * block_size}"
                )

    def _finish(self, inputs: ModelInput, batch: SlotBatch, target: InputVersion) -> None:
        """Padding, adapters, and the copies to the device."""
        tokens, rows = inputs.num_tokens, inputs.num_reqs
        target.padding.np[:tokens] = False
        padded, padded_rows = inputs.graph_size or tokens, inputs.graph_size or rows
        if padded > tokens:
            target.pad(tokens, padded, rows, padded_rows)
        inputs.num_tokens_padded = padded
        target.upload(padded, padded_rows)
        if self._lora:
            adapters = self.cache.adapters[batch.rows]
            inputs.lora = (
                tuple(adapters[inputs.sampled].tolist()),
                tuple(np.repeat(adapters, np.diff(target.query_start.np[: rows + 1])).tolist()),
                {self._lora_requests[adapter] for adapter in set(adapters.tolist()) if adapter},
            )


def _fill(target: np.ndarray, count: int, values: Iterable[int]) -> np.ndarray:
    """Write exactly ``count`` numbers to the front of an int32 array; returns that part.

    ``struct`` takes half of the time of ``np.fromiter``, and raises ``struct.error`` if there
    are more or less.
    """
    struct.pack_into(f"{count}i", target, 0, *values)
    return target[:count]


def _permuted(values: list[Any], order: np.ndarray | None) -> list[Any]:
    return values if order is None else [values[place] for place in order]
