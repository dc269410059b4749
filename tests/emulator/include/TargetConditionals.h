// <TargetConditionals.h>: the shim is always in force, so the text is empty.
