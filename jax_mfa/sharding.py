"""Attention under `jit` of sharded arrays: batch entries, heads and lengths stay where they are.

XLA would gather every operand of a custom call, and of a loop over batch entries and heads as well. Here each device
computes the batch entries and heads that it holds of the query; gradients of what serves several devices are summed
over them. Where the query is split along its length, keys and values are so too and travel from device to device
(`context_parallel.ring`). Head sizes are not split.

Explicit sharding (`jax.set_mesh` with explicit axes) is left to the same rules, and the results have the query's axes.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import math
import warnings
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_mfa import compat
from jax_mfa.context_parallel import ring as rings
from jax_mfa.context_parallel.ring import TRAVELLING, Ring
from jax_mfa.problem import AXES, Operands, Specification, counted_from, is_part, pool_fields

_HEAD_AXIS = {name: i for name, letters in AXES.items() for i, x in enumerate(letters) if x in "NK"}
# of tokens, of queries but where an array is of keys
_TOKEN_AXIS = {name: min(map(x.find, tokens)) for name, x in AXES.items() if (tokens := {*"TtS"} & {*x})}
_OF_KEYS = tuple(name for name, letters in AXES.items() if "K" in letters)


@dataclasses.dataclass(frozen=True)
class _Arrays:
    """The arrays of a call: the shape of each, and how often its entries repeat."""

    shapes: dict[str, tuple[int, ...]]
    spec: Specification

    @property
    def batch(self) -> int:
        return self.shapes["query"][0]

    def span(self, name: str) -> int:
        """How many batch entries an array's entries serve before they recur."""
        return self.shapes[name][0] * getattr(Operands(*self.spec.repeats), name, 1)

    def split_axes(self, name: str) -> dict[str, int]:
        """Which axes of an array hold "batch", "heads" and "length" in shares; where none does, it serves every share.

        Of bias and masks the keys are not split.
        """
        shape, axes = self.shapes[name], {}
        if shape[0] > 1 and self.span(name) == self.batch and name not in pool_fields(self.shapes):
            axes["batch"] = 0
        if name in _HEAD_AXIS and shape[_HEAD_AXIS[name]] > 1:
            axes["heads"] = _HEAD_AXIS[name]
        if name in _TOKEN_AXIS and (shape[_TOKEN_AXIS[name]] > 1 or name in TRAVELLING):
            axes["length"] = _TOKEN_AXIS[name]
        return axes

    def batch_splits(self, parts: int) -> bool:
        def fits(name: str) -> bool:
            entries, share = self.shapes[name][0], self.batch // parts
            if "batch" in self.split_axes(name):
                return entries % parts == 0
            return entries == 1 or share % self.span(name) == 0

        with_entries = {*self.shapes} - {*pool_fields(self.shapes)}
        return self.batch % parts == 0 and all(fits(name) for name in with_entries)

    def heads_split(self, parts: int) -> bool:
        with_heads = [name for name in self.shapes if "heads" in self.split_axes(name)]
        return "query" in with_heads and all(self.shapes[name][_HEAD_AXIS[name]] % parts == 0 for name in with_heads)

    def length_splits(self, parts: int) -> bool:
        stored = any(is_part(name) for name in self.shapes) or pool_fields(self.shapes)
        if stored or "origin" in self.shapes or self.spec.value_size is not None:
            return False  # what is stored otherwise does not travel, nor do functions of positions, or values in keys
        t, s = self.shapes["query"][1], self.shapes["key"][1]
        rows, columns = self.spec.mask_block or (1, 1)
        return parts > 1 and t % (parts * rows) == 0 and s % (parts * columns) == 0 and min(t, s) > 0

    def divide(self, mesh: Mesh, sharding: NamedSharding | None) -> _Division:
        """Over the mesh axes that split the query's batch entries and heads, as far as all arrays follow."""
        spec = () if sharding is None else sharding.spec

        def axes(i: int, splits: Callable[[int], bool]) -> tuple[str, ...]:
            entry = spec[i] if i < len(spec) else None
            found = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
            return found if found and splits(math.prod(mesh.shape[x] for x in found)) else ()

        length = axes(1, self.length_splits)
        if not length and math.prod(mesh.shape[x] for x in axes(1, lambda parts: True)) > 1:
            _say_that_it_gathers(self.shapes["query"][1], self.shapes["key"][1], self.spec.mask_block)
        batch, heads = axes(0, self.batch_splits), axes(2, self.heads_split)
        return _Division(self, mesh, {"batch": batch, "heads": heads, "length": length})

    def rule(self, names: tuple[str, ...], results: Any) -> tuple[str, dict[str, int]]:
        """What Shardy needs to know: batch entries and heads of operands and results are the same ones."""
        n, k = self.shapes["query"][2], self.shapes["key"][2]
        own = (f"x{i}" for i in itertools.count())
        grouped = 1 < k < n
        # queries and keys are split alike: into parts of a number that divides both lengths
        t, s = self.shapes["query"][1], self.shapes["key"][1]
        parts = math.gcd(t, s) if self.length_splits(math.gcd(t, s)) else 1
        tokens = {True: (s // parts, "s"), False: (t // parts, "t")}

        def factors(name: str) -> str:
            found, axes = [next(own) for _ in self.shapes[name]], self.split_axes(name)
            if "batch" in axes and self.shapes[name][0] == self.batch:
                found[0] = "b"
            if parts > 1 and "length" in axes and name != "block_mask":
                size, letter = tokens[name in TRAVELLING]
                found[axes["length"]] = f"(p {letter})" if size > 1 else "p"
            if "heads" in axes:
                found[axes["heads"]] = "k" if name in _OF_KEYS or k == n else "(k g)" if grouped else "g"
            return " ".join(found)

        listed = lambda names: ", ".join(factors(name) for name in names)
        sizes = {"g": n // k} if grouped else {}
        whole = [(size, letter) for size, letter in tokens.values() if size > 1] if parts > 1 else []
        sizes |= {letter: size for size, letter in whole} | ({"p": parts} if len(whole) == 2 else {})
        return f"{listed(names)} -> {listed(results)}", sizes


@dataclasses.dataclass(frozen=True)
class _Division:
    """Which mesh axes split "batch", "heads" and "length" of the arrays."""

    arrays: _Arrays
    mesh: Mesh
    axes: dict[str, tuple[str, ...]]

    def sharding(self, name: str) -> NamedSharding:
        entries: list[Any] = [None] * len(self.arrays.shapes[name])
        for kind, axis in self.arrays.split_axes(name).items():
            entries[axis] = self.axes[kind] or None
        return NamedSharding(self.mesh, PartitionSpec(*entries))

    def numbered(self, names: tuple[str, ...], arrays: Any) -> tuple[Any, ...]:
        """A device's arrays, with the number of its first head among all where something depends on it."""
        if not self.axes["heads"]:
            return arrays
        own = dict(zip(names, arrays))
        first = lax.axis_index(self.axes["heads"]) * own["query"].shape[_HEAD_AXIS["query"]]
        if "dropout" in own:
            own["dropout"] = counted_from(own["dropout"], head=first)
        if "origin" in own:
            own["origin"] = own["origin"].at[:, 1].add(first)
        return tuple(own.values())

    def shared(self, name: str) -> tuple[str, ...]:
        """The mesh axes over whose devices an array is the same, though their work differs."""
        split = self.arrays.split_axes(name)
        return tuple(axis for kind, axes in self.axes.items() if kind not in split for axis in axes)

    def over_ring(self, fun: Callable[..., Any], names: tuple[str, ...], results: Any) -> Callable[..., Any]:
        """`fun` of a device's arrays, with the keys of the other devices along the length."""
        length = self.axes["length"]
        ring = Ring(self.arrays.spec, length, math.prod(self.mesh.shape[x] for x in length))

        def run(*arrays: Array) -> tuple[Any, ...]:
            known = dict(zip(names, arrays))
            operands = Operands(**{name: x for name, x in known.items() if name in Operands._fields})
            if "d_out" not in known:
                return rings.forward(ring, operands, fun)
            rows = tuple(known[name] for name in names if name not in Operands._fields)
            return rings.backward(ring, operands, rows[:3], results, rows[3:], fun)

        return run


@functools.cache
def _say_that_it_gathers(t: int, s: int, mask_block: tuple[int, int] | None) -> None:
    """Once for each length."""
    blocks = "" if mask_block is None else f" in blocks of {list(mask_block)}"
    warnings.warn(
        f"a query that is sharded along its length is gathered for attention: T = {t} and S = {s}{blocks} do not both "
        "divide into as many parts. Pad them, or see jax_mfa.ring_attention",
        stacklevel=2,
    )


def _repeated_heads(query: Any, key: Any, mesh: Any) -> int:
    """How often key heads are repeated, that any axis of a mesh which splits the query's heads splits them too.

    Shardy would else split an axis of the mesh in two, which a custom partitioning cannot say.
    """
    n, k = query.shape[2], key.shape[2]
    return math.lcm(k, *(size for size in mesh.shape.values() if n % size == 0)) // k if 1 < k < n else 1


def _fold_heads(x: Array, times: int) -> Array:
    """A gradient of repeated heads: those of a head's repetitions, summed."""
    parts = x.reshape(*x.shape[:2], -1, times, *x.shape[3:])
    return parts.astype(np.promote_types(x.dtype, np.float32)).sum(3).astype(x.dtype)


def partitioned(
    fun: Callable[..., Any],
    pair: Callable[..., Any],
    spec: Specification,
    names: tuple[str, ...],
    results: tuple[str, ...],
    mesh: Any,
) -> Callable[..., Any]:
    """`fun`, computed by each device for its own batch entries and heads, and rows of a query that is split along them.

    `names` says what each array is, a field of `Operands`, out, row_max, row_sum, d_out or d_lse, and `results` the
    same of each result, where one named like an operand is its gradient. `pair` does the same for some rows and some
    columns, as `attend` of `ring.forward` or `transpose` of `ring.backward`.
    """

    def shaped(arrays: Any, found: Any) -> _Arrays:
        shapes = [tuple(x.shape) for x in (*arrays, *found)]
        return _Arrays(dict(zip((*names, *results), shapes)), spec)

    def divide(mesh: Any, arrays: Any, found: Any) -> _Division:
        return shaped(arrays, found).divide(mesh, arrays[names.index("query")].sharding)

    def partition(mesh: Any, arrays: Any, found: Any) -> tuple[Any, Any, tuple[Any, ...], tuple[Any, ...]]:
        division = divide(mesh, arrays, found)

        def own_share(*arrays: Array) -> tuple[Any, ...]:
            with compat.no_mesh():
                run = division.over_ring(pair, names, results) if division.axes["length"] else fun
                parts = zip(results, run(*division.numbered(names, arrays)))
                return tuple(lax.psum(x, division.shared(name)) if division.shared(name) else x for name, x in parts)

        shardings = lambda names: tuple(division.sharding(name) for name in names)
        return mesh, own_share, shardings(results), shardings(names)

    def infer(mesh: Any, arrays: Any, found: Any) -> tuple[Any, ...]:
        division = divide(mesh, arrays, found)
        return tuple(division.sharding(name) for name in results)

    def rule(mesh: Any, arrays: Any, found: Any) -> tuple[str, dict[str, int]]:
        return shaped(arrays, found).rule(names, results)

    whole = custom_partitioning(fun)
    shardy = "sharding_rule" in inspect.signature(whole.def_partition).parameters
    whole.def_partition(partition, infer, **({"sharding_rule": rule} if shardy else {}))

    def run(*arrays: Array) -> tuple[Any, ...]:
        known = dict(zip(names, arrays))
        times = _repeated_heads(known["query"], known["key"], mesh)
        if times == 1:
            return whole(*arrays)
        repeat = lambda name, x: jnp.repeat(x, times, axis=2) if name in _OF_KEYS and x.shape[2] > 1 else x
        parts = whole(*(repeat(name, x) for name, x in known.items()))
        return tuple(_fold_heads(x, times) if name in _OF_KEYS else x for name, x in zip(results, parts))

    return run


def automatically(run: Callable[..., Any], arguments: dict[str, Any], with_lse: bool) -> Any:
    """`run(arguments)`, and where sharding is explicit, with sharding left to the compiler inside.

    The output is then sharded like the query but for its last axis, and replicated where the query has no sharding;
    with `with_lse`, the second result likewise.
    """

    def results() -> Any:
        rows = PartitionSpec(*compat.spec_of(arguments["query"])[:-1])
        out = PartitionSpec(*rows, None)
        return (out, rows) if with_lse else out

    return compat.without_types(run, arguments, results)
