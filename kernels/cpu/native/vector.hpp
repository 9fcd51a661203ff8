// Vectors of fp32 and the two primitives every kernel here is made of: `dots` and `mix`.
//
// Vector extensions of GCC, so one source serves AVX2, AVX-512 and others; storage is fp32, bf16 or int8, all
// arithmetic fp32. A row's result never depends on the rows computed beside it: whatever the tile, each sum runs over
// the same values in the same order.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__) || defined(__FMA__)
#include <immintrin.h>
#endif

#ifdef __AVX512F__
constexpr int kLanes = 16;
constexpr int kTileRows = 6;  // rows of x per tile: with 4 weights each, what the registers hold
#else
constexpr int kLanes = 8;
constexpr int kTileRows = 3;
#endif

typedef float Vec __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef int32_t IntVec __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef float Vec8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef float Vec4 __attribute__((vector_size(16), aligned(4), may_alias));

struct BFloat16 {
  uint16_t bits;
};

static inline Vec load(const float* p) { return *reinterpret_cast<const Vec*>(p); }

// Compilers widen short vectors badly when left to themselves.
static inline IntVec widen(const int8_t* p) {
#if defined(__AVX512F__)
  return IntVec(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
  return IntVec(_mm256_cvtepi8_epi32(_mm_loadu_si64(p)));
#else
  typedef int8_t Bytes __attribute__((vector_size(kLanes), aligned(1), may_alias));
  return __builtin_convertvector(*reinterpret_cast<const Bytes*>(p), IntVec);
#endif
}

static inline IntVec widen(const uint16_t* p) {
#if defined(__AVX512F__)
  return IntVec(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
#elif defined(__AVX2__)
  return IntVec(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#else
  typedef uint16_t Halves __attribute__((vector_size(2 * kLanes), aligned(2), may_alias));
  return __builtin_convertvector(*reinterpret_cast<const Halves*>(p), IntVec);
#endif
}

static inline Vec load(const int8_t* p) { return __builtin_convertvector(widen(p), Vec); }

static inline Vec load(const BFloat16* p) {
  IntVec bits = widen(&p->bits) << 16;
  return reinterpret_cast<Vec&>(bits);
}

static inline void store(float* p, Vec v) { *reinterpret_cast<Vec*>(p) = v; }

static inline void store(BFloat16* p, Vec v) {  // to nearest, ties to even; NaN stays NaN
  typedef uint16_t Half __attribute__((vector_size(2 * kLanes), aligned(2), may_alias));
  IntVec bits = reinterpret_cast<IntVec&>(v);
  IntVec rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  IntVec is_number = v == v;
  rounded = (rounded & is_number) | (0x7FC0 & ~is_number);
  *reinterpret_cast<Half*>(p) = __builtin_convertvector(rounded, Half);
}

static inline void store(float* p, Vec4 v) { *reinterpret_cast<Vec4*>(p) = v; }
static inline void store(BFloat16* p, Vec4 v) {
  typedef int32_t Int4 __attribute__((vector_size(16)));
  typedef uint16_t Half4 __attribute__((vector_size(8), aligned(2), may_alias));
  Int4 bits = Int4(v), is_number = v == v;
  bits = (((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & is_number) | (0x7FC0 & ~is_number);
  *reinterpret_cast<Half4*>(p) = __builtin_convertvector(bits, Half4);
}

static inline float load_one(float x) { return x; }
static inline float load_one(int8_t x) { return x; }
static inline float load_one(BFloat16 x) {
  uint32_t bits = uint32_t(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
static inline void store_one(float* p, float value) { *p = value; }
static inline void store_one(BFloat16* p, float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  p->bits = value == value ? uint16_t((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) : 0x7FC0;
}

// `count` < kLanes values, the rest 0.
template <class T>
static inline Vec load_some(const T* p, int count) {
  T padded[kLanes] = {};
  std::memcpy(padded, p, count * sizeof(T));
  return load(padded);
}

// a * b + c, rounded once. Said outright, because compilers tuned for a processor form it in one loop and not in another, and
// a row's sum would depend on the tile it went through.
static inline Vec multiply_add(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#else
  for (int i = 0; i < kLanes; i++) c[i] = std::fma(a[i], b[i], c[i]);
  return c;
#endif
}

// Not x + Vec{}: an addition per value, because of -0.
static inline Vec splat(float x) {
#if defined(__AVX512F__)
  return _mm512_set1_ps(x);
#elif defined(__AVX2__)
  return _mm256_set1_ps(x);
#else
  Vec v;
  for (int i = 0; i < kLanes; i++) v[i] = x;
  return v;
#endif
}

// `v` in a register: compilers may otherwise load a value again for every use of it.
static inline Vec held(Vec v) {
#if defined(__AVX2__)
  asm("" : "+v"(v));
#endif
  return v;
}

// A vector's two halves, added.
template <class Half, class Whole>
static inline Half halved(const Whole& v) {
  const Half* half = reinterpret_cast<const Half*>(&v);
  return half[0] + half[1];
}

static inline Vec8 eight(Vec v) {
#ifdef __AVX512F__
  return halved<Vec8>(v);
#else
  return v;
#endif
}

static inline Vec8 add_pairs(Vec8 a, Vec8 b) {
  // Not __builtin_shufflevector, which GCC has since 12.
  typedef int32_t Mask __attribute__((vector_size(32)));
  return __builtin_shuffle(a, b, Mask{0, 2, 8, 10, 4, 6, 12, 14}) + __builtin_shuffle(a, b, Mask{1, 3, 9, 11, 5, 7, 13, 15});
}

// The sums of four vectors.
static inline Vec4 sums(Vec a, Vec b, Vec c, Vec d) {
  return halved<Vec4>(add_pairs(add_pairs(eight(a), eight(b)), add_pairs(eight(c), eight(d))));
}

static inline float sum(Vec v) { return sums(v, v, v, v)[0]; }

static inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }

static inline float largest(Vec v) {
  float result = v[0];
  for (int i = 1; i < kLanes; i++) result = v[i] > result ? v[i] : result;
  return result;
}

// e^x to 2 units in the last place; 0 below -87, where results would be subnormal.
static inline Vec exponential(Vec x) {
  Vec clamped = larger(x, splat(-87.0f));
  clamped = clamped < splat(88.0f) ? clamped : splat(88.0f);
  // 1.5 * 2^23: leaves the nearest integer in the low bits.
  Vec shifted = multiply_add(clamped, splat(1.44269504f), splat(12582912.0f));
  Vec n = shifted - 12582912.0f;
  // x - n ln 2, ln 2 in two parts.
  Vec r = multiply_add(n, splat(2.12194440e-4f), multiply_add(n, splat(-0.693359375f), clamped));
  Vec y = splat(1.9875691500e-4f);
  y = multiply_add(y, r, splat(1.3981999507e-3f));
  y = multiply_add(y, r, splat(8.3334519073e-3f));
  y = multiply_add(y, r, splat(4.1665795894e-2f));
  y = multiply_add(y, r, splat(1.6666665459e-1f));
  y = multiply_add(y, r, splat(5.0000001201e-1f));
  y = multiply_add(y * r, r, r) + 1.0f;
  IntVec power = (reinterpret_cast<IntVec&>(shifted) << 23) + reinterpret_cast<IntVec&>(y);
  Vec result = reinterpret_cast<Vec&>(power);
  result = x < splat(-87.0f) ? Vec{} : result;
  return x == x ? result : x;
}

// How far ahead, in bytes, weights are asked for where they come from memory in short rows. 0: not at all.
constexpr int kNear = 256;

// out[t][j] = x[t] . w[j]: ROWS rows of x, four weight vectors, all of length k.
template <int ROWS, int AHEAD, class W>
static inline void dots_tile(const float* const* x, const W* const* w, int64_t k, Vec4* out) {
  Vec total[ROWS][4] = {};
  auto step = [&](int64_t i) __attribute__((always_inline)) {
    Vec v[ROWS];
#pragma GCC unroll 8
    for (int t = 0; t < ROWS; t++) v[t] = held(load(x[t] + i));
#pragma GCC unroll 8
    for (int j = 0; j < 4; j++) {
      const Vec weight = held(load(w[j] + i));
#pragma GCC unroll 8
      for (int t = 0; t < ROWS; t++) total[t][j] = multiply_add(v[t], weight, total[t][j]);
    }
  };
  int64_t i = 0;
  if constexpr (AHEAD > 0) {
    constexpr int64_t kLine = 64 / sizeof(W);
    for (; i + kLine <= k; i += kLine) {
#pragma GCC unroll 8
      for (int j = 0; j < 4; j++) __builtin_prefetch(reinterpret_cast<const char*>(w[j] + i) + AHEAD, 0, 3);
#pragma GCC unroll 8
      for (int64_t u = 0; u < kLine; u += kLanes) step(i + u);
    }
  }
  for (; i + kLanes <= k; i += kLanes) step(i);
  if (int rest = int(k - i))
    for (int t = 0; t < ROWS; t++)
      for (int j = 0; j < 4; j++) total[t][j] = multiply_add(load_some(x[t] + i, rest), load_some(w[j] + i, rest), total[t][j]);
  for (int t = 0; t < ROWS; t++) out[t] = sums(total[t][0], total[t][1], total[t][2], total[t][3]);
}

// As dots_tile for any number of rows; `row(t)` is one of x, `take(t, sums)` receives its four results.
template <int AHEAD = 0, class W, class Row, class Take>
static inline void dots(int64_t rows, Row row, const W* const* w, int64_t k, Take take) {
  for (int64_t t = 0; t < rows; t += kTileRows) {
    const int count = int(rows - t < kTileRows ? rows - t : kTileRows);
    const float* x[kTileRows];
    for (int r = 0; r < count; r++) x[r] = row(t + r);
    Vec4 out[kTileRows];
    switch (count) {
      case 1: dots_tile<1, AHEAD>(x, w, k, out); break;
      case 2: dots_tile<2, AHEAD>(x, w, k, out); break;
      case 3: dots_tile<3, AHEAD>(x, w, k, out); break;
#ifdef __AVX512F__
      case 4: dots_tile<4, AHEAD>(x, w, k, out); break;
      case 5: dots_tile<5, AHEAD>(x, w, k, out); break;
      case 6: dots_tile<6, AHEAD>(x, w, k, out); break;
#endif
      default: __builtin_unreachable();
    }
    for (int r = 0; r < count; r++) take(t + r, out[r]);
  }
}

template <int ROWS, int VECTORS, int AHEAD, class T, class Row>
static inline void mix_tile(T* const* y, int64_t i, const float* c, int64_t ldc, int64_t count, Row row) {
  Vec total[ROWS][VECTORS];
#pragma GCC unroll 8
  for (int t = 0; t < ROWS; t++)
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) total[t][v] = load(y[t] + i + v * kLanes);
  for (int64_t j = 0; j < count; j++) {
    auto* values = row(j) + i;
    if constexpr (AHEAD > 0)
#pragma GCC unroll 8
      for (int l = 0; l < VECTORS * kLanes * int(sizeof(*values)) / 64; l++)
        __builtin_prefetch(reinterpret_cast<const char*>(values) + AHEAD + 64 * l, 0, 3);
    Vec weights[ROWS];
#pragma GCC unroll 8
    for (int t = 0; t < ROWS; t++) weights[t] = held(splat(c[t * ldc + j]));
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) {
      const Vec part = held(load(values + v * kLanes));
#pragma GCC unroll 8
      for (int t = 0; t < ROWS; t++) total[t][v] = multiply_add(weights[t], part, total[t][v]);
    }
  }
#pragma GCC unroll 8
  for (int t = 0; t < ROWS; t++)
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) store(y[t] + i + v * kLanes, total[t][v]);
}

template <int ROWS, int AHEAD, class T, class Row>
static inline void mix_rows(T* const* y, const float* c, int64_t ldc, int64_t count, int64_t width, Row row) {
  constexpr int kVectors = ROWS == 1 ? 8 : 4;
  int64_t i = 0;
  for (; i + kVectors * kLanes <= width; i += kVectors * kLanes) mix_tile<ROWS, kVectors, AHEAD>(y, i, c, ldc, count, row);
  for (; i + kLanes <= width; i += kLanes) mix_tile<ROWS, 1, 0>(y, i, c, ldc, count, row);
  for (; i < width; i++)
    for (int t = 0; t < ROWS; t++) {
      float total = load_one(y[t][i]);
      for (int64_t j = 0; j < count; j++) total = std::fma(c[t * ldc + j], load_one(row(j)[i]), total);
      store_one(y[t] + i, total);
    }
}

// to(t) += sum over j < count of c[t][j] * row(j), vectors of `width` values, for any number of rows t; the sum starts from what
// is there and is rounded to its storage once.
template <int AHEAD = 0, class To, class Row>
static inline void mix(To to, int64_t rows, const float* c, int64_t ldc, int64_t count, int64_t width, Row row) {
  for (int64_t t = 0; t < rows;) {
    const int many = rows - t >= kTileRows ? kTileRows : kTileRows > 3 && rows - t >= 3 ? 3 : 1;
    decltype(to(t)) y[kTileRows];
    for (int r = 0; r < many; r++) y[r] = to(t + r);
    if (many == kTileRows)
      mix_rows<kTileRows, AHEAD>(y, c + t * ldc, ldc, count, width, row);
    else if (many == 3)
      mix_rows<3, AHEAD>(y, c + t * ldc, ldc, count, width, row);
    else
      mix_rows<1, AHEAD>(y, c + t * ldc, ldc, count, width, row);
    t += many;
  }
}

// Asks for memory that is needed soon: the processor foresees neither the next page nor the end of a short row.
static inline void prefetch(const void* p, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(p) + i, 0, 2);
}

// Calls f(T{}) with the storage type of code 0 (fp32), 1 (bf16).
template <class F>
static inline void with_type(int code, F f) {
  if (code == 0)
    f(float{});
  else
    f(BFloat16{});
}
