// Recurrent layers of a decoder: the computation between the layer's products `qkv` and `output`.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "buffer.h"
#include "model.h"
#include "pool.h"
#include "rows.h"
#include "states.h"
#include "vec.h"

namespace penstock {

// Computation of a step's recurrent layers, and the memory for intermediate results. Layers run one after the other and use the
// same memory.
class Recurrent {
 public:
  explicit Recurrent(const std::vector<Layer>& layers) {
    for (const Layer& layer : layers) {
      const Recurrence& r = layer.recurrence;
      channels_ = std::max(channels_, r.channels);
      heads_ = std::max(heads_, r.num_heads);
      values_width_ = std::max(values_width_, r.num_heads * r.value_size);
    }
  }

  // Prepares a step. The scans of all layers have heads of the same sizes, so all layers use one plan.
  void begin(const Step& step, const std::vector<Layer>& layers, int threads) {
    if (channels_ == 0) return;
    memories_ = step.memories;
    states_ = *step.recurrent;
    num_sequences_ = states_.num_sequences;
    mixed_.resize(step.num_tokens, channels_);
    values_.resize(step.num_tokens, values_width_);
    numbers_.resize(step.num_tokens, 2 * heads_);
    tasks_.clear();
    for (const Layer& layer : layers)
      if (layer.recurrence.num_heads > 0 && tasks_.empty())
        plan_scan(states_, memory_of(layer.recurrence, StateMemory{}), threads, tasks_);
    num_scans_ = static_cast<int64_t>(tasks_.size());
  }

  int64_t num_convolutions(const Recurrence& r) const { return num_sequences_ * channel_blocks(r.channels); }
  int64_t num_scans() const { return num_scans_; }
  int64_t num_sequences() const { return num_sequences_; }
  // Returns the number of elements of the layer's output for a token.
  static int64_t width(const Recurrence& r) { return r.kind == kShortConvolution ? r.channels : r.num_heads * r.value_size; }

  // Multiplies the inputs of a short convolution by their gate. `row` is a token's output row of `qkv`.
  static void gate_inputs(const Recurrence& r, float* row) {
    float* inputs = row + r.channels_at;
    for (int64_t i = 0; i < r.channels; ++i) inputs[i] *= row[r.step_at + i];
  }

  void convolve(size_t layer, const Recurrence& r, const Buffer& rows, int64_t task) const {
    const Convolution convolution{memory(layer, r), r.weight, r.bias, r.silu, rows.data() + r.channels_at, rows.stride(),
                                  mixed_.data(), mixed_.stride()};
    ConvolutionTask(states_, convolution, task)();
  }

  // Computes the inputs of the scan (the linear recurrence) for one token, after the convolution.
  void prepare(const Recurrence& r, const Buffer& rows, int64_t token) {
    const float* row = rows.row(token);
    float *decays = numbers_.row(token), *mixed = mixed_.row(token);
    for (int64_t head = 0; head < r.num_heads; ++head) {
      const float step = std::clamp(softplus(row[r.step_at + head] + r.step_bias[head]), r.min_step, r.max_step);
      decays[head] = r.decay[head] * step;
      if (r.kind == kDuality) scale(mixed + head * r.value_size, step, values_.row(token) + head * r.value_size, r.value_size);
      else decays[heads_ + head] = 1.0f / (1.0f + std::exp(-row[r.beta_at + head]));
    }
    if (r.kind != kDeltaRule) return;
    const float query_scale = 1.0f / std::sqrt(static_cast<float>(r.key_size));
    for (int64_t head = 0; head < 2 * r.num_key_heads; ++head) {
      float* part = mixed + head * r.key_size;
      // The sum of squares is the mean of squares times the size, so this factor scales the vector to length 1.
      const float unit = rms_scale(part, r.key_size, kUnitEps / static_cast<float>(r.key_size)) / std::sqrt(static_cast<float>(r.key_size));
      scale(part, head < r.num_key_heads ? unit * query_scale : unit, part, r.key_size);
    }
  }

  void scan(size_t layer, const Recurrence& r, const Buffer& out, int64_t task) const {
    run_scan(states_, scan_of(layer, r, out), tasks_[task]);
  }

  void store_keys(size_t layer, const Recurrence& r, int64_t sequence) const {
    penstock::store_keys(states_, scan_of(layer, r, mixed_), sequence);
  }

  // Completes the layer's output for one token: skip connection, norm and gate. `row` is the token's output row of `qkv`.
  void finish(const Recurrence& r, const float* row, int64_t token, float* out) const {
    const float *gate = row + r.gate_at, *mixed = mixed_.row(token);
    if (r.kind == kShortConvolution) {
      for (int64_t i = 0; i < r.channels; ++i) out[i] = gate[i] * mixed[i];
      return;
    }
    if (r.skip != nullptr)
      for (int64_t head = 0; head < r.num_heads; ++head)
        for (int64_t i = head * r.value_size; i < (head + 1) * r.value_size; ++i) out[i] += r.skip[head] * mixed[i];
    if (r.gates_first) multiply_silu(out, gate, width(r));
    if (r.norm != nullptr)
      for (int64_t i = 0; i < width(r); i += r.norm_size) rms_norm(out + i, r.norm + i, out + i, r.norm_size, r.eps);
    if (!r.gates_first) multiply_silu(out, gate, width(r));
  }

 private:
  static constexpr float kUnitEps = 1e-6f;  // epsilon of transformers' function for vectors of length 1

  static float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

  static void scale(const float* from, float factor, float* to, int64_t n) {
    for (int64_t i = 0; i < n; ++i) to[i] = factor * from[i];
  }

  static void multiply_silu(float* out, const float* gate, int64_t n) {
    for (int64_t i = 0; i < n; i += kLanes) store_some(out + i, load_some(out + i, n - i) * silu(load_some(gate + i, n - i)), n - i);
  }

  static StateMemory memory_of(const Recurrence& r, StateMemory memory) {
    memory.channels = r.channels, memory.kernel = r.kernel;
    memory.num_heads = r.num_heads, memory.num_key_heads = r.num_key_heads;
    memory.key_size = r.key_size, memory.value_size = r.value_size, memory.decay_size = 1;
    return memory;
  }
  StateMemory memory(size_t layer, const Recurrence& r) const { return memory_of(r, memories_[layer]); }

  // Returns the scan of a layer. A row of the convolution's outputs has queries, keys and values in this order for the delta rule,
  // and values, keys and queries for the duality.
  Scan scan_of(size_t layer, const Recurrence& r, const Buffer& out) const {
    const int64_t keys = r.num_key_heads * r.key_size, values = r.num_heads * r.value_size;
    const float* mixed = mixed_.data();
    const bool delta = r.kind == kDeltaRule;
    return {memory(layer, r),
            delta ? mixed : mixed + values + keys, mixed_.stride(),
            delta ? mixed + keys : mixed + values, mixed_.stride(),
            delta ? mixed + 2 * keys : values_.data(), delta ? mixed_.stride() : values_.stride(),
            numbers_.data(), numbers_.stride(),
            delta ? numbers_.data() + heads_ : nullptr, numbers_.stride(),
            nullptr,
            out.data(), out.stride()};
  }

  int64_t channels_ = 0, heads_ = 0, values_width_ = 0;  // maxima over all layers
  StateStep states_{};
  const StateMemory* memories_ = nullptr;
  std::vector<ScanTask> tasks_;
  Count num_sequences_, num_scans_;
  Buffer mixed_;    // outputs of the convolution
  Buffer values_;   // values of the duality, multiplied by their steps
  Buffer numbers_;  // decays in the first half, and betas in the second half
};

}  // namespace penstock
