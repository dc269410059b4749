"""What follows from a time: throughput, the share of a chip's peak, summaries, pictures, and whether it got worse.

Instructions are those of the mathematics, whatever a kernel spends, by the count of metal-flash-attention
(github.com/philipturner/metal-flash-attention): for each score that counts 2D + 5 forward, 3D + 5 for dQ and 4D + 5 for
dK and dV, where D is the head size and one instruction is one multiply-add of one lane. FLOPs are those of the matrix
products: 4D forward, and 10D backward. Knows rows of `bench_models`; times nothing.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
import math
import pathlib
import statistics
from typing import Any

from jax_mfa.bench_models import FORWARD, STOCK, TRAINING, Problem

LEAST_NOISE = 0.05  # a difference of less is never a regression
_INSTRUCTIONS = {FORWARD: lambda d: 2 * d + 5, TRAINING: lambda d: 9 * d + 15}
_PRODUCTS = {FORWARD: 2, TRAINING: 7}  # matrix products of D multiply-adds for each score


@functools.cache
def chips() -> dict[str, dict[str, Any]]:
    """Apple's chips by the name that Metal gives them; of each the configuration whose figures are public."""
    text = importlib.resources.files("jax_mfa").joinpath("chips.json").read_text(encoding="utf-8")
    return {x["name"]: x for x in json.loads(text)}


def scores(problem: Problem) -> int:
    """Scores that count, over all heads and batch rows."""
    p = problem
    seen = sum(min(t + 1, p.S) for t in range(p.T)) if p.is_causal else p.T * p.S
    return p.B * p.N * seen


def bytes_moved(problem: Problem, kind: str) -> int:
    """Arrays read and written once: of the forward pass those of q, k, v and out; of both passes these three times."""
    p = problem
    size = 4 if p.dtype == "float32" else 2
    return size * p.B * p.H * 2 * (p.T * p.N + p.S * p.K) * (3 if kind == TRAINING else 1)


def figures(problem: Problem, kind: str, seconds: float, chip: str) -> dict[str, float | None]:
    """Tokens, TFLOP and GINSTR a second, and the share of the chip's peak of instructions, where that is known."""
    if kind not in _INSTRUCTIONS:
        return {}
    count = scores(problem)
    ginstr = count * _INSTRUCTIONS[kind](problem.H) / seconds / 1e9
    peak = chips()[chip]["tflops"] * 500 if chip in chips() else None  # a multiply-add is two FLOPs
    return {
        "tokens_per_second": problem.B * problem.T / seconds,
        "tflops": 2 * count * _PRODUCTS[kind] * problem.H / seconds / 1e12,
        "ginstr": ginstr,
        "share": None if peak is None else ginstr / peak,
    }


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """The geometric mean of the speed-up against jax.nn by length, head size and batch, for each pass: lines."""
    lines = []
    for size, what in (("T", "length"), ("H", "head size"), ("B", "batch")):
        for kind in (FORWARD, TRAINING):
            groups: dict[int, list[float]] = {}
            for row in rows:
                if row["kind"] == kind and STOCK in row["ratios"]:
                    groups.setdefault(row["sizes"][size], []).append(row["ratios"][STOCK])
            if len(groups) > 1:
                means = (f"{n}: {statistics.geometric_mean(x):.2f}×" for n, x in sorted(groups.items()))
                lines.append(f"vs jax.nn by {what}, {kind}: {', '.join(means)}")
    return lines


def plot(rows: list[dict[str, Any]], path: pathlib.Path, title: str, chip: str) -> None:
    """Speed-up by length, and a roofline: TFLOP/s by FLOPs for each byte that has to move, under the chip's roof."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    for color, kind in enumerate((FORWARD, TRAINING)):
        of_kind = [r for r in rows if r["kind"] == kind and r.get("figures")]
        look = dict(color=f"C{color}", linestyle="", marker="o", alpha=0.7, label=kind)
        compared = [r for r in of_kind if STOCK in r["ratios"]]
        left.plot([r["sizes"]["T"] for r in compared], [r["ratios"][STOCK] for r in compared], **look)
        right.plot([r["intensity"] for r in of_kind], [r["figures"]["tflops"] for r in of_kind], **look)
    if chip in chips():
        known = chips()[chip]
        x = sorted({r["intensity"] for r in rows if r.get("figures")} | {known["tflops"] * 1e3 / known["gbs"]})
        roof = [min(known["tflops"], known["gbs"] * i / 1e3) for i in x]
        right.plot(x, roof, color="0.4", label=f"{chip}, {known['cores']} cores")
    left.axhline(1, color="0.6", linewidth=1)
    left.set(title="speed-up against jax.nn", xlabel="T", ylabel="times as fast")
    right.set(title="roofline", xlabel="FLOPs a byte", ylabel="TFLOP/s")
    if any(r.get("figures") for r in rows):  # matplotlib has no logarithmic axis without a point
        right.set(xscale="log", yscale="log")
        if any(r.get("figures") and STOCK in r["ratios"] for r in rows):
            left.set(xscale="log")
    for axis in (left, right):
        axis.grid(alpha=0.3)
        axis.legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _read(file: pathlib.Path) -> dict[tuple[str, str, str], list[float]]:
    """Quartiles of the times of our implementation, by problem and pass."""
    content = json.loads(file.read_text(encoding="utf-8"))
    return {
        (r["name"], r["problem"], r["kind"]): r["quartiles"][r["implementation"]]
        for r in content["rows"]
        if r["implementation"] in r["quartiles"]
    }


def compare(old: pathlib.Path, new: pathlib.Path) -> tuple[list[str], bool]:
    """A line for each problem of both files, and whether any got slower beyond noise.

    Noise is the spread between the quartiles of both medians, added, and at least `LEAST_NOISE`.

    Raises:
      ValueError: for a file that `bench --models` or `--preset` did not write, or two without a problem in common.
    """
    found = []
    for file in (old, new):
        try:
            found.append(_read(file))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{file}: expected what `bench --models` writes ({type(error).__name__}: {error})"
            ) from None
    before, after = found
    lines, worse = [], False
    for key in before.keys() & after.keys():
        (low, middle, high), (new_low, new_middle, new_high) = before[key], after[key]
        noise = max((high - low) / middle + (new_high - new_low) / new_middle, LEAST_NOISE)
        change = new_middle / middle
        slower = change > 1 + noise
        worse = worse or slower
        verdict = "REGRESSION" if slower else "faster" if 1 / change > 1 + noise else "same"
        lines.append(f"{' '.join(key)}: {change:.2f} × the time, noise {noise:.0%}: {verdict}")
    if not lines:
        raise ValueError(f"{old} and {new} have no problem in common")
    missing = len(before.keys() ^ after.keys())
    if missing:
        lines.append(f"{missing} problems are in one of the files only")
    return sorted(lines), worse


def quartiles(times: list[float]) -> list[float]:
    """Of a few times or many; the middle one is the median."""
    if len(times) == 1:
        return times * 3
    return statistics.quantiles(times, n=4, method="inclusive")


def intensity(problem: Problem, kind: str) -> float:
    """FLOPs for each byte that has to move."""
    flops = 2 * scores(problem) * _PRODUCTS.get(kind, math.nan) * problem.H
    return flops / bytes_moved(problem, kind)
