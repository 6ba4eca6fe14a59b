/* AMX's tiles: registers of 16 rows of 64 bytes, and an instruction that multiplies two of them.
 *
 * Activations are the tiles A: 16 rows of 32 inputs in bfloat16. Weights are the tiles B: 16 pairs
 * of inputs of 16 outputs, as in panels of bfloat16. One instruction adds the products of 32
 * inputs to each of the 16 x 16 sums of C, in float, in an order that does not depend on other
 * rows. It takes as long with fewer rows, so tiles always have 16 rows; rows after the end of a
 * batch are multiplied too, and their results ignored. Tiles of bytes have twice as many inputs
 * per row, and their products are integers. */
#ifndef SERVE_APP_AMX_TILE_H
#define SERVE_APP_AMX_TILE_H

#include "vec.h"

enum { TILE_ROWS = 16, TILE_BYTES = 64 };

#if defined(BUILD_AMX)
#include <sys/syscall.h>
#include <unistd.h>

enum { TILES = 1, ROWS_BEYOND = TILE_ROWS - 1 }; /* rows of memory after the last one, which are read too */

/* In assembly, because GCC's intrinsics do not declare that they read and write memory. `stride`:
 * distance between rows in bytes. */
#define TILE_LOAD(tile, from, stride) \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile : : "r"(from), "r"((int64_t)(stride)) : "memory")
#define TILE_STORE(tile, to, stride) \
    __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" : : "r"(to), "r"((int64_t)(stride)) : "memory")
#define TILE_ZERO(tile) __asm__ volatile("tilezero %%tmm" #tile : :)
#define TILE_DOT_BYTES(c, a, b) __asm__ volatile("tdpbsud %%tmm" #b ", %%tmm" #a ", %%tmm" #c : :)
#define TILE_DOT(c, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c : :)

/* Sums of some rows, `line` bytes apart. */
struct sums {
    float *at;
    int64_t line;
};

static inline float *row_of(struct sums sums, int row) { return (float *)((char *)sums.at + row * sums.line); }

/* Whether the system lets this process use tiles (ARCH_REQ_XCOMP_PERM for XFEATURE_XTILEDATA). */
static inline int tiles_allowed(void) { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }

/* Call at the start of a chunk that uses tiles: other code in the thread may have configured other
 * sizes. C are tiles 0 to 3, A 4 and 5, B 6 and 7. */
static inline void begin_tiles(void) {
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } sizes = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        sizes.row_bytes[tile] = TILE_BYTES;
        sizes.rows[tile] = TILE_ROWS;
    }
    __asm__ volatile("ldtilecfg %0" : : "m"(sizes));
}

/* Call at the end of such a chunk: the system saves tiles in use when it preempts a thread. */
static inline void end_tiles(void) { __asm__ volatile("tilerelease" : :); }

#else
enum { TILES = 0, ROWS_BEYOND = 0 };

static inline void begin_tiles(void) {}
static inline void end_tiles(void) {}
#endif

#endif
