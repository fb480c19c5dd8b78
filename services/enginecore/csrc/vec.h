// SIMD vectors of PENSTOCK_LANES floats, with compiler extensions. The same source is compiled for every instruction set.
// PENSTOCK_TILE is the number of rows of a register tile, the sums that stay in registers. A register tile has two vectors of sums
// per row.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace penstock {

typedef float vf __attribute__((vector_size(PENSTOCK_LANES * 4)));
typedef int32_t vi __attribute__((vector_size(PENSTOCK_LANES * 4)));
typedef float vf_unaligned __attribute__((vector_size(PENSTOCK_LANES * 4), aligned(4), may_alias));

typedef uint16_t vh __attribute__((vector_size(PENSTOCK_LANES * 2)));
typedef uint32_t vu __attribute__((vector_size(PENSTOCK_LANES * 4)));
typedef uint16_t vh_unaligned __attribute__((vector_size(PENSTOCK_LANES * 2), aligned(2), may_alias));
typedef int32_t vi_unaligned __attribute__((vector_size(PENSTOCK_LANES * 4), aligned(1), may_alias));

constexpr int kLanes = PENSTOCK_LANES;
constexpr int kPanel = 2 * kLanes;  // number of output features that are computed together
constexpr int kTile = PENSTOCK_TILE;

inline vf load(const float* p) { return *reinterpret_cast<const vf_unaligned*>(p); }
// Loads two bfloat16 values into each lane.
inline vu load_pairs(const uint16_t* p) { return reinterpret_cast<vu>(*reinterpret_cast<const vi_unaligned*>(p)); }
inline vi load_bytes(const int8_t* p) { return *reinterpret_cast<const vi_unaligned*>(p); }
// Returns byte `i` of each lane, as a signed number converted to float.
inline vf byte(vi v, int i) { return __builtin_convertvector((v << (24 - 8 * i)) >> 24, vf); }
inline void store(float* p, vf v) { *reinterpret_cast<vf_unaligned*>(p) = v; }
inline void store(uint16_t* p, vh v) { *reinterpret_cast<vh_unaligned*>(p) = v; }
inline vf splat(float x) { return x - vf{}; }
#if defined(__AVX512F__)
// This function uses an intrinsic, because compilers would emit a comparison and a selection instead of this single instruction.
inline vf max(vf a, vf b) { return _mm512_max_ps(a, b); }
#else
inline vf max(vf a, vf b) { return a > b ? a : b; }
#endif
inline vf min(vf a, vf b) { return a < b ? a : b; }

// Returns a vector with the index of each lane.
inline vi lanes() {
  vi numbers;
  for (int i = 0; i < kLanes; ++i) numbers[i] = i;
  return numbers;
}

// Sets the sums of a register tile to 0. The code has no loop, because compilers would replace a loop by a call of memset.
template <int... kRow>
inline void clear(vf (&sums)[sizeof...(kRow)][2], std::integer_sequence<int, kRow...>) {
  ((sums[kRow][0] = sums[kRow][1] = vf{}), ...);
}
template <int kRows>
inline void clear(vf (&sums)[kRows][2]) {
  clear(sums, std::make_integer_sequence<int, kRows>{});
}

inline float sum(vf v) {
  float total = 0;
  for (int i = 0; i < kLanes; ++i) total += v[i];
  return total;
}

// Returns, for each lane, the element of the lane whose index is the lane's index XOR `kAway`.
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

// Returns whether any lane of `a` is greater than the same lane of `b`.
#if defined(__AVX512F__)
inline bool any_greater(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ) != 0; }
#else
inline bool any_greater(vf a, vf b) {
  const vi greater = a > b;
  int32_t any = 0;
  for (int i = 0; i < kLanes; ++i) any |= greater[i];
  return any != 0;
}
#endif

constexpr float kLog2E = 1.44269504f;

// Polynomials with the smallest relative error for 2^x with x in -1/2..1/2, and for e^x with x in -ln 2 / 2..ln 2 / 2.
constexpr float kPowers3[] = {0.9999280735f, 0.6932609855f, 0.2426111222f, 0.05517166906f};  // 2^-13.7
constexpr float kPowers5[] = {1.0f, 0.6931469776f, 0.2402224211f, 0.05550733776f, 0.009671510875f, 0.001326470645f};  // 2^-23.3
constexpr float kExponential5[] = {1.0f, 0.9999997072f, 0.4999914959f, 0.1666763629f, 0.04189792165f, 0.008290301751f};  // 2^-23.3

template <size_t kTerms>
inline vf polynomial(const float (&factors)[kTerms], vf x) {
  vf sum = splat(factors[kTerms - 1]);
  for (size_t i = kTerms - 1; i-- > 0;) sum = sum * x + splat(factors[i]);
  return sum;
}

// Number that is added to x. The low bits of the sum are then the integer nearest to x plus 127, which is the exponent of a float.
constexpr float kToExponent = 12582912.0f + 127.0f;
inline vf power_of_integer(vf shifted) { return reinterpret_cast<vf>(reinterpret_cast<vi>(shifted) << 23); }

// Returns 2^x for x below 127, with the polynomial `factors`. For x below -126, the result is 2^-126, which is too small to change
// a sum of weights. The result for NaN is NaN.
template <size_t kTerms>
inline vf power_of_two(const float (&factors)[kTerms], vf x) {
  x = max(splat(-126.0f), x);
  const vf shifted = x + splat(kToExponent);
  return polynomial(factors, x - (shifted - splat(kToExponent))) * power_of_integer(shifted);
}

// Returns e^x with an error of at most 2 ulp. For x below -87.3, the result is e^-87.3, which is too small to change a sum of
// weights. The range reduction is from Cephes' expf.
inline vf exponential(vf x) {
  x = max(min(x, splat(88.0f)), splat(-87.3f));
  const vf shifted = x * splat(kLog2E) + splat(kToExponent), n = shifted - splat(kToExponent);
  const vf r = x - n * splat(0.693359375f) - n * splat(-2.12194440e-4f);
  return polynomial(kExponential5, r) * power_of_integer(shifted);
}

inline vf hyperbolic_tangent(vf x) { return splat(1.0f) - splat(2.0f) / (exponential(x + x) + splat(1.0f)); }
// Returns cap tanh(x / cap). NaN is returned unchanged, because the polynomial would turn it into a number.
inline vf capped(vf x, float cap) { return x == x ? hyperbolic_tangent(x / splat(cap)) * splat(cap) : x; }
inline vf silu(vf x) { return x / (splat(1.0f) + exponential(-x)); }
// Returns x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2, which is x times the logistic function of twice that argument.
inline vf gelu(vf x) {
  const vf twice = x * (splat(1.5957691216f) + splat(0.0713548162f) * (x * x));
  return x / (splat(1.0f) + exponential(-twice));
}

// Returns x times the normal distribution function of x, with the rational approximation 7.1.26 of Abramowitz and Stegun for the
// error function, whose absolute error is at most 1.5e-7.
inline vf exact_gelu(vf x) {
  const vf z = max(x, -x) * splat(0.70710678f), t = splat(1.0f) / (splat(1.0f) + splat(0.3275911f) * z);
  constexpr float kFactors[] = {0.254829592f, -0.284496736f, 1.421413741f, -1.453152027f, 1.061405429f};
  const vf half = splat(0.5f) * t * polynomial(kFactors, t) * exponential(-z * z);
  return x * (x > vf{} ? splat(1.0f) - half : half);
}

}  // namespace penstock
