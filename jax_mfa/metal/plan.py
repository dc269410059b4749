"""What a launch is: buffers, kernels, constants and grids, as data. The launcher in `csrc/` runs exactly this.

A plan is self-contained JSON that travels with the compiled program; its MSL text goes by content hash. This room
knows no kernel: `plans.py` makes plans, and `python -m jax_mfa source` prints them.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any

LANGUAGE = (3, 1)  # bfloat; macOS 14
ITEM_SIZES = {
    **dict.fromkeys(("bool", "int8", "uint8"), 1),
    **dict.fromkeys(("uint16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32"), 4),
}
SCALARS = {"float16": "half", "bfloat16": "bfloat", "float32": "float"}  # MSL's names
DTYPES = tuple(SCALARS)  # of queries, keys, values and biases


@dataclasses.dataclass(frozen=True)
class Buffer:
    """An array of a plan. Inputs are the call's operands in this order, outputs and scratch its results; what is
    updated is among both."""

    name: str
    role: str  # input, output, scratch, or updated: an input, and in its place an output that dispatches change
    dtype: str
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A specialised kernel: a template with its arguments, and its function constants.

    Attributes:
      name: what the instantiation is called.
      template: the MSL function, and its template arguments in order.
      constants: (index, name, MSL type, value) of each function constant.
      threads: per threadgroup.
      threadgroup_memory: bytes that its arrays take, for readers; the compiler allocates them.
      fragment_bytes: registers per thread that its fragments take, for readers and tests (see `tiles.py`).
      definitions: MSL that the template's arguments need beside the base text.
    """

    name: str
    template: tuple[Any, ...]
    constants: tuple[tuple[int, str, str, Any], ...]
    threads: int
    threadgroup_memory: int = 0
    fragment_bytes: int = 0
    definitions: str = ""

    @property
    def instantiation(self) -> str:
        return self.definitions + self.explicit

    @property
    def explicit(self) -> str:
        function, *arguments = self.template
        spelt = ", ".join(str(x).lower() if isinstance(x, bool) else str(x) for x in arguments)
        whole = f"{function}<{spelt}>"
        return f'template [[host_name("{self.name}")]] [[kernel]] decltype({whole}) {whole};\n'


@dataclasses.dataclass(frozen=True)
class Argument:
    """What a kernel finds at a buffer index: a buffer of the plan by name, or bytes."""

    index: int
    buffer: str | None = None
    bytes: bytes = b""


@dataclasses.dataclass(frozen=True)
class Dispatch:
    """A kernel over a grid.

    Attributes:
      multiply_accumulates: an estimate from above for the whole grid, in those of the matrix unit, by which the
        launcher keeps command buffers short.
      grid_argument: the index of bytes whose first 24 say which part of its grid a launch is: x, y and z of the
        first threadgroup, then the extents of the whole. A kernel that has them may be launched in parts.
    """

    kernel: Kernel
    threadgroups: tuple[int, int, int]
    arguments: tuple[Argument, ...]
    multiply_accumulates: int = 0
    grid_argument: int | None = None


@dataclasses.dataclass(frozen=True)
class Plan:
    """Dispatches that run as if one after another.

    A buffer that is no input is written by the first dispatch that binds it, and read by those that bind it later:
    dispatches that do not meet in a buffer in this way may run side by side.
    """

    name: str
    source: str  # sha256 of the base text
    buffers: tuple[Buffer, ...]
    dispatches: tuple[Dispatch, ...]

    @property
    def operands(self) -> tuple[Buffer, ...]:
        return tuple(b for b in self.buffers if b.role in ("input", "updated"))

    @property
    def results(self) -> tuple[Buffer, ...]:
        return tuple(b for b in self.buffers if b.role != "input")

    @property
    def instantiations(self) -> str:
        kernels = [d.kernel for d in self.dispatches]
        return "".join(dict.fromkeys([*(k.definitions for k in kernels), *(k.explicit for k in kernels)]))

    @functools.cached_property
    def json(self) -> str:
        return json.dumps(self.as_dict(), separators=(",", ":"))

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "library": {
                "source": self.source,
                "instantiations": self.instantiations,  # all of them, for readers: each dispatch has its own
                "language": list(LANGUAGE),
            },
            "buffers": [dataclasses.asdict(b) | {"shape": list(b.shape)} for b in self.buffers],
            "dispatches": self._dispatches(),
        }

    def _dispatches(self) -> list[dict[str, Any]]:
        read = {b.name for b in self.buffers if b.role == "input"}
        updated = {b.name for b in self.buffers if b.role == "updated"}
        found = []
        for d in self.dispatches:
            found.append(_dispatch(d, read))
            read |= {a.buffer for a in d.arguments if a.buffer and a.buffer not in updated}
        return found


def _argument(a: Argument, read: set[str]) -> dict[str, Any]:
    if a.buffer is None:
        return {"index": a.index, "bytes": a.bytes.hex()}
    return {"index": a.index, "buffer": a.buffer, "written": a.buffer not in read}


def _dispatch(d: Dispatch, read: set[str]) -> dict[str, Any]:
    """`read`: the buffers that the dispatch reads and does not write."""
    split = {} if d.grid_argument is None else {"grid_argument": d.grid_argument}
    return {
        "kernel": d.kernel.name,
        "instantiation": d.kernel.instantiation,
        "constants": [
            {"index": i, "name": name, "type": kind, "value": value} for i, name, kind, value in d.kernel.constants
        ],
        "threadgroups": list(d.threadgroups),
        "threads": [d.kernel.threads, 1, 1],
        "threadgroup_memory": [],
        "static_threadgroup_memory": d.kernel.threadgroup_memory,
        "arguments": [_argument(a, read) for a in d.arguments],
        "multiply_accumulates": d.multiply_accumulates,
        **split,
    }
