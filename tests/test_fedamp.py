"""The formulas of FedAMP and HeurFedAMP on small numbers that can be checked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as hnp

from kindred import FedAMP, HeurFedAMP, attention_weights, cosine_weights
from kindred.engine.model_store import BLOCK
from kindred.fedamp import group_weights, median_distance, objective, squared_distances

# Squared distances: 0-1: 1, 0-2: 4, 1-2: 5.
THREE = np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 2.0]])


def a_prime(t: float, sigma: float) -> float:
    """A'(t) of A(t) = 1 - exp(-t / sigma)."""
    return math.exp(-t / sigma) / sigma


def test_attention_weights_match_equations_5_and_7() -> None:
    alpha, sigma = 0.5, 2.0
    xi = attention_weights(THREE, alpha, sigma)
    for i, j, t in ((0, 1, 1), (0, 2, 4), (1, 2, 5)):
        assert xi[i, j] == pytest.approx(alpha * a_prime(t, sigma))
        assert xi[j, i] == pytest.approx(xi[i, j])
    assert xi[0, 0] == pytest.approx(1 - alpha * (a_prime(1, sigma) + a_prime(4, sigma)))


def test_weights_that_sum_to_more_than_one_are_scaled_to_a_convex_combination() -> None:
    xi = attention_weights(THREE, 1e4, 2.0)
    first = math.exp(-0.5) / (math.exp(-0.5) + math.exp(-2))
    assert xi[0] == pytest.approx([0, first, 1 - first])


def test_attention_weights_with_a_self_weight_share_the_rest_in_proportion() -> None:
    xi = attention_weights(THREE, 123.0, 2.0, self_weight=0.2)
    first = math.exp(-0.5) / (math.exp(-0.5) + math.exp(-2))
    assert xi[0] == pytest.approx([0.2, 0.8 * first, 0.8 * (1 - first)])
    assert np.diagonal(xi) == pytest.approx(0.2)


def test_proportions_are_correct_where_every_exponential_underflows() -> None:
    # exp(-1e6) is 0; the distances 1 and 4 differ by 3, so the ratio of shares is exp(3 / sigma).
    sigma = 1e-6
    assert math.exp(-1 / sigma) == 0
    xi = attention_weights(THREE, 1.0, sigma, self_weight=0.5)
    assert xi[0] == pytest.approx([0.5, 0.5, 0.0])
    far = np.array([[0.0], [30.0], [30.0]])
    assert attention_weights(far, 1.0, 1e-3, self_weight=0.0)[0] == pytest.approx([0, 0.5, 0.5])
    assert attention_weights(far, 1.0, 1e-3)[0] == pytest.approx([1, 0, 0])  # Eq. 5: no client is near


def test_cosine_weights_match_equation_8() -> None:
    models = np.array([[1.0, 0.0], [1.0, 1.0], [0.0, 3.0]])  # cosines: 0-1, 1-2: 1 / sqrt 2; 0-2: 0
    sigma, own = 3.0, 0.25
    xi = cosine_weights(models, sigma, own)
    near, far = math.exp(sigma / math.sqrt(2)), 1.0
    assert xi[0] == pytest.approx([own, 0.75 * near / (near + far), 0.75 * far / (near + far)])
    assert xi[1] == pytest.approx([0.375, own, 0.375])


def test_a_model_of_zeros_has_cosine_zero_with_every_other() -> None:
    xi = cosine_weights(np.array([[0.0, 0.0], [1.0, 0.0], [-5.0, 1.0]]), 10.0, 0.0)
    assert xi[0] == pytest.approx([0, 0.5, 0.5])


def test_the_uniform_self_weight_counts_the_sending_clients_and_oneself() -> None:
    online = np.array([True, True, False])
    for xi in (attention_weights(THREE, 1, 2.0, "uniform", online), cosine_weights(THREE, 1.0, "uniform", online)):
        assert np.diagonal(xi) == pytest.approx([1 / 2, 1 / 2, 1 / 3])
        assert xi[:2, 2] == pytest.approx(0)  # a client that sent no model has weight only for itself
        assert xi.sum(axis=1) == pytest.approx(1)


def test_each_client_can_have_its_own_self_weight() -> None:
    own = np.array([0.2, 0.5, 1.0])
    for xi in (attention_weights(THREE, 1, 2.0, own), cosine_weights(THREE, 1.0, own)):
        assert np.diagonal(xi) == pytest.approx(own)
        assert xi[2] == pytest.approx([0, 0, 1])
    xi = attention_weights(THREE, 1, 2.0, own)
    for i, share in enumerate(own):
        assert xi[i] == pytest.approx(attention_weights(THREE, 1, 2.0, share)[i])


def test_the_weight_of_a_group_is_1_over_its_size() -> None:
    # N_i, the other clients of the group: 2, 2, 2, 1, 1, 0
    weights = group_weights({"a": 0, "b": 0, "c": 0, 4: 7, 5: 7, 6: 1})
    assert weights == {"a": 1 / 3, "b": 1 / 3, "c": 1 / 3, 4: 1 / 2, 5: 1 / 2, 6: 1}


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("size", [1e6, 1e14])
def test_distances_are_exact_beside_an_outlier_in_any_place(place, size) -> None:
    models = np.array([[0.0, 0.0], [3.0, 4.0], [0.0, 1.0]], np.float32)
    with_outlier = np.insert(models, place, size, axis=0)
    found = squared_distances(lambda: iter([with_outlier]), 4)
    others = [i for i in range(4) if i != place]
    assert found[np.ix_(others, others)] == pytest.approx(np.array([[0, 25, 1], [25, 0, 18], [1, 18, 0]]))
    assert (found[place, others] > size**2).all()


def test_the_automatic_sigma_is_the_median_squared_distance_of_pairs_online() -> None:
    distances = squared_distances(lambda: iter([THREE]), 3)
    assert median_distance(distances) == pytest.approx(4)  # of 1, 4 and 5
    assert median_distance(distances, np.array([True, True, False])) == pytest.approx(1)
    four = np.vstack([THREE, [[0.0, 3.0]]])  # 0-3: 9, 1-3: 10, 2-3: 1
    assert median_distance(squared_distances(lambda: iter([four]), 4)) == pytest.approx((4 + 5) / 2)
    assert median_distance(squared_distances(lambda: iter([100 * four]), 4)) == pytest.approx(1e4 * (4 + 5) / 2)


@pytest.mark.parametrize("huge", [1e4, 1e14])
def test_three_huge_models_of_ten_do_not_change_the_automatic_sigma(huge) -> None:
    honest = np.random.default_rng(0).normal(size=(7, 5))
    models = np.vstack([honest, np.full((3, 5), huge)])
    sigma = median_distance(squared_distances(lambda: iter([models]), 10))
    assert sigma == pytest.approx(median_distance(squared_distances(lambda: iter([honest]), 7)), rel=1e-6)
    assert (attention_weights(models, 1e4, sigma, 0.2)[:7, 7:] == 0).all()


@pytest.mark.parametrize(
    ("models", "sigma"),
    [
        (THREE[:1], 1),  # no pair
        (np.ones((4, 3)), 1),  # only equal models
        (np.array([[0.0], [0.0], [0.0], [2.0]]), 4),  # three pairs are equal
        (np.array([[0.0], [3.0], [1e200]]), 9),  # one has diverged: infinite distance
        (np.array([[0.0], [1e200]]), 1),
    ],
)
def test_the_automatic_sigma_is_a_positive_number_for_all_models(models, sigma) -> None:
    distances = squared_distances(lambda: iter([models]), len(models))
    assert median_distance(distances) == pytest.approx(sigma)
    assert np.isfinite(attention_weights(models, 1e4, median_distance(distances), 0.2)).all()


def test_the_objective_matches_equation_1() -> None:
    distances = squared_distances(lambda: iter([THREE]), 3)
    penalty = (1 - math.exp(-0.5)) + (1 - math.exp(-2)) + (1 - math.exp(-2.5))  # A of 1, 4 and 5 with sigma 2
    assert objective(np.array([1.0, 2.0, 3.5]), distances, 3.0, 2.0) == pytest.approx(6.5 + 3 * penalty)
    assert objective(np.array([1.0, 2.0, 3.5]), distances, 0.0, 2.0) == 6.5
    assert objective(np.array([0.7]), np.zeros((1, 1)), 3.0, 2.0) == 0.7


def test_rounds_with_exact_local_solutions_converge_to_a_stationary_point_of_equation_1_with_half_of_lambda() -> None:
    """F_i(w) = ||w - t_i||^2 / 2, whose Eq. 6 has the solution w_i = (t_i + c u_i) / (1 + c), c = lambda / alpha."""
    alpha, sigma, lam = 0.2, 3.0, 0.7
    goals = np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 2.0], [1.0, 1.5]])

    def value(models: np.ndarray, weight: float) -> float:
        distances = squared_distances(lambda: iter([models]), len(models))
        return objective(((models - goals) ** 2).sum(axis=1) / 2, distances, weight, sigma)

    def gradient(models: np.ndarray, weight: float) -> np.ndarray:
        steps = 1e-5 * np.eye(models.size).reshape(models.size, *models.shape)
        return np.array([(value(models + h, weight) - value(models - h, weight)) / 2e-5 for h in steps])

    models = 3 * goals[::-1].copy()
    values = []
    for _ in range(300):
        clouds = attention_weights(models, alpha, sigma) @ models
        models = (goals + lam / alpha * clouds) / (1 + lam / alpha)
        values.append(value(models, lam / 2))
    assert (np.diff(values) < 1e-12).all() and values[0] > values[-1] + 0.1
    assert abs(gradient(models, lam / 2)).max() < 1e-6
    assert abs(gradient(models, lam)).max() > 1e-2


def test_a_client_alone_keeps_its_model() -> None:
    assert attention_weights(THREE[:1], 1.0, 1.0, 0.2) == pytest.approx(1)
    online = np.array([True, False, False])
    assert cosine_weights(THREE, 1.0, 0.2, online)[0] == pytest.approx([1, 0, 0])


def test_identical_models_have_distance_0_and_equal_weights() -> None:
    models = np.tile(np.random.default_rng(0).normal(size=1000).astype(np.float32), (4, 1))
    assert (squared_distances(lambda: iter([models]), 4) == 0).all()
    assert attention_weights(models, 1.0, 1e-9, 0.1)[0] == pytest.approx([0.1, 0.3, 0.3, 0.3])


def test_distances_between_near_models_are_accurate_for_large_models() -> None:
    rng = np.random.default_rng(1)
    base = 100 * rng.normal(size=5000)
    models = (base + 1e-2 * rng.normal(size=(3, 5000))).astype(np.float32)
    exact = ((models[:, None].astype(float) - models[None]) ** 2).sum(-1)
    assert squared_distances(lambda: iter([models]), 3) == pytest.approx(exact, rel=1e-3)


def test_an_outlying_first_model_does_not_reduce_the_accuracy_of_other_distances() -> None:
    rng = np.random.default_rng(3)
    models = np.stack([1e3 * rng.normal(size=1000), rng.normal(size=1000), np.zeros(1000)]).astype(np.float32)
    models[2] = models[1]
    models[2, 0] += 0.5
    assert squared_distances(lambda: iter([models]), 3)[1, 2] == pytest.approx(0.25, rel=1e-3)


def test_a_diverged_model_is_alone_and_affects_no_other_client() -> None:
    models = np.array([[1, 0], [1, 0.1], [1e25, 1], [-1e25, 2]], np.float32)
    for xi in (attention_weights(models, 1.0, 1.0, 0.2), cosine_weights(models, 50.0, 0.2)):
        assert np.isfinite(xi).all() and xi.sum(axis=1) == pytest.approx(1)
        assert xi[0, 1] == pytest.approx(0.8) and xi[1, 0] == pytest.approx(0.8)


def test_blocks_of_columns_do_not_change_the_result() -> None:
    models = np.random.default_rng(2).normal(size=(3, BLOCK + 7))
    exact = ((models[:, None] - models[None]) ** 2).sum(-1)
    at_once = squared_distances(lambda: iter([models]), 3)
    in_blocks = squared_distances(lambda: iter([models[:, :BLOCK], models[:, BLOCK:]]), 3)
    assert at_once == pytest.approx(exact)
    assert in_blocks == pytest.approx(exact)


def test_every_setting_changes_the_weights() -> None:
    base = attention_weights(THREE, 0.5, 2.0)
    assert not np.allclose(base, attention_weights(THREE, 0.6, 2.0))
    assert not np.allclose(base, attention_weights(THREE, 0.5, 3.0))
    assert not np.allclose(base, attention_weights(THREE, 0.5, 2.0, self_weight=0.1))
    turned = THREE + 1  # the origin has no direction
    heur = cosine_weights(turned, 1.0, 0.1)
    assert not np.allclose(heur, cosine_weights(turned, 2.0, 0.1))
    assert not np.allclose(heur, cosine_weights(turned, 1.0, 0.2))


some_models = hnp.arrays(
    st.sampled_from([np.float32, np.float64]),
    st.tuples(st.integers(1, 6), st.integers(1, 8)),
    elements=st.floats(-1e6, 1e6, width=32),
)
positive = st.floats(1e-12, 1e12)
self_weights = st.one_of(st.none(), st.just("uniform"), st.floats(0, 1))


@given(some_models, positive, positive, self_weights, st.data())
def test_weights_are_a_convex_combination_for_all_models(models, alpha, sigma, self_weight, data) -> None:
    online = data.draw(hnp.arrays(bool, len(models)))
    weights = [attention_weights(models, alpha, sigma, self_weight, online)]
    if self_weight is not None:
        weights.append(cosine_weights(models, sigma, self_weight, online))
    for xi in weights:
        assert np.isfinite(xi).all() and (xi >= 0).all()
        assert xi.sum(axis=1) == pytest.approx(1)
        if isinstance(self_weight, float):
            others = online.sum() - online
            assert np.diagonal(xi)[others > 0] == pytest.approx(self_weight)


def test_alpha_decays_at_fixed_intervals_and_sets_the_proximal_weight() -> None:
    method = FedAMP(sigma=1.0, alpha=100.0, alpha_decay=0.1, alpha_decay_every=30, lam=2.0)
    assert [method.alpha_at(k) for k in (1, 30, 31, 60, 61)] == pytest.approx([100, 100, 10, 10, 1])
    assert method.round_config(1, 0) == {"proximal-mu": pytest.approx(0.02)}
    assert method.round_config(31, 0) == {"proximal-mu": pytest.approx(0.2)}


@pytest.mark.parametrize("lam", [0.0, 1e-3, 1.0, 1e12])
def test_the_proximal_weight_stays_finite_in_float32_however_far_alpha_has_decayed(lam) -> None:
    method = FedAMP(lam=lam)
    mu = [method.round_config(k, 0)["proximal-mu"] for k in (1, 600, 1200, 10_000, 1_000_000)]
    assert mu == sorted(mu) and np.isfinite(np.float32(mu)).all()
    assert (mu[-1] > 1e30) == (lam > 0)
    assert np.isfinite(attention_weights(THREE, method.alpha_at(1_000_000), 2.0)).all()


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: FedAMP(sigma=0), "sigma is 0"),
        (lambda: FedAMP(sigma="median"), "sigma is 'median', allowed: more than 0, at most 1e\\+12, or auto"),
        (lambda: HeurFedAMP(sigma="auto"), "sigma is 'auto', allowed: more than 0, at most 1e\\+12$"),
        (
            lambda: FedAMP(self_weight="groups"),
            "self_weight is 'groups', allowed: groups only with the argument groups",
        ),
        (lambda: HeurFedAMP(self_weight="groups"), "self_weight is 'groups'"),
        (lambda: FedAMP(common_start="no"), "common_start is 'no'"),
        (lambda: FedAMP(objective=1), "objective is 1"),
        (lambda: FedAMP(sigma=1, alpha=-1), "alpha is -1"),
        (lambda: FedAMP(sigma=1, alpha_decay=0), "alpha_decay is 0"),
        (lambda: FedAMP(sigma=1, alpha_decay_every=0), "alpha_decay_every is 0"),
        (lambda: FedAMP(sigma=1, lam=-0.1), "lam is -0.1"),
        (lambda: FedAMP(sigma=1, self_weight=1.5), "self_weight is 1.5"),
        (lambda: FedAMP(sigma=float("nan")), "sigma is nan"),
        (lambda: HeurFedAMP(sigma=1, self_weight=None), "self_weight is None"),
        (lambda: HeurFedAMP(sigma=1, self_weight="half"), "self_weight is 'half'"),
        (lambda: FedAMP(sigma=1, fraction_train=1.1), "fraction_train is 1.1"),
    ],
)
def test_bad_arguments_are_named(make, named) -> None:
    with pytest.raises(ValueError, match=named):
        make()
