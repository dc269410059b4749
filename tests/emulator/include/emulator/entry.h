// How the runtime calls a kernel: the generated entry function builds each parameter out of a frame.
#pragma once
#include "threads.h"

namespace metal {
template <class F> struct emu_signature;
template <int i, class A, class... B> struct emu_nth { using type = typename emu_nth<i - 1, B...>::type; };
template <class A, class... B> struct emu_nth<0, A, B...> { using type = A; };
template <class R, class... A> struct emu_signature<R (*)(A...)> {
  static_assert(is_void<R>::value, "a kernel returns void");
  template <int i> using parameter = typename emu_nth<i, A...>::type;
};
template <class T> struct emu_extent { static constexpr unsigned size = sizeof(T), align = alignof(T); };
template <> struct emu_extent<void> { static constexpr unsigned size = 1, align = 1; };
template <class T> struct emu_is_constant : false_type {};
template <class T> struct emu_is_constant<__attribute__((opencl_global_host)) T> : true_type {};
template <class T> struct emu_float_bytes { static constexpr unsigned value = 0; };
template <> struct emu_float_bytes<float> { static constexpr unsigned value = 4; };
template <> struct emu_float_bytes<half> { static constexpr unsigned value = 2; };
template <> struct emu_float_bytes<bfloat> { static constexpr unsigned value = 2; };
template <class P> struct emu_memory {
  static_assert(__is_pointer(P) || __is_reference(P), "a buffer or threadgroup parameter is a pointer or a reference");
  static constexpr bool is_reference = __is_reference(P);
  using pointee = conditional_t<is_reference, remove_reference_t<P>, remove_pointer_t<P>>;
  using bare = remove_cv_t<typename emu_strip_space<remove_cv_t<pointee>>::type>;
  static constexpr emu_argument_form form = {emu_extent<bare>::size, emu_extent<bare>::align, is_reference, !__is_const(pointee), emu_is_constant<remove_const_t<pointee>>::value,
                                              emu_float_bytes<typename emu_element<bare>::type>::value};
  static EMU_INLINE P bind(void *p) {
    if constexpr (is_reference) return *(pointee *)(ulong)p;
    else return (P)(ulong)p;
  }
};
template <class T> EMU_INLINE T emu_attribute(const unsigned (&v)[4]) {
  using V = remove_cv_t<T>;
  if constexpr (emu_element<V>::count == 1) return T(v[0]);
  else if constexpr (emu_element<V>::count == 2) return T(v[0], v[1]);
  else return T(v[0], v[1], v[2]);
}
}  // namespace metal
namespace metal { extern const bool emu_unknown_bool; }
