"""Builders of block masks: each allows a block exactly where its pattern allows one of the block's scores."""

import jax.numpy as jnp
import numpy as np
import pytest

from jax_mfa import BlockMask

SIZES = [(4, 4), (3, 5), (8, 2), (64, 64)]
T, S = 29, 37
t, s = np.arange(T)[:, None], np.arange(S)[None, :]


def blocks_of(mask, size):
    """The definition, block by block."""
    rows, columns = size
    i, j = -(-mask.shape[0] // rows), -(-mask.shape[1] // columns)
    return np.array(
        [[mask[a * rows : (a + 1) * rows, b * columns : (b + 1) * columns].any() for b in range(j)] for a in range(i)]
    )


PATTERNS = {
    "causal": (lambda z: BlockMask.causal(T, S, z), s <= t),
    "causal_offset": (lambda z: BlockMask.causal(T, S, z, query_offset=-6), s <= t - 6),
    "window": (lambda z: BlockMask.window(T, S, z, 5, 2, query_offset=3), (s >= t + 3 - 5) & (s <= t + 3 + 2)),
    "prefix_lm": (lambda z: BlockMask.prefix_lm(T, S, z, 10), (s < 10) | (s <= t)),
}


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", PATTERNS)
def test_a_block_is_allowed_where_the_pattern_allows_one_of_its_scores(name, size):
    build, mask = PATTERNS[name]
    wanted = blocks_of(mask, size)
    # the last block may reach beyond the matrix, where a pattern of positions goes on
    inside = build(size).blocks[: T // size[0], : S // size[1]]
    np.testing.assert_array_equal(inside, wanted[: T // size[0], : S // size[1]])
    assert (build(size).blocks >= wanted).all()
    np.testing.assert_array_equal(BlockMask.from_mask(mask, size).blocks, wanted)
    np.testing.assert_array_equal(BlockMask.from_mask(jnp.asarray(mask), size).blocks, wanted)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_documents_see_themselves_alone(size):
    lengths = [3, 11, 1, 20]
    document = np.repeat(np.arange(4), lengths)
    wanted = blocks_of(document[:, None] == document[None, :], size)
    np.testing.assert_array_equal(BlockMask.documents(lengths, size).blocks, wanted)


def test_strided_holds_the_diagonal_and_every_nth_column_before_it():
    got = BlockMask.strided(24, 24, (4, 4), 3).blocks
    i, j = np.arange(6)[:, None], np.arange(6)[None, :]
    np.testing.assert_array_equal(got, (i == j) | ((j % 3 == 2) & (j <= i)))


def test_masks_of_one_block_size_combine():
    a, b = BlockMask.causal(T, S, (4, 4)), BlockMask.window(T, S, (4, 4), 3, 9)
    np.testing.assert_array_equal((a & b).blocks, a.blocks & b.blocks)
    np.testing.assert_array_equal((a | b).blocks, a.blocks | b.blocks)
    with pytest.raises(ValueError, match="share a block size"):
        a & BlockMask.causal(T, S, (4, 2))


def test_bad_input_is_named():
    with pytest.raises(TypeError, match=r"mask must be bool \[..., T, S\], got float32\[3, 4\]"):
        BlockMask.from_mask(np.ones((3, 4), np.float32), (2, 2))
    with pytest.raises(ValueError, match="block_size must be a pair"):
        BlockMask.causal(3, 4, (2, 0))
    with pytest.raises(ValueError, match="stride must be at least 1"):
        BlockMask.strided(3, 4, (2, 2), 0)
