"""The clients of a round: how many of all clients, and the same ones for every method, uniformly or by size."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from flwr.clientapp import ClientApp

from kindred import REGISTRY, FedAvg, InlineGrid, Local, PerFedCKT, PersonalizedStrategy
from kindred.messages import TRAIN_LOSS, seed_for

from .client_apps import initial, introduced, logits_app, plain_app
from .test_conformance import app_of, initial_of, make

SIZES = [10, 70, 20, 5, 40, 30]
ROUNDS = 5


def sized(app: ClientApp, size: Callable[[int], int]) -> ClientApp:
    """Return the app, whose clients report this number of training samples when they connect."""
    return introduced(app, lambda context: {"num-examples": size(context.node_config["partition-id"])})


def trained(strategy: PersonalizedStrategy) -> list[list[int]]:
    """Return the clients of each round from round 1 on."""
    rows = [row for row in strategy.history.rows if row.keys() & {"train_loss", TRAIN_LOSS}]
    return [[row["client"] for row in rows if row["round"] == number] for number in range(1, strategy.last_round + 1)]


def drawn(p: list[float] | None, count: int, seed: int = 0) -> list[list[int]]:
    """Draw the clients of each round independently of the code: 1001, 1002, ... by their probabilities p."""
    return [
        sorted(
            1001 + np.random.default_rng(seed_for(seed, "train", number)).choice(len(SIZES), count, replace=False, p=p)
        )
        for number in range(1, ROUNDS + 1)
    ]


P = [size / sum(SIZES) for size in SIZES]


@pytest.mark.parametrize("name", REGISTRY)
@pytest.mark.parametrize(("sampling", "p"), [("uniform", None), ("by-size", P)])
def test_all_methods_sample_the_same_clients(name, sampling, p) -> None:
    strategy = make(name, fraction_train=0.5, sampling=sampling, seed=4)
    strategy.start(InlineGrid(sized(app_of(name), SIZES.__getitem__), len(SIZES)), initial_of(name), ROUNDS)
    assert trained(strategy) == drawn(p, 3, seed=4)


@pytest.mark.parametrize("name", REGISTRY)
def test_by_default_perfed_ckt_samples_by_size_and_all_other_methods_uniformly(name) -> None:
    assert make(name).actual_sampling == ("by-size" if name == "perfed-ckt" else "uniform")


def test_an_unknown_sampling_is_refused() -> None:
    with pytest.raises(ValueError, match="^sampling is 'by-loss', allowed: default, uniform, by-size$"):
        Local(sampling="by-loss")


def test_clients_that_do_not_report_their_sizes_are_equally_likely() -> None:
    strategy = FedAvg(sampling="by-size", fraction_train=0.5)
    strategy.start(InlineGrid(plain_app(), 4), initial(), 1)
    assert strategy.chances(strategy.clients()) == pytest.approx(np.full(4, 0.25))


@pytest.mark.parametrize("kind", [FedAvg, PerFedCKT])
def test_by_size_a_client_takes_part_as_often_as_its_size_says(kind) -> None:
    """Client i is one of two draws without replacement with probability p_i + sum_{j != i} p_j p_i / (1 - p_j)."""
    sizes = np.array([10, 20, 30, 40])
    strategy = kind(sampling="by-size")
    app = logits_app() if kind is PerFedCKT else plain_app()
    strategy.start(InlineGrid(sized(app, lambda i: int(sizes[i])), 4), initial(), 1)
    pairs = [strategy.sample(number, 0.5, 2) for number in range(4000)]
    assert all(len(set(pair)) == 2 for pair in pairs)
    p = sizes / sizes.sum()
    expected = [p[i] + sum(p[j] * p[i] / (1 - p[j]) for j in range(4) if j != i) for i in range(4)]
    assert expected == pytest.approx([0.2345, 0.4413, 0.6083, 0.7159], abs=1e-4)
    assert [np.mean([c in pair for pair in pairs]) for c in strategy.clients()] == pytest.approx(expected, abs=0.03)


def test_uniformly_all_clients_take_part_equally_often() -> None:
    strategy = PerFedCKT(sampling="uniform")
    app = sized(logits_app(), [10, 20, 30, 40].__getitem__)
    strategy.start(InlineGrid(app, 4), initial(), 1)
    pairs = [strategy.sample(number, 0.5, 2) for number in range(4000)]
    assert [np.mean([c in pair for pair in pairs]) for c in strategy.clients()] == pytest.approx([0.5] * 4, abs=0.03)


@pytest.mark.parametrize(
    ("fraction", "least", "count"),
    [(0.1, 2, 10), (0.15, 2, 15), (0.5, 2, 50), (0.53, 2, 53), (0.6, 2, 53), (1.0, 2, 53), (0.01, 2, 2), (0.1, 12, 12)],
)
def test_a_fraction_is_one_of_all_clients_though_only_those_with_data_take_part(fraction, least, count) -> None:
    """53 of 100 clients have data: as in PerFed-CKT's table, m = C K with K = 100."""
    strategy = Local(fraction_train=fraction, min_train_nodes=least)
    strategy.start(InlineGrid(sized(plain_app(), lambda i: 0 if i % 2 and i < 94 else 7), 100), initial(), 2)
    assert len(strategy.history.left_out) == 47 and len(strategy.clients()) == 53
    assert [len(clients) for clients in trained(strategy)] == [count, count]
    assert not {client for clients in trained(strategy) for client in clients} & strategy.history.left_out.keys()


def test_a_client_excluded_for_its_strikes_still_counts() -> None:
    strategy = Local(fraction_train=0.5, min_train_nodes=1)
    strategy.start(InlineGrid(plain_app(), 6), initial(), 1)
    strategy.roster.restore({"strikes": {}, "resting": {1001: 9, 1002: 9}, "kept-names": set()})
    assert len(strategy.sample(2, 0.5, 1)) == 3  # of 6, though 4 can be asked
    assert len(strategy.sample(2, 1.0, 1)) == 4


def test_perfed_ckts_numbers_sent_are_those_of_m_of_all_clients() -> None:
    """3 images, 2 classes, C K = 5 of 10 clients, of which 3 have no data, and 2 centroids: 6 (5 + 2)."""
    strategy = PerFedCKT(num_clusters=2, local_steps=10, distill_weight=0.5, fraction_train=0.5, sampling="uniform")
    strategy.start(InlineGrid(sized(logits_app(), lambda i: 0 if i in (1, 4, 8) else 9), 10), initial(), 3)
    assert [line["floats"] for line in strategy.history.rounds] == [30, 42, 42, 42]


@pytest.mark.parametrize("fraction", [0, -0.1, 1.1])
def test_a_share_that_trains_nobody_or_more_than_all_is_refused(fraction) -> None:
    with pytest.raises(ValueError, match=f"fraction_train is {fraction}, allowed: more than 0, at most 1"):
        FedAvg(fraction_train=fraction)
