"""Estimated cost of sampling a sequence, by which sequences are shared out among samplers.

Microseconds per 100,000 logits on one core, float32, measured by ``python -m
benchmarks.sampling`` (which prints this table's entries); only their ratios matter.
"""

from sipipe.messages.params import SequenceParams

WEIGHTS = {
    "greedy": 21.5,
    "temperature": 26.0,
    "top_k": 23.5,
    "large_top_k": 54.0,
    "min_p": 27.0,
    "top_p": 31.5,
    "mask": 13.0,
    "logprobs": 28.0,
    "all_logprobs": 660.0,
}


def cost_estimate(params: SequenceParams, vocab_size: int = 128_256) -> float:
    """Estimate the seconds that one token of such a sequence takes; penalties are left out."""
    if params.greedy:
        unit = WEIGHTS["greedy"]
    elif 0 < params.top_k < vocab_size:
        unit = WEIGHTS["top_k" if params.top_k <= vocab_size // 256 else "large_top_k"]
    elif params.min_p > 0.0:
        unit = WEIGHTS["min_p"]
    else:
        unit = WEIGHTS["top_p" if params.top_p < 1.0 else "temperature"]
    if params.allowed_token_ids:
        unit += WEIGHTS["mask"]
    if params.logprobs is not None or params.logprob_token_ids:
        all_tokens = params.logprobs == -1 and not params.logprob_token_ids
        unit += WEIGHTS["all_logprobs" if all_tokens else "logprobs"]
    return unit * vocab_size / 100_000 * 1e-6
