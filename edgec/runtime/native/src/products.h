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
  // y (rows, y_stride) = linear · (silu(gate) · up), gate and up being the halves of each row of gate_up, which is
  // overwritten.
  void multiply_gated(const Linear& linear, float* gate_up, int rows, float* y, size_t y_stride);

  // body(row) for every row, some hundred nanoseconds each, on all threads where that pays.
  template <typename Body>
  void each_row(int rows, const Body& body) {
    constexpr int kPerPiece = 16;
    if (rows < 2 * kPerPiece) {  // handing it out would cost more than it saves
      for (int r = 0; r < rows; ++r) body(r);
      return;
    }
    threads_.run((rows + kPerPiece - 1) / kPerPiece, [&](int piece, int) {
      for (int r = piece * kPerPiece; r < rows && r < (piece + 1) * kPerPiece; ++r) body(r);
    });
  }

 private:
  // Quantises rows of `k` values, after make(row, first, count) has computed that part of the row. `effort` is how much
  // longer both take than quantising alone.
  template <typename Make>
  void quantize(const Linear& linear, const float* x, size_t x_stride, int rows, int effort, const Make& make);
  void multiply_quantized(const Linear& linear, const float* x, size_t x_stride, int rows, float* y, size_t y_stride);

  const Kernels& kernels_;
  ThreadPool& threads_;
  Pages buffers_;
  QuantizedRows quantized_;
};

}  // namespace edgec

#endif  // EDGEC_PRODUCTS_H
