// Decoder that computes a chain of steps in one call: first a given step, then steps with one token per request, which the previous
// step has sampled.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "decoder.h"
#include "model.h"
#include "pool.h"
#include "sampling.h"

namespace penstock {

class ChainingDecoder : public Decoder {
 public:
  ChainingDecoder(const Model& model, Pool& pool)
      : Decoder(model, pool), pool_(pool), stride_(model.head.n), fed_(model.fusion.fc.n > 0 ? model.hidden : 0) {}
  ~ChainingDecoder() { pool_.quiet(); }

  void chain(const Step& first, const Chain& chain) {
    prepare(first, chain);
    forward(first);
    choose(chain, 0, first.num_rows);
    for (int64_t place = 1; place < chain.num_drafts; ++place) {
      const int64_t going = num_going(chain, place);
      if (going == 0) return;
      forward(next(first, chain, place, going));
      choose(chain, place, going);
    }
  }

 private:
  void prepare(const Step& first, const Chain& chain) {
    const int64_t rows = first.num_rows;
    rows_ = rows;
    logits_ = first.logits;
    peaks_.resize(rows);
    starts_.resize(rows + 1);
    std::iota(starts_.begin(), starts_.end(), 0);
    lens_.resize(rows);
    states_.resize(rows * fed_);
    slots_.resize(chain.num_groups * rows);
    groups_.assign(first.groups, first.groups + chain.num_groups);
    for (int64_t g = 0; g < chain.num_groups; ++g) groups_[g].slots = slots_.data() + g * rows;
  }

  // Returns the number of requests that want more than `place` tokens. Requests are sorted, so these are the first requests.
  int64_t num_going(const Chain& chain, int64_t place) const {
    return std::partition_point(chain.counts, chain.counts + rows_, [place](int64_t count) { return count > place; }) - chain.counts;
  }

  // Returns the step that computes, for the first `going` requests, the sampled tokens at index `place - 1` of the chain.
  Step next(const Step& first, const Chain& chain, int64_t place, int64_t going) {
    for (int64_t request = 0; request < going; ++request) {
      const int64_t position = first.seq_lens[request] + place - 1;
      lens_[request] = position + 1;
      for (int64_t g = 0; g < chain.num_groups; ++g) {
        const Group& group = first.groups[g];
        const int64_t block = group.block_table[request * group.table_stride + position / group.block_size];
        slots_[g * rows_ + request] = block * group.block_size + position % group.block_size;
      }
    }
    Step step = first;
    step.num_tokens = step.num_requests = step.num_rows = going;
    step.query_start = step.rows = starts_.data();
    step.seq_lens = lens_.data();
    step.groups = groups_.data();
    step.token_ids = step.layer_rows.ids = chain.tokens + (place - 1) * rows_;
    step.positions = chain.positions + (place - 1) * rows_;
    step.states = states_.data();
    step.own_states = 1;
    step.num_segments = step.num_deepstack = 0;
    step.key_ends = nullptr;
    return step;
  }

  void choose(const Chain& chain, int64_t place, int64_t count) {
    pool_.prepare(1);
    chain_ = chain;
    place_ = place;
    num_choosing_ = count;
    pool_.run(choose_job_);
  }

  void choose(Cursor& cursor) {
    cursor(num_choosing_, [this](int64_t row) {
      static thread_local std::vector<double> sums;
      const int64_t at = place_ * rows_ + row;
      const Sampling of{1, chain_.width, logits_ + row * stride_, chain_.temperatures + row, chain_.uniforms + at, peaks_.data() + row,
                        chain_.tokens + at};
      sample_row(of, 0, sums);
      if (chain_.vocabulary != nullptr) chain_.tokens[at] = chain_.vocabulary[chain_.tokens[at]];
      std::copy_n(state(row), fed_, states_.data() + row * fed_);
    });
  }

  Pool& pool_;
  const Pool::Job choose_job_{[](void* self, Cursor& cursor) { static_cast<ChainingDecoder*>(self)->choose(cursor); }, this};
  const int64_t stride_;  // number of logits per row
  const int64_t fed_;     // number of elements of a token's output that an EAGLE head uses as the second input for the next token
  Chain chain_{};
  int64_t place_ = 0, rows_ = 0;
  Count num_choosing_;
  const float* logits_ = nullptr;
  std::vector<float> peaks_, states_;
  std::vector<int64_t> starts_, lens_, slots_;
  std::vector<Group> groups_;
};

}  // namespace penstock
