"""Rows from logits that lie as columns [V, B] in memory, copied in their own dtype."""

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import types

from sipipe.jit import entry
from sipipe.sampler.kernels import _vector as vec
from sipipe.sampler.kernels._vector import ARRAY, operation


def _transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """16 vectors of 16 lanes, lane j of vector i exchanged with lane i of vector j.

    Four rounds, in each of which two vectors at distance d exchange half of their lanes.
    """
    lanes = range(vec.LANES)
    for d in (8, 4, 2, 1):
        low = [j if not j & d else vec.LANES + j - d for j in lanes]
        high = [j + d if not j & d else vec.LANES + j for j in lanes]
        done = list(rows)
        for i in lanes:
            if not i & d:
                for at, order in ((i, low), (i + d, high)):
                    mask = ir.Constant(vec.VI, order)
                    done[at] = builder.shuffle_vector(rows[i], rows[i + d], mask)
        rows = done
    return rows


@operation(types.intp, ARRAY, types.intp, types.intp, ARRAY, types.intp, types.intp)
def _tile(
    builder: Any, kind: Any, x: Any, start: Any, stride: Any, y: Any, target: Any, apart: Any
) -> Any:
    """``y[target + j * apart + v] = x[start + v * stride + j]`` for v and j in 0..15."""
    rows = []
    for _ in range(vec.LANES):
        rows.append(vec.load_stored(builder, x, start, kind))
        start = builder.add(start, stride)
    for row in _transposed(builder, rows):
        vec.store_vector(builder, row, y, target)
        target = builder.add(target, apart)
    return ir.Constant(vec.I64, 0)


@entry
def transpose(
    flat: Any, stride: int, vocab: int, first: int, count: int, rows: Any, apart: int
) -> None:
    """Columns ``first`` to ``first + count`` into rows that lie ``apart`` from each other.

    Token v of column ``first + j`` is ``flat[v * stride + first + j]`` and becomes
    ``rows[j * apart + v]``. 16 columns at once go in vector code.
    """
    done = 0
    if count == 16:
        while done + 16 <= vocab:
            _tile(flat, done * stride + first, stride, rows, done, apart)
            done += 16
    for v in range(done, vocab):
        for j in range(count):
            rows[j * apart + v] = flat[v * stride + first + j]
