"""Operations on one block of 256 consecutive logits, in vector code.

Each takes the row's array and an element offset, reads float32, bfloat16 (as uint16 bits) or
float16 (as int16 bits) without a widened copy, and neither allocates nor checks bounds: callers
pass whole blocks only.

``hidden[word:]`` are 8 words of 32 bits, one bit a token: where it is set, the logit counts as -inf
(and may be NaN). So masks cost no copy of the row.
"""

# ruff: noqa: ARG001 - an intrinsic names its arguments for its signature; its body uses `arguments`
from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import types
from numba.extending import intrinsic

from sipipe.sampler.kernels import _vector as vec

ACCUMULATORS = 4  # independent chains, so that latency does not bound a pass


def offset_of(builder: Any, start: Any, vector: int) -> Any:
    return builder.add(start, ir.Constant(vec.I64, vector * vec.LANES))


def vectors_of(builder: Any, source: Any, start: Any, element: Any) -> Any:
    """The 16 vectors of the block at ``source[start:]``, as float32, one after the other."""
    for v in range(vec.VECTORS):
        yield vec.load_vector(builder, source, offset_of(builder, start, v), element)


def _masks(builder: Any, hidden: Any, word: Any, body: Any) -> Any:
    """``body(masks)`` where ``masks`` are the 16 masks of the block, or 16 times None.

    Compiled for both, because most blocks hide nothing, and to load masks takes a pass half as long
    again.
    """
    words = builder.bitcast(builder.gep(hidden, [word]), ir.VectorType(vec.I64, 4).as_pointer())
    loaded = builder.load(words)
    loaded.align = 4
    bits = [builder.extract_element(loaded, ir.Constant(vec.I32, i)) for i in range(4)]
    some = builder.icmp_unsigned("!=", fold(bits, builder.or_), ir.Constant(vec.I64, 0))
    ends = []
    with builder.if_else(some, likely=False) as (masked, plain):
        with masked:
            result = body([vec.load_bits(builder, hidden, word, v) for v in range(vec.VECTORS)])
            ends.append((result, builder.block))
        with plain:
            result = body([None] * vec.VECTORS)
            ends.append((result, builder.block))
    phi = builder.phi(ends[0][0].type)
    for result, block in ends:
        phi.add_incoming(result, block)
    return phi


def _shown(builder: Any, vectors: Any, masks: list[Any]) -> Any:
    """``vectors`` with -inf in place of what is hidden."""
    nothing = vec.constant(vec.VF, float("-inf"))
    for value, mask in zip(vectors, masks, strict=True):
        yield value if mask is None else builder.select(mask, nothing, value)


def fold(parts: list[Any], operation: Any) -> Any:
    while len(parts) > 1:
        parts = [operation(a, b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _maxima(builder: Any, vectors: Any) -> Any:
    """The pair (maximum, whether any is NaN) over ``vectors``, an iterable of values."""
    best: list[Any] = []
    bad: list[Any] = []
    for index, value in enumerate(vectors):
        nan = builder.fcmp_unordered("uno", value, value)
        if index < ACCUMULATORS:
            best.append(value)
            bad.append(nan)
        else:
            lane = index % ACCUMULATORS
            best[lane] = vec.maximum(builder, value, best[lane])
            bad[lane] = builder.or_(bad[lane], nan)
    top = fold(best, lambda a, b: vec.maximum(builder, a, b))
    nan = fold(bad, builder.or_)
    pair = ir.Constant(vec.PEAK, ir.Undefined)
    pair = builder.insert_value(pair, vec.reduce_maximum(builder, top), 0)
    return builder.insert_value(pair, vec.any_lane(builder, nan), 1)


@intrinsic
def element(_: Any, x: Any, index: Any) -> Any:
    """``x[index]`` as float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = signature.args[0]
        pointer = vec.data_pointer(context, builder, kind, arguments[0])
        value = builder.load(builder.gep(pointer, [arguments[1]]))
        return vec.widen(builder, value, kind.dtype, 1)

    return types.float32(x, types.intp), generate


@intrinsic
def block_max(_: Any, x: Any, start: Any, hidden: Any, word: Any) -> Any:
    """(maximum, any NaN) of what is not hidden of ``x[start : start + 256]``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = signature.args[0]

        def body(inner: Any, source: Any, start: Any, hidden: Any, word: Any) -> Any:
            def maxima(masks: list[Any]) -> Any:
                vectors = vectors_of(inner, source, start, kind.dtype)
                return _maxima(inner, _shown(inner, vectors, masks))

            size = vec.BLOCK * kind.dtype.bitwidth // 8
            vec.prefetch(inner, inner.gep(source, [start]), size)
            return _masks(inner, hidden, word, maxima)

        source = vec.data_pointer(context, builder, kind, arguments[0])
        words = vec.data_pointer(context, builder, signature.args[2], arguments[2])
        given = [source, arguments[1], words, arguments[3]]
        pair = vec.outlined(builder, f"sipipe_max_{kind.dtype}", vec.PEAK, given, body)
        parts = [builder.extract_value(pair, 0), builder.extract_value(pair, 1)]
        return context.make_tuple(builder, signature.return_type, parts)

    returned = types.Tuple((types.float32, types.boolean))
    return returned(x, types.intp, hidden, types.intp), generate


def _exponentials(
    builder: Any, vectors: Any, reference: Any, scale: Any, masks: list[Any], keep: Any
) -> Any:
    """Sum of ``2 ** ((x - reference) * scale)`` over ``vectors``; ``keep(v, weight)`` sees each."""
    reference = vec.splat(builder, reference, vec.VF)
    scale = vec.splat(builder, scale, vec.VF)
    sums: list[Any] = []
    for v, value in enumerate(vectors):
        power = builder.fmul(builder.fsub(value, reference), scale)
        weight = vec.exp2(builder, power, masks[v])
        keep(v, weight)
        if v < ACCUMULATORS:
            sums.append(weight)
        else:
            sums[v % ACCUMULATORS] = builder.fadd(sums[v % ACCUMULATORS], weight)
    return vec.reduce_sum(builder, fold(sums, builder.fadd))


@intrinsic
def block_exp_sum(
    _: Any, x: Any, start: Any, hidden: Any, word: Any, reference: Any, scale: Any
) -> Any:
    """Sum of ``2 ** ((x - reference) * scale)`` over what is not hidden of a block, float32.

    ``reference`` must be no smaller than any of them.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = signature.args[0]

        def body(
            inner: Any, source: Any, start: Any, hidden: Any, word: Any, reference: Any, scale: Any
        ) -> Any:
            def sums(masks: list[Any]) -> Any:
                vectors = vectors_of(inner, source, start, kind.dtype)
                return _exponentials(inner, vectors, reference, scale, masks, lambda *_: None)

            return _masks(inner, hidden, word, sums)

        source = vec.data_pointer(context, builder, kind, arguments[0])
        words = vec.data_pointer(context, builder, signature.args[2], arguments[2])
        given = [source, arguments[1], words, *arguments[3:]]
        return vec.outlined(builder, f"sipipe_exp_sum_{kind.dtype}", vec.F32, given, body)

    signature = types.float32(x, types.intp, hidden, types.intp, types.float32, types.float32)
    return signature, generate


@intrinsic
def block_exp(_: Any, x: Any, start: Any, reference: Any, scale: Any, y: Any) -> Any:
    """`block_exp_sum` with nothing hidden, and the terms themselves into ``y`` from ``start`` on."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = signature.args[0]

        def body(inner: Any, source: Any, start: Any, reference: Any, scale: Any, sink: Any) -> Any:
            def keep(v: int, weight: Any) -> None:
                vec.store_vector(inner, weight, sink, offset_of(inner, start, v))

            vectors = vectors_of(inner, source, start, kind.dtype)
            return _exponentials(inner, vectors, reference, scale, [None] * vec.VECTORS, keep)

        source = vec.data_pointer(context, builder, kind, arguments[0])
        sink = vec.data_pointer(context, builder, signature.args[4], arguments[4])
        values = [source, *arguments[1:4], sink]
        return vec.outlined(builder, f"sipipe_exp_{kind.dtype}", vec.F32, values, body)

    return types.float32(x, types.intp, types.float32, types.float32, y), generate


@intrinsic
def block_gather(
    _: Any, x: Any, start: Any, hidden: Any, word: Any, first: Any, threshold: Any,
    ids: Any, values: Any, count: Any,
) -> Any:  # fmt: skip
    """Append what is not hidden of a block and >= ``threshold`` to ``values``, its ids to ``ids``.

    ``first`` is the token id of ``x[start]``, ``count`` how many are there already; returns the
    new count. Both arrays need room for 16 more than they end up holding.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = signature.args[0]

        def body(
            inner: Any, source: Any, start: Any, hidden: Any, word: Any, first: Any, threshold: Any,
            ids: Any, values: Any, count: Any,
        ) -> Any:  # fmt: skip
            threshold = vec.splat(inner, threshold, vec.VF)
            base = vec.splat(inner, inner.trunc(first, vec.I32), vec.VI)
            base = inner.add(base, ir.Constant(vec.VI, list(range(vec.LANES))))

            def collect(masks: list[Any]) -> Any:
                end = count
                vectors = vectors_of(inner, source, start, kind.dtype)
                for v, value in enumerate(_shown(inner, vectors, masks)):
                    mask = inner.fcmp_ordered(">=", value, threshold)
                    vec.compress(inner, value, mask, values, end)
                    names = inner.add(base, vec.constant(vec.VI, v * vec.LANES))
                    vec.compress(inner, names, mask, ids, end)
                    end = inner.add(end, vec.count_lanes(inner, mask))
                return end

            return _masks(inner, hidden, word, collect)

        pointers = {
            i: vec.data_pointer(context, builder, signature.args[i], arguments[i])
            for i in (0, 2, 6, 7)
        }
        given = [pointers.get(i, argument) for i, argument in enumerate(arguments)]
        return vec.outlined(builder, f"sipipe_gather_{kind.dtype}", vec.I64, given, body)

    signature = types.intp(
        x, types.intp, hidden, types.intp, types.intp, types.float32, ids, values, types.intp
    )
    return signature, generate


@intrinsic
def block_count(
    _: Any, x: Any, start: Any, hidden: Any, word: Any, shift: Any, offset: Any, threshold: Any
) -> Any:
    """How many of ``(x - shift) - offset``, in float32 and not hidden, are >= ``threshold``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = signature.args[0]

        def body(
            inner: Any, source: Any, start: Any, hidden: Any, word: Any,
            shift: Any, offset: Any, threshold: Any,
        ) -> Any:  # fmt: skip
            shift, offset, threshold = (
                vec.splat(inner, scalar, vec.VF) for scalar in (shift, offset, threshold)
            )

            def count(masks: list[Any]) -> Any:
                total = ir.Constant(vec.I64, 0)
                vectors = vectors_of(inner, source, start, kind.dtype)
                for value in _shown(inner, vectors, masks):
                    score = inner.fsub(inner.fsub(value, shift), offset)
                    mask = inner.fcmp_ordered(">=", score, threshold)
                    total = inner.add(total, vec.count_lanes(inner, mask))
                return total

            return _masks(inner, hidden, word, count)

        source = vec.data_pointer(context, builder, kind, arguments[0])
        words = vec.data_pointer(context, builder, signature.args[2], arguments[2])
        given = [source, arguments[1], words, *arguments[3:]]
        return vec.outlined(builder, f"sipipe_count_{kind.dtype}", vec.I64, given, body)

    signature = types.intp(
        x, types.intp, hidden, types.intp, types.float32, types.float32, types.float32
    )
    return signature, generate
