"""Milliseconds to sample one sequence: stock vLLM's sampler, a plain read of the logits, and ours.

    python -m benchmarks.sampling [--quick] [--stock/--no-stock] [--only TABLE]

One thread, steady state: sequences have joined with 200 prompt and 200 output tokens, and every call
draws one token for each. The read is NumPy's maximum over the same logits. Stock is vLLM's `Sampler`
on the same logits, prompts and outputs, with its tensors of parameters made beforehand as its worker
keeps them, and torch on one thread; a copy for it to work in is made outside the clock.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.harness import median_seconds, report
from benchmarks.sampling_cliffs import bfloat16, cliffs, normal, zipf
from sipipe.messages.cost import WEIGHTS
from sipipe.messages.measured import MIXES
from sipipe.messages.params import SequenceParams
from sipipe.sampler.state import SequenceColumns
from sipipe.sampler.warmup import warm_up

STRATEGIES: dict[str, dict[str, Any]] = {
    "greedy": MIXES["greedy"],
    "temperature": MIXES["temperature"],
    "top-k": {"top_k": 50},
    "top-p": {"top_p": 0.95},
    "min-p": {"min_p": 0.01},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1},
    "all": MIXES["all"],
}
V, B = 151_936, 64


def texts(batch: int, vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """200 prompt and 200 output tokens a sequence."""
    rng = np.random.default_rng(1)
    return rng.integers(0, vocab, (batch, 200)), rng.integers(0, vocab, (batch, 200))


def joined(strategy: str, batch: int, vocab: int) -> SequenceColumns:
    columns = SequenceColumns(vocab)
    prompts, outputs = texts(batch, vocab)
    for handle in range(batch):
        params = SequenceParams(seed=handle, **STRATEGIES[strategy])
        columns.join(handle, params, prompts[handle], outputs[handle])
    return columns


def ours(columns: SequenceColumns, logits: np.ndarray) -> Callable[[], None]:
    handles = np.arange(len(logits))

    def call() -> None:
        columns.sample(handles, logits)

    return call


def milliseconds(call: Callable[[], object], batch: int, repeat: int = 9) -> float:
    return median_seconds(call, repeat=repeat, budget=1.5) / batch * 1e3


def read(x: np.ndarray) -> float:
    """Milliseconds a row of one plain read."""
    return milliseconds(lambda: x.max(axis=1), len(x))


def stock(
    strategy: str, batch: int, vocab: int, clock: Callable[[], float] = time.perf_counter
) -> Callable[[np.ndarray], float] | None:
    """What measures vLLM's own sampler, in milliseconds a sequence; None without vLLM."""
    try:
        import torch
        from vllm.v1.sample.logits_processor import LogitsProcessors, MinPLogitsProcessor
        from vllm.v1.sample.metadata import SamplingMetadata
        from vllm.v1.sample.sampler import Sampler
    except ImportError:
        return None
    torch.set_num_threads(1)
    given = SequenceParams(**STRATEGIES[strategy])
    prompts, outputs = texts(batch, vocab)
    column = lambda value, kind=torch.float32: torch.full((batch,), value, dtype=kind)  # noqa: E731
    processors = LogitsProcessors()
    if given.min_p:
        min_p = MinPLogitsProcessor.__new__(MinPLogitsProcessor)
        min_p.min_p_count = batch
        min_p.min_p = column(given.min_p).unsqueeze(1)
        processors.argmax_invariant.append(min_p)
    metadata = SamplingMetadata(
        temperature=None if given.greedy else column(given.temperature),
        all_greedy=given.greedy,
        all_random=not given.greedy,
        top_p=column(given.top_p) if given.top_p < 1 else None,
        top_k=column(given.top_k, torch.int32) if given.top_k else None,
        generators={},
        max_num_logprobs=None,
        no_penalties=not given.penalized,
        prompt_token_ids=torch.from_numpy(prompts),
        frequency_penalties=column(given.frequency_penalty),
        presence_penalties=column(given.presence_penalty),
        repetition_penalties=column(given.repetition_penalty),
        output_token_ids=outputs.tolist(),
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=processors,
    )
    sampler = Sampler()

    def measure(logits: np.ndarray) -> float:
        if logits.dtype == np.uint16:
            tensor = torch.from_numpy(logits.view(np.int16)).view(torch.bfloat16)
        else:
            tensor = torch.from_numpy(logits)
        times = []
        for _ in range(4):
            copy = tensor.clone()
            began = clock()
            sampler(copy, metadata)
            times.append(clock() - began)
        return float(np.median(times[1:])) / batch * 1e3

    return measure


def strategies(with_stock: bool) -> None:
    x, peaked = normal(B, V), zipf(B, V)
    bits, peaked_bits = bfloat16(x), bfloat16(peaked)
    keys = [
        "strategy",
        "float32",
        "peaked",
        "reads",
        "stock",
        "ratio",
        "bfloat16",
        "peaked, bf16",
        "bf16 reads",
        "stock, bf16",
        "bf16 ratio",
    ]
    rows: list[dict[str, Any]] = [dict.fromkeys(keys)]
    rows[0] |= {"strategy": "(one read)", "float32": read(x), "bfloat16": read(bits)}
    for name in STRATEGIES:
        columns = joined(name, B, V)
        row: dict[str, Any] = dict.fromkeys(keys)
        row["strategy"] = name
        row["float32"] = milliseconds(ours(columns, x), B)
        row["peaked"] = milliseconds(ours(columns, peaked), B)
        row["bfloat16"] = milliseconds(ours(columns, bits), B)
        row["peaked, bf16"] = milliseconds(ours(columns, peaked_bits), B)
        for kind, name_of_it in (("float32", "reads"), ("bfloat16", "bf16 reads")):
            row[name_of_it] = row[kind] / rows[0][kind]
        theirs = stock(name, B, V) if with_stock else None
        if theirs is not None:
            row["stock"], row["stock, bf16"] = theirs(x), theirs(bits)
            row["ratio"] = row["stock"] / row["float32"]
            row["bf16 ratio"] = row["stock, bf16"] / row["bfloat16"]
        rows.append(row)
    report(
        "sampling",
        f"ms a sequence, V {V:,}, B {B}, N(0, 3²) logits, one thread",
        rows,
        note="peaked: probabilities ~ rank^-1.5. stock: vLLM's sampler, same logits. reads: times "
        "of one plain read of the same rows, NumPy's maximum",
    )


def sizes(quick: bool) -> None:
    rows = []
    shapes = [
        (vocab, batch)
        for vocab in ((32_000, V) if quick else (32_000, 128_256, V, 200_000))
        for batch in (16, 64, 256)
    ]
    if not quick:
        shapes.append((V, 1024))
    for vocab, batch in shapes:
        x = normal(batch, vocab)
        row: dict[str, Any] = {"V": vocab, "B": batch, "read": read(x)}
        for name in STRATEGIES:
            row[name] = milliseconds(ours(joined(name, batch, vocab), x), batch, repeat=5)
        rows.append(row)
    report(
        "sampling", "ms a sequence by vocabulary and batch, float32", rows, file="sampling-sizes"
    )


def weights() -> None:
    """The entries of `sipipe.messages.cost`, microseconds per 100,000 logits."""
    x = normal(B, V)
    unit = 1e3 / (V / 1e5)
    prompts, outputs = texts(B, V)

    def cost(**given: Any) -> float:
        columns = SequenceColumns(V)
        for handle in range(B):
            params = SequenceParams(seed=handle, **given)
            columns.join(handle, params, prompts[handle], outputs[handle])
        return milliseconds(ours(columns, x), B, repeat=5) * unit

    temperature = cost()
    measured = {
        "greedy": cost(temperature=0.0),
        "temperature": temperature,
        "top_k": cost(top_k=50),
        "large_top_k": cost(top_k=1000),
        "min_p": cost(min_p=0.01),
        "top_p": cost(top_p=0.95),
        "mask": cost(allowed_token_ids=list(range(100))) - temperature,
        "logprobs": cost(logprobs=5) - temperature,
        "all_logprobs": cost(logprobs=-1) - temperature,
    }
    rows = [{"term": k, "measured": v, "in use": WEIGHTS[k]} for k, v in measured.items()]
    report("sampling", "cost weights, µs per 100,000 logits", rows, file="sampling-weights")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer sizes")
    parser.add_argument("--stock", action=argparse.BooleanOptionalAction, default=True)
    tables: dict[str, Callable[[], None]] = {
        "strategies": lambda: strategies(options.stock),
        "sizes": lambda: sizes(options.quick),
        "cliffs": cliffs,
        "weights": weights,
    }
    parser.add_argument("--only", choices=tables, help="one table")
    options = parser.parse_args()
    warm_up()
    for name, table in tables.items():
        if options.only in (None, name):
            table()


if __name__ == "__main__":
    main()
