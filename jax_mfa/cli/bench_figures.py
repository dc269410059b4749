"""What follows from a time: throughput, the share of a chip's peak, summaries, pictures, and whether it got worse.

Instructions are those of the mathematics, whatever a kernel spends, by the count of metal-flash-attention
(github.com/philipturner/metal-flash-attention): for each score that counts 2D + 5 forward, 3D + 5 for dQ and 4D + 5 for
dK and dV, where D is the head size and one instruction is one multiply-add of one lane. FLOPs are those of the matrix
products: 4D forward, and 10D backward. Knows rows of `bench_models`; times nothing.
"""

from __future__ import annotations

import functools
import importlib.resources
import itertools
import json
import math
import pathlib
import statistics
from collections.abc import Callable
from typing import Any

from jax_mfa.cli.bench_models import STOCK
from jax_mfa.cli.bench_problems import DECODE, FORWARD, TANGENT, TRAINING, Problem

LEAST_NOISE = 0.05  # a difference of less is never a regression
_INSTRUCTIONS = {FORWARD: (2, 5), DECODE: (2, 5), TRAINING: (9, 15)}  # for each score a D + b
_PRODUCTS = {FORWARD: 2, DECODE: 2, TRAINING: 7}  # matrix products of D multiply-adds for each score


@functools.cache
def chips() -> dict[str, dict[str, Any]]:
    """Apple's chips by the name that Metal gives them; of each the configuration whose figures are public."""
    text = importlib.resources.files("jax_mfa.cli").joinpath("chips.json").read_text(encoding="utf-8")
    return {x["name"]: x for x in json.loads(text)}


def scores(problem: Problem) -> int:
    """Scores that count, over all heads and batch rows."""
    begin, end = problem.columns
    return problem.N * int((end - begin).clip(0).sum(dtype="int64"))


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
    each, beside = _INSTRUCTIONS[kind]
    ginstr = count * (each * problem.H + beside) / seconds / 1e9
    peak = chips()[chip]["tflops"] * 500 if chip in chips() else None  # a multiply-add is two FLOPs
    return {
        "tokens_per_second": problem.B * problem.T / seconds,
        "tflops": 2 * count * _PRODUCTS[kind] * problem.H / seconds / 1e12,
        "ginstr": ginstr,
        "share": None if peak is None else ginstr / peak,
    }


# what a sweep goes through, and how it is read from the sizes of a row
_AXES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "length": lambda x: x["S"],
    "head size": lambda x: x["H"],
    "batch": lambda x: x["B"],
    "heads": lambda x: f"{x['N']}" if x["N"] == x["K"] else f"{x['N']}/{x['K']}",
    "dtype": lambda x: x["dtype"],
    "mask": lambda x: x["mask"],
}


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """The geometric mean of the speed-up against jax.nn by what differs among the rows, for each pass: lines."""
    lines = []
    for (axis, of), kind in itertools.product(_AXES.items(), _INSTRUCTIONS):
        groups: dict[Any, list[float]] = {}
        for row in rows:
            if row["kind"] == kind and STOCK in row["ratios"]:
                groups.setdefault(of(row["sizes"]), []).append(row["ratios"][STOCK])
        if len(groups) > 1:
            order = sorted(groups) if all(isinstance(x, int) for x in groups) else groups
            means = (f"{x}: {statistics.geometric_mean(groups[x]):.2f}x" for x in order)
            lines.append(f"vs jax.nn by {axis}, {kind}: {', '.join(means)}")
    return lines


_STYLES = {FORWARD: ("-", "o"), TRAINING: ("--", "s"), DECODE: (":", "^"), TANGENT: ("-.", "v")}


def _lines(rows: list[dict[str, Any]], field: str, name: str) -> list[list[tuple[int, float]]]:
    """Lengths, with what a field of the rows says of a candidate; points of a line differ in their length only."""
    found: dict[tuple[Any, ...], list[tuple[int, float]]] = {}
    for row in rows:
        y = row[field].get(name)
        if y is not None:
            alike = {size: x for size, x in row["sizes"].items() if size not in ("T", "S", "passes")}
            found.setdefault(tuple(alike.values()), []).append((row["sizes"]["S"], y))
    return [sorted(points) for points in found.values()]


def plot(rows: list[dict[str, Any]], path: pathlib.Path, title: str, chip: str) -> None:
    """By length: time, temporary memory and speed-up; and a roofline.

    That is TFLOP/s by FLOPs for each byte that has to move, under the chip's roof.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot, ticker

    figure, ((times, memory), (speed, roof)) = pyplot.subplots(2, 2, figsize=(12, 9), layout="constrained")
    names = list(dict.fromkeys(name for r in rows for name in r["seconds"]))
    for name, kind in itertools.product(names, _STYLES):
        of_kind = [r for r in rows if r["kind"] == kind]
        line, marker = _STYLES[kind]
        look: dict[str, Any] = dict(color=f"C{names.index(name)}", marker=marker, markersize=4, alpha=0.7)
        for i, points in enumerate(_lines(of_kind, "seconds", name)):
            x, y = zip(*points)
            label = f"{name}, {kind}" if i == 0 else None
            times.plot(x, [1e3 * seconds for seconds in y], line, **look, label=label)
        for points in _lines(of_kind, "temporary_bytes", name):
            x, y = zip(*points)
            memory.plot(x, [max(size, 1) / 2**20 for size in y], line, **look)
        if any(r["implementation"] == name for r in of_kind):
            for points in _lines(of_kind, "ratios", STOCK):
                speed.plot(*zip(*points), line, **look)
            counted = [r for r in of_kind if r.get("figures")]
            roof.plot(
                [r["intensity"] for r in counted], [r["figures"]["tflops"] for r in counted], linestyle="", **look
            )
    if chip in chips():
        known = chips()[chip]
        bounds = sorted({r["intensity"] for r in rows if r.get("figures")} | {known["tflops"] * 1e3 / known["gbs"]})
        height = [min(known["tflops"], known["gbs"] * i / 1e3) for i in bounds]
        roof.plot(bounds, height, color="0.4", label=f"{chip}, {known['cores']} cores")
        roof.legend()
    times.set(title="time", ylabel="ms")
    memory.set(title="temporary memory", ylabel="MiB")
    speed.set(title=f"speed-up against {STOCK}", ylabel="times as fast")
    roof.set(title="roofline", xlabel="FLOPs a byte", ylabel="TFLOP/s")
    lengths = sorted({r["sizes"]["S"] for r in rows if r["kind"] in _STYLES})
    for axis in (times, memory, speed):
        axis.set_xlabel("length")
        if axis.lines:  # matplotlib has no logarithmic axis without a point
            axis.set_xscale("log", base=2)
            axis.minorticks_off()
            if len(lengths) <= 10:
                axis.set_xticks(lengths, [str(x) for x in lengths])
    plain = [(axis, "y") for axis in (times, memory) if axis.lines]
    plain += [(roof, side) for side in "xy" if any(len(x.get_xdata()) for x in roof.lines)]
    for axis, side in plain:
        axis.set(**{f"{side}scale": "log"})
        ticks = getattr(axis, f"{side}axis")
        ticks.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        ticks.set_major_formatter("{x:g}")
        axis.minorticks_off()
    speed.axhline(1, color="0.6", linewidth=1)
    if times.lines:
        times.legend(fontsize="small")
    for axis in figure.axes:
        axis.grid(alpha=0.3)
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
      ValueError: for a file that `bench` did not write, or two without a problem in common.
    """
    found = []
    for file in (old, new):
        try:
            found.append(_read(file))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{file}: expected what `bench` writes ({type(error).__name__}: {error})") from None
    before, after = found
    lines, worse = [], False
    for key in before.keys() & after.keys():
        (low, middle, high), (new_low, new_middle, new_high) = before[key], after[key]
        noise = max((high - low) / middle + (new_high - new_low) / new_middle, LEAST_NOISE)
        change = new_middle / middle
        slower = change > 1 + noise
        worse = worse or slower
        verdict = "REGRESSION" if slower else "faster" if 1 / change > 1 + noise else "same"
        lines.append(f"{' '.join(filter(None, key))}: {change:.2f} x the time, noise {noise:.0%}: {verdict}")
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
