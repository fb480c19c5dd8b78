// Inputs split into bfloat16 parts, for units that multiply only bfloat16.
//
// Three parts represent a float exactly: its upper bits, the upper bits of the remainder, and the rest. So the products of all
// parts with a bfloat16 weight add up to the product of the float. Numbers below 2^-103 lose precision, because units treat
// denormal parts as zero. A single part is the float rounded to nearest.
#pragma once

#include <cstdint>
#include <cstring>

#include "model.h"
#include "vec.h"

namespace penstock {

#if defined(PENSTOCK_AMX)
constexpr int64_t kBlockInputs = 32;  // inputs that the unit processes at once; rows and panels are padded with zeros to whole blocks
constexpr int64_t kFloatParts = 3;    // parts of an input, if sums must be those of floats
constexpr int64_t kRoundedParts = 1;  // if inputs may be rounded
#elif defined(PENSTOCK_AVX512_BF16)
constexpr int64_t kBlockInputs = 2;   // of a lane
constexpr int64_t kFloatParts = 0;    // three parts would take more instructions than float products
constexpr int64_t kRoundedParts = 1;
#else
constexpr int64_t kBlockInputs = 1;  // no such unit
constexpr int64_t kFloatParts = 0;
constexpr int64_t kRoundedParts = 0;
#endif

// Returns whether a product reads its rows in parts.
inline bool splits(const Linear& linear) { return kBlockInputs > 1 && linear.kind == kBfloat16 && linear.parts > 0; }

inline int64_t whole_blocks(int64_t k) { return (k + kBlockInputs - 1) / kBlockInputs * kBlockInputs; }

// Returns whether the product's row format is just its rounded inputs in order.
inline bool rounds(const Linear& linear) { return splits(linear) && linear.parts == 1 && whole_blocks(linear.k) == linear.k; }

// Returns the floats of memory of a row in the product's format, which is written in whole vectors.
inline int64_t row_width(const Linear& linear) {
  constexpr int64_t kWhole = kBlockInputs > kLanes ? kBlockInputs : kLanes;
  return splits(linear) ? (linear.k + kWhole - 1) / kWhole * kWhole * linear.parts / 2 : linear.k;
}

// Returns the upper halves of floats.
inline vh halves(vf x) { return __builtin_convertvector(reinterpret_cast<vu>(x) >> 16, vh); }
inline vf cut(vf x) { return reinterpret_cast<vf>(reinterpret_cast<vu>(x) & 0xFFFF0000u); }

inline void split(vf x, vh& part) {
  const vu bits = reinterpret_cast<vu>(x);
  part = halves(reinterpret_cast<vf>(x == x ? bits + 0x7FFFu + (bits >> 16 & 1u) : bits | 0x400000u));
}

// Splits a float into three parts. Infinity and NaN are only in the largest part.
inline void split(vf x, vh& low, vh& middle, vh& high) {
  const vf first = reinterpret_cast<vf>(x == x ? reinterpret_cast<vu>(x) & 0xFFFF0000u : reinterpret_cast<vu>(x) | 0x400000u);
  const vi finite = (reinterpret_cast<vi>(x) & 0x7F800000) != 0x7F800000;
  const vf left = finite ? x - first : vf{}, second = cut(left);
  low = halves(left - second), middle = halves(second), high = halves(first);
}

// Splits a row of inputs into memory of `row_width`: block by block, its parts from the smallest.
inline void split_row(const Linear& linear, const float* x, float* row) {
  uint16_t* to = reinterpret_cast<uint16_t*>(row);
  for (int64_t j = 0; j < whole_blocks(linear.k); j += kLanes) {
    float last[kLanes] = {};
    if (j < linear.k && j + kLanes > linear.k) std::memcpy(last, x + j, (linear.k - j) * sizeof(float));
    const vf inputs = load(j + kLanes <= linear.k ? x + j : last);
    uint16_t* at = to + j / kBlockInputs * kBlockInputs * linear.parts + j % kBlockInputs;
    if (linear.parts == 1) {
      vh part;
      split(inputs, part);
      store(at, part);
    } else {
      vh low, middle, high;
      split(inputs, low, middle, high);
      store(at, low), store(at + kBlockInputs, middle), store(at + 2 * kBlockInputs, high);
    }
  }
}

// Writes a row of inputs in the format of a product with `linear`.
inline void put_row(const Linear& linear, const float* x, float* to) {
  if (splits(linear)) split_row(linear, x, to);
  else std::memcpy(to, x, linear.k * sizeof(float));
}

}  // namespace penstock
