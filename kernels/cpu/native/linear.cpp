// Products with weight matrices: linears for few rows, and LoRA.

#include <algorithm>
#include <vector>

#include "vector.hpp"

namespace {

// `count` values in fp32: as they are, or converted into `buffer`.
const float* widened(const float* x, int64_t, std::vector<float>&) { return x; }
template <class T>
const float* widened(const T* x, int64_t count, std::vector<float>& buffer) {
  buffer.resize(count);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(buffer.data() + i, load(x + i));
  for (; i < count; i++) buffer[i] = load_one(x[i]);
  return buffer.data();
}

constexpr int64_t kPrefetchBytes = 1 << 13;  // how far ahead of the weights in use

template <class T, class W>
void linear(T* y, const float* x, const W* w, const float* scales, const T* bias, int64_t rows, int64_t n, int64_t k) {
  // Rows of x that stay in the second-level cache while the weights pass by.
  const int64_t block = std::max<int64_t>(kTileRows, (1 << 16) / k / kTileRows * kTileRows);
  const int64_t tiles = (n + 3) / 4;
#pragma omp parallel
  {
    std::vector<float> buffer;
    for (int64_t start = 0; start < rows; start += block) {
      const int64_t stop = std::min(start + block, rows);
#pragma omp for schedule(static) nowait
      for (int64_t tile = 0; tile < tiles; tile++) {
        const int64_t column = tile * 4, count = std::min<int64_t>(4, n - column);
        Vec4 scale{1, 1, 1, 1}, offset{};
        for (int64_t j = 0; j < count; j++) {
          if (scales) scale[j] = scales[column + j];
          if (bias) offset[j] = load_one(bias[column + j]);
        }
        auto take = [&](int64_t t, Vec4 v) {
          v = v * scale + offset;
          T* to = y + (start + t) * n + column;
          if (count == 4)
            store(to, v);
          else
            for (int64_t j = 0; j < count; j++) store_one(to + j, v[j]);
        };
        auto multiply = [&](const auto* first) {
          decltype(first) four[4];
          for (int64_t j = 0; j < 4; j++) four[j] = first + std::min(j, count - 1) * k;
          dots(stop - start, [&](int64_t t) { return x + (start + t) * k; }, four, k, take);
        };
        prefetch(reinterpret_cast<const char*>(w + column * k) + kPrefetchBytes, count * k * sizeof(W));
        if (stop - start <= kTileRows)
          multiply(w + column * k);
        else  // each weight is used more than once: widen it once
          multiply(widened(w + column * k, count * k, buffer));
      }
    }
  }
}

constexpr int64_t kShrinkRows = 64, kExpandColumns = 16 * kLanes;

struct Lora {
  const int32_t *order, *seg_indptr, *seg_adapter, *row_table, *ranks;
  const int64_t* offsets;
  int64_t segments, slices, max_rank, k, n;
};

// Work on one segment's tokens order[first : last]; `low` is a rank row (shrink) or an output column (expand).
struct Piece {
  int32_t adapter, first, last, slice, low, high;
};

template <class T>
void lora(T* y, const T* x_rows, const T* a, const T* b, const Lora& l, int64_t rows) {
  std::vector<float> buffer;
  const float* x = widened(x_rows, rows * l.k, buffer);
  std::vector<Piece> shrinks, expands;
  for (int64_t segment = 0; segment < l.segments; segment++)
    for (int32_t s = 0; s < l.slices; s++) {
      const int32_t adapter = l.seg_adapter[segment], rank = l.ranks[adapter * l.slices + s];
      if (!rank) continue;
      for (int32_t first = l.seg_indptr[segment]; first < l.seg_indptr[segment + 1]; first += kShrinkRows) {
        const int32_t last = std::min<int32_t>(first + kShrinkRows, l.seg_indptr[segment + 1]);
        for (int32_t j = 0; j < rank; j += 4) shrinks.push_back({adapter, first, last, s, j, std::min(j + 4, rank)});
        for (int64_t column = l.offsets[s]; column < l.offsets[s + 1]; column += kExpandColumns)
          expands.push_back({adapter, first, last, s, int32_t(column), int32_t(std::min(column + kExpandColumns, l.offsets[s + 1]))});
      }
    }
  const int64_t width = l.slices * l.max_rank;
  std::vector<float> shrunk(l.seg_indptr[l.segments] * width);  // by place in `order`
#pragma omp parallel
  {
    std::vector<float> delta(kShrinkRows * kExpandColumns);
#pragma omp for schedule(dynamic, 4)
    for (size_t i = 0; i < shrinks.size(); i++) {
      const Piece& p = shrinks[i];
      const T* four[4];
      for (int32_t j = 0; j < 4; j++)
        four[j] = a + (l.row_table[p.adapter * l.max_rank + std::min(p.low + j, p.high - 1)] * l.slices + p.slice) * l.k;
      float* to = shrunk.data() + p.first * width + p.slice * l.max_rank;
      dots(p.last - p.first, [&](int64_t t) { return x + l.order[p.first + t] * l.k; }, four, l.k, [&](int64_t t, Vec4 v) {
        for (int32_t j = p.low; j < p.high; j++) to[t * width + j] = v[j - p.low];
      });
    }
#pragma omp for schedule(dynamic, 4)
    for (size_t i = 0; i < expands.size(); i++) {
      const Piece& p = expands[i];
      const int64_t columns = p.high - p.low, count = p.last - p.first;
      std::fill_n(delta.data(), count * columns, 0.0f);
      mix(delta.data(), columns, count, shrunk.data() + p.first * width + p.slice * l.max_rank, width,
          l.ranks[p.adapter * l.slices + p.slice], columns,
          [&](int64_t j) { return b + l.row_table[p.adapter * l.max_rank + j] * l.n + p.low; });
      for (int64_t t = 0; t < count; t++) {
        T* to = y + l.order[p.first + t] * l.n + p.low;
        const float* from = delta.data() + t * columns;
        int64_t c = 0;
        for (; c + kLanes <= columns; c += kLanes) store(to + c, load(to + c) + load(from + c));
        for (; c < columns; c++) store_one(to + c, load_one(to[c]) + from[c]);
      }
    }
  }
}

}  // namespace

extern "C" {

// y [rows, n] = x [rows, k] . w [n, k] (* scales [n]) (+ bias [n]). weight_type 0 fp32, 1 bf16, 2 int8 with scales.
void linear(int type, int weight_type, void* y, const void* x, const void* w, const float* scales, const void* bias,
            int64_t rows, int64_t n, int64_t k) {
  with_type(type, [&](auto tag) {
    using T = decltype(tag);
    std::vector<float> buffer;
    const float* wide = widened(static_cast<const T*>(x), rows * k, buffer);
    T* to = static_cast<T*>(y);
    const T* b = static_cast<const T*>(bias);
    if (weight_type == 0) linear(to, wide, static_cast<const float*>(w), scales, b, rows, n, k);
    if (weight_type == 1) linear(to, wide, static_cast<const BFloat16*>(w), scales, b, rows, n, k);
    if (weight_type == 2) linear(to, wide, static_cast<const int8_t*>(w), scales, b, rows, n, k);
  });
}

// As Ops.lora. Segment i: token rows order[seg_indptr[i] : seg_indptr[i + 1]] of adapter seg_adapter[i].
void lora(int type, void* y, const void* x, const void* a, const void* b, const int32_t* order, const int32_t* seg_indptr,
          const int32_t* seg_adapter, int64_t segments, const int32_t* row_table, const int32_t* ranks,
          const int64_t* offsets, int64_t slices, int64_t max_rank, int64_t rows, int64_t k, int64_t n) {
  with_type(type, [&](auto tag) {
    using T = decltype(tag);
    const Lora layer{order, seg_indptr, seg_adapter, row_table, ranks, offsets, segments, slices, max_rank, k, n};
    lora(static_cast<T*>(y), static_cast<const T*>(x), static_cast<const T*>(a), static_cast<const T*>(b), layer, rows);
  });
}

}  // extern "C"
