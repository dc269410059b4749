"""Tiles that `jax_mfa.tune` tries on Metal: what a plan may have, of kernels that give the same result."""

import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import assert_allclose

import jax_mfa
from jax_mfa import metal
from jax_mfa.arguments import specify_abstract
from jax_mfa.metal import tiles
from jax_mfa.tuning import timing, tuned

SHAPE = jax.ShapeDtypeStruct((1, 40, 2, 16), jnp.float32)


@pytest.fixture(autouse=True)
def no_file(monkeypatch):
    monkeypatch.setenv(tuned.FILE, "none")


def test_a_plan_takes_the_tiles_of_a_trial_and_gives_the_same_result(on_device):
    spec, operands = specify_abstract(query=SHAPE, key=SHAPE, value=SHAPE)
    usual, *others = metal.candidates(spec, operands, "forward")
    other = next(x for x in others if x[2] != usual[2])  # another number of columns
    x = jnp.asarray(np.random.default_rng(0).standard_normal(SHAPE.shape), jnp.float32)
    results = []
    for each in (usual, other):
        jax.clear_caches()
        with tuned.trial("metal forward", each), jax_mfa.record() as seen:
            results.append(jax.jit(lambda x: jax_mfa.dot_product_attention(x, x, x, implementation="metal"))(x))
        (kernel,) = seen.as_dict()["metal"]["kernels"]
        assert kernel.endswith("_".join(map(str, each)))
    assert_allclose(*results, rtol=0, atol=1e-5)


def test_tiles_that_are_staged_and_tiles_that_are_not_are_tried_on_every_chip():
    for table in tiles.VARIANTS.values():
        found = tiles.candidates(table[64, 2].forward, 64, 64, 2)
        assert {x.buffers for x in found} == {0, 1, 2}  # straight from device memory, staged, in two buffers by turns


def test_candidates_keep_to_registers_and_threadgroup_memory():
    for table in tiles.VARIANTS.values():
        for (head, item), entry in table.items():
            for usual in (entry.forward, entry.d_query, entry.d_key_value):
                found = tiles.candidates(usual, head, head, item)
                assert found[0] == usual and len(found) == len(set(found)) > 1
                for x in found[1:]:
                    assert x.fragment_bytes(head, head, item) <= tiles.FRAGMENT_BUDGET
                    assert x.threadgroup_memory(head, head, item) <= tiles.THREADGROUP_BYTES
                    assert x.slices == usual.slices


# --- decoding: how many columns a split has

B, S = 2, 1100
DECODING = {
    "query": jax.ShapeDtypeStruct((B, 1, 2, 16), jnp.float32),
    **dict.fromkeys(("key", "value"), jax.ShapeDtypeStruct((B, S, 2, 16), jnp.float32)),
    **dict.fromkeys(("query_offset", "key_value_seq_lengths"), jax.ShapeDtypeStruct((B,), jnp.int32)),
    "is_causal": True,
}
KEY = f"metal decode B{B} T1 S{S} N2 K2 H16 V16 float32 causal query_offset key_lengths"


def planned_splits(spec, operands):
    plan = metal.plan_of(spec, operands, "forward", metal.tiles_of(spec, operands, "forward"))
    assert plan.name == "attention_decode"
    (splits,) = {b.shape[2] for b in plan.results if b.name == "split_out"}
    return splits


def decode(x):
    lengths = jnp.asarray([S, 700])
    return jax_mfa.decode_attention(x[:, :1], x, x, lengths, implementation="metal")


def test_splits_of_any_size_give_the_same_result(on_device):
    spec, operands = specify_abstract(**DECODING)
    usual, *others = metal.candidates(spec, operands, "decode")
    assert usual == (256,) and metal.candidates(spec, operands, "forward") == {}
    assert others == [(128,), (512,), (64,), (1024,), (32,), (1104,)]  # S to the next multiple of a tile's columns
    x = jnp.asarray(np.random.default_rng(0).standard_normal((B, S, 2, 16)), jnp.float32)
    results = []
    for each in ((32,), usual, (1104,)):
        jax.clear_caches()
        with tuned.trial("metal decode", each), jax_mfa.record() as seen:
            assert planned_splits(spec, operands) == -(-S // each[0])
            results.append(jax.jit(decode)(x))
        assert sum(seen.as_dict()["metal"]["kernels"].values()) == 2  # it attends, and merges
    reference = jax_mfa.decode_attention(x[:, :1], x, x, jnp.asarray([S, 700]), implementation="reference")
    for result in results:
        assert_allclose(result, reference, rtol=0, atol=1e-5)


def test_decoding_is_tuned_and_its_winner_taken(on_device, tmp_path, monkeypatch):
    def timed(programs, *_):
        return {x: [0.5 if x == (512,) else 1.0] * 4 for x in programs}

    monkeypatch.setenv(tuned.FILE, str(tmp_path / "tiles.json"))
    monkeypatch.setattr(timing, "timed", timed)
    (found,) = (x for x in jax_mfa.tune(DECODING, passes=("forward",), tries=2) if x.plan == "metal decode")
    assert (found.usual, found.best, found.tried, found.wrong) == ((256,), (512,), 2, 0)
    assert json.loads((tmp_path / "tiles.json").read_text())[tuned.chip()]["winners"][KEY] == [512]
    with jax_mfa.record() as seen:  # a call's problem has the same name
        jax.eval_shape(decode, jax.ShapeDtypeStruct((B, S, 2, 16), jnp.float32))
        jax.jit(decode).lower(jax.ShapeDtypeStruct((B, S, 2, 16), jnp.float32))
    assert f"metal decode {next(iter(seen.problems))}" == KEY
    assert planned_splits(*specify_abstract(**DECODING)) == 3


@pytest.mark.parametrize("numbers", [[100], [0], [-256], [2**40], [256, 4], [], [256.5], "256", {"columns": 256}, None])
def test_a_wrong_split_in_a_file_is_ignored_with_one_line(numbers, on_device, tmp_path, monkeypatch):
    file = tmp_path / "tiles.json"
    monkeypatch.setenv(tuned.FILE, str(file))
    file.write_text(json.dumps({tuned.chip(): {"version": tuned.VERSION, "winners": {KEY: numbers}}}))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            assert planned_splits(*specify_abstract(**DECODING)) == 5  # of 256 columns, as without a file
    (line,) = (str(x.message) for x in said)
    assert str(file) in line and "is ignored" in line and "\n" not in line
