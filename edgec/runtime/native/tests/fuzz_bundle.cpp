// fuzz_bundle SEED ITERATIONS: hostile bundles and hostile calls, meant to run under sanitizers.
//
// Each iteration damages a bundle's manifest or weights file, opens it, and uses what opens: it may be refused with any
// status but EDGEC_INTERNAL, and must never crash, hang or report something that isn't so. A good bundle gets random
// calls: options, requests, cancels, trims and forwards out of every range. Prints the iterations, how many bundles
// opened, and how many calls were accepted.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "philox.h"
#include "session.h"
#include "tiny_bundle.h"

namespace {

using edgec::Session;

class Random {
 public:
  explicit Random(uint64_t seed) : seed_(seed) {}
  uint32_t below(uint32_t n) {
    const auto block = edgec::philox4x32({static_cast<uint32_t>(at_), static_cast<uint32_t>(at_ >> 32), 0, 0},
                                         {static_cast<uint32_t>(seed_), static_cast<uint32_t>(seed_ >> 32)});
    ++at_;
    return block[0] % n;
  }
  // Mostly small, now and then extreme.
  int32_t number() {
    static const int32_t kExtreme[] = {-1, -2147483647 - 1, 2147483647, 65536, 0, 4096, 99999};
    return below(4) == 0 ? kExtreme[below(7)] : static_cast<int32_t>(below(80)) - 4;
  }
  float real() {
    static const float kExtreme[] = {NAN, INFINITY, -INFINITY, -1.0f, 1e30f, 0.0f, 1e-30f};
    return below(4) == 0 ? kExtreme[below(7)] : static_cast<float>(below(200)) / 100.0f;
  }

 private:
  uint64_t seed_, at_ = 0;
};

[[noreturn]] void broken(const char* what) {
  std::fprintf(stderr, "%s: %s\n", what, edgec_last_error());
  std::exit(1);
}

void damage(const std::string& path, const std::string& good, bool text, Random* random) {
  std::string content = good;
  const uint32_t header = text ? static_cast<uint32_t>(content.size()) : 4000;  // most of the weights are just numbers
  for (uint32_t i = 0, changes = 1 + random->below(2); i < changes; ++i) {
    switch (random->below(4)) {
      case 0:
        content.resize(random->below(static_cast<uint32_t>(content.size()) + 1));
        break;
      case 1: {  // another digit, where a number stands
        const size_t at = content.find_first_of("0123456789", random->below(header));
        if (at != std::string::npos) content[at] = static_cast<char>('0' + random->below(10));
        break;
      }
      default:
        if (!content.empty()) {
          const uint32_t size = static_cast<uint32_t>(content.size());
          content[random->below(random->below(8) == 0 || size < header ? size : header)] =
              static_cast<char>(random->below(256));
        }
    }
    if (content.empty()) break;
  }
  edgec::write_text(path, content);
}

void finish(Session* session) {
  for (int i = 0; i < 3000; ++i) {
    int32_t outcome = 0;
    if (edgec_engine_step(session->engine, &outcome) != EDGEC_OK) broken("a step failed");
    session->listen();
    if (outcome == EDGEC_STEP_IDLE) return;
  }
  broken("the engine does not come to an end");
}

edgec_sampling random_sampling(Random* random) {
  edgec_sampling s = EDGEC_SAMPLING_INIT;
  s.max_tokens = 1 + static_cast<int32_t>(random->below(8));
  if (random->below(2) == 0) s.temperature = random->real();
  if (random->below(3) == 0) s.top_k = random->number();
  if (random->below(3) == 0) s.top_p = random->real();
  if (random->below(3) == 0) s.min_p = random->real();
  if (random->below(4) == 0) s.repetition_penalty = random->real();
  if (random->below(4) == 0) s.presence_penalty = random->real();
  if (random->below(4) == 0) s.logprobs = random->number();
  if (random->below(4) == 0) s.n = random->number();
  if (random->below(6) == 0) s.max_tokens = random->number();
  if (random->below(8) == 0) s.stop_count = random->number();  // with a null array
  if (random->below(8) == 0) s.struct_size = static_cast<uint32_t>(random->number());
  return s;
}

int use(Session* session, Random* random) {
  int accepted = 0;
  std::vector<uint64_t> ids;
  for (int i = 0; i < 6; ++i) {
    std::vector<int32_t> tokens;
    for (uint32_t k = 0, count = random->below(60); k < count; ++k)
      tokens.push_back(random->below(40) == 0 ? random->number() : static_cast<int32_t>(random->below(259)));
    const uint64_t id = session->ask(tokens, random_sampling(random), random->below(4) == 0 ? random->number() : 0,
                                     random->below(4) == 0);
    if (session->refused == EDGEC_INTERNAL) broken("a request");
    if (session->refused == EDGEC_OK) {
      ++accepted;
      ids.push_back(id);
    }
    int32_t outcome = 0;
    if (edgec_engine_step(session->engine, &outcome) != EDGEC_OK) broken("a step failed");
    if (random->below(3) == 0) edgec_engine_cancel(session->engine, ids.empty() ? 77 : ids[random->below(ids.size())]);
    if (random->below(4) == 0) edgec_engine_trim(session->engine, random->number());
  }
  finish(session);
  const edgec_stats stats = session->stats();
  if (stats.blocks_owned != 0 || stats.blocks_free + stats.blocks_cached != stats.blocks_total) broken("blocks leaked");
  std::vector<int32_t> tokens, positions, slots, sequence, table;
  for (int i = 0; i < 8; ++i) table.push_back(static_cast<int32_t>(random->below(20)) - 1);
  for (int i = 0; i < 10; ++i) {
    tokens.push_back(random->below(12) == 0 ? random->number() : 5);
    positions.push_back(random->below(12) == 0 ? random->number() : i);
    slots.push_back(random->below(12) == 0 ? random->number() : i);
    sequence.push_back(random->below(20) == 0 ? random->number() : i / 8);
  }
  std::vector<float> logits(10 * 259);
  edgec_engine_forward(session->engine, tokens.data(), positions.data(), slots.data(), sequence.data(), 10,
                       table.data(), 2, 4, logits.data(), nullptr);
  return accepted;
}

edgec_engine_options random_options(Random* random) {
  edgec_engine_options o = EDGEC_ENGINE_OPTIONS_INIT;
  o.threads = 1;
  if (random->below(12) == 0) o.block_size = random->number();
  if (random->below(12) == 0) o.context = random->number();
  if (random->below(12) == 0) o.max_batch = random->number();
  if (random->below(12) == 0) o.step_tokens = random->number();
  if (random->below(12) == 0) o.max_waiting = random->number();
  if (random->below(12) == 0) o.aging_steps = random->number();
  if (random->below(12) == 0) o.kv_dtype = random->number();
  if (random->below(12) == 0) o.batching = random->number();
  if (random->below(12) == 0) o.prefix_cache = random->number();
  if (random->below(12) == 0) o.step_slo_ms = static_cast<double>(random->real());
  if (random->below(12) == 0) o.memory_budget = 1000u * random->below(100000);
  if (random->below(12) == 0) o.struct_size = static_cast<uint32_t>(random->number());
  return o;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  Random random(std::strtoull(argv[1], nullptr, 10));
  const int iterations = std::atoi(argv[2]);
  const std::string folder = edgec::make_tiny_bundle();
  const std::string manifest = edgec::read_text(folder + "/manifest.json");
  const std::string weights = edgec::read_text(folder + "/model.safetensors");
  int opened = 0, accepted = 0;
  for (int i = 0; i < iterations; ++i) {
    const uint32_t kind = random.below(3);
    if (kind == 0) damage(folder + "/manifest.json", manifest, true, &random);
    if (kind == 1) damage(folder + "/model.safetensors", weights, false, &random);
    {
      edgec_engine_options options = EDGEC_ENGINE_OPTIONS_INIT;
      options.threads = 1;
      Session session(folder, kind == 2 ? random_options(&random) : options);
      if (session.status == EDGEC_INTERNAL) broken("opening");
      if (session.status == EDGEC_OK) {
        ++opened;
        accepted += use(&session, &random);
      } else if (session.engine != nullptr || edgec_last_error()[0] == '\0') {
        broken("a refusal that left something, or said nothing");
      }
    }
    if (kind == 0) edgec::write_text(folder + "/manifest.json", manifest);
    if (kind == 1) edgec::write_text(folder + "/model.safetensors", weights);
  }
  edgec::remove_bundle(folder);
  std::printf("%d iterations, %d opened, %d accepted\n", iterations, opened, accepted);
  return check::failures() == 0 ? 0 : 1;
}
