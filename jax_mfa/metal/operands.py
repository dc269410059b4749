"""What kernels are told: every array, number and function constant declared once, with type, shape and meaning.

From here come `attention/operands.h` of the MSL text (structs, function constants, each kernel's parameters), the
buffer indices of launch plans, what a launch carries of a problem's operands, and the notes of
`python -m jax_mfa source`. Knows no kernel's insides. A kernel takes the features, then what its `Signature` says.
"""

from __future__ import annotations

import dataclasses
import struct
from typing import Any

FORMATS = {"int": "i", "uint": "I", "float": "f"}
MOST_BUFFERS = 31  # indices of Metal's argument table


@dataclasses.dataclass(frozen=True)
class Field:
    """A number of a struct, or a struct within it."""

    msl: str
    name: str
    meaning: str = ""


STRUCTS = {
    # batch entry b reads row (b / repeat) % rows of an operand
    "RowMap": (Field("int", "rows"), Field("int", "repeat")),
    # an operand [rows, 1|heads, 1|queries, 1|keys]; an axis of size 1 serves all
    "Broadcast": (Field("RowMap", "map"), Field("int", "heads"), Field("int", "queries"), Field("int", "keys")),
    # a grid may be launched in parts
    "Grid": (
        Field("uint", "x", "the first threadgroup of this launch"),
        Field("uint", "y"),
        Field("uint", "z"),
        Field("uint", "width", "threadgroups of all launches together"),
        Field("uint", "height"),
        Field("uint", "depth"),
    ),
    "Parameters": (
        Field("Grid", "grid", "which part of the whole grid a launch is: the launcher writes these first bytes"),
        Field("int", "queries", "T"),
        Field("int", "keys", "S"),
        Field("int", "heads", "N"),
        Field("int", "key_heads", "K"),
        Field("int", "batch", "B"),
        Field("RowMap", "key"),
        Field("RowMap", "value"),
        Field("float", "scale", "where it is no operand"),
        Field("int", "query_offset", "position of row 0, where it is no operand"),
        Field("int", "left", "columns from position - left on are visible, where has_left"),
        Field("int", "right", "columns to position + right are visible, where has_right"),
        Field("Broadcast", "bias"),
        Field("Broadcast", "mask"),
        Field("Broadcast", "block_mask", "one entry for block_rows x block_columns scores"),
        Field("int", "block_rows"),
        Field("int", "block_columns"),
        Field("float", "cap"),
        Field("uint", "drop_below", "random words below this drop a probability"),
        Field("float", "keep_factor", "1 / (1 - rate)"),
        Field("RowMap", "captured"),
        Field("int", "captured_words"),
    ),
}


def fields(msl: str) -> tuple[Field, ...]:
    """The numbers of a struct, inner structs laid flat; of a number, itself."""
    if msl in FORMATS:
        return (Field(msl, ""),)
    return tuple(
        Field(inner.msl, f"{outer.name}.{inner.name}".removesuffix("."), inner.meaning or outer.meaning)
        for outer in STRUCTS[msl]
        for inner in fields(outer.msl)
    )


def packed(msl: str, values: dict[str, Any]) -> bytes:
    """A struct's bytes from its numbers by name."""
    wanted = fields(msl)
    if set(values) != {x.name for x in wanted}:
        raise TypeError(f"{msl} has {[x.name for x in wanted]}, got {sorted(values)}")
    return struct.pack("<" + "".join(FORMATS[x.msl] for x in wanted), *(values[x.name] for x in wanted))


@dataclasses.dataclass(frozen=True)
class Operand:
    """An array or a number that kernels are given.

    Attributes:
      name: in plans and in the text; of what a caller gives, that of the field of `Operands`.
      msl: type of an element, or of the whole where there is no shape.
      shape: axes by their letters. What has B is carried with a row for each batch entry; what has `rows`, as it is.
      meaning: for readers, and for a harness that fills and judges it.
      flag: the function constant that says whether a launch has it; what is absent is not bound.
    """

    name: str
    msl: str
    shape: tuple[str, ...]
    meaning: str = ""
    flag: str | None = None

    @property
    def note(self) -> str:
        shape = f"[{', '.join(self.shape)}]" if self.shape else ""
        return f"{shape}: {self.meaning}" if shape and self.meaning else shape or self.meaning

    def type(self, written: bool = False) -> str:
        """With its address space, as a kernel's parameter has it."""
        if not self.shape:
            return f"constant {self.msl}&"
        return f"device {self.msl}*" if written else f"device const {self.msl}*"

    def parameter(self, index: int, written: bool = False) -> str:
        flag = f", function_constant({self.flag})" if self.flag else ""
        return f"{self.type(written)} {self.name} [[buffer({index}){flag}]]"


_SCORES = ("rows", "1|N", "1|T", "1|S")
_MAPPED = "an axis of size 1 serves all; batch entry b reads row (b / repeat) % rows"
_BLOCKS = ("rows", "1|N", "T / block_rows", "S / block_columns")
_ROWS = ("B", "T", "N")
_QUERY = ("B", "T", "N", "H")
_OUT = ("B", "T", "N", "V")
_SPLITS = ("B", "K", "splits", "N / K * T")

_FEATURES = (  # every kernel may ask for them
    Operand("p", "Parameters", (), "sizes and numbers of the launch"),
    Operand("query_offset", "int", ("B",), "position of row 0", "has_query_offset"),
    Operand("query_lengths", "int", ("B",), "rows from here on see nothing", "has_query_lengths"),
    Operand("key_lengths", "int", ("B",), "columns from here on are invisible", "has_key_lengths"),
    Operand("mask", "uchar", _SCORES, f"true where a score counts; {_MAPPED}", "has_mask"),
    Operand("block_mask", "uchar", _BLOCKS, f"true where a block of scores counts; {_MAPPED}", "has_blocks"),
    Operand("query_segment_ids", "int", ("B", "T"), "a row sees the columns of its own segment", "has_segments"),
    Operand("key_segment_ids", "int", ("B", "S"), "those of the columns", "has_segments"),
    Operand(
        "key_ranges", "int", ("B", "T", "2"), "first visible column of a row, and the one after the last", "has_ranges"
    ),
    Operand("scale", "float", ("B",), "factor of the products", "has_scale"),
    Operand("alibi_slopes", "float", ("B", "N"), "what a score gains for each column", "has_slopes"),
    Operand("bias", "uchar", _SCORES, f"added to the scaled scores; of bias_type; {_MAPPED}", "has_bias"),
    Operand(
        "dropout",
        "uint",
        ("B", "6"),
        "two words of the seed; batch index, head, row and column where its random counter starts",
        "has_dropout",
    ),
    *(
        Operand(f"{name}_{part}", "uchar", ("rows", *shape), f"{meaning}; of the query's dtype", f"has_{name}_{part}")
        for name in ("key", "value")
        for part, shape, meaning in (
            ("scales", ("S / tokens", "1|K", "groups"), "what a number in few bits is multiplied by"),
            ("zeros", ("S / tokens", "1|K", "groups"), "then added to it"),
            ("means", ("S / center", "K", "H|V"), "and then"),
        )
    ),
    Operand(
        "block_tables",
        "int",
        ("rows", "pages"),
        "which page holds the tokens from each multiple of a page on; `rows` of keys, values and their parts are pages",
        "has_block_tables",
    ),
    Operand(
        "captured",
        "int",
        ("rows", "words"),
        "what a caller's functions of scores and masks read: the bits of floats, then integers",
        "has_captured",
    ),
    Operand("origin", "int", ("B", "2"), "batch index and first head, as those functions are given them", "has_origin"),
)
_OWN = (  # a kernel's signature names them
    Operand("query", "typename Types::Query::Storage", _QUERY),
    Operand("key", "typename Types::Key::Storage", ("rows", "S", "K", "H")),
    Operand("value", "typename Types::Value::Storage", ("rows", "S", "K", "V")),
    Operand(
        "lists",
        "int",
        ("B", "1|N", "tiles of one axis", "2 + tiles of the other"),
        "visible tiles: how many, of them wholly visible, which: those first, the others from the end; or [..., 4]: "
        "the two numbers, and where each run begins",
        "has_lists",
    ),
    Operand("sinks", "float", ("B", "N"), "logit of the column without a value", "has_sinks"),
    Operand("out", "typename Types::T", _OUT, "softmax(scale * q k^T) v; zeros where a row sees nothing"),
    Operand("row_max", "float", _ROWS, "largest score of a row, its sink included"),
    Operand("row_sum", "float", _ROWS, "sum of exp(score - row_max); sees_nothing of jax_mfa/problem.py"),
    Operand("d_out", "typename Types::Cotangent::Storage", _OUT, "cotangent of out"),
    Operand(
        "d_lse", "float", _ROWS, "cotangent of the log-sum-exp, row_max + log(row_sum); zeros where that is unused"
    ),
    Operand(
        "row_states",
        "float4",
        _ROWS,
        "row_max, log2(row_sum), delta = sum(d_out * out) - d_lse, 0; the middle two are 0 where a row sees nothing",
    ),
    Operand("d_query", "typename Types::T", _QUERY),
    Operand("d_key", "typename Types::T", ("B", "S", "K", "H"), "summed over the N / K query heads of each key head"),
    Operand("d_value", "typename Types::T", ("B", "S", "K", "V"), "summed over the N / K query heads of each key head"),
    Operand("d_bias", "uchar", _SCORES, "of the dtype of bias; summed over what it was broadcast to", "wants_bias"),
    Operand(
        "score_sums",
        "float2",
        _ROWS,
        "those of d(score) times product, and times distance: of scale and slopes the gradients, once summed over rows",
        "wants_sums",
    ),
    Operand(
        "d_captured",
        "float",
        ("rows", "shares", "floats"),
        "of the floats that a caller's function of scores reads, the part that each share of the query rows has",
    ),
    Operand("split_out", "float", (*_SPLITS, "V"), "of each split of the keys, not normalised"),
    Operand("split_state", "float", (*_SPLITS, "2"), "maximum, sum; absent_weight where nothing is visible"),
    Operand("splits", "int", (), "how many"),
    Operand("split_keys", "int", (), "columns of a split, a multiple of those of a tile"),
)
OPERANDS = {x.name: x for x in (*_FEATURES, *_OWN)}
FEATURES = tuple(x.name for x in _FEATURES)
# what a launch may carry of a problem's operands, in the order of a plan's inputs
CARRIED = ("query", "key", "value", *FEATURES[1:], "sinks")
DTYPES = {"int": "int32", "uint": "uint32", "float": "float32"}  # that carried arrays are given; others keep theirs

_COLUMNS = ("query", "key", "value", "lists")
_RESULTS = ("out", "row_max", "row_sum")
_GRADIENT = (*_COLUMNS, "d_out", "row_states")


@dataclasses.dataclass(frozen=True)
class Signature:
    """What a kernel reads beside the features, and what it writes.

    Attributes:
      features: whether it may ask for them.
      in_parts: whether it reads `p.grid`, so that its grid may be launched in parts: that of a long walk.
    """

    reads: tuple[str, ...]
    writes: tuple[str, ...]
    features: bool = True
    in_parts: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        """All, in the order of their buffer indices."""
        return (*(FEATURES if self.features else FEATURES[:1]), *self.reads, *self.writes)


_DECODING = Signature((*_COLUMNS, "splits", "split_keys"), ("split_out", "split_state"))
SIGNATURES = {
    "tile_lists": Signature((), ("lists",), in_parts=False),
    "forward": Signature((*_COLUMNS, "sinks"), _RESULTS),
    "decode": _DECODING,
    "decode_rows": _DECODING,
    "merge": Signature(("split_out", "split_state", "splits", "sinks"), _RESULTS, in_parts=False),
    "delta": Signature(("out", "d_out", "row_max", "row_sum", "d_lse"), ("row_states",), False, False),
    "d_query": Signature(_GRADIENT, ("d_query", "score_sums", "d_bias")),
    "d_key_value": Signature(_GRADIENT, ("d_key", "d_value")),
    "d_bias": Signature(_GRADIENT, ("d_bias",)),
    "d_captured": Signature(_GRADIENT, ("d_captured",)),
}
assert all(len(x.names) <= MOST_BUFFERS for x in SIGNATURES.values())


def signature(function: str) -> Signature:
    """Of a kernel: both families, attention_… and portable_…, have the same."""
    return SIGNATURES[function.partition("_")[2]]


# (type, meaning) of function constants, in the order of their indices; what a launch does not use is compiled away
CONSTANTS = {
    "has_left": ("bool", "a window ends on the left"),
    "has_right": ("bool", "a window ends on the right"),
    "has_cap": ("bool", "a soft cap"),
    "bias_type": ("int", "0 none, 1 float, 2 half, 3 bfloat"),
    "has_mask_mod": ("bool", "a caller's function hides pairs"),
    "has_spans": ("bool", "of tile lists two runs are kept only: all, and those wholly visible"),
}
CONSTANTS |= {x.flag: ("bool", f"whether a launch has {x.name}") for x in OPERANDS.values() if x.flag}


def constants(values: dict[str, Any]) -> tuple[tuple[int, str, str, Any], ...]:
    """As of `plan.Kernel`, from values by name."""
    indices = {name: i for i, name in enumerate(CONSTANTS)}
    return tuple((indices[name], name, CONSTANTS[name][0], value) for name, value in values.items())


def _macro(name: str, lines: list[str], end: str = "\n") -> str:
    return f"#define {name} \\\n" + ", \\\n".join(f"  {x}" for x in lines) + end


def _commented(lines: list[tuple[str, str]]) -> str:
    return "".join(f"{x}{'  // ' + note if note else ''}\n" for x, note in lines)


def _struct(name: str, lines: list[tuple[str, str]]) -> str:
    return f"struct {name} {{\n{_commented(lines)}}};\n"


def text() -> str:
    """`attention/operands.h`: all of the above in MSL."""
    features = [OPERANDS[name] for name in FEATURES[1:]]
    indexed = enumerate(CONSTANTS.items())
    constant = [(f"constant {kind} {name} [[function_constant({i})]];", note) for i, (name, (kind, note)) in indexed]
    pointers = [("  constant Parameters* p;", ""), *((f"  {x.type()} {x.name};", x.note) for x in features)]
    parts = [
        "// Generated from jax_mfa/metal/operands.py. What a launch lacks is not bound, and compiled away.\n"
        '#pragma once\n\n#include "core/fragment.h"\n',
        _commented(constant),
        *(_struct(name, [(f"  {x.msl} {x.name};", x.meaning) for x in members]) for name, members in STRUCTS.items()),
        "// What visibility, scores and dropout may ask for.",
        _struct("Features", pointers),
        _macro("FEATURES", ["Features{&p", *(f"{x.flag} ? {x.name} : nullptr" for x in features)], "}\n"),
        _macro("FEATURE_OPERANDS", [OPERANDS[x].parameter(i) for i, x in enumerate(FEATURES)]),
    ]
    for name, known in SIGNATURES.items():
        lines = [OPERANDS[x].parameter(i, x in known.writes) for i, x in enumerate(known.names)]
        if known.features:
            lines = ["FEATURE_OPERANDS", *lines[len(FEATURES) :]]
        parts.append(_macro(f"{name.upper()}_OPERANDS", lines))
    return "\n".join(parts)
