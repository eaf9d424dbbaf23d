"""Records of the kernels: requests, one call, its results, and working memory.

Working memory is allocated once for a sampler, proportional to the vocabulary, never to the batch.
"""

from typing import Any, NamedTuple

import numpy as np

from sipipe.sampler.kernels._vector import BLOCK, LANES
from sipipe.sampler.kernels.tables import Tables

HAS_NAN = 1
HAS_INFINITY = 2
ALL_MASKED = 3


class RequestState(NamedTuple):
    """State of all requests, as arrays over requests; parameters are named as in the request."""

    temperature: Any  # float32
    top_k: Any  # int32, 0: off
    top_p: Any  # float32
    min_p: Any  # float32
    repetition_penalty: Any  # float32
    presence_penalty: Any  # float32
    frequency_penalty: Any  # float32
    seed: Any  # uint64
    position: Any  # int64, output tokens so far
    seen: Tables  # of those with penalties


class Ranges(NamedTuple):
    """A part of ``values`` for each row: row i's is ``values[offsets[i] : offsets[i + 1]]``."""

    offsets: Any  # int64 [n + 1]
    values: Any


class RowOptions(NamedTuple):
    """Options that few requests ask for, per row of this call."""

    bans: Ranges  # int32, bad words about to complete
    stops: Ranges  # int32, stop tokens while under min_tokens
    biases: Ranges  # int32, tokens
    bias_values: Ranges  # float32, of the same rows
    allowed: Ranges  # int32, a bit per token as in `bitmask`; empty: all
    forced: Any  # int32 [n], token the thinking budget forces, or -1
    bitmask: Any  # int32 [m, words], of grammars
    bitmask_rows: Any  # int32 [n], row of `bitmask`, or -1
    wanted: Any  # int32 [n], logprobs to return besides the drawn token's, or -1: none at all
    named: Ranges  # int32, tokens whose logprobs are asked for by name


class Filters(NamedTuple):
    """Filters by which one token is chosen from a row's edited logits."""

    temperature: Any  # float32, above 0
    top_k: Any  # int64, 0: off
    top_p: Any  # float64
    min_p: Any  # float64
    seed: Any  # uint64
    position: Any  # int64


class Scores(NamedTuple):
    """Kind of the values that ``logprobs`` are."""

    processed: Any  # bool, of the logits after edits and filters, else after the grammar alone
    logits: Any  # bool, as they are, else normalized to log-probabilities


class Output(NamedTuple):
    """Results, per row of this call."""

    tokens: Any  # int32 [n], -1 where there is an error
    codes: Any  # uint8 [n]
    score_ends: Any  # int64 [n + 1], row i's scores are [score_ends[i] : score_ends[i + 1]]
    score_ids: Any  # int32, each row's one after the other
    scores: Any  # float32, the same
    ranks: Any  # int32 [n]


class Work(NamedTuple):
    """Scratch arrays shared by all kernels; V is the vocabulary, N = ceil(V / 256) blocks."""

    mask: Any  # uint32 [8 N], bit set: the token counts as -inf (`logit_edits`); 0 between rows
    no_mask: Any  # uint32 [8], 0: nothing of a block is masked
    tail: Any  # float32 [256], the last, incomplete block of a row
    peaks: Any  # float32 [N, up to whole blocks], maximum of each block, then -inf
    groups: Any  # float32 [64 N + 512], maximum of each group of 8 tokens: 32 a block, then edits
    masses: Any  # float32 [N / 4 + 2], upper bounds of the weights of each 256 groups
    ids: Any  # int32 [V + 256], candidates of a row,
    values: Any  # float32 [V + 256], their logits
    weights: Any  # float32 [V + 256], and exponentials
    picks: Any  # int32 [V + 256], positions among the candidates
    keys: Any  # uint64 [V + 256], sort keys
    sums: Any  # float64 [V + 256], running sums of candidate weights
    entries: Any  # int32 [V], 0 between uses: 1 + index of a token among the candidates
    edited_ids: Any  # int32 [V + 256], edited tokens,
    edited: Any  # float32 [V + 256], their new logits
    spare: Any  # float32 [V + 256], to select from
    stack: Any  # int64, bounds yet to sort, or places by digit


def _lines(size: int, kind: Any, value: float = 0) -> np.ndarray[Any, Any]:
    """``size`` of ``value``, from the start of a cache line on: no vector lies across two."""
    nbytes = size * np.dtype(kind).itemsize
    room = np.zeros(nbytes + 64, np.uint8)
    array: np.ndarray[Any, Any] = room[-room.ctypes.data % 64 :][:nbytes].view(kind)
    if value:
        array[:] = value
    return array


def make_work(vocab_size: int) -> Work:
    """About 7 MB at a vocabulary of 151,936, taken from the system as far as it is used."""
    blocks = -(-vocab_size // BLOCK)
    room = blocks * BLOCK + BLOCK + LANES
    return Work(
        mask=_lines(blocks * (BLOCK // 32), np.uint32),
        no_mask=_lines(BLOCK // 32, np.uint32),
        tail=_lines(BLOCK, np.float32, -np.inf),
        peaks=_lines(-(-blocks // BLOCK) * BLOCK, np.float32, -np.inf),
        groups=_lines(64 * blocks + 2 * BLOCK, np.float32),
        masses=_lines(blocks // 4 + 2, np.float32),
        ids=_lines(room, np.int32),
        values=_lines(room, np.float32),
        weights=_lines(room, np.float32),
        picks=_lines(room, np.int32),
        keys=_lines(room, np.uint64),
        sums=_lines(room, np.float64),
        entries=_lines(vocab_size, np.int32),
        edited_ids=_lines(room, np.int32),
        edited=_lines(room, np.float32),
        spare=_lines(room, np.float32),
        stack=_lines(2048, np.int64),
    )
