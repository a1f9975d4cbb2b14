"""`kindred.run` and `kindred.compare`: their results equal those in the files and those of the commands."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from typer.testing import CliRunner

import kindred
from kindred.lazy import lazy
from kindred.server_app import app as application, run_result
from kindred.server_app.cli.run import app as command_line
from kindred.server_app.comparison.result import ComparisonResult
from kindred.server_app.config import ConfigError
from kindred.server_app.run_log import RunFailed
from kindred.server_app.run_result import RunResult
from kindred.server_app.tables import read_table

SMALL = {"clients": 3, "rounds": 2, "num_groups": 1, "samples_per_client": 10, "local_epochs": 1}
SAME = ["--clients=3", "--rounds=2", "--set=num-groups=1", "--set=samples-per-client=10", "--set=local-epochs=1"]
TIMES = {"seconds", "seconds-per-round", "seconds-by-part"}


@dataclass
class Ran:
    run: RunResult
    comparison: ComparisonResult


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> Ran:
    """A run of HeurFedAMP, and a comparison that reuses it."""
    place = tmp_path_factory.mktemp("entrance")
    run = kindred.run("heurfedamp", "digits", output=place, progress=False, sigma=50, **SMALL)
    methods = {"heurfedamp": {"sigma": 50}, "alone": {"method": "local"}}
    comparison = kindred.compare(methods, data="digits", seeds=np.arange(1), output=place, progress=False, **SMALL)
    return Ran(run, comparison)


def without_times(rows: list[dict]) -> list[dict]:
    return [{key: value for key, value in row.items() if key not in TIMES} for row in rows]


def test_a_run_has_the_contents_of_its_files(ran) -> None:
    folder = ran.run.folder
    assert ran.run.rows == read_table(folder / "history.csv") and len(ran.run.rows) == 6
    assert ran.run.rounds == read_table(folder / "rounds.csv")
    assert ran.run.summary == json.loads((folder / "summary.json").read_text())
    assert ran.run.settings["sigma"] == 50.0 and ran.run.settings["num-clients"] == 3
    assert set(ran.run.figures) == {path.stem for path in folder.glob("*.png")}
    assert "heurfedamp on digits, rotated, seed 0, accuracy" in repr(ran.run)


def test_a_picture_equals_that_of_the_report(ran, tmp_path) -> None:
    for name, figure in ran.run.figures.items():
        figure.savefig(tmp_path / "again.png")
        assert (tmp_path / "again.png").read_bytes() == (ran.run.folder / f"{name}.png").read_bytes(), name


def test_models_equal_those_of_the_files_and_load_into_a_network(ran) -> None:
    models = ran.run.models
    assert list(models) == [0, 1, 2]
    for client, state in models.items():
        saved = load_file(ran.run.folder / f"models/client-{client}.safetensors")
        assert state.keys() == saved.keys()
        assert all(np.array_equal(state[key].numpy(), saved[key]) for key in saved)
    module = kindred.make_model("digits-cnn", (1, 8, 8), 10)
    module.load_state_dict(models[1])
    assert all(torch.equal(value, models.module(1).state_dict()[key]) for key, value in module.state_dict().items())


def test_the_command_with_the_same_settings_gives_the_same_bits(ran, tmp_path) -> None:
    command = ["run", "--engine=inline", "--dataset=digits", "--set=sigma=50", f"--output-dir={tmp_path}", *SAME]
    done = CliRunner().invoke(command_line, command)
    assert done.exit_code == 0, done.output
    (folder,) = tmp_path.iterdir()
    assert without_times(read_table(folder / "history.csv")) == without_times(ran.run.rows)
    for client, state in RunResult(folder).models.items():
        assert all(torch.equal(value, ran.run.models[client][key]) for key, value in state.items())


def test_a_comparison_has_its_runs_and_reuses_them(ran) -> None:
    comparison = ran.comparison
    assert comparison.content == json.loads((comparison.folder / "comparison.json").read_text())
    assert list(comparison.runs) == [("heurfedamp", 0), ("alone", 0)] and comparison.failed == {}
    assert comparison.runs["heurfedamp", 0].folder == ran.run.folder
    assert comparison.runs["alone", 0].settings["strategy"] == "local"
    assert comparison.rows[0] == {"strategy": "heurfedamp", "seed": 0, **ran.run.rows[0]}
    assert len(comparison.rows) == sum(len(run.rows) for run in comparison.runs.values())
    assert [(row["strategy"], row["seed"]) for row in comparison.summary[:3]] == [
        ("heurfedamp", 0), ("heurfedamp", "mean"), ("heurfedamp", "std"),
    ]  # fmt: skip
    assert list(comparison.models["alone", 0]) == [0, 1, 2] and list(comparison.figures) == ["comparison"]


def test_the_recorded_command_gives_the_same_comparison(ran) -> None:
    place = ran.run.folder.parent
    words = shlex.split(ran.comparison.content["command"])
    before = sorted(place.iterdir())
    done = CliRunner().invoke(command_line, [*words[1:], "--engine=inline"])
    assert done.exit_code == 0, done.output
    assert done.stdout.count(": reused, ") == 2 and f"comparison in {ran.comparison.folder}" in done.stdout
    assert sorted(place.iterdir()) == before


def test_a_setting_can_be_varied_and_the_recorded_command_does_the_same(ran) -> None:
    place = ran.run.folder.parent
    comparison = kindred.compare(
        ["heurfedamp"], vary={"self_weight": np.array([0.25, 0.75])}, output=place, progress=False, **SMALL
    )
    assert [run.settings["self-weight"] for run in comparison.runs.values()] == [0.25, 0.75]
    assert list(comparison.runs) == [("heurfedamp-0.25", 0), ("heurfedamp-0.75", 0)]
    assert {"comparison", "varied"} == set(comparison.figures)
    assert {f"{name}.png" for name in comparison.figures} == {path.name for path in comparison.folder.glob("*.png")}
    words = shlex.split(comparison.content["command"])
    done = CliRunner().invoke(command_line, [*words[1:], "--engine=inline"])
    assert done.exit_code == 0 and f"comparison in {comparison.folder}" in done.stdout
    assert done.stdout.count(": reused, ") == 2


def test_tables_are_data_frames(ran) -> None:
    pytest.importorskip("pandas")
    assert ran.run.tables["history"]["client"].tolist() == [row["client"] for row in ran.run.rows]
    assert ran.run.tables["clients"]["accuracy"].tolist() == [each["accuracy"] for each in ran.run.summary["clients"]]
    assert set(ran.run.tables) == {"clients", "rounds", "history"}
    assert set(ran.comparison.tables) == {"summary", "rounds", "history"}
    assert ran.comparison.tables["rounds"].groupby("strategy").size().min() >= 2


def test_without_pandas_tables_name_the_package_to_install(ran, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    monkeypatch.setattr(run_result, "pandas", lazy("pandas"))  # not imported yet
    with pytest.raises(ImportError, match=r"^tables need pandas, .* pip install pandas; .*$"):
        _ = RunResult(ran.run.folder).tables
    with pytest.raises(ImportError, match="tables need pandas"):
        _ = ComparisonResult(ran.comparison.content, ran.comparison.folder).tables


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"sigme": 1.0}, r"unknown setting sigme; did you mean sigma\?"),
        ({"metod": "local"}, r"unknown setting metod; did you mean method\?"),
        ({"track": "x"}, "track is 'x', allowed: mlflow"),
        ({"workers": "a"}, "workers is 'a', allowed with engine inline: 0"),
        ({"method": "fedamb"}, "strategy is 'fedamb', allowed: one of fedamp, "),
        ({"data": "imagenet"}, "dataset is 'imagenet', allowed: one of digits, "),
        ({"data": [1, 2]}, r"data is \[1, 2\], allowed: a dataset's name, or the path of an .npz or .csv file"),
        ({"sigma": -1}, r"sigma is -1.0, allowed: more than 0, at most 1e\+12, or auto \(FedAMP\); "),
        ({"sigma": None}, "sigma is None, allowed: more than 0"),
        ({"clients": 2.5}, r"num-clients is 2.5, allowed: 2 to 1,000,000 \(int\)"),
        ({"method": "local", "strategy": "fedavg"}, "strategy is given twice: 'local' and 'fedavg'"),
        ({"engine": "car"}, "engine is 'car', allowed: local, inline, flower"),
        ({"cpus_per_client": 0}, "cpus_per_client is 0, allowed: 1 to "),
        ({"resume": "nowhere"}, "resume is 'nowhere', which has no config.json of a run"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_unusable_arguments_are_a_config_error_and_create_nothing(arguments, says, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"^{says}") as refused:
        kindred.run(**arguments)
    assert "\n" not in str(refused.value) and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"methods": "local"}, "methods is 'local', allowed: a list of names"),
        ({"methods": []}, "methods is not given, allowed: names of .*; or give a preset"),
        ({"methods": ["local"], "seed": 1}, "seed is not allowed in a comparison: use seeds"),
        ({"methods": ["local"], "scale": 3}, "scale is 3, allowed: more than 0"),
        ({"methods": ["local"], "seeds": 3}, "seeds is 3, allowed: a list of whole numbers"),
        ({"methods": {"local": {"sigma": "wide"}}}, "sigma is 'wide', allowed: more than 0"),
        ({"methods": ["local"], "reference": "fedavg"}, "reference is 'fedavg', allowed: local"),
        (
            {"methods": ["local"], "vary": ["sigma"]},
            r"vary is \['sigma'\], allowed: a mapping from a setting to a list",
        ),
        ({"methods": ["fedamp"], "vary": {"sigma": 3}}, "vary is {'sigma': 3}, allowed: a mapping"),
        ({"methods": ["fedamp"], "vary": {"sigma": [3, "wide"]}}, "sigma is 'wide', allowed: more than 0"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_arguments_that_cannot_be_compared_are_a_config_error(arguments, says, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"^{says}"):
        kindred.compare(**arguments)
    assert list(tmp_path.iterdir()) == []


def test_a_csv_file_is_usable_as_data(tmp_path) -> None:
    rows = [f"{k % 7},{'ab'[k % 2]},{'xy'[k // 20]}" for k in range(40)]
    (tmp_path / "mine.csv").write_text("\n".join(["age,sick,who", *rows]))
    of_tables = {"target": "sick", "client": "who", "partition": "by-client", "clients": 2, "rounds": 1}
    run = kindred.run("local", tmp_path / "mine.csv", output=tmp_path, progress=False, local_epochs=1, **of_tables)
    assert run.settings["dataset"] == "csv" and len(run.models) == 2


def test_an_npz_file_is_usable_as_data_and_pytorch_gets_its_threads_back(tmp_path) -> None:
    rng, y = np.random.default_rng(0), np.arange(60) % 2
    x = rng.integers(0, 256, (60, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "mine.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    before = torch.get_num_threads()
    torch.set_num_threads(2)  # a run uses one
    try:
        run = kindred.run("local", tmp_path / "mine.npz", output=tmp_path, partition="iid", progress=False, **SMALL)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert run.settings["dataset"] == "npz" and run.settings["data-dir"] == str(tmp_path / "mine.npz")


def test_a_failed_run_states_its_reason_and_keeps_the_exception(tmp_path, monkeypatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(application, "prepare", fail)
    with pytest.raises(RunFailed, match="^ZeroDivisionError: division by zero") as failed:
        kindred.run("local", output=tmp_path, progress=False, **SMALL)
    assert failed.value.code == 1 and isinstance(failed.value.__cause__, ZeroDivisionError)


def test_an_interruption_is_passed_on_and_the_run_can_be_resumed(tmp_path, monkeypatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(application.RunFolder, "finish", interrupt)
        kindred.run("local", output=tmp_path, progress=False, **SMALL)
    (folder,) = tmp_path.iterdir()
    assert kindred.run(resume=folder, progress=False).summary["rounds"] == 2


def test_progress_is_printed_or_only_problems_are_warnings(tmp_path, capsys, monkeypatch) -> None:
    kindred.run("local", output=tmp_path, **SMALL)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "local on digits, rotated, 3 clients"
    assert sum(line.startswith("round ") for line in lines) == 2
    monkeypatch.setattr("kindred.server_app.report.figures.metric_figure", lambda *_: 1 / 0)
    with pytest.warns(UserWarning) as given:
        kindred.run("local", output=tmp_path, progress=False, **SMALL)
    (warning,) = given
    assert "accuracy.png cannot be written (ZeroDivisionError" in str(warning.message)
    assert capsys.readouterr() == ("", "")
