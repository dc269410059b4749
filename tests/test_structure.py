"""Promises about how, not what: memory, skipped tiles, grouped heads that are not repeated, repeatability, threads."""

import concurrent.futures
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import AVAILABLE, DIFFERENTIABLE, arrays, cotangents, evaluate, own, qkv, split

import jax_mfa
from jax_mfa import blockwise

LEAN = [x for x in AVAILABLE if x.linear_memory]
counted = pytest.mark.parametrize("implementation", [x for x in LEAN if x.in_jnp], ids=lambda x: x.name)
lean = pytest.mark.parametrize("implementation", LEAN, ids=lambda x: x.name)

VARIANTS = {
    "dense": {},
    "causal": {"is_causal": True},
    "window": {"is_causal": True, "local_window_size": (100, 0)},
    "lengths": {"key_value_seq_lengths": jax.ShapeDtypeStruct((1,), jnp.int32)},
    "segments": {"query_segment_ids": "T", "key_value_segment_ids": "S"},
    "sinks_alibi_cap": {
        "sinks": "N",
        "alibi_slopes": "N",
        "logits_soft_cap": 5.0,
    },
    "dropout": {"dropout_rate": 0.1, "dropout_seed": jax.ShapeDtypeStruct((2,), jnp.uint32)},
    "small_bias": {"bias": "bias"},
}


def _lower(implementation, variant, t, s, n=4, k=2, h=32, gradient=True):
    """The compiled program of a problem of a length, with gradients of every argument that has one."""
    shape = lambda *d: jax.ShapeDtypeStruct(d, jnp.float32)
    arguments = {"query": shape(1, t, n, h), "key": shape(1, s, k, h), "value": shape(1, s, k, h)}
    for name, x in VARIANTS[variant].items():
        ids = {"T": jax.ShapeDtypeStruct((1, t), jnp.int32), "S": jax.ShapeDtypeStruct((1, s), jnp.int32)}
        arguments[name] = {**ids, "bias": shape(n, 1, s), "N": shape(n)}.get(x, x) if isinstance(x, str) else x
    static = {name: x for name, x in arguments.items() if not isinstance(x, jax.ShapeDtypeStruct)}
    moving = {name: x for name, x in arguments.items() if name in DIFFERENTIABLE and name not in static}
    rest = {name: x for name, x in arguments.items() if name not in moving and name not in static}
    run = lambda moving, rest: implementation.attend(**moving, **rest, **static).sum()
    return jax.jit(jax.grad(run) if gradient else run).lower(moving, rest).compile()


@pytest.mark.share(4)
@pytest.mark.parametrize("variant", VARIANTS)
@lean
def test_temporary_memory_grows_linearly_with_the_length(implementation, variant):
    small, large = (_lower(implementation, variant, t, t).memory_analysis().temp_size_in_bytes for t in (4096, 16384))
    # a fixed share for tiles, the rest grows as the length does: four times, never sixteen
    assert large <= 4.1 * small, f"{small} bytes at 4096, {large} at 16384"


@lean
def test_a_length_of_32768_fits_in_2_gib_forward_and_backward(implementation):
    compiled = _lower(implementation, "causal", 32768, 32768, n=8, k=8, h=64)
    memory = compiled.memory_analysis()
    total = memory.temp_size_in_bytes + memory.argument_size_in_bytes + memory.output_size_in_bytes
    assert total < 2 * 2**30


@pytest.mark.parametrize("gradient, most", [(False, 4.5), (True, 5)], ids=["forward", "training"])
@counted
def test_rows_and_their_results_are_laid_out_tile_by_tile(implementation, gradient, most):
    """Copies of the query, the output and their cotangents would be four arrays more."""
    sizes = (
        _lower(implementation, "causal", t, t, n=8, k=8, h=64, gradient=gradient).memory_analysis().temp_size_in_bytes
        for t in (4096, 8192)
    )
    growth = -np.subtract(*sizes) / (4096 * 8 * 64 * 4)
    assert growth < most, f"by {growth:.2f} operands of that length"


def _temporary_of_forward_mode(t, of_gradient):
    x = jax.ShapeDtypeStruct((1, t, 4, 32), jnp.float32)
    attend = lambda q, k, v: jax_mfa.dot_product_attention(q, k, v, is_causal=True, implementation="blockwise")
    if of_gradient:  # a Hessian times a vector
        attend = jax.grad(lambda *x, attend=attend: jnp.sin(attend(*x)).sum(), (0, 1, 2))
    run = lambda *x: jax.jvp(attend, x[:3], x[3:])[1]
    return jax.jit(run).lower(*[x] * 6).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("of_gradient", [False, True], ids=["of_attention", "of_its_gradient"])
def test_temporary_memory_of_forward_mode_grows_linearly_with_the_length(of_gradient):
    small, large = (_temporary_of_forward_mode(t, of_gradient) for t in (4096, 16384))
    assert large <= 4.1 * small, f"{small} bytes at 4096, {large} at 16384"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_decoding_copies_and_converts_no_whole_cache(dtype):
    query, cache = (jax.ShapeDtypeStruct((8, n, 8, 64), dtype) for n in (1, 32768))
    decode = lambda *x: jax_mfa.decode_attention(*x, implementation="blockwise")
    compiled = jax.jit(decode).lower(query, cache, cache, jax.ShapeDtypeStruct((8,), jnp.int32)).compile()
    # a tile of keys and one of values, each cut once; float32 is cut as it lies, and then laid out for the product
    tiles = {"float32": 3.5, "bfloat16": 2.5}[dtype]
    assert compiled.memory_analysis().temp_size_in_bytes < tiles * 4 * blockwise.tiles.LARGEST_OF_FEW


def test_few_queries_make_no_float32_of_a_large_cache():
    query, cache = (jax.ShapeDtypeStruct((1, n, 8, 64), "bfloat16") for n in (1, 4096))
    attend = lambda *x: jax_mfa.dot_product_attention(*x, implementation="blockwise")
    compiled = jax.jit(attend).lower(query, cache, cache).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2.5 * 4 * blockwise.tiles.LARGEST_OF_FEW


def _buffers(text, kind=r"(?:pred|[sufb]f?\d+)"):
    """Element counts of every array shape in a compiled program, of this element type."""
    shapes = re.findall(rf"\b{kind}\[([\d,]+)\]", text)
    return {math.prod(int(d) for d in shape.split(",")) for shape in set(shapes)}


def test_the_shapes_of_a_program_are_found():
    compiled = jax.jit(lambda x: jnp.tanh(x @ x.T).sum()).lower(jnp.ones((1000, 4))).compile()
    assert max(_buffers(compiled.as_text())) == 10**6


@pytest.mark.share(2)
@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("variant", VARIANTS)
@lean
def test_no_array_is_as_large_as_the_scores(implementation, variant, gradient):
    t, s = 8192, 8191
    assert max(_buffers(_lower(implementation, variant, t, s, n=2, k=1, h=8, gradient=gradient).as_text())) < t * s


@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "backward"])
@lean
def test_keys_and_values_are_not_repeated_for_the_heads_of_a_group(implementation, gradient):
    t, s, n, h = 4, 16384, 16, 64
    largest = max(_buffers(_lower(implementation, "dense", t, s, n=n, k=1, h=h, gradient=gradient).as_text()))
    assert largest <= 2 * s * h, f"an array of {largest} elements, the keys have {s * h}"


# --- skipped tiles, by counting what is computed


class Counter:
    """Counts multiply-accumulates of every matrix product that runs while jit is off."""

    def __init__(self, monkeypatch):
        from jax.extend.core.primitives import dot_general_p

        self.total, bind = 0, dot_general_p.bind

        def counted(a, b, **params):
            if not isinstance(a, jax.core.Tracer):  # what is only traced is not computed
                (_, contracted), (_, batch) = params["dimension_numbers"]
                own = (d for i, d in enumerate(b.shape) if i not in {*contracted, *batch})
                self.total += math.prod(a.shape) * math.prod(own)
            return bind(a, b, **params)

        monkeypatch.setattr(dot_general_p, "bind", counted)

    def of(self, fun, *args):
        self.total = 0
        with jax.disable_jit():
            fun(*args)
        return self.total


LENGTH = 4096  # a tile is at most a quarter of it


@pytest.fixture(scope="module")
def long_inputs():
    return qkv(B=1, T=LENGTH, S=LENGTH, N=1, K=1, H=16)


def _both_passes(implementation, inputs, keywords):
    forward = lambda: implementation.attend(*inputs, **keywords)

    def backward():
        _, pullback = jax.vjp(lambda *x: implementation.attend(*x, **keywords), *map(jnp.asarray, inputs))
        return pullback(jnp.ones(inputs[0].shape))

    return forward, backward


SKIPPED = {  # what may be computed at most, as a share of dense: the visible share, and tiles that stand on its edge
    "causal": ({"is_causal": True}, 0.63),
    "window": ({"is_causal": True, "local_window_size": (64, 0)}, 0.44),
    "key_lengths": ({"key_value_seq_lengths": np.array([1000])}, 0.26),
    "query_lengths": ({"query_seq_lengths": np.array([1000])}, 0.26),
    "offset_blind": ({"is_causal": True, "query_offset": -LENGTH}, 0.0),
    "segments": (
        {
            "query_segment_ids": np.repeat(np.arange(4), LENGTH // 4)[None],
            "key_value_segment_ids": np.repeat(np.arange(4), LENGTH // 4)[None],
        },
        0.26,
    ),
}


@counted
def test_dense_attention_multiplies_exactly_what_the_formulas_need(implementation, long_inputs, monkeypatch):
    forward, backward = _both_passes(implementation, long_inputs, {})
    counter, h, v = Counter(monkeypatch), 16, 16
    scores = LENGTH * LENGTH
    assert counter.of(forward) == scores * (h + v)
    # the backward pass takes scores, d(p), dq, dk and dv: 3 products of size H, 2 of size V, beside the forward's,
    # and d(out) · out of each row
    assert counter.of(backward) == scores * (4 * h + 3 * v) + LENGTH * v


@pytest.mark.share(4)
@pytest.mark.parametrize("rule", SKIPPED)
@counted
def test_tiles_that_no_row_can_see_are_not_computed(implementation, long_inputs, rule, monkeypatch):
    keywords, share = SKIPPED[rule]
    _, both = _both_passes(implementation, long_inputs, keywords)
    # forward and backward, as the test above has it: what one of them did beyond its share the other cannot have saved
    dense = 7 * LENGTH * LENGTH * 16
    done = Counter(monkeypatch).of(both) - LENGTH * 16
    assert done <= share * dense, f"{done / dense:.3f} of dense"


@pytest.mark.share(8)
@pytest.mark.parametrize("filled, n", [(1, 16), (100, 32), (5000, 16), (16384, 136), (16384, 16)])
def test_decoding_costs_what_the_lengths_are_and_not_what_the_cache_is(filled, n, monkeypatch):
    size, k, h = 16384, 8, 16
    query, key, value = (x for x in qkv(B=1, T=1, S=size, N=n, K=k, H=h))
    counter = Counter(monkeypatch)
    decode = lambda: jax_mfa.decode_attention(query, key, value, np.array([filled]), implementation="blockwise")
    visited = counter.of(decode) / (n * 2 * h)  # columns
    assert filled <= visited < filled + 2048


def test_few_queries_cost_their_own_products_whether_or_not_a_gradient_follows(monkeypatch):
    inputs = qkv(B=1, T=1, S=2**17, N=4, K=4)  # more than one tile
    attend = lambda *x: jax_mfa.dot_product_attention(*x, implementation="blockwise")
    counter = Counter(monkeypatch)
    needed = 2 * inputs[0].size * 2**17
    assert counter.of(attend, *inputs) == needed
    assert counter.of(lambda: jax.vjp(attend, *inputs)) == needed


@pytest.mark.share(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_only_the_output_that_is_kept_grows_with_the_batch(dtype, is_causal):
    """Memory that the system clears anew at each call takes longer than attention does."""

    def temporary(batch):
        x = jax.ShapeDtypeStruct((batch, 32, 8, 128), dtype)
        attend = lambda q, k, v: jax_mfa.dot_product_attention(q, k, v, is_causal=is_causal, implementation="blockwise")
        run = lambda q, k, v, d_out: jax.vjp(attend, q, k, v)[1](d_out)
        return jax.jit(run).lower(x, x, x, x).compile().memory_analysis().temp_size_in_bytes

    # a step's arrays: where they may be made again, 16-bit results have no room in common with them
    of_tiles = (12 if (is_causal, dtype) == (True, "bfloat16") else 8) * 4 * blockwise.tiles.LARGEST
    output = 512 * 32 * 8 * 128 * jnp.dtype(dtype).itemsize
    assert temporary(512) < of_tiles + output
    assert temporary(512) - temporary(256) < 0.55 * output


@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "backward"])
def test_a_program_holds_each_product_of_a_tile_once(gradient):
    """Programs that hold it twice take twice as long to compile; those that are made again where a result is not
    finite stand in a branch, with what counts infinities."""
    x = jax.ShapeDtypeStruct((1, 1024, 8, 64), jnp.float32)
    attend = lambda q, k, v: jax_mfa.dot_product_attention(q, k, v, is_causal=True, implementation="blockwise").sum()
    text = jax.jit(jax.grad(attend, (0, 1, 2)) if gradient else attend).lower(x, x, x).as_text()
    # scores and output; scores again, d(p), dq, dk, dv and Σ d(out) · out. In branches: output; dq, dk and dv
    once, in_branches = (2 + 6, 1 + 3) if gradient else (2, 1)
    assert text.count("stablehlo.dot_general") == once + 2 * in_branches


@pytest.mark.parametrize("length", [256, 512, 1024])
@pytest.mark.parametrize("gradient, most", [(False, 380), (True, 800)], ids=["forward", "training"])
def test_a_layer_is_so_many_instructions(length, gradient, most):
    """XLA compiles each layer of a model anew, in time that its instructions take: stock's gradient has some 100."""
    x = jax.ShapeDtypeStruct((1, length, 12, 64), jnp.float32)
    attend = lambda q, k, v: jax_mfa.dot_product_attention(q, k, v, is_causal=True, implementation="blockwise").sum()
    text = jax.jit(jax.grad(attend, (0, 1, 2)) if gradient else attend).lower(x, x, x).as_text("hlo")
    assert (count := text.count(" = ")) <= most, count


@pytest.mark.parametrize("length, head", [(32, 64), (200, 40)])
def test_forward_mode_shares_the_scores_of_one_tile(length, head):
    x = jax.ShapeDtypeStruct((4, length, 8, head), jnp.float32)
    attend = lambda q, k, v: jax_mfa.dot_product_attention(q, k, v, implementation="blockwise")
    run = lambda q, k, v, moved: jax.jvp(lambda q: attend(q, k, v), (q,), (moved,))
    text = jax.jit(run).lower(x, x, x, x).compile().as_text()
    assert text.count(" dot(") == 4  # scores, output, and each with its change


@pytest.mark.parametrize("rows, heads", [(1, 32), (4, 8)])
def test_few_rows_of_bfloat16_convert_neither_keys_nor_values(rows, heads):
    """They read them once, as they lie; what looks for infinities converts one head at a time, and only then."""
    query, key = (jax.ShapeDtypeStruct((2, *x, 64), jnp.bfloat16) for x in ((rows, heads), (3000, min(heads, 8))))
    attend = lambda q, k, v: jax_mfa.dot_product_attention(q, k, v, implementation="blockwise")
    text = jax.jit(attend).lower(query, key, key).compile().as_text()
    # of what a fusion computes only the parts that are read lie anywhere
    fused = set(re.findall(r" fusion\(.*?calls=(%[\w.-]+)", text))
    text = "\n\n".join(x for x in text.split("\n\n") if x.lstrip().split(" ", 1)[0] not in fused)
    size = math.prod(key.shape)
    assert size in _buffers(text, "bf16") and max(_buffers(text, "f32")) < size
    assert size in _buffers(jax.jit(lambda x: jnp.tanh(x.astype(jnp.float32))).lower(key).compile().as_text(), "f32")


# --- repeatability and threads


def _problems():
    """Arguments of a few problems that differ in shape, dtype and features."""
    ids = np.sort(np.random.default_rng(0).integers(0, 3, (2, 70)))
    made = []
    for i, (dtype, extra) in enumerate(
        [
            ("float32", {}),
            ("bfloat16", {"is_causal": True, "key_value_seq_lengths": np.array([66, 3])}),
            ("float32", {"bias": arrays((4, 70, 66))[0], "dropout_rate": 0.1, "dropout_seed": np.uint32([1, 2])}),
            ("float32", {"query_segment_ids": ids, "key_value_segment_ids": ids[:, :66]}),
        ]
    ):
        q, k, v = qkv(T=70, S=66, H=16, dtype=dtype, seed=i)
        arguments = {"query": q, "key": k, "value": v, **extra}
        made.append((arguments, *cotangents(arguments)))
    return made


def _bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


@pytest.mark.sweep
@own
def test_results_are_the_same_to_the_last_bit_from_run_to_run(implementation):
    for problem in _problems()[1:3]:
        first = _bits(evaluate(implementation, *problem, jit=jax.jit))
        jax.clear_caches()
        again = _bits(evaluate(implementation, *problem, jit=jax.jit))
        assert first == again


def test_a_compiled_program_repeats_its_bits(implementation):
    q, k, v = qkv(B=1, T=300, S=300, H=32)
    run = jax.jit(jax.value_and_grad(lambda q, k, v: jnp.sin(implementation.attend(q, k, v)).sum(), argnums=(0, 1, 2)))
    first = _bits(run(q, k, v))
    assert all(_bits(run(q, k, v)) == first for _ in range(10))


@own
def test_several_threads_may_trace_and_run_at_once(implementation):
    problems = _problems()
    alone = [_bits(evaluate(implementation, *problem)) for problem in problems]
    jax.clear_caches()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        jobs = [
            (i, pool.submit(evaluate, implementation, *problems[i])) for _ in range(3) for i in range(len(problems))
        ]
        for i, job in jobs:
            assert _bits(job.result()) == alone[i]


def test_equal_layers_are_traced_and_lowered_once(implementation):
    """A model of many equal layers holds one copy of the attention program, so that it compiles as fast as one."""
    q, k, v = qkv()

    def size(layers):
        def run(q, k, v):
            for _ in range(layers):
                q = implementation.attend(q, k, v, is_causal=True)
            return q.sum()

        return len(jax.jit(jax.grad(run)).lower(q, k, v).as_text())

    if implementation.name == "reference":
        pytest.skip("the definition is plain jnp, which XLA inlines")
    one, eight = size(1), size(8)
    assert eight < 2.5 * one


@pytest.mark.skipif(jax.__version_info__ < (0, 5), reason="XLA inlines all calls there")
def test_equal_layers_are_compiled_once():
    """Calls that are not inlined stay calls in the compiled program, one a layer and pass."""

    def calls(layers, length=1024):
        def loss(x):
            for _ in range(layers):
                x = x + jax_mfa.dot_product_attention(x, x, x, is_causal=True, implementation="blockwise")
            return x.sum()

        x = jax.ShapeDtypeStruct((1, length, 8, 32), jnp.float32)
        text = jax.jit(jax.grad(loss)).lower(x).compile().as_text()
        return len(re.findall(r" call\(.*inlineable", text))

    assert (calls(1), calls(3)) == (2, 6)
    assert calls(3, length=128) == 0  # the dense program shares scores with its gradient's


def test_split_tells_arrays_from_static_arguments():
    moving, static = split({"query": np.ones(2), "is_causal": True, "scale": 0.5, "query_offset": 3})
    assert set(moving) == {"query"} and set(static) == {"is_causal", "scale", "query_offset"}
