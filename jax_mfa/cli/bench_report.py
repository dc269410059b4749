"""What follows from the times of `bench_candidates`: throughput, the share of a chip's peak, tables, summaries, a
picture, and whether it got worse.

Instructions are those of the mathematics, whatever a kernel spends, by the count of metal-flash-attention
(github.com/philipturner/metal-flash-attention): for each score that counts 2D + 5 forward, 3D + 5 for dQ and 4D + 5 for
dK and dV, where D is the head size and one instruction is one multiply-add of one lane. FLOPs are those of the matrix
products: 4D forward, and 10D backward. Knows rows; times nothing.
"""

from __future__ import annotations

import functools
import itertools
import json
import pathlib
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np

from jax_mfa.cli.bench_candidates import MLX, STOCK, TORCH
from jax_mfa.cli.bench_problems import DECODE, FORWARD, TANGENT, TRAINING, Problem
from jax_mfa.cli.command_line import cell, data, named, one_line, table_lines

Row = dict[str, Any]
LEAST_NOISE = 0.05  # smaller differences are never a regression
_INSTRUCTIONS = {FORWARD: (2, 5), DECODE: (2, 5), TRAINING: (9, 15)}  # (a, b): a D + b for each score
_PRODUCTS = {FORWARD: 2, DECODE: 2, TRAINING: 7}  # matrix products of D multiply-adds for each score
# Apple's chips by the name that Metal gives them; of each the configuration whose figures are public
CHIPS: dict[str, dict[str, Any]] = {x["name"]: x for x in data("chips.json")}


# --- figures of a row


def quartiles(times: list[float]) -> list[float]:
    """Of a few times or many; the middle one is the median."""
    return times * 3 if len(times) == 1 else statistics.quantiles(times, n=4, method="inclusive")


def scores(problem: Problem) -> int:
    """Scores that count, over all heads and batch entries."""
    begin, end = problem.columns
    return problem.N * int((end - begin).clip(0).sum(dtype="int64"))


def figures(problem: Problem, kind: str, seconds: float, chip: str) -> dict[str, float | None]:
    """Tokens, TFLOP and GINSTR a second, and the share of the chip's peak of instructions, where that is known."""
    count = scores(problem)
    each, beside = _INSTRUCTIONS[kind]
    ginstr = count * (each * problem.H + beside) / seconds / 1e9
    peak = CHIPS[chip]["tflops"] * 500 if chip in CHIPS else None  # a multiply-add is two FLOPs
    return {
        "tokens_per_second": problem.B * problem.T / seconds,
        "tflops": 2 * count * _PRODUCTS[kind] * problem.H / seconds / 1e12,
        "ginstr": ginstr,
        "share": None if peak is None else ginstr / peak,
    }


def intensity(problem: Problem, kind: str) -> float:
    """FLOPs for each byte that has to move: q, k, v and out once forward, and three times in both passes."""
    p = problem
    size = 4 if p.dtype == "float32" else 2
    moved = size * p.B * p.H * 2 * (p.T * p.N + p.S * p.K) * (3 if kind == TRAINING else 1)
    return 2 * scores(p) * _PRODUCTS[kind] * p.H / moved


# --- text

# figures with a column each: heading and format
_FIGURES = {
    "tokens_per_second": ("tokens/s", "{:.4g}"),
    "tflops": ("TFLOP/s", "{:.4g}"),
    "ginstr": ("GINSTR/s", "{:.4g}"),
    "share": ("of peak", "{:.1%}"),
}


def table(rows: list[Row]) -> list[str]:
    """The rows as a Markdown table; a ratio below 1, where another candidate is faster, is marked."""
    known = dict.fromkeys(name for r in rows for name in (*r["seconds"], *r["failures"]))
    ours = rows[0]["implementation"]
    others = [x for x in dict.fromkeys((STOCK, TORCH, MLX, *known)) if x in known and x != ours]

    def ratio(r: Row, name: str) -> str | None:
        x = r["ratios"].get(name)
        return cell("{:.2f}x" if x is None or x >= 1 else "{:.2f}x (slower)", x)

    def spread(r: Row) -> str | None:
        times = r.get("quartiles", {}).get(ours)
        return times and "{1:.2f} ({0:.2f} to {2:.2f}) ms".format(*(x * 1e3 for x in times))

    figure = lambda r, name, form: cell(form, r.get("figures", {}).get(name))
    memory = lambda r, name: cell("{:.1f} MiB", r["temporary_bytes"].get(name), 2**20) or "-"
    columns: dict[str, Callable[[Row], str | None]] = {
        "model": lambda r: r["name"],
        "problem": lambda r: r["problem"],
        "pass": lambda r: r["kind"],
        "time": lambda r: cell("{:.2f} ms", r["seconds"].get(ours), 1e-3),
        **{f"vs {name}": functools.partial(ratio, name=name) for name in others},
        "median, quartiles": spread,
        **{heading: functools.partial(figure, name=name, form=form) for name, (heading, form) in _FIGURES.items()},
    }
    if STOCK in others:
        columns[f"memory ({STOCK}'s)"] = lambda r: f"{memory(r, ours)} ({memory(r, STOCK)})"
    else:
        columns["memory"] = lambda r: memory(r, ours)
    sometimes_empty = ("model", *(heading for heading, _ in _FIGURES.values()))
    empty = [heading for heading in sometimes_empty if not any(map(columns[heading], rows))]
    return table_lines({heading: cell for heading, cell in columns.items() if heading not in empty}, rows)


def failures(rows: list[Row]) -> list[str]:
    """What could not run, and why: a line for each candidate and reason."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for r in rows:
        for name, why in r["failures"].items():
            reasons.setdefault((name, one_line(why)), []).append(f"{r['problem']} {r['kind']}")
    return [f"{name} did not run {'; '.join(where)}: {why}" for (name, why), where in reasons.items()]


# axes of a sweep, each read from the sizes of a row
_AXES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "length": lambda x: x["S"],
    "head size": lambda x: x["H"],
    "batch": lambda x: x["B"],
    "heads": lambda x: f"{x['N']}" if x["N"] == x["K"] else f"{x['N']}/{x['K']}",
    "dtype": lambda x: x["dtype"],
    "mask": lambda x: x["mask"],
}


def summary(rows: list[Row]) -> list[str]:
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


# --- two files


def _read(file: pathlib.Path) -> dict[tuple[str, str, str], list[float]]:
    """Quartiles of the times of our implementation, by problem and pass."""
    try:
        return {
            (r["name"], r["problem"], r["kind"]): r["quartiles"][r["implementation"]]
            for r in json.loads(file.read_text(encoding="utf-8"))["rows"]
            if r["implementation"] in r["quartiles"]
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file}: expected what `bench` writes ({named(error)})") from None


def compare(old: pathlib.Path, new: pathlib.Path) -> tuple[list[str], bool]:
    """A line for each problem of both files, and whether any got slower beyond noise.

    Noise is the spread between the quartiles of both medians, added, and at least `LEAST_NOISE`.

    Raises:
      ValueError: for a file that `bench` did not write, or two without a problem in common.
    """
    before, after = _read(old), _read(new)
    lines = []
    for key in before.keys() & after.keys():
        (low, middle, high), (new_low, new_middle, new_high) = before[key], after[key]
        noise = max((high - low) / middle + (new_high - new_low) / new_middle, LEAST_NOISE)
        change = new_middle / middle
        verdict = "REGRESSION" if change > 1 + noise else "faster" if 1 / change > 1 + noise else "same"
        lines.append(f"{' '.join(filter(None, key))}: {change:.2f} x the time, noise {noise:.0%}: {verdict}")
    if not lines:
        raise ValueError(f"{old} and {new} have no problem in common")
    worse = any(x.endswith("REGRESSION") for x in lines)
    missing = len(before.keys() ^ after.keys())
    return sorted(lines + [f"{missing} problems are in one of the files only"] * bool(missing)), worse


# --- the picture

_STYLES = {FORWARD: ("-", "o"), TRAINING: ("--", "s"), DECODE: (":", "^"), TANGENT: ("-.", "v")}


def _draw(axis: Any, rows: list[Row], field: str, name: str, unit: float, label: str = "", **look: Any) -> None:
    """By length what a field of the rows says of a candidate; points of a curve differ in their length only."""
    curves: dict[tuple[Any, ...], list[tuple[int, float]]] = {}
    for row in rows:
        y = row[field].get(name)
        if y is not None:
            alike = tuple(x for size, x in row["sizes"].items() if size not in ("T", "S", "passes"))
            curves.setdefault(alike, []).append((row["sizes"]["S"], (y or 1) / unit))  # logarithmic axes have no 0
    for points in curves.values():
        axis.plot(*zip(*sorted(points)), label=label, **look)
        label = ""


def plot(rows: list[Row], path: pathlib.Path, title: str, chip: str) -> None:
    """By length: time, temporary memory and speed-up; and TFLOP/s by FLOPs a byte, under the chip's roof."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot, ticker

    figure, ((times, memory), (speed, roof)) = pyplot.subplots(2, 2, figsize=(12, 9), layout="constrained")
    names = dict.fromkeys(name for r in rows for name in r["seconds"])
    for (at, name), (kind, (line, marker)) in itertools.product(enumerate(names), _STYLES.items()):
        of_kind = [r for r in rows if r["kind"] == kind]
        look: dict[str, Any] = dict(color=f"C{at}", linestyle=line, marker=marker, markersize=4, alpha=0.7)
        _draw(times, of_kind, "seconds", name, 1e-3, label=f"{name}, {kind}", **look)
        _draw(memory, of_kind, "temporary_bytes", name, 2**20, **look)
        if any(r["implementation"] == name for r in of_kind):
            _draw(speed, of_kind, "ratios", STOCK, 1, **look)
            counted = [(r["intensity"], r["figures"]["tflops"]) for r in of_kind if r.get("figures")]
            roof.plot(*np.reshape(counted, (-1, 2)).T, **{**look, "linestyle": ""})
    if known := CHIPS.get(chip):
        bounds = sorted({r["intensity"] for r in rows if r.get("figures")} | {known["tflops"] * 1e3 / known["gbs"]})
        height = [min(known["tflops"], known["gbs"] * i / 1e3) for i in bounds]
        roof.plot(bounds, height, color="0.4", label=f"{chip}, {known['cores']} cores")
        roof.legend()
    for axis, heading, x, y in [
        (times, "time", "length", "ms"),
        (memory, "temporary memory", "length", "MiB"),
        (speed, f"speed-up against {STOCK}", "length", "times as fast"),
        (roof, "roofline", "FLOPs a byte", "TFLOP/s"),
    ]:
        axis.set(title=heading, xlabel=x, ylabel=y)
        axis.grid(alpha=0.3)
    lengths = sorted({r["sizes"]["S"] for r in rows if r["kind"] in _STYLES})
    for axis in (times, memory, speed):
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
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
