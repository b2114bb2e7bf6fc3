"""What a run shows while it goes: a progress bar, TensorBoard, and a line of JSON per step."""

import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from dynakv.objective import RetainRates
from lowrank.atomic import write_text

HEAT_MAP_EVERY = 20
_CELL = 12  # pixels of a heat-map cell


class Reporter:
    """Reports of one run; on all processes but the first it does nothing.

    Args:
        directory: `tensorboard/` and `metrics.jsonl` are written here.
        steps: of the whole run. start: steps already done when resuming.
        tokens_per_step: of all processes together.
        every: steps between rows.
        enabled: false on all processes but the first.
    """

    def __init__(self, directory: Path, *, steps: int, start: int, tokens_per_step: int, every: int, enabled: bool):
        self.every, self.tokens_per_step, self.enabled = every, tokens_per_step, enabled
        self.started, self.first = time.monotonic(), start
        self.metrics = directory / "metrics.jsonl"
        if enabled:
            directory.mkdir(parents=True, exist_ok=True)
            _forget_rows_after(self.metrics, start)
            self.bar = tqdm(total=steps, initial=start, desc="training", unit="step", dynamic_ncols=True)
            self.writer = SummaryWriter(str(directory / "tensorboard"), purge_step=start)

    def step(self, step: int, values: dict[str, float], rates: RetainRates) -> None:
        """Report the end of step number `step`, counted from 1."""
        if not self.enabled:
            return
        elapsed = time.monotonic() - self.started
        values = {**values, "tokens_per_second": (step - self.first) * self.tokens_per_step / elapsed}
        self.bar.set_postfix_str(
            "loss {loss:.3f} CE {cross_entropy:.3f} soft {soft_rate:.3f} hard {hard_rate:.3f} α {alpha:.2f} "
            "{tokens_per_second:.0f} tok/s".format(**values)
        )
        self.bar.update(1)
        if step % self.every == 0:
            for name, value in values.items():
                self.writer.add_scalar(f"train/{name}", value, step)
            keys, layers_values = rates.hard_L2.float().mean(dim=0).tolist()
            self.writer.add_scalar("rate/keys", keys, step)
            self.writer.add_scalar("rate/values", layers_values, step)
            with open(self.metrics, "a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, **values}) + "\n")
        if step % HEAT_MAP_EVERY == 0 or step == self.bar.total:
            self.writer.add_image("rate/layers_by_keys_values", heat_map(rates.hard_L2), step)

    def note(self, name: str, values: dict[str, Any], step: int) -> None:
        """Report values measured once."""
        if not self.enabled:
            return
        for key, value in values.items():
            if isinstance(value, int | float):
                self.writer.add_scalar(f"{name}/{key}", value, step)
        self.bar.write(f"{name}: " + ", ".join(f"{key} {value:.4g}" for key, value in values.items()))

    def close(self) -> None:
        if self.enabled:
            self.bar.close()
            self.writer.close()


def _forget_rows_after(path: Path, step: int) -> None:
    """Drop rows of steps that a resumed run is about to repeat."""
    if path.exists():
        rows = path.read_text(encoding="utf-8").splitlines(keepends=True)
        write_text(path, "".join(row for row in rows if json.loads(row)["step"] <= step))


def heat_map(rate_L2: Tensor) -> Tensor:
    """Layers downwards, keys then values across, darker red where more is kept (Figure 5): (3, H, W) in [0, 1]."""
    cells = rate_L2.detach().float().cpu().clamp(0, 1)
    cells = cells.repeat_interleave(_CELL, dim=0).repeat_interleave(4 * _CELL, dim=1)
    return torch.stack([1 - 0.4 * cells, 1 - cells, 1 - cells])
