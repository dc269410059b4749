"""`flex_attention`: functions of scores and masks give what dense attention with the same functions gives, in value, in
gradients and under every transformation; bad ones are refused by name."""

import functools
import gc
import re
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flex_cases import MASKS, SCORES, check, dense
from harness import BY_NAME_OF_IMPLEMENTATION, assert_allclose, mesh_of, own, qkv, quick_jit, shard_map, x64
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_mfa
from jax_mfa.blockwise import tiles as rule

IN_JNP = [BY_NAME_OF_IMPLEMENTATION[name] for name in ("reference", "blockwise")]
in_jnp = pytest.mark.parametrize("implementation", IN_JNP, ids=lambda x: x.name)
blockwise = functools.partial(jax_mfa.flex_attention, implementation="blockwise")


def attend(implementation, query, key, value, **keywords):
    return jax_mfa.flex_attention(query, key, value, implementation=implementation.name, **keywords)


def same(got, wanted, atol=2e-5):
    """Trees of arrays that are equal but for rounding, relative to each array's largest entry."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        b = np.asarray(b, np.float32)
        assert_allclose(np.asarray(a, np.float32), b, rtol=0, atol=atol * max(1, np.abs(b).max(initial=0)))


def random(*shape, seed=3):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


@pytest.mark.share(16)
@pytest.mark.parametrize("name", [*SCORES, *MASKS])
@pytest.mark.parametrize("implementation", [pytest.param("reference", marks=pytest.mark.sweep), "blockwise"])
def test_functions_give_the_answers_and_gradients_of_dense_attention(implementation, name):
    check(implementation, (SCORES | MASKS)[name])


@pytest.mark.share(4)
@pytest.mark.parametrize("name", ["T5", "together", "coordinates", "rows that see nothing", "queries further on"])
def test_many_tiles_give_the_same_answer(monkeypatch, name):
    usual = lambda spec, operands, differentiated: rule.step_of(spec, operands, 3, 4)
    for constant, x in (("usual", usual), ("ALIGNMENT", 1), ("LARGEST", 24)):
        monkeypatch.setattr(rule, constant, x)
    jax.clear_caches()
    check("blockwise", (SCORES | MASKS)[name])
    monkeypatch.undo()
    jax.clear_caches()


@in_jnp
def test_a_feature_and_the_function_that_is_it_give_the_same_beside_all_others(implementation):
    offset, n, t, s = np.array([2, 5], np.int32), 4, 6, 9
    query, key, value = qkv(B=2, T=t, S=s, N=n, K=2)
    rng = np.random.default_rng(0)
    bias, table = (random(2, n, t, s, seed=i) for i in range(2))
    mask, seen = (rng.random((2, n, t, s)) < 0.8 for _ in range(2))
    keywords = {
        "is_causal": True,
        "local_window_size": (7, 2),
        "query_offset": offset,
        "key_value_seq_lengths": np.array([9, 7]),
        "query_segment_ids": rng.integers(0, 2, (2, t)),
        "key_value_segment_ids": rng.integers(0, 2, (2, s)),
        "sinks": random(n),
        "alibi_slopes": random(n, seed=5),
        "logits_soft_cap": 4.0,
        "dropout_rate": 0.2,
        "dropout_seed": 7,
    }

    def by_arguments(query, key, value, bias, table):
        return implementation.attend(query, key, value, bias + table, mask & seen, **keywords)

    def by_functions(query, key, value, bias, table):
        at = lambda x, b, n, t, s: x[b, n, t - jnp.asarray(offset)[b], s]
        return attend(
            implementation,
            *(query, key, value),
            bias=bias,
            mask=mask,
            score_mod=lambda x, *place: x + at(table, *place),
            mask_mod=lambda *place: at(jnp.asarray(seen), *place),
            **keywords,
        )

    arrays = query, key, value, bias, table
    of = lambda fun: quick_jit(lambda *x: jax.value_and_grad(lambda *x: (fun(*x) ** 2).sum(), range(5))(*x))(*arrays)
    same(of(by_functions), of(by_arguments))


@in_jnp
def test_batch_axes_count_as_one_and_may_be_missing(implementation):
    query, key, value = (jnp.asarray(x) for x in qkv(B=6, T=3, S=5, N=2, K=2))
    weights = random(6)
    mod = lambda x, b, n, t, s: x * weights[b] + t * s
    wanted = dense(query, key, value, mod)
    many = (x.reshape(2, 3, *x.shape[1:]) for x in (query, key, value))
    same(attend(implementation, *many, score_mod=mod).reshape(wanted.shape), wanted)
    same(attend(implementation, query[0], key[0], value[0], score_mod=mod), wanted[0])


# --- what is hidden


HIDDEN = {
    "NaN where a mask hides": (
        lambda w: lambda x, b, n, t, s: x * w[t - s + 9] * jnp.exp(w[t - s + 9]),
        lambda w: lambda b, n, t, s: abs(t - s) < 4,
    ),
    "NaN where the function hides": (
        lambda w: lambda x, b, n, t, s: jnp.where(abs(t - s) < 4, x * w[t - s + 9], -jnp.inf),
        None,
    ),
    "a distance of 0 in a branch": (
        lambda w: lambda x, b, n, t, s: jnp.where(t == s, -jnp.inf, x / abs(t - s) + w[7] * jnp.log(abs(t - s) * 1.0)),
        None,
    ),
    "the root of 0": (
        lambda w: lambda x, b, n, t, s: jnp.where(t == s, -jnp.inf, x - jnp.sqrt(jnp.square(w[6:8] * (t - s)).sum())),
        None,
    ),
    "a power of 0": (
        lambda w: lambda x, b, n, t, s: x + (w[8] * 0) ** (t - s) * jnp.sqrt(1.0 * (t - s)),
        lambda w: lambda b, n, t, s: s < t,
    ),
    "branches that divide by 0": (
        lambda w: lambda x, b, n, t, s: lax.cond(t == s, lambda: -jnp.inf, lambda: x * w[8] / (t - s)),
        None,
    ),
    "the logarithm of 0": (lambda w: lambda x, b, n, t, s: x + jnp.log(jnp.where(t < s, w[8] ** 2, w[8] * 0)), None),
}


@pytest.mark.share(2)
@in_jnp
@pytest.mark.parametrize("name", HIDDEN)
def test_hidden_pairs_reach_no_gradient_whatever_is_infinite_or_nan_there(implementation, name):
    score, mask = HIDDEN[name]
    query, key, value = qkv(B=1, T=6, S=8, N=2, K=1)
    # entries that pairs at a distance of 4 or more read
    table = random(20).at[:6].set(jnp.nan).at[13:].set(jnp.inf)

    def loss(query, key, value, table):
        hides = {} if mask is None else {"mask_mod": mask(table)}
        return (attend(implementation, query, key, value, score_mod=score(table), **hides) ** 2).sum()

    found = quick_jit(jax.value_and_grad(loss, range(4)))(query, key, value, table)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(found))
    assert np.abs(found[1][0]).max() > 0


@in_jnp
@pytest.mark.parametrize("what", [jnp.inf, jnp.nan])
def test_keys_and_values_that_the_function_hides_reach_no_gradient(implementation, what):
    query, key, value = (jnp.asarray(x) for x in qkv(B=1, T=6, S=8, N=2, K=1))
    hide = lambda x, b, n, t, s: jnp.where(s == 5, -jnp.inf, x)

    def gradients(what):
        loss = lambda *x: (attend(implementation, *x, score_mod=hide) ** 2).sum()
        return quick_jit(jax.grad(loss, range(3)))(query, key.at[0, 5].set(what), value.at[0, 5].set(what))

    for got, wanted in zip(gradients(what), gradients(0)):
        np.testing.assert_array_equal(got, wanted)


# --- transformations


def relative(table):
    return lambda score, b, n, t, s: score * (1 + b) + table[n, t - s + 7]


def of_one(implementation):
    """Attention with a relative table, and the loss of it."""
    run = lambda query, key, value, table: attend(implementation, query, key, value, score_mod=relative(table))
    wanted = lambda query, key, value, table: dense(query, key, value, relative(table))
    loss = lambda fun: lambda *x: (fun(*x) ** 2 * jnp.arange(8)).sum() / 8
    return loss(run), loss(wanted)


@pytest.fixture(scope="module")
def arrays():
    query, key, value = (jnp.asarray(x) for x in qkv(B=2, T=5, S=7, N=4, K=2))
    return query, key, value, random(4, 16)


AXES = {
    "captured": ((None, None, None, 0),),
    "queries and values": ((1, None, 0, None),),
    "captured and keys": ((None, 2, None, 1),),
    "nested": ((None, None, None, 0), (0, None, None, None)),
    "nested, captured twice": ((None, None, None, 1), (None, 0, None, 0)),
}


@pytest.mark.share(4)
@in_jnp
@pytest.mark.parametrize("name", AXES)
def test_mapped_axes_of_what_is_captured_and_of_arrays(implementation, arrays, name):
    loss, wanted = (jax.grad(x, range(4)) for x in of_one(implementation))
    for axes in AXES[name]:
        loss, wanted = (jax.vmap(x, in_axes=axes) for x in (loss, wanted))
        arrays = [x if i is None else jnp.stack([x, -x, x / 2], i) for x, i in zip(arrays, axes)]
    same(quick_jit(loss)(*arrays), quick_jit(wanted)(*arrays))


@in_jnp
@pytest.mark.parametrize("batch", [1, 2])
def test_mapped_integers_of_a_mask(implementation, arrays, batch):
    query, key, value = (x[:batch] for x in arrays[:3])
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 2, (3, 2, 7)))
    mask = lambda ids: lambda b, n, t, s: ids[b, t] == ids[b, s]
    run = jax.vmap(lambda ids: attend(implementation, query, key, value, mask_mod=mask(ids)))
    same(quick_jit(run)(ids), jnp.stack([dense(query, key, value, mask_mod=mask(x)) for x in ids]))
    assert run(ids[:0]).shape == (0, *query.shape)


@pytest.mark.share(2)
@in_jnp
def test_derivatives_of_every_order(implementation, arrays):
    loss, wanted = of_one(implementation)
    moved = tuple(-x / 3 for x in arrays)

    def of(fun):
        gradient = jax.grad(fun, range(4))
        squared = lambda *x: sum((g**2).sum() for g in gradient(*x))
        run = lambda *x: (jax.jvp(fun, x, moved), jax.jvp(gradient, x, moved), jax.grad(squared, range(4))(*x))
        return quick_jit(run)(*arrays)

    same(of(loss), of(wanted), 1e-4)


@in_jnp
def test_scans_and_rematerialisation_over_layers_of_tables(implementation, arrays):
    query, key, value, table = arrays
    tables = jnp.stack([table, -table])

    def deep(fun, tables):
        layer = lambda x, table: (x + fun(x, key, value, table), None)
        return lax.scan(layer, query, tables)[0].sum()

    run = lambda *x: attend(implementation, *x[:3], score_mod=relative(x[3]))
    wanted = quick_jit(jax.grad(lambda x: deep(lambda *x: dense(*x[:3], relative(x[3])), x)))(tables)
    names = jax.checkpoint_policies.save_only_these_names("jax_mfa_out", "jax_mfa_lse")
    for policy in (None, names):
        again = jax.checkpoint(run, policy=policy)
        same(quick_jit(jax.grad(lambda x, again=again: deep(again, x)))(tables), wanted)


@in_jnp
def test_captured_values_of_transformations_that_last(implementation, arrays):
    query, key, value, table = arrays

    def of(fun):
        # jit of vmap of grad, of which each has made what is captured
        one = lambda table, x: jax.grad(lambda y: fun(jnp.sin(table * y)).sum())(x)
        return jax.jit(lambda table: jax.vmap(lambda x: one(2 * table, x))(jnp.arange(1.0, 3)))(table)

    run = lambda table: attend(implementation, query, key, value, score_mod=relative(table))
    same(of(run), of(lambda table: dense(query, key, value, relative(table))))


def test_one_function_takes_other_shapes_and_dtypes(arrays):
    query, key, value, table = arrays
    run = jax.jit(lambda query, key, value, table: blockwise(query, key, value, score_mod=relative(table)))
    for dtype, of_table, t in (
        (jnp.float32, jnp.float32, 5),
        (jnp.bfloat16, jnp.float16, 5),
        (jnp.float32, jnp.int8, 3),
    ):
        x = [query[:, :t].astype(dtype), key.astype(dtype), value.astype(dtype)]
        moved = (4 * table).astype(of_table)
        out = run(*x, moved)
        assert out.dtype == dtype
        wide = [x.astype(jnp.float32) for x in (*x, moved)]
        same(out, dense(*wide[:3], relative(wide[3])), 2e-5 if dtype == jnp.float32 else 1e-2)
    gradient = jax.grad(lambda table: run(query, key, value, table).sum())(table.astype(jnp.bfloat16))
    assert gradient.dtype == jnp.bfloat16


def test_programs_are_exported_for_batches_of_any_size(arrays):
    from jax import export

    (size,) = export.symbolic_shape("b")
    gradient = jax.jit(jax.grad(of_one(IN_JNP[1])[0], (0, 3)))
    shapes = [jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype) for x in arrays[:3]]
    program = export.export(gradient)(*shapes, jax.ShapeDtypeStruct(arrays[3].shape, jnp.float32))
    same(export.deserialize(program.serialize()).call(*arrays), gradient(*arrays))
    assert jax.eval_shape(gradient, *arrays)[1].shape == arrays[3].shape


def test_donated_arrays_may_be_captured(arrays):
    query, key, value, table = arrays
    run = jax.jit(lambda q, t: blockwise(q, key, value, score_mod=relative(t)) + 0 * t[0, 0], donate_argnums=(0, 1))
    same(run(query + 0, table + 0), dense(query, key, value, relative(table)))


def test_integers_are_exact_beyond_what_floats_hold():
    query, key, value = (jnp.asarray(x) for x in qkv(B=1, T=8, S=8))
    equal = lambda x: lambda b, n, t, s: x[t] == x[s]
    below = lambda x: lambda b, n, t, s: x[t] >= x[s]
    count = np.arange(8) // 2
    cases = [(equal, 2**24 + count, np.int32), (below, 2**32 - 1 - count, np.uint32)]
    wide = [(equal, 2**40 + count, np.int64), (below, 2**63 + count.astype(np.uint64), np.uint64)]
    for make, values, dtype in cases:
        mask = make(jnp.asarray(values.astype(dtype)))
        same(blockwise(query, key, value, mask_mod=mask), dense(query, key, value, mask_mod=mask))
    with x64():
        for make, values, dtype in wide:
            mask = make(jnp.asarray(values.astype(dtype)))
            same(blockwise(query, key, value, mask_mod=mask), dense(query, key, value, mask_mod=mask))


READS = {
    "at once": lambda table: lambda x, b, n, t, s: x + table[n, abs(t - s) % 8],
    "in two steps": lambda table: lambda x, b, n, t, s: x + table[n][abs(t - s) % 8].astype(jnp.float32),
    "a scalar of each head": lambda table: lambda x, b, n, t, s: x * table[n, 0] + table[n, 1],
}


@pytest.mark.share(2)
@own
@pytest.mark.parametrize("name", READS)
def test_gradients_of_arrays_of_16_bits_are_summed_in_float32(implementation, name):
    q, k, v = qkv(B=2, T=130, S=130, N=2, K=2, H=8)
    table, w = random(2, 8).astype(jnp.bfloat16), random(2, 130, 2, 8, seed=4)

    def gradient(table):
        loss = lambda table: (attend(implementation, q, k, v, score_mod=READS[name](table)) * w).sum()
        return quick_jit(jax.grad(loss))(table)

    wide = gradient(table.astype(jnp.float32))
    same(gradient(table), wide, atol=float(jnp.finfo(jnp.bfloat16).eps))


@in_jnp
def test_float64(implementation):
    with x64():
        arrays = [jnp.asarray(x, jnp.float64) for x in (*qkv(B=2, T=5, S=7), random(4, 16))]
        loss, wanted = (quick_jit(jax.grad(x, range(4))) for x in of_one(implementation))
        for got, expected in zip(loss(*arrays), wanted(*arrays)):
            assert got.dtype == np.float64
            assert_allclose(got, expected, rtol=1e-12, atol=1e-12)


# --- devices


def places(hb, table, ids):
    return {
        "score_mod": lambda x, b, n, t, s: x * hb[b, n] + table[n, t - s + 8],
        "mask_mod": lambda b, n, t, s: (ids[b, t] == ids[b, s]) | (t == s),
    }


@pytest.mark.share(4)
@own
@pytest.mark.skipif(len(jax.devices()) < 4, reason="needs four devices")
@pytest.mark.parametrize("mapped", [False, True], ids=["one", "mapped"])
@pytest.mark.parametrize("shape", [(2, 2), (4, 1), (1, 4)])
def test_devices_know_which_batch_entries_and_heads_they_hold(implementation, shape, mapped):
    if implementation.name == "metal":
        pytest.skip("kernels have tests of their own")
    query, key, value = (jnp.asarray(x) for x in qkv(B=4, T=4, S=8, N=4, K=4))
    hb, table, ids = random(4, 4), random(4, 16), jnp.asarray(np.random.default_rng(0).integers(0, 2, (4, 8)))
    run = lambda *x: (attend(implementation, *x[:3], **places(*x[3:], ids)) ** 2).sum()
    gradient = jax.grad(run, range(5))
    if mapped:
        gradient, table = jax.vmap(gradient, in_axes=(None, None, None, None, 0)), jnp.stack([table, -table])
    wanted = gradient(query, key, value, hb, table)
    mesh = mesh_of(*shape, names=("data", "heads"))
    put = lambda x, *axes: jax.device_put(x, NamedSharding(mesh, P(*axes)))
    split = [put(x, "data", None, "heads") for x in (query, key, value)]
    program = jax.jit(gradient).lower(*split, put(hb), put(table)).compile()
    same(program(*split, put(hb), put(table)), wanted)
    assert not re.search(r"= [^=]* (all-gather|all-to-all|collective-permute)", program.as_text()) or mapped
    same(jax.jit(gradient)(*split, put(hb, "data", "heads"), table), wanted)


@pytest.mark.skipif(len(jax.devices()) < 4, reason="needs four devices")
def test_within_shard_map_indices_are_those_of_a_share():
    query, key, value = (jnp.asarray(x) for x in qkv(B=4, T=4, S=8, N=4, K=4))
    table, slopes, mesh = random(4, 16), random(8), mesh_of(2, 2, names=("data", "heads"))

    def run(query, key, value, table, slopes):
        return blockwise(query, key, value, score_mod=lambda x, b, n, t, s: x * slopes[s] + table[n, t - s + 8])

    spec = P("data", None, "heads")
    split = shard_map(run, mesh, (spec, spec, spec, P("heads"), P()), spec)
    of = lambda fun: jax.jit(jax.grad(lambda *x: (fun(*x) ** 2).sum(), range(5)))(query, key, value, table, slopes)
    same(of(split), of(run))


# --- programs and memory


MADE = {
    "table": lambda w: lambda x, b, n, t, s: x + w[t - s + 8],
    "functions with rules": lambda w: lambda x, b, n, t, s: jax.nn.relu(x + w[t]) + jnp.logaddexp(x, jax.nn.silu(w[s])),
    "branches": lambda w: lambda x, b, n, t, s: lax.cond(t < s, lambda: x, lambda: w[s]),
    "jitted": lambda w: jax.jit(lambda x, b, n, t, s: x * w[t]),
    "partial": lambda w: functools.partial(lambda w, x, b, n, t, s: x * w[s], w),
    "loops": lambda w: lambda x, b, n, t, s: lax.fori_loop(0, 3, lambda i, y: y + w[s + i], x),
}


@pytest.mark.share(2)
@pytest.mark.parametrize("name", MADE)
def test_closures_of_equal_code_share_a_program_which_keeps_none_of_their_arrays(name, caplog):
    query, key, value = qkv(B=1, T=3, S=4)
    gradient = lambda w: jax.grad(lambda q, w: blockwise(q, key, value, score_mod=MADE[name](w)).sum(), (0, 1))(
        query, w
    )
    first = jax.block_until_ready(gradient(random(20)))
    with jax.log_compiles(), caplog.at_level("WARNING"):
        other = jax.block_until_ready(gradient(random(20, seed=4)))
    assert not [x for x in caplog.messages if "ompiling" in x or "ompilation" in x]
    assert np.abs(first[0] - other[0]).max() > 1e-6
    captured = random(20)
    alive = weakref.ref(captured)
    gradient(captured)
    del captured
    gc.collect()
    assert alive() is None


def scaled_with_rule(factor, slope):
    """A function whose rule closes over an array, as what it computes does."""

    @jax.custom_jvp
    def scaled(x, t):
        return factor[0] * x * t

    scaled.defjvp(lambda primals, tangents: (scaled(*primals), tangents[0] * slope[primals[1]]))
    return lambda x, b, n, t, s: scaled(x, t)


def scaled_with_reverse_rule(factor, slope):
    @jax.custom_vjp
    def scaled(x, t):
        return factor[0] * x * t

    scaled.defvjp(lambda x, t: (scaled(x, t), t), lambda t, g: (g * slope[t], None))
    return lambda x, b, n, t, s: scaled(x, t)


@in_jnp
@pytest.mark.parametrize("make", [scaled_with_rule, scaled_with_reverse_rule])
def test_derivative_rules_that_close_over_arrays_are_each_their_own(implementation, make, arrays):
    query, key, value, table = arrays

    def of(fun):
        def gradient(factor, slope, table):
            made = make(factor, slope)
            mod = lambda x, b, n, t, s: made(x, b, n, t, s) + table[n, t]
            return jax.grad(lambda q, table: fun(q, key, value, score_mod=mod).sum(), (0, 1))(query, table)

        return [quick_jit(gradient)(random(2, seed=i), random(9, seed=i + 1), table) for i in range(2)] + [
            gradient(random(2, seed=i), random(9, seed=i + 1), table) for i in range(2)
        ]

    same(of(functools.partial(attend, implementation)), of(dense))


@in_jnp
@pytest.mark.parametrize("as_array", [False, True])
def test_derivative_rules_within_loops_are_each_their_own(implementation, as_array, arrays):
    query, key, value, _ = arrays

    def straight(slope):
        @jax.custom_jvp
        def rounded(x):
            return jnp.round(x)

        rounded.defjvp(lambda primals, tangents: (rounded(*primals), slope * tangents[0]))
        return lambda x, b, n, t, s: lax.scan(lambda c, _: (rounded(c), None), x, None, length=1)[0]

    def gradient(slope):
        mod = straight(jnp.asarray(slope) if as_array else slope)
        return jax.grad(lambda q: (attend(implementation, q, key, value, score_mod=mod) ** 2).sum())(query)

    whole, none, half = (gradient(slope) for slope in (1.0, 0.0, 0.5))
    assert np.abs(whole).max() > 0
    same(half, whole / 2)
    np.testing.assert_array_equal(none, 0)


def test_memory_grows_with_the_lengths_and_the_arrays_that_are_read():
    def temporary(t, gradient):
        x = jax.ShapeDtypeStruct((1, t, 2, 16), jnp.float32)
        mod = lambda table: lambda x, b, n, i, s: x + table[n, i - s + t]
        run = lambda q, k, v, table: blockwise(q, k, v, score_mod=mod(table)).sum()
        run = jax.grad(run, range(4)) if gradient else run
        lowered = quick_jit(run).lower(x, x, x, jax.ShapeDtypeStruct((2, 2 * t), jnp.float32))
        return lowered.compile().memory_analysis().temp_size_in_bytes

    for gradient in (False, True):
        small, large = (temporary(t, gradient) for t in (2048, 8192))
        # tiles are of a size; more than those grows as do six arrays of queries and as many tables
        assert large - small < 6 * (8192 - 2048) * (2 * 16 + 2 * 2) * 4
        assert large < 8192 * 8192


# --- bad functions


def side_effect(x, *_):
    jax.debug.print("{}", x)
    return x


def callback(x, *_):
    return jax.experimental.io_callback(lambda x: x, jax.ShapeDtypeStruct((), jnp.float32), x)


NUMBERS = np.arange(9.0)
BAD = {
    "four arguments": (TypeError, "score_mod", lambda score, b, n, t: score, "with 5 arguments: too many"),
    "six arguments": (TypeError, "score_mod", lambda score, b, n, t, s, u: score, "missing .*'u'"),
    "a score": (TypeError, "mask_mod", lambda score, b, n, t, s: True, "with 4 arguments"),
    "a keyword": (TypeError, "mask_mod", lambda b, n, t, s, *, u: True, "missing .*'u'"),
    "no function": (TypeError, "score_mod", 3, "got 3"),
    "an array": (TypeError, "mask_mod", np.ones((3, 4), bool), r"got ndarray bool\[3, 4\]"),
    "a vector": (TypeError, "score_mod", lambda x, b, n, t, s: x + jnp.ones(3), r"floating scalar, got float32\[3\]"),
    "a tuple": (TypeError, "score_mod", lambda x, b, n, t, s: (x, x), "one scalar"),
    "a tuple of one": (TypeError, "score_mod", lambda x, b, n, t, s: (x,), "one scalar"),
    "None": (TypeError, "score_mod", lambda x, b, n, t, s: None, "one scalar, got None"),
    "text": (TypeError, "score_mod", lambda x, b, n, t, s: "text", "one scalar, got 'text'"),
    "distance as a mask": (TypeError, "mask_mod", lambda b, n, t, s: t - s, r"bool scalar, got int32\[\]"),
    "an integer score": (TypeError, "score_mod", lambda x, b, n, t, s: t, r"floating scalar, got int32\[\]"),
    "a bool score": (TypeError, "score_mod", lambda x, b, n, t, s: t > s, r"floating scalar, got bool\[\]"),
    "a complex score": (TypeError, "score_mod", lambda x, b, n, t, s: x * 1j, r"floating scalar, got complex64\[\]"),
    "printing": (ValueError, "score_mod", side_effect, "side effects"),
    "printing in a branch": (
        ValueError,
        "score_mod",
        lambda x, b, n, t, s: lax.cond(t < s, side_effect, lambda x: x, x),
        "side effects",
    ),
    "a callback": (ValueError, "score_mod", callback, "side effects"),
    "complex numbers": (
        TypeError,
        "score_mod",
        lambda x, b, n, t, s: x + jnp.abs(jnp.ones(9, jnp.complex64)[t]),
        "real numbers",
    ),
    "keys of random numbers": (
        TypeError,
        "score_mod",
        lambda x, b, n, t, s: x + jax.random.uniform(jax.random.fold_in(jax.random.key(0), t)),
        "real numbers",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_functions_are_refused_by_name(name):
    error, argument, function, text = BAD[name]
    run = functools.partial(blockwise, **{argument: function})
    for attention in (run, jax.jit(run)):
        with pytest.raises(error, match=f"(?s){argument} must .*{text}"):
            attention(*qkv())


def test_errors_of_jax_name_the_function_and_its_arguments():
    with pytest.raises(jax.errors.TracerArrayConversionError, match=r"test_flex.py:(?s:.)*argument position"):
        blockwise(*qkv(), score_mod=lambda score, batch, head, position, key: score + NUMBERS[position])
    with pytest.raises(jax.errors.TracerBoolConversionError, match=r"test_flex.py:(?s:.)*arguments position and key"):
        blockwise(*qkv(), mask_mod=lambda batch, head, position, key: True if position > key else False)


@pytest.mark.parametrize("transformation", [jax.jit, jax.vmap, lambda f: jax.grad(lambda x: f(x).sum())])
def test_values_of_a_transformation_that_has_ended_are_refused(transformation):
    left = []
    transformation(lambda x: (left.append(x), x)[1])(random(9))
    for read in (lambda t: left[0] if not left[0].ndim else left[0][t], lambda t: left[0].sum()):
        with pytest.raises(jax.errors.UnexpectedTracerError, match="score_mod must not read"):
            blockwise(*qkv(), score_mod=lambda score, b, n, t, s, read=read: score + read(t))
        with pytest.raises(jax.errors.UnexpectedTracerError):
            jax.jit(lambda *x, read=read: blockwise(*x, score_mod=lambda x, b, n, t, s: x + read(t)))(*qkv())
