"""Codebooks that need no fitting: levels evenly spaced, each width's a little aside, so that none is another's."""

import torch

from lowrank_kv.stores.bit_plan import UNCODED, WIDTHS

LEVELS = {width: torch.linspace(-3, 3, 2**width) + 0.01 * width for width in WIDTHS if width != UNCODED}
