"""Primitives of shapes in MSL: each gives, of its results, the scalar at an index."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jax_mfa.metal.expressions import Index, Text, Value, cast, kind_of, limits, select

# --- indices: ints, or the text of one


def plus(a: Any, b: Any) -> Any:
    if isinstance(a, int) and isinstance(b, int):
        return a + b
    return a if b == 0 else b if a == 0 else f"({a} + {b})"


def times(a: Any, n: int) -> Any:
    return a * n if isinstance(a, int) else a if n == 1 else f"({a} * {n})"


def ravel(index: Index, shape: Sequence[int]) -> Any:
    found: Any = 0
    for i, n in zip(index, shape):
        found = plus(times(found, n), i)
    return found


def unravel(i: Any, shape: Sequence[int]) -> list[Any]:
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


# --- rules
Found = list[Callable[[Index], str]]


def _broadcast(text: Text, params: Any, given: list[Value], out: Sequence[Any]) -> Found:
    x, axes = given[0], params["broadcast_dimensions"]
    return [lambda i: x.at([0 if n == 1 else i[axis] for axis, n in zip(axes, x.shape)])]


def _reshape(text: Text, params: Any, given: list[Value], out: Sequence[Any]) -> Found:
    x, shape = given[0], out[0].shape
    long = [n for n in shape if n != 1]

    def at(i: Index) -> str:
        if long == [n for n in x.shape if n != 1]:
            rest = iter([k for k, n in zip(i, shape) if n != 1])
            return x.at([0 if n == 1 else next(rest) for n in x.shape])
        return x.at(unravel(ravel(i, shape), x.shape))

    return [at]


def _transpose(text: Text, params: Any, given: list[Value], out: Sequence[Any]) -> Found:
    x, order = given[0], params["permutation"]
    return [lambda i: x.at([i[order.index(axis)] for axis in range(len(order))])]


def _reverse(text: Text, params: Any, given: list[Value], out: Sequence[Any]) -> Found:
    x, axes = given[0], params["dimensions"]
    turned = lambda axis, k: plus(x.shape[axis] - 1, times(k, -1)) if axis in axes else k
    return [lambda i: x.at([turned(axis, k) for axis, k in enumerate(i)])]


def _slice(text: Text, params: Any, given: list[Value], out: Sequence[Any]) -> Found:
    x, starts = given[0], params["start_indices"]
    strides = params["strides"] or (1,) * len(starts)
    return [lambda i: x.at([plus(times(k, n), first) for k, n, first in zip(i, strides, starts)])]


def _dynamic_slice(text: Text, params: Any, given: list[Value], out: Sequence[Any]) -> Found:
    x, starts = given[0], given[1:]
    spare = [n - size for n, size in zip(x.shape, params["slice_sizes"])]
    return [lambda i: x.at([plus(text.start(first, (), most), k) for k, first, most in zip(i, starts, spare)])]


def _gather(text: Text, params: Any, given: list[Value], out: Sequence[Any]) -> Found:
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
            place[axis] = plus(text.start(indices, (*batch, k), spare[axis]), place[axis])
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
    return np.nan if kind_of(dtype) == "f" else limits(dtype)[0 if kind_of(dtype) == "i" else 1]


def _joined(text: Text, dtype: str, k: Any, parts: Sequence[tuple[int, Callable[[Any], str]]]) -> str:
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


def _concatenate(text: Text, params: Any, given: list[Value], out: Sequence[Any]) -> Found:
    axis = params["dimension"]
    part = lambda x, i: (x.shape[axis], lambda k: x.at([*i[:axis], k, *i[axis + 1 :]]))
    return [lambda i: _joined(text, given[0].dtype, i[axis], [part(x, i) for x in given])]


def _stack(text: Text, params: Any, given: list[Value], out: Sequence[Any]) -> Found:
    axis = params["axis"] % len(out[0].shape)
    part = lambda x, i: (1, lambda k: x.at([*i[:axis], *i[axis + 1 :]]))
    return [lambda i: _joined(text, given[0].dtype, i[axis], [part(x, i) for x in given])]


def _unstack(text: Text, params: Any, given: list[Value], out: Sequence[Any]) -> Found:
    (x,), axis = given, params["axis"] % len(given[0].shape)
    part = lambda k: lambda i: x.at([*i[:axis], k, *i[axis:]])
    return [part(k) for k in range(len(out))]


def _pad(text: Text, params: Any, given: list[Value], out: Sequence[Any]) -> Found:
    x, padding = given

    def at(i: Index) -> str:
        if not all(isinstance(k, int) for k in i):
            raise text.refused("Metal has no primitive pad whose result is read at a computed index")
        steps = [divmod(k - low, inner + 1) for k, (low, _, inner) in zip(i, params["padding_config"])]
        within = all(rest == 0 and 0 <= k < n for (k, rest), n in zip(steps, x.shape))
        return x.at([k for k, _ in steps]) if within else padding.at(())

    return [at]


def _split(text: Text, params: Any, given: list[Value], out: Sequence[Any]) -> Found:
    (x,), axis = given, params["axis"]
    starts = [0, *itertools.accumulate(params["sizes"])]
    part = lambda first: lambda i: x.at([plus(k, first) if a == axis else k for a, k in enumerate(i)])
    return [part(first) for first in starts[:-1]]


def _iota(text: Text, params: Any, given: list[Value], out: Sequence[Any]) -> Found:
    dtype = np.dtype(params["dtype"])

    def at(i: Index) -> str:
        k = i[params["dimension"]]
        return text.constant(np.asarray(k, dtype)).at(()) if isinstance(k, int) else cast(k, "int32", dtype.name)

    return [at]


def _reduction(name: str, none: Callable[[str], Any]) -> Callable[..., Found]:
    def rule(text: Text, params: Any, given: list[Value], out: Sequence[Any]) -> Found:
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


def _dot_general(text: Text, params: Any, given: list[Value], out: Sequence[Any]) -> Found:
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
            return text.named(dtype, cast(name, x.dtype, dtype))

        terms = []
        for k in itertools.product(*map(range, sizes)):
            x = read(a, dict(zip((*batch_a, *own_a, *over_a), (*batch, *rows, *k))))
            y = read(b, dict(zip((*batch_b, *own_b, *over_b), (*batch, *columns, *k))))
            terms.append(text.binary("mul", dtype, x, y))
        return text.folded("add", dtype, terms, 0)

    return [at]


def _cond(text: Text, params: Any, given: list[Value], out: Sequence[Any]) -> Found:
    which, others = given[0], given[1:]
    branches = [text.jaxpr(x, others) for x in params["branches"]]

    def chosen(cases: Sequence[Value]) -> Callable[[Index], str]:
        dtypes = [which.dtype, *(x.dtype for x in cases)]
        return lambda i: select(text, {}, [which.at(()), *(x.at(i) for x in cases)], dtypes)

    return [chosen(cases) for cases in zip(*branches)]


SHAPED: dict[str, Callable[..., Found]] = {
    "broadcast_in_dim": _broadcast,
    **dict.fromkeys(("reshape", "squeeze", "expand_dims"), _reshape),
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
    "reduce_max": _reduction("max", lambda dtype: limits(dtype)[0]),
    "reduce_min": _reduction("min", lambda dtype: limits(dtype)[1]),
    "reduce_and": _reduction("and", lambda dtype: -1 if kind_of(dtype) == "i" else limits(dtype)[1]),
    "reduce_or": _reduction("or", lambda dtype: 0),
    "reduce_xor": _reduction("xor", lambda dtype: 0),
}
