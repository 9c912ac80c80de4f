/* A file to the device at the speed of the link, with no interpreter in the loop.
 *
 * Reader threads take chunks in execution order, read each into their own part of a ring of page-locked
 * buffers, and queue its copy on their own stream. Before the context exists they touch the ring's pages, and on
 * request read ahead into the page cache; `reflex_upload_start` lets them go. Who starts before the execution order is
 * known begins with the file in its own order (reflex_upload_whole), of which nothing is copied twice later. When the last chunk of a group of tensors
 * (a layer) is queued, the group's event is recorded on a stream that waits for every reader's last copy, so one event
 * stands for the whole group.
 *
 * Tensors of experts come behind everything else, as slabs, one an expert. They can be held back, and some of them be
 * asked for before all others: readers take several in one turn, neighbours or not. What was asked for is a group of
 * its own, behind the others.
 *
 * Files are read, never mapped: one that shrinks ends in an error, not in a signal. */
#define _GNU_SOURCE
#include "upload.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { MAX_THREADS = 64, MAX_BUFFERS = 8, MAX_PIECES = 16, HUGE_PAGE = 2 << 20, PAGE = 4096 };
enum state { PREPARING, RUNNING, CANCELLED };
enum failure { NONE, READ_ERROR, FILE_ENDED, DRIVER_ERROR }; /* as copiers.py knows them */
enum answer { READY, NOT_YET, FAILED };
enum cell { FREE, TAKEN, QUEUED, WANTED = 4 }; /* the last beside one of the others, and only of slabs */

struct driver {
    int (*set_current)(void *context);
    int (*host_register)(void *address, size_t size, unsigned flags);
    int (*host_unregister)(void *address);
    int (*stream_create)(void **stream, unsigned flags);
    int (*stream_destroy)(void *stream);
    int (*stream_synchronize)(void *stream);
    int (*stream_wait_event)(void *stream, void *event, unsigned flags);
    int (*event_create)(void **event, unsigned flags);
    int (*event_destroy)(void *event);
    int (*event_record)(void *event, void *stream);
    int (*event_synchronize)(void *event);
    int (*copy)(uint64_t to, const void *from, size_t size, void *stream);
};
static const char *const driver_names[] = { /* as in struct driver */
    "cuCtxSetCurrent",     "cuMemHostRegister_v2", "cuMemHostUnregister", "cuStreamCreate",
    "cuStreamDestroy_v2",  "cuStreamSynchronize",  "cuStreamWaitEvent",   "cuEventCreate",
    "cuEventDestroy_v2",   "cuEventRecord",        "cuEventSynchronize",  "cuMemcpyHtoDAsync_v2",
};
_Static_assert(sizeof driver_names == sizeof(struct driver), "a name for every function");

/* What a reader copies in one turn: a chunk, or slabs, those that are neighbours in one piece. */
struct turn {
    const struct chunk *chunk; /* NULL: slabs */
    int count;
    struct piece {
        struct chunk bytes;
        size_t slab, slabs; /* the first, and how many */
    } pieces[MAX_PIECES];
};

struct reader {
    struct upload *upload;
    pthread_t thread;
    char *buffers;
    void *stream, *events[MAX_BUFFERS];
    void *newest; /* the event after its last copy; under the lock */
    int registered;
};

struct upload {
    struct driver cu;
    void *context, *joined; /* the stream that waits for all readers */
    char *ring, *mapping;
    size_t mapping_size, chunk_size;
    int threads, buffers;
    uint64_t base;
    atomic_uint_fast64_t queued; /* bytes */
    atomic_int state, stop;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    /* Under the lock, all below. */
    const struct chunk *chunks; /* `order`, or before it is known `whole` */
    size_t count, next, ahead; /* chunks; the next one to copy, to read ahead */
    struct chunk *slabs;         /* of experts, behind all chunks; larger ones in parts */
    unsigned char *slab_states;  /* an enum cell for each of those */
    const struct chunk *tensors; /* that they are of: the end of `order` */
    size_t tensor_count;
    size_t slab_count, next_slab;
    size_t next_urgent, urgent_end, urgent_free; /* slabs asked for lie there; how many of them nobody took yet */
    int is_held;                                 /* other slabs have to wait */
    int reading_ahead, finished; /* readers that are */
    int64_t touched, locked;     /* CLOCK_MONOTONIC ns: when the last reader had its buffers in memory, and page-locked */
    /* What is asked for is the group behind the last. */
    unsigned groups, *remaining; /* chunks and slabs of a group that are not queued yet */
    void **events;               /* one a group, once reflex_upload_events was called */
    struct chunk *order, *whole; /* in execution order; the file in its own order, a chunk a cell */
    unsigned char *cells;        /* an enum cell for each of those */
    enum failure failure;
    int code;
    struct chunk failed;
    const char *attempt;
    struct reader readers[MAX_THREADS];
};

static void fail(struct upload *u, enum failure failure, int code, const struct chunk *c, const char *attempt) {
    pthread_mutex_lock(&u->lock);
    if (u->failure == NONE) {
        u->failure = failure;
        u->code = code;
        if (c) u->failed = *c;
        u->attempt = attempt;
    }
    u->stop = 1;
    pthread_cond_broadcast(&u->changed);
    pthread_mutex_unlock(&u->lock);
}

static void stamp(struct upload *u, int64_t *latest) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    pthread_mutex_lock(&u->lock);
    *latest = t.tv_sec * 1000000000LL + t.tv_nsec;
    pthread_mutex_unlock(&u->lock);
}

/* 0, or the failure that was reported. */
static int read_chunk(struct upload *u, const struct chunk *c, char *to) {
    for (uint64_t done = 0; done < c->size;) {
        ssize_t n = pread(c->fd, to + done, c->size - done, (off_t)(c->offset + done));
        if (n > 0) {
            done += (uint64_t)n;
        } else if (n == 0) {
            return FILE_ENDED;
        } else if (errno != EINTR) {
            return READ_ERROR;
        }
        if (u->stop) break;
    }
    return NONE;
}

/* Every chunk of the group is queued: its event is recorded after all of them. Called with the lock held. */
static int record_group(struct upload *u, unsigned group) {
    for (int i = 0; i < u->threads; i++) {
        void *newest = u->readers[i].newest;
        int code = newest ? u->cu.stream_wait_event(u->joined, newest, 0) : 0;
        if (code) return code;
    }
    return u->cu.event_record(u->events[group], u->joined);
}

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

static int mark_queued(struct upload *u, struct reader *r, const struct turn *t, void *event) {
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
static int claim(struct upload *u, struct turn *t) {
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

static void copy_chunks(struct upload *u, struct reader *r) {
    const struct driver *cu = &u->cu;
    int code = cu->set_current(u->context);
    if (code) return fail(u, DRIVER_ERROR, code, NULL, "making the device current");
    code = cu->host_register(r->buffers, u->chunk_size * (size_t)u->buffers, 0);
    if (code) return fail(u, DRIVER_ERROR, code, NULL, "page-locking the upload's buffers");
    r->registered = 1;
    stamp(u, &u->locked);
    const unsigned non_blocking = 1, no_timing = 2;
    code = cu->stream_create(&r->stream, non_blocking);
    for (int b = 0; b < u->buffers && !code; b++) code = cu->event_create(&r->events[b], no_timing);
    if (code) return fail(u, DRIVER_ERROR, code, NULL, "creating the upload's streams and events");
    struct turn t;
    for (size_t turn = 0; claim(u, &t); turn++) {
        int b = (int)(turn % (size_t)u->buffers);
        char *buffer = r->buffers + (size_t)b * u->chunk_size;
        if (turn >= (size_t)u->buffers && (code = cu->event_synchronize(r->events[b])))
            return fail(u, DRIVER_ERROR, code, &t.pieces[0].bytes, "waiting for a copy to the device");
        for (int i = 0; i < t.count; i++) {
            const struct chunk *c = &t.pieces[i].bytes;
            int failure = read_chunk(u, c, buffer);
            if (failure) return fail(u, failure, errno, c, "reading the file");
            if (u->stop) return;
            if ((code = cu->copy(u->base + c->place, buffer, c->size, r->stream)))
                return fail(u, DRIVER_ERROR, code, c, "copying to the device");
            atomic_fetch_add(&u->queued, c->size);
            buffer += c->size;
        }
        if ((code = cu->event_record(r->events[b], r->stream)))
            return fail(u, DRIVER_ERROR, code, &t.pieces[0].bytes, "copying to the device");
        if ((code = mark_queued(u, r, &t, r->events[b])))
            return fail(u, DRIVER_ERROR, code, &t.pieces[0].bytes, "recording a layer's event");
    }
}

/* The next chunk or slab to read ahead, or NULL when there is nothing to do but to wait. Called with the lock held. */
static const struct chunk *claim_ahead(struct upload *u) {
    size_t next = u->ahead;
    if (!u->reading_ahead || next == u->count + u->slab_count) return NULL;
    u->ahead++;
    return next < u->count ? &u->chunks[next] : &u->slabs[next - u->count];
}

static void *reader(void *argument) {
    struct reader *r = argument;
    struct upload *u = r->upload;
    size_t size = u->chunk_size * (size_t)u->buffers;
    for (size_t at = 0; at < size && u->state != CANCELLED; at += PAGE) r->buffers[at] = 0;
    stamp(u, &u->touched);
    pthread_mutex_lock(&u->lock);
    while (u->state == PREPARING) {
        const struct chunk *c = claim_ahead(u);
        if (c) { /* into the page cache; errors are left to the copy */
            pthread_mutex_unlock(&u->lock);
            read_chunk(u, c, r->buffers);
            pthread_mutex_lock(&u->lock);
        } else {
            pthread_cond_wait(&u->changed, &u->lock);
        }
    }
    pthread_mutex_unlock(&u->lock);
    if (u->state == RUNNING) copy_chunks(u, r);
    int code = r->stream ? u->cu.stream_synchronize(r->stream) : 0;
    if (code) fail(u, DRIVER_ERROR, code, NULL, "waiting for the copies to the device");
    pthread_mutex_lock(&u->lock);
    u->finished++;
    pthread_cond_broadcast(&u->changed);
    pthread_mutex_unlock(&u->lock);
    return NULL;
}

/* A ring of threads x buffers chunks; the threads start to touch its pages. NULL without memory or threads. */
EXPORT struct upload *reflex_upload_new(int threads, int buffers, size_t chunk_size) {
    if (threads < 1 || threads > MAX_THREADS || buffers < 1 || buffers > MAX_BUFFERS) return NULL;
    struct upload *u = calloc(1, sizeof *u);
    if (!u) return NULL;
    size_t part = (size_t)buffers * chunk_size, size = part * (size_t)threads;
    u->chunk_size = chunk_size;
    u->buffers = buffers;
    u->mapping_size = size + HUGE_PAGE;
    u->mapping = mmap(NULL, u->mapping_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (u->mapping == MAP_FAILED) {
        free(u);
        return NULL;
    }
    u->ring = (char *)(((uintptr_t)u->mapping + HUGE_PAGE - 1) & ~(uintptr_t)(HUGE_PAGE - 1));
    madvise(u->ring, size, MADV_HUGEPAGE);
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&u->changed, &monotonic);
    pthread_condattr_destroy(&monotonic);
    pthread_mutex_init(&u->lock, NULL);
    for (; u->threads < threads; u->threads++) {
        struct reader *r = &u->readers[u->threads];
        r->upload = u;
        r->buffers = u->ring + (size_t)u->threads * part;
        if (pthread_create(&r->thread, NULL, reader, r)) break;
    }
    if (u->threads == 0) {
        reflex_upload_free(u);
        return NULL;
    }
    return u;
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

static int load_driver(struct upload *u, const char *library) {
    const int not_found = 500; /* CUDA_ERROR_NOT_FOUND */
    void *handle = dlopen(library, RTLD_NOW), *found[sizeof driver_names / sizeof *driver_names] = {0};
    for (size_t i = 0; handle && i < sizeof found / sizeof *found; i++)
        if (!(found[i] = dlsym(handle, driver_names[i]))) return not_found;
    memcpy(&u->cu, found, sizeof found);
    return handle ? 0 : not_found;
}

/* Begin copying to `base` in `context`, which is current in the calling thread. A failure shows in the waits. */
EXPORT void reflex_upload_start(struct upload *u, const char *library, void *context, uint64_t base) {
    const unsigned non_blocking = 1;
    int code = load_driver(u, library);
    u->context = context;
    u->base = base;
    if (code)
        fail(u, DRIVER_ERROR, code, NULL, "looking up the driver's functions");
    else if ((code = u->cu.stream_create(&u->joined, non_blocking)))
        fail(u, DRIVER_ERROR, code, NULL, "creating the upload's stream");
    pthread_mutex_lock(&u->lock);
    u->state = u->failure ? CANCELLED : RUNNING;
    pthread_cond_broadcast(&u->changed);
    pthread_mutex_unlock(&u->lock);
}

/* An event for every group, in the context that is current in the calling thread; after order and start. */
EXPORT void reflex_upload_events(struct upload *u) {
    const unsigned no_timing = 2;
    int code = 0;
    void **events = calloc(u->groups + 1, sizeof *events);
    if (!events) return fail(u, READ_ERROR, ENOMEM, NULL, "preparing the upload");
    for (unsigned g = 0; g <= u->groups && !code; g++) code = u->cu.event_create(&events[g], no_timing);
    pthread_mutex_lock(&u->lock);
    u->events = events;
    for (unsigned g = 0; g < u->groups && !code && u->joined; g++)
        if (!u->remaining[g]) code = record_group(u, g); /* there already, or without tensors */
    pthread_mutex_unlock(&u->lock);
    if (code) fail(u, DRIVER_ERROR, code, NULL, "creating the upload's events");
}

/* Wait with the lock held until something changes; 0 after `deadline`. */
static int wait_until(struct upload *u, const struct timespec *deadline) {
    return pthread_cond_timedwait(&u->changed, &u->lock, deadline) != ETIMEDOUT;
}

static struct timespec in_milliseconds(int milliseconds) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    t.tv_sec += milliseconds / 1000;
    t.tv_nsec += milliseconds % 1000 * 1000000L;
    if (t.tv_nsec >= 1000000000L) {
        t.tv_sec++;
        t.tv_nsec -= 1000000000L;
    }
    return t;
}

/* Wait until the group's event is recorded. */
EXPORT int reflex_upload_wait(struct upload *u, unsigned group, int milliseconds) {
    struct timespec deadline = in_milliseconds(milliseconds);
    pthread_mutex_lock(&u->lock);
    int answer = NOT_YET;
    do {
        if (u->failure)
            answer = FAILED;
        else if (u->events && u->remaining[group] == 0)
            answer = READY;
    } while (answer == NOT_YET && wait_until(u, &deadline));
    pthread_mutex_unlock(&u->lock);
    return answer;
}

/* Wait until every byte is on the device and the threads have ended. */
EXPORT int reflex_upload_join(struct upload *u, int milliseconds) {
    struct timespec deadline = in_milliseconds(milliseconds);
    pthread_mutex_lock(&u->lock);
    int answer = NOT_YET;
    do {
        if (u->finished == u->threads) answer = u->failure ? FAILED : READY;
    } while (answer == NOT_YET && wait_until(u, &deadline));
    pthread_mutex_unlock(&u->lock);
    return answer;
}

EXPORT void *reflex_upload_event(struct upload *u, unsigned group) { return u->events[group]; }

EXPORT uint64_t reflex_upload_queued(struct upload *u) { return u->queued; }

/* When the whole ring was in memory, and page-locked; 0 where that has not come yet. */
EXPORT void reflex_upload_ring(struct upload *u, int64_t out[2]) {
    pthread_mutex_lock(&u->lock);
    out[0] = u->touched;
    out[1] = u->locked;
    pthread_mutex_unlock(&u->lock);
}

/* What went wrong first, once a wait has answered FAILED. */
EXPORT int reflex_upload_failure(struct upload *u, int *code, struct chunk *chunk, const char **attempt) {
    *code = u->code;
    *chunk = u->failed;
    *attempt = u->attempt;
    return u->failure;
}

/* Stop, wait for the threads, and give everything back. The context, if one was given, is current in this thread. */
EXPORT void reflex_upload_free(struct upload *u) {
    pthread_mutex_lock(&u->lock);
    if (u->state == PREPARING) u->state = CANCELLED;
    u->stop = 1;
    pthread_cond_broadcast(&u->changed);
    pthread_mutex_unlock(&u->lock);
    for (int i = 0; i < u->threads; i++) pthread_join(u->readers[i].thread, NULL);
    for (int i = 0; i < u->threads; i++) {
        struct reader *r = &u->readers[i];
        for (int b = 0; b < u->buffers; b++)
            if (r->events[b]) u->cu.event_destroy(r->events[b]);
        if (r->stream) u->cu.stream_destroy(r->stream);
        if (r->registered) u->cu.host_unregister(r->buffers);
    }
    for (unsigned g = 0; u->events && g <= u->groups; g++)
        if (u->events[g]) u->cu.event_destroy(u->events[g]);
    if (u->joined) {
        u->cu.stream_synchronize(u->joined);
        u->cu.stream_destroy(u->joined);
    }
    munmap(u->mapping, u->mapping_size);
    pthread_cond_destroy(&u->changed);
    pthread_mutex_destroy(&u->lock);
    if (u->whole) close(u->whole->fd);
    free(u->order);
    free(u->whole);
    free(u->cells);
    free(u->slabs);
    free(u->slab_states);
    free(u->remaining);
    free(u->events);
    free(u);
}
