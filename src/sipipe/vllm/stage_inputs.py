"""From a scheduling output to device inputs: the CPU executor's work (paper section 4.2).

:class:`InputPreparer` applies what changed to the sequence cache, resolves the slot's microbatch,
and writes one version of the inputs. In steady decode (same sequences, one token each) that is a
handful of array writes: no per-sequence Python, no sequence removed or inserted.

What it asks of the scheduling output beyond stock vLLM without pipeline parallelism:
``scheduled_cached_reqs.new_token_ids`` holds, for each cached request, the token ids of its
positions ``num_computed_tokens .. + num_scheduled_tokens``. vLLM's scheduler fills it when
``pipeline_parallel_size`` is above 1 and scheduling is not asynchronous; otherwise
:class:`sipipe.vllm.stage_tokens.TokenHistory` can. An entry may be left empty while the request is
in its prompt, which is known here, or when ``all_token_ids`` has the request.

Who runs here: the CPU executor's thread alone (or any thread, one call at a time).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from vllm.config import CUDAGraphMode
from vllm.v1.attention.backend import CommonAttentionMetadata

from sipipe.stage.batch import SlotBatch
from sipipe.stage.safety import TokenSafety
from sipipe.stage.sequence_cache import SequenceCache
from sipipe.vllm.stage_buffers import InputVersion

_NO_GRAPH = frozenset({CUDAGraphMode.NONE})


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRows:
    """Prompt tokens of one request in a batch whose log-probabilities were asked for."""

    req_id: str
    first_row: int
    """Row in the hidden states of the first prompt token that predicts another one."""
    start: int
    """Its position in the prompt; row ``first_row + j`` predicts prompt token ``start + j + 1``."""
    targets: np.ndarray
    """[n] int32, the prompt tokens that the n rows predict."""
    num_logprobs: int
    """How many of the most likely tokens to report beside the target; -1 for the vocabulary."""
    prompt_len: int
    done: bool
    """Whether this is the last chunk of the prompt."""


@dataclass(slots=True, kw_only=True)
class ModelInput:
    """The light description of a prepared iteration; the arrays are in the input version."""

    iteration: int
    slot: int
    version: int
    req_ids: list[str]
    """[B] the microbatch in batch order: the scheduling order, except where the attention backend
    wants decodes in front. Not to be changed: it is the slot's own list."""
    num_reqs: int = 0
    num_tokens: int = 0
    num_tokens_padded: int = 0
    """Rows of the hidden states; equals ``num_tokens`` unless a captured graph or sequence
    parallelism needs more."""
    sampled: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """[n] batch rows that produce a token this iteration, in the order of the scheduling output's
    ``num_scheduled_tokens``; the others are in the middle of their prompt."""
    logits_rows: torch.Tensor | None = None
    """[n] int64 on the device, the hidden-state row of each sampled sequence."""
    steady: bool = False
    """Whether the batch took the steady path: the same sequences, one token each."""
    num_scheduled: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    """[B] tokens of each sequence."""
    prompt_rows: list[PromptRows] = field(default_factory=list)
    finished: set[str] = field(default_factory=set)
    """Requests that finished since the scheduling output before."""
    build_metadata: Callable[[], None] | None = None
    """What is left for the device executor: fills ``attn_metadata`` and ``slot_mapping``. None
    where the CPU executor has done it, which it may on every device but the CPU."""
    attn_metadata: dict[str, Any] = field(default_factory=dict)
    slot_mapping: dict[str, torch.Tensor] = field(default_factory=dict)
    batch_descriptor: Any = None
    graph_size: int | None = None
    """The captured batch size that the batch is padded to, or None to run it as it is."""
    lora: tuple[tuple[int, ...], tuple[int, ...], set[Any]] | None = None
    """Adapter of each sampled row, of each token, and the requests for them."""
    blocks_to_zero: list[int] | None = None
    block_copies: Any = None

    @property
    def sampled_req_ids(self) -> list[str]:
        """[n] names of the sampled sequences, in the order of the logits' rows."""
        return [self.req_ids[row] for row in self.sampled]


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
        from sipipe.stage import kernels

        kernels.warm_up()
        self._kernels = kernels
        self._stock = stock
        self._device: torch.device = stock.device
        tables = stock.input_batch.block_table.block_tables
        self._block_sizes = [int(table.block_size) for table in tables]
        widths = [int(table.max_num_blocks_per_req) for table in tables]
        self.cache = SequenceCache(stock.max_num_reqs, widths)
        self.slots = [SlotBatch(slot) for slot in range(slots)]
        tokens = int(stock.max_num_tokens)
        self.versions = [
            InputVersion(tokens, stock.max_num_reqs, widths, self._device) for _ in range(versions)
        ]
        self._safety = safety
        self.padded_size: Callable[[int], int | None] = lambda _batch: None
        """The captured size that a decode batch is to be padded to; see `StageGraphs`."""
        self._lora_requests: dict[int, Any] = {}
        self._prompt_logprobs: dict[str, int] = {}
        self._ones = np.ones(stock.max_num_reqs, np.int32)
        self._iota = np.arange(stock.max_num_reqs, dtype=np.int64)
        self._iota_device = torch.arange(stock.max_num_reqs, device=self._device)
        self._groups = stock.kv_cache_config.kv_cache_groups
        self._threshold: int | None = stock.reorder_batch_threshold
        self._make_builders(versions)

    def _make_builders(self, versions: int) -> None:
        """One attention metadata builder per version: some keep buffers that graphs read."""
        kernel_sizes = self._stock._kernel_block_sizes
        for gid, groups in enumerate(self._stock.attn_groups):
            for group in groups:
                if len(group.metadata_builders) < versions:
                    group.create_metadata_builders(
                        self._stock.vllm_config,
                        self._device,
                        kernel_sizes[gid] if gid < len(kernel_sizes) else None,
                        num_metadata_builders=versions,
                    )

    def prepare(self, output: Any, slot: int, version: int, iteration: int) -> ModelInput:
        """Apply a scheduling output; write the inputs of its microbatch into ``version``.

        Raises:
            TokenSafetyError: with the check on, if the device may still read ``version``.
            KeyError: for a cached request that was never introduced (a bug of the scheduler).
        """
        if self._safety is not None and output.total_num_scheduled_tokens:
            self._safety.begin_write(version, iteration)
        self._forget(output.finished_req_ids)
        for new in output.scheduled_new_reqs:
            self._introduce(new)
        inputs = ModelInput(
            iteration=iteration,
            slot=slot,
            version=version,
            req_ids=[],
            num_tokens=output.total_num_scheduled_tokens,
            finished=output.finished_req_ids,
            blocks_to_zero=output.new_block_ids_to_zero,
            block_copies=output.kv_cache_block_copies,
        )
        if not output.total_num_scheduled_tokens:
            return inputs
        target = self.versions[version]
        target.wait_until_free()
        batch = self.slots[slot]
        cached = output.scheduled_cached_reqs
        if (
            not output.scheduled_new_reqs
            and not cached.resumed_req_ids
            and batch.same(cached.req_ids)
            and batch.decoding
            and output.total_num_scheduled_tokens == len(cached.req_ids)
            and list(output.num_scheduled_tokens) == cached.req_ids
        ):
            computed, scheduled = self._steady(inputs, batch, cached, target)
        else:
            computed, scheduled = self._mixed(inputs, batch, output, target)
        self._describe(inputs, batch, computed, scheduled, target)
        if self._safety is not None:
            self._safety.end_write(version, iteration)
        return inputs

    def forget_all(self) -> None:
        """Drop every sequence: after an error or a weights update."""
        self.cache.clear()
        self._prompt_logprobs.clear()
        for batch in self.slots:
            batch.stale = True

    # -- the sequence cache ---------------------------------------------------------------------

    def _forget(self, req_ids: set[str]) -> None:
        for req_id in req_ids:
            if self.cache.remove(req_id):
                self._prompt_logprobs.pop(req_id, None)
                for batch in self.slots:
                    batch.touch(req_id)

    def _introduce(self, new: Any) -> None:
        adapter = 0
        if new.lora_request is not None:
            adapter = new.lora_request.lora_int_id
            self._lora_requests[adapter] = new.lora_request
        self.cache.insert(new.req_id, new.prompt_token_ids or (), new.block_ids, adapter=adapter)
        for batch in self.slots:
            batch.touch(new.req_id)
        params = new.sampling_params
        if params is not None and params.prompt_logprobs is not None:
            self._prompt_logprobs[new.req_id] = params.prompt_logprobs

    def _append_blocks(self, rows: Sequence[int] | np.ndarray, new_blocks: list[Any]) -> None:
        if new_blocks.count(None) == len(new_blocks):
            return
        for index, blocks in enumerate(new_blocks):
            if blocks is not None:
                self.cache.append_blocks(int(rows[index]), blocks)

    # -- the two paths --------------------------------------------------------------------------

    def _steady(
        self, inputs: ModelInput, batch: SlotBatch, cached: Any, target: InputVersion
    ) -> tuple[np.ndarray, np.ndarray]:
        """The same sequences as last time in this slot, each decoding one token."""
        count = len(cached.req_ids)
        self._append_blocks(batch.rows, cached.new_block_ids)
        computed = np.array(cached.num_computed_tokens, dtype=np.int32)
        try:
            target.input_ids.np[:count] = np.fromiter(
                chain.from_iterable(cached.new_token_ids), np.int32, count
            )
        except ValueError:
            raise ValueError(_missing_tokens(cached)) from None
        inputs.req_ids = batch.req_ids
        inputs.steady = True
        inputs.sampled = self._iota[:count]
        inputs.logits_rows = self._iota_device[:count]
        return computed, self._ones[:count]

    def _mixed(
        self, inputs: ModelInput, batch: SlotBatch, output: Any, target: InputVersion
    ) -> tuple[np.ndarray, np.ndarray]:
        """Any batch: prompts, chunks, resumed sequences, joins and leaves."""
        cache = self.cache
        cached = output.scheduled_cached_reqs
        new = output.scheduled_new_reqs
        cached_rows = [cache.index[req_id] for req_id in cached.req_ids]
        if cached.resumed_req_ids:
            for req_id, row, blocks in zip(
                cached.req_ids, cached_rows, cached.new_block_ids, strict=True
            ):
                if req_id in cached.resumed_req_ids:
                    cache.resume(row, blocks)
                    for other in self.slots:
                        other.touch(req_id)
                elif blocks is not None:
                    cache.append_blocks(row, blocks)
        else:
            self._append_blocks(cached_rows, cached.new_block_ids)

        known = len(cached.req_ids)
        req_ids = [*cached.req_ids, *(request.req_id for request in new)]
        computed = np.array(
            cached.num_computed_tokens + [request.num_computed_tokens for request in new],
            dtype=np.int32,
        )
        outputs = np.zeros(len(req_ids), np.int32)
        outputs[:known] = cached.num_output_tokens
        amounts = output.num_scheduled_tokens
        in_order = list(amounts) == req_ids
        scheduled = np.fromiter(
            amounts.values() if in_order else map(amounts.__getitem__, req_ids),
            np.int32,
            len(req_ids),
        )
        tokens = self._tokens_of_cached(cached, cached_rows, scheduled)
        for index, request in enumerate(new, start=known):
            prompt = cache.prompts[cache.index[request.req_id]]
            first = request.num_computed_tokens
            tokens.append(prompt[first : first + int(scheduled[index])])

        # In the order of ``num_scheduled_tokens``, which is what everybody else counts rows in
        # (resumed requests can stand behind new ones there).
        places: np.ndarray | None = None
        if not in_order:
            index = {req_id: place for place, req_id in enumerate(req_ids)}
            order = np.array([index[req_id] for req_id in amounts])
        else:
            order = None
        if self._threshold is not None:
            places = self._decodes_first(req_ids, computed, scheduled, order)
        if places is not None:
            order = places if order is None else order[places]
        if order is not None:
            req_ids = [req_ids[i] for i in order]
            tokens = [tokens[i] for i in order]
            computed, scheduled, outputs = computed[order], scheduled[order], outputs[order]
        if not batch.same(req_ids):
            batch.resolve(req_ids, cache)
        rows = batch.rows

        try:
            if order is None:
                start = int(scheduled[:known].sum())
                target.input_ids.np[:start] = np.fromiter(
                    chain.from_iterable(tokens[:known]), np.int32, start
                )
            else:
                known = start = 0
            if tokens[known:]:
                flat = np.concatenate([np.asarray(ids, np.int32) for ids in tokens[known:]])
                target.input_ids.np[start : output.total_num_scheduled_tokens] = flat
        except ValueError:
            raise ValueError(_missing_tokens(cached)) from None

        inputs.req_ids = batch.req_ids
        samples = computed + scheduled >= cache.prompt_lens[rows] + outputs
        cache.decoding[rows] = samples
        batch.decoding = bool(samples.all())
        ends = np.cumsum(scheduled) - 1
        if places is None:
            inputs.sampled = np.flatnonzero(samples)
        else:
            scheduling = np.argsort(places)
            inputs.sampled = scheduling[samples[scheduling]]
        inputs.logits_rows = torch.from_numpy(ends[inputs.sampled].astype(np.int64)).to(
            self._device, non_blocking=True
        )
        if self._prompt_logprobs:
            self._find_prompt_rows(inputs, computed, scheduled, ends)
        return computed, scheduled

    def _tokens_of_cached(
        self, cached: Any, rows: list[int], scheduled: np.ndarray
    ) -> list[Sequence[int] | np.ndarray]:
        tokens: list[Any] = list(cached.new_token_ids) or [()] * len(rows)
        if all(tokens):
            return tokens
        for index, row in enumerate(rows):
            if len(tokens[index]):
                continue
            first = cached.num_computed_tokens[index]
            last = first + int(scheduled[index])
            prompt = self.cache.prompts[row]
            if prompt is not None and last <= len(prompt):
                tokens[index] = prompt[first:last]
            else:
                known = cached.all_token_ids.get(cached.req_ids[index], ())
                tokens[index] = known[first:last]
        return tokens

    def _decodes_first(
        self,
        req_ids: list[str],
        computed: np.ndarray,
        scheduled: np.ndarray,
        order: np.ndarray | None,
    ) -> np.ndarray | None:
        """The permutation that backends with a decode kernel want, or None if it is so already.

        Decodes, then short continued prompts, then long ones, then fresh prompts; otherwise the
        scheduling order (``order`` of the arguments), so that a microbatch which only decodes
        never changes its own.
        """
        index = self.cache.index
        lens = self.cache.prompt_lens[[index[req_id] for req_id in req_ids]]
        if order is not None:
            computed, scheduled, lens = computed[order], scheduled[order], lens[order]
        long = scheduled > self._threshold
        region = np.where(computed == 0, 3, np.where(long, 2, np.where(computed < lens, 1, 0)))
        if (np.diff(region) >= 0).all():
            return None
        return np.argsort(region, kind="stable")

    def _find_prompt_rows(
        self, inputs: ModelInput, computed: np.ndarray, scheduled: np.ndarray, ends: np.ndarray
    ) -> None:
        for index, req_id in enumerate(inputs.req_ids):
            asked = self._prompt_logprobs.get(req_id)
            if asked is None:
                continue
            prompt = self.cache.prompts[self.cache.index[req_id]]
            assert prompt is not None
            start = int(computed[index])
            left = len(prompt) - (start + 1)
            amount = int(scheduled[index])
            # As in vLLM, a chunk that ends one token before the prompt does is not the last:
            # the result goes out with the first sampled token.
            done = amount > left
            rows = min(amount, left)
            inputs.prompt_rows.append(
                PromptRows(
                    req_id=req_id,
                    first_row=int(ends[index]) + 1 - amount,
                    start=start,
                    targets=prompt[start + 1 : start + 1 + max(rows, 0)],
                    num_logprobs=asked,
                    prompt_len=len(prompt),
                    done=done,
                )
            )
            if done:
                del self._prompt_logprobs[req_id]

    # -- what both paths share ------------------------------------------------------------------

    def _describe(
        self,
        inputs: ModelInput,
        batch: SlotBatch,
        computed: np.ndarray,
        scheduled: np.ndarray,
        target: InputVersion,
    ) -> None:
        """Positions, lengths, block tables, slots and the attention's metadata of the batch."""
        count = inputs.num_reqs = len(inputs.req_ids)
        tokens = inputs.num_tokens
        inputs.num_scheduled = scheduled
        longest_query, longest_seq = self._kernels.spans(
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
        if inputs.steady:
            target.prefilling.np[:count] = False
        else:
            np.less(computed, cache.prompt_lens[batch.rows], out=target.prefilling.np[:count])

        lora = self._stock.lora_config is not None
        adapters = int(np.count_nonzero(np.unique(batch.adapters))) if lora else 0
        _, inputs.batch_descriptor = self._stock.cudagraph_dispatcher.dispatch(
            num_tokens=tokens,
            has_lora=adapters > 0,
            num_active_loras=adapters,
            valid_modes=_NO_GRAPH,
        )
        if inputs.steady:
            inputs.graph_size = self.padded_size(count)
        padded = inputs.num_tokens_padded = inputs.graph_size or inputs.batch_descriptor.num_tokens
        if padded > tokens:
            target.input_ids.np[tokens:padded] = 0
            target.positions.np[tokens:padded] = 0
            target.padding.np[tokens:padded] = True
            for mapping in target.slots:
                mapping.np[tokens:padded] = -1
        target.padding.np[:tokens] = False
        rows = count
        if inputs.graph_size is not None:
            rows = inputs.graph_size
            target.query_start.np[count + 1 : rows + 1] = tokens
            target.seq_lens.np[count:rows] = 0
            target.prefilling.np[count:rows] = False
            for table in target.tables:
                table.np[count:rows] = 0  # vLLM's null block
        target.upload(padded, rows)
        if lora:
            self._describe_adapters(inputs, batch)
        if self._device.type == "cpu":
            # Its builder grows a scratch area that all of the process's attention kernels share
            # (ScratchPadManager): while a forward pass runs, that frees memory under it.
            inputs.build_metadata = partial(
                self._build_metadata, inputs, target, longest_query, longest_seq
            )
        else:
            self._build_metadata(inputs, target, longest_query, longest_seq)

    def _describe_adapters(self, inputs: ModelInput, batch: SlotBatch) -> None:
        adapters = batch.adapters
        inputs.lora = (
            tuple(adapters[inputs.sampled].tolist()),
            tuple(np.repeat(adapters, inputs.num_scheduled).tolist()),
            {self._lora_requests[adapter] for adapter in set(adapters.tolist()) if adapter},
        )

    def _build_metadata(
        self,
        inputs: ModelInput,
        target: InputVersion,
        longest_query: int,
        longest_seq: int,
        *,
        capturing: bool = False,
    ) -> None:
        count = inputs.graph_size or inputs.num_reqs
        tokens = inputs.graph_size or inputs.num_tokens
        common = CommonAttentionMetadata(
            query_start_loc=target.query_start.device[: count + 1],
            query_start_loc_cpu=target.query_start.host[: count + 1],
            seq_lens=target.seq_lens.device[:count],
            seq_lens_cpu_upper_bound=target.seq_lens.host[:count],
            num_reqs=count,
            num_actual_tokens=tokens,
            max_query_len=int(longest_query),
            max_seq_len=int(longest_seq),
            block_table_tensor=target.tables[0].device[:count],
            slot_mapping=target.slots[0].device[: inputs.num_tokens_padded],
            is_prefilling=target.prefilling.host[:count],
            positions=target.positions.device[:tokens],
        )
        for gid, groups in enumerate(self._stock.attn_groups):
            of_group = (
                common.replace(
                    block_table_tensor=target.tables[gid].device[:count],
                    slot_mapping=target.slots[gid].device[: inputs.num_tokens_padded],
                )
                if gid
                else common
            )
            for group in groups:
                metadata = (
                    group.build_metadata_for_cudagraph_capture(of_group, inputs.version)
                    if capturing
                    else group.build_metadata(of_group, inputs.version)
                )
                for layer in group.layer_names:
                    inputs.attn_metadata[layer] = metadata
            for layer in self._groups[gid].layer_names:
                inputs.slot_mapping[layer] = of_group.slot_mapping

    def pose(self, version: int, size: int) -> ModelInput:
        """Inputs of ``size`` made-up sequences of one token, for capturing a graph."""
        target = self.versions[version]
        inputs = ModelInput(
            iteration=-1,
            slot=0,
            version=version,
            req_ids=[],
            num_reqs=size,
            num_tokens=size,
            num_tokens_padded=size,
            graph_size=size,
            batch_descriptor=None,
        )
        target.input_ids.np[:size] = 0
        target.positions.np[:size] = 0
        target.padding.np[:size] = False
        target.query_start.np[: size + 1] = np.arange(size + 1)
        target.seq_lens.np[:size] = 1
        target.prefilling.np[:size] = False
        for table, mapping in zip(target.tables, target.slots, strict=True):
            table.np[:size] = 0
            mapping.np[:size] = -1
        target.upload(size, size)
        target.wait_until_ready()
        self._build_metadata(inputs, target, 1, self._stock.max_model_len, capturing=True)
        return inputs


def _missing_tokens(cached: Any) -> str:
    return (
        "the scheduling output does not carry the token ids of its cached requests "
        f"(scheduled_cached_reqs.new_token_ids has {sum(map(len, cached.new_token_ids))} tokens "
        f"for {len(cached.req_ids)} requests); SiPipe's stage runner needs them, see "
        "sipipe.vllm.stage_tokens.TokenHistory"
    )
