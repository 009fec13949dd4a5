/* One instruction set's kernels: this file is compiled once for each, with ISA its name. */
#include "rows.c"
#include "matmul.c"
#if defined(ISA_BF16)
#include "bf16.c"
#endif
#include "rope.c"
#include "attention.c"
#include "sampling.c"

#define TEXT2(name) #name
#define TEXT(name) TEXT2(name)

const Kernels KERNEL(kernels) = {
    .name = TEXT(ISA),
    .prepare = KERNEL(prepare),
    .matmul = KERNEL(matmul),
    .row_map = KERNEL(row_map),
    .rope_store = KERNEL(rope_store),
    .attention = KERNEL(attention),
    .best = KERNEL(best),
    .sample_bytes = KERNEL(sample_bytes),
    .sample = KERNEL(sample),
#if defined(ISA_BF16)
    .wide_rows = 16,
    .wide_matmul = KERNEL(wide_matmul),
#endif
};
