"""A user's program, type-checked: what is right passes, what is wrong is refused, by pyright and by mypy."""

import importlib.util
import inspect
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from jax_mfa import api, dot_product_attention, paged_attention
from jax_mfa.arguments import specify
from jax_mfa.kv_cache import paged

ROOT = pathlib.Path(__file__).parent.parent

PREAMBLE = """\
from typing import assert_type

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

import jax_mfa

q = k = v = jnp.ones((2, 3, 4, 8))
lengths = np.array([1, 3])
"""
RIGHT = """\
assert_type(jax_mfa.dot_product_attention(q, k, v), jax.Array)
assert_type(jax_mfa.dot_product_attention(q, k, v, None, None, return_residual=False), jax.Array)
assert_type(jax_mfa.dot_product_attention(q, k, v, return_residual=True), tuple[jax.Array, jax.Array])
assert_type(jax_mfa.flash_attention(q, k, v, scale=q.sum()), tuple[jax.Array, jax.Array])
assert_type(jax_mfa.decode_attention(q, k, v, [1, 2]), jax.Array)
assert_type(jax_mfa.decode_attention(q, k, v, 3, return_residual=True), tuple[jax.Array, jax.Array])
assert_type(jax_mfa.paged_attention(q, k, v, [[0], [1]], [3, 8], sinks=np.ones(4)), jax.Array)
residual = jax_mfa.paged_attention(q, k, v, [[0], [1]], lengths, return_residual=True)
assert_type(residual, tuple[jax.Array, jax.Array])
numbers = np.ones((2, 3, 4, 8), np.float32)
blocks = jax_mfa.BlockMask.causal(3, 3, (2, 2)) & jax_mfa.BlockMask.from_mask(np.ones((3, 3), bool), (2, 2))
some = jax_mfa.dot_product_attention(
    numbers,
    numbers,
    numbers,
    numbers[0, 0],
    mask=numbers > 0,
    scale=0.5,
    is_causal=True,
    query_seq_lengths=[1, 2],
    key_value_seq_lengths=lengths,
    local_window_size=(3, None),
    query_offset=(0, jnp.int32(1)),
    logits_soft_cap=30,
    alibi_slopes=[0.5, 0.25, 0.125, 0.0625],
    sinks=jnp.ones(4),
    query_segment_ids=[[0, 0, 1], [0, 1, 1]],
    key_value_segment_ids=[[0, 0, 1], [0, 1, 1]],
    key_value_ranges=np.zeros((2, 3, 2), int),
    block_mask=blocks,
    dropout_rate=0.1,
    dropout_seed=jax.random.key(0),
    implementation=("metal", "blockwise"),
)
assert_type(jax_mfa.explain(q, q, jax.ShapeDtypeStruct((2, 3, 4, 8), jnp.float32)).implementation, str)
shape = jax.ShapeDtypeStruct((4,), jnp.float32)
jax_mfa.explain(q, q, q, sinks=shape, implementation="xla", is_causal=True, return_residual=True)
assert_type(jax_mfa.merge(*jax_mfa.flash_attention(q, k, v), q, q[..., 0]), tuple[jax.Array, jax.Array])
out, lse = jax_mfa.flash_attention_varlen(q[0], k[0], v[0], [0, 3], is_causal=True, alibi_slopes=np.ones(4))
function = lambda score, b, n, t, s: score + t - s
assert_type(jax_mfa.flex_attention(q, k, v, score_mod=function, is_causal=True), jax.Array)
out, lse = jax_mfa.flex_attention(q, k, v, mask_mod=lambda b, n, t, s: t >= s, return_residual=True)
assert_type(jax_mfa.ring_attention(q, k, v, axis_name="x", order="zigzag", is_causal=True), jax.Array)
pair = jax_mfa.context_parallel_attention(q, k, v, axis_name=("x", "y"), form="hybrid", return_residual=True)
assert_type(pair, tuple[jax.Array, jax.Array])
assert_type(jax_mfa.ulysses_attention(q, k, v, axis_name="x", mesh=None, dropout_rate=0.1), jax.Array)
assert_type(jax_mfa.sharded_decode_attention(q, k, v, [1, 2], axis_name="x", sinks=np.ones(4)), jax.Array)
with jax_mfa.override_jax_nn(("metal", "xla")):
    jax.nn.dot_product_attention(q, k, v)
jax.export.export(jax.jit(lambda x: x), disabled_checks=jax_mfa.DISABLE_EXPORT_CHECKS)(q)
"""
WRONG = """\
jax_mfa.dot_product_attention(q, k, v, caussal=True)
jax_mfa.flash_attention(q, k, v, caussal=True)
jax_mfa.flash_attention(q, k, v, return_residual=True)
jax_mfa.decode_attention(q, k, v, 3, caussal=True)
jax_mfa.decode_attention(q, k, v, 3, is_causal=True)
jax_mfa.paged_attention(q, k, v, [[0]], [3], caussal=True)
jax_mfa.paged_attention(q, k, v, [[0]], [3]).items()
jax_mfa.explain(q, k, v, caussal=True)
jax_mfa.flash_attention_varlen(q, k, v, [0, 3], caussal=True)
out, lse = jax_mfa.dot_product_attention(q, k, v, return_residual=False).items
jax_mfa.flash_attention(q, k, v).shape
jax_mfa.dot_product_attention(q, k, v, return_residual=True).shape
jax_mfa.dot_product_attention(q, k)
jax_mfa.dot_product_attention(q, k, v, is_causal="yes")
jax_mfa.dot_product_attention(q, k, v, mask="causal")
jax_mfa.dot_product_attention(q, k, v, local_window_size=(1, 2, 3))
jax_mfa.dot_product_attention(q, k, v, logits_soft_cap="30")
jax_mfa.dot_product_attention(q, k, v, block_mask=np.ones((2, 2), bool))
jax_mfa.dot_product_attention(q, k, v, implementation="cudnn")
jax_mfa.dot_product_attention(q, k, v, implementation=("metal", "cudnn"))
jax_mfa.flash_attention(q, k, v, implementation="cudnn")
jax_mfa.flash_attention(jax.ShapeDtypeStruct((2, 3, 4, 8), jnp.float32), k, v)
jax_mfa.override_jax_nn("cudnn")
jax_mfa.BlockMask.causal(3, 3, 2)
jax_mfa.merge(q, k, v)
jax_mfa.attention(q, k, v)
jax_mfa.flex_attention(q, k, v, score_mod="causal")
jax_mfa.flex_attention(q, k, v, caussal=True)
jax_mfa.ring_attention(q, k, v)
jax_mfa.ring_attention(q, k, v, axis_name="x", order="zagzig")
jax_mfa.ulysses_attention(q, k, v, axis_name="x", order="zigzag")
jax_mfa.sharded_decode_attention(q, k, v, 3, axis_name="x", is_causal=True)
jax_mfa.cache.append(q, k, 0, q, k).shape
"""


def readme() -> str:
    """The first program of README."""
    program = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert program is not None and "out, lse = jax_mfa.flash_attention(" in program[1]
    return program[1]


def by_pyright(file: pathlib.Path) -> dict[int, str]:
    """Errors by line."""
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable]
    environment = {**os.environ, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}
    run = lambda *words: subprocess.run([*command, *words], cwd=ROOT, env=environment, capture_output=True, text=True)
    if run("--version").returncode:
        pytest.skip("pyright cannot be had: it fetches itself at its first start")
    found = json.loads(run("--outputjson", str(file)).stdout)["generalDiagnostics"]
    return {x["range"]["start"]["line"] + 1: x["message"] for x in found if x["severity"] == "error"}


def by_mypy(file: pathlib.Path) -> dict[int, str]:
    """Errors by line."""
    command = [sys.executable, "-m", "mypy", "--config-file=", "--follow-imports=silent", "--ignore-missing-imports"]
    environment = {**os.environ, "MYPYPATH": str(ROOT)}
    done = subprocess.run([*command, str(file)], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = re.findall(rf"{re.escape(file.name)}:(\d+): error: (.*)", done.stdout)
    return {int(line): message for line, message in found}


@pytest.mark.parametrize("checker", [by_pyright, pytest.param(by_mypy, marks=pytest.mark.sweep)])
def test_right_lines_pass_and_each_wrong_line_is_refused(tmp_path, checker):
    tool = checker.__name__.removeprefix("by_")
    if importlib.util.find_spec(tool) is None:
        pytest.skip(f"{tool} is not installed; it comes with the extra `test`")
    right = PREAMBLE + readme() + RIGHT
    file = tmp_path / "program.py"
    file.write_text(right + WRONG)
    lines = file.read_text().splitlines()
    first_wrong = len(right.splitlines()) + 1
    errors = checker(file)
    refused = {lines[i - 1]: message for i, message in errors.items() if i < first_wrong}
    assert not refused
    missed = [line for i, line in enumerate(lines, 1) if i >= first_wrong and i not in errors]
    assert not missed


def test_checkers_know_the_keywords_that_there_are():
    declared = set(api.Keywords.__optional_keys__)
    arrays = {"query", "key", "value", "bias", "mask"}
    # `parts` is the ring's alone, and `modifiers` what becomes of functions
    assert declared | arrays | {"parts", "modifiers"} == set(inspect.signature(specify).parameters)
    of_pages = {name for name, x in inspect.signature(paged_attention).parameters.items() if x.kind is x.KEYWORD_ONLY}
    assert set(paged._Keywords.__optional_keys__) | {"return_residual"} == of_pages
    own = {"implementation", "return_residual"}
    keywords = inspect.signature(dot_product_attention).parameters.items()
    assert declared | own == {name for name, x in keywords if x.kind is x.KEYWORD_ONLY}
