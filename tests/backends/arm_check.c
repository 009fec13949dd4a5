/* The kernels of every instruction set named on the command line, best first, against plain loops and the portable kernels; those
 * that are not named must be refused. Exit 1 on error. */
#include "trireme_cpu.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int trireme_pack(const Weight *, int first, int count, int source, const void *, int64_t stride);
void trireme_unpack(const Weight *, int first, int count, float *output, int64_t stride);
void trireme_run(const Step *, int count);

static const char *const ARM[] = {"bf16", "i8mm", "dotprod", "portable"};
static const char *const *isas; /* those to run */
static int isa_count;
static int failures;

static void fail(const char *what, int kind, int rows, double error) {
    printf("%s %s, kind %d, %d rows: error %g\n", trireme_isa(), what, kind, rows, error);
    failures++;
}

static float noise(void) { return (float)rand() / (float)RAND_MAX * 2 - 1; }

static float *noises(int count) {
    float *values = malloc((size_t)count * 4 + 4);
    for (int i = 0; i < count; i++) values[i] = noise();
    return values;
}

static double distance(const float *a, const float *b, int count) {
    double error = 0, size = 1e-30;
    for (int i = 0; i < count; i++) error += ((double)a[i] - b[i]) * ((double)a[i] - b[i]), size += (double)b[i] * b[i];
    return sqrt(error / size);
}

static Weight empty_weight(int kind, int rows, int columns) {
    Weight weight = {kind, rows, columns, (int)trireme_padded_columns(kind, columns), NULL, trireme_tile_bytes(kind, columns)};
    size_t bytes = (size_t)(rows + 15) / 16 * weight.tile_bytes;
    uint8_t *data = aligned_alloc(64, (bytes + 63) / 64 * 64);
    memset(data, 0, bytes);
    weight.data = data;
    return weight;
}

/* Halves near 0.01 in the places of scales, anything elsewhere. */
static void pack_supers(const Weight *weight) {
    int kind = weight->kind, bytes = kind == KIND_Q4_K ? 144 : 210, supers = weight->columns / SUPER, stride = bytes * supers;
    uint8_t *blocks = malloc((size_t)weight->rows * stride);
    for (int i = 0; i < weight->rows * stride; i++) blocks[i] = (uint8_t)(rand() >> 7);
    for (int b = 0; b < weight->rows * supers; b++) {
        uint16_t d = (uint16_t)(0x2100 + rand() % 256);
        memcpy(blocks + b * bytes + (kind == KIND_Q4_K ? 0 : 208), &d, 2);
        if (kind == KIND_Q4_K) memcpy(blocks + b * bytes + 2, &d, 2);
    }
    if (trireme_pack(weight, 0, weight->rows, kind == KIND_Q4_K ? 7 : 8, blocks, stride)) fail("packing", kind, 0, 1);
    free(blocks);
}

/* y += w x + bias, by each instruction set: near the exact sum, and nearer to the portable one, whose activations are rounded alike
 * unless the bf16 kernels take over at 16 rows. */
static void check_product(const Weight *weight, int rows) {
    int n = weight->rows, k = weight->columns, kind = weight->kind, size = rows * n;
    float *x = noises(rows * k), *before = noises(size), *bias = noises(n), *w = malloc((size_t)n * k * 4);
    float *exact = malloc((size_t)size * 4 + 4), *portable = malloc((size_t)size * 4 + 4), *y = malloc((size_t)size * 4 + 4);
    trireme_unpack(weight, 0, n, w, k);
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < n; i++) {
            double sum = (double)before[r * n + i] + bias[i];
            for (int j = 0; j < k; j++) sum += (double)x[r * k + j] * w[i * k + j];
            exact[r * n + i] = (float)sum;
        }
    for (int i = isa_count - 1; i >= 0; i--) { /* portable first */
        trireme_set_isa(isas[i]);
        y[size] = 42; /* stays: nothing is written past the end */
        memcpy(y, before, (size_t)size * 4);
        Linear linear = {.weight = weight, .input = x, .input_stride = k, .output = y, .output_stride = n, .bias = bias, .accumulate = 1};
        Step step = {OP_LINEAR, rows, &linear};
        trireme_run(&step, 1);
        if (i == isa_count - 1) memcpy(portable, y, (size_t)size * 4);
        int wide = !strcmp(isas[i], "bf16") && rows >= 16 && kind != KIND_F32;
        double error = distance(y, exact, size), apart = distance(y, portable, size);
        if (!(error < (kind == KIND_F32 ? 1e-5 : 0.012))) fail("product", kind, rows, error);
        if (!(apart < (wide ? 0.012 : 2e-6)) || y[size] != 42) fail("product beside the portable one", kind, rows, apart);
    }
    free(x), free(before), free(bias), free(w), free(exact), free(portable), free(y);
}

static void check_kind(int kind, int rows, int columns) {
    Weight weight = empty_weight(kind, rows, columns);
    for (int i = 0; i < 16; i++) weight.table[i] = (int8_t)(i * i - 9 * i - 20);
    if (kind == KIND_Q4_K || kind == KIND_Q6_K) {
        pack_supers(&weight);
    } else {
        float *values = noises(rows * columns);
        if (trireme_pack(&weight, 0, rows, 0, values, columns * 4)) fail("packing", kind, 0, 1);
        free(values);
    }
    const int counts[] = {0, 1, 2, 3, 4, 9, 16, 45};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) check_product(&weight, counts[i]);
    free((void *)weight.data);
}

/* Norms and activations of rows whose width is no multiple of any vector. */
static void check_transforms(void) {
    enum { ROWS = 3, WIDTH = 203 };
    float *x = noises(ROWS * WIDTH * 2), *weight = noises(WIDTH), *bias = noises(WIDTH), portable[ROWS * WIDTH], y[ROWS * WIDTH];
    for (int kind = TRANSFORM_NONE; kind <= TRANSFORM_RELU; kind++)
        for (int i = isa_count - 1; i >= 0; i--) {
            trireme_set_isa(isas[i]);
            RowMap map = {.transform = {kind, 1e-5f, 0.5f, weight, bias}, .input = x, .input_stride = 2 * WIDTH,
                          .output = y, .output_stride = WIDTH, .width = WIDTH};
            Step step = {OP_ROW_MAP, ROWS, &map};
            trireme_run(&step, 1);
            if (i == isa_count - 1) memcpy(portable, y, sizeof y);
            if (!(distance(y, portable, ROWS * WIDTH) < 1e-6)) fail("transform", kind, ROWS, distance(y, portable, ROWS * WIDTH));
        }
    free(x), free(weight), free(bias);
}

static void check_attention(void) {
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
    if (!(worst < 1e-5)) fail("attention", 0, NEW, worst);
    free(k), free(v), free(q), free(out);
}

/* The rule in plain loops: a token is kept by the rank of its weight and by the weight of those before it. */
static int64_t plain_choice(const Sample *args, int row) {
    const float *x = args->input + row * args->input_stride;
    double weights[1000], top = -INFINITY, whole = 0, total = 0, passed = 0;
    int kept[1000];
    for (int i = 0; i < args->width; i++) top = fmax(top, x[i]);
    if (!isfinite(top)) return -1;
    for (int i = 0; i < args->width; i++) weights[i] = exp((x[i] - top) / args->temperature[row]);
    for (int pass = 0; pass < 3; pass++) { /* the weight of all that are left by top-k, then the choice among what top-p and min-p leave */
        for (int i = 0; i < args->width; i++) {
            int rank = 0;
            double before = 0;
            for (int j = 0; j < args->width; j++)
                if (weights[j] > weights[i] || (weights[j] == weights[i] && j < i)) rank++, before += weights[j];
            int among = args->top_k[row] == 0 || rank < args->top_k[row];
            if (pass == 0) whole += among ? weights[i] : 0;
            if (pass == 1) kept[i] = among && (rank == 0 || before < args->top_p[row] * whole) && weights[i] >= args->min_p[row];
            if (pass == 1) total += kept[i] ? weights[i] : 0;
            if (pass == 2 && kept[i] && (passed += weights[i]) > args->uniform[row] * total) return i;
        }
    }
    return -2;
}

static void check_sampling(void) {
    enum { ROWS = 24, WIDTH = 301 };
    float *x = noises(ROWS * WIDTH), temperature[ROWS], top_p[ROWS], min_p[ROWS], uniform[ROWS];
    int32_t top_k[ROWS];
    int64_t chosen[ROWS];
    for (int i = 0; i < ROWS * WIDTH; i++) x[i] *= 5;
    for (int r = 0; r < ROWS; r++) {
        temperature[r] = 0.5f + (float)(r % 3), top_k[r] = r % 4 ? 0 : 20, uniform[r] = 0.5f + noise() / 2.01f;
        top_p[r] = r % 2 ? 0.8f : 1, min_p[r] = r % 5 ? 0 : 0.05f;
    }
    x[3 * WIDTH + 7] = INFINITY;
    Sample args = {x, WIDTH, WIDTH, temperature, top_k, top_p, min_p, uniform, chosen};
    Step step = {OP_SAMPLE, ROWS, &args};
    trireme_run(&step, 1);
    for (int r = 0; r < ROWS; r++)
        if (chosen[r] != plain_choice(&args, r)) fail("sampling", r, ROWS, (double)(chosen[r] - plain_choice(&args, r)));
    memset(temperature, 0, sizeof temperature);
    trireme_run(&step, 1);
    for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < WIDTH && r != 3; i++)
            if (x[r * WIDTH + i] > x[r * WIDTH + chosen[r]]) fail("greedy choice", r, ROWS, i);
    free(x);
}

int main(int count, char **names) {
    isas = (const char *const *)names + 1, isa_count = count - 1;
    trireme_set_threads(2);
    trireme_set_isa("auto");
    if (strcmp(trireme_isa(), isas[0])) printf("auto is %s\n", trireme_isa()), failures++;
    for (size_t i = 0; i < sizeof ARM / sizeof *ARM; i++) {
        int named = 0;
        for (int j = 0; j < isa_count; j++) named |= !strcmp(ARM[i], isas[j]);
        if (trireme_set_isa(ARM[i]) != named) printf("%s: %s\n", ARM[i], named ? "cannot run" : "should not run"), failures++;
    }
    for (int kind = 0; kind < KIND_COUNT; kind++) {
        int supers = kind == KIND_Q4_K || kind == KIND_Q6_K;
        check_kind(kind, 37, supers ? 512 : 200);
        check_kind(kind, 16, supers ? 256 : 64);
    }
    Weight long_rows = empty_weight(KIND_Q4, 16, 25000); /* more than the x86 kernels decode at a time */
    float *values = noises(16 * 25000);
    if (trireme_pack(&long_rows, 0, 16, 0, values, 25000 * 4)) fail("packing", KIND_Q4, 0, 1);
    check_product(&long_rows, 65);
    free(values), free((void *)long_rows.data);
    check_transforms();
    for (int i = 0; i < isa_count; i++) {
        trireme_set_isa(isas[i]);
        check_attention();
        check_sampling();
    }
    return failures != 0;
}
