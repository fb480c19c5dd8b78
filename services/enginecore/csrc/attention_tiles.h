// Working memory of an attention task, and the task's products of queries with keys and of weights with values, in floats.
#pragma once

#include <algorithm>
#include <array>
#include <utility>

#include "model.h"
#include "vec.h"

namespace penstock {

constexpr int kTileVectors = 8;
constexpr int64_t kKeys = kTileVectors * kLanes;  // number of keys in a tile
constexpr int64_t kTaskRows = 4 * kTile;
constexpr int64_t kMaxValueSize = 512;

// Softmax sums of each row of a task over a range of keys.
struct Sums {
  alignas(64) float output[kTaskRows][kMaxValueSize + 16];
  float peak[kTaskRows];  // scaled score that gets weight 1, see attention_weights.h; close to the largest score
  vf total[kTaskRows];    // sum of weights, in each lane over the keys whose index has the same remainder by the number of lanes
};

// Working memory of a task. A row of `query` or `weights` has floats, or bfloat16 pairs in its first half.
struct Scratch {
  static constexpr int64_t kQuery = kMaxValueSize + 2 * kLanes;

  alignas(64) float query[kTaskRows][kQuery];
  alignas(64) float weights[kTile][kKeys];  // scores, later weights, of the rows that are computed together
  Sums part;   // sums over the keys of one segment
  Sums whole;  // sums over the keys of all segments so far
};

// Addresses in the next chunk that are prefetched. Chunks can be anywhere in memory, so the processor cannot predict their
// addresses. Without the prefetch, tasks with few rows, as in decode steps, would wait for memory.
template <class Number>
struct Ahead {
  const Number* left;
  const Number* right;
};

// Addresses of the keys of a panel, which has two SIMD vectors of keys.
template <class Number>
struct PanelKeys {
  const Number* left;
  const Number* right;
  Ahead<Number> ahead;
};

inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

// weights[..kRows][key..key + kPanel) = queries row.. . keys.
template <int kRows>
void score_tile(Scratch& s, int64_t row, int64_t key, const PanelKeys<float>& keys, int64_t head_size) {
  vf sums[kRows][2];
  clear(sums);
  const float* query = s.query[row];
  for (int64_t d = 0; d < head_size; ++d, ++query) {
    prefetch(keys.ahead.left + d * kChunk);
    prefetch(keys.ahead.right + d * kChunk);
    const vf l = load(keys.left + d * kChunk), r = load(keys.right + d * kChunk);
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      const vf q = splat(query[i * Scratch::kQuery]);
      sums[i][0] += q * l;
      sums[i][1] += q * r;
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
    store(&s.weights[i][key], sums[i][0]);
    store(&s.weights[i][key + kLanes], sums[i][1]);
  }
}

// Range of the indices of keys in a tile.
struct Span {
  int64_t from;
  int64_t to;
  bool empty() const { return from >= to; }
};

// Addresses of the values of a tile's keys, and for each address the address of the next chunk to prefetch.
template <class Number>
struct Values {
  const Number* of[kKeys / kChunk];
  const Number* ahead[kKeys / kChunk];
};

// output[row..][column..] += weights[weight..][from..to) x values, for kRows rows and kVectors vectors of columns.
template <int kRows, int kVectors>
void value_tile(Scratch& s, int64_t row, int64_t weight, const Span& span, const Values<float>& values, int64_t value_size,
                int64_t column) {
  vf sums[kRows][kVectors];
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i)
    for (int v = 0; v < kVectors; ++v) sums[i][v] = load(&s.part.output[row + i][column + v * kLanes]);
  for (int64_t key = span.from; key < span.to;) {
    const int64_t chunk = key / kChunk, end = std::min(span.to, (chunk + 1) * kChunk);
    const float* value = values.of[chunk] + key % kChunk * value_size + column;
    const float* ahead = values.ahead[chunk] + key % kChunk * value_size + column;
    const float* weights = s.weights[weight] + key;
    for (; key < end; ++key, ++weights, value += value_size, ahead += value_size) {
      prefetch(ahead);
      if constexpr (kVectors * kLanes > kChunk) prefetch(ahead + kChunk);
      vf parts[kVectors];
      for (int v = 0; v < kVectors; ++v) parts[v] = load(value + v * kLanes);
#pragma GCC unroll 16
      for (int i = 0; i < kRows; ++i) {
        const vf by = splat(weights[i * kKeys]);
        for (int v = 0; v < kVectors; ++v) sums[i][v] += by * parts[v];
      }
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i)
    for (int v = 0; v < kVectors; ++v) store(&s.part.output[row + i][column + v * kLanes], sums[i][v]);
}

using ScoreTile = void (*)(Scratch&, int64_t, int64_t, const PanelKeys<float>&, int64_t);
using ValueTile = void (*)(Scratch&, int64_t, int64_t, const Span&, const Values<float>&, int64_t, int64_t);

template <int... kRows>
constexpr std::array<ScoreTile, sizeof...(kRows)> score_tiles(std::integer_sequence<int, kRows...>) {
  return {&score_tile<kRows + 1>...};
}
template <int kVectors, int... kRows>
constexpr std::array<ValueTile, sizeof...(kRows)> value_tiles(std::integer_sequence<int, kRows...>) {
  return {&value_tile<kRows + 1, kVectors>...};
}
constexpr auto kScoreTiles = score_tiles(std::make_integer_sequence<int, kTile>{});
constexpr auto kValueTiles = value_tiles<2>(std::make_integer_sequence<int, kTile>{});
constexpr auto kNarrowValueTiles = value_tiles<1>(std::make_integer_sequence<int, kTile>{});

// Operations on a tile of keys in floats: computation of scores and of weighted sums of values.
struct FloatTiles {
  using Number = float;

  // Prepares the query of `row`, which has `head_size` elements. Floats need no preparation.
  static void take_query(Scratch&, int64_t, int64_t) {}

  // Computes the scores of `count` rows, starting at `row`, for the keys of one panel. `key` is the index in the tile of the
  // panel's first key.
  static void score(Scratch& s, int64_t row, int64_t count, int64_t key, const PanelKeys<float>& keys, int64_t head_size) {
    kScoreTiles[count - 1](s, row, key, keys, head_size);
  }

  static vf power(vf x) { return power_of_two(kPowers5, x); }

  // Replaces the scores of a row by weights. Returns `total` plus the sum of the weights.
  static vf take_weights(Scratch& s, int64_t row, const vf (&weights)[kTileVectors], vf total) {
    for (int v = 0; v < kTileVectors; ++v) store(&s.weights[row][v * kLanes], weights[v]), total += weights[v];
    return total;
  }

  // Returns the part of a row's visible keys that may be added for several rows together.
  static Span shared(const Span& seen) { return seen; }

  // Adds the weighted values of the keys `span` for `count` rows of the task, starting at `row`. The weights of these rows start at
  // row `weight` of the scratch memory.
  static void add(Scratch& s, int64_t row, int64_t weight, int64_t count, const Span& span, const Values<float>& values,
                  int64_t value_size) {
    if (span.empty()) return;
    int64_t column = 0;
    for (; column + kPanel <= value_size; column += kPanel) kValueTiles[count - 1](s, row, weight, span, values, value_size, column);
    for (; column < value_size; column += kLanes) kNarrowValueTiles[count - 1](s, row, weight, span, values, value_size, column);
  }

  // Adds the values of the keys that only a single row adds, because these keys are before or after the keys of `shared`. Floats
  // have no such keys.
  static void add_first(Scratch&, int64_t, int64_t, const Span&, const Values<float>&, int64_t) {}
  static void add_last(Scratch&, int64_t, int64_t, const Span&, const Values<float>&, int64_t) {}
};

}  // namespace penstock
