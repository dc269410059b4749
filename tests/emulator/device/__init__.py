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

__all__ = ["Control", "Fault", "Option", "build", "host", "library", "load"]


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
        self._api = api

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
        self._api.metal_device_reset()


@functools.cache
def load() -> Control:
    return Control()
