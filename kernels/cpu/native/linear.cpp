// Products with weight matrices. A weight is packed once: panels of kPanel outputs, each [k][kPanel], the last one filled up
// with zeros. A tile keeps the sums of a few rows times one panel in registers and walks down k, so every output is one
// sum in the order of k, whatever the number of rows, the storage, the tile and the thread: a row alone gives the same bits.
//
// The blocking is that of Goto and van de Geijn, "Anatomy of high-performance matrix multiplication" (2008): a panel's
// kDepth stays in the first-level cache while all rows pass by.

#include <algorithm>
#include <memory>
#include <type_traits>

#include "kernels.hpp"
#include "vector.hpp"

namespace {

constexpr int kPanelVectors = 3;
constexpr int64_t kPanel = kPanelVectors * kLanes;
#ifdef __AVX512F__
constexpr int kMostRows = 8;  // of a tile: rows * kPanelVectors sums, kPanelVectors weights and a value fill the registers
#else
constexpr int kMostRows = 4;
#endif
constexpr int64_t kDepth = 192;
constexpr int64_t kSteps = 8;  // of a tile in depth, between two looks at what to ask for
constexpr int64_t kBlockRows = 256;  // their sums stay in the second-level cache
// Fewer multiplications than this are not worth waking a thread.
constexpr int64_t kParallel = 1 << 15;

// What a tile asks for while it computes: `lines` of 64 bytes from `next` on. Spread over its steps, since a core waits once too
// many are under way: with all of them asked for before the tile, 8 to 32 rows took a quarter to a half longer.
struct Ahead {
  const char* next = nullptr;
  int64_t lines = 0;
};

// sums [ROWS][kPanel] += x [ROWS, depth] . w [depth][kPanel]
template <int ROWS, class W>
inline void tile(const float* x, int64_t x_stride, const W* w, int64_t depth, float* sums, Ahead ahead) {
  Vec total[ROWS][kPanelVectors];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
    for (int v = 0; v < kPanelVectors; v++) total[r][v] = load(sums + r * kPanel + v * kLanes);
  auto step = [&](int64_t i) __attribute__((always_inline)) {
    Vec weight[kPanelVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kPanelVectors; v++) weight[v] = held(load(w + i * kPanel + v * kLanes));
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
      const Vec value = held(splat(x[r * x_stride + i]));
#pragma GCC unroll 8
      for (int v = 0; v < kPanelVectors; v++) total[r][v] = multiply_add(value, weight[v], total[r][v]);
    }
  };
  const int64_t lines = (ahead.lines * kSteps + depth - 1) / depth;  // every kSteps
  const char* const end = ahead.next + 64 * ahead.lines;
  int64_t i = 0;
  for (; i + kSteps <= depth; i += kSteps) {
    for (int64_t line = 0; line < lines && ahead.next < end; line++, ahead.next += 64) __builtin_prefetch(ahead.next, 0, 2);
#pragma GCC unroll 8
    for (int64_t j = 0; j < kSteps; j++) step(i + j);
  }
  for (; i < depth; i++) step(i);
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
    for (int v = 0; v < kPanelVectors; v++) store(sums + r * kPanel + v * kLanes, total[r][v]);
}

// As `tile` for one row and two panels, `panel` elements apart: twice as many sums to go on with while additions complete.
template <class W>
inline void tile_pair(const float* x, const W* w, int64_t panel, int64_t depth, float* sums) {
  Vec total[2][kPanelVectors];
#pragma GCC unroll 8
  for (int p = 0; p < 2; p++)
#pragma GCC unroll 8
    for (int v = 0; v < kPanelVectors; v++) total[p][v] = load(sums + p * kPanel + v * kLanes);
  auto step = [&](int64_t i) __attribute__((always_inline)) {
    const Vec value = splat(x[i]);
#pragma GCC unroll 8
    for (int p = 0; p < 2; p++)
#pragma GCC unroll 8
      for (int v = 0; v < kPanelVectors; v++)
        total[p][v] = multiply_add(value, load(w + p * panel + i * kPanel + v * kLanes), total[p][v]);
  };
  int64_t i = 0;
  // Panels of bytes end before the processor has foreseen much of them: the next pair's are asked for. Wider ones keep memory
  // busy as it is.
  if constexpr (sizeof(W) == 1)
    for (; i + kSteps <= depth; i += kSteps) {
#pragma GCC unroll 8
      for (int64_t p = 2; p < 4; p++) prefetch(w + p * panel + i * kPanel, kSteps * kPanel);
#pragma GCC unroll 8
      for (int64_t j = 0; j < kSteps; j++) step(i + j);
    }
  for (; i < depth; i++) step(i);
#pragma GCC unroll 8
  for (int p = 0; p < 2; p++)
#pragma GCC unroll 8
    for (int v = 0; v < kPanelVectors; v++) store(sums + p * kPanel + v * kLanes, total[p][v]);
}

// As `tile` for any number of rows.
template <int ROWS = kMostRows, class W>
void tiles(const float* x, int64_t x_stride, int64_t rows, const W* w, int64_t depth, float* sums, Ahead ahead) {
  int64_t r = 0;
  for (; r + ROWS <= rows; r += ROWS) {
    tile<ROWS>(x + r * x_stride, x_stride, w, depth, sums + r * kPanel, ahead);
    ahead.next += 64 * ahead.lines;
  }
  if constexpr (ROWS > 1)
    if (r < rows) tiles<ROWS - 1>(x + r * x_stride, x_stride, rows - r, w, depth, sums + r * kPanel, ahead);
}

template <class Y, class T, class W>
void linear(Y* y, const T* x, const W* w, const float* scales, const T* bias, int64_t rows, int64_t n, int64_t k) {
  const int64_t panels = (n + kPanel - 1) / kPanel;
  // Not cleared, like the others here: what is read was written.
  std::unique_ptr<float[]> wide_x;
  const float* values;
  if constexpr (std::is_same_v<T, float>) {
    values = x;
  } else {
    wide_x.reset(new float[rows * k]);
    values = wide_x.get();
#pragma omp parallel for if (rows * k >= kParallel)
    for (int64_t t = 0; t < rows; t++) {
      int64_t i = t * k;
      for (; i + kLanes <= (t + 1) * k; i += kLanes) store(wide_x.get() + i, load(x + i));
      for (; i < (t + 1) * k; i++) wide_x[i] = load_one(x[i]);
    }
  }
#pragma omp parallel if (rows * n * k >= kParallel)
  {
    const std::unique_ptr<float[]> sums(new float[std::max<int64_t>(2, std::min(rows, kBlockRows)) * kPanel]);
    const std::unique_ptr<float[]> wide(new float[kDepth * kPanel]);
    // sums [count][kPanel] += rows `start` on times panel p
    auto multiply = [&](int64_t start, int64_t count, int64_t p) {
      for (int64_t i = 0; i < k; i += kDepth) {
        const int64_t depth = std::min(kDepth, k - i);
        const float* from = values + start * k + i;
        const W* part = w + (p * k + i) * kPanel;
        // The weights after these, a share with each tile of rows.
        const int64_t bytes = depth * kPanel * sizeof(W), shares = (count + kMostRows - 1) / kMostRows;
        const Ahead ahead{reinterpret_cast<const char*>(part) + bytes, (bytes / 64 + shares - 1) / shares};
        if (std::is_same_v<W, float> || count <= kMostRows) {
          tiles(from, k, count, part, depth, sums.get(), ahead);
        } else {  // each weight is used by several tiles: widen it once
          for (int64_t j = 0; j < depth * kPanel; j += kLanes) store(wide.get() + j, load(part + j));
          tiles(from, k, count, static_cast<const float*>(wide.get()), depth, sums.get(), ahead);
        }
      }
    };
    auto write = [&](int64_t start, int64_t count, int64_t p, float* from) {
      const int64_t first = p * kPanel, width = std::min(kPanel, n - first);
      for (int64_t t = 0; t < count; t++, from += kPanel) {
        Y* to = y + (start + t) * n + first;
        if (scales)
          for (int64_t j = 0; j < width; j++) from[j] *= scales[first + j];
        if (bias)
          for (int64_t j = 0; j < width; j++) from[j] += load_one(bias[first + j]);
        int64_t j = 0;
        for (; j + kLanes <= width; j += kLanes) store(to + j, load(from + j));
        for (; j < width; j++) store_one(to + j, from[j]);
      }
    };
    for (int64_t start = 0; start < rows; start += kBlockRows) {
      const int64_t count = std::min(kBlockRows, rows - start);
      const int64_t step = count == 1 ? 2 : 1;
#pragma omp for schedule(guided) nowait
      for (int64_t p = 0; p < panels; p += step) {
        const int64_t both = std::min<int64_t>(step, panels - p);
        if (count == 1 && both == 2) {
          std::fill_n(sums.get(), 2 * kPanel, 0.0f);
          tile_pair(values + start * k, w + p * k * kPanel, k * kPanel, k, sums.get());
          write(start, 1, p, sums.get());
          write(start, 1, p + 1, sums.get() + kPanel);
        } else {
          for (int64_t q = p; q < p + both; q++) {
            std::fill_n(sums.get(), count * kPanel, 0.0f);
            multiply(start, count, q);
            write(start, count, q, sums.get());
          }
        }
      }
    }
  }
}

template <class W>
void pack(W* to, const W* from, int64_t n, int64_t k) {
#pragma omp parallel for
  for (int64_t p = 0; p < (n + kPanel - 1) / kPanel; p++)
    for (int64_t j = 0; j < kPanel; j++)
      for (int64_t i = 0; i < k; i++) to[(p * k + i) * kPanel + j] = p * kPanel + j < n ? from[(p * kPanel + j) * k + i] : W{};
}

template <class F>
void with_weight_type(int code, F f) {
  if (code == 2)
    f(int8_t{});
  else
    with_type(code, f);
}

}  // namespace

extern "C" {

// Whether vectors here are the processor's own, with fused multiply-add.
int vectorised() {
#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__))
  return 1;
#else
  return 0;
#endif
}

// Outputs of a panel: a packed weight [n, k] takes as many elements as n rounded up to a multiple of it, times k.
int64_t linear_panel() { return kPanel; }

// to: `from` [n, k] packed. weight_type 0 fp32, 1 bf16, 2 int8.
void pack_linear(int weight_type, void* to, const void* from, int64_t n, int64_t k) {
  with_weight_type(weight_type, [&](auto tag) {
    using W = decltype(tag);
    pack(static_cast<W*>(to), static_cast<const W*>(from), n, k);
  });
}

// y [rows, n] = x [rows, k] . w [n, k] (* scales [n]) (+ bias [n]), w packed; y of out_type, x and bias of type.
void linear(int type, int out_type, int weight_type, void* y, const void* x, const void* w, const float* scales, const void* bias,
            int64_t rows, int64_t n, int64_t k) {
  with_type(type, [&](auto tag) {
    using T = decltype(tag);
    with_weight_type(weight_type, [&](auto weight_tag) {
      using W = decltype(weight_tag);
      auto run = [&](auto* to) {
        linear(to, static_cast<const T*>(x), static_cast<const W*>(w), scales, static_cast<const T*>(bias), rows, n, k);
      };
      if (out_type == type)
        run(static_cast<T*>(y));
      else
        run(static_cast<float*>(y));
    });
  });
}

}  // extern "C"
