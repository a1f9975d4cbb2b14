"""Sites' own data: every allowed form, messages where they do not fit, and a federation of them."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from kindred import InlineGrid
from kindred.client.state import ClientState
from kindred.client_app.app import app
from kindred.data import Sites, Task, load_clients, load_federation, read_site
from kindred.data.inputs import ImageInputs, TableInputs
from kindred.data.schema import Column, Schema
from kindred.data.sites import check_test_part
from kindred.objectives import Classes
from kindred.server_app.app import run
from kindred.server_app.config import Config
from kindred.server_app.run_files import read_summary
from kindred.server_app.tables import read_table

from .refusals import refusal

RUN_CONFIG = {"image-shape": "1x4x6", "num-classes": 3, "class-names": "", "input-mean": 0.5, "input-deviation": 0.25,
              "samples-per-client": 0, "schema": "", "target": "", "task": "auto", "class-weights": "",
              "test-share": 0.3, "seed": 0}  # fmt: skip


def npz(path: Path, shape=(4, 6), train: int = 6, labels=(0, 1, 2), **changes) -> Path:
    rng = np.random.default_rng(0)
    sizes = {"train": train, "test": 3}
    arrays = {f"x_{part}": rng.integers(0, 256, (n, *shape)).astype(np.uint8) for part, n in sizes.items()}
    arrays |= {f"y_{part}": np.resize(labels, n) for part, n in sizes.items()}
    np.savez(path, **(arrays | changes))
    return path


def folders(path: Path, names=("0", "2"), mode: str = "L", size=(6, 4)) -> Path:
    for part, places in (("train", (0, 1)), ("test", (5,))):  # an image of one part is none of the other
        for k, name in enumerate(names):
            (path / part / name).mkdir(parents=True)
            for i, shade in enumerate(places):
                colour = 10 * k + shade if mode == "L" else (k, shade, 9)
                Image.new(mode, size, colour).save(path / part / name / f"{i}.png")
    return path


def tables(path: Path, labels=("0", "1")) -> Path:
    path.mkdir(exist_ok=True)
    (path / "train.csv").write_text(f"height,label,width\n1.5,{labels[0]},2\n-3,{labels[1]},4e1\n")
    (path / "test.csv").write_text(f"height,label,width\n7,{labels[1]},8\n")
    return path


def test_an_npz_file_is_read(tmp_path) -> None:
    images = read_site(npz(tmp_path / "a.npz", labels=(0, 2)))  # no image of class 1 here
    assert images.x_train.shape == (6, 1, 4, 6) and images.x_train.dtype == np.uint8
    assert images.y_test.tolist() == [0, 2, 0] and images.objective.num_outputs == 3


@pytest.mark.parametrize(("mode", "channels"), [("L", 1), ("RGB", 3)])
def test_folders_of_images_are_read(tmp_path, mode, channels) -> None:
    images = read_site(folders(tmp_path, mode=mode))
    assert images.x_train.shape == (4, channels, 4, 6) and images.x_test.shape == (2, channels, 4, 6)
    assert images.y_train.tolist() == [0, 0, 2, 2] and images.y_test.tolist() == [0, 2]
    assert images.x_train[3].max() == (11 if mode == "L" else 9)


def test_grey_images_have_the_channels_of_the_task(tmp_path) -> None:
    """A site fits, or not, whatever colours its images have."""
    task = Task(ImageInputs((3, 4, 6)), Classes(3))
    images = read_site(folders(tmp_path, mode="L"), task=task)
    assert images.x_train.shape == (4, 3, 4, 6)


def test_a_site_divides_its_data_like_a_simulation_of_it(tmp_path) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.random((20, 2, 8)).astype(np.float32), np.arange(20) % 2
    np.savez(tmp_path / "a.npz", x=x, y=y)
    both = {"x": np.concatenate([x, x + 1]), "y": np.tile(y, 2), "client": np.repeat(["a", "b"], 20)}
    np.savez(tmp_path / "both.npz", **both)
    settings = {"validation_share": 0.2, "seed": 3}
    config = Config(
        dataset="npz", data_dir=str(tmp_path / "both.npz"), partition="by-client", num_clients=2, num_groups=1,
        samples_per_client=0, **settings,
    )  # fmt: skip
    simulated = load_federation(config.run_config())
    (tmp_path / "schema.json").write_text(json.dumps(simulated.task.to_dict()))
    config = Config(dataset="sites", schema="schema.json", **settings)
    site = Sites.of(
        config.run_config(), {"data-dir": str(tmp_path / "a.npz"), "schema": str(tmp_path / "schema.json")},
        validation_share=0.2,
    )  # fmt: skip
    for part in ("train", "validation", "test"):
        ours, theirs = getattr(site.site_data("a"), part), getattr(simulated.site_data(0), part)
        assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])


TABLE = Task(
    TableInputs(Schema((Column("width", (), False, 2.0, 38.0), Column("height")), "label", "site", "day")),
    Classes(2, ("0", "1")),
)


def test_tables_are_read_by_the_schema_of_the_task(tmp_path) -> None:
    site = read_site(tables(tmp_path), task=TABLE)  # with neither a site nor a day, which divide data
    assert site.x_train.tolist() == [[2, 1.5], [40, -3]] and site.x_test.tolist() == [[8, 7]]
    assert site.y_train.tolist() == [0, 1] and site.y_test.tolist() == [1] and site.clients_train is None


def test_a_table_without_a_test_part_is_divided_by_its_time(tmp_path) -> None:
    rows = [f"{k},{k % 2},0,{(7 * k) % 10}" for k in range(10)]
    (tmp_path / "a.csv").write_text("\n".join(["width,label,height,day", *rows]))
    (tmp_path / "schema.json").write_text(json.dumps(TABLE.to_dict()))
    run_config = Config(dataset="sites", schema="/of/the/server.json", test_share=0.3).run_config()
    sites = Sites.of(run_config, {"data-dir": str(tmp_path / "a.csv"), "schema": str(tmp_path / "schema.json")})
    data = sites.site_data("lyon")
    assert sites.task == TABLE and len(data.train[1]) == 7 and len(data.test[1]) == 3
    late = [(k - 2) / 38 for k in range(10) if (7 * k) % 10 > 6]
    assert np.allclose(sorted(data.test[0][:, 0].tolist()), late) and data.train[0].shape == (7, 2)
    files = {"data-dir": str(tmp_path / "a.csv"), "schema": str(tmp_path / "schema.json")}
    data = Sites.of(run_config, files, validation_share=0.3).site_data("lyon")
    before = [(k - 2) / 38 for k in range(10) if 4 < (7 * k) % 10 <= 6]  # the last two of the seven
    assert np.allclose(sorted(data.validation[0][:, 0].tolist()), before) and data.train[0].shape == (5, 2)
    assert "schema is not in the node config" in refusal(lambda: Sites.of(run_config, {"data-dir": "a.csv"}))


def test_class_names_have_the_order_that_the_run_gives(tmp_path) -> None:
    names = ("dog", "cat", "owl")
    images = read_site(folders(tmp_path / "images", names=("cat", "dog")), names)
    assert images.y_train.tolist() == [1, 1, 0, 0] and images.objective.num_outputs == 3
    text = refusal(lambda: read_site(tmp_path / "images", ("dog", "owl")))
    assert "'cat'" in text and "dog, owl" in text
    assert "class-names" in refusal(lambda: read_site(tmp_path / "images"))


def damaged(path: Path) -> Path:
    (folders(path) / "train" / "0" / "1.png").write_bytes(b"no image")
    return path


def of_16_bits(path: Path) -> Path:
    Image.fromarray(np.full((4, 6), 40000, np.uint16)).save(folders(path) / "test" / "2" / "0.png")
    return path


def test_hidden_files_and_a_table_beside_images_are_ignored(tmp_path) -> None:
    expected = read_site(folders(tmp_path))
    (tmp_path / "labels.csv").touch()
    (tmp_path / "train" / "0" / "._0.png").write_bytes(b"of another program")
    (tmp_path / "test" / ".checkpoints").mkdir()
    (tmp_path / "test" / ".checkpoints" / "0.png").write_bytes(b"no image")
    assert np.array_equal(read_site(tmp_path).x_train, expected.x_train)


def test_a_site_s_test_samples_are_none_of_its_training_samples(tmp_path) -> None:
    leaking = npz(tmp_path / "a.npz")
    arrays = dict(np.load(leaking))
    arrays["x_test"][1] = arrays["x_train"][2]
    np.savez(leaking, **arrays)
    for read in (
        lambda: Sites.of(RUN_CONFIG, {"data-dir": str(leaking)}).site_data(0),
        lambda: check_test_part(read_site(leaking), leaking),
    ):
        text = refusal(read)
        assert "a.npz: sample 1 of x_test is sample 2 of x_train: clients' samples for training and for test" in text
    pool = npz(tmp_path / "pool.npz", x_train=np.zeros((6, 4, 6), np.uint8))  # equal images that no part has apart
    together = {end: dict(np.load(pool))[f"{end}_train"] for end in "xy"}
    np.savez(pool, **together)
    assert len(Sites.of(RUN_CONFIG, {"data-dir": str(pool)}).site_data(0).test[1]) == 2
    only_validates = {"data-dir": str(leaking), "validate-only": True}
    assert len(Sites.of(RUN_CONFIG, only_validates).site_data(0).test[1]) == 9


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"target": "chol>200"}, "target is 'chol>200', allowed with this schema: label"),
        ({"task": "number"}, "task is 'number', allowed with this schema: 'auto' or 'classes'"),
        ({"image-shape": "1x8x8"}, "image-shape is '1x8x8', allowed with a schema: ''"),
    ],
)
def test_settings_of_a_run_that_differ_from_the_schema_are_refused(tmp_path, changes, words) -> None:
    (tmp_path / "schema.json").write_text(json.dumps(TABLE.to_dict()))
    settings = RUN_CONFIG | {"schema": str(tmp_path / "schema.json"), "image-shape": ""}
    assert Sites.of(settings | {"target": " label"}).task.objective == TABLE.objective
    assert words in refusal(lambda: Sites.of(settings | changes))


def of_two_sizes(path: Path) -> Path:
    Image.new("L", (6, 5)).save(folders(path) / "test" / "2" / "0.png")
    return path


def edited(path: Path, old: str, new: str) -> Path:
    file = tables(path) / "train.csv"
    file.write_text(file.read_text().replace(old, new))
    return path


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: path / "nothing", ["data-dir", "nothing", "train.csv"]),
        (lambda path: npz(path / "a.npz", y_train=np.arange(5)), ["a.npz", "6 samples", "y_train 5"]),
        (damaged, ["1.png", "image"]),
        (of_two_sizes, ["0.png", "6x5", "6x4"]),
        (of_16_bits, ["0.png", "16 bits or more", "8 bits a channel"]),
        (tables, ["data-dir", "a table", "needs a schema", "kindred schema"]),
        (lambda path: tables(path) / "train.csv", ["data-dir", "a table", "needs a schema"]),
    ],
)
def test_data_that_do_not_fit_are_refused_in_one_line(tmp_path, make, words) -> None:
    text = refusal(lambda: read_site(make(tmp_path)))
    assert all(word in text for word in words), text


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("label", "class", ["train.csv has no column 'label'", "the target 'label'"]),
        ("4e1", "many", ["train.csv: row 3, column width: 'many', allowed: a number"]),
        ("4e1", "inf", ["row 3, column width: 'inf'"]),
        (",4e1", "", ["row 3 has 2 cells", "header 3"]),
        ("height", "depth", ["train.csv has no column 'height'", "depth"]),
        ("1,4e1", "2,4e1", ["row 3, column label: '2', allowed: one of 0, 1"]),
        ("\n1.5,0,2\n-3,1,4e1", "", ["train.csv", "no rows"]),
    ],
)
def test_tables_that_do_not_fit_the_schema_are_refused_in_one_line(tmp_path, old, new, words) -> None:
    text = refusal(lambda: read_site(edited(tmp_path, old, new), task=TABLE))
    assert all(word in text for word in words), text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"image-shape": ""}, ["image-shape", "1x28x28"]),
        ({"image-shape": "28x28"}, ["image-shape", "'28x28'"]),
        ({"image-shape": "0x28x28"}, ["image-shape"]),
        ({"num-classes": 1}, ["num-classes is 1"]),
        ({"num-classes": 0}, ["num-classes is 0"]),
        ({"class-names": "a,b"}, ["class-names has 2 names", "3"]),
        ({"class-names": "a,b,a"}, ["class-names", "2 different"]),
    ],
)
def test_settings_that_sites_share_are_checked(changes, words) -> None:
    text = refusal(lambda: Sites.of(RUN_CONFIG | changes))
    assert all(word in text for word in words), text


def test_sites_normalise_their_images_with_the_same_scale(tmp_path) -> None:
    files = {"data-dir": str(npz(tmp_path / "a.npz")), "public-data": str(tmp_path / "public.npz")}
    sites = Sites.of(RUN_CONFIG, files)
    data = sites.site_data("lyon")
    raw = read_site(tmp_path / "a.npz").x_train
    assert torch.allclose(data.train[0], (torch.from_numpy(raw.astype(np.float32)) / 255 - 0.5) / 0.25)
    assert data.train[0].shape == (6, 1, 4, 6) and data.test[1].dtype == torch.int64 and len(data.validation[1]) == 0
    np.savez(tmp_path / "public.npz", x=raw[:, 0])
    assert torch.equal(sites.public_set(), data.train[0])


def test_another_shape_or_more_classes_are_refused_with_the_expected_ones(tmp_path) -> None:
    def read(files: dict[str, str]) -> str:
        return refusal(lambda: Sites.of(RUN_CONFIG, files).site_data("lyon"))

    text = read({"data-dir": str(npz(tmp_path / "a.npz", shape=(6, 4)))})
    assert "1x6x4" in text and "expected 1x4x6" in text
    text = read({"data-dir": str(npz(tmp_path / "b.npz", labels=(0, 3)))})
    assert "b.npz" in text and "from 0 to 3" in text and "3 classes" in text
    assert "data-dir" in read({})
    assert "public-data" in refusal(Sites.of(RUN_CONFIG, {}).public_set)


def test_the_setting_dataset_decides_whether_sites_have_their_own_data(tmp_path) -> None:
    run_config = Config(**SITES).run_config() | {"samples-per-client": 7}
    sites = load_clients(run_config, {"data-dir": str(npz(tmp_path / "a.npz", shape=(8, 8)))})
    assert isinstance(sites, Sites) and sites.typical_size == 7
    data = sites.site_data("lyon")
    assert [len(part[1]) for part in (data.train, data.validation, data.test)] == [5, 1, 3]  # a fifth of six
    data = load_clients(run_config | {"validation-share": 0.0}, {"data-dir": str(tmp_path / "a.npz")}).site_data("lyon")
    assert [len(part[1]) for part in (data.train, data.validation, data.test)] == [6, 0, 3]
    divided = Config(num_clients=4).run_config()
    assert load_clients(divided, {"data-dir": "of no use"}) is load_federation(divided)
    assert load_federation(divided).typical_size == len(load_federation(divided).site_data(0).train[1]) == 40


SITES = {"dataset": "sites", "image_shape": "1x8x8", "num_classes": 10, "num_rounds": 2, "local_epochs": 1}


def grid_of(tmp_path, config: Config, broken: bool = False) -> InlineGrid:
    """Four sites with their own digits; with `broken`, one has images of another size."""
    x, y = load_digits(return_X_y=True)
    x = x.reshape(-1, 8, 8).astype(np.uint8) * 15
    grid = InlineGrid(app, 4, config.run_config())
    np.savez(tmp_path / "public.npz", x=x[400:500])
    for number, context in enumerate(grid._contexts.values()):
        own = slice(50 * number, 50 * number + 40), slice(50 * number + 40, 50 * number + 50)
        cut = 7 if broken and number == 2 else 8
        np.savez(
            tmp_path / f"{number}.npz",
            x_train=x[own[0], :cut],
            y_train=y[own[0]],
            x_test=x[own[1], :cut],
            y_test=y[own[1]],
        )
        context.node_config.clear()
        context.node_config.update(
            {
                "client-id": f"site-{number}",
                "data-dir": str(tmp_path / f"{number}.npz"),
                "public-data": str(tmp_path / "public.npz"),
            }
        )
    return grid


@pytest.mark.parametrize("strategy", ["heurfedamp", "federico", "perfed-ckt"])
def test_sites_with_their_own_data_learn_together(tmp_path, strategy) -> None:
    config = Config(**SITES, strategy=strategy, output_dir=str(tmp_path / "results"))
    folder = run(grid_of(tmp_path, config), config)
    rows = (folder.path / "history.csv").read_text().splitlines()
    assert all(",ok," in row for row in rows[1:]) and len(rows) > 8
    assert "-sites-" in folder.path.name and not (folder.path / "partition.png").exists()
    assert {path.name for path in (folder.path / "models").iterdir()} == {
        f"client-site-{number}.safetensors" for number in range(4)
    }
    assert (folder.path / "collaboration.png").exists()


def test_a_site_that_does_not_fit_is_excluded_by_name_and_the_others_continue(tmp_path) -> None:
    config = Config(**SITES, strategy="local", output_dir=str(tmp_path / "results"))
    folder = run(grid_of(tmp_path, config, broken=True), config)
    (left_out,) = read_summary(folder.path)["left-out"]
    assert left_out["client"] == "site-2" and "images are 1x7x8, expected 1x8x8" in left_out["reason"]


@pytest.mark.parametrize(
    ("strategy", "files"),
    [
        ("heurfedamp", {"model", "best", "predictions"}),
        ("fedavg", {"model", "best", "predictions"}),
        ("fedavg-ft", {"model", "best", "predictions"}),
        ("perfed-ckt", {"model", "best", "predictions"}),
        ("kindred", {"model", "best", "predictions", "last"}),
        ("federico", {"mixture", "losses", "best", "predictions"}),
    ],
)
def test_a_site_stores_its_results_of_a_run(tmp_path, strategy, files) -> None:
    config = Config(**SITES | {"num_rounds": 3}, strategy=strategy, output_dir=str(tmp_path / "results"))
    grid = grid_of(tmp_path, config)
    for context in grid._contexts.values():
        context.node_config["state-dir"] = str(tmp_path / "kept")
    folder = run(grid, config)
    for number in range(4):
        state = ClientState(grid.run.run_id, f"site-{number}", tmp_path / "kept")
        stored = {path.stem for path in state.folder.glob("[!.]*.safetensors")}
        received = {stem for stem in stored if stem.startswith("received-client-")}
        assert stored - received == files
        assert len(received) == (3 if strategy == "federico" else 0)
        before = {path.name.split(".")[1] for path in state.folder.glob(".*.safetensors")}  # states of earlier rounds
        result = "mixture" if strategy == "federico" else "model"
        assert result in before  # that of the round before the last one, which may have spoiled it
        # Kindred's last model; FedeRiCo's losses and copies of models. The others are the selected model's.
        assert bool(before - {result, "predictions", "best"}) == (strategy in ("kindred", "federico"))
        assert state.folder.stat().st_mode & 0o777 == 0o700
        rows = [row for row in read_table(folder.path / "history.csv") if row["client"] == f"site-{number}"]
        accuracies = [row["personal-accuracy"] for row in rows if "personal-accuracy" in row]
        for name in files - {"last", "losses", "predictions"}:  # the first two are the methods' own states
            model, task = Task.from_metadata(state.about(name))
            assert model == "digits-cnn" and (task.inputs.shape, task.objective.num_outputs) == ((1, 8, 8), 10)
        if "model" in files:
            assert float(state.about("model")["accuracy"]) == accuracies[-1]
        on_validation = [row["validation-accuracy"] for row in rows if "validation-accuracy" in row]
        assert float(state.about("best")["validation-accuracy"]) == max(on_validation)


def test_a_site_processes_one_message_at_a_time(tmp_path) -> None:
    state = ClientState(1, "lyon", tmp_path)
    order = []

    def second() -> None:
        with state.locked():
            order.append("second")

    with state.locked():
        thread = threading.Thread(target=second)
        thread.start()
        thread.join(0.2)
        order.append("first")
    thread.join(10)
    assert order == ["first", "second"]
