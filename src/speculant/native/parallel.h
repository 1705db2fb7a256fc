// Work shared among the threads of torch's own OpenMP runtime.
//
// A second OpenMP runtime beside torch's fights it for the cores, and its spinning threads slow both.
// So nothing here is linked to one: the loader hands over GOMP_parallel and
// omp_get_thread_num of the library that torch has loaded, and without them one thread does it all.
#pragma once

#include <atomic>
#include <cstdint>

typedef void (*Fork)(void (*body)(void *), void *data, unsigned threads, unsigned flags);
extern Fork speculant_fork;

template <class Body>
void parallel(int64_t count, int threads, const Body &body) {
  if (!speculant_fork || threads < 2 || count < 2) {
    for (int64_t i = 0; i < count; ++i) body(i);
    return;
  }
  struct Shared {
    const Body &body;
    int64_t count;
    std::atomic<int64_t> next;
  } shared{body, count, {0}};
  speculant_fork(
      [](void *data) {
        auto &mine = *static_cast<Shared *>(data);
        for (int64_t i; (i = mine.next.fetch_add(1)) < mine.count;) mine.body(i);
      },
      &shared, static_cast<unsigned>(threads), 0);
}
