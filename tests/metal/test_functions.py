"""A caller's functions of scores and masks as kernels compute them: each primitive as JAX has it, and attention."""

from __future__ import annotations

import functools
import re

import emulator
import harness
import jax
import jax.numpy as jnp
import numpy as np
import plans
import pytest
from compiled import compiled
from jax import lax
from runners import needs_core

import jax_mfa
from jax_mfa import metal, reference
from jax_mfa.arguments import specify, specify_abstract
from jax_mfa.flex.program import modifiers
from jax_mfa.metal import functions, source

# --- the table of primitives

bits = lambda x: lax.bitcast_convert_type(x, jnp.float32)
as_int = lambda x: lax.bitcast_convert_type(x, jnp.int32)
as_uint = lambda x: lax.bitcast_convert_type(x, jnp.uint32)
rng = np.random.default_rng(7)
WORDS = jnp.asarray(rng.integers(-(2**31), 2**31, (3, 5), dtype=np.int64).astype(np.int32))
TABLE = jnp.asarray(rng.normal(size=(3, 5)), jnp.float32)
SMALL = jnp.asarray(rng.integers(-128, 128, 40), jnp.int8)
HALVES = jnp.asarray(rng.normal(size=40), jnp.bfloat16)
UNSIGNED = jnp.asarray(rng.integers(0, 2**32, 40, dtype=np.uint64).astype(np.uint32))
FLAGS = jnp.asarray(rng.random(40) < 0.5)
gathered = lambda mode: lambda x, y, i, j: TABLE.at[i, j].get(mode=mode)

# functions of floats x and y and integers i and j, which are exact
EXACT = {
    "add": lambda x, y, i, j: x + y,
    "sub": lambda x, y, i, j: x - y,
    "mul": lambda x, y, i, j: x * y,
    "div": lambda x, y, i, j: x / y,
    "neg": lambda x, y, i, j: -x,
    "rem": lambda x, y, i, j: lax.rem(x, y),
    "max": lambda x, y, i, j: jnp.maximum(x, y),
    "min": lambda x, y, i, j: jnp.minimum(x, y),
    "abs": lambda x, y, i, j: jnp.abs(x),
    "sign": lambda x, y, i, j: jnp.sign(x),
    "floor": lambda x, y, i, j: jnp.floor(x),
    "ceil": lambda x, y, i, j: jnp.ceil(x),
    "round": lambda x, y, i, j: jnp.round(x),
    "round away": lambda x, y, i, j: lax.round(x, lax.RoundingMethod.AWAY_FROM_ZERO),
    "sqrt": lambda x, y, i, j: jnp.sqrt(x),
    "square": lambda x, y, i, j: jnp.square(x),
    "clamp": lambda x, y, i, j: lax.clamp(jnp.float32(-1), x, y),
    "select": lambda x, y, i, j: jnp.where(i > j, x, y),
    "stop_gradient": lambda x, y, i, j: lax.stop_gradient(x) + y,
    "select_n": lambda x, y, i, j: lax.select_n(jnp.clip(i, 0, 2), x, y, x + 1),
    "is_finite": lambda x, y, i, j: jnp.isfinite(x).astype(jnp.float32),
    "compare": lambda x, y, i, j: ((x < y) + 2 * (x <= y) + 4 * (x == y) + 8 * (x != y) + 16 * (x > y)) * 1.0,
    "compare ints": lambda x, y, i, j: ((i < j) + 2 * (i <= j) + 4 * (i == j) + 8 * (i >= j)) * 1.0,
    "int add": lambda x, y, i, j: bits(i + j),
    "int sub": lambda x, y, i, j: bits(i - j),
    "int mul": lambda x, y, i, j: bits(i * j),
    "int neg": lambda x, y, i, j: bits(-i),
    "int abs": lambda x, y, i, j: bits(jnp.abs(i)),
    "int sign": lambda x, y, i, j: bits(jnp.sign(i)),
    "int div": lambda x, y, i, j: bits(lax.div(i, j)),
    "int rem": lambda x, y, i, j: bits(lax.rem(i, j)),
    "int floor_divide": lambda x, y, i, j: bits(i // 7 + (i // -3) * 11 + i // j),
    "int mod": lambda x, y, i, j: bits(i % 7 + i % -3),
    "int pow": lambda x, y, i, j: bits(i**3),
    "int clamp": lambda x, y, i, j: bits(jnp.clip(i, -5, j)),
    "uint div": lambda x, y, i, j: bits(lax.div(as_uint(i), as_uint(j))),
    "uint rem": lambda x, y, i, j: bits(lax.rem(as_uint(i), as_uint(j))),
    "uint max": lambda x, y, i, j: bits(jnp.maximum(as_uint(i), as_uint(j)) - jnp.uint32(3)),
    "and": lambda x, y, i, j: bits(i & j),
    "and of none": lambda x, y, i, j: bits(
        as_uint(i) & lax.reduce(as_uint(jnp.stack([i, j]))[:0], np.uint32(2**32 - 1), lax.bitwise_and, (0,))
    ),
    "or": lambda x, y, i, j: bits(i | j),
    "xor": lambda x, y, i, j: bits(i ^ j),
    "not": lambda x, y, i, j: bits(~i),
    "shift_left": lambda x, y, i, j: bits(lax.shift_left(i, j)),
    "shift_right": lambda x, y, i, j: bits(lax.shift_right_arithmetic(i, j)),
    "shift_right_logical": lambda x, y, i, j: bits(lax.shift_right_logical(i, j)),
    "uint shift_right": lambda x, y, i, j: bits(lax.shift_right_arithmetic(as_uint(i), as_uint(j))),
    "population_count": lambda x, y, i, j: bits(lax.population_count(i)),
    "clz": lambda x, y, i, j: bits(lax.clz(i)),
    "bools": lambda x, y, i, j: (((x > 0) & (i > 0)) | ~(j > 0) ^ (y > 0)).astype(jnp.float32),
    "to int": lambda x, y, i, j: bits(x.astype(jnp.int32)),
    "to uint": lambda x, y, i, j: bits(x.astype(jnp.uint32)),
    "to bool": lambda x, y, i, j: x.astype(bool).astype(jnp.float32),
    "to int8": lambda x, y, i, j: bits(i.astype(jnp.int8).astype(jnp.int32) << 3),
    "int8 sum": lambda x, y, i, j: bits((i.astype(jnp.int8) + j.astype(jnp.int8)).astype(jnp.int32)),
    "to float": lambda x, y, i, j: i.astype(jnp.float32) - as_uint(j).astype(jnp.float32),
    "to half": lambda x, y, i, j: x.astype(jnp.float16).astype(jnp.float32),
    "to bfloat": lambda x, y, i, j: x.astype(jnp.bfloat16).astype(jnp.float32),
    "index": lambda x, y, i, j: TABLE[i, j],
    "index of a row": lambda x, y, i, j: TABLE[i][j],
    "index of ints": lambda x, y, i, j: bits(WORDS[i, j]),
    "clip": gathered("clip"),
    "fill": gathered("fill"),
    "promise_in_bounds": lambda x, y, i, j: gathered("promise_in_bounds")(x, y, jnp.clip(i, 0, 2), jnp.clip(j, 0, 4)),
    "int8": lambda x, y, i, j: bits(SMALL[i].astype(jnp.int32)),
    "bfloat16": lambda x, y, i, j: HALVES[i].astype(jnp.float32),
    "uint32": lambda x, y, i, j: bits(UNSIGNED[i] + 5),
    "bool": lambda x, y, i, j: FLAGS[i].astype(jnp.float32),
    "dynamic_slice": lambda x, y, i, j: lax.dynamic_slice(TABLE, (i, j), (2, 3)).max(),
    "take along": lambda x, y, i, j: jnp.take(TABLE, jnp.stack([i, j]), axis=1, mode="clip")[1, 1],
    "transposed": lambda x, y, i, j: TABLE.T[j, i],
    "reversed": lambda x, y, i, j: TABLE[jnp.clip(i, 0, 2)][::-1][jnp.clip(j, 0, 4)],
    "reshaped": lambda x, y, i, j: (TABLE * y).reshape(5, 3)[jnp.clip(i, 0, 4), 1],
    "iota": lambda x, y, i, j: jnp.where(jnp.arange(7) == i % 7, jnp.arange(7) * 2.0, 0).max(),
    "all and any": lambda x, y, i, j: ((jnp.arange(3) < i).all() * 1.0) + 2 * (jnp.arange(3) > j).any(),
    "concatenate": lambda x, y, i, j: jnp.concatenate([TABLE[i], jnp.stack([x, y])])[5],
    "cond": lambda x, y, i, j: lax.cond(i > j, lambda: x, lambda: y),
    "switch": lambda x, y, i, j: lax.switch(i, [lambda: x, lambda: y, lambda: x + 1]),
    "vmap": lambda x, y, i, j: jax.vmap(lambda k: TABLE[i, k])(jnp.arange(5))[2],
}
# functions that are rounded: how many units in the last place they may be off
ROUNDED = {
    "exp": (lambda x, y, i, j: jnp.exp(x), 3),
    "exp2": (lambda x, y, i, j: jnp.exp2(x), 24),
    "log": (lambda x, y, i, j: jnp.log(x), 3),
    "log1p": (lambda x, y, i, j: jnp.log1p(x), 4),
    "expm1": (lambda x, y, i, j: jnp.expm1(x), 4),
    "logistic": (lambda x, y, i, j: lax.logistic(x), 4),
    "tanh": (lambda x, y, i, j: jnp.tanh(x), 6),
    "sin": (lambda x, y, i, j: jnp.sin(jnp.clip(x, -99, 99)), 3),
    "cos": (lambda x, y, i, j: jnp.cos(jnp.clip(x, -99, 99)), 3),
    "atan2": (lambda x, y, i, j: jnp.arctan2(x, y), 4),
    "rsqrt": (lambda x, y, i, j: lax.rsqrt(x), 2),
    "pow": (lambda x, y, i, j: jnp.power(jnp.abs(x), y), 3),
    "integer_pow": (lambda x, y, i, j: x**5 + x**-2, 3),
    "dot": (lambda x, y, i, j: jnp.dot(abs(TABLE[i]), abs(jnp.stack([x, y, x, y, 1.0]))), 4),
    "norm": (lambda x, y, i, j: jnp.sqrt(((TABLE[i] - TABLE[j]) ** 2).sum()), 4),
    "gelu": (lambda x, y, i, j: jax.nn.gelu(jnp.clip(x, 0, 9)), 16),
    "softplus": (lambda x, y, i, j: jax.nn.softplus(x), 6),
    "relu": (lambda x, y, i, j: jax.nn.relu(x), 0),
}


@functools.cache
def samples() -> tuple[np.ndarray, ...]:
    """Pairs of floats and of integers: all of the edge cases with each other, then random ones."""
    floats = np.array([0, -0.0, 1, -1, 0.5, 1.5, -2.5, 1e37, -1e37, 2.0**31, -(2.0**31), 7e9, np.inf, -np.inf, np.nan])
    x, y = (a.reshape(-1) for a in np.meshgrid(floats, floats))
    ints = np.array([0, 1, -1, 2, 3, 4, 5, 7, 31, 32, 33, -32, 127, -(2**31), 2**31 - 1])
    i, j = (a.reshape(-1) for a in np.meshgrid(ints, ints))
    more, near = rng.normal(size=(2, 287)) * 8, rng.integers(-6, 9, (2, 287))
    several = [np.concatenate(pair) for pair in zip((x, y, i, j), (*more, *near))]
    return tuple(a.astype(dtype) for a, dtype in zip(several, (*[np.float32] * 2, *[np.int32] * 2)))


KERNEL = """
kernel void evaluate(device const float* x [[buffer(0)]], device const int* y [[buffer(1)]],
    device const int* i [[buffer(2)]], device const int* j [[buffer(3)]], device const int* captured [[buffer(4)]],
    device int* out [[buffer(5)]], uint k [[thread_position_in_grid]]) {
  Given given;
  given.captured = captured;
  given.b = y[k];
  given.n = 0;
  out[k] = as_type<int>(STRUCT::value(given, x[k], i[k], j[k]));
}
"""


def by_kernel_and_by_jax(f) -> tuple[np.ndarray, np.ndarray]:
    """What both make of the samples: a function as a score_mod, which is given the bits of y as its batch index."""
    modified = modifiers(lambda score, b, n, t, s: f(score, bits(b), t, s), None, np.float32)
    rule = functions.rules_of(modified.score, None)
    text = KERNEL.replace("STRUCT", rule.score.removeprefix("ModifiedScore<").removesuffix(">"))
    library = emulator.compile(source.base() + rule.definitions + text, fast_math=False)
    x, y, i, j = samples()
    vectors = [np.asarray(v).view(np.int32) for v in (modified.floats, modified.integers) if v is not None]
    out = np.zeros(x.size, np.int32)
    given = dict(enumerate((x, y.view(np.int32), i, j, np.concatenate([*vectors, np.zeros(1, np.int32)]), out)))
    ran = library.kernel("evaluate")(given, threads=x.size, threadgroup=32, outputs=[5])
    assert not ran.reports
    scalars = (x, y.view(np.int32), np.zeros_like(i), i, j)
    by_jax = jax.jit(jax.vmap(lambda *s: modified.score.evaluate(s, modified.floats, modified.integers)))(*scalars)
    return out.view(np.float32), np.asarray(by_jax)


@needs_core
@pytest.mark.share(8)
@pytest.mark.parametrize("name", EXACT)
def test_what_is_exact_has_the_bits_that_jax_gives(name):
    got, wanted = by_kernel_and_by_jax(EXACT[name])
    same = (got.view(np.int32) == wanted.view(np.int32)) | (np.isnan(got) & np.isnan(wanted))
    same |= (name in ("max", "min", "clamp")) & (got == wanted)  # of zeros the sign is any
    assert same.all(), [(a[~same][:5].tolist()) for a in (*samples(), got, wanted)]


@needs_core
@pytest.mark.share(4)
@pytest.mark.parametrize("name", ROUNDED)
def test_what_is_rounded_is_within_a_few_units_of_the_last_place(name):
    f, units = ROUNDED[name]
    got, wanted = by_kernel_and_by_jax(f)
    with np.errstate(invalid="ignore"):
        near = np.abs(got.astype(np.float64) - wanted) <= units * np.spacing(np.abs(wanted))
    same = near | (got == wanted) | (np.isnan(got) & np.isnan(wanted))
    tiny = (np.abs(got) < 2e-38) & (np.abs(wanted) < 2e-38)  # JAX may flush them
    assert (same | tiny).all(), [(a[~same][:5].tolist()) for a in (*samples(), got, wanted)]


def test_what_metal_lacks_is_refused_by_its_name_and_the_line_that_asks_for_it():
    shape = jax.ShapeDtypeStruct((1, 8, 2, 8), np.float32)
    unknown = lambda score, b, n, t, s: score + lax.erf_inv(t / 9.0)
    line = unknown.__code__.co_firstlineno
    expected = rf"score_mod: Metal has no primitive erf_inv \(.*test_functions.py:{line}"
    explained = jax_mfa.explain(shape, shape, shape, score_mod=unknown)
    assert explained.implementation == "blockwise"
    assert re.match(expected, explained.reasons["metal"])
    with pytest.raises(NotImplementedError, match=expected):
        jax_mfa.explain(shape, shape, shape, score_mod=unknown, implementation="metal")
    x = jnp.ones(shape.shape)
    with pytest.raises(NotImplementedError, match=expected):
        jax_mfa.flex_attention(x, x, x, score_mod=unknown, implementation="metal")
    for wide in (
        lambda score, b, n, t, s: score + lax.bitcast_convert_type(jnp.stack([s, t]).astype(jnp.uint16), jnp.float32),
        lambda score, b, n, t, s: score + lax.bitcast_convert_type(s, jnp.float16)[1],
    ):
        assert "numbers of different widths" in jax_mfa.explain(shape, shape, shape, score_mod=wide).reasons["metal"]
    long = lambda b, n, t, s: (jnp.arange(65) < t).any()
    with pytest.raises(NotImplementedError, match="mask_mod: an intermediate of 65 elements"):
        jax_mfa.flex_attention(x, x, x, mask_mod=long, implementation="metal")


def test_wide_arrays_are_refused_by_name():
    with harness.types_of("float64"):
        x = jnp.ones((1, 8, 2, 8), jnp.float32)
        for name, table in (("floats", jnp.ones(9, jnp.float64)), ("integers", jnp.ones(9, jnp.int64))):
            read = lambda score, b, n, t, s, table=table: score + table[t].astype(jnp.float32)
            with pytest.raises(NotImplementedError, match=f"captured_{name}: Metal has no {table.dtype}"):
                jax_mfa.flex_attention(x, x, x, score_mod=read, implementation="metal")


def test_equal_code_over_other_arrays_has_equal_text():
    def of(table):
        return modifiers(lambda score, b, n, t, s: score + table[t], None, np.float32)

    first, other, longer = (functions.rules_of(of(jnp.full(n, n * 1.0)).score, None) for n in (8, 8, 9))
    assert first == other and first.score != longer.score


# --- attention


def gallery() -> dict[str, dict]:
    """Functions by name: a learnt table, coordinates and their distances, documents, hidden by minus infinity."""
    table, where = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((4, 33), (80, 3)))
    documents = jnp.asarray(np.sort(rng.integers(0, 3, 800)), jnp.int32)

    def relative(score, b, n, t, s):
        return score + table[n, jnp.clip(t - s + 16, 0, 32)]

    def distance(score, b, n, t, s):
        apart = where[t % 80] - where[s % 80]
        return score - jnp.sqrt((apart**2).sum() + 0.1) * (b + 1)

    def hides(score, b, n, t, s):
        return jnp.where((t + s + n) % 5 == b, -jnp.inf, score * jnp.exp(-abs(t - s) / 50.0))

    def same(b, n, t, s):
        return documents[t] == documents[s]

    return {
        "relative": {"score_mod": relative},
        "distance": {"score_mod": distance, "mask_mod": lambda b, n, t, s: s <= t + 7 * n},
        "documents": {"mask_mod": same},
        "hides": {"score_mod": hides, "mask_mod": same},
    }


@functools.cache
def problem_of(name, t=37, s=53, dtype=np.float32, **static):
    """The arguments of a call, and its results and gradients by the reference."""
    q, k, v = (x.astype(dtype) for x in harness.qkv(B=2, T=t, S=s, N=4, K=2, H=16, seed=5))
    arguments = {"query": q, "key": k, "value": v, "query_offset": 3, **static}
    functions_of = gallery()[name]
    d_out, d_lse = harness.cotangents(arguments)

    def reference(q, k, v):
        keywords = {"query_offset": 3, "implementation": "reference", "return_residual": True, **static}
        return jax_mfa.flex_attention(q, k, v, **functions_of, **keywords)

    (out, lse), pullback = jax.vjp(reference, q, k, v)
    gradients = pullback((d_out.astype(out.dtype), d_lse.astype(lse.dtype)))
    traced = modifiers(functions_of.get("score_mod"), functions_of.get("mask_mod"), np.float32)
    return arguments | {"modifiers": traced}, out, gradients


def assert_equals_reference(ran, arguments, out, gradients):
    assert ran.reports == [], "\n".join(ran.reports[:5])
    terms = harness.terms_of(arguments)
    dtype = arguments["query"].dtype
    harness.assert_close(ran.arrays["out"], np.asarray(out), dtype, terms=terms, what="out")
    for name, wanted in zip(("d_query", "d_key", "d_value"), gradients):
        size = float(np.abs(wanted).max())
        harness.assert_close(
            ran.arrays[name], np.asarray(wanted), dtype, terms=terms, gradient=True, size=size, what=name
        )


@pytest.mark.share(16)
@pytest.mark.parametrize("variant", ["staged", "direct", "portable"])
@pytest.mark.parametrize("name", gallery())
def test_attention_with_functions_is_the_references(name, variant):
    arguments, out, gradients = problem_of(name)
    assert_equals_reference(plans.run_call(arguments, variant=variant), arguments, out, gradients)


@pytest.mark.share(4)
@pytest.mark.parametrize("name", ["distance", "hides"])
def test_decoding_with_functions_is_the_references(name):
    arguments, out, gradients = problem_of(name, t=2, s=530)
    ran = plans.run_call(arguments)
    assert any("decode" in kernel for kernel, _ in ran.dispatches) or not ran.dispatches
    assert_equals_reference(ran, arguments, out, gradients)


@pytest.mark.share(4)
@pytest.mark.parametrize("rows", [1, 20], ids=["decoding", "prefill"])
@pytest.mark.parametrize("scheme", [None, "int4"])
def test_functions_of_pages_are_given_logical_positions(on_device, scheme, rows):
    q, keys, values = harness.arrays((2, rows, 4, 16), (40, 16, 2, 16), (40, 16, 2, 16))
    pages = [x if scheme is None else jax_mfa.quantize(x, scheme) for x in (keys, values)]
    tables = np.random.default_rng(0).permutation(40)[:36].reshape(2, 18)
    table = jnp.asarray(rng.normal(size=(4, 300)), jnp.float32)
    attend = lambda implementation: jax_mfa.paged_attention(
        q,
        *pages,
        tables,
        [100, 280],
        score_mod=lambda x, b, n, t, s: x + table[n, abs(t - s)] * (b + 1),
        mask_mod=lambda b, n, t, s: (s + b) % 3 != 1,
        implementation=implementation,
    )
    harness.assert_allclose(attend("metal"), attend("reference"), rtol=1e-5, atol=2e-6)


@pytest.mark.sweep
def test_functions_beside_bias_cap_and_sixteen_bits():
    """Under a cap minus infinity hides nothing; the bias gets its gradient through the function."""
    arguments, out, gradients = problem_of("hides", logits_soft_cap=2.0, is_causal=True)
    assert_equals_reference(plans.run_call(arguments), arguments, out, gradients)
    arguments, out, gradients = problem_of("relative", dtype=np.float16)
    assert_equals_reference(plans.run_call(arguments), arguments, out, gradients)


def table_gradient(arguments, **how):
    """Of what a score_mod reads: by kernels, and by the reference."""
    spec, operands = specify(**arguments)
    d_out, d_lse = harness.cotangents(arguments)
    floats = operands.captured_floats
    _, pullback = jax.vjp(lambda x: reference.attention(spec, operands._replace(captured_floats=x)), floats)
    (wanted,) = pullback((jnp.asarray(d_out), jnp.asarray(d_lse)))
    ran = plans.run_call(arguments, **how)
    assert ran.reports == []
    return ran.arrays["d_captured"].sum(1), np.asarray(wanted)


@pytest.mark.share(4)
@pytest.mark.parametrize("variant", ["staged", "portable"])
@pytest.mark.parametrize("name", ["relative", "distance"])
def test_arrays_that_a_score_mod_reads_get_their_gradient(name, variant):
    """In every run and schedule the same bits."""
    arguments, _, _ = problem_of(name)
    got, wanted = table_gradient(arguments, variant=variant)
    terms = 2 * 4 * 37 + harness.terms_of(arguments)
    harness.assert_close(got, wanted, np.float32, terms=terms, gradient=True, size=float(np.abs(wanted).max()))
    np.testing.assert_array_equal(table_gradient(arguments, variant=variant, seed=3)[0], got)


@pytest.mark.sweep
def test_reads_beyond_an_array_and_of_hidden_pairs_have_no_gradient():
    """Not even where a derivative is not finite."""
    table = jnp.asarray(np.where(np.arange(60) % 9 == 4, 0, rng.random(60)), jnp.float32)
    read = lambda score, b, n, t, s: score + jnp.sqrt(table.at[t - s].get(mode="fill", fill_value=0.25)) + table[s] ** 2
    visible = lambda b, n, t, s: (t >= s) & ((t - s) % 9 != 4)
    arguments = problem_of("relative")[0] | {"modifiers": modifiers(read, visible, np.float32)}
    got, wanted = table_gradient(arguments)
    assert np.isfinite(wanted).all()
    terms = 2 * 4 * 37 + harness.terms_of(arguments)
    harness.assert_close(got, wanted, np.float32, terms=terms, gradient=True, size=float(np.abs(wanted).max()))


def test_a_score_that_is_nothing_but_a_read_has_a_gradient():
    table = jnp.asarray(rng.random((4, 5)), jnp.float32)
    arguments = problem_of("relative")[0] | {
        "modifiers": modifiers(lambda x, b, n, t, s: table[n, s % 5], None, np.float32)
    }
    got, wanted = table_gradient(arguments)
    assert np.abs(wanted).min() > 0
    terms = 2 * 4 * 37 + harness.terms_of(arguments)
    harness.assert_close(got, wanted, np.float32, terms=terms, gradient=True, size=float(np.abs(wanted).max()))


def test_tables_of_shares_do_not_grow_with_queries_and_keys():
    """Beside eight of the table itself they are bounded."""
    for size, shares in ((100, 256), (2**20, 8)):
        table = jax.ShapeDtypeStruct((1, size), np.float32)
        small = modifiers(lambda score, b, n, t, s, size=size: score + jnp.zeros(size)[t], None, np.float32)
        for length in (512, 4096):
            shape = jax.ShapeDtypeStruct((1, length, 2, 16), np.float32)
            spec, operands = specify_abstract(query=shape, key=shape, value=shape, modifiers=small)
            plan = metal.plan_of(spec, operands._replace(captured_floats=table), "backward", "staged")
            (found,) = [x for x in plan.buffers if x.name == "d_captured"]
            assert found.shape == (1, shares, size)


def test_a_gradient_that_metal_lacks_is_left_to_blockwise(on_device):
    """And refused where Metal was named: a whole array within a function has no single reads."""
    q, k, v = harness.qkv(B=1, T=9, S=9, N=2, K=2)

    def loss(table, implementation):
        score_mod = lambda score, b, n, t, s: score + (table * score)[t]
        return (jax_mfa.flex_attention(q, k, v, score_mod=score_mod, implementation=implementation) ** 2).sum()

    table = jnp.asarray(rng.normal(size=70), jnp.float32)
    harness.assert_allclose(jax.grad(loss)(table, None), jax.grad(loss)(table, "reference"), rtol=1e-4, atol=1e-5)
    with pytest.raises(NotImplementedError, match="gradient of the arrays that this score_mod reads"):
        jax.grad(loss)(table, "metal")


@pytest.mark.sweep
def test_mapped_tables_get_a_gradient_each(on_device):
    q, k, v = harness.qkv(B=2, T=9, S=11, N=2, K=1)
    ids = jnp.arange(11) % 3

    def loss(table, implementation):
        score_mod = lambda score, b, n, t, s: score + table[n, ids[s]] * (b + 1)
        return (jax_mfa.flex_attention(q, k, v, score_mod=score_mod, implementation=implementation) ** 2).sum()

    tables = jnp.asarray(rng.normal(size=(3, 2, 3)), jnp.float32)
    got, wanted = (jax.vmap(jax.grad(lambda x, i=i: loss(x, i)))(tables) for i in ("metal", "reference"))
    harness.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


def ran(variant="staged", **changed):
    """Both passes of one problem with these arguments more; every call has the same arrays."""
    q, k, v = harness.qkv(B=2, T=37, S=53, N=4, K=2, H=16, seed=8)
    score_mod, mask_mod = changed.pop("score_mod", None), changed.pop("mask_mod", None)
    traced = {"modifiers": modifiers(score_mod, mask_mod, np.float32)} if score_mod or mask_mod else {}
    found = plans.run_call({"query": q, "key": k, "value": v, "query_offset": 3} | changed | traced, variant=variant)
    assert found.reports == []
    return found.arrays


FORWARD, BACKWARD = ("out", "row_max", "row_sum"), ("d_query", "d_key", "d_value")
SLOPES = np.exp2(-2.0 * np.arange(1, 5)).astype(np.float32)
# features that kernels have, as functions; and the results of which they give the same bits
SAME = {
    "cap": ({"logits_soft_cap": 1.5}, {"score_mod": lambda x, b, n, t, s: 1.5 * jnp.tanh(x / 1.5)}, FORWARD),
    "alibi": (
        {"alibi_slopes": SLOPES},
        {"score_mod": lambda x, b, n, t, s: x + jnp.exp2(-2.0 * (n + 1)) * (s - t)},
        FORWARD + BACKWARD,
    ),
    "causal": ({"is_causal": True}, {"mask_mod": lambda b, n, t, s: s <= t}, ()),
    "window": ({"local_window_size": (9, 4)}, {"mask_mod": lambda b, n, t, s: (t - s <= 9) & (s - t <= 4)}, ()),
}


@pytest.mark.share(8)
@pytest.mark.parametrize("variant", ["staged", "portable"])
@pytest.mark.parametrize("name", SAME)
def test_a_feature_written_as_a_function_gives_what_the_feature_gives(name, variant):
    feature, functions_of, equal = SAME[name]
    got, wanted = ran(variant, **functions_of), ran(variant, **feature)
    for x in FORWARD + BACKWARD:
        if x in equal:
            np.testing.assert_array_equal(got[x], wanted[x], err_msg=x)
        else:  # tiles that are not skipped change the order of sums
            harness.assert_allclose(got[x], wanted[x], rtol=2e-5, atol=2e-6, err_msg=x)


@pytest.mark.share(4)
@pytest.mark.parametrize("name", ["cap", "alibi"])
def test_and_takes_as_many_instructions_for_each_score(name):
    """Within a twentieth, and no variable has an address."""
    shape = jax.ShapeDtypeStruct((1, 512, 4, 64), np.float16)
    feature, functions_of, _ = SAME[name]
    counts = []
    for more in (feature, {"modifiers": modifiers(functions_of["score_mod"], None, np.float32)}):
        spec, operands = specify_abstract(query=shape, key=shape, value=shape, **more)
        both = [metal.plan_of(spec, operands, of_pass, "staged") for of_pass in ("forward", "backward")]
        kernels = [compiled(plan, dispatch) for plan in both for dispatch in plan.dispatches]
        assert all(x.allocas == 0 for x in kernels)
        counts.append({x.name: sum(x.interior.values()) / x.scores for x in kernels if x.interior})
    assert len(counts[0]) == 3
    assert all(counts[1][x] <= 1.05 * counts[0][x] for x in counts[0]), counts


@pytest.mark.share(4)
@pytest.mark.parametrize("variant", ["staged", "direct", "portable"])
def test_the_function_is_asked_only_in_blocks_that_are_partly_seen(variant):
    """What says that a block is wholly seen is believed: there a function that hides pairs is not asked."""
    t, s = np.arange(37)[:, None], np.arange(53)[None]
    blocks = np.array([[1, 0, 2, 1], [2, 1, 1, 0], [1, 1, 0, 2]], np.int32)[None, None]
    of_pair = blocks[0, 0][t // 16, s // 16]
    see = (of_pair == 2) | ((of_pair == 1) & (s <= t + 3))
    blocked = jax_mfa.BlockMask(blocks > 0, (16, 16), whole=blocks == 2)
    got = ran(variant, mask_mod=lambda b, n, t, s: s <= t, block_mask=blocked)
    wanted = ran(variant, mask=see[None, None])
    for x in FORWARD + BACKWARD:
        harness.assert_allclose(got[x], wanted[x], rtol=2e-5, atol=2e-6, err_msg=x)
