"""When an OjaKV basis moves, and what its moves may cost the stored coefficients."""

import pytest
import torch
from methods import tiny_model

from evaluation.subspace_metrics import relative_error
from lowrank_kv.hf.cache.windowed.plan import InitialBasis
from ojakv import Calibration, OjaKVCache, OjaKVConfig, make_plan, online_store
from ojakv.online_store import OnlineStore


def new_store(basis_WR: torch.Tensor, dtype: torch.dtype = torch.float32, **settings) -> OnlineStore:
    config = OjaKVConfig(**{"prior_tokens": 8.0, **settings})
    energy_PR = torch.ones(1, basis_WR.shape[1])
    start = InitialBasis(vectors_PWR=basis_WR[None], energy_PR=energy_PR, quantization=config.integers)
    return online_store.new_store(start, config, head_dim=8, dtype=dtype, name="layer 0 values")


def turning_stream(regimes: int, length: int) -> torch.Tensor:
    """Rows (1, N, 16) from one 4-dimensional subspace after another, with a little noise."""
    generator = torch.Generator().manual_seed(0)
    parts = []
    for _ in range(regimes):
        basis = torch.linalg.qr(torch.randn(16, 4, generator=generator)).Q
        rows = torch.randn(length, 4, generator=generator) @ basis.T
        parts.append(rows + 0.03 * torch.randn(length, 16, generator=generator))
    return torch.cat(parts)[None]


def run(store: OnlineStore, rows: torch.Tensor, period: int) -> float:
    """Mean residual of every batch as it is stored."""
    left = energy = 0.0
    for i, batch in enumerate(rows.split(period, dim=1)):
        store.follow(batch, is_prompt=i == 0)
        left += relative_error(batch[0], store.basis_PWR[0]) * float(batch.square().sum())
        energy += float(batch.square().sum())
        store.append(store.projected(batch))
    return left / energy


@pytest.mark.parametrize(
    ("settings", "most"),
    [({"max_loss": 1.0, "preconditioned": False, "decode_learning_rate": 0.3}, 1.01), ({}, 1.04)],
    ids=["plain steps", "defaults"],
)
def test_triggered_updates_reach_the_same_residual_with_fewer_steps(settings, most):
    rows = turning_stream(3, 1600)
    start = torch.linalg.qr(rows[0, :64].T @ rows[0, :64]).Q[:, :6]
    stores = {update: new_store(start, update=update, **settings) for update in ("periodic", "triggered")}
    residuals = {update: run(store, rows, 32) for update, store in stores.items()}
    assert stores["periodic"].updates == 150 + 1  # two steps on the prompt
    assert stores["triggered"].updates < 0.55 * stores["periodic"].updates
    assert residuals["triggered"] <= most * residuals["periodic"]


def test_a_prompt_ends_the_regret_of_triggered_steps():
    rows = turning_stream(2, 320)
    start = torch.linalg.qr(rows[0, :64].T @ rows[0, :64]).Q[:, :6]
    store = new_store(start, update="triggered", trigger=1e6)
    run(store, rows, 32)
    assert store.trigger.regret > 0
    store.follow(rows[:, :64], is_prompt=True)
    assert store.trigger.regret == 0


@pytest.mark.parametrize("tracker", ["oja", "frequent_directions"])
@torch.no_grad()
def test_a_calibration_of_fewer_tokens_than_directions_serves(tracker):
    """Directions that it has not shown have an energy of zero, from which rounding could take a little."""
    model, generator = tiny_model(), torch.Generator().manual_seed(0)
    calibration = Calibration.from_text(model, torch.randint(1, 97, (1, 24), generator=generator), progress=False)
    plan = make_plan(calibration, OjaKVConfig.preset("ojakv-joint", rate=1.0, tracker=tracker))
    assert min(float(basis.energy_PR.min()) for kv in plan.layers.values() for basis in kv) >= 0
    ids = torch.randint(1, 97, (1, 80), generator=generator)
    assert model(ids, past_key_values=OjaKVCache(model, plan)).logits.isfinite().all()


@pytest.mark.parametrize("tracker", ["oja", "frequent_directions"])
def test_a_rate_of_zero_leaves_the_basis(tracker):
    rows = turning_stream(2, 320)
    start = torch.linalg.qr(torch.randn(16, 6, generator=torch.Generator().manual_seed(4))).Q
    store = new_store(start, tracker=tracker, learning_rate=0.0, decode_learning_rate=0.0)
    run(store, rows, 32)
    assert store.updates == 0
    assert torch.equal(store.basis_PWR[0], start)


def test_refused_steps_are_counted():
    rows = turning_stream(6, 128)
    start = torch.linalg.qr(rows[0, :64].T @ rows[0, :64]).Q[:, :4]
    store = new_store(start, max_loss=0.0)
    run(store, rows, 32)
    assert store.updates + store.guard.num_refused == 24 + 1  # two steps on the prompt
    assert store.guard.num_refused > 0


def test_no_update_loses_more_stored_energy_than_allowed():
    rows = turning_stream(6, 128)
    start = torch.linalg.qr(rows[0, :64].T @ rows[0, :64]).Q[:, :4]
    for max_loss in (0.002, 0.05):
        store = new_store(start, preconditioned=False, decode_learning_rate=0.5, max_loss=max_loss)
        losses = []
        for i, batch in enumerate(rows.split(32, dim=1)):
            before = store.guard.kept_energy
            stored = float(store.coef.rows().square().sum())
            store.follow(batch, is_prompt=i == 0)
            if stored:
                assert float(store.coef.rows().square().sum()) >= (1 - max_loss) * stored * (1 - 1e-5)
                losses.append(1 - store.guard.kept_energy / before)
            store.append(store.projected(batch))
        assert max(losses) > max_loss / 100, "the stream must make updates costly"
        assert max(losses) <= max_loss * (1 + 1e-4)


@pytest.mark.parametrize("scale", [1e-2, 1.0, 1e3], ids=lambda scale: f"scale{scale:g}")
def test_oja_follows_a_subspace_that_turns(scale):
    """Steep spectra, the lesser directions a thousandth of the largest: within 10 % of the best of the last window, with the
    default bound on what stored coefficients may lose."""
    generator = torch.Generator().manual_seed(2)
    before, after = (torch.linalg.qr(torch.randn(16, 16, generator=generator)).Q for _ in range(2))
    spectrum = scale * 2.0 ** -torch.arange(16)
    rows = torch.cat(
        [
            torch.randn(count, 16, generator=generator) * spectrum @ basis.T
            for basis, count in ((before, 640), (after, 3200))
        ]
    )[None]
    stores = {
        "oja": new_store(before[:, :6], update_window=256),
        "all tokens count": new_store(before[:, :6]),
        "fixed": new_store(before[:, :6], tracker="fixed"),
    }
    window = rows[0, -640:]
    energies = torch.linalg.svdvals(window.double()).square()
    best = float(energies[6:].sum() / energies.sum())
    error = {}
    for name, store in stores.items():
        run(store, rows, 32)
        error[name] = relative_error(window, store.basis_PWR[0])
    assert error["oja"] < 1.1 * best
    # Where the first tokens count as much as the last, their leading directions are kept instead.
    assert error["all tokens count"] > 10 * best
    assert error["fixed"] > 100 * best


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("tracker", ["oja", "frequent_directions"])
def test_a_basis_stays_orthonormal_over_a_thousand_updates(tracker, dtype):
    """State is fp32 whatever the model's dtype, and turned coefficients are rounded to that each time."""
    rows = turning_stream(5, 1608).to(dtype).float()
    start = torch.linalg.qr(torch.randn(16, 6, generator=torch.Generator().manual_seed(4))).Q
    store = new_store(start, dtype, tracker=tracker)
    run(store, rows, 8)
    assert store.updates > 1000
    basis = store.basis_PWR[0]
    assert (basis.dtype, store.coef.rows().dtype) == (torch.float32, dtype)
    torch.testing.assert_close(basis.T @ basis, torch.eye(6), atol=1e-5, rtol=0)


def flat_stream() -> tuple[torch.Tensor, torch.Tensor]:
    """Rows (1, N, 16) of one 6-dimensional subspace and then of another, and a basis of the first."""
    generator = torch.Generator().manual_seed(3)
    bases = [torch.linalg.qr(torch.randn(16, 6, generator=generator)).Q for _ in range(2)]
    parts = [torch.randn(n, 6, generator=generator) @ u.T for n, u in zip((1024, 4096), bases, strict=True)]
    rows = torch.cat(parts)
    return (rows + 0.03 * torch.randn(rows.shape, generator=generator))[None], bases[0]


def test_a_sketch_moves_as_far_as_the_bound_lets_it():
    rows, start = flat_stream()
    window = rows[0, -320:]
    energies = torch.linalg.svdvals(window.double()).square()
    best = float(energies[6:].sum() / energies.sum())
    errors = []
    for max_loss in (0.01, 1.0):
        store = new_store(start, tracker="frequent_directions", max_loss=max_loss)
        run(store, rows, 32)
        errors.append(relative_error(window, store.basis_PWR[0]))
    assert errors[0] < 1.1 * errors[1]
    # The sketch knows the first 1,024 rows, too.
    assert errors[0] < 2 * best


def test_a_sketch_is_followed_once_however_many_steps_a_prompt_takes():
    rows, start = flat_stream()
    store = new_store(start, tracker="frequent_directions", prompt_steps=3)
    store.follow(rows[:, :512], is_prompt=True)
    assert store.updates == 1


def slowly_turning_stream(angle: float, length: int) -> torch.Tensor:
    """Rows (1, N, 16) of a 4-dimensional subspace whose directions turn by `angle` altogether."""
    generator = torch.Generator().manual_seed(7)
    turn = torch.linspace(0, angle, length)[:, None]
    frame = torch.linalg.qr(torch.randn(16, 16, generator=generator)).Q
    near = torch.randn(length, 4, generator=generator)
    rows = (near * turn.cos()) @ frame[:4] + (near * turn.sin()) @ frame[4:8]
    return (rows + 0.01 * torch.randn(length, 16, generator=generator))[None]


def true_drift(store: OnlineStore, stored_PNW: torch.Tensor) -> float:
    """‖now − when stored‖ / ‖now‖ of all rows of a store."""
    now_PNW = held_rows(store)
    return float((now_PNW - stored_PNW).norm() / now_PNW.norm())


def filled_by(
    rows: torch.Tensor, *, dtype: torch.dtype = torch.float32, period: int = 32, **settings
) -> tuple[OnlineStore, float]:
    """A store that has followed the rows, and how far what it stored truly is from what it was."""
    start = torch.linalg.qr(rows[0, :64].T @ rows[0, :64]).Q[:, :4]
    store, stored = new_store(start, dtype, **settings), []
    for i, batch in enumerate(rows.split(period, dim=1)):
        store.follow(batch, is_prompt=i == 0)
        store.append(store.projected(batch))
        stored.append(held_rows(store)[:, -batch.shape[1] :])
    return store, true_drift(store, torch.cat(stored, dim=1))


@pytest.mark.parametrize(
    "settings", [{}, {"update_window": 256}, {"preconditioned": False, "decode_learning_rate": 0.1}]
)
def test_rows_drift_no_further_than_the_bound_says(settings):
    """Where a subspace turns slowly, updates that lose next to nothing each still carry the first rows away."""
    store, drift = filled_by(slowly_turning_stream(1.57, 3200), **settings)
    assert store.guard.kept_energy > 0.9
    assert 0.05 < drift <= store.drift()


def test_many_turns_too_small_for_fp32_add_up():
    rows = slowly_turning_stream(0.3, 8192)
    store, drift = filled_by(rows, period=8)
    assert 0.02 < drift <= store.drift()
    store, drift = filled_by(rows, period=8, max_drift=0.02)
    assert store.guard.num_refused
    assert drift <= store.drift() <= 0.02 * (1 + 1e-4)


def test_directions_that_change_places_move_no_row():
    """Sketched directions do so within a subspace that stands still. Rows are not rounded anew for that."""
    rows = slowly_turning_stream(0.0, 800)
    store, drift = filled_by(rows, dtype=torch.bfloat16, period=1, tracker="frequent_directions")
    assert store.updates > 500
    assert drift <= min(store.drift(), 0.01)


def test_rounding_to_half_precision_is_drift():
    """Large steps turn coefficients, which are rounded each time."""
    rows = slowly_turning_stream(1.57, 800)
    settings = {"preconditioned": False, "decode_learning_rate": 3.0, "max_loss": 1.0}
    store, drift = filled_by(rows, dtype=torch.bfloat16, period=32, **settings)
    assert 0.01 < drift <= store.drift()


def test_rows_that_are_gone_have_not_drifted():
    rows = slowly_turning_stream(1.57, 640)
    store, _ = filled_by(rows, max_drift=0.5)
    updates = store.updates
    assert store.drift() > 0.1
    store.crop(0)
    assert store.drift() == 0
    store.follow(rows[:, -64:], is_prompt=True)
    assert store.updates == updates + 2


def test_drift_is_bounded_where_it_is_asked_to_be():
    rows = slowly_turning_stream(1.57, 3200)
    free, far = filled_by(rows, update_window=256)
    store, drift = filled_by(rows, update_window=256, max_drift=0.3)
    assert far > 0.6
    assert free.guard.num_refused == 0 < store.guard.num_refused
    assert 0.01 < drift <= store.drift() <= 0.3 * (1 + 1e-4)


@pytest.mark.parametrize("cache_dtype", ["model", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_stored_rows_are_projected_on_the_new_basis(dtype, cache_dtype):
    """An update leaves of every stored row its projection: new coefficients are those of the rebuilt old ones."""
    rows = turning_stream(2, 96)
    start = torch.linalg.qr(rows[0, :64].T @ rows[0, :64]).Q[:, :5]
    store = new_store(start, dtype, cache_dtype=cache_dtype, max_loss=1.0)
    store.append(store.projected(rows[:, :96]))
    old = held_rows(store)
    store.follow(rows[:, 96:], is_prompt=False)
    assert store.updates == 1
    basis = store.basis_PWR
    tolerance = 0.03 if cache_dtype == "int8" else 1e-5 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(held_rows(store), old @ basis @ basis.mT, atol=tolerance, rtol=tolerance)
    assert float((held_rows(store) - old).norm() / old.norm()) > 0.1, "the basis must have turned"


def held_rows(store: OnlineStore) -> torch.Tensor:
    """(P, N, W) as they would be read."""
    coef = store.coef.rows().float()
    return (coef if store.coef_scale_PR is None else coef * store.coef_scale_PR[:, None]) @ store.basis_PWR.mT


@pytest.fixture
def rewrites(monkeypatch) -> list[int]:
    """How many rows each change of basis wrote anew."""
    lengths, change = [], online_store.change_basis

    def counted(coef, *arguments):
        lengths.append(coef.length)
        return change(coef, *arguments)

    monkeypatch.setattr(online_store, "change_basis", counted)
    return lengths


def outlier_stream(length: int) -> torch.Tensor:
    """Rows (1, N, 16) of a turning subspace, whose first channel is a thousand times the others."""
    rows = slowly_turning_stream(1.57, length)
    rows[..., 0] = 1e3 * (1 + 0.1 * torch.randn(length, generator=torch.Generator().manual_seed(8)))
    return rows


@pytest.mark.parametrize("rows", [slowly_turning_stream(1.57, 3200), outlier_stream(3200)], ids=["even", "outlier"])
@pytest.mark.parametrize("cache_dtype", ["int8", "int4"])
@pytest.mark.parametrize("tracker", ["oja", "frequent_directions"])
def test_integers_drift_within_the_bound_and_are_hardly_ever_rounded_again(tracker, cache_dtype, rows, rewrites):
    store, drift = filled_by(rows, tracker=tracker, cache_dtype=cache_dtype)
    assert store.updates > 20
    assert len(rewrites) < 0.03 * store.updates
    assert drift <= store.drift()


@pytest.mark.parametrize("seed", range(12))
def test_the_bound_holds_for_integers_on_any_stream(seed, rewrites):
    """Small and large steps, which leave coefficients as they are and round them anew."""
    generator = torch.Generator().manual_seed(seed)
    bases = [torch.linalg.qr(torch.randn(16, 16, generator=generator)).Q for _ in range(4)]
    spectrum = 3.0 ** -torch.arange(16)
    rows = torch.cat([torch.randn(160, 16, generator=generator) * spectrum @ basis.T for basis in bases])[None]
    settings = {"max_loss": 1.0, "preconditioned": bool(seed % 2), "decode_learning_rate": 0.5 if seed % 2 else 30.0}
    store, drift = filled_by(rows, cache_dtype="int4", period=16, **settings)
    assert len(rewrites) < store.updates
    assert seed % 2 or rewrites, "plain steps must be large"
    assert 0 < drift <= store.drift() * (1 + 1e-4)


def test_integers_keep_what_they_hold_over_many_updates():
    """Rows of a subspace that hardly moves, stored in int4: a hundred updates leave them about as they were stored."""
    rows = slowly_turning_stream(0.05, 3200)
    stores = {of: filled_by(rows, cache_dtype=of, max_loss=0.05) for of in ("model", "int4")}
    assert all(store.updates > 90 for store, _ in stores.values())
    drifts = {of: drift for of, (_, drift) in stores.items()}
    assert drifts["int4"] < drifts["model"] + 0.01
