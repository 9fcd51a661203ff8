// The kernels as the library exports them, for those that are made of others. Types: 0 fp32, 1 bf16, 2 int8 (weights only).

#pragma once

#include <cstdint>

extern "C" {

void rms_norm(int type, void* out, const void* x, void* residual, const void* weight, int64_t rows, int64_t n, float eps);
void silu_mul(int type, void* out, const void* gate_up, int64_t rows, int64_t n);
void kv_append(int type, void* qkv, void* k_pages, void* v_pages, const void* q_norm, const void* k_norm, const float* cos_sin,
               const int32_t* positions, const int32_t* slots, int64_t rows, int64_t heads, int64_t kv_heads, int64_t dim,
               float eps);
void paged_attention(int type, void* out, const void* q, int64_t q_stride, const void* k_pages, const void* v_pages,
                     const int32_t* indptr, const int32_t* contexts, const int32_t* page_table, int64_t max_pages, int64_t rows,
                     int64_t requests, int64_t heads, int64_t kv_heads, int64_t dim, int64_t window, float scale);
void linear(int type, int out_type, int weight_type, void* y, const void* x, const void* w, const float* scales,
            const void* bias, int64_t rows, int64_t n, int64_t k);
void lora(int type, void* y, const void* x, const void* a, const void* b, const int32_t* order, const int32_t* seg_indptr,
          const int32_t* seg_adapter, int64_t segments, const int32_t* row_table, const int32_t* ranks, const int64_t* offsets,
          int64_t slices, int64_t max_rank, int64_t rows, int64_t k, int64_t n);

}  // extern "C"
