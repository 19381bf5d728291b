// Jobs are done once each, while workers read ahead or not, each thread's own pieces by it first; and nobody reads what
// has been forgotten.
#include <atomic>
#include <thread>
#include <vector>

#include "check.h"
#include "thread_pool.h"

namespace edgec {
namespace {

// Each of `pieces` pieces once, and all of them done when `run` returns.
bool runs_each_once(ThreadPool* pool, int pieces) {
  std::vector<std::atomic<int>> times(static_cast<size_t>(pieces));
  pool->run(pieces, [&](int piece, int) { times[static_cast<size_t>(piece)] += 1; });
  for (const std::atomic<int>& count : times)
    if (count != 1) return false;
  return true;
}

}  // namespace

TEST(thread_pool_does_its_jobs_while_workers_read_ahead) {
  for (const int threads : {1, 2, 4}) {
    ThreadPool pool(threads);
    for (size_t bytes : {size_t{0}, size_t{1}, size_t{16384}, size_t{300001}}) {
      const std::vector<uint8_t> named(bytes);  // freed below: the address sanitizer would see a late reader
      pool.name_ahead(named.data(), named.size());
      for (int round = 0; round < 20; ++round) {
        pool.read_ahead();
        CHECK(runs_each_once(&pool, 1 + round * 7));
        if (round % 3 == 0) pool.stop_ahead();
        CHECK(runs_each_once(&pool, 5));
      }
      pool.read_ahead();
      pool.forget_ahead();
    }
    CHECK(runs_each_once(&pool, 100));
  }
}

// What a core has read stays with it only if a thread begins with its own pieces, even when it sees others' first.
TEST(thread_pool_gives_a_thread_its_own_piece_before_others) {
  for (const int threads : {2, 3}) {
    ThreadPool pool(threads);
    for (int round = 0; round < 300; ++round) {
      std::atomic<int> begun{0}, elsewhere{0};
      pool.run(threads, [&](int piece, int thread) {
        elsewhere += piece != thread;
        ++begun;
        while (begun < threads) std::this_thread::yield();  // nobody takes a second one
      });
      CHECK(elsewhere == 0);
    }
  }
}

}  // namespace edgec
