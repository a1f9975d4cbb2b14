"""`kindred compare`: the same data and seeds for every method, and results that can be checked by hand."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.collections import PolyCollection
from matplotlib.image import imread
from typer.testing import CliRunner

from kindred import REGISTRY
from kindred.client.models import parse_models
from kindred.data import DATASETS
from kindred.data.loading import forget_federations
from kindred.data.partitions import divide
from kindred.perfed_ckt import floats_communicated
from kindred.server_app.app import make_strategy
from kindred.server_app.cli.run import app
from kindred.server_app.comparison import (
    files as comparison_files,
    pictures as comparison_pictures,
    runs as comparison_runs,
)
from kindred.server_app.comparison.files import as_csv, write
from kindred.server_app.comparison.metrics import numbers_of
from kindred.server_app.comparison.plan import make_plan, run_hash, samples_a_client
from kindred.server_app.comparison.runs import known_runs
from kindred.server_app.comparison.statistics import all_metrics, improvements, paired, signed_rank
from kindred.server_app.comparison.texts import remarks, tables
from kindred.server_app.config import Config, ConfigError
from kindred.server_app.headline import Headline
from kindred.server_app.presets import load_preset, preset_names
from kindred.server_app.report.comparison_figures import comparison_figure, sweep_figure
from kindred.server_app.results import RunFolder
from kindred.server_app.run_files import read_config
from kindred.server_app.run_log import Outcome
from kindred.settings import TRAINING

SMALL = [
    "--clients=4",
    "--rounds=2",
    "--set=num-groups=2",
    "--set=samples-per-client=20",
    "--set=local-epochs=1",
    "--engine=inline",
]
METHODS = "--strategies=local,heurfedamp"


def kindred(*arguments: str, code: int = 0):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["kindred", *arguments])
        done = CliRunner().invoke(app, arguments)
    assert done.exit_code == code, done.output
    return done


def folders(place: Path, kind: str = "*") -> set[str]:
    return {path.parent.name for path in place.glob(f"{kind}/config.json")}


def how(done) -> list[str]:
    """Return for each run whether it was reused or run, by the progress lines."""
    lines = [line for line in done.stdout.splitlines() if re.match(r"run \d+/\d+ ", line)]
    return [(re.search(r": (reused|resumed|failed)", line) or [0, "run"])[1] for line in lines]


def columns_of(content: dict) -> dict[str, list[str]]:
    """Title -> cells of both tables."""
    return {title: cells for table in tables(content) for title, *cells in zip(*table, strict=True)}


def content_in(place: Path) -> dict:
    (path,) = place.glob("compare-*/comparison.json")
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """A `kindred run` of local, then a comparison in the same folder."""
    place = tmp_path_factory.mktemp("results")
    kindred("run", "--strategy=local", f"--output-dir={place}", *SMALL)
    done = kindred("compare", METHODS, "--seeds=0,1", "--set=heurfedamp:sigma=25", f"--output-dir={place}", *SMALL)
    return place, done, content_in(place)


# --- A comparison -------------------------------------------------------------------------------------------


def test_a_finished_run_is_reused_whichever_command_ran_it(compared):
    place, done, content = compared
    assert how(done) == ["reused", "run", "run", "run"]
    assert len(folders(place)) == 4
    again = kindred("compare", METHODS, "--seeds=0,1", "--set=heurfedamp:sigma=25", f"--output-dir={place}", *SMALL)
    assert how(again) == ["reused"] * 4 and len(folders(place)) == 4
    rewritten = content_in(place)  # in the same folder
    for name in content["strategies"]:
        assert rewritten["strategies"][name]["mean"] == content["strategies"][name]["mean"]


def test_a_comparison_has_the_results_of_its_runs(compared):
    place, done, content = compared
    (folder,) = place.glob("compare-*")
    read = {}
    for name, each in content["strategies"].items():
        assert [run["seed"] for run in each["runs"]] == [0, 1] and each["strategy"] == name
        read[name] = [json.loads((folder / run["folder"] / "summary.json").read_text()) for run in each["runs"]]
        for run, summary in zip(each["runs"], read[name], strict=True):
            assert run["summary"] == summary
            assert (summary["strategy"], summary["seed"]) == (name, run["seed"])
            settings = json.loads((folder / run["folder"] / "config.json").read_text())["settings"]
            assert settings["sigma"] == (25 if name == "heurfedamp" else "default") and settings["num-rounds"] == 2
        for key in ("accuracy-best", "accuracy", "accuracy-weighted", "accuracy-p10", "samples-trained", "seconds"):
            numbers = [summary[key] for summary in read[name]]
            assert each["mean"][key] == pytest.approx(statistics.mean(numbers))
            assert each["std"][key] == pytest.approx(statistics.stdev(numbers))
        assert each["mean"]["bytes"] == statistics.mean(each["bytes-down"] + each["bytes-up"] for each in read[name])
    last = {name: [[client["accuracy"] for client in summary["clients"]] for summary in read[name]] for name in read}
    shares = [
        statistics.mean(a > b for a, b in zip(ours, alone, strict=True))
        for ours, alone in zip(last["heurfedamp"], last["local"], strict=True)
    ]
    assert content["strategies"]["heurfedamp"]["mean"]["better-than-local"] == pytest.approx(statistics.mean(shares))
    assert content["strategies"]["local"]["mean"]["better-than-local"] is None
    assert content["strategies"]["heurfedamp"]["wilcoxon"]["pairs"] == 2 * 4  # clients and seeds
    assert content["strategies"]["local"]["wilcoxon"] is None and content["reference"] == "local"
    assert content["strategies"]["heurfedamp"]["settings"] == {"sigma": 25.0}
    assert content["settings"]["num-clients"] == 4 and content["seeds"] == [0, 1]
    best = content["strategies"]["heurfedamp"]
    cell = f"{100 * best['mean']['accuracy-best']:.1f} ± {100 * best['std']['accuracy-best']:.1f}"
    for text in (done.stdout, next(folder.glob("*.md")).read_text()):
        assert cell in text and "two-sided" in text


def test_the_files_record_the_command_and_versions(compared):
    place, _, content = compared
    (folder,) = place.glob("compare-*")
    command = content["command"]
    assert command.startswith(f"kindred compare {METHODS} --seeds=0,1 ") and content["versions"]["flwr"]
    markdown = (folder / "comparison.md").read_text()
    with open(folder / "comparison.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["seed"] for row in rows] == ["0", "1", "mean", "std"] * 2
    for row in rows[:2]:
        assert (folder / row["folder"] / "summary.json").is_file() and row["folder"] in markdown
    assert command in markdown and all(row["command"] == command and row["scale"] == "1.0" for row in rows)
    assert float(rows[2]["accuracy"]) == content["strategies"]["local"]["mean"]["accuracy"]
    assert all("torch " in row["versions"] for row in rows if row["seed"] != "std") and "torch " in markdown
    pixels = imread(folder / "comparison.png")
    assert pixels.shape[1] > 600 and pixels[..., :3].std() > 0.02


def test_the_same_command_continues_an_interrupted_comparison(compared, tmp_path, monkeypatch):
    """The second run is interrupted after its last round, so that only its end remains."""
    _, _, content = compared
    command = ["compare", METHODS, "--set=heurfedamp:sigma=25", f"--output-dir={tmp_path}", *SMALL]
    finish, calls = RunFolder.finish, []

    def interrupted(self, *arguments, **named):
        calls.append(self.path)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return finish(self, *arguments, **named)

    monkeypatch.setattr(RunFolder, "finish", interrupted)
    cut = kindred(*command, code=130)
    assert "the same command continues" in cut.stdout
    found = content_in(tmp_path)["strategies"]
    assert [len(found[name]["runs"]) for name in found] == [1, 0] and found["heurfedamp"]["mean"]["accuracy"] is None
    done = kindred(*command)
    assert how(done) == ["reused", "resumed"] and len(folders(tmp_path)) == 2
    for name, each in content_in(tmp_path)["strategies"].items():
        (run,), whole = each["runs"], content["strategies"][name]["runs"][0]
        assert run["metrics"]["accuracy"] == whole["metrics"]["accuracy"] and run["hash"] == whole["hash"]


def test_a_run_that_another_process_works_on_is_not_to_be_removed(tmp_path, monkeypatch):
    command = ["compare", "--strategies=local", f"--output-dir={tmp_path}", *SMALL]
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "finish", interrupt)
        kindred(*command, code=130)
    (folder,) = (tmp_path / name for name in folders(tmp_path) if not name.startswith("compare"))
    with RunFolder(read_config(folder)["settings"] | {"resume": str(folder)}).locked():
        failed = kindred(*command, code=1).stdout
    assert "failed, " in failed and "another process is at work on" in failed and "remove" not in failed


def interrupt(*_, **__):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("file", "content"),
    [("summary.json", b""), ("summary.json", b'{"strategy": 1}'), ("predictions/client-0.safetensors", b"short")],
)
def test_damaged_results_are_named_in_one_line(file, content, compared, tmp_path):
    place, _, _ = compared
    shutil.copytree(place, tmp_path / "again")
    damaged = sorted((tmp_path / "again").glob(f"*local*/{file}"))[0]
    damaged.write_bytes(content)
    command = ["compare", METHODS, "--set=heurfedamp:sigma=25", f"--output-dir={tmp_path / 'again'}", *SMALL]
    done = kindred(*command, code=2)
    assert f"{damaged} cannot be read" in done.stderr and "run it again" in done.stderr


def test_a_reused_run_that_lost_replies_is_named(compared, tmp_path):
    place, _, _ = compared
    shutil.copytree(place, tmp_path / "again")
    for file in (tmp_path / "again").glob("*local*/summary.json"):
        summary = json.loads(file.read_text())
        assert summary["asked"] == summary["answered"] == 8  # four clients, two rounds
        file.write_text(json.dumps(summary | {"answered": 5}))
    done = kindred("compare", "--strategies=local", f"--output-dir={tmp_path / 'again'}", *SMALL)
    assert how(done) == ["reused"]
    assert "local, seed 0: 3 of 8 messages to train had no reply that could be used" in " ".join(done.stdout.split())


def test_a_verdict_over_some_of_the_clients_says_so(compared, tmp_path):
    place, _, _ = compared
    shutil.copytree(place, tmp_path / "again")
    for file in (tmp_path / "again").glob("*local*/predictions/client-[01].safetensors"):
        file.unlink()
    done = kindred("compare", METHODS, "--set=heurfedamp:sigma=25", f"--output-dir={tmp_path / 'again'}", *SMALL)
    (said,) = re.findall(r"heurfedamp: the verdict is over (\d+) of (\d+) clients", " ".join(done.stdout.split()))
    assert int(said[0]) == int(said[1]) - 2


def test_a_method_that_fails_is_reported_in_one_line_and_the_others_run(compared):
    place, _, _ = compared
    before = {path.name for path in place.glob("compare-*")}
    done = kindred(
        "compare",
        "--strategies=local,fedavg,heurfedamp",
        "--set=fedavg:model=digits-cnn,cnn2",
        "--set=heurfedamp:sigma=25",
        f"--output-dir={place}",
        *SMALL,
        code=1,
    )
    assert how(done) == ["reused", "failed", "reused"]
    (new,) = {path.name for path in place.glob("compare-*")} - before
    found = json.loads((place / new / "comparison.json").read_text())["strategies"]
    assert "one network" in found["fedavg"]["runs"][0]["reason"] and found["heurfedamp"]["mean"]["accuracy"] is not None
    for path in ("comparison.csv", "comparison.md"):
        assert "one network" in (place / new / path).read_text()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], ["--strategies", "--preset"]),
        (["--strategies=local,fedamb"], ["strategy", "fedamb", "fedamp"]),
        (["--strategies=local,[b]"], ["--strategies", "[b]"]),
        (["--preset=fedamp-table9"], ["--preset", "fedamp-table9", "fedamp-table3-fmnist"]),
        (["--strategies=local", "--seeds=0,x"], ["--seeds", "0,x", "whole numbers"]),
        (["--strategies=local", "--seeds=0,-1"], ["seed", "-1", "0 or more"]),
        (["--strategies=local", f"--seeds=0,{2**63}"], ["seed", str(2**63), "2^63"]),
        (["--strategies=local", "--seeds=,"], ["--seeds", "','", "whole numbers"]),
        (["--strategies=local", "--scale=0"], ["--scale", "0", "at most 1"]),
        (["--strategies=local", "--scale=nan"], ["--scale", "nan"]),
        (["--strategies=local", "--scale=1.5"], ["--scale", "1.5"]),
        (["--strategies=local", "--reference=fedavg"], ["--reference", "fedavg", "local"]),
        (["--strategies=local", "--set=fedavg:sigma=1"], ["fedavg", "local"]),
        (["--strategies=local", "--set=local:sigma=wide"], ["sigma", "wide", "more than 0"]),
        (["--strategies=local", "--set=local:sigme=1"], ["sigme", "sigma"]),
        (["--strategies=local", "--set=local:num-clients=9"], ["local:num-clients", "all"]),
        (["--strategies=local", "--set=seed=1"], ["seed", "--seeds"]),
        (["--strategies=local", "--set=local:seed=1"], ["seed", "--seeds"]),
        (["--strategies=local", "--set=local:"], ["'local:'", "key=value"]),
        (["--strategies=local", "--clients=5000"], ["num-clients", "5000", "samples"]),
        (["--strategies=local", "--dataset=npz"], ["data-dir is not set", "npz"]),
        (["--strategies=local", "--cpus-per-client=0"], ["--cpus-per-client", "0"]),
        (["--strategies=local", "--jobs=0"], ["--jobs is 0", "allowed: 1 to"]),
        (["--strategies=local", "--jobs=999"], ["--jobs is 999", "allowed: 1 to"]),
        (["--strategies=local", "--jobs=2", "--engine=flower"], ["--jobs is 2", "engine flower: 1"]),
        (["--strategies=federico", "--vary=beta"], ["--vary", "'beta'", "key=value,value"]),
        (["--strategies=federico", "--vary=beta=0.5"], ["--vary beta", "0.5", "two or more"]),
        (["--strategies=federico", "--vary=beta=0.5,0.50"], ["--vary beta", "two or more different values"]),
        (["--strategies=federico", "--vary=beta=0.5,2"], ["beta", "2.0", "at most 1"]),
        (["--strategies=federico", "--vary=beta=0.5,high"], ["beta", "high", "at most 1"]),
        (["--strategies=federico", "--vary=bata=0.5,1"], ["bata", "beta"]),
        (["--strategies=local", "--vary=beta=0.5,1"], ["--vary beta", "none of local"]),
        (["--strategies=federico", "--vary=beta=0.5,1", "--vary=epsilon=0,1"], ["--vary", "beta, epsilon", "one"]),
        (["--strategies=federico", "--vary=beta=0.5,1", "--vary=beta=1,0.2"], ["--vary", "beta=1,0.2", "once"]),
        (["--strategies=local,fedavg,local"], ["local 2 times", "allowed: once", "--set NAME:strategy=local"]),
        (["--strategies=local", "--seeds=0,1,0"], ["--seeds has 0 2 times", "allowed: once"]),
        (["--strategies=federico", "--vary=beta=0.5,1", "--set=beta=1"], ["beta", "twice"]),
        (["--strategies=federico", "--vary=beta=0.5,1", "--set=federico:beta=1"], ["beta", "twice"]),
        (["--strategies=local", "--vary=num-clients=4,8"], ["--vary num-clients", "same data"]),
        (["--strategies=local", "--vary=strategy=local,fedavg"], ["--vary strategy"]),
        (["--strategies=fedamp,fedamp-1", "--vary=sigma=1,2", "--set=fedamp-1:strategy=local"], ["fedamp-1", "rename"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_bad_input_gets_one_line_and_code_2_and_creates_no_file(arguments, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = kindred("compare", *arguments, code=2)
    assert done.stdout == "" and done.stderr.count("\n") == 1
    for word in says:
        assert word in done.stderr
    assert list(tmp_path.iterdir()) == []


# --- By hand ------------------------------------------------------------------------------------------------


def carry_out(plan, execute, *more):
    """Carry out a comparison whose runs a stand-in executes, one after another."""
    return comparison_runs.carry_out(plan, lambda runs: ((number, execute(config)) for number, config in runs), *more)


def prepared_runs(accuracies: dict[tuple[str, int], list[float]], failing: tuple[tuple[str, int], ...] = ()):
    """Return a stand-in for runs of given accuracies; the first round is best, a tenth above the last."""

    def execute(config: Config) -> Outcome:
        who = (config.strategy, config.seed)
        if who in failing:
            return Outcome(1, "it broke\nin two lines")
        found = accuracies[who]
        folder = RunFolder(config.run_config(), samples=comparison_runs.samples_of_run(config))
        mean = statistics.mean(found)
        (folder.path / "rounds.csv").write_text(f"round,accuracy\n1,{mean + 0.1}\n2,{mean}\n")
        (folder.path / "summary.json").write_text(
            json.dumps(
                {
                    "accuracy-best": mean + 0.1,
                    "accuracy": mean,
                    "accuracy-weighted": mean,
                    "accuracy-p10": min(found),
                    "bytes-down": 2_000_000,
                    "bytes-up": 1_000_000,
                    "samples-trained": 4000,
                    "samples-predicted": 0,
                    "seconds": 1.0 + config.seed,
                    "clients": [{"client": i, "accuracy": accuracy} for i, accuracy in enumerate(found)],
                }
            )
        )
        return Outcome(0, "", folder.path)

    return execute


def test_mean_deviation_and_share_better_than_local_by_hand(tmp_path):
    plan = make_plan(["local", "fedavg"], {"output-dir": str(tmp_path)}, {}, seeds=[0, 1])
    execute = prepared_runs(
        {("local", 0): [0.5, 0.7], ("local", 1): [0.5, 0.5], ("fedavg", 0): [0.6, 0.7], ("fedavg", 1): [0.8, 0.7]}
    )
    content, code = carry_out(plan, execute, lambda line: None, {}, ["kindred", "compare", "a b"])
    assert code == 0 and content["command"] == "kindred compare 'a b'"
    columns = columns_of(content)
    mean = {title: cells[1] for title, cells in columns.items()}
    # Last means .65 and .75: mean .7, deviation .1 / sqrt(2). Better than local: 1 of 2, then 2 of 2.
    assert mean["runs"] == "2/2"
    assert mean["last %"] == "70.0 ± 7.1" and mean["best %"] == "80.0 ± 7.1"
    assert mean["bottom decile %"] == "65.0 ± 7.1" and mean["above local %"] == "75.0 ± 35.4"
    assert (
        mean["MB both ways"] == "3.0 ± 0.0"
        and mean["seconds"] == "1.5 ± 0.7"
        and mean["thousand samples trained"] == "4.0 ± 0.0"
    )
    # Differences .1, 0, .3, .2: the three that are not 0 are all positive, which happens in 2 of 8 cases.
    assert mean["p against local"] == "0.250" and mean["better : worse : equal"] == "3 : 0 : 1"
    assert columns["strategy"] == ["local", "fedavg"] and columns["above local %"][0] == "-"
    assert "million numbers sent" not in columns and not any("paper" in column for column in columns)


def test_after_each_run_but_the_last_a_line_has_the_means_so_far(tmp_path):
    plan = make_plan(["local", "fedavg"], {"output-dir": str(tmp_path)}, {}, seeds=[0, 1])
    found = {("local", 0): [0.5, 0.7], ("local", 1): [0.5, 0.5], ("fedavg", 0): [0.6, 0.7], ("fedavg", 1): [0.8, 0.7]}
    said = []
    carry_out(plan, prepared_runs(found, failing=(("local", 1),)), said.append, {}, ["kindred"])
    assert [line for line in said if line.startswith("so far")] == [
        "so far, last %: local 60.0 (1/2)",
        "so far, last %: local 60.0 (1/2), fedavg 65.0 (1/2)",
    ]


def test_a_failed_run_is_excluded_from_the_means(tmp_path):
    plan = make_plan(["local", "fedavg"], {"output-dir": str(tmp_path)}, {}, seeds=[0, 1])
    found = {("local", 0): [0.5, 0.7], ("local", 1): [0.5, 0.5], ("fedavg", 0): [0.6, 0.7]}
    said = []
    content, code = carry_out(plan, prepared_runs(found, failing=(("fedavg", 1),)), said.append, {}, ["kindred"])
    assert code == 1 and said[-1] == "run 4/4  fedavg, seed 1: failed, it broke in two lines"
    fedavg = content["strategies"]["fedavg"]
    assert fedavg["mean"]["accuracy"] == pytest.approx(0.65) and fedavg["std"]["accuracy"] is None
    assert fedavg["wilcoxon"]["pairs"] == 2 and columns_of(content)["runs"] == ["2/2", "1/2"]
    assert any("it broke" in line for line in remarks(content))
    write(content, plan.folder)
    assert "it broke" in (plan.folder / "comparison.md").read_text()
    files = {"comparison.json", "comparison.csv", "comparison.md", "comparison.png"}
    assert {path.name for path in plan.folder.iterdir()} >= files


def test_a_name_that_begins_like_a_formula_stays_text_in_the_table(tmp_path):
    plan = make_plan(["local", "-b"], {"output-dir": str(tmp_path)}, {"-b": {"strategy": "fedavg"}})
    execute = prepared_runs({("local", 0): [0.5, 0.7], ("fedavg", 0): [0.5, 0.6]})
    content, _ = carry_out(plan, execute, lambda line: None, {}, ["kindred"])
    lines = list(csv.DictReader(io.StringIO(as_csv(content).decode())))
    assert [line["strategy"] for line in lines] == ["local"] * 3 + ["'-b"] * 3


def test_a_comparison_completes_although_a_picture_or_report_fails(tmp_path, monkeypatch, caplog):
    plan = make_plan(["local"], {"output-dir": str(tmp_path)}, {})
    content, _ = carry_out(plan, prepared_runs({("local", 0): [0.5, 0.7]}), lambda line: None, {}, ["kindred"])
    monkeypatch.setattr(comparison_pictures, "comparison_figure", lambda *_: 1 / 0)
    monkeypatch.setattr(comparison_files, "write_report", lambda *_: 1 / 0)
    write(content, plan.folder)
    assert {path.name for path in plan.folder.iterdir()} == {"comparison.json", "comparison.csv", "comparison.md"}
    for name in ("comparison.png", "report.html"):
        assert f"{plan.folder / name} cannot be written (ZeroDivisionError" in caplog.text


def test_runs_of_other_versions_or_without_an_image_record_are_reused_with_a_notice(tmp_path):
    plan = make_plan(["local"], {"output-dir": str(tmp_path)}, {})
    carry_out(plan, prepared_runs({("local", 0): [0.5, 0.7]}), lambda line: None, {}, ["kindred"])
    (path,) = tmp_path.glob("*/config.json")
    config = json.loads(path.read_text())
    config["versions"]["torch"] = "2.0"
    config["images"] = None
    path.write_text(json.dumps(config))
    (tmp_path / "not-a-run").mkdir()
    (tmp_path / "not-a-run" / "config.json").write_text('{"settings": {"dataset": "cheese"}}')
    said = []
    carry_out(plan, prepared_runs({}), said.append, {}, ["kindred"])
    unlike = "torch was 2.0, its samples are not recorded"
    assert said == [f"run 1/1  local, seed 0: reused, {path.parent} ({unlike})"]


def test_other_images_need_another_run_and_moved_ones_do_not(tmp_path):
    def write(name: str, seed: int) -> str:
        images = np.random.default_rng(seed).integers(0, 256, (2, 80, 4, 4), dtype=np.uint8)
        labels = np.arange(80) % 2
        np.savez(tmp_path / name, x_train=images[0], y_train=labels, x_test=images[1], y_test=labels)
        return str(tmp_path / name)

    def said(data_dir: str, execute) -> list[str]:
        lines = []
        given = {
            "dataset": "npz",
            "data-dir": data_dir,
            "partition": "iid",
            "num-clients": 2,
            "samples-per-client": 10,
            "output-dir": str(tmp_path / "results"),
        }
        carry_out(make_plan(["local"], given, {}), execute, lines.append, {}, ["kindred"])
        return lines

    execute = prepared_runs({("local", 0): [0.5, 0.7]})
    assert said(write("a.npz", 0), execute) == ["run 1/1  local, seed 0"]
    (tmp_path / "a.npz").rename(tmp_path / "b.npz")
    assert "reused" in said(str(tmp_path / "b.npz"), execute)[0]
    forget_federations()  # a new command would read the file again
    assert said(write("b.npz", 1), execute) == ["run 1/1  local, seed 0"]
    forget_federations()
    assert "reused" in said(write("c.npz", 0), execute)[0] and "reused" in said(str(tmp_path / "b.npz"), execute)[0]


def test_a_client_with_a_name_is_one_in_all_seeds() -> None:
    def summary(names: bool, *values: float | None) -> dict[str, Any]:
        clients = [{"client": k, "accuracy": value} for k, value in enumerate(values)]
        return {"clients": [each | {"name": "ab"[k]} for k, each in enumerate(clients)] if names else clients}

    for names, pairs in ((True, [(0.375, 0.25), (0.5, 0.5)]), (False, [(0.25, 0.5), (0.5, 0.0), (0.5, 0.5)])):
        # Client b has no value in seed 1.
        first, second = paired(
            {0: summary(names, 0.5, 0.5), 1: summary(names, 0.25, None)},
            {0: summary(names, 0.0, 0.5), 1: summary(names, 0.5, 0.5), 2: summary(names, 0.1, 0.1)},
            "accuracy",
        )
        assert list(zip(first, second, strict=True)) == pairs


@pytest.mark.parametrize(
    ("ours", "reference", "better", "worse", "equal", "statistic", "p"),
    [
        ([0.6, 0.8, 0.9], [0.5, 0.6, 0.6], 3, 0, 0, 0, 2 / 8),  # ranks 1, 2, 3, all on one side
        ([0.6, 0.8, 0.6], [0.5, 0.6, 0.9], 2, 1, 0, 3, 1.0),  # 1 + 2 against 3
        ([0.93, 0.53, 0.5], [0.9, 0.5, 0.5], 2, 0, 1, 0, None),  # .03 twice, but for the last bits
        ([0.5, 0.7], [0.5, 0.7], 0, 0, 2, 0, 1.0),
        ([0.6, 0.6, 0.4, 0.7], [0.5, 0.5, 0.5, 0.5], 3, 1, 0, 2, None),  # ranks 2, 2, 2 and 4; 2 below
    ],
)
def test_the_wilcoxon_test_by_hand(ours, reference, better, worse, equal, statistic, p):
    result = signed_rank(np.array(ours), np.array(reference))
    assert (result["better"], result["worse"], result["equal"]) == (better, worse, equal)
    assert result["pairs"] == len(ours) and result["statistic"] == statistic
    assert p is None or result["p"] == pytest.approx(p)
    assert signed_rank(np.array([]), np.array([])) is None


def test_a_run_is_identified_by_all_settings_that_affect_its_results():
    base = Config(dataset="mnist").run_config()
    for same in (
        {"output-dir": "there"},
        {"resume": "that"},
        {"checkpoint-every": 5},
        {"keep-checkpoints": 1},
        {"data-dir": "moved"},
    ):
        assert run_hash(base | same) == run_hash(base)
    others = [{"seed": 1}, {"strategy": "local"}, {"sigma": 99.0}, {"num-rounds": 16}, {"precision": "bfloat16"}]
    assert len({run_hash(base | other) for other in [{}, *others]}) == 6
    for dataset in ("npz", "office-home"):  # the folder determines the images
        settings = [base | {"dataset": dataset, "data-dir": place} for place in ("a", "b")]
        assert len({run_hash(each) for each in settings}) == 2 and len({run_hash(each, "1") for each in settings}) == 1
    assert len({run_hash(base, images) for images in (None, "1", "2")}) == 3


def test_a_finished_run_is_preferred_to_an_interrupted_one(tmp_path):
    config = Config(strategy="local", output_dir=str(tmp_path))
    done = prepared_runs({("local", 0): [0.5]})(config).results
    images = comparison_runs.samples_of_run(config)
    cut = RunFolder(config.run_config(), samples=images).path
    assert cut.name > done.name
    assert known_runs(tmp_path) == {run_hash(config.run_config(), images): done}


# --- Scale --------------------------------------------------------------------------------------------------


def test_a_scale_reduces_rounds_and_images_and_every_output_states_it(tmp_path):
    plan = make_plan(
        ["local", "fedavg"], {"output-dir": str(tmp_path), "num-rounds": 20}, {"fedavg": {"num-rounds": 60}}, scale=0.1
    )
    local, fedavg = plan.configs["local"], plan.configs["fedavg"]
    # Digits have 40 images a client by default; 4 would be too few to be meaningful.
    assert (local.num_rounds, local.samples_per_client, local.alpha_decay_every) == (2, 10, 3)
    assert (fedavg.num_rounds, fedavg.samples_per_client) == (6, 10)
    found = {(name, 0): [0.5, 0.6] for name in plan.configs}
    content, _ = carry_out(plan, prepared_runs(found), lambda line: None, {}, ["kindred"])
    assert content["scale"] == 0.1 and content["title"].endswith("scale 0.1")
    assert content["scaled"] == {"num-rounds": [20, 2], "samples-per-client": [40, 10]}
    assert "num-rounds 2 instead of 20, samples-per-client 10 instead of 40" in remarks(content)[0]
    write(content, plan.folder)
    assert remarks(content)[0] in (plan.folder / "comparison.md").read_text()
    with open(plan.folder / "comparison.csv", newline="") as file:
        assert {row["scale"] for row in csv.DictReader(file)} == {"0.1"}
    assert make_plan(["local"], {}, {}).scaled == {} and "scale" not in make_plan(["local"], {}, {}).title


def test_remarks_on_a_scale_name_only_what_it_changed() -> None:
    def said(scale: float) -> str:
        plan = make_plan(["local"], {"num-rounds": 2}, {}, scale=scale)
        content, _ = carry_out(plan, prepared_runs({("local", 0): [0.5, 0.6]}), lambda line: None, {}, ["kindred"])
        return remarks(content)[0]

    assert "num-rounds" not in said(0.9) and "samples-per-client 36 instead of 40" in said(0.9)
    assert said(0.99) == "Scale 0.99 changes neither the rounds nor the samples, which are few already."


def test_images_a_client_are_counted_as_the_setting_counts_them():
    def images(**settings) -> float:
        return samples_a_client(Config(num_clients=4, num_groups=2, **settings))

    assert images() == 40 and images(samples_per_client=7) == 7
    assert images(partition="label-groups") == round(899 / 4, 1)  # training and test images together, of all 899


# --- Presets ------------------------------------------------------------------------------------------------

# For EMNIST, as many images as its preset needs.
SIZES = {
    "mnist": (60_000, 10_000),
    "fashion-mnist": (60_000, 10_000),
    "emnist": (120_000, 10_000),
    "cifar10": (50_000, 10_000),
    "cifar100": (50_000, 10_000),
    "office-home": (12_471, 3_117),
}


def partition_of(settings):
    """Return the partition of a preset's settings, for images of each class in turn."""
    train, test = SIZES[settings["dataset"]]
    classes = DATASETS[settings["dataset"]].num_classes or 65
    keys = ("dataset", "num-clients", "num-groups", "samples-per-client", "with-replacement", "dirichlet-alpha")
    return divide(
        settings["partition"],
        np.arange(train) % classes,
        np.arange(test) % classes,
        classes,
        seed=0,
        held_out=0,
        **{key.replace("-", "_"): settings[key] for key in keys},
    )


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_is_complete_and_its_settings_are_valid(name):
    preset = load_preset(name)
    plan = make_plan([], {}, {}, preset=preset)
    assert preset.metric in numbers_of(Headline()) and plan.reference == preset.reference
    assert re.search(r"arXiv:\d{4}\.\d{5}: (Table|Figure) \d", preset.source) and preset.measures and preset.notes
    assert list(preset.paper) == (list(preset.strategies) if ": Table" in preset.source else [])
    assert list(dict.fromkeys(variant.of for variant in plan.variants.values())) == list(preset.strategies)
    for numbers in preset.paper.values():
        assert 0 < numbers["mean"] < 100 and numbers.keys() <= {"mean", "std", "floats"}
    for variant, config in plan.configs.items():
        entry, method = plan.variants[variant].of, REGISTRY[config.strategy]
        concern = {setting.key for setting in (*method.settings, *TRAINING)} | {"strategy", "num-rounds"}
        assert preset.strategies[entry].keys() <= concern
        assert method.mixed_networks or len(parse_models(config.model)) == 1
    settings = plan.common.run_config()
    for key, value in preset.settings.items():
        assert settings[key] == value

    partition = partition_of(settings)
    assert len(partition.train) == settings["num-clients"]
    for config in plan.configs.values():
        by_groups = config.own_settings().get("self_weight") == "groups"
        given = {"groups": dict(enumerate(partition.groups.tolist()))} if by_groups else {}
        if not REGISTRY[config.strategy].distils:
            assert make_strategy(config, **given).name == config.strategy


@pytest.mark.parametrize(
    ("dataset", "sizes"),
    [("mnist", [20] * 5), ("fmnist", [20] * 5), ("cifar100", [5] * 20), ("emnist", [10, 26, 26])],
)
def test_the_presets_of_fedamp_table_3_give_clients_the_papers_self_weight_by_their_groups(dataset, sizes):
    plan = make_plan([], {}, {}, preset=load_preset(f"fedamp-table3-{dataset}"))
    groups = partition_of(plan.common.run_config()).groups
    assert np.bincount(groups).tolist() == sizes  # N_i + 1 of each group
    assert [plan.configs[name].self_weight for name in ("fedamp", "heurfedamp")] == ["groups"] * 2


def test_the_presets_have_the_papers_numbers_and_settings():
    fmnist, emnist = load_preset("fedamp-table3-fmnist"), load_preset("fedamp-table3-emnist")
    assert fmnist.paper["local"] == {"mean": 86.73} and fmnist.paper["heurfedamp"] == {"mean": 91.37}
    assert (fmnist.strategies["fedamp"]["sigma"], fmnist.strategies["heurfedamp"]["sigma"]) == (10, 100)
    assert fmnist.strategies["apfl"]["mixing-weight"] == 0.75 and fmnist.settings["num-rounds"] == 90
    assert (emnist.paper["heurfedamp"]["mean"], emnist.settings["num-clients"]) == (81.47, 62)
    assert load_preset("fedamp-table1-fmnist").strategies["fedamp"]["sigma"] == 100
    rico = load_preset("federico-table1-cifar10-2")
    assert rico.paper["federico"] == {"mean": 56.61, "std": 2.51} and rico.paper["clustered-fl"]["mean"] == 11.50
    assert load_preset("federico-table1-cifar100-4").paper["federico"]["mean"] == 41.41
    ckt = load_preset("perfed-ckt-table1-10")
    assert ckt.paper["fedavg"] == {"mean": 15.53, "std": 1.42, "floats": 2150e7}
    assert ckt.paper["perfed-ckt-3"] == {"mean": 74.31, "std": 0.40, "floats": 5.2e7}
    assert ckt.paper["fedfomo"]["floats"] == 3900e7 and ckt.strategies["perfed-ckt-3"]["num-clusters"] == 3
    assert load_preset("perfed-ckt-table2-15").paper["perfed-ckt-2"]["mean"] == 76.14


@pytest.mark.parametrize("name", [name for name in preset_names() if name.startswith("federico-")])
def test_the_presets_of_federico_have_the_bounds_and_the_adam_of_fedems_code(name):
    strategies = load_preset(name).strategies
    if "clustered-fl" in strategies:
        bounds = strategies["clustered-fl"]
        assert (bounds["criterion"], bounds["eps1"], bounds["eps2"]) == ("coordinate", 0.4, 1.6)
    if "fedem" in strategies:
        assert strategies["fedem"]["keep-optimizer"] is True and strategies["fedem"]["weight-decay"] == 5e-4


@pytest.mark.parametrize("m", [10, 15])
@pytest.mark.parametrize("table", [1, 2])
def test_perfed_ckts_presets_sample_the_same_m_clients_and_step_alike_for_all_methods(table, m):
    preset = load_preset(f"perfed-ckt-table{table}-{m}")
    plan = make_plan([], {}, {}, preset=preset)
    assert int(preset.settings["num-clients"] * preset.settings["fraction-train"]) == m
    for name, config in plan.configs.items():
        settings = config.run_config()
        assert settings["sampling"] == "uniform" and settings["fraction-train"] == m / 100
        assert settings["optimizer"] == "sgd" and settings["learning-rate"] == 0.001
        if "sgd-learning-rate" in {each.key for each in REGISTRY[config.strategy].settings}:
            assert settings["sgd-learning-rate"] == 0.001, name
    assert plan.configs["perfed-ckt-2"].distill_weight == 2 and plan.configs["perfed-ckt-2"].local_steps == 50


@pytest.mark.parametrize("m", [10, 15])
def test_the_papers_numbers_sent_are_those_of_200_rounds_with_the_presets_m(m):
    one, two = (load_preset(f"perfed-ckt-table{table}-{m}") for table in (1, 2))
    for c in (1, 2, 3, 4):
        due = 200 * floats_communicated(one.settings["public-size"], 10, m, c)
        assert one.paper[f"perfed-ckt-{c}"]["floats"] == two.paper[f"perfed-ckt-{c}"]["floats"] == due
    # Models up, and those that are broadcast; the paper gives three digits.
    models = {"fedavg": m + 1, "ditto": m + 1, "hypcluster-2": m + 2, "hypcluster-6": m + 6, "fedfomo": m + m}
    vgg11 = 9_756_426  # parameters
    for name, sent in models.items():
        assert one.paper[name]["floats"] == pytest.approx(200 * vgg11 * sent, abs=10e7)
    assert one.strategies["fedfomo"]["num-neighbours"] == m


@pytest.fixture
def without_images(monkeypatch):
    """Skip the check that images exist, since these would have to be downloaded."""
    monkeypatch.setattr(comparison_runs, "samples_of_run", lambda config: None)


def test_the_command_overrides_the_preset(tmp_path, without_images):
    preset = load_preset("fedamp-table3-fmnist")
    plan = make_plan(
        ["local", "scaffold", "fedamp", "fedrep"],
        {"num-rounds": 10, "batch-size": 50, "output-dir": str(tmp_path)},
        {"fedamp": {"sigma": 7.0}},
        preset=preset,
    )
    assert [config.num_rounds for config in plan.configs.values()] == [10] * 4  # scaffold's 600 too
    assert (plan.configs["fedamp"].sigma, plan.configs["fedamp"].self_weight) == (7, "groups")
    assert plan.reference == "local" and plan.common.batch_size == 50 and plan.common.local_epochs == 10
    found = {
        (name, 0): [accuracy, accuracy] for name, accuracy in zip(plan.configs, (0.8, 0.7, 0.75, 0.6), strict=True)
    }
    content, _ = carry_out(plan, prepared_runs(found), lambda line: None, {}, ["kindred"])
    assert content["preset"]["changed"] == {"num-rounds": 10, "batch-size": 50, "fedamp:sigma": 7.0}
    assert content["strategies"]["scaffold"]["paper"] == {"mean": 0.402}
    assert content["strategies"]["fedrep"]["paper"] is None
    columns = columns_of(content)
    assert list(columns)[2:4] == ["best %", "paper, best %"]
    assert columns["paper, best %"] == ["86.73", "40.20", "90.97", "-"]
    said = remarks(content)
    assert "Different from the preset: num-rounds 10, batch-size 50, fedamp:sigma 7.0." in said
    assert "Best first, paper: fedamp, local, scaffold." in said  # over the methods that both have
    assert "Best first, here: local, fedamp, scaffold." in said


def test_the_papers_results_are_shown_beside_the_measured_ones(tmp_path, without_images):
    plan = make_plan(
        ["local", "perfed-ckt-3"],
        {"output-dir": str(tmp_path)},
        {},
        preset=load_preset("perfed-ckt-table1-10"),
        seeds=[0, 1],
    )
    execute = prepared_runs({(name, seed): [0.5, 0.6] for name in ("local", "perfed-ckt") for seed in (0, 1)})
    content, _ = carry_out(plan, execute, lambda line: None, {}, ["kindred"])
    content["strategies"]["perfed-ckt-3"]["mean"]["floats"] = 13e6
    columns = columns_of(content)
    assert columns["paper, best %"] == ["64.02 ± 0.48", "74.31 ± 0.40"]
    assert columns["million numbers sent"] == ["-", "13.0"]
    assert columns["paper, million numbers sent"] == ["-", "52.0"]
    assert content["strategies"]["perfed-ckt-3"]["strategy"] == "perfed-ckt"


def test_a_method_can_occur_in_a_comparison_more_than_once(tmp_path):
    plan = make_plan(
        ["wide", "narrow"],
        {"output-dir": str(tmp_path)},
        {"wide": {"strategy": "fedamp", "sigma": 100.0}, "narrow": {"strategy": "fedamp", "sigma": 1.0}},
    )
    assert [config.strategy for config in plan.configs.values()] == ["fedamp"] * 2
    assert plan.own == {"wide": {"sigma": 100.0}, "narrow": {"sigma": 1.0}}
    keys = {run_hash(config.run_config()) for config in plan.configs.values()}
    assert len(keys) == 2
    with pytest.raises(ConfigError, match="strategy is 'wide', allowed: one of fedamp"):
        make_plan(["wide"], {}, {"wide": {"sigma": 1.0}})


def test_the_presets_of_figures_have_the_papers_settings_and_those_of_their_tables():
    table, epochs, dropped = (load_preset(f"fedamp-{name}-emnist") for name in ("table3", "fig5", "fig8"))
    for figure in (epochs, dropped):
        assert list(figure.strategies) == [
            "local", "fedavg", "fedprox", "fedavg-ft", "fedprox-ft", "fedamp", "heurfedamp"
        ]  # fmt: skip
        assert all(figure.strategies[name] == table.strategies[name] for name in figure.strategies)
        assert set(table.notes) < set(figure.notes) and figure.paper == {} and figure.metric == table.metric
    assert epochs.settings == {**table.settings, "max-local-epochs": 19} and epochs.vary == {}
    assert dropped.settings == table.settings and dropped.vary == {"fraction-train": [0.9, 0.7, 0.5]}
    plan = make_plan([], {}, {}, preset=dropped)
    assert len(plan.configs) == 21 and plan.configs["fedamp-0.7"].fraction_train == 0.7
    sweep, momentum = load_preset("federico-fig6b"), load_preset("federico-fig7")
    assert sweep.vary == {"num-neighbours": [0, 1, 3, 5, 7]} and momentum.vary == {"beta": [0.1, 0.3, 0.6, 0.9]}
    for preset, dataset in ((sweep, "cifar100"), (momentum, "office-home")):
        assert (preset.settings["dataset"], preset.settings["num-groups"]) == (dataset, 4)
        assert list(preset.strategies) == ["federico"] and preset.seeds == [0]


# --- A varied setting ---------------------------------------------------------------------------------------


def test_methods_that_use_the_varied_setting_run_with_each_value_and_others_once():
    plan = make_plan(["federico", "local"], {}, {"federico": {"epsilon": 0.5}}, vary={"num-neighbours": [1, 3]})
    assert list(plan.configs) == ["federico-1", "federico-3", "local"]
    assert [plan.configs[f"federico-{m}"].num_neighbours for m in (1, 3)] == [1, 3]
    assert all(plan.configs[f"federico-{m}"].epsilon == 0.5 for m in (1, 3))
    assert plan.own == {
        "federico-1": {"epsilon": 0.5, "num-neighbours": 1},
        "federico-3": {"epsilon": 0.5, "num-neighbours": 3},
        "local": {},
    }
    assert plan.reference == "federico-1" and plan.title == "digits, rotated, num-neighbours 1, 3, seed 0"
    plain = make_plan(["federico", "local"], {}, {"federico": {"epsilon": 0.5, "num-neighbours": 3}})
    assert run_hash(plan.configs["federico-3"].run_config()) == run_hash(plain.configs["federico"].run_config())


def test_training_and_rounds_are_varied_for_all_methods_and_a_shared_name_by_type():
    plan = make_plan(["local", "fedavg"], {}, {}, vary={"learning-rate": [0.1, 1e-06]})
    assert list(plan.configs) == ["local-0.1", "local-1e-06", "fedavg-0.1", "fedavg-1e-06"]
    plan = make_plan(["apfl"], {}, {}, vary={"adapt-mixing": [True, False]})
    assert [config.adapt_mixing for config in plan.configs.values()] == [True, False]
    assert list(plan.configs) == ["apfl-true", "apfl-false"]
    plan = make_plan(["wide"], {}, {"wide": {"strategy": "heurfedamp"}}, vary={"sigma": [10, 100]})
    assert [config.strategy for config in plan.configs.values()] == ["heurfedamp"] * 2


@pytest.fixture
def dropped(tmp_path):
    """A comparison of local and fedavg over fraction-train, by hand."""
    plan = make_plan(["local", "fedavg"], {"output-dir": str(tmp_path)}, {}, vary={"fraction-train": [0.9, 0.5]},
                     seeds=[0, 1])  # fmt: skip
    found = {
        ("local", 0.9): [0.5, 0.7],
        ("local", 0.5): [0.3, 0.3],
        ("fedavg", 0.9): [0.6, 0.8],
        ("fedavg", 0.5): [0.2, 0.4],
    }

    def execute(config: Config) -> Outcome:
        accuracies = [each + 0.1 * config.seed for each in found[config.strategy, config.fraction_train]]
        return prepared_runs({(config.strategy, config.seed): accuracies})(config)

    content, code = carry_out(plan, execute, lambda line: None, {}, ["kindred"])
    assert code == 0
    return plan, content


def test_variants_are_compared_with_those_of_the_same_value(dropped):
    plan, content = dropped
    assert (plan.reference, content["varied"]) == ("local", {"setting": "fraction-train", "values": ["0.9", "0.5"]})
    about = {name: (each["of"], each["value"]) for name, each in content["strategies"].items()}
    assert about == {f"{of}-{value}": (of, value) for of in ("local", "fedavg") for value in ("0.9", "0.5")}
    columns = columns_of(content)
    assert columns["above local %"] == ["-", "-", "100.0 ± 0.0", "50.0 ± 0.0"]
    assert columns["better : worse : equal"] == ["-", "-", "4 : 0 : 0", "2 : 2 : 0"]
    assert any("against local with the same value" in line for line in remarks(content))
    one = make_plan(["local", "fedavg"], {}, {}, vary={"fraction-train": [0.9, 0.5]}, reference="local-0.5")
    assert one.compared_with(one.reference, "fedavg-0.9") == "local-0.5"
    with pytest.raises(ConfigError, match="--reference is 'federico', allowed: federico-1, federico-3, local"):
        make_plan(["federico", "local"], {}, {}, vary={"num-neighbours": [1, 3]}, reference="federico")


def test_the_files_of_a_varied_comparison_have_the_values_and_the_pictures(dropped):
    plan, content = dropped
    write(content, plan.folder)
    with open(plan.folder / "comparison.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["strategy"], row["of"], row["fraction-train"]) for row in rows[::4]] == [
        (f"{of}-{value}", of, value) for of in ("local", "fedavg") for value in ("0.9", "0.5")
    ]
    assert {path.name for path in plan.folder.iterdir()} == {
        "comparison.json", "comparison.csv", "comparison.md", "comparison.png", "varied.png", "report.html"
    }  # fmt: skip
    figure = comparison_pictures.pictures(content, plan.folder)["comparison"]()
    assert [axes.get_title() for axes in figure.axes] == ["fraction-train 0.9", "fraction-train 0.5"]
    for axes, (local, fedavg) in zip(figure.axes, ((65, 75), (35, 35)), strict=True):  # means over both seeds
        assert [line.get_ydata()[-1] for line in axes.lines] == pytest.approx([local, fedavg])
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["local", "fedavg"]


def test_the_picture_of_a_sweep_shows_means_and_deviations_at_each_value(dropped):
    plan, content = dropped
    (axes,) = comparison_pictures.pictures(content, plan.folder)["varied"]().axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0.9", "0.5"]
    local, fedavg = axes.lines
    assert local.get_ydata() == pytest.approx([65, 35]) and fedavg.get_ydata() == pytest.approx([75, 35])
    band = axes.collections[0].get_paths()[0].get_extents()
    assert (band.y0, band.y1) == pytest.approx((35 - 5 * np.sqrt(2), 65 + 5 * np.sqrt(2)))
    assert "after the last round" in axes.get_title()


def test_a_method_that_is_not_varied_is_a_line_across():
    figure = sweep_figure(
        "m",
        ["1", "2", "3"],
        {"a": {"1": (0.5, None), "3": (0.7, None)}, "b": {"": (0.6, 0.1)}},
        Headline(),
        "best",
        "t",
    )
    a, b = figure.axes[0].lines
    assert a.get_xydata().tolist() == [[0, 50], [2, pytest.approx(70)]]
    assert b.get_xydata().tolist() == [[0, 60], [2, 60]] and b.get_marker() in (None, "None", "")


def test_the_weights_of_variants_of_one_method_are_in_one_picture(tmp_path):
    plan = make_plan(["federico"], {"output-dir": str(tmp_path)}, {}, vary={"beta": [0.3, 0.6]})

    def execute(config: Config) -> Outcome:
        folder = prepared_runs({("federico", 0): [0.5, 0.7]})(config).results
        summary = json.loads((folder / "summary.json").read_text()) | {"rounds": 2}
        (folder / "summary.json").write_text(json.dumps(summary))
        (folder / "collaboration").mkdir()
        for number in (1, 2):
            own = config.beta * number / 2
            np.savez_compressed(
                folder / "collaboration" / f"round-{number:04d}.npz",
                clients=np.arange(2), weights=np.array([[own, 1 - own], [0, 1]], np.float32),
            )  # fmt: skip
        return Outcome(0, "", folder)

    content, _ = carry_out(plan, execute, lambda line: None, {}, ["kindred"])
    figure = comparison_pictures.pictures(content, plan.folder)["weights"]()
    assert [axes.get_title() for axes in figure.axes] == ["client 0, federico-0.3", "client 0, federico-0.6"]
    for axes, beta in zip(figure.axes, (0.3, 0.6), strict=True):
        (own,), (other,) = (line.get_ydata() for line in axes.lines), axes.collections[0].get_segments()
        assert [own[-1], other[-1, 1]] == pytest.approx([beta, 1 - beta])
    mixed = make_plan(["federico", "local"], {"output-dir": str(tmp_path)}, {})
    found = prepared_runs({("federico", 0): [0.5], ("local", 0): [0.5]})
    content, _ = carry_out(mixed, found, lambda line: None, {}, ["kindred"])
    assert set(comparison_pictures.pictures(content, mixed.folder)) == {"comparison"}


def test_a_value_of_the_command_replaces_what_the_preset_varies(without_images):
    preset = load_preset("fedamp-fig6-mnist")
    plan = make_plan(["fedamp"], {"fraction-train": 0.5}, {}, preset=preset)
    assert list(plan.configs) == ["fedamp"] and plan.variation is None and plan.configs["fedamp"].fraction_train == 0.5
    plan = make_plan(["fedamp"], {}, {}, preset=preset, vary={"fraction-train": [0.2, 0.4]})
    assert list(plan.configs) == ["fedamp-0.2", "fedamp-0.4"] and plan.changed == {"varied": "fraction-train 0.2, 0.4"}


def test_a_real_sweep_runs_each_variant(tmp_path):
    command = ["compare", "--strategies=local,fedavg-ft", "--vary=finetune-epochs=0,2", f"--output-dir={tmp_path}"]
    done = kindred(*command, *SMALL)
    assert how(done) == ["run"] * 3
    content = content_in(tmp_path)
    assert list(content["strategies"]) == ["local", "fedavg-ft-0", "fedavg-ft-2"]
    samples = {name: each["mean"]["samples-trained"] for name, each in content["strategies"].items()}
    assert samples["local"] < samples["fedavg-ft-0"] + 1 < samples["fedavg-ft-2"]
    assert how(kindred(*command, *SMALL)) == ["reused"] * 3


def test_the_presets_are_listed():
    listed = kindred("presets").stdout
    for name in preset_names():
        assert f" {name} " in listed
    assert "Table 3, FMNIST" in listed


# --- The picture --------------------------------------------------------------------------------------------


def test_the_picture_shows_the_mean_over_seeds_in_a_band_of_the_deviation():
    def rounds(*accuracies: float) -> list[dict]:
        return [{"round": number, "accuracy": accuracy} for number, accuracy in enumerate(accuracies, 1)]

    figure = comparison_figure(
        [("twice", [rounds(0.5, 0.6), rounds(0.7, 0.8, 0.9)]), ("once", [rounds(0.4, 0.5)])], Headline(), "title"
    )
    (axes,) = figure.axes
    twice, once = (line for line in axes.get_lines() if len(line.get_xdata()) == 2)
    assert twice.get_ydata() == pytest.approx([60, 70]) and list(twice.get_xdata()) == [1, 2]
    assert once.get_ydata() == pytest.approx([40, 50])
    (band,) = (each for each in axes.collections if isinstance(each, PolyCollection))
    height = 10 * np.sqrt(2)
    (box,) = (path.get_extents() for path in band.get_paths())
    assert (box.y0, box.y1) == pytest.approx((60 - height, 70 + height))


def test_the_deviation_over_runs_is_that_of_a_sample() -> None:
    runs = [{"metrics": {"last": {"loss": value}}} for value in (0.5, 0.75)]
    assert all_metrics(runs) == {"loss": {"mean": 0.625, "std": pytest.approx(0.25 / np.sqrt(2))}}


def test_values_that_differ_in_their_last_bits_are_equal() -> None:
    assert improvements(np.array([0.1 + 0.2, 3e5 * (0.1 + 0.2)]), np.array([0.3, 3e5 * 0.3]), True).tolist() == [0, 0]
