"""What outlives the process in the user's cache folder: facts about chips, in files of JSON by the chip's name, and the
folder of compiled pipelines. Knows files; not what stands in them."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import sys
import tempfile
import time
from typing import Any

BROKEN = (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError)  # what reading may raise
PIPELINES = "JAX_MFA_PIPELINE_CACHE"  # names the folder of compiled pipelines; "none": they are not kept
MOST_DAYS = 60  # what is older goes, and is made again by whoever needs it


def folder() -> pathlib.Path:
    """The package's own in the user's cache folder. Raises RuntimeError where there is no home folder."""
    given = os.environ.get("XDG_CACHE_HOME")
    if given and os.path.isabs(given):
        base = pathlib.Path(given)
    elif sys.platform == "darwin":
        base = pathlib.Path.home() / "Library" / "Caches"
    else:
        base = pathlib.Path.home() / ".cache"
    return base / "jax_mfa"


def read(file: pathlib.Path) -> dict[str, Any]:
    """What is known, by chip. Raises one of `BROKEN` for a file that is not one that `store` wrote."""
    content = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"expected an object, got {type(content).__name__}")
    return content


def store(file: pathlib.Path, chip: str, value: Any) -> None:
    """Keeps what is known of a chip beside that of others. Raises OSError where the folder cannot be written."""
    try:
        known = read(file)
    except BROKEN:
        known = {}
    text = json.dumps(known | {chip: value}, indent=1)
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent) as beside:
        whole = pathlib.Path(beside) / file.name
        whole.write_text(text + "\n", encoding="utf-8")
        os.replace(whole, file)  # readers see the old file or the new one


def pipelines(by_default: bool) -> str:
    """The folder of compiled pipelines, made where it is not there; empty where they are not kept.

    It is `$JAX_MFA_PIPELINE_CACHE`, else one in the cache folder, which `by_default` allows.
    """
    given = os.environ.get(PIPELINES, "")
    if given == "none" or not (given or by_default):
        return ""
    try:
        place = pathlib.Path(given).absolute() if given else folder() / "pipelines"
        place.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        return ""
    oldest = time.time() - MOST_DAYS * 86400
    with contextlib.suppress(OSError):  # read-only, or another process was first
        for file in place.iterdir():
            if file.suffix in (".metallib", ".part") and file.stat().st_mtime < oldest:
                file.unlink()
    return str(place)
