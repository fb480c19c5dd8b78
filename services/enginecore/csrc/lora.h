// LoRA adapters (Hu et al., 2021). A segment is a range of rows that use the same adapter. The output for an input row x in a
// segment is x W^T + x A^T B^T, with the matrices A [rank, k] and B [n, rank] of the segment's adapter.
// A phase before the product computes h = x A^T, called the small sums. A is stored in groups of kGroupRanks rows with interleaved
// inputs, so that the cost is proportional to the rank. The product then multiplies its tiles by W. Meanwhile, it prefetches B,
// which is stored in the order of W's panels. At the end, before bias and epilogue, each tile adds h B^T to its sums. The same code
// is used for all dtypes of W, and also with a matrix unit. If the weights of several projections are merged into one product, A
// has the rows of all projections' matrices A. A vector of output features uses only the small sums of its own projection. Each
// output is computed in a fixed order of additions, and rows without an adapter are unchanged.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "model.h"
#include "parts.h"
#include "vec.h"

namespace penstock {

constexpr int64_t kGroupRanks = 4;
constexpr int64_t kLineBytes = 64;
constexpr int64_t kAheadBytes = 4096;  // distance in bytes of the prefetch of A

// Returns the sum of a vector's lanes, by repeatedly adding the two halves of the vector.
template <int kAway = kLanes / 2>
inline float halved_sum(vf v) {
  v += exchanged<kAway>(v, std::make_integer_sequence<int, kLanes>{});
  if constexpr (kAway > 1) return halved_sum<kAway / 2>(v);
  else return v[0];
}

// Loads two vectors of numbers. For bfloat16, one vector has the first elements of the pairs in the lanes, and the other vector the
// second elements.
inline void load_two(const float* from, vf& first, vf& second) { first = load(from), second = load(from + kLanes); }
inline void load_two(const uint16_t* from, vf& first, vf& second) {
  const vu pairs = load_pairs(from);
  first = reinterpret_cast<vf>(pairs << 16), second = cut(reinterpret_cast<vf>(pairs));
}

inline vf load_input(const float* x) { return load(x); }
inline vf load_input(const uint16_t* x) {
  return reinterpret_cast<vf>(__builtin_convertvector(*reinterpret_cast<const vh_unaligned*>(x), vu) << 16);
}

// Loads `count` inputs into a vector, and fills the remaining lanes with zeros.
template <class Input>
inline vf load_some(const Input* x, int64_t count) {
  if (count >= kLanes) return load_input(x);
  Input some[kLanes] = {};
  if (count > 0) std::memcpy(some, x, count * sizeof(Input));
  return load_input(some);
}

// Multiplies kRows rows of inputs by a group of kRanks rows of A.
template <class Weight, class Input, int kRows, int kRanks>
void multiply_group(const Input* x, int64_t stride, const Weight* group, int64_t k, float* out, int64_t out_stride) {
  constexpr int64_t kBlock = kRanks * 2 * kLanes;  // number of elements of the group that are stored together
  vf sums[kRows][kRanks] = {};
  const auto add = [&](const vf (&inputs)[kRows][2]) {
#pragma GCC unroll 4
    for (int r = 0; r < kRanks; ++r) {
      vf first, second;
      load_two(group + r * 2 * kLanes, first, second);
#pragma GCC unroll 4
      for (int i = 0; i < kRows; ++i) {
        sums[i][r] += inputs[i][0] * first;
        sums[i][r] += inputs[i][1] * second;
      }
    }
  };
  int64_t j = 0;
  for (; j + 2 * kLanes <= k; j += 2 * kLanes, group += kBlock) {
    const char* ahead = reinterpret_cast<const char*>(group) + kAheadBytes;
#pragma GCC unroll 16
    for (int64_t i = 0; i < kBlock * static_cast<int64_t>(sizeof(Weight)); i += kLineBytes) __builtin_prefetch(ahead + i);
    vf inputs[kRows][2];
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) inputs[i][0] = load_input(x + i * stride + j), inputs[i][1] = load_input(x + i * stride + j + kLanes);
    add(inputs);
  }
  if (j < k) {
    vf inputs[kRows][2];
    for (int i = 0; i < kRows; ++i) {
      const Input* from = x + i * stride + j;
      inputs[i][0] = load_some(from, k - j), inputs[i][1] = load_some(from + (k - j > kLanes ? kLanes : 0), k - j - kLanes);
    }
    add(inputs);
  }
#pragma GCC unroll 4
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int r = 0; r < kRanks; ++r) out[i * out_stride + r] = halved_sum(sums[i][r]);
  }
}

// Computes the small sums of kRows rows of inputs, for the groups `first` to `end - 1` of A.
template <class Weight, class Input, int kRows>
void shrink_rows(const Input* x, int64_t stride, const Update& update, int64_t first, int64_t end, float* out, int64_t out_stride) {
  static_assert(kGroupRanks == 4);
  for (int64_t group = first; group < end; ++group) {
    const int64_t rank = group * kGroupRanks;
    const Weight* a = static_cast<const Weight*>(update.a) + rank * update.a_stride;
    switch (std::min(update.rank - rank, kGroupRanks)) {
      case 1: multiply_group<Weight, Input, kRows, 1>(x, stride, a, update.k, out + rank, out_stride); break;
      case 2: multiply_group<Weight, Input, kRows, 2>(x, stride, a, update.k, out + rank, out_stride); break;
      case 3: multiply_group<Weight, Input, kRows, 3>(x, stride, a, update.k, out + rank, out_stride); break;
      default: multiply_group<Weight, Input, kRows, 4>(x, stride, a, update.k, out + rank, out_stride);
    }
  }
}

constexpr int kShrinkRows = kTile < 8 ? 2 : 4;  // with sixteen registers, only the sums of two rows fit

template <class Weight, class Input>
void shrink_by(const Input* x, int64_t stride, int64_t rows, const Update& update, int64_t first, int64_t end, float* out,
            int64_t out_stride) {
  int64_t row = 0;
  for (; row + kShrinkRows <= rows; row += kShrinkRows)
    shrink_rows<Weight, Input, kShrinkRows>(x + row * stride, stride, update, first, end, out + row * out_stride, out_stride);
  for (; row < rows; ++row) shrink_rows<Weight, Input, 1>(x + row * stride, stride, update, first, end, out + row * out_stride, out_stride);
}

// Computes the small sums `out` [rows, rank] of rows of inputs, for the groups `first` to `end - 1` of A. The inputs are floats or
// bfloat16.
template <class Input>
void shrink(const Input* x, int64_t stride, int64_t rows, const Update& update, int64_t first, int64_t end, float* out,
            int64_t out_stride) {
  if (update.a_kind == kBfloat16) shrink_by<uint16_t>(x, stride, rows, update, first, end, out, out_stride);
  else shrink_by<float>(x, stride, rows, update, first, end, out, out_stride);
}

// Adds an update to one vector of output features of kRows rows, from `rank` small sums of each row. The products of B with small
// sums of even index are added to the output directly. The products with small sums of odd index are first summed separately.
template <class Weight, int kRows>
void expand_rows(const float* sums, int64_t stride, const Weight* b, int64_t rank, float* out) {
  vf both[kRows][2];
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) both[i][0] = load(out + i * kPanel), both[i][1] = vf{};
  int64_t j = 0;
  for (; j + 2 <= rank; j += 2) {
    vf even, odd;
    load_two(b + j * kLanes, even, odd);
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      both[i][0] += splat(sums[i * stride + j]) * even;
      both[i][1] += splat(sums[i * stride + j + 1]) * odd;
    }
  }
  if (j < rank) {
    vf even;
    if constexpr (sizeof(Weight) == sizeof(float)) even = load(b + j * kLanes);
    else even = reinterpret_cast<vf>(load_pairs(b + j * kLanes) << 16);
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) both[i][0] += splat(sums[i * stride + j]) * even;
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) store(out + i * kPanel, both[i][0] + both[i][1]);
}

template <class Weight>
void expand(const float* sums, int64_t stride, int64_t rows, const Weight* b, int64_t rank, float* out) {
  constexpr int kMost = kTile < 8 ? 6 : 8;  // number of rows whose sums fit in registers
  if (rows > kMost) {  // divide the rows evenly
    const int64_t half = (rows + 1) / 2;
    expand(sums, stride, half, b, rank, out);
    return expand(sums + half * stride, stride, rows - half, b, rank, out + half * kPanel);
  }
  switch (rows) {
    case 8: return expand_rows<Weight, kMost == 8 ? 8 : 1>(sums, stride, b, rank, out);
    case 7: return expand_rows<Weight, kMost == 8 ? 7 : 1>(sums, stride, b, rank, out);
    case 6: return expand_rows<Weight, 6>(sums, stride, b, rank, out);
    case 5: return expand_rows<Weight, 5>(sums, stride, b, rank, out);
    case 4: return expand_rows<Weight, 4>(sums, stride, b, rank, out);
    case 3: return expand_rows<Weight, 3>(sums, stride, b, rank, out);
    case 2: return expand_rows<Weight, 2>(sums, stride, b, rank, out);
    case 1: return expand_rows<Weight, 1>(sums, stride, b, rank, out);
  }
}

// Part of B for one vector of output features. This part is multiplied by `rank` small sums of a row, starting at index `first`.
// `rank` is 0 if the update does not change these features.
struct Column {
  const char* b;
  int64_t first;
  int64_t rank;
  int64_t bytes;
};

inline Column column_of(const Update& update, int64_t vector) {
  int64_t at = 0, place = vector;
  if (update.interleaved) at = vector % 2, place = vector / 2;
  else
    for (; at < update.num_pieces && place >= update.pieces[at].vectors; ++at) place -= update.pieces[at].vectors;
  if (at >= update.num_pieces || place >= update.pieces[at].vectors) return {};
  const Piece& piece = update.pieces[at];
  const int64_t bytes = update.b_kind == kBfloat16 ? (piece.rank + 1) / 2 * 2 * kLanes * 2 : piece.rank * kLanes * 4;
  return {static_cast<const char*>(piece.b) + place * bytes, piece.first, piece.rank, bytes};
}

// LoRA adapters of the product whose updates have the index `place`, with the small sums `sums` [rows, ranks]. Segments are in
// order of their rows.
struct LowRank {
  const Segment* segments;
  int64_t count;
  int64_t place;
  const float* sums;
  int64_t stride;

  // Calls `task` with each segment that has some of the rows `row` to `end - 1`, and with the segment's update of this product.
  template <class Task>
  void each(int64_t row, int64_t end, const Task& task) const {
    const Segment* segment = std::partition_point(segments, segments + count, [row](const Segment& of) { return of.end <= row; });
    for (; segment != segments + count && segment->first < end; ++segment)
      if (const Update& update = segment->updates[place]; update.rank > 0)
        task(update, std::max(row, segment->first), std::min(end, segment->end));
  }

  // Returns whether one of the rows `row` to `end - 1` has an update of this product.
  bool has(int64_t row, int64_t end) const {
    bool found = false;
    each(row, end, [&](const Update&, int64_t, int64_t) { found = true; });
    return found;
  }

  // Adds the updates of the output features in `panel`, for the rows `row` to `end - 1`, to `to` [rows, kPanel].
  __attribute__((noinline)) void add(float* to, int64_t row, int64_t end, int64_t panel) const {
    each(row, end, [&](const Update& update, int64_t from, int64_t until) {
      for (int64_t half = 0; half < 2; ++half) {
        const Column column = column_of(update, 2 * panel + half);
        if (column.rank == 0) continue;
        const float* of = sums + from * stride + column.first;
        float* at = to + (from - row) * kPanel + half * kLanes;
        if (update.b_kind == kBfloat16) expand(of, stride, until - from, reinterpret_cast<const uint16_t*>(column.b), column.rank, at);
        else expand(of, stride, until - from, reinterpret_cast<const float*>(column.b), column.rank, at);
      }
    });
  }
};

// Memory of the matrices B that `kRows` rows need for a panel, and its prefetch.
template <int kRows>
class Pieces {
 public:
  Pieces(const LowRank& adapters, int64_t row, int64_t panel) {
    adapters.each(row, row + kRows, [&](const Update& update, int64_t, int64_t) {
      for (int64_t vector = 2 * panel; vector < 2 * panel + 2; ++vector)
        if (const Column column = column_of(update, vector); column.rank > 0) pieces_[count_++] = {column.b, column.b + column.bytes};
    });
  }

  // Prefetches the next `lines` cache lines of this memory.
  void ask(int64_t lines) {
    while (lines > 0 && next_ < count_) {
      auto& [from, end] = pieces_[next_];
      for (; lines > 0 && from < end; --lines, from += kLineBytes) __builtin_prefetch(from, 0, 2);
      if (from >= end) ++next_;
    }
  }

 private:
  struct Piece {
    const char* from;
    const char* end;
  };
  Piece pieces_[2 * kRows];  // at most one segment per row, each with two vectors
  int64_t count_ = 0, next_ = 0;
};

// Division of the computation of small sums into tasks.
class Shrinking {
 public:
  struct Task {
    int64_t segment, first, end, share, shares;
  };

  // Divides the computation for `segments` into tasks for `threads` threads.
  void cut(const std::vector<Segment>& segments, int threads) {
    tasks_.clear();
    int64_t blocks = 0;
    for (const Segment& of : segments) blocks += (of.end - of.first + kRows - 1) / kRows;
    const int64_t shares = blocks == 0 ? 1 : std::clamp<int64_t>(4 * threads / blocks, 1, 8);
    for (size_t i = 0; i < segments.size(); ++i)
      for (int64_t first = segments[i].first; first < segments[i].end; first += kRows)
        for (int64_t share = 0; share < shares; ++share)
          tasks_.push_back({static_cast<int64_t>(i), first, std::min(segments[i].end, first + kRows), share, shares});
  }

  int64_t size() const { return static_cast<int64_t>(tasks_.size()); }

  // Runs the task with index `task`. `from` points to rows of inputs with a stride of `stride`, and `out` to rows of small sums.
  template <class Input>
  void operator()(int64_t index, const std::vector<Segment>& segments, int64_t place, const Input* from, int64_t stride, float* out,
                  int64_t out_stride) const {
    const Task& task = tasks_[index];
    const Update& update = segments[task.segment].updates[place];
    const int64_t groups = (update.rank + kGroupRanks - 1) / kGroupRanks;
    const int64_t first = groups * task.share / task.shares, end = groups * (task.share + 1) / task.shares;
    if (first == end) return;
    shrink(from + task.first * stride, stride, task.end - task.first, update, first, end, out + task.first * out_stride, out_stride);
  }

 private:
  static constexpr int64_t kRows = 16;  // maximum number of rows of a task
  std::vector<Task> tasks_;
};

// Writes the segments of selected tokens. `rows` [count] are the indices of the selected tokens, and `segments` has the `total`
// segments of all tokens.
inline void take_segments(const Segment* segments, int64_t total, const int64_t* rows, int64_t count, std::vector<Segment>& taken) {
  taken.clear();
  if (total == 0) return;
  const Segment* before = nullptr;
  for (int64_t row = 0; row < count; ++row) {
    const Segment* of = std::partition_point(segments, segments + total, [&](const Segment& each) { return each.end <= rows[row]; });
    if (of == segments + total || of->first > rows[row]) of = nullptr;
    if (of != nullptr && of == before) {
      ++taken.back().end;
    } else if (of != nullptr) {
      taken.push_back({of->updates, row, row + 1, of->width});
    }
    before = of;
  }
}

}  // namespace penstock
