"""Every kind of layer that tests/generate knows, where it is hardest for ranks to agree: a slice
without samples, a tile without cells, no gradient from the stage behind, branches of two forms."""

from __future__ import annotations

import pytest

from tests.generate.cases import Case, draw
from tests.generate.layers import IMAGE, SEQUENCE
from tests.generate.models import Model, Piece
from tests.generate.run import judge


@pytest.mark.parametrize("kind", sorted({*IMAGE, *SEQUENCE}))
def test_a_slice_without_samples_is_no_trouble_to_any_layer(kind: str) -> None:
    """One sample for two slices: the second rank has none, and must take part all the same."""
    plan = {"stages": 1, "micro_batches": 1, "schedule": "sequential", "data": 1, "local_dp": 2}
    shape = (4, 6) if kind in SEQUENCE else (4, 6, 5)
    for seed in (45, 1, 2):  # 45 is an instance norm with weights
        model = Model(seed=seed, shape=shape, pieces=(Piece(kind, seed),))
        verdict = judge(Case(kind, model, plan, batches=(1, 4, 1)))
        assert not verdict.failed, f"{seed}: {verdict.kind}: {verdict.text}\n{verdict.trace}"


@pytest.mark.parametrize("kind", IMAGE)
def test_a_tile_without_cells_is_no_trouble_to_any_layer(kind: str) -> None:
    """Three ranks for two columns, recomputed. All tensors without cells have one address, and one
    that backward had saved was once taken for a padded tile: `where` got a condition of numbers."""
    pool, *_ = draw(9033).model.pieces  # five columns to two
    pieces = (pool, Piece(kind, 5, joint="where", back=5))
    model = Model(seed=1, shape=(4, 5, 5), pieces=pieces)
    plan = {"stages": 1, "schedule": "sequential", "spatial": ((1, 3),), "recompute": (("",),)}
    verdict = judge(Case("empty tile", model, plan, batches=(4, 4)))
    assert not verdict.failed, f"{verdict.kind}: {verdict.text}\n{verdict.trace}"


@pytest.mark.parametrize("kind", IMAGE)
def test_no_gradient_comes_back_to_tiles_of_any_layer(kind: str) -> None:
    """What all ranks of a spatial group have goes to the next stage once, and its gradient comes
    back to one of them: the others once took zeros for it, and decayed weights that have none."""
    pieces = (Piece(kind, 5), Piece("convolution", 3, "no_grad"))
    model = Model(seed=1, shape=(4, 6, 6), pieces=pieces)
    for stages in (2, 3):
        plan = {"stages": stages, "schedule": "sequential", "spatial": ((1, 2),)}
        verdict = judge(Case("absent", model, plan, optimizer="adamw", batches=(2,)))
        assert not verdict.failed, f"{verdict.kind}: {verdict.text}\n{verdict.trace}"


@pytest.mark.parametrize("kind", IMAGE)
def test_branches_of_other_forms_are_rejected_before_they_are_sent(kind: str) -> None:
    """Autocast gives half precision in one branch and not in the other."""
    model = Model(seed=1, shape=(4, 6, 6), pieces=(Piece(kind, 5, "random_branch"),))
    plan = {"stages": 2, "schedule": "sequential", "micro_batches": 3}
    verdict = judge(Case("branch", model, plan, batches=(6,), precision="bf16"))
    assert not verdict.failed, f"{verdict.kind}: {verdict.text}\n{verdict.trace}"
