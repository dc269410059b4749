"""What the commands of `python -m jax_mfa` share: kinds of options, with messages for people."""

from __future__ import annotations

import argparse


def positive(text: str) -> int:
    """A positive integer."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text!r}")
    return int(text)


def positives(text: str) -> list[int]:
    """Different positive integers, comma separated."""
    return list(dict.fromkeys(positive(x) for x in text.split(",")))
