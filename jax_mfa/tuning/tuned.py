"""What `jax_mfa.tune` found: for each problem the tiles that were fastest on this chip, in a file that planners ask.

The file is `tiles.json` in the cache folder (`kept`), by chip; `JAX_MFA_TILES` names another, of a colleague with the
same chip for instance, or `none`. One that is broken or of another version is ignored with one line; so is an entry
that its planner would not have tried. Knows files and numbers; not what they are tiles of.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import platform
import subprocess
import warnings
from collections.abc import Callable, Iterator

import jax

from jax_mfa.tuning import kept

FILE = "JAX_MFA_TILES"
VERSION = 1  # of what the numbers mean; other ones are ignored
_trials: list[tuple[str, tuple[int, ...]]] = []


def path() -> pathlib.Path | None:
    """The file; None where winners are neither read nor kept. Raises RuntimeError where there is no home folder."""
    given = os.environ.get(FILE, "")
    if given == "none":
        return None
    return pathlib.Path(given) if given else kept.folder() / "tiles.json"


def _cpu() -> str:
    try:
        if platform.system() == "Darwin":
            asked = ["sysctl", "-n", "machdep.cpu.brand_string"]
            return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
        lines = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(x.partition(":")[2].strip() for x in lines if x.startswith("model name"))
    except (OSError, subprocess.SubprocessError, StopIteration):
        return platform.machine()


@functools.cache
def chip() -> str:
    """What runs attention where nothing else is asked for: the default device, a CPU with the number of its cores."""
    if jax.default_backend() != "cpu":
        return jax.devices()[0].device_kind
    return f"{_cpu()}, {os.cpu_count()} cores"


@functools.cache
def _warn_once(text: str) -> None:
    warnings.warn(f"jax_mfa: {text}; `python -m jax_mfa tune` finds tiles anew", stacklevel=2)


def _checked(entry: object) -> dict[str, tuple[int, ...]]:
    if not isinstance(entry, dict) or entry.get("version") != VERSION:
        version = entry.get("version") if isinstance(entry, dict) else None
        raise ValueError(f"version {version!r}, expected {VERSION}")
    found = {}
    for problem, numbers in entry["winners"].items():
        if not all(isinstance(x, int) for x in numbers):
            raise ValueError(f"{problem}: expected integers, got {numbers!r}")
        found[problem] = tuple(numbers)
    return found


@functools.cache
def _read(file: pathlib.Path, chip: str) -> dict[str, tuple[int, ...]]:
    try:
        known = kept.read(file)
        return _checked(known[chip]) if chip in known else {}
    except FileNotFoundError:
        return {}
    except (*kept.BROKEN, AttributeError) as error:
        _warn_once(f"{file} is ignored ({type(error).__name__}: {error})")
        return {}


def winners() -> dict[str, tuple[int, ...]]:
    """All that is known for this chip, by plan and problem."""
    try:
        file = path()
    except RuntimeError:
        return {}
    return {} if file is None or not file.exists() else _read(file, chip())


def of(plan: str, problem: Callable[[], str], allowed: Callable[[tuple[int, ...]], bool]) -> tuple[int, ...] | None:
    """The tiles to take for a plan ("blockwise forward", …) of a problem; None where nothing is known of it."""
    for name, numbers in reversed(_trials):
        if name == plan:
            return numbers
    known = winners()
    if not known:
        return None
    key = f"{plan} {problem()}"
    found = known.get(key)
    if found is None or allowed(found):
        return found
    _warn_once(f"{path()}: {list(found)} is ignored, for no plan of {key} has such tiles")
    return None


@contextlib.contextmanager
def trial(plan: str, numbers: tuple[int, ...]) -> Iterator[None]:
    """Whatever is planned within takes these tiles."""
    _trials.append((plan, numbers))
    try:
        yield
    finally:
        _trials.pop()


def store(found: dict[str, tuple[int, ...]], source: str) -> pathlib.Path | None:
    """Keeps winners beside others of this chip; None where JAX_MFA_TILES=none forbids it. Raises OSError."""
    file = path()
    if file is None:
        return None
    numbers = {key: list(x) for key, x in (winners() | found).items()}
    kept.store(file, chip(), {"version": VERSION, "source": source, "winners": numbers})
    _read.cache_clear()
    return file
