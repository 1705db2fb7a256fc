// EAGLE-2's dynamic tree (Li et al. 2024b, section 4) in one call: drafts/eagle_tree.py says what it is,
// and grows the same tree one operator at a time, which costs several times as much as the head itself.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "calls.h"
#include "largest.h"
#include "vectors.h"

namespace {

constexpr float NONE = -std::numeric_limits<float>::infinity();
constexpr float CHILDREN = 0.6f;  // as in drafts/eagle_tree.py

struct Candidate {
  float score;            // logarithm of its confidence
  int64_t token, parent;  // draft id; candidate above it, or -1
  int64_t output;         // row of the outputs that it was offered from
  int64_t entry;          // of the cache, behind the row's length, once it is expanded; else -1
};

// Of logits [n]: the k largest with their log-probabilities, equal ones by id. None where one is NaN or
// the largest is infinite.
int likeliest(const float *x, int64_t n, int k, float *scores, int64_t *ids) {
  const float top = largest(x, n);
  if (!std::isfinite(top)) return 0;
  Vec sums = {};
  float sum = 0;
  int64_t i;
  for (i = 0; i + LANES <= n; i += LANES) sums += exponential(load(x + i) - top);
  for (; i < n; ++i) sum += std::exp(x[i] - top);
  const float whole = top + std::log(sum + total(sums));
  int found = 0;
  const auto offer = [&](int64_t id) {
    if (found == k && !(x[id] > scores[k - 1])) return;
    int at = found < k ? found++ : k - 1;
    for (; at > 0 && x[id] > scores[at - 1]; --at) {
      scores[at] = scores[at - 1];
      ids[at] = ids[at - 1];
    }
    scores[at] = x[id];
    ids[at] = id;
  };
  for (i = 0; i + LANES <= n; i += LANES) {
    const float least = found == k ? scores[k - 1] : NONE;
    const Ints better = load(x + i) > least;
    if (found == k && total(better) == 0) continue;
    for (int64_t id = i; id < i + LANES; ++id) offer(id);
  }
  for (; i < n; ++i) offer(i);
  while (found && scores[found - 1] == NONE) --found;
  for (int j = 0; j < found; ++j) scores[j] -= whole;
  return found;
}

class Growth {
 public:
  Growth(const TreeCall &call, int64_t row)
      : call_(call), draft_(*call.draft), model_(*draft_.model), row_(row), k_(static_cast<int>(call.branch)) {
    const Pass &pass = *draft_.pass;
    start_ = pass.starts[row] + (draft_.taps ? pass.counts[row] : 0);
    slot_ = pass.slots[row];
  }

  void run() {
    const float *first = draft_.pass->hidden + row_ * model_.hidden;
    outputs_.assign(first, first + model_.hidden);
    std::vector<int64_t> root{-1};
    frontier_ = offer(root, 0, 1);
    for (int64_t depth = 2; depth <= draft_.depths[row_]; ++depth) {
      frontier_.resize(going_on());
      if (frontier_.empty()) break;
      frontier_ = expand(depth);
    }
    best();
  }

 private:
  const TreeCall &call_;
  const ChainCall &draft_;
  const Model &model_;
  const int64_t row_;
  const int k_;
  int64_t start_, slot_, behind_ = 0;
  std::vector<Candidate> all_;
  std::vector<int64_t> frontier_;
  std::vector<float> outputs_;  // [n, H], of every pair that was run

  const float *prices() const { return call_.node_ms[row_]; }

  // What the node in place `rank` must be worth, 1 the first.
  float price(int64_t rank) const {
    if (rank > call_.priced[row_]) return -NONE;
    return call_.rates[row_] * (prices()[rank - 1] - (rank > 1 ? prices()[rank - 2] : 0));
  }

  // The children of `above`, whose outputs lie from row `output` on; the best k of them, best first.
  std::vector<int64_t> offer(const std::vector<int64_t> &above, int64_t output, int64_t count) {
    const int64_t size = model_.hidden, width = draft_.head.outputs;
    static thread_local std::vector<float> normed, logits;  // kept: a page that is fresh costs a fault
    if (static_cast<int64_t>(normed.size()) < count * size) normed.resize(count * size);
    if (static_cast<int64_t>(logits.size()) < count * width) logits.resize(count * width);
    std::vector<float> scores(k_);
    std::vector<int64_t> ids(k_), fresh;
    speculant_norm(&outputs_[output * size], draft_.norm, normed.data(), count, size, model_.eps);
    const Matrix &m = draft_.head;
    const LinearCall linear{normed.data(), m.weight, m.scales, m.minima, m.bias, logits.data(), count, m.inputs, width};
    speculant_linear(&linear, static_cast<int>(m.format), static_cast<int>(draft_.pass->threads));
    for (int64_t i = 0; i < count; ++i) {
      const int found = likeliest(&logits[i * width], draft_.tokens, k_, scores.data(), ids.data());
      const float before = above[i] < 0 ? 0 : all_[above[i]].score;
      for (int j = 0; j < found; ++j) {
        fresh.push_back(static_cast<int64_t>(all_.size()));
        all_.push_back({before + scores[j], ids[j], above[i], output + i, -1});
      }
    }
    by_score(fresh);
    if (static_cast<int64_t>(fresh.size()) > k_) fresh.resize(k_);
    return fresh;
  }

  void by_score(std::vector<int64_t> &nodes) const {
    std::stable_sort(nodes.begin(), nodes.end(), [&](int64_t a, int64_t b) { return all_[a].score > all_[b].score; });
  }

  // One pass over the frontier: its children are the candidates of `depth`.
  std::vector<int64_t> expand(int64_t depth) {
    const int64_t size = model_.hidden, half = model_.dim / 2, count = static_cast<int64_t>(frontier_.size());
    const int64_t columns = behind_ + count, turn = ((depth - 2) * draft_.pass->batch + row_) * half;
    std::vector<float> beside(count * size), cos(count * half), sin(count * half);
    std::vector<uint8_t> mask(count * columns);
    const int64_t output = static_cast<int64_t>(outputs_.size()) / size;
    outputs_.resize(outputs_.size() + count * size);
    for (int64_t i = 0; i < count; ++i) {
      Candidate &node = all_[frontier_[i]];
      node.entry = behind_ + i;
      for (int64_t up = frontier_[i]; up >= 0; up = all_[up].parent) mask[i * columns + all_[up].entry] = 1;
      std::memcpy(&beside[i * size], draft_.embeddings + node.token * size, size * sizeof(float));
      std::memcpy(&outputs_[(output + i) * size], &outputs_[node.output * size], size * sizeof(float));
      std::memcpy(&cos[i * half], draft_.cos + turn, half * sizeof(float));
      std::memcpy(&sin[i * half], draft_.sin + turn, half * sizeof(float));
    }
    Pass pass = *draft_.pass;
    pass.hidden = &outputs_[output * size];
    pass.beside = beside.data();
    pass.cos = cos.data();
    pass.sin = sin.data();
    pass.slots = &slot_;
    pass.starts = &start_;
    pass.mask = mask.data();
    pass.firsts = pass.counts = nullptr;
    pass.rows = pass.tokens = count;
    pass.batch = 1;
    pass.behind = behind_;
    speculant_layers(&model_, &pass);
    behind_ += count;
    for (int64_t i = output * size; i < static_cast<int64_t>(outputs_.size()); ++i)
      if (!std::isfinite(outputs_[i])) call_.broken[row_] = 1;
    const std::vector<int64_t> above = frontier_;
    return offer(above, output, count);
  }

  // How many nodes of the frontier to expand, the most confident first; 0: no pass pays.
  size_t going_on() const {
    if (!prices()) return frontier_.size();
    const float trust = call_.trust[row_], rate = call_.rates[row_], step = call_.step_ms[row_];
    std::vector<float> every;
    for (const Candidate &c : all_) every.push_back(std::exp(c.score));
    std::sort(every.begin(), every.end(), std::greater<float>());
    size_t width = 0;
    float gain = 0;
    for (const int64_t node : frontier_) {
      const float sure = std::exp(all_[node].score);
      const auto place = std::upper_bound(every.begin(), every.end(), sure, std::greater<float>());
      const float cost = price(place - every.begin() + 1);
      if (!(trust * sure > cost)) break;
      ++width;
      gain += std::max(0.0f, CHILDREN * trust * sure - cost);
    }
    return step == 0 || gain > rate * step ? width : 0;
  }

  // The best candidates, less what is not worth its price, as a tree.
  void best() {
    std::vector<int64_t> order(all_.size()), place(all_.size(), -1);
    for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int64_t>(i);
    by_score(order);
    int64_t size = std::min<int64_t>(call_.count, static_cast<int64_t>(order.size()));
    if (prices()) {
      const int64_t most = std::min(size, call_.priced[row_]);
      float sum = 0, top = 0;
      size = 0;
      for (int64_t i = 0; i < most; ++i) {
        sum += std::exp(all_[order[i]].score);
        const float gain = call_.trust[row_] * sum - prices()[i] * call_.rates[row_];
        if (gain > top) {
          top = gain;
          size = i + 1;
        }
      }
    }
    order.resize(size);
    std::sort(order.begin(), order.end());
    float hoped = 0;
    for (int64_t i = 0; i < size; ++i) {
      const Candidate &node = all_[order[i]];
      place[order[i]] = i;
      call_.ids[row_ * call_.count + i] = node.token;
      call_.parents[row_ * call_.count + i] = node.parent < 0 ? -1 : place[node.parent];
      hoped += std::exp(node.score);
    }
    call_.sizes[row_] = size;
    call_.hoped[row_] = hoped;
  }
};

}  // namespace

extern "C" void speculant_tree(const TreeCall *call) {
  if (call->draft->taps) speculant_catch_up(call->draft);
  for (int64_t row = 0; row < call->draft->pass->batch; ++row) {
    call->broken[row] = 0;
    Growth(*call, row).run();
  }
}
