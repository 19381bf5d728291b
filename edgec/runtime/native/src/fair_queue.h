// Who is next: weighted fair queueing across tenants, and inside a tenant priority with aging.
#ifndef EDGEC_FAIR_QUEUE_H
#define EDGEC_FAIR_QUEUE_H

#include <cstdint>
#include <map>
#include <set>
#include <vector>

#include "sequence.h"

namespace edgec {

struct ByRank {
  bool operator()(const Sequence* a, const Sequence* b) const {
    return a->rank != b->rank ? a->rank < b->rank : a->ticket < b->ticket;
  }
};

struct Tenant {
  uint64_t id = 0;
  double weight = 1.0;
  double time = 0.0;  // virtual: tokens charged ÷ weight
  int32_t running = 0;
  std::set<Sequence*, ByRank> waiting;

  // For reports.
  uint64_t served = 0;            // tokens charged
  uint64_t contended_served = 0;  // of these, in steps in which this and another tenant had somebody waiting
  uint64_t contended_steps = 0;
  bool contended = false;  // in this step

  bool idle() const { return running == 0 && waiting.empty(); }
};

class FairQueue {
 public:
  explicit FairQueue(int32_t aging_steps) : aging_steps_(aging_steps) {}

  // The tenant, made active: whoever was away gets no credit for it, its time is at least the present one.
  Tenant* join(uint64_t id, double weight);

  // Aging is the same for all who wait, so "priority + waited ⁄ aging_steps" never changes an order: it is a fixed
  // rank.
  int64_t rank(int32_t priority, uint64_t arrival_step) const {
    return static_cast<int64_t>(arrival_step) - static_cast<int64_t>(priority) * aging_steps_;
  }

  void push(Sequence* sequence);
  void remove(Sequence* sequence);
  void charge(Tenant* tenant, int32_t tokens);
  void started(Tenant* tenant) { now_ = tenant->time > now_ ? tenant->time : now_; }
  int32_t size() const { return size_; }

  // A committed step: marks who competes now, for the fairness index.
  void count_step();
  void sweep();  // forgets idle tenants that owe nothing

  // Jain's index (Jain, Chiu, Hawe, 1984) of the tenants' service per weight and step while they competed: 1 is equal,
  // 1 ⁄ n is all for one. 1 when there was no competition.
  double fairness() const;
  const std::map<uint64_t, Tenant>& tenants() const { return tenants_; }

  // Walks through those who wait, in order, without changing anything.
  class Cursor {
   public:
    explicit Cursor(const FairQueue& queue);
    Sequence* head();           // nullptr: nobody
    void take(int32_t tokens);  // the head is started and charged so much: on to the next

   private:
    struct Lane {
      const Tenant* tenant;
      std::set<Sequence*, ByRank>::const_iterator next;
      double time;
    };
    std::vector<Lane> lanes_;
    Lane* lane_ = nullptr;
  };

 private:
  int64_t aging_steps_;
  int32_t size_ = 0;
  double now_ = 0.0;  // virtual time: that of the tenant which was started last
  std::map<uint64_t, Tenant> tenants_;
};

}  // namespace edgec

#endif  // EDGEC_FAIR_QUEUE_H
