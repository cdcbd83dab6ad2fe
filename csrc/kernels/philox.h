// Philox4x32-10: random words as a pure function of a key and a counter.
//
// Source: Salmon, Moraes, Dror & Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
#pragma once

#include "host_device.h"

#include <cstdint>

namespace fastgrad {

struct Words4 {
  uint32_t word[4];
};

FASTGRAD_HOST_DEVICE Words4 philox4x32_10(Words4 counter, uint32_t key0, uint32_t key1) {
  constexpr uint64_t multiplier0 = 0xD2511F53u;
  constexpr uint64_t multiplier1 = 0xCD9E8D57u;
  constexpr uint32_t weyl0 = 0x9E3779B9u;
  constexpr uint32_t weyl1 = 0xBB67AE85u;
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = multiplier0 * counter.word[0];
    const uint64_t product1 = multiplier1 * counter.word[2];
    counter = Words4{
        {static_cast<uint32_t>(product1 >> 32) ^ counter.word[1] ^ key0, static_cast<uint32_t>(product1),
         static_cast<uint32_t>(product0 >> 32) ^ counter.word[3] ^ key1, static_cast<uint32_t>(product0)}};
    key0 += weyl0;
    key1 += weyl1;
  }
  return counter;
}

}  // namespace fastgrad
