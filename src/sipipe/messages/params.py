"""Sampling parameters of a request: the sampling part of vLLM's ``SamplingParams``."""

from __future__ import annotations

import functools
import hashlib
import math
import struct
from collections.abc import Collection
from typing import Any, Literal

import msgspec
import numpy as np

LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]
"""Values that ``logprobs`` are taken from: before or after penalties, masks and filters; normalized
to log-probabilities or not."""

GREEDY_EPSILON = 1e-5
"""Temperature below which the most likely token is taken, as in vLLM."""

_LONG = 1024
"""Length above which a list of tokens travels as bytes: msgspec decodes 100,000 integers in 3 ms."""

_RANGES = (
    ("temperature", 0.0, 2.0),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("repetition_penalty", 0.0, math.inf),
)


class SequenceParams(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """Sampling parameters of one sequence, named and defaulted as in vLLM's ``SamplingParams``.
    Encodes with msgspec as msgpack (JSON has no -inf, which a bias may be). Raises ValueError naming the
    field when one is out of range, also when decoded. Token ids are checked against the vocabulary when a
    sequence joins."""

    temperature: float = 1.0
    """Logits are divided by it; below 1e-5 the sequence is greedy. In [0, 2]."""
    top_k: int = 0
    """Keep the k largest logits and all tied with the k-th; 0 or -1: off."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose mass reaches it. In (0, 1]; 1: off."""
    min_p: float = 0.0
    """Keep tokens at least this likely, relative to the most likely. In [0, 1]; 0: off."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies other logits of tokens in prompt or output. Above 0; 1: off."""
    presence_penalty: float = 0.0
    """Subtracted from logits of tokens in the output. In [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted from logits of tokens in the output, times their occurrences. In [-2, 2]."""
    seed: int | None = None
    """Number of 64 bits, with or without a sign. None: fresh entropy, where nobody derives a seed."""
    logprobs: int | None = None
    """Number of logprobs to return besides the drawn token's; -1: all; None: none."""
    logprob_token_ids: list[int] | None = None
    """Tokens whose logprobs are returned instead of those of the most likely ones."""
    logit_bias: dict[int, float] | tuple[bytes, bytes] | None = None
    """Biases added to the logits of these tokens; -inf masks a token. Or the bytes of as many
    little-endian int32 token ids and float64 biases: a long list travels and joins much faster so.
    The biases of a token that is named twice are added."""
    bad_words_token_ids: list[list[int]] | None = None
    """Token sequences that must not be completed: their last token is masked."""
    allowed_token_ids: list[int] | bytes | None = None
    """Mask every other token; None or empty: all allowed. Or the bytes of little-endian int32 ids."""
    min_tokens: int = 0
    """Mask ``all_stop_token_ids`` until the output has this many tokens."""
    all_stop_token_ids: list[int] | None = None
    """Stop tokens including end-of-sequence ones, for ``min_tokens``."""
    thinking_token_budget: int | None = None
    """Force the end of thinking after this many tokens of it; None: no limit."""

    def __post_init__(self) -> None:
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if not isinstance(value, int | float) or not low <= value <= high:
                raise ValueError(f"{name} must be a number in [{low:g}, {high:g}], got {value}")
        for name in ("top_p", "repetition_penalty"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be finite and above 0, got {getattr(self, name)}")
        if not isinstance(self.top_k, int) or self.top_k < -1:
            raise ValueError(f"top_k must be 0 or -1 (off) or an integer >= 1, got {self.top_k}")
        if self.seed is not None and not isinstance(self.seed, int):
            raise ValueError(f"seed must be an integer or None, got {self.seed!r}")
        # msgpack has no others.
        for name in ("top_k", "seed", "min_tokens", "thinking_token_budget"):
            if not -(2**63) <= (getattr(self, name) or 0) < 2**64:
                raise ValueError(f"{name} must fit into 64 bits, got {getattr(self, name)}")
        if self.logprobs is not None and self.logprobs < -1:
            raise ValueError(f"logprobs must be -1 (all), None or >= 0, got {self.logprobs}")
        if self.min_tokens < 0:
            raise ValueError(f"min_tokens must be >= 0, got {self.min_tokens}")
        if self.thinking_token_budget is not None and self.thinking_token_budget < 0:
            raise ValueError(
                f"thinking_token_budget must be >= 0 or None, got {self.thinking_token_budget}"
            )
        if not all(self.bad_words_token_ids or ()):
            raise ValueError("bad_words_token_ids must not hold an empty sequence")
        bias = self.logit_bias or {}
        if isinstance(bias, tuple):
            if 2 * len(bias[0]) != len(bias[1]) or len(bias[0]) % 4:
                raise ValueError("logit_bias must be bytes of as many int32 ids as float64 biases")
            if not np.frombuffer(bias[1], "<f8").max(initial=-math.inf) < math.inf:
                raise ValueError("logit_bias must be below infinity")
        # The sum is a number below infinity only if each bias is: spares a loop over many.
        elif not sum(bias.values()) < math.inf:
            for token, value in bias.items():
                if not value < math.inf:
                    raise ValueError(
                        f"logit_bias of token {token} must be below infinity, got {value}"
                    )
        if isinstance(self.allowed_token_ids, bytes) and len(self.allowed_token_ids) % 4:
            raise ValueError("allowed_token_ids must be a list, or bytes of int32 ids")

    @property
    def greedy(self) -> bool:
        """True where the most likely token is taken instead of a draw."""
        return self.temperature < GREEDY_EPSILON

    @property
    def penalized(self) -> bool:
        """True where the tokens that a sequence has seen have to be kept."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    @classmethod
    def of(cls, source: Any) -> SequenceParams:
        """Copy them from an object with the same attributes, such as vLLM's ``SamplingParams``.

        Attributes that it lacks keep their defaults; long lists become bytes. Raises ValueError
        naming the field that is out of range.
        """
        values: dict[str, Any] = {}
        for field in _fields(cls):
            if (value := getattr(source, field.name, None)) is None:
                continue
            if field.name == "all_stop_token_ids":
                value = sorted(value)
            elif field.name == "allowed_token_ids" and len(value) > _LONG:
                value = _packed(field.name, "i", value)
            elif field.name == "logit_bias" and len(value) > _LONG:
                biases = _packed(field.name, "d", value.values())
                value = (_packed(field.name, "i", value), biases)
            elif isinstance(value, dict):
                value = {int(token): float(bias) for token, bias in value.items()}
            if value != field.default:
                values[field.name] = value
        if not values.get("min_tokens"):
            values.pop("all_stop_token_ids", None)
        return cls(**values)


_fields = functools.cache(msgspec.structs.fields)  # it reads the annotations at each call


def _packed(field: str, kind: str, numbers: Collection[float]) -> bytes:
    try:
        return struct.pack(f"<{len(numbers)}{kind}", *numbers)
    except struct.error as error:
        raise ValueError(f"{field}: {error}") from None


def is_plain(source: Any) -> bool:
    """Say if a ``SamplingParams`` asks for no more than a temperature, 0 included, and a seed.

    By this alone ``"cpu_sampling": "per_row"`` has it drawn on the last stage's device.
    """
    if source.structured_outputs is not None:
        return False
    try:
        params = SequenceParams.of(source)
    except ValueError:
        return False
    no_top_k = min(params.top_k, 0)  # 0 or -1: both are off
    return params == SequenceParams(
        temperature=params.temperature, seed=params.seed, top_k=no_top_k
    )


def derive_seed(engine_seed: int, request_id: str) -> int:
    """Derive the seed (unsigned, 64 bits) of a request that names none, from the engine's and its id."""
    text = f"{engine_seed}\0{request_id}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
