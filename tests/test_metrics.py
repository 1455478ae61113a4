"""Metrics against their definitions, over generated cases; and that they add up."""

from __future__ import annotations

import math
import pickle
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gems.torch.metrics import Scores, accuracy, auc, confusion, dice, iou, macro_auc, margins

Tensor = torch.Tensor
seeds = st.integers(0, 2**31)


def same(mine: float, theirs: float) -> bool:
    return math.isclose(mine, theirs, abs_tol=1e-12) or (math.isnan(mine) and math.isnan(theirs))


def auc_by_pairs(scores: list[float], positive: list[bool]) -> float:
    """The definition: of all pairs of a positive and a negative, how many are in order."""
    yes = [s for s, p in zip(scores, positive, strict=True) if p]
    no = [s for s, p in zip(scores, positive, strict=True) if not p]
    if not yes or not no:
        return math.nan
    return sum((a > b) + (a == b) / 2 for a, b in product(yes, no)) / (len(yes) * len(no))


@given(st.lists(st.tuples(st.integers(-3, 3), st.booleans()), max_size=30))
def test_the_auc_is_that_of_all_pairs_ties_included(samples: list[tuple[int, bool]]) -> None:
    scores, positive = [float(s) for s, _ in samples], [p for _, p in samples]
    found = auc(torch.tensor(scores), torch.tensor(positive, dtype=torch.bool))
    assert same(found, auc_by_pairs(scores, positive))


def test_the_auc_of_known_orders() -> None:
    target = torch.tensor([0, 0, 1, 1])
    assert auc(torch.tensor([0.1, 0.4, 0.35, 0.8]), target) == 0.75  # scikit-learn's example
    assert auc(torch.arange(4), target) == 1.0
    assert auc(-torch.arange(4), target) == 0.0
    assert auc(torch.zeros(4), target) == 0.5


@given(seeds, st.integers(2, 5), st.integers(0, 25))
def test_the_macro_auc_is_the_mean_of_one_against_the_rest(
    seed: int, classes: int, samples: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randint(-2, 3, (samples, classes), generator=draw).double()
    target = torch.randint(classes, (samples,), generator=draw)
    scores = logits.softmax(1)
    known = [
        auc_by_pairs(scores[:, c].tolist(), (target == c).tolist())
        for c in range(classes)
        if 0 < int((target == c).sum()) < samples
    ]
    expected = sum(known) / len(known) if known else math.nan
    assert same(macro_auc(scores, target), expected)


@given(seeds, st.integers(2, 6))
def test_margins_are_log_odds(seed: int, classes: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(4, classes, generator=draw, dtype=torch.float64)
    odds = logits.softmax(1) / (1 - logits.softmax(1))
    torch.testing.assert_close(margins(logits), odds.log(), rtol=1e-9, atol=1e-9)


def test_a_sure_network_is_still_ranked() -> None:
    # Both probabilities round to 1; ranked by them, the samples would tie at 0.5.
    scores = Scores("classification", 3)
    scores.add(torch.tensor([[90.0, 0, 0], [80.0, 0, 0]]), torch.tensor([0, 1]))
    assert margins(torch.tensor([[90.0, 0, 0], [80.0, 0, 0]])).isfinite().all()
    assert scores.summary()["auc"] == pytest.approx((1.0 + 1.0) / 2)


def overlap_of_sets(guess: Tensor, target: Tensor, c: int) -> tuple[float, float]:
    mine = {i for i, g in enumerate(guess.flatten().tolist()) if g == c}
    theirs = {i for i, t in enumerate(target.flatten().tolist()) if t == c}
    if not mine | theirs:
        return math.nan, math.nan
    both = len(mine & theirs)
    return 2 * both / (len(mine) + len(theirs)), both / len(mine | theirs)


@given(seeds, st.integers(2, 4), st.booleans())
def test_dice_and_iou_are_those_of_sets_of_pixels(seed: int, classes: int, ignored: bool) -> None:
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, classes, 3, 4, generator=draw)
    target = torch.randint(classes, (2, 3, 4), generator=draw)
    if ignored:
        target[torch.rand(target.shape, generator=draw) < 0.3] = 255
    scores = Scores("segmentation", classes, ignore_index=255 if ignored else None)
    scores.add(logits, target)
    found = scores.summary()
    kept = target != 255
    guess, true = logits.argmax(1)[kept], target[kept]
    pairs = [overlap_of_sets(guess, true, c) for c in range(classes)]
    for c, (d, j) in enumerate(pairs):
        assert same(found[f"dice_{c}"], d) and same(found[f"iou_{c}"], j)
    known = [(d, j) for d, j in pairs if not math.isnan(d)]
    for name, values in zip(("dice", "iou"), zip(*known, strict=True), strict=True):
        assert same(found[name], sum(values) / len(values))
    assert same(found["accuracy"], (guess == true).double().mean().item())


def test_confusion_has_rows_of_true_classes_and_columns_of_guesses() -> None:
    counts = confusion(torch.tensor([0, 1, 1, 2]), torch.tensor([0, 0, 1, 1]), 3)
    assert counts.tolist() == [[1, 1, 0], [0, 1, 1], [0, 0, 0]]
    assert accuracy(counts) == 0.5
    assert dice(counts) == [2 / 3, 0.5, 0.0]
    assert iou(counts) == [0.5, 1 / 3, 0.0]


@pytest.mark.parametrize("task", ["classification", "segmentation"])
def test_batches_and_ranks_add_up_to_all_samples_at_once(task: str) -> None:
    draw = torch.Generator().manual_seed(0)
    sides = (5, 4) if task == "segmentation" else ()
    output = torch.randn(23, 3, *sides, generator=draw)
    target = torch.randint(3, (23, *sides), generator=draw)
    target.view(-1)[::7] = -1
    whole = Scores(task, 3, ignore_index=-1)
    whole.add(output, target)
    ranks = [Scores(task, 3, ignore_index=-1) for _ in range(3)]
    for i, (a, b) in enumerate([(0, 5), (5, 5), (5, 6), (6, 17), (17, 23)]):
        ranks[i % 3].add(output[a:b], target[a:b])
    sent = [pickle.loads(pickle.dumps(rank)) for rank in ranks]  # as ranks send them
    assert (sent[0] + sent[1] + sent[2]).summary() == whole.summary()
    assert ranks[0].summary() != whole.summary()


def test_two_classes_may_be_told_by_one_logit() -> None:
    draw = torch.Generator().manual_seed(0)
    logit, target = torch.randn(9, generator=draw), torch.randint(2, (9,), generator=draw)
    pair = torch.stack([torch.zeros(9), logit], 1)
    said = []
    for output in (logit, logit[:, None], pair):
        scores = Scores("classification", 2)
        scores.add(output, target)
        said.append(scores.summary())
    assert said[0] == said[1] == said[2]
    assert said[0]["accuracy"] == ((logit > 0) == target).double().mean().item()
    scores = Scores("segmentation", 2)
    scores.add(torch.tensor([[[[1.0, -1.0]]]]), torch.tensor([[[1, 1]]]))
    assert scores.summary()["accuracy"] == 0.5


def test_nothing_seen_is_nan_and_not_a_number_of_its_own() -> None:
    for task in ("classification", "segmentation"):
        assert all(math.isnan(value) for value in Scores(task, 2).summary().values())


@pytest.mark.parametrize(
    ("task", "output", "target", "words"),
    [
        ("classification", (4, 2), (4,), r"into 3 classes: outputs have shape \(4, 2\)"),
        ("classification", (4, 3, 2), (4, 2), r"give \(samples, classes\) and \(samples,\)"),
        ("segmentation", (4, 3, 8, 8), (4, 8, 7), r"targets \(4, 8, 7\); give"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(
    task: str, output: tuple[int, ...], target: tuple[int, ...], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        Scores(task, 3).add(torch.zeros(output), torch.zeros(target, dtype=torch.long))


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match=r"task is 'x'.*classes is 1"):
        Scores("x", 1)
    with pytest.raises(ValueError, match=r"from 0 to 2, but some are -1, 9; give ignore_index"):
        Scores("classification", 3).add(torch.zeros(3, 3), torch.tensor([0, 9, -1]))
    with pytest.raises(ValueError, match="not a finite number"):
        Scores("classification", 2).add(torch.tensor([[0.0, math.nan]]), torch.tensor([0]))
    with pytest.raises(ValueError, match=r"'classification', 2, None.*'classification', 3"):
        Scores("classification", 2) + Scores("classification", 3)
