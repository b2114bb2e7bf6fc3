"""How far a step may go, and when a triggered one is worth its price."""

import math

import pytest
import torch

from lowrank_kv.stores.coefficients import Coefficients
from ojakv.change_of_basis import change_basis, moment
from ojakv.step_guard import MAX_HALVINGS, OUTLIER, StepGuard, move_between
from ojakv.trackers import orthonormal
from ojakv.update_trigger import UpdateTrigger

AXES = torch.eye(4)
OLD_PWR = AXES[:, :2][None]
STORED_PRR = torch.diag(torch.tensor([3.0, 1.0]))[None]  # rows of energy 4


def turned(angle: float) -> torch.Tensor:
    """The old basis with its second direction turned by an angle, away from the stored rows."""
    second = math.cos(angle) * AXES[:, 1] + math.sin(angle) * AXES[:, 2]
    return torch.stack([AXES[:, 0], second], dim=1)[None]


def proposals(angle: float, shares: list[float]):
    def propose(share: float) -> torch.Tensor:
        shares.append(share)
        return turned(share * angle)

    return propose


def test_a_move_costs_what_the_rows_move():
    """In double precision, by the rows themselves."""
    coef = torch.randn(50, 2, generator=torch.Generator().manual_seed(0)).double()
    old, stored = OLD_PWR.double(), (coef.T @ coef)[None]
    rows = coef @ old[0].T
    for angle in (0.01, 0.7):
        new = turned(angle).double()
        move = move_between(old, new, stored, rounding=0.0)
        now = coef if move.step_PRR is None else coef - coef @ move.step_PRR[0]
        assert move.moved == pytest.approx(float((rows - now @ new[0].T).square().sum()))
        assert move.lost == move.price == pytest.approx(move.moved / float(rows.square().sum()))


def test_coefficients_stay_where_a_move_hardly_turns_them_or_rounding_them_costs_more():
    assert move_between(OLD_PWR, turned(0.1), STORED_PRR, rounding=0.0).step_PRR is None
    changed = move_between(OLD_PWR, turned(0.4), STORED_PRR, rounding=0.0)
    torch.testing.assert_close(torch.eye(2) - changed.step_PRR[0], (OLD_PWR.mT @ changed.basis_PWR)[0])
    assert (changed.moved, changed.rounded) == (pytest.approx(math.sin(0.4) ** 2), 0.0)
    stays = move_between(OLD_PWR, turned(0.4), STORED_PRR, rounding=0.01)
    assert stays.step_PRR is None
    assert (stays.moved, stays.rounded) == (pytest.approx(2 - 2 * math.cos(0.4)), 0.0)


@pytest.mark.parametrize("rank", [6, 16])
def test_a_thousand_changes_of_basis_carry_rows_as_exact_projections_do(rank):
    """A basis in fp32 is orthonormal to rounding only, on the same side at every change: rows must not grow by it. At full
    rank the rows stay what they were."""
    generator = torch.Generator().manual_seed(0)
    basis_PWR = torch.linalg.qr(torch.randn(1, 16, rank, generator=generator)).Q
    coef = Coefficients.from_rows(torch.randn(1, 50, rank, generator=generator))
    exact_PNW = first_PNW = coef.rows().double() @ basis_PWR.double().mT
    for _ in range(1000):
        away_PWR = 1e-4 * torch.randn(1, 16, rank, generator=generator)
        new_PWR = orthonormal(basis_PWR + away_PWR, "a step", "take a smaller one")
        move = move_between(basis_PWR, new_PWR, moment(coef), rounding=0.0)
        assert move.step_PRR is not None, "the coefficients must change"
        coef, _ = change_basis(coef, move.step_PRR, coef.length)
        basis_PWR, exact = new_PWR, new_PWR.double()
        exact_PNW = exact_PNW @ exact @ torch.linalg.solve(exact.mT @ exact, exact.mT)
    rows_PNW = coef.rows().double() @ basis_PWR.double().mT
    assert float((rows_PNW - exact_PNW).norm() / exact_PNW.norm()) < 5e-6
    if rank == 16:
        assert float((rows_PNW - first_PNW).norm() / first_PNW.norm()) < 5e-6


def test_an_outlier_does_not_hide_what_other_directions_lose():
    """Of two ordinary directions one turns away; beside them lies one with nearly all of the energy."""
    old_PWR, turned_PWR = AXES[:, :3][None], AXES[:, [0, 1, 3]][None]
    for outlier, price in ((1.0, 1 / 3), (1e6, 1 / (OUTLIER + 2))):
        stored_PRR = torch.diag(torch.tensor([outlier, 1.0, 1.0]))[None]
        move = move_between(old_PWR, turned_PWR, stored_PRR, rounding=0.0)
        assert move.lost == pytest.approx(1 / (outlier + 2))
        assert move.price == pytest.approx(price)
    assert StepGuard(0.005, None).largest_move(old_PWR, lambda share: turned_PWR, stored_PRR, rounding=0.0) is None


def test_a_head_does_not_hide_what_another_loses():
    """The second head's basis turns away from all of its rows; the first one's have a thousand times their norm."""
    old_PWR, new_PWR = (torch.stack([AXES[:, :2], AXES[:, second]]) for second in ([0, 1], [2, 3]))
    stored_PRR = torch.stack([1e6 * torch.eye(2), torch.eye(2)])
    move = move_between(old_PWR, new_PWR, stored_PRR, rounding=0.0)
    assert move.lost == pytest.approx(1e-6, rel=1e-3)
    assert move.price == pytest.approx(1)


def test_an_outlier_does_not_hide_how_far_other_coefficients_turn():
    """Two ordinary directions change places. Rounding the outlier again would cost more than that moves, all in all."""
    stored_PRR = torch.diag(torch.tensor([1e6, 1.0, 1.0]))[None]
    move = move_between(AXES[:, :3][None], AXES[:, [0, 2, 1]][None], stored_PRR, rounding=0.01)
    assert move.step_PRR is not None
    assert (move.moved, move.rounded) == (pytest.approx(0, abs=1e-6), pytest.approx(1e4, rel=1e-3))
    assert move.price == pytest.approx(0.01)


def test_a_step_is_halved_until_it_loses_little_enough():
    guard, shares = StepGuard(0.01, None), []
    move = guard.largest_move(OLD_PWR, proposals(math.pi / 2, shares), STORED_PRR, rounding=0.0)
    assert shares == [1.0, 0.5, 0.25, 0.125]
    # A quarter of the energy lies along the direction that turns; its coefficients stay as they are.
    assert move.step_PRR is None
    assert move.lost == pytest.approx((2 - 2 * math.cos(math.pi / 16)) / 4, rel=1e-4)
    assert move.distance == pytest.approx(math.sqrt(4 * move.lost))
    assert (guard.num_refused, guard.kept_energy, guard.distance) == (0, 1.0, 0.0)
    guard.accept(move)
    assert (guard.kept_energy, guard.distance) == (1 - move.lost, move.distance)


def test_a_step_that_no_halving_makes_small_enough_is_refused():
    guard, shares = StepGuard(0.0, None), []
    assert guard.largest_move(OLD_PWR, proposals(1.0, shares), STORED_PRR, rounding=1e-9) is None
    assert len(shares) == MAX_HALVINGS + 1
    assert guard.num_refused == 1


def test_moves_add_up_to_the_drift_that_is_allowed_and_rows_that_are_gone_have_none():
    guard, moves = StepGuard(1.0, 0.5), []
    for _ in range(9):
        move = guard.largest_move(OLD_PWR, proposals(0.5, []), STORED_PRR, rounding=0.0)
        if move is None:
            break
        guard.accept(move)
        moves.append(move)
    assert 2 <= len(moves) < 9
    assert guard.distance == pytest.approx(sum(move.distance for move in moves))
    assert guard.distance <= 0.5 * math.sqrt(4)
    guard.forget_rows()
    assert guard.largest_move(OLD_PWR, proposals(0.5, []), STORED_PRR, rounding=0.0).distance == moves[0].distance


def test_where_nothing_is_stored_nothing_is_lost():
    guard = StepGuard(0.0, 0.0)
    move = guard.largest_move(OLD_PWR, proposals(1.5, []), None, rounding=1e-3)
    assert (move.lost, move.distance) == (0.0, 0.0)


def test_a_basis_that_is_to_stay_is_no_refused_step():
    guard = StepGuard(0.0, None)
    assert guard.largest_move(OLD_PWR, lambda share: None, STORED_PRR, rounding=0.0) is None
    assert guard.num_refused == 0


def test_regret_adds_up_until_a_step_is_worth_it():
    # Half the energy of each row is outside of the old basis, a fifth outside of the new one: a regret of 1.5.
    rows_PNW = torch.tensor([[[1.0, 0, 0, 1]]])
    new_PWR = (AXES[:, :1] + AXES[:, 3:] / 3)[None]
    new_PWR = new_PWR / new_PWR.norm(dim=1, keepdim=True)
    trigger = UpdateTrigger(4.0)
    answers = [trigger.is_worth_a_step(rows_PNW, OLD_PWR, new_PWR) for _ in range(3)]
    assert answers == [False, False, True]
    assert trigger.regret == pytest.approx(4.5, rel=1e-5)
    trigger.reset()
    assert trigger.regret == 0
    assert not trigger.is_worth_a_step(rows_PNW, new_PWR, OLD_PWR)
    assert trigger.regret == 0, "a step that would be worse costs nothing to put off"
