"""A function of scalars as data: traced once, without the arrays that it closes over, so that equal code is equal.

`Modifiers` are what an attention problem takes of a caller's `score_mod` and `mask_mod`: two `Program`s, and the values
of all arrays that they read in two vectors, so that an unknown number of arrays is two operands. Whatever depends on
no argument is computed before, outside of the program. Knows nothing of attention but the names of the arguments.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import numbers
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import Literal
from jax.typing import ArrayLike

from jax_mfa import checks, compat

INDICES = ("b", "n", "t", "s")
ScoreMod: TypeAlias = Callable[[Array, Array, Array, Array, Array], ArrayLike]
MaskMod: TypeAlias = Callable[[Array, Array, Array, Array], ArrayLike]
# calls that are no more than the program in them: the parameter that has it
INLINED = {
    **dict.fromkeys(("jit", "pjit", "remat", "remat2", "checkpoint"), "jaxpr"),
    **dict.fromkeys(("closed_call", "core_call"), "call_jaxpr"),
}
# what gives parts of its first operand, as they are
VIEWS = (
    *("broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose", "rev"),
    *("slice", "dynamic_slice", "gather"),
)


@dataclasses.dataclass(frozen=True)
class Captured:
    """A captured array: its place in the vector of its kind, its shape and its dtype."""

    kind: str  # "floats" or "integers"
    offset: int
    shape: tuple[int, ...]
    dtype: str

    def read(self, vector: Array) -> Array:
        """The array out of its vector."""
        x = self.wide(vector)
        unsigned = self.kind == "integers" and np.dtype(self.dtype).itemsize == x.dtype.itemsize
        return lax.bitcast_convert_type(x, self.dtype) if unsigned and x.dtype != self.dtype else x.astype(self.dtype)

    def wide(self, vector: Array) -> Array:
        """The same as wide as the vector."""
        return lax.slice_in_dim(vector, self.offset, self.offset + math.prod(self.shape)).reshape(self.shape)


@dataclasses.dataclass(frozen=True)
class Equation:
    """One operation. Inputs are indices of values, or constants; `where` is the line of the caller's that made it."""

    primitive: Any
    inputs: tuple[int | np.generic, ...]
    params: dict[str, Any]
    outputs: tuple[int, ...]
    where: str

    @property
    def reads(self) -> bool:
        """Whether it takes some entries of an array, or has equations of its own that may."""
        inside = any(hasattr(leaf, "eqns") for leaf in jax.tree.leaves(list(self.params.values())))
        return inside or self.primitive.name in ("gather", "dynamic_slice")


@dataclasses.dataclass(frozen=True)
class Program:
    """A traced function. Values are numbered: the arguments, then what it captured, then what equations give.

    Programs of equal code are equal, whatever the values of the arrays that they read.

    Attributes:
      arguments: how many scalars it takes.
      captured: of the arrays that it reads.
      equations: in their order.
      result: the index of the scalar that it returns, or a constant.
      key: of all of this, what counts where programs are compared.
    """

    arguments: int = dataclasses.field(compare=False)
    captured: tuple[Captured, ...] = dataclasses.field(compare=False)
    equations: tuple[Equation, ...] = dataclasses.field(compare=False)
    result: int | np.generic = dataclasses.field(compare=False)
    key: Hashable

    def depends_on(self, argument: int) -> bool:
        """Whether the argument of this index reaches the result."""
        reached: set[Any] = {argument}
        for x in self.equations:
            if any(isinstance(i, int) and i in reached for i in x.inputs):
                reached.update(x.outputs)
        return isinstance(self.result, int) and self.result in reached

    def evaluate(
        self, arguments: Sequence[Any], floats: Any, integers: Any, see: Any = None, known: Mapping[int, Any] = {}
    ) -> Any:
        """The function of scalars, where the vectors have what it captured.

        Where `see` is false no derivative passes, neither to floating arguments nor to captured arrays, whatever is
        infinite or NaN there; values are the same. Values that are `known`, by their numbers, are taken as they are.
        What is read of floats of 16 bits stays as wide as sums until something is computed of it, for the derivatives
        of all scores that read it are summed.
        """
        guard = (lambda x: x) if see is None else functools.partial(_only_where, see)
        of_captured = range(len(arguments), len(arguments) + len(self.captured))
        of_16_bits = lambda x: x.kind == "floats" and np.dtype(x.dtype).itemsize == 2
        # the dtypes of values that are wider than that
        narrow: dict[Any, str] = {
            i: x.dtype for i, x in zip(of_captured, self.captured) if of_16_bits(x) and i not in known
        }
        read = lambda x: x.wide(floats) if of_16_bits(x) else x.read(floats if x.kind == "floats" else integers)
        values: list[Any] = [known.get(i, x) for i, x in enumerate((*map(guard, arguments), *map(read, self.captured)))]
        for x in self.equations:
            reads = x.reads and any(isinstance(i, int) and i in of_captured for i in x.inputs)
            view = _is_view(x) and isinstance(x.inputs[0], int) and x.inputs[0] in narrow
            widens = x.primitive.name == "convert_element_type" and np.dtype(x.params["new_dtype"]).itemsize > 2
            # what is read is guarded, and not the array for each score; a number that all scores read is guarded itself
            given = []
            for i in x.inputs:
                y = i
                if isinstance(i, int):
                    y = values[i].astype(narrow[i]) if i in narrow and not (view or widens) else values[i]
                    y = guard(y) if i in of_captured and not reads else y
                given.append(y)
            found = compat.bind(x.primitive, given, x.params)
            values += [known.get(i, guard(y) if reads else y) for i, y in zip(x.outputs, found)]
            if view:
                narrow |= {i: narrow[x.inputs[0]] for i in x.outputs if i not in known}
        return values[self.result] if isinstance(self.result, int) else jnp.asarray(self.result)

    def over(self, arguments: Sequence[Any], floats: Any, integers: Any, see: Any = None) -> Array:
        """The function of arrays of one rank that broadcast against each other, and of vectors `[1 | size of the first
        axis, …]`; `see` too broadcasts to them."""
        arrays = [*arguments, *([] if see is None else [see])]
        vectors = [floats, integers]
        own = [x is not None and x.shape[0] > 1 for x in vectors]
        rows = [(x.shape[0],) + (1,) * (arrays[0].ndim - 1) for x, one in zip(vectors, own) if one]
        shape = np.broadcast_shapes(*(x.shape for x in arrays), *rows)
        mapped = [i for i, n in enumerate(shape) if n > 1]

        def scalar(vectors: Any, *values: Any) -> Any:
            count = len(arguments)
            return self.evaluate(values[:count], vectors[0], vectors[1], None if see is None else values[count])

        run: Callable[..., Any] = scalar
        for axis in reversed(mapped):
            axes = [0 if x.shape[axis] > 1 else None for x in arrays]
            of_vectors = [0 if axis == 0 and x else None for x in own]
            run = jax.vmap(run, in_axes=(of_vectors, *axes), axis_size=shape[axis])
        narrow = [x.reshape([n for i, n in enumerate(x.shape) if n > 1 and i in mapped]) for x in arrays]
        first = [x if x is None or one else x[0] for x, one in zip(vectors, own)]
        return run(first, *narrow).reshape(shape)


def _is_view(x: Equation) -> bool:
    return x.primitive.name in VIEWS and x.params.get("fill_value") is None


def _only_where(see: Any, x: Any) -> Any:
    """A value whose derivative passes only where `see`."""
    return jnp.where(see, x, lax.stop_gradient(x)) if jnp.issubdtype(jnp.result_type(x), jnp.floating) else x


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["floats", "integers", "batch"], meta_fields=["score", "mask"]
)
@dataclasses.dataclass(frozen=True)
class Modifiers:
    """A score's program and that of visibility, each or None, and the arrays that they read."""

    score: Program | None
    mask: Program | None
    floats: Any  # [F], as wide as the widest of them and as sums; None where there are none
    integers: Any  # [I], int32 or int64
    batch: Any = None  # int32 [B]: the index that functions are told of each batch entry; None for its own


def modifiers(score_mod: Any, mask_mod: Any, accumulation: Any) -> Modifiers | None:
    """What an attention whose sums are of this dtype takes of two functions; None where there is neither.

    Raises `TypeError` and `ValueError` naming the function, and what is wrong with it.
    """
    if score_mod is None and mask_mod is None:
        return None
    captures: dict[str, list[Any]] = {"floats": [], "integers": []}
    score = _traced("score_mod", score_mod, ("score", *INDICES), accumulation, captures)
    mask = _traced("mask_mod", mask_mod, INDICES, accumulation, captures)
    floats, integers = captures.values()
    wide = any(x.dtype.itemsize == 8 for x in integers)
    return Modifiers(
        score,
        mask,
        _vector(floats, jnp.result_type(accumulation, *floats)),
        _vector(integers, np.int64 if wide else np.int32),
    )


def _vector(arrays: list[Any], dtype: Any) -> Array | None:
    def flat(x: Any) -> Array:
        bits = jnp.issubdtype(x.dtype, jnp.unsignedinteger) and x.dtype.itemsize == np.dtype(dtype).itemsize
        return (lax.bitcast_convert_type(x, dtype) if bits else x.astype(dtype)).reshape(-1)

    if len(arrays) < 2:
        return flat(arrays[0]) if arrays else None
    vector, at = jnp.zeros(sum(x.size for x in arrays), dtype), 0
    for x in arrays:  # concatenation mixes up arrays that are split over some axes of a mesh, in JAX 0.4
        vector = lax.dynamic_update_slice(vector, flat(x), (at,))
        at += x.size
    return vector


# --- tracing


def _traced(
    name: str, function: Any, arguments: tuple[str, ...], score: Any, captures: dict[str, list[Any]]
) -> Program | None:
    if function is None:
        return None
    avals = [jax.ShapeDtypeStruct((), score if x == "score" else np.int32) for x in arguments]
    jaxpr = _jaxpr_of(name, function, arguments, avals)
    return _Tracer(name, captures).program(jaxpr)


def _jaxpr_of(name: str, function: Any, arguments: tuple[str, ...], avals: Any) -> Any:
    expected = f"{name} must be a function {name}({', '.join(arguments)}) of scalars"
    if not callable(function):
        raise TypeError(f"{expected}, got {checks.seen(function)}")
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        raise TypeError(f"{expected}; with {len(arguments)} arguments: {error}") from None
    except ValueError:  # a callable without a signature
        pass

    def only_arrays(*scalars: Any) -> Any:
        x = function(*scalars)
        if not isinstance(x, (jax.Array, np.ndarray, np.generic, numbers.Number)):
            raise TypeError(f"{expected} that returns one scalar, got {checks.seen(x)}")
        return jnp.asarray(x)

    # errors of tracing name the caller's function and its arguments
    only_arrays = functools.update_wrapper(only_arrays, function, updated=())
    try:
        jaxpr = jax.make_jaxpr(only_arrays)(*avals)
    except jax.errors.UnexpectedTracerError as error:
        raise _escaped(name, str(error)) from error
    for x in jaxpr.consts:
        if compat.has_ended(x):
            raise _escaped(name, f"{x.dtype}{list(x.shape)}")
    if jaxpr.effects:
        effects = ", ".join(sorted(map(str, jaxpr.effects)))
        raise ValueError(f"{name} must have no side effects, such as jax.debug.print or a callback, got {effects}")
    (result,) = jaxpr.out_avals
    wanted, kind = (jnp.bool_, "a bool") if name == "mask_mod" else (jnp.floating, "a floating")
    if result.shape != () or not jnp.issubdtype(result.dtype, wanted):
        raise TypeError(f"{name} must return {kind} scalar, got {result.dtype.name}{list(result.shape)}")
    return jaxpr


def _escaped(name: str, got: str) -> Exception:
    return jax.errors.UnexpectedTracerError(
        f"{name} must not read values of a transformation that has ended, as those that a function under jax.jit, "
        f"grad or vmap left in a variable, got {got}"
    )


class _Tracer:
    """Splits a jaxpr: what depends on no argument is computed, and its values captured; the rest are equations."""

    def __init__(self, name: str, captures: dict[str, list[Any]]) -> None:
        self.name, self.captures = name, captures
        self.equations: list[tuple[Any, list[Any], list[Any]]] = []  # each with its inputs and outputs

    def program(self, closed: Any) -> Program:
        arguments = [_Unknown() for _ in closed.in_avals]
        (result,) = self._run(closed.jaxpr, closed.consts, arguments)
        if not isinstance(result, _Unknown):  # the same everywhere
            result = self._constant(result)
        used = [x for _, inputs, _ in self.equations for x in inputs] + [result]
        known = {id(x): x for x in used if not isinstance(x, (_Unknown, np.generic))}
        captured = tuple(map(self._capture, known.values()))
        index = {id(x): i for i, x in enumerate((*arguments, *known.values()))}
        place = lambda x: x if isinstance(x, np.generic) else index[id(x)]
        equations, keys = [], []
        for eqn, inputs, outputs in self.equations:
            at = tuple(range(len(index), len(index) + len(outputs)))
            index |= zip(map(id, outputs), at)
            given = tuple(map(place, inputs))
            equations.append(Equation(eqn.primitive, given, eqn.params, at, compat.source_line(eqn)))
            keys.append((_key_of(eqn), tuple(map(_constant_key, given))))
        key = (len(arguments), captured, tuple(keys), _constant_key(place(result)))
        return Program(len(arguments), captured, tuple(equations), place(result), key)

    def _run(self, jaxpr: Any, consts: Any, arguments: Any) -> list[Any]:
        env: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *arguments)))
        read = lambda x: self._constant(x.val, x.aval) if isinstance(x, Literal) else env[x]
        for eqn in jaxpr.eqns:
            given = [read(x) for x in eqn.invars]
            if eqn.primitive.name == "pvary":  # of types that tiles are without
                found = given
            elif inner := INLINED.get(eqn.primitive.name):
                inside = eqn.params[inner]
                found = self._run(getattr(inside, "jaxpr", inside), getattr(inside, "consts", ()), given)
            elif eqn.primitive.name == "cond" and isinstance(given[0], _Unknown):
                found = self._selected(eqn, given)
            elif _is_ruled(eqn) and ((rule := _derivative_of(eqn)).consts or eqn.params.get("num_consts", 0)):
                inside = _with_rule(eqn, rule)
                found = self._run(inside.jaxpr, inside.consts, [*rule.consts, *given])
            elif any(isinstance(x, _Unknown) for x in given):
                found = [_Unknown() for _ in eqn.outvars]
                self.equations.append((eqn, given, found))
            else:
                found = self._computed(eqn, given)
            env |= dict(zip(eqn.outvars, found))
        return [read(x) for x in jaxpr.outvars]

    def _selected(self, eqn: Any, given: list[Any]) -> list[Any]:
        """All branches, of which each pair of a query and a key takes one: as `vmap` has it."""
        branches = [self._run(x.jaxpr, x.consts, given[1:]) for x in eqn.params["branches"]]
        found = []
        for out, cases in zip(eqn.outvars, zip(*branches)):
            avals = (eqn.invars[0].aval, *(out.aval for _ in cases))
            select = jax.make_jaxpr(lax.select_n)(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals))
            found += self._run(select.jaxpr, select.consts, [given[0], *cases])
        return found

    def _computed(self, eqn: Any, given: list[Any]) -> list[Any]:
        if not all(isinstance(x, np.generic) for x in given):
            return compat.bind(eqn.primitive, given, eqn.params)
        with jax.ensure_compile_time_eval():  # of constants, such as those of indices that may be negative
            found = compat.bind(eqn.primitive, given, eqn.params)
            is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # refused where it is read
            return [x if x.ndim or is_key(x) else np.asarray(x)[()] for x in found]

    def _constant(self, x: Any, aval: Any = None) -> Any:
        """A number of the program's text stays in it; an array is captured."""
        if isinstance(x, jax.Array) or np.ndim(x):
            return x
        return np.asarray(x, None if aval is None else aval.dtype)[()]

    def _capture(self, x: Any) -> Captured:
        x = jnp.asarray(x)
        integers = jnp.issubdtype(x.dtype, jnp.integer) or x.dtype == np.bool_
        if not integers and not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"{self.name} must read arrays of real numbers or bools, got {x.dtype}{list(x.shape)}")
        kind = "integers" if integers else "floats"
        found = self.captures[kind]
        i = next((i for i, other in enumerate(found) if other is x), len(found))  # the other function may read it too
        found += [x] if i == len(found) else []
        return Captured(kind, sum(math.prod(y.shape) for y in found[:i]), tuple(x.shape), x.dtype.name)


class _Unknown:
    """A value that depends on an argument."""


def _constant_key(x: Any) -> Hashable:
    return (x.dtype.str, x.tobytes()) if isinstance(x, np.generic) else x


def _key_of(eqn: Any) -> Hashable:
    """What counts of an equation beside its inputs. Of a function with a derivative rule of its own, that rule too."""
    shapes = tuple((x.aval.shape, str(x.aval.dtype)) for x in (*eqn.invars, *eqn.outvars))
    return eqn.primitive.name, shapes, tuple(_param_keys(eqn))


def _param_keys(eqn: Any) -> Iterator[Hashable]:
    for name, x in sorted(eqn.params.items()):
        if any(hasattr(leaf, "eqns") for leaf in jax.tree.leaves(x)):
            yield name, _text(x)
            yield from () if _is_ruled(eqn) else map(_rule_key, _ruled_within(x))
        elif not _is_ruled(eqn) or isinstance(x, (bool, int, str)):
            yield name, x if isinstance(x, Hashable) else str(x)
    if _is_ruled(eqn):
        yield _rule_key(eqn)


def _ruled_within(x: Any) -> Iterator[Any]:
    """Equations with rules of their own in the jaxprs of a parameter, as in the body of a loop: text has no rules."""
    for eqn in (eqn for leaf in jax.tree.leaves(x) for eqn in getattr(leaf, "eqns", ())):
        if _is_ruled(eqn):
            yield eqn
        for inner in eqn.params.values():
            yield from _ruled_within(inner)


def _rule_key(eqn: Any) -> Hashable:
    """What a rule computes, and of what arrays that it closes over."""
    rule = _derivative_of(eqn)
    arrays = lambda x: id(x) if isinstance(x, jax.core.Tracer) else (str(x.dtype), x.shape, np.asarray(x).tobytes())
    return _text(rule), tuple(map(arrays, rule.consts))


def _text(jaxpr: Any) -> str:
    """A jaxpr as text, without the addresses of functions."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(jaxpr))


# --- functions with derivative rules of their own


def _is_ruled(eqn: Any) -> bool:
    return str(eqn.primitive.name).startswith(("custom_jvp", "custom_vjp"))


def _moving(eqn: Any) -> list[int]:
    """Which inputs of an equation with a rule have derivatives: floating ones, but for what its function closes over,
    which comes first."""
    closed_over = eqn.params.get("num_consts", 0)
    return [i for i, x in enumerate(eqn.invars) if i >= closed_over and jnp.issubdtype(x.aval.dtype, jnp.floating)]


def _derivative_of(eqn: Any) -> Any:
    """A rule as a jaxpr, of the inputs and then of their tangents, or of the cotangents of results."""
    avals = [[jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in of] for of in (eqn.invars, eqn.outvars)]
    moving = _moving(eqn)

    def at(xs: Any) -> tuple[Any, Any]:
        known = dict(enumerate(xs))
        run = lambda *some: compat.bind(eqn.primitive, {**known, **dict(zip(moving, some))}.values(), eqn.params)
        return run, [xs[i] for i in moving]

    def vjp(xs: Any, cotangents: Any) -> Any:
        run, some = at(xs)
        return jax.vjp(run, *some)[1](cotangents)

    if eqn.primitive.name.startswith("custom_jvp"):
        jvp = lambda xs, tangents: jax.jvp(*at(xs), tangents)
        return jax.make_jaxpr(jvp)(avals[0], [avals[0][i] for i in moving])
    return jax.make_jaxpr(vjp)(*avals)


def _with_rule(eqn: Any, rule: Any) -> Any:
    """The same function and rule as a jaxpr that takes all that they close over as inputs, the rule's in front.

    The jaxpr keeps none of these arrays, which programs, that caches hold, would keep too.
    """
    count, inputs, moving, derived = len(rule.consts), len(eqn.invars), _moving(eqn), rule.jaxpr
    body = next(eqn.params[name] for name in ("call_jaxpr", "fun_jaxpr") if name in eqn.params)
    primal = lambda *xs: jax.core.eval_jaxpr(body.jaxpr, body.consts, *xs[count:])
    fun: Any
    if eqn.primitive.name.startswith("custom_jvp"):
        fun = jax.custom_jvp(primal)

        def forward_mode(xs: Any, tangents: Any) -> Any:
            some = (tangents[count + i] for i in moving)
            found = jax.core.eval_jaxpr(derived, xs[:count], *xs[count:], *some)
            return found[: len(found) // 2], found[len(found) // 2 :]

        fun.defjvp(forward_mode)
    else:
        fun = jax.custom_vjp(primal)

        def reverse_mode(xs: Any, cotangents: Any) -> Any:
            found = dict(zip(moving, jax.core.eval_jaxpr(derived, xs[:count], *xs[count:], *cotangents)))
            return (None,) * count + tuple(found.get(i) for i in range(inputs))

        fun.defvjp(lambda *xs: (primal(*xs), xs), reverse_mode)
    avals = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (*rule.consts, *(x.aval for x in eqn.invars))]
    return jax.make_jaxpr(fun)(*avals)
