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
constexpr size_t kPart = 16384, kLine = 64;  // bytes that are read ahead in a microsecond, between looks at jobs
constexpr uint64_t kPieceMask = 0xffff;
constexpr uint32_t kShare = 4;  // an owner takes this part of what is left of its range at a time

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("isb");
#endif
}

uint64_t range(uint32_t job, uint32_t next, uint32_t end) { return uint64_t{job} << 32 | uint64_t{end} << 16 | next; }
uint32_t job_of(uint64_t word) { return static_cast<uint32_t>(word >> 32); }
uint32_t end_of(uint64_t word) { return static_cast<uint32_t>((word >> 16) & kPieceMask); }
uint32_t next_of(uint64_t word) { return static_cast<uint32_t>(word & kPieceMask); }
bool empty(uint64_t word) { return next_of(word) >= end_of(word); }

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

ThreadPool::ThreadPool(int threads) : ranges_(static_cast<size_t>(threads)) {
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
  // Nobody holds a piece of the last job any more, so what a piece needs may change; the ranges publish it.
  call_.store(call, std::memory_order_relaxed);
  context_.store(context, std::memory_order_relaxed);
  done_.store(0, std::memory_order_relaxed);
  ++job_;
  const uint32_t count = static_cast<uint32_t>(pieces), owners = static_cast<uint32_t>(ranges_.size());
  for (uint32_t i = 0; i < owners; ++i)
    ranges_[i].word.store(range(job_, count * i / owners, count * (i + 1) / owners), std::memory_order_seq_cst);
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
  const size_t count = ranges_.size();
  uint32_t job = 0;
  for (size_t i = 0; i < count; ++i) {
    const bool own = i == 0;
    std::atomic<uint64_t>& word = ranges_[(static_cast<size_t>(thread) + i) % count].word;
    uint64_t seen = word.load(std::memory_order_acquire);
    if (own)
      job = job_of(seen);
    else if (job_of(seen) != job)
      continue;  // a new job, whose range for this thread will be there in a moment: what others have is not for it
    uint32_t first = 0, take = 0;
    while (!empty(seen)) {
      const uint32_t next = next_of(seen), end = end_of(seen);
      take = own ? (end - next + kShare - 1) / kShare : 1;
      first = own ? next : end - take;
      const uint64_t rest = own ? range(job_of(seen), next + take, end) : range(job_of(seen), next, end - take);
      if (word.compare_exchange_weak(seen, rest, std::memory_order_acq_rel, std::memory_order_acquire)) break;
      take = 0;
    }
    if (take == 0) continue;
    const Call call = call_.load(std::memory_order_relaxed);
    const void* context = context_.load(std::memory_order_relaxed);
    for (uint32_t piece = first; piece < first + take; ++piece) call(context, static_cast<int>(piece), thread);
    done_.fetch_add(static_cast<int32_t>(take), std::memory_order_release);
    return true;
  }
  return false;
}

bool ThreadPool::left() const {
  for (const Range& range : ranges_)
    if (!empty(range.word.load(std::memory_order_seq_cst))) return true;
  return false;
}

void ThreadPool::name_ahead(const uint8_t* from, size_t bytes) {
  forget_ahead();
  ahead_ = from;
  ahead_bytes_ = bytes;
  parts_ = static_cast<int32_t>((bytes + kPart - 1) / kPart);
}

void ThreadPool::forget_ahead() {
  stop_ahead();
  while (readers_.load(std::memory_order_seq_cst) > 0) relax();
}

bool ThreadPool::read_part() {
  if (parts_left_.load(std::memory_order_acquire) <= 0) return false;
  readers_.fetch_add(1, std::memory_order_seq_cst);  // before taking a part: `forget_ahead` sees one or the other
  const int32_t left = parts_left_.fetch_sub(1, std::memory_order_seq_cst);
  if (left > 0) {
    const size_t first = static_cast<size_t>(parts_ - left) * kPart;
    const size_t end = first + kPart < ahead_bytes_ ? first + kPart : ahead_bytes_;
    for (size_t i = first; i < end; i += kLine) static_cast<void>(*static_cast<const volatile uint8_t*>(ahead_ + i));
  }
  readers_.fetch_sub(1, std::memory_order_seq_cst);
  return left > 0;
}

void ThreadPool::work(int thread) {
  while (true) {
    for (int spins = 0; spins < kSpins; ++spins) {
      if (help(thread) || read_part()) spins = 0;
      relax();
    }
    std::unique_lock<std::mutex> lock(mutex_);
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    wake_.wait(lock, [this] { return stop_ || left(); });
    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
    if (stop_) return;
  }
}

}  // namespace edgec
