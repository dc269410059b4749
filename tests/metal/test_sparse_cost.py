"""What is hidden costs nothing: multiply-accumulates under windows and block masks, and the bytes of decoding."""

import numpy as np
import pytest
from plans import run, run_call

from jax_mfa.flex.block_mask import BlockMask
from jax_mfa.metal import plans
from jax_mfa.problem import Specification

KERNELS = ("attention_forward", "attention_d_query", "attention_d_key_value")
H = 16


def products(t: int, variant: str, **keywords) -> dict[str, int]:
    """Multiply-accumulates by kernel, one head, T = S."""
    rng = np.random.default_rng(0)
    x = lambda: rng.standard_normal((1, t, 1, H)).astype(np.float16)
    ran = run_call({"query": x(), "key": x(), "value": x(), **keywords}, variant=variant)
    assert not ran.reports
    return {name: ran.counters[name].matrix_multiply_accumulates for name in KERNELS}


def dense(t: int) -> dict[str, int]:
    one = t * t * H // 512
    return dict(zip(KERNELS, (2 * one, 3 * one, 4 * one)))


@pytest.mark.share(2)
@pytest.mark.parametrize("variant", ["staged", "direct"])
def test_a_window_of_256_at_4096_costs_at_most_0_12_of_dense(variant):
    got = products(4096, variant, is_causal=True, local_window_size=(255, 0))
    for name, full in dense(4096).items():
        assert got[name] <= 0.12 * full, f"{name}: {got[name] / full:.3f} of dense"


@pytest.mark.share(2)
@pytest.mark.parametrize("variant", ["staged", "direct"])
def test_a_block_mask_costs_what_its_blocks_do(variant):
    t, size = 1024, 64
    chosen = np.random.default_rng(3).permutation(256) < 26  # 10 % of 16 × 16 blocks
    mask = BlockMask(chosen.reshape(16, 16), (size, size))
    got = products(t, variant, block_mask=mask)
    for name, full in dense(t).items():
        assert got[name] == full * 26 // 256, f"{name}: {got[name] / full:.3f} of dense"


def test_decoding_loads_each_key_and_value_once_for_the_whole_group():
    rng = np.random.default_rng(0)
    s, n, k, h, filled = 4096, 8, 2, 64, 3000
    x = lambda *shape: rng.standard_normal(shape).astype(np.float16)
    query, key, value = x(1, 1, n, h), x(1, s, k, h), x(1, s, k, h)
    lengths = np.array([filled], np.int32)
    arrays = {"query": query, "key": key, "value": value, "query_offset": lengths - 1, "key_lengths": lengths}
    ran = run(plans.forward(Specification(is_causal=True), arrays), arrays)
    assert not ran.reports
    once = 2 * filled * k * h * 2
    # beside keys and values: the queries and the parameters, for each split
    assert once <= ran.counters["attention_decode_rows"].device_bytes_loaded <= 1.15 * once
