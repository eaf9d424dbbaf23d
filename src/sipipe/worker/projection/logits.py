"""Logits of the last stage, into their BIC-L entry, and where its output projection is computed.

vLLM gathers the tensor-parallel shards of the logits so that its own sampler sees whole rows.
SiPipe's samplers read shards from shared memory, where rank r's columns stand beside the others'
(paper section 4.1). The seam is ``_gather_logits`` of vLLM's ``LogitsProcessor``, replaced on the
model's instance. The projection writes its result into the entry itself where vLLM lets its memory
be chosen, else it is copied there.

Shared out, the last stage's final hidden states, of the rows that sample, go to every other stage on
a link of their own. There they are multiplied by that stage's rows of the matrix
(:mod:`sipipe.worker.projection.thread`), whose logits go into the same place of BIC-L as
everybody's: samplers draw when the last writer is done. The rows come from the last stage's loaded
model, whatever its checkpoint looks like, and the product is vLLM's.

Who runs here: the device thread computes; the publisher's and the projection's threads hand over;
whoever follows BIC-I closes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy.typing as npt
import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from vllm.model_executor.layers.logits_processor import LogitsProcessor

from sipipe.ipc.ring.logits import LogitsWriter


class Call(NamedTuple):
    """What vLLM's ``LogitsProcessor`` got, and what it made of it: copies."""

    args: list[Any]
    kwargs: dict[str, Any]
    result: Any


class StageLogits:
    """Computes logits of hidden-state rows. A rank computes its own columns only where the model
    allows it: a tensor-parallel projection with one ``LogitsProcessor``, no LoRA, no added
    vocabulary. Else vLLM gathers rows. All ranks find the same, from the configuration."""

    def __init__(self, vllm_runner: Any) -> None:
        self._model = vllm_runner.model
        self._whole_rows = True
        self.vocab_size: int = vllm_runner.model_config.get_vocab_size()
        """Columns of a whole row."""
        self.shard: int | None = None
        """Columns that each rank computes: rank r has r x shard and those that follow, as far as
        the vocabulary goes (it is padded to a multiple of 64 and more). None: whole rows."""
        self.bounds: tuple[int, ...] = ()
        """First column of each rank, and V at the end; empty: whole rows."""
        self.columns: tuple[int, int] = (0, self.vocab_size)
        """This rank's columns, first and last + 1. The ranks' ranges follow one another and cover
        the vocabulary; a range may be empty."""
        processors = [m for m in self._model.modules() if isinstance(m, LogitsProcessor)]
        plain = [type(m) for m in processors] == [LogitsProcessor]
        self.processor = processors[0] if plain else None
        """vLLM's, which projects; None where the model has another or several."""
        layer: Any = getattr(self._model, "lm_head", None)
        indices = getattr(layer, "shard_indices", None)
        if (
            len(processors) != 1
            or indices is None
            or layer.tp_size == 1
            or vllm_runner.lora_config is not None
            or indices.num_added_elements
            or int(processors[0].org_vocab_size) != self.vocab_size
        ):
            return
        self.shard = int(layer.num_embeddings_per_partition)
        starts = (rank * self.shard for rank in range(layer.tp_size + 1))
        self.bounds = tuple(min(start, self.vocab_size) for start in starts)
        self.columns = (self.bounds[layer.tp_rank], self.bounds[layer.tp_rank + 1])
        self._gather = gather = processors[0]._gather_logits
        processors[0]._gather_logits = lambda logits: gather(logits) if self._whole_rows else logits

    def compute(
        self, hidden: torch.Tensor, into: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """[n, H] to [n, columns of this rank], in the projection's dtype; None on a rank that vLLM's
        gather leaves without logits. The result lies in ``into``, of its shape and dtype, if the
        projection lets its memory be chosen; otherwise that holds anything."""
        self._whole_rows = self.shard is None
        try:
            with placed_in(into, hidden):
                logits: torch.Tensor | None = self._model.compute_logits(hidden)
        finally:
            self._whole_rows = True
        if self.shard is None:
            return logits
        assert logits is not None
        start, stop = self.columns
        return logits[:, : stop - start]  # the rest is padding of the shard

    def watch(self, hidden: torch.Tensor) -> tuple[torch.Tensor | None, list[Call]]:
        """What :meth:`compute` gives, and what was given to vLLM's processor meanwhile."""
        calls: list[Call] = []

        def note(_: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
            # Copies: a model may change either where it lies.
            copied = [x.clone() if isinstance(x, torch.Tensor) else x for x in (*args, result)]
            calls.append(Call(copied[:-1], kwargs, copied[-1]))

        assert self.processor is not None
        with self.processor.register_forward_hook(note, with_kwargs=True):
            logits = self.compute(hidden.clone())
        return logits, calls

    def settle(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """What :meth:`compute` gives for some rows of hidden states; whole rows from now on where
        the model does more to its logits than its processor, as it would to the first columns of the
        vocabulary. Every rank calls it, and finds the same."""
        if self.shard is None or self.processor is None:
            return self.compute(hidden)
        logits, calls = self.watch(hidden)
        assert logits is not None
        if len(calls) == 1 and torch.equal(calls[0].result[:, : logits.shape[1]], logits):
            return logits
        self.shard, self.bounds, self.columns = None, (), (0, self.vocab_size)
        return self.compute(hidden)

    def whole(self, columns: torch.Tensor) -> torch.Tensor | None:
        """Whole rows, from what :meth:`compute` gave each rank; every rank calls it. None on a rank
        that vLLM's gather leaves without logits."""
        if self.shard is None:
            return columns
        if missing := self.shard - columns.shape[1]:
            columns = functional.pad(columns, (0, missing))
        rows = self._gather(columns)
        return None if rows is None else rows[:, : self.vocab_size]


class LogitsHandover(LogitsWriter):
    """This rank's writer of BIC-L, by tensors."""

    def ahead(self, row: int, hidden: torch.Tensor) -> torch.Tensor | None:
        """Where to compute the logits [n, V of this rank] of ``hidden`` [n, H], so that there is
        nothing to copy: the rows from ``row`` on, which are the iteration's until it was drawn. None
        where those columns do not lie together, or ``hidden`` is on another device."""
        if not hidden.is_cpu:
            return None
        place = self.rows(row, len(hidden))
        return place if place.is_contiguous() else None

    def rows(self, row: int, rows: int) -> torch.Tensor:
        """The channel's memory for logits [rows, V of this rank] from ``row`` on."""
        return self._tensor(self.part(row, rows))

    @contextmanager
    def entry(self, iteration: int, row: int, rows: int, timeout: float) -> Iterator[torch.Tensor]:
        """Where logits [rows, V of this rank] of ``iteration`` go, from ``row`` on; the samplers have
        them when the block ends well. StallError: a late one still reads it after ``timeout`` s."""
        # wait: `timeout`, which is stall_timeout; a late sampler, its end
        with self.acquire(iteration, rows, row, timeout) as region:
            yield self._tensor(region)

    def _tensor(self, region: npt.NDArray[Any]) -> torch.Tensor:
        tensor = torch.from_numpy(region)
        # bfloat16 has no NumPy type: its bits travel.
        bits = tensor.dtype in (torch.uint16, torch.int16)
        return tensor.view(torch.bfloat16) if bits else tensor


def placed_in(into: torch.Tensor | None, hidden: torch.Tensor) -> AbstractContextManager[Any]:
    """While active, a product of ``hidden`` lies in ``into``, if that can be."""
    if into is None or into.device != hidden.device or not into.is_contiguous():
        return nullcontext()
    return _AllocatedIn(into)


class _AllocatedIn(TorchFunctionMode):
    """Gives ``into`` to the first ``torch.empty`` of its shape and dtype, as vLLM's CPU projection
    (``onednn_mm``) allocates its result. Fresh memory for 10 MB in each iteration costs a copy, and
    at times page faults that take longer than the projection does."""

    def __init__(self, into: torch.Tensor) -> None:
        super().__init__()
        self._into: torch.Tensor | None = into

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        into, kwargs = self._into, kwargs or {}
        if (
            func is torch.empty
            and into is not None
            and args == (into.shape,)
            and kwargs == {"dtype": into.dtype}
        ):
            self._into = None
            return into
        return func(*args, **kwargs)
