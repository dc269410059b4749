"""Attention over devices as callers meet it: decoding, flax, and errors that name the argument."""

import dataclasses
import functools
import re
import types
from typing import Any

import jax
import numpy as np
import pytest
from harness import arrays, assert_allclose, mesh_of, needs_eight_devices, qkv, quick_jit, shard_map
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_mfa
from jax_mfa import BlockMask, compat
from jax_mfa.context_parallel import layout

pytestmark = needs_eight_devices


# --- decoding


def test_decoding_with_a_cache_that_is_split():
    """Each token is written where it belongs and sees what came before, by one all-reduce."""
    mesh = mesh_of(4)
    query, key, value = qkv(B=3, T=2, S=12, N=4, K=2, V=5)
    new_key, new_value = arrays((3, 2, 2, 8), (3, 2, 2, 5), seed=5)
    sinks, slopes = arrays((4,), (4,), seed=6)
    lengths = np.array([0, 5, 10], np.int32)  # the last but one row's tokens fall to two devices
    features = {"sinks": sinks, "alibi_slopes": abs(slopes), "local_window_size": (6, 0), "logits_soft_cap": 4.0}
    split = NamedSharding(mesh, P(None, "ring"))

    def step(query, key, value, lengths):
        key, value, lengths = jax_mfa.sharded_append(
            key, value, lengths, new_key, new_value, mesh=mesh, axis_name="ring"
        )
        out = jax_mfa.sharded_decode_attention(
            query, key, value, lengths, mesh=mesh, axis_name="ring", return_residual=True, **features
        )
        return key, value, lengths, *out

    def one(query, key, value, lengths):
        key, value, lengths = jax_mfa.cache.append(key, value, lengths, new_key, new_value)
        return (
            key,
            value,
            lengths,
            *jax_mfa.decode_attention(query, key, value, lengths, return_residual=True, **features),
        )

    placed = query, jax.device_put(key, split), jax.device_put(value, split), lengths
    program = quick_jit(step).lower(*placed).compile()
    text = program.as_text()
    counts = {
        x: len(re.findall(rf"= [^=]* {x}(?:-start)?\(", text)) for x in ("all-reduce", "all-gather", "all-to-all")
    }
    assert counts == {"all-reduce": 1, "all-gather": 0, "all-to-all": 0}
    got, wanted = program(*placed), quick_jit(one)(query, key, value, lengths)
    assert got[0].sharding.is_equivalent_to(split, 4)
    for a, b in zip(got, wanted):
        assert_allclose(a, b, rtol=0, atol=2e-6)
    loss = lambda f: lambda query, key: (f(query, key, value, lengths)[3] ** 2).sum()
    for a, b in zip(*(quick_jit(jax.grad(loss(f), argnums=(0, 1)))(query, key) for f in (step, one))):
        assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())


@pytest.mark.parametrize("seed", [np.uint64(2**40 + 5), np.asarray(2**40 + 5), 2**40 + 5, [1, 2]], ids=str)
def test_seeds_keep_their_64_bits(seed):
    query, key, value = qkv(B=2, T=16, S=16)
    split = {"mesh": mesh_of(4), "axis_name": "ring"}
    dropout = {"dropout_rate": 0.5, "dropout_seed": seed}
    ring = jax_mfa.ring_attention(query, key, value, is_causal=True, **split, **dropout)
    assert_allclose(ring, jax_mfa.dot_product_attention(query, key, value, is_causal=True, **dropout), atol=1e-5)
    decoded = jax_mfa.sharded_decode_attention(query[:, :1], key, value, 9, **split, **dropout)
    assert_allclose(decoded, jax_mfa.decode_attention(query[:, :1], key, value, 9, **dropout), atol=1e-5)


@pytest.mark.parametrize("features", [{"local_window_size": [4, 0]}, {"logits_soft_cap": np.float32(2)}], ids=str)
def test_static_arguments_of_decoding_may_be_arrays(features):
    query, key, value = qkv(B=2, T=1, S=16)
    decoded = jax_mfa.sharded_decode_attention(query, key, value, 9, mesh=mesh_of(4), axis_name="ring", **features)
    assert_allclose(decoded, jax_mfa.decode_attention(query, key, value, 9, **features), atol=1e-5)


@pytest.mark.skipif(not compat.HAS_EXPLICIT_SHARDING or not hasattr(jax, "shard_map"), reason="no explicit meshes")
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_whole_arrays_are_split_over_explicit_meshes(jit):
    query, key, value = qkv(B=2, T=16, S=16)
    new = [x[:, :1] for x in (key, value)]
    split = {"mesh": jax.make_mesh((4,), ("ring",), axis_types=(jax.sharding.AxisType.Explicit,)), "axis_name": "ring"}
    ring = lambda q, k, v: jax_mfa.ring_attention(q, k, v, is_causal=True, **split)
    decode = lambda q, k, v: jax_mfa.sharded_decode_attention(q, k, v, [3, 9], **split)
    write = lambda q, k, v: jax_mfa.sharded_append(k, v, [3, 9], *new, **split)[0]
    placed = [jax.device_put(x, NamedSharding(split["mesh"], P(None, "ring"))) for x in (query, key, value)]
    for fun, wanted in (
        (ring, jax_mfa.dot_product_attention(query, key, value, is_causal=True)),
        (lambda q, k, v: decode(query[:, :1], k, v), jax_mfa.decode_attention(query[:, :1], key, value, [3, 9])),
        (write, jax_mfa.cache.append(key, value, [3, 9], *new)[0]),
    ):
        for arrays_ in ([query, key, value], placed):
            assert_allclose((quick_jit(fun) if jit else fun)(*arrays_), wanted, atol=1e-5)


def test_errors_of_decoding():
    mesh = mesh_of(4)
    query, key, value = qkv(B=3, T=1, S=12)
    run = functools.partial(jax_mfa.sharded_decode_attention, query, mesh=mesh, axis_name="ring")
    with pytest.raises(ValueError, match=r"^key must have columns that the 4 devices divide, got S = 11"):
        run(key[:, :11], value[:, :11], [1, 2, 3])
    with pytest.raises(ValueError, match=r"lengths must lie in 0\.\.12, got 13"):
        run(key, value, [1, 13, 3])
    with pytest.raises(TypeError, match="unexpected keyword argument 'is_causal'"):
        run(key, value, [1, 2, 3], is_causal=True)
    with pytest.raises(
        ValueError,
        match=r"^key_cache holds 12 tokens; 12 known to be written, by lengths, it cannot take 1 more of key",
    ):
        jax_mfa.sharded_append(key, value, 12, key[:, :1], value[:, :1], mesh=mesh, axis_name="ring")


# --- flax


def test_modules_and_attention_fn_take_an_axis_for_the_sequence():
    """Within `shard_map` and of whole arrays, with rotary positions in the order of the tokens."""
    from flax import nnx

    import jax_mfa.flax as ours

    mesh = mesh_of(2, 2, names=("data", "sequence"))
    (x,) = arrays((2, 8, 8))
    close = functools.partial(assert_allclose, rtol=0, atol=5e-6)
    one = ours.linen.FlashMultiHeadAttention(num_heads=4, num_kv_heads=2, rotary_base=100.0, is_causal=True)
    parameters = quick_jit(one.init)(jax.random.key(0), x)
    wanted = quick_jit(one.apply)(parameters, x)
    whole = jax_mfa.SequenceSharding("sequence", "ring", "zigzag", mesh, "data")
    got = quick_jit(one.clone(sequence_axis=whole).apply)(parameters, jax_mfa.zigzag(x, 2))
    close(jax_mfa.unzigzag(got, 2), wanted)

    split = P("data", "sequence")
    local = one.clone(sequence_axis="sequence")
    run = compat.shard_map(lambda x: local.apply(parameters, x), mesh, (split,), split)
    close(quick_jit(run)(x), wanted)
    cached = jax.eval_shape(one.clone(decode=True).init, jax.random.key(0), x)
    cached = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), cached)
    with pytest.raises(NotImplementedError, match=r"sequence_axis=.* while decoding: see jax_mfa\.sharded_decode"):
        one.clone(sequence_axis="sequence", decode=True).apply(cached, x, mutable=["cache"])

    module = ours.nnx.FlashMultiHeadAttention(4, 8, sequence_axis=whole, rngs=nnx.Rngs(0))
    alone = ours.nnx.FlashMultiHeadAttention(4, 8, rngs=nnx.Rngs(0))
    got = quick_jit(lambda x: module(x))(jax_mfa.zigzag(x, 2))
    close(jax_mfa.unzigzag(got, 2), quick_jit(lambda x: alone(x))(x))

    query, key, value = qkv(B=2, T=4, S=4, N=4, K=4)
    plain = dataclasses.replace(whole, order="contiguous")
    wanted = jax_mfa.dot_product_attention(query, key, value, is_causal=True)
    for room in (ours.linen, ours.nnx):
        attend = functools.partial(room.attention_fn, sequence_axis=plain, is_causal=True)
        close(quick_jit(attend)(query, key, value), wanted)
        with pytest.raises(NotImplementedError, match=r"(?s)sequence_axis=.*broadcast_dropout"):
            room.attention_fn(query, key, value, sequence_axis=plain, dropout_rate=0.5, dropout_rng=jax.random.key(0))


# --- errors


def call(mesh=True, function=jax_mfa.ring_attention, T=8, S=8, N=4, K=2, **keywords):
    query, key, value = qkv(B=2, T=T, S=S, N=N, K=K)
    mesh = mesh_of(4) if mesh is True else mesh
    return function(query, key, value, **{"mesh": mesh, "axis_name": "ring", **keywords})


ulysses = functools.partial(call, function=jax_mfa.ulysses_attention)
either = functools.partial(call, function=jax_mfa.context_parallel_attention)
ERRORS: dict[str, tuple[Any, type, str]] = {
    "axis": (
        lambda: call(axis_name="row"),
        ValueError,
        "axis_name must name an axis of the mesh, of .*ring.*, got 'row'",
    ),
    "no mesh": (
        lambda: call(mesh=None),
        ValueError,
        "axis_name must name .*shard_map, or give mesh",
    ),
    "batch axis": (lambda: call(batch_axis="row"), ValueError, "batch_axis must name an axis"),
    "one axis twice": (lambda: call(batch_axis="ring"), ValueError, "must be different mesh axes"),
    "rows": (
        lambda: call(T=10),
        ValueError,
        "length of query must be a multiple of 4 .*T = 10: pad .*query_seq_lengths",
    ),
    "columns": (lambda: call(S=9), ValueError, "length of key must be a multiple of 4 .*S = 9"),
    "zigzag": (lambda: call(T=12, order="zigzag"), ValueError, "multiple of 8 .*2 runs.*T = 12"),
    "order": (lambda: call(order="snake"), ValueError, "order must be one of .*'snake'"),
    "form": (lambda: either(form="tree"), ValueError, "form must be None or one of .*'tree'"),
    "triple": (lambda: either(axis_name=("a", "b", "c")), ValueError, r"a pair \(ring, heads\)"),
    "heads": (
        lambda: ulysses(N=6, K=6),
        ValueError,
        "exchanges heads, and 4 devices do not divide N = 6 heads; ring_attention takes any",
    ),
    "keyword": (
        lambda: call(causal=True),
        TypeError,
        r"ring_attention\(\) got an unexpected keyword argument 'causal'",
    ),
    "reference": (
        lambda: call(implementation="reference"),
        NotImplementedError,
        "'reference' cannot run ring_attention",
    ),
    "bias": (lambda: call(bias=np.zeros((2, 4, 8, 5), np.float32)), ValueError, "bias must broadcast to"),
    "blocks": (
        lambda: call(T=12, block_mask=BlockMask(np.ones((2, 2), bool), (6, 4))),
        ValueError,
        "block_mask must have blocks that no part of query cuts through",
    ),
    "lengths": (lambda: call(key_value_seq_lengths=[9, 3]), ValueError, r"must lie in 0\.\.8, got 9"),
    "positions": (
        lambda: call(positions=np.arange(8)[::-1]),
        ValueError,
        "order='contiguous' over 4 devices: at place 0 token 0 was expected, got 7",
    ),
    "wrong order": (
        lambda: call(positions=jax_mfa.zigzag(np.arange(8), 2, 0), order="zigzag"),
        ValueError,
        "order='zigzag' over 4 devices: at place 1 token 7 was expected, got 1",
    ),
    "places": (lambda: call(positions=np.arange(7)), ValueError, r"positions must have shape \[T\] = \[8\], got \[7\]"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_the_argument(name):
    run, kind, message = ERRORS[name]
    with pytest.raises(kind, match=message):
        run()


@pytest.mark.skipif(not hasattr(jax, "typeof"), reason="this JAX does not say what varies over devices")
def test_keys_that_are_not_split_are_an_error():
    query, key, value = qkv(B=1, T=8, S=8)
    local = lambda q, k, v: jax_mfa.ring_attention(q, k, v, axis_name="ring")
    with pytest.raises(ValueError, match="key must be split along the mesh axis 'ring'"):
        shard_map(local, mesh_of(4), (P(None, "ring"), P(), P()), P(None, "ring"))(query, key, value)


def test_tokens_in_another_order_make_nan_where_they_are_traced():
    query, key, value = qkv(B=1, T=8, S=8)
    mesh = mesh_of(2)
    run = quick_jit(
        lambda positions: jax_mfa.ring_attention(
            query, key, value, mesh=mesh, axis_name="ring", order="zigzag", positions=positions
        )
    )
    right = layout.permutation("zigzag", 8, 2)
    assert np.isfinite(run(right)).all()
    assert np.isnan(run(np.arange(8))).any()


def test_the_axis_is_looked_for_where_it_is_traced():
    query, key, value = qkv(B=1, T=8, S=8)
    with pytest.raises(
        ValueError, match="axis_name must name an axis of the mesh that this is traced over, got 'ring'"
    ):
        jax_mfa.ring_attention(query, key, value, axis_name="ring")
    assert layout.axis_size(("ring", "heads"), "axis_name", mesh_of(2, 4)) == 8


@pytest.mark.parametrize("held", [False, True])
def test_quantised_arrays_do_not_travel(held):
    """Nor do parameters that hold one, as some libraries have them."""
    query, key, value = qkv(B=1, T=8, S=8, N=4, K=4, H=32)
    stored = jax_mfa.quantize(key, jax_mfa.Scheme("int8"))
    stored = types.SimpleNamespace(__jax_array__=lambda x=stored: x) if held else stored
    place = {"mesh": mesh_of(4), "axis_name": "ring"}
    calls = {
        "ring_attention": lambda: jax_mfa.ring_attention(query, stored, value, **place),
        "ulysses_attention": lambda: jax_mfa.ulysses_attention(query, key, stored, **place),
        "context_parallel_attention": lambda: jax_mfa.context_parallel_attention(query, stored, stored, **place),
        "explain_context_parallel": lambda: jax_mfa.explain_context_parallel(query, stored, value, devices=4),
        "sharded_decode_attention": lambda: jax_mfa.sharded_decode_attention(query[:, :1], stored, stored, 8, **place),
    }
    for name, call in calls.items():
        with pytest.raises(NotImplementedError, match=f"{name} takes no QuantizedArray, got one as (key|value)"):
            call()
