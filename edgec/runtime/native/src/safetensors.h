// Tensors by name in a mapped .safetensors file (https://github.com/huggingface/safetensors): eight bytes of length, a
// JSON header, then the tensors' bytes. Nothing in it is trusted: shapes, offsets and types are checked here.
#ifndef EDGEC_SAFETENSORS_H
#define EDGEC_SAFETENSORS_H

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "mapped_file.h"

namespace edgec {

enum class DType { kInt8, kInt32, kFloat32 };

struct Tensor {
  DType dtype;
  std::vector<int64_t> shape;
  const void* data;  // in the file's mapping, aligned to the type

  const int8_t* int8() const { return static_cast<const int8_t*>(data); }
  const int32_t* int32() const { return static_cast<const int32_t*>(data); }
  const float* float32() const { return static_cast<const float*>(data); }
  size_t bytes() const;
};

class Safetensors {
 public:
  // Throws Error(EDGEC_CORRUPT) for anything inconsistent; tensors of other types than ours are left out.
  explicit Safetensors(const std::string& path);

  bool has(const std::string& name) const { return tensors_.count(name) != 0; }

  // The tensor of that name, type and shape. Throws Error(EDGEC_CORRUPT) that says what there is instead.
  const Tensor& get(const std::string& name, DType dtype, const std::vector<int64_t>& shape) const;
  const Tensor* find(const std::string& name) const;

  size_t bytes() const { return file_.size(); }  // of the file
  void drop_pages() { file_.drop_pages(); }

 private:
  std::string path_;
  MappedFile file_;
  std::map<std::string, Tensor> tensors_;
};

}  // namespace edgec

#endif  // EDGEC_SAFETENSORS_H
