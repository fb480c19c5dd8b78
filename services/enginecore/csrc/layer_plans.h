// Plans of the attention tasks of a decoder's layers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <vector>

#include "attention.h"
#include "model.h"
#include "pool.h"

namespace penstock {

// Numbers of query heads and of key heads of a layer's attention, and the size of a value.
struct HeadCounts {
  explicit HeadCounts(const Layer& l)
      : queries(l.latent.num_heads > 0 ? l.latent.num_heads : l.num_heads), keys(l.latent.num_heads > 0 ? 1 : l.num_kv_heads),
        value_size(l.latent.num_heads > 0 ? l.latent.latent : l.head_size) {}

  bool same_tasks(const HeadCounts& other) const { return queries == other.queries && keys == other.keys; }

  int64_t queries, keys, value_size;
};

// Attention plans of a step. Layers with equal numbers of heads share one plan. The last layer has a separate plan, because it may
// compute only the tokens whose logits are needed.
class LayerPlans {
 public:
  struct Shared {
    size_t layer;  // a layer that uses the plan
    AttentionPlan plan;
    Count num_attentions, num_merges;
  };

  explicit LayerPlans(const std::vector<Layer>& layers) : of_(layers.size(), 0) {
    for (size_t index = 0; index < layers.size(); ++index) {
      if (layers[index].recurrence.kind != kNoRecurrence) continue;
      const HeadCounts heads(layers[index]);
      width_ = std::max(width_, part_width(heads.value_size));
      size_t& found = of_[index];
      while (found < shared_.size() && !heads.same_tasks(HeadCounts(layers[shared_[found].layer]))) ++found;
      if (found == shared_.size()) shared_.emplace_back().layer = index;
    }
    last_.layer = layers.size() - 1;
  }

  // Plans the attention of all layers for `threads` threads. `attention` returns the attention of the layer with an index. If `few`
  // is true, the last layer computes only the tokens whose logits are needed.
  template <class Attend>
  void plan(const Step& step, const Attend& attention, int threads, bool few) {
    num_parts_ = 0;
    for (Shared& shared : shared_) {
      plan_attention(attention(shared.layer), threads, shared.plan);
      count(shared);
    }
    last_.plan = shared_[of_.back()].plan;
    if (few) leave_out(step, last_.plan);
    count(last_);
  }

  const Shared& of(size_t layer) const { return layer == last_.layer ? last_ : shared_[of_[layer]]; }

  // Numbers of rows and of floats per row for the sums of separate segments.
  int64_t num_parts() const { return num_parts_; }
  int64_t width() const { return width_; }

 private:
  void count(Shared& shared) {
    shared.num_attentions = static_cast<int64_t>(shared.plan.tasks.size());
    shared.num_merges = static_cast<int64_t>(shared.plan.merges.size());
    num_parts_ = std::max(num_parts_, shared.plan.num_parts);
  }

  // Removes attention tasks all of whose tokens need no logits, because the last layer does not need their outputs.
  void leave_out(const Step& step, AttentionPlan& plan) {
    wanted_before_.assign(step.num_tokens + 1, 0);
    for (int64_t i = 0; i < step.num_rows; ++i) wanted_before_[step.rows[i] + 1] = 1;
    for (int64_t t = 0; t < step.num_tokens; ++t) wanted_before_[t + 1] += wanted_before_[t];
    const auto idle = [&](const AttentionTask& task) {
      const int64_t from = step.query_start[task.request] + task.first;
      return wanted_before_[from] == wanted_before_[from + task.count];
    };
    std::erase_if(plan.tasks, idle);
    std::erase_if(plan.merges, idle);
  }

  std::deque<Shared> shared_;
  Shared last_{};
  std::vector<size_t> of_;  // index of each layer's plan in `shared_`
  int64_t num_parts_ = 0, width_ = 0;
  std::vector<int64_t> wanted_before_;
};

}  // namespace penstock
