"""What outlives the process in the user's cache folder: facts about chips, and compiled pipelines.

Each kind of facts has a file of JSON, with an entry for each chip by its name. What cannot be read is ignored with one
warning. Knows files; the owner of a kind declares it with a check of its entries.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any, Generic, TypeVar

Fact = TypeVar("Fact")
BROKEN = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
PIPELINES = "JAX_MFA_PIPELINE_CACHE"  # names the folder of compiled pipelines; "none": they are not kept
MOST_DAYS = 60  # what is older goes, and is made again by whoever needs it


def place(name: str, variable: str = "") -> pathlib.Path | None:
    """What an environment variable names, else `name` in the cache folder; None where the variable is "none".

    Raises RuntimeError where there is no home folder.
    """
    given = os.environ.get(variable, "")
    if given:
        return None if given == "none" else pathlib.Path(given)
    base = pathlib.Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():
        base = pathlib.Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache")
    return base / "jax_mfa" / name


@functools.cache
def _warn_once(text: str) -> None:
    warnings.warn(text, stacklevel=2)


def _read(file: pathlib.Path) -> dict[str, Any]:
    content = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"expected an object, got {type(content).__name__}")
    return content


@dataclasses.dataclass(frozen=True)
class Kind(Generic[Fact]):
    """Facts of one kind.

    Attributes:
      name: of the file in the cache folder.
      check: from a chip's entry as JSON has it to the fact; raises one of `BROKEN` for what `store` did not write.
      remedy: how a user comes by a new file.
      variable: names another file in the environment, or "none": nothing is read or kept.
    """

    name: str
    check: Callable[[Any], Fact]
    remedy: str
    variable: str = ""

    def path(self) -> pathlib.Path | None:
        return place(self.name, self.variable)

    def of(self, chip: str, default: Fact) -> Fact:
        """What is known of a chip."""
        file = None
        with contextlib.suppress(RuntimeError):  # no home folder
            file = self.path()
        if file is None:
            return default
        try:
            known = _read(file)
            return self.check(known[chip]) if chip in known else default
        except (FileNotFoundError, NotADirectoryError):
            return default
        except BROKEN as error:
            self.warn_once(f"{file} is ignored ({type(error).__name__}: {error})")
            return default

    def warn_once(self, text: str) -> None:
        _warn_once(f"jax_mfa: {text}; {self.remedy}")

    def store(self, chip: str, value: Any) -> pathlib.Path | None:
        """Keeps what is known of a chip, a dataclass or what JSON takes, beside that of others; the file, if any.

        Raises OSError where it cannot be written, RuntimeError as `place`.
        """
        file = self.path()
        if file is None:
            return None
        try:
            known = _read(file)
        except BROKEN:
            known = {}
        text = json.dumps(known | {chip: value}, indent=1, default=dataclasses.asdict)
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as beside:
            whole = pathlib.Path(beside) / file.name
            whole.write_text(text + "\n", encoding="utf-8")
            os.replace(whole, file)  # readers see the old file or the new one
        return file


def pipelines(by_default: bool) -> str:
    """The folder of compiled pipelines, made where it is not there; empty where they are not kept.

    It is `$JAX_MFA_PIPELINE_CACHE`, else one in the cache folder, which `by_default` allows.
    """
    if not (by_default or os.environ.get(PIPELINES)):
        return ""
    try:
        folder = place("pipelines", PIPELINES)
        if folder is None:
            return ""
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        return ""
    oldest = time.time() - MOST_DAYS * 86400
    with contextlib.suppress(OSError):  # read-only, or another process was first
        for file in folder.iterdir():
            if file.suffix in (".metallib", ".part") and file.stat().st_mtime < oldest:
                file.unlink()
    return str(folder.absolute())
