"""Upper bounds of the weights in a block, at a third of the cost of exponentials; in vector code.

A weight is 2 ** p with p = (x - top) / temperature * log2(e) <= 0. The float32 whose bits are the
integer (p + 127) * 2 ** 23 is 2 ** floor(p) * (1 + f), where f is the fraction of p: no less than
2 ** p, and at most `LARGEST_RATIO` times it. ``slope`` is log2(e) / temperature * 2 ** 23.
"""

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import types

from sipipe.sampler.kernels import _vector as vec
from sipipe.sampler.kernels._vector import ARRAY, operation
from sipipe.sampler.kernels.blocks import (
    Sums,
    offset_of,
    paired_vectors,
    vectors_of,
    with_masks,
)

LARGEST_RATIO = 1.0616
"""(1 + f) / 2 ** f is at most 1.06148, at f = 0.4427; the rest is rounding."""
ROUNDING = 1.0 - 2.0**-16
"""What the bound may fall short of a weight by: the product is rounded to 2 ** -17 of itself."""
UNIT = 2.0**23

_REAL, _INT = types.float32, types.intp


def _bounds(builder: Any, vectors: Any, top: Any, slope: Any, masks: list[Any], keep: Any) -> Any:
    """Sum of the bounds, 0 where masked or below 2 ** -127; ``keep(v, bound)`` sees each."""
    top, slope = vec.splat(builder, top, vec.VF), vec.splat(builder, slope, vec.VF)
    one, zero = vec.constant(vec.VF, 127 * UNIT), vec.constant(vec.VF, 0.0)
    sums = Sums(builder)
    for v, value in enumerate(vectors):
        bits = vec.multiply_add(builder, builder.fsub(value, top), slope, one)
        bits = vec.maximum(builder, bits, zero)
        if masks[v] is not None:
            bits = builder.select(masks[v], zero, bits)
        bound = builder.bitcast(builder.fptosi(bits, vec.VI), vec.VF)
        keep(v, bound)
        sums.add(bound)
    return sums.total()


@operation(_REAL, ARRAY, _INT, ARRAY, _INT, _REAL, _REAL)
def block_bound_sum(
    builder: Any, kind: Any, x: Any, start: Any, mask: Any, word: Any, top: Any, slope: Any
) -> Any:
    """Sum of the bounds of what is not masked of a block, whose maximum is at most ``top``."""

    paired = kind == types.uint16

    def sums(masks: list[Any]) -> Any:
        vectors = (
            paired_vectors(builder, x, start) if paired else vectors_of(builder, x, start, kind)
        )
        return _bounds(builder, vectors, top, slope, masks, lambda *_: None)

    return with_masks(builder, mask, word, sums, "paired" if paired else "plain")


@operation(_REAL, ARRAY, _INT, _REAL, _REAL, ARRAY)
def block_bounds(builder: Any, kind: Any, x: Any, start: Any, top: Any, slope: Any, y: Any) -> Any:
    """The bounds of a block into ``y``, in the order of its logits; their sum. Masks count not."""

    def keep(v: int, bound: Any) -> None:
        vec.store_vector(builder, bound, y, offset_of(builder, ir.Constant(vec.I64, 0), v))

    vectors = vectors_of(builder, x, start, kind)
    return _bounds(builder, vectors, top, slope, [None] * vec.VECTORS, keep)


@operation(types.Tuple((_REAL, types.int64)), ARRAY, _INT, ARRAY, _INT, _REAL, _REAL, _REAL)
def block_above(
    builder: Any, kind: Any, x: Any, start: Any, mask: Any, word: Any,
    value: Any, reference: Any, scale: Any,
) -> Any:  # fmt: skip
    """(sum of ``2 ** ((x - reference) * scale)`` where x > ``value``, how many equal ``value``).

    Over what is not masked of a block. ``value`` is finite.
    """
    value, reference, scale = (
        vec.splat(builder, scalar, vec.VF) for scalar in (value, reference, scale)
    )

    def above(masks: list[Any]) -> Any:
        sums = Sums(builder)
        count = ir.Constant(vec.I64, 0)
        for v, logit in enumerate(vectors_of(builder, x, start, kind)):
            equal = builder.fcmp_ordered("==", logit, value)
            out = builder.fcmp_unordered("<=", logit, value)
            if masks[v] is not None:
                equal = builder.and_(equal, builder.not_(masks[v]))
                out = builder.or_(out, masks[v])
            power = builder.fmul(builder.fsub(logit, reference), scale)
            sums.add(vec.exp2(builder, power, out))
            count = builder.add(count, vec.count_lanes(builder, equal))
        return vec.pair(builder, sums.total(), count)

    return with_masks(builder, mask, word, above)
