#include "products.h"

namespace edgec {
namespace {

// Work in a piece of a product, in weights × rows with eight rows at least, where arithmetic takes over from memory:
// some microseconds, long enough to hide handing it out, short enough to even out the ends.
constexpr size_t kPieceWork = (48 << 10) * 8;

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

void Products::multiply(const Linear& linear, const float* x, size_t x_stride, int rows, float* y, size_t y_stride) {
  if (linear.has_int8) {
    quantized_.rows = rows;
    quantized_.k = linear.padded;
    each_row(rows, false, [&](int r) { kernels_.quantize(x + r * x_stride, linear.k, quantized_, r); });
  }
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
