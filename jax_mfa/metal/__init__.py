"""Attention on Apple GPUs: what Metal takes, and the two passes as FFI calls.

Specification and operands in, arrays out, like `blockwise`; what cannot run is said by `refusal` before anything is
traced. Launch plans are made in `kernels`, run by the native module behind `runtime`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jax_mfa import tuned
from jax_mfa.metal import crossover, kernels, runtime, tiles
from jax_mfa.metal.plan import Plan
from jax_mfa.metal.tiles import MAX_HEAD, NAMES, VARIANTS, Portable, Tiles
from jax_mfa.specification import DIFFERENTIABLE, MAX_POSITION, Operands, Specification, expand_rows, reduce_rows

DTYPES = ("float16", "bfloat16", "float32")
# as reported of hosted runners: kernels that leave zeros (Metal.jl issue 309) or never end (llama.cpp issue 8617), and
# other results than an M2's (lattice issue 899)
VIRTUAL = "of a virtual machine, or older than Apple silicon: there are reports of wrong results from such GPUs"
MAX_GRID = 65535  # heads and batch rows: grid axes of which no more is known to be safe


class Failed(RuntimeError):
    """Metal was found, but its kernels for a problem could not be had; the text is Metal's."""


def lacking(spec: Specification, operands: Operands) -> str:
    """Which argument of a problem the kernels do not take; empty where they take it. Knows no device."""
    if operands.block_tables is not None:
        return "block_tables: Metal has no kernels for pages yet"
    for name, storage in (("key", spec.key_storage), ("value", spec.value_storage)):
        if storage is not None:
            return f"{name}: Metal has no kernels for quantised keys and values yet, got {storage.scheme.kind}"
    dtype = operands.query.dtype.name
    if dtype not in DTYPES:
        return f"query: Metal has no {dtype}; it takes {', '.join(DTYPES)}"
    if operands.bias is not None and operands.bias.dtype.name not in DTYPES:
        return f"bias: Metal has no {operands.bias.dtype.name}; it takes {', '.join(DTYPES)}"
    b, _, n, h = operands.query.shape
    v = operands.value.shape[-1]
    if not isinstance(b, int):
        return f"query: a launch plan is made for a known batch, got B = {b}"
    if max(h, v) > MAX_HEAD:
        return f"query, key, value: head sizes go to {MAX_HEAD}, got H = {h}, V = {v}"
    if max(b, n) > MAX_GRID:
        return f"query: batch and heads go to {MAX_GRID}, got B = {b}, N = {n}"
    return ""


def refusal(spec: Specification, operands: Operands) -> str:
    """Why Metal cannot run a problem on this host; empty where it can."""
    return lacking(spec, operands) or runtime.get().reason


def _device() -> str:
    return runtime.get().device.get("name", "Metal")


def _estimate(spec: Specification, operands: Operands) -> crossover.Estimate | None:
    return crossover.estimate(spec, operands, _device()) if runtime.get().device else None


def too_small(spec: Specification, operands: Operands) -> str:
    """Why a problem that Metal can run is better off elsewhere; empty where it is not, or nobody knows."""
    if runtime.get().virtual and crossover.applies():
        return f"{_device()} is {VIRTUAL}; implementation='metal' uses it all the same"
    found = _estimate(spec, operands)
    return "" if found is None or found.pays or not crossover.applies() else f"does not pay on {_device()}: {found}"


def described(spec: Specification, operands: Operands) -> str:
    """The device that would run a problem, and what is expected of it."""
    found = _estimate(spec, operands)
    where = f"{_device()}, on JAX's platform cpu"
    if runtime.get().virtual:
        where += f" ({VIRTUAL})"
    if found is None:
        return where
    all_the_same = "" if found.pays or crossover.applies() else "; JAX_MFA_DEVICE=emulator takes it all the same"
    return f"{where}: {found}{all_the_same}"


def declined(spec: Specification, operands: Operands) -> str:
    """Why a problem does not go to Metal where the choice is left open, but for what keeps a host from using Metal."""
    return lacking(spec, operands) or ("" if runtime.get().reason else too_small(spec, operands))


def variants() -> tuple[str, ...]:
    """The tile tables that the device can run, its own first. Without simdgroup matrices that is one."""
    own = runtime.get().variant
    return (own,) if own not in VARIANTS else (own, *(name for name in NAMES if name != own))


def launch_arrays(spec: Specification, o: Operands) -> dict:
    """What a launch carries beside query, key and value (`kernels.OPTIONAL`), small operands in its layout."""
    repeats = Operands(*spec.repeats)
    batch, t, n, _ = o.query.shape
    s = o.key.shape[1]

    def row(name):
        """An operand with one row for each batch row."""
        x = expand_rows(getattr(o, name), getattr(repeats, name), batch)
        return jnp.broadcast_to(x, (batch, *x.shape[1:]))

    def table(*columns):
        """Columns of arrays or numbers, side by side; None where all are numbers."""
        if not any(hasattr(x, "shape") for x in columns):
            return None
        shape = jnp.broadcast_shapes(*(jnp.shape(x) for x in columns))
        dtype = jnp.int32 if shape == (batch,) else jnp.float32
        return jnp.stack([jnp.broadcast_to(jnp.asarray(x, dtype), shape) for x in columns], axis=-1)

    offset: Any = spec.query_offset
    if o.query_offset is not None:
        offset = jnp.clip(row("query_offset"), -MAX_POSITION, MAX_POSITION)
    limits = table(
        offset,
        t if o.query_lengths is None else row("query_lengths"),
        s if o.key_lengths is None else row("key_lengths"),
    )
    numbers = table(
        spec.scale if o.scale is None else jnp.broadcast_to(row("scale")[:, None], (batch, n)),
        0.0 if o.alibi_slopes is None else row("alibi_slopes"),
        0.0 if o.sinks is None else row("sinks"),
    )
    found = {
        "limits": limits,
        "numbers": None if numbers is None else numbers.reshape(batch * n, 3),
        "bias": o.bias,
        "mask": o.mask,
        "blocks": o.block_mask,
        "query_segments": None if o.query_segment_ids is None else row("query_segment_ids"),
        "key_segments": None if o.key_segment_ids is None else row("key_segment_ids"),
        "dropout": None if o.dropout is None else row("dropout"),
        "key_ranges": None if o.key_ranges is None else row("key_ranges"),
    }
    return {name: x for name, x in found.items() if x is not None}


def features(o: Operands) -> tuple[str, ...]:
    """What a launch reads of its `numbers` beside the scale."""
    uses = {"slopes": o.alibi_slopes, "sinks": o.sinks}
    return tuple(name for name, x in uses.items() if x is not None)


def plan_of(
    spec: Specification,
    operands: Operands,
    of_pass: str,
    variant: str | Tiles | Portable,
    wanted: tuple[str, ...] | None = None,
) -> Plan:
    """The plan of a pass as it is made here, of abstract operands too; with all gradients unless some are `wanted`."""
    carried = jax.eval_shape(lambda operands: launch_arrays(spec, operands), operands)
    arrays = (operands.query, operands.key, operands.value)
    if of_pass == "forward":
        return kernels.forward(spec, *arrays, variant=variant, uses=features(operands), **carried)
    if wanted is None:
        wanted = tuple(name for name in DIFFERENTIABLE if getattr(operands, name) is not None)
    return kernels.backward(spec, *arrays, wanted=wanted, variant=variant, uses=features(operands), **carried)


# the tiles that each pass takes from a table, and the gradients that show one at work
PARTS: dict[str, dict[str, tuple[str, ...] | None]] = {
    "forward": {"forward": None},
    "backward": {"d_query": ("query",), "d_key_value": ("key", "value")},
}


def candidates(spec: Specification, operands: Operands, part: str) -> list[tuple[int, ...]]:
    """Tiles of a part of `Tiles` that `tune` may take for a problem, the usual ones first; none where it has none."""
    variant, o = runtime.get().variant, operands
    if variant not in VARIANTS or (part == "forward" and kernels.decodes(spec, o.query, o.key, o.value)):
        return []
    sizes = o.query.shape[-1], o.value.shape[-1], o.query.dtype.itemsize
    usual = getattr(tiles.select(variant, *sizes), part)
    return [tuple(map(int, dataclasses.astuple(x))) for x in tiles.candidates(usual, *sizes)]


def tiles_of(spec: Specification, operands: Operands, of_pass: str) -> str | Tiles:
    """What `tune` found for a pass of a problem, else the name of the chip's table."""
    variant, won = runtime.get().variant, {}
    for part in PARTS[of_pass]:
        allowed = lambda numbers, part=part: numbers in candidates(spec, operands, part)
        found = tuned.of(f"metal {part}", lambda: spec.summary(operands), allowed)
        if found is not None:
            won[part] = found
    if not won:
        return variant
    base = tiles.select(variant, operands.query.shape[-1], operands.value.shape[-1], operands.query.dtype.itemsize)
    assert isinstance(base, Tiles)
    return dataclasses.replace(base, **{part: _typed(getattr(base, part), numbers) for part, numbers in won.items()})


def _typed(usual: Any, numbers: tuple[int, ...]) -> Any:
    """Numbers as tiles: what the usual ones have as a truth value is one again."""
    return type(usual)(*(type(a)(b) for a, b in zip(dataclasses.astuple(usual), numbers)))


def _checked(plan):
    widest = max(max(d.threadgroups[1:]) for d in plan.dispatches)  # `vmap` and groups multiply what `lacking` saw
    if widest > MAX_GRID:
        raise Failed(f"a grid axis of {widest} threadgroups; no more than {MAX_GRID} is known to be safe")
    failure = runtime.failure(plan)
    if failure:
        raise Failed(failure)
    return plan


def forward(spec: Specification, operands: Operands):
    """Attention, and maximum and sum of each row, as `blockwise.forward` gives them. Raises `Failed` while tracing."""
    o, carried = operands, launch_arrays(spec, operands)
    plan = _checked(
        kernels.forward(
            spec, o.query, o.key, o.value, variant=tiles_of(spec, o, "forward"), uses=features(o), **carried
        )
    )
    return tuple(runtime.call(plan, runtime.TARGETS[0], o.query, o.key, o.value, *carried.values()).values())


def backward(spec: Specification, operands: Operands, out, row_max, row_sum, d_out, d_lse, wanted: tuple[str, ...]):
    """Cotangents of the wanted operands, as `blockwise.backward` gives them. Raises `Failed` while tracing."""
    o, carried = operands, launch_arrays(spec, operands)
    variant = tiles_of(spec, o, "backward")
    plan = kernels.backward(spec, o.query, o.key, o.value, wanted=wanted, variant=variant, uses=features(o), **carried)
    d_out, d_lse = d_out.astype(out.dtype), d_lse.astype(row_max.dtype)
    inputs = (o.query, o.key, o.value, *carried.values(), out, row_max, row_sum, d_out, d_lse)
    found = runtime.call(_checked(plan), runtime.TARGETS[1], *inputs)

    def cotangent(name):
        operand, repeat = getattr(o, name), getattr(Operands(*spec.repeats), name)
        if name == "bias":
            return found["d_bias"]
        if name == "scale":
            x = found["d_scale"].sum((1, 2))
        elif name == "alibi_slopes":
            x = found["d_slopes"].sum(1)
        elif name == "sinks":
            sinks = jnp.broadcast_to(expand_rows(o.sinks, repeat, out.shape[0]), (out.shape[0], out.shape[2]))
            empty = row_sum == 0
            weight = jnp.exp(jnp.where(empty, 0, sinks.astype(row_max.dtype)[:, None] - row_max))
            x = -(weight / jnp.where(empty, 1, row_sum) * found["row_sums"]).sum(1)
        else:
            x = found[f"d_{name}"]
        return reduce_rows(x, repeat, operand.shape[0]).astype(operand.dtype)

    return tuple(cotangent(name) for name in wanted)
