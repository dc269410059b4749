"""`python -m jax_mfa bench --devices`: attention over several devices of this machine, by form, beside the formulas.

Time on the forced devices of one CPU says little of a network: they share its cores. Bytes sent and memory are those of
the program, so they are the same anywhere. Bytes sent are counted in the traced program, loops and all; memory is what
the compiler reports for one device: arguments, results and temporaries.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_mfa.api import dot_product_attention
from jax_mfa.cli import bench_models
from jax_mfa.cli.bench_problems import TRAINING, Problem
from jax_mfa.context_parallel import costs
from jax_mfa.context_parallel.api import context_parallel_attention
from jax_mfa.context_parallel.order import Order
from jax_mfa.problem import Specification
from jax_mfa.tuning import timing

FORMS: dict[str, tuple[Any, Order]] = {
    "ring": ("ring", "contiguous"),
    "ring, zigzag": ("ring", "zigzag"),
    "ulysses": ("ulysses", "contiguous"),
}


def force_devices(count: int) -> None:
    """So many devices of the CPU, where JAX has not begun to look for them."""
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_force_host_platform_device_count" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={count}".strip()


def programs(devices: int) -> list[str]:
    """The forms over so many devices; one device attends alone."""
    return ["alone"] if devices == 1 else list(FORMS)


def bytes_sent(jaxpr: Any, devices: int) -> float:
    """What a device sends in a traced program, by permutations and exchanges, in loops as often as they turn."""
    total = 0.0
    for e in jaxpr.eqns:
        times = e.params.get("length", 1) if e.primitive.name == "scan" else 1
        for x in jax.tree.leaves(e.params, is_leaf=_is_program):
            if _is_program(x):
                total += times * bytes_sent(getattr(x, "jaxpr", x), devices)
        size = sum(x.aval.size * x.aval.dtype.itemsize for x in e.invars if hasattr(x.aval, "dtype"))
        if e.primitive.name == "ppermute":
            total += size
        elif e.primitive.name == "all_to_all":
            total += size * (devices - 1) / devices
    return total


def _is_program(x: Any) -> bool:
    return hasattr(x, "eqns") or hasattr(getattr(x, "jaxpr", None), "eqns")


def measure(problems: list[Problem], devices: list[int], implementation: str, rounds: int) -> Iterator[dict[str, Any]]:
    """One row for each problem, number of devices, pass and form."""
    for p, n in itertools.product(problems, devices):
        mesh = Mesh(np.array(jax.devices()[:n]), ("sequence",))
        split = NamedSharding(mesh, PartitionSpec(None, "sequence"))
        for kind, form in itertools.product(p.passes, programs(n)):
            row = dict(length=p.S, problem=str(p), devices=n, form=form, kind=kind, failure="")
            row |= dict(seconds=None, bytes_sent=None, memory=None, bytes_formula=None, memory_formula=None)
            try:
                arrays = [jax.device_put(x, split) for x in bench_models.arrays(p)]
                row |= _row(p, mesh, form, kind, arrays, implementation, rounds)
            except Exception as error:  # whatever keeps a form from running belongs in the table
                row["failure"] = f"{type(error).__name__}: {error}"
            yield row


def _row(
    p: Problem, mesh: Mesh, form: str, kind: str, arrays: list[jax.Array], implementation: str, rounds: int
) -> dict[str, Any]:
    sizes = (p.B, p.T, p.S, p.N, p.K, p.H, p.H, jnp.dtype(p.dtype).itemsize)
    problem = costs.Problem(*sizes, Specification(is_causal=True))
    devices = mesh.size
    common: dict[str, Any] = {"is_causal": True, "implementation": implementation}
    attention: Callable[..., Any] = functools.partial(dot_product_attention, **common)
    ring, heads, ordered = 1, 1, "contiguous"
    if form != "alone":
        name, order = FORMS[form]
        attention = functools.partial(
            context_parallel_attention, mesh=mesh, axis_name="sequence", form=name, order=order, **common
        )
        ring, heads, ordered = (1, devices, order) if name == "ulysses" else (devices, 1, order)
    found = costs.cost(problem, ring, heads, ordered)
    run = bench_models.PROGRAMS[kind](attention)
    sent = bytes_sent(jax.make_jaxpr(run)(*arrays).jaxpr, devices)
    program = jax.jit(run).lower(*arrays).compile()
    analysis: Any = program.memory_analysis()
    memory = None
    if analysis is not None:
        memory = sum(getattr(analysis, f"{x}_size_in_bytes") for x in ("argument", "output", "temp"))
    call: dict[str, Callable[[], Any]] = {"": functools.partial(timing.call, program, arrays)}
    return dict(
        seconds=min(timing.timed(call, rounds, 0.0)[""]),
        bytes_sent=sent,
        bytes_formula=found.forward_bytes + (found.backward_bytes if kind == TRAINING else 0),
        memory=memory,
        memory_formula=found.backward_memory if kind == TRAINING else found.forward_memory,
    )


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    lines = [
        "| problem | devices | form | pass | time | sent by a device | by formula | memory of a device | by formula |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        cells = [str(r[name]) for name in ("problem", "devices", "form", "kind")]
        cells.append("-" if r["seconds"] is None else f"{r['seconds'] * 1e3:.1f} ms")
        for name in ("bytes_sent", "bytes_formula", "memory", "memory_formula"):
            cells.append("-" if r[name] is None else costs.human(r[name]))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def failures(rows: list[dict[str, Any]]) -> list[str]:
    """What could not run, and why: a line for each."""
    where = lambda r: f"{r['form']} did not run {r['problem']} over {r['devices']} devices, {r['kind']}"
    return [f"{where(r)}: {' '.join(r['failure'].split())[:300]}" for r in rows if r["failure"]]
