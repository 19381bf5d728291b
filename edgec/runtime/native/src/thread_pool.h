// Worker threads for the inside of a step.
//
// Each thread has a range of pieces of its own, which it takes from the front, so that it reads memory in one stream;
// who has no more takes from the end of another's. The caller works too, and waits only for what someone has begun. So
// a worker that the system has taken off its core costs nothing but its help, which is what makes two threads on a busy
// machine no slower than one. Between jobs workers spin for some tens of microseconds (the time between two layers) and
// then sleep, so an idle engine uses no power. What is read next may be named: idle workers then fetch it into the
// cache that the cores share.
#ifndef EDGEC_THREAD_POOL_H
#define EDGEC_THREAD_POOL_H

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace edgec {

// How many threads to use when nobody says: the cores that run at (nearly) the highest clock, at most eight.
int default_threads();

class ThreadPool {
 public:
  // `threads` includes the caller's: one means no workers. Throws Error(EDGEC_IO) when the system gives no thread.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Call body(piece, thread) for each piece in [0, pieces), each exactly once, and return when all are done. `thread`
  // is in [0, threads()), for scratch memory. What a piece computes must not depend on who runs it or when. Not
  // reentrant.
  template <typename Body>
  void run(int pieces, const Body& body) {
    if (workers_.empty() || pieces == 1) {
      for (int piece = 0; piece < pieces; ++piece) body(piece, 0);
      return;
    }
    run_shared(
        pieces, [](const void* context, int piece, int thread) { (*static_cast<const Body*>(context))(piece, thread); },
        &body);
  }

  // Names the memory that `read_ahead` is about, which must stay until `forget_ahead`.
  void name_ahead(const uint8_t* from, size_t bytes);
  // From now on, workers that have no piece of a job read it.
  void read_ahead() { parts_left_.store(parts_, std::memory_order_seq_cst); }
  void stop_ahead() { parts_left_.store(0, std::memory_order_seq_cst); }
  void forget_ahead();  // after it, nobody reads

 private:
  using Call = void (*)(const void* context, int piece, int thread);

  // What is left of one thread's range, [next, end). One word, so that taking a piece and seeing which job it belongs
  // to is one operation: job number (32 bits) | end (16) | next (16). A cache line of its own.
  struct alignas(64) Range {
    std::atomic<uint64_t> word{0};
  };

  void run_shared(int pieces, Call call, const void* context);
  bool help(int thread);  // run some pieces of the current job, if there are any left
  bool left() const;
  bool read_part();  // of what was named, if there is any left
  void work(int thread);

  std::vector<Range> ranges_;  // by thread
  uint32_t job_ = 0;
  alignas(64) std::atomic<int32_t> done_{0};
  alignas(64) std::atomic<Call> call_{nullptr};
  std::atomic<const void*> context_{nullptr};

  const uint8_t* ahead_ = nullptr;  // read by workers that have taken a part
  size_t ahead_bytes_ = 0;
  int32_t parts_ = 0;
  alignas(64) std::atomic<int32_t> parts_left_{0};
  std::atomic<int32_t> readers_{0};

  std::atomic<int32_t> sleepers_{0};
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stop_ = false;
  std::vector<std::thread> workers_;
};

}  // namespace edgec

#endif  // EDGEC_THREAD_POOL_H
