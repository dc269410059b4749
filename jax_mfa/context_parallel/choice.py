"""Which form attention over several devices takes, and why."""

from __future__ import annotations

import dataclasses
from typing import Literal, TypeAlias

from jax_mfa.context_parallel import costs
from jax_mfa.context_parallel.costs import Machine, Problem

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
