"""PerFed-CKT: its formulas on small numbers that can be checked by hand, and rounds with real ClientApps."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message
from hypothesis import given, strategies as st
from torch.nn.functional import cross_entropy, softmax

from kindred import InlineGrid, PerFedCKT, Site, TooFewClients, make_client_app, make_model
from kindred.baselines.local import Local
from kindred.client.models import MODELS
from kindred.client.training import get_arrays, train
from kindred.engine.introductions import UntilRestart
from kindred.messages import in_order, to_record
from kindred.perfed_ckt import (
    cluster_logits,
    distillation_term,
    floats_communicated,
    merge_small_clusters,
    nearest_centroid,
)

from .client_apps import logits_app, saved_models
from .grids import FaultyGrid
from .test_conformance import values

# --- The mathematics ----------------------------------------------------------------------------------

# Three clients, two public images, two classes. The first two nearly agree.
THREE = np.array(
    [
        [[0.9, 0.1], [0.8, 0.2]],
        [[0.7, 0.3], [0.8, 0.2]],
        [[0.1, 0.9], [0.0, 1.0]],
    ],
    np.float32,
)


def test_the_server_step_with_three_clients_by_hand() -> None:
    centroids, assignment = cluster_logits(THREE, 2, seed=0)
    assert assignment.tolist() == [0, 0, 1]
    assert centroids == pytest.approx(np.array([[[0.8, 0.2], [0.8, 0.2]], [[0.1, 0.9], [0.0, 1.0]]]))
    assert centroids.dtype == np.float32
    # (0.9 - 0.8)^2 + (0.1 - 0.2)^2 = 0.02 from the first centroid, 0.64 + 0.64 + 0.64 + 0.64 = 2.56 from the second
    assert [nearest_centroid(logits, centroids) for logits in THREE] == [0, 0, 1]


def test_one_cluster_is_the_mean_of_all() -> None:
    centroids, assignment = cluster_logits(THREE, 1, seed=0)
    assert assignment.tolist() == [0, 0, 0]
    assert centroids == pytest.approx(THREE.mean(axis=0, keepdims=True))


@pytest.mark.parametrize("asked", [3, 4, 100])
def test_there_are_never_more_clusters_than_clients(asked) -> None:
    centroids, assignment = cluster_logits(THREE, asked, seed=0)
    assert assignment.tolist() == [0, 1, 2]
    assert centroids.tobytes() == THREE.tobytes()


def test_there_are_never_more_clusters_than_distinct_logits(recwarn) -> None:
    twice = THREE[[0, 2, 0, 0]]
    centroids, assignment = cluster_logits(twice, 3, seed=0)
    assert assignment.tolist() == [0, 1, 0, 0] and len(centroids) == 2
    assert centroids == pytest.approx(THREE[[0, 2]])
    same, assignment = cluster_logits(THREE[[1, 1, 1]], 2, seed=0)
    assert same == pytest.approx(THREE[[1]]) and assignment.tolist() == [0, 0, 0]
    assert not recwarn.list  # scikit-learn warns of fewer points than clusters


def test_one_client_is_its_own_cluster() -> None:
    centroids, assignment = cluster_logits(THREE[:1], 4, seed=0)
    assert centroids.tobytes() == THREE[:1].tobytes() and assignment.tolist() == [0]


def test_clusters_match_scikit_learn() -> None:
    from sklearn.cluster import KMeans

    rng = np.random.default_rng(0)
    centres = rng.dirichlet(np.ones(5), (3, 40))
    logits = np.stack([0.8 * centres[i % 3] + 0.2 * rng.dirichlet(np.ones(5), 40) for i in range(30)])
    centroids, assignment = cluster_logits(logits.astype(np.float32), 3, seed=1)
    assert assignment.tolist() == [i % 3 for i in range(30)]
    theirs = KMeans(3, n_init=10, random_state=1).fit(logits.reshape(30, -1)).cluster_centers_
    order = [nearest_centroid(centroid, theirs.reshape(3, 40, 5)) for centroid in centroids]
    assert centroids == pytest.approx(theirs.reshape(3, 40, 5)[order], abs=1e-6)


@given(
    st.integers(1, 6), st.integers(1, 6), st.integers(1, 3), st.integers(2, 4), st.integers(1, 4), st.integers(0, 99)
)
def test_every_centroid_is_the_mean_of_at_least_one_client(m, c, num_public, num_classes, min_size, seed) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.dirichlet(np.full(num_classes, 0.1), (m, num_public)).astype(np.float32).round(1)
    found = cluster_logits(logits, c, seed)
    for centroids, assignment in (found, merge_small_clusters(logits, *found, min_size)):
        assert len(centroids) <= min(m, c) and sorted(set(assignment)) == list(range(len(centroids)))
        for k, centroid in enumerate(centroids):
            assert centroid == pytest.approx(logits[assignment == k].mean(axis=0), abs=1e-6)
    assert np.bincount(assignment).min() >= min(m, min_size)


def test_small_clusters_join_the_nearest() -> None:
    # On a line: 0, 0.1 | 0.3 | 1.0, 0.9; the middle one is nearer to the first.
    first = np.array([0.0, 0.1, 0.3, 1.0, 0.9], np.float32)
    logits = np.stack([first, 1 - first], axis=1)[:, None, :]  # (5, 1, 2)
    centroids, assignment = cluster_logits(logits, 3, seed=0)
    assert assignment.tolist() == [0, 0, 1, 2, 2]
    merged, assignment = merge_small_clusters(logits, centroids, assignment, 2)
    assert assignment.tolist() == [0, 0, 0, 1, 1]
    assert merged[:, 0, 0] == pytest.approx([0.4 / 3, 0.95])
    everyone, assignment = merge_small_clusters(logits, merged, assignment, 4)
    assert assignment.tolist() == [0] * 5 and everyone[0, 0, 0] == pytest.approx(0.46)


def test_the_first_of_equally_near_centroids_is_taken() -> None:
    centroids = np.array([[[1.0, 0.0]], [[0.0, 1.0]], [[1.0, 0.0]]], np.float32)
    assert nearest_centroid(np.array([[0.5, 0.5]], np.float32), centroids) == 0
    assert nearest_centroid(np.array([[0.5, 0.5]], np.float32), centroids[::-1]) == 0
    assert nearest_centroid(np.array([[0.4, 0.6]], np.float32), centroids) == 1


def test_the_distillation_term_by_hand() -> None:
    ours = torch.tensor([[0.5, 0.5], [1.0, 0.0]])
    centroid = torch.tensor([[0.4, 0.6], [0.5, 0.5]])
    # lambda / 2 (0.01 + 0.01 + 0.25 + 0.25)
    assert float(distillation_term(ours, centroid, 3.0)) == pytest.approx(3 / 2 * 0.52)


def test_a_step_follows_the_gradient_of_equation_2() -> None:
    """w - eta g, with g by finite differences of F_k + lambda / |P'| sum ||sbar - s||^2 on the step's own batches."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2).double()
    x, y = torch.randn(7, 3, dtype=torch.float64), torch.randint(2, (7,))
    public, target = torch.randn(5, 3, dtype=torch.float64), torch.rand(5, 2, dtype=torch.float64)
    batch, lam, eta = torch.tensor([4, 1, 1]), 1.7, 0.05
    drawn = torch.randint(7, (1, 4), generator=torch.Generator().manual_seed(3))[0]

    def objective(weight: torch.Tensor) -> float:
        scores = [images @ weight.T + model.bias for images in (x[drawn], public[batch])]
        s = softmax(scores[1], dim=1)
        return float(cross_entropy(scores[0], y[drawn]) + lam / 3 * ((target[batch] - s) ** 2).sum())

    before = model.weight.detach().clone()
    gradient = torch.zeros_like(before)
    with torch.no_grad():
        for index in itertools.product(range(2), range(3)):
            for sign in (1, -1):
                moved = before.clone()
                moved[index] += sign * 1e-6
                gradient[index] += sign * objective(moved) / 2e-6
    train(
        model,
        x,
        y,
        steps=1,
        batch_size=4,
        optimizer="sgd",
        learning_rate=eta,
        generator=torch.Generator().manual_seed(3),
        term=lambda: distillation_term(softmax(model(public[batch]), dim=1), target[batch], lam),
    )
    assert model.weight.detach().numpy() == pytest.approx((before - eta * gradient).numpy(), abs=1e-8)


def test_floats_are_counted_as_in_the_paper() -> None:
    # Table 1: 2000 images, 10 classes, C = 0.1 of 100 clients, 200 rounds, c = 1, 2, 3
    assert [200 * floats_communicated(2000, 10, 10, c) for c in (1, 2, 3)] == [44_000_000, 48_000_000, 52_000_000]


@pytest.mark.parametrize(
    ("wrong", "allowed"),
    [
        ({"num_clusters": 0}, "num_clusters is 0, allowed: 1 to 1,000"),
        ({"distill_weight": -0.1}, "distill_weight is -0.1, allowed: 0 to 1,000,000"),
        ({"distill_weight": float("nan")}, "distill_weight is nan, allowed: 0 to 1,000,000"),
        ({"local_steps": 0}, "local_steps is 0, allowed: 1 to 1,000,000"),
        ({"public_batch_size": 0}, "public_batch_size is 0, allowed: 1 to 1,000,000"),
        ({"warmup_rounds": -1}, "warmup_rounds is -1, allowed: 0 to 1,000,000"),
        ({"min_cluster_size": 0}, "min_cluster_size is 0, allowed: 1 to 1,000,000"),
        ({"logits_dtype": "float64"}, "logits_dtype is 'float64', allowed: float32, float16"),
    ],
)
def test_bad_arguments_are_refused(wrong, allowed) -> None:
    with pytest.raises(ValueError) as refusal:
        PerFedCKT(**{"num_clusters": 2, **wrong})
    assert str(refusal.value) == allowed


# --- The rounds, with clients of one number -----------------------------------------------------------


def run_plain(clients: int = 6, rounds: int = 3, grid: InlineGrid | None = None, **settings) -> PerFedCKT:
    strategy = PerFedCKT(**{"num_clusters": 3, "local_steps": 10, "distill_weight": 0.5, **settings})
    strategy.start(grid or InlineGrid(logits_app(), clients), ArrayRecord(), rounds, 60)
    return strategy


def column(strategy: PerFedCKT, name: str) -> list:
    return [line[name] for line in strategy.history.rounds]


def test_the_first_round_collects_logits_of_untrained_models() -> None:
    strategy = run_plain()
    assert column(strategy, "round") == [0, 1, 2, 3]
    first = [row for row in strategy.history.rows if row["round"] == 0]
    # Nothing was trained in round 0: each client's parameter is still 0.1 times its number.
    assert [row["train_loss"] for row in first] == pytest.approx(
        [(0.1 * i - (1 + i // 2 + 0.01 * i)) ** 2 for i in range(6)]
    )
    assert all("cluster" in row for row in strategy.history.rows)


def test_clients_that_want_the_same_share_a_cluster() -> None:
    strategy = run_plain()
    clients, weights = strategy.collaboration()
    assert clients == [1001, 1002, 1003, 1004, 1005, 1006]
    assert weights == pytest.approx(np.kron(np.eye(3), np.full((2, 2), 0.5)))
    last = [row["cluster"] for row in strategy.history.rows if row["round"] == 3]
    assert last == [0, 0, 1, 1, 2, 2]


def test_the_history_counts_clusters_and_floats_and_fedavgs_floats() -> None:
    strategy = run_plain()
    assert column(strategy, "clusters") == [3, 3, 3, 3]
    # 3 images, 2 classes: six uploads, and from round 1 on three centroids
    assert column(strategy, "floats") == [36, 54, 54, 54]
    assert column(strategy, "bytes-fedavg") == [0, 96, 96, 96]  # models of 8 bytes, to and from six clients
    few = run_plain(clients=2)
    assert column(few, "clusters") == [2, 2, 2, 2]
    one = run_plain(clients=1, min_available_nodes=1)
    assert column(one, "clusters") == [1, 1, 1, 1]


def test_a_round_without_replies_keeps_the_centroids() -> None:
    def fate(server_round: int, client: int) -> str:
        return "error" if server_round == 2 else "ok"

    strategy = run_plain(grid=FaultyGrid(logits_app(), 6, fate))
    assert column(strategy, "clusters") == [3, 3, 0, 3]
    assert column(strategy, "floats") == [36, 54, 18, 54]


def test_warm_up_trains_without_distillation_instead_of_round_0() -> None:
    warm, alone = run_plain(warmup_rounds=3), run_plain(distill_weight=0.0)
    assert column(warm, "round") == [1, 2, 3] and column(warm, "floats") == [36, 36, 36]
    assert values(warm.global_arrays()) == values(alone.global_arrays())
    assert values(warm.global_arrays()) != values(run_plain(warmup_rounds=2).global_arrays())
    assert column(run_plain(warmup_rounds=1), "floats") == [36, 54, 54]


@pytest.mark.parametrize("setting", [{"num_clusters": 1}, {"distill_weight": 1.0}, {"local_steps": 9}, {"seed": 1}])
def test_every_setting_of_the_method_reaches_the_clients(setting) -> None:
    half = {"fraction_train": 0.5} if "seed" in setting else {}
    sent = []
    app = logits_app()
    for settings in ({}, setting):
        rows = run_plain(grid=InlineGrid(app, 6), **half, **settings).history.rows
        sent.append([(row["client"], row["bytes-down"], row.get("train_loss")) for row in rows])
    assert sent[0] != sent[1]


def test_no_centroid_represents_fewer_clients_than_the_minimum() -> None:
    paired = run_plain(min_cluster_size=2)
    assert column(paired, "clusters")[1:] == [3, 3, 3]
    threes = run_plain(min_cluster_size=3)
    assert all(1 <= number <= 2 for number in column(threes, "clusters"))
    # With fewer clients in all, nothing is sent.
    alone = run_plain(clients=2, min_cluster_size=3)
    assert column(alone, "clusters") == [0, 0, 0, 0] and column(alone, "floats") == [12, 12, 12, 12]
    assert len(alone.global_arrays()) == 0


def test_float16_halves_the_bytes_and_changes_little_else() -> None:
    wide, narrow = run_plain(), run_plain(logits_dtype="float16")
    (centroids,), (halves,) = ([a.numpy() for a in s.global_arrays().values()] for s in (wide, narrow))
    assert halves.dtype == np.float16 and halves.nbytes * 2 == centroids.nbytes
    assert halves == pytest.approx(centroids, abs=2e-3)
    assert sum(column(narrow, "bytes-up")) < sum(column(wide, "bytes-up"))
    assert all(row["status"] == "ok" for row in narrow.history.rows)


def introducing_as(**about):
    """The plain clients, of which client 2 introduces itself differently."""
    app = logits_app()
    identity = app._registered_funcs["query.identity"]

    def other(message, context) -> Message:
        reply = identity(message, context)
        if context.node_config["partition-id"] == 2:
            reply.content["config"].update(about)
        return reply

    app._registered_funcs["query.identity"] = other
    return app


EXPECTED = "expected the public set 3-cafe (3 images) with 2 classes"


@pytest.mark.parametrize(
    ("about", "reason"),
    [
        ({"public-set": "3-beef"}, f"it has the public set 3-beef (3 images) with 2 classes, {EXPECTED}"),
        ({"num-classes": 5}, f"it has the public set 3-cafe (3 images) with 5 classes, {EXPECTED}"),
        ({"public-set": 7}, f"it has no public set, {EXPECTED}"),
        ({"num-public": 2**52}, f"it has no public set, {EXPECTED}"),
        ({"num-examples": 0}, "it has no training sample"),
        ({"num-examples": "many"}, "its num-examples is 'many', allowed: 1 to 1000000000000"),
    ],
)
def test_a_client_that_does_not_fit_is_excluded_by_name(about, reason) -> None:
    strategy = run_plain(grid=InlineGrid(introducing_as(**about), 6))
    assert strategy.history.left_out == {1003: reason}
    assert {row["client"] for row in strategy.history.rows} == {1001, 1002, 1004, 1005, 1006}
    assert all(row["status"] == "ok" for row in strategy.history.rows)


def test_a_run_without_a_public_set_is_refused() -> None:
    app = logits_app()
    del app._registered_funcs["query.identity"]
    with pytest.raises(TooFewClients, match="0 of 2 can take part .*client 1001: it has no public set"):
        run_plain(grid=InlineGrid(app, 3))


def test_the_requested_public_set_is_used_and_not_the_first_one_reported() -> None:
    strategy = PerFedCKT(num_clusters=2, public_set="3-beef", min_available_nodes=1)
    with pytest.raises(TooFewClients, match="no client gave a usable answer"):  # 1003's replies name yet another set
        strategy.start(InlineGrid(introducing_as(**{"public-set": "3-beef"}), 3), ArrayRecord(), 1, 60)
    assert strategy.clients() == [1003] and set(strategy.history.left_out) == {1001, 1002}
    assert "expected the public set 3-beef" in strategy.history.left_out[1001]
    with pytest.raises(TooFewClients, match="it has the public set 3-cafe .*, expected 3-dead"):
        run_plain(public_set="3-dead")


def test_a_site_without_a_public_set_is_excluded_until_it_is_started_again() -> None:
    """It gets the set by an option; another set may be replaced while it runs."""
    strategy = PerFedCKT(num_clusters=2, public_set="3-beef")
    strategy.begin(ArrayRecord())
    about = {"num-examples": 10, "num-classes": 4, "num-public": 12}
    reasons = strategy.introduce({0: about, 1: about | {"public-set": "3-cafe"}})
    assert [isinstance(reasons[client], UntilRestart) for client in (0, 1)] == [True, False]


class DeafGrid(InlineGrid):
    """Loses the replies to the first queries, which go to one node and then to the others."""

    deaf_to = 4  # questions

    def push_messages(self, messages):
        messages = list(messages)
        ids = super().push_messages(messages)
        if self.deaf_to and messages[0].metadata.message_type == "query.identity":
            self.deaf_to -= 1
            del self._waiting[ids[0]]
        return ids


def test_a_run_begins_when_clients_have_introduced_themselves(monkeypatch) -> None:
    monkeypatch.setattr("kindred.engine.roster.ASK_AGAIN", 0.1)
    strategy = run_plain(grid=DeafGrid(logits_app(), 4), wait_timeout=0.5)
    assert [line["answered"] for line in strategy.history.rounds] == [4, 4, 4, 4]


@pytest.mark.parametrize("size", [float("inf"), float("nan"), -1, 10**18, 1.5])
def test_an_impossible_model_size_counts_as_missing(size) -> None:
    def fate(server_round: int, client: int):
        return (lambda content: content["metrics"].update({"model-bytes": size})) if client == 1 else "ok"

    strategy = run_plain(grid=FaultyGrid(logits_app(), 4, fate))
    assert [line["bytes-fedavg"] for line in strategy.history.rounds] == [0, 48, 48, 48]


def test_a_run_without_any_training_is_an_error() -> None:
    with pytest.raises(TooFewClients, match="no client gave a usable answer in any of the 3 rounds"):
        run_plain(grid=FaultyGrid(logits_app(), 4, lambda server_round, client: "error" if server_round else "ok"))


# --- The rounds, with networks ------------------------------------------------------------------------

SETTINGS = ConfigRecord(
    {
        "batch-size": 5,
        "optimizer": "sgd",
        "learning-rate": 0.1,
        "seed": 3,
        "device": "cpu",
        "local-epochs": 0,
        "local-steps": 4,
    }
)
PUBLIC = torch.randn(12, 1, 8, 8, generator=torch.Generator().manual_seed(5))
ARCHITECTURES = ("digits-cnn", "ckt-cnn")


def factory_of(name: str):
    return lambda: make_model(name, (1, 8, 8), 4, seed=1)


FACTORIES = {name: factory_of(name) for name in ARCHITECTURES}


def sites(changes: dict[int, dict] | None = None, architectures=ARCHITECTURES):
    """Four clients of two kinds; two architectures in turn."""

    def load_site(context) -> Site:
        number = context.node_config["partition-id"]
        rng = torch.Generator().manual_seed(number)
        y = torch.arange(24) % 4
        x = torch.randn(24, 1, 8, 8, generator=rng) * 0.3
        x[torch.arange(24), 0, (y + number % 2) % 4 * 2] += 1.5
        own = {"model": FACTORIES[architectures[number % len(architectures)]], "public": PUBLIC}
        own |= {"train": (x[:12], y[:12]), "test": (x[12:], y[12:])}
        return Site(**(own | (changes or {}).get(number, {})))

    return load_site


def run_networks(load_site, strategy=None, rounds: int = 3, grid_type=InlineGrid, initial=None, clients: int = 4):
    strategy = strategy or PerFedCKT(num_clusters=2, local_steps=4, public_batch_size=6)
    grid = grid_type(make_client_app(load_site), clients)
    strategy.start(grid, initial or ArrayRecord(), rounds, 60, SETTINGS, SETTINGS)
    return strategy, grid


def test_different_models_learn_from_each_other() -> None:
    strategy, grid = run_networks(sites())
    assert all(row["status"] == "ok" for row in strategy.history.rows)
    models = saved_models(grid.run.run_id)
    assert in_order(models) == [0, 1, 2, 3]
    for number in range(4):
        kept = MODELS[ARCHITECTURES[number % 2]]((1, 8, 8), 4)
        assert {k: tuple(a.shape) for k, a in models[number].items()} == {
            k: v.shape for k, v in get_arrays(kept).items()
        }
    sizes = {row["client"]: row["model-bytes"] for row in strategy.history.rows}
    assert sizes[0] == sizes[2] != sizes[1] == sizes[3]


def test_without_distillation_it_is_local_training_bit_for_bit() -> None:
    load_site = sites(architectures=("digits-cnn",))
    strategy = PerFedCKT(num_clusters=2, distill_weight=0.0, local_steps=4)
    _, grid = run_networks(load_site, strategy)
    models = {number: values(record) for number, record in saved_models(grid.run.run_id).items()}
    initial = ArrayRecord({k: to_record({k: v})[k] for k, v in get_arrays(FACTORIES["digits-cnn"]()).items()})
    local, _ = run_networks(load_site, Local(), initial=initial)
    assert models == {number: values(record) for number, record in local.client_models().items()}
    _, grid = run_networks(load_site)
    assert models != {number: values(record) for number, record in saved_models(grid.run.run_id).items()}


class Wiretap(InlineGrid):
    """Records the names and sizes of all arrays in messages."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.passed: list[tuple[str, tuple[int, ...]]] = []

    def note(self, messages):
        for message in messages:
            for record in message.content.array_records.values():
                self.passed += [(name, tuple(array.shape)) for name, array in record.items()]
            yield message

    def push_messages(self, messages):
        return super().push_messages(self.note(messages))

    def pull_messages(self, message_ids):
        return list(self.note(super().pull_messages(message_ids)))


@pytest.mark.parametrize("separately", [False, True])
def test_no_message_contains_a_model_parameter(separately) -> None:
    strategy = PerFedCKT(num_clusters=2, local_steps=4, public_batch_size=6)
    if separately:
        strategy.personal = "unheard-of"  # so that clients are also asked to evaluate
    strategy, grid = run_networks(sites(), strategy, grid_type=Wiretap)
    assert {name for name, _ in grid.passed} == {"logits", "centroids"}
    assert {shape for name, shape in grid.passed if name == "logits"} == {(12, 4)}
    assert {shape[1:] for name, shape in grid.passed if name == "centroids"} == {(12, 4)}
    if separately:
        assert {"accuracy", "loss"} <= strategy.history.rows[-1].keys()
    # The size of a message does not depend on the models: 12 x 4 floats, a header and a few numbers.
    assert (
        max(row["bytes-up"] for row in strategy.history.rows)
        < 2000
        < min(row["model-bytes"] for row in strategy.history.rows)
    )


def fingerprint(public: torch.Tensor) -> str:
    nothing = torch.zeros(0, 1), torch.zeros(0, dtype=torch.int64)
    return Site(model=torch.nn.Identity, train=nothing, test=nothing, public=public).fingerprint


OTHER = PUBLIC + 1e-6
TURNED = PUBLIC.flip(0)


@pytest.mark.parametrize(("public", "classes"), [(OTHER, 4), (TURNED, 4), (PUBLIC[:11], 4), (PUBLIC, 5)])
def test_another_public_set_is_refused_with_both_fingerprints(public, classes) -> None:
    change = {"public": public, "model": lambda: make_model("digits-cnn", (1, 8, 8), classes, 1)}
    strategy, _ = run_networks(sites({1: change}))
    assert strategy.history.left_out == {
        1: (
            f"it has the public set {fingerprint(public)} ({len(public)} images) with {classes} classes, "
            f"expected the public set {fingerprint(PUBLIC)} (12 images) with 4 classes"
        )
    }
    assert {row["client"] for row in strategy.history.rows} == {0, 2, 3}
    assert column(strategy, "answered") == [3, 3, 3, 3]


def test_fingerprints_distinguish_sets_orders_and_types() -> None:
    sets = [PUBLIC, OTHER, TURNED, PUBLIC[:11], PUBLIC.reshape(12, 8, 8), PUBLIC.double()]
    assert len({fingerprint(public) for public in sets}) == len(sets)
    assert fingerprint(PUBLIC) == fingerprint(PUBLIC.clone(memory_format=torch.channels_last))


@pytest.mark.parametrize("name", ["perfed-ckt", "local"])
def test_clients_of_few_samples_take_part_and_those_without_samples_are_excluded(name) -> None:
    x, y = torch.zeros(1, 1, 8, 8), torch.zeros(1, dtype=torch.long)
    changes = {0: {"train": (x[:0], y[:0])}, 1: {"train": (x, y)}, 2: {"test": (x[:0], y[:0])}}
    initial = None
    strategy = None
    if name == "local":
        strategy = Local()
        initial = ArrayRecord(factory_of("digits-cnn")().state_dict())
    strategy, _ = run_networks(sites(changes, ("digits-cnn",)), strategy, initial=initial)
    assert strategy.history.left_out == {0: "it has no training sample"}
    assert {row["client"] for row in strategy.history.rows if row["status"] == "ok"} == {1, 2, 3}
    assert set(strategy.history.last_values()) == {1, 3}  # a client without test samples has no accuracy
    assert np.isfinite(strategy.history.rounds[-1]["accuracy"])


class Exploding(PerFedCKT):
    def round_config(self, server_round, client):
        return super().round_config(server_round, client) | ({"distill-weight": 1e300} if server_round == 2 else {})


def test_a_model_that_becomes_infinite_does_not_replace_the_last_finite_one() -> None:
    strategy, _ = run_networks(sites(), Exploding(num_clusters=2, local_steps=4, public_batch_size=6))
    status = {number: {row["status"] for row in strategy.history.rows if row["round"] == number} for number in range(4)}
    assert status.pop(2) == {
        "error 2: ValueError: the trained model's predictions are not finite; the client keeps its previous model"
    }
    assert all(each == {"ok"} for each in status.values())


def test_clients_that_are_not_sampled_are_evaluated_in_round_0_and_at_the_end() -> None:
    strategy, _ = run_networks(
        sites(),
        PerFedCKT(num_clusters=2, local_steps=4, public_batch_size=6, fraction_train=0.25, min_train_nodes=1),
        rounds=1,
    )
    rows = {(row["round"], row["client"]): row for row in strategy.history.rows}
    assert [line["round"] for line in strategy.history.rounds] == [0, 1, 2]
    assert [line["evaluated"] for line in strategy.history.rounds] == [4] * 3
    assert {client for number, client in rows if number == 0} == set(range(4))
    assert len([row for row in rows.values() if row["round"] == 0 and "trained-accuracy" in row]) == 1
    (drawn,) = (client for number, client in rows if number == 1)
    assert {client for number, client in rows if number == 2} == set(range(4)) - {drawn}
    for client in set(range(4)) - {drawn}:  # it has the model that it had
        assert rows[2, client]["personal-loss"] == rows[0, client]["personal-loss"]


def test_a_client_without_a_public_set_reports_this() -> None:
    with pytest.raises(TooFewClients, match="client 0: it has no public set"):
        run_networks(sites({number: {"public": None} for number in range(4)}))
