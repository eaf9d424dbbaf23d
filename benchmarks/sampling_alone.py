"""`sipipe.sampling` without an engine: beside NumPy, torch and transformers' logits processors.

    python -m benchmarks.sampling_alone [--quick]

Milliseconds of CPU time to draw a token for one sequence, the least of many calls, each side in turn,
one thread. Each side is what one writes with it: NumPy sorts, selects and searches cumulative sums;
torch the same with `topk`, `sort` and `multinomial`; transformers is its `LogitsProcessorList` and
`multinomial`, as `generate` has them. "ours" is the stateless facade, "ours, kept" is
`SequenceColumns`. Penalties are over 400 tokens a sequence.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.harness import report
from benchmarks.sampling import bfloat16, normal
from sipipe.sampling import SequenceColumns, SequenceParams, sample, warm_up

V, B = 151_936, 16
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top-k 50": {"temperature": 0.8, "top_k": 50},
    "top-p 0.95": {"temperature": 0.8, "top_p": 0.95},
    "repetition penalty": {"temperature": 0.8, "repetition_penalty": 1.1},
    "all of them, min-p": {
        "temperature": 0.8,
        "top_k": 50,
        "top_p": 0.95,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
    },
}


def by_numpy(x: np.ndarray, texts: np.ndarray, p: SequenceParams) -> np.ndarray:
    """Tokens [B] of float32 logits [B, V]; ``texts`` are the tokens seen, [B, n]."""
    if p.repetition_penalty != 1.0:
        x = x.copy()
        seen = np.take_along_axis(x, texts, 1)
        penalized = np.where(seen > 0, seen / p.repetition_penalty, seen * p.repetition_penalty)
        np.put_along_axis(x, texts, penalized, 1)
    if p.greedy:
        return x.argmax(1)
    x = x / np.float32(p.temperature)
    if p.top_k:
        x = np.where(x < np.partition(x, -p.top_k, 1)[:, -p.top_k, None], -np.inf, x)
    if p.top_p < 1:
        order = np.argsort(x, 1)
        ranked = np.take_along_axis(x, order, 1)
        weights = np.exp(ranked - ranked[:, -1:])
        mass = np.cumsum(weights, 1)
        ranked[mass <= (1 - p.top_p) * mass[:, -1:]] = -np.inf
        np.put_along_axis(x, order, ranked, 1)
    weights = np.exp(x - x.max(1, keepdims=True))
    if p.min_p:
        weights[weights < p.min_p] = 0.0
    mass = np.cumsum(weights, 1)
    draws = np.random.default_rng().random(len(x)) * mass[:, -1]
    return np.array([np.searchsorted(row, at) for row, at in zip(mass, draws, strict=True)])


def by_torch(x: Any, texts: Any, p: SequenceParams) -> Any:
    """The same with torch, in the logits' own dtype."""
    import torch

    if p.repetition_penalty != 1.0:
        seen = x.gather(1, texts)
        penalized = torch.where(seen > 0, seen / p.repetition_penalty, seen * p.repetition_penalty)
        x = x.scatter(1, texts, penalized)
    if p.greedy:
        return x.argmax(1)
    x = x / p.temperature
    if p.top_k:
        x = x.masked_fill(x < x.topk(p.top_k).values[:, -1:], -torch.inf)
    if p.top_p < 1:
        ranked, order = x.sort(1)
        out = ranked.softmax(1).cumsum(1) <= 1 - p.top_p
        x = x.masked_fill(out.scatter(1, order, out), -torch.inf)
    weights = x.softmax(1)
    if p.min_p:
        weights = weights.masked_fill(weights < p.min_p * weights.amax(1, keepdim=True), 0.0)
    return torch.multinomial(weights, 1)


def by_transformers(p: SequenceParams) -> Callable[[Any, Any], Any]:
    """transformers' processors in the order of its ``generate``."""
    import torch
    from transformers import LogitsProcessorList
    from transformers.generation import logits_process as made

    every = LogitsProcessorList()
    if p.repetition_penalty != 1.0:
        every.append(made.RepetitionPenaltyLogitsProcessor(p.repetition_penalty))
    if not p.greedy:
        every.append(made.TemperatureLogitsWarper(p.temperature))
    if p.top_k:
        every.append(made.TopKLogitsWarper(p.top_k))
    if p.top_p < 1:
        every.append(made.TopPLogitsWarper(p.top_p))
    if p.min_p:
        every.append(made.MinPLogitsWarper(p.min_p))

    def draw(x: Any, texts: Any) -> Any:
        scores = every(texts, x)
        return scores.argmax(1) if p.greedy else torch.multinomial(scores.softmax(1), 1)

    return draw


def least(calls: dict[str, Callable[[], object]], repeat: int) -> dict[str, float]:
    """Milliseconds of CPU a sequence: the least of ``repeat`` calls of each, in turn."""
    found = dict.fromkeys(calls, float("inf"))
    for _ in range(repeat):
        for name, call in calls.items():
            began = time.thread_time()
            call()
            found[name] = min(found[name], (time.thread_time() - began) / B * 1e3)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    repeat = 3 if parser.parse_args().quick else 15
    import torch

    torch.set_num_threads(1)
    warm_up(["float32", "bfloat16"])
    x = normal(B, V)
    bits = bfloat16(x)
    texts = np.random.default_rng(1).integers(0, V, (B, 400))
    tensor, tokens = torch.from_numpy(x), torch.from_numpy(texts)
    half = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
    rows = []
    for name, given in CASES.items():
        params = SequenceParams(**given, seed=1)
        columns = SequenceColumns(V)
        for handle in range(B):
            columns.join(handle, params, texts[handle])
        processors = by_transformers(params)
        calls: dict[str, Callable[[], object]] = {
            "one read": lambda: x.max(axis=1),
            "NumPy": lambda p=params: by_numpy(x, texts, p),
            "torch": lambda p=params: by_torch(tensor, tokens, p),
            "transformers": lambda draw=processors: draw(tensor, tokens),
            "ours": lambda p=params: sample(x, p, prompt_token_ids=list(texts)),
            "ours, kept": lambda c=columns: c.sample(range(B), x),
            "torch, bf16": lambda p=params: by_torch(half, tokens, p),
            "ours, kept, bf16": lambda c=columns: c.sample(range(B), bits),
        }
        rows.append({"strategy": name, **least(calls, repeat)})
    report(
        "sampling",
        f"ms of CPU a sequence, V {V:,}, B {B}, N(0, 3²) logits, one thread, least of {repeat}",
        rows,
        note="float32 but for the last two columns",
        file="sampling-alone",
    )


if __name__ == "__main__":
    main()
