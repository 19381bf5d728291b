// Pages from the system: zeroed, aligned, and given back as a whole or in part.
#ifndef EDGEC_MEMORY_H
#define EDGEC_MEMORY_H

#include <cstddef>
#include <cstdint>

namespace edgec {

class Pages {
 public:
  Pages() = default;
  explicit Pages(size_t bytes);  // throws std::bad_alloc
  ~Pages();
  Pages(Pages&& other) noexcept;
  Pages& operator=(Pages&& other) noexcept;

  uint8_t* data() const { return data_; }
  size_t size() const { return size_; }
  // Give the whole pages inside [offset, offset + bytes) back to the system; they read as zeros afterwards.
  void discard(size_t offset, size_t bytes);

 private:
  uint8_t* data_ = nullptr;
  size_t size_ = 0;
};

// `bytes` rounded up to a multiple of a cache line.
inline size_t aligned(size_t bytes) { return (bytes + 63) & ~size_t{63}; }

}  // namespace edgec

#endif  // EDGEC_MEMORY_H
