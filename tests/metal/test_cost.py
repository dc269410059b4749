"""What a pass may cost, by exact counters: multiply-accumulates, bytes, barriers, threadgroup memory, registers."""

from __future__ import annotations

import cost
import harness
import plans
import pytest
import runners
import serving
from plans import Problem

from jax_mfa.cli import show
from jax_mfa.metal import tiles

# of float16, for each further token of the context: bytes of data, scales and zeros
BYTES_OF_DECODING = {"int8": 0.54, "int8, symmetric": 0.52, "int4": 0.30, "int4, symmetric": 0.28}
PRODUCTS = 2 * (64 + 64) / 64  # of a key: two heads, and one fragment of rows that is full
SIZES = (16, 32, 64, 96, 128)
ENTRIES = [
    pytest.param(variant, limit, item, id=f"{variant}-{limit}-{8 * item}bit")
    for variant, entries in tiles.VARIANTS.items()
    for limit, item in entries
]


def served(variant: str, limit: int, item: int) -> range:
    """The head sizes that an entry of a table serves."""
    below = [other for other, size in tiles.VARIANTS[variant] if size == item and other < limit]
    return range(max(below, default=0) + 1, limit + 1)


@pytest.mark.share(4)
@pytest.mark.parametrize("variant", tiles.VARIANTS)
@pytest.mark.parametrize("h, v", [(16, 16), (64, 64), (96, 96), (128, 128), (64, 32), (8, 40)])
def test_dense_forward_does_exactly_the_products_it_must(variant, h, v):
    problem = Problem(T=256, S=384, H=h, V=v, B=1, N=2, K=1, dtype="float16", variant=variant)
    found = cost.measure(problem, backward=False)["attention_forward"]
    assert found.products == problem.N * problem.T * problem.S * (h + v) // 512


@pytest.mark.share(8)
@pytest.mark.parametrize("variant", tiles.VARIANTS)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("h", [32, 64, 128])
def test_dense_backward_does_at_most_seven_products(variant, dtype, h):
    found = cost.measure(cost.dense(h, 256, variant, dtype))
    backward = found["attention_d_query"].products + found["attention_d_key_value"].products
    assert backward <= 7 * 256 * 256 * h // 512
    assert found["attention_forward"].products == 2 * 256 * 256 * h // 512


@pytest.mark.share(2)
@pytest.mark.parametrize("variant", tiles.VARIANTS)
def test_causal_at_2048_does_at_most_53_hundredths_of_dense(variant):
    problem = cost.dense(16, 2048, variant, causal=True)
    found = cost.measure(problem)
    unit = 2048 * 2048 * 16 / 512  # dense is exactly this often, by the tests above
    for name, products in cost.PRODUCTS.items():
        assert found[name].products <= 0.53 * products * unit, name


@pytest.mark.parametrize("h", [64, 128, 256])
@pytest.mark.parametrize("variant", tiles.VARIANTS)
def test_causal_at_2048_by_tile_sizes(variant, h):
    """Other entries by arithmetic: a simdgroup's rows and a tile's columns bound what is done beyond the half."""
    chosen = tiles.select(variant, h, h, 2)
    beyond = {
        "forward": chosen.forward.blocks * 8 + chosen.forward.keys,
        "d_query": chosen.d_query.blocks * 8 + chosen.d_query.columns * 8,
        "d_key_value": chosen.d_key_value.blocks * 8 + chosen.d_key_value.queries,
    }
    for name, edge in beyond.items():
        assert 0.5 + edge / 2 / 2048 <= 0.53, name


@pytest.mark.parametrize("h", SIZES)
def test_staged_forward_moves_little_and_waits_seldom(h):
    found = cost.measure(cost.dense(h), backward=False)["attention_forward"]
    bound = dict(cost.BOUND)
    if tiles.select("staged", h, h, 2).forward.blocks == 1:
        bound["threadgroup"] = cost.THREADGROUP_OF_8_ROWS
    for name, value in cost.YARDSTICK.items():
        assert getattr(found, name) <= bound[name] * value, name


@pytest.mark.parametrize("variant", tiles.VARIANTS)
def test_a_threadgroup_loads_each_line_of_keys_and_values_and_its_own_queries(variant):
    """A row of 64 in float16 is a line. Beside them there are the numbers of the launch, in a few more."""
    problem = cost.dense(64, 256, variant)
    found = cost.measure(problem, backward=False)["attention_forward"]
    tile = tiles.select(variant, 64, 64, 2).forward
    groups, often = 256 // tile.rows, 1 if tile.buffers else tile.simdgroups
    lines, needed = found.lines * found.products / cost.LINE, groups * 2 * 256 + 256
    assert needed <= lines <= needed + 4 * groups
    assert (often - 0.5) * found.lines < found.device < (often + 0.5) * found.lines


@pytest.mark.share(16)
@pytest.mark.parametrize("variant, limit, item", ENTRIES)
def test_threadgroup_memory_is_what_the_table_says(variant, limit, item):
    # a head size of its own entry that compiles fast: the arithmetic is linear in it
    h = served(variant, limit, item)[0]
    dtype = "float16" if item == 2 else "float32"
    for of_pass in ("forward", "backward"):
        plan = Problem(H=h, dtype=dtype, variant=variant).plan(of_pass)
        library = runners.library(show.program(plan))
        for kernel in (d.kernel for d in plan.dispatches):
            constants = {name: value for _, name, _, value in kernel.constants}
            compiled = library.kernel(kernel.name, constants).static_threadgroup_memory_length
            assert compiled == kernel.threadgroup_memory, kernel.name
            assert compiled <= tiles.THREADGROUP_BYTES


@pytest.mark.parametrize("variant, limit, item", ENTRIES)
def test_every_entry_stays_within_its_budgets(variant, limit, item):
    for h in served(variant, limit, item):
        for sizes in {(h, v) for v in (1, (h + 1) // 2, h)} | {(v, h) for v in (1, (h + 1) // 2, h)}:
            chosen = tiles.select(variant, *sizes, item)
            assert chosen is tiles.VARIANTS[variant][limit, item]
            for kernel in vars(chosen).values():
                assert kernel.fragment_bytes(*sizes, item) <= tiles.FRAGMENT_BUDGET, (kernel, sizes)
                assert kernel.threadgroup_memory(*sizes, item) <= tiles.THREADGROUP_BYTES, (kernel, sizes)


@pytest.mark.share(4)
@pytest.mark.parametrize("name", BYTES_OF_DECODING)
def test_decoding_loads_each_stored_byte_once_and_multiplies_each_fragment_once(name):
    stored, loaded, products = cost.decoding(cost.STORED[name])
    dense = cost.decoding(None)
    assert dense[0] == 2 * 2 * 64 * 2 and dense[1] <= 1.01 * dense[0]
    assert stored <= loaded <= 1.01 * stored
    assert loaded <= BYTES_OF_DECODING[name] * dense[1]
    assert products == PRODUCTS


def test_pages_add_a_hundredth():
    stored, loaded, products = cost.decoding(cost.STORED["int4"], 16)
    assert stored < loaded <= 1.03 * stored
    assert products == PRODUCTS


@pytest.mark.share(2)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_prefill_multiplies_no_more_than_dense(dtype):
    dense, paged = (
        serving.Serving(T=128, key_value_seq_lengths=(384,), schemes=schemes, page=page, H=32, dtype=dtype)
        .run()
        .counters["attention_forward"]
        for schemes, page in (((None, None), 0), ((cost.STORED["int8"], cost.STORED["int4"]), 16))
    )
    assert paged.matrix_multiply_accumulates <= dense.matrix_multiply_accumulates
    assert paged.exponentials <= dense.exponentials


@pytest.mark.share(2)
@pytest.mark.parametrize("variant", tiles.VARIANTS)
def test_counters_are_the_same_in_every_run_and_schedule(variant):
    problem = Problem(T=75, S=90, H=24, variant=variant, is_causal=True, query_offset=(3, 9))
    first = plans.evaluate(problem).counters
    assert plans.evaluate(problem).counters == first
    other = plans.evaluate(problem, seed=7).counters
    for name, counters in first.items():
        for field in ("matrix_multiply_accumulates", "device_bytes_loaded", "device_bytes_stored", "barriers"):
            assert getattr(other[name], field) == getattr(counters, field)


@pytest.mark.share(4)
@pytest.mark.parametrize("h", [8, 16, 24, 32])
def test_short_heads_with_a_bias_of_pairs_are_hardly_padded(h):
    """All four gradients of B rows that share a bias [1, N, T, T]."""
    b, t, n = 3, 128, 2
    x = {name: a for name, a in zip(("query", "key", "value"), harness.arrays(*[(b, t, n, h)] * 3, dtype="float16"))}
    ran = plans.run_call({**x, "bias": harness.arrays((1, n, t, t), dtype="float16", seed=3)[0]})
    assert ran.reports == []
    unit = b * n * t * t * h / 512
    for name, products in {**cost.PRODUCTS, "attention_d_bias": 2}.items():
        assert ran.counters[name].matrix_multiply_accumulates <= 1.5 * products * unit, name
