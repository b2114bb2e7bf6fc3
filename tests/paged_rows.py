"""Layouts of pages, plans and rows that tests of pages share."""

import torch
from hypothesis import strategies as st

from lowrank_kv.stores.arena import PageLayout
from lowrank_kv.stores.bit_plan import UNCODED, WIDTHS, BitPlan
from lowrank_kv.stores.importance_gate import ImportanceGate
from lowrank_kv.stores.quantization import IntegerQuantization
from lowrank_kv.stores.ranked_rows import RankedRows
from lowrank_kv.stores.token_plans import TokenPlans

LEVELS = {width: torch.linspace(-3, 3, 2**width) + 0.01 * width for width in WIDTHS if width != UNCODED}
WIDTH = 32  # 2 KV heads of 16 dims
HEADS, HEAD_DIM = 2, 16
# Plans whose rows take more bytes from class to class; one of them is no class.
CLASSES = {
    1: [(8,) * 4 + (4,) * 8 + (2,) * 5],
    2: [(4,) * 6, (16, 16) + (6,) * 5 + (3,) * 12],
    4: [(2,) * 9, (4,) * 6 + (3,) * 4, (5,) * 10 + (4,) * 9, (16,) * 3 + (8,) * 20 + (1,) * 5],
}
# Rows without a plan of bits: floats and integers, of ranks of their own or all of one.
_RANKS = {"num_coefficients": 30, "granularity": 4, "mean_row_bytes": 60.0, "dtype": torch.float32}
RANKED = {
    "floats": RankedRows(**_RANKS),
    "halves": RankedRows(**{**_RANKS, "dtype": torch.bfloat16, "granularity": 1, "mean_row_bytes": 31.0}),
    "int8": RankedRows(**_RANKS, quantization=IntegerQuantization(bits=8)),
    "int4": RankedRows(**{**_RANKS, "mean_row_bytes": 20.0}, quantization=IntegerQuantization(bits=4, group_size=8)),
    "fixed": RankedRows(**{**_RANKS, "granularity": None}, quantization=IntegerQuantization(bits=4)),
}
FORMS = st.sampled_from([1, 2, 4, *RANKED])  # classes, or the name of rows with ranks
# Of blocks, in tokens, of sinks, and of room beyond the mean.
LAYOUTS = st.tuples(st.sampled_from([32, 64, 128]), st.integers(0, 4), st.sampled_from([0.0, 0.1, 1.0]))


def plan_of(classes: int | str, seed: int = 0) -> BitPlan | TokenPlans | RankedRows:
    """One plan, or several with a gate that looks at a random direction, or rows with ranks."""
    if isinstance(classes, str):
        return RANKED[classes]
    if classes == 1:
        return BitPlan(CLASSES[1][0], LEVELS)
    generator = torch.Generator().manual_seed(seed)
    gate = ImportanceGate(
        linear_C=torch.randn(WIDTH, generator=generator) / WIDTH**0.5,
        square_C=torch.randn(WIDTH, generator=generator) / WIDTH,
        rest_3=torch.tensor([0.1, 0.01, -0.1]),
        leading=WIDTH // 2,
    )
    bounds = torch.linspace(-0.6, 0.6, classes + 1)[1:-1]
    plans = tuple(BitPlan(bits, LEVELS) for bits in CLASSES[classes])
    return TokenPlans(gate=gate, bounds_K=bounds, plans=plans, shares=(1 / classes,) * classes)


def layout_of(
    classes: int | str,
    *,
    block_size: int = 32,
    num_sinks: int = 2,
    margin: float = 0.1,
    itemsize: int = 4,
    head_dim: int = HEAD_DIM,
) -> PageLayout:
    return PageLayout.of(
        plan_of(classes, 0),
        plan_of(classes, 1),
        block_size=block_size,
        num_sinks=num_sinks,
        sink_bytes=HEADS * head_dim * itemsize,
        margin=margin,
    )


def coefficients(count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, WIDTH, generator=generator) * 2.0 ** torch.randint(-1, 2, (count, 1), generator=generator)


def ranks(rows: BitPlan | TokenPlans | RankedRows, count: int, seed: int = 0) -> torch.Tensor | None:
    """Random ones that tokens may ask for; None where rows have none of their own."""
    if not isinstance(rows, RankedRows) or rows.granularity is None:
        return None
    generator = torch.Generator().manual_seed(seed)
    groups = torch.randint(1, -(-rows.num_coefficients // rows.granularity) + 1, (count,), generator=generator)
    return (groups * rows.granularity).clamp(max=rows.num_coefficients)
