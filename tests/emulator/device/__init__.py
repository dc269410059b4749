"""The emulated Metal device seen from Python tests: build it, load it, inject faults, read reports, counters and object
counts.

    metal = device.load()
    with metal.fault(device.Fault.GPU):
        ...                      # host code under test, which sees Metal only
    assert metal.reports() == [] and metal.live_objects() == {}

The interface behind it is device.h. Nothing here knows what kernels or host code compute.
"""

from __future__ import annotations

import contextlib
import ctypes as c
import enum
import functools
import json
from collections.abc import Iterator
from typing import Any

from . import build
from .build import host, library

__all__ = ["Control", "Fault", "Option", "build", "host", "library", "load", "profiles"]

PROFILES = build.core.ROOT / "profiles"


class Fault(enum.IntEnum):
    """METAL_FAULT_* of device.h."""

    NO_DEVICE = 0
    COMPILE = 1
    FUNCTION = 2
    PIPELINE = 3
    BUFFER = 4
    BUFFER_NO_COPY = 5
    QUEUE = 6
    COMMAND_BUFFER = 7
    ENCODER = 8
    GPU = 9
    TIMEOUT = 10
    OUT_OF_MEMORY = 11
    INTERACTIVITY = 12
    IGNORED = 13
    HANG = 14
    UNNAMED = 15
    VICTIM = 16
    REMOVED = 17
    ARCHIVE = 18
    ARCHIVE_ADD = 19
    ARCHIVE_WRITE = 20


class Option(enum.IntEnum):
    """METAL_OPTION_* of device.h."""

    CHECKED = 0
    SEED = 1
    ABORT = 2
    OS_VERSION = 3
    GPU_FAMILY = 4
    SIMD_WIDTH = 5
    MAX_THREADS = 6
    MEMORY_LIMIT = 7
    TIMEOUT_MS = 8
    RECORD = 9
    HANDLER_DELAY_US = 10
    QUIET = 11
    DEFAULT_DEVICE = 12
    LISTED = 13
    UNIFIED_MEMORY = 14
    PAGE_SIZE = 15
    THREADGROUP_MEMORY = 16
    STACK_KIB = 17
    RATE = 18
    INTERACTIVITY_MS = 19
    GPU_TIMEOUT_MS = 20
    IGNORED_AFTER = 21
    MATRIX_THREADS = 22
    LINE_BYTES = 23
    VICTIMS = 24


def profiles() -> list[str]:
    """The machines that the device can act as."""
    return sorted(file.stem for file in PROFILES.glob("*.json"))


class Control:
    """One process has one device; every Control speaks to the same."""

    def __init__(self) -> None:
        api = c.CDLL(str(library()))
        for name in ("reports_json", "dispatches_json", "checker_json", "totals_json"):
            getattr(api, f"metal_device_{name}").argtypes = [c.c_int]
            getattr(api, f"metal_device_{name}").restype = c.c_void_p
        api.metal_device_live_objects_json.restype = c.c_void_p
        api.metal_device_free.argtypes = [c.c_void_p]
        api.metal_device_inject.argtypes = [c.c_int, c.c_int64, c.c_int64]
        api.metal_device_fault_hits.argtypes = [c.c_int]
        api.metal_device_fault_hits.restype = c.c_int64
        api.metal_device_set_option.argtypes = [c.c_int, c.c_int64]
        api.metal_device_get_option.argtypes = [c.c_int]
        api.metal_device_get_option.restype = c.c_int64
        api.metal_device_wait_idle.argtypes = [c.c_int64]
        api.metal_device_set_name.argtypes = [c.c_char_p]
        self._api = api
        self._profile = ""

    def _json(self, pointer: int) -> Any:
        text = c.string_at(pointer).decode(errors="replace")
        self._api.metal_device_free(pointer)
        return json.loads(text)

    def inject(self, fault: Fault, times: int = 1, skip: int = 0) -> None:
        """After `skip` uses pass, the next `times` fail (-1: all that follow)."""
        self._api.metal_device_inject(fault, skip, times)

    def hits(self, fault: Fault) -> int:
        return self._api.metal_device_fault_hits(fault)

    def clear_faults(self) -> None:
        self._api.metal_device_clear_faults()

    @contextlib.contextmanager
    def fault(self, fault: Fault, times: int = -1, skip: int = 0) -> Iterator[None]:
        self.inject(fault, times, skip)
        try:
            yield
        finally:
            self.inject(fault, 0)

    def get(self, option: Option) -> int:
        return self._api.metal_device_get_option(option)

    def set(self, option: Option, value: int) -> None:
        self._api.metal_device_set_option(option, value)

    @contextlib.contextmanager
    def option(self, option: Option, value: int) -> Iterator[None]:
        before = self.get(option)
        self.set(option, value)
        try:
            yield
        finally:
            self.set(option, before)

    def reports(self, clear: bool = True) -> list[dict[str, str]]:
        """API misuse, oldest first: {"kind", "message", "class", "label"}."""
        return self._json(self._api.metal_device_reports_json(clear))

    def dispatches(self, clear: bool = True) -> list[dict[str, Any]]:
        """The last dispatches with kernel, sizes, counters and the checker's reports of each."""
        return self._json(self._api.metal_device_dispatches_json(clear))

    def checker(self, clear: bool = True) -> dict[str, Any]:
        """{"dispatches": n, "counters": sums, "reports": the checker's, without repeats} since the last clear."""
        return self._json(self._api.metal_device_checker_json(clear))

    def live_objects(self) -> dict[str, int]:
        """Living instances per class, once the device has nothing left to do."""
        self.wait_idle()
        return self._json(self._api.metal_device_live_objects_json())

    def totals(self, clear: bool = True) -> dict[str, int]:
        return self._json(self._api.metal_device_totals_json(clear))

    def wait_idle(self, seconds: float = 60.0) -> bool:
        return bool(self._api.metal_device_wait_idle(int(seconds * 1000)))

    def reset(self) -> None:
        """No faults, reports or totals, and options as the profile has them."""
        self._api.metal_device_reset()
        if self._profile:
            self.act_as(self._profile)

    def act_as(self, profile: str) -> None:
        """Options of a profile from here on; "" for none. Raises ValueError where there is none of that name."""
        if profile and profile not in profiles():
            raise ValueError(f"no profile {profile!r} of the emulated device: there are {', '.join(profiles())}")
        self._profile = profile
        if not profile:
            self._api.metal_device_reset()
            return
        about = json.loads((PROFILES / f"{profile}.json").read_text(encoding="utf-8"))
        self._api.metal_device_set_name(about["name"].encode())
        for name, value in about["options"].items():
            self.set(Option[name.upper()], value)

    @contextlib.contextmanager
    def profile(self, name: str) -> Iterator[None]:
        """The device acts as this machine within the block; host code that has found it before must be reset."""
        before = self._profile
        self.act_as("")
        self.act_as(name)
        try:
            yield
        finally:
            self.act_as("")
            self.act_as(before)


@functools.cache
def load() -> Control:
    return Control()
