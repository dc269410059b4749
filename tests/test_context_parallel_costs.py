"""What attention over devices sends, keeps and costs: in the traced and the compiled program, and on paper."""

import functools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import assert_allclose, mesh_of, needs_eight_devices, qkv, quick_jit
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_mfa
from jax_mfa.context_parallel import costs, layout
from jax_mfa.context_parallel.costs import Machine
from jax_mfa.context_parallel.ring import Ring
from jax_mfa.problem import Specification

pytestmark = needs_eight_devices


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
    for gradient, kernel in ((False, "jax_mfa_attention"), (True, "jax_mfa_attention_bwd")):
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


@pytest.mark.parametrize("devices", [pytest.param(2, marks=pytest.mark.sweep), 8])
def test_nothing_is_gathered_and_memory_is_a_share(devices):
    n = 2**18
    facts = dict(H=64, is_causal=True, ordered="zigzag", implementation="blockwise")
    _, run, x = traced(devices, True, per_device=n // devices, **facts)
    program = quick_jit(run).lower(*x).compile()
    assert not re.search(r"all-gather|all-to-all", program.as_text())
    memory = program.memory_analysis()
    total = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    assert memory.argument_size_in_bytes == sum(a.size for a in x) * 4 // devices
    problem = costs.Sizes(1, n, n, 2, 1, 64, 64, 4, Specification(is_causal=True))
    assert total == pytest.approx(costs.cost(problem, devices, 1, "zigzag").backward_memory, rel=0.25)


@pytest.mark.parametrize("window", [None, (4, 0), (5, 0), (0, 0), (2, 2)])
def test_a_window_stops_the_ring(window):
    causal = window is None or window[1] == 0
    jaxpr, *_ = traced(8, is_causal=causal, local_window_size=window)
    # parts of four tokens: keys and values are sent as far as they are seen
    hops = {None: 7, (4, 0): 1, (5, 0): 2, (0, 0): 0, (2, 2): 3}[window]
    assert permuted(jaxpr)[0] == 2 * hops


@pytest.mark.parametrize("ordered", layout.ORDERS)
@pytest.mark.parametrize("devices", [2, 8])
@pytest.mark.parametrize("window", [None, (5, 0)])
def test_bytes_sent_are_those_of_the_formula(devices, ordered, window):
    spec = Specification(is_causal=True, window=window or (None, None))
    n = 4 * devices
    wanted = costs.cost(costs.Sizes(1, n, n, 2, 1, 8, 8, 2, spec), devices, 1, ordered)
    facts = dict(ordered=ordered, dtype="bfloat16", is_causal=True, local_window_size=window)
    assert permuted(traced(devices, **facts)[0])[1] == wanted.forward_bytes
    assert permuted(traced(devices, True, **facts)[0])[1] == wanted.forward_bytes + wanted.backward_bytes


def test_zigzag_gives_every_device_the_same_work():
    devices, length = 8, 48
    work = {}
    for ordered in layout.ORDERS:
        places = [layout.positions_of(ordered, devices, i, length // devices) for i in range(devices)]
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
        ordered = layout.ORDERS[random.integers(2)]
        rows, columns = 2 * int(random.integers(1, 4)), 2 * int(random.integers(1, 4))
        window = tuple(None if random.random() < 0.4 else int(random.integers(9)) for _ in range(2))
        offset = int(random.integers(-9, 9))
        spec = Specification(is_causal=causal, window=window, query_offset=offset)
        walk = Ring(spec, "ring", devices, ordered).schedule(rows, columns)
        visited = {(walk.start + i) % devices for i in range(walk.hops + 1)}
        needed = set()
        left, right = spec.band
        for i, j in np.ndindex(devices, devices):
            row = layout.positions_of(ordered, devices, i, rows)[:, None] + offset
            column = layout.positions_of(ordered, devices, j, columns)[None]
            see = (left is None or column >= row - left) & (right is None or column <= row + right)
            if np.any(np.broadcast_to(see, (rows, columns))):
                needed.add((i - j) % devices)
        assert needed <= visited
        if needed:
            runs = [max((d - s) % devices for d in needed) + (s != 0) for s in range(devices)]
            assert walk.permutes == min(runs)


def shapes(T, N=32, K=8, H=128, S=None, B=1):
    arrays = [jax.ShapeDtypeStruct((B, n, h, H), jnp.bfloat16) for n, h in ((T, N), (S or T, K), (S or T, K))]
    return dict(zip(("query", "key", "value"), arrays))


def test_the_form_is_chosen_by_what_is_sent_and_says_why():
    long = jax_mfa.explain_context_parallel(**shapes(2**20), devices=8, is_causal=True, order="zigzag")
    assert long.form == "ring" and "zigzag" in long.reasons["ulysses"] and "-> ring" in str(long)
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
        assert costs.Sizes(1, t, s, 1, 1, 1, 1, 4, spec).visible == pytest.approx(see.mean())


def test_the_choice_runs():
    query, key, value = qkv(B=1, T=8, S=8)
    wanted = quick_jit(functools.partial(jax_mfa.dot_product_attention, is_causal=True))(query, key, value)
    for axis, mesh in (("ring", mesh_of(2)), (("ring", "heads"), mesh_of(2, 2))):
        run = functools.partial(jax_mfa.context_parallel_attention, mesh=mesh, axis_name=axis, is_causal=True)
        out = quick_jit(run)(query, key, value)
        assert_allclose(out, wanted, rtol=0, atol=2e-6)


def test_the_figures_on_paper_are_those_of_the_formulas():
    text = (pathlib.Path(__file__).parent.parent / "docs" / "context-parallel.md").read_text()
    million = costs.Sizes(1, 10**6, 10**6, 32, 8, 128, 128, 2, Specification(is_causal=True))
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
