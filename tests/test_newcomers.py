"""Clients that come after a run: their data, the messages that serve them, and the tables of their results."""

from __future__ import annotations

import copy
import errno
import json

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from typer.testing import CliRunner

import kindred
from kindred import REGISTRY, InlineGrid, TooFewClients, kindred as method
from kindred.baselines.clustered_fl import Cluster, Tree
from kindred.data import load_federation
from kindred.engine.checkpoint import Checkpoints
from kindred.messages import to_record
from kindred.parts import newcomers
from kindred.parts.newcomers import mixture_metrics, newcomer_reply, unlabelled_scores
from kindred.server_app.cli.run import app
from kindred.server_app.config import Config
from kindred.server_app.headline import Headline
from kindred.server_app.newcomers import ALL, AMOUNTS, lines, means, over_seeds, tables
from kindred.server_app.report.content import run_content
from kindred.server_app.run_files import is_finished
from kindred.server_app.tables import read_table

from .refusals import refusal
from .test_data_by_client import CLIENTS, by_client

RUN = {"clients": 6, "rounds": 2, "held_out_clients": 2, "samples_per_client": 30}


def federation(**changes):
    settings = {"num_clients": 6, "partition": "practical", "samples_per_client": 30, **changes}
    return load_federation(Config(**settings).run_config())


# --- Their data -----------------------------------------------------------------------------------------------------


def test_clients_held_out_keep_their_samples_and_come_after_the_others() -> None:
    """Clients a, b and c have the training samples 1 3, 0 2 and 4; the last ones are drawn by seed."""
    y = [0, 1, 0, 1, 0, 0, 1, 0, 1]
    clients = np.array([*CLIENTS, "c"])
    settings = {"num_clients": 3, "clients_train": clients[:5], "clients_test": clients[5:]}
    whole = by_client(y[:5], y[5:], **settings)
    drawn = set()
    for seed in range(10):
        found = by_client(y[:5], y[5:], held_out_clients=1, seed=seed, **settings)
        drawn.add(found.names[-1])
        assert (
            found.newcomers == 1
            and sorted(found.names) == ["a", "b", "c"]
            and list(found.names[:2]) == sorted(found.names[:2])
        )
        for name, train, test in zip(found.names, found.train, found.test, strict=True):
            before = whole.names.index(name)
            assert sorted(train) == whole.train[before].tolist() and test.tolist() == whole.test[before].tolist()
    assert drawn == {"a", "b", "c"}


def test_a_newcomers_samples_are_all_for_training_and_few_are_among_many() -> None:
    whole = federation(validation_share=0.2)
    found = federation(validation_share=0.2, held_out_clients=2)
    assert found.num_clients == 4 and list(found.newcomers) == [4, 5] and len(found.train_sizes) == 4
    assert found.class_counts().shape == (4, 10) and found.sizes.sum() == whole.sizes.sum() * 4 // 6
    few, many, every = (found.newcomer_data(4, count) for count in (5, 20, found.newcomer_size(4)))
    assert [len(data.train[1]) for data in (few, many, every)] == [5, 20, 30]
    assert all(len(data.validation[1]) == 0 and len(data.test[1]) == 30 for data in (few, many, every))
    assert (many.train[0][:5] == few.train[0]).all() and (every.train[1][:20] == many.train[1]).all()
    assert len(found.site_data(3).train[1]) == 24 and len(found.site_data(3).validation[1]) == 6


@pytest.mark.parametrize("with_test_part", [False, True])
def test_inputs_are_prepared_by_the_clients_that_take_part(tmp_path, with_test_part) -> None:
    x = np.array([1.0, 3.0, 1.0, 3.0, 100.0, 300.0] * 2)[:, None, None]  # signals of one channel and one reading
    x[6:] += with_test_part  # then no test sample is a training sample
    arrays = {"x": x, "y": np.arange(12) % 2, "client": np.array(list("aabbcc") * 2)}
    if with_test_part:
        ends = {"train": slice(6), "test": slice(6, 12)}
        arrays = {f"{name}_{end}": array[part] for end, part in ends.items() for name, array in arrays.items()}
    else:
        arrays["time"] = np.arange(12)
    np.savez(tmp_path / "data.npz", **arrays)
    given = {
        "dataset": "npz",
        "data_dir": str(tmp_path / "data.npz"),
        "partition": "by-client",
        "num_clients": 3,
        "min_samples": 2,
    }
    for seed in range(8):
        found = load_federation(
            Config(**given, held_out_clients=1, test_share=0.5, validation_share=0.0, seed=seed).run_config()
        )
        if found.newcomer_names == ("c",):
            assert found.names == ("a", "b") and found.task.inputs.mean == (2.0,)
            break
    else:
        pytest.fail("client c is never held out")


def test_newcomers_are_not_named_for_having_no_validation_data() -> None:
    assert federation(validation_share=0.2, held_out_clients=2).remarks == ()


@pytest.mark.parametrize("count", [-1, 5, 6])
def test_two_clients_at_least_take_part(count) -> None:
    if count < 0:
        with pytest.raises(ValueError, match="held-out-clients is -1"):
            federation(held_out_clients=count)
    else:
        text = refusal(lambda: federation(held_out_clients=count))
        assert text == f"held-out-clients is {count}, allowed: 0 to 4, two fewer than num-clients"


# --- The messages that serve them -----------------------------------------------------------------------------------


class Records:
    """Clients of one weight. Each sends its own number, whatever it received, and what it received is recorded."""

    def __init__(self, own: list[float]) -> None:
        self.received: list[list[tuple[str, float]]] = [[] for _ in own]
        self.app = app = ClientApp()

        @app.train()
        def train(message, context):
            client = context.node_config["partition-id"]
            arrays = {name: array.numpy() for name, array in message.content["arrays"].items()}
            self.received[client] += [(name, float(array.ravel()[0])) for name, array in arrays.items()]
            metrics = MetricRecord({"num-examples": 1, "num-test-examples": 1, "trained-accuracy": 0.5})
            sent = to_record({"w": np.full(1, own[client], np.float32)})
            return Message(RecordDict({"arrays": sent, "metrics": metrics}), reply_to=message)


class Last(InlineGrid):
    def get_node_ids(self):
        return list(super().get_node_ids())[-1:]


def served(tmp_path, name: str, own: list[float], rounds: int, **settings) -> list[float]:
    """Return the weights that the last of these clients receives after a run of the others."""
    clients, start = Records(own), to_record({"w": np.zeros(1, np.float32)})
    checkpoints = Checkpoints(tmp_path)
    quiet = {"fraction_evaluate": 0.0, **settings}
    REGISTRY[name].strategy(**quiet).start(
        InlineGrid(clients.app, len(own) - 1), start, rounds, checkpoints=checkpoints
    )
    found = REGISTRY[name].strategy(**quiet).serve(Last(clients.app, len(own)), start, checkpoints, ConfigRecord())
    assert [list(each.values()) for each in found.values()] == [[1, 1, 0.5]] or len(found) == 1
    return [weight for _, weight in clients.received[-1]]


@pytest.mark.parametrize(
    ("failing", "says"), [([2], "the last checkpoint is of round 1, not of round 2"), ([1, 2], "is of no round, not")]
)
def test_without_a_checkpoint_of_the_last_round_newcomers_are_not_served_and_the_results_are_whole(
    failing, says, tmp_path, monkeypatch
) -> None:
    """An intact one before it has the models of another round."""
    write = Checkpoints._write

    def full(self, server_round, arrays) -> None:
        if server_round in failing:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, server_round, arrays)

    monkeypatch.setattr(Checkpoints, "_write", full)
    settings = RUN | {"validation_share": 0.2, "local_epochs": 1}
    with pytest.warns(UserWarning, match=f"clients that came later are not served: .*{says}"):
        found = kindred.run(method="fedavg", output=tmp_path, progress=False, **settings)
    assert json.loads((found.folder / "summary.json").read_text())["newcomers"] is None
    for kept in ("models", "selected"):
        assert len(list((found.folder / kept).iterdir())) == RUN["clients"] - RUN["held_out_clients"]


@pytest.mark.parametrize("every", [0, 1])
def test_a_run_that_stops_early_serves_its_newcomers_and_counts_its_training_rounds(every, tmp_path) -> None:
    """With a learning rate of 1e-9 no round is better on validation data than the second."""
    result = kindred.run(
        "fedavg", num_clients=4, num_groups=2, num_rounds=9, samples_per_client=20, local_epochs=1, stop_after=1,
        validation_share=0.3, held_out_clients=1, learning_rate=1e-9, checkpoint_every=every, output_dir=tmp_path,
        engine="inline",
    )  # fmt: skip
    rounds = read_table(result.folder / "rounds.csv")
    assert result.summary["rounds"] == 3 and [line["round"] for line in rounds] == [1, 2, 3, 4]
    assert result.summary["newcomers"] and is_finished(result.folder)
    assert run_content(result.folder)["asked"] == 3  # the fourth is a closing evaluation


def test_fedavg_sends_a_newcomer_its_global_model_once(tmp_path) -> None:
    assert served(tmp_path, "fedavg", [2.0, 4.0, 9.0], rounds=2) == [3.0]


def test_local_trains_a_newcomer_for_as_many_rounds_as_the_others(tmp_path) -> None:
    assert served(tmp_path, "local", [2.0, 4.0, 9.0], rounds=3) == [0.0, 9.0, 9.0]


def test_heurfedamp_sends_a_newcomer_its_cloud_model_after_one_message(tmp_path) -> None:
    """With equal others at 2 the cloud model after the reply 9 is 0.5 x 9 + 0.5 x 2; before it is 0.5 x 0 + 0.5 x 2."""
    assert served(tmp_path, "heurfedamp", [2.0, 2.0, 9.0], rounds=2, self_weight=0.5) == [1.0, 5.5]


def test_a_strategy_that_has_served_newcomers_still_waits_for_its_clients(tmp_path) -> None:
    clients, start = Records([2.0, 4.0, 9.0]), to_record({"w": np.zeros(1, np.float32)})
    checkpoints = Checkpoints(tmp_path)
    strategy = REGISTRY["fedavg"].strategy(fraction_evaluate=0.0, wait_timeout=0.1)
    strategy.start(InlineGrid(clients.app, 2), start, 1, checkpoints=checkpoints)
    strategy.serve(Last(clients.app, 3), start, checkpoints, ConfigRecord())
    with pytest.raises(TooFewClients):
        strategy.start(InlineGrid(clients.app, 1), start, 1)


def test_a_newcomer_is_led_through_the_tree_of_clusters() -> None:
    strategy = REGISTRY["clustered-fl"].strategy()
    record = ArrayRecord()
    strategy._tree = Tree(record)
    assert strategy.newcomer_visits(10) == 1
    strategy._tree.divide(0, 1, 0.0, [Cluster(record, 0), Cluster(record, 0)])
    strategy._tree.divide(2, 2, 0.0, [Cluster(record, 2), Cluster(record, 2)])
    assert strategy.newcomer_visits(10) == 3


# --- Tables ---------------------------------------------------------------------------------------------------------


def entry(labelled, method=None, alone=None, tuned=None) -> dict:
    return {"labelled": labelled, "method": method, "alone": alone, "tuned": tuned}


RESULTS = {
    "clients": [
        {"client": 4, "name": "lyon", "samples": 12, "served": [
            entry(0, 0.5), entry(5, 0.6, 0.25), entry(ALL, 0.8, 0.75, 0.5)]},
        {"client": 5, "samples": 30, "served": [
            entry(0, 0.7), entry(5, None, 0.75), entry(20, 0.9), entry(ALL, 0.9, 0.25, 0.6)]},
    ],
}  # fmt: skip
RESULTS["means"] = means(each["served"] for each in RESULTS["clients"])


def test_means_are_over_the_clients_that_have_so_many_samples() -> None:
    assert [each["labelled"] for each in RESULTS["means"]] == list(AMOUNTS)
    assert [each["clients"] for each in RESULTS["means"]] == [2, 2, 1, 2]
    assert [each["method"] for each in RESULTS["means"]] == pytest.approx([0.6, 0.6, 0.9, 0.85])
    assert [each["alone"] for each in RESULTS["means"]] == [None, 0.5, None, 0.5]
    (first, *_) = lines(RESULTS, "fedamp", Headline("accuracy"))
    assert first == (
        "clients that came later, 2, with 0 labelled samples: accuracy fedamp 60.0, alone -, tuned global model -"
    )
    by_amount, by_client_ = tables(RESULTS, "fedamp", Headline("accuracy"))
    assert by_amount[-1] == ["all", "2", "85.0", "50.0", "55.0"] and len(by_amount) == 5
    assert by_client_[3] == ["lyon", "all 12", "80.0", "75.0", "50.0"] and by_client_[4][:2] == ["5", "0"]


def test_over_seeds_each_way_has_a_mean_and_a_deviation() -> None:
    found = over_seeds([{"means": [entry(0, 0.5, None, 0.2)]}, {"means": [entry(0, 0.7, None, None)]}])
    assert found[0]["method"] == {"mean": pytest.approx(0.6), "std": pytest.approx(0.1 * 2**0.5)}
    assert found[0]["alone"] == {"mean": None, "std": None} and found[0]["tuned"] == {"mean": 0.2, "std": None}
    assert over_seeds([]) == []


# --- Whole runs -----------------------------------------------------------------------------------------------------


def test_a_run_serves_its_newcomers_and_a_comparison_has_their_table(tmp_path) -> None:
    found = kindred.compare(["fedavg", "local"], seeds=[0], output=tmp_path, **RUN)
    run = found.runs["fedavg", 0]
    newcomers = run.summary["newcomers"]
    assert [each["client"] for each in newcomers["clients"]] == [4, 5] and len(run.summary["clients"]) == 4
    for each in newcomers["clients"]:
        values = {one["labelled"]: one for one in each["served"]}
        assert list(values) == list(AMOUNTS) and each["samples"] == 30
        assert len({one["method"] for one in values.values()}) == 1  # FedAvg's global model, whatever they have
        assert values[0]["tuned"] == values[0]["method"] and values[0]["alone"] is None
        alone = found.runs["local", 0].summary["newcomers"]["clients"][each["client"] - 4]["served"]
        assert [one["alone"] for one in alone] == [one["alone"] for one in each["served"]]
    assert not (run.folder / "checkpoints").exists() and len(list((run.folder / "models").iterdir())) == 4
    assert "Clients that came later" in (run.folder / "report.html").read_text()
    text = (found.folder / "comparison.md").read_text()
    assert "| newcomers, accuracy (%) | 0 labelled | 5 labelled | 20 labelled | all labelled |" in text
    assert "| fedavg, tuned | " in text and "| alone | " not in text


def test_kindred_s_newcomers_use_the_clients_models_together(tmp_path, monkeypatch) -> None:
    used, lengths = [], set()

    def seen(visit, models, losses):
        used.append([{name: array.copy() for name, array in model.items()} for model in models])
        return mixture_metrics(visit, models, losses)

    def joined(visit, models, rounds):
        lengths.add(rounds)
        return newcomer_reply(visit, models, rounds)

    monkeypatch.setattr(method, "mixture_metrics", seen)
    monkeypatch.setattr(newcomers, "mixture_metrics", seen)
    monkeypatch.setattr(method, "newcomer_reply", joined)
    run = kindred.run("kindred", output=tmp_path, **RUN)
    data = federation(partition="rotated", held_out_clients=2)
    modules = [run.models.module(client) for client in run.models]
    assert {len(models) for models in used} == {5, 6}  # with labelled samples also its own
    assert lengths == {RUN["rounds"]}
    everybody = copy.deepcopy(modules[0])
    everybody.load_state_dict({name: torch.tensor(array) for name, array in used[0][-1].items()})
    modules.append(everybody)
    for each in run.summary["newcomers"]["clients"]:
        x, y = data.newcomer_data(each["client"], 0).test
        predictions = torch.stack([module(x).softmax(dim=1) for module in modules]).detach()  # (m + 1, n, N)
        shares = torch.tensor(unlabelled_scores(predictions.numpy())).softmax(dim=0)
        values = {one["labelled"]: one["method"] for one in each["served"]}
        right = (torch.einsum("m,mnk->nk", shares, predictions).argmax(dim=1) == y).double().mean()
        assert values[0] == right
        assert all(0 <= value <= 1 for value in values.values()) and list(values) == list(AMOUNTS)


def test_no_checkpoint_of_the_run_is_needed_and_bad_input_is_one_line(tmp_path) -> None:
    arguments = [
        "run", "--engine=inline", "--strategy=perfed-ckt", "--clients=5", "--rounds=1", "--set", "local-steps=2",
        "--set", "public-size=50", "--set", "samples-per-client=20", f"--output-dir={tmp_path}",
    ]  # fmt: skip
    done = CliRunner().invoke(app, [*arguments, "--set", "held-out-clients=1", "--set", "checkpoint-every=0"])
    assert done.exit_code == 0
    assert "clients that came later, 1, with 0 labelled samples: accuracy perfed-ckt -, alone -" in done.output
    (summary,) = tmp_path.glob("*/summary.json")
    last = json.loads(summary.read_text())["newcomers"]["means"][-1]
    assert last["method"] is not None and last["alone"] is not None and last["tuned"] is None
    refused = CliRunner().invoke(app, [*arguments, "--set", "held-out-clients=4"])
    assert refused.exit_code == 2
    assert "held-out-clients is 4, allowed: 0 to 3, two fewer than num-clients" in refused.output
    assert len(list(tmp_path.iterdir())) == 1
