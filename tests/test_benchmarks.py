"""Values that the benchmarks count and compute, compared with values by hand and with real runs."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from flwr.app import ConfigRecord

import kindred
from benchmarks import ablation, scale, simulation, steps
from benchmarks.simulation import work_of, work_of_server
from benchmarks.tuned_loop import MU, Trainer, Work
from kindred import REGISTRY, InlineGrid, kindred as method, make_client_app
from kindred.client.training import get_arrays
from kindred.messages import to_record
from kindred.parts import held_out
from kindred.parts.aggregation import AGGREGATION
from kindred.server_app.config import Config

from .background_commands import PATIENCE
from .client_apps import Small, small, small_site
from .test_conformance import make, trial_settings

ROOT = Path(__file__).parent.parent

# --- Growth of cost -----------------------------------------------------------------------------------


def test_growth_is_the_slope_of_the_largest_sizes() -> None:
    assert scale.growth([10, 100], [3 * 10**2, 3 * 100**2]) == pytest.approx(2)
    assert scale.growth([1, 2, 4], [7, 7 * 2**1.5, 7 * 4**1.5]) == pytest.approx(1.5)
    assert scale.growth([10, 100, 1000], [999, 5, 5000]) == pytest.approx(3)  # 10 is too far from 1000
    assert scale.at(100_000, [10, 100, 1000], [999, 2, 200]) == pytest.approx(200 * 100**2)


def test_figures_are_written_in_short_form() -> None:
    assert [scale.time_text(each) for each in (0.0123, 1.2, 2.34, 118, 121, 6e3, 3e5)] == [
        "12 ms",
        "1,200 ms",
        "2.3 s",
        "118 s",
        "2 min",
        "100 min",
        "3.5 days",
    ]
    assert [scale.size_text(each) for each in (12, 999.9, 1500, 14.8e6, 1.05e12)] == [
        "12 B",
        "1 kB",
        "1.5 kB",
        "15 MB",
        "1.1 TB",
    ]


# Arrays in a message down and up, in models of 3,700 numbers: with the other settings' defaults, and 6 clients.
MODEL, BODY = 3700, 3200
FLOATS = {
    "perfed-ckt": (3 * 2000 * 10, 2000 * 10),  # |P| N: c = 3 centroids down, class probabilities up
    "federico": (4 * MODEL, 4 * MODEL),  # the client's own and those of M = 3 neighbours
    "scaffold": (2 * MODEL, 2 * MODEL),  # plus control variates
    "hypcluster": (3 * MODEL, MODEL),
    "fedfomo": (4 * MODEL, MODEL),
    "fedem": (3 * MODEL, 3 * MODEL),
    "fedrep": (BODY, BODY),
    "kindred": (2 * MODEL, MODEL),
}


@pytest.mark.parametrize("name", REGISTRY)
def test_messages_and_bytes_of_a_round_match_the_method(name, monkeypatch) -> None:
    monkeypatch.setattr(scale, "ROUNDS", 2)
    clients = 6
    if name == "feddf":  # the public images do not affect messages
        monkeypatch.setattr(scale, "PUBLIC", 20)
    found = scale.measure(name, clients)
    down, up = (4 * clients * floats for floats in FLOATS.get(name, (MODEL, MODEL)))
    assert found.messages == clients
    # Headers and settings are some hundred bytes for each array.
    assert down <= found.down <= 1.03 * down + 500 * clients
    assert up <= found.up <= 1.03 * up + 500 * clients
    assert 0 < found.seconds < 60


def test_memory_is_that_of_the_models_at_the_server() -> None:
    """12 models of 4 MB in memory; on disk, one or two at a time. Messages in transit are not counted."""
    models, wide = 12 * 4e6, scale.hidden_for(4)
    assert models < scale.in_a_process("local", 12, wide).memory < 1.5 * models
    assert scale.in_a_process("local", 12, wide, "disk").memory < 0.75 * models


def test_the_command_prints_its_measurements(monkeypatch, capsys) -> None:
    def measured(name, clients, hidden=scale.HIDDEN, store="memory"):
        size = 4 * hidden * 74
        return scale.Measured(
            clients, clients * size, 2 * clients * size, clients**2 * 1e-3, (1 if store == "disk" else clients) * size
        )

    monkeypatch.setattr(scale, "in_a_process", measured)
    monkeypatch.setattr("sys.argv", ["scale", "--methods", "fedavg,local", "--clients", "3,6"])
    monkeypatch.setenv("FLWR_LOG_LEVEL", "ERROR")  # set by the command; later tests must not inherit it
    scale.main()
    lines = capsys.readouterr().out.splitlines()
    assert "| fedavg | 1 | 1 MB | 2 MB |" in lines
    assert "| local | 9 ms | 36 ms | 2.0 | 44 kB | 89 kB | 1.0 | 15 kB |" in lines
    assert "| fedavg | 64 ms | 64 ms | 0.0 | 80 MB | 360 MB | 1.0 |  |" in lines
    # 100,000 clients: (10^5)^2 ms are 116 days, and 1.48 GB.
    assert "| fedavg | 116 days | 1.5 GB | 116 days | 100 GB |" in lines


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--methods", "fedavg,nosuch"], "'nosuch' is unknown, allowed: all, fedamp"),
        (["--clients", "10,1"], "'10,1' is not allowed; allowed: different numbers of 2 or more"),
        (["--clients", "ten"], "'ten' is not allowed"),
    ],
)
def test_invalid_arguments_are_named(arguments, complaint, monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["scale", *arguments])
    with pytest.raises(SystemExit) as ended:
        scale.main()
    assert ended.value.code == 2 and complaint in capsys.readouterr().err


# --- The bare loop ------------------------------------------------------------------------------------


class Counted(Small):
    """Counts the samples that pass through it, with and without gradients."""

    seen: list[tuple[int, bool]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append((len(x), torch.is_grad_enabled()))
        return super().forward(x)


def counted() -> Counted:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Counted()


@pytest.mark.parametrize("name", REGISTRY)
def test_the_work_of_a_round_is_the_samples_through_the_network(name) -> None:
    points = torch.linspace(-1, 1, 16).reshape(8, 2)

    def site(context):
        return replace(small_site(context.node_config["partition-id"]), model=counted, public=points)

    strategy = make(name, network=small, images=points, fraction_evaluate=0.0)
    config = Config(strategy=name, local_epochs=2, num_components=trial_settings("fedem")["num_components"])
    works: dict[int, list[Work]] = {}
    seen: dict[int, list[tuple[int, bool]]] = {}

    def on_round(server_round: int) -> None:
        rows = [row for row in strategy.history.rows if row["round"] == server_round]
        works[server_round] = [work_of(row, config) for row in rows]
        seen[server_round] = list(Counted.seen)
        Counted.seen.clear()

    settings = ConfigRecord(
        {"local-epochs": 2, "batch-size": 5, "optimizer": "sgd", "learning-rate": 0.1, "device": "cpu"}
    )
    initial = to_record(get_arrays(small())) if REGISTRY[name].models_travel else to_record({})
    Counted.seen.clear()
    strategy.start(
        InlineGrid(make_client_app(site), 4, {"of": name}), initial, 3, train_config=settings, on_round=on_round
    )
    for server_round in (2, 3):  # in the first round clients test that the network accepts an image
        work, happened = works[server_round], seen[server_round]
        assert len(work) == 4
        assert sum(each.whole + each.head for each in work) == sum(n for n, gradients in happened if gradients)
        assert sum(each.predicted + 5 * each.tests for each in work) == sum(n for n, grads in happened if not grads)
    assert any(each.head for each in works[3]) == (name in ("fedrep", "fedala"))


@pytest.mark.parametrize("name", ["heurfedamp", "perfed-ckt", "fedrep"])
def test_the_loop_does_the_work_of_a_round(name) -> None:
    model, config = counted(), Config(strategy=name, batch_size=100, head_layers=1)
    x, y = torch.rand(300, 2), torch.zeros(300, dtype=torch.int64)
    row = {
        "samples-trained": 600,
        "samples-predicted": 700,
        "num-examples": 300,
        "received-accuracy": 0.5,
        "trained-accuracy": 0.5,
        "personal-accuracy": 0.5,
    }
    work = work_of(row, replace(config, local_epochs=1))
    before = [weight.detach().clone() for weight in model.parameters()]
    Counted.seen.clear()
    Trainer(model, config).do(work, (x, y), (x[:7], y[:7]))
    assert Counted.seen == [(7, False)] * 2 + [(500, False), (200, False)] + [(100, True)] * 6
    assert (work.whole, work.head) == ((300, 300) if name == "fedrep" else (600, 0))
    assert not any(torch.equal(*each) for each in zip(before, model.parameters()))


@pytest.mark.parametrize("name", ["fedavg", "heurfedamp"])
def test_the_loop_trains_all_clients_in_processes_and_averages_their_models(name, capfd) -> None:
    """In a process of its own, because a process with other threads cannot be forked."""
    program = f"""if True:
        from benchmarks.simulation import settings
        from benchmarks.tuned_loop import Work, loop
        config = settings("{name}", "digits", 1)
        rounds = [[(client, Work(40, 0, 0, 1)) for client in range(3)]] * 2
        print(len(loop(config, rounds, [Work(0, 0, 0, 0)] * 2, 2)))
    """
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=PATIENCE).returncode == 0
    assert capfd.readouterr().out.strip() == "2"


def test_the_weights_of_the_loop_are_loaded_as_they_were() -> None:
    trainer = Trainer(counted(), Config())
    weights = trainer.weights()
    trainer.start_from(weights + 1)
    assert torch.equal(trainer.weights(), weights + 1)


def test_the_proximal_term_of_the_loop_pulls_towards_the_start() -> None:
    model = torch.nn.Linear(2, 1)
    weights, towards = list(model.parameters()), [torch.zeros(1, 2), torch.zeros(1)]
    for weight in weights:
        weight.data.fill_(3.0)
        weight.grad = torch.ones_like(weight)
    Trainer(counted(), Config(strategy="fedamp")).pull(weights, towards)
    assert all(torch.allclose(weight.grad, torch.tensor(1 + 3 * MU), rtol=1e-6) for weight in weights)


def test_a_heurfedamp_round_is_two_epochs_and_two_evaluations() -> None:
    """The settings of the benchmark: 300 samples a client, batches of 100."""
    config = simulation.settings("heurfedamp", "cnn", 10)
    row = {
        "samples-trained": 600,
        "samples-predicted": 0,
        "num-examples": 300,
        "received-accuracy": 0.5,
        "trained-accuracy": 0.5,
        "personal-accuracy": 0.5,
    }
    assert work_of(row, config) == Work(whole=2 * 300, head=0, predicted=0, tests=2)
    assert work_of_server(config, 20, 500) == Work(0, 0, 0, 0)


def test_the_server_of_feddf_predicts_with_all_models_and_distils() -> None:
    config = simulation.settings("feddf", "cnn", 3)
    assert work_of_server(config, 20, 500) == Work(whole=200 * 100, head=0, predicted=20 * 500, tests=0)


def test_the_table_has_costs_relative_to_fedavg() -> None:
    def run(seconds, trained, predicted, down, up):
        line = {
            "seconds": seconds,
            "samples-trained": trained,
            "samples-predicted": predicted,
            "bytes-down": down,
            "bytes-up": up,
        }
        times = [seconds, 2 * seconds, seconds / 2]
        return simulation.Compared(simulation.Simulated([line], []), times, [4.0, 4.0, 1.0], [2 * 10**8], [10**8])

    found = {"fedavg": run(2.0, 12000, 0, 100e6, 100e6), "fedem": run(5.0, 36000, 3000, 300e6, 250e6)}
    lines = simulation.table(found).splitlines()
    assert lines[2] == ("| fedavg | 2.00 | 4.00 | 1.00 | 200 | 100 | 1.00 | 1.00 | 0.00 | 1.00 | 1.00 |")
    assert lines[3] == ("| fedem | 5.00 | 4.00 | 2.50 | 200 | 100 | 2.50 | 3.00 | 0.25 | 3.00 | 2.50 |")
    alone = simulation.table({"fedem": found["fedem"]}).splitlines()
    assert alone[2] == "| fedem | 5.00 | 4.00 | 2.50 | 200 | 100 | 36,000 | 3,000 | 300,000,000 | 250,000,000 |"


def test_memory_of_a_process_includes_what_it_starts_and_not_what_it_had(tmp_path) -> None:
    child = "import time; held = bytearray(50_000_000); time.sleep(3)"
    program = f"import subprocess, sys, time; time.sleep(1); subprocess.run([sys.executable, '-c', {child!r}])"
    with subprocess.Popen([sys.executable, "-c", program]) as process:
        with simulation.memory_of(psutil.Process(process.pid)) as peak:
            process.wait()
    assert 50e6 < peak.largest < 80e6


# --- Kindred without one of its steps -----------------------------------------------------------------


@pytest.fixture
def replaced(monkeypatch):
    """Replace the names of a variant for the rest of a test."""

    def replace_names(variant: str) -> None:
        monkeypatch.undo()
        for name, other in ablation.VARIANTS[variant].items():
            monkeypatch.setattr(ablation.module_of(name), name, other)

    return replace_names


def test_each_variant_replaces_names_of_the_method_by_others() -> None:
    for changes in ablation.VARIANTS.values():
        assert changes and all(getattr(ablation.module_of(name), name) is not other for name, other in changes.items())


def test_variants_of_shares_and_of_the_prior_give_values_by_hand(replaced) -> None:
    evidence = np.log([[1.0, 1, 3], [1, 1, 1]])  # the first client prefers the mean of all
    prior = np.full(3, 1 / 3)
    assert method.shares(prior, evidence)[0] == pytest.approx([1 / 5, 1 / 5, 3 / 5])
    for k, variant in enumerate(("its own model alone", "the neighbours' mean alone", "the mean of all alone")):
        replaced(variant)
        assert method.shares(prior, evidence).tolist() == [np.eye(3)[k].tolist()] * 2
        assert method.shares(prior, evidence[0]).tolist() == np.eye(3)[k].tolist()
    replaced("a uniform prior")
    assert method.prevalence(evidence) == pytest.approx(prior)


def test_variants_of_losses_and_weights_give_values_by_hand(replaced) -> None:
    probabilities, labels = np.array([[0.9, 0.1], [0.9, 0.1]]), np.array([0, 1])  # too certain: right in one of two
    assert held_out.calibrated_loss(probabilities, labels, np.ones(2)) < -np.log(0.9 * 0.1)
    replaced("no temperatures")
    assert held_out.calibrated_loss(probabilities, labels, np.ones(2)) == pytest.approx(-np.log(0.9 * 0.1))

    counts = np.array([30, 1]), np.array([0, 9])
    assert (held_out.rarity(*counts) != 1).all()
    replaced("classes not corrected by rarity")
    assert held_out.rarity(*counts).tolist() == [1, 1]

    samples = np.array([1.0, 1.0, 100.0])
    assert method.bounded(samples).tolist() == [1, 1, 3]
    replaced("no largest weight")
    assert method.bounded(samples).tolist() == [1, 1, 100]

    own, cosines = np.eye(3, dtype=bool)[:1], np.array([[1.0, 0.1, 0.0]])
    for variant, odds in (("sharpness 5, not 10", np.exp(0.5)), ("sharpness 20, not 10", np.exp(2))):
        replaced(variant)
        weights = method.neighbour_weights(cosines, np.ones(3), own)[0]
        assert weights == pytest.approx([0, odds / (1 + odds), 1 / (1 + odds)])

    models = np.array([[3.0, 4.0], [4.0, 3.0], [-3.0, -4.0]])
    replaced("cosines of whole models")
    assert method.centred_cosines([models[:, :1], models[:, 1:]], [0, 2], 3) == pytest.approx(
        np.array([[1, 0.96, -1], [-1, -0.96, 1]])
    )


def test_a_run_has_the_replaced_names_and_the_method_is_restored_after_it() -> None:
    config = Config(strategy="kindred", num_clients=4, samples_per_client=20, num_rounds=3)
    config = replace(config, local_epochs=1, partition="rotated")
    unchanged = ablation.measure(config, {})
    variants = {
        name: ablation.measure(config, ablation.VARIANTS[name])
        for name in ("the mean of all alone", "its own model alone", "a uniform prior")
    }
    losses = {name: summary["metrics"]["last"]["loss"] for name, summary in variants.items()}
    assert len({unchanged["metrics"]["last"]["loss"], *losses.values()}) == 4
    assert ablation.measure(config, {})["metrics"] == unchanged["metrics"]


def test_judging_in_every_round_and_memory_change_the_evidence_as_computed_by_hand(monkeypatch) -> None:
    reported: list[float] = []
    monkeypatch.setattr(method, "judged", lambda visit, *given: np.array([visit.config["server-round"], 0.0, 0.0]))
    take = method.Kindred.take

    def recording(self, client, reply) -> None:
        reported.append(-reply.config["evidence"][0])
        take(self, client, reply)

    monkeypatch.setattr(method.Kindred, "take", recording)
    config = Config(strategy="kindred", num_clients=2, samples_per_client=20, num_rounds=8, local_epochs=1)

    def evidence(*variants: str) -> list[float]:
        """Return the evidence against a client's own model that it reports in each of the first rounds."""
        reported.clear()
        changes = {name: other for variant in variants for name, other in ablation.VARIANTS[variant].items()}
        ablation.measure(replace(config, partition="iid"), changes)
        return reported[:8:2]

    often = "judged in every round"
    assert evidence() == [0, 2, 2, 2]  # two steps a round: next in round 7
    two = (0.8 * 2 + 3) / 1.8
    assert evidence(often) == pytest.approx([0, 2, two, (0.8 * 1.8 * two + 4) / (0.8 * 1.8 + 1)])
    assert evidence(often, "all rounds count the same: memory 1") == pytest.approx([0, 2, 2.5, 3])
    assert evidence(often, "evidence of the last round alone: memory 0") == [0, 2, 3, 4]


def test_the_table_has_a_row_per_variant_and_a_column_per_partition(monkeypatch) -> None:
    def measured(config, changes) -> dict[str, object]:
        accuracy = 0.5 + 0.1 * config.seed + 0.01 * len(changes)
        return {"accuracy": accuracy, "accuracy-selected": 0.25 if config.partition == "rotated" else None}

    monkeypatch.setattr(ablation, "measure", measured)
    lines = ablation.table(Config(num_rounds=3), ["iid", "rotated"], [0, 2]).splitlines()
    assert lines[0] == "| Kindred | iid | rotated |"
    assert lines[2] == "| unchanged | 60.0 | 25.0 |"
    assert lines[3:] == [f"| {name} | 61.0 | 25.0 |" for name in ablation.VARIANTS]


def test_settings_are_those_of_a_run_and_invalid_ones_are_named(monkeypatch, capsys) -> None:
    ran = []

    def measured(config, changes) -> dict[str, object]:
        ran.append(config)
        return {"accuracy": 0.5}

    def run(*words: str) -> None:
        monkeypatch.setattr("sys.argv", ["ablation", *words])
        ablation.main()

    monkeypatch.setattr(ablation, "measure", measured)
    run("--partitions", "iid", "--seeds", "3,5", "--set", "num-rounds=4", "--set", "samples-per-client=60")
    assert {(config.strategy, config.partition, config.seed) for config in ran} == {
        ("kindred", "iid", 3),
        ("kindred", "iid", 5),
    }
    assert {(config.num_rounds, config.samples_per_client, config.dirichlet_alpha) for config in ran} == {(4, 60, 0.1)}
    assert "| unchanged | 50.0 |" in capsys.readouterr().out

    for words, named in [
        (("--set", "num-rounds=0"), "num-rounds is 0, allowed: 1 to 1,000,000"),
        (("--set", "seed=3"), "--set has seed, allowed: any setting but strategy, partition, seed,"),
        (("--set", "num-rounds"), "--set is 'num-rounds', allowed: key=value"),
        (("--partitions", "iid,odd"), "partition is 'odd', allowed"),
        (("--seeds", "one"), "--seeds: invalid numbers value: 'one'"),
    ]:
        with pytest.raises(SystemExit) as ended:
            run(*words)
        assert ended.value.code == 2 and named in capsys.readouterr().err


def test_natural_clients_have_a_column_with_the_value_of_their_selected_models(monkeypatch, tmp_path, capsys) -> None:
    rng = np.random.default_rng(0)
    rows = [f"{x:.3f},{'yes' if x > 0 else 'no'},{'ab'[i % 2]}" for i, x in enumerate(rng.normal(size=60))]
    (data := tmp_path / "data.csv").write_text("\n".join(["x,target,site", *rows]))
    settings = ("dataset=csv", f"data-dir={data}", "target=target", "client=site", "num-clients=2", "num-rounds=2")
    monkeypatch.setattr(ablation, "VARIANTS", {})
    words = [word for setting in settings for word in ("--set", setting)]
    monkeypatch.setattr("sys.argv", ["ablation", "--partitions", "by-client", *words])
    summaries, measured = [], ablation.measure

    def recording(config, changes) -> dict[str, object]:
        summaries.append(measured(config, changes))
        return summaries[-1]

    monkeypatch.setattr(ablation, "measure", recording)
    ablation.main()
    assert len(summaries) == 1 and summaries[0]["accuracy-selected"] is not None
    assert f"| unchanged | {100 * summaries[0]['accuracy-selected']:.1f} |" in capsys.readouterr().out


# --- Step sizes ---------------------------------------------------------------------------------------


def test_the_grids_name_settings_of_their_method_and_no_combination_twice() -> None:
    for name, grids in steps.GRIDS.items():
        own = {each.name: each for each in REGISTRY[name].settings if each is not AGGREGATION}
        for chosen in (rows := list(steps.rows(name))):
            assert chosen.keys() == own.keys()
            assert all(own[name].check(value) == value for name, value in chosen.items())
        assert len({tuple(chosen.items()) for chosen in rows}) == len(rows) >= sum(len(grid) for grid in grids[:1])
        assert {name: each.default for name, each in own.items()} in rows


def test_the_defaults_have_the_highest_mean_of_the_tables() -> None:
    text = (ROOT / "docs" / "reproducing.md").read_text()
    for name in steps.GRIDS:
        own = {each.key: each for each in REGISTRY[name].settings}
        rows = [line.strip("| ").split(" | ") for line in text.split(f"| {name}: ")[1].split("\n\n")[0].splitlines()]
        keys, measured = rows[0][: -len(steps.COLUMNS) - 1], [row for row in rows[2:] if row[-1] != "-"]
        best = max(measured, key=lambda row: float(row[-1]))
        assert best[: len(keys)] == [str(own[key].default).lower() for key in keys]


def test_a_table_of_steps_has_the_accuracy_of_each_run_and_a_dash_for_one_that_failed(monkeypatch) -> None:
    monkeypatch.setattr(steps, "GRIDS", {"apfl": [{"sgd_learning_rate": [0.1, 0.2], "adapt_mixing": [False]}]})
    monkeypatch.setattr(steps, "COLUMNS", (("digits", "iid"), ("digits", "rotated")))
    assert steps.table("apfl", [[0.5, 0.8], [None, 0.75]]).splitlines() == [
        "| apfl: sgd-learning-rate | adapt-mixing | digits iid | digits rotated | mean |",
        "| --- | ---: | ---: | ---: | ---: |",
        "| 0.1 | false | 50.0 | 80.0 | 65.0 |",
        "| 0.2 | false | - | 75.0 | - |",
    ]


def test_the_tables_of_steps_are_those_of_runs_which_are_not_repeated(monkeypatch, tmp_path, capsys) -> None:
    small = {"clients": 4, "rounds": 2, "local_epochs": 1, "samples_per_client": 20}
    monkeypatch.setattr(steps, "SAME", small)
    monkeypatch.setattr(steps, "COLUMNS", (("digits", "rotated"),))
    monkeypatch.setattr(
        steps,
        "GRIDS",
        {
            "scaffold": [{"sgd_learning_rate": [0.1]}],
            "per-fedavg": [{"sgd_learning_rate": [0.1, 0.3], "adapt_epochs": [1]}],
        },
    )
    printed = steps.tables("", str(tmp_path))
    cells = [line.split(" | ")[-2] for table in printed.split("\n\n") for line in table.splitlines()[2:]]
    asked = [
        ("scaffold", {"sgd_learning_rate": 0.1}),
        ("per-fedavg", {"sgd_learning_rate": 0.1, "adapt_epochs": 1}),
        ("per-fedavg", {"sgd_learning_rate": 0.3, "adapt_epochs": 1}),
    ]
    for cell, (name, own) in zip(cells, asked, strict=True):
        run = kindred.run(
            name, "digits", partition="rotated", seed=100, output=tmp_path / "alone", progress=False, **small, **own
        )
        assert cell == f"{100 * run.summary['accuracy']:.1f}"
    capsys.readouterr()
    assert steps.tables("", str(tmp_path)) == printed
    assert capsys.readouterr().out.count(": reused, ") == 3
