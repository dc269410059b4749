"""Functions of scores and masks as users write them, and dense attention in float64 with the same functions.

The dense definition knows nothing of the package: it asks the functions at every pair of a query and a key.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from harness import assert_close, quick_jit, x64
from jax import lax

import jax_mfa

B, T, S, N, K, H = 2, 7, 9, 4, 2, 8


@dataclasses.dataclass(frozen=True)
class Entry:
    """Functions and what they capture.

    Attributes:
      captured: a random array for each name that the functions read, given a generator.
      score, mask: from captured arrays, by attribute, to a `score_mod` or `mask_mod`; or None.
      offset: `query_offset`, one for all or one for each batch entry.
    """

    captured: Callable[[np.random.Generator], dict[str, Any]] = lambda rng: {}
    score: Callable[[Any], Any] | None = None
    mask: Callable[[Any], Any] | None = None
    offset: Any = 0

    def arrays(self, seed: int = 0) -> dict[str, np.ndarray]:
        return {name: np.asarray(x) for name, x in self.captured(np.random.default_rng(seed)).items()}

    def modifiers(self, captured: dict[str, Any]) -> dict[str, Any]:
        """The functions by the names of the arguments of `flex_attention`."""
        arrays = types.SimpleNamespace(**captured)
        given = {"score_mod": self.score, "mask_mod": self.mask}
        return {name: make(arrays) for name, make in given.items() if make is not None}


def normal(**shapes: Any) -> Callable[[np.random.Generator], dict[str, np.ndarray]]:
    """Arrays of random normal numbers by name."""
    return lambda rng: {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def integers(high: int, dtype: Any = np.int32, low: int = 0, **shapes: Any) -> Any:
    return lambda rng: {name: rng.integers(low, high, shape).astype(dtype) for name, shape in shapes.items()}


def both(*makers: Any) -> Any:
    return lambda rng: functools.reduce(lambda found, make: found | make(rng), makers, {})


def dense(query, key, value, score_mod=None, mask_mod=None, offset=0, added=0.0):
    """Attention by its definition; `added` to all scores, for the derivatives by each."""
    n, h = query.shape[2:]
    key, value = (jnp.repeat(x, n // key.shape[2], axis=2) for x in (key, value))
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) / np.sqrt(h) + added
    b, head, row, column = (jnp.asarray(x, jnp.int32) for x in np.indices(scores.shape))
    places = b, head, row + jnp.broadcast_to(jnp.asarray(offset, jnp.int32).reshape(-1, 1, 1, 1), b.shape), column
    everywhere = lambda fun, *x: jax.vmap(fun)(*(i.reshape(-1) for i in x)).reshape(scores.shape)
    if score_mod is not None:
        scores = everywhere(score_mod, scores, *places)
    see = scores != -jnp.inf
    if mask_mod is not None:
        see &= everywhere(mask_mod, *places)
    empty = ~see.any(-1, keepdims=True)
    p = jax.nn.softmax(jnp.where(see, scores, jnp.finfo(scores.dtype).min), -1)
    return jnp.einsum("bnts,bsnh->btnh", jnp.where(see & ~empty, p, 0), value)


def check(implementation: str, entry: Entry, sizes=(B, T, S, N, K, H), seed=0):
    """Values and gradients of a function in float32 against those of the dense definition in float64."""
    batch, t, s, n, k, h = sizes
    rng = np.random.default_rng([seed, 1])
    shapes = {"query": (batch, t, n, h), "key": (batch, s, k, h), "value": (batch, s, k, h)}
    arrays = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    d_out = rng.standard_normal((batch, t, n, h)).astype(np.float32)
    captured = entry.arrays(seed)
    moving = {name: x for name, x in captured.items() if jnp.issubdtype(x.dtype, jnp.floating)}
    still = {name: x for name, x in captured.items() if name not in moving}

    def ours(arrays, moving, still, d_out):
        def run(arrays, moving):
            made = entry.modifiers({**moving, **still})
            return jax_mfa.flex_attention(**arrays, **made, query_offset=entry.offset, implementation=implementation)

        out, pullback = jax.vjp(run, arrays, moving)
        return out, *pullback(d_out)

    out, d_arrays, d_captured = quick_jit(ours)(arrays, moving, still, d_out)
    with x64():

        def wanted(arrays, moving, still, d_out):
            def run(arrays, moving, added):
                return dense(**arrays, **entry.modifiers({**moving, **still}), offset=entry.offset, added=added)

            out, pullback = jax.vjp(run, arrays, moving, jnp.zeros((batch, n, t, s)))
            return out, *pullback(d_out)

        wide = lambda tree: jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), tree)
        expected, e_arrays, e_captured, of_scores = jax.tree.map(
            np.asarray, quick_jit(wanted)(wide(arrays), wide(moving), still, wide(d_out))
        )
    assert_close(out, expected, "float32", terms=s + h, what="out", largest_score=8)
    for name, got in d_arrays.items():
        assert_close(got, e_arrays[name], "float32", terms=s + t + h, what=name, gradient=True, largest_score=8)
    size = np.sqrt(np.square(np.where(np.isfinite(of_scores), of_scores, 0)).sum())  # if each is added once
    for name, got in d_captured.items():
        assert got.dtype == captured[name].dtype
        keywords = {"terms": of_scores.size, "gradient": True, "size": size, "largest_score": 8}
        assert_close(got, e_captured[name], captured[name].dtype, what=name, **keywords)


# --- how functions come


class Scaled:
    """A callable object, and a method of one."""

    def __init__(self, weights):
        self.weights = weights

    def __call__(self, score, b, n, t, s):
        return score * self.weights[n]

    def added(self, score, b, n, t, s):
        return score + self.weights[n] * self.weights[s]


def t5_bucket(distance, buckets=16, farthest=32):
    """T5's buckets of both directions (Raffel et al., arXiv:1910.10683)."""
    half = buckets // 2
    ahead = jnp.where(distance > 0, half, 0)
    distance = jnp.abs(distance)
    log = jnp.log(jnp.maximum(distance, 1) / (half // 2)) / np.log(farthest / (half // 2))
    far = half // 2 + (log * (half - half // 2)).astype(jnp.int32)
    return ahead + jnp.where(distance < half // 2, distance, jnp.minimum(far, half - 1))


@jax.custom_jvp
def straight_through(x):
    """Rounds, and has the derivative of what it rounds."""
    return jnp.round(4 * x) / 4


straight_through.defjvp(lambda primals, tangents: (straight_through(*primals), tangents[0]))


def with_default(c):
    return lambda score, b, n, t, s, table=c.w, factor=0.5: score + factor * table[t]


def nested(c):
    def outer(factor):
        return lambda score, b, n, t, s: score + factor(n) * c.w[abs(t - s)]

    return outer(lambda n: c.slopes[n])


SCORES = {
    "relative table": Entry(
        normal(w=(N, 2 * S)), lambda c: lambda x, b, n, t, s: x + c.w[n, jnp.clip(t - s + S, 0, 2 * S - 1)]
    ),
    "indices from the end": Entry(normal(w=(N, 2 * S)), lambda c: lambda x, b, n, t, s: x + c.w[n, t - s]),
    "ALiBi": Entry(normal(w=(N,)), lambda c: lambda x, b, n, t, s: x - c.w[n] * abs(s - t)),
    "soft cap": Entry(lambda rng: {"cap": np.float32(1.5)}, lambda c: lambda x, *_: c.cap * jnp.tanh(x / c.cap)),
    "causal by infinity": Entry(score=lambda c: lambda x, b, n, t, s: jnp.where(s <= t, x, -jnp.inf)),
    "rows that see nothing": Entry(score=lambda c: lambda x, b, n, t, s: jnp.where(s < t - 2, x, -jnp.inf)),
    "by head and batch entry": Entry(
        normal(w=(B, N), v=(B,)), lambda c: lambda x, b, n, t, s: x * c.w[b, n] + c.v[b] * (t - s)
    ),
    "products of captured numbers": Entry(
        normal(a=(), d=()), lambda c: lambda x, b, n, t, s: x * (c.a * c.d) + jnp.exp(c.a) * (t - s) / 4
    ),
    "grid": Entry(normal(w=(9, 9)), lambda c: lambda x, b, n, t, s: x + c.w[t // 3 - s // 3 + 4, t % 3 - s % 3 + 4]),
    "division of negative numbers": Entry(
        normal(w=(12, 5)), lambda c: lambda x, b, n, t, s: x + c.w[(t - s) // 3 + 4, (t - s) % 5]
    ),
    "logarithm of distance": Entry(
        normal(w=(N,)),
        lambda c: (
            lambda x, b, n, t, s: jnp.where(
                t == s, x, x - c.w[n] * jnp.log(jnp.where(t == s, 1, abs(t - s)).astype(x.dtype))
            )
        ),
    ),
    "a whole matrix": Entry(normal(w=(B, N, T, S)), lambda c: lambda x, b, n, t, s: x + c.w[b, n, t, s]),
    "row by row": Entry(normal(w=(T, S)), lambda c: lambda x, b, n, t, s: x + c.w[t][s]),
    "integers": Entry(
        both(integers(9, np.int64, low=-9, w=(20,)), integers(255, np.uint8, u=(20,))),
        lambda c: lambda x, b, n, t, s: x + 0.1 * c.w[t + s] + (c.u[t] + c.u[s]) / 100,
    ),
    "16 bits": Entry(
        lambda rng: {
            "w": rng.standard_normal(20).astype(np.float16),
            "v": rng.standard_normal(20).astype(jnp.bfloat16),
        },
        lambda c: lambda x, b, n, t, s: x + c.w[t + s].astype(x.dtype) * c.v[s].astype(x.dtype),
    ),
    "unchanged": Entry(score=lambda c: lambda x, b, n, t, s: x),
    "a constant": Entry(score=lambda c: lambda x, b, n, t, s: 3.0),
    "without the score": Entry(normal(w=(20,)), lambda c: lambda x, b, n, t, s: c.w[t + s]),
    "branches": Entry(
        normal(w=(20,)),
        lambda c: lambda x, b, n, t, s: lax.cond(t < s, lambda x: x + c.w[t], lambda x: x * c.w[s], x),
    ),
    "select and switch": Entry(
        normal(w=(20,)),
        lambda c: (
            lambda x, b, n, t, s: jnp.select(
                [t < s, t == s], [x + c.w[t], 2 * x], lax.switch(s % 3, [lambda: x, lambda: x * c.w[s], lambda: c.w[t]])
            )
        ),
    ),
    "take and get": Entry(
        normal(w=(20,), v=(T + 2,)),
        lambda c: lambda x, b, n, t, s: x + jnp.take(c.w, t + s) + c.v.at[2 * s].get(mode="fill", fill_value=0.5),
    ),
    "coordinates": Entry(
        normal(p=(B, S, 3), w=(N,)),
        lambda c: (
            lambda x, b, n, t, s: x - jax.nn.softplus(c.w[n]) * jnp.sqrt(1e-2 + jnp.sum((c.p[b, t] - c.p[b, s]) ** 2))
        ),
    ),
    "functions with rules of their own": Entry(
        normal(w=(20,)),
        lambda c: (
            lambda x, b, n, t, s: (
                jax.nn.relu(x + c.w[t]) + jax.nn.silu(c.w[s]) + jnp.logaddexp(x, c.w[t]) + straight_through(c.w[t + s])
            )
        ),
    ),
    "partial": Entry(normal(w=(20,)), lambda c: functools.partial(lambda w, x, b, n, t, s: x + w[t], c.w)),
    "a callable object": Entry(normal(w=(N,)), lambda c: Scaled(c.w)),
    "a bound method": Entry(normal(w=(20,)), lambda c: Scaled(c.w).added),
    "jitted": Entry(normal(w=(20,)), lambda c: jax.jit(lambda x, b, n, t, s: x + c.w[s] * jnp.where(t > s, c.w[t], 1))),
    "rematerialised": Entry(
        normal(w=(20,)), lambda c: jax.checkpoint(lambda x, b, n, t, s: x + jnp.sin(c.w[s] * c.w[t]))
    ),
    "default arguments": Entry(normal(w=(20,)), with_default),
    "nested closures": Entry(normal(w=(20,), slopes=(N,)), nested),
    "loops": Entry(
        normal(w=(20,)),
        lambda c: lambda x, b, n, t, s: lax.fori_loop(0, 3, lambda i, y: y + c.w[t + i] * c.w[s], x),
    ),
    "bits": Entry(normal(w=(20,)), lambda c: lambda x, b, n, t, s: x + c.w[(t ^ s) & 7] + c.w[(t << 1) >> 2]),
    "powers": Entry(
        lambda rng: {"w": rng.random(20).astype(np.float32) + 0.1},
        lambda c: lambda x, b, n, t, s: x + c.w[s] ** (1 + t % 3) - jnp.power(c.w[t], 0.5),
    ),
    "T5": Entry(normal(w=(16, N)), lambda c: lambda x, b, n, t, s: x + c.w[t5_bucket(s - t), n]),
    "queries further on": Entry(
        normal(w=(2 * S,)), lambda c: lambda x, b, n, t, s: x + c.w[t - s + S], offset=np.array([2, -1], np.int32)
    ),
}
MASKS = {
    "window": Entry(mask=lambda c: lambda b, n, t, s: (s <= t) & (t - s < 3)),
    "documents": Entry(integers(3, w=(B, S)), mask=lambda c: lambda b, n, t, s: c.w[b, t] == c.w[b, s]),
    "prefix": Entry(lambda rng: {"w": np.array([2, 5])}, mask=lambda c: lambda b, n, t, s: (s <= t) | (s < c.w[b])),
    "bools": Entry(
        lambda rng: {"w": rng.random((B, T, S)) < 0.6}, mask=lambda c: lambda b, n, t, s: c.w[b, t, s] | (n == 0)
    ),
    "by thresholds": Entry(normal(w=(S,)), mask=lambda c: lambda b, n, t, s: c.w[t] < c.w[s] + 0.5),
    "nothing": Entry(mask=lambda c: lambda b, n, t, s: False),
    "together": Entry(
        both(normal(w=(N, 2 * S)), integers(2, d=(B, 2 * S))),
        lambda c: lambda x, b, n, t, s: x * (1 + c.d[b, s]) + c.w[n, t - s + S],
        lambda c: lambda b, n, t, s: (c.d[b, t] == c.d[b, s]) | (t == s),
        offset=3,
    ),
}
