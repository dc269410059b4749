"""The native module, found and started once per process: which device, whether it can be used, and calls onto it.

`JAX_MFA_DEVICE` chooses: unset, the module built into the package (macOS on Apple silicon); `none`, no Metal;
`MODULE[:MACHINE]`, what that Python module's `jax_mfa_native(machine)` returns, a native module of the same interface;
`machine` is None where none is named. `emulator` of a source checkout is such a module: the same C++ and kernels on an
emulated device, which `emulator:m3` makes act as that Mac.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import jax
from jax import Array

from jax_mfa import compat, recording
from jax_mfa.metal import source, tiles
from jax_mfa.metal.plan import Plan
from jax_mfa.tuning import facts

TARGETS = ("jax_mfa_attention_forward", "jax_mfa_attention_backward", "jax_mfa_append")
NOT_APPLE = "this host has no Metal: the native module is built on macOS for Apple silicon only"
ROSETTA = "this Python is built for Intel and runs under Rosetta: Metal needs one built for Apple silicon (arm64)"
HOOK = "jax_mfa_native"  # what a module that JAX_MFA_DEVICE names offers
_lock = threading.Lock()
_chosen: list[str] = []  # tile tables named by `variant`, in place of the chip's own


def _staged_below(entry: Any) -> int:
    below = entry["staged_below"]
    if isinstance(below, bool) or not isinstance(below, int) or not 0 < below < 2**63:
        raise ValueError(f"staged_below must be a positive number of bytes, got {below!r}")
    return below


# bytes below which outputs that share cache lines with the CPU's memory are copied, where `check` found work lost there
STAGED_BELOW = facts.Kind("lines.json", _staged_below, "`python -m jax_mfa check` finds it anew")


@dataclasses.dataclass(frozen=True)
class Runtime:
    """What was found.

    Attributes:
      module: the native module, its handler registered; None where Metal cannot be used.
      reason: why not; empty where it can.
      expected: whether it is no surprise: not an Apple host, or forbidden.
      device: facts about the device: name, os, families, …
    """

    module: Any = None
    reason: str = ""
    expected: bool = False
    device: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def virtual(self) -> bool:
        """Whether the GPU is older than any of Apple silicon, all apple7 or later: a virtual machine has apple5."""
        return bool(self.device) and "apple7" not in self.device.get("families", ())

    @property
    def variant(self) -> str:
        """Which tile table suits the chip: newer ones read fragments straight from device memory."""
        if _chosen:
            return _chosen[-1]
        families = self.device.get("families", ())
        if "apple7" not in families:
            return "portable"  # no simdgroup matrices
        return "direct" if "apple9" in families else "staged"

    @property
    def variants(self) -> tuple[str, ...]:
        """The tile tables that the device can run, its own first. Without simdgroup matrices that is one."""
        own = self.variant
        return (own,) if own not in tiles.VARIANTS else (own, *(name for name in tiles.NAMES if name != own))


def named() -> tuple[str, str | None]:
    """The module and the machine that JAX_MFA_DEVICE names; "" and None where it is unset or `none`."""
    name, _, machine = os.environ.get("JAX_MFA_DEVICE", "").partition(":")
    return ("" if name == "none" else name), machine or None


def _load(chosen: str) -> Any:
    if not chosen:
        return importlib.import_module("jax_mfa._metal")
    expected = f"JAX_MFA_DEVICE must be unset, 'none', or MODULE[:MACHINE] where MODULE offers {HOOK}(machine)"
    found = re.fullmatch(r"(\w+(?:\.\w+)*)(?::(\w+))?", chosen)
    if found is None:
        raise ValueError(f"{expected}, got {chosen!r}")
    try:
        native = getattr(importlib.import_module(found[1]), HOOK)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{expected}, got {chosen!r}: {error}") from error
    return native(found[2])


def _translated() -> bool:
    """Whether this process is x86-64 code on Apple silicon."""
    try:
        said = subprocess.run(["sysctl", "-in", "sysctl.proc_translated"], capture_output=True, text=True, check=False)
    except OSError:
        return False
    return said.stdout.strip() == "1"


@functools.cache
def _registered(chosen: str) -> Runtime:
    """The native module with its handlers known to XLA and the kernels' text known to it; no device is started."""
    if chosen == "none":
        return Runtime(reason="JAX_MFA_DEVICE=none forbids Metal", expected=True)
    try:
        module = _load(chosen)
    except ModuleNotFoundError as error:
        if error.name != "jax_mfa._metal":
            return Runtime(reason=f"the native module could not be built: {error}")
        if sys.platform == "darwin" and platform.machine() == "x86_64" and _translated():
            return Runtime(reason=ROSETTA)
        apple = sys.platform == "darwin" and platform.machine() == "arm64"
        return Runtime(reason=NOT_APPLE, expected=not apple)
    except (ImportError, RuntimeError, OSError, subprocess.SubprocessError) as error:
        return Runtime(reason=f"the native module could not be loaded: {error}")
    # a handler for another API, once registered, would take the whole CPU backend down: compare first
    built, installed = module.api_version(), compat.ffi_api()
    if installed is not None and (built[0] != installed[0] or built[1] > installed[1]):
        return Runtime(reason=f"the native module speaks FFI API {built}, the installed jaxlib {installed}")
    for target in TARGETS:
        compat.ffi.register_ffi_target(target, module.handler(), platform="cpu")
    for digest, text in source.texts().items():
        module.add_source(digest, text)
    module.keep_pipelines(facts.pipelines(by_default=not chosen), _version())
    return Runtime(module)


def _version() -> str:
    try:
        return importlib.metadata.version("jax-mfa")
    except importlib.metadata.PackageNotFoundError:
        return ""


def start() -> Runtime:
    """What the environment asks for, with its device; `get` remembers it."""
    found = _registered(os.environ.get("JAX_MFA_DEVICE", ""))
    if found.reason:
        return found
    try:
        device = dict(found.module.device())
    except RuntimeError as error:
        return Runtime(reason=str(error))
    if below := STAGED_BELOW.of(device.get("name", ""), 0):
        found.module.stage_shared_lines(below)
    return dataclasses.replace(found, device=device)


_started = functools.cache(start)


def get() -> Runtime:
    """The runtime, started by the first caller."""
    with _lock:
        return _started()


@contextlib.contextmanager
def variant(name: str) -> Iterator[None]:
    """Programs compiled within take the tile table of this name. Compiled programs are forgotten at both ends."""
    _chosen.append(name)
    jax.clear_caches()
    try:
        yield
    finally:
        _chosen.pop()
        jax.clear_caches()


def register_targets() -> None:
    """Makes the targets known as the package is imported, so that exported and cached programs find them.

    Only where the native module is part of the package: an import must not build anything.
    """
    if not os.environ.get("JAX_MFA_DEVICE") and importlib.util.find_spec("jax_mfa._metal") is not None:
        with _lock:
            _registered("")


@functools.lru_cache(maxsize=4096)
def _prepare(plan: Plan) -> None:
    with recording.compiling("metal"):
        get().module.prepare(plan.json)


def failure(plan: Plan) -> str:
    """Why the kernels of a plan cannot be had, in Metal's words; empty where they can. Compiles them."""
    runtime = get()
    if runtime.module is None:
        return runtime.reason
    try:
        _prepare(plan)  # what failed is tried again, what worked is remembered
    except RuntimeError as error:
        return str(error)
    return ""


@functools.cache
def warn_once(reason: str) -> None:
    """Says once per reason that calls which left the choice open run without Metal."""
    warnings.warn(f"jax_mfa: Metal cannot be used, so attention runs as blockwise jnp: {reason}", stacklevel=2)


def call(plan: Plan, target: str, *arrays: Array) -> dict[str, Any]:
    """The outputs of a plan by name, as traced values. `arrays` are its inputs in order."""
    shapes = [jax.ShapeDtypeStruct(b.shape, b.dtype) for b in plan.results]
    aliases = {i: plan.results.index(b) for i, b in enumerate(plan.operands) if b.role == "updated"}
    results = compat.ffi.ffi_call(target, shapes, input_output_aliases=aliases)(*arrays, plan=plan.json)
    return {b.name: x for x, b in zip(results, plan.results) if b.role != "scratch"}
