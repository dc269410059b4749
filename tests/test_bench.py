"""`python -m jax_mfa bench`: what it measures, and that one candidate's failure costs no other its figures."""

import json
import os
import pathlib
import subprocess
import sys

import jax.numpy as jnp
import pytest

from jax_mfa import bench, bench_devices, bench_figures, bench_models
from jax_mfa.__main__ import main

ROOT = pathlib.Path(__file__).resolve().parents[1]
QUICK = ["bench", "--rounds", "1", "--heads", "2", "--head-size", "8", "--implementations"]


@pytest.fixture(autouse=True)
def hurry(monkeypatch):
    monkeypatch.setattr(bench, "SHORTEST", 0.0)


def rows(folder):
    return json.loads((folder / "bench.json").read_text())["rows"]


def test_every_candidate_has_a_row_for_each_problem(tmp_path, capsys):
    assert main([*QUICK, "blockwise,reference", "--lengths", "8,12,8", "--out", str(tmp_path)]) == 0
    found = rows(tmp_path)
    assert len(found) == 2 * 2 * 2 * 3
    for row in found:
        assert row["seconds"] > 0 and row["temporary_bytes"] >= 0 and not row["failure"]
        stock = next(x for x in found if {**x, **same(row)} == x and x["implementation"] == bench.STOCK)
        assert row["speedup"] == stock["seconds"] / row["seconds"]
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert "| 12 | causal | forward+backward | reference |" in capsys.readouterr().out


def same(row):
    """What rows have in common that belong to one problem."""
    return {name: row[name] for name in ("length", "mask", "kind")}


def test_a_candidate_that_fails_is_listed_with_its_reason_and_the_others_go_on(tmp_path, capsys, monkeypatch):
    def refuse(*_, **__):
        raise ValueError("not today")

    monkeypatch.setattr(bench.jax.nn, "dot_product_attention", refuse)
    assert main([*QUICK, "blockwise", "--lengths", "8", "--out", str(tmp_path)]) == 0
    for row in rows(tmp_path):
        failed = row["implementation"] == bench.STOCK
        assert (row["seconds"] is None) == failed
        assert row["speedup"] is None
        assert row["failure"] == ("ValueError: not today" if failed else "")
    assert "jax.nn did not run 8 dense forward, 8 dense forward+backward, 8 causal" in capsys.readouterr().out


def test_a_failure_of_ours_shows_in_the_exit_status(tmp_path, capsys, monkeypatch):
    def refuse(*_, **__):
        raise ValueError("not today")

    monkeypatch.setattr(bench, "dot_product_attention", refuse)
    assert main([*QUICK, "blockwise", "--lengths", "8", "--out", str(tmp_path)]) == 1
    assert "blockwise did not run" in capsys.readouterr().out


def test_an_interrupted_run_prints_and_writes_what_was_measured(tmp_path, capsys, monkeypatch):
    measured = []

    def time_twice(functions, *_):
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.append(functions)
        return {name: dict(seconds=1e-3, temporary_bytes=2**20, speedup=1.0, failure="") for name in functions}

    monkeypatch.setattr(bench, "_time", time_twice)
    assert main([*QUICK, "blockwise", "--lengths", "8,16", "--out", str(tmp_path)]) == 130
    said = capsys.readouterr()
    assert len(rows(tmp_path)) == 4 and json.loads((tmp_path / "bench.json").read_text())["interrupted"]
    assert (tmp_path / "bench.png").exists()
    assert "| 8 | dense | forward+backward | blockwise | 1.0 ms |" in said.out and "| 8 | causal" not in said.out
    assert "interrupted: 4 of 16 programs were timed" in said.err


def test_a_run_interrupted_before_anything_is_measured_leaves_earlier_files(tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "_time", stop)
    (tmp_path / "bench.json").write_text("an earlier run")
    assert main([*QUICK, "blockwise", "--lengths", "8", "--out", str(tmp_path)]) == 130
    assert (tmp_path / "bench.json").read_text() == "an earlier run"


def test_files_that_cannot_be_written_cost_no_figures(tmp_path, capsys):
    (tmp_path / "bench.json").mkdir()
    assert main([*QUICK, "blockwise", "--no-stock", "--lengths", "8", "--out", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert "| 8 | causal | forward+backward | blockwise |" in said.out and "bench.json" in said.err


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
from jax_mfa import bench, command_line
command_line.fit_output_to_the_terminal()
row = dict(length=8, mask="dense", kind="forward", implementation="naïve", seconds=None, temporary_bytes=0, speedup=2)
print(bench.table([row]))
"""
    names = ("LC_ALL", "LC_CTYPE", "LANG", "PYTHONIOENCODING", "PYTHONUTF8")
    environment = {name: x for name, x in os.environ.items() if name not in names}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, env={**environment, **settings})
    assert done.returncode == 0, done.stderr
    expected = "| 8 | dense | forward | na?ve | - | 2.00x |" if ascii else "| 8 | dense | forward | naïve | – | 2.00× |"
    assert expected.encode() in done.stdout


def test_axes_have_plain_labels(tmp_path, monkeypatch):
    from matplotlib import figure

    drawn = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, *_, **__: drawn.append(self))
    facts = dict(implementation="blockwise", temporary_bytes=3 * 2**20, failure="")
    lengths = {64: 2e-3, 200: 7e-3}  # within one decade
    bench.plot(
        [
            dict(length=length, mask=mask, kind=kind, seconds=seconds, **facts)
            for length, seconds in lengths.items()
            for mask in bench.MASKS
            for kind in bench.BOTH
        ],
        tmp_path / "bench.png",
        "title",
    )
    times, _, memory, _ = drawn[0].axes
    assert [label.get_text() for label in memory.get_xticklabels()] == ["64", "200"]
    low, high = times.get_ylim()
    shown = [label for label, y in zip(times.get_yticklabels(), times.get_yticks()) if low <= y <= high]
    assert [label.get_text() for label in shown] == ["2", "5"]


def test_dtypes_and_grouped_heads_are_those_asked_for(tmp_path, monkeypatch):
    seen = set()
    attend = bench.dot_product_attention

    def watch(query, key, value, **keywords):
        seen.add((query.dtype, query.shape[2], key.shape[2], value.shape[2]))
        return attend(query, key, value, **keywords)

    monkeypatch.setattr(bench, "dot_product_attention", watch)
    arguments = [*QUICK, "blockwise", "--key-value-heads", "1", "--dtype", "bfloat16", "--lengths", "8"]
    assert main([*arguments, "--no-stock", "--out", str(tmp_path)]) == 0
    assert seen == {(jnp.dtype("bfloat16"), 2, 1, 1)}
    assert {row["implementation"] for row in rows(tmp_path)} == {"blockwise"}


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--lengths", "8,x"], "--lengths: expected a positive integer, got 'x'"),
        (["--lengths", "0"], "got '0'"),
        (["--rounds", "-3"], "--rounds: expected a positive integer, got '-3'"),
        (["--heads", "0"], "--heads"),
        (["--key-value-heads", "0"], "--key-value-heads"),
        (["--key-value-heads", "3"], "argument --key-value-heads: expected a divisor of --heads 8, got 3"),
        (["--implementations", "cuda"], "'cuda' is not one of metal, blockwise, reference"),
    ],
)
def test_options_are_checked(arguments, said, capsys):
    with pytest.raises(SystemExit) as refused:
        main(["bench", *arguments])
    assert refused.value.code == 2
    assert said in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_is_found_before_anything_is_timed(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench, "measure", None)
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
    make = lambda name, **other: bench_models.Problem(name, 2, 5, 7, 4, 2, 8, **other)
    problems = (
        make("first"),
        make("second", is_causal=True, passes=(bench_models.TANGENT,)),
        bench_models.Problem("third", 2, 1, 7, 4, 2, 8, dtype="bfloat16", decode=True, passes=(bench_models.FORWARD,)),
        bench_models.Problem("fourth", 1, 5, 5, 4, 2, 8, passes=(bench_models.COMPILING,)),
    )
    monkeypatch.setattr(bench_models, "PROBLEMS", problems)
    monkeypatch.setattr(bench_models, "LAYERS", 2)


MODELS = ["bench", "--rounds", "1", "--implementations", "blockwise", "--models"]


def test_each_pass_of_a_named_model_has_a_row_with_its_ratios(tmp_path, capsys, small_models):
    assert main([*MODELS, "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "bench_models.json").read_text())["rows"]
    assert [(r["name"], r["kind"]) for r in found] == [
        ("first", bench_models.FORWARD),
        ("first", bench_models.TRAINING),
        ("second", bench_models.TANGENT),
        ("third", bench_models.FORWARD),
        ("fourth", bench_models.COMPILING),
    ]
    for row in found:
        assert row["ratios"][bench.STOCK] == row["seconds"][bench.STOCK] / row["seconds"]["blockwise"]
    said = capsys.readouterr().out
    assert "| second | B2 T5 S7 N4 K2 H8 causal | forward mode |" in said
    assert said.count("(slower)") == sum(x < 1 for row in found for x in row["ratios"].values())


def test_models_are_chosen_by_a_part_of_their_name(tmp_path, small_models):
    assert main([*MODELS, "FIRST", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "bench_models.json").read_text())["rows"]
    assert {row["name"] for row in found} == {"first"}


def test_an_unknown_model_is_an_option_error(tmp_path, capsys, small_models):
    with pytest.raises(SystemExit, match="2"):
        main([*MODELS, "nobody", "--out", str(tmp_path)])
    assert "first, second, third, fourth" in capsys.readouterr().err


@pytest.mark.parametrize("whose,status", [("stock", 0), ("ours", 1)])
def test_a_candidate_that_fails_on_a_model_is_listed_with_its_reason(
    whose, status, tmp_path, capsys, monkeypatch, small_models
):
    def refuse(*_, **__):
        raise ValueError("not today")

    where = (bench_models.jax.nn, bench_models)[whose == "ours"]
    monkeypatch.setattr(where, "dot_product_attention", refuse)
    assert main([*MODELS, "first", "--out", str(tmp_path)]) == status
    said = capsys.readouterr().out
    assert "did not run B2 T5 S7 N4 K2 H8 forward: ValueError: not today" in said
    assert "| first | B2 T5 S7 N4 K2 H8 | forward |" in said


def test_the_data_file_has_the_models_with_their_sources():
    import importlib.resources

    for file in ("models.json", "chips.json"):
        found = json.loads(importlib.resources.files("jax_mfa").joinpath(file).read_text())
        assert found and all(x["source"] for x in found)
    named = {p.name: p for p in bench_models.PROBLEMS}
    assert (named["TinyLlama 1.1B"].N, named["TinyLlama 1.1B"].K, named["TinyLlama 1.1B"].S) == (32, 4, 2048)
    assert named["Gemma 2 2B"].soft_cap == 50.0 and "cap" in str(named["Gemma 2 2B"])


def test_the_preset_is_48_problems_over_batch_length_and_head_size():
    sizes = {(p.B, p.T, p.H) for p in bench_models.PRESET}
    assert len(sizes) == len(bench_models.PRESET) == 48
    assert [sorted({x[i] for x in sizes}) for i in range(3)] == [[1, 2, 4, 8], [64, 128, 256, 512], [32, 64, 128]]


def test_figures_follow_from_the_work_and_the_time():
    p = bench_models.Problem("x", 2, 3, 3, 4, 2, 8, is_causal=True)
    assert bench_figures.scores(p) == 2 * 4 * 6
    found = bench_figures.figures(p, bench_models.FORWARD, 0.5, "Apple M1")
    assert found["tokens_per_second"] == 12
    assert found["ginstr"] == pytest.approx(48 * 21 / 0.5 / 1e9)
    assert found["tflops"] == pytest.approx(48 * 4 * 8 / 0.5 / 1e12)
    assert found["share"] == pytest.approx(found["ginstr"] / 1300)
    both = bench_figures.figures(p, bench_models.TRAINING, 0.5, "a chip that nobody knows")
    assert both["ginstr"] == pytest.approx(48 * (21 + 29 + 37) / 0.5 / 1e9) and both["share"] is None


def test_the_preset_writes_figures_a_picture_and_summaries(tmp_path, capsys, monkeypatch):
    make = lambda b, t: bench_models.Problem(f"B{b} T{t}", b, t, t, 2, 2, 8)
    monkeypatch.setattr(bench_models, "PRESET", (make(1, 4), make(2, 6)))
    arguments = ["bench", "--preset", "--rounds", "1", "--implementations", "blockwise", "--out", str(tmp_path)]
    assert main(arguments) == 0
    found = json.loads((tmp_path / "bench_models.json").read_text())
    assert found["resident_bytes"] > 2**20 and len(found["rows"]) == 4
    for row in found["rows"]:
        low, middle, high = row["quartiles"]["blockwise"]
        assert row["seconds"]["blockwise"] <= low <= middle <= high
        assert row["figures"]["tflops"] > 0 and row["temporary_bytes"]["blockwise"] is not None
    assert (tmp_path / "bench_models.png").read_bytes().startswith(b"\x89PNG")
    said = capsys.readouterr().out
    assert "vs jax.nn by length, forward: 4: " in said and "vs jax.nn by batch, forward+backward: 1: " in said
    assert "GINSTR/s" in said and "of peak" not in said


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
    assert "| 64 | 4 | ulysses | forward+backward |" in capsys.readouterr().out


def test_a_form_that_fails_is_listed_with_its_reason_and_the_others_go_on(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
    monkeypatch.delitem(bench_devices.FORMS, "ring, zigzag")
    command = [*QUICK, "blockwise", "--devices", "2", "--out", str(tmp_path), "--lengths", "16", "--heads", "3"]
    assert main(command) == 1  # three heads cannot be exchanged over two devices
    said = capsys.readouterr().out
    assert "ulysses did not run 16 over 2 devices, forward: ValueError: " in said and "ring did not run" not in said
