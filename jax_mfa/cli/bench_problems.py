"""The problems of `python -m jax_mfa bench`: those of models and of kinds of models, and sweeps over sizes and masks.

`models.json` holds what users of a model, or of a kind of model, ask of its attention, with a source or a reason. Knows
which columns a row sees; runs nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jax_mfa.cli.command_line import data

FORWARD, TRAINING, DECODE = "forward", "forward+backward", "decode"
TANGENT, COMPILING = "forward mode", "compile 24 layers"
BOTH = (FORWARD, TRAINING)
MASKS = ("none", "causal", "window", "padding")
WINDOW = 256


@dataclasses.dataclass(frozen=True)
class Problem:
    """One attention problem: T queries of N heads on S columns of K heads, all of head size H.

    Attributes:
      mask: of `MASKS`. A row of "window" sees `window` columns up to its own; in "padding" the batch entries have from
        half to all of the columns, three quarters on average.
      pair_bias: whether there is a bias [1, N, T, S], which all batch entries share, with a gradient.
      passes: what is timed; the queries of "decode" stand at the end of what the columns hold.
    """

    name: str
    B: int
    T: int
    S: int
    N: int
    K: int
    H: int
    mask: str = "none"
    dtype: str = "float32"
    passes: tuple[str, ...] = BOTH
    soft_cap: float | None = None
    window: int | None = None
    pair_bias: bool = False

    @property
    def decodes(self) -> bool:
        return DECODE in self.passes

    @property
    def is_causal(self) -> bool:
        return self.mask in ("causal", "window")

    @property
    def lengths(self) -> np.ndarray:
        """`[B]`, the columns of each batch entry that are no padding."""
        share = (self.B + 0.5 + np.arange(self.B)) / (2 * self.B) if self.mask == "padding" else np.ones(self.B)
        return np.ceil(self.S * share).astype(np.int32)

    @property
    def columns(self) -> tuple[np.ndarray, np.ndarray]:
        """`[B, T]`, the first column that each row sees, and the one after its last."""
        lengths = self.lengths[:, None]
        after = np.arange(1, self.T + 1) + (lengths - self.T if self.decodes else np.zeros_like(lengths))
        end = np.minimum(after, lengths) if self.is_causal or self.decodes else np.broadcast_to(lengths, after.shape)
        begin = np.zeros_like(after) if self.window is None else np.maximum(after - self.window, 0)
        return begin, end

    @property
    def visible(self) -> np.ndarray:
        """The same as a mask, `[B, 1, T, S]`, or `[1, 1, T, S]` where all batch entries are alike."""
        begin, end = (x[: None if self.mask == "padding" else 1, None, :, None] for x in self.columns)
        column = np.arange(self.S)
        return (column >= begin) & (column < end)

    def __str__(self) -> str:
        heads = f"N{self.N}" if self.K == self.N else f"N{self.N} K{self.K}"
        length = f"T{self.T}" if self.T == self.S else f"T{self.T} S{self.S}"
        facts = [f"B{self.B}", length, heads, f"H{self.H}"]
        facts += [f"{self.mask}{self.window or ''}"] * (self.mask != "none")
        facts += ["pair bias"] * self.pair_bias
        facts += ["cap"] * (self.soft_cap is not None) + [self.dtype] * (self.dtype != "float32")
        return " ".join(facts)


# values that a sweep goes through, by option; `None` of key_value_heads: as many as there are query heads
SWEEP: dict[str, list[Any]] = {
    "lengths": [256, 512, 1024, 2048, 4096],
    "batches": [1],
    "heads": [8],
    "key_value_heads": [None],
    "head_sizes": [64],
    "dtypes": ["float32"],
    "masks": ["none", "causal"],
    "passes": list(BOTH),
}
# 48 short problems, where what a call costs by itself shows
PRESET = {"lengths": [64, 128, 256, 512], "batches": [1, 2, 4, 8], "head_sizes": [32, 64, 128], "masks": ["none"]}


def sweep(values: Mapping[str, list[Any]], window: int = WINDOW) -> list[Problem]:
    """Every combination of the values for the keys of `SWEEP`.

    Decoding is a query against each length, alike without a mask and with a causal one.
    """
    square = tuple(x for x in values["passes"] if x != DECODE)
    of_length = [square] * bool(square) + [(DECODE,)] * (DECODE in values["passes"])
    names = ("dtypes", "heads", "key_value_heads", "head_sizes", "batches", "lengths", "masks")
    problems = []
    for dtype, n, k, h, b, s, mask, passes in itertools.product(*(values[name] for name in names), of_length):
        t, mask = (1, mask.replace("causal", "none")) if passes == (DECODE,) else (s, mask)
        seen = window if mask == "window" else None
        problems.append(Problem("", b, t, s, n, k or n, h, mask, dtype, passes, window=seen))
    return list(dict.fromkeys(problems))


def _of_model(passes: Sequence[str] = BOTH, source: str = "", why: str = "", B: int = 1, **sizes: Any) -> Problem:
    return Problem(**{"B": B, "S": sizes["T"], **sizes}, passes=tuple(passes))


PROBLEMS = tuple(_of_model(**model) for model in data("models.json"))


def select(pattern: str) -> list[Problem]:
    """A kind of option: the problems of models whose name or shape contains `pattern`, whatever its case."""
    found = [p for p in PROBLEMS if pattern.lower() in f"{p.name} {p}".lower()]
    if not found:
        names = ", ".join(dict.fromkeys(p.name for p in PROBLEMS))
        raise argparse.ArgumentTypeError(f"expected a part of a name of {names}")
    return found
