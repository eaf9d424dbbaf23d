"""Request state: what a sampler keeps of each sequence, updated by one token an iteration.

Who runs here: one thread. A sampler process owns one `SequenceColumns`; nothing is shared but the
logits, which are only read. `SequenceColumns.sample` releases the GIL while kernels run.

Guarantee: a drawn token depends only on (parameters, seed, prompt, output so far, logits), never on
the batch, where a request's state happens to be, or whether it was kept or rebuilt.
"""

import copy
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache, partial
from typing import Any, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from sipipe.messages.params import LogprobsMode, SequenceParams
from sipipe.sampler.kernels.rows import LATER, NOT_DRAWN, sample_rows
from sipipe.sampler.kernels.state import Output, RequestState, RowOptions, Scores, Work, make_work
from sipipe.sampler.kernels.tables import SeenTables, grown
from sipipe.sampler.layout import read_rows, writeable
from sipipe.sampler.options import RequestOptions, no_options, row_options
from sipipe.sampler.result import Logprobs, SampleResult

_SEED_MASK = (1 << 64) - 1
# What kernels read for every request. vLLM too has top_p and min_p in float32: the same cuts.
_PER_REQUEST: dict[str, type[np.generic]] = {
    "temperature": np.float32,
    "top_k": np.int32,
    "top_p": np.float32,
    "min_p": np.float32,
    "repetition_penalty": np.float32,
    "presence_penalty": np.float32,
    "frequency_penalty": np.float32,
    "seed": np.uint64,
}
_OPTIONAL = {
    field.name: field.default
    for field in msgspec.structs.fields(SequenceParams)
    if field.name not in _PER_REQUEST
}

Tokens = Sequence[int] | npt.NDArray[np.integer[Any]]


class SequenceColumns:
    """The sequences of one sampler, by handles (any integers) that the caller chooses.

    ``vocab_size`` is the model's; logits may be wider (padded). Memory: about 7 MB of work arrays at
    a vocabulary of 151,936, 13 to 27 bytes per distinct token seen by a sequence with penalties.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        logprobs_mode: LogprobsMode = "raw_logprobs",
        reasoning_start_token_ids: Sequence[int] = (),
        reasoning_end_token_ids: Sequence[int] = (),
        natural_reasoning_end_token_ids: Sequence[int] = (),
        work: Work | None = None,
    ) -> None:
        """The reasoning token ids are those of vLLM's ``ReasoningConfig``; without end tokens a
        ``thinking_token_budget`` has no effect. ``work``: of `make_work`, by one thread at a time."""
        if vocab_size < 1:
            raise ValueError(f"vocab_size must be at least 1, got {vocab_size}")
        if logprobs_mode not in (modes := get_args(LogprobsMode)):
            raise ValueError(f"logprobs_mode must be one of {', '.join(modes)}: {logprobs_mode}")
        self._vocab_size = vocab_size
        processed = logprobs_mode.startswith("processed")
        logits = logprobs_mode.endswith("logits")
        self._scores = Scores(processed, logits)
        ends = reasoning_end_token_ids, natural_reasoning_end_token_ids
        self._reasoning = (reasoning_start_token_ids, *ends)
        self._requests: dict[int, int] = {}
        """Index of each handle's state in the arrays."""
        self._free: list[int] = []
        self._options: dict[int, RequestOptions] = {}
        self._seen = SeenTables(0)
        self._work: Work = make_work(vocab_size) if work is None else work
        self._arrays = {name: np.zeros(0, kind) for name, kind in _PER_REQUEST.items()}
        self._position = np.zeros(0, np.int64)
        self._has_options = np.zeros(0, np.bool_)
        self._grow(16)

    def __contains__(self, handle: int) -> bool:
        return handle in self._requests

    def join(
        self,
        handle: int,
        params: SequenceParams,
        prompt_token_ids: Tokens = (),
        output_token_ids: Tokens = (),
    ) -> None:
        """Add a sequence, new or resumed (then with the output tokens it already has). Without a seed
        it draws with fresh entropy. Prompt tokens behind the vocabulary, which stand for images in
        some models, count for nothing. ValueError: other token ids outside it, a handle in use."""
        if handle in self._requests:
            raise ValueError(f"handle {handle} has already joined")
        output = self._tokens("output_token_ids", output_token_ids)
        prompt = None
        if params.repetition_penalty != 1.0:
            prompt = np.asarray(prompt_token_ids)
            prompt = self._tokens("prompt_token_ids", prompt[prompt < self._vocab_size])
        options = None
        if any(getattr(params, name) != default for name, default in _OPTIONAL.items()):
            options = RequestOptions(
                params, prompt_token_ids, output.tolist(), self._reasoning, self._vocab_size
            )
        if not self._free:
            self._grow(2 * self._position.size)
        request = self._free.pop()
        changed = {
            "top_k": max(params.top_k, 0) if params.top_k < self._vocab_size else 0,
            "seed": (secrets.randbits(64) if params.seed is None else params.seed) & _SEED_MASK,
        }
        for name, array in self._arrays.items():
            array[request] = changed.get(name, getattr(params, name))
        self._position[request] = output.size
        if params.penalized:
            self._seen.add(request, prompt, output)
        if options is not None:
            self._options[request] = options
            self._has_options[request] = True
        self._requests[handle] = request

    def leave(self, handle: int) -> None:
        """Remove a sequence: finished, aborted, or preempted (it may join again)."""
        [request] = self._find([handle]).tolist()
        del self._requests[handle]
        self._seen.remove(request)
        self._options.pop(request, None)
        self._has_options[request] = False
        self._free.append(request)

    def discard(self, handle: int) -> None:
        """Remove a sequence if it is here."""
        if handle in self._requests:
            self.leave(handle)

    def append(self, handles: int | Iterable[int], token_ids: int | Iterable[int]) -> None:
        """One more output token for each of ``handles``, as the scheduler has accepted it."""
        if isinstance(handles, int | np.integer):
            handles = [int(handles)]
            token_ids = [int(token_ids)]  # type: ignore[arg-type]
        requests = self._find(handles)
        added = self._tokens("token_ids", token_ids)  # type: ignore[arg-type]
        if added.size != requests.size:
            raise ValueError(f"token_ids: {added.size} for {requests.size} handles")
        self._seen.append(self._position, requests, added)
        for i in self._with_options(requests):
            self._options[int(requests[i])].observe(int(added[i]))

    def sample(
        self,
        handles: Iterable[int],
        logits: npt.NDArray[Any],
        rows: Tokens | None = None,
        *,
        bitmask: npt.NDArray[np.int32] | None = None,
        bitmask_rows: Tokens | None = None,
    ) -> SampleResult:
        """Draw one token for each of ``handles``; nothing is appended. ``logits``: [B, V'], V' >=
        vocab_size; float32, float16, or bfloat16 as uint16 bits, never written to. ``rows[i]`` is the row
        of ``handles[i]``, by default i. ``bitmask``: int32 [m, >= ceil(vocab_size / 32)], bit set: token
        allowed, of row ``bitmask_rows[i]`` for ``handles[i]``, -1 for none (by default row i)."""
        return self.prepare(handles, rows, bitmask=bitmask, bitmask_rows=bitmask_rows)(logits)

    def prepare(
        self,
        handles: Iterable[int],
        rows: Tokens | None = None,
        *,
        bitmask: npt.NDArray[np.int32] | None = None,
        bitmask_rows: Tokens | None = None,
        follows: npt.NDArray[np.int32] | None = None,
    ) -> Callable[[npt.NDArray[Any]], SampleResult]:
        """All of :meth:`sample` that needs no logits: what it returns takes them. ``follows``,
        int32 [n]: for each row the draft that it stands behind, -1 for the first row of a sequence,
        which the others come right after. Such a row is drawn as if the sequence had the drafts
        before it, and only if the row before drew its draft; else its token is :data:`NOT_DRAWN`.
        No sequence may join, leave or get a token between the two."""
        requests = self._find(handles)
        n = requests.size
        follows, ahead = _no_drafts(n) if follows is None else (follows, ahead_of(follows))
        indices = np.arange(n) if rows is None else np.asarray(rows, np.int64)
        if indices.size != n:
            raise ValueError(f"rows: {indices.size} for {n} handles")
        options_by_row = {i: self._options[int(requests[i])] for i in self._with_options(requests)}
        if options_by_row or bitmask is not None:
            masks = self._bitmask(n, bitmask, bitmask_rows)
            positions = self._position[requests] + ahead
            options = row_options(n, options_by_row, positions, self._vocab_size, *masks)
        else:
            options = no_options(n)
        # Each row has as many places as it asks for: one that wants all of V costs others nothing.
        ends = np.zeros(n + 1, np.int64)
        np.cumsum(options.wanted + 1, out=ends[1:])
        score_ids = np.empty(ends[-1], np.int32)
        scores = np.empty(ends[-1], np.float32)
        tokens = np.full(n, -1, np.int32)
        ranks = np.zeros(n, np.int32)
        out = Output(
            tokens=tokens,
            codes=np.zeros(n, np.uint8),
            score_ends=ends,
            score_ids=score_ids,
            scores=scores,
            ranks=ranks,
        )
        arrays = self._arrays | {"position": self._position, "seen": self._seen.tables}
        state = RequestState._make(arrays[name] for name in RequestState._fields)
        dependent = {
            i: int(follows[i])
            for i in np.flatnonzero(ahead).tolist()
            if self._depends_on_output(int(requests[i]))
        }
        if not dependent:
            return partial(self._draw, requests, indices, follows, ahead, state, options, out)
        first = follows.copy()
        first[list(dependent)] = LATER
        draw = partial(self._draw, requests, indices, first, ahead, state, options, out)
        return partial(
            self._draw_behind,
            draw,
            dependent,
            list(handles),
            indices,
            bitmask,
            options.bitmask_rows,
        )

    def _depends_on_output(self, request: int) -> bool:
        """Say if a draw for it depends on which tokens came, beyond their number."""
        options = self._options.get(request)
        return bool(self._seen.tables.room[request]) or (options is not None and options.remembers)

    def _draw_behind(
        self,
        draw: Callable[[npt.NDArray[Any]], SampleResult],
        dependent: dict[int, int],
        handles: list[int],
        indices: npt.NDArray[np.int64],
        bitmask: npt.NDArray[np.int32] | None,
        bitmask_rows: npt.NDArray[np.int32],
        logits: npt.NDArray[Any],
    ) -> SampleResult:
        """Draw; and row by row those ``behind`` a draft that the draw depends on."""
        result = draw(logits)
        with ExitStack() as undo:
            for i, draft in dependent.items():
                if result.token_ids[i - 1] != draft:
                    continue
                undo.enter_context(self._supposed(handles[i], draft))
                mask = bitmask_rows[i : i + 1]
                drawn = self.sample(
                    [handles[i]], logits, indices[i : i + 1], bitmask=bitmask, bitmask_rows=mask
                )
                result.token_ids[i] = drawn.token_ids[0]
                result.codes[i] = drawn.codes[0]
                if drawn.logprobs:
                    result.logprobs[i] = drawn.logprobs[0]
        return result

    @contextmanager
    def _supposed(self, handle: int, token: int) -> Iterator[None]:
        """While active, the sequence has one more output token."""
        request = self._requests[handle]
        used = int(self._seen.tables.used[request])
        options = self._options.get(request)
        if options is not None:
            self._options[request] = copy.deepcopy(options)
        self.append(handle, token)
        try:
            yield
        finally:
            self._seen.take_back(self._position, request, token, used)
            if options is not None:
                self._options[request] = options

    def _draw(
        self,
        requests: npt.NDArray[np.int64],
        indices: npt.NDArray[np.int64],
        follows: npt.NDArray[np.int32],
        ahead: npt.NDArray[np.int64],
        state: RequestState,
        options: RowOptions,
        out: Output,
        logits: npt.NDArray[Any],
    ) -> SampleResult:
        vocab = self._vocab_size
        ends = out.score_ends
        flat, starts = read_rows(logits, indices, vocab)
        rows = flat, starts, vocab, requests, follows, ahead
        sample_rows(*rows, state, options, self._scores, self._work, out)
        logprobs = {}
        scored = (options.wanted >= 0) & (out.codes == 0) & (out.tokens != NOT_DRAWN)
        for i in np.flatnonzero(scored).tolist():
            places = slice(ends[i], ends[i + 1])
            logprobs[i] = Logprobs(out.score_ids[places], out.scores[places], int(out.ranks[i]))
        return SampleResult(out.tokens, out.codes, logprobs)

    def shares(self, handles: npt.NDArray[np.int32], limit: int) -> list[npt.NDArray[np.intp]]:
        """``handles`` in parts whose logprobs are ``limit`` and one sequence's at most, as indices; with
        a limit of 0 each is a part of its own. The rows of a sequence stay together."""
        every = np.arange(len(handles))
        starts = 1 + np.flatnonzero(np.diff(handles))
        if not limit:
            return np.split(every, starts)
        wanted = np.zeros(len(handles), np.int64)
        for i in self._with_options(requests := self._find(handles)):
            wanted[i] = 1 + self._options[int(requests[i])].wanted(self._vocab_size)
        if wanted.sum() <= limit:
            return [every]
        full = np.cumsum(wanted) // limit
        before = np.r_[0, starts[:-1]]
        return np.split(every, starts[full[starts] > full[before]])

    def _bitmask(
        self, n: int, bitmask: npt.NDArray[np.int32] | None, rows: Tokens | None
    ) -> tuple[npt.NDArray[np.int32] | None, npt.NDArray[np.int32] | None]:
        if bitmask is None:
            return None, None
        words = -(-self._vocab_size // 32)
        if bitmask.ndim != 2 or bitmask.dtype != np.int32 or bitmask.shape[1] < words:
            raise ValueError(f"bitmask must be int32 [m, >= {words}], got {bitmask.shape}")
        where = np.arange(n) if rows is None else np.asarray(rows)
        if where.size != n or (n and not (where.min() >= -1 and where.max() < len(bitmask))):
            raise ValueError(f"bitmask_rows must be {n} rows in [-1, {len(bitmask)})")
        return writeable(np.ascontiguousarray(bitmask)), where.astype(np.int32)

    def _tokens(self, name: str, tokens: Tokens) -> npt.NDArray[np.int32]:
        array = np.asarray(tokens)
        # Looked at as it came: a cast to 32 bits would make another token of a larger number.
        if array.size and not (array.min() >= 0 and array.max() < self._vocab_size):
            raise ValueError(f"{name}: token ids must be in [0, {self._vocab_size})")
        return writeable(np.ascontiguousarray(array, np.int32))

    def _find(self, handles: Iterable[int]) -> npt.NDArray[np.int64]:
        """Where the state of each of ``handles`` is."""
        if isinstance(handles, np.ndarray):
            handles = handles.tolist()
        requests = self._requests
        try:
            return np.array([requests[handle] for handle in handles], np.int64)
        except KeyError as error:
            raise KeyError(f"handle {error.args[0]} has not joined") from None

    def _with_options(self, requests: npt.NDArray[np.int64]) -> Iterable[int]:
        return np.flatnonzero(self._has_options[requests]).tolist() if self._options else ()

    def _grow(self, size: int) -> None:
        before = self._position.size
        self._arrays = {name: grown(array, size) for name, array in self._arrays.items()}
        self._position = grown(self._position, size)
        self._has_options = grown(self._has_options, size)
        self._seen.grow_requests(size)
        self._free.extend(range(size - 1, before - 1, -1))


@lru_cache(maxsize=64)
def _no_drafts(n: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """``follows`` and :func:`ahead_of` of ``n`` rows without drafts, which kernels only read."""
    return np.full(n, -1, np.int32), np.zeros(n, np.int64)


def ahead_of(follows: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """Count the drafts that each row stands behind: int64 [n]."""
    index = np.arange(follows.size)
    ahead: npt.NDArray[np.int64] = index - np.maximum.accumulate(np.where(follows < 0, index, 0))
    return ahead
