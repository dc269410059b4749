/* Control of the emulated Metal device from tests: faults to inject, options, reports, totals and object counts.
   Host code under test never includes this; it sees Metal only. All functions may be called from any thread. Every char*
   result is JSON text owned by the caller, to be given to metal_device_free. */
#ifndef METAL_DEVICE_H
#define METAL_DEVICE_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum metal_device_fault {
  METAL_FAULT_NO_DEVICE = 0,       /* MTLCreateSystemDefaultDevice answers nil, MTLCopyAllDevices an empty array */
  METAL_FAULT_COMPILE = 1,         /* newLibraryWithSource: nil and an MTLLibraryErrorDomain error */
  METAL_FAULT_FUNCTION = 2,        /* newFunctionWithName: nil (and an error where the method has one) */
  METAL_FAULT_PIPELINE = 3,        /* newComputePipelineState: nil and an error */
  METAL_FAULT_BUFFER = 4,          /* newBufferWithLength / WithBytes: nil */
  METAL_FAULT_BUFFER_NO_COPY = 5,  /* newBufferWithBytesNoCopy: nil, as a Mac may answer for malloc memory */
  METAL_FAULT_QUEUE = 6,           /* newCommandQueue: nil */
  METAL_FAULT_COMMAND_BUFFER = 7,  /* commandBuffer: nil */
  METAL_FAULT_ENCODER = 8,         /* computeCommandEncoder: nil */
  METAL_FAULT_GPU = 9,             /* the command buffer ends with status error, code page fault */
  METAL_FAULT_TIMEOUT = 10,        /* ... code timeout */
  METAL_FAULT_OUT_OF_MEMORY = 11,  /* ... code out of memory */
  METAL_FAULT_INTERACTIVITY = 12,  /* ... killed because it kept the GPU from the screen */
  METAL_FAULT_IGNORED = 13,        /* ... ignored because of earlier errors of the process */
  METAL_FAULT_HANG = 14,           /* ... code timeout, for a GPU that hung */
  METAL_FAULT_UNNAMED = 15,        /* ... killed as by METAL_FAULT_INTERACTIVITY, with a text that has the number only */
  METAL_FAULT_VICTIM = 16,         /* ... given up because another one's error took the GPU down */
  METAL_FAULT_REMOVED = 17,        /* ... because the device is gone */
  METAL_FAULT_ARCHIVE = 18,        /* newBinaryArchiveWithDescriptor: nil and an error */
  METAL_FAULT_ARCHIVE_ADD = 19,    /* addComputePipelineFunctionsWithDescriptor: false and an error */
  METAL_FAULT_ARCHIVE_WRITE = 20,  /* serializeToURL: false and an error */
  METAL_FAULT_COUNT = 21
} metal_device_fault;

typedef enum metal_device_option {
  METAL_OPTION_CHECKED = 0,       /* 1: kernels run under the checker (default); 0: fast */
  METAL_OPTION_SEED = 1,          /* schedule seed of the checker; 0 (default): the natural order */
  METAL_OPTION_ABORT = 2,         /* 1: the process aborts at the first report; default 0, or 1 by METAL_DEVICE_ABORT=1 */
  METAL_OPTION_OS_VERSION = 3,    /* 10000 major + 100 minor; default 140000, the oldest that the project supports */
  METAL_OPTION_GPU_FAMILY = 4,    /* newest MTLGPUFamilyApple; default 1007 (M1) */
  METAL_OPTION_SIMD_WIDTH = 5,    /* threadExecutionWidth that pipelines claim; default 32 */
  METAL_OPTION_MAX_THREADS = 6,   /* cap on maxTotalThreadsPerThreadgroup, as register pressure has it; default 1024 */
  METAL_OPTION_MEMORY_LIMIT = 7,  /* maxBufferLength and the most bytes of live buffers; default 8 GiB */
  METAL_OPTION_TIMEOUT_MS = 8,    /* a dispatch that runs longer ends in a timeout error; default 60000 */
  METAL_OPTION_RECORD = 9,        /* how many of the last dispatches to keep for metal_device_dispatches_json; default 256 */
  METAL_OPTION_HANDLER_DELAY_US = 10, /* completed handlers are called this much later; default 0 */
  METAL_OPTION_QUIET = 11,        /* 1: reports are kept but not printed to stderr; default 0 */
  METAL_OPTION_DEFAULT_DEVICE = 12,    /* 0: MTLCreateSystemDefaultDevice answers nil; default 1 */
  METAL_OPTION_LISTED = 13,            /* 0: MTLCopyAllDevices answers an empty array; default 1 */
  METAL_OPTION_UNIFIED_MEMORY = 14,    /* hasUnifiedMemory; default 1 */
  METAL_OPTION_PAGE_SIZE = 15,         /* what pointer and length of no-copy buffers must be multiples of; default 16384 */
  METAL_OPTION_THREADGROUP_MEMORY = 16, /* maxThreadgroupMemoryLength; default 32768, which is the most */
  METAL_OPTION_STACK_KIB = 17,         /* stack of threads that call completed handlers; default 512, as on macOS */
  METAL_OPTION_RATE = 18,              /* modelled multiply-accumulates a second; 0 (default): the GPU takes no modelled time */
  METAL_OPTION_INTERACTIVITY_MS = 19,  /* a command buffer of more modelled time is killed; 0 (default): never */
  METAL_OPTION_GPU_TIMEOUT_MS = 20,    /* ... of more than this with a timeout error; 0 (default): never */
  METAL_OPTION_IGNORED_AFTER = 21,     /* after as many kills all later command buffers are ignored; 0 (default): never */
  METAL_OPTION_MATRIX_THREADS = 22,    /* METAL_OPTION_MAX_THREADS of kernels with simdgroup matrices; default 1024 */
  METAL_OPTION_LINE_BYTES = 23,        /* a dispatch puts back what lay beside its no-copy outputs in their first and last line
                                          of so many bytes, as caches that are not coherent would; 0 (default): it does not */
  METAL_OPTION_VICTIMS = 24,           /* 1: an error of a command buffer takes all others with it that are committed; default 0 */
  METAL_OPTION_COUNT = 25
} metal_device_option;

/* Lets `skip` uses pass, then makes the next `times` uses fail (-1: all). times = 0 disarms. */
void metal_device_inject(metal_device_fault fault, int64_t skip, int64_t times);
int64_t metal_device_fault_hits(metal_device_fault fault);
void metal_device_clear_faults(void);

/* What the device is called; nullptr or "": after its family. */
void metal_device_set_name(const char* name);

void metal_device_set_option(metal_device_option option, int64_t value);
int64_t metal_device_get_option(metal_device_option option);

/* [{"kind", "message", "class", "label"}] of API misuse, oldest first. */
char* metal_device_reports_json(int clear);
/* The last dispatches, oldest first: kernel, grid, threadgroup, counters and the checker's reports of each. */
char* metal_device_dispatches_json(int clear);
/* Checker reports of all dispatches since the last clear, without repeats, and the counters' sums. */
char* metal_device_checker_json(int clear);
/* {"class": live instances}; pools and singletons left out. */
char* metal_device_live_objects_json(void);
/* {"buffers_no_copy": n, ...}: how often each thing happened since the last clear. */
char* metal_device_totals_json(int clear);
/* Waits until no command buffer is committed and unfinished; 0 when `milliseconds` passed first. */
int metal_device_wait_idle(int64_t milliseconds);
/* Defaults for options, no faults, no reports, totals at zero. Live objects stay. */
void metal_device_reset(void);
void metal_device_free(char* text);

#ifdef __cplusplus
}
#endif
#endif
