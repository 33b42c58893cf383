"""SIMD code that is written once for real and for complex numbers: a complex vector is one of real and one of imaginary
parts, a complex entry of an array these two side by side. Functions of `simd` by the same names take real ones alone.
"""

from __future__ import annotations

import math
import operator
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.errors import RequireLiteralValue
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import lower_builtin, models, register_model

from sparsebp.kernels.host.engine import simd
from sparsebp.kernels.host.engine.simd import SimdType, as_vector, call_llvm, intrinsic, llvm_real, llvm_vector


class SimdComplex(types.Type):
    """Numba type of a vector of complex numbers; `real`: the vector of their real parts."""

    def __init__(self, real: SimdType) -> None:
        self.real = real
        super().__init__(name=f"complex({real.name})")


@register_model(SimdComplex)
class _ComplexModel(models.StructModel):
    """Two vectors, so locals become registers."""

    def __init__(self, dmm: Any, fe_type: SimdComplex) -> None:
        super().__init__(dmm, fe_type, [("real", fe_type.real), ("imag", fe_type.real)])


def _complex(*kinds: Any) -> bool:
    return any(isinstance(kind, SimdComplex | types.Complex) for kind in kinds)


def _real_of(kind: Any) -> Any:
    """Return the type of the real part."""
    if isinstance(kind, SimdComplex):
        return kind.real
    return kind.underlying_float if isinstance(kind, types.Complex) else kind


def _widest(*kinds: Any) -> Any:
    """Return the type of a result of complex or real vectors and numbers."""
    reals = [_real_of(kind) for kind in kinds]
    real = next((r for r in reals if isinstance(r, SimdType)), reals[0])
    if not _complex(*kinds):
        return real
    return SimdComplex(real) if isinstance(real, SimdType) else next(k for k in kinds if isinstance(k, types.Complex))


def _parts(context: Any, builder: Any, kind: Any, value: Any, real: Any) -> tuple[Any, Any]:
    """Return real and imaginary part of a value as values of the type `real`; None for one that is 0."""
    if _complex(kind):
        own = _real_of(kind)
        parts = [builder.extract_value(value, i) for i in range(2)]
    else:
        own, parts = kind, [value, None]
    if isinstance(real, SimdType):
        parts = [None if part is None else as_vector(context, builder, real, part, own) for part in parts]
    else:
        parts = [None if part is None else context.cast(builder, part, own, real) for part in parts]
    return parts[0], parts[1]


def _made(context: Any, builder: Any, kind: Any, real: Any, imag: Any) -> Any:
    """Return the complex value of two parts."""
    both = ir.Constant(context.get_value_type(kind), ir.Undefined)
    return builder.insert_value(builder.insert_value(both, real, 0), imag, 1)


def _multiply_add(builder: Any, real: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c, fused where the machine can; c may be None."""
    if c is None:
        return builder.fmul(a, b)
    vector = isinstance(real, SimdType)
    name = simd.vector_name(real) if vector else f"f{real.bitwidth}"
    return call_llvm(builder, f"llvm.fmuladd.{name}", llvm_vector(real) if vector else llvm_real(real), [a, b, c])


def _product(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    """Return ``a * b`` or ``a * b + c``, always with the same operations."""
    kind, real = sig.return_type, _real_of(sig.return_type)
    (ar, ai), (br, bi), *rest = (
        _parts(context, builder, t, value, real) for t, value in zip(sig.args, args, strict=True)
    )
    cr, ci = rest[0] if rest else (None, None)
    re, im = _multiply_add(builder, real, ar, br, cr), ci
    if ai is not None and bi is not None:
        re = _multiply_add(builder, real, builder.fneg(ai), bi, re)
    if bi is not None:
        im = _multiply_add(builder, real, ar, bi, im)
    if ai is not None:
        im = _multiply_add(builder, real, ai, br, im)
    return _made(context, builder, kind, re, im)


# Operators of complex vectors, with one another, with real vectors and with numbers.


def _define(function: Any, lower: Any) -> None:
    @infer_global(function)
    class _Operator(AbstractTemplate):
        def generic(self, args: Any, kws: Any) -> Any:
            if len(args) != 2 or not any(isinstance(a, SimdComplex) for a in args):
                return None
            if not all(isinstance(a, SimdComplex | SimdType | types.Float | types.Complex) for a in args):
                return None
            return signature(_widest(*args), *args)

    others = (SimdComplex, SimdType, types.Float, types.Complex)
    for other in others:
        lower_builtin(function, SimdComplex, other)(lower)
        if other is not SimdComplex:
            lower_builtin(function, other, SimdComplex)(lower)


def _sum(instruction: str) -> Any:
    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        real, parts = sig.return_type.real, []
        left, right = (_parts(context, builder, t, v, real) for t, v in zip(sig.args, args, strict=True))
        none = ir.Constant(llvm_vector(real), None)
        for a, b in zip(left, right, strict=True):
            parts.append(getattr(builder, instruction)(none if a is None else a, none if b is None else b))
        return _made(context, builder, sig.return_type, *parts)

    return lower


_define(operator.add, _sum("fadd"))
_define(operator.sub, _sum("fsub"))
_define(operator.mul, _product)


# Functions of both.


def _defined(name: str, *args: Any) -> Any:
    """Return what `simd` has for real numbers."""
    return getattr(simd, name)._defn(*args)


@intrinsic
def fma(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """Return ``a * b + c``, fused where the machine can."""
    if not _complex(a, b, c):
        return _defined("fma", typingctx, a, b, c)
    return _widest(a, b, c)(a, b, c), _product


@intrinsic
def times(typingctx: Any, a: Any, b: Any) -> Any:
    """Return ``a * b``, of numbers by the same operations as of vectors."""
    kind = _widest(a, b)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if _complex(a, b):
            return _product(context, builder, sig, args)
        left, right = (_parts(context, builder, t, v, kind)[0] for t, v in zip(sig.args, args, strict=True))
        return builder.fmul(left, right)

    return kind(a, b), codegen


@intrinsic
def absolute(typingctx: Any, x: Any) -> Any:
    """Return |x|, a real; of a complex number |re| + |im|, up to √2 times that, which neither over- nor underflows."""
    if not _complex(x):
        return _defined("absolute", typingctx, x)
    real = _real_of(x)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.fadd(*(_fabs(builder, real, builder.extract_value(args[0], i)) for i in range(2)))

    return real(x), codegen


def _fabs(builder: Any, real: Any, value: Any) -> Any:
    vector = isinstance(real, SimdType)
    name = simd.vector_name(real) if vector else f"f{real.bitwidth}"
    return call_llvm(builder, f"llvm.fabs.{name}", llvm_vector(real) if vector else llvm_real(real), [value])


@intrinsic
def real_part(typingctx: Any, x: Any) -> Any:
    """Return the real part, of a real number itself."""
    if not _complex(x):
        return x(x), lambda context, builder, sig, args: args[0]
    return _real_of(x)(x), lambda context, builder, sig, args: builder.extract_value(args[0], 0)


@intrinsic
def conjugate(typingctx: Any, x: Any, wanted: Any) -> Any:
    """Return the complex conjugate if it is wanted, else x; of a real number itself."""
    if not _complex(x):
        return x(x, wanted), lambda context, builder, sig, args: args[0]

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        imag = builder.extract_value(args[0], 1)
        return builder.insert_value(args[0], builder.select(args[1], builder.fneg(imag), imag), 1)

    return x(x, types.boolean), codegen


@intrinsic
def of_real(typingctx: Any, x: Any, like: Any) -> Any:
    """Return a real number or vector as one of the type of `like`, whose parts are of its type."""
    if not _complex(like):
        return x(x, like), lambda context, builder, sig, args: args[0]
    vector = isinstance(like, SimdComplex)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        kind = llvm_vector(like.real) if vector else llvm_real(_real_of(like))
        return _made(context, builder, like, args[0], ir.Constant(kind, None if vector else 0.0))

    return like(x, like), codegen


@intrinsic
def inverse(typingctx: Any, x: Any) -> Any:
    """Return 1 / x; of a complex number without overflow on the way.

    NaN for 0, and for a complex number so large that the smaller part of the result may be flushed to zero and count.
    """
    real = _real_of(x)
    double = (real.dtype if isinstance(real, SimdType) else real).bitwidth == 64
    largest = 2.0**970 if double else 2.0**103  # the machine precision over the smallest normal number

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        vector = isinstance(real, SimdType)
        kind = llvm_vector(real) if vector else llvm_real(real)
        one = ir.Constant(kind, [1.0] * real.lanes if vector else 1.0)
        if not _complex(x):
            return builder.fdiv(one, args[0])
        parts = [builder.extract_value(args[0], i) for i in range(2)]
        a, b = (_fabs(builder, real, part) for part in parts)
        size = builder.select(builder.fcmp_unordered(">", a, b), a, b)  # NaN if any of both is
        limit, infinity = (ir.Constant(kind, [n] * real.lanes if vector else n) for n in (largest, math.inf))
        size = builder.select(builder.fcmp_ordered(">", size, limit), infinity, size)
        re, im = (builder.fdiv(part, size) for part in parts)
        square = _multiply_add(builder, real, im, im, builder.fmul(re, re))
        re, im = (builder.fdiv(builder.fdiv(part, square), size) for part in (re, builder.fneg(im)))
        return _made(context, builder, x, re, im)

    return x(x), codegen


@intrinsic
def zeros_of(typingctx: Any, ptr: Any, size: Any) -> Any:
    """Return the vector of zeros of the pointer's type that has so many bytes, a constant."""
    if not _complex(ptr.dtype):
        return _defined("zeros_of", typingctx, ptr, size)
    if not isinstance(size, types.Literal):
        raise RequireLiteralValue("size")
    ty = SimdComplex(SimdType(_real_of(ptr.dtype), size.literal_value * 8 // ptr.dtype.bitwidth))
    none = ir.Constant(llvm_vector(ty.real), None)
    return ty(ptr, size), lambda context, builder, sig, args: _made(context, builder, ty, none, none)


def _place(context: Any, builder: Any, args: Any, kinds: Any, step: int, real: SimdType) -> Any:
    """Return the pointer to real vectors at a complex entry."""
    index = builder.mul(context.cast(builder, args[1], kinds[1], types.intp), simd.WORD(step))
    return builder.bitcast(builder.gep(args[0], [index]), llvm_vector(real).as_pointer())


@intrinsic
def entry(typingctx: Any, ptr: Any, index: Any, like: Any) -> Any:
    """Load entry number `index` of an array of such vectors or numbers."""
    if not _complex(like):
        return _defined("entry", typingctx, ptr, index, like)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if not isinstance(like, SimdComplex):
            at = builder.gep(args[0], [context.cast(builder, args[1], index, types.intp)])
            return _made(context, builder, like, *(
                builder.load(cgutils.gep_inbounds(builder, at, 0, i)) for i in range(2)
            ))  # fmt: skip
        at, align = _place(context, builder, args, sig.args, like.real.lanes, like.real), like.real.dtype.bitwidth // 8
        parts = [builder.load(builder.gep(at, [simd.WORD(i)]), align=align) for i in range(2)]
        return _made(context, builder, like, *parts)

    return like(ptr, index, like), codegen


@intrinsic
def set_entry(typingctx: Any, ptr: Any, index: Any, value: Any) -> Any:
    """Store a vector or number as entry number `index` of an array of such."""
    if not _complex(value):
        return _defined("set_entry", typingctx, ptr, index, value)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        parts = [builder.extract_value(args[2], i) for i in range(2)]
        if not isinstance(value, SimdComplex):
            at = builder.gep(args[0], [context.cast(builder, args[1], index, types.intp)])
            for i, part in enumerate(parts):
                builder.store(part, cgutils.gep_inbounds(builder, at, 0, i))
            return context.get_dummy_value()
        at = _place(context, builder, args, sig.args, value.real.lanes, value.real)
        for i, part in enumerate(parts):
            builder.store(part, builder.gep(at, [simd.WORD(i)]), align=value.real.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(ptr, index, value), codegen


# Complex numbers as NumPy lays them out: real and imaginary parts in turn.


def _shuffled(builder: Any, a: Any, b: Any, places: list[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(ir.IntType(32), len(places)), places))


def _apart(builder: Any, lanes: int, a: Any, b: Any) -> list[Any]:
    """Return real and imaginary parts of two vectors in which they take turns."""
    return [_shuffled(builder, a, b, list(range(i, 2 * lanes, 2))) for i in range(2)]


def _in_turn(builder: Any, lanes: int, real: Any, imag: Any) -> list[Any]:
    places = [i // 2 + i % 2 * lanes for i in range(2 * lanes)]
    return [_shuffled(builder, real, imag, places[:lanes]), _shuffled(builder, real, imag, places[lanes:])]


def _reals_at(context: Any, builder: Any, ptr: Any, offset: Any, kinds: Any, real: SimdType) -> Any:
    """Return the pointer to the real part of a complex number of an array."""
    at = builder.gep(ptr, [context.cast(builder, offset, kinds[1], types.intp)])
    return builder.bitcast(at, llvm_real(real.dtype).as_pointer())


@intrinsic
def samples(typingctx: Any, ptr: Any, offset: Any, n: Any, like: Any) -> Any:
    """Load the first `n` lanes from ``ptr[offset:]``, the others zero; or the number ``ptr[offset]``."""
    if not _complex(like):
        return _defined("samples", typingctx, ptr, offset, n, like)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if not isinstance(like, SimdComplex):
            at = builder.gep(args[0], [context.cast(builder, args[1], offset, types.intp)])
            return _made(context, builder, like, *(
                builder.load(cgutils.gep_inbounds(builder, at, 0, i)) for i in range(2)
            ))  # fmt: skip
        real = like.real
        at = _reals_at(context, builder, args[0], args[1], sig.args, real)
        count = builder.shl(context.cast(builder, args[2], n, types.int64), simd.WORD(1))
        kinds = (types.CPointer(real.dtype), types.int64, types.int64)
        both = [
            simd.load_masked(
                context, builder, real,
                (at, simd.WORD(i * real.lanes), builder.sub(count, simd.WORD(i * real.lanes))), kinds,
            )
            for i in range(2)
        ]  # fmt: skip
        return _made(context, builder, like, *_apart(builder, real.lanes, *both))

    return like(ptr, offset, n, like), codegen


@intrinsic
def set_samples(typingctx: Any, ptr: Any, offset: Any, value: Any, n: Any) -> Any:
    """Store the first `n` lanes to ``ptr[offset:]``, or a number to ``ptr[offset]``."""
    if not _complex(value):
        return _defined("set_samples", typingctx, ptr, offset, value, n)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        parts = [builder.extract_value(args[2], i) for i in range(2)]
        if not isinstance(value, SimdComplex):
            at = builder.gep(args[0], [context.cast(builder, args[1], offset, types.intp)])
            for i, part in enumerate(parts):
                builder.store(part, cgutils.gep_inbounds(builder, at, 0, i))
            return context.get_dummy_value()
        real = value.real
        at = _reals_at(context, builder, args[0], args[1], sig.args, real)
        count = builder.shl(context.cast(builder, args[3], n, types.int64), simd.WORD(1))
        kinds = (types.CPointer(real.dtype), types.int64, real, types.int64)
        for i, part in enumerate(_in_turn(builder, real.lanes, *parts)):
            skip = simd.WORD(i * real.lanes)
            simd._store_masked(context, builder, real, (at, skip, part, builder.sub(count, skip)), kinds)
        return context.get_dummy_value()

    return types.void(ptr, offset, value, n), codegen


@intrinsic
def load_four(typingctx: Any, ptr: Any, offset: Any) -> Any:
    """Load a vector of four numbers from ``ptr[offset:]``, whatever the machine's vectors have; any alignment."""
    if not _complex(ptr.dtype):
        return _defined("load_four", typingctx, ptr, offset)
    ty = SimdComplex(SimdType(_real_of(ptr.dtype), 4))

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        at = builder.bitcast(
            _reals_at(context, builder, args[0], args[1], sig.args, ty.real), llvm_vector(ty.real).as_pointer()
        )
        both = [builder.load(builder.gep(at, [simd.WORD(i)]), align=ty.real.dtype.bitwidth // 8) for i in range(2)]
        return _made(context, builder, ty, *_apart(builder, 4, *both))

    return ty(ptr, offset), codegen


@intrinsic
def store(typingctx: Any, ptr: Any, offset: Any, value: Any) -> Any:
    """Store a vector to ``ptr[offset:]``; any alignment."""
    if not _complex(value):
        return _defined("store", typingctx, ptr, offset, value)
    real = value.real

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        at = _reals_at(context, builder, args[0], args[1], sig.args, real)
        at = builder.bitcast(at, llvm_vector(real).as_pointer())
        parts = [builder.extract_value(args[2], i) for i in range(2)]
        for i, part in enumerate(_in_turn(builder, real.lanes, *parts)):
            builder.store(part, builder.gep(at, [simd.WORD(i)]), align=real.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(ptr, offset, value), codegen
