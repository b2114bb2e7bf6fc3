/* The functions of OpenMP's library that the kernels call, by POSIX threads. ThreadSanitizer sees these being started and
 * joined. It does not see how threads of libgomp wait for each other, and would call every two of their regions a race.
 *
 * Threads of one region learn nothing from each other here, as the kernels must not: whatever two of them touch without an
 * atomic operation is a race, however they happened to be scheduled. A region within another has one thread, as there. */
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>

struct team {
    void (*work)(void *);
    void *data;
    unsigned size;
};

struct member {
    struct team *team;
    unsigned number;
    long next, end, chunk; /* of a loop: where this thread's next chunk begins, where the loop ends, and a chunk's length */
};

static _Thread_local struct member *self;

int omp_get_thread_num(void) { return self ? self->number : 0; }

int omp_get_num_threads(void) { return self ? self->team->size : 1; }

static void *run(void *member) {
    struct member *outer = self;
    self = member;
    self->team->work(self->team->data);
    self = outer;
    return NULL;
}

void GOMP_parallel(void (*work)(void *), void *data, unsigned size, unsigned flags) {
    (void)flags;
    if (!size) abort(); /* each region of the kernels says how many threads it is for */
    if (self) size = 1;
    struct team team = {work, data, size};
    struct member *members = calloc(size, sizeof *members);
    pthread_t *threads = calloc(size, sizeof *threads);
    if (!members || !threads) abort();
    for (unsigned i = 0; i < size; i++) {
        members[i] = (struct member){.team = &team, .number = i};
        if (i && pthread_create(threads + i, NULL, run, members + i)) abort();
    }
    run(members);
    for (unsigned i = 1; i < size; i++) pthread_join(threads[i], NULL);
    free(members);
    free(threads);
}

/* The next chunk of a loop that counts up. Threads take turns, so that each has some, however late it starts. */
bool GOMP_loop_nonmonotonic_dynamic_next(long *start, long *end) {
    *start = self->next;
    *end = *start + self->chunk < self->end ? *start + self->chunk : self->end;
    self->next += self->chunk * self->team->size;
    return *start < self->end;
}

bool GOMP_loop_nonmonotonic_dynamic_start(long first, long last, long step, long chunk, long *start, long *end) {
    self->chunk = step * chunk, self->next = first + self->chunk * self->number, self->end = last;
    return GOMP_loop_nonmonotonic_dynamic_next(start, end);
}

void GOMP_loop_end_nowait(void) {}
