"""`python -m jax_mfa check` says what there is, passes where kernels are right, and fails where they are not."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from jax_mfa import check
from jax_mfa.__main__ import READER_GONE
from jax_mfa.metal import DTYPES, runtime, tiles

ROOT = pathlib.Path(__file__).resolve().parents[2]


def command(device: str, *arguments: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_MFA_DEVICE": device}
    line = [sys.executable, "-m", "jax_mfa", "check", *arguments]
    return subprocess.run(line, capture_output=True, text=True, encoding="utf-8", env=environment)


def rows(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("|") and line.endswith("pass |")]


def test_it_passes_on_the_emulated_device(native):
    done = command("emulator", "--quick")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "emulated" in done.stdout and "float16: metal" in done.stdout and "all passed: metal" in done.stdout
    assert {line.split("|")[1].strip() for line in rows(done.stdout)} == set(tiles.NAMES)


def test_without_metal_it_says_so_and_checks_blockwise():
    done = command("none", "--quick")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "JAX_MFA_DEVICE=none forbids Metal" in done.stdout and "Metal was not checked" in done.stdout
    assert "float32: blockwise" in done.stdout and "all passed: blockwise" in done.stdout and rows(done.stdout)


def test_a_device_that_there_is_not_is_a_finding():
    done = command("bogus", "--quick")
    assert done.returncode == 2 and not done.stderr
    (line,) = done.stdout.splitlines()
    assert line.split(None, 1) == ["Metal", "JAX_MFA_DEVICE must be unset, 'none' or 'emulator', got 'bogus'"]


def test_a_reader_that_stops_reading_is_no_error():
    line = [sys.executable, "-m", "jax_mfa", "source"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_MFA_DEVICE": "none"}
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        assert process.stdout and process.stderr
        assert process.stdout.readline()
        process.stdout.close()
        assert not process.stderr.read()
    assert process.returncode == READER_GONE


def test_metal_is_judged_on_cpu_whatever_the_default_device(monkeypatch, capsys):
    monkeypatch.setattr(runtime, "get", lambda: runtime.Runtime(module=object(), device={"families": ["apple7"]}))
    places = []

    def judge(problem, implementation):
        places.append((implementation, getattr(jax.config.jax_default_device, "platform", None)))
        return check.Verdict(problem, dict.fromkeys(check.RESULTS, 0.0), dict.fromkeys(check.RESULTS, 0.0))

    monkeypatch.setattr(check, "judge", judge)
    assert check.run(check.argparse.Namespace(quick=True)) == 0
    assert places and set(places) == {("metal", "cpu")}
    assert "all passed: metal" in capsys.readouterr().out


@pytest.mark.parametrize("workers", [0, 1])
def test_a_report_says_where_metal_is_left_out(tmp_path, workers):
    (tmp_path / "no_emulator.py").write_text("import sys\nsys.modules['emulator'] = None\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    environment.pop("JAX_MFA_DEVICE", None)
    line = [sys.executable, "-m", "pytest", "-p", "no_emulator", "-n", str(workers)]
    line += ["tests/test_philox.py", "-k", "agrees_with_64_bit"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, encoding="utf-8", env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("the emulated Metal device is left out: ") == 1


def test_every_entry_of_every_table_is_among_the_problems():
    found = {
        tiles.select(p.variant, p.head_size, p.value_size, check.ITEM_SIZES[p.dtype])
        for p in check.problems(list(tiles.VARIANTS))
    }
    assert found == {entry for table in tiles.VARIANTS.values() for entry in table.values()}
    assert {p.dtype for p in check.problems(["staged"])} == set(DTYPES)


@pytest.mark.parametrize("wrong", ["a little", "nan", "an exception"])
def test_a_wrong_result_fails_with_its_error(monkeypatch, capsys, wrong):
    """One value of one gradient is off by 1 % of the largest."""
    real = check._both

    def both(implementation, **arguments):
        attention = real(implementation, **arguments)
        if implementation == "reference":
            return attention

        def spoilt(*arrays):
            if wrong == "an exception":
                raise RuntimeError("no such kernel")
            *results, dv = attention(*arrays)
            amount = np.nan if wrong == "nan" else 0.01 * abs(dv).max()
            return (*results, dv.at[0, 3, 0, 1].add(amount))

        return spoilt

    monkeypatch.setattr(check, "_both", both)
    monkeypatch.setattr(runtime, "get", lambda: runtime.Runtime(reason="not here", expected=True))
    options = check.argparse.Namespace(quick=True)
    assert check.run(options) == 1
    printed = capsys.readouterr().out
    assert "FAILED: 2 of blockwise" in printed and not rows(printed)
    assert ("no such kernel" if wrong == "an exception" else "FAIL dv >") in printed


def test_a_variant_can_be_named_for_a_while(monkeypatch):
    monkeypatch.setattr(runtime, "get", lambda: runtime.Runtime(device={"families": ["apple7"]}))
    traced = []

    @jax.jit
    def program(x):
        traced.append(runtime.get().variant)
        return x

    program(1)
    with runtime.variant("direct"):
        program(1)
        program(1)
    program(1)
    assert traced == ["staged", "direct", "staged"]
