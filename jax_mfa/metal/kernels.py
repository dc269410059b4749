"""Launch plans of attention: a specification and shapes in, `Plan` out. Plain Python; needs no device.

What each kernel computes is written at its head, in `metal/`. The struct `Parameters` there and `_parameters` here
must agree.
"""

from __future__ import annotations

import functools
import math
import struct

from jax_mfa.metal import source, tiles
from jax_mfa.metal.plan import ITEM_SIZES, SCALARS, Argument, Buffer, Dispatch, Kernel, Plan
from jax_mfa.specification import MAX_POSITION, Operands, Specification

LOG2_E = math.log2(math.e)
ROW_SUM_SIMDGROUPS = 8
_SHORT = {"float16": "f16", "bfloat16": "bf16", "float32": "f32"}


def _band(spec: Specification) -> tuple[int | None, int | None]:
    """How many columns left and right of its position a row sees; None for no limit."""
    left, right = spec.window
    if spec.is_causal:
        right = 0 if right is None else min(right, 0)
    return left, right


class Shapes:
    """The sizes of a problem, from its query, key and value."""

    def __init__(self, query, key, value):
        self.batch, self.t, self.n, self.h = query.shape
        self.s, self.k, self.v = value.shape[1:]
        self.key_rows, self.value_rows = key.shape[0], value.shape[0]
        self.dtype = query.dtype.name

    def like_query(self, name: str, role: str) -> Buffer:
        return Buffer(name, role, self.dtype, (self.batch, self.t, self.n, self.h))

    def like_out(self, name: str, role: str) -> Buffer:
        return Buffer(name, role, self.dtype, (self.batch, self.t, self.n, self.v))

    def rows(self, name: str, role: str) -> Buffer:
        return Buffer(name, role, "float32", (self.batch, self.t, self.n))

    def inputs(self, limits: bool) -> tuple[Buffer, ...]:
        """Query, key, value and, where rows differ, their limits."""
        result = (
            self.like_query("query", "input"),
            Buffer("key", "input", self.dtype, (self.key_rows, self.s, self.k, self.h)),
            Buffer("value", "input", self.dtype, (self.value_rows, self.s, self.k, self.v)),
        )
        return result + ((Buffer("limits", "input", "int32", (self.batch, 3)),) if limits else ())


def _parameters(spec: Specification, x: Shapes, limits: bool) -> bytes:
    left, right = _band(spec)
    repeats = Operands(*spec.repeats)
    return struct.pack(
        "<11i2f",
        x.t,
        x.s,
        x.n,
        x.k,
        min(left or 0, 2 * MAX_POSITION),
        min(right or 0, 2 * MAX_POSITION),
        3 if limits else 0,
        x.key_rows,
        repeats.key,
        x.value_rows,
        repeats.value,
        spec.scale,
        spec.scale * LOG2_E,
    )


def _constants(spec: Specification):
    left, right = _band(spec)
    return ((0, "has_left", "bool", left is not None), (1, "has_right", "bool", right is not None))


def _kernel(name: str, spec: Specification, x: Shapes, threads: int, tile) -> Kernel:
    arguments = tuple(vars(tile).values())
    item = ITEM_SIZES[x.dtype]
    short = "_".join(str(int(a)) for a in arguments)
    return Kernel(
        f"{name}_{_SHORT[x.dtype]}_h{x.h}_v{x.v}_{short}",
        (name, SCALARS[x.dtype], x.h, x.v, *arguments),
        _constants(spec),
        threads,
        tile.threadgroup_memory(x.h, x.v, item),
        tile.fragment_bytes(x.h, x.v, item),
    )


def _arguments(*buffers: str | bytes) -> tuple[Argument, ...]:
    return tuple(
        Argument(i, bytes=b) if isinstance(b, bytes) else Argument(i, buffer=b) for i, b in enumerate(buffers)
    )


def _limits(spec: Specification, x: Shapes, limits: bool) -> str | bytes:
    """The buffer of limits, or one row for all."""
    return "limits" if limits else struct.pack("<3i", spec.query_offset, x.t, x.s)


@functools.lru_cache(maxsize=1024)
def _forward(spec: Specification, x_key, limits: bool, variant: str) -> Plan:
    x = Shapes(*x_key)
    tile = tiles.select(variant, x.h, x.v, ITEM_SIZES[x.dtype]).forward
    return Plan(
        "attention_forward",
        source.base_hash(),
        (*x.inputs(limits), x.like_out("out", "output"), x.rows("statistic", "output")),
        (
            Dispatch(
                _kernel("attention_forward", spec, x, tile.simdgroups * 32, tile),
                (-(-x.t // tile.rows), x.n, x.batch),
                _arguments(
                    "query", "key", "value", _limits(spec, x, limits), "out", "statistic", _parameters(spec, x, limits)
                ),
            ),
        ),
    )


@functools.lru_cache(maxsize=1024)
def _backward(spec: Specification, x_key, limits: bool, wanted: tuple[str, ...], variant: str) -> Plan:
    x = Shapes(*x_key)
    item = ITEM_SIZES[x.dtype]
    chosen = tiles.select(variant, x.h, x.v, item)
    parameters = _parameters(spec, x, limits)
    of_rows = _limits(spec, x, limits)
    sums = Kernel(
        f"attention_row_sums_{_SHORT[x.dtype]}_v{x.v}",
        ("attention_row_sums", SCALARS[x.dtype], x.v, ROW_SUM_SIMDGROUPS),
        (),
        ROW_SUM_SIMDGROUPS * 32,
    )
    common = ("query", "key", "value", of_rows, "d_out", "statistic", "row_sums")
    results = [x.rows("row_sums", "scratch")]
    dispatches = [
        Dispatch(
            sums,
            (-(-x.t * x.n // ROW_SUM_SIMDGROUPS), 1, x.batch),
            _arguments("out", "d_out", "statistic", "d_statistic", "row_sums", parameters),
        )
    ]
    if "query" in wanted:
        tile = chosen.d_query
        results.append(x.like_query("d_query", "output"))
        dispatches.append(
            Dispatch(
                _kernel("attention_d_query", spec, x, tile.simdgroups * 32, tile),
                (-(-x.t // tile.rows), x.n, x.batch),
                _arguments(*common, "d_query", parameters),
            )
        )
    if "key" in wanted or "value" in wanted:
        pair = chosen.d_key_value
        results += [
            Buffer("d_key", "output", x.dtype, (x.batch, x.s, x.k, x.h)),
            Buffer("d_value", "output", x.dtype, (x.batch, x.s, x.k, x.v)),
        ]
        dispatches.append(
            Dispatch(
                _kernel("attention_d_key_value", spec, x, pair.pairs * 64, pair),
                (-(-x.s // pair.rows), x.k, x.batch),
                _arguments(*common, "d_key", "d_value", parameters),
            )
        )
    return Plan(
        "attention_backward",
        source.base_hash(),
        (
            *x.inputs(limits),
            x.like_out("out", "input"),
            x.rows("statistic", "input"),
            x.like_out("d_out", "input"),
            x.rows("d_statistic", "input"),
            *results,
        ),
        tuple(dispatches),
    )


class _Shape:
    """Shape and dtype of an array, hashable; stands for it in a plan's cache key."""

    def __init__(self, x):
        self.shape, self.dtype = tuple(x.shape), x.dtype

    def __eq__(self, other):
        return (self.shape, self.dtype) == (other.shape, other.dtype)

    def __hash__(self):
        return hash((self.shape, self.dtype))


def _key(query, key, value):
    return _Shape(query), _Shape(key), _Shape(value)


def forward(spec: Specification, query, key, value, *, limits: bool = False, variant: str = "staged") -> Plan:
    """The plan of the forward pass.

    Args:
      query, key, value: arrays or shapes, [B, T, N, H], [rows, S, K, H], [rows, S, K, V].
      limits: whether batch rows differ in offset or lengths; they then come as an int32 [B, 3].
      variant: a key of `tiles.VARIANTS`.
    """
    return _forward(spec, _key(query, key, value), limits, variant)


def backward(
    spec: Specification,
    query,
    key,
    value,
    *,
    wanted: tuple[str, ...] = ("query", "key", "value"),
    limits: bool = False,
    variant: str = "staged",
) -> Plan:
    """The plan of the backward pass for the gradients in `wanted`; arguments as of `forward`.

    Its inputs are those of the forward pass, then out, statistic, d_out, d_statistic.
    """
    return _backward(spec, _key(query, key, value), limits, wanted, variant)
