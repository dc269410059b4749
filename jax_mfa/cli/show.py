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
from typing import Any

import jax
import jax.numpy as jnp

from jax_mfa import choice
from jax_mfa.arguments import specify_abstract
from jax_mfa.cli.command_line import errors_of, positive
from jax_mfa.metal import DTYPES, operands, plan_of, source, tiles
from jax_mfa.metal.plan import ITEM_SIZES, Plan

HELP = "print the Metal source and the launch plan of a problem"
PASSES = ("forward", "backward")
SEPARATOR = "// ---- plan.json"


def program(plan: Plan) -> str:
    """The text that the launcher compiles for a plan."""
    return source.texts()[plan.source] + "\n" + plan.instantiations


def _decoded(data: bytes, kind: str) -> list[dict[str, Any]]:
    """The numbers of inline bytes, each with its offset and value."""
    fields, offset = [], 0
    for field in operands.fields(kind):
        code = operands.FORMATS[field.msl]
        (value,) = struct.unpack_from("<" + code, data, offset)
        note = {"note": field.meaning} if field.meaning else {}
        fields.append({"offset": offset, "type": field.msl, "name": field.name, "value": value} | note)
        offset += struct.calcsize(code)
    if offset != len(data):
        raise ValueError(f"{len(data)} inline bytes for {offset} bytes of {kind}")
    return fields


def described(plan: Plan) -> dict[str, Any]:
    """A plan's JSON with notes for readers; the launcher takes it as it is and ignores them."""
    text, body = program(plan), plan.as_dict()
    major, minor = body["library"]["language"]
    body["library"] |= {
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
        "note": f"source: sha256 of the text without its instantiations; MSL {major}.{minor}, fast math off",
    }
    notes = {name: operands.OPERANDS[name].note for name in operands.CARRIED}  # a kernel need not read all of these
    for dispatch, known in zip(body["dispatches"], plan.dispatches):
        function, *arguments = known.kernel.template
        signature = operands.signature(function)
        dispatch["template"] = {"function": function, "arguments": arguments}
        dispatch["fragment_bytes_per_thread"] = known.kernel.fragment_bytes
        for argument, (index, bound) in zip(dispatch["arguments"], known.arguments):
            operand = operands.OPERANDS[signature.names[index]]
            kind = operand.type(operand.name in signature.writes)
            argument["parameter"] = {"name": operand.name, "type": kind, "note": operand.note}
            if isinstance(bound, bytes):
                argument["fields"] = _decoded(bound, operand.msl)
            else:
                notes[bound] = operand.note
    for buffer in body["buffers"]:
        buffer["bytes"] = ITEM_SIZES[buffer["dtype"]] * math.prod(buffer["shape"])
        buffer["note"] = notes[buffer["name"]]
    body["note"] = "dispatches run one after another, each seeing what those before it wrote"
    return body


def make_plan(options: argparse.Namespace) -> Plan:
    """The plan of the command's options. Raises ValueError where they contradict each other."""
    b, n, k = options.batch, options.heads, options.key_heads or options.heads
    t, s = options.queries, options.keys or options.queries
    h, v = options.head_size, options.value_size or options.head_size
    shaped = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    arguments = {
        "query": shaped(options.dtype, b, t, n, h),
        "key": shaped(options.dtype, b, s, k, h),
        "value": shaped(options.dtype, b, s, k, v),
        "is_causal": options.causal,
        "local_window_size": options.window,
        "query_offset": options.query_offset,
        "logits_soft_cap": options.soft_cap,
    }
    by_option = {
        "lengths": dict.fromkeys(("query_offset", "query_seq_lengths", "key_value_seq_lengths"), shaped("int32", b)),
        "mask": {"mask": shaped("bool", b, 1, t, s)},
        "bias": {"bias": shaped(options.dtype, 1, n, t, s)},
        "alibi": {"alibi_slopes": shaped("float32", n)},
        "sinks": {"sinks": shaped("float32", n)},
        "segments": {"query_segment_ids": shaped("int32", b, t), "key_value_segment_ids": shaped("int32", b, s)},
        "dropout": {"dropout_rate": options.dropout, "dropout_seed": shaped("uint32", 2)},
    }
    for option, others in by_option.items():
        arguments |= others if getattr(options, option) else {}
    spec, o = specify_abstract(**arguments)
    if refused := choice.lacking(spec, o):
        raise ValueError(refused)
    return plan_of(spec, o, options.of_pass, options.variant)


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
    window = "columns seen on either side; empty for no limit"
    parser.add_argument("--window", type=_window, metavar="LEFT,RIGHT", help=window)
    parser.add_argument("--query-offset", type=int, default=0, help="position of row 0, default: %(default)s")
    parser.add_argument("--lengths", action="store_true", help="offset and lengths differ by batch entry")
    parser.add_argument("--mask", action="store_true", help="a boolean mask [B, 1, T, S]")
    parser.add_argument("--bias", action="store_true", help="a bias [1, N, T, S] of the dtype")
    parser.add_argument("--soft-cap", type=float, metavar="CAP", help="scores become CAP * tanh(score / CAP)")
    parser.add_argument("--alibi", action="store_true", help="a slope for each head")
    parser.add_argument("--sinks", action="store_true", help="a sink for each head")
    parser.add_argument("--segments", action="store_true", help="segment ids of queries and keys")
    parser.add_argument("--dropout", type=float, default=0.0, metavar="RATE", help="default: %(default)s")
    parser.add_argument("--pass", dest="of_pass", choices=PASSES, default="forward", help="default: %(default)s")
    variant = "tiles in threadgroup memory, or read from device memory directly; default: %(default)s"
    parser.add_argument("--variant", choices=tiles.NAMES, default="staged", help=variant)
    what = f"default: %(default)s, the text first and the plan after the line `{SEPARATOR}`"
    parser.add_argument("--what", choices=("msl", "plan", "both"), default="both", help=what)
    parser.add_argument("--output", type=pathlib.Path, metavar="DIR", help="write program.metal and plan.json there")


def run(options: argparse.Namespace) -> int:
    """Prints or writes what the options ask for."""
    with errors_of():
        plan = make_plan(options)
    text = json.dumps(described(plan), indent=1, ensure_ascii=False)
    on_one_line = lambda numbers: " ".join(numbers[0].split())
    text = re.sub(r"\[[\s\d,]*\]", on_one_line, text)
    files = {"msl": ("program.metal", program(plan)), "plan": ("plan.json", text + "\n")}
    wanted = list(files.values()) if options.what == "both" else [files[options.what]]
    if options.output is None:
        print(*(content for _, content in wanted), sep=f"{SEPARATOR}\n", end="")
        return 0
    with errors_of("--output"):
        options.output.mkdir(parents=True, exist_ok=True)
        for name, content in wanted:
            (options.output / name).write_text(content, encoding="utf-8")
            print(f"wrote {options.output / name}")
    return 0
