// The engine as an app sees it: what ends an answer, what is refused, what is given back.
#include <sys/resource.h>

#include <cstdio>
#include <string>
#include <thread>
#include <vector>

#include "session.h"
#include "status.h"
#include "tiny_bundle.h"

namespace edgec {
namespace {

struct Bundle {
  std::string folder;
  explicit Bundle(const TinyOptions& options = {}) : folder(make_tiny_bundle(options)) {}
  ~Bundle() { remove_bundle(folder); }
};

edgec_engine_options one_thread() {
  edgec_engine_options options = EDGEC_ENGINE_OPTIONS_INIT;
  options.threads = 1;
  return options;
}

bool whole(const Session& session) {
  const edgec_stats s = session.stats();
  return s.blocks_owned == 0 && s.blocks_free + s.blocks_cached == s.blocks_total && s.kv_tokens == 0;
}

TEST(engine_stops_at_max_tokens_and_counts) {
  const Bundle bundle;
  Session session(bundle.folder, one_thread());
  const uint64_t id = session.ask(prompt(10, 1), greedy(5));
  session.run();
  CHECK_EQ(session.heard(id).tokens.size(), size_t{5});
  CHECK_EQ(session.heard(id).counted, 5);
  CHECK_EQ(session.heard(id).finish, EDGEC_FINISH_LENGTH);
  CHECK(whole(session));
}

TEST(engine_fills_the_context_exactly_and_refuses_one_more) {
  const Bundle bundle;  // a context of 96
  Session session(bundle.folder, one_thread());
  const uint64_t id = session.ask(prompt(90, 1), greedy(0));
  session.run();
  CHECK_EQ(session.heard(id).tokens.size(), size_t{6});
  CHECK_EQ(session.heard(id).finish, EDGEC_FINISH_LENGTH);
  const uint64_t last = session.ask(prompt(95, 1), greedy(0));
  session.run();
  CHECK_EQ(session.heard(last).tokens.size(), size_t{1});
  session.ask(prompt(96, 1), greedy(0));
  CHECK_EQ(session.refused, EDGEC_TOO_LONG);
  session.ask(prompt(5000, 1), greedy(0));
  CHECK_EQ(session.refused, EDGEC_TOO_LONG);
  CHECK(whole(session));
}

TEST(engine_ends_at_a_stop_token_and_a_stop_string) {
  const Bundle bundle;
  Session session(bundle.folder, one_thread());
  const uint64_t free_id = session.ask(prompt(10, 1), greedy(20));
  session.run();
  const Heard unlimited = session.heard(free_id);
  edgec_sampling sampling = greedy(20);
  const int32_t stop = unlimited.tokens[3];
  sampling.stop_tokens = &stop;
  sampling.stop_token_count = 1;
  const uint64_t stopped = session.ask(prompt(10, 1), sampling);
  session.run();
  size_t first = 0;
  while (unlimited.tokens[first] != stop) ++first;
  CHECK_EQ(session.heard(stopped).tokens.size(), first);
  CHECK_EQ(session.heard(stopped).finish, EDGEC_FINISH_STOP);

  std::string wanted;  // two ASCII characters of the answer, whole
  size_t at = 0;
  for (size_t i = 0; i + 1 < unlimited.text.size() && wanted.empty(); ++i)
    if (static_cast<signed char>(unlimited.text[i]) >= 0 && static_cast<signed char>(unlimited.text[i + 1]) >= 0) {
      wanted = unlimited.text.substr(i, 2);
      at = unlimited.text.find(wanted);
    }
  if (!wanted.empty()) {
    sampling = greedy(20);
    const char* strings[] = {wanted.c_str()};
    sampling.stop = strings;
    sampling.stop_count = 1;
    const uint64_t cut = session.ask(prompt(10, 1), sampling);
    session.run();
    CHECK_EQ(session.heard(cut).text, unlimited.text.substr(0, at));
    CHECK_EQ(session.heard(cut).finish, EDGEC_FINISH_STOP);
  }
  CHECK(whole(session));
}

TEST(engine_cancel_at_every_step_returns_every_block) {
  const Bundle bundle;
  for (int when = 0; when < 14; ++when) {
    Session session(bundle.folder, one_thread());
    edgec_sampling several = sampled(8, 3);
    several.n = 3;
    const uint64_t victim = session.ask(prompt(70, 1), several);  // three chunks of prompt, then eight tokens
    const uint64_t mate = session.ask(prompt(30, 2), greedy(8));
    for (int i = 0; i < when; ++i) session.step();
    const edgec_status status = edgec_engine_cancel(session.engine, victim);
    session.listen();
    CHECK(status == EDGEC_OK || (status == EDGEC_NOT_FOUND && session.heard(victim).finish != EDGEC_FINISH_NONE));
    if (status == EDGEC_OK) CHECK_EQ(session.heard(victim, 2).finish, EDGEC_FINISH_CANCELLED);
    session.run();
    CHECK_EQ(session.heard(mate).tokens.size(), size_t{8});
    CHECK(whole(session));
    CHECK_EQ(edgec_engine_cancel(session.engine, victim), EDGEC_NOT_FOUND);
  }
}

TEST(engine_scores_a_prompt_as_it_would_generate_it) {
  const Bundle bundle;
  Session session(bundle.folder, one_thread());
  const std::vector<int32_t> question = prompt(40, 1);
  const uint64_t id = session.ask(question, greedy(10));
  session.run();
  std::vector<int32_t> both = question;
  const Heard said = session.heard(id);
  both.insert(both.end(), said.tokens.begin(), said.tokens.end());
  const uint64_t scored = session.ask(both, greedy(1), 0, true);
  session.run();
  const Heard heard = session.heard(scored);
  CHECK_EQ(heard.scores.size(), both.size());
  CHECK(std::isnan(heard.scores[0]));
  for (size_t i = 0; i < said.logprobs.size(); ++i) CHECK_EQ(heard.scores[question.size() + i], said.logprobs[i]);
}

TEST(engine_refuses_what_is_wrong_and_says_so) {
  const Bundle bundle;
  Session session(bundle.folder, one_thread());
  const auto refuses = [&](const std::vector<int32_t>& tokens, const edgec_sampling& sampling, const char* word) {
    session.ask(tokens, sampling);
    CHECK_EQ(session.refused, EDGEC_INVALID_ARGUMENT);
    CHECK(std::string(edgec_last_error()).find(word) != std::string::npos);
  };
  refuses({}, greedy(1), "no tokens");
  refuses({-1}, greedy(1), "vocabulary");
  refuses({259}, greedy(1), "vocabulary");
  edgec_sampling sampling = greedy(1);
  sampling.top_p = 0.0f;
  refuses({1}, sampling, "top_p");
  sampling = greedy(1);
  sampling.temperature = NAN;
  refuses({1}, sampling, "temperature");
  sampling = sampled(1, 1);
  sampling.n = 17;
  refuses({1}, sampling, "max_batch");
  edgec_request request;
  std::memset(&request, 0, sizeof(request));
  uint64_t id;
  CHECK_EQ(edgec_engine_submit(session.engine, &request, &id), EDGEC_VERSION_MISMATCH);
  CHECK_EQ(edgec_engine_submit(nullptr, &request, &id), EDGEC_INVALID_ARGUMENT);
  CHECK_EQ(edgec_engine_step(session.engine, nullptr), EDGEC_INVALID_ARGUMENT);
  CHECK_EQ(edgec_engine_trim(session.engine, 9), EDGEC_INVALID_ARGUMENT);
}

TEST(engine_queue_has_an_end) {
  const Bundle bundle;
  edgec_engine_options options = one_thread();
  options.max_waiting = 3;
  Session session(bundle.folder, options);
  for (int i = 0; i < 3; ++i) {
    session.ask(prompt(10, i), greedy(2));
    CHECK_EQ(session.refused, EDGEC_OK);
  }
  session.ask(prompt(10, 9), greedy(2));
  CHECK_EQ(session.refused, EDGEC_QUEUE_FULL);
  session.run();
  session.ask(prompt(10, 9), greedy(2));
  CHECK_EQ(session.refused, EDGEC_OK);
}

TEST(engine_budget_is_checked_before_loading) {
  const Bundle bundle;
  edgec_engine_options options = one_thread();
  options.memory_budget = 1000000;
  Session session(bundle.folder, options);
  CHECK_EQ(session.status, EDGEC_OVER_BUDGET);
  CHECK(session.engine == nullptr);
  CHECK(std::string(edgec_last_error()).find("budget") != std::string::npos);
}

TEST(engine_refuses_a_bundle_of_another_version) {
  TinyOptions other;
  other.abi = 99;
  const Bundle bundle(other);
  Session session(bundle.folder, one_thread());
  CHECK_EQ(session.status, EDGEC_VERSION_MISMATCH);
}

TEST(engine_refuses_broken_files) {
  const auto status_with = [](const char* file, const std::string& content) {
    const Bundle bundle;
    write_text(bundle.folder + file, content);
    Session session(bundle.folder, one_thread());
    return session.status;
  };
  const Bundle good;
  const std::string weights = read_text(good.folder + "/model.safetensors");
  CHECK_EQ(status_with("/model.safetensors", weights.substr(0, weights.size() / 2)), EDGEC_CORRUPT);
  CHECK_EQ(status_with("/model.safetensors", weights.substr(0, 4)), EDGEC_CORRUPT);
  CHECK_EQ(status_with("/model.safetensors", ""), EDGEC_CORRUPT);
  CHECK_EQ(status_with("/manifest.json", "{"), EDGEC_CORRUPT);
  CHECK_EQ(status_with("/manifest.json", "{\"format\": 1}"), EDGEC_CORRUPT);
  CHECK_EQ(status_with("/tokenizer.json", "[]"), EDGEC_CORRUPT);
  Session absent("/no/such/folder", one_thread());
  CHECK_EQ(absent.status, EDGEC_NOT_FOUND);
}

TEST(engine_trim_gives_the_cache_back) {
  const Bundle bundle;
  Session session(bundle.folder, one_thread());
  session.ask(prompt(60, 1), greedy(4));
  session.run();
  CHECK(session.stats().blocks_cached > 0);
  CHECK_EQ(edgec_engine_trim(session.engine, EDGEC_TRIM_IDLE), EDGEC_OK);
  CHECK_EQ(session.stats().blocks_cached, 0);
  const uint64_t again = session.ask(prompt(60, 1), greedy(4));  // on pages that the system took back
  session.run();
  CHECK_EQ(session.heard(again).tokens.size(), size_t{4});
}

// Sanitizers keep freed memory for a while, on purpose.
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
TEST(engine_memory_is_flat_over_requests) {
  const Bundle bundle;
  Session session(bundle.folder, one_thread());
  const auto resident = [] {
    long pages = 0, total = 0;
    std::FILE* file = std::fopen("/proc/self/statm", "r");
    if (file == nullptr || std::fscanf(file, "%ld %ld", &total, &pages) != 2) pages = 0;
    if (file != nullptr) std::fclose(file);
    return pages * 4096;
  };
  long before = 0;
  for (int i = 0; i < 250; ++i) {
    session.ask(prompt(20 + i % 40, i), sampled(10, i));
    session.run();
    session.answers.clear();
    if (i == 50) before = resident();
  }
  CHECK(resident() - before < 256 * 1024);
}
#endif

TEST(engine_thermal_hook_slows_it_down) {
  const Bundle bundle;
  static int asked;
  asked = 0;
  edgec_engine_options options = one_thread();
  options.thermal = [](void*) { return ++asked > 0 ? 90 : 0; };
  Session session(bundle.folder, options);
  session.ask(prompt(10, 1), greedy(3));
  session.run();
  CHECK(asked >= 3);
}

TEST(engine_submit_and_cancel_from_other_threads) {
  const Bundle bundle;
  edgec_engine_options options = EDGEC_ENGINE_OPTIONS_INIT;
  options.threads = 2;
  Session session(bundle.folder, options);
  std::vector<std::thread> clients;
  for (int t = 0; t < 3; ++t)
    clients.emplace_back([&session, t] {
      for (int i = 0; i < 20; ++i) {
        const std::vector<int32_t> tokens = prompt(5 + i, t * 100 + i);
        edgec_request request;
        std::memset(&request, 0, sizeof(request));
        request.struct_size = sizeof(request);
        request.tokens = tokens.data();
        request.token_count = static_cast<int32_t>(tokens.size());
        request.sampling = sampled(6, i);
        uint64_t id = 0;
        if (edgec_engine_submit(session.engine, &request, &id) == EDGEC_OK && i % 3 == 0)
          edgec_engine_cancel(session.engine, id);
      }
    });
  for (int i = 0; i < 50; ++i) session.step();
  for (std::thread& client : clients) client.join();
  session.run();
  CHECK(whole(session));
  const edgec_stats stats = session.stats();
  CHECK_EQ(stats.requests_finished + stats.requests_cancelled, uint64_t{60});
}

}  // namespace
}  // namespace edgec
