"""Kindred: its steps by hand, what clients probe and report, and how the reported losses steer it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from hypothesis import given, strategies as st
from hypothesis.extra.numpy import arrays
from safetensors.numpy import load_file

from kindred import FedAvg, InlineGrid, Kindred, Site, kindred, make_client_app
from kindred.client.local_training import LocalTraining
from kindred.client.training import get_arrays, set_arrays
from kindred.kindred import (
    GLOBAL_MEAN,
    NEIGHBOUR_MEAN,
    SHARPNESS,
    centred_cosines,
    neighbour_share,
    neighbour_weights,
    neighbours_ahead,
    own_share,
    probe_weights,
    samples_behind,
    start_weights,
)
from kindred.messages import read_record, to_record
from kindred.parts import kindred_places, logit_adjustment
from kindred.parts.kindred_places import PLACES, between, place_probabilities, smoothed_divergence
from kindred.parts.logit_adjustment import Adjustment, log_proportions, output_bias

from . import client_apps, two_weights
from .client_apps import initial, plain_app, small, small_app, small_site
from .grids import FaultyGrid
from .scores import evaluate
from .test_conformance import CLIENTS as MANY, ROUNDS, make, run, values
from .two_weights import Client, weights_of

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


def test_a_client_s_own_model_has_no_weight_in_its_probes() -> None:
    own = np.eye(3, dtype=bool)
    samples = np.array([1.0, 1.0, 2.0])
    neighbours = neighbour_weights(np.zeros((3, 3)), samples, own)
    probes = probe_weights(neighbours, samples, own)
    assert list(probes) == [NEIGHBOUR_MEAN, GLOBAL_MEAN]
    for weights in probes.values():  # no models are similar here: all others are neighbours
        assert weights.tolist() == [
            [0, pytest.approx(1 / 3), pytest.approx(2 / 3)],
            [pytest.approx(1 / 3), 0, pytest.approx(2 / 3)],
            [0.5, 0.5, 0],
        ]


@pytest.mark.parametrize(
    ("neighbours", "everybody", "ahead"),
    [
        ((0.0, 0.0), (0.0, 0.0), 1 / 2),  # nothing is known yet
        ((0.0, 0.5), (0.0, 0.5), 1 / 4),  # both improve equally
        ((0.0, 0.5), (0.0, 0.0), 3 / 4),  # only the neighbour mean improves
        ((-3.0, -2.0), (0.0, 1.0), 1 / 6),  # the same improvement from twenty times the loss
        ((0.5, 0.5), (0.0, 0.0), 1 / 2),  # a lower first loss is not ahead: no loss has fallen
        ((0.0, 0.0), (0.0, 0.5), 1 / 4),  # only the global mean improves
        ((0.0, 0.5), (0.0, 0.25), 1 / 2),  # half the improvement is between the two
        ((0.0, -2.0), (0.0, -1.0), 1 / 2),  # a loss that rises has not fallen
    ],
)
def test_neighbours_are_ahead_by_the_fall_in_loss_that_the_global_mean_lacks(neighbours, everybody, ahead) -> None:
    first, last = (
        {NEIGHBOUR_MEAN: float(np.exp(-neighbours[when])), GLOBAL_MEAN: float(np.exp(-everybody[when]))}
        for when in (0, 1)
    )
    assert neighbours_ahead(first, last) == pytest.approx(ahead)


@pytest.mark.parametrize(
    ("ahead", "share"),
    [
        ([], 1 / 2),
        ([1 / 4], 1 / 10),
        ([3 / 4], 9 / 10),
        ([1 / 4, 1 / 4, 1.0], 1 / 10),
        ([0.0, 1 / 4, 1 / 4], 1 / 10),  # one client is one of many, whatever it reports
        ([1 / 4, 1 / 2, 1 / 4, 1 / 2], 9 / 34),
    ],
)
def test_the_neighbour_share_follows_the_median_of_clients(ahead, share) -> None:
    assert neighbour_share(ahead, 0.0) == pytest.approx(share)


@pytest.mark.parametrize(
    ("ahead", "kept", "share"),
    [
        ([1 / 4], 1 / 3, 1 / 2),
        ([1 / 2], 1 / 2, 9 / 10),
        ([0.0], 1 / 4, 1 / 10),
        ([1 / 4], 1.0, 1.0),
        ([1.0], 0.0, 1.0),
    ],
)
def test_the_neighbour_share_grows_with_the_share_that_clients_keep_of_their_own_models(ahead, kept, share) -> None:
    assert neighbour_share(ahead, kept) == pytest.approx(share)


def test_samples_behind_a_mean_are_counted() -> None:
    samples = np.array([1.0, 1.0, 2.0, 4.0])
    neighbours = np.array([[0, 0.5, 0.5, 0], [0, 0, 0, 1.0], samples / 8, [0, 0, 0, 0]])
    assert samples_behind(neighbours, samples).tolist() == [3, 4, 8, 0]


@pytest.mark.parametrize(("likelihood", "share"), [(1.0, 1 / 4), (1 / 3, 1 / 2), (0.0, 1.0)])
def test_a_client_s_own_share_grows_as_its_neighbours_fit_worse(likelihood, share) -> None:
    samples, neighbours, own = np.array([1.0, 1.0, 2.0]), np.array([[0.0, 0.5, 0.5]]), np.eye(3, dtype=bool)[:1]
    assert own_share(neighbours, samples, own, np.array([likelihood])) == pytest.approx([share])
    assert own_share(0 * neighbours, samples, own, np.array([likelihood])).tolist() == [1]  # it has no neighbour
    assert own_share(neighbours, samples, ~own & False, np.array([likelihood])).tolist() == [0]  # it has no model yet


def test_starts_mix_the_own_neighbour_and_global_models() -> None:
    samples = np.array([1.0, 1.0, 2.0])
    own, neighbours = np.eye(3, dtype=bool)[:1], np.array([[0.0, 0.5, 0.5]])
    start = lambda share, own_share: start_weights(neighbours, samples, own, share, np.array([own_share]))[0]  # noqa: E731
    assert start(0.0, 0.5).tolist() == [0.25, 0.25, 0.5]  # FedAvg's model
    assert start(1.0, 0.5).tolist() == [0.5, 0.25, 0.25]
    assert start(1.0, 0.0).tolist() == [0, 0.5, 0.5]
    assert start(0.5, 0.5).tolist() == [0.375, 0.25, 0.375]


def test_a_client_without_a_model_starts_from_the_global_mean_and_a_single_client_from_its_own_model() -> None:
    samples, nobody = np.array([1.0, 3.0]), np.zeros((1, 2), bool)
    assert start_weights(np.zeros((1, 2)), samples, nobody, 1.0, np.zeros(1)).tolist() == [[0.25, 0.75]]
    alone = np.ones((1, 1), bool)
    assert neighbour_weights(np.ones((1, 1)), np.ones(1), alone).tolist() == [[0.0]]
    assert start_weights(np.zeros((1, 1)), np.ones(1), alone, 0.5, np.ones(1)).tolist() == [[1.0]]


@given(st.integers(2, 6), st.integers(0, 2**32 - 1), st.floats(0, 1), st.floats(1e-3, 1e6), st.floats(0, 1))
def test_starts_are_convex_combinations_for_all_models(m, seed, share, scale, likelihood) -> None:
    rng = np.random.default_rng(seed)
    models, samples = (scale * rng.standard_normal((m, 5))).astype(np.float32), rng.integers(1, 1000, m).astype(float)
    own = np.eye(m, dtype=bool)
    neighbours = neighbour_weights(cosines_of(models), samples, own)
    own_shares = own_share(neighbours, samples, own, np.full(m, likelihood))
    assert ((0 < own_shares) & (own_shares <= 1)).all()
    starts = start_weights(neighbours, samples, own, share, own_shares)
    for weights in (neighbours, starts, *probe_weights(neighbours, samples, own).values()):
        assert (weights >= 0).all() and weights.sum(axis=1) == pytest.approx(1)
    assert not np.diagonal(neighbours).any()


@pytest.mark.parametrize(
    ("losses", "kept"),
    [
        ([0.0] * 5, 1 / 2),  # nothing is known
        ([7.0] * 5, 1 / 2),
        ([0.0, 1e3, 1e3, 1e3, 1e3], 0.0),  # training has only increased the loss
        ([1e30, 1e30, 1e30, 1e30, 0.0], 1.0),
        ([0.0, 1e3, np.log(3), 1e3, 1e3], 1 / 8),  # three to one in favour of 0 against 1/2
        ([1e3, 2.0, 2.0, 2.0, 1e3], 1 / 2),
    ],
)
def test_held_out_samples_decide_the_kept_share(losses, kept) -> None:
    assert place_probabilities(np.full(5, 1 / 5), np.array(losses)) @ PLACES == pytest.approx(kept)


def test_the_best_place_changes_with_a_probability_of_one_percent() -> None:
    sure = np.array([0.0, 0.0, 0.0, 0.0, 1.0])
    again = place_probabilities(sure, np.zeros(5))
    assert again == pytest.approx([0.002, 0.002, 0.002, 0.002, 0.992])
    assert place_probabilities(again, np.zeros(5)) == pytest.approx([*[0.00398] * 4, 0.98408])
    doubted = place_probabilities(sure, np.array([0.0, 99, 99, 99, np.log(496)]))  # the prior was 496 to one
    assert doubted == pytest.approx([0.5, 0, 0, 0, 0.5])


def test_the_fold_loss_is_the_divergence_from_smoothed_labels() -> None:
    # With two classes the label gets 0.85, the other class 0.15.
    label = np.array([0])
    for right in (0.5, 0.85, 0.99, 1.0):
        expected = 0.85 * np.log(0.85 / right) + 0.15 * np.log(0.15 / max(1 - right, 1e-8))
        assert smoothed_divergence(np.array([[right, 1 - right]]), label) == pytest.approx(expected, abs=1e-12)
    both = np.array([[0.15, 0.85], [0.5, 0.5]], np.float32)
    assert smoothed_divergence(both, np.array([1, 0])) == pytest.approx(0.85 * np.log(1.7) + 0.15 * np.log(0.3))
    assert smoothed_divergence(both[:0], np.array([], int)) == 0


@given(arrays(float, (3, 4), elements=st.floats(0, 1)), st.lists(st.integers(0, 3), min_size=3, max_size=3))
def test_the_fold_loss_is_at_most_what_the_server_accepts(rows, labels) -> None:
    total = rows.sum(axis=1, keepdims=True)
    probabilities = np.where(total > 0, rows / np.where(total > 0, total, 1), 1 / 4)
    assert 0 <= smoothed_divergence(probabilities, np.array(labels)) <= 3 * kindred_places.LARGEST_FOLD_LOSS


@pytest.mark.parametrize("classes", [1, 2, 10, 1000])
def test_confident_wrong_predictions_stay_within_the_bound(classes) -> None:
    wrong = np.eye(classes, dtype=np.float32)[:1]
    assert 0 <= smoothed_divergence(wrong, np.array([classes - 1])) <= -np.log(1e-8) < kindred_places.LARGEST_FOLD_LOSS


def test_log_proportions_by_hand(monkeypatch) -> None:
    monkeypatch.setattr(logit_adjustment, "CONCENTRATIONS", np.array([1.0]))  # Laplace's rule: one more of each class
    assert log_proportions(np.array([3, 0])) == pytest.approx(np.log([2 * 4 / 5, 2 * 1 / 5]))
    assert log_proportions(np.array([1, 4, 1])) == pytest.approx(np.log([3 * 2 / 9, 3 * 5 / 9, 3 * 2 / 9]))
    monkeypatch.setattr(logit_adjustment, "CONCENTRATIONS", np.array([1.0, 2.0]))
    # The likelihoods of the two concentrations are 1/3 and 3/10 for two samples.
    expected = (10 * (3 / 4) + 9 * (4 / 6)) / 19
    assert log_proportions(np.array([2, 0])) == pytest.approx(np.log([2 * expected, 2 * (1 - expected)]))


def test_estimated_class_skew_depends_on_the_number_of_samples() -> None:
    assert log_proportions(np.zeros(10, int)) == pytest.approx(np.zeros(10))
    assert log_proportions(np.full(4, 25)) == pytest.approx(np.zeros(4))
    chance = log_proportions(np.array([6, 4, 3, 5, 2, 4, 5, 3, 4, 4]))  # as uneven as expected by chance
    assert np.abs(chance).max() < 0.2
    few, many = (log_proportions(np.array([n, n] + [0] * 8)) for n in (1, 20))
    for two in (few, many):
        assert (two[:2] > 0).all() and (two[2:] < 0).all()
    assert many[9] < few[9] - 2  # a class missing in 40 samples is estimated as rarer than one missing in 2


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=100))
def test_log_proportions_are_valid_for_all_counts(counts) -> None:
    found = log_proportions(np.array(counts))
    assert np.exp(found).mean() == pytest.approx(1)
    assert (np.diff(found[np.argsort(counts, kind="stable")]) >= -1e-12).all()


class HeadFirst(torch.nn.Module):
    """Registers its last layer before the others, all of the same width, and scales its output."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.head, self.body, self.scale = torch.nn.Linear(3, 3), torch.nn.Linear(2, 3), scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self.head(self.body(x).relu())


@pytest.mark.parametrize(
    ("model", "found"),
    [
        (torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 3)), "2.bias"),
        (torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)), "1.bias"),
        (torch.nn.Sequential(torch.nn.Unflatten(1, (2, 1, 1)), torch.nn.Conv2d(2, 3, 1), torch.nn.Flatten()), "1.bias"),
        (torch.nn.Linear(2, 3, bias=False), None),
        (torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 3, bias=False)), None),
        (torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.LogSoftmax(dim=1)), None),
        (HeadFirst(1.0), "head.bias"),
        (HeadFirst(2.0), None),
        (two_weights.TwoWeights(), None),
    ],
)
def test_the_output_bias_is_found_in_any_layer_order(model, found) -> None:
    model.train()
    x = torch.tensor([[1.0]]) if isinstance(model, two_weights.TwoWeights) else torch.tensor([[0.3, -2.0]])
    before = get_arrays(model)
    assert output_bias(model, x) == found
    assert model.training and all((array == before[name]).all() for name, array in get_arrays(model).items())
    if found:
        model.eval()
        logits = model(x)
        set_arrays(model, Adjustment(found, np.array([1.0, -2.0, 0.5])).added(before))
        assert (model(x) - logits)[0].tolist() == pytest.approx([1.0, -2.0, 0.5], abs=1e-6)


def test_removing_an_adjustment_reverses_adding_it() -> None:
    model = {"fc.weight": np.ones((2, 3), np.float16), "fc.bias": np.array([1.0, 2.0], np.float16)}
    adjustment = Adjustment("fc.bias", np.array([0.5, -0.5]))
    found = adjustment.added(model)
    assert found["fc.bias"].tolist() == [1.5, 1.5] and found["fc.bias"].dtype == np.float16
    assert found["fc.weight"] is model["fc.weight"] and model["fc.bias"].tolist() == [1, 2]
    assert adjustment.removed(found)["fc.bias"].tolist() == [1, 2]
    assert adjustment.report() == {"output-bias": "fc.bias", "logit-adjustment": [0.5, -0.5]}
    assert Adjustment().added(model) == model and Adjustment().report() == {}


def test_a_personal_model_interpolates_parameters_and_has_the_client_s_counters() -> None:
    found = between(
        {"w": np.array([1.0, 3.0], np.float32), "n": np.array(7)},
        {"w": np.array([2.0, -3.0], np.float32), "n": np.array(4)},
        0.25,
    )
    assert found["w"].tolist() == [1.25, 1.5] and found["w"].dtype == np.float32 and found["n"] == 4


# --- Rounds by hand -----------------------------------------------------------------------------------

CLIENTS = [
    Client(x, label, count, smoothing=0.1) for x, label, count in [(1.0, 0, 1), (2.0, 0, 3), (1.0, 1, 2), (1.5, 1, 2)]
]
SAMPLES = np.array([1.0, 3.0, 2.0, 2.0])
FIRST = np.array([0.1, -0.1])
OWN = np.eye(4, dtype=bool)


def by_four(rounds: int, **more) -> Kindred:
    return two_weights.start(Kindred(**more), CLIENTS, FIRST, rounds)


def reported_likelihoods(models: np.ndarray) -> dict[str, np.ndarray]:
    """Likelihoods exp(-l(v_i)) and exp(-l(g_i)) that clients report."""
    return {
        probe: np.exp([-client.loss(row @ models) for client, row in zip(CLIENTS, weights)])
        for probe, weights in probes_of(models).items()
    }


def next_starts(
    models: np.ndarray, share: float, judged: np.ndarray | None = None, before: np.ndarray | None = None, ahead=0.0
) -> np.ndarray:
    """Starts u_i when clients have reported losses of the v_i of `judged` and had the models `before`."""
    reported = np.ones(4) if judged is None else reported_likelihoods(judged)[NEIGHBOUR_MEAN]
    neighbours = probes_of(models)[NEIGHBOUR_MEAN]
    starts = start_weights(neighbours, SAMPLES, OWN, share, own_share(neighbours, SAMPLES, OWN, reported)) @ models
    return starts if before is None else starts + (1 - share) * ahead * SAMPLES @ (models - before) / SAMPLES.sum()


def history_values(strategy: Kindred, name: str) -> list[float]:
    """Values of a field of the history, for the rounds that have it."""
    return [line[name] for line in strategy.history.rounds if name in line]


def probes_of(models: np.ndarray) -> dict[str, np.ndarray]:
    return probe_weights(neighbour_weights(cosines_of(models), SAMPLES, OWN), SAMPLES, OWN)


@pytest.fixture
def kept(monkeypatch) -> float:
    """Fix t at 0.25 from the first reported losses on, whatever they are."""
    monkeypatch.setattr(kindred_places, "place_probabilities", lambda before, losses: np.eye(5)[1])
    return 0.25


def test_two_rounds_by_hand() -> None:
    trained = np.array([client.step(FIRST) for client in CLIENTS])
    one = by_four(1)
    halfway = (next_starts(trained, 0.5) + trained) / 2  # reports of the first round count from the next on
    for client, model in one.client_models().items():
        assert weights_of(model) == pytest.approx(halfway[client], abs=1e-6)
    two = by_four(2)
    starts = next_starts(trained, 0.5, judged=trained)
    again = np.array([client.step(start) for client, start in zip(CLIENTS, starts)])
    personal = (next_starts(again, 0.5, judged=trained) + again) / 2
    for client, model in two.client_models().items():
        assert weights_of(model) == pytest.approx(personal[client], abs=1e-6)
    assert weights_of(two.global_arrays()) == pytest.approx(SAMPLES @ again / 8, abs=1e-6)
    clients, weights = two.collaboration()
    assert clients == [0, 1, 2, 3] and weights @ trained == pytest.approx(starts, abs=1e-6)


def test_clients_train_on_smoothed_labels_with_a_proximal_term() -> None:
    strategy = Kindred()
    settings = ConfigRecord({**two_weights.SETTINGS, "local-epochs": 2})
    strategy.start(InlineGrid(two_weights.app_of(CLIENTS), 4), two_weights.model(FIRST), 1, 60, settings, settings)
    for i, client in enumerate(CLIENTS):
        once = client.step(FIRST)
        twice = client.step(once) - two_weights.RATE * 0.01 * (once - FIRST)
        assert weights_of(strategy.models[i]) == pytest.approx(twice, abs=1e-7)


def test_the_kept_share_is_estimated_from_held_out_samples(monkeypatch) -> None:
    """Clients of three samples or more hold one out in every second round, and report it in the next."""
    reported = []

    def recording(before, losses):
        reported.append((before, losses, place_probabilities(before, losses)))
        return reported[-1][-1]

    monkeypatch.setattr(kindred_places, "place_probabilities", recording)
    strategy = by_four(7)
    trained = np.array([client.step(FIRST) for client in CLIENTS])
    starts = next_starts(trained, 0.5, judged=trained)
    again = np.array([client.step(start) for client, start in zip(CLIENTS, starts)])
    # The model received in round 3, and the one trained in round 2.
    new, mine = next_starts(again, 0.5, judged=trained, before=trained, ahead=0.5)[1], again[1]
    way = [(1 - place) * new + place * mine for place in PLACES]
    (first, losses, second), (before, _, third) = reported
    assert first.tolist() == [0.2] * 5 and before.tolist() == second.tolist()
    right = [np.exp(-CLIENTS[1].loss(w)) for w in way]
    assert losses == pytest.approx([0.85 * np.log(0.85 / p) + 0.15 * np.log(0.15 / (1 - p)) for p in right], abs=1e-6)
    assert history_values(strategy, "kept-share")[:7] == pytest.approx(  # reports count from the next round on
        [0.5] * 3 + [second @ PLACES] * 2 + [third @ PLACES] * 2
    )
    trained_on = {
        row["round"]: row["samples-trained"]
        for row in strategy.history.rows
        if row["client"] == 1 and row["round"] <= 7
    }
    assert trained_on == {1: 3, 2: 2, 3: 3, 4: 2, 5: 3, 6: 3, 7: 3}  # round 6: no later round would use a report


def test_neighbour_and_global_means_are_probed_in_every_second_round() -> None:
    trained = np.array([client.step(FIRST) for client in CLIENTS])
    strategy = by_four(4)
    neighbours = neighbour_weights(cosines_of(trained), SAMPLES, OWN)
    rows = {(row["round"], row["client"]): row for row in strategy.history.rows}
    for probe, weights in probe_weights(neighbours, SAMPLES, OWN).items():
        for i, client in enumerate(CLIENTS):
            assert rows[1, i][f"{probe}-loss"] == pytest.approx(client.loss(weights[i] @ trained), rel=1e-5)
            assert f"{probe}-loss" in rows[3, i] and f"{probe}-loss" not in rows[2, i]
    assert not any("kin-loss" in row for row in by_four(3).history.rows if row["round"] == 3)  # it would be unused
    shares = history_values(strategy, "kin-share")
    assert shares[:3] == [0.5] * 3  # until a second probe can be compared with the first
    reported = [
        [{probe: rows[r, i][f"{probe}-loss"] for probe in (NEIGHBOUR_MEAN, GLOBAL_MEAN)} for r in (1, 3)]
        for i in range(4)
    ]
    ahead = [neighbours_ahead(*losses) for losses in reported]
    z = 1 - (1 - np.median(ahead)) * (1 - history_values(strategy, "kept-share")[3])
    assert shares[3] == pytest.approx(z**2 / (z**2 + (1 - z) ** 2))
    assert neighbour_share(ahead, 0.0) > 0.6


def test_clients_report_the_loss_of_the_personal_model(kept) -> None:
    strategy = by_four(4)
    first = np.array([client.step(FIRST) for client in CLIENTS])
    starts = {2: next_starts(first, 0.5, judged=first)}
    second = np.array([client.step(start) for client, start in zip(CLIENTS, starts[2])])
    starts[3] = next_starts(second, 0.5, judged=first, before=first, ahead=0.5)
    third = np.array([client.step(start) for client, start in zip(CLIENTS, starts[3])])
    starts[4] = next_starts(third, history_values(strategy, "kin-share")[3], judged=third, before=second, ahead=0.5)
    rows = {(row["round"], row["client"]): row for row in strategy.history.rows}
    for i, client in enumerate(CLIENTS):
        assert rows[1, i]["personal-loss"] == pytest.approx(client.loss(FIRST), rel=1e-5)  # it has no other model yet
        for number, last, t in ((2, first, 0.5), (3, second, 0.5), (4, third, kept)):
            personal = (1 - t) * starts[number][i] + t * last[i]
            assert rows[number, i]["personal-loss"] == pytest.approx(client.loss(personal), rel=1e-5)


def test_nothing_is_probed_without_evaluations_or_with_a_single_client() -> None:
    for strategy in (
        by_four(3, fraction_evaluate=0),
        two_weights.start(Kindred(min_available_nodes=1), CLIENTS[:1], FIRST, 3),
    ):
        assert not any("kin-loss" in row for row in strategy.history.rows)
        assert strategy._share == 0.5
    first = CLIENTS[0].step(FIRST)
    second = CLIENTS[0].step(first)
    third = CLIENTS[0].step(second + 0.5 * 0.5 * (second - first))  # a single client is the global mean too
    assert weights_of(strategy.client_models()[0]) == pytest.approx(third, abs=1e-6)


def test_momentum_of_the_global_mean_moves_parameters_alone(monkeypatch) -> None:
    """It enters starts and personal models in proportion, and fully for a client that has no model yet."""
    monkeypatch.setattr(kindred, "neighbour_share", lambda ahead, kept: 0.75)
    strategy = trained_by(
        [small_site(seed) for seed in range(3)], 4, FaultyGrid, (lambda r, c: "error" if c == 2 else "ok",)
    )
    step = np.arange(strategy.layout.num_parameters, dtype=np.float32)

    def floats(record) -> np.ndarray:
        row = np.empty(strategy.layout.size, np.float32)
        strategy.layout.flatten(read_record(record), row)
        return row

    assert strategy._momentum.moved is None  # the run is over
    plain = [floats(record) for _, record in strategy.outgoing(5, range(3))]
    personal = [floats(record) for record in strategy.personal_models(range(3))]
    strategy._momentum.moved = 2 * step
    kept = strategy._places.mean
    for before, after, share in (
        (plain, [floats(record) for _, record in strategy.outgoing(5, range(3))], 0.25),
        (personal, [floats(record) for record in strategy.personal_models(range(3))], 0.25 * (1 - kept)),
    ):
        for client, expected in enumerate((share, share, 1.0)):
            moved = after[client] - before[client]
            assert moved[: len(step)] == pytest.approx(expected * step, rel=1e-3, abs=1e-4)
            assert not moved[len(step) :].any() and len(moved) > len(step)  # running statistics


def test_momentum_stays_within_the_range_of_float16() -> None:
    sent = []

    def train(message, context):
        server_round = message.content["config"]["server-round"]
        (array,) = read_record(message.content["arrays"]).values()
        sent.append((server_round, float(array[0])))
        trained = to_record({"weight": np.full(2, min(20_000 + 40_000 * (server_round - 1), 60_000), np.float16)})
        return Message(RecordDict({"arrays": trained, "metrics": MetricRecord({"num-examples": 1})}), reply_to=message)

    app = plain_app()
    app._registered_funcs["train.default"] = train
    strategy = Kindred(fraction_evaluate=0)
    strategy.start(InlineGrid(app, 4), to_record({"weight": np.zeros(2, np.float16)}), 10, 60)
    # In the third round 60,000 + 40,000 / 4 exceeds the range of float16; nothing moves from then on.
    assert sent == [
        (number, value)
        for number, value in [(1, 0), (2, 20_000), (3, 65_504), *((r, 60_000) for r in range(4, 11))]
        for _ in range(4)
    ]


@pytest.mark.parametrize(
    ("fate", "share", "last"),
    [
        (lambda r, c: "ok", 1.0, 3),
        (lambda r, c: "error" if r == 3 and c == 1 else "ok", 1.0, 3),  # the others also took part before
        (lambda r, c: "error" if r == 2 and c == 1 else "ok", 5 / 8, 3),  # it has 3 of 8 samples
        (lambda r, c: "error" if (r == 2) == (c < 2) else "ok", 0.0, 3),
        (lambda r, c: "error" if r == 3 else "ok", 1.0, 2),  # nothing has changed
        (lambda r, c: "error" if r == 4 else "ok", 1.0, 3),
    ],
)
def test_momentum_is_scaled_by_the_fraction_of_clients_of_both_rounds(monkeypatch, fate, share, last) -> None:
    found = {}
    end_round = Kindred.end_round

    def recording(self, server_round, answered):
        end_round(self, server_round, answered)
        found[server_round] = (weights_of(self.global_arrays()), self._momentum.moved)

    monkeypatch.setattr(Kindred, "end_round", recording)
    two_weights.start(Kindred(), CLIENTS, FIRST, 4, FaultyGrid(two_weights.app_of(CLIENTS), 4, fate))
    means = {number: mean for number, (mean, _) in found.items()}
    assert found[1][1] is None and found[4][1] is None  # no momentum after the last round, whoever replied
    assert found[3][1] == pytest.approx(share * (means[last] - means[last - 1]), abs=1e-6)


@pytest.mark.parametrize("store", ["memory", "disk"])
def test_a_run_ends_with_the_mean_of_the_last_two_models(monkeypatch, store) -> None:
    def fate(server_round: int, client: int) -> str:
        return "error" if (server_round, client) in ((9, 1), (10, 2)) else "ok"

    def models_of(tail: int) -> dict[int, np.ndarray]:
        monkeypatch.setattr(kindred, "TAIL", tail)
        ends.clear()
        two_weights.start(Kindred(store=store), CLIENTS, FIRST, 10, FaultyGrid(two_weights.app_of(CLIENTS), 4, fate))
        return dict(ends)

    ends: dict[int, np.ndarray] = {}
    end_round = Kindred.end_round

    def recording(self, server_round, answered):
        end_round(self, server_round, answered)
        ends[server_round] = np.array([weights_of(record) for _, record in sorted(self.models.items())])

    monkeypatch.setattr(Kindred, "end_round", recording)
    plain, found = models_of(11), models_of(10)
    assert (found[9] == plain[9]).all()
    mean = (plain[9] + plain[10]) / 2
    assert np.abs(mean[0] - plain[10][0]).max() > 1e-4
    # A client absent in round 9 has the last model alone; one absent in round 10 has that of round 9.
    expected = [mean[0], plain[10][1], plain[9][2], mean[3]]
    assert found[10] == pytest.approx(np.array(expected), abs=1e-6)


# --- Cost ---------------------------------------------------------------------------------------------


def test_bytes_are_one_and_a_half_times_those_of_fedavg() -> None:
    def moved(strategy) -> float:
        settings = ConfigRecord(two_weights.SETTINGS)
        strategy.start(InlineGrid(small_app(), MANY), to_record(get_arrays(small())), 8, 60, settings, settings)
        return sum(row["bytes-down"] + row["bytes-up"] for row in strategy.history.rows if row["round"] <= 8)

    # With models this small, the settings are a tenth of the bytes.
    assert 1.4 < moved(Kindred()) / moved(FedAvg()) < 1.62


@pytest.mark.parametrize(("epochs", "steps", "share"), [(1, 0, 0.2), (2, 0, 0.4), (5, 0, 1.0), (0, 2, 0.2)])
def test_probes_cost_a_fifteenth_of_the_work_of_training(epochs, steps, share) -> None:
    """Every second round has two probes. A prediction costs a third of a step: all probes are a fifteenth of training.

    The other rounds hold out at most a tenth of the samples. The next round predicts these at five places: together a
    fifteenth of a round's training.
    """

    def site(context) -> Site:
        return small_site(3)  # 40 samples

    settings = ConfigRecord({**two_weights.SETTINGS, "local-epochs": epochs, "local-steps": steps, "batch-size": 20})
    strategy = Kindred()
    strategy.start(InlineGrid(make_client_app(site), 3), to_record(get_arrays(small())), 6, 60, settings)
    worked = {
        number: [row["samples-predicted"] for row in strategy.history.rows if row["round"] == number]
        for number in range(1, 7)
    }
    probes, places = 2 * share * 40, 5 * min(4, share * 40 // 5)
    assert worked == {
        1: [probes] * 3,
        2: [0] * 3,
        3: [probes + places] * 3,
        4: [0] * 3,
        5: [probes + places] * 3,
        6: [0] * 3,
    }


# --- Held-out samples and logit adjustment ------------------------------------------------------------


def trained_by(sites, rounds: int, grid=InlineGrid, fate=(), strategy: Kindred | None = None, **settings) -> Kindred:
    app = make_client_app(lambda context: sites[context.node_config["partition-id"]])
    strategy, config = strategy or Kindred(), ConfigRecord({**two_weights.SETTINGS, **settings})
    strategy.start(grid(app, len(sites), *fate), to_record(get_arrays(small())), rounds, 60, config, config)
    return strategy


def test_every_sample_is_held_out_once_in_twenty_rounds(monkeypatch) -> None:
    left_out: dict[int, list[int]] = {i: [] for i in range(3)}
    trained = LocalTraining.trained

    def recording(visit):
        x, (server_round, client) = visit.site.train[0], (visit.config["server-round"], visit.client)
        missing = set(range(counts[client])) - {int(value) for value in x[:, 0]}
        left_out[client] += missing
        assert len(x) >= 2 and len(missing) == counts[client] - len(x)  # batch normalisation needs two
        assert server_round % 2 == 0 or not missing
        return trained(visit)

    monkeypatch.setattr(LocalTraining, "trained", recording)
    counts, sites = (2, 4, 25), []
    for count in counts:
        site = small_site(3)
        x = torch.arange(count, dtype=torch.float32)[:, None].expand(count, 2)
        sites.append(replace(site, train=(x.clone(), site.train[1][:count])))
    strategy = trained_by(sites, 22, **{"local-epochs": 5})
    assert left_out[0] == [] and sorted(left_out[1]) == list(range(4)) and sorted(left_out[2]) == list(range(25))
    rows = [row for row in strategy.history.rows if row["round"] <= 22]
    assert all(row["status"] == "ok" and row["num-examples"] == counts[row["client"]] for row in rows)


def test_few_steps_hold_few_samples_out() -> None:
    strategy = trained_by([small_site(9)] * 3, 4, **{"local-epochs": 0, "local-steps": 5, "batch-size": 10})
    worked = [row for row in strategy.history.rows if row["round"] == 3]
    # A fifteenth of the training on 50 samples each.
    assert [row["samples-predicted"] for row in worked] == [2 * 10 + 5 * 2] * 3


def test_a_site_that_returns_with_fewer_samples_reports_those_it_has(monkeypatch) -> None:
    """These may be more than a tenth of its present samples."""
    train, reported = kindred.KindredClient.train, []

    def fewer(visit):
        if visit.config["server-round"] > 2:
            x, y = visit.site.train
            visit = replace(visit, site=replace(visit.site, train=(x[:180], y[:180])))
        content = train(visit)
        reported.append(content["config"].get("fold-samples", 0))
        return content

    monkeypatch.setattr(kindred.KindredClient, "train", staticmethod(fewer))
    site = small_site(3)
    site = replace(site, train=(site.train[0].repeat(5, 1), site.train[1].repeat(5)))  # 200
    strategy = trained_by([site] * 6, 4, **{"local-epochs": 5, "batch-size": 20})
    assert 18 < max(reported) <= 20 and any(0 < count < 20 for count in reported)
    assert strategy.history.refused() == {}


def test_losses_are_used_also_with_another_weighted_by_key() -> None:
    strategy = trained_by(
        [small_site(3)] * 3,
        5,
        strategy=Kindred(weighted_by_key="num-test-examples"),
        **{"local-epochs": 5, "batch-size": 20},
    )  # 5 test samples, and 4 of 40 held out
    reported = [kept != 0.5 for kept in history_values(strategy, "kept-share")]
    assert reported[:5] == [False] * 3 + [True] * 2


def test_models_travel_unadjusted_and_personal_models_are_adjusted() -> None:
    """The learning rate is so small that nobody learns: models differ only by the adjustment."""
    sites = [replace(small_site(3), train=(small_site(3).train[0], torch.full((40,), label))) for label in (0, 1, 1)]
    strategy = trained_by(sites, 2, **{"learning-rate": 1e-12})
    initial_bias = get_arrays(small())
    name = list(initial_bias)[-1]
    for client, label in enumerate((0, 1, 1)):
        counts = np.zeros(len(initial_bias[name]), int)
        counts[label] = 40
        expected = log_proportions(counts) / 2
        assert read_record(strategy.models[client])[name] == pytest.approx(initial_bias[name], abs=1e-5)
        personal = read_record(strategy.client_models()[client])[name]
        assert personal - initial_bias[name] == pytest.approx(expected, abs=1e-5)
    assert read_record(strategy.global_arrays())[name] == pytest.approx(initial_bias[name], abs=1e-5)
    closing = {row["client"]: row for row in strategy.history.rows if row["round"] == 3}
    before = {row["client"]: row for row in strategy.history.rows if row["round"] == 2}
    for client in range(3):  # the same adjustment by client or server; only running statistics have changed
        assert closing[client]["personal-loss"] == pytest.approx(before[client]["between-loss"], rel=0.02)


def test_a_client_that_never_trained_adjusts_the_received_model() -> None:
    sites = [replace(small_site(3), train=(small_site(3).train[0], torch.full((40,), label))) for label in (0, 1, 1, 2)]
    strategy = trained_by(sites, 2, FaultyGrid, (lambda r, c: "error" if c == 3 and r <= 2 else "ok",))
    (closing,) = (row for row in strategy.history.rows if row["round"] == 3 and row["client"] == 3)
    model = small()
    name = output_bias(model, sites[3].train[0])
    adjustment = Adjustment(name, log_proportions(np.array([0, 0, 40])) / 2)
    set_arrays(model, adjustment.added(read_record(strategy.global_arrays())))
    assert closing["personal-loss"] == pytest.approx(evaluate(model, *sites[3].test)[1], rel=1e-5)


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


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("logit-adjustment", [0.0]),
        ("logit-adjustment", "none"),
        ("logit-adjustment", [float("nan")] * 3),
        ("logit-adjustment", [1e3] * 3),
        ("output-bias", "nowhere"),
        ("output-bias", 1),
        ("output-bias", ["hidden.bias"]),
        ("output-bias", "hidden.weight"),
        ("output-bias", "norm.running_mean"),
        ("fold-losses", [1.0] * 4),
        ("fold-losses", [float("nan")] * 5),
        ("fold-losses", [-1.0] * 5),
        ("fold-losses", ["1"] * 5),
        ("fold-losses", [21.0] * 5),
        ("fold-samples", 0),
        ("fold-samples", 1.5),
        ("fold-samples", 1e300),
        ("fold-samples", float("inf")),
        ("fold-samples", True),
        ("fold-samples", [1]),
        ("fold-samples", "1"),
    ],
)
def test_malformed_reports_are_refused(key, value) -> None:
    sites = [small_site(seed) for seed in range(4)]
    app = make_client_app(lambda context: sites[context.node_config["partition-id"]])
    train = app._registered_funcs["train.default"]

    def odd(message, context):
        reply = train(message, context)
        if context.node_config["partition-id"] == 1:
            folds = {"fold-losses": [1.0] * 5, "fold-samples": 1}
            reply.content["config"].update((folds if key in folds else {}) | {key: value})
        return reply

    app._registered_funcs["train.default"] = odd
    strategy, config = Kindred(), ConfigRecord(two_weights.SETTINGS)
    strategy.start(InlineGrid(app, 4), to_record(get_arrays(small())), 2, 60, config, config)
    ((client, reasons),) = strategy.history.refused().items()
    assert client == 1 and all(reason.startswith((f"its {key} are ", f"its {key} is ")) for reason in reasons)
    assert {row["client"] for row in strategy.history.rows if "personal-accuracy" in row} == {0, 1, 2, 3}


def test_unrequested_fold_losses_are_ignored() -> None:
    def run_with_reports(rounds: int) -> Kindred:
        def fate(server_round, client):
            def report_folds(content) -> None:
                content["config"].update({"fold-losses": [20.0, 20.0, 20.0, 20.0, 0.0], "fold-samples": 1})

            return report_folds if client == 1 else "ok"

        return trained_by([small_site(seed) for seed in range(3)], rounds, FaultyGrid, (fate,))

    assert run_with_reports(3)._places.mean == 0.5
    kept_shares = history_values(run_with_reports(4), "kept-share")
    assert kept_shares[:3] == [0.5] * 3 and kept_shares[3] > 0.9  # its report in round 3 on the samples of round 2


def test_a_kept_share_of_one_removes_the_global_mean(monkeypatch) -> None:
    """t is estimated from all held-out samples, and has no effect until some are reported."""
    monkeypatch.setattr(kindred, "neighbours_ahead", lambda first, last: 0.5)
    keep, drop = [20.0, 20.0, 20.0, 20.0, 0.0], [0.0, 20.0, 20.0, 20.0, 20.0]
    reported = {(3, 0): (drop, 1), (3, 1): (keep, 2), (5, 0): (drop, 2)}  # (round, client) -> losses, samples

    def fate(server_round, client):
        def report_folds(content) -> None:
            for key in ("fold-losses", "fold-samples"):
                content["config"].pop(key, None)
            if (server_round, client) in reported:
                losses, samples = reported[server_round, client]
                content["config"].update({"fold-losses": [samples * loss for loss in losses], "fold-samples": samples})

        return report_folds

    strategy = trained_by([small_site(3)] * 3, 8, FaultyGrid, (fate,))
    assert strategy.history.refused() == {}
    found = {
        line["round"]: (line["kept-share"], line["kin-share"])
        for line in strategy.history.rounds
        if "kin-share" in line
    }
    assert found[3] == (0.5, 0.5)
    assert found[4] == (pytest.approx(1, abs=1e-6), pytest.approx(1, abs=1e-6))
    assert found[6] == (pytest.approx(0, abs=1e-6), pytest.approx(0.5, abs=1e-6))


# --- Somebody else's ClientApp ------------------------------------------------------------------------


def test_an_ordinary_client_reports_the_losses_of_its_evaluations(monkeypatch) -> None:
    # Two groups: on a line, the global mean would suit clients in the middle.
    monkeypatch.setattr(client_apps, "target", lambda client: np.full((2, 2), client // 3 * 5, np.float32))
    strategy = run("kindred")
    rows = strategy.history.rows
    assert len(rows) == ROUNDS * MANY
    for row in rows:
        assert ("kin-loss" in row and "all-loss" in row) == (row["round"] % 2 == 1)
        assert row["personal-accuracy"] == row["eval_acc"]  # of its own model, not of a probed one
    last = [row for row in rows if row["round"] == 3]
    assert sum(row["kin-loss"] for row in last) < sum(row["all-loss"] for row in last)
    shares = [line["kin-share"] for line in strategy.history.rounds]
    assert shares[:3] == [0.5] * 3 and shares[3] > 0.6
    clients, weights = strategy.collaboration()
    for i in range(MANY):  # its neighbours are on its side of the mean
        same = np.arange(MANY) // 3 == i // 3
        assert weights[i, same].sum() > 2 * weights[i, ~same].sum()


def test_ordinary_clients_that_are_similar_come_to_follow_the_global_mean(monkeypatch) -> None:
    """They hold no samples out: t is unknown and has no effect on a."""
    monkeypatch.setattr(client_apps, "target", lambda client: np.ones((2, 2), np.float32))
    strategy = Kindred()
    strategy.start(InlineGrid(plain_app(), MANY), initial(), 6, 60)
    assert strategy._share < 0.1 and strategy._places.mean == 0.5


@pytest.mark.parametrize("loss", [None, float("nan"), float("inf")])
def test_a_client_without_a_finite_loss_is_not_counted(loss) -> None:
    app = plain_app()
    evaluate = app._registered_funcs["evaluate.default"]

    def mute(message, context):
        reply = evaluate(message, context)
        if "probed-model" in message.content["config"] and context.node_config["partition-id"] == 2:
            metrics = reply.content["metrics"]
            del metrics["eval_loss"]
            if loss is not None:
                metrics["eval_loss"] = loss
        return reply

    app._registered_funcs["evaluate.default"] = mute
    strategy = Kindred()
    strategy.start(InlineGrid(app, MANY), initial(), ROUNDS, 60)
    reported = {row["client"] for row in strategy.history.rows if "kin-loss" in row}
    assert reported == {1001 + i for i in range(MANY)} - {1003}
    (refused,) = strategy.history.refused().items()
    assert refused == (1003, {f"its loss is {loss}, expected a finite number": 4})
    assert all("personal-accuracy" in row for row in strategy.history.rows if row["client"] == 1003)


def test_an_absent_client_s_last_model_still_counts() -> None:
    def fate(server_round: int, client: int) -> str:
        return "error" if client == 1 and server_round > 1 else "ok"

    strategy = Kindred()
    strategy.start(FaultyGrid(plain_app(), MANY, fate), initial(), 3, 60)
    clients, weights = strategy.collaboration()
    assert weights[0, 1] > weights[0, 3] > 0  # though it has fewer samples


def test_only_clients_trained_in_a_round_are_probed_in_it() -> None:
    def fate(server_round: int, client: int) -> str:
        return "error" if server_round == 3 and client < 2 or server_round == 5 else "ok"

    strategy = Kindred()
    strategy.start(FaultyGrid(plain_app(), MANY, fate), initial(), 5, 60)
    probed = {
        number: {row["client"] - 1001 for row in strategy.history.rows if row["round"] == number and "kin-loss" in row}
        for number in range(1, 6)
    }
    assert probed == {1: set(range(MANY)), 2: set(), 3: set(range(2, MANY)), 4: set(), 5: set()}


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
    assert rows[2, 1]["between-loss"] == pytest.approx(CLIENTS[1].loss(mean), rel=1e-5)  # its received model


@pytest.mark.parametrize("name", ["fedavg", "kindred"])
def test_a_caller_s_setting_starts_no_probe(name) -> None:
    strategy = make(name)
    more = ConfigRecord({"probed-model": "x"})
    strategy.start(InlineGrid(plain_app(), MANY), initial(), 2, 60, more, more)
    assert all(row["status"] == "ok" and "personal-accuracy" in row for row in strategy.history.rows)
    assert not any("x-loss" in row for row in strategy.history.rows)


def test_extreme_probe_losses_end_no_run_and_do_not_distort_the_share() -> None:
    app = plain_app()
    evaluate = app._registered_funcs["evaluate.default"]

    def wild(message, context):
        reply = evaluate(message, context)
        config, client = message.content["config"], context.node_config["partition-id"]
        if "probed-model" in config and client < 2:
            reply.content["metrics"]["eval_loss"] = 0.0 if (config["server-round"] > 1) == client else 1.7e308
        return reply

    app._registered_funcs["evaluate.default"] = wild
    strategy = Kindred()
    strategy.start(InlineGrid(app, MANY), initial(), ROUNDS, 60)
    assert all(row["status"] == "ok" for row in strategy.history.rows)
    losses = {
        (row["round"], row["client"]): {probe: row[f"{probe}-loss"] for probe in (NEIGHBOUR_MEAN, GLOBAL_MEAN)}
        for row in strategy.history.rows
        if "kin-loss" in row
    }
    clients = sorted(client for server_round, client in losses if server_round == 1)
    others = [neighbours_ahead(losses[1, client], losses[3, client]) for client in clients[2:]]
    assert neighbour_share([min(others)], 0.0) <= strategy._share <= neighbour_share([max(others)], 0.0)


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
