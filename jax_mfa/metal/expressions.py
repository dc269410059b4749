"""Scalar expressions in MSL: the text of each elementwise primitive, and the statements of a function.

Values are lazy: each knows its shape, and gives the name of a scalar at an index, whose own parts may be computed. So
a small vector becomes a few scalars, and a captured array, however large and however it is sliced, one read. Reads are
clamped to the array as JAX does it, so that whatever is asked lies within.

Whatever is not in the tables here and in `shapes` is refused by its name, and the line that the caller wrote.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal

from jax_mfa import compat
from jax_mfa.flex.program import INLINED, Program

MOST_TERMS = 64  # of a sum, which is written out
MOST_LINES = 4096
# MSL type of each dtype, and that in which integers wrap around
TYPES = {
    "bool": ("bool", ""),
    "int8": ("char", "uint"),
    "int16": ("short", "uint"),
    "int32": ("int", "uint"),
    "int64": ("long", "ulong"),
    "uint8": ("uchar", "uint"),
    "uint16": ("ushort", "uint"),
    "uint32": ("uint", "uint"),
    "uint64": ("ulong", "ulong"),
    "float16": ("half", ""),
    "bfloat16": ("bfloat", ""),
    "float32": ("float", ""),
}
# calls that are no more than the program in them
_INLINED = {*INLINED, "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"}
_FLOATS, _INTEGERS, _SIGNED, _UNSIGNED, _BOOLS, _ALL = "f", "iu", "i", "u", "b", "fiub"
_FUNCTIONS = "exp exp2 log log2 sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh sqrt"
_KEPT = ("copy", "copy_p", "optimization_barrier", "pvary", "stop_gradient")
_ADD = {_FLOATS: "{0} + {1}", _INTEGERS: "{W}({0}) + {W}({1})"}
# Elementwise primitives: the text of each, by the kinds of their first operand. {0} and {1} are the operands, {W} is
# the type in which integers wrap around, {N} and {S} are their own without a sign and with one, {BITS} is their width.
# What is an integer becomes one of the result's type.
ELEMENTWISE: dict[str, dict[str, str]] = {
    "add": _ADD,
    "add_any": _ADD,
    "sub": {_FLOATS: "{0} - {1}", _INTEGERS: "{W}({0}) - {W}({1})"},
    "mul": {_FLOATS: "{0} * {1}", _INTEGERS: "{W}({0}) * {W}({1})"},
    "neg": {_FLOATS: "-{0}", _INTEGERS: "0 - {W}({0})"},
    "square": {_FLOATS: "{0} * {0}", _INTEGERS: "{W}({0}) * {W}({0})"},
    # of integers by 0, and of the lowest by -1, as XLA has them
    "div": {
        _FLOATS: "{0} / {1}",
        _SIGNED: "{1} == 0 ? {W}(-1) : ({1} == -1 ? 0 - {W}({0}) : {W}({0} / {1}))",
        _UNSIGNED: "{1} == 0 ? {W}(-1) : {W}({0} / {1})",
    },
    "rem": {
        _FLOATS: "precise::fmod({0}, {1})",
        _SIGNED: "{1} == 0 ? {0} : ({1} == -1 ? 0 : {0} % {1})",
        _UNSIGNED: "{1} == 0 ? {0} : {0} % {1}",
    },
    # NaN, where either is
    "max": {_FLOATS: "({0} > {1} || {0} != {0}) ? {0} : {1}", _INTEGERS: "{0} > {1} ? {0} : {1}", _BOOLS: "{0} || {1}"},
    "min": {_FLOATS: "({0} < {1} || {0} != {0}) ? {0} : {1}", _INTEGERS: "{0} < {1} ? {0} : {1}", _BOOLS: "{0} && {1}"},
    "abs": {_FLOATS: "fabs({0})", _SIGNED: "{0} < 0 ? 0 - {W}({0}) : {W}({0})", _UNSIGNED: "{0}"},
    "sign": {
        _FLOATS: "{0} > 0 ? 1.0f : ({0} < 0 ? -1.0f : {0})",
        _SIGNED: "{0} > 0 ? 1 : ({0} < 0 ? -1 : 0)",
        _UNSIGNED: "{0} > 0 ? 1 : 0",
    },
    **{name: {_FLOATS: f"precise::{name}({{0}})"} for name in _FUNCTIONS.split()},
    "floor": {_FLOATS: "floor({0})"},
    "ceil": {_FLOATS: "ceil({0})"},
    "rsqrt": {_FLOATS: "1.0f / precise::sqrt({0})"},
    "one_minus_square": {_FLOATS: "(1.0f + {0}) * (1.0f - {0})"},
    "atan2": {_FLOATS: "precise::atan2({0}, {1})"},
    "pow": {_FLOATS: "precise::pow({0}, float({1}))"},
    "logistic": {_FLOATS: "1.0f / (1.0f + precise::exp(-{0}))"},
    "is_finite": {_FLOATS: "is_finite({0})"},
    **{
        name: {_ALL: f"{{0}} {sign} {{1}}"}
        for name, sign in (("eq", "=="), ("ne", "!="), ("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">="))
    },
    **{
        name: {_BOOLS: f"{{0}} {of_bools} {{1}}", _INTEGERS: f"{{0}} {sign} {{1}}"}
        for name, of_bools, sign in (("and", "&&", "&"), ("or", "||", "|"), ("xor", "!=", "^"))
    },
    "not": {_BOOLS: "!{0}", _INTEGERS: "~{0}"},
    "shift_left": {_INTEGERS: "{W}({1}) < {BITS} ? {W}({0}) << {1} : 0"},
    "shift_right_logical": {_INTEGERS: "{W}({1}) < {BITS} ? {N}({0}) >> {1} : 0"},
    "shift_right_arithmetic": {
        _INTEGERS: "{S}({0}) >> ({W}({1}) < {BITS} ? int({1}) : {BITS} - 1)",
    },
    "population_count": {_INTEGERS: "popcount({N}({0}))"},
    "clz": {_INTEGERS: "clz({N}({0}))"},
}

# of those that rise or fall with each of their operands: what they do to bounds
_MONOTONE: dict[str, Callable[..., Any]] = {
    **{"add": np.add, "sub": np.subtract, "mul": np.multiply, "max": np.maximum, "min": np.minimum, "neg": np.negative},
    **{"exp": np.exp, "exp2": np.exp2, "tanh": np.tanh, "floor": np.floor, "ceil": np.ceil},
    "convert_element_type": lambda x: x,
}
_BOUNDED = {**dict.fromkeys(("sin", "cos", "sign"), (-1, 1)), "logistic": (0, 1)}
Bounds = tuple[float, float]

Index = Sequence[Any]  # an int or the text of one for each axis


class Refused(NotImplementedError):
    """What a function does and MSL does not, in words, with the caller's line where it is known."""


# --- texts


def type_of(dtype: str) -> str:
    return TYPES[dtype][0]


def kind_of(dtype: str) -> str:
    return "f" if "float" in dtype else "b" if dtype == "bool" else dtype[0]


def _is_half(dtype: str) -> bool:
    return dtype in ("float16", "bfloat16")


def _literal(x: Any) -> str:
    """A number, in brackets where it has a sign."""
    dtype = np.dtype(x.dtype).name
    type_of(dtype)
    if dtype == "bool":
        return str(bool(x)).lower()
    if kind_of(dtype) == "f":
        single = np.float32(x)
        text = "NAN" if np.isnan(single) else "INFINITY" if np.isinf(single) else f"{abs(single)}f"
        text = f"(-{text})" if np.signbit(single) and not np.isnan(single) else text
        return f"{type_of(dtype)}({text})" if _is_half(dtype) else text
    n = int(x)
    suffix = {"uint32": "u", "int64": "l", "uint64": "ul"}.get(dtype, "")
    text = f"{n}{suffix}"
    if n < 0:
        text = f"({n + 1}{suffix} - 1)" if n == limits(dtype)[0] else f"({text})"
    return text if dtype in ("int32", "uint32", "int64", "uint64") else f"{type_of(dtype)}({text})"


def cast(x: str, dtype: str, to: str) -> str:
    """`x` as another dtype; of floats that no integer is, the nearest, and 0 of NaN, as XLA has them."""
    if dtype == to:
        return x
    target = type_of(to)
    if to == "bool":
        return f"{x} != {_literal(np.dtype(dtype).type(0)) if not _is_half(dtype) else '0.0f'}"
    if kind_of(dtype) == "f" and kind_of(to) in "iu":
        low, high = limits(to)
        lowest, highest = (_literal(np.dtype(to).type(x)) for x in (low, high))
        wide = f"float({x})" if _is_half(dtype) else x
        above = f"{wide} >= {float(high + 1) if high > 2**24 else float(high)}f ? {highest}"
        below = f"{wide} <= {float(low)}f ? {lowest}"
        return f"{wide} != {wide} ? {target}(0) : ({above} : ({below} : {target}({wide})))"
    return f"{target}({x})"


def limits(dtype: str) -> Any:
    """The least and the largest number of a dtype."""
    if kind_of(dtype) not in "iu":
        return (-np.inf, np.inf) if kind_of(dtype) == "f" else (False, True)
    return np.iinfo(dtype).min, np.iinfo(dtype).max


def _bounds(name: str, given: Sequence[Bounds], dtype: str) -> Bounds:
    """Between which the result of a primitive is, of this dtype, by those of its operands."""
    low, high = limits(dtype)
    if name in _BOUNDED:
        return _BOUNDED[name]
    with np.errstate(all="ignore"):
        if name in _MONOTONE:
            corners = [float(_MONOTONE[name](*map(float, x))) for x in itertools.product(*given)]
        elif name == "select_n":
            corners = [x for pair in given[1:] for x in pair]
        elif name == "div" and given[1][0] * given[1][1] > 0 and kind_of(dtype) == "f":
            corners = [x / y for x, y in itertools.product(*given)]
        elif name == "abs":
            corners = [0, *(abs(x) for x in given[0])]
        else:
            return low, high
        corners = [x for x in corners if x == x]
        if kind_of(dtype) == "f":
            corners = [float(np.asarray(x, dtype)) for x in corners]  # which may round, and overflow
    found = min(corners, default=low), max(corners, default=high)
    return found if low <= found[0] and found[1] <= high else (low, high)  # integers wrap around


@dataclasses.dataclass(frozen=True)
class Value:
    """An array: its shape, its dtype, and the name of its scalar at an index."""

    shape: tuple[int, ...]
    dtype: str
    at: Callable[[Index], str]

    @property
    def aval(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape, self.dtype)


class Text:
    """The statements of a function, while they are written. Equal ones are written once."""

    def __init__(self, shaped: Mapping[str, Callable[..., Any]]) -> None:
        self.shaped = shaped  # rules of primitives of shapes
        self.lines: list[str] = []
        self.names: dict[tuple[str, str], str] = {}
        self.products: dict[str, str] = {}
        self.constants: dict[str, Any] = {}  # the numbers that literals stand for
        self.bounds: dict[str, Bounds] = {}  # between which a scalar is, if it is not NaN
        self.where = ""  # the caller's line
        self.of_places = False  # whether the values of floats that are read are where these lie, -1 for nowhere

    def refused(self, problem: str) -> Refused:
        return Refused(f"{problem}{f' ({self.where})' if self.where else ''}")

    def statements(self, last: Sequence[str]) -> str:
        """Those that count for the last ones, and these."""
        lines, used = list(reversed(last)), set(re.findall(r"\w+", " ".join(last)))
        for line in reversed(self.lines):
            name, expression = line.removesuffix(";").split(" ", 2)[2].split(" = ", 1)
            if name in used:
                used.update(re.findall(r"\w+", expression))
                lines.append(line)
        return "".join(f"    {line}\n" for line in reversed(lines))

    def named(self, dtype: str, expression: str) -> str:
        """The name of a constant with this value; the expression itself, where that is a name or a number."""
        if expression in self.constants or expression.replace(".", "").isidentifier():
            return expression
        key = (dtype, expression)
        if key not in self.names:
            if len(self.lines) == MOST_LINES:
                raise self.refused(f"a function of more than {MOST_LINES} operations")
            self.names[key] = f"x{len(self.names)}"
            self.lines.append(f"const {type_of(dtype)} {self.names[key]} = {expression};")
        return self.names[key]

    def value(self, shape: Sequence[int], dtype: Any, at: Callable[[Index], str]) -> Value:
        """A value that asks for each of its scalars once, and of errors says where they are from."""
        where, known = self.where, dict[tuple[Any, ...], str]()

        def once(i: Index) -> str:
            i = tuple(i)
            if i not in known:
                before, self.where = self.where, where
                known[i] = at(i)
                self.where = before
            return known[i]

        return Value(tuple(shape), np.dtype(dtype).name, once)

    def argument(self, name: str, dtype: str, low: float, high: float) -> Value:
        self.bounds[name] = low, high
        return self.value((), dtype, lambda i: name)

    def vector(self, size: int, dtype: str, read: Callable[[Any], str]) -> Value:
        return self.value((size,), dtype, lambda i: self.named(dtype, read(i[0])))

    def constant(self, x: Any) -> Value:
        x = np.asarray(x)

        def at(i: Index) -> str:
            if not all(isinstance(k, int) for k in i):
                raise self.refused("an array of constants at a computed index")
            text = _literal(x[tuple(i)])
            self.constants[text] = x[tuple(i)]
            self.bounds[text] = (float(x[tuple(i)]),) * 2
            return text

        return self.value(x.shape, x.dtype, at)

    # --- programs

    def program(self, program: Program, arguments: Sequence[Value], vectors: dict[str, Value]) -> dict[Any, Value]:
        """Its values by their numbers, and its result by what a program has for it."""
        values = [*arguments]
        for array in program.captured:
            vector = vectors[array.kind]
            values += self.jaxpr(jax.make_jaxpr(array.read)(vector.aval), [vector])
        get = lambda x: values[x] if isinstance(x, int) else self.constant(x)
        for x in program.equations:
            self.where, given = x.where, [get(i) for i in x.inputs]
            bind = lambda *xs, x=x: compat.bind(x.primitive, xs, x.params)
            outputs: Any = jax.eval_shape(bind, *(y.aval for y in given))
            values += self.primitive(x.primitive.name, x.params, given, outputs)
        return {**dict(enumerate(values)), program.result: get(program.result)}

    def traced(self, function: Callable[..., Any], arguments: Any) -> list[Value]:
        """What a function of values, in any containers, gives."""
        is_value = lambda x: isinstance(x, Value)
        shapes = jax.tree.map(lambda x: x.aval, arguments, is_leaf=is_value)
        before, self.where = self.where, "in its derivative"
        found = self.jaxpr(jax.make_jaxpr(function)(*shapes), jax.tree.leaves(arguments, is_leaf=is_value))
        self.where = before
        return found

    def jaxpr(self, closed: Any, arguments: Sequence[Value]) -> list[Value]:
        jaxpr = getattr(closed, "jaxpr", closed)
        consts = map(self.constant, getattr(closed, "consts", ()))
        env: dict[Any, Value] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *arguments)))
        dtype: Any = lambda x: x.aval.dtype
        read = lambda x: self.constant(np.asarray(x.val, dtype(x))) if isinstance(x, Literal) else env[x]
        for eqn in jaxpr.eqns:
            outputs: list[Any] = [x.aval for x in eqn.outvars]
            found = self.primitive(eqn.primitive.name, eqn.params, [read(x) for x in eqn.invars], outputs)
            env |= dict(zip(eqn.outvars, found))
        return [read(x) for x in jaxpr.outvars]

    def primitive(self, name: str, params: dict[str, Any], given: list[Value], outputs: Sequence[Any]) -> list[Value]:
        """The results of a primitive."""
        if name in _INLINED:
            inner = next(params[x] for x in ("jaxpr", "call_jaxpr", "fun_jaxpr") if x in params)
            return self.jaxpr(inner, given)
        dtypes = [x.dtype for x in given]
        if name in self.shaped:
            found = self.shaped[name](self, params, given, outputs)
        elif name == "bitcast_convert_type" and given[0].shape != outputs[0].shape:
            found = [self.unknown("bitcast_convert_type between numbers of different widths")]
        elif name in ELEMENTWISE or name in _SPECIAL:
            found = [lambda i: self.elementwise(name, params, [x.at(i if x.shape else ()) for x in given], dtypes)]
        elif name in _KEPT:
            found = [x.at for x in given]
        else:
            found = [self.unknown(f"primitive {name}")] * len(outputs)
        results = [np.dtype(x.dtype).name for x in outputs]
        found = [at if dtype in TYPES else self.unknown(dtype) for at, dtype in zip(found, results)]
        return [self.value(x.shape, x.dtype, at) for x, at in zip(outputs, found)]

    def unknown(self, what: str) -> Callable[[Index], str]:
        """What is refused where it is asked for: what nothing depends on may be unknown."""

        def refuse(i: Index) -> str:
            raise self.refused(f"Metal has no {what}")

        return refuse

    def bounds_of(self, x: str, dtype: str) -> Bounds:
        return self.bounds.get(x, limits(dtype))

    def elementwise(self, name: str, params: Any, xs: Sequence[str], dtypes: Sequence[str]) -> str:
        found = self._elementwise(name, params, xs, dtypes)
        if found not in self.bounds:
            given = [self.bounds_of(x, dtype) for x, dtype in zip(xs, dtypes)]
            self.bounds[found] = _bounds(name, given, np.dtype(params.get("new_dtype", dtypes[-1])).name)
        return found

    def _elementwise(self, name: str, params: Any, xs: Sequence[str], dtypes: Sequence[str]) -> str:
        dtype = dtypes[0]
        if name in _SPECIAL:
            return _SPECIAL[name](self, params, xs, dtypes)
        text = next((text for kinds, text in ELEMENTWISE[name].items() if kind_of(dtype) in kinds), None)
        if text is None:
            raise self.refused(f"Metal has no primitive {name} of {dtype}")
        compares = name in ("eq", "ne", "lt", "le", "gt", "ge", "is_finite")
        divisor = self.constants.get(xs[-1]) if name in ("div", "rem") else None
        if divisor is not None and kind_of(dtype) in "iu" and divisor not in (0, -1):
            text = "{0} / {1}" if name == "div" else "{0} % {1}"
        if dtype == "float32" and name in ("add", "add_any", "sub") and sum(x in self.products for x in xs) == 1:
            xs = [self.products.get(x, x) for x in xs]  # in one expression, which may become one instruction
        found = self.written("bool" if compares else dtype, text, xs, dtype)
        if name == "mul":
            self.products[found] = f"{xs[0]} * {xs[1]}"
        return found

    def binary(self, name: str, dtype: str, x: str, y: str) -> str:
        return self.elementwise(name, {}, [x, y], [dtype, dtype])

    def written(self, result: str, text: str, xs: Sequence[str], dtype: str) -> str:
        """The name of a text with operands of a dtype filled in; halves are computed as single floats."""
        scalar, wraps = TYPES[dtype]
        if _is_half(dtype):
            xs = [f"float({x})" for x in xs]
        unsigned, signed = scalar if scalar.startswith("u") else f"u{scalar}", scalar.removeprefix("u")
        bits = 8 * np.dtype(dtype).itemsize
        filled = text.format(*xs, W=wraps, N=unsigned, S=signed, BITS=bits)
        return self.named(result, f"{scalar}({filled})" if kind_of(result) in "iu" or _is_half(result) else filled)

    def folded(self, name: str, dtype: str, terms: Sequence[str], none: Any) -> str:
        """A sum, a maximum, … of terms."""
        if not terms:
            return self.constant(np.asarray(none, dtype)).at(())
        return functools.reduce(functools.partial(self.binary, name, dtype), terms)

    def limited(self, count: int) -> int:
        if count > MOST_TERMS:
            raise self.refused(f"an intermediate of {count} elements, more than {MOST_TERMS}")
        return count

    def start(self, x: Value, i: Index, most: int) -> Any:
        """An index clamped to 0 … most."""
        name = x.at(i)
        if name in self.constants:
            return min(max(int(self.constants[name]), 0), most)
        if most == 0:
            return 0
        if x.dtype.startswith("u"):
            return self.named("int32", f"int(min({name}, {type_of(x.dtype)}({most})))")
        wide = x.dtype == "int64"
        return self.named("int32", f"int(clamp({name}, 0l, long({most})))" if wide else f"clamp({name}, 0, {most})")


# --- elementwise primitives whose text depends on more than the kind of an operand


def select(text: Text, params: Any, xs: Sequence[str], dtypes: Sequence[str]) -> str:
    which, cases = xs[0], xs[1:]
    if dtypes[0] == "bool":
        return text.named(dtypes[1], f"{which} ? {cases[-1]} : {cases[0]}")
    found = cases[-1]
    for i in reversed(range(len(cases) - 1)):
        found = text.named(dtypes[1], f"{which} <= {i} ? {cases[i]} : {found}")
    return found


def _clamp(text: Text, params: Any, xs: Sequence[str], dtypes: Sequence[str]) -> str:
    low, x, high = xs
    return text.binary("min", dtypes[1], text.binary("max", dtypes[1], x, low), high)


def _converted(text: Text, params: Any, xs: Sequence[str], dtypes: Sequence[str]) -> str:
    to = np.dtype(params["new_dtype"]).name
    return xs[0] if text.of_places else text.named(to, cast(xs[0], dtypes[0], to))


def _bitcast(text: Text, params: Any, xs: Sequence[str], dtypes: Sequence[str]) -> str:
    to = np.dtype(params["new_dtype"]).name
    return xs[0] if to == dtypes[0] else text.named(to, f"as_type<{type_of(to)}>({xs[0]})")


def _round(text: Text, params: Any, xs: Sequence[str], dtypes: Sequence[str]) -> str:
    even = int(params["rounding_method"]) == 1
    return text.written(dtypes[0], "rint({0})" if even else "round({0})", xs, dtypes[0])


def _integer_pow(text: Text, params: Any, xs: Sequence[str], dtypes: Sequence[str]) -> str:
    (x,), (dtype,), y = xs, dtypes, params["y"]
    one = text.constant(np.ones((), dtype)).at(())
    result, power, left = one, x, abs(y)
    while left:
        if left & 1:
            result = power if result == one else text.binary("mul", dtype, result, power)
        left >>= 1
        power = text.binary("mul", dtype, power, power) if left else power
    return text.binary("div", dtype, one, result) if y < 0 else result


def _with_error(text: Text, x: str, dtype: str, y: str, less: str, statement: str) -> str:
    """Kahan's way to divide the error of a rounded `y` out of a function of it."""
    x = text.named("float32", cast(x, dtype, "float32"))
    y = text.named("float32", y.format(x))
    less = text.named("float32", less.format(y))
    return text.named(dtype, cast(text.named("float32", statement.format(x=x, y=y, less=less)), "float32", dtype))


def _log1p(text: Text, params: Any, xs: Sequence[str], dtypes: Sequence[str]) -> str:
    statement = "({y} == 1.0f || {y} == INFINITY) ? {x} : precise::log({y}) * ({x} / {less})"
    return _with_error(text, xs[0], dtypes[0], "1.0f + {0}", "{0} - 1.0f", statement)


def _expm1(text: Text, params: Any, xs: Sequence[str], dtypes: Sequence[str]) -> str:
    statement = (
        "{y} == 1.0f ? {x} : (({less} == -1.0f || {y} == INFINITY) ? {less} : {less} * ({x} / precise::log({y})))"
    )
    return _with_error(text, xs[0], dtypes[0], "precise::exp({0})", "{0} - 1.0f", statement)


_SPECIAL: dict[str, Callable[..., str]] = {
    "select_n": select,
    "clamp": _clamp,
    "convert_element_type": _converted,
    "bitcast_convert_type": _bitcast,
    "round": _round,
    "integer_pow": _integer_pow,
    "log1p": _log1p,
    "expm1": _expm1,
}
