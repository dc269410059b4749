"""Attention over a sequence that is split over devices is attention of one device, with its gradients."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import Case
from harness import (
    AVAILABLE,
    arrays,
    assert_allclose,
    assert_matches_oracle,
    mesh_of,
    needs_eight_devices,
    qkv,
    quick_jit,
    shard_map,
    types_of,
)
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_mfa
from jax_mfa import BlockMask
from jax_mfa.context_parallel import layout

pytestmark = needs_eight_devices

# the axes of tokens of each argument
TOKENS = {
    **dict.fromkeys(("query", "key", "value", "query_segment_ids", "key_value_segment_ids", "key_value_ranges"), (1,)),
    **dict.fromkeys(("bias", "mask", "block_mask"), (2, 3)),
}


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
    "query_offset": (2, -1),
    "logits_soft_cap": 3.0,
    "alibi_slopes": True,
    "sinks": True,
    "documents": 2,
    "key_value_ranges": True,
    "dropout_rate": 0.2,
}
RUNS = {
    # odd lengths, T ≠ S, groups
    "dense": (problem("cp dense", (3, 5), 4, V=5), OverDevices((4,))),
    "causal": (problem("cp causal", 5, 8, is_causal=True, K=1), OverDevices((8,))),
    "causal zigzag": (problem("cp causal", 6, 8, is_causal=True), OverDevices((8,), order="zigzag")),
    "offset": (problem("cp offset", (3, 9), 4, is_causal=True, query_offset=24), OverDevices((4,))),
    "window": (problem("cp window", 5, 8, is_causal=True, local_window_size=(7, 0), sinks=True), OverDevices((8,))),
    "both sides": (problem("cp both sides", 3, 8, local_window_size=(2, 4), query_offset=-2), OverDevices((8,))),
    "window zigzag": (problem("cp window", 6, 4, local_window_size=(3, 1)), OverDevices((4,), order="zigzag")),
    "everything": (
        problem("cp everything", 7, 2, query_seq_lengths=(13, 9), key_value_seq_lengths=(14, 4), **EVERYTHING),
        OverDevices((2,)),
    ),
    "everything zigzag": (
        problem(
            "cp everything",
            6,
            4,
            query_seq_lengths=(23, 9),
            key_value_seq_lengths=(24, 7),
            block_mask=(3, 3),
            **EVERYTHING,
        ),
        OverDevices((4,), order="zigzag"),
    ),
    "shared bias": (
        problem("cp shared", 4, 2, bias="S", mask="T", alibi_slopes=True, block_mask=(4, 2), sinks=True),
        OverDevices((2,), order="contiguous"),
    ),
    "heads": (
        problem(
            "cp heads",
            5,
            4,
            N=8,
            K=2,
            query_seq_lengths=(19, 9),
            key_value_seq_lengths=(20, 7),
            block_mask=(5, 4),
            **EVERYTHING,
        ),
        OverDevices((4,), form="ulysses"),
    ),
    "heads shared bias": (
        problem("cp heads shared", 5, 2, N=4, K=4, bias="N", mask="TS", local_window_size=3),
        OverDevices((2,), form="ulysses"),
    ),
    "hybrid": (
        problem(
            "cp hybrid",
            6,
            8,
            query_seq_lengths=(47, 9),
            key_value_seq_lengths=(48, 30),
            block_mask=(3, 3),
            **EVERYTHING,
        ),
        OverDevices((4, 2), form="hybrid", order="zigzag"),
    ),
}


EVERY_RUN = ("window", "hybrid")


@pytest.mark.share(2)
@pytest.mark.parametrize("name", [pytest.param(x, marks=() if x in EVERY_RUN else pytest.mark.sweep) for x in RUNS])
def test_equals_one_device_with_gradients(name):
    case, run = RUNS[name]
    assert_matches_oracle(run, case.arguments(), jit=quick_jit)


FEATURES = {
    "none": {},
    "causal": {"is_causal": True},
    "window": {"local_window_size": (5, 2), "query_offset": 3},
    "groups": {"N": 8, "K": 2, "V": 5},
    "bias": {"bias": "BNTS"},
    "mask": {"mask": "BTS"},
    "scale": {"traced_scale": True},
    "offsets": {"is_causal": True, "query_offset": (2, -3)},
    "cap": {"logits_soft_cap": 2.0},
    "alibi": {"alibi_slopes": True},
    "sinks": {"sinks": True, "is_causal": True},
    "documents": {"documents": 3},
    "ranges": {"key_value_ranges": True},
    "dropout": {"dropout_rate": 0.3},
    "block mask": {"block_mask": (3, 3)},
}


@pytest.mark.sweep
@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("ordered", layout.ORDERS)
@pytest.mark.parametrize("devices", [2, 4, 8])
def test_each_feature_over_each_number_of_devices(devices, ordered, name):
    """Parts of three tokens, six in zigzag order."""
    case = problem(f"cp {name}", 3 if ordered == "contiguous" else 6, devices, **FEATURES[name])
    assert_matches_oracle(OverDevices((devices,), order=ordered), case.arguments(), jit=quick_jit)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float64", marks=pytest.mark.sweep)])
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
        assert_allclose(np.float64(out), np.float64(wanted), rtol=0, atol=2 * unit * size)
        assert_allclose(lse, wanted_lse, rtol=0, atol=1e-12 if dtype == "float64" else 1e-5)


@pytest.mark.skipif(not any(x.name == "metal" for x in AVAILABLE), reason="needs Metal or the emulated device")
@pytest.mark.parametrize("ring", [OverDevices((2,), order="zigzag", implementation="metal")], ids=["zigzag"])
def test_on_metal_dropout_has_the_bits_of_one_device_wherever_a_part_begins(ring):
    # parts of three tokens: columns begin in the middle of a group of random words, and between a lane's two columns
    case = problem(
        "cp metal", 6, 2, is_causal=True, dropout_rate=0.3, alibi_slopes=True, sinks=True, key_value_seq_lengths=(12, 7)
    )
    assert_matches_oracle(ring, case.arguments(), jit=quick_jit)


# --- in a program of the caller's


@pytest.mark.share(2)
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
        assert_allclose(a, b, rtol=2e-6, atol=2e-6 * np.abs(b).max())


def test_with_batch_rows_and_heads_on_other_axes():
    """The bits of dropout are those of one device, whatever else is split."""
    mesh = mesh_of(2, 2, 2, names=("data", "sequence", "model"))
    x = Case(
        "cp mesh",
        B=4,
        T=8,
        S=12,
        N=4,
        K=2,
        H=8,
        bias="BNTS",
        dropout_rate=0.4,
        alibi_slopes=True,
        key_value_seq_lengths=(12, 3, 7, 9),
    )
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
    assert_allclose(got, quick_jit(lambda: jax_mfa.dot_product_attention(**x))(), rtol=0, atol=1e-5)


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
        assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max())
    key[:, 1] = np.nan  # and what is seen does
    out, lse = both(run, query, key, value)[:2]
    wanted, wanted_lse = both(one, query, key, value)[:2]
    np.testing.assert_array_equal(np.isnan(out), np.isnan(wanted))
    np.testing.assert_array_equal(np.isnan(lse), np.isnan(wanted_lse))
    assert np.isnan(lse).any() and not np.isnan(lse).all()


def test_parts_that_see_nan_say_so_at_any_length():
    # scores of this length XLA reduces by a kernel whose maxima pass over NaN
    mesh = mesh_of(2)
    query, key, value = qkv(B=1, T=128, S=128, N=2, K=2)
    key[0, 70, 0, 3] = np.nan
    key[0, :, 1] = -np.inf
    key[0, 0, 1, 0] = np.nan
    run = lambda *x: jax_mfa.ring_attention(*x, mesh=mesh, axis_name="ring", return_residual=True)
    for x in quick_jit(run)(query, key, value):
        assert np.isnan(x).all()


def test_vmap():
    mesh = mesh_of(2)
    query, key, value = qkv(B=1, T=4, S=4)
    over = lambda q, k: jax_mfa.ring_attention(q, k, value, mesh=mesh, axis_name="ring")
    one = lambda q, k: jax_mfa.dot_product_attention(q, k, value)
    many = np.stack([query, -query, 2 * query])
    got, wanted = (quick_jit(jax.vmap(f, in_axes=(0, None)))(many, key) for f in (over, one))
    assert_allclose(got, wanted, rtol=0, atol=2e-6)


def loss_of(f):
    return lambda x: sum((y**2).sum() for y in f(x))


# modes of derivatives of `f`, a function of named arrays, at x along t
MODES = {
    "forward": lambda f, x, t: jax.jvp(f, (x,), (t,))[1],
    "a Hessian's product": lambda f, x, t: jax.jvp(jax.grad(loss_of(f)), (x,), (t,))[1],
    "reverse of reverse": lambda f, x, t: jax.grad(lambda x: loss_of(lambda x: jax.grad(loss_of(f))(x).values())(x))(x),
    "forward of forward": lambda f, x, t: jax.jvp(lambda x: jax.jvp(f, (x,), (t,))[1], (x,), (t,))[1],
    "reverse of forward": lambda f, x, t: jax.grad(loss_of(lambda x: jax.jvp(f, (x,), (t,))[1]))(x),
    "reverse of vmap": lambda f, x, t: jax.grad(
        lambda q: loss_of(jax.vmap(lambda q: f({**x, "query": q})))(jnp.stack([q, 2 * q]))
    )(x["query"]),
    "vmap of forward": lambda f, x, t: jax.jacfwd(lambda s: f({**x, "sinks": s})[1])(x["sinks"]),
}
EVERY_DAY = ("a Hessian's product", "reverse of reverse")  # the first is forward mode, of the backward pass


@pytest.mark.share(2)
@pytest.mark.parametrize("mode", [pytest.param(x, marks=() if x in EVERY_DAY else pytest.mark.sweep) for x in MODES])
def test_every_mode_of_derivatives_is_that_of_one_device(mode):
    """Of the output and the log-sum-exp, along all that moves, some of it with the keys."""
    names = ("query", "key", "value", "sinks")
    x, t = (dict(zip(names, arrays((1, 6, 2, 4), (1, 6, 1, 4), (1, 6, 1, 4), (2,), seed=seed))) for seed in (0, 1))
    facts = dict(is_causal=True, key_value_seq_lengths=[5])
    over = lambda x: jax_mfa.ring_attention(**x, **facts, mesh=mesh_of(3), axis_name="ring", return_residual=True)
    one = lambda x: jax_mfa.flash_attention(**x, **facts)
    got, wanted = (quick_jit(functools.partial(MODES[mode], f))(x, t) for f in (over, one))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())


def test_forward_mode_keeps_a_share_of_the_memory():
    """No device has all keys, or their tangents."""
    devices, n = 8, 2**18
    split = NamedSharding(mesh_of(devices), P(None, "ring"))
    x = [jax.ShapeDtypeStruct((1, n, 1, 64), jnp.float32, sharding=split)] * 6
    attend = functools.partial(jax_mfa.ring_attention, mesh=split.mesh, axis_name="ring", implementation="blockwise")
    program = quick_jit(lambda *x: jax.jvp(attend, x[:3], x[3:])).lower(*x).compile()
    assert not re.search(r"all-gather|all-to-all", program.as_text())
    memory, tiles = program.memory_analysis(), 2**25  # whatever the length
    assert memory.argument_size_in_bytes == 6 * n * 64 * 4 // devices
    assert memory.temp_size_in_bytes < 2 * memory.argument_size_in_bytes + tiles  # keys alone are four times as much


def simulated(query, key, value, d_out, places):
    """Ring attention as it was published (arXiv:2310.01889, section 3), causal, in float64, device after device.

    Args:
      query, key, value, d_out: [tokens, heads, size] of whole sequences.
      places: [devices, own tokens], the positions that each device holds.

    Returns:
      out, and the gradients of query, key and value, of each device: [devices, own tokens, heads, size].
    """
    q, k, v, d = (np.float64(x)[places] for x in (query, key, value, d_out))
    devices, scale = len(places), query.shape[-1] ** -0.5
    score = lambda i, j: np.where(
        (places[j] <= places[i][:, None])[None], scale * np.einsum("tnh,snh->nts", q[i], k[j]), -np.inf
    )
    total, high = np.zeros((2, devices, q.shape[2], q.shape[1], 1))
    sums, high = np.zeros_like(np.moveaxis(v, 2, 1)), high - np.inf
    for step in range(devices):  # the blocks of keys move on by one device each
        for i in range(devices):
            x = score(i, j := (i - step) % devices)
            new = np.maximum(high[i], x.max(-1, keepdims=True))
            still = np.where(new == -np.inf, 0, new)
            weights, fade = np.exp(x - still), np.exp(high[i] - still)
            sums[i] = fade * sums[i] + np.einsum("nts,snv->ntv", weights, v[j])
            total[i], high[i] = fade * total[i] + weights.sum(-1, keepdims=True), new
    out = np.moveaxis(sums / total, 1, 2)
    d_q, d_k, d_v = (np.zeros_like(x) for x in (q, k, v))
    for step in range(devices):  # once more around, the gradients of the keys with them
        for i in range(devices):
            p = np.exp(score(i, j := (i - step) % devices) - high[i]) / total[i]
            d_p = np.einsum("tnv,snv->nts", d[i], v[j]) - np.moveaxis((d[i] * out[i]).sum(-1), 1, 0)[..., None]
            d_q[i] += scale * np.einsum("nts,snh->tnh", p * d_p, k[j])
            d_k[j] += scale * np.einsum("nts,tnh->snh", p * d_p, q[i])
            d_v[j] += np.einsum("nts,tnv->snv", p, d[i])
    return out, d_q, d_k, d_v


@pytest.mark.share(2)
@pytest.mark.parametrize("ordered", layout.ORDERS)
def test_each_device_holds_what_the_published_ring_gives_it(ordered):
    devices = 4
    places = np.stack([layout.positions_of(ordered, devices, i, 6) for i in range(devices)])
    *x, d_out = arrays(*[(24, 3, 8)] * 4)
    run = functools.partial(
        jax_mfa.ring_attention, mesh=mesh_of(devices), axis_name="ring", order=ordered, is_causal=True
    )
    both = quick_jit(lambda d, *x: (lambda out, pull: (out, *pull(d)))(*jax.vjp(run, *x)))
    found = both(*(a[places.reshape(1, -1)] for a in (d_out, *x)))
    for got, wanted in zip(found, simulated(*x, d_out, places), strict=True):
        got = np.asarray(got).reshape(wanted.shape)
        assert_allclose(got, wanted, rtol=0, atol=1e-6 * np.abs(wanted).max())
