// Components of random directions, eight groups at a time, for CPUs with AVX2: equal to those of kernels/direction.h,
// bit for bit.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__)
#define FASTGRAD_HAS_AVX2 1

#include <immintrin.h>

#include <cstdint>

#define FASTGRAD_AVX2 __attribute__((target("avx2"))) inline

namespace fastgrad {

constexpr int64_t groups_at_once = 8;

FASTGRAD_AVX2 __m256i in_all_lanes(uint64_t value) { return _mm256_set1_epi64x(static_cast<int64_t>(value)); }

// A component from each of four words, in the low halves of lanes.
FASTGRAD_AVX2 __m256d components_of(__m256i words, bool halved) {
  // Bits 2 to 31 become the last bits of the double 2^52. Subtracting 2^52 - 2^29 and scaling by 2^-30 gives the
  // magnitude, from 0.5 to 1.5.
  const __m256i fraction = _mm256_and_si256(_mm256_srli_epi64(words, 2), in_all_lanes(0x3FFFFFFFu));
  const __m256d wide = _mm256_castsi256_pd(_mm256_or_si256(fraction, in_all_lanes(0x4330000000000000u)));
  const __m256d shifted = _mm256_sub_pd(wide, _mm256_set1_pd(0x1p52 - 0x1p29));
  const __m256i negative = _mm256_slli_epi64(_mm256_andnot_si256(words, in_all_lanes(1)), 63);
  const __m256i dropped = _mm256_cmpeq_epi64(_mm256_and_si256(words, in_all_lanes(2)), in_all_lanes(halved ? 2 : 1));
  const __m256d component =
      _mm256_xor_pd(_mm256_mul_pd(shifted, _mm256_set1_pd(0x1p-30)), _mm256_castsi256_pd(negative));
  return _mm256_andnot_pd(_mm256_castsi256_pd(dropped), component);
}

// Writes the components of groups `group`, ..., `group` + 7. `group` must not be 0: component 0 is never zero, and
// this function does not ensure that.
FASTGRAD_AVX2 void write_groups_avx2(double* out, int64_t seed, int64_t stream, int64_t group, bool halved) {
  // words[k][h]: the k-th of groups 4 h, ..., 4 h + 3, one per lane. High halves of lanes do not matter.
  __m256i words[4][2];
  for (int h = 0; h < 2; ++h) {
    words[0][h] = _mm256_add_epi64(in_all_lanes(static_cast<uint64_t>(group + 4 * h)), _mm256_set_epi64x(3, 2, 1, 0));
    words[1][h] = _mm256_srli_epi64(words[0][h], 32);
    words[2][h] = in_all_lanes(static_cast<uint64_t>(stream));
    words[3][h] = _mm256_srli_epi64(words[2][h], 32);
  }
  __m256i key0 = in_all_lanes(static_cast<uint64_t>(seed));
  __m256i key1 = _mm256_srli_epi64(key0, 32);
  for (int round = 0; round < 10; ++round) {
    for (int h = 0; h < 2; ++h) {
      const __m256i product0 = _mm256_mul_epu32(in_all_lanes(0xD2511F53u), words[0][h]);
      const __m256i product1 = _mm256_mul_epu32(in_all_lanes(0xCD9E8D57u), words[2][h]);
      words[0][h] = _mm256_xor_si256(_mm256_srli_epi64(product1, 32), _mm256_xor_si256(words[1][h], key0));
      words[1][h] = product1;
      words[2][h] = _mm256_xor_si256(_mm256_srli_epi64(product0, 32), _mm256_xor_si256(words[3][h], key1));
      words[3][h] = product0;
    }
    key0 = _mm256_add_epi32(key0, in_all_lanes(0x9E3779B9u));
    key1 = _mm256_add_epi32(key1, in_all_lanes(0xBB67AE85u));
  }
  for (int h = 0; h < 2; ++h) {
    __m256d components[4];
    for (int k = 0; k < 4; ++k) {
      components[k] = components_of(words[k][h], halved);
    }
    // From one word of four groups to the four components of one group.
    const __m256d low01 = _mm256_unpacklo_pd(components[0], components[1]);
    const __m256d high01 = _mm256_unpackhi_pd(components[0], components[1]);
    const __m256d low23 = _mm256_unpacklo_pd(components[2], components[3]);
    const __m256d high23 = _mm256_unpackhi_pd(components[2], components[3]);
    _mm256_storeu_pd(out + 16 * h, _mm256_permute2f128_pd(low01, low23, 0x20));
    _mm256_storeu_pd(out + 16 * h + 4, _mm256_permute2f128_pd(high01, high23, 0x20));
    _mm256_storeu_pd(out + 16 * h + 8, _mm256_permute2f128_pd(low01, low23, 0x31));
    _mm256_storeu_pd(out + 16 * h + 12, _mm256_permute2f128_pd(high01, high23, 0x31));
  }
}

}  // namespace fastgrad

#endif
