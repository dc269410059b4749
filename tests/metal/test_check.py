"""`python -m jax_mfa check` says what there is, passes where kernels are right, and fails where they are not."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest

from jax_mfa import check
from jax_mfa.__main__ import READER_GONE
from jax_mfa.command_line import INTERRUPTED
from jax_mfa.metal import DTYPES, runtime, tiles

ROOT = pathlib.Path(__file__).resolve().parents[2]


def command(device: str, *arguments: str, **settings: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_MFA_DEVICE": device, **settings}
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
    last = done.stdout.splitlines()[-1]
    assert last.split(None, 1) == [
        "FAILED",
        "ValueError: JAX_MFA_DEVICE must be unset, 'none' or 'emulator', got 'bogus'",
    ]


def test_a_jax_that_cannot_start_is_a_finding():
    done = command("none", "--quick", JAX_PLATFORMS="bogus")
    assert done.returncode == 2 and not done.stderr
    assert done.stdout.startswith("machine ") and "'bogus'" in done.stdout.splitlines()[-1]


def test_a_reader_that_stops_reading_is_no_error():
    line = [sys.executable, "-m", "jax_mfa", "source"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_MFA_DEVICE": "none"}
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        assert process.stdout and process.stderr
        assert process.stdout.readline()
        process.stdout.close()
        assert not process.stderr.read()
    assert process.returncode == READER_GONE


@pytest.fixture
def passing(monkeypatch):
    """Every problem passes without being run."""

    def judge(problem, implementation):
        return check.Verdict(problem, dict.fromkeys(check.RESULTS, 0.0), dict.fromkeys(check.RESULTS, 0.0))

    monkeypatch.setattr(check, "judge", judge)
    return judge


@pytest.mark.parametrize("expected, status", [(True, 0), (False, 1)])
def test_metal_that_should_be_here_and_is_not_is_a_failure(monkeypatch, capsys, passing, expected, status):
    monkeypatch.setattr(runtime, "get", lambda: runtime.Runtime(reason="no such module", expected=expected))
    assert check.run(check.argparse.Namespace(quick=True)) == status
    printed = capsys.readouterr().out
    assert "Metal was not checked (no such module)" in printed and rows(printed)
    assert ("FAILED: Metal should be here and cannot be used" in printed) == (status == 1)
    assert ("all passed" in printed) == (status == 0)


def test_what_may_have_to_be_built_is_said_before(monkeypatch, capsys, passing):
    def get():
        said.append(capsys.readouterr().err)
        return runtime.Runtime(reason="cannot be built")

    said: list[str] = []
    monkeypatch.setattr(runtime, "get", get)
    monkeypatch.setenv("JAX_MFA_DEVICE", "emulator")
    assert check.run(check.argparse.Namespace(quick=True)) == 1
    assert said[0].startswith("building the emulated Metal device")


def test_a_row_names_its_problem_before_it_runs(monkeypatch, capsys, passing):
    def judge(problem, implementation):
        printed.append(capsys.readouterr().out)
        return passing(problem, implementation)

    printed: list[str] = []
    monkeypatch.setattr(check, "judge", judge)
    monkeypatch.setattr(runtime, "get", lambda: runtime.Runtime(reason="not here", expected=True))
    assert check.run(check.argparse.Namespace(quick=False)) == 0
    todo = check.problems(["blockwise"])
    assert [text.splitlines()[-1] for text in printed] == [check.row_start(problem) for problem in todo]


def test_an_interrupted_check_says_how_far_it_came(monkeypatch, capsys, passing):
    def judge(problem, implementation):
        if problem.causal:
            raise KeyboardInterrupt
        return passing(problem, implementation)

    monkeypatch.setattr(check, "judge", judge)
    monkeypatch.setattr(runtime, "get", lambda: runtime.Runtime(reason="not here", expected=True))
    assert check.run(check.argparse.Namespace(quick=True)) == INTERRUPTED
    printed = capsys.readouterr().out
    assert len(rows(printed)) == 1 and "| causal | interrupted" in printed
    assert "interrupted: 0 failed of blockwise, 1 problems" in printed and printed.endswith("1 did not run\n")


def test_ctrl_c_ends_a_check_at_once_and_without_a_traceback():
    line = [sys.executable, "-m", "jax_mfa", "check"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_MFA_DEVICE": "none"}
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout and process.stderr
        while "|---" not in process.stdout.readline():  # the first problem is being traced and compiled
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        printed, errors = process.communicate(timeout=60)
    assert process.returncode == INTERRUPTED and not errors
    assert "interrupted: 0 failed" in printed


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
