"""The command line: its commands, and the messages for bad input."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from typer.testing import CliRunner

from kindred import MODELS, REGISTRY
from kindred.data import DATASETS, PARTITIONS
from kindred.server_app.cli import commands
from kindred.server_app.cli.run import app
from kindred.server_app.machine import cpus
from kindred.settings import parse
from tests.background_commands import HEEDING, PATIENCE

ROOT = Path(__file__).resolve().parent.parent
COMMAND = [str(Path(sysconfig.get_path("scripts")) / "kindred")]
SMALL = ["--clients=4", "--rounds=2", "--set=num-groups=2", "--set=samples-per-client=10", "--set=local-epochs=1"]


def kindred(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], cwd=cwd, capture_output=True, text=True, timeout=PATIENCE)


def test_help_marks_what_is_required_by_brackets_alone() -> None:
    said = CliRunner().invoke(commands.app, ["site", "--help"]).stdout
    assert said.count("[required]") == 3 and "\\" not in said


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--nonsense"], "kindred: no such option '--nonsense'; see `kindred --help`"),
        (["nonsense"], "kindred: no such command 'nonsense'; see `kindred --help`"),
        (["rn"], "kindred: no such command 'rn'. Did you mean 'run'? See `kindred --help`"),
        (["run", "--set", "=1"], "kindred: --set is '=1', allowed: key=value"),
        (
            ["run", "--data-dir", "/no/such.npz"],
            "kindred: data-dir is '/no/such.npz', and dataset digits has no files, allowed: dataset npz",
        ),
        (
            ["predict", "--model", "a", "--input", "b", "--output", "c.xlsx"],
            "kindred: --output is 'c.xlsx', allowed: NAME.csv or NAME.json",
        ),
        (["site"], "kindred: missing argument 'NAME'; see `kindred site --help`"),
    ],
)
def test_wrong_arguments_give_one_line(arguments, line) -> None:
    said = CliRunner().invoke(commands.app, arguments, prog_name="kindred")
    assert (said.exit_code, said.stdout, said.stderr) == (2, "", line + "\n")


def test_without_arguments_the_commands_are_listed() -> None:
    said = CliRunner().invoke(commands.app, [])
    assert said.exit_code == 2 and "compare" in said.output and "kindred:" not in said.output


def test_versions_are_of_what_is_installed() -> None:
    said = CliRunner().invoke(commands.app, ["--version"])
    packages = {"kindred": "kindred-fl", "flwr": "flwr", "torch": "torch", "scikit-learn": "scikit-learn"}
    shown = dict(each.split(" ") for each in said.stdout.strip().split(", "))
    assert said.exit_code == 0
    assert {name: shown[name] for name in packages} == {name: version(of) for name, of in packages.items()}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--strategy=fedsomething"], ["strategy", "fedsomething", "heurfedamp", "fedavg"]),
        (["--against=local,fedsomething"], ["strategy", "fedsomething", "heurfedamp"]),
        (["--dataset=imagenet"], ["dataset", "imagenet", "digits", "cifar10"]),
        (["--partition=unfair"], ["partition", "unfair", "rotated", "practical"]),
        (["--set=learnin-rate=0.1"], ["learnin-rate", "learning-rate"]),
        (["--set=learning-rate"], ["learning-rate", "key=value"]),
        (["--set=heurfedamp:sigma=2"], ["heurfedamp:sigma=2", "allowed: sigma=2", "kindred compare"]),
        (["--rounds=3", "--set=num-rounds=4"], ["num-rounds", "twice", "3", "4"]),
        (["--rounds=2.5"], ["num-rounds", "2.5", "1 to 1,000,000", "int"]),
        (["--clients=many"], ["num-clients", "many", "2 to 1,000,000", "int"]),
        (["--set=sigma=wide"], ["sigma", "wide", "more than 0", "float"]),
        (["--set=sigma=nan"], ["sigma", "nan", "more than 0"]),
        (["--set=with-replacement=yes"], ["with-replacement", "yes", "true or false"]),
        (["--set=self-weight=most"], ["self-weight", "most", "uniform", "none"]),
        (["--set=self-weight=groups", "--partition=iid"], ["self-weight", "groups", "iid", "uniform"]),
        (["--clients=0"], ["num-clients", "0", "2 to 1,000,000"]),
        (["--clients=1"], ["num-clients", "1", "2 to 1,000,000"]),
        (["--rounds=0"], ["num-rounds", "0", "1 to 1,000,000"]),
        (["--seed=-1"], ["seed", "-1", "0 or more"]),
        (["--seed=9223372036854775808"], ["seed", "9223372036854775808", "2^63"]),
        (["--set=fraction-train=1.5"], ["fraction-train", "1.5", "float"]),
        (["--set=min-train-clients=30"], ["min-train-clients", "30", "num-clients", "20"]),
        (["--set=min-available-clients=21"], ["min-available-clients", "21", "num-clients", "20"]),
        (["--clients=5000"], ["num-clients", "5000", "samples"]),
        (["--set=samples-per-client=500"], ["samples-per-client", "500"]),
        (["--dataset=npz"], ["data-dir is not set", "npz"]),
        (["--dataset=mnist", "--data-dir=nowhere"], ["data-dir", "nowhere", "does not exist"]),
        (["--dataset=npz", "--data-dir=broken.npz"], ["broken.npz", "npz"]),
        (["--data-dir=two\nlines"], ["data-dir", "control characters"]),
        (["--output-dir=broken.npz/results"], ["output-dir", "broken.npz"]),
        (["--cpus-per-client=0"], ["--cpus-per-client", "0"]),
        (["--cpus-per-client=100000"], ["--cpus-per-client", "100000", str(cpus())]),
        (["--set=model=resnet50"], ["model", "resnet50", "resnet18"]),
        (["--strategy=fedrep", "--set=head-layers=9"], ["head-layers", "9", "1 to 3"]),
        (["--strategy=kindred", "--set=aggregation=krum"], ["aggregation", "krum", "kindred: mean", "fedavg, fedprox"]),
        (["--set=device=cuda"], ["device", "cuda", "GPU"]),
        (["--gpus-per-client=0.5"], ["--gpus-per-client", "0.5", "GPU"]),
    ],
    ids=" ".join,
)
def test_bad_input_gets_one_line_and_code_2_and_creates_no_file(arguments, says, tmp_path, monkeypatch) -> None:
    (tmp_path / "broken.npz").write_bytes(b"no archive")
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["run", *arguments])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    for word in says:
        assert word in result.stderr
    assert os.listdir(tmp_path) == ["broken.npz"]


@pytest.mark.parametrize(
    "arguments",
    [["predict", "--input=x.csv", "--model={}"], ["watch", "{}"], ["compare", "--strategies=local", "--output-dir={}"]],
    ids=" ".join,
)
def test_a_path_that_cannot_be_looked_at_is_one_line(arguments) -> None:
    """Such as one in a folder of another user."""
    path = "a" * 300
    done = CliRunner().invoke(app, [argument.format(path) for argument in arguments])
    assert done.exit_code == 2 and done.stdout == ""
    assert re.fullmatch(rf"kindred: .*{path} cannot be used \(File name too long\)\n", done.stderr)


def test_images_too_small_for_the_model_are_bad_input(tmp_path, monkeypatch) -> None:
    import numpy as np

    rng = np.random.default_rng(0)
    y = np.arange(40) % 2
    np.savez(tmp_path / "tiny.npz", x_train=rng.random((40, 3, 3)), y_train=y, x_test=rng.random((40, 3, 3)), y_test=y)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["run", "--dataset=npz", "--data-dir=tiny.npz", *SMALL])
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1 and "3" in result.stderr
    assert os.listdir(tmp_path) == ["tiny.npz"]


@pytest.mark.parametrize("arguments", [["run", "--enginee=ray"], ["run", "--engine=car"], ["walk"]], ids=" ".join)
def test_wrong_usage_is_code_2(arguments) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.output


@given(st.one_of(st.integers(), st.floats(allow_nan=False), st.booleans(), st.text()))
def test_a_value_is_read_as_its_setting_s_type(value) -> None:
    kind = type(value).__name__
    if kind != "str":
        text = str(value).lower() if kind == "bool" else repr(value)
        assert parse(text, kind) == value and type(parse(text, kind)) is type(value)
    assert parse(str(value), "str") == str(value)


def test_text_of_another_type_stays_text() -> None:
    assert parse("uniform", "float | str") == "uniform"
    assert parse("0.5", "float | str") == 0.5
    assert parse("1", "float") == 1.0 and type(parse("1", "float")) is float
    for kind in ("int", "float", "bool"):
        assert parse("uniform", kind) == "uniform"
    assert parse("1.0", "int") == "1.0"
    assert parse("1", "bool") == "1"


def test_the_lists_name_everything_available() -> None:
    methods = CliRunner().invoke(app, ["strategies"])
    assert methods.exit_code == 0
    for name, method in REGISTRY.items():
        assert f" {name} " in methods.output and method.paper in methods.output
    listed = CliRunner().invoke(app, ["datasets"])
    assert listed.exit_code == 0
    for name in (*DATASETS, *PARTITIONS, *MODELS):
        assert f" {name} " in listed.output


def test_a_run_in_this_process_also_runs_the_method_given_by_against(tmp_path) -> None:
    (tmp_path / "typer.py").write_text("raise SystemExit('a file of the working directory was imported')")
    done = kindred("run", "--engine=inline", "--against=local", "--output-dir=out", *SMALL, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sum(line.startswith(("round 1/2", "round 2/2")) for line in done.stdout.splitlines()) == 4
    folders = sorted((tmp_path / "out").iterdir(), key=lambda folder: "-local-" in folder.name)
    assert ["-heurfedamp-" in folders[0].name, "-local-" in folders[1].name, len(folders)] == [True, True, 2]
    for folder in folders:
        assert f"results in {folder}\n" in done.stdout
        assert (folder / "summary.json").is_file()
        assert "round 2/2" in (folder / "log.txt").read_text()
    assert (folders[0] / "comparison.png").is_file()
    table = done.stdout.splitlines()[-3:]
    assert "bottom decile" in table[0]
    assert [line.split()[0] for line in table[1:]] == ["heurfedamp", "local"]


@pytest.mark.parametrize(("size", "named"), [(10, False), (11, True)])
def test_a_batch_size_beyond_all_data_is_named(tmp_path, size, named) -> None:
    arguments = ["--engine=inline", "--strategy=local", f"--set=batch-size={size}", f"--output-dir={tmp_path}"]
    said = CliRunner().invoke(app, ["run", *SMALL, *arguments]).stdout
    line = f"batch-size is {size}, and no client has more than 10 training samples"
    assert (line in said.splitlines()) == named


def test_diverged_training_is_said_in_a_line_for_all_clients(tmp_path) -> None:
    huge = ["--set=optimizer=sgd", "--set=learning-rate=1000", "--set=weight-decay=1000000", "--set=batch-size=1"]
    arguments = ["--engine=inline", "--strategy=local", *huge, f"--output-dir={tmp_path}"]
    ended = CliRunner().invoke(app, ["run", *SMALL, *arguments])
    lines = ended.stdout.splitlines()
    assert ended.exit_code == 1 and "a smaller learning-rate may help" in ended.stderr
    assert sum("goes on without" in line for line in lines) == 4 and not any("best" in line for line in lines)


def test_ctrl_c_ends_a_run_in_this_process_with_130(tmp_path) -> None:
    command = [sys.executable, "-c", HEEDING, *COMMAND, "run", "--engine=inline", "--rounds=100000"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if line.startswith("round "):
                process.send_signal(signal.SIGINT)
                break
        _, complaints = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert complaints.count("\n") == 1


def test_reading_settings_imports_no_heavy_package() -> None:
    script = "import sys, {}; print(*sys.modules)"
    packages, methods = {"torch", "ray", "sklearn", "matplotlib"}, {"kindred.fedamp", "kindred.server_app.config"}
    deployment = "kindred.server_app.deployment."
    for modules, heavy in (
        ("kindred.server_app.cli.run", packages | methods | {"flwr"}),
        (f"{deployment}keys, {deployment}server, {deployment}site", packages | methods),
        ("kindred.server_app.config", packages),  # it reads the settings of methods, which import flwr
    ):
        done = subprocess.run(
            [sys.executable, "-P", "-c", script.format(modules)], capture_output=True, text=True, timeout=PATIENCE
        )
        assert done.returncode == 0, done.stderr
        assert not heavy & set(done.stdout.split())
