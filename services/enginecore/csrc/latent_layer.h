// Latent attention (MLA) in a decoder layer, between the layer's products `qkv` and `output`.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "attention_pairs.h"
#include "buffer.h"
#include "gemm.h"
#include "latent.h"
#include "model.h"
#include "parts.h"
#include "rows.h"

namespace penstock {

// Rotates the elements of a key or query in place, as `rotate` does. `order` says which elements are rotated together.
inline void rotate_in_order(float* x, const float* cosines, const float* sines, int64_t size, int64_t order) {
  if (order == kHalvesOrder) return rotate(x, cosines, sines, size);
  float rotated[kMaxLatentWidth];
  const int64_t half = size / 2;
  for (int64_t i = 0; i < half; ++i) {
    const float a = x[2 * i], b = x[2 * i + 1];
    const bool pairs = order == kPairsOrder;
    rotated[pairs ? 2 * i : i] = a * cosines[i] - b * sines[i];
    rotated[pairs ? 2 * i + 1 : i + half] = b * cosines[i] + a * sines[i];
  }
  std::memcpy(x, rotated, size * sizeof(float));
}

// Writes a row to a cache of latents.
inline void write_latent(const Cache& cache, int64_t slot, const float* row, int64_t width) {
#if defined(PENSTOCK_PAIRS)
  if (cache.pairs != 0) {
    uint16_t* to = static_cast<uint16_t*>(cache.keys) + slot * cache.key_stride;
    for (int64_t i = 0; i < width; i += 2 * kLanes) store_pairs(to + i, rounded(load(row + i), load(row + i + kLanes)));
    return;
  }
#endif
  std::memcpy(static_cast<float*>(cache.keys) + slot * cache.key_stride, row, width * sizeof(float));
}

// Memory for the intermediate results of a step's layers with latent attention, and the computation of these results for a token.
// Layers run one after the other and use the same memory.
class Latents {
 public:
  explicit Latents(const std::vector<Layer>& layers) {
    for (const Layer& layer : layers) {
      const Latent& l = layer.latent;
      if (l.num_heads == 0) continue;
      heads_ = std::max(heads_, l.num_heads);
      up_width_ = std::max(up_width_, l.up.n);
      low_width_ = std::max(low_width_, l.up.k);
      query_width_ = std::max(query_width_, l.num_heads * row_size(l));
      seen_width_ = std::max(seen_width_, l.num_heads * l.latent);
      if (splits(l.absorb[0])) split_width_ = std::max(split_width_, row_width(l.absorb[0]));
      if (splits(l.expand[0])) split_width_ = std::max(split_width_, row_width(l.expand[0]));
    }
  }

  void resize(int64_t tokens) {
    if (heads_ == 0) return;
    if (up_width_ > 0) low_.resize(tokens, low_width_), rows_.resize(tokens, up_width_);
    queries_.resize(tokens, query_width_);
    seen_.resize(tokens, seen_width_);
    if (split_width_ > 0) split_.resize(tokens * heads_, split_width_);
  }

  // Returns the number of elements of a row of the cache.
  static int64_t row_size(const Latent& l) { return l.latent + l.rotary_size; }

  // Returns the attention of a layer over its latents. `of` describes the step.
  Attention attention(const Latent& l, Attention of) const {
    of.num_heads = l.num_heads, of.num_kv_heads = 1, of.head_size = row_size(l), of.value_size = l.latent;
    of.query = queries_.data(), of.query_stride = queries_.stride(), of.output = seen_.data(), of.output_stride = seen_.stride();
    return of;
  }

  // Applies the norms to a token's output row of `qkv`, rotates its key, and writes its row into the cache.
  void keep(const Layer& layer, const Step& step, size_t index, int64_t slot, float* row, int64_t token) {
    const Latent& l = layer.latent;
    float* latent = row + layer.qkv.n - row_size(l);
    if (l.up.n > 0) {
      if (layer.query_norm != nullptr) rms_norm(row, layer.query_norm, low_.row(token), l.up.k, l.query_eps);
      else std::memcpy(low_.row(token), row, l.up.k * sizeof(float));
    }
    rms_norm(latent, layer.key_norm, latent, l.latent, l.key_eps);
    rotate(layer, step, latent + l.latent, token);
    write_latent(step.caches[index], slot, latent, row_size(l));
  }

  // Rotates the queries of all heads of a token, and prepares the inputs of the products `absorb`. `row` has the token's queries.
  void turn(const Layer& layer, const Step& step, float* row, int64_t token) {
    const Latent& l = layer.latent;
    const int64_t size = l.plain_size + l.rotary_size;
    for (int64_t head = 0; head < l.num_heads; ++head) {
      float *query = row + head * size, *rotated = query + l.plain_size;
      rotate(layer, step, rotated, token);
      std::memcpy(queries_.row(token) + head * row_size(l) + l.latent, rotated, l.rotary_size * sizeof(float));
      if (splits(l.absorb[head])) split_row(l.absorb[head], query, split_.row(token * heads_ + head));
    }
  }

  // Computes a task of the products that project queries into the latent space. `rows` has the queries of all tokens.
  void absorb(const Latent& l, const Buffer& rows, int64_t tokens, int64_t task) {
    multiply(l, l.absorb, rows, l.plain_size + l.rotary_size, queries_, row_size(l), tokens, task);
  }

  // Prepares the inputs of the products `expand` for a token, if these inputs are split into parts.
  void split_seen(const Latent& l, int64_t token) {
    for (int64_t head = 0; head < l.num_heads; ++head)
      split_row(l.expand[head], seen_.row(token) + head * l.latent, split_.row(token * heads_ + head));
  }

  // Computes a task of the products that project the outputs of attention to the heads' values.
  void expand(const Latent& l, const Buffer& out, int64_t tokens, int64_t task) {
    multiply(l, l.expand, seen_, l.latent, out, l.value_size, tokens, task);
  }

  // Returns the number of tasks of the products `linears` of all heads.
  static int64_t num_products(const Latent& l, const Linear* linears, int64_t tokens) {
    return l.num_heads * Blocks(tokens, linears[0].n).tasks();
  }

  // Inputs of the product `up`, and its outputs.
  const Buffer& low() const { return low_; }
  const Buffer& rows() const { return rows_; }

 private:
  static void rotate(const Layer& layer, const Step& step, float* x, int64_t token) {
    const Rotary& rotary = step.rotaries[layer.rotary];
    const int64_t at = step.positions[token] * layer.latent.rotary_size;
    rotate_in_order(x, rotary.cosines + at, rotary.sines + at, layer.latent.rotary_size, layer.latent.order);
  }

  void multiply(const Latent& l, const Linear* linears, const Buffer& from, int64_t from_size, const Buffer& to, int64_t to_size,
                int64_t tokens, int64_t task) {
    const Blocks blocks(tokens, linears[0].n);
    const int64_t head = task / blocks.tasks();
    const Linear& linear = linears[head];
    const bool split = splits(linear);
    const float* x = split ? split_.row(head) : from.data() + head * from_size;
    const Output output{to.data() + head * to_size, to.stride(), nullptr, linear.n, Epilogue::kStore};
    Product(x, split ? heads_ * split_.stride() : from.stride(), linear, output, blocks)(task % blocks.tasks());
  }

  int64_t heads_ = 0, up_width_ = 0, low_width_ = 0, query_width_ = 0, seen_width_ = 0, split_width_ = 0;  // maximum over all layers
  Buffer low_;         // inputs of the products `up`
  Buffer rows_;  // outputs of the products `up`: queries of all heads
  Buffer queries_;     // queries in the latent space, then their rotated part, for each head
  Buffer seen_;        // outputs of attention in the latent space
  Buffer split_;       // inputs of the products of single heads, split into bfloat16 parts
};

}  // namespace penstock
