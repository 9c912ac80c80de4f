/* A file to the device at the speed of the link, with no interpreter in the loop.
 *
 * Reader threads take what order.c says is next, read it into their own part of a ring of page-locked buffers, and queue
 * its copy on their own stream. Before the context exists they touch the ring's pages, and on request read ahead into
 * the page cache; `reflex_upload_start` lets them go. When the last chunk of a group of tensors (a layer) is queued, the
 * group's event is recorded on a stream that waits for every reader's last copy, so one event stands for the whole group.
 *
 * Files are read, never mapped: one that shrinks ends in an error, not in a signal. */
#define _GNU_SOURCE
#include "order.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { HUGE_PAGE = 2 << 20, PAGE = 4096 };
enum answer { READY, NOT_YET, FAILED };

static const char *const driver_names[] = { /* as in struct driver */
    "cuCtxSetCurrent",     "cuMemHostRegister_v2", "cuMemHostUnregister", "cuStreamCreate",
    "cuStreamDestroy_v2",  "cuStreamSynchronize",  "cuStreamWaitEvent",   "cuEventCreate",
    "cuEventDestroy_v2",   "cuEventRecord",        "cuEventSynchronize",  "cuMemcpyHtoDAsync_v2",
};
_Static_assert(sizeof driver_names == sizeof(struct driver), "a name for every function");

void fail(struct upload *u, enum failure failure, int code, const struct chunk *c, const char *attempt) {
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
int record_group(struct upload *u, unsigned group) {
    for (int i = 0; i < u->threads; i++) {
        void *newest = u->readers[i].newest;
        int code = newest ? u->cu.stream_wait_event(u->joined, newest, 0) : 0;
        if (code) return code;
    }
    return u->cu.event_record(u->events[group], u->joined);
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
    if (code) { /* not shown to the readers, who would record the ones that are missing */
        for (unsigned g = 0; g <= u->groups && events[g]; g++) u->cu.event_destroy(events[g]);
        free(events);
        return fail(u, DRIVER_ERROR, code, NULL, "creating the upload's events");
    }
    pthread_mutex_lock(&u->lock);
    u->events = events;
    for (unsigned g = 0; g < u->groups && !code && u->joined; g++)
        if (!u->remaining[g]) code = record_group(u, g); /* there already, or without tensors */
    pthread_mutex_unlock(&u->lock);
    if (code) fail(u, DRIVER_ERROR, code, NULL, "recording a layer's event");
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
