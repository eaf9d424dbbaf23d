"""Logits of the last stage: their computation, and their place in BIC-L.

vLLM gathers the tensor-parallel shards of the logits so that its own sampler sees whole rows.
SiPipe's samplers read shards from shared memory, where rank r's columns stand beside the others'
(paper section 4.1). The seam is ``_gather_logits`` of vLLM's ``LogitsProcessor``, replaced on the
model's instance. Where vLLM lets the memory of the projection's result be chosen, it is BIC-L's;
elsewhere the result is copied there.

Where the projection is shared out, the last stage's final hidden states, of the rows that sample,
go to every other stage on a link of their own. That stage multiplies them by its rows of the matrix
(:mod:`sipipe.worker.projection.thread`). Its logits go into the same entry of BIC-L as everybody's:
samplers draw when the last writer is done. The rows come from the last stage's loaded model,
whatever its checkpoint looks like, and the product is vLLM's.

Who runs here: the device thread, which computes; the publisher's and the projection's threads, which
hand over; the thread that follows BIC-I, which closes.
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
    """One call of vLLM's ``LogitsProcessor``: copies of its arguments and of its result. A model may
    change the originals in place."""

    args: list[Any]
    kwargs: dict[str, Any]
    result: Any


class StageLogits:
    """Computes logits of hidden-state rows.

    A rank computes only its own columns where the model allows it: it has a tensor-parallel
    projection with one ``LogitsProcessor``, no LoRA and no added vocabulary. Elsewhere vLLM gathers
    whole rows. All ranks come to the same answer, from the configuration."""

    def __init__(self, vllm_runner: Any) -> None:
        self._model = vllm_runner.model
        self._gathers = True
        """True while vLLM's processor gathers its shards."""
        self.vocab_size: int = vllm_runner.model_config.get_vocab_size()
        """Columns of a whole row, V."""
        self.shard: int | None = None
        """Columns that each rank computes. Rank r has those from r x shard on, as far as the vocabulary
        goes, which is padded to a multiple of 64 or more. None where rows are gathered."""
        self.bounds: tuple[int, ...] = ()
        """First column of each rank, and V at the end; empty where rows are gathered."""
        self.columns: tuple[int, int] = (0, self.vocab_size)
        """This rank's columns, first and last + 1. The ranks' ranges follow one another and cover
        the vocabulary; a range may be empty."""
        processors = [m for m in self._model.modules() if isinstance(m, LogitsProcessor)]
        plain = [type(m) for m in processors] == [LogitsProcessor]
        self.processor = processors[0] if plain else None
        """vLLM's processor, which multiplies by the output projection; None where the model has several
        or one of its own class."""
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
        gather = processors[0]._gather_logits
        self._gather = gather
        processors[0]._gather_logits = lambda logits: gather(logits) if self._gathers else logits

    def compute(
        self, hidden: torch.Tensor, into: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Logits [n, columns of this rank] of hidden states [n, H], in the projection's dtype; None on
        a rank that vLLM's gather leaves without logits.

        The result lies in ``into``, which has its shape and dtype, if the projection lets its memory
        be chosen. If not, ``into`` may hold anything."""
        self._gathers = self.shard is None
        try:
            with placed_in(into, hidden):
                logits: torch.Tensor | None = self._model.compute_logits(hidden)
        finally:
            self._gathers = True
        if self.shard is None:
            return logits
        assert logits is not None
        start, stop = self.columns
        return logits[:, : stop - start]  # the rest is padding of the shard

    def watch(self, hidden: torch.Tensor) -> tuple[torch.Tensor | None, list[Call]]:
        """Compute as :meth:`compute`; returns also the calls of vLLM's processor meanwhile."""
        calls: list[Call] = []

        def record(_: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
            copies = [x.clone() if isinstance(x, torch.Tensor) else x for x in (*args, result)]
            calls.append(Call(args=copies[:-1], kwargs=kwargs, result=copies[-1]))

        assert self.processor is not None
        with self.processor.register_forward_hook(record, with_kwargs=True):
            logits = self.compute(hidden.clone())
        return logits, calls

    def compute_first(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """Compute as :meth:`compute`, and gather whole rows from now on if the model does more to its
        logits than its processor does. It would do that to the first columns of the vocabulary, which
        a shard may not have. Every rank calls it, and comes to the same answer."""
        if self.shard is None or self.processor is None:
            return self.compute(hidden)
        logits, calls = self.watch(hidden)
        assert logits is not None
        if len(calls) == 1 and torch.equal(calls[0].result[:, : logits.shape[1]], logits):
            return logits
        self.shard = None
        self.bounds = ()
        self.columns = (0, self.vocab_size)
        return self.compute(hidden)

    def gather_rows(self, columns: torch.Tensor) -> torch.Tensor | None:
        """Whole rows [n, V] from the columns that :meth:`compute` gave each rank. Every rank calls it.
        None on a rank that vLLM's gather leaves without logits."""
        if self.shard is None:
            return columns
        padding = self.shard - columns.shape[1]
        if padding:
            columns = functional.pad(columns, (0, padding))
        rows = self._gather(columns)
        return None if rows is None else rows[:, : self.vocab_size]


class LogitsHandover(LogitsWriter):
    """This rank's writer of BIC-L, for tensors."""

    def place_for(self, row: int, hidden: torch.Tensor) -> torch.Tensor | None:
        """The channel's memory for the logits [n, V of this rank] of ``hidden`` [n, H], from ``row`` on.
        Logits that are computed there need no copy; the rows are the iteration's until it was drawn.
        None where these columns are not contiguous, or ``hidden`` is on another device."""
        if not hidden.is_cpu:
            return None
        place = self.rows(row, len(hidden))
        return place if place.is_contiguous() else None

    def rows(self, row: int, rows: int) -> torch.Tensor:
        """The channel's memory for logits [rows, V of this rank] from ``row`` on."""
        return self._tensor(self.part(row, rows))

    @contextmanager
    def entry(self, iteration: int, row: int, rows: int, timeout: float) -> Iterator[torch.Tensor]:
        """The channel's memory for logits [rows, V of this rank] of ``iteration``, from ``row`` on.
        They are published when the body ends without an error. Raises StallError: a late sampler
        still reads the entry after ``timeout`` seconds."""
        # wait: `timeout`, which is stall_timeout; a late sampler, its end
        with self.acquire(iteration, rows, row, timeout) as region:
            yield self._tensor(region)

    def _tensor(self, region: npt.NDArray[Any]) -> torch.Tensor:
        tensor = torch.from_numpy(region)
        # NumPy has no bfloat16, so the channel holds its bits as 16-bit integers.
        is_bfloat16 = tensor.dtype in (torch.uint16, torch.int16)
        return tensor.view(torch.bfloat16) if is_bfloat16 else tensor


def placed_in(into: torch.Tensor | None, hidden: torch.Tensor) -> AbstractContextManager[Any]:
    """Have a product of ``hidden`` that is computed in the body lie in ``into``, if that is possible."""
    if into is None or into.device != hidden.device or not into.is_contiguous():
        return nullcontext()
    return _AllocatedIn(into)


class _AllocatedIn(TorchFunctionMode):
    """Answers the first ``torch.empty`` of the shape and dtype of ``into`` with ``into``. So vLLM's CPU
    projection (``onednn_mm``) allocates its result. Fresh memory for 10 MB in each iteration costs a
    copy, and at times page faults that take longer than the projection does."""

    def __init__(self, into: torch.Tensor) -> None:
        super().__init__()
        self._into: torch.Tensor | None = into

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        into = self._into
        kwargs = kwargs or {}
        if (
            func is torch.empty
            and into is not None
            and args == (into.shape,)
            and kwargs == {"dtype": into.dtype}
        ):
            self._into = None
            return into
        return func(*args, **kwargs)
