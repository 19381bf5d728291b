// One answer: a request's tokens and log-probabilities are the same bits whatever else happens around it.
#include <string>
#include <utility>
#include <vector>

#include "kernels/kernels.h"
#include "session.h"
#include "tiny_bundle.h"

namespace edgec {
namespace {

struct Bundle {
  std::string folder;
  explicit Bundle(const TinyOptions& options = {}) : folder(make_tiny_bundle(options)) {}
  ~Bundle() { remove_bundle(folder); }
};

// What each of sixteen requests says when it has the engine to itself.
std::vector<Heard> alone(const std::string& folder, edgec_engine_options options) {
  std::vector<Heard> out;
  for (int i = 0; i < 16; ++i) {
    Session session(folder, options);
    const uint64_t id = session.ask(prompt(5 + 3 * i, i), i % 2 != 0 ? sampled(12, i) : greedy(12));
    session.run();
    out.push_back(session.heard(id));
  }
  return out;
}

edgec_engine_options plain() {
  edgec_engine_options options = EDGEC_ENGINE_OPTIONS_INIT;
  options.threads = 1;
  options.kernel = "scalar";
  return options;
}

void expect_equal(const std::string& folder, edgec_engine_options options, const std::vector<Heard>& expected,
                  int count) {
  Session session(folder, options);
  CHECK_EQ(session.status, EDGEC_OK);
  std::vector<uint64_t> ids;
  for (int i = 0; i < count; ++i)
    ids.push_back(session.ask(prompt(5 + 3 * i, i), i % 2 != 0 ? sampled(12, i) : greedy(12)));
  session.run();
  for (int i = 0; i < count; ++i) CHECK(session.heard(ids[i]) == expected[i]);
}

TEST(one_answer_batched_equals_alone) {
  const Bundle bundle;
  const std::vector<Heard> expected = alone(bundle.folder, plain());
  CHECK_EQ(expected[0].tokens.size(), size_t{12});
  for (int count : {1, 2, 3, 7, 16}) expect_equal(bundle.folder, plain(), expected, count);
}

TEST(one_answer_whatever_the_kernels_and_threads) {
  std::vector<TinyOptions> shapes(3);
  shapes[1].tied = false;
  shapes[1].float_layer = shapes[1].bias = true;
  shapes[2].wide = 96;
  for (const TinyOptions& shape : shapes) {
    const Bundle bundle(shape);
    const std::vector<Heard> expected = alone(bundle.folder, plain());
    for (const Kernels* set : usable_kernels())
      for (int threads : {1, 2, 3}) {
        edgec_engine_options options = plain();
        options.kernel = set->name;
        options.threads = threads;
        expect_equal(bundle.folder, options, expected, 16);
      }
  }
}

TEST(one_answer_whatever_the_chunks_and_blocks) {
  const Bundle bundle;
  const std::vector<Heard> expected = alone(bundle.folder, plain());
  for (int tokens : {16, 17, 23, 200})
    for (int block : {4, 16, 64}) {
      edgec_engine_options options = plain();
      options.step_tokens = tokens;
      options.block_size = block;
      expect_equal(bundle.folder, options, expected, 16);
    }
}

TEST(one_answer_with_static_batching) {
  const Bundle bundle;
  edgec_engine_options options = plain();
  const std::vector<Heard> expected = alone(bundle.folder, options);
  options.batching = EDGEC_BATCHING_STATIC;
  options.max_batch = 4;
  expect_equal(bundle.folder, options, expected, 16);
}

TEST(one_answer_with_a_cached_prefix) {
  const Bundle bundle;
  edgec_engine_options options = plain();
  options.prefix_cache = -1;
  Session cold(bundle.folder, options);
  const std::vector<int32_t> question = prompt(60, 3);
  const uint64_t first = cold.ask(question, greedy(12));
  cold.run();
  options.prefix_cache = 0;
  Session warm(bundle.folder, options);
  for (int round = 0; round < 3; ++round) {
    const uint64_t id = warm.ask(question, greedy(12));
    warm.run();
    CHECK(warm.heard(id) == cold.heard(first));
    CHECK_EQ(warm.heard(id).cached,
             round == 0 ? 0 : 56);  // seven of its eight-token blocks; the last token is computed
  }
}

TEST(one_answer_after_preemption) {
  const Bundle bundle;
  edgec_engine_options options = plain();
  options.block_size = 4;
  const std::vector<Heard> expected = alone(bundle.folder, options);
  // A pool that holds little more than one sequence of full length: 16 requests must preempt one another.
  Session probe(bundle.folder, options);
  const std::string text = edgec_engine_describe(probe.engine);
  const auto field = [&](const char* name) {
    return std::strtoull(text.c_str() + text.find(name) + std::strlen(name), nullptr, 10);
  };
  options.memory_budget = field("\"weights\": ") + field("\"scratch\": ") + field("\"bytes_per_block\": ") * 30;
  Session session(bundle.folder, options);
  CHECK_EQ(session.status, EDGEC_OK);
  std::vector<uint64_t> ids;
  for (int i = 0; i < 16; ++i)
    ids.push_back(session.ask(prompt(5 + 3 * i, i), i % 2 != 0 ? sampled(12, i) : greedy(12)));
  session.run();
  for (int i = 0; i < 16; ++i) CHECK(session.heard(ids[i]) == expected[i]);
  // And by force, at every step.
  Session forced(bundle.folder, options);
  ids.clear();
  for (int i = 0; i < 4; ++i) ids.push_back(forced.ask(prompt(5 + 3 * i, i), i % 2 != 0 ? sampled(12, i) : greedy(12)));
  for (int i = 0; i < 300 && forced.step() != EDGEC_STEP_IDLE; ++i)
    if (i % 3 == 2) CHECK_EQ(edgec_engine_trim(forced.engine, EDGEC_TRIM_CRITICAL), EDGEC_OK);
  forced.run();
  for (int i = 0; i < 4; ++i) CHECK(forced.heard(ids[i]) == expected[i]);
  CHECK(forced.stats().preemptions > 0);
  CHECK(forced.stats().recomputed_tokens > 0);
}

TEST(one_answer_of_n_equals_the_same_seed_elsewhere) {
  const Bundle bundle;
  Session session(bundle.folder, plain());
  edgec_sampling sampling = sampled(12, 5);
  sampling.n = 4;
  const uint64_t together = session.ask(prompt(21, 2), sampling);
  const uint64_t mate = session.ask(prompt(40, 3), sampled(12, 9));  // disturbs nothing
  session.run();
  sampling.n = 1;
  const uint64_t one = session.ask(prompt(21, 2), sampling);
  session.run();
  CHECK(session.heard(together, 0) == session.heard(one));
  CHECK(!(session.heard(together, 1) == session.heard(together, 0)));
  CHECK_EQ(session.heard(mate).tokens.size(), size_t{12});
  const edgec_stats stats = session.stats();
  CHECK_EQ(stats.blocks_owned, 0);
}

TEST(one_answer_on_every_platform) {
  // The digest of everything that sixteen requests say, logits' bits included. It was taken on x86-64 with plain C++;
  // any machine, compiler and kernel set has to find the same one.
  const std::pair<int, uint64_t> digests[] = {{100, 1557888447746955281u}, {96, 15947866885940155971u}};
  for (const auto& [wide, digest] : digests) {
    TinyOptions shape;
    shape.wide = wide;
    const Bundle bundle(shape);
    for (const Kernels* set : usable_kernels()) {
      edgec_engine_options options = plain();
      options.kernel = set->name;
      uint64_t hash = 1469598103934665603u;
      for (const Heard& heard : alone(bundle.folder, options)) {
        for (size_t i = 0; i < heard.tokens.size(); ++i) {
          uint32_t bits;
          std::memcpy(&bits, &heard.logprobs[i], 4);
          hash = ((hash ^ static_cast<uint32_t>(heard.tokens[i])) * 1099511628211u ^ bits) * 1099511628211u;
        }
      }
      CHECK_EQ(hash, digest);
    }
  }
}

}  // namespace
}  // namespace edgec
