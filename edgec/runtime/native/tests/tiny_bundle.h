// A bundle with random weights, for tests: a decoder whose sizes are no multiples of anything, and a byte-level
// tokenizer.
#ifndef EDGEC_TINY_BUNDLE_H
#define EDGEC_TINY_BUNDLE_H

#include <string>

namespace edgec {

struct TinyOptions {
  bool tied = true;
  bool float_layer = false;  // one layer's down projection stays in float
  int context = 96;
  int abi = 0;  // 0: the right one
  bool bias = false;
  bool draft = false;  // a draft head that proposes half of the vocabulary
  int wide = 100;      // between an MLP's layers, in model and head; a multiple of 32 makes gates and ups interleaved
};

// Writes model.safetensors, manifest.json and tokenizer.json into a new folder; gives its path.
std::string make_tiny_bundle(const TinyOptions& options = {});
void remove_bundle(const std::string& folder);

void write_text(const std::string& path, const std::string& content);
std::string read_text(const std::string& path);

}  // namespace edgec

#endif  // EDGEC_TINY_BUNDLE_H
