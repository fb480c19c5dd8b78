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

// Returns the index of the first layer that may compute only the tokens whose logits are needed. This is the first layer of those
// at the end with `shares`, or the last layer, which computes only keys and values of the other tokens.
inline size_t first_of_few(const std::vector<Layer>& layers) {
  size_t first = layers.size();
  while (first > 0 && layers[first - 1].shares != 0) --first;
  return std::min(first, layers.size() - 1);
}

// Attention plans of a step. Layers with equal numbers of heads share one plan. The layers from `first_of_few` on have separate
// plans.
class LayerPlans {
 public:
  struct Shared {
    size_t layer;   // a layer that uses the plan
    bool last;      // whether these layers may compute only the tokens whose logits are needed
    size_t same;    // index of an earlier plan with the same numbers of heads, or of this plan
    AttentionPlan plan;
    Count num_attentions, num_merges;
  };

  explicit LayerPlans(const std::vector<Layer>& layers) : of_(layers.size(), 0) {
    const auto find = [&](size_t layer, const auto& suits) {
      const HeadCounts heads(layers[layer]);
      const auto fits = [&](const Shared& shared) { return suits(shared) && heads.same_tasks(HeadCounts(layers[shared.layer])); };
      return static_cast<size_t>(std::find_if(shared_.begin(), shared_.end(), fits) - shared_.begin());
    };
    for (size_t index = 0; index < layers.size(); ++index) {
      if (layers[index].recurrence.kind != kNoRecurrence) continue;
      width_ = std::max(width_, part_width(HeadCounts(layers[index]).value_size));
      const bool last = index >= first_of_few(layers);
      of_[index] = find(index, [last](const Shared& shared) { return shared.last == last; });
      if (of_[index] < shared_.size()) continue;
      const size_t same = find(index, [](const Shared&) { return true; });
      Shared& shared = shared_.emplace_back();
      shared.layer = index, shared.last = last, shared.same = same;
    }
  }

  // Plans the attention of all layers for `threads` threads. `attention` returns the attention of the layer with an index. If `few`
  // is true, the layers from `first_of_few` on compute only the tokens whose logits are needed.
  template <class Attend>
  void plan(const Step& step, const Attend& attention, int threads, bool few) {
    num_parts_ = 0;
    for (Shared& shared : shared_) {
      if (const Shared& same = shared_[shared.same]; &same != &shared) shared.plan = same.plan;
      else plan_attention(attention(shared.layer), threads, shared.plan);
      if (shared.last && few) leave_out(step, shared.plan);
      count(shared);
    }
  }

  const Shared& of(size_t layer) const { return shared_[of_[layer]]; }

  // Numbers of rows and of floats per row for the sums of separate segments.
  int64_t num_parts() const { return num_parts_; }
  int64_t width() const { return width_; }

 private:
  void count(Shared& shared) {
    shared.num_attentions = static_cast<int64_t>(shared.plan.tasks.size());
    shared.num_merges = static_cast<int64_t>(shared.plan.merges.size());
    num_parts_ = std::max(num_parts_, shared.plan.num_parts);
  }

  // Removes attention tasks all of whose tokens need no logits, because the layers from `first_of_few` on do not need their outputs.
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
  std::vector<size_t> of_;  // index of each layer's plan in `shared_`
  int64_t num_parts_ = 0, width_ = 0;
  std::vector<int64_t> wanted_before_;
};

}  // namespace penstock
