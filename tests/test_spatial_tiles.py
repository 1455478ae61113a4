"""Convolutions of tiles: what is computed where and when. That it is exact, others test."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from gems.plans.plan import Plan
from gems.torch.autograd import split_backward as defer
from gems.torch.spatial.halo_exchange import HaloExchange
from gems.torch.spatial.rules.overlap_conv import Kernel
from tests.exact import assert_equal, batches, plainly, planned
from tests.spatial import Plain

WATCHED = (
    (HaloExchange, "start"),
    (HaloExchange, "start_backward"),
    (HaloExchange, "assemble"),
    (Kernel, "forward"),
    (Kernel, "backward"),
)


@contextmanager
def watching() -> Iterator[dict[int, list[str]]]:
    """What each rank, a thread, calls: messages, padded tiles, convolutions with padding."""
    done: dict[int, list[str]] = defaultdict(list)

    def noted(owner: Any, name: str) -> Any:
        run = getattr(owner, name)

        def wrapped(self: Any, *args: Any) -> Any:
            where = f" {self.padding}" if isinstance(self, Kernel) else ""
            done[threading.get_ident()].append(name + where)
            return run(self, *args)

        return mock.patch.object(owner, name, wrapped)

    with ExitStack() as stack:
        for owner, name in WATCHED:
            stack.enter_context(noted(owner, name))
        yield done


def test_a_tile_is_convolved_where_it_lies_while_halos_are_in_flight() -> None:
    """No padded tile is made; messages are started before the work on the tile, there and back."""
    torch.manual_seed(0)
    # What enters is delivered with its halo: the layer to look at comes after another.
    plain = Plain(
        nn.Sequential(nn.AvgPool2d(1), nn.Conv2d(4, 4, 3, padding=1)), torch.randn(2, 4, 8, 6)
    )
    with watching() as done:
        plain.cut((2, 1))
    tile, edge = "(1, 1)", "(0, 1)"
    there = ["start", f"forward {tile}", f"forward {edge}"]
    back = [f"backward {edge}", "start_backward", f"backward {tile}"]
    assert list(done.values()) == [there + back] * 2


def test_a_tile_without_cells_may_have_outputs_that_read_the_border_and_others() -> None:
    # A tile of no columns was convolved where it lay, which ATen refuses.
    torch.manual_seed(0)
    layer = nn.Conv2d(3, 6, (3, 1), stride=(3, 2), padding=(4, 1), dilation=(2, 3))
    plain = Plain(nn.Sequential(nn.AvgPool2d(1), layer), torch.randn(3, 3, 11, 8))
    plain.cut((2, 2), points=[[4], [0]])


@pytest.mark.parametrize("bias", [True, False])
def test_weight_gradients_of_tiles_wait_for_their_turn(bias: bool) -> None:
    """Where a schedule splits backward, a cut convolution computes its weight gradient in W."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 6, 3, padding=1, bias=bias),
        nn.ReLU(), nn.Flatten(), nn.Linear(6 * 64, 3),
    ).double()  # fmt: skip
    plan = Plan(stages=2, balance=(4, 2), micro_batches=4, schedule="zero-bubble", spatial=[(2, 1)])
    data = batches((4, 3, 8, 8), 3, 1, torch.float64)
    expected = plainly(model, data, plan.total)
    late: list[tuple[int, ...]] = []

    def noted(entries: list[Any]) -> None:
        late.extend(tuple(gradient.shape) for _, _, gradient in entries)
        defer.flush(entries)

    with mock.patch("gems.torch.runtime.stage_runner.flush", noted):
        assert_equal(planned(model, data, plan), expected)
    assert late.count((1, 6, 4, 8)) == 2 * 4  # two tiles, four micro-batches
