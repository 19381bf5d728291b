#include "memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <new>
#include <utility>

namespace edgec {

Pages::Pages(size_t bytes) : size_(bytes) {
  if (bytes == 0) return;
  void* address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (address == MAP_FAILED) throw std::bad_alloc();
  data_ = static_cast<uint8_t*>(address);
#if defined(MADV_HUGEPAGE)
  madvise(data_, bytes, MADV_HUGEPAGE);  // a wish: weights are read from end to end for each token
#endif
}

Pages::~Pages() {
  if (data_ != nullptr) munmap(data_, size_);
}

Pages::Pages(Pages&& other) noexcept : data_(other.data_), size_(other.size_) {
  other.data_ = nullptr;
  other.size_ = 0;
}

Pages& Pages::operator=(Pages&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

void Pages::discard(size_t offset, size_t bytes) {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t first = (offset + page - 1) / page * page, last = (offset + bytes) / page * page;
  if (first >= last) return;
#if defined(__APPLE__)
  madvise(data_ + first, last - first, MADV_FREE);
#else
  madvise(data_ + first, last - first, MADV_DONTNEED);
#endif
}

}  // namespace edgec
