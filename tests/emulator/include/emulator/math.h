// The shim's second layer: math, common, relational, integer, geometric and pack functions. Knows no threads.
//
// Scalars get one plain overload per MSL type, so that min(int, uint) stays ambiguous as it is on Metal;
// vectors go component by component. To add a function: one EMU_MATH* line below, and a test with its value.
#pragma once
#include "types.h"

extern "C" void emu_count_exponentials(uint n) noexcept;

namespace metal {

// Scalar implementations live beneath emu_impl, once for float; half computes in float and rounds once.
namespace emu_impl {
#define EMU_LIBM1(name) EMU_INLINE float name(float x) { return __builtin_##name##f(x); }
#define EMU_LIBM2(name) EMU_INLINE float name(float x, float y) { return __builtin_##name##f(x, y); }
EMU_LIBM1(acos) EMU_LIBM1(acosh) EMU_LIBM1(asin) EMU_LIBM1(asinh) EMU_LIBM1(atan) EMU_LIBM1(atanh) EMU_LIBM1(ceil)
EMU_LIBM1(cos) EMU_LIBM1(cosh) EMU_LIBM1(fabs) EMU_LIBM1(floor) EMU_LIBM1(log) EMU_LIBM1(log10) EMU_LIBM1(log2)
EMU_LIBM1(rint) EMU_LIBM1(round) EMU_LIBM1(sin) EMU_LIBM1(sinh) EMU_LIBM1(sqrt) EMU_LIBM1(tan) EMU_LIBM1(tanh) EMU_LIBM1(trunc)
EMU_LIBM2(atan2) EMU_LIBM2(copysign) EMU_LIBM2(fdim) EMU_LIBM2(fmod) EMU_LIBM2(nextafter) EMU_LIBM2(pow)
EMU_INLINE float fmax(float x, float y) { return x != x ? y : (y != y ? x : (x > y ? x : y)); }
EMU_INLINE float fmin(float x, float y) { return x != x ? y : (y != y ? x : (x < y ? x : y)); }
EMU_INLINE float exp(float x) { emu_count_exponentials(1); return __builtin_expf(x); }
EMU_INLINE float exp2(float x) { emu_count_exponentials(1); return __builtin_exp2f(x); }
EMU_INLINE float exp10(float x) { emu_count_exponentials(1); return (float)__builtin_pow(10.0, (double)x); }
EMU_INLINE float rsqrt(float x) { return (float)(1.0 / __builtin_sqrt((double)x)); }
EMU_INLINE float abs(float x) { return __builtin_fabsf(x); }
EMU_INLINE float fract(float x) {
  float f = x - __builtin_floorf(x);
  return x != x ? x : fmin(f, 0x1.fffffep-1f);
}
EMU_INLINE float sinpi(float x) { return (float)__builtin_sin(3.14159265358979323846 * (double)x); }
EMU_INLINE float cospi(float x) { return (float)__builtin_cos(3.14159265358979323846 * (double)x); }
EMU_INLINE float tanpi(float x) { return (float)__builtin_tan(3.14159265358979323846 * (double)x); }
EMU_INLINE float saturate(float x) { return fmin(fmax(x, 0.0f), 1.0f); }
EMU_INLINE float sign(float x) { return x > 0 ? 1.0f : x < 0 ? -1.0f : x == 0 ? x : 0.0f; }
EMU_INLINE float logb(float x) { return __builtin_logbf(x); }
EMU_INLINE float powr(float x, float y) { return x < 0 ? __builtin_nanf("") : __builtin_powf(x, y); }
EMU_INLINE float divide(float x, float y) { return x / y; }
EMU_INLINE float step(float edge, float x) { return x < edge ? 0.0f : 1.0f; }
EMU_INLINE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
EMU_INLINE float mix(float x, float y, float a) { return x + (y - x) * a; }
EMU_INLINE float smoothstep(float lo, float hi, float x) {
  float t = saturate((x - lo) / (hi - lo));
  return t * t * (3.0f - 2.0f * t);
}
}  // namespace emu_impl

// bfloat versions are templates: production code adds plain overloads of its own, which then win.
#define EMU_SCALAR1(name)                                                              \
  EMU_INLINE float name(float x) { return emu_impl::name(x); }                         \
  EMU_INLINE half name(half x) { return (half)emu_impl::name((float)x); }              \
  template <class B> EMU_INLINE emu_if_bfloat<B> name(B x) { return B(emu_impl::name((float)x)); }
#define EMU_SCALAR2(name)                                                                               \
  EMU_INLINE float name(float x, float y) { return emu_impl::name(x, y); }                              \
  EMU_INLINE half name(half x, half y) { return (half)emu_impl::name((float)x, (float)y); }             \
  template <class B> EMU_INLINE emu_if_bfloat<B> name(B x, B y) { return B(emu_impl::name((float)x, (float)y)); }
#define EMU_SCALAR3(name)                                                                                              \
  EMU_INLINE float name(float x, float y, float z) { return emu_impl::name(x, y, z); }                                  \
  EMU_INLINE half name(half x, half y, half z) { return (half)emu_impl::name((float)x, (float)y, (float)z); }           \
  template <class B> EMU_INLINE emu_if_bfloat<B> name(B x, B y, B z) { return B(emu_impl::name((float)x, (float)y, (float)z)); }
#define EMU_TRANSCENDENTAL(X1, X2, X3)                                                                                \
  X1(acos) X1(acosh) X1(asin) X1(asinh) X1(atan) X1(atanh) X1(ceil) X1(cos) X1(cosh) X1(cospi) X1(exp) X1(exp10)      \
  X1(exp2) X1(fabs) X1(floor) X1(fract) X1(log) X1(log10) X1(log2) X1(rint) X1(round) X1(rsqrt) X1(sin) X1(sinh)      \
  X1(sinpi) X1(sqrt) X1(tan) X1(tanh) X1(tanpi) X1(trunc) X2(atan2) X2(copysign) X2(fdim) X2(fmax) X2(fmin) X2(fmod)  \
  X2(pow) X2(powr) X3(fma) X1(saturate) X1(sign) X3(mix) X3(smoothstep) X2(step) X2(divide) X2(nextafter)

#define EMU_V1(name) template <class T, int N> EMU_INLINE vec<T, N> name(vec<T, N> a) {                                 \
    if constexpr (N == 2) return vec<T, N>(name(a.x), name(a.y));                                                       \
    else if constexpr (N == 3) return vec<T, N>(name(a.x), name(a.y), name(a.z));                                       \
    else return vec<T, N>(name(a.x), name(a.y), name(a.z), name(a.w)); }
#define EMU_V2(name) template <class T, int N> EMU_INLINE vec<T, N> name(vec<T, N> a, vec<T, N> b) {                     \
    if constexpr (N == 2) return vec<T, N>(name(a.x, b.x), name(a.y, b.y));                                             \
    else if constexpr (N == 3) return vec<T, N>(name(a.x, b.x), name(a.y, b.y), name(a.z, b.z));                        \
    else return vec<T, N>(name(a.x, b.x), name(a.y, b.y), name(a.z, b.z), name(a.w, b.w)); }                            \
  template <class T, int N, class S, class = emu_if_scalar<S>> EMU_INLINE vec<T, N> name(vec<T, N> a, S b) { return name(a, vec<T, N>(b)); } \
  template <class T, int N, class S, class = emu_if_scalar<S>> EMU_INLINE vec<T, N> name(S a, vec<T, N> b) { return name(vec<T, N>(a), b); }
#define EMU_V3(name) template <class T, int N> EMU_INLINE vec<T, N> name(vec<T, N> a, vec<T, N> b, vec<T, N> c) {        \
    if constexpr (N == 2) return vec<T, N>(name(a.x, b.x, c.x), name(a.y, b.y, c.y));                                   \
    else if constexpr (N == 3) return vec<T, N>(name(a.x, b.x, c.x), name(a.y, b.y, c.y), name(a.z, b.z, c.z));         \
    else return vec<T, N>(name(a.x, b.x, c.x), name(a.y, b.y, c.y), name(a.z, b.z, c.z), name(a.w, b.w, c.w)); }        \
  template <class T, int N, class S, class = emu_if_scalar<S>> EMU_INLINE vec<T, N> name(vec<T, N> a, vec<T, N> b, S c) { return name(a, b, vec<T, N>(c)); } \
  template <class T, int N, class S, class = emu_if_scalar<S>> EMU_INLINE vec<T, N> name(vec<T, N> a, S b, vec<T, N> c) { return name(a, vec<T, N>(b), c); } \
  template <class T, int N, class S, class = emu_if_scalar<S>> EMU_INLINE vec<T, N> name(S a, vec<T, N> b, vec<T, N> c) { return name(vec<T, N>(a), b, c); } \
  template <class T, int N, class R, class S, class = emu_if_scalar<R>, class = emu_if_scalar<S>> EMU_INLINE vec<T, N> name(vec<T, N> a, R b, S c) { return name(a, vec<T, N>(b), vec<T, N>(c)); } \
  template <class T, int N, class R, class S, class = emu_if_scalar<R>, class = emu_if_scalar<S>> EMU_INLINE vec<T, N> name(R a, S b, vec<T, N> c) { return name(vec<T, N>(a), vec<T, N>(b), c); } \
  template <class T, int N, class R, class S, class = emu_if_scalar<R>, class = emu_if_scalar<S>> EMU_INLINE vec<T, N> name(R a, vec<T, N> b, S c) { return name(vec<T, N>(a), b, vec<T, N>(c)); }

EMU_TRANSCENDENTAL(EMU_SCALAR1, EMU_SCALAR2, EMU_SCALAR3)

// ---- integer and common functions, one plain overload per type ------------------------------------------------------

#define EMU_INTEGERS(X) X(char) X(uchar) X(short) X(ushort) X(int) X(uint) X(long) X(ulong)
#define EMU_MINMAX(T)                                                                        \
  EMU_INLINE constexpr T min(T x, T y) { return y < x ? y : x; }                             \
  EMU_INLINE constexpr T max(T x, T y) { return x < y ? y : x; }                             \
  EMU_INLINE constexpr T min3(T x, T y, T z) { return min(x, min(y, z)); }                   \
  EMU_INLINE constexpr T max3(T x, T y, T z) { return max(x, max(y, z)); }                   \
  EMU_INLINE constexpr T median3(T x, T y, T z) { return max(min(x, y), min(max(x, y), z)); } \
  EMU_INLINE constexpr T clamp(T x, T lo, T hi) { return min(max(x, lo), hi); }
EMU_INTEGERS(EMU_MINMAX)
#define EMU_FLOAT_MINMAX(T)                                                                  \
  EMU_INLINE T min(T x, T y) { return fmin(x, y); }                                          \
  EMU_INLINE T max(T x, T y) { return fmax(x, y); }                                          \
  EMU_INLINE T min3(T x, T y, T z) { return fmin(x, fmin(y, z)); }                           \
  EMU_INLINE T max3(T x, T y, T z) { return fmax(x, fmax(y, z)); }                           \
  EMU_INLINE T median3(T x, T y, T z) { return fmax(fmin(x, y), fmin(fmax(x, y), z)); }      \
  EMU_INLINE T fmin3(T x, T y, T z) { return fmin(x, fmin(y, z)); }                          \
  EMU_INLINE T fmax3(T x, T y, T z) { return fmax(x, fmax(y, z)); }                          \
  EMU_INLINE T fmedian3(T x, T y, T z) { return fmax(fmin(x, y), fmin(fmax(x, y), z)); }     \
  EMU_INLINE T clamp(T x, T lo, T hi) { return fmin(fmax(x, lo), hi); }                      \
  EMU_INLINE T abs(T x) { return fabs(x); }
EMU_FLOAT_MINMAX(float) EMU_FLOAT_MINMAX(half)
template <class B> EMU_INLINE emu_if_bfloat<B> min(B x, B y) { return fmin(x, y); }
template <class B> EMU_INLINE emu_if_bfloat<B> max(B x, B y) { return fmax(x, y); }
template <class B> EMU_INLINE emu_if_bfloat<B> clamp(B x, B lo, B hi) { return fmin(fmax(x, lo), hi); }
template <class B> EMU_INLINE emu_if_bfloat<B> abs(B x) { return fabs(x); }
template <class B> EMU_INLINE emu_if_bfloat<B> min3(B x, B y, B z) { return fmin(x, fmin(y, z)); }
template <class B> EMU_INLINE emu_if_bfloat<B> max3(B x, B y, B z) { return fmax(x, fmax(y, z)); }
template <class B> EMU_INLINE emu_if_bfloat<B> median3(B x, B y, B z) { return fmax(fmin(x, y), fmin(fmax(x, y), z)); }

#define EMU_SIGNED_ABS(T, U)                                                                          \
  EMU_INLINE constexpr T abs(T x) { return x < 0 ? T(-x) : x; }                                        \
  EMU_INLINE constexpr U absdiff(T x, T y) { return x < y ? U(U(y) - U(x)) : U(U(x) - U(y)); }         \
  EMU_INLINE constexpr U abs(U x) { return x; }                                                        \
  EMU_INLINE constexpr U absdiff(U x, U y) { return x < y ? U(y - x) : U(x - y); }
EMU_SIGNED_ABS(char, uchar) EMU_SIGNED_ABS(short, ushort) EMU_SIGNED_ABS(int, uint) EMU_SIGNED_ABS(long, ulong)
#define EMU_BITS(T) sizeof(T) * 8
#define EMU_INTEGER_FNS(T)                                                                                           \
  EMU_INLINE constexpr T addsat(T x, T y) { T r{}; return __builtin_add_overflow(x, y, &r) ? (y < T(0) ? numeric_limits<T>::min() : numeric_limits<T>::max()) : r; } \
  EMU_INLINE constexpr T subsat(T x, T y) { T r{}; return __builtin_sub_overflow(x, y, &r) ? (is_signed<T>::value && y < T(0) ? numeric_limits<T>::max() : numeric_limits<T>::min()) : r; } \
  EMU_INLINE constexpr T hadd(T x, T y) { return T(((__int128)x + y) >> 1); }                                         \
  EMU_INLINE constexpr T rhadd(T x, T y) { return T(((__int128)x + y + 1) >> 1); }                                    \
  EMU_INLINE constexpr T mulhi(T x, T y) { return is_signed<T>::value ? T(((__int128)x * (__int128)y) >> (EMU_BITS(T))) : T(((unsigned __int128)x * (unsigned __int128)y) >> (EMU_BITS(T))); } \
  EMU_INLINE constexpr T madhi(T x, T y, T z) { return T(mulhi(x, y) + z); }                                           \
  EMU_INLINE constexpr T madsat(T x, T y, T z) {                                                                       \
    __int128 r = (__int128)x * y + z, lo = numeric_limits<T>::min(), hi = numeric_limits<T>::max();                    \
    return T(r < lo ? lo : r > hi ? hi : r);                                                                           \
  }                                                                                                                    \
  EMU_INLINE constexpr T clz(T x) { return x == 0 ? T(EMU_BITS(T)) : T(__builtin_clzl((ulong)(make_unsigned_t<T>)x) - (64 - EMU_BITS(T))); } \
  EMU_INLINE constexpr T ctz(T x) { return x == 0 ? T(EMU_BITS(T)) : T(__builtin_ctzl((ulong)(make_unsigned_t<T>)x)); }  \
  EMU_INLINE constexpr T popcount(T x) { return T(__builtin_popcountl((ulong)(make_unsigned_t<T>)x)); }                \
  EMU_INLINE constexpr T rotate(T x, T n) {                                                                            \
    using U = make_unsigned_t<T>;                                                                                      \
    uint k = (uint)n & (EMU_BITS(T) - 1);                                                                              \
    return k ? T(U(U(x) << k) | U(U(x) >> (EMU_BITS(T) - k))) : x;                                                     \
  }                                                                                                                    \
  EMU_INLINE constexpr T reverse_bits(T x) {                                                                           \
    using U = make_unsigned_t<T>;                                                                                      \
    U in = U(x), out = 0;                                                                                              \
    for (uint i = 0; i < EMU_BITS(T); i++) out = U(U(out << 1) | U((in >> i) & 1));                                    \
    return T(out);                                                                                                     \
  }                                                                                                                    \
  EMU_INLINE constexpr T extract_bits(T x, uint offset, uint bits) {                                                   \
    if (bits == 0) return T(0);                                                                                        \
    if (bits >= EMU_BITS(T)) return T(x >> offset);                                                                    \
    return T(T(make_unsigned_t<T>(x) << (EMU_BITS(T) - bits - offset)) >> (EMU_BITS(T) - bits));                       \
  }                                                                                                                    \
  EMU_INLINE constexpr T insert_bits(T base, T insert, uint offset, uint bits) {                                       \
    using U = make_unsigned_t<T>;                                                                                      \
    U mask = bits >= EMU_BITS(T) ? U(~0ull) : U(((U(1) << bits) - 1) << offset);                                        \
    return T((U(base) & ~mask) | (U(U(insert) << offset) & mask));                                                     \
  }
EMU_INTEGERS(EMU_INTEGER_FNS)
EMU_INLINE constexpr int mul24(int x, int y) { return ((x << 8) >> 8) * ((y << 8) >> 8); }
EMU_INLINE constexpr uint mul24(uint x, uint y) { return (x & 0xffffff) * (y & 0xffffff); }
EMU_INLINE constexpr int mad24(int x, int y, int z) { return mul24(x, y) + z; }
EMU_INLINE constexpr uint mad24(uint x, uint y, uint z) { return mul24(x, y) + z; }

EMU_TRANSCENDENTAL(EMU_V1, EMU_V2, EMU_V3)
EMU_V1(abs) EMU_V2(min) EMU_V2(max) EMU_V3(clamp) EMU_V3(min3) EMU_V3(max3) EMU_V3(median3)
EMU_V3(fmin3) EMU_V3(fmax3) EMU_V3(fmedian3)
EMU_V2(addsat) EMU_V2(subsat) EMU_V2(hadd) EMU_V2(rhadd) EMU_V2(mulhi) EMU_V3(madhi) EMU_V3(madsat) EMU_V1(clz) EMU_V1(ctz)
EMU_V1(popcount) EMU_V2(rotate) EMU_V1(reverse_bits) EMU_V2(mul24) EMU_V3(mad24)
template <class T, int N> EMU_INLINE vec<make_unsigned_t<T>, N> absdiff(vec<T, N> a, vec<T, N> b) {
#define EMU_F(c) absdiff(a.c, b.c)
  EMU_MAP(make_unsigned_t<T>, N, EMU_F);
#undef EMU_F
}
template <class T, int N> EMU_INLINE vec<T, N> extract_bits(vec<T, N> a, uint offset, uint bits) {
#define EMU_F(c) extract_bits(a.c, offset, bits)
  EMU_MAP(T, N, EMU_F);
#undef EMU_F
}
template <class T, int N> EMU_INLINE vec<T, N> insert_bits(vec<T, N> a, vec<T, N> b, uint offset, uint bits) {
#define EMU_F(c) insert_bits(a.c, b.c, offset, bits)
  EMU_MAP(T, N, EMU_F);
#undef EMU_F
}

// ---- results through references, and integers out of floats ---------------------------------------------------------

#define EMU_FLOAT_MISC(T)                                                                                            \
  EMU_INLINE T modf(T x, T &whole) { float w; float f = __builtin_modff((float)x, &w); whole = (T)w; return (T)f; }   \
  EMU_INLINE T frexp(T x, int &e) { return (T)__builtin_frexpf((float)x, &e); }                                      \
  EMU_INLINE T ldexp(T x, int e) { return (T)__builtin_ldexpf((float)x, e); }                                        \
  EMU_INLINE int ilogb(T x) { return __builtin_ilogbf((float)x); }                                                   \
  EMU_INLINE T sincos(T x, T &c) { c = (T)__builtin_cosf((float)x); return (T)__builtin_sinf((float)x); }
EMU_FLOAT_MISC(float) EMU_FLOAT_MISC(half)
template <class T, int N> EMU_INLINE vec<T, N> modf(vec<T, N> x, vec<T, N> &whole) {
  vec<T, N> r;
  for (int i = 0; i < N; i++) r[i] = modf(x[i], whole[i]);
  return r;
}
template <class T, int N> EMU_INLINE vec<T, N> frexp(vec<T, N> x, vec<int, N> &e) {
  vec<T, N> r;
  for (int i = 0; i < N; i++) r[i] = frexp(x[i], e[i]);
  return r;
}
template <class T, int N> EMU_INLINE vec<T, N> ldexp(vec<T, N> x, vec<int, N> e) {
  vec<T, N> r;
  for (int i = 0; i < N; i++) r[i] = ldexp(x[i], e[i]);
  return r;
}
template <class T, int N> EMU_INLINE vec<int, N> ilogb(vec<T, N> x) {
  vec<int, N> r;
  for (int i = 0; i < N; i++) r[i] = ilogb(x[i]);
  return r;
}
template <class T, int N> EMU_INLINE vec<T, N> sincos(vec<T, N> x, vec<T, N> &c) {
  c = cos(x);
  return sin(x);
}

// fast:: trades accuracy for speed on a GPU; here both are the accurate ones.
#define EMU_USING(name) using metal::name;
namespace fast { EMU_TRANSCENDENTAL(EMU_USING, EMU_USING, EMU_USING) using metal::min; using metal::max; using metal::clamp; using metal::abs;
  using metal::sincos; using metal::modf; using metal::frexp; using metal::ldexp; using metal::ilogb; using metal::min3; using metal::max3; using metal::median3; }
namespace precise { EMU_TRANSCENDENTAL(EMU_USING, EMU_USING, EMU_USING) using metal::min; using metal::max; using metal::clamp; using metal::abs;
  using metal::sincos; using metal::modf; using metal::frexp; using metal::ldexp; using metal::ilogb; using metal::min3; using metal::max3; using metal::median3; }

// ---- relational -----------------------------------------------------------------------------------------------------

#define EMU_CLASSIFY(T)                                                                                    \
  EMU_INLINE constexpr bool isnan(T x) { return __builtin_isnan((float)x); }                               \
  EMU_INLINE constexpr bool isinf(T x) { return __builtin_isinf((float)x); }                               \
  EMU_INLINE constexpr bool isfinite(T x) { return __builtin_isfinite((float)x); }                         \
  EMU_INLINE constexpr bool isnormal(T x) { return isfinite(x) && ((float)x < 0 ? -(float)x : (float)x) >= (float)numeric_limits<T>::min(); } \
  EMU_INLINE constexpr bool signbit(T x) { return __builtin_signbitf((float)x); }                          \
  EMU_INLINE constexpr bool isordered(T x, T y) { return !isnan(x) && !isnan(y); }                         \
  EMU_INLINE constexpr bool isunordered(T x, T y) { return isnan(x) || isnan(y); }
EMU_CLASSIFY(float) EMU_CLASSIFY(half)
#define EMU_CLASSIFY_BFLOAT(name) template <class B, class = emu_if_bfloat<B>> EMU_INLINE constexpr bool name(B x) { return name((float)x); }
EMU_CLASSIFY_BFLOAT(isnan) EMU_CLASSIFY_BFLOAT(isinf) EMU_CLASSIFY_BFLOAT(isfinite) EMU_CLASSIFY_BFLOAT(isnormal) EMU_CLASSIFY_BFLOAT(signbit)
#define EMU_CLASSIFY_VEC(name) template <class T, int N> EMU_INLINE vec<bool, N> name(vec<T, N> a) {                     \
    if constexpr (N == 2) return vec<bool, N>(name(a.x), name(a.y));                                                    \
    else if constexpr (N == 3) return vec<bool, N>(name(a.x), name(a.y), name(a.z));                                    \
    else return vec<bool, N>(name(a.x), name(a.y), name(a.z), name(a.w)); }
EMU_CLASSIFY_VEC(isnan) EMU_CLASSIFY_VEC(isinf) EMU_CLASSIFY_VEC(isfinite) EMU_CLASSIFY_VEC(isnormal) EMU_CLASSIFY_VEC(signbit)
EMU_INLINE constexpr bool all(bool x) { return x; }
EMU_INLINE constexpr bool any(bool x) { return x; }
template <int N> EMU_INLINE bool all(vec<bool, N> v) {
  bool r = true;
  for (int i = 0; i < N; i++) r = r && v[i];
  return r;
}
template <int N> EMU_INLINE bool any(vec<bool, N> v) {
  bool r = false;
  for (int i = 0; i < N; i++) r = r || v[i];
  return r;
}
#define EMU_SELECT(T) EMU_INLINE constexpr T select(T x, T y, bool c) { return c ? y : x; }
EMU_INTEGERS(EMU_SELECT) EMU_SELECT(bool) EMU_SELECT(float) EMU_SELECT(half)
template <class B> EMU_INLINE emu_if_bfloat<B> select(B x, B y, bool c) { return c ? y : x; }
template <class T, int N> EMU_INLINE vec<T, N> select(vec<T, N> a, vec<T, N> b, vec<bool, N> k) {
#define EMU_F(c) (k.c ? b.c : a.c)
  EMU_MAP(T, N, EMU_F);
#undef EMU_F
}
template <class T, int N, class S, class = emu_if_scalar<S>> EMU_INLINE vec<T, N> select(S a, vec<T, N> b, vec<bool, N> k) { return select(vec<T, N>(a), b, k); }
template <class T, int N, class S, class = emu_if_scalar<S>> EMU_INLINE vec<T, N> select(vec<T, N> a, S b, vec<bool, N> k) { return select(a, vec<T, N>(b), k); }

// ---- geometric ------------------------------------------------------------------------------------------------------

template <class T, int N> EMU_INLINE T dot(vec<T, N> a, vec<T, N> b) {
  T r = a.x * b.x + a.y * b.y;
  if constexpr (N > 2) r += a.z * b.z;
  if constexpr (N > 3) r += a.w * b.w;
  return r;
}
template <class T, int N> EMU_INLINE T dot(emu_packed<T, N> a, emu_packed<T, N> b) { return dot(vec<T, N>(a), vec<T, N>(b)); }
template <class T, int N> EMU_INLINE T dot(emu_packed<T, N> a, vec<T, N> b) { return dot(vec<T, N>(a), b); }
template <class T, int N> EMU_INLINE T dot(vec<T, N> a, emu_packed<T, N> b) { return dot(a, vec<T, N>(b)); }
template <class T> EMU_INLINE vec<T, 3> cross(vec<T, 3> a, vec<T, 3> b) {
  return vec<T, 3>(a.y * b.z - a.z * b.y, a.z * b.x - a.x * b.z, a.x * b.y - a.y * b.x);
}
template <class T, int N> EMU_INLINE T length_squared(vec<T, N> a) { return dot(a, a); }
template <class T, int N> EMU_INLINE T length(vec<T, N> a) { return sqrt(dot(a, a)); }
template <class T, int N> EMU_INLINE T distance(vec<T, N> a, vec<T, N> b) { return length(a - b); }
template <class T, int N> EMU_INLINE T distance_squared(vec<T, N> a, vec<T, N> b) { return length_squared(a - b); }
template <class T, int N> EMU_INLINE vec<T, N> normalize(vec<T, N> a) { return a * rsqrt(dot(a, a)); }
template <class T, int N> EMU_INLINE vec<T, N> faceforward(vec<T, N> n, vec<T, N> i, vec<T, N> r) { return dot(r, i) < T(0) ? n : -n; }
template <class T, int N> EMU_INLINE vec<T, N> reflect(vec<T, N> i, vec<T, N> n) { return i - T(2) * dot(n, i) * n; }
template <class T, int N> EMU_INLINE vec<T, N> refract(vec<T, N> i, vec<T, N> n, T eta) {
  T d = dot(n, i), k = T(1) - eta * eta * (T(1) - d * d);
  return k < T(0) ? vec<T, N>(T(0)) : eta * i - (eta * d + sqrt(k)) * n;
}

// ---- pack and unpack ------------------------------------------------------------------------------------------------

namespace emu_impl {
EMU_INLINE uint unorm(float x, float scale) { return (uint)__builtin_rintf(fmin(fmax(x, 0.0f), 1.0f) * scale); }
EMU_INLINE int snorm(float x, float scale) { return (int)__builtin_rintf(fmin(fmax(x, -1.0f), 1.0f) * scale); }
}  // namespace emu_impl
#define EMU_PACK(V4, V2, suffix_in, suffix_out4, suffix_out2)                                                             \
  EMU_INLINE uint pack_##suffix_in##_to_unorm4x8(V4 v) {                                                                  \
    return emu_impl::unorm(v.x, 255) | emu_impl::unorm(v.y, 255) << 8 | emu_impl::unorm(v.z, 255) << 16 | emu_impl::unorm(v.w, 255) << 24; \
  }                                                                                                                       \
  EMU_INLINE uint pack_##suffix_in##_to_snorm4x8(V4 v) {                                                                  \
    return (emu_impl::snorm(v.x, 127) & 255) | (emu_impl::snorm(v.y, 127) & 255) << 8 | (emu_impl::snorm(v.z, 127) & 255) << 16 | (uint)emu_impl::snorm(v.w, 127) << 24; \
  }                                                                                                                       \
  EMU_INLINE uint pack_##suffix_in##_to_unorm2x16(V2 v) { return emu_impl::unorm(v.x, 65535) | emu_impl::unorm(v.y, 65535) << 16; } \
  EMU_INLINE uint pack_##suffix_in##_to_snorm2x16(V2 v) { return (emu_impl::snorm(v.x, 32767) & 65535) | (uint)emu_impl::snorm(v.y, 32767) << 16; } \
  EMU_INLINE V4 unpack_unorm4x8_to_##suffix_in(uint u) { return V4((u & 255) / 255.0f, (u >> 8 & 255) / 255.0f, (u >> 16 & 255) / 255.0f, (u >> 24) / 255.0f); } \
  EMU_INLINE V4 unpack_snorm4x8_to_##suffix_in(uint u) {                                                                  \
    return V4(emu_impl::fmax((int8_t)u / 127.0f, -1.0f), emu_impl::fmax((int8_t)(u >> 8) / 127.0f, -1.0f),                \
              emu_impl::fmax((int8_t)(u >> 16) / 127.0f, -1.0f), emu_impl::fmax((int8_t)(u >> 24) / 127.0f, -1.0f));      \
  }                                                                                                                       \
  EMU_INLINE V2 unpack_unorm2x16_to_##suffix_in(uint u) { return V2((u & 65535) / 65535.0f, (u >> 16) / 65535.0f); }      \
  EMU_INLINE V2 unpack_snorm2x16_to_##suffix_in(uint u) {                                                                 \
    return V2(emu_impl::fmax((int16_t)u / 32767.0f, -1.0f), emu_impl::fmax((int16_t)(u >> 16) / 32767.0f, -1.0f));        \
  }
EMU_PACK(float4, float2, float, , ) EMU_PACK(half4, half2, half, , )
}  // namespace metal

// ---- builtins beneath the library, which some kernels call; the last argument chooses fast or precise ---------------

#define EMU_BUILTIN1(name) EMU_INLINE float __metal_##name(float x, bool = true) { return metal::name(x); }
#define EMU_BUILTIN2(name) EMU_INLINE float __metal_##name(float x, float y, bool = true) { return metal::name(x, y); }
#define EMU_BUILTIN3(name) EMU_INLINE float __metal_##name(float x, float y, float z, bool = true) { return metal::name(x, y, z); }
EMU_TRANSCENDENTAL(EMU_BUILTIN1, EMU_BUILTIN2, EMU_BUILTIN3)
EMU_BUILTIN3(fmin3) EMU_BUILTIN3(fmax3) EMU_BUILTIN3(fmedian3)
EMU_INLINE float __metal_frexp(float x, int *e) { return __builtin_frexpf(x, e); }
EMU_INLINE float __metal_ldexp(float x, int e, bool = true) { return __builtin_ldexpf(x, e); }
EMU_INLINE float __metal_modf(float x, float *whole, bool = true) { return __builtin_modff(x, whole); }
EMU_INLINE bool __metal_isnan(float x, bool = true) { return metal::isnan(x); }
EMU_INLINE bool __metal_isinf(float x, bool = true) { return metal::isinf(x); }
EMU_INLINE bool __metal_isfinite(float x, bool = true) { return metal::isfinite(x); }
