// Attention over a cache of latents (multi-head latent attention, DeepSeek-V2, 2024).
// A slot of the cache has one row of `head_size` elements, the latent and the rotated part of the key. All heads share this row: it
// is the key, and its first `value_size` elements are the value. Rows are stored element by element, so a score is a sum over the
// lanes of a vector. The sums of kLanes scores are added up together. Blocks may have any size.
// Tasks, segments of keys, softmax and masks are as in attention.h. So the result of a query depends neither on other queries nor
// on the division of its prompt into steps.
#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <utility>

#include "attention.h"
#include "attention_pairs.h"
#include "attention_tiles.h"
#include "attention_weights.h"
#include "buffer.h"
#include "model.h"
#include "vec.h"

namespace penstock {

constexpr int64_t kMaxLatentWidth = 640;  // largest number of elements of a row of the cache
constexpr int kScoreKeys = 4;             // number of keys whose scores are computed together
constexpr int kScoreRows = kLanes / kScoreKeys;

// Working memory of a task. A row of `latent_query` has floats, or bfloat16 pairs in its first half.
struct LatentScratch : Scratch {
  alignas(64) float latent_query[kTaskRows][kMaxLatentWidth + 16];
};

inline LatentScratch& latent_scratch() {
  static thread_local const std::unique_ptr<LatentScratch> scratch(new LatentScratch);
  return *scratch;
}

// Rows of the cache with the keys of a tile, and for prefetching, rows of the keys after the tile.
template <class Number>
struct LatentKeys {
  const Number* of[kKeys + kScoreKeys];
};

// Returns a vector of which the lanes whose index has the bit `kAway` are the sums of two lanes of `b`, and the other lanes are
// sums of two lanes of `a`. The two lanes differ in this bit of their index.
template <int kAway, int... kLane>
inline vf folded(vf a, vf b, std::integer_sequence<int, kLane...>) {
  return __builtin_shufflevector(a, b, ((kLane & kAway) ? kLane + kLanes : kLane)...) +
         __builtin_shufflevector(a, b, ((kLane & kAway) ? (kLane ^ kAway) + kLanes : (kLane ^ kAway))...);
}

// Returns a vector whose lane i is the sum of all lanes of `v[i]`.
template <int kAway = 1>
inline vf sums_of(const vf* v) {
  constexpr auto kAll = std::make_integer_sequence<int, kLanes>{};
  if constexpr (kAway == kLanes / 2) return folded<kAway>(v[0], v[1], kAll);
  else {
    vf halves[kLanes / kAway / 2];
    for (int i = 0; i < kLanes / kAway / 2; ++i) halves[i] = folded<kAway>(v[2 * i], v[2 * i + 1], kAll);
    return sums_of<2 * kAway>(halves);
  }
}

// Writes the scores of kScoreRows queries for kScoreKeys keys, which are in the lanes of `sums`, to the scratch memory. Leaves out
// queries for which the scratch memory has no row.
inline void put_scores(Scratch& s, const vf& sums, int64_t row, int64_t key) {
  float scores[kLanes];
  store(scores, sums);
  for (int i = 0; i < kScoreRows && row + i < kTile; ++i)
    std::memcpy(&s.weights[row + i][key], scores + i * kScoreKeys, kScoreKeys * sizeof(float));
}

// Operations on a tile of rows of floats, with functions as in `FloatTiles`.
struct LatentFloats : FloatTiles {
  static void take_query(LatentScratch& s, int64_t row, const float* query, int64_t width) {
    std::memcpy(s.latent_query[row], query, width * sizeof(float));
  }

  // Computes kLanes scores: those of the queries `queries` for four keys.
  static vf scores(const float* const* queries, const float* const* keys, int64_t width) {
    vf sums[kScoreRows * kScoreKeys] = {};
    for (int64_t d = 0; d < width; d += kLanes) {
      vf k[kScoreKeys];
      for (int j = 0; j < kScoreKeys; ++j) {
        prefetch(keys[j + kScoreKeys] + d);
        k[j] = load(keys[j] + d);
      }
#pragma GCC unroll 16
      for (int i = 0; i < kScoreRows; ++i) {
        const vf q = load(queries[i] + d);
#pragma GCC unroll 16
        for (int j = 0; j < kScoreKeys; ++j) sums[i * kScoreKeys + j] += q * k[j];
      }
    }
    return sums_of(sums);
  }

  template <int kRows, int kVectors>
  static void value_tile(Scratch& s, int64_t row, int64_t weight, const Span& span, uint32_t, const LatentKeys<float>& keys,
                         int64_t column) {
    vf sums[kRows][kVectors];
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i)
      for (int v = 0; v < kVectors; ++v) sums[i][v] = load(&s.part.output[row + i][column + v * kLanes]);
    for (int64_t key = span.from; key < span.to; ++key) {
      vf parts[kVectors];
      for (int v = 0; v < kVectors; ++v) parts[v] = load(keys.of[key] + column + v * kLanes);
#pragma GCC unroll 16
      for (int i = 0; i < kRows; ++i) {
        const vf by = splat(s.weights[weight + i][key]);
        for (int v = 0; v < kVectors; ++v) sums[i][v] += by * parts[v];
      }
    }
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i)
      for (int v = 0; v < kVectors; ++v) store(&s.part.output[row + i][column + v * kLanes], sums[i][v]);
  }
};

#if defined(PENSTOCK_PAIRS)
// Operations on a tile of rows of bfloat16 numbers, with functions as in `PairTiles`. Queries and weights are rounded to bfloat16.
struct LatentPairs : PairTiles {
  static void take_query(LatentScratch& s, int64_t row, const float* query, int64_t width) {
    for (int64_t d = 0; d < width; d += 2 * kLanes)
      store_pairs(s.latent_query[row] + d / 2, rounded(load(query + d), load(query + d + kLanes)));
  }

  static vf scores(const float* const* queries, const uint16_t* const* keys, int64_t width) {
    vf sums[kScoreRows * kScoreKeys] = {};
    for (int64_t d = 0; d < width; d += 2 * kLanes) {
      vu k[kScoreKeys];
      for (int j = 0; j < kScoreKeys; ++j) {
        prefetch(keys[j + kScoreKeys] + d);
        k[j] = load_pairs(keys[j] + d);
      }
#pragma GCC unroll 16
      for (int i = 0; i < kScoreRows; ++i) {
        const vu q = load_pairs(reinterpret_cast<const uint16_t*>(queries[i]) + d);
#pragma GCC unroll 16
        for (int j = 0; j < kScoreKeys; ++j) sums[i * kScoreKeys + j] = add_pairs(sums[i * kScoreKeys + j], k[j], q);
      }
    }
    return sums_of(sums);
  }

  // Returns the elements of two rows as pairs: one lane has one element of each row.
  static vu zipped(const uint16_t* first, const uint16_t* second) {
    const auto wide = [](const uint16_t* from) {
      return __builtin_convertvector(*reinterpret_cast<const vh_unaligned*>(from), vu);
    };
    return wide(first) | wide(second) << 16;
  }

  template <int kRows, int kVectors>
  static void value_tile(Scratch& s, int64_t row, int64_t weight, const Span& pairs, uint32_t mask, const LatentKeys<uint16_t>& keys,
                         int64_t column) {
    vf sums[kRows][kVectors];
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i)
      for (int v = 0; v < kVectors; ++v) sums[i][v] = load(&s.part.output[row + i][column + v * kLanes]);
    const vu seen = mask - vu{};
    for (int64_t pair = pairs.from; pair < pairs.to; ++pair) {
      const uint16_t *first = keys.of[2 * pair] + column, *second = keys.of[2 * pair + 1] + column;
      vu parts[kVectors];
      for (int v = 0; v < kVectors; ++v) parts[v] = zipped(first + v * kLanes, second + v * kLanes) & seen;
#pragma GCC unroll 16
      for (int i = 0; i < kRows; ++i) {
        const vu by = splat_pair(s.weights[weight + i] + pair);
        for (int v = 0; v < kVectors; ++v) sums[i][v] = add_pairs(sums[i][v], parts[v], by);
      }
    }
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i)
      for (int v = 0; v < kVectors; ++v) store(&s.part.output[row + i][column + v * kLanes], sums[i][v]);
  }
};
#endif

template <class Number>
using LatentValueTile = void (*)(Scratch&, int64_t, int64_t, const Span&, uint32_t, const LatentKeys<Number>&, int64_t);

template <class Tiles, int kVectors, int... kRows>
constexpr std::array<LatentValueTile<typename Tiles::Number>, sizeof...(kRows)> latent_value_tiles(
    std::integer_sequence<int, kRows...>) {
  return {&Tiles::template value_tile<kRows + 1, kVectors>...};
}
template <class Tiles, int kVectors>
constexpr auto kLatentValueTiles = latent_value_tiles<Tiles, kVectors>(std::make_integer_sequence<int, kTile>{});

// Adds the weighted values of the keys `span` for `count` rows of a task, starting at `row`. For bfloat16, `span` has pairs of keys,
// and `mask` selects the elements of a pair.
template <class Tiles>
void add_latents(Scratch& s, int64_t row, int64_t weight, int64_t count, const Span& span, uint32_t mask,
                 const LatentKeys<typename Tiles::Number>& keys, int64_t value_size) {
  if (span.empty()) return;
  int64_t column = 0;
  for (; column + kPanel <= value_size; column += kPanel)
    kLatentValueTiles<Tiles, 2>[count - 1](s, row, weight, span, mask, keys, column);
  for (; column < value_size; column += kLanes)
    kLatentValueTiles<Tiles, 1>[count - 1](s, row, weight, span, mask, keys, column);
}

// Adds the values of the keys that are visible to `count` rows. The rows belong to one query, or all keys of the tile are visible.
template <class Tiles>
void add_visible(Scratch& s, int64_t row, int64_t weight, int64_t count, const Span& seen,
                 const LatentKeys<typename Tiles::Number>& keys, int64_t value_size) {
  if (seen.empty()) return;
  constexpr uint32_t kEach[] = {0xFFFF0000u, 0xFFFFu, ~0u};  // elements of a pair: the second, the first, both
  const Span shared = Tiles::shared(seen);
  constexpr bool kPairs = sizeof(typename Tiles::Number) == 2;
  const auto add = [&](const Span& span, uint32_t mask) { add_latents<Tiles>(s, row, weight, count, span, mask, keys, value_size); };
  if (kPairs && seen.from % 2 != 0) add({seen.from / 2, seen.from / 2 + 1}, kEach[0]);
  add(shared, kEach[2]);
  if (kPairs && seen.to % 2 != 0) add({seen.to / 2, seen.to / 2 + 1}, kEach[1]);
}

// Computes, for each row, the sums over the keys of a segment, and writes the sums to `s.part`, as `attend_segment` does.
template <class Tiles, class AnyRows>
void attend_latent_segment(const Attention& a, const AttentionTask& task, const AnyRows& rows, int64_t segment, LatentScratch& s) {
  using Number = typename Tiles::Number;
  for (int64_t row = 0; row < rows.count; ++row) {
    std::fill_n(s.part.output[row], a.value_size, 0.0f);
    s.part.peak[row] = -INFINITY;
    s.part.total[row] = vf{};
  }
  const int64_t begin = std::max(rows.begin(), segment * kSegment), end = std::min(rows.end(), (segment + 1) * kSegment);
  // Positions are clamped to begin..end. Keys outside this range are masked, so any row may be read for these keys.
  const auto key_row = [&](int64_t key) {
    const int64_t at = std::clamp(key, begin, end - 1);
    const int64_t block = a.group.block_table[task.request * a.group.table_stride + at / a.group.block_size];
    return static_cast<const Number*>(a.cache.keys) + (block * a.group.block_size + at % a.group.block_size) * a.cache.key_stride;
  };
  LatentKeys<Number> keys;
  for (int64_t base = begin / kKeys * kKeys; base < end; base += kKeys) {
    const int64_t count_keys = std::min(kKeys, end - base);
    const auto seen = [&](int64_t row) { return rows.seen(row, base, base + count_keys); };
    for (int64_t key = 0; key < kKeys + kScoreKeys; ++key) keys.of[key] = key_row(base + key);
    const int64_t first_key = std::max<int64_t>(0, begin - base) / kScoreKeys * kScoreKeys;
    for (int64_t row = rows.first_seeing(base), count; row < rows.count; row += count) {
      count = std::min<int64_t>(kTile, rows.count - row);
      for (int64_t key = first_key; key < count_keys; key += kScoreKeys)
        for (int64_t i = 0; i < count; i += kScoreRows) {
          // The last rows of a tile that is not full compute the scores of its last query again.
          const float* queries[kScoreRows];
          for (int64_t j = 0; j < kScoreRows; ++j) queries[j] = s.latent_query[row + std::min(i + j, count - 1)];
          put_scores(s, Tiles::scores(queries, keys.of + key, a.head_size), i, key);
        }
      for (int64_t i = row; i < row + count; ++i)
        if (const Span span = seen(i); !span.empty()) weigh<Tiles>(s, i, i - row, span, a.params, a.value_size);
      if (seen(row + count - 1).from == 0 && seen(row).to == kKeys) {  // the usual case: all keys are visible to all rows
        add_visible<Tiles>(s, row, 0, count, {0, kKeys}, keys, a.value_size);
        continue;
      }
      for (int64_t i = row, some; i < row + count; i += some) {  // the heads of one query
        some = std::min(row + count, (i / rows.heads + 1) * rows.heads) - i;
        add_visible<Tiles>(s, i, i - row, some, seen(i), keys, a.value_size);
      }
    }
  }
}

template <class Tiles, class AnyRows>
void attend_latents_by(const Attention& a, const AttentionTask& task, const AnyRows& rows, const Buffer& parts) {
  LatentScratch& s = latent_scratch();
  const Span segments = rows.segments();
  if (task.segment != kAllSegments && (task.segment < segments.from || task.segment >= segments.to)) return;
  for (int64_t row = 0; row < rows.count; ++row) Tiles::take_query(s, row, rows.query(a, row), a.head_size);
  if (task.segment != kAllSegments) {
    attend_latent_segment<Tiles>(a, task, rows, task.segment, s);
    for (int64_t row = 0; row < rows.count; ++row) store_part(a, s.part, row, parts.row(task.part + row));
    return;
  }
  const bool alone = a.params.sinks == nullptr && segments.to - segments.from == 1;
  begin_whole(a, rows, s.whole);
  for (int64_t segment = segments.from; segment < segments.to; ++segment) {
    attend_latent_segment<Tiles>(a, task, rows, segment, s);
    for (int64_t row = 0; row < rows.count && !alone; ++row) add_segment(a, rows, segment, row, s);
  }
  put_out(a, rows, alone ? s.part : s.whole);
}

// Computes a task over a cache of latents, as `attend` does over keys and values. `merge_segments` adds the sums of segments.
inline void attend_latents(const Attention& a, const AttentionTask& task, const Buffer& parts) {
  of_rows(a, task, [&](const auto& rows) {
#if defined(PENSTOCK_PAIRS)
    if (a.cache.pairs != 0) return attend_latents_by<LatentPairs>(a, task, rows, parts);
#endif
    attend_latents_by<LatentFloats>(a, task, rows, parts);
  });
}

}  // namespace penstock
