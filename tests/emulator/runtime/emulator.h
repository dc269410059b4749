// The emulator's C interface: compile Metal Shading Language text, make a compute pipeline, run a dispatch over host memory.
//
// Rules of the room:
//  * No function throws, exits or prints. A failing call returns NULL (or nonzero) and sets `*error`, a string that
//    the caller frees with emu_string_free; `error` may be NULL.
//  * All functions may be called concurrently. Libraries and pipelines are immutable and reference counted.
//  * Strings returned through `const char *` live as long as the object they were asked of.
//  * Structures start with `size`, set by the caller to sizeof(the structure); fields left zero mean the default.
#ifndef EMULATOR_H
#define EMULATOR_H

#include <stdint.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

#define EMU_API __attribute__((visibility("default")))

#define EMU_MAX_BUFFERS 31
#define EMU_MAX_THREADGROUP_ARGUMENTS 31
#define EMU_MAX_THREADS_PER_THREADGROUP 1024
#define EMU_MAX_THREADGROUP_MEMORY 32768

typedef struct emu_library emu_library;
typedef struct emu_pipeline emu_pipeline;
typedef struct emu_result emu_result;

EMU_API const char *emu_version(void);
EMU_API void emu_string_free(char *string);

// ---- where the compiler lives ---------------------------------------------------------------------------------------

// Each setting falls back to an environment variable, then to a default; set them before the first compile.
//   zig           EMU_ZIG           the `zig` program whose `zig clang` is used; default: `zig` on PATH
//   include_dir   EMU_INCLUDE_DIR   tests/emulator/include; default: found relative to the library's own file
//   cache_dir     EMU_CACHE_DIR     default: $XDG_CACHE_HOME/metal-emulator or ~/.cache/metal-emulator
// NULL leaves a setting as it is.
EMU_API void emu_configure(const char *zig, const char *include_dir, const char *cache_dir);

// ---- libraries ------------------------------------------------------------------------------------------------------

typedef struct emu_macro {
  const char *name;
  const char *value;  // NULL: defined as 1
} emu_macro;

typedef struct emu_compile_options {
  size_t size;
  const char *file_name;        // shown in messages and reports; default "program_source"
  uint32_t language_version;    // MTLLanguageVersion layout: (major << 16) | minor, 3.1 = 0x30001; default 3.1
  int32_t fast_math;            // 0: default (on, as Metal's), 1: on, -1: off
  const emu_macro *macros;
  size_t macro_count;
  const char *const *include_paths;  // for tools only; Metal's run-time compiler has none
  size_t include_path_count;
} emu_compile_options;

// Compiles in full (all explicit instantiations included) to find errors. `*error` holds clang's messages.
// On success `*error` may hold warnings.
EMU_API emu_library *emu_library_create(const char *source, const emu_compile_options *options, char **error);
// The strict dialect check: 0 if the source compiles and never converts between address spaces; else `*error` says where.
EMU_API int emu_strict_check(const char *source, const emu_compile_options *options, char **error);
EMU_API emu_library *emu_library_retain(emu_library *library);
EMU_API void emu_library_release(emu_library *library);

EMU_API size_t emu_library_function_count(const emu_library *library);
EMU_API const char *emu_library_function_name(const emu_library *library, size_t index);  // host_name where given
EMU_API int64_t emu_library_find_function(const emu_library *library, const char *name);   // -1: no such function
EMU_API uint32_t emu_library_language_version(const emu_library *library);

typedef enum emu_data_type {  // the values are MTLDataType's
  EMU_TYPE_NONE = 0, EMU_TYPE_STRUCT = 1, EMU_TYPE_ARRAY = 2,
  EMU_TYPE_FLOAT = 3, EMU_TYPE_FLOAT2 = 4, EMU_TYPE_FLOAT3 = 5, EMU_TYPE_FLOAT4 = 6,
  EMU_TYPE_HALF = 16, EMU_TYPE_HALF2 = 17, EMU_TYPE_HALF3 = 18, EMU_TYPE_HALF4 = 19,
  EMU_TYPE_INT = 29, EMU_TYPE_INT2 = 30, EMU_TYPE_INT3 = 31, EMU_TYPE_INT4 = 32,
  EMU_TYPE_UINT = 33, EMU_TYPE_UINT2 = 34, EMU_TYPE_UINT3 = 35, EMU_TYPE_UINT4 = 36,
  EMU_TYPE_SHORT = 37, EMU_TYPE_SHORT2 = 38, EMU_TYPE_SHORT3 = 39, EMU_TYPE_SHORT4 = 40,
  EMU_TYPE_USHORT = 41, EMU_TYPE_USHORT2 = 42, EMU_TYPE_USHORT3 = 43, EMU_TYPE_USHORT4 = 44,
  EMU_TYPE_CHAR = 45, EMU_TYPE_CHAR2 = 46, EMU_TYPE_CHAR3 = 47, EMU_TYPE_CHAR4 = 48,
  EMU_TYPE_UCHAR = 49, EMU_TYPE_UCHAR2 = 50, EMU_TYPE_UCHAR3 = 51, EMU_TYPE_UCHAR4 = 52,
  EMU_TYPE_BOOL = 53, EMU_TYPE_BOOL2 = 54, EMU_TYPE_BOOL3 = 55, EMU_TYPE_BOOL4 = 56,
  EMU_TYPE_LONG = 81, EMU_TYPE_LONG2 = 82, EMU_TYPE_LONG3 = 83, EMU_TYPE_LONG4 = 84,
  EMU_TYPE_ULONG = 85, EMU_TYPE_ULONG2 = 86, EMU_TYPE_ULONG3 = 87, EMU_TYPE_ULONG4 = 88,
  EMU_TYPE_BFLOAT = 121, EMU_TYPE_BFLOAT2 = 122, EMU_TYPE_BFLOAT3 = 123, EMU_TYPE_BFLOAT4 = 124
} emu_data_type;

typedef struct emu_function_constant {
  const char *name;
  uint32_t index;
  uint32_t type;       // emu_data_type
  uint32_t data_size;  // bytes of one value
  int32_t required;    // 0 where every use in the source is guarded by is_function_constant_defined
} emu_function_constant;

// Function constants of the whole library; a pipeline fails only over those which its function really reads.
EMU_API size_t emu_library_constant_count(const emu_library *library);
EMU_API int emu_library_constant(const emu_library *library, size_t index, emu_function_constant *out);

// ---- pipelines ------------------------------------------------------------------------------------------------------

typedef struct emu_constant_value {
  const char *name;   // NULL: by index
  uint32_t index;
  uint32_t type;      // emu_data_type of `data`; 0: taken as the declared type. A wrong type fails, as on Metal.
  const void *data;
} emu_constant_value;

typedef struct emu_pipeline_options {
  size_t size;
  const char *function;               // host name
  const emu_constant_value *constants;
  size_t constant_count;
  uint32_t simd_width;                // 32 (default) or 64
  uint32_t max_total_threads;         // 0: 1024, or the kernel's [[max_total_threads_per_threadgroup]]
  int32_t fast;                       // 1: compile the unchecked variant now, 0: the checked one; the other on first use
} emu_pipeline_options;

EMU_API emu_pipeline *emu_pipeline_create(emu_library *library, const emu_pipeline_options *options, char **error);
EMU_API emu_pipeline *emu_pipeline_retain(emu_pipeline *pipeline);
EMU_API void emu_pipeline_release(emu_pipeline *pipeline);

typedef struct emu_pipeline_info {
  uint32_t thread_execution_width;
  uint32_t max_total_threads_per_threadgroup;
  uint32_t static_threadgroup_memory_length;
  uint32_t argument_count;
} emu_pipeline_info;

EMU_API int emu_pipeline_get_info(const emu_pipeline *pipeline, emu_pipeline_info *out);
// What a kernel asks of a GPU beyond the oldest: shuffles, votes and reductions, of simdgroups or quads; 8×8 matrices.
enum { EMU_USES_SIMDGROUP = 1, EMU_USES_MATRICES = 2 };
EMU_API uint32_t emu_pipeline_uses(const emu_pipeline *pipeline);
EMU_API const char *emu_pipeline_function_name(const emu_pipeline *pipeline);

typedef enum emu_argument_kind {
  EMU_ARGUMENT_DEVICE = 1,       // device T * or device T &
  EMU_ARGUMENT_CONSTANT = 2,     // constant T * or constant T &
  EMU_ARGUMENT_THREADGROUP = 3   // threadgroup T *
} emu_argument_kind;

typedef struct emu_argument {
  const char *name;
  uint32_t index;          // [[buffer(n)]] or [[threadgroup(n)]]
  uint32_t kind;           // emu_argument_kind
  uint32_t element_size;   // sizeof(T)
  uint32_t element_align;
  int32_t is_reference;    // T &: at least element_size bytes must be bound
  int32_t is_writable;     // device and not const
  int32_t is_active;       // 0: removed by its [[function_constant]] condition
} emu_argument;

EMU_API int emu_pipeline_argument(const emu_pipeline *pipeline, size_t index, emu_argument *out);

// ---- dispatch -------------------------------------------------------------------------------------------------------

typedef struct emu_buffer {
  uint32_t index;
  uint32_t flags;       // EMU_BUFFER_*
  void *data;           // start of the whole buffer
  uint64_t length;      // bytes of the whole buffer; accesses outside [offset, length) are out of bounds
  uint64_t offset;      // where the argument points
} emu_buffer;

enum {
  EMU_BUFFER_OUTPUT = 1,         // report bytes of [offset, length) that the dispatch never wrote
  EMU_BUFFER_UNINITIALISED = 2   // its bytes hold nothing yet: reading one before it is written is reported
};

typedef struct emu_threadgroup_memory {
  uint32_t index;
  uint32_t length;      // bytes; a multiple of 16, as on Metal
} emu_threadgroup_memory;

typedef struct emu_dispatch_options {
  size_t size;
  uint32_t grid[3];                   // in threads if grid_in_threads, else in threadgroups
  uint32_t threads_per_threadgroup[3];
  int32_t grid_in_threads;            // dispatchThreads: the last threadgroups may be smaller
  int32_t fast;                       // 1: no checks, and no byte counters; 2: checked, private variables start as zeros
  const emu_buffer *buffers;          // setBuffer and setBytes alike
  size_t buffer_count;
  const emu_threadgroup_memory *threadgroup_memory;
  size_t threadgroup_memory_count;
  uint64_t seed;                      // 0: threads in order; else a permuted schedule
  uint32_t host_threads;              // 0: one per core in fast mode, 1 in checked mode
  uint32_t max_reports;               // 0: 64
  double time_limit;                  // seconds of wall clock; 0: 60
  const volatile int32_t *cancel;     // NULL, or the dispatch stops (EMU_STATUS_CANCELLED) once it is nonzero
  int32_t count_lines;                // 1: counts device_lines_loaded too, in checked mode
} emu_dispatch_options;

typedef enum emu_status {
  EMU_STATUS_OK = 0,         // ran to the end; the reports may still hold findings
  EMU_STATUS_INVALID = 1,    // refused before it ran: see emu_result_message
  EMU_STATUS_FAULT = 2,      // stopped at an access that a GPU would fault on or corrupt memory with
  EMU_STATUS_TIMEOUT = 3,    // stopped at the time limit, or nothing could go on; reports give the threads' positions
  EMU_STATUS_CANCELLED = 4
} emu_status;

typedef enum emu_report_class {
  EMU_REPORT_OUT_OF_BOUNDS = 1,
  EMU_REPORT_RACE = 2,                   // unordered accesses by two threads of one threadgroup
  EMU_REPORT_RACE_BETWEEN_THREADGROUPS = 3,
  EMU_REPORT_RACE_EQUAL_VALUE = 4,       // two unordered writes of the same value
  EMU_REPORT_UNINITIALISED_THREADGROUP = 5,
  EMU_REPORT_UNINITIALISED_PRIVATE = 6,
  EMU_REPORT_UNINITIALISED_DEVICE = 7,
  EMU_REPORT_DIVERGENT_BARRIER = 8,
  EMU_REPORT_DIVERGENT_SIMDGROUP = 9,    // a simdgroup, quad or matrix function not reached by all its threads
  EMU_REPORT_THREADGROUP_MEMORY = 10,    // more than 32,768 bytes
  EMU_REPORT_UNWRITTEN_OUTPUT = 11,
  EMU_REPORT_MISALIGNED = 12,
  EMU_REPORT_ENDLESS = 13,               // one per group of threads at the same place when stopped
  EMU_REPORT_INVALID_VALUE = 14          // an argument which MSL leaves undefined (for example a shuffle lane)
} emu_report_class;

typedef struct emu_thread_position {
  uint32_t threadgroup[3];
  uint32_t thread[3];       // in the threadgroup
} emu_thread_position;

typedef struct emu_report {
  uint32_t report_class;           // emu_report_class
  uint32_t is_error;               // 0: worth knowing, not a fault (equal-value races)
  const char *message;             // one line; names class, place, threads, variable or buffer
  const char *file;                // "" where unknown
  uint32_t line;                   // 0 where unknown
  const char *other_file;          // the earlier access of a race, the other place of a divergence
  uint32_t other_line;
  uint32_t thread_count;           // threads listed, at most 8; the one at `line` first
  emu_thread_position threads[8];
  uint64_t involved;               // how many threads in all, where the class counts them
  int32_t buffer_index;            // -1: not a buffer
  int32_t threadgroup_index;       // [[threadgroup(n)]], -1: static or not threadgroup memory
  uint64_t offset;                 // bytes from the binding's (or variable's) start, two's complement if before it
  uint64_t access_size;
  int32_t is_write;
  uint64_t occurrences;            // how often the same class came up at the same place
} emu_report;

typedef struct emu_counters {
  uint64_t matrix_multiply_accumulates;   // 8x8x8 products by a simdgroup
  uint64_t exponentials;                  // per element: exp, exp2, exp10 in all precisions
  uint64_t device_bytes_loaded, device_bytes_stored;            // constant memory counts as device; checked mode only
  uint64_t threadgroup_bytes_loaded, threadgroup_bytes_stored;  // checked mode only
  uint64_t atomics;
  uint64_t barriers;                      // threadgroup_barrier, per threadgroup
  uint64_t simdgroup_barriers;            // per simdgroup
  uint64_t simdgroup_operations;          // shuffles, reductions, ... per simdgroup
  uint64_t divergences;                   // simdgroup or quad functions that not all living threads reached together
  uint64_t threads, threadgroups;
  // Different lines of 128 bytes of device memory that a threadgroup loads, added up over threadgroups: what a cache must fetch
  // that keeps whatever a threadgroup has loaded, and knows nothing of the others. A binding begins at a line. Where asked for.
  uint64_t device_lines_loaded;
} emu_counters;

// Never NULL unless memory runs out. Buffers are written in place.
EMU_API emu_result *emu_dispatch(emu_pipeline *pipeline, const emu_dispatch_options *options);
EMU_API void emu_result_free(emu_result *result);
EMU_API int emu_result_status(const emu_result *result);            // emu_status
EMU_API const char *emu_result_message(const emu_result *result);   // "" if status is OK
EMU_API size_t emu_result_report_count(const emu_result *result);
EMU_API const emu_report *emu_result_report(const emu_result *result, size_t index);
EMU_API const emu_counters *emu_result_counters(const emu_result *result);
EMU_API double emu_result_seconds(const emu_result *result);
EMU_API const char *emu_report_class_name(uint32_t report_class);

#ifdef __cplusplus
}
#endif
#endif
