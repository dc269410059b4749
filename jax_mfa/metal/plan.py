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
class Dispatch:
    """A kernel over a grid.

    Attributes:
      arguments: what the kernel finds at each buffer index: a buffer of the plan by name, or bytes.
      multiply_accumulates: an estimate from above for the whole grid, in those of the matrix unit, by which the
        launcher keeps command buffers short.
      grid_argument: the index of bytes whose first 24 say which part of its grid a launch is: x, y and z of the
        first threadgroup, then the extents of the whole. A kernel that has them may be launched in parts.
    """

    kernel: Kernel
    threadgroups: tuple[int, int, int]
    arguments: tuple[tuple[int, str | bytes], ...]
    multiply_accumulates: int = 0
    grid_argument: int | None = None

    @property
    def buffers(self) -> set[str]:
        return {x for _, x in self.arguments if isinstance(x, str)}

    def as_dict(self, read: set[str]) -> dict[str, Any]:
        """`read`: the buffers that the dispatch reads and does not write."""
        bound = lambda x: {"bytes": x.hex()} if isinstance(x, bytes) else {"buffer": x, "written": x not in read}
        names = ("index", "name", "type", "value")
        return {
            "kernel": self.kernel.name,
            "instantiation": self.kernel.instantiation,
            "constants": [dict(zip(names, x)) for x in self.kernel.constants],
            "threadgroups": list(self.threadgroups),
            "threads": [self.kernel.threads, 1, 1],
            "threadgroup_memory": [],
            "static_threadgroup_memory": self.kernel.threadgroup_memory,
            "arguments": [{"index": i} | bound(x) for i, x in self.arguments],
            "multiply_accumulates": self.multiply_accumulates,
            **({} if self.grid_argument is None else {"grid_argument": self.grid_argument}),
        }


def instantiations(kernels: list[Kernel]) -> str:
    """The text that instantiates kernels, each part of it once."""
    return "".join(dict.fromkeys([*(k.definitions for k in kernels), *(k.explicit for k in kernels)]))


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

    def __post_init__(self) -> None:
        missing = set().union(*(d.buffers for d in self.dispatches)) - {b.name for b in self.buffers}
        if missing:
            raise TypeError(f"{self.name} has no {', '.join(missing)}, which its kernels need")

    @property
    def operands(self) -> tuple[Buffer, ...]:
        return tuple(b for b in self.buffers if b.role in ("input", "updated"))

    @property
    def results(self) -> tuple[Buffer, ...]:
        return tuple(b for b in self.buffers if b.role != "input")

    @property
    def instantiations(self) -> str:
        return instantiations([d.kernel for d in self.dispatches])

    @functools.cached_property
    def json(self) -> str:
        return json.dumps(self.as_dict(), separators=(",", ":"))

    def as_dict(self) -> dict[str, Any]:
        inputs, updated = ({b.name for b in self.buffers if b.role == role} for role in ("input", "updated"))
        read, dispatches = inputs, []
        for d in self.dispatches:
            dispatches.append(d.as_dict(read))
            read = read | (d.buffers - updated)
        # instantiations are all of them, for readers: each dispatch has its own
        library = {"source": self.source, "instantiations": self.instantiations, "language": list(LANGUAGE)}
        return {
            "name": self.name,
            "library": library,
            "buffers": [dataclasses.asdict(b) | {"shape": list(b.shape)} for b in self.buffers],
            "dispatches": dispatches,
        }
