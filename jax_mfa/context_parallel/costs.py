"""Costs of attention over several devices on paper: bytes sent, memory, arithmetic and time; and the fastest form.

All counts are for one device and one call. `python -m jax_mfa bench --devices` prints them beside measurements.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, Unpack

import jax

from jax_mfa import api, checks
from jax_mfa.arguments import specify, specify_abstract
from jax_mfa.context_parallel import layout as layouts
from jax_mfa.context_parallel.layout import Order
from jax_mfa.context_parallel.ring import Ring
from jax_mfa.problem import Operands, Specification

if TYPE_CHECKING:
    from jax_mfa.typing import Bias, Float, Mask

Form: TypeAlias = Literal["ring", "ulysses", "hybrid"]
ACCUMULATOR = 4  # bytes of a float32


@dataclasses.dataclass(frozen=True)
class Sizes:
    """A problem's sizes, of the whole sequence: B, T, S, N, K, H, V as everywhere, and bytes of an element."""

    batch: int
    rows: int
    columns: int
    heads: int
    key_heads: int
    head_size: int
    value_size: int
    itemsize: int
    spec: Specification = dataclasses.field(default_factory=Specification)

    @property
    def visible(self) -> float:
        """The part of all scores that causality and window leave, without an offset."""
        return self.spec.pairs_within(self.rows, self.columns, 0) / max(self.rows * self.columns, 1)


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one device sends, keeps and computes.

    Memory is that of a pass forward, and forward and back: arguments, results, arriving keys and float32 sums, and the
    float32 layouts of `blockwise`; its tiles of scores come on top.
    """

    forward_bytes: float  # sent
    backward_bytes: float
    forward_memory: float
    backward_memory: float
    steps: int  # stops of the keys; 1 without a ring
    balance: float  # how much longer the busiest device of a step computes than the mean of all


def cost(problem: Sizes, ring_devices: int, heads_devices: int = 1, order: str = "contiguous") -> Cost:
    """Of the ring (heads_devices = 1), the exchange of heads (ring_devices = 1), or both."""
    p, n, u = problem, ring_devices, heads_devices
    rows, columns = p.batch * p.rows / (n * u), p.batch * p.columns / (n * u)  # of a device
    query, out = (rows * p.heads * size * p.itemsize for size in (p.head_size, p.value_size))
    keys = columns * p.key_heads * (p.head_size + p.value_size) * p.itemsize
    row_sums = ACCUMULATOR * rows * p.heads
    arguments = query + keys + out
    wide = ACCUMULATOR / p.itemsize
    exchanged = exchanged_lse = copies = 0.0
    if u > 1:
        keys *= max(u / max(p.key_heads, 1), 1)  # fewer heads than devices are sent more than once
        exchanged = (query + keys + out) * (u - 1) / u
        exchanged_lse = row_sums * (u - 1) / u  # its gradient is seldom asked for
        copies = out if wide == 1 else query + keys + out  # in float32 its results are the wide copies
    wide_copies = ahead = wide * (query + keys + out)
    behind = 2 * wide_copies
    if n > 1:  # keys that are held and that arrive, and sums
        ahead = 2 * keys + wide * out + wide_copies / layouts.chunks_of(order)
        behind = 2 * keys + wide * (3 * keys + query) + wide_copies
    schedule = Ring(p.spec, None, n, order).schedule(p.rows // n, p.columns // n)
    hops, travelling = schedule.hops, keys * schedule.permutes
    sums_sent = hops + (hops > 1) + ((schedule.start + hops) % n != 0)  # with the keys, to the last stop, and home
    balance = 1.0
    if n > 1 and order != "zigzag" and p.spec.band[1] is not None:  # causality alone is uneven
        # at each step some device computes all of its scores, but for the first, where all see half of theirs
        balance = (hops + 0.5) / max(p.visible * n, 1e-9)
    return Cost(
        forward_bytes=exchanged + exchanged_lse + travelling,
        backward_bytes=exchanged + travelling + wide * keys * sums_sent,
        forward_memory=arguments + copies + ahead + 2 * row_sums,
        backward_memory=2 * arguments + 2 * copies + behind + 4 * row_sums,
        steps=hops + 1,
        balance=balance,
    )


@dataclasses.dataclass(frozen=True)
class Machine:
    """What a time on paper depends on. The figures are assumptions, not measurements."""

    operations: float = 1e13  # per second that attention reaches on one device
    bytes_per_second: float = 1.25e9  # that one device sends while it receives as many
    latency: float = 1e-4  # seconds of a message

    @classmethod
    def of(cls, machine: Any) -> Machine:
        """The machine; that of the default figures for None. Raises `TypeError` for anything else."""
        if not isinstance(machine, (cls, type(None))):
            raise TypeError(f"machine must be None or a Machine, got {checks.seen(machine)}")
        return machine or cls()


def seconds(
    problem: Sizes, cost: Cost, devices: int, exchanges: bool, machine: Machine, backward: bool = False
) -> float:
    """Time of one pass: keys that travel a ring hide behind arithmetic, an exchange of heads does not."""
    p, h, v = problem, problem.head_size, problem.value_size
    # two operations for each multiply-add of two products, backward of five, as in `blockwise`
    sizes = 3 * h + 2 * v if backward else h + v
    operations = 2.0 * p.batch * p.heads * p.rows * p.columns * sizes * p.visible
    compute = operations / devices * cost.balance / machine.operations
    sent = cost.backward_bytes if backward else cost.forward_bytes
    messages = (cost.steps - 1 + 4 * exchanges) * machine.latency
    transfer = sent / machine.bytes_per_second + messages
    if exchanges:
        return compute + transfer
    return max(compute, transfer) + (compute / cost.steps if transfer > compute else 0)


def human(size: float) -> str:
    """Bytes for people, decimal."""
    unit = 0 if size < 1 else min(int(math.log10(size)) // 3, 4)
    return f"{size / 1000**unit:.3g} {('B', 'kB', 'MB', 'GB', 'TB')[unit]}"


# --- the choice of a form


@dataclasses.dataclass(frozen=True)
class FormChoice:
    """Which form is taken over a number of devices, and why not another."""

    form: Form
    devices: tuple[int, int]  # of the ring, of the exchange of heads
    reasons: dict[str, str]  # for each form its verdict in one line

    def __str__(self) -> str:
        return "\n".join(f"{'->' if name == self.form else '  '} {name}: {why}" for name, why in self.reasons.items())


def choose(problem: Sizes, devices: int, order: str, machine: Machine, heads_devices: int | None = None) -> FormChoice:
    """The form that is done first on paper, forward and backward.

    With `heads_devices`, so many of the devices are on a mesh axis of their own for heads, and both axes are used.
    """
    candidates: dict[Form, tuple[int, int]] = {"ring": (devices, 1), "ulysses": (1, devices)}
    if heads_devices is not None:
        candidates = {"hybrid": (devices // heads_devices, heads_devices)}
    reasons: dict[str, str] = {}
    times: dict[Form, float] = {}
    for form, (ring, heads) in candidates.items():
        refusal = layouts.undivided(problem.heads, problem.key_heads, heads) if heads > 1 else ""
        if form == "ulysses" and order != "contiguous":
            refusal = f"tokens are in {order} order"
        if refusal:
            reasons[form] = refusal
            continue
        on_paper = cost(problem, ring, heads, order)
        times[form] = sum(seconds(problem, on_paper, devices, heads > 1, machine, back) for back in (False, True))
        sent = human(on_paper.forward_bytes + on_paper.backward_bytes)
        hidden = "while it computes" if form == "ring" else "before and after it computes"
        reasons[form] = f"about {times[form]:.2g} s: each device sends {sent} {hidden}"
        if on_paper.balance > 1.05:
            reasons[form] += f", the busiest device {on_paper.balance:.2g} times as long as the mean"
    if not times:
        raise ValueError("; ".join(f"{form}: {why}" for form, why in reasons.items()))
    fastest = min(times, key=lambda form: times[form])
    return FormChoice(fastest, candidates[fastest], reasons)


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
) -> FormChoice:
    """Which form `context_parallel_attention` takes for whole arrays, and why, with the bytes that are sent.

    Args:
      query, key, value, bias, mask, **keywords: as in `dot_product_attention`, of whole sequences; arrays may be
        `jax.ShapeDtypeStruct`s.
      devices: over which the sequence is split; heads_devices: so many of them along a second axis, for heads.
      order, machine: as in `context_parallel_attention`.

    Returns:
      A `FormChoice`; print it.

    Raises:
      ValueError, TypeError: as `dot_product_attention`; also where no form fits.
    """
    checks.integer("devices", devices, least=1)
    if heads_devices is not None and devices % checks.integer("heads_devices", heads_devices, least=1):
        raise ValueError(f"heads_devices must divide devices = {devices}, got {heads_devices}")
    arguments: dict[str, Any] = {"query": query, "key": key, "value": value, "bias": bias, "mask": mask, **keywords}
    layouts.refuse_quantised("explain_context_parallel", arguments)
    spec, operands = specify_abstract(**arguments)
    layouts.check_order(order)
    return choose(_sizes(spec, operands), devices, order, Machine.of(machine), heads_devices)


def chosen(arguments: dict[str, Any], layout: layouts.Layout, machine: Machine) -> FormChoice:
    """The form over the axis of a ring, for what a device holds, or with a mesh for whole arrays."""
    layouts.refuse_quantised(layout.function, arguments)
    batch, heads, devices, _ = layout.sizes()
    parts = devices if layout.mesh is None else 1
    spec, operands = specify(**{name: x for name, x in arguments.items() if x is not None}, parts=parts)
    problem = _sizes(spec, operands, parts, *((1, 1) if layout.mesh is None else (batch, heads)))
    return choose(problem, devices, layout.order, machine)


def _sizes(spec: Specification, o: Operands, parts: int = 1, batch_parts: int = 1, head_parts: int = 1) -> Sizes:
    """One device's batch entries and heads, of the whole sequences of which the operands hold one of so many parts."""
    (b, t, n, h), (s, k, v) = o.query.shape, o.value.shape[1:]
    heads = n // head_parts, max(k // head_parts, 1)
    return Sizes(b // batch_parts, parts * t, parts * s, *heads, h, v, o.query.dtype.itemsize, spec)
