"""The problems of `python -m jax_mfa check`: they reach each kernel that a launch plan may hold, in all its forms.

Knows tile tables and the arguments of `flash_attention`; not how problems are run or printed.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jax_mfa.api import with_modifiers
from jax_mfa.arguments import specify
from jax_mfa.flex.block_mask import BlockMask
from jax_mfa.kv_cache.quantized import quantize
from jax_mfa.kv_cache.storage import PagedArray, Scheme
from jax_mfa.metal import DTYPES, PARTS, plan_of, tiles
from jax_mfa.metal.plan import ITEM_SIZES, Plan
from jax_mfa.problem import DIFFERENTIABLE
from jax_mfa.tuning.tune import error_of_sums

BATCH, HEADS, KEY_HEADS = 2, 4, 2
PAGE = 16
# argument → the name of its derivative among the results
GRADIENTS = dict(zip(DIFFERENTIABLE, "dq dk dv dbias dscale dslopes dsinks dcaptured".split(), strict=True))
FORWARD = 2e-6  # error of a float32 forward pass, relative to the largest output
# dtype → another one, for a bias beside it
_OTHER = dict(zip(DTYPES, (*DTYPES[1:], DTYPES[0]), strict=True))
_Arguments: TypeAlias = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Problem:
    """One line of the table. T and S fill no tile of any size, and reach over several tiles of most."""

    variant: str
    dtype: str
    head_size: int
    value_size: int
    feature: str = "dense"
    queries: int = 75
    keys: int = 67

    @property
    def decoding(self) -> bool:
        """Whether few rows meet many keys, which the forward pass splits; the backward pass is one of those above."""
        return self.queries <= tiles.DECODE_QUERIES

    def arguments(self) -> _Arguments:
        """Those of `flash_attention`, random, the floating ones rounded to the dtype where that is the query's; keys
        and values may be quantised, in pages or both."""
        rng = np.random.default_rng(self.head_size)
        shapes = {
            "query": (BATCH, self.queries, HEADS, self.head_size),
            "key": (BATCH, self.keys, KEY_HEADS, self.head_size),
            "value": (BATCH, self.keys, KEY_HEADS, self.value_size),
        }
        arrays = {name: _normal(rng, self.dtype, *shape) for name, shape in shapes.items()}
        return {**arrays, **FEATURES[self.feature](self, rng)}

    def cotangents(self) -> tuple[np.ndarray, np.ndarray]:
        """Of output and log-sum-exp."""
        rng = np.random.default_rng(self.value_size)
        row = (BATCH, self.queries, HEADS)
        return _normal(rng, self.dtype, *row, self.value_size), _normal(rng, "float32", *row)

    def plans(self) -> list[Plan]:
        """What Metal launches for it."""
        spec, operands = specify(**with_modifiers(self.arguments()))
        passes = ("forward",) if self.decoding else PARTS
        return [plan_of(spec, operands, x, self.variant) for x in passes]


def _normal(rng: np.random.Generator, dtype: str, *shape: int) -> np.ndarray:
    return np.asarray(rng.standard_normal(shape), np.float32).astype(jnp.dtype(dtype))


def _mask(p: Problem, rng: np.random.Generator) -> _Arguments:
    mask = rng.random((BATCH, 1, p.queries, p.keys)) < 0.7
    mask[0, :, 1] = False  # one row sees nothing
    return {"mask": mask}


def _blocks(p: Problem, rng: np.random.Generator) -> _Arguments:
    blocks = rng.random((BATCH, 1, -(-p.queries // 16), -(-p.keys // 16))) < 0.6
    return {"block_mask": BlockMask(blocks, (16, 16))}


def _segments(p: Problem, rng: np.random.Generator) -> _Arguments:
    ids = lambda size: np.sort(rng.integers(0, 3, (BATCH, size)), axis=-1).astype(np.int32)
    return {"query_segment_ids": ids(p.queries), "key_value_segment_ids": ids(p.keys)}


def _ranges(p: Problem, rng: np.random.Generator) -> _Arguments:
    first = rng.integers(0, p.keys, (BATCH, p.queries))
    last = np.minimum(first + rng.integers(0, p.keys, first.shape), p.keys)
    return {"key_value_ranges": np.stack([first, last], -1).astype(np.int32)}


_Feature: TypeAlias = Callable[[Problem, np.random.Generator], _Arguments]


def _kept(key: Scheme | None, value: Scheme | None, paged: bool = False) -> _Feature:
    """Keys and values by these schemes, and in pages that lie in no order, the last of each row not full."""

    def feature(p: Problem, rng: np.random.Generator) -> _Arguments:
        width = -(-p.keys // PAGE)
        tables = rng.permutation(BATCH * width).astype(np.int32).reshape(BATCH, width)
        arguments: _Arguments = {}
        for name, size, scheme in (("key", p.head_size, key), ("value", p.value_size, value)):
            x = _normal(rng, p.dtype, *((BATCH * width, PAGE) if paged else (BATCH, p.keys)), KEY_HEADS, size)
            kept = x if scheme is None else jax.tree.map(np.asarray, quantize(x, scheme))
            arguments[name] = PagedArray(kept, tables) if paged else kept
        lengths = np.array([p.keys, p.keys - 5], np.int32)
        at_the_end = {"is_causal": True, "key_value_seq_lengths": lengths, "query_offset": lengths - p.queries}
        return arguments | at_the_end if paged else arguments

    return feature


_KEPT = {  # ways to store keys and values
    "int8": _kept(Scheme("int8"), Scheme("int8", True)),
    "int4": _kept(Scheme("int4", channels=None, center=64), Scheme("int4", channels=32)),
    "fp8": _kept(Scheme("fp8", True), Scheme("fp8", True)),
    "pages": _kept(None, None, True),
    "pages of int8": _kept(Scheme("int8"), Scheme("int4"), True),
}


@dataclasses.dataclass(frozen=True)
class Relative:
    """A `score_mod` with a bias for each head and distance."""

    table: Any  # [HEADS, 128], float32

    def __call__(self, score: Array, b: Array, n: Array, t: Array, s: Array) -> Array:
        return score + jnp.asarray(self.table)[n, jnp.clip(t - s + 64, 0, 127)]


def two_of_three(b: Array, n: Array, t: Array, s: Array) -> Array:
    """A `mask_mod`."""
    return (s - t) % 3 != 1


def _functions(p: Problem, rng: np.random.Generator) -> _Arguments:
    return {"score_mod": Relative(_normal(rng, "float32", HEADS, 128)), "mask_mod": two_of_three}


def _everything(p: Problem, rng: np.random.Generator) -> _Arguments:
    """All of them, so that each kernel is also compiled with all that it can do; the bias has another dtype."""
    arguments: _Arguments = {"bias": _normal(rng, _OTHER[p.dtype], 1, HEADS, p.queries, p.keys)}
    parts = ["window", "lengths", "mask", "blocks", "segments", "ranges", "score"]
    for part in parts if p.decoding else [*parts, "dropout"]:
        arguments |= FEATURES[part](p, rng)
    # widen the window and the ranges so that rows still see something
    first = np.ones((BATCH, p.queries), np.int32)
    arguments["local_window_size"] = (p.keys // 2, 30)
    arguments["key_value_ranges"] = np.stack([first, first + p.keys - 10], -1)
    if p.decoding:  # place the few rows at the end of many keys
        arguments |= {"query_offset": np.array([p.keys - 30, p.keys - 8], np.int32), "query_segment_ids": first}
    return arguments


FEATURES: dict[str, _Feature] = {
    "dense": lambda p, rng: {},
    "causal": lambda p, rng: {"is_causal": True, "query_offset": p.keys - p.queries if p.decoding else 7},
    "window": lambda p, rng: {"local_window_size": (9, 3)},
    "lengths": lambda p, rng: {
        "query_seq_lengths": np.array([p.queries, p.queries - 2], np.int32),
        "key_value_seq_lengths": np.array([p.keys - 27, p.keys], np.int32),
        "query_offset": np.array([0, -3], np.int32),
    },
    "mask": _mask,
    "blocks": _blocks,
    "segments": _segments,
    "ranges": _ranges,
    "bias": lambda p, rng: {"bias": _normal(rng, p.dtype, 1, HEADS, p.queries, p.keys)},
    "score": lambda p, rng: {
        "scale": np.full((), 0.2, np.float32),
        "alibi_slopes": np.linspace(0.02, 0.1, HEADS, dtype=np.float32),
        "sinks": _normal(rng, "float32", HEADS),
        "logits_soft_cap": 4.0,
    },
    "dropout": lambda p, rng: {"dropout_rate": 0.25, "dropout_seed": 7},
    "functions": _functions,
    "everything": _everything,
    **_KEPT,
}
_EACH_TILE = ("dense", "causal")
_EACH_DTYPE = ("bias", "functions", "everything")  # features with kernels of their own, and with all function constants


def head_sizes(variant: str, dtype: str) -> list[tuple[int, int]]:
    """Head sizes H, V for each row of a tile table: the largest that it serves, and beneath it one that is odd."""
    if variant not in tiles.VARIANTS:
        return [(32, 25), (128, 128)]
    limits = [most for most, item in tiles.VARIANTS[variant] if item == ITEM_SIZES[dtype]]
    return [(most, most if i % 2 else most - 7) for i, most in enumerate(sorted(limits))]


def decode_sizes(dtype: str) -> list[tuple[int, int, int]]:
    """T, H and V for each tile that decoding may take: the smallest heads that it serves."""
    sizes: dict[tiles.DecodeTiles | tiles.DecodeRows, tuple[int, int, int]] = {}
    item = ITEM_SIZES["float32" if dtype == "bfloat16" else dtype]  # operands of bfloat16 are float32
    for queries, v in itertools.product((3, 7, 1, 2), range(8, tiles.MAX_HEAD + 1, 8)):
        for h in (v, 8):
            tile = tiles.decode(HEADS // KEY_HEADS * queries, h, v, item)
            if tile is not None:
                sizes.setdefault(tile, (queries, h, v))
    return list(sizes.values())


def _of_variant(variant: str) -> Iterator[Problem]:
    kept = list(_KEPT)
    rotating = [x for x in FEATURES if x not in (*_EACH_TILE, *_EACH_DTYPE, *_KEPT, "mask")]
    for at, dtype in enumerate(DTYPES):
        for i, (h, v) in enumerate(head_sizes(variant, dtype)):
            # take features in turns above H = 128, where kernels are slow to compile
            features = [*(_EACH_TILE if h <= 128 else _EACH_TILE[i % 2 :][:1])]
            if variant in tiles.VARIANTS and dtype != "bfloat16":  # lists of tiles do not depend on the dtype
                features.append("mask")
            if i == 0 and variant in tiles.NAMES:
                features += [*_EACH_DTYPE, *rotating[at :: len(DTYPES)]]
                features += kept if at == 0 else kept[at :: len(DTYPES)]
            yield from (Problem(variant, dtype, h, v, feature) for feature in features)


def _decoding(variant: str) -> Iterator[Problem]:
    kept = list(_KEPT)
    for dtype in DTYPES:
        sizes = decode_sizes(dtype)
        few = next(size for size in sizes if size[0] == 2)  # takes tiles without the matrix unit
        features = ("everything", "functions", "dense", *(kept[1:] if dtype == DTYPES[0] else kept[-1:]))
        each = [*itertools.product((sizes[0], few), features), *itertools.product(sizes, ["causal"])]
        if dtype != "float32":  # rows that are paired
            each += itertools.product([(2, 64, 64)], kept)
        for (t, h, v), feature in each:
            yield Problem(variant, dtype, h, v, feature, t, tiles.DECODE_KEYS + 18)


def problems(variants: Sequence[str]) -> list[Problem]:
    """What reaches every kernel of these tile tables; kernels that are the same for all come with the first.

    What is no tile table, as "blockwise", has no kernels: there it is one head size dense and causal, and another.
    """
    chosen = []
    split = next((variant for variant in variants if variant in tiles.VARIANTS), None)
    for variant in variants:
        chosen += [*_of_variant(variant), *(_decoding(variant) if variant == split else ())]
    return chosen


def quick(problem: Problem) -> bool:
    """Whether a problem is among the few that are quick to compile."""
    return problem.dtype == "float16" and problem.head_size <= 64


def allowed(problem: Problem) -> dict[str, float]:
    """How far results may lie from the reference, relative to the largest entry of each.

    * out: 2e-6 for arithmetic in float32, and for 16 bits one unit in the last place, for the rounding at the end.
    * lse: it is float32 whatever the inputs.
    * gradients: float32 sums of as many terms as the group has rows. That of a bias is rounded to the bias's dtype.
    """
    eps = lambda dtype: float(jnp.finfo(jnp.dtype(dtype)).eps)
    terms = max(problem.keys, problem.queries * HEADS // KEY_HEADS) + problem.head_size
    gradient = error_of_sums(terms, jnp.dtype(problem.dtype))
    rounding = eps(problem.dtype) if problem.dtype != "float32" else 0.0
    bounds = {"out": FORWARD + rounding, "lse": FORWARD, **dict.fromkeys(GRADIENTS.values(), gradient)}
    bias = problem.arguments().get("bias")
    return bounds if bias is None else bounds | {"dbias": gradient + eps(bias.dtype)}
