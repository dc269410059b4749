"""`python -m jax_mfa bench`: what it measures, and that one candidate's failure costs no other its figures."""

import contextlib
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import assert_allclose

from jax_mfa.__main__ import main
from jax_mfa.cli import bench, bench_candidates, bench_devices, bench_predict, bench_problems, bench_report
from jax_mfa.cli.bench_candidates import MLX, STOCK, TORCH
from jax_mfa.cli.bench_problems import BOTH, COMPILING, DECODE, FORWARD, TANGENT, TRAINING, Problem

ROOT = pathlib.Path(__file__).resolve().parents[1]
QUICK = ["bench", "--rounds", "1", "--heads", "2", "--head-sizes", "8", "--implementations"]


@pytest.fixture(autouse=True)
def hurry(monkeypatch):
    monkeypatch.setattr(bench, "SHORTEST", 0.0)
    monkeypatch.setattr(bench_candidates, "OTHERS", {})  # importing PyTorch takes longer than the rest


def written(folder):
    return json.loads((folder / "bench.json").read_text())


def rows(folder):
    return written(folder)["rows"]


def refuse(*_, **__):
    raise ValueError("not today")


def test_every_candidate_is_timed_on_each_problem(tmp_path, capsys):
    assert main([*QUICK, "blockwise,reference", "--lengths", "8,12,8", "--out", str(tmp_path)]) == 0
    found = rows(tmp_path)
    assert [(r["problem"], r["kind"]) for r in found] == [
        (f"B1 T{t} N2 H8{mask}", kind) for t in (8, 12) for mask in ("", " causal") for kind in BOTH
    ]
    for row in found:
        assert row["failures"] == {} and {STOCK, "blockwise", "reference"} <= set(row["seconds"])
        assert row["ratios"] == {
            n: x / row["seconds"]["blockwise"] for n, x in row["seconds"].items() if n != "blockwise"
        }
        assert all(row["temporary_bytes"][name] >= 0 for name in (STOCK, "blockwise", "reference"))
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    said = capsys.readouterr().out
    assert "| problem | pass | time | vs jax.nn | " in said and " vs reference |" in said
    assert "| B1 T12 N2 H8 causal | forward+backward | " in said


def test_a_sweep_is_every_combination_and_summed_up_by_each_of_its_axes(tmp_path, capsys, monkeypatch):
    def measured(problem, kind, candidates, *_):
        return {name: [2e-3 if name == STOCK else 1e-3] for name in candidates}, {}, {}

    monkeypatch.setattr(bench_candidates, "_measure", measured)
    axes = "--lengths 4,6 --batches 1,2 --heads 4,2 --key-value-heads 1,2 --head-sizes 8,16 --dtypes float32,bfloat16"
    more = "--masks none,causal,window,padding --passes forward,forward+backward,decode --window 3"
    command = ["bench", "--implementations", "blockwise", "--out", str(tmp_path)]
    assert main([*command, *axes.split(), *more.split()]) == 0
    found = rows(tmp_path)
    square, decoding = ([r for r in found if (r["kind"] == DECODE) == x] for x in (False, True))
    assert len({(r["problem"], r["kind"]) for r in found}) == len(found)
    assert len(square) == 2**6 * 4 * 2
    assert len(decoding) == 2**6 * 3  # where a causal mask hides nothing
    assert {r["sizes"]["window"] for r in found} == {None, 3}
    said = capsys.readouterr().out.splitlines()
    for kind in (*BOTH, DECODE):
        masks = "none: 2.00x, window: 2.00x, padding: 2.00x" if kind == DECODE else "none: 2.00x, causal: 2.00x, "
        for axis, values in {
            "length": "4: 2.00x, 6: 2.00x",
            "batch": "1: 2.00x, 2: 2.00x",
            "heads": "4/1: 2.00x, 4/2: 2.00x, 2/1: 2.00x, 2: 2.00x",
            "head size": "8: 2.00x, 16: 2.00x",
            "dtype": "float32: 2.00x, bfloat16: 2.00x",
            "mask": masks,
        }.items():
            assert any(x.startswith(f"vs jax.nn by {axis}, {kind}: {values}") for x in said), (axis, kind)


@pytest.mark.share(4)
@pytest.mark.parametrize("kind", [FORWARD, DECODE])
@pytest.mark.parametrize("mask", bench_problems.MASKS)
def test_all_candidates_compute_the_same(mask, kind):
    values = {**bench_problems.SWEEP, "lengths": [12], "batches": [3], "heads": [4], "key_value_heads": [2]}
    (problem,) = bench_problems.sweep({**values, "masks": [mask], "passes": [kind]}, window=5)
    arrays = bench_candidates.arrays(problem)
    names = (STOCK, "blockwise", "reference")
    results = {name: np.asarray(bench_candidates.attention(problem, name)(*arrays[:3])) for name in names}
    for name, make in {TORCH: bench_candidates._in_torch, MLX: bench_candidates._in_mlx}.items():
        with contextlib.suppress(ImportError):  # where it is not installed
            results[name] = np.asarray(make(problem, kind, arrays)()).transpose(0, 2, 1, 3)
    for name, x in results.items():
        assert_allclose(x, results["reference"], rtol=0, atol=1e-5, err_msg=name)
    q, k, v = (np.asarray(x, np.float64) for x in arrays[:3])
    x = np.einsum("btnh,bsnh->bnts", q, k.repeat(2, 2)) / 8
    weights = np.exp(np.where(problem.visible, x, -np.inf))
    expected = np.einsum("bnts,bsnh->btnh", weights / weights.sum(-1, keepdims=True), v.repeat(2, 2))
    assert_allclose(results["reference"], expected, rtol=0, atol=1e-5)
    assert bench_report.scores(problem) == 4 * np.broadcast_to(problem.visible, (3, *problem.visible.shape[1:])).sum()


@pytest.mark.share(2)
@pytest.mark.parametrize("kind", BOTH)
def test_a_bias_of_pairs_is_shared_and_gets_its_gradient(kind):
    problem = Problem("", 3, 12, 12, 4, 4, 8, pair_bias=True)
    given = bench_candidates.arrays(problem)
    assert given[3].shape == (1, 4, 12, 12) and "pair bias" in str(problem)
    run = lambda name: bench_candidates.of_pass(kind, bench_candidates.attention(problem, name))(*given)
    results = {name: jax.tree.leaves(run(name)) for name in (STOCK, "blockwise", "reference")}
    for name, found in results.items():
        for x, wanted in zip(found, results["reference"], strict=True):
            assert_allclose(x, wanted, rtol=0, atol=2e-5, err_msg=name)


def test_a_candidate_that_fails_is_listed_with_its_reason_and_the_others_go_on(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench_candidates.jax.nn, "dot_product_attention", refuse)
    assert main([*QUICK, "blockwise", "--lengths", "8", "--out", str(tmp_path)]) == 0
    for row in rows(tmp_path):
        assert row["failures"] == {STOCK: "ValueError: not today"} and row["seconds"]["blockwise"] > 0
        assert STOCK not in row["ratios"]
    said = capsys.readouterr().out
    assert "jax.nn did not run B1 T8 N2 H8 forward; B1 T8 N2 H8 forward+backward; B1 T8 N2 H8 causal" in said


def test_a_failure_of_ours_shows_in_the_exit_status(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench_candidates, "dot_product_attention", refuse)
    assert main([*QUICK, "blockwise", "--lengths", "8", "--out", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "blockwise did not run" in said and "| B1 T8 N2 H8 | forward | - | - |" in said


def test_an_interrupted_run_prints_and_writes_what_was_measured(tmp_path, capsys, monkeypatch):
    measured = []

    def measure_twice(problem, kind, candidates, *_):
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.append(kind)
        return {name: [1e-3] for name in candidates}, dict.fromkeys(candidates, 2**20), {}

    monkeypatch.setattr(bench_candidates, "_measure", measure_twice)
    assert main([*QUICK, "blockwise", "--lengths", "8,16", "--out", str(tmp_path)]) == 130
    said = capsys.readouterr()
    assert len(rows(tmp_path)) == 2 and written(tmp_path)["interrupted"]
    assert (tmp_path / "bench.png").exists()
    assert "| B1 T8 N2 H8 | forward+backward | 1.00 ms |" in said.out and "causal" not in said.out
    assert "interrupted: 2 of 8 measurements were made" in said.err


def test_a_run_interrupted_before_anything_is_measured_leaves_earlier_files(tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_candidates, "_measure", stop)
    (tmp_path / "bench.json").write_text("an earlier run")
    assert main([*QUICK, "blockwise", "--lengths", "8", "--out", str(tmp_path)]) == 130
    assert (tmp_path / "bench.json").read_text() == "an earlier run"


def test_files_that_cannot_be_written_cost_no_figures(tmp_path, capsys):
    (tmp_path / "bench.json").mkdir()
    assert main([*QUICK, "blockwise", "--no-stock", "--lengths", "8", "--out", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert "| B1 T8 N2 H8 causal | forward+backward |" in said.out and "bench.json" in said.err


@pytest.mark.parametrize(
    "settings, ascii",
    [
        ({"PYTHONIOENCODING": "ascii"}, True),
        ({"LANG": "C"}, True),
        ({"LC_ALL": "POSIX"}, True),
        ({"LANG": "C", "PYTHONIOENCODING": "utf-8"}, False),
        ({"LANG": "C.UTF-8"}, False),
    ],
)
def test_output_is_ascii_where_the_terminal_is(settings, ascii):
    code = """
from jax_mfa.cli import bench_report, command_line
command_line.fit_output_to_the_terminal()
row = dict(name="naïve → x", problem="B1", kind="forward", implementation="ours", temporary_bytes={}, failures={})
for line in bench_report.table([dict(row, seconds={"jax.nn": 2}, ratios={"jax.nn": 2})]):
    print(line)
"""
    names = ("LC_ALL", "LC_CTYPE", "LANG", "PYTHONIOENCODING", "PYTHONUTF8")
    environment = {name: x for name, x in os.environ.items() if name not in names}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, env={**environment, **settings})
    assert done.returncode == 0, done.stderr
    expected = "| na?ve > x | B1 | forward |" if ascii else "| naïve → x | B1 | forward |"
    assert expected.encode() in done.stdout


def test_axes_have_plain_labels(tmp_path, monkeypatch):
    from matplotlib import figure

    drawn = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, *_, **__: drawn.append(self))
    found = [
        dict(
            implementation="blockwise",
            kind=kind,
            sizes=dict(S=length, mask=mask),
            seconds={"blockwise": seconds},
            ratios={},
            temporary_bytes={"blockwise": 3 * 2**20},
        )
        for length, seconds in {64: 2e-3, 200: 7e-3}.items()  # within one decade
        for mask in ("none", "causal")
        for kind in BOTH
    ]
    bench_report.plot(found, tmp_path / "bench.png", "title", "")
    times, memory, _, _ = drawn[0].axes
    assert len(times.lines) == len(memory.lines) == 4 and all(len(x.get_xdata()) == 2 for x in times.lines)
    assert [x.get_text() for x in times.get_legend().get_texts()] == [f"blockwise, {kind}" for kind in BOTH]
    assert [label.get_text() for label in memory.get_xticklabels()] == ["64", "200"]
    low, high = times.get_ylim()
    shown = [label for label, y in zip(times.get_yticklabels(), times.get_yticks()) if low <= y <= high]
    assert [label.get_text() for label in shown] == ["2", "5"]


def test_dtypes_and_grouped_heads_are_those_asked_for(tmp_path, monkeypatch):
    seen = set()
    attend = bench_candidates.dot_product_attention

    def watch(query, key, value, **keywords):
        seen.add((query.dtype, query.shape[2], key.shape[2], value.shape[2]))
        return attend(query, key, value, **keywords)

    monkeypatch.setattr(bench_candidates, "dot_product_attention", watch)
    arguments = [*QUICK, "blockwise", "--key-value-heads", "1", "--dtype", "bfloat16", "--lengths", "8"]
    assert main([*arguments, "--no-stock", "--out", str(tmp_path)]) == 0  # a value alone, its option in the singular
    assert seen == {(jnp.dtype("bfloat16"), 2, 1, 1)}
    assert all(STOCK not in row["seconds"] for row in rows(tmp_path))


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--lengths", "8,x"], "--lengths: expected a positive integer, got 'x'"),
        (["--lengths", "0"], "got '0'"),
        (["--rounds", "-3"], "--rounds: expected a positive integer, got '-3'"),
        (["--heads", "0"], "--heads"),
        (["--key-value-heads", "0"], "--key-value-heads"),
        (["--key-value-heads", "3"], "argument --key-value-heads: expected a divisor of --heads 8, got 3"),
        (["--key-value-heads", "2,3"], "argument --key-value-heads: expected a divisor of --heads 8, got 3"),
        (["--implementations", "cuda"], "'cuda' is not one of metal, blockwise, reference"),
        (["--masks", "causal,diagonal"], "argument --masks: 'diagonal' is not one of none, causal, window, padding"),
        (["--dtypes", "float64"], "argument --dtypes: 'float64' is not one of float16, bfloat16, float32"),
        (["--passes", "backward"], "argument --passes: 'backward' is not one of forward, forward+backward, decode"),
        (["--window", "0"], "argument --window: expected a positive integer, got '0'"),
        (["--models", "llama", "--batches", "2"], "argument --models: not allowed with argument --batches"),
        (["--models", "--preset"], "argument --preset: not allowed with argument --models"),
        (["--predict", "nobody_knows_it"], "argument --predict: No module named 'nobody_knows_it'"),
        (["--predict", "json"], "argument --predict: module 'json' has no attribute 'matrix_shares'"),
        (["--devices", "1,2", "--masks", "none"], "argument --devices: not allowed with other masks than causal"),
        (["--devices", "1,2", "--passes", "decode"], "argument --devices: not allowed with other masks than causal"),
    ],
)
def test_options_are_checked(arguments, said, capsys):
    with pytest.raises(SystemExit) as refused:
        main(["bench", *arguments])
    assert refused.value.code == 2
    assert said in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_is_found_before_anything_is_timed(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench_candidates, "measure", None)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(SystemExit) as refused:
        main(["bench", "--out", str(tmp_path / "file" / "results")])
    assert refused.value.code == 2
    assert "argument --out: " in capsys.readouterr().err


def test_a_device_that_there_is_not_is_named(tmp_path, capsys, monkeypatch):
    def refuse():
        raise ValueError("JAX_MFA_DEVICE must be unset")

    monkeypatch.setattr(bench, "start_metal", refuse)
    with pytest.raises(SystemExit) as refused:
        main(["bench", "--out", str(tmp_path)])
    assert refused.value.code == 2
    assert "error: JAX_MFA_DEVICE must be unset" in capsys.readouterr().err


# --- named models


@pytest.fixture
def small_models(monkeypatch):
    make = lambda name, **other: Problem(name, 2, 5, 7, 4, 2, 8, **other)
    problems = (
        make("first"),
        make("second", mask="causal", passes=(TANGENT,)),
        Problem("third", 2, 1, 7, 4, 2, 8, dtype="bfloat16", passes=(DECODE,)),
        Problem("fourth", 1, 5, 5, 4, 2, 8, passes=(COMPILING,)),
    )
    monkeypatch.setattr(bench_problems, "PROBLEMS", problems)
    monkeypatch.setattr(bench_candidates, "LAYERS", 2)


MODELS = ["bench", "--rounds", "1", "--implementations", "blockwise", "--models"]


def test_each_pass_of_a_named_model_has_a_row_with_its_ratios(tmp_path, capsys, small_models):
    assert main([*MODELS, "--out", str(tmp_path)]) == 0
    found = rows(tmp_path)
    assert [(r["name"], r["kind"]) for r in found] == [
        ("first", FORWARD),
        ("first", TRAINING),
        ("second", TANGENT),
        ("third", DECODE),
        ("fourth", COMPILING),
    ]
    for row in found:
        assert row["ratios"][STOCK] == row["seconds"][STOCK] / row["seconds"]["blockwise"]
    said = capsys.readouterr().out
    assert "| second | B2 T5 S7 N4 K2 H8 causal | forward mode |" in said
    assert said.count("(slower)") == sum(x < 1 for row in found for x in row["ratios"].values())


def test_models_are_chosen_by_a_part_of_their_name(tmp_path, small_models):
    assert main([*MODELS, "FIRST", "--out", str(tmp_path)]) == 0
    found = rows(tmp_path)
    assert {row["name"] for row in found} == {"first"}


def test_an_unknown_model_is_an_option_error(tmp_path, capsys, small_models):
    with pytest.raises(SystemExit, match="2"):
        main([*MODELS, "nobody", "--out", str(tmp_path)])
    assert "first, second, third, fourth" in capsys.readouterr().err


def test_the_data_file_has_the_models_with_their_sources():
    import importlib.resources

    for file in ("models.json", "chips.json"):
        found = json.loads(importlib.resources.files("jax_mfa.cli").joinpath(file).read_text())
        assert found and all(x.get("source") or x.get("why") for x in found)
    named = {p.name: p for p in bench_problems.PROBLEMS}
    assert (named["TinyLlama 1.1B"].N, named["TinyLlama 1.1B"].K, named["TinyLlama 1.1B"].S) == (32, 4, 2048)
    assert named["Gemma 2 2B"].soft_cap == 50.0 and "cap" in str(named["Gemma 2 2B"])


def test_chips_are_known_by_family():
    families = {x["name"].removeprefix("Apple "): x["family"] for x in bench_report.CHIPS.values()}
    assert {"M1 Ultra", "M2 Ultra", "M3", "M3 Max", "M3 Ultra", "M4", "M5", "M5 Pro", "M5 Max"} < set(families)
    assert all(family == {"1": 7, "2": 8, "5": 10}.get(name[1], 9) for name, family in families.items())


@pytest.mark.parametrize("mask", bench_problems.MASKS)
def test_predictions_count_the_tiles_in_which_a_pair_counts(mask):
    problem = bench_problems.Problem("", 2, 75, 75, 3, 3, 64, mask, window=20 if mask == "window" else None)
    rows, columns = 16, 8
    seen = np.zeros((2, 80, 80), bool)
    seen[:, :75, :75] = problem.visible[:, 0]
    tiles = seen.reshape(2, 80 // rows, rows, 80 // columns, columns).any((2, 4)).sum()
    assert bench_predict.tiled(problem, rows, columns) == 3 * tiles * rows * columns


def test_the_preset_is_48_problems_over_batch_length_and_head_size():
    problems = bench_problems.sweep({**bench_problems.SWEEP, **bench_problems.PRESET})
    sizes = {(p.B, p.T, p.H) for p in problems}
    assert len(sizes) == len(problems) == 48
    assert [sorted({x[i] for x in sizes}) for i in range(3)] == [[1, 2, 4, 8], [64, 128, 256, 512], [32, 64, 128]]


def test_figures_follow_from_the_work_and_the_time():
    p = Problem("x", 2, 3, 3, 4, 2, 8, mask="causal")
    assert bench_report.scores(p) == 2 * 4 * 6
    found = bench_report.figures(p, FORWARD, 0.5, "Apple M1")
    assert found["tokens_per_second"] == 12
    assert found["ginstr"] == pytest.approx(48 * 21 / 0.5 / 1e9)
    assert found["tflops"] == pytest.approx(48 * 4 * 8 / 0.5 / 1e12)
    assert found["share"] == pytest.approx(found["ginstr"] / 1300)
    both = bench_report.figures(p, TRAINING, 0.5, "a chip that nobody knows")
    assert both["ginstr"] == pytest.approx(48 * (21 + 29 + 37) / 0.5 / 1e9) and both["share"] is None


def test_the_preset_writes_figures_a_picture_and_summaries(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench_problems, "PRESET", {"lengths": [4, 6], "batches": [1, 2], "masks": ["none"]})
    assert main([*QUICK, "blockwise", "--preset", "--batches", "3", "--out", str(tmp_path)]) == 0
    found = written(tmp_path)
    assert found["resident_bytes"] > 2**20 and found["rounds"] == 1
    assert [r["problem"] for r in found["rows"]] == 2 * ["B3 T4 N2 H8"] + 2 * ["B3 T6 N2 H8"]
    for row in found["rows"]:
        low, middle, high = row["quartiles"]["blockwise"]
        assert row["seconds"]["blockwise"] <= low <= middle <= high
        assert row["figures"]["tflops"] > 0 and row["temporary_bytes"]["blockwise"] is not None
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    said = capsys.readouterr().out
    assert "vs jax.nn by length, forward: 4: " in said and "vs jax.nn by batch" not in said
    assert "GINSTR/s" in said and "of peak" not in said
    assert f"the process held {found['resident_bytes'] / 2**20:.0f} MiB of memory at most" in said


def times_file(folder, name, **quartiles):
    rows = [
        dict(name=problem, problem="B1", kind="forward", implementation="blockwise", quartiles={"blockwise": x})
        for problem, x in quartiles.items()
    ]
    (folder / name).write_text(json.dumps(dict(rows=rows)))
    return str(folder / name)


@pytest.mark.parametrize(
    "new, status, verdict",
    [
        ([1.05, 1.1, 1.2], 0, "same"),  # within the quartiles
        ([1.45, 1.5, 1.55], 1, "REGRESSION"),
        ([0.49, 0.5, 0.51], 0, "faster"),
    ],
)
def test_comparing_two_files_fails_where_something_got_slower_beyond_noise(new, status, verdict, tmp_path, capsys):
    old = times_file(tmp_path, "old.json", a=[0.9, 1.0, 1.1], b=[1.0, 1.0, 1.0])
    new = times_file(tmp_path, "new.json", a=new, c=[9.0, 9.0, 9.0])
    assert main(["bench", "--compare", old, new]) == status
    said = capsys.readouterr().out.splitlines()
    assert said[1].startswith("a B1 forward: ") and said[1].endswith(verdict)
    assert said[0] == "2 problems are in one of the files only"


def test_a_file_that_is_none_cannot_be_compared(tmp_path, capsys):
    (tmp_path / "old.json").write_text('{"rows": [{}]}')
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "--compare", str(tmp_path / "old.json"), str(tmp_path / "none.json")])
    assert "argument --compare: " in capsys.readouterr().err


def test_over_devices_what_is_sent_and_kept_stands_beside_the_formulas(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))  # which is changed
    command = [*QUICK, "blockwise", "--lengths", "64", "--devices", "1,4", "--heads", "4", "--out", str(tmp_path)]
    assert main(command) == 0
    found = json.loads((tmp_path / "bench_devices.json").read_text())["rows"]
    assert len(found) == 2 * (1 + len(bench_devices.FORMS)) and not any(row["failure"] for row in found)
    for row in found:
        assert row["seconds"] > 0 and row["memory"] > 0 and row["memory_formula"] > 0
        assert row["bytes_sent"] == pytest.approx(row["bytes_formula"])
        assert (row["bytes_sent"] > 0) == (row["devices"] > 1)
    keys = 64 // 4 * 4 * (8 + 8) * 4  # of one device, four heads of size 8
    ring = {row["kind"]: row["bytes_sent"] for row in found if row["form"] == "ring"}
    # three hops forward; back three more, and five of the sums of gradients, in float32
    assert ring == {"forward": 3 * keys, "forward+backward": 11 * keys}
    assert "| B1 T64 N4 H8 causal | 4 | ulysses | forward+backward |" in capsys.readouterr().out


def test_a_form_that_fails_is_listed_with_its_reason_and_the_others_go_on(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
    monkeypatch.delitem(bench_devices.FORMS, "ring, zigzag")
    command = [*QUICK, "blockwise", "--devices", "2", "--out", str(tmp_path), "--lengths", "16", "--heads", "3"]
    assert main(command) == 1  # three heads cannot be exchanged over two devices
    said = capsys.readouterr().out
    assert (
        "ulysses did not run B1 T16 N3 H8 causal over 2 devices, forward: ValueError: " in said
        and "ring did not run" not in said
    )
