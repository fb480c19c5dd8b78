// Forward pass of a decoder as one program of the thread pool (see pool.h). A layer consists of norm, attention with rotary
// embedding, residual addition, norm, MLP or mixture of experts, and residual addition. Some models also apply norms or factors to
// the outputs of attention and MLP before the additions. In some models, attention and MLP of a layer have the same input. Layers
// of some models have both an MLP and a mixture of experts, or add an embedding of the token's id at their end.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "additions.h"
#include "attention.h"
#include "buffer.h"
#include "exchange.h"
#include "fusion.h"
#include "gemm.h"
#include "heads.h"
#include "latent_layer.h"
#include "layer_embeddings.h"
#include "layer_plans.h"
#include "lora.h"
#include "mixing.h"
#include "pool.h"
#include "recurrent.h"
#include "rows.h"

namespace penstock {

class Decoder {
 public:
  Decoder(const Model& model, Pool& pool)
      : pool_(pool), model_(model), layers_(model.layers, model.layers + model.num_layers), first_of_few_(first_of_few(layers_)),
        plans_(layers_), recurrent_(layers_), latents_(layers_), embeddings_(model) {
    model_.layers = layers_.data();
    const auto look = [this](const Linear& linear) {
      if (splits(linear)) parts_width_ = std::max(parts_width_, row_width(linear));
    };
    for (const Layer& layer : layers_) {
      gated_width_ = std::max(gated_width_, rounds(layer.down) && gates() ? row_width(layer.down) : model.intermediate);
      for (const Linear* linear : {&layer.qkv, &layer.output, &layer.gate_up, &layer.down, &layer.mixture.router}) look(*linear);
      if (layer.latent.num_heads > 0) look(layer.latent.up);
      if (layer.embedding.gate.n > 0) look(layer.embedding.gate), look(layer.embedding.projection);
      mixes_ = mixes_ || layer.mixture.routing.num_experts > 0;
      qkv_width_ = std::max(qkv_width_, layer.qkv.n + (layer.keys_as_values ? layer.num_kv_heads * layer.head_size : 0));
      heads_width_ = std::max(heads_width_, layer.output.k);
      changes_ = changes_ || has_both(layer) || after_attention(layer).changes() || after_mlp(layer).changes();
    }
    changes_ = changes_ || embeddings_.exist();
    for (const Linear* linear : {&model_.head, &model_.fusion.fc, &model_.layer_inputs.projection}) look(*linear);
    if (mixes_) mixing_.measure(layers_);
  }
  ~Decoder() { pool_.quiet(); }

  void forward(const Step& step) {
    const int64_t calls = std::min<int64_t>(step.last + 1, model_.num_layers) - step.first;
    pool_.prepare(kPhases * static_cast<int>(calls) + kFirstPhases + kHeadPhases);
    step_ = step;
    first_ = step.first, last_layer_ = step.last;
    num_embedded_ = step.first == 0 && step.embedding != nullptr ? step.num_tokens : 0;
    if (step.first == 0) begin(step);
    num_deep_ = step.last == model_.num_layers && step.num_deepstack == model_.num_layers ? int64_t{counts_[kLast]} : 0;
    pool_.run(forward_job_);
  }

  void head(const float* x, const int64_t* rows, int64_t num_rows, float* logits, int64_t num_segments, const Segment* segments) {
    pool_.prepare(kHeadPhases);
    step_ = Step{};
    step_.x = const_cast<float*>(x);
    step_.rows = rows;
    step_.num_rows = num_rows;
    step_.logits = logits;
    num_rows_ = num_rows;
    gathered_ = false;
    states_[kLast] = step_.x;
    normed_.resize(num_rows, model_.hidden);
    if (parts_width_ > 0) parts_.resize(num_rows, parts_width_);
    take_segments(segments, num_segments, rows, num_rows, adapted_[kHead]);
    plan_adapters(kHead, num_rows);
    pool_.run(head_job_);
  }

 protected:
  // Returns the last layer's output for the token to which row `row` of the last step's logits belongs.
  const float* state(int64_t row) const { return states_[kLast] + (gathered_ ? row : step_.rows[row]) * model_.hidden; }

 private:
  // Prepares data that is the same in all calls of a step.
  void begin(const Step& step) {
    const Model& m = model_;
    const int64_t tokens = step.num_tokens;
    const bool keeps = step.keep_states || (step.num_kept > 0 && layers_.back().shares != 0);
    const bool few = !keeps && m.head.n > 0 && step.num_rows < tokens;
    num_rows_ = step.num_rows;
    num_gathered_ = few ? step.num_rows : 0;
    gathered_ = few;
    counts_[kAll] = tokens, counts_[kLast] = few ? step.num_rows : tokens;
    if (few) last_.resize(step.num_rows * m.hidden), kept_.resize(step.num_rows, heads_width_);
    if (few && layers_.back().shares != 0) queries_.resize(step.num_rows, heads_width_);
    states_[kAll] = step.x, states_[kLast] = few ? last_.data() : step.x;
    heads_[kAll] = &attended_, heads_[kLast] = few ? &kept_ : &attended_;
    qkv_.resize(tokens, qkv_width_);
    normed_.resize(std::max(tokens, step.num_rows), m.hidden);
    attended_.resize(tokens, heads_width_);
    recurrent_.begin(step, layers_, pool_.threads());
    latents_.resize(tokens);
    embeddings_.resize(tokens);
    gated_.resize(tokens, gated_width_);
    if (changes_) added_.resize(std::max(tokens, step.num_rows) * m.hidden);
    if (mixes_) mixing_.resize(tokens, m.hidden);
    if (parts_width_ > 0) parts_.resize(std::max(tokens, step.num_rows), parts_width_);
    if (fuses()) both_.resize(tokens, 2 * m.hidden);
    num_fused_ = m.fusion.state_norm != nullptr && step.own_states ? 0 : tokens;
    const auto plannable = [this](size_t layer) {
      Attention of_layer = attention(layer);
      of_layer.key_ends = step_.key_ends;  // layers with and without `key_ends` share plans
      return of_layer;
    };
    plans_.plan(step, plannable, pool_.threads(), few);
    segments_.resize(plans_.num_parts(), plans_.width());
    adapted_[kAll].assign(step.segments, step.segments + step.num_segments);
    take_segments(step.segments, step.num_segments, step.rows, step.num_rows, adapted_[kHead]);
    adapted_[kLast] = few ? adapted_[kHead] : adapted_[kAll];
    for (int part : {kAll, kLast, kHead}) plan_adapters(part, std::max(tokens, step.num_rows));
  }

  // Plans the computation of LoRA adapters for the set `part` of tokens, which has at most `rows` rows.
  void plan_adapters(int part, int64_t rows) {
    int64_t width = 0;
    for (const Segment& of : adapted_[part]) width = std::max(width, of.width);
    shrinkings_[part].cut(adapted_[part], pool_.threads());
    num_shrinkings_[part] = shrinkings_[part].size();
    if (width > 0) shrunk_.resize(rows, std::max(width, shrunk_width_)), shrunk_width_ = std::max(width, shrunk_width_);
  }

  const Group& group(size_t layer) const { return step_.groups[step_.layer_groups[layer]]; }

  Attention attention(size_t layer) const {
    const Layer& l = layers_[layer];
    const int64_t* ends = step_.windowed_ends != 0 && l.params.window == 0 ? nullptr : step_.key_ends;
    const Attention of_heads{step_.num_requests, step_.query_start, step_.seq_lens, group(layer),
                             step_.caches[layer], l.params, l.num_heads, l.num_kv_heads, l.head_size, l.head_size,
                             qkv_.data(), qkv_.stride(), attended_.data(), attended_.stride(), ends};
    return l.latent.num_heads > 0 ? latents_.attention(l.latent, of_heads) : of_heads;
  }

  void run(Cursor& cursor) {
    const int64_t first = first_, last = last_layer_;
    const auto embed = [this](int64_t t) { embed_token(step_, t, model_.hidden, step_.x + t * model_.hidden); };
    if (fuses() ? !fuse(cursor) : !cursor(num_embedded_, embed)) return;
    if (first > 0 && !(take_mlp(cursor, first - 1) && add_embedding(cursor, first - 1))) return;
    if (first == 0 && embeddings_.exist() && !compute_layer_inputs(cursor)) return;
    for (int64_t i = first; i <= last && i < static_cast<int64_t>(layers_.size()); ++i) {
      if (!attend_layer(cursor, i)) return;
      if (i == last) {
        give_mlp(cursor, i);
        return;
      }
      if (!layers_[i].alone && !mlp(cursor, i)) return;
      if (!add_embedding(cursor, i)) return;
    }
    if (!cursor(num_deep_, [this](int64_t t) {
          add_deepstack(layers_.size() - 1, gathered_ ? step_.rows[t] : t, states_[kLast] + t * model_.hidden);
        }))
      return;
    logits(cursor);
  }

  bool fuses() const { return model_.fusion.fc.n > 0; }
  bool gates() const { return model_.activation == kSiluGate || model_.activation == kGeluGate; }
  static bool has_both(const Layer& layer) { return layer.gate_up.n > 0 && layer.mixture.routing.num_experts > 0; }

  // Computes the input of the first layer in an EAGLE head (see `Fusion` in model.h).
  bool fuse(Cursor& cursor) {
    const Linear& fc = model_.fusion.fc;
    if (!each_token(cursor, kAll, [this](int64_t t) { put_both(model_, step_, t, both_, parts_); })) return false;
    const Blocks blocks(num_fused_, fc.n);
    return cursor(blocks.tasks(), [&](int64_t task) {
      const bool alone = model_.fusion.state_norm != nullptr;
      const float* from = splits(fc) ? parts_.data() : alone ? step_.states : both_.data();
      const int64_t stride = splits(fc) ? parts_.stride() : alone ? fc.k : both_.stride();
      Product(from, stride, fc, {step_.x, model_.hidden, fc.bias, fc.n, Epilogue::kStore}, blocks)(task);
    });
  }

  // Returns the tokens that a layer computes after its attention, and those that it computes before its attention.
  int part_of(size_t layer) const { return layer >= first_of_few_ ? kLast : kAll; }
  int part_before(size_t layer) const { return layers_[layer].shares != 0 ? part_of(layer) : kAll; }

  // Returns the index of the step's token that has the row `row` of a part.
  int64_t token_of(int part, int64_t row) const { return part == kLast && gathered_ ? step_.rows[row] : row; }

  // Writes the input of a layer's MLP to `mlp_input`, because the MLP is computed outside the kernels.
  void give_mlp(Cursor& cursor, size_t index) {
    const int part = part_of(index);
    const Layer& l = layers_[index];
    const int64_t n = model_.hidden;
    each_token(cursor, part, [&](int64_t t) {
      if (l.parallel) std::memcpy(step_.mlp_input + t * n, normed_.row(t), n * sizeof(float));
      else norm_state(part, t, l.mlp_norm, step_.mlp_input + t * n);
    });
  }

  // Adds `mlp_output`, the output of a layer's MLP that was computed outside the kernels, to the hidden states.
  bool take_mlp(Cursor& cursor, size_t index) {
    return add(cursor, part_of(index), after_mlp(layers_[index]), [this]() -> const float* { return step_.mlp_output; });
  }

  // Adds the rows of `from` to the hidden states, with the changes `after`.
  template <class From>
  bool add(Cursor& cursor, int part, const Change& after, const From& from) {
    return each_token(cursor, part, [&](int64_t t) { add_row(states_[part] + t * model_.hidden, from() + t * model_.hidden, after); });
  }

  void add_row(float* to, const float* from, const Change& after) const {
    add_changed(to, from, model_.hidden, after, model_.centers != 0, model_.eps);
  }

  // Copies data of the tokens whose logits are needed, before the layer `index` or after its attention. From `first_of_few` on, the
  // layers compute only these tokens, except if `keep_states` is not 0.
  bool gather(Cursor& cursor, size_t index, bool before) {
    const bool states = index == first_of_few_ && before == (layers_[index].shares != 0);
    if (index < first_of_few_ || (before && !states)) return true;
    return cursor(num_gathered_, [this, before, states](int64_t i) {
      const int64_t token = step_.rows[i], n = model_.hidden;
      if (states) std::memcpy(last_.data() + i * n, step_.x + token * n, n * sizeof(float));
      if (!before) std::memcpy(kept_.row(i), attended_.row(token), heads_width_ * sizeof(float));
    });
  }

  // Runs `task` for ranges of tokens. If there are many tokens, tokens whose keys are stored together are in one range, so that
  // only one thread writes to each cache line.
  template <class Task>
  bool some_tokens(Cursor& cursor, int part, const Task& task) {
    const int64_t tokens = counts_[part], some = tokens >= kManyTokens ? kChunk : kRowTask;
    return cursor((tokens + some - 1) / some, [&](int64_t index) { task(index * some, std::min(tokens, (index + 1) * some)); });
  }

  // Runs `task` for each token.
  template <class Task>
  bool each_token(Cursor& cursor, int part, const Task& task) {
    return some_tokens(cursor, part, [&](int64_t first, int64_t end) {
      for (int64_t t = first; t < end; ++t) task(t);
    });
  }

  void norm_state(int part, int64_t token, const float* weight, float* out) const {
    const float* state = states_[part] + token * model_.hidden;
    if (weight != nullptr) apply_norm(model_, state, weight, out, model_.hidden);
    else std::memcpy(out, state, model_.hidden * sizeof(float));
  }

  // Writes the inputs of a layer's MLP as input rows of the MLP's first product, which uses `linear`. `weight` is the norm of the
  // inputs. In a parallel layer, the inputs are already in `normed_`.
  bool norm_mlp(Cursor& cursor, int part, const Layer& layer, const float* weight, const Linear& linear) {
    if (layer.parallel) return split(cursor, part, [this]() -> const Buffer& { return normed_; }, linear);
    return each_token(cursor, part, [&](int64_t t) { norm_row(part, t, weight, linear); });
  }

  void norm_row(int part, int64_t token, const float* weight, const Linear& linear) {
    norm_state(part, token, weight, normed_.row(token));
    if (splits(linear)) split_row(linear, normed_.row(token), parts_.row(token));
  }

  // Copies the input of a layer for a token to `hidden`, if `kept_layers` contains the layer.
  void give_hidden(size_t layer, int64_t token) const {
    const int64_t n = model_.hidden;
    for (int64_t i = 0; i < step_.num_kept; ++i) {
      if (step_.kept_layers[i] != static_cast<int64_t>(layer)) continue;
      std::memcpy(step_.hidden + (token * step_.num_kept + i) * n, states_[kAll] + token * n, n * sizeof(float));
    }
  }

  // Returns whether deepstack embeddings are added between the previous layer and this layer.
  bool is_deep(size_t layer) const { return layer > 0 && static_cast<int64_t>(layer) <= step_.num_deepstack; }
  void add_deepstack(size_t layer, int64_t token, float* to) const {
    add_row(to, step_.deepstack + (static_cast<int64_t>(layer) * step_.num_tokens + token) * model_.hidden, {});
  }

  // Splits the rows of `from` into bfloat16 parts (see parts.h), if the tasks that wrote the rows have not split them.
  template <class From>
  bool split(Cursor& cursor, int part, const From& from, const Linear& linear) {
    return !splits(linear) || each_token(cursor, part, [&](int64_t t) { split_row(linear, from().row(t), parts_.row(t)); });
  }

  // Computes the small sums of LoRA adapters (see lora.h) for the input rows of the next product. `place` is the index of the
  // adapters' update for this product. If `rounded` is true, the rows are bfloat16.
  template <class From>
  bool shrink(Cursor& cursor, int part, const From& from, int64_t place, bool rounded = false) {
    return cursor(num_shrinkings_[part], [&](int64_t task) {
      const Buffer& rows = from();
      const auto& shrinking = shrinkings_[part];
      if (rounded) {
        const auto* halves = reinterpret_cast<const uint16_t*>(rows.data());
        shrinking(task, adapted_[part], place, halves, 2 * rows.stride(), shrunk_.data(), shrunk_.stride());
      } else {
        shrinking(task, adapted_[part], place, rows.data(), rows.stride(), shrunk_.data(), shrunk_.stride());
      }
    });
  }

  // Returns the LoRA adapters of a product, for tasks that run after `shrink`.
  LowRank low_rank(int part, int64_t place) const {
    return {adapted_[part].data(), static_cast<int64_t>(adapted_[part].size()), place, shrunk_.data(), shrunk_.stride()};
  }

  // Computes a matrix product. Inside a task, `from` returns the address of the input rows, and `output` the address of the sums.
  // If `split` is true, the rows are already split into parts. `place` is the index of the adapters' update for this product, or
  // kNone.
  template <class From, class Where>
  bool product(Cursor& cursor, int part, const From& from, const Linear& linear, const Where& output, int64_t place, bool split = true) {
    const Blocks blocks(counts_[part], linear.n);
    return cursor(blocks.tasks(), [&](int64_t task) {
      const Buffer& rows = split && splits(linear) ? parts_ : from();
      const LowRank adapters = low_rank(part, place);
      Output where = output();
      if (place != kNone && adapters.count > 0) where.low_rank = &adapters;
      Product(rows.data(), rows.stride(), linear, where, blocks)(task);
    });
  }

  // Returns where the product writes the output of attention or MLP. Usually the output is added to the hidden states. With several
  // ranks, one rank adds its output to its hidden states, and each other rank overwrites its hidden states with its output. The sum
  // over the ranks is then the new hidden states. Outputs that change before the addition are written to another buffer.
  Output residual(int part, const Linear& linear, const Change& after) {
    const Epilogue put = !after.changes() && model_.exchange.rank == 0 ? Epilogue::kAdd : Epilogue::kStore;
    return {residual_rows(part, after), model_.hidden, linear.bias, model_.hidden, put};
  }
  float* residual_rows(int part, const Change& after) { return after.changes() ? added_.data() : states_[part]; }

  // Completes the residual addition after the product that wrote to `residual`: the sum over ranks, and a change of the output.
  bool settle(Cursor& cursor, size_t sum, int part, const Change& after) {
    if (!add_up(cursor, sum, part, after)) return false;
    return !after.changes() || add(cursor, part, after, [this]() -> const float* { return added_.data(); });
  }

  bool attend_layer(Cursor& cursor, size_t index) {
    const Layer& l = layers_[index];
    const int part = part_of(index);
    const int before = part_before(index);
    const bool both = index == 0 && model_.fusion.state_norm != nullptr;
    const auto normed = [this, both]() -> const Buffer& { return both ? both_ : normed_; };
    const auto attended = [this, part]() -> const Buffer& { return *heads_[part]; };
    const auto qkv = [this, before, &l] {
      const Buffer& rows = first_rows(before);
      return Output{rows.data(), rows.stride(), l.qkv.bias, l.qkv.n, Epilogue::kStore};
    };
    if (!gather(cursor, index, true)) return false;
    if (!each_token(cursor, before, [&](int64_t t) {
          give_hidden(index, t);
          if (is_deep(index)) add_deepstack(index - 1, token_of(before, t), states_[before] + t * model_.hidden);
          if (both) norm_both(model_, step_, t, l.qkv, both_, parts_);
          else norm_row(before, t, l.input_norm, l.qkv);
        }))
      return false;
    if (!shrink(cursor, before, normed, kPlaces * index + kQkv)) return false;
    if (!product(cursor, before, normed, l.qkv, qkv, kPlaces * index + kQkv)) return false;
    if (l.latent.num_heads > 0 && !attend_latents(cursor, index)) return false;
    if (l.latent.num_heads == 0 && !(l.recurrence.kind == kNoRecurrence ? attend_heads(cursor, index) : recur(cursor, index))) return false;
    if (!gather(cursor, index, false)) return false;
    if (l.parallel && !each_token(cursor, part, [&](int64_t t) { norm_state(part, t, l.mlp_norm, normed_.row(t)); })) return false;
    if (!split(cursor, part, attended, l.output)) return false;
    if (!shrink(cursor, part, attended, kPlaces * index + kOutput)) return false;
    if (!product(cursor, part, attended, l.output, [&] { return residual(part, l.output, after_attention(l)); },
                 kPlaces * index + kOutput))
      return false;
    return settle(cursor, 2 * index, part, after_attention(l));
  }

  // Runs the attention tasks of a layer with the function `task_of`.
  template <class TaskOf>
  bool attend_all(Cursor& cursor, size_t index, const TaskOf& task_of) {
    const LayerPlans::Shared& shared = plans_.of(index);
    return cursor(shared.num_attentions, [&](int64_t task) { task_of(attention(index), shared.plan.tasks[task], segments_); }) &&
           cursor(shared.num_merges, [&](int64_t task) { merge_segments(attention(index), shared.plan.merges[task], segments_); });
  }

  // Computes the outputs of a layer's attention heads.
  bool attend_heads(Cursor& cursor, size_t index) {
    const Layer& l = layers_[index];
    if (!some_tokens(cursor, part_before(index), [&](int64_t first, int64_t end) { keep(index, first, end); })) return false;
    if (!attend_all(cursor, index, attend)) return false;
    return !l.gated || each_token(cursor, kAll, [&](int64_t t) {
      const int64_t n = l.num_heads * l.head_size;
      multiply_logistic(attended_.row(t), qkv_.row(t) + n + 2 * l.num_kv_heads * l.head_size, n);
    });
  }

  // Computes the outputs of a layer's heads with latent attention.
  bool attend_latents(Cursor& cursor, size_t index) {
    const Layer& layer = layers_[index];
    const Latent& l = layer.latent;
    const int64_t tokens = counts_[kAll];
    const auto low = [this]() -> const Buffer& { return latents_.low(); };
    const auto rows = [this, &l]() -> const Buffer& { return l.up.n > 0 ? latents_.rows() : qkv_; };
    const auto up = [&] { return Output{latents_.rows().data(), latents_.rows().stride(), l.up.bias, l.up.n, Epilogue::kStore}; };
    if (!each_token(cursor, kAll, [&](int64_t t) { latents_.keep(layer, step_, index, group(index).slots[t], qkv_.row(t), t); }))
      return false;
    if (l.up.n > 0 && !(split(cursor, kAll, low, l.up) && product(cursor, kAll, low, l.up, up, kNone))) return false;
    if (!each_token(cursor, kAll, [&](int64_t t) { latents_.turn(layer, step_, rows().row(t), t); })) return false;
    if (!cursor(Latents::num_products(l, l.absorb, tokens), [&](int64_t task) { latents_.absorb(l, rows(), tokens, task); })) return false;
    if (!attend_all(cursor, index, penstock::attend_latents)) return false;
    if (splits(l.expand[0]) && !each_token(cursor, kAll, [&](int64_t t) { latents_.split_seen(l, t); })) return false;
    return cursor(Latents::num_products(l, l.expand, tokens), [&](int64_t task) { latents_.expand(l, attended_, tokens, task); });
  }

  // Computes the outputs of a recurrent layer, before the layer's product `output`.
  bool recur(Cursor& cursor, size_t index) {
    const Recurrence& r = layers_[index].recurrence;
    if (r.kind == kShortConvolution && !each_token(cursor, kAll, [&](int64_t t) { Recurrent::gate_inputs(r, qkv_.row(t)); }))
      return false;
    if (!cursor(recurrent_.num_convolutions(r), [&](int64_t task) { recurrent_.convolve(index, r, qkv_, task); })) return false;
    if (r.kind != kShortConvolution) {
      if (!each_token(cursor, kAll, [&](int64_t t) { recurrent_.prepare(r, qkv_, t); })) return false;
      if (!cursor(recurrent_.num_scans(), [&](int64_t task) { recurrent_.scan(index, r, attended_, task); })) return false;
      if (!cursor(recurrent_.num_sequences(), [&](int64_t s) { recurrent_.store_keys(index, r, s); })) return false;
    }
    return each_token(cursor, kAll, [&](int64_t t) { recurrent_.finish(r, qkv_.row(t), t, attended_.row(t)); });
  }

  bool mlp(Cursor& cursor, size_t index) {
    const Layer& l = layers_[index];
    if (l.gate_up.n == 0) return mix(cursor, index);
    const int part = part_of(index);
    const Change after = has_both(l) ? Change{.norm = l.mixture.norms.mlp_out} : after_mlp(l);
    const auto normed = [this]() -> const Buffer& { return normed_; };
    const auto gated = [this]() -> const Buffer& { return gated_; };
    const Epilogue gate = gates() ? gate_epilogue(model_.activation) : Epilogue::kStore;
    if (!norm_mlp(cursor, part, l, l.mlp_norm, l.gate_up)) return false;
    const bool rounded = rounds(l.down) && gates();  // whether the previous product's output is bfloat16
    if (!shrink(cursor, part, normed, kPlaces * index + kGateUp)) return false;
    if (!product(cursor, part, normed, l.gate_up,
                 [&] { return Output{gated_.data(), gated_.stride(), l.gate_up.bias, l.gate_up.n, gate, nullptr, rounded}; },
                 kPlaces * index + kGateUp))
      return false;
    if (!gates() && !each_token(cursor, part, [&](int64_t t) { activate(gated_.row(t), l.gate_up.n, model_.activation); }))
      return false;
    if (!rounded && !split(cursor, part, gated, l.down)) return false;
    if (!shrink(cursor, part, gated, kPlaces * index + kDown, rounded)) return false;
    if (!product(cursor, part, gated, l.down, [&] { return residual(part, l.down, after); }, kPlaces * index + kDown, !rounded))
      return false;
    if (!has_both(l)) return settle(cursor, 2 * index + 1, part, after);
    return add_up(cursor, 2 * index + 1, part, after) && mix(cursor, index);
  }

  // Computes a mixture of experts: routes tokens to experts, and computes each token's weighted sum of its experts' outputs, in the
  // order that the router returns. If the layer also has an MLP, `added_` has the output of the MLP.
  bool mix(Cursor& cursor, size_t index) {
    const Layer& l = layers_[index];
    const Mixture& mixture = l.mixture;
    const int part = part_of(index);
    const auto normed = [this]() -> const Buffer& { return normed_; };
    if (!norm_mlp(cursor, part, l, has_both(l) ? mixture.norms.router : l.mlp_norm, mixture.router)) return false;
    if (!product(cursor, part, normed, mixture.router, [&] { return mixing_.router_output(mixture); }, kNone)) return false;
    if (!each_token(cursor, part, [&](int64_t t) { mixing_.route(mixture, t); })) return false;
    if (!cursor(1, [&](int64_t) { mixing_.plan(mixture, index, counts_[part]); })) return false;
    if (has_both(l) && !each_token(cursor, part, [&](int64_t t) { norm_state(part, t, mixture.norms.experts, normed_.row(t)); }))
      return false;
    if (!cursor(mixing_.num_copies(index), [&](int64_t task) { mixing_.copy(mixture, task, normed_); })) return false;
    if (!cursor(mixing_.num_products(index, 0), [&](int64_t task) { mixing_.gate(mixture, task); })) return false;
    if (!cursor(mixing_.num_splits(index), [&](int64_t task) { mixing_.split_gated(mixture, task); })) return false;
    if (!cursor(mixing_.num_products(index, 1), [&](int64_t task) { mixing_.down(mixture, task); })) return false;
    return each_token(cursor, part, [&](int64_t t) {
      const float* sum = mixing_.weighted_sum(mixture, t, model_.hidden);
      if (has_both(l)) {
        float* both = added_.data() + t * model_.hidden;
        apply_norm(model_, both, mixture.norms.mlp_out, both, model_.hidden);
        add_row(both, sum, {.norm = mixture.norms.experts_out});
        sum = both;
      }
      add_row(states_[part] + t * model_.hidden, sum, after_mlp(l));
    });
  }

  // Sums the hidden states, or the outputs before their change, over all ranks, on one thread.
  bool add_up(Cursor& cursor, size_t index, int part, const Change& after) {
    if (model_.exchange.base == nullptr) return true;
    return cursor(1, [&](int64_t) {
      const Exchange& e = model_.exchange;
      const int64_t began = nanoseconds();
      penstock_all_reduce(e.base, e.rank, e.size, e.piece, residual_rows(part, after), counts_[part] * model_.hidden, 0);
      step_.sum_nanoseconds[index] = nanoseconds() - began;
    });
  }

  // Returns the output rows of a layer's product `qkv`. If the layer computes only the tokens whose logits are needed, it writes
  // queries to a separate buffer first, because attention reads the queries of a token in the row of this token.
  const Buffer& first_rows(int before) const { return before == kLast && gathered_ ? queries_ : qkv_; }

  // Applies norms and rotary positions to the rows first..end of queries, keys and values, and writes the keys and values of these
  // tokens into the KV cache.
  void keep(size_t index, int64_t first, int64_t end) {
    const Layer& l = layers_[index];
    const int before = part_before(index);
    const int64_t size = l.head_size, keys = l.num_heads * size, values = keys + l.num_kv_heads * size;
    for (int64_t row = first; row < end; ++row) {
      const int64_t token = token_of(before, row);
      float* x = first_rows(before).row(row);
      finish_heads(model_, l, step_.rotaries[l.rotary], step_.positions[token], x);
      if (&first_rows(before) == &queries_) std::memcpy(qkv_.row(token), x, keys * sizeof(float));
    }
    if (l.shares != 0) return;
    write_tokens({step_.num_tokens, group(index).slots, step_.caches[index], l.num_kv_heads, size, size, qkv_.data() + keys,
                  qkv_.stride(), qkv_.data() + values, qkv_.stride()},
                 first, end);
  }

  // Computes the inputs of all layers' embeddings (see LayerInputs) from the input of the first layer.
  bool compute_layer_inputs(Cursor& cursor) {
    const Linear& linear = model_.layer_inputs.projection;
    const int64_t place = kPlaces * model_.num_layers + 1;
    const auto normed = [this]() -> const Buffer& { return normed_; };
    return each_token(cursor, kAll, [&](int64_t t) { norm_row(kAll, t, nullptr, linear); }) && shrink(cursor, kAll, normed, place) &&
           product(cursor, kAll, normed, linear, [this] { return embeddings_.inputs_output(); }, place) &&
           each_token(cursor, kAll, [this](int64_t t) { embeddings_.complete(step_.layer_rows, t); });
  }

  // Adds a layer's embedding of the token ids (see LayerEmbedding) to the hidden states.
  bool add_embedding(Cursor& cursor, size_t index) {
    const LayerEmbedding& of = layers_[index].embedding;
    if (of.gate.n == 0) return true;
    const int part = part_of(index);
    const int64_t gate = kPlaces * index + kEmbeddingGate, up = kPlaces * index + kEmbeddingProjection;
    const auto normed = [this]() -> const Buffer& { return normed_; };
    const auto gates = [this]() -> const Buffer& { return embeddings_.gates(); };
    const auto sums = [this, &of] { return Output{added_.data(), model_.hidden, of.projection.bias, model_.hidden, Epilogue::kStore}; };
    return each_token(cursor, part, [&](int64_t t) { norm_row(part, t, nullptr, of.gate); }) && shrink(cursor, part, normed, gate) &&
           product(cursor, part, normed, of.gate, [&] { return embeddings_.gate_output(of); }, gate) &&
           each_token(cursor, part, [&](int64_t t) { embeddings_.multiply(index, token_of(part, t), t); }) &&
           split(cursor, part, gates, of.projection) && shrink(cursor, part, gates, up) &&
           product(cursor, part, gates, of.projection, sums, up) &&
           add(cursor, part, after_embedding(layers_[index]), [this]() -> const float* { return added_.data(); });
  }

  void logits(Cursor& cursor) {
    const int64_t rows = num_rows_;
    if (rows == 0 || model_.head.n == 0) return;  // only the last pipeline stage has a head
    const Linear& head = model_.head;
    if (!cursor(rows, [&](int64_t row) {
          norm_state(kLast, gathered_ ? row : step_.rows[row], model_.final_norm, normed_.row(row));
          if (splits(head)) split_row(head, normed_.row(row), parts_.row(row));
        }))
      return;
    const int64_t place = kPlaces * model_.num_layers;
    if (!shrink(cursor, kHead, [this]() -> const Buffer& { return normed_; }, place)) return;
    const Blocks blocks(rows, head.n);
    const Buffer& from = splits(head) ? parts_ : normed_;
    if (!cursor(blocks.tasks(), [&](int64_t task) {
          const LowRank adapters = low_rank(kHead, place);
          Output logits{step_.logits, head.n, head.bias, head.n, Epilogue::kStore};
          if (adapters.count > 0) logits.low_rank = &adapters;
          Product(from.data(), from.stride(), head, logits, blocks)(task);
        }))
      return;
    if (model_.logit_softcap != 0.0f) cursor(rows, [&](int64_t row) { cap(step_.logits + row * head.n, head.n, model_.logit_softcap); });
  }

  enum { kAll, kLast, kHead }; // sets of tokens: all; those that the layers from `first_of_few_` on compute; those with logits
  // Indices of an adapter's updates in a layer.
  enum : int64_t { kQkv, kOutput, kGateUp, kDown, kEmbeddingGate, kEmbeddingProjection, kPlaces, kNone = -1 };
  static constexpr int kFirstPhases = 12, kHeadPhases = 4;
  static constexpr int kPhases = 46;      // maximum per layer, including sums over ranks, adapters and splitting of inputs
  static constexpr int kMaxLayers = 800;  // forward/native_support.py checks this
  static_assert(kPhases * kMaxLayers + kFirstPhases + kHeadPhases <= Pool::kMaxPhases);
  static constexpr int64_t kRowTask = 4;  // number of tokens of a task that processes tokens one by one
  static constexpr int64_t kManyTokens = 256;
  Pool& pool_;
  const Pool::Job forward_job_{[](void* self, Cursor& cursor) { static_cast<Decoder*>(self)->run(cursor); }, this};
  const Pool::Job head_job_{[](void* self, Cursor& cursor) { static_cast<Decoder*>(self)->logits(cursor); }, this};
  Model model_;
  std::vector<Layer> layers_;
  const size_t first_of_few_;      // index of the first layer that may compute only the tokens whose logits are needed
  LayerPlans plans_;
  Step step_{};
  Count first_, last_layer_, num_embedded_, num_fused_;  // first and last layer of this call, and numbers of tokens
  Count num_deep_;                 // number of tokens to which deepstack embeddings are added after the last layer
  Count counts_[2], num_rows_, num_gathered_, num_shrinkings_[3];
  float* states_[2] = {};          // hidden states
  const Buffer* heads_[2] = {};    // outputs of the attention heads, for kAll and kLast
  bool gathered_ = false;          // whether the layers from `first_of_few_` on compute only the tokens whose logits are needed
  int64_t parts_width_ = 0;        // size in floats of the widest row that is split into parts
  int64_t gated_width_ = 0;        // size in floats of the widest row between the products `gate_up` and `down`
  Buffer qkv_, normed_, attended_, gated_, parts_;
  bool changes_ = false;           // whether some layers change outputs before the residual addition
  bool mixes_ = false;             // whether some layers have experts
  Mixing mixing_;
  Recurrent recurrent_;
  Latents latents_;
  LayerEmbeddings embeddings_;
  Buffer queries_;                 // queries of the tokens with logits, in layers with `shares`
  int64_t qkv_width_ = 0, heads_width_ = 0;  // maximum over all layers
  std::vector<float> added_;       // outputs before the norm and the residual addition
  std::vector<float> last_;        // hidden states of the tokens with logits; `kept_` has their heads' outputs
  Buffer kept_;
  Buffer both_;                    // embeddings and hidden states of an EAGLE head's tokens, side by side
  Buffer segments_;                // attention's sums of separate segments
  std::vector<Segment> adapted_[3];  // segments of rows with adapters, by set of tokens
  Shrinking shrinkings_[3];
  Buffer shrunk_;                  // small sums (see lora.h) of the rows of one product
  int64_t shrunk_width_ = 0;
};

}  // namespace penstock
