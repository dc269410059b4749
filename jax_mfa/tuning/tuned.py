"""What `jax_mfa.tune` found: for each problem the tiles that were fastest on this chip, in a file that planners ask.

The file is `tiles.json` in the cache folder; `JAX_MFA_TILES` names another, of a colleague with the same chip for
instance, or `none`. Tiles that a planner would not have tried are ignored with one warning, as a broken file or
another version is. Knows numbers; not what they are tiles of.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import platform
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jax_mfa.tuning import facts

FILE = "JAX_MFA_TILES"
VERSION = 1  # of what the numbers mean; other ones are ignored
_trials: list[tuple[str, tuple[int, ...]]] = []


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


def _winners(entry: Any) -> dict[str, tuple[int, ...]]:
    version = entry.get("version")
    if version != VERSION:
        raise ValueError(f"version {version!r}, expected {VERSION}")
    for problem, numbers in entry["winners"].items():
        if not all(isinstance(x, int) for x in numbers):
            raise ValueError(f"{problem}: expected integers, got {numbers!r}")
    return {problem: tuple(numbers) for problem, numbers in entry["winners"].items()}


WINNERS = facts.Kind("tiles.json", _winners, "`python -m jax_mfa tune` finds tiles anew", FILE)


def of(plan: str, problem: Callable[[], str], allowed: Callable[[tuple[int, ...]], bool]) -> tuple[int, ...] | None:
    """The tiles to take for a plan ("blockwise forward", …) of a problem; None where nothing is known of it."""
    for name, numbers in reversed(_trials):
        if name == plan:
            return numbers
    known = WINNERS.of(chip(), {})
    if not known:
        return None
    key = f"{plan} {problem()}"
    found = known.get(key)
    if found is None or allowed(found):
        return found
    WINNERS.warn_once(f"{WINNERS.path()}: {list(found)} is ignored, for no plan of {key} has such tiles")
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
    """Keeps winners beside others of this chip; None where JAX_MFA_TILES=none forbids it. Raises as `Kind.store`."""
    winners = WINNERS.of(chip(), {}) | found
    return WINNERS.store(chip(), {"version": VERSION, "source": source, "winners": winners})
