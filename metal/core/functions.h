// Functions that MSL lacks, by Kahan's way to divide the error of the one rounding out.
#pragma once

#include "core/fragment.h"

INLINED float precise_log1p(float x) {
  const float y = 1.0f + x;
  return y == 1.0f || y == INFINITY ? x : precise::log(y) * (x / (y - 1.0f));
}

INLINED float precise_expm1(float x) {
  const float y = precise::exp(x);
  const float less = y - 1.0f;
  return y == 1.0f || y == INFINITY ? (y == 1.0f ? x : y) : (less == -1.0f ? less : less * (x / precise::log(y)));
}
