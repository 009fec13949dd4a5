/* Row by row: norms, gate activations, and the quantising of activations as a matmul wants them.
 *
 *   rms_norm    y = x / sqrt(mean(x²) + ε) · (w + offset)
 *   layer_norm  y = (x - mean) / sqrt(var + ε) · (w + offset) + b
 *   act_mul     y = act(x[:n]) · x[n:]          silu(x) = x / (1 + e^-x),  gelu_tanh, gelu
 *   group8      q = round(x · 127 / max|x|)      per 32 columns, with the group's sum for offsets and minimums */
#include "activate.h"
#include "half.h"
#include "layout.h"
#include "vector.h"

INLINE vf load_some(const float *at, int count) {
    vf value = {0};
    memcpy(&value, at, (size_t)count * 4);
    return value;
}

INLINE void activation_row(const int kind, const float *input, float *output, int n) {
    const int gated = kind == TRANSFORM_SILU_MUL || kind == TRANSFORM_GELU_TANH_MUL || kind == TRANSFORM_GELU_MUL;
    int i = 0;
    for (; i + LANES <= n; i += LANES) {
        vf y = activate(kind, load(input + i));
        store(output + i, gated ? y * load(input + n + i) : y);
    }
    if (i < n) {
        vf y = activate(kind, load_some(input + i, n - i));
        if (gated) y *= load_some(input + n + i, n - i);
        memcpy(output + i, &y, (size_t)(n - i) * 4);
    }
}

static void norm_row(const Transform *t, const float *input, float *output, int n) {
    int whole = n / LANES * LANES;
    float mean = 0, square = 0;
    if (t->kind == TRANSFORM_LAYER_NORM) {
        vf sum = {0};
        for (int i = 0; i < whole; i += LANES) sum += load(input + i);
        mean = sum_of(sum);
        for (int i = whole; i < n; i++) mean += input[i];
        mean /= (float)n;
    }
    vf squares = {0};
    for (int i = 0; i < whole; i += LANES) { vf x = load(input + i) - mean; squares += x * x; }
    square = sum_of(squares);
    for (int i = whole; i < n; i++) square += (input[i] - mean) * (input[i] - mean);
    float factor = 1.0f / sqrtf(square / (float)n + t->epsilon);
    for (int i = 0; i < whole; i += LANES) {
        vf y = (load(input + i) - mean) * factor;
        if (t->weight) y *= load(t->weight + i) + t->offset;
        store(output + i, t->bias ? y + load(t->bias + i) : y);
    }
    for (int i = whole; i < n; i++) {
        float y = (input[i] - mean) * factor * (t->weight ? t->weight[i] + t->offset : 1);
        output[i] = t->bias ? y + t->bias[i] : y;
    }
}

static void transform_row(const Transform *t, const float *input, float *output, int n) {
    switch (t->kind) {
    case TRANSFORM_NONE: memcpy(output, input, (size_t)n * 4); break;
    case TRANSFORM_RMS_NORM: case TRANSFORM_LAYER_NORM: norm_row(t, input, output, n); break;
    case TRANSFORM_SILU_MUL: activation_row(TRANSFORM_SILU_MUL, input, output, n); break;
    case TRANSFORM_GELU_TANH_MUL: activation_row(TRANSFORM_GELU_TANH_MUL, input, output, n); break;
    case TRANSFORM_GELU_MUL: activation_row(TRANSFORM_GELU_MUL, input, output, n); break;
    case TRANSFORM_GELU_TANH: activation_row(TRANSFORM_GELU_TANH, input, output, n); break;
    case TRANSFORM_GELU: activation_row(TRANSFORM_GELU, input, output, n); break;
    case TRANSFORM_RELU_SQUARED: activation_row(TRANSFORM_RELU_SQUARED, input, output, n); break;
    default: activation_row(TRANSFORM_RELU, input, output, n);
    }
}

static float magnitude(const float *values, int count) { /* count: a multiple of 16 */
    vf best = {0};
    for (int i = 0; i < count; i += LANES) best = maximum(best, absolute(load(values + i)));
    return max_of(best);
}

/* Writes `count` rounded bytes (a multiple of 16) and returns their sum. */
INLINE int quantize_run(const float *values, int count, float factor, int8_t *bytes) {
    vi total = {0};
    for (int i = 0; i < count; i += LANES) {
        vi rounded = round_to_int(load(values + i) * factor);
        vb narrow = __builtin_convertvector(rounded, vb);
        memcpy(bytes + i, &narrow, LANES);
        total += rounded;
    }
    int sum = 0;
    for (int i = 0; i < LANES; i++) sum += total[i];
    return sum;
}

/* The bytes 8-bit weights are off by when this instruction set multiplies them. */
#if defined(ISA_AVX512)
enum { OFFSET8 = 128 };
#else
enum { OFFSET8 = 0 };
#endif

/* bytes[padded], scale[padded / 32], correction: an int to start the dot product from, or sum · scale for minimums. */
INLINE void write_group8(const float *values, int padded, const int kind, uint8_t *record) {
    int groups = padded / GROUP;
    float *scales = (float *)(record + padded), *sums = scales + groups;
    int32_t *corrections = (int32_t *)sums;
    for (int g = 0; g < groups; g++) {
        const float *part = values + g * GROUP;
        int8_t *bytes = (int8_t *)record + g * GROUP;
        float largest = magnitude(part, GROUP), factor = largest > 0 ? 127.0f / largest : 0;
        scales[g] = largest / 127.0f;
        if (kind == KIND_Q6_K) {
            for (int h = 0; h < 2; h++)
                corrections[2 * g + h] = -OFFSET8 * quantize_run(part + 16 * h, 16, factor, bytes + 16 * h);
            continue;
        }
        int sum = quantize_run(part, GROUP, factor, bytes);
        if (has_min(kind)) sums[g] = (float)sum * scales[g];
        else corrections[g] = sum * (kind == KIND_Q4 ? -8 : -OFFSET8);
    }
}

static void write_bf16(const float *values, int padded, uint8_t *record) {
    uint16_t *out = (uint16_t *)record;
    for (int i = 0; i < padded; i++) out[i] = float_to_bf16(values[i]);
}

/* temporary: room for two rows */
void KERNEL(prepare)(const Transform *t, const float *input, int columns, float *temporary, const Activations *x, int row) {
    uint8_t *record = x->data + row * x->stride;
    int padded = x->padded;
    const float *values = input;
    if (x->format == FORMAT_F32) temporary = (float *)record;
    if (t->kind != TRANSFORM_NONE || padded != columns || x->format == FORMAT_F32) {
        transform_row(t, input, temporary, columns);
        memset(temporary + columns, 0, (size_t)(padded - columns) * 4);
        values = temporary;
    }
    if (x->order) {
        float *ordered = temporary + padded;
        for (int i = 0; i < columns; i++) ordered[i] = values[x->order[i]];
        memset(ordered + columns, 0, (size_t)(padded - columns) * 4);
        values = ordered;
    }
    if (x->format == FORMAT_BF16) write_bf16(values, padded, record);
    else if (x->format == FORMAT_GROUP8 && has_min(x->kind)) write_group8(values, padded, KIND_Q4_MIN, record);
    else if (x->format == FORMAT_GROUP8 && x->kind == KIND_Q4) write_group8(values, padded, KIND_Q4, record);
    else if (x->format == FORMAT_GROUP8 && x->kind == KIND_Q6_K) write_group8(values, padded, KIND_Q6_K, record);
    else if (x->format == FORMAT_GROUP8) write_group8(values, padded, KIND_Q8, record);
}

void KERNEL(row_map)(const RowMap *map, int row, float *temporary) {
    float *output = map->output + row * map->output_stride;
    const float *input = map->input + row * map->input_stride;
    if (map->residual) {
        float *residual = map->residual + row * map->residual_stride;
        for (int i = 0; i < map->width; i++) residual[i] += input[i];
        input = residual;
    }
    transform_row(&map->transform, input, map->accumulate ? temporary : output, map->width);
    if (map->accumulate) for (int i = 0; i < map->width; i++) output[i] += temporary[i];
}

/* The first index of the largest value; one that is not a number counts as largest. */
int KERNEL(best)(const float *values, int count) {
    int i = 0, found = 0;
    vf top = splat(-INFINITY);
    vi broken = {0};
    for (; i + LANES <= count; i += LANES) {
        vf value = load(values + i);
        top = maximum(top, value);
        broken |= value != value;
    }
    float best = max_of(top);
    int any = 0;
    for (int lane = 0; lane < LANES; lane++) any |= broken[lane];
    for (; i < count; i++) best = values[i] > best ? values[i] : best, any |= values[i] != values[i];
    if (any) {
        while (values[found] == values[found]) found++;
        return found;
    }
    while (found < count - 1 && !(values[found] >= best)) found++;
    return found;
}
