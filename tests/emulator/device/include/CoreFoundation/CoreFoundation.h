// Stands in for the one name that metal-cpp takes from CoreFoundation.
#pragma once

#ifdef __cplusplus
extern "C" {
#endif
typedef double CFTimeInterval;
struct __CFString;
typedef const struct __CFString* CFStringRef;
#ifdef __cplusplus
}
#endif
