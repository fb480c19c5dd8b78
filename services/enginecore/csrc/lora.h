// What adapters add to products (LoRA; Hu et al., 2021): rows of a segment have x A^T B^T besides x W^T, with A [rank, k] and
// B [n, rank] of its adapter.
//
// A phase before the product makes the small sums h = x A^T, every one a product of two rows that are next to each other in memory,
// so that a rank costs what it is. The tasks of the product make h B^T of their own rows and panels, and add it to the sums of W
// behind the last of these, before bias and epilogue: in one place for weights of all kinds and for all units. Weights that
// are merged for a product have one A, the rows of all their projections; a vector of output features has sums of its own
// projection alone. Every number is one sum in one order, and rows without an adapter get -0, which changes no bit of any number.
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

constexpr int64_t kAddendWidth = 2 * kPanel;  // of the panels of a task

// The sum of the lanes, half by half.
template <int kAway = kLanes / 2>
inline float halved_sum(vf v) {
  v += exchanged<kAway>(v, std::make_integer_sequence<int, kLanes>{});
  if constexpr (kAway > 1) return halved_sum<kAway / 2>(v);
  else return v[0];
}

// Two vectors; of bfloat16 in pairs of a lane.
inline void load_two(const float* from, vf& first, vf& second) { first = load(from), second = load(from + kLanes); }
inline void load_two(const uint16_t* from, vf& first, vf& second) {
  const vu pairs = load_pairs(from);
  first = reinterpret_cast<vf>(pairs << 16), second = cut(reinterpret_cast<vf>(pairs));
}

inline vf load_input(const float* x) { return load(x); }
inline vf load_input(const uint16_t* x) {
  return reinterpret_cast<vf>(__builtin_convertvector(*reinterpret_cast<const vh_unaligned*>(x), vu) << 16);
}

// `count` of a vector's inputs, and zeros.
template <class Input>
inline vf load_some(const Input* x, int64_t count) {
  if (count >= kLanes) return load_input(x);
  Input some[kLanes] = {};
  if (count > 0) std::memcpy(some, x, count * sizeof(Input));
  return load_input(some);
}

// Rows of inputs times rows of A, which end in zeros up to whole pairs of vectors.
template <class Weight, class Input, int kRows, int kRanks>
void multiply_rows(const Input* x, int64_t stride, const Weight* a, int64_t a_stride, int64_t k, float* out, int64_t out_stride) {
  vf sums[kRows][kRanks] = {};
  const auto add = [&](const vf (&inputs)[kRows][2], int64_t j) {
#pragma GCC unroll 8
    for (int r = 0; r < kRanks; ++r) {
      vf first, second;
      load_two(a + r * a_stride + j, first, second);
#pragma GCC unroll 4
      for (int i = 0; i < kRows; ++i) {
        sums[i][r] += inputs[i][0] * first;
        sums[i][r] += inputs[i][1] * second;
      }
    }
  };
  int64_t j = 0;
  for (; j + 2 * kLanes <= k; j += 2 * kLanes) {
    vf inputs[kRows][2];
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) inputs[i][0] = load_input(x + i * stride + j), inputs[i][1] = load_input(x + i * stride + j + kLanes);
    add(inputs, j);
  }
  if (j < k) {
    vf inputs[kRows][2];
    for (int i = 0; i < kRows; ++i) {
      const Input* from = x + i * stride + j;
      inputs[i][0] = load_some(from, k - j), inputs[i][1] = load_some(from + (k - j > kLanes ? kLanes : 0), k - j - kLanes);
    }
    add(inputs, j);
  }
#pragma GCC unroll 4
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
    for (int r = 0; r < kRanks; ++r) out[i * out_stride + r] = halved_sum(sums[i][r]);
  }
}

// Of some rows, those of A from `first` to before `end`.
template <class Weight, class Input, int kRows>
void shrink_rows(const Input* x, int64_t stride, const Update& update, int64_t first, int64_t end, float* out, int64_t out_stride) {
  const Weight* a = static_cast<const Weight*>(update.a);
  const auto rows = [&]<int kRanks>(std::integral_constant<int, kRanks>) {
    for (; first + kRanks <= end; first += kRanks)
      multiply_rows<Weight, Input, kRows, kRanks>(x, stride, a + first * update.a_stride, update.a_stride, update.k, out + first,
                                                  out_stride);
  };
  if constexpr (kRows == 1) rows(std::integral_constant<int, 8>{});
  rows(std::integral_constant<int, 4>{});
  rows(std::integral_constant<int, 1>{});
}

constexpr int kShrinkRows = kTile < 8 ? 2 : 4;  // sixteen registers have room for the sums of two rows

template <class Weight, class Input>
void shrink_by(const Input* x, int64_t stride, int64_t rows, const Update& update, int64_t first, int64_t end, float* out,
            int64_t out_stride) {
  int64_t row = 0;
  for (; row + kShrinkRows <= rows; row += kShrinkRows)
    shrink_rows<Weight, Input, kShrinkRows>(x + row * stride, stride, update, first, end, out + row * out_stride, out_stride);
  for (; row < rows; ++row) shrink_rows<Weight, Input, 1>(x + row * stride, stride, update, first, end, out + row * out_stride, out_stride);
}

// `out` [rows, rank]: of rows of inputs, floats or bfloat16, what A makes of them, for its rows `first` to before `end`.
template <class Input>
void shrink(const Input* x, int64_t stride, int64_t rows, const Update& update, int64_t first, int64_t end, float* out,
            int64_t out_stride) {
  if (update.a_kind == kBfloat16) shrink_by<uint16_t>(x, stride, rows, update, first, end, out, out_stride);
  else shrink_by<float>(x, stride, rows, update, first, end, out, out_stride);
}

// A vector of output features of some rows, from their `rank` sums. Those of even places are one sum, those of odd ones another.
template <class Weight, int kRows>
void expand_rows(const float* sums, int64_t stride, const Weight* b, int64_t rank, float* out) {
  vf both[kRows][2];
  clear(both);
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
  for (int i = 0; i < kRows; ++i) store(out + i * kAddendWidth, both[i][0] + both[i][1]);
}

template <class Weight>
void expand(const float* sums, int64_t stride, int64_t rows, const Weight* b, int64_t rank, float* out) {
  for (; rows >= 6; rows -= 6, sums += 6 * stride, out += 6 * kAddendWidth) expand_rows<Weight, 6>(sums, stride, b, rank, out);
  for (; rows >= 3; rows -= 3, sums += 3 * stride, out += 3 * kAddendWidth) expand_rows<Weight, 3>(sums, stride, b, rank, out);
  for (; rows > 0; --rows, sums += stride, out += kAddendWidth) expand_rows<Weight, 1>(sums, stride, b, rank, out);
}

// Of a pair of numbers of bfloat16 there are always both.
inline int64_t kept_ranks(int64_t rank, int64_t kind) { return kind == kBfloat16 ? (rank + 1) / 2 * 2 : rank; }

// Of vector `vector` of an update's output features. Leaves `out` alone where the update has none for it.
inline void expand(const Update& update, int64_t vector, const float* sums, int64_t stride, int64_t rows, float* out) {
  int64_t at = update.interleaved ? vector % update.num_pieces : 0, place = update.interleaved ? vector / update.num_pieces : vector;
  if (!update.interleaved)
    for (; at < update.num_pieces && place >= update.pieces[at].vectors; ++at) place -= update.pieces[at].vectors;
  if (at == update.num_pieces) return;
  const Piece& piece = update.pieces[at];
  if (piece.rank == 0 || place >= piece.vectors) return;
  const int64_t offset = place * kept_ranks(piece.rank, update.b_kind) * kLanes;
  if (update.b_kind == kBfloat16)
    expand(sums + piece.first, stride, rows, static_cast<const uint16_t*>(piece.b) + offset, piece.rank, out);
  else expand(sums + piece.first, stride, rows, static_cast<const float*>(piece.b) + offset, piece.rank, out);
}

// What adapters add to the product at `place`: `sums` [rows, ranks] are there. Segments are in order.
struct LowRank {
  const Segment* segments;
  int64_t count;
  int64_t place;
  const float* sums;
  int64_t stride;

  // [rows, kAddendWidth], of rows `start` to before `end` and panels `first_panel` to before `last_panel`, two at most. Null where
  // none of the rows has an adapter. It is the thread's until the next call.
  const float* addends(int64_t first_panel, int64_t last_panel, int64_t start, int64_t end) const {
    static thread_local std::vector<float> memory;
    const Segment* segment = std::partition_point(segments, segments + count, [start](const Segment& of) { return of.end <= start; });
    const Segment* const last = std::partition_point(segment, segments + count, [end](const Segment& of) { return of.first < end; });
    if (segment == last) return nullptr;
    const int64_t size = (end - start) * kAddendWidth;
    if (static_cast<int64_t>(memory.size()) < size) memory.resize(size);
    std::fill_n(memory.data(), size, -0.0f);
    for (; segment != last; ++segment) {
      const Update& update = segment->updates[place];
      if (update.rank == 0) continue;
      const int64_t from = std::max(start, segment->first), to = std::min(end, segment->end);
      for (int64_t vector = 2 * first_panel; vector < 2 * last_panel; ++vector)
        expand(update, vector, sums + from * stride, stride, to - from,
               memory.data() + (from - start) * kAddendWidth + (vector - 2 * first_panel) * kLanes);
    }
    return memory.data();
  }
};

// Cuts the making of the small sums of some segments into tasks.
class Shrinking {
 public:
  struct Task {
    int64_t segment, first, end, share, shares;
  };

  // For `threads` threads.
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

  // `from`: rows of inputs, `stride` apart; `out`: rows of sums.
  template <class Input>
  void operator()(int64_t index, const std::vector<Segment>& segments, int64_t place, const Input* from, int64_t stride, float* out,
                  int64_t out_stride) const {
    const Task& task = tasks_[index];
    const Update& update = segments[task.segment].updates[place];
    const int64_t first = update.rank * task.share / task.shares, end = update.rank * (task.share + 1) / task.shares;
    if (first == end) return;
    shrink(from + task.first * stride, stride, task.end - task.first, update, first, end, out + task.first * out_stride, out_stride);
  }

 private:
  static constexpr int64_t kRows = 16;  // of a task
  std::vector<Task> tasks_;
};

// Rows that were taken from tokens: which of those `rows` [count] have an adapter of `segments`, `total` of them.
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
