"""Block operations and the random numbers against slow twins."""

from __future__ import annotations

import numba
import numpy as np
import pytest
from tests.sampling.support import bfloat16, from_bfloat16

from sipipe.sampling import derive_seed
from sipipe.sampling.kernels import blocks
from sipipe.sampling.kernels.philox import philox4x32, uniform


@numba.njit
def _max(x, at):
    return blocks.block_max(x, at)


@numba.njit
def _copy(x, at, y, to):
    return blocks.block_copy(x, at, y, to)


@numba.njit
def _mask(y, at, words, first):
    return blocks.block_mask(y, at, words, first)


@numba.njit
def _exp(x, at, top, scale, y):
    return blocks.block_exp(x, at, top, scale, y)


@numba.njit
def _exp_sum(x, at, top, scale):
    return blocks.block_exp_sum(x, at, top, scale)


@numba.njit
def _gather(x, at, first, threshold, ids, values, count):
    return blocks.block_gather(x, at, first, threshold, ids, values, count)


@numba.njit
def _count(x, at, shift, offset, threshold):
    return blocks.block_count(x, at, shift, offset, threshold)


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
def test_blocks(dtype: str, at: int) -> None:
    x, values = stored(dtype)
    block = values[at : at + 256]
    assert _max(x, at) == (block.max(), False)
    y = np.zeros(600, np.float32)
    assert _copy(x, at, y, 40) == (block.max(), False)
    np.testing.assert_array_equal(y[40:296], block)
    assert not y[:40].any()
    assert not y[296:].any()
    top, scale = np.float32(block.max()), np.float32(1.4426950408889634)
    exact = np.exp(block.astype(float) - float(top))
    assert _exp_sum(x, at, top, scale) == pytest.approx(exact.sum(), rel=1e-6)
    ids, kept = np.zeros(600, np.int32), np.zeros(600, np.float32)
    threshold = np.float32(2.0)
    count = _gather(x, at, 5000, threshold, ids, kept, 7)
    where = np.flatnonzero(block >= threshold)
    np.testing.assert_array_equal(ids[7:count], where + 5000)
    np.testing.assert_array_equal(kept[7:count], block[where])
    scores = (block - np.float32(1.5)) - np.float32(0.25)
    assert _count(x, at, np.float32(1.5), np.float32(0.25), np.float32(-1)) == (scores >= -1).sum()


@pytest.mark.parametrize("where", [0, 15, 16, 255])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_nan_is_found_anywhere(where: int, dtype: str) -> None:
    x, _ = stored(dtype)
    x = x[:256].copy()
    x[where] = {"float32": np.nan, "bfloat16": 0xFFC1, "float16": 0x7E01}[dtype]
    assert _max(x, 0)[1]


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


def test_masks_by_bits() -> None:
    rng = np.random.default_rng(0)
    words = rng.integers(-(2**31), 2**31, 20, dtype=np.int64).astype(np.int32)
    bits = (words[3:11].view(np.uint32)[:, None] >> np.arange(32)) & 1
    y = rng.normal(size=300).astype(np.float32)
    expected = np.where(bits.reshape(-1) == 1, y[10:266], -np.inf)
    assert _mask(y, 10, words, 3) == (expected.max(), False)
    np.testing.assert_array_equal(y[10:266], expected)


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


def test_uniform() -> None:
    drawn = np.array([uniform(np.uint64(2**64 - 1), np.int64(i)) for i in range(4000)])
    assert drawn.min() >= 0
    assert drawn.max() < 1
    assert abs(drawn.mean() - 0.5) < 0.02
    assert uniform(np.uint64(3), np.int64(9)) == uniform(np.uint64(3), np.int64(9))
    assert uniform(np.uint64(4), np.int64(9)) != uniform(np.uint64(3), np.int64(9))


def test_derived_seeds_are_fixed() -> None:
    assert derive_seed(0, "a") == derive_seed(0, "a")
    assert len({derive_seed(e, f"{r}") for e in range(10) for r in range(100)}) == 1000
    assert derive_seed(1, "2") != derive_seed(12, "")
    assert 0 <= derive_seed(0, "cmpl-1") < 2**64
