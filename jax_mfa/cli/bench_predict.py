"""What a model of Apple's chips predicts for problems of `bench`: times of the kernels that multiply, not measured.

The model is a module that the user names, since it takes a compiler: its `matrix_shares(plan, variant)` says of each
kernel that it can predict in which share of the time the matrix unit works, and the model's own relative error. Here
that becomes time: multiply-adds of the tiles in which a pair counts, on as many cores as have threadgroups. Launches,
waiting for memory and kernels without a matrix product are not in it. Knows plans and chips; no compiler.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from jax_mfa import choice, metal
from jax_mfa.arguments import specify_abstract
from jax_mfa.cli import bench_candidates, bench_report
from jax_mfa.cli.bench_problems import FORWARD, TRAINING, Problem
from jax_mfa.cli.command_line import table_lines
from jax_mfa.metal.plan import Dispatch, Plan

Shares = Callable[[Plan, str], dict[str, tuple[float, float]]]
BUSY = 12  # simdgroups of a core: no published row says what becomes of fewer
UNIT = 17 / 16  # cycles of a product in the matrix unit, over those of its multiply-adds: 100 % is no more than that
_PASSES = {FORWARD: ("forward",), TRAINING: ("forward", "backward")}
# kernel → multiply-adds for each score and channel, of so many slices or parts; and whether its rows are queries
_WORK: dict[str, tuple[Callable[[int], int], bool]] = {
    "attention_forward": (lambda slices: slices + 1, True),
    "attention_d_query": (lambda slices: 2 * slices + 1, True),
    "attention_d_key_value": (lambda parts: 2 * max(parts, 1) + 2, False),
}
CHIPS = [name.removeprefix("Apple ") for name in bench_report.CHIPS]  # as options name them
HEADING = (
    "NOT MEASURED: predicted from public figures, never seen on Apple hardware. Milliseconds of the kernels that "
    "multiply, +- the model's mean error on published times of other kernels that it was not fitted to; then TFLOP/s."
)


def model(module: str) -> Shares:
    """`matrix_shares` of a module."""
    try:
        return importlib.import_module(module).matrix_shares
    except (ImportError, AttributeError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def tiled(problem: Problem, rows: int, columns: int) -> int:
    """Scores of all tiles of so many queries and keys in which a pair counts."""
    begin, end = problem.columns
    starts = np.arange(0, problem.T, rows)
    first = np.minimum.reduceat(begin, starts, axis=1) // columns
    last = -(-np.maximum.reduceat(end, starts, axis=1) // columns)
    return problem.N * rows * columns * int((last - first).clip(0).sum(dtype="int64"))


def _seconds(problem: Problem, dispatch: Dispatch, share: float, chip: dict[str, Any]) -> float:
    function, _, blocks, simdgroups, others, *rest = dispatch.kernel.template
    work, rows_are_queries = _WORK[function]
    own = blocks * simdgroups * 8 // (1 if rows_are_queries or not rest[-1] else 2)  # two for the same keys
    scores = tiled(problem, *((own, others) if rows_are_queries else (others, own)))
    groups = math.prod(dispatch.threadgroups)
    idle = -(-groups // chip["cores"]) * chip["cores"] / groups  # cores without a threadgroup in the last turn
    flops = 2 * scores * work(rest[-1]) * problem.H
    return float(flops / (chip["tflops"] * 1e12) * UNIT / share * idle)


def predicted(shares: Shares, problem: Problem, kind: str, name: str) -> tuple[float, float] | None:
    """Seconds of a pass on a chip, and their relative error; None where a kernel cannot be predicted."""
    chip = bench_report.CHIPS[f"Apple {name}"]
    abstract = specify_abstract(**bench_candidates.arguments(problem))
    if kind not in _PASSES or choice.lacking(*abstract):
        return None
    variant = "direct" if chip["family"] >= 9 else "staged"
    plans = [metal.plan_of(*abstract, of_pass, variant) for of_pass in _PASSES[kind]]
    seconds = error = 0.0
    for plan in plans:
        known = shares(plan, variant)
        for dispatch in plan.dispatches:
            function = dispatch.kernel.template[0]
            if function in ("attention_delta", "attention_tile_lists"):
                continue
            simdgroups = math.prod(dispatch.threadgroups) * dispatch.kernel.threads // 32
            if function not in _WORK or function not in known or simdgroups < BUSY * chip["cores"]:
                return None
            share, relative = known[function]
            time = _seconds(problem, dispatch, share, chip)
            seconds, error = seconds + time, error + relative * time
    return seconds, error / seconds


def report(shares: Shares, problems: Sequence[Problem], chips: Sequence[str]) -> Iterator[str]:
    """A table of problems and passes by chip."""
    passes = [(p, kind) for p in problems for kind in p.passes if kind in _PASSES]

    def cell(row: tuple[Problem, str], name: str) -> str | None:
        found = predicted(shares, *row, name)
        if found is None:
            return None
        seconds, error = found
        tflops = bench_report.figures(*row, seconds, "")["tflops"]
        return f"{seconds * 1e3:.3g} +- {error * seconds * 1e3:.2g} ms, {tflops:.3g}"

    columns = {"model": lambda row: row[0].name, "problem": lambda row: str(row[0]), "pass": lambda row: row[1]}
    yield from (HEADING, "")
    yield from table_lines({**columns, **{name: functools.partial(cell, name=name) for name in chips}}, passes)
    yield ""
    yield "On M5 without its matrix units, which the kernels do not use."
    yield f"-: a kernel cannot be predicted, or has fewer than {BUSY} simdgroups for each core."
