"""`jit` of sharded arrays: each device computes its own batch entries and heads, with the answers of one device.

Nothing is gathered, which the compiled program shows, unless an array is split where attention is not.
"""

import contextlib
import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import Case
from harness import DIFFERENTIABLE, assert_allclose, assert_matches_oracle, cotangents, is_static, own, quick_jit
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_mfa
from jax_mfa import sharding

pytestmark = pytest.mark.skipif(len(jax.devices()) < 4, reason="needs four devices")
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute")

MESHES = {"batch": (4, 1), "heads": (1, 4), "both": (2, 2)}
# arrays that have batch entries and heads of their own, and arrays that serve them all
CASES = {
    "plain": Case("plain", B=4, T=9, S=13, N=4, K=4, H=8, is_causal=True, query_offset=2),
    "groups": Case("groups", B=4, T=9, S=13, N=16, K=4, H=8, V=5, local_window_size=(4, 2)),
    "one key head": Case("one key head", B=4, T=9, S=13, N=4, K=1, H=8, bias="NTS"),
    "everything by row and head": Case(
        "everything by row and head",
        B=4,
        T=9,
        S=13,
        N=8,
        K=4,
        H=8,
        bias="BNTS",
        mask="BNTS",
        query_offset=(1, 4, 0, 7),
        is_causal=True,
        query_seq_lengths=(9, 4, 9, 7),
        key_value_seq_lengths=(13, 13, 0, 5),
        logits_soft_cap=3.0,
        documents=2,
        key_value_ranges=True,
        block_mask=(4, 4),
    ),
    "dropout": Case("dropout", B=4, T=9, S=13, N=8, K=4, H=8, dropout_rate=0.3),
    "shared by all": Case(
        "shared by all",
        B=4,
        T=9,
        S=13,
        N=4,
        K=4,
        H=8,
        bias="TS",
        mask="S",
        traced_scale=True,
        alibi_slopes=True,
        sinks=True,
    ),
}


HEAD_AXES = {"query": 2, "key": 2, "value": 2, "bias": 1, "mask": 1, "alibi_slopes": 0, "sinks": 0}
WITHOUT_ROWS = ("alibi_slopes", "sinks", "dropout_seed")


def placed(arguments: dict, shape: tuple[int, int]) -> dict:
    """Arguments on a mesh: what has batch entries or heads is split along them."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(shape), ("data", "heads"))
    batch = arguments["query"].shape[0]

    def put(name, x):
        entries = [None] * np.ndim(x)
        if np.ndim(x) and np.shape(x)[0] == batch and name not in WITHOUT_ROWS:
            entries[0] = "data"
        if name in HEAD_AXES and np.shape(x)[HEAD_AXES[name]] > 1:
            entries[HEAD_AXES[name]] = "heads"
        return jax.device_put(np.asarray(x), NamedSharding(mesh, P(*entries)))

    return {
        name: x if is_static(name, x) else jax.tree.map(functools.partial(put, name), x)
        for name, x in arguments.items()
    }


def jit_on(shape: tuple[int, int], run):
    """`jit` of what the harness evaluates, its arguments placed on a mesh."""
    return lambda arrays, d_out, d_lse: quick_jit(run)(placed(arrays, shape), d_out, d_lse)


def compiled(implementation, arguments: dict, *split):
    """Output, log-sum-exp and gradients as one program for arguments where they lie."""
    arrays = {name: x for name, x in arguments.items() if not is_static(name, x)}
    static = {name: x for name, x in arguments.items() if is_static(name, x)}
    moving = tuple(name for name in DIFFERENTIABLE if name in arrays)

    def run(arrays, d_out, d_lse):
        fun = lambda varying: implementation.flash(**{**arrays, **varying}, **static)
        (out, lse), pullback = jax.vjp(fun, {name: arrays[name] for name in moving})
        return out, lse, pullback((d_out, d_lse))[0]

    d_out, d_lse = cotangents(arguments)
    like = NamedSharding(arrays["query"].sharding.mesh, P(*split or ("data", None, "heads")))
    return quick_jit(run).lower(arrays, jax.device_put(d_out, like), jax.device_put(d_lse, like)).compile()


def collectives(program) -> dict[str, int]:
    text = program.as_text()
    return {name: len(re.findall(rf"= [^=]* {name}(?:-start)?\(", text)) for name in COLLECTIVES}


# each case with both axes split; one alone where an array has rows and heads of its own, and where it serves all
ALONE = ("everything by row and head", "shared by all")
over_meshes = pytest.mark.parametrize(
    ("name", "mesh"),
    [
        pytest.param(name, mesh, marks=() if mesh == "both" or name in ALONE else pytest.mark.sweep)
        for name in CASES
        for mesh in MESHES
    ],
)


@pytest.mark.share(8)
@own
@over_meshes
def test_answers_are_those_of_one_device(implementation, name, mesh):
    arguments = CASES[name].arguments()
    assert_matches_oracle(implementation, arguments, jit=functools.partial(jit_on, MESHES[mesh]))


@pytest.mark.share(2)
@own
@over_meshes
def test_nothing_is_gathered(implementation, name, mesh):
    case = CASES[name]
    program = compiled(implementation, placed(case.arguments(), MESHES[mesh]))
    found = collectives(program)
    summed = found.pop("all-reduce")
    assert not any(found.values()), found
    # gradients of what serves several devices are summed over them, and nothing else is
    shared = {"batch": case.name == "shared by all" or case.name == "one key head", "both": case.name != "groups"}
    if case.name in ("plain", "groups", "everything by row and head", "dropout"):
        assert summed == 0
    else:
        assert summed >= 1 or not shared.get(mesh, False)
    out, lse, gradients = program.output_shardings
    want = NamedSharding(out.mesh, P("data", None, "heads"))
    assert out.is_equivalent_to(want, 4) and lse.is_equivalent_to(want, 3)
    assert gradients["query"].is_equivalent_to(want, 4)


@own
def test_mapped_axes_beside_sharded_ones(implementation):
    """`vmap` repeats the rows of what is not mapped: where shares of the batch do not match, they are gathered."""
    case = Case("mapped", B=4, T=5, S=7, N=4, K=2, H=8, key_value_seq_lengths=(7, 3, 5, 2))
    x = case.arguments()
    lengths = x.pop("key_value_seq_lengths")
    many = np.stack([x["query"], 2 * x["query"], -x["query"]])
    fun = lambda many, key, value, lengths: jax.vmap(
        lambda query: implementation.attend(query, key, value, key_value_seq_lengths=lengths)
    )(many)
    wanted = quick_jit(fun)(many, x["key"], x["value"], lengths)
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "heads"))
    put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
    for first, rest in ((None, "data"), ("data", None)):
        if first:
            many = np.concatenate([many, many[:1]])
            wanted = np.concatenate([wanted, wanted[:1]])
        got = quick_jit(fun)(
            put(many, first, rest, None, "heads"),
            put(x["key"], "data", None, "heads"),
            put(x["value"], "data", None, "heads"),
            put(lengths, "data"),
        )
        assert_allclose(got, wanted, rtol=0, atol=1e-6)


@own
def test_a_head_count_that_does_not_split_is_gathered_and_right(implementation):
    case = Case("odd", B=2, T=6, S=7, N=6, K=2, H=8, is_causal=True)
    x = case.arguments()
    mesh = Mesh(np.array(jax.devices()[:3]), ("heads",))
    query = jax.device_put(x["query"], NamedSharding(mesh, P(None, None, "heads")))
    rest = [jax.device_put(x[n], NamedSharding(mesh, P())) for n in ("key", "value")]
    attend = quick_jit(lambda *x: implementation.attend(*x, is_causal=True))
    wanted = attend(x["query"], x["key"], x["value"])
    assert_allclose(attend(query, *rest), wanted, rtol=0, atol=1e-6)


@pytest.mark.share(2)
@own
@pytest.mark.parametrize("name", ["plain", "everything by row and head", "shared by all"])
def test_where_lengths_are_split_keys_travel(implementation, name):
    """Queries and keys stay where they are; gradients of what serves them all are summed."""
    case = dataclasses.replace(
        CASES[name], B=2, T=8, S=12, query_offset=(2, 5), query_seq_lengths=None, key_value_seq_lengths=(12, 7)
    )
    if case.block_mask is not None:
        case = dataclasses.replace(case, block_mask=(2, 3))
    x = case.arguments()
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("length", "heads"))
    tokens = {**dict.fromkeys(("query", "key", "value", "query_segment_ids", "key_value_segment_ids"), 1), "bias": 2}

    def put(name, x):
        entries = [None] * np.ndim(x)
        if name in tokens and np.shape(x)[tokens[name]] > 1:
            entries[tokens[name]] = "length"
        if name in HEAD_AXES and np.shape(x)[HEAD_AXES[name]] > 1:
            entries[HEAD_AXES[name]] = "heads"
        return jax.device_put(np.asarray(x), NamedSharding(mesh, P(*entries)))

    over = {n: v if is_static(n, v) else jax.tree.map(functools.partial(put, n), v) for n, v in x.items()}
    assert_matches_oracle(implementation, x, jit=lambda run: lambda arrays, *d: quick_jit(run)(over_arrays(over), *d))
    if name == "plain":
        program = compiled(implementation, over, None, "length", "heads")
        found = collectives(program)
        assert found.pop("collective-permute") and not any(found.values()), found
        out, _, gradients = program.output_shardings
        wanted = NamedSharding(mesh, P(None, "length", "heads"))
        assert all(s.is_equivalent_to(wanted, 4) for s in (out, *(gradients[n] for n in ("query", "key", "value"))))


def over_arrays(arguments: dict) -> dict:
    return {name: x for name, x in arguments.items() if not is_static(name, x)}


@own
def test_lengths_that_do_not_divide_alike_are_gathered_and_that_is_said(implementation):
    case = Case("lengths", B=2, T=8, S=9, N=2, K=2, H=8, is_causal=True)
    x = case.arguments()
    mesh = Mesh(np.array(jax.devices()[:4]), ("length",))
    query = jax.device_put(x["query"], NamedSharding(mesh, P(None, "length")))
    rest = [jax.device_put(x[n], NamedSharding(mesh, P())) for n in ("key", "value")]
    attend = quick_jit(lambda *x: implementation.attend(*x, is_causal=True))
    wanted = attend(x["query"], x["key"], x["value"])
    sharding._say_that_it_gathers.cache_clear()
    with pytest.warns(UserWarning, match=r"T = 8 and S = 9 do not both divide.*jax_mfa\.ring_attention"):
        got = attend(query, *rest)
    assert_allclose(got, wanted, rtol=0, atol=1e-6)


@pytest.mark.skipif(not hasattr(jax.sharding, "auto_axes"), reason="this JAX has no explicit sharding")
def test_explicit_sharding_keeps_the_axes_of_the_query(implementation):
    case = Case(
        "explicit", B=4, T=6, S=7, N=4, K=2, H=8, is_causal=True, key_value_seq_lengths=(7, 2, 5, 6), sinks=True
    )
    x = case.arguments()
    d_out, d_lse = cotangents(x)
    lengths, sinks = x.pop("key_value_seq_lengths"), x.pop("sinks")

    def run(query, key, value, sinks):
        out, lse = implementation.flash(query, key, value, is_causal=True, key_value_seq_lengths=lengths, sinks=sinks)
        return (out * d_out).sum() + (lse * d_lse).sum(), (out, lse)

    run = quick_jit(jax.value_and_grad(run, argnums=(0, 1, 2, 3), has_aux=True))
    arrays = (x["query"], x["key"], x["value"], sinks)
    wanted = jax.tree.map(np.asarray, run(*arrays))
    mesh = jax.make_mesh((2, 2), ("data", "heads"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    with jax.sharding.set_mesh(mesh):
        specs = [P("data", None, "heads")] * 3 + [P("heads")]
        got = run(*(jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs)))
        (_, (out, lse)), gradients = got
        assert jax.typeof(out).sharding.spec == P("data", None, "heads", None)
        assert jax.typeof(lse).sharding.spec == P("data", None, "heads")
        assert jax.typeof(gradients[0]).sharding.spec == P("data", None, "heads", None)
    (_, results), moved = got  # the loss is a sum that cancels
    (_, wanted), wanted_moved = wanted
    for a, b in zip((*results, *moved), (*wanted, *wanted_moved)):
        assert_allclose(a, b, rtol=0, atol=2e-6 * np.abs(b).max())


@pytest.mark.share(2)
@pytest.mark.skipif(not hasattr(jax.sharding, "auto_axes"), reason="this JAX has no explicit sharding")
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("names", [("key", "value"), ("key_value_seq_lengths",), ("mask",), ()], ids=str)
def test_a_query_without_a_sharding_may_meet_explicitly_sharded_arguments(implementation, names, jit):
    if not implementation.own_rules and (names, jit) != (("mask",), True):
        pytest.skip("one way says enough of the definition")
    case = Case(
        "constant", B=4, T=6, S=7, N=4, K=2, H=8, is_causal=True, key_value_seq_lengths=(7, 2, 5, 6), mask="BNTS"
    )
    x = case.arguments()
    wanted = implementation.flash(**x)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.sharding.set_mesh(mesh):
        arrays = {name: jax.device_put(x[name], NamedSharding(mesh, P("data"))) for name in names}
        for query in (x["query"], jnp.asarray(x["query"])):
            run = lambda arrays, query=query: implementation.flash(**{**x, "query": query, **arrays})
            got = (quick_jit(run) if jit else run)(arrays)
            assert jax.typeof(got[0]).sharding.is_fully_replicated
            for a, b in zip(got, wanted):
                assert_allclose(a, b, rtol=0, atol=1e-6)
        if "key" in names:
            loss = lambda arrays: (run(arrays)[0] ** 2).sum()
            moved = jax.grad(loss)(arrays)["key"]
            assert jax.typeof(moved).sharding.spec == jax.typeof(arrays["key"]).sharding.spec
            assert_allclose(moved, jax.grad(loss)({n: x[n] for n in names})["key"], rtol=0, atol=2e-6)


def _everywhere():
    """Functions of arrays split along batch entries or heads: name, function, arrays, and the letters of each."""
    rng = np.random.default_rng(0)
    real = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    q, k, v = real(4, 6, 8, 8), real(4, 16, 4, 8), real(4, 16, 4, 8)
    plain, letters = {"query": q, "key": k, "value": v}, {"query": "btnh", "key": "bskh", "value": "bskh"}
    new = {"key": real(4, 6, 4, 8), "value": real(4, 6, 4, 8), "key_cache": k, "value_cache": v}
    lengths = np.array([1, 4, 7, 9], np.int32)
    scheme = jax_mfa.Scheme("int8", tokens=4, channels=4, center=8)
    tables = rng.permutation(8).reshape(4, 2).astype(np.int32)
    pages = {"key": real(8, 8, 4, 8), "value": real(8, 8, 4, 8), "tables": tables}
    ragged = {"query": q.reshape(24, 8, 8)[:12], "sinks": real(4, 8), "lengths": lengths}
    named = {"implementation": "blockwise"}
    yield "causal", lambda **x: jax_mfa.dot_product_attention(**x, is_causal=True, **named), plain, letters
    yield (
        "quantized",
        lambda query, key, value: jax_mfa.flash_attention(
            query, jax_mfa.quantize(key, scheme), jax_mfa.quantize(value, "fp8"), is_causal=True, **named
        ),
        plain,
        letters,
    )
    yield "decode", lambda **x: jax_mfa.decode_attention(**x, lengths=lengths, **named), plain, letters
    for ring in (False, True):
        window = {"ring": True, "local_window_size": (15, 0)} if ring else {}
        yield (
            f"cache, {ring=}",
            lambda window=window, **x: jax_mfa.cache.attend(**x, **window, **named),
            {"query": q, **new, "lengths": lengths},
            {"query": "btnh", **dict.fromkeys(new, "bskh"), "lengths": "b"},
        )
    yield (
        "pages",
        lambda query, key, value, tables, lengths, sinks: jax_mfa.paged_attention(
            query, key, value, tables, lengths, query_start_locs=[0, 1, 3, 8, 12], sinks=sinks, **named
        ),
        {**pages, **ragged},
        {"query": "tnh", "key": "..kh", "value": "..kh", "tables": "b.", "sinks": "bn", "lengths": "b"},
    )
    yield (
        "packed",
        lambda query, key, value: jax_mfa.flash_attention_varlen(
            query, key, value, [0, 5, 16], is_causal=True, **named
        ),
        {name: x.reshape(-1, *x.shape[2:])[:16] for name, x in plain.items()},
        {"query": "tnh", "key": "skh", "value": "skh"},
    )


@pytest.mark.share(8)
@pytest.mark.skipif(not hasattr(jax.sharding, "auto_axes"), reason="this JAX has no explicit sharding")
@pytest.mark.parametrize("case", [pytest.param(x[1:], id=x[0]) for x in _everywhere()])
def test_every_function_takes_explicitly_sharded_arrays_whether_their_mesh_is_set_or_not(case):
    fun, arrays, letters = case
    moving = [name for name in ("query", "key") if name != "key" or "tables" not in arrays]
    rest = {name: x for name, x in arrays.items() if name not in moving}

    def both(moved, rest):
        out, pullback = jax.vjp(lambda moved: jax.tree.leaves(fun(**moved, **rest))[0], moved)
        return out, pullback(jnp.sin(out))[0]

    split = lambda x: ({name: x[name] for name in moving}, {name: x[name] for name in rest})
    run = quick_jit(both)
    wanted = jax.tree.leaves(run(*split(arrays)))
    mesh = jax.make_mesh((2, 2), ("data", "heads"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    along = {"b": "data", "n": "heads", "k": "heads"}
    for entered in (contextlib.nullcontext, lambda: jax.sharding.set_mesh(mesh)):
        with entered():
            spec = lambda name: P(*(along.get(x) for x in letters[name]))
            given = {name: jax.device_put(x, NamedSharding(mesh, spec(name))) for name, x in arrays.items()}
            got = run(*split(given))
            assert jax.typeof(got[0]).sharding.spec == P(*spec("query")[:-1], None)
            for a, b in zip(jax.tree.leaves(got), wanted, strict=True):
                assert_allclose(a, b, rtol=0, atol=1e-5 * max(1, np.abs(b).max()))


@pytest.mark.parametrize("shape, heads", [((4,), (4, 2)), ((4,), (8, 2)), ((3,), (6, 2)), ((2, 2), (4, 2))], ids=str)
@own
def test_heads_may_be_split_over_more_devices_than_there_are_key_heads(implementation, shape, heads):
    n, k = heads
    mesh = Mesh(np.array(jax.devices()[: math.prod(shape)]).reshape(shape), ("x", "y")[: len(shape)])
    x = Case("wide", B=2, T=6, S=7, N=n, K=k, H=8, is_causal=True).arguments()
    place = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
    loss = lambda *x: jnp.sin(implementation.attend(*x, is_causal=True)).sum()
    run = quick_jit(jax.value_and_grad(loss, (0, 1, 2)))
    arrays = x["query"], x["key"], x["value"]
    wanted = run(*arrays)
    compiled = run.lower(place(arrays[0], None, None, mesh.axis_names), *map(place, arrays[1:])).compile()
    got = compiled(place(arrays[0], None, None, mesh.axis_names), *map(place, arrays[1:]))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted)):
        assert_allclose(a, b, rtol=0, atol=1e-5 * max(1, np.abs(b).max()))
    if len(shape) == 1:
        assert f"f32[2,6,{n},8]" not in "".join(re.findall(r".*all-gather\(.*", compiled.as_text()))


@own
def test_a_program_of_sharded_arrays_can_be_exported(implementation):
    from jax import export

    case = Case("export", B=4, T=6, S=7, N=4, K=2, H=8, is_causal=True)
    x = placed(case.arguments(), (2, 2))
    arrays = [x[name] for name in ("query", "key", "value")]
    attend = jax.jit(lambda *x: implementation.attend(*x, is_causal=True))
    exported = export.export(attend, disabled_checks=implementation.disabled_checks)(*arrays)
    again = export.deserialize(exported.serialize())
    got = jax.jit(again.call)(*arrays)
    assert_allclose(got, attend(*arrays), rtol=0, atol=1e-6)
