/* Running programs: each step's rows, tiles or tasks are shared out among the workers, with a barrier after each phase.
 * Knows which kernel serves which op; the arithmetic is elsewhere. */
#include "attention.h"
#include "layout.h"
#include <math.h>
#include <stdlib.h>

typedef struct { const Step *steps; int count; } Program;

static int rows_of(const Step *step) { return step->live && *step->live < step->rows ? *step->live : step->rows; }

static uint8_t *shared_buffer; /* quantised activations of the current matmul, or partial attention results */
static size_t shared_bytes;

static void reserve_shared(size_t bytes) {
    if (bytes <= shared_bytes) return;
    free(shared_buffer);
    shared_bytes = (bytes + bytes / 4 + 4095) / 4096 * 4096;
    shared_buffer = aligned_alloc(4096, shared_bytes);
    if (!shared_buffer) abort();
}

/* ---- linear: prepare activations, then multiply ---- */

enum { ALONE_ROWS = 2, ALONE_COLUMNS = 8192 }; /* up to this much, every worker quantises all the input and saves a barrier */

static int is_wide(const Kernels *kernels, int rows) { return kernels->wide_rows && rows >= kernels->wide_rows; }

static Activations activations_for(const Kernels *kernels, const Weight *weight, int rows) {
    Activations x = {.kind = weight->kind, .padded = weight->padded, .order = weight->order};
    int64_t width = weight->padded, bytes;
    if (is_wide(kernels, rows) && weight->kind != KIND_F32) x.format = FORMAT_BF16, bytes = width * 2;
    else if (is_float(weight->kind)) x.format = FORMAT_F32, bytes = width * 4;
    else x.format = FORMAT_GROUP8, bytes = width + width / GROUP * (weight->kind == KIND_Q6_K ? 12 : 8);
    x.stride = (bytes + 63) / 64 * 64;
    if (x.stride % 1024 == 0) x.stride += 64; /* rows a power of two apart would share cache sets */
    return x;
}

/* Whether a product goes straight to the activations of its reader. */
static int is_handed_on(const Kernels *kernels, const Linear *linear, int rows) {
    if (!linear->reader || !kernels->gated_matmul || !is_wide(kernels, rows)) return 0;
    const Weight *weight = linear->weight, *next = linear->reader->weight;
    if (next->order) return 0;
    return weight->kind != KIND_F32 && next->kind != KIND_F32 && next->padded == next->columns && weight->rows == 2 * next->columns;
}

static size_t activation_bytes(const Linear *linear, int rows) {
    Activations x = activations_for(trireme_kernels, linear->weight, rows);
    return (size_t)(rows + 31) / 32 * 32 * x.stride; /* whole blocks of 32 rows: tiles may read, not use, rows past the end */
}

static size_t linear_bytes(const Linear *linear, int rows) {
    size_t next = is_handed_on(trireme_kernels, linear, rows) ? activation_bytes(linear->reader, rows) : 0;
    return activation_bytes(linear, rows) + next;
}

static int64_t chunk_of(int64_t items, int workers, int64_t least) {
    int64_t chunk = items / (workers * 8);
    return workers == 1 ? items : chunk < least ? least : chunk;
}

static void prepare_rows(const Linear *linear, const Activations *x, int64_t first, int64_t end, float *temporary) {
    for (int64_t row = first; row < end; row++)
        trireme_kernels->prepare(&linear->transform, linear->input + row * linear->input_stride, linear->weight->columns,
                                 temporary, x, (int)row);
}

/* A product's work, shared out: tiles in chunks, and where there are many workers for few tiles, rows in parts as well. */
enum { PART_ROWS = 128 }; /* the fewest worth decoding the weights for once more */
typedef struct { int chunk, chunks, part_rows, parts; } Split;

static Split split_of(int tiles, int rows, int wide, int handed, int workers) {
    int64_t chunk = chunk_of(tiles, workers, wide && !handed ? 2 : 1);
    if (wide && !handed) chunk = (chunk + 1) / 2 * 2;
    Split split = {.chunk = (int)chunk, .chunks = (int)((tiles + chunk - 1) / chunk), .part_rows = rows, .parts = 1};
    int wanted = 4 * workers / split.chunks, most = rows / PART_ROWS;
    if (!wide || workers == 1 || wanted < 2 || most < 2) return split;
    wanted = wanted < most ? wanted : most;
    split.part_rows = (rows / wanted + 31) / 32 * 32;
    split.parts = (rows + split.part_rows - 1) / split.part_rows;
    return split;
}

static Activations rows_from(Activations x, int row) { x.data += row * x.stride; return x; }

/* The product itself. Where it goes to its reader, `next` becomes what that one multiplies. */
static void multiply_phase(const Linear *linear, Activations x, Activations *next, int rows, Worker *worker, float *scratch) {
    const Kernels *kernels = trireme_kernels;
    const int wide = is_wide(kernels, rows) && linear->weight->kind != KIND_F32, handed = is_handed_on(kernels, linear, rows);
    const int tiles = (linear->weight->rows + TILE - 1) / TILE / (handed ? 2 : 1);
    if (handed) {
        *next = activations_for(kernels, linear->reader->weight, rows);
        next->data = shared_buffer + activation_bytes(linear, rows);
    }
    const Split split = split_of(tiles, rows, wide, handed, worker->count);
    const int64_t items = (int64_t)split.chunks * split.parts;
    for (Span span; pool_take(worker, items, 1, &span);) {
        int first = (int)(span.first % split.chunks) * split.chunk, last = first + split.chunk < tiles ? first + split.chunk : tiles;
        int row = (int)(span.first / split.chunks) * split.part_rows, count = rows - row < split.part_rows ? rows - row : split.part_rows;
        Activations from = rows_from(x, row), to = rows_from(*next, row);
        Linear part = *linear;
        part.output += row * linear->output_stride;
        if (handed) kernels->gated_matmul(&part, &from, &to, first, last, count, scratch);
        else (wide ? kernels->wide_matmul : kernels->matmul)(&part, &from, first, last, count, scratch);
    }
    pool_next_phase(worker, items);
}

/* Few rows: every worker prepares them for itself, when it has found something to multiply. */
static void run_linear_alone(const Linear *linear, Activations x, int rows, Worker *worker) {
    const size_t own = (size_t)x.stride * rows;
    int64_t tiles = (linear->weight->rows + TILE - 1) / TILE;
    x.data = pool_scratch(worker, own + (size_t)x.padded * 8);
    int ready = 0;
    for (Span span; pool_take(worker, tiles, chunk_of(tiles, worker->count, 1), &span);) {
        if (!ready) prepare_rows(linear, &x, 0, rows, (float *)(x.data + own));
        ready = 1;
        trireme_kernels->matmul(linear, &x, (int)span.first, (int)span.end, rows, (float *)(x.data + own));
    }
    pool_next_phase(worker, tiles);
}

/* `given`: its activations, if the product before it left them; returns those it leaves. */
static Activations run_linear(const Linear *linear, int rows, Activations given, Worker *worker) {
    const Weight *weight = linear->weight;
    Activations x = activations_for(trireme_kernels, weight, rows), next = {0};
    if (rows <= ALONE_ROWS && weight->padded * rows <= ALONE_COLUMNS) {
        run_linear_alone(linear, x, rows, worker);
        return next;
    }
    size_t panel = wide_bytes(weight->padded, rows), gated = gated_bytes(weight->padded, rows);
    if (panel < gated) panel = gated;
    uint8_t *scratch = pool_scratch(worker, panel + (size_t)weight->padded * 8);
    x.data = given.data ? given.data : shared_buffer;
    if (!given.data) {
        for (Span span; pool_take(worker, rows, 1, &span);) prepare_rows(linear, &x, span.first, span.end, (float *)(scratch + panel));
        pool_next_phase(worker, rows);
    }
    multiply_phase(linear, x, &next, rows, worker, (float *)scratch);
    return next;
}

/* ---- attention: tasks, and the merge of split ones ---- */

enum { TASK_ROWS = 32, WIDE_ROWS = 96 }; /* rows per task, also in rounded prompts */
#if defined(__aarch64__)
enum { SPLIT_KEYS = 64 }; /* fewest keys worth a split: two cores of a Neoverse-N1 share the heads of a small model unevenly */
/* From so many keys on a single query's KV heads go together, as long as their rows fill no more than a page: a Neoverse-N1 reads one
 * head after the other, whose rows lie apart, at 11 GB/s, and memory as it lies at 37. */
enum { TOGETHER_KEYS = 256, TOGETHER_BYTES = 4096 };
#else
enum { SPLIT_KEYS = 256, TOGETHER_KEYS = 1 << 30, TOGETHER_BYTES = 0 }; /* together: not measured */
#endif

typedef struct { int queries, splits, together; int64_t total; } AttentionPlan; /* together: KV heads in a task of one query */

/* KV heads in a task of a sequence that has so many queries. */
static int heads_of_task(const AttentionPlan *plan, int queries) { return queries == 1 ? plan->together : 1; }

static int64_t sequence_tasks(const Attention *args, const AttentionPlan *plan, int sequence) {
    int queries = args->sequences->query_starts[sequence + 1] - args->sequences->query_starts[sequence];
    int64_t parts = args->kv_heads / heads_of_task(plan, queries);
    return (queries + plan->queries - 1) / plan->queries * parts * plan->splits;
}

static int longest_context(const Sequences *sequences) {
    int longest = 0;
    for (int s = 0; s < sequences->count; s++)
        if (sequences->context_lengths[s] > longest) longest = sequences->context_lengths[s];
    return longest;
}

static AttentionPlan plan_attention(const Attention *args, int workers) {
    int group = args->heads / args->kv_heads, longest = longest_context(args->sequences), together = 1;
    if (longest >= TOGETHER_KEYS && args->head_dim * 4 <= TOGETHER_BYTES) {
        together = TOGETHER_BYTES / (args->head_dim * 4);
        while (args->kv_heads % together) together--;
    }
    AttentionPlan plan = {.queries = group >= TASK_ROWS ? 1 : TASK_ROWS / group, .splits = 1, .together = together};
    /* Keys are rounded once a task, so rounded attention has fewer and larger ones, as long as every worker has several. */
    AttentionPlan wide = {.queries = group >= WIDE_ROWS ? 1 : WIDE_ROWS / group, .splits = 1, .together = together};
    for (int s = 0; s < args->sequences->count; s++) wide.total += sequence_tasks(args, &wide, s);
    if (args->rounded && wide.total >= 4 * workers) plan.queries = wide.queries;
    for (int s = 0; s < args->sequences->count; s++) plan.total += sequence_tasks(args, &plan, s);
    if (workers > 1 && plan.total < 4 * workers && longest >= 2 * SPLIT_KEYS) {
        int64_t splits = (4 * workers + plan.total - 1) / (plan.total ? plan.total : 1);
        plan.splits = (int)(splits < longest / SPLIT_KEYS ? splits : longest / SPLIT_KEYS);
        plan.total *= plan.splits;
    }
    return plan;
}

static size_t attention_bytes(const Attention *args, int tokens) {
    AttentionPlan plan = plan_attention(args, trireme_threads());
    if (plan.splits == 1) return 0;
    return (size_t)tokens * args->heads * plan.splits * (size_t)(args->head_dim + 2) * 4;
}

/* Split results lie as [split][kv head][token][head of the group], so that a task's rows are neighbours. */
static float *partial_of(const Attention *args, int split, int kv_head, int token) {
    int tokens = args->sequences->query_starts[args->sequences->count];
    int64_t record = ((int64_t)split * args->kv_heads + kv_head) * tokens + token;
    return (float *)shared_buffer + record * (args->heads / args->kv_heads) * (args->head_dim + 2);
}

/* The task's keys: from the window of its first query to its last query, then the split's share of whole blocks. */
static void set_keys(const Attention *args, AttentionTask *task, int split, int splits) {
    int context = args->sequences->context_lengths[task->sequence];
    int new_tokens = args->sequences->query_starts[task->sequence + 1] - args->sequences->query_starts[task->sequence];
    int first = context - new_tokens + task->query0;
    int low = first_seen(args, first) > 0 ? first_seen(args, first) : 0;
    int high = args->causal ? first + task->queries : context;
    int blocks = (high - low + KEYS - 1) / KEYS;
    task->key0 = low + (int)((int64_t)blocks * split / splits) * KEYS;
    task->key1 = split + 1 == splits ? high : low + (int)((int64_t)blocks * (split + 1) / splits) * KEYS;
}

/* The tasks of a sequence run from its last queries, which see most keys, to its first. */
static AttentionTask task_of(const Attention *args, const AttentionPlan *plan, int sequence, int64_t index) {
    int token0 = args->sequences->query_starts[sequence], queries = args->sequences->query_starts[sequence + 1] - token0;
    int blocks = (queries + plan->queries - 1) / plan->queries, split = (int)(index % plan->splits);
    int heads = heads_of_task(plan, queries), parts = args->kv_heads / heads;
    int64_t rest = index / plan->splits;
    AttentionTask task = {.sequence = sequence, .kv_head = (int)(rest % parts) * heads, .kv_heads = heads};
    task.query0 = (blocks - 1 - (int)(rest / parts)) * plan->queries;
    task.queries = queries - task.query0 < plan->queries ? queries - task.query0 : plan->queries;
    set_keys(args, &task, split, plan->splits);
    if (plan->splits > 1) {
        task.partial = partial_of(args, split, task.kv_head, token0 + task.query0);
        task.partial_stride = partial_of(args, split, task.kv_head + 1, token0 + task.query0) - task.partial;
    }
    return task;
}

static void merge_head(const Attention *args, const AttentionPlan *plan, int token, int head, float *values) {
    int group = args->heads / args->kv_heads, width = args->head_dim;
    float top = MASKED, total = 0;
    for (int pass = 0; pass < 2; pass++) {
        for (int split = 0; split < plan->splits; split++) {
            const float *partial = partial_of(args, split, head / group, token) + (int64_t)(head % group) * (width + 2);
            if (pass == 0) { top = fmaxf(top, partial[0]); continue; }
            float factor = partial[0] <= MASKED ? 0 : expf(partial[0] - top);
            total += partial[1] * factor;
            for (int i = 0; i < width; i++) values[i] = (split ? values[i] : 0) + partial[2 + i] * factor;
        }
    }
    attention_write(args, token, head, top, total, values);
}

static void zero_padding(const Attention *args, int tokens) {
    for (int token = args->sequences->query_starts[args->sequences->count]; token < tokens; token++)
        memset(args->output + token * args->output_stride, 0, (size_t)args->heads * args->head_dim * 4);
}

static void run_attention(const Attention *args, int tokens, Worker *worker) {
    AttentionPlan plan = plan_attention(args, worker->count);
    int rows = (plan.queries > plan.together ? plan.queries : plan.together) * (args->heads / args->kv_heads), sequence = 0;
    float *scratch = pool_scratch(worker, attention_scratch_bytes(args, rows));
    int64_t passed = 0;
    for (Span span; pool_take(worker, plan.total, 1, &span);) {
        int64_t index = span.first;
        if (index < passed) sequence = 0, passed = 0; /* another worker's share, which lies before ours */
        while (index - passed >= sequence_tasks(args, &plan, sequence))
            passed += sequence_tasks(args, &plan, sequence++);
        AttentionTask task = task_of(args, &plan, sequence, index - passed);
        trireme_kernels->attention(args, &task, scratch);
        if (index == 0) zero_padding(args, tokens);
    }
    pool_next_phase(worker, plan.total);
    if (plan.splits == 1) return;
    int64_t heads = (int64_t)args->sequences->query_starts[args->sequences->count] * args->heads;
    for (Span span; pool_take(worker, heads, 1, &span);)
        merge_head(args, &plan, (int)(span.first / args->heads), (int)(span.first % args->heads), scratch);
    pool_next_phase(worker, heads);
}

/* ---- the rest: one item after another ---- */

/* The `count` largest of a row, best first, earlier first among equals: an insertion into a short sorted list. */
static void top_of_row(const TopK *args, int row) {
    const float *input = args->input + row * args->input_stride;
    float *values = args->values + (int64_t)row * args->count;
    int32_t *ids = args->ids + (int64_t)row * args->count;
    if (args->count == 1) {
        ids[0] = trireme_kernels->best(input, args->width);
        values[0] = input[ids[0]];
        if (args->chosen) args->chosen[row] = isfinite(values[0]) ? ids[0] : -1;
        return;
    }
    int held = 0;
    for (int i = 0; i < args->width; i++) {
        if (held == args->count && !(input[i] > values[held - 1])) continue;
        int at = held < args->count ? held++ : held - 1;
        for (; at > 0 && input[i] > values[at - 1]; at--) values[at] = values[at - 1], ids[at] = ids[at - 1];
        values[at] = input[i], ids[at] = i;
    }
}

static void embed_row(const Embedding *args, int row) {
    float *output = args->output + row * args->output_stride;
    dequantize_row(args->table, args->tokens[row], output);
    if (args->scale != 1) for (int i = 0; i < args->table->columns; i++) output[i] *= args->scale;
}

static void look_up(const StepInputs *args, int64_t i) {
    int64_t row = args->rows[i];
    int position = args->positions[i];
    args->ids[i] = args->tokens[row * args->token_stride + position];
    args->slots[i] = args->pages[row * args->page_stride + position / args->page_size] * args->page_size + position % args->page_size;
}

static void append_token(const AppendTokens *args, int64_t i) {
    args->tokens[args->rows[i] * args->token_stride + args->positions[i]] = args->ids[i] < 0 ? 0 : (int32_t)args->ids[i];
}

static void run_item(const Step *step, int64_t item, float *temporary) {
    const void *args = step->args;
    const Gather *gather = args;
    switch (step->op) {
    case OP_ROW_MAP: trireme_kernels->row_map(args, (int)item, temporary); break;
    case OP_EMBEDDING: embed_row(args, (int)item); break;
    case OP_TOP_K: top_of_row(args, (int)item); break;
    case OP_SAMPLE: ((const Sample *)args)->chosen[item] = trireme_kernels->sample(args, (int)item, temporary); break;
    case OP_STEP_INPUTS: look_up(args, item); break;
    case OP_APPEND_TOKENS: append_token(args, item); break;
    case OP_ROPE_STORE: {
        const RopeStore *rope = args;
        int heads = rope->heads + rope->kv_heads;
        trireme_kernels->rope_store(rope, (int)(item / heads), (int)(item % heads));
        break;
    }
    case OP_GATHER:
        memcpy(gather->output + item * gather->output_stride, gather->input + gather->index[item] * gather->input_stride,
               (size_t)gather->width * 4);
    }
}

static void run_items(const Step *step, Worker *worker) {
    int64_t items = rows_of(step);
    size_t bytes = 4;
    if (step->op == OP_ROW_MAP) bytes = (size_t)((const RowMap *)step->args)->width * 4;
    if (step->op == OP_SAMPLE) bytes = trireme_kernels->sample_bytes(((const Sample *)step->args)->width);
    if (step->op == OP_ROPE_STORE) items *= ((const RopeStore *)step->args)->heads + ((const RopeStore *)step->args)->kv_heads;
    float *temporary = pool_scratch(worker, bytes);
    int64_t chunk = chunk_of(items, worker->count, 1);
    for (Span span; pool_take(worker, items, chunk, &span);)
        for (int64_t item = span.first; item < span.end; item++) run_item(step, item, temporary);
    pool_next_phase(worker, items);
}

static void run_steps(void *context, Worker *worker) {
    const Program *program = context;
    Activations given = {0};
    for (int i = 0; i < program->count; i++) {
        const Step *step = program->steps + i;
        int rows = rows_of(step);
        if (rows == 0) continue;
        if (step->op == OP_LINEAR) given = run_linear(step->args, rows, given, worker);
        else if (step->op == OP_ATTENTION) run_attention(step->args, rows, worker);
        else run_items(step, worker);
    }
}

void trireme_run(const Step *steps, int count) {
    size_t bytes = 0;
    for (int i = 0; i < count; i++) {
        size_t need = 0;
        if (steps[i].op == OP_LINEAR) need = linear_bytes(steps[i].args, rows_of(steps + i));
        if (steps[i].op == OP_ATTENTION) need = attention_bytes(steps[i].args, rows_of(steps + i));
        bytes = need > bytes ? need : bytes;
    }
    reserve_shared(bytes);
    Program program = {steps, count};
    pool_run(run_steps, &program);
}
