"""Builders of block masks: each allows a block exactly where its pattern allows one of the block's scores."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jax_mfa
from jax_mfa import BlockMask

pytestmark = pytest.mark.first_tier

T, S = 29, 37


def blocks_of(mask, size):
    """The definition, block by block."""
    rows, columns = size
    i, j = -(-mask.shape[0] // rows), -(-mask.shape[1] // columns)
    return np.array(
        [[mask[a * rows : (a + 1) * rows, b * columns : (b + 1) * columns].any() for b in range(j)] for a in range(i)],
        bool,
    ).reshape(i, j)


@st.composite
def built(draw):
    """A builder's block mask of ragged sizes, and the bool mask `[T, S]` of its pattern."""
    T, S = draw(st.tuples(st.integers(0, 40), st.integers(0, 40)))
    size = draw(st.tuples(st.integers(1, 12), st.integers(1, 12)))
    offset = draw(st.integers(-45, 45))
    left, right, prefix, stride = (draw(st.integers(least, 45)) for least in (0, 0, 0, 1))
    t, s = np.arange(T)[:, None], np.arange(S)[None, :]
    name = draw(st.sampled_from(["causal", "window", "strided", "prefix_lm", "documents"]))
    if name == "causal":
        return BlockMask.causal(T, S, size, offset), s <= t + offset
    if name == "window":
        mask = (s >= t + offset - left) & (s <= t + offset + right)
        return BlockMask.window(T, S, size, left, right, offset), mask
    if name == "strided":
        columns = (s // size[1]) % stride == stride - 1
        return BlockMask.strided(T, S, size, stride), (s == t) | (columns & (s <= t))
    if name == "prefix_lm":
        return BlockMask.prefix_lm(T, S, size, prefix), (s < prefix) | (s <= t)
    lengths = draw(st.lists(st.integers(0, 15), min_size=1, max_size=5))
    document = np.repeat(np.arange(len(lengths)), lengths)
    return BlockMask.documents(lengths, size), document[:, None] == document[None, :]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(built())
def test_a_builder_allows_the_blocks_in_which_its_pattern_allows_a_score(case):
    got, mask = case
    np.testing.assert_array_equal(got.blocks, blocks_of(mask, got.block_size))
    np.testing.assert_array_equal(got.blocks, BlockMask.from_mask(mask, got.block_size).blocks)


def test_a_pattern_stops_where_rows_and_columns_do():
    # in the last blocks a position would go on
    assert not BlockMask.causal(4, 3, (8, 5), query_offset=-4).blocks.any()
    assert not BlockMask.window(4, 3, (8, 5), 0, query_offset=3).blocks.any()


@pytest.mark.parametrize("lead", [(), (2,), (2, 3)], ids=str)
def test_a_mask_may_have_leading_axes_and_be_traced(lead):
    mask = np.random.default_rng(0).random((*lead, 7, 9)) < 0.1
    got = jax.jit(lambda x: BlockMask.from_mask(x, (2, 4)))(mask)
    wanted = np.array([blocks_of(x, (2, 4)) for x in mask.reshape(-1, 7, 9)]).reshape(*lead, 4, 3)
    np.testing.assert_array_equal(got.blocks, wanted)


def test_masks_of_one_block_size_combine():
    a, b = BlockMask.causal(T, S, (4, 4)), BlockMask.window(T, S, (4, 4), 3, 9)
    np.testing.assert_array_equal((a & b).blocks, a.blocks & b.blocks)
    np.testing.assert_array_equal((a | b).blocks, a.blocks | b.blocks)
    with pytest.raises(ValueError, match="share a block size"):
        a & BlockMask.causal(T, S, (4, 2))


def test_functions_promote_no_rank():
    with jax.numpy_rank_promotion("raise"):
        found = BlockMask.from_function(jax_mfa.masks.causal(), 5, 7, (2, 2))
    np.testing.assert_array_equal(found.blocks, np.tri(3, 4))


def test_bad_input_is_named():
    with pytest.raises(TypeError, match=r"mask must be bool \[..., T, S\], got float32\[3, 4\]"):
        BlockMask.from_mask(np.ones((3, 4), np.float32), (2, 2))
    with pytest.raises(ValueError, match="block_size must be a pair"):
        BlockMask.causal(3, 4, (2, 0))
    with pytest.raises(ValueError, match="stride must be at least 1"):
        BlockMask.strided(3, 4, (2, 2), 0)


BAD = {
    "negative queries": (lambda: BlockMask.causal(-1, 4, (2, 2)), ValueError, "queries must be at least 0, got -1"),
    "negative keys": (lambda: BlockMask.strided(3, -4, (2, 2), 1), ValueError, "keys must be at least 0, got -4"),
    "queries": (lambda: BlockMask.prefix_lm(3.0, 4, (2, 2), 1), TypeError, "queries must be an integer, got 3.0"),
    "offset": (lambda: BlockMask.causal(3, 4, (2, 2), 0.5), TypeError, "query_offset must be an integer, got 0.5"),
    "window's offset": (
        lambda: BlockMask.window(3, 4, (2, 2), 1, query_offset="1"),
        TypeError,
        "query_offset must be an integer, got '1'",
    ),
    "left": (lambda: BlockMask.window(3, 4, (2, 2), -1), ValueError, "left must be at least 0, got -1"),
    "right": (lambda: BlockMask.window(3, 4, (2, 2), 1, None), TypeError, "right must be an integer, got None"),
    "stride": (lambda: BlockMask.strided(3, 4, (2, 2), 1.5), TypeError, "stride must be an integer, got 1.5"),
    "prefix": (lambda: BlockMask.prefix_lm(3, 4, (2, 2), -2), ValueError, "prefix must be at least 0, got -2"),
    "prefix of truth": (lambda: BlockMask.prefix_lm(3, 4, (2, 2), True), TypeError, "prefix must be an integer"),
    "no documents": (lambda: BlockMask.documents([], (2, 2)), ValueError, r"lengths must .* at least one .* \[\]"),
    "negative document": (lambda: BlockMask.documents([3, -1], (2, 2)), ValueError, r"lengths\[1\] must be .*, got -1"),
    "half a document": (lambda: BlockMask.documents([2.5], (2, 2)), TypeError, r"lengths\[0\] must be .*, got 2.5"),
    "ragged documents": (lambda: BlockMask.documents([[1], [2, 3]], (2, 2)), TypeError, r"lengths\[0\] .*, got \[1\]"),
    "one number": (lambda: BlockMask.documents(3, (2, 2)), ValueError, "lengths must be a sequence .*, got 3"),
}


@pytest.mark.parametrize("name", BAD)
def test_sizes_of_a_builder_are_integers_in_range(name):
    build, error, message = BAD[name]
    with pytest.raises(error, match=message):
        build()


@pytest.mark.parametrize(
    "lengths", [np.array([3, 0, 2]), jnp.array([3, 0, 2]), (3, 0, 2), [np.int32(3), 0, 2]], ids=str
)
def test_documents_take_any_sequence_of_integers_some_perhaps_empty(lengths):
    wanted = BlockMask.documents([3, 2], (2, 1)).blocks
    np.testing.assert_array_equal(BlockMask.documents(lengths, (2, 1)).blocks, wanted)


def test_a_mask_combines_with_masks_only():
    mask = BlockMask.causal(3, 4, (2, 2))
    for combine in (lambda: mask & 3, lambda: 3 | mask, lambda: mask | mask.blocks):
        with pytest.raises(TypeError, match="unsupported operand"):
            combine()


def test_a_mask_is_a_pytree():
    mask = BlockMask.causal(8, 8, (4, 4))
    back = jax.jit(lambda x: x & x)(mask)
    assert isinstance(back, BlockMask) and back.block_size == (4, 4)
    np.testing.assert_array_equal(back.blocks, mask.blocks)
    abstract = jax.eval_shape(lambda x: x, mask)
    assert abstract.blocks.shape == (2, 2) and jax.tree.structure(abstract) == jax.tree.structure(mask)


def test_explain_takes_a_mask_of_abstract_blocks():
    x = jax.ShapeDtypeStruct((1, 8, 2, 16), jnp.float32)
    blocks = jax.ShapeDtypeStruct((2, 2), bool)
    assert jax_mfa.explain(x, x, x, block_mask=BlockMask(blocks, (4, 4))).implementation in ("metal", "blockwise")
    with pytest.raises(ValueError, match=r"block_mask .* \[2, 4\] .*, got shape \[2, 2\]"):
        jax_mfa.explain(x, x, x, block_mask=BlockMask(blocks, (4, 2)))


def test_masks_of_equal_contents_are_one_static_argument():
    x, traced = jnp.ones((1, 8, 2, 4)), []

    def attend(x, mask):
        traced.append(mask)
        return jax_mfa.dot_product_attention(x, x, x, block_mask=mask, implementation="blockwise")

    run = jax.jit(attend, static_argnums=1)
    blocks = np.random.default_rng(5).random((2, 2, 4)) < 0.5
    mask = BlockMask(blocks, (4, 2))
    ways = (copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)), lambda x: jax.tree.map(jnp.asarray, x))
    for other in (
        mask,
        *(way(mask) for way in ways),
        BlockMask(blocks.copy(), [4, 2]),
        BlockMask(blocks.tolist(), (4, 2)),
    ):
        assert other == mask and hash(other) == hash(mask) and len({mask, other}) == 1
        run(x, other)
    assert len(traced) == 1
    others = [BlockMask(~blocks, (4, 2)), BlockMask(blocks, (2, 4)), BlockMask(blocks[None], (4, 2)), None]
    assert not any(mask == other for other in others)


def test_a_mask_keeps_what_it_was_made_of():
    blocks = np.zeros((2, 2), bool)
    mask, same = BlockMask(blocks, (4, 4)), BlockMask(blocks.copy(), (4, 4))
    assert hash(mask) == hash(same)
    blocks[0, 0] = True
    assert mask == same and not mask.blocks.any()
    with pytest.raises(ValueError, match="read-only"):
        mask.blocks[0, 0] = True


def test_traced_and_abstract_masks_compare():
    shape = jax.eval_shape(lambda: BlockMask(jnp.ones((2, 2), bool), (4, 4)))
    assert shape == jax.eval_shape(lambda: BlockMask(jnp.zeros((2, 2), bool), (4, 4))) and len({shape, shape}) == 1

    @jax.jit
    def compare(mask):
        assert mask == mask and mask != BlockMask(mask.blocks & True, (4, 4)) and len({mask}) == 1
        return mask

    assert compare(BlockMask(np.eye(2, dtype=bool), (4, 4))) == BlockMask(np.eye(2, dtype=bool), (4, 4))
