"""Optimizers and learning rates by name: that each argument does what it says."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from gems.distributed.learning_rate import Factor, cosine, step_decay, warmed_up
from gems.torch.optimizers import OPTIMIZERS, optimizer


def after_steps(name: str, gradients: tuple[float, ...] = (1.0, 0.5), **options: float) -> float:
    """Where a weight of 2 goes under these gradients."""
    weight = torch.nn.Parameter(torch.tensor([2.0], dtype=torch.float64))
    chosen = optimizer(name, [weight], **{"learning_rate": 0.1, **options})  # type: ignore[arg-type]
    for gradient in gradients:
        weight.grad = torch.full_like(weight, gradient)
        chosen.step()
    return weight.item()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_option_changes_where_the_weights_go(name: str) -> None:
    plain = after_steps(name)
    assert plain < 2.0
    assert after_steps(name, learning_rate=0.01) != plain
    assert after_steps(name, weight_decay=0.1) != plain


def test_sgd_is_its_equation() -> None:
    # g = 1 + 0.1 * 2, v = g, w = 2 - 0.1 v; then the same with the momentum that is left.
    first = 1.0 + 0.1 * 2.0
    weight = 2.0 - 0.1 * first
    speed = 0.5 * first + 0.5 + 0.1 * weight
    expected = weight - 0.1 * speed
    assert after_steps("sgd", weight_decay=0.1, momentum=0.5) == pytest.approx(expected, rel=1e-12)
    assert after_steps("sgd", momentum=0.0) == pytest.approx(2.0 - 0.1 * 1.5, rel=1e-12)


def test_momentum_is_nine_tenths_of_sgd_and_none_of_rmsprop_unless_given() -> None:
    assert after_steps("sgd") == after_steps("sgd", momentum=0.9)
    assert after_steps("rmsprop") == after_steps("rmsprop", momentum=0.0)
    assert after_steps("rmsprop") != after_steps("rmsprop", momentum=0.9)


def test_adamw_takes_its_decay_from_the_weights_and_adam_from_the_gradient() -> None:
    first = 2.0 * (1 - 0.1 * 0.5) - 0.1  # Adam's first step is of the size of the learning rate
    assert after_steps("adamw", (1.0,), weight_decay=0.5) == pytest.approx(first, rel=1e-6)
    assert after_steps("adam", (1.0,), weight_decay=0.5) == pytest.approx(1.9, rel=1e-6)


def test_biases_and_norms_decay_too() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    chosen = optimizer("adamw", model.parameters(), 0.1, weight_decay=0.5)
    torch.nn.init.ones_(model[0].bias)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    chosen.step()
    assert model[0].bias.tolist() == pytest.approx([0.95, 0.95])
    assert model[1].weight.tolist() == pytest.approx([0.95, 0.95])


def test_all_that_is_wrong_with_an_optimizer_is_said_at_once() -> None:
    with pytest.raises(ValueError, match=r"'lamb', not one of sgd.*learning_rate is 0.*is -1"):
        optimizer("lamb", [], 0.0, -1.0)
    with pytest.raises(ValueError, match=r"adam has no momentum to set to 0\.9; leave it out"):
        optimizer("adam", [], 0.1, momentum=0.9)
    with pytest.raises(ValueError, match=r"momentum is 1\.5"):
        optimizer("sgd", [], 0.1, momentum=1.5)


# --- learning rates ---------------------------------------------------------------------------


def test_step_decay_multiplies_after_every_so_many_steps() -> None:
    factor = step_decay(0.5, every=3)
    assert [factor(s) for s in range(8)] == [1, 1, 1, 0.5, 0.5, 0.5, 0.25, 0.25]
    with pytest.raises(ValueError, match=r"decay is 1\.5; give a factor above 0, up to 1"):
        step_decay(1.5, every=2)


def test_cosine_falls_from_one_to_zero_and_stays() -> None:
    values = [cosine(10)(s) for s in range(11)]
    assert values[0] == 1.0 and values[5] == pytest.approx(0.5) and values[10] == 0
    assert all(a > b for a, b in pairwise(values))
    assert cosine(10)(50) == 0


@pytest.mark.parametrize("plain", [step_decay(1.0, 1), step_decay(0.5, 2), cosine(5)])
def test_warm_up_climbs_to_where_the_rest_begins_and_delays_it(plain: Factor) -> None:
    warm = warmed_up(plain, 4)
    assert [warm(s) for s in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert [warm(s + 4) for s in range(8)] == [plain(s) for s in range(8)]


def test_torch_takes_a_schedule_as_it_is() -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    chosen = optimizer("sgd", [weight], 0.4)
    schedule = LambdaLR(chosen, warmed_up(step_decay(0.5, every=2), 2))
    seen = []
    for _ in range(6):
        seen.append(chosen.param_groups[0]["lr"])
        chosen.step()
        schedule.step()
    assert seen == pytest.approx([0.2, 0.4, 0.4, 0.4, 0.2, 0.2])
