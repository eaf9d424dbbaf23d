"""Where a prepared batch is when the model reads it: in the set itself, or copied from there.

Who runs here: the device thread; in :meth:`Placement.wait_free` and :meth:`Placement.ahead` the
preparing thread. Guarantee: a set is not written while anything reads it (when it was taken, says
:mod:`sipipe.worker.double_buffer`; here is whether the copies that were launched then are done).
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
    """[B] int64."""
    input_ids: torch.Tensor
    """[T'] int32."""
    positions: torch.Tensor
    """[T'] int64."""
    is_padding: torch.Tensor
    """[T'] bool."""
    query_start_loc: torch.Tensor
    """[B' + 1] int32, T behind B."""
    seq_lens: torch.Tensor
    """[B'] int32, 0 behind B."""
    logits_indices: torch.Tensor
    """[B + drafts] int64."""


class CacheGroup(NamedTuple):
    """What there is to know of a KV cache group."""

    width: int
    """The most blocks that a request can have."""
    block_size: int
    window: int
    """0, or tokens that attention looks back; vLLM 0.33 leaves out blocks before them."""
    mapped: bool
    """Whether tokens have slots; a recurrent state's have none."""


def cache_groups(tables: Any) -> list[CacheGroup]:
    """Those of vLLM's ``BlockTables``."""
    widths = [int(table.gpu.shape[1]) for table in tables.block_tables]
    windows = getattr(tables, "sliding_window_reach", None)
    reach = [0] * len(widths) if windows is None else windows.tolist()
    mapped = tables.slot_mapping_enabled.tolist()
    return list(map(CacheGroup, widths, tables.block_sizes, reach, mapped))


class Placement(Protocol):
    """What a stage's device reads."""

    buffers: list[InputBuffers]
    groups: list[CacheGroup]
    """Whose block tables and slot mappings are prepared too; of others vLLM keeps its own."""

    def wait_free(self, buffer_set: int) -> None:  # noqa: ARG002
        """Return when nothing reads the set any more."""
        return

    def ahead(self, inputs: ModelInput) -> Placed | None:  # noqa: ARG002
        """The batch as it is, if the device reads it where it was prepared; the preparing thread's.
        None: what a graph pads is not known yet."""
        return None

    def begin(self, inputs: ModelInput) -> None:
        """The batch is placed next: vLLM's own parts learn of it what they look at."""

    def place(self, inputs: ModelInput, requests: int, tokens: int) -> Placed:
        """The batch, padded to ``requests`` and ``tokens``."""

    def take(self, inputs: ModelInput, tokens: Int32) -> None:
        """The tokens of a batch that was placed without them."""
        self.buffers[inputs.buffer_set].input_ids.np[: len(tokens)] = tokens

    def _padded(self, inputs: ModelInput, requests: int, tokens: int) -> InputBuffers:
        source, count, used = self.buffers[inputs.buffer_set], inputs.num_reqs, inputs.num_tokens
        if requests > count:
            _pad_requests(source, count, requests, used)
        source.is_padding.np[:used], source.is_padding.np[used:tokens] = False, True
        return source

    def tables(self, batch: Any) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """Block tables [B', W] of each KV cache group and slot mappings [G, T'], placed last."""


class InPlace(Placement):
    """On a CPU: the set is what the model reads. The pass has read it when it returns."""

    def __init__(self, runner: Any, device: Device, sets: int, logits: int) -> None:  # noqa: ARG002
        self.groups = cache_groups(runner.block_tables)
        self.buffers = _sets(runner, self.groups, sets, logits)
        self._source = self.buffers[0]
        self._computed = runner.req_states.num_computed_tokens.gpu.numpy()
        # Tables of vLLM's own are not read; a request that is added would be written to them.
        tables = runner.block_tables
        tables.append_block_ids = tables.apply_staged_writes = lambda *_, **__: None

    def ahead(self, inputs: ModelInput) -> Placed:
        return self.place(inputs, inputs.num_reqs, inputs.num_tokens)

    def begin(self, inputs: ModelInput) -> None:
        source = self._source = self.buffers[inputs.buffer_set]
        # M-RoPE and prompt log-probabilities read vLLM's.
        rows = source.rows.np[: inputs.num_reqs]
        self._computed[rows] = source.num_computed_tokens.np[: inputs.num_reqs]

    def place(self, inputs: ModelInput, requests: int, tokens: int) -> Placed:
        source, count = self._padded(inputs, requests, tokens), inputs.num_reqs
        source.slot_mappings.np[:, inputs.num_tokens : tokens] = PAD_SLOT_ID
        return _placed(source.packed, count, requests, tokens, inputs.num_logits)

    def tables(self, batch: Any) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        source, requests = self._source, batch.num_reqs_after_padding
        for table in source.block_tables:
            table.np[batch.num_reqs : requests] = 0
        return (
            tuple(table.tensor[:requests] for table in source.block_tables),
            source.slot_mappings.tensor[:, : batch.num_tokens_after_padding],
        )


class Copied(Placement):
    """On a GPU: one copy in the order of the stream to the addresses that graphs know.

    Block tables stay vLLM's: what changes is far less than what they hold.

    Its order is tested on an emulated device, its tokens on one GPU (docs/gpu.md).
    """

    def __init__(self, runner: Any, device: Device, sets: int, logits: int) -> None:
        self.groups: list[CacheGroup] = []
        self.buffers = _sets(runner, self.groups, sets, logits, pinned=runner.device.type == "cuda")
        self._runner = runner
        self._device = device
        self._read: list[Any] = [None] * sets
        """Of each set, the device's mark behind the copy from it."""
        self._there: Packed = runner.input_buffers.packed
        self._views = functools.lru_cache(256)(self._view)  # decoding asks for the same ones
        self._attn = runner.prepare_attn

    def wait_free(self, buffer_set: int) -> None:
        if self._read[buffer_set] is not None:
            self._device.use()  # the preparing thread's is GPU 0 until somebody says otherwise
            # wait: none of its own, `stall_timeout` for the iteration; the device
            self._device.wait(self._read[buffer_set])

    def begin(self, inputs: ModelInput) -> None:
        runner, cached = self._runner, inputs.output.scheduled_cached_reqs
        index = runner.req_states.req_id_to_index
        for req_id, ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if ids is not None:
                runner.block_tables.append_block_ids(index[req_id], ids, overwrite=False)

    def place(self, inputs: ModelInput, requests: int, tokens: int) -> Placed:
        source = self._padded(inputs, requests, tokens)
        count, used = inputs.num_reqs, inputs.num_tokens
        batch = source.packed.batch(used)
        self._there.batch(used).copy_(batch, non_blocking=True)
        self._read[inputs.buffer_set] = self._device.mark()
        placed, computed = self._views(count, requests, tokens, inputs.num_logits)
        self._runner.req_states.num_computed_tokens.gpu[placed.rows] = computed
        return placed

    def take(self, inputs: ModelInput, tokens: Int32) -> None:
        super().take(inputs, tokens)
        source = self.buffers[inputs.buffer_set].input_ids.tensor[: len(tokens)]
        self._there.tensors["input_ids"][: len(tokens)].copy_(source, non_blocking=True)
        self._read[inputs.buffer_set] = self._device.mark()

    def _view(
        self, count: int, requests: int, tokens: int, logits: int
    ) -> tuple[Placed, torch.Tensor]:
        """What is placed, and the computed tokens of its requests."""
        placed = _placed(self._there, count, requests, tokens, logits)
        return placed, self._there.tensors["num_computed_tokens"][:count]

    def tables(self, batch: Any) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        found: tuple[tuple[torch.Tensor, ...], torch.Tensor] = self._attn(batch)
        return found


def _placed(packed: Packed, count: int, requests: int, tokens: int, logits: int) -> Placed:
    found = packed.tensors
    return Placed(
        found["rows"][:count],
        found["input_ids"][:tokens],
        found["positions"][:tokens],
        found["is_padding"][:tokens],
        found["query_start_loc"][: requests + 1],
        found["seq_lens"][:requests],
        found["logits_indices"][:logits],
    )


def placement_of(runner: Any, device: Device, sets: int, logits: int) -> Placement:
    """How the runner's device comes to ``sets`` of input buffers, with ``logits`` rows at most."""
    return (InPlace if isinstance(device, HostDevice) else Copied)(runner, device, sets, logits)


def _sets(
    runner: Any, groups: list[CacheGroup], sets: int, logits: int, *, pinned: bool = False
) -> list[InputBuffers]:
    tokens, requests = int(runner.max_num_tokens), int(runner.max_num_reqs)
    widths = [group.width for group in groups]
    return [InputBuffers(tokens, requests, logits, widths, pinned=pinned) for _ in range(sets)]


def _pad_requests(source: InputBuffers, count: int, requests: int, tokens: int) -> None:
    for starts in (source.query_start_loc, source.starts):
        starts.np[count + 1 : requests + 1] = tokens
    for lengths in (source.seq_lens, source.lengths):
        lengths.np[count:requests] = 0
