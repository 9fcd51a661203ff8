// LoRA over the rank rows of many adapters: shrink is `dots`, expand is `mix`.

#include <algorithm>
#include <memory>
#include <vector>

#include "kernels.hpp"
#include "vector.hpp"

namespace {

// Fewer values than this are not worth waking a thread.
constexpr int64_t kParallel = 1 << 14;

// `count` values in fp32: as they are, or converted into `buffer`.
const float* widened(const float* x, int64_t, std::vector<float>&) { return x; }
template <class T>
const float* widened(const T* x, int64_t count, std::vector<float>& buffer) {
  buffer.resize(count);
  const int64_t whole = count / kLanes * kLanes;
#pragma omp parallel for if (count >= kParallel)
  for (int64_t i = 0; i < whole; i += kLanes) store(buffer.data() + i, load(x + i));
  for (int64_t i = whole; i < count; i++) buffer[i] = load_one(x[i]);
  return buffer.data();
}

constexpr int64_t kShrinkRows = 64, kExpandColumns = 16 * kLanes, kLine = 64 / sizeof(float);

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
  int32_t largest = 0;  // rank here: what is kept between shrink and expand costs what these adapters need, not what may come
  for (int64_t segment = 0; segment < l.segments; segment++)
    for (int32_t first = l.seg_indptr[segment]; first < l.seg_indptr[segment + 1]; first += kShrinkRows) {
      const int32_t last = std::min<int32_t>(first + kShrinkRows, l.seg_indptr[segment + 1]);
      const int32_t adapter = l.seg_adapter[segment], *ranks = l.ranks + adapter * l.slices;
      // Rank rows of all slices lie side by side: one after the other they are one stretch of memory.
      const int32_t most = *std::max_element(ranks, ranks + l.slices);
      largest = std::max(largest, most);
      for (int32_t j = 0; j < most; j += 4)
        for (int32_t s = 0; s < l.slices; s++)
          if (j < ranks[s]) shrinks.push_back({adapter, first, last, s, j, std::min(j + 4, ranks[s])});
      for (int32_t s = 0; s < l.slices; s++) {
        if (!ranks[s]) continue;
        for (int64_t column = l.offsets[s]; column < l.offsets[s + 1]; column += kExpandColumns)
          expands.push_back({adapter, first, last, s, int32_t(column), int32_t(std::min(column + kExpandColumns, l.offsets[s + 1]))});
      }
    }
  // By place in `order`. Not cleared: what is read was written. An odd number of cache lines a row, or a column of rows would
  // share few sets of the cache.
  const int64_t width = (l.slices * largest + kLine - 1) / kLine * kLine | kLine;
  const std::unique_ptr<float[]> shrunk(new float[l.seg_indptr[l.segments] * width]);
#pragma omp parallel
  {
#pragma omp for schedule(dynamic, 4)
    for (size_t i = 0; i < shrinks.size(); i++) {
      const Piece& p = shrinks[i];
      const T* four[4];
      for (int32_t j = 0; j < 4; j++)
        four[j] = a + (l.row_table[p.adapter * l.max_rank + std::min(p.low + j, p.high - 1)] * l.slices + p.slice) * l.k;
      float* to = shrunk.get() + p.first * width + p.slice * largest;
      dots<kNear>(p.last - p.first, [&](int64_t t) { return x + l.order[p.first + t] * l.k; }, four, l.k, [&](int64_t t, Vec4 v) {
        for (int32_t j = p.low; j < p.high; j++) to[t * width + j] = v[j - p.low];
      });
    }
#pragma omp for schedule(dynamic, 4)
    for (size_t i = 0; i < expands.size(); i++) {
      const Piece& p = expands[i];
      mix<kNear>([&](int64_t t) { return y + l.order[p.first + t] * l.n + p.low; }, p.last - p.first,
          shrunk.get() + p.first * width + p.slice * largest, width, l.ranks[p.adapter * l.slices + p.slice], p.high - p.low,
          [&](int64_t j) { return b + l.row_table[p.adapter * l.max_rank + j] * l.n + p.low; });
    }
  }
}

}  // namespace

// As Ops.lora. Segment i: token rows order[seg_indptr[i] : seg_indptr[i + 1]] of adapter seg_adapter[i].
extern "C" void lora(int type, void* y, const void* x, const void* a, const void* b, const int32_t* order, const int32_t* seg_indptr,
          const int32_t* seg_adapter, int64_t segments, const int32_t* row_table, const int32_t* ranks,
          const int64_t* offsets, int64_t slices, int64_t max_rank, int64_t rows, int64_t k, int64_t n) {
  with_type(type, [&](auto tag) {
    using T = decltype(tag);
    const Lora layer{order, seg_indptr, seg_adapter, row_table, ranks, offsets, segments, slices, max_rank, k, n};
    lora(static_cast<T*>(y), static_cast<const T*>(x), static_cast<const T*>(a), static_cast<const T*>(b), layer, rows);
  });
}
