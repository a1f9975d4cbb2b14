"""Metrics beyond accuracy, by hand and against scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st
from sklearn.metrics import (
    average_precision_score,
    balanced_accuracy_score,
    brier_score_loss,
    f1_score,
    log_loss,
    mean_absolute_error,
    r2_score,
    recall_score,
    roc_auc_score,
    root_mean_squared_error,
)

from kindred.metrics import METRICS
from kindred.objectives import OBJECTIVES, Classes, Labels, NextToken, Number

# Four samples; classes by probability above 1/2: 1, 0, 1, 0.
PREDICTIONS = np.array([[0.1, 0.9], [0.6, 0.4], [0.3, 0.7], [0.8, 0.2]])
TARGETS = np.array([1, 1, 0, 0])


def of_classes(predictions: np.ndarray = PREDICTIONS, targets: np.ndarray = TARGETS) -> dict[str, float]:
    return Classes(predictions.shape[1]).evaluated(predictions, targets, Classes.reports)


def test_metrics_of_two_classes_by_hand() -> None:
    found = of_classes()
    assert found["accuracy"] == found["balanced-accuracy"] == found["sensitivity"] == found["specificity"] == 0.5
    assert found["auroc"] == 0.75  # of the 4 pairs of a sample of each class 0.9 > 0.7, 0.9 > 0.2 and 0.4 > 0.2
    assert found["f1"] == 0.5  # one of two predicted, one of two there
    assert found["average-precision"] == pytest.approx((1 + 2 / 3) / 2)  # precisions where recall increases
    assert found["brier"] == pytest.approx((0.01 + 0.36 + 0.49 + 0.04) / 4)
    assert found["log-loss"] == pytest.approx(found["loss"]) == pytest.approx(-np.log([0.9, 0.4, 0.3, 0.8]).mean())
    # Each confidence, 0.9, 0.6, 0.7 and 0.8, is in a bin of its own; the second and third prediction are wrong.
    assert found["calibration-error"] == pytest.approx((0.1 + 0.6 + 0.7 + 0.2) / 4)


def test_a_client_with_one_class_has_no_auroc_and_is_otherwise_judged() -> None:
    found = of_classes(PREDICTIONS[:2], TARGETS[:2])
    assert not {"auroc", "average-precision", "specificity"} & found.keys()
    assert found["accuracy"] == found["sensitivity"] == found["balanced-accuracy"] == 0.5


def test_of_several_classes_the_mean_of_those_that_occur() -> None:
    predictions = np.array([[0.7, 0.2, 0.1], [0.5, 0.4, 0.1], [0.2, 0.7, 0.1], [0.6, 0.3, 0.1]])
    targets = np.array([0, 0, 1, 1])
    found = of_classes(predictions, targets)
    assert found["auroc"] == pytest.approx((0.75 + 0.75) / 2) and "sensitivity" not in found
    assert found["balanced-accuracy"] == balanced_accuracy_score(targets, predictions.argmax(axis=1)) == 0.75


def test_of_labels_the_mean_over_those_with_both_values() -> None:
    predictions = np.array([[0.9, 0.5], [0.2, 0.7]])
    found = Labels(2).evaluated(predictions, np.array([[1.0, 1.0], [0.0, 1.0]]), Labels.reports)
    assert found["auroc"] == found["average-precision"] == 1.0
    assert found["brier"] == pytest.approx((0.01 + 0.25 + 0.04 + 0.09) / 4)


def test_scores_of_samples_by_hand() -> None:
    assert Classes(2).sample_scores(PREDICTIONS, TARGETS).tolist() == [1, 0, 0, 1]
    assert Labels(2).sample_scores(PREDICTIONS[:1], np.array([[1.0, 1.0]])).tolist() == [0.5]
    assert Number(1, mean=5, deviation=2).sample_scores(np.array([[1.0]]), np.array([-0.5])).tolist() == [-3.0]


@pytest.mark.parametrize(("objective", "targets"), [(Classes(2), [0]), (Labels(2), [[1.0, 0.0]]), (Number(1), [1.0])])
def test_predictions_that_are_not_finite_are_refused(objective, targets) -> None:
    with pytest.raises(ValueError, match="predictions are not finite: did training diverge"):
        objective.evaluated(np.full((1, objective.num_outputs), np.inf), np.array(targets), objective.reports)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_reported_metric_is_described(name) -> None:
    assert set(OBJECTIVES[name].reports) <= METRICS.keys() and OBJECTIVES[name].metric in OBJECTIVES[name].reports


def test_all_that_is_reported_can_be_computed() -> None:
    assert set(of_classes()) == set(Classes.reports)
    both = Labels(1).evaluated(np.array([[0.2], [0.7]]), np.array([[0.0], [1.0]]), Labels.reports)
    assert set(both) == set(Labels.reports)
    assert set(NextToken(2).evaluated(PREDICTIONS, TARGETS, NextToken.reports)) == set(NextToken.reports)
    numbers = Number(1).evaluated(np.array([[0.2], [0.7]]), np.array([0.0, 1.0]), Number.reports)
    assert set(numbers) == set(Number.reports)


@given(st.lists(st.tuples(st.floats(0.01, 0.99), st.booleans()), min_size=2, max_size=40))
def test_metrics_of_any_two_classes_are_possible_and_scikit_learns(samples) -> None:
    p, y = np.array([each for each, _ in samples]), np.array([int(true) for _, true in samples])
    found = of_classes(np.stack([1 - p, p], axis=1), y)
    assert all(METRICS[name].holds(value) for name, value in found.items())
    assert found["brier"] == pytest.approx(brier_score_loss(y, p))
    assert found["log-loss"] == pytest.approx(log_loss(y, np.stack([1 - p, p], axis=1), labels=[0, 1]))
    assert found["f1"] == f1_score(y, p > 0.5, zero_division=0)
    if 0 < y.sum() < len(y):
        assert found["auroc"] == pytest.approx(roc_auc_score(y, p))
        assert found["average-precision"] == pytest.approx(average_precision_score(y, p))


@given(st.lists(st.tuples(st.sampled_from([0.1, 0.25, 0.5]), st.integers(0, 3)), min_size=2, max_size=30))
def test_scores_of_several_classes_with_ties_and_absent_classes_are_scikit_learns(samples) -> None:
    y = np.array([label for _, label in samples])
    p = np.array([[share * (c + 1) % 0.4 for c in range(5)] for share, _ in samples])  # class 4 does not occur
    some = [c for c in range(5) if 0 < (y == c).sum() < len(y)]
    of_all = {
        "balanced-accuracy": recall_score(y, p.argmax(axis=1), labels=np.unique(y), average="macro", zero_division=0),
        "f1": f1_score(y, p.argmax(axis=1), labels=np.unique(y), average="macro", zero_division=0),
        "log-loss": log_loss(y, p / p.sum(axis=1, keepdims=True), labels=np.arange(5)),
    }
    ranks = {
        "auroc": [roc_auc_score(y == c, p[:, c]) for c in some],
        "average-precision": [average_precision_score(y == c, p[:, c]) for c in some],
    }
    expected = of_all | ({name: np.mean(values) for name, values in ranks.items()} if some else {})
    assert Classes(5).further_metrics(p, y, (*of_all, *ranks)) == pytest.approx(expected)


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans(), st.floats(0, 1), st.booleans()), min_size=1, max_size=20))
def test_f1_of_labels_is_scikit_learns_also_where_a_label_never_occurs(samples) -> None:
    p, y = np.array([[one[0], one[2], 0.2] for one in samples]), np.array([[one[1], one[3], False] for one in samples])
    found = Labels(3).further_metrics(p, y.astype(float), ("f1",))
    assert found["f1"] == pytest.approx(f1_score(y, p > 0.5, average="macro", zero_division=0))


@given(st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5)), min_size=2, max_size=20))
def test_scores_of_numbers_are_scikit_learns(samples) -> None:
    given_, true = np.array(samples).T
    found = Number(1, mean=3, deviation=2).evaluated(given_[:, None], true, Number.reports)
    true, given_ = 2 * true + 3, 2 * given_ + 3
    assert found["rmse"] == pytest.approx(root_mean_squared_error(true, given_))
    assert found["mae"] == pytest.approx(mean_absolute_error(true, given_))
    assert ("r2" in found) == (len(np.unique(true)) > 1)
    if "r2" in found and np.ptp(true) > 1e-3:
        assert found["r2"] == pytest.approx(r2_score(true, given_))
