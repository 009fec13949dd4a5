/* How a driver starts a kernel, for whoever knows its address only. */
#ifndef TRIREME_DRIVER_H
#define TRIREME_DRIVER_H

/* A driver's own start of a kernel: grid, block, shared memory, stream, the addresses of its parameters. CUDA and HIP have the same. */
typedef int (*Driver)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);

/* CUDA's other start, of a kernel that may come onto the chip before the one before it is done: its structures, as they lie in
 * memory. */
typedef struct {
    int id, unused;
    long long value[8];
} Attribute;
typedef struct {
    unsigned grid[3], block[3], shared;
    void *stream;
    Attribute *attributes;
    unsigned num_attributes;
} Configuration;
typedef int (*EarlyDriver)(const Configuration *, void *, void **, void **);
enum { SERIALISED_BY_PROGRAM = 6 }; /* CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION */

/* Behind a kernel's own parameters stand two for memory that Triton would give it; none is wanted. */
enum { PARAMETERS = 48, SCRATCH = 2 };

/* A kernel as it lies on the chip, and how it is cut. */
typedef struct {
    void *driver; /* NULL: nobody knows; a Driver, or an EarlyDriver */
    void *function;
    unsigned grid[3], threads, shared;
    int early;
} Cut;

/* The driver's answer to a start with these parameters: 0 if it took it. */
static int answer_of(const Cut *cut, void *stream, void **parameters) {
    Attribute may_come_early = {SERIALISED_BY_PROGRAM, 0, {1}};
    const unsigned *grid = cut->grid;
    Configuration all = {{grid[0], grid[1], grid[2]}, {cut->threads, 1, 1}, cut->shared, stream, &may_come_early, 1};
    if (cut->early) return ((EarlyDriver)cut->driver)(&all, cut->function, parameters, 0);
    return ((Driver)cut->driver)(cut->function, grid[0], grid[1], grid[2], cut->threads, 1, 1, cut->shared, stream, parameters, 0);
}
#endif
