// Attention over the paged KV cache, without copies of the cache and without a mask in memory.
// The keys and values of kChunk slots, a chunk, are stored together. For each head, the keys of a chunk are [head size][kChunk], so
// that the scores of sixteen tokens can be computed as vectors. The values of a chunk are [kChunk][value size], in separate memory.
// A task computes one key head for a range of a request's queries. The task has one row for each of these queries and each query
// head that uses the key head. Keys are processed in tiles of kKeys keys, which start at positions that are multiples of kKeys,
// with a running maximum (online softmax, Milakov and Gimelshein 2018). The result of a row therefore depends neither on other rows
// nor on the division of its prompt into steps.
// Keys are divided into segments of kSegment keys, at multiples of kSegment. Each segment has separate sums, and the sums of all
// segments are added in order. If there are fewer than two tasks per thread, each segment of a task becomes a separate task
// (Flash-Decoding, Dao et al. 2023). The results are the same as without this split.
// Keys and values that are masked for a row never affect this row, even if they are NaN. A weight of zero would not be enough,
// because zero times NaN is NaN. Chunks without a visible key are not read, because such chunks may already belong to another
// request. In all other chunks, the scores of masked keys are replaced, and masked values are left out of the sums.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "attention_pairs.h"
#include "attention_tiles.h"
#include "attention_weights.h"
#include "buffer.h"
#include "model.h"
#include "vec.h"

namespace penstock {

constexpr int64_t kSegment = 1024;  // number of keys in a segment, a multiple of kKeys
constexpr int64_t kAllSegments = -1;

struct AttentionTask {
  int64_t request;
  int64_t kv_head;
  int64_t first;  // index of the task's first query among the request's queries in this step
  int64_t count;
  int64_t head;  // first query head
  int64_t heads;
  int64_t segment = kAllSegments;
  int64_t part = 0;  // index of the first of the task's rows of sums; in `merges`, the rows of all segments follow in order
};

// Tasks of attention in a layer. `merges` are the original tasks whose segments became separate tasks. The separate tasks have
// `num_parts` rows of sums together.
struct AttentionPlan {
  std::vector<AttentionTask> tasks;
  std::vector<AttentionTask> merges;
  int64_t num_parts = 0;
};

inline int64_t chunk_of(const Group& group, int64_t request, int64_t position) {
  const int64_t block = group.block_table[request * group.table_stride + position / group.block_size];
  return (block * group.block_size + position % group.block_size) / kChunk;
}

inline int64_t lowest(const Params& params, int64_t position) {
  int64_t low = 0;
  if (params.window > 0) low = std::max(low, position - params.window + 1);
  if (params.chunk > 0) low = std::max(low, position / params.chunk * params.chunk);
  return low;
}

// Rows of a task and the keys that are visible to each row, for causal attention.
struct Rows {
  Rows(const Attention& a, const AttentionTask& task)
      : params(a.params), first_head(task.head), heads(task.heads), count(task.count * task.heads),
        token(a.query_start[task.request] + task.first),
        position(a.seq_lens[task.request] - (a.query_start[task.request + 1] - a.query_start[task.request]) + task.first) {}

  // Range of the keys that are visible to at least one row.
  int64_t begin() const { return lowest(params, position); }
  int64_t end() const { return position + count / heads; }
  Span segments() const { return {begin() / kSegment, (end() + kSegment - 1) / kSegment}; }

  // Returns the range of the keys in from..to that are visible to a row, relative to `from`. From one row to the next, both bounds
  // stay equal or increase.
  Span seen(int64_t row, int64_t from, int64_t to) const {
    const int64_t at = position + row / heads;
    return {std::max<int64_t>(0, lowest(params, at) - from), std::min(to, at + 1) - from};
  }
  // Returns the first row to which a key at position `from` or later is visible.
  int64_t first_seeing(int64_t from) const { return std::max<int64_t>(0, from - position) * heads; }

  int64_t head(int64_t row) const { return first_head + row % heads; }
  const float* query(const Attention& a, int64_t row) const {
    return a.query + (token + row / heads) * a.query_stride + head(row) * a.head_size;
  }
  float* output(const Attention& a, int64_t row) const {
    return a.output + (token + row / heads) * a.output_stride + head(row) * a.value_size;
  }
  // Returns whether any key is visible to a row. With causal attention, a token attends to itself.
  static constexpr bool sees_any(int64_t) { return true; }

  const Params& params;
  int64_t first_head, heads, count;
  int64_t token, position;  // of the first row
};

// Rows of a task in a step with `key_ends`, in which some queries attend to later keys, or do not attend to themselves. The ends of
// the keys never decrease from query to query. With a window, all visible keys of a query may be before its window.
struct SpanRows : Rows {
  SpanRows(const Attention& a, const AttentionTask& task) : Rows(a, task), ends(a.key_ends + token) {}

  int64_t end() const { return ends[count / heads - 1]; }
  Span segments() const { return {begin() / kSegment, (end() + kSegment - 1) / kSegment}; }
  Span seen(int64_t row, int64_t from, int64_t to) const {
    return {std::max<int64_t>(0, lowest(params, position + row / heads) - from), std::min(to, ends[row / heads]) - from};
  }
  int64_t first_seeing(int64_t from) const {
    return (std::partition_point(ends, ends + count / heads, [from](int64_t end) { return end <= from; }) - ends) * heads;
  }
  bool sees_any(int64_t row) const { return lowest(params, position + row / heads) < ends[row / heads]; }

  const int64_t* ends;  // ends of the keys of the task's queries
};

// Calls `body` with the rows of a task. The mask depends on the type of the rows, so causal attention needs no lookup of the ends
// of keys.
template <class Body>
auto of_rows(const Attention& a, const AttentionTask& task, const Body& body) {
  return a.key_ends == nullptr ? body(Rows(a, task)) : body(SpanRows(a, task));
}

template <class AnyRows>
bool sees(const AnyRows& rows, int64_t row, int64_t segment) {
  return !rows.seen(row, segment * kSegment, (segment + 1) * kSegment).empty();
}

// If there are few tasks, makes each segment of a task a separate task. Segments before the first visible key also become tasks,
// because the plan serves several layers, whose masks differ. A plan with `key_ends` also serves layers without, whose keys end
// earlier.
inline void split_over_keys(const Attention& a, AttentionPlan& plan) {
  std::vector<AttentionTask> tasks;
  for (AttentionTask& task : plan.tasks) {
    const int64_t segments = of_rows(a, task, [](const auto& rows) { return rows.segments().to; });
    if (segments == 1) {
      tasks.push_back(task);
      continue;
    }
    task.part = plan.num_parts;
    plan.merges.push_back(task);
    for (int64_t segment = 0; segment < segments; ++segment, plan.num_parts += task.count * task.heads) {
      tasks.push_back(task);
      tasks.back().segment = segment, tasks.back().part = plan.num_parts;
    }
  }
  plan.tasks = std::move(tasks);
}

// Plans the tasks of attention. The longest tasks are first, so that `threads` threads finish at about the same time.
inline void plan_attention(const Attention& a, int threads, AttentionPlan& plan) {
  std::vector<AttentionTask>& tasks = plan.tasks;
  tasks.clear(), plan.merges.clear(), plan.num_parts = 0;
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
  if (threads > 1 && static_cast<int64_t>(tasks.size()) < 2 * threads) split_over_keys(a, plan);
  const auto cost = [&a](const AttentionTask& task) {
    const int64_t keys = a.seq_lens[task.request];
    return task.count * task.heads * (task.segment == kAllSegments ? keys : std::min(keys, kSegment));
  };
  std::stable_sort(tasks.begin(), tasks.end(),
                   [&cost](const AttentionTask& x, const AttentionTask& y) { return cost(x) > cost(y); });
}

// Computes, for each row, the sums over the keys of a segment, and writes the sums to `s.part`.
template <class Tiles, class AnyRows>
void attend_segment(const Attention& a, const AttentionTask& task, const AnyRows& rows, int64_t segment, Scratch& s) {
  using Number = typename Tiles::Number;
  for (int64_t row = 0; row < rows.count; ++row) {
    std::fill_n(s.part.output[row], a.value_size, 0.0f);
    s.part.peak[row] = -INFINITY;
    s.part.total[row] = vf{};
  }
  const int64_t begin = std::max(rows.begin(), segment * kSegment), end = std::min(rows.end(), (segment + 1) * kSegment);
  if (begin >= end) return;
  // Positions are clamped to begin..end. Keys outside this range are masked, so any chunk may be read for these keys.
  const auto chunk = [&](int64_t key) { return chunk_of(a.group, task.request, std::clamp(key, begin, end - 1)) * kChunk; };
  const auto key_chunk = [&](int64_t key) {
    return static_cast<const Number*>(a.cache.keys) + chunk(key) * a.cache.key_stride + task.kv_head * a.head_size * kChunk;
  };
  const auto value_chunk = [&](int64_t key) {
    return static_cast<const Number*>(a.cache.values) + chunk(key) * a.cache.value_stride + task.kv_head * a.value_size * kChunk;
  };
  for (int64_t base = begin / kKeys * kKeys; base < end; base += kKeys) {
    const int64_t keys = std::min(kKeys, end - base);
    const auto seen = [&](int64_t row) { return rows.seen(row, base, base + keys); };
    const int64_t first_panel = std::max<int64_t>(0, begin - base) / kPanel, end_panel = (keys + kPanel - 1) / kPanel;
    PanelKeys<Number> panels[kKeys / kPanel];
    for (int64_t j = first_panel; j < end_panel; ++j) {
      const int64_t left = base + j * kPanel, right = left + kLanes;
      panels[j] = {key_chunk(left) + left % kChunk, key_chunk(right) + right % kChunk, {value_chunk(left), value_chunk(right)}};
    }
    Values<Number> values;
    for (int64_t j = std::max<int64_t>(0, begin - base) / kChunk; j * kChunk < keys; ++j)
      values.of[j] = value_chunk(base + j * kChunk), values.ahead[j] = key_chunk(base + j * kChunk + kKeys);
    const auto shared = [&](int64_t row) { return Tiles::shared(seen(row)); };
    for (int64_t row = rows.first_seeing(base), count; row < rows.count; row += count) {
      count = std::min<int64_t>(kTile, rows.count - row);
      for (int64_t j = first_panel; j < end_panel; ++j) Tiles::score(s, row, count, j * kPanel, panels[j], a.head_size);
      if (seen(row + count - 1).from == 0 && seen(row).to == kKeys) {  // the usual case: all keys are visible to all rows
        for (int64_t i = row; i < row + count; ++i) weigh<Tiles>(s, i, i - row, {0, kKeys}, a.params, a.value_size);
        Tiles::add(s, row, 0, count, Tiles::shared({0, kKeys}), values, a.value_size);
        continue;
      }
      for (int64_t i = row; i < row + count; ++i)
        if (const Span span = seen(i); !span.empty()) weigh<Tiles>(s, i, i - row, span, a.params, a.value_size);
      const auto add = [&](int64_t i, int64_t some, const Span& span) {
        Tiles::add(s, i, i - row, some, span, values, a.value_size);
      };
      // The keys that are visible to all rows are processed for all rows together. Before and after that, each row separately adds
      // the keys that are not visible to all rows. So the order of keys stays the same.
      const Span all{shared(row + count - 1).from, shared(row).to};
      for (int64_t i = row; i < row + count; ++i) {
        Tiles::add_first(s, i, i - row, seen(i), values, a.value_size);
        add(i, 1, all.empty() ? shared(i) : Span{shared(i).from, all.from});
      }
      add(row, count, all);
      for (int64_t i = row; i < row + count; ++i) {
        if (!all.empty()) add(i, 1, Span{all.to, shared(i).to});
        Tiles::add_last(s, i, i - row, seen(i), values, a.value_size);
      }
    }
  }
}

// Initializes the sums of all rows with the model's attention sinks: weights that belong to no key.
inline void begin_whole(const Attention& a, const Rows& rows, Sums& whole) {
  if (a.params.sinks == nullptr) return;
  for (int64_t row = 0; row < rows.count; ++row) {
    std::fill_n(whole.output[row], a.value_size, 0.0f);
    whole.peak[row] = a.params.sinks[rows.head(row)] * kLog2E;
    whole.total[row] = vf{1.0f};
  }
}

// Adds the sums over the keys of a segment to the total sums of a row.
template <class AnyRows>
void add_segment(const Attention& a, const AnyRows& rows, int64_t segment, int64_t row, Scratch& s) {
  if (!sees(rows, row, segment)) return;
  const Sums& part = s.part;
  Sums& whole = s.whole;
  if (a.params.sinks == nullptr && (segment == 0 || !sees(rows, row, segment - 1))) {  // the row's first segment
    std::memcpy(whole.output[row], part.output[row], a.value_size * sizeof(float));
    whole.peak[row] = part.peak[row], whole.total[row] = part.total[row];
    return;
  }
  const float peak = std::max(whole.peak[row], part.peak[row]);
  // If no key has a finite score, the weights are zero or NaN.
  const auto scale = [peak](float of) { return of == -INFINITY ? splat(1.0f) : power_of_two(kPowers5, splat(of - peak)); };
  const vf old = scale(whole.peak[row]), more = scale(part.peak[row]);
  whole.peak[row] = peak;
  whole.total[row] = whole.total[row] * old + part.total[row] * more;
  for (int64_t d = 0; d < a.value_size; d += kLanes)
    store(whole.output[row] + d, load(whole.output[row] + d) * old + load(part.output[row] + d) * more);
}

// Writes the results of the rows. The result of a row without visible keys is zero.
template <class AnyRows>
void put_out(const Attention& a, const AnyRows& rows, const Sums& sums) {
  for (int64_t row = 0; row < rows.count; ++row) {
    float* to = rows.output(a, row);
    if (!rows.sees_any(row)) {
      std::fill_n(to, a.value_size, 0.0f);
      continue;
    }
    const vf scale = splat(1.0f / sum(sums.total[row]));
    for (int64_t d = 0; d < a.value_size; d += kLanes) store(to + d, load(sums.output[row] + d) * scale);
  }
}

// Number of floats for the sums of a row in memory: total, peak and output.
inline int64_t part_width(int64_t value_size) { return value_size + 2 * kLanes; }

inline void store_part(const Attention& a, const Sums& sums, int64_t row, float* to) {
  store(to, sums.total[row]);
  to[kLanes] = sums.peak[row];
  std::memcpy(to + 2 * kLanes, sums.output[row], a.value_size * sizeof(float));
}

inline void load_part(const Attention& a, Sums& sums, int64_t row, const float* from) {
  sums.total[row] = load(from);
  sums.peak[row] = from[kLanes];
  std::memcpy(sums.output[row], from + 2 * kLanes, a.value_size * sizeof(float));
}

inline Scratch& attention_scratch() {
  static thread_local const std::unique_ptr<Scratch> scratch(new Scratch);
  return *scratch;
}

template <class Tiles, class AnyRows>
void attend_by(const Attention& a, const AttentionTask& task, const AnyRows& rows, const Buffer& parts) {
  Scratch& s = attention_scratch();
  const Span segments = rows.segments();
  if (task.segment != kAllSegments && (task.segment < segments.from || task.segment >= segments.to)) return;
  for (int64_t row = 0; row < rows.count; ++row) {
    std::memcpy(s.query[row], rows.query(a, row), a.head_size * sizeof(float));
    Tiles::take_query(s, row, a.head_size);
  }
  if (task.segment != kAllSegments) {
    attend_segment<Tiles>(a, task, rows, task.segment, s);
    for (int64_t row = 0; row < rows.count; ++row) store_part(a, s.part, row, parts.row(task.part + row));
    return;
  }
  const bool alone = a.params.sinks == nullptr && segments.to - segments.from == 1;
  begin_whole(a, rows, s.whole);
  for (int64_t segment = segments.from; segment < segments.to; ++segment) {
    attend_segment<Tiles>(a, task, rows, segment, s);
    for (int64_t row = 0; row < rows.count && !alone; ++row) add_segment(a, rows, segment, row, s);
  }
  put_out(a, rows, alone ? s.part : s.whole);
}

// Computes a task. `parts` has memory for the sums of separate segments: the plan's `num_parts` rows of `part_width` floats.
inline void attend(const Attention& a, const AttentionTask& task, const Buffer& parts) {
  of_rows(a, task, [&](const auto& rows) {
#if defined(PENSTOCK_PAIRS)
    if (a.cache.pairs != 0) return attend_by<PairTiles>(a, task, rows, parts);
#endif
    attend_by<FloatTiles>(a, task, rows, parts);
  });
}

// Adds the sums of the segments of a task, after separate tasks have computed these sums.
template <class AnyRows>
void merge_rows(const Attention& a, const AttentionTask& task, const AnyRows& rows, const Buffer& parts) {
  Scratch& s = attention_scratch();
  begin_whole(a, rows, s.whole);
  const Span segments = rows.segments();
  for (int64_t segment = segments.from; segment < segments.to; ++segment)
    for (int64_t row = 0; row < rows.count; ++row) {
      load_part(a, s.part, row, parts.row(task.part + segment * rows.count + row));
      add_segment(a, rows, segment, row, s);
    }
  put_out(a, rows, s.whole);
}

inline void merge_segments(const Attention& a, const AttentionTask& task, const Buffer& parts) {
  of_rows(a, task, [&](const auto& rows) { merge_rows(a, task, rows, parts); });
}

inline void write_token(const Write& w, int64_t token) {
  const int64_t slot = w.slots[token], chunk = slot / kChunk, lane = slot % kChunk;
  const float* from = w.keys + token * w.key_stride;
  float* keys = static_cast<float*>(w.cache.keys) + chunk * kChunk * w.cache.key_stride + lane;
  for (int64_t i = 0; i < w.num_kv_heads * w.head_size; ++i) keys[i * kChunk] = from[i];
  for (int64_t head = 0; head < w.num_kv_heads; ++head)
    std::memcpy(static_cast<float*>(w.cache.values) + chunk * kChunk * w.cache.value_stride + (head * kChunk + lane) * w.value_size,
                w.values + token * w.value_stride + head * w.value_size, w.value_size * sizeof(float));
}

// Writes the keys and values of the tokens `first` to `end - 1` into the KV cache.
inline void write_tokens(const Write& w, int64_t first, int64_t end) {
#if defined(PENSTOCK_PAIRS)
  if (w.cache.pairs != 0) return write_pairs(w, first, end);
#endif
  for (int64_t token = first; token < end; ++token) write_token(w, token);
}

}  // namespace penstock
