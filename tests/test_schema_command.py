"""`kindred schema`, from a sample and from a codebook; a run on a table, and one of sites that have tables."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

import kindred.server_app.cli.run  # noqa: F401  # adds the command
from kindred import InlineGrid
from kindred.client_app.app import app as client_app
from kindred.data import Task
from kindred.data.inputs import TableInputs
from kindred.data.schema import Column
from kindred.objectives import Classes, Labels, Number
from kindred.server_app.app import run
from kindred.server_app.config import Config
from kindred.server_app.run_files import read_summary

from .deployment_commands import kindred

pytestmark = pytest.mark.usefixtures("no_pictures")

SAMPLE = "id,age,sex,hospital,sick\n" + "".join(f"{k},{50 + k},{'FM'[k % 2]},oslo,{k % 3 % 2}\n" for k in range(6))
CODEBOOK = """name;type;categories;mean;deviation;missing
age;number;;50;10;
sex;category;"F; M";;;no
sick;category;0;;;
sick;category;no;;;
"""


def refused(*arguments: object) -> str:
    (line,) = kindred("schema", *arguments, code=2).splitlines()
    return line


def test_a_sample_makes_a_schema(tmp_path) -> None:
    (tmp_path / "sample.csv").write_text(SAMPLE)
    said = kindred(
        "schema", "--data-dir", tmp_path / "sample.csv", "--target", "sick", "--client", "hospital",
        "--out", tmp_path / "schema.json",
    )  # fmt: skip
    head, *lines = said.splitlines()
    assert head.split() == ["column", "type", "missing", "values"]
    assert lines[0].split() == ["age", "number", "yes", "mean", "52.5,", "deviation", "1.708"]
    assert lines[1].split() == ["sex", "category", "yes", "2:", "F,", "M"]
    assert lines[2:] == [
        "target sick: classes, 0, 1",
        "2 columns become 5 features",
        "column 'id' is not used: its name says that it identifies rows",
        f"schema in {tmp_path}/schema.json",
    ]
    task = Task.load(tmp_path / "schema.json")
    assert task.inputs.schema.client == "hospital" and task.objective == Classes(2, ("0", "1"))
    age, sex = task.inputs.schema.columns
    assert (age.mean, age.missing) == (52.5, True) and age.deviation == pytest.approx(np.sqrt(35 / 12))
    assert sex == Column("sex", ("F", "M"), True)


@pytest.mark.parametrize(
    ("row", "target", "task", "objective"),
    [
        ("cost;number;;3;2;", "cost", "auto", Number(1, ("cost",), 3.0, 2.0)),
        ("cost;number;;3;2;", "cost>5", "auto", Classes(2, ("not cost>5", "cost>5"))),
        ('state;category;"well; ill; dead";;;', "state", "auto", Classes(3, ("well", "ill", "dead"))),
        ("a;category;0;;;\nb;category;0;;;", "a,b", "auto", Labels(2, ("a", "b"))),
    ],
)
def test_a_codebook_makes_a_schema(tmp_path, row, target, task, objective) -> None:
    head, age, sex, *_ = CODEBOOK.splitlines()
    (tmp_path / "book.csv").write_text("\n".join([head, age, sex, row]) + "\n")
    arguments = ("--codebook", tmp_path / "book.csv", "--target", target, "--task", task)
    kindred("schema", *arguments, "--out", tmp_path / "schema.json")
    found = Task.load(tmp_path / "schema.json")
    assert found.objective == objective
    assert found.inputs.schema.columns == (Column("age", (), True, 50.0, 10.0), Column("sex", ("F", "M"), False))


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("name;", "column;", ["book.csv has no column 'name'", "codebook"]),
        ("age;number", "age;integer", ["row 2, column type: 'integer'", "number or category"]),
        (";50;", ";;", ["row 2, column mean: ''", "a number"]),
        (";10;", ";0;", ["row 2, column deviation: '0'", "above 0"]),
        ('"F; M"', "", ["row 3, column categories: ''", "separated by semicolons"]),
        (";no\n", ";perhaps\n", ["row 3, column missing: 'perhaps'", "yes or no"]),
        ("x", "x", ["row 5, column name: 'sick'", "different"]),
        ("sick", "ill", ["no column 'sick'"]),
    ],
)
def test_a_codebook_that_is_none_is_refused_in_one_line(tmp_path, old, new, says) -> None:
    text = CODEBOOK if old == "x" else CODEBOOK.rpartition("sick")[0].replace(old, new)
    (tmp_path / "book.csv").write_text(text)
    arguments = ("--codebook", tmp_path / "book.csv", "--target", "sick")
    line = refused(*arguments)
    assert all(word in line for word in says), line


def test_other_bad_input_of_the_command_is_refused_in_one_line(tmp_path) -> None:
    (tmp_path / "sample.csv").write_text(SAMPLE)
    assert "--data-dir and --codebook" in refused("--target", "sick")
    sample = ("--data-dir", tmp_path / "sample.csv")
    assert "no column 'ill'" in refused(*sample, "--target", "ill")
    assert "does not exist" in refused("--data-dir", tmp_path / "no.csv", "--target", "ill")
    assert "--target is 'ill'" in refused("--data-dir", tmp_path / "signals.npz", "--target", "ill")
    line = kindred("schema", *sample, "--target", "sick", "--out", tmp_path / "no" / "schema.json", code=2)
    assert line.splitlines()[-1].startswith("kindred: --out is ")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--target", "sex"), ["1 categories of the target 'sex'"]),
        (("--target", "age", "--task", "classes"), ["0 categories of the target 'age'"]),
        (("--target", "sex,age", "--task", "number"), ["'sex,age'", "task number"]),
        (("--target", "age", "--task", "spells"), ["'spells'", "auto, classes"]),
        (("--target", "age", "--client", "sex"), ["no column for input"]),
    ],
)
def test_a_target_that_does_not_fit_the_codebook_is_refused_in_one_line(tmp_path, arguments, says) -> None:
    rows = ["name,type,categories,mean,deviation", "age,number,,50,10", "sex,category,F,,", "town,category,a;b,,"]
    (tmp_path / "book.csv").write_text("\n".join(rows[: 3 if "--client" in arguments else 4]) + "\n")
    line = refused("--codebook", tmp_path / "book.csv", *arguments)
    assert all(word in line for word in says), line


def hospital(first: int, count: int = 40) -> str:
    """Rows in which the sick are the old; some cells are missing."""
    rng = np.random.default_rng(first)
    ages = rng.integers(20, 90, count)
    rows = [f"{'' if k % 9 == 0 else age},{'FM'[k % 2]},{int(age > 55)}" for k, age in enumerate(ages.tolist())]
    return "\n".join(["age,sex,sick", *rows]) + "\n"


def test_a_run_prints_its_schema_and_keeps_it_with_results_and_models(tmp_path) -> None:
    for name, first in (("oslo", 0), ("lyon", 1), ("porto", 2)):
        (tmp_path / "data").mkdir(exist_ok=True)
        (tmp_path / "data" / f"{name}.csv").write_text(hospital(first))
    said = kindred(
        "run", "--strategy", "fedavg", "--dataset", "csv", "--data-dir", tmp_path / "data", "--partition", "by-client",
        "--clients", 3, "--rounds", 2, "--engine", "inline", "--set", "target=sick",
        "--output-dir", tmp_path / "results",
    )  # fmt: skip
    assert "\nage     number    yes      mean " in said and "\n2 columns become 4 features\n" in said
    (folder,) = (tmp_path / "results").iterdir()
    task = Task.load(folder / "schema.json")
    assert task.objective == Classes(2, ("0", "1")) and task.inputs.schema.target == "sick"
    with safe_open(folder / "models" / "client-0.safetensors", "numpy") as file:
        assert Task.from_metadata(file.metadata())[1] == task


def test_sites_with_tables_learn_together_by_one_schema(tmp_path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.csv").write_text(hospital(number))
    schema = tmp_path / "schema.json"
    kindred("schema", "--data-dir", tmp_path / "0.csv", "--target", "sick", "--out", schema)
    config = Config(
        dataset="sites", schema=str(schema), strategy="fedavg", num_rounds=5, local_epochs=5, batch_size=4,
        learning_rate=0.02, output_dir=str(tmp_path / "results"),
    )  # fmt: skip
    grid = InlineGrid(client_app, 3, config.run_config())
    for number, context in enumerate(grid._contexts.values()):
        context.node_config.clear()
        files = {"data-dir": str(tmp_path / f"{number}.csv"), "schema": str(schema)}
        context.node_config.update({"client-id": f"site-{number}", **files})
    folder = run(grid, config)
    summary = read_summary(folder.path)
    assert summary["left-out"] == [] and summary["accuracy"] > 0.8
    with safe_open(folder.path / "models" / "client-site-0.safetensors", "numpy") as file:
        assert Task.from_metadata(file.metadata()) == ("mlp", Task.load(Path(schema)))
    assert json.loads(schema.read_text())["inputs"]["kind"] == TableInputs.kind
