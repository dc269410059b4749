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

from jax_mfa import metal
from jax_mfa.arguments import specify_abstract
from jax_mfa.cli.bench_candidates import arguments
from jax_mfa.cli.bench_problems import DECODE, FORWARD, TRAINING, Problem
from jax_mfa.metal.plan import Plan

_PASSES = {FORWARD: ("forward",), DECODE: ("forward",), TRAINING: ("forward", "backward")}
Shares = Callable[[Plan], dict[str, float]]


def predictor(module: str) -> Shares:
    """`matrix_shares` of a module: by name the share of cycles in the matrix unit, of kernels that it can predict."""
    try:
        shares: Shares = importlib.import_module(module).matrix_shares
    except (ImportError, AttributeError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return shares


def predicted(shares: Shares, problem: Problem, kind: str) -> dict[str, float]:
    """The share of each kernel of a pass."""
    abstract = specify_abstract(**arguments(problem))
    passes = () if metal.lacking(*abstract) else _PASSES.get(kind, ())
    plans = [metal.plan_of(*abstract, of_pass, "staged") for of_pass in passes]
    return {name: share for plan in plans for name, share in shares(plan).items()}


def lines(rows: list[dict[str, Any]]) -> list[str]:
    """What was predicted of the problems of rows."""
    known = [r for r in rows if r.get("predicted")]
    heading = "Predicted for an M1 from public figures, never seen on Apple hardware: cycles in the matrix unit"
    each = lambda r: ", ".join(f"{name} {share:.0%}" for name, share in r["predicted"].items())
    return ["", heading, *(f"{r['problem']} {r['kind']}: {each(r)}" for r in known)] if known else []
