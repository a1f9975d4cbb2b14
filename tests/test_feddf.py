"""FedDF: the ensemble's predictions, the distillation of a student, and several networks in one run."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from safetensors import safe_open
from typer.testing import CliRunner

from kindred import REGISTRY, FedAvg, InlineGrid
from kindred.baselines.feddf import FedDF, distil, logits_of, teacher
from kindred.client.training import get_arrays
from kindred.client_app.app import load_site
from kindred.data import Sites
from kindred.messages import read_record, to_record, with_prefix
from kindred.server_app.app import make_strategy, needed_by
from kindred.server_app.cli.run import app as command_line
from kindred.server_app.config import Config, ConfigError

from .client_apps import POINTS, Plain, initial, plain_app, small, small_app
from .grids import FaultyGrid, ShuffledGrid
from .test_conformance import everything, make, values

pytestmark = pytest.mark.usefixtures("no_pictures")

# --- The mathematics ------------------------------------------------------------------------------------


def linear(weights: list[list[float]], bias: list[float] | None = None) -> torch.nn.Linear:
    model = torch.nn.Linear(len(weights[0]), len(weights), bias=bias is not None)
    with torch.no_grad():
        model.weight.copy_(torch.tensor(weights))
        if bias is not None:
            model.bias.copy_(torch.tensor(bias))
    return model


def test_logits_match_prediction_and_the_model_keeps_its_mode() -> None:
    model = torch.nn.Sequential(linear([[1.0, 2.0], [0.0, -1.0]]), torch.nn.Dropout(0.9))
    model.train()
    logits = logits_of(model, torch.tensor([[1.0, 1.0], [2.0, 0.0], [0.0, 3.0]]), batch_size=2)
    assert logits.tolist() == [[3.0, -1.0], [2.0, 0.0], [6.0, -3.0]]
    assert model.training


def test_the_teacher_is_the_softmax_of_the_mean_logits() -> None:
    """One model has logits [6, 0], four have [0, 1]; the mean of their probabilities would differ."""
    mean = np.mean([[[6, 0]], *4 * [[[0, 1]]]], axis=0, dtype=np.float32)
    expected = np.exp([1.2, 0.8]) / np.exp([1.2, 0.8]).sum()
    assert teacher(mean)[0].numpy() == pytest.approx(expected)
    assert expected[0] > 0.5 > (np.exp(6) / (np.exp(6) + 1) + 4 / (1 + np.e)) / 5


SETTINGS = {"steps": 1, "learning_rate": 0.01, "batch_size": 1, "seed": 0}


@pytest.mark.parametrize(("steps", "moved"), [(1, 0.01), (2, 0.01 * (1 + 0.5)), (4, 0.01 * 2.5)])
def test_a_student_trains_with_adam_and_a_cosine_learning_rate(steps, moved) -> None:
    """The gradient for weight j of input 1 is p_j - teacher_j = 0.5 - 0.9: Adam's step equals the learning rate. Its
    values in 4 steps are (1 + cos(0, pi/4, pi/2, 3 pi/4)) / 2, which sum to 2.5."""
    student = linear([[0.0], [0.0]])
    distil(student, torch.ones(1, 1), torch.tensor([[0.9, 0.1]]), **(SETTINGS | {"steps": steps}))
    assert student.weight.flatten().tolist() == pytest.approx([moved, -moved], rel=1e-2)


def test_the_gradient_is_that_of_the_kl_divergence() -> None:
    """A student that predicts as the teacher does not move; after many steps every student does."""
    images, wanted = torch.eye(3), torch.tensor([[0.7, 0.3], [0.2, 0.8], [0.5, 0.5]])
    student = linear(torch.log(wanted).T.tolist())
    before = student.weight.detach().clone()
    distil(student, images, wanted, **(SETTINGS | {"steps": 5, "batch_size": 3, "learning_rate": 1e-3}))
    assert (student.weight - before).abs().max() < 6e-3  # Adam magnifies gradients that are 0 up to rounding
    student = linear([[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    distil(student, images, wanted, **(SETTINGS | {"steps": 300, "batch_size": 3, "learning_rate": 0.05}))
    assert logits_of(student, images).softmax(1).numpy() == pytest.approx(wanted.numpy(), abs=0.01)


def test_the_seed_fixes_batches_and_dropout_and_global_state_is_unchanged() -> None:
    def student(seed: int) -> list[float]:
        model = torch.nn.Sequential(linear([[0.0, 0.0], [0.0, 0.0]]), torch.nn.Dropout(0.5))
        wanted = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4], [0.5, 0.5]])
        before = torch.random.get_rng_state()
        distil(model, POINTS, wanted, steps=5, learning_rate=0.1, batch_size=2, seed=seed)
        assert torch.equal(before, torch.random.get_rng_state())
        return model[0].weight.flatten().tolist()

    assert student(1) == student(1) != student(2)


def test_a_normalised_student_estimates_its_statistics_on_the_public_images() -> None:
    model = small()
    images = torch.tensor([[3.0, 4.0], [5.0, 4.0], [4.0, 3.0], [4.0, 5.0]])
    distil(model, images, torch.full((4, 3), 1 / 3), steps=60, learning_rate=1e-9, batch_size=4, seed=0)
    mean = model.layer(images).mean(0)
    assert model.norm.running_mean.tolist() == pytest.approx(mean.tolist(), rel=0.3)
    assert int(model.norm.num_batches_tracked) == 60


# --- One network ----------------------------------------------------------------------------------------


def one_network(app=plain_app, grid=None, method=FedDF, **settings) -> FedDF:
    """Run the plain clients, or those with a network of ours."""
    plain = app is plain_app
    given = {"models": {"network": Plain if plain else small}, "public": POINTS, "device": "cpu"}
    strategy = method(**(given | settings))
    start = initial() if plain else to_record(get_arrays(small()))
    strategy.start(grid or InlineGrid(app(), 6), start, 4)
    return strategy


@pytest.mark.parametrize("app", [plain_app, small_app])
def test_without_steps_it_equals_fedavg_bit_for_bit(app) -> None:
    def faulty() -> FaultyGrid:
        return FaultyGrid(app(), 6, lambda r, c: "error" if (r + c) % 5 == 0 else "ok")

    def found(strategy) -> tuple:
        models, clients, weights, rows = everything(strategy)
        return models, clients, weights, [{k: v for k, v in row.items() if k != "bytes-down"} for row in rows]

    fedavg = FedAvg(fraction_train=0.7)
    fedavg.start(faulty(), initial() if app is plain_app else to_record(get_arrays(small())), 4)
    expected = found(fedavg)
    assert found(one_network(app, faulty(), distill_steps=0, fraction_train=0.7)) == expected
    assert found(one_network(app, faulty(), distill_steps=1, fraction_train=0.7))[0] != expected[0]


def test_a_round_by_hand() -> None:
    """Two clients, 10 and 30 samples, with given models: the student begins at the weighted mean and is distilled
    from the mean logits, in which both have equal weight."""
    w = [np.array([[2.0], [0.0]], np.float32), np.array([[0.0], [4.0]], np.float32)]
    app = reporting_app(lambda client, network: {"weight": w[client]}, examples=lambda client: 10 + 20 * client)
    strategy = FedDF(
        models={"line": lambda: torch.nn.Linear(1, 2, bias=False)},
        public=torch.ones(1, 1),
        device="cpu",
        distill_steps=1,
        distill_learning_rate=0.01,
        public_batch_size=1,
    )
    strategy.start(InlineGrid(app, 2), ArrayRecord({"weight": Array(np.zeros((2, 1), np.float32))}), 1)
    # Weighted mean (0.5, 3); teacher softmax(1, 2) = (0.27, 0.73); student softmax(0.5, 3) = (0.08, 0.92).
    weights = read_record(strategy.global_arrays())["weight"].flatten()
    assert weights == pytest.approx([0.5 + 0.01, 3 - 0.01], rel=1e-5)


def test_the_median_keeps_an_attacker_out_of_the_student_and_of_the_teacher() -> None:
    """Logits (2, 0), (0, 4), (2, 4) and an attacker's: medians 2 and 2, for the student's weights and the teacher."""
    models = np.array([[2, 0], [0, 4], [2, 4], [1e6, -1e6]], np.float32)
    app = reporting_app(lambda client, network: {"weight": models[client][:, None]}, examples=lambda client: 10)
    line = {"line": lambda: torch.nn.Linear(1, 2, bias=False)}
    strategy = FedDF(models=line, public=torch.ones(1, 1), device="cpu", distill_steps=5, aggregation="median")
    strategy.start(InlineGrid(app, 4), ArrayRecord({"weight": Array(np.zeros((2, 1), np.float32))}), 1)
    assert read_record(strategy.global_arrays())["weight"].flatten().tolist() == [2, 2]


def test_every_setting_changes_the_result() -> None:
    base = {"distill_steps": 3, "distill_learning_rate": 0.01, "public_batch_size": 2}
    reference = everything(one_network(**base))[0]
    for change in (
        {"distill_steps": 4},
        {"distill_learning_rate": 0.02},
        {"public_batch_size": 3},
        {"public": POINTS + 1},
    ):
        assert everything(one_network(**(base | change)))[0] != reference, change


def test_the_seed_of_the_run_fixes_the_public_batches() -> None:
    models = [everything(one_network(distill_steps=3, public_batch_size=2, seed=seed))[0] for seed in (1, 1, 2)]
    assert models[0] == models[1] != models[2]


def test_clients_train_and_report_as_in_fedavg() -> None:
    """The server's computation does not count as the clients'; results are of the received model."""
    strategy = one_network(small_app, distill_steps=5)
    assert strategy.personal == "received" and not strategy.clients_keep_state
    assert [line["round"] for line in strategy.history.rounds] == [1, 2, 3, 4, 5]
    for row in strategy.history.rows:
        if row["round"] < 5:
            assert row["samples-trained"] == row["num-examples"]
            assert row["samples-predicted"] == 0
            assert row["personal-accuracy"] == row["received-accuracy"]
    clients, weights = strategy.collaboration()
    assert weights == pytest.approx(np.full((6, 6), 1 / 6))  # all have equal weight in the teacher


def test_a_model_whose_logits_overflow_is_refused() -> None:
    def huge(content) -> None:
        content["arrays"]["layer.weight"] = Array(np.full((2, 2), 1e15, np.float32))

    def fate(server_round: int, client: int) -> object:
        return huge if (server_round, client) == (2, 3) else "ok"

    strategy = one_network(grid=FaultyGrid(plain_app(), 6, fate), public=1e24 * POINTS, distill_steps=2)
    (row,) = [row for row in strategy.history.rows if row["status"] != "ok"]
    assert (row["round"], row["client"]) == (2, 1004)
    assert row["status"] == "refused: its model gives logits that are not finite"
    assert np.isfinite(read_record(strategy.global_arrays())["layer.weight"]).all()


def test_a_student_that_overflows_is_not_used(caplog) -> None:
    class Leaping(FedDF):
        def begin(self, initial_arrays) -> None:
            super().begin(initial_arrays)
            self.distill_learning_rate = 1e37

    strategy = one_network(method=Leaping, distill_steps=2, public=torch.cat([POINTS, 1e3 * POINTS]))
    assert "distilling network gave weights that are not finite" in caplog.text
    fedavg = FedAvg()
    fedavg.start(InlineGrid(plain_app(), 6), initial(), 4)
    assert values(strategy.global_arrays()) == values(fedavg.global_arrays())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"models": {}}, r"models is \[\], allowed: one network or more"),
        ({"public": POINTS[:0]}, r"public is \(0, 2\), allowed: one image or more"),
        ({"distill_steps": -1}, "distill_steps is -1, allowed: 0 to 1,000,000"),
        ({"distill_learning_rate": 0.0}, "distill_learning_rate is 0.0, allowed: more than 0"),
        ({"public_batch_size": 0}, "public_batch_size is 0, allowed: 1 to 1,000,000"),
    ],
)
def test_a_bad_argument_is_named(changed, message) -> None:
    with pytest.raises(ValueError, match=message):
        one_network(**changed)


@pytest.mark.parametrize("missing", ["models", "public"])
def test_a_run_without_networks_or_public_images_is_refused(missing) -> None:
    with pytest.raises(ValueError, match=f"{missing} is None"):
        one_network(**{missing: None})


# --- Several networks -----------------------------------------------------------------------------------

NETWORKS = {"plain": lambda: torch.nn.Linear(2, 2, bias=False), "biased": lambda: torch.nn.Linear(2, 2)}
NETWORK_OF = ["plain", "biased", "plain", "biased"]


def reporting_app(trained, examples=lambda client: 10, network_of=NETWORK_OF) -> ClientApp:
    """Clients that report their network and return given models; `received` lists the models sent to them."""
    app = ClientApp()
    app.received = []

    @app.query("identity")
    def identity(message, context):
        client = context.node_config["partition-id"]
        about = {"client-id": client, "num-examples": examples(client)}
        if network_of[client] is not None:
            about["network"] = network_of[client]
        return Message(RecordDict({"config": ConfigRecord(about)}), reply_to=message)

    @app.train()
    def train(message, context):
        client = context.node_config["partition-id"]
        app.received.append((client, sorted(message.content["arrays"])))
        arrays = {name: Array(array) for name, array in trained(client, network_of[client]).items()}
        metrics = MetricRecord({"num-examples": examples(client)})
        return Message(RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics}), reply_to=message)

    @app.evaluate()
    def evaluate(message, context):
        return Message(RecordDict({"metrics": MetricRecord({"eval_acc": 0.5, "num-examples": 5})}), reply_to=message)

    return app


def own(client: int, network: str, factor: float = 1.0) -> dict[str, np.ndarray]:
    weight = factor * (client + 1) * np.eye(2, dtype=np.float32)
    return {"weight": weight} | ({"bias": np.full(2, client, np.float32)} if network == "biased" else {})


def start() -> ArrayRecord:
    arrays = {
        name: {k: np.zeros(v.shape, np.float32) for k, v in make_().state_dict().items()}
        for name, make_ in NETWORKS.items()
    }
    return to_record({key: array for name, each in arrays.items() for key, array in with_prefix(name, each).items()})


def several(app: ClientApp, rounds: int = 2, grid=None, **settings) -> FedDF:
    given = {"models": NETWORKS, "public": POINTS, "device": "cpu", "distill_steps": 0}
    strategy = FedDF(**(given | settings))
    strategy.start(grid or InlineGrid(app, 4), start(), rounds)
    return strategy


def arrays_of(strategy: FedDF) -> dict[int, dict[str, list]]:
    return {
        client: {key: array.tolist() for key, array in read_record(model).items()}
        for client, model in strategy.client_models().items()
    }


def test_clients_of_one_network_are_averaged_among_themselves() -> None:
    app = reporting_app(own, examples=lambda client: 10 if client < 2 else 30)
    strategy = several(app)
    assert strategy.networks == dict(enumerate(NETWORK_OF))
    assert app.received == 2 * [(c, ["bias", "weight"] if NETWORK_OF[c] == "biased" else ["weight"]) for c in range(4)]
    models = arrays_of(strategy)
    assert models[0] == models[2] == {"weight": [[2.5, 0.0], [0.0, 2.5]]}  # (10 * 1 + 30 * 3) / 40
    assert models[1] == models[3] == {"weight": [[3.5, 0.0], [0.0, 3.5]], "bias": [2.5, 2.5]}
    assert {k: a.shape for k, a in strategy.global_arrays().items()} == {k: a.shape for k, a in start().items()}
    _, weights = strategy.collaboration()
    assert weights.tolist() == [[0.25, 0, 0.75, 0], [0, 0.25, 0, 0.75]] * 2


def test_the_teacher_contains_all_models_of_all_networks() -> None:
    def distilled(factor: float) -> FedDF:
        return several(reporting_app(lambda c, n: own(c, n, factor if c == 3 else 1.0)), rounds=1, distill_steps=3)

    one, other = distilled(1.0), distilled(5.0)
    assert arrays_of(one)[0] != arrays_of(other)[0]  # client 0 has another network than client 3
    _, weights = several(reporting_app(own), distill_steps=3).collaboration()
    assert weights.tolist() == [[0.25] * 4] * 4


def test_a_network_without_replies_learns_from_the_others() -> None:
    def faulty() -> FaultyGrid:
        return FaultyGrid(reporting_app(own), 4, lambda r, c: "error" if NETWORK_OF[c] == "biased" else "ok")

    assert arrays_of(several(None, grid=faulty()))[1] == {"weight": [[0, 0], [0, 0]], "bias": [0, 0]}
    strategy = several(None, grid=faulty(), distill_steps=50, distill_learning_rate=0.1)
    learned = np.array(arrays_of(strategy)[1]["weight"])
    assert learned[0, 0] > 0.3 > 0 > learned[0, 1]  # as clients 0 and 2 predict: the larger number's class


def test_the_order_of_replies_changes_no_bit_with_several_networks() -> None:
    reference = arrays_of(several(reporting_app(own), distill_steps=3))
    for seed in range(3):
        assert arrays_of(several(None, grid=ShuffledGrid(reporting_app(own), 4, seed), distill_steps=3)) == reference


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (None, "it does not report its network, expected one of plain, biased"),
        ("other", "its network is 'other', expected one of plain, biased"),
        (7, "its network is 7, expected one of plain, biased"),
    ],
)
def test_a_client_of_an_unknown_network_is_excluded(said, reason) -> None:
    app = reporting_app(own, network_of=["plain", "biased", said, "biased"])
    strategy = several(app)
    assert strategy.history.left_out == {2: reason} and sorted(strategy.client_models()) == [0, 1, 3]


def test_a_model_of_another_network_is_refused() -> None:
    app = reporting_app(lambda client, network: own(client, "biased"))
    strategy = several(app)
    status = {row["client"]: row["status"] for row in strategy.history.rows if row["round"] == 1}
    assert status == {
        0: "refused: array 'bias' is not part of the model",
        1: "ok",
        2: "refused: array 'bias' is not part of the model",
        3: "ok",
    }


def test_an_update_is_bounded_relative_to_the_model_of_the_clients_network() -> None:
    strategy = several(reporting_app(own), rounds=1, max_update_norm=3.5)
    status = [row["status"] for row in strategy.history.rows]
    # Norms sqrt(2) (c + 1), and with a bias sqrt(2 (c + 1)^2 + 2 c^2).
    assert status[:2] == ["ok", "ok"]
    assert status[2:] == [
        "refused: its update has norm 4.24264, allowed: up to 3.5",
        "refused: its update has norm 7.07107, allowed: up to 3.5",
    ]


def test_networks_must_match_the_initial_models() -> None:
    strategy = FedDF(models=NETWORKS, public=POINTS, device="cpu")
    with pytest.raises(ValueError, match="initial_arrays holds models of weight, expected plain, biased"):
        strategy.begin(ArrayRecord({"weight": Array(np.zeros((2, 2), np.float32))}))
    three = {**NETWORKS, "three": lambda: torch.nn.Linear(2, 3, bias=False)}
    arrays = {**start(), "three/weight": Array(np.zeros((3, 2), np.float32))}
    with pytest.raises(ValueError, match="models is .*'three': 3.*, allowed: networks for one number of classes"):
        FedDF(models=three, public=POINTS, device="cpu").begin(ArrayRecord(arrays))


def test_buffers_are_those_of_any_network() -> None:
    FedDF(models=NETWORKS, public=POINTS, device="cpu", buffers=["bias"]).begin(start())
    with pytest.raises(ValueError, match="buffers is 'mask', allowed: names of arrays of the initial model"):
        FedDF(models=NETWORKS, public=POINTS, device="cpu", buffers=["mask"]).begin(start())


# --- The application ------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["digits-cnn,office-mlp", "office-mlp"])
def test_the_command_line_runs_several_networks(model, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    result = CliRunner().invoke(
        command_line,
        [
            "run",
            "--engine=inline",
            "--strategy=feddf",
            "--clients=5",
            "--rounds=2",
            f"--set=model={model}",
            "--set=samples-per-client=20",
            "--set=num-groups=1",
            "--set=local-epochs=1",
            "--set=distill-steps=5",
            "--set=device=cpu",
            f"--output-dir={tmp_path / 'results'}",
        ],
    )
    assert result.exit_code == 0, result.output
    (folder,) = (tmp_path / "results").iterdir()
    about, arrays = {}, {}
    for client in range(5):
        with safe_open(folder / "models" / f"client-{client}.safetensors", "numpy") as file:
            about[client] = file.metadata()["model"]
            arrays[client] = {key: file.get_tensor(key).tobytes() for key in file.keys()}
    assert set(about.values()) == set(model.split(","))
    for one in range(5):  # each network has one model
        assert all((arrays[one] == arrays[other]) == (about[one] == about[other]) for other in range(5))
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["personal"] == "received" and summary["accuracy"] is not None and not summary["left-out"]


def test_clients_need_no_public_images() -> None:
    config = Config(strategy="feddf", num_clients=4, num_groups=2)
    context = Context(1, 2, {"partition-id": 1}, RecordDict(), config.run_config())
    assert load_site(context).public is None
    context.run_config["strategy"] = "perfed-ckt"
    assert load_site(context).public is not None


SITES = {"strategy": "feddf", "dataset": "sites", "image_shape": "1x8x8", "num_classes": 10}


def test_with_sites_the_server_s_own_file_has_the_public_images(tmp_path) -> None:
    path = str(tmp_path / "public.npz")
    np.savez(path, x=np.full((7, 8, 8), 255, np.uint8))
    config = Config(**SITES, public_data=path)
    given = needed_by(config, Sites.of(config.run_config()))
    assert given["public"].shape == (7, 1, 8, 8) and given["public"].unique().tolist() == [1.0]  # (1 - 0.5) / 0.5
    assert list(given["models"]) == ["digits-cnn"] and given["device"] == "auto"
    assert make_strategy(config, **given).distill_steps == config.distill_steps
    few = Config(**SITES, public_data=path, public_size=3)
    assert len(needed_by(few, Sites.of(few.run_config()))["public"]) == 3


@pytest.mark.parametrize(
    ("public", "size", "says"),
    [
        ("auto", 0, "public-data is 'auto', allowed with feddf and dataset sites: an .npz file with x"),
        ("mnist", 0, "public-data is 'mnist', allowed with feddf and dataset sites: an .npz file with x"),
        ("public.npz", 8, "public-size is 8, and public.npz has 7 samples"),
    ],
)
def test_with_sites_a_missing_or_unsuitable_file_of_public_images_is_refused(
    public, size, says, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez("public.npz", x=np.zeros((7, 8, 8), np.uint8))
    config = Config(**SITES, public_data=public, public_size=size)
    with pytest.raises(ConfigError) as refused:
        needed_by(config, Sites.of(config.run_config()))
    assert str(refused.value).startswith(says) and "\n" not in str(refused.value)
    assert os.listdir(tmp_path) == ["public.npz"]


def test_no_other_method_s_server_uses_networks() -> None:
    assert [name for name, method in REGISTRY.items() if method.distils] == ["feddf"]
    assert make("feddf").models.keys() == {"network"}
