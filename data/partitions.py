"""Who has which images: a function for each way to divide a dataset, and a line for each at the end.

flwr-datasets has IID, pathological and shard partitioners, but they take Hugging Face datasets (whose packages
it brings along) and none knows groups of clients, so the few lines of drawing indices are here.

Most partitions first fix how many images of each class each client has, a matrix of clients x classes, and then draw
that many (`draw`), without replacement over the whole federation: training images from the dataset's training images,
test images from its test images. dirichlet, label-groups and clustered-dirichlet deal images out instead (`_deal`),
class by class or cluster of classes by cluster, and cut what each client got into parts for training, validation and
test.

Where there are groups, clients are numbered by group, group g having clients i with i G // m = g. Where an amount does
not divide by the classes it is spread over, the odd images go to one class after another, each client going on where
the one before stopped, so that totals stay equal within one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from kindred.extensions import Registry

from .sources import CIFAR100_SUPERCLASSES, DataError

# The share of a dataset that label-groups and clustered-dirichlet deal out where samples-per-client is 0: of the two
# CIFARs that of Sui et al., 2022 (arXiv:2210.06597, appendix D), of small images and features all.
SUBSAMPLES = {"cifar10": 0.1, "cifar100": 0.15, "digits": 1.0, "office-home": 1.0}
OTHER_SUBSAMPLES = 0.1

# (have (C,), sizes (m,)) -> (m, C): how many images of each class each client gets of `have` images a class
Share = Callable[[np.ndarray, np.ndarray], np.ndarray]


@dataclass(frozen=True)
class PaperSetting:
    """The practical setting of Huang et al., AAAI 2021 (arXiv:2007.03797), appendix C; one entry a group."""

    clients: list[int]
    classes: list[int]
    train_sizes: list[int]


PAPER_SETTINGS = {
    "mnist": PaperSetting([20] * 5, [2] * 5, [500, 400, 300, 200, 100]),
    "fashion-mnist": PaperSetting([20] * 5, [2] * 5, [600, 500, 400, 300, 200]),
    "emnist": PaperSetting([10, 26, 26], [10, 26, 26], [1000, 700, 400]),
    "cifar100": PaperSetting([5] * 20, [5] * 20, [500] * 4 + [400] * 4 + [300] * 4 + [200] * 4 + [100] * 4),
}


@dataclass(frozen=True)
class Partition:
    """Which images each client has, and how it sees them.

    Attributes
    ----------
    train, validation, test : list of ndarray
        A client's images, in random order. One numbering serves all: 0 to n_train - 1 are the dataset's training
        images, n_train and more its test images. Only dirichlet has images for validation.
    spare : ndarray
        The images that are left over for a public set: no client has them.
    groups : ndarray, (m,)
        The group of each client, 0 to G - 1; all 0 where there are none.
    quarter_turns : ndarray, (m,)
        How often a client's images are turned by 90 degrees, counter-clockwise.
    label_maps : ndarray, (m, C)
        What label client i gives to the images of class c.
    """

    train: list[np.ndarray]
    validation: list[np.ndarray]
    test: list[np.ndarray]
    spare: np.ndarray
    groups: np.ndarray
    quarter_turns: np.ndarray
    label_maps: np.ndarray


@dataclass(frozen=True)
class Request:
    """A dataset to be divided, and the settings.

    Attributes
    ----------
    partition : str
        A name of `PARTITIONS`.
    y_train, y_test : ndarray, (n,), int
        Labels, 0 to num_classes - 1.
    num_classes : int
    dataset : str
        A name of `DATASETS`; sets what 0 samples per client mean.
    num_clients, num_groups : int
    samples_per_client : int
        Training images a client. 0: as many as the classes last for without replacement, at most 40 for
        digits and 500 elsewhere, but for what a partition says. Test images: as many, at most an equal share of those
        there are. In partitions that are marked `total`: training and test images together.
    with_replacement : bool
        Whether a class that is used up starts anew. Test images, on which is only measured, always do; no
        client gets an image twice unless it needs more of a class than there are.
    dirichlet_alpha : float
        Above 0.
    held_out : int
        Images that dirichlet with 0 samples per client leaves over.
    seed : int
        0 or more.
    """

    partition: str
    y_train: np.ndarray
    y_test: np.ndarray
    num_classes: int
    dataset: str
    num_clients: int
    num_groups: int
    samples_per_client: int
    with_replacement: bool
    dirichlet_alpha: float
    held_out: int
    seed: int

    def rng(self, part: int) -> np.random.Generator:
        """Random numbers for a part of the work: 0 for classes, 1 and 2 for draws, 3 for labels, 4 for dealing."""
        return np.random.default_rng([self.seed, part])  # 5 draws the public set

    @cached_property
    def have_train(self) -> np.ndarray:
        """Training images of each class, (C,)."""
        return np.bincount(self.y_train, minlength=self.num_classes)

    @cached_property
    def have_test(self) -> np.ndarray:
        """Test images of each class, (C,)."""
        return np.bincount(self.y_test, minlength=self.num_classes)


@dataclass(frozen=True)
class Scheme:
    """A way to divide a dataset.

    Attributes
    ----------
    description : str
        One line: who has what.
    divide : callable
        Takes a `Request`, returns a `Partition`; DataError where that cannot be.
    settings : tuple of str
        The settings that count in it, besides num-clients and samples-per-client.
    total : bool
        Whether samples-per-client counts all images of a client, not its training images alone.
    """

    description: str
    divide: Callable[[Request], Partition]
    settings: tuple[str, ...] = ()
    total: bool = False


def divide(partition: str, y_train: np.ndarray, y_test: np.ndarray, num_classes: int, **settings: Any) -> Partition:
    """Divide a dataset among clients.

    Parameters
    ----------
    partition, y_train, y_test, num_classes, **settings
        As in `Request`.

    Raises
    ------
    DataError
        More clients than images, groups that do not fit, or a class with too few images; in dirichlet and
        clustered-dirichlet, training images for less than 2 clients.
    """
    ask = Request(partition, y_train, y_test, num_classes, **settings)
    if partition not in PARTITIONS:
        raise DataError(f"partition is {partition!r}, allowed: {', '.join(PARTITIONS)}")
    if not 1 <= ask.num_clients <= len(y_train):
        raise DataError(
            f"num-clients is {ask.num_clients}, allowed: 1 to {len(y_train)}, the number of training images"
        )
    return PARTITIONS[partition].divide(ask)


# --- Partitions that draw so many images of each class ------------------------------------------------


def _iid(ask: Request) -> Partition:
    check_size(ask)
    seed = int(ask.rng(0).integers(2**63))  # what is random in a rule is drawn once
    return _draw_shares(ask, lambda have, sizes: _iid_counts(have, sizes, seed))


def _pathological(ask: Request) -> Partition:
    check_size(ask, least=2)
    pairs = _class_pairs(ask.have_train, ask.num_clients, ask.rng(0))
    return _draw_shares(ask, lambda have, sizes: _pair_counts(pairs, sizes, ask.num_classes), least=2)


def _practical(ask: Request) -> Partition:
    """Own and other classes, 80/20, by groups.

    The classes are divided in order into as many sets as there are groups, their sizes differing by at most one
    (CIFAR-100's in the order of their superclasses), and every client has equally many images, 100 for test other than
    for digits. With the dataset and number of clients of the FedAMP paper, samples_per_client 0, and num_groups 4 (the
    default) or the paper's own, it is the paper's setting instead, its groups and sizes included.
    """
    check_size(ask)
    paper, own = PAPER_SETTINGS.get(ask.dataset), {}
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
        groups = in_groups(ask, _as_clients(ask) | _as_classes(ask), least=2)  # one has no other classes
        widths = [len(part) for part in np.array_split(order, ask.num_groups)]
    if ask.dataset != "digits":
        own["test_size"] = min(100, len(ask.y_test))
    return _draw_shares(ask, lambda _, sizes: _practical_counts(sizes, groups, order, widths), groups=groups, **own)


def _rotated(ask: Request) -> Partition:
    check_size(ask)
    groups = in_groups(ask, _as_clients(ask) | {"4, the different quarter turns": 4})
    return _draw_shares(ask, lambda _, sizes: even(ask, sizes), groups=groups, quarter_turns=groups)


def _permuted(ask: Request) -> Partition:
    check_size(ask)
    orders = {"the different orders of the classes": math.factorial(ask.num_classes)} if ask.num_classes < 20 else {}
    groups = in_groups(ask, _as_clients(ask) | orders)
    label_maps = _permutations(ask.num_groups, ask.num_classes, ask.rng(3))[groups]
    return _draw_shares(ask, lambda _, sizes: even(ask, sizes), groups=groups, label_maps=label_maps)


def check_size(ask: Request, least: int = 1) -> None:
    """Check samples_per_client; DataError where it is below `least`, or there are not as many images."""
    n, m, size = len(ask.y_train), ask.num_clients, ask.samples_per_client
    if size != 0 and size < least:
        raise DataError(f"samples-per-client is {size}, allowed with {ask.partition}: 0 or {least} and more")
    if size * (1 if ask.with_replacement else m) > n:
        remedy = f"{m} clients: take less of either, or with-replacement=true"
        raise DataError(
            f"there are {n} training images, too few for samples-per-client {size} with "
            + ("even one client" if ask.with_replacement else remedy)
        )


def _as_clients(ask: Request) -> dict[str, int]:
    return {f"num-clients, {ask.num_clients}": ask.num_clients}


def _as_classes(ask: Request) -> dict[str, int]:
    return {f"the number of classes, {ask.num_classes}": ask.num_classes}


def check_groups(ask: Request, at_most: Mapping[str, int], least: int = 1) -> None:
    """Check num_groups against the least of some numbers, named by what they are; DataError where it is not allowed."""
    reason, high = min(at_most.items(), key=lambda item: item[1])
    if not least <= ask.num_groups <= high:
        raise DataError(
            f"num-groups is {ask.num_groups}, allowed with {ask.partition}: {least} to {high} (at most {reason})"
        )


def in_groups(ask: Request, at_most: Mapping[str, int], least: int = 1) -> np.ndarray:
    """The group of each client, (m,), once num_groups has been checked."""
    check_groups(ask, at_most, least)
    return np.arange(ask.num_clients) * ask.num_groups // ask.num_clients


def _draw_shares(
    ask: Request,
    share: Share,
    *,
    least: int = 1,
    train_sizes: np.ndarray | None = None,
    test_size: int | None = None,
    **more: Any,
) -> Partition:
    """Draw what a rule gives to clients of equal size, unless train_sizes (m,) says otherwise; more: see `draw`."""
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
    """Draw so many images of each class, (m, C), for each client; DataError where a class has too few.

    `advice` is what else could be changed then, `seen` groups, quarter_turns or label_maps of the `Partition`.
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
    return _partition(ask, train, [np.empty(0, int)] * m, test, spare, **seen)


# --- Partitions that deal images out ------------------------------------------------------------------


def _dirichlet(ask: Request) -> Partition:
    """Each class spread by Dir(alpha): Yurochkin et al., ICML 2019, arXiv:1905.12022.

    The images of each class, training and test images together, are spread over the clients by shares drawn from
    Dir(alpha), rounded by largest remainders. A client's k images are then divided as in PerFed-CKT (Cho et al., 2021,
    arXiv:2109.08119, appendix E): in random order, they are cut at r k, (r + 0.1) k and (r + 0.6) k, rounded, halves
    down, where r is 0.1, 0.3 or 0.4 at random. The parts are for training, validation and test; the rest serves for
    nothing. Whoever has an image for training has one for test, but a client may have no images at all.

    samples_per_client times m images, drawn uniformly, are divided (an average of so many a client, all parts
    together); where it is 0 all there are but `held_out`.
    """
    m, rng = ask.num_clients, ask.rng(4)
    y = np.concatenate([ask.y_train, ask.y_test])
    order = rng.permutation(len(y))
    amount = _amount(
        ask, len(y), len(y) - ask.held_out, "training, validation and test",
        f"a public set of {ask.held_out} images leaves too few of all {len(y)} for {m} clients: take a smaller "
        "public-size",
    )  # fmt: skip
    taken = np.arange(len(y)) < amount
    owned = _deal(order[taken], y[order[taken]], _dirichlet_shares(ask, ask.num_classes, rng), rng)
    tenths = np.cumsum(np.column_stack([rng.choice([1, 3, 4], m), np.full((m, 2), [1, 5])]), axis=1)  # (m, 3)
    return _check_trainers(ask, _cut(ask, owned, tenths, order[~taken], down=4))  # halves


def _label_groups(ask: Request) -> Partition:
    """Groups with classes of their own, as in FedeRiCo: Sui et al., 2022, arXiv:2210.06597, section 4.1, appendix C, D.

    The classes are divided at random into G sets, their sizes differing by at most one. Training images alone are
    taken, and of them at random 10% of CIFAR-10, 15% of CIFAR-100 and, our choice, all of digits and 10% of any other
    images. Of Office-Home, which has no division of its own, all images are taken. A group's clients share the images
    of its set of classes equally, at random. A client's images, in random order, are cut into 80% for training, rounded
    down, and the rest for test.
    """
    groups = in_groups(ask, _as_clients(ask) | _as_classes(ask))
    rng = ask.rng(4)
    order, sets, rest, amount = _class_sets(ask, rng)
    taken = _take_by_group(ask, sets, groups, amount)
    shares = (groups == np.arange(ask.num_groups)[:, None]) / np.bincount(groups)[:, None]  # (G, m)
    owned = _deal(order[taken], sets[taken], shares, rng)
    return _cut(ask, owned, TRAIN_AND_TEST, np.concatenate([order[~taken], rest]), groups=groups)


def _clustered_dirichlet(ask: Request) -> Partition:
    """Clusters of classes spread by Dir(alpha), as in FedEM: Marfoq et al., NeurIPS 2021, arXiv:2108.10252.

    Images, sets of classes and parts are those of `_label_groups`, but the images of each set are spread over all
    clients by shares drawn from Dir(alpha), whatever their classes; there are no groups of clients, and a client may
    have no images. samples_per_client is an average.
    """
    check_groups(ask, _as_classes(ask))
    rng = ask.rng(4)
    order, sets, rest, amount = _class_sets(ask, rng)
    amount = _amount(ask, len(order), amount, "training and test", _too_few(ask, amount, len(order)))
    taken = np.arange(len(order)) < amount
    owned = _deal(order[taken], sets[taken], _dirichlet_shares(ask, ask.num_groups, rng), rng)
    return _check_trainers(ask, _cut(ask, owned, TRAIN_AND_TEST, np.concatenate([order[~taken], rest])))


TRAIN_AND_TEST = np.array([[8, 8, 10]])  # tenths of a client's images: where those for training and validation end


def _class_sets(ask: Request, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """The images that may be dealt, in random order (n,); the number of each one's set of classes (n,); the images that
    may not; how many are dealt where samples_per_client is 0."""
    set_of_class = np.empty(ask.num_classes, int)
    for number, classes in enumerate(np.array_split(rng.permutation(ask.num_classes), ask.num_groups)):
        set_of_class[classes] = number
    y = np.concatenate([ask.y_train, ask.y_test])
    there = len(y) if ask.dataset == "office-home" else len(ask.y_train)
    order = rng.permutation(there)
    amount = round(SUBSAMPLES.get(ask.dataset, OTHER_SUBSAMPLES) * there)
    return order, set_of_class[y[order]], np.arange(there, len(y)), amount


def _amount(ask: Request, there: int, amount: int, parts: str, too_few: str) -> int:
    """How many of the images that are there are dealt; `amount` where samples_per_client is 0."""
    m, size = ask.num_clients, ask.samples_per_client
    if not 0 <= size <= there // m:
        raise DataError(
            f"samples-per-client is {size}, allowed with {ask.partition}: 0 to {there // m}, as there are {there} "
            f"images for {parts} of {m} clients"
        )
    amount = m * size or amount
    if amount < m:
        raise DataError(too_few)
    return amount


def _take_by_group(ask: Request, sets: np.ndarray, groups: np.ndarray, amount: int) -> np.ndarray:
    """Which of the images in random order, group g's having the number g in sets (n,), are dealt: (n,), bool."""
    clients = np.bincount(groups)  # (G,)
    have = np.bincount(sets, minlength=len(clients))
    poorest = int(np.argmin(have // clients))
    most = have[poorest] // clients[poorest]
    whose = f"group {poorest} has {have[poorest]} images of its classes for {clients[poorest]} clients"
    if most < 2:
        raise DataError(f"{whose}, and each client needs 2 or more: take fewer clients, or other groups")
    if ask.samples_per_client == 0:
        taken = np.arange(len(sets)) < amount
        if (np.bincount(sets[taken], minlength=len(clients)) < 2 * clients).any():
            raise DataError(_too_few(ask, amount, len(sets)))
        return taken
    if not 2 <= ask.samples_per_client <= most:
        raise DataError(
            f"samples-per-client is {ask.samples_per_client}, allowed with label-groups: 0 or 2 to {most}, as {whose}"
        )
    taken = np.zeros(len(sets), bool)
    for group, size in enumerate(clients * ask.samples_per_client):
        taken[np.flatnonzero(sets == group)[:size]] = True
    return taken


def _too_few(ask: Request, amount: int, there: int) -> str:
    return (
        f"{ask.partition} takes {amount} of {there} images where samples-per-client is 0, too few for "
        f"{ask.num_clients} clients: set samples-per-client, or take fewer clients"
    )


def _dirichlet_shares(ask: Request, num_sets: int, rng: np.random.Generator) -> np.ndarray:
    """Every client's share in each of some sets, (sets, m)."""
    alpha = ask.dirichlet_alpha
    if not 0 < alpha < 1e100:  # beyond, the sum over clients would leave the range of floats
        raise DataError(f"dirichlet-alpha is {alpha}, allowed: above 0 and below 1e100")
    return rng.dirichlet(np.full(ask.num_clients, alpha), num_sets)


def _deal(images: np.ndarray, sets: np.ndarray, shares: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """Deal images (n,) of so many sets, given by number (n,), to clients by their shares in each, (sets, m)."""
    m = shares.shape[1]
    owner = np.empty(len(images), int)
    for number, share in enumerate(shares):
        places = np.flatnonzero(sets == number)
        owner[places] = np.repeat(np.arange(m), apportion(share, len(places)))
    images = images[np.lexsort((rng.random(len(images)), owner))]  # each client's in an order of its own
    return np.split(images, np.cumsum(np.bincount(owner, minlength=m))[:-1])


def _cut(
    ask: Request, owned: list[np.ndarray], tenths: np.ndarray, spare: np.ndarray, down: int = 0, **seen: np.ndarray
) -> Partition:
    """Cut each client's images at so many tenths, (m, 3) or (1, 3), for training, validation and test.

    In tenths, so that halves are exact. Rounded down, all where `down` is 0 and halves where it is 4, so that no client
    has an image for training and none for test.
    """
    tenths = np.resize(tenths, (len(owned), 3))
    cuts = [(ends * len(images) + down) // 10 for ends, images in zip(tenths, owned, strict=True)]
    train, validation, test, _ = zip(*map(np.split, owned, cuts), strict=True)
    return _partition(ask, list(train), list(validation), list(test), spare, **seen)


def _check_trainers(ask: Request, partition: Partition) -> Partition:
    trainers = sum(len(images) > 0 for images in partition.train)
    if trainers < 2:
        raise DataError(
            f"{trainers} of {ask.num_clients} clients have training images, at least 2 must: take a larger "
            f"dirichlet-alpha (it is {ask.dirichlet_alpha}), other clients or more images"
        )
    return partition


# --- What the functions above are made of -------------------------------------------------------------


def _partition(ask: Request, *images: Any, **seen: np.ndarray) -> Partition:
    """A partition without groups, of upright images with their own labels, but for what `seen` says."""
    m = ask.num_clients
    plain = {
        "groups": np.zeros(m, int),
        "quarter_turns": np.zeros(m, int),
        "label_maps": np.tile(np.arange(ask.num_classes), (m, 1)),
    }
    return Partition(*images, **(plain | seen))


def even(ask: Request, amounts: np.ndarray) -> np.ndarray:
    """Spread each client's amount (m,) equally over all classes: (m, C)."""
    return spread(amounts, np.arange(ask.num_classes), ask.num_classes)


def apportion(shares: np.ndarray, amount: int) -> np.ndarray:
    """Whole numbers (m,) that add up to amount, in proportion to shares (m,) that add up to 1: largest remainders."""
    quotas = shares * amount
    counts = np.floor(quotas).astype(int)
    counts[np.argsort(counts - quotas, kind="stable")[: amount - counts.sum()]] += 1
    return counts


def spread(amounts: np.ndarray, classes: np.ndarray, num_classes: int) -> np.ndarray:
    """Spread each client's amount (m,) equally over some classes (k,), odd images in turn: (m, C)."""
    extra = amounts % len(classes)  # (m,)
    turn = (np.arange(len(classes)) - (np.cumsum(extra) - extra)[:, None]) % len(classes)  # (m, k)
    counts = np.zeros((len(amounts), num_classes), int)
    counts[:, classes] = (amounts // len(classes))[:, None] + (turn < extra[:, None])
    return counts


def _practical_counts(sizes: np.ndarray, groups: np.ndarray, order: np.ndarray, widths: list[int]) -> np.ndarray:
    """80% of each client's images over its group's own classes, 20% over the rest: (m, C).

    The rest is taken in cyclic order from the group's own classes on, so that odd images of different groups
    fall to different classes.
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
    """The classes of a uniform draw of sizes (m,) out of all images: (m, C)."""
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(have)), have))
    counts = np.zeros((len(sizes), len(have)), int)
    np.add.at(counts, (np.repeat(np.arange(len(sizes)), sizes), np.resize(labels, sizes.sum())), 1)
    return counts


def _class_pairs(have: np.ndarray, num_clients: int, rng: np.random.Generator) -> np.ndarray:
    """Two classes for each client, (m, 2): McMahan et al.'s shards, two a client, but never two of one class.

    The 2 m shards go to the classes so that the smallest share of a class's images that a shard stands for is
    as large as can be (highest quotients); no class gets more shards than there are clients.
    """
    quotients = have[:, None] / np.arange(1, num_clients + 1)  # (C, m)
    taken = np.argsort(-quotients, axis=None, kind="stable")[: 2 * num_clients]
    left = np.bincount(taken // num_clients, minlength=len(have))  # (C,) shards of each class
    pairs = np.empty((num_clients, 2), int)
    for client, clients_left in enumerate(range(num_clients, 0, -1)):
        # A class with as many shards as there are clients left must be taken now; there are two such at most.
        key = np.where(left == clients_left, np.inf, rng.random(len(left)) ** (1 / np.maximum(left, 1)))
        pairs[client] = np.argsort(np.where(left > 0, key, -1))[-2:]
        left[pairs[client]] -= 1
    return pairs


def _pair_counts(pairs: np.ndarray, sizes: np.ndarray, num_classes: int) -> np.ndarray:
    """Half of each client's images from each of its two classes: (m, C)."""
    counts = np.zeros((len(sizes), num_classes), int)
    clients = np.arange(len(sizes))
    counts[clients, pairs[:, 0]] = sizes // 2
    counts[clients, pairs[:, 1]] = sizes - sizes // 2
    return counts


def _largest_size(share: Share, have: np.ndarray, num_clients: int, least: int, most: int) -> int:
    """The largest number of images a client, from least to most, for which every class lasts; else least."""
    for size in range(most, least, -1):
        if (share(have, np.full(num_clients, size)).sum(0) <= have).all():
            return size
    return least


def _pick(labels: np.ndarray, counts: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """Draw counts (m, C) images for each client; a class that is used up begins again from its first."""
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
    """A different order of the classes for each group, the first the identity: (G, C)."""
    orders = [tuple(range(num_classes))]
    while len(orders) < num_groups:
        order = tuple(rng.permutation(num_classes).tolist())
        if order not in orders:
            orders.append(order)
    return np.array(orders)


PARTITIONS: Registry[Scheme] = Registry("kindred.partitions", Scheme, {
    "iid": Scheme("every client a uniform draw from all data", _iid, ("with-replacement",)),
    "pathological": Scheme(
        "two classes a client, drawn client by client, no groups", _pathological, ("with-replacement",),
    ),
    "practical": Scheme(
        "groups of clients; 80% of a client's images from its group's classes, 20% from the others",
        _practical, ("num-groups", "with-replacement"),
    ),
    "rotated": Scheme(
        "groups of clients, classes uniform; the images of group g turned by 90 g degrees, up to 4 groups",
        _rotated, ("num-groups", "with-replacement"),
    ),
    "permuted": Scheme(
        "groups of clients, classes uniform; each group has the labels permuted in its own way",
        _permuted, ("num-groups", "with-replacement"),
    ),
    "dirichlet": Scheme(
        "each class spread over the clients by Dir(dirichlet-alpha): small is skewed, large is even",
        _dirichlet, ("dirichlet-alpha",), total=True,
    ),
    "label-groups": Scheme(
        "groups of clients; each group has classes of its own, and its clients images of these alone",
        _label_groups, ("num-groups",), total=True,
    ),
    "clustered-dirichlet": Scheme(
        "classes in num-groups clusters, each spread over the clients by Dir(dirichlet-alpha)",
        _clustered_dirichlet, ("num-groups", "dirichlet-alpha"), total=True,
    ),
})  # fmt: skip
