// Operations of recurrent layers: causal convolutions, and linear recurrences that keep closed states and open rows.
//
// Time is divided into spans of kSpan tokens at absolute positions. A layer keeps the closed state S, which is the state at the end
// of the last complete span. For each later token j, it keeps an open row: the token's key k_j, its update u_j, and the sum G_j of
// the decays since the span began. The output for a token t with query q is e^G_t q S + sum over j of e^(G_t - G_j) (q k_j) u_j.
// With beta, the update is beta (v - e^G_t k S - sum over earlier j of e^(G_t - G_j) (k_t k_j) u_j), which is the gated delta rule
// (arXiv:2412.06464). Without beta, the update is v, which is Mamba-2's recurrence (arXiv:2405.21060). If each row of S has a
// decay, G is a vector and multiplies each element of q k_j, which is Kimi delta attention (arXiv:2510.26692). Decays are at most
// 0, so no exponent is greater than 0.
//
// All sums have the same order for any division of a sequence into steps, so that a token's results are bit-identical in a prompt
// and in a decode step.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "model.h"
#include "vec.h"

namespace penstock {

constexpr int64_t kSpan = 16;
constexpr int64_t kMaxTaps = 8;
constexpr int64_t kChannels = 512;  // number of channels that a task of a convolution computes
constexpr int kWide = kLanes == 16 ? 8 : 4;  // number of vectors that one or two rows multiply at a time

inline int64_t span_start(int64_t position) { return position / kSpan * kSpan; }
inline int64_t whole_vectors(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

inline vf load_some(const float* p, int64_t n) {
  if (n >= kLanes) return load(p);
  float last[kLanes] = {};
  std::memcpy(last, p, n * sizeof(float));
  return load(last);
}
inline void store_some(float* p, vf v, int64_t n) {
  if (n >= kLanes) return store(p, v);
  float last[kLanes];
  store(last, v);
  std::memcpy(p, last, n * sizeof(float));
}

// Returns the sum of a vector's lanes, by repeatedly adding the two halves of the vector.
template <int kAway = kLanes / 2>
inline float tree_sum(vf v) {
  v = v + exchanged<kAway>(v, std::make_integer_sequence<int, kLanes>{});
  if constexpr (kAway > 1) return tree_sum<kAway / 2>(v);
  else return v[0];
}

// Returns whether a set of numbers is finite. `zeros` is the sum of x - x over all these numbers, which is NaN if an x is not
// finite.
inline bool finite(vf zeros) { return !any_greater(zeros != zeros ? splat(1.0f) : vf{}, vf{}); }

inline void mark_broken(const StateStep& step, int64_t sequence) {
  __atomic_store_n(step.broken + sequence, int64_t{1}, __ATOMIC_RELAXED);
}

// Convolutions.

inline int64_t channel_blocks(int64_t channels) { return (channels + kChannels - 1) / kChannels; }

// Task that computes one block of the channels of one sequence, and stores its inputs and tails.
class ConvolutionTask {
 public:
  ConvolutionTask(const StateStep& step, const Convolution& convolution, int64_t task)
      : step_(step), c_(convolution), m_(c_.memory), index_(task / channel_blocks(m_.channels)), s_(step.sequences[index_]) {
    from_ = task % channel_blocks(m_.channels) * kChannels;
    count_ = std::min(kChannels, m_.channels - from_);
  }

  void operator()() const {
    const float* inputs[kMaxTaps];
    for (int64_t i = 0; i < s_.count; ++i) {
      for (int64_t tap = 0; tap < m_.kernel; ++tap) inputs[tap] = input(s_.start + i - (m_.kernel - 1) + tap);
      convolve(inputs, c_.out + (s_.first + i) * c_.out_stride + from_);
    }
    store_tails();
    const int64_t end = s_.start + s_.count;
    for (int64_t position = std::max(s_.start, end - kSpan); position < end; ++position)
      std::memcpy(ring(position), input(position), count_ * sizeof(float));
  }

 private:
  float* ring(int64_t position) const {
    return m_.inputs + (s_.ring * m_.length + position % m_.length) * m_.channels + from_;
  }
  float* tail(int64_t slot, int64_t row) const { return m_.tails + (slot * (m_.kernel - 1) + row) * m_.channels + from_; }

  const float* input(int64_t position) const {
    if (position >= s_.start) return c_.x + (s_.first + position - s_.start) * c_.stride + from_;
    const int64_t base = span_start(s_.start);
    return position >= base ? ring(position) : tail(s_.closed, position - base + m_.kernel - 1);
  }

  void convolve(const float* const* inputs, float* out) const {
    const float* weight = c_.weight + from_;
    for (int64_t j = 0; j < count_; j += kLanes) {
      const int64_t n = count_ - j;
      vf sum = load_some(inputs[0] + j, n) * load_some(weight + j, n);
      for (int64_t tap = 1; tap < m_.kernel; ++tap)
        sum += load_some(inputs[tap] + j, n) * load_some(weight + tap * m_.channels + j, n);
      if (c_.bias != nullptr) sum += load_some(c_.bias + from_ + j, n);
      store_some(out + j, c_.silu ? silu(sum) : sum, n);
    }
  }

  void store_tails() const {
    vf zeros{};
    for (int64_t write = s_.first_write; write < s_.end_write; ++write) {
      const StateWrite& to = step_.writes[write];
      for (int64_t row = 0; row < m_.kernel - 1; ++row) {
        const float* from = input(to.end - (m_.kernel - 1) + row);
        for (int64_t j = 0; j < count_; j += kLanes) {
          const vf x = load_some(from + j, count_ - j);
          zeros += x - x;
          store_some(tail(to.slot, row) + j, x, count_ - j);
        }
      }
    }
    if (!finite(zeros)) mark_broken(step_, index_);
  }

  const StateStep& step_;
  const Convolution& c_;
  const StateMemory& m_;
  int64_t index_;
  const StateSequence& s_;
  int64_t from_, count_;
};

// Recurrences.

// Part of a scan that one task computes: the heads `head` to `end - 1` of a sequence, which use the same key head.
struct ScanTask {
  int64_t sequence;
  int64_t key_head;
  int64_t head;
  int64_t end;
};

inline void plan_scan(const StateStep& step, const StateMemory& memory, int64_t threads, std::vector<ScanTask>& tasks) {
  constexpr int64_t kTasksPerThread = 8;
  const int64_t repeats = memory.num_heads / memory.num_key_heads;
  const int64_t all = step.num_sequences * memory.num_heads;
  const int64_t heads = std::clamp<int64_t>(all / (threads * kTasksPerThread), 1, repeats);
  tasks.clear();
  for (int64_t sequence = 0; sequence < step.num_sequences; ++sequence)
    for (int64_t key_head = 0; key_head < memory.num_key_heads; ++key_head)
      for (int64_t first = key_head * repeats, end = first + repeats; first < end; first += heads)
        tasks.push_back({sequence, key_head, first, std::min(first + heads, end)});
}

// Multiplies kRows rows of `keys` elements by a state [keys, columns], for as many columns as kVectors vectors have.
template <int kRows, int kVectors>
inline void multiply_state(const float* const* rows, const float* state, int64_t stride, int64_t keys, float* out, int64_t out_stride) {
  vf sums[kRows][kVectors] = {};
  for (int64_t key = 0; key < keys; ++key) {
    vf columns[kVectors];
    for (int v = 0; v < kVectors; ++v) columns[v] = load(state + key * stride + v * kLanes);
    for (int row = 0; row < kRows; ++row)
      for (int v = 0; v < kVectors; ++v) sums[row][v] += splat(rows[row][key]) * columns[v];
  }
  for (int row = 0; row < kRows; ++row)
    for (int v = 0; v < kVectors; ++v) store(out + row * out_stride + v * kLanes, sums[row][v]);
}

template <int kVectors, int kRows = kTile>
inline void multiply_rows(const float* const* rows, int64_t count, const float* state, int64_t stride, int64_t keys, float* out,
                          int64_t out_stride) {
  if constexpr (kRows == kTile) {
    for (; count >= kTile; rows += kTile, count -= kTile, out += kTile * out_stride)
      multiply_state<kTile, kVectors>(rows, state, stride, keys, out, out_stride);
  } else if (count == kRows) {
    return multiply_state<kRows, kVectors>(rows, state, stride, keys, out, out_stride);
  }
  if constexpr (kRows > 1) {
    if (count > 0) multiply_rows<kVectors, kRows - 1>(rows, count, state, stride, keys, out, out_stride);
  }
}

// Computes the state at the end of a span, S = decays S + sum over rows j of factors[j] updates[j], for kRows keys and the columns
// from `column` on. `from` and `to` may be the same memory.
template <int kRows, int kVectors>
inline vf close_tile(const float* decays, const float* from, int64_t from_stride, const float* factors, int64_t factor_stride,
                     const float* const* updates, int64_t column, float* to, int64_t to_stride) {
  vf sums[kRows][kVectors], zeros{};
  for (int key = 0; key < kRows; ++key)
    for (int v = 0; v < kVectors; ++v) sums[key][v] = splat(decays[key]) * load(from + key * from_stride + v * kLanes);
  for (int64_t row = 0; row < kSpan; ++row)
    for (int v = 0; v < kVectors; ++v) {
      const vf update = load(updates[row] + column + v * kLanes);
      for (int key = 0; key < kRows; ++key) sums[key][v] += splat(factors[row * factor_stride + key]) * update;
    }
  for (int key = 0; key < kRows; ++key)
    for (int v = 0; v < kVectors; ++v) {
      zeros += sums[key][v] - sums[key][v];
      store(to + key * to_stride + v * kLanes, sums[key][v]);
    }
  return zeros;
}

// Memory of a thread for the intermediate results of one task.
struct ScanMemory {
  std::vector<float> updates, products, factors, states, sums, decayed, decays;
};

class ScanRunner {
 public:
  ScanRunner(const StateStep& step, const Scan& scan, const ScanTask& task, ScanMemory& memory)
      : step_(step), c_(scan), m_(scan.memory), task_(task), s_(step.sequences[task.sequence]), own_(memory) {
    width_ = whole_vectors(m_.value_size), direct_ = width_ == m_.value_size;
    key_width_ = whole_vectors(m_.key_size);
    own_.updates.assign(kSpan * width_, 0.0f);
    own_.products.resize(2 * kSpan * width_);
    own_.factors.resize(kSpan * key_width_);
    own_.decays.resize(key_width_);
    by_row_ = m_.decay_size > 1;
    if (by_row_) own_.sums.resize(kSpan * key_width_), own_.decayed.resize(2 * kSpan * key_width_);
    own_.states.resize((task.end - task.head) * m_.key_size * width_);
  }

  void operator()() {
    const int64_t end = s_.start + s_.count;
    std::vector<const float*> states;
    for (int64_t head = task_.head; head < task_.end; ++head) states.push_back(first_state(head));
    int64_t write = s_.first_write;
    for (int64_t base = span_start(s_.start); base < end; base += kSpan) {
      base_ = base, first_ = std::max(base, s_.start), last_ = std::min(base + kSpan, end);
      find_rows();
      if (!by_row_) multiply_keys();
      const bool whole = last_ == base + kSpan;
      const bool stored = whole && write < s_.end_write && step_.writes[write].end == last_;
      for (int64_t head = task_.head; head < task_.end; ++head) {
        const float*& state = states[head - task_.head];
        advance(head, state);
        if (stored) state = close(head, state, memory_of(step_.writes[write].slot, head), true);
        else if (whole && last_ < end) state = close(head, state, nullptr, false);
      }
      write += stored;
    }
  }

 private:
  float* memory_of(int64_t slot, int64_t head) const { return m_.closed + (slot * m_.num_heads + head) * m_.key_size * m_.value_size; }
  float* own_state(int64_t head) const { return own_.states.data() + (head - task_.head) * m_.key_size * width_; }
  int64_t row_of(int64_t position) const { return s_.ring * m_.length + position % m_.length; }
  int64_t token_of(int64_t position) const { return s_.first + position - s_.start; }
  // Returns whether the row of a position must be stored. Later steps read at most the rows of the last kSpan tokens.
  bool is_kept(int64_t position) const { return position >= s_.start + s_.count - kSpan; }
  float* update_row(int64_t position, int64_t head) const {
    return m_.updates + (row_of(position) * m_.num_heads + head) * m_.value_size;
  }

  // Returns the closed state [key size, width] of a head from which the sequence starts. Its rows are padded to a multiple of the
  // vector length.
  const float* first_state(int64_t head) const {
    const float* state = memory_of(s_.closed, head);
    if (direct_) return state;
    float* own = own_state(head);
    for (int64_t key = 0; key < m_.key_size; ++key) copy_padded(state + key * m_.value_size, own + key * width_);
    return own;
  }
  void copy_padded(const float* from, float* to) const {
    std::memcpy(to, from, m_.value_size * sizeof(float));
    std::fill(to + m_.value_size, to + width_, 0.0f);
  }

  void find_rows() {
    for (int64_t position = base_; position < last_; ++position) {
      const bool old = position < s_.start;
      const float* ring = m_.keys + (row_of(position) * m_.num_key_heads + task_.key_head) * m_.key_size;
      const float* given = c_.key + token_of(position) * c_.key_stride + task_.key_head * m_.key_size;
      keys_[position - base_] = old ? ring : given;
      if (position >= first_)
        queries_[position - base_] = c_.query + token_of(position) * c_.query_stride + task_.key_head * m_.key_size;
    }
  }

  float product(const float* a, const float* b) const {
    vf sum{};
    for (int64_t i = 0; i < m_.key_size; i += kLanes) sum += load_some(a + i, m_.key_size - i) * load_some(b + i, m_.key_size - i);
    return tree_sum(sum);
  }

  // Computes, for each token of the span, the products of its query and its key with the keys of all rows up to its own row.
  void multiply_keys() {
    for (int64_t t = first_ - base_; t < last_ - base_; ++t)
      for (int64_t j = 0; j <= t; ++j) {
        by_query_[t][j] = product(queries_[t], keys_[j]);
        if (c_.beta != nullptr && j < t) by_key_[t][j] = product(keys_[t], keys_[j]);
      }
  }

  // Computes the updates and outputs of the span's tokens for one head.
  void advance(int64_t head, const float* state) {
    const int64_t old = first_ - base_, count = last_ - base_;
    float* updates = own_.updates.data();
    for (int64_t j = 0; j < old; ++j) {
      if (!by_row_) sums_[j] = m_.decays[row_of(base_ + j) * m_.num_heads + head];
      const float* stored = update_row(base_ + j, head);
      if (!direct_) copy_padded(stored, updates + j * width_);
      updates_[j] = direct_ ? stored : updates + j * width_;
    }
    if (by_row_) decay_rows(head, old, count);
    multiply_by(state, old, count);
    for (int64_t t = old; t < count; ++t) {
      const int64_t token = token_of(base_ + t);
      float weights[kSpan], since = 1.0f;
      if (by_row_) {
        std::fill_n(weights, kSpan, 1.0f);  // by_query_ and by_key_ already contain the decays
      } else {
        sums_[t] = (t == 0 ? 0.0f : sums_[t - 1]) + c_.decay[token * c_.decay_stride + head];
        for (int64_t j = 0; j < kSpan; j += kLanes) store(weights + j, exponential(splat(sums_[t]) - load(sums_ + j)));
        since = exponential(splat(sums_[t]))[0];
        if (is_kept(base_ + t)) m_.decays[row_of(base_ + t) * m_.num_heads + head] = sums_[t];
      }
      const float* by_state = own_.products.data() + (t - old) * width_;
      float* update = updates + t * width_;
      updates_[t] = update;
      copy_padded(c_.value + token * c_.value_stride + head * m_.value_size, update);
      if (c_.beta != nullptr) {
        correct(update, c_.beta[token * c_.beta_stride + head], since, by_state, weights, t);
        by_state += (count - old) * width_;
      }
      put_output(token, head, since, by_state, weights, t);
      if (is_kept(base_ + t)) std::memcpy(update_row(base_ + t, head), update, m_.value_size * sizeof(float));
    }
  }

  float* decay_row(int64_t position, int64_t head) const {
    return m_.decays + (row_of(position) * m_.num_heads + head) * m_.decay_size;
  }

  // Does the work of multiply_keys for layers in which each row of a state has a decay. Computes the sums of decays for each row of
  // a state, and the keys and queries of the new tokens times their decays. Also computes the decayed products with the keys of all
  // rows up to a token's own row.
  void decay_rows(int64_t head, int64_t old, int64_t count) {
    const int64_t n = m_.key_size;
    float* sums = own_.sums.data();
    for (int64_t j = 0; j < old; ++j) std::memcpy(sums + j * key_width_, decay_row(base_ + j, head), n * sizeof(float));
    for (int64_t t = old; t < count; ++t) {
      const float* decay = c_.decay + token_of(base_ + t) * c_.decay_stride + head * n;
      float *own = sums + t * key_width_, *keys = own_.decayed.data() + t * key_width_, *queries = keys + kSpan * key_width_;
      for (int64_t i = 0; i < n; i += kLanes) {
        const vf before = t == 0 ? vf{} : load_some(own - key_width_ + i, n - i);
        const vf sum = before + load_some(decay + i, n - i), since = exponential(sum);
        store_some(own + i, sum, n - i);
        store_some(keys + i, load_some(keys_[t] + i, n - i) * since, n - i);
        store_some(queries + i, load_some(queries_[t] + i, n - i) * since, n - i);
      }
      if (is_kept(base_ + t)) std::memcpy(decay_row(base_ + t, head), own, n * sizeof(float));
      for (int64_t j = 0; j <= t; ++j) {
        vf by_key{}, by_query{};
        for (int64_t i = 0; i < n; i += kLanes) {
          const vf lag = load_some(own + i, n - i) - load_some(sums + j * key_width_ + i, n - i);
          const vf key = exponential(lag) * load_some(keys_[j] + i, n - i);
          by_key += load_some(keys_[t] + i, n - i) * key;
          by_query += load_some(queries_[t] + i, n - i) * key;
        }
        by_key_[t][j] = tree_sum(by_key), by_query_[t][j] = tree_sum(by_query);
      }
    }
  }

  // Multiplies the queries of the new tokens by the state, and before that also the keys, if the recurrence has a correction
  // (beta).
  void multiply_by(const float* state, int64_t old, int64_t count) {
    const float* rows[2 * kSpan];
    int64_t num_rows = 0;
    const float* decayed = own_.decayed.data();
    if (c_.beta != nullptr)
      for (int64_t t = old; t < count; ++t) rows[num_rows++] = by_row_ ? decayed + t * key_width_ : keys_[t];
    for (int64_t t = old; t < count; ++t) rows[num_rows++] = by_row_ ? decayed + (kSpan + t) * key_width_ : queries_[t];
    float* out = own_.products.data();
    int64_t column = 0;
    if (num_rows <= 2)
      for (; column + kWide * kLanes <= width_; column += kWide * kLanes)
        multiply_rows<kWide, 2>(rows, num_rows, state + column, width_, m_.key_size, out + column, width_);
    for (; column + kPanel <= width_; column += kPanel)
      multiply_rows<2>(rows, num_rows, state + column, width_, m_.key_size, out + column, width_);
    if (column < width_) multiply_rows<1>(rows, num_rows, state + column, width_, m_.key_size, out + column, width_);
  }

  void correct(float* update, float beta, float since, const float* by_state, const float* weights, int64_t t) const {
    for (int64_t column = 0; column < width_; column += kLanes) {
      vf known = splat(since) * load(by_state + column);
      for (int64_t j = 0; j < t; ++j) known += splat(weights[j] * by_key_[t][j]) * load(updates_[j] + column);
      store(update + column, splat(beta) * (load(update + column) - known));
    }
  }

  void put_output(int64_t token, int64_t head, float since, const float* by_state, const float* weights, int64_t t) const {
    float* out = c_.out + token * c_.out_stride + head * m_.value_size;
    for (int64_t column = 0; column < width_; column += kLanes) {
      vf sum = splat(since) * load(by_state + column);
      for (int64_t j = 0; j <= t; ++j) sum += splat(weights[j] * by_query_[t][j]) * load(updates_[j] + column);
      store_some(out + column, sum, m_.value_size - column);
    }
  }

  // Computes and returns the state at the end of the span. If `stored` is true, the state is written to `to`.
  const float* close(int64_t head, const float* state, float* to, bool stored) {
    float* at = stored && direct_ ? to : own_state(head);
    if (by_row_) decay_rows_to_end();
    else decay_to_end();
    vf zeros{};
    int64_t column = 0;
    for (; column + kPanel <= width_; column += kPanel) zeros += close_columns<2>(state, at, column);
    if (column < width_) zeros += close_columns<1>(state, at, column);
    if (stored && !direct_)
      for (int64_t key = 0; key < m_.key_size; ++key)
        std::memcpy(to + key * m_.value_size, at + key * width_, m_.value_size * sizeof(float));
    if (stored && !finite(zeros)) mark_broken(step_, task_.sequence);
    return at;
  }

  // Computes the decay of the state over the whole span, and the keys of the span times their decays until the end of the span.
  void decay_to_end() {
    float weights[kSpan];
    for (int64_t j = 0; j < kSpan; j += kLanes) store(weights + j, exponential(splat(sums_[kSpan - 1]) - load(sums_ + j)));
    for (int64_t j = 0; j < kSpan; ++j)
      for (int64_t key = 0; key < m_.key_size; ++key) own_.factors[j * key_width_ + key] = weights[j] * keys_[j][key];
    std::fill_n(own_.decays.begin(), m_.key_size, exponential(splat(sums_[kSpan - 1]))[0]);
  }
  void decay_rows_to_end() {
    const int64_t n = m_.key_size;
    const float* last = own_.sums.data() + (kSpan - 1) * key_width_;
    for (int64_t i = 0; i < n; i += kLanes) {
      const vf total = load_some(last + i, n - i);
      store_some(own_.decays.data() + i, exponential(total), n - i);
      for (int64_t j = 0; j < kSpan; ++j) {
        const vf left = exponential(total - load_some(own_.sums.data() + j * key_width_ + i, n - i));
        store_some(own_.factors.data() + j * key_width_ + i, left * load_some(keys_[j] + i, n - i), n - i);
      }
    }
  }

  template <int kVectors>
  vf close_columns(const float* from, float* to, int64_t column) const {
    constexpr int kKeys = 4;
    vf zeros{};
    const float* decays = own_.decays.data();
    int64_t key = 0;
    for (; key + kKeys <= m_.key_size; key += kKeys)
      zeros += close_tile<kKeys, kVectors>(decays + key, from + key * width_ + column, width_, own_.factors.data() + key, key_width_,
                                           updates_, column, to + key * width_ + column, width_);
    for (; key < m_.key_size; ++key)
      zeros += close_tile<1, kVectors>(decays + key, from + key * width_ + column, width_, own_.factors.data() + key, key_width_,
                                       updates_, column, to + key * width_ + column, width_);
    return zeros;
  }

  const StateStep& step_;
  const Scan& c_;
  const StateMemory& m_;
  const ScanTask& task_;
  const StateSequence& s_;
  ScanMemory& own_;
  int64_t width_, key_width_;
  bool by_row_;  // each row of a state has a decay
  bool direct_;  // whether states need no padding, so that they are used in the memory where they are stored
  int64_t base_ = 0, first_ = 0, last_ = 0;  // positions: start of the span, its first token in the step, end of its tokens
  const float *keys_[kSpan] = {}, *queries_[kSpan] = {}, *updates_[kSpan] = {};
  float by_query_[kSpan][kSpan] = {}, by_key_[kSpan][kSpan] = {};
  float sums_[kSpan] = {};
};

inline void run_scan(const StateStep& step, const Scan& scan, const ScanTask& task) {
  static thread_local ScanMemory memory;
  ScanRunner(step, scan, task, memory)();
}

// Stores the keys of the last tokens of a sequence in the ring. Call this function after all tasks of the scan, because the tasks
// read old keys that this function overwrites.
inline void store_keys(const StateStep& step, const Scan& scan, int64_t sequence) {
  const StateSequence& s = step.sequences[sequence];
  const StateMemory& m = scan.memory;
  const int64_t end = s.start + s.count, width = m.num_key_heads * m.key_size;
  for (int64_t position = std::max(s.start, end - kSpan); position < end; ++position)
    std::memcpy(m.keys + (s.ring * m.length + position % m.length) * width, scan.key + (s.first + position - s.start) * scan.key_stride,
                width * sizeof(float));
}

}  // namespace penstock
