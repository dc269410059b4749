"""Times programs by turns. Knows nothing of attention: a program is whatever can be called without arguments."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import jax

Name = TypeVar("Name")


def call(program: Any, arrays: list[jax.Array]) -> Any:
    """Calls a program of JAX and waits for its results."""
    return jax.block_until_ready(program(*arrays))


def timed(programs: dict[Name, Callable[[], Any]], rounds: int, shortest: float) -> dict[Name, list[float]]:
    """Seconds of calls of each program, the programs taking turns.

    A turn is one call that is not timed and one that is: right after a program that gives gigabytes back to the system,
    the next one pays for it. There are as many turns as `rounds`, or as begin within `shortest` seconds.
    """
    times: dict[Name, list[float]] = {name: [] for name in programs}
    begin, turns = time.perf_counter(), 0
    while turns < rounds or time.perf_counter() < begin + shortest:
        for name, program in programs.items():
            program()
            start = time.perf_counter()
            program()
            times[name].append(time.perf_counter() - start)
        turns += 1
    return times
