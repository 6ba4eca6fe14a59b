/* A pool of threads that share numbered chunks of work.
 *
 * `parallel` returns when every chunk is done. It does not wait for every thread: any awake thread
 * takes the next chunk, so a thread that the system has preempted (other processes use these cores
 * too) costs nothing. The result of a chunk must not depend on the thread that computes it.
 *
 * Idle threads spin briefly, because a step is hundreds of short parallel loops; then they sleep. */
#ifndef SERVE_APP_THREADS_H
#define SERVE_APP_THREADS_H

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>

enum { SPINS = 10000 }; /* 0.1 to 0.5 ms; waking a thread takes 50 us and more on a virtual machine */

typedef void chunk_function(const void *job, int chunk, int thread);

struct pool {
    int num_threads; /* the caller is one of them: thread 0 */
    pthread_t *workers;
    /* generation << 32 | chunks not taken yet. A thread that takes a chunk (by compare and
     * exchange) blocks the caller until it is done, so the job's description below cannot change
     * during the chunk. */
    _Atomic uint64_t ticket;
    _Atomic uint32_t generation; /* changes with every job; idle threads watch it */
    _Atomic int32_t done;        /* chunks finished */
    _Atomic int32_t sleepers;    /* idle threads that need to be woken */
    _Atomic int32_t caller_sleeps;
    _Atomic int32_t stopping;
    chunk_function *function;
    const void *job;
    int32_t num_chunks;
    pthread_mutex_t mutex;
    pthread_cond_t work_came, work_done;
};

struct worker {
    struct pool *pool;
    int thread;
};

static inline void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
}

/* Wait for another thread's result: spin at first, then yield the core. `spins`: waits so far. */
static inline void wait_a_moment(int spins) {
    if (spins < SPINS)
        relax();
    else
        sched_yield();
}

static void take_chunks(struct pool *pool, int thread) {
    uint64_t ticket = atomic_load(&pool->ticket);
    for (;;) {
        const int32_t left = (int32_t)(ticket & 0xffffffff);
        if (left == 0) return;
        if (!atomic_compare_exchange_weak(&pool->ticket, &ticket, ticket - 1)) continue;
        const int32_t num_chunks = pool->num_chunks;
        pool->function(pool->job, num_chunks - left, thread);
        if (atomic_fetch_add(&pool->done, 1) + 1 == num_chunks && atomic_load(&pool->caller_sleeps)) {
            pthread_mutex_lock(&pool->mutex);
            pthread_cond_signal(&pool->work_done);
            pthread_mutex_unlock(&pool->mutex);
        }
        /* Yield the core to waiting threads now, not in the middle of a chunk, for which all
         * threads would wait. The caller does not yield: only it starts the next job. */
        if (thread > 0) sched_yield();
        ticket = atomic_load(&pool->ticket);
    }
}

static void sleep_until_work(struct pool *pool, uint32_t seen) {
    pthread_mutex_lock(&pool->mutex);
    atomic_fetch_add(&pool->sleepers, 1);
    while (atomic_load(&pool->generation) == seen) pthread_cond_wait(&pool->work_came, &pool->mutex);
    atomic_fetch_sub(&pool->sleepers, 1);
    pthread_mutex_unlock(&pool->mutex);
}

static void *worker_main(void *argument) {
    struct worker worker = *(struct worker *)argument;
    struct pool *pool = worker.pool;
    free(argument);
    for (uint32_t seen = 0;;) {
        for (int spin = 0; spin < SPINS && atomic_load(&pool->generation) == seen; spin++) relax();
        if (atomic_load(&pool->generation) == seen) sleep_until_work(pool, seen);
        if (atomic_load(&pool->stopping)) return NULL;
        seen = atomic_load(&pool->generation);
        take_chunks(pool, worker.thread);
    }
}

/* Change the generation and wake sleeping threads. (A thread about to sleep counts itself first,
 * then reads the generation. Here the order is reversed, so one of the two sees the other.) */
static void announce(struct pool *pool) {
    atomic_fetch_add(&pool->generation, 1);
    if (!atomic_load(&pool->sleepers)) return;
    pthread_mutex_lock(&pool->mutex);
    pthread_cond_broadcast(&pool->work_came);
    pthread_mutex_unlock(&pool->mutex);
}

static void wait_until_done(struct pool *pool, int32_t num_chunks) {
    for (int spin = 0; spin < SPINS; spin++) {
        if (atomic_load(&pool->done) == num_chunks) return;
        relax();
    }
    pthread_mutex_lock(&pool->mutex);
    atomic_store(&pool->caller_sleeps, 1);
    while (atomic_load(&pool->done) != num_chunks) pthread_cond_wait(&pool->work_done, &pool->mutex);
    atomic_store(&pool->caller_sleeps, 0);
    pthread_mutex_unlock(&pool->mutex);
}

static void parallel(struct pool *pool, int num_chunks, chunk_function *function, const void *job) {
    if (num_chunks < 2 || pool->num_threads == 1) {
        for (int chunk = 0; chunk < num_chunks; chunk++) function(job, chunk, 0);
        return;
    }
    pool->function = function;
    pool->job = job;
    pool->num_chunks = num_chunks;
    atomic_store(&pool->done, 0);
    atomic_store(&pool->ticket, ((uint64_t)atomic_load(&pool->generation) << 32) + (uint64_t)num_chunks);
    announce(pool);
    take_chunks(pool, 0);
    wait_until_done(pool, num_chunks);
}

/* A loop over rows with little work each: chunks of consecutive rows. */
struct row_loop {
    chunk_function *function;
    const void *job;
    int rows, chunks;
};

static void row_chunk(const void *argument, int chunk, int thread) {
    const struct row_loop *loop = argument;
    const int end = (int)((int64_t)loop->rows * (chunk + 1) / loop->chunks);
    for (int row = (int)((int64_t)loop->rows * chunk / loop->chunks); row < end; row++)
        loop->function(loop->job, row, thread);
}

static void parallel_rows(struct pool *pool, int rows, chunk_function *function, const void *job) {
    enum { ROWS_FOR_MORE_CHUNKS = 32 }; /* than threads, a multiple so that they end together */
    const int most = pool->num_threads * (rows / pool->num_threads < ROWS_FOR_MORE_CHUNKS ? 1 : 4);
    const struct row_loop loop = {function, job, rows, rows < most ? rows : most};
    parallel(pool, loop.chunks, row_chunk, &loop);
}

void pool_free(struct pool *pool) {
    atomic_store(&pool->stopping, 1);
    announce(pool);
    for (int i = 0; i < pool->num_threads - 1; i++) pthread_join(pool->workers[i], NULL);
    pthread_mutex_destroy(&pool->mutex);
    pthread_cond_destroy(&pool->work_came);
    pthread_cond_destroy(&pool->work_done);
    free(pool->workers);
    free(pool);
}

/* Returns NULL if there is no memory. If the system limits threads, the pool is smaller. */
struct pool *pool_new(int num_threads) {
    struct pool *pool = calloc(1, sizeof *pool);
    if (!pool) return NULL;
    pool->workers = calloc((size_t)num_threads, sizeof *pool->workers);
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_cond_init(&pool->work_came, NULL);
    pthread_cond_init(&pool->work_done, NULL);
    pool->num_threads = 1;
    while (pool->workers && pool->num_threads < num_threads) {
        struct worker *worker = malloc(sizeof *worker);
        if (!worker) break;
        *worker = (struct worker){pool, pool->num_threads};
        if (pthread_create(&pool->workers[pool->num_threads - 1], NULL, worker_main, worker)) {
            free(worker);
            break;
        }
        pool->num_threads++;
    }
    return pool;
}

#endif
