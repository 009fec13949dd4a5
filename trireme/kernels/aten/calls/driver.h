/* How a driver starts a kernel, for whoever knows its address only. */
#ifndef TRIREME_DRIVER_H
#define TRIREME_DRIVER_H

#include <string.h>

/* A driver's own start of a kernel: grid, block, shared memory, stream, the addresses of its parameters. CUDA and HIP have the same. */
typedef int (*Driver)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);

/* CUDA's other start, of a kernel that may come onto the chip before the one before it is done, or whose blocks form clusters: its
 * structures, as they lie in memory. */
typedef struct {
    int id, unused;
    unsigned value[16] __attribute__((aligned(8)));
} Attribute;
typedef struct {
    unsigned grid[3], block[3], shared;
    void *stream;
    Attribute *attributes;
    unsigned num_attributes;
} Configuration;
typedef int (*ExtendedDriver)(const Configuration *, void *, void **, void **);
/* CU_LAUNCH_ATTRIBUTE_…: sizes of a cluster, where clusters lie, and that a kernel may come early. */
enum { CLUSTER_DIMENSION = 4, CLUSTER_SCHEDULING = 5, PROGRAMMATIC_SERIALISATION = 6, ATTRIBUTES = 3 };
enum { SCHEDULE_EVENLY = 1 }; /* CU_CLUSTER_SCHEDULING_POLICY_SPREAD, as Triton wants clusters */

/* Behind a kernel's own parameters stand two for memory that Triton would give it; none is wanted. */
enum { PARAMETERS = 48, SCRATCH = 2 };

/* What the chip's copy engine knows of a tensor: a parameter like others, but for its size. The driver's function writes another
 * address into one. */
enum { MAPS = 4, MAP_BYTES = 128 };
typedef struct {
    char bytes[MAP_BYTES];
} __attribute__((aligned(64))) Map;
typedef int (*Readdress)(void *, void *);

/* A kernel as it lies on the chip, and how it is cut. */
typedef struct {
    void *driver; /* NULL: nobody knows; an ExtendedDriver if it may come early or has clusters, else a Driver */
    void *function;
    unsigned grid[3], threads, shared;
    unsigned cluster; /* blocks that form one; 1: none */
    int early;
    Readdress readdress;
    char maps[MAPS][MAP_BYTES]; /* of its parameters of kind m, as they were recorded */
} Cut;

/* Whether there are as many maps as kinds say, and what readdresses them. */
static int takes_maps(Cut *cut, const char *kinds, size_t num_kinds, const char *maps, size_t num_bytes) {
    size_t wanted = 0;
    for (size_t i = 0; i < num_kinds; i++) wanted += kinds[i] == 'm';
    if (wanted > MAPS || num_bytes != wanted * MAP_BYTES || (wanted && !cut->readdress)) return 0;
    memcpy(cut->maps, maps, num_bytes);
    return 1;
}

/* What a kernel is given for a parameter that has these bits: they themselves, or the next map with the address that they are; NULL if
 * the driver refuses that. */
static void *parameter_of(const Cut *cut, char kind, void *bits, Map *maps, int *used) {
    void *address;
    if (kind != 'm') return bits;
    Map *map = &maps[*used];
    memcpy(map->bytes, cut->maps[(*used)++], MAP_BYTES);
    memcpy(&address, bits, sizeof address);
    return cut->readdress(map, address) == 0 ? map : NULL;
}

/* The driver's answer to a start with these parameters: 0 if it took it. */
static int answer_of(const Cut *cut, void *stream, void **parameters) {
    const unsigned *grid = cut->grid;
    if (!cut->early && cut->cluster == 1)
        return ((Driver)cut->driver)(cut->function, grid[0], grid[1], grid[2], cut->threads, 1, 1, cut->shared, stream, parameters, 0);
    Attribute sizes = {CLUSTER_DIMENSION, 0, {cut->cluster, 1, 1}}, places = {CLUSTER_SCHEDULING, 0, {SCHEDULE_EVENLY}};
    Attribute may_come_early = {PROGRAMMATIC_SERIALISATION, 0, {1}}, attributes[ATTRIBUTES];
    unsigned count = 0;
    if (cut->cluster > 1) attributes[count++] = sizes, attributes[count++] = places;
    if (cut->early) attributes[count++] = may_come_early;
    Configuration all = {{grid[0] * cut->cluster, grid[1], grid[2]}, {cut->threads, 1, 1}, cut->shared, stream, attributes, count};
    return ((ExtendedDriver)cut->driver)(&all, cut->function, parameters, 0);
}
#endif
