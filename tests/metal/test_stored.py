"""Rows that are quantised, in pages or both reach registers as what they stand for, through tiles and through lanes."""

from __future__ import annotations

import dataclasses

import emulator
import harness
import numpy as np
import pytest
from runners import DTYPES, needs_core

from jax_mfa import Scheme, quantize
from jax_mfa.kv_cache.storage import PARTS
from jax_mfa.metal import source
from jax_mfa.metal.plan import SCALARS
from jax_mfa.metal.problem import stored_type
from jax_mfa.problem import Storage

pytestmark = needs_core

# what the kernels ask of a source, and nothing else of them: rows through tiles, and both products of decoding
TEXT = """
#include "core/lanes.h"

template <typename Source, int TABLED, int LENGTH>
[[kernel]] void rows(
    device const typename Source::Storage* data [[buffer(0)]],
    device const uchar* scales [[buffer(1)]],
    device const uchar* zeros [[buffer(2)]],
    device const uchar* means [[buffer(3)]],
    device const int* tables [[buffer(4)]], device const float* left [[buffer(5)]], device float* tiled [[buffer(6)]],
    device float* products [[buffer(7)]], device float* sums [[buffer(8)]], device float* alone [[buffer(9)]],
    uint3 group [[threadgroup_position_in_grid]],
    ushort lane_index [[thread_index_in_simdgroup]]) {
  using T = typename Source::Element;
  constexpr int size = Source::size;
  constexpr int wide = size % 4 == 0 ? 4 : 1;
  constexpr int fragments = padded(size) / 8;
  const Lane lane(lane_index);
  const Beside beside = {scales, zeros, means, tables};
  const Source source(data, beside, group.y, TABLED, 2, group.x, LENGTH);
  device float* of_head = tiled + (group.y * 2 + group.x) * LENGTH * size;
  for (int i = lane_index; i < LENGTH * size / wide; i += 32) {
    const int row = i * wide / size;
    const auto x = source.tile(row / 3).template load<wide>(row - row / 3, i * wide % size);
    for (int e = 0; e < wide; ++e) {
      of_head[i * wide + e] = float(x[e]);
    }
  }
  bool finite = true;
  for (int first = 0; first < LENGTH; first += 8) {
    LaneKeys<Source, T, 1> keys(source, lane);
    LaneValues<Source, 1, fragments> values(source, 0, lane);
    keys.look(first, lane_index);
    keys.load(lane_index);
    values.look(first, lane_index);
    values.load(lane_index);
    struct Own {
      Fragment<T> kept[1][fragments];
    };
    Own own;
    Fragment<float> weights[1][1];
    const int turn = lane.row + lane.column;  // weights 1, 2, 4, …, in each row from another place on
    for (int e = 0; e < 2; ++e) {
      for (int i = 0; i < fragments; ++i) {
        const int x = keys.channel(i, lane.row);
        own.kept[0][i].thread_elements()[e] = T(x < size ? left[(lane.column + e) * size + x] : 0.0f);
      }
      weights[0][0].thread_elements()[e] = float(1 << ((turn + e) % 8));
    }
    Fragment<float> s[1][1];
    multiply_keys(s, own, keys);
    Fragment<float> sum[1][fragments];
    clear(sum);
    accumulate_values(sum, weights, values, 0);
    const ulong at = ((group.y * 2 + group.x) * ((LENGTH + 7) / 8) + first / 8) * 8;
    for (int e = 0; e < 2; ++e) {
      const int row = lane.column + e;
      products[(at + row) * 8 + lane.row] = s[0][0].thread_elements()[e];
      for (int i = 0; i < fragments; ++i) {
        const int channel = values.channel(i, lane.row);
        if (channel < size) {
          sums[(at + row) * size + channel] = sum[0][i].thread_elements()[e];
          alone[(at + row) * size + channel] = values.alone(0, e, i);
        }
      }
    }
    finite = values.finite() && finite;
  }
  if (!finite && lane_index == 0) {
    tiled[0] = NAN;
  }
}
"""


@dataclasses.dataclass(frozen=True)
class Case:
    scheme: Scheme | None
    size: int = 32
    page: int = 0
    dtype: str = "float16"
    length: int = 29


CASES = [
    Case(Scheme("int8")),
    Case(Scheme("int8", True, None, None), 24, page=8),
    Case(Scheme("int8", True, channels=None), 11, dtype="bfloat16"),
    Case(Scheme("int4", channels=32), 64, page=16),
    Case(Scheme("int4", True, channels=8), 64),
    Case(Scheme("int4", tokens=3, channels=5, center=5), 15, page=8, dtype="float32"),
    Case(Scheme("fp8", True, tokens=None, channels=4, center=64), 20),
    Case(Scheme("fp8", channels=64), 128, page=8),
    Case(None, 40, page=16),
    Case(None, 7, page=8, dtype="float32"),
]


@pytest.mark.share(4)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_are_what_they_stand_for(case):
    batch, width = 2, -(-case.length // 8)
    pages = -(-case.length // case.page) if case.page else 0
    shape = (batch * pages + 3, case.page, 2, case.size) if case.page else (batch, case.length, 2, case.size)
    x = harness.arrays(shape, seed=4)[0].astype(DTYPES[case.dtype])
    stored = None if case.scheme is None else quantize(x, case.scheme)
    numbers = np.asarray(x if stored is None else stored.dequantize(np.float32))
    tables = np.full((batch, width), 987654321, np.int32)  # which nobody may read
    if case.page:
        order = np.random.default_rng(1).permutation(len(numbers))[: batch * pages].reshape(batch, pages)
        tables[:, :pages] = order
        numbers = numbers[order].reshape(batch, -1, 2, case.size)[:, : case.length]
    left = harness.arrays((8, case.size), seed=5)[0].astype(DTYPES[case.dtype]).astype(np.float32)
    storage = None if case.scheme is None else Storage(case.scheme, case.size)
    kind = stored_type(storage, case.page or None, SCALARS[case.dtype], case.size)
    whole = f"rows<{kind}, {width * case.page or case.length}, {case.length}>"  # of which this many may be read
    text = "\n".join(["#include <metal_stdlib>", *_flat(TEXT)])
    text += f'\ntemplate [[host_name("rows")]] [[kernel]] decltype({whole}) {whole};\n'
    parts = (
        [np.zeros(1, np.float32)] * 4
        if stored is None
        else [
            np.zeros(1, np.float32) if getattr(stored, name) is None else np.asarray(getattr(stored, name))
            for name in PARTS
        ]
    )
    if stored is None:
        parts[0] = x
    blocks = -(-case.length // 8)
    out = [
        np.zeros(s, np.float32)
        for s in ((batch, 2, case.length, case.size), (batch, 2, blocks, 8, 8), *[(batch, 2, blocks, 8, case.size)] * 2)
    ]
    kernel = emulator.compile(text, fast_math=False).kernel("rows")
    result = kernel([*parts, tables, left, *out], threadgroups=(2, batch, 1), threadgroup=32, outputs=[6, 7, 8, 9])
    assert not result.reports, result.reports
    by_head = numbers.astype(np.float32).transpose(0, 2, 1, 3)
    # of 32 bits d · scale is not rounded before the zero is added, as jnp may do
    rounding = 2.0**-23 * np.abs(by_head).max() if case.dtype == "float32" and stored is not None else 0
    np.testing.assert_allclose(out[0], by_head, rtol=0, atol=2 * rounding)
    full = by_head[:, :, np.minimum(np.arange(blocks * 8), case.length - 1)].reshape(batch, 2, blocks, 8, case.size)
    harness.assert_allclose(out[1], np.einsum("rh,bkcsh->bkcrs", left, full), rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(out[3], full, rtol=0, atol=2 * rounding)
    weights = 2.0 ** ((np.arange(8)[:, None] + np.arange(8)) % 8)
    harness.assert_allclose(out[2], np.einsum("rs,bkcsh->bkcrh", weights, full), rtol=1e-5, atol=1e-3)


def _flat(text: str):
    """The text with the headers of `metal/` in it."""
    seen: set[str] = set()
    for line in text.splitlines():
        include = source._INCLUDE.match(line)
        yield from source._lines(include[1], seen) if include else [line]
