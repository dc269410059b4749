"""What the documentation promises: programs run, commands exist, pictures are of today's tables, links lead somewhere,
and the site builds without a warning."""

import contextlib
import importlib.util
import io
import pathlib
import re
import shlex
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import jax_mfa
from jax_mfa.__main__ import main

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FIRST = ("README.md", "contract.md", "architecture.md")  # the others run in sweeps: their time is compilation
FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def blocks(page, language):
    return [text for kind, text in FENCE.findall(page.read_text(encoding="utf-8")) if kind == language]


def prelude():
    """The names that docs/index.md promises."""
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (2, 64, 4, 16)) for key in keys)
    lengths = jnp.array([64, 40])
    return dict(q=q, k=k, v=v, length=64, lengths=lengths, jax=jax, jnp=jnp, jax_mfa=jax_mfa)


def with_programs():
    sweep = lambda page: () if page.name in FIRST else (pytest.mark.sweep,)
    return [pytest.param(x, id=x.name, marks=sweep(x)) for x in PAGES if blocks(x, "python")]


@pytest.mark.parametrize("page", with_programs())
def test_the_programs_of_a_page_run_one_after_another(page):
    names = prelude()
    with contextlib.redirect_stdout(io.StringIO()):
        for i, program in enumerate(blocks(page, "python")):
            exec(compile(program, f"{page.name}, program {i + 1}", "exec"), names)


def commands():
    """Each command of the package that the documentation names."""
    found = re.compile(r"python -m jax_mfa( [^`\n|#]*)?")
    return sorted({x.strip() for page in PAGES for x in found.findall(page.read_text(encoding="utf-8")) if x.strip()})


@pytest.mark.parametrize("command", commands())
def test_a_command_that_is_named_exists_with_its_options(command, monkeypatch):
    from jax_mfa import bench, check, tuning
    from jax_mfa.metal import show

    ran = []
    for tool in (bench, check, tuning, show):
        monkeypatch.setattr(tool, "run", lambda options: ran.append(options) or 0)
    assert main(shlex.split(command)) == 0 and len(ran) == 1


def drawing():
    spec = importlib.util.spec_from_file_location("pictures", ROOT / "docs" / "pictures.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pictures_are_of_todays_tables():
    pictures = drawing()
    for name in pictures.PICTURES:
        text = (ROOT / "docs" / "pictures" / f"{name}.svg").read_text(encoding="utf-8")
        assert f"drawn from data {pictures.digest(name)}" in text, f"python docs/pictures.py draws {name} anew"


def test_the_picture_of_a_fragment_has_two_elements_for_each_lane():
    lanes = [lane for row in drawing().fragment_data() for lane in row]
    assert sorted(lanes) == sorted([*range(32)] * 2)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page):
    for target in re.findall(r"\]\((?!\w+:|#)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


def test_the_readme_fits_a_screen():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 50


def test_every_public_name_stands_in_the_api():
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    missing = [name for name in jax_mfa.__all__ if name != "DISABLE_EXPORT_CHECKS" and f"jax_mfa.{name}" not in page]
    assert missing == []


def test_the_site_builds_without_a_warning(tmp_path):
    for module in ("mkdocs", "material", "mkdocstrings"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed; it comes with the extra `docs`")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "jax_mfa.flash_attention" in (tmp_path / "site" / "api" / "index.html").read_text(encoding="utf-8")
