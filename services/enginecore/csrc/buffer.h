// Memory for rows of numbers, which all steps reuse.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace penstock {

inline int64_t padded(int64_t width) { return width + 16; }  // rows at a distance of a power of two would use the same cache sets

class Buffer {
 public:
  // Allocates memory for at least `rows` rows of `width` numbers. Each row is padded. If the buffer must grow, its content is lost.
  void resize(int64_t rows, int64_t width) {
    stride_ = padded(width);
    const size_t bytes = (static_cast<size_t>(rows * stride_) * sizeof(float) + 63) / 64 * 64;
    if (bytes > bytes_) {
      data_.reset(static_cast<float*>(std::aligned_alloc(64, bytes)));
      if (data_ == nullptr) throw std::bad_alloc();
      bytes_ = bytes;
    }
  }
  float* row(int64_t i) const { return data_.get() + i * stride_; }
  float* data() const { return data_.get(); }
  int64_t stride() const { return stride_; }

 private:
  struct Free {
    void operator()(float* p) const { std::free(p); }
  };
  std::unique_ptr<float, Free> data_;
  size_t bytes_ = 0;
  int64_t stride_ = 0;
};

}  // namespace penstock
