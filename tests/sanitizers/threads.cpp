// Hammers the thread pool for ThreadSanitizer: programs of all kinds, one after the other, from several callers with pools of
// their own and with a pool that they take turns at, on more threads than there are cores. Every result is checked.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "chain.h"
#include "decoder.h"
#include "operators.h"

namespace {

using namespace penstock;

void check(bool right, const char* what) {
  if (right) return;
  std::fprintf(stderr, "wrong: %s\n", what);
  std::abort();
}

std::vector<float> numbers(int64_t count, uint32_t seed) {
  std::vector<float> made(count);
  for (float& x : made) {
    seed = seed * 1664525u + 1013904223u;
    x = static_cast<float>(seed >> 8) / 16777216.0f - 0.5f;
  }
  return made;
}

struct Weight {
  Weight(Operators& operators, int64_t n, int64_t k, uint32_t seed) : packed(panels(n) * kPanel * k) {
    linear = {packed.data(), nullptr, nullptr, n, k, kFloat32, 0};
    const std::vector<float> plain = numbers(n * k, seed);
    operators.pack(plain.data(), linear);
  }
  std::vector<float> packed;
  Linear linear;
};

// Of random numbers, for all products of a decoder's layers and for its head.
class Adapter {
 public:
  Adapter(int64_t rank, uint32_t seed) : rank_(rank), seed_(seed) {}

  void add(const Linear& linear, int64_t num_pieces = 1) {
    const int64_t stride = (linear.k + 2 * kLanes - 1) / (2 * kLanes) * 2 * kLanes, vectors = (linear.n + kLanes - 1) / kLanes;
    Update update{keep(num_pieces * rank_ * stride), stride, kFloat32, kFloat32, linear.k, num_pieces * rank_, num_pieces > 1, num_pieces, {}};
    for (int64_t i = 0; i < num_pieces; ++i)
      update.pieces[i] = {keep(vectors / num_pieces * rank_ * kLanes), vectors / num_pieces, i * rank_, rank_};
    updates_.push_back(update);
    width_ = std::max(width_, update.rank);
  }

  Segment of(int64_t first, int64_t end) const { return {updates_.data(), first, end, width_}; }

 private:
  const float* keep(int64_t count) {
    memory_.push_back(numbers(count, ++seed_));
    return memory_.back().data();
  }

  const int64_t rank_;
  uint32_t seed_;
  int64_t width_ = 0;
  std::vector<std::vector<float>> memory_;
  std::vector<Update> updates_;
};

// Everything a caller works with: a small decoder and the operators beside it, in one context.
class Caller {
 public:
  Caller(Pool& pool, uint32_t seed)
      : operators_(pool),
        norm_(kHidden, 1.0f),
        qkv_(operators_, (kHeads + 2) * kHead, kHidden, seed),
        out_(operators_, kHidden, kHeads * kHead, seed + 1),
        gate_up_(operators_, 4 * kPanel, kHidden, seed + 2),
        down_(operators_, kHidden, 2 * kPanel, seed + 3),
        wide_(operators_, 40, 1024, seed + 4),
        fc_(operators_, kHidden, kStates, seed + 6),
        both_(operators_, (kHeads + 2) * kHead, 2 * kHidden, seed + 7),
        router_(operators_, kExperts + 1, kHidden, seed + 10),
        queries_(operators_, kHeads * kHead, kHidden, seed + 15),
        gate_(operators_, kSize, kHidden, seed + 11),
        up_(operators_, kHidden, kSize, seed + 12),
        inputs_(operators_, kLayers * kSize, kHidden, seed + 13),
        embedding_(numbers(qkv_.linear.n * kHidden, seed + 5)),
        table_(numbers(qkv_.linear.n * kLayers * kSize, seed + 14)),
        narrow_(3, seed + 8),
        wide_adapter_(9, seed + 9) {
    for (Adapter* adapter : {&narrow_, &wide_adapter_}) {
      for (int64_t layer = 0; layer < kLayers; ++layer)
        adapter->add(qkv_.linear), adapter->add(out_.linear), adapter->add(gate_up_.linear, 2), adapter->add(down_.linear),
            adapter->add(gate_.linear), adapter->add(up_.linear);
      adapter->add(qkv_.linear);  // the head
      adapter->add(inputs_.linear);
    }
    for (Layer& layer : layers_)
      layer = {norm_.data(), nullptr, norm_.data(), nullptr, nullptr, nullptr, qkv_.linear, out_.linear, gate_up_.linear, down_.linear,
               Mixture{}, {20, 0, 0.25f, 0.0f, nullptr}, kHeads, 1, kHead, 0, 0, 0, 0, 0, 0, 0, 1.0f, 1.0f, 1.0f};
    // The last layer has experts, of which one is shared, and no MLP.
    Layer& last = layers_[kLayers - 1];
    std::fill(experts_gate_up_, experts_gate_up_ + kExperts + 1, gate_up_.linear);
    std::fill(experts_down_, experts_down_ + kExperts + 1, down_.linear);
    last.gate_up = last.down = Linear{};
    last.mixture = {{kExperts, 2, kSoftmax, 1, 1, 1, kGatedShared, 1.0f, nullptr, nullptr}, {kClampedGate, 1.7f, 7.0f}, 0, {},
                    router_.linear, experts_gate_up_, experts_down_};
    Model model{kLayers, kHidden, 2 * kPanel, kSiluGate, 0, 0, 0, 0, 1e-5f, 0.0f, layers_, norm_.data(),
                      qkv_.linear, {}};
    decoder_ = std::make_unique<ChainingDecoder>(model, pool);
    layers_[0].qkv = both_.linear;
    model.fusion = {fc_.linear, norm_.data(), norm_.data(), 1};
    head_ = std::make_unique<ChainingDecoder>(model, pool);
    share(model, pool);
  }

  // Makes a decoder whose last layer reads the keys and values of the first layer, with embeddings of token ids in both layers.
  void share(Model model, Pool& pool) {
    layers_[0].qkv = qkv_.linear;
    layers_[1].qkv = queries_.linear, layers_[1].shares = 1;
    for (Layer& layer : layers_) layer.embedding = {gate_.linear, up_.linear, norm_.data()};
    model.fusion = {};
    model.layer_inputs = {kSize, inputs_.linear, norm_.data(), 1e-5f};
    sharing_ = std::make_unique<ChainingDecoder>(model, pool);
  }

  void decode(ChainingDecoder& decoder, int64_t tokens) {
    const int64_t starts[] = {0, tokens}, lens[] = {tokens};
    const int64_t zeros[kLayers] = {};
    std::vector<int64_t> slots(tokens), rows(1 + tokens % 3);
    std::vector<int64_t> positions(tokens);
    for (int64_t i = 0; i < tokens; ++i) slots[i] = kChunk + i, positions[i] = i;
    for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<int64_t>(i) % tokens;
    const int32_t table[] = {1, 2, 3, 4, 5};
    std::vector<float> keys(6 * kChunk * kHead), values(keys.size());
    const Group group{slots.data(), table, 5, kChunk};
    const Cache caches[kLayers] = {{keys.data(), values.data(), kHead, kHead}, {keys.data(), values.data(), kHead, kHead}};
    const std::vector<float> cosines(tokens * kHead, 1.0f), sines(tokens * kHead);
    const Rotary rotary{cosines.data(), sines.data(), nullptr, kHead};
    const auto forward = [&](int64_t keep_states, std::vector<float>& logits, const std::vector<Segment>& segments = {},
                             const int64_t* key_ends = nullptr, const float* deepstack = nullptr) {
      std::vector<float> x = numbers(tokens * kHidden, 7);
      decoder.forward({tokens, 1, starts, lens, &group, zeros, caches, x.data(), nullptr, nullptr, 0, 1.0f, positions.data(), &rotary,
                       static_cast<int64_t>(rows.size()), rows.data(), logits.data(), keep_states, 0, kLayers, nullptr, nullptr, nullptr,
                       0, nullptr, nullptr, static_cast<int64_t>(segments.size()), segments.data(), nullptr, 0, key_ends, 0,
                       deepstack == nullptr ? 0 : kLayers, deepstack, nullptr, nullptr,
                       {table_.data(), kFloat32, 0.5f, positions.data()}});
      return x;
    };
    std::vector<float> logits(rows.size() * qkv_.linear.n), kept(logits.size()), again(logits.size());
    forward(0, logits);
    const std::vector<float> x = forward(1, kept);
    check(logits == kept, "logits depend on whether states are kept");
    decoder.head(x.data(), rows.data(), static_cast<int64_t>(rows.size()), again.data(), 0, nullptr);
    check(kept == again, "the head alone gives other logits");
    adapt(decoder, tokens, rows, x, forward);
    see(tokens, x, logits, forward);
  }

  // The same with an image in it, whose tokens see each other and have more rows behind all layers. Those before it are as without.
  template <class Forward>
  void see(int64_t tokens, const std::vector<float>& plain, std::vector<float>& logits, const Forward& forward) {
    const int64_t first = tokens / 3, end = std::max(first + 1, tokens / 2);
    std::vector<int64_t> ends(tokens);
    for (int64_t i = 0; i < tokens; ++i) ends[i] = i + 1;
    std::vector<float> none(kLayers * tokens * kHidden), deepstack(none);
    check(plain == forward(1, logits, {}, ends.data(), none.data()), "rows of nothing change something");
    std::fill(ends.begin() + first, ends.begin() + end, end);
    for (int64_t layer = 0; layer < kLayers; ++layer)
      std::fill_n(deepstack.begin() + (layer * tokens + first) * kHidden, (end - first) * kHidden, 1.5f);
    const std::vector<float> x = forward(1, logits, {}, ends.data(), deepstack.data());
    std::vector<float> few(logits.size());
    forward(0, few, {}, ends.data(), deepstack.data());
    check(few == logits, "logits with an image depend on whether states are kept");
    check(std::equal(plain.begin(), plain.begin() + first * kHidden, x.begin()), "an image changes tokens before it");
    check(plain != x, "an image changes nothing");
  }

  // The same with adapters of some tokens. Those before them are as without.
  template <class Forward>
  void adapt(ChainingDecoder& decoder, int64_t tokens, const std::vector<int64_t>& rows, const std::vector<float>& plain, const Forward& forward) {
    const int64_t first = tokens / 3, second = tokens / 2;
    std::vector<Segment> segments;
    if (first < second) segments.push_back(narrow_.of(first, second));
    segments.push_back(wide_adapter_.of(second, tokens));
    const int64_t count = static_cast<int64_t>(rows.size()), before = segments[0].first * kHidden;
    std::vector<float> logits(rows.size() * qkv_.linear.n), kept(logits.size()), again(logits.size());
    forward(0, logits, segments);
    const std::vector<float> x = forward(1, kept, segments);
    check(logits == kept, "logits with adapters depend on whether states are kept");
    check(std::equal(plain.begin(), plain.begin() + before, x.begin()), "adapters change tokens before theirs");
    check(plain != x, "adapters change nothing");
    decoder.head(x.data(), rows.data(), count, again.data(), static_cast<int64_t>(segments.size()), segments.data());
    check(kept == again, "the head alone gives other logits with adapters");
  }

  // Two requests, whose blocks take turns, go on for some tokens by one call, then token by token. `fuses`: beside hidden states.
  void go_on(ChainingDecoder& decoder, bool fuses, int64_t drafts) {
    const int64_t before[] = {13, 20}, counts[] = {drafts, (drafts + 1) / 2}, vocab = qkv_.linear.n, zeros[kLayers] = {};
    const int32_t table[] = {1, 3, 5, 2, 4, 6};
    std::vector<float> cosines(3 * kChunk * kHead), sines(cosines.size());
    for (size_t i = 0; i < cosines.size(); ++i) {
      const float angle = 0.7f * static_cast<float>(i / kHead);
      cosines[i] = std::cos(angle), sines[i] = std::sin(angle);
    }
    const Rotary rotary{cosines.data(), sines.data(), nullptr, kHead};
    const float temperatures[] = {0.0f, 1.5f};
    std::vector<double> uniforms(2 * drafts);
    for (size_t i = 0; i < uniforms.size(); ++i) uniforms[i] = static_cast<double>(i * 7 % 11) / 11;
    std::vector<float> keys(7 * kChunk * kHead), values(keys.size()), logits(2 * vocab);
    const Cache caches[kLayers] = {{keys.data(), values.data(), kHead, kHead}, {keys.data(), values.data(), kHead, kHead}};
    std::vector<int64_t> vocabulary(vocab - 3);  // of a head: every token is another
    for (int64_t i = 0; i < vocab - 3; ++i) vocabulary[i] = vocab - 1 - i;
    // Of each of the first requests the tokens from..end, and then so many in a chain. Gives what was put out for the last ones.
    const auto run = [&](const int64_t* from, const int64_t* end, const std::vector<int64_t>& ids, const std::vector<float>& states,
                         int64_t requests, int64_t first_draft, int64_t length, int64_t* tokens) {
      std::vector<int64_t> starts{0}, positions, slots, rows, later;
      for (int64_t r = 0; r < requests; ++r) {
        for (int64_t p = from[r]; p < end[r]; ++p)
          positions.push_back(p), slots.push_back(table[3 * r + p / kChunk] * kChunk + p % kChunk);
        starts.push_back(static_cast<int64_t>(positions.size()));
        rows.push_back(starts.back() - 1);
      }
      for (int64_t place = 1; place < length; ++place)
        for (int64_t r = 0; r < requests; ++r) later.push_back(end[r] + std::min(place, counts[r] - 1) - 1);
      const int64_t count = starts.back();
      std::vector<float> x(count * kHidden);
      const Group group{slots.data(), table, 3, kChunk};
      Step step{count, requests, starts.data(), end, &group, zeros, caches, x.data(), ids.data(), embedding_.data(), kFloat32, 0.5f,
                      positions.data(), &rotary, requests, rows.data(), logits.data(), 0, 0, kLayers, nullptr, nullptr, nullptr};
      step.states = states.data(), step.own_states = first_draft > 0;
      step.layer_rows = {table_.data(), kFloat32, 0.5f, ids.data()};
      const std::vector<int64_t> ones(requests, 1);
      decoder.chain(step, {length, 1, vocab - 3, length > 1 ? counts : ones.data(), later.data(), temperatures,
                           uniforms.data() + 2 * first_draft, tokens, fuses ? vocabulary.data() : nullptr});
      step.keep_states = 1;
      decoder.forward(step);
      std::vector<float> out;
      for (int64_t row : rows) out.insert(out.end(), x.begin() + row * kHidden, x.begin() + (row + 1) * kHidden);
      return out;
    };
    std::vector<int64_t> prompts(before[0] + before[1]), found(2 * drafts), tokens(2 * drafts);
    for (size_t i = 0; i < prompts.size(); ++i) prompts[i] = static_cast<int64_t>(i * 13) % vocab;
    const int64_t none[] = {0, 0};
    std::vector<float> states = numbers(before[0] * kStates + before[1] * kStates, 11);
    run(none, before, prompts, states, 2, 0, drafts, found.data());
    states = run(none, before, prompts, states, 2, 0, 1, tokens.data());
    for (int64_t place = 1; place < drafts; ++place) {
      const int64_t from[] = {before[0] + place - 1, before[1] + place - 1}, end[] = {from[0] + 1, from[1] + 1};
      const std::vector<int64_t> ids(tokens.begin() + 2 * (place - 1), tokens.begin() + 2 * place);
      states = run(from, end, ids, states, counts[1] > place ? 2 : 1, place, 1, tokens.data() + 2 * place);
    }
    check(found == tokens, "a chain gives other tokens than its steps");
  }

  void multiply(int64_t rows) {
    const std::vector<float> x = numbers(rows * 1024, static_cast<uint32_t>(rows));
    std::vector<float> out(rows * 40), one(40);
    operators_.linear(wide_.linear, x.data(), rows, 1024, out.data(), 40);
    operators_.linear(wide_.linear, x.data() + (rows - 1) * 1024, 1, 1024, one.data(), 40);
    check(std::equal(one.begin(), one.end(), out.end() - 40), "a row's product depends on those beside it");
    Adapter adapter(5, 11);
    adapter.add(wide_.linear);
    const Segment all[] = {adapter.of(rows / 2, rows)}, last[] = {adapter.of(0, 1)};
    operators_.low_rank(all, 1, 40, x.data(), 1024, out.data(), 40);
    operators_.low_rank(last, 1, 40, x.data() + (rows - 1) * 1024, 1024, one.data(), 40);
    check(std::equal(one.begin(), one.end(), out.end() - 40), "what an adapter adds depends on the rows beside it");
  }

  void draw(int64_t rows) {
    const int64_t width = 300;
    const std::vector<float> logits = numbers(rows * width, 3), temperatures(rows, 1.0f);
    const std::vector<double> uniforms(rows, 0.5);
    std::vector<float> peaks(rows);
    std::vector<int64_t> columns(rows, -1);
    operators_.sample({rows, width, logits.data(), temperatures.data(), uniforms.data(), peaks.data(), columns.data()});
    for (int64_t column : columns) check(column >= 0 && column < width, "a draw is out of range");
  }

  void work(int round) {
    decode(*decoder_, 1 + round * 7 % 40);
    decode(*sharing_, 1 + round * 11 % 40);
    go_on(*decoder_, false, 1 + round * 3 % 7);
    go_on(*sharing_, false, 1 + round * 2 % 7);
    go_on(*head_, true, 1 + round * 5 % 7);
    multiply(1 + round * 5 % 30);
    draw(1 + round % 9);
  }

 private:
  static constexpr int64_t kLayers = 2, kHidden = 32, kHeads = 2, kHead = 16, kStates = 3 * kHidden, kExperts = 3, kSize = 8;
  Operators operators_;
  std::vector<float> norm_;
  Weight qkv_, out_, gate_up_, down_, wide_, fc_, both_, router_, queries_, gate_, up_, inputs_;
  Linear experts_gate_up_[kExperts + 1], experts_down_[kExperts + 1];
  const std::vector<float> embedding_, table_;
  Adapter narrow_, wide_adapter_;
  Layer layers_[kLayers];
  std::unique_ptr<ChainingDecoder> decoder_, head_, sharing_;
};

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 100;
  std::mutex turn;
  Pool shared(3);
  std::vector<std::thread> callers;
  for (uint32_t i = 0; i < 3; ++i)
    callers.emplace_back([&, i] {
      for (int life = 0; life < 3; ++life) {
        Pool own(4);
        Caller alone(own, i);
        std::unique_ptr<Caller> beside;
        {
          const std::lock_guard<std::mutex> lock(turn);
          beside = std::make_unique<Caller>(shared, i);
        }
        for (int round = 0; round < rounds / 3; ++round) {
          alone.work(round + static_cast<int>(i));
          const std::lock_guard<std::mutex> lock(turn);
          beside->work(round);
        }
        own.quiet();
        const std::lock_guard<std::mutex> lock(turn);
        shared.quiet();
        beside.reset();
      }
    });
  for (std::thread& caller : callers) caller.join();
  shared.quiet();
  std::puts("every program gave what it should");
}
