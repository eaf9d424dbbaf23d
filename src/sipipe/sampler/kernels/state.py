"""What the kernels are given about columns and about one call, and what they return."""

from __future__ import annotations

from typing import Any, NamedTuple

OK, HAS_NAN, HAS_INFINITY, ALL_MASKED = 0, 1, 2, 3

RAW_LOGPROBS, RAW_LOGITS, PROCESSED_LOGPROBS, PROCESSED_LOGITS = 0, 1, 2, 3


class Columns(NamedTuple):
    """What is kept per column (sequence), as arrays over columns; see `SequenceColumns`."""

    temperature: Any  # float32
    top_k: Any  # int32, 0: off
    top_p: Any  # float64
    min_p: Any  # float64
    repetition: Any  # float32
    presence: Any  # float32
    frequency: Any  # float32
    seed: Any  # uint64
    position: Any  # int64, output tokens so far
    seen_start: Any  # int64, where the column's seen tokens begin
    seen_used: Any  # int64, how many distinct ones there are; 0 without penalties
    seen_tokens: Any  # int32, of all columns
    seen_counts: Any  # int32, occurrences in the output; 0: in the prompt only


class Extras(NamedTuple):
    """What few requests ask for, per row of this call: ranges into shared arrays."""

    bans: Any  # int64 [n + 1], bad words about to complete
    ban_tokens: Any
    stops: Any  # int64 [n + 1], stop tokens while under min_tokens
    stop_tokens: Any
    biases: Any  # int64 [n + 1]
    bias_tokens: Any
    bias_values: Any
    allowed: Any  # int64 [n + 1], allowed tokens; empty: all
    allowed_tokens: Any
    forced: Any  # int32 [n], token the thinking budget forces, or -1
    mask: Any  # int32 [m, words], grammar bitmasks
    mask_rows: Any  # int32 [n], row of `mask`, or -1
    wanted: Any  # int32 [n], logprobs to return besides the drawn token's, or -1: none at all
    named: Any  # int64 [n + 1], tokens whose logprobs are asked for by name
    named_tokens: Any


class Output(NamedTuple):
    """Results, per row of this call."""

    tokens: Any  # int32 [n], -1 where there is an error
    codes: Any  # uint8 [n]
    score_ids: Any  # int32 [n, width]
    scores: Any  # float32 [n, width]
    ranks: Any  # int32 [n]
