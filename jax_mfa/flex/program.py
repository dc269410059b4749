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
import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import Literal

from jax_mfa import checks, compat

INDICES = ("b", "n", "t", "s")
# calls that are no more than the program in them: the parameter that has it
_INLINED = {
    **dict.fromkeys(("jit", "pjit", "remat", "remat2", "checkpoint"), "jaxpr"),
    **dict.fromkeys(("closed_call", "core_call"), "call_jaxpr"),
}


@dataclasses.dataclass(frozen=True)
class Captured:
    """A captured array: its place in the vector of its kind, its shape and its dtype."""

    kind: str  # "floats" or "integers"
    offset: int
    shape: tuple[int, ...]
    dtype: str

    def read(self, vector: Array) -> Array:
        """The array out of its vector."""
        x = lax.slice_in_dim(vector, self.offset, self.offset + math.prod(self.shape)).reshape(self.shape)
        unsigned = self.kind == "integers" and np.dtype(self.dtype).itemsize == x.dtype.itemsize
        return lax.bitcast_convert_type(x, self.dtype) if unsigned and x.dtype != self.dtype else x.astype(self.dtype)


@dataclasses.dataclass(frozen=True)
class Equation:
    """One operation. Inputs are indices of values, or constants; `where` is the line of the caller's that made it."""

    primitive: Any
    inputs: tuple[int | np.generic, ...]
    params: dict[str, Any]
    outputs: tuple[int, ...]
    where: str


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A traced function. Values are numbered: the arguments, then what it captured, then what equations give.

    Programs of equal code are equal, whatever the values of the arrays that they read.

    Attributes:
      arguments: how many scalars it takes.
      captured: of the arrays that it reads.
      equations: in their order.
      result: the index of the scalar that it returns, or a constant.
      key: of all of this, what counts.
    """

    arguments: int
    captured: tuple[Captured, ...]
    equations: tuple[Equation, ...]
    result: int | np.generic
    key: Hashable

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Program) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def depends_on(self, argument: int) -> bool:
        """Whether the argument of this index reaches the result."""
        reached: set[Any] = {argument}
        for x in self.equations:
            if any(isinstance(i, int) and i in reached for i in x.inputs):
                reached.update(x.outputs)
        return isinstance(self.result, int) and self.result in reached

    def evaluate(self, arguments: Sequence[Any], floats: Any, integers: Any, see: Any = None) -> Any:
        """The function of scalars, where the vectors have what it captured.

        Where `see` is false the result is any, and no derivative reaches a captured array, whatever is infinite there.
        """
        values: list[Any] = [*arguments, *(x.read(floats if x.kind == "floats" else integers) for x in self.captured)]
        captured = range(len(arguments), len(values))
        for x in self.equations:
            given = [values[i] if isinstance(i, int) else i for i in x.inputs]
            guarded = see is not None and any(isinstance(i, int) and i in captured for i in x.inputs)
            if guarded:
                given = [
                    y if isinstance(i, int) and i in captured else _only_where(see, y, jnp.ones_like)
                    for i, y in zip(x.inputs, given)
                ]
            found = compat.bind(x.primitive, given, x.params)
            values += [_only_where(see, y, lax.stop_gradient) for y in found] if guarded else found
        return values[self.result] if isinstance(self.result, int) else jnp.asarray(self.result)

    def over(self, arguments: Sequence[Any], floats: Any, integers: Any, see: Any = None) -> Array:
        """The function of arrays of one rank that broadcast against each other, and of vectors `[1 | size of the first
        axis, …]`; `see` too broadcasts to them."""
        arrays = [*arguments, *([] if see is None else [see])]
        shape = np.broadcast_shapes(*(x.shape for x in arrays))
        mapped = [i for i, n in enumerate(shape) if n > 1]
        vectors = [floats, integers]
        own = [x is not None and x.shape[0] > 1 for x in vectors]

        def scalar(vectors: Any, *values: Any) -> Any:
            given = values if see is None else values[:-1]
            return self.evaluate(given, *vectors, None if see is None else values[-1])

        run: Callable[..., Any] = scalar
        for axis in reversed(mapped):
            axes = [0 if x.shape[axis] > 1 else None for x in arrays]
            of_vectors = [0 if axis == 0 and x else None for x in own]
            run = jax.vmap(run, in_axes=(of_vectors, *axes), axis_size=shape[axis])
        narrow = [x.reshape([n for i, n in enumerate(x.shape) if n > 1 and i in mapped]) for x in arrays]
        first = [x if x is None or one else x[0] for x, one in zip(vectors, own)]
        return run(first, *narrow).reshape(shape)


def _only_where(see: Any, x: Any, otherwise: Callable[[Any], Any]) -> Any:
    """A floating value where `see`, and `otherwise` of it elsewhere, without a derivative."""
    return jnp.where(see, x, otherwise(x)) if jnp.issubdtype(jnp.result_type(x), jnp.floating) else x


@functools.partial(jax.tree_util.register_dataclass, data_fields=["floats", "integers"], meta_fields=["score", "mask"])
@dataclasses.dataclass(frozen=True)
class Modifiers:
    """A score's program and that of visibility, each or None, and the arrays that they read."""

    score: Program | None
    mask: Program | None
    floats: Any  # [F], as wide as the widest of them and as sums; None where there are none
    integers: Any  # [I], int32 or int64


def modifiers(score_mod: Any, mask_mod: Any, accumulation: Any) -> Modifiers | None:
    """What an attention whose sums are of this dtype takes of two functions; None where there is neither.

    Raises `TypeError` and `ValueError` naming the function, and what is wrong with it.
    """
    if score_mod is None and mask_mod is None:
        return None
    captures: dict[str, list[Any]] = {"floats": [], "integers": []}
    arguments = ("score", *INDICES)
    score = None if score_mod is None else _traced("score_mod", score_mod, arguments, accumulation, captures)
    mask = None if mask_mod is None else _traced("mask_mod", mask_mod, INDICES, accumulation, captures)
    return Modifiers(
        score,
        mask,
        _vector(captures["floats"], jnp.result_type(accumulation, *captures["floats"])),
        _vector(captures["integers"], np.int64 if any(_wide(x) for x in captures["integers"]) else np.int32),
    )


def _wide(x: Any) -> bool:
    return bool(np.dtype(x.dtype).itemsize == 8)


def _vector(arrays: list[Any], dtype: Any) -> Array | None:
    def flat(x: Any) -> Array:
        bits = jnp.issubdtype(x.dtype, jnp.unsignedinteger) and x.dtype.itemsize == np.dtype(dtype).itemsize
        return (lax.bitcast_convert_type(x, dtype) if bits else x.astype(dtype)).reshape(-1)

    return jnp.concatenate([flat(x) for x in arrays]) if arrays else None


# --- tracing


def _traced(
    name: str, function: Any, arguments: tuple[str, ...], score: Any, captures: dict[str, list[Any]]
) -> Program:
    avals = [jax.ShapeDtypeStruct((), score if x == "score" else np.int32) for x in arguments]
    jaxpr = _jaxpr_of(name, function, arguments, avals)
    tracer = _Tracer(name, len(arguments), captures)
    return tracer.program(jaxpr, "score" in arguments)


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
    returned: list[Any] = []

    def only_arrays(*scalars: Any) -> Any:
        returned.append(function(*scalars))
        leaves = jax.tree.leaves(returned[0], is_leaf=lambda x: x is None)
        if len(leaves) != 1 or leaves[0] is not returned[0] or returned[0] is None:
            raise TypeError(f"{expected} that returns one scalar, got {checks.seen(returned[0])}")
        return jnp.asarray(returned[0])

    jaxpr = jax.make_jaxpr(only_arrays)(*avals)
    if jaxpr.effects:
        effects = ", ".join(sorted(map(str, jaxpr.effects)))
        raise ValueError(f"{name} must have no side effects, such as jax.debug.print or a callback, got {effects}")
    (result,) = jaxpr.out_avals
    wanted, kind = (jnp.bool_, "a bool") if name == "mask_mod" else (jnp.floating, "a floating")
    if result.shape != () or not jnp.issubdtype(result.dtype, wanted):
        raise TypeError(f"{name} must return {kind} scalar, got {result.dtype.name}{list(result.shape)}")
    return jaxpr


class _Tracer:
    """Splits a jaxpr: what depends on no argument is computed, and its values captured; the rest are equations."""

    def __init__(self, name: str, arguments: int, captures: dict[str, list[Any]]) -> None:
        self.name, self.arguments, self.captures = name, arguments, captures
        self.equations: list[tuple[Any, list[Any], list[Any]]] = []  # with keys for values: see `_unknown`
        self.count = arguments

    def program(self, closed: Any, of_score: bool) -> Program:
        arguments = [_Unknown(i) for i in range(self.arguments)]
        (result,) = self._run(closed.jaxpr, closed.consts, arguments)
        if not isinstance(result, _Unknown):  # the same everywhere
            result = self._constant(result)
        used = [x for _, inputs, _ in self.equations for x in inputs] + [result]
        known = {id(x): x for x in used if not isinstance(x, (_Unknown, np.generic))}
        captured = {key: self._capture(x) for key, x in known.items()}
        index: dict[Any, int] = {key: self.arguments + i for i, key in enumerate(known)}
        places: dict[int, int] = {i: i for i in range(self.arguments)}
        count = self.arguments + len(known)

        def place(x: Any) -> Any:
            return places[x.index] if isinstance(x, _Unknown) else x if isinstance(x, np.generic) else index[id(x)]

        equations, keys = [], []
        for eqn, inputs, outputs in self.equations:
            at = tuple(range(count, count + len(outputs)))
            places |= {x.index: i for x, i in zip(outputs, at)}
            count += len(outputs)
            given = tuple(map(place, inputs))
            equations.append(Equation(eqn.primitive, given, eqn.params, at, compat.source_line(eqn)))
            keys.append((_key_of(eqn), tuple(map(_constant_key, given))))
        key = (of_score, tuple(captured.values()), tuple(keys), _constant_key(place(result)))
        return Program(self.arguments, tuple(captured.values()), tuple(equations), place(result), key)

    def _run(self, jaxpr: Any, consts: Any, arguments: Any) -> list[Any]:
        env: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *arguments)))
        read = lambda x: self._constant(x.val, x.aval) if isinstance(x, Literal) else env[x]
        for eqn in jaxpr.eqns:
            given = [read(x) for x in eqn.invars]
            if inner := _INLINED.get(eqn.primitive.name):
                inside = eqn.params[inner]
                found = self._run(getattr(inside, "jaxpr", inside), getattr(inside, "consts", ()), given)
            elif any(isinstance(x, _Unknown) for x in given):
                found = [_Unknown(self.count + i, x.aval) for i, x in enumerate(eqn.outvars)]
                self.count += len(found)
                self.equations.append((eqn, given, found))
            else:
                found = self._computed(eqn, given)
            env |= dict(zip(eqn.outvars, found))
        return [read(x) for x in jaxpr.outvars]

    def _computed(self, eqn: Any, given: list[Any]) -> list[Any]:
        if not all(isinstance(x, np.generic) for x in given):
            return compat.bind(eqn.primitive, given, eqn.params)
        with jax.ensure_compile_time_eval():  # of constants, such as those of indices that may be negative
            found = [np.asarray(x) for x in compat.bind(eqn.primitive, given, eqn.params)]
        return [x if x.ndim else x[()] for x in found]

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
        found = self.captures[kind := "integers" if integers else "floats"]
        for i, other in enumerate(found):  # the other function may read it too
            if other is x:
                break
        else:
            i = len(found)
            found.append(x)
        return Captured(kind, sum(math.prod(y.shape) for y in found[:i]), tuple(x.shape), x.dtype.name)


class _Unknown:
    """A value that depends on an argument."""

    def __init__(self, index: int, aval: Any = None) -> None:
        self.index, self.aval = index, aval


def _constant_key(x: Any) -> Hashable:
    return (x.dtype.str, x.tobytes()) if isinstance(x, np.generic) else x


def _key_of(eqn: Any) -> Hashable:
    """What counts of an equation beside its inputs. Of a function with a derivative rule of its own, that rule too."""
    shapes = tuple((x.aval.shape, str(x.aval.dtype)) for x in (*eqn.invars, *eqn.outvars))
    return eqn.primitive.name, shapes, tuple(_param_keys(eqn))


def _param_keys(eqn: Any) -> Iterator[Hashable]:
    ruled = eqn.primitive.name.startswith(("custom_jvp", "custom_vjp"))
    for name, x in sorted(eqn.params.items()):
        if any(hasattr(leaf, "eqns") for leaf in jax.tree.leaves(x)):
            yield name, _text(x)
        elif not ruled or isinstance(x, (bool, int, str)):
            yield name, x if isinstance(x, Hashable) else str(x)
    if ruled:
        yield _derivative_key(eqn)


def _text(jaxpr: Any) -> str:
    """A jaxpr as text, without the addresses of functions."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(jaxpr))


def _derivative_key(eqn: Any) -> str:
    run = lambda *xs: compat.bind(eqn.primitive, xs, eqn.params)
    avals = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in eqn.invars]
    if eqn.primitive.name.startswith("custom_jvp"):
        return _text(jax.make_jaxpr(lambda *xs: jax.jvp(run, xs, xs))(*avals))
    return _text(jax.make_jaxpr(lambda *xs: jax.vjp(run, *xs)[1](run(*xs)))(*avals))
