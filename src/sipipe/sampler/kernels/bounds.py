"""Upper bounds of weights, at a third of the cost of exponentials, and exact sums; in vector code.

A weight is 2 ** p with p = (x - top) / temperature * log2(e) <= 0. The float32 whose bits are the
integer (p + 127) * 2 ** 23 is 2 ** floor(p) * (1 + f), where f is the fraction of p: no less than
2 ** p, and at most `LARGEST_RATIO` times it. ``slope`` is log2(e) / temperature * 2 ** 23.
"""

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import types

from sipipe.sampler.kernels import _vector as vec
from sipipe.sampler.kernels._vector import ARRAY, operation
from sipipe.sampler.kernels.blocks import Sums, offset_of, vectors_of, with_masks

LARGEST_RATIO = 1.0616
"""(1 + f) / 2 ** f is at most 1.06148, at f = 0.4427; the rest is rounding."""
ROUNDING = 1.0 - 2.0**-16
"""Factor by which the bound may fall short of a weight: the product is rounded to 2 ** -17 of it."""
UNIT = 2.0**23

_REAL = types.float32
_INT = types.intp
_SPLIT = types.Tuple((_REAL, _REAL))


def _bound(builder: Any, value: Any, top: Any, slope: Any) -> Any:
    unit_exponent = vec.constant(vec.VF, 127 * UNIT)
    zero = vec.constant(vec.VF, 0.0)
    bits = vec.multiply_add(builder, builder.fsub(value, top), slope, unit_exponent)
    return builder.bitcast(builder.fptosi(vec.maximum(builder, bits, zero), vec.VI), vec.VF)


@operation(_REAL, ARRAY, _INT, _REAL, _REAL, _REAL, ARRAY)
def block_bounds(
    builder: Any, kind: Any, x: Any, start: Any, least: Any, top: Any, slope: Any, y: Any
) -> Any:
    """The bounds of 256 logits into ``y`` from ``start`` on; their sum, float32. 0 below ``least``,
    and below 2 ** -127. None is above ``top``."""
    least, top, slope = (vec.splat(builder, scalar, vec.VF) for scalar in (least, top, slope))
    zero = vec.constant(vec.VF, 0.0)
    sums = Sums(builder)
    for v, value in enumerate(vectors_of(builder, x, start, kind)):
        reached = builder.fcmp_ordered(">=", value, least)
        bound = builder.select(reached, _bound(builder, value, top, slope), zero)
        vec.store_vector(builder, bound, y, offset_of(builder, start, v))
        sums.add(bound)
    return sums.total()


def _split(
    builder: Any, kind: Any, x: Any, start: Any, mask: Any, word: Any, value: Any, least: Any,
    weigh: Any,
) -> Any:  # fmt: skip
    value = vec.splat(builder, value, vec.VF)
    least = vec.splat(builder, least, vec.VF)

    def parts(masks: list[Any]) -> Any:
        reaching = Sums(builder)
        smaller = Sums(builder)
        for v, logit in enumerate(vectors_of(builder, x, start, kind)):
            counts = builder.fcmp_ordered(">=", logit, least)
            if masks[v] is not None:
                counts = builder.and_(counts, builder.not_(masks[v]))
            larger = builder.fcmp_ordered(">=", logit, value)
            weight = weigh(logit)
            reaching.add(weight, lanes=builder.and_(counts, larger))
            smaller.add(weight, lanes=builder.and_(counts, builder.not_(larger)))
        return vec.struct_of(builder, reaching.total(), smaller.total())

    return with_masks(builder, mask, word, parts)


@operation(_SPLIT, ARRAY, _INT, ARRAY, _INT, _REAL, _REAL, _REAL, _REAL)
def block_split(
    builder: Any, kind: Any, x: Any, start: Any, mask: Any, word: Any,
    value: Any, least: Any, top: Any, slope: Any,
) -> Any:  # fmt: skip
    """(sum of the bounds where x >= ``value``, sum of the others). Over what is not masked of a
    block and reaches ``least``. Nothing is above ``top``."""
    top = vec.splat(builder, top, vec.VF)
    slope = vec.splat(builder, slope, vec.VF)
    weigh = lambda logit: _bound(builder, logit, top, slope)  # noqa: E731
    return _split(builder, kind, x, start, mask, word, value, least, weigh)


@operation(_SPLIT, ARRAY, _INT, ARRAY, _INT, _REAL, _REAL, _REAL, _REAL)
def block_split_exactly(
    builder: Any, kind: Any, x: Any, start: Any, mask: Any, word: Any,
    value: Any, least: Any, top: Any, slope: Any,
) -> Any:  # fmt: skip
    """`block_split` with the weights themselves."""
    top = vec.splat(builder, top, vec.VF)
    scale = vec.splat(builder, builder.fmul(slope, ir.Constant(vec.F32, 1 / UNIT)), vec.VF)

    def weigh(logit: Any) -> Any:
        return builder.fmul(*vec.exp2(builder, builder.fmul(builder.fsub(logit, top), scale)))

    return _split(builder, kind, x, start, mask, word, value, least, weigh)
