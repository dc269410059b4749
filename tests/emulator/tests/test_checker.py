"""One planted bug per class of report, which must be found at its line, and its correct twin,
which must stay silent."""

import pathlib
import re

import emulator
import numpy as np
import pytest
from emulator import ReportClass as R

HEADER = "#include <metal_stdlib>\nusing namespace metal;\n"
SIGNATURE = """kernel void f(device float *out [[buffer(0)]], device const float *in [[buffer(1)]],
  constant uint &n [[buffer(2)]], threadgroup float *shared [[threadgroup(0)]],
  uint i [[thread_position_in_grid]], uint l [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
  uint g [[threadgroup_position_in_grid]]) {
"""

# class, buggy body, correct body; the bug is in the line marked "BUG"
CASES = {
    "device write": (R.OUT_OF_BOUNDS, "out[i + 1] = 1; // BUG", "out[i] = 1;"),
    "device read": (R.OUT_OF_BOUNDS, "out[i] =\n in[i + 1]; // BUG", "out[i] = in[i];"),
    "read before the start": (R.OUT_OF_BOUNDS, "out[i] = in[int(i) - 1]; // BUG", "out[i] = i ? in[i - 1] : 0;"),
    "constant": (R.OUT_OF_BOUNDS, "out[i] = (&n)[1]; // BUG", "out[i] = n;"),
    "dynamic threadgroup": (
        R.OUT_OF_BOUNDS,
        "shared[l] = 0; if (l == 0)\n shared[64] = 1; // BUG\n out[i] = shared[l];",
        "shared[l] = 0; out[i] = shared[l];",
    ),
    "static threadgroup": (
        R.OUT_OF_BOUNDS,
        "threadgroup float s[8]; if (l < 9)\n s[l] = 1; // BUG\n out[i] = 0;",
        "threadgroup float s[8]; if (l < 8) s[l] = 1; out[i] = 0;",
    ),
    "private": (
        R.OUT_OF_BOUNDS,
        "float a[4] = {0, 1, 2, 3};\n out[i] = a[(n + 3) / 16]; // BUG",
        "float a[4] = {0, 1, 2, 3}; out[i] = a[n % 4];",
    ),
    "read past a private array": (
        R.OUT_OF_BOUNDS,
        "float a[4] = {0, 1, 2, 3}; thread float *p = a; p += n / 16;\n out[i] = *p; // BUG",
        "float a[4] = {0, 1, 2, 3}; thread float *p = a; p += n / 32; out[i] = *p;",
    ),
    "write past a private array": (
        R.OUT_OF_BOUNDS,
        (
            "float a[4]; thread float *p = a; for (uint k = 0; k <= n / 16; k++)\n p[k] = k; // BUG\n"
            " out[i] = a[n / 32];"
        ),
        "float a[4]; thread float *p = a; for (uint k = 0; k < n / 16; k++) p[k] = k; out[i] = a[n / 32];",
    ),
    "matrix past an array of them": (
        R.OUT_OF_BOUNDS,
        (
            "simdgroup_float8x8 a, c[2]; simdgroup_load(a, in); for (auto &x : c) simdgroup_load(x, in);"
            " for (uint k = 0; k < n / 21; k++)\n simdgroup_multiply_accumulate(c[k], a, a, c[k]); // BUG\n"
            " if (i < 32) simdgroup_store(c[1], out);"
        ),
        (
            "simdgroup_float8x8 a, c[2]; simdgroup_load(a, in); for (auto &x : c) simdgroup_load(x, in);"
            " for (uint k = 0; k < n / 32; k++) simdgroup_multiply_accumulate(c[k], a, a, c[k]);"
            " if (i < 32) simdgroup_store(c[1], out);"
        ),
    ),
    "matrix load": (
        R.OUT_OF_BOUNDS,
        "simdgroup_float8x8 m;\n simdgroup_load(m, in + 1, 8); // BUG\n simdgroup_store(m, out, 8);",
        "simdgroup_float8x8 m; simdgroup_load(m, in, 8); if (i < 32) simdgroup_store(m, out, 8);",
    ),
    "missing barrier": (
        R.RACE,
        "shared[l] = i;\n out[i] = shared[l ^ 32]; // BUG",
        "shared[l] = i; threadgroup_barrier(mem_flags::mem_threadgroup); out[i] = shared[l ^ 32];",
    ),
    "barrier for the other memory": (
        R.RACE,
        "shared[l] = i; threadgroup_barrier(mem_flags::mem_device);\n out[i] = shared[l ^ 32]; // BUG",
        (
            "shared[l] = i; threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup); "
            "out[i] = shared[l ^ 32];"
        ),
    ),
    "within a simdgroup": (
        R.RACE,
        "shared[l] = i;\n out[i] = shared[l ^ 1]; // BUG",
        "shared[l] = i; simdgroup_barrier(mem_flags::mem_threadgroup); out[i] = shared[l ^ 1];",
    ),
    "write after read": (
        R.RACE,
        (
            "shared[l] = 0; threadgroup_barrier(mem_flags::mem_threadgroup); "
            "float x = shared[63 - l];\n shared[l] = x + i; // BUG\n out[i] = x;"
        ),
        (
            "shared[l] = 0; threadgroup_barrier(mem_flags::mem_threadgroup); float x = shared[63 - l]; "
            "threadgroup_barrier(mem_flags::mem_threadgroup); shared[l] = x + i; out[i] = x;"
        ),
    ),
    "two writers": (R.RACE, "out[i] = 0;\n shared[0] = i; // BUG", "out[i] = 0; if (l == 0) shared[0] = i;"),
    "device memory": (
        R.RACE,
        "out[i] = in[i];\n if (out[i ^ 1] > 1e9f) out[i] = 0; // BUG",
        (
            "out[i] = in[i]; threadgroup_barrier(mem_flags::mem_device); "
            "if (out[i ^ 1] > 1e9f) { threadgroup_barrier(mem_flags::mem_none); }"
        ),
    ),
    "matrix against scalar": (
        R.RACE,
        "simdgroup_float8x8 m; simdgroup_load(m, in); simdgroup_store(m, shared);\n out[i] = shared[l]; // BUG",
        (
            "simdgroup_float8x8 m; simdgroup_load(m, in); if (l < 32) simdgroup_store(m, shared); "
            "threadgroup_barrier(mem_flags::mem_threadgroup); out[i] = shared[l];"
        ),
    ),
    "between threadgroups": (
        R.RACE_BETWEEN_THREADGROUPS,
        "if (l < 32)\n out[l] = i; // BUG\n else out[32 + l % 32] = 0;",
        "out[i] = i;",
    ),
    "equal values": (
        R.RACE_EQUAL_VALUE,
        "out[i] = 0;\n shared[0] = 1; // BUG",
        "out[i] = 0; if (l == 0) shared[0] = 1;",
    ),
    "uninitialised threadgroup": (
        R.UNINITIALISED_THREADGROUP,
        "out[i] = shared[l]; // BUG",
        "shared[l] = 0; out[i] = shared[l];",
    ),
    "uninitialised variable": (
        R.UNINITIALISED_PRIVATE,
        "float x;\n out[i] = x + 1; // BUG",
        "float x = 0; out[i] = x + 1;",
    ),
    "uninitialised array": (
        R.UNINITIALISED_PRIVATE,
        "float a[4]; a[0] = 1; a[2] = in[0];\n out[i] = a[n / 64] + a[n / 32]; // BUG",
        "float a[4] = {0}; out[i] = a[n / 64] + a[n / 32];",
    ),
    "reduction over a variable without a value": (
        R.UNINITIALISED_PRIVATE,
        "float x; for (uint k = l; k < n / 2; k++) x = in[k];\n out[i] = simd_max(x); // BUG",
        "float x = 0; for (uint k = l; k < n / 2; k++) x = in[k]; out[i] = simd_max(x);",
    ),
    "uninitialised matrix": (
        R.UNINITIALISED_PRIVATE,
        (
            "simdgroup_float8x8 a, c; simdgroup_load(a, in);\n simdgroup_multiply_accumulate(c, a, a, c); "
            "// BUG\n if (i < 32) simdgroup_store(c, out);"
        ),
        (
            "simdgroup_float8x8 a, c = make_filled_simdgroup_matrix<float, 8>(0.0f); simdgroup_load(a, in); "
            "simdgroup_multiply_accumulate(c, a, a, c); if (i < 32) simdgroup_store(c, out);"
        ),
    ),
    "barrier in a branch": (
        R.DIVERGENT_BARRIER,
        "if (l < 40)\n threadgroup_barrier(mem_flags::mem_threadgroup); // BUG\n out[i] = 0;",
        "if (n < 40) threadgroup_barrier(mem_flags::mem_threadgroup); out[i] = 0;",
    ),
    "barrier after return": (
        R.DIVERGENT_BARRIER,
        "out[i] = 0; if (l == 3) return;\n threadgroup_barrier(mem_flags::mem_threadgroup); // BUG",
        "out[i] = 0; threadgroup_barrier(mem_flags::mem_threadgroup); if (l == 3) return;",
    ),
    "shuffle in a branch": (
        R.DIVERGENT_SIMDGROUP,
        "float x = i; if (lane < 16)\n x = simd_shuffle_xor(x, 1); // BUG\n out[i] = x;",
        "float x = i; x = simd_shuffle_xor(x, 1); out[i] = x;",
    ),
    "shuffles in both branches": (
        R.DIVERGENT_SIMDGROUP,
        (
            "float x; if (lane < 16)\n x = simd_shuffle(float(i), 1); // BUG\n else x = simd_shuffle(float(i), 1); "
            "out[i] = x;"
        ),
        "float x = simd_shuffle(float(i), 1); out[i] = x;",
    ),
    "matrix in a branch": (
        R.DIVERGENT_SIMDGROUP,
        (
            "simdgroup_float8x8 m = make_filled_simdgroup_matrix<float, 8>(0.0f); "
            "if (lane != 5)\n simdgroup_multiply(m, m, m); // BUG\n out[i] = m.thread_elements().x;"
        ),
        (
            "simdgroup_float8x8 m = make_filled_simdgroup_matrix<float, 8>(0.0f); simdgroup_multiply(m, m, m); "
            "out[i] = m.thread_elements().x;"
        ),
    ),
    "shuffle from a returned thread": (
        R.DIVERGENT_SIMDGROUP,
        "out[i] = 0; if (lane == 31) return;\n out[i] = simd_shuffle(float(i), 31); // BUG",
        "out[i] = 0; if (lane == 31) return; out[i] = simd_sum(1.0f);",
    ),
    "misaligned": (
        R.MISALIGNED,
        "device const char *p = (device const char *)in; out[i] =\n *(device const float *)(p + 2); // BUG",
        "device const char *p = (device const char *)in; out[i] = *(device const float *)(p + 4);",
    ),
    "shuffle lane": (
        R.INVALID_VALUE,
        "out[i] = simd_broadcast(float(i), n); // BUG",
        "out[i] = simd_broadcast(float(i), n % 32);",
    ),
}


def launch(body, *, seed=0, outputs=(0,), threads=128, **options):
    source = HEADER + SIGNATURE + body + "\n}\n"
    out, data = np.zeros(128, np.float32), np.arange(128, dtype=np.float32)
    if "simdgroup_load(m, in + 1" in body:
        data = data[:64].copy()
    kernel = emulator.compile(source, file_name="case.metal").kernel()
    return source, kernel(
        [out, data, 64],
        threads=threads,
        threadgroup=64,
        threadgroup_memory={0: 256},
        seed=seed,
        outputs=outputs,
        **options,
    )


@pytest.mark.parametrize("seed", [0, 7])
@pytest.mark.parametrize("name", CASES)
def test_planted_bug_is_found(name, seed):
    kind, buggy, _ = CASES[name]
    source, result = launch(buggy, seed=seed, outputs=())
    line = next(k for k, text in enumerate(source.splitlines(), 1) if "// BUG" in text)
    found = result.of(kind)
    assert found, result
    lines = {r.line for r in found} | {r.other_line for r in found}
    if kind is R.RACE and name != "barrier for the other memory":
        assert any(abs(at - line) <= 1 for at in lines), result  # either of the two accesses may come second
    elif name == "uninitialised array":
        return  # known by its result: the thread and the place in the output, no line
    else:
        assert line in lines, result
    assert found[0].file == "case.metal"
    assert found[0].threads or name == "uninitialised variable"


@pytest.mark.parametrize("seed", [0, 7])
@pytest.mark.parametrize("name", CASES)
def test_correct_twin_is_silent(name, seed):
    result = launch(CASES[name][2], seed=seed, outputs=())[1]
    assert not result.reports, result
    assert result.ok


# What only shows where the same kernel runs with other contents of its private memory: body, correct body
VARIED = {
    "integer": (
        "int k; for (uint j = 0; j < n / 128; j++) k = j; out[i] = k & 2;",
        "int k = 0; for (uint j = 0; j < n / 128; j++) k = j; out[i] = k & 2;",
    ),
    "integer array": (
        "uchar a[8]; for (uint j = 0; j < n / 16; j++) a[j] = j; out[i] = a[n / 16 + (l & 3)] > 9;",
        "uchar a[8]; for (uint j = 0; j < n / 8; j++) a[j] = j; out[i] = a[n / 16 + (l & 3)] > 9;",
    ),
    "float, as bytes": (
        "float a[2]; a[0] = 1; *((device uint *)out + i) = as_type<uint>(a[n / 64]) & 1;",
        "float a[2]; a[0] = a[1] = 1; *((device uint *)out + i) = as_type<uint>(a[n / 64]) & 1;",
    ),
    "loop bound": (
        "int last; if (n < 64) last = 3; float x = 0; for (int k = 0; k < last; k++) x += k; out[i] = x - last;",
        "int last = 3; float x = 0; for (int k = 0; k < last; k++) x += k; out[i] = x - last;",
    ),
}


@pytest.mark.parametrize("name", VARIED)
def test_result_that_depends_on_unset_private_memory(name):
    buggy, correct = VARIED[name]
    result = launch(buggy, outputs=(), vary_private=True)[1]
    assert result.of(R.UNINITIALISED_PRIVATE) and not result.ok, result
    result = launch(correct, outputs=(), vary_private=True)[1]
    assert not result.reports and result.ok, result


def test_unwritten_output():
    result = launch("if (i != 5) out[i] = 1;")[1]
    assert [r.kind for r in result.reports] == [R.UNWRITTEN_OUTPUT] and result.reports[0].offset == 20
    assert not launch("out[i] = 1;")[1].reports


def test_uninitialised_device_memory():
    source = HEADER + (
        "kernel void f(device float *s [[buffer(0)]], device float *o [[buffer(1)]], "
        "uint i [[thread_position_in_grid]]) { if (i != 3) s[i] = 1; o[i] = s[i]; }"
    )
    kernel = emulator.compile(source).kernel()
    result = kernel([np.zeros(8, np.float32), np.zeros(8, np.float32)], threads=8, threadgroup=8, uninitialised=[0])
    assert [r.kind for r in result.reports] == [R.UNINITIALISED_DEVICE] and result.reports[0].threads[0][1] == (3, 0, 0)


def test_threadgroup_memory_limit():
    source = HEADER + (
        "kernel void f(threadgroup float *t [[threadgroup(0)]], device float *o [[buffer(0)]], "
        "uint l [[thread_index_in_threadgroup]]) { threadgroup float s[1024]; s[l] = l; "
        "threadgroup_barrier(mem_flags::mem_threadgroup); t[0] = s[int(o[0])]; o[0] = t[0]; }"
    )
    kernel = emulator.compile(source).kernel()
    assert kernel.static_threadgroup_memory_length == 4096
    assert kernel([np.zeros(1, np.float32)], threads=1, threadgroup_memory={0: 28672}).ok
    with pytest.raises(emulator.DispatchError, match="needs 32784 bytes") as failure:
        kernel([np.zeros(1, np.float32)], threads=1, threadgroup_memory={0: 28688})
    assert failure.value.result.reports[0].kind is R.THREADGROUP_MEMORY


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize(
    "loop",
    [
        "while (x < 1e30f) x += out[1] * 0;",
        "for (;;) { threadgroup_barrier(mem_flags::mem_threadgroup); }",
        "uint k = l; while (k != 0x80000001u) k = (k + 2) & ~1u; x = k;",
    ],
)
def test_endless_kernel_is_stopped_with_positions(loop, checked):
    source = HEADER + SIGNATURE + "float x = 0;\n" + loop + "\nout[i] = x; }"
    result = emulator.compile(source, file_name="endless.metal").kernel(checked=checked)(
        [np.zeros(128, np.float32), np.zeros(128, np.float32), 64],
        threads=128,
        threadgroup=64,
        threadgroup_memory={0: 256},
        time_limit=0.3,
        checked=checked,
        host_threads=1,
    )
    assert result.status is emulator.Status.TIMEOUT
    places = result.of(R.ENDLESS)
    line = source[: source.index(loop)].count("\n") + 1
    assert any(r.line == line for r in places), result
    assert sum(r.involved for r in places) == 64


def test_faults_in_a_fast_run_do_not_end_the_process():
    source = HEADER + "kernel void f(device float *o [[buffer(0)]], constant ulong &far [[buffer(1)]]) { o[far] = 1; }"
    result = emulator.compile(source).kernel(checked=False)(
        [np.zeros(1, np.float32), np.uint64(1 << 45)], threads=1, checked=False
    )
    assert result.status is emulator.Status.FAULT


def test_counters_are_exact_and_repeatable():
    source = (
        HEADER
        + """kernel void f(device float *o [[buffer(0)]], device const float4 *x [[buffer(1)]],
  uint l [[thread_index_in_threadgroup]]) { threadgroup float4 s[64]; s[l] = x[l];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  o[l] = exp(s[63 - l].x) + fast::exp2(1.0f); simdgroup_barrier(mem_flags::mem_none); }"""
    )
    kernel = emulator.compile(source).kernel()
    runs = [
        kernel([np.zeros(64, np.float32), np.zeros((64, 4), np.float32)], threads=64, threadgroup=64, seed=s).counters
        for s in (0, 0, 5)
    ]
    assert runs[0] == runs[1] == runs[2]
    c = runs[0]
    assert (
        c.device_bytes_loaded,
        c.device_bytes_stored,
        c.threadgroup_bytes_stored,
        c.exponentials,
        c.barriers,
        c.simdgroup_barriers,
    ) == (1024, 256, 1024, 128, 1, 2)


def test_each_threadgroup_counts_the_lines_that_it_loads_once():
    """Two lines of its own, and one that all share."""
    source = (
        HEADER
        + """kernel void f(device float *o [[buffer(0)]], device const float *x [[buffer(1)]],
  uint i [[thread_position_in_grid]]) { o[i] = x[i] + x[1024]; }"""
    )
    kernel = emulator.compile(source).kernel()
    x = np.zeros(2048, np.float32)
    run = lambda **how: kernel([np.zeros(256, np.float32), x], threads=256, threadgroup=64, **how).counters
    for seed in (0, 3):
        assert run(count_lines=True, seed=seed).device_lines_loaded == 4 * 3
    assert run().device_lines_loaded == 0
    assert run(count_lines=True).device_bytes_loaded == run().device_bytes_loaded


def test_dispatches_that_metal_refuses():
    kernel = emulator.compile(
        HEADER
        + (
            "[[max_total_threads_per_threadgroup(64)]] kernel void f(device float *o [[buffer(0)]], "
            "constant float4 &k [[buffer(1)]]) { o[0] = k.x; }"
        )
    ).kernel()
    out = np.zeros(1, np.float32)
    with pytest.raises(emulator.DispatchError, match="maxTotalThreadsPerThreadgroup"):
        kernel([out, np.zeros(4, np.float32)], threads=128, threadgroup=128)
    with pytest.raises(emulator.DispatchError, match="its type needs 16"):
        kernel([out, np.zeros(3, np.float32)], threads=1)


# ---- a large program, and mutations of it ---------------------------------------------------------------------------

ATTENTION = pathlib.Path(__file__).parent / "msl" / "attention.metal"


def attend(source, queries=64, keys=64, seed=0, **options):
    rng = np.random.default_rng(4)
    q, k, v = (rng.standard_normal((n, 64)).astype(np.float32) for n in (queries, keys, keys))
    out = np.zeros_like(q)
    shape = np.array([queries, keys], np.uint32).tobytes() + np.float32(0.125).tobytes()
    result = emulator.compile(source, file_name="attention.metal").kernel(checked=options.get("checked", True))(
        [q, k, v, out, shape], threadgroups=queries // 32, threadgroup=128, seed=seed, **options
    )
    x = np.exp(0.125 * q.astype(np.float64) @ k.astype(np.float64).T)
    return result, np.abs(out - x / x.sum(1, keepdims=True) @ v).max()


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("keys", [64, 75])
def test_attention_is_right_and_silent(keys, seed):
    result, error = attend(ATTENTION.read_text(), keys=keys, seed=seed, outputs=[3])
    assert not result.reports, result
    assert error < 1e-5
    assert result.counters.matrix_multiply_accumulates == 512 * -(-keys // 32)


def mutate(pattern, replacement, count=1, skip=0):
    text = ATTENTION.read_text()
    matches = list(re.finditer(pattern, text))
    assert matches
    m = matches[skip]
    return text[: m.start()] + m.expand(replacement) + text[m.end() :]


MUTATIONS = {
    "first barrier": (r"threadgroup_barrier\(mem_flags::mem_threadgroup\);", "", 0, R.RACE),
    "second barrier": (r"threadgroup_barrier\(mem_flags::mem_threadgroup\);", "", 1, R.RACE),
    "one row too many": (r"if \(first \+ row < keys\)", "if (first + row <= keys)", 0, R.OUT_OF_BOUNDS),
    "output row": (r"out \+ first_row \* kHead", "out + (first_row + 1) * kHead", 0, R.OUT_OF_BOUNDS),
    "divergent shuffle": (
        r"new_max = max\(new_max, simd_shuffle_xor\(new_max, 8\)\);",
        "if (lane < 16) new_max = max(new_max, simd_shuffle_xor(new_max, 8));",
        0,
        R.DIVERGENT_SIMDGROUP,
    ),
    "unset accumulator": (
        r"sum\[d\] = make_filled_simdgroup_matrix<float, 8>\(0.0f\);",
        "",
        0,
        R.UNINITIALISED_PRIVATE,
    ),
    "short tile": (r"v_tile\[kColumns \* kHead\]", "v_tile[kColumns * kHead - kHead]", 0, R.OUT_OF_BOUNDS),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_of_attention_is_found(name):
    pattern, replacement, skip, kind = MUTATIONS[name]
    keys = 63 if name == "one row too many" else 64
    result, _ = attend(mutate(pattern, replacement, skip=skip), keys=keys)
    assert result.of(kind), result
    assert any(r.line for r in result.of(kind))


def test_fast_mode_and_several_host_threads_agree():
    text = ATTENTION.read_text()
    for options in ({"checked": False}, {"checked": False, "host_threads": 3}, {"host_threads": 3}):
        result, error = attend(text, queries=128, **options)
        assert error < 1e-5 and not result.reports
