// Paged attention. One piece of work is up to kBlockRows token rows of one request with all query heads of one KV head,
// so each page is read once for the group. A context is cut into splits of kSplit positions, counted from position 0:
// each gives a partial softmax, and partials are merged in order. Where a request has one row its splits are separate
// pieces of work. A row therefore goes through the same arithmetic alone, in a batch, and at any place of a chunk.

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "kernels.hpp"
#include "vector.hpp"

namespace {

constexpr int64_t kPageSize = 16, kSplit = 256, kBlockRows = 16;

struct Work {
  int32_t request, row, num_rows, kv_head, first_split, num_splits, partial;  // partial: slot, -1 = write the output
};

// Unnormalised softmax of `rows` query vectors: largest score, sum of weights, weighted sum of values.
struct Partial {
  float *peak, *weight, *values;  // [rows], [rows], [rows, dim]
};

// into = both together. Rows without a visible position have peak -inf and weight 0.
void merge(Partial into, Partial from, int64_t rows, int64_t dim) {
  for (int64_t r = 0; r < rows; r++) {
    if (from.weight[r] == 0.0f) continue;
    if (into.weight[r] == 0.0f) {
      into.peak[r] = from.peak[r], into.weight[r] = from.weight[r];
      std::copy_n(from.values + r * dim, dim, into.values + r * dim);
      continue;
    }
    float peak = std::max(into.peak[r], from.peak[r]);
    float keep = std::exp(into.peak[r] - peak), take = std::exp(from.peak[r] - peak);
    into.peak[r] = peak;
    into.weight[r] = std::fma(from.weight[r], take, into.weight[r] * keep);
    for (int64_t i = r * dim; i < (r + 1) * dim; i += kLanes)
      store(into.values + i, multiply_add(load(from.values + i), splat(take), load(into.values + i) * keep));
  }
}

template <class T>
struct Attention {
  const T *q, *k_pages, *v_pages;
  T* out;
  const int32_t *indptr, *contexts, *page_table;
  int64_t q_stride, heads, kv_heads, dim, max_pages, window;  // window 0: all
  float scale;
  int64_t group() const { return heads / kv_heads; }

  // One split of one piece of work; q [rows * group, dim] fp32, scaled; scores [rows * group, kSplit].
  void split(const Work& work, int64_t split, const float* q, float* scores, Partial to) const {
    const int64_t group = this->group(), vectors = work.num_rows * group;
    const int64_t query_len = indptr[work.request + 1] - indptr[work.request];
    // The first row's position; row i of the work stands i further.
    const int64_t position = contexts[work.request] - query_len + work.row - indptr[work.request];
    int64_t begin = split * kSplit;
    const int64_t end = std::min(begin + kSplit, position + work.num_rows);
    if (window) begin = std::max(begin, (position - window + 1) / kPageSize * kPageSize);
    std::fill_n(to.peak, vectors, -INFINITY);
    std::fill_n(to.weight, vectors, 0.0f);
    std::fill_n(to.values, vectors * dim, 0.0f);
    if (begin >= end) return;
    const int32_t* pages = page_table + work.request * max_pages;
    auto page = [&](const T* store, int64_t at) {
      return store + (int64_t(pages[at / kPageSize]) * kv_heads + work.kv_head) * kPageSize * dim;
    };
    const int64_t lanes_begin = begin - split * kSplit, lanes_end = (end - split * kSplit + kPageSize - 1) / kPageSize * kPageSize;
    for (int64_t at = begin; at < end; at += kPageSize) {
      const T* k = page(k_pages, at);
      // The values are needed as soon as the last keys are done.
      const bool more = at + kPageSize < end;
      prefetch(more ? page(k_pages, at + kPageSize) : page(v_pages, begin), kPageSize * dim * sizeof(T));
      for (int64_t j = 0; j < std::min(kPageSize, end - at); j += 4) {
        const T* four[4] = {k + j * dim, k + (j + 1) * dim, k + (j + 2) * dim, k + (j + 3) * dim};
        dots(vectors, [&](int64_t r) { return q + r * dim; }, four, dim, [&](int64_t r, Vec4 v) {
          *reinterpret_cast<Vec4*>(scores + r * kSplit + at - split * kSplit + j) = v;
        });
      }
    }
    for (int64_t r = 0; r < vectors; r++) {
      float* row = scores + r * kSplit;
      const int64_t at = position + r / group - split * kSplit;  // the row's own position, in the split
      const int64_t first = window ? std::clamp(at - window + 1, lanes_begin, lanes_end) : lanes_begin;
      const int64_t last = std::clamp<int64_t>(at + 1, first, lanes_end);
      std::fill(row + lanes_begin, row + first, -INFINITY);
      std::fill(row + last, row + lanes_end, -INFINITY);
      if (first == last) {
        std::fill(row + lanes_begin, row + lanes_end, 0.0f);
        continue;
      }
      Vec peaks = splat(-INFINITY), total{};
      for (int64_t i = lanes_begin; i < lanes_end; i += kLanes) peaks = larger(peaks, load(row + i));
      const float peak = largest(peaks);
      for (int64_t i = lanes_begin; i < lanes_end; i += kLanes) {
        Vec weight = exponential(load(row + i) - peak);
        total += weight;
        store(row + i, weight);
      }
      to.peak[r] = peak;
      to.weight[r] = sum(total);
    }
    for (int64_t at = begin; at < end; at += kPageSize) {
      const T* v = page(v_pages, at);
      if (at + kPageSize < end) prefetch(page(v_pages, at + kPageSize), kPageSize * dim * sizeof(T));
      mix([&](int64_t r) { return to.values + r * dim; }, vectors, scores + at - split * kSplit, kSplit,
          std::min(kPageSize, end - at), dim, [&](int64_t j) { return v + j * dim; });
    }
  }

  void write(const Work& work, Partial from) const {
    for (int64_t r = 0; r < work.num_rows * group(); r++) {
      T* to = out + ((work.row + r / group()) * heads + work.kv_head * group() + r % group()) * dim;
      const float inverse = 1.0f / from.weight[r];
      for (int64_t i = 0; i < dim; i += kLanes) store(to + i, load(from.values + r * dim + i) * inverse);
    }
  }

  void run(int64_t rows, int64_t requests) const {
    std::vector<Work> work;
    int32_t partials = 0;
    for (int32_t request = 0; request < requests; request++) {
      const int64_t query_len = indptr[request + 1] - indptr[request];
      for (int32_t row = indptr[request]; row < indptr[request + 1]; row += kBlockRows) {
        const auto count = std::min<int32_t>(kBlockRows, indptr[request + 1] - row);
        const int64_t end = contexts[request] - query_len + row - indptr[request] + count;
        const auto splits = int32_t((end + kSplit - 1) / kSplit);
        for (int32_t head = 0; head < kv_heads; head++)
          if (query_len > 1 || splits == 1)
            work.push_back({request, row, count, head, 0, splits, -1});
          else
            for (int32_t split = 0; split < splits; split++) work.push_back({request, row, 1, head, split, 1, partials++});
      }
    }
    const int64_t size = group() * (dim + 2);
    auto of = [&](float* p, int64_t vectors) { return Partial{p, p + vectors, p + 2 * vectors}; };
    // Not cleared, like scratch: what is read was written.
    const std::unique_ptr<float[]> shared(new float[partials * size]);
#pragma omp parallel
    {
      const std::unique_ptr<float[]> scratch(new float[kBlockRows * group() * (2 * (dim + 2) + dim + kSplit)]);
#pragma omp for schedule(dynamic)
      for (size_t item = 0; item < work.size(); item++) {
        const Work& w = work[item];
        const int64_t vectors = w.num_rows * group();
        float *query = scratch.get(), *scores = query + vectors * dim, *rest = scores + vectors * kSplit;
        for (int64_t r = 0; r < vectors; r++) {
          const T* from = q + (w.row + r / group()) * q_stride + (w.kv_head * group() + r % group()) * dim;
          for (int64_t i = 0; i < dim; i += kLanes) store(query + r * dim + i, load(from + i) * scale);
        }
        Partial total = w.partial < 0 ? of(rest, vectors) : of(shared.get() + w.partial * size, vectors);
        Partial next = of(rest + vectors * (dim + 2), vectors);
        split(w, w.first_split, query, scores, total);
        for (int32_t s = w.first_split + 1; s < w.first_split + w.num_splits; s++) {
          split(w, s, query, scores, next);
          merge(total, next, vectors, dim);
        }
        if (w.partial < 0) write(w, total);
      }
      if (partials) {
#pragma omp for schedule(dynamic)
        for (size_t item = 0; item < work.size(); item++) {
          const Work& w = work[item];
          if (w.partial < 0 || w.first_split > 0) continue;
          Partial total = of(shared.get() + w.partial * size, group());
          for (size_t other = item + 1; other < work.size() && work[other].partial >= 0 && work[other].first_split > 0; other++)
            merge(total, of(shared.get() + work[other].partial * size, group()), group(), dim);
          write(w, total);
        }
      }
    }
    std::memset(static_cast<void*>(out + indptr[requests] * heads * dim), 0, (rows - indptr[requests]) * heads * dim * sizeof(T));
  }
};

}  // namespace

// As Ops.paged_attention: q [rows, heads, dim] with a stride between rows, out [rows, heads * dim]; dim % 16 == 0.
extern "C" void paged_attention(int type, void* out, const void* q, int64_t q_stride, const void* k_pages, const void* v_pages,
                                const int32_t* indptr, const int32_t* contexts, const int32_t* page_table, int64_t max_pages,
                                int64_t rows, int64_t requests, int64_t heads, int64_t kv_heads, int64_t dim, int64_t window,
                                float scale) {
  with_type(type, [&](auto tag) {
    using T = decltype(tag);
    Attention<T>{static_cast<const T*>(q), static_cast<const T*>(k_pages), static_cast<const T*>(v_pages),
                 static_cast<T*>(out), indptr, contexts, page_table, q_stride, heads, kv_heads, dim, max_pages, window, scale}
        .run(rows, requests);
  });
}
