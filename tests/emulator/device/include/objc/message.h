// Message sending. Each entry is called through a pointer cast to the method's own type.
#pragma once

#include <objc/runtime.h>

#ifdef __cplusplus
extern "C" {
#endif

void objc_msgSend(void);
#if defined(__x86_64__)
void objc_msgSend_stret(void);  // structures of more than 16 bytes: hidden pointer first
void objc_msgSend_fpret(void);  // metal-cpp sends every floating point result through here
#endif

#ifdef __cplusplus
}
#endif
