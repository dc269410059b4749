"""`python -m jax_mfa bench --devices`: attention over several devices of this machine, by form, beside the formulas.

Time on the forced devices of one CPU says little of a network: they share its cores. Bytes sent and memory are those of
the program, so they are the same anywhere. Bytes sent are counted in the traced program, loops and all; memory is what
the compiler reports for one device: arguments, results and temporaries.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_mfa import bench_models
from jax_mfa.api import dot_product_attention
from jax_mfa.bench_models import BOTH, TRAINING
from jax_mfa.context_parallel import costs
from jax_mfa.context_parallel.api import context_parallel_attention
from jax_mfa.context_parallel.order import Order
from jax_mfa.specification import Specification

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


def measure(options: argparse.Namespace, progress: Any) -> Iterator[dict[str, Any]]:
    """One row for each length, number of devices, form and pass."""
    heads, key_heads = options.heads, options.key_value_heads or options.heads
    dtype = jnp.dtype(options.dtype)
    for length, devices, kind in itertools.product(options.lengths, options.devices, BOTH):
        mesh = Mesh(np.array(jax.devices()[:devices]), ("sequence",))
        split = NamedSharding(mesh, PartitionSpec(None, "sequence"))
        shape = lambda n, length=length: (options.batch, length, n, options.head_size)
        problem = costs.Problem(
            *(options.batch, length, length, heads, key_heads, options.head_size, options.head_size),
            dtype.itemsize,
            Specification(is_causal=True),
        )
        for form in programs(devices):
            row = dict(length=length, devices=devices, form=form, kind=kind, failure="")
            row |= dict(seconds=None, bytes_sent=None, memory=None, bytes_formula=None, memory_formula=None)
            try:
                arrays = [
                    jax.device_put(jax.random.normal(key, shape(n), dtype), split)
                    for key, n in zip(jax.random.split(jax.random.key(length), 4), (heads, key_heads, key_heads, heads))
                ]
                row |= _row(options, problem, mesh, form, kind, arrays)
            except Exception as error:  # whatever keeps a form from running belongs in the table
                row["failure"] = f"{type(error).__name__}: {error}"
            progress()
            yield row


def _row(
    options: argparse.Namespace, problem: costs.Problem, mesh: Any, form: str, kind: str, arrays: Any
) -> dict[str, Any]:
    devices = mesh.size
    common: dict[str, Any] = {"is_causal": True, "implementation": options.implementations[0]}
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
    call: dict[str, Callable[[], Any]] = {"": functools.partial(bench_models.call, program, arrays)}
    return dict(
        seconds=min(bench_models.timed(call, options.rounds, 0.0)[""]),
        bytes_sent=sent,
        bytes_formula=found.forward_bytes + (found.backward_bytes if kind == TRAINING else 0),
        memory=memory,
        memory_formula=found.backward_memory if kind == TRAINING else found.forward_memory,
    )


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    lines = [
        "| T = S | devices | form | pass | time | sent by a device | by formula | memory of a device | by formula |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        cells = [str(r[name]) for name in ("length", "devices", "form", "kind")]
        cells.append("–" if r["seconds"] is None else f"{r['seconds'] * 1e3:.1f} ms")
        for name in ("bytes_sent", "bytes_formula", "memory", "memory_formula"):
            cells.append("–" if r[name] is None else costs.human(r[name]))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def failures(rows: list[dict[str, Any]]) -> list[str]:
    """What could not run, and why: a line for each."""
    where = lambda r: f"{r['form']} did not run {r['length']} over {r['devices']} devices, {r['kind']}"
    return [f"{where(r)}: {' '.join(r['failure'].split())[:300]}" for r in rows if r["failure"]]
