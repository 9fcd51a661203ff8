// All layers of a model in one call: what kernels/decoder.py says, without its hundreds of returns to the interpreter.
// The structures are those of kernels/cpu/decoder.py, field by field; pointers belong to the caller.

#include "kernels.hpp"
#include "vector.hpp"

namespace {

struct Linear {
  const void* weight;  // packed
  const float* scales;
  const void* bias;
  int64_t n, k, type;
};

struct LoraGroup {  // a null: none
  const void *a, *b;
  const int32_t *row_table, *ranks;
  const int64_t* offsets;
  int64_t slices, max_rank;
};

struct Projection {
  Linear linear;
  LoraGroup lora;
};

struct Layer {
  Projection qkv, o, gate_up, down;
  const void *input_norm, *q_norm, *k_norm, *post_norm;
  void *k_pages, *v_pages;
};

struct Decoder {
  const Layer* layers;
  int64_t num_layers;
  const void* final_norm;
  const float* cos_sin;
  int64_t type, heads, kv_heads, dim, window;
  float scale, eps;
};

struct Step {
  const int32_t *positions, *slots, *indptr, *contexts, *page_table, *order, *seg_indptr, *seg_adapter;
  int64_t rows, requests, max_pages, segments;
};

void project(int type, const Projection& p, const Step& step, void* y, const void* x) {
  const Linear& l = p.linear;
  linear(type, type, int(l.type), y, x, l.weight, l.scales, l.bias, step.rows, l.n, l.k);
  if (step.segments && p.lora.a)
    lora(type, y, x, p.lora.a, p.lora.b, step.order, step.seg_indptr, step.seg_adapter, step.segments, p.lora.row_table,
         p.lora.ranks, p.lora.offsets, p.lora.slices, p.lora.max_rank, step.rows, l.k, l.n);
}

}  // namespace

// hidden [rows, C] is the residual stream, changed in place; out [rows, C]. scratch: rows * (outputs of qkv, o, gate_up and
// inputs of o and down) values.
extern "C" void decoder(const Decoder* d, const Step* s, void* hidden, void* out, void* scratch) {
  const int type = int(d->type);
  const int64_t rows = s->rows, size = type ? 2 : 4;
  auto part = [&, at = static_cast<char*>(scratch)](int64_t width) mutable {
    char* here = at;
    at += rows * width * size;
    return here;
  };
  const Layer& first = d->layers[0];
  char* qkv = part(first.qkv.linear.n);
  char* attention = part(first.o.linear.k);
  char* output = part(first.o.linear.n);
  char* gate_up = part(first.gate_up.linear.n);
  char* inner = part(first.down.linear.k);
  const int64_t width = first.o.linear.n;
  rms_norm(type, out, hidden, nullptr, first.input_norm, rows, width, d->eps);
  for (int64_t i = 0; i < d->num_layers; i++) {
    const Layer& layer = d->layers[i];
    project(type, layer.qkv, *s, qkv, out);
    kv_append(type, qkv, layer.k_pages, layer.v_pages, layer.q_norm, layer.k_norm, d->cos_sin, s->positions, s->slots, rows,
              d->heads, d->kv_heads, d->dim, d->eps);
    paged_attention(type, attention, qkv, layer.qkv.linear.n, layer.k_pages, layer.v_pages, s->indptr, s->contexts,
                    s->page_table, s->max_pages, rows, s->requests, d->heads, d->kv_heads, d->dim, d->window, d->scale);
    project(type, layer.o, *s, output, attention);
    rms_norm(type, out, output, hidden, layer.post_norm, rows, width, d->eps);
    project(type, layer.gate_up, *s, gate_up, out);
    silu_mul(type, inner, gate_up, rows, layer.down.linear.k);
    project(type, layer.down, *s, output, inner);
    rms_norm(type, out, output, hidden, i + 1 < d->num_layers ? d->layers[i + 1].input_norm : d->final_norm, rows, width, d->eps);
  }
}
