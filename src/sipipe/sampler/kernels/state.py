"""What the kernels are given about requests and about one call, and what they return."""

from __future__ import annotations

from typing import Any, NamedTuple

from sipipe.sampler.kernels.tables import Tables

HAS_NAN, HAS_INFINITY, ALL_MASKED = 1, 2, 3


class RequestState(NamedTuple):
    """What is kept per request, as arrays over requests; parameters named as in the request."""

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
    """What few requests ask for, per row of this call."""

    bans: Ranges  # int32, bad words about to complete
    stops: Ranges  # int32, stop tokens while under min_tokens
    biases: Ranges  # int32, tokens
    bias_values: Ranges  # float32, of the same rows
    allowed: Ranges  # int32, ascending and unique; empty: all
    forced: Any  # int32 [n], token the thinking budget forces, or -1
    bitmask: Any  # int32 [m, words], of grammars
    bitmask_rows: Any  # int32 [n], row of `bitmask`, or -1
    wanted: Any  # int32 [n], logprobs to return besides the drawn token's, or -1: none at all
    named: Ranges  # int32, tokens whose logprobs are asked for by name


class Filters(NamedTuple):
    """How one token is chosen from a row's edited logits."""

    temperature: Any  # float32, above 0
    top_k: Any  # int64, 0: off
    top_p: Any  # float64
    min_p: Any  # float64
    u: Any  # float64 in [0, 1), the draw


class Scores(NamedTuple):
    """What ``logprobs`` are."""

    processed: Any  # bool, of the logits after edits and filters, else after the grammar alone
    logits: Any  # bool, as they are, else normalized to log-probabilities


class Output(NamedTuple):
    """Results, per row of this call."""

    tokens: Any  # int32 [n], -1 where there is an error
    codes: Any  # uint8 [n]
    score_ids: Any  # int32 [n, width]
    scores: Any  # float32 [n, width]
    ranks: Any  # int32 [n]
