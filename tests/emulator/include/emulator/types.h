// The shim's first layer: address spaces, scalar, vector and matrix types, type traits. Knows no threads.
//
// Sources are compiled as C++17 in clang's SYCL device mode: its address spaces are part of a type, so overloads on
// them resolve, and an object in any of them can be copied and have its methods called, as Metal allows.
// Every function here is `nodebug`, so that an access made inside it is reported at the user's line.
#pragma once

#define device __attribute__((opencl_global))
#define threadgroup __attribute__((opencl_local))
// Read-only `global_host` stands for constant: it converts to a const device pointer, but never to a writable one.
#define constant const __attribute__((opencl_global_host))
#define thread
#define kernel
#define EMU_INLINE inline __attribute__((always_inline, nodebug))
#define EMU_MEMBER __attribute__((always_inline, nodebug))
#define METAL_FUNC inline __attribute__((always_inline))

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long int64_t;
typedef unsigned long uint64_t;
typedef unsigned long size_t;
typedef long ptrdiff_t;
typedef unsigned long uintptr_t;
typedef long intptr_t;
typedef _Float16 half;

namespace metal {

// ---- type traits ----------------------------------------------------------------------------------------------------

template <class T, T v> struct integral_constant {
  static constexpr T value = v;
  using value_type = T;
  using type = integral_constant;
  EMU_MEMBER constexpr operator T() const { return v; }
  EMU_MEMBER constexpr T operator()() const { return v; }
};
template <bool b, class T = void> struct enable_if {};
template <class T> struct enable_if<true, T> { using type = T; };
template <bool b> using bool_constant = integral_constant<bool, b>;
using true_type = bool_constant<true>;
using false_type = bool_constant<false>;
}  // namespace metal

// A class, not clang's __bf16: that one converts from float without being asked. Conversions are templates, so that a
// bfloat turns into a float by itself, and into nothing else (an int, say, in the other branch of a conditional).
struct bfloat {
  unsigned short bits;
  bfloat() = default;
  template <class I, class = typename metal::enable_if<__is_integral(I)>::type> EMU_MEMBER constexpr bfloat(I i) : bits(round((float)i)) {}
  EMU_MEMBER constexpr explicit bfloat(float f) : bits(round(f)) {}
  EMU_MEMBER constexpr explicit bfloat(half f) : bits(round((float)f)) {}
  template <class F, typename metal::enable_if<__is_same(F, float), int>::type = 0> EMU_MEMBER constexpr operator F() const { return value(); }
  template <class F, typename metal::enable_if<!__is_same(F, float) && (__is_arithmetic(F) || __is_same(F, half)), int>::type = 0>
  EMU_MEMBER constexpr explicit operator F() const { return (F)value(); }
  EMU_MEMBER constexpr float value() const { return __builtin_bit_cast(float, (uint)bits << 16); }
  EMU_MEMBER static constexpr unsigned short round(float f) {
    uint u = __builtin_bit_cast(uint, f);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (unsigned short)((u >> 16) | 0x40);
    return (unsigned short)((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
  }
};

namespace metal {
template <class T> struct remove_const { using type = T; };
template <class T> struct remove_const<const T> { using type = T; };
template <class T> struct remove_volatile { using type = T; };
template <class T> struct remove_volatile<volatile T> { using type = T; };
template <class T> struct emu_strip_space { using type = T; };
template <class T> struct emu_strip_space<device T> { using type = T; };
template <class T> struct emu_strip_space<const device T> { using type = const T; };
template <class T> struct emu_strip_space<const threadgroup T> { using type = const T; };
template <class T> struct emu_strip_space<constant T> { using type = const T; };
template <class T> struct emu_strip_space<threadgroup T> { using type = T; };
template <class T> struct emu_strip_space<__attribute__((opencl_global_host)) T> { using type = T; };
template <class T> struct remove_cv { using type = typename remove_const<typename remove_volatile<T>::type>::type; };
template <class T> struct remove_reference { using type = T; };
template <class T> struct remove_reference<T &> { using type = T; };
template <class T> struct remove_reference<T &&> { using type = T; };
template <class T> struct remove_reference<device T &> { using type = device T; };
template <class T> struct remove_reference<threadgroup T &> { using type = threadgroup T; };
template <class T> struct remove_reference<__attribute__((opencl_global_host)) T &> { using type = __attribute__((opencl_global_host)) T; };
// The value type: no reference, no const, no address space.
template <class T> struct emu_value {
  using type = typename remove_cv<typename emu_strip_space<typename remove_cv<typename remove_reference<T>::type>::type>::type>::type;
};
template <class T> using emu_value_t = typename emu_value<T>::type;
template <class T> struct remove_pointer { using type = T; };
template <class T> struct remove_pointer<T *> { using type = T; };
template <class T> struct remove_pointer<device T *> { using type = device T; };
template <class T> struct remove_pointer<threadgroup T *> { using type = threadgroup T; };
template <class T> struct remove_pointer<__attribute__((opencl_global_host)) T *> { using type = __attribute__((opencl_global_host)) T; };
template <class T> struct type_identity { using type = T; };
template <class T> using type_identity_t = typename type_identity<T>::type;
template <class T> struct decay { using type = emu_value_t<T>; };
template <class T> struct remove_extent { using type = T; };
template <class T> struct remove_extent<T[]> { using type = T; };
template <class T, size_t n> struct remove_extent<T[n]> { using type = T; };
template <class T> struct add_const { using type = const T; };
template <class T> struct add_volatile { using type = volatile T; };
template <class T> struct add_cv { using type = const volatile T; };
template <class T> struct add_lvalue_reference { using type = T &; };
template <class T> struct add_rvalue_reference { using type = T &&; };
template <class T> struct add_pointer { using type = typename remove_reference<T>::type *; };
template <bool b, class T, class F> struct conditional { using type = T; };
template <class T, class F> struct conditional<false, T, F> { using type = F; };
template <class A, class B> struct is_same : false_type {};
template <class A> struct is_same<A, A> : true_type {};
template <class T> struct is_void : is_same<typename remove_cv<T>::type, void> {};
template <class T> struct is_integral : bool_constant<__is_integral(emu_value_t<T>)> {};
template <class T>
struct is_floating_point : bool_constant<__is_floating_point(emu_value_t<T>) || is_same<emu_value_t<T>, half>::value ||
                                         is_same<emu_value_t<T>, bfloat>::value> {};
template <class T> struct is_arithmetic : bool_constant<is_integral<T>::value || is_floating_point<T>::value> {};
template <class T> struct is_scalar : bool_constant<is_arithmetic<T>::value || __is_enum(emu_value_t<T>) || __is_pointer(T)> {};
template <class T> struct is_signed : bool_constant<is_floating_point<T>::value || __is_signed(emu_value_t<T>)> {};
template <class T> struct is_unsigned : bool_constant<is_integral<T>::value && __is_unsigned(emu_value_t<T>)> {};
template <class T> struct is_const : false_type {};
template <class T> struct is_const<const T> : true_type {};
template <class T> struct is_volatile : false_type {};
template <class T> struct is_volatile<volatile T> : true_type {};
template <class T> struct is_pointer : bool_constant<__is_pointer(T)> {};
template <class T> struct is_reference : bool_constant<__is_reference(T)> {};
template <class T> struct is_lvalue_reference : bool_constant<__is_lvalue_reference(T)> {};
template <class T> struct is_array : bool_constant<__is_array(T)> {};
template <class T> struct is_enum : bool_constant<__is_enum(T)> {};
template <class T> struct is_class : bool_constant<__is_class(T)> {};
template <class T> struct is_union : bool_constant<__is_union(T)> {};
template <class T> struct is_trivially_copyable : bool_constant<__is_trivially_copyable(T)> {};
template <class T> struct is_standard_layout : bool_constant<__is_standard_layout(T)> {};
template <class B, class D> struct is_base_of : bool_constant<__is_base_of(B, D)> {};
template <class A, class B> struct is_convertible : bool_constant<__is_convertible(A, B)> {};
template <class T, class... A> struct is_constructible : bool_constant<__is_constructible(T, A...)> {};
template <class A, class B> struct is_assignable : bool_constant<__is_assignable(A, B)> {};
template <class T> struct underlying_type { using type = __underlying_type(T); };
template <class T> struct alignment_of : integral_constant<size_t, alignof(T)> {};
template <class T> struct rank : integral_constant<size_t, 0> {};
template <class T, size_t n> struct rank<T[n]> : integral_constant<size_t, rank<T>::value + 1> {};
template <class T> T &&declval() noexcept;
template <class...> struct conjunction : true_type {};
template <class A, class... B> struct conjunction<A, B...> : bool_constant<A::value && conjunction<B...>::value> {};
template <class...> struct disjunction : false_type {};
template <class A, class... B> struct disjunction<A, B...> : bool_constant<A::value || disjunction<B...>::value> {};
template <class A> struct negation : bool_constant<!A::value> {};
template <class T> struct make_unsigned { using type = __make_unsigned(T); };
template <class T> struct make_signed { using type = __make_signed(T); };
template <class... T> struct common_type;
template <class T> struct common_type<T> { using type = T; };
template <class A, class B> struct common_type<A, B> { using type = emu_value_t<decltype(true ? declval<A>() : declval<B>())>; };

template <class... T> using _conjunction = conjunction<T...>;  // names of Apple's headers that kernels use
template <class... T> using _disjunction = disjunction<T...>;
template <class T> using _negation = negation<T>;
template <class T> struct remove_addrspace { using type = typename emu_strip_space<T>::type; };
template <class T> struct remove_addrspace<const T> { using type = const typename emu_strip_space<T>::type; };
template <class T> using remove_addrspace_t = typename remove_addrspace<T>::type;
template <class T> using uniform = T;
template <class T> EMU_INLINE constexpr T make_uniform(T v) { return v; }
template <class T> using remove_const_t = typename remove_const<T>::type;
template <class T> using remove_volatile_t = typename remove_volatile<T>::type;
template <class T> using remove_cv_t = typename remove_cv<T>::type;
template <class T> using remove_reference_t = typename remove_reference<T>::type;
template <class T> using remove_pointer_t = typename remove_pointer<T>::type;
template <class T> using remove_extent_t = typename remove_extent<T>::type;
template <class T> using decay_t = typename decay<T>::type;
template <class T> using add_const_t = typename add_const<T>::type;
template <class T> using add_pointer_t = typename add_pointer<T>::type;
template <class T> using add_lvalue_reference_t = typename add_lvalue_reference<T>::type;
template <class T> using make_unsigned_t = typename make_unsigned<T>::type;
template <class T> using make_signed_t = typename make_signed<T>::type;
template <class T> using underlying_type_t = typename underlying_type<T>::type;
template <class... T> using common_type_t = typename common_type<T...>::type;
template <bool b, class T = void> using enable_if_t = typename enable_if<b, T>::type;
template <bool b, class T, class F> using conditional_t = typename conditional<b, T, F>::type;
template <class A, class B> inline constexpr bool is_same_v = is_same<A, B>::value;
template <class A, class B> inline constexpr bool is_convertible_v = is_convertible<A, B>::value;
template <class A, class B> inline constexpr bool is_base_of_v = is_base_of<A, B>::value;
template <class T, class... A> inline constexpr bool is_constructible_v = is_constructible<T, A...>::value;
#define EMU_TRAIT_V(name) template <class T> inline constexpr bool name##_v = name<T>::value;
EMU_TRAIT_V(is_void) EMU_TRAIT_V(is_integral) EMU_TRAIT_V(is_floating_point) EMU_TRAIT_V(is_arithmetic)
EMU_TRAIT_V(is_scalar) EMU_TRAIT_V(is_signed) EMU_TRAIT_V(is_unsigned) EMU_TRAIT_V(is_const) EMU_TRAIT_V(is_pointer)
EMU_TRAIT_V(is_volatile) EMU_TRAIT_V(is_reference) EMU_TRAIT_V(is_array) EMU_TRAIT_V(is_enum) EMU_TRAIT_V(is_class)
EMU_TRAIT_V(is_trivially_copyable) EMU_TRAIT_V(is_union)
template <class... T> inline constexpr bool conjunction_v = conjunction<T...>::value;
template <class... T> inline constexpr bool disjunction_v = disjunction<T...>::value;

template <class T> EMU_INLINE constexpr remove_reference_t<T> &&move(T &&t) noexcept { return static_cast<remove_reference_t<T> &&>(t); }
template <class T> EMU_INLINE constexpr T &&forward(remove_reference_t<T> &t) noexcept { return static_cast<T &&>(t); }

template <class S> using emu_if_scalar = enable_if_t<is_arithmetic<S>::value || __is_enum(S)>;
template <class S> using emu_if_bfloat = enable_if_t<is_same<S, bfloat>::value, S>;
}  // namespace metal

// ---- bfloat arithmetic: one rounding per operation ------------------------------------------------------------------

// With an integer the result is a bfloat; with a float, and with a half, it is a float.
template <class S> using emu_if_integer = metal::enable_if_t<__is_integral(S)>;
template <class S> using emu_if_float = metal::enable_if_t<__is_same(S, float) || __is_same(S, half)>;
#define EMU_BFLOAT_OP(op)                                                                                                       \
  EMU_INLINE constexpr bfloat operator op(bfloat a, bfloat b) { return bfloat(a.value() op b.value()); }                        \
  template <class S, class = emu_if_integer<S>> EMU_INLINE constexpr bfloat operator op(bfloat a, S b) { return a op bfloat(b); } \
  template <class S, class = emu_if_integer<S>> EMU_INLINE constexpr bfloat operator op(S a, bfloat b) { return bfloat(a) op b; } \
  template <class S, class = emu_if_float<S>, class = void> EMU_INLINE constexpr float operator op(bfloat a, S b) { return a.value() op(float) b; } \
  template <class S, class = emu_if_float<S>, class = void> EMU_INLINE constexpr float operator op(S a, bfloat b) { return (float)a op b.value(); }
EMU_BFLOAT_OP(+) EMU_BFLOAT_OP(-) EMU_BFLOAT_OP(*) EMU_BFLOAT_OP(/)
#undef EMU_BFLOAT_OP
#define EMU_BFLOAT_COMPARE(op)                                                                                                  \
  EMU_INLINE constexpr bool operator op(bfloat a, bfloat b) { return a.value() op b.value(); }                                  \
  template <class S, class = metal::enable_if_t<metal::is_arithmetic<S>::value && !__is_same(S, bfloat)>>                       \
  EMU_INLINE constexpr bool operator op(bfloat a, S b) { return a.value() op(float) b; }                                        \
  template <class S, class = metal::enable_if_t<metal::is_arithmetic<S>::value && !__is_same(S, bfloat)>>                       \
  EMU_INLINE constexpr bool operator op(S a, bfloat b) { return (float)a op b.value(); }
EMU_BFLOAT_COMPARE(==) EMU_BFLOAT_COMPARE(!=) EMU_BFLOAT_COMPARE(<) EMU_BFLOAT_COMPARE(>) EMU_BFLOAT_COMPARE(<=) EMU_BFLOAT_COMPARE(>=)
#undef EMU_BFLOAT_COMPARE
#define EMU_BFLOAT_ASSIGN(op)                                                                            \
  EMU_INLINE bfloat &operator op##=(bfloat &a, bfloat b) { return a = a op b; }                          \
  EMU_INLINE device bfloat &operator op##=(device bfloat &a, bfloat b) { a = bfloat(a) op b; return a; } \
  EMU_INLINE threadgroup bfloat &operator op##=(threadgroup bfloat &a, bfloat b) { a = bfloat(a) op b; return a; } \
  template <class S, class = emu_if_float<S>> EMU_INLINE bfloat &operator op##=(bfloat &a, S b) { return a = bfloat(a.value() op(float) b); } \
  template <class S, class = emu_if_float<S>, class = void> EMU_INLINE S &operator op##=(S &a, bfloat b) { return a = (S)((float)a op b.value()); }
EMU_BFLOAT_ASSIGN(+) EMU_BFLOAT_ASSIGN(-) EMU_BFLOAT_ASSIGN(*) EMU_BFLOAT_ASSIGN(/)
#undef EMU_BFLOAT_ASSIGN
EMU_INLINE constexpr bool operator!(bfloat a) { return !a.value(); }
EMU_INLINE constexpr bfloat operator-(bfloat a) { return __builtin_bit_cast(bfloat, (unsigned short)(a.bits ^ 0x8000)); }
EMU_INLINE constexpr bfloat operator+(bfloat a) { return a; }
EMU_INLINE bfloat &operator++(bfloat &a) { return a = a + 1; }
EMU_INLINE bfloat &operator--(bfloat &a) { return a = a - 1; }

// ---- vectors --------------------------------------------------------------------------------------------------------

namespace metal {
template <typename T, int N> struct vec {  // wider ones only store
  T s[N];
  EMU_MEMBER T &operator[](int i) { return s[i]; }
  EMU_MEMBER const T &operator[](int i) const { return s[i]; }
};
// One lane's share of a matrix in Apple's internal form: 64 elements over 32 lanes, two of them held.
template <typename T> struct vec<T, 64> {
  T s[2];
  EMU_MEMBER T &operator[](int i) { return s[i]; }
  EMU_MEMBER const T &operator[](int i) const { return s[i]; }
};
template <typename T, int N> struct emu_packed;
template <class T> struct emu_is_vec : false_type {};
template <class T, int N> struct emu_is_vec<vec<T, N>> : true_type {};
template <class T, int N> struct emu_is_vec<emu_packed<T, N>> : true_type {};

// Swizzles are properties: read through a getter, written through a setter (none where a component repeats).
#define EMU_P2(a, b, A, B)                                                              \
  EMU_MEMBER constexpr const vec<T, 2> emu_get_##a##b() const { return vec<T, 2>(a, b); } \
  EMU_MEMBER void emu_put_##a##b(vec<T, 2> v) { a = v.x, b = v.y; }                      \
  __declspec(property(get = emu_get_##a##b, put = emu_put_##a##b)) vec<T, 2> a##b;       \
  __declspec(property(get = emu_get_##a##b, put = emu_put_##a##b)) vec<T, 2> A##B;
#define EMU_R2(a, b, A, B)                                                              \
  EMU_MEMBER constexpr const vec<T, 2> emu_get_##a##b() const { return vec<T, 2>(a, b); } \
  __declspec(property(get = emu_get_##a##b)) vec<T, 2> a##b;                             \
  __declspec(property(get = emu_get_##a##b)) vec<T, 2> A##B;
#define EMU_P3(a, b, c, A, B, C)                                                                    \
  EMU_MEMBER constexpr const vec<T, 3> emu_get_##a##b##c() const { return vec<T, 3>(a, b, c); }       \
  EMU_MEMBER void emu_put_##a##b##c(vec<T, 3> v) { a = v.x, b = v.y, c = v.z; }                      \
  __declspec(property(get = emu_get_##a##b##c, put = emu_put_##a##b##c)) vec<T, 3> a##b##c;          \
  __declspec(property(get = emu_get_##a##b##c, put = emu_put_##a##b##c)) vec<T, 3> A##B##C;
#define EMU_R3(a, b, c, A, B, C)                                                                    \
  EMU_MEMBER constexpr const vec<T, 3> emu_get_##a##b##c() const { return vec<T, 3>(a, b, c); }       \
  __declspec(property(get = emu_get_##a##b##c)) vec<T, 3> a##b##c;                                   \
  __declspec(property(get = emu_get_##a##b##c)) vec<T, 3> A##B##C;
#define EMU_P4(a, b, c, d, A, B, C, D)                                                                    \
  EMU_MEMBER constexpr const vec<T, 4> emu_get_##a##b##c##d() const { return vec<T, 4>(a, b, c, d); }       \
  EMU_MEMBER void emu_put_##a##b##c##d(vec<T, 4> v) { a = v.x, b = v.y, c = v.z, d = v.w; }                \
  __declspec(property(get = emu_get_##a##b##c##d, put = emu_put_##a##b##c##d)) vec<T, 4> a##b##c##d;       \
  __declspec(property(get = emu_get_##a##b##c##d, put = emu_put_##a##b##c##d)) vec<T, 4> A##B##C##D;
#define EMU_R4(a, b, c, d, A, B, C, D)                                                                    \
  EMU_MEMBER constexpr const vec<T, 4> emu_get_##a##b##c##d() const { return vec<T, 4>(a, b, c, d); }       \
  __declspec(property(get = emu_get_##a##b##c##d)) vec<T, 4> a##b##c##d;                                   \
  __declspec(property(get = emu_get_##a##b##c##d)) vec<T, 4> A##B##C##D;
#define EMU_ALIAS(c, C)                                  \
  EMU_MEMBER constexpr T emu_get_##c() const { return c; }  \
  EMU_MEMBER void emu_put_##c(T v) { c = v; }               \
  __declspec(property(get = emu_get_##c, put = emu_put_##c)) T C;
#include "swizzles.inc"

#define EMU_VEC_COMMON(N)                                                                                \
  using emu_scalar = T;                                                                                  \
  vec() = default;                                                                                       \
  vec(const vec &) = default;                                                                            \
  vec &operator=(const vec &) = default;                                                                 \
  template <class U, class = enable_if_t<!is_same<U, T>::value>>                                         \
  EMU_MEMBER constexpr explicit vec(vec<U, N> v);                                                        \
  template <class U, class = enable_if_t<!is_same<U, T>::value>>                                         \
  EMU_MEMBER constexpr explicit vec(emu_packed<U, N> v) : vec(vec<U, N>(v)) {}                           \
  EMU_MEMBER constexpr vec(emu_packed<T, N> v);                                                          \
  EMU_MEMBER T &operator[](int i) { return (&x)[i]; }                                                    \
  EMU_MEMBER const T &operator[](int i) const { return (&x)[i]; }

template <typename T> struct alignas(2 * sizeof(T)) vec<T, 2> {
  T x, y;
  EMU_VEC_COMMON(2)
  EMU_MEMBER constexpr vec(T a, T b) : x(a), y(b) {}
  template <class S, class = emu_if_scalar<S>> EMU_MEMBER constexpr vec(S s) : x(static_cast<T>(s)), y(x) {}
  template <class A, class B, class = emu_if_scalar<A>, class = emu_if_scalar<B>>
  EMU_MEMBER constexpr vec(A a, B b) : x(static_cast<T>(a)), y(static_cast<T>(b)) {}
  EMU_SWIZZLE2
};
template <typename T> struct alignas(4 * sizeof(T)) vec<T, 3> {
  T x, y, z;
  EMU_VEC_COMMON(3)
  EMU_MEMBER constexpr vec(T a, T b, T c) : x(a), y(b), z(c) {}
  template <class S, class = emu_if_scalar<S>> EMU_MEMBER constexpr vec(S s) : x(static_cast<T>(s)), y(x), z(x) {}
  template <class A, class B, class C, class = emu_if_scalar<A>, class = emu_if_scalar<B>, class = emu_if_scalar<C>>
  EMU_MEMBER constexpr vec(A a, B b, C c) : x(static_cast<T>(a)), y(static_cast<T>(b)), z(static_cast<T>(c)) {}
  EMU_MEMBER constexpr vec(vec<T, 2> a, T b) : x(a.x), y(a.y), z(b) {}
  EMU_MEMBER constexpr vec(T a, vec<T, 2> b) : x(a), y(b.x), z(b.y) {}
  EMU_SWIZZLE3
};
template <typename T> struct alignas(4 * sizeof(T)) vec<T, 4> {
  T x, y, z, w;
  EMU_VEC_COMMON(4)
  EMU_MEMBER constexpr vec(T a, T b, T c, T d) : x(a), y(b), z(c), w(d) {}
  template <class S, class = emu_if_scalar<S>> EMU_MEMBER constexpr vec(S s) : x(static_cast<T>(s)), y(x), z(x), w(x) {}
  template <class A, class B, class C, class D, class = emu_if_scalar<A>, class = emu_if_scalar<B>, class = emu_if_scalar<C>, class = emu_if_scalar<D>>
  EMU_MEMBER constexpr vec(A a, B b, C c, D d) : x(static_cast<T>(a)), y(static_cast<T>(b)), z(static_cast<T>(c)), w(static_cast<T>(d)) {}
  EMU_MEMBER constexpr vec(vec<T, 2> a, T c, T d) : x(a.x), y(a.y), z(c), w(d) {}
  EMU_MEMBER constexpr vec(T a, vec<T, 2> b, T d) : x(a), y(b.x), z(b.y), w(d) {}
  EMU_MEMBER constexpr vec(T a, T b, vec<T, 2> c) : x(a), y(b), z(c.x), w(c.y) {}
  EMU_MEMBER constexpr vec(vec<T, 2> a, vec<T, 2> b) : x(a.x), y(a.y), z(b.x), w(b.y) {}
  EMU_MEMBER constexpr vec(vec<T, 3> a, T d) : x(a.x), y(a.y), z(a.z), w(d) {}
  EMU_MEMBER constexpr vec(T a, vec<T, 3> b) : x(a), y(b.x), z(b.y), w(b.z) {}
  EMU_SWIZZLE4
};

template <typename T, int N> struct emu_packed {
  using emu_scalar = T;
  T s[N];
  emu_packed() = default;
  template <class S, class = emu_if_scalar<S>> EMU_MEMBER constexpr emu_packed(S v) : emu_packed(vec<T, N>(v)) {}
  template <class A, class B, class... C> EMU_MEMBER constexpr emu_packed(A a, B b, C... c) : emu_packed(vec<T, N>(a, b, c...)) {}
  EMU_MEMBER constexpr emu_packed(vec<T, N> v) : s{} {
    s[0] = v.x, s[1] = v.y;
    if constexpr (N > 2) s[2] = v.z;
    if constexpr (N > 3) s[3] = v.w;
  }
  template <class U, class = enable_if_t<!is_same<U, T>::value>>
  EMU_MEMBER constexpr explicit emu_packed(vec<U, N> v) : emu_packed(vec<T, N>(v)) {}
  EMU_MEMBER T &operator[](int i) { return s[i]; }
  EMU_MEMBER const T &operator[](int i) const { return s[i]; }
  EMU_MEMBER constexpr T emu_get0() const { return s[0]; }
  EMU_MEMBER constexpr T emu_get1() const { return s[1]; }
  EMU_MEMBER constexpr T emu_get2() const { return s[2]; }
  EMU_MEMBER constexpr T emu_get3() const { return s[3]; }
  EMU_MEMBER void emu_put0(T v) { s[0] = v; }
  EMU_MEMBER void emu_put1(T v) { s[1] = v; }
  EMU_MEMBER void emu_put2(T v) { s[2] = v; }
  EMU_MEMBER void emu_put3(T v) { s[3] = v; }
  __declspec(property(get = emu_get0, put = emu_put0)) T x;
  __declspec(property(get = emu_get1, put = emu_put1)) T y;
  __declspec(property(get = emu_get2, put = emu_put2)) T z;
  __declspec(property(get = emu_get3, put = emu_put3)) T w;
  __declspec(property(get = emu_get0, put = emu_put0)) T r;
  __declspec(property(get = emu_get1, put = emu_put1)) T g;
  __declspec(property(get = emu_get2, put = emu_put2)) T b;
  __declspec(property(get = emu_get3, put = emu_put3)) T a;
  EMU_MEMBER const vec<T, 2> emu_get_xy() const { return vec<T, 2>(s[0], s[1]); }
  EMU_MEMBER void emu_put_xy(vec<T, 2> v) { s[0] = v.x, s[1] = v.y; }
  __declspec(property(get = emu_get_xy, put = emu_put_xy)) vec<T, 2> xy;
  EMU_MEMBER const vec<T, 2> emu_get_zw() const { return vec<T, 2>(s[2], s[3]); }
  EMU_MEMBER void emu_put_zw(vec<T, 2> v) { s[2] = v.x, s[3] = v.y; }
  __declspec(property(get = emu_get_zw, put = emu_put_zw)) vec<T, 2> zw;
  EMU_MEMBER const vec<T, 3> emu_get_xyz() const { return vec<T, 3>(s[0], s[1], s[2]); }
  EMU_MEMBER void emu_put_xyz(vec<T, 3> v) { s[0] = v.x, s[1] = v.y, s[2] = v.z; }
  __declspec(property(get = emu_get_xyz, put = emu_put_xyz)) vec<T, 3> xyz;
};

#define EMU_VEC_CTORS(N, ...)                                                                                          \
  template <class T> template <class U, class> EMU_INLINE constexpr vec<T, N>::vec(vec<U, N> v) : vec(__VA_ARGS__) {}  \
  template <class T> EMU_INLINE constexpr vec<T, N>::vec(emu_packed<T, N> v)
EMU_VEC_CTORS(2, static_cast<T>(v.x), static_cast<T>(v.y)) : vec(v.s[0], v.s[1]) {}
EMU_VEC_CTORS(3, static_cast<T>(v.x), static_cast<T>(v.y), static_cast<T>(v.z)) : vec(v.s[0], v.s[1], v.s[2]) {}
EMU_VEC_CTORS(4, static_cast<T>(v.x), static_cast<T>(v.y), static_cast<T>(v.z), static_cast<T>(v.w)) : vec(v.s[0], v.s[1], v.s[2], v.s[3]) {}

// Applies F to each component of the vectors: EMU_MAP(float, N, a.EMU_C + b.EMU_C) is not expressible, so spelt out.
#define EMU_MAP(R, N, F)                                                                        \
  do {                                                                                          \
    if constexpr (N == 2) return vec<R, N>(R(F(x)), R(F(y)));                                   \
    else if constexpr (N == 3) return vec<R, N>(R(F(x)), R(F(y)), R(F(z)));                     \
    else return vec<R, N>(R(F(x)), R(F(y)), R(F(z)), R(F(w)));                                  \
  } while (0)

template <class V> struct emu_vec_of {};
template <class T, int N> struct emu_vec_of<vec<T, N>> { using type = vec<T, N>; };
template <class T, int N> struct emu_vec_of<emu_packed<T, N>> { using type = vec<T, N>; };

#define EMU_VEC_BINARY(op, R)                                                                                          \
  template <class T, int N> EMU_INLINE constexpr vec<R, N> operator op(vec<T, N> a, vec<T, N> b) { EMU_MAP(R, N, EMU_F); } \
  template <class T, int N, class S, class = emu_if_scalar<S>>                                                         \
  EMU_INLINE constexpr vec<R, N> operator op(vec<T, N> a, S b) { return a op vec<T, N>(b); }                           \
  template <class T, int N, class S, class = emu_if_scalar<S>>                                                         \
  EMU_INLINE constexpr vec<R, N> operator op(S a, vec<T, N> b) { return vec<T, N>(a) op b; }                           \
  template <class T, int N> EMU_INLINE constexpr vec<R, N> operator op(emu_packed<T, N> a, emu_packed<T, N> b) { return vec<T, N>(a) op vec<T, N>(b); } \
  template <class T, int N> EMU_INLINE constexpr vec<R, N> operator op(emu_packed<T, N> a, vec<T, N> b) { return vec<T, N>(a) op b; } \
  template <class T, int N> EMU_INLINE constexpr vec<R, N> operator op(vec<T, N> a, emu_packed<T, N> b) { return a op vec<T, N>(b); } \
  template <class T, int N, class S, class = emu_if_scalar<S>>                                                         \
  EMU_INLINE constexpr vec<R, N> operator op(emu_packed<T, N> a, S b) { return vec<T, N>(a) op vec<T, N>(b); }         \
  template <class T, int N, class S, class = emu_if_scalar<S>>                                                         \
  EMU_INLINE constexpr vec<R, N> operator op(S a, emu_packed<T, N> b) { return vec<T, N>(a) op vec<T, N>(b); }
#define EMU_F(c) (a.c + b.c)
EMU_VEC_BINARY(+, T)
#undef EMU_F
#define EMU_F(c) (a.c - b.c)
EMU_VEC_BINARY(-, T)
#undef EMU_F
#define EMU_F(c) (a.c * b.c)
EMU_VEC_BINARY(*, T)
#undef EMU_F
#define EMU_F(c) (a.c / b.c)
EMU_VEC_BINARY(/, T)
#undef EMU_F
#define EMU_F(c) (a.c % b.c)
EMU_VEC_BINARY(%, T)
#undef EMU_F
#define EMU_F(c) (a.c & b.c)
EMU_VEC_BINARY(&, T)
#undef EMU_F
#define EMU_F(c) (a.c | b.c)
EMU_VEC_BINARY(|, T)
#undef EMU_F
#define EMU_F(c) (a.c ^ b.c)
EMU_VEC_BINARY(^, T)
#undef EMU_F
#define EMU_F(c) (a.c << (b.c & T(sizeof(T) * 8 - 1)))
EMU_VEC_BINARY(<<, T)
#undef EMU_F
#define EMU_F(c) (a.c >> (b.c & T(sizeof(T) * 8 - 1)))
EMU_VEC_BINARY(>>, T)
#undef EMU_F
#define EMU_F(c) (a.c == b.c)
EMU_VEC_BINARY(==, bool)
#undef EMU_F
#define EMU_F(c) (a.c != b.c)
EMU_VEC_BINARY(!=, bool)
#undef EMU_F
#define EMU_F(c) (a.c < b.c)
EMU_VEC_BINARY(<, bool)
#undef EMU_F
#define EMU_F(c) (a.c > b.c)
EMU_VEC_BINARY(>, bool)
#undef EMU_F
#define EMU_F(c) (a.c <= b.c)
EMU_VEC_BINARY(<=, bool)
#undef EMU_F
#define EMU_F(c) (a.c >= b.c)
EMU_VEC_BINARY(>=, bool)
#undef EMU_F
#define EMU_F(c) (a.c && b.c)
EMU_VEC_BINARY(&&, bool)
#undef EMU_F
#define EMU_F(c) (a.c || b.c)
EMU_VEC_BINARY(||, bool)
#undef EMU_F
#undef EMU_VEC_BINARY
template <class T, int N> EMU_INLINE constexpr vec<T, N> operator-(vec<T, N> a) {
#define EMU_F(c) (-a.c)
  EMU_MAP(T, N, EMU_F);
#undef EMU_F
}
template <class T, int N> EMU_INLINE constexpr vec<T, N> operator+(vec<T, N> a) { return a; }
template <class T, int N> EMU_INLINE constexpr vec<T, N> operator-(emu_packed<T, N> a) { return -vec<T, N>(a); }
template <class T, int N> EMU_INLINE constexpr vec<T, N> operator~(vec<T, N> a) {
#define EMU_F(c) (~a.c)
  EMU_MAP(T, N, EMU_F);
#undef EMU_F
}
template <class T, int N> EMU_INLINE constexpr vec<bool, N> operator!(vec<T, N> a) {
#define EMU_F(c) (!a.c)
  EMU_MAP(bool, N, EMU_F);
#undef EMU_F
}
// A left operand may lie in any writable address space, so it is bound as V & of whatever space.
#define EMU_VEC_ASSIGN_IN(op, V, space)                                                                             \
  template <class T, int N> EMU_INLINE space V<T, N> &operator op##=(space V<T, N> &a, vec<T, N> b) {               \
    a = vec<T, N>(a) op b;                                                                                          \
    return a;                                                                                                       \
  }                                                                                                                 \
  template <class T, int N, class S, class = emu_if_scalar<S>>                                                      \
  EMU_INLINE space V<T, N> &operator op##=(space V<T, N> &a, S b) {                                                 \
    a = vec<T, N>(a) op vec<T, N>(b);                                                                               \
    return a;                                                                                                       \
  }                                                                                                                 \
  template <class T, int N> EMU_INLINE space V<T, N> &operator op##=(space V<T, N> &a, emu_packed<T, N> b) {        \
    a = vec<T, N>(a) op vec<T, N>(b);                                                                               \
    return a;                                                                                                       \
  }
#define EMU_VEC_ASSIGN(op)                                                                                    \
  EMU_VEC_ASSIGN_IN(op, vec, ) EMU_VEC_ASSIGN_IN(op, vec, device) EMU_VEC_ASSIGN_IN(op, vec, threadgroup)     \
  EMU_VEC_ASSIGN_IN(op, emu_packed, ) EMU_VEC_ASSIGN_IN(op, emu_packed, device) EMU_VEC_ASSIGN_IN(op, emu_packed, threadgroup)
EMU_VEC_ASSIGN(+) EMU_VEC_ASSIGN(-) EMU_VEC_ASSIGN(*) EMU_VEC_ASSIGN(/) EMU_VEC_ASSIGN(%)
EMU_VEC_ASSIGN(&) EMU_VEC_ASSIGN(|) EMU_VEC_ASSIGN(^) EMU_VEC_ASSIGN(<<) EMU_VEC_ASSIGN(>>)
#undef EMU_VEC_ASSIGN
#undef EMU_VEC_ASSIGN_IN
template <class T, int N> EMU_INLINE vec<T, N> &operator++(vec<T, N> &a) { return a += 1; }
template <class T, int N> EMU_INLINE vec<T, N> &operator--(vec<T, N> &a) { return a -= 1; }

// The rewriter wraps branches of ?: that name memory in this: a vector or bfloat is loaded, as a builtin type would be.
template <class T> struct emu_loads : false_type {};
template <class T, int N> struct emu_loads<vec<T, N>> : true_type {};
template <class T, int N> struct emu_loads<emu_packed<T, N>> : true_type {};
template <> struct emu_loads<bfloat> : true_type {};
template <class T> EMU_INLINE constexpr decltype(auto) emu_value_of(T &&v) {
  if constexpr (emu_loads<emu_value_t<T>>::value || __is_class(emu_value_t<T>)) return emu_value_t<T>(v);
  else return static_cast<T &&>(v);
}

// Chooses what a member of either form means: the scalar itself, or a vector's components.
template <class T> struct emu_element { using type = T; static constexpr int count = 1; };
template <class T, int N> struct emu_element<vec<T, N>> { using type = T; static constexpr int count = N; };
template <class T, int N> struct emu_element<emu_packed<T, N>> { using type = T; static constexpr int count = N; };

// ---- bit casts ------------------------------------------------------------------------------------------------------

template <class To, class From> EMU_INLINE constexpr To as_type(From f) {
  static_assert(sizeof(To) == sizeof(From), "as_type needs types of one size");
  return __builtin_bit_cast(To, f);
}

// ---- matrices: columns of R components ------------------------------------------------------------------------------

template <typename T, int C, int R = C> struct matrix {
  vec<T, R> columns[C];
  matrix() = default;
  EMU_MEMBER constexpr explicit matrix(T diagonal) : columns{} {
    for (int c = 0; c < C; c++) columns[c] = vec<T, R>(T(0));
    for (int c = 0; c < (C < R ? C : R); c++) columns[c][c] = diagonal;
  }
  template <class... A, class = enable_if_t<sizeof...(A) == C && (is_convertible<A, vec<T, R>>::value && ...) && (!is_arithmetic<A>::value && ...)>>
  EMU_MEMBER constexpr matrix(A... a) : columns{vec<T, R>(a)...} {}
  template <class... A, class = enable_if_t<sizeof...(A) == C * R && (is_arithmetic<A>::value && ...)>, class = void>
  EMU_MEMBER constexpr matrix(A... a) {
    const T v[] = {static_cast<T>(a)...};
    for (int c = 0; c < C; c++)
      for (int r = 0; r < R; r++) columns[c][r] = v[c * R + r];
  }
  template <class U, class = enable_if_t<!is_same<U, T>::value>> EMU_MEMBER explicit matrix(matrix<U, C, R> m) {
    for (int c = 0; c < C; c++) columns[c] = vec<T, R>(m.columns[c]);
  }
  EMU_MEMBER vec<T, R> &operator[](int c) { return columns[c]; }
  EMU_MEMBER const vec<T, R> &operator[](int c) const { return columns[c]; }
};
#define EMU_MATRIX_OP(op)                                                                                              \
  template <class T, int C, int R> EMU_INLINE matrix<T, C, R> operator op(matrix<T, C, R> a, matrix<T, C, R> b) {       \
    for (int c = 0; c < C; c++) a.columns[c] op##= b.columns[c];                                                        \
    return a;                                                                                                           \
  }                                                                                                                     \
  template <class T, int C, int R> EMU_INLINE matrix<T, C, R> &operator op##=(matrix<T, C, R> &a, matrix<T, C, R> b) { return a = a op b; }
EMU_MATRIX_OP(+) EMU_MATRIX_OP(-)
#undef EMU_MATRIX_OP
template <class T, int C, int R, class S, class = emu_if_scalar<S>> EMU_INLINE matrix<T, C, R> operator*(matrix<T, C, R> a, S s) {
  for (int c = 0; c < C; c++) a.columns[c] *= s;
  return a;
}
template <class T, int C, int R, class S, class = emu_if_scalar<S>> EMU_INLINE matrix<T, C, R> operator*(S s, matrix<T, C, R> a) { return a * s; }
template <class T, int C, int R, class S, class = emu_if_scalar<S>> EMU_INLINE matrix<T, C, R> &operator*=(matrix<T, C, R> &a, S s) { return a = a * s; }
template <class T, int C, int R> EMU_INLINE vec<T, R> operator*(matrix<T, C, R> m, vec<T, C> v) {
  vec<T, R> r = m.columns[0] * v[0];
  for (int c = 1; c < C; c++) r += m.columns[c] * v[c];
  return r;
}
template <class T, int C, int R> EMU_INLINE vec<T, C> operator*(vec<T, R> v, matrix<T, C, R> m) {
  vec<T, C> out;
  for (int c = 0; c < C; c++) {
    T sum = v[0] * m.columns[c][0];
    for (int r = 1; r < R; r++) sum += v[r] * m.columns[c][r];
    out[c] = sum;
  }
  return out;
}
template <class T, int C, int R, int K> EMU_INLINE matrix<T, C, R> operator*(matrix<T, K, R> a, matrix<T, C, K> b) {
  matrix<T, C, R> out;
  for (int c = 0; c < C; c++) out.columns[c] = a * b.columns[c];
  return out;
}
template <class T, int C, int R> EMU_INLINE matrix<T, R, C> transpose(matrix<T, C, R> m) {
  matrix<T, R, C> out;
  for (int c = 0; c < C; c++)
    for (int r = 0; r < R; r++) out.columns[r][c] = m.columns[c][r];
  return out;
}
template <class T> EMU_INLINE T determinant(matrix<T, 2, 2> m) { return m[0][0] * m[1][1] - m[1][0] * m[0][1]; }
template <class T> EMU_INLINE T determinant(matrix<T, 3, 3> m) {
  return m[0][0] * (m[1][1] * m[2][2] - m[2][1] * m[1][2]) - m[1][0] * (m[0][1] * m[2][2] - m[2][1] * m[0][2]) +
         m[2][0] * (m[0][1] * m[1][2] - m[1][1] * m[0][2]);
}
template <class T> EMU_INLINE T determinant(matrix<T, 4, 4> m) {
  T sum = 0;
  for (int c = 0; c < 4; c++) {
    matrix<T, 3, 3> minor;
    for (int i = 0, k = 0; i < 4; i++) {
      if (i == c) continue;
      minor[k++] = vec<T, 3>(m[i][1], m[i][2], m[i][3]);
    }
    T term = m[c][0] * determinant(minor);
    sum += c % 2 ? -term : term;
  }
  return sum;
}

// ---- array ----------------------------------------------------------------------------------------------------------

template <typename T, size_t N> struct array {
  T emu_items[N];
  EMU_MEMBER constexpr T &operator[](size_t i) { return emu_items[i]; }
  EMU_MEMBER constexpr const T &operator[](size_t i) const { return emu_items[i]; }
  EMU_MEMBER constexpr size_t size() const { return N; }
  EMU_MEMBER constexpr bool empty() const { return N == 0; }
  EMU_MEMBER constexpr T *begin() { return emu_items; }
  EMU_MEMBER constexpr const T *begin() const { return emu_items; }
  EMU_MEMBER constexpr T *end() { return emu_items + N; }
  EMU_MEMBER constexpr const T *end() const { return emu_items + N; }
  EMU_MEMBER constexpr T &front() { return emu_items[0]; }
  EMU_MEMBER constexpr T &back() { return emu_items[N - 1]; }
  EMU_MEMBER constexpr T *data() { return emu_items; }
  EMU_MEMBER constexpr const T *data() const { return emu_items; }
  EMU_MEMBER void fill(const T &v) { for (size_t i = 0; i < N; i++) emu_items[i] = v; }
};

// ---- limits ---------------------------------------------------------------------------------------------------------

template <class T> struct numeric_limits {
  static constexpr bool is_specialized = false;
};
template <class T> struct emu_integer_limits {
  static constexpr bool is_specialized = true, is_integer = true, is_exact = true, is_signed = T(-1) < T(0), is_bounded = true;
  static constexpr bool has_infinity = false, has_quiet_NaN = false, has_signaling_NaN = false, is_iec559 = false, is_modulo = !is_signed;
  static constexpr int radix = 2, digits = sizeof(T) * 8 - is_signed, digits10 = digits * 30103 / 100000, max_digits10 = 0;
  EMU_MEMBER static constexpr T min() { return is_signed ? T(1ull << (sizeof(T) * 8 - 1)) : T(0); }
  EMU_MEMBER static constexpr T max() { return is_signed ? T(~0ull >> (65 - sizeof(T) * 8)) : T(~0ull); }
  EMU_MEMBER static constexpr T lowest() { return min(); }
  EMU_MEMBER static constexpr T epsilon() { return 0; }
  EMU_MEMBER static constexpr T infinity() { return 0; }
  EMU_MEMBER static constexpr T quiet_NaN() { return 0; }
};
#define EMU_INTEGER_LIMITS(T) template <> struct numeric_limits<T> : emu_integer_limits<T> {};
EMU_INTEGER_LIMITS(char) EMU_INTEGER_LIMITS(int8_t) EMU_INTEGER_LIMITS(uchar) EMU_INTEGER_LIMITS(short) EMU_INTEGER_LIMITS(ushort)
EMU_INTEGER_LIMITS(int) EMU_INTEGER_LIMITS(uint) EMU_INTEGER_LIMITS(long) EMU_INTEGER_LIMITS(ulong)
EMU_INTEGER_LIMITS(long long) EMU_INTEGER_LIMITS(unsigned long long)
template <> struct numeric_limits<bool> {
  static constexpr bool is_specialized = true, is_integer = true, is_exact = true, is_signed = false, has_infinity = false, has_quiet_NaN = false;
  static constexpr int radix = 2, digits = 1, digits10 = 0;
  EMU_MEMBER static constexpr bool min() { return false; }
  EMU_MEMBER static constexpr bool max() { return true; }
  EMU_MEMBER static constexpr bool lowest() { return false; }
};
#define EMU_FLOAT_LIMITS(T, B, mant, dig10, maxdig10, maxexp, minexp, maxbits, minbits, epsbits, infbits, nanbits, denbits, lowbits)   \
  template <> struct numeric_limits<T> {                                                                                          \
    static constexpr bool is_specialized = true, is_integer = false, is_exact = false, is_signed = true, is_bounded = true;       \
    static constexpr bool has_infinity = true, has_quiet_NaN = true, has_signaling_NaN = true, is_iec559 = true, is_modulo = false;                             \
    static constexpr int radix = 2, digits = mant, digits10 = dig10, max_digits10 = maxdig10, max_exponent = maxexp, min_exponent = minexp;                  \
    EMU_MEMBER static constexpr T max() { return __builtin_bit_cast(T, B(maxbits)); }                                             \
    EMU_MEMBER static constexpr T min() { return __builtin_bit_cast(T, B(minbits)); }                                             \
    EMU_MEMBER static constexpr T lowest() { return __builtin_bit_cast(T, B(lowbits)); }                                          \
    EMU_MEMBER static constexpr T epsilon() { return __builtin_bit_cast(T, B(epsbits)); }                                         \
    EMU_MEMBER static constexpr T infinity() { return __builtin_bit_cast(T, B(infbits)); }                                        \
    EMU_MEMBER static constexpr T quiet_NaN() { return __builtin_bit_cast(T, B(nanbits)); }                                       \
    EMU_MEMBER static constexpr T signaling_NaN() { return __builtin_bit_cast(T, B(nanbits)); }                                       \
    EMU_MEMBER static constexpr T denorm_min() { return __builtin_bit_cast(T, B(denbits)); }                                      \
    EMU_MEMBER static constexpr T round_error() { return (T)0.5f; }                                                               \
  };
EMU_FLOAT_LIMITS(float, uint, 24, 6, 9, 128, -125, 0x7f7fffff, 0x00800000, 0x34000000, 0x7f800000, 0x7fc00000, 1, 0xff7fffff)
EMU_FLOAT_LIMITS(half, ushort, 11, 3, 5, 16, -13, 0x7bff, 0x0400, 0x1400, 0x7c00, 0x7e00, 1, 0xfbff)
EMU_FLOAT_LIMITS(bfloat, ushort, 8, 2, 4, 128, -125, 0x7f7f, 0x0080, 0x3c00, 0x7f80, 0x7fc0, 1, 0xff7f)

// ---- names ----------------------------------------------------------------------------------------------------------

#define EMU_VECTOR_NAMES(T)                                                                               \
  typedef vec<T, 2> T##2; typedef vec<T, 3> T##3; typedef vec<T, 4> T##4;                                 \
  typedef emu_packed<T, 2> packed_##T##2; typedef emu_packed<T, 3> packed_##T##3; typedef emu_packed<T, 4> packed_##T##4;
EMU_VECTOR_NAMES(bool) EMU_VECTOR_NAMES(char) EMU_VECTOR_NAMES(uchar) EMU_VECTOR_NAMES(short) EMU_VECTOR_NAMES(ushort)
EMU_VECTOR_NAMES(int) EMU_VECTOR_NAMES(uint) EMU_VECTOR_NAMES(long) EMU_VECTOR_NAMES(ulong)
EMU_VECTOR_NAMES(half) EMU_VECTOR_NAMES(float) EMU_VECTOR_NAMES(bfloat)
#define EMU_MATRIX_NAMES(T)                                                                               \
  typedef matrix<T, 2, 2> T##2x2; typedef matrix<T, 2, 3> T##2x3; typedef matrix<T, 2, 4> T##2x4;         \
  typedef matrix<T, 3, 2> T##3x2; typedef matrix<T, 3, 3> T##3x3; typedef matrix<T, 3, 4> T##3x4;         \
  typedef matrix<T, 4, 2> T##4x2; typedef matrix<T, 4, 3> T##4x3; typedef matrix<T, 4, 4> T##4x4;
EMU_MATRIX_NAMES(half) EMU_MATRIX_NAMES(float)
// bfloat matrices are no MSL names; production code defines its own.
template <typename T, int N> using packed_vec = emu_packed<T, N>;
using ::bfloat; using ::half; using ::uchar; using ::ushort; using ::uint; using ::ulong; using ::size_t; using ::ptrdiff_t;
using ::int8_t; using ::uint8_t; using ::int16_t; using ::uint16_t; using ::int32_t; using ::uint32_t; using ::int64_t; using ::uint64_t;
}  // namespace metal

#define EMU_USE(T) using metal::T##2; using metal::T##3; using metal::T##4; using metal::packed_##T##2; using metal::packed_##T##3; using metal::packed_##T##4;
EMU_USE(bool) EMU_USE(char) EMU_USE(uchar) EMU_USE(short) EMU_USE(ushort) EMU_USE(int) EMU_USE(uint) EMU_USE(long) EMU_USE(ulong)
EMU_USE(half) EMU_USE(float) EMU_USE(bfloat)
#undef EMU_USE
#define EMU_USE(T) using metal::T##2x2; using metal::T##2x3; using metal::T##2x4; using metal::T##3x2; using metal::T##3x3; using metal::T##3x4; \
  using metal::T##4x2; using metal::T##4x3; using metal::T##4x4;
EMU_USE(half) EMU_USE(float)
#undef EMU_USE
using metal::as_type;
