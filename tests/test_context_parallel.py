"""Attention over a sequence that is split over devices is attention of one device, with its gradients."""

import dataclasses
import functools
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import Case
from harness import AVAILABLE, arrays, assert_matches_oracle, qkv, quick_jit, types_of
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_mfa
from jax_mfa import BlockMask, meshes
from jax_mfa.context_parallel import costs, order
from jax_mfa.context_parallel.costs import Machine
from jax_mfa.context_parallel.ring import Ring
from jax_mfa.specification import Specification

pytestmark = pytest.mark.skipif(len(jax.devices()) < 8, reason="needs eight devices")

# the axes of tokens of each argument
TOKENS = {
    **dict.fromkeys(("query", "key", "value", "query_segment_ids", "key_value_segment_ids", "key_value_ranges"), (1,)),
    **dict.fromkeys(("bias", "mask", "block_mask"), (2, 3)),
}


def mesh_of(*shape, names=("ring", "heads")):
    return Mesh(np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape), names[: len(shape)])


@dataclasses.dataclass(frozen=True)
class OverDevices:
    """What the harness judges: attention over devices, of whole arrays in the order of one device."""

    devices: tuple[int, ...]
    form: str = "ring"
    order: str = "contiguous"
    implementation: str | None = None
    dtypes = ("float16", "bfloat16", "float32", "float64")
    refuses = frozenset()

    @property
    def name(self):
        return f"{self.form} {self.devices} {self.order}"

    def flash(self, **arguments):
        n = self.devices[0]

        def placed(name, x):
            if self.order == "zigzag":
                for axis in TOKENS.get(name, ()):
                    if np.shape(x)[axis] > 1:
                        x = jax_mfa.zigzag(x, n, axis)
            return x

        arguments = {
            name: BlockMask(placed(name, x.blocks), x.block_size) if name == "block_mask" else placed(name, x)
            for name, x in arguments.items()
        }
        out, lse = jax_mfa.context_parallel_attention(
            **arguments,
            mesh=mesh_of(*self.devices),
            axis_name=("ring", "heads")[: len(self.devices)] if len(self.devices) > 1 else "ring",
            form=self.form,
            order=self.order,
            implementation=self.implementation,
            return_residual=True,
        )
        return (out, lse) if self.order == "contiguous" else tuple(jax_mfa.unzigzag(x, n) for x in (out, lse))


def problem(name, per_device, devices, **facts):
    """A case of so many tokens on each device."""
    t, s = per_device if isinstance(per_device, tuple) else (per_device,) * 2
    return Case(name, T=t * devices, S=s * devices, **{"N": 4, "K": 2, "H": 8, **facts})


EVERYTHING = {
    "V": 5,
    "bias": "BNTS",
    "mask": "BTS",
    "traced_scale": True,
    "is_causal": True,
    "offset": (2, -1),
    "cap": 3.0,
    "alibi": True,
    "sinks": True,
    "documents": 2,
    "ranges": True,
    "dropout": 0.2,
}
RUNS = {
    # odd lengths, T ≠ S, groups
    "dense": (problem("cp dense", (3, 5), 4, V=5), OverDevices((4,))),
    "causal": (problem("cp causal", 5, 8, is_causal=True, K=1), OverDevices((8,))),
    "causal zigzag": (problem("cp causal", 6, 8, is_causal=True), OverDevices((8,), order="zigzag")),
    "offset": (problem("cp offset", (3, 9), 4, is_causal=True, offset=24), OverDevices((4,))),
    "window": (problem("cp window", 5, 8, is_causal=True, window=(7, 0), sinks=True), OverDevices((8,))),
    "both sides": (problem("cp both sides", 3, 8, window=(2, 4), offset=-2), OverDevices((8,))),
    "window zigzag": (problem("cp window", 6, 4, window=(3, 1)), OverDevices((4,), order="zigzag")),
    "everything": (
        problem("cp everything", 7, 2, query_lengths=(13, 9), key_lengths=(14, 4), **EVERYTHING),
        OverDevices((2,)),
    ),
    "everything zigzag": (
        problem("cp everything", 6, 4, query_lengths=(23, 9), key_lengths=(24, 7), block=(3, 3), **EVERYTHING),
        OverDevices((4,), order="zigzag"),
    ),
    "shared bias": (
        problem("cp shared", 4, 2, bias="S", mask="T", alibi=True, block=(4, 2), sinks=True),
        OverDevices((2,), order="contiguous"),
    ),
    "heads": (
        problem("cp heads", 5, 4, N=8, K=2, query_lengths=(19, 9), key_lengths=(20, 7), block=(5, 4), **EVERYTHING),
        OverDevices((4,), form="ulysses"),
    ),
    "heads shared bias": (
        problem("cp heads shared", 5, 2, N=4, K=4, bias="N", mask="TS", window=3),
        OverDevices((2,), form="ulysses"),
    ),
    "hybrid": (
        problem("cp hybrid", 6, 8, N=4, K=2, query_lengths=(47, 9), key_lengths=(48, 30), **EVERYTHING),
        OverDevices((4, 2), form="hybrid", order="zigzag"),
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_equals_one_device_with_gradients(name):
    case, run = RUNS[name]
    assert_matches_oracle(run, case.arguments(), jit=quick_jit)


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_other_dtypes(dtype):
    case = problem("cp dtype", 6, 4, is_causal=True, sinks=True)
    run = OverDevices((4,), order="zigzag")
    with types_of(dtype):
        x = case.arguments(dtype)
        wanted, wanted_lse = jax_mfa.flash_attention(**x)
        out, lse = quick_jit(lambda x: run.flash(**x, is_causal=True))({k: v for k, v in x.items() if k != "is_causal"})
        assert out.dtype == wanted.dtype and lse.dtype == wanted_lse.dtype
        # partial outputs are rounded, each to half a unit in the last place of the largest value
        unit = float(jnp.finfo(dtype).eps)
        size = np.abs(np.asarray(x["value"], np.float64)).max()
        np.testing.assert_allclose(np.float64(out), np.float64(wanted), rtol=0, atol=2 * unit * size)
        np.testing.assert_allclose(lse, wanted_lse, rtol=0, atol=1e-12 if dtype == "float64" else 1e-5)


@pytest.mark.skipif(not any(x.name == "metal" for x in AVAILABLE), reason="needs Metal or the emulated device")
@pytest.mark.parametrize("ring", [OverDevices((2,), order="zigzag", implementation="metal")], ids=["zigzag"])
def test_on_metal_dropout_has_the_bits_of_one_device_wherever_a_part_begins(ring):
    # parts of three tokens: columns begin in the middle of a group of random words, and between a lane's two columns
    case = problem("cp metal", 6, 2, is_causal=True, dropout=0.3, alibi=True, sinks=True, key_lengths=(12, 7))
    assert_matches_oracle(ring, case.arguments(), jit=quick_jit)


# --- what is sent, and when


def equations(jaxpr, times=1):
    """Each equation of a program with how often it runs."""
    for e in jaxpr.eqns:
        yield e, times
        again = times * e.params.get("length", 1) if e.primitive.name == "scan" else times
        for inner in jax.tree.leaves(
            e.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(getattr(x, "jaxpr", None), "eqns")
        ):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from equations(inner, again)


def traced(devices, gradient=False, ordered="contiguous", per_device=4, dtype="float32", H=8, **keywords):
    """The program of ring attention, and its arguments."""
    mesh = mesh_of(devices)
    split = NamedSharding(mesh, P(None, "ring"))
    n = devices * per_device
    x = [jax.ShapeDtypeStruct((1, n, heads, H), jnp.dtype(dtype), sharding=split) for heads in (2, 1, 1)]
    run = lambda *x: jax_mfa.ring_attention(*x, mesh=mesh, axis_name="ring", order=ordered, **keywords)
    if gradient:
        run = jax.grad(lambda *x, run=run: run(*x).astype(jnp.float32).sum(), argnums=(0, 1, 2))
    return jax.make_jaxpr(run)(*x).jaxpr, run, x


def permuted(jaxpr, elements=0):
    """How often, and how many bytes, a device sends arrays of at least so many elements."""
    sent = [
        (times, e.invars[0].aval)
        for e, times in equations(jaxpr)
        if e.primitive.name == "ppermute" and e.invars[0].aval.size >= elements
    ]
    return sum(times for times, _ in sent), sum(times * x.size * x.dtype.itemsize for times, x in sent)


def test_keys_are_on_their_way_before_the_kernel_starts():
    for gradient, kernel in ((False, "jax_mfa_attention"), (True, "jax_mfa_attention_transpose")):
        jaxpr, *_ = traced(8, gradient)
        loops = []
        for e, _ in equations(jaxpr):
            if e.primitive.name != "scan":
                continue
            inner = [x.primitive.name for x, _ in equations(e.params["jaxpr"].jaxpr)]
            if kernel in inner:
                loops.append(inner)
                assert "ppermute" in inner and inner.index("ppermute") < inner.index(kernel)
                assert "ppermute" not in inner[inner.index(kernel) :]
        assert loops


def test_nothing_is_gathered_and_memory_is_a_share():
    totals = {}
    for devices in (2, 8):
        n = 2**18
        _, run, x = traced(
            devices, True, per_device=n // devices, H=64, is_causal=True, ordered="zigzag", implementation="blockwise"
        )
        program = quick_jit(run).lower(*x).compile()
        assert not re.search(r"all-gather|all-to-all", program.as_text())
        memory = program.memory_analysis()
        totals[devices] = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
        assert memory.argument_size_in_bytes == sum(a.size for a in x) * 4 // devices
        problem = costs.Problem(1, n, n, 2, 1, 64, 64, 4, Specification(is_causal=True))
        assert totals[devices] == pytest.approx(costs.cost(problem, devices, 1, "zigzag").backward_memory, rel=0.25)
    assert totals[8] < 0.3 * totals[2], totals


@pytest.mark.parametrize("window", [None, (4, 0), (5, 0), (0, 0), (2, 2)])
def test_a_window_stops_the_ring(window):
    causal = window is None or window[1] == 0
    jaxpr, *_ = traced(8, is_causal=causal, local_window_size=window)
    # parts of four tokens: keys and values are sent as far as they are seen
    hops = {None: 7, (4, 0): 1, (5, 0): 2, (0, 0): 0, (2, 2): 3}[window]
    assert permuted(jaxpr)[0] == 2 * hops


@pytest.mark.parametrize("ordered", order.ORDERS)
@pytest.mark.parametrize("devices", [2, 8])
@pytest.mark.parametrize("window", [None, (5, 0)])
def test_bytes_sent_are_those_of_the_formula(devices, ordered, window):
    spec = Specification(is_causal=True, window=window or (None, None))
    n = 4 * devices
    wanted = costs.cost(costs.Problem(1, n, n, 2, 1, 8, 8, 2, spec), devices, 1, ordered)
    facts = dict(ordered=ordered, dtype="bfloat16", is_causal=True, local_window_size=window)
    assert permuted(traced(devices, **facts)[0])[1] == wanted.forward_bytes
    assert permuted(traced(devices, True, **facts)[0])[1] == wanted.forward_bytes + wanted.backward_bytes


def test_zigzag_gives_every_device_the_same_work():
    devices, length = 8, 48
    work = {}
    for ordered in order.ORDERS:
        places = [order.positions_of(ordered, devices, i, length // devices) for i in range(devices)]
        np.testing.assert_array_equal(np.sort(np.concatenate(places)), np.arange(length))
        work[ordered] = [int((p + 1).sum()) for p in places]
    assert len(set(work["zigzag"])) == 1 and max(work["contiguous"]) > 10 * min(work["contiguous"])
    x = np.arange(2 * length).reshape(2, length)
    np.testing.assert_array_equal(jax_mfa.unzigzag(jax_mfa.zigzag(x, devices), devices), x)
    np.testing.assert_array_equal(jax_mfa.zigzag(x, devices)[0], np.concatenate(places))


def test_the_schedule_visits_all_that_is_seen_and_no_more():
    """Against every pair of positions, one by one."""
    random = np.random.default_rng(0)
    for _ in range(40):
        devices, causal = int(random.integers(2, 9)), bool(random.integers(2))
        ordered = order.ORDERS[random.integers(2)]
        rows, columns = 2 * int(random.integers(1, 4)), 2 * int(random.integers(1, 4))
        window = tuple(None if random.random() < 0.4 else int(random.integers(9)) for _ in range(2))
        offset = int(random.integers(-9, 9))
        spec = Specification(is_causal=causal, window=window, query_offset=offset)
        walk = Ring(spec, "ring", devices, ordered).schedule(rows, columns)
        visited = {(walk.start + i) % devices for i in range(walk.hops + 1)}
        needed = set()
        left, right = spec.band
        for i, j in np.ndindex(devices, devices):
            row = order.positions_of(ordered, devices, i, rows)[:, None] + offset
            column = order.positions_of(ordered, devices, j, columns)[None]
            see = (left is None or column >= row - left) & (right is None or column <= row + right)
            if np.any(np.broadcast_to(see, (rows, columns))):
                needed.add((i - j) % devices)
        assert needed <= visited
        if needed:
            runs = [max((d - s) % devices for d in needed) + (s != 0) for s in range(devices)]
            assert walk.permutes == min(runs)


# --- in a program of the caller's


def shard_map(fun, mesh, in_specs, out_specs):
    """JAX's own, with its checks."""
    if hasattr(jax, "shard_map"):
        return jax.shard_map(fun, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
    from jax.experimental.shard_map import shard_map

    return shard_map(fun, mesh=mesh, in_specs=in_specs, out_specs=out_specs)


@pytest.mark.parametrize("form", ["ring", "ulysses"])
def test_within_shard_map_with_its_checks(form):
    mesh = mesh_of(2, 4, names=("data", "sequence"))
    query, key, value = qkv(B=2, T=12, S=12, N=4, K=4)
    slopes, sinks, d_out = arrays((4,), (4,), (2, 12, 4, 8))
    slopes = abs(slopes)
    keywords = dict(is_causal=True, dropout_rate=0.3, dropout_seed=7)

    def local(query, key, value, slopes, sinks, d_out):
        out = jax_mfa.context_parallel_attention(
            query, key, value, axis_name="sequence", form=form, batch_axis="data",
            alibi_slopes=slopes, sinks=sinks, **keywords,
        )  # fmt: skip
        return jax.lax.psum((out * d_out).sum(), ("data", "sequence"))

    split = P("data", "sequence")
    over = shard_map(local, mesh, (split, split, split, P(), P(), split), P())
    one = lambda *x: (jax_mfa.dot_product_attention(*x[:3], alibi_slopes=x[3], sinks=x[4], **keywords) * x[5]).sum()
    got, wanted = (
        quick_jit(jax.value_and_grad(f, argnums=(0, 1, 2, 3, 4)))(query, key, value, slopes, sinks, d_out)
        for f in (over, one)
    )
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted)):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6 * np.abs(b).max())


def test_with_batch_rows_and_heads_on_other_axes():
    """The bits of dropout are those of one device, whatever else is split."""
    mesh = mesh_of(2, 2, 2, names=("data", "sequence", "model"))
    x = Case("cp mesh", B=4, T=8, S=12, N=4, K=2, H=8, bias="BNTS", dropout=0.4, alibi=True, key_lengths=(12, 3, 7, 9))
    x = x.arguments()
    run = lambda: jax_mfa.ring_attention(
        **x, mesh=mesh, axis_name="sequence", batch_axis="data", head_axis="model", order="zigzag"
    )
    for name, axes in TOKENS.items():
        for axis in axes if name in x else ():
            x[name] = jax_mfa.zigzag(x[name], 2, axis)
    got = jax_mfa.unzigzag(quick_jit(run)(), 2)
    for name, axes in TOKENS.items():
        for axis in axes if name in x else ():
            x[name] = jax_mfa.unzigzag(x[name], 2, axis)
    np.testing.assert_allclose(got, quick_jit(lambda: jax_mfa.dot_product_attention(**x))(), rtol=0, atol=1e-5)


def test_what_nobody_sees_never_reaches_a_result_and_huge_scores_keep_their_digits():
    mesh = mesh_of(4)
    query, key, value = qkv(B=1, T=8, S=8, N=2, K=1)
    key, value = 1e4 * key, value.copy()
    key[:, 5:], value[:, 5:] = np.nan, np.inf
    run = lambda *x: jax_mfa.ring_attention(
        *x, mesh=mesh, axis_name="ring", is_causal=True, key_value_seq_lengths=[5], return_residual=True
    )
    one = lambda *x: jax_mfa.flash_attention(*x, is_causal=True, key_value_seq_lengths=[5])
    d = arrays((1, 8, 2, 8), (1, 8, 2), seed=3)

    @functools.partial(quick_jit, static_argnums=0)
    def both(f, *x):
        results, pull = jax.vjp(f, *x)
        return *results, *pull(tuple(map(jnp.asarray, d)))

    for a, b in zip(both(run, query, key, value), both(one, query, key, value)):
        assert np.isfinite(b).all()
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max())
    key[:, 1] = np.nan  # and what is seen does
    out, lse = both(run, query, key, value)[:2]
    wanted, wanted_lse = both(one, query, key, value)[:2]
    np.testing.assert_array_equal(np.isnan(out), np.isnan(wanted))
    np.testing.assert_array_equal(np.isnan(lse), np.isnan(wanted_lse))
    assert np.isnan(lse).any() and not np.isnan(lse).all()


def test_vmap_and_hessian_vector_products():
    mesh = mesh_of(2)
    query, key, value = qkv(B=1, T=4, S=4)
    over = lambda q, k: jax_mfa.ring_attention(q, k, value, mesh=mesh, axis_name="ring")
    one = lambda q, k: jax_mfa.dot_product_attention(q, k, value)
    many = np.stack([query, -query, 2 * query])
    got, wanted = (quick_jit(jax.vmap(f, in_axes=(0, None)))(many, key) for f in (over, one))
    np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-6)
    product = lambda f: quick_jit(lambda t: jax.jvp(jax.grad(lambda q: (f(q, key) ** 2).sum()), (query,), (t,))[1])
    got, wanted = (product(f)(2 * query) for f in (over, one))
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda q: over(q, key), (query,), (query,))


# --- the choice


def shapes(T, N=32, K=8, H=128, S=None, B=1):
    arrays = [jax.ShapeDtypeStruct((B, n, h, H), jnp.bfloat16) for n, h in ((T, N), (S or T, K), (S or T, K))]
    return dict(zip(("query", "key", "value"), arrays))


def test_the_form_is_chosen_by_what_is_sent_and_says_why():
    long = jax_mfa.explain_context_parallel(**shapes(2**20), devices=8, is_causal=True, order="zigzag")
    assert long.form == "ring" and "zigzag" in long.reasons["ulysses"] and "→ ring" in str(long)
    # heads that do not divide leave the ring
    odd = jax_mfa.explain_context_parallel(**shapes(2**14, N=6, K=6), devices=4)
    assert odd.form == "ring" and "do not divide N = 6" in odd.reasons["ulysses"]
    # short sequences over a slow network: fewer bytes win
    slow = Machine(bytes_per_second=1e8)
    short = jax_mfa.explain_context_parallel(**shapes(2**12, N=8, K=8), devices=8, machine=slow)
    assert short.form == "ulysses", str(short)
    assert jax_mfa.explain_context_parallel(**shapes(2**12), devices=8, heads_devices=2).devices == (4, 2)
    with pytest.raises(ValueError, match="heads_devices must divide devices = 8, got 3"):
        jax_mfa.explain_context_parallel(**shapes(2**12), devices=8, heads_devices=3)


def test_the_part_of_scores_that_is_visible():
    random = np.random.default_rng(1)
    for _ in range(30):
        t, s = (int(x) for x in random.integers(1, 12, 2))
        window = tuple(None if random.random() < 0.3 else int(x) for x in random.integers(0, 12, 2))
        spec = Specification(is_causal=bool(random.integers(2)), window=window)
        left, right = spec.band
        distance = np.arange(s)[None] - np.arange(t)[:, None]
        see = (distance >= (-99 if left is None else -left)) & (distance <= (99 if right is None else right))
        assert costs.Problem(1, t, s, 1, 1, 1, 1, 4, spec).visible == pytest.approx(see.mean())


def test_the_choice_runs():
    query, key, value = qkv(B=1, T=8, S=8)
    for axis, mesh in (("ring", mesh_of(2)), (("ring", "heads"), mesh_of(2, 2))):
        run = functools.partial(jax_mfa.context_parallel_attention, mesh=mesh, axis_name=axis, is_causal=True)
        out = quick_jit(run)(query, key, value)
        wanted = quick_jit(functools.partial(jax_mfa.dot_product_attention, is_causal=True))(query, key, value)
        np.testing.assert_allclose(out, wanted, rtol=0, atol=2e-6)


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
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-6)
    loss = lambda f: lambda query, key: (f(query, key, value, lengths)[3] ** 2).sum()
    for a, b in zip(*(quick_jit(jax.grad(loss(f), argnums=(0, 1)))(query, key) for f in (step, one))):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())


def test_errors_of_decoding():
    mesh = mesh_of(4)
    query, key, value = qkv(B=3, T=1, S=12)
    run = functools.partial(jax_mfa.sharded_decode_attention, query, mesh=mesh, axis_name="ring")
    with pytest.raises(ValueError, match="columns of a cache must be a multiple of the 4 devices, got S = 11"):
        run(key[:, :11], value[:, :11], [1, 2, 3])
    with pytest.raises(ValueError, match=r"lengths must lie in 0\.\.12, got 13"):
        run(key, value, [1, 13, 3])
    with pytest.raises(TypeError, match="unexpected keyword argument 'is_causal'"):
        run(key, value, [1, 2, 3], is_causal=True)
    with pytest.raises(ValueError, match="the cache holds 12 tokens; 12 known to be written, it cannot take 1 more"):
        jax_mfa.sharded_append(key, value, 12, key[:, :1], value[:, :1], mesh=mesh, axis_name="ring")


def test_the_figures_on_paper_are_those_of_the_formulas():
    text = (pathlib.Path(__file__).parent.parent / "docs" / "context-parallel.md").read_text()
    million = costs.Problem(1, 10**6, 10**6, 32, 8, 128, 128, 2, Specification(is_causal=True))
    forms = {
        "ring": (8, 1, "contiguous"),
        "ring, zigzag": (8, 1, "zigzag"),
        "ulysses": (1, 8, "contiguous"),
        "4 × 2, zigzag": (4, 2, "zigzag"),
    }
    for network, speed in (("10 GbE", 1.25e9), ("Thunderbolt 4", 5e9), ("Thunderbolt 5", 10e9)):
        for form, (ring, heads, ordered) in forms.items():
            cost, machine = costs.cost(million, ring, heads, ordered), Machine(1e13, speed)
            sent = cost.forward_bytes, cost.backward_bytes
            seconds = [costs.seconds(million, cost, 8, heads > 1, machine, back) for back in (False, True)]
            cells = [network, form, *map(costs.human, sent), *(f"{x / speed:.2g} s" for x in sent)]
            assert f"| {' | '.join([*cells, *(f'{x:.0f} s' for x in seconds)])} |" in text


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
        "must divide the N heads .*N = 6, K = 6; ring_attention takes any",
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
    right = order.zigzag_permutation(8, 2)
    assert np.isfinite(run(right)).all()
    assert np.isnan(run(np.arange(8))).any()


def test_the_axis_is_looked_for_where_it_is_traced():
    query, key, value = qkv(B=1, T=8, S=8)
    with pytest.raises(
        ValueError, match="axis_name must name an axis of the mesh that this is traced over, got 'ring'"
    ):
        jax_mfa.ring_attention(query, key, value, axis_name="ring")
    assert meshes.mesh_axis_size(mesh_of(2, 4), ("ring", "heads"), "axis_name") == 8


# --- flax


def test_modules_and_attention_fn_take_an_axis_for_the_sequence():
    """Within `shard_map` and of whole arrays, with rotary positions in the order of the tokens."""
    from flax import nnx

    import jax_mfa.flax as ours

    mesh = mesh_of(2, 2, names=("data", "sequence"))
    (x,) = arrays((2, 8, 8))
    close = functools.partial(np.testing.assert_allclose, rtol=0, atol=5e-6)
    one = ours.linen.FlashMultiHeadAttention(num_heads=4, num_kv_heads=2, rotary_base=100.0, is_causal=True)
    parameters = quick_jit(one.init)(jax.random.key(0), x)
    wanted = quick_jit(one.apply)(parameters, x)
    whole = jax_mfa.SequenceSharding("sequence", "ring", "zigzag", mesh, "data")
    got = quick_jit(one.clone(sequence_axis=whole).apply)(parameters, jax_mfa.zigzag(x, 2))
    close(jax_mfa.unzigzag(got, 2), wanted)

    split = P("data", "sequence")
    for order_of in order.ORDERS:
        sharding = jax_mfa.SequenceSharding("sequence", "ring", order_of)
        local = one.clone(sequence_axis=sharding if order_of == "zigzag" else "sequence")
        run = meshes.shard_map(lambda x, local=local: local.apply(parameters, x), mesh, (split,), split)
        y = quick_jit(run)(jax_mfa.zigzag(x, 2) if order_of == "zigzag" else x)
        close(jax_mfa.unzigzag(y, 2) if order_of == "zigzag" else y, wanted)
    cached = quick_jit(one.clone(decode=True).init)(jax.random.key(0), x)
    with pytest.raises(NotImplementedError, match=r"sequence_axis=.* while decoding: see jax_mfa\.sharded_decode"):
        one.clone(sequence_axis="sequence", decode=True).apply(cached, x, mutable=["cache"])

    module = ours.nnx.FlashMultiHeadAttention(4, 8, sequence_axis=whole, rngs=nnx.Rngs(0))
    alone = ours.nnx.FlashMultiHeadAttention(4, 8, rngs=nnx.Rngs(0))
    close(jax_mfa.unzigzag(module(jax_mfa.zigzag(x, 2)), 2), alone(x))

    query, key, value = qkv(B=2, T=4, S=4, N=4, K=4)
    plain = dataclasses.replace(whole, order="contiguous")
    for room in (ours.linen, ours.nnx):
        run = lambda axis, room=room: quick_jit(lambda *x: room.attention_fn(*x, sequence_axis=axis, is_causal=True))(
            query, key, value
        )
        close(run(plain), run(None))
        with pytest.raises(NotImplementedError, match=r"(?s)sequence_axis=.*broadcast_dropout"):
            room.attention_fn(query, key, value, sequence_axis=plain, dropout_rate=0.5, dropout_rng=jax.random.key(0))


def test_quantised_arrays_do_not_travel():
    query, key, value = qkv(B=1, T=8, S=8, N=4, K=4, H=32)
    stored = jax_mfa.quantize(key, jax_mfa.Scheme("int8"))
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
