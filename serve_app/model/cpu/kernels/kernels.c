/* The whole library in one compilation unit. Read in this order: vec.h, threads.h, weights.h, blocks.h,
 * amx_tile.h, activations.h, float_tile.h, fixed_tile.h, amx_fixed_tile.h, bf16_tile.h, matmul.h, elementwise.h,
 * experts.h, attention_round.h, amx_attention.h, byte_attention.h, attention.h, layer.h, decoder.h. */
#include "blocks.h"
#include "decoder.h"

/* Whether the system lets this process use all features of the build. Call it before computing
 * anything. */
int64_t build_allowed(void) {
#if defined(BUILD_AMX)
    return tiles_allowed();
#else
    return 1;
#endif
}

/* ops.py fills in these structs and compares their sizes with its own when it loads the library. */
#define SIZE_OF(name) int64_t sizeof_##name(void) { return sizeof(struct name); }
SIZE_OF(panel)
SIZE_OF(weight)
SIZE_OF(layer)
SIZE_OF(decoder)
SIZE_OF(attention)
SIZE_OF(batch)
