/* Products of every kind and instruction set of this machine against plain loops over the unpacked weights. Exit 1 on error. */
#include "trireme_cpu.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int trireme_pack(const Weight *, int first, int count, int source, const void *, int64_t stride);
void trireme_unpack(const Weight *, int first, int count, float *output, int64_t stride);
void trireme_run(const Step *, int count);

static float noise(void) { return (float)rand() / (float)RAND_MAX * 2 - 1; }

static float *noises(int count) {
    float *values = malloc((size_t)count * 4);
    for (int i = 0; i < count; i++) values[i] = noise();
    return values;
}

static Weight empty_weight(int kind, int rows, int columns) {
    Weight weight = {kind, rows, columns, (int)trireme_padded_columns(kind, columns), NULL, trireme_tile_bytes(kind, columns)};
    size_t bytes = (size_t)(rows + 15) / 16 * weight.tile_bytes;
    uint8_t *data = aligned_alloc(64, (bytes + 63) / 64 * 64);
    memset(data, 0, bytes);
    weight.data = data;
    return weight;
}

static int check_product(const Weight *weight, int rows) {
    int n = weight->rows, k = weight->columns, bad = 0;
    float *x = noises(rows * k), *y = calloc((size_t)rows * n, 4), *w = malloc((size_t)n * k * 4);
    trireme_unpack(weight, 0, n, w, k);
    Linear linear = {.weight = weight, .input = x, .input_stride = k, .output = y, .output_stride = n};
    Step step = {OP_LINEAR, rows, &linear};
    trireme_run(&step, 1);
    double error = 0, size = 0;
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < n; i++) {
            double sum = 0;
            for (int j = 0; j < k; j++) sum += (double)x[r * k + j] * w[i * k + j];
            error += (sum - y[r * n + i]) * (sum - y[r * n + i]), size += sum * sum;
        }
    bad = !(sqrt(error / size) < (weight->kind == KIND_F32 ? 1e-5 : 0.012));
    if (bad) printf("%s kind %d rows %d: error %g\n", trireme_isa(), weight->kind, rows, sqrt(error / size));
    free(x), free(y), free(w);
    return bad;
}

static int check_kind(int kind) {
    int super = kind >= KIND_Q4_K, rows = 37, columns = super ? 512 : 200, bad = 0;
    Weight weight = empty_weight(kind, rows, columns);
    if (super) {
        int bytes = kind == KIND_Q4_K ? 144 : 210, stride = bytes * 2;
        uint8_t *blocks = malloc((size_t)rows * stride);
        for (int i = 0; i < rows * stride; i++) blocks[i] = (uint8_t)(rand() >> 7);
        for (int b = 0; b < rows * 2; b++) { /* halves near 0.01 in the places of scales */
            uint16_t d = (uint16_t)(0x2100 + rand() % 256);
            memcpy(blocks + b * bytes + (kind == KIND_Q4_K ? 0 : 208), &d, 2);
            if (kind == KIND_Q4_K) memcpy(blocks + b * bytes + 2, &d, 2);
        }
        bad |= trireme_pack(&weight, 0, rows, kind == KIND_Q4_K ? 7 : 8, blocks, stride) != 0;
    } else {
        bad |= trireme_pack(&weight, 0, rows, 0, noises(rows * columns), columns * 4) != 0;
    }
    const int counts[] = {1, 2, 3, 4, 9, 21};
    for (int i = 0; i < 6; i++) bad |= check_product(&weight, counts[i]);
    return bad;
}

static int check_attention(void) {
    enum { CONTEXT = 150, HEADS = 6, KV = 2, WIDTH = 64, NEW = 20 };
    float *k = noises(CONTEXT * KV * WIDTH), *v = noises(CONTEXT * KV * WIDTH), *q = noises(NEW * HEADS * WIDTH);
    float *out = calloc(NEW * HEADS * WIDTH, 4);
    int32_t starts[] = {0, NEW}, lengths[] = {CONTEXT}, zero[] = {0}, pages[CONTEXT];
    for (int i = 0; i < CONTEXT; i++) pages[i] = CONTEXT - 1 - i;
    Sequences sequences = {1, 1, CONTEXT, starts, lengths, pages, zero};
    Attention args = {.sequences = &sequences, .query = q, .query_stride = HEADS * WIDTH, .output = out, .causal = 1, .keys = k,
                      .output_stride = HEADS * WIDTH, .heads = HEADS, .kv_heads = KV, .head_dim = WIDTH, .scale = 0.125f, .values = v};
    Step step = {OP_ATTENTION, NEW, &args};
    trireme_run(&step, 1);
    double worst = 0;
    for (int t = 0; t < NEW; t++)
        for (int h = 0; h < HEADS; h++) {
            double total = 0, sums[WIDTH] = {0};
            for (int p = 0; p <= CONTEXT - NEW + t; p++) {
                const float *key = k + (pages[p] * KV + h / 3) * WIDTH, *value = v + (pages[p] * KV + h / 3) * WIDTH;
                double score = 0;
                for (int i = 0; i < WIDTH; i++) score += (double)q[(t * HEADS + h) * WIDTH + i] * key[i];
                double weight = exp(score * 0.125);
                total += weight;
                for (int i = 0; i < WIDTH; i++) sums[i] += weight * value[i];
            }
            for (int i = 0; i < WIDTH; i++) worst = fmax(worst, fabs(out[(t * HEADS + h) * WIDTH + i] - sums[i] / total));
        }
    if (worst > 1e-5) printf("%s attention: error %g\n", trireme_isa(), worst);
    return worst > 1e-5;
}

int main(void) {
    const char *names[] = {"dotprod", "portable"};
    int bad = 0;
    trireme_set_threads(2);
    for (int i = 0; i < 2; i++) {
        if (!trireme_set_isa(names[i])) { printf("%s cannot run\n", names[i]); return 1; }
        for (int kind = 0; kind < KIND_COUNT; kind++) bad |= check_kind(kind);
        bad |= check_attention();
    }
    return bad;
}
