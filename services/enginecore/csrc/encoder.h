// Forward pass of an encoder, with attention in both directions, as one program of the thread pool (see pool.h). The texts of a step
// have different lengths and no padding. Attention reads keys and values of the step from memory with the layout of the KV cache,
// where each text begins with a new chunk. A row's results depend only on its own text.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "attention.h"
#include "buffer.h"
#include "encoder_model.h"
#include "gemm.h"
#include "parts.h"
#include "pool.h"
#include "rows.h"

namespace penstock {

class Encoder {
 public:
  Encoder(const EncoderModel& model, Pool& pool) : pool_(pool), model_(model), layers_(model.layers, model.layers + model.num_layers) {
    model_.layers = layers_.data();
    for (const EncoderLayer& layer : layers_) {
      for (const Linear* linear : {&layer.qkv, &layer.output, &layer.up, &layer.down})
        if (splits(*linear)) parts_width_ = std::max(parts_width_, row_width(*linear));
      if (layer.params.window > 0) windows_.push_back(layer.params.window);
    }
    std::sort(windows_.begin(), windows_.end());
    windows_.erase(std::unique(windows_.begin(), windows_.end()), windows_.end());
  }
  ~Encoder() { pool_.quiet(); }

  void forward(const EncoderStep& step) {
    if (step.num_tokens == 0) return;
    pool_.prepare(kPhases * static_cast<int>(model_.num_layers) + kOtherPhases);
    step_ = step;
    const EncoderModel& m = model_;
    num_tokens_ = step.num_tokens;
    qkv_.resize(step.num_tokens, (m.num_heads + 2 * m.num_kv_heads) * m.head_size);
    attended_.resize(step.num_tokens, m.num_heads * m.head_size);
    gated_.resize(step.num_tokens, m.intermediate * (m.gated ? 2 : 1));
    if (m.post_norm == 0) normed_.resize(step.num_tokens, m.hidden);
    if (parts_width_ > 0) parts_.resize(step.num_tokens, parts_width_);
    place_texts();
    plan_attention(attention(layers_[0], ends_[0].data()), pool_.threads(), plan_);
    num_attentions_ = static_cast<int64_t>(plan_.tasks.size());
    num_merges_ = static_cast<int64_t>(plan_.merges.size());
    sums_.resize(plan_.num_parts, part_width(m.head_size));
    pool_.run(job_);
  }

 private:
  // Part of a text whose keys and values are in one chunk.
  struct Chunk {
    int64_t text, first, end;  // tokens first..end - 1
  };

  // Gives each text consecutive chunks of the memory for keys and values, and finds the ends of each token's visible keys.
  void place_texts() {
    const EncoderModel& m = model_;
    chunks_.clear();
    lengths_.resize(step_.num_texts);
    slots_.resize(step_.num_tokens);
    ends_.resize(1 + windows_.size());
    for (auto& ends : ends_) ends.resize(step_.num_tokens);
    int64_t longest = 0;
    for (int64_t text = 0; text < step_.num_texts; ++text) longest = std::max(longest, step_.starts[text + 1] - step_.starts[text]);
    table_stride_ = (longest + kChunk - 1) / kChunk;
    table_.assign(step_.num_texts * table_stride_, 0);
    for (int64_t text = 0; text < step_.num_texts; ++text) {
      const int64_t start = step_.starts[text], end = step_.starts[text + 1];
      const int64_t visible = step_.num_attended == nullptr ? end : std::min(end, start + step_.num_attended[text]);
      lengths_[text] = end - start;
      for (int64_t first = start; first < end; first += kChunk) {
        const auto chunk = static_cast<int64_t>(chunks_.size());
        chunks_.push_back({text, first, std::min(first + kChunk, end)});
        table_[text * table_stride_ + (first - start) / kChunk] = static_cast<int32_t>(chunk);
        for (int64_t token = first; token < chunks_.back().end; ++token) {
          slots_[token] = chunk * kChunk + token - first;
          ends_[0][token] = visible - start;
          for (size_t w = 0; w < windows_.size(); ++w) ends_[1 + w][token] = std::min(visible, token + windows_[w]) - start;
        }
      }
    }
    num_chunks_ = static_cast<int64_t>(chunks_.size());
    const int64_t size = num_chunks_ * kChunk * m.num_kv_heads * m.head_size;
    if (size > cache_size_) {
      keys_.assign(size, 0.0f), values_.assign(size, 0.0f);  // zeros, because multiplied rows of a chunk must not be NaN
      cache_size_ = size;
    }
  }

  Attention attention(const EncoderLayer& layer, const int64_t* ends) {
    const EncoderModel& m = model_;
    const int64_t stride = m.num_kv_heads * m.head_size;
    return {step_.num_texts, step_.starts, lengths_.data(), {slots_.data(), table_.data(), table_stride_, kChunk},
            {keys_.data(), values_.data(), stride, stride, m.pairs}, layer.params, m.num_heads, m.num_kv_heads, m.head_size, m.head_size,
            qkv_.data(), qkv_.stride(), attended_.data(), attended_.stride(), ends};
  }
  Attention attention(const EncoderLayer& layer) {
    const auto at = std::lower_bound(windows_.begin(), windows_.end(), layer.params.window) - windows_.begin();
    return attention(layer, ends_[layer.params.window > 0 ? 1 + at : 0].data());
  }

  void run(Cursor& cursor) {
    const EncoderModel& m = model_;
    if (!tokens(cursor, [this](int64_t t) { embed(t); })) return;
    for (size_t i = 0; i < layers_.size(); ++i) {
      const EncoderLayer& l = layers_[i];
      const float* before = m.post_norm == 0 ? l.attention_norm : i > 0 ? layers_[i - 1].mlp_norm : nullptr;
      if (!norm(cursor, before, l.qkv)) return;
      if (!product(cursor, l.qkv, kNormed, [this] { return &qkv_; })) return;
      if (!cursor(num_chunks_, [&](int64_t chunk) { keep(l, chunks_[chunk]); })) return;
      if (!cursor(num_attentions_, [&](int64_t task) { attend(attention(l), plan_.tasks[task], sums_); })) return;
      if (!cursor(num_merges_, [&](int64_t task) { merge_segments(attention(l), plan_.merges[task], sums_); })) return;
      if (splits(l.output) && !tokens(cursor, [&](int64_t t) { split_row(l.output, attended_.row(t), parts_.row(t)); })) return;
      if (!product(cursor, l.output, kAttended, kResidual)) return;
      if (!norm(cursor, m.post_norm == 0 ? l.mlp_norm : l.attention_norm, l.up)) return;
      if (!product(cursor, l.up, kNormed, [this] { return &gated_; })) return;
      if (!tokens(cursor, [&](int64_t t) { activate_row(l, t); })) return;
      if (!product(cursor, l.down, kGated, kResidual)) return;
    }
    const float* last = m.post_norm == 0 ? m.final_norm : layers_.back().mlp_norm;
    tokens(cursor, [&](int64_t t) {
      if (last != nullptr) apply(last, m.eps, state(t), state(t));
    });
  }

  float* state(int64_t token) const { return step_.x + token * model_.hidden; }

  // Runs `task` for each token.
  template <class Task>
  bool tokens(Cursor& cursor, const Task& task) {
    const int64_t count = num_tokens_;
    return cursor((count + kRowTask - 1) / kRowTask, [&](int64_t index) {
      for (int64_t t = index * kRowTask; t < std::min(count, (index + 1) * kRowTask); ++t) task(t);
    });
  }

  void apply(const float* weight, float eps, const float* x, float* out) const {
    (model_.centers ? layer_norm : rms_norm)(x, weight, out, model_.hidden, eps);
  }

  void embed(int64_t token) {
    const EncoderModel& m = model_;
    const int64_t n = m.hidden;
    float* x = state(token);
    if (step_.token_ids == nullptr) return;
    const int64_t word = step_.token_ids[token] * n;
    if (m.half_words == 0) std::memcpy(x, static_cast<const float*>(m.words) + word, n * sizeof(float));
    else
      for (int64_t i = 0; i < n; ++i) x[i] = kept_weight(static_cast<const uint16_t*>(m.words)[word + i]);
    if (m.types != nullptr) add(x, m.types + step_.type_ids[token] * n);
    if (m.positions != nullptr) add(x, m.positions + step_.position_ids[token] * n);
    if (m.embedding_norm != nullptr) apply(m.embedding_norm, m.embedding_eps, x, x);
  }

  void add(float* x, const float* row) const {
    for (int64_t i = 0; i < model_.hidden; ++i) x[i] += row[i];
  }

  // Writes the input rows of the product with `linear`. `weight` is the norm of the rows, or null.
  bool norm(Cursor& cursor, const float* weight, const Linear& linear) {
    return tokens(cursor, [&](int64_t t) {
      const EncoderModel& m = model_;
      float* row = m.post_norm != 0 ? state(t) : normed_.row(t);
      if (weight != nullptr) apply(weight, m.eps, state(t), row);
      else if (m.post_norm == 0) std::memcpy(row, state(t), m.hidden * sizeof(float));
      if (splits(linear)) split_row(linear, row, parts_.row(t));
    });
  }

  enum From { kNormed, kAttended, kGated };
  static constexpr std::nullptr_t kResidual = nullptr;

  // Computes the product of input rows with `linear`. The result is written to the buffer that `to` returns, or added to the hidden
  // states. If the product splits its inputs, the rows are already split.
  template <class To>
  bool product(Cursor& cursor, const Linear& linear, From from, const To& to) {
    const Blocks blocks(num_tokens_, linear.n);
    return cursor(blocks.tasks(), [&](int64_t task) {
      const Buffer& rows = splits(linear) ? parts_ : from == kNormed ? normed_ : from == kAttended ? attended_ : gated_;
      const bool states = !splits(linear) && from == kNormed && model_.post_norm != 0;
      Output output{step_.x, model_.hidden, linear.bias, linear.n, Epilogue::kAdd};
      if constexpr (!std::is_same_v<To, std::nullptr_t>)
        output = {to()->data(), to()->stride(), linear.bias, linear.n, Epilogue::kStore};
      Product(states ? step_.x : rows.data(), states ? model_.hidden : rows.stride(), linear, output, blocks)(task);
    });
  }

  // Rotates the queries and keys of a chunk's tokens, and writes their keys and values into the memory that attention reads.
  void keep(const EncoderLayer& l, const Chunk& chunk) {
    const EncoderModel& m = model_;
    const int64_t keys = m.num_heads * m.head_size, values = keys + m.num_kv_heads * m.head_size;
    if (l.cosines != nullptr) {
      for (int64_t token = chunk.first; token < chunk.end; ++token) {
        const int64_t position = token - step_.starts[chunk.text];
        const float *cosines = l.cosines + position * l.rotary_size, *sines = l.sines + position * l.rotary_size;
        for (int64_t at = 0; at < values; at += m.head_size) rotate(qkv_.row(token) + at, cosines, sines, l.rotary_size);
      }
    }
    write_tokens({step_.num_tokens, slots_.data(), attention(l).cache, m.num_kv_heads, m.head_size, m.head_size, qkv_.data() + keys,
                  qkv_.stride(), qkv_.data() + values, qkv_.stride()},
                 chunk.first, chunk.end);
  }

  // Applies the activation to a token's output of `up`, and writes the input row of `down`.
  void activate_row(const EncoderLayer& l, int64_t token) {
    const EncoderModel& m = model_;
    float* row = gated_.row(token);
    if (m.activation == kSiluGate) each_vector(row, m.intermediate, silu);
    else activate(row, m.intermediate, m.activation);
    if (m.gated != 0)
      for (int64_t i = 0; i < m.intermediate; ++i) row[i] *= row[m.intermediate + i];
    if (splits(l.down)) split_row(l.down, row, parts_.row(token));
  }

  static constexpr int kPhases = 11, kOtherPhases = 2;  // maximum of phases of a layer, and of embeddings and the last norm
  static constexpr int64_t kRowTask = 4;                // number of tokens of a task that processes tokens one by one
  Pool& pool_;
  const Pool::Job job_{[](void* self, Cursor& cursor) { static_cast<Encoder*>(self)->run(cursor); }, this};
  EncoderModel model_;
  std::vector<EncoderLayer> layers_;
  std::vector<int64_t> windows_;  // windows of the layers, each once
  EncoderStep step_{};
  Count num_tokens_, num_chunks_, num_attentions_, num_merges_;
  AttentionPlan plan_;
  int64_t parts_width_ = 0;  // size in floats of the widest row that is split into parts
  Buffer qkv_, normed_, attended_, gated_, parts_, sums_;
  std::vector<Chunk> chunks_;
  std::vector<int64_t> lengths_, slots_;
  std::vector<int32_t> table_;  // chunks of each text
  int64_t table_stride_ = 0;
  std::vector<std::vector<int64_t>> ends_;  // ends of each token's visible keys: without a window, and for each window
  std::vector<float> keys_, values_;
  int64_t cache_size_ = 0;
};

}  // namespace penstock
