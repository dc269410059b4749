// The online softmax (Milakov & Gimelshein, arXiv:1805.02867) of a simdgroup's rows, in its registers.
#pragma once

#include "products.h"

// What the columns so far have come to. All logarithms are to base 2.
template <int BLOCKS, int COUNT>
struct Running {
  Fragment<float> sums[BLOCKS][COUNT];  // of weights times values
  float high[BLOCKS];
  float total[BLOCKS];  // of the lane's own columns

  Running() {
    clear(sums);
    for (int block = 0; block < BLOCKS; ++block) {
      high[block] = -INFINITY;
      total[block] = 0;
    }
  }

  // Logits of further columns become weights; earlier sums shrink where the maximum rises. Where some may be invisible, at
  // minus infinity, their weights say so.
  template <int COLUMNS>
  void weigh(thread Fragment<float> (&s)[BLOCKS][COLUMNS], bool careful) {
    for (int block = 0; block < BLOCKS; ++block) {
      float largest = high[block];
      for (int c = 0; c < COLUMNS; ++c) {
        largest = max(largest, max(s[block][c].thread_elements()[0], s[block][c].thread_elements()[1]));
      }
      largest = row_max(largest);
      const float zero = largest == -INFINITY ? 0.0f : largest;
      const float shrink = fast::exp2(high[block] - zero);
      float sum = total[block] * shrink;
      for (int c = 0; c < COLUMNS; ++c) {
        for (int e = 0; e < 2; ++e) {
          const float x = s[block][c].thread_elements()[e];
          const float weight = fast::exp2(x - zero);
          sum += weight;
          s[block][c].thread_elements()[e] = careful && x == -INFINITY ? invisible_weight() : weight;
        }
      }
      high[block] = largest;
      total[block] = sum;
      for (int i = 0; i < COUNT; ++i) {
        sums[block][i].thread_elements()[0] *= shrink;
        sums[block][i].thread_elements()[1] *= shrink;
      }
    }
  }
};
