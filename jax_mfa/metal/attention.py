"""Attention on Apple GPUs: what Metal takes, and the two passes as FFI calls.

Specification and operands in, arrays out, like `blockwise`; what cannot run is said by `refusal` before anything is
traced. Launch plans are made in `kernels`, run by the native module behind `runtime`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jax_mfa import partial
from jax_mfa.kv_cache.storage import stored
from jax_mfa.metal import kernels, operands, runtime, tiles
from jax_mfa.metal.plan import Plan
from jax_mfa.metal.problem import Problem
from jax_mfa.metal.tiles import MAX_HEAD, NAMES, VARIANTS
from jax_mfa.problem import DIFFERENTIABLE, MAX_POSITION, Operands, Specification, expand_rows, reduce_rows
from jax_mfa.tuning import crossover, tuned

DTYPES = ("float16", "bfloat16", "float32")
# as reported of hosted runners: kernels that leave zeros (Metal.jl issue 309) or never end (llama.cpp issue 8617), and
# other results than an M2's (lattice issue 899)
VIRTUAL = "of a virtual machine, or older than Apple silicon: there are reports of wrong results from such GPUs"
MAX_GRID = 65535  # heads and batch rows: grid axes of which no more is known to be safe


class Failed(RuntimeError):
    """Metal was found, but its kernels for a problem could not be had; the text is Metal's."""


def lacking(spec: Specification, o: Operands) -> str:
    """Which argument of a problem the kernels do not take; empty where they take it. Knows no device."""
    dtype = o.query.dtype.name
    if dtype not in DTYPES:
        return f"query: Metal has no {dtype}; it takes {', '.join(DTYPES)}"
    if o.bias is not None and o.bias.dtype.name not in DTYPES:
        return f"bias: Metal has no {o.bias.dtype.name}; it takes {', '.join(DTYPES)}"
    b, _, n, h = o.query.shape
    v = stored(spec, o).value.shape[-1]
    if not isinstance(b, int):
        return f"query: a launch plan is made for a known batch, got B = {b}"
    if max(h, v) > MAX_HEAD:
        return f"query, key, value: head sizes go to {MAX_HEAD}, got H = {h}, V = {v}"
    if max(b, n) > MAX_GRID:
        return f"query: batch and heads go to {MAX_GRID}, got B = {b}, N = {n}"
    return ""


def refusal(spec: Specification, o: Operands) -> str:
    """Why Metal cannot run a problem on this host; empty where it can."""
    return lacking(spec, o) or runtime.get().reason


def _device() -> str:
    return runtime.get().device.get("name", "Metal")


def _estimate(spec: Specification, o: Operands) -> crossover.Estimate | None:
    return crossover.estimate(spec, o, _device()) if runtime.get().device else None


def too_small(spec: Specification, o: Operands) -> str:
    """Why a problem that Metal can run is better off elsewhere; empty where it is not, or nobody knows."""
    if runtime.get().virtual and crossover.applies():
        return f"{_device()} is {VIRTUAL}; implementation='metal' uses it all the same"
    found = _estimate(spec, o)
    return "" if found is None or found.pays or not crossover.applies() else f"does not pay on {_device()}: {found}"


def described(spec: Specification, o: Operands) -> str:
    """The device that would run a problem, and what is expected of it."""
    found = _estimate(spec, o)
    where = f"{_device()}, on JAX's platform cpu"
    if runtime.get().virtual:
        where += f" ({VIRTUAL})"
    if found is None:
        return where
    taken = "" if found.pays or crossover.applies() else f"; JAX_MFA_DEVICE={runtime.named()[0]} takes it all the same"
    return f"{where}: {found}{taken}"


def declined(spec: Specification, o: Operands) -> str:
    """Why a problem does not go to Metal where the choice is left open, but for what keeps a host from using Metal."""
    return lacking(spec, o) or ("" if runtime.get().reason else too_small(spec, o))


def variants() -> tuple[str, ...]:
    """The tile tables that the device can run, its own first. Without simdgroup matrices that is one."""
    own = runtime.get().variant
    return (own,) if own not in VARIANTS else (own, *(name for name in NAMES if name != own))


def launch_arrays(spec: Specification, o: Operands) -> dict[str, Any]:
    """What a launch carries of a problem's operands, by name, in the order and layout of `operands.CARRIED`."""
    repeats = Operands(*spec.repeats)
    batch = o.query.shape[0]

    def carried(name: str) -> Array:
        x, known = getattr(o, name), operands.OPERANDS[name]
        if known.shape[0] != "B" or name == "query":
            return x
        x = expand_rows(x, getattr(repeats, name), batch)
        if name == "query_offset":
            x = jnp.clip(x, -MAX_POSITION, MAX_POSITION)
        x = jnp.asarray(x, operands.DTYPES[known.msl])
        return jnp.broadcast_to(x, (batch, *x.shape[1:]))

    return {name: carried(name) for name in operands.CARRIED if getattr(o, name) is not None}


def _launch_shapes(spec: Specification, o: Operands) -> dict[str, Any]:
    return jax.eval_shape(lambda o: launch_arrays(spec, o), o)


def plan_of(
    spec: Specification, o: Operands, of_pass: str, variant: kernels.Variant, wanted: tuple[str, ...] | None = None
) -> Plan:
    """The plan of a pass as it is made here, of abstract operands too; with all gradients unless some are `wanted`."""
    arrays = _launch_shapes(spec, o)
    if of_pass == "forward":
        return kernels.forward(spec, arrays, variant=variant)
    if wanted is None:
        pages = ("key", "value") if spec.page_size is not None else ()  # they have no gradient
        wanted = tuple(name for name in DIFFERENTIABLE if getattr(o, name) is not None and name not in pages)
    return kernels.backward(spec, arrays, wanted=wanted, variant=variant)


# the tiles that each pass takes, and the gradients that show them at work
PARTS: dict[str, dict[str, tuple[str, ...] | None]] = {
    "forward": {"forward": None, "decode": None},
    "backward": {"d_query": ("query",), "d_key_value": ("key", "value")},
}


def candidates(spec: Specification, o: Operands, part: str) -> list[tuple[int, ...]]:
    """Tiles of a part of `Tiles` that `tune` may take for a problem, the usual ones first; none where it has none.

    Of "decode" they are one number, the columns of a split.
    """
    variant = runtime.get().variant
    if variant not in VARIANTS:
        return []
    if part in PARTS["forward"]:
        few = kernels.decoding(Problem.of(spec, _launch_shapes(spec, o)))
        if part == "decode":
            return [(x,) for x in tiles.splits(few[0].s, few[1].keys)] if few else []
        if few:
            return []
    if variant in tiles.EMULATED_BFLOAT and o.query.dtype.name == "bfloat16":
        return []
    sizes = o.query.shape[-1], o.value.shape[-1], o.query.dtype.itemsize
    usual = getattr(tiles.select(variant, *sizes), part)
    return [tuple(map(int, dataclasses.astuple(x))) for x in tiles.candidates(usual, *sizes)]


def tiles_of(spec: Specification, o: Operands, of_pass: str) -> kernels.Variant:
    """What `tune` found for a pass of a problem, else the name of the chip's table."""
    variant, won = runtime.get().variant, {}
    for part in PARTS[of_pass] if spec.is_plain else ():
        allowed = lambda numbers, part=part: numbers in candidates(spec, o, part)
        found = tuned.of(f"metal {part}", lambda: spec.summary(o), allowed)
        if found is not None:
            won[part] = found
    if not won:
        return variant
    if "decode" in won:
        return tiles.Split(variant, *won["decode"])
    base = tiles.select(variant, o.query.shape[-1], o.value.shape[-1], o.query.dtype.itemsize)
    return dataclasses.replace(base, **{part: _typed(getattr(base, part), numbers) for part, numbers in won.items()})


def _typed(usual: Any, numbers: tuple[int, ...]) -> Any:
    """Numbers as tiles: what the usual ones have as a truth value is one again."""
    return type(usual)(*(type(a)(b) for a, b in zip(dataclasses.astuple(usual), numbers)))


def _checked(plan: Any) -> Any:
    widest = max(max(d.threadgroups[1:]) for d in plan.dispatches)  # `vmap` and groups multiply what `lacking` saw
    if widest > MAX_GRID:
        raise Failed(f"a grid axis of {widest} threadgroups; no more than {MAX_GRID} is known to be safe")
    failure = runtime.failure(plan)
    if failure:
        raise Failed(failure)
    return plan


def forward(spec: Specification, o: Operands) -> tuple[Any, ...]:
    """Attention, and maximum and sum of each row, as `blockwise.forward` gives them. Raises `Failed` while tracing."""
    arrays = launch_arrays(spec, o)
    plan = _checked(kernels.forward(spec, arrays, variant=tiles_of(spec, o, "forward")))
    return tuple(runtime.call(plan, runtime.TARGETS[0], *arrays.values()).values())


def backward(
    spec: Specification,
    o: Operands,
    out: Array,
    row_max: Array,
    row_sum: Array,
    d_out: Array,
    d_lse: Array,
    wanted: tuple[str, ...],
) -> tuple[Any, ...]:
    """Cotangents of the wanted operands, as `blockwise.backward` gives them. Raises `Failed` while tracing."""
    arrays = launch_arrays(spec, o)
    plan = _checked(kernels.backward(spec, arrays, wanted=wanted, variant=tiles_of(spec, o, "backward")))
    d_out, d_lse = d_out.astype(out.dtype), d_lse.astype(row_max.dtype)
    found = runtime.call(plan, runtime.TARGETS[1], *arrays.values(), out, row_max, row_sum, d_out, d_lse)

    whole = stored(spec, o)

    def cotangent(name: str) -> Any:
        operand, repeat = getattr(whole, name), getattr(Operands(*spec.repeats), name)
        if name == "bias":
            return found["d_bias"]
        if name == "scale":
            x = found["score_sums"][..., 0].sum((1, 2))
        elif name == "alibi_slopes":
            x = found["score_sums"][..., 1].sum(1)
        elif name == "sinks":
            return partial.sink_gradient(spec, o, row_max, row_sum, found["delta"]).astype(operand.dtype)
        else:
            x = found[f"d_{name}"]
        return reduce_rows(x, repeat, operand.shape[0]).astype(operand.dtype)

    return tuple(cotangent(name) for name in wanted)
