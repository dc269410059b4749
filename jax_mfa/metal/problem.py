"""An attention problem as kernels meet it: its sizes, what stands for each operand, and which features it uses.

The planner asks a `LaunchProblem` and never an array's shape. Plain Python; needs no device.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax

from jax_mfa.metal import functions, operands
from jax_mfa.metal.functions import Rules
from jax_mfa.metal.plan import SCALARS, Buffer
from jax_mfa.philox import drop_below
from jax_mfa.problem import MAX_POSITION, Operands, Specification, Storage

BIAS_TYPES = {"float32": 1, "float16": 2, "bfloat16": 3}
_SHORT = {"float16": "f16", "bfloat16": "bf16", "float32": "f32"}
_MOST = 2**30  # of tokens or channels of a block: more than there are


def encoding(storage: Storage | None, scalar: str) -> str:
    """The MSL type of how numbers of type `scalar` are stored."""
    if storage is None:
        return f"Plain<{scalar}>"
    x = storage.scheme
    symmetric = str(x.symmetric).lower()
    tokens, channels, center = (min(n or 0, _MOST) for n in (x.tokens, x.channels, x.center))
    return f"Quantized<{scalar}, {x.kind}_kind, {symmetric}, {tokens}, {channels}, {center}>"


def stored_type(storage: Storage | None, page_size: int | None, scalar: str, size: int, width: str = "") -> str:
    """The MSL type of rows of `size` numbers that lie in a row of an array, or in pages."""
    return f"Stored<{encoding(storage, scalar)}, {size}, {page_size or 0}{width}>"


def shape_of(x: Any) -> jax.ShapeDtypeStruct:
    """What a plan knows of an array."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


@dataclasses.dataclass(frozen=True)
class LaunchProblem:
    """A specification and the arrays that a launch carries.

    Attributes:
      arrays: by the names of `operands.CARRIED` and in that order.
      b, t, s, n, k, h, v: its sizes, of quantised and paged keys those of the arrays that they stand for.
      rules: what scores and visibility are.
      decoded: whether bfloat16 becomes float32 on its way to the matrix unit, where its arithmetic is emulated.
    """

    spec: Specification
    arrays: tuple[tuple[str, jax.ShapeDtypeStruct], ...]
    b: int
    t: int
    s: int
    n: int
    k: int
    h: int
    v: int
    rules: Rules
    decoded: bool

    @classmethod
    def of(
        cls, spec: Specification, arrays: Mapping[str, Any], rules: Rules | None = None, decoded: bool = False
    ) -> LaunchProblem:
        """From arrays or shapes by name, as `launch_arrays` gives them, and the specification's rules or others."""
        unknown = sorted(set(arrays) - set(operands.CARRIED))
        if unknown:
            raise TypeError(f"a launch carries {', '.join(operands.CARRIED)}, got {', '.join(unknown)}")
        shapes = {name: shape_of(arrays[name]) for name in operands.CARRIED if name in arrays}
        b, t, n, h = shapes["query"].shape
        of_problem = {name: x for name, x in shapes.items() if name in Operands._fields}
        _, s, k, v = spec.viewed(Operands(**of_problem)).value.shape
        rules = rules or functions.rules_of(spec.score_mod, spec.mask_mod)
        return cls(spec, tuple(shapes.items()), b, t, s, n, k, h, v, rules, decoded)

    @functools.cached_property
    def by_name(self) -> dict[str, jax.ShapeDtypeStruct]:
        return dict(self.arrays)

    def __contains__(self, name: str) -> bool:
        return name in self.by_name

    def shape(self, name: str) -> tuple[int, ...]:
        """Of an operand [rows, heads, queries, keys], which may be absent."""
        return self.by_name[name].shape if name in self else (1, 1, 1, 1)

    @property
    def dtype(self) -> str:
        return self.by_name["query"].dtype.name

    @property
    def operand(self) -> str:
        """The dtype of matrix operands. What stands in few bits 16 would round once more."""
        quantized = self.spec.key_storage or self.spec.value_storage
        return "float32" if quantized or (self.decoded and self.dtype == "bfloat16") else self.dtype

    def types(self, in_lanes: bool = False) -> str:
        """The template argument that says what a kernel is made of: `Attention` in `metal/attention/places.h`. One that
        reads keys and values straight to its lanes (`metal/core/lanes.h`) takes any of them as stored."""
        spec, scalar = self.spec, SCALARS[self.dtype]
        dense = lambda size, width="": f"Dense<{scalar}, {size}{width}>"

        def columns(storage: Storage | None, size: int, width: str = "") -> str:
            plain = storage is None and spec.page_size is None and not in_lanes
            return dense(size, width) if plain else stored_type(storage, spec.page_size, scalar, size, width)

        key, value = columns(spec.key_storage, self.h), columns(spec.value_storage, self.v)
        if spec.value_size is not None:
            value = columns(spec.key_storage, self.v, f", {self.h}")
        rules = f"{self.rules.score}, {self.rules.visibility}"
        return f"Attention<{SCALARS[self.operand]}, {dense(self.h)}, {key}, {value}, {dense(self.v)}, {rules}>"

    @property
    def short(self) -> str:
        """The same in a kernel's name."""
        spec, dtypes = self.spec, dict.fromkeys((self.dtype, self.operand))
        kinds = [x.scheme.kind if x else "plain" for x in (spec.key_storage, spec.value_storage)]
        stored = [] if spec.is_plain else [*kinds, f"p{spec.page_size or 0}"]
        stored += ["latent"] * (spec.value_size is not None)
        return "_".join([*(_SHORT[x] for x in dtypes), f"h{self.h}", f"v{self.v}", *stored])

    def source(self, name: str) -> str:
        """The operand where an argument of a kernel lies: latent values lie within the keys."""
        of_value = name.partition("_")[0] == "value"
        return name.replace("value", "key", 1) if of_value and self.spec.value_size is not None else name

    @property
    def pairs(self) -> int:
        """At most so many scores: of each row with the columns of its window, or all."""
        left, right = self.spec.band
        columns = self.s if left is None or right is None else min(self.s, left + right + 1)
        return self.b * self.n * self.t * max(columns, 0)

    def rows(self, name: str, role: str, *more: int, dtype: str = "float32") -> Buffer:
        """An array [B, T, N, *more]."""
        return Buffer(name, role, dtype, (self.b, self.t, self.n, *more))

    def results(self, role: str) -> tuple[Buffer, ...]:
        """Those of the forward pass, which the backward pass takes."""
        out = self.rows("out", role, self.v, dtype=self.dtype)
        return out, self.rows("row_max", role), self.rows("row_sum", role)

    @property
    def inputs(self) -> tuple[Buffer, ...]:
        """What the launch carries."""
        return tuple(Buffer(name, "input", x.dtype.name, x.shape) for name, x in self.arrays)

    def parameters(self, grid: tuple[int, int, int]) -> bytes:
        """`Parameters` of the MSL text, for a kernel over this grid of threadgroups."""
        spec = self.spec
        left, right = spec.band
        repeats = Operands(*spec.repeats)
        block_rows, block_columns = spec.mask_block or (1, 1)
        values: dict[str, Any] = {
            **dict(zip((f"grid.{x}" for x in ("x", "y", "z", "width", "height", "depth")), (0, 0, 0, *grid))),
            "queries": self.t,
            "keys": self.s,
            "heads": self.n,
            "key_heads": self.k,
            "batch": self.b,
            "scale": spec.scale,
            "query_offset": spec.query_offset,
            "left": min(left or 0, 2 * MAX_POSITION),
            "right": min(right or 0, 2 * MAX_POSITION),
            "block_rows": min(block_rows, MAX_POSITION),
            "block_columns": min(block_columns, MAX_POSITION),
            "cap": spec.logits_soft_cap or 0.0,
            "drop_below": drop_below(spec.dropout_rate),
            "keep_factor": 1 / (1 - spec.dropout_rate),
        }
        # floats and integers have their rows in common, or else one for each batch entry
        count, words = self.shape("captured")[:2]
        repeat = 1 if count in (1, self.b) else max(repeats.captured_floats, repeats.captured_integers)
        values |= {"captured.rows": count, "captured.repeat": repeat, "captured_words": words}
        for name in ("key", "value"):
            rows = self.source(name) if spec.page_size is None else "block_tables"
            values |= {f"{name}.rows": self.shape(rows)[0], f"{name}.repeat": getattr(repeats, rows)}
        for name in ("bias", "mask", "block_mask"):
            repeat = getattr(repeats, name) if name in self else 1
            sizes = dict(zip(("map.rows", "heads", "queries", "keys"), self.shape(name))) | {"map.repeat": repeat}
            values |= {f"{name}.{field}": size for field, size in sizes.items()}
        return operands.packed("Parameters", values)

    def constants(self, **more: Any) -> dict[str, Any]:
        """Function constants by name: which features there are, and `more`."""
        left, right = self.spec.band
        known = (operands.OPERANDS[name] for name in operands.CARRIED)
        values = {x.flag: self.source(x.name) in self for x in known if x.flag} | {
            "has_left": left is not None,
            "has_right": right is not None,
            "has_cap": self.spec.logits_soft_cap is not None,
            "has_mask_mod": self.spec.mask_mod is not None,
            "bias_type": BIAS_TYPES[self.by_name["bias"].dtype.name] if "bias" in self else 0,
            "has_lists": False,
            "has_spans": False,
        }
        return values | more

    def bound(
        self, function: str, grid: tuple[int, int, int], constants: Mapping[str, Any], own: Mapping[str, str | bytes]
    ) -> tuple[tuple[int, str | bytes], ...]:
        """A kernel's arguments that these constants say there are: `own` bytes or buffers of another name, else the
        buffer of the argument's name."""
        found = {"p": self.parameters(grid), **own}
        flags = ((i, name, operands.OPERANDS[name].flag) for i, name in enumerate(operands.signature(function).names))
        source = lambda name: found.get(name, self.source(name))
        return tuple((i, source(name)) for i, name, flag in flags if not flag or constants[flag])
