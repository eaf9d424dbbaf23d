"""Sequence columns: what a sampler keeps of each sequence, updated by one token an iteration.

Who runs here: one thread. A sampler process owns one `SequenceColumns`; nothing is shared but the
logits, which are only read. `SequenceColumns.sample` releases the GIL while kernels run.

Guarantee: a drawn token depends only on (parameters, seed, prompt, output so far, logits), never on
the batch, the column a sequence happens to have, or whether its state was kept or rebuilt.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sipipe.messages.params import LogprobsMode, SequenceParams
from sipipe.sampler.kernels.rows import sample_rows
from sipipe.sampler.kernels.state import (
    PROCESSED_LOGITS,
    PROCESSED_LOGPROBS,
    RAW_LOGITS,
    RAW_LOGPROBS,
    Columns,
    Output,
)
from sipipe.sampler.kernels.work import Work, make_work
from sipipe.sampler.layout import Layout, Reader, writeable
from sipipe.sampler.results import Logprobs, SampleResult
from sipipe.sampler.seen import SeenTables
from sipipe.sampler.special import Special, is_special, make_extras
from sipipe.sampler.thinking import ThinkingBudget

_MODES = {
    "raw_logprobs": RAW_LOGPROBS,
    "raw_logits": RAW_LOGITS,
    "processed_logprobs": PROCESSED_LOGPROBS,
    "processed_logits": PROCESSED_LOGITS,
}
_SEED_MASK = (1 << 64) - 1


class SequenceColumns:
    """The sequences of one sampler, by handles (any integers) that the caller chooses.

    ``vocab_size`` is the model's; logits may be wider (padded), the rest is ignored. Memory: about
    7 MB of work arrays at a vocabulary of 151,936 (10 MB more once the column layout is used), 13 to
    27 bytes per distinct token seen by a sequence that has penalties, and nothing for others.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        logprobs_mode: LogprobsMode = "raw_logprobs",
        max_columns: int | None = None,
        reasoning_start_token_ids: Sequence[int] = (),
        reasoning_end_token_ids: Sequence[int] = (),
        work: Work | None = None,
    ) -> None:
        """``max_columns``: refuse to hold more sequences (None: no limit).

        The reasoning token ids are those of vLLM's ``ReasoningConfig``; without end tokens a
        ``thinking_token_budget`` has no effect, as in vLLM. ``work`` is memory of `make_work` to use
        instead of one's own, by one thread at a time.
        """
        if vocab_size < 1:
            raise ValueError(f"vocab_size must be at least 1, got {vocab_size}")
        if logprobs_mode not in _MODES:
            raise ValueError(f"logprobs_mode must be one of {', '.join(_MODES)}: {logprobs_mode}")
        self.vocab_size = vocab_size
        self.logprobs_mode = logprobs_mode
        self._mode = _MODES[logprobs_mode]
        self._max_columns = max_columns
        self._reasoning = (list(reasoning_start_token_ids), list(reasoning_end_token_ids))
        self._index: dict[int, int] = {}
        self._room = 0
        self._free: list[int] = []
        self._special: dict[int, Special] = {}
        self._observers: dict[int, Special] = {}
        self._seen = SeenTables(0)
        self._work: Work = make_work(vocab_size) if work is None else work
        self._reader = Reader(vocab_size)
        self._arrays: dict[str, npt.NDArray[Any]] = {
            "temperature": np.zeros(0, np.float32),
            "top_k": np.zeros(0, np.int32),
            "top_p": np.zeros(0, np.float64),
            "min_p": np.zeros(0, np.float64),
            "repetition": np.zeros(0, np.float32),
            "presence": np.zeros(0, np.float32),
            "frequency": np.zeros(0, np.float32),
            "seed": np.zeros(0, np.uint64),
            "position": np.zeros(0, np.int64),
        }
        self._has_special = np.zeros(0, np.bool_)
        self._grow(16)

    def __len__(self) -> int:
        return len(self._index)

    def __contains__(self, handle: int) -> bool:
        return handle in self._index

    @property
    def handles(self) -> list[int]:
        """Handles of all sequences, in the order they joined."""
        return list(self._index)

    @property
    def state_nbytes(self) -> int:
        """Bytes kept for sequences (work arrays not included)."""
        return self._seen.nbytes + sum(array.nbytes for array in self._arrays.values())

    def join(
        self,
        handle: int,
        params: SequenceParams,
        prompt_token_ids: Sequence[int] | npt.NDArray[np.integer[Any]] = (),
        output_token_ids: Sequence[int] | npt.NDArray[np.integer[Any]] = (),
    ) -> None:
        """Take in a sequence, new or resumed (then with the output tokens it already has).

        ``params.seed`` None counts as 0: derive one per request with `derive_seed`. Raises
        ValueError for token ids outside the vocabulary, a handle in use, or too many columns.
        """
        if handle in self._index:
            raise ValueError(f"handle {handle} has already joined")
        if self._max_columns is not None and len(self._index) >= self._max_columns:
            raise ValueError(f"max_columns: already {self._max_columns} sequences")
        params.check_vocabulary(self.vocab_size)
        output = self._tokens("output_token_ids", output_token_ids)
        prompt = None
        if params.repetition_penalty != 1.0:
            prompt = self._tokens("prompt_token_ids", prompt_token_ids)
        if not self._free:
            self._grow(2 * self._room)
        column = self._free.pop()
        arrays = self._arrays
        arrays["temperature"][column] = params.temperature
        arrays["top_k"][column] = max(params.top_k, 0) if params.top_k < self.vocab_size else 0
        # vLLM holds both in float32; so does this, to cut at the same place.
        arrays["top_p"][column] = np.float32(params.top_p)
        arrays["min_p"][column] = np.float32(params.min_p)
        arrays["repetition"][column] = params.repetition_penalty
        arrays["presence"][column] = params.presence_penalty
        arrays["frequency"][column] = params.frequency_penalty
        arrays["seed"][column] = (params.seed or 0) & _SEED_MASK
        arrays["position"][column] = output.size
        if params.penalized:
            self._seen.open(column, prompt, output)
        if is_special(params):
            special = Special(params, self._thinking(params, prompt_token_ids), output.tolist())
            if special.needs_tokens:
                self._observers[column] = special
            self._special[column] = special
            self._has_special[column] = True
        self._index[handle] = column

    def leave(self, handle: int) -> None:
        """Forget a sequence: finished, aborted, or preempted (it may join again)."""
        column = self._column(handle)
        del self._index[handle]
        self._seen.close(column)
        self._special.pop(column, None)
        self._has_special[column] = False
        self._observers.pop(column, None)
        self._free.append(column)

    def discard(self, handle: int) -> None:
        """Forget a sequence if it is here."""
        if handle in self._index:
            self.leave(handle)

    def move(self, handle: int, to: int) -> None:
        """Rename a sequence; its state stays where it is."""
        if to in self._index:
            raise ValueError(f"handle {to} has already joined")
        self._index[to] = self._index.pop(handle)

    def append(self, handles: int | Iterable[int], token_ids: int | Iterable[int]) -> None:
        """One more output token for each of ``handles``, as the scheduler has accepted it."""
        if isinstance(handles, int | np.integer):
            handles, token_ids = [int(handles)], [int(token_ids)]  # type: ignore[arg-type]
        columns = self._columns(handles)
        added = self._tokens("token_ids", token_ids)  # type: ignore[arg-type]
        if added.size != columns.size:
            raise ValueError(f"token_ids: {added.size} for {columns.size} handles")
        self._seen.append(self._arrays["position"], columns, added)
        if self._observers:
            for column, token in zip(columns.tolist(), added.tolist(), strict=True):
                special = self._observers.get(column)
                if special is not None:
                    special.observe(token)

    def position(self, handle: int) -> int:
        """Output tokens so far: the position of the next draw."""
        return int(self._arrays["position"][self._column(handle)])

    def sample(
        self,
        handles: Iterable[int],
        logits: npt.NDArray[Any],
        rows: Sequence[int] | npt.NDArray[np.integer[Any]] | None = None,
        *,
        layout: Layout = "rows",
        bitmask: npt.NDArray[np.int32] | None = None,
        bitmask_rows: Sequence[int] | npt.NDArray[np.integer[Any]] | None = None,
    ) -> SampleResult:
        """Draw one token for each of ``handles``; nothing is appended.

        ``logits``: float32, float16, or bfloat16 as uint16 bits, never written to. Shape [B, V'] in
        layout "rows" (or [t, B, V'/t], the shards of t tensor-parallel ranks), [V', B] in layout
        "columns", where V' >= vocab_size. ``rows[i]`` is the row (or column) of ``handles[i]``,
        by default i. ``bitmask``: int32 [m, >= ceil(vocab_size / 32)], bit set: token allowed, of
        row ``bitmask_rows[i]`` for ``handles[i]``, -1 for none (by default row i).
        """
        columns = self._columns(handles)
        n = columns.size
        places = np.arange(n) if rows is None else np.asarray(rows, np.int64)
        if places.size != n:
            raise ValueError(f"rows: {places.size} for {n} handles")
        mask, mask_rows = self._bitmask(n, bitmask, bitmask_rows)
        specials = {
            int(i): self._special[columns[i]] for i in np.flatnonzero(self._has_special[columns])
        }
        extras, width = make_extras(
            n, specials, self._arrays["position"][columns], self.vocab_size, mask, mask_rows
        )
        out = Output(
            np.full(n, -1, np.int32),
            np.zeros(n, np.uint8),
            np.zeros((n, width), np.int32),
            np.full((n, width), -np.inf, np.float32),
            np.zeros(n, np.int32),
        )
        state = Columns(
            **self._arrays,
            seen_start=self._seen.start,
            seen_used=self._seen.used,
            seen_tokens=self._seen.tokens,
            seen_counts=self._seen.counts,
        )
        work, mode, vocab = self._work, self._mode, self.vocab_size
        for part in self._reader.parts(logits, places, layout):
            sample_rows(
                part.flat, part.starts, part.which, vocab, columns, state, extras, mode, work, out
            )
        logprobs = {}
        if width:
            for i in np.flatnonzero((extras.wanted >= 0) & (out.codes == 0)).tolist():
                own = 1 + int(extras.wanted[i])
                logprobs[i] = Logprobs(
                    out.score_ids[i, :own], out.scores[i, :own], int(out.ranks[i])
                )
        return SampleResult(out.tokens, out.codes, logprobs)

    def _thinking(self, params: SequenceParams, prompt: Iterable[int]) -> ThinkingBudget | None:
        start, end = self._reasoning
        if params.thinking_token_budget is None or not end:
            return None
        tokens = [int(token) for token in prompt]
        return ThinkingBudget(params.thinking_token_budget, start, end, tokens)

    def _bitmask(
        self,
        n: int,
        bitmask: npt.NDArray[np.int32] | None,
        rows: Sequence[int] | npt.NDArray[np.integer[Any]] | None,
    ) -> tuple[npt.NDArray[np.int32] | None, npt.NDArray[np.int32] | None]:
        if bitmask is None:
            return None, None
        words = -(-self.vocab_size // 32)
        if bitmask.ndim != 2 or bitmask.dtype != np.int32 or bitmask.shape[1] < words:
            raise ValueError(f"bitmask must be int32 [m, >= {words}], got {bitmask.shape}")
        where = np.arange(n) if rows is None else np.asarray(rows)
        if where.size != n or (n and not (where.min() >= -1 and where.max() < len(bitmask))):
            raise ValueError(f"bitmask_rows must be {n} rows in [-1, {len(bitmask)})")
        return writeable(np.ascontiguousarray(bitmask)), where.astype(np.int32)

    def _tokens(
        self, name: str, tokens: Sequence[int] | npt.NDArray[np.integer[Any]]
    ) -> npt.NDArray[np.int32]:
        array = np.ascontiguousarray(tokens, np.int32)
        if array.size and not (array.min() >= 0 and array.max() < self.vocab_size):
            raise ValueError(f"{name}: token ids must be in [0, {self.vocab_size})")
        return writeable(array)

    def _column(self, handle: int) -> int:
        try:
            return self._index[handle]
        except KeyError:
            raise KeyError(f"handle {handle} has not joined") from None

    def _columns(self, handles: Iterable[int]) -> npt.NDArray[np.int64]:
        if isinstance(handles, np.ndarray):
            handles = handles.tolist()
        index = self._index
        try:
            return np.array([index[handle] for handle in handles], np.int64)
        except KeyError as error:
            raise KeyError(f"handle {error.args[0]} has not joined") from None

    def _grow(self, room: int) -> None:
        for name, old in self._arrays.items():
            self._arrays[name] = np.zeros(room, old.dtype)
            self._arrays[name][: old.size] = old
        flags = np.zeros(room, np.bool_)
        flags[: self._room] = self._has_special
        self._has_special = flags
        self._seen.grow_columns(room)
        self._free.extend(range(room - 1, self._room - 1, -1))
        self._room = room
