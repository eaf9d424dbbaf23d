"""LLVM building blocks for 16-lane float32 vectors, used by the block operations.

LLVM does not vectorize Numba's loops of maxima, exponentials and compactions (measured: 4 x slower,
no 512-bit instruction), so block operations are written as vector code. A vector of 16 becomes one
AVX-512 register, two AVX2 or four NEON/SSE ones.

A block is `BLOCK` = 256 consecutive logits, 16 vectors of 16.
"""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, types
from numba.extending import intrinsic

LANES = 16
VECTORS = 16
BLOCK = LANES * VECTORS

F32 = ir.FloatType()
_I1 = ir.IntType(1)
I16 = ir.IntType(16)
I32 = ir.IntType(32)
I64 = ir.IntType(64)
VF = ir.VectorType(F32, LANES)
VI = ir.VectorType(I32, LANES)
VB = ir.VectorType(_I1, LANES)
V16 = ir.VectorType(I16, LANES)

# 2**f on [-1/2, 1/2], minimax in relative error with 2**0 = 1: 1.7e-7 in float32 arithmetic.
_EXP2 = (1.3264653e-3, 9.6715111e-3, 5.5507340e-2, 2.4022242e-1, 6.9314700e-1, 1.0)
_MAGIC = 12582912.0 + 127.0
"""1.5 * 2**23, which leaves the nearest integer in the low bits of a sum, and an exponent's bias."""


def constant(kind: Any, value: float | int) -> Any:
    """A vector of ``kind`` with every lane equal to ``value``."""
    if kind is VF:
        value = float(np.float32(value))
    return ir.Constant(kind, [value] * kind.count)


def splat(builder: Any, scalar: Any, kind: Any) -> Any:
    """A vector of ``kind`` with every lane equal to the run-time ``scalar``."""
    undefined = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(I32, 0))
    lanes = ir.Constant(ir.VectorType(I32, kind.count), [0] * kind.count)
    return builder.shuffle_vector(first, undefined, lanes)


ARRAY = None
"""Marker in a signature of `operation`: an array of any of the dtypes, given as a pointer."""


def operation(returned: Any, *takes: Any, inline: bool = False) -> Callable[[Any], Any]:
    """Make an operation that kernels call from ``build(builder, element, *arguments)``.

    ``build`` writes the operation's LLVM code and returns its value (a struct where ``returned`` is
    a tuple); ``element`` is the dtype of the first array. ``takes`` is a Numba type, or `ARRAY`,
    for each argument. Unless ``inline``, the code becomes an LLVM function of its own for each dtype:
    compilation time depends on how small kernels stay.
    """

    def make(build: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            values = []
            element = None
            for kind, argument in zip(signature.args, arguments, strict=True):
                if isinstance(kind, types.Array):
                    element = element or kind.dtype
                    proxy = cgutils.create_struct_proxy(kind)
                    values.append(proxy(context, builder, argument).data)
                else:
                    values.append(argument)
            if inline:
                return build(builder, element, *values)
            several = isinstance(returned, types.BaseTuple)
            kinds = [context.get_value_type(kind) for kind in (returned if several else [returned])]
            value = _call_outlined(
                builder,
                f"sipipe_{build.__name__}_{element}",
                ir.LiteralStructType(kinds) if several else kinds[0],
                values,
                lambda inner, *inside: build(inner, element, *inside),
            )
            if not several:
                return value
            parts = [builder.extract_value(value, i) for i in range(len(kinds))]
            return context.make_tuple(builder, signature.return_type, parts)

        def type_call(_: Any, *given: Any) -> Any:
            kinds = (
                kind if take is ARRAY else take for kind, take in zip(given, takes, strict=True)
            )
            return returned(*kinds), generate

        # Numba binds a call's arguments by the names that the operation shows.
        shown = inspect.signature(build)
        parameters = list(shown.parameters.values())[1:]  # the first stands for Numba's context
        type_call.__signature__ = shown.replace(parameters=parameters)  # type: ignore[attr-defined]
        type_call.__name__ = build.__name__
        type_call.__doc__ = build.__doc__
        return intrinsic(type_call)

    return make


def _call_outlined(builder: Any, name: str, returned: Any, arguments: list[Any], body: Any) -> Any:
    module = builder.module
    function = module.globals.get(name)
    if function is None:
        kinds = [argument.type for argument in arguments]
        function = ir.Function(module, ir.FunctionType(returned, kinds), name)
        function.linkage = "linkonce_odr"
        function.attributes.add("noinline")
        function.attributes.add("nounwind")
        inner = ir.IRBuilder(function.append_basic_block("entry"))
        inner.ret(body(inner, *function.args))
    return builder.call(function, arguments)


def struct_of(builder: Any, *values: Any) -> Any:
    """The values in one struct, as an operation returns them."""
    struct = ir.Constant(ir.LiteralStructType([value.type for value in values]), ir.Undefined)
    for place, value in enumerate(values):
        struct = builder.insert_value(struct, value, place)
    return struct


def intrinsic_function(builder: Any, name: str, returned: Any, *arguments: Any) -> Any:
    return cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(returned, arguments), name
    )


def widen(builder: Any, value: Any, element: Any, lanes: int) -> Any:
    """Stored logits as float32: float32, bfloat16 as uint16 bits, float16 as int16 bits."""
    if element == types.float32:
        return value
    if element == types.uint16:
        wide = I32 if lanes == 1 else VI
        shift = ir.Constant(I32, 16) if lanes == 1 else constant(VI, 16)
        bits = builder.shl(builder.zext(value, wide), shift)
        return builder.bitcast(bits, F32 if lanes == 1 else VF)
    half = ir.HalfType() if lanes == 1 else ir.VectorType(ir.HalfType(), lanes)
    return builder.fpext(builder.bitcast(value, half), F32 if lanes == 1 else VF)


def load_vector(builder: Any, pointer: Any, offset: Any, element: Any) -> Any:
    """16 logits from ``pointer[offset]`` on, as float32; no alignment beyond an element's."""
    return widen(builder, load_stored(builder, pointer, offset, element), element, LANES)


def load_stored(builder: Any, pointer: Any, offset: Any, element: Any) -> Any:
    """16 elements as they are in memory."""
    stored = VF if element == types.float32 else V16
    value = builder.load(builder.bitcast(builder.gep(pointer, [offset]), stored.as_pointer()))
    value.align = 4 if element == types.float32 else 2
    return value


def store_vector(builder: Any, value: Any, pointer: Any, offset: Any) -> None:
    address = builder.bitcast(builder.gep(pointer, [offset]), value.type.as_pointer())
    builder.store(value, address).align = 2 if value.type == V16 else 4


def prefetch(builder: Any, pointer: Any, size: int, ahead: int, apart: int) -> None:
    """Ask for lines ``apart`` of ``size`` bytes ``ahead`` of ``pointer``: it cannot fault. Hardware
    prefetchers stop at each page. Into the second cache, to keep the first one's queue short."""
    kind = ir.IntType(8).as_pointer()
    function = intrinsic_function(builder, "llvm.prefetch.p0", ir.VoidType(), kind, I32, I32, I32)
    address = builder.bitcast(pointer, kind)
    options = [ir.Constant(I32, value) for value in (0, 2, 1)]  # to read, into L2, data
    for line in range(0, size, apart):
        at = builder.gep(address, [ir.Constant(I64, ahead + line)])
        builder.call(function, [at, *options])


def load_bits(builder: Any, words: Any, first: Any, wide: bool) -> list[Any]:
    """The mask of each vector of a block, from its 8 words of 32 bits, ``words[first:]``. A vector
    is 16 logits, or 32 of 16 bits where ``wide``. Each lane tests its bit: a CPU without mask
    registers takes bits for lanes one by one."""
    masks = []
    for word in range(BLOCK // 32):
        stored = builder.load(builder.gep(words, [builder.add(first, ir.Constant(I64, word))]))
        if wide:
            halves = builder.bitcast(stored, ir.VectorType(I16, 2))
            lane_word = ir.Constant(ir.VectorType(I32, 32), [lane // LANES for lane in range(32)])
            spread = builder.shuffle_vector(
                halves, ir.Constant(halves.type, ir.Undefined), lane_word
            )
            numbers = [[lane % LANES for lane in range(32)]]
        else:
            spread = splat(builder, stored, VI)
            numbers = [[part * LANES + lane for lane in range(LANES)] for part in (0, 1)]
        for bits in numbers:
            tested = builder.and_(spread, ir.Constant(spread.type, [1 << bit for bit in bits]))
            masks.append(builder.icmp_unsigned("!=", tested, constant(spread.type, 0)))
    return masks


def maximum(builder: Any, left: Any, right: Any) -> Any:
    """The greater one: one instruction. A NaN in ``left`` is lost, one in ``right`` stays."""
    return builder.select(builder.fcmp_ordered(">", left, right), left, right)


def reduce(builder: Any, vector: Any, operation: Any) -> Any:
    """``operation`` over the lanes in a fixed order: the same result on every CPU."""
    count = LANES
    while count > 1:
        count //= 2
        undefined = ir.Constant(vector.type, ir.Undefined)
        kind = ir.VectorType(I32, count)
        low, high = (
            builder.shuffle_vector(
                vector, undefined, ir.Constant(kind, list(range(at, at + count)))
            )
            for at in (0, count)
        )
        vector = operation(low, high)
    return builder.extract_element(vector, ir.Constant(I32, 0))


def multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """``a * b + c``, rounded once."""
    fma = intrinsic_function(builder, "llvm.fma.v16f32", VF, VF, VF, VF)
    return builder.call(fma, [a, b, c])


def any_lane(builder: Any, mask: Any) -> Any:
    bits = builder.bitcast(mask, ir.IntType(LANES))
    return builder.icmp_unsigned("!=", bits, ir.Constant(ir.IntType(LANES), 0))


def count_lanes(builder: Any, mask: Any) -> Any:
    bits = ir.IntType(mask.type.count)
    popcount = intrinsic_function(builder, f"llvm.ctpop.i{bits.width}", bits, bits)
    return builder.zext(builder.call(popcount, [builder.bitcast(mask, bits)]), I64)


def exp2(builder: Any, power: Any, mask: Any = None) -> tuple[Any, Any]:
    """Two factors of 2**power for power <= 0: one near 1, and a power of 2. The latter is exactly 0
    below -127, so that a masked logit (-inf) weighs nothing, and for all lanes of ``mask``."""
    lowest = constant(VF, -127.0)
    if mask is not None:
        power = builder.select(mask, lowest, power)
    power = maximum(builder, power, lowest)
    moved = builder.fadd(power, constant(VF, _MAGIC))
    fraction = builder.fsub(power, builder.fsub(moved, constant(VF, _MAGIC)))
    result = constant(VF, _EXP2[0])
    for coefficient in _EXP2[1:]:
        result = multiply_add(builder, result, fraction, constant(VF, coefficient))
    # The integer goes into the exponent bits; what else `moved` holds is shifted out.
    return result, builder.bitcast(builder.shl(builder.bitcast(moved, VI), constant(VI, 23)), VF)


def compress(builder: Any, value: Any, mask: Any, pointer: Any, offset: Any) -> None:
    """Write the lanes of ``value`` that ``mask`` selects to ``pointer[offset:]``, without gaps. May
    write 16 lanes: the array needs that much room after the last one kept. (Compressed in a
    register, because to store compressed is microcoded on some CPUs.)"""
    name = f"llvm.experimental.vector.compress.v16{'f32' if value.type is VF else 'i32'}"
    function = intrinsic_function(builder, name, value.type, value.type, VB, value.type)
    undefined = ir.Constant(value.type, ir.Undefined)
    store_vector(builder, builder.call(function, [value, mask, undefined]), pointer, offset)
