"""Every transformation of JAX gives what plain calls give: jit, grad, vmap, scan, remat, sharding, export and more."""

import functools
import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import BY_NAME, Case
from harness import (
    AVAILABLE,
    DIFFERENTIABLE,
    arrays,
    assert_allclose,
    assert_close,
    check_case,
    cotangents,
    evaluate,
    qkv,
    quick_jit,
    refused,
    split,
    x64,
)
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import jax_mfa

FEATURED = Case(
    "featured",
    T=6,
    S=7,
    N=4,
    K=2,
    H=4,
    bias="NTS",
    traced_scale=True,
    is_causal=True,
    query_offset=(2, 1),
    key_value_seq_lengths=(7, 5),
    alibi_slopes=True,
    sinks=True,
    dropout_rate=0.2,
)


@pytest.fixture(params=[x for x in AVAILABLE if x.own_rules], ids=lambda x: x.name)
def implementation(request):
    """Implementations with rules of their own; what is plain jnp has one test at the end."""
    return request.param


def close(got, wanted, terms=32):
    """Two ways to the same float32 results, summed in orders of their own."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert_close(a, b, "float32", terms=terms, largest_score=4)


def gradient(implementation, arguments, names):
    """A function of the arguments in `names`: a random sum of output and log-sum-exp, and its gradients."""
    d_out, d_lse = cotangents(arguments)

    def loss(varying):
        out, lse = implementation.flash(**{**arguments, **varying})
        return (out * d_out).sum() + jnp.where(lse == -jnp.inf, 0, lse * d_lse).sum()

    return jax.value_and_grad(lambda *xs: loss(dict(zip(names, xs))), argnums=tuple(range(len(names))))


# --- jit


def test_one_jitted_function_serves_shapes_dtypes_and_static_settings(implementation):
    traces = []

    @functools.partial(jax.jit, static_argnames=("is_causal", "local_window_size"))
    def run(q, k, v, is_causal=False, local_window_size=None):
        traces.append(q.shape)
        return implementation.attend(q, k, v, is_causal=is_causal, local_window_size=local_window_size)

    calls = [
        (qkv(), {}),
        (qkv(T=5, S=3), {}),
        (qkv(dtype="bfloat16"), {}),
        (qkv(), {"is_causal": True}),
        (qkv(), {"local_window_size": (1, 0)}),
        (qkv(), {"local_window_size": (2, 0)}),
    ]
    for _ in range(2):
        for inputs, static in calls:
            got, wanted = run(*inputs, **static), implementation.attend(*inputs, **static)
            assert got.dtype == inputs[0].dtype
            assert_close(got, np.asarray(wanted, np.float64), got.dtype, terms=17, largest_score=4)
    assert len(traces) == len(calls)


def test_eager_and_jitted_calls_agree(implementation):
    arguments = FEATURED.arguments()
    d_out, d_lse = cotangents(arguments)
    close(
        evaluate(implementation, arguments, d_out, d_lse, jit=lambda f: f),
        evaluate(implementation, arguments, d_out, d_lse),
    )


def test_python_lists_and_numpy_scalars_are_arrays_too(implementation):
    q, k, v = qkv(B=1, T=2, S=2, N=1, K=1, H=2)
    lists = [x.tolist() for x in (q, k, v)]
    close(implementation.attend(*lists, key_value_seq_lengths=[1]), implementation.attend(q, k, v, mask=[True, False]))


def test_python_lists_may_hold_traced_values(implementation):
    q, k, v = qkv()
    run = lambda length, sink: implementation.attend(q, k, v, key_value_seq_lengths=[length, 4], sinks=[sink] * 4)
    wanted = implementation.attend(q, k, v, key_value_seq_lengths=[6, 4], sinks=[0.5] * 4)
    close(run(jnp.int32(6), jnp.float32(0.5)), wanted)
    close(jax.jit(run)(6, 0.5), wanted)


# --- vmap

# an argument set without the leading batch axis, and for each argument the axes it may be mapped over
MAPPED = {
    "query": (6, 4, 4),
    "key": (7, 2, 4),
    "value": (7, 2, 4),
    "bias": (4, 6, 7),
    "mask": (1, 6, 7),
    "scale": (),
    "query_offset": (),
    "key_value_seq_lengths": (),
    "query_seq_lengths": (),
    "alibi_slopes": (4,),
    "sinks": (4,),
    "query_segment_ids": (6,),
    "key_value_segment_ids": (7,),
    "dropout_seed": (2,),
}
STATIC = {"is_causal": True, "dropout_rate": 0.2}


def _draw(name, shape, rng):
    if name == "mask":
        return rng.random(shape) < 0.8
    if name.endswith("segment_ids"):
        return rng.integers(0, 2, shape).astype(np.int32)
    if name == "query_offset":
        return rng.integers(-1, 4, shape).astype(np.int32)
    if name.endswith("lengths"):
        return rng.integers(2, 7, shape).astype(np.int32)
    if name == "dropout_seed":
        return rng.integers(0, 2**32, shape, dtype=np.uint32)
    x = rng.standard_normal(shape).astype(np.float32)
    return np.abs(x) * 0.3 if name in ("alibi_slopes", "scale") else x


def _mapped_arguments(axes: dict, size=3, batch=None):
    """Arguments in which each name of `axes` has a mapped axis of `size` there."""
    rng = np.random.default_rng(7)
    result = {}
    for name, shape in MAPPED.items():
        if batch is not None and name not in ("scale", "dropout_seed", "alibi_slopes", "sinks"):
            shape = (batch, *shape)
        if name in axes:
            full = list(shape)
            full.insert(axes[name] if axes[name] >= 0 else len(shape) + 1 + axes[name], size)
            shape = tuple(full)
        result[name] = _draw(name, shape, rng)
    return result


@functools.cache
def _both_passes(implementation):
    """Output, log-sum-exp and gradients as a function of arguments and cotangents, and the same jitted."""

    def run(arguments, d_out, d_lse):
        fun = lambda varying: implementation.flash(**{**arguments, **varying}, **STATIC)
        results, pullback = jax.vjp(fun, {name: arguments[name] for name in DIFFERENTIABLE if name in arguments})
        return results, pullback((d_out, d_lse))

    return run, quick_jit(run)


def _check_vmap(implementation, axes, size=3, batch=None):
    """vmap equals a loop: output, log-sum-exp and the gradient of every differentiable argument, mapped or not."""
    arguments = _mapped_arguments(axes, size, batch)
    rng = np.random.default_rng(8)
    lead = (size,) if batch is None else (size, batch)
    d_out, d_lse = (rng.standard_normal(s).astype(np.float32) for s in ((*lead, 6, 4, 4), (*lead, 6, 4)))
    run, one = _both_passes(implementation)
    in_axes = {name: axes.get(name) for name in arguments}
    got = quick_jit(jax.vmap(run, in_axes=(in_axes, 0, 0)))(arguments, d_out, d_lse)
    take = lambda i: {n: np.take(x, i, axes[n]) if n in axes else x for n, x in arguments.items()}
    loop = [one(take(i), d_out[i], d_lse[i]) for i in range(size)]
    close(got, jax.tree.map(lambda *xs: np.stack(xs), *loop))


# sets of names of which each pair of names is told apart by one, and each name is in one and not in another
TOLD_APART = [[name for i, name in enumerate(MAPPED) if (i + 1) >> bit & 1] for bit in range(4)]


@pytest.mark.share(2)
@pytest.mark.parametrize(
    "names,batch", list(zip(TOLD_APART, (2, None, 2, None))), ids=[names[0] for names in TOLD_APART]
)
def test_vmap_over_some_arguments_alone(implementation, names, batch):
    _check_vmap(implementation, dict.fromkeys(names, 0), batch=batch)


@pytest.mark.share(4)
@pytest.mark.parametrize(
    "axes,batch",
    [
        ({name: 0 for name in MAPPED}, 2),
        ({name: -1 for name in MAPPED}, None),
        ({"query": 1, "key": 2, "value": 3, "bias": 2, "mask": 1, "sinks": 1}, None),
        ({"query": 1, "key": 2, "value": 3, "bias": 2, "mask": 1, "sinks": 1}, 2),
        ({"key": 1, "value": 0}, 2),
        ({"bias": 3, "key_value_seq_lengths": 0, "query": 2}, None),
    ],
    ids=["all_first", "all_last", "mixed", "mixed_batch", "keys_and_values", "some"],
)
def test_vmap_over_any_axis(implementation, axes, batch):
    _check_vmap(implementation, axes, batch=batch)


@pytest.mark.share(2)
@pytest.mark.parametrize("outer,inner", [("query", "key"), ("key", "query"), ("bias", "value"), ("sinks", "mask")])
def test_nested_vmap_over_different_arguments(implementation, outer, inner):
    arguments = _mapped_arguments({})
    rng = np.random.default_rng(3)
    arguments[outer] = _draw(outer, (2, *MAPPED[outer]), rng)
    arguments[inner] = _draw(inner, (3, *MAPPED[inner]), rng)
    names = [name for name in DIFFERENTIABLE if name in arguments]

    def run(a, b):
        fun = lambda varying: implementation.attend(**{**arguments, outer: a, inner: b, **varying}, **STATIC)
        moving = {**{name: arguments[name] for name in names}, outer: a, inner: b}
        out, pullback = jax.vjp(fun, {name: moving[name] for name in names})
        return out, pullback(jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape))

    got = quick_jit(jax.vmap(jax.vmap(run, (None, 0)), (0, None)))(arguments[outer], arguments[inner])
    one = quick_jit(run)
    pairs = itertools.product(range(2), range(3))
    loop = [one(arguments[outer][i], arguments[inner][j]) for i, j in pairs]
    close(got, jax.tree.map(lambda *xs: np.stack(xs).reshape(2, 3, *xs[0].shape), *loop))


def test_vmap_twice_over_the_same_arguments_equals_more_leading_axes(implementation):
    q, k, v = arrays((2, 3, 5, 4, 4), (2, 3, 6, 2, 4), (2, 3, 6, 2, 4))
    f = functools.partial(implementation.flash, is_causal=True)
    close(jax.vmap(jax.vmap(f))(q, k, v), f(q, k, v))
    close(jax.vmap(jax.vmap(f, in_axes=1), in_axes=1)(*(np.moveaxis(x, (0, 1), (1, 2)) for x in (q, k, v))), f(q, k, v))


def test_gradients_of_each_example_by_vmap_of_grad(implementation):
    q, k, v = qkv(B=4)
    loss = lambda k, q, v: (implementation.attend(q, k, v, is_causal=True) ** 2).sum()
    shared = k[0]
    got = jax.vmap(jax.grad(loss), in_axes=(None, 0, 0))(shared, q, v)
    close(got, np.stack([jax.grad(loss)(shared, q[i], v[i]) for i in range(4)]))
    total = jax.grad(lambda k: jax.vmap(loss, in_axes=(None, 0, 0))(k, q, v).sum())(shared)
    close(total, np.asarray(got).sum(0))


def test_vmap_over_an_axis_of_size_0(implementation):
    q, k, v = qkv(B=3)
    attend = functools.partial(implementation.attend, is_causal=True)
    loss = lambda k, q, v: jnp.sin(attend(q, k, v)).sum()
    none = [x[:0] for x in (q, k, v)]
    out, lse = jax.vmap(implementation.flash)(*none)
    assert out.shape == (0, 7, 4, 8) and out.dtype == q.dtype and lse.shape == (0, 7, 4)
    mapped = quick_jit(jax.vmap(attend, in_axes=(2, None, None), out_axes=2))
    assert mapped(*arrays((3, 7, 0, 4, 8)), k, v).shape == (3, 7, 0, 4, 8)
    gradients = jax.vmap(jax.grad(loss, argnums=(0, 1, 2)))(none[1], none[0], none[2])
    assert [x.shape for x in gradients] == [(0, *x.shape[1:]) for x in (k, q, v)]
    total = jax.grad(lambda k: jax.vmap(loss, in_axes=(None, 0, 0))(k, q[:0], v[:0]).sum())(k[0])
    np.testing.assert_array_equal(total, np.zeros_like(k[0]))
    if implementation.forward_mode:
        moved = jax.vmap(lambda *x: jax.jvp(attend, x, x)[1])(*none)
        assert moved.shape == (0, 7, 4, 8)
    if "batch_size" in inspect.signature(jax.lax.map).parameters:  # its remainder is such an axis
        batched = jax.lax.map(lambda x: attend(*x), (q[:2], k[:2], v[:2]), batch_size=2)
        close(batched, attend(q[:2], k[:2], v[:2]))


# --- scan, while loops, remat


def test_scan_over_layers_equals_a_loop(implementation):
    x, weights = arrays((2, 6, 4, 4), (3, 4, 4))
    weights = weights / 2

    def layer(x, w):
        return x + implementation.attend(x @ w, x, x, is_causal=True), None

    def loop(x, weights):
        for w in weights:
            x, _ = layer(x, w)
        return x

    scanned = lambda x, weights: jax.lax.scan(layer, x, weights)[0]
    total = lambda f: jax.value_and_grad(lambda *xs: jnp.sin(f(*xs)).sum(), argnums=(0, 1))
    # the errors of three layers add up
    close(quick_jit(total(scanned))(x, weights), quick_jit(total(loop))(x, weights), terms=9 * 32)


def test_cond_and_while_loop(implementation):
    q, k, v = qkv()
    attend = lambda q: implementation.attend(q, k, v)
    wanted = attend(attend(q))
    close(quick_jit(lambda q: jax.lax.fori_loop(0, 2, lambda _, x: attend(x), q))(q), wanted)
    close(quick_jit(lambda q, yes: jax.lax.cond(yes, attend, lambda x: x, q))(q, True), attend(q))


POLICIES = {
    "default": None,
    "everything": jax.checkpoint_policies.everything_saveable,
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "dots_without_batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "names": jax.checkpoint_policies.save_only_these_names("context"),
}


@functools.cache
def _block(implementation):
    """A function that names what it makes of attention, where to differentiate it, and its value and gradient there."""
    arguments = FEATURED.arguments()
    moving, static = split(arguments)

    def block(varying):
        out = implementation.attend(**{**moving, **varying}, **static)
        return jnp.sin(checkpoint_name(out, "context")).sum()

    at = {name: arguments[name] for name in DIFFERENTIABLE if name in arguments}
    return block, at, quick_jit(jax.value_and_grad(block))(at)


@pytest.mark.share(4)
@pytest.mark.parametrize("policy", POLICIES)
def test_remat_changes_no_gradient(implementation, policy):
    block, at, wanted = _block(implementation)
    got = quick_jit(jax.value_and_grad(jax.checkpoint(block, policy=POLICIES[policy])))(at)
    # the gradient of the scale is a sum over all scores
    close(got, wanted, terms=at["query"][..., 0].size * at["key"].shape[-3])


@pytest.mark.parametrize("saved,times", [(("jax_mfa_out", "jax_mfa_lse"), 1), ((), 2)], ids=["saved", "not"])
def test_a_checkpoint_policy_spares_the_second_forward_pass(implementation, saved, times):
    if not implementation.own_rules:
        pytest.skip("has no primitive to count")
    q, k, v = qkv()
    block = lambda q: jnp.sin(implementation.attend(jnp.sin(q), k, v)).sum()
    policy = jax.checkpoint_policies.save_only_these_names(*saved)
    text = str(jax.make_jaxpr(jax.grad(jax.checkpoint(block, policy=policy)))(q))
    assert text.count("jax_mfa_attention[") == times and text.count("jax_mfa_attention_bwd[") == 1


# --- several devices


def _mesh(*shape, names=("data", "heads")):
    return Mesh(np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape), names[: len(shape)])


def _shard_map(fun, mesh, in_specs, out_specs):
    """`shard_map` with its default checks."""
    if hasattr(jax, "shard_map"):
        return jax.shard_map(fun, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
    from jax.experimental.shard_map import shard_map

    return shard_map(fun, mesh=mesh, in_specs=in_specs, out_specs=out_specs)


SHARDED = Case(
    "sharded", B=4, T=6, S=7, N=4, K=2, H=4, key_value_seq_lengths=(7, 3, 5, 0), is_causal=True, query_offset=1
)
SPECS = {
    "query": P("data", None, "heads"),
    "key": P("data", None, "heads"),
    "value": P("data", None, "heads"),
    "key_value_seq_lengths": P("data"),
    "bias": P(None, "heads"),
    "sinks": P("heads"),
    "scale": P(),
}


def _sharded_arguments():
    arguments = SHARDED.arguments()
    arguments["bias"], arguments["sinks"] = arrays((1, 4, 6, 7), (4,), seed=3)
    arguments["scale"] = np.float32(0.4)
    return arguments


@pytest.mark.share(2)
@pytest.mark.skipif(len(jax.devices()) < 4, reason="one device")
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("mesh", [(4,), (2, 2)], ids=str)
def test_shard_map_over_batch_and_heads_with_its_default_checks(implementation, mesh, jit):
    arguments = _sharded_arguments()
    arrays_, static = split(arguments)
    names = tuple(arrays_)
    specs = {n: s if len(mesh) == 2 else P(*(a if a == "data" else None for a in s)) for n, s in SPECS.items()}
    specs = {n: specs[n] for n in names}
    out_specs = specs["query"], specs["query"]
    run = lambda *xs: implementation.flash(**dict(zip(names, xs)), **static)
    sharded = _shard_map(run, _mesh(*mesh), tuple(specs[n] for n in names), out_specs)
    d_out, d_lse = cotangents(arguments)
    moving = [i for i, n in enumerate(names) if n in DIFFERENTIABLE]

    def loss(f):
        def fun(*varying):
            xs = list(arrays_.values())
            for i, x in zip(moving, varying):
                xs[i] = x
            out, lse = f(*xs)
            return (out * d_out).sum() + jnp.where(lse == -jnp.inf, 0, lse * d_lse).sum(), (out, lse)

        fun = jax.value_and_grad(fun, argnums=tuple(range(len(moving))), has_aux=True)
        return (quick_jit(fun) if jit else fun)(*(jnp.asarray(list(arrays_.values())[i]) for i in moving))

    if not jit and not hasattr(jax, "shard_map"):
        pytest.skip("old shard_map differentiates only what is jitted")
    close(loss(sharded), loss(run), terms=200)


@pytest.mark.skipif(len(jax.devices()) < 4, reason="one device")
def test_grad_inside_shard_map_with_replicated_arguments(implementation):
    q, k, v = qkv(B=4)

    def local(q, k, v):
        loss = lambda q, k, v: (implementation.attend(q, k, v, is_causal=True) ** 2).sum()
        return jax.grad(loss, argnums=(0, 2))(q, k, v)

    specs = P("data"), P("data"), P("data")
    got = quick_jit(_shard_map(local, _mesh(4), specs, (P("data"), P("data"))))(q, k, v)
    close(got, local(q, k, v))


@pytest.mark.skipif(len(jax.devices()) < 4 or not hasattr(jax, "shard_map"), reason="one device, or old shard_map")
@pytest.mark.parametrize("name", ["blockwise", "reference"])
def test_second_derivatives_inside_shard_map_with_its_default_checks(name):
    """Also of a caller's functions, of which the reference computes them."""
    q, k, v = qkv(B=4)
    table = jnp.asarray(np.random.default_rng(0).standard_normal(32), jnp.float32)
    functions = {
        "score_mod": lambda x, b, n, t, s: x * table[t - s + 16],
        "mask_mod": lambda b, n, t, s: (s < 4) | (b == 0),
    }

    def local(q, k, v):
        loss = lambda q: (jax_mfa.flex_attention(q, k, v, implementation=name, **functions) ** 2).sum()
        return loss(q)[None], jax.grad(lambda q: (jax.grad(loss)(q) * q).sum())(q)

    got = quick_jit(_shard_map(local, _mesh(4), (P("data"),) * 3, (P("data"), P("data"))))(q, k, v)
    for i in range(4):
        value, second = local(*(x[i : i + 1] for x in (q, k, v)))
        close((got[0][i : i + 1], got[1][i : i + 1]), (value, second), terms=200)


@pytest.mark.share(2)
@pytest.mark.skipif(len(jax.devices()) < 4, reason="one device")
@pytest.mark.parametrize(
    "spec", [P("data"), P("data", None, "heads"), P(None, "data"), P(None, None, "heads")], ids=str
)
def test_jit_of_sharded_arrays_is_right(implementation, spec):
    arguments = {**SHARDED.arguments(), "sinks": arrays((4,))[0]}
    arguments["query_offset"] = np.array([1, 2, 3, 0], np.int32)
    arrays_, static = split(arguments)
    mesh = _mesh(2, 2)
    if spec == P(None, "data"):  # lengths that the axis divides
        for name in ("query", "key", "value"):
            arrays_[name] = arrays_[name][:, :6]
        arrays_["key_value_seq_lengths"] = np.array([6, 3, 5, 0], np.int32)
    run = quick_jit(
        jax.value_and_grad(
            lambda moving, rest: jnp.sin(implementation.attend(**moving, **rest, **static)).sum(), argnums=0
        )
    )
    moving = {n: arrays_.pop(n) for n in ("query", "key", "value")}
    placed = {n: jax.device_put(x, NamedSharding(mesh, spec)) for n, x in moving.items()}
    replicated = jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, P())), arrays_)
    close(run(placed, replicated), run(moving, arrays_), terms=200)


# --- abstract evaluation, export, ahead-of-time compilation


def test_eval_shape_gives_shapes_and_dtypes_of_the_results(implementation):
    shape = lambda *d: jax.ShapeDtypeStruct(d, jnp.bfloat16)
    run = lambda q, k, v: implementation.flash(q, k, v, is_causal=True)
    q, k, v = shape(2, 10**6, 4, 8), shape(2, 10**5, 2, 8), shape(2, 10**5, 2, 3)
    out, lse = jax.eval_shape(run, q, k, v)
    assert (out.shape, out.dtype) == ((2, 10**6, 4, 3), jnp.bfloat16)
    assert (lse.shape, lse.dtype) == ((2, 10**6, 4), jnp.float32)
    grads = jax.eval_shape(jax.grad(lambda *x: run(*x)[0].astype(jnp.float32).sum(), argnums=(0, 1, 2)), q, k, v)
    assert [(g.shape, g.dtype) for g in grads] == [(x.shape, x.dtype) for x in (q, k, v)]


def test_export_round_trip_with_gradient(implementation):
    from jax import export

    arguments, static = split(FEATURED.arguments())
    run = jax.jit(lambda arguments: implementation.attend(**arguments, **static))
    exported = export.export(run, disabled_checks=implementation.disabled_checks)(arguments)
    again = export.deserialize(exported.serialize(vjp_order=1))
    wanted = run(arguments)
    close(again.call(arguments), wanted)
    (d_out,) = arrays(wanted.shape, seed=2)
    floating = {n: x for n, x in arguments.items() if n in DIFFERENTIABLE}
    pull = lambda f: jax.vjp(lambda x: f({**arguments, **x}), floating)[1](d_out)
    close(pull(again.call), pull(run))


@pytest.mark.share(2)
@pytest.mark.parametrize("platforms", [("cpu",), ("cuda",), ("rocm",), ("tpu",), ("cpu", "cuda", "tpu")], ids=str)
def test_export_lowers_for_any_platform(implementation, platforms):
    from jax import export

    arguments, static = split(FEATURED.arguments())
    loss = jax.jit(jax.grad(lambda arguments, rest: implementation.attend(**arguments, **rest, **static).sum()))
    floating = {n: x for n, x in arguments.items() if n in DIFFERENTIABLE}
    rest = {n: x for n, x in arguments.items() if n not in DIFFERENTIABLE}
    checks = implementation.disabled_checks
    lower = lambda: export.export(loss, platforms=platforms, disabled_checks=checks)(floating, rest)
    if not implementation.in_jnp and set(platforms) != {"cpu"}:
        with pytest.raises(NotImplementedError, match="platform cpu"):
            lower()
        return
    exported = lower()
    assert set(exported.platforms) == set(platforms)
    if "cpu" in platforms:
        close(exported.call(floating, rest), loss(floating, rest))


@pytest.mark.filterwarnings("ignore:jax_mfa")
@pytest.mark.parametrize("platform", ["METAL", "mps"])
def test_lowers_without_custom_calls_for_other_plugins(implementation, platform):
    if implementation.name == "metal":
        pytest.skip("those platforms take the jnp implementations")
    q, k, v = qkv()
    fun = jax.jit(jax.grad(lambda *x: implementation.attend(*x, is_causal=True).sum(), argnums=(0, 1, 2)))
    text = fun.trace(q, k, v).lower(lowering_platforms=(platform,)).as_text()
    assert "stablehlo.dot_general" in text and "custom_call" not in text


def test_ahead_of_time_compilation(implementation):
    arguments, static = split(FEATURED.arguments())
    run = jax.jit(lambda arguments: implementation.flash(**arguments, **static))
    compiled = run.lower(arguments).compile()
    close(compiled(arguments), run(arguments))
    with pytest.raises(TypeError):
        compiled({**arguments, "query": arguments["query"][:1]})


# --- derivatives


@pytest.mark.share(2)
@pytest.mark.parametrize("name", ["llama_prefill_chunk", "soft_cap_after_bias", "everything", "negative_offset"])
def test_gradients_equal_finite_differences(implementation, name):
    with x64():
        arguments = BY_NAME[name].arguments("float64")
        if refused(implementation, arguments):
            return
        arrays_, static = split(arguments)
        names = [n for n in DIFFERENTIABLE if n in arrays_]

        @jax.jit
        def fun(*moving):
            out, lse = implementation.flash(**{**arrays_, **dict(zip(names, moving))}, **static)
            return out, jnp.where(lse == -jnp.inf, 0, lse)

        at = tuple(jnp.asarray(arrays_[n]) for n in names)
        # a difference of step h misses by h² and by the unit roundoff over h
        check_grads(fun, at, order=1, modes=["rev"], atol=1e-6, rtol=1e-6, eps=1e-5)
        if implementation.forward_mode:
            check_grads(fun, at, order=1, modes=["fwd"], atol=1e-6, rtol=1e-6, eps=1e-5)


SMALL = Case(
    "small", B=1, T=3, S=4, N=2, K=1, H=2, is_causal=True, query_offset=1, logits_soft_cap=3.0, bias="TS", sinks=True
)


def _small(implementation):
    arguments = SMALL.arguments("float64")
    arrays_, static = split(arguments)
    names = ("query", "key", "value", "bias", "sinks")

    def fun(*moving):
        out, lse = implementation.flash(**{**arrays_, **dict(zip(names, moving))}, **static)
        return jnp.sin(out).sum() + jnp.cos(lse).sum()

    return jax.jit(fun), tuple(jnp.asarray(arrays_[n]) for n in names)


def _second_order_refused(implementation, fun, at) -> bool:
    if implementation.forward_mode:
        return False
    with pytest.raises(NotImplementedError, match=implementation.name):
        jax.jvp(fun, at, at)
    with pytest.raises(NotImplementedError, match=implementation.name):
        jax.grad(lambda *x: jax.grad(fun)(*x).sum())(*at)
    return True


def test_second_derivatives_equal_finite_differences(implementation):
    with x64():
        fun, at = _small(implementation)
        if not _second_order_refused(implementation, fun, at):
            check_grads(fun, at, order=2, atol=1e-5, rtol=1e-5, eps=1e-4)


def test_a_hessian_is_symmetric_however_it_is_taken(implementation):
    with x64():
        fun, at = _small(implementation)
        if _second_order_refused(implementation, fun, at):
            return
        hessian = quick_jit(jax.hessian(fun, argnums=(0, 1)))(*at)
        reverse = quick_jit(jax.jacrev(jax.grad(fun, argnums=(0, 1)), argnums=(0, 1)))(*at)
        twice_forward = quick_jit(jax.jacfwd(jax.jacfwd(fun, argnums=(0, 1)), argnums=(0, 1)))(*at)
        for i, j in itertools.product(range(2), repeat=2):
            flat = lambda h, i=i, j=j: np.asarray(h[i][j]).reshape(at[i].size, at[j].size)
            assert_allclose(flat(hessian), flat(reverse), rtol=1e-10, atol=1e-12)
            assert_allclose(flat(hessian), flat(twice_forward), rtol=1e-10, atol=1e-12)
            other = np.asarray(hessian[j][i]).reshape(at[j].size, at[i].size)
            assert_allclose(flat(hessian), other.T, rtol=1e-10, atol=1e-12)
        assert max(np.abs(x).max() for x in jax.tree.leaves(hessian)) > 1e-3


@pytest.mark.parametrize("hidden", ["key", "value"])
def test_what_is_huge_and_hidden_does_not_reach_second_derivatives(implementation, hidden):
    if not implementation.forward_mode:
        pytest.skip("has no second derivatives")
    arguments = dict(zip(("query", "key", "value"), qkv(B=1, T=2, S=4, N=1, K=1, H=2)))
    arguments["query"] *= 4  # products beyond float32
    mask = np.array([True, True, False, True])

    def hessian(arguments):
        def loss(query, scale):
            out, lse = implementation.flash(**{**arguments, "query": query}, scale=scale, mask=mask)
            return jnp.sin(out).sum() + jnp.cos(lse).sum()

        return jax.hessian(loss, argnums=(0, 1))(jnp.asarray(arguments["query"]), 0.7)

    wanted = hessian(arguments)
    arguments[hidden] = arguments[hidden].copy()
    arguments[hidden][:, 2] = 3e38
    for got, expected in zip(jax.tree.leaves(hessian(arguments)), jax.tree.leaves(wanted)):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.share(4)
@pytest.mark.parametrize("mapped", [("query",), ("key", "bias"), ()], ids="_".join)
def test_a_hessian_vector_product_is_that_of_the_reference_and_maps(mapped):
    with x64():
        arrays_, static = split(BY_NAME["everything"].arguments("float64"))
        at = {n: jnp.asarray(arrays_[n]) for n in DIFFERENTIABLE if n in arrays_}
        rng = np.random.default_rng(3)
        many = {n: jnp.asarray(rng.standard_normal((2, *at[n].shape))) if n in mapped else x for n, x in at.items()}
        vectors = {n: jnp.asarray(rng.standard_normal((2, *x.shape))) for n, x in at.items()}

        def product(name):
            def fun(moving):
                arguments = {**arrays_, **moving, **static, "return_residual": True, "implementation": name}
                out, lse = jax_mfa.dot_product_attention(**arguments)
                return (jnp.sin(out) * (1 + out)).sum() + jnp.where(lse > -np.inf, jnp.cos(lse), 0).sum()

            along = lambda at, vector: jax.jvp(jax.grad(fun), (at,), (vector,))[1]
            return jax.jit(jax.vmap(along, in_axes=({n: 0 if n in mapped else None for n in at}, 0)))

        got, wanted = product("blockwise")(many, vectors), product("reference")(many, vectors)
        for name in at:
            assert_allclose(got[name], wanted[name], rtol=1e-9, atol=1e-10, err_msg=name)


def test_jvp_and_linearize_are_the_transpose_of_the_gradient(implementation):
    with x64():
        arguments = BY_NAME["everything"].arguments("float64")
        arrays_, static = split(arguments)
        names = [n for n in DIFFERENTIABLE if n in arrays_]
        fun = lambda moving: implementation.flash(**{**arrays_, **moving}, **static)
        at = {n: jnp.asarray(arrays_[n]) for n in names}
        if not implementation.forward_mode:
            with pytest.raises(NotImplementedError, match=implementation.name):
                jax.jvp(fun, (at,), (at,))
            return
        rng = np.random.default_rng(2)
        tangent = {n: jnp.asarray(rng.standard_normal(x.shape)) for n, x in at.items()}
        (out, lse), (d_out, d_lse) = quick_jit(lambda a, t: jax.jvp(fun, (a,), (t,)))(at, tangent)
        seen = np.asarray(lse) != -np.inf
        linear = jax.linearize(fun, at)[1](tangent)
        assert_allclose(linear[0], d_out, rtol=1e-12, atol=1e-12)
        assert_allclose(np.asarray(linear[1])[seen], np.asarray(d_lse)[seen], rtol=1e-12, atol=1e-12)
        np.testing.assert_array_equal(np.asarray(d_out)[~seen], 0)
        ct = rng.standard_normal(out.shape), np.where(seen, rng.standard_normal(lse.shape), 0)
        (pulled,) = jax.vjp(fun, at)[1](tuple(jnp.asarray(x) for x in ct))
        forward = (ct[0] * d_out).sum() + np.where(seen, ct[1] * np.where(seen, d_lse, 0), 0).sum()
        reverse = sum(float((pulled[n] * tangent[n]).sum()) for n in names)
        assert_allclose(forward, reverse, rtol=1e-11)
        batched = jax.vmap(lambda t: jax.jvp(fun, (at,), (t,))[1][0])(
            jax.tree.map(lambda x: jnp.stack([x, 2 * x]), tangent)
        )
        assert_allclose(batched, np.stack([d_out, 2 * d_out]), rtol=1e-12, atol=1e-12)


def test_the_output_has_a_linear_transpose_in_values_alone(implementation):
    arrays_, static = split(BY_NAME["everything"].arguments("float32"))
    fun = lambda **moving: implementation.flash(**{**arrays_, **moving}, **static)[0]
    out, pullback = jax.vjp(lambda x: fun(value=x), arrays_["value"])
    d_out = jnp.asarray(np.random.default_rng(3).standard_normal(out.shape), out.dtype)
    (transposed,) = quick_jit(jax.linear_transpose(lambda x: fun(value=x), arrays_["value"]))(d_out)
    assert_allclose(transposed, pullback(d_out)[0], rtol=1e-5, atol=1e-5)
    with pytest.raises(NotImplementedError, match="not linear in query"):
        jax.linear_transpose(lambda x: fun(query=x), arrays_["query"])(d_out)


def test_gradients_of_integers_are_float0(implementation):
    q, k, v = qkv()
    lengths = jnp.array([9, 4])
    run = lambda q, lengths: implementation.attend(q, k, v, key_value_seq_lengths=lengths).sum()
    gradients = jax.grad(run, argnums=(0, 1), allow_int=True)(q, lengths)
    assert gradients[1].dtype == jax.dtypes.float0 and gradients[1].shape == (2,)


def test_only_the_wanted_gradients_are_taken(implementation):
    arguments = FEATURED.arguments()
    names = tuple(n for n in DIFFERENTIABLE if n in arguments)
    _, wanted = gradient(implementation, arguments, names)(*(arguments[n] for n in names))
    for name, each in zip(names, wanted):
        _, (got,) = gradient(implementation, arguments, (name,))(arguments[name])
        close(got, each, terms=100)


# --- JAX's strict modes

STRICT = ("minilm", "llama_prefill_chunk", "packed_documents", "everything")


@pytest.mark.parametrize("name", STRICT)
def test_no_implicit_rank_promotion(implementation, name):
    with jax.numpy_rank_promotion("raise"):
        check_case(implementation, BY_NAME[name])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_implicit_dtype_promotion(implementation, dtype):
    with jax.numpy_dtype_promotion("strict"):
        check_case(implementation, BY_NAME["gpt_oss"], dtype)


BLIND = {
    "mask": {"mask": np.arange(7)[:, None] > np.full(9, 2)},
    "key_lengths": {"key_value_seq_lengths": np.array([0, 9], np.int32)},
    "causal": {"is_causal": True, "query_offset": -3},
    "segments": {
        "query_segment_ids": np.array([[0, 0, 1, 1, 2, 2, 3]] * 2, np.int32),
        "key_value_segment_ids": np.array([[1] * 9, [2] * 9], np.int32),
    },
}


@pytest.mark.share(4)
@pytest.mark.parametrize("mode", ["debug_nans", "debug_infs"])
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("reason", BLIND)
def test_rows_that_see_nothing_trip_no_alarm(implementation, reason, jit, mode):
    if mode == "debug_infs" and not jit and not implementation.finite_inside:
        pytest.skip("its intermediate arrays hold infinities, which an eager call shows")
    q, k, v = qkv()
    (sinks,) = arrays((4,), seed=9)
    arrays_, static = split({**BLIND[reason], "sinks": sinks})

    def loss(q, k, v, rest):
        return (implementation.attend(q, k, v, **rest, **static) ** 2).sum()

    run = jax.value_and_grad(loss, argnums=(0, 1, 2))
    with getattr(jax, mode)(True):
        value, grads = (quick_jit(run) if jit else run)(q, k, v, arrays_)
        assert np.isfinite(value) and all(np.isfinite(g).all() for g in grads)
        with pytest.raises(FloatingPointError):  # the alarm is on
            jax.block_until_ready(jnp.asarray(1.0) / jnp.asarray(0.0) * (0 if mode == "debug_nans" else 1))


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_the_log_sum_exp_of_a_blind_row_is_no_nan(implementation, jit):
    q, k, v = qkv()
    run = lambda q: jax.vjp(lambda q: implementation.flash(q, k, v, is_causal=True, query_offset=-3), q)
    with jax.debug_nans(True):
        both = lambda q: run(q)[1]((jnp.ones((2, 7, 4, 8)), jnp.ones((2, 7, 4))))[0]
        got = (jax.jit(both) if jit else both)(q)
    np.testing.assert_array_equal(got[:, :3], 0)


def test_tracers_do_not_leak(implementation):
    q, k, v = qkv()
    with jax.checking_leaks():
        jax.jit(jax.grad(lambda q: implementation.attend(q, k, v, is_causal=True).sum()))(q)


def test_x64_mode_keeps_32_bit_inputs_in_32_bits(implementation):
    arguments = FEATURED.arguments()
    with x64():
        out, lse, gradients = evaluate(implementation, arguments, *cotangents(arguments))
    assert out.dtype == lse.dtype == np.float32
    assert all(g.dtype == arguments[n].dtype for n, g in gradients.items())
    close((out, lse, gradients), evaluate(implementation, arguments, *cotangents(arguments)))


@pytest.mark.sweep  # nothing here is our own: JAX transforms plain jnp
@pytest.mark.parametrize("definition", [x for x in AVAILABLE if not x.own_rules], ids=lambda x: x.name)
@pytest.mark.parametrize(
    "test,keywords",
    [
        (test_vmap_over_any_axis, {"axes": {name: 0 for name in MAPPED}, "batch": 2}),
        (test_vmap_over_any_axis, {"axes": {"query": 1, "key": 2, "bias": 2}, "batch": None}),
        (test_vmap_over_an_axis_of_size_0, {}),
        (test_scan_over_layers_equals_a_loop, {}),
        (test_remat_changes_no_gradient, {"policy": "dots"}),
        (test_shard_map_over_batch_and_heads_with_its_default_checks, {"mesh": (2, 2), "jit": True}),
        (test_export_round_trip_with_gradient, {}),
        (test_gradients_equal_finite_differences, {"name": "everything"}),
        (test_second_derivatives_equal_finite_differences, {}),
        (test_what_is_huge_and_hidden_does_not_reach_second_derivatives, {"hidden": "key"}),
        (test_no_implicit_rank_promotion, {"name": "everything"}),
        (test_rows_that_see_nothing_trip_no_alarm, {"reason": "mask", "jit": True, "mode": "debug_infs"}),
        (test_rows_that_see_nothing_trip_no_alarm, {"reason": "mask", "jit": False, "mode": "debug_nans"}),
        (test_x64_mode_keeps_32_bit_inputs_in_32_bits, {}),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_the_definition_passes_as_well(definition, test, keywords):
    test(definition, **keywords)
