"""Launch plans of attention: a specification and arrays or their shapes in, `Plan` out. Plain Python; needs no device.

Which kernels a pass takes, in which order, and what it leaves.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from jax_mfa.metal import kernels, source, tiles
from jax_mfa.metal.functions import Rules
from jax_mfa.metal.plan import ITEM_SIZES, Buffer, Plan
from jax_mfa.metal.problem import LaunchProblem
from jax_mfa.problem import Specification, Storage

Variant = str | tiles.Split | tiles.Tiles
Decoder = tiles.DecodeTiles | tiles.DecodeRows


def _plan(name: str, x: LaunchProblem, buffers: Sequence[Buffer], launches: Sequence[kernels.Launch]) -> Plan:
    dispatches = tuple(dispatch for launch in launches for dispatch in launch.dispatches)
    scratch = (buffer for launch in launches for buffer in launch.scratch)
    text = source.digest_for(dispatch.kernel for dispatch in dispatches)
    return Plan(f"attention_{name}", text, (*x.inputs, *buffers, *scratch), dispatches)


@functools.lru_cache(maxsize=1024)
def _forward(x: LaunchProblem, chosen: tiles.Tiles) -> Plan:
    return _plan("forward", x, x.results("output"), [kernels.Launches(x, chosen).forward()])


@functools.lru_cache(maxsize=1024)
def _decode(x: LaunchProblem, tile: Decoder, split_keys: int) -> Plan:
    return _plan("decode", x, x.results("output"), kernels.decode(x, tile, split_keys))


@functools.lru_cache(maxsize=1024)
def _backward(x: LaunchProblem, wrt: tuple[str, ...], chosen: tiles.Tiles) -> Plan:
    all_of = kernels.Launches(x, chosen)
    buffers = [*x.results("input"), x.rows("d_out", "input", x.v, dtype=x.dtype), x.rows("d_lse", "input")]
    launches: list[kernels.Launch] = []

    def add(launch: kernels.Launch, *results: Buffer) -> None:
        buffers.extend(results)
        launches.append(launch)

    add(all_of.delta(), x.rows("row_states", "output" if "sinks" in wrt else "scratch", 4))
    d_bias = [Buffer("d_bias", "output", x.by_name["bias"].dtype.name, x.shape("bias"))] if "bias" in wrt else []
    sums = [x.rows("score_sums", "output", 2)] if "scale" in wrt or "alibi_slopes" in wrt else []
    if "query" in wrt or sums:
        # a bias that broadcasts nothing has all of dS for its gradient
        beside, d_bias = (d_bias, []) if x.shape("bias") == (x.b, x.n, x.t, x.s) else ([], d_bias)
        d_query = x.rows("d_query", "output", x.h, dtype=x.dtype)
        add(all_of.d_query(wants_sums=bool(sums), wants_bias=bool(beside)), d_query, *sums, *beside)
    if "key" in wrt or "value" in wrt:
        columns = lambda name, size: Buffer(name, "output", x.dtype, (x.b, x.s, x.k, size))
        add(all_of.d_key_value(), columns("d_key", x.h), columns("d_value", x.v))
    if "captured_floats" in wrt and x.rules.reads:
        add(*all_of.d_captured())
    if d_bias:
        add(all_of.d_bias(), *d_bias)
    return _plan("backward", x, buffers, launches)


def _select(variant: str | tiles.Tiles, x: LaunchProblem) -> tiles.Tiles:
    if not isinstance(variant, str):
        return variant
    # what is decoded is decoded once for all simdgroups
    chosen = "staged" if variant == "direct" and not x.spec.is_plain else variant
    return tiles.select(chosen, x.h, x.v, ITEM_SIZES[x.operand])


def _has_units(storage: Storage | None, size: int) -> bool:
    """Whether elements become operands without being decoded: as `Spans` of `metal/core/scaled.h`."""
    if storage is None or storage.scheme.center:
        return False
    channels = storage.scheme.channels or size
    span = min(channels, size)
    return size % 32 == span % 32 == size % span == channels % span == 0


def decoding(x: LaunchProblem) -> tuple[LaunchProblem, Decoder] | None:
    """A forward pass of few queries against many keys, as its kernel takes it, and the tile; None of any other, and
    where registers do not suffice."""
    if x.t > tiles.DECODE_QUERIES or x.s < tiles.DECODE_KEYS or x.spec.dropout_rate:
        return None
    wide = dataclasses.replace(x, decoded=True)  # alike on all chips: what waits for memory has time to decode
    key, value = x.spec.key_storage, x.spec.value_storage if x.spec.value_size is None else x.spec.key_storage
    bits_of = lambda storage: (4 if storage.scheme.kind == "int4" else 8) if storage else 0
    halves = x.dtype != "float32" and _has_units(key, x.h) and _has_units(value, x.v)
    operand = "float16" if halves else wide.operand
    bits = bits_of(key), bits_of(value)
    tile = tiles.decode(x.n // x.k * x.t, x.h, x.v, ITEM_SIZES[operand], bits, paired=halves)
    return None if tile is None else (wide, tile)


def splits(x: LaunchProblem, tile: Decoder) -> list[int]:
    """Columns of a split that decoding may take, the usual ones first."""
    groups = x.b * x.k * -(-(x.n // x.k * x.t) // tile.rows) * tile.slices
    return tiles.splits(x.s, tile.keys, max(groups, 1))


def forward(
    spec: Specification, arrays: Mapping[str, Any], *, variant: Variant = "staged", rules: Rules | None = None
) -> Plan:
    """The plan of the forward pass; for a few queries against many keys, that of decoding.

    Args:
      arrays: arrays or shapes by their names in `operands.CARRIED`, which says what each is.
      variant: a key of `tiles.VARIANTS`, also with a split, "portable", or tiles of one's own.
      rules: score and visibility, where they are not those of the specification.
    """
    split = None
    if isinstance(variant, tiles.Split):
        split, variant = variant.columns, variant.variant
    x = LaunchProblem.of(spec, arrays, rules, variant in tiles.EMULATED_BFLOAT)
    few = decoding(x) if isinstance(variant, str) and variant in tiles.VARIANTS else None
    if few:
        wide, tile = few
        return _decode(wide, tile, split or splits(wide, tile)[0])
    return _forward(x, _select(variant, x))


def backward(
    spec: Specification,
    arrays: Mapping[str, Any],
    *,
    wrt: tuple[str, ...] = ("query", "key", "value"),
    variant: Variant = "staged",
    rules: Rules | None = None,
) -> Plan:
    """The plan of the backward pass for the gradients in `wrt`; other arguments as of `forward`.

    Its inputs are those of the forward pass, then out, row_max, row_sum, d_out, d_lse.
    """
    if isinstance(variant, tiles.Split):
        variant = variant.variant
    x = LaunchProblem.of(spec, arrays, rules, variant in tiles.EMULATED_BFLOAT)
    return _backward(x, wrt, _select(variant, x))
