#include "products.h"

namespace edgec {
namespace {

// Work in a piece of a product, in weights × rows with eight rows at least, where arithmetic takes over from memory:
// some microseconds, long enough to hide handing it out, short enough to even out the ends.
constexpr size_t kPieceWork = (48 << 10) * 8;

// Values whose quantising is worth handing to a thread: about a microsecond.
constexpr size_t kSpanWork = 2048;
constexpr int kSiluEffort = 3;  // of one value, in quantisings

size_t padded(size_t k) { return (k + kGroup - 1) / kGroup * kGroup; }

}  // namespace

size_t Products::bytes(size_t rows, size_t widest) {
  const size_t groups = padded(widest) / kGroup;
  return aligned(rows * padded(widest)) + aligned(rows * groups * sizeof(float)) +
         aligned(rows * groups * sizeof(int32_t));
}

Products::Products(const Kernels& kernels, ThreadPool& threads, size_t rows, size_t widest)
    : kernels_(kernels), threads_(threads), buffers_(bytes(rows, widest)), quantized_{} {
  uint8_t* at = buffers_.data();
  const size_t groups = padded(widest) / kGroup;
  quantized_.values = reinterpret_cast<int8_t*>(at);
  at += aligned(rows * padded(widest));
  quantized_.scales = reinterpret_cast<float*>(at);
  at += aligned(rows * groups * sizeof(float));
  quantized_.offsets = reinterpret_cast<int32_t*>(at);
}

template <typename Make>
void Products::quantize(const Linear& linear, const float* x, size_t x_stride, int rows, int effort, const Make& make) {
  quantized_.rows = rows;
  quantized_.k = linear.padded;
  const int k = linear.k, groups = (k + kGroup - 1) / kGroup;
  const auto quantize_groups = [&](int begin, int end) {
    const int first = begin * kGroup, count = (end < groups ? end * kGroup : k) - first;
    for (int r = 0; r < rows; ++r) {
      make(r, first, count);
      if (linear.has_int8) kernels_.quantize(x + r * x_stride + first, count, quantized_, r, begin);
    }
  };
  // By groups, whose rows lie side by side: threads that took rows would share cache lines.
  const size_t work = static_cast<size_t>(rows) * k * effort / kSpanWork;
  const int pieces = work < static_cast<size_t>(groups) ? static_cast<int>(work) : groups;
  if (pieces < 2)
    quantize_groups(0, groups);
  else
    threads_.run(pieces,
                 [&](int piece, int) { quantize_groups(groups * piece / pieces, groups * (piece + 1) / pieces); });
}

void Products::multiply(const Linear& linear, const float* x, size_t x_stride, int rows, float* y, size_t y_stride) {
  if (linear.has_int8) quantize(linear, x, x_stride, rows, 1, [](int, int, int) {});
  multiply_quantized(linear, x, x_stride, rows, y, y_stride);
}

void Products::multiply_gated(const Linear& linear, float* gate_up, int rows, float* y, size_t y_stride) {
  const size_t wide = linear.k;
  quantize(linear, gate_up, 2 * wide, rows, 1 + kSiluEffort, [&](int r, int first, int count) {
    float* gate = gate_up + r * 2 * wide + first;
    kernels_.silu_mul(gate, gate + wide, count, gate);
  });
  multiply_quantized(linear, gate_up, 2 * wide, rows, y, y_stride);
}

// `x` is what was quantised, for the parts whose weights are float.
void Products::multiply_quantized(const Linear& linear, const float* x, size_t x_stride, int rows, float* y,
                                  size_t y_stride) {
  for (const Linear::Part& part : linear.parts) {
    const int block = part.is_float ? 8 : kernels_.layout.block;
    const int blocks = ((part.is_float ? part.floats.n : part.int8.n) + block - 1) / block;
    const size_t block_work =
        static_cast<size_t>(block) * linear.padded * (part.is_float ? 4 : 1) * (rows < 8 ? 8 : rows);
    int per_piece = static_cast<int>(kPieceWork / block_work);
    if (per_piece < 1) per_piece = 1;
    if (blocks / per_piece > 8192) per_piece = blocks / 8192 + 1;
    threads_.run((blocks + per_piece - 1) / per_piece, [&](int piece, int) {
      const int begin = piece * per_piece, end = begin + per_piece < blocks ? begin + per_piece : blocks;
      if (part.is_float)
        kernels_.matmul_float(x, x_stride, rows, part.floats, begin, end, y + part.offset, y_stride);
      else
        kernels_.matmul(quantized_, part.int8, begin, end, y + part.offset, y_stride);
    });
  }
}

}  // namespace edgec
