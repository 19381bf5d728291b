// The engine: requests in, events out. Scheduler, decoder and sampler meet here and nowhere else.
//
// One mutex guards the requests, the scheduler and the events. `step` holds it while it plans and while it commits, not
// while the model runs, so `submit` and `cancel` never wait for a forward pass. A request that is cancelled meanwhile
// loses its blocks at once; nobody gets them before the step has committed, because only planning gives blocks out.
#ifndef EDGEC_ENGINE_H
#define EDGEC_ENGINE_H

#include <array>
#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "decoder.h"
#include "draft_control.h"
#include "draft_head.h"
#include "manifest.h"
#include "request.h"
#include "safetensors.h"
#include "scheduler.h"
#include "status.h"
#include "tokenizer.h"

namespace edgec {

// edgec_engine_options with every default filled in.
struct EngineConfig {
  int threads, block_size, context, max_batch, step_tokens, max_waiting, aging_steps;
  KvType kv;
  bool static_batching, prefix_cache;
  bool head_drafts, ngram_drafts;  // who proposes tokens: the bundle's head, n-grams of the text, or neither
  int draft_length;                // 0: as many as pays
  int draft_width;                 // 1: chains, drawn from the head; more: trees
  int draft_rows() const;          // of the head
  uint64_t memory_budget;
  double step_slo;  // seconds
  std::string kernel;
  edgec_log_fn log;
  edgec_thermal_fn thermal;
  void* user;

  // Throws Error(EDGEC_INVALID_ARGUMENT) naming the field.
  static EngineConfig resolve(const edgec_engine_options& options, const Manifest& manifest);
};

class Engine {
 public:
  Engine(const std::string& folder, const edgec_engine_options& options);
  ~Engine() { threads_->forget_ahead(); }  // weights go before the threads that may read them

  uint64_t submit(const edgec_request& request);
  void cancel(uint64_t id);
  StepOutcome step();
  int32_t poll(edgec_event* events, int32_t capacity);
  void trim(int32_t level);
  edgec_stats stats() const;
  const std::string& describe() const { return description_; }
  const edgec_tokenizer* tokenizer() const { return tokenizer_.get(); }
  void forward(const int32_t* tokens, const int32_t* positions, const int32_t* slots, const int32_t* sequence,
               int32_t rows, const int32_t* tables, int32_t sequences, int32_t width, float* logits, float* hidden);

 private:
  // Holds the engine for one thread. Throws Error(EDGEC_BUSY) when another one is inside.
  class Stepping {
   public:
    explicit Stepping(std::atomic<bool>& flag) : flag_(flag) {
      if (flag_.exchange(true))
        throw Error(EDGEC_BUSY, "another thread is in a step of this engine, or a callback of it");
    }
    ~Stepping() { flag_.store(false); }

   private:
    std::atomic<bool>& flag_;
  };

  // A chunk of the step at hand, with the answer that it belongs to.
  struct Work {
    Chunk chunk;
    Answer* answer;
    bool forks;  // the prompt of a request with n sequences: `sampled` has the first token of each
    // Otherwise what the chunk's last positions gave, one after the other: proposals that were kept, and one more
    // token.
    std::vector<Sampled> sampled;
    std::vector<int32_t> tokens;  // of `sampled`, as far as they are part of the answer
    std::vector<Said> said;
    std::vector<int32_t> path;  // the proposals that were kept
    int32_t longest = 0;        // branch of its proposals
    int reached = 0;            // places with proposals that were looked at
    bool ended = false;         // none of a place's proposals was kept: other positions count for nothing

    int32_t at() const { return path.empty() ? -1 : path.back(); }
  };
  // What a wanted row's logits are for: a new token, or the score of the prompt's token after `position`.
  struct Use {
    size_t work;
    int32_t position;
    int32_t proposal;  // whose row it is; −1: no proposal's
    bool scores;
    float logprob;
    std::vector<edgec_token_logprob> top;
  };
  // A node of a tree to be followed, or a tree's root.
  struct DraftRow {
    Answer* answer;
    int32_t node;
    size_t state;  // row of the states behind its parent
  };
  // What a step with trees is judged by.
  struct Grown {
    int decoding = 0;     // sequences
    bool greedy = true;   // all of them
    bool headed = false;  // the head proposed
    double seconds = 0;   // for the trees
  };
  struct Budget {
    size_t weights, scratch, block;
    int32_t blocks;  // for sequences
  };

  Budget make_budget(const Safetensors& file) const;
  std::string make_description() const;
  void log(int32_t level, const std::string& line) const;

  StepOutcome run_step();
  void build_batch();
  void compute();
  void propose();
  bool may_speculate(const Request& request) const;
  bool grows_trees() const { return config_.draft_width > 1; }
  int find_drafting();
  int draft_room(const Answer& answer) const;
  void prepare_trees(int decoding);
  int prepare_chains(int decoding);
  void draft_chains(int longest);
  void draft_trees();
  void draft_levels();
  double grow(size_t beam);
  void choose_nodes();
  void find_uses(size_t first, size_t count);
  void use_row(size_t use, float* logits, int thread);
  void verify_row(Work* work, size_t use, float* logits, Sampler* sampler);
  void commit(double seconds);
  void fork(Work* work);
  void keep_hidden(Answer* answer, size_t use);
  int32_t place_proposal(const Answer& answer, int32_t proposal, int32_t own, const int32_t* blocks);
  void keep_branch(const Work& work);
  void account_drafts(double seconds);
  void judge_candidates(const Work& work);
  void judge_guesses(const Work& work);
  void end(Answer* answer, int32_t finish);
  void end_all(Request* request, int32_t finish);
  void fail_step();
  void sweep();
  Answer* find(SequenceId id);
  void rest(double seconds) const;

  Manifest manifest_;
  EngineConfig config_;
  const Kernels& kernels_;
  std::unique_ptr<edgec_tokenizer> tokenizer_;
  std::unique_ptr<ThreadPool> threads_;
  std::unique_ptr<Weights> weights_;
  std::unique_ptr<KvStore> store_;
  std::unique_ptr<Decoder> decoder_;
  std::unique_ptr<Scheduler> scheduler_;
  std::unique_ptr<DraftHead> head_;  // null: none in the bundle, or not wanted
  DraftControl control_{0};
  Budget budget_{};
  std::string description_;

  mutable std::mutex mutex_;
  std::atomic<bool> stepping_{false};
  std::map<uint64_t, std::unique_ptr<Request>> requests_;
  std::vector<uint64_t> ended_;  // requests to forget at the end of the step
  std::deque<Event> events_;
  std::vector<Event> polled_;
  uint64_t next_id_ = 1;

  // Of the step at hand; kept, so that a step allocates little.
  StepPlan plan_;
  std::vector<BlockCopy> copies_;
  std::vector<Work> work_;
  Batch batch_;
  std::vector<std::vector<int32_t>> tables_;    // that `batch_` points to
  std::vector<Use> uses_;                       // of the wanted rows, in order; a static batch's padding has none
  std::vector<int32_t> scratch_table_;          // of a static batch's padding: block 0, as often as the context is long
  std::vector<Sampler> samplers_;               // one per thread
  std::vector<std::vector<float>> row_copies_;  // one per thread, (vocab)
  std::vector<StepResult> results_;
  std::vector<std::pair<size_t, size_t>> ranges_;  // of `uses_`: what one thread goes through in order
  std::vector<Answer*> drafting_;                  // the sequences that propose in this step
  std::vector<float> draft_states_;                // theirs, (sequences, hidden)
  std::vector<int32_t> draft_inputs_;
  std::vector<DraftRow> draft_rows_;                // of a level of all trees
  std::vector<std::vector<Candidate>> candidates_;  // of each
  std::vector<float> parent_states_;
  Grown grown_;
  bool asked_head_ = false;  // in this step

  double step_seconds_ = 0, forward_seconds_ = 0, sample_seconds_ = 0;
  uint64_t failures_ = 0;
  double draft_seconds_ = 0;
  uint64_t draft_runs_ = 0, draft_places_ = 0, drafted_tokens_ = 0;
  std::array<uint64_t, kMostDrafts> draft_reached_{}, draft_kept_{};
  std::vector<double> recent_;  // seconds of the latest steps, a ring
  size_t recent_at_ = 0;
};

}  // namespace edgec

struct edgec_engine {
  edgec::Engine engine;
};

#endif  // EDGEC_ENGINE_H
