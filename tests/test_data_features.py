"""The features of a folder of images: their values, that they are computed once, and errors."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import kindred.data.features
from kindred.client.models import make_model
from kindred.data import DataError, load_federation
from kindred.data.sources import load_dataset
from kindred.torchvision_import import import_torchvision

DOMAINS, CLASSES = ("Art", "Real World"), ("Alarm_Clock", "Bed", "Chair")


def network(seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return import_torchvision().models.resnet18().eval()


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """resnet18's state dict with random numbers, in a file."""
    path = tmp_path_factory.mktemp("weights") / "resnet18.safetensors"
    save_file(network().state_dict(), path)
    return path


def picture(number: int, size=(40, 30)) -> Image.Image:
    rng = np.random.default_rng(number)
    small = Image.fromarray(rng.integers(0, 256, (4, 5, 3), dtype=np.uint8))
    return small.resize(size)


def fill(folder: Path, counts=(3, 2, 2)) -> list[Path]:
    """Write `counts` images of each class into each domain; return their paths, in order."""
    paths = []
    for domain in DOMAINS:
        for name, count in zip(CLASSES, counts, strict=True):
            place = folder / domain / name
            place.mkdir(parents=True)
            for i in range(count):
                paths.append(place / f"{i:05d}.png")
                picture(len(paths)).save(paths[-1])
    return paths


@pytest.fixture
def folder(tmp_path, weights, monkeypatch):
    """Images of 2 domains and 3 classes, and weights; the default folder for features is under home."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    place = tmp_path / "office"
    fill(place)
    (place / "resnet18.safetensors").symlink_to(weights)
    return place


@pytest.fixture
def computed(monkeypatch):
    """Number of images for which features were computed, for each computation."""
    sizes = []
    compute = kindred.data.features.compute_features

    def counting(place, paths):
        sizes.append(len(paths))
        return compute(place, paths)

    monkeypatch.setattr(kindred.data.features, "compute_features", counting)
    return sizes


def refusal(data_dir) -> str:
    with pytest.raises(DataError) as error:
        load_dataset("office-home", str(data_dir))
    assert "\n" not in str(error.value)
    return str(error.value)


def kept(folder: Path) -> list[str]:
    """Entries of the folder other than domains and weights."""
    return sorted(path.name for path in folder.iterdir() if path.name not in (*DOMAINS, "resnet18.safetensors"))


def test_features_are_the_input_of_resnet18s_last_layer(folder):
    images = load_dataset("office-home", str(folder))
    assert images.x_train.dtype == images.x_test.dtype == np.float32 and images.objective.num_outputs == 3
    assert images.x_train.shape == (11, 512, 1, 1) and images.x_test.shape == (3, 512, 1, 1)
    # Classes have 6, 4 and 4 images, half of each class from Art; the second of every five is a test image.
    labels = np.array([0, 0, 0, 1, 1, 2, 2] * 2)
    test = np.isin(np.arange(14), [1, 4, 6])
    assert images.y_train.tolist() == labels[~test].tolist() and images.y_test.tolist() == [0, 1, 2]

    transforms = import_torchvision().transforms
    prepare = transforms.Compose([
        transforms.Resize(256), transforms.CenterCrop(224), transforms.ToTensor(),
        transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
    ])  # fmt: skip
    whole, features = network(), []
    whole.fc.register_forward_hook(lambda module, given, made: features.append(given[0]))
    with torch.inference_mode():
        for path in sorted(folder.glob("*/*/*.png")):
            whole(prepare(Image.open(path))[None])
    due = torch.cat(features).numpy()
    for x, late in ((images.x_train, False), (images.x_test, True)):
        assert np.allclose(x[:, :, 0, 0], due[test == late], rtol=1e-4, atol=1e-5)
    assert np.ptp(due, axis=0).max() > 0.01  # images differ


def test_every_fifth_image_of_a_class_is_a_test_image(folder, monkeypatch):
    for domain in DOMAINS:
        shutil.rmtree(folder / domain)
    fill(folder, (4, 1, 6))
    number = {path.relative_to(folder): i for i, path in enumerate(sorted(folder.glob("*/*/*.png")))}
    monkeypatch.setattr(
        kindred.data.features,
        "features_of",
        lambda place, paths: np.array([[number[path]] * 512 for path in paths], np.float32),
    )
    images = load_dataset("office-home", str(folder))
    # Paths 0 to 3, 11 to 14 are class 0; 4, 15 class 1; 5 to 10, 16 to 21 class 2.
    assert images.x_test[:, 0, 0, 0].tolist() == [1, 6, 13, 15, 16, 21]
    assert images.y_test.tolist() == [0, 2, 0, 1, 2, 2]
    assert sorted(np.concatenate([images.x_train, images.x_test])[:, 5, 0, 0].tolist()) == list(range(22))


def test_other_files_are_ignored_and_any_image_is_read(folder, computed):
    (folder / "imagelist.txt").write_text("hello")
    (folder / "outside.png").write_bytes(b"no image")
    (folder / "Art" / "outside.png").write_bytes(b"no image")
    (folder / "Art" / "Bed" / "Thumbs.db").write_bytes(b"no image")
    (folder / "Art" / "Bed" / "._00000.png").write_bytes(b"no image")
    (folder / ".hidden" / "Sofa").mkdir(parents=True)
    picture(0).save(folder / ".hidden" / "Sofa" / "a.png")
    (folder / "Art" / "Empty_Class").mkdir()
    picture(1, (300, 20)).convert("L").save(folder / "Art" / "Bed" / "a.JPG")
    picture(2, (7, 301)).convert("P").save(folder / "Art" / "Bed" / "b.png")
    picture(3, (1, 1)).convert("RGBA").save(folder / "Art" / "Bed" / "c.webp")
    images = load_dataset("office-home", str(folder))
    assert computed == [17] and len(images) == 17 and images.objective.num_outputs == 3


def test_features_are_computed_once(folder, computed):
    first = load_dataset("office-home", str(folder))
    again = load_dataset("office-home", f"{folder}/")
    assert computed == [14]
    for name in ("x_train", "y_train", "x_test", "y_test"):
        assert np.array_equal(getattr(first, name), getattr(again, name))
    (name,) = kept(folder)
    assert name.startswith("office-home-") and name.endswith(".npz")
    assert not (folder.parent / "home").exists()


def test_a_moved_folder_keeps_its_features(folder, computed):
    load_dataset("office-home", str(folder))
    moved = folder.rename(folder.with_name("moved"))
    load_dataset("office-home", str(moved))
    assert computed == [14]


def test_changed_data_are_computed_again(folder, computed):
    path = folder / "Art" / "Bed" / "00000.png"
    before = load_dataset("office-home", str(folder))
    picture(99, (100, 100)).save(path)
    after, stat = load_dataset("office-home", str(folder)), path.stat()
    assert computed == [14, 14]
    changed = (before.x_train != after.x_train).any((1, 2, 3))
    assert np.flatnonzero(changed).tolist() == [2]  # the first training image of Bed, after two of Alarm_Clock
    path.rename(path.with_name("z.png"))
    load_dataset("office-home", str(folder))
    path.with_name("z.png").unlink()
    load_dataset("office-home", str(folder))
    picture(99, (100, 100)).save(path)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    load_dataset("office-home", str(folder))  # as in the second computation
    assert computed == [14, 14, 14, 13]
    os.utime(path, ns=(0, 0))  # a new time stamp may mean another image of the same size
    load_dataset("office-home", str(folder))
    assert computed == [14, 14, 14, 13, 14]


def test_other_weights_give_other_features(folder, computed, weights):
    before = load_dataset("office-home", str(folder))
    file = folder / "resnet18.safetensors"
    file.unlink()
    # A last layer for another number of classes, or none, is accepted.
    save_file({name: 1.1 * x if x.is_floating_point() else x for name, x in load_file(weights).items()
               if not name.startswith("fc.")}, file)  # fmt: skip
    after = load_dataset("office-home", str(folder))
    assert computed == [14, 14] and not np.allclose(before.x_train, after.x_train)


@pytest.mark.parametrize("damage", [
    lambda path: path.write_bytes(path.read_bytes()[:1000]),
    lambda path: np.savez(path, features=np.zeros((13, 512), np.float32)),
    lambda path: np.savez(path, features=np.full((14, 512), np.nan, np.float32)),
    lambda path: np.savez(path, features=np.zeros((14, 512))),
    lambda path: np.savez(path, other=np.zeros((14, 512), np.float32)),
])  # fmt: skip
def test_damaged_stored_features_are_computed_again(folder, computed, damage):
    before = load_dataset("office-home", str(folder))
    (name,) = kept(folder)
    damage(folder / name)
    assert np.array_equal(load_dataset("office-home", str(folder)).x_train, before.x_train)
    assert np.array_equal(load_dataset("office-home", str(folder)).x_train, before.x_train)
    assert computed == [14, 14] and kept(folder) == [name]


def forbid(monkeypatch, *places):
    """Refuse writes into these folders; modes would not suffice, as root has all rights."""
    make = tempfile.TemporaryDirectory

    def refusing(*args, **options):
        if Path(options["dir"]) in places:
            raise PermissionError(f"[Errno 13] Permission denied: {options['dir']}")
        return make(*args, **options)

    monkeypatch.setattr(tempfile, "TemporaryDirectory", refusing)


def test_features_of_a_read_only_folder_are_stored_in_the_default_folder(folder, computed, monkeypatch):
    forbid(monkeypatch, folder)
    default = folder.parent / "home" / ".cache" / "kindred"
    for _ in range(2):
        load_dataset("office-home", str(folder))
    assert computed == [14] and kept(folder) == []
    (path,) = default.iterdir()
    assert path.name.startswith("office-home-")


def test_a_missing_place_for_features_is_an_error_before_any_computation(folder, computed, monkeypatch):
    default = folder.parent / "home" / ".cache" / "kindred"
    forbid(monkeypatch, folder, default)
    text = refusal(folder)
    assert f"neither in {folder} nor in {default}" in text and "Permission denied" in text
    assert computed == []  # this is found before the computation

    def no_room(path, **arrays):
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.undo()
    monkeypatch.setattr(np, "savez", no_room)
    assert "cannot be written" in refusal(folder) and "No space left" in refusal(folder)
    assert kept(folder) == []


@pytest.mark.parametrize("content", [b"", b"hello", "half"])
def test_a_damaged_image_is_named(folder, content):
    path = folder / "Real World" / "Bed" / "00001.png"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2] if content == "half" else content)
    text = refusal(folder)
    assert str(path) in text and "cannot be read as an image" in text
    assert kept(folder) == []


def test_weights_without_a_network_connection_are_refused(folder, monkeypatch):
    (folder / "resnet18.safetensors").unlink()
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    text = refusal(folder)
    assert str(folder / "resnet18.safetensors") in text and "state dict" in text and "the download failed" in text
    assert kept(folder) == []


def test_weights_are_downloaded_by_torchvision_once(folder, computed, monkeypatch):
    with_file = load_dataset("office-home", str(folder))
    (folder / "resnet18.safetensors").unlink()
    asked = []

    def download(weights, progress, check_hash, weights_only):
        asked.append((weights.url, progress, check_hash, weights_only))
        return network(seed=1).state_dict()

    enum = import_torchvision().models.ResNet18_Weights
    monkeypatch.setattr(enum, "get_state_dict", download)
    downloaded = load_dataset("office-home", str(folder))
    assert asked == [("https://download.pytorch.org/models/resnet18-f37072fd.pth", False, True, True)]
    assert not np.allclose(with_file.x_train, downloaded.x_train)
    monkeypatch.setattr(enum, "get_state_dict", None)  # not requested a second time
    assert np.array_equal(load_dataset("office-home", str(folder)).x_train, downloaded.x_train)
    assert computed == [14, 14]


def test_weights_that_do_not_fit_are_refused(folder, weights):
    file = folder / "resnet18.safetensors"
    state = load_file(weights)
    file.unlink()
    file.write_bytes(b"hello")
    assert str(file) in refusal(folder) and "safetensors" in refusal(folder)
    save_file({name: tensor for name, tensor in state.items() if name != "layer1.0.conv1.weight"}, file)
    text = refusal(folder)
    assert str(file) in text and "no state dict of torchvision's resnet18" in text and "layer1.0.conv1.weight" in text
    save_file(state | {"conv1.weight": torch.zeros(64, 1, 7, 7)}, file)
    assert "conv1.weight" in refusal(folder)
    save_file(state | {"bn1.weight": torch.full((64,), torch.nan)}, file)
    assert "not finite" in refusal(folder)
    assert kept(folder) == []


def test_folders_without_such_images_are_refused(folder, tmp_path):
    assert "data-dir is not set" in refusal("") and "folder for each domain" in refusal("")
    assert "does not exist" in refusal(tmp_path / "no")
    (tmp_path / "a.npz").write_bytes(b"")
    assert "is a file" in refusal(tmp_path / "a.npz")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert str(empty) in refusal(empty) and "DOMAIN/CLASS/NAME" in refusal(empty) and ".jpg" in refusal(empty)
    for domain in DOMAINS:
        shutil.rmtree(folder / domain / "Bed")
    (folder / "Art" / "Chair" / "00000.png").unlink()
    (folder / "Art" / "Chair" / "00001.png").unlink()
    (folder / "Real World" / "Chair" / "00001.png").unlink()
    assert "one image only of class Chair" in refusal(folder)
    shutil.rmtree(folder / "Real World" / "Chair")
    assert "one class only, Alarm_Clock" in refusal(folder)


def test_stored_features_do_not_change_the_partition(folder, computed):
    states = []
    for _ in range(2):
        torch.manual_seed(3)
        load_dataset("office-home", str(folder))
        states.append(torch.get_rng_state())
    assert computed == [14] and torch.equal(*states)


def test_a_federation_of_features_has_all_images(folder):
    settings = {
        "dataset": "office-home",
        "data-dir": str(folder),
        "partition": "label-groups",
        "num-clients": 3,
        "num-groups": 3,
        "samples-per-client": 0,
        "with-replacement": False,
        "dirichlet-alpha": 0.4,
        "min-samples": 10,
        "test-share": 0.3,
        "validation-share": 0,
        "held-out-clients": 0,
        "class-weights": "",
        "public-data": "auto",
        "public-size": 0,
        "seed": 0,
    }
    federation = load_federation(settings)
    assert federation.task.inputs.shape == (512, 1, 1) and federation.task.objective.num_outputs == 3
    sizes = [(len(site.train[1]), len(site.test[1])) for site in map(federation.site_data, range(3))]
    assert sorted(sizes) == [(3, 1), (3, 1), (4, 2)]  # all 14 images: 4, 4 and 6
    assert ((federation.class_counts() > 0).sum(1) == 1).all()
    x = federation.site_data(0).train[0]
    assert x.shape[1:] == (512, 1, 1) and x.dtype == torch.float32
    model = make_model("auto", federation.task.inputs.shape, federation.task.objective.num_outputs, seed=0)
    assert model(x).shape == (len(x), 3)
    with pytest.raises(DataError, match="clients' own dataset.*no images of it"):
        federation.public_set()
    spread = load_federation(settings | {"partition": "clustered-dirichlet", "num-groups": 2})
    assert sum(len(part[1]) for i in range(3) for part in (spread.site_data(i).train, spread.site_data(i).test)) == 14
    with pytest.raises(DataError, match="rotated needs square images of more than one pixel"):
        load_federation(settings | {"partition": "rotated"})
