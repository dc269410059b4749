"""The linters and the type checker, as one command of the tests."""

import importlib
import importlib.util
import pathlib
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from emulator import host_module

pytestmark = pytest.mark.first_tier

ROOT = pathlib.Path(__file__).parent.parent
COMMANDS = {
    "lint": ("ruff", "-m", "ruff", "check", "."),
    "format": ("ruff", "-m", "ruff", "format", "--check", "."),
    "types": ("mypy", "-m", "mypy"),
    "imports": ("importlinter", "-c", "from importlinter.cli import lint_imports; raise SystemExit(lint_imports())"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_code_is_clean(name):
    tool, *arguments = COMMANDS[name]
    if importlib.util.find_spec(tool) is None:
        pytest.skip(f"{tool} is not installed; it comes with the extra `test`")
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_native_code_has_one_look():
    if importlib.util.find_spec("clang_format") is None:
        pytest.skip("clang-format is not installed; it comes with the extra `test`")
    files = sorted(str(x) for kind in ("*.cc", "*.h") for x in (ROOT / "csrc").glob(kind))
    program = importlib.import_module("clang_format").get_executable("clang-format")
    done = subprocess.run([program, "--dry-run", "-Werror", *files], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# following each path through a function takes half a minute; of a message to nil, which Metal allows, it knows nothing
PATHS = "-*,clang-analyzer-*,-clang-analyzer-core.CallAndMessage"


@pytest.mark.sweep
@pytest.mark.parametrize("checks", ["", pytest.param(PATHS, marks=pytest.mark.sweep, id="paths")])
def test_the_native_code_has_no_mistake_that_clang_tidy_knows(checks):
    if importlib.util.find_spec("clang_tidy") is None:
        pytest.skip("clang-tidy is not installed; it comes with the extra `test`")
    try:
        flags = host_module.clang_flags()
    except (RuntimeError, ImportError) as reason:
        pytest.skip(str(reason))
    program = importlib.import_module("clang_tidy").get_executable("clang-tidy")
    run = lambda file: subprocess.run(
        [program, "--quiet", f"--checks={checks}", file, "--", *flags], capture_output=True, text=True
    )
    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(run, sorted((ROOT / "csrc").glob("*.cc"))))
    assert done and not any(x.returncode for x in done), "".join(x.stdout + x.stderr for x in done if x.returncode)


def test_importing_the_package_starts_no_backend_and_no_checker_of_shapes():
    # a backend that starts at import could no longer be configured by the program
    code = "import jax_mfa; from jax._src import xla_bridge; assert not xla_bridge._backends, xla_bridge._backends"
    code += "; import sys; assert 'jaxtyping' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
