// The online softmax (Milakov & Gimelshein, arXiv:1805.02867) of a simdgroup's rows, in its registers.
#pragma once

#include "products.h"
#include "score.h"

// What the columns so far have come to.
template <int BLOCKS, int COUNT>
struct Running {
  Fragment<float> sums[BLOCKS][COUNT];  // of weights times values
  float high[BLOCKS];
  float total[BLOCKS];  // of the lane's own columns; -0 where none is visible

  Running() {
    clear(sums);
    for (int block = 0; block < BLOCKS; ++block) {
      high[block] = -INFINITY;
      total[block] = invisible_weight();
    }
  }

  // Scores of further columns become weights; earlier sums shrink where the maximum rises. Where some may be invisible, bit
  // 2c + e of `seen` is set for each that is visible, the others have scores of minus infinity.
  template <int COLUMNS>
  void weigh(thread Fragment<float> (&s)[BLOCKS][COLUMNS], const thread uint (&seen)[BLOCKS], bool careful) {
    static_assert(COLUMNS <= 16, "a bit for each of a lane's columns");
    for (int block = 0; block < BLOCKS; ++block) {
      float largest = high[block];
      for (int c = 0; c < COLUMNS; ++c) {
        largest = max(largest, max(s[block][c].thread_elements()[0], s[block][c].thread_elements()[1]));
      }
      largest = row_max(largest);
      const float shrink = weight_of(high[block], or_zero(largest));
      float sum = total[block] * shrink;
      for (int c = 0; c < COLUMNS; ++c) {
        for (int e = 0; e < 2; ++e) {
          float weight = weight_of(s[block][c].thread_elements()[e], or_zero(largest));
          if (careful) {
            weight = (seen[block] >> (2 * c + e)) & 1 ? weight : invisible_weight();
          }
          sum += weight;
          s[block][c].thread_elements()[e] = weight;
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
