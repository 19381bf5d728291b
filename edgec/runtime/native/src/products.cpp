#include "products.h"

namespace edgec {
namespace {

// Work in a piece of a product, in weights × rows with eight rows at least, where arithmetic takes over from memory:
// some microseconds, long enough to hide handing it out, short enough to even out the ends.
constexpr size_t kPieceWork = (48 << 10) * 8;

size_t padded(size_t k) { return (k + kGroup - 1) / kGroup * kGroup; }

// Where the piece of this number begins, of `units` that are shared evenly.
int share(int units, int piece, int pieces) { return static_cast<int>(static_cast<int64_t>(units) * piece / pieces); }

bool can_follow(const Linear& linear, const Follow& follow, int block) {
  return linear.parts.size() == 1 && follow.period % block == 0 && follow.whole % block == 0;
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

// Of `units` that a product is made of: as many pieces for each thread.
int Products::pieces_of(size_t unit_weights, int rows, int units) const {
  constexpr int kMostPieces = 8192;
  const int per_piece = static_cast<int>(kPieceWork / (unit_weights * (rows < 8 ? 8 : rows)));
  int pieces = per_piece < 2 ? units : (units + per_piece - 1) / per_piece;
  if (pieces > 1) pieces = (pieces + threads_.threads() - 1) / threads_.threads() * threads_.threads();
  if (pieces > units) pieces = units;
  return pieces < kMostPieces ? pieces : kMostPieces;
}

// A piece computes gates and their ups, and what the next layer wants of them while they are in its cache.
void Products::gate_by_groups(const Linear& gate_up, int rows, float* between) {
  const PackedMatrix& weights = gate_up.parts.front().int8;
  const int blocks = 2 * kGroup / kernels_.layout.block, groups = gate_up.n / (2 * kGroup);
  const int pieces = pieces_of(2 * kGroup * static_cast<size_t>(weights.k), rows, groups);
  threads_.run(pieces, [&](int piece, int) {
    const int begin = share(groups, piece, pieces), end = share(groups, piece + 1, pieces);
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
                                int rows, float* y, size_t y_stride, const Follow* follow) {
  for (const Linear::Part& part : linear.parts) {
    const int block = part.is_float ? 8 : kernels_.layout.block, n = part.is_float ? part.floats.n : part.int8.n;
    const int blocks = (n + block - 1) / block;
    const int pieces = pieces_of(static_cast<size_t>(block) * linear.padded * (part.is_float ? 4 : 1), rows, blocks);
    const bool follows = follow != nullptr && can_follow(linear, *follow, block);
    const auto cut = [&](int piece) {
      const int at = share(blocks, piece, pieces);
      if (!follows) return at;
      const int past = at * block % follow->period;
      if (past == 0 || past >= follow->whole) return at;
      const int to = at + (follow->whole - past) / block;
      return to < blocks ? to : blocks;
    };
    threads_.run(pieces, [&](int piece, int) {
      const int begin = cut(piece), end = cut(piece + 1);
      if (begin >= end) return;
      if (part.is_float)
        kernels_.matmul_float(x, x_stride, rows, part.floats, begin, end, y + part.offset, y_stride);
      else
        kernels_.matmul(quantized, part.int8, begin, end, y + part.offset, y_stride);
      if (follows) follow->call(follow->context, begin * block, end * block < n ? end * block : n);
    });
    if (follows) return;
  }
  if (follow == nullptr) return;
  threads_.run((linear.n + follow->period - 1) / follow->period, [&](int piece, int) {
    const int first = piece * follow->period, end = first + follow->period;
    follow->call(follow->context, first, end < linear.n ? end : linear.n);
  });
}

}  // namespace edgec
