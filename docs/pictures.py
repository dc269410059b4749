"""Draws the pictures of the documentation from the code's own tables: `python docs/pictures.py`.

Each SVG holds a digest of the data that it was drawn from, by which a test finds those that are out of date.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
import re
import sys
from collections.abc import Callable
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("agg")
from matplotlib import pyplot

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent / "tests" / "metal"))
import published

from jax_mfa import BlockMask, masks
from jax_mfa.metal import tiles
from jax_mfa.problem import Specification

HERE = pathlib.Path(__file__).resolve().parent
INK = "#808080"  # reads on light and on dark
COLORS = ("#5c7cfa", "#f59f00", "#12b886")
FILL = matplotlib.colors.ListedColormap(["#00000000", COLORS[1], COLORS[0]])
LOOK = {
    "svg.hashsalt": "jax_mfa",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
}


def speedup_data() -> list[list[Any]]:
    """Model, forward and training speed-up of the table in benchmarks.md, of dense problems of 512 and more rows."""
    found: dict[str, dict[str, float]] = {}
    cells = r"^\| ([^|]+) \| (B\d+ T(\d+) N[^|]*) \| (forward(?:\+backward)?) \| [^|]+ \| ([\d.]+)x"
    row = re.compile(cells, re.MULTILINE)
    for name, _, length, kind, ratio in row.findall((HERE / "benchmarks.md").read_text(encoding="utf-8")):
        if int(length) >= 512:
            found.setdefault(name, {})[kind] = float(ratio)
    return [[name, x["forward"], x["forward+backward"]] for name, x in found.items()]


def draw_speedup(data: list[list[Any]]):
    figure, axis = pyplot.subplots(figsize=(8, 0.8 + 0.3 * len(data)), layout="constrained")
    place = np.arange(len(data))[::-1]
    for i, what in enumerate(("forward", "forward and backward")):
        axis.barh(place + 0.2 - 0.4 * i, [x[1 + i] for x in data], 0.38, color=COLORS[i], label=what)
    axis.axvline(1, color=INK, linewidth=1)
    axis.set_yticks(place, [x[0] for x in data])
    axis.set_xlabel("times as fast as jax.nn (blockwise, two cores of an x86-64 server)")
    axis.legend(frameon=False)
    return figure


def tiles_data() -> list[Any]:
    """Of a causal mask and a window on tiles of the forward table: 0 not visited, 1 edge, 2 interior."""
    size = tiles.STAGED[(64, 2)].forward
    found = []
    for spec in (Specification(is_causal=True), Specification(is_causal=True, window=(200, None))):
        left, right = spec.band
        t, s = np.arange(512)[:, None], np.arange(512)[None]
        seen = np.ones((512, 512), bool)
        if right is not None:
            seen &= s <= t + right
        if left is not None:
            seen &= s >= t - left
        parts = seen.reshape(512 // size.rows, size.rows, 512 // size.keys, size.keys).transpose(0, 2, 1, 3)
        found.append((parts.any((2, 3)).astype(int) + parts.all((2, 3))).tolist())
    return [[size.rows, size.keys], found]


def draw_tiles(data: list[Any]):
    (rows, keys), pictures = data
    figure, axes = pyplot.subplots(1, 2, figsize=(8, 3.6), layout="constrained")
    for axis, what, picture in zip(axes, ("causal", "causal, window of 200"), pictures):
        picture = np.array(picture)
        axis.pcolormesh(picture, cmap=FILL, vmin=0, vmax=2, edgecolors=INK, linewidth=0.6)
        axis.invert_yaxis()
        axis.set(title=what, xlabel=f"tiles of {keys} columns", ylabel=f"tiles of {rows} rows")
        axis.set_xticks([])
        axis.set_yticks([])
    look = [matplotlib.patches.Patch(color=COLORS[i], label=x) for x, i in (("interior", 0), ("edge", 1))]
    figure.legend(handles=look, loc="outside lower center", ncols=2, frameon=False)
    return figure


def fragment_data() -> list[list[int]]:
    """The lane of each element, as `struct Lane` of metal/core/fragment.h says."""
    text = (HERE.parent / "metal" / "core" / "fragment.h").read_text(encoding="utf-8")
    row, column = re.search(r"row = ([^;]*);[^\n]*\n\s*column = ([^;]*);", text).groups()  # type: ignore[union-attr]
    found = [[-1] * 8 for _ in range(8)]
    for lane in range(32):
        r, c = (eval(x, {"lane": lane}) for x in (row, column))
        found[r][c] = found[r][c + 1] = lane
    return found


def draw_fragment(data: list[list[int]]):
    figure, axis = pyplot.subplots(figsize=(3.6, 3.6), layout="constrained")
    for row, lanes in enumerate(data):
        for column in range(0, 8, 2):
            color = COLORS[0] if lanes[column] & 8 else COLORS[2]
            box = pyplot.Rectangle((column, row), 2, 1, facecolor=color, alpha=0.25, edgecolor=INK)
            axis.add_patch(box)
            axis.text(column + 1, row + 0.5, str(lanes[column]), ha="center", va="center")
    axis.set(xlim=(0, 8), ylim=(8, 0), aspect="equal", xlabel="column", ylabel="row")
    return figure


def budget_data() -> list[list[Any]]:
    """Entry, bytes of fragments a thread and bytes of threadgroup memory of each kernel."""
    found = []
    for name, table in tiles.VARIANTS.items():
        for (head, item), entry in table.items():
            parts = (entry.forward, entry.d_query, entry.d_key_value)
            registers = [x.fragment_bytes(head, head, item) for x in parts]
            memory = [x.threadgroup_memory(head, head, item) for x in parts]
            found.append([f"{name}, H ≤ {head}, {8 * item} bits", registers, memory])
    return found


def draw_budget(data: list[list[Any]]):
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 6), layout="constrained", sharey=True)
    place = np.arange(len(data))[::-1]
    limits = (tiles.FRAGMENT_BUDGET, tiles.THREADGROUP_BYTES)
    for axis, part, limit, what in zip(
        axes, (1, 2), limits, ("fragments, bytes a thread", "threadgroup memory, bytes")
    ):
        for i, kernel in enumerate(("forward", "dQ", "dK, dV")):
            axis.barh(place + 0.27 * (1 - i), [x[part][i] for x in data], 0.25, color=COLORS[i], label=kernel)
        axis.axvline(limit, color=INK, linestyle="--", linewidth=1)
        axis.set_xlabel(what)
    axes[0].set_yticks(place, [x[0] for x in data])
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    return figure


def masks_data() -> list[Any]:
    """Of ready-made masks of 64 queries and keys in blocks of 4 × 4: 0 hidden, 1 seen in part, 2 whole."""
    chosen = np.random.default_rng(0).integers(0, 16, (16, 3))
    shown = {
        "causal()": masks.causal(),
        "window(12, 6)": masks.window(12, 6),
        "causal() | prefix(18)": masks.causal() | masks.prefix(18),
        "sink_window(4, 12)": masks.sink_window(4, 12),
        "dilated(2, 12)": masks.dilated(2, 12),
        "chunked(16)": masks.chunked(16),
        "documents(lengths=[20, 7, 37])": masks.documents(lengths=[20, 7, 37]),
        "neighborhood(64, 13)": masks.neighborhood(64, 13),
        "neighborhood((8, 8), 3)": masks.neighborhood((8, 8), 3),
        "neighborhood((4, 4, 4), 3)": masks.neighborhood((4, 4, 4), 3),
        "tree(parents, 32)": masks.tree((np.arange(32) - 1) // 2, 32),
        "top_k_blocks(indices, 4)": masks.top_k_blocks(chosen, 4),
    }
    listed = {name: BlockMask.from_function(mask, 64, 64, (4, 4)) for name, mask in shown.items()}
    return [[name, (x.blocks.astype(int) + x.whole).tolist()] for name, x in listed.items()]


def draw_masks(data: list[Any]):
    figure, axes = pyplot.subplots(3, 4, figsize=(9, 7), layout="constrained")
    for axis, (name, states) in zip(axes.flat, data):
        axis.imshow(states, cmap=FILL, vmin=0, vmax=2, interpolation="nearest")
        axis.set(xticks=[], yticks=[])
        axis.set_title(name, fontsize=8)
    look = [matplotlib.patches.Patch(color=COLORS[i], label=x) for x, i in (("whole", 0), ("seen in part", 1))]
    figure.legend(handles=look, loc="outside lower center", ncols=2, frameon=False)
    return figure


def predicted_data() -> list[list[Any]]:
    """Use, chip, type, published and predicted share of each published row, in percent."""
    rows = [(use, x) for use, some in published.rows().items() for x in some]
    return [[use, x.chip, x.dtype, round(x.published, 1), round(x.predicted(), 1)] for use, x in rows]


def draw_predicted(data: list[list[Any]]):
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 4.8), layout="constrained", sharex=True, sharey=True)
    markers = {"fitted": "x", "held out": "o", "default": ".", "kept": "+"}
    for axis, chip in zip(axes, published.FAMILY):
        axis.axline((70, 70), slope=1, color=INK, linewidth=1)
        for use, marker in markers.items():
            for color, dtype in zip(COLORS, ("float16", "float32")):
                shown = [x[3:] for x in data if x[:3] == [use, chip, dtype]]
                if shown:
                    axis.scatter(*zip(*shown), marker=marker, s=30, color=color, label=f"{use}, {dtype}")
        axis.set(title=chip, xlabel="published, % of the time in the matrix unit", aspect="equal")
    axes[0].set_ylabel("predicted")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    return figure


PICTURES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "speedup": (speedup_data, draw_speedup),
    "tiles": (tiles_data, draw_tiles),
    "masks": (masks_data, draw_masks),
    "fragment": (fragment_data, draw_fragment),
    "budget": (budget_data, draw_budget),
    "predicted": (predicted_data, draw_predicted),
}


def digest(name: str) -> str:
    """Of the data of a picture."""
    return hashlib.sha256(json.dumps(PICTURES[name][0]()).encode()).hexdigest()[:16]


def main() -> None:
    (HERE / "pictures").mkdir(exist_ok=True)
    with matplotlib.rc_context(LOOK):
        for name, (data, draw) in PICTURES.items():
            figure = draw(data())
            for axis in figure.axes:
                axis.set_facecolor("none")
                axis.spines[["top", "right"]].set_visible(False)
            file = HERE / "pictures" / f"{name}.svg"
            about = {"Date": None, "Creator": None, "Description": f"drawn from data {digest(name)}"}
            figure.savefig(file, transparent=True, metadata=about)
            pyplot.close(figure)
            print(f"wrote {file}")


if __name__ == "__main__":
    main()
