// Inputs of matrix products split into bfloat16 parts, for matrix units and instructions that multiply only bfloat16.
// Three parts together represent a float exactly: the upper bits of the float, the upper bits of the remainder, and the remaining
// bits. The products of all parts with a bfloat16 weight therefore add up to the product of the float with the weight. Numbers
// below 2^-103 lose precision, because the units treat denormal parts as zero. Two parts have 16 or more significant bits. A single
// part is the float rounded to the nearest bfloat16.
#pragma once

#include <cstdint>
#include <cstring>

#include "model.h"
#include "vec.h"

namespace penstock {

#if defined(PENSTOCK_AMX)
constexpr int64_t kBlockInputs = 32;  // inputs that the unit processes together; rows and panels are padded with zeros to full blocks
constexpr int64_t kFloatParts = 3;    // number of parts of an input, if results must equal float products
constexpr int64_t kRoundedParts = 1;  // number of parts of an input, if inputs may be rounded
#elif defined(PENSTOCK_AVX512_BF16)
constexpr int64_t kBlockInputs = 2;   // number of inputs in a lane
constexpr int64_t kFloatParts = 0;    // not used, because three parts would need more instructions than float products
constexpr int64_t kRoundedParts = 1;
#else
constexpr int64_t kBlockInputs = 1;  // the processor has no such unit
constexpr int64_t kFloatParts = 0;
constexpr int64_t kRoundedParts = 0;
#endif

// Kind of a float32 weight that is stored as two bfloat16 parts, for a matrix unit: the weight rounded to bfloat16, and the remainder
// rounded to bfloat16. Together they have 16 or more significant bits. Inputs are split in the same way. A product adds the three
// products of parts whose sum matters, and leaves out the product of the remainders.
constexpr int64_t kHalved = 4;
constexpr int64_t kHalvedParts = 2;

// Returns whether the input rows of the matrix product with `linear` are split into parts.
inline bool splits(const Linear& linear) {
  return kBlockInputs > 1 && (linear.kind == kBfloat16 || linear.kind == kHalved) && linear.parts > 0;
}

inline int64_t whole_blocks(int64_t k) { return (k + kBlockInputs - 1) / kBlockInputs * kBlockInputs; }

// Returns whether an input row of the matrix product with `linear` consists only of the inputs rounded to bfloat16, in order.
inline bool rounds(const Linear& linear) { return splits(linear) && linear.parts == 1 && whole_blocks(linear.k) == linear.k; }

// Returns the size, in floats, of an input row in the format that the matrix product with `linear` needs. The size is rounded up,
// because rows are written in complete vectors.
inline int64_t row_width(const Linear& linear) {
  constexpr int64_t kWhole = kBlockInputs > kLanes ? kBlockInputs : kLanes;
  return splits(linear) ? (linear.k + kWhole - 1) / kWhole * kWhole * linear.parts / 2 : linear.k;
}

// Returns the upper 16 bits of each float.
inline vh halves(vf x) { return __builtin_convertvector(reinterpret_cast<vu>(x) >> 16, vh); }
inline vf cut(vf x) { return reinterpret_cast<vf>(reinterpret_cast<vu>(x) & 0xFFFF0000u); }

inline void split(vf x, vh& part) {
  const vu bits = reinterpret_cast<vu>(x);
  part = halves(reinterpret_cast<vf>(x == x ? bits + 0x7FFFu + (bits >> 16 & 1u) : bits | 0x400000u));
}

// Splits a float into the nearest bfloat16 number and the remainder, rounded to bfloat16. Infinity and NaN have a remainder of NaN or 0.
inline void split(vf x, vh& low, vh& high) {
  split(x, high);
  split(x - reinterpret_cast<vf>(__builtin_convertvector(high, vu) << 16), low);
}

// Splits a float into three parts. Infinity and NaN are only in the largest part.
inline void split(vf x, vh& low, vh& middle, vh& high) {
  const vf first = reinterpret_cast<vf>(x == x ? reinterpret_cast<vu>(x) & 0xFFFF0000u : reinterpret_cast<vu>(x) | 0x400000u);
  const vi finite = (reinterpret_cast<vi>(x) & 0x7F800000) != 0x7F800000;
  const vf left = finite ? x - first : vf{}, second = cut(left);
  low = halves(left - second), middle = halves(second), high = halves(first);
}

// Splits a row of inputs into parts, and writes them to `row`, which has `row_width` floats. The blocks of inputs follow each
// other. Each block has its parts, the smallest first.
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
    } else if (linear.parts == kHalvedParts) {
      vh low, high;
      split(inputs, low, high);
      store(at, low), store(at + kBlockInputs, high);
    } else {
      vh low, middle, high;
      split(inputs, low, middle, high);
      store(at, low), store(at + kBlockInputs, middle), store(at + 2 * kBlockInputs, high);
    }
  }
}

// Writes a row of inputs in the format that the matrix product with `linear` needs.
inline void put_row(const Linear& linear, const float* x, float* to) {
  if (splits(linear)) split_row(linear, x, to);
  else std::memcpy(to, x, linear.k * sizeof(float));
}

}  // namespace penstock
