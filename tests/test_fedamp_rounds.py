"""FedAMP over rounds: compared with a plain computation, and with every setting that must change the result."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from flwr.app import ArrayRecord

from kindred import FedAMP, HeurFedAMP, Local
from kindred.engine.layout import drawn_anew
from kindred.engine.strategy import PersonalizedStrategy
from kindred.messages import read_record, seed_for, to_record

from .client_apps import initial, plain_app, target
from .grids import FaultyGrid

CLIENTS = 6
ROUNDS = 5
GROUPS = {1001: 0, 1002: 1, 1003: 2, 1004: 3, 1005: 1, 1006: 2, 2001: 2}  # 2001 never takes part


def absent(server_round: int, client: int) -> bool:
    """Client 4 joins late, client 1 is absent in rounds 2 and 3, client 5 in the last one."""
    return (
        (client == 4 and server_round == 1)
        or (client == 1 and server_round in (2, 3))
        or (client, server_round) == (5, 5)
    )


def train(strategy: PersonalizedStrategy, rounds: int = ROUNDS, missing=absent) -> PersonalizedStrategy:
    grid = FaultyGrid(plain_app(), CLIENTS, lambda r, c: "error" if missing(r, c) else "ok")
    strategy.start(grid, initial(), rounds)
    return strategy


def parts(strategy: PersonalizedStrategy, name: str) -> np.ndarray:
    """One array of all clients' models, shape (m, ...)."""
    return np.stack([record[name].numpy() for record in strategy.client_models().values()])


def plain_fedamp(
    weigh, mu: float, missing=absent, start: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compute the same by loops over clients: weights (m, 4), running means (m, 3), counters (m,).

    With a `start`, (m, 4), clients' models are combined from the first round on.
    """
    w = np.zeros((CLIENTS, 4)) if start is None else start.copy()
    mean, count = np.zeros((CLIENTS, 3)), np.zeros(CLIENTS, int)
    online: list[int] = [] if start is None else list(range(CLIENTS))
    for server_round in range(1, ROUNDS + 1):
        u, u_mean = w.copy(), mean.copy()
        for i in range(CLIENTS):
            others = [j for j in online if j != i]
            if others:
                xi, own = weigh(w, i, others, online)
                u[i] = own * w[i] + sum(x * w[j] for x, j in zip(xi, others))
                u_mean[i] = own * mean[i] + sum(x * mean[j] for x, j in zip(xi, others))
        online = [i for i in range(CLIENTS) if not missing(server_round, i)]
        for i in online:
            w[i], mean[i], count[i] = u[i], u_mean[i] + i + 1, count[i] + i + 1
            for _ in range(10):
                w[i] -= 0.1 * ((w[i] - target(i).ravel()) + mu * (w[i] - u[i]))
    return w, mean, count


def by_distance(sigma: float, own: float | list[float]):
    def weigh(w, i, others, online):
        mine = own[i] if isinstance(own, list) else own
        a = np.array([np.exp(-((w[i] - w[j]) ** 2).sum() / sigma) / sigma for j in others])
        return (1 - mine) * a / a.sum(), mine

    return weigh


def by_median_distance(own: float):
    def weigh(w, i, others, online):
        sigma = np.median([((w[j] - w[k]) ** 2).sum() for j, k in combinations(online, 2)])
        return by_distance(sigma, own)(w, i, others, online)

    return weigh


def by_equation_5(alpha: float, sigma: float):
    def weigh(w, i, others, online):
        a = np.array([alpha * np.exp(-((w[i] - w[j]) ** 2).sum() / sigma) / sigma for j in others])
        return a, 1 - a.sum()

    return weigh


def by_cosine(sigma: float, own: float):
    def weigh(w, i, others, online):
        def cos(a, b):
            return a @ b / (np.linalg.norm(a) * np.linalg.norm(b)) if a.any() and b.any() else 0.0

        a = np.array([np.exp(sigma * cos(w[i], w[j])) for j in others])
        return (1 - own) * a / a.sum(), own

    return weigh


@pytest.mark.parametrize(
    ("strategy", "weigh", "mu"),
    [
        (FedAMP(sigma=3.0, alpha=4.0, lam=2.0, self_weight=0.3), by_distance(3.0, 0.3), 0.5),
        (FedAMP(sigma=3.0, alpha=0.5, lam=0.2, self_weight=None), by_equation_5(0.5, 3.0), 0.4),
        (FedAMP(alpha=4.0, lam=2.0, self_weight=0.3), by_median_distance(0.3), 0.5),
        (FedAMP(sigma=3.0, self_weight="groups", groups=GROUPS), by_distance(3.0, [1, 1 / 2, 1 / 3] * 2), 1e-4),
        (HeurFedAMP(sigma=5.0, alpha=4.0, lam=2.0, self_weight=0.3), by_cosine(5.0, 0.3), 0.5),
    ],
    ids=["fedamp with self-weight", "fedamp by Eq. 5", "fedamp with automatic sigma", "fedamp by groups", "heurfedamp"],
)
def test_the_engine_matches_loops_over_clients(strategy, weigh, mu) -> None:
    train(strategy)
    w, mean, count = plain_fedamp(weigh, mu)
    assert parts(strategy, "layer.weight").reshape(CLIENTS, 4) == pytest.approx(w, rel=1e-5)
    assert parts(strategy, "norm.running_mean") == pytest.approx(mean, rel=1e-5)
    assert (parts(strategy, "norm.num_batches_tracked") == count).all()


def test_distances_exclude_buffers() -> None:
    """Running means differ by whole numbers here, weights by less: only the weights may count."""
    clients, weights = train(FedAMP(sigma=1.0, self_weight=0.2), rounds=3, missing=lambda r, c: False).collaboration()
    twin = [clients.index(c) for c in (1002, 1001, 1004, 1003, 1006, 1005)]
    assert (weights.argsort(axis=1)[:, -1] == twin).all()


def test_the_history_has_the_automatic_sigma_of_each_round_with_weights() -> None:
    lines = train(FedAMP(), missing=lambda r, c: False).history.rounds
    assert ["sigma" in line for line in lines] == [False, True, True, True, True]
    # After round 1 every client has gone the same part of its way from 0, 1 - 0.9^10, to its target's 4 equal numbers.
    part = 1 - 0.9**10
    goals = [float(target(i)[0, 0]) for i in range(CLIENTS)]
    pairs = [4 * (part * (a - b)) ** 2 for a, b in combinations(goals, 2)]
    assert lines[1]["sigma"] == pytest.approx(np.median(pairs), rel=1e-3)
    assert not any("sigma" in line for line in train(FedAMP(sigma=1.0)).history.rounds)


def own_starts(seed: int) -> tuple[ArrayRecord, np.ndarray]:
    """A model of different numbers, and the weights (m, 4) from which clients start if each has its own order."""
    numbers = read_record(initial()) | {"layer.weight": np.array([[1, -2], [3, 0.5]], np.float32)}
    drawn = [
        drawn_anew(numbers, seed_for(seed, "start", 1001 + i), numbers)["layer.weight"].ravel() for i in range(CLIENTS)
    ]
    return to_record(numbers), np.stack(drawn)


@pytest.mark.parametrize(
    ("method", "weigh"), [(FedAMP, by_distance(3.0, 0.3)), (HeurFedAMP, by_cosine(3.0, 0.3))], ids=["fedamp", "heur"]
)
def test_without_a_common_start_the_first_cloud_models_combine_the_clients_own_random_models(method, weigh) -> None:
    first, starts = own_starts(seed=7)
    assert len(np.unique(starts, axis=0)) > 1 and (np.sort(starts) == [-2, 0.5, 1, 3]).all()
    strategy = method(sigma=3.0, alpha=4.0, lam=2.0, self_weight=0.3, common_start=False, seed=7)
    grid = FaultyGrid(plain_app(), CLIENTS, lambda r, c: "error" if absent(r, c) else "ok")
    strategy.start(grid, first, ROUNDS)
    w, _, _ = plain_fedamp(weigh, 0.5, start=starts)
    assert parts(strategy, "layer.weight").reshape(CLIENTS, 4) == pytest.approx(w, rel=1e-4, abs=1e-6)


def test_a_client_that_never_trained_keeps_its_own_random_model() -> None:
    first, starts = own_starts(seed=7)
    strategy = FedAMP(common_start=False, seed=7)
    strategy.start(FaultyGrid(plain_app(), CLIENTS, lambda r, c: "error" if c == 2 else "ok"), first, 2)
    assert (strategy.client_models()[1003]["layer.weight"].numpy().ravel() == starts[2]).all()


@pytest.mark.parametrize("method", [FedAMP, HeurFedAMP])
def test_a_client_without_a_known_group_is_excluded(method) -> None:
    groups = {client: group for client, group in GROUPS.items() if client != 1004}
    strategy = train(method(self_weight="groups", groups=groups))
    assert strategy.history.left_out == {1004: "self-weight is groups, and its group is not known"}
    assert 1004 not in strategy.client_models()


def changed(settings: dict) -> np.ndarray:
    base = {"sigma": 3.0, "alpha": 4.0, "lam": 2.0, "self_weight": 0.3}
    return parts(train(FedAMP(**(base | settings))), "layer.weight")


@pytest.mark.parametrize(
    "settings",
    [
        {"sigma": 1.0},
        {"sigma": "auto"},
        {"self_weight": "groups", "groups": GROUPS},
        {"lam": 0.0},
        {"alpha": 1.0},
        {"self_weight": 0.6},
        {"self_weight": "uniform"},
        {"self_weight": None},
        {"alpha_decay_every": 2},
    ],
    ids=str,
)
def test_every_setting_changes_the_models(settings) -> None:
    assert not np.allclose(changed({}), changed(settings), rtol=1e-3)


def test_fedamp_equals_local_training_only_with_self_weight_1_and_no_proximal_term() -> None:
    local = parts(train(Local()), "layer.weight")
    assert not np.allclose(changed({}), local, rtol=1e-3)
    assert (changed({"self_weight": 1.0, "lam": 0.0}) == local).all()


def test_the_scaling_of_equation_5_is_logged_once(caplog) -> None:
    caplog.set_level("WARNING")
    train(FedAMP(sigma=1.0, alpha=1e4, self_weight=None), missing=lambda r, c: False)
    assert sum("sum to more than 1 (Eq. 5)" in message for message in caplog.messages) == 1


def test_collaboration_weights_show_the_groups() -> None:
    clients, weights = train(FedAMP(sigma=0.1, self_weight=0.2), missing=lambda r, c: False).collaboration()
    groups = np.array([(client - 1001) // 2 for client in clients])
    same = groups[:, None] == groups[None, :]
    assert weights[same].sum() > 0.99 * CLIENTS
