// Mixtures of experts in the layers of a decoder: routing of tokens to experts, matrix products of the experts, and weighted sums
// of their outputs.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "buffer.h"
#include "gemm.h"
#include "pool.h"
#include "routing.h"
#include "rows.h"

namespace penstock {

// Computation of a layer's mixture of experts. The layers of a model use the same object one after another.
// Each pair (token, expert) is a row of the experts' products. The rows of an expert are contiguous, in the order of the tokens.
// The number of tasks of a layer is known only after its tokens are routed. The number is stored separately for each layer, because
// a late thread (see pool.h) may read it while other threads already compute a later layer.
class Mixing {
 public:
  // Determines, for each size, the maximum over all layers.
  void measure(const std::vector<Layer>& layers) {
    counts_.reset(new LayerCounts[layers.size()]);
    for (const Layer& layer : layers) {
      const Mixture& mixture = layer.mixture;
      if (mixture.routing.num_experts == 0) continue;
      num_experts_ = std::max(num_experts_, all_experts(mixture.routing)), places_of_token_ = std::max(places_of_token_, places(mixture));
      for (int64_t i = 0; i < all_experts(mixture.routing); ++i) {
        input_width_ = std::max(input_width_, row_width(mixture.gate_up[i]));
        gated_width_ = std::max(gated_width_, mixture.gate_up[i].n / (has_gate(mixture.gate) ? 2 : 1));
        parts_width_ = std::max(parts_width_, row_width(mixture.down[i]));
      }
    }
    ends_.resize(num_experts_);
  }

  void resize(int64_t tokens, int64_t hidden) {
    const int64_t pairs = tokens * places_of_token_;
    logits_.resize(tokens, num_experts_);
    inputs_.resize(pairs, input_width_);
    gated_.resize(pairs, gated_width_);
    gated_parts_.resize(pairs, parts_width_);
    outputs_.resize(pairs, hidden);
    experts_.resize(pairs), weights_.resize(pairs), places_.resize(pairs), pairs_.resize(pairs);
  }

  Output router_output(const Mixture& mixture) const {
    return {logits_.data(), logits_.stride(), mixture.router.bias, mixture.router.n, Epilogue::kStore};
  }

  void route(const Mixture& mixture, int64_t token) {
    const int64_t at = token * places(mixture);
    route_row(mixture.routing, logits_.row(token), &experts_[at], &weights_[at]);
  }

  // Assigns a row to each pair (token, expert), and divides the experts' products into tasks.
  void plan(const Mixture& mixture, size_t layer, int64_t tokens) {
    const int64_t count = tokens * places(mixture), experts = all_experts(mixture.routing);
    std::fill(ends_.begin(), ends_.end(), 0);
    for (int64_t pair = 0; pair < count; ++pair) ++ends_[experts_[pair]];
    int64_t first = 0;
    for (std::vector<Task>& tasks : tasks_) tasks.clear();
    row_experts_.clear();
    for (int64_t expert = 0; expert < experts; ++expert) {
      const int64_t rows = ends_[expert];
      ends_[expert] = first;
      if (rows == 0) continue;
      for (int which : {0, 1}) {
        const Linear& linear = (which == 0 ? mixture.gate_up : mixture.down)[expert];
        const Blocks blocks(rows, linear.n);
        for (int64_t part = 0; part < blocks.tasks(); ++part) tasks_[which].push_back({expert, first, rows, part});
      }
      first += rows;
    }
    row_experts_.resize(count);
    for (int64_t pair = 0; pair < count; ++pair) {
      const int64_t row = ends_[experts_[pair]]++;
      places_[pair] = row, pairs_[row] = pair, row_experts_[row] = experts_[pair];
    }
    num_rows_ = count;
    LayerCounts& counts = counts_[layer];
    counts.copies = (count + kRowTask - 1) / kRowTask;
    bool splits_some = !has_gate(mixture.gate);
    for (int64_t expert = 0; expert < experts; ++expert) splits_some = splits_some || splits(mixture.down[expert]);
    counts.splits = splits_some ? (count + kRowTask - 1) / kRowTask : 0;
    for (int which : {0, 1}) counts.products[which] = static_cast<int64_t>(tasks_[which].size());
  }

  int64_t num_copies(size_t layer) const { return counts_[layer].copies; }
  int64_t num_splits(size_t layer) const { return counts_[layer].splits; }
  int64_t num_products(size_t layer, int which) const { return counts_[layer].products[which]; }

  // Copies the input of each token to the token's rows. Until the products of `down`, `outputs_` is free for scaled inputs.
  void copy(const Mixture& mixture, int64_t task, const Buffer& from) {
    each_row(task, [&](int64_t row) {
      const Linear& linear = mixture.gate_up[row_experts_[row]];
      const float* x = from.row(pairs_[row] / places(mixture));
      if (mixture.scales_inputs != 0 && row_experts_[row] < mixture.routing.num_experts) {
        float* scaled = outputs_.row(row);
        for (int64_t i = 0; i < linear.k; ++i) scaled[i] = x[i] * weights_[pairs_[row]];
        x = scaled;
      }
      put_row(linear, x, inputs_.row(row));
    });
  }

  void gate(const Mixture& mixture, int64_t index) {
    const Task& task = tasks_[0][index];
    const Linear& linear = mixture.gate_up[task.expert];
    const Epilogue epilogue = has_gate(mixture.gate) ? gate_epilogue(mixture.gate.activation) : Epilogue::kStore;
    Output output{gated_.row(task.first), gated_.stride(), linear.bias, linear.n, epilogue};
    output.gate = mixture.gate;
    multiply(task, linear, inputs_, output);
  }

  // Applies activations without a gate, and splits the inputs of the products `down` into parts.
  void split_gated(const Mixture& mixture, int64_t task) {
    each_row(task, [&](int64_t row) {
      const Linear& linear = mixture.down[row_experts_[row]];
      if (!has_gate(mixture.gate)) activate(gated_.row(row), linear.k, mixture.gate.activation);
      if (splits(linear)) split_row(linear, gated_.row(row), gated_parts_.row(row));
    });
  }

  void down(const Mixture& mixture, int64_t index) {
    const Task& task = tasks_[1][index];
    const Linear& linear = mixture.down[task.expert];
    multiply(task, linear, splits(linear) ? gated_parts_ : gated_,
             {outputs_.row(task.first), outputs_.stride(), linear.bias, linear.n, Epilogue::kStore});
  }

  // Returns the weighted sum of the outputs of a token's experts. The outputs and the sum have `n` elements. The sum is written to
  // the memory of the first expert's output. Each product of a weight and an output is rounded before the addition.
  const float* weighted_sum(const Mixture& mixture, int64_t token, int64_t n) {
    const int64_t first = token * places(mixture);
    const auto scaled = [&](int64_t pair) {
      float* output = outputs_.row(places_[pair]);
      if (mixture.scales_inputs == 0 || experts_[pair] == mixture.routing.num_experts) scale_row(output, weights_[pair], n);
      return output;
    };
    float* sum = scaled(first);
    for (int64_t place = 1; place < places(mixture); ++place) {
      const float* more = scaled(first + place);
      for (int64_t i = 0; i < n; ++i) sum[i] += more[i];
    }
    return sum;
  }

 private:
  // Task of an expert's matrix product. `first` is the expert's first row, and `part` the index of the task among the product's
  // tasks.
  struct Task {
    int64_t expert, first, rows, part;
  };
  struct LayerCounts {
    Count copies, splits, products[2];
  };

  // This is a separate function, so that compilers do not fuse the multiplication and a later addition into one operation with a
  // single rounding.
  __attribute__((noinline)) static void scale_row(float* x, float weight, int64_t n) {
    for (int64_t i = 0; i < n; ++i) x[i] *= weight;
  }

  template <class Do>
  void each_row(int64_t task, const Do& one) {
    for (int64_t row = task * kRowTask; row < std::min(num_rows_, (task + 1) * kRowTask); ++row) one(row);
  }

  static int64_t places(const Mixture& mixture) { return num_places(mixture.routing); }

  static void multiply(const Task& task, const Linear& linear, const Buffer& from, const Output& output) {
    const Blocks blocks(task.rows, linear.n);
    Product(from.row(task.first), from.stride(), linear, output, blocks)(task.part);
  }

  static constexpr int64_t kRowTask = 4;
  int64_t num_experts_ = 0, places_of_token_ = 0, input_width_ = 0, gated_width_ = 0, parts_width_ = 0;  // maxima over layers
  Buffer logits_, inputs_, gated_, gated_parts_, outputs_;
  std::vector<int64_t> experts_;      // [tokens, places of a token]
  std::vector<float> weights_;        // the same
  std::vector<int64_t> places_;       // row of each pair
  std::vector<int64_t> pairs_;        // pair of each row
  std::vector<int64_t> row_experts_;  // expert of each row
  std::vector<int64_t> ends_;         // end of each expert's rows
  std::vector<Task> tasks_[2];        // tasks of the products gate_up and down
  int64_t num_rows_ = 0;
  std::unique_ptr<LayerCounts[]> counts_;
};

}  // namespace penstock
