"""FedRep: both steps on small numbers that can be checked by hand, its messages, and rounds with real ClientApps."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict

from kindred import FedAvg, FedRep, InlineGrid, Site, make_client_app
from kindred.baselines.fedrep import training_only
from kindred.client.training import NOT_FINITE, get_arrays, set_arrays
from kindred.engine.simulated_state import saved_files
from kindred.messages import read_record, to_record

from .client_apps import DIVERGING, saved_models
from .grids import FaultyGrid
from .scores import evaluate
from .test_client import CLIENTS, SETTINGS, app, load_site, network
from .test_conformance import values

HEAD = ["3.weight", "3.bias"]
BODY = [name for name in get_arrays(network()) if name not in HEAD]


def run(strategy, rounds=3, grid=None, initial=network, on_round=None, **settings):
    config = ConfigRecord(SETTINGS | settings)
    strategy.start(
        grid or InlineGrid(app, CLIENTS),
        to_record(get_arrays(initial())),
        rounds,
        60,
        config,
        config,
        on_round=on_round,
    )
    return strategy


def subset(record: ArrayRecord, names: list[str]) -> dict[str, bytes]:
    return {name: record[name].data for name in names}


class Watching(InlineGrid):
    """Records the names of the arrays in each training message and its reply, by round and client."""

    def __init__(self, client_app=app) -> None:
        super().__init__(client_app, CLIENTS)
        self.down: dict[tuple[int, int], list[str]] = {}
        self.up: dict[tuple[int, int], list[str]] = {}

    def _answer(self, message: Message) -> Message:
        key = int(message.metadata.group_id or 0), message.metadata.dst_node_id - 1001
        trains = message.metadata.message_type == "train"
        if trains:
            self.down[key] = list(message.content["arrays"])
        reply = super()._answer(message)
        if trains and reply.has_content():
            self.up[key] = list(reply.content["arrays"])
        return reply


# --- The mathematics ----------------------------------------------------------------------------------


def three_weights() -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 2, bias=False))
    torch.nn.init.ones_(model[0].weight)
    torch.nn.init.constant_(model[1].weight, 0.5)
    model[1].weight.data[1] = -0.5
    return model


def test_a_round_by_hand() -> None:
    sites = [
        Site(three_weights, *2 * [(torch.full((1, 1), 1.0), torch.zeros(1, dtype=torch.long))]),
        Site(three_weights, *2 * [(torch.full((2, 1), 2.0), torch.ones(2, dtype=torch.long))]),
    ]
    grid = InlineGrid(make_client_app(lambda context: sites[context.node_config["partition-id"]]), 2)
    settings = {"local-epochs": 1, "batch-size": 2, "learning-rate": 0.1}
    strategy = run(FedRep(head_epochs=1), 1, grid, three_weights, **settings)
    models = [read_record(model) for model in saved_models(strategy.run_id).values()]
    # Heads first, on the body 1. The first client's logits differ by 1, and its label has probability
    # 1 / (1 + e^-1) = 0.731059: the gradient is -0.268941. The second has representation 2, its logits differ by 2,
    # and the other class has 1 / (1 + e^-2) = 0.880797: 0.880797 x 2.
    heads = [0.5 + 0.1 * 0.268941, 0.5 - 0.1 * 0.880797 * 2]
    assert models[0]["1.weight"].ravel() == pytest.approx([heads[0], -heads[0]])
    assert models[1]["1.weight"].ravel() == pytest.approx([heads[1], -heads[1]])
    # Then bodies, still at 1, under these heads: the logits now differ by 1.053788 and 1.295362, and the
    # probabilities are 0.741502 and 0.785053.
    bodies = [1 + 0.1 * (1 - 0.741502) * 2 * heads[0], 1 - 0.1 * 0.785053 * 2 * heads[1] * 2]
    assert [model["0.weight"].item() for model in models] == pytest.approx(bodies, abs=1e-6)
    # The second client has two samples and the same weight as the first.
    (body,) = read_record(strategy.global_arrays()).values()
    assert body.item() == pytest.approx(sum(bodies) / 2, abs=1e-6)
    assert strategy.collaboration()[1].tolist() == [[1, 0], [0, 1]]  # of the body that was sent: the initial one
    strategy = run(FedRep(head_epochs=1), 2, InlineGrid(grid._client_app, 2), three_weights, **settings)
    assert strategy.collaboration()[1].tolist() == [[0.5, 0.5], [0.5, 0.5]]


def test_only_named_parameters_are_trained_and_fixed_ones_stay_fixed() -> None:
    model = network()
    model[1].weight.requires_grad_(False)
    with pytest.raises(KeyError), training_only(model, ["0.bias", "1.weight"]):
        trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        assert trained == ["0.bias"]
        raise KeyError
    trained = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    assert trained == ["1.weight"]


# --- The rounds ---------------------------------------------------------------------------------------


def with_fixed_head() -> torch.nn.Module:
    model = network()
    for parameter in model[3].parameters():
        parameter.requires_grad_(False)
    return model


def with_sixteen_samples(model):
    """Sites of 16 samples each, with which a mean weighted by samples equals the plain mean bit for bit."""

    def load(context: Context) -> Site:
        site = load_site(context)
        return Site(model, tuple(part[:16] for part in site.train), site.test)

    return InlineGrid(make_client_app(load), CLIENTS)


def test_without_head_epochs_it_equals_fedavg_with_a_fixed_head() -> None:
    fedrep = run(FedRep(head_epochs=0), grid=with_sixteen_samples(network))
    for model in saved_models(fedrep.run_id).values():
        assert subset(model, HEAD) == subset(to_record(get_arrays(network())), HEAD)
    fedavg = run(FedAvg(), grid=with_sixteen_samples(with_fixed_head), initial=with_fixed_head)
    assert values(fedrep.global_arrays()) == subset(fedavg.global_arrays(), BODY)
    assert values(fedrep.global_arrays()) != subset(to_record(get_arrays(network())), BODY)


def test_only_the_body_is_sent_after_the_first_head() -> None:
    grid = Watching()
    strategy = run(FedRep(), grid=grid)
    assert len(grid.down) == len(grid.up) == 3 * CLIENTS
    for (server_round, _), names in grid.down.items():
        assert sorted(names) == sorted(BODY + HEAD if server_round == 1 else BODY)
    assert all(names == BODY for names in grid.up.values())
    assert list(strategy.global_arrays()) == BODY
    assert strategy.client_models() == {}


def test_heads_stay_at_the_clients_between_rounds() -> None:
    kept = {}
    grid = FaultyGrid(app, CLIENTS, lambda r, c: "error" if (r, c) == (2, 0) else "ok")
    strategy = FedRep()
    run(strategy, grid=grid, on_round=lambda r: kept.update({r: saved_models(strategy.run_id)}))
    heads = {r: {client: subset(model, HEAD) for client, model in models.items()} for r, models in kept.items()}
    assert len({str(head) for head in heads[3].values()}) == CLIENTS
    assert heads[1][0] == heads[2][0] != heads[3][0]
    assert heads[1][1] != heads[2][1] != heads[3][1]


def test_a_client_without_a_reply_gets_the_first_head_again_and_keeps_its_own() -> None:
    reference = run(FedRep())
    bodies = values(reference.global_arrays())
    models = {client: values(model) for client, model in saved_models(reference.run_id).items()}

    class Resending(FedRep):
        def outgoing(self, server_round, clients):
            self._have_heads = set()
            return super().outgoing(server_round, clients)

    strategy = run(Resending())
    assert values(strategy.global_arrays()) == bodies
    assert {client: values(model) for client, model in saved_models(strategy.run_id).items()} == models


def test_a_client_that_lost_its_head_reports_this_and_restarts_from_the_first_one() -> None:
    grid = Watching()

    def forget(server_round: int) -> None:
        if server_round == 1:
            shutil.rmtree(saved_files(strategy.run_id, "model")[2].parent)

    strategy = FedRep()
    run(strategy, 4, grid, on_round=forget)
    status = {(row["round"], row["client"]): row["status"] for row in strategy.history.rows}
    assert status.pop((2, 2)) == (
        "error 2: ValueError: client 2 has lost its head: '3.weight' is missing; the server sends it again"
    )
    assert set(status.values()) == {"ok"}
    assert set(HEAD) <= set(grid.down[3, 2]) and not set(HEAD) & set(grid.down[4, 2])


def test_every_setting_changes_the_result() -> None:
    found = {
        str(values(run(FedRep(**settings)).global_arrays()))
        for settings in ({}, {"head_epochs": 2}, {"head_epochs": 0}, {"head_layers": 2})
    }
    assert len(found) == 4


def test_the_evaluated_and_stored_model_is_the_client_s_head_on_its_trained_body() -> None:
    kept = {}
    strategy = FedRep()
    run(strategy, on_round=lambda r: kept.update({r: (strategy.global_arrays(), saved_models(strategy.run_id))}))
    rows = {(row["round"], row["client"]): row for row in strategy.history.rows}
    assert strategy.history.rounds[-1]["personal"] == "own" and len(strategy.history.rounds) == 3

    def evaluated(arrays, client):
        model = network()
        set_arrays(model, arrays)
        return evaluate(model, *load_site(SimpleNamespace(node_config={"partition-id": client})).test)

    for client, model in kept[3][1].items():
        row = rows[3, client]
        assert evaluated(read_record(model), client) == (row["own-accuracy"], row["own-loss"])
        assert row["personal-accuracy"] == row["own-accuracy"]
        assert subset(model, BODY) != values(strategy.global_arrays())
        # The received body is evaluated under the client's previous head.
        received = {**read_record(kept[2][1][client]), **read_record(kept[2][0])}
        assert evaluated(received, client) == (row["received-accuracy"], row["received-loss"])


def test_an_unsampled_client_is_evaluated_with_the_first_head() -> None:
    strategy = run(FedRep(fraction_train=0.5, min_train_nodes=1), 1)
    closing = {row["client"]: row for row in strategy.history.rows if row["round"] == 2}
    initial = read_record(to_record(get_arrays(network())))
    model = network()
    set_arrays(model, {**initial, **read_record(strategy.global_arrays())})
    assert len(closing) == 2
    for client, row in closing.items():
        test = load_site(SimpleNamespace(node_config={"partition-id": client})).test
        assert evaluate(model, *test) == (row["personal-accuracy"], row["personal-loss"])


@pytest.mark.parametrize(
    ("settings", "samples"),
    [({"local-epochs": 3}, (2 + 3) * 20), ({"local-epochs": 0, "local-steps": 7}, 2 * 20 + 7 * 4)],
)
def test_both_steps_count_as_work(settings, samples) -> None:
    rows = run(FedRep(head_epochs=2), 2, **settings).history.rows
    assert {row["samples-trained"] for row in rows} == {samples}
    assert {row["samples-predicted"] for row in rows} == {0}


def test_a_head_in_a_reply_is_refused() -> None:
    def whole(content: RecordDict) -> None:
        content["arrays"]["3.bias"] = to_record({"bias": np.zeros(2, np.float32)})["bias"]

    strategy = run(FedRep(), 1, FaultyGrid(app, CLIENTS, lambda r, c: whole if c == 1 else "ok"))
    status = {row["client"]: row["status"] for row in strategy.history.rows if row["round"] == 1}
    assert status == {0: "ok", 1: "refused: array '3.bias' is not part of the model", 2: "ok", 3: "ok"}


def test_updates_of_the_body_are_bounded() -> None:
    strategy = run(FedRep(max_update_norm=1e-9), 1, FaultyGrid(app, CLIENTS, lambda r, c: "ok" if c else _still))
    status = {row["client"]: row["status"] for row in strategy.history.rows if row["round"] == 1}
    assert status.pop(0) == "ok"
    assert all(each.startswith("refused: its update has norm") for each in status.values())


def _still(content: RecordDict) -> None:
    content["arrays"] = to_record({name: array for name, array in get_arrays(network()).items() if name in BODY})


class Exploding(FedRep):
    def round_config(self, server_round, client):
        return super().round_config(server_round, client) | (DIVERGING if server_round == 2 else {})


def test_a_model_that_becomes_infinite_does_not_replace_the_last_finite_one() -> None:
    kept = {}
    strategy = Exploding()
    run(strategy, on_round=lambda r: kept.update({r: [values(m) for m in saved_models(strategy.run_id).values()]}))
    status = {r: {row["status"] for row in strategy.history.rows if row["round"] == r} for r in (1, 2, 3)}
    assert status == {
        1: {"ok"},
        3: {"ok"},
        2: {f"error 2: ValueError: {NOT_FINITE}"},
    }
    assert kept[1] == kept[2] != kept[3]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"head_layers": 0}, "head_layers is 0, allowed: 1 to 1,000"),
        ({"head_epochs": -1}, "head_epochs is -1, allowed: 0 to 10,000"),
    ],
)
def test_an_invalid_setting_is_named(settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        FedRep(**settings)


def test_a_network_without_a_body_is_refused() -> None:
    with pytest.raises(ValueError, match="head_layers is 3, allowed: 1 to 2, because the model has 3 layers"):
        run(FedRep(head_layers=3))
