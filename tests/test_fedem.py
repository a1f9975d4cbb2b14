"""FedEM: its steps by hand, its equality with FedAvg for one component, and the mixtures of clients."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from flwr.app import Array, ConfigRecord
from flwr.clientapp import ClientApp
from safetensors.numpy import load_file

from kindred import FedAvg, FedEM, InlineGrid, Mixture, Site, make_client_app
from kindred.baselines.fedem import OPTIMIZERS, new_shares, responsibilities
from kindred.client.state import MIXTURE
from kindred.client.training import get_arrays, set_arrays
from kindred.client_app.app import app as client_app
from kindred.engine.layout import drawn_anew
from kindred.engine.simulated_state import saved_files
from kindred.messages import by_prefix, in_order, read_record, to_record
from kindred.server_app.app import run as run_app
from kindred.server_app.config import Config
from kindred.server_app.prediction.predictor import Predictor
from kindred.server_app.tables import read_table

from . import test_client, two_weights
from .grids import FaultyGrid
from .scores import accuracy_and_loss
from .test_conformance import check_that_it_counts_as_a_missing_reply, values
from .two_weights import Client, probabilities, weights_of

# --- The mathematics ----------------------------------------------------------------------------------


def test_responsibilities_are_shares_times_likelihoods() -> None:
    likelihoods = np.array([[0.9, 0.1], [0.3, 0.3]], np.float32)
    q = responsibilities(np.array([0.5, 0.5]), likelihoods)
    assert q == pytest.approx(np.array([[0.75, 0.25], [0.25, 0.75]]))
    assert new_shares(q) == pytest.approx([0.5, 0.5])
    # 0.8 * 0.9 = 0.72 to 0.2 * 0.3 = 0.06, and 0.08 to 0.06
    q = responsibilities(np.array([0.8, 0.2]), likelihoods)
    assert q == pytest.approx(np.array([[12 / 13, 4 / 7], [1 / 13, 3 / 7]]))
    assert new_shares(q) == pytest.approx([68 / 91, 23 / 91])


def test_responsibilities_are_finite_for_all_probabilities() -> None:
    q = responsibilities(np.array([0.5, 0.5]), np.array([[0.0, np.nan, 0.0], [0.5, 0.5, 0.0]], np.float32))
    assert q == pytest.approx(np.array([[0, 0, 0.5], [1, 1, 0.5]]))
    assert responsibilities(np.array([0.0, 1.0]), np.array([[0.9], [0.1]])).tolist() == [[0.0], [1.0]]


def test_one_component_is_responsible_for_all() -> None:
    q = responsibilities(np.array([1.0]), np.array([[0.9, 1e-30, 0.0]], np.float32))
    assert q.tolist() == [[1.0, 1.0, 1.0]] and new_shares(q).tolist() == [1.0]


# --- Rounds by hand -----------------------------------------------------------------------------------

CLIENTS = [Client(1.0, 0, 1), Client(2.0, 0, 3), Client(1.0, 1, 2)]
FIRST, SECOND = np.array([0.5, -0.5]), np.array([-0.5, 0.5])


def by_two(rounds: int = 1, **more) -> FedEM:
    strategy = FedEM(num_components=2, other_models=[two_weights.model(SECOND)], **more)
    return two_weights.start(strategy, CLIENTS, FIRST, rounds)


def kept_mixtures(strategy: FedEM) -> dict[int, Mixture]:
    files = saved_files(strategy.run_id, MIXTURE)
    return {client: Mixture.load(files[client]) for client in in_order(files)}


def shares_of(client: Client, shares: np.ndarray, *components: np.ndarray) -> np.ndarray:
    scores = shares * np.array([probabilities(w, client.x)[client.label] for w in components])
    return scores / scores.sum()


def test_a_round_matches_the_paper() -> None:
    strategy = by_two()
    # With x = 1 the components give 0.73106 and 0.26894 to the label, with x = 2 0.88080 and 0.11920: so are the q.
    equal = np.array([0.5, 0.5])
    q = [shares_of(client, equal, FIRST, SECOND) for client in CLIENTS]
    assert [each.tolist() for each in q] == [
        pytest.approx(each, abs=1e-5) for each in ([0.73106, 0.26894], [0.88080, 0.11920], [0.26894, 0.73106])
    ]
    for m, w in enumerate((FIRST, SECOND)):
        trained = [client.step(w, q[i][m]) for i, client in enumerate(CLIENTS)]
        mean = (1 * trained[0] + 3 * trained[1] + 2 * trained[2]) / 6  # weighted by samples and not by q
        assert weights_of(strategy.models[m]) == pytest.approx(mean)
    row = strategy.history.rows[1]
    losses = CLIENTS[1].loss(FIRST, 0.88080), CLIENTS[1].loss(SECOND, 0.11920)
    assert row["train-loss"] == pytest.approx(sum(losses), abs=1e-4)
    # with the shares before the round
    assert row["mixture-loss"] == row["personal-loss"] == pytest.approx(np.log(2), abs=1e-5)
    assert row["received-loss"] == pytest.approx(CLIENTS[1].loss(FIRST))


def test_shares_stay_at_the_client_between_rounds() -> None:
    strategy, seen = FedEM(num_components=2, other_models=[two_weights.model(SECOND)]), {}
    two_weights.start(
        strategy,
        CLIENTS,
        FIRST,
        3,
        on_round=lambda r: seen.update({r: [weights_of(record) for record in strategy.models]}),
    )
    found = kept_mixtures(strategy)
    for i, client in enumerate(CLIENTS):
        shares = np.array([0.5, 0.5])
        for components in ([FIRST, SECOND], seen[1], seen[2]):
            shares = shares_of(client, shares, *components)
        assert found[i].shares == pytest.approx(shares, abs=1e-6)
        assert found[i].clients == [0, 1]
        for kept, last in zip(found[i].models, strategy.models):
            assert kept["weight"].tobytes() == weights_of(last).tobytes()
    assert found[0].shares[0] > 0.8 and found[2].shares[1] > 0.8
    assert strategy.client_models() == {}


def shares_in(strategy: FedEM, server_round: int) -> list[list[float]]:
    rows = [row for row in strategy.history.rows if row["round"] == server_round]
    return [[row[f"share-{m}"] for m in range(2) if f"share-{m}" in row] for row in rows]


def test_simulated_clients_report_their_new_shares() -> None:
    strategy = by_two(2)
    first = [shares_of(client, np.array([0.5, 0.5]), FIRST, SECOND) for client in CLIENTS]
    assert shares_in(strategy, 1) == [pytest.approx(each, abs=1e-6) for each in first]
    found = kept_mixtures(strategy)  # with the shares of the second round
    assert shares_in(strategy, 2) == [pytest.approx(found[i].shares, abs=1e-12) for i in range(3)]
    assert shares_in(strategy, 3) == [[], [], []]  # the closing evaluation


@pytest.mark.parametrize("reports", [False, True])
def test_a_site_reports_its_shares_only_if_it_agrees(tmp_path, reports) -> None:
    class Sites(InlineGrid):
        def __init__(self) -> None:
            super().__init__(two_weights.app_of(CLIENTS), 3)
            for node, context in self._contexts.items():
                context.node_config["state-dir"] = str(tmp_path / str(node))
                if reports:
                    context.node_config["report-weights"] = True

    strategy = FedEM(num_components=2, other_models=[two_weights.model(SECOND)])
    two_weights.start(strategy, CLIENTS, FIRST, 1, Sites())
    assert [len(shares) for shares in shares_in(strategy, 1)] == [2 * reports] * 3
    assert two_weights.weights_of(strategy.models[0]).tobytes() == two_weights.weights_of(by_two().models[0]).tobytes()


def test_collaboration_weights_are_the_shares_in_every_component() -> None:
    assert by_two(1).collaboration()[1].tolist() == np.eye(3).tolist()  # the components sent last were initial ones
    clients, weights = by_two(2).collaboration()
    assert clients == [0, 1, 2]
    assert weights == pytest.approx(np.tile([1 / 6, 3 / 6, 2 / 6], (3, 1)))


def test_an_unsampled_client_computes_its_shares_in_one_step() -> None:
    grid = FaultyGrid(two_weights.app_of(CLIENTS), 3, lambda r, c: "error" if c == 2 else "ok")
    strategy = FedEM(num_components=2, other_models=[two_weights.model(SECOND)])
    two_weights.start(strategy, CLIENTS, FIRST, 2, grid)
    last = [weights_of(record) for record in strategy.models]
    found = kept_mixtures(strategy)[2]
    assert found.shares == pytest.approx(shares_of(CLIENTS[2], np.array([0.5, 0.5]), *last), abs=1e-6)


def test_samples_are_counted_for_every_component() -> None:
    rows = by_two().history.rows[:3]
    assert [(row["samples-trained"], row["samples-predicted"]) for row in rows] == [(2, 2), (6, 6), (4, 4)]


# --- An optimiser that lives across rounds ------------------------------------------------------------

ADAM = two_weights.SETTINGS | {"optimizer": "adam", "learning-rate": 0.1, "weight-decay": 0.05, "local-epochs": 2}
MOMENTUM = two_weights.SETTINGS | {"momentum": 0.9, "weight-decay": 0.05, "local-epochs": 2}
NEW = {
    "adam": lambda weights: torch.optim.Adam([weights], lr=0.1, weight_decay=0.05),
    "sgd": lambda weights: torch.optim.SGD([weights], lr=two_weights.RATE, momentum=0.9, weight_decay=0.05),
}


def two_components(keep: bool) -> FedEM:
    return FedEM(num_components=2, keep_optimizer=keep, other_models=[two_weights.model(SECOND)])


def four_rounds(strategy: FedEM, settings: dict, app: ClientApp | None = None, **more) -> FedEM:
    grid = InlineGrid(app or two_weights.app_of(CLIENTS), 3, {"clients": repr((CLIENTS, app))})
    config = ConfigRecord(settings)
    strategy.start(grid, two_weights.model(FIRST), 4, 60, config, config, **more)
    return strategy


def plain_rounds(optimizer: str, keep: bool, rounds: int = 4) -> list[np.ndarray]:
    """Return the components after some rounds, by one torch optimiser for each client and component."""
    components = [FIRST, SECOND]
    shares = [np.array([0.5, 0.5])] * len(CLIENTS)
    weights = [[torch.zeros(2, requires_grad=True) for _ in components] for _ in CLIENTS]
    optimizers = [[NEW[optimizer](own) for own in each] for each in weights]
    for _ in range(rounds):
        sums = [np.zeros(2), np.zeros(2)]
        for i, client in enumerate(CLIENTS):
            shares[i] = shares_of(client, shares[i], *components)  # its samples are equal
            for m, received in enumerate(components):
                own = weights[i][m]
                own.data.copy_(torch.from_numpy(received))
                if not keep:
                    optimizers[i][m] = NEW[optimizer](own)
                for _ in range(2):
                    optimizers[i][m].zero_grad()
                    loss = float(shares[i][m]) * F.cross_entropy(client.x * own, torch.tensor(client.label))
                    loss.backward()
                    optimizers[i][m].step()
                sums[m] += client.count * own.detach().numpy()
        components = [total / sum(client.count for client in CLIENTS) for total in sums]
    return components


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("optimizer", NEW)
def test_a_kept_optimiser_gives_the_components_of_one_torch_optimiser_over_all_rounds(optimizer, keep) -> None:
    strategy = four_rounds(two_components(keep), {"adam": ADAM, "sgd": MOMENTUM}[optimizer])
    for m, expected in enumerate(plain_rounds(optimizer, keep)):
        assert weights_of(strategy.models[m]) == pytest.approx(expected, abs=1e-5)
    other = plain_rounds(optimizer, not keep)
    assert np.abs(weights_of(strategy.models[0]) - other[0]).max() > 0.01


def test_a_client_that_has_lost_its_optimisers_starts_new_ones() -> None:
    def lose(server_round: int) -> None:
        files = saved_files(strategy.run_id, OPTIMIZERS)
        lost.append(len(files))
        for path in files.values():
            path.unlink()

    strategy, lost = two_components(True), []
    four_rounds(strategy, ADAM, on_round=lose)
    anew = four_rounds(two_components(False), ADAM)
    assert [values(model) for model in strategy.models] == [values(model) for model in anew.models]
    assert lost[:4] == [3, 3, 3, 3] and not saved_files(anew.run_id, OPTIMIZERS)


def test_an_optimiser_that_is_no_longer_finite_is_not_kept() -> None:
    """Client 1 has infinite samples in round 2: its reply is refused, and in round 3 its state is that of round 1."""

    def change(server_round: int) -> None:
        sites[1].train[0].fill_(np.inf if server_round == 1 else CLIENTS[1].x)
        found = load_file(saved_files(strategy.run_id, OPTIMIZERS)[1])
        steps.append(int(found["0/2"]))  # after the moments of the only parameter
        assert all(np.isfinite(array).all() for array in found.values())

    sites, strategy, steps = [client.site() for client in CLIENTS], two_components(True), []
    app = make_client_app(lambda context: sites[context.node_config["partition-id"]])
    four_rounds(strategy, ADAM, app, on_round=change)
    trained = [row["status"] for row in strategy.history.rows if row["client"] == 1 and row["round"] <= 4]
    assert [status == "ok" for status in trained] == [True, False, True, True]
    assert "values that are not finite" in trained[1]
    assert steps[:4] == [2, 2, 4, 6]


# --- Rounds with a network ----------------------------------------------------------------------------


def run(strategy, rounds: int = 3, **settings):
    initial = to_record(get_arrays(test_client.network()))
    config = ConfigRecord(test_client.SETTINGS | settings)
    grid = InlineGrid(test_client.app, test_client.CLIENTS, {"run": "fedem"})
    strategy.start(grid, initial, rounds, 60, config, config)
    return strategy


@pytest.mark.parametrize("settings", [{}, {"optimizer": "adam"}, {"local-epochs": 0, "local-steps": 3}])
def test_one_component_equals_fedavg_bit_for_bit(settings) -> None:
    mine, theirs = (
        run(kind, **settings) for kind in (FedEM(num_components=1, fraction_train=0.5), FedAvg(fraction_train=0.5))
    )
    assert values(mine.global_arrays()) == values(theirs.global_arrays())
    assert mine.collaboration()[1].tobytes() == theirs.collaboration()[1].tobytes()
    for one, other in zip(mine.history.rows, theirs.history.rows, strict=True):
        assert one["personal-accuracy"] == other["personal-accuracy"]
        assert one["personal-loss"] == pytest.approx(other["personal-loss"])
        assert one.get("train-loss", 0) == pytest.approx(other.get("train-loss", 0))


def test_groups_find_components_and_do_better_than_with_one_model() -> None:
    """Odd clients swap the labels."""
    strategy = run(FedEM(num_components=2), rounds=25)
    favourite = [int(mixture.shares.argmax()) for mixture in kept_mixtures(strategy).values()]
    assert favourite[0] == favourite[2] != favourite[1] == favourite[3]
    assert strategy.history.rounds[-1]["accuracy"] > run(FedAvg(), rounds=25).history.rounds[-1]["accuracy"] + 0.2


def test_the_number_and_initial_values_of_components_change_the_result() -> None:
    def result(count: int, other_models=None, **settings) -> dict[str, bytes]:
        return values(run(FedEM(num_components=count, other_models=other_models, **settings)).global_arrays())

    first = get_arrays(test_client.network())
    given = [to_record(drawn_anew(first, 99, first))]
    results = [result(1), result(2), result(3), result(2, given), result(2, seed=1)]
    assert all(one != other for i, one in enumerate(results) for other in results[:i])


def test_the_result_is_the_mixture_of_the_last_components() -> None:
    strategy = run(FedEM(num_components=2))
    assert [line["personal"] for line in strategy.history.rounds] == ["mixture"] * 4
    closing = {row["client"]: row for row in strategy.history.rows if row["round"] == 4}
    for client, mixture in kept_mixtures(strategy).items():
        site = test_client.load_site(type("Context", (), {"node_config": {"partition-id": client}}))
        for kept, last in zip(mixture.models, strategy.models, strict=True):
            assert {name: array.tobytes() for name, array in kept.items()} == {
                name: array.tobytes() for name, array in read_record(last).items()
            }
        rows = mixture.predict(test_client.network(), site.test[0])
        accuracy, loss = accuracy_and_loss(rows, site.test[1].numpy())
        assert (closing[client]["personal-accuracy"], closing[client]["personal-loss"]) == (accuracy, loss)
        module = test_client.network()
        set_arrays(module, mixture.models[int(mixture.shares.argmax())])
        only = Mixture([0], np.ones(1), [get_arrays(module)]).predict(module, site.test[0])
        assert closing[client]["received-accuracy"] == accuracy_and_loss(only, site.test[1].numpy())[0]


def test_mixtures_are_in_the_results_and_predict(tmp_path) -> None:
    config = Config(
        strategy="fedem",
        num_clients=2,
        num_groups=2,
        num_rounds=2,
        local_epochs=1,
        batch_size=20,
        samples_per_client=20,
        device="cpu",
        output_dir=str(tmp_path),
    )
    folder = run_app(InlineGrid(client_app, 2, config.run_config()), config).path
    rows = [row for row in read_table(folder / "history.csv") if int(row["round"]) == 3]
    assert len(rows) == 2 and not (folder / "models").exists()
    for row in rows:
        path = folder / "mixtures" / f"client-{row['client']}.safetensors"
        assert {key.partition("/")[0] for key in load_file(path)} == {"0", "1", "2", "shares"}
        found = Predictor.load(path).predictions(np.zeros((4, 1, 8, 8), np.float32))
        assert found.shape == (4, 10) and found.sum(axis=1) == pytest.approx(1)


def test_a_site_stores_its_mixture_from_the_first_round_on(tmp_path) -> None:
    class Sites(InlineGrid):
        def __init__(self) -> None:
            super().__init__(two_weights.app_of(CLIENTS), 3)
            for node, context in self._contexts.items():
                context.node_config["state-dir"] = str(tmp_path / str(node))

    seen = {}
    strategy = FedEM(num_components=2, other_models=[two_weights.model(SECOND)])
    two_weights.start(
        strategy,
        CLIENTS,
        FIRST,
        2,
        Sites(),
        on_round=lambda r: seen.update(
            {r: Mixture.load(next(tmp_path.glob("1001/run-*/client-0/mixture.safetensors")))}
        ),
    )
    assert seen[1].shares.tolist() == [0.5, 0.5] and seen[1].models[0]["weight"].tolist() == FIRST.tolist()
    assert seen[3].models[0]["weight"].tobytes() == weights_of(strategy.models[0]).tobytes()
    assert seen[1].shares[0] < seen[2].shares[0] < seen[3].shares[0]


# --- What is refused ----------------------------------------------------------------------------------


def _first(content) -> tuple[str, np.ndarray]:
    return "0/layer.weight", content["arrays"]["0/layer.weight"].numpy().copy()


def _nan(content) -> None:
    name, array = _first(content)
    array[0, 1] = np.nan
    content["arrays"][name] = Array(array)


def _shape(content) -> None:
    content["arrays"]["1/layer.weight"] = Array(np.zeros((2, 3), np.float32))


def _double(content) -> None:
    name, array = _first(content)
    content["arrays"][name] = Array(array.astype(np.float64))


def _missing(content) -> None:
    del content["arrays"]["0/layer.weight"]


def _component_missing(content) -> None:
    for name in by_prefix(content["arrays"])["1"]:
        del content["arrays"][f"1/{name}"]


def _one_more(content) -> None:
    content["arrays"].update({f"2/{name}": array for name, array in by_prefix(content["arrays"])["1"].items()})


def _extra(content) -> None:
    content["arrays"]["backdoor"] = Array(np.zeros(1))


def _no_prefix(content) -> None:
    content["arrays"]["layer.weight"] = content["arrays"].pop("0/layer.weight")


def _giant(content) -> None:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (2**40, 2**20)})
    content["arrays"]["0/layer.weight"] = Array("float32", (2**40, 2**20), "numpy.ndarray", header.getvalue() + b"1234")


def _no_examples(content) -> None:
    content["metrics"]["num-examples"] = 0


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda content: content.clear(), "refused: it has 0 metric records, expected 1"),
        (_nan, "refused: array '0/layer.weight' has values that are not finite: did training diverge?"),
        (_shape, "refused: array 'layer.weight' is float32 (2, 3), expected float32 (2, 2)"),
        (_double, "refused: array 'layer.weight' is float64 (2, 2), expected float32 (2, 2)"),
        (_missing, "refused: array 'layer.weight' is missing"),
        (_component_missing, "refused: component 1 is missing"),
        (_one_more, "refused: arrays '2' are of no component"),
        (_extra, "refused: arrays 'backdoor' are of no component"),
        (_no_prefix, "refused: arrays 'layer.weight' are of no component"),
        (_giant, f"refused: array '0/layer.weight' declares {2**62} bytes but carries 4"),
        (_no_examples, "refused: num-examples is 0, allowed: 1 to 1000000000000"),
    ],
)
def test_bad_components_count_as_a_missing_reply_with_a_reason(damage, reason) -> None:
    check_that_it_counts_as_a_missing_reply("fedem", damage, reason)


@pytest.mark.parametrize("most", [0, 1])
def test_the_norm_bound_applies_to_the_component_that_changes_most(most) -> None:
    starts = [np.array([0.1, -0.1]), FIRST][:: 1 - 2 * most]
    norms = np.array(
        [
            [
                np.linalg.norm(client.step(w, q) - w)
                for w, q in zip(starts, shares_of(client, np.array([0.5, 0.5]), *starts))
            ]
            for client in CLIENTS
        ]
    )
    assert norms.argmax(axis=1).tolist() == [most] * 3
    largest = norms.max(axis=1)  # (3,)

    strategy = FedEM(
        num_components=2, other_models=[two_weights.model(starts[1])], max_update_norm=largest.min() + 0.001
    )
    two_weights.start(strategy, CLIENTS, starts[0])
    statuses = [row["status"] for row in strategy.history.rows[:3]]
    assert [status == "ok" for status in statuses] == (largest == largest.min()).tolist()
    for status, norm in zip(statuses, largest):
        assert status == "ok" or float(status.split()[5].rstrip(",")) == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"num_components": 0}, "num_components is 0, allowed: 1 to 1,000"),
        ({"num_components": 2, "other_models": []}, "other_models is '0 models', allowed: 1, all but the first"),
    ],
)
def test_out_of_range_arguments_are_named(arguments, said) -> None:
    with pytest.raises(ValueError) as refused:
        FedEM(**arguments)
    assert str(refused.value) == said


def test_each_component_has_batches_of_its_own() -> None:
    x, y = torch.arange(1.0, 9.0)[:, None], torch.tensor([0, 1] * 4)
    app = make_client_app(lambda _: Site(two_weights.TwoWeights, (x, y), (x, y)))
    config = ConfigRecord(two_weights.SETTINGS | {"batch-size": 2})
    strategy = FedEM(
        num_components=2, other_models=[two_weights.model([0.0, 0.0])]
    )  # equal components, so equal shares
    strategy.start(InlineGrid(app, 2), two_weights.model([0.0, 0.0]), 1, 60, config, config)
    first, second = (weights_of(each) for each in strategy.models)
    assert first != pytest.approx(second)


def test_integer_buffers_are_the_median_of_all_clients() -> None:
    def arrays(number: int) -> dict[str, np.ndarray]:
        return {"weight": np.full(2, number, np.float32), "num_batches_tracked": np.array(number)}

    strategy = FedEM(num_components=2)
    strategy.begin(to_record(arrays(0)))
    list(strategy.outgoing(1, ["a", "b", "c"]))
    for client, models in (
        ("c", {0: arrays(9), 1: arrays(9)}),
        ("b", {0: arrays(5), 1: arrays(5)}),
        ("a", {1: arrays(1)}),
    ):
        strategy.take_models(client, 1.0, models)
    strategy.end_round(1, ["a", "b", "c"])
    first, second = map(read_record, strategy.models)
    assert (first["weight"][0], first["num_batches_tracked"]) == (7, 5)
    assert (second["weight"][0], second["num_batches_tracked"]) == (5, 5)
