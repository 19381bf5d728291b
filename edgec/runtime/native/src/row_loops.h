// The sampler's loops over a whole row, for the instruction sets that make a difference. All give the same bits.
#ifndef EDGEC_ROW_LOOPS_H_
#define EDGEC_ROW_LOOPS_H_

#include <cstdint>

#include "noise.h"

namespace edgec {

constexpr int32_t kRowBlock = 128;  // a row's sums and maxima are also kept for each block of so many values

inline int32_t row_blocks(int32_t count) { return (count + kRowBlock - 1) / kRowBlock; }

// A token in the race of noise.h: the least times win.
struct Racer {
  double time;
  int32_t at;  // place in the row
};

struct RowExtent {
  float greatest;
  int32_t block;  // the first that has it
  bool finite;    // all values are
};

// What races: logits z with weights e^((z − greatest) / temperature), or weights.
struct RaceRow {
  const float* x;  // (count)
  int32_t count;
  float temperature;  // 0: x are weights
  RowExtent extent;   // of x, with …
  const float* maxima;
  const int32_t* tokens = nullptr;  // (count), the numbers that the noise goes by; their places when null
};

// Sums are of doubles: in a block, lane i of eight takes the elements i, i + 8, …, and the lanes are added as
// ((0 + 4) + (2 + 6)) + ((1 + 5) + (3 + 7)); the blocks are added in order.
struct RowLoops {
  // `maxima` (row_blocks) may be null.
  RowExtent (*extent)(const float* x, int32_t count, float* maxima);
  // weights[i] = e^((x[i] − greatest) / temperature), perhaps in place; their sum, and each block's in `sums`.
  double (*exponentials)(const float* x, int32_t count, float greatest, float temperature, float* weights,
                         double* sums);
  // Σ e^(x − greatest).
  double (*exponential_sum)(const float* x, int32_t count, float greatest);
  // Σ x, and each block's in `sums`, which may be null.
  double (*sum)(const float* x, int32_t count, double* sums);
  // The `places` first of all with a weight, by rising time; of equal ones the lower place first. Returns how many
  // there are.
  int32_t (*race)(const RaceRow& row, NoiseKey key, int32_t places, Racer* first);
};

// The fastest for this CPU; and those that any CPU runs.
const RowLoops& row_loops();
const RowLoops& plain_row_loops();

}  // namespace edgec

#endif  // EDGEC_ROW_LOOPS_H_
