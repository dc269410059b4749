"""Cache lines that CPU and GPU share: what `python -m jax_mfa check` found of them on each chip, kept for the user."""

from __future__ import annotations

import pathlib

from jax_mfa.tuning import kept


def path() -> pathlib.Path:
    return kept.folder() / "lines.json"


def staged_below(chip: str) -> int:
    """Bytes below which outputs that share cache lines with the CPU's memory are copied on this chip, as `check` found;
    0 where it found nothing."""
    try:
        below = kept.read(path())[chip]["staged_below"]
    except (*kept.BROKEN, RuntimeError):
        return 0
    return below if isinstance(below, int) and not isinstance(below, bool) and 0 < below < 2**63 else 0


def keep_staged_below(chip: str, below: int, source: str) -> pathlib.Path:
    """Keeps that for a chip, where every later process finds it. Raises OSError where the folder cannot be written."""
    kept.store(path(), chip, {"staged_below": below, "source": source})
    return path()
