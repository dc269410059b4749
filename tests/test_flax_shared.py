"""What linen and nnx share: rotary embedding, and a multi-head attention in plain numpy that both are held to."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import assert_allclose

from jax_mfa.flax import rotary_embedding


def tolerance(dtype=np.float32, terms=256):
    """Sums of `terms` float32 terms of order one; a half dtype is rounded to at most 8 times from input to output."""
    eps = float(jnp.finfo(dtype).eps)
    error = terms * float(np.finfo(np.float32).eps) + (8 * eps if eps > 1e-6 else 0)
    return {"rtol": error, "atol": error}


def normal(seed, shape, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def numpy_rotary(x, positions, base, fraction=1.0):
    """Pairs (i, i + R/2) as complex numbers, multiplied by exp(√−1 · position · base^(−2i/R))."""
    half = round(fraction * x.shape[-1]) // 2
    z = x[..., :half] + 1j * x[..., half : 2 * half]
    theta = base ** (-2.0 * np.arange(half) / (2 * half))
    z = z * np.exp(1j * np.asarray(positions)[..., :, None, None] * theta)
    return np.concatenate([z.real, z.imag, x[..., 2 * half :]], axis=-1)


def numpy_module(params, inputs_q, inputs_k=None, *, see=True, bias=0.0, base=None, fraction=1.0, cap=None, offset=0):
    """FlashMultiHeadAttention in float64: every head by itself, `see` broadcastable to [B, N, T, S]."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    inputs_q = np.asarray(inputs_q, np.float64)
    inputs_k = inputs_q if inputs_k is None else np.asarray(inputs_k, np.float64)

    def project(name, x):
        return np.einsum("btf,fnh->btnh", x, params[name]["kernel"]) + params[name].get("bias", 0.0)

    def normalize(name, x):
        if name not in params:
            return x
        x = x - x.mean(-1, keepdims=True)
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * params[name]["scale"]

    q, k = normalize("query_ln", project("query", inputs_q)), normalize("key_ln", project("key", inputs_k))
    v = project("value", inputs_k)
    (b, t, n, h), s = q.shape, k.shape[1]
    if base is not None:
        q, k = numpy_rotary(q, np.arange(t) + offset, base, fraction), numpy_rotary(k, np.arange(s), base, fraction)
    see = np.broadcast_to(np.asarray(see) != 0, (b, n, t, s))
    bias = np.broadcast_to(bias, (b, n, t, s))
    out = np.zeros((b, t, n, h))
    for i in range(b):
        for j in range(n):
            x = q[i, :, j] @ k[i, :, j // (n // k.shape[2])].T / np.sqrt(h) + bias[i, j]
            x = x if cap is None else cap * np.tanh(x / cap)
            e = np.where(see[i, j], np.exp(x), 0.0)
            total = e.sum(-1, keepdims=True) + (np.exp(params["sinks"][j]) if "sinks" in params else 0.0)
            out[i, :, j] = e / np.where(total == 0, 1.0, total) @ v[i, :, j // (n // k.shape[2])]
    return np.einsum("btnh,nhf->btf", out, params["out"]["kernel"]) + params["out"].get("bias", 0.0)


def causal(t, s=None, offset=0, left=None):
    distance = np.arange(t)[:, None] + offset - np.arange(t if s is None else s)
    return (distance >= 0) & (distance <= (np.inf if left is None else left))


# settings that no module of either flavour takes, the error, and its message
OF_THE_WRONG_KIND = [
    ({"num_heads": 2.0}, TypeError, "^num_heads must be an integer, got 2.0"),
    ({"num_heads": None}, TypeError, "^num_heads must be an integer, got None"),
    ({"num_key_value_heads": True}, TypeError, "^num_key_value_heads must be an integer, got True"),
    ({"num_kv_heads": 2.0}, TypeError, "^num_kv_heads must be an integer, got 2.0"),
    ({"head_dim": 4.0}, TypeError, "^head_dim must be an integer, got 4.0"),
    ({"qkv_features": "24"}, TypeError, "^qkv_features must be an integer, got '24'"),
    ({"rotary_base": 1e4, "rotary_fraction": float("nan")}, ValueError, "^rotary_fraction must .*, got nan"),
    ({"rotary_base": 1e4, "rotary_fraction": "x"}, TypeError, "^rotary_fraction must be a number, got 'x'"),
    ({"rotary_base": 10**400}, ValueError, "^rotary_base must be a positive finite number, got 1000"),
]

# modules of either flavour that differ in what they compute: attributes, and numpy_module's arguments for T tokens
SETTINGS = {
    "plain": ({}, lambda t: {}),
    "gqa": ({"num_key_value_heads": 2, "is_causal": True}, lambda t: {"see": causal(t)}),
    "mqa wide heads": ({"num_key_value_heads": 1, "head_dim": 10, "use_bias": False}, lambda t: {}),
    "rotary": ({"rotary_base": 100.0, "num_key_value_heads": 3}, lambda t: {"base": 100.0}),
    "part rotary": (
        {"rotary_base": 1e4, "rotary_fraction": 0.5, "qkv_features": 48},
        lambda t: {"base": 1e4, "fraction": 0.5},
    ),
    "window": ({"local_window_size": (2, None), "is_causal": True}, lambda t: {"see": causal(t, left=2)}),
    "cap": ({"logits_soft_cap": 0.7}, lambda t: {"cap": 0.7}),
    "sinks": ({"use_sinks": True}, lambda t: {}),
    "normalised": ({"normalize_qk": True, "out_features": 5}, lambda t: {}),
}

# modules whose cache takes prompts of different lengths
RAGGED = {
    "whole": {"num_kv_heads": 2, "rotary_base": 100.0},
    "ring": {"num_kv_heads": 2, "rotary_base": 100.0, "local_window_size": (2, None), "ring_cache": True},
}


def perturbed(params, seed=0):
    """Parameters with random values everywhere, also where initialisers put zeros and ones."""
    leaves, tree = jax.tree.flatten(params)
    rng = np.random.default_rng(seed)
    return jax.tree.unflatten(tree, [x + 0.3 * rng.standard_normal(x.shape).astype(np.float32) for x in leaves])


# --- rotary embedding


@pytest.mark.share(2)
@pytest.mark.parametrize("fraction", [1.0, 0.5, 0.25])
@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
def test_rotary_is_the_formula(fraction, lead):
    x = normal(0, (*lead, 9, 2, 16))
    positions = np.random.default_rng(1).integers(0, 500, (*lead[:1], *(1,) * (len(lead) - 1), 9))
    out = rotary_embedding(jnp.asarray(x), positions, base=321.0, fraction=fraction)
    want = numpy_rotary(x.astype(np.float64), np.broadcast_to(positions, (*lead, 9)), 321.0, fraction)
    # an angle up to 500 is off by half an ulp of 512
    assert_allclose(out, want, rtol=0, atol=2 * 512 * np.finfo(np.float32).eps)
    assert np.abs(out - x)[..., -1, :, 0].max() > 0.01
    unturned = round(16 * (1 - fraction))
    np.testing.assert_array_equal(out[..., 16 - unturned :], x[..., 16 - unturned :])


def test_rotary_scores_depend_on_distances_only():
    q, k = normal(0, (5, 1, 8)), normal(1, (7, 1, 8))

    def scores(shift):
        turn = lambda x: rotary_embedding(jnp.asarray(x), jnp.arange(x.shape[0]) + shift, base=50.0)[:, 0]
        return turn(q) @ turn(k).T

    assert_allclose(scores(0), scores(40), **tolerance())
    moved = rotary_embedding(jnp.asarray(q), jnp.arange(5) + 1, base=50.0)[:, 0]
    still = rotary_embedding(jnp.asarray(k), jnp.arange(7), base=50.0)[:, 0]
    assert np.abs(moved @ still.T - scores(0)).max() > 0.1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rotary_rounds_once(dtype):
    x = jnp.asarray(normal(0, (6, 2, 8))).astype(dtype)
    out = rotary_embedding(x, jnp.arange(6) + 100)
    want = rotary_embedding(x.astype(jnp.float32), jnp.arange(6) + 100)
    assert out.dtype == x.dtype
    np.testing.assert_array_equal(out, want.astype(dtype))


def test_rotary_under_strict_rank_promotion():
    with jax.numpy_rank_promotion("raise"):
        out = rotary_embedding(jnp.asarray(normal(0, (2, 5, 3, 8))), jnp.arange(5))
    assert out.shape == (2, 5, 3, 8)


@pytest.mark.parametrize(
    ("keywords", "positions", "error", "match"),
    [
        ({"fraction": 0.3}, np.arange(4), ValueError, "^fraction must .*, got 0.3"),
        ({"fraction": 0.0}, np.arange(4), ValueError, "^fraction must"),
        ({"fraction": 1.5}, np.arange(4), ValueError, "^fraction must"),
        ({"fraction": float("nan")}, np.arange(4), ValueError, "^fraction must .*, got nan"),
        ({"fraction": "x"}, np.arange(4), TypeError, "^fraction must be a number, got 'x'"),
        ({"base": -1.0}, np.arange(4), ValueError, "^base must be .*, got -1.0"),
        ({"base": 10**400}, np.arange(4), ValueError, "^base must be a positive finite number, got 1000"),
        ({"base": None}, np.arange(4), TypeError, "^base must be a number, got None"),
        ({"x": [[[1.0, 2.0]]]}, np.arange(1), TypeError, r"^x must be a floating array \[..., T, N, H\], got list"),
        ({"x": np.ones((4, 1, 8), np.int32)}, np.arange(4), TypeError, r"^x must be .*, got int32\[4, 1, 8\]"),
        ({"x": np.ones((4, 8), np.float32)}, np.arange(4), ValueError, r"^x must have .*, got \[4, 8\]"),
        ({}, np.arange(5), ValueError, r"positions.*\[2, 4\].*\[5\]"),
        ({}, np.arange(4.0, dtype=np.float32), TypeError, "positions must be integers"),
    ],
)
def test_rotary_errors_name_the_argument(keywords, positions, error, match):
    with pytest.raises(error, match=match):
        rotary_embedding(**{"x": jnp.asarray(normal(0, (2, 4, 1, 8))), "positions": positions, **keywords})
