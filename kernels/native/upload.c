/* A file to the device at the speed of the link, with no interpreter in the loop.
 *
 * Reader threads take chunks in execution order from a counter, read each into their own part of a ring of page-locked
 * buffers, and queue its copy on their own stream. Before the context exists they touch the ring's pages, and on
 * request read ahead into the page cache; `reflex_upload_start` lets them go. When the last chunk of a group of tensors
 * (a layer) is queued, the group's event is recorded on a stream that waits for every reader's last copy, so one event
 * stands for the whole group.
 *
 * Files are read, never mapped: one that shrinks ends in an error, not in a signal. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
enum { MAX_THREADS = 64, MAX_BUFFERS = 8, HUGE_PAGE = 2 << 20, PAGE = 4096 };
enum state { PREPARING, RUNNING, CANCELLED };
enum failure { NONE, READ_ERROR, FILE_ENDED, DRIVER_ERROR }; /* as upload.py knows them */
enum answer { READY, NOT_YET, FAILED };

/* The driver's functions, in the order in which upload.py passes them. */
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

/* A piece of a file. It belongs to the groups first..last, more than one where it crosses a border. */
struct chunk {
    int32_t fd;
    uint32_t first, last, unused;
    uint64_t offset, size, place; /* in the file; bytes; on the device, counted from the base */
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
    const struct chunk *chunks;
    size_t count;
    uint64_t base;
    unsigned groups, *remaining; /* chunks of a group that are not queued yet; under the lock */
    void **events;               /* one a group */
    atomic_size_t next, ahead;   /* the next chunk to copy, to read ahead */
    atomic_uint_fast64_t queued; /* bytes */
    atomic_int state, stop, reading_ahead;
    int finished; /* readers; under the lock, as all below */
    enum failure failure;
    int code;
    size_t failed_chunk;
    const char *attempt;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct reader readers[MAX_THREADS];
};

static void fail(struct upload *u, enum failure failure, int code, size_t chunk, const char *attempt) {
    pthread_mutex_lock(&u->lock);
    if (u->failure == NONE) {
        u->failure = failure;
        u->code = code;
        u->failed_chunk = chunk;
        u->attempt = attempt;
    }
    u->stop = 1;
    pthread_cond_broadcast(&u->changed);
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

static int mark_queued(struct upload *u, struct reader *r, const struct chunk *c, void *event) {
    int code = 0, complete = 0;
    pthread_mutex_lock(&u->lock);
    r->newest = event;
    for (unsigned group = c->first; group <= c->last && !code; group++) {
        if (u->remaining[group] == 1) {
            code = record_group(u, group);
            complete = 1;
        }
        /* Counted down only now: who waits for zero may rely on the event. */
        if (!code) u->remaining[group]--;
    }
    if (complete) pthread_cond_broadcast(&u->changed);
    pthread_mutex_unlock(&u->lock);
    return code;
}

static void copy_chunks(struct upload *u, struct reader *r) {
    const struct driver *cu = &u->cu;
    int code = cu->set_current(u->context);
    if (code) return fail(u, DRIVER_ERROR, code, 0, "making the device current");
    code = cu->host_register(r->buffers, u->chunk_size * (size_t)u->buffers, 0);
    if (code) return fail(u, DRIVER_ERROR, code, 0, "page-locking the upload's buffers");
    r->registered = 1;
    const unsigned non_blocking = 1, no_timing = 2;
    code = cu->stream_create(&r->stream, non_blocking);
    for (int b = 0; b < u->buffers && !code; b++) code = cu->event_create(&r->events[b], no_timing);
    if (code) return fail(u, DRIVER_ERROR, code, 0, "creating the upload's streams and events");
    for (size_t turn = 0; !u->stop; turn++) {
        size_t i = atomic_fetch_add(&u->next, 1);
        if (i >= u->count) return;
        const struct chunk *c = &u->chunks[i];
        int b = (int)(turn % (size_t)u->buffers);
        char *buffer = r->buffers + (size_t)b * u->chunk_size;
        if (turn >= (size_t)u->buffers && (code = cu->event_synchronize(r->events[b])))
            return fail(u, DRIVER_ERROR, code, i, "waiting for a copy to the device");
        int failure = read_chunk(u, c, buffer);
        if (failure) return fail(u, failure, errno, i, "reading the file");
        if (u->stop) return;
        if ((code = cu->copy(u->base + c->place, buffer, c->size, r->stream)) ||
            (code = cu->event_record(r->events[b], r->stream)))
            return fail(u, DRIVER_ERROR, code, i, "copying to the device");
        atomic_fetch_add(&u->queued, c->size);
        if ((code = mark_queued(u, r, c, r->events[b])))
            return fail(u, DRIVER_ERROR, code, i, "recording a layer's event");
    }
}

/* Read what is not in the page cache yet while there is nothing else to do. Errors are left to the copy. */
static void read_ahead(struct upload *u, struct reader *r) {
    while (u->state == PREPARING && u->reading_ahead) {
        size_t i = atomic_fetch_add(&u->ahead, 1);
        if (i >= u->count || read_chunk(u, &u->chunks[i], r->buffers)) return;
    }
}

static void *reader(void *argument) {
    struct reader *r = argument;
    struct upload *u = r->upload;
    size_t size = u->chunk_size * (size_t)u->buffers;
    for (size_t at = 0; at < size && u->state != CANCELLED; at += PAGE) r->buffers[at] = 0;
    pthread_mutex_lock(&u->lock);
    while (u->state == PREPARING) {
        if (u->reading_ahead && u->ahead < u->count) {
            pthread_mutex_unlock(&u->lock);
            read_ahead(u, r);
            pthread_mutex_lock(&u->lock);
        } else {
            pthread_cond_wait(&u->changed, &u->lock);
        }
    }
    pthread_mutex_unlock(&u->lock);
    if (u->state == RUNNING && u->next < u->count) copy_chunks(u, r);
    int code = r->stream ? u->cu.stream_synchronize(r->stream) : 0;
    if (code) fail(u, DRIVER_ERROR, code, 0, "waiting for the copies to the device");
    pthread_mutex_lock(&u->lock);
    u->finished++;
    pthread_cond_broadcast(&u->changed);
    pthread_mutex_unlock(&u->lock);
    return NULL;
}

EXPORT void reflex_upload_free(struct upload *u);

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

/* What is to be copied, and whether to read it ahead. `chunks` must stay until the upload is freed. */
EXPORT void reflex_upload_order(struct upload *u, const struct chunk *chunks, size_t count, int read_it_ahead) {
    pthread_mutex_lock(&u->lock);
    u->chunks = chunks;
    u->count = count;
    u->reading_ahead = read_it_ahead;
    pthread_cond_broadcast(&u->changed);
    pthread_mutex_unlock(&u->lock);
}

/* Begin copying to `base` in `context`, which is current in the calling thread. A failure shows in the waits. */
EXPORT void reflex_upload_start(struct upload *u, const struct driver *cu, void *context, uint64_t base,
                                unsigned groups) {
    const unsigned non_blocking = 1, no_timing = 2;
    int code = 0;
    u->cu = *cu;
    u->context = context;
    u->base = base;
    u->remaining = calloc(groups + 1, sizeof *u->remaining);
    u->events = calloc(groups + 1, sizeof *u->events);
    if (!u->remaining || !u->events) {
        fail(u, READ_ERROR, ENOMEM, 0, "preparing the upload");
    } else {
        u->groups = groups;
        for (size_t i = 0; i < u->count; i++)
            for (unsigned g = u->chunks[i].first; g <= u->chunks[i].last; g++) u->remaining[g]++;
        code = cu->stream_create(&u->joined, non_blocking);
        for (unsigned g = 0; g < groups && !code; g++) code = cu->event_create(&u->events[g], no_timing);
        for (unsigned g = 0; g < groups && !code; g++)
            if (!u->remaining[g]) code = cu->event_record(u->events[g], u->joined); /* a group without tensors */
        if (code) fail(u, DRIVER_ERROR, code, 0, "creating the upload's events");
    }
    pthread_mutex_lock(&u->lock);
    u->state = code || u->failure ? CANCELLED : RUNNING;
    pthread_cond_broadcast(&u->changed);
    pthread_mutex_unlock(&u->lock);
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
        else if (u->remaining[group] == 0)
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

/* What went wrong first, once a wait has answered FAILED. */
EXPORT int reflex_upload_failure(struct upload *u, int *code, size_t *chunk, const char **attempt) {
    *code = u->code;
    *chunk = u->failed_chunk;
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
    for (unsigned g = 0; g < u->groups; g++)
        if (u->events[g]) u->cu.event_destroy(u->events[g]);
    if (u->joined) {
        u->cu.stream_synchronize(u->joined);
        u->cu.stream_destroy(u->joined);
    }
    munmap(u->mapping, u->mapping_size);
    pthread_cond_destroy(&u->changed);
    pthread_mutex_destroy(&u->lock);
    free(u->remaining);
    free(u->events);
    free(u);
}
