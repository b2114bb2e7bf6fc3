/* Exact keys, or values, of tokens. */
#pragma once
#include <stdint.h>

/* Rotated where they are keys; strides in bytes, the dims of a head side by side. */
struct states {
    const uint8_t *start;
    int64_t token_stride, head_stride;
};
