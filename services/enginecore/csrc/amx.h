// Matrix products on the matrix unit (AMX) of x86 processors. The unit has eight tiles of up to 16 rows of 64 bytes.
// A strip of input rows is multiplied by one panel of weights at a time. Each output is computed in a fixed order of additions. The
// order is over blocks of kBlockInputs inputs, in each block over the parts of the inputs (see parts.h) from the smallest part, and
// in each part in the unit's own order. The unit's own order is the same for all rows of a tile, so the result of a row does not
// depend on other rows.
// Compilers do not treat loads of tiles as memory accesses, so they could move the load of a tile before the write of its data.
// This cannot happen here. The data was written before the thread took the task, and the thread reads the phase counters between
// this write and the load.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <array>
#include <cstdint>

#include "parts.h"
#include "vec.h"

namespace penstock {

static_assert(kLanes == 16 && kBlockInputs == 32);

constexpr int64_t kTileRows = 16;
constexpr int64_t kStripRows = 2 * kTileRows;

// Configuration of the matrix unit's tiles, in the format of the processor.
struct alignas(64) TileShapes {
  uint8_t palette = 1;
  uint8_t reserved[15] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};
static_assert(sizeof(TileShapes) == 64);

// Configurations of the tiles for strips of 1 to kStripRows rows. Tiles 0 and 1 are the left and right sums of the upper rows.
// Tiles 2 and 3 are the left and right sums of the lower rows. Tiles 4 and 5 are the inputs of the upper and lower rows. Tiles 6
// and 7 are the left and right weights.
constexpr std::array<TileShapes, kStripRows> kTileShapes = [] {
  std::array<TileShapes, kStripRows> all{};
  for (int64_t rows = 1; rows <= kStripRows; ++rows) {
    const auto shape = [&, rows](int tile, int64_t count) {
      all[rows - 1].rows[tile] = static_cast<uint8_t>(count);
      all[rows - 1].row_bytes[tile] = count > 0 ? 64 : 0;
    };
    for (int tile : {0, 1, 4}) shape(tile, std::min(rows, kTileRows));
    for (int tile : {2, 3, 5}) shape(tile, std::max<int64_t>(rows - kTileRows, 0));
    for (int tile : {6, 7}) shape(tile, kTileRows);
  }
  return all;
}();

// Use of the matrix unit by this thread, until the end of a task. While a thread uses tiles, the operating system must save more
// registers of the thread.
class MatrixUnit {
 public:
  MatrixUnit() = default;
  ~MatrixUnit() { _tile_release(); }
  MatrixUnit(const MatrixUnit&) = delete;
  MatrixUnit& operator=(const MatrixUnit&) = delete;

  // Computes `sums` [rows, kPanel]: the product of `rows` input rows, which are split into parts, and a panel of `blocks` blocks.
  // There are at most kStripRows rows, with a stride of `stride` bytes. If `halved` is true, inputs and weights have two parts each
  // (see kHalved).
  void multiply(const float* row, int64_t stride, int64_t rows, int64_t parts, bool halved, const uint16_t* panel, int64_t blocks,
                float* sums) {
    if (rows != rows_) _tile_loadconfig(&kTileShapes[rows - 1]);
    rows_ = rows;
    const auto* inputs = reinterpret_cast<const uint8_t*>(row);
    if (halved) {
      if (rows > kTileRows) sum_up_halves<true>(inputs, stride, panel, blocks, sums);
      else sum_up_halves<false>(inputs, stride, panel, blocks, sums);
    } else {
      if (rows > kTileRows) sum_up<true>(inputs, stride, parts, panel, blocks, sums);
      else sum_up<false>(inputs, stride, parts, panel, blocks, sums);
    }
  }

 private:
  template <bool kLower>
  static void sum_up(const uint8_t* inputs, int64_t stride, int64_t parts, const uint16_t* panel, int64_t blocks, float* sums) {
    const uint8_t* lower = kLower ? inputs + kTileRows * stride : inputs;
    clear<kLower>();
    for (int64_t block = 0; block < blocks; ++block, panel += kBlockInputs * kPanel) {
      load_weights(panel);
      for (int64_t part = 0; part < parts; ++part, inputs += 64, lower += 64) {
        load_inputs<kLower>(inputs, lower, stride);
        add<kLower>();
      }
    }
    put<kLower>(sums);
  }

  // Adds, in each block, the products of the weights' remainders with the rounded inputs, of the rounded weights with the inputs'
  // remainders, and of the rounded weights with the rounded inputs.
  template <bool kLower>
  static void sum_up_halves(const uint8_t* inputs, int64_t stride, const uint16_t* panel, int64_t blocks, float* sums) {
    constexpr int64_t kBlock = kBlockInputs * kPanel;
    const uint8_t* lower = kLower ? inputs + kTileRows * stride : inputs;
    clear<kLower>();
    for (int64_t block = 0; block < blocks; ++block, panel += 2 * kBlock, inputs += 128, lower += 128) {
      load_weights(panel);
      load_inputs<kLower>(inputs + 64, lower + 64, stride);
      add<kLower>();
      load_weights(panel + kBlock);
      add<kLower>();
      load_inputs<kLower>(inputs, lower, stride);
      add<kLower>();
    }
    put<kLower>(sums);
  }

  static constexpr int64_t kRowBytes = kPanel * sizeof(float);  // of the sums, and of a panel's pairs of inputs

  template <bool kLower>
  static void clear() {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (kLower) {
      _tile_zero(2);
      _tile_zero(3);
    }
  }

  static void load_weights(const uint16_t* panel) {
    _tile_loadd(6, panel, kRowBytes);
    _tile_loadd(7, panel + kPanel, kRowBytes);
  }

  template <bool kLower>
  static void load_inputs(const uint8_t* inputs, const uint8_t* lower, int64_t stride) {
    _tile_loadd(4, inputs, stride);
    if constexpr (kLower) _tile_loadd(5, lower, stride);
  }

  template <bool kLower>
  static void add() {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (kLower) {
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }

  template <bool kLower>
  static void put(float* sums) {
    _tile_stored(0, sums, kRowBytes);
    _tile_stored(1, sums + kLanes, kRowBytes);
    if constexpr (kLower) {
      _tile_stored(2, sums + kTileRows * kPanel, kRowBytes);
      _tile_stored(3, sums + kTileRows * kPanel + kLanes, kRowBytes);
    }
  }

  int64_t rows_ = 0;  // number of rows for which the tiles are configured
};

}  // namespace penstock
