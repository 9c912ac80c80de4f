/* What upload.c and order.c share: an upload from inside. */
#ifndef REFLEX_ORDER_H
#define REFLEX_ORDER_H

#include <pthread.h>
#include <stdatomic.h>

#include "upload.h"

enum { MAX_THREADS = 64, MAX_BUFFERS = 8, MAX_PIECES = 16 };
enum state { PREPARING, RUNNING, CANCELLED };
enum failure { NONE, READ_ERROR, FILE_ENDED, DRIVER_ERROR }; /* as copiers.py has them */
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

/* Of upload.c. */
void fail(struct upload *u, enum failure failure, int code, const struct chunk *c, const char *attempt);
int record_group(struct upload *u, unsigned group);

/* Of order.c. */
int claim(struct upload *u, struct turn *t);
const struct chunk *claim_ahead(struct upload *u);
int mark_queued(struct upload *u, struct reader *r, const struct turn *t, void *event);

#endif
