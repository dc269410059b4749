// Class and selector look-ups of the Linux Objective-C runtime. Knows nothing of Metal.
#pragma once

#include <objc/objc.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

SEL sel_registerName(const char* name);
const char* sel_getName(SEL selector);
Class objc_lookUpClass(const char* name);
Class objc_getClass(const char* name);
Class objc_getRequiredClass(const char* name);
Protocol* objc_getProtocol(const char* name);
Class object_getClass(id object);
const char* object_getClassName(id object);
const char* class_getName(Class cls);
Class class_getSuperclass(Class cls);
IMP class_getMethodImplementation(Class cls, SEL selector);
BOOL class_respondsToSelector(Class cls, SEL selector);

void* objc_autoreleasePoolPush(void);
void objc_autoreleasePoolPop(void* pool);
id objc_retain(id object);
void objc_release(id object);
id objc_autorelease(id object);

#ifdef __cplusplus
}
#endif
