// The C ABI's engine functions: each checks its pointers, and lets nothing through but a status.
#include <new>

#include "engine.h"
#include "kernels/kernels.h"
#include "status.h"

using edgec::guard;
using edgec::require;

namespace {

void not_null(const void* pointer, const char* what) {
  if (pointer == nullptr) throw edgec::Error(EDGEC_INVALID_ARGUMENT, std::string(what) + " is null");
}

}  // namespace

const char* edgec_version(void) {
  static const std::string text = [] {
    std::string kernels;
    for (const edgec::Kernels* set : edgec::usable_kernels())
      kernels += (kernels.empty() ? "" : ", ") + std::string(set->name);
    return "0.1.0 (" + kernels + ")";
  }();
  return text.c_str();
}

edgec_status edgec_engine_create(const char* bundle, const edgec_engine_options* options, edgec_engine** engine) {
  return guard([&] {
    not_null(bundle, "bundle");
    not_null(engine, "engine");
    *engine = nullptr;
    const edgec_engine_options defaults = EDGEC_ENGINE_OPTIONS_INIT;
    *engine = new edgec_engine{{bundle, options == nullptr ? defaults : *options}};
  });
}

void edgec_engine_destroy(edgec_engine* engine) { delete engine; }

const char* edgec_engine_describe(const edgec_engine* engine) {
  return engine == nullptr ? "" : engine->engine.describe().c_str();
}

edgec_status edgec_engine_submit(edgec_engine* engine, const edgec_request* request, uint64_t* id) {
  return guard([&] {
    not_null(engine, "engine");
    not_null(request, "request");
    not_null(id, "id");
    *id = engine->engine.submit(*request);
  });
}

edgec_status edgec_engine_cancel(edgec_engine* engine, uint64_t id) {
  return guard([&] {
    not_null(engine, "engine");
    engine->engine.cancel(id);
  });
}

edgec_status edgec_engine_step(edgec_engine* engine, int32_t* outcome) {
  return guard([&] {
    not_null(engine, "engine");
    not_null(outcome, "outcome");
    *outcome = static_cast<int32_t>(engine->engine.step());
  });
}

edgec_status edgec_engine_poll(edgec_engine* engine, edgec_event* events, int32_t capacity, int32_t* count) {
  return guard([&] {
    not_null(engine, "engine");
    not_null(count, "count");
    if (capacity > 0) not_null(events, "events");
    *count = engine->engine.poll(events, capacity);
  });
}

edgec_status edgec_engine_trim(edgec_engine* engine, int32_t level) {
  return guard([&] {
    not_null(engine, "engine");
    engine->engine.trim(level);
  });
}

edgec_status edgec_engine_stats(const edgec_engine* engine, edgec_stats* stats) {
  return guard([&] {
    not_null(engine, "engine");
    not_null(stats, "stats");
    require(stats->struct_size == sizeof(edgec_stats), EDGEC_VERSION_MISMATCH,
            "edgec_stats has another size in this library; set struct_size, and compile against its own edgec.h");
    *stats = engine->engine.stats();
  });
}

const edgec_tokenizer* edgec_engine_tokenizer(const edgec_engine* engine) {
  return engine == nullptr ? nullptr : engine->engine.tokenizer();
}

edgec_status edgec_engine_forward(edgec_engine* engine, const int32_t* tokens, const int32_t* positions,
                                  const int32_t* slots, const int32_t* sequence, int32_t rows,
                                  const int32_t* block_tables, int32_t sequences, int32_t table_width, float* logits,
                                  float* hidden) {
  return guard([&] {
    not_null(engine, "engine");
    engine->engine.forward(tokens, positions, slots, sequence, rows, block_tables, sequences, table_width, logits,
                           hidden);
  });
}
