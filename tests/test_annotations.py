"""Annotations of public signatures are true: what goes in and what comes out has the shapes that they say."""

from __future__ import annotations

import functools
import inspect
import types
import typing

import attention_cases
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from flax import nnx
from harness import arrays, mesh_of, qkv

import jax_mfa
from jax_mfa import typing as annotations
from jax_mfa.flax import linen as mfa_linen
from jax_mfa.flax import nnx as mfa_nnx
from jax_mfa.flax import rotary_embedding
from jax_mfa.kv_cache import contiguous as cache

# lists have no shape to check, and `Lists` refers to itself
NAMES = {**{name: getattr(annotations, name) for name in annotations.__all__}, "Lists": list}


def hints_of(function) -> dict:
    """The types of a function's parameters by name, those of its `**keywords` among them, and of "return"."""
    hints = typing.get_type_hints(function, localns=NAMES)
    for name, hint in list(hints.items()):
        if typing.get_origin(hint) is typing.Unpack:
            (keywords,) = typing.get_args(hints.pop(name))
            hints |= typing.get_type_hints(typing.get_origin(keywords) or keywords, localns=NAMES)
    return hints


def fits(x, hint) -> bool:
    """Whether `x` is of a type, shapes included; of what is neither a class, a union nor a tuple anything is."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(fits(x, part) for part in parts)
    if origin is tuple and Ellipsis not in parts:
        return isinstance(x, tuple) and len(x) == len(parts) and all(fits(*pair) for pair in zip(x, parts))
    return isinstance(x, hint) if isinstance(hint, type) and hint is not typing.Any else True


def call(function, *args, **keywords):
    """The function's result, once arguments and result have shown the shapes of its signature, one size to a letter."""
    hints = hints_of(function)
    given = inspect.signature(function).bind(*args, **keywords).arguments
    given |= given.pop("keywords", {})
    with jaxtyping.jaxtyped("context"):
        for name, x in given.items():
            if name in hints and not fits(x, hints[name]):
                raise TypeError(f"{name} of shape {np.shape(x)} is no {hints[name]}")
        result = function(*args, **keywords)
        if not fits(result, hints["return"]):
            raise TypeError(f"the result of shapes {jax.tree.map(np.shape, result)} is no {hints['return']}")
    return result


# T ≠ S, V ≠ H, two query heads for each of K
SIZES = {"B": 2, "T": 5, "S": 7, "N": 4, "K": 2, "H": 8, "V": 6}
Q, K, V = qkv(**SIZES)
EVERYTHING = attention_cases.BY_NAME["everything"].arguments()
LENGTHS = np.array([7, 6], np.int32)


def pages():
    key, value = arrays((3, 8, 2, 8), (3, 8, 2, 6))
    return key, value, np.array([[0], [2]], np.int32), LENGTHS


def ring(function, **keywords):
    q, k, v = qkv(**{**SIZES, "T": 8, "S": 16})
    bias = np.zeros((4, 8, 16), np.float32)
    call(function, q, k, v, bias, axis_name="ring", mesh=mesh_of(2), positions=np.arange(8), **keywords)


def book():
    found = jax_mfa.PageBook(4, 8)
    found.reserve([found.allocate(), found.allocate()], [9, 3])
    return found


def module():
    return mfa_nnx.FlashMultiHeadAttention(4, 8, num_key_value_heads=2, out_features=6, rngs=nnx.Rngs(0))


CALLS = {
    "dot_product_attention": lambda f: [
        call(f, **EVERYTHING, return_residual=True),
        call(f, Q[0], K[0], V[0], Q[0, :, 0, :1], sinks=np.ones(4, np.float32), key_value_seq_lengths=[3]),
        call(f, Q[None], K[None], V[None], scale=2, dropout_rate=0.5, dropout_seed=jax.random.key(0)),
        call(f, Q, jax_mfa.quantize(jnp.asarray(K)), jax_mfa.quantize(V, "int4"), query_offset=[1, 2]),
        call(f, *(jnp.asarray(x, jnp.bfloat16) for x in (Q, K, V)), mask=np.ones((1, 1, 5, 7), bool)),
    ],
    "flash_attention": lambda f: [call(f, **EVERYTHING), call(f, Q[0], K[0], V[0])],
    "flex_attention": lambda f: [
        call(f, Q, K, V, score_mod=lambda x, b, n, t, s: x + t - s, mask_mod=lambda b, n, t, s: t >= s),
        call(f, **EVERYTHING, return_residual=True),
    ],
    "decode_attention": lambda f: [call(f, Q, K, V, LENGTHS, return_residual=True), call(f, Q[0], K[0], V[0], 6)],
    "explain": lambda f: [call(f, jax.ShapeDtypeStruct(Q.shape, Q.dtype), K, V, sinks=np.ones(4, np.float32))],
    "paged_attention": lambda f: [
        call(f, Q, *pages(), return_residual=True),
        call(f, Q[0], *pages(), query_start_locs=np.array([0, 3, 5]), alibi_slopes=np.ones(4, np.float32)),
    ],
    "flash_attention_varlen": lambda f: [
        call(f, Q[0], K[0], V[0], np.array([0, 2, 5]), np.array([0, 3, 7]), query_offset=np.array([1, 0])),
    ],
    "merge": lambda f: [call(f, *2 * jax_mfa.flash_attention(Q, K, V))],
    "quantize": lambda f: [call(f, K), call(f, K[0], "int4", straight_through=True)],
    "zigzag": lambda f: [call(f, np.ones((2, 8, 3)), 2)],
    "unzigzag": lambda f: [call(f, jnp.ones((2, 8, 3)), 2)],
    "append": lambda f: [call(f, K, V, [1, 2], K[:, :3], V[:, :3], np.array([3, 1]))],
    "attend": lambda f: [call(f, Q, K[:, :5], V[:, :5], K, V, [1, 2], bias=np.zeros((4, 5, 7), np.float32))],
    "explain_context_parallel": lambda f: [call(f, *qkv(T=8, S=16), devices=2)],
    "ring_attention": ring,
    "ulysses_attention": ring,
    "context_parallel_attention": functools.partial(ring, form="ring"),
    "sharded_decode_attention": lambda f: call(
        f, Q, *qkv(**{**SIZES, "S": 8})[1:], LENGTHS, axis_name="ring", mesh=mesh_of(2)
    ),
    "sharded_append": lambda f: call(
        f, *qkv(**{**SIZES, "S": 8})[1:], [0, 1], K[:, :3], V[:, :3], axis_name="ring", mesh=mesh_of(2)
    ),
    "rotary_embedding": lambda f: [call(f, Q, np.arange(5))],
    "attention_fn of linen": lambda f: [call(f, Q, K, V, Q[0, 0, 0, :1], np.ones((5, 7), bool))],
    "attention_fn of nnx": lambda f: [call(f, Q, K, V, mask=np.ones((2, 4, 5, 7)))],
    "__call__ of nnx": lambda f: [call(f, module(), *arrays((2, 5, 8), (2, 7, 8)), query_seq_lengths=[5, 2])],
    "tables": lambda f: [call(f, book(), [0, 1])],
    "append of pages": lambda f: [call(f, jax_mfa.PagedKVCache.create(4, 8, 2, 8, 6), [], K[0, :0], V[0, :0], [])],
    "from_mask": lambda f: [call(f, np.ones((2, 5, 7), bool), (2, 4))],
}
FUNCTIONS = {name: x for name in jax_mfa.__all__ if inspect.isfunction(x := getattr(jax_mfa, name))}
FUNCTIONS |= {name: getattr(cache, name) for name in cache.__all__}
for without_arrays in ("record", "tune", "override_jax_nn"):
    del FUNCTIONS[without_arrays]
FUNCTIONS |= {
    "rotary_embedding": rotary_embedding,
    "attention_fn of linen": mfa_linen.attention_fn,
    "attention_fn of nnx": mfa_nnx.attention_fn,
    "__call__ of nnx": mfa_nnx.FlashMultiHeadAttention.__call__,
    "tables": jax_mfa.PageBook.tables,
    "append of pages": jax_mfa.PagedKVCache.append,
    "from_mask": jax_mfa.BlockMask.from_mask,
}


@pytest.mark.share(16)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_a_signature_says_of_shapes_is_so(name):
    if len(jax.devices()) < 2 and "mesh" in inspect.signature(FUNCTIONS[name]).parameters:
        pytest.skip("needs two devices")
    CALLS[name](FUNCTIONS[name])


LOOKS_LIKE = functools.wraps(jax_mfa.flash_attention)


@pytest.mark.parametrize(
    "function, arguments, named",
    [
        (LOOKS_LIKE(lambda q, k, v: (jnp.zeros((2, 4, 5, 6)), jnp.zeros((2, 5, 4)))), (Q, K, V), "the result"),
        (LOOKS_LIKE(lambda q, k, v: (jnp.zeros((2, 5, 4, 6)), jnp.zeros((2, 5)))), (Q, K, V), "the result"),
        (jax_mfa.flash_attention, (Q, K.swapaxes(1, 2), V), "value"),
        (jax_mfa.flash_attention, (Q, K, V[0]), "value"),
        (jax_mfa.flash_attention, (Q, K, V, np.zeros((5, 6), np.float32)), "bias"),
        (jax_mfa.flash_attention, (Q, K, V, np.zeros((5, 7), bool)), "bias"),
    ],
)
def test_the_check_refuses_another_shape(function, arguments, named):
    with pytest.raises(TypeError, match=f"^{named} "):
        call(function, *arguments)
