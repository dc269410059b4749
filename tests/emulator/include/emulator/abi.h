// Numbers that kernels and the runtime agree on. Included by both sides, so it holds macros and plain C only.
#pragma once

enum {  // scalar types of simdgroup and atomic functions
  EMU_F32, EMU_F16, EMU_BF16, EMU_I8, EMU_U8, EMU_I16, EMU_U16, EMU_I32, EMU_U32, EMU_I64, EMU_U64
};
enum {  // simdgroup functions; EMU_QUAD set: over four lanes
  EMU_SUM, EMU_PRODUCT, EMU_MIN, EMU_MAX, EMU_AND, EMU_OR, EMU_XOR,
  EMU_PREFIX_INCLUSIVE_SUM, EMU_PREFIX_EXCLUSIVE_SUM, EMU_PREFIX_INCLUSIVE_PRODUCT, EMU_PREFIX_EXCLUSIVE_PRODUCT,
  EMU_BALLOT, EMU_ALL, EMU_ANY, EMU_IS_FIRST, EMU_BROADCAST_FIRST,
  // From here on a lane reads another lane, whose absence is an error.
  EMU_BROADCAST, EMU_SHUFFLE_INDEX, EMU_SHUFFLE_XOR, EMU_SHUFFLE_UP, EMU_SHUFFLE_DOWN, EMU_ROTATE_UP, EMU_ROTATE_DOWN,
  EMU_FILL_UP, EMU_FILL_DOWN,
  EMU_QUAD = 64
};
enum {
  EMU_ATOMIC_ADD, EMU_ATOMIC_SUB, EMU_ATOMIC_MIN, EMU_ATOMIC_MAX, EMU_ATOMIC_AND, EMU_ATOMIC_OR, EMU_ATOMIC_XOR,
  EMU_ATOMIC_EXCHANGE, EMU_ATOMIC_STORE, EMU_ATOMIC_LOAD, EMU_ATOMIC_COMPARE_EXCHANGE
};
enum { EMU_MATRIX_F32, EMU_MATRIX_F16, EMU_MATRIX_BF16, EMU_MATRIX_TRANSPOSED = 4 };
// NaNs with payloads of their own, which arithmetic hands on; it sets the quiet bit, so readers ignore that one.
#define EMU_POISON_F32 0x7fa5d00du
#define EMU_POISON_F16 0x7d5au
#define EMU_POISON_BF16 0x7f9au
#define EMU_QUIET_F32 0x00400000u
#define EMU_QUIET_F16 0x0200u
#define EMU_QUIET_BF16 0x0040u

enum {  // rows of emu_frame::attributes
  EMU_THREAD_POSITION_IN_GRID, EMU_THREAD_POSITION_IN_THREADGROUP, EMU_THREADGROUP_POSITION_IN_GRID, EMU_THREADS_PER_GRID,
  EMU_THREADS_PER_THREADGROUP, EMU_THREADGROUPS_PER_GRID, EMU_DISPATCH_THREADS_PER_THREADGROUP, EMU_GRID_ORIGIN, EMU_GRID_SIZE,
  EMU_THREAD_INDEX_IN_THREADGROUP, EMU_THREAD_INDEX_IN_SIMDGROUP, EMU_SIMDGROUP_INDEX_IN_THREADGROUP, EMU_THREADS_PER_SIMDGROUP,
  EMU_SIMDGROUPS_PER_THREADGROUP, EMU_DISPATCH_SIMDGROUPS_PER_THREADGROUP, EMU_DISPATCH_QUADGROUPS_PER_THREADGROUP,
  EMU_THREAD_INDEX_IN_QUADGROUP, EMU_QUADGROUP_INDEX_IN_THREADGROUP, EMU_QUADGROUPS_PER_THREADGROUP, EMU_THREAD_EXECUTION_WIDTH,
  EMU_ATTRIBUTE_COUNT
};
struct emu_frame {
  void *const *buffers;
  void *const *shared;
  unsigned attributes[EMU_ATTRIBUTE_COUNT][4];
};
struct emu_argument_form {  // one per kernel parameter that is bound memory, in emu_argument_forms[]
  unsigned size, align, is_reference, is_writable, is_constant;
  unsigned float_bytes;  // of one element's floating-point components: 4, 2, or 0
};
