"""The partition by-client: who takes part, what each client has, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kindred.data import DataError, load_federation
from kindred.data.dataset import Dataset
from kindred.data.partitions import PARTITIONS, divide
from kindred.data.splits import hold_out, split
from kindred.objectives import Classes
from kindred.server_app.config import Config

SETTINGS = {
    "dataset": "npz", "num_clients": 2, "num_groups": 1, "samples_per_client": 0, "with_replacement": False,
    "dirichlet_alpha": 1.0, "held_out": 0, "seed": 0, "min_samples": 2, "test_share": 0.5,
}  # fmt: skip

CLIENTS = np.array(["b", "a", "b", "a", "c", "a", "b", "a"])


def by_client(y_train, y_test=(), num_classes=2, partition="by-client", **changes):
    return divide(partition, np.asarray(y_train), np.asarray(y_test, int), num_classes, **(SETTINGS | changes))


def refusal(**changes) -> str:
    with pytest.raises(DataError) as refused:
        by_client(**changes)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_each_client_has_its_own_samples_in_the_order_of_the_data():
    """Training samples are 0 to 4, test samples 5 to 7; client c has one sample, which is too few."""
    found = by_client([0, 1, 0, 1, 0], [1, 0, 1], clients_train=CLIENTS[:5], clients_test=CLIENTS[5:])
    assert found.names == ("a", "b")
    assert [own.tolist() for own in found.train] == [[1, 3], [0, 2]]
    assert [own.tolist() for own in found.test] == [[5, 7], [6]]
    assert found.spare.tolist() == [4] and [len(own) for own in found.validation] == [0, 0]


def test_all_clients_take_part_whatever_the_seed_and_fewer_are_drawn_by_it():
    clients = np.repeat([f"client-{i:02}" for i in range(20)], 4)
    y = np.arange(80) % 2
    everyone = [by_client(y, clients_train=clients, num_clients=20, seed=seed).names for seed in range(3)]
    assert everyone == [tuple(sorted(set(clients.tolist())))] * 3
    some = [by_client(y, clients_train=clients, num_clients=5, seed=seed).names for seed in range(3)]
    assert len(set(some)) == 3 and all(names == tuple(sorted(names)) and len(names) == 5 for names in some)


def test_clients_with_numbers_are_in_the_order_of_these():
    clients = np.repeat(["10", "9", "x", "2"], 2)
    assert by_client(np.zeros(8, int), clients_train=clients, num_clients=4).names == ("2", "9", "10", "x")


def test_a_share_of_each_class_of_each_client_is_for_test():
    clients = np.repeat(["a", "b"], [40, 20])
    y = np.concatenate([np.arange(40) % 4 == 0, np.arange(20) % 2]).astype(int)  # a: 30 and 10; b: 10 and 10
    found = by_client(y, clients_train=clients, test_share=0.3)
    counts = [[np.bincount(y[own]).tolist() for own in part] for part in (found.train, found.test)]
    assert counts == [[[21, 7], [7, 7]], [[9, 3], [3, 3]]]
    for own_train, own_test, name in zip(found.train, found.test, found.names, strict=True):
        assert sorted([*own_train, *own_test]) == np.flatnonzero(clients == name).tolist()
    other = by_client(y, clients_train=clients, test_share=0.3, seed=1)
    assert not np.array_equal(found.test[0], other.test[0])


def test_the_later_part_is_for_test_where_there_are_times():
    """Client a has the samples 1, 3, 5 and 7 at the times 8, 2, 6 and 4."""
    times = np.array([0, 8, 1, 2, 2, 6, 3, 4])
    found = by_client(np.zeros(8, int), clients_train=CLIENTS, times=times)
    assert found.train[0].tolist() == [3, 7] and found.test[0].tolist() == [1, 5]
    assert by_client(np.zeros(8, int), clients_train=CLIENTS, times=times, seed=1).test[0].tolist() == [1, 5]


def test_fewer_training_samples_of_each_class_leave_the_test_part_unchanged():
    clients = np.repeat(["a", "b"], [40, 12])
    y = np.arange(52) % 2
    whole, part = (by_client(y, clients_train=clients, samples_per_client=size) for size in (0, 8))
    assert [own.tolist() for own in whole.test] == [own.tolist() for own in part.test]
    assert np.bincount(y[part.train[0]]).tolist() == [4, 4]
    assert set(part.train[0]) < set(whole.train[0])
    assert part.train[1].tolist() == whole.train[1].tolist()  # has only 6
    assert set(part.spare) == set(whole.train[0]) - set(part.train[0])


def test_other_partitions_divide_data_without_a_test_part_first():
    y = np.arange(40) % 2
    found = by_client(y, partition="iid", test_share=0.25)
    assert [len(own) for own in found.train] == [15, 15] and sum(map(len, found.test)) <= 10
    assert not set(np.concatenate(found.train)) & set(np.concatenate(found.test))
    assert set(np.concatenate([*found.train, *found.test, found.spare])) == set(range(40))


def test_iid_needs_no_classes_and_other_partitions_say_that_they_do():
    numbers = np.linspace(0, 1, 40)
    found = by_client(numbers, numbers[:10], num_classes=0, partition="iid")
    assert [len(own) for own in found.train] == [20, 20] and [len(own) for own in found.test] == [5, 5]
    assert len(set(np.concatenate(found.train))) == 40
    text = refusal(y_train=numbers, num_classes=0, partition="rotated")
    assert text == "partition rotated needs classes, which npz has not here, allowed: iid, by-client"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ["by-client needs data that say whose", "npz do not"]),
        ({"clients_train": CLIENTS, "num_clients": 3}, ["num-clients is 3", "up to 2", "min-samples 2", "3 clients"]),
        ({"clients_train": CLIENTS, "num_clients": 4, "min_samples": 1}, ["num-clients is 4", "up to 3"]),
        ({"clients_train": CLIENTS, "num_clients": 3, "min_samples": 1}, ["1 samples", "one each"]),
        (
            {"y_test": [0, 1, 0, 1], "clients_train": CLIENTS, "clients_test": np.array(["a", "b", "d", "d"])},
            ["'d' has 2 test samples and no training samples"],
        ),
        (
            {"y_test": [0, 1], "clients_train": CLIENTS, "clients_test": np.array(["a", "a"])},
            ["'b' has 3 training samples and no test samples"],
        ),
    ],
)
def test_clients_that_cannot_be_are_refused_in_one_line(changes, words):
    if "clients_test" in changes:
        changes = changes | {"num_clients": 3 if "d" in changes["clients_test"] else 2}
    text = refusal(y_train=np.arange(8) % 2, **changes)
    assert [word for word in words if word not in text] == []


def test_clients_without_part_and_rows_in_both_parts_are_named(tmp_path):
    """Client c has one row; of the rows for test one of a and one of b are equal to a row for training of their own."""
    (tmp_path / "train.csv").write_text("age,who,t\n1,a,0\n2,a,1\n,a,1\n5,b,0\n6,b,1\n7,c,0\n")
    (tmp_path / "test.csv").write_text("age,who,t\n,a,1\n2,a,0\n5,b,0\n2,b,1\n")
    settings = Config(
        dataset="csv", data_dir=str(tmp_path), target="t", client="who", partition="by-client", num_clients=2,
        num_groups=1, min_samples=2, samples_per_client=0, validation_share=0.0,
    )  # fmt: skip
    found = load_federation(settings.run_config())
    assert found.remarks == (
        "1 of 3 clients in the data take no part, by num-clients or min-samples; with their samples: c (1)",
        "2 of 4 rows for test are equal to a row for training",
    )


def test_clients_without_part_do_not_count_in_means(tmp_path):
    arrays = {part: np.array([[1.0], [3.0], [5.0], [7.0], [1e6], [1e6]]) for part in ("x_train", "x_test")}
    arrays["x_test"] = arrays["x_test"] + 0.5
    arrays |= {f"y_{part}": np.array([0, 1] * 3) for part in ("train", "test")}
    arrays |= {f"client_{part}": np.array(["a", "a", "b", "b", "c", "c"]) for part in ("train", "test")}
    np.savez(tmp_path / "a.npz", **arrays)
    means = {}
    for clients, seed in ((3, 0), (2, 0), (2, 1), (2, 2), (2, 3)):
        settings = Config(
            dataset="npz", data_dir=str(tmp_path / "a.npz"), partition="by-client", num_clients=clients, num_groups=1,
            min_samples=2, samples_per_client=0, validation_share=0.0, seed=seed,
        )  # fmt: skip
        found = load_federation(settings.run_config())
        means[found.names] = found.task.inputs.schema.columns[0].mean
    assert means.keys() >= {("a", "b", "c"), ("a", "b")}  # which two is drawn
    expected = {("a", "b", "c"): 2_000_016 / 6, ("a", "b"): 4, ("a", "c"): 2_000_004 / 4, ("b", "c"): 2_000_012 / 4}
    assert means == {names: expected[names] for names in means}


@pytest.mark.parametrize("partition", [name for name, scheme in PARTITIONS.items() if scheme.total])
def test_partitions_that_divide_samples_anew_refuse_times_and_say_what_they_do(partition, tmp_path):
    rng = np.random.default_rng(0)
    x, y = rng.random((200, 3)), np.arange(200) % 4
    np.savez(tmp_path / "times.npz", x=x, y=y, time=np.arange(200.0))
    np.savez(tmp_path / "parts.npz", x_train=x[:150], y_train=y[:150], x_test=x[150:], y_test=y[150:])
    settings = Config(dataset="npz", partition=partition, num_clients=4, num_groups=2, samples_per_client=0)
    with pytest.raises(DataError, match=f"partition is '{partition}', .* has times, allowed: .*by-client; or no times"):
        load_federation(replace(settings, data_dir=str(tmp_path / "times.npz")).run_config())
    remarks = load_federation(replace(settings, data_dir=str(tmp_path / "parts.npz")).run_config()).remarks
    assert f"{partition} divides all samples anew, so that clients train on some that npz has for test" in remarks


def test_a_split_has_a_sample_on_either_side():
    rng = np.random.default_rng(0)
    assert all([len(part) for part in split(2, share, rng)] == [1, 1] for share in (0.01, 0.99))
    assert [len(part) for part in split(10, 0.3, rng)] == [7, 3]
    # a class with one sample cannot be on both sides: then nothing is divided by class
    assert [len(part) for part in split(4, 0.5, rng, np.array([0, 0, 0, 1]))] == [2, 2]


# --- Validation ---------------------------------------------------------------------------------------------


def held_out(y, classes=2, **changes):
    """Return the labels of the training and validation samples of one client with these labels, and of another one."""
    y, other = np.asarray(y), np.array([0, 1] * 5)
    both = np.concatenate([y, other])
    clients = np.repeat(["a", "b"], [len(y), len(other)])
    test = {"y_test": [0, 1], "clients_test": np.array(["a", "b"])}
    found = by_client(both, clients_train=clients, num_classes=classes, **(test | changes))
    return [both[part[0]].tolist() for part in (found.train, found.validation)]


def test_samples_keep_their_times_when_a_dataset_is_divided():
    """Samples at the times 4 and 5 of six are for test; a partition may use both parts together."""
    x = np.array([[3.0], [5.0], [0.0], [4.0], [2.0], [1.0]])
    data = Dataset(x, np.array([0, 1] * 3), x[:0], np.zeros(0, int), Classes(2), "table", times=x[:, 0])
    found = data.divided(1 / 3, np.random.default_rng(0))
    assert found.times.tolist() == [*found.x_train[:, 0], *found.x_test[:, 0]] == [3, 0, 2, 1, 5, 4]


@pytest.mark.parametrize("seed", range(8))
def test_a_share_of_each_class_is_for_validation_and_each_class_keeps_a_training_sample(seed):
    train, validation = held_out([0] * 10 + [1] * 5, validation_share=0.2, seed=seed)
    assert (sorted(train), sorted(validation)) == ([0] * 8 + [1] * 4, [0, 0, 1])
    train, validation = held_out([0] * 4 + [1], validation_share=0.2, seed=seed)  # the only 1 stays, for any draw
    assert (sorted(train), sorted(validation)) == ([0, 0, 0, 1], [0])
    train, validation = held_out([0, 0, 1, 1], validation_share=0.9, seed=seed)
    assert set(train) == {0, 1} and validation


def test_a_class_that_comes_last_keeps_its_first_sample_for_training():
    train, validation = held_out(
        [0, 0, 0, 0, 1, 1], y_test=(), clients_test=None, test_share=1 / 7, validation_share=0.4,
        times=np.r_[np.arange(6), np.arange(10)],
    )  # fmt: skip
    assert (train, validation) == ([0, 0, 1], [0, 0])  # of 5: by time the last two, 0 and 1, were for validation


def test_a_client_of_which_no_sample_can_be_held_out_keeps_all_for_training():
    y_train, clients = np.array([0, 0, 0, 1, 1]), np.array(["a", "b", "b", "b", "c"])
    given = {"y_test": [0, 1, 1], "clients_test": np.array(["a", "b", "c"]), "validation_share": 0.2}
    given |= {"num_clients": 3, "min_samples": 1}
    found = by_client(y_train=y_train, clients_train=clients, **given)
    assert [len(own) for own in found.train] == [1, 2, 1] and [len(own) for own in found.validation] == [0, 1, 0]
    assert refusal(y_train=[0, 1, 1], clients_train=np.array(["a", "b", "c"]), **given) == (
        "validation-share is 0.2, and no client has more than 1 training sample of any class, so that none can be held "
        "out, allowed: 0, or more samples"
    )


def test_no_sample_is_held_out_and_trained_on() -> None:
    classes = np.array([0] * 9 + [1])
    for seed in range(20):  # in some, the only sample of class 1 is drawn for validation, and comes back
        train, validation = hold_out(10, 0.3, np.random.default_rng(seed), classes)
        assert sorted([*train, *validation]) == list(range(10)) and len(validation) == 3 and 9 in train


def test_each_class_has_its_share_in_test() -> None:
    classes = np.repeat([0, 1], [20, 10])
    for seed in range(5):
        _, test = split(30, 0.3, np.random.default_rng(seed), classes)
        assert np.bincount(classes[test]).tolist() == [6, 3]
