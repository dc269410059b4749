"""A caller's functions of scores and masks in MSL: a traced program in, the text of a struct out, with its derivative.

Values are lazy: each knows its shape, and gives the name of a scalar at an index, whose own parts may be computed. So
a small vector becomes a few scalars, and a captured array, however large and however it is sliced, one read. Reads are
clamped to the array as JAX does it, so that whatever is asked lies within.

Whatever is not in the tables here is refused by its name, and the line that the caller wrote.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from jax_mfa import compat
from jax_mfa.flex.program import Captured, Program
from jax_mfa.problem import MAX_POSITION

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
_INLINED = {"jit", "pjit", "remat", "remat2", "checkpoint", "closed_call", "core_call"}
_INLINED |= {"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"}
_FLOATS, _INTEGERS, _SIGNED, _UNSIGNED, _BOOLS, _ALL = "f", "iu", "i", "u", "b", "fiub"
_FUNCTIONS = "exp exp2 log log2 sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh sqrt"
_KEPT = ("copy", "copy_p", "optimization_barrier", "pvary")
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


@dataclasses.dataclass(frozen=True)
class Rules:
    """The types of score and visibility, and what MSL text defines them where that is not the base text. It rides in
    the plan: structs derived from `Score` and `Visibility` that say anew what differs."""

    score: str = "Score"
    visibility: str = "Visibility"
    definitions: str = ""
    floats: int = 0  # that the functions read
    reads: int | None = 0  # of single floats by a score, each with a derivative; None where MSL has not all of those


PLAIN = Rules()


@functools.lru_cache(maxsize=1024)
def rules_of(score: Program | None, mask: Program | None) -> Rules:
    """The score and the visibility of a `score_mod` and a `mask_mod`; raises `Refused`."""
    floats = _size("floats", score, mask)  # integers follow them
    found = Rules(floats=floats)
    if score is not None:
        reads, bodies = _score(score, floats)
        name, text = _struct("ScoreMod", bodies)
        found = dataclasses.replace(found, score=f"ModifiedScore<{name}>", definitions=text, reads=reads)
    if mask is not None:
        name, text = _struct("MaskMod", [_function("bool value", "", _body(mask, floats)[0])])
        visibility, definitions = f"ModifiedVisibility<{name}>", found.definitions + text
        found = dataclasses.replace(found, visibility=visibility, definitions=definitions)
    return found


@functools.lru_cache(maxsize=1024)
def refusal(score: Program | None, mask: Program | None) -> str:
    """Which of the two MSL cannot say, and why; empty where it can."""
    for name, program in (("score_mod", score), ("mask_mod", mask)):
        try:
            rules_of(*((program, None) if name == "score_mod" else (None, program)))
        except Refused as error:
            return f"{name}: {error}"
    return ""


def _struct(kind: str, parts: Sequence[str]) -> tuple[str, str]:
    text = "\n".join(parts)
    name = f"{kind}_{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    return name, f"\nstruct {name} {{\n{text}}};\n"


def _function(name: str, score: str, body: str, more: str = "") -> str:
    return f"  INLINED static {name}(const thread Given& given, {score}int t, int s{more}) {{\n{body}  }}\n"


def _score(program: Program, floats: int) -> tuple[int | None, list[str]]:
    """How many floats a `score_mod` reads, and the parts of its struct: its value, its derivative, that by each float,
    and whether it may hide, which is to make minus infinity of what is not."""

    def of_score(x: Any, *others: Any) -> Any:
        *indices, vectors = others
        return program.evaluate((x, *indices), vectors["floats"], vectors["integers"]).astype(jnp.float32)

    def forward(x: Any, *others: Any) -> Any:
        return jax.jvp(lambda x: of_score(x, *others), (x,), (jnp.ones_like(x),))[1]

    value, (lowest, _) = _body(program, floats)
    try:
        derivative, _ = _body(program, floats, jax.grad(of_score))
    except Refused:  # the transposes of slices and reads of what depends on the score; forward mode has none
        derivative, _ = _body(program, floats, forward)
    facts = {"bool may_hide": str(lowest == -np.inf).lower()}
    functions = [_function(f"float {x}", "float score, ", y) for x, y in (("value", value), ("derivative", derivative))]
    try:
        count, by_reads = _body_by_reads(program, floats)
    except Refused:
        count, by_reads = None, ""
    if count:
        facts |= {"int reads": str(count), "int floats": str(floats)}
        results = ", thread int* places, thread float* terms"
        functions.append(_function("void by_reads", "float score, ", by_reads, results))
    return count, ["".join(f"  static constant constexpr {x} = {y};\n" for x, y in facts.items()), *functions]


def _scalars(program: Program, floats: int) -> tuple[_Text, list[Value], dict[str, Value]]:
    """A text, and in it the arguments of a program and the vectors of what it reads."""
    text = _Text()
    # what a score is that is not minus infinity
    of_score = program.arguments == 5
    arguments = [text.argument("score", "float32", float(np.finfo(np.float32).min), np.inf)] if of_score else []
    arguments += [text.argument(x, "int32", 0, MAX_POSITION) for x in ("given.b", "given.n")]
    arguments += [text.argument("t", "int32", -MAX_POSITION, 2 * MAX_POSITION)]
    arguments += [text.argument("s", "int32", 0, MAX_POSITION)]
    words = lambda i: f"given.captured[{i}]"
    vectors = {
        "floats": text.vector(_size("floats", program), "float32", lambda i: f"as_type<float>({words(i)})"),
        "integers": text.vector(_size("integers", program), "int32", lambda i: words(_plus(i, floats))),
    }
    return text, arguments, vectors


def _body(program: Program, floats: int, derivative: Callable[..., Any] | None = None) -> tuple[str, Bounds]:
    """Statements that return what a program gives, or its derivative, and its bounds."""
    text, arguments, vectors = _scalars(program, floats)
    if derivative is None:
        result = text.program(program, arguments, vectors)[program.result]
    else:
        (result,) = text.traced(derivative, [*arguments, vectors])
    wanted = "float32" if program.arguments == 5 else "bool"
    returned = text.elementwise("convert_element_type", {"new_dtype": wanted}, [result.at(())], [result.dtype])
    return text.statements([f"return {returned};"]), text.bounds_of(returned, wanted)


# what gives parts of its first operand, as they are
_VIEWS = (
    "broadcast_in_dim",
    "reshape",
    "squeeze",
    "expand_dims",
    "transpose",
    "rev",
    "slice",
    "dynamic_slice",
    "gather",
)


def _body_by_reads(program: Program, floats: int) -> tuple[int, str]:
    """How many floats a program reads, and statements: where each lies, and the derivative of the result by it."""
    first = program.arguments
    views: set[Any] = {first + i for i, x in enumerate(program.captured) if x.kind == "floats"}
    read = {program.result} & views if isinstance(program.result, int) else set()
    for x in program.equations:
        of = {i for i in x.inputs if isinstance(i, int)} & views
        if x.primitive.name in _VIEWS and of == {x.inputs[0]}:
            views.update(x.outputs)
        else:
            read |= of
    text, arguments, vectors = _scalars(program, floats)
    values = text.program(program, arguments, vectors)
    known = [values[i] for i in sorted(read)]
    count = text.limited(sum(math.prod(x.shape) for x in known))
    elements = [(k, i) for k, x in enumerate(known) for i in np.ndindex(*x.shape)]
    text.of_places = True
    where = text.program(program, arguments, vectors | {"floats": text.vector(floats, "int32", str)})
    places = [where[sorted(read)[k]].at(i) for k, i in elements]
    text.of_places = False

    def by_reads(*others: Any) -> Any:
        *scalars, vectors, known = others

        def result(known: Any) -> Any:
            return _evaluated(program, scalars, vectors, dict(zip(sorted(read), known))).astype(jnp.float32)

        return jax.grad(result)(known)

    found = text.traced(by_reads, [*arguments, vectors, known])
    terms = [_cast(found[k].at(i), found[k].dtype, "float32") for k, i in elements]
    lines = [f"places[{j}] = {place}; terms[{j}] = {term};" for j, (place, term) in enumerate(zip(places, terms))]
    return count, text.statements(lines)


def _evaluated(program: Program, arguments: Any, vectors: Any, known: dict[int, Any]) -> Any:
    """What a program gives where some of its values are `known`."""
    values = [*arguments, *(x.read(vectors[x.kind]) for x in program.captured)]
    values = [known.get(i, x) for i, x in enumerate(values)]
    for x in program.equations:
        given = [values[i] if isinstance(i, int) else i for i in x.inputs]
        outputs = zip(x.outputs, compat.bind(x.primitive, given, x.params))
        values += [known.get(i, y) for i, y in outputs]
    return values[program.result] if isinstance(program.result, int) else jnp.asarray(program.result)


def _size(kind: str, *programs: Program | None) -> int:
    """Of the vector of a kind, as far as programs read it."""
    captured = [x for program in programs if program is not None for x in program.captured if x.kind == kind]
    return max((x.offset + math.prod(x.shape) for x in captured), default=0)


# --- indices: ints, or the text of one


def _plus(a: Any, b: Any) -> Any:
    if isinstance(a, int) and isinstance(b, int):
        return a + b
    return a if b == 0 else b if a == 0 else f"({a} + {b})"


def _times(a: Any, n: int) -> Any:
    return a * n if isinstance(a, int) else a if n == 1 else f"({a} * {n})"


def _ravel(index: Index, shape: Sequence[int]) -> Any:
    found: Any = 0
    for i, n in zip(index, shape):
        found = _plus(_times(found, n), i)
    return found


def _unravel(i: Any, shape: Sequence[int]) -> list[Any]:
    found: list[Any] = []
    rest: Any
    for axis in reversed(range(len(shape))):
        n, last = shape[axis], math.prod(shape[:axis]) == 1
        if isinstance(i, int):
            i, rest = divmod(i, max(n, 1))
        else:
            rest = i if last else 0 if n == 1 else f"({i} % {n})"
            i = 0 if last else i if n == 1 else f"({i} / {n})"
        found.insert(0, rest)
    return found


# --- texts


def _type(dtype: str) -> str:
    return TYPES[dtype][0]


def _kind(dtype: str) -> str:
    return "f" if "float" in dtype else "b" if dtype == "bool" else dtype[0]


def _is_half(dtype: str) -> bool:
    return dtype in ("float16", "bfloat16")


def _literal(x: Any) -> str:
    """A number, in brackets where it has a sign."""
    dtype = np.dtype(x.dtype).name
    _type(dtype)
    if dtype == "bool":
        return str(bool(x)).lower()
    if _kind(dtype) == "f":
        single = np.float32(x)
        text = "NAN" if np.isnan(single) else "INFINITY" if np.isinf(single) else f"{abs(single)}f"
        text = f"(-{text})" if np.signbit(single) and not np.isnan(single) else text
        return f"{_type(dtype)}({text})" if _is_half(dtype) else text
    n = int(x)
    suffix = {"uint32": "u", "int64": "l", "uint64": "ul"}.get(dtype, "")
    text = f"{n}{suffix}"
    if n < 0:
        lowest = n == -(2 ** (8 * np.dtype(dtype).itemsize - 1))
        text = f"({n + 1}{suffix} - 1)" if lowest else f"({text})"
    return text if dtype in ("int32", "uint32", "int64", "uint64") else f"{_type(dtype)}({text})"


def _cast(x: str, dtype: str, to: str) -> str:
    """`x` as another dtype; of floats that no integer is, the nearest, and 0 of NaN, as XLA has them."""
    if dtype == to:
        return x
    target = _type(to)
    if to == "bool":
        return f"{x} != {_literal(np.dtype(dtype).type(0)) if not _is_half(dtype) else '0.0f'}"
    if _kind(dtype) == "f" and _kind(to) in "iu":
        low, high = np.iinfo(to).min, np.iinfo(to).max
        lowest, highest = _literal(np.dtype(to).type(low)), _literal(np.dtype(to).type(high))
        wide = f"float({x})" if _is_half(dtype) else x
        above = f"{wide} >= {float(high + 1) if high > 2**24 else float(high)}f ? {highest}"
        below = f"{wide} <= {float(low)}f ? {lowest}"
        return f"{wide} != {wide} ? {target}(0) : ({above} : ({below} : {target}({wide})))"
    return f"{target}({x})"


def _limits(dtype: str) -> Bounds:
    if _kind(dtype) not in "iu":
        return (-np.inf, np.inf) if _kind(dtype) == "f" else (0, 1)
    return float(np.iinfo(dtype).min), float(np.iinfo(dtype).max)


def _bounds(name: str, given: Sequence[Bounds], dtype: str) -> Bounds:
    """Between which the result of a primitive is, of this dtype, by those of its operands."""
    low, high = _limits(dtype)
    if name in _BOUNDED:
        return _BOUNDED[name]
    with np.errstate(all="ignore"):
        if name in _MONOTONE:
            corners = [float(_MONOTONE[name](*x)) for x in itertools.product(*given)]
        elif name == "select_n":
            corners = [x for pair in given[1:] for x in pair]
        elif name == "div" and given[1][0] * given[1][1] > 0 and _kind(dtype) == "f":
            corners = [x / y for x, y in itertools.product(*given)]
        elif name == "abs":
            corners = [0, *(abs(x) for x in given[0])]
        else:
            return low, high
        corners = [x for x in corners if x == x]
        if _kind(dtype) == "f":
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


class _Text:
    """The statements of a function, while they are written. Equal ones are written once."""

    def __init__(self) -> None:
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
            self.lines.append(f"const {_type(dtype)} {self.names[key]} = {expression};")
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

        def array(x: Captured) -> Value:
            vector = vectors[x.kind]
            return self.jaxpr(jax.make_jaxpr(x.read)(vector.aval), [vector])[0]

        values = [*arguments, *map(array, program.captured)]
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
        if name in SHAPED:
            found = SHAPED[name](self, params, given, outputs)
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
        return self.bounds.get(x, _limits(dtype))

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
        text = next((text for kinds, text in ELEMENTWISE[name].items() if _kind(dtype) in kinds), None)
        if text is None:
            raise self.refused(f"Metal has no primitive {name} of {dtype}")
        compares = name in ("eq", "ne", "lt", "le", "gt", "ge", "is_finite")
        divisor = self.constants.get(xs[-1]) if name in ("div", "rem") else None
        if divisor is not None and _kind(dtype) in "iu" and divisor not in (0, -1):
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
        return self.named(result, f"{scalar}({filled})" if _kind(result) in "iu" or _is_half(result) else filled)

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
            return self.named("int32", f"int(min({name}, {_type(x.dtype)}({most})))")
        wide = x.dtype == "int64"
        return self.named("int32", f"int(clamp({name}, 0l, long({most})))" if wide else f"clamp({name}, 0, {most})")


# --- elementwise primitives whose text depends on more than the kind of an operand


def _select(text: _Text, params: Any, xs: Sequence[str], dtypes: Sequence[str]) -> str:
    which, cases = xs[0], xs[1:]
    if dtypes[0] == "bool":
        return text.named(dtypes[1], f"{which} ? {cases[-1]} : {cases[0]}")
    found = cases[-1]
    for i in reversed(range(len(cases) - 1)):
        found = text.named(dtypes[1], f"{which} <= {i} ? {cases[i]} : {found}")
    return found


def _clamp(text: _Text, params: Any, xs: Sequence[str], dtypes: Sequence[str]) -> str:
    low, x, high = xs
    return text.binary("min", dtypes[1], text.binary("max", dtypes[1], x, low), high)


def _converted(text: _Text, params: Any, xs: Sequence[str], dtypes: Sequence[str]) -> str:
    to = np.dtype(params["new_dtype"]).name
    return xs[0] if text.of_places else text.named(to, _cast(xs[0], dtypes[0], to))


def _bitcast(text: _Text, params: Any, xs: Sequence[str], dtypes: Sequence[str]) -> str:
    to = np.dtype(params["new_dtype"]).name
    return xs[0] if to == dtypes[0] else text.named(to, f"as_type<{_type(to)}>({xs[0]})")


def _round(text: _Text, params: Any, xs: Sequence[str], dtypes: Sequence[str]) -> str:
    even = int(params["rounding_method"]) == 1
    return text.written(dtypes[0], "rint({0})" if even else "round({0})", xs, dtypes[0])


def _integer_pow(text: _Text, params: Any, xs: Sequence[str], dtypes: Sequence[str]) -> str:
    (x,), (dtype,), y = xs, dtypes, params["y"]
    one = text.constant(np.ones((), dtype)).at(())
    result, power, left = one, x, abs(y)
    while left:
        if left & 1:
            result = power if result == one else text.binary("mul", dtype, result, power)
        left >>= 1
        power = text.binary("mul", dtype, power, power) if left else power
    return text.binary("div", dtype, one, result) if y < 0 else result


def _with_error(text: _Text, x: str, dtype: str, y: str, less: str, statement: str) -> str:
    """Kahan's way to divide the error of a rounded `y` out of a function of it."""
    x = text.named("float32", _cast(x, dtype, "float32"))
    y = text.named("float32", y.format(x))
    less = text.named("float32", less.format(y))
    return text.named(dtype, _cast(text.named("float32", statement.format(x=x, y=y, less=less)), "float32", dtype))


def _log1p(text: _Text, params: Any, xs: Sequence[str], dtypes: Sequence[str]) -> str:
    statement = "({y} == 1.0f || {y} == INFINITY) ? {x} : precise::log({y}) * ({x} / {less})"
    return _with_error(text, xs[0], dtypes[0], "1.0f + {0}", "{0} - 1.0f", statement)


def _expm1(text: _Text, params: Any, xs: Sequence[str], dtypes: Sequence[str]) -> str:
    statement = (
        "{y} == 1.0f ? {x} : (({less} == -1.0f || {y} == INFINITY) ? {less} : {less} * ({x} / precise::log({y})))"
    )
    return _with_error(text, xs[0], dtypes[0], "precise::exp({0})", "{0} - 1.0f", statement)


_SPECIAL: dict[str, Callable[..., str]] = {
    "select_n": _select,
    "clamp": _clamp,
    "convert_element_type": _converted,
    "bitcast_convert_type": _bitcast,
    "round": _round,
    "integer_pow": _integer_pow,
    "log1p": _log1p,
    "expm1": _expm1,
}


# --- primitives of shapes: each gives, of its results, what is at an index

Found = list[Callable[[Index], str]]


def _broadcast(text: _Text, params: Any, given: list[Value], out: Sequence[Any]) -> Found:
    x, axes = given[0], params["broadcast_dimensions"]
    return [lambda i: x.at([0 if n == 1 else i[axis] for axis, n in zip(axes, x.shape)])]


def _reshape(text: _Text, params: Any, given: list[Value], out: Sequence[Any]) -> Found:
    x, shape = given[0], out[0].shape
    long = [n for n in shape if n != 1]

    def at(i: Index) -> str:
        if long == [n for n in x.shape if n != 1]:
            rest = iter([k for k, n in zip(i, shape) if n != 1])
            return x.at([0 if n == 1 else next(rest) for n in x.shape])
        return x.at(_unravel(_ravel(i, shape), x.shape))

    return [at]


def _transpose(text: _Text, params: Any, given: list[Value], out: Sequence[Any]) -> Found:
    x, order = given[0], params["permutation"]
    return [lambda i: x.at([i[order.index(axis)] for axis in range(len(order))])]


def _reverse(text: _Text, params: Any, given: list[Value], out: Sequence[Any]) -> Found:
    x, axes = given[0], params["dimensions"]
    turned = lambda axis, k: _plus(x.shape[axis] - 1, _times(k, -1)) if axis in axes else k
    return [lambda i: x.at([turned(axis, k) for axis, k in enumerate(i)])]


def _slice(text: _Text, params: Any, given: list[Value], out: Sequence[Any]) -> Found:
    x, starts = given[0], params["start_indices"]
    strides = params["strides"] or (1,) * len(starts)
    return [lambda i: x.at([_plus(_times(k, n), first) for k, n, first in zip(i, strides, starts)])]


def _dynamic_slice(text: _Text, params: Any, given: list[Value], out: Sequence[Any]) -> Found:
    x, starts = given[0], given[1:]
    spare = [n - size for n, size in zip(x.shape, params["slice_sizes"])]
    return [lambda i: x.at([_plus(text.start(first, (), most), k) for k, first, most in zip(i, starts, spare)])]


def _gather(text: _Text, params: Any, given: list[Value], out: Sequence[Any]) -> Found:
    (x, indices), sizes, rank = given, params["slice_sizes"], len(out[0].shape)
    numbers = params["dimension_numbers"]
    batching = tuple(getattr(numbers, "operand_batching_dims", ()))
    paired = dict(zip(batching, getattr(numbers, "start_indices_batching_dims", ())))
    kept = [axis for axis in range(len(x.shape)) if axis not in (*numbers.collapsed_slice_dims, *batching)]
    spare = [n - size for n, size in zip(x.shape, sizes)]
    fills = "fill" in str(params["mode"]).lower()

    def at(i: Index) -> str:
        batch = [i[axis] for axis in range(rank) if axis not in numbers.offset_dims]
        place: list[Any] = [batch[paired[axis]] if axis in paired else 0 for axis in range(len(x.shape))]
        for axis, along in zip(kept, numbers.offset_dims):
            place[axis] = i[along]
        within = []
        for k, axis in enumerate(numbers.start_index_map):
            place[axis] = _plus(text.start(indices, (*batch, k), spare[axis]), place[axis])
            name = indices.at((*batch, k))
            signed = [] if indices.dtype.startswith("u") else [f"{name} >= 0"]
            within += [*signed, f"{name} <= {spare[axis]}{'u' if not signed else ''}"]
        found = x.at(place)
        if not fills:
            return found
        if text.of_places:
            return text.named("int32", f"{' && '.join(within)} ? {found} : -1")
        fill = text.constant(np.asarray(_fill(params["fill_value"], x.dtype), x.dtype)).at(())
        return text.named(x.dtype, f"{text.named('bool', ' && '.join(within))} ? {found} : {fill}")

    return [at]


def _fill(given: Any, dtype: str) -> Any:
    """What JAX reads beyond an array where nothing is said."""
    if given is not None:
        return given
    kind = _kind(dtype)
    return np.nan if kind == "f" else kind == "b" or (np.iinfo(dtype).min if kind == "i" else np.iinfo(dtype).max)


def _joined(text: _Text, dtype: str, k: Any, parts: Sequence[tuple[int, Callable[[Any], str]]]) -> str:
    """Of parts that lie one after another, each with its size, what is at `k` of them all."""
    ends = list(itertools.accumulate(size for size, _ in parts))
    if isinstance(k, int):
        at = next(i for i, end in enumerate(ends) if k < end)
        return parts[at][1](k - (ends[at] - parts[at][0]))
    found = ""
    for (size, read), end in reversed([x for x in zip(parts, ends) if x[0][0]]):
        own = 0 if size == 1 else text.named("int32", f"clamp({k} - {end - size}, 0, {size - 1})")
        found = text.named(dtype, f"{k} < {end} ? {read(own)} : {found}") if found else read(own)
    return found


def _concatenate(text: _Text, params: Any, given: list[Value], out: Sequence[Any]) -> Found:
    axis = params["dimension"]
    part = lambda x, i: (x.shape[axis], lambda k: x.at([*i[:axis], k, *i[axis + 1 :]]))
    return [lambda i: _joined(text, given[0].dtype, i[axis], [part(x, i) for x in given])]


def _stack(text: _Text, params: Any, given: list[Value], out: Sequence[Any]) -> Found:
    axis = params["axis"] % len(out[0].shape)
    part = lambda x, i: (1, lambda k: x.at([*i[:axis], *i[axis + 1 :]]))
    return [lambda i: _joined(text, given[0].dtype, i[axis], [part(x, i) for x in given])]


def _unstack(text: _Text, params: Any, given: list[Value], out: Sequence[Any]) -> Found:
    (x,), axis = given, params["axis"] % len(given[0].shape)
    part = lambda k: lambda i: x.at([*i[:axis], k, *i[axis:]])
    return [part(k) for k in range(len(out))]


def _pad(text: _Text, params: Any, given: list[Value], out: Sequence[Any]) -> Found:
    x, padding = given

    def at(i: Index) -> str:
        if not all(isinstance(k, int) for k in i):
            raise text.refused("Metal has no primitive pad whose result is read at a computed index")
        steps = [divmod(k - low, inner + 1) for k, (low, _, inner) in zip(i, params["padding_config"])]
        within = all(rest == 0 and 0 <= k < n for (k, rest), n in zip(steps, x.shape))
        return x.at([k for k, _ in steps]) if within else padding.at(())

    return [at]


def _split(text: _Text, params: Any, given: list[Value], out: Sequence[Any]) -> Found:
    (x,), axis = given, params["axis"]
    starts = [0, *itertools.accumulate(params["sizes"])]
    part = lambda first: lambda i: x.at([_plus(k, first) if a == axis else k for a, k in enumerate(i)])
    return [part(first) for first in starts[:-1]]


def _iota(text: _Text, params: Any, given: list[Value], out: Sequence[Any]) -> Found:
    dtype = np.dtype(params["dtype"])

    def at(i: Index) -> str:
        k = i[params["dimension"]]
        return text.constant(np.asarray(k, dtype)).at(()) if isinstance(k, int) else _cast(k, "int32", dtype.name)

    return [at]


def _squeeze(text: _Text, params: Any, given: list[Value], out: Sequence[Any]) -> Found:
    return _reshape(text, params, given, out)


def _reduction(name: str, none: Callable[[str], Any]) -> Callable[..., Found]:
    def rule(text: _Text, params: Any, given: list[Value], out: Sequence[Any]) -> Found:
        (x,), axes = given, params["axes"]
        text.limited(math.prod(x.shape[axis] for axis in axes))

        def at(i: Index) -> str:
            def term(k: Sequence[int]) -> str:
                rest, own = iter(i), dict(zip(axes, k))
                return x.at([own[axis] if axis in own else next(rest) for axis in range(len(x.shape))])

            terms = [term(k) for k in itertools.product(*(range(x.shape[axis]) for axis in axes))]
            return text.folded(name, x.dtype, terms, none(x.dtype))

        return [at]

    return rule


def _dot_general(text: _Text, params: Any, given: list[Value], out: Sequence[Any]) -> Found:
    (a, b), ((over_a, over_b), (batch_a, batch_b)) = given, params["dimension_numbers"]
    dtype = np.dtype(out[0].dtype).name
    own_a = [axis for axis in range(len(a.shape)) if axis not in (*over_a, *batch_a)]
    own_b = [axis for axis in range(len(b.shape)) if axis not in (*over_b, *batch_b)]
    sizes = [a.shape[axis] for axis in over_a]
    text.limited(math.prod(sizes))

    def at(i: Index) -> str:
        batch, rows, columns = i[: len(batch_a)], i[len(batch_a) :][: len(own_a)], i[len(batch_a) + len(own_a) :]

        def read(x: Value, places: dict[int, Any]) -> str:
            name = x.at([places[axis] for axis in range(len(x.shape))])
            return text.named(dtype, _cast(name, x.dtype, dtype))

        terms = []
        for k in itertools.product(*map(range, sizes)):
            x = read(a, dict(zip((*batch_a, *own_a, *over_a), (*batch, *rows, *k))))
            y = read(b, dict(zip((*batch_b, *own_b, *over_b), (*batch, *columns, *k))))
            terms.append(text.binary("mul", dtype, x, y))
        return text.folded("add", dtype, terms, 0)

    return [at]


def _cond(text: _Text, params: Any, given: list[Value], out: Sequence[Any]) -> Found:
    which, others = given[0], given[1:]
    branches = [text.jaxpr(x, others) for x in params["branches"]]

    def chosen(cases: Sequence[Value]) -> Callable[[Index], str]:
        dtypes = [which.dtype, *(x.dtype for x in cases)]
        return lambda i: _select(text, {}, [which.at(()), *(x.at(i) for x in cases)], dtypes)

    return [chosen(cases) for cases in zip(*branches)]


def _lowest(dtype: str) -> Any:
    return -np.inf if _kind(dtype) == "f" else False if dtype == "bool" else np.iinfo(dtype).min


def _highest(dtype: str) -> Any:
    return np.inf if _kind(dtype) == "f" else True if dtype == "bool" else np.iinfo(dtype).max


SHAPED: dict[str, Callable[..., Found]] = {
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "squeeze": _squeeze,
    "expand_dims": _reshape,
    "transpose": _transpose,
    "rev": _reverse,
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "gather": _gather,
    "concatenate": _concatenate,
    "stack": _stack,
    "unstack": _unstack,
    "pad": _pad,
    "split": _split,
    "iota": _iota,
    "dot_general": _dot_general,
    "cond": _cond,
    "reduce_sum": _reduction("add", lambda dtype: 0),
    "reduce_prod": _reduction("mul", lambda dtype: 1),
    "reduce_max": _reduction("max", _lowest),
    "reduce_min": _reduction("min", _highest),
    "reduce_and": _reduction("and", lambda dtype: -1 if dtype != "bool" else True),
    "reduce_or": _reduction("or", lambda dtype: 0),
    "reduce_xor": _reduction("xor", lambda dtype: 0),
}
