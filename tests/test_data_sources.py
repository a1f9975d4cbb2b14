"""Sources of images, and messages about files that do not contain them."""

from __future__ import annotations

import io
import os
import pickle
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from kindred.data import DATASETS, DataError
from kindred.data.sources import CIFAR100_SUPERCLASSES, load_dataset
from kindred.torchvision_import import import_torchvision

ROOT = Path(__file__).parents[1]


def arrays(n=12, classes=3, shape=(4, 5), dtype=np.uint8) -> dict[str, np.ndarray]:
    """A small dataset in the form of an .npz file; every pixel of image i is i, except its first, 200 + i."""
    out = {}
    for name, size in (("train", n), ("test", 2 * classes)):
        x = np.zeros((size, *shape), dtype) + np.arange(size, dtype=dtype).reshape(-1, *[1] * len(shape))
        x[:, 0, 0] = 200 + np.arange(size).reshape(-1, *[1] * (len(shape) - 2))
        out |= {f"x_{name}": x, f"y_{name}": np.arange(size) % classes}
    return out


def write(path: Path, **changes) -> str:
    """Write the small dataset with some arrays replaced (None: omitted)."""
    np.savez(path, **{name: array for name, array in (arrays() | changes).items() if array is not None})
    return str(path)


def refusal(dataset: str, data_dir: str | Path) -> str:
    with pytest.raises(DataError) as error:
        load_dataset(dataset, str(data_dir))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_digits_are_in_fixed_stratified_halves():
    images = load_dataset("digits")
    assert images.x_train.shape == (899, 1, 8, 8) and images.x_test.shape == (898, 1, 8, 8)
    assert images.x_train.dtype == np.uint8 and images.x_train.max() == 16
    train, test = np.bincount(images.y_train), np.bincount(images.y_test)
    assert len(train) == 10 and (abs(train - test) <= 1).all()
    whole = np.concatenate([images.x_train, images.x_test]).reshape(1797, 64)
    from sklearn.datasets import load_digits

    assert sorted(map(bytes, whole)) == sorted(map(bytes, load_digits().data.astype(np.uint8)))


def test_cifar100_has_20_superclasses_of_5():
    assert np.bincount(CIFAR100_SUPERCLASSES).tolist() == [5] * 20


@pytest.mark.parametrize("shape", [(4, 5), (4, 5, 1), (4, 5, 3)])
def test_npz_images_are_channels_first(tmp_path, shape):
    given_arrays = arrays(shape=shape)
    images = load_dataset("npz", write(tmp_path / "a.npz", **given_arrays))
    channels = shape[2] if len(shape) == 3 else 1
    assert images.x_train.shape == (12, channels, 4, 5) and images.x_test.shape == (6, channels, 4, 5)
    assert images.objective.num_outputs == 3
    assert (images.x_train[3, :, 0, 0] == 203).all() and (images.x_train[3, :, 1:] == 3).all()
    assert images.y_train.dtype == np.int64 and images.y_train.tolist() == given_arrays["y_train"].tolist()


def test_npz_may_have_floats_and_other_compressions(tmp_path):
    floats = arrays(dtype=np.float64)
    path = tmp_path / "lzma.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as archive:
        for name, array in floats.items():
            content = io.BytesIO()
            np.save(content, array)
            archive.writestr(f"{name}.npy", content.getvalue())
    images = load_dataset("npz", str(path), inputs="image")
    assert images.x_train.dtype == np.float32
    assert np.array_equal(images.x_train[:, 0], floats["x_train"])


def test_a_folder_may_contain_the_npz_of_its_dataset(tmp_path):
    named = arrays(n=20, classes=10, shape=(28, 28))
    write(tmp_path / "mnist.npz", **named)
    for data_dir in (tmp_path, tmp_path / "mnist.npz", os.path.relpath(tmp_path)):
        assert np.array_equal(load_dataset("mnist", str(data_dir)).x_train[:, 0], named["x_train"])


X, Y = arrays()["x_train"], arrays()["y_train"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"x_test": None, "y_train": None}, ["has no y_train, x_test"]),
        ({"y_train": Y[:-1]}, ["x_train has 12 samples", "y_train 11"]),
        ({"x_train": X[0, 0]}, ["x_train has 5 samples"]),
        ({"x_train": X.reshape(12, 2, 2, 5)}, ["x_train", "(12, 2, 2, 5)", "channels"]),
        ({"x_train": X.astype(np.int32)[..., None]}, ["x_train", "int32", "uint8"]),
        ({"x_train": X.astype(str)}, ["x_train", "<U", "numbers"]),
        ({"x_train": np.where(X == 3, np.nan, X)}, ["x_train", "not finite", "the first is in sample "]),
        ({"y_test": np.array([0, 1, np.nan, 0, 1, 2])}, ["y_test", "not finite", "the first is in sample 2"]),
        ({"x_train": X * 1e300}, ["x_train", "not finite"]),
        ({"x_train": X[:0], "y_train": Y[:0]}, ["x_train", "empty"]),
        ({"x_test": arrays(shape=(6, 6))["x_test"]}, ["(1, 4, 5)", "(1, 6, 6)"]),
        ({"y_train": Y[:, None]}, ["y_train", "other than 0 and 1"]),
        ({"y_train": Y.astype(complex)}, ["y_train", "complex128", "integers"]),
        ({"y_train": np.array(3)}, ["y_train is a single value"]),
        ({"y_train": Y - 1}, ["y_train", "-1", "0 to C - 1"]),
        ({"y_train": Y + 1}, ["no sample of class 0"]),
        ({"y_train": np.where(Y == 1, 10**15, Y)}, ["no sample of class 1"]),
        ({"y_train": np.full(12, 2**64 - 1, np.uint64)}, ["y_train", str(2**64 - 1)]),
        ({"y_test": np.array([0, 1, 2, 3, 0, 1])}, ["no sample of class 3"]),
        ({"y_train": 0 * Y, "y_test": np.zeros(6, int)}, ["one class"]),
        ({"y_train": np.array([{}] * 12)}, ["plain arrays", "Python objects"]),
        ({"y_train": np.array(["yes", "no"] * 6, object)}, ["texts of a table", "y_train.astype(str)"]),
    ],
)
def test_npz_without_a_dataset_are_refused(tmp_path, changes, words):
    path = write(tmp_path / "bad.npz", **changes)
    text = refusal("npz", path)
    assert path in text
    assert [word for word in words if word not in text] == []


def test_no_code_in_a_file_is_executed(tmp_path):
    trace = tmp_path / "trace"

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(trace),)

    path = write(tmp_path / "evil.npz", y_train=np.array([Evil()] * 12))
    refusal("npz", path)
    (tmp_path / "raw.npz").write_bytes(pickle.dumps(Evil()))
    refusal("npz", tmp_path / "raw.npz")
    assert not trace.exists()


def test_files_other_than_npz_are_refused(tmp_path):
    for name, content in (("empty.npz", b""), ("text.npz", b"hello"), ("data.csv", b"1,2,3")):
        (tmp_path / name).write_bytes(content)
        assert str(tmp_path / name) in refusal("npz", tmp_path / name)
    np.save(tmp_path / "array.npy", X)
    assert "npz" in refusal("npz", tmp_path / "array.npy")


@settings(max_examples=150, deadline=None)
@given(place=st.integers(0, 5000), byte=st.integers(0, 255), flip=st.booleans())
def test_damaged_npz_are_refused_or_harmless(tmp_path_factory, place, byte, flip):
    path = tmp_path_factory.getbasetemp() / "damaged.npz"
    content = io.BytesIO()
    np.savez_compressed(content, **arrays())
    damaged = bytearray(content.getvalue())
    if flip:
        damaged[place % len(damaged)] = byte
    else:
        del damaged[place % len(damaged) :]
    path.write_bytes(damaged)
    try:
        images = load_dataset("npz", str(path))
    except DataError as error:
        assert str(path) in str(error) and "\n" not in str(error)
    else:
        assert np.array_equal(images.x_train[:, 0], X) and np.array_equal(images.y_train, Y)


def test_missing_paths_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "mnst" in refusal("mnst", "") and "fashion-mnist" in refusal("mnst", "")
    assert "data-dir is not set" in refusal("npz", "")
    text = refusal("cifar10", "no/such")
    assert str(tmp_path / "no" / "such") in text and "cifar10.npz" in text and "cifar-10-batches-py" in text
    assert str(tmp_path) in refusal("npz", ".") and "is a folder" in refusal("npz", ".")
    assert "data-dir is not set" in refusal("npz", "")
    assert "does not exist" in refusal("npz", "x" * 5000)


def test_an_npz_of_another_dataset_is_refused(tmp_path):
    text = refusal("mnist", write(tmp_path / "a.npz"))
    assert "(1, 4, 5)" in text and "(1, 28, 28)" in text and "dataset=npz" in text
    text = refusal("mnist", write(tmp_path / "b.npz", **arrays(n=24, classes=11, shape=(28, 28))))
    assert "11 classes" in text and "10 are due" in text and "dataset=npz" in text
    text = refusal("mnist", write(tmp_path / "c.npz", **arrays(n=24, classes=9, shape=(28, 28))))
    assert "9 classes" in text and "10 are due" in text


def write_idx(folder: Path, stem: str, x: np.ndarray, y: np.ndarray) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{stem}-images-idx3-ubyte").write_bytes(struct.pack(">4I", 2051, *x.shape) + x.tobytes())
    (folder / f"{stem}-labels-idx1-ubyte").write_bytes(struct.pack(">2I", 2049, len(y)) + y.astype(np.uint8).tobytes())


@pytest.mark.parametrize(
    ("dataset", "classes", "folder", "stems"),
    [
        ("mnist", 10, "MNIST", ("train", "t10k")),
        ("fashion-mnist", 10, "FashionMNIST", ("train", "t10k")),
        ("emnist", 62, "EMNIST", ("emnist-byclass-train", "emnist-byclass-test")),
    ],
)
def test_the_files_of_torchvision_are_read(tmp_path, dataset, classes, folder, stems):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (2 * classes, 28, 28), dtype=np.uint8)
    y = np.arange(2 * classes) % classes
    for stem, part in zip(stems, (slice(None), slice(0, 5)), strict=True):
        write_idx(tmp_path / folder / "raw", stem, x[part], y[part])
    images = load_dataset(dataset, str(tmp_path))
    upright = x.transpose(0, 2, 1) if dataset == "emnist" else x  # EMNIST's files hold transposed images
    assert np.array_equal(images.x_train[:, 0], upright) and np.array_equal(images.y_train, y)
    assert np.array_equal(images.x_test[:, 0], upright[:5]) and np.array_equal(images.y_test, y[:5])
    assert images.objective.num_outputs == DATASETS[dataset].num_classes == classes

    images_file = tmp_path / folder / "raw" / f"{stems[0]}-images-idx3-ubyte"
    images_file.write_bytes(images_file.read_bytes()[:-1])
    text = refusal(dataset, tmp_path)
    assert str(tmp_path / folder) in text and "remove it" in text


def test_the_files_of_torchvision_for_cifar10_are_read(tmp_path, monkeypatch):
    cifar = import_torchvision().datasets.cifar
    monkeypatch.setattr(cifar, "check_integrity", lambda *a, **k: True)  # otherwise only the real files pass
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    x = np.random.default_rng(0).integers(0, 256, (60, 3, 32, 32), dtype=np.uint8)
    y = np.arange(60) % 10
    for batch, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        rows = slice(10 * batch, 10 * batch + 10)
        (folder / name).write_bytes(pickle.dumps({"data": x[rows].reshape(10, -1), "labels": y[rows].tolist()}))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}))
    images = load_dataset("cifar10", str(tmp_path))
    assert np.array_equal(images.x_train, x[:50]) and np.array_equal(images.y_train, y[:50])
    assert np.array_equal(images.x_test, x[50:]) and np.array_equal(images.y_test, y[50:])


def test_a_missing_dataset_is_downloaded_completely_or_not_at_all(tmp_path, monkeypatch):
    datasets = import_torchvision().datasets
    x = np.zeros((20, 28, 28), np.uint8)

    class MNIST(datasets.MNIST):  # a download that succeeds like the real one, or breaks halfway
        works = False

        def download(self):
            write_idx(Path(self.raw_folder), "train", x, np.arange(20) % 10)
            if not MNIST.works:
                raise OSError("the network is\nunreachable")
            write_idx(Path(self.raw_folder), "t10k", x, np.arange(20) % 10)

    monkeypatch.setattr(datasets, "MNIST", MNIST)
    text = refusal("mnist", tmp_path)
    assert str(tmp_path) in text and "mnist.npz" in text and "the network is unreachable" in text
    assert list(tmp_path.iterdir()) == []
    MNIST.works = True
    assert load_dataset("mnist", str(tmp_path)).x_train.shape == (20, 1, 28, 28)
    assert [path.name for path in tmp_path.iterdir()] == ["MNIST"]
    monkeypatch.setattr(MNIST, "download", None)  # not downloaded a second time
    assert load_dataset("mnist", str(tmp_path)).x_train.shape == (20, 1, 28, 28)


def test_a_download_without_network_is_one_clear_error(tmp_path, monkeypatch):
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert "the download failed" in refusal("cifar100", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_without_torchvision_the_error_names_the_npz_alternative(tmp_path, monkeypatch):
    def fail():
        raise ImportError("No module named 'torchvision'")

    monkeypatch.setattr("kindred.torchvision_import.import_torchvision", fail)
    text = refusal("mnist", tmp_path)
    assert "torchvision" in text and ".npz" in text
    assert list(tmp_path.iterdir()) == []


def test_torchvision_imports_with_its_models():
    torchvision = import_torchvision()
    assert torchvision is import_torchvision()
    assert sum(p.numel() for p in torchvision.models.resnet18().parameters()) == 11689512


@pytest.mark.parametrize(
    ("content", "outcome"),
    [
        ("fits = True", "fits True, nms declared False"),
        ("raise RuntimeError('operator unknown::thing does not exist')", "ImportError"),
    ],
)
def test_a_working_torchvision_or_another_failure_is_left_unchanged(tmp_path, content, outcome):
    (tmp_path / "torchvision.py").write_text(content)
    code = (
        "import torch\n"
        "from kindred.torchvision_import import import_torchvision\n"
        "try:\n"
        "    module = import_torchvision()\n"
        "    print('fits', module.fits, end=', ')\n"
        "except ImportError:\n"
        "    print('ImportError')\n"
        "else:\n"
        "    print('nms declared', hasattr(torch.ops.torchvision, 'nms'))\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.strip() == outcome, done.stderr


def test_reading_the_names_imports_no_heavy_package():
    heavy = ("torch", "torchvision", "matplotlib", "sklearn")
    code = f"import sys, kindred.data; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_without_a_data_dir_the_download_folder_is_used(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / ".cache" / "kindred"
    folder.mkdir(parents=True)
    labels = np.arange(10)
    images = np.zeros((10, 28, 28), np.uint8)
    np.savez(folder / "fashion-mnist.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    assert len(load_dataset("fashion-mnist").x_train) == 10
