"""What attention over several devices costs, on paper: bytes sent, memory, arithmetic, and time from these.

All counts are for one device and one call. `python -m jax_mfa bench --devices` prints them beside what was measured.
"""

from __future__ import annotations

import dataclasses
import math

from jax_mfa.context_parallel.ring import Ring, Schedule
from jax_mfa.problem import Specification

ACCUMULATOR = 4  # bytes of a float32


@dataclasses.dataclass(frozen=True)
class Problem:
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
        left, right = self.spec.band
        t, s = self.rows, self.columns
        inside = lambda d: _sum_of_minima(t, s, d)  # columns before position t + d, over all rows
        before = 0 if left is None else inside(-left)
        until = t * s if right is None else inside(right + 1)
        return max(until - before, 0) / max(t * s, 1)

    @property
    def forward_operations(self) -> float:
        """Of all devices together: two for each multiply-add of the two products."""
        return (
            2.0 * self.batch * self.heads * self.rows * self.columns * (self.head_size + self.value_size) * self.visible
        )

    @property
    def backward_operations(self) -> float:
        """As `blockwise` does it: five products."""
        scale = (3 * self.head_size + 2 * self.value_size) / (self.head_size + self.value_size)
        return self.forward_operations * scale


def _sum_of_minima(rows: int, columns: int, shift: int) -> int:
    """Σ over t < rows of t + shift, kept within 0..columns."""
    first = min(max(-shift, 0), rows)  # rows before see none
    full = min(max(columns - shift, first), rows)  # rows from there on see all
    count = full - first
    return count * (first + shift) + count * (count - 1) // 2 + (rows - full) * columns


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one device sends, keeps and computes.

    Attributes:
      forward_bytes, backward_bytes: sent.
      forward_memory, backward_memory: bytes that are kept in a pass forward, and forward and back: arguments, results,
        what arrives and float32 sums, and the float32 layouts of `blockwise`; its tiles of scores come on top.
      steps: stops of the keys; 1 without a ring.
      balance: how much longer the busiest device of a step computes than the mean of all.
    """

    forward_bytes: float
    backward_bytes: float
    forward_memory: float
    backward_memory: float
    steps: int
    balance: float


def cost(problem: Problem, ring_devices: int, heads_devices: int = 1, order: str = "contiguous") -> Cost:
    """Of the ring (heads_devices = 1), the exchange of heads (ring_devices = 1), or both."""
    p, n, u = problem, ring_devices, heads_devices
    rows, columns = p.batch * p.rows / (n * u), p.batch * p.columns / (n * u)  # of a device
    query, out = (rows * p.heads * size * p.itemsize for size in (p.head_size, p.value_size))
    keys = columns * p.key_heads * (p.head_size + p.value_size) * p.itemsize
    arguments = query + keys + out
    exchanged = exchanged_lse = 0.0
    if u > 1:
        keys *= max(u / max(p.key_heads, 1), 1)  # fewer heads than devices are sent more than once
        exchanged = (query + keys + out) * (u - 1) / u
        exchanged_lse = ACCUMULATOR * rows * p.heads * (u - 1) / u  # nobody asks for its gradient, as a rule
    schedule = _schedule(p, n, u, order)
    travelling = keys * schedule.permutes
    wide = ACCUMULATOR / p.itemsize
    sums = wide * keys * passengers(schedule, n)
    row_sums = ACCUMULATOR * rows * p.heads
    layouts = wide * (query + keys + out)
    # in float32 an exchange writes the layout that is computed with
    copies = 0 if u == 1 else out if wide == 1 else query + keys + out
    ahead = behind = 0.0
    if n > 1:  # what is held and what arrives, and sums
        ahead = 2 * keys + wide * out + layouts / (2 if order == "zigzag" else 1)
        behind = 2 * keys + 3 * wide * keys + wide * query + layouts
    else:
        ahead, behind = layouts, 2 * layouts
    return Cost(
        forward_bytes=exchanged + exchanged_lse + travelling,
        backward_bytes=exchanged + travelling + sums,
        forward_memory=arguments + copies + ahead + 2 * row_sums,
        backward_memory=2 * arguments + 2 * copies + behind + 4 * row_sums,
        steps=schedule.hops + 1,
        balance=_balance(p, n, schedule, order),
    )


def passengers(schedule: Schedule, devices: int) -> int:
    """How often the sums of gradients are sent in the backward pass."""
    hops = schedule.hops
    way_home = int((schedule.start + hops) % devices != 0)
    return (hops if hops < 2 else hops + 1) + way_home


def _schedule(p: Problem, devices: int, heads_devices: int, order: str) -> Schedule:
    if devices == 1:
        return Schedule(0, 0)
    return Ring(p.spec, None, devices, order).schedule(p.rows // devices, p.columns // devices)


def _balance(p: Problem, devices: int, schedule: Schedule, order: str) -> float:
    """Steps of the busiest device over the mean; causality alone is uneven."""
    if devices == 1 or order == "zigzag" or p.spec.band[1] is None:
        return 1.0
    # at each step some device computes all of its scores, but for the first, where all see half of theirs
    return (schedule.hops + 0.5) / max(p.visible * devices, 1e-9)


@dataclasses.dataclass(frozen=True)
class Machine:
    """What a time on paper depends on. The figures are assumptions, not measurements.

    Attributes:
      operations: per second that attention reaches on one device.
      bytes_per_second: that one device sends while it receives as many.
      latency: seconds of a message.
    """

    operations: float = 1e13
    bytes_per_second: float = 1.25e9
    latency: float = 1e-4


def seconds(
    problem: Problem, cost: Cost, devices: int, exchanges: bool, machine: Machine, backward: bool = False
) -> float:
    """Time of one pass: what the ring sends is hidden behind arithmetic, an exchange of heads is not."""
    work = problem.backward_operations if backward else problem.forward_operations
    compute = work / devices * cost.balance / machine.operations
    sent = cost.backward_bytes if backward else cost.forward_bytes
    messages = (cost.steps - 1 + 4 * exchanges) * machine.latency
    transfer = sent / machine.bytes_per_second + messages
    if exchanges:
        return compute + transfer
    return max(compute, transfer) + (compute / cost.steps if transfer > compute else 0)


def undivided(heads: int, key_heads: int, devices: int) -> str:
    """Why heads cannot be exchanged over so many devices; empty where they can."""
    if heads % devices:
        return f"{devices} devices do not divide N = {heads} heads"
    if key_heads % devices and devices % key_heads:
        return f"{devices} devices neither divide K = {key_heads} key heads nor are a multiple of them"
    return ""


def human(size: float) -> str:
    """Bytes for people, decimal."""
    unit = 0 if size < 1 else min(int(math.log10(size)) // 3, 4)
    return f"{size / 1000**unit:.3g} {('B', 'kB', 'MB', 'GB', 'TB')[unit]}"
