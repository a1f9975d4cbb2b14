"""The formulas of FedAMP and HeurFedAMP on small numbers that can be checked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as hnp

from kindred import FedAMP, HeurFedAMP, attention_weights, cosine_weights
from kindred.engine.model_store import BLOCK
from kindred.fedamp import squared_distances

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


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: FedAMP(sigma=0), "sigma is 0"),
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
