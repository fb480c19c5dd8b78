// Matrix products of input rows with weights that are packed in panels.
// A panel has the weights of kPanel output features (two SIMD vectors) for all k inputs, [k][kPanel], so that a product reads the
// panel sequentially. For bfloat16, a panel is [k / 2][kPanel][2], and for 8-bit integers [k / 4][kPanel][4], padded with zeros.
// The two or four elements of an output feature that are stored together then fill one vector lane. A register tile, whose sums
// stay in registers, multiplies up to kTile rows by a panel. Each output is summed over k in the same order in every tile, so the
// result of a row does not depend on other rows. If bfloat16 represents all weights exactly, the weights are stored as bfloat16,
// which halves the memory to read. If the weights are 8-bit integers times a factor per output feature, the integers are stored,
// which needs a quarter of the memory. Sums are always floats.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "lora.h"
#include "model.h"
#include "pairs.h"
#include "parts.h"
#include "vec.h"

#if defined(PENSTOCK_AMX)
#include "amx.h"
#endif

namespace penstock {

enum class Epilogue { kStore, kAdd, kSilu, kGelu, kClamped };

// Returns the epilogue that computes a gate with the activation kSiluGate, kGeluGate or kClampedGate.
inline Epilogue gate_epilogue(int64_t activation) {
  return activation == kClampedGate ? Epilogue::kClamped : activation == kGeluGate ? Epilogue::kGelu : Epilogue::kSilu;
}

// Where a product writes its sums, and the operation on the sums (epilogue). kStore: out = sum + bias. kAdd: out += sum + bias.
// kSilu: each panel has a vector of gate features and a vector of up features, and out = silu(gate) * up. kGelu: the same with
// gelu. kClamped: the same with the gate that has the parameters `gate`. If a gated product has biases, they are added first. If
// `rounded` is true, the output is stored as bfloat16, in the input format of the next product. `low_rank` has the LoRA
// adapters of the product, or is null.
struct Output {
  float* out;
  int64_t stride;
  const float* bias;
  int64_t n;
  Epilogue epilogue;
  const float* scales = nullptr;
  bool rounded = false;
  const LowRank* low_rank = nullptr;
  Gate gate{};
};

constexpr int64_t kPrefetch = 4096;  // distance in bytes from the weights that are multiplied to the weights that are prefetched

inline int64_t panels(int64_t n) { return (n + kPanel - 1) / kPanel; }

// Number of consecutive inputs whose weights for one output feature are stored together in a lane.
template <class Weight>
constexpr int64_t kTogether = sizeof(float) / sizeof(Weight);

// The number of inputs of a panel is padded to a multiple of this number.
template <class Weight>
constexpr int64_t kFilledTo = sizeof(Weight) == 2 ? std::max(kBlockInputs, kTogether<Weight>) : kTogether<Weight>;

// Returns the number of elements of a panel.
template <class Weight>
int64_t panel_size(int64_t k) {
  return kPanel * ((k + kFilledTo<Weight> - 1) / kFilledTo<Weight> * kFilledTo<Weight>);
}

// Weights of a panel for the inputs that are stored together, as floats: the left and the right vector of weights for each of these
// inputs.
template <class Weight>
struct Weights {
  explicit Weights(const Weight* from) {
    if constexpr (sizeof(Weight) == 4) {
      of[0][0] = load(from), of[0][1] = load(from + kLanes);
    } else if constexpr (sizeof(Weight) == 2) {
      const vu left = load_pairs(from), right = load_pairs(from + 2 * kLanes);
      of[0][0] = reinterpret_cast<vf>(left << 16), of[0][1] = reinterpret_cast<vf>(right << 16);
      of[1][0] = cut(reinterpret_cast<vf>(left)), of[1][1] = cut(reinterpret_cast<vf>(right));
    } else {
      const vi left = load_bytes(from), right = load_bytes(from + 4 * kLanes);
      for (int i = 0; i < 4; ++i) of[i][0] = byte(left, i), of[i][1] = byte(right, i);
    }
  }
  vf of[kTogether<Weight>][2];
};

inline void keep_weight(float x, float* to) { *to = x; }

inline void keep_weight(float x, uint16_t* to) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  *to = static_cast<uint16_t>(bits >> 16);
}

inline void keep_weight(float x, int8_t* to) { *to = static_cast<int8_t>(x); }

template <class Weight>
void pack_panel(const float* weight, int64_t n, int64_t k, Weight* packed, int64_t panel) {
  constexpr int64_t kStep = kTogether<Weight>;
  const int64_t size = panel_size<Weight>(k);
  Weight* to = packed + panel * size;
  for (int64_t j = 0; j < kPanel; ++j) {
    const int64_t row = panel * kPanel + j;
    for (int64_t i = 0; i < size / kPanel; ++i)
      keep_weight(row < n && i < k ? weight[row * k + i] : 0.0f, &to[(i / kStep * kPanel + j) * kStep + i % kStep]);
  }
}

// Packs a panel as two bfloat16 parts (see kHalved). In each block of inputs, the remainders precede the rounded weights.
inline void pack_halves(const float* weight, int64_t n, int64_t k, uint16_t* packed, int64_t panel) {
  constexpr int64_t kBlock = kBlockInputs * kPanel;
  const int64_t size = panel_size<uint16_t>(k);
  uint16_t* to = packed + panel * size * 2;
  for (int64_t j = 0; j < kPanel; ++j) {
    const int64_t row = panel * kPanel + j;
    for (int64_t i = 0; i < size / kPanel; ++i) {
      const int64_t in_block = (i % kBlockInputs / 2 * kPanel + j) * 2 + i % 2;
      uint16_t* at = to + i / kBlockInputs * 2 * kBlock + in_block;
      vh low, high;
      split(splat(row < n && i < k ? weight[row * k + i] : 0.0f), low, high);
      at[0] = low[0], at[kBlock] = high[0];
    }
  }
}

inline float kept_weight(float x) { return x; }

inline float kept_weight(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float weight;
  std::memcpy(&weight, &bits, sizeof weight);
  return weight;
}

inline float kept_weight(int8_t x) { return x; }

template <class Weight>
void unpack_weights(const void* packed, int64_t k, int64_t row, float* to) {
  constexpr int64_t kStep = kTogether<Weight>;
  const Weight* from = static_cast<const Weight*>(packed) + row / kPanel * panel_size<Weight>(k) + row % kPanel * kStep;
  for (int64_t i = 0; i < k; i += kStep, from += kPanel * kStep) {
    __builtin_prefetch(from + 16 * kPanel * kStep);
    for (int64_t j = 0; j < kStep && i + j < k; ++j) to[i + j] = kept_weight(from[j]);
  }
}

// Writes the weights of the output feature `row` to `to` [k].
inline void unpack_row(const Linear& linear, int64_t row, float* to) {
  if (linear.kind == kFloat32) return unpack_weights<float>(linear.packed, linear.k, row, to);
  if (linear.kind == kBfloat16) return unpack_weights<uint16_t>(linear.packed, linear.k, row, to);
  unpack_weights<int8_t>(linear.packed, linear.k, row, to);
  for (int64_t i = 0; i < linear.k; ++i) to[i] *= linear.scales[row];
}

// Returns the result of a gate. NaN stays NaN.
inline vf gated(const Output& output, vf gate, vf up) {
  if (output.epilogue != Epilogue::kClamped) return (output.epilogue == Epilogue::kGelu ? gelu(gate) : silu(gate)) * up;
  const vf limit = splat(output.gate.limit), alpha = splat(output.gate.alpha);
  gate = gate > limit ? limit : gate;
  up = up > limit ? limit : up < -limit ? -limit : up;
  return (up + splat(1.0f)) * (gate / (splat(1.0f) + exponential(-(alpha * gate))));
}

// Applies a gated epilogue to the sums of a panel, and writes the output. This is a separate function, so that `finish` is small
// enough to be inlined in each tile.
__attribute__((noinline)) inline void finish_gated(const vf (*sums)[2], int rows, const Output& output, int64_t row, int64_t panel) {
  vf biases[2] = {};
  if (output.bias != nullptr) biases[0] = load(output.bias + panel * kPanel), biases[1] = load(output.bias + panel * kPanel + kLanes);
  for (int i = 0; i < rows; ++i) {
    const vf y = gated(output, sums[i][0] + biases[0], sums[i][1] + biases[1]);
    float* to = output.out + (row + i) * output.stride;
    if (vh half; output.rounded) split(y, half), store(reinterpret_cast<uint16_t*>(to) + panel * kLanes, half);
    else store(to + panel * kLanes, y);
  }
}

template <int kRows>
__attribute__((always_inline)) inline void finish(vf (&sums)[kRows][2], const Output& output, int64_t row, int64_t panel) {
  const int64_t column = panel * kPanel;
  if (output.scales != nullptr) {
    const vf left = load(output.scales + column), right = load(output.scales + column + kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) sums[i][0] *= left, sums[i][1] *= right;
  }
  if (output.epilogue != Epilogue::kStore && output.epilogue != Epilogue::kAdd) {
    vf gated[kRows][2];  // a copy, so that `sums` can stay in registers with other epilogues
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) gated[i][0] = sums[i][0], gated[i][1] = sums[i][1];
    return finish_gated(gated, kRows, output, row, panel);
  }
  if (column + kPanel <= output.n) {
    if (output.bias != nullptr) {
      const vf left = load(output.bias + column), right = load(output.bias + column + kLanes);
#pragma GCC unroll 16
      for (int i = 0; i < kRows; ++i) sums[i][0] += left, sums[i][1] += right;
    }
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      float* to = output.out + (row + i) * output.stride + column;
      if (output.epilogue == Epilogue::kAdd) sums[i][0] += load(to), sums[i][1] += load(to + kLanes);
      store(to, sums[i][0]);
      store(to + kLanes, sums[i][1]);
    }
    return;
  }
  float last[kRows][kPanel];  // a copy for the same reason
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) store(last[i], sums[i][0]), store(last[i] + kLanes, sums[i][1]);
  for (int i = 0; i < kRows; ++i) {
    float* to = output.out + (row + i) * output.stride + column;
    for (int64_t j = 0; j < output.n - column; ++j) {
      const float value = last[i][j] + (output.bias != nullptr ? output.bias[column + j] : 0.0f);
      to[j] = output.epilogue == Epilogue::kAdd ? to[j] + value : value;
    }
  }
}

// Applies the epilogue to rows, some of which may have LoRA adapters. The sums of these rows are in memory, not in registers.
template <int kRows>
__attribute__((noinline)) void finish_adapted(vf (&sums)[kRows][2], const Output& output, int64_t row, int64_t panel) {
  float* first = reinterpret_cast<float*>(sums);
  if (output.scales == nullptr) {
    output.low_rank->add(first, row, row + kRows, panel);
    return finish<kRows>(sums, output, row, panel);
  }
  const vf left = load(output.scales + panel * kPanel), right = load(output.scales + panel * kPanel + kLanes);
  for (int i = 0; i < kRows; ++i) sums[i][0] *= left, sums[i][1] *= right;
  output.low_rank->add(first, row, row + kRows, panel);
  Output scaled = output;
  scaled.scales = nullptr;
  finish<kRows>(sums, scaled, row, panel);
}

template <bool kAdapted, int kRows>
__attribute__((always_inline)) inline void finish_tile(vf (&sums)[kRows][2], const Output& output, int64_t row, int64_t panel) {
  if constexpr (kAdapted) {
    vf copy[kRows][2];
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) copy[i][0] = sums[i][0], copy[i][1] = sums[i][1];
    finish_adapted<kRows>(copy, output, row, panel);
  } else {
    finish<kRows>(sums, output, row, panel);
  }
}

// Multiplies kRows rows of `a`, starting at `row`, by one panel. If `kAdapted` is true, some rows may have LoRA adapters, whose
// memory is prefetched.
template <class Weight, bool kAdapted, int kRows>
void tile(const float* a, int64_t stride, const void* packed, int64_t k, const Output& output, int64_t row, int64_t panel) {
  constexpr int64_t kAhead = kPrefetch / sizeof(Weight), kStep = kTogether<Weight>;
  vf sums[kRows][2];
  clear(sums);
  const float* rows[kRows];
  for (int i = 0; i < kRows; ++i) rows[i] = a + (row + i) * stride;
  const Weight* b = static_cast<const Weight*>(packed) + panel * panel_size<Weight>(k);
  const auto add = [&](const Weights<Weight>& weights, int64_t j, int64_t count) {
    for (int64_t t = 0; t < count; ++t) {
#pragma GCC unroll 16
      for (int i = 0; i < kRows; ++i) {
        const vf x = splat(rows[i][j + t]);
        sums[i][0] += x * weights.of[t][0];
        sums[i][1] += x * weights.of[t][1];
      }
    }
  };
  int64_t j = 0;
  if constexpr (kAdapted) {
    constexpr int64_t kSome = 16 * kStep;  // number of inputs per outer iteration; the inner loop has no register for a counter
    Pieces<kRows> pieces(*output.low_rank, row, panel);
    while (j + kStep <= k) {
      pieces.ask(kSome);
      for (const int64_t until = std::min(k, j + kSome); j + kStep <= until; j += kStep, b += kStep * kPanel) {
        __builtin_prefetch(b + kAhead);
        if constexpr (kStep * kPanel * sizeof(Weight) > 64) __builtin_prefetch(b + kAhead + 64 / sizeof(Weight));
        add(Weights<Weight>(b), j, kStep);
      }
    }
  } else {
    for (; j + kStep <= k; j += kStep, b += kStep * kPanel) {
      __builtin_prefetch(b + kAhead);
      if constexpr (kStep * kPanel * sizeof(Weight) > 64) __builtin_prefetch(b + kAhead + 64 / sizeof(Weight));
      add(Weights<Weight>(b), j, kStep);
    }
  }
  if (j < k) add(Weights<Weight>(b), j, k - j);
  finish_tile<kAdapted>(sums, output, row, panel);
}

#if defined(PENSTOCK_AVX512_BF16)
// Multiplies rows by one panel like `tile`, for rows in the format with one bfloat16 part (see parts.h).
template <bool kAdapted, int kRows>
void pair_tile(const float* a, int64_t stride, const void* packed, int64_t k, const Output& output, int64_t row, int64_t panel) {
  constexpr int64_t kAhead = kPrefetch / sizeof(uint16_t);
  vf sums[kRows][2];
  clear(sums);
  const uint32_t* rows[kRows];  // input rows as pairs of bfloat16 numbers
  for (int i = 0; i < kRows; ++i) rows[i] = reinterpret_cast<const uint32_t*>(a + (row + i) * stride);
  const uint16_t* b = static_cast<const uint16_t*>(packed) + panel * panel_size<uint16_t>(k);
  for (int64_t j = 0; j < whole_blocks(k) / 2; ++j, b += 2 * kPanel) {
    __builtin_prefetch(b + kAhead);
    __builtin_prefetch(b + kAhead + kPanel);
    const vu left = load_pairs(b), right = load_pairs(b + kPanel);
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      const vu x = rows[i][j] - vu{};
      sums[i][0] = add_pairs(sums[i][0], left, x);
      sums[i][1] = add_pairs(sums[i][1], right, x);
    }
  }
  finish_tile<kAdapted>(sums, output, row, panel);
}
#endif

// Number of rows of the largest register tile, for weights of the dtype `kind`. Sixteen registers are too few for the bfloat16
// weights of two inputs and the sums of more than four rows.
constexpr int64_t most_rows(int64_t kind) { return kind == kBfloat16 && kTile < 8 ? 4 : kTile; }

using Tile = void (*)(const float*, int64_t, const void*, int64_t, const Output&, int64_t, int64_t);

template <class Weight, bool kAdapted, int... kRows>
constexpr std::array<Tile, sizeof...(kRows)> tiles(std::integer_sequence<int, kRows...>) {
  return {&tile<Weight, kAdapted, kRows + 1>...};
}
template <bool kAdapted>
constexpr auto kTilesOf = std::array{tiles<float, kAdapted>(std::make_integer_sequence<int, kTile>{}),
                                     tiles<uint16_t, kAdapted>(std::make_integer_sequence<int, kTile>{}),
                                     tiles<int8_t, kAdapted>(std::make_integer_sequence<int, kTile>{})};
// Tile functions. The indices are whether rows may have adapters, the dtype of the weights, and the number of rows minus one.
constexpr auto kTiles = std::array{kTilesOf<false>, kTilesOf<true>};

#if defined(PENSTOCK_AVX512_BF16)
template <bool kAdapted, int... kRows>
constexpr std::array<Tile, sizeof...(kRows)> pair_tiles(std::integer_sequence<int, kRows...>) {
  return {&pair_tile<kAdapted, kRows + 1>...};
}
constexpr auto kPairTiles = std::array{pair_tiles<false>(std::make_integer_sequence<int, kTile>{}),
                                       pair_tiles<true>(std::make_integer_sequence<int, kTile>{})};
#endif

// Division of a product with `rows` rows and `n` output features into tasks of at most kBlockRows rows and `group` panels.
struct Blocks {
  Blocks(int64_t rows, int64_t n)
      : rows(rows), group(rows > kTile ? 2 : 1), groups((panels(n) + group - 1) / group), blocks((rows + kBlockRows - 1) / kBlockRows) {}
  int64_t tasks() const { return groups * blocks; }

  // Part of a product that one task computes: panels `first_panel` to `last_panel - 1`, and rows `start` to `end - 1`.
  struct Task {
    int64_t first_panel, last_panel, start, end;
  };
  Task of(int64_t task, int64_t n) const {
    const int64_t first = task / blocks * group, block = task % blocks;
    return {first, std::min(first + group, panels(n)), rows * block / blocks, rows * (block + 1) / blocks};
  }

  static constexpr int64_t kBlockRows = 8 * kTile;
  int64_t rows, group, groups, blocks;
};

// Runs the tasks of a matrix product. `a` has input rows in the format of `put_row` (see parts.h), with a stride of `stride`
// floats.
class Product {
 public:
  Product(const float* a, int64_t stride, const Linear& linear, const Output& output, const Blocks& cut)
      : a_(a), stride_(stride), linear_(linear), output_(output), cut_(cut) {
    output_.scales = linear.scales;
  }

  void operator()(int64_t task) const {
    const auto [first_panel, last_panel, start, end] = cut_.of(task, linear_.n);
#if defined(PENSTOCK_AMX) || defined(PENSTOCK_AVX512_BF16)
    if (splits(linear_)) return multiply_parts(first_panel, last_panel, start, end);
#endif
    const int64_t most = most_rows(linear_.kind), count = (end - start + most - 1) / most;  // number of tiles
    const bool widen = linear_.kind == kInt8 && count > 1;
    if (widen) widen_integers(first_panel, last_panel);
    const int64_t offset = first_panel * kPanel * linear_.k;  // offset in the memory of panels that are converted to floats
    const void* packed = widen ? wide_panels().data() - offset : linear_.packed;
    for (int64_t t = 0; t < count; ++t) {
      const int64_t from = start + (end - start) * t / count, to = start + (end - start) * (t + 1) / count;
      const bool adapted = has_adapters(from, to);
      for (int64_t panel = first_panel; panel < last_panel; ++panel)
        kTiles[adapted][widen ? kFloat32 : linear_.kind][to - from - 1](a_, stride_, packed, linear_.k, output_, from, panel);
    }
  }

 private:
#if defined(PENSTOCK_AMX)
  void multiply_parts(int64_t first_panel, int64_t last_panel, int64_t start, int64_t end) const {
    alignas(64) float sums[kStripRows * kPanel];
    MatrixUnit unit;
    const int64_t blocks = whole_blocks(linear_.k) / kBlockInputs;
    const int64_t count = (end - start + kStripRows - 1) / kStripRows;  // number of strips, which have similar sizes
    for (int64_t t = 0; t < count; ++t) {
      const int64_t from = start + (end - start) * t / count, to = start + (end - start) * (t + 1) / count;
      for (int64_t panel = first_panel; panel < last_panel; ++panel) {
        const bool halved = linear_.kind == kHalved;
        const auto* weights = static_cast<const uint16_t*>(linear_.packed) + panel * panel_size<uint16_t>(linear_.k) * (halved ? 2 : 1);
        unit.multiply(a_ + from * stride_, stride_ * sizeof(float), to - from, linear_.parts, halved, weights, blocks, sums);
        if (output_.low_rank != nullptr) output_.low_rank->add(sums, from, to, panel);
        for (int64_t row = from; row < to; ++row) {
          const float* of = sums + (row - from) * kPanel;
          vf both[1][2] = {{load(of), load(of + kLanes)}};
          finish<1>(both, output_, row, panel);
        }
      }
    }
  }
#elif defined(PENSTOCK_AVX512_BF16)
  void multiply_parts(int64_t first_panel, int64_t last_panel, int64_t start, int64_t end) const {
    const int64_t count = (end - start + kTile - 1) / kTile;
    for (int64_t t = 0; t < count; ++t) {
      const int64_t from = start + (end - start) * t / count, to = start + (end - start) * (t + 1) / count;
      const bool adapted = has_adapters(from, to);
      for (int64_t panel = first_panel; panel < last_panel; ++panel)
        kPairTiles[adapted][to - from - 1](a_, stride_, linear_.packed, linear_.k, output_, from, panel);
    }
  }
#endif

  bool has_adapters(int64_t from, int64_t to) const { return output_.low_rank != nullptr && output_.low_rank->has(from, to); }

  // Returns memory for panels that are converted to floats. A task converts each panel once for all its tiles.
  static std::vector<float>& wide_panels() {
    static thread_local std::vector<float> panels;
    return panels;
  }

  void widen_integers(int64_t first, int64_t last) const {
    constexpr int64_t kStep = kTogether<int8_t>;
    const int64_t k = linear_.k, count = (last - first) * kPanel * k;
    std::vector<float>& wide = wide_panels();
    if (static_cast<int64_t>(wide.size()) < count) wide.resize(count);
    float* to = wide.data();
    for (int64_t panel = first; panel < last; ++panel) {
      const int8_t* from = static_cast<const int8_t*>(linear_.packed) + panel * panel_size<int8_t>(k);
      for (int64_t j = 0; j < k; j += kStep, from += kStep * kPanel) {
        const Weights<int8_t> weights(from);
        for (int64_t t = 0; t < std::min(kStep, k - j); ++t, to += kPanel)
          store(to, weights.of[t][0]), store(to + kLanes, weights.of[t][1]);
      }
    }
  }

  const float* a_;
  int64_t stride_;
  const Linear& linear_;
  Output output_;
  const Blocks& cut_;
};

}  // namespace penstock
