#include <algorithm>
#include <chrono>
#include <cstdio>
#include <vector>

#include "check.h"
#include "fake_engine.h"
#include "scheduler.h"
#include "status.h"

using namespace edgec;

namespace {

SchedulerConfig small() {
  SchedulerConfig config;
  config.blocks = 16;
  config.block_size = 4;
  config.first_block = 1;
  config.context = 40;
  config.max_batch = 4;
  config.step_tokens = 8;
  return config;
}

SequenceSpec spec(SequenceId id, int32_t prompt, int32_t priority = 0, int32_t first = 1) {
  SequenceSpec made;
  made.id = id;
  made.priority = priority;
  for (int32_t i = 0; i < prompt; ++i) made.prompt.push_back(i == 0 ? first : i);
  return made;
}

std::vector<SequenceId> ids(const StepPlan& plan) {
  std::vector<SequenceId> out;
  for (const Chunk& chunk : plan.chunks) out.push_back(chunk.sequence);
  return out;
}

// What a sequence must become, whatever happens around it.
std::vector<int32_t> alone(std::vector<int32_t> prompt, int32_t answer) {
  for (int32_t i = 0; i < answer; ++i) prompt.push_back(FakeEngine::next_token(prompt, prompt.size()));
  return prompt;
}

uint64_t collide(uint64_t, const int32_t*, int32_t) { return 42; }

struct Random {
  uint64_t state;
  uint32_t operator()(uint32_t below) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<uint32_t>(state >> 33) % below;
  }
};

}  // namespace

TEST(scheduler_decodes_first_then_prompts_in_chunks) {
  FakeEngine engine(small());
  engine.scheduler.add(spec(1, 3));
  engine.step();
  engine.scheduler.add(spec(2, 20, 0, 2));
  engine.step();
  CHECK_EQ(engine.plan.chunks.size(), size_t{2});
  CHECK_EQ(engine.plan.chunks[0].sequence, SequenceId{1});
  CHECK_EQ(engine.plan.chunks[0].count, 1);
  CHECK_EQ(engine.plan.chunks[1].sequence, SequenceId{2});
  CHECK_EQ(engine.plan.chunks[1].count, 7);  // the rest of the budget of 8
  CHECK(!engine.plan.chunks[1].samples);
  engine.step();
  engine.step();
  CHECK_EQ(engine.plan.chunks[1].start, 14);
  CHECK_EQ(engine.plan.chunks[1].count, 6);
  CHECK(engine.plan.chunks[1].samples);
}

TEST(scheduler_random_operations_keep_every_invariant_and_every_token) {
  for (uint64_t seed = 1; seed <= 24; ++seed) {
    Random random{seed};
    SchedulerConfig config = small();
    config.blocks = 10 + static_cast<int32_t>(random(12));
    config.block_size = 1 + static_cast<int32_t>(random(5));
    config.prefix_cache = random(4) != 0;
    config.static_batching = random(5) == 0;
    config.hash = random(3) == 0 ? collide : nullptr;
    FakeEngine engine(config);
    std::map<SequenceId, std::vector<int32_t>> prompts;
    std::vector<SequenceId> alive;
    SequenceId next = 1;
    for (int step = 0; step < 1500; ++step) {
      const auto some = [&] { return alive[random(static_cast<uint32_t>(alive.size()))]; };
      const uint32_t what = random(20);
      if (what < 8 && alive.size() < 12) {
        SequenceSpec made = spec(next, 1 + static_cast<int32_t>(random(24)), static_cast<int32_t>(random(16)) - 8,
                                 static_cast<int32_t>(random(3)));
        made.tenant = random(3);
        made.weight = 1.0 + random(3);
        made.compute_all = random(6) == 0;
        if (random(8) == 0) made.cache_key = "salt";
        engine.answer[next] = 1 + static_cast<int32_t>(random(14));
        if (engine.scheduler.add(made) == Admission::kAccepted) {
          prompts[next] = made.prompt;
          alive.push_back(next++);
        }
      } else if (what == 8 && !alive.empty()) {
        engine.scheduler.cancel(some());
      } else if (what == 9 && !alive.empty()) {
        engine.scheduler.preempt(some());
      } else if (what == 10 && !alive.empty() && alive.size() < 12) {
        const SequenceId parent = some();
        if (engine.scheduler.fork(parent, next)) {
          prompts[next] = prompts[parent];
          engine.answer[next] = engine.answer[parent] + static_cast<int32_t>(random(4));
          alive.push_back(next++);
        }
      } else if (what == 11) {
        engine.scheduler.trim();
      } else if (what == 12 && !alive.empty()) {
        const SequenceId id = some();
        std::vector<int32_t> all = engine.scheduler.tokens(id), draft;
        for (int i = 0; i < 3; ++i) {  // right, then perhaps wrong
          const int32_t token = FakeEngine::next_token(all, all.size());
          draft.push_back(random(3) == 0 ? (token + 1) % 97 : token);
          all.push_back(token);
        }
        engine.scheduler.set_draft(id, draft.data(), 3);
      } else if (what == 13) {  // a forward that fails: everything as before
        const StepPlan plan = engine.scheduler.plan();
        std::vector<int32_t> lengths;
        const PoolCounts before = engine.scheduler.pool().counts();
        for (const SequenceId id : alive) lengths.push_back(engine.scheduler.length(id));
        if (engine.scheduler.reserve(plan, &engine.copies) == StepOutcome::kCommitted) {
          engine.scheduler.release(plan);
          for (size_t i = 0; i < alive.size(); ++i) CHECK_EQ(engine.scheduler.length(alive[i]), lengths[i]);
          CHECK_EQ(engine.scheduler.pool().counts().owned, before.owned);
          CHECK_EQ(engine.scheduler.pool().counts().owned_tokens, before.owned_tokens);
        }
      } else if (what == 14 && !alive.empty()) {  // cancelled or preempted while the model runs
        engine.plan = engine.scheduler.plan();
        if (engine.scheduler.reserve(engine.plan, &engine.copies) == StepOutcome::kCommitted) {
          const SequenceId id = some();
          engine.forward(engine.plan, engine.copies);
          random(2) ? engine.scheduler.cancel(id) : engine.scheduler.preempt(id);
          random(4) == 0 ? engine.scheduler.release(engine.plan) : engine.commit();
        }
      } else {
        engine.step();
      }
      alive.erase(std::remove_if(alive.begin(), alive.end(),
                                 [&](SequenceId id) { return engine.scheduler.find(id) == nullptr; }),
                  alive.end());
      const std::string wrong = engine.scheduler.verify();
      CHECK_EQ(wrong, "");
      if (!wrong.empty() || engine.wrong_reads > 0) {
        std::printf("seed %llu step %d operation %u\n", static_cast<unsigned long long>(seed), step, what);
        CHECK_EQ(engine.wrong_reads, 0);
        return;
      }
    }
    for (int i = 0; i < 3000 && !engine.scheduler.idle(); ++i) engine.step();
    CHECK(engine.scheduler.idle());
    engine.scheduler.trim();
    CHECK_EQ(engine.scheduler.pool().counts().free, config.blocks);
    for (const auto& [id, tokens] : engine.answers) {
      const int32_t answer = static_cast<int32_t>(tokens.size() - prompts[id].size());
      CHECK(tokens == alone(prompts[id], answer));
      const int32_t capacity = std::min(config.context, config.blocks * config.block_size);
      CHECK(answer == engine.answer[id] || static_cast<int32_t>(tokens.size()) == capacity);
    }
    CHECK(!engine.answers.empty());
  }
}

TEST(scheduler_gives_each_of_n_answers_its_own_first_token) {
  FakeEngine engine(small());
  engine.scheduler.add(spec(1, 6));
  engine.step();
  const int32_t second = 50, third = 51;
  CHECK(engine.scheduler.fork(1, 2, &second));
  CHECK(engine.scheduler.fork(1, 3, &third));
  CHECK_EQ(engine.scheduler.tokens(2).back(), second);
  CHECK_EQ(engine.scheduler.pool().counts().owned, 2);  // six positions, once
  engine.step();
  CHECK_EQ(engine.copies.size(), size_t{2});  // the last to write keeps the shared block
  CHECK_EQ(engine.scheduler.pool().counts().owned, 4);
  while (!engine.scheduler.idle()) engine.step();
  CHECK_EQ(engine.wrong_reads, 0);
  CHECK_EQ(engine.answers[3][6], third);
  CHECK_EQ(engine.answers.size(), size_t{3});
}

TEST(scheduler_victims_are_those_that_lose_least_and_never_the_senior) {
  SchedulerConfig config = small();
  config.prefix_cache = false;
  config.blocks = 10;
  config.step_tokens = 32;
  config.context = 32;
  FakeEngine engine(config);
  engine.answer[1] = engine.answer[2] = engine.answer[3] = 20;
  engine.scheduler.add(spec(1, 4, 0, 1));
  engine.scheduler.add(spec(2, 10, 0, 2));
  engine.scheduler.add(spec(3, 6, 0, 3));
  engine.step();
  CHECK_EQ(engine.scheduler.running_count(), 3);
  std::vector<SequenceId> victims;
  while (victims.empty()) {
    const StepPlan plan = engine.scheduler.plan();
    victims = plan.victims;
    if (victims.empty()) engine.step();
  }
  CHECK_EQ(victims.size(), size_t{1});
  CHECK_EQ(victims[0], SequenceId{3});  // 1 has done less, but is the senior
  while (!engine.scheduler.idle()) engine.step();
  CHECK_EQ(engine.answers.size(), size_t{3});
  CHECK_EQ(engine.wrong_reads, 0);
}

TEST(scheduler_refuses_results_that_do_not_fit_before_it_changes_anything) {
  FakeEngine engine(small());
  engine.scheduler.add(spec(1, 3));
  engine.plan = engine.scheduler.plan();
  engine.scheduler.reserve(engine.plan, &engine.copies);
  const int32_t tokens[2] = {5, 6};
  CHECK_THROWS(engine.scheduler.commit(engine.plan, nullptr, 0, 0.0), EDGEC_INTERNAL);
  const StepResult many{1, tokens, 2, false};
  CHECK_THROWS(engine.scheduler.commit(engine.plan, &many, 1, 0.0), EDGEC_INTERNAL);
  const StepResult none{1, tokens, 0, false};
  CHECK_THROWS(engine.scheduler.commit(engine.plan, &none, 1, 0.0), EDGEC_INTERNAL);
  CHECK_EQ(engine.scheduler.tokens(1).size(), size_t{3});
  const StepResult one{1, tokens, 1, false};
  engine.scheduler.commit(engine.plan, &one, 1, 0.0);
  CHECK_EQ(engine.scheduler.tokens(1).back(), 5);
}

TEST(scheduler_plan_out_of_date_is_retried) {
  FakeEngine engine(small());
  engine.scheduler.add(spec(1, 3));
  engine.scheduler.add(spec(2, 3, 0, 2));
  const StepPlan plan = engine.scheduler.plan();
  engine.scheduler.cancel(2);
  CHECK(engine.scheduler.reserve(plan, &engine.copies) == StepOutcome::kRetry);
  CHECK_EQ(engine.scheduler.pool().counts().owned, 0);
  CHECK(ids(engine.scheduler.plan()) == std::vector<SequenceId>{1});
}

TEST(controller_finds_the_largest_batch_that_meets_the_objective) {
  BatchController controller(32, 128, 0.010);
  for (int i = 0; i < 20000; ++i)
    controller.observe(0.0005 * controller.batch(), controller.batch(), controller.batch());
  CHECK(controller.batch() >= 18 && controller.batch() <= 20);  // 20 sequences take 10 ms; 18 are the margin
  int changes = 0;
  for (int i = 0, last = controller.batch(); i < 20000; ++i) {
    controller.observe(0.0005 * controller.batch(), controller.batch(), controller.batch());
    changes += controller.batch() != last;
    last = controller.batch();
  }
  CHECK_EQ(changes, 0);
}

TEST(controller_forgives_one_step_in_a_hundred_and_no_more) {
  BatchController calm(16, 128, 0.010), upset(16, 128, 0.010);
  for (int i = 0; i < 1280; ++i) {
    calm.observe(i % 128 == 5 ? 0.020 : 0.005, 16, 16);
    upset.observe(i % 32 == 5 ? 0.020 : 0.005, 16, 16);
  }
  CHECK_EQ(calm.batch(), 16);
  CHECK(upset.batch() < 16);
}

TEST(controller_shortens_prompt_chunks_and_not_the_batch_when_prompts_are_slow) {
  BatchController controller(16, 512, 0.010);
  for (int i = 0; i < 9000; ++i) controller.observe(0.002 + 0.0001 * controller.rows(), 8, controller.rows());
  CHECK_EQ(controller.batch(), 16);
  CHECK(controller.rows() >= 64 && controller.rows() <= 80);  // 80 rows take 10 ms, 70 are the margin
}

TEST(controller_shortens_the_batch_when_decodes_leave_no_room_for_prompts) {
  BatchController controller(32, 128, 0.010);
  for (int i = 0; i < 30000; ++i) {
    const int rows = controller.batch() + std::max(4, controller.rows() - controller.batch());
    controller.observe(0.0005 * rows, controller.batch() + 1, rows);
  }
  CHECK(controller.batch() >= 8 && controller.batch() <= 16);  // 20 rows take 10 ms; four are a prompt's
}

// Printed by the benchmark, and bounded loosely here: 3 % of a decode step of 5 ms at 16 sequences is 150 µs.
TEST(scheduler_step_costs_microseconds) {
  SchedulerConfig config;
  config.blocks = 4096;
  config.block_size = 16;
  config.context = 4096;
  config.max_batch = 16;
  config.step_tokens = 128;
  Scheduler scheduler(config);
  for (SequenceId id = 0; id < 16; ++id) scheduler.add(spec(id, 100, 0, static_cast<int32_t>(id)));
  StepPlan plan;
  std::vector<BlockCopy> copies;
  std::vector<StepResult> results;
  const int32_t token = 5;
  double spent = 0.0;
  int steps = 0;
  for (; steps < 3000; ++steps) {
    const auto start = std::chrono::steady_clock::now();
    scheduler.plan(&plan);
    scheduler.reserve(plan, &copies);
    results.clear();
    for (const Chunk& chunk : plan.chunks) {
      if (chunk.samples) results.push_back({chunk.sequence, &token, 1, false});
    }
    scheduler.commit(plan, results.data(), results.size(), 0.005);
    spent += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }
  std::printf("scheduler: %.2f us a step of 16 decodes\n", spent / steps * 1e6);
  CHECK_EQ(scheduler.running_count(), 16);
}
