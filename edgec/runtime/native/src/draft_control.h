// How many tokens to propose: what pays, by what has been measured.
//
// With α_i the probability that the i-th proposal is kept when those before it were, a verified run gives
// E(γ) = 1 + Σ_{i ≤ γ} Π_{j ≤ i} α_j tokens (Leviathan et al., 2023, equation 1, with α by position). It costs
// t(rows) for the pass, with 1 + γ rows per sequence, and γ · d for drafting. γ is the one with the most tokens per
// second; where that is 0, proposing stops, and is tried again later, ever more rarely while it doesn't pay.
//
// A tree has the rows with the greatest probability of being kept, as the drafter's own probabilities have turned out
// so far. With λ the tokens per second of late, a row is worth λ⁻¹ seconds for each token that it promises; a level
// more, as much for what it could add.
//
// A machine has slow and fast phases (clocks, neighbours, heat), which pass over all sizes of a step alike. So each
// time is taken over the pace of the moment: what was measured in another phase can then be compared.
#ifndef EDGEC_DRAFT_CONTROL_H
#define EDGEC_DRAFT_CONTROL_H

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace edgec {

constexpr int kMostDrafts = 8;

// Where proposals come from. Long endings that are found again are right more often than short ones.
enum class DraftSource { kHead, kShortMatch, kLongMatch };
constexpr int kDraftSources = 3;

class DraftControl {
 public:
  // `fixed`: always propose so many; 0: as many as pays.
  explicit DraftControl(int fixed);

  // Proposals for each sequence of one source in the coming step, in which `decoding` sequences take part and
  // `proposing` of them could propose.
  int length(DraftSource source, int proposing, int decoding);
  // Whether the first source's proposals promise more than the second's, for one sequence that decodes alone; never
  // when the length is fixed.
  bool prefers(DraftSource first, DraftSource second) const;
  int latest() const { return latest_; }  // what `length` gave last, for people

  // By the head, for all sequences together: seconds of the first proposal, for which its weights come from memory, and
  // of all `steps`, for which they may still be in a cache.
  void drafted(int steps, double first, double all);
  void stepped(int rows, double seconds);  // a pass that only decoded
  void verified(DraftSource source, int proposed, int kept);

  // Whether to draft trees in a step with so many decoding sequences.
  bool trees_pay(int decoding, bool greedy);
  // Probability of being kept of a candidate that the drafter gives `chance`; and one that was, or wasn't.
  double likely(float chance, bool greedy) const;
  double likely(DraftSource source, int place) const { return sources_[static_cast<size_t>(source)].alpha[place]; }
  void judged(float chance, bool greedy, bool kept);
  // Seconds that asking the head behind a node promises, less those of the row that it takes; not positive where the
  // node isn't likely enough. And whether a further level pays that promises so much for all its nodes.
  double follow_gain(double reach, int decoding, bool greedy) const;
  bool deeper(double gain) const { return gain > later_draft(); }
  // How many rows to take, `reach` being theirs, descending.
  int rows(const std::vector<double>& reach, int decoding, bool greedy);
  // A step with trees, in which the head proposed or didn't: tokens of all decoding sequences, and the time of drafting
  // and of the pass.
  void grown(int decoding, bool greedy, bool headed, int tokens, double seconds);

 private:
  static constexpr int kMostRows = 64;
  static constexpr int kChances = 16;  // classes of the drafter's probability, half a power of two each
  static constexpr int kCrowds = 7;    // of the number of decoding sequences, a power of two each

  struct Judged {
    double kept = 0, seen = 0;
  };

  struct Rate {  // of late
    double tokens = 0, seconds = 0;
    int32_t steps = 0;

    void add(int tokens_now, double seconds_now);
  };

  // Of trees, for so many sequences.
  struct Crowd {
    Rate by_head, all;    // steps in which the head proposed; and all with trees
    int32_t choices = 0;  // of rows
    int32_t rest = 0, backoff;

    Crowd();
  };

  struct Source {
    std::array<double, kMostDrafts> alpha;
    std::array<int32_t, kMostDrafts> seen;
    int32_t countdown = 0, backoff;

    explicit Source(double first);
  };

  struct Choice {
    int length;
    double rate;  // tokens a second
  };

  double seconds(int rows) const;  // these and all others inside are over the pace
  double later_draft() const { return later_draft_ > 0.0 ? later_draft_ : first_draft_; }
  static int chance_class(float chance);
  static size_t crowd_of(int decoding, bool greedy);
  double seconds_per_token(int decoding, bool greedy) const;
  Choice best(DraftSource source, int proposing, int decoding) const;

  int fixed_;
  int latest_ = 0;
  std::array<Source, kDraftSources> sources_{Source(0.7), Source(0.5), Source(0.8)};
  std::array<double, kMostRows + 1> step_seconds_{};    // by rows; 0: never seen
  std::array<int64_t, kMostRows + 1> step_measured_{};  // by rows: the step that was
  int64_t steps_ = 0;
  double pace_ = 1;  // how much longer steps take at the moment than such steps did before
  // Sums of a line through recent steps, t = a + b · rows, for rows that weren't seen lately.
  double weight_ = 0, x_ = 0, y_ = 0, xx_ = 0, xy_ = 0;
  double row_share_;                          // of a pass with one row that another one costs, as the line last said
  double first_draft_ = 0, later_draft_ = 0;  // seconds of one proposal for all; 0: none was made
  std::array<std::array<Judged, kChances>, 2> judged_{};  // not greedy, greedy
  std::array<Crowd, 2 * kCrowds> crowds_;
};

}  // namespace edgec

#endif  // EDGEC_DRAFT_CONTROL_H
