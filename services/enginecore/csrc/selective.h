// Selective scan of Mamba-1 (arXiv:2312.00752): a recurrence with a separate decay for each number of the state. Therefore the
// effect of several tokens cannot be computed from sums of decays as in states.h. Each channel is a head with a state of one
// column. Open rows store each token's own decay, not a sum of decays. A step repeats the computation of the open rows from the
// closed state on. So each state is the result of the same operations, wherever the step begins.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "model.h"
#include "states.h"
#include "vec.h"

namespace penstock {

constexpr int64_t kSelectiveHeads = 64;  // number of channels that a task computes

inline int64_t selective_blocks(int64_t heads) { return (heads + kSelectiveHeads - 1) / kSelectiveHeads; }

// Computes one block of the channels of one sequence, and stores its states and open rows.
inline void scan_selectively(const StateStep& step, const Scan& c, int64_t task) {
  const StateMemory& m = c.memory;
  const int64_t blocks = selective_blocks(m.num_heads), index = task / blocks, n = m.key_size;
  const int64_t from = task % blocks * kSelectiveHeads, to = std::min(from + kSelectiveHeads, m.num_heads);
  const StateSequence& s = step.sequences[index];
  const int64_t base = span_start(s.start), end = s.start + s.count;
  const auto row_of = [&](int64_t position) { return s.ring * m.length + position % m.length; };
  const auto token_of = [&](int64_t position) { return s.first + position - s.start; };
  vf zeros{};
  for (int64_t head = from; head < to; ++head) {
    // The state of a head has at most kSpan numbers, which are one vector of the widest instruction set.
    for (int64_t i = 0; i < n; i += kLanes) {
      const int64_t left = n - i;
      const vf rates = load_some(c.rates + head * n + i, left);
      vf state = load_some(m.closed + (s.closed * m.num_heads + head) * n + i, left);
      int64_t write = s.first_write;
      for (int64_t position = base; position < end; ++position) {
        const bool old = position < s.start;
        const int64_t row = row_of(position), token = token_of(position);
        const float* key = old ? m.keys + row * n : c.key + token * c.key_stride;
        const float update = old ? m.updates[row * m.num_heads + head] : c.value[token * c.value_stride + head];
        const float decay = old ? m.decays[row * m.num_heads + head] : c.decay[token * c.decay_stride + head];
        state = exponential(splat(decay) * rates) * state + load_some(key + i, left) * splat(update);
        if (old) continue;
        float* out = c.out + token * c.out_stride + head;
        const float part = tree_sum(state * load_some(c.query + token * c.query_stride + i, left));
        *out = i == 0 ? part : *out + part;
        if (write < s.end_write && step.writes[write].end == position + 1) {
          store_some(m.closed + (step.writes[write++].slot * m.num_heads + head) * n + i, state, left);
          zeros += state - state;
        }
      }
    }
    for (int64_t position = std::max(s.start, end - kSpan); position < end; ++position) {
      const int64_t at = row_of(position) * m.num_heads + head, token = token_of(position);
      m.updates[at] = c.value[token * c.value_stride + head];
      m.decays[at] = c.decay[token * c.decay_stride + head];
    }
  }
  if (!finite(zeros)) mark_broken(step, index);
}

}  // namespace penstock
