"""The partitions: which client gets which images, sizes, class mixtures, groups, and settings that are impossible."""

from __future__ import annotations

from hashlib import sha256

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from kindred.data.partitions import PARTITIONS, divide
from kindred.data.partitions.request import Partition
from kindred.data.sources import DataError

DEALT = [name for name, scheme in PARTITIONS.items() if scheme.total]
OTHERS = [name for name in PARTITIONS if name not in (*DEALT, "by-client")]

MNIST_TRAIN = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
MNIST_TEST = [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]


def labels(class_sizes) -> np.ndarray:
    """Labels of `class_sizes` images of each class, in a mixed order."""
    return np.random.default_rng(7).permutation(np.repeat(np.arange(len(class_sizes)), class_sizes))


def part(partition, train, test=None, **options):
    """Divide a dataset given by its class sizes."""
    options = {
        "dataset": "npz",
        "num_clients": 4,
        "num_groups": 2,
        "samples_per_client": 0,
        "with_replacement": False,
        "dirichlet_alpha": 0.5,
        "held_out": 0,
        "seed": 0,
    } | options
    return divide(partition, labels(train), labels(test or train), len(train), **options)


def counts(indices, class_sizes, first=0) -> np.ndarray:
    """Clients x classes of indices that count from `first`."""
    y = np.concatenate([np.full(first, -1), labels(class_sizes)])
    return np.stack([np.bincount(y[index], minlength=len(class_sizes)) for index in indices])


def assert_even(table) -> None:
    """Each row's numbers differ by at most one."""
    assert (np.ptp(table, axis=1) <= 1).all()


PAPER = {
    "mnist": (MNIST_TRAIN, MNIST_TEST, [20] * 5, [500, 400, 300, 200, 100], np.arange(10).reshape(5, 2)),
    "fashion-mnist": ([6000] * 10, [1000] * 10, [20] * 5, [600, 500, 400, 300, 200], np.arange(10).reshape(5, 2)),
    "emnist": (
        [2000] * 62,
        [300] * 62,
        [10, 26, 26],
        [1000, 700, 400],
        [range(10), range(10, 36), range(36, 62)],
    ),
}


@pytest.mark.parametrize("dataset", PAPER)
def test_practical_has_the_papers_sizes_and_mixtures(dataset):
    train, test, clients, sizes, own_classes = PAPER[dataset]
    got = part("practical", train, test, dataset=dataset, num_clients=sum(clients), num_groups=4)
    assert got.groups.tolist() == np.repeat(range(len(clients)), clients).tolist()
    for indices, class_sizes, first, sizes_due in (
        (got.train, train, 0, np.repeat(sizes, clients)),
        (got.test, test, sum(train), [100] * sum(clients)),
    ):
        table = counts(indices, class_sizes, first)
        assert table.sum(1).tolist() == list(sizes_due)
        for group, own in enumerate(own_classes):
            mine = table[got.groups == group]
            assert (mine[:, list(own)].sum(1) * 10 == mine.sum(1) * 8).all()
            assert_even(mine[:, list(own)])
            assert_even(np.delete(mine, list(own), axis=1))
    assert len(np.unique(np.concatenate(got.train))) == np.repeat(sizes, clients).sum()


def test_cifar100_has_one_superclass_for_each_group():
    got = part("practical", [500] * 100, [100] * 100, dataset="cifar100", num_clients=100, num_groups=4)
    table = counts(got.train, [500] * 100)
    assert table.sum(1).tolist() == [500] * 20 + [400] * 20 + [300] * 20 + [200] * 20 + [100] * 20
    own = [sorted(np.argsort(table[5 * group])[-5:].tolist()) for group in range(20)]
    assert own[0] == [4, 30, 55, 72, 95]  # beaver, dolphin, otter, seal, whale
    assert own[2] == [54, 62, 70, 82, 92]  # orchid, poppy, rose, sunflower, tulip
    assert own[19] == [41, 69, 81, 85, 89]  # lawn mower, rocket, streetcar, tank, tractor
    assert sorted(sum(own, [])) == list(range(100))
    for client in range(100):
        assert table[client, own[client // 5]].sum() * 10 == table[client].sum() * 8


@pytest.mark.parametrize(("dataset", "classes", "test_images"), [("fashion-mnist", 10, 1000), ("cifar100", 100, 100)])
def test_test_images_are_not_shared_where_they_just_suffice(dataset, classes, test_images):
    train = [60000 // classes] * classes
    got = part("practical", train, [test_images] * classes, dataset=dataset, num_clients=100, num_groups=4)
    assert sorted(np.concatenate(got.test).tolist()) == list(range(60000, 70000))


def test_explicit_settings_override_the_papers():
    sizes = {"train": [6000] * 10, "test": [1000] * 10, "dataset": "fashion-mnist"}
    papers = part("practical", **sizes, num_clients=100, num_groups=5)
    assert [len(index) for index in papers.train[::20]] == [600, 500, 400, 300, 200]
    for own in ({"num_clients": 100, "num_groups": 4, "samples_per_client": 90}, {"num_clients": 50, "num_groups": 4}):
        got = part("practical", **sizes, **own)
        assert len({len(index) for index in got.train}) == 1
        assert set(got.groups) == {0, 1, 2, 3}


def test_practical_gives_dominating_classes_their_share():
    got = part("practical", [20] * 4, samples_per_client=10)
    assert got.groups.tolist() == [0, 0, 1, 1]
    assert counts(got.train, [20] * 4).tolist() == [[4, 4, 1, 1], [4, 4, 1, 1], [1, 1, 4, 4], [1, 1, 4, 4]]
    # The one image of the other classes goes to one class after another.
    odd = part("practical", [20] * 4, samples_per_client=5)
    assert counts(odd.train, [20] * 4).tolist() == [[2, 2, 1, 0], [2, 2, 0, 1], [1, 0, 2, 2], [0, 1, 2, 2]]


def test_practical_divides_classes_and_clients_nearly_equally():
    got = part("practical", [100] * 7, num_clients=8, num_groups=3, samples_per_client=30)
    assert got.groups.tolist() == [0, 0, 0, 1, 1, 1, 2, 2]
    table = counts(got.train, [100] * 7)
    assert (table[got.groups == 0][:, :3].sum(1) == 24).all()
    assert (table[got.groups == 1][:, 3:5].sum(1) == 24).all()
    assert (table[got.groups == 2][:, 5:].sum(1) == 24).all()


def test_pathological_has_two_classes_a_client_and_no_groups():
    got = part("pathological", [6000] * 10, [1000] * 10, num_clients=100, samples_per_client=600)
    table = counts(got.train, [6000] * 10)
    assert ((table == 300).sum(1) == 2).all() and ((table == 0).sum(1) == 8).all()
    assert (table.sum(0) == 6000).all()  # 20 shards of 300 from each class
    assert (got.groups == 0).all()
    assert len({tuple(row) for row in table}) > 20  # of 45 possible pairs
    assert ((counts(got.test, [1000] * 10, first=60000) > 0) == (table > 0)).all()


def test_pathological_takes_more_shards_from_larger_classes():
    got = part("pathological", [300, 100, 100, 100], num_clients=3, samples_per_client=200)
    table = counts(got.train, [300, 100, 100, 100])
    assert table[:, 0].tolist() == [100, 100, 100]  # three shards, one for each client
    assert sorted(table[:, 1:].tolist()) == [[0, 0, 100], [0, 100, 0], [100, 0, 0]]


@pytest.mark.parametrize("seed", range(20))
def test_pathological_finds_pairs_for_all_shards(seed):
    # Six shards of 30 images are all there is: a careless choice leaves both shards of one class to the last client.
    got = part("pathological", [60] * 3, num_clients=3, samples_per_client=60, seed=seed)
    assert sorted(np.concatenate(got.train).tolist()) == list(range(180))


def test_iid_divides_all_images():
    got = part("iid", [30, 50, 20], num_clients=10, samples_per_client=10)
    assert sorted(np.concatenate(got.train).tolist()) == list(range(100))
    assert (counts(got.train, [30, 50, 20]).std(0) > 0).all()  # drawn, not dealt out evenly


@pytest.mark.parametrize("partition", ["rotated", "permuted"])
def test_conflicting_groups_have_uniform_classes_and_as_many_test_images(partition):
    got = part(partition, [100] * 5, num_clients=10, num_groups=4, samples_per_client=20)
    assert got.groups.tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 3, 3]
    assert (counts(got.train, [100] * 5) == 4).all()
    assert (counts(got.test, [100] * 5, first=500) == 4).all()


def test_rotated_turns_and_permuted_relabels():
    rotated = part("rotated", [50] * 3, num_clients=8, num_groups=4)
    assert rotated.quarter_turns.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert (rotated.label_maps == [0, 1, 2]).all()
    permuted = part("permuted", [50] * 3, num_clients=6, num_groups=6)
    assert (permuted.quarter_turns == 0).all()
    assert permuted.label_maps[0].tolist() == [0, 1, 2]
    assert len({tuple(row) for row in permuted.label_maps}) == 6  # all orders that there are
    assert (np.sort(permuted.label_maps, axis=1) == [0, 1, 2]).all()


def test_0_samples_is_the_most_images_that_all_clients_can_have():
    assert {len(i) for i in part("rotated", [90] * 10, dataset="digits", num_clients=20).train} == {40}
    assert {len(i) for i in part("rotated", [6000] * 10, num_clients=20).train} == {500}
    assert {len(i) for i in part("iid", [6000] * 10, num_clients=1000).train} == {60}
    # Digits practical: the two dominating classes of the last groups suffice for fewer than 40 images a client.
    got = part("practical", [89] * 10, dataset="digits", num_clients=20, num_groups=4)
    size = len(got.train[0])
    assert 30 < size < 40
    with pytest.raises(DataError):
        part("practical", [89] * 10, dataset="digits", num_clients=20, num_groups=4, samples_per_client=size + 1)


def test_test_images_are_as_many_as_asked_for_or_an_equal_share():
    assert {len(i) for i in part("practical", [6000] * 10, [1000] * 10, num_clients=20, num_groups=4).test} == {100}
    assert {len(i) for i in part("iid", [6000] * 10, [1000] * 10, num_clients=100).test} == {100}  # an equal share
    assert {len(i) for i in part("practical", [100] * 4, [10] * 4).test} == {40}  # all available
    got = part("practical", [90] * 10, dataset="digits", num_clients=20, num_groups=4, samples_per_client=30)
    assert {len(i) for i in got.test} == {30}


@pytest.mark.parametrize(
    ("partition", "options", "words"),
    [
        ("shards", {}, ["shards", "iid", "permuted", "dirichlet"]),
        ("dirichlet", {"dirichlet_alpha": 0.0}, ["dirichlet-alpha", "0.0", "above 0"]),
        ("dirichlet", {"dirichlet_alpha": float("nan")}, ["dirichlet-alpha", "nan", "above 0"]),
        ("dirichlet", {"dirichlet_alpha": float("inf")}, ["dirichlet-alpha", "inf", "below 1e100"]),
        ("dirichlet", {"samples_per_client": 21}, ["samples-per-client", "21", "0 to 20", "80 images", "4 clients"]),
        ("dirichlet", {"samples_per_client": -1}, ["samples-per-client", "-1", "0 to 20"]),
        ("dirichlet", {"held_out": 77}, ["77 images", "all 80", "4 clients", "public-size"]),
        ("dirichlet", {"num_clients": 1}, ["1 of 1 clients", "training images", "at least 2"]),
        ("dirichlet", {"samples_per_client": 1}, ["of 4 clients", "training images", "dirichlet-alpha (it is 0.5)"]),
        ("dirichlet-clients", {"dirichlet_alpha": 0.0}, ["dirichlet-alpha", "0.0", "above 0"]),
        ("dirichlet-clients", {"dirichlet_alpha": float("nan")}, ["dirichlet-alpha", "nan", "above 0"]),
        ("dirichlet-clients", {"dirichlet_alpha": float("inf")}, ["dirichlet-alpha", "inf", "below 1e100"]),
        ("dirichlet-clients", {"samples_per_client": 21}, ["samples-per-client", "21", "0 to 20", "80 images"]),
        ("dirichlet-clients", {"samples_per_client": -1}, ["samples-per-client", "-1", "0 to 20"]),
        ("dirichlet-clients", {"held_out": 77}, ["77 images", "all 80", "4 clients", "public-size"]),
        ("dirichlet-clients", {"samples_per_client": 1}, ["0 of 4 clients", "a larger samples-per-client"]),
        ("label-groups", {"num_groups": 5, "num_clients": 8}, ["num-groups", "5", "1 to 4", "number of classes"]),
        ("label-groups", {"num_groups": 4, "num_clients": 3}, ["num-groups", "4", "1 to 3", "num-clients"]),
        ("label-groups", {"num_groups": 0}, ["num-groups", "0", "1 to 4"]),
        ("label-groups", {"samples_per_client": 1}, ["samples-per-client is 1", "0 or 2 to 10"]),
        ("label-groups", {"samples_per_client": 11}, ["is 11", "0 or 2 to 10", "group 0 has 20 images", "2 clients"]),
        ("label-groups", {"samples_per_client": -1}, ["samples-per-client is -1", "0 or 2 to 10"]),
        ("label-groups", {"samples_per_client": 10**15}, ["samples-per-client", "0 or 2 to 10"]),
        ("label-groups", {}, ["takes 4 of 40 images", "too few for 4 clients", "set samples-per-client"]),
        (
            "label-groups",
            {"num_clients": 37, "num_groups": 3, "samples_per_client": 2},
            ["10 images of its classes", "each client needs 2 or more", "fewer clients"],
        ),
        ("clustered-dirichlet", {"num_groups": 5, "num_clients": 8}, ["num-groups", "5", "1 to 4", "classes"]),
        ("clustered-dirichlet", {"dirichlet_alpha": 0.0}, ["dirichlet-alpha", "0.0", "above 0"]),
        ("clustered-dirichlet", {"samples_per_client": 11}, ["is 11", "0 to 10", "40 images for training and test of"]),
        ("clustered-dirichlet", {"num_clients": 5}, ["takes 4 of 40 images", "too few for 5 clients"]),
        (
            "clustered-dirichlet",
            {"num_groups": 1, "dirichlet_alpha": 1e-9},
            ["1 of 4 clients", "training images", "dirichlet-alpha (it is 1e-09)"],
        ),
        ("iid", {"num_clients": 41}, ["num-clients", "41", "40"]),
        ("iid", {"num_clients": 0}, ["num-clients", "0"]),
        ("iid", {"samples_per_client": -1}, ["samples-per-client", "-1"]),
        ("iid", {"samples_per_client": 11}, ["40 training images", "samples-per-client 11", "4 clients"]),
        ("iid", {"samples_per_client": 10**15}, ["40 training images", "with-replacement=true"]),
        ("iid", {"samples_per_client": 41, "with_replacement": True}, ["40 training images", "41", "one client"]),
        ("pathological", {"samples_per_client": 1}, ["samples-per-client", "1", "2"]),
        ("practical", {"num_groups": 5}, ["num-groups", "5", "2 to 4", "num-clients"]),
        ("practical", {"num_groups": 5, "num_clients": 8}, ["num-groups", "5", "2 to 4", "classes"]),
        ("practical", {"num_groups": 1}, ["num-groups", "1", "2 to 4"]),
        ("rotated", {"num_groups": 5, "num_clients": 8}, ["num-groups", "5", "1 to 4", "quarter turns"]),
        ("permuted", {"num_groups": 30, "num_clients": 30}, ["num-groups", "30", "1 to 24", "orders"]),
        ("permuted", {"num_groups": 0}, ["num-groups", "0"]),
        (
            "practical",
            {"samples_per_client": 13, "num_clients": 3},
            ["class 0 has 10 training images", "12 of it", "samples-per-client (it is 13)", "with-replacement=true"],
        ),
    ],
)
def test_impossible_settings_are_refused_in_one_line(partition, options, words):
    with pytest.raises(DataError) as error:
        part(partition, [10] * 4, **options)
    text = str(error.value)
    assert "\n" not in text
    assert [word for word in words if word not in text] == []


def test_a_class_that_runs_out_in_the_papers_setting_is_named():
    with pytest.raises(DataError, match=r"class \d+ has 200 training images and the 100 clients need 45\d of it"):
        part("practical", [200] * 100, [50] * 100, dataset="cifar100", num_clients=100, num_groups=4)


def test_a_class_without_test_images_is_named():
    with pytest.raises(DataError, match="class 2 has no test images"):
        part("rotated", [20] * 3, [20, 20, 0])


def test_with_replacement_a_class_restarts_after_its_last_image():
    got = part("rotated", [10] * 4, samples_per_client=12, with_replacement=True)
    assert (counts(got.train, [10] * 4) == 3).all()
    assert all(len(np.unique(index)) == 12 for index in got.train)
    assert len(np.unique(np.concatenate(got.train))) == 40  # all 40 are used before any is used again


def test_test_images_may_go_to_several_clients_but_never_twice_to_one():
    got = part("practical", [1000] * 4, [40] * 4, num_clients=10, samples_per_client=100)
    assert all(len(index) == 100 for index in got.test)
    table = counts(got.test, [40] * 4, first=4000)
    assert table[0].tolist() == [40, 40, 10, 10]
    assert all(len(np.unique(index)) == 100 for index in got.test)


@settings(max_examples=150, deadline=None)
@given(
    partition=st.sampled_from(OTHERS),
    class_sizes=st.lists(st.integers(2, 60), min_size=2, max_size=8),
    test_sizes=st.integers(1, 30),
    num_clients=st.integers(1, 14),
    num_groups=st.integers(1, 6),
    samples=st.integers(0, 40),
    with_replacement=st.booleans(),
    seed=st.integers(0, 2**40),
)
def test_every_partition_is_consistent(
    partition, class_sizes, test_sizes, num_clients, num_groups, samples, with_replacement, seed
):
    test = [test_sizes] * len(class_sizes)
    options = {
        "num_clients": num_clients,
        "num_groups": num_groups,
        "samples_per_client": samples,
        "with_replacement": with_replacement,
        "seed": seed,
    }
    try:
        got = part(partition, class_sizes, test, **options)
    except DataError as error:
        assert "\n" not in str(error)
        if with_replacement:  # then no class can run out
            assert "num-" in str(error) or "samples-per-client" in str(error)
        return

    again = part(partition, class_sizes, test, **options)
    for one, other in ((got.train, again.train), (got.test, again.test)):
        assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
    assert np.array_equal(got.label_maps, again.label_maps)
    assert [index.shape for index in got.validation] == [(0,)] * num_clients
    had = set(np.concatenate(got.train + got.test).tolist())
    assert set(got.spare.tolist()) == set(range(sum(class_sizes) + sum(test))) - had

    table, test_table = counts(got.train, class_sizes), counts(got.test, test, sum(class_sizes))
    assert len(got.train) == len(got.test) == len(got.groups) == num_clients
    assert len(set(table.sum(1))) == 1 and table.sum(1)[0] == (samples or table.sum(1)[0]) > 0
    assert len(set(test_table.sum(1))) == 1 and test_table.sum(1)[0] > 0
    if not with_replacement or samples == 0:
        used = np.concatenate(got.train)
        if (table.sum(0) <= class_sizes).all():
            assert len(np.unique(used)) == len(used)
        else:
            assert with_replacement
    for indices, given_counts, there in ((got.train, table, class_sizes), (got.test, test_table, test)):
        for index, need in zip(indices, given_counts, strict=True):
            assert len(np.unique(index)) == np.minimum(need, there).sum()  # twice only beyond the class's size

    assert (np.diff(got.groups) >= 0).all()
    if partition in ("practical", "rotated", "permuted"):
        assert set(got.groups) == set(range(num_groups))
    else:
        assert set(got.groups) == {0}
    if partition in ("rotated", "permuted"):
        assert_even(table)
        assert np.ptp(table.sum(0)) <= 1
    if partition == "pathological":
        assert ((table > 0).sum(1) == 2).all()
    if partition == "practical":
        widths = [len(own) for own in np.array_split(np.arange(len(class_sizes)), num_groups)]
        start = np.cumsum([0, *widths])
        for client, group in enumerate(got.groups):
            own = table[client, start[group] : start[group + 1]].sum()
            assert abs(own - 0.8 * table[client].sum()) <= 0.5


@settings(max_examples=30, deadline=None)
@given(
    partition=st.sampled_from(OTHERS),
    class_sizes=st.lists(st.integers(20, 90), min_size=4, max_size=8),
    num_clients=st.integers(4, 8),
)
def test_0_samples_is_the_most_for_which_all_classes_suffice(partition, class_sizes, num_clients):
    size = len(part(partition, class_sizes, num_clients=num_clients).train[0])
    with pytest.raises(DataError):
        part(partition, class_sizes, num_clients=num_clients, samples_per_client=size + 1)


def test_another_seed_gives_another_partition():
    one, other = (part("rotated", [100] * 5, seed=seed) for seed in (0, 1))
    assert set(one.train[0]) != set(other.train[0])
    assert set(one.test[0]) != set(other.test[0])
    permuted = [part("permuted", [100] * 8, seed=seed).label_maps[-1].tolist() for seed in (0, 1)]
    assert permuted[0] != permuted[1]


def test_a_clients_images_are_in_mixed_order():
    order = labels([100] * 5)[part("rotated", [100] * 5).train[0]]
    assert (np.diff(order) < 0).any() and (np.diff(order) > 0).any()


PINNED = {
    "iid": ("1ac72c077be14a2a", "25a0d42740322d1b"),
    "pathological": ("e66898bb112fbdfc", "50128e9f1d975514"),
    "practical": ("230e85de2ac5a99b", "9e9266ce7ad40199"),
    "rotated": ("19fdd29ce462d0d6", "62a16d01e7fda4d1"),
    "permuted": ("6c337f2325977971", "e6c393f815b3df99"),
    "dirichlet": ("141fcf5febb06a54", "c0762f82a1477457"),
    "dirichlet-clients": ("4cb9eb1fa9613e9b", "acbc8cb2c6b8dad9"),
    "label-groups": ("1e840e5eba543af0", "2e19cc4461bf81a4"),
    "clustered-dirichlet": ("92f406ee4ba3aa45", "a7bd0b0f33986b8c"),
}


@pytest.mark.parametrize("partition", PINNED)
def test_a_seed_gives_the_same_images_from_version_to_version(partition):
    sizes = {"train": [60, 50, 70, 40], "test": [20, 30, 10, 15]}
    cases = (
        {"num_clients": 6, "num_groups": 3, "seed": 3},
        {"num_clients": 5, "num_groups": 2, "samples_per_client": 50, "with_replacement": True, "seed": 4},
    )
    if partition in DEALT:
        cases = (cases[0] | {"dataset": "digits"}, cases[1] | {"samples_per_client": 20, "held_out": 20})
    digests = []
    for options in cases:
        got = part(partition, **sizes, **options)
        test = [indices - 220 for indices in got.test]
        arrays = [*got.train, *test, got.groups, got.quarter_turns, got.label_maps]
        if partition in DEALT:
            arrays += [*got.validation, got.spare]
        digests.append(sha256(b"".join(array.astype("<i8").tobytes() for array in arrays)).hexdigest()[:16])
    assert tuple(digests) == PINNED[partition]


# --- Dirichlet ----------------------------------------------------------------------------------------------


def owned(got) -> list[np.ndarray]:
    return [np.concatenate(parts) for parts in zip(got.train, got.validation, got.test, strict=True)]


def divided_twice(partition: str, class_sizes, test, **options) -> Partition | None:
    """Return a partition, the same when made again, of different images; None if it is refused, by one line."""
    try:
        got = part(partition, class_sizes, test, **options)
    except DataError as error:
        assert "\n" not in str(error)
        return None
    again = part(partition, class_sizes, test, **options)
    for name in ("train", "validation", "test"):
        pairs = zip(getattr(got, name), getattr(again, name), strict=True)
        assert all(np.array_equal(one, other) for one, other in pairs)
    assert np.array_equal(got.spare, again.spare)

    used = np.concatenate([*owned(got), got.spare])
    assert len(np.unique(used)) == len(used) and 0 <= used.min() and used.max() < sum(class_sizes) + sum(test)
    return got


@settings(max_examples=150, deadline=None)
@given(
    class_sizes=st.lists(st.integers(2, 60), min_size=2, max_size=8),
    test_sizes=st.integers(1, 30),
    num_clients=st.integers(1, 14),
    samples=st.integers(0, 20),
    alpha=st.floats(0, 1e99, exclude_min=True),
    held_out=st.integers(0, 20),
    seed=st.integers(0, 2**40),
)
def test_every_dirichlet_partition_is_consistent(class_sizes, test_sizes, num_clients, samples, alpha, held_out, seed):
    test = [test_sizes] * len(class_sizes)
    n = sum(class_sizes) + sum(test)
    options = {
        "num_clients": num_clients,
        "samples_per_client": samples,
        "dirichlet_alpha": alpha,
        "held_out": held_out,
        "seed": seed,
    }
    got = divided_twice("dirichlet", class_sizes, test, **options)
    if got is None:
        return
    assert len(got.spare) == (n - num_clients * samples if samples else held_out)
    assert len(got.train) == len(got.validation) == len(got.test) == num_clients
    assert sum(len(train) > 0 for train in got.train) >= 2
    for train, test_part in zip(got.train, got.test, strict=True):
        assert len(test_part) >= (len(train) > 0)
    assert set(got.groups) == set(got.quarter_turns) == {0}
    assert (got.label_maps == np.arange(len(class_sizes))).all()


def test_dirichlet_splits_are_tenths_of_a_client_s_images():
    # With so large an alpha, 10 clients have 100 images each.
    got = part("dirichlet", [400, 400], [100, 100], num_clients=10, dirichlet_alpha=1e90)
    sizes = {tuple(map(len, parts)) for parts in zip(got.train, got.validation, got.test, strict=True)}
    assert sizes == {(10, 10, 50), (30, 10, 50), (40, 10, 50)}
    # All splits draw from the dataset's training and test images.
    for indices in (got.train, got.validation, got.test):
        assert np.concatenate(indices).min() < 800 <= np.concatenate(indices).max()


@pytest.mark.parametrize(("k", "sizes"), [
    (2, {(0, 0, 1), (1, 0, 1)}),
    (5, {(0, 1, 2), (1, 1, 2), (2, 0, 3)}),
    (15, {(1, 2, 7), (4, 2, 7), (6, 1, 8)}),
])  # fmt: skip
def test_dirichlet_rounds_the_splits_of_few_images(k, sizes):
    train, test = [40, 40 * (k - 1)], [10, 10 * (k - 1)]  # k images for each of 50 clients
    got = part("dirichlet", train, test, num_clients=50, dirichlet_alpha=1e90)
    assert {tuple(map(len, parts)) for parts in zip(got.train, got.validation, got.test, strict=True)} == sizes


def test_dirichlet_splits_of_a_client_have_its_class_mixture():
    got = part("dirichlet", [4000] * 4, [1000] * 4, num_clients=3, dirichlet_alpha=1.0)
    y = np.concatenate([labels([4000] * 4), labels([1000] * 4)])
    for train, test in zip(got.train, got.test, strict=True):
        shares = [np.bincount(y[indices], minlength=4) / len(indices) for indices in (train, test)]
        assert abs(shares[0] - shares[1]).max() < 0.07


def test_dirichlet_with_a_large_alpha_is_even_and_with_a_small_one_skewed():
    tables = {}
    for alpha in (0.05, 1e6):
        got = part("dirichlet", [500] * 10, [100] * 10, num_clients=20, dirichlet_alpha=alpha)
        y = np.concatenate([labels([500] * 10), labels([100] * 10)])
        tables[alpha] = np.stack([np.bincount(y[indices], minlength=10) for indices in got.test])
    assert (abs(tables[1e6].sum(1) - 150) <= 6).all() and tables[1e6].min() > 4
    skewed = tables[0.05]
    assert (skewed == 0).mean() > 0.5 and skewed.max(0).min() > 100  # few have much of a class, most nothing


def test_dirichlet_shares_follow_the_distribution():
    # The share of a client in a class is Beta(a, (m - 1) a): mean 1 / m, variance (m - 1) / (m^2 (m a + 1)).
    shares = []
    for seed in range(200):
        got = part("dirichlet", [1000] * 5, [1000] * 5, num_clients=4, dirichlet_alpha=0.5, seed=seed)
        y = np.concatenate([labels([1000] * 5)] * 2)
        shares += [np.bincount(y[indices], minlength=5) / 1000 for indices in got.test]  # half of 2000 images
    shares = np.concatenate(shares)
    assert abs(shares.mean() - 0.25) < 0.002 and abs(shares.var() - 3 / (16 * 3)) < 0.004


def test_dirichlet_gives_the_requested_number_of_images_on_average():
    got = part("dirichlet", [400, 400], [100, 100], num_clients=4, samples_per_client=100, dirichlet_alpha=1e90)
    assert len(got.spare) == 600
    assert {len(test) for test in got.test} <= {49, 50, 51}
    everything = part("dirichlet", [400, 400], [100, 100], num_clients=4, dirichlet_alpha=1e90, held_out=200)
    assert len(everything.spare) == 200
    assert {len(test) for test in everything.test} <= {99, 100, 101}


def test_dirichlet_can_give_a_client_no_images():
    got = part("dirichlet", [100, 100], [20, 20], num_clients=30, dirichlet_alpha=0.01)
    assert sum(len(train) == 0 for train in got.train) > 15


def test_another_seed_gives_another_dirichlet():
    one, other = (part("dirichlet", [100] * 5, seed=seed, held_out=10) for seed in (0, 1))
    assert set(one.spare) != set(other.spare)
    assert [len(indices) for indices in one.test] != [len(indices) for indices in other.test]


# --- Dirichlet, client by client ----------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(
    class_sizes=st.lists(st.integers(2, 60), min_size=2, max_size=8),
    test_sizes=st.integers(1, 30),
    num_clients=st.integers(1, 14),
    samples=st.integers(0, 20),
    alpha=st.floats(0, 1e99, exclude_min=True),
    held_out=st.integers(0, 20),
    seed=st.integers(0, 2**40),
)
def test_every_client_by_client_partition_is_consistent(
    class_sizes, test_sizes, num_clients, samples, alpha, held_out, seed
):
    test = [test_sizes] * len(class_sizes)
    n = sum(class_sizes) + sum(test)
    options = {
        "num_clients": num_clients,
        "samples_per_client": samples,
        "dirichlet_alpha": alpha,
        "held_out": held_out,
        "seed": seed,
    }
    got = divided_twice("dirichlet-clients", class_sizes, test, **options)
    if got is None:
        return
    size = samples or (n - held_out) // num_clients
    assert len(got.spare) == n - num_clients * size >= (0 if samples else held_out)
    cuts = [np.diff((np.array([0, r, r + 1, r + 6]) * size + 4) // 10).tolist() for r in (1, 3, 4)]  # halves down
    for parts in zip(got.train, got.validation, got.test, strict=True):
        assert list(map(len, parts)) in cuts and len(parts[2]) >= (len(parts[0]) > 0)
    assert sum(len(train) > 0 for train in got.train) >= 2
    assert set(got.groups) == set(got.quarter_turns) == {0}
    assert (got.label_maps == np.arange(len(class_sizes))).all()


def test_client_by_client_all_clients_have_the_same_number_of_images():
    sizes = {"train": [500] * 10, "test": [100] * 10, "num_clients": 20, "dirichlet_alpha": 0.01}
    got = part("dirichlet-clients", **sizes, samples_per_client=300)  # all 6000 images
    assert {tuple(map(len, parts)) for parts in zip(got.train, got.validation, got.test, strict=True)} == {
        (30, 30, 150), (90, 30, 150), (120, 30, 150)
    }  # fmt: skip
    assert len(got.spare) == 0
    odd = part("dirichlet-clients", **sizes | {"num_clients": 21}, held_out=100)
    assert {len(test) for test in odd.test} == {140}  # half of (6000 - 100) // 21 = 280, of which 20 images are left
    assert len(odd.spare) == 120


def classes_of_clients(got, *class_sizes) -> np.ndarray:
    """Clients x classes of all used images of each client, of the dataset's training and test images together."""
    return both(owned(got), *class_sizes)


@settings(max_examples=100, deadline=None)
@given(
    class_sizes=st.lists(st.integers(2, 60), min_size=2, max_size=8),
    num_clients=st.integers(2, 14),
    seed=st.integers(0, 2**40),
)
def test_with_a_tiny_alpha_a_client_has_one_class_unless_it_takes_the_last_image_of_one(class_sizes, num_clients, seed):
    test = [4] * len(class_sizes)
    options = {"num_clients": num_clients, "dirichlet_alpha": 5e-324, "seed": seed}
    try:
        got = part("dirichlet-clients", class_sizes, test, **options)
    except DataError:
        return
    table = classes_of_clients(got, class_sizes, test)
    # The last client can have the last images of several classes.
    assert ((table > 0).sum(1) > 1).sum() <= len(class_sizes) - 1


def test_a_class_of_which_no_client_wants_more_serves_whole_clients():
    got = part("dirichlet-clients", [15, 15, 15], [5, 5, 5], num_clients=6, dirichlet_alpha=1e-300)  # 10 each of 60
    table = classes_of_clients(got, [15] * 3, [5] * 3)
    assert ((table > 0).sum(1) == 1).all()
    assert np.bincount(table.argmax(1)).tolist() == [2, 2, 2]


def test_mixtures_of_clients_follow_the_distribution():
    # A client's probability of a class is Beta(a, (C - 1) a): mean 1 / C, variance (C - 1) / (C^2 (C a + 1)), here
    # 3 / 48. Its share of n images has in addition the variance E[q (1 - q)] / n, here 1/8 / n.
    shares = []
    for seed in range(300):
        options = {"num_clients": 4, "samples_per_client": 80, "dirichlet_alpha": 0.5, "seed": seed}
        got = part("dirichlet-clients", [1000] * 4, [200] * 4, **options)
        y = np.concatenate([labels([1000] * 4), labels([200] * 4)])
        shares += [np.bincount(y[indices], minlength=4) / 40 for indices in got.test]
    shares = np.array(shares)
    assert shares.mean(0) == pytest.approx([0.25] * 4, abs=0.02)
    assert shares.var() == pytest.approx(3 / 48 + 1 / 8 / 40, abs=0.004)


def one_by_one(class_sizes, num_clients, size, alpha, rng) -> np.ndarray:
    """Shares of the classes, client by client and image by image: the class by q among those with images left."""
    left, counts = np.array(class_sizes), np.zeros((num_clients, len(class_sizes)))
    mixtures = rng.dirichlet([alpha] * len(class_sizes), num_clients)
    for client in range(num_clients):
        for _ in range(size):
            q = mixtures[client] * (left > 0)
            drawn = rng.choice(len(left), p=q / q.sum())
            counts[client, drawn] += 1
            left[drawn] -= 1
    return counts / size


def test_a_class_that_is_used_up_is_left_out_of_a_clients_mixture():
    # 3 clients take 60 of 65 images; class 2 has 10. Means over seeds, against an independent loop over images.
    rng, means, oracle = np.random.default_rng(1), np.zeros((2, 3, 3)), np.zeros((2, 3, 3))
    for seed in range(500):
        options = {"num_clients": 3, "samples_per_client": 20, "dirichlet_alpha": 0.7, "seed": seed}
        got = part("dirichlet-clients", [20, 25, 8], [5, 5, 2], **options)
        table = classes_of_clients(got, [20, 25, 8], [5, 5, 2])
        shares, expected = table / table.sum(1, keepdims=True), one_by_one([25, 30, 10], 3, 20, 0.7, rng)
        means += np.stack([shares, shares**2]) / 500
        oracle += np.stack([expected, expected**2]) / 500
    assert means[0] == pytest.approx(oracle[0], abs=0.05)
    assert means[1] == pytest.approx(oracle[1], abs=0.05)
    assert oracle[0][0, 2] - oracle[0][2, 2] > 0.15  # the last client finds little of class 2


def test_client_by_client_a_large_alpha_is_even_and_another_seed_gives_other_mixtures():
    options = {"num_clients": 5, "samples_per_client": 400}
    even = part("dirichlet-clients", [1000] * 4, [200] * 4, dirichlet_alpha=1e90, **options)
    table = classes_of_clients(even, [1000] * 4, [200] * 4)
    assert abs(table / table.sum(1, keepdims=True) - 0.25).max() < 0.1
    one, other = (part("dirichlet-clients", [1000] * 4, [200] * 4, **options, seed=seed) for seed in (0, 1))
    assert (
        classes_of_clients(one, [1000] * 4, [200] * 4).tolist()
        != classes_of_clients(other, [1000] * 4, [200] * 4).tolist()
    )


# --- Label groups and clustered Dirichlet -------------------------------------------------------------------


def both(indices, *class_sizes) -> np.ndarray:
    """Clients x classes of indices that count on from the training images' labels to the test images'."""
    y = np.concatenate([labels(sizes) for sizes in class_sizes])
    return np.stack([np.bincount(y[index], minlength=len(class_sizes[0])) for index in indices])


def classes_of_groups(got, class_sizes) -> list[set[int]]:
    table = counts(owned(got), class_sizes)
    return [set(np.flatnonzero(table[got.groups == group].sum(0)).tolist()) for group in range(got.groups[-1] + 1)]


@settings(max_examples=150, deadline=None)
@given(
    partition=st.sampled_from(["label-groups", "clustered-dirichlet"]),
    dataset=st.sampled_from(["npz", "digits", "office-home"]),
    class_sizes=st.lists(st.integers(2, 60), min_size=2, max_size=8),
    test_sizes=st.integers(1, 30),
    num_clients=st.integers(2, 14),
    num_groups=st.integers(1, 6),
    samples=st.integers(0, 20),
    alpha=st.floats(0, 1e99, exclude_min=True),
    seed=st.integers(0, 2**40),
)
def test_every_federico_partition_is_consistent(
    partition, dataset, class_sizes, test_sizes, num_clients, num_groups, samples, alpha, seed
):
    test = [test_sizes] * len(class_sizes)
    n_train, n = sum(class_sizes), sum(class_sizes) + sum(test)
    options = {
        "dataset": dataset,
        "num_clients": num_clients,
        "num_groups": num_groups,
        "samples_per_client": samples,
        "dirichlet_alpha": alpha,
        "held_out": 5,
        "seed": seed,
    }
    try:
        got = part(partition, class_sizes, test, **options)
    except DataError as error:
        assert "\n" not in str(error)
        return
    again = part(partition, class_sizes, test, **options)
    for name in ("train", "test"):
        pairs = zip(getattr(got, name), getattr(again, name), strict=True)
        assert all(np.array_equal(one, other) for one, other in pairs)
    assert np.array_equal(got.spare, again.spare) and np.array_equal(got.groups, again.groups)

    assert [len(index) for index in got.validation] == [0] * num_clients
    used = np.concatenate(owned(got))
    assert sorted(np.concatenate([used, got.spare]).tolist()) == list(range(n))  # every image once
    there = n if dataset == "office-home" else n_train
    assert used.max() < there
    share = 0.1 if dataset == "npz" else 1
    assert len(used) == (num_clients * samples if samples else round(share * there))
    for train, test_part in zip(got.train, got.test, strict=True):
        assert len(train) == (len(train) + len(test_part)) * 8 // 10
    assert sum(len(train) > 0 for train in got.train) >= 2
    assert set(got.quarter_turns) == {0} and (got.label_maps == np.arange(len(class_sizes))).all()

    if partition == "clustered-dirichlet":
        assert set(got.groups) == {0}
        return
    assert got.groups.tolist() == [client * num_groups // num_clients for client in range(num_clients)]
    table = both(owned(got), class_sizes, test)
    assert table.sum(1).min() >= 2 and all(len(train) and len(rest) for train, rest in zip(got.train, got.test))
    own = [set(np.flatnonzero(table[got.groups == group].sum(0)).tolist()) for group in range(num_groups)]
    assert sum(map(len, own)) == len(set.union(*own))  # disjoint
    for group in range(num_groups):
        assert np.ptp(table[got.groups == group].sum(1)) <= (0 if samples else 1)


@pytest.mark.parametrize(
    ("dataset", "classes", "per_class", "groups", "images"),
    [("cifar10", 10, 5000, 2, 625), ("cifar100", 100, 500, 4, 7500 / 8), ("mnist", 10, 6000, 4, 750)],
)
def test_label_groups_use_the_papers_fraction_of_images(dataset, classes, per_class, groups, images):
    sizes = [per_class] * classes
    got = part("label-groups", sizes, [10] * classes, dataset=dataset, num_clients=8, num_groups=groups)
    totals = counts(owned(got), sizes).sum(1)
    assert totals.sum() == 8 * images
    assert totals == pytest.approx(images, rel=0.35 if classes % groups else 0.1)  # 2 or 3 classes a group, of 2.5
    for train, test in zip(got.train, got.test, strict=True):
        assert len(train) == pytest.approx(4 * len(test), abs=4)
    # Random within the group's classes: no class is missing or exactly even.
    own = [sorted(part) for part in classes_of_groups(got, sizes)]
    assert sorted(sum(own, [])) == list(range(classes))
    mine = counts(got.train, sizes)[0][own[0]]
    assert mine.min() > 0 and np.ptp(mine) > 1


def test_label_groups_use_all_of_digits_and_features():
    sizes, tests = [30] * 4, [20] * 4
    digits = part("label-groups", sizes, tests, dataset="digits")
    assert sorted(np.concatenate(owned(digits))) == list(range(120)) and len(digits.spare) == 80
    office = part("label-groups", sizes, tests, dataset="office-home")
    assert sorted(np.concatenate(owned(office))) == list(range(200)) and len(office.spare) == 0


def test_label_groups_have_nearly_equal_class_sets_that_follow_the_seed():
    found = set()
    for seed in range(12):
        got = part("label-groups", [40] * 7, dataset="digits", num_clients=6, num_groups=3, seed=seed)
        own = classes_of_groups(got, [40] * 7)
        assert [len(classes) for classes in own] == [3, 2, 2]
        found.add(tuple(map(frozenset, own)))
    assert len(found) > 8


def test_label_groups_give_the_requested_number_of_images_a_client():
    # 8 clients in 4 groups of one class of 10 images: at most 5 images a client are available.
    got = part("label-groups", [10] * 4, num_clients=8, num_groups=4, samples_per_client=5)
    assert {tuple(map(len, parts)) for parts in zip(got.train, got.test, strict=True)} == {(4, 1)}
    assert sorted(np.concatenate(owned(got))) == list(range(40))
    few = part("label-groups", [10] * 4, num_clients=8, num_groups=4, samples_per_client=2)
    assert {tuple(map(len, parts)) for parts in zip(few.train, few.test, strict=True)} == {(1, 1)}
    assert len(few.spare) == 24 + 40


def test_another_seed_gives_clients_other_images_of_one_set_of_classes():
    one, other = (part("label-groups", [50] * 4, num_groups=1, samples_per_client=10, seed=seed) for seed in (0, 1))
    assert set(one.train[0]) != set(other.train[0])


def test_splits_of_a_client_in_label_groups_are_random():
    got = part("label-groups", [2000] * 4, dataset="digits", num_clients=4, num_groups=2)
    y = labels([2000] * 4)
    for train, test in zip(got.train, got.test, strict=True):
        assert abs(np.bincount(y[train], minlength=4) / len(train) - np.bincount(y[test], minlength=4) / len(test)
                   ).max() < 0.07  # fmt: skip
        assert (np.diff(y[train]) < 0).any() and (np.diff(y[train]) > 0).any()


def test_clustered_dirichlet_skews_clusters_and_not_classes():
    sizes = [2000] * 12
    got = part("clustered-dirichlet", sizes, dataset="digits", num_clients=10, num_groups=4, dirichlet_alpha=0.4)
    shares = counts(owned(got), sizes) / 2000  # (m, C): a client's share of a class is about its share in the cluster
    like = abs(shares[:, :, None] - shares[:, None, :]).max(0) < 0.06  # (C, C)
    clusters = {tuple(row) for row in like.tolist()}
    assert len(clusters) == 4 and (like.sum(1) == 3).all()
    assert shares.max() > 0.3 and np.sort(shares, axis=0)[2].max() < 0.05  # skewed: some clients with next to none


def test_clustered_dirichlet_shares_follow_the_distribution():
    # As in dirichlet: mean 1 / m, variance (m - 1) / (m^2 (m a + 1)).
    shares = []
    for seed in range(300):
        got = part("clustered-dirichlet", [500] * 4, dataset="digits", num_groups=2, dirichlet_alpha=0.4, seed=seed)
        table = counts(owned(got), [500] * 4) / 500  # two classes of a cluster give the same result
        first = table[:, 0]
        partner = 1 + np.argmin(abs(table[:, 1:] - first[:, None]).sum(0))
        others = [c for c in (1, 2, 3) if c != partner]
        shares += [table[:, [0, partner]].mean(1), table[:, others].mean(1)]
    shares = np.concatenate(shares)
    assert abs(shares.mean() - 0.25) < 0.002 and abs(shares.var() - 3 / (16 * 2.6)) < 0.006


def test_clustered_dirichlet_can_give_a_client_no_images_and_follows_the_seed():
    options = {"num_clients": 30, "num_groups": 4, "dirichlet_alpha": 0.02, "dataset": "digits"}
    one, other = (part("clustered-dirichlet", [100] * 8, **options, seed=seed) for seed in (0, 1))
    assert sum(len(train) == 0 for train in one.train) > 10
    assert [len(train) for train in one.train] != [len(train) for train in other.train]


def test_clustered_dirichlet_with_a_cluster_for_each_class_has_dirichlets_spread():
    got = part("clustered-dirichlet", [300] * 5, dataset="digits", num_groups=5, dirichlet_alpha=1e90)
    assert (counts(owned(got), [300] * 5) == 75).all()
