"""Where kernel tests run their plans: on the emulator core, which checks and counts, or on a device.

The core is the rule on Linux. On a Mac, and with JAX_MFA_TEST_RUNNER=launcher anywhere, the same tests go through XLA's
FFI and the native module to its device; what only the core can do, planted mistakes and counts, is skipped there. Knows
the plan format; not what kernels look like.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import sys
from typing import Any, Protocol

import emulator
import jax
import ml_dtypes
import numpy as np
import pytest

from jax_mfa.cli import show
from jax_mfa.metal import runtime, source
from jax_mfa.metal.plan import Buffer, Plan

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "int32": np.int32}


def on_a_mac() -> bool:
    """Whether the device is real: there no emulator can be built, and nothing counts objects."""
    return sys.platform == "darwin"


@dataclasses.dataclass(frozen=True)
class Ran:
    """What came out of a plan: every array by name, what was reported, and on the core each dispatch's result."""

    arrays: dict[str, np.ndarray]
    dispatches: list[tuple[str, emulator.Result]]
    device_reports: list[str] = dataclasses.field(default_factory=list)

    @property
    def reports(self) -> list[str]:
        return self.device_reports + [f"{name}: {x}" for name, result in self.dispatches for x in result.reports]

    @property
    def counters(self) -> dict[str, emulator.Counters]:
        """By template: attention_forward, attention_delta, …"""
        if not self.dispatches:
            pytest.skip("a device does not count")
        return {name: result.counters for name, result in self.dispatches}

    def __or__(self, later: Ran) -> Ran:
        """Both: arrays of the same name are those of the later one."""
        dispatches = self.dispatches + later.dispatches
        return Ran(self.arrays | later.arrays, dispatches, self.device_reports + later.device_reports)


class Runner(Protocol):
    def run(self, plan: Plan, inputs: dict[str, np.ndarray], text: str | None, seed: int) -> Ran:
        """Runs a plan; `text` takes the place of its MSL, `seed` permutes the schedule where that can be had."""
        ...


@functools.lru_cache(maxsize=64)
def library(text: str) -> emulator.Library:
    return emulator.compile(text, fast_math=False)


@dataclasses.dataclass(frozen=True)
class Core:
    """Dispatch by dispatch on the emulator core, without JAX's runtime or the launcher; with `lines` cache lines are
    counted too."""

    lines: bool = False

    def run(self, plan: Plan, inputs: dict[str, np.ndarray], text: str | None, seed: int) -> Ran:
        chosen = library(show.program(plan) if text is None else text + "\n" + plan.instantiations)
        results = {b.name: np.zeros(b.shape, DTYPES[b.dtype]) for b in plan.results if b.role != "updated"}
        updated = {b.name: inputs[b.name].copy() for b in plan.results if b.role == "updated"}
        known = inputs | updated | results
        scratch = {b.name for b in plan.buffers if b.role == "scratch"}
        written: set[str] = set()
        done = []
        for dispatch in plan.dispatches:
            constants: dict[str | int, Any] = {name: value for _, name, _, value in dispatch.kernel.constants}
            kernel = chosen.kernel(dispatch.kernel.name, constants=constants)
            if text is None:
                assert dispatch.kernel.threadgroup_memory == kernel.static_threadgroup_memory_length, kernel.name
            bound = {i: x if isinstance(x, bytes) else known[x] for i, x in dispatch.arguments}
            fresh = [i for i, x in dispatch.arguments if x in results and x not in written]
            whole = [i for i, x in dispatch.arguments if i in fresh and x not in scratch]
            result = kernel(
                bound,
                threadgroups=dispatch.threadgroups,
                threadgroup=dispatch.kernel.threads,
                outputs=whole,
                uninitialised=fresh,
                seed=seed,
                count_lines=self.lines,
            )
            done.append((dispatch.kernel.template[0], result))
            written |= dispatch.buffers
        return Ran(known, done)


class Launcher:
    """The whole plan as one FFI call of a jitted program, on the device that the native module finds."""

    def run(self, plan: Plan, inputs: dict[str, np.ndarray], text: str | None, seed: int) -> Ran:
        found = runtime.get()
        if found.reason:
            pytest.skip(found.reason)
        if text is not None:
            digest = hashlib.sha256(text.encode()).hexdigest()
            found.module.add_source(digest, text)
            plan = dataclasses.replace(plan, source=digest)
        # scratch is not copied back; as an output it is
        shown = tuple(dataclasses.replace(b, role="output") if b.role == "scratch" else b for b in plan.buffers)
        plan = dataclasses.replace(plan, buffers=shown)
        operands = [inputs[b.name] for b in plan.operands]
        call = jax.jit(lambda *x: runtime.call(plan, runtime.TARGETS[0], *x))
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            results = {name: np.asarray(x) for name, x in call(*operands).items()}
        return Ran(inputs | results, [], [] if on_a_mac() else _reports())


def _reports() -> list[str]:
    from emulator import device

    control = device.load()
    control.wait_idle()
    return [str(x) for x in (*control.checker()["reports"], *control.reports())]


def _chosen() -> Runner:
    name = os.environ.get("JAX_MFA_TEST_RUNNER") or ("launcher" if on_a_mac() else "core")
    if name not in ("core", "launcher"):
        raise ValueError(f"JAX_MFA_TEST_RUNNER must be unset, 'core' or 'launcher', got {name!r}")
    return Launcher() if name == "launcher" else Core()


CHOSEN = _chosen()
needs_core = pytest.mark.skipif(not isinstance(CHOSEN, Core), reason="needs the emulator core, which checks and counts")


def planted(old: str, new: str) -> str:
    """The kernels' text with a mistake: `new` where it says `old`."""
    text = source.base()
    assert old in text, f"the kernels no longer say {old!r}: plant this mistake elsewhere"
    return text.replace(old, new)


def run(
    plan: Plan, arrays: dict[str, np.ndarray], *, text: str | None = None, seed: int = 0, on: Runner | None = None
) -> Ran:
    """Runs a plan over arrays by name, of the shapes and dtypes that it says."""

    def known(b: Buffer) -> np.ndarray:
        x = np.ascontiguousarray(arrays[b.name])
        assert x.shape == b.shape and x.dtype == np.dtype(DTYPES.get(b.dtype, b.dtype)), b
        return x

    if text is not None and on is None and not isinstance(CHOSEN, Core):
        pytest.skip("mistakes are planted for the emulator's checker, not for a GPU")
    return (on or CHOSEN).run(plan, {b.name: known(b) for b in plan.operands}, text, seed)
