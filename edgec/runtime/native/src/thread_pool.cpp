#include "thread_pool.h"

#include <cstdio>
#include <system_error>

#include "status.h"

#if defined(__linux__)
#include <sched.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace edgec {
namespace {

constexpr int kSpins = 4000;  // some 50 µs: longer than the serial part between two products of a small model
constexpr uint64_t kPieceMask = 0xffff;

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("isb");
#endif
}

uint32_t pieces_of(uint64_t ticket) { return static_cast<uint32_t>((ticket >> 16) & kPieceMask); }
uint32_t next_of(uint64_t ticket) { return static_cast<uint32_t>(ticket & kPieceMask); }

#if defined(__linux__)
// A number from a file of the kernel, or 0.
long read_number(const char* pattern, int cpu) {
  char path[128];
  std::snprintf(path, sizeof(path), pattern, cpu);
  std::FILE* file = std::fopen(path, "r");
  if (file == nullptr) return 0;
  long value = 0;
  if (std::fscanf(file, "%ld", &value) != 1) value = 0;
  std::fclose(file);
  return value;
}
#endif

}  // namespace

int default_threads() {
  int count = static_cast<int>(std::thread::hardware_concurrency());
#if defined(__linux__)
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) == 0) {
    long speed[CPU_SETSIZE] = {}, top = 0;
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
      if (!CPU_ISSET(cpu, &allowed)) continue;
      speed[cpu] = read_number("/sys/devices/system/cpu/cpu%d/cpu_capacity", cpu);
      if (speed[cpu] == 0) speed[cpu] = read_number("/sys/devices/system/cpu/cpu%d/cpufreq/cpuinfo_max_freq", cpu);
      top = speed[cpu] > top ? speed[cpu] : top;
    }
    count = 0;
    // A little core has half the capacity of a big one; prime and big cores are within a fifth of each other.
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) count += CPU_ISSET(cpu, &allowed) && speed[cpu] * 5 >= top * 4 ? 1 : 0;
  }
#endif
  return count < 1 ? 1 : count > 8 ? 8 : count;
}

ThreadPool::ThreadPool(int threads) {
  try {
    for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { work(i); });
  } catch (const std::system_error&) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
    throw Error(EDGEC_IO, "the system gives no more threads");
  }
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::run_shared(int pieces, Call call, const void* context) {
  if (pieces <= 0) return;
  if (pieces > static_cast<int>(kPieceMask) / 2) throw Error(EDGEC_INTERNAL, "too many pieces for one job");
  // Nobody holds a piece of the last job any more, so what a piece needs may change; the ticket publishes it.
  call_.store(call, std::memory_order_relaxed);
  context_.store(context, std::memory_order_relaxed);
  done_.store(0, std::memory_order_relaxed);
  const uint64_t job = (ticket_.load(std::memory_order_relaxed) >> 32) + 1;
  ticket_.store(job << 32 | static_cast<uint64_t>(pieces) << 16, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) > 0) {
    std::lock_guard<std::mutex> lock(mutex_);
    wake_.notify_all();
  }
  while (help(0)) {
  }
  for (int spins = 0; done_.load(std::memory_order_acquire) != pieces; ++spins) {
    if (spins < kSpins)
      relax();
    else
      std::this_thread::yield();  // whoever holds the last piece may need this core
  }
}

bool ThreadPool::help(int thread) {
  uint64_t ticket = ticket_.load(std::memory_order_acquire);
  uint32_t first, take;
  do {
    first = next_of(ticket);
    if (first >= pieces_of(ticket)) return false;
    // A share of what is left: few at the end, so that all end together; many at first, because each taking moves a
    // cache line from core to core.
    take = (pieces_of(ticket) - first) / (2 * static_cast<uint32_t>(threads()));
    if (take < 1) take = 1;
  } while (!ticket_.compare_exchange_weak(ticket, ticket + take, std::memory_order_acq_rel, std::memory_order_acquire));
  const Call call = call_.load(std::memory_order_relaxed);
  const void* context = context_.load(std::memory_order_relaxed);
  for (uint32_t piece = first; piece < first + take; ++piece) call(context, static_cast<int>(piece), thread);
  done_.fetch_add(static_cast<int32_t>(take), std::memory_order_release);
  return true;
}

void ThreadPool::work(int thread) {
  while (true) {
    for (int spins = 0; spins < kSpins; ++spins) {
      if (help(thread)) spins = 0;
      relax();
    }
    std::unique_lock<std::mutex> lock(mutex_);
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    wake_.wait(lock, [this] {
      const uint64_t ticket = ticket_.load(std::memory_order_seq_cst);
      return stop_ || next_of(ticket) < pieces_of(ticket);
    });
    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
    if (stop_) return;
  }
}

}  // namespace edgec
