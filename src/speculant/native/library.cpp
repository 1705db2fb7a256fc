// What the loader asks: which instructions this was compiled for, and whose threads to use.
#include "parallel.h"

Fork speculant_fork = nullptr;

extern "C" {
void speculant_threads(Fork fork) { speculant_fork = fork; }

// 2: AVX-512, 1: AVX2 with FMA, 0: what every machine of the architecture has.
int speculant_level() {
#if defined(__AVX512F__)
  return 2;
#elif defined(__AVX2__) && defined(__FMA__)
  return 1;
#else
  return 0;
#endif
}
}
