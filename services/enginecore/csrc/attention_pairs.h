// Attention's products of pairs of bfloat16: queries, keys, weights and values are rounded, sums are floats.
//
// The keys and values of a tile are rounded once for all rows of a task: of keys two numbers of the head lie together, of values two
// keys. A row adds up pairs of keys in order. Of a pair of which it sees one key, the other's value is taken for zero, whatever it is.
#pragma once

#include "pairs.h"

#if defined(PENSTOCK_PAIRS)
#include <array>
#include <memory>
#include <utility>

#include "attention_tiles.h"

namespace penstock {

struct PairScratch {
  alignas(64) uint32_t query[kTaskRows][kMaxValueSize / 2 + kLanes];
  alignas(64) uint32_t keys[kMaxValueSize / 2][kKeys];
  alignas(64) uint32_t weights[kTaskRows][kKeys / 2];
  alignas(64) uint32_t values[kKeys / 2 * kMaxValueSize];  // [pairs of keys][value size]
};

inline PairScratch& pair_scratch() {
  static thread_local const std::unique_ptr<PairScratch> scratch(new PairScratch);
  return *scratch;
}

constexpr uint32_t kWhole = ~0u, kFirst = 0xFFFFu, kSecond = 0xFFFF0000u;  // numbers of a pair

inline vu load_pairs(const uint32_t* p) { return load_pairs(reinterpret_cast<const uint16_t*>(p)); }
inline void store_pairs(uint32_t* p, vu v) { *reinterpret_cast<vi_unaligned*>(p) = reinterpret_cast<vi_unaligned>(v); }

template <int kRows>
void pair_score_tile(Scratch& s, const PairScratch& p, int64_t row, int64_t key, int64_t pairs) {
  vf sums[kRows][2] = {};
  for (int64_t d = 0; d < pairs; ++d) {
    const vu left = load_pairs(&p.keys[d][key]), right = load_pairs(&p.keys[d][key + kLanes]);
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      const vu query = p.query[row + i][d] - vu{};
      sums[i][0] = add_pairs(sums[i][0], left, query);
      sums[i][1] = add_pairs(sums[i][1], right, query);
    }
  }
  for (int i = 0; i < kRows; ++i) {
    store(&s.scores[row + i][key], sums[i][0]);
    store(&s.scores[row + i][key + kLanes], sums[i][1]);
  }
}

// output[row][column..] += weights[row][pairs] x values, for kVectors vectors of columns.
template <int kRows, int kVectors>
void pair_value_tile(Scratch& s, const PairScratch& p, int64_t row, const Span& pairs, uint32_t mask, int64_t value_size,
                     int64_t column) {
  vf sums[kRows][kVectors];
  for (int i = 0; i < kRows; ++i)
    for (int v = 0; v < kVectors; ++v) sums[i][v] = load(&s.part.output[row + i][column + v * kLanes]);
  const vu seen = mask - vu{};
  const uint32_t* value = p.values + pairs.from * value_size + column;
  for (int64_t pair = pairs.from; pair < pairs.to; ++pair, value += value_size) {
    vu parts[kVectors];
    for (int v = 0; v < kVectors; ++v) parts[v] = load_pairs(value + v * kLanes) & seen;
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      const vu weight = p.weights[row + i][pair] - vu{};
      for (int v = 0; v < kVectors; ++v) sums[i][v] = add_pairs(sums[i][v], parts[v], weight);
    }
  }
  for (int i = 0; i < kRows; ++i)
    for (int v = 0; v < kVectors; ++v) store(&s.part.output[row + i][column + v * kLanes], sums[i][v]);
}

using PairScoreTile = void (*)(Scratch&, const PairScratch&, int64_t, int64_t, int64_t);
using PairValueTile = void (*)(Scratch&, const PairScratch&, int64_t, const Span&, uint32_t, int64_t, int64_t);

template <int... kRows>
constexpr std::array<PairScoreTile, sizeof...(kRows)> pair_score_tiles(std::integer_sequence<int, kRows...>) {
  return {&pair_score_tile<kRows + 1>...};
}
template <int kVectors, int... kRows>
constexpr std::array<PairValueTile, sizeof...(kRows)> pair_value_tiles(std::integer_sequence<int, kRows...>) {
  return {&pair_value_tile<kRows + 1, kVectors>...};
}
constexpr auto kPairScoreTiles = pair_score_tiles(std::make_integer_sequence<int, kTile>{});
constexpr auto kPairValueTiles = pair_value_tiles<2>(std::make_integer_sequence<int, kTile>{});
constexpr auto kNarrowPairValueTiles = pair_value_tiles<1>(std::make_integer_sequence<int, kTile>{});

// As `FloatTiles`. What is shared are pairs.
struct PairTiles {
  static_assert(kLanes == kChunk && kKeys % (2 * kLanes) == 0);

  static void take_query(Scratch& s, int64_t row, int64_t head_size) {
    float* query = s.query[row];
    std::fill_n(query + head_size, 2 * kLanes, 0.0f);
    for (int64_t d = 0; d < head_size; d += 2 * kLanes)
      store_pairs(pair_scratch().query[row] + d / 2, rounded(load(query + d), load(query + d + kLanes)));
  }

  static void score(Scratch& s, int64_t row, int64_t rows, int64_t key, const float* left, const float* right, int64_t head_size,
                    const Ahead& ahead) {
    PairScratch& p = pair_scratch();
    for (int64_t d = 0; d < head_size; d += 2) {
      for (int64_t next = d * kChunk; next < (d + 2) * kChunk; next += kChunk) prefetch(ahead.left + next), prefetch(ahead.right + next);
      const auto second = [&](const float* keys) { return d + 1 < head_size ? load(keys + (d + 1) * kChunk) : vf{}; };
      store_pairs(&p.keys[d / 2][key], rounded_pairs(load(left + d * kChunk), second(left)));
      store_pairs(&p.keys[d / 2][key + kLanes], rounded_pairs(load(right + d * kChunk), second(right)));
    }
    for (int64_t count; row < rows; row += count) {
      count = std::min<int64_t>(kTile, rows - row);
      kPairScoreTiles[count - 1](s, p, row, key, (head_size + 1) / 2);
    }
  }

  static void take_weights(Scratch& s, int64_t row) {
    const float* weights = s.scores[row];
    for (int64_t j = 0; j < kKeys; j += 2 * kLanes)
      store_pairs(pair_scratch().weights[row] + j / 2, rounded(load(weights + j), load(weights + j + kLanes)));
  }

  static void take_values(const Values& values, int64_t from, int64_t to, int64_t value_size) {
    PairScratch& p = pair_scratch();
    for (int64_t chunk = from; chunk < to; ++chunk) {
      const float *first = values.of[chunk], *ahead = values.ahead[chunk];
      uint32_t* pairs = p.values + chunk * kChunk / 2 * value_size;
      for (int64_t pair = 0; pair < kChunk / 2; ++pair, first += 2 * value_size, ahead += 2 * value_size)
        for (int64_t column = 0; column < value_size; column += kLanes) {
          prefetch(ahead + column), prefetch(ahead + value_size + column);
          store_pairs(pairs + pair * value_size + column, rounded_pairs(load(first + column), load(first + value_size + column)));
        }
    }
  }

  static Span shared(const Span& seen) { return {(seen.from + 1) / 2, seen.to / 2}; }

  static void add(Scratch& s, int64_t row, int64_t count, const Span& pairs, const Values&, int64_t value_size) {
    add(s, row, count, pairs, kWhole, value_size);
  }

  static void add_first(Scratch& s, int64_t row, const Span& seen, int64_t value_size) {
    if (seen.from % 2 != 0 && !seen.empty()) add(s, row, 1, {seen.from / 2, seen.from / 2 + 1}, kSecond, value_size);
  }

  static void add_last(Scratch& s, int64_t row, const Span& seen, int64_t value_size) {
    if (seen.to % 2 != 0 && !seen.empty()) add(s, row, 1, {seen.to / 2, seen.to / 2 + 1}, kFirst, value_size);
  }

 private:
  static void add(Scratch& s, int64_t row, int64_t count, const Span& pairs, uint32_t mask, int64_t value_size) {
    if (pairs.empty()) return;
    const PairScratch& p = pair_scratch();
    int64_t column = 0;
    for (; column + kPanel <= value_size; column += kPanel)
      kPairValueTiles[count - 1](s, p, row, pairs, mask, value_size, column);
    for (; column < value_size; column += kLanes)
      kNarrowPairValueTiles[count - 1](s, p, row, pairs, mask, value_size, column);
  }
};

}  // namespace penstock
#endif
