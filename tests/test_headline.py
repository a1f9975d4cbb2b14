"""Runs that are not judged by accuracy: columns, tables, tests, pictures and pages; names of clients in them."""

from __future__ import annotations

import csv
import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from kindred.data import load_federation
from kindred.metrics import METRICS
from kindred.objectives import OBJECTIVES, Classes, NextToken, Number
from kindred.server_app.app import metric_remarks, needed_by, prepare
from kindred.server_app.cli import run as cli
from kindred.server_app.comparison.metrics import numbers_of
from kindred.server_app.comparison.statistics import metrics_of, signed_rank
from kindred.server_app.config import SETTINGS, Config, ConfigError
from kindred.server_app.headline import Headline, significant
from kindred.server_app.report import figures
from kindred.server_app.report.comparison_content import comparison_content
from kindred.server_app.report.comparison_figures import comparison_figure
from kindred.server_app.report.content import run_content
from kindred.server_app.report.weight_figure import weights_figure
from kindred.server_app.report.weights import Curves
from kindred.server_app.run_files import labels_of
from kindred.server_app.run_result import RunResult
from kindred.server_app.summary import compare_runs, comparison_table
from tests.test_report import browser, opened  # noqa: F401  the first is a fixture
from tests.test_results import legend_of, row

PLACES = ("Barnet", "Camden", "Hackney")
NUMBERS = [
    "--engine=inline", "--dataset=csv", "--set=target=price", "--set=client=place", "--partition=by-client",
    "--clients=3", "--rounds=3", "--set=local-epochs=2",
]  # fmt: skip


def run_command(*words: str) -> str:
    done = CliRunner().invoke(cli.app, words)
    assert done.exit_code == 0, done.output
    return done.output


def refusal(*words: str) -> str:
    """Return what a refused command says after its name."""
    done = CliRunner().invoke(cli.app, words)
    assert done.exit_code == 2
    (line,) = done.output.splitlines()
    return line.removeprefix("kindred: ")


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> Path:
    """Prices that depend on the place: 30 rows of each."""
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("table") / "prices.csv"
    with open(path, "w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(["area", "age", "place", "price"])
        for place, slope in zip(PLACES, (3000, 1000, -1000), strict=True):
            for area, age in zip(rng.uniform(20, 120, 30).round(1), rng.uniform(0, 90, 30).round(1), strict=True):
                lines.writerow([area, age, place, round(slope * area - 200 * age + rng.normal(0, 5000))])
    return path


@pytest.fixture(scope="module")
def compared(table, tmp_path_factory) -> tuple[Path, str]:
    """The folder of a comparison of methods that predict numbers, and what its command printed."""
    folder = tmp_path_factory.mktemp("compared")
    output = run_command(
        "compare", "--strategies=local,fedavg-ft,heurfedamp", "--seeds=0,1", f"--data-dir={table}",
        f"--output-dir={folder}", *NUMBERS,
    )  # fmt: skip
    (place,) = folder.glob("compare-*")
    return place, output


@pytest.fixture(scope="module")
def run(compared) -> Path:
    return next(compared[0].parent.glob("*-fedavg-ft-*seed0"))


# --- How a metric is shown --------------------------------------------------------------------------


def test_percent_and_plain_numbers_as_texts() -> None:
    accuracy, rmse = Headline("accuracy"), Headline("rmse")
    assert (accuracy.number(0.9476), accuracy.text(0.9476)) == ("94.8", "94.8 %")
    assert (rmse.number(58317.2), rmse.text(0.0123456)) == ("58320", "0.01235")
    assert [significant(value, 2) for value in (123456, 1.25e-7, -0.5)] == ["120000", "1.2e-07", "-0.5"]
    assert (accuracy.unit, accuracy.decile, accuracy.axis) == ("%", "bottom decile", "accuracy (%)")
    assert (rmse.unit, rmse.decile, rmse.axis) == ("RMSE", "top decile", "RMSE")
    assert accuracy.bounds == (0, 100) and rmse.bounds == (0, np.inf)
    assert [Headline(name).plural for name in ("accuracy", "loss", "mae")] == ["accuracies", "losses", "values of MAE"]
    assert rmse.to_dict()["bounds"] == [0, None]


def test_the_setting_chooses_among_the_metrics_that_clients_report() -> None:
    assert Headline.chosen("auto", Number(1)).name == "rmse"
    assert Headline.chosen("r2", Number(1)).name == "r2"
    assert Headline.chosen("bits", NextToken(5)).name == "bits"
    with pytest.raises(
        ConfigError, match=r"^metric is 'rmse', allowed with the objective next-token: auto, accuracy, bits, loss$"
    ):
        Headline.chosen("rmse", NextToken(10))


def test_every_objective_reports_its_own_metric_and_what_it_measures() -> None:
    targets = {"classes": [0, 1], "next-token": [0, 1], "labels": [[0, 1], [1, 0]], "number": [0.5, 1.5]}
    for name, objective in OBJECTIVES.items():
        y = np.array(targets[name])
        outputs = 1 if name == "number" else 2
        found = objective(outputs).evaluated(np.full((2, outputs), 0.5), y, objective.reports)
        assert set(found) == set(objective.reports) and objective.metric in objective.reports
        assert set(objective.reports) <= set(METRICS)


def test_runs_with_different_metrics_are_not_compared() -> None:
    assert Headline.of([{}, {"metric": "accuracy"}]).name == Headline.of([]).name == "accuracy"
    with pytest.raises(ConfigError, match="^the runs have the headline metrics mae, rmse, allowed: one for all$"):
        Headline.of([{"metric": "rmse"}, {"metric": "mae"}])
    with pytest.raises(ConfigError, match="^metric is 'f2', allowed: accuracy, balanced-accuracy, "):
        Headline.of([{"metric": "f2"}])


def test_a_metric_that_the_task_does_not_have_is_refused_before_the_first_round(table, tmp_path) -> None:
    results = tmp_path / "results"
    of_classes = (
        "auto, accuracy, balanced-accuracy, auroc, average-precision, f1, log-loss, brier, calibration-error, loss"
    )
    for name, classes in (("rmse", ""), ("sensitivity", " and 10 classes")):
        said = refusal("run", "--engine=inline", f"--metric={name}", f"--output-dir={results}")
        assert said == f"metric is {name!r}, allowed with the objective classes{classes}: {of_classes}"
    for name in ("accuracy", "auroc"):
        said = refusal(
            "compare",
            "--strategies=local",
            f"--metric={name}",
            f"--data-dir={table}",
            f"--output-dir={results}",
            *NUMBERS,
        )
        assert said == f"metric is {name!r}, allowed with the objective number: auto, rmse, mae, r2, loss"
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("to be or not to be, that is the question; " * 20)
    said = refusal(
        "run", "--metric=auroc", "--dataset=text", "--partition=by-client", "--clients=2", f"--data-dir={tmp_path}",
        f"--output-dir={results}",
    )  # fmt: skip
    assert said == "metric is 'auroc', allowed with the objective next-token: auto, accuracy, bits, loss"
    assert "metric is given twice" in refusal("run", "--metric=f1", "--set=metric=auroc")
    assert "metric is 'f2', allowed: " in refusal("run", "--metric=f2") and not results.exists()


def test_with_two_classes_there_are_sensitivity_and_specificity() -> None:
    assert [Headline.chosen(name, Classes(2)).name for name in ("sensitivity", "specificity")] == [
        "sensitivity", "specificity"
    ]  # fmt: skip


def test_a_run_cannot_stop_by_validation_data_without_any(tmp_path) -> None:
    said = refusal("run", "--engine=inline", "--set=stop-after=2", f"--output-dir={tmp_path}/results")
    assert said == (
        "stop-after is 2, and there are no validation samples: set validation-share, or stop-after to 0"
    ) and not list(tmp_path.iterdir())


# --- Clients whose test data do not define the metric ----------------------------------------------------


def patients(path: Path, **sick: tuple[int, ...]) -> list[str]:
    """Write a table of hospitals with 20 patients each, those with these numbers sick; the last 6 are for test."""
    with open(path / "patients.csv", "w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(["age", "when", "place", "sick"])
        lines.writerows([30 + n + 9 * (n in ill), n, place, n in ill] for place, ill in sick.items() for n in range(20))
    return [
        "--engine=inline", "--dataset=csv", f"--data-dir={path}/patients.csv", "--set=target=sick",
        "--set=client=place", "--set=time=when", "--partition=by-client", f"--clients={len(sick)}",
        "--rounds=2", f"--output-dir={path}/out",
    ]  # fmt: skip


def test_a_client_with_one_class_in_its_test_data_is_said_to_have_no_auroc(tmp_path) -> None:
    words = patients(tmp_path, Aachen=(0, 1, 18, 19), Bonn=(0, 1), Cologne=(2, 3, 15))
    said = run_command("run", "--strategy=local", "--metric=auroc", *words)
    (remark,) = (line for line in said.splitlines() if "has no" in line)
    assert remark == "client 1 Bonn has one class in its test data: it has no auroc"
    assert said.index(remark) < said.index("round 1/2")
    (folder,) = (tmp_path / "out").iterdir()
    summary = json.loads((folder / "summary.json").read_text())
    aachen, bonn, cologne = summary["clients"]
    assert bonn["auroc"] is None and "auroc" not in bonn["last"] and bonn["last"]["accuracy"] is not None
    assert summary["auroc"] == pytest.approx((aachen["auroc"] + cologne["auroc"]) / 2)
    rounds = list(csv.DictReader(io.StringIO((folder / "rounds.csv").read_text())))
    assert [line["asked"] for line in rounds] == ["3", "3"] and {line["evaluated"] for line in rounds} == {"2"}
    history = list(csv.DictReader(io.StringIO((folder / "history.csv").read_text())))
    requests = {(line["round"], line["bytes-down"]) for line in history}
    assert len(requests) == 2  # no client is asked again in a round for what it cannot have
    assert "has no accuracy" not in run_command("run", "--strategy=local", *words)


def test_a_metric_that_no_client_has_is_refused(tmp_path) -> None:
    words = patients(tmp_path, Aachen=(0, 1), Bonn=(2, 3))
    assert refusal("run", "--metric=auroc", *words) == (
        "metric is 'auroc', and no client has more than one class in its test data, allowed: auto, or test data that "
        "define the metric"
    )
    assert not (tmp_path / "out").exists()
    run_command("run", "--strategy=local", "--metric=specificity", *words)
    assert "metric is 'sensitivity', and no client" in refusal("run", "--metric=sensitivity", *words)


def test_of_many_clients_without_the_metric_some_are_listed(tmp_path) -> None:
    words = patients(tmp_path, Aachen=(0, 19), **{f"Place{n:02}": (0,) for n in range(14)})
    federation = load_federation(given(words))
    assert federation.clients_without("auroc") == dict.fromkeys(range(1, 15), 1)
    assert federation.clients_without("accuracy") == {} == federation.clients_without("specificity")
    lines = metric_remarks(Config.from_run_config(given(words) | {"metric": "auroc"}), federation)
    assert len(lines) == 11 and lines[-1] == "4 more clients have no auroc"


def given(words: list[str]) -> dict:
    """Return the settings in words of a command, for those that `patients` returns."""
    pairs = dict(word.removeprefix("--").removeprefix("set=").split("=", 1) for word in words)
    known = {"clients": "num-clients", "rounds": "num-rounds"}
    texts = {known.get(key, key): value for key, value in pairs.items() if key != "engine"}
    return Config.from_run_config({key: SETTINGS[key].parse(text) for key, text in texts.items()}).run_config()


def test_all_compared_methods_have_one_metric(tmp_path) -> None:
    words = ["compare", "--strategies=local,fedavg", f"--output-dir={tmp_path}"]
    assert "local:metric is for one method only" in refusal(*words, "--set=local:metric=loss")
    assert "--vary metric is not allowed" in refusal(*words, "--vary=metric=loss,accuracy")


def test_a_strategy_gets_metric_and_objective(table) -> None:
    config = Config(
        dataset="csv", data_dir=str(table), target="price", client="place", partition="by-client", num_clients=3,
        metric="mae",
    )  # fmt: skip
    federation = load_federation(config.run_config())
    strategy, _ = prepare(config, federation)
    assert strategy.metric == strategy.history.metric == "mae"
    digits = Config(strategy="feddf", metric="loss")
    given = needed_by(digits, load_federation(digits.run_config()))
    assert given["metric"] == "loss" and given["objective"].name == "classes"


# --- A run that predicts numbers ------------------------------------------------------------------------


def test_a_run_is_summarised_by_its_own_metric(run) -> None:
    summary = json.loads((run / "summary.json").read_text())
    assert summary["metric"] == "rmse" and not [key for key in summary if "accuracy" in key]
    assert [each["name"] for each in summary["clients"]] == list(PLACES)
    last = [each["rmse"] for each in summary["clients"]]
    assert summary["rmse"] == pytest.approx(np.mean(last))
    assert summary["rmse-weighted"] == pytest.approx(np.mean(last))  # all have 9 test rows
    assert summary["rmse-p90"] == pytest.approx(np.quantile(last, 0.9))
    with open(run / "rounds.csv") as file:
        rounds = list(csv.DictReader(file))
    assert list(rounds[0])[6:12] == ["evaluated", "personal", "rmse", "rmse-weighted", "rmse-p90", "rmse-best"]
    assert summary["rmse-best"] == min(float(line["rmse"]) for line in rounds)
    assert {"personal-rmse", "personal-mae", "personal-r2", "personal-loss"} <= set(
        (run / "history.csv").read_text().splitlines()[0].split(",")
    )
    config = json.loads((run / "config.json").read_text())
    assert config["metric"] == "rmse" and config["names"] == list(PLACES)
    assert (run / "rmse.png").exists() and not (run / "accuracy.png").exists()


def test_the_page_of_a_run_has_its_metric_and_the_clients_names(run) -> None:
    content, summary = run_content(run), json.loads((run / "summary.json").read_text())
    assert content["metric"]["title"] == "RMSE" and not content["metric"]["higher"]
    assert content["figures"]["worst-decile"] == summary["rmse-p90"]
    assert content["clients"]["names"] == ["0 Barnet", "1 Camden", "2 Hackney"]
    assert content["clients"]["last"] == pytest.approx([each["rmse"] for each in summary["clients"]], rel=1e-5)
    assert content["curve"]["p10"][-1] < content["curve"]["mean"][-1] < content["curve"]["p90"][-1]
    assert [each["name"] for each in content["stages"]["curves"]] == [
        "model as received", "after local training", "after fine-tuning",
    ]  # fmt: skip
    assert all(
        before > after for before, after in zip(*(content["clients"][key] for key in ("before", "after")), strict=True)
    )


def test_a_run_as_an_object(run) -> None:
    result = RunResult(run)
    assert f", RMSE {result.headline.number(result.summary['rmse'])}, in " in repr(result)
    assert {"rmse", "partition"} <= set(result.figures)
    assert result.tables["clients"]["name"].tolist() == list(PLACES)


def test_a_run_without_a_metric_is_read_as_accuracy(tmp_path) -> None:
    run_command(
        "run", "--engine=inline", "--strategy=local", "--clients=4", "--rounds=1", "--set=num-groups=2",
        "--set=samples-per-client=20", "--set=local-epochs=1", f"--output-dir={tmp_path}",
    )  # fmt: skip
    (folder,) = tmp_path.iterdir()
    new, seen = run_content(folder), repr(RunResult(folder))
    for name in ("config.json", "summary.json"):
        content = json.loads((folder / name).read_text())
        assert content.pop("metric") == "accuracy"
        content.pop("names", None)
        (folder / name).write_text(json.dumps(content))
    assert run_content(folder) == new and repr(RunResult(folder)) == seen
    assert new["clients"]["names"] == ["0", "1", "2", "3"]


# --- Directions -----------------------------------------------------------------------------------------


def test_the_table_of_runs_emphasises_the_lowest_errors() -> None:
    def summary(name: str, mean: float, decile: float) -> dict:
        return {
            "strategy": name, "metric": "rmse", "rmse": mean, "rmse-best": mean, "rmse-p90": decile,
            "seconds": 1.0, "bytes-down": 2e6, "bytes-up": 1e6,
        }  # fmt: skip

    columns, lines = comparison_table([summary("local", 2.5, 4.0), summary("fedavg", 3.0, 3.5)])
    assert [column.title for column in columns][:4] == ["strategy", "mean RMSE", "best RMSE", "top decile RMSE"]
    cells = [[(cell.plain, str(cell.style)) for cell in line[1:4]] for line in lines]
    assert cells == [[("2.5", "bold"), ("2.5", "bold"), ("4", "")], [("3", ""), ("3", ""), ("3.5", "bold")]]


def test_a_lower_error_is_better_in_the_tests() -> None:
    ours, reference = np.array([1.0, 2.0, 3.0, 5.0]), np.array([2.0, 4.0, 6.0, 4.0])
    test, opposite = signed_rank(ours, reference, higher=False), signed_rank(ours, reference)
    assert (test["better"], test["worse"], test["equal"]) == (3, 1, 0) and test["median-difference"] == 1.5
    assert (opposite["better"], opposite["worse"]) == (1, 3) and opposite["p"] == test["p"]
    large = signed_rank(np.array([1e6 + 1e-7]), np.array([1e6]), higher=False)  # differs in the last bits alone
    assert large["equal"] == 1

    def summary(*values: float) -> dict:
        clients = [{"client": i, "rmse": value} for i, value in enumerate(values)]
        return {"metric": "rmse", "rmse": 1.0, "bytes-down": 1, "bytes-up": 2, "clients": clients}

    found = metrics_of(summary(1, 2, 3, 4), summary(2, 3, 4, 3), Headline("rmse"))
    assert found["better-than-local"] == 0.75 and found["rmse"] == 1.0 and "accuracy" not in found


def test_the_numbers_of_a_comparison_say_which_way_is_better() -> None:
    numbers = numbers_of(Headline("rmse"))
    titles = [metric.title for metric in numbers.values()]
    assert titles[5] == "below local %" and titles[:5] == [
        "selected RMSE", "best RMSE", "last RMSE", "by size RMSE", "top decile RMSE"
    ]  # fmt: skip
    assert list(numbers)[:5] == ["rmse-selected", "rmse-best", "rmse", "rmse-weighted", "rmse-p90"]
    assert numbers["rmse-p90"].meaning == "RMSE above which a tenth of the clients lie, last round"
    assert numbers["better-than-local"].meaning == "share of the clients with a lower last RMSE than with local"
    accuracy = [metric.title for metric in numbers_of(Headline()).values()][:6]
    assert accuracy == ["selected %", "best %", "last %", "by size %", "bottom decile %", "above local %"]


def test_the_picture_of_errors_has_its_best_round_at_the_bottom() -> None:
    rows = [row(number, 0, personal_rmse=value) for number, value in enumerate((30.0, 10.0, 20.0), 1)]
    figure = figures.metric_figure(rows, Headline("rmse"), "t")
    assert "best mean: 10 in round 2" in legend_of(figure)
    assert figure.axes[0].get_ylabel() == "test RMSE" and figure.axes[0].get_ylim()[1] < 40
    empty = figures.metric_figure([row(1, 0, personal_rmse=-1.0)], Headline("rmse"), "t")  # impossible
    assert [text.get_text() for text in empty.axes[0].texts] == ["no client reported its RMSE"]
    negative = figures.metric_figure([row(1, 0, personal_r2=-3.0), row(2, 0, personal_r2=0.5)], Headline("r2"), "t")
    low, high = negative.axes[0].get_ylim()
    assert low < -3 and high < 1


def test_the_picture_of_compared_errors() -> None:
    rounds = [{"round": 1, "rmse": 400.0}, {"round": 2, "rmse": 250.5}]
    figure = comparison_figure([("local", [rounds]), ("fedavg", [rounds[:1]])], Headline("rmse"), "t")
    (axes,) = figure.axes
    assert axes.get_ylabel() == "test RMSE, mean over clients"
    assert [text.get_text() for text in axes.texts if text.get_text()] == ["local  250.5", "fedavg  400"]


# --- A comparison of such runs --------------------------------------------------------------------------


def test_a_comparison_is_by_the_metric_of_its_runs(compared) -> None:
    folder, output = compared
    written = json.loads((folder / "comparison.json").read_text())
    assert written["metric"] == "rmse" and list(written["metrics"])[:3] == ["rmse-selected", "rmse-best", "rmse"]
    local, tuned = (written["strategies"][name] for name in ("local", "fedavg-ft"))
    pairs = [
        (mine["rmse"], alone["rmse"])
        for a, b in zip(tuned["runs"], local["runs"], strict=True)
        for mine, alone in zip(a["summary"]["clients"], b["summary"]["clients"], strict=True)
    ]
    better = sum(mine < alone for mine, alone in pairs)
    means = np.array(pairs).reshape(2, 3, 2).mean(axis=0)  # a client with a name is one in both seeds
    assert len(pairs) == 6 and tuned["wilcoxon"]["pairs"] == 3
    assert tuned["wilcoxon"]["better"] == (means[:, 0] < means[:, 1]).sum()
    assert tuned["mean"]["better-than-local"] == pytest.approx(better / 6)
    assert "last RMSE" in output and "best %" not in output and "last values of RMSE of all seeds" in output
    mean, std = (significant(tuned[key]["rmse"], digits) for key, digits in (("mean", 4), ("std", 2)))
    assert f"| {mean} ± {std} |" in (folder / "comparison.md").read_text()
    rows = list(csv.DictReader(io.StringIO((folder / "comparison.csv").read_text())))
    assert float(rows[0]["rmse"]) == local["runs"][0]["summary"]["rmse"] and "accuracy" not in rows[0]


def test_the_page_of_a_comparison_has_the_metric(compared) -> None:
    content = comparison_content(compared[0])
    assert content["metric"]["axis"] == "RMSE"
    method = content["methods"][0]
    assert len(method["last"]) == 6 and method["curve"]["mean"][-1] == pytest.approx(np.mean(method["last"]), rel=1e-4)


def test_folders_of_runs_with_different_metrics_are_refused(run, tmp_path) -> None:
    other = tmp_path / "other"
    shutil.copytree(run, other)
    summary = json.loads((other / "summary.json").read_text())
    (other / "summary.json").write_text(json.dumps({**summary, "metric": "mae"}))
    with pytest.raises(ValueError, match="^the runs have the headline metrics mae, rmse, allowed: one for all$"):
        compare_runs([run, other], tmp_path / "c.png", io.StringIO())


def test_a_browser_shows_the_errors_and_names(browser, compared, run) -> None:  # noqa: F811
    with opened(browser, (run / "report.html").as_uri()) as tab:
        terms = tab.locator("dl.figures dt").all_text_contents()
        assert terms[:5] == [
            "mean RMSE", "best mean, by test data", "mean of selected models", "top decile", "mean by test size",
        ]  # fmt: skip
        summary = json.loads((run / "summary.json").read_text())
        value = tab.locator("dl.figures dd").first.text_content()
        assert float(value) == float(significant(summary["rmse"]))
        assert tab.locator("h2").all_text_contents()[:2] == ["Clients", "RMSE"]
        blocks = tab.locator("svg[aria-label^='Distribution of values of RMSE'] rect title").all_text_contents()
        assert {text.partition(":")[0] for text in blocks} == {f"client {i} {name}" for i, name in enumerate(PLACES)}
        assert "Clients below the line gained: 3 of 3; 0 lost." in tab.text_content("main")
        assert "accuracy" not in tab.text_content("main")
        label = tab.locator("svg[aria-label^='Over rounds']").first.get_attribute("aria-label")
        assert float(label.rpartition("best ")[2].rstrip(".")) == float(significant(summary["rmse-best"]))
    with opened(browser, (compared[0] / "report.html").as_uri()) as tab:
        assert tab.locator("svg[aria-label^='Distribution of values of RMSE over clients']").count() == 1
        assert "top decile RMSE" in tab.text_content("main") and "accuracy" not in tab.text_content("main")


# --- Names of clients -----------------------------------------------------------------------------------


def test_labels_are_ids_with_names_where_there_are_any() -> None:
    assert labels_of([0, 2, 5, "site", -1], ["a", "b", "c"]) == ["0 a", "2 c", "5", "site", "-1"]
    assert labels_of([0, " x "], ()) == ["0", " x "]


def test_pictures_show_the_names_of_clients() -> None:
    figure = figures.collaboration_figure([0, 1, 2], np.eye(3), None, "t", PLACES)
    ticks = [text.get_text() for text in figure.axes[0].get_yticklabels()]
    assert ticks == ["0 Barnet", "1 Camden", "2 Hackney"]
    curves = Curves("client 0 Barnet", np.array([1, 2]), [0, 1], np.array([[1.0, 0.0], [0.5, 0.5]]), 0)
    legend = [text.get_text() for text in weights_figure([curves], None, "t", PLACES).legends[0].texts]
    assert legend == ["client 0 Barnet", "client 1 Camden", "thick: the client itself"]
