"""The model of `apple.py` against published figures: `python tests/metal/published.py` prints every row of
`published.json`, published and predicted, and whether it was fitted.

The rows are those of metal-flash-attention on an M1 Max and an M4, with the tile of each. `tuned` has a tile chosen for
each row: half of these rows, drawn once by `SEED`, give the fitted constants, and the others judge them. `default` are
rows of one tile for all, and `kept` of float32 on M1 with sums, or all that a kernel owns, in registers: nothing was
fitted to them, and `kept` the model does not explain. Figures are shares of the time in which the matrix unit works, in
percent: G · kD / (kD + 5) / peak · 17 / 16 of G GINSTR/s, k = 2, 3 and 4 products for each score and channel.

What a row's kernel does is counted from its source (commit 8671cdd): 8 rows a simdgroup; a fragment is loaded for each
product, in two halves where it is transposed; operands that are not kept are read again for every tile of columns, sums
also written; 16-bit scores and their products are in half, dO and what it meets in float on M1.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import pathlib
import random

import apple
import numpy as np
from apple import FLOAT_ARITHMETIC, HALF_ARITHMETIC, MODEL, Model, Work

FILE = pathlib.Path(__file__).with_suffix(".json")
SEED = 0
PRODUCTS = {"forward": 2, "d_query": 3, "d_key_value": 4}  # for each score and channel
FAMILY = {"M1 Max": 7, "M4": 9}
RESIDENT = 32  # simdgroups of a core (1024 threads, same source)
FRAGMENT = 64
EXP2 = 4
# by kernel: (operands whose rows it owns and reads, sums that it owns)
OWNED = {
    "forward": (("Q",), ("O",)),
    "d_query": (("Q", "dO"), ("dQ",)),
    "d_key_value": (("K", "V"), ("dV", "dK")),
}


@dataclasses.dataclass(frozen=True)
class Row:
    """A published figure; `kept` are operands in registers, `slice` channels that are in registers at once."""

    chip: str
    dtype: str
    kernel: str
    head: int
    columns: int
    slice: int
    kept: str
    ginstr: float
    peak: float

    @property
    def family(self) -> int:
        return FAMILY[self.chip]

    @property
    def published(self) -> float:
        instructions = PRODUCTS[self.kernel] * self.head
        return 100 * self.ginstr * instructions / (instructions + 5) / self.peak * apple.HALF / 16

    @property
    def work(self) -> Work:
        """Of a simdgroup and a tile of columns."""
        columns, channels = self.columns // 8, -(-self.head // 8)
        item = 2 if self.dtype == "float16" else 4
        products, kept = columns * channels, self.kept.split(",")
        forward, backward_keys = self.kernel == "forward", self.kernel == "d_key_value"
        reads, sums = ([x for x in names if x not in kept] for names in OWNED[self.kernel])
        in_sums = products * len(OWNED[self.kernel][1])
        scores = products * (PRODUCTS[self.kernel] - len(OWNED[self.kernel][1]))
        half = item == 2
        # the others are with dO and with derivatives of scores, which are float on M1
        in_half = PRODUCTS[self.kernel] if forward or self.family == 9 else 1
        arithmetic = HALF_ARITHMETIC if half else FLOAT_ARITHMETIC
        if forward:  # maximum, exponent, sum; the sums are rescaled
            scalar = 2 * columns * (1 + 2 * arithmetic + EXP2) + 2 * channels * apple.INDEPENDENT
        else:  # exponent; derivative of the softmax
            scalar = 2 * columns * (3 * arithmetic + EXP2)
        row_states = 2 * columns * backward_keys  # loads of log-sum-exp and delta, eight of each at once
        return Work(
            half_sum=products * half,
            half=(in_half - 1) * products * half,
            single=(PRODUCTS[self.kernel] - in_half * half) * products,
            paired=in_sums if min(self.slice, self.head) <= 16 else 0,
            scalar=scalar,
            loads=scores * 2 + in_sums + row_states,
            bytes=(scores + in_sums) * FRAGMENT * item + row_states * 8 * item,
            rows=len(reads) * channels * FRAGMENT * item,
            rows_of_core=RESIDENT * 8 * self.head * item * len(reads) / 1024,
            sums=len(sums) * 2 * channels * FRAGMENT * 4,
        )

    def predicted(self, model: Model = MODEL) -> float:
        return 100 * model.share(self.work, self.family)


@functools.cache
def rows() -> dict[str, tuple[Row, ...]]:
    """By their use: fitted, held out, default, kept."""
    found = json.loads(FILE.read_text(encoding="utf-8"))
    peak = {name: chip["peak"] for name, chip in found["chips"].items()}
    tuned, *others = ([Row(*x, peak=peak[x[0]]) for x in found[name]] for name in ("tuned", "default", "kept"))
    drawn = set(random.Random(SEED).sample(range(len(tuned)), len(tuned) // 2))
    halves = ([x for i, x in enumerate(tuned) if (i in drawn) is chosen] for chosen in (True, False))
    return dict(zip(("fitted", "held out", "default", "kept"), map(tuple, (*halves, *others))))


def errors(some: tuple[Row, ...], model: Model = MODEL) -> np.ndarray:
    """Predicted less published, in points."""
    return np.array([x.predicted(model) - x.published for x in some])


def fit(some: tuple[Row, ...]) -> Model:
    """Least squares, softened beyond 3 points so that single rows do not decide."""
    from scipy.optimize import least_squares

    start = np.array([0.5, 3.0, 0.3, 100.0])
    found = least_squares(lambda x: errors(some, Model(*x)), start, x_scale=start, loss="soft_l1", f_scale=3.0)
    return Model(*map(float, found.x))


def error(family: int, item: int) -> float:
    """Relative, the mean of the rows held out of a family (7 or 9) with elements of so many bytes; and of `kept` ones,
    as the package's kernels keep what they own."""
    judging = rows()["held out"] + rows()["kept"]
    some = [x for x in judging if (x.family, x.dtype) == (family, f"float{8 * item}")]
    return float(np.mean([abs(x.predicted() / x.published - 1) for x in some]))


def table() -> str:
    """Markdown: every row, and what the errors come to."""
    heading = ("chip", "type", "kernel", "D", "columns", "slice", "kept", "published", "predicted", "error", "")
    lines = [f"| {' | '.join(heading)} |", "|---" * len(heading) + "|"]
    for use, some in rows().items():
        for x in some:
            cells = (x.chip, x.dtype, x.kernel, x.head, x.columns, x.slice, x.kept or "none")
            figures = (f"{x.published:.1f}", f"{x.predicted():.1f}", f"{x.predicted() - x.published:+.1f}")
            lines.append(f"| {' | '.join(map(str, (*cells, *figures, use)))} |")
    lines.append("")
    for use, some in rows().items():
        size = np.abs(errors(some))
        lines.append(f"{use}: {len(some)} rows, mean error {size.mean():.1f} points, largest {size.max():.1f}")
    swapped = np.abs(errors(rows()["fitted"], fit(rows()["held out"])))
    lines.append(f"halves exchanged: mean error {swapped.mean():.1f} points, largest {swapped.max():.1f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--fit", action="store_true", help="print the constants that the fitted rows give, instead")
    print(fit(rows()["fitted"]) if parser.parse_args().fit else table())


if __name__ == "__main__":
    main()
