// Operators that Python code calls one at a time, outside of a decoder. Each operator is a program of the thread pool (see pool.h).
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "attention.h"
#include "buffer.h"
#include "gemm.h"
#include "latent.h"
#include "lora.h"
#include "pool.h"
#include "routing.h"
#include "sampling.h"
#include "selective.h"
#include "states.h"

namespace penstock {

class Operators {
 public:
  explicit Operators(Pool& pool) : pool_(pool) {}

  void pack(const float* weight, const Linear& to) {
    pool_.prepare(1);
    packing_ = weight;
    linear_ = to;
    num_tasks_ = panels(to.n);
    pool_.run(pack_job_);
  }

  // Writes `count` rows of the packed weight `from` to `to` [count, k].
  void unpack(const Linear& from, const int64_t* rows, int64_t count, float* to) {
    pool_.prepare(1);
    linear_ = from;
    unpacked_rows_ = rows, unpacked_ = to;
    num_tasks_ = count;
    pool_.run(unpack_job_);
  }

  void linear(const Linear& linear, const float* x, int64_t rows, int64_t stride, float* out, int64_t out_stride) {
    pool_.prepare(2);
    linear_ = linear;
    x_ = x, rows_ = rows, stride_ = stride;
    if (copies()) padded_.resize(rows, row_width(linear));
    num_copies_ = copies() ? rows : 0;
    num_tasks_ = Blocks(rows, linear.n).tasks();
    output_ = {out, out_stride, linear.bias, linear.n, Epilogue::kStore};
    pool_.run(linear_job_);
  }

  void low_rank(const Segment* segments, int64_t count, int64_t n, const float* x, int64_t stride, float* out, int64_t out_stride) {
    if (count == 0) return;
    pool_.prepare(2);
    adapted_.assign(segments, segments + count);
    shrinking_.cut(adapted_, pool_.threads());
    int64_t width = 0;
    for (const Segment& of : adapted_) width = std::max(width, of.width);
    x_ = x, rows_ = adapted_.back().end, stride_ = stride;
    padded_.resize(rows_, width);
    output_ = {out, out_stride, nullptr, n, Epilogue::kAdd};
    num_copies_ = shrinking_.size();
    num_tasks_ = Blocks(rows_, n).tasks();
    pool_.run(low_rank_job_);
  }

  void grouped(const Grouped& grouped) {
    pool_.prepare(2);
    grouped_ = grouped;
    rows_ = grouped.ends[grouped.num_groups - 1], stride_ = grouped.stride;
    products_.clear();
    for (int64_t group = 0, first = 0; group < grouped.num_groups; first = grouped.ends[group++]) {
      const Blocks blocks(grouped.ends[group] - first, grouped.linears[group].n);
      for (int64_t task = 0; task < blocks.tasks(); ++task) products_.push_back({group, first, task});
    }
    if (gathers()) padded_.resize(rows_, row_width(grouped.linears[0]));
    num_copies_ = gathers() ? rows_ : 0;
    num_tasks_ = static_cast<int64_t>(products_.size());
    pool_.run(grouped_job_);
  }

  // Routes tokens on the calling thread, because to start other threads would take longer than the work.
  void route(const Route& route) {
    const int64_t places = num_places(route.routing);
    for (int64_t t = 0; t < route.num_tokens; ++t)
      route_row(route.routing, route.logits + t * route.stride, route.experts + t * places, route.weights + t * places);
  }

  void attend(const Attention& attention) { attend(attention, penstock::attend); }

  // Computes attention over a cache of latents (see latent.h).
  void attend_latents(const Attention& attention) { attend(attention, penstock::attend_latents); }

  void write(const Write& write) {
    pool_.prepare(1);
    write_ = write;
    num_tasks_ = (write.num_tokens + kTokens - 1) / kTokens;
    pool_.run(write_job_);
  }

  void convolve(const StateStep& step, const Convolution& convolution) {
    pool_.prepare(1);
    states_ = step;
    convolution_ = convolution;
    num_tasks_ = step.num_sequences * channel_blocks(convolution.memory.channels);
    pool_.run(convolve_job_);
  }

  void scan(const StateStep& step, const Scan& scan) {
    pool_.prepare(2);
    states_ = step;
    scan_ = scan;
    if (scan.rates == nullptr) plan_scan(states_, scan_.memory, pool_.threads(), scan_tasks_);
    num_tasks_ = scan.rates == nullptr ? static_cast<int64_t>(scan_tasks_.size())
                                       : step.num_sequences * selective_blocks(scan.memory.num_heads);
    num_copies_ = step.num_sequences;
    pool_.run(scan_job_);
  }

  void mask(const Mask& mask) {
    if (mask.count * mask.width <= kAlone) {
      for (int64_t i = 0; i < mask.count; ++i) mask_row(mask, i);
      return;
    }
    pool_.prepare(1);
    mask_ = mask;
    num_tasks_ = mask.count;
    pool_.run(mask_job_);
  }

  void sample(const Sampling& sampling) {
    pool_.prepare(1);
    sampling_ = sampling;
    num_tasks_ = sampling.rows;
    pool_.run(sample_job_);
  }

 private:
  using Attend = void (*)(const Attention&, const AttentionTask&, const Buffer&);

  void attend(const Attention& attention, Attend task) {
    pool_.prepare(2);
    attention_ = attention, attend_task_ = task;
    plan_attention(attention_, pool_.threads(), plan_);
    parts_.resize(plan_.num_parts, part_width(attention_.value_size));
    num_tasks_ = static_cast<int64_t>(plan_.tasks.size());
    num_merges_ = static_cast<int64_t>(plan_.merges.size());
    pool_.run(attend_job_);
  }

  void pack(Cursor& cursor) {
    cursor(num_tasks_, [this](int64_t panel) {
      const Linear& to = linear_;
      void* packed = const_cast<void*>(to.packed);
      if (to.kind == kInt8) pack_panel(packing_, to.n, to.k, static_cast<int8_t*>(packed), panel);
      else if (to.kind == kHalved) pack_halves(packing_, to.n, to.k, static_cast<uint16_t*>(packed), panel);
      else if (to.kind == kBfloat16) pack_panel(packing_, to.n, to.k, static_cast<uint16_t*>(packed), panel);
      else pack_panel(packing_, to.n, to.k, static_cast<float*>(packed), panel);
    });
  }

  void unpack(Cursor& cursor) {
    cursor(num_tasks_, [this](int64_t i) { unpack_row(linear_, unpacked_rows_[i], unpacked_ + i * linear_.k); });
  }

  // Returns whether the distance between input rows is a multiple of a page. All such rows map to the same few sets of the CPU
  // cache, which do not have room for all rows.
  bool conflicts() const { return rows_ > 4 && stride_ * sizeof(float) % 4096 == 0; }

  bool copies() const { return splits(linear_) || conflicts(); }

  void linear(Cursor& cursor) {
    if (!cursor(num_copies_, [this](int64_t row) { put_row(linear_, x_ + row * stride_, padded_.row(row)); })) return;
    cursor(num_tasks_, [this](int64_t task) {
      const Blocks blocks(rows_, linear_.n);
      Product(copies() ? padded_.data() : x_, copies() ? padded_.stride() : stride_, linear_, output_, blocks)(task);
    });
  }

  void low_rank(Cursor& cursor) {
    if (!cursor(num_copies_, [this](int64_t task) { shrinking_(task, adapted_, 0, x_, stride_, padded_.data(), padded_.stride()); }))
      return;
    cursor(num_tasks_, [this](int64_t task) {
      const Blocks blocks(rows_, output_.n);
      const auto [first_panel, last_panel, start, end] = blocks.of(task, output_.n);
      const LowRank adapters{adapted_.data(), static_cast<int64_t>(adapted_.size()), 0, padded_.data(), padded_.stride()};
      for (int64_t panel = first_panel; panel < last_panel; ++panel) {
        const int64_t first = panel * kPanel, count = std::min<int64_t>(kPanel, output_.n - first);
        for (int64_t row = start; row < end; row += kTile) {
          const int64_t rows = std::min<int64_t>(kTile, end - row);
          float added[kTile * kPanel];
          std::fill_n(added, rows * kPanel, -0.0f);  // the addition of -0.0 does not change any number
          adapters.add(added, row, row + rows, panel);
          for (int64_t i = 0; i < rows; ++i)
            for (int64_t j = 0; j < count; ++j) output_.out[(row + i) * output_.stride + first + j] += added[i * kPanel + j];
        }
      }
    });
  }

  bool gathers() const { return grouped_.from != nullptr || splits(grouped_.linears[0]) || conflicts(); }

  void grouped(Cursor& cursor) {
    const auto copy = [this](int64_t row) {
      const int64_t from = grouped_.from != nullptr ? grouped_.from[row] : row;
      put_row(grouped_.linears[0], grouped_.x + from * grouped_.stride, padded_.row(row));
    };
    if (!cursor(num_copies_, copy)) return;
    cursor(num_tasks_, [this](int64_t task) {
      const auto [group, first, part] = products_[task];
      const Linear& linear = grouped_.linears[group];
      const Blocks blocks(grouped_.ends[group] - first, linear.n);
      const float* x = gathers() ? padded_.row(first) : grouped_.x + first * grouped_.stride;
      Output output{grouped_.out + first * grouped_.out_stride, grouped_.out_stride, linear.bias, linear.n, Epilogue::kStore};
      if (grouped_.gated) output.epilogue = gate_epilogue(grouped_.gate.activation), output.gate = grouped_.gate;
      Product(x, gathers() ? padded_.stride() : grouped_.stride, linear, output, blocks)(part);
    });
  }

  void attend(Cursor& cursor) {
    if (!cursor(num_tasks_, [this](int64_t task) { attend_task_(attention_, plan_.tasks[task], parts_); })) return;
    cursor(num_merges_, [this](int64_t task) { merge_segments(attention_, plan_.merges[task], parts_); });
  }

  void write(Cursor& cursor) {
    cursor(num_tasks_, [this](int64_t task) {
      write_tokens(write_, task * kTokens, std::min(write_.num_tokens, (task + 1) * kTokens));
    });
  }

  void convolve(Cursor& cursor) {
    cursor(num_tasks_, [this](int64_t task) { ConvolutionTask(states_, convolution_, task)(); });
  }

  void scan(Cursor& cursor) {
    if (!cursor(num_tasks_, [this](int64_t task) {
          if (scan_.rates != nullptr) scan_selectively(states_, scan_, task);
          else run_scan(states_, scan_, scan_tasks_[task]);
        }))
      return;
    cursor(num_copies_, [this](int64_t sequence) { store_keys(states_, scan_, sequence); });
  }

  void mask(Cursor& cursor) {
    cursor(num_tasks_, [this](int64_t i) { mask_row(mask_, i); });
  }

  void sample(Cursor& cursor) {
    cursor(num_tasks_, [this](int64_t row) {
      static thread_local std::vector<double> sums;
      sample_row(sampling_, row, sums);
    });
  }

  // Task of the matrix product of one group. `first` is the group's first row, and `part` the index of the task among the product's
  // tasks.
  struct GroupTask {
    int64_t group, first, part;
  };

  static constexpr int64_t kTokens = 8;
  static constexpr int64_t kAlone = 65536;  // up to this number of logits, one thread masks rows faster than all threads
  Pool& pool_;
  const Pool::Job pack_job_{[](void* self, Cursor& cursor) { static_cast<Operators*>(self)->pack(cursor); }, this};
  const Pool::Job unpack_job_{[](void* self, Cursor& cursor) { static_cast<Operators*>(self)->unpack(cursor); }, this};
  const Pool::Job linear_job_{[](void* self, Cursor& cursor) { static_cast<Operators*>(self)->linear(cursor); }, this};
  const Pool::Job low_rank_job_{[](void* self, Cursor& cursor) { static_cast<Operators*>(self)->low_rank(cursor); }, this};
  const Pool::Job grouped_job_{[](void* self, Cursor& cursor) { static_cast<Operators*>(self)->grouped(cursor); }, this};
  const Pool::Job attend_job_{[](void* self, Cursor& cursor) { static_cast<Operators*>(self)->attend(cursor); }, this};
  const Pool::Job write_job_{[](void* self, Cursor& cursor) { static_cast<Operators*>(self)->write(cursor); }, this};
  const Pool::Job convolve_job_{[](void* self, Cursor& cursor) { static_cast<Operators*>(self)->convolve(cursor); }, this};
  const Pool::Job scan_job_{[](void* self, Cursor& cursor) { static_cast<Operators*>(self)->scan(cursor); }, this};
  const Pool::Job mask_job_{[](void* self, Cursor& cursor) { static_cast<Operators*>(self)->mask(cursor); }, this};
  const Pool::Job sample_job_{[](void* self, Cursor& cursor) { static_cast<Operators*>(self)->sample(cursor); }, this};
  Count num_copies_, num_tasks_, num_merges_;
  const float* packing_ = nullptr;
  const int64_t* unpacked_rows_ = nullptr;
  float* unpacked_ = nullptr;
  Linear linear_{};
  Buffer padded_;
  const float* x_ = nullptr;
  int64_t rows_ = 0, stride_ = 0;
  Output output_{};
  std::vector<Segment> adapted_;
  Shrinking shrinking_;
  Grouped grouped_{};
  std::vector<GroupTask> products_;
  Attention attention_{};
  Attend attend_task_ = nullptr;
  AttentionPlan plan_;
  Buffer parts_;
  Write write_{};
  Mask mask_{};
  StateStep states_{};
  Convolution convolution_{};
  Scan scan_{};
  std::vector<ScanTask> scan_tasks_;
  Sampling sampling_{};
};

}  // namespace penstock
