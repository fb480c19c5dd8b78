// Multiplication of pairs of bfloat16 numbers into sums of floats, on processors with such an instruction.
#pragma once

#if defined(PENSTOCK_AMX) || defined(PENSTOCK_AVX512_BF16)
#define PENSTOCK_PAIRS

#include <immintrin.h>

#include "vec.h"

namespace penstock {

// Adds the products of pairs to sums. Each lane first adds the product of the second elements of its two pairs, and then the
// product of the first elements.
inline vf add_pairs(vf sums, vu a, vu b) {
  return _mm512_dpbf16_ps(sums, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
}

// Rounds two vectors of floats to bfloat16, to nearest even. The results for `first` are before the results for `second`.
inline vu rounded(vf first, vf second) { return reinterpret_cast<vu>(_mm512_cvtne2ps_pbh(second, first)); }

}  // namespace penstock
#endif
