// The Objective-C types that host code names, as far as metal-cpp needs them on Linux.
// Knows nothing of Metal; the functions live in source/objc_runtime.cc.
#pragma once

typedef struct objc_class* Class;
typedef struct objc_selector* SEL;

struct objc_object {
  Class isa;
};
typedef struct objc_object* id;

typedef struct objc_object Protocol;
typedef void (*IMP)(void);
typedef bool BOOL;
