"""The kernels are right: every head size, ragged lengths, masks, groups, dtypes and tile settings against the float64
oracle, gradients included, with the checker silent; and the checker and the oracle do notice planted mistakes.

Most run as plans where `runners` says, on the emulator core or on a device; a few go all the way through `jax.jit`. The
long sweep is marked `sweep`.
"""

from __future__ import annotations

import dataclasses
import itertools
import re

import harness
import jax
import numpy as np
import oracle
import plans
import pytest
from plans import Problem
from runners import Core, Launcher, needs_core

import jax_mfa
from jax_mfa import metal
from jax_mfa.arguments import specify
from jax_mfa.metal import runtime, source, tiles

HEADS = (1, 7, 16, 32, 33, 64, 72, 80, 96, 128, 192, 256)
LENGTHS = ((1, 1), (3, 17), (299, 5), (61, 67), (8, 300), (129, 33))
GROUPS = ((1, 1), (3, 1), (8, 1), (6, 2))
VARIANTS = tuple(tiles.VARIANTS)
DTYPES = ("float32", "float16", "bfloat16")
RULES = (
    {},
    {"is_causal": True},
    {"is_causal": True, "query_offset": 11},
    {"is_causal": True, "query_offset": (-9, 40)},
    {"query_seq_lengths": (0, 23), "key_value_seq_lengths": (31, 0)},
    {"is_causal": True, "query_offset": (5, 0), "key_value_seq_lengths": (47, 20)},
    {"local_window_size": (13, 2)},
    {"local_window_size": (None, -3)},
    {"is_causal": True, "local_window_size": (9, None), "query_offset": 3},
    {"planted": True, "query_seq_lengths": (20, 37), "key_value_seq_lengths": (31, 2)},
    {"planted": True, "is_causal": True, "local_window_size": (6, None), "query_offset": (-4, 30), "T": 29, "S": 75},
)


def sized(h: int, at: int, **more) -> Problem:
    """A problem with head size `h`, its other properties dealt from the lists above by the number `at`."""
    t, s = LENGTHS[at % len(LENGTHS)]
    n, k = GROUPS[at % len(GROUPS)]
    rule = RULES[at % 3]
    return Problem(T=t, S=s, H=h, N=n, K=k, B=1, dtype=DTYPES[at % 3], variant=VARIANTS[at // 3 % 2], **rule, **more)


@pytest.mark.share(16)
@pytest.mark.parametrize("problem", [sized(h, i) for i, h in enumerate(HEADS)], ids=str)
def test_any_head_size_and_length(problem):
    plans.check(problem)


@pytest.mark.share(4)
@pytest.mark.parametrize(
    "variant, dtype, h, v",
    [
        ("staged", "float16", 40, 9),
        ("direct", "float32", 16, 100),
        ("staged", "bfloat16", 264, 8),  # in slices, of which some lie beyond the values
    ],
)
def test_values_of_another_size(variant, dtype, h, v):
    plans.check(Problem(T=45, S=70, H=h, V=v, variant=variant, dtype=dtype, is_causal=True, query_offset=2))


@pytest.mark.share(16)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("rule", RULES[2:], ids=str)
def test_masks(rule, variant):
    plans.check(Problem(dtype="float16" if variant == "direct" else "float32", variant=variant, **rule))


# beside the tables: buffers, columns side by side, slices, pairs of simdgroups, and nothing kept in registers
SETTINGS = [
    tiles.Tiles(
        tiles.ForwardTiles(blocks, simdgroups, keys, buffers, cached, slices),
        tiles.QueryTiles(blocks, simdgroups, keys, columns, buffers, cached, not cached, slices),
        tiles.KeyTiles(blocks, max(simdgroups, 2), queries, columns, min(buffers, 1), not cached, cached, parts),
    )
    for blocks, simdgroups, keys, buffers, cached, columns, queries, slices, parts in [
        (1, 1, 8, 1, False, 1, 8, 1, 2),
        (2, 2, 8, 2, False, 1, 8, 1, 0),
        (1, 4, 16, 1, True, 2, 16, 2, 2),
        (1, 2, 32, 0, False, 2, 32, 1, 1),
        (4, 1, 16, 1, True, 2, 16, 1, 0),
    ]
]


@pytest.mark.share(16)
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda x: "_".join(str(int(y)) for y in vars(x.forward).values()))
@pytest.mark.parametrize(
    "rule", [{"dtype": "float16", "H": 24}, {"is_causal": True, "query_offset": (7, -3), "V": 20}], ids=str
)
def test_tile_settings_that_no_table_has(setting, rule):
    plans.check(Problem(T=83, S=77, variant=setting, N=2, K=1, **rule))


def _bytes(ran: plans.Ran) -> dict[str, bytes]:
    return {name: x.tobytes() for name, x in ran.arrays.items()}


@pytest.mark.share(4)
@pytest.mark.parametrize("variant", VARIANTS)
def test_any_schedule_gives_the_same_bits_and_no_report(variant):
    problem = Problem(
        T=75, S=90, H=32, N=6, K=2, dtype="bfloat16", variant=variant, is_causal=True, query_offset=(4, -8)
    )
    first = plans.check(problem)
    for seed in (1, 2, 12345):
        again = plans.evaluate(problem, seed=seed)
        assert again.reports == []
        assert _bytes(again) == _bytes(first)


@pytest.mark.share(2)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_poisoned_column_reaches_only_the_rows_that_see_it(variant, dtype):
    """Row t sees columns up to t: what stands in column 30 must not change a bit of the rows before it."""
    column, size = 30, 64
    problem = Problem(T=size, S=size, H=16, B=1, dtype=dtype, variant=variant, is_causal=True)
    arguments = problem.arguments()
    arrays = problem.arrays(arguments)
    clean = plans.run(problem.plan(), arrays)
    for name, poison in itertools.product(("key", "value"), (np.nan, np.inf)):
        spoilt = arrays[name].copy()
        spoilt[:, column] = poison
        ran = plans.run(problem.plan(), arrays | {name: spoilt})
        assert ran.reports == []
        np.testing.assert_array_equal(ran.arrays["out"][:, :column], clean.arrays["out"][:, :column])
        assert not np.isfinite(ran.arrays["out"][:, column:].astype(np.float32)).any()
    d_out, d_lse = problem.cotangents(arguments)
    inputs = arrays | {x: clean.arrays[x] for x in ("out", *plans.ROWS)} | {"d_out": d_out, "d_lse": d_lse}
    clean = plans.run(problem.plan("backward"), inputs)
    spoilt = d_out.copy()
    spoilt[:, column] = np.nan  # columns after it are not seen by that row
    ran = plans.run(problem.plan("backward"), inputs | {"d_out": spoilt})
    for name in ("d_key", "d_value"):
        np.testing.assert_array_equal(ran.arrays[name][:, column + 1 :], clean.arrays[name][:, column + 1 :])
    rest = np.arange(size) != column
    np.testing.assert_array_equal(ran.arrays["d_query"][:, rest], clean.arrays["d_query"][:, rest])


# ------------------------------------------------------------------------------------------------- through jax.jit


@pytest.mark.share(8)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    "problem",
    [
        Problem(T=37, S=53, H=33, N=6, K=2, is_causal=True, query_offset=4),
        Problem(T=130, S=61, H=64, dtype="float16", query_seq_lengths=(0, 99), key_value_seq_lengths=(61, 30)),
        Problem(
            T=20,
            S=300,
            H=8,
            V=24,
            dtype="bfloat16",
            is_causal=True,
            query_offset=(-3, 200),
            local_window_size=(70, None),
        ),
    ],
    ids=str,
)
def test_through_jit_and_the_launcher(on_device, problem, variant):
    harness._program.cache_clear()
    arguments = problem.arguments()
    d_out, d_lse = problem.cotangents(arguments)
    with runtime.variant(variant):
        out, lse, gradients = harness.evaluate(plans.ON_METAL, arguments, d_out, d_lse)
    ran = plans.evaluate(dataclasses.replace(problem, variant=variant))
    np.testing.assert_array_equal(out, ran.arrays["out"])
    np.testing.assert_array_max_ulp(lse, plans.log_sum_exp(ran.arrays).astype(np.float32), 2)
    for name, x in gradients.items():
        np.testing.assert_array_equal(x, ran.arrays[f"d_{name}"], err_msg=name)
    plans.assert_right(problem, ran)
    harness._program.cache_clear()


@pytest.mark.share(4)
@needs_core
@pytest.mark.parametrize("text", ["as shipped", "with a line more"])
@pytest.mark.parametrize(
    "problem",
    [
        Problem(T=19, S=40, H=16, is_causal=True, query_offset=(3, -2)),
        Problem(T=3, S=530, H=16, dtype="bfloat16", key_value_seq_lengths=(40, 530)),
    ],
    ids=str,
)
def test_the_launcher_gives_the_bits_that_the_core_gives(on_device, problem, text):
    """So that these tests mean the same where they run: scratch arrays, too."""
    text = None if text == "as shipped" else source.base() + "constant int one_more = 1;\n"
    ran = [plans.evaluate(problem, on=runner, text=text) for runner in (Core(), Launcher())]
    assert [x.reports for x in ran] == [[], []]
    assert _bytes(ran[0]) == _bytes(ran[1])
    assert {"row_states"} <= set(ran[1].arrays)


def test_mapped_and_transposed_inputs_through_jit(on_device):
    """vmap over the last axis of queries, keys left alone: they are read where they are."""
    q, k, v = harness.qkv(B=2, T=19, S=23, N=4, K=2, H=16)
    many = np.moveaxis(np.stack([q, 2 * q, -q]), 0, -1)
    attend = lambda q: jax_mfa.dot_product_attention(q, k, v, is_causal=True, implementation="metal")
    got = jax.jit(jax.vmap(attend, in_axes=-1, out_axes=1))(many)
    for i, x in enumerate((q, 2 * q, -q)):
        wanted = jax_mfa.dot_product_attention(x, k, v, is_causal=True, implementation="reference")
        harness.assert_allclose(got[:, i], wanted, rtol=0, atol=2e-6 * np.abs(wanted).max())


# ------------------------------------------------------------------------------------------------------- mutations


def without_barrier(number: int):
    """The text without the n-th barrier of the pipeline."""

    def mutate(text: str) -> str:
        start = text.index("struct Pipeline {")
        places = [m.span() for m in re.finditer(r"threadgroup_barrier\([^)]*\);", text[start:])]
        first, last = places[number]
        return text[: start + first] + text[start + last :]

    return mutate


def replacing(old: str, new: str):
    """`old` in the text by `new`; a parameter may be read through a pointer or a reference."""
    pattern = re.escape(old).replace(r"p\.", r"p(?:\.|->)")

    def mutate(text: str) -> str:
        changed, count = re.subn(pattern, lambda found: new.replace("p.", "p->" if "p->" in found[0] else "p."), text)
        assert count, f"the kernels no longer say {old!r}: plant this mistake elsewhere"
        return changed

    return mutate


LARGE = Problem(T=150, S=150, H=16, B=1, N=1, K=1)
HALF = dataclasses.replace(LARGE, dtype="float16")
# the pipeline's barriers in order: after the first tile; before a tile's only place is used again; after a further tile
MUTATIONS = {
    "a tile is read before it is there, two places": (without_barrier(0), HALF, "race"),
    "a tile is read before it is there, one place": (without_barrier(2), LARGE, "race"),
    "a tile in use is overwritten, one place": (without_barrier(1), LARGE, "race"),
    "a tile in use is overwritten, two places": (without_barrier(2), HALF, "race"),
    "the ragged end is read": (
        replacing("min(uint(i) * stride, uint(last) * stride)", "uint(i) * stride"),
        Problem(H=13),
        "bounds",
    ),
    "the ragged end is written": (
        replacing("    if (lane.row < left) {\n      store_row<V,", "    {\n      store_row<V,"),
        Problem(),
        "bounds",
    ),
    "head modulo key heads": (
        replacing("head / (p.heads / p.key_heads)", "head % p.key_heads"),
        Problem(N=4, K=2),
        "wrong",
    ),
    "the offset ignored": (
        replacing("x.query_offset[batch] : p->query_offset", "0 : 0"),
        Problem(is_causal=True, query_offset=3),
        "wrong",
    ),
    "the batch row ignored": (
        replacing("min(x.key_lengths[batch], p->keys)", "min(x.key_lengths[0], p->keys)"),
        Problem(key_value_seq_lengths=(20, 30)),
        "wrong",
    ),
    "sums not rescaled as the maximum rises": (
        replacing("float sum = row_sum[block] * shrink;", "float sum = row_sum[block];"),
        LARGE,
        "wrong",
    ),
    "the last tile of the diagonal skipped": (
        replacing("position + side + 1", "position + side"),
        dataclasses.replace(LARGE, is_causal=True, query_offset=1),
        "wrong",
    ),
    "delta's sign": (replacing("- state.delta", "+ state.delta"), Problem(), "wrong"),
    "a tile of another head": (replacing("result.turn_by(head)", "result.turn_by(0)"), Problem(N=4, K=2), "wrong"),
    "whole tiles taken for the only ones": (
        replacing("turn < walk.count; ++turn", "turn < walk.wholes; ++turn"),
        LARGE,
        "wrong",
    ),
    "the log-sum-exp's cotangent dropped": (replacing("sum - d_lse[at]", "sum"), Problem(), "wrong"),
}


def noticed(problem: Problem, ran: plans.Ran, how: str) -> bool:
    if how != "wrong":
        return any(how in report for report in ran.reports)
    assert ran.reports == []
    try:
        plans.assert_right(problem, ran)
    except AssertionError:
        return True
    return False


def test_every_mistake_can_be_planted():
    text = source.base()
    assert all(mutate(text) != text for mutate, _, _ in MUTATIONS.values())


@pytest.mark.share(16)
@pytest.mark.parametrize("mistake", MUTATIONS)
def test_a_planted_mistake_is_noticed(mistake):
    mutate, problem, how = MUTATIONS[mistake]
    text = mutate(source.base())
    forward = plans.run(problem.plan(), problem.arrays(problem.arguments()), text=text)
    assert noticed(problem, forward, how) or noticed(problem, plans.evaluate(problem, text=text), how)


# ----------------------------------------------------------------------------------------------------------- sweep


@pytest.mark.sweep
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("h", HEADS)
def test_every_head_size_dtype_and_variant_sweep(h, dtype, variant):
    for i, (t, s) in enumerate(LENGTHS):
        n, k = GROUPS[(i + h) % len(GROUPS)]
        rule = RULES[(i + h) % 3]
        v = h if i % 3 else max(h - 5, 1)
        plans.check(Problem(T=t, S=s, H=h, V=v, B=1, N=n, K=k, dtype=dtype, variant=variant, **rule), seed=i)


@pytest.mark.sweep
@pytest.mark.parametrize("variant", [*VARIANTS, *SETTINGS], ids=lambda x: x if isinstance(x, str) else None)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_every_mask_dtype_and_setting_sweep(rule, dtype, variant):
    for (n, k), h in zip(GROUPS, (16, 33, 8, 21)):
        plans.check(
            Problem(**({"T": 67, "S": 95, "H": h, "N": n, "K": k} | rule), dtype=dtype, variant=variant), seed=h
        )


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(40))
def test_random_problems_sweep(seed):
    rng = np.random.default_rng(seed)
    pick = lambda x: x[rng.integers(len(x))]
    n, k = pick(GROUPS)
    b = int(rng.integers(1, 4))
    t, s = (int(x) for x in rng.integers(1, 301, 2))
    lengths = lambda size: tuple(int(x) for x in rng.integers(0, size + 1, b)) if rng.random() < 0.4 else None
    problem = Problem(
        T=t,
        S=s,
        H=int(rng.integers(1, 100)),
        V=int(rng.integers(1, 100)),
        B=b,
        N=n,
        K=k,
        dtype=pick(DTYPES),
        variant=pick([*VARIANTS, *SETTINGS]),
        is_causal=bool(rng.integers(2)),
        query_offset=tuple(int(x) for x in rng.integers(-50, 200, b))
        if rng.random() < 0.5
        else int(rng.integers(-50, 200)),
        query_seq_lengths=lengths(t),
        key_value_seq_lengths=lengths(s),
        local_window_size=pick([(None, None), (20, None), (None, 5), (40, 40), (0, 0)]),
        planted=bool(rng.integers(2)),
    )
    plans.check(problem, seed=seed)


SLOPES = np.array([0.1, 0.3, 0.2, 0.7], np.float32)
BIASED = [
    ("staged", {"H": 16, "dtype": "bfloat16"}, {"is_causal": True, "query_seq_lengths": np.array([31, 0])}),
    ("staged", {"H": 24, "N": 2}, {"mask": "random", "logits_soft_cap": 2.0}),
    ("staged", {"H": 264, "T": 9}, {"dropout_rate": 0.3, "dropout_seed": np.array([3, 4], np.uint32)}),  # slices
    ("direct", {"H": 32, "dtype": "float16"}, {"local_window_size": (9, 2), "alibi_slopes": SLOPES}),
    ("portable", {"H": 20}, {"is_causal": True, "key_value_seq_lengths": np.array([53, 17])}),
]


@pytest.mark.share(8)
@pytest.mark.parametrize("variant,sizes,features", BIASED, ids=lambda x: x if isinstance(x, str) else "-".join(x))
def test_a_bias_of_each_score_has_its_gradient_from_dq(variant, sizes, features):
    """In the bits that the kernel of biases gives, some of it minus infinity, with two products of nine less."""
    q, k, v = harness.qkv(B=2, S=53, **{"T": 37, "N": 4, "K": 2} | sizes)
    (batch, t, n, _), s = q.shape, k.shape[1]
    rng = np.random.default_rng(5)
    bias = rng.normal(size=(batch, n, t, s)).astype(q.dtype)
    bias[rng.random(bias.shape) < 0.1] = -np.inf
    drawn = {"mask": rng.random((1, n, t, s)) < 0.7} if "mask" in features else {}
    arguments = {"query": q, "key": k, "value": v, "bias": bias, **features, **drawn}
    ran = plans.run_call(arguments, variant=variant)
    assert ran.reports == []
    assert not any("d_bias" in name for name, _ in ran.dispatches)
    spec, operands = specify(**arguments)
    alone = metal.plan_of(spec, operands, "backward", variant, wrt=("bias",))
    assert any("d_bias" in d.kernel.name for d in alone.dispatches)
    found = plans.run(alone, {b.name: ran.arrays[b.name] for b in alone.operands})
    assert found.reports == []
    np.testing.assert_array_equal(ran.arrays["d_bias"], found.arrays["d_bias"])
    d_out, d_lse = harness.cotangents(arguments)
    wanted = oracle.attention(**arguments, d_out=d_out, d_lse=d_lse)
    harness.assert_close(
        ran.arrays["d_bias"],
        wanted.gradients["bias"],
        q.dtype,
        terms=harness.terms_of(arguments),
        largest_score=wanted.largest_score,
        gradient=True,
        what="d_bias",
    )
