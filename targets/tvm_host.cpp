// Runs functions of a TVM library as a script says, on any machine that TVM's runtime runs on.
//
//   tvm_host LIBRARY SCRIPT OUTPUT
//
// The script has one command a line:
//   tensor NAME FILE OFFSET DTYPE RANK DIM...     NAME is RANK dimensions read from FILE at byte OFFSET
//   call FUNCTION INPUTS PARAMS OUTPUTS NAMES...  INPUTS + PARAMS + OUTPUTS names: the function takes its inputs and
//   one
//                                                 array of parameters, and its results get the names of the outputs
//   save NAME                                     append the tensor's bytes to OUTPUT
//   time FUNCTION RUNS INPUTS PARAMS NAMES...     print the median milliseconds of RUNS calls
//
// This is also the shape of an app's own code: load the library, create the virtual machine, call functions by name.

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/module.h>
#include <tvm/ffi/function.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace ffi = tvm::ffi;

namespace {

constexpr int kPooledAllocator = 2;     // tvm/runtime/memory/memory_manager.h
constexpr std::size_t kAlignment = 64;  // what TVM's kernels assume

struct CpuAllocator {
  void AllocData(DLTensor* tensor) {
    std::size_t bytes = (ffi::GetDataSize(*tensor) + kAlignment - 1) / kAlignment * kAlignment;
    tensor->data = std::aligned_alloc(kAlignment, bytes == 0 ? kAlignment : bytes);
    if (tensor->data == nullptr) throw std::bad_alloc();
  }
  void FreeData(DLTensor* tensor) { std::free(tensor->data); }
};

class Host {
 public:
  Host(const std::string& library, const std::string& output)
      : library_(ffi::Module::LoadFromFile(library)), output_(output, std::ios::binary) {
    if (!output_) throw std::runtime_error("can't write " + output);
    machine_ = Required(library_, "vm_load_executable")().cast<ffi::Module>();
    Required(*machine_, "vm_initialization")(static_cast<int>(kDLCPU), 0, kPooledAllocator);
  }

  void Execute(const std::string& line) {
    std::istringstream words(line);
    std::string command;
    words >> command;
    if (command == "tensor") {
      Load(words);
    } else if (command == "call") {
      Call(words);
    } else if (command == "save") {
      Save(words);
    } else if (command == "time") {
      Time(words);
    } else if (!command.empty()) {
      throw std::runtime_error("unknown command " + command);
    }
  }

 private:
  struct Arguments {
    std::vector<ffi::Tensor> inputs;
    ffi::Array<ffi::Tensor> params;

    ffi::Any operator()(const ffi::Function& function) const {
      std::vector<ffi::AnyView> packed(inputs.begin(), inputs.end());
      packed.emplace_back(params);
      ffi::Any result;
      function.CallPacked(ffi::PackedArgs(packed.data(), static_cast<int32_t>(packed.size())), &result);
      return result;
    }
  };

  static ffi::Function Required(ffi::Module module, const std::string& name) {
    ffi::Optional<ffi::Function> function = module->GetFunction(name);
    if (!function.has_value()) throw std::runtime_error("the library has no function " + name);
    return *function;
  }

  static ffi::Tensor Take(std::map<std::string, ffi::Tensor>& from, std::istringstream& words) {
    std::string name;
    words >> name;
    auto found = from.find(name);
    if (found == from.end()) throw std::runtime_error("no tensor " + name);
    return found->second;
  }

  Arguments Read(std::istringstream& words, std::size_t inputs, std::size_t params) {
    Arguments arguments;
    for (std::size_t i = 0; i < inputs; ++i) arguments.inputs.push_back(Take(tensors_, words));
    for (std::size_t i = 0; i < params; ++i) arguments.params.push_back(Take(tensors_, words));
    return arguments;
  }

  void Load(std::istringstream& words) {
    std::string name, file, dtype;
    std::size_t offset = 0, rank = 0;
    words >> name >> file >> offset >> dtype >> rank;
    std::vector<int64_t> shape(rank);
    for (int64_t& dim : shape) words >> dim;
    ffi::Tensor tensor = ffi::Tensor::FromNDAlloc(CpuAllocator(), ffi::ShapeView(shape.data(), shape.size()),
                                                  ffi::StringToDLDataType(dtype), DLDevice{kDLCPU, 0});
    std::ifstream stream(file, std::ios::binary);
    stream.seekg(static_cast<std::streamoff>(offset));
    auto bytes = static_cast<std::streamsize>(ffi::GetDataSize(tensor));
    if (!words || !stream.read(static_cast<char*>(tensor.data_ptr()), bytes)) {
      throw std::runtime_error("can't read tensor " + name + " from " + file);
    }
    tensors_.insert_or_assign(name, tensor);
  }

  void Call(std::istringstream& words) {
    std::string function;
    std::size_t inputs = 0, params = 0, outputs = 0;
    words >> function >> inputs >> params >> outputs;
    Arguments arguments = Read(words, inputs, params);
    auto results = arguments(Required(*machine_, function)).cast<ffi::Array<ffi::Tensor>>();
    if (results.size() != outputs) throw std::runtime_error(function + " gives another number of outputs");
    for (ffi::Tensor result : results) {
      std::string name;
      words >> name;
      tensors_.insert_or_assign(name, result);
    }
  }

  void Save(std::istringstream& words) {
    ffi::Tensor tensor = Take(tensors_, words);
    output_.write(static_cast<const char*>(tensor.data_ptr()), static_cast<std::streamsize>(ffi::GetDataSize(tensor)));
  }

  void Time(std::istringstream& words) {
    std::string name;
    std::size_t runs = 0, inputs = 0, params = 0;
    words >> name >> runs >> inputs >> params;
    Arguments arguments = Read(words, inputs, params);
    ffi::Function function = Required(*machine_, name);
    std::vector<double> times;
    for (std::size_t i = 0; i < runs; ++i) {
      auto start = std::chrono::steady_clock::now();
      arguments(function);
      times.push_back(std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count());
    }
    std::sort(times.begin(), times.end());
    std::cout << name << " " << (times.empty() ? 0.0 : times[times.size() / 2]) << " ms\n";
  }

  ffi::Module library_;
  ffi::Optional<ffi::Module> machine_;
  std::ofstream output_;
  std::map<std::string, ffi::Tensor> tensors_;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    std::cerr << "usage: tvm_host LIBRARY SCRIPT OUTPUT\n";
    return 2;
  }
  try {
    std::ifstream script(argv[2]);
    if (!script) throw std::runtime_error(std::string("can't read ") + argv[2]);
    Host host(argv[1], argv[3]);
    for (std::string line; std::getline(script, line);) host.Execute(line);
  } catch (const std::exception& error) {
    std::cerr << "tvm_host: " << error.what() << "\n";
    return 1;
  }
  return 0;
}
