"""Which form attention over several devices takes, and why."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, Unpack

import jax

from jax_mfa import api, checks
from jax_mfa.arguments import specify, specify_abstract
from jax_mfa.context_parallel import axes, costs
from jax_mfa.context_parallel import layout as layouts
from jax_mfa.context_parallel import order as orders
from jax_mfa.context_parallel.costs import Machine, Problem
from jax_mfa.context_parallel.order import Order
from jax_mfa.problem import Operands, Specification

if TYPE_CHECKING:
    from jax_mfa.typing import Bias, Float, Mask

Form: TypeAlias = Literal["ring", "ulysses", "hybrid"]


@dataclasses.dataclass(frozen=True)
class Choice:
    """Which form is taken over a number of devices, and why not another.

    Attributes:
      form: the one taken.
      devices: (of the ring, of the exchange of heads).
      reasons: for each form its verdict in one line.
    """

    form: Form
    devices: tuple[int, int]
    reasons: dict[str, str]

    def __str__(self) -> str:
        return "\n".join(f"{'->' if name == self.form else '  '} {name}: {why}" for name, why in self.reasons.items())


def choose(problem: Problem, devices: int, order: str, machine: Machine, heads_devices: int | None = None) -> Choice:
    """The form that is done first on paper, forward and backward.

    Args:
      devices: all that the sequence is split over.
      order: of the tokens. In zigzag order only the ring knows what to do.
      heads_devices: how many of them are on a mesh axis of their own for heads; then both axes are used.
    """
    candidates: dict[Form, tuple[int, int]] = {"ring": (devices, 1), "ulysses": (1, devices)}
    if heads_devices is not None:
        candidates = {"hybrid": (devices // heads_devices, heads_devices)}
    reasons: dict[str, str] = {}
    times: dict[Form, float] = {}
    for form, (ring, heads) in candidates.items():
        refusal = costs.undivided(problem.heads, problem.key_heads, heads) if heads > 1 else ""
        if form == "ulysses" and order != "contiguous":
            refusal = f"tokens are in {order} order"
        if refusal:
            reasons[form] = refusal
            continue
        found = costs.cost(problem, ring, heads, order)
        times[form] = sum(
            costs.seconds(problem, found, devices, heads > 1, machine, backward) for backward in (False, True)
        )
        sent = costs.human(found.forward_bytes + found.backward_bytes)
        hidden = "while it computes" if form == "ring" else "before and after it computes"
        uneven = f", the busiest device {found.balance:.2g} times as long as the mean" if found.balance > 1.05 else ""
        reasons[form] = f"about {times[form]:.2g} s: each device sends {sent} {hidden}{uneven}"
    if not times:
        raise ValueError("; ".join(f"{form}: {why}" for form, why in reasons.items()))
    form = min(times, key=lambda x: times[x])
    return Choice(form, candidates[form], reasons)


def explain_context_parallel(
    query: Float[api.AbstractArray, "*B T N H"],
    key: Float[api.AbstractArray, "*B S K H"],
    value: Float[api.AbstractArray, "*B S K V"],
    bias: Bias | jax.ShapeDtypeStruct | None = None,
    mask: Mask | jax.ShapeDtypeStruct | None = None,
    *,
    devices: int,
    heads_devices: int | None = None,
    order: Order = "contiguous",
    machine: Machine | None = None,
    **keywords: Unpack[api.Keywords[api.AbstractArray]],
) -> Choice:
    """Which form `context_parallel_attention` takes for whole arrays, and why, with the bytes that are sent.

    Args:
      query, key, value, bias, mask, **keywords: as in `dot_product_attention`, of whole sequences; arrays may be
        `jax.ShapeDtypeStruct`s.
      devices: over which the sequence is split; heads_devices: so many of them along a second axis, for heads.
      order, machine: as in `context_parallel_attention`.

    Returns:
      A `Choice`; print it.

    Raises:
      ValueError, TypeError: as `dot_product_attention`; also where no form fits.
    """
    checks.integer("devices", devices, least=1)
    if heads_devices is not None and devices % checks.integer("heads_devices", heads_devices, least=1):
        raise ValueError(f"heads_devices must divide devices = {devices}, got {heads_devices}")
    layouts.refuse_quantised("explain_context_parallel", query=query, key=key, value=value)
    spec, o = specify_abstract(query=query, key=key, value=value, bias=bias, mask=mask, **keywords)
    orders.check(order)
    return choose(_problem(spec, o), devices, order, machine_or_usual(machine), heads_devices)


def machine_or_usual(machine: Any) -> Machine:
    if not isinstance(machine, (Machine, type(None))):
        raise TypeError(f"machine must be None or a Machine, got {checks.seen(machine)}")
    return machine or Machine()


def _problem(spec: Specification, o: Operands, parts: int = 1) -> Problem:
    """The sizes of a problem, of whose sequences the operands hold one of so many parts."""
    batch, t, n, h = o.query.shape
    s, k, v = o.value.shape[1:]
    return Problem(batch, parts * t, parts * s, n, k, h, v, o.query.dtype.itemsize, spec)


def chosen(
    axis: Any,
    mesh: Any,
    order: str,
    machine: Machine | None,
    head_axis: Any,
    batch_axis: Any,
    arguments: dict[str, Any],
) -> Choice:
    """The form for what a device holds, or without a mesh for whole arrays."""
    given = {name: x for name, x in arguments.items() if x is not None}
    layouts.refuse_quantised("context_parallel_attention", **arguments)
    if mesh is None:
        devices = axes.axis_size(axis, "axis_name")
        return choose(
            _problem(*specify(**given, parts=devices), parts=devices), devices, order, machine_or_usual(machine)
        )
    size = lambda axis, name: 1 if axis is None else axes.mesh_axis_size(mesh, axis, name)
    problem = _problem(*specify(**given))
    problem = dataclasses.replace(
        problem,
        batch=problem.batch // size(batch_axis, "batch_axis"),
        heads=problem.heads // size(head_axis, "head_axis"),
        key_heads=max(problem.key_heads // size(head_axis, "head_axis"), 1),
    )
    return choose(problem, size(axis, "axis_name"), order, machine_or_usual(machine))
