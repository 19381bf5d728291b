// Products of packed weights with a few rows of floats, shared among threads: what decoder and draft head are made of.
//
// What follows on a product's outputs can be done piece by piece, while a core has them in its cache; and inputs can
// come in parts, from whoever has them. Little of a row then travels from one core to another.
#ifndef EDGEC_PRODUCTS_H
#define EDGEC_PRODUCTS_H

#include "kernels/kernels.h"
#include "memory.h"
#include "thread_pool.h"
#include "weights.h"

namespace edgec {

// What follows on a piece of a product: call(context, first, end) for its outputs [first, end). No piece is cut inside
// the first `whole` of each `period` outputs. The body must live as long.
struct Follow {
  int period, whole;
  void (*call)(const void* context, int first, int end);
  const void* context;

  template <typename Body>
  static Follow by(int period, int whole, const Body& body) {
    return {period, whole,
            [](const void* context, int first, int end) { (*static_cast<const Body*>(context))(first, end); }, &body};
  }
};

class Products {
 public:
  // For up to `rows` rows of at most `widest` inputs.
  Products(const Kernels& kernels, ThreadPool& threads, size_t rows, size_t widest);
  static size_t bytes(size_t rows, size_t widest);  // of its buffers

  // y (rows, y_stride) = linear · x (rows, x_stride), after make(row) has computed each row of x. Where no part is
  // float and the rows are taken in turn, a row is not read again once the next one is made: x_stride may be 0 then.
  template <typename Make>
  void multiply(const Linear& linear, const float* x, size_t x_stride, int rows, float* y, size_t y_stride,
                const Make& make, const Follow* follow = nullptr) {
    take_inputs(linear, x, x_stride, rows, make);
    multiply_started(linear, inputs_, x, x_stride, rows, y, y_stride, follow);
  }

  // The same for a linear all of whose parts are INT8, with rows that come in parts, from any thread, between the two:
  // x (count) becomes the channels of `row` from `first` on. `count` and `first` are multiples of kGroup.
  void start_parts(const Linear& linear, int rows) { start(linear, rows, &inputs_); }
  void take_part(const float* x, int count, int row, int first) {
    kernels_.quantize(x, count, inputs_, row, first / kGroup);
  }
  void multiply_parts(const Linear& linear, int rows, float* y, size_t y_stride, const Follow* follow) {
    multiply_started(linear, inputs_, nullptr, 0, rows, y, y_stride, follow);
  }

  // y (rows, y_stride) = down · (silu(gate) · up), gate and up being the outputs of gate_up · x, after make(row) has
  // computed each row of x. `between` (rows, gate_up.n) is for what lies between the two.
  template <typename Make>
  void multiply_gated(const Linear& gate_up, const Linear& down, const float* x, size_t x_stride, int rows,
                      float* between, float* y, size_t y_stride, const Make& make, const Follow* follow = nullptr) {
    const size_t wide = gate_up.n;
    if (!gate_up.interleaved) {
      multiply(gate_up, x, x_stride, rows, between, wide, make);
      multiply(
          down, between, wide, rows, y, y_stride,
          [&](int r) {
            float* gate = between + r * wide;
            kernels_.silu_mul(gate, gate + down.k, down.k, gate);
          },
          follow);
      return;
    }
    take_inputs(gate_up, x, x_stride, rows, make);
    start(down, rows, &gated_);
    gate_by_groups(gate_up, rows, between);
    multiply_started(down, gated_, between, wide, rows, y, y_stride, follow);
  }

  // Whether so many rows are made one after the other: handing them out would cost more than it saves.
  static bool in_turn(int rows) { return rows < 2 * kPerPiece; }

 private:
  static constexpr int kPerPiece = 16;  // a line of the cache holds so many rows' quantised values

  // body(row) for every row, some hundred nanoseconds each, on all threads where that pays.
  template <typename Body>
  void each_row(int rows, const Body& body) {
    if (in_turn(rows)) {
      for (int r = 0; r < rows; ++r) body(r);
      return;
    }
    threads_.run((rows + kPerPiece - 1) / kPerPiece, [&](int piece, int) {
      for (int r = piece * kPerPiece; r < rows && r < (piece + 1) * kPerPiece; ++r) body(r);
    });
  }

  static void start(const Linear& linear, int rows, QuantizedRows* inputs) {
    inputs->rows = rows;
    inputs->k = linear.padded;
  }
  // make(row), and what INT8 weights want of the row.
  template <typename Make>
  void take_inputs(const Linear& linear, const float* x, size_t x_stride, int rows, const Make& make) {
    start(linear, rows, &inputs_);
    each_row(rows, [&](int r) {
      make(r);
      if (linear.has_int8) kernels_.quantize(x + r * x_stride, linear.k, inputs_, r, 0);
    });
  }
  int pieces_of(size_t unit_weights, int rows, int units) const;
  void gate_by_groups(const Linear& gate_up, int rows, float* between);
  // `x` is what was quantised, for the parts whose weights are float.
  void multiply_started(const Linear& linear, const QuantizedRows& quantized, const float* x, size_t x_stride, int rows,
                        float* y, size_t y_stride, const Follow* follow);

  const Kernels& kernels_;
  ThreadPool& threads_;
  Pages buffers_;
  QuantizedRows inputs_, gated_;
};

}  // namespace edgec

#endif  // EDGEC_PRODUCTS_H
