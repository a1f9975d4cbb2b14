"""The public set: its source, that no client has its images, and the errors when there is none."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import kindred.data.public
from kindred.data import PARTITIONS, load_federation
from kindred.data.public import hold_out_size, public_inputs, public_source
from kindred.data.sources import load_dataset

from .refusals import refusal

SETTINGS = {
    "dataset": "npz",
    "data-dir": "",
    "partition": "iid",
    "num-clients": 4,
    "num-groups": 2,
    "samples-per-client": 10,
    "with-replacement": False,
    "dirichlet-alpha": 1.0,
    "min-samples": 10,
    "test-share": 0.3,
    "validation-share": 0,
    "held-out-clients": 0,
    "class-weights": "",
    "inputs": "auto",
    "task": "auto",
    "public-data": "auto",
    "public-size": 0,
    "seed": 0,
}


def write(path, n_train=300, n_test=100, classes=5, shape=(6, 6), dtype=np.uint8, first=0):
    """Write a dataset whose image i has the pixels i // 256 and i % 256; test images are numbered from n_train."""
    arrays = {}
    for name, start, size in (("train", 0, n_train), ("test", n_train, n_test)):
        x = np.zeros((size, *shape), dtype)
        number = first + start + np.arange(size).reshape(-1, *[1] * (len(shape) - 2))
        x[:, 0, 0], x[:, 0, 1] = number // 256, number % 256
        arrays |= {f"x_{name}": x, f"y_{name}": np.arange(size) % classes, f"client_{name}": np.arange(size) % 4}
    np.savez(path, **arrays)
    return str(path)


def numbers(x) -> list[int]:
    return (256 * x[:, 0, 0, 0].astype(int) + x[:, 0, 0, 1]).tolist()


def seen(federation, normalised) -> list[int]:
    """Numbers of normalised images."""
    mean, deviation = (
        np.float32(of)[:, None, None] for of in (federation.task.inputs.mean, federation.task.inputs.deviation)
    )
    return numbers(np.rint(normalised.numpy() * deviation + mean))


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return write(tmp_path_factory.mktemp("data") / "a.npz")


def federation(file, **changes):
    return load_federation(SETTINGS | {"data-dir": str(file)} | {k.replace("_", "-"): v for k, v in changes.items()})


@pytest.mark.parametrize("samples", [0, 10])
@pytest.mark.parametrize("partition", PARTITIONS)
def test_no_client_has_an_image_of_the_public_set(file, partition, samples):
    of_all = partition in ("dirichlet", "dirichlet-clients")
    if not of_all and samples == 0:
        samples = 40
    public_of = federation(file, partition=partition, samples_per_client=samples)
    public = public_of.public_set()
    assert public.shape == (40, 1, 6, 6) and public.dtype == torch.float32  # a tenth of 400
    chosen = seen(public_of, public)  # upright in the rotated partition too
    assert len(set(chosen)) == 40 and set(chosen) <= set(range(400))
    had = []
    for client in range(4):
        site = public_of.site_data(client)
        for images, _ in (site.train, site.validation, site.test):
            upright = torch.rot90(images, -int(public_of.quarter_turns[client]), dims=(2, 3))
            had += seen(public_of, upright)
    assert had and not set(had) & set(chosen)
    assert max(chosen) >= 300 or not of_all  # remaining test images are used too


def test_the_public_set_is_read_once_when_first_requested(file, monkeypatch):
    asked = []

    def reading(dataset, data_dir, **settings):
        asked.append(dataset)
        return load_dataset(dataset, data_dir, **settings)

    monkeypatch.setattr(kindred.data.public, "load_dataset", reading)
    one = federation(file, seed=11)
    assert asked == []
    assert one.public_set() is one.public_set()
    assert asked == ["npz"]


def test_another_seed_draws_another_public_set(file):
    one, other = (federation(file, seed=seed) for seed in (0, 1))
    assert set(seen(one, one.public_set())) != set(seen(other, other.public_set()))


def test_dirichlet_divides_everything_but_the_public_set(file):
    options = {"partition": "dirichlet", "samples_per_client": 0, "dirichlet_alpha": 1e90}
    own = federation(file, **options, public_size=80)
    assert own.public_set().shape[0] == 80
    assert all(len(own.site_data(client).test[1]) in (39, 40, 41) for client in range(4))  # half of 320 / 4
    other = federation(file, **options, public_data="cifar100", public_size=80)
    assert all(len(other.site_data(client).test[1]) in (49, 50, 51) for client in range(4))


def test_dirichlet_clients_divides_all_but_a_public_set_of_all_classes(file):
    options = {"partition": "dirichlet-clients", "samples_per_client": 0, "dirichlet_alpha": 0.001, "public_size": 80}
    own = federation(file, **options)
    classes = [number % 5 for number in seen(own, own.public_set())]  # of 300 training and 100 test images
    public = np.bincount(np.array(classes, int), minlength=5)
    assert public.sum() == 80 and public.min() > 5
    assert all(len(own.site_data(client).test[1]) == 40 for client in range(4))  # half of 320 / 4


def test_auto_chooses_the_source_of_the_public_set():
    assert public_source("auto", "cifar10") == "cifar100"
    assert [public_source("auto", dataset) for dataset in ("digits", "npz")] == ["digits", "npz"]
    assert public_source("mnist", "cifar10") == "mnist"


def test_a_part_of_the_dataset_has_the_requested_size():
    assert [hold_out_size(0, there) for there in (60000, 19999, 400, 9)] == [2000, 1999, 40, 1]
    assert hold_out_size(7, 60000) == 7


def images_of(source, **options):
    options = {"dataset": "cifar10", "data_dir": "", "size": 0, "spare": np.arange(5), "seed": 0} | options
    return public_inputs(source, kind="image", settings={}, **options)


@pytest.mark.parametrize("place", ["", "cifar10.npz"])
def test_images_of_another_dataset_come_from_the_same_folder(tmp_path, place):
    write(tmp_path / "cifar100.npz", 2300, 200, classes=100, shape=(32, 32, 3))
    write(tmp_path / "cifar10.npz", 50, 50, classes=10, shape=(32, 32, 3), first=5000)
    options = {"data_dir": str(tmp_path / place)}
    x = images_of("cifar100", **options)
    assert x.shape == (2000, 3, 32, 32) and x.dtype == np.uint8
    assert len(set(numbers(x))) == 2000 and max(numbers(x)) < 2300  # training images, none twice
    assert np.array_equal(x, images_of("cifar100", **options))
    assert not np.array_equal(x, images_of("cifar100", **options, seed=1))
    assert len(images_of("cifar100", **options, size=2300)) == 2300
    text = refusal(lambda: images_of("cifar100", **options, size=2301))
    assert "public-size is 2301" in text and "cifar100 has 2300 images" in text

    own = federation(tmp_path / place, dataset="cifar10", samples_per_client=5)
    public = own.public_set()
    assert public.shape == (2000, 3, 32, 32) and seen(own, public) == numbers(x)


@pytest.mark.parametrize("shape", [(6, 6), (6, 6, 1)])
def test_images_of_a_file_keep_its_order(file, tmp_path, shape):
    x = np.random.default_rng(0).integers(0, 256, (30, *shape), dtype=np.uint8)
    np.savez(tmp_path / "public.npz", x=x)
    public_of = federation(file, public_data=str(tmp_path / "public.npz"))
    (mean,), (deviation,) = np.float32(public_of.task.inputs.mean), np.float32(public_of.task.inputs.deviation)
    wanted = (x.reshape(30, 1, 6, 6) - mean) / deviation  # on the scale of the clients' images
    assert np.array_equal(public_of.public_set().numpy(), wanted)
    first = federation(file, public_data=str(tmp_path / "public.npz"), public_size=7).public_set()
    assert np.array_equal(first.numpy(), wanted[:7])
    text = refusal(federation(file, public_data=str(tmp_path / "public.npz"), public_size=31).public_set)
    assert "public-size is 31" in text and "has 30 images" in text


@pytest.mark.parametrize(
    ("array", "words"),
    [
        ({"x": np.zeros((3, 5, 6), np.uint8)}, ["public-data", "(1, 5, 6)", "(1, 6, 6)"]),
        ({"x": np.zeros((3, 6, 6, 3), np.uint8)}, ["public-data", "(3, 6, 6)", "(1, 6, 6)"]),
        ({"x": np.zeros((3, 6, 6))}, ["public-data", "float32", "uint8"]),
        ({"x": np.zeros((0, 6, 6), np.uint8)}, ["public.npz: x is empty"]),
        ({"x": np.zeros((3, 6), np.uint8)}, ["public.npz: x has the shape (3, 6)"]),
        ({"x": np.full((3, 6, 6), np.inf)}, ["public.npz: x", "not finite"]),
        ({"x": np.array([{}])}, ["public.npz", "plain arrays"]),
        ({"images": np.zeros((3, 6, 6), np.uint8)}, ["public.npz has no x"]),
    ],
)
def test_files_without_a_public_set_are_refused(file, tmp_path, array, words):
    np.savez(tmp_path / "public.npz", **array)
    text = refusal(federation(file, public_data=str(tmp_path / "public.npz")).public_set)
    assert [word for word in words if word not in text] == []


@pytest.mark.parametrize("source", ["npz", "cfar100", "no/such.npz", ".", ""])
def test_a_source_that_is_neither_dataset_nor_file_is_refused(source):
    text = refusal(lambda: images_of(source))
    assert f"public-data is {source!r}" in text and "auto, digits, mnist" in text and ".npz" in text


def test_a_public_set_without_remaining_images_is_refused(file):
    # 4 clients with 75 training and 25 test images use all 400.
    nothing_left = federation(file, samples_per_client=75)
    text = refusal(nothing_left.public_set)
    assert "public-data is npz" in text and "smaller samples-per-client" in text and "another public-data" in text
    text = refusal(federation(file, samples_per_client=75, public_size=3).public_set)
    assert "another public-data" in text
    few_left = federation(file, samples_per_client=73)  # 8 training images; all test images are used
    text = refusal(few_left.public_set)
    assert "leave 8 images" in text and "which has 40" in text and "public-size 8" in text


def test_a_public_set_with_too_few_remaining_images_is_refused(file):
    text = refusal(federation(file, samples_per_client=73, public_size=9).public_set)
    assert "public-size is 9" in text and "8 images" in text and "smaller samples-per-client" in text
    assert len(federation(file, samples_per_client=73, public_size=8).public_set()) == 8


def test_a_public_set_that_leaves_no_image_to_the_clients_is_refused(file):
    text = refusal(lambda: federation(file, partition="dirichlet", samples_per_client=0, public_size=400))
    assert "400 images" in text and "public-size" in text
    assert "public-size is -1" in refusal(lambda: federation(file, public_size=-1))
