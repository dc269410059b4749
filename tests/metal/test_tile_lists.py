"""Lists of visible tiles: each names the tiles in which something is visible, and kernels that walk over them agree.

Sizes here are of many tiles; those of test_contract.py mostly fit in one.
"""

from __future__ import annotations

import harness
import numpy as np
import oracle
import plans
import pytest

from jax_mfa import BlockMask
from jax_mfa.metal import runtime, source, tiles

B, T, S, N, K, H = 2, 150, 330, 4, 2, 16


def coarse(rng, shape, cells, share=0.3):
    """Booleans [..., T, S], alike within cells of rows × columns, so that whole tiles are hidden or visible."""
    rows, columns = cells
    few = rng.random((*shape, -(-T // rows), -(-S // columns))) < share
    return few.repeat(rows, -2)[..., :T, :].repeat(columns, -1)[..., :S]


def ranges(rng):
    """Short ranges that move along with the row, some of them empty."""
    start = np.arange(T) * 2 + rng.integers(-20, 20, (B, T))
    return np.stack([start, start + rng.integers(-3, 40, (B, T))], -1).astype(np.int32)


def documents(rng, length, count=7):
    return np.sort(rng.integers(0, count, (B, length)), 1).astype(np.int32)


# what hides pairs, by rng: arguments of the public functions
HIDING = {
    "mask of all": lambda rng: {"mask": coarse(rng, (1, 1), (37, 50))},
    "mask by row and head": lambda rng: {"mask": coarse(rng, (B, N), (9, 40))},
    "padding mask": lambda rng: {"mask": (np.arange(S) < np.array([[250], [41]]))[:, None, None]},
    "mask of rows": lambda rng: {"mask": (np.arange(T) < np.array([[20], [141]]))[:, None, :, None]},
    "blocks by head": lambda rng: {"block_mask": BlockMask(rng.random((N, 10, 7)) < 0.3, (16, 50))},
    "blocks of all, large": lambda rng: {"block_mask": BlockMask(rng.random((2, 3)) < 0.5, (128, 128))},
    "blocks smaller than tiles": lambda rng: {"block_mask": BlockMask(rng.random((B, 1, 50, 66)) < 0.1, (3, 5))},
    "documents": lambda rng: {"query_segment_ids": documents(rng, T), "key_value_segment_ids": documents(rng, S)},
    "ranges": lambda rng: {"key_value_ranges": ranges(rng)},
}
SPANS = ("padding mask", "mask of rows", "documents", "ranges")
BESIDE = {
    "": {},
    "causal": {"is_causal": True, "query_offset": np.array([180, 100], np.int32)},
    "window and lengths": {
        "local_window_size": (70, 15),
        "query_offset": 60,
        "query_seq_lengths": np.array([T, 77], np.int32),
        "key_value_seq_lengths": np.array([200, S], np.int32),
    },
    "lengths under the diagonal": {
        "is_causal": True,
        "query_offset": np.array([180, 100], np.int32),
        "query_seq_lengths": np.array([T, 77], np.int32),
        "key_value_seq_lengths": np.array([300, S], np.int32),
    },
    "dropout and sinks": {"dropout_rate": 0.2, "dropout_seed": 7, "sinks": np.float32([0.3, -1, 2, 0.1])},
}
EVERY = [(hiding, list(BESIDE)[i % len(BESIDE)]) for i, hiding in enumerate(HIDING)]
ALL_AT_ONCE = ("mask by row and head", "blocks smaller than tiles", "documents", "ranges")


def arguments(hiding: tuple[str, ...], beside: str, dtype: str = "float32") -> dict:
    rng = np.random.default_rng(sum(map(len, hiding)))
    query, key, value = harness.qkv(B, T, S, N, K, H, dtype=dtype)
    found = {"query": query, "key": key, "value": value, **BESIDE[beside]}
    for name in hiding:
        found |= HIDING[name](rng)
    return found


# each on one kind of tiles, what has the most rules on all; sweeps have them all
TRIED = [
    pytest.param(*every, name, marks=() if every[0] in ALL_AT_ONCE or i % 3 == j else pytest.mark.sweep)
    for i, every in enumerate(EVERY)
    for j, name in enumerate(tiles.NAMES)
]


@pytest.mark.share(16)
@pytest.mark.parametrize("hiding,beside,variant", TRIED)
def test_values_and_gradients_are_right(on_device, variant, hiding, beside):
    with runtime.variant(variant):
        harness.assert_matches_oracle(plans.ON_METAL, arguments((hiding,), beside))


@pytest.mark.share(4)
@pytest.mark.parametrize("variant", tiles.NAMES)
def test_lists_of_everything_at_once(on_device, variant):
    x = arguments(ALL_AT_ONCE, "window and lengths") | {"key_value_ranges": np.int32([[[30, 300]] * T, [[5, 260]] * T])}
    with runtime.variant(variant):
        harness.assert_matches_oracle(plans.ON_METAL, x)


# ------------------------------------------------------------------------------------------------ the lists themselves


def visible(x: dict) -> np.ndarray:
    """[B, N, T, S]: which pairs take part in one of HIDING with "lengths under the diagonal"."""
    row, column = np.arange(T)[:, None], np.arange(S)[None, :]
    see = np.ones((B, N, T, S), bool)
    per_row = lambda name: x[name].reshape(B, 1, 1, 1)
    if "is_causal" in x:
        see &= column <= row + per_row("query_offset")
    if "query_seq_lengths" in x:
        see &= (row < per_row("query_seq_lengths")) & (column < per_row("key_value_seq_lengths"))
    if "mask" in x:
        see &= x["mask"]
    if "block_mask" in x:
        (r, c), blocks = x["block_mask"].block_size, x["block_mask"].blocks
        see &= blocks.repeat(r, -2)[..., :T, :].repeat(c, -1)[..., :S]
    if "query_segment_ids" in x:
        see &= x["query_segment_ids"][:, None, :, None] == x["key_value_segment_ids"][:, None, None, :]
    if "key_value_ranges" in x:
        start, end = (x["key_value_ranges"][:, None, :, None, i] for i in range(2))
        see &= (start <= column) & (column < end)
    return see


def listed_of(entry: np.ndarray) -> list[int]:
    """The tiles of a list in order, twice each and one more where it is wholly visible; see Walk in visibility.h."""
    count, wholes = (int(x) for x in entry[:2])
    if entry.size == 4:
        first, whole_first = (int(x) for x in entry[2:])
        return [2 * j + (whole_first <= j < whole_first + wholes) for j in range(first, first + count)]
    tiles_from = entry[2:].tolist()
    others = tiles_from[::-1][: count - wholes]
    return sorted([2 * j + 1 for j in tiles_from[:wholes]] + [2 * j for j in others])


def span_of(wanted: list[int]) -> list[int]:
    """All tiles from the first to the last; of the wholly visible the first run is marked."""
    if not wanted:
        return []
    whole = {x // 2 for x in wanted if x % 2}
    run = min(whole, default=0)
    while run in whole:
        run += 1
    return [2 * j + (j in whole and j < run) for j in range(wanted[0] // 2, wanted[-1] // 2 + 1)]


def assert_lists(lists: np.ndarray, see: np.ndarray, rows: int, columns: int, for_rows: bool, exact: bool) -> None:
    """The lists name the tiles with a visible pair, and mark those that are wholly visible; a span, the hull.

    Not `exact`: two rules that hide different pairs of a tile may together hide all, and the tile is still listed.
    """
    heads, own, room = lists.shape[1:]
    others = -(-see.shape[3 if for_rows else 2] // (columns if for_rows else rows))
    for b, h, i in np.ndindex(B, heads, own):
        wanted = []
        for j in range(others):
            r, c = (i, j) if for_rows else (j, i)
            tile = see[b, h if heads > 1 else 0, r * rows : (r + 1) * rows, c * columns : (c + 1) * columns]
            if tile.any():
                wanted.append(2 * j + (tile.all() and tile.shape == (rows, columns)))
        wanted = span_of(wanted) if room == 4 else wanted
        listed = listed_of(lists[b, h, i])
        if exact:
            assert listed == wanted, (b, h, i)
        else:
            assert {x // 2 for x in wanted} <= {x // 2 for x in listed}, (b, h, i)
            assert {x for x in listed if x % 2} <= set(wanted), (b, h, i)


@pytest.mark.share(16)
@pytest.mark.parametrize("beside", ["", "lengths under the diagonal"])
@pytest.mark.parametrize("hiding", HIDING)
def test_a_list_names_the_visible_tiles_and_no_other(hiding, beside):
    x = arguments((hiding,), beside)
    ran, see, chosen = plans.run_call(x), visible(x), tiles.select("staged", H, H, 4)
    assert not ran.reports
    rows, columns = ran.arrays["row_lists"], ran.arrays["column_lists"]
    assert chosen.forward.rows == chosen.d_query.rows and chosen.forward.keys == chosen.d_query.keys
    # what has no entry for each row and column needs no more room than its rows and columns
    assert (rows.shape[-1] == 4) == (hiding in SPANS)
    assert_lists(rows, see, chosen.d_query.rows, chosen.d_query.keys, True, exact=not beside)
    assert_lists(columns, see, chosen.d_key_value.queries, chosen.d_key_value.rows, False, exact=not beside)


PADDED = (250, 41)  # lengths that "padding mask" leaves


@pytest.mark.share(2)
@pytest.mark.parametrize("variant", ["staged", "direct"])
def test_padding_that_a_mask_describes_costs_nothing(variant):
    """A boolean mask [B, 1, 1, S], as models pass their padding, hides whole tiles: they are not multiplied."""
    ran, chosen = plans.run_call(arguments(("padding mask",), ""), variant=variant), tiles.select(variant, H, H, 4)
    assert not ran.reports
    counted = {name: c.matrix_multiply_accumulates for name, c in ran.counters.items()}

    def fragments(rows: int, size: int) -> int:
        """Of scores, for all heads, where rows are taken `rows` and visible columns `size` at a time."""
        return sum(-(-T // rows) * rows // 8 * (-(-n // size) * size // 8) for n in PADDED) * N

    products = H // 8
    assert counted["attention_forward"] == 2 * products * fragments(8 * chosen.forward.blocks, chosen.forward.keys)
    assert counted["attention_d_query"] == 3 * products * fragments(8 * chosen.d_query.blocks, chosen.d_query.keys)
    tile = chosen.d_key_value
    assert counted["attention_d_key_value"] <= 4 * products * fragments(tile.queries, tile.rows)


def test_the_portable_family_skips_tiles_too():
    """Each thread of a row takes two exponentials for a tile that it meets, and some at the end."""
    ran = plans.run_call(arguments(("padding mask",), ""), variant="portable")
    threads = tiles.RowTiles().threads
    met = sum(-(-n // threads) for n in PADDED)
    assert met < 0.5 * B * -(-S // threads)
    assert ran.counters["portable_forward"].exponentials <= T * N * threads * (2 * met + B)


# ------------------------------------------------------------------------------------------------------------ mistakes

MISTAKES = {
    "the batch row ignored": (
        "ulong(batch) * ulong(heads) + ulong(heads > 1 ? head : 0)",
        "ulong(heads > 1 ? head : 0)",
    ),
    "the head ignored": ("ulong(heads > 1 ? head : 0)", "ulong(0)"),
    "the last visible tile left out": ("return {list[0], list[1], 0, 0,", "return {list[0] - 1, list[1], 0, 0,"),
    "a tile taken for wholly visible": ("return {list[0], list[1], 0, 0,", "return {list[0], list[1] + 1, 0, 0,"),
    "a span's last tile left out": ("has_spans ? last - first + 1 : count", "has_spans ? last - first : count"),
    "a tile after a span taken for wholly visible": (
        "whole_end - whole_first : 0)",
        "whole_end - whole_first + 1 : 0)",
    ),
    "columns listed for rows": ("FOR_ROWS ? own : other", "FOR_ROWS ? other : own"),
    "a barrier left out": (
        "    threadgroup_barrier(mem_flags::mem_threadgroup);\n    if (has_mask) {",
        "    if (has_mask) {",
    ),
}


def noticed(ran: plans.Ran, answer: oracle.Answer) -> bool:
    if ran.reports:
        return True
    try:
        plans.assert_forward(ran.arrays["out"], answer.out, "float32")
    except AssertionError:
        return True
    return False


def test_every_mistake_can_be_planted():
    for old, _ in MISTAKES.values():
        assert source.base().count(old) == 1, old


@pytest.mark.share(16)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_noticed(mistake):
    old, new = MISTAKES[mistake]
    text = source.base()
    assert text.count(old) == 1, f"the kernels no longer say {old!r}: plant this mistake elsewhere"
    x = arguments(("padding mask" if "span" in mistake else "mask by row and head",), "")
    answer = oracle.attention(**x)
    assert noticed(plans.run_call(x), answer) is False
    assert noticed(plans.run_call(x, text=text.replace(old, new)), answer)
