/* The C side of the CPU backend: shapes of weights, sequences and steps. Knows no model, no Python and no torch.
 *
 * Everything is a Step: one op over some rows. A Program is an array of steps run by one call, so that a whole
 * decoder layer (or model) costs Python one foreign call. Weight rows are packed in tiles of 16, in the order they are read. */
#pragma once
#include <stdint.h>
#include <stddef.h>

enum { TILE = 16, BLOCK = 64, GROUP = 32, SUPER = 256 }; /* weight rows per tile; columns per block, group and super-block */

/* How weights are stored. A "block" is 64 columns of the tile's 16 rows; quads of 4 columns of one row lie together. */
typedef enum {
    KIND_F32,    /* float[64][16] */
    KIND_BF16,   /* bf16[32 pairs][16][2] */
    KIND_Q4,     /* half d[2][16]; nibbles:  w = d (q - 8)     GGUF Q4_0 */
    KIND_Q4_MIN, /* half d[2][16], m[2][16]; w = d q + m       GGUF Q4_1 */
    KIND_Q8,     /* half d[2][16]; int8:     w = d q           GGUF Q8_0, Q5_0 */
    KIND_Q4_K,   /* per 256: half d, dmin; per 32: u8 s, m;    w = d s q - dmin m */
    KIND_Q6_K,   /* per 256: half d;       per 16: int8 s;     w = d s (q - 32), q of six bits */
    KIND_Q4_TABLE, /* half d[2][16]; nibbles:  w = d table[q]  GGUF IQ4_NL, IQ4_XS, MXFP4; NF4 */
    KIND_F16,    /* half[64][16] */
    KIND_COUNT
} Kind;

typedef struct {
    int32_t kind, rows, columns, padded; /* padded: columns rounded up to whole blocks */
    const uint8_t *data;                 /* ceil(rows / 16) tiles of tile_bytes */
    int64_t tile_bytes;
    int8_t table[16]; /* of KIND_Q4_TABLE */
    const int32_t *order; /* column i takes column order[i] of the input; null: as they come. Not of kinds of floats */
} Weight;

/* What happens to a row before it is multiplied. MUL kinds read a row of 2n: gate first, then up. */
typedef enum {
    TRANSFORM_NONE,
    TRANSFORM_RMS_NORM,
    TRANSFORM_LAYER_NORM,
    TRANSFORM_SILU_MUL,
    TRANSFORM_GELU_TANH_MUL,
    TRANSFORM_GELU_MUL,
    TRANSFORM_GELU_TANH,
    TRANSFORM_GELU,
    TRANSFORM_RELU_SQUARED,
    TRANSFORM_RELU
} TransformKind;

typedef struct {
    int32_t kind;
    float epsilon, offset; /* norms multiply by weight + offset */
    const float *weight, *bias;
} Transform;

/* output[r] (+)= weight · transform(input[r]) + bias */
typedef struct Linear {
    Transform transform;
    const Weight *weight;
    const float *input;
    int64_t input_stride;
    float *output;
    int64_t output_stride;
    const float *bias;
    int32_t accumulate;
    const struct Linear *reader; /* the product after it, which alone reads the output, through a gate; null: anybody may read it */
} Linear;

/* output[r] (+)= transform(input[r]); with a residual: residual[r] += input[r], output[r] = transform(residual[r]) */
typedef struct {
    Transform transform;
    const float *input;
    int64_t input_stride;
    float *output;
    int64_t output_stride;
    float *residual;
    int64_t residual_stride;
    int32_t width, accumulate;
} RowMap;

/* How keys and values are kept, in [slots, kv_heads, head_dim] numbers of this kind:
 *   KV_F32   floats
 *   KV_INT8  bytes;  x = q · scale       scales: float [slots, kv_heads]; each a head's own, or the given one of all its slots
 *   KV_FP8   e4m3;   x = q · factor      scales: float [kv_heads], or null for 1
 *   KV_INT4  two of 0 .. 15 a byte, number i in the low and i + head_dim / 2 in the high bits;
 *            x = q · scale + low         scales: half [slots, kv_heads, groups of 32 numbers][scale, low] */
typedef enum { KV_F32, KV_INT8, KV_FP8, KV_INT4 } KVKind;
enum { KV_GROUP = 32 };

/* Rotates query and key in place (after an optional norm of each head) and writes key and value into their slots. */
typedef struct {
    float *query, *key, *value;
    int64_t query_stride, key_stride, value_stride; /* floats from token to token */
    int32_t heads, kv_heads, head_dim, rotary_dim, interleaved;
    const int32_t *positions, *slots; /* per token; slot: where its key and value go, negative: nowhere */
    const float *cosine, *sine;       /* rows of rotary_dim / 2, table_stride apart; null: no rotation */
    int64_t table_stride;
    const float *query_norm, *key_norm;
    float epsilon, offset;
    void *keys, *values; /* of kv_kind; null: not stored */
    void *key_scales, *value_scales;
    const float *key_given, *value_given; /* [kv_heads], of KV_INT8: the scale of each head; null: of its largest number */
    int32_t kv_kind;
} RopeStore;

/* The sequences of a step and where their keys and values lie. Token p of sequence s is in slot
 *   page_table[page_rows[s] * page_stride + p / page_size] * page_size + p % page_size */
typedef struct {
    int32_t count, page_size;
    int64_t page_stride;
    const int32_t *query_starts;    /* [count + 1] */
    const int32_t *context_lengths; /* [count], new tokens included */
    const int32_t *page_table, *page_rows;
} Sequences;

typedef struct {
    const Sequences *sequences;
    const float *query;
    int64_t query_stride;
    float *output;
    int64_t output_stride;
    int32_t heads, kv_heads, head_dim, window; /* window: keys seen, the query's own included; 0: all */
    float scale, softcap;
    const float *slopes, *sinks; /* per head: ALiBi slope; logit of a key without a value */
    const void *keys, *values, *key_scales, *value_scales;
    int32_t kv_kind, causal, rounded; /* rounded: products may be of bf16, where that is faster */
    int32_t chunked; /* the window begins anew at every multiple of its length */
} Attention;

/* The first key that a query sees; below 0 where its window reaches beyond the beginning. */
static inline int first_seen(const Attention *args, int position) {
    if (!args->window) return 0;
    return args->chunked ? position / args->window * args->window : position - args->window + 1;
}

/* output[r] = row tokens[r] of the table, times scale */
typedef struct {
    const Weight *table;
    const int32_t *tokens;
    float *output;
    int64_t output_stride;
    float scale;
} Embedding;

/* output[r] = input[index[r]] */
typedef struct {
    const float *input;
    int64_t input_stride;
    float *output;
    int64_t output_stride;
    const int32_t *index;
    int32_t width;
} Gather;

typedef struct {
    const float *input;
    int64_t input_stride;
    int32_t width, count; /* count: how many of the largest, best first */
    float *values;
    int32_t *ids;    /* [rows, count] */
    int64_t *chosen; /* [rows] the best, or -1 where its value is not finite; null: not wanted */
} TopK;

/* chosen[r]: a token of softmax(input[r] / temperature) after top-k (0: all), top-p and min-p, by uniform in [0, 1);
 * -1 where the largest logit is not finite. Temperature 0: the best. */
typedef struct {
    const float *input;
    int64_t input_stride;
    int32_t width;
    const float *temperature;
    const int32_t *top_k;
    const float *top_p, *min_p, *uniform;
    int64_t *chosen;
} Sample;

/* ids[i] = tokens[rows[i]][positions[i]]; slots[i]: where that position's key and value go */
typedef struct {
    const int32_t *tokens;
    int64_t token_stride;
    const int32_t *pages;
    int64_t page_stride;
    const int32_t *rows, *positions;
    int32_t page_size;
    int32_t *ids, *slots;
} StepInputs;

/* tokens[rows[i]][positions[i]] = max(ids[i], 0) */
typedef struct {
    int32_t *tokens;
    int64_t token_stride;
    const int32_t *rows, *positions;
    const int64_t *ids;
} AppendTokens;

typedef enum {
    OP_LINEAR,
    OP_ROW_MAP,
    OP_ROPE_STORE,
    OP_ATTENTION,
    OP_EMBEDDING,
    OP_GATHER,
    OP_TOP_K,
    OP_STEP_INPUTS,
    OP_APPEND_TOKENS,
    OP_SAMPLE
} OpCode;

typedef struct {
    int32_t op, rows;
    const void *args;
    const int32_t *live; /* how many of the rows are wanted, looked up at every run; NULL: all */
} Step;

/* Activations as a matmul reads them: `data` holds one record per row, `stride` bytes apart. */
typedef enum { FORMAT_F32, FORMAT_BF16, FORMAT_GROUP8 } Format;
typedef struct {
    uint8_t *data;
    int64_t stride;
    int32_t format, kind, padded;
    const int32_t *order; /* the weight's */
} Activations;

/* Queries [query0, query0 + queries) of one sequence over its keys [key0, key1), for the heads of `kv_heads` KV heads from one on. */
typedef struct {
    int32_t sequence, kv_head, kv_heads, query0, queries, key0, key1;
    float *partial;         /* null: write the output; else per query and head: maximum, sum, values, for the merge */
    int64_t partial_stride; /* floats from one KV head's to the next one's */
} AttentionTask;

/* One instruction set's version of everything that is worth having twice. */
typedef struct {
    const char *name;
    void (*prepare)(const Transform *, const float *input, int columns, float *temporary, const Activations *, int row);
    void (*matmul)(const Linear *, const Activations *, int tile0, int tile1, int rows, float *scratch);
    void (*row_map)(const RowMap *, int row, float *temporary);
    void (*rope_store)(const RopeStore *, int token, int head);
    void (*attention)(const Attention *, const AttentionTask *, float *scratch);
    int (*best)(const float *values, int count);
    size_t (*sample_bytes)(int width);
    int64_t (*sample)(const Sample *, int row, void *scratch);
    int wide_rows; /* from this many rows on, activations go to `wide_matmul` as bf16 (or row-wise int8); 0: never */
    void (*wide_matmul)(const Linear *, const Activations *, int tile0, int tile1, int rows, float *scratch);
    /* A wide product straight to what its reader multiplies, by tiles of the gate; null: none */
    void (*gated_matmul)(const Linear *, const Activations *, const Activations *gated, int tile0, int tile1, int rows, float *scratch);
} Kernels;

extern const Kernels *trireme_kernels; /* the chosen instruction set */

/* features.c */
int trireme_set_isa(const char *name);
const char *trireme_isa(void);
/* pool.c */
typedef struct {
    int index, count;      /* which of how many */
    int phase, shares_seen; /* where it is; of how many workers it has found the share taken */
    int64_t before, taken; /* items of earlier phases; those of this one that it took and has not told of */
} Worker;
typedef struct { int64_t first, end; } Span;
typedef void (*Job)(void *context, Worker *worker);
int trireme_set_threads(int count);
int trireme_threads(void);
void pool_run(Job job, void *context);
int pool_take(Worker *worker, int64_t items, int64_t chunk, Span *span); /* up to `chunk` of this phase's items; 0: none is left */
void pool_next_phase(Worker *worker, int64_t items);                     /* waits until all items of this phase are done */
void *pool_scratch(const Worker *worker, size_t bytes);
/* pack.c */
int64_t trireme_tile_bytes(int kind, int columns);
int64_t trireme_padded_columns(int kind, int columns);
void dequantize_row(const Weight *weight, int row, float *output);
