// Vectors of PENSTOCK_LANES floats, in the compiler's own terms: the same text is compiled for every instruction set.
// PENSTOCK_TILE: rows of a register tile, which has two vectors of sums per row.
#pragma once

#include <cstdint>
#include <utility>

namespace penstock {

typedef float vf __attribute__((vector_size(PENSTOCK_LANES * 4)));
typedef int32_t vi __attribute__((vector_size(PENSTOCK_LANES * 4)));
typedef float vf_unaligned __attribute__((vector_size(PENSTOCK_LANES * 4), aligned(4), may_alias));

typedef uint16_t vh __attribute__((vector_size(PENSTOCK_LANES * 2)));
typedef uint32_t vu __attribute__((vector_size(PENSTOCK_LANES * 4)));
typedef uint16_t vh_unaligned __attribute__((vector_size(PENSTOCK_LANES * 2), aligned(2), may_alias));
typedef int32_t vi_unaligned __attribute__((vector_size(PENSTOCK_LANES * 4), aligned(1), may_alias));

constexpr int kLanes = PENSTOCK_LANES;
constexpr int kPanel = 2 * kLanes;  // output features that are computed together
constexpr int kTile = PENSTOCK_TILE;

inline vf load(const float* p) { return *reinterpret_cast<const vf_unaligned*>(p); }
// Two bfloat16 in a lane, of which each is the upper half of a float.
inline vu load_pairs(const uint16_t* p) { return reinterpret_cast<vu>(*reinterpret_cast<const vi_unaligned*>(p)); }
inline vi load_bytes(const int8_t* p) { return *reinterpret_cast<const vi_unaligned*>(p); }
// Byte `i` of each of the lanes' four, a number with a sign.
inline vf byte(vi v, int i) { return __builtin_convertvector((v << (24 - 8 * i)) >> 24, vf); }
inline void store(float* p, vf v) { *reinterpret_cast<vf_unaligned*>(p) = v; }
inline void store(uint16_t* p, vh v) { *reinterpret_cast<vh_unaligned*>(p) = v; }
inline vf splat(float x) { return x - vf{}; }
inline vf max(vf a, vf b) { return a > b ? a : b; }
inline vf min(vf a, vf b) { return a < b ? a : b; }

// The numbers of the lanes.
inline vi lanes() {
  vi numbers;
  for (int i = 0; i < kLanes; ++i) numbers[i] = i;
  return numbers;
}

inline float sum(vf v) {
  float total = 0;
  for (int i = 0; i < kLanes; ++i) total += v[i];
  return total;
}

// Each lane has the number of the lane `kAway` from it, by the bits of its index.
template <int kAway, int... kLane>
inline vf exchanged(vf v, std::integer_sequence<int, kLane...>) {
  return __builtin_shufflevector(v, v, (kLane ^ kAway)...);
}

template <int kAway = kLanes / 2>
inline float largest(vf v) {
  v = max(v, exchanged<kAway>(v, std::make_integer_sequence<int, kLanes>{}));
  if constexpr (kAway > 1) return largest<kAway / 2>(v);
  else return v[0];
}

// e^x within 2 ulp; below -87.3 it is e^-87.3, which no sum of weights notices. Polynomial of Cephes' expf.
inline vf exponential(vf x) {
  x = max(min(x, splat(88.0f)), splat(-87.3f));
  const vf shifted = x * splat(1.44269504f) + splat(12582912.0f);  // the integer lands in the low bits
  const vf n = shifted - splat(12582912.0f);
  vf r = x - n * splat(0.693359375f);
  r = r - n * splat(-2.12194440e-4f);
  vf p = splat(1.9875691500e-4f);
  p = p * r + splat(1.3981999507e-3f);
  p = p * r + splat(8.3334519073e-3f);
  p = p * r + splat(4.1665795894e-2f);
  p = p * r + splat(1.6666665459e-1f);
  p = p * r + splat(5.0000001201e-1f);
  p = p * r * r + r + splat(1.0f);
  const vi bits = reinterpret_cast<vi>(shifted) - 0x4B400000;
  return p * reinterpret_cast<vf>((bits + 127) << 23);
}

inline vf hyperbolic_tangent(vf x) { return splat(1.0f) - splat(2.0f) / (exponential(x + x) + splat(1.0f)); }
inline vf silu(vf x) { return x / (splat(1.0f) + exponential(-x)); }
// x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2, which is x times the logistic function of twice that.
inline vf gelu(vf x) {
  const vf twice = x * (splat(1.5957691216f) + splat(0.0713548162f) * (x * x));
  return x / (splat(1.0f) + exponential(-twice));
}

}  // namespace penstock
