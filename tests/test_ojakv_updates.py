"""When an OjaKV basis moves, and what its moves may cost the stored coefficients."""

import torch

from lowrank.metrics import relative_error
from ojakv import OjaKVConfig
from ojakv.plan import SideBasis
from ojakv.side import OnlineSide


def new_side(basis_WR: torch.Tensor, **settings) -> OnlineSide:
    start = SideBasis(vectors_PWR=basis_WR[None], energy_PR=torch.ones(1, basis_WR.shape[1]))
    config = OjaKVConfig(**{"prior_tokens": 8.0, **settings})
    return OnlineSide(start, config, head_dim=8, dtype=torch.float32, name="layer 0 values")


def turning_stream(regimes: int, length: int) -> torch.Tensor:
    """Rows (1, N, 16) from one 4-dimensional subspace after another, with a little noise."""
    generator = torch.Generator().manual_seed(0)
    parts = []
    for _ in range(regimes):
        basis = torch.linalg.qr(torch.randn(16, 4, generator=generator)).Q
        rows = torch.randn(length, 4, generator=generator) @ basis.T
        parts.append(rows + 0.03 * torch.randn(length, 16, generator=generator))
    return torch.cat(parts)[None]


def run(side: OnlineSide, rows: torch.Tensor, period: int) -> float:
    """Mean residual of every batch as it is stored."""
    left = energy = 0.0
    for i, batch in enumerate(rows.split(period, dim=1)):
        side.follow(batch, is_prompt=i == 0)
        left += relative_error(batch[0], side.tracker.vectors_PWR[0]) * float(batch.square().sum())
        energy += float(batch.square().sum())
        side.store(side.projected(batch))
    return left / energy


def test_triggered_updates_reach_the_same_residual_with_fewer_steps():
    rows = turning_stream(3, 1600)
    start = torch.linalg.qr(rows[0, :64].T @ rows[0, :64]).Q[:, :6]
    settings = {
        "max_loss": 1.0,
        "update_period": 32,
        "preconditioned": False,
        "decode_learning_rate": 0.3,
    }
    sides = {update: new_side(start, update=update, **settings) for update in ("periodic", "triggered")}
    residuals = {update: run(side, rows, 32) for update, side in sides.items()}
    assert sides["periodic"].updates == 150 + 1  # two steps on the prompt
    assert sides["triggered"].updates < 0.55 * sides["periodic"].updates
    assert residuals["triggered"] <= 1.01 * residuals["periodic"]


def test_no_update_loses_more_stored_energy_than_allowed():
    rows = turning_stream(6, 128)
    start = torch.linalg.qr(rows[0, :64].T @ rows[0, :64]).Q[:, :4]
    for max_loss in (0.002, 0.05):
        side = new_side(start, preconditioned=False, decode_learning_rate=0.5, max_loss=max_loss)
        losses = []
        for i, batch in enumerate(rows.split(32, dim=1)):
            before = side.kept_energy
            stored = float(side.coef.rows().square().sum())
            side.follow(batch, is_prompt=i == 0)
            if stored:
                assert float(side.coef.rows().square().sum()) >= (1 - max_loss) * stored * (1 - 1e-5)
                losses.append(1 - side.kept_energy / before)
            side.store(side.projected(batch))
        assert max(losses) > max_loss / 100, "the stream must make updates costly"
        assert max(losses) <= max_loss * (1 + 1e-4)
