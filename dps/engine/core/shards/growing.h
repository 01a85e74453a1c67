/* Memory of arrays that grow: a large block is mapped, so that it grows by moving its pages instead of copying bytes.

   The C library would do the same for blocks that it maps, but which ones these are depends on what a program has
   allocated and freed before (M_MMAP_THRESHOLD moves). A block begins with a line of the cache that holds its size. */
#ifndef DPS_GROWING_H
#define DPS_GROWING_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __linux__
#include <sys/mman.h>
#endif

#include "numpy/arrayobject.h"

#define DPS_LINE 64 /* bytes */
#ifdef __linux__
#define DPS_MAPPED_FROM ((size_t) 1 << 20) /* bytes: copying fewer takes less time than a call of the system */
#else
#define DPS_MAPPED_FROM SIZE_MAX
#endif

typedef struct {
    size_t bytes; /* of the whole block */
    size_t mapped;
} dps_block;

static inline dps_block *dps_block_of(void *memory) {
    return (dps_block *) ((char *) memory - DPS_LINE);
}

static inline void *dps_block_begins(void *at, size_t bytes, size_t mapped) {
    dps_block *block = at;
    if (block == NULL)
        return NULL;
    block->bytes = bytes;
    block->mapped = mapped;
    return (char *) at + DPS_LINE;
}

static inline void *dps_map(size_t bytes) {
#ifdef __linux__
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return dps_block_begins(at == MAP_FAILED ? NULL : at, bytes, 1);
#else
    (void) bytes;
    return NULL;
#endif
}

static void *dps_grow_calloc(void *context, size_t count, size_t size) {
    size_t bytes;
    (void) context;
    if (__builtin_mul_overflow(count, size, &bytes) || __builtin_add_overflow(bytes, (size_t) DPS_LINE, &bytes))
        return NULL;
    return bytes < DPS_MAPPED_FROM ? dps_block_begins(calloc(1, bytes), bytes, 0) : dps_map(bytes);
}

static void *dps_grow_malloc(void *context, size_t size) {
    return dps_grow_calloc(context, 1, size);
}

static void dps_grow_free(void *context, void *memory, size_t size) {
    dps_block *block;
    (void) context, (void) size;
    if (memory == NULL)
        return;
    block = dps_block_of(memory);
#ifdef __linux__
    if (block->mapped) {
        (void) munmap(block, block->bytes);
        return;
    }
#endif
    free(block);
}

static void *dps_grow_realloc(void *context, void *memory, size_t size) {
    dps_block *block;
    size_t bytes;
    void *larger;
    if (memory == NULL)
        return dps_grow_malloc(context, size);
    block = dps_block_of(memory);
    if (__builtin_add_overflow(size, (size_t) DPS_LINE, &bytes))
        return NULL;
#ifdef __linux__
    if (block->mapped) {
        void *at = mremap(block, block->bytes, bytes, MREMAP_MAYMOVE);
        if (at != MAP_FAILED)
            return dps_block_begins(at, bytes, 1);
    }
#endif
    if (!block->mapped && bytes < DPS_MAPPED_FROM)
        return dps_block_begins(realloc(block, bytes), bytes, 0);
    larger = dps_map(bytes);
    if (larger != NULL) {
        memcpy(larger, memory, (block->bytes < bytes ? block->bytes : bytes) - DPS_LINE);
        dps_grow_free(context, memory, 0);
    }
    return larger;
}

/* As dps_small_pages of rows.h. All of the block, because the system moves only what it has treated alike. */
static void dps_grow_in_small_pages(void *memory) {
#ifdef MADV_NOHUGEPAGE
    dps_block *block = dps_block_of(memory);
    if (block->mapped)
        (void) madvise(block, block->bytes, MADV_NOHUGEPAGE);
#else
    (void) memory;
#endif
}

static PyDataMem_Handler dps_growing = {
    "dps_growing", 1, {NULL, dps_grow_malloc, dps_grow_calloc, dps_grow_realloc, dps_grow_free}};

#endif
