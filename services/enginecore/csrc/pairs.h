// Products of pairs of bfloat16 in lanes of floats, where the processor has them.
#pragma once

#if defined(PENSTOCK_AMX) || defined(PENSTOCK_AVX512_BF16)
#define PENSTOCK_PAIRS

#include <immintrin.h>

#include "vec.h"

namespace penstock {

// A lane adds the product of its pairs' second numbers to its sum, then that of the first.
inline vf add_pairs(vf sums, vu a, vu b) {
  return _mm512_dpbf16_ps(sums, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
}

// Floats one after the other, those of `second` behind those of `first`, rounded to nearest even.
inline vu rounded(vf first, vf second) { return reinterpret_cast<vu>(_mm512_cvtne2ps_pbh(second, first)); }

}  // namespace penstock
#endif
