"""What `python -m jax_mfa bench --predict` says of the Metal kernels of its problems, without a device.

The prediction is made by a module that the user names, since it takes a compiler; a checkout has one in its tests. It
is for the tiles of an M1, from public figures, and counts instructions of the interior loop: no waiting for memory, no
barriers. Nobody has compared it with Apple hardware. Knows plans; compiles and times nothing.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from typing import Any

from jax_mfa import choice, metal
from jax_mfa.arguments import specify_abstract
from jax_mfa.cli import bench_models
from jax_mfa.cli.bench_problems import DECODE, FORWARD, TRAINING, Problem
from jax_mfa.metal.plan import Plan

_PASSES = {FORWARD: ("forward",), DECODE: ("forward",), TRAINING: ("forward", "backward")}


Shares = Callable[[Plan], dict[str, float]]


def predictor(module: str) -> Shares:
    """`matrix_shares` of a module: of those kernels of a plan that it can predict, the share of cycles in the matrix
    unit, by name. Raises an option's error."""
    try:
        shares: Shares = importlib.import_module(module).matrix_shares
    except (ImportError, AttributeError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return shares


def predict(shares: Shares, problems: list[Problem]) -> dict[tuple[str, str], dict[str, float]]:
    """For each problem and pass the share of each kernel."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for problem in problems:
        abstract = specify_abstract(**bench_models.arguments(problem))
        refused = choice.lacking(*abstract)
        for kind in problem.passes:
            passes = () if refused else _PASSES.get(kind, ())
            plans = (metal.plan_of(*abstract, of_pass, "staged") for of_pass in passes)
            found[str(problem), kind] = {name: share for plan in plans for name, share in shares(plan).items()}
    return found


def lines(rows: list[dict[str, Any]]) -> list[str]:
    """What was predicted of the problems of rows."""
    known = [r for r in rows if r.get("predicted")]
    if not known:
        return []
    named = lambda r: ", ".join(f"{name} {share:.0%}" for name, share in r["predicted"].items())
    return [
        "",
        "Predicted for an M1 from public figures, never seen on Apple hardware: cycles in the matrix unit",
        *(f"{r['problem']} {r['kind']}: {named(r)}" for r in known),
    ]
