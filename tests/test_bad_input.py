"""Bad input: an error of the right type at trace time, naming the argument, what was seen and what was expected."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import AVAILABLE, assert_allclose, qkv, types_of, x64

import jax_mfa
from jax_mfa import BlockMask
from jax_mfa.kv_cache.storage import PagedArray

pytestmark = pytest.mark.first_tier

Q, K, V = qkv(B=2, T=7, S=9, N=4, K=2, H=8)
f32 = lambda *shape: np.ones(shape, np.float32)
i32 = lambda *values: np.array(values, np.int32)

# what to change in a good call; the error; words that its message must hold: the argument first, then seen and expected
BAD = {
    "query_rank": ({"query": f32(7, 4)}, ValueError, ["query", "[7, 4]", "T, N, H"]),
    "query_and_key_rank": ({"key": f32(9, 2, 8)}, ValueError, ["key", "[9, 2, 8]", "S, K, H"]),
    "value_rank": ({"value": f32(1, 2, 9, 2, 8)}, ValueError, ["value", "[1, 2, 9, 2, 8]", "S, K, V"]),
    "batch_differs": ({"key": f32(3, 9, 2, 8)}, ValueError, ["key", "[3, 9, 2, 8]", "[2, 7, 4, 8]"]),
    "value_batch_differs": ({"value": f32(1, 9, 2, 8)}, ValueError, ["value", "[1, 9, 2, 8]"]),
    "head_size_differs": ({"key": f32(2, 9, 2, 6)}, ValueError, ["key", "[2, 9, 2, 6]", "8"]),
    "value_length_differs": ({"value": f32(2, 8, 2, 8)}, ValueError, ["value", "[2, 8, 2, 8]", "9"]),
    "value_heads_differ": ({"value": f32(2, 9, 4, 8)}, ValueError, ["value", "[2, 9, 4, 8]", "2"]),
    "heads_do_not_divide": ({"query": f32(2, 7, 5, 8)}, ValueError, ["query", "5", "2", "multiple"]),
    "fewer_query_heads": ({"query": f32(2, 7, 1, 8)}, ValueError, ["query", "1", "2", "multiple"]),
    "no_key_heads": ({"key": f32(2, 9, 0, 8), "value": f32(2, 9, 0, 8)}, ValueError, ["key", "0"]),
    "dtypes_differ": ({"key": K.astype(np.float16)}, TypeError, ["key", "float16", "float32"]),
    "value_dtype_differs": ({"value": V.astype(jnp.bfloat16)}, TypeError, ["value", "bfloat16", "float32"]),
    "integer_query": ({"query": Q.astype(np.int32)}, TypeError, ["query", "int32", "floating"]),
    "complex_value": ({"value": V.astype(np.complex64)}, TypeError, ["value", "complex64", "floating"]),
    "query_is_none": ({"query": None}, TypeError, ["query", "None", "array"]),
    "key_is_text": ({"key": "key"}, TypeError, ["key", "str", "array"]),
    "float_mask": ({"mask": f32(2, 4, 7, 9)}, TypeError, ["mask", "float32", "bool", "bias"]),
    "integer_mask": ({"mask": i32(1, 0, 1)}, TypeError, ["mask", "int32", "bool"]),
    "boolean_bias": ({"bias": np.ones((7, 9), bool)}, TypeError, ["bias", "bool", "floating", "mask"]),
    "integer_bias": ({"bias": np.ones((7, 9), np.int32)}, TypeError, ["bias", "int32", "floating"]),
    "mask_shape": ({"mask": np.ones((2, 4, 7, 8), bool)}, ValueError, ["mask", "[2, 4, 7, 8]", "[2, 4, 7, 9]"]),
    "mask_per_key_head": ({"mask": np.ones((2, 2, 7, 9), bool)}, ValueError, ["mask", "[2, 2, 7, 9]", "[2, 4, 7, 9]"]),
    "mask_of_wrong_batch": ({"mask": np.ones((3, 1, 7, 9), bool)}, ValueError, ["mask", "[3, 1, 7, 9]"]),
    "mask_rank": ({"mask": np.ones((1, 2, 4, 7, 9), bool)}, ValueError, ["mask", "[1, 2, 4, 7, 9]"]),
    "bias_shape": ({"bias": f32(4, 9, 7)}, ValueError, ["bias", "[4, 9, 7]", "[2, 4, 7, 9]"]),
    "scale_shape": ({"scale": f32(4)}, ValueError, ["scale", "[4]", "scalar"]),
    "scale_integer_array": ({"scale": i32(1)[0:1].reshape(())}, TypeError, ["scale", "int32", "float"]),
    "scale_nan": ({"scale": float("nan")}, ValueError, ["scale", "nan", "finite"]),
    "scale_infinite": ({"scale": float("inf")}, ValueError, ["scale", "inf", "finite"]),
    "scale_beyond_its_dtype": ({"scale": 1e39}, ValueError, ["scale", "1e+39", "finite in float32"]),
    "scale_beyond_any_dtype": ({"scale": 10**400}, ValueError, ["scale", "inf", "finite in float32"]),
    "scale_text": ({"scale": "0.5"}, TypeError, ["scale", "str"]),
    "scale_true": ({"scale": True}, TypeError, ["scale", "True"]),
    "causal_array": ({"is_causal": np.array([True, False])}, TypeError, ["is_causal", "bool"]),
    "causal_integer": ({"is_causal": 1}, TypeError, ["is_causal", "1", "bool"]),
    "negative_window": ({"local_window_size": -1}, ValueError, ["local_window_size", "-1", "negative"]),
    "negative_window_side": ({"local_window_size": (3, -2)}, ValueError, ["local_window_size", "-2", "negative"]),
    "window_float": ({"local_window_size": (3.0, 1)}, TypeError, ["local_window_size", "3.0", "integers"]),
    "window_bool": ({"local_window_size": True}, TypeError, ["local_window_size", "True"]),
    "window_triple": ({"local_window_size": (1, 2, 3)}, TypeError, ["local_window_size", "(1, 2, 3)", "pair"]),
    "query_length_beyond": ({"query_seq_lengths": i32(7, 8)}, ValueError, ["query_seq_lengths", "8", "0..7"]),
    "key_length_beyond": ({"key_value_seq_lengths": i32(10, 3)}, ValueError, ["key_value_seq_lengths", "10", "0..9"]),
    "negative_length": ({"key_value_seq_lengths": i32(-1, 3)}, ValueError, ["key_value_seq_lengths", "-1", "0..9"]),
    "lengths_shape": ({"key_value_seq_lengths": i32(1, 2, 3)}, ValueError, ["key_value_seq_lengths", "[3]", "[2]"]),
    "lengths_float": ({"query_seq_lengths": f32(2)}, TypeError, ["query_seq_lengths", "float32", "integers"]),
    "lengths_bool": ({"query_seq_lengths": np.ones(2, bool)}, TypeError, ["query_seq_lengths", "bool", "integers"]),
    "lengths_ragged": ({"query_seq_lengths": [[1], [1, 2]]}, ValueError, ["query_seq_lengths", "list", "integers"]),
    "length_of_64_bits": ({"query_seq_lengths": np.array([2**32, 3])}, ValueError, ["query_seq_lengths", str(2**32)]),
    "lengths_rank": ({"query_seq_lengths": np.ones((2, 1), np.int32)}, ValueError, ["query_seq_lengths", "[2, 1]"]),
    "offset_float": ({"query_offset": 1.5}, TypeError, ["query_offset", "float", "integer"]),
    "offset_bool": ({"query_offset": True}, TypeError, ["query_offset", "bool", "integer"]),
    "offset_shape": ({"query_offset": i32(1, 2, 3)}, ValueError, ["query_offset", "[3]", "[2]"]),
    "offset_too_far": ({"query_offset": 2**31}, ValueError, ["query_offset", str(2**31), f"..{2**30 - 8}"]),
    "offset_array_too_far": (
        {"query_offset": i32(1, 2**30)},
        ValueError,
        ["query_offset", str(2**30), f"..{2**30 - 8}"],
    ),
    "offset_array_too_low": ({"query_offset": jnp.array([-(2**30), 1])}, ValueError, ["query_offset", str(-(2**30))]),
    "offset_of_64_bits": ({"query_offset": np.array([2**32, 1])}, ValueError, ["query_offset", str(2**32)]),
    "offset_list_of_64_bits": ({"query_offset": [0, -(2**40)]}, ValueError, ["query_offset", str(-(2**40))]),
    "cap_zero": ({"logits_soft_cap": 0.0}, ValueError, ["logits_soft_cap", "0.0", "positive"]),
    "cap_negative": ({"logits_soft_cap": -5.0}, ValueError, ["logits_soft_cap", "-5.0", "positive"]),
    "cap_array": ({"logits_soft_cap": f32(2)}, TypeError, ["logits_soft_cap", "static"]),
    "cap_nan": ({"logits_soft_cap": float("nan")}, ValueError, ["logits_soft_cap", "nan"]),
    "cap_beyond_its_dtype": ({"logits_soft_cap": 1e39}, ValueError, ["logits_soft_cap", "1e+39", "finite in float32"]),
    "cap_beyond_any_dtype": ({"logits_soft_cap": 10**400}, ValueError, ["logits_soft_cap", "finite in float32"]),
    "cap_without_effect": ({"logits_soft_cap": 1e38}, ValueError, ["logits_soft_cap", "1e+38", "..1e+31", "None"]),
    "cap_of_nothing": ({"logits_soft_cap": 1e-40}, ValueError, ["logits_soft_cap", "1e-40", "1.2e-38.."]),
    "slopes_shape": ({"alibi_slopes": f32(2)}, ValueError, ["alibi_slopes", "[2]", "[N] = [4]", "[..., N] = [2, 4]"]),
    "slopes_ragged": ({"alibi_slopes": [[1.0], [1.0, 2.0]]}, ValueError, ["alibi_slopes", "list", "[N]"]),
    "slopes_integer": ({"alibi_slopes": i32(1, 2, 3, 4)}, TypeError, ["alibi_slopes", "int32", "floating"]),
    "sinks_shape": ({"sinks": f32(4, 2)}, ValueError, ["sinks", "[4, 2]"]),
    "sinks_integer": ({"sinks": i32(1, 2, 3, 4)}, TypeError, ["sinks", "int32", "floating"]),
    "query_segments_alone": (
        {"query_segment_ids": np.ones((2, 7), np.int32)},
        ValueError,
        ["key_value_segment_ids", "given"],
    ),
    "key_segments_alone": ({"key_value_segment_ids": np.ones((2, 9), np.int32)}, ValueError, ["query_segment_ids"]),
    "segments_shape": (
        {"query_segment_ids": np.ones((2, 9), np.int32), "key_value_segment_ids": np.ones((2, 9), np.int32)},
        ValueError,
        ["query_segment_ids", "[2, 9]", "[2, 7]"],
    ),
    "query_segments_of_64_bits": (
        {"query_segment_ids": np.full((2, 7), 2**32), "key_value_segment_ids": np.zeros((2, 9), np.int32)},
        ValueError,
        ["query_segment_ids", str(2**32), f"{-(2**31)}..{2**31 - 1}"],
    ),
    "key_segments_of_64_bits": (
        {"query_segment_ids": np.zeros((2, 7), np.int32), "key_value_segment_ids": np.full((2, 9), -(2**40))},
        ValueError,
        ["key_value_segment_ids", str(-(2**40)), f"{-(2**31)}..{2**31 - 1}"],
    ),
    "ranges_shape": ({"key_value_ranges": np.ones((2, 9, 2), np.int32)}, ValueError, ["key_value_ranges", "[2, 9, 2]"]),
    "ranges_float": ({"key_value_ranges": f32(2, 7, 2)}, TypeError, ["key_value_ranges", "float32", "integers"]),
    "segments_float": (
        {"query_segment_ids": f32(2, 7), "key_value_segment_ids": np.ones((2, 9), np.int32)},
        TypeError,
        ["query_segment_ids", "float32", "integers"],
    ),
    "block_mask_type": ({"block_mask": np.ones((1, 1), bool)}, TypeError, ["block_mask", "ndarray", "BlockMask"]),
    "block_mask_shape": (
        {"block_mask": BlockMask(np.ones((2, 2), bool), (4, 4))},
        ValueError,
        ["block_mask", "[2, 2]", "[2, 3]"],
    ),
    "block_mask_float": ({"block_mask": BlockMask(f32(2, 3), (4, 4))}, TypeError, ["block_mask", "float32", "bool"]),
    "block_mask_heads": (
        {"block_mask": BlockMask(np.ones((3, 2, 3), bool), (4, 4))},
        ValueError,
        ["block_mask", "[3, 2, 3]"],
    ),
    "dropout_without_seed": ({"dropout_rate": 0.1}, ValueError, ["dropout_seed", "None", "0.1"]),
    "dropout_of_all": ({"dropout_rate": 1.0, "dropout_seed": 1}, ValueError, ["dropout_rate", "1.0", "[0, 1)"]),
    "dropout_negative": ({"dropout_rate": -0.1, "dropout_seed": 1}, ValueError, ["dropout_rate", "-0.1"]),
    "dropout_text": ({"dropout_rate": "0.1", "dropout_seed": 1}, TypeError, ["dropout_rate", "0.1"]),
    "seed_float": ({"dropout_rate": 0.1, "dropout_seed": 1.5}, TypeError, ["dropout_seed", "float", "integer"]),
    "seed_shape": ({"dropout_rate": 0.1, "dropout_seed": i32(1, 2, 3)}, ValueError, ["dropout_seed", "[3]", "[2]"]),
    "seed_word_too_large": (
        {"dropout_rate": 0.1, "dropout_seed": [1, 2**33]},
        ValueError,
        ["dropout_seed", str(2**33), f"..{2**32 - 1}"],
    ),
    "seed_word_too_low": (
        {"dropout_rate": 0.1, "dropout_seed": [-(2**40), 1]},
        ValueError,
        ["dropout_seed", str(-(2**40))],
    ),
    "seed_bool": ({"dropout_rate": 0.1, "dropout_seed": True}, TypeError, ["dropout_seed", "bool"]),
    "implementation": ({"implementation": "cudnn"}, ValueError, ["implementation", "cudnn", "blockwise"]),
    "implementation_in_tuple": ({"implementation": ("metal", "cudnn")}, ValueError, ["implementation", "cudnn", "xla"]),
    "no_implementation": ({"implementation": ()}, ValueError, ["implementation", "()", "blockwise"]),
    "implementation_number": ({"implementation": 3}, ValueError, ["implementation", "3", "tuple"]),
    "unknown_argument": ({"causal": True}, TypeError, ["causal"]),
}
FUNCTIONS = (jax_mfa.dot_product_attention, jax_mfa.flash_attention, jax_mfa.explain)


def _assert_message(caught, words):
    message = str(caught.value)
    missing = [word for word in words if word not in message]
    assert not missing, f"{missing} not in {message!r}"
    assert re.search(rf"\b{re.escape(words[0])}\b", message), f"{words[0]} is not named in {message!r}"


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", BAD)
def test_an_error_names_the_argument_what_was_seen_and_what_was_expected(name, function):
    change, error, words = BAD[name]
    with pytest.raises(error) as caught:
        function(**{"query": Q, "key": K, "value": V, **change})
    assert type(caught.value) is error
    _assert_message(caught, words)


@pytest.mark.parametrize("name", BAD)
def test_the_error_comes_at_trace_time(name):
    change, error, words = BAD[name]
    arguments = {"query": Q, "key": K, "value": V, **change}
    traced = {k: x for k, x in arguments.items() if isinstance(x, np.ndarray) and k in ("query", "key", "value")}
    if "shape" in name or "float" in name or "differ" in name:  # what a tracer shows as well
        traced = {k: x for k, x in arguments.items() if isinstance(x, np.ndarray) and k != "logits_soft_cap"}
    rest = {k: x for k, x in arguments.items() if k not in traced}
    with pytest.raises(error) as caught:
        jax.eval_shape(lambda traced: jax_mfa.dot_product_attention(**traced, **rest), traced)
    _assert_message(caught, words)


@pytest.mark.parametrize("size", [0, (0, 4), (4, -1), (4,), (4.0, 4), (True, 2), "44"], ids=str)
def test_a_block_size_is_a_pair_of_positive_integers(size):
    with pytest.raises(ValueError, match="block_size"):
        BlockMask(np.ones((2, 3), bool), size)


@pytest.mark.parametrize("name", ["is_causal", "local_window_size", "logits_soft_cap", "dropout_rate"])
def test_a_static_argument_may_not_be_traced(name):
    good = {"is_causal": True, "local_window_size": 3, "logits_soft_cap": 2.0, "dropout_rate": 0.5}[name]
    with pytest.raises(TypeError, match=name):
        jax.jit(lambda x: jax_mfa.dot_product_attention(Q, K, V, dropout_seed=1, **{name: x}))(good)


def test_a_length_out_of_range_that_is_traced_sees_no_more_than_there_is():
    # values cannot be checked while tracing: too long means all, negative none
    for implementation in AVAILABLE:
        run = jax.jit(lambda x, f=implementation: f.attend(Q, K, V, key_value_seq_lengths=x))
        wanted = jax.jit(lambda x, f=implementation: f.attend(Q, K, V, key_value_seq_lengths=x))(i32(9, 0))
        np.testing.assert_array_equal(run(i32(1000, -5)), wanted)


@pytest.mark.share(2)
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_an_offset_out_of_range_that_is_traced_is_as_far_as_one_may_be(dtype):
    # values cannot be checked while tracing: from too far right all is seen, from too far left nothing
    limits = np.iinfo(dtype)
    for implementation in AVAILABLE:
        with types_of("float64" if dtype == "int64" else "float32"):
            run = jax.jit(lambda x, f=implementation: f.attend(Q, K, V, is_causal=True, query_offset=x))
            got = run(np.array([limits.max, limits.min], dtype))
        wanted = implementation.attend(Q, K, V, key_value_seq_lengths=i32(9, 0))
        assert_allclose(got, wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("cap", [2e-38, 1e30])
def test_a_soft_cap_at_its_limits_is_a_soft_cap(cap):
    for implementation in AVAILABLE:
        got = implementation.attend(Q, K, V, logits_soft_cap=cap)
        # caps all scores to nothing, or none
        keywords = {"scale": 0.0} if cap < 1 else {}
        assert_allclose(got, implementation.attend(Q, K, V, **keywords), rtol=0, atol=1e-5)


def test_what_float32_cannot_hold_float64_can():
    with x64():
        wide = [np.asarray(x, np.float64) for x in (Q, K, V)]
        got = jax_mfa.dot_product_attention(*wide, logits_soft_cap=1e39)
        assert_allclose(got, jax_mfa.dot_product_attention(*wide), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["query", "key", "value", "mask", "sinks", "key_value_seq_lengths", "block_mask"])
@pytest.mark.parametrize(
    "function",
    [jax_mfa.dot_product_attention, jax_mfa.flash_attention, lambda *x, **y: jax_mfa.decode_attention(*x, 9, **y)],
    ids=["dot_product", "flash", "decode"],
)
def test_a_shape_in_place_of_an_array_is_named_with_what_to_do(function, name):
    arguments = {"query": Q, "key": K, "value": V}
    shape = jax.ShapeDtypeStruct((2, 3), bool)
    if name == "key_value_seq_lengths" and "<lambda>" in function.__name__:
        pytest.skip("decode_attention has no such argument")
    call = {**arguments, name: BlockMask(shape, (4, 4)) if name == "block_mask" else shape}
    query, key, value = (call.pop(x) for x in ("query", "key", "value"))
    with pytest.raises(TypeError, match=rf"^{name} must be an array .* got a jax.ShapeDtypeStruct: .*explain"):
        function(query, key, value, **call)


@pytest.mark.parametrize("function", ["flash_attention", "decode_attention", "flash_attention_varlen"])
def test_queries_do_not_lie_in_pages(function):
    query, key, value = qkv(B=1, T=8, S=8)
    pages = PagedArray(query.reshape(2, 4, *query.shape[2:]), jnp.arange(2)[None])
    lengths = {"decode_attention": [8], "flash_attention_varlen": [np.array([0, 8])]}.get(function, [])
    with pytest.raises(ValueError, match=r"query must be an array \(floating .*\), got a PagedArray"):
        getattr(jax_mfa, function)(pages, key, value, *lengths)


@pytest.mark.parametrize("value", [True, False])
def test_flash_attention_needs_no_return_residual_and_says_so(value):
    with pytest.raises(TypeError, match=r"flash_attention\(\) .*'return_residual': the log-sum-exp is always returned"):
        jax_mfa.flash_attention(Q, K, V, return_residual=value)


@pytest.mark.parametrize("axis", range(1, 4))
@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_symbolic_lengths_and_heads_are_refused_by_name(name, axis):
    from jax import export

    arguments = {"query": Q, "key": K, "value": V}
    sizes = [*map(str, arguments[name].shape)]
    sizes[axis] = "length"
    symbolic = jax.ShapeDtypeStruct(export.symbolic_shape(", ".join(sizes)), np.float32)
    run = jax.jit(lambda x: jax_mfa.dot_product_attention(**{**arguments, name: x}))
    with pytest.raises(NotImplementedError, match=rf"^{name} may have symbolic dimensions only .* got \[.*length"):
        export.export(run)(symbolic)


def test_an_operand_may_not_have_a_symbolic_batch_alone():
    from jax import export

    mask = jax.ShapeDtypeStruct(export.symbolic_shape("batch, 1, 7, 9"), np.bool_)
    run = jax.jit(lambda mask: jax_mfa.dot_product_attention(Q, K, V, mask=mask))
    with pytest.raises(ValueError, match=r"mask must broadcast to .*\[2, 4, 7, 9\], got shape \[batch, 1, 7, 9\]"):
        export.export(run)(mask)


def test_keys_of_several_seeds_are_refused():
    keys = jax.random.split(jax.random.key(0), 2)
    with pytest.raises(ValueError, match="dropout_seed"):
        jax_mfa.dot_product_attention(Q, K, V, dropout_rate=0.1, dropout_seed=keys)


QUANTISED = jax_mfa.quantize(K)
OTHERS = (
    jax.ShapeDtypeStruct((2, 9, 2, 8), np.float32),
    "foo",
    [[1.0], [1.0, 2.0]],
    object(),
    np.array(["a"]),
    np.float32,
)


@pytest.mark.parametrize(
    "name",
    [
        *(
            "bias",
            "mask",
            "scale",
            "query_offset",
            "query_seq_lengths",
            "key_value_seq_lengths",
            "alibi_slopes",
            "sinks",
        ),
        *("query_segment_ids", "key_value_ranges", "block_mask", "is_causal", "local_window_size", "logits_soft_cap"),
        *("dropout_rate", "dropout_seed", "implementation", "return_residual"),
    ],
)
def test_what_is_no_such_argument_at_all_is_named(name):
    both = {"key_value_segment_ids": np.ones((2, 9), np.int32)} if name == "query_segment_ids" else {}
    for other in (QUANTISED, *OTHERS, K):
        with pytest.raises((TypeError, ValueError), match=rf"^{name} must\b") as caught:
            jax_mfa.dot_product_attention(Q, K, V, **both, **{name: other})
        assert len(str(caught.value)) < 300  # never what an array holds


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (jax_mfa.merge, {"out_a": f32(3, 2, 8), "lse_a": f32(3, 2), "out_b": f32(3, 2, 8), "lse_b": f32(3, 2)}),
        (jax_mfa.decode_attention, {"query": Q, "key": K, "value": V, "lengths": i32(8, 9)}),
        (jax_mfa.zigzag, {"x": f32(2, 8), "devices": 2, "axis": 1}),
        (BlockMask.from_mask, {"mask": np.ones((4, 4), bool), "block_size": (2, 2)}),
        (BlockMask.from_function, {"function": lambda i, j: i >= j, "queries": 4, "keys": 4, "block_size": (2, 2)}),
    ],
    ids=lambda x: x.__name__ if callable(x) else "",
)
def test_nor_of_other_functions(function, arguments):
    function(**arguments)
    for name in arguments:
        for other in OTHERS:
            with pytest.raises((TypeError, ValueError), match=rf"\b{name}\b"):
                function(**{**arguments, name: other})


def test_a_good_call_stays_good():
    # the base that every bad call changes in one place
    assert jax_mfa.dot_product_attention(Q, K, V).shape == (2, 7, 4, 8)


@pytest.mark.parametrize("function", [*FUNCTIONS, lambda *x, **y: jax_mfa.decode_attention(*x, 9, **y)])
def test_an_unknown_argument_is_named_beside_a_public_function(function):
    with pytest.raises(TypeError, match=r"(explain|\w+_attention)\(\) got an unexpected .*'foo'"):
        function(Q, K, V, foo=1)
