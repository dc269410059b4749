"""What a compiler for GPUs makes of the kernels: no fragment in memory, and an interior that mostly multiplies."""

from __future__ import annotations

import re

import compiled
import pytest
from serving import Serving

from jax_mfa import Scheme
from jax_mfa.__main__ import main
from jax_mfa.cli import bench_candidates
from jax_mfa.metal import tiles

ENTRIES = [
    pytest.param(variant, limit, item, id=f"{variant}-{limit}-{8 * item}bit")
    for variant, entries in tiles.VARIANTS.items()
    for limit, item in entries
]
LEAST = {"attention_forward": 0.82, "attention_d_query": 0.85, "attention_d_key_value": 0.85}  # of cycles in products


@pytest.mark.share(16)
@pytest.mark.parametrize("variant, limit, item", ENTRIES)
def test_no_variable_of_a_kernel_has_an_address(variant, limit, item):
    for plan, dispatch in compiled.kernels_of(variant, limit, "float16" if item == 2 else "float32"):
        assert compiled.compiled(plan, dispatch).allocas == 0, dispatch.kernel.name


@pytest.mark.share(4)
@pytest.mark.parametrize("target", compiled.TARGETS[1:])
@pytest.mark.parametrize("variant", tiles.VARIANTS)
def test_nor_has_it_for_other_targets_masks_or_head_sizes(variant, target):
    found = compiled.kernels_of(variant, 64) + compiled.kernels_of(
        variant, 104, is_causal=True, local_window_size=(70, None)
    )
    for plan, dispatch in [*found, compiled.decoding(64), compiled.decoding(64, rows=4)]:
        assert compiled.compiled(plan, dispatch, target).allocas == 0, dispatch.kernel.name


@pytest.mark.share(4)
@pytest.mark.parametrize("page", [0, 16])
def test_nor_has_it_where_keys_and_values_are_stored(page):
    schemes = Scheme("int8"), Scheme("int4", True, channels=32)
    for rows, length in ((64, 128), (1, 1024)):
        problem = Serving(
            T=rows, key_value_seq_lengths=(length,), schemes=schemes, page=page, H=64, N=2, K=1, dtype="float16"
        )
        for plan in problem.plans(("query",) if page else ("query", "key", "value")):
            for dispatch in plan.dispatches:
                text = compiled.text_of(plan, dispatch)
                assert " = alloca " not in compiled.representation(text), dispatch.kernel.name


@pytest.mark.parametrize("channels", [64, 16])
def test_nor_has_it_where_decoders_share_a_row_of_stored_values(channels):
    schemes = Scheme("int8", channels=channels), Scheme("int4", channels=channels)
    problem = Serving(T=9, key_value_seq_lengths=(1024,), schemes=schemes, H=256, N=1, K=1, dtype="float16")
    (plan,) = problem.plans()
    dispatch = plan.dispatches[0]
    assert dispatch.kernel.template[0] == "attention_decode" and dispatch.kernel.template[-2] > 1  # slices
    assert " = alloca " not in compiled.representation(compiled.text_of(plan, dispatch)), dispatch.kernel.name


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
def test_nor_has_it_where_rows_are_paired(kind):
    problem = Serving(T=4, key_value_seq_lengths=(1024,), schemes=(Scheme(kind),) * 2, H=128, N=1, K=1, dtype="float16")
    (plan,) = problem.plans()
    dispatch = plan.dispatches[0]
    assert dispatch.kernel.template[0] == "attention_decode" and dispatch.kernel.template[-1] is True
    assert " = alloca " not in compiled.representation(compiled.text_of(plan, dispatch)), dispatch.kernel.name


@pytest.mark.parametrize("h", [64, 128])
def test_most_cycles_of_the_interior_are_spent_in_products(h):
    for plan, dispatch in compiled.kernels_of("staged", h):
        found = compiled.compiled(plan, dispatch)
        assert found.share(7) >= LEAST[dispatch.kernel.template[0]], found
        assert found.code * compiled.BYTES <= 12 * 1024  # what the instruction cache of an M1 holds


def test_bench_predicts_times_of_its_problems(capsys, monkeypatch):
    monkeypatch.setattr(bench_candidates, "measure", None)  # nothing is timed
    sweep = ["--lengths", "64,1024", "--heads", "2", "--masks", "none,causal", "--dtypes", "float16"]
    passes = ["--passes", "forward,forward+backward,decode"]
    assert main(["bench", *sweep, *passes, "--chips", "M1,M4", "--predict", "compiled"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("NOT MEASURED")
    row = r"^\| (?:- \| )?B1 T1024 N2 H64 (causal )?float16 \| (\S+) \| ([\d.]+) \+- ([\d.]+) ms, ([\d.]+)"
    cells = re.findall(row, said, re.M)
    found = {(mask.strip(), kind): tuple(map(float, figures)) for mask, kind, *figures in cells}
    assert len(found) == 4  # decoding waits for memory
    assert said.count("| B1 T64 N2 H64 float16 | forward | - | - |") == 1  # and a few rows leave cores idle
    (plan, dispatch), *_ = compiled.kernels_of("staged", 64)
    share = compiled.compiled(plan, dispatch).share(7)
    seconds = 4 * 2 * 1024**2 * 64 / 2.6e12 * 17 / 16 / share
    time, error, tflops = found["", "forward"]
    assert time == pytest.approx(seconds * 1e3, rel=0.01) and 0 < error < 0.1 * time
    assert tflops == pytest.approx(2.6 * 16 / 17 * share, rel=0.01)
    assert 0.5 < found["causal", "forward"][0] / time < 0.65 and found["", "forward+backward"][0] > 4 * time


def test_bytes_of_loads_are_counted():
    loads = {"<2 x half>": 4, "half": 2, "i16": 2, "<4 x i32>": 16, "float": 4, "ptr addrspace(1)": 8, "i1": 1}
    assert {kind: compiled.loaded(f"%1 = load {kind}, ptr %0, align 4") for kind in loads} == loads


def test_a_rolled_loop_over_fragments_is_noticed():
    plan, dispatch = compiled.kernels_of("staged", 64)[0]
    text = compiled.text_of(plan, dispatch)
    loop = "  for (int i = 0; i < Own::count; i += together) {"
    assert text.count(f"  UNROLLED\n{loop}") == 1
    graph = compiled.Graph.of(compiled.representation(text.replace(f"  UNROLLED\n{loop}", f"  ROLLED\n{loop}")))
    assert any(" = alloca " in line for body in graph.lines.values() for line in body)


@pytest.mark.share(2)
@pytest.mark.parametrize("variant", tiles.VARIANTS)
def test_a_compiler_without_address_spaces_takes_the_text(variant):
    """Other GPUs' compilers do, with headers of their own: no two functions differ by an address space alone."""
    for plan, dispatch in compiled.kernels_of(variant, 64):
        assert " = alloca " not in compiled.representation(compiled.text_of(plan, dispatch), "spir64", "-DGPU_FLAT")
