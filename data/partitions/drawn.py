"""Partitions that fix how many images of each class a client has, and then draw that many.

Each partition first fixes a matrix of counts, clients x classes, and then draws that many images (`draw`), without
replacement over the whole federation. Training images are drawn from the dataset's training images, test images from
its test images. In rotated and permuted the classes are uniform; groups of clients see images or labels differently.

Where an amount is not a multiple of the number of classes, the remaining images go to one class after another. Each
client continues at the class where the previous client stopped, so totals by class differ by at most one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..files import DataError
from ..sources import CIFAR100_SUPERCLASSES
from .request import Partition, Request, as_classes, as_clients, check_size, in_groups, make_partition

# (have (C,), sizes (m,)) -> (m, C): images of each class for each client, where the dataset has `have` of each class
Share = Callable[[np.ndarray, np.ndarray], np.ndarray]


@dataclass(frozen=True)
class PaperSetting:
    """The practical setting of Huang et al., AAAI 2021 (arXiv:2007.03797), appendix C; one entry per group."""

    clients: list[int]
    classes: list[int]
    train_sizes: list[int]


PAPER_SETTINGS = {
    "mnist": PaperSetting([20] * 5, [2] * 5, [500, 400, 300, 200, 100]),
    "fashion-mnist": PaperSetting([20] * 5, [2] * 5, [600, 500, 400, 300, 200]),
    "emnist": PaperSetting([10, 26, 26], [10, 26, 26], [1000, 700, 400]),
    "cifar100": PaperSetting([5] * 20, [5] * 20, [500] * 4 + [400] * 4 + [300] * 4 + [200] * 4 + [100] * 4),
}


def iid(ask: Request) -> Partition:
    """Give every client the same mix of all classes, in random order; without classes, samples of one distribution."""
    if not ask.num_classes:
        y_train, y_test = (np.zeros(len(y), int) for y in (ask.y_train, ask.y_test))
        ask = replace(ask, y_train=y_train, y_test=y_test, num_classes=1)
    check_size(ask)
    seed = int(ask.rng(0).integers(2**63))  # the random part of a rule is drawn once
    return _draw_shares(ask, lambda have, sizes: _iid_counts(have, sizes, seed))


def pathological(ask: Request) -> Partition:
    """Give every client images of two classes alone."""
    check_size(ask, least=2)
    pairs = _class_pairs(ask.have_train, ask.num_clients, ask.rng(0))
    return _draw_shares(ask, lambda have, sizes: _pair_counts(pairs, sizes, ask.num_classes), least=2)


def practical(ask: Request) -> Partition:
    """Give each client 80% of its images from its group's classes, 20% from the others.

    The classes are divided in order into as many sets as there are groups, their sizes differing by at most one
    (CIFAR-100's in the order of their superclasses). Every client has equally many images, and 100 for test except with
    digits. The FedAMP paper's setting, with its groups and sizes, is used instead where dataset and number of clients
    are the paper's, samples_per_client is 0, and num_groups is 4 (the default) or the paper's.
    """
    check_size(ask)
    paper = PAPER_SETTINGS.get(ask.dataset)
    own: dict[str, Any] = {}
    order = np.arange(ask.num_classes)
    if ask.dataset == "cifar100":
        order = np.argsort(CIFAR100_SUPERCLASSES, kind="stable")
    if (
        paper
        and ask.samples_per_client == 0
        and ask.num_clients == sum(paper.clients)
        and ask.num_groups in (4, len(paper.clients))
    ):
        groups, widths = np.repeat(np.arange(len(paper.clients)), paper.clients), paper.classes
        own = {
            "train_sizes": np.repeat(paper.train_sizes, paper.clients),
            "advice": "a samples-per-client of your own instead of the paper's sizes, ",
        }
    else:
        groups = in_groups(ask, as_clients(ask) | as_classes(ask), least=2)  # one group has no other classes
        widths = [len(part) for part in np.array_split(order, ask.num_groups)]
    if ask.dataset != "digits":
        own["test_size"] = min(100, len(ask.y_test))
    return _draw_shares(ask, lambda _, sizes: _practical_counts(sizes, groups, order, widths), groups=groups, **own)


def rotated(ask: Request) -> Partition:
    """Turn the images of each group of clients by as many quarter turns as the group's number."""
    check_size(ask)
    groups = in_groups(ask, as_clients(ask) | {"4, the different quarter turns": 4})
    return _draw_shares(ask, lambda _, sizes: even(ask, sizes), groups=groups, quarter_turns=groups)


def permuted(ask: Request) -> Partition:
    """Rename the classes of each group of clients by the group's permutation."""
    check_size(ask)
    orders = {"the different orders of the classes": math.factorial(ask.num_classes)} if ask.num_classes < 20 else {}
    groups = in_groups(ask, as_clients(ask) | orders)
    label_maps = _permutations(ask.num_groups, ask.num_classes, ask.rng(3))[groups]
    return _draw_shares(ask, lambda _, sizes: even(ask, sizes), groups=groups, label_maps=label_maps)


def _draw_shares(
    ask: Request,
    share: Share,
    *,
    least: int = 1,
    train_sizes: np.ndarray | None = None,
    test_size: int | None = None,
    **more: Any,
) -> Partition:
    """Draw the images that a rule gives each client; sizes are equal without train_sizes (m,). more: see `draw`."""
    m = ask.num_clients
    if train_sizes is None:
        most = min(40 if ask.dataset == "digits" else 500, len(ask.y_train) // m)
        size = ask.samples_per_client or _largest_size(share, ask.have_train, m, least, most)
        train_sizes = np.full(m, size)
    if test_size is None:
        test_size = max(least, min(int(train_sizes[0]), len(ask.y_test) // m))
    return draw(ask, share(ask.have_train, train_sizes), share(ask.have_test, np.full(m, test_size)), **more)


def draw(
    ask: Request, train_counts: np.ndarray, test_counts: np.ndarray, *, advice: str = "", **seen: np.ndarray
) -> Partition:
    """Draw the given numbers of images of each class, (m, C), for each client; DataError where a class has too few.

    `advice` names another remedy for that error. `seen` are groups, quarter_turns or label_maps of the `Partition`.
    """
    m = ask.num_clients
    short = train_counts.sum(0) - ask.have_train  # (C,)
    if (short > 0).any() and not ask.with_replacement:
        worst = int(np.argmax(short))
        if ask.samples_per_client:
            advice = f"a smaller samples-per-client (it is {ask.samples_per_client}), "
        raise DataError(
            f"class {worst} has {ask.have_train[worst]} training images and the {m} clients need "
            f"{train_counts[:, worst].sum()} of it: take fewer clients, {advice}or with-replacement=true"
        )
    for name, have, counts in (("training", ask.have_train, train_counts), ("test", ask.have_test, test_counts)):
        missing = np.flatnonzero((have == 0) & (counts.sum(0) > 0))
        if len(missing):
            raise DataError(f"class {missing[0]} has no {name} images, and partition {ask.partition} needs some")

    n = len(ask.y_train)
    train = _pick(ask.y_train, train_counts, ask.rng(1))
    test = [n + indices for indices in _pick(ask.y_test, test_counts, ask.rng(2))]
    spare = np.setdiff1d(np.arange(n + len(ask.y_test)), np.concatenate(train + test))
    return make_partition(ask, train, [np.empty(0, int)] * m, test, spare, **seen)


# --- Steps of the functions above ---------------------------------------------------------------------


def even(ask: Request, amounts: np.ndarray) -> np.ndarray:
    """Spread each client's amount (m,) equally over all classes: (m, C)."""
    return spread(amounts, np.arange(ask.num_classes), ask.num_classes)


def spread(amounts: np.ndarray, classes: np.ndarray, num_classes: int) -> np.ndarray:
    """Spread each client's amount (m,) equally over classes (k,), remaining images in turn: (m, C)."""
    extra = amounts % len(classes)  # (m,)
    turn = (np.arange(len(classes)) - (np.cumsum(extra) - extra)[:, None]) % len(classes)  # (m, k)
    counts = np.zeros((len(amounts), num_classes), int)
    counts[:, classes] = (amounts // len(classes))[:, None] + (turn < extra[:, None])
    return counts


def _practical_counts(sizes: np.ndarray, groups: np.ndarray, order: np.ndarray, widths: list[int]) -> np.ndarray:
    """Spread 80% of each client's images over its group's own classes, 20% over the others: (m, C).

    The other classes are in cyclic order after the group's own, so the remaining images of different groups go to
    different classes.
    """
    counts = np.zeros((len(sizes), len(order)), int)
    for group, (end, width) in enumerate(zip(np.cumsum(widths), widths, strict=True)):
        members = groups == group
        own = (4 * sizes[members] + 2) // 5  # 80%, rounded
        cyclic = np.roll(order, width - end)
        counts[members] = spread(own, cyclic[:width], len(order))
        counts[members] += spread(sizes[members] - own, cyclic[width:], len(order))
    return counts


def _iid_counts(have: np.ndarray, sizes: np.ndarray, seed: int) -> np.ndarray:
    """Count the classes in a uniform draw of sizes (m,) from all images: (m, C)."""
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(have)), have))
    counts = np.zeros((len(sizes), len(have)), int)
    np.add.at(counts, (np.repeat(np.arange(len(sizes)), sizes), np.resize(labels, sizes.sum())), 1)
    return counts


def _class_pairs(have: np.ndarray, num_clients: int, rng: np.random.Generator) -> np.ndarray:
    """Choose two classes for each client, (m, 2): McMahan et al.'s two shards a client, but never two of one class.

    The 2 m shards are allotted to the classes by highest quotients, so that the smallest number of images per shard
    is as large as possible. No class gets more shards than there are clients.
    """
    quotients = have[:, None] / np.arange(1, num_clients + 1)  # (C, m)
    taken = np.argsort(-quotients, axis=None, kind="stable")[: 2 * num_clients]
    left = np.bincount(taken // num_clients, minlength=len(have))  # (C,) shards of each class
    pairs = np.empty((num_clients, 2), int)
    for client, clients_left in enumerate(range(num_clients, 0, -1)):
        # A class with as many shards left as clients are left must be taken now; at most two classes have so many.
        key = np.where(left == clients_left, np.inf, rng.random(len(left)) ** (1 / np.maximum(left, 1)))
        pairs[client] = np.argsort(np.where(left > 0, key, -1))[-2:]
        left[pairs[client]] -= 1
    return pairs


def _pair_counts(pairs: np.ndarray, sizes: np.ndarray, num_classes: int) -> np.ndarray:
    """Take half of each client's images from each of its two classes: (m, C)."""
    counts = np.zeros((len(sizes), num_classes), int)
    clients = np.arange(len(sizes))
    counts[clients, pairs[:, 0]] = sizes // 2
    counts[clients, pairs[:, 1]] = sizes - sizes // 2
    return counts


def _largest_size(share: Share, have: np.ndarray, num_clients: int, least: int, most: int) -> int:
    """Return the largest size of a client, least to most, for which every class has enough images; else least."""
    for size in range(most, least, -1):
        if (share(have, np.full(num_clients, size)).sum(0) <= have).all():
            return size
    return least


def _pick(labels: np.ndarray, counts: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """Draw counts (m, C) images for each client; a class that is used up starts again from its first image."""
    m, num_classes = counts.shape
    picks, owners = [], []
    for c in range(num_classes):
        pool = rng.permutation(np.flatnonzero(labels == c))
        need = counts[:, c]
        picks.append(np.resize(pool, need.sum()))
        owners.append(np.repeat(np.arange(m), need))
    index, owner = np.concatenate(picks), np.concatenate(owners)
    index = index[np.lexsort((rng.random(len(index)), owner))]
    return np.split(index, np.cumsum(counts.sum(1))[:-1])


def _permutations(num_groups: int, num_classes: int, rng: np.random.Generator) -> np.ndarray:
    """Draw a different order of the classes for each group, (G, C); the first is the identity."""
    orders = [tuple(range(num_classes))]
    while len(orders) < num_groups:
        order = tuple(rng.permutation(num_classes).tolist())
        if order not in orders:
            orders.append(order)
    return np.array(orders)
