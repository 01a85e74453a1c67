/* Counts of pending keys, in small pages of 5-byte entries. See pending.pyx for the theory of operation. */
#ifndef DPS_PENDING_PAGES_H
#define DPS_PENDING_PAGES_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "mixing.h"

#define DPS_GROUP_BITS 7
#define DPS_BUCKET_BITS 5
#define DPS_GROUPS (1 << DPS_GROUP_BITS)
#define DPS_BUCKETS (1 << DPS_BUCKET_BITS) /* of each page */
#define DPS_PAGE_FILL 256 /* entries of a page, on average, at which a group gets one more page */
#define DPS_BLOCK_HEAD 8 /* bytes of each block that the C library has for itself */
#define DPS_PAGE_FULL 8192 /* entries of a page, at most: 40 KiB; only keys made for it fill a page */

typedef struct __attribute__((packed)) {
    uint32_t tag;
    uint8_t count; /* 0: the key was born in the call that goes on */
} dps_pending;

/* Where a key is: 44 bits of its hash, the last ones, because the first ones have chosen the shard. */
typedef struct {
    uint32_t group, bucket, tag;
} dps_place;

/* Entries by bucket, and by tag within each bucket. */
typedef struct {
    uint16_t room; /* entries for which there is memory */
    uint16_t ends[DPS_BUCKETS]; /* one past the last entry of each bucket */
    dps_pending entries[];
} dps_page;

typedef struct {
    dps_page *first;
    dps_page **more; /* pages 1, 2, ... */
    uint32_t keys, pages;
    uint32_t room; /* pages for which `more` has memory */
} dps_group;

typedef struct {
    dps_group groups[DPS_GROUPS];
    int64_t keys;
    int64_t bytes; /* of all blocks of memory, this one too */
} dps_pendings;

/* Bytes that the C library needs for a block: its own 8, and multiples of 16. */
static inline int64_t dps_block_bytes(int64_t bytes) {
    return (bytes + DPS_BLOCK_HEAD + 15) & ~(int64_t)15;
}

static inline int64_t dps_page_bytes(uint32_t room) {
    return (int64_t)sizeof(dps_page) + (int64_t)sizeof(dps_pending) * room;
}

static inline dps_place dps_place_of(int64_t key) {
    uint64_t hash = dps_mix((uint64_t)key);
    dps_place place;
    place.group = (uint32_t)hash & (DPS_GROUPS - 1);
    place.bucket = (uint32_t)(hash >> DPS_GROUP_BITS) & (DPS_BUCKETS - 1);
    place.tag = (uint32_t)(hash >> (DPS_GROUP_BITS + DPS_BUCKET_BITS));
    return place;
}

/* How many of the last bits of tags tell so many pages apart. */
static inline int dps_page_bits(uint32_t pages) {
    return pages > 1 ? 32 - __builtin_clz(pages - 1) : 0;
}

/* The page of a group that has the tag (linear hashing, Litwin 1980). */
static inline uint32_t dps_page_of(uint32_t tag, uint32_t pages) {
    uint32_t span = (uint32_t)1 << dps_page_bits(pages), page = tag & (span - 1);
    return page < pages ? page : page - span / 2;
}

/* The page that is cut when page number `page` is made, and gets its entries back. */
static inline uint32_t dps_buddy_bit(uint32_t page) {
    return (uint32_t)1 << (31 - __builtin_clz(page));
}

static inline dps_page **dps_page_at(dps_group *group, uint32_t page) {
    return page ? &group->more[page - 1] : &group->first;
}

static inline uint32_t dps_first_of(const dps_page *page, uint32_t bucket) {
    return bucket ? page->ends[bucket - 1] : 0;
}

static inline uint32_t dps_size(const dps_page *page) {
    return page->ends[DPS_BUCKETS - 1];
}

/* Give a page memory for so many entries: 0, or -1 without memory. A page that is NULL is made. */
static int dps_resize_page(dps_pendings *all, dps_page **page, uint32_t room) {
    int64_t before = *page == NULL ? 0 : dps_block_bytes(dps_page_bytes((*page)->room));
    dps_page *made = realloc(*page, (size_t)dps_page_bytes(room));
    if (made == NULL)
        return -1;
    if (*page == NULL)
        memset(made->ends, 0, sizeof made->ends);
    made->room = (uint16_t)room;
    *page = made;
    all->bytes += dps_block_bytes(dps_page_bytes(room)) - before;
    return 0;
}

/* The room that a page of so many entries is given: at least one more. Its block has a multiple of 32 bytes, because
   blocks of few sizes leave fewer holes between them. */
static inline uint32_t dps_room_for(uint32_t entries) {
    int64_t block = (dps_block_bytes(dps_page_bytes(entries + 1)) + 31) & ~(int64_t)31;
    return (uint32_t)((block - DPS_BLOCK_HEAD - (int64_t)sizeof(dps_page)) / (int64_t)sizeof(dps_pending));
}

/* Take memory back that a page does not need. Where the C library has no smaller block, the page keeps its own. */
static inline void dps_trim_page(dps_pendings *all, dps_page **page) {
    uint32_t entries = dps_size(*page);
    if ((*page)->room > dps_room_for(entries + 4)) /* not at once, because the next key may need it again */
        (void)dps_resize_page(all, page, dps_room_for(entries));
}

/* The first entry of the bucket with this tag or a larger one. */
static inline uint32_t dps_seek(const dps_page *page, uint32_t bucket, uint32_t tag) {
    uint32_t at = dps_first_of(page, bucket), end = page->ends[bucket], smaller = 0;
    while (end - at > 16) { /* seldom: a bucket has about eight entries */
        uint32_t middle = at + (end - at) / 2;
        if (page->entries[middle].tag < tag)
            at = middle + 1;
        else
            end = middle;
    }
    for (uint32_t i = at; i < end; i++)
        smaller += page->entries[i].tag < tag; /* without a branch, which could not be predicted */
    return at + smaller;
}

/* The entry of a place, or NULL. */
static inline dps_pending *dps_pending_of(dps_pendings *all, dps_place place) {
    dps_group *group = &all->groups[place.group];
    dps_page *page = *dps_page_at(group, dps_page_of(place.tag, group->pages));
    uint32_t at = dps_seek(page, place.bucket, place.tag);
    return at < page->ends[place.bucket] && page->entries[at].tag == place.tag ? &page->entries[at] : NULL;
}

static inline void dps_move_ends(dps_page *page, uint32_t bucket, int by) {
    for (uint32_t b = 0; b < DPS_BUCKETS; b++)
        page->ends[b] = (uint16_t)(page->ends[b] + (b >= bucket ? by : 0));
}

/* Give the list of a group's pages room for so many, and some more; 0, or -1 without memory. */
static int dps_resize_list(dps_pendings *all, dps_group *group, uint32_t pages) {
    uint32_t room = pages + pages / 8 + 2;
    dps_page **more = realloc(group->more, room * sizeof *more);
    if (more == NULL)
        return -1;
    all->bytes += dps_block_bytes(room * (int64_t)sizeof *more);
    all->bytes -= group->more == NULL ? 0 : dps_block_bytes(group->room * (int64_t)sizeof *more);
    group->more = more;
    group->room = room;
    return 0;
}

/* Cut the page whose turn it is in two. 0, or -1 without memory. */
static int dps_split(dps_pendings *all, dps_group *group) {
    uint32_t bit = dps_buddy_bit(group->pages), moved = 0, kept = 0, next = 0;
    dps_page **from, *made = NULL, *old;
    if (group->pages > group->room && dps_resize_list(all, group, group->pages)) /* page 0 does not lie in `more` */
        return -1;
    from = dps_page_at(group, group->pages - bit);
    old = *from;
    for (uint32_t i = 0; i < dps_size(old); i++)
        moved += (old->entries[i].tag & bit) != 0;
    if (dps_resize_page(all, &made, dps_room_for(moved)))
        return -1;
    moved = 0;
    for (uint32_t b = 0; b < DPS_BUCKETS; b++) {
        for (; next < old->ends[b]; next++) {
            if (old->entries[next].tag & bit)
                made->entries[moved++] = old->entries[next];
            else
                old->entries[kept++] = old->entries[next];
        }
        made->ends[b] = (uint16_t)moved;
        old->ends[b] = (uint16_t)kept;
    }
    *dps_page_at(group, group->pages++) = made;
    dps_trim_page(all, from);
    return 0;
}

/* Put the entries of the last page back into the one that they came from. 0; -1 without memory; 1 if that page would
   have too many. */
static int dps_merge(dps_pendings *all, dps_group *group) {
    uint32_t last = group->pages - 1;
    dps_page **into = dps_page_at(group, last - dps_buddy_bit(last)), *from = *dps_page_at(group, last), *page;
    uint32_t total = dps_size(*into) + dps_size(from), at = total;
    if (total > DPS_PAGE_FULL)
        return 1;
    if (total > (*into)->room && dps_resize_page(all, into, dps_room_for(total)))
        return -1;
    page = *into;
    for (int b = DPS_BUCKETS - 1; b >= 0; b--) { /* from the last entry on, so that none is overwritten */
        uint32_t i = page->ends[b], i0 = dps_first_of(page, (uint32_t)b);
        uint32_t j = from->ends[b], j0 = dps_first_of(from, (uint32_t)b);
        page->ends[b] = (uint16_t)at;
        while (j > j0) {
            if (i > i0 && page->entries[i - 1].tag > from->entries[j - 1].tag)
                page->entries[--at] = page->entries[--i];
            else
                page->entries[--at] = from->entries[--j];
        }
        memmove(&page->entries[at - (i - i0)], &page->entries[i0], (i - i0) * sizeof(dps_pending));
        at -= i - i0;
    }
    all->bytes -= dps_block_bytes(dps_page_bytes(from->room));
    free(from);
    group->pages--;
    dps_trim_page(all, into);
    if (group->room > 2 * group->pages + 4)
        (void)dps_resize_list(all, group, group->pages);
    return 0;
}

/* Let a group have as many pages as its keys need. 0, or -1 without memory. */
static inline int dps_fit_pages(dps_pendings *all, dps_group *group) {
    int done = 0;
    while (!done && group->pages > 1 && group->keys <= (group->pages - 1) * DPS_PAGE_FILL)
        done = dps_merge(all, group);
    return done < 0 ? -1 : 0;
}

/* Forget an entry. The pages of its group may be too many now: see dps_fit_pages. */
static inline void dps_remove(dps_pendings *all, dps_place place, dps_pending *entry) {
    dps_group *group = &all->groups[place.group];
    dps_page **page = dps_page_at(group, dps_page_of(place.tag, group->pages));
    dps_pending *end = &(*page)->entries[dps_size(*page)];
    memmove(entry, entry + 1, (size_t)((char *)end - (char *)(entry + 1)));
    dps_move_ends(*page, place.bucket, -1);
    group->keys--;
    all->keys--;
    dps_trim_page(all, page);
}

static void dps_free_pendings(dps_pendings *all) {
    if (all == NULL)
        return;
    for (int g = 0; g < DPS_GROUPS; g++) {
        for (uint32_t page = 0; page < all->groups[g].pages; page++)
            free(*dps_page_at(&all->groups[g], page));
        free(all->groups[g].more);
    }
    free(all);
}

/* No keys at all; NULL without memory. */
static dps_pendings *dps_new_pendings(void) {
    dps_pendings *all = calloc(1, sizeof *all);
    if (all == NULL)
        return NULL;
    all->bytes = dps_block_bytes(sizeof *all);
    for (int g = 0; g < DPS_GROUPS; g++) {
        if (dps_resize_page(all, &all->groups[g].first, dps_room_for(0))) {
            dps_free_pendings(all);
            return NULL;
        }
        all->groups[g].pages = 1;
    }
    return all;
}

#endif
