"""Placement of a prepared batch for the model: in its set of buffers, or copied from there.

Who runs here: the device thread; in :meth:`Placement.wait_free` and :meth:`Placement.ahead` the
preparing thread. Guarantee: a set is not written while anything reads it.
:mod:`sipipe.worker.double_buffer` knows when a set was taken, and this module when the copies that
were launched then are done.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, Protocol

import torch
from vllm.v1.attention.backends.utils import PAD_SLOT_ID

from sipipe.worker.device import Device, HostDevice
from sipipe.worker.inputs.buffers import InputBuffers, Packed
from sipipe.worker.inputs.kernels import Int32
from sipipe.worker.inputs.model_input import ModelInput


class Placed(NamedTuple):
    """The tensors of a batch of B requests and T tokens, padded to B' and T'."""

    rows: torch.Tensor
    """Rows of the requests' states, int64 [B]."""
    input_ids: torch.Tensor
    """Tokens, int32 [T']."""
    positions: torch.Tensor
    """Positions of the tokens, int64 [T']."""
    is_padding: torch.Tensor
    """Flags of the tokens that pad, bool [T']."""
    query_start_loc: torch.Tensor
    """First token of each request, int32 [B' + 1], which is T behind B."""
    seq_lens: torch.Tensor
    """Lengths of the requests with these tokens, int32 [B'], 0 behind B."""
    logits_indices: torch.Tensor
    """Tokens with logits, int64 [B + drafts]."""


class CacheGroup(NamedTuple):
    """Properties of a KV cache group that its block table depends on."""

    width: int
    """Blocks that a request can have, at most."""
    block_size: int
    """Tokens of a block."""
    window: int
    """Tokens that attention looks back at; 0: all. vLLM 0.33 leaves out blocks before them."""
    mapped: bool
    """True if tokens have slots. Those of a recurrent state have none."""


def cache_groups(tables: Any) -> list[CacheGroup]:
    """The groups of vLLM's ``BlockTables``."""
    widths = [int(table.gpu.shape[1]) for table in tables.block_tables]
    windows = getattr(tables, "sliding_window_reach", None)
    reach = [0] * len(widths) if windows is None else windows.tolist()
    mapped = tables.slot_mapping_enabled.tolist()
    return list(map(CacheGroup, widths, tables.block_sizes, reach, mapped))


class Placement(Protocol):
    """The sets of input buffers, and the way from them to what a stage's device reads."""

    buffers: list[InputBuffers]
    """The sets."""
    groups: list[CacheGroup]
    """KV cache groups whose block tables and slot mappings are prepared. vLLM keeps those of others."""

    def wait_free(self, buffer_set: int) -> None:  # noqa: ARG002
        """Wait until nothing reads the set any more."""
        return

    def ahead(self, inputs: ModelInput) -> Placed | None:  # noqa: ARG002
        """Place the batch without padding, if the device reads it where it was prepared; from the
        preparing thread. None where a graph may pad it, by how much is not known yet."""
        return None

    def begin(self, inputs: ModelInput) -> None:
        """Bring vLLM's own parts up to date with the batch, which is placed next."""

    def place(self, inputs: ModelInput, requests: int, tokens: int) -> Placed:
        """Place the batch, padded to ``requests`` and ``tokens``."""

    def take(self, inputs: ModelInput, tokens: Int32) -> None:
        """Take the tokens of a batch that was placed without them."""
        self.buffers[inputs.buffer_set].input_ids.np[: len(tokens)] = tokens

    def _padded(self, inputs: ModelInput, requests: int, tokens: int) -> InputBuffers:
        """The batch's set, with its padding written."""
        source = self.buffers[inputs.buffer_set]
        used = inputs.num_tokens
        if requests > inputs.num_reqs:
            _pad_requests(source, inputs.num_reqs, requests, used)
        source.is_padding.np[:used] = False
        source.is_padding.np[used:tokens] = True
        return source

    def tables(self, batch: Any) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """Block tables [B', W] of each KV cache group and slot mappings [G, T'] of the batch that was
        placed last."""


class InPlace(Placement):
    """Placement on a CPU: the model reads the set itself, and has read it when the pass returns."""

    def __init__(self, runner: Any, device: Device, sets: int, logits: int) -> None:  # noqa: ARG002
        self.groups = cache_groups(runner.block_tables)
        self.buffers = _sets(runner, self.groups, sets, logits)
        self._source = self.buffers[0]
        self._computed = runner.req_states.num_computed_tokens.gpu.numpy()
        # Nobody reads vLLM's own tables, so writing each new request to them is left out.
        tables = runner.block_tables
        tables.append_block_ids = lambda *_, **__: None
        tables.apply_staged_writes = lambda *_, **__: None

    def ahead(self, inputs: ModelInput) -> Placed:
        return self.place(inputs, inputs.num_reqs, inputs.num_tokens)

    def begin(self, inputs: ModelInput) -> None:
        source = self.buffers[inputs.buffer_set]
        self._source = source
        # M-RoPE and prompt log-probabilities read vLLM's numbers of computed tokens.
        rows = source.rows.np[: inputs.num_reqs]
        self._computed[rows] = source.num_computed_tokens.np[: inputs.num_reqs]

    def place(self, inputs: ModelInput, requests: int, tokens: int) -> Placed:
        source = self._padded(inputs, requests, tokens)
        source.slot_mappings.np[:, inputs.num_tokens : tokens] = PAD_SLOT_ID
        return _placed(source.packed, inputs.num_reqs, requests, tokens, inputs.num_logits)

    def tables(self, batch: Any) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        source = self._source
        requests = batch.num_reqs_after_padding
        for table in source.block_tables:
            table.np[batch.num_reqs : requests] = 0
        return (
            tuple(table.tensor[:requests] for table in source.block_tables),
            source.slot_mappings.tensor[:, : batch.num_tokens_after_padding],
        )


class Copied(Placement):
    """Placement on a GPU: one copy, in the order of the stream, to the addresses that graphs hold.

    Block tables stay vLLM's, because far less changes in them than they hold.

    Its order is tested on an emulated device, its tokens on one GPU (docs/gpu.md).
    """

    def __init__(self, runner: Any, device: Device, sets: int, logits: int) -> None:
        self.groups: list[CacheGroup] = []
        self.buffers = _sets(runner, self.groups, sets, logits, pinned=runner.device.type == "cuda")
        self._runner = runner
        self._device = device
        self._read: list[Any] = [None] * sets
        """Marks of the device behind the last copy from each set."""
        self._target: Packed = runner.input_buffers.packed
        # Decoding asks for the same views again and again.
        self._views = functools.lru_cache(256)(self._view)
        self._attn = runner.prepare_attn

    def wait_free(self, buffer_set: int) -> None:
        if self._read[buffer_set] is not None:
            self._device.use()  # a new thread, as the preparing one, has GPU 0 at first
            # wait: none of its own, `stall_timeout` for the iteration; the device
            self._device.wait(self._read[buffer_set])

    def begin(self, inputs: ModelInput) -> None:
        runner = self._runner
        cached = inputs.output.scheduled_cached_reqs
        index = runner.req_states.req_id_to_index
        for req_id, ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if ids is not None:
                runner.block_tables.append_block_ids(index[req_id], ids, overwrite=False)

    def place(self, inputs: ModelInput, requests: int, tokens: int) -> Placed:
        source = self._padded(inputs, requests, tokens)
        batch = source.packed.batch(inputs.num_tokens)
        self._target.batch(inputs.num_tokens).copy_(batch, non_blocking=True)
        self._read[inputs.buffer_set] = self._device.mark()
        placed, computed = self._views(inputs.num_reqs, requests, tokens, inputs.num_logits)
        self._runner.req_states.num_computed_tokens.gpu[placed.rows] = computed
        return placed

    def take(self, inputs: ModelInput, tokens: Int32) -> None:
        super().take(inputs, tokens)
        source = self.buffers[inputs.buffer_set].input_ids.tensor[: len(tokens)]
        self._target.tensors["input_ids"][: len(tokens)].copy_(source, non_blocking=True)
        self._read[inputs.buffer_set] = self._device.mark()

    def _view(
        self, count: int, requests: int, tokens: int, logits: int
    ) -> tuple[Placed, torch.Tensor]:
        """Views of a placed batch, and of the computed tokens of its requests."""
        placed = _placed(self._target, count, requests, tokens, logits)
        return placed, self._target.tensors["num_computed_tokens"][:count]

    def tables(self, batch: Any) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        tables: tuple[tuple[torch.Tensor, ...], torch.Tensor] = self._attn(batch)
        return tables


def _placed(packed: Packed, count: int, requests: int, tokens: int, logits: int) -> Placed:
    """Views of a batch of ``count`` requests, padded to ``requests`` and ``tokens``."""
    tensors = packed.tensors
    return Placed(
        rows=tensors["rows"][:count],
        input_ids=tensors["input_ids"][:tokens],
        positions=tensors["positions"][:tokens],
        is_padding=tensors["is_padding"][:tokens],
        query_start_loc=tensors["query_start_loc"][: requests + 1],
        seq_lens=tensors["seq_lens"][:requests],
        logits_indices=tensors["logits_indices"][:logits],
    )


def placement_of(runner: Any, device: Device, sets: int, logits: int) -> Placement:
    """The placement for the runner's device, with ``sets`` of input buffers for ``logits`` rows of
    logits at most."""
    if isinstance(device, HostDevice):
        return InPlace(runner, device, sets, logits)
    return Copied(runner, device, sets, logits)


def _sets(
    runner: Any, groups: list[CacheGroup], sets: int, logits: int, *, pinned: bool = False
) -> list[InputBuffers]:
    """New sets of input buffers of the runner's sizes."""
    tokens = int(runner.max_num_tokens)
    requests = int(runner.max_num_reqs)
    widths = [group.width for group in groups]
    return [InputBuffers(tokens, requests, logits, widths, pinned=pinned) for _ in range(sets)]


def _pad_requests(source: InputBuffers, count: int, requests: int, tokens: int) -> None:
    """Write empty requests behind the ``count`` of a batch of ``tokens``, up to ``requests``."""
    for starts in (source.query_start_loc, source.starts):
        starts.np[count + 1 : requests + 1] = tokens
    for lengths in (source.seq_lens, source.lengths):
        lengths.np[count:requests] = 0
