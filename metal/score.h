// From a dot product to a logit of base 2, and back for the derivative. Kernels ask nothing else about scores.
#pragma once

#include "parameters.h"

struct Score {
  float factor;

  Score(constant Parameters& p) {
    factor = p.scale_log2;
  }

  float logit(float product) const {
    return product * factor;
  }

  // The derivative by the dot product, given that by the logit to base e; the factor `scale` is applied to the sums.
  float derivative(float d_logit) const {
    return d_logit;
  }
};
