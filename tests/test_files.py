"""Files that declare too much or are damaged give one line and use no memory. Valid files are read exactly."""

from __future__ import annotations

import io
import json
import struct
import subprocess
import sys
import tracemalloc
import warnings
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as numpy_st
from PIL import Image
from safetensors.numpy import save, save_file

from kindred import MODELS, Mixture, make_model
from kindred.client.models import KINDS
from kindred.client.training import get_arrays
from kindred.data import DataError, Task, read_site
from kindred.data.files import HEADER_BYTES, check_folder, image_size, open_npz, read_image, read_npz
from kindred.data.inputs import ImageInputs, TableInputs
from kindred.data.schema import Column, Schema
from kindred.objectives import Classes
from kindred.server_app.config import ConfigError
from kindred.server_app.prediction.predictor import Predictor

from .test_predict import kindred, refused

ROOT = Path(__file__).resolve().parent.parent
MB = 2**20


# --- Bombs ----------------------------------------------------------------------------------------------


def npy(shape: tuple[int, ...], content: bytes = b"", descr: str = "|u1") -> bytes:
    """Content of an .npy file with this header, whatever follows."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": descr, "fortran_order": False, "shape": shape})
    return file.getvalue() + content


def zipped(path: Path, entry: bytes, method: int = zipfile.ZIP_DEFLATED, declared: int | None = None) -> Path:
    """Write an .npz file with this entry x and a declared size in its table of contents."""
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("x.npy", entry)
    content = bytearray(path.read_bytes())
    at = content.rindex(b"PK\x01\x02")
    struct.pack_into("<I", content, at + 24, len(entry) if declared is None else declared)
    path.write_bytes(content)
    return path


def long_contents(path: Path) -> Path:
    """Write an archive whose table of contents declares that it fills the file."""
    content = bytearray(zipped(path, npy((1,), b"1")).read_bytes())
    at = content.rindex(b"PK\x05\x06")
    struct.pack_into("<II", content, at + 12, 300 * MB, 0)
    path.write_bytes(bytes(300 * MB - at) + content)
    return path


def png(path: Path, width: int, height: int) -> Path:
    """Write a PNG whose header declares this size; its pixels are those of a smaller image."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
        + chunk(b"IDAT", zlib.compress(bytes(20_000)))
        + chunk(b"IEND", b"")
    )
    return path


def tiff(path: Path, tile: int) -> Path:
    """A TIFF of 8x8 grey pixels in one tile of this side."""
    pixels = zlib.compress(bytes(1000))
    tags = {256: 8, 257: 8, 258: 8, 259: 8, 262: 1, 277: 1, 322: tile, 323: tile, 324: 8, 325: len(pixels)}
    path.write_bytes(
        b"II*\0"
        + struct.pack("<I", 8 + len(pixels))
        + pixels
        + struct.pack("<H", len(tags))
        + b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
        + bytes(4)
    )
    return path


def folder(path: Path, count: int) -> Path:
    for part in ("train", "test"):
        for number in range(count):
            png(path / part / "0" / f"{number}.png", 1000, 1000)
    return path


def image_task(shape: tuple[int, int, int], num_classes: int) -> Task:
    return Task(ImageInputs(shape, (0.5,), (0.5,)), Classes(num_classes))


def of(network: str, path: Path, arrays=None, **claims) -> Path:
    """Write a file that declares a model; it holds these arrays, or a single number."""
    task = json.loads(image_task((3, 32, 32), 2).to_metadata("")["task"])
    for part in task.values():
        part.update({key: value for key, value in claims.items() if key in part})
    save_file(arrays or {"a": np.zeros(1)}, path, {"model": network, "task": json.dumps(task)})
    return path


def cnn2(path: Path, **claims) -> Path:
    """Write a cnn2 of 2 classes that declares something else."""
    return of("cnn2", path, get_arrays(make_model("cnn2", (3, 32, 32), 2)), **claims)


def long_header(path: Path) -> Path:
    path.write_bytes(struct.pack("<Q", HEADER_BYTES + 8) + b"{}".ljust(HEADER_BYTES + 8))
    return path


# Bad arguments of `kindred predict`, each with a valid model or input, and the message.
INPUT_BOMBS = {
    "ratio.npz": (lambda path: zipped(path, npy((90 * MB,), bytes(90 * MB))), ["94,371,968 bytes", "67,108,864"]),
    "lie.npz": (lambda path: zipped(path, npy((4_000_000_000,)), declared=4_000_000_128), ["4,000,000,128 bytes"]),
    "shape.npz": (lambda path: zipped(path, npy((1 << 40,), b"1")), ["declares 1,099,511,627,776", "carries 1"]),
    "stored.npz": (lambda path: zipped(path, npy((60 * MB,)), zipfile.ZIP_STORED, 128 + 60 * MB), ["ends before"]),
    "bzip2.npz": (lambda path: zipped(path, npy((9 * MB,), bytes(9 * MB)), zipfile.ZIP_BZIP2), ["method 12"]),
    "contents.npz": (long_contents, ["table of contents declares 314,572,800 bytes, allowed: 1,048,576"]),
    "warning.png": (lambda path: png(path, 10_000, 10_000), ["10000x10000", "allowed: 50,000,000"]),
    "error.png": (lambda path: png(path, 30_000, 30_000), ["too many pixels, allowed: 50,000,000"]),
    "other.png": (lambda path: png(path, 7_000, 7_000), ["images are 3x7000x7000, expected 3x32x32"]),
    "tile.tiff": (lambda path: tiff(path, 30_000), ["tiles of 30000x30000", "allowed: 4,194,304"]),
}
MODEL_BOMBS = {
    **{
        f"{name}.safetensors": (lambda path, name=name: of(name, path, num_outputs=1_000_000), ["missing"])
        for name in MODELS.own
        if "image" in KINDS[name]
    },
    "cnn2-of-2.safetensors": (lambda path: cnn2(path, num_outputs=1_000_000), ["(2, 2048)", "(1000000, 2048)"]),
    "classes.safetensors": (lambda path: cnn2(path, num_outputs=1 << 62), ["num_outputs", "2 to 1,000,000"]),
    "image.safetensors": (lambda path: of("resnet18", path, shape=[3, 10_000, 10_000]), ["shape of a model's images"]),
    "mlp.safetensors": (lambda path: of("office-mlp", path, shape=[1000, 7_000, 7_000]), ["missing"]),
    "text.safetensors": (lambda path: of("cnn2", path, shape=[3, 50_000, "x" * 5000]), ["shape of a model's images"]),
    "means.safetensors": (lambda path: of("cnn2", path, mean=[0.5] * 100_000), ["100000 means", "one"]),
    "header.safetensors": (long_header, ["header of 16,777,224 bytes, allowed: 16,777,216"]),
}
SITE_BOMBS = {
    "folder": (lambda path: folder(path, 250), ["500 images: 1,500,000,000 bytes", "allowed: 1,073,741,824"]),
}

DRIVER = """
import json, resource, sys
sys.path.insert(0, sys.argv[1])
from typer.testing import CliRunner
from kindred.server_app.cli import predict
from kindred.server_app.cli.run import app
used = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # MB
for arguments in json.loads(sys.argv[2]):
    before = used()
    done = CliRunner().invoke(app, arguments)
    print(json.dumps([done.exit_code, done.stdout, done.stderr, used() - before]))
"""


def test_decompression_bombs_are_refused_in_one_line_and_use_no_memory(tmp_path) -> None:
    honest = cnn2(tmp_path / "honest.safetensors")
    np.savez(tmp_path / "honest.npz", x=np.zeros((1, 32, 32, 3), np.uint8))
    png(tmp_path / "small.png", 32, 32)
    bombs = INPUT_BOMBS | MODEL_BOMBS | SITE_BOMBS
    commands = [["predict", "--model", honest, "--input", tmp_path / name] for name in ("honest.npz", "small.png")]
    for name, (make, _) in bombs.items():
        path = make(tmp_path / name)
        if name in INPUT_BOMBS:
            commands.append(["predict", "--model", honest, "--input", path])
        else:
            model, data = (path, tmp_path / "honest.npz") if name in MODEL_BOMBS else (honest, path)
            commands.append(["evaluate", "--model", model, "--data-dir", data])
    arguments = json.dumps([list(map(str, command)) for command in commands])
    done = subprocess.run([sys.executable, "-P", "-c", DRIVER, str(ROOT), arguments], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    (*first, _), (*second, _), *outcomes = map(json.loads, done.stdout.splitlines())
    assert (first[0], second[0]) == (0, 0), (first, second)
    assert len(outcomes) == len(bombs)
    for (name, (_, says)), (code, out, line, taken) in zip(bombs.items(), outcomes, strict=True):
        assert (code, out, line.count("\n")) == (2, "", 1), (name, line)
        assert str(tmp_path / name) in line and all(word in line for word in says), line
        # The first 64 MiB of an archive may be read, which is far less than the file declares.
        assert taken < 120, (name, taken)


def test_a_model_of_very_many_classes_is_not_evaluated(tmp_path) -> None:
    """The size of a confusion matrix is their square."""
    task = image_task((2, 1, 1), 2001)
    save_file(
        get_arrays(make_model("office-mlp", (2, 1, 1), 2001)),
        tmp_path / "a.safetensors",
        task.to_metadata("office-mlp"),
    )
    np.savez(tmp_path / "in.npz", x=np.ones((1, 1, 1, 2)))
    assert kindred("predict", "--model", tmp_path / "a.safetensors", "--input", tmp_path / "in.npz").exit_code == 0
    line = refused("evaluate", "--model", tmp_path / "a.safetensors", "--data-dir", tmp_path)
    assert "2,001 classes, allowed: up to 2,000" in line


def test_a_network_whose_construction_needs_values_can_be_used(tmp_path, monkeypatch) -> None:
    def stochastic(image_shape, num_classes):
        module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(2, num_classes))
        module.rates = [rate.item() for rate in torch.linspace(0, 1, 3)]
        return module

    monkeypatch.setitem(MODELS.own, "stochastic", stochastic)
    arrays = get_arrays(make_model("stochastic", (2, 1, 1), 3))
    path = tmp_path / "a.safetensors"
    for num_classes in (3, 4):
        save_file(arrays, path, image_task((2, 1, 1), num_classes).to_metadata("stochastic"))
        if num_classes == 3:
            assert Predictor.load(path).predictions(np.zeros((1, 2, 1, 1), np.float32)).shape == (1, 3)
        else:
            with pytest.raises(ConfigError, match="cannot be used.*1.weight"):
                Predictor.load(path)


def test_a_table_uses_little_more_memory_than_its_file(tmp_path) -> None:
    for part in ("train", "test"):
        (tmp_path / f"{part}.csv").write_text("a,b,label\n" + "1,22,0\n1,33,1\n" * 20_000)
    schema = Schema((Column("a"), Column("b")), target="label")
    task = Task(TableInputs(schema), Classes(2, names=("0", "1")))
    tracemalloc.start()
    rows = read_site(tmp_path, task=task)
    taken = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert rows.x_train.shape == (40_000, 2) and rows.x_train[1].tolist() == [1, 33]
    assert rows.y_train[:3].tolist() == [0, 1, 0]
    arrays = sum(each.nbytes for each in (rows.x_train, rows.y_train, rows.x_test, rows.y_test))
    assert taken < 4 * arrays  # as lists of strings it would be nine times and more


# --- Damage ---------------------------------------------------------------------------------------------


def damage(content: bytes, place: int, byte: int, cut: bool) -> bytes:
    place %= len(content)
    return content[:place] if cut else content[:place] + bytes([byte]) + content[place + 1 :]


DAMAGE = {"place": st.integers(0, 10**6), "byte": st.integers(0, 255), "cut": st.booleans()}


@pytest.mark.parametrize("kind", ["BMP", "JPEG", "PNG", "PPM", "TIFF", "WEBP"])
@settings(max_examples=60, deadline=None)
@given(**DAMAGE)
def test_a_damaged_image_gives_one_error_or_an_image(tmp_path_factory, kind, place, byte, cut) -> None:
    content = io.BytesIO()
    Image.fromarray(np.arange(60, dtype=np.uint8).reshape(4, 5, 3)).save(content, kind)
    path = tmp_path_factory.getbasetemp() / "damaged.image"
    path.write_bytes(damage(content.getvalue(), place % 200, byte, cut))  # most of it is the header
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            width, height = image_size(path)
            assert width * height <= 50_000_000
            assert read_image(path).size == (width, height)
        except DataError as error:
            assert str(path) in str(error) and "\n" not in str(error)


@settings(max_examples=100, deadline=None)
@given(**DAMAGE)
def test_a_damaged_archive_gives_one_error_or_the_array(tmp_path_factory, place, byte, cut) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.npz"
    np.savez(path, x=np.arange(6, dtype=np.int16))
    path.write_bytes(damage(path.read_bytes(), place, byte, cut))
    try:
        found = read_npz(path, ("x",))["x"]
    except DataError as error:
        assert str(path) in str(error) and "\n" not in str(error)
    else:
        assert found.tolist() == list(range(6))


@settings(max_examples=100, deadline=None)
@given(**DAMAGE, mixed=st.booleans())
def test_a_damaged_model_gives_one_error_or_a_model(tmp_path_factory, place, byte, cut, mixed) -> None:
    arrays = get_arrays(make_model("digits-cnn", (1, 8, 8), 3, seed=1))
    about = image_task((1, 8, 8), 3).to_metadata("digits-cnn")
    if mixed:
        arrays = {f"0/{name}": array for name, array in arrays.items()} | {"shares": np.ones(1)}
        about |= {"clients": "[7]", "kind": "logits"}
    content = save(arrays, about)
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    path.write_bytes(damage(content, place % (8 + int.from_bytes(content[:8], "little")), byte, cut))
    try:
        predictor = Predictor.load(path)
    except ConfigError as error:
        assert str(path) in str(error) and "\n" not in str(error)
    else:
        assert len(predictor.mixture.models) == 1
    if mixed:
        try:
            Mixture.load(path)
        except ValueError as error:
            assert str(path) in str(error)


# --- Valid files ----------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    array=numpy_st.arrays(
        st.one_of(
            numpy_st.boolean_dtypes(),
            numpy_st.integer_dtypes(),
            numpy_st.floating_dtypes(),
            numpy_st.unicode_string_dtypes(endianness="=", min_len=1, max_len=5),
        ),
        numpy_st.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5),
    ),
    fortran=st.booleans(),
    packed=st.booleans(),
)
def test_arrays_match_those_read_by_numpy(tmp_path_factory, array, fortran, packed) -> None:
    path = tmp_path_factory.getbasetemp() / "honest.npz"
    (np.savez_compressed if packed else np.savez)(path, x=np.asfortranarray(array) if fortran else array, y=array)
    with np.load(path) as due, open_npz(path) as found:
        assert sorted(found) == ["x", "y"] and len(found) == 2
        for name in found:
            assert found[name].dtype == due[name].dtype and found[name].shape == due[name].shape
            assert found[name].tobytes("A") == due[name].tobytes("A") and found[name].flags.writeable


def test_a_small_array_is_read_although_compressed_a_thousandfold(tmp_path) -> None:
    mask = np.zeros((20, 1000, 1000), np.uint8)
    np.savez_compressed(tmp_path / "mask.npz", x=mask)
    assert (tmp_path / "mask.npz").stat().st_size < mask.size / 500
    assert np.array_equal(read_npz(tmp_path / "mask.npz", ("x",))["x"], mask)


@pytest.mark.parametrize("suffix", ["bmp", "jpg", "png", "ppm", "tiff", "webp"])
def test_every_documented_kind_of_image_is_read(tmp_path, suffix) -> None:
    pixels = np.full((6, 5, 3), (200, 100, 50), np.uint8)
    Image.fromarray(pixels).save(tmp_path / f"a.{suffix}")
    assert image_size(tmp_path / f"a.{suffix}") == (5, 6)
    assert np.abs(np.asarray(read_image(tmp_path / f"a.{suffix}")).astype(int) - pixels).max() <= 4
    check_folder(tmp_path, [tmp_path / f"a.{suffix}"] * 1000, 2**20)  # a GiB in all, from a tiny file


def test_an_image_of_another_kind_is_refused(tmp_path) -> None:
    Image.new("L", (5, 6)).save(tmp_path / "a.png", "GIF")
    with pytest.raises(DataError, match="read as an image"):
        read_image(tmp_path / "a.png")
