"""`python -m jax_mfa bench --devices`: attention over several devices of this machine, by form, beside the formulas.

Time on the forced devices of one CPU says little of a network: they share its cores. Bytes sent and memory are those of
the program, so they are the same anywhere. Bytes sent are counted in the traced program, loops and all; memory is what
the compiler reports for one device: arguments, results and temporaries.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_mfa.api import dot_product_attention
from jax_mfa.cli import bench_candidates
from jax_mfa.cli.bench_problems import TRAINING, Problem
from jax_mfa.cli.command_line import cell, named, one_line, table_lines
from jax_mfa.context_parallel import costs
from jax_mfa.context_parallel.api import context_parallel_attention
from jax_mfa.context_parallel.layout import Order
from jax_mfa.problem import Specification
from jax_mfa.tuning import timing

Row = dict[str, Any]
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


def bytes_sent(jaxpr: Any, devices: int) -> float:
    """What a device sends in a traced program, by permutations and exchanges, in loops as often as they turn."""
    is_program = lambda x: hasattr(x, "eqns") or hasattr(getattr(x, "jaxpr", None), "eqns")
    total = 0.0
    for e in jaxpr.eqns:
        times = e.params.get("length", 1) if e.primitive.name == "scan" else 1
        within = filter(is_program, jax.tree.leaves(e.params, is_leaf=is_program))
        total += times * sum(bytes_sent(getattr(x, "jaxpr", x), devices) for x in within)
        share = {"ppermute": 1.0, "all_to_all": (devices - 1) / devices}.get(e.primitive.name, 0.0)
        total += share * sum(x.aval.size * x.aval.dtype.itemsize for x in e.invars if share)
    return total


def cases(problems: list[Problem], devices: list[int]) -> list[tuple[Problem, int, str, str]]:
    """Problem, number of devices, pass and form of each row; one device attends alone."""
    pairs = itertools.product(problems, devices)
    return [(p, n, kind, form) for p, n in pairs for kind in p.passes for form in (FORMS if n > 1 else ["alone"])]


def measure(cases: Iterable[tuple[Problem, int, str, str]], implementation: str, rounds: int) -> Iterator[Row]:
    """One row for each of the cases."""
    for p, n, kind, form in cases:
        row: Row = dict(length=p.S, problem=str(p), devices=n, form=form, kind=kind, failure="", seconds=None)
        row |= dict.fromkeys(("bytes_sent", "memory", "bytes_formula", "memory_formula"))
        try:
            row |= _measured(p, n, kind, form, implementation, rounds)
        except Exception as error:  # list any reason that keeps a form from running
            row["failure"] = named(error)
        yield row


def _measured(p: Problem, devices: int, kind: str, form: str, implementation: str, rounds: int) -> Row:
    mesh = Mesh(np.array(jax.devices()[:devices]), ("sequence",))
    split = NamedSharding(mesh, PartitionSpec(None, "sequence"))
    arrays = [jax.device_put(x, split) for x in bench_candidates.arrays(p)]
    name, order = FORMS.get(form, (form, "contiguous"))
    attention: Callable[..., Any] = dot_product_attention
    if form in FORMS:
        place: Any = dict(mesh=mesh, axis_name="sequence", form=name, order=order)
        attention = functools.partial(context_parallel_attention, **place)
    attention = functools.partial(attention, is_causal=True, implementation=implementation)
    run = bench_candidates.of_pass(kind, attention)
    program = jax.jit(run).lower(*arrays).compile()
    analysis: Any = program.memory_analysis()
    parts = ("argument", "output", "temp")
    sizes = (p.B, p.T, p.S, p.N, p.K, p.H, p.H, jnp.dtype(p.dtype).itemsize)
    ring, heads = (1, devices) if name == "ulysses" else (devices, 1)
    cost = costs.cost(costs.Sizes(*sizes, Specification(is_causal=True)), ring, heads, order)
    training = kind == TRAINING
    return dict(
        seconds=min(timing.timed({"": functools.partial(timing.call, program, arrays)}, rounds, 0.0)[""]),
        bytes_sent=bytes_sent(jax.make_jaxpr(run)(*arrays).jaxpr, devices),
        bytes_formula=cost.forward_bytes + (cost.backward_bytes if training else 0),
        memory=analysis and sum(getattr(analysis, f"{x}_size_in_bytes") for x in parts),
        memory_formula=cost.backward_memory if training else cost.forward_memory,
    )


def report(rows: list[Row]) -> list[str]:
    """The rows as a Markdown table, and of those that could not run a line each."""
    size = lambda name: lambda r: None if r[name] is None else costs.human(r[name])
    columns: dict[str, Callable[[Row], str | None]] = {
        "problem": lambda r: r["problem"],
        "devices": lambda r: str(r["devices"]),
        "form": lambda r: r["form"],
        "pass": lambda r: r["kind"],
        "time": lambda r: cell("{:.1f} ms", r["seconds"], 1e-3),
        "sent by a device": size("bytes_sent"),
        "sent, by formula": size("bytes_formula"),
        "memory of a device": size("memory"),
        "memory, by formula": size("memory_formula"),
    }
    where = lambda r: f"{r['form']} did not run {r['problem']} over {r['devices']} devices, {r['kind']}"
    failures = [f"{where(r)}: {one_line(r['failure'])}" for r in rows if r["failure"]]
    return [*table_lines(columns, rows), "", *failures]
