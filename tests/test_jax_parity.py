"""In place of `jax.nn.dot_product_attention`: the same arguments, and the same answers where it defines them.

They differ where a row sees nothing: zeros here, the mean of the values there.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import arrays, assert_close, cotangents, mesh_of, needs_eight_devices, qkv, quick_jit

import jax_mfa

LENGTHS = [(9, 9), (7, 12), (12, 7)]
mask = lambda t, s: np.random.default_rng(1).random((2, 4, t, s)) < 0.7
lengths = lambda *x: np.array(x, np.int32)

ARGUMENTS = {
    "dense": lambda t, s: {},
    "scale": lambda t, s: {"scale": 0.3},
    "bias": lambda t, s: {"bias": arrays((2, 4, t, s))[0]},
    "broadcast_bias": lambda t, s: {"bias": arrays((1, 4, 1, s))[0]},
    "mask": lambda t, s: {"mask": mask(t, s)},
    "broadcast_mask": lambda t, s: {"mask": mask(t, s)[:, :1, :1]},
    "causal": lambda t, s: {"is_causal": True},
    "window": lambda t, s: {"local_window_size": 3},
    "causal_window": lambda t, s: {"is_causal": True, "local_window_size": (4, 0)},
    "two_sided_window": lambda t, s: {"local_window_size": (5, 2)},
    "key_lengths": lambda t, s: {"key_value_seq_lengths": lengths(3, s)},
    "query_lengths": lambda t, s: {"query_seq_lengths": lengths(t, 2)},
    "both_lengths_causal": lambda t, s: {
        "is_causal": True,
        "query_seq_lengths": lengths(t - 1, 2),
        "key_value_seq_lengths": lengths(3, s),
    },
    "everything": lambda t, s: {
        "is_causal": True,
        "local_window_size": (6, 0),
        "bias": arrays((1, 4, t, s))[0],
        "mask": mask(t, s),
        "scale": 0.7,
        "query_seq_lengths": lengths(t - 1, t),
        "key_value_seq_lengths": lengths(s, s - 2),
    },
}


def _program(attend, name, t, s):
    """Output and gradients of an attention in the case of this name, as one program, and with what to call it."""
    keywords = ARGUMENTS[name](t, s)
    q, k, v = qkv(T=t, S=s)
    bias = keywords.pop("bias", None)
    inputs = {"query": q, "key": k, "value": v} | ({} if bias is None else {"bias": bias})
    d_out, _ = cotangents(inputs)

    def run(inputs, d_out):
        out, pullback = jax.vjp(lambda x: attend(**x, **keywords), inputs)
        return out, pullback(d_out)[0]

    return quick_jit(run), inputs, d_out


@functools.cache
def _stock(name, t, s):
    """Output and gradients of `jax.nn` where a row sees something, and which rows do: [B, T, N]."""
    keywords = ARGUMENTS[name](t, s)
    run, inputs, d_out = _program(jax.nn.dot_product_attention, name, t, s)
    flash = functools.partial(jax_mfa.flash_attention, implementation="reference", **{**inputs, **keywords})
    seen = np.asarray(quick_jit(flash)()[1]) != -np.inf
    if "query_seq_lengths" in keywords:  # stock rows beyond a query length are zero, or the mean, by version
        seen &= (np.arange(t) < keywords["query_seq_lengths"][:, None])[..., None]
    return seen, *run(inputs, jnp.asarray(np.where(seen[..., None], d_out, 0)))


@pytest.mark.share(16)
@pytest.mark.parametrize("t,s", LENGTHS, ids=str)
@pytest.mark.parametrize("name", ARGUMENTS)
def test_equals_jax_nn_wherever_a_row_sees_something(implementation, name, t, s):
    if t == s and "causal" not in name and "window" not in name:
        pytest.skip("where only masks of their own ask for lengths, unequal ones say more")
    if set(ARGUMENTS[name](t, s)) == {"local_window_size"} and jax.__version_info__ < (0, 5):
        pytest.skip("this jax.nn ignores a window that comes without another mask")
    seen, wanted, wanted_gradients = _stock(name, t, s)
    run, inputs, d_out = _program(implementation.attend, name, t, s)
    got, got_gradients = run(inputs, jnp.asarray(np.where(seen[..., None], d_out, 0)))
    widen = lambda x: np.asarray(x, np.float64)
    zero = lambda x: np.where(seen[..., None], widen(x), 0)
    assert_close(zero(got), zero(wanted), "float32", terms=32, largest_score=4)
    for which, gradient in wanted_gradients.items():
        assert_close(
            got_gradients[which], widen(gradient), "float32", terms=64, largest_score=4, gradient=True, what=which
        )


def test_takes_every_argument_of_jax_nn_by_the_same_name_and_kind():
    stock = inspect.signature(jax.nn.dot_product_attention).parameters
    ours = inspect.signature(jax_mfa.dot_product_attention).parameters
    for name, parameter in stock.items():
        assert name in ours and ours[name].kind == parameter.kind, name
        if name not in ("scale", "implementation"):
            assert ours[name].default == parameter.default, name
    positional = [n for n, p in stock.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [n for n, p in ours.items() if p.kind is p.POSITIONAL_OR_KEYWORD] == positional


@pytest.mark.skipif(
    "return_residual" not in inspect.signature(jax.nn.dot_product_attention).parameters, reason="older jax.nn"
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_residual_equals_that_of_jax_nn(implementation, dtype):
    q, k, v = qkv(dtype=dtype)
    out, lse = jax.jit(functools.partial(implementation.attend, is_causal=True, return_residual=True))(q, k, v)
    assert out.dtype == lse.dtype == dtype
    wide = [x.astype(np.float32) for x in (q, k, v)]  # stock float16 does not run on every CPU
    stock = jax.nn.dot_product_attention
    wanted, wanted_lse = stock(*wide, is_causal=True, return_residual=True)
    assert jax.eval_shape(lambda *x: stock(*x, return_residual=True), q, k, v)[1].dtype == lse.dtype
    assert_close(out, wanted, dtype, terms=32, largest_score=4)
    assert_close(lse, wanted_lse, dtype, terms=32, largest_score=4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_residual_beside_it_keeps_its_digits(implementation, dtype):
    q, k, v = qkv(dtype=dtype)
    _, lse = implementation.flash(q, k, v)
    _, narrow = implementation.attend(q, k, v, return_residual=True)
    assert lse.dtype == np.float32 and narrow.dtype == dtype
    np.testing.assert_array_equal(lse.astype(dtype), narrow)


def test_xla_is_what_jax_nn_calls_blockwise():
    q, k, v = qkv()
    got = jax_mfa.dot_product_attention(q, k, v, implementation="xla")
    np.testing.assert_array_equal(got, jax_mfa.dot_product_attention(q, k, v, implementation="blockwise"))
    assert jax_mfa.explain(q, k, v, implementation="xla").implementation == "blockwise"


def test_the_batch_axis_may_be_missing_as_in_jax_nn(implementation):
    q, k, v = (x[0] for x in qkv())
    wanted = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    assert_close(implementation.attend(q, k, v, is_causal=True), wanted, "float32", terms=32, largest_score=4)


class Parameter:
    """An array as some libraries hold theirs."""

    def __init__(self, x):
        self.x = x

    def __jax_array__(self):
        return jnp.asarray(self.x)


@pytest.mark.parametrize("function", ["dot_product_attention", "flash_attention", "flex_attention", "decode_attention"])
def test_parameters_of_libraries_are_arrays(function):
    q, k, v = qkv()
    attention = getattr(jax_mfa, function)
    keywords = {"bias": arrays((2, 4, q.shape[1], k.shape[1]))[0], "sinks": arrays((4,))[0]}
    if function == "decode_attention":
        keywords["lengths"] = np.array([5, k.shape[1]], np.int32)
    wanted = attention(q, k, v, **keywords)
    held = {name: Parameter(x) for name, x in keywords.items()}
    jax.tree.map(np.testing.assert_array_equal, attention(*map(Parameter, (q, k, v)), **held), wanted)


@needs_eight_devices
def test_parameters_of_libraries_are_arrays_over_devices():
    x = qkv(T=8, S=8)
    place = {"mesh": mesh_of(4), "axis_name": "ring", "is_causal": True}
    got, wanted = (jax_mfa.context_parallel_attention(*map(f, x), **place) for f in (Parameter, np.asarray))
    np.testing.assert_array_equal(got, wanted)


def test_float16_runs_under_jit(implementation):
    # where stock jax.nn raises on CPU
    q, k, v = qkv(dtype="float16")
    out = jax.jit(implementation.attend)(q, k, v)
    assert out.dtype == np.float16 and np.isfinite(out).all()
