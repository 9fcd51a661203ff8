// Norms, gated activation, rotary embedding with the write into pages: one row of tokens at a time.

#include <cmath>

#include "kernels.hpp"
#include "vector.hpp"

namespace {

constexpr int64_t kPageSize = 16;
// Fewer values than this are not worth waking a thread.
constexpr int64_t kParallel = 1 << 14;

// out = x * rsqrt(mean(x^2) + eps) * weight. n values; may be in place.
template <class T>
void norm(T* out, const T* x, const T* weight, int64_t n, float eps) {
  Vec squares{};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) squares = multiply_add(load(x + i), load(x + i), squares);
  if (i < n) {
    Vec rest = load_some(x + i, int(n - i));
    squares = multiply_add(rest, rest, squares);
  }
  float scale = 1.0f / std::sqrt(sum(squares) / float(n) + eps);
  for (i = 0; i + kLanes <= n; i += kLanes) store(out + i, load(x + i) * scale * load(weight + i));
  for (; i < n; i++) store_one(out + i, load_one(x[i]) * scale * load_one(weight[i]));
}

}  // namespace

extern "C" {

// out[t] = norm(x[t]); with a residual: residual[t] += x[t] first and its norm is taken. All [rows, n].
void rms_norm(int type, void* out_p, const void* x_p, void* residual_p, const void* weight_p, int64_t rows, int64_t n, float eps) {
  with_type(type, [&](auto tag) {
    using T = decltype(tag);
#pragma omp parallel for if (rows * n >= kParallel)
    for (int64_t t = 0; t < rows; t++) {
      const T* x = static_cast<const T*>(x_p) + t * n;
      if (residual_p) {
        T* residual = static_cast<T*>(residual_p) + t * n;
        int64_t i = 0;
        for (; i + kLanes <= n; i += kLanes) store(residual + i, load(residual + i) + load(x + i));
        for (; i < n; i++) store_one(residual + i, load_one(residual[i]) + load_one(x[i]));
        x = residual;
      }
      norm(static_cast<T*>(out_p) + t * n, x, static_cast<const T*>(weight_p), n, eps);
    }
  });
}

// out [rows, n] = silu(gate) * up of gate_up [rows, 2n].
void silu_mul(int type, void* out_p, const void* gate_up_p, int64_t rows, int64_t n) {
  with_type(type, [&](auto tag) {
    using T = decltype(tag);
#pragma omp parallel for if (rows * n >= kParallel)
    for (int64_t t = 0; t < rows; t++) {
      const T* gate = static_cast<const T*>(gate_up_p) + t * 2 * n;
      T* out = static_cast<T*>(out_p) + t * n;
      auto act = [](Vec g, Vec up) { return g / (1.0f + exponential(-g)) * up; };
      int64_t i = 0;
      for (; i + kLanes <= n; i += kLanes) store(out + i, act(load(gate + i), load(gate + n + i)));
      if (int rest = int(n - i)) {
        Vec values = act(load_some(gate + i, rest), load_some(gate + n + i, rest));
        for (int j = 0; j < rest; j++) store_one(out + i + j, values[j]);
      }
    }
  });
}

// As Ops.kv_append: qkv [rows, (heads + 2 kv_heads) * dim], q turned in place; dim / 2 is a multiple of 16 or 8 lanes.
void kv_append(int type, void* qkv_p, void* k_pages_p, void* v_pages_p, const void* q_norm, const void* k_norm,
               const float* cos_sin, const int32_t* positions, const int32_t* slots, int64_t rows, int64_t heads,
               int64_t kv_heads, int64_t dim, float eps) {
  with_type(type, [&](auto tag) {
    using T = decltype(tag);
    const int64_t half = dim / 2, stride = (heads + 2 * kv_heads) * dim;
#pragma omp parallel for if (rows * stride >= kParallel)
    for (int64_t t = 0; t < rows; t++) {
      T* row = static_cast<T*>(qkv_p) + t * stride;
      const float* cos = cos_sin + positions[t] * dim;
      const float* sin = cos + half;
      int64_t page = slots[t] / kPageSize, offset = slots[t] % kPageSize;
      auto place = [&](void* pages, int64_t head) {
        return static_cast<T*>(pages) + ((page * kv_heads + head) * kPageSize + offset) * dim;
      };
      alignas(64) float wide[512];
      for (int64_t h = 0; h < heads + kv_heads; h++) {
        T* x = row + h * dim;
        for (int64_t i = 0; i < dim; i += kLanes) store(wide + i, load(x + i));
        if (const T* weight = static_cast<const T*>(h < heads ? q_norm : k_norm)) {
          Vec squares{};
          for (int64_t i = 0; i < dim; i += kLanes) squares = multiply_add(load(wide + i), load(wide + i), squares);
          float scale = 1.0f / std::sqrt(sum(squares) / float(dim) + eps);
          for (int64_t i = 0; i < dim; i += kLanes) store(wide + i, load(wide + i) * scale * load(weight + i));
        }
        T* to = h < heads ? x : slots[t] < 0 ? nullptr : place(k_pages_p, h - heads);
        if (!to) continue;
        for (int64_t i = 0; i < half; i += kLanes) {
          Vec first = load(wide + i), second = load(wide + half + i), c = load(cos + i), s = load(sin + i);
          store(to + i, multiply_add(first, c, -(second * s)));
          store(to + half + i, multiply_add(second, c, first * s));
        }
      }
      if (slots[t] >= 0)
        for (int64_t h = 0; h < kv_heads; h++)
          std::memcpy(place(v_pages_p, h), row + (heads + kv_heads + h) * dim, dim * sizeof(T));
    }
  });
}

}  // extern "C"
