"""Mistakes that attention kernels elsewhere have made, planted one by one in these: each is noticed.

`tests/test_contract.py` shows that no implementation makes them; here the kernels are made to, and the same judgement,
float64 answers and the emulator's checker, must object. Races and ragged ends are planted in `test_kernels.py`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import emulator
import harness
import numpy as np
import oracle
import plans
import pytest
from runners import planted

from jax_mfa import BlockMask
from jax_mfa.metal import operands, runtime, tiles

RNG = np.random.default_rng(8)
SLOPES = np.float32([0.5, 0.25, 0.125, 0.0625])


def call(t=37, s=53, n=4, k=2, h=16, **more) -> dict[str, Any]:
    query, key, value = harness.qkv(2, t, s, n, k, h)
    return {"query": query, "key": key, "value": value, **more}


BIAS = RNG.standard_normal((2, 4, 37, 53)).astype(np.float32)
DECODE = call(t=2, s=700, key_value_seq_lengths=np.int32([600, 317]))


@dataclasses.dataclass(frozen=True)
class Mistake:
    """A change of the kernels' text, a call that meets it, and the variant of the kernels that runs it."""

    old: str
    new: str
    call: dict[str, Any]
    variant: str = "staged"


MISTAKES = {
    # scores
    "bias added before the scale": Mistake(
        "      x += bias;", "      x += bias * scale;",
        call(bias=BIAS),
    ),
    "bias added after the soft cap": Mistake(
        "x = capped(uncapped(product, bias, row, column));", "x = capped(uncapped(product, 0.0f, row, column)) + bias;",
        call(bias=BIAS, logits_soft_cap=1.5),
    ),
    "the soft cap's derivative left out": Mistake(
        "return 4.0f * e / ((1.0f + e) * (1.0f + e));", "return 1.0f;", call(logits_soft_cap=1.5)
    ),
    "ALiBi with the wrong sign": Mistake(
        "x += slope * distance(row, column)", "x -= slope * distance(row, column)", call(alibi_slopes=SLOPES)
    ),
    "ALiBi without the offset": Mistake(
        "return float(column - (row + offset));",
        "return float(column - row);",
        call(alibi_slopes=SLOPES, query_offset=9, sinks=SLOPES),
    ),
    "one slope for all heads": Mistake(
        "slopes[head_place(*p, batch, head)]", "slopes[head_place(*p, batch, 0)]", call(alibi_slopes=SLOPES)
    ),
    "a sink left out of the sum": Mistake(
        "has_sinks ? weight_of(sink, row_max) : 0.0f", "0.0f", call(sinks=SLOPES)
    ),
    "a sink that rows count which see nothing": Mistake(
        "empty = is_absent(running_sum);",
        "empty = false;",
        call(sinks=SLOPES, query_seq_lengths=np.int32([30, 0])),
    ),
    "dropped weights left out of the sum": Mistake(
        "factor = empty ? 0.0f : shrink / row_sum;",
        "factor = empty ? 0.0f : shrink / row_sum * (has_dropout ? 0.7f : 1.0f);",
        call(dropout_rate=0.3, dropout_seed=5),
    ),
    "dropout by the position in a tile": Mistake(
        "rows.factors(block, column + lane.column, factors);",
        "rows.factors(block, lane.column, factors);",
        call(dropout_rate=0.3, dropout_seed=5),
    ),
    "dropout alike in all batch rows": Mistake(
        "batch = of_row[2];", "batch = 0;", call(dropout_rate=0.3, dropout_seed=5)
    ),
    # visibility
    "causal without the offset": Mistake(
        "column - (row + offset) <= p->right", "column - row <= p->right", call(is_causal=True, query_offset=16)
    ),
    "causal aligned with the last row": Mistake(
        "x.query_offset[batch] : p->query_offset;",
        "x.query_offset[batch] : p->query_offset + p->keys - p->queries;",
        call(is_causal=True),
    ),
    "a window one column short": Mistake(
        "row + offset - column <= p->left", "row + offset - column < p->left", call(local_window_size=(5, 2))
    ),
    "positions in 16 bits": Mistake(
        "column - (row + offset) <= p->right",
        "column - int(short(row + offset)) <= p->right",
        call(is_causal=True, query_offset=40000),
    ),
    "a window in 16 bits": Mistake(
        "row + offset - column <= p->left",
        "row + offset - column <= int(short(p->left))",
        call(local_window_size=(2**16 + 3, None), query_offset=10),
    ),
    "lengths of the first batch row for all": Mistake(
        "min(x.key_lengths[batch], p->keys)",
        "min(x.key_lengths[0], p->keys)",
        call(key_value_seq_lengths=np.int32([53, 20])),
    ),
    "segments of the first batch row for all": Mistake(
        "x.key_segment_ids + ulong(batch) * ulong(p->keys)",
        "x.key_segment_ids + 0 * ulong(p->keys)",
        call(
            query_segment_ids=np.sort(RNG.integers(0, 3, (2, 37)), 1),
            key_value_segment_ids=np.sort(RNG.integers(0, 3, (2, 53)), 1),
        ),
    ),
    "blocks of the mask transposed": Mistake(
        "block(row / p->block_rows, column / p->block_columns)",
        "block(column / p->block_columns, row / p->block_rows)",
        call(t=48, s=48, block_mask=BlockMask(np.tril(np.ones((6, 6), bool)), (8, 8))),
    ),
    "a mask read as if it had all heads": Mistake(
        "ulong(x.heads > 1 ? head : 0)", "ulong(head)", call(mask=RNG.random((2, 1, 37, 53)) < 0.5)
    ),
    # rows that see nothing, and the ends of rows
    "rows that see nothing give NaN": Mistake(
        "const float from = or_zero(largest);\n      const float shrink",
        "const float from = largest;\n      const float shrink",
        call(mask=np.arange(37)[:, None] != np.full((1, 53), 11)),
    ),
    "rows that see nothing give the mean": Mistake(
        "factor = empty ? 0.0f : shrink / row_sum;",
        "factor = shrink / row_sum;",
        call(key_value_seq_lengths=np.int32([53, 0])),
    ),
    "a row not finished where its last tiles are hidden": Mistake(
        "    if (seen != none_visible) {\n      const auto keys",
        "    if (seen == none_visible) {\n      return;\n    }\n    {\n      const auto keys",
        call(t=64, s=96, is_causal=True, query_offset=20),
        "direct",
    ),
    # heads and batch rows
    "head modulo key heads": Mistake(
        "const int key_head = head / (p.heads / p.key_heads);\n  const int slice = int(group.y) % SLICES;",
        "const int key_head = head % p.key_heads;\n  const int slice = int(group.y) % SLICES;",
        call(),
    ),
    "a group's other heads left out of dK and dV": Mistake(
        "const int end_head = first_head + heads_of_group;", "const int end_head = first_head + 1;", call()
    ),
    # decoding
    "split keys of the first batch row for all": Mistake(
        "mapped_row(x.p->key, batch)", "mapped_row(x.p->key, 0)", DECODE
    ),
    "splits of the first batch row for all": Mistake(
        "const ulong first = (ulong(batch) * p.key_heads + key_head) * splits;",
        "const ulong first = ulong(key_head) * splits;",
        DECODE,
    ),
    "splits merged without their maxima": Mistake(
        "part[i * 32 + lane] * weight : 0.0f",
        "part[i * 32 + lane] : 0.0f",
        DECODE,
    ),
    # loads
    "a quarter of a row loaded and all of it read": Mistake(
        "for (int i = thread_index; i < SIZE; i += THREADS) {\n    own[i]",
        "for (int i = thread_index; i < SIZE / 4; i += THREADS) {\n    own[i]",
        call(),
        "portable",
    ),
}  # fmt: skip


def noticed(ran: plans.Ran, arguments: dict[str, Any]) -> bool:
    """Whether the checker reports something, or a result lies beyond the tolerance of test_contract.py."""
    if ran.reports:
        return True
    d_out, d_lse = harness.cotangents(arguments)
    answer = oracle.attention(**arguments, d_out=d_out, d_lse=d_lse)
    common = {"terms": harness.terms_of(arguments), "largest_score": answer.largest_score}
    got = ran.arrays
    lse = plans.log_sum_exp(got)
    try:
        harness.assert_close(got["out"], answer.out, "float32", **common)
        harness.assert_close(lse, answer.lse, "float32", **common)
        for name in ("query", "key", "value"):
            size = answer.sizes.get(name, 0.0)
            harness.assert_close(
                got[f"d_{name}"], answer.gradients[name], "float32", gradient=True, size=size, **common
            )
    except AssertionError:
        return True
    return False


def test_every_mistake_can_be_planted():
    for mistake in MISTAKES.values():
        planted(mistake.old, mistake.new)


@pytest.mark.share(16)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_known_mistake_is_noticed(mistake):
    known = MISTAKES[mistake]
    text = planted(known.old, known.new)
    assert not noticed(plans.run_call(known.call, variant=known.variant), known.call)
    assert noticed(plans.run_call(known.call, variant=known.variant, text=text), known.call)


OFFSETS = """
[[kernel]] void offsets(
    device const half* base [[buffer(0)]], device ulong* out [[buffer(1)]], constant Parameters& p [[buffer(2)]]) {
  Dense<half, 512> rows(base, 0, p.keys, 40, 0, p.keys);
  out[0] = head_offset(3, p.keys, 40, 7, 512);
  out[1] = ulong(rows.tile(p.keys - 1).rows - base);
  out[4] = ulong(rows.tile(p.keys - 2 - int(0xFFFFFFFF / (40 * 512))).row(3) - base);
  rows.turn_by(39);
  out[2] = ulong(rows.tile(p.keys - 1).rows - base);
  out[3] = broadcast_offset(p.bias, 2, 1) + broadcast_index(p.bias, p.bias.queries - 1, 5);
}
"""


@pytest.mark.share(2)
@pytest.mark.parametrize(
    "old,new,at",
    [
        ("", "", ()),
        (
            "(ulong(row) * ulong(length) * ulong(heads) + ulong(head)) * ulong(size)",
            "ulong((row * length * heads + head) * size)",
            (0,),
        ),
        ("ulong(uint(first)) * ulong(stride)", "first * int(stride)", (1, 2, 4)),
        ("min(count - 1 - first, LARGEST_TILE - 1)", "count - 1 - first", (4,)),
        ("plane * ulong(x.queries) * ulong(x.keys)", "uint(plane) * uint(x.queries) * uint(x.keys)", (3,)),
        (
            "ulong(x.queries > 1 ? row : 0) * ulong(x.keys)",
            "ulong(uint(x.queries > 1 ? row : 0) * uint(x.keys))",
            (3,),
        ),
    ],
)
def test_offsets_of_more_than_2_to_the_31_elements(old, new, at):
    """The places where an element's offset is made, given sizes of no machine here; and each with 32 bits instead."""
    keys, rows = 2**23, 2**17
    parameters = dict.fromkeys((field.name for field in operands.fields("Parameters")), 1)
    parameters |= {"keys": keys, "bias.map.rows": 4, "bias.heads": 3, "bias.queries": rows, "bias.keys": rows}
    packed = operands.packed("Parameters", parameters)
    wanted = [
        (3 * keys * 40 + 7) * 512,
        (keys - 1) * 40 * 512,
        (keys - 1) * 40 * 512 + 39 * 512,
        (2 * 3 + 1) * rows * rows + (rows - 1) * rows + 5,
        (keys - 2 - (2**32 - 1) // (40 * 512) + 3) * 40 * 512,
    ]
    assert min(wanted) > 2**32
    text = planted(old, new)
    got = np.zeros(5, np.uint64)
    kernel = emulator.compile(text + OFFSETS, fast_math=False).kernel("offsets")
    assert not kernel([np.zeros(1, np.float16), got, packed], threads=1, outputs=[1]).reports
    for i, (x, y) in enumerate(zip(got.tolist(), wanted)):
        assert (x == y) == (i not in at), (i, x, y)


def test_threadgroup_memory_beyond_32768_bytes_is_refused(on_device):
    """Tiles of a few hundred bytes too much, as a published kernel asks for: Metal says so early."""
    chosen = tiles.select("staged", 128, 128, 4)
    forward = dataclasses.replace(chosen.forward, keys=32)
    for h, wanted in ((96, 32768), (104, 33792)):
        plan = plans.Problem(T=64, S=64, H=h, V=128, variant=dataclasses.replace(chosen, forward=forward)).plan()
        assert plan.dispatches[0].kernel.threadgroup_memory == wanted
        failure = runtime.failure(plan)
        assert ("32768" in failure and str(wanted) in failure) if wanted > tiles.THREADGROUP_BYTES else not failure
