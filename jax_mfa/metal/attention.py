"""The two passes of attention as calls of launch plans: specification and operands in, arrays out, like `blockwise`.

Chooses tiles, carries operands in the layout of a launch, and raises `Failed` where kernels cannot be had. Whether
Metal takes a problem says `jax_mfa/choice.py`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jax_mfa import partial
from jax_mfa.metal import functions, operands, plans, runtime, tiles
from jax_mfa.metal.plan import Plan
from jax_mfa.metal.problem import LaunchProblem
from jax_mfa.problem import DIFFERENTIABLE, MAX_POSITION, Operands, Specification, expand_entries, reduce_entries
from jax_mfa.tuning import tuned


def differentiates(spec: Specification) -> bool:
    """Whether kernels give the gradient of the arrays that the `score_mod` of a problem reads."""
    return functions.rules_of(spec.score_mod, spec.mask_mod).reads is not None


class Failed(RuntimeError):
    """Metal was found, but its kernels for a problem could not be had; the text is Metal's."""


def launch_arrays(spec: Specification, o: Operands) -> dict[str, Any]:
    """What a launch carries of a problem's operands, by name, in the order and layout of `operands.CARRIED`."""
    repeats = Operands(*spec.repeats)
    batch = o.query.shape[0]

    def carried(name: str) -> Array | None:
        if name == "captured":
            return _captured(repeats, o, batch)
        x, known = getattr(o, name), operands.OPERANDS[name]
        if x is None or known.shape[0] != "B" or name == "query":
            return x
        x = expand_entries(x, getattr(repeats, name), batch)
        if name == "query_offset":
            x = jnp.clip(x, -MAX_POSITION, MAX_POSITION)
        x = jnp.asarray(x, operands.DTYPES[known.msl])
        return jnp.broadcast_to(x, (batch, *x.shape[1:]))

    return {name: x for name in operands.CARRIED if (x := carried(name)) is not None}


def _captured(repeats: Operands, o: Operands, batch: int) -> Array | None:
    """What a caller's functions read, [rows, words]: the bits of floats, then integers; None where that is nothing."""
    names = [x for x in ("captured_floats", "captured_integers") if getattr(o, x) is not None]
    arrays = [getattr(o, x) for x in names]
    if len({(x.shape[0], getattr(repeats, name)) for name, x in zip(names, arrays)}) > 1:
        arrays = [expand_entries(x, getattr(repeats, name), batch) for name, x in zip(names, arrays)]
        arrays = [jnp.broadcast_to(x, (batch, x.shape[1])) for x in arrays]
    words = [x if x.dtype == np.int32 else lax.bitcast_convert_type(x, np.int32) for x in arrays]
    return jnp.concatenate(words, axis=1) if words else None


def _launch_shapes(spec: Specification, o: Operands) -> dict[str, Any]:
    return jax.eval_shape(lambda o: launch_arrays(spec, o), o)


def plan_of(
    spec: Specification, o: Operands, of_pass: str, variant: plans.Variant, wrt: tuple[str, ...] | None = None
) -> Plan:
    """The plan of a pass as it is made here, of abstract operands too; with all gradients unless `wrt` names some."""
    arrays = _launch_shapes(spec, o)
    if of_pass == "forward":
        return plans.forward(spec, arrays, variant=variant)
    if wrt is None:
        pages = ("key", "value") if spec.page_size is not None else ()  # they have no gradient
        wrt = tuple(name for name in DIFFERENTIABLE if getattr(o, name) is not None and name not in pages)
    return plans.backward(spec, arrays, wrt=wrt, variant=variant)


# the tiles that each pass takes, and the gradients that show them at work
PARTS: dict[str, dict[str, tuple[str, ...] | None]] = {
    "forward": {"forward": None, "decode": None},
    "backward": {"d_query": ("query",), "d_key_value": ("key", "value")},
}


def candidates(spec: Specification, o: Operands, part: str) -> dict[tuple[int, ...], Any]:
    """Tiles of a part of `Tiles` that `tune` may take for a problem, by their numbers and the usual ones first; none
    where it has none.

    Of "decode" they are a `Split`, by one number: its columns.
    """
    variant = runtime.get().variant
    if variant not in tiles.VARIANTS:
        return {}
    if part in PARTS["forward"]:
        few = plans.decoding(LaunchProblem.of(spec, _launch_shapes(spec, o)))
        if part == "decode":
            return {(x,): tiles.Split(variant, x) for x in plans.splits(*few)} if few else {}
        if few:
            return {}
    if variant in tiles.EMULATED_BFLOAT and o.query.dtype.name == "bfloat16":
        return {}
    sizes = o.query.shape[-1], o.value.shape[-1], o.query.dtype.itemsize
    usual = getattr(tiles.select(variant, *sizes), part)
    return {tuple(map(int, x.arguments)): x for x in tiles.candidates(usual, *sizes)}


def tiles_of(spec: Specification, o: Operands, of_pass: str) -> plans.Variant:
    """What `tune` found for a pass of a problem, else the name of the chip's table."""
    variant, won = runtime.get().variant, {}
    for part in PARTS[of_pass] if spec.is_plain else ():
        allowed = lambda numbers, part=part: numbers in candidates(spec, o, part)
        found = tuned.of(f"metal {part}", lambda: spec.summary(o), allowed)
        if found is not None:
            won[part] = candidates(spec, o, part)[found]
    if not won:
        return variant
    if "decode" in won:
        return won["decode"]
    base = tiles.select(variant, o.query.shape[-1], o.value.shape[-1], o.query.dtype.itemsize)
    return dataclasses.replace(base, **won)


def _checked(plan: Any) -> Any:
    widest = max(max(d.threadgroups[1:]) for d in plan.dispatches)  # `vmap` and groups multiply what `lacking` saw
    if widest > tiles.MAX_GRID:
        raise Failed(f"a grid axis of {widest} threadgroups; no more than {tiles.MAX_GRID} is known to be safe")
    if failure := runtime.failure(plan):
        raise Failed(failure)
    return plan


def forward(spec: Specification, o: Operands) -> tuple[Any, ...]:
    """Attention, and maximum and sum of each row, as `blockwise.forward` gives them. Raises `Failed` while tracing."""
    arrays = launch_arrays(spec, o)
    plan = _checked(plans.forward(spec, arrays, variant=tiles_of(spec, o, "forward")))
    return tuple(runtime.call(plan, runtime.TARGETS[0], *arrays.values()).values())


# [B, T, N, 2], a row's sums of d(score) times product and times distance → the gradient, by operand
_SUMMED = {"scale": lambda sums: sums[..., 0].sum((1, 2)), "alibi_slopes": lambda sums: sums[..., 1].sum(1)}


def backward(spec: Specification, o: Operands, results: Any, wrt: tuple[str, ...], cotangents: Any) -> tuple[Any, ...]:
    """Cotangents of the operands in `wrt`, as `blockwise.backward` gives them. Raises `Failed` while tracing."""
    arrays = launch_arrays(spec, o)
    plan = _checked(plans.backward(spec, arrays, wrt=wrt, variant=tiles_of(spec, o, "backward")))
    (out, row_max, row_sum), (d_out, d_lse) = results, cotangents
    d_out, d_lse = d_out.astype(out.dtype), d_lse.astype(row_max.dtype)
    found = runtime.call(plan, runtime.TARGETS[1], *arrays.values(), *results, d_out, d_lse)
    whole = spec.viewed(o)

    def cotangent(name: str) -> Any:
        operand, repeat = getattr(whole, name), getattr(Operands(*spec.repeats), name)
        if name == "bias":
            return found["d_bias"]
        if name == "captured_floats":
            if "d_captured" not in found:  # no score reads any
                return jnp.zeros_like(operand)
            x = found["d_captured"].sum(1)
            return x if x.shape[0] == operand.shape[0] else reduce_entries(x, repeat, operand.shape[0])
        if name == "sinks":
            return partial.sink_gradient(spec, o, row_max, row_sum, found["row_states"][..., 2]).astype(operand.dtype)
        x = _SUMMED[name](found["score_sums"]) if name in _SUMMED else found[f"d_{name}"]
        if name == "key" and spec.value_size is not None:
            x = x.astype(row_max.dtype).at[..., : spec.value_size].add(found["d_value"].astype(row_max.dtype))
        return reduce_entries(x, repeat, operand.shape[0]).astype(operand.dtype)

    return tuple(cotangent(name) for name in wrt)
