"""What a compiler for GPUs makes of the kernels: no fragment in memory, and an interior that mostly multiplies."""

from __future__ import annotations

import json

import compiled
import pytest
from serving import Serving

from jax_mfa import Scheme
from jax_mfa.__main__ import main
from jax_mfa.cli import bench, bench_candidates
from jax_mfa.metal import tiles

ENTRIES = [
    pytest.param(variant, limit, item, id=f"{variant}-{limit}-{8 * item}bit")
    for variant, entries in tiles.VARIANTS.items()
    for limit, item in entries
]
LEAST = {"attention_forward": 0.85, "attention_d_query": 0.80, "attention_d_key_value": 0.80}  # of cycles in products


@pytest.mark.parametrize("variant, limit, item", ENTRIES)
def test_no_variable_of_a_kernel_has_an_address(variant, limit, item):
    for plan, dispatch in compiled.kernels_of(variant, limit, "float16" if item == 2 else "float32"):
        assert compiled.compiled(plan, dispatch).allocas == 0, dispatch.kernel.name


@pytest.mark.parametrize("target", compiled.TARGETS[1:])
@pytest.mark.parametrize("variant", tiles.VARIANTS)
def test_nor_has_it_for_other_targets_masks_or_head_sizes(variant, target):
    found = compiled.kernels_of(variant, 64) + compiled.kernels_of(
        variant, 104, is_causal=True, local_window_size=(70, None)
    )
    for plan, dispatch in [*found, compiled.decoding(64), compiled.decoding(64, rows=4)]:
        assert compiled.compiled(plan, dispatch, target).allocas == 0, dispatch.kernel.name


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
    problem = Serving(T=9, key_value_seq_lengths=(1024,), schemes=schemes, H=128, N=1, K=1, dtype="float16")
    (plan,) = problem.plans()
    dispatch = plan.dispatches[0]
    assert dispatch.kernel.template[0] == "attention_decode" and dispatch.kernel.template[-1] == 2  # slices
    assert " = alloca " not in compiled.representation(compiled.text_of(plan, dispatch)), dispatch.kernel.name


@pytest.mark.parametrize("h", [64, 128])
def test_most_cycles_of_the_interior_are_spent_in_products(h):
    for plan, dispatch in compiled.kernels_of("staged", h):
        found = compiled.compiled(plan, dispatch)
        assert found.share >= LEAST[dispatch.kernel.template[0]], found
        assert found.code * compiled.BYTES <= 12 * 1024  # what the instruction cache of an M1 holds


def test_bench_prints_the_predicted_shares_of_its_problems(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench, "SHORTEST", 0.0)
    monkeypatch.setattr(bench_candidates, "OTHERS", {})
    sweep = ["--lengths", "512", "--heads", "2", "--masks", "causal", "--passes", "forward,forward+backward,decode"]
    arguments = ["--implementations", "blockwise", "--no-stock", "--rounds", "1", "--out", str(tmp_path)]
    assert main(["bench", *sweep, *arguments, "--dtypes", "float16", "--predict", "compiled"]) == 0
    names = [f"attention_{name}" for name in ("forward", "d_query", "d_key_value")]
    shares = [x.get("predicted") for x in json.loads((tmp_path / "bench.json").read_text())["rows"]]
    assert [list(x) for x in shares] == [names[:1], names, []]  # decoding waits for memory
    assert all(LEAST[name] <= share < 1 for x in shares for name, share in x.items())
    said = capsys.readouterr().out
    assert "Predicted for an M1 from public figures, never seen on Apple hardware" in said
    assert f"B1 T512 N2 H64 causal float16 forward: attention_forward {shares[0][names[0]]:.0%}" in said


def test_a_rolled_loop_over_fragments_is_noticed():
    plan, dispatch = compiled.kernels_of("staged", 64)[0]
    text = compiled.text_of(plan, dispatch)
    loop = "  for (int i = 0; i < Own::count; ++i) {"
    assert text.count(f"  UNROLLED\n{loop}") == 1
    graph = compiled.Graph.of(compiled.representation(text.replace(f"  UNROLLED\n{loop}", f"  ROLLED\n{loop}")))
    assert any(" = alloca " in line for body in graph.lines.values() for line in body)


@pytest.mark.parametrize("variant", tiles.VARIANTS)
def test_a_compiler_without_address_spaces_takes_the_text(variant):
    """Other GPUs' compilers do, with headers of their own: no two functions differ by an address space alone."""
    for plan, dispatch in compiled.kernels_of(variant, 64):
        assert " = alloca " not in compiled.representation(compiled.text_of(plan, dispatch), "spir64", "-DGPU_FLAT")
