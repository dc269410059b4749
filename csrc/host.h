/* Attention in another program's command buffers: for hosts that have a Metal queue of their own, such as plugins of XLA.
 *
 * The module `jax_mfa._metal` exports these functions; a host in the same process finds them there by dlsym. It owns buffers,
 * command buffer and encoder, and commits them when it likes. A launch plan (csrc/README.md) is the string attribute `plan` of
 * the custom calls that jax_mfa lowers to; the MSL text that it names has then been registered.
 *
 * In a serial encoder nothing else is needed. In a concurrent one the dispatches of one jax_mfa_encode are in order among
 * themselves; before and after it, the host places the barriers that its own dispatches would need. All functions may be called
 * from any thread. None waits for the GPU, and only jax_mfa_prepare for the compiler. Not yet seen on Apple hardware.
 */
#ifndef JAX_MFA_HOST_H
#define JAX_MFA_HOST_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define JAX_MFA_HOST_API 1 /* of this header; jax_mfa_host_api() says that of the module */
#define JAX_MFA_HOST_EXPORT __attribute__((visibility("default")))

enum { JAX_MFA_INPUT, JAX_MFA_OUTPUT, JAX_MFA_SCRATCH, JAX_MFA_UPDATED /* an operand, and in its memory a result */ };

typedef struct jax_mfa_plan jax_mfa_plan;

typedef struct {
  const char* name; /* lives as long as the plan */
  int role;         /* JAX_MFA_INPUT, ... */
  uint64_t bytes;
} jax_mfa_buffer;

typedef struct {
  void* buffer;    /* id<MTLBuffer> of the system's default device, any storage mode that the GPU reads and writes */
  uint64_t offset; /* bytes to where the array begins, a multiple of 16 */
} jax_mfa_place;

JAX_MFA_HOST_EXPORT int jax_mfa_host_api(void);

/* MSL text under the hash by which plans name it. Python has done this for plans that it made. */
JAX_MFA_HOST_EXPORT void jax_mfa_add_source(const char* hash, const char* text);

/* Checks a plan and compiles its kernels, once for each text. NULL where that fails; `error`, of `size` bytes, then has a text. */
JAX_MFA_HOST_EXPORT jax_mfa_plan* jax_mfa_prepare(const char* plan, size_t length, char* error, size_t size);

/* Lets a plan go. Command buffers keep what they use, unless they were made with unretained references. */
JAX_MFA_HOST_EXPORT void jax_mfa_release(jax_mfa_plan* plan);

/* The buffers that a plan wants, in its own order. */
JAX_MFA_HOST_EXPORT size_t jax_mfa_buffers(const jax_mfa_plan* plan);
JAX_MFA_HOST_EXPORT jax_mfa_buffer jax_mfa_buffer_at(const jax_mfa_plan* plan, size_t at);

/* How many command buffers the plan is split into, each of about 0.1 s of work, since macOS kills longer ones. */
JAX_MFA_HOST_EXPORT size_t jax_mfa_parts(const jax_mfa_plan* plan);

/* Encodes part 0, 1, ... of a plan, to be run in this order, into an id<MTLComputeCommandEncoder>; parts in one concurrent encoder
 * want a barrier between them. `places` has one entry for each of the plan's buffers. Returns 0; else nothing was encoded, and
 * `error` says why. Leaves the encoder's pipeline, buffers and threadgroup memory changed. */
JAX_MFA_HOST_EXPORT int jax_mfa_encode(const jax_mfa_plan* plan, size_t part, void* encoder, const jax_mfa_place* places,
                                       size_t count, char* error, size_t size);

#ifdef __cplusplus
}
#endif

#endif
