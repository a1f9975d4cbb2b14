"""FedeRiCo: its formulas on small numbers that can be checked by hand, and rounds with real ClientApps."""

from __future__ import annotations

import copy
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord
from hypothesis import given, strategies as st
from safetensors import safe_open
from torch import nn
from torch.nn.functional import cross_entropy

from kindred import FedeRiCo, InlineGrid, Local, Mixture, Site, make_client_app, make_model
from kindred.client.evaluation import predict
from kindred.client.site import forget_sites
from kindred.client.state import MIXTURE, MODEL
from kindred.client.training import get_arrays, mean_gradient, set_arrays, train
from kindred.engine import roster
from kindred.engine.optimizers import AdamStep, SGDStep
from kindred.engine.simulated_state import saved_files
from kindred.federico import collaborator_weights, known_weights, log_rest_of
from kindred.messages import METHODS, VERSION_KEY, decode, encode, read_record, seed_for, to_record
from kindred.objectives import Classes
from kindred.parts import federico_copies
from kindred.parts.federico_losses import LARGEST_LOSS, Losses, accumulate, smooth
from kindred.parts.federico_requests import Request, choose_request
from kindred.parts.mixture import mixture_of, mixture_shares
from kindred.parts.neighbours import choose_neighbours

from .grids import FaultyGrid, ShuffledGrid
from .scores import accuracy_and_loss
from .test_conformance import everything, values

# --- The mathematics ----------------------------------------------------------------------------------


def test_losses_are_averaged_exponentially() -> None:
    # 0.4 * 2 + 0.6 * 1, 0.4 * 0 + 0.6 * 5
    assert smooth(np.array([2.0, 0.0]), np.array([1.0, 5.0]), 0.6) == pytest.approx([1.4, 3.0])


def test_weights_are_a_softmax_of_the_negative_losses() -> None:
    # exp(0) : exp(-log 2) : exp(-log 4) = 4 : 2 : 1
    losses = np.log([1, 2, 4])
    assert collaborator_weights(losses) == pytest.approx(np.array([4, 2, 1]) / 7)
    assert collaborator_weights(losses, temperature=0.5) == pytest.approx(np.array([16, 4, 1]) / 21)
    # Other models add 3 to that sum: these have 4/7, 2/7 and 1/7 of 1/4 each, and the other models have the rest.
    assert collaborator_weights(losses, log_rest=np.log(7 / 4 * 3)) == pytest.approx(np.array([4, 2, 1]) / 7 / 4)


some_losses = st.lists(st.floats(0, 20), min_size=2, max_size=6)


@given(some_losses, some_losses, st.integers(1, 5), st.floats(0.05, 1), st.floats(0.1, 10))
def test_weights_of_available_models_are_those_of_a_softmax_over_all_models(
    latest, before, count, beta, temperature
) -> None:
    clients = list(range(min(len(latest), len(before))))
    table = Losses(dict(zip(clients, latest)), dict(zip(clients, before)))
    available = clients[:count]
    table.update(available, [table.latest[c] for c in available], beta)
    log_rest = log_rest_of(table, available, temperature)
    weights = collaborator_weights(table.averages(available), temperature, log_rest)
    plain = known_weights(table, temperature)
    assert list(plain) == clients and sum(plain.values()) == pytest.approx(1)
    assert weights == pytest.approx([plain[client] for client in available])


@given(
    st.lists(st.floats(0, LARGEST_LOSS) | st.sampled_from([0.0, LARGEST_LOSS, 1e-300]), min_size=1, max_size=6),
    st.sampled_from([1e-9, 1e-3, 1.0, 1e9]),
)
def test_weights_are_a_distribution_for_all_losses(losses, temperature) -> None:
    weights = collaborator_weights(np.array(losses), temperature)
    assert (weights >= 0).all() and weights.sum() == pytest.approx(1)
    assert weights.argmax() == np.argmin(losses) or weights.max() == weights[np.argmin(losses)]
    table = Losses()
    table.update(range(len(losses)), losses, 0.6)
    rest = log_rest_of(table, range(1), temperature)
    available = collaborator_weights(table.averages([0]), temperature, rest)
    assert np.isfinite(available).all() and (available >= 0).all() and (available <= 1).all()


def test_a_useless_model_gets_no_weight_and_equally_useless_models_share_it() -> None:
    assert collaborator_weights(np.array([0.5, LARGEST_LOSS])).tolist() == [1, 0]
    assert collaborator_weights(np.full(4, LARGEST_LOSS), 1e-9).tolist() == [0.25] * 4


def test_accumulated_losses_give_the_posterior_of_the_last_round_s_weights() -> None:
    # Eq. 3 from equal weights: exp(-log 2) : exp(-log 3) = 3 : 2. With these as the prior (Eq. 4): 3 / 5 : 2 / 2.
    total = np.zeros(2)
    total = accumulate(total, np.log([2, 3]))
    assert collaborator_weights(total) == pytest.approx([0.6, 0.4])
    total = accumulate(total, np.log([5, 2]))
    assert total == pytest.approx(np.log([10, 6])) and collaborator_weights(total) == pytest.approx([0.375, 0.625])


@given(st.lists(st.lists(st.floats(0, 20), min_size=3, max_size=3), max_size=5), st.floats(0.5, 10))
def test_accumulated_losses_are_bayes_rule_over_rounds(rounds, temperature) -> None:
    table, prior = Losses(), np.full(3, 1 / 3)
    for losses in rounds:
        table.update(["a", "b", "c"], losses, None)
        posterior = prior * np.exp(-np.array(losses) / temperature)
        prior = posterior / posterior.sum()
    assert collaborator_weights(table.averages(["a", "b", "c"]), temperature) == pytest.approx(prior)


@given(some_losses, st.integers(1, 20), st.floats(0.05, 1))
def test_equal_losses_in_t_rounds_accumulate_to_the_average_at_a_temperature_of_1_over_t(losses, t, beta) -> None:
    clients = list(range(len(losses)))
    table, average = Losses(), Losses(smoothed=dict(zip(clients, losses)))
    for _ in range(t):
        table.update(clients, losses, None)
        average.update(clients, losses, beta)
    assert table.averages(clients) == pytest.approx(t * average.averages(clients))
    assert list(known_weights(table, 1.0).values()) == pytest.approx(list(known_weights(average, 1 / t).values()))


def test_losses_are_accumulated_over_three_rounds() -> None:
    table = Losses()
    table.update(["a"], [1.0], None)
    table.update(["b"], [0.5], None)  # a is not available: its last loss counts again; b counts for round 1 too
    assert table.smoothed == {"a": 2.0, "b": 1.0}
    table.update(["a"], [2.0], None)
    assert table.smoothed == {"a": 4.0, "b": 1.5} and table.latest == {"a": 2.0, "b": 0.5} and table.rounds == 3
    assert table.averages(["new", "a"]).tolist() == [0.0, 4.0]  # as with the average, a new model is explored


def test_losses_are_smoothed_over_three_rounds() -> None:
    table = Losses()
    table.update(["a"], [1.0], 0.6)
    assert table.smoothed == pytest.approx({"a": 0.6})
    table.update(["b"], [0.5], 0.6)  # a is not available: its last loss counts again, 0.24 + 0.6
    assert table.smoothed == pytest.approx({"a": 0.84, "b": 0.3})
    table.update(["a"], [2.0], 0.6)  # 0.336 + 1.2, and b's 0.12 + 0.3
    assert table.smoothed == pytest.approx({"a": 1.536, "b": 0.42})
    assert table.latest == {"a": 2.0, "b": 0.5}


def test_an_unseen_client_has_loss_0_in_the_selection_and_no_weight() -> None:
    table = Losses({"a": 1.0, "b": 1.0}, {"a": 1.0, "b": 1.0 + np.log(3)})
    assert table.averages(["a", "new"]).tolist() == [1.0, 0.0]
    weights = known_weights(table, 1.0)
    assert list(weights) == ["a", "b"] and weights == pytest.approx({"a": 0.75, "b": 0.25})

    def request(own, clients, most, threshold=0.0, seed=0, size=0) -> Request:
        settings = {"num_neighbours": most, "epsilon": 0.0, "seed": seed, "threshold": threshold, "size": size}
        return choose_request(own, clients, table, weights, **settings)

    shared = ["a", "b", "me", "new"]
    for seed in range(5):  # twice as many as are needed; the rest are spares
        assert request("me", shared, 2, seed=seed).neighbours == ["new", "a", "b"]
    assert request("me", shared, 1).neighbours == ["new", "a"] and request("me", shared, 0).neighbours == []
    assert request("b", shared, 1).neighbours in (["me", "new"], ["new", "me"])
    assert request("me", shared, 3, 0.5).mixture == ["me", "a"] and request("b", shared, 3, 0.2).mixture == ["b", "a"]
    assert request("me", shared, 0).mixture == ["me", "a", "b"] == request("me", shared, 1, size=2).mixture
    assert request("me", shared, 3, size=1).mixture == ["me", "a"] == request("me", shared, 3, 0.5, size=2).mixture
    assert request("me", shared, 1).weights == weights
    nothing_yet = choose_request(
        "me", shared, Losses(), {}, num_neighbours=2, epsilon=0.0, seed=0, threshold=0.0, size=0
    )
    assert sorted(nothing_yet.neighbours) == ["a", "b", "new"] and nothing_yet.mixture == ["me"]


def test_without_exploration_the_best_clients_are_requested_in_order_and_ties_are_random() -> None:
    assert choose_neighbours(np.array([0.5, 0.1, 0.9, 0.3]), 0.0, seed=1).tolist() == [1, 3, 0, 2]
    drawn = [tuple(choose_neighbours(np.array([0.0, 0.4, 0.0]), 0.0, seed)) for seed in range(2000)]
    assert set(drawn) == {(0, 2, 1), (2, 0, 1)}
    assert drawn.count((0, 2, 1)) == pytest.approx(1000, abs=100)


@given(st.lists(st.floats(0, 10), max_size=8), st.floats(0, 1), st.integers(0, 99))
def test_every_request_is_a_permutation_of_all_candidates(smoothed, epsilon, seed) -> None:
    everybody = choose_neighbours(np.array(smoothed), epsilon, seed).tolist()
    assert sorted(everybody) == list(range(len(smoothed)))
    assert choose_neighbours(np.array(smoothed), epsilon, seed, most=2).tolist() == everybody[:2]


def test_requests_have_the_frequencies_of_epsilon_greedy_selection() -> None:
    smoothed = np.array([0.5, 0.1, 0.9, 0.3, 0.7])
    draws = np.array([choose_neighbours(smoothed, 0.3, seed) for seed in range(10_000)])
    first, second = (np.bincount(draws[:, place], minlength=5) / 10_000 for place in (0, 1))
    # The best of five: 0.7 + 0.3 / 5; each of the others 0.3 / 5
    assert first == pytest.approx([0.06, 0.76, 0.06, 0.06, 0.06], abs=0.015)
    # Then, of four: the next best has 0.7 + 0.3 / 4 = 0.775 where it is left, and the best likewise if it is.
    best = 0.24 * 0.775
    next_best = 0.76 * 0.775 + 3 * 0.06 * 0.075
    after = 0.76 * 0.075 + 2 * 0.06 * 0.075
    third = after + 0.06 * 0.075  # the third has the same probability whichever other client came first: 0.3 / 4
    assert best + next_best + 3 * third == pytest.approx(1)
    assert second == pytest.approx([third, best, third, next_best, third], abs=0.015)
    anyone = np.array([choose_neighbours(smoothed, 1.0, seed) for seed in range(10_000)])
    for place in range(5):
        assert np.bincount(anyone[:, place], minlength=5) / 10_000 == pytest.approx([0.2] * 5, abs=0.015)


def test_weights_below_the_least_get_no_share_in_a_mixture() -> None:
    weights = np.array([0.5, 0.3, 0.19, 0.01])
    assert mixture_shares(weights, 0.0) == pytest.approx(weights)
    assert mixture_shares(weights, 0.19) == pytest.approx(np.array([50, 30, 19, 0]) / 99)
    assert mixture_shares(weights, 0.3) == pytest.approx([0.625, 0.375, 0, 0])
    assert mixture_shares(weights, 0.6) == pytest.approx(weights)  # no weight is as large
    assert mixture_shares(np.array([0.1, 0.3]), 0.0) == pytest.approx([0.25, 0.75])  # other models may have the rest
    assert mixture_shares(np.zeros(2), 0.5) == pytest.approx([0.5, 0.5])


def test_mixtures_combine_probabilities_or_logits() -> None:
    probabilities = np.array([[[0.9, 0.1], [0.5, 0.5]], [[0.1, 0.9], [0.2, 0.8]]])  # (2, 2, 2)
    mixed = mixture_of(probabilities, np.array([0.75, 0.25]))
    assert mixed == pytest.approx(np.array([[0.7, 0.3], [0.425, 0.575]]))
    # Of logits: (0.9 / 0.1)^(3/4) (0.1 / 0.9)^(1/4) = 3 to 1, and (0.2 / 0.8)^(1/4) = 1 to sqrt 2
    mixed = mixture_of(probabilities, np.array([0.75, 0.25]), "logits")
    assert mixed == pytest.approx(np.array([[3, 1], [math.sqrt(2) - 1, 2 - math.sqrt(2)]]) / [[4], [1]])
    one_certain = mixture_of(np.array([[[1.0, 0.0]], [[0.5, 0.5]]], np.float32), np.array([0.5, 0.5]), "logits")
    assert one_certain == pytest.approx(np.array([[1.0, 0.0]]))


@pytest.mark.parametrize("kind", ["probabilities", "logits"])
def test_a_model_without_a_share_does_not_spoil_the_mixture(kind) -> None:
    probabilities = np.array([[[0.9, 0.1]], [[np.nan, np.nan]], [[0.5, 0.5]]])
    mixed = mixture_of(probabilities, np.array([1.0, 0.0, 0.0]), kind)
    assert mixed == pytest.approx(np.array([[0.9, 0.1]]))


def test_accuracy_and_loss_are_computed_from_probabilities() -> None:
    rows = np.array([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]])
    accuracy, loss = accuracy_and_loss(rows, np.array([0, 2]))
    assert accuracy == 0.5 and loss == pytest.approx(-(np.log(0.5) + np.log(0.1)) / 2)
    assert np.isfinite(accuracy_and_loss(np.array([[1.0, 0.0]]), np.array([1]))[1])
    assert np.isnan(accuracy_and_loss(np.empty((0, 3)), np.empty(0, int))).all()


@pytest.mark.parametrize(("ours", "theirs"), [(SGDStep, torch.optim.SGD), (AdamStep, torch.optim.Adam)])
def test_optimiser_steps_match_torch(ours, theirs) -> None:
    rng = np.random.default_rng(0)
    parameters = rng.normal(size=7)
    weight = nn.Parameter(torch.tensor(parameters))
    optimiser, step = theirs([weight], lr=0.05), ours(0.05)
    for _ in range(6):
        gradient = rng.normal(size=7) * 10.0 ** rng.integers(-4, 4)
        weight.grad = torch.tensor(gradient)
        optimiser.step()
        step(parameters, gradient)
        assert parameters == pytest.approx(weight.detach().numpy(), rel=1e-12)


@pytest.mark.parametrize("batch_size", [1, 4, 5, 19, 20, 21, 100])
@pytest.mark.parametrize("kind", ["linear", "digits-cnn"])
def test_the_gradient_is_the_mean_over_all_samples(kind, batch_size) -> None:
    generator = torch.Generator().manual_seed(0)
    if kind == "linear":
        model, x = nn.Linear(4, 3), torch.randn(20, 4, generator=generator)
    else:
        model, x = make_model(kind, (1, 8, 8), 3, seed=0), torch.randn(20, 1, 8, 8, generator=generator)
    y = torch.arange(20) % 3
    before = get_arrays(model)
    expected = torch.autograd.grad(cross_entropy(model(x), y), list(model.parameters()))
    train(model, x, y, steps=1, batch_size=3, optimizer="sgd", learning_rate=0.1, generator=generator)
    set_arrays(model, before)  # gradients left over from training are not counted
    found = mean_gradient(model, x, y, batch_size)
    assert list(found) == [name for name, _ in model.named_parameters()]
    for gradient, plain in zip(found.values(), expected, strict=True):
        assert gradient == pytest.approx(plain.numpy(), abs=1e-6) and gradient.flags.c_contiguous
    assert values(to_record(get_arrays(model))) == values(to_record(before))


def test_client_ids_survive_a_message() -> None:
    assert decode(encode([7, "7", "lyon", 'a"b/c'])) == [7, "7", "lyon", 'a"b/c']
    assert decode('[1.5, true, null, [1], {"a": 2}, 3]') == [3]
    for text in ("", "lyon", "7", '{"7": 1}', "[" * 100_000, "[" + "1" * 5000 + "]", None, 7, ["7"], b"\xff"):
        assert decode(text) == []


@pytest.mark.parametrize(
    ("wrong", "allowed"),
    [
        ({"num_neighbours": -1}, "num_neighbours is -1, allowed: 0 to 1,000,000"),
        ({"epsilon": 1.1}, "epsilon is 1.1, allowed: 0 to 1"),
        ({"epsilon": float("nan")}, "epsilon is nan, allowed: 0 to 1"),
        ({"beta": 0}, "beta is 0.0, allowed: more than 0, at most 1"),
        ({"beta": 1.5}, "beta is 1.5, allowed: more than 0, at most 1"),
        ({"likelihood": "product"}, "likelihood is 'product', allowed: mean, sum"),
        ({"temperature": 0.0}, "temperature is 0.0, allowed: 1e-09 to 1,000,000"),
        ({"temperature": float("inf")}, "temperature is inf, allowed: 1e-09 to 1,000,000"),
        ({"m_step": "newton"}, "m_step is 'newton', allowed: epochs, steps, gradient"),
        ({"optimizer": "lbfgs"}, "optimizer is 'lbfgs', allowed: adam, sgd"),
        ({"learning_rate": 0.0}, "learning_rate is 0.0, allowed: more than 0, at most 1,000"),
        ({"min_weight": -0.1}, "min_weight is -0.1, allowed: 0 to 1"),
        ({"mixture": "votes"}, "mixture is 'votes', allowed: probabilities, logits"),
        ({"mixture_threshold": 2}, "mixture_threshold is 2.0, allowed: 0 to 1"),
        ({"mixture_size": -1}, "mixture_size is -1, allowed: 0 to 1,000,000"),
        ({"accumulate": "sum"}, "accumulate is 'sum', allowed: true or false"),
        ({"selection": "peers"}, "selection is 'peers', allowed: server, relay"),
        ({"seed": -1}, "seed is -1, allowed: 0 or more"),
    ],
)
def test_bad_arguments_are_refused(wrong, allowed) -> None:
    with pytest.raises(ValueError) as refusal:
        FedeRiCo(**wrong)
    assert str(refusal.value) == allowed


# --- The rounds ---------------------------------------------------------------------------------------

SEED = 3
LOCAL = {
    "local-epochs": 1,
    "local-steps": 2,
    "batch-size": 8,
    "optimizer": "sgd",
    "learning-rate": 0.2,
    "seed": SEED,
    "device": "cpu",
}
CLIENTS = 5

both_selections = pytest.mark.parametrize("selection", ["server", "relay"])


@pytest.fixture(autouse=True)
def _no_pauses_and_only_warnings(monkeypatch, caplog) -> None:
    monkeypatch.setattr(roster, "NODES_PAUSE", 0.0)
    caplog.set_level("WARNING", "flwr")


def linear() -> nn.Module:
    return nn.Linear(4, 2)


def exact() -> nn.Module:
    return nn.Linear(4, 2).double()


def seeded() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Linear(4, 2)


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))


def samples(client: int, dtype: torch.dtype = torch.float32) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Two classes by the sign of a sum; odd clients swap the labels. Clients with higher numbers have more samples."""
    x = torch.randn(50, 4, generator=torch.Generator().manual_seed(client), dtype=torch.float64).to(dtype)
    y = ((x[:, 0] + 0.5 * x[:, 1] > 0).long() + client) % 2
    count = 12 + 2 * client
    return {"train": (x[:count], y[:count]), "test": (x[30:], y[30:])}


def app_of(model: Callable[[], nn.Module]):
    def load_site(context) -> Site:
        name = context.node_config.get("partition-id", context.node_config.get("client-id"))
        return Site(model=model, **samples(name, torch.float64 if model is exact else torch.float32))

    return make_client_app(load_site)


APPS = {model: app_of(model) for model in (linear, exact, seeded, normalised)}
APP = APPS[linear]


def initial(model: Callable[[], nn.Module] = linear) -> ArrayRecord:
    return to_record(get_arrays(model()))


def run(
    grid: InlineGrid | None = None,
    num_rounds: int = 3,
    model: Callable[[], nn.Module] = linear,
    on_round: Callable[[int], None] | None = None,
    local: Mapping[str, Any] | None = None,
    timeout: float = 60,
    strategy: Any = None,
    **settings,
):
    strategy = strategy or FedeRiCo(**{"num_neighbours": 2, "seed": SEED, **settings})
    config = ConfigRecord(LOCAL | dict(local or {}))
    grid = grid or InlineGrid(APPS[model], CLIENTS)
    strategy.start(grid, initial(model), num_rounds, timeout, config, config, on_round=on_round)
    return strategy


def outcome(strategy: FedeRiCo) -> tuple:
    """Return all results of a run except seconds, bytes, and the loss that a relay does not receive."""
    models, clients, weights, rows = everything(strategy)
    return (
        models,
        clients,
        weights,
        [{key: row[key] for key in row if key not in ("bytes-up", "bytes-down", "train-loss")} for row in rows],
    )


@cache
def plain_outcome(num_rounds: int = 3) -> tuple:
    return outcome(run(num_rounds=num_rounds))


class After(NamedTuple):
    """State of a strategy after a round: model arrays by client, and the weights."""

    models: dict[int, dict[str, np.ndarray]]
    weights: np.ndarray


def follow(
    grid: InlineGrid | None = None,
    num_rounds: int = 4,
    changes: Mapping[int, Callable[[], None]] | None = None,
    model: Callable[[], nn.Module] = linear,
    timeout: float = 60,
    **settings,
) -> tuple[FedeRiCo, dict[int, After]]:
    """Run a strategy, call `changes` after the rounds given there, and return the state after each round."""
    strategy = FedeRiCo(**{"num_neighbours": 4, "seed": SEED, **settings})
    after: dict[int, After] = {}

    def on_round(server_round: int) -> None:
        models = {client: read_record(record) for client, record in strategy.client_models().items()}
        after[server_round] = After(models, strategy.collaboration()[1])
        (changes or {}).get(server_round, lambda: None)()

    run(grid, num_rounds, model, on_round, timeout=timeout, strategy=strategy)
    return strategy, after


def differ(models: Mapping[str, np.ndarray], others: Mapping[str, np.ndarray]) -> bool:
    return any(models[name].tobytes() != others[name].tobytes() for name in models)


def neighbours(strategy: FedeRiCo, server_round: int, client: Any = None) -> Any:
    """Clients whose models a client received in a round; without `client`, a dict of client -> list."""
    found = {
        row["client"]: json.loads(row["neighbours"] if "neighbours" in row else row["evaluate-neighbours"])
        for row in strategy.history.rows
        if row["round"] == server_round
    }
    return found if client is None else found[client]


def column(strategy: FedeRiCo, name: str, server_round: int) -> dict:
    return {row["client"]: row[name] for row in strategy.history.rows if row["round"] == server_round}


def statuses(strategy: FedeRiCo) -> set[str]:
    return {row["status"] for row in strategy.history.rows}


def config_of(grid: InlineGrid, client: int) -> dict:
    """Node config of a client, which may be changed."""
    return grid._contexts[1001 + client].node_config


class Passed(NamedTuple):
    server_round: int
    client: int
    kind: str
    down: Any
    up: Any


class Wiretap(FaultyGrid):
    """Records each message as the client receives it, and its reply."""

    def __init__(self, app=APP, num_clients: int = CLIENTS, fate=lambda server_round, client: "ok") -> None:
        super().__init__(app, num_clients, fate)
        self.passed: list[Passed] = []

    def _answer(self, message):
        down, about = message.content, message.metadata
        reply = super()._answer(message)
        if about.message_type in ("train", "evaluate"):
            up = None if reply.has_error() else reply.content
            self.passed.append(Passed(int(about.group_id), about.dst_node_id - 1001, about.message_type, down, up))
        return reply

    def training(self, *server_rounds: int) -> list[Passed]:
        return [
            each
            for each in self.passed
            if each.kind == "train" and (not server_rounds or each.server_round in server_rounds)
        ]


def places(record: ArrayRecord) -> set[str]:
    return {name.partition("/")[0] for name in record}


def start_of(client: int, model: Callable[[], nn.Module]) -> nn.Module:
    """Initial model that a client creates."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_for(SEED, client, MODEL))
        return model()


def train_as_clients_do(model: nn.Module, client: int, server_round: int, **amount: int) -> None:
    x, y = samples(client, next(model.parameters()).dtype)["train"]
    train(
        model,
        x,
        y,
        **amount,
        batch_size=LOCAL["batch-size"],
        optimizer=LOCAL["optimizer"],
        learning_rate=LOCAL["learning-rate"],
        generator=torch.Generator().manual_seed(seed_for(SEED, client, server_round, "train")),
    )


def algorithm_1(
    drawn: Sequence[Mapping[int, Sequence[int]]],
    m_step: str,
    optimizer: str,
    likelihood: str,
    *,
    beta: float | None,
    temperature: float,
    eta: float,
) -> tuple[dict[int, dict[str, np.ndarray]], dict[tuple[int, int], float]]:
    """Compute Algorithm 1 by loops and autograd: the models, and the weights w_ib.

    For each round, `drawn` has the neighbours of each client that replies. Without `beta` losses are accumulated.
    """
    make_optimizer = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}[optimizer]
    phi, optimisers = {}, {}
    loss: dict[tuple[int, int], float] = {}
    average: dict[tuple[int, int], float] = {}
    weight: dict[tuple[int, int], float] = {}
    rounds: Counter[int] = Counter()
    for t, choices in enumerate(drawn, 1):
        for i in choices:
            if i not in phi:
                phi[i] = start_of(i, exact)
                optimisers[i] = make_optimizer(phi[i].parameters(), lr=eta)
        before = copy.deepcopy(phi)
        moves: dict[int, list[list[torch.Tensor]]] = {}
        for i, others in choices.items():
            x, y = samples(i, torch.float64)["train"]
            scale = len(y) if likelihood == "sum" else 1
            for b in (i, *others):
                loss[i, b] = scale * cross_entropy(before[b](x), y).item()
            seen = [b for owner, b in loss if owner == i]
            for b in seen:
                if beta is None:
                    average[i, b] = average.get((i, b), rounds[i] * loss[i, b]) + loss[i, b]
                else:
                    average[i, b] = (1 - beta) * average.get((i, b), 0.0) + beta * loss[i, b]
            rounds[i] += 1
            for b in seen:
                weight[i, b] = math.exp(-average[i, b] / temperature) / sum(
                    math.exp(-average[i, j] / temperature) for j in seen
                )
            for b in (i, *others):
                model = copy.deepcopy(before[b])
                if m_step == "gradient":
                    objective = weight[i, b] * scale * cross_entropy(model(x), y)
                    move = list(torch.autograd.grad(objective, list(model.parameters())))
                else:
                    train_as_clients_do(model, i, t, **{m_step: LOCAL[f"local-{m_step}"]})
                    move = [
                        weight[i, b] * (new - old).detach()
                        for new, old in zip(model.parameters(), before[b].parameters())
                    ]
                moves.setdefault(b, []).append(move)
        for b, lists in moves.items():
            for parameter, *parts in zip(phi[b].parameters(), *lists):
                if m_step == "gradient":
                    parameter.grad = sum(parts)
                else:
                    parameter.data += sum(parts)
            if m_step == "gradient":
                optimisers[b].step()
    return {i: get_arrays(model) for i, model in phi.items()}, weight


@pytest.mark.parametrize("selection", ["server", "relay"])
@pytest.mark.parametrize("clients", [2, 5])
@pytest.mark.parametrize(
    ("m_step", "optimizer", "likelihood", "beta"),
    [
        ("gradient", "sgd", "mean", 0.6),
        ("gradient", "sgd", "mean", None),
        ("gradient", "sgd", "sum", 0.6),
        ("gradient", "adam", "mean", 0.6),
        ("epochs", "adam", "mean", 0.6),
        ("steps", "adam", "sum", 0.6),
    ],
)
def test_rounds_match_algorithm_1(m_step, optimizer, likelihood, beta, clients, selection) -> None:
    """Client 4 joins late; client 2 drops out after its model went to others."""
    away = {(1, 4), (3, 2)}

    def fate(server_round: int, client: int) -> str:
        return "error" if (server_round, client) in away else "ok"

    eta = 0.01 if likelihood == "sum" else 0.3
    strategy = run(
        FaultyGrid(APPS[exact], clients, fate),
        3 if clients == 2 else 5,
        exact,
        m_step=m_step,
        optimizer=optimizer,
        likelihood=likelihood,
        learning_rate=eta,
        num_neighbours=2,
        epsilon=0.5,
        temperature=0.7,
        min_weight=0.0,
        selection=selection,
        accumulate=beta is None,
    )
    last = 3 if clients == 2 else 5
    drawn = [
        {i: others for i, others in neighbours(strategy, t).items() if (t, i) not in away} for t in range(1, last + 1)
    ]
    if clients == 2:
        assert drawn == [{0: [], 1: []}, {0: [1], 1: [0]}, {0: [1], 1: [0]}]
    else:
        assert any(2 in others for others in drawn[2].values()) and 2 not in drawn[2]  # sampled, and then gone
        assert drawn[0] == {i: [] for i in range(4)} and not any(4 in others for others in drawn[1].values())
        assert all(len(others) == 2 for choices in drawn[1:] for others in choices.values())
    models, weights = algorithm_1(drawn, m_step, optimizer, likelihood, beta=beta, temperature=0.7, eta=eta)
    for client, record in strategy.client_models().items():
        for name, array in read_record(record).items():
            assert array == pytest.approx(models[client][name], abs=1e-10), (client, name)
    names, found = strategy.collaboration()
    assert names == list(range(clients))
    assert found == pytest.approx(np.array([[weights.get((i, j), 0.0) for j in names] for i in names]), abs=1e-10)


def test_clients_start_from_different_weights_and_find_similar_clients() -> None:
    grid = Wiretap()
    strategy = run(grid, 12, local={"local-epochs": 2}, num_neighbours=3, temperature=0.2)
    begun = [each.up["arrays"]["model/weight"].numpy() for each in grid.training(1)]
    assert len({array.tobytes() for array in begun}) == CLIENTS
    for client, array in zip((each.client for each in grid.training(1)), begun):
        assert array.tobytes() == start_of(client, linear).weight.detach().numpy().tobytes()
    clients, weights = strategy.collaboration()
    alike = (np.array(clients)[:, None] + np.array(clients)) % 2 == 0
    assert (weights * alike).sum(axis=1).min() > 0.75
    assert strategy.history.rounds[-1]["accuracy"] > 0.85


def test_without_neighbours_it_equals_local_training() -> None:
    settings = {"num_rounds": 3, "model": seeded, "local": {"local-epochs": 2}}
    ours, plain = run(num_neighbours=0, **settings), run(strategy=Local(), **settings)
    for client, record in plain.client_models().items():
        for name, array in read_record(record).items():
            assert read_record(ours.client_models()[client])[name] == pytest.approx(array, abs=1e-6)
    for server_round in (1, 2, 3):  # FedeRiCo reports in the next round what Local reports of the model just trained
        trained = column(plain, "personal-accuracy", server_round)
        assert column(ours, "personal-accuracy", server_round + 1) == trained
        assert column(ours, "received-accuracy", server_round + 1) == trained
    clients, weights = ours.collaboration()
    assert clients == list(range(CLIENTS)) and weights.tolist() == np.eye(CLIENTS).tolist()


@pytest.mark.parametrize("m_step", ["epochs", "gradient"])
@pytest.mark.parametrize("min_weight", [0.0, 0.001])
def test_one_hot_weights_pass_no_update_to_other_clients(m_step, min_weight) -> None:
    def opposites(temperature: float, neighbours: int) -> FedeRiCo:
        return run(
            InlineGrid(APP, 2),
            m_step=m_step,
            temperature=temperature,
            num_neighbours=neighbours,
            min_weight=min_weight,
            learning_rate=0.5,
            beta=1.0,
        )

    hot = opposites(1e-6, 1)
    assert hot.collaboration()[1].tolist() == [[1, 0], [0, 1]]
    models, alone = outcome(hot)[0], outcome(opposites(1e-6, 0))[0]
    assert models == alone != outcome(opposites(1.0, 1))[0]
    assert [line.get("updates-withheld") for line in hot.history.rounds] == [0, 2, 2, None]


@both_selections
@pytest.mark.parametrize("m_step", ["epochs", "gradient"])
def test_the_order_of_replies_changes_no_bit(m_step, selection) -> None:
    reference = everything(run(m_step=m_step, selection=selection))
    for seed in range(2):
        assert everything(run(ShuffledGrid(APP, CLIENTS, seed), m_step=m_step, selection=selection)) == reference


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"m_step": "gradient"},
        {"fraction_train": 0.5},
        {"epsilon": 0.9, "likelihood": "sum", "temperature": 5.0},
        {"mixture": "logits", "mixture_threshold": 0.2},
        {"num_neighbours": 1, "mixture_size": 2},
        {"accumulate": True},
    ],
)
def test_a_relay_gives_the_same_result_as_selection_at_the_server(settings) -> None:
    def fate(server_round: int, client: int) -> str:
        return "error" if (server_round, client) in {(1, 0), (3, 2)} else "ok"

    outcomes = []
    for selection in ("server", "relay"):
        grid = FaultyGrid(APP, CLIENTS, fate)
        config_of(grid, 4)["share-model"] = False
        outcomes.append(outcome(run(grid, 5, selection=selection, **settings)))
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("m_step", ["epochs", "gradient"])
def test_a_client_that_drops_out_after_sampling_loses_only_its_own_training(m_step) -> None:
    """Its model still changes, by the updates of the clients that received it."""
    ends = []
    for fate in ("error", "lost", "silent"):

        def drops(server_round: int, client: int, fate: str = fate) -> str:
            return fate if (server_round, client) == (3, 1) else "ok"

        strategy, after = follow(FaultyGrid(APP, CLIENTS, drops), 3, m_step=m_step, timeout=0.3)
        assert all(1 in neighbours(strategy, 3, other) for other in (0, 2, 3, 4))
        assert sorted(neighbours(strategy, 3, 1)) == [0, 2, 3, 4] and column(strategy, "status", 3)[1] != "ok"
        assert differ(after[3].models[1], after[2].models[1])
        assert (after[3].weights[1] == after[2].weights[1]).all()
        ends.append(outcome(strategy)[:3])
    assert ends[0] == ends[1] == ends[2]


# --- Messages -----------------------------------------------------------------------------------------


@both_selections
def test_small_weights_send_no_update(selection) -> None:
    grid = Wiretap()
    strategy, after = follow(grid, num_neighbours=3, min_weight=0.25, selection=selection)
    counts = Counter()
    for each in grid.training():
        available = [each.client, *neighbours(strategy, each.server_round, each.client)]
        weights = after[each.server_round].weights[each.client, available]
        assert places(each.up["arrays"]) - {"model"} == {str(place) for place in np.flatnonzero(weights >= 0.25)}
        withheld = int((weights < 0.25).sum())
        assert column(strategy, "updates-withheld", each.server_round)[each.client] == withheld
        counts[each.server_round] += withheld
    assert [line["updates-withheld"] for line in strategy.history.rounds[:4]] == [counts[r] for r in (1, 2, 3, 4)]
    assert counts[1] == 0 and 0 < counts[4] < 4 * CLIENTS


def test_without_updates_no_model_changes() -> None:
    strategy, after = follow(num_neighbours=2, min_weight=1.0)
    assert not any(differ(after[4].models[client], after[1].models[client]) for client in range(CLIENTS))
    assert strategy.history.rounds[2]["updates-withheld"] == 3 * CLIENTS and statuses(strategy) == {"ok"}


@cache
def sizes(clients: int, num_neighbours: int, selection: str = "server") -> set[tuple[int, int]]:
    """Bytes down and up per client, in a round in which all models exist."""
    grid = InlineGrid(APP, clients)
    for number in range(clients):
        config_of(grid, number)["client-id"] = chr(ord("a") + number)
    strategy = run(grid, 3, num_neighbours=num_neighbours, min_weight=0.0, selection=selection)
    return {(row["bytes-down"], row["bytes-up"]) for row in strategy.history.rows if row["round"] == 3}


def test_message_size_grows_with_the_neighbours_and_not_with_the_clients() -> None:
    assert len(sizes(6, 2)) == 1
    assert sizes(6, 2) == sizes(12, 2)
    (one,), (two,), (three,) = (sizes(6, num_neighbours) for num_neighbours in (1, 2, 3))
    parameters = 4 * 10
    for direction in (0, 1):
        assert two[direction] - one[direction] == three[direction] - two[direction] > parameters


def test_a_client_receives_its_own_model_and_no_more_than_it_requested() -> None:
    grid = Wiretap()
    strategy = run(grid)
    for each in grid.passed:
        available = decode(each.down["config"]["models"])
        assert available == [each.client, *neighbours(strategy, each.server_round, each.client)]
        there = {str(place) for place in range(len(available))} if each.server_round > 1 else set()
        assert places(each.down["arrays"]) == there
        if each.kind == "train":
            assert len(available) == (1 if each.server_round == 1 else 3)
            assert ("model" in places(each.up["arrays"])) == (each.server_round == 1)
    assert [line["models-sent"] for line in strategy.history.rounds[:3]] == [0, 3 * CLIENTS, 3 * CLIENTS]


def relay_grid(**node_config) -> Wiretap:
    """Clients without a partition-id, as at sites."""
    grid = Wiretap()
    for number in range(CLIENTS):
        config_of(grid, number).clear()
        config_of(grid, number).update({"client-id": number, **node_config})
    return grid


@pytest.mark.parametrize(
    ("grid", "agreed"),
    [
        (Wiretap, True),
        (relay_grid, False),
        (lambda: relay_grid(**{"report-weights": True}), True),
        (lambda: relay_grid(**{"report-weights": False}), False),
    ],
)
def test_a_relay_receives_losses_and_weights_only_if_the_site_agrees(grid, agreed) -> None:
    grid = grid()
    strategy = run(grid, selection="relay", mixture_threshold=0.0)
    assert statuses(strategy) == {"ok"}
    for each in grid.training():
        assert set(each.up["config"]) == {"neighbours", "mixture"} | ({"weights", "weights-of"} if agreed else set())
        assert set(each.up["metrics"]) == {
            "num-examples",
            "num-test-examples",
            "mixture-accuracy",
            "mixture-loss",
            "received-accuracy",
            "received-loss",
            "samples-trained",
            "samples-predicted",
        } | ({f"mixture-{name}" for name in Classes.reports} if each.down["config"].get("last-round") else set())
        assert not {"smoothed-losses", "log-rest"} & set(each.down["config"])
    clients, weights = strategy.collaboration()
    if agreed:
        assert clients == list(range(CLIENTS)) and weights.sum(axis=1) == pytest.approx(1)
    else:
        assert clients == [] and weights.shape == (0, 0)
    # The computation is the same in both cases.
    assert outcome(strategy)[0] == outcome(run(mixture_threshold=0.0))[0]
    assert strategy.losses == {}


def test_the_server_knows_the_weights_of_clients_that_report_them() -> None:
    grid = Wiretap()
    config_of(grid, 1)["report-weights"] = False
    clients, weights = run(grid, selection="relay").collaboration()
    assert clients == list(range(CLIENTS))
    assert weights.sum(axis=1) == pytest.approx([1, 0, 1, 1, 1])


def changed(**entries: Any) -> Callable[[Any], None]:
    """Replace entries of a reply's config; remove those that are None."""

    def change(content) -> None:
        config = {**content["config"], **{key.replace("_", "-"): entry for key, entry in entries.items()}}
        content["config"] = ConfigRecord({key: entry for key, entry in config.items() if entry is not None})

    return change


@pytest.mark.parametrize(
    ("wish", "due"),
    [
        ('[17, "0", -1]', []),  # of no client
        ("[2]", []),  # its own model
        ("[0, 0, 2, 0, 1, 3]", [0, 1]),
        ("[0]", [0]),
        ("[]", []),
        ("[null, 1.0, true, 4]", [4]),
        ("[" * 100_000, []),
        ("0", []),
        ([0, 1], []),
        ([], []),  # which Flower cannot count
        ("", []),
        (7, []),
        (None, []),
        (str([3] * 50_000 + [1]), [3, 1]),
    ],
)
def test_malformed_requests_are_harmless(wish, due) -> None:
    def fate(server_round: int, client: int) -> object:
        return changed(neighbours=wish, mixture=wish) if client == 2 else "ok"

    for mixture_size in (2, 0):
        strategy = run(FaultyGrid(APP, CLIENTS, fate), 3, selection="relay", mixture_size=mixture_size)
        assert statuses(strategy) == {"ok"}
        assert [neighbours(strategy, server_round, 2) for server_round in (1, 2, 3)] == [[], due, due]
        assert all(len(neighbours(strategy, 3, client)) == 2 for client in (0, 1, 3, 4))
        # The closing evaluation sends the others' models that it wants, each once, and at most mixture_size.
        assert neighbours(strategy, 4, 2)[: mixture_size or 2] == due and len(set(neighbours(strategy, 4, 2))) <= 4
        assert not mixture_size or neighbours(strategy, 4, 2) == due


def test_a_relay_runs_clients_that_have_no_neighbours() -> None:
    alone = run(InlineGrid(APP, 1), selection="relay", min_available_nodes=1)
    assert statuses(alone) == {"ok"} and neighbours(alone, 3) == {0: []}
    grid = InlineGrid(APP, 2)
    for client in (0, 1):
        config_of(grid, client)["share-model"] = False
    private = run(grid, selection="relay")
    assert statuses(private) == {"ok"} and neighbours(private, 3) == {0: [], 1: []}


@pytest.mark.parametrize(
    ("weights_of", "weights"),
    [
        (None, [1.0]),
        ("[2]", 1.0),
        ("[2]", ["1"]),
        ("[2]", [2.0]),
        ("[2]", [float("nan")]),
        ("[2, 1]", [1.0]),
        ("[2, 1]", [1.5, -0.5]),
        ("[2, 1]", [0.5, 0.4]),
    ],
)
def test_malformed_weights_count_as_missing(weights_of, weights) -> None:
    def fate(server_round: int, client: int) -> object:
        return changed(weights_of=weights_of, weights=weights) if client == 2 else "ok"

    strategy = run(FaultyGrid(APP, CLIENTS, fate), 2, selection="relay")
    clients, found = strategy.collaboration()
    assert clients == list(range(CLIENTS)) and found.sum(axis=1) == pytest.approx([1, 1, 0, 1, 1])
    assert outcome(strategy)[0] == plain_outcome(2)[0]


def fate_of_3(fate: object, server_round: int) -> Callable[[int, int], object]:
    return lambda number, client: fate if (number, client) == (server_round, 3) else "ok"


@cache
def without_3(server_round: int, **settings) -> tuple:
    """Return the results of a run in which client 3's reply is lost in one round."""
    return outcome(run(FaultyGrid(APP, CLIENTS, fate_of_3("lost", server_round)), 3, **settings))[:3]


def check_that_it_is_refused(damage: Callable[[Any], None], reason: str, server_round: int = 2, **settings) -> None:
    """Check that client 3's reply is refused for this reason, and the run equals one in which it is lost."""
    bad = run(FaultyGrid(APP, CLIENTS, fate_of_3(damage, server_round)), 3, **settings)
    (row,) = (row for row in bad.history.rows if row["status"] != "ok")
    assert (row["round"], row["client"], row["status"]) == (server_round, 3, f"refused: {reason}")
    assert outcome(bad)[:3] == without_3(server_round, **settings)


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        (None, "None"),
        ([0.5, 0.5], "[0.5, 0.5]"),
        ([0.5] * 4, "[0.5, 0.5, 0.5, 0.5]"),
        ([0.5, 0.5, float("nan")], "[0.5, 0.5, nan]"),
        ([0.5, 0.5, float("inf")], "[0.5, 0.5, inf]"),
        ([0.5, -1e13, 0.5], "[0.5, -10000000000000.0, 0.5]"),
        (["a", "b", "c"], "['a', 'b', 'c']"),
        (0.5, "0.5"),
    ],
)
def test_malformed_losses_are_refused(losses, said) -> None:
    check_that_it_is_refused(changed(losses=losses), f"its losses are {said}, expected 3 numbers up to 1e+12")


def arrays(**new: np.ndarray | None) -> Callable[[Any], None]:
    """Replace arrays of a reply; the first _ of a name represents /."""

    def change(content) -> None:
        for name, array in new.items():
            key = name.replace("_", "/", 1).removeprefix("at")
            if array is None:
                del content["arrays"][key]
            else:
                content["arrays"][key] = Array(array)

    return change


WEIGHT, BIAS = np.ones((2, 4), np.float32), np.ones(2, np.float32)


@pytest.mark.parametrize(
    ("damage", "reason", "server_round"),
    [
        (arrays(at3_weight=WEIGHT), "arrays '3' belong to no model that was sent", 2),
        (arrays(at00_weight=WEIGHT), "arrays '00' belong to no model that was sent", 2),
        (arrays(other_weight=WEIGHT), "arrays 'other' belong to no model that was sent", 2),
        (arrays(at0_weight=WEIGHT.T.copy()), "array 'weight' is float32 (4, 2), expected float32 (2, 4)", 2),
        (arrays(at1_bias=BIAS.astype(np.float64)), "array 'bias' is float64 (2,), expected float32 (2,)", 2),
        (arrays(at0_backdoor=BIAS), "array 'backdoor' is not part of the model", 2),
        (arrays(at2_bias=BIAS * np.nan), "array '2/bias' has values that are not finite: did training diverge?", 2),
        (arrays(at2_bias=np.full_like(BIAS, 1e20)), "array '2/bias' holds 1e+20, allowed: up to 1e+15", 2),
        (arrays(at2_bias=np.full_like(BIAS, -2e15)), "array '2/bias' holds 2e+15, allowed: up to 1e+15", 2),
        (arrays(model_weight=WEIGHT, model_bias=BIAS), "it holds a model where an update is expected", 2),
        (arrays(model_weight=None, model_bias=None), "its model is missing", 1),
        (arrays(model_bias=None), "array 'bias' is missing", 1),
        (arrays(at1_weight=WEIGHT), "arrays '1' belong to no model that was sent", 1),
    ],
)
def test_malformed_updates_are_refused(damage, reason, server_round) -> None:
    # With min-weight 0 the reply has every array that is damaged here.
    check_that_it_is_refused(damage, reason, server_round, min_weight=0.0)


def _diverged(content) -> None:
    for name in content["arrays"]:
        if name.startswith("model/"):
            values = np.full_like(content["arrays"][name].numpy(), 9e14)
            values[0] *= -1
            content["arrays"][name] = Array(values)


@both_selections
@pytest.mark.parametrize("min_weight", [0.0, 0.001])
def test_a_diverged_model_affects_no_other_client(min_weight, selection) -> None:
    def fate(server_round: int, client: int) -> object:
        return _diverged if (server_round, client) == (1, 3) else "ok"

    strategy = run(
        FaultyGrid(APP, CLIENTS, fate),
        6,
        num_neighbours=4,
        min_weight=min_weight,
        selection=selection,
        temperature=0.05,
    )
    assert statuses(strategy) == {"ok"}
    clients, weights = strategy.collaboration()
    assert weights.sum(axis=1) == pytest.approx(1) and weights[:, 3].tolist() == [0] * CLIENTS
    for row in strategy.history.rows:
        assert np.isfinite(row["personal-loss"])
        assert all(
            np.isfinite(array).all()
            for record in strategy.client_models().values()
            for array in read_record(record).values()
        )
    assert strategy.history.rounds[-1]["accuracy"] > 0.75


# --- Joining and leaving ------------------------------------------------------------------------------


class Crowd(InlineGrid):
    """Nodes that connect and disconnect."""

    def __init__(self, app=APP, num_clients: int = CLIENTS) -> None:
        super().__init__(app, num_clients)
        self._everyone = dict(self._contexts)

    def leaves(self, client: int) -> None:
        del self._contexts[1001 + client]

    def comes(self, client: int) -> None:
        self._contexts[1001 + client] = self._everyone[1001 + client]

    def withdraws(self, client: int) -> None:
        """Connect a client again, as node 2000, that does not share its model."""
        self.leaves(client)
        context = copy.deepcopy(self._everyone[1001 + client])
        context.node_id = 2000
        context.node_config["share-model"] = False
        self._contexts[2000] = context


@both_selections
@pytest.mark.parametrize("share_absent", [False, True])
def test_the_model_of_a_disconnected_client_is_used_only_with_share_absent(share_absent, selection) -> None:
    grid = Crowd()
    changes = {2: lambda: grid.leaves(4), 4: lambda: grid.comes(4)}
    strategy, after = follow(grid, 6, changes, share_absent=share_absent, selection=selection)
    assert statuses(strategy) == {"ok"}
    for server_round in (3, 4):
        found = neighbours(strategy, server_round)
        assert set(found) == {0, 1, 2, 3}
        assert all((4 in others) == share_absent for others in found.values())
        assert differ(after[server_round].models[4], after[server_round - 1].models[4]) == share_absent
    # In round 5 it is back and receives the others' models; they request its model in that round.
    assert sorted(neighbours(strategy, 5, 4)) == [0, 1, 2, 3]
    assert all(4 in others for client, others in neighbours(strategy, 6).items() if client != 4)


@pytest.mark.parametrize("share_absent", [False, True])
def test_closing_mixtures_contain_available_models_only(share_absent) -> None:
    grid = Crowd()
    strategy, _ = follow(
        grid, 3, {2: lambda: grid.leaves(4)}, share_absent=share_absent, mixture_threshold=0.0, temperature=10.0
    )
    assert all(
        (4 in others) == share_absent and len(others) == 3 + share_absent for others in neighbours(strategy, 4).values()
    )


@both_selections
def test_a_new_client_is_explored(selection) -> None:
    grid = Crowd()
    grid.leaves(4)
    strategy, _ = follow(grid, 6, {4: lambda: grid.comes(4)}, num_neighbours=1, epsilon=0.0, selection=selection)
    for client in range(4):
        # One new model a round until all have been received.
        seen = [neighbours(strategy, server_round, client)[0] for server_round in (2, 3, 4)]
        assert sorted([client, *seen]) == [0, 1, 2, 3]
        assert neighbours(strategy, 5, client) != [4] == neighbours(strategy, 6, client)
    assert neighbours(strategy, 5, 4)[0] in range(4)
    clients, weights = strategy.collaboration()
    assert clients == [0, 1, 2, 3, 4]
    assert np.count_nonzero(weights[4]) == 3  # its own model, and one in each of its rounds
    assert (weights[:4] > 0).all()


@both_selections
def test_a_client_without_a_model_is_replaced_by_the_next_candidate(selection) -> None:
    def fate(server_round: int, client: int) -> str:
        return "error" if client == 3 and server_round < 3 else "ok"

    strategy = run(FaultyGrid(APP, 4, fate), 4, num_neighbours=2, epsilon=1.0, selection=selection)
    for server_round in (2, 3):
        found = neighbours(strategy, server_round)
        assert {client: sorted(found[client]) for client in (0, 1, 2)} == {0: [1, 2], 1: [0, 2], 2: [0, 1]}
        assert len(found[3]) == 2
    assert any(3 in others for others in neighbours(strategy, 4).values())


@both_selections
def test_a_site_that_does_not_share_its_model_trains_alone(selection) -> None:
    grid = Wiretap()
    config_of(grid, 1)["share-model"] = False
    strategy = run(grid, num_neighbours=4, selection=selection)
    for each in grid.passed:
        available = decode(each.down["config"]["models"])
        assert available == [1] if each.client == 1 else 1 not in available
        if each.client != 1 and each.kind == "train" and each.server_round > 1:
            assert len(available) == 4
    alone = run(num_neighbours=0, selection=selection)
    assert values(strategy.client_models()[1]) == values(alone.client_models()[1])
    for server_round in range(1, 5):
        for name in ("personal-accuracy", "personal-loss"):
            assert column(strategy, name, server_round)[1] == column(alone, name, server_round)[1]
    assert values(strategy.client_models()[0]) != values(alone.client_models()[0])


@pytest.mark.parametrize("wish", ["false", 0, "no"])
def test_an_invalid_share_model_entry_is_refused(wish) -> None:
    grid = Wiretap()
    config_of(grid, 1)["share-model"] = wish
    strategy = run(grid)
    assert strategy.history.left_out == {
        1: f"it cannot introduce itself: ValueError: share-model is {wish!r}, allowed: true, false"
    }
    assert all(each.client != 1 for each in grid.passed if each.kind == "train")


@both_selections
@pytest.mark.parametrize("share_absent", [False, True])
def test_a_site_can_withdraw_its_model(share_absent, selection) -> None:
    """It does so when it connects again, as another node."""
    grid = Crowd()

    strategy, _ = follow(grid, 5, {2: lambda: grid.withdraws(1)}, share_absent=share_absent, selection=selection)
    assert statuses(strategy) == {"ok"}
    assert all(1 in neighbours(strategy, 2, client) for client in (0, 2, 3, 4))
    for server_round in (3, 4, 5, 6):
        assert neighbours(strategy, server_round, 1) == []
        assert not any(1 in others for others in neighbours(strategy, server_round).values())


# --- Evaluation ---------------------------------------------------------------------------------------


def probabilities_of(models: Iterable[Mapping[str, np.ndarray]], client: int) -> np.ndarray:
    """Probabilities of each model on a client's test data, shape (k, n, N)."""
    found = []
    for model in models:
        module = linear()
        set_arrays(module, model)
        found.append(predict(module, samples(client)["test"][0]))
    return np.stack(found)


def mixtures_of(
    strategy: FedeRiCo, after: Mapping[int, After], client: int, threshold: float, size: int
) -> list[dict[int, tuple[dict[str, np.ndarray], float]]]:
    """Return for each round, from the first, what a client predicts with: owner -> model, share; the client first."""
    last_round = max(after) - 1  # the closing evaluation is none
    kept: dict[int, dict[str, np.ndarray]] = {}
    found = []
    for t in range(1, last_round + 1):
        for other in (client, *neighbours(strategy, t, client)):
            kept[other] = get_arrays(start_of(client, linear)) if t == 1 else after[t - 1].models[other]
        weights = after[t].weights[client]
        members = [other for other in np.argsort(-weights, kind="stable").tolist() if weights[other] >= threshold]
        members = [client, *[other for other in members if other != client][: size or CLIENTS]]
        if size:
            kept = {other: model for other, model in kept.items() if other in members}
        members = [other for other in members if other in kept]
        shares = weights[members] / weights[members].sum()
        shares = np.where(shares >= threshold, shares, 0)
        shares /= shares.sum()
        found.append({other: (kept[other], share) for other, share in zip(members, shares.tolist())})
    return found


@both_selections
@pytest.mark.parametrize("size", [0, 1])
@pytest.mark.parametrize("mixture", ["probabilities", "logits"])
def test_a_round_mixes_the_last_copies_of_all_models_received_so_far(mixture, size, selection) -> None:
    settings = {"mixture": mixture, "mixture_threshold": 0.1, "mixture_size": size, "selection": selection}
    strategy, after = follow(num_rounds=6, num_neighbours=1, temperature=0.4, **settings)
    counts = []
    for client in range(CLIENTS):
        labels = samples(client)["test"][1].numpy()
        for t, mixed in enumerate(mixtures_of(strategy, after, client, 0.1, size), 1):
            models, shares = zip(*mixed.values())
            probabilities = probabilities_of(models, client)
            (row,) = (row for row in strategy.history.rows if (row["round"], row["client"]) == (t, client))
            rows = mixture_of(probabilities, np.array(shares), mixture)
            for which, predicted in (("mixture", rows), ("personal", rows), ("received", probabilities[0])):
                accuracy, loss = accuracy_and_loss(predicted, labels)
                assert row[f"{which}-accuracy"] == accuracy
                assert row[f"{which}-loss"] == pytest.approx(loss)
            counts.append(len(mixed))
    assert max(counts) == 2 if size else max(counts) > 2


def files_of(grid: InlineGrid, client: int, name: str = "received-*") -> list[str]:
    """Names of the files with copies of models that a client keeps."""
    folder = saved_files(grid.run.run_id, MIXTURE)[client].parent
    return sorted(path.stem for path in folder.glob(f"{name}.safetensors") if _arrays_in(path))


def _arrays_in(path: Path) -> int:
    with safe_open(path, "numpy") as file:
        return len(list(file.keys()))


@both_selections
@pytest.mark.parametrize(("size", "most"), [(0, 4), (1, 1), (2, 2)])
def test_a_client_keeps_a_copy_of_each_model_or_of_as_many_as_it_may_mix(size, most, selection) -> None:
    grid = InlineGrid(APP, CLIENTS)
    strategy, _ = follow(grid, 6, num_neighbours=2, epsilon=1.0, mixture_size=size, selection=selection)
    for client in range(CLIENTS):
        received = {other for t in range(1, 7) for other in neighbours(strategy, t, client)}
        kept = files_of(grid, client)
        assert set(kept) <= {f"received-client-{other}" for other in received}
        assert len(kept) <= most
        assert size or len(kept) == len(received)
        # Of each, at most one more version: the round before may be repeated.
        assert len(files_of(grid, client, ".received-*")) <= len(received)


def test_predictions_of_kept_models_are_not_computed_again(monkeypatch) -> None:
    predicted = Counter()

    def counted(*arguments):
        predicted["copies"] += 1
        return predict(*arguments)

    monkeypatch.setattr(federico_copies, "predict", counted)
    strategy, after = follow(num_rounds=5, num_neighbours=1, mixture_threshold=0.05)
    own_and_sent = CLIENTS + sum(map(len, neighbours(strategy, 6).values()))
    assert any(len(mixed) > 2 for mixed in mixtures_of(strategy, after, 0, 0.05, 0))
    assert predicted["copies"] == own_and_sent  # in the closing evaluation, once each


def test_a_site_that_restarts_with_other_test_data_predicts_with_kept_models_again() -> None:
    count = 20

    def load_site(context) -> Site:
        data = samples(context.node_config["partition-id"])
        return Site(model=linear, train=data["train"], test=(data["test"][0][:count], data["test"][1][:count]))

    def restarts() -> None:
        nonlocal count
        count = 15
        forget_sites()

    settings = {"num_neighbours": 1, "mixture_threshold": 0.05}
    strategy, after = follow(InlineGrid(make_client_app(load_site), CLIENTS), 6, {4: restarts}, **settings)
    assert statuses(strategy) == {"ok"}
    for client in range(CLIENTS):
        for t, number in ((4, 20), (5, 15), (6, 15)):
            models, shares = zip(*mixtures_of(strategy, after, client, 0.05, 0)[t - 1].values())
            rows = mixture_of(probabilities_of(models, client)[:, :number], np.array(shares))
            _, loss = accuracy_and_loss(rows, samples(client)["test"][1].numpy()[:number])
            assert column(strategy, "mixture-loss", t)[client] == pytest.approx(loss)


@both_selections
def test_copies_of_a_withdrawn_model_stay_with_the_others_and_its_owner_predicts_alone(selection) -> None:
    grid = Crowd()

    settings = {"mixture_threshold": 0.0, "temperature": 5.0, "selection": selection}
    strategy, after = follow(grid, 5, {3: lambda: grid.withdraws(1)}, **settings)
    assert statuses(strategy) == {"ok"} and not any(1 in others for others in neighbours(strategy, 6).values())
    mixtures = {client: Mixture.load(path) for client, path in saved_files(grid.run.run_id, MIXTURE).items()}
    for client in (0, 2, 3, 4):
        kept = mixtures[client].models[mixtures[client].clients.index(1)]
        assert not differ(kept, after[2].models[1])  # as received in round 3
        assert "received-client-1" in files_of(grid, client)
    assert mixtures[1].clients == [1] and mixtures[1].shares.tolist() == [1.0]
    assert not differ(mixtures[1].models[0], after[5].models[1])
    assert files_of(grid, 1) == []


@both_selections
@pytest.mark.parametrize("share_absent", [False, True])
def test_the_last_mixture_has_a_copy_where_no_new_model_is_available(share_absent, selection) -> None:
    grid = Crowd()
    settings = {"mixture_threshold": 0.0, "temperature": 5.0, "selection": selection, "share_absent": share_absent}
    _, after = follow(grid, 5, {3: lambda: grid.leaves(4)}, **settings)
    for client, path in saved_files(grid.run.run_id, MIXTURE).items():
        if client != 4:
            loaded = Mixture.load(path)
            assert set(loaded.clients) == set(range(CLIENTS))
            newest = after[5 if share_absent else 2].models[4]
            assert not differ(loaded.models[loaded.clients.index(4)], newest)
            weights = after[5].weights[client, loaded.clients]
            assert loaded.shares == pytest.approx(weights / weights.sum())


@both_selections
@pytest.mark.parametrize("mixture", ["probabilities", "logits"])
def test_a_stored_mixture_predicts_without_a_server(mixture, selection) -> None:
    grid = InlineGrid(APP, CLIENTS)
    strategy, after = follow(
        grid, 5, num_neighbours=2, temperature=0.3, mixture=mixture, mixture_threshold=0.15, selection=selection
    )
    files = saved_files(grid.run.run_id, MIXTURE)
    assert sorted(files) == list(range(CLIENTS))
    last = {row["client"]: row for row in strategy.history.rows if row["round"] == 6}
    kept = []
    for client, path in files.items():
        loaded = Mixture.load(path)
        x, labels = samples(client)["test"]
        probabilities = loaded.predict(linear(), x)
        assert probabilities.sum(axis=1) == pytest.approx(np.ones(len(x)), abs=1e-6)
        accuracy, loss = accuracy_and_loss(probabilities, labels.numpy())
        assert (accuracy, loss) == (last[client]["personal-accuracy"], pytest.approx(last[client]["personal-loss"]))
        assert loaded.kind == mixture and loaded.shares.sum() == pytest.approx(1) and (loaded.shares > 0).all()
        assert set(loaded.clients) <= {client, *json.loads(last[client]["evaluate-neighbours"])}
        assert set(loaded.clients) - {client} == set(np.flatnonzero(after[5].weights[client] >= 0.15)) - {client}
        for owner, model in zip(loaded.clients, loaded.models):
            assert not differ(model, after[5].models[owner])
        own, _ = accuracy_and_loss(probabilities_of([after[5].models[client]], client)[0], labels.numpy())
        assert last[client]["received-accuracy"] == own
        kept.append(len(loaded.clients))
    assert max(kept) > 1
    # By the weights, over the models with the least share or more.
    for client, path in files.items():
        loaded = Mixture.load(path)
        counted = after[5].weights[client, loaded.clients]
        assert (counted >= 0.15).all()
        assert loaded.shares == pytest.approx(counted / counted.sum())


@pytest.mark.parametrize("damage", ["truncated", "empty", "text", "another kind", "no model"])
def test_a_damaged_mixture_is_reported_in_one_line(damage, tmp_path) -> None:
    from safetensors.numpy import save_file

    grid = InlineGrid(APP, 2)
    run(grid, 2)
    whole = saved_files(grid.run.run_id, MIXTURE)[0].read_bytes()
    path = tmp_path / "mixture.safetensors"
    path.write_bytes(whole)
    Mixture.load(path)
    if damage == "another kind":
        save_file({"weight": WEIGHT}, path)
    elif damage == "no model":
        save_file({"shares": np.ones(1)}, path, {"clients": '["0"]', "kind": "probabilities"})
    else:
        path.write_bytes({"truncated": whole[:-10], "empty": b"", "text": b"no tensors here"}[damage])
    with pytest.raises(ValueError) as refusal:
        Mixture.load(path)
    assert str(refusal.value).startswith(f"{path} holds no mixture of models (") and "\n" not in str(refusal.value)


# --- Running statistics -------------------------------------------------------------------------------


@both_selections
@pytest.mark.parametrize("m_step", ["epochs", "gradient"])
def test_running_statistics_come_from_the_model_s_owner_alone(m_step, selection) -> None:
    def fate(server_round: int, client: int) -> str:
        return "error" if (server_round, client) == (3, 1) else "ok"

    grid = Wiretap(APPS[normalised], fate=fate)
    strategy, after = follow(grid, model=normalised, m_step=m_step, min_weight=0.0, selection=selection)
    buffers = ("1.running_mean", "1.running_var")
    for each in grid.training():
        sent = {name for name in each.up["arrays"] if name.endswith(buffers) and not name.startswith("model/")}
        assert sent == {f"0/{name}" for name in buffers}
        assert not any("num_batches" in name for name in each.up["arrays"] if not name.startswith("model/"))
    for server_round in (2, 3, 4):
        for client in range(CLIENTS):
            before, now = (after[number].models[client] for number in (server_round - 1, server_round))
            module = normalised()
            set_arrays(module, before)
            if m_step == "gradient":
                module.train()(samples(client)["train"][0])
            else:
                train_as_clients_do(module, client, server_round, epochs=1)
            counted = get_arrays(module)
            there = (server_round, client) != (3, 1)
            for name in buffers:
                assert now[name] == pytest.approx((counted if there else before)[name], abs=1e-5)
                assert not there or now[name] != pytest.approx(before[name], abs=1e-5)
            assert now["0.weight"] != pytest.approx(before["0.weight"], abs=1e-5)  # other clients receive it too
            assert now["1.num_batches_tracked"].dtype == np.int64 and now["1.num_batches_tracked"] >= 0
            assert all(np.isfinite(array).all() for array in now.values())
    assert statuses(strategy) == {"ok", "error 0: the worker"}


# --- Settings -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "others"),
    [
        ({"num_neighbours": 1}, {}),
        ({"epsilon": 1.0}, {}),
        ({"beta": 0.9}, {}),
        ({"likelihood": "sum"}, {}),
        ({"temperature": 0.5}, {}),
        ({"m_step": "steps"}, {}),
        ({"m_step": "gradient"}, {}),
        ({"optimizer": "sgd"}, {"m_step": "gradient"}),
        ({"learning_rate": 0.02}, {"m_step": "gradient"}),
        ({"min_weight": 0.4}, {}),
        ({"mixture": "logits"}, {}),
        ({"mixture_threshold": 0.4}, {}),
        ({"mixture_size": 1}, {}),
        ({"accumulate": True}, {}),
        ({"seed": 4}, {}),
    ],
)
def test_every_setting_changes_the_result(setting, others) -> None:
    plain = outcome(run(**others)) if others else plain_outcome()
    other = outcome(run(**setting, **others))
    evaluation_alone = {"mixture", "mixture_threshold", "mixture_size"} & set(setting)
    assert (other[0] == plain[0]) == bool(evaluation_alone)
    assert other[3] != plain[3]


def test_selection_and_share_absent_reach_the_clients() -> None:
    """Their effects are tested above; here, that nothing else changes."""
    assert outcome(run(selection="relay")) == plain_outcome() == outcome(run(share_absent=False))
    assert everything(run(selection="relay")) != everything(run())


# --- Malicious clients, and sites that do not trust the server -----------------------------------------


def test_a_site_that_does_not_share_refuses_a_server_that_ignores_this() -> None:
    """As when its introduction is lost on the way."""
    grid = Wiretap()
    for number in range(CLIENTS):
        config_of(grid, number)["client-id"] = 1001 + number
    config_of(grid, 1)["share-model"] = False

    class Silent(FedeRiCo):
        def introduce(self, newcomers):
            heard = {client: {key: about[key] for key in (METHODS, VERSION_KEY)} for client, about in newcomers.items()}
            return super().introduce(heard)

    strategy = run(grid, strategy=Silent(num_neighbours=2, seed=SEED))
    status = {row["client"]: row["status"] for row in strategy.history.rows if row["round"] == 3}
    assert status.pop(1002).endswith("share-model is false at this site, but the server was not informed")
    assert set(status.values()) == {"ok"} and 1002 not in strategy.client_models()


def test_the_closing_evaluation_runs_although_a_client_reports_no_accuracy() -> None:
    def drop(content) -> None:
        for name in ("mixture-accuracy", "mixture-loss"):
            del content["metrics"][name]

    grid = FaultyGrid(APP, CLIENTS, lambda server_round, client: drop if (server_round, client) == (3, 2) else "ok")
    strategy = run(grid, 3)
    assert set(neighbours(strategy, 4)) == {0, 1, 3, 4}
    row = next(row for row in strategy.history.rows if (row["round"], row["client"]) == (3, 2))
    # The models sent for training and those sent for evaluation are both recorded.
    assert len(json.loads(row["neighbours"])) == 2 and "evaluate-neighbours" in row
    assert len(saved_files(grid.run.run_id, MIXTURE)) == CLIENTS


@both_selections
@pytest.mark.parametrize("mixture_size", [0, 1, 2])
def test_the_closing_evaluation_sends_all_models_of_the_mixture(mixture_size, selection) -> None:
    strategy, after = follow(
        num_rounds=5, num_neighbours=1, selection=selection, mixture_threshold=0.05, mixture_size=mixture_size
    )
    sent = neighbours(strategy, 6)
    for client in range(CLIENTS):
        weights = after[5].weights[client]
        best_first = sorted(set(range(CLIENTS)) - {client}, key=lambda other: -weights[other])
        counted = [other for other in best_first if weights[other] >= 0.05]
        assert sent[client] == counted[: mixture_size or CLIENTS]
    assert max(map(len, sent.values())) == (mixture_size or 4)


@both_selections
def test_the_seed_of_the_strategy_is_used(selection) -> None:
    grids = {seed: Wiretap() for seed in (0, 7)}
    chosen = {
        seed: [neighbours(run(grid, selection=selection, seed=seed), r) for r in (2, 3)] for seed, grid in grids.items()
    }
    assert chosen[0] != chosen[7]
    assert chosen[7] == [neighbours(run(seed=7), r) for r in (2, 3)]


def test_only_the_owner_of_a_model_changes_its_buffers() -> None:
    def change_buffers(content) -> None:
        name = next(key for key in content["arrays"] if key.endswith("running_var")).partition("/")[2]
        content["arrays"][f"1/{name}"] = Array(np.full(tuple(content["arrays"][f"0/{name}"].shape), -50, np.float32))

    def fate(server_round: int, client: int) -> object:
        return change_buffers if (server_round, client) == (2, 3) else "ok"

    strategy = run(FaultyGrid(APPS[normalised], CLIENTS, fate), 3, normalised)
    (row,) = [row for row in strategy.history.rows if row["status"] != "ok"]
    assert (row["round"], row["client"]) == (2, 3) and "running_var' may be changed by the model's owner alone" in row[
        "status"
    ]


class Tied(nn.Module):
    """One parameter under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 2)
        self.b = nn.Linear(4, 2)
        self.b.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) + self.b(x)


@pytest.mark.parametrize("m_step", ["epochs", "gradient"])
def test_a_tied_parameter_is_updated_under_both_names(m_step) -> None:
    grid = InlineGrid(app_of(Tied), CLIENTS)
    strategy = FedeRiCo(num_neighbours=2, seed=SEED, m_step=m_step)
    config = ConfigRecord(LOCAL)
    strategy.start(grid, initial(Tied), 3, 60, config, config)
    for model in strategy.client_models().values():
        assert values(model)["a.weight"] == values(model)["b.weight"]
