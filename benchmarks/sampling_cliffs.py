"""Requests that once cost many times a plain one, beside the times that they should take.

    python -m benchmarks.sampling --only cliffs

16 rows of 200,000 float32, which a core's own caches do not hold but a shared one may. The rows of
the served dtype, bfloat16, are 64 of 151,936, those of SmolLM2 32 of 49,152, flat ones 16 of 200,000.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from benchmarks.harness import median_seconds, report
from benchmarks.smollm2_logits import smollm2
from sipipe.messages.params import SequenceParams
from sipipe.sampler.state import SequenceColumns

V, B = 200_000, 16
SERVED_V, SERVED_B = 151_936, 64
FAR_B = 256
MANY = 1024
LONG = 20_000
LISTED = 100_000
Logits = np.ndarray[Any, Any]


def aligned(x: Logits) -> Logits:
    """``x`` from the begin of a cache line on, as an engine's logits lie."""
    room = np.zeros(x.nbytes + 64, np.uint8)
    first = -room.ctypes.data % 64
    copy = room[first : first + x.nbytes].view(x.dtype).reshape(x.shape)
    copy[:] = x
    return copy


def bfloat16(x: Logits) -> Logits:
    return aligned((x.view(np.uint32) >> 16).astype(np.uint16))


def widened(bits: Logits) -> Logits:
    """float32 of bits of bfloat16."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def normal(batch: int, vocab: int, deviation: float = 3.0) -> Logits:
    """Logits N(0, deviation squared), float32."""
    x = np.random.default_rng(0).standard_normal((batch, vocab), dtype=np.float32)
    x *= deviation
    return aligned(x)


def zipf(batch: int, vocab: int) -> Logits:
    """Peaked logits: probabilities ~ rank ** -1.5, ranks permuted."""
    rng = np.random.default_rng(0)
    law = (-1.5 * np.log(np.arange(1, vocab + 1))).astype(np.float32)
    return aligned(np.stack([rng.permutation(law) for _ in range(batch)]))


class Case(NamedTuple):
    """``rows`` sequences that ask for ``params``; they take ``target`` ms each at most."""

    name: str
    target: float | None
    logits: Logits
    params: dict[str, Any]
    prompt: int = 0
    output: int = 0
    grammar: bool = False
    mode: Any = "raw_logprobs"


def cases() -> Iterator[Case]:
    x = normal(B, V)
    yield Case("temperature (for comparison)", None, x, {})
    yield Case(
        "processed_logprobs mode, 20 logprobs", 0.25, x, {"logprobs": 20}, mode="processed_logprobs"
    )
    long = {"repetition_penalty": 1.1}
    yield Case("repetition penalty, 20 K + 20 K seen", None, x, long, LONG, LONG)
    yield Case("the same and one logit bias", 0.25, x, {**long, "logit_bias": {5: 1.0}}, LONG, LONG)
    yield Case("the same and a grammar", 0.25, x, long, LONG, LONG, True)
    top_p = {"top_p": 0.999}
    yield Case("top-p 0.999, zipf", 0.2, zipf(B, V), top_p)
    yield Case("top-p 0.999, normal", 0.2, x, top_p)
    yield Case("top-p 0.999, flat", 0.2, normal(B, V, 0.01), top_p)
    yield Case("top-p 0.999, bfloat16", 0.2, bfloat16(x), top_p)
    yield Case("top-k 100,000", 0.4, x, {"top_k": 100_000})
    yield Case("top-k V - 1", 0.4, x, {"top_k": V - 1})
    equal = np.zeros((B, V), np.float32)
    yield Case("top-p 0.95, all logits equal", 0.4, equal, {"top_p": 0.95})
    two = bfloat16((x > 0).astype(np.float32))
    yield Case("top-p 0.95, two values, bfloat16", 0.4, two, {"top_p": 0.95})
    for dtype, made in (("float32", lambda x: x), ("bfloat16", bfloat16)):
        trained = smollm2()
        real = aligned(trained if dtype == "bfloat16" else widened(trained))
        for kind, rows in (("SmolLM2", real), ("flat", made(normal(B, V, 0.01)))):
            yield Case(f"{kind}, {dtype}: temperature", None, rows, {})
            for p in (1e-9, 1e-5, 0.05):
                yield Case(f"{kind}, {dtype}: min-p {p:g}", None, rows, {"min_p": p})
            for p in (1e-6, 0.01, 0.03):
                yield Case(f"{kind}, {dtype}: top-p {p:g}", None, rows, {"top_p": p})
            yield Case(f"{kind}, {dtype}: 20 logprobs", None, rows, {"logprobs": 20})
    yield Case("all logprobs", 4.0, x, {"logprobs": -1})
    served = bfloat16(normal(SERVED_B, SERVED_V))
    yield Case("bfloat16: greedy", None, served, {"temperature": 0.0})
    far = normal(FAR_B, SERVED_V)  # more than any cache here: from memory
    yield Case(f"greedy, {FAR_B} rows of {SERVED_V:,}", None, far, {"temperature": 0.0})
    yield Case(f"bfloat16: greedy, {FAR_B} rows", None, bfloat16(far), {"temperature": 0.0})
    yield Case("bfloat16: temperature", 0.018, served, {})
    penalties = {"repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1}
    yield Case("bfloat16: penalties, 200 + 200 seen", 0.018, served, penalties, 200, 200)
    yield Case("bfloat16: top-p 0.95", 0.035, served, {"top_p": 0.95})
    peaked = bfloat16(zipf(SERVED_B, SERVED_V))
    yield Case("bfloat16: top-p 0.95, zipf", 0.025, peaked, {"top_p": 0.95})


def prepared(case: Case) -> Callable[[], object]:
    """What draws one token for each row of ``case``."""
    batch, vocab = case.logits.shape
    columns = SequenceColumns(vocab, logprobs_mode=case.mode)
    rng = np.random.default_rng(1)
    for handle in range(batch):
        seen = [rng.integers(0, vocab, size) for size in (case.prompt, case.output)]
        columns.join(handle, SequenceParams(seed=handle, **case.params), *seen)
    words = -(-vocab // 32)
    mask = rng.integers(-(2**31), 2**31, (batch, words), dtype=np.int32) if case.grammar else None
    handles = np.arange(batch)
    return lambda: columns.sample(handles, case.logits, bitmask=mask)


def one_among_many() -> tuple[float, float, float]:
    """Milliseconds of `MANY` sequences with top-k 50; what one adds by asking for all logprobs; and
    what it takes alone, just after the others, when the caches hold theirs."""
    x = normal(64, V)
    handles = np.arange(MANY)

    def batch(wide: bool) -> SequenceColumns:
        columns = SequenceColumns(V)
        for handle in range(MANY):
            asked = -1 if wide and handle == 7 else None
            columns.join(handle, SequenceParams(seed=handle, top_k=50, logprobs=asked))
        return columns

    plain, wide = batch(False), batch(True)
    calls = (
        lambda: plain.sample(handles, x, handles % len(x)),
        lambda: wide.sample([7], x, [7]),
        lambda: wide.sample(handles, x, handles % len(x)),
    )
    # In turn, because the difference is small beside what a machine varies over seconds.
    times = [[median_seconds(call, repeat=1, warmup=0) for call in calls] for _ in range(16)][1:]
    without, alone, within = np.array(times).T * 1e3
    return float(np.median(without)), float(np.median(within - without)), float(np.median(alone))


def joining(params: dict[str, Any], vocab: int = V) -> float:
    """Milliseconds to add a sequence."""
    columns, times = SequenceColumns(vocab), []
    given = SequenceParams.of(SimpleNamespace(**params))  # as a sampler is given them
    for _ in range(9):
        began = time.perf_counter()
        columns.join(0, given)
        times.append(time.perf_counter() - began)
        columns.leave(0)
    return float(np.median(times)) * 1e3


def cliffs() -> None:
    rows: list[dict[str, Any]] = []

    def add(name: str, milliseconds: float, target: float | None) -> None:
        met = None if target is None else "yes" if milliseconds <= target else "no"
        rows.append({"case": name, "ms": milliseconds, "at most": target, "met": met})
        rows[-1] |= {"one read": None, "reads": None}

    for case in cases():
        plain = median_seconds(lambda case=case: case.logits.max(axis=1), repeat=9, budget=1.0)
        taken = median_seconds(prepared(case), repeat=9, budget=1.0)
        add(case.name, taken / len(case.logits) * 1e3, case.target)
        rows[-1]["one read"], rows[-1]["reads"] = plain / len(case.logits) * 1e3, taken / plain
    batch, added, alone = one_among_many()
    add(f"{MANY:,} with top-k 50, the whole batch", batch, None)
    add("one of them with all logprobs adds", added, alone)
    some = np.random.default_rng(2).permutation(V)[:LISTED].tolist()
    add("join, bias on 100 K tokens", joining({"logit_bias": dict.fromkeys(some, 0.5)}), 1.0)
    add("join, 100 K allowed tokens", joining({"allowed_token_ids": some}), 1.0)
    report(
        "sampling",
        f"ms a sequence, V {V:,}, B {B}, float32; bfloat16: V {SERVED_V:,}, B {SERVED_B}; "
        "SmolLM2: V 49,152, B 32",
        rows,
        note="one thread; batch and joins: ms in all; one with all logprobs adds at most what it "
        "takes alone; one read: NumPy's maximum of the same rows, and how many of them the case takes",
        file="sampling-cliffs",
    )
