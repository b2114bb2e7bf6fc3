"""The plan of a model's caches, whoever asks for it, with a warning where it does not pay."""

import warnings
from pathlib import Path

from transformers import PreTrainedModel

from lowrank_kv.calibration.calibration import Calibration
from lowrank_kv.hf.cache.windowed.plan import Plan
from lowrank_kv.utils.budget import Budget
from ojakv.basis_plan import make_plan
from ojakv.byte_budget import plan_for_budget
from ojakv.config import OjaKVConfig
from ojakv.planned_bytes import break_even, planned_rate

EXPECTED_TOKENS = 1024


def plan_for_model(
    model: PreTrainedModel,
    config: OjaKVConfig,
    bases: str | Path | Calibration,
    *,
    budget: str | Budget | None = None,
    expected_tokens: int = EXPECTED_TOKENS,
    stacklevel: int,
) -> Plan:
    """The plan that a model's caches share. Warns where a sequence's own bases take more bytes than they save.

    Args:
        config, bases, budget, expected_tokens: as :meth:`ojakv.OjaKVCache.from_model` takes them.
        stacklevel: of the warning, counted from here: 2 is who calls.

    Raises:
        UserError: the calibration is missing or damaged, its model has another shape, or no rate keeps within the budget.
    """
    calibration, itemsize = Calibration.given(bases).for_model(model), model.dtype.itemsize
    if budget is None:
        plan = make_plan(calibration, config)
    else:
        budget = budget if isinstance(budget, Budget) else Budget.parse(budget)
        plan = plan_for_budget(calibration, config, budget, itemsize=itemsize)
    if config.follows_text:
        share = planned_rate(plan, prompt=expected_tokens, tokens=expected_tokens, itemsize=itemsize)
        if share >= 1:
            warnings.warn(
                f"{break_even(plan, itemsize)}, and {share:.2f} times as many at {expected_tokens:,} tokens; unless "
                f"sequences are longer, take a preset whose bases are shared, such as `tokenwise-mixed`",
                stacklevel=stacklevel,
            )
    return plan
