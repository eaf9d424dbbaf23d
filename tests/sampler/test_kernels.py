"""Block operations and the random numbers against slow twins."""

from __future__ import annotations

import subprocess
import sys

import numba
import numpy as np
import pytest
from tests.sampler.support import bfloat16, from_bfloat16

from sipipe.messages.params import derive_seed
from sipipe.sampler.kernels import blocks, bounds, lists
from sipipe.sampler.kernels.philox import philox4x32, uniform, uniforms

NO_MASK = np.zeros(64, np.uint32)


def compiled(function):
    """Inline code of kernels, to be called from Python."""

    @numba.njit
    def call(*args):
        return function(*args)

    return call


_max_of_groups, _exp, _exp_sum, _gather, _count = map(
    compiled,
    (blocks.block_max, blocks.block_exp, blocks.block_exp_sum, blocks.block_gather,
     blocks.block_count),
)  # fmt: skip
_bounds, _split, _split_exactly = map(
    compiled, (bounds.block_bounds, bounds.block_split, bounds.block_split_exactly)
)
_penalize, _mass = map(compiled, (lists.list_penalize, lists.list_mass))


def _max(x, at, mask, word):
    return _max_of_groups(x, at, mask, word, np.zeros(32, np.float32), 0)


def stored(dtype: str, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(the array kernels read, its values as float32), 1,000 of them."""
    x = (np.random.default_rng(seed).normal(size=1000) * 5).astype(np.float32)
    x[::17] = -np.inf
    if dtype == "bfloat16":
        return bfloat16(x), from_bfloat16(bfloat16(x))
    if dtype == "float16":
        return x.astype(np.float16).view(np.int16), x.astype(np.float16).astype(np.float32)
    return x, x


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("at", [0, 3, 700])
@pytest.mark.parametrize("masked", [False, True])
def test_blocks(dtype: str, at: int, masked: bool) -> None:
    x, values = stored(dtype)
    mask = NO_MASK
    block = values[at : at + 256]
    if masked:
        mask = np.random.default_rng(at).integers(0, 2**32, 64, dtype=np.uint64)
        mask = mask.astype(np.uint32)
        bits = (mask[5:13, None] >> np.arange(32, dtype=np.uint32)) & 1
        block = np.where(bits.reshape(-1) == 1, np.float32(-np.inf), block)
    groups = np.zeros(40, np.float32)
    assert _max_of_groups(x, at, mask, 5, groups, -1) == (block.max(), False)
    assert not groups.any()
    assert _max_of_groups(x, at, mask, 5, groups, 3) == (block.max(), False)
    np.testing.assert_array_equal(groups[3:35], block.reshape(8, 32).max(axis=0))
    assert not groups[:3].any()
    assert not groups[35:].any()
    top, scale = np.float32(block.max()), np.float32(1.4426950408889634)
    exact = np.exp(block.astype(float) - float(top))
    assert _exp_sum(x, at, mask, 5, top, scale) == pytest.approx(exact.sum(), rel=1e-6)
    value = np.sort(block)[-30]
    reaching, slope = block >= value, np.float32(scale * 2**23)
    least = np.sort(block)[-60]
    exact[block < least] = 0.0
    above, rest = _split_exactly(x, at, mask, 5, value, least, top, slope)
    assert above == pytest.approx(exact[reaching].sum(), rel=1e-6)
    assert rest == pytest.approx(exact[~reaching].sum(), rel=1e-6)
    bound, rest_bound = _split(x, at, mask, 5, value, least, top, slope)
    assert above * bounds.ROUNDING <= bound <= above * bounds.LARGEST_RATIO
    assert rest * bounds.ROUNDING <= rest_bound <= rest * bounds.LARGEST_RATIO
    ids, kept = np.zeros(600, np.int32), np.zeros(600, np.float32)
    threshold = np.float32(2.0)
    count = _gather(x, at, mask, 5, 5000, threshold, ids, kept, 7)
    where = np.flatnonzero(block >= threshold)
    np.testing.assert_array_equal(ids[7:count], where + 5000)
    np.testing.assert_array_equal(kept[7:count], block[where])
    for least in (-2.0, -0.1, 0.0, 1e-40, 3.1, *block[:9][np.isfinite(block[:9])]):
        assert _count(x, at, mask, 5, np.float32(least)) == (block >= np.float32(least)).sum()


def test_bounds() -> None:
    x, _ = stored("float32")
    top, slope, found = (
        x[3:].max(),
        np.float32(1.4426950408889634 * 2**23),
        np.zeros(300, np.float32),
    )
    mass = _bounds(x, 3, np.float32(1.0), top, slope, found)
    weights = np.exp2((x[3:259] - top).astype(float) * (float(slope) / 2**23)) * (x[3:259] >= 1.0)
    assert (found[3:259] >= weights * bounds.ROUNDING).all()
    assert (found[3:259] <= weights * bounds.LARGEST_RATIO).all()
    assert mass == pytest.approx(found.sum(), rel=1e-6)
    assert not found[:3].any()
    assert not found[259:].any()


@pytest.mark.parametrize("where", [0, 15, 16, 255])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_nan_is_found_anywhere_but_behind_a_mask(where: int, dtype: str) -> None:
    x, _ = stored(dtype)
    x = x[:256].copy()
    for nan in {"float32": [np.nan], "bfloat16": [0x7F81, 0xFFC1], "float16": [0x7E01]}[dtype]:
        x[where] = nan
        assert _max(x, 0, NO_MASK, 0)[1]
    mask = np.zeros(8, np.uint32)
    mask[where // 32] = np.uint32(1) << np.uint32(where % 32)
    assert not _max(x, 0, mask, 0)[1]


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_maximum_of_any_bfloat16(sign: float) -> None:
    """Compared as integers: of one sign only, infinite, and 0 with either sign."""
    x = bfloat16(sign * np.abs(np.random.default_rng(0).normal(size=256) * 1e30))
    cases = [x, np.concatenate([x[:255], bfloat16(np.array([0.0 * sign]))])]
    cases += [np.full(256, bits, np.uint16) for bits in (0x7F80, 0xFF80, 0x8000, 0, 0x8001, 1)]
    for bits in cases:
        assert _max(bits, 0, NO_MASK, 0) == (from_bfloat16(bits).max(), False)


def test_penalties_round_as_float32_steps() -> None:
    rng = np.random.default_rng(0)
    values = (rng.normal(size=300) * 4).astype(np.float32)
    counts = rng.integers(0, 4, 300).astype(np.int32)
    repetition, frequency, presence = np.float32(1.3), np.float32(0.7), np.float32(-0.3)
    inverse = np.float32(1) / repetition
    expected = values.copy()
    for i in range(40, 296):
        expected[i] *= inverse if expected[i] > 0 else repetition
        if counts[i - 5] > 0:
            expected[i] -= frequency * np.float32(counts[i - 5])
            expected[i] -= presence
    _penalize(values, 40, counts, 35, repetition, inverse, frequency, presence)
    np.testing.assert_array_equal(values, expected)


def test_mass_above_a_threshold() -> None:
    values = np.random.default_rng(0).normal(size=300).astype(np.float32)
    weights = np.exp(values)
    mass, count = _mass(values, weights, 30, np.float32(0.5))
    kept = values[30:286] >= 0.5
    assert count == kept.sum()
    assert mass == pytest.approx(weights[30:286][kept].sum(), rel=1e-6)


def test_exponentials_are_exact_to_float32() -> None:
    x = np.linspace(-90, 0, 256, dtype=np.float32)
    x[0] = -np.inf
    y = np.zeros(256, np.float32)
    _exp(x, 0, np.float32(0), np.float32(1.4426950408889634), y)
    exact = np.exp(x.astype(float))
    normal = exact > 2.0**-125
    np.testing.assert_allclose(y[normal], exact[normal], rtol=1e-5)  # exponent rounds at -90
    near = x > -1
    np.testing.assert_allclose(y[near], exact[near], rtol=2.5e-7)
    assert y[0] == 0
    assert y[-1] == 1


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter: tuple, key: tuple, answer: tuple) -> None:
    """The vectors published with the generator (Random123)."""
    words = philox4x32(*(np.uint64(word) for word in (*counter, *key)))
    assert tuple(int(word) for word in words) == answer


def test_pairs_of_an_attempt() -> None:
    """Uniform each, and not those of another attempt."""
    pairs = np.array([uniforms(np.uint64(1), np.int64(2), i) for i in range(4000)])
    assert pairs.min() >= 0
    assert pairs.max() < 1
    assert np.abs(pairs.mean(axis=0) - 0.5).max() < 0.02
    assert abs(np.corrcoef(pairs.T)[0, 1]) < 0.05
    assert np.unique(pairs).size == pairs.size
    assert pairs[0, 0] == uniform(np.uint64(1), np.int64(2))


def test_derived_seeds_are_fixed() -> None:
    assert derive_seed(0, "a") == 15270482384145340437
    assert len({derive_seed(e, f"{r}") for e in range(10) for r in range(100)}) == 1000
    assert derive_seed(1, "2") != derive_seed(12, "")
    assert 0 <= derive_seed(0, "cmpl-1") < 2**64


def test_a_warm_up_has_every_kernel_that_is_called_from_python() -> None:
    """Else `sipipe warm` leaves something to compile while requests wait."""
    code = """
from sipipe import jit
from sipipe.sampler import warmup
from sipipe.sampler.drafts import warm_up_ngrams
from sipipe.sampler.kernels import ngrams, rows, tables
warmup.warm_up(["float32"])
warm_up_ngrams()
for module in (ngrams, rows, tables):
    for name, it in vars(module).items():
        if isinstance(getattr(it, "_cache", None), jit._Cache) and not it.signatures:
            print(name)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    )
    assert not done.stdout
