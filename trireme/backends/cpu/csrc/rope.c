/* Rotary embedding and the KV write: for each new token and head, norm (optional), rotate, store in the token's slot.
 *
 *   half-split   (a, b) = (x[i], x[i + r/2]);  interleaved  (a, b) = (x[2i], x[2i + 1])
 *   (a, b) ← (a cos θ - b sin θ, b cos θ + a sin θ)
 * Keys and values are kept as kv.h says. */
#include "kv.h"
#include "vector.h"

static void rotate(const RopeStore *rope, float *x, int position) {
    int half = rope->rotary_dim / 2, i = 0;
    const float *cosine = rope->cosine + position * rope->table_stride, *sine = rope->sine + position * rope->table_stride;
    if (rope->interleaved) {
        for (; i < half; i++) {
            float a = x[2 * i], b = x[2 * i + 1];
            x[2 * i] = a * cosine[i] - b * sine[i];
            x[2 * i + 1] = b * cosine[i] + a * sine[i];
        }
        return;
    }
    for (; i + LANES <= half; i += LANES) {
        vf a = load(x + i), b = load(x + half + i), c = load(cosine + i), s = load(sine + i);
        store(x + i, a * c - b * s);
        store(x + half + i, b * c + a * s);
    }
    for (; i < half; i++) {
        float a = x[i], b = x[i + half];
        x[i] = a * cosine[i] - b * sine[i];
        x[i + half] = b * cosine[i] + a * sine[i];
    }
}

static void norm_head(const RopeStore *rope, const float *weight, float *x) {
    float square = 0;
    for (int i = 0; i < rope->head_dim; i++) square += x[i] * x[i];
    float factor = 1.0f / sqrtf(square / (float)rope->head_dim + rope->epsilon);
    for (int i = 0; i < rope->head_dim; i++) x[i] *= factor * (weight[i] + rope->offset);
}

/* Heads 0 .. heads are queries; then come the keys (with their values). */
void KERNEL(rope_store)(const RopeStore *rope, int token, int head) {
    int is_query = head < rope->heads, kv = head - rope->heads, width = rope->head_dim;
    float *x = is_query ? rope->query + token * rope->query_stride + head * width : rope->key + token * rope->key_stride + kv * width;
    const float *norm = is_query ? rope->query_norm : rope->key_norm;
    if (norm) norm_head(rope, norm, x);
    if (rope->cosine) rotate(rope, x, rope->positions[token]);
    if (is_query || !rope->keys || rope->slots[token] < 0) return;
    int64_t row = (int64_t)rope->slots[token] * rope->kv_heads + kv;
    const float *value = rope->value + token * rope->value_stride + kv * width;
    kv_put(rope->kv_kind, rope->keys, rope->key_scales, rope->key_given, row, kv, x, width);
    kv_put(rope->kv_kind, rope->values, rope->value_scales, rope->value_given, row, kv, value, width);
}
