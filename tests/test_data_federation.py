"""The federation: each client's tensors, and the picture of the partition."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import chi2_contingency

from kindred.data import (
    DATASETS,
    PARTITIONS,
    DataError,
    Dataset,
    Federation,
    SiteData,
    load_federation,
    partition_figure,
)
from kindred.data.partitions import Partition
from kindred.data.sources import Images
from kindred.objectives import Number

DIGITS = {
    "dataset": "digits",
    "data-dir": "",
    "partition": "rotated",
    "num-clients": 20,
    "num-groups": 4,
    "samples-per-client": 0,
    "with-replacement": False,
    "dirichlet-alpha": 0.5,
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


def small(x, turns=(0, 0), maps=((0, 1), (0, 1)), y=(0, 1, 0, 1)) -> Federation:
    """Two clients; the first has the images 0 and 1, the second 3 and 2. Both are tested on image 1 of the same four
    images, and the second has image 2 of them for validation."""
    x, y = np.asarray(x), np.asarray(y)
    parts = Partition(
        train=[np.array([0, 1]), np.array([3, 2])],
        validation=[np.array([], int), np.array([6])],
        test=[np.array([5]), np.array([5])],
        spare=np.array([2, 4, 7]),
        groups=np.array([0, 1]),
        quarter_turns=np.array(turns),
        label_maps=np.array(maps),
    )
    return Federation(Images(x, y, x, y, 2), parts)


def tensors(data: SiteData):
    return data.train, data.validation, data.test


def test_images_have_mean_0_and_deviation_1_in_each_channel():
    x = np.zeros((4, 3, 1, 2), np.uint8)
    x[:, 0] = [0, 2]  # mean 1, deviation 1
    x[:2, 1] = 10  # mean 5, deviation 5
    x[:, 2] = 7  # does not vary
    federation = small(x)
    assert (
        federation.task.inputs.shape == (3, 1, 2)
        and federation.task.objective.num_outputs == 2
        and federation.num_clients == 2
    )
    data = federation.site_data(1)
    (x_train, y_train), (x_validation, y_validation), (x_test, y_test) = data.train, data.validation, data.test
    assert x_train.tolist() == [[[[-1, 1]], [[-1, -1]], [[0, 0]]]] * 2
    assert x_validation.tolist() == [[[[-1, 1]], [[-1, -1]], [[0, 0]]]]
    assert x_test.tolist() == [[[[-1, 1]], [[1, 1]], [[0, 0]]]]
    assert y_train.tolist() == [1, 0]  # client 1 has the images 3 and 2 in this order
    assert y_validation.tolist() == [0] and y_test.tolist() == [1]
    assert x_train.dtype == torch.float32 and y_train.dtype == torch.int64
    assert federation.train_sizes.tolist() == [2, 2]


def test_a_client_without_images_has_empty_tensors():
    x, y = np.zeros((4, 3, 2, 2), np.uint8), np.array([0, 1, 0, 1])
    none = np.array([], int)
    parts = Partition(
        train=[none, np.array([0, 1])],
        validation=[none, none],
        test=[none, np.array([4])],
        spare=np.array([2, 3, 5, 6, 7]),
        groups=np.zeros(2, int),
        quarter_turns=np.array([1, 1]),
        label_maps=np.tile([0, 1], (2, 1)),
    )
    federation = Federation(Images(x, y, x, y, 2), parts)
    for images, labels in tensors(federation.site_data(0)):
        assert images.shape == (0, 3, 2, 2) and images.dtype == torch.float32
        assert labels.shape == (0,) and labels.dtype == torch.int64
    assert federation.class_counts().tolist() == [[0, 0], [1, 1]]
    assert federation.train_sizes.tolist() == [0, 2]


def test_integers_and_floats_are_normalised_alike():
    x = np.random.default_rng(0).integers(0, 256, (4, 3, 5, 5), dtype=np.uint8)
    whole, floating = tensors(small(x).site_data(0)), tensors(small(x.astype(np.float32)).site_data(0))
    for (one, _), (other, _) in zip(whole, floating, strict=True):
        assert torch.allclose(one, other, atol=1e-6)


@pytest.mark.parametrize(
    ("turns", "seen"),
    [(0, [[-1, -1], [1, 1]]), (1, [[-1, 1], [-1, 1]]), (2, [[1, 1], [-1, -1]]), (3, [[1, -1], [1, -1]])],
)
def test_rotated_images_are_rotated_counter_clockwise(turns, seen):
    x = np.tile(np.array([[0, 0], [2, 2]], np.uint8), (4, 1, 1, 1))
    for images, _ in tensors(small(x, turns=(0, turns)).site_data(1)):
        assert images[0, 0].tolist() == seen
    assert small(x, turns=(0, turns)).site_data(0).train[0][0, 0].tolist() == [[-1, -1], [1, 1]]


def test_rotated_images_must_be_square():
    with pytest.raises(DataError, match=r"square.*\(1, 2, 3\)"):
        small(np.zeros((4, 1, 2, 3), np.uint8), turns=(0, 1))


def test_features_cannot_be_rotated():
    with pytest.raises(DataError, match=r"more than one pixel.*\(512, 1, 1\)"):
        small(np.zeros((4, 512, 1, 1), np.float32), turns=(0, 1))
    assert small(np.zeros((4, 512, 1, 1), np.float32)).site_data(0).train[0].shape == (2, 512, 1, 1)


def test_a_client_has_its_permuted_labels_in_every_split():
    federation = small(np.zeros((4, 1, 2, 2), np.uint8), maps=((0, 1), (1, 0)), y=(0, 0, 1, 1))
    assert [federation.site_data(client).train[1].tolist() for client in (0, 1)] == [[0, 0], [0, 0]]
    assert [federation.site_data(client).test[1].tolist() for client in (0, 1)] == [[0], [1]]
    assert federation.class_counts().tolist() == [[2, 0], [2, 0]]


def test_only_existing_clients_have_data():
    federation = small(np.zeros((4, 1, 2, 2), np.uint8))
    for client in (-1, 2, "lyon"):
        with pytest.raises(DataError, match=f"client {client} has no data: 2 clients take part"):
            federation.site_data(client)


def test_the_default_federation():
    federation = load_federation(DIGITS)
    assert federation.groups.tolist() == [0] * 5 + [1] * 5 + [2] * 5 + [3] * 5
    assert federation.task.inputs.shape == (1, 8, 8) and federation.task.objective.num_outputs == 10
    assert (federation.class_counts() == 4).all()
    images = []
    for client in range(20):
        data = federation.site_data(client)
        x_train = data.train[0]
        assert x_train.shape == data.test[0].shape == (40, 1, 8, 8) and data.validation[0].shape == (0, 1, 8, 8)
        turned_back = torch.rot90(x_train, -int(federation.groups[client]), dims=(2, 3))
        images += [image.numpy().tobytes() for image in turned_back]
    assert len(set(images)) == 800
    assert load_federation(dict(DIGITS)) is federation  # read once per process


@pytest.mark.parametrize("partition", PARTITIONS)
def test_the_same_settings_give_the_same_data_in_any_order_of_requests(partition, tmp_path):
    rng = np.random.default_rng(0)
    file = tmp_path / "a.npz"
    data = {
        "x_train": rng.integers(0, 256, (300, 6, 6), dtype=np.uint8),
        "y_train": np.arange(300) % 5,
        "client_train": np.arange(300) % 7,
        "x_test": rng.integers(0, 256, (200, 6, 6), dtype=np.uint8),
        "y_test": np.arange(200) % 5,
        "client_test": np.arange(200) % 7,
    }
    np.savez(file, **data)
    np.savez(tmp_path / "b.npz", **data)
    config = DIGITS | {
        "dataset": "npz", "partition": partition, "num-clients": 6, "num-groups": 3, "public-size": 1, "seed": 5
    }  # fmt: skip
    if partition == "by-client":  # which draws only where there are more samples or clients than asked for
        config["samples-per-client"] = 20
    one = load_federation(config | {"data-dir": str(file)})
    other = load_federation(config | {"data-dir": str(tmp_path / "b.npz")})
    assert one is not other
    there = {client: one.site_data(client) for client in range(6)}
    back = {client: other.site_data(client) for client in reversed(range(6))}
    for client in range(6):
        for (x, y), (x_back, y_back) in zip(tensors(there[client]), tensors(back[client]), strict=True):
            assert torch.equal(x, x_back) and torch.equal(y, y_back)
    assert torch.equal(one.public_set(), other.public_set())
    differently = load_federation(config | {"data-dir": str(file), "seed": 6})
    assert not torch.equal(differently.site_data(0).train[0], there[0].train[0])


def test_changing_a_clients_tensors_does_not_change_the_federation():
    federation = load_federation(DIGITS)
    for tensor in federation.site_data(0).train:
        tensor.zero_()
    images, labels = federation.site_data(0).train
    assert images.abs().sum() > 0 and labels.sum() > 0


def test_every_name_has_a_description():
    assert set(DATASETS) == {
        "digits",
        "mnist",
        "fashion-mnist",
        "emnist",
        "cifar10",
        "cifar100",
        "office-home",
        "sites",
        "npz",
        "csv",
        "text",
    }
    assert set(PARTITIONS) == {
        "iid", "pathological", "practical", "rotated", "permuted", "dirichlet", "dirichlet-clients", "label-groups",
        "clustered-dirichlet", "by-client",
    }  # fmt: skip
    for text in [entry.description for entry in (*DATASETS.values(), *PARTITIONS.values())]:
        assert text and "\n" not in text


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        ({}, 3),
        ({"partition": "practical", "num-clients": 100, "num-groups": 7}, 6),
        ({"partition": "iid", "num-clients": 100, "samples-per-client": 5}, 0),
        ({"partition": "dirichlet", "dirichlet-alpha": 0.01}, 0),  # some clients without images
        ({"partition": "dirichlet-clients", "dirichlet-alpha": 0.01}, 0),
        ({"partition": "label-groups", "num-clients": 8}, 3),
        ({"partition": "clustered-dirichlet", "dirichlet-alpha": 0.4}, 0),
    ],
)
def test_a_picture_has_a_line_between_groups(changes, lines, tmp_path):
    from matplotlib.image import imread

    path = tmp_path / "partition.png"
    partition_figure(load_federation(DIGITS | changes)).savefig(path)
    picture = imread(path)
    assert picture.shape[0] > 300 and picture.shape[1] > 400
    orange = (picture[..., 0] > 0.9) & (abs(picture[..., 1] - 0.55) < 0.1) & (picture[..., 2] < 0.1)
    rows = orange.mean(axis=1) > 0.5  # rows that are orange over most of the picture's width
    assert np.count_nonzero(np.diff(rows.astype(int)) == 1) == lines


@pytest.mark.parametrize(
    ("changes", "alike"),
    [
        ({"partition": "iid"}, False),  # by chance: p = 0.04
        ({"partition": "iid", "seed": 1}, True),
        ({"partition": "rotated"}, True),
        ({"partition": "practical"}, False),
        ({"partition": "dirichlet", "dirichlet-alpha": 0.5}, False),
    ],
)
def test_a_picture_says_where_no_difference_of_classes_is_shown(changes, alike):
    federation = load_federation(DIGITS | changes)
    title = partition_figure(federation).axes[0].get_title()
    p = chi2_contingency(federation.class_counts()).pvalue
    line = f"\nno difference in shares of classes shown\n(chi-square test, p = {p:.2f})"
    assert title.endswith(line) == ("no difference" in title) == alike == (p >= 0.05)


def test_a_picture_shows_names_that_look_like_formulas(tmp_path):
    x, y = np.zeros((6, 1, 2, 2), np.uint8), np.array([0, 1] * 3)
    np.savez(tmp_path / "a.npz", x=x, y=y, client=np.repeat(["a$b_$c", "d"], 3))
    changes = {"dataset": "npz", "data-dir": str(tmp_path / "a.npz"), "partition": "by-client", "num-clients": 2}
    federation = load_federation(DIGITS | changes | {"num-groups": 1, "min-samples": 2})
    partition_figure(federation).savefig(tmp_path / "partition.png")
    assert federation.names == ("a$b_$c", "d")


def test_targets_are_the_number_of_classes_or_the_range_of_each_client():
    x = np.zeros((4, 1, 1, 2), np.uint8)
    assert small(x).targets() == [{"classes": 2}, {"classes": 2}]  # images 0 and 1, then 3 and 2
    assert small(x, y=(1, 1, 0, 1)).targets() == [{"classes": 1}, {"classes": 2}]
    numbers = Dataset(x, np.array([3.0, -1.5, 7.0, 2.0]), x, np.zeros(4), Number(1))
    parts = Partition(
        train=[np.array([0, 1, 2]), np.array([], int)],
        validation=[np.array([], int)] * 2,
        test=[np.array([5])] * 2,
        spare=np.array([3]),
        groups=np.array([0, 0]),
        quarter_turns=np.array([0, 0]),
        label_maps=np.array([(0, 1)] * 2),
    )
    assert Federation(numbers, parts).targets() == [{"range": [-1.5, 7.0]}, {}]
