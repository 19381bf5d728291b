// A file as read-only memory. Its pages are the system's to drop, so they don't count as the app's own.
#ifndef EDGEC_MAPPED_FILE_H
#define EDGEC_MAPPED_FILE_H

#include <cstddef>
#include <cstdint>
#include <string>

namespace edgec {

class MappedFile {
 public:
  // Throws Error: EDGEC_NOT_FOUND, EDGEC_IO, EDGEC_CORRUPT (empty).
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const uint8_t* data() const { return data_; }
  size_t size() const { return size_; }
  void drop_pages();  // they are read again when touched

 private:
  uint8_t* data_ = nullptr;
  size_t size_ = 0;
};

// A small file's whole content. Throws as MappedFile does, and EDGEC_CORRUPT above `limit` bytes.
std::string read_file(const std::string& path, size_t limit);

}  // namespace edgec

#endif  // EDGEC_MAPPED_FILE_H
