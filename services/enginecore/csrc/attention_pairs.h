// Attention with instructions that multiply pairs of bfloat16 numbers. The KV cache is bfloat16, queries and weights are rounded to
// bfloat16, and sums are floats.
// In a chunk of the cache, keys are [head size / 2][kChunk][2], so a vector lane has two elements of one key. Values are [kChunk /
// 2][value size][2], so a lane has one element of the values of two keys. Each row adds the values of pairs of keys in order. If
// only one key of a pair is visible, the value of the other key is replaced by zero.
#pragma once

#include "pairs.h"

#if defined(PENSTOCK_PAIRS)
#include <array>
#include <cstring>
#include <utility>

#include "attention_tiles.h"

namespace penstock {

constexpr uint32_t kWhole = ~0u, kFirst = 0xFFFFu, kSecond = 0xFFFF0000u;  // bit masks of a pair's elements
constexpr int64_t kChunkPairs = kChunk / 2;

// Loads one pair of bfloat16 numbers into all lanes.
inline vu splat_pair(const float* at) {
  uint32_t pair;
  std::memcpy(&pair, at, sizeof pair);
  return pair - vu{};
}

inline void store_pairs(void* p, vu v) { *static_cast<vi_unaligned*>(p) = reinterpret_cast<vi_unaligned>(v); }

template <int kRows>
void pair_score_tile(Scratch& s, int64_t row, int64_t key, const PanelKeys<uint16_t>& keys, int64_t pairs) {
  vf sums[kRows][2];
  clear(sums);
  const float* query = s.query[row];
  for (int64_t d = 0; d < pairs; ++d, ++query) {
    prefetch(keys.ahead.left + d * 2 * kChunk);
    prefetch(keys.ahead.right + d * 2 * kChunk);
    const vu l = load_pairs(keys.left + d * 2 * kChunk), r = load_pairs(keys.right + d * 2 * kChunk);
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      const vu q = splat_pair(query + i * Scratch::kQuery);
      sums[i][0] = add_pairs(sums[i][0], l, q);
      sums[i][1] = add_pairs(sums[i][1], r, q);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
    store(&s.weights[i][key], sums[i][0]);
    store(&s.weights[i][key + kLanes], sums[i][1]);
  }
}

// output[row..][column..] += weights[weight..][pairs] x values, for kRows rows and kVectors vectors of columns.
template <int kRows, int kVectors>
void pair_value_tile(Scratch& s, int64_t row, int64_t weight, const Span& pairs, uint32_t mask, const Values<uint16_t>& values,
                     int64_t value_size, int64_t column) {
  vf sums[kRows][kVectors];
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i)
    for (int v = 0; v < kVectors; ++v) sums[i][v] = load(&s.part.output[row + i][column + v * kLanes]);
  const vu seen = mask - vu{};
  for (int64_t pair = pairs.from; pair < pairs.to;) {
    const int64_t chunk = pair / kChunkPairs, end = std::min(pairs.to, (chunk + 1) * kChunkPairs);
    const int64_t offset = 2 * (pair % kChunkPairs * value_size + column);
    const uint16_t *value = values.of[chunk] + offset, *ahead = values.ahead[chunk] + offset;
    const float* weights = s.weights[weight] + pair;
    for (; pair < end; ++pair, ++weights, value += 2 * value_size, ahead += 2 * value_size) {
      vu parts[kVectors];
      for (int v = 0; v < kVectors; ++v) {
        prefetch(ahead + v * 2 * kLanes);
        parts[v] = load_pairs(value + v * 2 * kLanes) & seen;
      }
#pragma GCC unroll 16
      for (int i = 0; i < kRows; ++i) {
        const vu by = splat_pair(weights + i * kKeys);
        for (int v = 0; v < kVectors; ++v) sums[i][v] = add_pairs(sums[i][v], parts[v], by);
      }
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i)
    for (int v = 0; v < kVectors; ++v) store(&s.part.output[row + i][column + v * kLanes], sums[i][v]);
}

using PairScoreTile = void (*)(Scratch&, int64_t, int64_t, const PanelKeys<uint16_t>&, int64_t);
using PairValueTile = void (*)(Scratch&, int64_t, int64_t, const Span&, uint32_t, const Values<uint16_t>&, int64_t, int64_t);

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

// Operations on a tile of keys, with the same functions as `FloatTiles`. The keys that are added for several rows together are
// always complete pairs.
struct PairTiles {
  using Number = uint16_t;
  static_assert(kLanes == kChunk && kKeys % (2 * kLanes) == 0);

  static void take_query(Scratch& s, int64_t row, int64_t head_size) {
    float* query = s.query[row];
    std::fill_n(query + head_size, 2 * kLanes, 0.0f);
    for (int64_t d = 0; d < head_size; d += 2 * kLanes)
      store_pairs(query + d / 2, rounded(load(query + d), load(query + d + kLanes)));
  }

  static void score(Scratch& s, int64_t row, int64_t count, int64_t key, const PanelKeys<uint16_t>& keys, int64_t head_size) {
    kPairScoreTiles[count - 1](s, row, key, keys, head_size / 2);
  }

  static vf power(vf x) { return power_of_two(kPowers3, x); }

  static vf take_weights(Scratch& s, int64_t row, const vf (&weights)[kTileVectors], vf total) {
    constexpr uint32_t kOnes = 0x3F803F80u;
    for (int v = 0; v < kTileVectors; v += 2) {
      const vu pairs = rounded(weights[v], weights[v + 1]);
      store_pairs(&s.weights[row][v / 2 * kLanes], pairs);
      total = add_pairs(total, pairs, kOnes - vu{});
    }
    return total;
  }

  static Span shared(const Span& seen) { return {(seen.from + 1) / 2, seen.to / 2}; }

  static void add(Scratch& s, int64_t row, int64_t weight, int64_t count, const Span& pairs, const Values<uint16_t>& values,
                  int64_t value_size) {
    add(s, row, weight, count, pairs, kWhole, values, value_size);
  }

  static void add_first(Scratch& s, int64_t row, int64_t weight, const Span& seen, const Values<uint16_t>& values,
                        int64_t value_size) {
    if (seen.from % 2 != 0 && !seen.empty()) add(s, row, weight, 1, {seen.from / 2, seen.from / 2 + 1}, kSecond, values, value_size);
  }

  static void add_last(Scratch& s, int64_t row, int64_t weight, const Span& seen, const Values<uint16_t>& values,
                        int64_t value_size) {
    if (seen.to % 2 != 0 && !seen.empty()) add(s, row, weight, 1, {seen.to / 2, seen.to / 2 + 1}, kFirst, values, value_size);
  }

 private:
  static void add(Scratch& s, int64_t row, int64_t weight, int64_t count, const Span& pairs, uint32_t mask,
                  const Values<uint16_t>& values, int64_t value_size) {
    if (pairs.empty()) return;
    int64_t column = 0;
    for (; column + kPanel <= value_size; column += kPanel)
      kPairValueTiles[count - 1](s, row, weight, pairs, mask, values, value_size, column);
    for (; column < value_size; column += kLanes)
      kNarrowPairValueTiles[count - 1](s, row, weight, pairs, mask, values, value_size, column);
  }
};

// Rounds `left` elements to bfloat16, but at most one vector. Fills the remaining elements of the vector with zeros.
inline vu rounded_numbers(const float* from, int64_t left) {
  if (left >= 2 * kLanes) return rounded(load(from), load(from + kLanes));
  float numbers[2 * kLanes] = {};
  std::memcpy(numbers, from, left * sizeof(float));
  return rounded(load(numbers), load(numbers + kLanes));
}

// Writes the keys and values of kTokens tokens, starting at `token`, into a bfloat16 KV cache. The slots of the tokens are
// consecutive in one chunk. The elements of the values of two tokens form pairs.
template <int kTokens>
void write_pairs(const Write& w, int64_t token) {
  const int64_t slot = w.slots[token], chunk = slot / kChunk, lane = slot % kChunk;
  const int64_t size = w.num_kv_heads * w.head_size;
  uint16_t* keys = static_cast<uint16_t*>(w.cache.keys) + chunk * kChunk * w.cache.key_stride + 2 * lane;
  uint32_t pairs[kTokens][kLanes];
  for (int64_t i = 0; i < size; i += 2 * kLanes) {
    for (int t = 0; t < kTokens; ++t) store_pairs(pairs[t], rounded_numbers(w.keys + (token + t) * w.key_stride + i, size - i));
    for (int64_t j = 0; j < std::min<int64_t>(kLanes, (size - i) / 2); ++j) {
      uint32_t together[kTokens];
      for (int t = 0; t < kTokens; ++t) together[t] = pairs[t][j];
      std::memcpy(keys + (i / 2 + j) * 2 * kChunk, together, sizeof together);
    }
  }
  for (int64_t head = 0; head < w.num_kv_heads; ++head) {
    const float* from = w.values + token * w.value_stride + head * w.value_size;
    uint16_t* to = static_cast<uint16_t*>(w.cache.values) + chunk * kChunk * w.cache.value_stride +
                   (head * kChunk + lane / 2 * 2) * w.value_size;
    for (int64_t i = 0; i < w.value_size; i += kLanes) {
      const vf first = load(from + i), second = kTokens == 2 ? load(from + w.value_stride + i) : vf{};
      uint16_t numbers[2][kLanes];
      store_pairs(numbers, rounded(first, second));
      if constexpr (kTokens == 2)
        for (int64_t j = 0; j < kLanes; ++j) to[2 * (i + j)] = numbers[0][j], to[2 * (i + j) + 1] = numbers[1][j];
      else
        for (int64_t j = 0; j < kLanes; ++j) to[2 * (i + j) + lane % 2] = numbers[0][j];
    }
  }
}

// Writes the keys and values of the tokens `first` to `end - 1` into a bfloat16 KV cache.
inline void write_pairs(const Write& w, int64_t first, int64_t end) {
  for (int64_t token = first; token < end;) {
    const bool two = w.slots[token] % 2 == 0 && token + 1 < end && w.slots[token + 1] == w.slots[token] + 1;
    if (two) write_pairs<2>(w, token);
    else write_pairs<1>(w, token);
    token += two ? 2 : 1;
  }
}

}  // namespace penstock
#endif
