/* Counting, forgetting and ageing of pending keys. See pending.pyx for the theory of operation. */
#ifndef DPS_PENDING_H
#define DPS_PENDING_H

#include "pending_pages.h"

#define DPS_KEYS_AHEAD 32 /* keys whose pages are being loaded at a time */

/* Where ageing goes on: the group, and the first reversed tag of it that has not been aged. */
typedef struct {
    int64_t active; /* 1 while a sweep goes on */
    int64_t group, tag;
} dps_sweep;

/* The 32 bits in reverse order: the pages of a group are ranges of reversed tags, however many they are. */
static inline uint32_t dps_reversed(uint32_t bits) {
    bits = (bits >> 1 & 0x55555555) | (bits & 0x55555555) << 1;
    bits = (bits >> 2 & 0x33333333) | (bits & 0x33333333) << 2;
    bits = (bits >> 4 & 0x0F0F0F0F) | (bits & 0x0F0F0F0F) << 4;
    return __builtin_bswap32(bits);
}

/* Halve the counts of the entries of a page whose reversed tags lie in first .. last; forget those that had 1. */
static void dps_age_page(dps_pendings *all, dps_group *group, dps_page **at, uint32_t first, uint32_t last) {
    dps_page *page = *at;
    uint32_t kept = 0, next = 0, before = dps_size(page);
    for (uint32_t b = 0; b < DPS_BUCKETS; b++) {
        for (; next < page->ends[b]; next++) {
            dps_pending entry = page->entries[next];
            uint32_t place = dps_reversed(entry.tag);
            if (place >= first && place <= last) {
                if (entry.count == 1)
                    continue;
                entry.count >>= 1;
            }
            page->entries[kept++] = entry;
        }
        page->ends[b] = (uint16_t)kept;
    }
    group->keys -= before - kept;
    all->keys -= before - kept;
    dps_trim_page(all, at);
}

/* Age the next part of a group, which is one page at most; 0, or -1 without memory. */
static int dps_age_step(dps_pendings *all, dps_sweep *sweep) {
    dps_group *group = &all->groups[sweep->group];
    uint32_t first = (uint32_t)sweep->tag, width = UINT32_MAX >> dps_page_bits(group->pages), last = first | width;
    dps_age_page(all, group, dps_page_at(group, dps_page_of(dps_reversed(first), group->pages)), first, last);
    sweep->tag = (int64_t)last + 1;
    if (last == UINT32_MAX) {
        sweep->tag = 0;
        sweep->group = (sweep->group + 1) % DPS_GROUPS;
        sweep->active = sweep->group != 0;
    }
    return dps_fit_pages(all, group);
}

/* Age so many parts, of sweeps that begin while more than `limit` keys are pending. 0, or -1 without memory. */
static int dps_age(dps_pendings *all, dps_sweep *sweep, int64_t limit, int64_t steps) {
    for (; steps > 0; steps--) {
        if (!sweep->active) {
            if (all->keys <= limit)
                return 0;
            sweep->active = 1;
            sweep->group = sweep->tag = 0;
        }
        if (dps_age_step(all, sweep))
            return -1;
    }
    return 0;
}

/* Count a key for the first time. 0, or -1 without memory. */
static int dps_insert(dps_pendings *all, dps_place place) {
    dps_group *group = &all->groups[place.group];
    dps_page **at;
    uint32_t entries, i;
    if (group->keys >= group->pages * DPS_PAGE_FILL && dps_split(all, group))
        return -1;
    at = dps_page_at(group, dps_page_of(place.tag, group->pages));
    if (dps_size(*at) == DPS_PAGE_FULL) {
        dps_age_page(all, group, at, 0, UINT32_MAX);
        if (dps_fit_pages(all, group))
            return -1;
        at = dps_page_at(group, dps_page_of(place.tag, group->pages));
        if (dps_size(*at) == DPS_PAGE_FULL)
            return 0; /* the key is not counted: there is no room */
    }
    entries = dps_size(*at);
    if (entries == (*at)->room && dps_resize_page(all, at, dps_room_for(entries)))
        return -1;
    i = dps_seek(*at, place.bucket, place.tag);
    memmove(&(*at)->entries[i + 1], &(*at)->entries[i], (entries - i) * sizeof(dps_pending));
    (*at)->entries[i].tag = place.tag;
    (*at)->entries[i].count = 1;
    dps_move_ends(*at, place.bucket, 1);
    group->keys++;
    all->keys++;
    return 0;
}

/* The places of some keys, whose pages begin to come into the processor's cache: their heads, then the entries. */
static inline void dps_find_places(dps_pendings *all, const int64_t *keys, int64_t count, dps_place *places) {
    const dps_page *pages[DPS_KEYS_AHEAD];
    for (int64_t i = 0; i < count; i++) {
        dps_group *group;
        places[i] = dps_place_of(keys[i]);
        group = &all->groups[places[i].group];
        pages[i] = *dps_page_at(group, dps_page_of(places[i].tag, group->pages));
        __builtin_prefetch(pages[i]);
        __builtin_prefetch((const char *)pages[i] + sizeof(dps_page) - 1);
    }
    for (int64_t i = 0; i < count; i++) {
        const char *entries = (const char *)&pages[i]->entries[dps_first_of(pages[i], places[i].bucket)];
        __builtin_prefetch(entries);
        __builtin_prefetch(entries + 64);
    }
}

/* Forget the keys that this call has born: their counts are 0. Returns 0, or -1 without memory. */
static int dps_forget_born(dps_pendings *all, const int64_t *keys, int64_t count, const uint8_t *born) {
    int result = 0;
    for (int64_t i = 0; i < count; i++) {
        if (born[i]) {
            dps_place place = dps_place_of(keys[i]);
            dps_pending *entry = dps_pending_of(all, place);
            if (entry != NULL && entry->count == 0) {
                dps_remove(all, place, entry);
                result |= dps_fit_pages(all, &all->groups[place.group]);
            }
        }
    }
    return result;
}

/* Count keys; born[i] = 1 where a key has reached the threshold, else 0. 0, or -1 without memory. */
static int dps_count_pending(
    dps_pendings *all, const int64_t *keys, int64_t count, int threshold, uint8_t *born) {
    dps_place places[DPS_KEYS_AHEAD];
    int64_t i;
    int failed = 0;
    for (i = 0; i < count && !failed; i++) {
        dps_pending *entry;
        dps_place place;
        if (i % DPS_KEYS_AHEAD == 0)
            dps_find_places(all, keys + i, count - i < DPS_KEYS_AHEAD ? count - i : DPS_KEYS_AHEAD, places);
        place = places[i % DPS_KEYS_AHEAD];
        entry = dps_pending_of(all, place);
        born[i] = 0;
        if (entry == NULL) {
            failed = dps_insert(all, place);
        } else if (entry->count == 0 || entry->count + 1 >= threshold) {
            entry->count = 0; /* it stays until the call ends, so that what comes later finds it */
            born[i] = 1;
        } else {
            entry->count++;
        }
    }
    return dps_forget_born(all, keys, i, born) | failed;
}

static int dps_forget_pending(dps_pendings *all, const int64_t *keys, int64_t count) {
    int result = 0;
    for (int64_t i = 0; i < count && !result; i++) {
        dps_place place = dps_place_of(keys[i]);
        dps_pending *entry = dps_pending_of(all, place);
        if (entry != NULL) {
            dps_remove(all, place, entry);
            result = dps_fit_pages(all, &all->groups[place.group]);
        }
    }
    return result;
}

static void dps_estimate_pending(dps_pendings *all, const int64_t *keys, int64_t count, uint8_t *counts) {
    for (int64_t i = 0; i < count; i++) {
        const dps_pending *entry = dps_pending_of(all, dps_place_of(keys[i]));
        counts[i] = entry == NULL ? 0 : entry->count;
    }
}

/* Write all keys, group by group: the pages, the ends of buckets, tags and counts. */
static void dps_dump_pending(dps_pendings *all, int64_t *pages, uint16_t *ends, uint32_t *tags, uint8_t *counts) {
    for (int g = 0; g < DPS_GROUPS; g++) {
        pages[g] = all->groups[g].pages;
        for (uint32_t p = 0; p < all->groups[g].pages; p++) {
            const dps_page *page = *dps_page_at(&all->groups[g], p);
            memcpy(ends, page->ends, sizeof page->ends);
            ends += DPS_BUCKETS;
            for (uint32_t i = 0; i < dps_size(page); i++) {
                *tags++ = page->entries[i].tag;
                *counts++ = page->entries[i].count;
            }
        }
    }
}

/* Add the next page of a group, from a dump that has `left` keys more. Returns how many entries it has, -1 without
   memory, -2 if no page is like that. */
static int64_t dps_load_page(
    dps_pendings *all, int g, const uint16_t *ends, const uint32_t *tags, const uint8_t *counts, int64_t left,
    uint32_t pages) {
    dps_group *group = &all->groups[g];
    uint32_t number = group->pages, entries = ends[DPS_BUCKETS - 1], i = 0;
    dps_page *made = NULL;
    if (entries > DPS_PAGE_FULL || entries > left)
        return -2;
    for (int b = 0; b < DPS_BUCKETS; b++) {
        if (ends[b] < i || ends[b] > entries)
            return -2;
        for (uint32_t first = i; i < ends[b]; i++) {
            if (counts[i] == 0 || counts[i] == UINT8_MAX || dps_page_of(tags[i], pages) != number)
                return -2;
            if (i > first && tags[i] <= tags[i - 1])
                return -2;
        }
    }
    if (dps_resize_page(all, &made, dps_room_for(entries)))
        return -1;
    memcpy(made->ends, ends, sizeof made->ends);
    for (i = 0; i < entries; i++) {
        made->entries[i].tag = tags[i];
        made->entries[i].count = counts[i];
    }
    *dps_page_at(group, number) = made;
    group->pages++;
    group->keys += entries;
    all->keys += entries;
    return entries;
}

/* Put a dump of so many pages and keys into what has no pages. 0, -1 or -2 as above. */
static int dps_load_pages(
    dps_pendings *all, const int64_t *pages, const uint16_t *ends, int64_t total, const uint32_t *tags,
    const uint8_t *counts, int64_t keys) {
    for (int g = 0; g < DPS_GROUPS; g++) {
        dps_group *group = &all->groups[g];
        if (pages[g] < 1 || pages[g] > total || pages[g] > INT32_MAX)
            return -2;
        total -= pages[g];
        if (pages[g] > 1) {
            group->more = malloc((size_t)(pages[g] - 1) * sizeof *group->more);
            if (group->more == NULL)
                return -1;
            group->room = (uint32_t)pages[g] - 1;
            all->bytes += dps_block_bytes(group->room * (int64_t)sizeof *group->more);
        }
        for (int64_t p = 0; p < pages[g]; p++) {
            int64_t loaded = dps_load_page(all, g, ends, tags, counts, keys, (uint32_t)pages[g]);
            if (loaded < 0)
                return (int)loaded;
            ends += DPS_BUCKETS;
            tags += loaded;
            counts += loaded;
            keys -= loaded;
        }
    }
    return total || keys ? -2 : 0;
}

/* What a dump of so many pages and keys says; NULL without memory, or if it says nothing possible (`wrong`). */
static dps_pendings *dps_loaded_pending(
    const int64_t *pages, const uint16_t *ends, int64_t total, const uint32_t *tags, const uint8_t *counts,
    int64_t keys, int *wrong) {
    dps_pendings *all = calloc(1, sizeof *all);
    int result;
    *wrong = 0;
    if (all == NULL)
        return NULL;
    all->bytes = dps_block_bytes(sizeof *all);
    result = dps_load_pages(all, pages, ends, total, tags, counts, keys);
    if (result == 0)
        return all;
    *wrong = result == -2;
    dps_free_pendings(all);
    return NULL;
}

#endif
