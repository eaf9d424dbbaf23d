"""Rows from logits that lie otherwise in memory: columns [V, B], or shards [t, B, V / t].

Copied in their own dtype into a few rows of staging memory, whatever the batch.
"""

# ruff: noqa: ARG001 - an intrinsic names its arguments for its signature; its body uses `arguments`
from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import types
from numba.extending import intrinsic

from sipipe.jit import entry
from sipipe.sampler.kernels import _vector as vec


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


@intrinsic
def _tile(_: Any, x: Any, start: Any, stride: Any, y: Any, target: Any, apart: Any) -> Any:
    """``y[target + j * apart + v] = x[start + v * stride + j]`` for v and j in 0..15."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = signature.args[0]
        vector = vec.VF if kind.dtype == types.float32 else vec.V16

        def body(
            inner: Any, source: Any, start: Any, stride: Any, sink: Any, target: Any, apart: Any
        ) -> Any:
            rows = []
            for _ in range(vec.LANES):
                address = inner.bitcast(inner.gep(source, [start]), vector.as_pointer())
                rows.append(inner.load(address))
                rows[-1].align = 2
                start = inner.add(start, stride)
            for row in _transposed(inner, rows):
                vec.store_stored(inner, row, sink, target)
                target = inner.add(target, apart)
            return ir.Constant(vec.I64, 0)

        pointers = {
            i: vec.data_pointer(context, builder, signature.args[i], arguments[i]) for i in (0, 3)
        }
        given = [pointers.get(i, argument) for i, argument in enumerate(arguments)]
        return vec.outlined(builder, f"sipipe_tile_{kind.dtype}", vec.I64, given, body)

    return types.intp(x, types.intp, types.intp, y, types.intp, types.intp), generate


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


@entry
def join_shards(
    flat: Any, start: int, shards: int, width: int, apart: int, vocab: int, row: Any
) -> None:
    """One row from the shards ``flat[start + s * apart :][:width]``."""
    for s in range(shards):
        size = min(width, vocab - s * width)
        for j in range(size):
            row[s * width + j] = flat[start + s * apart + j]
