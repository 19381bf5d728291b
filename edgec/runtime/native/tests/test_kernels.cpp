// Every kernel set computes the bits that plain C++ computes.
#include <cmath>
#include <cstring>
#include <vector>

#include "check.h"
#include "kernels/kernels.h"
#include "rope_tables.h"
#include "status.h"
#include "vector_math.h"

namespace edgec {
namespace {

uint32_t random_bits(uint64_t* state) {
  *state = *state * 6364136223846793005u + 1442695040888963407u;
  return static_cast<uint32_t>(*state >> 33);
}

float random_float(uint64_t* state) { return static_cast<float>(random_bits(state) % 200001) / 25000.0f - 4.0f; }

std::vector<float> random_floats(size_t count, uint64_t seed) {
  std::vector<float> out(count);
  for (float& value : out) value = random_float(&seed);
  return out;
}

bool same(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

struct Quantized {
  std::vector<int8_t> values;
  std::vector<float> scales;
  std::vector<int32_t> offsets;
  QuantizedRows rows;

  Quantized(const Kernels& kernels, const std::vector<float>& x, int count, int k) {
    const int padded = (k + kGroup - 1) / kGroup * kGroup;
    values.resize(static_cast<size_t>(count) * padded);
    scales.resize(static_cast<size_t>(count) * padded / kGroup);
    offsets.resize(scales.size());
    rows = {values.data(), scales.data(), offsets.data(), count, padded};
    for (int r = 0; r < count; ++r) kernels.quantize(x.data() + static_cast<size_t>(r) * k, k, rows, r, 0);
  }
};

std::vector<float> product(const Kernels& kernels, int rows, int n, int k, bool extreme, bool bias) {
  uint64_t seed = static_cast<uint64_t>(n * 1000 + k);
  const WeightLayout layout = kernels.layout;
  const int padded_k = (k + kGroup - 1) / kGroup * kGroup,
            padded_n = (n + layout.block - 1) / layout.block * layout.block;
  std::vector<uint8_t> data(static_cast<size_t>(padded_n) * padded_k, static_cast<uint8_t>(layout.bias));
  for (int i = 0; i < n; ++i)
    for (int j = 0; j < k; ++j) {
      const int w = extreme ? ((i + j) % 2 != 0 ? 127 : -127) : static_cast<int>(random_bits(&seed) % 255) - 127;
      data[layout.index(i, j, padded_k)] = static_cast<uint8_t>(w + layout.bias);
    }
  std::vector<float> scales(padded_n, 0.0f), biases(padded_n, 0.0f);
  for (int i = 0; i < n; ++i) scales[i] = 0.001f * static_cast<float>(i % 7 + 1);
  for (int i = 0; i < n; ++i) biases[i] = static_cast<float>(i % 5);
  std::vector<float> x = random_floats(static_cast<size_t>(rows) * k, 99);
  if (extreme)
    for (size_t i = 0; i < x.size(); ++i) x[i] = i % 2 != 0 ? 3.0f : -3.0f;
  const Quantized q(kernels, x, rows, k);
  const PackedMatrix w = {data.data(), scales.data(), bias ? biases.data() : nullptr, n, padded_k};
  std::vector<float> y(static_cast<size_t>(rows) * (n + 3), -1.0f);
  kernels.matmul(q.rows, w, 0, padded_n / layout.block, y.data(), n + 3);
  return y;
}

std::vector<float> attention(const Kernels& kernels, KvType type, int block_size, int rows, int heads = 3) {
  constexpr int kPositions = 37, kBlocks = 12;
  const KvLayout kv = {type, block_size, 2, 20};
  const size_t blocks = kBlocks + 64 / block_size * 2;
  std::vector<uint8_t> pool(kv.block_bytes() * blocks + kReadPast, 0);
  std::vector<int32_t> table;
  for (int b = 0; b * block_size < kPositions; ++b) table.push_back(b);
  for (int p = 0; p < kPositions; ++p) {
    const std::vector<float> key = random_floats(40, p + 1), value = random_floats(40, p + 1000);
    for (int h = 0; h < 2; ++h)
      kernels.store_kv(kv, pool.data() + kv.head_bytes() * (h * blocks + table[p / block_size]), p % block_size,
                       key.data() + 20 * h, value.data() + 20 * h);
  }
  const std::vector<float> queries = random_floats(static_cast<size_t>(rows) * 2 * heads * 20, 5);
  std::vector<float> out(queries.size(), 0.0f), scratch(attention_scratch(kv, heads, 64));
  std::vector<int32_t> positions;
  for (int r = 0; r < rows; ++r) positions.push_back(kPositions - rows + r);
  const size_t width = static_cast<size_t>(heads) * 20;
  for (int h = 0; h < 2; ++h) {
    const AttentionTask task = {queries.data() + h * width,
                                2 * width,
                                out.data() + h * width,
                                2 * width,
                                rows,
                                heads,
                                positions.data(),
                                table.data(),
                                pool.data() + kv.head_bytes() * blocks * h,
                                0.2f,
                                scratch.data()};
    kernels.attend(kv, task);
  }
  return out;
}

std::vector<const Kernels*> others() {
  std::vector<const Kernels*> sets = usable_kernels();
  sets.pop_back();
  return sets;
}

const Kernels& scalar() { return pick_kernels("scalar"); }

TEST(kernels_products_equal_plain_cpp) {
  for (const Kernels* set : others())
    for (int rows : {1, 2, 3, 4, 5, 7, 8, 9, 12, 17})
      for (int n : {1, 8, 16, 33})
        for (int k : {5, 32, 64, 100})
          for (bool extreme : {false, true})
            if (!same(product(*set, rows, n, k, extreme, n == 33), product(scalar(), rows, n, k, extreme, n == 33)))
              check::report(__FILE__, __LINE__,
                            std::string(set->name) + " differs at " + std::to_string(rows) + "×" + std::to_string(n) +
                                "×" + std::to_string(k));
}

TEST(kernels_products_do_not_depend_on_neighbouring_rows) {
  const std::vector<float> many = product(scalar(), 17, 33, 100, false, false),
                           one = product(scalar(), 1, 33, 100, false, false);
  CHECK(std::memcmp(many.data(), one.data(), 33 * sizeof(float)) == 0);
}

TEST(kernels_extreme_products_do_not_saturate) {
  // 127 · 127 in every place, alternating signs on both sides: the group's sum is its greatest possible.
  const std::vector<float> y = product(*usable_kernels().front(), 1, 1, kGroup, true, false);
  const float scale = 3.0f / 127.0f;
  CHECK_EQ(y[0], static_cast<float>(127 * 127 * kGroup) * scale * 0.001f);
}

TEST(kernels_attention_equals_plain_cpp) {
  for (const Kernels* set : others())
    for (KvType type : {KvType::kInt8, KvType::kFp16, KvType::kFp32})
      for (int block : {4, 8, 16, 32, 64})
        for (int rows : {1, 3, 4})
          CHECK(same(attention(*set, type, block, rows), attention(scalar(), type, block, rows)));
}

TEST(kernels_attention_of_any_number_of_queries_equals_plain_cpp) {
  for (const Kernels* set : others())
    for (int heads = 1; heads <= 9; ++heads)  // queries are taken up to twelve at once
      for (int rows = 1; rows <= kAttentionRows; ++rows)
        CHECK(
            same(attention(*set, KvType::kInt8, 16, rows, heads), attention(scalar(), KvType::kInt8, 16, rows, heads)));
}

TEST(kernels_attention_does_not_depend_on_the_block_size) {
  for (KvType type : {KvType::kInt8, KvType::kFp16, KvType::kFp32})
    for (int block : {4, 8, 32, 64}) CHECK(same(attention(scalar(), type, block, 2), attention(scalar(), type, 16, 2)));
}

// One query over keys and values that are whole numbers up to 127, which every type of cache holds exactly.
std::vector<float> attention_over_integers(const Kernels& kernels, KvType type, int dim, int positions, bool extreme) {
  const KvLayout kv = {type, 16, 1, dim};
  const int blocks = (positions + 15) / 16;
  std::vector<uint8_t> pool(kv.block_bytes() * blocks + kReadPast, 0);
  std::vector<int32_t> table;
  for (int b = 0; b < blocks; ++b) table.push_back(b);
  uint64_t seed = 11;
  std::vector<float> key(dim), value(dim), query(dim);
  for (int p = 0; p < positions; ++p) {
    for (int d = 0; d < dim; ++d) {
      key[d] = extreme ? 127.0f : static_cast<float>(random_bits(&seed) % 255) - 127.0f;
      value[d] = extreme ? -127.0f : static_cast<float>(random_bits(&seed) % 255) - 127.0f;
    }
    key[0] = value[0] = 127.0f;
    kernels.store_kv(kv, pool.data() + kv.block_bytes() * (p / 16), p % 16, key.data(), value.data());
  }
  for (float& x : query) x = extreme ? 1.0f : random_float(&seed);
  std::vector<float> out(dim), scratch(attention_scratch(kv, 1, positions));
  const int32_t last = positions - 1;
  AttentionTask task = {query.data(), 0, out.data(), 0, 1, 1, &last, table.data(), pool.data(), 0.002f, nullptr};
  task.scratch = scratch.data();
  kernels.attend(kv, task);
  return out;
}

TEST(kernels_attention_to_int8_is_close_to_that_to_floats) {
  for (const Kernels* set : usable_kernels())
    for (int dim : {2, 20, 64, 80, 128})
      for (int positions : {1, 15, 16, 17, 300}) {
        const std::vector<float> a = attention_over_integers(*set, KvType::kInt8, dim, positions, false),
                                 b = attention_over_integers(*set, KvType::kFp32, dim, positions, false);
        for (int d = 0; d < dim; ++d) CHECK(std::fabs(a[d] - b[d]) < 0.05f);  // of 127: queries have fourteen bits
      }
}

TEST(kernels_extreme_attention_does_not_overflow) {
  for (const Kernels* set : usable_kernels()) {
    const std::vector<float> out = attention_over_integers(*set, KvType::kInt8, 1024, 3000, true);
    CHECK(std::fabs(out[0] - 127.0f) < 0.01f);
    for (int d = 1; d < 1024; ++d) CHECK(std::fabs(out[d] + 127.0f) < 0.01f);
  }
}

TEST(kernels_quantising_keeps_a_row_that_is_no_number_one) {
  for (const Kernels* set : usable_kernels())
    for (const int count : {32, 40}) {
      const std::vector<float> x(count, std::nanf(""));
      std::vector<int8_t> values(64);
      float scales[2] = {0, 0};
      int32_t offsets[2];
      set->quantize(x.data(), count, {values.data(), scales, offsets, 1, 64}, 0, 0);
      CHECK(std::isnan(scales[0]));
      CHECK(count == 32 || std::isnan(scales[1]));
      for (const int8_t value : values) CHECK(value == -127 || value == 0);  // sums stay in their range
    }
}

TEST(kernels_float_parts_equal_plain_cpp) {
  for (const Kernels* set : others()) {
    for (int count : {1, 7, 8, 20, 72}) {
      const std::vector<float> x = random_floats(count, 3), w = random_floats(count, 4);
      std::vector<float> a(count), b(count);
      set->rms_norm(x.data(), w.data(), 1e-5f, count, a.data());
      scalar().rms_norm(x.data(), w.data(), 1e-5f, count, b.data());
      CHECK(same(a, b));
      set->silu_mul(x.data(), w.data(), count, a.data());
      scalar().silu_mul(x.data(), w.data(), count, b.data());
      CHECK(same(a, b));
      a = b = x;
      set->add(a.data(), w.data(), count);
      scalar().add(b.data(), w.data(), count);
      CHECK(same(a, b));
      if (count % 2 == 0) {
        a = b = x;
        set->rotate(a.data(), w.data(), w.data() + count / 2, count / 2);
        scalar().rotate(b.data(), w.data(), w.data() + count / 2, count / 2);
        CHECK(same(a, b));
      }
    }
  }
}

TEST(math_exp_and_log_are_close_to_the_library) {
  for (float x = -80.0f; x < 80.0f; x += 0.137f) {
    CHECK(std::fabs(exp_f32(x) / std::exp(static_cast<double>(x)) - 1.0) < 3e-7);
    const double y = std::exp(static_cast<double>(x));
    CHECK(std::fabs(log_f32(static_cast<float>(y)) - std::log(static_cast<double>(static_cast<float>(y)))) < 1e-5);
  }
  CHECK_EQ(exp_f32(-100.0f), 0.0f);
  CHECK_EQ(exp_f32(0.0f), 1.0f);
  CHECK(std::isfinite(exp_f32(1e30f)));
}

TEST(rope_tables_are_right_far_out) {
  for (double x : {0.0, 0.5, 1.5707963267948966, 3.0, 100.25, 8191.0, 131071.5, 1000000.0}) {
    double s, c;
    sin_cos(x, &s, &c);
    CHECK(std::fabs(s - std::sin(x)) < 1e-12);
    CHECK(std::fabs(c - std::cos(x)) < 1e-12);
  }
}

TEST(kernels_unknown_name_is_refused) { CHECK_THROWS(pick_kernels("mmx"), EDGEC_UNSUPPORTED); }

}  // namespace
}  // namespace edgec
