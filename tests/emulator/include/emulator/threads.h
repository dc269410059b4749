// The shim's third layer: what threads do together. Each function packs its operands and calls the runtime
// (runtime/simdgroup.cpp), which runs the operation once when the last thread has arrived.
#pragma once
#include "math.h"
#include "abi.h"

// convergent and nomerge: or clang merges the two shuffles of an if/else into one and hides a divergence.
#define EMU_SYNC extern "C" __attribute__((convergent, nomerge)) 
EMU_SYNC void emu_barrier(uint scope, uint flags) noexcept;
EMU_SYNC void emu_simd(uint op, uint type, uint count, const void *value, void *result, uint parameter) noexcept;
EMU_SYNC void emu_matrix_load(void *fragment, const void *p, ulong stride, ulong x, ulong y, uint form) noexcept;
EMU_SYNC void emu_matrix_store(const void *fragment, void *p, ulong stride, ulong x, ulong y, uint form) noexcept;
EMU_SYNC void emu_matrix_multiply(void *d, const void *a, const void *b, const void *c, uint types) noexcept;
extern "C" ulong emu_atomic(uint op, uint type, const volatile void *p, ulong value, ulong *expected) noexcept;
extern "C" void emu_fence(uint flags, uint order, uint scope) noexcept;
extern "C" uint emu_lane() noexcept;
extern "C" uint emu_simd_width() noexcept;

namespace metal {

// ---- barriers and fences --------------------------------------------------------------------------------------------

enum class mem_flags : uint { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4, mem_threadgroup_imageblock = 8, mem_object_data = 16 };
EMU_INLINE constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags((uint)a | (uint)b); }
EMU_INLINE constexpr mem_flags operator&(mem_flags a, mem_flags b) { return mem_flags((uint)a & (uint)b); }
enum memory_order { memory_order_relaxed = 0, memory_order_acquire = 2, memory_order_release = 3, memory_order_acq_rel = 4, memory_order_seq_cst = 5 };
enum thread_scope { thread_scope_thread = 0, thread_scope_threadgroup = 1, thread_scope_device = 2, thread_scope_simdgroup = 4, thread_scope_system = 5 };
EMU_INLINE void threadgroup_barrier(mem_flags flags) { emu_barrier(0, (uint)flags); }
EMU_INLINE void threadgroup_barrier(mem_flags flags, thread_scope) { emu_barrier(0, (uint)flags); }
EMU_INLINE void simdgroup_barrier(mem_flags flags) { emu_barrier(1, (uint)flags); }
EMU_INLINE void simdgroup_barrier(mem_flags flags, thread_scope) { emu_barrier(1, (uint)flags); }
EMU_INLINE void atomic_thread_fence(mem_flags flags, memory_order order, thread_scope scope = thread_scope_device) { emu_fence((uint)flags, order, scope); }

// ---- simdgroup and quad functions -----------------------------------------------------------------------------------

template <class T> struct emu_type_code {};
#define EMU_TYPE_CODE(T, c) template <> struct emu_type_code<T> { static constexpr uint value = c; };
EMU_TYPE_CODE(float, EMU_F32) EMU_TYPE_CODE(half, EMU_F16) EMU_TYPE_CODE(bfloat, EMU_BF16) EMU_TYPE_CODE(char, EMU_I8)
EMU_TYPE_CODE(int8_t, EMU_I8) EMU_TYPE_CODE(uchar, EMU_U8) EMU_TYPE_CODE(short, EMU_I16) EMU_TYPE_CODE(ushort, EMU_U16)
EMU_TYPE_CODE(int, EMU_I32) EMU_TYPE_CODE(uint, EMU_U32) EMU_TYPE_CODE(long, EMU_I64) EMU_TYPE_CODE(ulong, EMU_U64)
// MSL has these functions for types of up to 32 bits, and none for bool.
template <class T> using emu_if_simd = enable_if_t<(is_arithmetic<typename emu_element<T>::type>::value && sizeof(typename emu_element<T>::type) <= 4 &&
    !is_same<typename emu_element<T>::type, bool>::value && (is_arithmetic<T>::value || emu_is_vec<T>::value)), T>;
template <class T> using emu_if_simd_int = enable_if_t<(is_integral<typename emu_element<T>::type>::value && sizeof(typename emu_element<T>::type) <= 4 &&
    !is_same<typename emu_element<T>::type, bool>::value && (is_arithmetic<T>::value || emu_is_vec<T>::value)), T>;
template <class T> EMU_INLINE __attribute__((convergent)) T emu_simd_call(uint op, T value, uint parameter) {
  T result;
  emu_simd(op, emu_type_code<typename emu_element<T>::type>::value, emu_element<T>::count == 3 ? 4 : emu_element<T>::count, &value, &result, parameter);
  return result;
}
#define EMU_REDUCTION(name, code, check)                                                                                 \
  template <class T> EMU_INLINE check<T> simd_##name(T v) { return emu_simd_call(code, v, 0); }                          \
  template <class T> EMU_INLINE check<T> quad_##name(T v) { return emu_simd_call(code | EMU_QUAD, v, 0); }
EMU_REDUCTION(sum, EMU_SUM, emu_if_simd) EMU_REDUCTION(product, EMU_PRODUCT, emu_if_simd) EMU_REDUCTION(min, EMU_MIN, emu_if_simd)
EMU_REDUCTION(max, EMU_MAX, emu_if_simd) EMU_REDUCTION(and, EMU_AND, emu_if_simd_int) EMU_REDUCTION(or, EMU_OR, emu_if_simd_int)
EMU_REDUCTION(xor, EMU_XOR, emu_if_simd_int) EMU_REDUCTION(prefix_inclusive_sum, EMU_PREFIX_INCLUSIVE_SUM, emu_if_simd)
EMU_REDUCTION(prefix_exclusive_sum, EMU_PREFIX_EXCLUSIVE_SUM, emu_if_simd)
EMU_REDUCTION(prefix_inclusive_product, EMU_PREFIX_INCLUSIVE_PRODUCT, emu_if_simd)
EMU_REDUCTION(prefix_exclusive_product, EMU_PREFIX_EXCLUSIVE_PRODUCT, emu_if_simd)
EMU_REDUCTION(broadcast_first, EMU_BROADCAST_FIRST, emu_if_simd)
#define EMU_SHUFFLE(name, code)                                                                                            \
  template <class T> EMU_INLINE emu_if_simd<T> simd_##name(T v, ushort k) { return emu_simd_call(code, v, k); }            \
  template <class T> EMU_INLINE emu_if_simd<T> quad_##name(T v, ushort k) { return emu_simd_call(code | EMU_QUAD, v, k); }
EMU_SHUFFLE(shuffle, EMU_SHUFFLE_INDEX) EMU_SHUFFLE(shuffle_xor, EMU_SHUFFLE_XOR) EMU_SHUFFLE(shuffle_up, EMU_SHUFFLE_UP)
EMU_SHUFFLE(shuffle_down, EMU_SHUFFLE_DOWN) EMU_SHUFFLE(shuffle_rotate_up, EMU_ROTATE_UP) EMU_SHUFFLE(shuffle_rotate_down, EMU_ROTATE_DOWN)
EMU_SHUFFLE(broadcast, EMU_BROADCAST)
#define EMU_FILL(name, code)                                                                                               \
  template <class T> EMU_INLINE emu_if_simd<T> simd_##name(T v, T fill, ushort k, ushort modulo = 0) {                     \
    T pair[2] = {v, fill}, result;                                                                                         \
    emu_simd(code, emu_type_code<typename emu_element<T>::type>::value, emu_element<T>::count == 3 ? 4 : emu_element<T>::count, pair, &result, k | (uint)modulo << 16); \
    return result;                                                                                                         \
  }                                                                                                                        \
  template <class T> EMU_INLINE emu_if_simd<T> quad_##name(T v, T fill, ushort k, ushort modulo = 0) {                     \
    T pair[2] = {v, fill}, result;                                                                                         \
    emu_simd(code | EMU_QUAD, emu_type_code<typename emu_element<T>::type>::value, emu_element<T>::count == 3 ? 4 : emu_element<T>::count, pair, &result, k | (uint)modulo << 16); \
    return result;                                                                                                         \
  }
EMU_FILL(shuffle_and_fill_up, EMU_FILL_UP) EMU_FILL(shuffle_and_fill_down, EMU_FILL_DOWN)

EMU_INLINE ulong emu_vote(uint op, bool v) {
  uint in = v;
  ulong out = 0;
  emu_simd(op, EMU_U32, 1, &in, &out, 0);
  return out;
}
struct simd_vote {
  using vote_t = ulong;
  EMU_MEMBER constexpr explicit simd_vote(vote_t v = 0) : emu_bits(v) {}
  EMU_MEMBER constexpr explicit operator vote_t() const { return emu_bits; }
  EMU_MEMBER bool all() const { return emu_bits == (emu_simd_width() == 64 ? ~0ul : (1ul << emu_simd_width()) - 1); }
  EMU_MEMBER bool any() const { return emu_bits != 0; }
  vote_t emu_bits;
};
struct quad_vote {
  using vote_t = uint;
  EMU_MEMBER constexpr explicit quad_vote(vote_t v = 0) : emu_bits(v) {}
  EMU_MEMBER constexpr explicit operator vote_t() const { return emu_bits; }
  EMU_MEMBER bool all() const { return emu_bits == 15; }
  EMU_MEMBER bool any() const { return emu_bits != 0; }
  vote_t emu_bits;
};
EMU_INLINE simd_vote simd_ballot(bool v) { return simd_vote(emu_vote(EMU_BALLOT, v)); }
EMU_INLINE bool simd_all(bool v) { return emu_vote(EMU_ALL, v) != 0; }
EMU_INLINE bool simd_any(bool v) { return emu_vote(EMU_ANY, v) != 0; }
EMU_INLINE bool simd_is_first() { return emu_vote(EMU_IS_FIRST, true) != 0; }
EMU_INLINE bool simd_is_helper_thread() { return false; }
EMU_INLINE simd_vote simd_active_threads_mask() { return simd_vote(emu_vote(EMU_BALLOT, true)); }
EMU_INLINE quad_vote quad_ballot(bool v) { return quad_vote((uint)emu_vote(EMU_BALLOT | EMU_QUAD, v)); }
EMU_INLINE bool quad_all(bool v) { return emu_vote(EMU_ALL | EMU_QUAD, v) != 0; }
EMU_INLINE bool quad_any(bool v) { return emu_vote(EMU_ANY | EMU_QUAD, v) != 0; }
EMU_INLINE bool quad_is_first() { return emu_vote(EMU_IS_FIRST | EMU_QUAD, true) != 0; }
EMU_INLINE quad_vote quad_active_threads_mask() { return quad_vote((uint)emu_vote(EMU_BALLOT | EMU_QUAD, true)); }

// ---- atomics --------------------------------------------------------------------------------------------------------

template <class T> struct atomic { T emu_value; };
template <class T> struct _atomic { T emu_value; };
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<bool> atomic_bool;
typedef atomic<float> atomic_float;
typedef atomic<ulong> atomic_ulong;
typedef atomic<long> atomic_long;
template <class T> EMU_INLINE ulong emu_to_bits(T v) { ulong u = 0; __builtin_memcpy(&u, &v, sizeof v); return u; }
template <class T> EMU_INLINE T emu_from_bits(ulong u) { T v; __builtin_memcpy(&v, &u, sizeof v); return v; }
template <> struct emu_type_code<bool> { static constexpr uint value = EMU_U8; };
#define EMU_ATOMIC_RMW(name, code, space)                                                                                              \
  template <class T> EMU_INLINE T atomic_##name##_explicit(volatile space atomic<T> *p, type_identity_t<T> v, memory_order) {          \
    return emu_from_bits<T>(emu_atomic(code, emu_type_code<T>::value, (const volatile void *)(ulong)p, emu_to_bits<T>(v), nullptr));  \
  }
#define EMU_ATOMICS(space)                                                                                                             \
  EMU_ATOMIC_RMW(fetch_add, EMU_ATOMIC_ADD, space) EMU_ATOMIC_RMW(fetch_sub, EMU_ATOMIC_SUB, space)                                     \
  EMU_ATOMIC_RMW(fetch_min, EMU_ATOMIC_MIN, space) EMU_ATOMIC_RMW(fetch_max, EMU_ATOMIC_MAX, space)                                     \
  EMU_ATOMIC_RMW(fetch_and, EMU_ATOMIC_AND, space) EMU_ATOMIC_RMW(fetch_or, EMU_ATOMIC_OR, space)                                       \
  EMU_ATOMIC_RMW(fetch_xor, EMU_ATOMIC_XOR, space) EMU_ATOMIC_RMW(exchange, EMU_ATOMIC_EXCHANGE, space)                                 \
  template <class T> EMU_INLINE void atomic_store_explicit(volatile space atomic<T> *p, type_identity_t<T> v, memory_order) {           \
    emu_atomic(EMU_ATOMIC_STORE, emu_type_code<T>::value, (const volatile void *)(ulong)p, emu_to_bits<T>(v), nullptr);                \
  }                                                                                                                                    \
  template <class T> EMU_INLINE T atomic_load_explicit(const volatile space atomic<T> *p, memory_order) {                               \
    return emu_from_bits<T>(emu_atomic(EMU_ATOMIC_LOAD, emu_type_code<T>::value, (const volatile void *)(ulong)p, 0, nullptr));        \
  }                                                                                                                                    \
  template <class T> EMU_INLINE bool atomic_compare_exchange_weak_explicit(volatile space atomic<T> *p, thread type_identity_t<T> *expected, \
                                                                           type_identity_t<T> v, memory_order, memory_order) {         \
    ulong old = emu_to_bits<T>(*expected), seen = old;                                                                                 \
    emu_atomic(EMU_ATOMIC_COMPARE_EXCHANGE, emu_type_code<T>::value, (const volatile void *)(ulong)p, emu_to_bits<T>(v), &seen);       \
    *expected = emu_from_bits<T>(seen);                                                                                                \
    return seen == old;                                                                                                                \
  }
EMU_ATOMICS(device)
EMU_ATOMICS(threadgroup)

// ---- simdgroup matrices ---------------------------------------------------------------------------------------------

template <class T> struct emu_matrix_code {};
template <> struct emu_matrix_code<float> { static constexpr uint value = EMU_MATRIX_F32; static constexpr uint poison = EMU_POISON_F32; };
template <> struct emu_matrix_code<half> { static constexpr uint value = EMU_MATRIX_F16; static constexpr ushort poison = EMU_POISON_F16; };
template <> struct emu_matrix_code<bfloat> { static constexpr uint value = EMU_MATRIX_BF16; static constexpr ushort poison = EMU_POISON_BF16; };

template <typename T, int Cols, int Rows = Cols> struct simdgroup_matrix {
  static_assert(Cols == 8 && Rows == 8, "simdgroup_matrix is 8x8");
  typedef vec<T, 64> storage_type;
  static constexpr int emu_cols = Cols;
  vec<T, 2> emu_elements;
#ifdef EMU_CHECKED
  // A pattern that no arithmetic makes, found again when an operation reads the matrix.
  EMU_MEMBER simdgroup_matrix() : emu_elements(__builtin_bit_cast(T, emu_matrix_code<T>::poison), __builtin_bit_cast(T, emu_matrix_code<T>::poison)) {}
#else
  simdgroup_matrix() = default;
#endif
  EMU_MEMBER explicit simdgroup_matrix(T diagonal) {
    uint lane = emu_lane(), row = (lane >> 2 & 4) | (lane >> 1 & 3), column = (lane >> 1 & 4) | (lane << 1 & 2);
    emu_elements = vec<T, 2>(row == column ? diagonal : T(0), row == column + 1 ? diagonal : T(0));
  }
  EMU_MEMBER vec<T, 2> &thread_elements() { return emu_elements; }
  EMU_MEMBER const vec<T, 2> &thread_elements() const { return emu_elements; }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

template <typename T, int Cols, int Rows = Cols> EMU_INLINE simdgroup_matrix<T, Cols, Rows> make_filled_simdgroup_matrix(T v) {
  simdgroup_matrix<T, Cols, Rows> m;
  m.emu_elements = vec<T, 2>(v, v);
  return m;
}
template <typename T, int Cols, int Rows = Cols> EMU_INLINE simdgroup_matrix<T, Cols, Rows> make_diagonal_simdgroup_matrix(T v) {
  return simdgroup_matrix<T, Cols, Rows>(v);
}
#define EMU_MATRIX_MEMORY(space)                                                                                                          \
  template <typename T, int C, int R> EMU_INLINE void simdgroup_load(thread simdgroup_matrix<T, C, R> &d, const volatile space type_identity_t<T> *p, \
      ulong elements_per_row = C, ulong2 origin = ulong2(0), bool transpose = false) {                                                    \
    emu_matrix_load(&d, (const void *)(ulong)p, elements_per_row, origin.x, origin.y, emu_matrix_code<T>::value | (transpose ? EMU_MATRIX_TRANSPOSED : 0)); \
  }                                                                                                                                       \
  template <typename T, int C, int R> EMU_INLINE void simdgroup_store(const simdgroup_matrix<T, C, R> &a, volatile space type_identity_t<T> *p,   \
      ulong elements_per_row = C, ulong2 origin = ulong2(0), bool transpose = false) {                                                    \
    emu_matrix_store(&a, (void *)(ulong)p, elements_per_row, origin.x, origin.y, emu_matrix_code<T>::value | (transpose ? EMU_MATRIX_TRANSPOSED : 0)); \
  }
EMU_MATRIX_MEMORY(device)
EMU_MATRIX_MEMORY(threadgroup)
template <class D, class A, class B, class C> EMU_INLINE void emu_multiply(D *d, const A *a, const B *b, const C *c) {
  emu_matrix_multiply(d, a, b, c, emu_matrix_code<D>::value | emu_matrix_code<A>::value << 2 | emu_matrix_code<B>::value << 4 | emu_matrix_code<C>::value << 6);
}
template <class D, class A, class B, class C>
EMU_INLINE void simdgroup_multiply_accumulate(thread simdgroup_matrix<D, 8, 8> &d, const simdgroup_matrix<A, 8, 8> &a, const simdgroup_matrix<B, 8, 8> &b, const simdgroup_matrix<C, 8, 8> &c) {
  emu_multiply(&d.emu_elements.x, &a.emu_elements.x, &b.emu_elements.x, &c.emu_elements.x);
}
template <class D, class A, class B>
EMU_INLINE void simdgroup_multiply(thread simdgroup_matrix<D, 8, 8> &d, const simdgroup_matrix<A, 8, 8> &a, const simdgroup_matrix<B, 8, 8> &b) {
  emu_multiply(&d.emu_elements.x, &a.emu_elements.x, &b.emu_elements.x, (const D *)nullptr);
}
template <class T> EMU_INLINE simdgroup_matrix<T, 8, 8> operator*(simdgroup_matrix<T, 8, 8> a, simdgroup_matrix<T, 8, 8> b) {
  simdgroup_matrix<T, 8, 8> d;
  simdgroup_multiply(d, a, b);
  return d;
}
// The builtin beneath the public functions, which some kernels call with storage of their own.
template <class A, class B, class C, class D>
EMU_INLINE vec<D, 64> __metal_simdgroup_matrix_8x8_multiply_accumulate(vec<A, 64> a, vec<B, 64> b, vec<C, 64> c, vec<D, 64> d) {
  emu_multiply(d.s, a.s, b.s, c.s);
  return d;
}
}  // namespace metal
using metal::__metal_simdgroup_matrix_8x8_multiply_accumulate;

#define EMU_BUILTIN_SIMD(name) template <class T> EMU_INLINE T __metal_##name(T v) { return metal::name(v); }
#define EMU_BUILTIN_SHUFFLE(name) template <class T> EMU_INLINE T __metal_##name(T v, ushort k) { return metal::name(v, k); }
EMU_BUILTIN_SIMD(simd_sum) EMU_BUILTIN_SIMD(simd_product) EMU_BUILTIN_SIMD(simd_min) EMU_BUILTIN_SIMD(simd_max)
EMU_BUILTIN_SIMD(simd_prefix_inclusive_sum) EMU_BUILTIN_SIMD(simd_prefix_exclusive_sum)
EMU_BUILTIN_SIMD(simd_prefix_inclusive_product) EMU_BUILTIN_SIMD(simd_prefix_exclusive_product)
EMU_BUILTIN_SIMD(simd_and) EMU_BUILTIN_SIMD(simd_or)
template <class T> EMU_INLINE T __metal_simd_xor(T v) {
  if constexpr (metal::is_floating_point<T>::value) return v;  // declared by some kernels, never called
  else return metal::simd_xor(v);
}
EMU_BUILTIN_SHUFFLE(simd_broadcast) EMU_BUILTIN_SHUFFLE(simd_shuffle) EMU_BUILTIN_SHUFFLE(simd_shuffle_up) EMU_BUILTIN_SHUFFLE(simd_shuffle_down)
EMU_BUILTIN_SHUFFLE(simd_shuffle_xor) EMU_BUILTIN_SHUFFLE(simd_shuffle_rotate_up) EMU_BUILTIN_SHUFFLE(simd_shuffle_rotate_down)
template <class T> EMU_INLINE T __metal_simd_shuffle_and_fill_up(T v, T fill, ushort k, ushort modulo) { return metal::simd_shuffle_and_fill_up(v, fill, k, modulo); }
template <class T> EMU_INLINE T __metal_simd_shuffle_and_fill_down(T v, T fill, ushort k, ushort modulo) { return metal::simd_shuffle_and_fill_down(v, fill, k, modulo); }
EMU_INLINE ushort __metal_get_simdgroup_size(ushort = 0) { return (ushort)emu_simd_width(); }
EMU_INLINE ushort __metal_get_thread_index_in_simdgroup(ushort = 0) { return (ushort)emu_lane(); }
