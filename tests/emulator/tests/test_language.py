"""One program per feature of the language, with the numbers that the Metal Shading Language Specification gives."""

import ctypes

import emulator
import ml_dtypes
import numpy as np
import pytest

HEADER = "#include <metal_stdlib>\nusing namespace metal;\n"


def run(
    body, *, out=np.float32, n=32, parameters="", buffers=(), threadgroup=None, prelude="", constants=None, **options
):
    """Runs `body` for n threads; out[] has n elements. Fails on any report."""
    names = {
        np.float32: "float",
        np.float16: "half",
        np.uint32: "uint",
        np.int32: "int",
        np.uint64: "ulong",
        np.uint16: "ushort",
        np.uint8: "uchar",
        np.int8: "char",
        np.int16: "short",
    }
    source = (
        HEADER
        + prelude
        + f"""
kernel void f(device {names[out]} *out [[buffer(0)]], uint i [[thread_position_in_grid]],
  uint l [[thread_index_in_threadgroup]],
              uint lane [[thread_index_in_simdgroup]],
  uint sg [[simdgroup_index_in_threadgroup]]{parameters}) {{ {body} }}"""
    )
    result = np.zeros(n, out)
    kernel = emulator.compile(source, file_name="feature.metal").kernel(
        "f", constants, **({"simd_width": options.pop("simd_width")} if "simd_width" in options else {})
    )
    outcome = kernel({0: result, **dict(buffers)}, threads=n, threadgroup=threadgroup or n, outputs=[0], **options)
    assert not outcome.reports, outcome
    return result


def one(expression, out=np.float32, prelude=""):
    return run(f"out[i] = {expression};", out=out, n=1, prelude=prelude)[0]


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("float4(1, 2, 3, 4).wzyx.x", 4),
        ("float4(float2(1, 2), 3, 4).zw.y", 4),
        ("float3(7).rgb.g", 7),
        ("dot(float3(1, 2, 3), float3(4, 5, 6))", 32),
        ("cross(float3(1, 0, 0), float3(0, 1, 0)).z", 1),
        ("length(float2(3, 4))", 5),
        ("normalize(float2(3, 4)).y", np.float32(0.8)),
        ("distance(float2(1, 1), float2(4, 5))", 5),
        ("clamp(5.0, 0.0, 1.0)", 1),
        ("mix(2.0, 4.0, 0.25)", 2.5),
        ("step(1.0, 0.5)", 0),
        ("smoothstep(0.0, 1.0, 0.5)", 0.5),
        ("saturate(-3.0)", 0),
        ("sign(-2.0)", -1),
        ("fract(-0.25)", 0.75),
        ("trunc(-1.5)", -1),
        ("rint(2.5)", 2),
        ("round(2.5)", 3),
        ("ceil(1.25)", 2),
        ("fmod(5.5, 2.0)", 1.5),
        ("copysign(2.0, -1.0)", -2),
        ("max3(1.0, 3.0, 2.0)", 3),
        ("median3(1.0, 3.0, 2.0)", 2),
        ("rsqrt(4.0)", 0.5),
        ("exp2(3.0)", 8),
        ("exp10(2.0)", 100),
        ("log2(8.0)", 3),
        ("fma(2.0, 3.0, 4.0)", 10),
        ("pow(2.0, 10.0)", 1024),
        ("powr(2.0, 3.0)", 8),
        ("fast::exp2(4.0)", 16),
        ("precise::sqrt(9.0)", 3),
        ("fmin(NAN, 1.0)", 1),
        ("fmax(1.0, NAN)", 1),
        ("float(isnan(NAN))", 1),
        ("float(isinf(-INFINITY))", 1),
        ("select(1.0, 2.0, true)", 2),
        ("float(all(bool2(true, false)))", 0),
        ("float(any(bool2(true, false)))", 1),
        ("ldexp(0.5, 3)", 4),
        ("sinpi(0.5)", 1),
        ("as_type<float>(0x40490fdbu)", np.float32(np.pi)),
        ("M_PI_F", np.float32(np.pi)),
        ("(float2x2(1, 2, 3, 4) * float2(1, 1)).x", 4),
        ("determinant(float2x2(1, 2, 3, 4))", -2),
        ("transpose(float2x2(1, 2, 3, 4))[0][1]", 3),
        ("float(half(65504.0h))", 65504),
        ("(1 < 2 ? float2(1, 2) : float2(3, 4)).y", 2),
        ("float((float2(1, 2) < float2(2, 1)).x)", 1),
        ("numeric_limits<half>::max()", 65504),
        ("unpack_unorm4x8_to_float(0x000000ffu).x", 1),
        ("unpack_snorm2x16_to_float(0x00007fffu).x", 1),
        ("float(sizeof(float3) + sizeof(packed_float3))", 28),
        ("reflect(float2(1, -1), float2(0, 1)).y", 1),
        ("fdim(4.0, 1.0)", 3),
        ("atan2(0.0, 1.0)", 0),
        ("float(ilogb(8.0))", 3),
        ("length_squared(float2(3, 4))", 25),
        ("float2(3.0).y", 3),
        ("float4(half4(1, 2, 3, 4)).w", 4),
    ],
)
def test_float_functions(expression, expected):
    assert one(expression) == expected


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("popcount(0xf0u)", 4),
        ("clz(1u)", 31),
        ("ctz(8u)", 3),
        ("reverse_bits(1u)", 0x80000000),
        ("rotate(0x80000001u, 1u)", 3),
        ("mulhi(0x80000000u, 4u)", 2),
        ("mul24(3u, 5u)", 15),
        ("mad24(3u, 5u, 1u)", 16),
        ("addsat(0xfffffff0u, 0x20u)", 0xFFFFFFFF),
        ("subsat(1u, 2u)", 0),
        ("hadd(3u, 4u)", 3),
        ("rhadd(3u, 4u)", 4),
        ("absdiff(-3, 4)", 7),
        ("extract_bits(0xabcdu, 4, 8)", 0xBC),
        ("insert_bits(0u, 0xfu, 4, 4)", 0xF0),
        ("min(3, -4) + 10", 6),
        ("uint(as_type<ushort>(half(1.0)))", 0x3C00),
        ("as_type<uint>(half2(1.0, 2.0))", 0x40003C00),
        ("uint(uchar4(1, 2, 3, 255).w)", 255),
        ("pack_float_to_unorm4x8(float4(1, 0, 0, 1))", 0xFF0000FF),
        ("pack_half_to_snorm2x16(half2(1, -1))", 0x80017FFF),
        ("uint(char(-1) < 0)", 1),
        ("uint(long(1) << 33 >> 32)", 2),
        ("uint(sizeof(bool4) + sizeof(half4) + sizeof(ushort3))", 20),
        ("uint(max(short(3), short(4)))", 4),
        ("(uint4(1, 2, 3, 4) << 2).w", 16),
        ("uint(is_same<half, half>::value)", 1),
        ("uint(is_integral<float>::value)", 0),
        ("uint(numeric_limits<ushort>::max())", 65535),
        ("uint(clamp(300, 0, 255))", 255),
        ("uint(5.99f)", 5),
    ],
)
def test_integer_functions(expression, expected):
    assert one(expression, np.uint32) == expected


def test_double_literals_are_floats():
    assert one("float(sizeof(1.0))") == 4
    assert one("0.1 + 0.2") == np.float32(0.1) + np.float32(0.2)


def test_half_rounds_at_every_operation():
    values = np.random.default_rng(1).standard_normal((3, 256)).astype(np.float16)
    got = run(
        "out[i] = a[i] * b[i] + c[i];",
        out=np.float16,
        n=256,
        parameters=(
            ", device const half *a [[buffer(1)]], device const half *b [[buffer(2)]], "
            "device const half *c [[buffer(3)]]"
        ),
        buffers=enumerate(values, 1),
        prelude="#pragma METAL fp contract(off)\n",
    )
    np.testing.assert_array_equal(got, (values[0] * values[1]).astype(np.float16) + values[2])
    assert one("2048.0h + 1.0h", np.float16) == 2048


def test_bfloat_rounds_to_nearest_even():
    values = np.random.default_rng(2).standard_normal(256).astype(np.float32)
    got = run(
        "bfloat x = bfloat(a[i]); out[i] = as_type<ushort>(x * x + x);",
        out=np.uint16,
        n=256,
        parameters=", device const float *a [[buffer(1)]]",
        buffers={1: values},
    )
    x = values.astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(got.view(ml_dtypes.bfloat16), (x * x).astype(ml_dtypes.bfloat16) + x)


def test_vectors_assign_through_swizzles_in_every_address_space():
    got = run(
        """threadgroup float4 t[1]; if (i == 0) { t[0] = 0; t[0].yz = float2(5, 6);
  device float4 *d = (device float4 *)out; d[0] = t[0]; d[0].x += 1; d[0].w = d[0].z; }
                 if (i > 3) out[i] = i;""",
        n=8,
    )
    np.testing.assert_array_equal(got, [1, 5, 6, 6, 4, 5, 6, 7])


def test_function_constants():
    prelude = """constant float scale [[function_constant(0)]]; constant bool on [[function_constant(1)]];
  constant uint2 pair [[function_constant(2)]];
constant float derived = is_function_constant_defined(scale) ? scale * 2 : 7;\n"""
    body = (
        "out[i] = (is_function_constant_defined(on) && on ? 100 : 0) + derived + "
        "(is_function_constant_defined(pair) ? pair.y : 0);"
    )
    assert run(body, prelude=prelude, n=1)[0] == 7
    assert (
        run(body, prelude=prelude, n=1, constants={"scale": 1.5, 1: True, "pair": np.array([3, 4], np.uint32)})[0]
        == 107
    )


def test_a_missing_function_constant_fails_only_where_it_is_read():
    source = HEADER + (
        "constant int a [[function_constant(3)]]; kernel void f(device int *o [[buffer(0)]]) { o[0] = a; "
        "} kernel void g(device int *o [[buffer(0)]]) { o[0] = 1; }"
    )
    library = emulator.compile(source)
    with pytest.raises(emulator.PipelineError, match=r"'a' .index 3."):
        library.kernel("f")
    library.kernel("g")


def test_arguments_under_a_function_constant():
    source = (
        HEADER
        + """constant bool has [[function_constant(0)]];
kernel void f(device float *o [[buffer(0)]], device const float *x [[buffer(1),
  function_constant(has)]]) { o[0] = has ? x[0] : 9; }"""
    )
    library = emulator.compile(source)
    for has, expected in [(False, 9), (True, 4)]:
        out = np.zeros(1, np.float32)
        kernel = library.kernel("f", {"has": has})
        assert [a.is_active for a in kernel.arguments] == [True, has]
        result = kernel([out, np.array([4], np.float32) if has else None], threads=1)
        assert not result.reports and out[0] == expected


def test_templates_get_host_names():
    source = (
        HEADER
        + """template <typename T, int n> kernel void add(device T *o [[buffer(0)]],
  uint i [[thread_position_in_grid]]) { o[i] += T(n); }
template [[host_name("add_f")]] kernel void add<float, 2>(device float *, uint);
template [[host_name("add_i")]] [[kernel]] decltype(add<int, 3>) add<int, 3>;
typedef decltype(add<half, 4>) add_t;
template [[host_name("add_h")]] kernel add_t add<half, 4>;"""
    )
    library = emulator.compile(source)
    assert library.functions == ["add_f", "add_i", "add_h"]
    for name, dtype, expected in [("add_f", np.float32, 2), ("add_i", np.int32, 3), ("add_h", np.float16, 4)]:
        out = np.zeros(4, dtype)
        assert library.kernel(name)([out], threads=4).ok
        np.testing.assert_array_equal(out, np.full(4, expected, dtype))


def test_address_spaces_overload():
    prelude = """float which(device const float *) { return 1; } float which(threadgroup const float *) { return 2;
  } float which(thread const float *) { return 3; } float which(constant float *) { return 4; }
constant float table[2] = {1, 2};
struct N { float v; N(float x) thread : v(x) {} N(float x) threadgroup : v(x) {}
  operator float() const thread { return v; } operator float() const device { return v; } };\n"""
    assert (
        run(
            (
                "threadgroup float t[1]; float p = 0; N n(5); out[i] = which(out) * 1000 + which(t) * 100 + "
                "which(&p) * 10 + which(table) + float(n) * 10000;"
            ),
            prelude=prelude,
            n=1,
        )[0]
        == 51234
    )


def test_thread_attributes_in_a_grid_with_smaller_last_threadgroups():
    source = (
        HEADER
        + """kernel void f(device uint *o [[buffer(0)]], uint2 p [[thread_position_in_grid]],
  ushort2 l [[thread_position_in_threadgroup]], uint2 g [[threadgroup_position_in_grid]],
 uint2 n [[threads_per_grid]], ushort2 t [[threads_per_threadgroup]], uint2 gs [[threadgroups_per_grid]],
  uint2 d [[dispatch_threads_per_threadgroup]], uint x [[thread_index_in_threadgroup]],
 ushort w [[threads_per_simdgroup]], uint s [[simdgroups_per_threadgroup]]) {
  device uint *q = o + (p.y * n.x + p.x) * 8; q[0] = p.x; q[1] = l.x; q[2] = g.y; q[3] = t.x * 100 + t.y;
  q[4] = gs.x * 10 + gs.y; q[5] = d.x * 10 + d.y; q[6] = x; q[7] = w * 10 + s; }"""
    )
    out = np.zeros((3, 5, 8), np.uint32)
    result = emulator.compile(source).kernel()([out], threads=(5, 3), threadgroup=(4, 2), outputs=[0])
    assert not result.reports
    np.testing.assert_array_equal(out[2, 4], [4, 0, 1, 101, 22, 42, 0, 321])
    np.testing.assert_array_equal(out[1, 2], [2, 2, 0, 402, 22, 42, 6, 321])


def test_structures_and_set_bytes():
    class Shape(ctypes.Structure):
        _fields_ = [("n", ctypes.c_uint), ("scale", ctypes.c_float), ("v", ctypes.c_float * 4)]

    source = (
        HEADER
        + """struct Shape { uint n; float scale; packed_float4 v; };
  kernel void f(device float *o [[buffer(0)]], constant Shape &s [[buffer(1)]], constant uint &k [[buffer(2)]],
  uint i [[thread_position_in_grid]]) {
  Shape copy = s; o[i] = copy.scale * s.v[i] + k + s.v.w; }"""
    )
    out = np.zeros(3, np.float32)
    assert emulator.compile(source).kernel()([out, Shape(3, 2.0, (1, 2, 3, 4)), 10], threads=3).ok
    np.testing.assert_array_equal(out, [16, 18, 20])


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("simd_sum(float(lane))", lambda l: 496.0),
        ("simd_max(float(lane))", lambda l: 31.0),
        ("simd_min(int(lane) - 5)", lambda l: -5),
        ("simd_product(lane < 2 ? 3.0 : 1.0)", lambda l: 9.0),
        ("simd_shuffle(float(lane), 3)", lambda l: 3),
        ("simd_shuffle_xor(float(lane), 5)", lambda l: l ^ 5),
        ("simd_shuffle_up(float(lane), 2)", lambda l: l - 2 if l >= 2 else l),
        ("simd_shuffle_down(float(lane), 2)", lambda l: l + 2 if l < 30 else l),
        ("simd_shuffle_rotate_up(float(lane), 1)", lambda l: (l - 1) % 32),
        ("simd_shuffle_rotate_down(float(lane), 1)", lambda l: (l + 1) % 32),
        ("simd_shuffle_and_fill_up(float(lane), 100.0f + lane, 2)", lambda l: l - 2 if l >= 2 else 130 + l),
        ("simd_shuffle_and_fill_down(float(lane), 100.0f + lane, 2)", lambda l: l + 2 if l < 30 else 100 + l - 30),
        ("simd_broadcast(float(lane), 7)", lambda l: 7),
        ("simd_broadcast_first(float(lane) + 1)", lambda l: 1),
        ("simd_prefix_inclusive_sum(lane)", lambda l: l * (l + 1) // 2),
        ("simd_prefix_exclusive_sum(lane)", lambda l: l * (l - 1) // 2),
        ("simd_prefix_exclusive_product(lane < 3 ? 2.0 : 1.0)", lambda l: 2 ** min(l, 3)),
        ("float(simd_is_first())", lambda l: l == 0),
        ("float(simd_any(lane == 4))", lambda l: 1),
        ("float(simd_all(lane < 4))", lambda l: 0),
        ("popcount(uint(simd_vote::vote_t(simd_ballot(lane % 2 == 0))))", lambda l: 16),
        ("simd_or(1u << lane)", lambda l: 2.0**32),
        ("simd_xor(lane)", lambda l: 0),
        ("simd_and(lane | 4u)", lambda l: 4),
        ("quad_sum(float(lane))", lambda l: (l // 4 * 4) * 4 + 6),
        ("quad_broadcast(float(lane), 2)", lambda l: l // 4 * 4 + 2),
        ("quad_shuffle_xor(float(lane), 1)", lambda l: l ^ 1),
        ("simd_sum(float2(lane, 1)).y", lambda l: 32),
        ("float(simd_max(half(lane)))", lambda l: 31),
        ("popcount(uint(simd_vote::vote_t(simd_active_threads_mask())))", lambda l: 32),
    ],
)
def test_simdgroup_functions(expression, expected):
    got = run(f"out[i] = float({expression});")
    np.testing.assert_array_equal(got, np.array([expected(l) for l in range(32)], np.float32))


def test_simdgroups_of_64():
    got = run("out[i] = simd_sum(1.0f) + simd_shuffle_xor(float(lane), 32);", n=128, simd_width=64)
    np.testing.assert_array_equal(got, [64 + (l % 64 ^ 32) for l in range(128)])


def test_reductions_run_over_the_active_threads():
    source = HEADER + (
        "kernel void f(device float *o [[buffer(0)]], uint i [[thread_position_in_grid]]) { float s = 0; "
        "if (i % 2 == 0) s = simd_sum(1.0f); o[i] = s + simd_sum(100.0f); }"
    )
    out = np.zeros(32, np.float32)
    result = emulator.compile(source).kernel()([out], threads=32, threadgroup=32)
    assert result.ok and result.counters.divergences == 1
    np.testing.assert_array_equal(out, np.tile([3216, 3200], 16))


def test_atomics():
    source = (
        HEADER
        + """kernel void f(device atomic_uint *a [[buffer(0)]], device atomic<float> *b [[buffer(1)]],
  device atomic_int *c [[buffer(2)]], device uint *o [[buffer(3)]], uint i [[thread_position_in_grid]],
  uint l [[thread_index_in_threadgroup]]) {
  threadgroup atomic_int t[1]; if (l == 0) atomic_store_explicit(&t[0], 0, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  atomic_fetch_add_explicit(&t[0], 1, memory_order_relaxed); atomic_fetch_add_explicit(a, 2u, memory_order_relaxed);
  atomic_fetch_add_explicit(b, 0.5f, memory_order_relaxed);
  atomic_fetch_max_explicit(c, int(i), memory_order_relaxed);
  uint expected = 0; while (!atomic_compare_exchange_weak_explicit(a + 1, &expected, expected + i,
  memory_order_relaxed, memory_order_relaxed)) {}
  threadgroup_barrier(mem_flags::mem_threadgroup); if (l == 0) o[i / 64] = atomic_load_explicit(&t[0],
  memory_order_relaxed); }"""
    )
    a, b, c, o = np.zeros(2, np.uint32), np.zeros(1, np.float32), np.zeros(1, np.int32), np.zeros(4, np.uint32)
    result = emulator.compile(source).kernel()([a, b, c, o], threads=256, threadgroup=64, host_threads=2)
    assert not result.reports
    assert (a[0], a[1], b[0], c[0], list(o)) == (512, 255 * 128, 128, 255, [64] * 4)


def test_dynamic_threadgroup_memory():
    source = (
        HEADER
        + """kernel void f(device float *o [[buffer(0)]], threadgroup float *a [[threadgroup(0)]],
  threadgroup half4 *b [[threadgroup(1)]], uint l [[thread_index_in_threadgroup]]) {
  a[l] = l; b[l] = half4(l); threadgroup_barrier(mem_flags::mem_threadgroup); o[l] = a[31 - l] + b[l].w; }"""
    )
    out = np.zeros(32, np.float32)
    assert (
        not emulator.compile(source)
        .kernel()([out], threads=32, threadgroup=32, threadgroup_memory={0: 128, 1: 256})
        .reports
    )
    np.testing.assert_array_equal(out, np.full(32, 31))


MATRIX = {"float": np.float32, "half": np.float16, "bfloat": ml_dtypes.bfloat16}


def bits(a):
    return a.view(np.uint16) if a.dtype == ml_dtypes.bfloat16 else a


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("space", ["device", "threadgroup"])
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("t", MATRIX)
def test_matrix_load_and_store(t, transpose, space, checked):
    source = (
        HEADER
        + f"""kernel void f(device {t} *o [[buffer(0)]], device {t}
  *x [[buffer(1)]], uint lane [[thread_index_in_simdgroup]]) {{ threadgroup {t} s[24 * 24];
  for (uint k = lane; k < 24 * 24; k += 32) s[k] = x[k]; threadgroup_barrier(mem_flags::mem_threadgroup);
  simdgroup_matrix<{t}, 8, 8> m; simdgroup_load(m, {"x" if space == "device" else "s"}, 24, ulong2(8, 16),
  {str(transpose).lower()}); simdgroup_store(m, o, 8);
  thread auto &e = m.thread_elements(); o[64 + lane * 2] = e[0]; o[64 + lane * 2 + 1] = e[1]; }}"""
    )
    x = np.arange(576).reshape(24, 24).astype(MATRIX[t])
    out = np.zeros(128, MATRIX[t])
    kernel = emulator.compile(source).kernel(checked=checked)
    result = kernel([bits(out), bits(x)], threads=32, threadgroup=32, checked=checked)
    assert not result.reports, result
    block = x[8:16, 16:24].T if transpose else x[16:24, 8:16]
    np.testing.assert_array_equal(out[:64].reshape(8, 8), block)
    for lane in range(32):  # Apple's lane map
        row, column = (lane >> 4) * 4 + (lane >> 1 & 3), (lane >> 3 & 1) * 4 + (lane & 1) * 2
        np.testing.assert_array_equal(out[64 + 2 * lane : 66 + 2 * lane], block[row, column : column + 2])


@pytest.mark.parametrize(
    ("a", "b", "d"),
    [
        ("float", "float", "float"),
        ("half", "half", "float"),
        ("half", "float", "float"),
        ("half", "half", "half"),
        ("bfloat", "bfloat", "float"),
        ("bfloat", "bfloat", "bfloat"),
    ],
)
def test_matrix_products_accumulate_in_float_and_round_once(a, b, d):
    source = (
        HEADER
        + f"""kernel void f(device {d} *o [[buffer(0)]], device const {a} *x [[buffer(1)]], device const {b}
  *y [[buffer(2)]], device const {d} *z [[buffer(3)]]) {{
  simdgroup_matrix<{a}, 8, 8> ma; simdgroup_matrix<{b}, 8, 8> mb; simdgroup_matrix<{d}, 8, 8> mc, md;
  simdgroup_load(ma, x); simdgroup_load(mb, y); simdgroup_load(mc, z); simdgroup_multiply_accumulate(md, ma, mb, mc);
  simdgroup_store(md, o);
  simdgroup_multiply(md, ma, mb); simdgroup_store(md, o + 64); }}"""
    )
    rng = np.random.default_rng(3)
    x, y, z = (rng.standard_normal((8, 8)).astype(MATRIX[t]) for t in (a, b, d))
    out = np.zeros((2, 8, 8), MATRIX[d])
    result = emulator.compile(source).kernel()([bits(out), bits(x), bits(y), bits(z)], threads=32, threadgroup=32)
    assert not result.reports and result.counters.matrix_multiply_accumulates == 2
    exact = x.astype(np.float64) @ y.astype(np.float64)
    for got, expected in zip(out, [exact + z.astype(np.float64), exact], strict=True):
        # float: eight roundings of sums below 64; narrower types: half an ulp of the result on top
        bound = 8 * 2.0**-24 * 64 + {"float": 0, "half": 2.0**-11, "bfloat": 2.0**-8}[d] * np.abs(expected)
        assert np.all(np.abs(got.astype(np.float64) - expected) <= bound)


def test_matrix_storage_and_builtin_as_some_kernels_use_them():
    source = (
        HEADER
        + """#pragma METAL internals : enable
namespace metal { template <typename T> struct my_storage { typedef vec<T, 64> storage_type; storage_type t;
  METAL_FUNC my_storage() thread = default;
  METAL_FUNC thread vec<T, 2> *elements() thread { return reinterpret_cast<thread vec<T, 2> *>(&t); }
  template <typename U> METAL_FUNC void multiply(my_storage<U> a,
  my_storage<U> b) { t = __metal_simdgroup_matrix_8x8_multiply_accumulate(a.t, b.t, t, storage_type()); } }; }
kernel void f(device float *o [[buffer(0)]], uint lane [[thread_index_in_simdgroup]]) { my_storage<float> a, b, c;
  *a.elements() = float2(1); *b.elements() = float2(2); *c.elements() = float2(3);
  c.multiply(a, b); o[lane * 2] = (*c.elements()).x; o[lane * 2 + 1] = c.elements()[0][1]; }"""
    )
    out = np.zeros(64, np.float32)
    assert not emulator.compile(source).kernel()([out], threads=32, threadgroup=32).reports
    np.testing.assert_array_equal(out, np.full(64, 19))


def test_lambdas_arrays_pragmas_and_unroll():
    got = run(
        """auto add = [&](float x) { return x + i; }; array<float, 4> a; a[0] = 1; a[1] = add(2); float s = 0;
    _Pragma("clang loop unroll(full)") for (int k = 0; k < 2; k++) s += a[k];
    #pragma unroll
    for (int k = 0; k < 2; k++) { s += k; } out[i] = s;""",
        n=4,
        prelude="#define UNUSED 1\n",
    )
    np.testing.assert_array_equal(got, [4, 5, 6, 7])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("double x = 1;", "'double' is not supported in Metal"),
        ("float *p = out;", "pointer type must have explicit address space qualifier"),
        ("uint u = 1; int v = 2; out[0] = min(u, v);", "ambiguous"),
        ("bfloat b = 1.5f; out[0] = 0;", "no viable conversion"),
        ("threadgroup_barier(mem_flags::mem_none);", "not in the emulator"),
        ("out[0] = simd_sum(2.0f) + made_up(3.0f);", "not in the emulator"),
        ("float2 a = float2(1); int2 b = a;", "no viable conversion"),
        ("simdgroup_event e;", "simdgroup_event"),
        ("std::abs(1);", "std"),
        ("out[0] = 1.0f", "expected ';'"),
        ("device float *p = new float;", "'new' is not supported"),
        ("float4 v = float4(1); out[0] = v.q;", "no member named 'q'"),
        ("long x = simd_sum(long(1));", "no matching function"),
        ("int fragment = 3;", "'fragment' is a keyword"),
        ("struct S { float vertex(int i) { return i; } };", "'vertex' is a keyword"),
        ("struct S { float x; } s; out[0] = s.fragment;", "'fragment' is a keyword"),
    ],
)
def test_bad_sources_fail_with_their_line(body, message):
    source = HEADER + "kernel void f(device float *out [[buffer(0)]]) {\n  " + body + "\n}\n"
    with pytest.raises(emulator.CompileError) as failure:
        emulator.compile(source, file_name="bad.metal")
    assert message in str(failure.value)
    assert "bad.metal:4" in str(failure.value) or "bad.metal:5" in str(failure.value)


def test_bfloat_needs_metal_3_1():
    with pytest.raises(emulator.CompileError, match=r"needs Metal 3\.1"):
        emulator.compile(HEADER + "kernel void f(device bfloat *o [[buffer(0)]]) { }", language_version=(3, 0))


def test_parameters_need_attributes():
    with pytest.raises(emulator.CompileError, match="no attribute"):
        emulator.compile(HEADER + "kernel void f(device float *o [[buffer(0)]], uint i) { o[0] = i; }")


@pytest.mark.parametrize(
    ("line", "finding"),
    [
        ("thread float *p = o;", True),
        ("thread float &r = o[1];", True),
        ("take(s[1]);", True),
        ("thread float *p = (thread float *)o;", True),
        ("S c = s[1]; take(c); float4 v = s[0].v; o[0] = v.x;", False),
        ("device float *p = o + 1; auto &r = p[0]; r = k.a;", False),
    ],
)
def test_strict_check_finds_mixed_address_spaces(line, finding):
    source = (
        HEADER
        + (
            "struct S { float a; float4 v; }; void take(const thread S &s) {}\nkernel void f(device float *o "
            "[[buffer(0)]], device S *s [[buffer(1)]], constant S &k [[buffer(2)]]) {\n"
        )
        + line
        + "\n}"
    )
    found = emulator.strict_check(source, file_name="strict.metal")
    assert ("strict.metal:5: error" in found) if finding else found == ""


@pytest.mark.parametrize(
    "functions, call, finding",
    [
        ("int f(int n) { return n < 2 ? 1 : n * f(n - 1); }", "f(i)", "2: error: 'f' calls itself; Metal"),
        (
            "int g(int);\nint f(int n) { return g(n); }\nint g(int n) { return n ? f(n - 1) : 0; }",
            "f(i)",
            "through 'f'",
        ),
        ("template <typename T> T f(T n) { return n ? f(n - 1) : T(0); }", "f(int(i))", "2: error: 'f' calls itself;"),
        ("struct S { int f(int n) thread { return n ? f(n - 1) : 0; } };", "S().f(i)", "2: error: 'f' calls itself;"),
        ("int f(int n) { return n; }\nint f(float x) { return f(int(x)); }", "f(float(i))", ""),
        ("template <int N> int f() { if constexpr (N > 0) return 1 + f<N - 1>(); else return 0; }", "f<3>()", ""),
        ("constexpr int f(int n) { return n < 2 ? 0 : 1 + f(n / 2); }", "f(8)", ""),
    ],
)
def test_strict_check_finds_recursion(functions, call, finding):
    source = (
        f"#include <metal_stdlib>\n{functions}\n"
        f"kernel void k(device int *o [[buffer(0)]], uint i [[thread_position_in_grid]]) {{ o[i] = {call}; }}"
    )
    found = emulator.strict_check(source, file_name="strict.metal")
    assert (finding in found and "no recursion" in found) if finding else found == ""
