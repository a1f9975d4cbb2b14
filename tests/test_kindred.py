"""Kindred: its steps by hand, what clients judge and report, and what its shares do."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord
from hypothesis import given, strategies as st
from hypothesis.extra.numpy import arrays
from safetensors.numpy import load_file
from scipy import special

from kindred import FedAvg, InlineGrid, Kindred, kindred, make_client_app
from kindred.client.local_training import LocalTraining
from kindred.client.training import get_arrays
from kindred.kindred import (
    GRID,
    SHARPNESS,
    bounded,
    centred_cosines,
    fold_of,
    neighbour_weights,
    prevalence,
    shares,
)
from kindred.messages import by_prefix, read_record, to_record
from kindred.objectives import Classes
from kindred.parts import held_out, newcomers
from kindred.parts.combination import combined
from kindred.parts.held_out import LARGEST_LOSS, calibrated_loss, rarity
from kindred.parts.newcomers import mixing_weights, mixture_metrics, unlabelled_scores

from . import two_weights
from .client_apps import initial, plain_app, small, small_app, small_site
from .grids import FaultyGrid
from .test_conformance import CLIENTS as MANY, ROUNDS, run, values
from .two_weights import Client, probabilities, weights_of

# --- The mathematics ----------------------------------------------------------------------------------

CROSS = np.array([[3.0, 1.0], [1.0, 3.0], [-1.0, 1.0], [1.0, -1.0]])  # (1, 1) plus and minus 2 along each axis


def cosines_of(models: np.ndarray, rows=None, blocks=None) -> np.ndarray:
    rows = range(len(models)) if rows is None else rows
    return centred_cosines(blocks or [models], list(rows), len(models))


def test_cosines_are_of_deviations_from_the_mean_model() -> None:
    expected = [[1, 0, -1, 0], [0, 1, 0, -1], [-1, 0, 1, 0], [0, -1, 0, 1]]
    assert cosines_of(CROSS).tolist() == expected
    assert cosines_of(1000 + CROSS / 8).tolist() == expected  # independent of the mean and of the scale
    assert cosines_of(CROSS, rows=[2, 0]).tolist() == [expected[2], expected[0]]
    assert cosines_of(CROSS, blocks=[CROSS[:, :1], CROSS[:, 1:]]).tolist() == expected


def test_a_model_equal_to_the_mean_is_similar_to_none() -> None:
    assert cosines_of(np.array([[1.0, 2.0], [1.0, 2.0]])).tolist() == [[0, 0], [0, 0]]
    assert cosines_of(np.array([[2.0], [1.0], [0.0]])).tolist() == [[1, 0, -1], [0, 0, 0], [-1, 0, 1]]


def test_neighbour_weights_follow_similarity_and_samples() -> None:
    own = np.eye(3, dtype=bool)[:1]
    doubled = np.log(2) / SHARPNESS  # this increase of a cosine doubles a weight
    weigh = lambda cosines, samples: neighbour_weights(np.array([cosines]), np.array(samples), own)[0]  # noqa: E731
    assert weigh([1.0, doubled, 0.0], [9.0, 1.0, 1.0]) == pytest.approx([0, 2 / 3, 1 / 3])
    assert weigh([1.0, 0.3, 0.3], [9.0, 1.0, 4.0]) == pytest.approx([0, 1 / 5, 4 / 5])
    assert weigh([1.0, doubled, 0.0], [1.0, 3.0, 2.0]) == pytest.approx([0, 3 / 4, 1 / 4])


def test_a_client_s_own_model_is_no_neighbour_unless_it_is_the_only_one() -> None:
    weights = neighbour_weights(np.zeros((3, 3)), np.array([1.0, 1.0, 2.0]), np.eye(3, dtype=bool))
    third = pytest.approx(1 / 3)
    assert weights.tolist() == [[0, third, pytest.approx(2 / 3)], [third, 0, pytest.approx(2 / 3)], [0.5, 0.5, 0]]
    assert neighbour_weights(np.ones((1, 1)), np.ones(1), np.ones((1, 1), bool)).tolist() == [[1.0]]


@given(st.integers(2, 6), st.integers(0, 2**32 - 1), st.floats(1e-3, 1e6))
def test_weights_of_neighbours_sum_to_one_for_all_models(m, seed, scale) -> None:
    rng = np.random.default_rng(seed)
    models, samples = (scale * rng.standard_normal((m, 5))).astype(np.float32), rng.integers(1, 1000, m).astype(float)
    weights = neighbour_weights(cosines_of(models), samples, np.eye(m, dtype=bool))
    assert (weights >= 0).all() and weights.sum(axis=1) == pytest.approx(1) and not np.diagonal(weights).any()


def test_no_client_counts_more_than_three_times_the_median_one() -> None:
    assert bounded(np.array([1.0, 2.0, 3.0, 1e12])).tolist() == [1, 2, 3, 7.5]
    assert bounded(np.array([40.0, 7.0])).tolist() == [40, 7] and bounded(np.zeros(0)).tolist() == []


def test_rarity_by_hand(monkeypatch) -> None:
    monkeypatch.setattr(held_out, "CONCENTRATIONS", np.array([1.0]))  # Laplace's rule: one more of each class
    assert rarity(np.array([3, 1]), np.zeros(2, int)) == pytest.approx([(4 / 6) / (3 / 4), (2 / 6) / (1 / 4)])
    assert rarity(np.array([3, 0, 1]), np.zeros(3, int)) == pytest.approx([(4 / 7) / (3 / 4), 1, (2 / 7) / (1 / 4)])


def test_a_class_is_rarer_in_training_only_where_classes_are_equally_frequent() -> None:
    trained, held_out = np.array([1, 3, 3, 2, 3, 2, 2]), np.array([2, 0, 0, 1, 0, 1, 1])
    assert rarity(trained, held_out) == pytest.approx(16 / 7 / trained, rel=0.1)  # three of each, by design
    skewed = np.array([200, 50, 20, 5, 1, 1])
    assert rarity(skewed, skewed // 4) == pytest.approx(np.ones(6), abs=0.6)
    assert rarity(skewed, skewed // 4)[:3] == pytest.approx(1, abs=0.05)
    assert rarity(np.array([20, 0]), np.array([5, 0])) == pytest.approx(1, abs=0.05)


def test_the_loss_is_that_of_the_best_temperature() -> None:
    plain, labels = np.ones(2), np.array([0, 1])
    assert calibrated_loss(np.full((2, 2), 0.5), labels, plain) == pytest.approx(2 * np.log(2))
    half_wrong = np.array([[0.9, 0.1], [0.9, 0.1]])  # at temperature 2 the odds of 9 to 1 are 3 to 1
    assert calibrated_loss(half_wrong, labels, plain) == pytest.approx(-np.log(3 / 4) - np.log(1 / 4))
    unsure = np.array([[0.6, 0.4]])  # right, and more certain at temperature 1/8
    assert calibrated_loss(unsure, labels[:1], plain) == pytest.approx(np.log(1 + (2 / 3) ** 8))
    assert calibrated_loss(np.array([[0.5, 0.5]]), labels[:1], np.array([3.0, 1.0])) == pytest.approx(
        np.log(1 + 3.0**-8)
    )
    assert calibrated_loss(np.zeros((0, 2)), labels[:0], plain) == 0


@given(arrays(float, (3, 4), elements=st.floats(0, 1)), st.lists(st.integers(0, 3), min_size=3, max_size=3))
def test_the_loss_is_finite_for_all_predictions(rows, labels) -> None:
    total = rows.sum(axis=1, keepdims=True)
    predictions = np.where(total > 0, rows / np.where(total > 0, total, 1), 1 / 4).astype(np.float32)
    assert 0 <= calibrated_loss(predictions, np.array(labels), np.ones(4)) <= 3 * 12


def test_the_prior_is_the_posterior_mean_of_the_shares_of_clients() -> None:
    assert prevalence(np.zeros((0, 3))) == pytest.approx([1 / 3] * 3)
    assert prevalence(np.zeros((9, 3))) == pytest.approx([1 / 3] * 3)  # clients without evidence say nothing
    sure = -1000.0 * (1 - np.eye(3))  # one model each
    assert prevalence(sure) == pytest.approx([1 / 3] * 3)
    for counts in ((1, 0, 3), (10, 5, 2), (0, 20, 0), (7, 7, 1)):
        expected = (np.array(counts) + 0.5) / (sum(counts) + 1.5)  # of all p, not those of the grid alone
        assert prevalence(np.repeat(sure, counts, axis=0)) == pytest.approx(expected, abs=0.06)
    mean, total = np.zeros(3), 0.0
    for p in GRID:
        density = np.prod(p**-0.5) * p[0] * p[1] ** 2 * (p[0] + np.exp(-1) * (p[1] + p[2]))
        mean, total = mean + density * p, total + density
    some = np.vstack([sure[[0, 1, 1]], [[0.0, -1.0, -1.0]]])
    assert prevalence(some) == pytest.approx(mean / total)
    undecided = np.array([sure[2]] * 9 + [np.zeros(3)])  # a client without evidence does not change it
    assert prevalence(undecided) == pytest.approx(prevalence(undecided[:9]))


def test_weak_evidence_of_many_clients_does_not_exclude_a_model() -> None:
    """Twenty clients for whom one model is a little better, as after the first rounds."""
    weak = np.tile([-0.1, -0.1, 0.0], (20, 1))
    assert prevalence(weak).min() > 0.1
    assert prevalence(np.tile([-3.0, -3.0, 0.0], (20, 1)))[2] > 0.9


@pytest.mark.parametrize("evidence", [-1e9, -5.0, 0.0])
def test_one_client_moves_the_prior_by_its_share_of_clients_at_most(evidence) -> None:
    honest = np.tile([-5.0, -5.0, 0.0], (9, 1))
    without = prevalence(honest)
    assert without[2] > 0.9
    assert (np.abs(prevalence(np.vstack([honest, [[0.0, evidence, evidence]]])) - without) < 1 / 8).all()


def test_shares_follow_prior_and_evidence() -> None:
    assert shares(np.full(3, 1 / 3), np.zeros(3)) == pytest.approx([1 / 3] * 3)
    assert shares(np.array([0.5, 0.25, 0.25]), np.zeros((2, 3))) == pytest.approx(np.array([[0.5, 0.25, 0.25]] * 2))
    assert shares(np.array([0.2, 0.4, 0.4]), np.array([np.log(2), 0, -99])) == pytest.approx([1 / 2, 1 / 2, 0])


def test_a_mixture_has_the_client_s_counters_and_reads_only_what_counts() -> None:
    parts = [
        {"w": np.array([1.0, 3.0], np.float32), "n": np.array(7)},
        {"w": np.array([2.0, -3.0], np.float32), "n": np.array(4)},
        {"w": np.array([np.nan, np.inf], np.float32), "n": np.array(1)},
    ]
    found = combined(parts, np.array([0.25, 0.75, 0.0]))
    assert found["w"].tolist() == [1.75, -1.5] and found["w"].dtype == np.float32 and found["n"] == 7


# --- Rounds by hand -----------------------------------------------------------------------------------

CLIENTS = [
    Client(x, label, count, validation=validation)
    for x, label, count, validation in [
        (1.0, 0, 1, (1.2, 0)),
        (2.0, 0, 3, (1.0, 0)),
        (1.0, 1, 2, (0.7, 1)),
        (1.5, 1, 2, (1.1, 0)),
    ]
]
SAMPLES = np.array([1.0, 3.0, 2.0, 2.0])
FIRST = np.array([0.1, -0.1])
OWN = np.eye(4, dtype=bool)


def by_four(rounds: int, **more) -> Kindred:
    return two_weights.start(Kindred(**more), CLIENTS, FIRST, rounds)


def parts_of(models: np.ndarray) -> np.ndarray:
    """w_i, v_i and g of each client, (4, 3, 2)."""
    neighbours = neighbour_weights(cosines_of(models), SAMPLES, OWN) @ models
    everybody = SAMPLES @ models / SAMPLES.sum()
    return np.stack([models, neighbours, np.tile(everybody, (4, 1))], axis=1)


def losses_of(parts: np.ndarray) -> np.ndarray:
    """Losses of w_i, v_i and g of each client on its validation sample, (4, 3)."""
    found = np.zeros((4, 3))
    for i, client in enumerate(CLIENTS):
        (x, label), counts = client.validation, np.bincount([client.label] * client.count, minlength=2)
        factors = rarity(counts, np.eye(2, dtype=int)[label])
        for k, own in enumerate((True, False, False)):
            predictions = probabilities(parts[i, k], x)[None]
            found[i, k] = calibrated_loss(predictions, np.array([label]), factors if own else np.ones(2))
    return found


def test_two_rounds_by_hand() -> None:
    trained = np.array([client.step(FIRST) for client in CLIENTS])
    one = by_four(1)
    for client, model in one.client_models().items():  # nothing is judged yet
        assert weights_of(model) == pytest.approx(parts_of(trained)[client].mean(axis=0), abs=1e-6)
    two = by_four(2)
    losses = losses_of(parts_of(trained))
    evidence = losses.min(axis=1, keepdims=True) - losses
    starts = np.einsum("ik,ikd->id", shares(np.full(3, 1 / 3), evidence), parts_of(trained))
    again = np.array([client.step(start) for client, start in zip(CLIENTS, starts)])
    personal = np.einsum("ik,ikd->id", shares(prevalence(evidence), evidence), parts_of(again))
    for client, model in two.client_models().items():
        assert weights_of(model) == pytest.approx(personal[client], abs=1e-5)
    assert weights_of(two.global_arrays()) == pytest.approx(SAMPLES @ again / 8, abs=1e-6)
    clients, weights = two.collaboration()
    assert clients == [0, 1, 2, 3] and weights.sum(axis=1) == pytest.approx(1)
    rows = {(row["round"], row["client"]): row for row in two.history.rows}
    for i, client in enumerate(CLIENTS):
        assert rows[2, i]["personal-loss"] == pytest.approx(client.loss(starts[i]), rel=1e-4)


def test_evidence_is_the_mean_of_the_losses_with_less_weight_for_earlier_rounds(monkeypatch) -> None:
    monkeypatch.setattr(kindred, "WORK", 100.0)  # judged in every round
    reported = [np.array([2.0, 0, 0]), np.array([0.0, 3, 3])]
    monkeypatch.setattr(kindred, "judged", lambda visit, *data: reported[visit.config["server-round"] - 2])
    strategy = by_four(3)
    mean = (0.8 * reported[0] + reported[1]) / 1.8
    for evidence in strategy._evidence.values():
        assert evidence == pytest.approx(mean.min() - mean)


def test_more_held_out_samples_than_count_weigh_as_those_that_count(monkeypatch) -> None:
    monkeypatch.setattr(kindred, "COUNTED", 0.25)  # of the one that each client holds out
    monkeypatch.setattr(kindred, "judged", lambda visit, *data: np.array([2.0, 0.0, 3.0]))
    for evidence in by_four(2)._evidence.values():
        assert evidence == pytest.approx([-0.5, 0, -0.75])


def test_a_newcomer_weighs_models_by_their_losses_and_their_predictions_by_hand() -> None:
    never = [[0.0, LARGEST_LOSS]] * 10  # ten samples count as much as the prior, and all speak for the first model
    assert mixing_weights(np.array(never), np.zeros(2)) == pytest.approx([3 / 4, 1 / 4])
    certain, uncertain, always_one = [[1, 0], [0, 1]], [[0.5, 0.5], [0.5, 0.5]], [[0, 1], [0, 1]]
    scores = unlabelled_scores(np.array([certain, uncertain, always_one]))  # ln 2 - 4 * 0, ln 2 - 4 ln 2, 0
    assert scores == pytest.approx([np.log(2), -3 * np.log(2), 0])
    prior = [16 / 25, 1 / 25, 8 / 25]
    assert mixing_weights(np.zeros((0, 3)), scores) == pytest.approx(prior)
    assert mixing_weights(np.ones((7, 3)), scores) == pytest.approx(prior)


@given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.integers(2, 6))
def test_no_other_weights_of_a_newcomer_are_likelier(seed, n, k) -> None:
    rng = np.random.default_rng(seed)
    losses, scores = rng.exponential(2, (n, k)), rng.normal(0, 1, k)
    prior = special.softmax(scores)

    def likelihood(w: np.ndarray) -> float:
        return np.log(np.exp(-losses) @ w).sum() + 10 * prior @ np.log(w)

    found = mixing_weights(losses, scores)
    assert found.sum() == pytest.approx(1) and found.min() > 0
    others = [*rng.dirichlet(np.full(k, 0.5), 20), *rng.dirichlet(1 + 100 * found, 20), prior]
    assert all(likelihood(np.maximum(w, 1e-12)) <= likelihood(found) + 1e-6 for w in others)


def test_a_model_whose_predictions_are_not_finite_has_no_part_for_a_newcomer() -> None:
    newcomer, lost = Constant([]), {"p": np.array(np.nan)}
    found = mixture_metrics(newcomer, [lost, {"p": np.array(0.9)}], np.zeros((0, 2)))
    assert found["log-loss"] == pytest.approx(-np.log(0.9))


class Constant:
    """A newcomer whose models predict the same for every sample: a model is the probability of class 1."""

    objective = Classes()

    def __init__(self, labels: list[int]) -> None:
        labelled = torch.zeros(len(labels), 1), torch.tensor(labels, dtype=torch.int64)
        self.site = SimpleNamespace(train=labelled, test=(torch.zeros(1, 1), torch.tensor([1])))

    def model(self, arrays):
        return float(arrays["p"])

    def predict(self, model, x):
        return np.tile([1 - model, model], (len(x), 1))

    def further(self):
        return ("log-loss",)


def test_a_newcomer_mixes_the_predictions_of_the_clients_models_and_of_its_own_by_hand() -> None:
    """exp(-H) of predictions p and 1 - p is p^p (1 - p)^(1 - p).

    A model that always predicts the same has D = H, and so the score -3 H. Where each model predicts the same for all n
    samples, the weights are (10 prior + n share) / (10 + n), with the share of a sample that a model explains.
    """
    others, own = [{"p": np.array(0.9)}, {"p": np.array(0.2)}], {"p": np.array(0.5)}
    p = np.array([0.9, 0.2, 0.5])
    scores = np.array([0.9**0.9 * 0.1**0.1, 0.2**0.2 * 0.8**0.8, 0.5]) ** 3
    without = mixture_metrics(Constant([]), others, np.zeros((0, 2)))["log-loss"]
    assert without == pytest.approx(-np.log(scores[:2] @ p[:2] / scores[:2].sum()))

    def mixed(models: list, losses: np.ndarray) -> float:
        return np.exp(-mixture_metrics(Constant([1, 1]), models, losses)["log-loss"])  # the probability of class 1

    for models, k in ((others, 2), ([*others, own], 3)):
        found = mixed(models, np.tile(-np.log(p[:k]), (2, 1)))
        prior = scores[:k] / scores[:k].sum()
        w = 10 * prior / (12 - 2 * p[:k] / found)  # from w = (10 prior + 2 w p / found) / 12
        assert w.sum() == pytest.approx(1) and w @ p[:k] == pytest.approx(found)
    unjudged = np.column_stack([np.tile(-np.log(p[:2]), (2, 1)), np.full(2, LARGEST_LOSS)])
    assert mixed([*others, own], unjudged) == pytest.approx(mixed(others, unjudged[:, :2]))


class Learner(Constant):
    """A newcomer whose model moves half of the way to the share of class 1 among its training samples in each epoch."""

    epochs, steps = 1, 0

    def seed(self, purpose):
        return 0

    def samples_at(self, places):
        return tuple(part[places] for part in self.site.train)

    def model(self, arrays):
        module = torch.nn.Module()
        module.register_buffer("p", torch.tensor(float(arrays["p"]), dtype=torch.float64))
        return module

    def train(self, module, *, epochs, steps, samples):
        for _ in range(epochs):
            module.p += (samples[1].double().mean() - module.p) / 2
        return 0.25

    def predict(self, module, x):
        return super().predict(float(module.p), x)

    def evaluation(self, which, module):
        return {f"{which}-p": float(module.p)}

    def counts(self):
        return {"num-examples": len(self.site.train[1])}


def test_a_newcomer_s_own_losses_are_on_samples_that_were_not_trained_on_by_hand() -> None:
    """Each of five samples is left out. Without one of class 1 a model predicts 2/4, without one of class 0 3/4."""
    unseen = newcomers.cross_validation_losses(Learner([1, 0, 1, 0, 1]), {"p": np.array(0.1)}, rounds=60)
    assert unseen == pytest.approx(np.log([2, 4, 2, 4, 2]))
    found = newcomers.cross_validation_losses(Learner([1, 0]), {"p": np.array(0.1)}, rounds=60)
    assert found.tolist() == [LARGEST_LOSS, LARGEST_LOSS]


def test_a_newcomer_trains_from_the_start_that_cross_validation_prefers(monkeypatch) -> None:
    models = [{"p": np.array(0.4)}, {"p": np.array(0.8)}, {"p": np.array(0.2)}]  # the last one is the mean of all
    newcomer = Learner([1, 1, 1])

    def reply(rounds: int) -> tuple[float, dict]:
        content = newcomers.newcomer_reply(newcomer, models, rounds)
        return float(read_record(content["arrays"])["p"]), dict(content["metrics"])

    own, metrics = reply(rounds=1)
    assert own == pytest.approx(0.9) and reply(rounds=2)[0] == pytest.approx(0.95)
    assert metrics["trained-p"] == own and metrics["train-loss"] == 0.25 and metrics["num-examples"] == 3
    losses = np.tile(-np.log([0.4, 0.8, 0.2, 0.9]), (3, 1))  # those of the last as left out: all have class 1
    mixed = mixture_metrics(newcomer, [*models, {"p": np.array(0.9)}], losses)
    assert metrics["mixture-loss"] == pytest.approx(mixed["loss"])
    preferred = {"mean": lambda visit, start, rounds: np.full(3, float(start["p"])), "none": lambda *_: np.full(3, 9.0)}
    for losses_of in preferred.values():
        monkeypatch.setattr(newcomers, "cross_validation_losses", losses_of)
        assert reply(rounds=1)[0] == pytest.approx(0.6)


def test_the_ensemble_has_models_of_a_few_clients(monkeypatch) -> None:
    monkeypatch.setattr(kindred, "MOST", 3)
    strategy = by_four(1)
    received = by_prefix(read_record(strategy.ensemble()))
    assert received["everybody"]["weight"].tolist() == weights_of(strategy.global_arrays()).tolist()
    parts = by_prefix(received["others"])
    all_models = [pytest.approx(weights_of(model).tolist()) for model in strategy.client_models().values()]
    assert list(parts) == ["0", "1", "2"]
    assert all(part["weight"].tolist() in all_models for part in parts.values())


def test_a_client_that_has_never_trained_has_the_mean_of_all() -> None:
    strategy = Kindred(fraction_train=0.5, min_train_nodes=2, seed=1)
    strategy.start(InlineGrid(small_app(), 5), ArrayRecord(small().state_dict()), 1)
    trained = {*strategy._samples}
    models = strategy.client_models()
    assert len(trained) == 2 and list(models) == strategy.clients() and len(models) == 5
    (never, *_) = [client for client in models if client not in trained]
    for name, array in read_record(strategy.global_arrays()).items():
        if array.dtype.kind == "f":  # integer buffers are a client's own
            assert read_record(models[never])[name].tolist() == array.tolist()


def test_mixtures_follow_who_is_alike() -> None:
    """Two groups with contrary labels: each client comes to use the models of its own group."""
    rng = np.random.default_rng(0)
    sites = []
    for i in range(6):
        x = rng.standard_normal((30, 2)).astype(np.float32)
        y = ((x[:, 0] > 0) ^ (i >= 3)).astype(np.int64)
        data = torch.from_numpy(x), torch.from_numpy(y)
        sites.append(replace(small_site(3), train=data, validation=data, test=data))
    strategy = trained_by(sites, 8, **{"local-epochs": 10, "batch-size": 10, "learning-rate": 0.3})
    clients, weights = strategy.collaboration()
    for i in range(6):
        same = np.arange(6) // 3 == i // 3
        assert weights[i, same].sum() > 0.9
    assert strategy.history.rounds[-1]["accuracy"] > 0.9


def test_a_huge_model_of_one_client_leaves_the_others_theirs() -> None:
    def fate(server_round: int, client: int):
        def huge(content) -> None:
            content["arrays"] = two_weights.model([1e14, -1e14])

        return huge if client == 3 else "ok"

    grid = FaultyGrid(two_weights.app_of(CLIENTS), 4, fate)
    strategy = two_weights.start(Kindred(), CLIENTS, FIRST, 4, grid)
    assert strategy.history.refused() == {}
    for i in range(3):
        assert np.abs(weights_of(strategy.client_models()[i])).max() < 10


# --- Cost ---------------------------------------------------------------------------------------------


def test_bytes_are_one_and_a_half_times_those_of_fedavg() -> None:
    def moved(strategy) -> float:
        settings = ConfigRecord(two_weights.SETTINGS)
        strategy.start(InlineGrid(small_app(), MANY), to_record(get_arrays(small())), 8, 60, settings, settings)
        return sum(row["bytes-down"] + row["bytes-up"] for row in strategy.history.rows if row["round"] <= 8)

    # With models this small, names and settings are a large part of the bytes.
    assert 1.3 < moved(Kindred()) / moved(FedAvg()) < 1.7


@pytest.mark.parametrize(
    ("epochs", "steps", "rounds"), [(5, 0, (2, 3, 4, 5, 6, 7)), (1, 0, (2, 5)), (2, 0, (2, 4, 6)), (0, 5, (2, 4, 6))]
)
def test_judging_takes_a_tenth_of_training_at_the_most(epochs, steps, rounds) -> None:
    """36 samples in 4 batches: 20, 4 or 8 steps a round; three predictions of a batch take as long as one step."""
    settings = {"local-epochs": epochs, "local-steps": steps, "batch-size": 10}
    strategy = trained_by([small_site(3)] * 3, 12, **settings)  # 40 samples, of which 4 are held out for six rounds
    judging = {row["round"] for row in strategy.history.rows if row.get("samples-predicted")}
    assert judging == {*rounds}
    predicted = {row["samples-predicted"] for row in strategy.history.rows if row["round"] in judging}
    assert predicted == {3 * 4}


def test_many_held_out_samples_are_judged_more_rarely() -> None:
    """8 steps a round, a tenth of which is for judging; judging three models takes 12 batches, thus 4 steps."""
    site = small_site(3)
    sites = [replace(site, validation=site.train)] * 3
    strategy = trained_by(sites, 12, **{"local-epochs": 2, "batch-size": 10})
    predicted = {row["round"]: row["samples-predicted"] for row in strategy.history.rows if "samples-predicted" in row}
    judging = [number for number, count in predicted.items() if count]
    assert judging == [2, 7, 12] and {predicted[number] for number in judging} == {3 * 40}


# --- Held-out samples ---------------------------------------------------------------------------------


def trained_by(sites, rounds: int, grid=InlineGrid, fate=(), strategy: Kindred | None = None, **settings) -> Kindred:
    app = make_client_app(lambda context: sites[context.node_config["partition-id"]])
    strategy, config = strategy or Kindred(), ConfigRecord({**two_weights.SETTINGS, **settings})
    strategy.start(grid(app, len(sites), *fate), to_record(get_arrays(small())), rounds, 60, config, config)
    return strategy


@pytest.mark.parametrize("own", [True, False])
def test_the_fold_that_is_held_out_changes_when_a_client_starts_from_others_models(monkeypatch, own) -> None:
    left_out: dict[int, list[list[int]]] = {i: [] for i in range(3)}
    trained = LocalTraining.trained

    def recording(visit):
        x, client = visit.site.train[0], visit.client
        missing = set(range(counts[client])) - {int(value) for value in x[:, 0]}
        left_out[client].append(sorted(missing))
        assert len(x) >= 2 and len(missing) == counts[client] - len(x)  # batch normalisation needs two
        return trained(visit)

    def decided(prior, evidence):
        return np.broadcast_to([0.9, 0.1, 0.0] if own else [0.09, 0.91, 0.0], evidence.shape)

    monkeypatch.setattr(LocalTraining, "trained", recording)
    monkeypatch.setattr(kindred, "shares", decided)
    counts, sites = (2, 4, 25), []
    for count in counts:
        site = small_site(3)
        x = torch.arange(count, dtype=torch.float32)[:, None].expand(count, 2)
        sites.append(replace(site, train=(x.clone(), site.train[1][:count])))
    strategy = trained_by(sites, 20)
    assert all(not any(folds[10:]) for folds in left_out.values())  # the second half of the rounds
    assert not any(left_out[0]) and all(len(fold) == 1 for fold in left_out[1][:10])
    if own:  # what its model has learnt by heart is not used to judge it
        assert all(fold == left_out[2][0] != [] for fold in left_out[2][:10])
    else:
        assert sorted(sample for fold in left_out[2] for sample in fold) == list(range(25))
    rows = [row for row in strategy.history.rows if row["round"] <= 20]
    assert all(row["status"] == "ok" and row["num-examples"] == counts[row["client"]] for row in rows)


def test_validation_data_are_held_out_where_there_are_any(monkeypatch) -> None:
    sizes = []
    trained = LocalTraining.trained
    monkeypatch.setattr(
        LocalTraining, "trained", lambda visit: sizes.append(len(visit.site.train[1])) or trained(visit)
    )
    site = small_site(3)
    site = replace(site, validation=(site.train[0][:7], site.train[1][:7]))
    strategy = trained_by([site] * 3, 3)
    assert set(sizes) == {40}
    assert {row.get("samples-predicted", 0) for row in strategy.history.rows if row["round"] == 2} == {3 * 7}


@pytest.mark.parametrize(
    "value",
    [[0.0] * 5, [float("nan")] * 3, [1.0] * 3, ["0"] * 3, [-1e10] * 3, [-1e6] * 3, "none"],
)
def test_malformed_evidence_is_refused(value) -> None:
    def fate(server_round: int, client: int):
        return (lambda content: content["config"].update({"evidence": value})) if client == 1 else "ok"

    strategy = trained_by([small_site(seed) for seed in range(4)], 2, FaultyGrid, (fate,))
    ((client, reasons),) = strategy.history.refused().items()
    assert client == 1 and all(reason.startswith("its evidence are ") for reason in reasons)
    assert {row["client"] for row in strategy.history.rows if "personal-accuracy" in row} == {0, 1, 2, 3}


def test_a_site_stores_the_personal_model_that_the_server_computed(tmp_path) -> None:
    sites = [small_site(seed) for seed in range(3)]
    grid = InlineGrid(make_client_app(lambda context: sites[context.node_config["partition-id"]]), 3)
    for client, context in enumerate(grid._contexts.values()):
        context.node_config["state-dir"] = str(tmp_path / str(client))
    strategy, config = Kindred(), ConfigRecord(two_weights.SETTINGS)
    strategy.start(grid, to_record(get_arrays(small())), 3, 60, config, config)
    for client, record in strategy.client_models().items():
        kept = load_file(next(tmp_path.glob(f"{client}/run-*/client-{client}/model.safetensors")))
        assert {name: array.tobytes() for name, array in kept.items()} == {
            name: array.tobytes() for name, array in read_record(record).items()
        }


# --- Somebody else's ClientApp ------------------------------------------------------------------------


def test_an_ordinary_client_gets_one_model_and_the_prior_s_mixture() -> None:
    strategy = run("kindred")
    assert strategy._prior == pytest.approx([1 / 3] * 3) and strategy._evidence == {}
    assert all(row["status"] == "ok" for row in strategy.history.rows)
    clients, weights = strategy.collaboration()
    assert (np.diagonal(weights) > 1 / 3).all() and weights.sum(axis=1) == pytest.approx(1)


def test_an_absent_client_s_last_model_still_counts() -> None:
    def fate(server_round: int, client: int) -> str:
        return "error" if client == 1 and server_round > 1 else "ok"

    strategy = Kindred()
    strategy.start(FaultyGrid(plain_app(), MANY, fate), initial(), 3, 60)
    clients, weights = strategy.collaboration()
    assert weights[0, 1] > 0


# --- What goes wrong ----------------------------------------------------------------------------------


def test_a_refused_model_is_not_used_by_its_client() -> None:
    def too_large(content) -> None:
        content["arrays"] = two_weights.model([1e20, 0.0])

    trained = np.array([client.step(FIRST) for client in CLIENTS])
    grid = FaultyGrid(two_weights.app_of(CLIENTS), 4, lambda r, c: too_large if (r, c) == (1, 1) else "ok")
    rows = {
        (row["round"], row["client"]): row for row in two_weights.start(Kindred(), CLIENTS, FIRST, 2, grid).history.rows
    }
    assert "refused" in rows[1, 1]["status"]
    others = [0, 2, 3]
    mean = SAMPLES[others] @ trained[others] / SAMPLES[others].sum()
    assert rows[2, 1]["personal-loss"] == pytest.approx(CLIENTS[1].loss(mean), rel=1e-5)  # g, which it received


def test_a_client_that_comes_late_starts_from_the_mean_of_all() -> None:
    trained = np.array([client.step(FIRST) for client in CLIENTS])
    grid = FaultyGrid(two_weights.app_of(CLIENTS), 4, lambda r, c: "error" if (r, c) == (1, 2) else "ok")
    rows = two_weights.start(Kindred(), CLIENTS, FIRST, 2, grid).history.rows
    (row,) = (row for row in rows if (row["round"], row["client"]) == (2, 2))
    others = [0, 1, 3]
    mean = SAMPLES[others] @ trained[others] / SAMPLES[others].sum()
    assert row["personal-loss"] == pytest.approx(CLIENTS[2].loss(mean), rel=1e-5)


def test_a_restarted_strategy_forgets_the_last_run() -> None:
    strategy = Kindred()
    for clients in (MANY, 3):
        strategy.start(InlineGrid(plain_app(), clients), initial(), ROUNDS, 60)
        assert len(strategy.client_models()) == clients
    fresh = Kindred()
    fresh.start(InlineGrid(plain_app(), 3), initial(), ROUNDS, 60)
    for (_, one), (_, other) in zip(fresh.client_models().items(), strategy.client_models().items(), strict=True):
        assert values(one) == values(other)


def test_the_global_mean_is_over_clients_trained_in_the_last_round() -> None:
    strategy = Kindred()
    strategy.start(FaultyGrid(plain_app(), MANY, lambda r, c: "error" if r == 2 and c != 4 else "ok"), initial(), 2, 60)
    assert values(strategy.global_arrays())["layer.weight"] == values(strategy.models[1005])["layer.weight"]


def test_a_client_excluded_later_keeps_its_own_model() -> None:
    strategy = run("kindred")
    own = values(strategy.models[1002])
    strategy.history.left_out[1002] = "it has no data any more"
    assert values(strategy.client_models()[1002]) == own
    assert values(strategy.client_models()[1001]) != values(strategy.models[1001])


def test_a_metric_named_like_a_status_is_kept_as_a_metric() -> None:
    app = plain_app()
    train = app._registered_funcs["train.default"]

    def odd(message, context):
        reply = train(message, context)
        reply.content["metrics"]["odd-status"] = 0.5
        return reply

    app._registered_funcs["train.default"] = odd
    strategy = Kindred()
    strategy.start(InlineGrid(app, MANY), initial(), 2, 60)
    assert strategy.history.refused() == {} and strategy.history.rows[0]["odd-status"] == 0.5


@pytest.mark.parametrize("folds", [10, 5])  # one after the other, with the same seed and samples
def test_folds_divide_the_samples(folds) -> None:
    parts = [fold_of(7, 23, fold, folds) for fold in range(folds)]
    assert sorted(np.concatenate(parts).tolist()) == list(range(23))
    assert {len(part) for part in parts} == {23 // folds, 23 // folds + 1}
    assert fold_of(7, 23, folds + 2, folds).tolist() == parts[2].tolist()


def test_rarity_with_two_concentrations_by_hand(monkeypatch) -> None:
    """The likelihood of 3 and 1 + 2 samples is 3! 3! / 7! = 1 / 140 for alpha 1, and 3! 4! 4! / 9! = 1 / 105 for 2."""
    monkeypatch.setattr("kindred.parts.held_out.CONCENTRATIONS", np.array([1.0, 2.0]))
    first = 3 / 7 * (4 / 6) + 4 / 7 * (5 / 8)  # expected from the training samples alone
    expected = [first / (3 / 4), (1 - first) / (1 / 4)]
    assert rarity(np.array([3, 1]), np.array([0, 2])) == pytest.approx(expected)
