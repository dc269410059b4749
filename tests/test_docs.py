"""What the documentation promises: programs run, commands exist, pictures are of today's tables, links lead somewhere,
and the site builds without a warning."""

import contextlib
import importlib.util
import io
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tomllib

import jax
import jax.numpy as jnp
import pytest

import jax_mfa
from jax_mfa.__main__ import main

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ALL = [*PAGES, ROOT / "CONTRIBUTING.md", *(ROOT / x / "README.md" for x in ("csrc", "metal", "tests/emulator"))]
# the others run in sweeps: their time is compilation
FIRST = ("README.md", "contract.md", "architecture.md", "elsewhere.md")
# a block may have a comment above it: `not run: ` and why, or that it runs in sweeps
SHELL = re.compile(r"^(?:<!-- ([^\n]*) -->\n)?```(?:sh|bash|console)\n(.*?)^```", re.DOTALL | re.MULTILINE)
IN_SWEEPS = "run in sweeps"
NOT_RUN = [
    ("README.md", "not run: downloads packages"),
    ("README.md", "not run: downloads packages"),
    ("elsewhere.md", "not run: downloads packages"),
    ("generation.md", "not run: downloads packages"),
    ("getting-started.md", "not run: downloads packages"),
    ("getting-started.md", "not run: takes minutes"),
    ("testing-kernels.md", "not run: takes minutes"),
    ("CONTRIBUTING.md", "not run: downloads packages"),
]
# a program, the package that a comment above says it needs, and what it prints where a block of text follows
PROGRAM = re.compile(
    r"^(?:<!-- needs (\w+) -->\n)?```python\n(.*?)^```\n(?:\n```text\n(.*?)^```)?", re.DOTALL | re.MULTILINE
)
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
    names, missing = prelude(), []
    for i, (package, program, printed) in enumerate(PROGRAM.findall(page.read_text(encoding="utf-8"))):
        if package and importlib.util.find_spec(package) is None:
            missing.append(package)
            continue
        with contextlib.redirect_stdout(io.StringIO()) as said:
            exec(compile(program, f"{page.name}, program {i + 1}", "exec"), names)
        assert printed in ("", said.getvalue()), f"program {i + 1} prints:\n{said.getvalue()}"
    if missing:
        pytest.skip(f"all of {page.name} ran but the programs that need {', '.join(missing)}")


def shell_blocks():
    """Page, what the comment above says, and text."""
    return [(page.name, *found) for page in ALL for found in SHELL.findall(page.read_text(encoding="utf-8"))]


def shell_blocks_that_run():
    marks = {"": (), IN_SWEEPS: (pytest.mark.sweep,)}
    blocks = [(page, marks.get(said), text) for page, said, text in shell_blocks()]
    return [pytest.param(text, id=f"{page}-{i}", marks=x) for i, (page, x, text) in enumerate(blocks) if x is not None]


@pytest.mark.parametrize("text", shell_blocks_that_run())
def test_the_shell_commands_of_a_page_run(text, tmp_path):
    for part in ROOT.iterdir():
        if part.name not in ("results", "build"):
            (tmp_path / part.name).symlink_to(part)
    python = pathlib.Path(sys.executable).parent
    found = os.environ | {"PATH": f"{python}:{os.environ['PATH']}", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    found |= {"JAX_MFA_DEVICE": "none"}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text], cwd=tmp_path, env=found, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_shell_block_is_run_or_says_why_not():
    assert [(page, said) for page, said, _ in shell_blocks() if said not in ("", IN_SWEEPS)] == NOT_RUN
    fences = r"^```(?:sh|bash|console)\b"  # of any kind, also one that the tests would not recognise
    found = [x for page in ALL for x in re.findall(fences, page.read_text(encoding="utf-8"), re.MULTILINE)]
    assert len(found) == len(shell_blocks()) > len(NOT_RUN)


def commands():
    """Each command of the package that the documentation names."""
    found = re.compile(r"python -m jax_mfa( [^`\n|#]*)?")
    return sorted({x.strip() for page in PAGES for x in found.findall(page.read_text(encoding="utf-8")) if x.strip()})


@pytest.mark.parametrize("command", commands())
def test_a_command_that_is_named_exists_with_its_options(command, monkeypatch):
    from jax_mfa.cli import bench, check, show, tune

    monkeypatch.syspath_prepend(ROOT / "tests" / "metal")  # where what predicts is
    ran = []
    for tool in (bench, check, tune, show):
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


LINK = re.compile(r"(!?)\[[^\]]*\]\(([^)#]+)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page):
    for _, target in LINK.findall(page.read_text(encoding="utf-8")):
        assert "://" in target or (page.parent / target).exists(), target


def test_what_pypi_shows_leads_to_the_repository(tmp_path):
    program = ROOT / ".github" / "home.py"
    if not program.exists():
        pytest.skip("a source distribution has no .github")
    (tmp_path / ".github").mkdir()
    for file in (program, ROOT / "README.md", ROOT / "pyproject.toml"):
        shutil.copy(file, tmp_path / file.relative_to(ROOT))
    home = "https://example.org/someone/jax_mfa"
    subprocess.run([sys.executable, tmp_path / ".github" / "home.py", f"{home}/"], check=True)
    found = LINK.findall((tmp_path / "README.md").read_text(encoding="utf-8"))
    before = LINK.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    places = {"": f"{home}/blob/main/", "!": f"{home}/raw/main/"}
    assert found == [(kind, target if "://" in target else places[kind] + target) for kind, target in before]
    assert ("!", f"{home}/raw/main/docs/pictures/speedup.svg") in found
    urls = tomllib.loads((tmp_path / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]
    assert urls["Source"] == home and all(url.startswith(home) for url in urls.values())


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
