"""`python -m jax_mfa source` gives a stranger all that is needed: what runs here is built from its output alone.

Nothing of the package is imported to run a plan: `run_folder` reads two files, as somebody else's harness would.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys

import emulator
import ml_dtypes
import numpy as np
import oracle
import pytest
from harness import assert_allclose

ROOT = pathlib.Path(__file__).resolve().parents[2]
DTYPES = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "int32": np.int32,
    "bool": np.bool_,
}


def command(*arguments: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_MFA_DEVICE": "none"}
    line = [sys.executable, "-m", "jax_mfa", "source", *arguments]
    return subprocess.run(line, capture_output=True, text=True, encoding="utf-8", env=environment)


def write(folder: pathlib.Path, *arguments: str) -> tuple[str, dict]:
    done = command(*arguments, "--output", str(folder))
    assert done.returncode == 0, done.stderr
    return (folder / "program.metal").read_text("utf-8"), json.loads((folder / "plan.json").read_text("utf-8"))


def run_folder(text: str, plan: dict, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Runs a plan over the emulator from its two files; the arrays of its results."""
    language = plan["library"]["language"]
    library = emulator.compile(text, language_version=tuple(language), fast_math=False)
    arrays = {}
    for buffer in plan["buffers"]:
        shape, dtype = tuple(buffer["shape"]), DTYPES[buffer["dtype"]]
        arrays[buffer["name"]] = inputs[buffer["name"]] if buffer["role"] == "input" else np.zeros(shape, dtype)
        assert arrays[buffer["name"]].shape == shape and arrays[buffer["name"]].nbytes == buffer["bytes"]
    for dispatch in plan["dispatches"]:
        kernel = library.kernel(dispatch["kernel"], {c["name"]: c["value"] for c in dispatch["constants"]})
        bound = {
            a["index"]: arrays[a["buffer"]] if "buffer" in a else bytes.fromhex(a["bytes"])
            for a in dispatch["arguments"]
        }
        named = {a["index"]: a["parameter"]["name"] for a in dispatch["arguments"]}
        assert all(named[a.index] == a.name for a in kernel.arguments if a.is_active)
        assert kernel.static_threadgroup_memory_length <= 32768
        result = kernel(bound, threadgroups=dispatch["threadgroups"], threadgroup=dispatch["threads"])
        assert not result.reports, result
    return {b["name"]: arrays[b["name"]] for b in plan["buffers"] if b["role"] != "input"}


SIZES = "--batch 2 --queries 37 --keys 53 --heads 6 --key-heads 2 --head-size 24 --value-size 17".split()


@pytest.mark.share(8)
@pytest.mark.parametrize(
    "dtype, variant, options, keywords",
    [
        ("float32", "staged", "--causal --query-offset 3", {"is_causal": True, "query_offset": 3}),
        ("bfloat16", "direct", "--window 9,", {"local_window_size": (9, None)}),
        (
            "float16",
            "staged",
            "--lengths",
            {"query_offset": (5, -2), "query_seq_lengths": (37, 20), "key_value_seq_lengths": (11, 53)},
        ),
    ],
)
def test_the_printed_source_and_plan_run_elsewhere_and_are_right(tmp_path, dtype, variant, options, keywords):
    keywords = {name: np.array(x) if name.endswith(("offset", "lengths")) else x for name, x in keywords.items()}
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.standard_normal(shape).astype(np.float32).astype(DTYPES[dtype])
    query, key, value = normal(2, 37, 6, 24), normal(2, 53, 2, 24), normal(2, 53, 2, 17)
    d_out, d_lse = normal(2, 37, 6, 17), rng.standard_normal((2, 37, 6)).astype(np.float32)
    inputs = {"query": query, "key": key, "value": value, "d_out": d_out, "d_lse": d_lse}
    if "--lengths" in options:
        columns = ("query_offset", "query_seq_lengths", "key_value_seq_lengths")
        carried = ("query_offset", "query_lengths", "key_lengths")
        inputs |= {name: keywords[given].astype(np.int32) for name, given in zip(carried, columns)}
    wanted = oracle.attention(query, key, value, **keywords, d_out=d_out, d_lse=d_lse)

    common = (*SIZES, "--dtype", dtype, "--variant", variant, *options.split())
    inputs |= run_folder(*write(tmp_path / "forward", *common), inputs)
    results = run_folder(*write(tmp_path / "backward", *common, "--pass", "backward"), inputs)

    eps = float(ml_dtypes.finfo(DTYPES[dtype]).eps)
    pairs = [("out", inputs["out"], wanted.out, eps)]
    pairs += [(name, results[f"d_{name}"], wanted.gradients[name], 3 * eps) for name in ("query", "key", "value")]
    for name, got, expected, units in pairs:  # units of the dtype, and what float32 sums cost
        error = np.abs(got.astype(np.float64) - expected).max() / np.abs(expected).max()
        assert error <= units + 4e-6, f"{name}: {error}"
    with np.errstate(divide="ignore"):
        lse = inputs["row_max"] + np.log(inputs["row_sum"])
    assert_allclose(lse, wanted.lse, rtol=0, atol=4e-6)


@pytest.mark.sweep
def test_every_other_feature_runs_elsewhere_too(tmp_path):
    """Mask, bias, slopes, sinks, soft cap and segments at once, from the notes in the plan."""
    b, t, s, n, k, h = 2, 37, 53, 6, 2, 24
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    query, key, value = normal(b, t, n, h), normal(b, s, k, h), normal(b, s, k, 17)
    d_out, d_lse = normal(b, t, n, 17), normal(b, t, n)
    keywords = {
        "bias": normal(1, n, t, s),
        "mask": rng.random((b, 1, t, s)) < 0.7,
        "alibi_slopes": rng.random(n).astype(np.float32) / 8,
        "sinks": normal(n),
        "logits_soft_cap": 3.0,
        "query_segment_ids": np.sort(rng.integers(0, 3, (b, t)), axis=1).astype(np.int32),
        "key_value_segment_ids": np.sort(rng.integers(0, 3, (b, s)), axis=1).astype(np.int32),
    }
    inputs = {"query": query, "key": key, "value": value, "d_out": d_out, "d_lse": d_lse}
    inputs |= {name: keywords[name] for name in ("mask", "bias")}
    inputs |= {name: np.tile(keywords[name], (b, 1)) for name in ("alibi_slopes", "sinks")}
    inputs |= {f"{x}_segment_ids": keywords[f"{y}_segment_ids"] for x, y in (("query", "query"), ("key", "key_value"))}
    wanted = oracle.attention(query, key, value, **keywords, d_out=d_out, d_lse=d_lse)

    features = "--dtype float32 --mask --bias --alibi --sinks --soft-cap 3 --segments".split()
    inputs |= run_folder(*write(tmp_path / "forward", *SIZES, *features), inputs)
    results = run_folder(*write(tmp_path / "backward", *SIZES, *features, "--pass", "backward"), inputs)
    results["d_alibi_slopes"] = results["score_sums"][..., 1].sum((0, 1))
    results["d_sinks"] = -(
        np.exp(keywords["sinks"] - inputs["row_max"]) / inputs["row_sum"] * results["row_states"][..., 2]
    ).sum((0, 1))
    pairs = [(inputs["out"], wanted.out)] + [(results[f"d_{name}"], x) for name, x in wanted.gradients.items()]
    for got, expected in pairs:
        assert np.abs(got - expected).max() <= 1e-5 * np.abs(expected).max()


def test_inline_bytes_are_explained(tmp_path):
    _, plan = write(tmp_path, *SIZES, "--query-offset", "7")
    fields = {
        field["name"]: field["value"]
        for argument in plan["dispatches"][0]["arguments"]
        for field in argument.get("fields", ())
        if argument["parameter"]["type"].startswith("constant Parameters")
    }
    assert (fields["queries"], fields["keys"], fields["heads"], fields["key_heads"]) == (37, 53, 6, 2)
    assert (fields["query_offset"], fields["scale"]) == (7, pytest.approx(24**-0.5))


@pytest.mark.sweep
def test_the_output_can_be_printed_whole_or_in_parts(tmp_path):
    text, plan = write(tmp_path, *SIZES)
    assert command(*SIZES, "--what", "msl").stdout == text
    assert json.loads(command(*SIZES, "--what", "plan").stdout) == plan
    both = command(*SIZES).stdout.split("// ---- plan.json\n")
    assert both[0] == text and json.loads(both[1]) == plan


def test_the_launcher_takes_the_printed_plan_as_it_is(native, metal, tmp_path):
    text, plan = write(tmp_path, *SIZES, "--pass", "backward")
    base = text.removesuffix("\n" + plan["library"]["instantiations"])
    native.add_source(plan["library"]["source"], base)
    native.prepare(json.dumps(plan))


@pytest.mark.share(4)
@pytest.mark.parametrize(
    "options, word",
    [("--heads 3 --key-heads 2", "multiple"), ("--head-size 100000", "head sizes"), ("--window 3", "LEFT,RIGHT")],
)
def test_what_cannot_be_planned_is_refused_with_a_reason(options, word):
    done = command(*options.split())
    assert done.returncode == 2 and word in done.stderr and not done.stdout and "Traceback" not in done.stderr


def test_a_program_has_few_kernels_beside_its_own(tmp_path):
    """Metal reads all of a program's text, so a forward pass brings no backward pass along."""
    known = {"attention_forward", "attention_d_query", "attention_decode", "portable_forward", "append_tokens"}
    for options, own in (((), "attention_forward"), (("--pass", "backward"), "attention_d_query")):
        text, plan = write(tmp_path / own, *SIZES, *options)
        assert {x for x in known if f"void {x}(" in text} == {own}
        assert {x["kernel"] for x in plan["dispatches"]} <= set(re.findall(r'host_name\("(\w+)"\)', text))
