// What follows on products, piece by piece.
#include <algorithm>
#include <mutex>
#include <utility>
#include <vector>

#include "check.h"
#include "products.h"

namespace edgec {
namespace {

// A linear with `parts` parts of `n` float outputs each; its weights are 0.
struct Zeros {
  std::vector<float> data;
  Linear linear;

  Zeros(int parts, int n, int k) : data(static_cast<size_t>((n + 7) / 8 * 8) * k) {
    linear.k = linear.padded = k;
    linear.has_float = true;
    for (int i = 0; i < parts; ++i) {
      Linear::Part part = {};
      part.offset = i * n;
      part.is_float = true;
      part.floats = {data.data(), nullptr, n, k};
      linear.parts.push_back(part);
      linear.n += n;
    }
  }
};

// The ranges that were followed, in order.
std::vector<std::pair<int, int>> followed(const Linear& linear, int threads, int rows, int period, int whole) {
  ThreadPool pool(threads);
  Products products(pick_kernels("scalar"), pool, static_cast<size_t>(rows), static_cast<size_t>(linear.k));
  const std::vector<float> x(static_cast<size_t>(rows) * linear.k, 1.0f);
  std::vector<float> y(static_cast<size_t>(rows) * linear.n, -1.0f);
  std::mutex mutex;
  std::vector<std::pair<int, int>> ranges;
  const auto body = [&](int first, int end) {
    std::lock_guard<std::mutex> lock(mutex);
    ranges.push_back({first, end});
    for (int r = 0; r < rows; ++r)
      for (int i = first; i < end; ++i) CHECK_EQ(y[static_cast<size_t>(r) * linear.n + i], 0.0f);  // computed by then
  };
  const Follow follow = Follow::by(period, whole, body);
  products.multiply(
      linear, x.data(), linear.k, rows, y.data(), linear.n, [](int) {}, &follow);
  std::sort(ranges.begin(), ranges.end());
  return ranges;
}

TEST(products_are_followed_everywhere_once_and_not_cut_inside_what_belongs_together) {
  for (int parts : {1, 2})
    for (int n : {8, 32, 200, 320, 960})
      for (int threads : {1, 2, 3})
        for (const auto& [period, whole] : {std::pair<int, int>{32, 32}, {320, 128}, {40, 16}, {36, 12}}) {
          const Zeros zeros(parts, n, 512);
          int at = 0;
          for (const auto& [first, end] : followed(zeros.linear, threads, 3, period, whole)) {
            CHECK_EQ(first, at);
            CHECK(end > first);
            CHECK(first % period == 0 || first % period >= whole);
            at = end;
          }
          CHECK_EQ(at, parts * n);
        }
}

}  // namespace
}  // namespace edgec
