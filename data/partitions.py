"""Who has which images.

flwr-datasets has IID, pathological and shard partitioners, but they take Hugging Face datasets (whose packages
it brings along) and none knows groups of clients, so the few lines of drawing indices are here.

Most partitions first fix how many images of each class each client has, a matrix of clients x classes, and then draw
that many, without replacement over the whole federation: training images from the dataset's training images, test
images from its test images. Those of `DEALT` deal images out instead, class by class or cluster of classes by cluster,
and cut what each client got into parts for training, validation and test.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .sources import CIFAR100_SUPERCLASSES, DataError

PARTITIONS: dict[str, str] = {
    "iid": "every client a uniform draw from all data",
    "pathological": "two classes a client, drawn client by client, no groups",
    "practical": "groups of clients; 80% of a client's images from its group's classes, 20% from the others",
    "rotated": "groups of clients, classes uniform; the images of group g turned by 90 g degrees, up to 4 groups",
    "permuted": "groups of clients, classes uniform; each group has the labels permuted in its own way",
    "dirichlet": "each class spread over the clients by Dir(dirichlet-alpha): small is skewed, large is even",
    "label-groups": "groups of clients; each group has classes of its own, and its clients images of these alone",
    "clustered-dirichlet": "classes in num-groups clusters, each spread over the clients by Dir(dirichlet-alpha)",
}

DEALT = ("dirichlet", "label-groups", "clustered-dirichlet")

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


def divide(
    partition: str,
    y_train: np.ndarray,
    y_test: np.ndarray,
    num_classes: int,
    *,
    dataset: str,
    num_clients: int,
    num_groups: int,
    samples_per_client: int,
    with_replacement: bool,
    dirichlet_alpha: float,
    held_out: int,
    seed: int,
) -> Partition:
    """Divide a dataset among clients.

    In `dirichlet` (Yurochkin et al., ICML 2019, arXiv:1905.12022) the images of each class, training and test images
    together, are spread over the clients by shares drawn from Dir(alpha), rounded by largest remainders. A client's k
    images are then divided as in PerFed-CKT (Cho et al., 2021, arXiv:2109.08119, appendix E): in random order, they
    are cut at r k, (r + 0.1) k and (r + 0.6) k, rounded, halves down, where r is 0.1, 0.3 or 0.4 at random. The parts
    are for training, validation and test; the rest serves for nothing. Whoever has an image for training has one for
    test, but a client may have no images at all.

    `label-groups` and `clustered-dirichlet` are the settings of FedeRiCo (Sui et al., 2022, arXiv:2210.06597, section
    4.1, appendices C and D). The classes are divided at random into G sets, their sizes differing by at most one.
    Training images alone are taken, and of them at random 10% of CIFAR-10, 15% of CIFAR-100 and, our choice, all of
    digits and 10% of any other images. Of Office-Home, which has no division of its own, all images are taken. In
    label-groups a group's clients share the images of its set of classes equally, at random. In clustered-dirichlet,
    which is FedEM's (Marfoq et al., NeurIPS 2021, arXiv:2108.10252), the images of each set are spread over all
    clients by shares drawn from Dir(alpha), whatever their classes; there are no groups of clients, and a client may
    have no images. A client's images, in random order, are cut into 80% for training, rounded down, and the rest for
    test.

    Where there are groups, clients are numbered by group, group g having clients i with i G // m = g. In `practical`
    the classes are divided in order into as many sets as there are groups, their sizes differing by at most one
    (CIFAR-100's in the order of their superclasses), and every client has equally many images. With the dataset and
    number of clients of the FedAMP paper, samples_per_client 0, and num_groups 4 (the default) or the paper's own,
    it is the paper's setting instead, its groups and sizes included.

    Where an amount does not divide by the classes it is spread over, the odd images go to one class after
    another, each client going on where the one before stopped, so that totals stay equal within one.

    Parameters
    ----------
    partition : str
        A name of `PARTITIONS`.
    y_train, y_test : ndarray, (n,), int
        Labels, 0 to num_classes - 1.
    num_classes : int
    dataset : str
        A name of `DATASETS`; sets what 0 samples per client mean.
    num_clients, num_groups : int
        num_groups counts in practical, rotated, permuted, label-groups and clustered-dirichlet.
    samples_per_client : int
        Training images a client. 0: as many as the classes last for without replacement, at most 40 for
        digits and 500 elsewhere. Test images: as many, at most an equal share of those there are; in
        practical 100, other than for digits. In label-groups: a client's images, training and test together. In
        dirichlet and clustered-dirichlet: m times as many, drawn uniformly, are divided (an average of so many a
        client, all parts together). 0 in these three is described above; in dirichlet, all there are but `held_out`.
    with_replacement : bool
        Whether a class that is used up starts anew. Test images, on which is only measured, always do; no
        client gets an image twice unless it needs more of a class than there are. Without meaning in
        dirichlet, label-groups and clustered-dirichlet.
    dirichlet_alpha : float
        Above 0; counts in dirichlet and clustered-dirichlet.
    held_out : int
        Images that dirichlet with 0 samples per client leaves over.
    seed : int
        0 or more.

    Raises
    ------
    DataError
        More clients than images, groups that do not fit, or a class with too few images; in dirichlet and
        clustered-dirichlet, training images for less than 2 clients.
    """
    m = num_clients
    if partition not in PARTITIONS:
        raise DataError(f"partition is {partition!r}, allowed: {', '.join(PARTITIONS)}")
    if not 1 <= m <= len(y_train):
        raise DataError(f"num-clients is {m}, allowed: 1 to {len(y_train)}, the number of training images")
    if partition in DEALT:
        y = np.concatenate([y_train, y_test])
        if partition == "dirichlet":
            there, amount = len(y), len(y) - held_out
        else:
            there = len(y) if dataset == "office-home" else len(y_train)
            amount = round(SUBSAMPLES.get(dataset, OTHER_SUBSAMPLES) * there)
        return _dealt(
            partition,
            y,
            num_classes,
            there=there,
            amount=amount,
            num_clients=m,
            num_groups=num_groups,
            samples_per_client=samples_per_client,
            alpha=dirichlet_alpha,
            seed=seed,
        )
    least = 2 if partition == "pathological" else 1
    if samples_per_client != 0 and samples_per_client < least:
        raise DataError(f"samples-per-client is {samples_per_client}, allowed with {partition}: 0 or {least} and more")
    if samples_per_client * (1 if with_replacement else m) > len(y_train):
        remedy = f"{m} clients: take less of either, or with-replacement=true"
        raise DataError(
            f"there are {len(y_train)} training images, too few for samples-per-client {samples_per_client} with "
            + ("even one client" if with_replacement else remedy)
        )

    paper = PAPER_SETTINGS.get(dataset) if partition == "practical" and samples_per_client == 0 else None
    if paper and (m != sum(paper.clients) or num_groups not in (4, len(paper.clients))):
        paper = None
    if paper:
        groups = np.repeat(np.arange(len(paper.clients)), paper.clients)
    elif partition in ("practical", "rotated", "permuted"):
        _check_groups(partition, num_groups, m, num_classes)
        groups = np.arange(m) * num_groups // m
    else:
        groups = np.zeros(m, int)

    class_rng, train_rng, test_rng, label_rng = (np.random.default_rng([seed, part]) for part in range(4))
    have_train, have_test = (np.bincount(y, minlength=num_classes) for y in (y_train, y_test))
    share = _share(partition, have_train, groups, dataset, paper, class_rng)
    if paper:
        train_sizes = np.repeat(paper.train_sizes, paper.clients)
    else:
        most = min(40 if dataset == "digits" else 500, len(y_train) // m)
        train_sizes = np.full(m, samples_per_client or _largest_size(share, have_train, m, least, most))
    train_counts = share(have_train, train_sizes)
    short = train_counts.sum(0) > have_train
    if short.any() and not with_replacement:
        worst = int(np.argmax(np.where(short, train_counts.sum(0) - have_train, 0)))
        size_advice = ""
        if samples_per_client:
            size_advice = f"a smaller samples-per-client (it is {samples_per_client}), "
        elif paper:
            size_advice = "a samples-per-client of your own instead of the paper's sizes, "
        raise DataError(
            f"class {worst} has {have_train[worst]} training images and the {m} clients need "
            f"{train_counts[:, worst].sum()} of it: take fewer clients, {size_advice}or with-replacement=true"
        )

    if partition == "practical" and dataset != "digits":
        test_size = min(100, len(y_test))
    else:
        test_size = max(least, min(int(train_sizes[0]), len(y_test) // m))
    test_counts = share(have_test, np.full(m, test_size))
    for name, have, counts in (("training", have_train, train_counts), ("test", have_test, test_counts)):
        missing = np.flatnonzero((have == 0) & (counts.sum(0) > 0))
        if len(missing):
            raise DataError(f"class {missing[0]} has no {name} images, and partition {partition} needs some")

    train = _draw(y_train, train_counts, train_rng)
    test = [len(y_train) + indices for indices in _draw(y_test, test_counts, test_rng)]
    return Partition(
        train=train,
        validation=[np.empty(0, int)] * m,
        test=test,
        spare=np.setdiff1d(np.arange(len(y_train) + len(y_test)), np.concatenate(train + test)),
        groups=groups,
        quarter_turns=groups if partition == "rotated" else np.zeros(m, int),
        label_maps=(
            _permutations(num_groups, num_classes, label_rng)[groups]
            if partition == "permuted"
            else np.tile(np.arange(num_classes), (m, 1))
        ),
    )


def _dealt(
    partition: str,
    y: np.ndarray,
    num_classes: int,
    *,
    there: int,
    amount: int,
    num_clients: int,
    num_groups: int,
    samples_per_client: int,
    alpha: float,
    seed: int,
) -> Partition:
    """The partitions of `DEALT`: see `divide`.

    Of the images with labels y (n,), those of training first, the first `there` may be dealt; `amount` is how many are
    where samples_per_client is 0.
    """
    m = num_clients
    rng = np.random.default_rng([seed, 4])  # 0 to 3 are the other partitions'
    set_of_class = np.arange(num_classes)  # what is dealt together: a class, or a set of them
    if partition != "dirichlet":
        _check_groups(partition, num_groups, m, num_classes)
        for number, classes in enumerate(np.array_split(rng.permutation(num_classes), num_groups)):
            set_of_class[classes] = number
    order = rng.permutation(there)
    sets = set_of_class[y[order]]

    if partition == "label-groups":
        groups = np.arange(m) * num_groups // m
        taken = _take_by_group(sets, groups, samples_per_client, amount)
        shares = (groups == np.arange(num_groups)[:, None]) / np.bincount(groups)[:, None]  # (G, m)
    else:
        groups = np.zeros(m, int)
        taken = _take_for_all(partition, there, m, samples_per_client, amount)
        if not 0 < alpha < 1e100:  # beyond, the sum over clients would leave the range of floats
            raise DataError(f"dirichlet-alpha is {alpha}, allowed: above 0 and below 1e100")
        shares = rng.dirichlet(np.full(m, alpha), set_of_class.max() + 1)  # (sets, m)

    dealt, sets = order[taken], sets[taken]
    owner = np.empty(len(dealt), int)
    for number, share in enumerate(shares):
        places = np.flatnonzero(sets == number)
        owner[places] = np.repeat(np.arange(m), _apportion(share, len(places)))
    dealt = dealt[np.lexsort((rng.random(len(dealt)), owner))]  # each client's in an order of its own
    owned = np.split(dealt, np.cumsum(np.bincount(owner, minlength=m))[:-1])

    # In tenths, so that halves are exact. Down, so that no client has an image for training and none for test.
    if partition == "dirichlet":
        tenths = np.cumsum(np.column_stack([rng.choice([1, 3, 4], m), np.full((m, 2), [1, 5])]), axis=1)  # (m, 3)
        down = 4  # halves
    else:
        tenths = np.tile([8, 8, 10], (m, 1))
        down = 0  # all
    cuts = [(ends * len(indices) + down) // 10 for ends, indices in zip(tenths, owned, strict=True)]
    train, validation, test, _ = zip(*map(np.split, owned, cuts), strict=True)
    trainers = sum(len(indices) > 0 for indices in train)
    if trainers < 2 and partition != "label-groups":
        raise DataError(
            f"{trainers} of {m} clients have training images, at least 2 must: take a larger dirichlet-alpha "
            f"(it is {alpha}), other clients or more images"
        )
    return Partition(
        train=list(train),
        validation=list(validation),
        test=list(test),
        spare=np.concatenate([order[~taken], np.arange(there, len(y))]),
        groups=groups,
        quarter_turns=np.zeros(m, int),
        label_maps=np.tile(np.arange(num_classes), (m, 1)),
    )


def _take_for_all(partition: str, there: int, m: int, samples_per_client: int, amount: int) -> np.ndarray:
    """Which of so many images in random order are dealt to m clients: (there,), bool."""
    if not 0 <= samples_per_client <= there // m:
        parts = "training, validation and test" if partition == "dirichlet" else "training and test"
        raise DataError(
            f"samples-per-client is {samples_per_client}, allowed with {partition}: 0 to {there // m}, as there are "
            f"{there} images for {parts} of {m} clients"
        )
    amount = m * samples_per_client or amount
    if amount < m:
        if partition == "dirichlet":
            raise DataError(
                f"a public set of {there - amount} images leaves too few of all {there} for {m} clients: take a "
                "smaller public-size"
            )
        raise DataError(_too_few(partition, amount, there, m))
    return np.arange(there) < amount


def _take_by_group(sets: np.ndarray, groups: np.ndarray, samples_per_client: int, amount: int) -> np.ndarray:
    """Which of the images in random order, group g's having the number g in sets (n,), are dealt: (n,), bool."""
    clients = np.bincount(groups)  # (G,)
    have = np.bincount(sets, minlength=len(clients))
    poorest = int(np.argmin(have // clients))
    most = have[poorest] // clients[poorest]
    whose = f"group {poorest} has {have[poorest]} images of its classes for {clients[poorest]} clients"
    if most < 2:
        raise DataError(f"{whose}, and each client needs 2 or more: take fewer clients, or other groups")
    if samples_per_client == 0:
        taken = np.arange(len(sets)) < amount
        if (np.bincount(sets[taken], minlength=len(clients)) < 2 * clients).any():
            raise DataError(_too_few("label-groups", amount, len(sets), len(groups)))
        return taken
    if not 2 <= samples_per_client <= most:
        raise DataError(
            f"samples-per-client is {samples_per_client}, allowed with label-groups: 0 or 2 to {most}, as {whose}"
        )
    taken = np.zeros(len(sets), bool)
    for group, size in enumerate(clients * samples_per_client):
        taken[np.flatnonzero(sets == group)[:size]] = True
    return taken


def _too_few(partition: str, amount: int, there: int, m: int) -> str:
    return (
        f"{partition} takes {amount} of {there} images where samples-per-client is 0, too few for {m} clients: set "
        "samples-per-client, or take fewer clients"
    )


def _apportion(shares: np.ndarray, amount: int) -> np.ndarray:
    """Whole numbers (m,) that add up to amount, in proportion to shares (m,) that add up to 1: largest remainders."""
    quotas = shares * amount
    counts = np.floor(quotas).astype(int)
    counts[np.argsort(counts - quotas, kind="stable")[: amount - counts.sum()]] += 1
    return counts


def _check_groups(partition: str, num_groups: int, num_clients: int, num_classes: int) -> None:
    low = 2 if partition == "practical" else 1  # one group has no other classes to take 20% from
    limits = {} if partition == "clustered-dirichlet" else {f"num-clients, {num_clients}": num_clients}
    if partition in ("practical", "label-groups", "clustered-dirichlet"):
        limits[f"the number of classes, {num_classes}"] = num_classes
    if partition == "rotated":
        limits["4, the different quarter turns"] = 4
    if partition == "permuted" and num_classes < 20:
        limits["the different orders of the classes"] = math.factorial(num_classes)
    reason, high = min(limits.items(), key=lambda item: item[1])
    if not low <= num_groups <= high:
        raise DataError(f"num-groups is {num_groups}, allowed with {partition}: {low} to {high} (at most {reason})")


def _share(
    partition: str,
    have_train: np.ndarray,
    groups: np.ndarray,
    dataset: str,
    paper: PaperSetting | None,
    rng: np.random.Generator,
) -> Share:
    """The rule by which a partition divides images; what is random in it is drawn here, once."""
    num_classes = len(have_train)
    if partition == "iid":
        seed = int(rng.integers(2**63))
        return lambda have, sizes: _iid_counts(have, sizes, seed)
    if partition == "pathological":
        pairs = _class_pairs(have_train, len(groups), rng)
        return lambda have, sizes: _pair_counts(pairs, sizes, num_classes)
    if partition == "practical":
        order = np.argsort(CIFAR100_SUPERCLASSES, kind="stable") if dataset == "cifar100" else np.arange(num_classes)
        widths = paper.classes if paper else [len(part) for part in np.array_split(order, groups[-1] + 1)]
        return lambda have, sizes: _practical_counts(sizes, groups, order, widths)
    return lambda have, sizes: _spread(sizes, np.arange(num_classes), num_classes)


def _spread(amounts: np.ndarray, classes: np.ndarray, num_classes: int) -> np.ndarray:
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
        counts[members] = _spread(own, cyclic[:width], len(order))
        counts[members] += _spread(sizes[members] - own, cyclic[width:], len(order))
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


def _draw(labels: np.ndarray, counts: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
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
