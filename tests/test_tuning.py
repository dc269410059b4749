"""`jax_mfa.tune`: only right tiles win, winners are kept by chip and taken, and a file that is wrong is ignored."""

import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import assert_allclose

import jax_mfa
from jax_mfa import blockwise
from jax_mfa.__main__ import main
from jax_mfa.arguments import specify_abstract
from jax_mfa.cli import bench_candidates, bench_problems
from jax_mfa.tuning import timing, tuned
from jax_mfa.tuning import tune as tuning

SHAPE = jax.ShapeDtypeStruct((1, 96, 2, 8), jnp.float32)
PROBLEM = {"query": SHAPE, "key": SHAPE, "value": SHAPE, "is_causal": True}
KEY = "blockwise forward B1 T96 S96 N2 K2 H8 V8 float32 causal"
OTHER = (1, 2, 48, 96)


@pytest.fixture(autouse=True)
def file(tmp_path, monkeypatch):
    place = tmp_path / "tiles.json"
    monkeypatch.setenv(tuned.FILE, str(place))
    monkeypatch.setattr(tuning, "SHORTEST", 0.0)
    monkeypatch.setattr(tuning.choice, "refusal", lambda *_: "tests/metal/test_tuning_on_metal.py has its tiles")
    jax.clear_caches()
    yield place
    jax.clear_caches()


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setattr(blockwise.tiles, "TUNED_BLOCKS", (48, 96))


def write(file, winners, version=tuned.VERSION):
    file.write_text(json.dumps({tuned.chip(): {"version": version, "source": "a test", "winners": winners}}))


def taken():
    spec, operands = specify_abstract(**PROBLEM)
    return blockwise.tiling_of(spec, operands, backward=False)


SMALL_DECODING = {**bench_problems.SWEEP, "lengths": [1500], "heads": [2], "masks": ["padding"], "passes": ["decode"]}
USUAL = blockwise.Tiles(1, 2, 96, 96)


def test_a_winner_is_kept_for_this_chip_and_taken_by_programs_from_then_on(file, monkeypatch, small_tiles):
    def timed(programs, *_):
        return {x: [0.5 if x == OTHER else 1.0] * 4 for x in programs}

    monkeypatch.setattr(timing, "timed", timed)
    assert taken() == USUAL
    (found,) = jax_mfa.tune(PROBLEM, passes=("forward",), tries=40)
    assert (found.usual, found.best, found.gain, found.wrong) == ((1, 2, 96, 96), OTHER, 2.0, 0)
    assert json.loads(file.read_text())[tuned.chip()]["winners"] == {KEY: list(OTHER)}
    assert taken() == blockwise.Tiles(*OTHER)
    x = jnp.asarray(np.random.default_rng(0).standard_normal(SHAPE.shape), jnp.float32)
    with jax_mfa.record() as seen:
        out = jax_mfa.dot_product_attention(x, x, x, is_causal=True, implementation="blockwise")
    assert [choice.plan for choice in seen.choices] == ["tiles of 48 x 96, 1 x 2 heads at a time"]
    reference = jax_mfa.dot_product_attention(x, x, x, is_causal=True, implementation="reference")
    assert_allclose(out, reference, rtol=0, atol=1e-5)
    with_mask = specify_abstract(**PROBLEM, mask=jax.ShapeDtypeStruct((96, 96), jnp.bool_))
    assert blockwise.tiling_of(*with_mask, backward=False) == USUAL  # another problem


def test_what_gives_another_result_or_does_not_compile_is_never_timed(monkeypatch, small_tiles):
    forward, timed_tiles = blockwise.forward, []

    def broken(spec, operands):
        tiles = blockwise.tiling_of(spec, operands, backward=False)
        if tiles.block_kv == 48:
            raise RuntimeError("no such tiles")
        out, *rows = forward(spec, operands)
        return (out * (1 + 1e-3 * (tiles.block_q == 48)), *rows)

    def timed(programs, *_):
        timed_tiles.append(list(programs))
        return {x: [1.0] for x in programs}

    monkeypatch.setattr(blockwise, "forward", broken)
    monkeypatch.setattr(timing, "timed", timed)
    (found,) = jax_mfa.tune(PROBLEM, passes=("forward",), tries=40)
    assert found.best == found.usual and found.gain == 1
    assert timed_tiles and all(x[2:] == (96, 96) for x in timed_tiles[0])
    assert found.wrong == found.tried + 1 - len(timed_tiles[0]) > 0


def test_a_gain_that_does_not_come_again_is_no_gain(file, monkeypatch, small_tiles):
    turns = []

    def timed(programs, *_):
        turns.append(programs)
        fast = {0: 0.5, 1: 0.99}[len(turns) - 1]
        return {x: [fast if x == OTHER else 1.0] * 4 for x in programs}

    monkeypatch.setattr(timing, "timed", timed)
    (found,) = jax_mfa.tune(PROBLEM, passes=("forward",), tries=40)
    assert len(turns) == 2 and set(turns[1]) == {found.usual, OTHER}
    assert found.best == found.usual and not file.exists()


@pytest.mark.parametrize(
    "text",
    [
        "not JSON",
        "[]",
        '{"CHIP": []}',
        '{"CHIP": {"version": 0, "winners": {}}}',
        '{"CHIP": {"version": 1}}',
        '{"CHIP": {"version": 1, "winners": {"KEY": "fast"}}}',
        '{"CHIP": {"version": 1, "winners": {"KEY": 7}}}',
        '{"CHIP": {"version": 1, "winners": {"KEY": [1, 1, 5, 96]}}}',
        '{"CHIP": {"version": 1, "winners": {"KEY": [1, 1, 96]}}}',
        '{"CHIP": {"version": 1, "winners": {"KEY": [1, 7, 96, 96]}}}',
    ],
)
def test_a_wrong_or_old_file_is_ignored_with_one_line(text, file):
    file.write_text(text.replace("CHIP", tuned.chip()).replace("KEY", KEY))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert taken() == taken() == USUAL
    (line,) = (str(x.message) for x in said)
    assert str(file) in line and "is ignored" in line and "\n" not in line


def test_winners_of_another_chip_are_not_taken_and_stay_in_the_file(file, small_tiles):
    file.write_text(json.dumps({"M9": {"version": 1, "winners": {KEY: list(OTHER)}}}))
    assert taken() == USUAL
    tuned.store({KEY: OTHER}, "a test")
    assert set(json.loads(file.read_text())) == {"M9", tuned.chip()}


def test_none_neither_reads_nor_keeps(file, monkeypatch, small_tiles):
    write(file, {KEY: OTHER})
    assert taken() == blockwise.Tiles(*OTHER)
    monkeypatch.setenv(tuned.FILE, "none")
    assert taken() == USUAL and tuned.store({KEY: OTHER}, "") is None


def test_candidates_keep_the_memory_of_the_usual_tiles_and_what_a_step_can_take():
    spec, operands = specify_abstract(
        *(), query=jax.ShapeDtypeStruct((4, 3000, 12, 64), jnp.float32), **_keys((4, 2500, 4, 64))
    )
    usual = blockwise.tiling_of(spec, operands, backward=False)
    found = blockwise.candidates(spec, operands, usual)
    assert found[0] == usual and len(found) == len(set(found)) > 10
    for x in found:
        assert x.batch * x.heads * 3 * x.block_q * x.block_kv <= max(2**20, 3 * usual.block_q * usual.block_kv)
        assert 4 % x.batch == 0 and 4 % x.heads == 0 and (x.batch == 1 or x.heads == 4)


def _keys(shape):
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name in ("key", "value")}


def test_a_recorder_names_problems_and_those_without_candidates_are_left_out(monkeypatch, small_tiles):
    tried = []
    monkeypatch.setattr(tuning, "_tuned", lambda plan, problem, *_: tried.append((plan, problem)))
    x = jnp.ones((1, 96, 2, 32))
    with jax_mfa.record() as seen:
        jax.eval_shape(lambda x: x, x)
        jax_mfa.dot_product_attention(x, x, x, implementation="blockwise")
        jax_mfa.dot_product_attention(
            x, jax_mfa.quantize(x, jax_mfa.Scheme("int8", channels=32)), x, implementation="blockwise"
        )
    jax_mfa.tune(seen, keep=False)
    assert {problem for _, problem in tried} == {"B1 T96 S96 N2 K2 H32 V32 float32"}
    assert {plan for plan, _ in tried} >= {"blockwise forward", "blockwise backward"}


@pytest.mark.parametrize(
    "keywords, said",
    [
        ({"passes": ("sideways",)}, "passes: expected some of"),
        ({"rounds": 0}, "rounds must be at least 1, got 0"),
        ({"tries": 0}, "tries must be at least 1, got 0"),
    ],
)
def test_arguments_are_checked(keywords, said):
    with pytest.raises(ValueError, match=said):
        jax_mfa.tune(PROBLEM, **keywords)


def test_what_is_no_problem_is_refused():
    with pytest.raises(TypeError, match="problems: expected arguments by name or a Recorder, got int"):
        jax_mfa.tune(7)


def test_the_command_prints_a_line_for_each_plan_and_keeps_what_it_found(file, capsys, monkeypatch, small_tiles):
    def of_problem(spec, operands, passes, tries, rounds):
        assert (passes, tries, rounds) == (tuning.PASSES, 3, 2)
        yield tuning.Tuned("blockwise forward", spec.summary(operands), (1, 2, 96, 96), OTHER, 1e-3, 1.5, 3, 1)

    monkeypatch.setattr(tuning, "search", of_problem)
    arguments = ["tune", "--lengths", "96", "--heads", "2", "--head-size", "8", "--causal", "--tries", "3"]
    assert main([*arguments, "--rounds", "2"]) == 0
    said = capsys.readouterr().out
    assert f"{KEY}: [1, 2, 96, 96], 1 ms; [1, 2, 48, 96], 1.50 times as fast (3 others tried, 1 of them wrong)" in said
    assert f"kept in {file}" in said and taken() == blockwise.Tiles(*OTHER)
    file.unlink()
    assert main([*arguments, "--rounds", "2", "--dry-run"]) == 0 and not file.exists()
    with pytest.raises(SystemExit):
        main(["tune", "--models", "nobody"])
    assert "--models: expected a part of a name of TinyLlama" in capsys.readouterr().err


def test_problems_of_models_keep_their_caps_and_decoding_is_tuned_forward_only(capsys, monkeypatch):
    seen = {}

    def of_problem(spec, operands, passes, tries, rounds):
        seen[spec.summary(operands)] = passes
        return iter(())

    monkeypatch.setattr(tuning, "search", of_problem)
    assert main(["tune", "--models", "gemma"]) == main(["tune", "--models", "decoding, llama"]) == 0
    assert seen == {
        "B1 T2048 S2048 N8 K4 H256 V256 float32 causal cap": tuning.PASSES,
        "B1 T1 S1024 N32 K8 H128 V128 float32 causal query_offset key_lengths": ("forward",),
    }
    assert "nothing is kept" in capsys.readouterr().out


def test_blockwise_decoding_is_tuned_as_a_call_names_it(file, monkeypatch):
    monkeypatch.setattr(timing, "timed", lambda programs, *_: {x: [1.0] for x in programs})
    (problem,) = (p for p in bench_problems.sweep(SMALL_DECODING))
    (found,) = jax_mfa.tune(bench_candidates.arguments(problem), passes=("forward",), tries=3)
    assert (found.plan, found.wrong) == ("blockwise forward", 0) and found.tried == 3
    q, k, v, _ = bench_candidates.arrays(problem)
    with jax_mfa.record() as seen:
        jax_mfa.decode_attention(q, k, v, jnp.asarray(problem.lengths), implementation="blockwise")
    assert list(seen.problems) == [found.problem]
