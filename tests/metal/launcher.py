"""Plans for the launcher's own tests: a few lines of MSL, its buffers and its dispatches, through real jit and FFI
calls.

Knows the plan format and the emulated device; nothing of attention.
"""

from __future__ import annotations

import hashlib
import json
import types
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from emulator import host_module

ffi: Any
try:
    from jax import ffi
except ImportError:  # jax before 0.5
    from jax.extend import ffi

TARGET = "mfa_test"


def register() -> types.ModuleType:
    """The native module, with its handler registered under this room's target name."""
    module = host_module.load()
    if not hasattr(module, "registered"):
        ffi.register_ffi_target(TARGET, module.handler(), platform="cpu")
        module.registered = True
    return module


class Program:
    """A plan under construction; `text()` is what a call carries and `body` may be spoilt before.

    Every dispatch binds its buffers by name at indices from 0, then `data`, int32 values each, at those that follow,
    then the part of the grid that a launch is, where `whole_grid` is given.
    """

    def __init__(self, name: str, source: str, instantiations: str = "", threads: int = 64) -> None:
        digest = hashlib.sha256(source.encode()).hexdigest()
        host_module.load().add_source(digest, source)
        self.threads = threads
        self.body: dict[str, Any] = {
            "name": name,
            "library": {"source": digest, "instantiations": instantiations, "language": [3, 1]},
            "buffers": [],
            "dispatches": [],
            "comment": {"what": "keys that the launcher does not know are ignored", "π": [None, 1.5e3, -2, True]},
        }

    def buffer(self, name: str, role: str, dtype: str, shape: Sequence[int]) -> Program:
        self.body["buffers"].append({"name": name, "role": role, "dtype": dtype, "shape": list(shape)})
        return self

    def dispatch(
        self,
        kernel: str,
        threadgroups: Sequence[int],
        buffers: Sequence[str],
        data: Sequence[int] = (),
        constants: Sequence[tuple[str, Any]] = (),
        threadgroup_memory: Sequence[int] = (),
        whole_grid: Sequence[int] = (),
        reads: Sequence[str] = (),
    ) -> Program:
        arguments: list[dict[str, Any]] = [{"index": i, "buffer": name} for i, name in enumerate(buffers)]
        for argument in arguments:
            if argument["buffer"] in reads:
                argument["written"] = False
        for value in data:
            arguments.append({"index": len(arguments), "bytes": np.int32(value).tobytes().hex()})
        extra: dict[str, Any] = {}
        if whole_grid:
            extra["grid_argument"] = len(arguments)
            grid = np.array([0, 0, 0, *whole_grid], np.uint32)
            arguments.append({"index": len(arguments), "bytes": grid.tobytes().hex()})
        self.body["dispatches"].append(
            {
                "kernel": kernel,
                "constants": [{"index": i, "type": kind, "value": v} for i, (kind, v) in enumerate(constants)],
                "threadgroups": list(threadgroups),
                "threads": [self.threads, 1, 1],
                "threadgroup_memory": list(threadgroup_memory),
                "arguments": arguments,
                **extra,
            }
        )
        return self

    def text(self) -> str:
        return json.dumps(self.body, ensure_ascii=False)

    def results(self) -> list[jax.ShapeDtypeStruct]:
        return [
            jax.ShapeDtypeStruct(tuple(buffer["shape"]), buffer["dtype"])
            for buffer in self.body["buffers"]
            if buffer["role"] != "input"
        ]

    def __call__(self, *operands: Any) -> Any:
        """The results, of which there are as many as buffers that are not inputs."""
        return ffi.ffi_call(TARGET, self.results())(*operands, plan=self.text())
