#include "fair_queue.h"

#include <algorithm>

namespace edgec {
namespace {

constexpr size_t kTenantsKept = 64;  // idle ones; so many are not worth the trouble of forgetting them

}  // namespace

Tenant* FairQueue::join(uint64_t id, double weight) {
  if (tenants_.size() >= 2 * kTenantsKept) sweep();
  Tenant& tenant = tenants_[id];
  tenant.id = id;
  tenant.weight = weight;
  if (tenant.idle()) tenant.time = std::max(tenant.time, now_);
  return &tenant;
}

void FairQueue::push(Sequence* sequence) {
  sequence->tenant->waiting.insert(sequence);
  ++size_;
}

void FairQueue::remove(Sequence* sequence) { size_ -= static_cast<int32_t>(sequence->tenant->waiting.erase(sequence)); }

void FairQueue::charge(Tenant* tenant, int32_t tokens) {
  tenant->time += tokens / tenant->weight;
  tenant->served += static_cast<uint64_t>(tokens);
  if (tenant->contended) tenant->contended_served += static_cast<uint64_t>(tokens);
}

void FairQueue::count_step() {
  size_t competing = 0;
  for (const auto& [id, tenant] : tenants_) competing += !tenant.waiting.empty();
  for (auto& [id, tenant] : tenants_) {
    tenant.contended = competing > 1 && !tenant.waiting.empty();
    tenant.contended_steps += tenant.contended;
  }
}

void FairQueue::sweep() {
  for (auto it = tenants_.begin(); it != tenants_.end();) {
    it = it->second.idle() && it->second.time <= now_ ? tenants_.erase(it) : std::next(it);
  }
}

double FairQueue::fairness() const {
  double sum = 0.0, squares = 0.0;
  int32_t count = 0;
  for (const auto& [id, tenant] : tenants_) {
    if (tenant.contended_steps == 0) continue;
    const double rate =
        static_cast<double>(tenant.contended_served) / tenant.weight / static_cast<double>(tenant.contended_steps);
    sum += rate;
    squares += rate * rate;
    ++count;
  }
  return squares > 0.0 ? sum * sum / (count * squares) : 1.0;
}

FairQueue::Cursor::Cursor(const FairQueue& queue) {
  for (const auto& [id, tenant] : queue.tenants_) {
    if (!tenant.waiting.empty()) lanes_.push_back({&tenant, tenant.waiting.begin(), tenant.time});
  }
}

Sequence* FairQueue::Cursor::head() {
  lane_ = nullptr;
  for (Lane& lane : lanes_) {
    if (lane.next == lane.tenant->waiting.end()) continue;
    const bool first = lane_ == nullptr || lane.time < lane_->time ||
                       (lane.time == lane_->time && (*lane.next)->ticket < (*lane_->next)->ticket);
    if (first) lane_ = &lane;
  }
  return lane_ == nullptr ? nullptr : *lane_->next;
}

void FairQueue::Cursor::take(int32_t tokens) {
  lane_->time += tokens / lane_->tenant->weight;
  ++lane_->next;
}

}  // namespace edgec
