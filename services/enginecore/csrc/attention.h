// Attention over the paged cache, without a copy of it and without a mask in memory.
//
// kChunk slots lie together: of each head first the keys as [head size][kChunk], so that the scores of sixteen tokens are
// vectors, then, in the memory of values, the values as [kChunk][value size]. A task is one key head and a run of a request's
// queries; rows are those queries times the query heads that share the key head. Keys are taken kKeys at a time from
// positions that are multiples of kKeys, with a running maximum (online softmax, Milakov and Gimelshein 2018): a row's
// result does not depend on how many rows are computed beside it, nor on how its prompt was cut.
//
// What a row does not see takes no part in it, whatever it is: nothing times no number is no number. Chunks without a key that
// the task sees are not read, they may be another request's by now. Of the others, scores of keys that a row does not see are
// replaced, and its sum of values leaves theirs out.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "attention_pairs.h"
#include "attention_tiles.h"
#include "model.h"
#include "vec.h"

namespace penstock {

struct AttentionTask {
  int64_t request;
  int64_t kv_head;
  int64_t first;  // of the request's queries in this step
  int64_t count;
  int64_t head;  // first query head
  int64_t heads;
};

inline int64_t chunk_of(const Group& group, int64_t request, int64_t position) {
  const int64_t block = group.block_table[request * group.table_stride + position / group.block_size];
  return (block * group.block_size + position % group.block_size) / kChunk;
}

// The longest work first, so that threads end together.
inline void plan_attention(const Attention& a, std::vector<AttentionTask>& tasks) {
  tasks.clear();
  const int64_t group = a.num_heads / a.num_kv_heads, heads = std::min(group, kTaskRows), run = kTaskRows / heads;
  for (int64_t request = 0; request < a.num_requests; ++request) {
    const int64_t queries = a.query_start[request + 1] - a.query_start[request];
    for (int64_t last = queries; last > 0; last -= run) {
      const int64_t first = std::max<int64_t>(0, last - run);
      for (int64_t kv_head = 0; kv_head < a.num_kv_heads; ++kv_head)
        for (int64_t head = 0; head < group; head += heads)
          tasks.push_back({request, kv_head, first, last - first, kv_head * group + head, std::min(heads, group - head)});
    }
  }
  const auto cost = [&a](const AttentionTask& task) { return task.count * task.heads * a.seq_lens[task.request]; };
  std::stable_sort(tasks.begin(), tasks.end(),
                   [&cost](const AttentionTask& x, const AttentionTask& y) { return cost(x) > cost(y); });
}

// Scales and masks the scores of a row, and turns them into weights: of the tile the row sees the keys of `seen`, one at least.
inline void weigh(Scratch& s, int64_t row, const Span& seen, const Params& params, int64_t value_size) {
  float* scores = s.scores[row];
  vf best = splat(-INFINITY);
  for (int64_t j = 0; j < kKeys; j += kLanes) {
    vf x = load(scores + j) * splat(params.scaling);
    if (params.softcap != 0.0f) {
      const vf capped = hyperbolic_tangent(x / splat(params.softcap)) * splat(params.softcap);
      x = x == x ? capped : x;  // the polynomial makes a number of what is none
    }
    if (j < seen.from || j + kLanes > seen.to) {
      const vi key = lanes() + static_cast<int32_t>(j);
      x = key < static_cast<int32_t>(seen.from) ? splat(-INFINITY) : x;
      x = key >= static_cast<int32_t>(seen.to) ? splat(-INFINITY) : x;
    }
    store(scores + j, x);
    best = max(x, best);  // passes over what is no number
  }
  const float peak = std::max(s.peak[row], largest(best));
  vf total{};
  for (int64_t j = 0; j < kKeys; j += kLanes) {
    const vf x = load(scores + j), distance = x - splat(peak);
    // The difference carries a score that is no number into the weights.
    const vf weight = x == splat(-INFINITY) ? splat(0.0f) : exponential(distance) + (distance - distance);
    store(scores + j, weight);
    total += weight;
  }
  if (peak != s.peak[row]) {
    const vf shrink = s.peak[row] == -INFINITY ? vf{} : exponential(splat(s.peak[row] - peak));
    s.total[row] *= shrink;
    for (int64_t d = 0; d < value_size; d += kLanes) store(s.output[row] + d, load(s.output[row] + d) * shrink);
    s.peak[row] = peak;
  }
  s.total[row] += total;
}

inline int64_t lowest(const Params& params, int64_t position) {
  int64_t low = 0;
  if (params.window > 0) low = std::max(low, position - params.window + 1);
  if (params.chunk > 0) low = std::max(low, position / params.chunk * params.chunk);
  return low;
}

template <class Tiles>
void attend_by(const Attention& a, const AttentionTask& task) {
  static thread_local const std::unique_ptr<Scratch> scratch(new Scratch);
  Scratch& s = *scratch;
  const int64_t heads = task.heads, rows = task.count * heads;
  const int64_t start = a.query_start[task.request] + task.first;
  const int64_t queries = a.query_start[task.request + 1] - a.query_start[task.request];
  const int64_t position = a.seq_lens[task.request] - queries + task.first;  // of the first row
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t head = task.head + row % heads;
    std::memcpy(s.query[row], a.query + (start + row / heads) * a.query_stride + head * a.head_size,
                a.head_size * sizeof(float));
    Tiles::take_query(s, row, a.head_size);
    std::fill_n(s.output[row], a.value_size, 0.0f);
    s.peak[row] = a.params.sinks != nullptr ? a.params.sinks[head] : -INFINITY;
    s.total[row] = vf{a.params.sinks != nullptr ? 1.0f : 0.0f};
  }
  const int64_t begin = lowest(a.params, position), end = position + task.count;
  // A chunk that holds a key of begin..end, all of which some row sees: beyond them any key does, since it is masked.
  const auto chunk = [&](int64_t key) { return chunk_of(a.group, task.request, std::clamp(key, begin, end - 1)) * kChunk; };
  const auto key_chunk = [&](int64_t key) {
    return a.cache.keys + chunk(key) * a.cache.key_stride + task.kv_head * a.head_size * kChunk;
  };
  const auto value_chunk = [&](int64_t key) {
    return a.cache.values + chunk(key) * a.cache.value_stride + task.kv_head * a.value_size * kChunk;
  };
  for (int64_t base = begin / kKeys * kKeys; base < end; base += kKeys) {
    const int64_t keys = std::min(kKeys, end - base);
    // What a row sees of keys from..to of the tile. Neither bound falls from a row to the next.
    const auto seen = [&](int64_t row, int64_t from, int64_t to) {
      const int64_t at = position + row / heads;
      return Span{std::max(from, lowest(a.params, at) - base), std::min(to, at + 1 - base)};
    };
    // A row whose position is before the tile sees nothing of it.
    const int64_t first_row = std::max<int64_t>(0, base - position) * heads;
    for (int64_t j = std::max<int64_t>(0, begin - base) / kPanel * kPanel; j < keys; j += kPanel) {
      const int64_t left = base + j, right = left + kLanes;
      const float *left_keys = key_chunk(left) + left % kChunk, *right_keys = key_chunk(right) + right % kChunk;
      const Ahead ahead{value_chunk(left), value_chunk(right)};
      Tiles::score(s, first_row, rows, j, left_keys, right_keys, a.head_size, ahead);
    }
    for (int64_t row = first_row; row < rows; ++row)
      if (const Span span = seen(row, 0, keys); !span.empty()) {
        weigh(s, row, span, a.params, a.value_size);
        Tiles::take_weights(s, row);
      }
    Values values;
    const int64_t first_chunk = std::max<int64_t>(0, begin - base) / kChunk, end_chunk = (keys + kChunk - 1) / kChunk;
    for (int64_t j = first_chunk; j < end_chunk; ++j)
      values.of[j] = value_chunk(base + j * kChunk), values.ahead[j] = key_chunk(base + j * kChunk + kKeys);
    Tiles::take_values(values, first_chunk, end_chunk, a.value_size);
    const auto shared = [&](int64_t row) { return Tiles::shared(seen(row, 0, keys)); };
    const auto add = [&](int64_t row, int64_t count, const Span& span) { Tiles::add(s, row, count, span, values, a.value_size); };
    for (int64_t row = first_row, count; row < rows; row += count) {
      count = std::min<int64_t>(kTile, rows - row);
      // What all of them see they add together, and each in order: before it what the first ones see alone, after it the last ones.
      const Span all{shared(row + count - 1).from, shared(row).to};
      for (int64_t i = row; i < row + count; ++i) {
        Tiles::add_first(s, i, seen(i, 0, keys), a.value_size);
        add(i, 1, all.empty() ? shared(i) : Span{shared(i).from, all.from});
      }
      add(row, count, all);
      for (int64_t i = row; i < row + count; ++i) {
        if (!all.empty()) add(i, 1, Span{all.to, shared(i).to});
        Tiles::add_last(s, i, seen(i, 0, keys), a.value_size);
      }
    }
  }
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t head = task.head + row % heads;
    float* to = a.output + (start + row / heads) * a.output_stride + head * a.value_size;
    const vf scale = splat(1.0f / sum(s.total[row]));
    for (int64_t d = 0; d < a.value_size; d += kLanes) store(to + d, load(s.output[row] + d) * scale);
  }
}

inline void attend(const Attention& a, const AttentionTask& task) {
#if defined(PENSTOCK_PAIRS)
  if (a.params.rounded != 0) return attend_by<PairTiles>(a, task);
#endif
  attend_by<FloatTiles>(a, task);
}

// Token `token`'s keys and values into the cache.
inline void write_token(const Write& w, int64_t token) {
  const int64_t slot = w.slots[token], chunk = slot / kChunk, lane = slot % kChunk;
  const float* from = w.keys + token * w.key_stride;
  float* keys = w.cache.keys + chunk * kChunk * w.cache.key_stride + lane;
  for (int64_t i = 0; i < w.num_kv_heads * w.head_size; ++i) keys[i * kChunk] = from[i];
  for (int64_t head = 0; head < w.num_kv_heads; ++head)
    std::memcpy(w.cache.values + chunk * kChunk * w.cache.value_stride + (head * kChunk + lane) * w.value_size,
                w.values + token * w.value_stride + head * w.value_size, w.value_size * sizeof(float));
}

}  // namespace penstock
