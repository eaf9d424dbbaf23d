"""``python -m tests.sampler.fuzz SEED CASES``: logits that are no numbers, or hardly, in all modes.

Each case is a row with NaN, infinities, ties and overflow, of any dtype, some of it behind masks, and
a request for it at random; its token, scores and rank are compared with float64, where they are
defined. A case that takes a minute is one that hangs: the process ends, its stack shown.
"""

from __future__ import annotations

import faulthandler
import sys

import numpy as np
from tests.sampler import naive
from tests.sampler.support import bfloat16, bitmask, from_bfloat16

from sipipe.messages.params import SequenceParams
from sipipe.sampler.state import SequenceColumns

HANGS = 60.0
MODES = ("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits")
MASKS = ("bad words", "allow list", "grammar", "stops", "bias")
LARGEST = float(np.finfo(np.float32).max)


def row(rng: np.random.Generator, size: int, dtype: str) -> np.ndarray:
    """Logits [size] of ``dtype``, finite."""
    largest = {"float32": 3.4e38, "bfloat16": 3.3e38, "float16": 65504.0}[dtype]
    x = rng.normal(size=size)
    match rng.integers(6):
        case 0:
            x = np.round(x)
        case 1:
            x = np.zeros(size)
        case 2:
            x *= 10.0 ** rng.integers(30, 38)
        case 3:
            x = np.sign(x) * largest
        case 4:
            x = np.sign(x) * 2.0 ** rng.uniform(-149, 127, size)
    x = np.clip(x * 3, -largest, largest).astype(np.float32)
    return bfloat16(x) if dtype == "bfloat16" else x.astype(dtype)


def poison(rng: np.random.Generator, x: np.ndarray, where: np.ndarray) -> None:
    """Put NaN and infinities into ``x`` at ``where``, first, last and in between."""
    for value in rng.choice([np.nan, np.inf, -np.inf, -np.nan], rng.integers(1, 4)):
        some = where[rng.random(where.size) < rng.choice([0.01, 0.3, 1.0])]
        bits = bfloat16(np.array([value], np.float32))[0] if x.dtype == np.uint16 else value
        x[some] = bits


def request(rng: np.random.Generator, hidden: np.ndarray, size: int, how: str) -> dict:
    """Parameters that mask ``hidden`` by ``how``, if that is one of theirs."""
    given: dict = {"temperature": float(rng.choice([0.0, 1e-4, 0.01, 0.1, 0.7, 1.0, 2.0]))}
    given["seed"] = int(rng.integers(1 << 62))
    for name, values in {
        "top_k": [0, 1, 2, size // 2, size - 1, 50],
        "top_p": [1.0, 1e-9, 0.02, 0.5, 0.99, 0.9999999],
        "min_p": [0.0, 1.0, 0.1, 1e-6],
        "repetition_penalty": [1.0, 1.3, 0.5, 1e-30, 1e-46],
        "presence_penalty": [0.0, 2.0, -2.0],
        "frequency_penalty": [0.0, -1.0],
        "logprobs": [None, 0, 1, 2, 5, 20, -1],
    }.items():
        value = values[rng.integers(len(values)) if rng.random() < 0.5 else 0]
        given[name] = value if value is None else type(values[-1])(value)
    if rng.random() < 0.1:
        given["logprob_token_ids"] = rng.integers(size, size=3).tolist()
    if rng.random() < 0.2:
        given["logit_bias"] = {int(t): float(rng.normal()) for t in rng.integers(size, size=5)}
    tokens = hidden.tolist()
    match how:
        case "bad words":
            given["bad_words_token_ids"] = [[token] for token in tokens]
        case "allow list":
            given["allowed_token_ids"] = np.setdiff1d(np.arange(size), hidden).tolist()
        case "stops":
            given |= {"min_tokens": 9, "all_stop_token_ids": tokens}
        case "bias":
            given["logit_bias"] = given.get("logit_bias", {}) | dict.fromkeys(tokens, -np.inf)
    return given


def check(seed: int, number: int) -> None:
    """One case."""
    rng = np.random.default_rng([seed, number])
    size = int(rng.choice([7, 300, 1000, 4096, 20_000], p=[0.2, 0.3, 0.3, 0.1, 0.1]))
    dtype = str(rng.choice(["float32", "float16", "bfloat16"]))
    x, everywhere = row(rng, size, dtype), np.arange(size)
    hidden = rng.choice(everywhere, rng.integers(1, size), replace=False)
    how = str(rng.choice(MASKS))
    poison(rng, x, hidden)
    if rng.random() < 0.1:  # not masked: an error, unless by chance
        poison(rng, x, everywhere)
    params = SequenceParams(**request(rng, hidden, size, how))
    mode = MODES[rng.integers(4)]
    prompt, output = (rng.integers(size, size=n).tolist() for n in (5, 3))
    columns = SequenceColumns(size, logprobs_mode=mode)
    columns.join(0, params, prompt, output)
    allowed = ~np.isin(everywhere, hidden)
    grammar = {"bitmask": bitmask(allowed)} if how == "grammar" else {}
    matrix = x.view(np.uint16 if dtype == "bfloat16" else x.dtype)
    drawn = columns.sample([0], matrix.reshape(1, -1), **grammar)

    wide = from_bfloat16(x) if dtype == "bfloat16" else x.astype(np.float32)
    masks = {"allowed": allowed if how == "grammar" else None}
    for token in hidden.tolist() if how == "bias" else ():
        wide[token] = -np.inf  # a sum with NaN would be NaN
    plain = {**{f: getattr(params, f) for f in params.__struct_fields__}, "temperature": 0.0}
    edited = naive.processed_logits(wide, SequenceParams(**plain), prompt, output, **masks)
    wrong = (
        1 if np.isnan(edited).any()
        else 2 if (edited == np.inf).any()
        else 3 if not np.isfinite(edited).any()
        else 0
    )  # fmt: skip
    assert drawn.codes[0] == wrong, (drawn.codes[0], wrong)
    if wrong:
        return
    token = int(drawn.token_ids[0])
    if params.greedy:
        assert token == edited.argmax()
        scaled = edited.astype(float)
    else:
        scaled = edited.astype(float) / float(np.float32(params.temperature))
        check_kept(scaled, token, params, size)
    if params.logprobs is None and not params.logprob_token_ids:
        return
    found = drawn.logprobs[0]
    raw = from_bfloat16(x) if dtype == "bfloat16" else x.astype(np.float32)
    raw = np.where(allowed | (how != "grammar"), raw, -np.inf)
    raw[~(raw < np.inf)] = -np.inf
    expected = raw if mode.startswith("raw") else scaled
    check_scores(expected.astype(float), found, token, params, mode)


def check_kept(scaled: np.ndarray, token: int, params: SequenceParams, size: int) -> None:
    """``token`` is among those that the filters keep, but for rounding."""
    with np.errstate(invalid="ignore", over="ignore"):
        slack = 1e-6 * abs(scaled[token]) + 1e-5
        own = scaled[token]
        assert np.isfinite(own)
        kept = scaled
        if params.min_p > 0:
            kept = kept[kept >= kept.max() + np.log(params.min_p) - slack]
            assert own >= kept.min(), "min_p"
        if 0 < params.top_k < size:
            least = np.sort(kept)[-min(params.top_k, kept.size)]
            assert own >= least - slack, "top_k"
            kept = kept[kept >= least]
        if params.top_p < 1:
            weights = np.exp(kept - kept.max())
            before = weights[kept > own + slack].sum() / weights.sum()
            assert before <= params.top_p * (1 + 1e-5), "top_p"
        assert own >= kept.max() - 200 - slack, "a token of no weight"


def check_scores(expected, found, token: int, params: SequenceParams, mode: str) -> None:
    """Ids, values and rank of one row, of which ``expected`` has the logits before filters."""
    ids, values = found.token_ids, found.logprobs
    assert ids[0] == token
    assert not np.isnan(values).any()
    assert 1 <= found.rank <= expected.size
    filtered = (params.top_k or params.min_p or params.top_p < 1) and not params.greedy
    if mode.startswith("processed") and (
        filtered or abs(expected[np.isfinite(expected)]).max() > LARGEST
    ):
        return  # tests of filters compare these
    if mode.endswith("logprobs") and np.isfinite(expected).any():
        expected = naive.log_softmax(expected)
    bound = abs(expected[np.isfinite(expected)]).max(initial=0)
    close = {"rtol": 1e-5, "atol": 3e-7 * bound + 1e-5}
    with np.errstate(over="ignore"):
        rounded = expected.astype(np.float32)
    np.testing.assert_allclose(values, rounded[ids], **close)
    own = rounded[token]
    if np.isfinite(own):
        low, high = (
            (expected >= own + close["atol"]).sum(),
            (expected >= own - 2 * close["atol"]).sum(),
        )
        assert low <= found.rank <= high, (low, found.rank, high)
    else:
        assert found.rank == expected.size
    if not params.logprob_token_ids:
        assert len(set(ids[1:].tolist())) == ids.size - 1
        np.testing.assert_allclose(values[1:], np.sort(rounded)[::-1][: ids.size - 1], **close)


def main() -> None:
    seed, cases = map(int, sys.argv[1:])
    for number in range(cases):
        faulthandler.dump_traceback_later(HANGS, exit=True)
        try:
            check(seed, number)
        except Exception as error:
            raise AssertionError(f"case {number} of seed {seed}") from error
        if number % 100 == 0:
            print(number, flush=True)


if __name__ == "__main__":
    main()
