"""Which page and row each token has, and of which level each row is: the walk of :func:`lowrank_kv.stores.arena.write_rows`,
in Triton.

The program of a page's first new row walks through all new rows of the page; the others have nothing to do. So nothing
depends on how many pages a call touches, which only the device knows.

Shapes: T new tokens, N of them that a program looks at together, M rows of a page.
"""

import triton
import triton.language as tl

from lowrank_kv.ops.triton.planned_rows import ROWS_BETWEEN_MARKS


@triton.jit
def page_and_row(slot_ptr, position_ptr, t, is_token, BLOCK_SIZE: tl.constexpr, NUM_SINKS: tl.constexpr):
    """The pages and rows of tokens `t`, int64: page −1 where a token has no place, a negative row where it stays exact."""
    slot = tl.load(slot_ptr + t, mask=is_token, other=-1)
    position = tl.load(position_ptr + t, mask=is_token, other=0)
    row = slot % BLOCK_SIZE - tl.where(position < BLOCK_SIZE, NUM_SINKS, 0)
    return tl.where(slot < 0, -1, slot // BLOCK_SIZE), row


@triton.jit
def _is_of_page(slot_ptr, position_ptr, t, is_token, page, BLOCK_SIZE: tl.constexpr, NUM_SINKS: tl.constexpr):
    """Whether tokens have rows in a page, and which."""
    page_N, row_N = page_and_row(slot_ptr, position_ptr, t, is_token, BLOCK_SIZE, NUM_SINKS)
    return (page_N == page) & (row_N >= 0), row_N.to(tl.int32)


@triton.jit
def _noted(noted_ptr, row_M, is_row_M, IS_CLASS: tl.constexpr):
    """The levels of rows, as a page notes them, int32."""
    if IS_CLASS:
        word_M = tl.load(noted_ptr.to(tl.pointer_type(tl.int32)) + row_M // 16, mask=is_row_M, other=0)
        level_M = (word_M >> (row_M % 16 * 2)) & 3
    else:
        rank_M = tl.load(noted_ptr.to(tl.pointer_type(tl.int16)) + row_M, mask=is_row_M, other=0)
        level_M = rank_M.to(tl.int32) & 0xFFFF
    return level_M


@triton.jit
def _note(noted_ptr, row_N, level_N, is_row_N, IS_CLASS: tl.constexpr):
    """Note the levels of rows."""
    if IS_CLASS:
        # Rows share words. Each turns over only bits of its own.
        change_N = _noted(noted_ptr, row_N, is_row_N, IS_CLASS) ^ level_N
        word_ptrs = noted_ptr.to(tl.pointer_type(tl.int32)) + row_N // 16
        tl.atomic_xor(word_ptrs, change_N << (row_N % 16 * 2), mask=is_row_N)
    else:
        rank_ptrs = noted_ptr.to(tl.pointer_type(tl.int16)) + row_N
        tl.store(rank_ptrs, level_N.to(tl.int16), mask=is_row_N)


@triton.jit
def _level_that_fits(size_ptr, asked, room, LEAST: tl.constexpr, GRANULARITY: tl.constexpr):
    """The next cheaper level than `asked`, one above the least, whose rows take no more than `room` bytes; or the least."""
    # Levels are LEAST + i · GRANULARITY; of those below `low` one fits, or it is the least, and none from `high` on.
    low, high = 0, ((asked - 1) // GRANULARITY * GRANULARITY - LEAST) // GRANULARITY + 1
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(size_ptr + LEAST + middle * GRANULARITY) <= room:
            low = middle
        else:
            high = middle
    return LEAST + low * GRANULARITY


@triton.jit(do_not_specialize=["tokens"])
def place_rows(
    page_ptr,
    slot_ptr,
    position_ptr,
    asked_ptr,
    size_ptr,
    start_ptr,
    level_ptr,
    cut_ptr,
    tokens,
    page_stride,
    noted,
    marks,
    first_room,
    room,
    BLOCK_SIZE: tl.constexpr,
    NUM_SINKS: tl.constexpr,
    IS_CLASS: tl.constexpr,
    LEAST: tl.constexpr,
    GRANULARITY: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Where each row starts, in bytes behind the first row of its page, and its level, int32; both only for tokens that have
    rows. Pages note levels and marks, and `cut_ptr` counts rows of a cheaper level than `asked_ptr` says.

    `size_ptr` are the bytes of a row of each level, `noted` and `marks` places in a page, `first_room` and `room` bytes for
    rows in a sequence's first page and in others.
    """
    t = tl.program_id(0)
    page, row = page_and_row(slot_ptr, position_ptr, t, True, BLOCK_SIZE, NUM_SINKS)
    first_row = row.to(tl.int32)
    is_later = (page < 0) | (first_row < 0)
    lane_N = tl.arange(0, BLOCK_N)
    end = t
    while (end > 0) & (is_later == 0):
        n = end - 1 - lane_N
        is_same_N, _ = _is_of_page(slot_ptr, position_ptr, n, n >= 0, page, BLOCK_SIZE, NUM_SINKS)
        is_later = tl.max(is_same_N.to(tl.int32), 0) > 0
        end -= BLOCK_N
    if is_later == 0:
        page_ptr += page * page_stride
        is_first = tl.load(position_ptr + t) < BLOCK_SIZE
        last_row = BLOCK_SIZE - 1 - tl.where(is_first, NUM_SINKS, 0)
        end_of_rows = tl.where(is_first, first_room, room)
        least_bytes = tl.load(size_ptr + LEAST)

        row_M = tl.arange(0, BLOCK_M)
        is_before_M = row_M < first_row
        level_M = _noted(page_ptr + noted, row_M, is_before_M, IS_CLASS)
        start = tl.sum(tl.load(size_ptr + level_M, mask=is_before_M, other=0), 0)
        cut, newest_row, first = 0, first_row - 1, t
        while (first < tokens) & (newest_row < last_row):
            n = first + lane_N
            is_row_N, row_N = _is_of_page(slot_ptr, position_ptr, n, n < tokens, page, BLOCK_SIZE, NUM_SINKS)
            asked_N = tl.load(asked_ptr + n, mask=is_row_N, other=0).to(tl.int32)
            level_N = asked_N
            size_N = tl.load(size_ptr + level_N, mask=is_row_N, other=0)
            start_N = start + tl.cumsum(size_N, 0) - size_N
            # Where a row must end, so that the cheapest of all tokens still to come fit behind it.
            end_N = end_of_rows - (last_row - row_N) * least_bytes
            is_over_N = is_row_N & (level_N > LEAST) & (start_N + size_N > end_N)
            over = tl.min(tl.where(is_over_N, lane_N, BLOCK_N), 0)
            while over < BLOCK_N:  # all before it are as they will be
                is_it_N = lane_N == over
                left = tl.sum(tl.where(is_it_N, end_N - start_N, 0), 0)
                asked = tl.sum(tl.where(is_it_N, level_N, 0), 0)
                level = _level_that_fits(size_ptr, asked, left, LEAST, GRANULARITY)
                level_N = tl.where(is_it_N, level, level_N)
                size_N = tl.where(is_it_N, tl.load(size_ptr + level), size_N)
                start_N = start + tl.cumsum(size_N, 0) - size_N
                is_over_N = is_row_N & (lane_N > over) & (level_N > LEAST) & (start_N + size_N > end_N)
                over = tl.min(tl.where(is_over_N, lane_N, BLOCK_N), 0)
            tl.store(start_ptr + n, start_N, mask=is_row_N)
            tl.store(level_ptr + n, level_N, mask=is_row_N)
            _note(page_ptr + noted, row_N, level_N, is_row_N, IS_CLASS)
            mark_ptrs = (page_ptr + marks).to(tl.pointer_type(tl.int32)) + row_N // ROWS_BETWEEN_MARKS
            tl.store(mark_ptrs, start_N, mask=is_row_N & (row_N % ROWS_BETWEEN_MARKS == 0))
            start += tl.sum(size_N, 0)
            cut += tl.sum((level_N < asked_N).to(tl.int32), 0)
            newest_row = tl.maximum(newest_row, tl.max(tl.where(is_row_N, row_N, -1), 0))
            first += BLOCK_N
        if cut > 0:
            tl.atomic_add(cut_ptr, cut.to(tl.int64))
