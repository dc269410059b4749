// Stands in for the one type that metal-cpp takes from IOSurface.
#pragma once

typedef struct __IOSurface* IOSurfaceRef;
