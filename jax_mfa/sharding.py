"""Attention under `jit` of sharded arrays: batch rows and heads stay where they are, and nothing is gathered.

XLA would gather every operand of a custom call, and of a loop over batch rows and heads as well. Here each device
computes the batch rows and heads that it holds of the query; gradients of what serves several devices are summed over
them. Lengths and head sizes are not split.

Explicit sharding (`jax.set_mesh` with explicit axes) is left to the same rules, and the results have the query's axes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_mfa.specification import Operands, Specification
from jax_mfa.storage import is_part, pool_fields

# the axis of heads, where an array has one; batch rows are always the first
_OF_KEYS = tuple(name for name in Operands._fields if name in ("key", "value") or is_part(name))
_HEAD_AXIS = {
    **dict.fromkeys(("query", *_OF_KEYS, "out", "row_max", "row_sum", "d_out", "d_lse"), 2),
    **dict.fromkeys(("bias", "mask", "block_mask", "alibi_slopes", "sinks"), 1),
}


@dataclasses.dataclass(frozen=True)
class _Problem:
    """The arrays of a call: the shape of each, and how often its rows repeat."""

    shapes: dict[str, tuple[int, ...]]
    repeats: Operands

    @property
    def batch(self) -> int:
        return self.shapes["query"][0]

    def span(self, name: str) -> int:
        """How many batch rows an array's rows serve before they recur."""
        return self.shapes[name][0] * getattr(self.repeats, name, 1)

    def has_rows(self, name: str) -> bool:
        """Whether an array has rows of its own for each share of the batch; else it serves every share alike."""
        return self.shapes[name][0] > 1 and self.span(name) == self.batch and name not in pool_fields(self.shapes)

    def has_heads(self, name: str) -> bool:
        return name in _HEAD_AXIS and self.shapes[name][_HEAD_AXIS[name]] > 1

    def batch_splits(self, parts: int) -> bool:
        def fits(name):
            rows, share = self.shapes[name][0], self.batch // parts
            return rows % parts == 0 if self.has_rows(name) else rows == 1 or share % self.span(name) == 0

        with_rows = {*self.shapes} - {*pool_fields(self.shapes)}
        return self.batch % parts == 0 and all(fits(name) for name in with_rows)

    def heads_split(self, parts: int) -> bool:
        heads = [shape[_HEAD_AXIS[name]] for name, shape in self.shapes.items() if self.has_heads(name)]
        return self.has_heads("query") and all(n % parts == 0 for n in heads)

    def divide(self, mesh: Mesh, sharding: NamedSharding | None) -> _Division:
        """Over the mesh axes that split the query's batch rows and heads, as far as all arrays follow."""
        spec = () if sharding is None else sharding.spec

        def axes(i: int, splits: Callable[[int], bool]) -> tuple[str, ...]:
            entry = spec[i] if i < len(spec) else None
            found = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
            return found if found and splits(math.prod(mesh.shape[x] for x in found)) else ()

        return _Division(self, mesh, axes(0, self.batch_splits), axes(2, self.heads_split))

    def rule(self, names, results) -> tuple[str, dict[str, int]]:
        """What Shardy needs to know: batch rows and heads of operands and results are the same ones."""
        n, k = self.shapes["query"][2], self.shapes["key"][2]
        own = (f"x{i}" for i in itertools.count())
        grouped = 1 < k < n

        def factors(name):
            found = [next(own) for _ in self.shapes[name]]
            if self.has_rows(name) and self.shapes[name][0] == self.batch:
                found[0] = "b"
            if self.has_heads(name):
                found[_HEAD_AXIS[name]] = "k" if name in _OF_KEYS or k == n else "(k g)" if grouped else "g"
            return " ".join(found)

        listed = lambda names: ", ".join(factors(name) for name in names)
        sizes = {"g": n // k} if grouped else {}
        return f"{listed(names)} -> {listed(results)}", sizes


@dataclasses.dataclass(frozen=True)
class _Division:
    """Which mesh axes split batch rows, and which heads."""

    problem: _Problem
    mesh: Mesh
    batch: tuple[str, ...]
    heads: tuple[str, ...]

    def sharding(self, name: str) -> NamedSharding:
        entries: list = [None] * len(self.problem.shapes[name])
        if self.batch and self.problem.has_rows(name):
            entries[0] = self.batch
        if self.heads and self.problem.has_heads(name):
            entries[_HEAD_AXIS[name]] = self.heads
        return NamedSharding(self.mesh, PartitionSpec(*entries))

    def numbered(self, names, arrays):
        """A device's arrays, with the number of its first head among all where random bits depend on it."""
        if not self.heads or "dropout" not in names:
            return arrays
        own = dict(zip(names, arrays))
        first = lax.axis_index(self.heads) * own["query"].shape[_HEAD_AXIS["query"]]
        own["dropout"] = own["dropout"].at[:, 3].add(first.astype(own["dropout"].dtype))
        return tuple(own.values())

    def shared(self, name: str) -> tuple[str, ...]:
        """The mesh axes over whose devices an array is the same, though their work differs."""
        rows = () if self.problem.has_rows(name) else self.batch
        return (*rows, *(() if self.problem.has_heads(name) else self.heads))


def partitioned(fun: Callable, spec: Specification, names: tuple[str, ...], results: tuple[str, ...]) -> Callable:
    """`fun`, computed by each device for its own batch rows and heads.

    Args:
      fun: takes arrays and returns a tuple of arrays; of their batch rows and heads any share may come.
      names: what each array is: a field of `Operands`, out, row_max, row_sum, d_out or d_lse.
      results: the same of each result; one named like an operand is its gradient.
    """

    def problem(arrays, found) -> _Problem:
        shapes = [tuple(x.shape) for x in (*arrays, *found)]
        return _Problem(dict(zip((*names, *results), shapes)), Operands(*spec.repeats))

    def divide(mesh, arrays, found) -> _Division:
        return problem(arrays, found).divide(mesh, arrays[names.index("query")].sharding)

    def partition(mesh, arrays, found):
        division = divide(mesh, arrays, found)

        def own_share(*arrays):
            with _no_mesh():
                parts = zip(results, fun(*division.numbered(names, arrays)))
                return tuple(lax.psum(x, division.shared(name)) if division.shared(name) else x for name, x in parts)

        shardings = lambda names: tuple(division.sharding(name) for name in names)
        return mesh, own_share, shardings(results), shardings(names)

    def infer(mesh, arrays, found):
        division = divide(mesh, arrays, found)
        return tuple(division.sharding(name) for name in results)

    def rule(mesh, arrays, found):
        return problem(arrays, found).rule(names, results)

    whole = custom_partitioning(fun)
    shardy = "sharding_rule" in inspect.signature(whole.def_partition).parameters
    whole.def_partition(partition, infer, **({"sharding_rule": rule} if shardy else {}))
    return whole


def automatically(run: Callable, arguments: dict, with_lse: bool):
    """`run(arguments)`, and where sharding is explicit, with sharding left to the compiler inside.

    The output is then sharded like the query but for its last axis, and replicated where the query has no sharding;
    with `with_lse`, the second result likewise.
    """
    if not _mesh_is_explicit() and all(_explicit_spec(x) is None for x in jax.tree.leaves(arguments)):
        return run(arguments)
    spec = _explicit_spec(arguments["query"]) or PartitionSpec()
    placed = {n: x for n, x in arguments.items() if any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(x))}
    rows = PartitionSpec(*spec[:-1])
    out = PartitionSpec(*rows, None)
    inside = jax.sharding.auto_axes(
        lambda placed: run({**arguments, **placed}), out_sharding=(out, rows) if with_lse else out
    )
    return inside(placed)


def _no_mesh():
    """A device's own share is not sharded any further, whatever mesh the caller has set."""
    if hasattr(jax.sharding, "use_abstract_mesh"):
        return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))
    return contextlib.nullcontext()


def _is_explicit(mesh) -> bool:
    return any("Explicit" in str(kind) for kind in getattr(mesh, "axis_types", None) or ())


def _mesh_is_explicit() -> bool:
    """Whether the mesh that the caller has set makes the sharding of every array explicit."""
    return hasattr(jax.sharding, "auto_axes") and _is_explicit(jax.sharding.get_abstract_mesh())


def _explicit_spec(x) -> PartitionSpec | None:
    if not isinstance(x, jax.Array) or not hasattr(jax.sharding, "auto_axes"):
        return None
    sharding: Any = getattr(jax.typeof(x), "sharding", None)
    if not _is_explicit(getattr(sharding, "mesh", None)):
        return None
    return PartitionSpec(*sharding.spec, *(None,) * (x.ndim - len(sharding.spec)))
