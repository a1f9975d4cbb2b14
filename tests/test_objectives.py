"""Objectives: losses, predictions and metrics by hand, and their files."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from sklearn.metrics import log_loss

from kindred.client.evaluation import evaluate
from kindred.client.training import train
from kindred.messages import seed_for
from kindred.metrics import METRICS
from kindred.objectives import OBJECTIVES, Classes, Labels, NextToken, Number, Objective

LN2, LN3 = math.log(2), math.log(3)


def test_the_loss_of_labels_is_the_mean_of_their_binary_cross_entropies() -> None:
    # Logits 0 and ln 3 are probabilities of 1/2 and 3/4: -ln 1/2 and, for a false label, -ln 1/4.
    outputs, targets = torch.tensor([[0.0, LN3]]), torch.tensor([[1.0, 0.0]])
    objective = Labels(2)
    assert float(objective.loss(outputs, targets)) == pytest.approx((LN2 + 2 * LN2) / 2)
    predictions = objective.predictions(outputs).numpy()
    assert predictions == pytest.approx(np.array([[0.5, 0.75]]))
    assert objective.losses(predictions, targets.numpy()) == pytest.approx([1.5 * LN2])
    assert objective.likelihoods(predictions, targets.numpy()) == pytest.approx([2**-1.5])


def test_weights_of_labels_count_for_true_labels_and_in_training_alone() -> None:
    outputs, targets = torch.tensor([[0.0, 0.0]]), torch.tensor([[1.0, 0.0]])
    objective = Labels(2, weights=(3.0, 5.0))
    assert float(objective.loss(outputs, targets)) == pytest.approx((3 * LN2 + LN2) / 2)
    assert float(objective.unweighted.loss(outputs, targets)) == pytest.approx(LN2)


def test_accuracy_of_labels_is_over_all_samples_and_labels() -> None:
    predictions = np.array([[0.9, 0.2], [0.6, 0.4]])
    assert Labels(2).metrics(predictions, np.array([[1.0, 0.0], [0.0, 1.0]])) == {"accuracy": 0.5}


def test_weights_of_classes_do_not_depend_on_the_batch() -> None:
    outputs, targets = torch.zeros(3, 2), torch.tensor([0, 0, 1])
    objective = Classes(2, weights=(1.0, 4.0))
    assert float(objective.loss(outputs, targets)) == pytest.approx(6 * LN2 / 3)  # (1 + 1 + 4) ln 2 / 3
    assert objective.loss(outputs, targets, "none").tolist() == pytest.approx([LN2, LN2, 4 * LN2])
    assert float(objective.loss(outputs, targets, "sum")) == pytest.approx(6 * LN2)


def test_a_number_is_judged_in_its_own_unit() -> None:
    # Standardised by mean 100 and deviation 10: predictions 100 and 120, true values 110 and 120.
    objective = Number(1, mean=100.0, deviation=10.0)
    predictions, targets = np.array([[0.0], [2.0]]), np.array([1.0, 2.0])
    assert objective.losses(predictions, targets) == pytest.approx([0.5, 0.0])
    assert float(objective.loss(torch.from_numpy(predictions), torch.from_numpy(targets))) == pytest.approx(0.25)
    found = objective.metrics(predictions, targets)
    assert found == pytest.approx({"rmse": math.sqrt(50), "mae": 5.0, "r2": 1 - 100 / 50})
    assert objective.readable(predictions).tolist() == [[100.0], [120.0]]
    assert objective.scaled(np.array([110.0, 120.0])).tolist() == [1.0, 2.0]


def test_equal_numbers_have_no_share_of_explained_variance() -> None:
    assert Number(1).metrics(np.array([[1.0], [1.0]]), np.array([2.0, 2.0])) == {"rmse": 1.0, "mae": 1.0}


def test_bits_are_the_cross_entropy_by_the_logarithm_of_two() -> None:
    predictions = np.array([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]])
    found = NextToken(3).evaluated(predictions, np.array([0, 0]))
    assert found["accuracy"] == 0.5 and found["bits"] == pytest.approx((1 + math.log2(10)) / 2)
    assert found["loss"] == pytest.approx(log_loss([0, 0], predictions, labels=[0, 1, 2]))


@pytest.mark.parametrize(
    ("objective", "expected"),
    [(Labels(1), [[0.75]]), (Number(1), [[0.625]]), (Classes(2), [[0.75, 0.25]])],
)
def test_a_mixture_of_logits(objective, expected) -> None:
    # Odds 9 and 1, each by a half: their geometric mean is 3, a probability of 3/4. Numbers have their plain mean.
    predictions = {
        "labels": np.array([[[0.9]], [[0.5]]]),
        "number": np.array([[[0.75]], [[0.5]]]),
        "classes": np.array([[[0.9, 0.1]], [[0.5, 0.5]]]),
    }[objective.name]
    assert objective.mix(predictions, np.array([0.5, 0.5]), "logits") == pytest.approx(np.array(expected))


@pytest.mark.parametrize(
    "objective",
    [
        Classes(3, names=("a", "b", "c"), weights=(1.0, 2.0, 3.0)),
        Labels(2, names=("x", "y")),
        Number(1, names=("age",), mean=3.5, deviation=2.0),
        NextToken(5),
    ],
)
def test_an_objective_survives_its_file(objective) -> None:
    assert Objective.from_dict(json.loads(json.dumps(objective.to_dict()))) == objective


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Classes(1), "num_outputs is 1, allowed: 2 to 1,000,000"),
        (lambda: Labels(2, names=("a",)), "there are 2 outputs and 1 names for them"),
        (lambda: Classes(2, weights=(1.0, 0.0)), "weights are 1.0, 0.0, allowed: 2 numbers, each more than 0"),
        (lambda: Number(2), "num_outputs is 2, allowed for a number: 1"),
        (lambda: Number(1, deviation=0.0), "mean is 0.0 and deviation 0.0, allowed: finite, and more than 0"),
    ],
)
def test_what_cannot_be_is_refused(make, reason) -> None:
    with pytest.raises(ValueError) as error:
        make()
    assert str(error.value) == reason


@pytest.mark.parametrize("name", OBJECTIVES)
def test_without_samples_there_is_no_value(name) -> None:
    found = OBJECTIVES[name]().evaluated(np.empty((0, 1)), np.empty(0))
    assert set(found) == {OBJECTIVES[name].metric, "loss"} and np.isnan(list(found.values())).all()
    assert OBJECTIVES[name].metric in METRICS


def test_training_on_numbers_finds_a_line() -> None:
    x = torch.linspace(-1, 1, 40)[:, None]
    y = 3 * x[:, 0] + 1
    model = torch.nn.Linear(1, 1)
    rng = torch.Generator().manual_seed(seed_for(0, "line"))
    train(
        model, x, y, epochs=200, batch_size=10, optimizer="sgd", learning_rate=0.1, generator=rng, objective=Number(1)
    )
    assert model.weight.item() == pytest.approx(3, abs=1e-3) and model.bias.item() == pytest.approx(1, abs=1e-3)
    assert evaluate(model, x, y, Number(1))["r2"] == pytest.approx(1, abs=1e-5)
