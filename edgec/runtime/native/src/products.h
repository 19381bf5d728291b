// Products of packed weights with a few rows of floats, shared among threads: what decoder and draft head are made of.
#ifndef EDGEC_PRODUCTS_H
#define EDGEC_PRODUCTS_H

#include "kernels/kernels.h"
#include "memory.h"
#include "thread_pool.h"
#include "weights.h"

namespace edgec {

class Products {
 public:
  // For up to `rows` rows of at most `widest` inputs.
  Products(const Kernels& kernels, ThreadPool& threads, size_t rows, size_t widest);
  static size_t bytes(size_t rows, size_t widest);  // of its buffers

  // y (rows, y_stride) = linear · x (rows, x_stride).
  void multiply(const Linear& linear, const float* x, size_t x_stride, int rows, float* y, size_t y_stride);

  // body(row) for every row, on all threads where that pays: `wide` says that a row is some microseconds of work.
  template <typename Body>
  void each_row(int rows, bool wide, const Body& body) {
    // Four bytes of each of sixteen quantised rows make a cache line, which no two threads then share. With less than
    // two pieces of work, handing it out would cost more than it saves.
    const int per_piece = wide ? 4 : 16;
    if (rows < 2 * per_piece) {
      for (int r = 0; r < rows; ++r) body(r);
      return;
    }
    threads_.run((rows + per_piece - 1) / per_piece, [&](int piece, int) {
      for (int r = piece * per_piece; r < rows && r < (piece + 1) * per_piece; ++r) body(r);
    });
  }

 private:
  const Kernels& kernels_;
  ThreadPool& threads_;
  Pages buffers_;
  QuantizedRows quantized_;
};

}  // namespace edgec

#endif  // EDGEC_PRODUCTS_H
