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
"""What the bound may fall short of a weight by: the product is rounded to 2 ** -17 of itself."""
UNIT = 2.0**23

_REAL, _INT = types.float32, types.intp
_SPLIT = types.Tuple((_REAL, _REAL, types.int64))


def _bound(builder: Any, value: Any, top: Any, slope: Any) -> Any:
    one, zero = vec.constant(vec.VF, 127 * UNIT), vec.constant(vec.VF, 0.0)
    bits = vec.multiply_add(builder, builder.fsub(value, top), slope, one)
    return builder.bitcast(builder.fptosi(vec.maximum(builder, bits, zero), vec.VI), vec.VF)


@operation(_REAL, ARRAY, _INT, _REAL, _REAL, ARRAY)
def block_bounds(builder: Any, kind: Any, x: Any, start: Any, top: Any, slope: Any, y: Any) -> Any:
    """The bounds of 256 logits into ``y`` from ``start`` on, 0 below 2 ** -127; their sum, float32.

    None is above ``top``.
    """
    top, slope = vec.splat(builder, top, vec.VF), vec.splat(builder, slope, vec.VF)
    sums = Sums(builder)
    for v, value in enumerate(vectors_of(builder, x, start, kind)):
        bound = _bound(builder, value, top, slope)
        vec.store_vector(builder, bound, y, offset_of(builder, start, v))
        sums.add(bound)
    return sums.total()


def _split(
    builder: Any, kind: Any, x: Any, start: Any, mask: Any, word: Any, value: Any, least: Any,
    weigh: Any,
) -> Any:  # fmt: skip
    value, least = vec.splat(builder, value, vec.VF), vec.splat(builder, least, vec.VF)
    zero = vec.constant(vec.VF, 0.0)

    def parts(masks: list[Any]) -> Any:
        above, rest = Sums(builder), Sums(builder)
        one, none = vec.constant(vec.VI, 1), vec.constant(vec.VI, 0)
        count = none
        for v, logit in enumerate(vectors_of(builder, x, start, kind)):
            larger = builder.fcmp_ordered(">", logit, value)
            equal = builder.fcmp_ordered("==", logit, value)
            weight = builder.select(builder.fcmp_ordered(">=", logit, least), weigh(logit), zero)
            if masks[v] is not None:
                equal = builder.and_(equal, builder.not_(masks[v]))
                weight = builder.select(masks[v], zero, weight)
            above.add(builder.select(larger, weight, zero))
            rest.add(builder.select(larger, zero, weight))
            count = builder.add(count, builder.select(equal, one, none))
        equals = builder.zext(vec.reduce(builder, count, builder.add), vec.I64)
        return vec.struct_of(builder, above.total(), rest.total(), equals)

    return with_masks(builder, mask, word, parts)


@operation(_SPLIT, ARRAY, _INT, ARRAY, _INT, _REAL, _REAL, _REAL, _REAL)
def block_split(
    builder: Any, kind: Any, x: Any, start: Any, mask: Any, word: Any,
    value: Any, least: Any, top: Any, slope: Any,
) -> Any:  # fmt: skip
    """(sum of the bounds where x > ``value``, sum of the others, how many equal ``value``).

    Over what is not masked of a block and reaches ``least``. Nothing is above ``top``.
    """
    top, slope = vec.splat(builder, top, vec.VF), vec.splat(builder, slope, vec.VF)
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
        return vec.exp2(builder, builder.fmul(builder.fsub(logit, top), scale))

    return _split(builder, kind, x, start, mask, word, value, least, weigh)
