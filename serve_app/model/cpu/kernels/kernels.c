/* The whole library in one compilation unit. Read in this order: vec.h, threads.h, weights.h, matmul.h, elementwise.h,
 * attention.h, layer.h, decoder.h. */
#include "decoder.h"
