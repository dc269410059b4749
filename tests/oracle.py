"""Attention and its gradients in float64, one row of scores at a time, in plain numpy.

The oracle shares no line with the package: it takes the arguments of `jax_mfa.flash_attention`, writes the definition's
mathematics out for a single query row, and derives each gradient by hand. Columns a row does not see are never
touched, so what they hold cannot matter.
"""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Answer:
    out: np.ndarray
    lse: np.ndarray
    gradients: dict[str, np.ndarray]
    largest_score: float  # largest magnitude among the rows' largest scores
    sizes: dict[str, float]  # for gradients that sum over many scores: the root of the sum of the terms' squares
    # the same for all but sinks, each derivative by a score counted as large as what it is a difference of
    cancelled: dict[str, float]


def philox(key, counter):
    """Philox-4×32-10 on 64-bit integers: `key` two words, `counter` four arrays; four arrays of words."""
    low = np.uint64(0xFFFFFFFF)
    c = [np.asarray(x).astype(np.uint64) for x in counter]
    k0, k1 = (int(x) for x in key)
    for _ in range(10):
        product0, product1 = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        high0, high1 = product0 >> np.uint64(32), product1 >> np.uint64(32)
        c = [high1 ^ c[1] ^ np.uint64(k0), product1 & low, high0 ^ c[3] ^ np.uint64(k1), product0 & low]
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c


def kept(rate: float, seed, b: int, n: int, t: int, columns: int) -> np.ndarray:
    """Which scores of a row dropout keeps: word s % 4 of counter (s // 4, t, n, b) is at least rate · 2³²."""
    group = np.arange(-(-columns // 4))
    words = np.stack(philox(seed, (group, *(np.full_like(group, x) for x in (t, n, b)))), axis=-1)
    return words.reshape(-1)[:columns] >= round(rate * 2**32)


def seed_words(seed) -> tuple[int, int]:
    """The key of the generator: low and high word of an integer, or the two words given."""
    seed = np.asarray(seed)
    return (int(seed) & 0xFFFFFFFF, int(seed) >> 32 & 0xFFFFFFFF) if seed.ndim == 0 else (int(seed[0]), int(seed[1]))


def _sum_to(x, shape):
    """Sums a gradient over the axes along which an argument of `shape` was broadcast."""
    x = x.sum(tuple(range(x.ndim - len(shape))))
    return x.sum(tuple(i for i, d in enumerate(shape) if d == 1), keepdims=True).reshape(shape)


def attention(
    query,
    key,
    value,
    bias=None,
    mask=None,
    *,
    scale=None,
    is_causal=False,
    query_seq_lengths=None,
    key_value_seq_lengths=None,
    local_window_size=None,
    query_offset=0,
    logits_soft_cap=None,
    alibi_slopes=None,
    sinks=None,
    query_segment_ids=None,
    key_value_segment_ids=None,
    key_value_ranges=None,
    block_mask=None,
    dropout_rate=0.0,
    dropout_seed=None,
    d_out=None,
    d_lse=None,
) -> Answer:
    """The answer for a problem, with gradients where cotangents are given."""
    wide = lambda x: None if x is None else np.asarray(x).astype(np.float64)
    lead = np.shape(query)[:-3]
    flat = lambda x, tail: np.broadcast_to(x, lead + tail).reshape(-1, *tail)
    T, N, H = np.shape(query)[-3:]
    S, K = np.shape(key)[-3:-1]
    V = np.shape(value)[-1]
    q, k, v = flat(wide(query), (T, N, H)), flat(wide(key), (S, K, H)), flat(wide(value), (S, K, V))
    B = q.shape[0]
    factor = 1 / np.sqrt(H) if scale is None else float(scale)
    window = local_window_size if isinstance(local_window_size, (tuple, list)) else (local_window_size,) * 2
    full_bias = None if bias is None else flat(wide(bias), (N, T, S))
    full_mask = None if mask is None else flat(np.asarray(mask), (N, T, S))
    offset = flat(np.asarray(query_offset), ())
    query_length = flat(np.asarray(T if query_seq_lengths is None else query_seq_lengths), ())
    key_length = flat(np.asarray(S if key_value_seq_lengths is None else key_value_seq_lengths), ())
    slopes = None if alibi_slopes is None else flat(wide(alibi_slopes), (N,))
    sink = None if sinks is None else flat(wide(sinks), (N,))
    segments = None
    if query_segment_ids is not None:
        segments = flat(np.asarray(query_segment_ids), (T,)), flat(np.asarray(key_value_segment_ids), (S,))
    ranges = None if key_value_ranges is None else flat(np.asarray(key_value_ranges), (T, 2))
    blocks = None
    if block_mask is not None:
        rows, cols = block_mask.block_size
        blocks = flat(np.asarray(block_mask.blocks), (N, -(-T // rows), -(-S // cols)))

    out, lse = np.zeros((B, T, N, V)), np.full((B, T, N), -np.inf)
    d_out = None if d_out is None else flat(wide(d_out), (T, N, V))
    d_lse = np.zeros((B, T, N)) if d_lse is None else flat(wide(d_lse), (T, N))
    dq, dk, dv, d_bias = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape), np.zeros((B, N, T, S))
    d_scale, d_slopes, d_sinks, largest = 0.0, np.zeros((B, N)), np.zeros((B, N)), 0.0
    squares = dict.fromkeys(("bias", "scale", "alibi_slopes", "sinks"), 0.0)
    cancelled = dict.fromkeys(("bias", "scale", "alibi_slopes"), 0.0)
    entries = {"query": np.zeros(q.shape), "key": np.zeros(k.shape), "value": np.zeros(v.shape)}  # squares of each

    for b, n, t in np.ndindex(B, N, T):
        head, position, column = n // (N // K), t + int(offset[b]), np.arange(S)

        see = (column < key_length[b]) & (t < query_length[b])
        if is_causal:
            see &= column <= position
        if window[0] is not None:
            see &= column >= position - window[0]
        if window[1] is not None:
            see &= column <= position + window[1]
        if full_mask is not None:
            see &= full_mask[b, n, t]
        if segments is not None:
            see &= segments[0][b, t] == segments[1][b]
        if ranges is not None:
            see &= (column >= ranges[b, t, 0]) & (column < ranges[b, t, 1])
        if blocks is not None:
            see &= blocks[b, n, t // rows, column // cols]
        if full_bias is not None and logits_soft_cap is None:
            see &= full_bias[b, n, t] != -np.inf
        if not see.any():
            continue

        column, keys, values = column[see], k[b, see, head], v[b, see, head]
        product = keys @ q[b, t, n]
        x = factor * product
        if full_bias is not None:
            x = x + full_bias[b, n, t, see]
        if slopes is not None:
            x = x + slopes[b, n] * (column - position)
        y = x if logits_soft_cap is None else logits_soft_cap * np.tanh(x / logits_soft_cap)
        high = y.max() if sink is None else max(y.max(), sink[b, n])
        total = np.exp(y - high).sum() + (0 if sink is None else np.exp(sink[b, n] - high))
        lse[b, t, n] = high + np.log(total)
        largest = max(largest, abs(high))
        p = np.exp(y - high) / total  # lse has not the digits for it where scores are huge
        keep = np.ones(len(p))
        if dropout_rate:
            keep = kept(dropout_rate, seed_words(dropout_seed), b, n, t, S)[see] / (1 - dropout_rate)
        out[b, t, n] = (p * keep) @ values

        if d_out is None:
            continue
        do, dl = d_out[b, t, n], d_lse[b, t, n]
        dv[b, see, head] += np.outer(p * keep, do)
        d_p = keep * (values @ do)
        d_y = p * (d_p - p @ d_p + dl)
        if sink is not None:
            d_sink = np.exp(sink[b, n] - high) / total * (dl - p @ d_p)
            d_sinks[b, n] += d_sink
            squares["sinks"] += d_sink**2
        d_cap = 1 if logits_soft_cap is None else 1 / np.cosh(np.clip(x / logits_soft_cap, -300, 300)) ** 2
        d_x = d_y * d_cap
        dq[b, t, n] += factor * (d_x @ keys)
        dk[b, see, head] += factor * np.outer(d_x, q[b, t, n])
        d_bias[b, n, t, see] += d_x
        d_scale += d_x @ product
        d_slopes[b, n] += d_x @ (column - position)
        term = p * (abs(d_p) + abs(p @ d_p) + abs(dl)) * d_cap
        entries["query"][b, t, n] += factor**2 * (term**2 @ keys**2)
        entries["key"][b, see, head] += factor**2 * np.outer(term**2, q[b, t, n] ** 2)
        entries["value"][b, see, head] += np.outer((p * keep) ** 2, do**2)
        for found, x in ((squares, d_x), (cancelled, term)):
            found["bias"] += x @ x
            found["scale"] += (x * product) @ (x * product)
            found["alibi_slopes"] += (x * (column - position)) @ (x * (column - position))

    gradients = {}
    if d_out is not None:
        shaped = lambda x, like: _sum_to(x.reshape(lead + x.shape[1:]), np.shape(like))
        gradients = {"query": shaped(dq, query), "key": shaped(dk, key), "value": shaped(dv, value)}
        if bias is not None:
            gradients["bias"] = shaped(d_bias, bias)
        if scale is not None:
            gradients["scale"] = np.asarray(d_scale)
        if alibi_slopes is not None:
            gradients["alibi_slopes"] = shaped(d_slopes, alibi_slopes)
        if sinks is not None:
            gradients["sinks"] = shaped(d_sinks, sinks)
    return Answer(
        out.reshape(*lead, T, N, V),
        lse.reshape(*lead, T, N),
        gradients,
        largest,
        {name: x**0.5 for name, x in squares.items()},
        {name: np.max(x, initial=0.0) ** 0.5 for name, x in (cancelled | entries).items()},
    )
