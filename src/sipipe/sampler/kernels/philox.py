"""Counter-based random numbers: a draw is a pure function of (seed, position).

Philox 4x32 with 10 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011):
the seed is the key, the position (number of output tokens so far) the counter.
"""

from typing import Any

import numpy as np

from sipipe.jit import entry, kernel

_M0 = np.uint64(0xD2511F53)
_M1 = np.uint64(0xCD9E8D57)
_W0 = np.uint64(0x9E3779B9)
_W1 = np.uint64(0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)


@entry
def philox4x32(c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any) -> Any:
    """Ten rounds over four counter words and two key words (32 bits each, held in uint64)."""
    a = np.uint64(c0)
    b = np.uint64(c1)
    c = np.uint64(c2)
    d = np.uint64(c3)
    x = np.uint64(k0)
    y = np.uint64(k1)
    for _ in range(10):
        p = _M0 * a
        q = _M1 * c
        a = (q >> _32) ^ b ^ x
        b = q & _LOW
        c = (p >> _32) ^ d ^ y
        d = p & _LOW
        x = (x + _W0) & _LOW
        y = (y + _W1) & _LOW
    return a, b, c, d


@kernel
def _unit(high: Any, low: Any) -> Any:
    return float(((high << _32) | low) >> np.uint64(11)) * (1.0 / 9007199254740992.0)


@entry
def uniforms(seed: Any, position: Any, attempt: Any) -> Any:
    """Two float64 in [0, 1) with 53 random bits each, for output token number ``position``.
    ``attempt``: how many pairs before have not led to a token."""
    key = np.uint64(seed)
    at = np.uint64(position)
    zero = np.uint64(0)
    a, b, c, d = philox4x32(at & _LOW, at >> _32, np.uint64(attempt), zero, key & _LOW, key >> _32)
    return _unit(a, b), _unit(c, d)


@entry
def uniform(seed: Any, position: Any) -> Any:
    """The first of the first pair of `uniforms`."""
    return uniforms(seed, position, 0)[0]
