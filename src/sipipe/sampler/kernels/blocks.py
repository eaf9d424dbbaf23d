"""Operations on one block of 256 consecutive logits, in vector code.

Each takes the row's array and an element offset, reads float32, bfloat16 (as uint16 bits) or
float16 (as int16 bits) without a widened copy, and neither allocates nor checks bounds: callers
pass whole blocks only.

``mask[word:]`` are 8 words of 32 bits, one bit a token: where it is set, the logit counts as -inf
(and may be NaN). So masks cost no copy of the row.
"""

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import types

from sipipe.sampler.kernels import _vector as vec
from sipipe.sampler.kernels._vector import ARRAY, operation

ACCUMULATORS = 4  # independent chains, so that latency does not bound a pass
_AHEAD = {16: (16384, 64), 32: (8192, 128)}
"""Prefetching of the first pass by bits of a logit: bytes ahead, and bytes between two prefetches.
Measured: docs/log.md, "Prefetch"."""

_REAL = types.float32
_INT = types.intp


def offset_of(builder: Any, start: Any, vector: int) -> Any:
    return builder.add(start, ir.Constant(vec.I64, vector * vec.LANES))


def vectors_of(builder: Any, source: Any, start: Any, element: Any) -> Any:
    """The 16 vectors of the block at ``source[start:]``, as float32, one after the other."""
    for v in range(vec.VECTORS):
        yield vec.load_vector(builder, source, offset_of(builder, start, v), element)


def consecutive(builder: Any, first: Any) -> Any:
    """int32 lanes ``first``, ``first`` + 1, ..., for an int64 ``first``."""
    base = vec.splat(builder, builder.trunc(first, vec.I32), vec.VI)
    return builder.add(base, ir.Constant(vec.VI, list(range(vec.LANES))))


def with_masks(builder: Any, mask: Any, word: Any, body: Any, wide: bool = False) -> Any:
    """``body(masks)`` where ``masks`` are those of the block's vectors, or all None. Compiled for
    both: in most blocks nothing is masked, and to load masks takes a pass half as long again."""
    words = builder.bitcast(builder.gep(mask, [word]), ir.VectorType(vec.I64, 4).as_pointer())
    loaded = builder.load(words)
    loaded.align = 4
    bits = [builder.extract_element(loaded, ir.Constant(vec.I32, i)) for i in range(4)]
    some = builder.icmp_unsigned("!=", fold(bits, builder.or_), ir.Constant(vec.I64, 0))
    ends = []
    with builder.if_else(some, likely=False) as (masked, plain):
        with masked:
            masks = vec.load_bits(builder, mask, word, wide)
            result = body(masks)
            ends.append((result, builder.block))
        with plain:
            result = body([None] * len(masks))
            ends.append((result, builder.block))
    phi = builder.phi(ends[0][0].type)
    for result, block in ends:
        phi.add_incoming(result, block)
    return phi


def _unmasked(builder: Any, vectors: Any, masks: list[Any]) -> Any:
    """``vectors`` with -inf in place of what is masked."""
    neg_inf = vec.constant(vec.VF, float("-inf"))
    for value, mask in zip(vectors, masks, strict=True):
        yield value if mask is None else builder.select(mask, neg_inf, value)


def fold(parts: list[Any], operation: Any) -> Any:
    while len(parts) > 1:
        parts = [operation(a, b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


class Sums:
    """A sum of vectors in independent chains."""

    def __init__(self, builder: Any) -> None:
        self._builder = builder
        self._chains: list[Any] = []
        self._next = 0

    def add(self, vector: Any, factor: Any = None, lanes: Any = None) -> None:
        """Add ``vector``, times ``factor``, or only those ``lanes`` of it."""
        if len(self._chains) < ACCUMULATORS:
            self._chains.append(vec.constant(vec.VF, 0.0))
        lane = self._next % ACCUMULATORS
        chain = self._chains[lane]
        factor = vec.constant(vec.VF, 1.0) if factor is None else factor
        total = vec.multiply_add(self._builder, vector, factor, chain)
        self._chains[lane] = total if lanes is None else self._builder.select(lanes, total, chain)
        self._next += 1

    def total(self) -> Any:
        """The sum of all lanes."""
        add = self._builder.fadd
        return vec.reduce(self._builder, fold(self._chains, add), add)


@operation(_REAL, ARRAY, _INT, inline=True)
def element(builder: Any, kind: Any, x: Any, index: Any) -> Any:
    """``x[index]`` as float32."""
    return vec.widen(builder, builder.load(builder.gep(x, [index])), kind, 1)


def _load_wide(builder: Any, x: Any, start: Any, v: int) -> Any:
    """The bits of 32 logits of 16, as one vector."""
    address = builder.gep(x, [offset_of(builder, start, 2 * v)])
    kind = ir.VectorType(vec.I16, 2 * vec.LANES)
    return builder.load(builder.bitcast(address, kind.as_pointer()), align=2)


def _bfloat16_maximum(builder: Any, x: Any, start: Any, masks: list[Any], keep: Any) -> Any:
    """`block_max` on the bits, 32 at a time, which takes a third of the time. As signed integers
    they are in order where the sign is clear, as unsigned ones against the order where it is set. A
    NaN lies beyond the bits of infinity, with either sign."""
    kind = ir.VectorType(vec.I16, 2 * vec.LANES)

    def bits(value: int) -> Any:
        return vec.constant(kind, value)

    def over_all(name: str) -> Any:
        take = vec.intrinsic_function(builder, f"llvm.{name}.v32i16", kind, kind, kind)
        return fold(loaded, lambda a, b: builder.call(take, [a, b]))

    loaded = []
    for v, mask in enumerate(masks):
        stored = _load_wide(builder, x, start, v)
        loaded.append(stored if mask is None else builder.select(mask, bits(0xFF80), stored))
    signed = over_all("smax")
    least = over_all("umin")
    most = over_all("umax")
    nan = builder.or_(
        builder.icmp_signed(">", signed, bits(0x7F80)),
        builder.icmp_unsigned(">", most, bits(0xFF80)),
    )
    negative = builder.icmp_signed("<", signed, bits(0))

    def halves() -> Any:
        largest = builder.select(negative, least, signed)
        for first in (0, vec.LANES):
            lanes = ir.Constant(vec.VI, list(range(first, first + vec.LANES)))
            part = builder.shuffle_vector(largest, bits(0), lanes)
            yield vec.widen(builder, part, types.uint16, vec.LANES)

    keep(halves)
    # With the other bits turned where the sign is set, all are in order as signed integers.
    ordered = builder.select(negative, builder.xor(least, bits(0x7FFF)), signed)
    reduced = vec.intrinsic_function(builder, "llvm.vector.reduce.smax.v32i16", vec.I16, kind)
    top = builder.call(reduced, [ordered])
    negative = builder.icmp_signed("<", top, ir.Constant(vec.I16, 0))
    top = builder.select(negative, builder.xor(top, ir.Constant(vec.I16, 0x7FFF)), top)
    nan = builder.icmp_unsigned("!=", builder.bitcast(nan, vec.I32), ir.Constant(vec.I32, 0))
    return vec.struct_of(builder, vec.widen(builder, top, types.uint16, 1), nan)


@operation(types.Tuple((_REAL, types.boolean)), ARRAY, _INT, ARRAY, _INT, ARRAY, _INT)
def block_max(
    builder: Any, kind: Any, x: Any, start: Any, mask: Any, word: Any, groups: Any, first: Any
) -> Any:
    """(maximum, any NaN) of what is not masked of ``x[start : start + 256]``. Beside a NaN the
    maximum is that of the rest, or of bfloat16 perhaps NaN. Unless ``first`` is -1, ``groups[first
    : first + 32]`` become the maxima of its groups, float32: group ``g`` is the 8 tokens ``start +
    g``, ``start + g + 32``, ... (what lanes hold anyway)."""

    def keep(halves: Any) -> None:
        with builder.if_then(builder.icmp_signed(">=", first, ir.Constant(vec.I64, 0))):
            for half, peaks in enumerate(halves()):
                vec.store_vector(builder, peaks, groups, offset_of(builder, first, half))

    def maxima(masks: list[Any]) -> Any:
        if kind == types.uint16:
            return _bfloat16_maximum(builder, x, start, masks, keep)
        best = [vec.constant(vec.VF, float("-inf"))] * ACCUMULATORS  # no NaN: it would stay
        bad = [vec.constant(vec.VB, 0)] * ACCUMULATORS
        vectors = vectors_of(builder, x, start, kind)
        for index, value in enumerate(_unmasked(builder, vectors, masks)):
            lane = index % ACCUMULATORS
            best[lane] = vec.maximum(builder, value, best[lane])
            bad[lane] = builder.or_(bad[lane], builder.fcmp_unordered("uno", value, value))
        larger = lambda a, b: vec.maximum(builder, a, b)  # noqa: E731
        halves = [fold(best[half::2], larger) for half in (0, 1)]
        keep(lambda: halves)
        top = vec.reduce(builder, fold(halves, larger), larger)
        return vec.struct_of(builder, top, vec.any_lane(builder, fold(bad, builder.or_)))

    size = vec.BLOCK * kind.bitwidth // 8
    vec.prefetch(builder, builder.gep(x, [start]), size, *_AHEAD[kind.bitwidth])
    return with_masks(builder, mask, word, maxima, kind == types.uint16)


def _exponentials(
    builder: Any, vectors: Any, reference: Any, scale: Any, masks: list[Any], keep: Any
) -> Any:
    """Sum of ``2 ** ((x - reference) * scale)`` over ``vectors``; ``keep(v, weight)`` sees each."""
    reference = vec.splat(builder, reference, vec.VF)
    scale = vec.splat(builder, scale, vec.VF)
    sums = Sums(builder)
    for v, value in enumerate(vectors):
        power = builder.fmul(builder.fsub(value, reference), scale)
        near, power = vec.exp2(builder, power, masks[v])
        keep(v, near, power)
        sums.add(near, power)
    return sums.total()


@operation(_REAL, ARRAY, _INT, ARRAY, _INT, _REAL, _REAL)
def block_exp_sum(
    builder: Any, kind: Any, x: Any, start: Any, mask: Any, word: Any, reference: Any, scale: Any
) -> Any:
    """Sum of ``2 ** ((x - reference) * scale)`` over what is not masked of a block, float32.
    ``reference`` must be no smaller than any of them."""

    def sums(masks: list[Any]) -> Any:
        vectors = vectors_of(builder, x, start, kind)
        return _exponentials(builder, vectors, reference, scale, masks, lambda *_: None)

    return with_masks(builder, mask, word, sums)


@operation(_REAL, ARRAY, _INT, _REAL, _REAL, ARRAY)
def block_exp(
    builder: Any, kind: Any, x: Any, start: Any, reference: Any, scale: Any, y: Any
) -> Any:
    """`block_exp_sum` without a mask, and the terms themselves into ``y`` from ``start`` on."""

    def keep(v: int, near: Any, power: Any) -> None:
        vec.store_vector(builder, builder.fmul(near, power), y, offset_of(builder, start, v))

    vectors = vectors_of(builder, x, start, kind)
    return _exponentials(builder, vectors, reference, scale, [None] * vec.VECTORS, keep)


@operation(_INT, ARRAY, _INT, ARRAY, _INT, _INT, _REAL, ARRAY, ARRAY, _INT)
def block_gather(
    builder: Any, kind: Any, x: Any, start: Any, mask: Any, word: Any,
    first: Any, threshold: Any, ids: Any, values: Any, count: Any,
) -> Any:  # fmt: skip
    """Append what is not masked of a block and >= ``threshold`` to ``values``, its ids to ``ids``.
    ``first`` is the token id of ``x[start]``, ``count`` how many are there already; returns the new
    count. Both arrays need room for 16 more than they end up holding."""
    threshold = vec.splat(builder, threshold, vec.VF)
    base = consecutive(builder, first)

    def collect(masks: list[Any]) -> Any:
        end = count
        vectors = vectors_of(builder, x, start, kind)
        for v, value in enumerate(_unmasked(builder, vectors, masks)):
            reaches = builder.fcmp_ordered(">=", value, threshold)
            vec.compress(builder, value, reaches, values, end)
            names = builder.add(base, vec.constant(vec.VI, v * vec.LANES))
            vec.compress(builder, names, reaches, ids, end)
            end = builder.add(end, vec.count_lanes(builder, reaches))
        return end

    return with_masks(builder, mask, word, collect)


def _bfloat16_reached(builder: Any, x: Any, start: Any, threshold: Any, masks: list[Any]) -> Any:
    """For each 32 logits, which reach ``threshold``, by their bits: a third of the time. Among bits
    as signed integers those of a positive threshold, or more, are the larger logits; among unsigned
    ones those of another, or fewer, are. So one comparison serves, of bits turned."""
    kind = ir.VectorType(vec.I16, 2 * vec.LANES)
    bits = builder.bitcast(threshold, vec.I32)
    positive = builder.icmp_signed(">", bits, ir.Constant(vec.I32, 0))
    up = builder.select(positive, ir.Constant(vec.I32, 0xFFFF), ir.Constant(vec.I32, 0))
    least = builder.trunc(builder.lshr(builder.add(bits, up), ir.Constant(vec.I32, 16)), vec.I16)
    zero = builder.icmp_signed("==", least, ir.Constant(vec.I16, 0))
    least = builder.select(zero, ir.Constant(vec.I16, 0x8000), least)  # -0 reaches 0
    turned = builder.select(positive, ir.Constant(vec.I16, 0x8000), ir.Constant(vec.I16, 0xFFFF))
    least = vec.splat(builder, builder.xor(least, turned), kind)
    turned = vec.splat(builder, turned, kind)
    for v, mask in enumerate(masks):
        stored = _load_wide(builder, x, start, v)
        reached = builder.icmp_unsigned(">=", builder.xor(stored, turned), least)
        yield reached if mask is None else builder.and_(reached, builder.not_(mask))


@operation(_INT, ARRAY, _INT, ARRAY, _INT, _REAL)
def block_count(
    builder: Any, kind: Any, x: Any, start: Any, mask: Any, word: Any, threshold: Any
) -> Any:
    """Count the logits of a block that are not masked and >= ``threshold``. The block has no NaN."""
    wide = kind == types.uint16

    def count(masks: list[Any]) -> Any:
        if wide:
            reached = _bfloat16_reached(builder, x, start, threshold, masks)
        else:
            least = vec.splat(builder, threshold, vec.VF)
            logits = _unmasked(builder, vectors_of(builder, x, start, kind), masks)
            reached = (builder.fcmp_ordered(">=", logit, least) for logit in logits)
        return fold([vec.count_lanes(builder, some) for some in reached], builder.add)

    return with_masks(builder, mask, word, count, wide)
