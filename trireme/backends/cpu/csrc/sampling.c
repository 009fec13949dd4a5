/* Choosing a token at random: where the cumulated weight of the tokens kept, in the order of their ids, passes u · total.
 *
 *   w = e^((x - max x) / T)      kept: the k best; of these the best while the share before them is below top_p;
 *                                of these those with w ≥ min_p
 *
 * Weights are counted by their leading bits, so that only the bucket in which a cut falls is sorted. */
#include "vector.h"
#include <stdlib.h>

enum { BUCKET_SHIFT = 18, BUCKETS = (0x3f800000 >> BUCKET_SHIFT) + 1, RUN = 1024 }; /* 32 buckets per power of two; RUN: weights per sum */

typedef struct { float weight; int32_t id; } Candidate;
typedef struct {
    float *weights;
    double *sums; /* one per RUN weights */
    Candidate *candidates;
    double mass[BUCKETS];
    int32_t count[BUCKETS];
} Draw;

static int by_rank(const void *a, const void *b) {
    const Candidate *x = a, *y = b;
    return x->weight != y->weight ? (x->weight < y->weight ? 1 : -1) : x->id - y->id;
}

INLINE int bucket_of(float weight) {
    int32_t bits;
    memcpy(&bits, &weight, 4);
    return bits >> BUCKET_SHIFT < BUCKETS ? bits >> BUCKET_SHIFT : BUCKETS - 1;
}

static void softmax_weights(const float *input, float top, float temperature, float *weights, int width) {
    float factor = 1.0f / (temperature > 1e-6f ? temperature : 1e-6f);
    int i = 0;
    for (; i + LANES <= width; i += LANES) store(weights + i, exponential((load(input + i) - top) * factor));
    for (; i < width; i++) weights[i] = exponential(splat((input[i] - top) * factor))[0];
}

/* Sets to 0 what is not among the `most` best, or has `share` of the whole before it. The best is always kept. */
static void keep_best(Draw *draw, int width, int64_t most, double share) {
    float *weights = draw->weights;
    double before = 0, limit = 0; /* limit: of the weight before the first that is not kept */
    int64_t held = 0;
    int bucket = BUCKETS - 1, found = 0;
    memset(draw->mass, 0, sizeof draw->mass);
    memset(draw->count, 0, sizeof draw->count);
    for (int i = 0; i < width; i++) {
        int at = bucket_of(weights[i]);
        draw->mass[at] += weights[i], draw->count[at]++;
    }
    for (int i = 0; i < BUCKETS; i++) limit += draw->mass[i];
    limit *= share;
    for (; bucket > 0 && held + draw->count[bucket] <= most && before + draw->mass[bucket] < limit; bucket--)
        held += draw->count[bucket], before += draw->mass[bucket];
    for (int i = 0; i < width; i++) {
        int at = bucket_of(weights[i]);
        if (weights[i] == 0) continue;
        if (at == bucket) draw->candidates[found++] = (Candidate){weights[i], i};
        else if (at < bucket) weights[i] = 0;
    }
    qsort(draw->candidates, (size_t)found, sizeof(Candidate), by_rank);
    for (int i = 0; i < found; i++) {
        if (held && (held >= most || before >= limit)) weights[draw->candidates[i].id] = 0;
        held++, before += draw->candidates[i].weight;
    }
}

static int64_t pass(const Draw *draw, int width, float least, float uniform) {
    float *weights = draw->weights;
    double total = 0, target, before = 0;
    for (int begin = 0; begin < width; begin += RUN) {
        int end = begin + RUN < width ? begin + RUN : width, i = begin;
        vf sum = {0};
        for (; i + LANES <= end; i += LANES) {
            vf weight = load(weights + i);
            weight = choose(weight < least, splat(0), weight);
            store(weights + i, weight);
            sum += weight;
        }
        double rest = 0;
        for (; i < end; i++) rest += weights[i] = weights[i] < least ? 0 : weights[i];
        draw->sums[begin / RUN] = sum_of(sum) + rest;
        total += draw->sums[begin / RUN];
    }
    target = uniform * total;
    for (int begin = 0; begin < width; begin += RUN) {
        double sum = draw->sums[begin / RUN];
        if (before + sum <= target && begin + RUN < width) {
            before += sum;
            continue;
        }
        for (int i = begin; i < width && i < begin + RUN; i++) {
            before += weights[i];
            if (before > target && weights[i] > 0) return i;
        }
    }
    int last = width - 1; /* rounding carried the target past the end */
    while (last > 0 && weights[last] == 0) last--;
    return last;
}

size_t KERNEL(sample_bytes)(int width) {
    return sizeof(Draw) + (size_t)width * (sizeof(Candidate) + 4) + ((size_t)width / RUN + 1) * 8;
}

/* The chosen token of a row, or -1 where its largest logit is not finite. */
int64_t KERNEL(sample)(const Sample *args, int row, void *scratch) {
    const float *input = args->input + row * args->input_stride, temperature = args->temperature[row];
    int width = args->width, best = KERNEL(best)(input, width), most = args->top_k[row];
    if (!isfinite(input[best])) return -1;
    if (temperature == 0) return best;
    Draw *draw = scratch;
    draw->sums = (double *)(draw + 1);
    draw->candidates = (Candidate *)(draw->sums + width / RUN + 1);
    draw->weights = (float *)(draw->candidates + width);
    softmax_weights(input, input[best], temperature, draw->weights, width);
    if (most > 0 && most < width) keep_best(draw, width, most, INFINITY);
    if (args->top_p[row] < 1) keep_best(draw, width, INT64_MAX, args->top_p[row]);
    return pass(draw, width, args->min_p[row], args->uniform[row]);
}
