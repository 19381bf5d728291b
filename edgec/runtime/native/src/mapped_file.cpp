#include "mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "status.h"

namespace edgec {
namespace {

struct Descriptor {
  int number;
  ~Descriptor() {
    if (number >= 0) close(number);
  }
};

// An open regular file and its size.
size_t open_regular(const std::string& path, Descriptor* file) {
  file->number = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file->number < 0) throw Error(errno == ENOENT ? EDGEC_NOT_FOUND : EDGEC_IO, path + ": " + std::strerror(errno));
  struct stat status;
  if (fstat(file->number, &status) != 0) throw Error(EDGEC_IO, path + ": " + std::strerror(errno));
  if (!S_ISREG(status.st_mode)) throw Error(EDGEC_NOT_FOUND, path + " is not a file");
  if (status.st_size <= 0) throw Error(EDGEC_CORRUPT, path + " is empty");
  return static_cast<size_t>(status.st_size);
}

}  // namespace

MappedFile::MappedFile(const std::string& path) {
  Descriptor file{-1};
  const size_t size = open_regular(path, &file);
  void* address = mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file.number, 0);
  if (address == MAP_FAILED) throw Error(EDGEC_IO, path + " can't be mapped: " + std::strerror(errno));
  data_ = static_cast<uint8_t*>(address);
  size_ = size;
}

MappedFile::~MappedFile() { munmap(data_, size_); }

void MappedFile::drop_pages() { madvise(data_, size_, MADV_DONTNEED); }

std::string read_file(const std::string& path, size_t limit) {
  Descriptor file{-1};
  const size_t size = open_regular(path, &file);
  if (size > limit)
    throw Error(EDGEC_CORRUPT, path + " has " + std::to_string(size) + " bytes, more than any such file");
  std::string content(size, '\0');
  size_t done = 0;
  while (done < size) {
    const ssize_t count = read(file.number, &content[done], size - done);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) throw Error(EDGEC_IO, path + " can't be read to its end");
    done += static_cast<size_t>(count);
  }
  return content;
}

}  // namespace edgec
