#include "products.h"

namespace edgec {
namespace {

// Work in a piece of a product, in weights × rows with eight rows at least, where arithmetic takes over from memory:
// some microseconds, long enough to hide handing it out, short enough to even out the ends.
constexpr size_t kPieceWork = (48 << 10) * 8;

size_t padded(size_t k) { return (k + kGroup - 1) / kGroup * kGroup; }

// Blocks of so many weights that a piece has, of `blocks` in all.
int blocks_of_piece(size_t block_weights, int rows, int blocks) {
  constexpr int kMostPieces = 8192;
  const int per_piece = static_cast<int>(kPieceWork / (block_weights * (rows < 8 ? 8 : rows)));
  const int least = (blocks + kMostPieces - 1) / kMostPieces;
  return per_piece < least ? least : per_piece;
}

}  // namespace

size_t Products::bytes(size_t rows, size_t widest) {
  const size_t groups = padded(widest) / kGroup;
  return 2 * (aligned(rows * padded(widest)) + aligned(rows * groups * sizeof(float)) +
              aligned(rows * groups * sizeof(int32_t)));
}

Products::Products(const Kernels& kernels, ThreadPool& threads, size_t rows, size_t widest)
    : kernels_(kernels), threads_(threads), buffers_(bytes(rows, widest)), inputs_{}, gated_{} {
  uint8_t* at = buffers_.data();
  const size_t groups = padded(widest) / kGroup;
  for (QuantizedRows* quantized : {&inputs_, &gated_}) {
    quantized->values = reinterpret_cast<int8_t*>(at);
    at += aligned(rows * padded(widest));
    quantized->scales = reinterpret_cast<float*>(at);
    at += aligned(rows * groups * sizeof(float));
    quantized->offsets = reinterpret_cast<int32_t*>(at);
    at += aligned(rows * groups * sizeof(int32_t));
  }
}

// A piece computes gates and their ups, and what the next layer wants of them while they are in its cache.
void Products::gate_by_groups(const Linear& gate_up, int rows, float* between) {
  const PackedMatrix& weights = gate_up.parts.front().int8;
  const int blocks = 2 * kGroup / kernels_.layout.block, groups = gate_up.n / (2 * kGroup);
  const int per_piece = blocks_of_piece(2 * kGroup * static_cast<size_t>(weights.k), rows, groups);
  threads_.run((groups + per_piece - 1) / per_piece, [&](int piece, int) {
    const int begin = piece * per_piece, end = begin + per_piece < groups ? begin + per_piece : groups;
    kernels_.matmul(inputs_, weights, begin * blocks, end * blocks, between, gate_up.n);
    for (int r = 0; r < rows; ++r) {
      for (int g = begin; g < end; ++g) {
        float* gate = between + static_cast<size_t>(r) * gate_up.n + g * 2 * kGroup;
        kernels_.silu_mul(gate, gate + kGroup, kGroup, gate);
        kernels_.quantize(gate, kGroup, gated_, r, g);
      }
    }
  });
}

void Products::multiply_started(const Linear& linear, const QuantizedRows& quantized, const float* x, size_t x_stride,
                                int rows, float* y, size_t y_stride) {
  for (const Linear::Part& part : linear.parts) {
    const int block = part.is_float ? 8 : kernels_.layout.block;
    const int blocks = ((part.is_float ? part.floats.n : part.int8.n) + block - 1) / block;
    const int per_piece =
        blocks_of_piece(static_cast<size_t>(block) * linear.padded * (part.is_float ? 4 : 1), rows, blocks);
    threads_.run((blocks + per_piece - 1) / per_piece, [&](int piece, int) {
      const int begin = piece * per_piece, end = begin + per_piece < blocks ? begin + per_piece : blocks;
      if (part.is_float)
        kernels_.matmul_float(x, x_stride, rows, part.floats, begin, end, y + part.offset, y_stride);
      else
        kernels_.matmul(quantized, part.int8, begin, end, y + part.offset, y_stride);
    });
  }
}

}  // namespace edgec
