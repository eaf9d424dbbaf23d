"""The slow, obvious twin of the kernels: NumPy, dense, sorted. Tests compare the two."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from sipipe.messages.params import SequenceParams

F32 = np.float32


def processed_logits(
    logits: np.ndarray,
    params: SequenceParams,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    *,
    allowed: np.ndarray | None = None,
) -> np.ndarray:
    """Logits [V] after every step of vLLM's sampler, -inf where filtered; float32 arithmetic."""
    x = logits.astype(F32).copy()
    if allowed is not None:
        x[~allowed] = -np.inf
    if params.allowed_token_ids:
        keep = np.zeros(x.size, bool)
        keep[params.allowed_token_ids] = True
        x[~keep] = -np.inf
    for word in params.bad_words_token_ids or ():
        prefix = list(word[:-1])
        if len(prefix) <= len(output) and list(output[len(output) - len(prefix) :]) == prefix:
            x[word[-1]] = -np.inf
    if len(output) < params.min_tokens:
        x[params.all_stop_token_ids or []] = -np.inf
    for token, bias in (params.logit_bias or {}).items():
        x[token] += F32(bias)
    counts = Counter(output)
    for token in set(prompt) | set(output):
        penalty = F32(params.repetition_penalty)
        x[token] *= F32(1) / penalty if x[token] > 0 else penalty
    for token, count in counts.items():
        x[token] -= F32(params.frequency_penalty) * F32(count)
        x[token] -= F32(params.presence_penalty)
    if params.greedy:
        return x
    x = x / F32(params.temperature)
    if not np.isfinite(x).any():
        return x
    if params.min_p > 0:
        with np.errstate(divide="ignore"):
            x[x.astype(float) < x.max() + np.log(float(F32(params.min_p)))] = -np.inf
    if 0 < params.top_k < x.size:
        x[x < np.sort(x)[-params.top_k]] = -np.inf
    if params.top_p < 1:
        order = np.argsort(x, kind="stable")[::-1]  # ties: highest id first
        p = softmax(x)[order]
        above = np.concatenate([[0.0], np.cumsum(p)[:-1]])
        cut = above >= float(F32(params.top_p))
        cut[0] = False
        x[order[cut]] = -np.inf
    return x


def softmax(x: np.ndarray) -> np.ndarray:
    """Probabilities in float64."""
    p = np.exp(x.astype(float) - float(x.max()))
    return p / p.sum()


def log_softmax(x: np.ndarray) -> np.ndarray:
    """Log-probabilities in float64."""
    x = x.astype(float)
    top = x.max()
    return x - top - np.log(np.exp(x - top).sum())
