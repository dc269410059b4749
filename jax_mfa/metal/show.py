"""`python -m jax_mfa source`: the MSL text and the launch plan of a problem, enough to compile and run it elsewhere.

The text is the one that the launcher compiles, letter for letter; the plan is the launcher's own JSON with notes for
readers beside it. Needs no device. Knows how to read kernels, not what they compute.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import pathlib
import re
import struct
import sys
from typing import Any

import jax
import jax.numpy as jnp

from jax_mfa import metal
from jax_mfa.command_line import positive
from jax_mfa.metal import DTYPES, plan_of, source, tiles
from jax_mfa.metal.plan import ITEM_SIZES, Plan
from jax_mfa.specification import specify_abstract

HELP = "print the Metal source and the launch plan of a problem"
PASSES = ("forward", "backward")
SEPARATOR = "// ---- plan.json"
_STRUCT = re.compile(r"^struct (\w+) \{\n(.*?)^\};", re.MULTILINE | re.DOTALL)
_FIELD = re.compile(r"^\s*(\w+) (\w+);\s*(?://\s*(.*))?$")
_MACRO = re.compile(r"^#define (\w+)[ \t]*\\\n((?:.*\\\n)*.*)$", re.MULTILINE)
_PARAMETER = re.compile(
    r"(device|constant) (?:const )?([^*&,]+?)\s*([*&])\s*(\w+) \[\[buffer\((\d+)\)[^\]]*\]\],?[ ]*(?://(.*)|/\*(.*?)\*/)?"
)
_FORMATS = {"int": "i", "uint": "I", "float": "f", "uchar": "B"}
# columns of the tables that a plan may carry inline
_INLINE = {
    "limits": ("position of row 0", "rows from here on see nothing", "columns from here on are invisible"),
    "numbers": ("scale", "ALiBi slope", "logit of the sink"),
}
_BROADCAST = "an axis of size 1 serves all; batch row b reads row (b / repeat) % rows"
# what a harness must know to fill the inputs and to judge the results
_MEANINGS = {
    "query": "[B, T, N, H]",
    "key": "[rows, S, K, H]",
    "value": "[rows, S, K, V]",
    "limits": "[B, 3]: " + "; ".join(_INLINE["limits"]),
    "numbers": "[B*N, 3]: " + "; ".join(_INLINE["numbers"]),
    "bias": f"[rows, 1|N, 1|T, 1|S], added to the scaled scores; {_BROADCAST}",
    "mask": f"[rows, 1|N, 1|T, 1|S], true where a score counts; {_BROADCAST}",
    "blocks": f"[rows, 1|N, T/block_rows, S/block_columns], true where a block of scores counts; {_BROADCAST}",
    "query_segments": "[B, T]: a row sees the columns of its own segment",
    "key_segments": "[B, S]",
    "key_ranges": "[B, T, 2]: first visible column of a row, and the one after the last",
    "dropout": "[B, 6]: two words of the seed; batch index, head, row and column where its random counter starts",
    "out": "[B, T, N, V]: softmax(scale * q k^T) v; zeros where a row sees nothing",
    "row_max": "[B, T, N]: largest score of a row, its sink included; finite, 0 where there is none",
    "row_sum": "[B, T, N]: sum of exp(score - row_max); 0 where a row sees nothing, NaN where it has no softmax",
    "d_out": "[B, T, N, V]: cotangent of out",
    "d_lse": "[B, T, N]: cotangent of the log-sum-exp, row_max + log(row_sum); zeros where that is unused",
    "row_sums": "[B, T, N]: sum(d_out * out) - d_lse; zero where a row sees nothing",
    "row_states": "[B, T, N, 2]: row_max, log2(row_sum)",
    "d_query": "[B, T, N, H]",
    "d_key": "[B, S, K, H]: summed over the N / K query heads of each key head",
    "d_value": "[B, S, K, V]: summed over the N / K query heads of each key head",
    "d_bias": "as bias: summed over what it was broadcast to",
    "d_scale": "[B, T, N]: to be summed over T and N",
    "d_slopes": "[B, T, N]: to be summed over T",
    "row_lists": "[B, 1|N, tiles of rows, 2 + tiles of columns]: how many, of them wholly visible, which: those first, "
    "the others from the end; or [… 4]: the two numbers, and where each run begins",
    "column_lists": "as row_lists, for tiles of columns",
}


def program(plan: Plan) -> str:
    """The text that the launcher compiles for a plan."""
    return source.base() + "\n" + plan.instantiations


def _structs(text: str) -> dict[str, list[tuple[str, str, str]]]:
    """The structs of numbers in an MSL text: (scalar type, name, comment) of each field, inner structs laid flat."""
    structs: dict[str, list[tuple[str, str, str]]] = {}
    for name, body in _STRUCT.findall(text):
        fields = []
        for line in filter(str.strip, body.splitlines()):
            found = _FIELD.match(line)
            if found is None or (found[1] not in _FORMATS and found[1] not in structs):
                break
            kind, field, note = found[1], found[2], found[3] or ""
            inner = [(t, f"{field}.{x}", n or note) for t, x, n in structs.get(kind, ())]
            fields += inner or [(kind, field, note)]
        else:
            structs[name] = fields
    return structs


def _parameters(text: str, function: str) -> dict[int, dict[str, str]]:
    """What a kernel template says of each of its buffers: address space, MSL type, name and comment."""
    signature = re.search(rf"\bvoid {function}\((.*?)\)\s*\{{\n", text, re.DOTALL)
    if signature is None:
        raise ValueError(f"no kernel {function} in the source")
    declared = signature[1]
    for name, body in reversed(_MACRO.findall(text)):  # a macro may use those before it
        declared = re.sub(rf"\b{name}\b", lambda _, body=body: body.replace("\\\n", "\n"), declared)  # type: ignore[misc]
    found = {}
    for space, kind, mark, name, index, *notes in _PARAMETER.findall(declared):
        note = "".join(notes).strip()
        found[int(index)] = {"name": name, "type": f"{space} {kind}{mark}", **({"note": note} if note else {})}
    return found


def _decoded(data: bytes, name: str, kind: str, structs) -> list[dict[str, Any]]:
    """The fields of inline bytes, each with its offset and value."""
    fields = structs.get(kind)
    if fields is None:  # an array of numbers
        kind = kind if kind in _FORMATS else "uchar"
        count = len(data) // struct.calcsize(_FORMATS[kind])
        notes = _INLINE.get(name, ())
        fields = [(kind, str(i), notes[i] if len(notes) == count else "") for i in range(count)]
    found, offset = [], 0
    for kind, name, note in fields:
        (value,) = struct.unpack_from("<" + _FORMATS[kind], data, offset)
        found.append({"offset": offset, "type": kind, "name": name, "value": value} | ({"note": note} if note else {}))
        offset += struct.calcsize(_FORMATS[kind])
    if offset != len(data):
        raise ValueError(f"{len(data)} inline bytes for {offset} bytes of {kind}")
    return found


def described(plan: Plan) -> dict[str, Any]:
    """A plan's JSON with notes for readers; the launcher takes it as it is and ignores them."""
    text, body = program(plan), plan.as_dict()
    structs = _structs(text)
    major, minor = body["library"]["language"]
    body["library"] |= {
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
        "note": f"source: sha256 of the text without its instantiations; MSL {major}.{minor}, fast math off",
    }
    for buffer in body["buffers"]:
        buffer["bytes"] = ITEM_SIZES[buffer["dtype"]] * math.prod(buffer["shape"])
        buffer["note"] = _MEANINGS.get(buffer["name"], "")
    for dispatch, known in zip(body["dispatches"], plan.dispatches):
        function, *arguments = known.kernel.template
        parameters = _parameters(text, function)
        dispatch["template"] = {"function": function, "arguments": arguments}
        dispatch["fragment_bytes_per_thread"] = known.kernel.fragment_bytes
        for argument, own in zip(dispatch["arguments"], known.arguments):
            argument["parameter"] = parameters[own.index]
            if own.buffer is None:
                kind = argument["parameter"]["type"].split()[-1].rstrip("&*")
                argument["fields"] = _decoded(own.bytes, argument["parameter"]["name"], kind, structs)
    body["note"] = "dispatches run one after another, each seeing what those before it wrote"
    return body


def make_plan(options: argparse.Namespace) -> Plan:
    """The plan of the command's options. Raises ValueError where they contradict each other."""
    b, n, k = options.batch, options.heads, options.key_heads or options.heads
    t, s = options.queries, options.keys or options.queries
    h, v = options.head_size, options.value_size or options.head_size
    shaped = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    shapes = {"query": (b, t, n, h), "key": (b, s, k, h), "value": (b, s, k, v)}
    arrays = {name: shaped(options.dtype, *shape) for name, shape in shapes.items()}
    static = {"is_causal": options.causal, "local_window_size": options.window, "query_offset": options.query_offset}
    static["logits_soft_cap"] = options.soft_cap
    if options.lengths:
        arrays |= dict.fromkeys(("query_offset", "query_seq_lengths", "key_value_seq_lengths"), shaped("int32", b))
    if options.mask:
        arrays["mask"] = shaped("bool", b, 1, t, s)
    if options.bias:
        arrays["bias"] = shaped(options.dtype, 1, n, t, s)
    if options.alibi:
        arrays["alibi_slopes"] = shaped("float32", n)
    if options.sinks:
        arrays["sinks"] = shaped("float32", n)
    if options.segments:
        arrays |= {"query_segment_ids": shaped("int32", b, t), "key_value_segment_ids": shaped("int32", b, s)}
    if options.dropout:
        static["dropout_rate"] = options.dropout
        arrays["dropout_seed"] = shaped("uint32", 2)
    spec, operands = specify_abstract(**{**static, **arrays})
    refused = metal.lacking(spec, operands)
    if refused:
        raise ValueError(refused)
    return plan_of(spec, operands, options.of_pass, options.variant)


def _json(body: dict[str, Any]) -> str:
    """JSON with a line for each field, and lists of numbers on one line."""
    text = json.dumps(body, indent=1, ensure_ascii=False)
    return re.sub(r"\[[\s\d,]*\]", lambda found: " ".join(found[0].split()), text) + "\n"


def _window(text: str) -> tuple[int | None, int | None]:
    sides = [x.strip() for x in text.split(",")]
    if len(sides) != 2 or not all(x in ("", "none") or x.isdecimal() for x in sides):
        raise argparse.ArgumentTypeError(f"expected LEFT,RIGHT, either empty for no limit, got {text!r}")
    left, right = (int(x) if x.isdecimal() else None for x in sides)
    return left, right


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `python -m jax_mfa source`."""
    size = lambda flag, default, help: parser.add_argument(flag, type=positive, default=default, help=help)
    size("--batch", 1, "B, default: %(default)s")
    size("--queries", 512, "T, default: %(default)s")
    size("--keys", None, "S, default: --queries")
    size("--heads", 1, "N, default: %(default)s")
    size("--key-heads", None, "K, a divisor of N, default: --heads")
    size("--head-size", 64, "H, default: %(default)s")
    size("--value-size", None, "V, default: --head-size")
    parser.add_argument("--dtype", choices=DTYPES, default="float16", help="default: %(default)s")
    parser.add_argument("--causal", action="store_true", help="row t sees columns up to t + the offset")
    parser.add_argument(
        "--window", type=_window, metavar="LEFT,RIGHT", help="columns seen on either side; empty for no limit"
    )
    parser.add_argument("--query-offset", type=int, default=0, help="position of row 0, default: %(default)s")
    parser.add_argument(
        "--lengths",
        action="store_true",
        help="offset and lengths differ by batch row: they come as the buffer `limits`",
    )
    parser.add_argument("--mask", action="store_true", help="a boolean mask [B, 1, T, S]")
    parser.add_argument("--bias", action="store_true", help="a bias [1, N, T, S] of the dtype")
    parser.add_argument("--soft-cap", type=float, metavar="CAP", help="scores become CAP * tanh(score / CAP)")
    parser.add_argument("--alibi", action="store_true", help="a slope for each head")
    parser.add_argument("--sinks", action="store_true", help="a sink for each head")
    parser.add_argument("--segments", action="store_true", help="segment ids of queries and keys")
    parser.add_argument("--dropout", type=float, default=0.0, metavar="RATE", help="default: %(default)s")
    parser.add_argument("--pass", dest="of_pass", choices=PASSES, default="forward", help="default: %(default)s")
    parser.add_argument(
        "--variant",
        choices=tiles.NAMES,
        default="staged",
        help="tiles in threadgroup memory, or read from device memory directly; default: %(default)s",
    )
    parser.add_argument(
        "--what",
        choices=("msl", "plan", "both"),
        default="both",
        help=f"default: %(default)s, the text first and the plan after the line `{SEPARATOR}`",
    )
    parser.add_argument("--output", type=pathlib.Path, metavar="DIR", help="write program.metal and plan.json there")


def run(options: argparse.Namespace) -> int:
    """Prints or writes what the options ask for."""
    try:
        plan = make_plan(options)
    except (ValueError, TypeError) as error:
        print(f"source: {error}", file=sys.stderr)
        return 2
    msl, text = program(plan), _json(described(plan))
    if options.output is not None:
        written = [("program.metal", msl)] if options.what != "plan" else []
        written += [("plan.json", text)] if options.what != "msl" else []
        try:
            options.output.mkdir(parents=True, exist_ok=True)
            for name, content in written:
                (options.output / name).write_text(content, encoding="utf-8")
                print(f"wrote {options.output / name}")
        except OSError as error:
            print(f"source: --output: {error}", file=sys.stderr)
            return 2
        return 0
    if options.what != "plan":
        print(msl, end="")
    if options.what == "both":
        print(SEPARATOR)
    if options.what != "msl":
        print(text, end="")
    return 0
