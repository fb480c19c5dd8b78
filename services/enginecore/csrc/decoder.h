// A whole forward pass of a decoder of Llama's shape, as one program.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "attention.h"
#include "buffer.h"
#include "exchange.h"
#include "gemm.h"
#include "pool.h"

namespace penstock {

inline void rms_norm(const float* x, const float* weight, float* out, int64_t n, float eps) {
  vf squares{};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) squares += load(x + i) * load(x + i);
  float total = sum(squares);
  for (; i < n; ++i) total += x[i] * x[i];
  const float scale = 1.0f / std::sqrt(total / static_cast<float>(n) + eps);
  for (i = 0; i + kLanes <= n; i += kLanes) store(out + i, load(weight + i) * (load(x + i) * splat(scale)));
  for (; i < n; ++i) out[i] = weight[i] * (x[i] * scale);
}

// Rotates halves: (x, y) -> (x cos - y sin, y cos + x sin).
inline void rotate(float* x, const float* cosines, const float* sines, int64_t size) {
  const int64_t half = size / 2;
  for (int64_t i = 0; i < half; ++i) {
    const float a = x[i], b = x[i + half];
    x[i] = a * cosines[i] - b * sines[i];
    x[i + half] = b * cosines[i + half] + a * sines[i + half];
  }
}

class Decoder {
 public:
  Decoder(const Model& model, Pool& pool)
      : pool_(pool), model_(model), layers_(model.layers, model.layers + model.num_layers) {
    model_.layers = layers_.data();
    const auto look = [this](const Linear& linear) {
      if (splits(linear)) parts_width_ = std::max(parts_width_, row_width(linear));
    };
    for (const Layer& layer : layers_)
      for (const Linear* linear : {&layer.qkv, &layer.output, &layer.gate_up, &layer.down}) look(*linear);
    look(model_.head);
  }
  ~Decoder() { pool_.quiet(); }

  void forward(const Step& step) {
    pool_.prepare(kPhases * static_cast<int>(layers_.size()) + 2);
    step_ = step;
    const Model& m = model_;
    const int64_t tokens = step.num_tokens;
    num_tokens_ = tokens;
    num_rows_ = step.num_rows;
    qkv_.resize(tokens, (m.num_heads + 2 * m.num_kv_heads) * m.head_size);
    normed_.resize(std::max(tokens, step.num_rows), m.hidden);
    attended_.resize(tokens, m.num_heads * m.head_size);
    gated_.resize(tokens, m.intermediate);
    if (parts_width_ > 0) parts_.resize(std::max(tokens, step.num_rows), parts_width_);
    plan_attention(attention(0), plan_);  // the same for all layers
    num_attentions_ = static_cast<int64_t>(plan_.size());
    pool_.run(forward_job_);
  }

  void head(const float* x, const int64_t* rows, int64_t num_rows, float* logits) {
    pool_.prepare(2);
    step_ = Step{};
    step_.x = const_cast<float*>(x);
    step_.rows = rows;
    step_.num_rows = num_rows;
    step_.logits = logits;
    num_rows_ = num_rows;
    normed_.resize(num_rows, model_.hidden);
    if (parts_width_ > 0) parts_.resize(num_rows, parts_width_);
    pool_.run(head_job_);
  }

 private:
  const Group& group(size_t layer) const { return step_.groups[step_.layer_groups[layer]]; }

  Attention attention(size_t layer) const {
    const Model& m = model_;
    return Attention{step_.num_requests, step_.query_start, step_.seq_lens, group(layer),
                     step_.caches[layer], layers_[layer].params, m.num_heads, m.num_kv_heads, m.head_size, m.head_size,
                     qkv_.data(), qkv_.stride(), attended_.data(), attended_.stride()};
  }

  void run(Cursor& cursor) {
    for (size_t i = 0; i < layers_.size(); ++i)
      if (!layer(cursor, i)) return;
    logits(cursor);
  }

  // `task` for each token, some at a time.
  template <class Task>
  bool each_token(Cursor& cursor, const Task& task) {
    const int64_t tokens = num_tokens_;
    return cursor((tokens + kRowTask - 1) / kRowTask, [&](int64_t index) {
      for (int64_t t = index * kRowTask; t < std::min(tokens, (index + 1) * kRowTask); ++t) task(t);
    });
  }

  // Of rows that are multiplied with `linear` next.
  bool norm(Cursor& cursor, const float* weight, const Linear& linear) {
    return each_token(cursor, [&](int64_t t) {
      rms_norm(step_.x + t * model_.hidden, weight, normed_.row(t), model_.hidden, model_.eps);
      if (splits(linear)) split_row(linear, normed_.row(t), parts_.row(t));
    });
  }

  // Rows that no token's task of its own has put there.
  bool split(Cursor& cursor, const Buffer& from, const Linear& linear) {
    return !splits(linear) || each_token(cursor, [&](int64_t t) { split_row(linear, from.row(t), parts_.row(t)); });
  }

  // `output` says in a task where the sums go.
  template <class Where>
  bool product(Cursor& cursor, const Buffer& from, const Linear& linear, const Where& output) {
    const Blocks blocks(num_tokens_, linear.n);
    const Buffer& rows = splits(linear) ? parts_ : from;
    return cursor(blocks.tasks(), [&](int64_t task) { Product(rows.data(), rows.stride(), linear, output(), blocks)(task); });
  }

  bool layer(Cursor& cursor, size_t index) {
    const Layer& l = layers_[index];
    // Of several ranks one adds to what was there, and the others put their parts in its place.
    const Epilogue put = model_.exchange.rank == 0 ? Epilogue::kAdd : Epilogue::kStore;
    const auto residual = [&](const float* bias) {
      return [this, bias, put] { return Output{step_.x, model_.hidden, bias, model_.hidden, put}; };
    };
    if (!norm(cursor, l.input_norm, l.qkv)) return false;
    if (!product(cursor, normed_, l.qkv, [&] { return Output{qkv_.data(), qkv_.stride(), l.qkv.bias, l.qkv.n, Epilogue::kStore}; }))
      return false;
    if (!each_token(cursor, [&](int64_t t) { keep(index, t); })) return false;
    if (!cursor(num_attentions_, [&](int64_t task) { attend(attention(index), plan_[task]); })) return false;
    if (!split(cursor, attended_, l.output)) return false;
    if (!product(cursor, attended_, l.output, residual(l.output.bias))) return false;
    if (!add_up(cursor, 2 * index)) return false;
    if (!norm(cursor, l.post_norm, l.gate_up)) return false;
    if (!product(cursor, normed_, l.gate_up,
                 [&] { return Output{gated_.data(), gated_.stride(), nullptr, l.gate_up.n, Epilogue::kSilu}; }))
      return false;
    if (!split(cursor, gated_, l.down)) return false;
    if (!product(cursor, gated_, l.down, residual(l.down.bias))) return false;
    return add_up(cursor, 2 * index + 1);
  }

  // The sum of the ranks' parts of the hidden states, by one thread.
  bool add_up(Cursor& cursor, size_t index) {
    if (model_.exchange.base == nullptr) return true;
    return cursor(1, [&](int64_t) {
      const Exchange& e = model_.exchange;
      const int64_t began = nanoseconds();
      penstock_all_reduce(e.base, e.rank, e.size, e.piece, step_.x, step_.num_tokens * model_.hidden, 0);
      step_.sum_nanoseconds[index] = nanoseconds() - began;
    });
  }

  // Norms and rotates a token's queries and keys, and puts its keys and values into the cache.
  void keep(size_t index, int64_t token) {
    const Model& m = model_;
    const Layer& l = layers_[index];
    float* x = qkv_.row(token);
    const float* cosines = step_.cosines + token * m.head_size;
    const float* sines = step_.sines + token * m.head_size;
    for (int64_t head = 0; head < m.num_heads + m.num_kv_heads; ++head) {
      float* part = x + head * m.head_size;
      const float* weight = head < m.num_heads ? l.query_norm : l.key_norm;
      if (weight != nullptr) rms_norm(part, weight, part, m.head_size, m.eps);
      rotate(part, cosines, sines, m.head_size);
    }
    const int64_t keys = m.num_heads * m.head_size, values = keys + m.num_kv_heads * m.head_size;
    write_token({step_.num_tokens, group(index).slots, step_.caches[index], m.num_kv_heads, m.head_size, m.head_size,
                 qkv_.data() + keys, qkv_.stride(), qkv_.data() + values, qkv_.stride()},
                token);
  }

  void logits(Cursor& cursor) {
    const int64_t rows = num_rows_;
    if (rows == 0 || model_.head.n == 0) return;  // of a pipeline the last stage alone has a head
    const Linear& head = model_.head;
    if (!cursor(rows, [&](int64_t row) {
          rms_norm(step_.x + step_.rows[row] * model_.hidden, model_.final_norm, normed_.row(row), model_.hidden, model_.eps);
          if (splits(head)) split_row(head, normed_.row(row), parts_.row(row));
        }))
      return;
    const Blocks blocks(rows, head.n);
    const Buffer& from = splits(head) ? parts_ : normed_;
    cursor(blocks.tasks(), [&](int64_t task) {
      Product(from.data(), from.stride(), head, {step_.logits, head.n, head.bias, head.n, Epilogue::kStore}, blocks)(task);
    });
  }

  static constexpr int kPhases = 12;      // of a layer, sums over ranks and splitting of inputs among them
  static constexpr int64_t kRowTask = 4;  // tokens of a task that is done token by token
  Pool& pool_;
  const Pool::Job forward_job_{[](void* self, Cursor& cursor) { static_cast<Decoder*>(self)->run(cursor); }, this};
  const Pool::Job head_job_{[](void* self, Cursor& cursor) { static_cast<Decoder*>(self)->logits(cursor); }, this};
  Model model_;
  std::vector<Layer> layers_;
  Step step_{};
  Count num_tokens_, num_rows_, num_attentions_;
  int64_t parts_width_ = 0;  // floats of the widest row in parts
  Buffer qkv_, normed_, attended_, gated_, parts_;
  std::vector<AttentionTask> plan_;
};

}  // namespace penstock
