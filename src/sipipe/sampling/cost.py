"""What a sequence costs to sample, so that columns can be shared out among samplers by cost.

Microseconds per 100,000 logits on one core, float32 row layout, measured by ``python -m
benchmarks.sampling`` (which prints this table's entries); only their ratios matter.
"""

from __future__ import annotations

from sipipe.sampling.params import SequenceParams

WEIGHTS = {
    "greedy": 14.0,
    "temperature": 25.0,
    "top_k": 18.0,
    "min_p": 19.0,
    "top_p": 62.0,
    "write": 10.0,
    "mask": 9.0,
    "logprobs": 20.0,
    "seen": 0.012,
}


def cost_estimate(params: SequenceParams, vocab_size: int = 128_256, seen_tokens: int = 0) -> float:
    """Estimated seconds to sample one token of such a sequence.

    ``seen_tokens``: distinct tokens in prompt and output, if it has penalties.
    """
    changes = bool(params.penalized or params.logit_bias or params.bad_words_token_ids)
    unit = WEIGHTS["top_k"]
    written = False
    if params.greedy:
        unit = WEIGHTS["greedy"]
    elif not 0 < params.top_k <= vocab_size // 256:
        written = changes
        if params.top_k > 0 or (params.top_p < 1.0 and params.min_p == 0.0):
            unit = WEIGHTS["top_p"]
        else:
            unit = WEIGHTS["min_p" if params.min_p > 0.0 else "temperature"]
    if written:
        unit += WEIGHTS["write"]
    if params.allowed_token_ids:
        unit += WEIGHTS["mask"]
    if params.logprobs is not None or params.logprob_token_ids:
        unit += WEIGHTS["logprobs"]
    seen = WEIGHTS["seen"] * seen_tokens if params.penalized else 0.0
    return (unit * vocab_size / 100_000 + seen) * 1e-6
