"""Compiled pipelines outlive the process in a folder: found again by who would compile the same for the same machine,
and by nobody else. What is wrong with folder or file costs a compilation, never a call."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
import time
import types
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulator import device, host_module
from emulator.device import Fault, Option
from launcher import Program
from test_launcher import SCALE, SMALL, scale

import jax_mfa
from jax_mfa.metal import runtime
from jax_mfa.tuning import facts

TESTS = pathlib.Path(__file__).resolve().parents[1]


@pytest.fixture
def folder(native: types.ModuleType, metal: device.Control, tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Where an M3 with macOS 15 keeps its pipelines within the test."""
    with metal.profile("m3"):
        native.keep_pipelines(str(tmp_path), "1.0")
        yield tmp_path
        native.keep_pipelines("", "")
    native.reset()


def prepared(native: types.ModuleType, metal: device.Control, program: Program) -> tuple[int, int]:
    """What a process that begins here does for a plan: functions compiled, and found in archives."""
    native.reset()
    metal.totals()
    assert native.prepare(program.text())
    totals, seen = metal.totals(), native.statistics()
    assert totals["pipelines"] == seen["pipelines"] + seen["pipelines_loaded"] == 1
    assert totals["compilations"] == seen["pipelines"]
    return seen["pipelines"], seen["pipelines_loaded"]


COMPILED, LOADED = (1, 0), (0, 1)


def named(native: types.ModuleType, name: str, text: str) -> Program:
    """The same plan, its source registered under a name."""
    program = scale(SMALL)
    native.add_source(name, text)
    program.body["library"]["source"] = name
    return program


def test_the_second_process_compiles_nothing(folder, native, metal) -> None:
    assert prepared(native, metal, scale(SMALL)) == COMPILED
    (file,) = folder.iterdir()
    written = file.stat()
    assert prepared(native, metal, scale(SMALL)) == LOADED
    (out,) = jax.jit(scale(SMALL))(jnp.arange(SMALL, dtype=jnp.float32))
    np.testing.assert_array_equal(out, 3 * np.arange(SMALL, dtype=np.float32))
    (file,) = folder.iterdir()
    assert (file.stat().st_ino, file.stat().st_mtime_ns) == (written.st_ino, written.st_mtime_ns)


def test_another_function_of_the_same_source_is_not_found(folder, native, metal) -> None:
    assert prepared(native, metal, scale(SMALL, 2)) == COMPILED
    assert prepared(native, metal, scale(SMALL, 3)) == COMPILED  # another constant
    changed = named(native, "changed", "#define ANOTHER 1\n" + SCALE)
    assert prepared(native, metal, changed) == COMPILED  # another text
    assert prepared(native, metal, scale(SMALL, 2)) == prepared(native, metal, changed) == LOADED


def test_the_name_of_a_source_does_not_matter(folder, native, metal) -> None:
    assert prepared(native, metal, scale(SMALL)) == COMPILED
    assert prepared(native, metal, named(native, "another", SCALE)) == LOADED


@pytest.mark.parametrize("change", ["macOS", "device", "version"])
def test_another_machine_or_version_finds_nothing(change, folder, native, metal) -> None:
    assert prepared(native, metal, scale(SMALL)) == COMPILED
    before = set(folder.iterdir())
    with metal.profile("m5" if change == "device" else "m3"):
        metal.set(Option.OS_VERSION, 150100 if change == "macOS" else 150000)
        native.keep_pipelines(str(folder), "1.1" if change == "version" else "1.0")
        assert prepared(native, metal, scale(SMALL)) == COMPILED
        assert prepared(native, metal, scale(SMALL)) == LOADED
    assert before < set(folder.iterdir())
    native.keep_pipelines(str(folder), "1.0")
    assert prepared(native, metal, scale(SMALL)) == LOADED


def test_macos_14_keeps_nothing(folder, native, metal) -> None:
    """Its archives take no functions with constants."""
    metal.set(Option.OS_VERSION, 140500)
    for _ in range(2):
        assert prepared(native, metal, scale(SMALL)) == COMPILED
    assert list(folder.iterdir()) == []


# --- what is wrong with a file


def spoil_empty(file: pathlib.Path) -> None:
    file.write_bytes(b"")


def spoil_short(file: pathlib.Path) -> None:
    file.write_bytes(file.read_bytes()[:-2])


def spoil_noise(file: pathlib.Path) -> None:
    file.write_bytes(os.urandom(5000))


def spoil_foreign(file: pathlib.Path) -> None:
    """An archive, whole, of another function."""
    (other,) = [x for x in file.parent.iterdir() if x != file]
    shutil.copyfile(other, file.with_name(file.name[:33] + other.name[33:]))
    file.unlink()


def spoil_nonsense(file: pathlib.Path) -> None:
    """As it was written, and no archive: what the name says of the bytes is right."""
    beside = file.parent / "nonsense"
    beside.write_bytes(b"")
    beside.rename(file.with_name(f"{file.name[:33]}{'cbf29ce484222325'}{'9e3779b97f4a7c15'}.metallib"))
    file.unlink()


def spoil_folder(file: pathlib.Path) -> None:
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize(
    "spoil",
    [spoil_empty, spoil_short, spoil_noise, spoil_foreign, spoil_nonsense, spoil_folder],
    ids=lambda x: x.__name__,
)
def test_a_broken_archive_is_ignored_and_replaced(spoil, folder, native, metal) -> None:
    assert prepared(native, metal, scale(SMALL, 2)) == COMPILED
    (file,) = folder.iterdir()
    assert prepared(native, metal, scale(SMALL, 3)) == COMPILED
    spoil(file)
    assert prepared(native, metal, scale(SMALL, 2)) == COMPILED
    assert prepared(native, metal, scale(SMALL, 2)) == (COMPILED if spoil is spoil_folder else LOADED)
    assert prepared(native, metal, scale(SMALL, 3)) == LOADED
    assert len(list(folder.iterdir())) == 2  # the broken one is gone


@pytest.mark.parametrize("fault", [Fault.ARCHIVE, Fault.ARCHIVE_ADD, Fault.ARCHIVE_WRITE], ids=lambda x: x.name)
def test_an_archive_that_fails_costs_no_call(fault, folder, native, metal) -> None:
    with metal.fault(fault):
        native.reset()
        (out,) = jax.jit(scale(SMALL))(jnp.ones(SMALL))
        assert out[0] == 3 and metal.hits(fault) > 0
        assert list(folder.iterdir()) == []
    assert prepared(native, metal, scale(SMALL)) == COMPILED
    with metal.fault(fault):
        assert prepared(native, metal, scale(SMALL)) == (COMPILED if fault == Fault.ARCHIVE else LOADED)
    assert prepared(native, metal, scale(SMALL))[0] == (fault == Fault.ARCHIVE)  # which took it for broken
    assert prepared(native, metal, scale(SMALL)) == LOADED


def test_what_does_not_compile_says_so_as_without_a_folder(folder, native, metal) -> None:
    said = []
    for place in (folder, ""):
        native.keep_pipelines(str(place), "1.0")
        native.reset()
        with metal.fault(Fault.PIPELINE), pytest.raises(RuntimeError) as error:
            native.prepare(scale(SMALL).text())
        said.append(str(error.value))
        assert native.prepare(scale(SMALL).text())  # what failed is not remembered
    assert said[0] == said[1] and said[0].count("injected") == 1


@pytest.mark.parametrize("place", ["missing/folder", "file", "/proc/self/nothing", "/dev/null"])
def test_a_folder_that_cannot_be_written_is_no_error(place, folder, native, metal) -> None:
    (folder / "file").write_text("")
    native.keep_pipelines(str(folder / place), "1.0")
    for _ in range(2):
        assert prepared(native, metal, scale(SMALL)) == COMPILED
    assert [x.name for x in folder.iterdir()] == ["file"]


# --- several processes

PROCESS = """
import json, os, sys
sys.path[:0] = [{tests!r}]
from emulator import device, host_module
device.load().act_as("m3")
native = host_module.load()
native.keep_pipelines({folder!r}, "1.0")
for name, text in json.load(sys.stdin).items():
    native.add_source(name, text)
sys.stdout.write("ready\\n")
sys.stdout.flush()
while not os.path.exists({go!r}):
    pass
for plan in {plans!r}:
    native.prepare(plan)
seen = native.statistics()
print(seen["pipelines"], seen["pipelines_loaded"], seen["failures"])
"""


def test_processes_at_the_same_time_do_not_disturb_each_other(folder, native, metal, tmp_path_factory) -> None:
    go = tmp_path_factory.mktemp("go") / "now"
    source = scale(SMALL).body["library"]["source"]
    plans = [scale(SMALL, factor).text() for factor in range(1, 6)]
    code = PROCESS.format(tests=str(TESTS), folder=str(folder), go=str(go), plans=plans)
    line = [sys.executable, "-c", code]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(line, **pipes) for _ in range(3)]
    for process in processes:
        process.stdin.write(json.dumps({source: SCALE}))
        process.stdin.close()
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    go.touch()
    said = [tuple(map(int, process.stdout.readline().split())) for process in processes]
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert all(compiled + loaded == 5 and failures == 0 for compiled, loaded, failures in said), said
    assert not list(folder.glob("*.part"))
    for factor in range(1, 6):
        assert prepared(native, metal, scale(SMALL, factor)) == LOADED


# --- attention


def test_attention_of_a_later_process_compiles_nothing_whatever_its_lengths(on_device, folder, native, metal) -> None:
    def step(length: int) -> None:
        native.reset()
        runtime._prepare.cache_clear()
        jax.clear_caches()
        x = jnp.asarray(np.random.default_rng(3).standard_normal((1, length, 2, 16)), jnp.float32)
        attend = lambda x: jax_mfa.dot_product_attention(x, x, x, is_causal=True, implementation="metal").sum()
        jax.block_until_ready(jax.jit(jax.grad(attend))(x))

    step(40)
    first = native.statistics()
    step(77)
    second = native.statistics()
    assert (first["pipelines"], first["pipelines_loaded"]) == (4, 0)
    assert (second["pipelines"], second["pipelines_loaded"]) == (0, 4)


# --- which folder it is


def test_the_folder_is_in_the_cache_and_can_be_named_or_left_out(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(facts.PIPELINES, raising=False)
    assert facts.pipelines(by_default=False) == "" and not list(tmp_path.iterdir())
    assert facts.pipelines(by_default=True) == str(tmp_path / "cache" / "jax_mfa" / "pipelines")
    monkeypatch.setenv(facts.PIPELINES, str(tmp_path / "named"))
    for by_default in (True, False):
        assert facts.pipelines(by_default) == str(tmp_path / "named") and (tmp_path / "named").is_dir()
    monkeypatch.setenv(facts.PIPELINES, "none")
    assert facts.pipelines(by_default=True) == ""


def test_a_folder_that_cannot_be_made_is_left_out(monkeypatch, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(facts.PIPELINES, str(tmp_path / "file"))
    assert facts.pipelines(by_default=True) == ""
    monkeypatch.delenv(facts.PIPELINES)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert facts.pipelines(by_default=True) == ""
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(pathlib.Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert facts.pipelines(by_default=True) == ""


def test_what_nobody_has_made_for_long_goes(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv(facts.PIPELINES, str(tmp_path))
    ago = time.time() - (facts.MOST_DAYS + 1) * 86400
    for name, old in (("a.metallib", True), ("b.metallib", False), ("c.part", True), ("letter.txt", True)):
        (tmp_path / name).write_text("")
        os.utime(tmp_path / name, (ago, ago) if old else None)
    assert facts.pipelines(by_default=True) == str(tmp_path)
    assert sorted(x.name for x in tmp_path.iterdir()) == ["b.metallib", "letter.txt"]


def test_the_environment_chooses_the_folder_of_a_process(monkeypatch, tmp_path, native) -> None:
    monkeypatch.setenv(facts.PIPELINES, str(tmp_path))
    asked = []
    real = host_module.load()
    fake = types.SimpleNamespace(
        api_version=real.api_version,
        handler=real.handler,
        add_source=lambda *_: None,
        keep_pipelines=lambda *x: asked.append(x),
    )
    monkeypatch.setattr(runtime, "_load", lambda chosen: fake)
    monkeypatch.setattr(runtime, "TARGETS", ())
    assert runtime._registered.__wrapped__("emulator").module is fake
    assert asked == [(str(tmp_path), runtime._version())]
