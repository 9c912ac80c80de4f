/* What the threads of upload.c copy next, and which groups of tensors are under way.
 *
 * Chunks come in execution order. Who starts before that is known begins with the file in its own order
 * (reflex_upload_whole), of which nothing is copied twice later.
 *
 * Tensors of experts come behind everything else, as slabs, one an expert. They can be held back, and some of them be
 * asked for before all others: readers take several in one turn, neighbours or not. What was asked for is a group of
 * its own, behind the others. */
#define _GNU_SOURCE
#include "order.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* One chunk or slab of these groups is queued. Called with the lock held. */
static int count_down(struct upload *u, unsigned first, unsigned last) {
    for (unsigned group = first; group <= last; group++) {
        if (u->remaining[group] == 1 && u->events) {
            int code = record_group(u, group);
            if (code) return code;
            pthread_cond_broadcast(&u->changed);
        }
        /* Counted down only now: who waits for zero may rely on the event. */
        u->remaining[group]--;
    }
    return 0;
}

static size_t cell_of(const struct upload *u, const struct chunk *c) { return c->offset / u->chunk_size; }

static int is_whole(const struct upload *u, const struct chunk *c) {
    return u->whole && c >= u->whole && c <= u->whole + cell_of(u, c);
}

/* Called with the lock held. */
static int mark_chunk(struct upload *u, const struct chunk *c) {
    if (!is_whole(u, c)) return count_down(u, c->first, c->last);
    size_t cell = cell_of(u, c);
    int code = 0;
    u->cells[cell] = QUEUED;
    for (size_t i = 0; u->chunks != u->whole && i < u->count && !code; i++)
        if (cell_of(u, &u->chunks[i]) == cell) code = count_down(u, u->chunks[i].first, u->chunks[i].last);
    return code;
}

/* Called with the lock held. */
static int mark_slabs(struct upload *u, const struct piece *p) {
    int code = 0;
    for (size_t i = p->slab; i < p->slab + p->slabs && !code; i++) {
        int is_wanted = u->slab_states[i] & WANTED;
        u->slab_states[i] = QUEUED;
        code = count_down(u, u->slabs[i].first, u->slabs[i].last);
        if (is_wanted && !code) code = count_down(u, u->groups, u->groups);
    }
    return code;
}

int mark_queued(struct upload *u, struct reader *r, const struct turn *t, void *event) {
    int code = 0;
    pthread_mutex_lock(&u->lock);
    r->newest = event;
    if (t->chunk) code = mark_chunk(u, t->chunk);
    for (int i = 0; !t->chunk && i < t->count && !code; i++) code = mark_slabs(u, &t->pieces[i]);
    pthread_mutex_unlock(&u->lock);
    return code;
}

/* Into the turn: slabs from `*at` on that are in this state, as many as a buffer and `most` allow. How many were taken.
 * Called with the lock held. */
static size_t take_slabs(struct upload *u, size_t *at, size_t end, int state, size_t most, struct turn *t) {
    size_t room = u->chunk_size, taken = 0;
    for (; *at < end && taken < most; ++*at) {
        const struct chunk *slab = &u->slabs[*at];
        if (u->slab_states[*at] != state) continue;
        struct piece *last = t->count ? &t->pieces[t->count - 1] : NULL;
        int follows = last && last->slab + last->slabs == *at && last->bytes.fd == slab->fd &&
                      last->bytes.offset + last->bytes.size == slab->offset &&
                      last->bytes.place + last->bytes.size == slab->place;
        if (slab->size > room || (!follows && t->count == MAX_PIECES)) break;
        if (follows) {
            last->bytes.size += slab->size;
            last->slabs++;
        } else {
            t->pieces[t->count++] = (struct piece){*slab, *at, 1};
        }
        u->slab_states[*at] = TAKEN | (state & WANTED);
        room -= slab->size;
        taken++;
    }
    return taken;
}

/* The next chunk to copy, if there is one. What a whole cell already brings is not copied again. Called with the lock
 * held. */
static void take_chunk(struct upload *u, struct turn *t) {
    while (!t->count && u->next < u->count) {
        const struct chunk *c = &u->chunks[u->next++];
        unsigned char *cell = u->cells ? &u->cells[cell_of(u, c)] : NULL;
        if (cell && *cell != FREE) continue;
        if (u->chunks == u->whole) *cell = TAKEN;
        t->chunk = c;
        t->pieces[t->count++] = (struct piece){.bytes = *c};
    }
}

/* What to copy next; 0 when there is nothing left. Waits while slabs are held back. */
int claim(struct upload *u, struct turn *t) {
    *t = (struct turn){0};
    pthread_mutex_lock(&u->lock);
    while (!t->count && !u->stop) {
        /* What is asked for is waited for: every reader gets its share. */
        size_t share = (u->urgent_free + (size_t)u->threads - 1) / (size_t)u->threads;
        if (u->urgent_free)
            u->urgent_free -= take_slabs(u, &u->next_urgent, u->urgent_end, FREE | WANTED, share, t);
        else if (u->next < u->count)
            take_chunk(u, t);
        else if (u->next_slab == u->slab_count)
            break;
        else if (u->is_held)
            pthread_cond_wait(&u->changed, &u->lock);
        else
            take_slabs(u, &u->next_slab, u->slab_count, FREE, SIZE_MAX, t);
    }
    pthread_mutex_unlock(&u->lock);
    return t->count;
}

/* The next chunk or slab to read ahead, or NULL when there is nothing to do but to wait. Called with the lock held. */
const struct chunk *claim_ahead(struct upload *u) {
    size_t next = u->ahead;
    if (!u->reading_ahead || next == u->count + u->slab_count) return NULL;
    u->ahead++;
    return next < u->count ? &u->chunks[next] : &u->slabs[next - u->count];
}

/* The whole file, in its own order and at its own offsets, until somebody knows a better order. 0 without memory. */
int reflex_upload_whole(struct upload *u, int fd, uint64_t size, int read_it_ahead) {
    size_t count = (size_t)((size + u->chunk_size - 1) / u->chunk_size);
    struct chunk *whole = calloc(count + 1, sizeof *whole);
    unsigned char *cells = calloc(count + 1, 1);
    if (!whole || !cells) {
        free(whole);
        free(cells);
        return 0;
    }
    for (size_t i = 0; i < count; i++) {
        uint64_t at = i * u->chunk_size, left = size - at;
        whole[i] = (struct chunk){.fd = fd, .offset = at, .place = at, .size = left < u->chunk_size ? left : u->chunk_size};
    }
    pthread_mutex_lock(&u->lock);
    u->chunks = u->whole = whole;
    u->cells = cells;
    u->count = count;
    u->reading_ahead = read_it_ahead;
    pthread_cond_broadcast(&u->changed);
    pthread_mutex_unlock(&u->lock);
    return 1;
}

/* How many parts of a slab a buffer holds one by one. */
static size_t parts_of(const struct upload *u, const struct chunk *tensor) {
    uint64_t slab = tensor->size / tensor->slabs;
    return (size_t)((slab + u->chunk_size - 1) / u->chunk_size);
}

/* A tensor's slabs, in order, cut into parts. Returns how many. */
static size_t cut_slabs(const struct upload *u, const struct chunk *tensor, struct chunk *out) {
    size_t parts = parts_of(u, tensor), count = 0;
    uint64_t slab = tensor->size / tensor->slabs, most = parts ? (slab + parts - 1) / parts : 0;
    for (uint64_t start = 0; start < tensor->size; start += slab)
        for (uint64_t at = 0; at < slab; at += most) {
            out[count] = *tensor;
            out[count].offset += start + at;
            out[count].place += start + at;
            out[count++].size = slab - at < most ? slab - at : most;
        }
    return count;
}

/* Whether all cells that a slab lies in are queued. A cell that is still being read does not count: a slab may come
 * twice, one cell's worth a reader at most. */
static int is_there(const struct upload *u, const struct chunk *slab) {
    uint64_t at = slab->offset / u->chunk_size, last = (slab->offset + slab->size - 1) / u->chunk_size;
    for (; u->cells && at <= last; at++)
        if (u->cells[at] != QUEUED) return 0;
    return u->cells != NULL;
}

/* What is to be copied, in `groups` groups, and whether to read it ahead.
 * After reflex_upload_whole they are of that file, at its own offsets, and no chunk crosses a border of its cells.
 * Tensors of experts are of any size and come last. */
EXPORT void reflex_upload_order(struct upload *u, const struct chunk *order, size_t count, unsigned groups,
                                int read_it_ahead) {
    size_t eager = 0, slab_count = 0;
    while (eager < count && !order[eager].slabs) eager++;
    for (size_t i = eager; i < count; i++) slab_count += order[i].slabs * parts_of(u, &order[i]);
    unsigned *remaining = calloc(groups + 1, sizeof *remaining);
    struct chunk *chunks = calloc(count + 1, sizeof *chunks), *slabs = calloc(slab_count + 1, sizeof *slabs);
    unsigned char *states = calloc(slab_count + 1, 1);
    if (!remaining || !chunks || !slabs || !states) {
        free(remaining);
        free(chunks);
        free(slabs);
        free(states);
        return fail(u, READ_ERROR, ENOMEM, NULL, "preparing the upload");
    }
    memcpy(chunks, order, count * sizeof *chunks);
    for (size_t i = eager, at = 0; i < count; i++) at += cut_slabs(u, &order[i], slabs + at);
    pthread_mutex_lock(&u->lock);
    for (size_t i = 0; i < eager; i++) {
        if (u->cells && u->cells[cell_of(u, &chunks[i])] == QUEUED) continue;
        for (unsigned g = chunks[i].first; g <= chunks[i].last; g++) remaining[g]++;
    }
    for (size_t i = 0; i < slab_count; i++) {
        if (is_there(u, &slabs[i]))
            states[i] = QUEUED;
        else
            remaining[slabs[i].first]++;
    }
    u->remaining = remaining;
    u->groups = groups;
    u->chunks = u->order = chunks;
    u->count = eager;
    u->tensors = chunks + eager;
    u->tensor_count = count - eager;
    u->slabs = slabs;
    u->slab_states = states;
    u->slab_count = slab_count;
    u->next = u->ahead = 0;
    u->reading_ahead = read_it_ahead;
    pthread_cond_broadcast(&u->changed);
    pthread_mutex_unlock(&u->lock);
}

/* Whether to keep slabs back that nobody asks for. */
EXPORT void reflex_upload_hold(struct upload *u, int is_held) {
    pthread_mutex_lock(&u->lock);
    u->is_held = is_held;
    pthread_cond_broadcast(&u->changed);
    pthread_mutex_unlock(&u->lock);
}

/* An expert's slab, in its parts, comes first if it is not under way. Called with the lock held. */
static void want(struct upload *u, size_t slab, size_t parts) {
    for (size_t i = slab; i < slab + parts; i++) {
        if (u->slab_states[i] == QUEUED || u->slab_states[i] & WANTED) continue;
        if (u->slab_states[i] == FREE) {
            u->next_urgent = u->urgent_free && u->next_urgent < i ? u->next_urgent : i;
            u->urgent_end = u->urgent_free && u->urgent_end > i ? u->urgent_end : i + 1;
            u->urgent_free++;
        }
        u->slab_states[i] |= WANTED;
        u->remaining[u->groups]++;
    }
}

/* Ask for slabs of the group: `ids` are the experts' numbers, `n_used` in each of so many rows of `width`; what is no
 * number of an expert is passed over. reflex_upload_wait for the group behind the last says when they are under way,
 * and that group's event stands for them. After reflex_upload_events, and not before the last ones asked for are. */
EXPORT void reflex_upload_ask(struct upload *u, unsigned group, const float *ids, size_t rows, size_t n_used,
                              size_t width) {
    int code = 0;
    pthread_mutex_lock(&u->lock);
    for (size_t t = 0, at = 0; t < u->tensor_count; t++) {
        const struct chunk *tensor = &u->tensors[t];
        size_t parts = parts_of(u, tensor), end = at + tensor->slabs * parts;
        for (size_t i = 0; i < rows * n_used && tensor->first == group; i++) {
            float id = ids[i / n_used * width + i % n_used];
            if (id >= 0 && id < (float)tensor->slabs) want(u, at + (size_t)id * parts, parts);
        }
        at = end;
    }
    if (!u->failure && !u->remaining[u->groups]) code = record_group(u, u->groups);
    pthread_cond_broadcast(&u->changed);
    pthread_mutex_unlock(&u->lock);
    if (code) fail(u, DRIVER_ERROR, code, NULL, "recording a layer's event");
}
