"""`python -m jax_mfa bench`: what it measures, and that one candidate's failure costs no other its figures."""

import json

import jax.numpy as jnp
import pytest

from jax_mfa import bench
from jax_mfa.__main__ import main

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


def test_a_failure_of_ours_shows_in_the_exit_status(tmp_path, capsys):
    arguments = [*QUICK, "blockwise", "--key-value-heads", "3", "--lengths", "8", "--out", str(tmp_path)]
    assert main(arguments) == 1
    assert "blockwise did not run" in capsys.readouterr().out


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
    assert main(["bench", "--out", str(tmp_path / "file" / "results")]) == 2
    assert "--out" in capsys.readouterr().out
