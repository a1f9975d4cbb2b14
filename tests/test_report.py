"""The page of a run and of a comparison: its content, safety and size, and how a browser shows it."""

from __future__ import annotations

import base64
import http.client
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
from contextlib import contextmanager
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from kindred.server_app import runs
from kindred.server_app.cli import report as _report, run as cli  # noqa: F401  the first adds commands
from kindred.server_app.config import Config, ConfigError
from kindred.server_app.report import clients as single, content as report, watch as see
from kindred.server_app.report.comparison_content import comparison_content, mean_over_seeds
from kindred.server_app.report.content import run_content
from kindred.server_app.report.render import STYLE
from kindred.server_app.report.write import write_report
from kindred.server_app.results import RunFolder
from tests.background_commands import HEEDING, PATIENCE
from tests.test_results import TWO_ROUNDS, row, run_of, settings

ROOT = Path(__file__).resolve().parent.parent
COMMAND = [str(Path(sysconfig.get_path("scripts")) / "kindred")]
SMALL = [
    "--engine=inline",
    "--clients=4",
    "--rounds=2",
    "--set=num-groups=2",
    "--set=samples-per-client=20",
    "--set=local-epochs=1",
]
NASTY = '</script><script>hacked = 1</script><!--<img src=x onerror="hacked = 1">&amp;\u2028'


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A run of Clustered FL, and a comparison, both real."""
    folder = tmp_path_factory.mktemp("results")
    done = CliRunner().invoke(
        cli.app,
        ["run", "--strategy=clustered-fl", "--set=eps1=10", "--set=eps2=0.01", f"--output-dir={folder}", *SMALL],
    )
    assert done.exit_code == 0, done.output
    done = CliRunner().invoke(
        cli.app, ["compare", "--strategies=local,heurfedamp", "--seeds=0,1", f"--output-dir={folder}", *SMALL]
    )
    assert done.exit_code == 0, done.output
    return folder


@pytest.fixture(scope="module")
def run(results):
    (folder,) = results.glob("*-clustered-fl-*")
    return folder


@pytest.fixture(scope="module")
def comparison(results):
    (folder,) = results.glob("compare-*")
    return folder


@pytest.fixture(scope="module")
def varied(tmp_path_factory):
    """A comparison of two methods with two values of a setting."""
    folder = tmp_path_factory.mktemp("varied")
    command = ["compare", "--strategies=local,fedavg", "--vary=fraction-train=0.5,1", f"--output-dir={folder}", *SMALL]
    done = CliRunner().invoke(cli.app, command)
    assert done.exit_code == 0, done.output
    (place,) = folder.glob("compare-*")
    return place


@pytest.fixture(scope="module")
def shares(tmp_path_factory):
    """A run whose clients report shares of two components, by hand."""
    rounds = [
        [row(number, client, personal_accuracy=0.5, **{"share-0": 0.25 * number, "share-1": 1 - 0.25 * number})
         for client in range(3)]
        for number in (1, 2, 3)
    ]  # fmt: skip
    folder = a_run(tmp_path_factory.mktemp("shares"), rounds, [0, 0, 1], clients=range(3), **{"num-rounds": 3})
    write_report(folder.path)
    return folder.path


def a_run(output_dir, rounds, groups=None, weights=None, clients=(0, 1), **changed):
    """Folder of a run in progress that has completed these rounds."""
    folder = RunFolder(settings(output_dir, **changed), groups)
    for number in range(1, len(rounds) + 1):
        folder.record_round(run_of(rounds[:number], clients=clients, weights=weights))
    return folder


class Reader(HTMLParser):
    """The elements of a page, and the texts of its scripts."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.scripts, self.attributes = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += [(tag, *pair) for pair in attributes]

    def handle_data(self, data):
        if self.tags[-1:] == ["script"]:
            self.scripts.append(data)


def data_of(text):
    return json.loads(Reader(text).scripts[0])


# --- Content of the page --------------------------------------------------------------------------------


def test_the_page_has_the_figures_and_curves_of_a_run(tmp_path):
    content = run_content(a_run(tmp_path, TWO_ROUNDS).path)
    # .5 and .7, then .5 (carried forward) and .9: deciles a tenth of the way from either end; 130 bytes a row.
    assert content["curve"] == {
        "rounds": [1, 2],
        "mean": [0.6, 0.7],
        "p10": [0.52, 0.54],
        "p90": [0.68, 0.86],
        "bytes": [260.0, 520.0],
        "samples": None,
    }
    assert content["figures"] == {
        "mean": pytest.approx(0.7),
        "best": pytest.approx(0.7),
        "worst-decile": pytest.approx(0.54),
        "weighted": pytest.approx(0.8),
        "validation": None,
        "selected": None,
        "bytes-down": 400,
        "bytes-up": 120,
        "seconds": 4.0,
        "samples-trained": None,
    }
    assert content["clients"] == {
        "names": ["0", "1"],
        "groups": None,
        "last": [0.5, 0.9],
        "before": [None, None],
        "after": [None, None],
    }
    assert content["unused"] == {"number": 1, "reasons": 1, "listed": [["0", "timed out", 1, 2, 2]]}
    assert (content["finished"], content["asked"], content["clusters"], content["partition"]) == (False, 2, None, None)


def test_the_page_names_clients_that_stand_out(tmp_path):
    path = a_run(tmp_path, TWO_ROUNDS).path
    assert run_content(path)["remarks"] == []
    summary = {"remarks": [{"client": 1, "round": 2, "remark": "has 97% of the samples"}]}
    assert run_content(path, summary)["remarks"] == [["1", "has 97% of the samples", 2]]


def test_the_page_compares_before_and_after_local_training(tmp_path):
    rounds = [
        [
            row(1, 0, received_accuracy=0.25, trained_accuracy=0.5, personal_accuracy=0.5, samples_trained=40),
            row(1, 1, received_accuracy=0.35, trained_accuracy=0.8, personal_accuracy=0.8, samples_trained=60),
        ],
        [
            row(2, 0, received_accuracy=0.75, trained_accuracy=0.5, personal_accuracy=0.5, samples_trained=40),
            row(2, 1, received_accuracy=0.35, personal_accuracy=0.8),
        ],
    ]
    content = run_content(a_run(tmp_path, rounds).path)
    assert content["stages"]["curves"] == [
        {"name": "model as received", "mean": [0.3, 0.55]},
        {"name": "after local training", "mean": [0.65, 0.65]},
    ]
    assert content["stages"]["personal"] == content["stages"]["after-name"] == "after local training"
    assert content["stages"]["before-name"] == "model as received"
    assert content["clients"] == {
        "names": ["0", "1"],
        "groups": None,
        "last": [0.5, 0.8],
        "before": [0.75, 0.35],
        "after": [0.5, 0.8],
    }
    assert content["curve"]["samples"] == [100.0, 140.0]


def test_a_mixture_is_compared_with_one_model_alone(browser, tmp_path):
    values = {"received_accuracy": 0.25, "mixture_accuracy": 0.5, "personal_accuracy": 0.5}
    folder = a_run(tmp_path, [[row(number, client, **values) for client in range(2)] for number in (1, 2)]).path
    stages = run_content(folder)["stages"]
    assert [each["name"] for each in stages["curves"]] == ["one model alone, as received", "mixture of models"]
    assert (stages["before-name"], stages["after-name"]) == ("one model alone, as received", "mixture of models")
    write_report(folder)
    with opened(browser, (folder / "report.html").as_uri()) as tab:
        shown = tab.text_content("section:has(h2:text-is('One model and the mixture'))")
        assert "the mixture of models with which the client predicts" in shown
        assert (
            "one model alone, as received: accuracy (%)" in shown and "the line gained by the mixture: 2 of 2" in shown
        )
        assert "from it with its own data" not in shown
        label = "Each client's accuracy of one model and of the mixture: 2 of 2 gained, 0 lost."
        assert tab.locator(f'svg[aria-label="{label}"]').count() == 1


def test_a_page_says_that_all_settings_have_their_defaults(browser, tmp_path):
    folder = a_run(tmp_path, TWO_ROUNDS).path
    config = json.loads((folder / "config.json").read_text())
    defaults = Config().run_config()
    for given, expected in ((defaults | {"num-rounds": 2}, False), (defaults, True)):
        (folder / "config.json").write_text(json.dumps(config | {"settings": given}))
        write_report(folder)
        with opened(browser, (folder / "report.html").as_uri()) as tab:
            text = "section:has(h2:text-is('Configuration')) p:text-is('All settings have their defaults.')"
            assert tab.locator(text).count() == expected


def test_the_page_has_a_table_and_a_curve_of_each_client(tmp_path):
    rounds = [
        [row(1, 0, personal_accuracy=0.5), row(1, 1, personal_accuracy=0.25, num_examples=20, num_test_examples=8)],
        [row(2, 1, personal_accuracy=0.75)],
    ]
    folder = a_run(tmp_path, rounds)
    about = [
        {"client": 0, "classes": 2},
        {"client": 1, "range": [0.5, 40.0], "selected": {"accuracy": 0.625, "loss": 1.0}},
    ]
    config = json.loads((folder.path / "config.json").read_text())
    (folder.path / "config.json").write_text(json.dumps(config | {"names": ["lyon", "oslo"]}))
    content = run_content(folder.path, {"clients": about})
    first, second = content["table"]
    assert (first["client"], first["name"], first["classes"], first["range"]) == ("0", "lyon", 2, None)
    assert (first["last"], first["selected"]) == (0.5, None)
    assert second == {
        "client": "1",
        "name": "oslo",
        "train": 20,
        "test": 8,
        "classes": None,
        "range": [0.5, 40.0],
        "last": 0.75,
        "selected": 0.625,
    }
    assert content["curves"] == [[0.5, None], [0.25, 0.75]]


def test_curves_of_too_many_clients_are_omitted(tmp_path, monkeypatch):
    monkeypatch.setattr(single, "MOST_VALUES", 3)
    assert run_content(a_run(tmp_path, TWO_ROUNDS).path)["curves"] is None


def test_sites_that_only_validate_have_their_metrics_up_to_the_last_complete_round(tmp_path):
    folder = a_run(tmp_path, TWO_ROUNDS).path
    (folder / "validators.csv").write_text(
        "round,client,status,bytes-down,bytes-up,num-test-examples,accuracy,loss\n"
        "1,eve,ok,100,20,30,0.25,1.5\n2,eve,error 1: lost,100,0,,,\n2,ada,no global model,0,0,12,,\n"
        "3,eve,ok,100,20,30,0.75,0.5\n"
    )
    assert run_content(folder)["validators"] == [
        {"client": "ada", "samples": 12, "status": "no global model", "last": {}, "metrics": []},
        {
            "client": "eve",
            "samples": 30,
            "status": "error 1: lost",
            "last": {"accuracy": 0.25, "loss": 1.5},
            "metrics": [("accuracy", 0.25), ("loss", 1.5)],
        },
    ]


def weights_of(found, at=-1):
    """Matrix that the page shows: weights of other clients, and own shares on the diagonal."""

    def numbers(text):
        return np.frombuffer(base64.b64decode(text), np.uint8) / 255

    own = numbers(found["own"][at])
    return numbers(found["weights"][at]).reshape(len(own), -1) * found["strongest"][at] + np.diag(own)


def test_matrices_are_rounded_by_at_most_half_a_step_and_ordered_by_true_groups(tmp_path):
    weights = np.array([[0.5, 0.0, 0.4, 0.1], [0.1, 0.6, 0.0, 0.3], [0.2, 0.0, 0.8, 0.0], [0.0, 0.25, 0.05, 0.7]])
    rounds = [[row(1, client, personal_accuracy=0.5) for client in range(4)]]
    content = run_content(a_run(tmp_path, rounds, [0, 1, 0, 1], weights, range(4)).path)
    found = content["collaboration"]
    assert (found["names"], found["groups"]) == (["0", "2", "1", "3"], [0, 0, 1, 1])
    assert (found["rounds"], found["of"], found["strongest"], found["damaged"]) == ([1], 1, [0.4], [])
    order = [0, 2, 1, 3]
    expected = weights[np.ix_(order, order)]
    assert np.abs(weights_of(found) - expected).max() <= 0.5 / 255
    assert content["clients"]["groups"] == [0, 1, 0, 1]


def test_without_groups_clients_that_learn_from_each_other_are_adjacent(tmp_path):
    weights = np.eye(6) * 0.5
    for first, second in ((0, 3), (1, 5), (2, 4)):
        weights[first, second] = weights[second, first] = 0.5
    rounds = [[row(1, f"site {client}", personal_accuracy=0.5) for client in range(6)]]
    names = [f"site {client}" for client in range(6)]
    found = run_content(a_run(tmp_path, rounds, None, weights, names).path)["collaboration"]
    pairs = {frozenset(name[-1] for name in found["names"][at : at + 2]) for at in (0, 2, 4)}
    assert pairs == {frozenset("03"), frozenset("15"), frozenset("24")}
    assert found["groups"] is None


def test_a_client_that_joined_later_has_no_weight_before(tmp_path):
    folder = a_run(tmp_path, TWO_ROUNDS[:1], weights=[[0.5, 0.5], [0.25, 0.75]])
    folder.record_round(run_of(TWO_ROUNDS, clients=(0, 1, 2), weights=np.full((3, 3), 1 / 3)))
    found = run_content(folder.path)["collaboration"]
    places = [found["names"].index(name) for name in "012"]
    first = weights_of(found, 0)[np.ix_(places, places)]
    np.testing.assert_allclose(first, [[0.5, 0.5, 0], [0.25, 0.75, 0], [0, 0, 0]], atol=0.5 / 255)
    np.testing.assert_allclose(weights_of(found, 1), np.full((3, 3), 1 / 3), atol=0.5 / 255)


def test_a_damaged_file_is_named_and_the_others_are_shown(tmp_path):
    folder = a_run(tmp_path, TWO_ROUNDS).path
    path = folder / "collaboration" / "round-0001.npz"
    path.write_bytes(path.read_bytes()[:100])
    found = run_content(folder)["collaboration"]
    assert (found["rounds"], found["damaged"]) == ([2], ["round-0001.npz"])


def test_a_matrix_of_too_many_clients_is_omitted(tmp_path):
    folder = a_run(tmp_path, TWO_ROUNDS).path
    np.savez_compressed(
        folder / "collaboration" / "round-0003.npz", clients=np.arange(2100), weights=np.eye(2100, dtype=np.float32)
    )
    assert run_content(folder)["collaboration"] == {"too-many": 2100, "rounds": []}


def test_incomplete_rows_are_omitted(tmp_path):
    folder = a_run(tmp_path, TWO_ROUNDS).path
    with open(folder / "history.csv", "a", encoding="utf-8") as file:
        file.write("3,0,ok,0.5,100,30,0.9,10,\n3,1,o")
    with open(folder / "rounds.csv", "a", encoding="utf-8") as file:
        file.write("3,2,2,2.0,20")
    content = run_content(folder)
    assert content["curve"]["rounds"] == [1, 2] and content["clients"]["last"] == [0.5, 0.9]
    for name in ("history.csv", "rounds.csv"):
        (folder / name).unlink()
    assert run_content(folder)["curve"]["rounds"] == []


@pytest.mark.parametrize(
    "options",
    [
        "--strategy fedamp --clients 7 --rounds 3 --seed 5 --set self-weight=uniform --set with-replacement=true "
        "--set sigma=12.5 --set learning-rate=1e-4 --set alpha=3",
        "--dataset csv --data-dir data/patients --set 'target=num>0' --set client=dataset --set schema=~/codes.json "
        "--partition by-client --clients 4 --metric auroc --set validation-share=0.3",
        "--strategy perfed-ckt --set 'model=digits-cnn, cnn2' --set public-data=pixels --set held-out-clients=2",
        "--strategy local --set held-out-clients=3 --set shadow-local=true --set stop-after=2 --set checkpoint-every=0",
        "--strategy federico --set num-neighbours=7 --set beta=0.5 --set validation-share=0 --engine local --workers 2",
        '--dataset office-home --data-dir "it\'s here" --set max-update-norm=auto',
    ],
)
def test_the_command_of_the_page_repeats_the_run(options, monkeypatch):
    resolved = []

    def stop(configs, *_):
        resolved.extend(configs)
        raise ConfigError("no further")

    monkeypatch.setattr(runs, "check", stop)
    runner = CliRunner()
    first = runner.invoke(cli.app, ["run", *shlex.split(options), "--output-dir=elsewhere"])
    assert first.exit_code == 2 and "no further" in first.output
    words = shlex.split(report.command(resolved[0].run_config()))
    assert words[:2] == ["kindred", "run"]
    assert "no further" in runner.invoke(cli.app, words[1:]).output
    assert replace(resolved[1], output_dir=resolved[0].output_dir) == resolved[0]


def test_the_page_of_sites_has_flowers_command():
    words = shlex.split(report.command(Config(dataset="sites", image_shape="1x28x28", num_classes=10).run_config()))
    assert words[:6] == ["flwr", "run", ".", "kindred", "--stream", "--run-config"]
    from flwr.common.config import parse_config_args

    assert parse_config_args([words[6]]) == {
        "strategy": "heurfedamp",
        "dataset": "sites",
        "image-shape": "1x28x28",
        "num-classes": 10,
        "partition": "rotated",
        "seed": 0,
    }


def test_a_real_run_has_its_report_and_the_command_writes_the_same_one(run):
    text = (run / "report.html").read_text()
    content = data_of(text)
    summary = json.loads((run / "summary.json").read_text())
    assert content["title"] == "Clustered FL on digits, rotated, seed 0"
    assert f"<title>{content['title']}</title>" in text
    assert content["finished"] and content["figures"]["mean"] == summary["accuracy"]
    assert content["clients"]["groups"] == [0, 0, 1, 1]
    clusters = json.loads((run / "clusters.json").read_text())
    assert content["clusters"] == [{**each, "clients": list(map(str, each["clients"]))} for each in clusters]
    png = (run / "partition.png").read_bytes()
    assert content["partition"] == "data:image/png;base64," + base64.b64encode(png).decode()
    differing = {key: value for key, value, standard in content["settings"] if not standard}
    assert differing == {
        "strategy": "clustered-fl",
        "num-clients": 4,
        "num-rounds": 2,
        "num-groups": 2,
        "samples-per-client": 20,
        "local-epochs": 1,
        "eps1": 10.0,
        "eps2": 0.01,
    }
    (run / "report.html").unlink()
    done = CliRunner().invoke(cli.app, ["report", str(run)])
    assert (done.exit_code, done.output) == (0, f"{run / 'report.html'}\n")
    assert (run / "report.html").read_text() == text


def test_the_page_of_a_comparison(comparison):
    content = data_of((comparison / "report.html").read_text())
    written = json.loads((comparison / "comparison.json").read_text())
    assert [method["name"] for method in content["methods"]] == ["local", "heurfedamp"]
    assert [[line[0] for line in table] for table in content["tables"]] == [["strategy", "local", "heurfedamp"]] * 2
    for method in content["methods"]:
        found = written["strategies"][method["name"]]
        finals = [each["summary"]["accuracy"] for each in found["runs"]]
        assert method["curve"]["rounds"] == [1, 2]
        assert method["curve"]["mean"][-1] == pytest.approx(np.mean(finals), abs=1e-4)
        assert method["curve"]["high"][-1] == pytest.approx(np.mean(finals) + np.std(finals, ddof=1), abs=2e-4)
        assert method["curve"]["bytes"][-1] == found["mean"]["bytes"]
        assert len(method["last"]) == 2 * 4
        for each in method["runs"]:
            assert (comparison / each["report"]).resolve().is_file()
    assert content["command"] == written["command"]


def test_the_page_of_a_varied_comparison_has_the_values_and_their_accuracies(varied):
    content = data_of((varied / "report.html").read_text())
    written = json.loads((varied / "comparison.json").read_text())
    measure = "mean test accuracy over clients, after the last round"
    assert content["varied"] == {"setting": "fraction-train", "values": ["0.5", "1"], "measure": measure}
    about = [(method["of"], method["value"]) for method in content["methods"]]
    assert about == [("local", "0.5"), ("local", "1"), ("fedavg", "0.5"), ("fedavg", "1")]
    for method in content["methods"]:
        mean = written["strategies"][method["name"]]["mean"]["accuracy"]
        assert method["at"] == {"mean": mean, "std": None}


def test_a_comparison_without_a_varied_setting_has_none_even_of_an_earlier_version(comparison, tmp_path):
    assert data_of((comparison / "report.html").read_text())["varied"] is None
    written = json.loads((comparison / "comparison.json").read_text())
    del written["varied"]
    for each in written["strategies"].values():
        del each["of"], each["value"]
    (tmp_path / "comparison.json").write_text(json.dumps(written))
    content = comparison_content(tmp_path)
    assert content["varied"] is None and [each["of"] for each in content["methods"]] == ["local", "heurfedamp"]


def test_the_deviation_over_seeds_is_shown_for_rounds_that_all_have():
    first = {"rounds": [1, 2, 3], "mean": [0.25, 0.5, 0.75], "bytes": [1, 2, 3], "samples": [10, 20, 30]}
    second = {"rounds": [1, 2], "mean": [0.75, 0.5], "bytes": [3, 4], "samples": None}
    half = 0.5 / 2**0.5
    assert mean_over_seeds([first, second]) == {
        "rounds": [1, 2],
        "mean": [0.5, 0.5],
        "low": [round(0.5 - half, 6), 0.5],
        "high": [round(0.5 + half, 6), 0.5],
        "bytes": [2.0, 3.0],
        "samples": None,
    }


def test_a_removed_run_of_a_comparison_has_no_link(comparison, tmp_path):
    shutil.copytree(comparison, tmp_path / "elsewhere" / comparison.name)
    content = comparison_content(tmp_path / "elsewhere" / comparison.name)
    assert {each["report"] for method in content["methods"] for each in method["runs"]} == {None}
    assert all(method["curve"] is None and len(method["last"]) == 8 for method in content["methods"])


def one_line(arguments):
    done = CliRunner().invoke(cli.app, arguments)
    assert done.exit_code == 2 and done.stdout == "" and done.stderr.count("\n") == 1, done.output
    return done.stderr


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        (None, "", ["neither the config.json of a run nor the comparison.json"]),
        ("config.json", "{", ["config.json cannot be read"]),
        ("config.json", "{}", ["config.json", "no settings"]),
        ("comparison.json", "[", ["comparison.json cannot be read"]),
        ("comparison.json", '{"strategies": {}}', ["comparison.json", "kindred compare"]),
    ],
)
def test_a_folder_without_results_is_bad_input(tmp_path, name, text, says):
    if name:
        (tmp_path / name).write_text(text)
    line = one_line(["report", str(tmp_path)])
    assert all(word in line for word in says)
    assert not (tmp_path / "report.html").exists()


def test_a_table_without_rounds_is_bad_input(tmp_path):
    folder = a_run(tmp_path, TWO_ROUNDS).path
    (folder / "rounds.csv").write_text("a,b\n1,2\n")
    assert "rounds.csv cannot be read (a line has no round)" in one_line(["report", str(folder)])


def test_a_missing_folder_is_bad_input(tmp_path):
    for command in ("report", "watch"):
        assert "is not a folder" in one_line([command, str(tmp_path / "nowhere")])


# --- Safe and small -------------------------------------------------------------------------------------


DAMAGED = (
    "null",
    "[]",
    "[null]",
    "3",
    "{}",
    "[" * 100_000,
    '{"a":' * 100_000,
    '{"settings": null}',
    '{"settings": {"strategy": null}}',
    '{"settings": {"strategy": ["local"], "dataset": 3}}',
    '{"clients": 3, "rounds": null}',
    '[{"clients": null}]',
)
every_damage = pytest.mark.parametrize("content", DAMAGED, ids=lambda content: content[:40])


def said_in_one_line(*command: str) -> bool:
    """Run a command; return whether it ended with one line and code 2, and not without an error."""
    done = CliRunner().invoke(cli.app, list(command))
    assert done.exit_code in (0, 2) and (done.exception is None or isinstance(done.exception, SystemExit))
    assert done.exit_code == 0 or re.fullmatch(r"kindred: [^\n]+\n", done.stderr.replace("writing the report\n", ""))
    return done.exit_code == 2


@every_damage
def test_report_says_what_is_damaged_in_one_line(content, run, comparison, tmp_path) -> None:
    for folder, name in ((run, "config.json"), (comparison, "comparison.json")):
        copy = shutil.copytree(folder, tmp_path / folder.name)
        (copy / name).write_text(content)
        assert said_in_one_line("report", str(copy))
    for name in ("summary.json", "clusters.json"):  # which a run need not have
        copy = shutil.copytree(run, tmp_path / name)
        (copy / name).write_text(content)
        refused = said_in_one_line("report", str(copy))
        assert refused or content not in ("[null]", "3", *DAMAGED[5:7])


@every_damage
def test_resume_says_what_is_damaged_in_one_line(content, run, tmp_path) -> None:
    copy = shutil.copytree(run, tmp_path / "run")
    (copy / "summary.json").unlink()
    (copy / "config.json").write_text(content)
    assert said_in_one_line("run", "--engine=inline", f"--resume={copy}")


@pytest.fixture(scope="module")
def nasty(tmp_path_factory):
    """A run whose client names and reasons contain markup and script."""
    rounds = [
        [row(1, NASTY, personal_accuracy=0.5, received_accuracy=0.25), row(1, "b", f"refused: {NASTY}")],
        [row(2, NASTY, personal_accuracy=0.75, received_accuracy=0.5), row(2, "b", personal_accuracy=0.5)],
    ]
    folder = a_run(tmp_path_factory.mktemp("nasty"), rounds, clients=(NASTY, "b"), weights=[[0.5, 0.5], [0.25, 0.75]])
    return write_report(folder.path)


def test_names_and_reasons_of_clients_stay_data(nasty):
    text = nasty.read_text()
    reader = Reader(text)
    assert reader.tags == [
        "html",
        "head",
        *["meta"] * 5,
        "title",
        "style",
        "body",
        "noscript",
        "p",
        "main",
        "script",
        "script",
    ]
    content = json.loads(reader.scripts[0])
    assert NASTY in content["clients"]["names"]
    assert content["unused"]["listed"] == [["b", f"refused: {NASTY}", 1, 1, 1]]


def test_the_page_refers_to_nothing_outside_itself_and_to_its_script_by_hash(nasty, comparison):
    for path in (nasty, comparison / "report.html"):
        reader = Reader(path.read_text())
        assert not [each for each in reader.attributes if each[1] in ("src", "href", "srcset", "action")]
        assert "@import" not in STYLE and "url(" not in STYLE
        policy = next(value for tag, key, value in reader.attributes if key == "content" and "default-src" in value)
        assert "default-src 'none'" in policy and "connect-src 'none'" in policy and "unsafe" not in policy
        assert policy.count("'sha256-") == 2


def test_a_hundred_clients_and_rounds_stay_below_three_megabytes(tmp_path):
    rng = np.random.default_rng(0)
    rounds = [
        [
            row(
                number,
                client,
                personal_accuracy=float(rng.random()),
                received_accuracy=float(rng.random()),
                trained_accuracy=float(rng.random()),
            )
            for client in range(100)
        ]
        for number in range(1, 101)
    ]
    folder = RunFolder(settings(tmp_path, **{"num-clients": 100, "num-rounds": 100}), [i % 4 for i in range(100)])
    folder.record_round(run_of(rounds, clients=range(100), weights=rng.dirichlet(np.ones(100), 100)))
    source = folder.path / "collaboration" / "round-0100.npz"
    for number in range(1, 100):
        shutil.copyfile(source, source.with_name(f"round-{number:04d}.npz"))
    (folder.path / "partition.png").write_bytes(rng.bytes(300_000))
    path = write_report(folder.path)
    assert path.stat().st_size < 2e6
    found = data_of(path.read_text())["collaboration"]
    assert len(found["rounds"]) == 50 and (found["rounds"][0], found["rounds"][-1], found["of"]) == (1, 100, 100)
    assert set(np.diff(found["rounds"])) == {2, 3}


def test_for_a_thousand_clients_the_page_keeps_some_rounds_and_says_how_many(tmp_path):
    folder = a_run(tmp_path, TWO_ROUNDS).path
    weights = np.full((1000, 1000), 0.001, np.float32)
    for number in range(1, 11):
        np.savez_compressed(
            folder / "collaboration" / f"round-{number:04d}.npz", clients=np.arange(1000), weights=weights
        )
    found = run_content(folder)["collaboration"]
    assert (found["rounds"], found["of"]) == ([1, 4, 7, 10], 10)
    assert write_report(folder).stat().st_size < 6e6


def luminance(colour):
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return float(np.dot((0.2126, 0.7152, 0.0722), linear))


def test_text_and_lines_have_enough_contrast():
    themes = [dict(re.findall(r"--(\w+): (#\w{6})", block)) for block in re.findall(r":root \{(.*?)\}", STYLE, re.S)]
    assert len(themes) == 3  # light, dark, paper
    for theme in themes:

        def contrast(name, theme=theme):
            low, high = sorted((luminance(theme[name]), luminance(theme["paper"])))
            return (high + 0.05) / (low + 0.05)

        assert contrast("ink") > 7 and contrast("soft") > 4.5
        assert all(contrast(f"c{i}") >= 3 for i in range(7))


# --- kindred watch --------------------------------------------------------------------------------------


def asked(watcher, path="/", host=None, method="GET", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", watcher.server_port, timeout=10)
    connection.putrequest(method, path, skip_host=True)
    connection.putheader("Host", host or f"127.0.0.1:{watcher.server_port}")
    for name, value in headers.items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders()
    reply = connection.getresponse()
    return reply.status, dict(reply.getheaders()), reply.read()


def test_watch_serves_the_page_and_its_content_and_nothing_else(tmp_path):
    folder = a_run(tmp_path, TWO_ROUNDS[:1])
    with see.Watcher(folder.path, 0).serving() as watcher:
        assert (
            watcher.server_address[0] == "127.0.0.1" and watcher.address == f"http://127.0.0.1:{watcher.server_port}/"
        )
        status, headers, body = asked(watcher)
        assert status == 200 and data_of(body.decode())["curve"]["rounds"] == [1]
        assert headers["Cache-Control"] == "no-store" and "Access-Control-Allow-Origin" not in headers
        status, headers, body = asked(watcher, "/data.json", host=f"localhost:{watcher.server_port}")
        assert status == 200 and json.loads(body)["finished"] is False
        tag = headers["ETag"]
        assert asked(watcher, "/data.json", If_None_Match=tag)[::2] == (304, b"")
        folder.record_round(run_of(TWO_ROUNDS))
        status, headers, body = asked(watcher, "/data.json", If_None_Match=tag)
        assert status == 200 and json.loads(body)["curve"]["rounds"] == [1, 2] and headers["ETag"] != tag
        for path in (
            "/config.json",
            "/collaboration/",
            "/../config.json",
            "/%2e%2e/",
            "/data.json/",
            "http://127.0.0.1/",
            str(folder.path / "config.json"),
        ):
            assert asked(watcher, path)[0] == 404, path
        for host in ("evil.example", f"evil.example:{watcher.server_port}", "127.0.0.1:1", "127.0.0.1", ""):
            status, _, body = asked(watcher, "/data.json", host=host or "-")
            assert status == 403 and b"curve" not in body
        assert asked(watcher, method="POST")[0] == 501


def test_watch_reports_what_it_cannot_read_and_continues(tmp_path):
    folder = a_run(tmp_path, TWO_ROUNDS).path
    with see.Watcher(folder, 0).serving() as watcher:
        before = (folder / "rounds.csv").read_bytes()
        (folder / "rounds.csv").write_text("a\n1\n")
        status, _, body = asked(watcher, "/data.json")
        assert status == 500 and b"rounds.csv cannot be read" in body
        (folder / "rounds.csv").write_bytes(before)
        assert asked(watcher, "/data.json")[0] == 200


def test_watch_ends_when_the_run_is_finished(run, monkeypatch):
    monkeypatch.setattr(see, "POLL_SECONDS", 0.01)
    done = CliRunner().invoke(cli.app, ["watch", str(run)])
    assert done.exit_code == 0
    assert done.output.splitlines()[-1] == f"the run is finished; its report is {run / 'report.html'}"


def test_ctrl_c_ends_watch_without_a_traceback(tmp_path):
    folder = a_run(tmp_path, TWO_ROUNDS).path
    with subprocess.Popen(
        [sys.executable, "-c", HEEDING, *COMMAND, "watch", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        first = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        rest, complaints = process.communicate(timeout=PATIENCE)
    assert re.fullmatch(rf"http://127\.0\.0\.1:\d+/ shows {re.escape(str(folder))}; Ctrl-C ends it\n", first)
    assert (process.returncode, rest, complaints) == (0, "ended; the run itself continues\n", "")


def test_an_unavailable_port_is_bad_input(tmp_path, comparison):
    folder = a_run(tmp_path, TWO_ROUNDS).path
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"--port is {port}" in one_line(["watch", str(folder), f"--port={port}"])
    assert "--port is 70000, allowed: 0 to 65535" in one_line(["watch", str(folder), "--port=70000"])
    assert "neither the config.json" in one_line(["watch", str(comparison)])


# --- In a browser ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser():
    names = ("chromium", "chromium-browser", "google-chrome")
    chromium = os.environ.get("CHROME") or next(filter(None, map(shutil.which, names)), None)
    if chromium is None:
        pytest.skip("needs Chromium: install it (Debian's package is chromium), or say in CHROME where it is")
    from playwright.sync_api import sync_playwright

    quiet = [
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
    ]
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium, args=quiet)
        yield started
        started.close()


@contextmanager
def opened(browser, address, width=1100, **context):
    """Open a page; at the end check that the browser reported no error and requested nothing but the page."""
    with browser.new_context(viewport={"width": width, "height": 800}, **context) as window:
        tab = window.new_page()
        complaints, requests = [], []
        tab.on("console", lambda message: complaints.append(message.text))
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        tab.on("request", lambda request: requests.append(request.url))
        tab.goto(str(address))
        yield tab
        assert complaints == []
        allowed = ("data:", str(address))
        assert [url for url in requests if not url.startswith(allowed)] == []


def matrix_of(tab):
    return tab.get_attribute("svg image", "href")


def test_sliders_move_by_keyboard_and_the_figures_with_them(browser, results):
    path = sorted(results.glob("*-heurfedamp-*/report.html"))[0]
    with opened(browser, path.as_uri()) as tab:
        assert tab.title() == "HeurFedAMP on digits, rotated, seed 0"
        last = matrix_of(tab)
        tab.focus("#round")
        tab.keyboard.press("ArrowLeft")
        assert tab.text_content("output[for=round]") == tab.get_attribute("#round", "aria-valuetext") == "round 1"
        first = matrix_of(tab)
        assert first.startswith("data:image/png") and first != last
        tab.keyboard.press("End")
        assert (tab.text_content("output[for=round]"), matrix_of(tab)) == ("round 2", last)
        arrows = tab.locator("svg[aria-label^='Graph'] path[marker-end]")
        assert arrows.count() == 4 * 2
        tab.focus("#edges")
        tab.keyboard.press("ArrowRight")
        assert arrows.count() == 4 * 3


def a_verdict(clients):
    """The verdict of a summary: client 0 was helped, for all others no difference was shown."""
    numbers = {"samples": 40, "federated": 0.75, "alone": 0.5, "gain": 0.25, "low": 0.125, "high": 0.375, "p": 0.01}
    listed = [
        {"client": client, **numbers, "verdict": "no difference shown" if client else "helped"} for client in clients
    ]
    return {"sentence": "Federating helped 1 client", "percent": True, "clients": listed}


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    """A run of two named clients with a verdict, and a site that only validates."""
    folder = a_run(tmp_path_factory.mktemp("judged"), TWO_ROUNDS, weights=[[0.5, 0.5], [0.25, 0.75]]).path
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"names": ["lyon", NASTY]}))
    (folder / "validators.csv").write_text("round,client,status,num-test-examples,accuracy\n2,eve,ok,30,0.25\n")
    clients = [{"client": 0, "classes": 3}, {"client": 1, "classes": 10}]
    write_report(folder, {"verdict": a_verdict([0, 1]), "clients": clients})
    return folder


def cells(tab, title):
    """Return the header and the rows of the first table in the section with this title."""
    found = tab.locator(f"section:has(h2:text-is('{title}')) table").first
    return [line.locator("th, td").all_text_contents() for line in found.locator("tr").all()]


def test_the_verdict_is_shown_of_each_client_with_its_name_and_classes(browser, judged):
    with opened(browser, (judged / "report.html").as_uri()) as tab:
        header, first, second = cells(tab, "Better than training alone?")
        assert header == [
            "client", "name", "test samples", "classes", "alone", "federated", "gain in points", "interval", "p",
            "verdict",
        ]  # fmt: skip
        assert first == [
            "0", "lyon", "40", "3", "50.0 %", "75.0 %", "+25.0", "+12.5 to +37.5", "0.010", "helped"
        ]  # fmt: skip
        assert second[:4] == ["1", NASTY, "40", "10"] and second[-1] == "no difference shown"
        assert cells(tab, "Sites that only validate") == [
            ["site", "samples", "accuracy", "last evaluation"],
            ["eve", "30", "0.25", "ok"],
        ]


@pytest.mark.parametrize(("number", "folded"), [(2, False), (30, False), (31, True)])
def test_without_a_verdict_a_table_has_the_last_value_of_each_client(browser, tmp_path, number, folded):
    rounds = [[row(1, client, personal_accuracy=0.5, num_examples=20) for client in range(number)]]
    folder = a_run(tmp_path, rounds, clients=range(number)).path
    write_report(folder)
    with opened(browser, (folder / "report.html").as_uri()) as tab:
        header, *lines = cells(tab, "Clients")
        assert header == ["client", "training samples", "test samples", "classes", "last accuracy"]
        assert len(lines) == number and lines[1] == ["1", "20", "–", "–", "50.0 %"]
        assert tab.locator("section:has(h2:text-is('Clients')) details").count() == folded


def test_a_head_sorts_the_rows_of_its_table(browser, tmp_path):
    accuracies = [0.9, 0.1, 0.5, None]
    rounds = [[row(1, i, num_examples=9 + i, **({} if a is None else {"personal_accuracy": a}))
               for i, a in enumerate(accuracies)]]  # fmt: skip
    folder = a_run(tmp_path, rounds, clients=range(4)).path
    write_report(folder)
    with opened(browser, (folder / "report.html").as_uri()) as tab:

        def order(head: str) -> list[str]:
            tab.locator(f"th button:text-is('{head}')").first.click()
            return [line[0] for line in cells(tab, "Clients")[1:]]

        assert order("last accuracy") == ["0", "2", "1", "3"] and order("last accuracy") == ["1", "2", "0", "3"]
        assert order("client") == ["3", "2", "1", "0"] and order("training samples") == ["3", "2", "1", "0"]
        tab.locator("th button:text-is('client')").first.focus()
        tab.keyboard.press("Enter")
        assert [line[0] for line in cells(tab, "Clients")[1:]] == ["3", "2", "1", "0"]
        assert tab.locator("th[aria-sort]").all_text_contents() == ["client"]


@pytest.mark.parametrize("verdict", [True, False])
def test_the_page_begins_with_the_clients(browser, judged, tmp_path, verdict):
    folder = judged if verdict else a_run(tmp_path, TWO_ROUNDS).path
    if not verdict:
        write_report(folder)
    with opened(browser, (folder / "report.html").as_uri()) as tab:
        first = "Better than training alone?" if verdict else "Clients"
        assert tab.locator("h2").all_text_contents()[:2] == [first, "Accuracy"]


def test_points_that_coincide_are_all_visible(browser, tmp_path):
    same = {"received_accuracy": 0.5, "trained_accuracy": 0.75, "personal_accuracy": 0.75}
    folder = a_run(tmp_path, [[row(1, client, **same) for client in range(6)]], clients=range(6)).path
    write_report(folder)
    with opened(browser, (folder / "report.html").as_uri()) as tab:
        places = tab.evaluate("""() => [...document.querySelectorAll("section svg title")]
            .filter(title => title.textContent.includes(", then "))
            .map(title => { const box = title.parentNode.getBoundingClientRect(); return [box.x, box.y]; })""")
        assert len(places) == 6
        assert min(np.hypot(*np.subtract(a, b)) for i, a in enumerate(places) for b in places[:i]) > 3


def test_one_client_has_no_table(browser, tmp_path):
    folder = a_run(tmp_path, [[row(1, 0, personal_accuracy=0.5)]], clients=[0]).path
    write_report(folder)
    with opened(browser, (folder / "report.html").as_uri()) as tab:
        assert tab.locator("h2:text-is('Clients')").count() == 0


def test_the_reader_chooses_whose_curve_is_drawn(browser, judged):
    with opened(browser, (judged / "report.html").as_uri()) as tab:
        figure = ".choice:has(#curve-of) + div figure svg[role=img]"
        assert tab.locator(figure).count() == 0
        tab.select_option("#curve-of", label="0 lyon")
        label = tab.get_attribute(figure, "aria-label")
        assert label.startswith("Client 0 lyon. client 0 lyon: first 50.0 %, last 50.0 %")
        tab.set_viewport_size({"width": 500, "height": 800})  # drawn again to another width
        assert tab.locator(figure).count() == 1
        tab.select_option("#curve-of", label="none")
        assert tab.locator(figure).count() == 0


def test_on_paper_the_table_of_clients_is_whole_and_no_choice_is_shown(browser, judged, tmp_path):
    with opened(browser, (judged / "report.html").as_uri(), 690) as tab:
        tab.emulate_media(media="print")
        assert not tab.locator("#curve-of").is_visible()
        cut = "all => all.filter(each => each.scrollWidth > each.clientWidth + 1).map(each => each.ariaLabel)"
        assert tab.eval_on_selector_all("main .scroll", cut) == []
        assert tab.evaluate("document.documentElement.scrollWidth") <= 690


def curves_of(tab, figure):
    """Return title -> colour and width of each line in a figure."""
    paths = tab.locator(f"{figure} svg[role=img] path[fill=none]")
    return {
        path.locator("title").text_content(): (path.get_attribute("stroke"), float(path.get_attribute("stroke-width")))
        for path in paths.all()
    }


def test_the_reader_chooses_whose_weights_over_rounds_are_shown(browser, results):
    path = sorted(results.glob("*-heurfedamp-*/report.html"))[0]
    with opened(browser, path.as_uri()) as tab:
        chosen = "figure:has(#learner)"
        before = curves_of(tab, chosen)
        assert set(before) == {f"client {i}" for i in range(4)}
        assert [name for name, (_, width) in before.items() if width > 3] == ["client 0"]
        # Clients 0 and 1 are one group, 2 and 3 the other.
        colours = [before[f"client {i}"][0] for i in range(4)]
        assert colours[0] == colours[1] != colours[2] == colours[3]
        tab.select_option("#learner", label="3")
        after = curves_of(tab, chosen)
        assert [name for name, (_, width) in after.items() if width > 3] == ["client 3"]
        label = tab.get_attribute(f"{chosen} svg[role=img]", "aria-label")
        assert label.startswith("Weights over rounds in what client 3 received. Largest at the end: client")
        tab.set_viewport_size({"width": 500, "height": 800})  # drawn again to another width
        assert set(curves_of(tab, chosen)) == set(after)


def test_shares_of_components_have_a_figure_each(browser, shares):
    with opened(browser, (shares / "report.html").as_uri()) as tab:
        section = tab.locator("section:has(h2:text-is('Shares of the components'))")
        assert section.locator("h3").all_text_contents() == ["Component 0", "Component 1"]
        labels = [each.get_attribute("aria-label") for each in section.locator("svg[role=img]").all()]
        assert ["3 clients of 3" in label for label in labels] == [True, False]


def test_a_varied_comparison_has_a_figure_for_each_value_and_one_over_the_values(browser, varied):
    with opened(browser, (varied / "report.html").as_uri()) as tab:
        titles = tab.locator("figure h3").all_text_contents()
        assert titles == [
            "Over rounds, fraction-train 0.5",
            "Over rounds, fraction-train 1",
            "Over fraction-train",
            "Distribution over clients",
        ]
        for title in titles[:3]:
            legend = tab.locator(f"figure:has(h3:text-is('{title}')) .legend li").all_text_contents()
            assert legend[:2] == ["local", "fedavg"]
        texts = tab.locator("figure:has(h3:text-is('Over fraction-train')) svg[role=img] text").all_text_contents()
        assert {"0.5", "1", "fraction-train"} < set(texts)


@pytest.mark.parametrize("kind", ["run", "comparison", "varied", "shares", "judged"])
def test_every_figure_has_a_text_and_nothing_is_wider_than_a_phone(browser, kind, request):
    address = (request.getfixturevalue(kind) / "report.html").as_uri()
    for width, scheme in ((390, "light"), (1100, "dark")):
        with opened(browser, address, width, color_scheme=scheme) as tab:
            assert tab.evaluate("document.documentElement.scrollWidth") == width
            figures = tab.eval_on_selector_all(
                "main figure svg:not([aria-hidden])", "all => all.map(svg => [svg.getAttribute('role'), svg.ariaLabel])"
            )
            assert len(figures) >= 4 and all(role == "img" and len(label) > 20 for role, label in figures)
            cut_off = tab.eval_on_selector_all(
                "main figure svg:not([aria-hidden])",
                """all => all.flatMap(svg => {
                const frame = svg.getBoundingClientRect();
                return [...svg.querySelectorAll("text")].filter(text => {
                    const box = text.getBoundingClientRect();
                    return box.left < frame.left - 1 || box.right > frame.right + 1 || box.bottom > frame.bottom + 1;
                }).map(text => text.textContent);
            })""",
            )
            assert cut_off == []
            dark = tab.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
            assert dark == (scheme == "dark")


def test_a_closing_evaluation_is_distinguished_from_a_training_round(browser, results, run, comparison):
    (local,) = results.glob("*-local-*-seed0/report.html")
    for path, has in ((run / "report.html", True), (local, False), (comparison / "report.html", False)):
        with opened(browser, path.as_uri()) as tab:
            assert tab.locator("figcaption", has_text="closing evaluation").count() == has
    asked = json.loads((run / "config.json").read_text())["settings"]["num-rounds"]
    with opened(browser, (run / "report.html").as_uri()) as tab:
        assert f"round {asked + 1}" not in tab.content().split("<script")[0]
        names = tab.locator("#more-numbers-of-every-round tbody th").all_text_contents()
        assert names[-2:] == [str(asked), "closing evaluation"]


def test_on_paper_the_tables_are_open_and_fit(browser, comparison):
    with opened(browser, (comparison / "report.html").as_uri(), 690, color_scheme="dark") as tab:
        assert tab.pdf(format="A4").startswith(b"%PDF")
        tab.emulate_media(media="print")
        assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert tab.evaluate("document.documentElement.scrollWidth") <= 690


def test_names_of_clients_are_text_in_the_browser(browser, nasty):
    with opened(browser, nasty.as_uri()) as tab:
        assert tab.evaluate("typeof hacked") == "undefined"
        assert tab.locator("main script, main img").count() == 0
        assert tab.locator("td", has_text="refused: </script>").count() == 1


def test_a_comparison_links_to_its_runs(browser, comparison):
    with browser.new_context() as window:
        tab = window.new_page()
        tab.goto((comparison / "report.html").as_uri())
        tab.click("section a >> nth=0")
        tab.wait_for_selector("h1:has-text('Local on digits')")


def test_an_open_page_follows_the_run_to_its_end(browser, tmp_path, monkeypatch):
    monkeypatch.setattr(see, "POLL_SECONDS", 0.1)
    folder = a_run(tmp_path, TWO_ROUNDS[:1], weights=[[0.5, 0.5], [0.5, 0.5]])
    with see.Watcher(folder.path, 0).serving() as watcher, opened(browser, watcher.address) as tab:
        tab.wait_for_selector("text=In progress: 1 of 2 rounds")
        before = matrix_of(tab)
        folder.record_round(run_of(TWO_ROUNDS, clients=(0, 1), weights=[[0.9, 0.1], [0.4, 0.6]]))
        tab.wait_for_selector("text=In progress: 2 of 2 rounds")
        # The matrix is written after the round's numbers, and may come with a later look at the folder.
        tab.wait_for_function(
            "before => document.querySelector('svg image').getAttribute('href') !== before", arg=before
        )
        assert tab.text_content("output[for=round]") == "round 2"
        folder.finish(run_of(TWO_ROUNDS), None)
        tab.wait_for_selector("text=Finished: 2 rounds")
