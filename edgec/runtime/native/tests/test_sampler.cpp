#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "check.h"
#include "philox.h"
#include "row_loops.h"
#include "sampler.h"
#include "status.h"
#include "stop_strings.h"

using edgec::Draw;
using edgec::History;
using edgec::Sampled;
using edgec::SampleOutcome;
using edgec::Sampler;
using edgec::SamplingParams;

namespace {

// Logits that look like a model's, the same everywhere.
std::vector<float> row(int32_t vocab, uint64_t seed) {
  std::vector<float> logits(static_cast<size_t>(vocab));
  for (int32_t i = 0; i < vocab; ++i) {
    double sum = 0;
    for (uint32_t j = 0; j < 4; ++j) sum += edgec::uniform(seed, static_cast<uint32_t>(i), j, Draw::kToken);
    logits[static_cast<size_t>(i)] = static_cast<float>((sum - 2.0) * 6.0);
  }
  return logits;
}

Sampled sample(std::vector<float> logits, const SamplingParams& params, uint32_t position = 0) {
  History history;
  return Sampler().sample(logits.data(), static_cast<int32_t>(logits.size()), params, &history, 1, 0, position);
}

struct Hash {
  uint64_t value = 0xcbf29ce484222325u;
  void add(const void* data, size_t bytes) {
    for (size_t i = 0; i < bytes; ++i) value = (value ^ static_cast<const uint8_t*>(data)[i]) * 0x100000001b3u;
  }
};

}  // namespace

TEST(philox_gives_the_published_numbers) {
  // Random123's kat_vectors for philox4x32 with 10 rounds.
  const auto zero = edgec::philox4x32({0, 0, 0, 0}, {0, 0});
  CHECK_EQ(zero[0], 0x6627e8d5u);
  CHECK_EQ(zero[3], 0x9b00dbd8u);
  const auto pi = edgec::philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0});
  CHECK_EQ(pi[0], 0xd16cfe09u);
  CHECK_EQ(pi[1], 0x94fdccebu);
  CHECK_EQ(pi[2], 0x5001e420u);
  CHECK_EQ(pi[3], 0x24126ea1u);
}

// The hash is the same on every CPU: this test is also run for aarch64.
TEST(sampler_gives_the_same_bits_everywhere) {
  Hash hash;
  Sampler sampler;
  for (uint64_t seed = 0; seed < 40; ++seed) {
    const int32_t vocab = static_cast<int32_t>(1 + seed * 37);
    SamplingParams params;
    params.temperature = 0.2f + 0.05f * static_cast<float>(seed);
    params.top_k = seed % 3 == 0 ? static_cast<int32_t>(seed) : 0;
    params.top_p = seed % 2 == 0 ? 0.9f : 1.0f;
    params.min_p = seed % 5 == 0 ? 0.01f : 0.0f;
    params.repetition_penalty = 1.3f;
    params.frequency_penalty = 0.4f;
    params.presence_penalty = -0.3f;
    params.logprobs = 5;
    params.logit_bias.push_back({0, 0.7f});
    History history;
    const int32_t prompt[] = {0};
    history.add_prompt(prompt, 1);
    history.add_answer(vocab / 2);
    std::vector<float> logits = row(vocab, seed), weights = logits;
    const Sampled sampled = sampler.sample(logits.data(), vocab, params, &history, seed, 0, 3);
    sampler.process(weights.data(), vocab, params, &history);
    hash.add(&sampled.token, sizeof(sampled.token));
    hash.add(&sampled.logprob, sizeof(sampled.logprob));
    for (const edgec_token_logprob& top : sampled.top) hash.add(&top, sizeof(top));
    hash.add(weights.data(), weights.size() * sizeof(float));
  }
  CHECK_EQ(hash.value, uint64_t{14697440791888902166u});
}

TEST(row_loops_of_every_instruction_set_give_the_same_bits) {
  const edgec::RowLoops& plain = edgec::plain_row_loops();
  const edgec::RowLoops& picked = edgec::row_loops();
  for (int32_t count : {1, 7, 8, 9, 127, 128, 129, 1000}) {
    const std::vector<float> x = row(count, static_cast<uint64_t>(count));
    const auto size = static_cast<size_t>(count), blocks = static_cast<size_t>(edgec::row_blocks(count));
    std::vector<float> maxima[2], weights[2];
    std::vector<double> sums[2];
    double totals[2][3];
    edgec::RowExtent extents[2];
    for (int i = 0; i < 2; ++i) {
      const edgec::RowLoops& loops = i == 0 ? plain : picked;
      maxima[i].resize(blocks);
      weights[i].resize(size);
      sums[i].resize(blocks);
      extents[i] = loops.extent(x.data(), count, maxima[i].data());
      totals[i][0] = loops.exponentials(x.data(), count, extents[i].greatest, 0.7f, weights[i].data(), sums[i].data());
      totals[i][1] = loops.exponential_sum(x.data(), count, extents[i].greatest);
      totals[i][2] = loops.sum(x.data(), count, nullptr);
    }
    CHECK(extents[0].greatest == *std::max_element(x.begin(), x.end()));
    CHECK(extents[0].greatest == extents[1].greatest && extents[0].block == extents[1].block);
    CHECK(std::memcmp(totals[0], totals[1], sizeof(totals[0])) == 0);
    CHECK(maxima[0] == maxima[1] && weights[0] == weights[1] && sums[0] == sums[1]);
    double exact = 0;
    for (const float value : x)
      exact += std::exp(static_cast<double>(value) - static_cast<double>(extents[0].greatest));
    CHECK(std::abs(totals[0][1] / exact - 1) < 1e-6);
  }
}

// Against every clock, computed one by one: of weights, some of them 0, and of logits at two temperatures, some of them
// so low that their blocks are not looked at.
TEST(race_finds_the_first_places_on_every_instruction_set) {
  const edgec::NoiseKey key = edgec::noise_key(7, 1, 30);
  for (int32_t count : {1, 5, 8, 127, 128, 131, 1003, 4100}) {
    for (const float temperature : {0.0f, 1.0f, 0.7f}) {
      const auto size = static_cast<size_t>(count), blocks = static_cast<size_t>(edgec::row_blocks(count));
      std::vector<float> x = row(count, static_cast<uint64_t>(count)), weights(size), maxima(blocks);
      std::vector<int32_t> numbers(size);
      std::vector<double> sums(blocks);
      for (size_t i = 0; i < size; ++i) {
        if (temperature == 0.0f)
          x[i] = i % 3 == 1 ? 0.0f : std::exp(x[i]);
        else if (i / 256 % 2 == 1)
          x[i] -= i / 256 % 4 == 1 ? 20.0f : 200.0f;
        numbers[i] = static_cast<int32_t>(3 * i + 2);
      }
      const edgec::RowExtent extent = edgec::row_loops().extent(x.data(), count, maxima.data());
      if (temperature == 0.0f)
        weights = x;
      else
        edgec::row_loops().exponentials(x.data(), count, extent.greatest, temperature, weights.data(), sums.data());
      for (const int32_t* tokens :
           {static_cast<const int32_t*>(nullptr), static_cast<const int32_t*>(numbers.data())}) {
        std::vector<edgec::Racer> all;
        for (int32_t i = 0; i < count; ++i) {
          const uint32_t number = static_cast<uint32_t>(tokens == nullptr ? i : tokens[i]);
          const double time = edgec::noise_time(edgec::noise_bits(key, number));
          if (weights[i] > 0) all.push_back({time / static_cast<double>(weights[i]), i});
        }
        std::stable_sort(all.begin(), all.end(), [](const auto& a, const auto& b) { return a.time < b.time; });
        for (const edgec::RowLoops* loops : {&edgec::plain_row_loops(), &edgec::row_loops()}) {
          for (const int32_t places : {1, 4, 8}) {
            edgec::Racer first[8];
            const edgec::RaceRow given = {x.data(), count, temperature, extent, maxima.data(), tokens};
            const int32_t placed = loops->race(given, key, places, first);
            const int32_t wanted_places = std::min(places, static_cast<int32_t>(all.size()));
            CHECK_EQ(placed, wanted_places);
            for (int32_t i = 0; i < placed; ++i) {
              CHECK_EQ(first[i].at, all[static_cast<size_t>(i)].at);
              CHECK(first[i].time == all[static_cast<size_t>(i)].time);
            }
          }
        }
      }
    }
  }
}

TEST(noise_is_exponential_and_its_logarithm_exact) {
  for (const uint32_t bits :
       {0u, 1u, 255u, 1u << 20, 0x40000000u, 0x4AFB0CCCu, 0x4AFB0CCDu, 0x80000000u, 0xFFFFFFFFu}) {
    const double exact = -std::log1p(-(static_cast<double>(bits) + 0.5) / 4294967296.0);
    CHECK(std::abs(edgec::noise_time(bits) / exact - 1) < 1e-14);
  }
  double sum = 0, squares = 0;
  constexpr int kCount = 200000;
  for (uint32_t token = 0; token < kCount; ++token) {
    const double time = edgec::noise_time(edgec::noise_bits(edgec::noise_key(3, 0, 5), token));
    sum += time;
    squares += time * time;
  }
  CHECK(std::abs(sum / kCount - 1) < 0.01);
  CHECK(std::abs(squares / kCount - 2) < 0.05);
}

TEST(sampler_ties_go_to_the_lowest_token) {
  SamplingParams greedy;
  greedy.temperature = 0;
  CHECK_EQ(sample({1, 3, 2, 3, 3}, greedy).token, 1);
  CHECK_EQ(sample({-0.0f, 0.0f}, greedy).token, 0);
  CHECK_EQ(sample(std::vector<float>(777, -5.0f), greedy).token, 0);
  std::vector<float> logits = {1, 3, 2, 3, 3};
  SamplingParams two;
  two.top_k = 2;
  const auto kept = Sampler().probabilities(logits.data(), 5, two, nullptr);
  CHECK_EQ(kept.size(), size_t{2});
  CHECK_EQ(kept[0].token, 1);
  CHECK_EQ(kept[1].token, 3);
}

TEST(sampler_bad_logits_are_an_outcome_not_a_token) {
  const float bad[] = {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                       -std::numeric_limits<float>::infinity()};
  for (const float value : bad) {
    for (size_t at : {size_t{0}, size_t{8}, size_t{1000}, size_t{1001}}) {
      for (const float temperature : {0.0f, 1.0f}) {
        for (const int32_t logprobs : {-1, 0}) {
          std::vector<float> logits = row(1002, 1);
          logits[at] = value;
          SamplingParams params;
          params.temperature = temperature;
          params.logprobs = logprobs;
          const Sampled sampled = sample(logits, params);
          CHECK(sampled.outcome == SampleOutcome::kBadLogits);
          CHECK_EQ(sampled.token, -1);
        }
      }
    }
  }
}

TEST(sampler_draw_walks_the_weights_in_token_order) {
  std::vector<float> weights(1000, 0.0f);
  weights[3] = 1;
  weights[255] = 2;
  weights[256] = 4;
  weights[999] = 1;
  const double total = Sampler::weight_sum(weights.data(), 1000);
  CHECK_EQ(total, 8.0);
  const auto draw = [&](double u) { return Sampler::draw(weights.data(), 1000, total, u); };
  CHECK_EQ(draw(0.0), 3);
  CHECK_EQ(draw(0.125 - 1e-12), 3);
  CHECK_EQ(draw(0.125), 255);
  CHECK_EQ(draw(0.375), 256);
  CHECK_EQ(draw(0.874), 256);
  CHECK_EQ(draw(0.875), 999);
  CHECK_EQ(draw(1.0 - 1e-16), 999);
  CHECK_EQ(Sampler::draw(weights.data(), 1000, total * 1.0001, 1.0 - 1e-16), 999);  // rounding: never off the end
}

TEST(sampler_keeps_the_best_token_under_any_truncation) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    SamplingParams params;
    params.top_k = 1 + static_cast<int32_t>(seed % 3);
    params.top_p = 1e-6f;
    params.min_p = 0.99f;
    params.temperature = 0.5f;
    const std::vector<float> logits = row(500, seed);
    const auto best = std::max_element(logits.begin(), logits.end()) - logits.begin();
    CHECK_EQ(sample(logits, params).token, static_cast<int32_t>(best));
  }
}

TEST(history_forgets_what_is_rolled_back) {
  History history;
  const int32_t prompt[] = {4, 4, 5};
  history.add_prompt(prompt, 3);
  history.add_answer(7);
  history.add_answer(5);
  history.remove_answer(7);
  history.remove_answer(5);
  CHECK_EQ(history.entries().size(), size_t{2});
  for (const History::Entry& entry : history.entries()) {
    CHECK_EQ(entry.answer, 0);
    CHECK_EQ(entry.prompt, entry.token == 4 ? 2 : 1);
  }
}

TEST(sampler_logprob_is_that_of_the_sampled_token) {
  std::vector<float> logits = row(3000, 9);
  SamplingParams params;
  params.temperature = 2.0f;
  params.logprobs = 3;
  params.logit_bias.push_back({17, 50.0f});
  const Sampled sampled = sample(logits, params);
  CHECK_EQ(sampled.token, 17);
  CHECK_EQ(sampled.logprob, Sampler::logprob(logits.data(), 3000, 17));
  CHECK(sampled.top[0].logprob > sampled.top[1].logprob);
}

TEST(sampling_params_refuse_and_name_the_field) {
  edgec_sampling options = {};
  options.struct_size = sizeof(options) - 4;
  CHECK_THROWS(edgec::sampling_params(options, 10), EDGEC_VERSION_MISMATCH);
  options.struct_size = sizeof(options);
  options.top_p = options.repetition_penalty = 1.0f;
  options.n = 1;
  CHECK(edgec::sampling_params(options, 10).greedy());
  options.stop_count = 1;
  CHECK_THROWS(edgec::sampling_params(options, 10), EDGEC_INVALID_ARGUMENT);
  options.stop_count = 0;
  options.n = 2;
  CHECK_THROWS(edgec::sampling_params(options, 10), EDGEC_INVALID_ARGUMENT);
  options.temperature = std::nanf("");
  try {
    edgec::sampling_params(options, 10);
  } catch (const edgec::Error& error) {
    CHECK_EQ(std::string(error.what()), std::string("temperature is nan; it must be between 0 and 100"));
  }
}
