#include "safetensors.h"

#include <cstring>

#include "json.h"
#include "status.h"

namespace edgec {
namespace {

constexpr uint64_t kMaxHeader = 64u << 20;

std::string show(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

const char* show(DType dtype) { return dtype == DType::kInt8 ? "I8" : dtype == DType::kInt32 ? "I32" : "F32"; }

size_t element(DType dtype) { return dtype == DType::kInt8 ? 1 : 4; }

}  // namespace

size_t Tensor::bytes() const {
  size_t count = element(dtype);
  for (int64_t size : shape) count *= static_cast<size_t>(size);
  return count;
}

Safetensors::Safetensors(const std::string& path) : path_(path), file_(path) {
  uint64_t length = 0;
  if (file_.size() < 8) throw Error(EDGEC_CORRUPT, path + " is too short for a safetensors file");
  std::memcpy(&length, file_.data(), 8);  // little-endian, as every platform of ours
  if (length > kMaxHeader || length > file_.size() - 8)
    throw Error(EDGEC_CORRUPT,
                path + ": the header is longer than the file; it is truncated, or not a safetensors file");
  const uint8_t* base = file_.data() + 8 + length;
  const uint64_t available = file_.size() - 8 - length;
  const JsonDocument header =
      JsonDocument::parse(std::string(reinterpret_cast<const char*>(file_.data() + 8), length), path);
  for (const JsonMember member : header.root().members()) {
    if (member.key == "__metadata__") continue;
    const std::string_view type = member.value.at("dtype").as_string();
    if (type != "I8" && type != "I32" && type != "F32") continue;
    Tensor tensor = {type == "I8" ? DType::kInt8 : type == "I32" ? DType::kInt32 : DType::kFloat32, {}, nullptr};
    uint64_t bytes = element(tensor.dtype);
    for (const JsonValue size : member.value.at("shape").elements()) {
      const int64_t value = size.as_int(0, int64_t{1} << 40);
      if (value != 0 && bytes > (uint64_t{1} << 48) / static_cast<uint64_t>(value))
        throw Error(EDGEC_CORRUPT, path + ": " + std::string(member.key) + " has an impossible shape");
      bytes *= static_cast<uint64_t>(value);
      tensor.shape.push_back(value);
    }
    std::vector<int64_t> offsets;
    for (const JsonValue offset : member.value.at("data_offsets").elements())
      offsets.push_back(offset.as_int(0, int64_t{1} << 50));
    if (offsets.size() != 2 || offsets[0] > offsets[1] || static_cast<uint64_t>(offsets[1]) > available ||
        static_cast<uint64_t>(offsets[1] - offsets[0]) != bytes)
      throw Error(EDGEC_CORRUPT, path + ": " + std::string(member.key) +
                                     " lies outside the file, or has another size than its shape; is it truncated?");
    tensor.data = base + offsets[0];
    if (reinterpret_cast<uintptr_t>(tensor.data) % element(tensor.dtype) != 0)
      throw Error(EDGEC_CORRUPT, path + ": " + std::string(member.key) + " is not aligned");
    tensors_.emplace(std::string(member.key), std::move(tensor));
  }
}

const Tensor* Safetensors::find(const std::string& name) const {
  const auto found = tensors_.find(name);
  return found == tensors_.end() ? nullptr : &found->second;
}

const Tensor& Safetensors::get(const std::string& name, DType dtype, const std::vector<int64_t>& shape) const {
  const Tensor* tensor = find(name);
  if (tensor == nullptr) throw Error(EDGEC_CORRUPT, path_ + " has no tensor " + name);
  if (tensor->dtype != dtype || tensor->shape != shape)
    throw Error(EDGEC_CORRUPT, path_ + ": " + name + " is " + show(tensor->dtype) + " " + show(tensor->shape) +
                                   ", and the manifest wants " + show(dtype) + " " + show(shape));
  return *tensor;
}

}  // namespace edgec
