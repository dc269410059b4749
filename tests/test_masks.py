"""Ready-made masks, and the lists of blocks of any mask: each is what a dense definition in numpy says."""

import itertools
import pickle
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import assert_close, qkv
from hypothesis import given, settings
from hypothesis import strategies as st
from test_structure import LENGTH, Counter

import jax_mfa
from jax_mfa import BlockMask, masks
from jax_mfa.flex import blocks

pytestmark = pytest.mark.first_tier

B, N, T, S = 2, 3, 29, 37
RNG = np.random.default_rng(7)
IDS = RNG.integers(0, 4, (B, S))
PARENTS = np.array([-1, 0, 0, 1, 1, 2, -1, 5, 7])
CHOSEN = RNG.integers(-1, 8, (B, 1, 6, 5))


def dense(mask_mod, queries=T, keys=S, offset=0):
    """What a function of numbers says of every score, `[B, N, T, S]`."""
    index = itertools.product(range(B), range(N), range(offset, offset + queries), range(keys))
    return np.array([mask_mod(*at) for at in index], bool).reshape(B, N, queries, keys)


def evaluated(mask, queries=T, keys=S, offset=0):
    """A mask as JAX evaluates it, `[B, N, T, S]`."""
    at = [jnp.arange(x, dtype=jnp.int32) for x in (B, N, queries, keys)]
    at[2] += offset
    for i in reversed(range(4)):
        mask = jax.vmap(mask, [0 if i == axis else None for axis in range(4)])
    return np.asarray(mask(*at))


def neighbours(size, kernel, dilation, causal):
    """Which keys each query of one axis sees, as sets: NATTEN's definition, of the list of a query's group."""
    found = []
    for i in range(size):
        group = [*range(i % dilation, size, dilation)]
        place = group.index(i)
        start = min(max(place - kernel // 2, 0), len(group) - kernel)
        found.append(set(group[max(place - kernel + 1, 0) : place + 1] if causal else group[start : start + kernel]))
    return found


def neighborhood(shape, *by_axis):
    sets = [neighbours(*x) for x in zip(shape, *by_axis)]
    at = [*np.ndindex(*shape)]
    return lambda b, n, t, s: all(y in near[x] for near, x, y in zip(sets, at[t], at[s]))


def line_of(node):
    """A node of the tree and its ancestors."""
    return {node} if node < 0 else {node} | line_of(PARENTS[node])


def in_tree(start):
    def see(b, n, t, s):
        first = start if np.ndim(start) == 0 else start[b]
        return s <= t if t < first else s < first or (s - first) in line_of(t - first)

    return see


# a mask, its definition, and the sizes that it is of if not T and S
MASKS = {
    "causal": (masks.causal(), lambda b, n, t, s: s <= t),
    "window": (masks.window(4, 3), lambda b, n, t, s: t - 4 <= s <= t + 3),
    "window of one side": (masks.window(None, 2), lambda b, n, t, s: s <= t + 2),
    "window past": (masks.window(5), lambda b, n, t, s: t - 5 <= s <= t),
    "window of any": (masks.window(2**40, None), lambda b, n, t, s: True),
    "prefix": (masks.prefix(6), lambda b, n, t, s: s < 6),
    "prefixes": (masks.prefix(np.array([6, 30])), lambda b, n, t, s: s < (6, 30)[b]),
    "prefix language model": (masks.causal() | masks.prefix(9), lambda b, n, t, s: s <= t or s < 9),
    "sink window": (masks.sink_window(3, 5), lambda b, n, t, s: s <= t and (s < 3 or s >= t - 5)),
    "dilated": (masks.dilated(3, 4), lambda b, n, t, s: s in {t + 4 * i for i in range(-3, 4)}),
    "chunked": (masks.chunked(8), lambda b, n, t, s: s <= t and s // 8 == t // 8),
    "documents": (masks.documents(IDS), lambda b, n, t, s: IDS[b, t] == IDS[b, s]),
    "one list of documents": (masks.documents(IDS[0]), lambda b, n, t, s: IDS[0, t] == IDS[0, s]),
    "jagged": (
        masks.documents(lengths=[5, 0, 17, 3]),
        lambda b, n, t, s: np.searchsorted([5, 22, 25], t, "right") == np.searchsorted([5, 22, 25], s, "right"),
    ),
    "tree": (masks.tree(PARENTS, 20), in_tree(20), (29, 29)),
    "trees": (masks.tree(np.stack([PARENTS] * 2), np.array([20, 3])), in_tree((20, 3)), (12, 29)),
    "tree alone": (masks.tree(PARENTS), in_tree(0), (9, 9)),
    "chosen blocks": (
        masks.top_k_blocks(CHOSEN, (5, 6)),
        lambda b, n, t, s: s // 6 in CHOSEN[b, 0, t // 5],
    ),
    "chosen blocks of all": (masks.top_k_blocks(CHOSEN[1, 0], 5), lambda b, n, t, s: s // 5 in CHOSEN[1, 0, t // 5]),
    "line": (masks.neighborhood(37, 7), neighborhood([37], [7], [1], [False]), (37, 37)),
    "even line": (masks.neighborhood((31,), 4, 3), neighborhood([31], [4], [3], [False]), (31, 31)),
    "image": (masks.neighborhood((5, 7), (3, 4)), neighborhood([5, 7], [3, 4], [1, 1], [False] * 2), (35, 35)),
    "dilated image": (
        masks.neighborhood((6, 7), 3, (2, 1), (False, True)),
        neighborhood([6, 7], [3, 3], [2, 1], [False, True]),
        (42, 42),
    ),
    "volume": (
        masks.neighborhood((3, 4, 5), (2, 3, 2), (1, 1, 2), (True, False, False)),
        neighborhood([3, 4, 5], [2, 3, 2], [1, 1, 2], [True, False, False]),
        (60, 60),
    ),
}


@pytest.mark.share(4)
@pytest.mark.parametrize("name", MASKS)
def test_a_ready_made_mask_is_what_its_definition_says(name):
    mask, definition, *sizes = MASKS[name]
    np.testing.assert_array_equal(evaluated(mask, *(sizes or [()])[0]), dense(definition, *(sizes or [()])[0]))


def states(mask, size):
    """How blocks of a dense mask `[..., T, S]` are: 0 hidden, 1 seen in part, 2 whole; by the definition."""
    rows, columns = (range(0, length, step) for length, step in zip(mask.shape[-2:], size))
    found = [[mask[..., i : i + size[0], j : j + size[1]] for j in columns] for i in rows]
    count = lambda x: x.any((-2, -1)).astype(int) + x.all((-2, -1))
    return np.stack([np.stack([count(x) for x in row], -1) for row in found], -2)


def assert_lists(found, mask):
    """That a block mask is that of a dense mask."""
    wanted = states(mask, found.block_size)
    np.testing.assert_array_equal(found.blocks, np.broadcast_to(wanted > 0, found.blocks.shape))
    np.testing.assert_array_equal(found.whole, np.broadcast_to(wanted == 2, found.blocks.shape))


@pytest.mark.share(4)
@pytest.mark.parametrize("name", MASKS)
def test_its_blocks_are_those_of_the_dense_pattern(name):
    mask, definition, *sizes = MASKS[name]
    queries, keys = sizes[0] if sizes else (T, S)
    for size in ((4, 7), (16, 5)):
        found = BlockMask.from_function(mask, queries, keys, size, batch=B, heads=N)
        assert found.blocks.shape == (B, N, -(-queries // size[0]), -(-keys // size[1]))
        assert_lists(found, dense(definition, queries, keys))


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.data())
def test_blocks_of_any_size_in_chunks_and_pieces_of_any_are_those_of_the_dense_pattern(data):
    queries, keys, *size = (data.draw(st.integers(1, most)) for most in (20, 20, 24, 24))
    chunk, piece, offset = (data.draw(st.integers(*x)) for x in ((1, 200), (1, 9), (-9, 9)))
    table = np.random.default_rng(data.draw(st.integers(0, 99))).random((B, queries + 9, keys)) < 0.8
    seen = jnp.asarray(table)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "CHUNK", chunk)
        patch.setattr(blocks, "PIECE", piece)
        blocks._chunk.clear_cache()
        # a position before the first is the first
        mask = lambda b, n, t, s: seen[b, jnp.maximum(t, 0), s]
        found = BlockMask.from_function(mask, queries, keys, tuple(size), batch=B, query_offset=offset)
    blocks._chunk.clear_cache()
    at = np.maximum(np.arange(queries) + offset, 0)
    assert_lists(found, table[:, None, at])


@pytest.mark.parametrize("batch, heads, lead", [(None, None, ()), (None, N, (N,)), (B, None, (B, 1)), (B, N, (B, N))])
def test_blocks_have_axes_of_what_is_given(batch, heads, lead):
    mask = BlockMask.from_function(masks.causal(), T, S, (8, 8), batch=batch, heads=heads)
    assert mask.blocks.shape == (*lead, 4, 5)
    assert_lists(mask, np.arange(S) <= np.arange(T)[:, None])


@pytest.mark.parametrize("index, name", [(0, "batch"), (1, "heads")])
def test_a_mask_of_batch_entries_or_heads_needs_their_number(index, name):
    tables = jnp.arange(3)
    for mask in (lambda *at: at[3] < tables[at[index]], masks.causal() & (lambda *at: at[index] < 1)):
        with pytest.raises(ValueError, match=f"{name} must be given for a mask_mod that depends on {'bn'[index]}"):
            BlockMask.from_function(mask, T, S, (8, 8))


def test_no_query_or_no_key_has_no_blocks():
    for queries, keys in ((0, 5), (5, 0)):
        found = BlockMask.from_function(masks.causal(), queries, keys, (2, 2))
        assert found.blocks.shape == found.whole.shape == (-(-queries // 2), -(-keys // 2))


@pytest.mark.parametrize("function", [lambda i, j: i >= j, lambda i, j, by=0, to=0: i >= j, np.greater_equal])
def test_a_function_of_blocks_still_lists_them(function):
    found = BlockMask.from_function(function, T, S, (8, 8))
    assert found.whole is None and (found.blocks == np.tri(4, 5, dtype=bool)).all()


def test_blocks_of_traced_arrays_are_traced_and_those_of_known_ones_known():
    @jax.jit
    def listed(ids):
        assert isinstance(BlockMask.from_function(masks.causal(), T, S, (8, 8)).blocks, np.ndarray)
        return BlockMask.from_function(masks.documents(ids), T, S, (8, 8), batch=B)

    assert_lists(listed(jnp.asarray(IDS)), dense(MASKS["documents"][1])[:, :1])


def test_lists_of_other_arrays_share_a_program():
    blocks._chunk.clear_cache()
    for i in range(3):
        BlockMask.from_function(masks.documents(IDS[0] + i), T, S, (8, 8))
    assert blocks._chunk._cache_size() == 1


@pytest.mark.sweep
def test_a_documents_mask_of_131072_is_listed_in_2_gib_with_a_bar():
    code = """
import resource, numpy as np
from jax_mfa import BlockMask, masks
length = 131072
ends = np.sort(np.random.default_rng(0).integers(0, length, 63))
lengths = np.diff([0, *ends, length])
mask = BlockMask.from_function(masks.documents(lengths=lengths), length, length, (128, 128), progress=True)
assert (mask.blocks == BlockMask.documents(lengths, (128, 128)).blocks).all() and mask.whole.sum() > 10000
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= 2 * 2**20 and done.stderr.endswith("| 100 %\n")


# --- algebra


ALGEBRA = {
    "and": (lambda x, y: x & y, np.logical_and),
    "or": (lambda x, y: x | y, np.logical_or),
    "not": (lambda x, y: ~x & ~y, lambda x, y: ~x & ~y),
    "and_masks": (masks.and_masks, np.logical_and),
    "or_masks": (masks.or_masks, np.logical_or),
}


@pytest.mark.parametrize("name", ALGEBRA)
def test_masks_combine_with_masks_and_functions(name):
    rule, wanted = ALGEBRA[name]
    one, other = MASKS["documents"], MASKS["window"]
    found = rule(one[0], other[0])
    assert isinstance(found, masks.Mask)
    np.testing.assert_array_equal(evaluated(found), wanted(dense(one[1]), dense(other[1])))
    if name != "not":
        plain = lambda *at: other[0](*at)
        for mask in (rule(one[0], plain), rule(plain, one[0])):
            assert isinstance(mask, masks.Mask)
            np.testing.assert_array_equal(evaluated(mask), wanted(dense(one[1]), dense(other[1])))


def test_of_no_masks_all_hold_and_none_does():
    assert evaluated(masks.and_masks()).all() and not evaluated(masks.or_masks()).any()


def test_a_mask_shows_what_it_is_made_of():
    assert repr(masks.causal() & ~masks.window(3) | masks.prefix(2)) == "((causal() & ~window(3, 0)) | prefix(2))"


def listed(mask):
    return BlockMask.from_function(mask, T, S, (4, 4))


def test_whole_blocks_of_a_combination_are_whole_in_it():
    one, other = (listed(x) for x in (masks.causal(), masks.window(9, 9)))
    unknown = BlockMask(other.blocks, (4, 4))
    both, either = one & other, one | other
    np.testing.assert_array_equal(both.whole, one.whole & other.whole)
    np.testing.assert_array_equal(either.whole, one.whole | other.whole)
    assert (one & unknown).whole is None and (unknown & one).whole is None and (unknown | unknown).whole is None
    np.testing.assert_array_equal((one | unknown).whole, one.whole)
    np.testing.assert_array_equal((unknown | one).whole, one.whole)
    exact = listed(masks.causal() | masks.window(9, 9))
    assert not (either.whole & ~exact.whole).any() and either.whole.any()


def test_whole_blocks_belong_to_the_contents_of_a_mask():
    mask = listed(masks.causal())
    for same in (listed(masks.causal()), pickle.loads(pickle.dumps(mask)), jax.tree.map(jnp.asarray, mask)):
        assert same == mask and hash(same) == hash(mask)
        np.testing.assert_array_equal(same.whole, mask.whole)
    assert mask != BlockMask(mask.blocks, (4, 4)) and mask != BlockMask(mask.blocks, (4, 4), mask.whole & False)
    back = jax.jit(lambda x: x)(mask)
    np.testing.assert_array_equal(back.whole, mask.whole)
    with pytest.raises(ValueError, match="read-only"):
        mask.whole[0, 0] = True


def test_a_block_mask_prints_as_a_picture():
    mask = BlockMask.from_function(masks.causal(), 6, 8, (2, 2), heads=2)
    assert str(mask) == "+...\n#+..\n##+."
    assert str(BlockMask(mask.blocks, (2, 2))) == "+...\n++..\n+++."
    large = str(BlockMask.causal(1000, 1000, (2, 2))).split("\n")
    assert len(large) == len(large[0]) == 63 and large[5] == "+" * 6 + "." * 57
    abstract = jax.eval_shape(lambda: BlockMask(jnp.ones((2, 2), bool), (2, 2)))
    assert str(abstract) == repr(abstract)


# --- attention


@pytest.mark.share(8)
@pytest.mark.parametrize("name", [x for x in MASKS if x not in ("window of any", "tree", "line")])
def test_attention_with_a_mask_and_its_blocks_is_that_with_the_dense_mask(name):
    mask, definition, *sizes = MASKS[name]
    queries, keys = sizes[0] if sizes else (T, S)
    inputs = [jnp.asarray(x) for x in qkv(B=B, T=queries, S=keys, N=N, K=N, H=4)]
    block_mask = BlockMask.from_function(mask, queries, keys, (8, 4), batch=B, heads=N)

    def both(attend, *inputs):
        out, pullback = jax.vjp(attend, *inputs)
        return out, *pullback(jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape))

    plain = lambda *x: jax_mfa.dot_product_attention(
        *x, mask=dense(definition, queries, keys), implementation="blockwise"
    )
    flex = lambda *x: jax_mfa.flex_attention(*x, mask_mod=mask, block_mask=block_mask, implementation="blockwise")
    run = jax.jit(lambda *x: (both(flex, *x), both(plain, *x)))
    for got, wanted in zip(*run(*inputs)):
        assert_close(got, wanted, np.float32, terms=keys + 4, gradient=True)


def test_tiles_that_a_mask_hides_are_not_computed(monkeypatch):
    inputs = qkv(B=1, T=LENGTH, S=LENGTH, N=1, K=1, H=16)
    mask = masks.documents(lengths=[LENGTH // 4] * 4)
    block_mask = BlockMask.from_function(mask, LENGTH, LENGTH, (128, 128))
    attend = lambda *x: jax_mfa.flex_attention(*x, mask_mod=mask, block_mask=block_mask, implementation="blockwise")
    done = Counter(monkeypatch).of(attend, *inputs)
    assert done <= 0.26 * 2 * LENGTH * LENGTH * 16


# --- errors


BAD = {
    "left": (lambda: masks.window(-1), ValueError, "left must be at least 0, got -1"),
    "right": (lambda: masks.window(1, 1.5), TypeError, "right must be an integer, got 1.5"),
    "length": (lambda: masks.prefix(1.5), TypeError, "length must be integers .*, got 1.5"),
    "lengths of a prefix": (
        lambda: masks.prefix(np.ones((2, 2), int)),
        ValueError,
        r"length must .* got shape \[2, 2\]",
    ),
    "sinks": (lambda: masks.sink_window(-1, 3), ValueError, "sinks must be at least 0"),
    "window": (lambda: masks.dilated(None, 3), TypeError, "window must be an integer, got None"),
    "dilation": (lambda: masks.dilated(2, 0), ValueError, "dilation must be at least 1"),
    "size": (lambda: masks.chunked(0), ValueError, "size must be at least 1"),
    "no documents": (masks.documents, ValueError, "ids or lengths must be given"),
    "ids": (lambda: masks.documents([0.5]), TypeError, r"ids must be integers \[S\] or \[B, S\], got \[0.5\]"),
    "lengths": (lambda: masks.documents(lengths=[3, -1]), ValueError, "lengths must be at least 0, got -1"),
    "parents": (lambda: masks.tree([0]), ValueError, r"parents must be earlier nodes, or -1, got \[0\]"),
    "start": (lambda: masks.tree([-1], "a"), TypeError, "start must be integers"),
    "indices": (lambda: masks.top_k_blocks([1], 4), ValueError, r"indices must be .*, got shape \[1\]"),
    "block_size": (lambda: masks.top_k_blocks([[1]], (4, 0)), ValueError, "block_size must be at least 1"),
    "block sizes": (lambda: masks.top_k_blocks([[1]], (4, 4, 4)), ValueError, "block_size must be one integer or two"),
    "shape": (lambda: masks.neighborhood((2, 2, 2, 2), 1), ValueError, "shape must have 1, 2 or 3 axes, got 4"),
    "kernel": (
        lambda: masks.neighborhood(9, 4, 3),
        ValueError,
        "kernel_size times dilation must fit .* 9, got 4 times 3",
    ),
    "kernels": (
        lambda: masks.neighborhood(9, (3, 3)),
        ValueError,
        "kernel_size must have one entry for each of 1 axes",
    ),
    "is_causal": (lambda: masks.neighborhood(9, 3, 1, 1), TypeError, "is_causal must be a Python bool"),
    "a mask": (
        lambda: masks.and_masks(masks.causal(), 3),
        TypeError,
        "and_masks must have functions .*, got 3 as number 1",
    ),
    "combined": (lambda: masks.causal() & 3, TypeError, "unsupported operand"),
    "function": (
        lambda: listed(lambda a, b, c: a),
        TypeError,
        "function must be a function of block indices i and j, or",
    ),
    "result": (lambda: listed(lambda b, n, t, s: t), TypeError, "mask_mod must return a bool scalar, got int32"),
    "batch": (lambda: BlockMask.from_function(masks.causal(), 3, 3, (2, 2), batch=0), ValueError, "batch must be at"),
    "progress": (
        lambda: BlockMask.from_function(masks.causal(), 3, 3, (2, 2), progress=1),
        TypeError,
        "progress must be a Python bool",
    ),
    "of blocks": (
        lambda: BlockMask.from_function(lambda i, j: i >= j, 3, 3, (2, 2), batch=2),
        ValueError,
        "batch, heads, query_offset and progress go with a mask_mod",
    ),
    "whole": (
        lambda: jax_mfa.flex_attention(
            *qkv(T=8, S=8, H=4),
            mask_mod=masks.causal(),
            block_mask=BlockMask(np.ones((2, 2), bool), (4, 4), np.ones((1, 2), bool)),
        ),
        ValueError,
        r"block_mask.whole must have shape that of blocks, \[2, 2\], got \[1, 2\]",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name):
    build, error, message = BAD[name]
    with pytest.raises(error, match=message):
        build()
