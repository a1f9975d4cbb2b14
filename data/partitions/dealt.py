"""Partitions that deal a dataset's images out: class by class, or by clusters of classes.

The images of each client are then cut into parts for training, validation and test.
"""

from __future__ import annotations

import numpy as np

from ..files import DataError
from .request import Partition, Request, as_classes, as_clients, check_groups, in_groups, make_partition

# Fraction of a dataset that label-groups and clustered-dirichlet deal out where samples-per-client is 0. For the two
# CIFARs it is that of Sui et al., 2022 (arXiv:2210.06597, appendix D); for digits and features it is 1.
SUBSAMPLES = {"cifar10": 0.1, "cifar100": 0.15, "digits": 1.0, "office-home": 1.0}
OTHER_SUBSAMPLES = 0.1


def dirichlet(ask: Request) -> Partition:
    """Each class spread over the clients by Dir(alpha): Yurochkin et al., ICML 2019, arXiv:1905.12022.

    The images of each class, training and test images together, are spread over the clients by shares drawn from
    Dir(alpha), rounded by largest remainders. A client's k images are then divided as in PerFed-CKT (Cho et al., 2021,
    arXiv:2109.08119, appendix E): in random order, they are cut at r k, (r + 0.1) k and (r + 0.6) k, rounded, halves
    down, where r is 0.1, 0.3 or 0.4 at random. The parts are for training, validation and test; the rest is not used.
    A client with an image for training has one for test, but a client may have no images at all.

    samples_per_client times m images, drawn uniformly, are divided; samples_per_client is then the mean number of
    images of a client, all parts together. Where it is 0, all images but `held_out` are divided.
    """
    rng = ask.rng(4)
    y = np.concatenate([ask.y_train, ask.y_test])
    order = rng.permutation(len(y))
    taken = np.arange(len(y)) < _amount_of_all(ask, len(y))
    counts = _apportioned(_dirichlet_shares(ask, ask.num_classes, rng), y[order[taken]])
    owned = _deal(order[taken], y[order[taken]], counts, rng)
    return _check_trainers(ask, _cut_as_perfed_ckt(ask, owned, order[~taken], rng))


def dirichlet_clients(ask: Request) -> Partition:
    """Each client's classes drawn by Dir(alpha): Hsu et al., 2019, arXiv:1909.06335.

    All clients have the same number of images, training and test images together. Each client has its own probabilities
    q of the classes, drawn from the symmetric Dir(alpha); Hsu et al. write Dir(alpha p), with p the classes' shares of
    all images, so that with C equal classes their alpha is C times this one. The clients draw in order, each one all of
    its images: the class of an image by q, then an image of this class that no client has. A class that is used up gets
    probability 0, and the others are divided by their sum. So with large amounts the last clients have other classes
    than their q says. A client's images are cut as in `dirichlet`.

    A client has samples_per_client images. Where it is 0, all images but `held_out` are divided, and a remainder
    smaller than m is left over.
    """
    rng = ask.rng(4)
    y = np.concatenate([ask.y_train, ask.y_test])
    size = _amount_of_all(ask, len(y)) // ask.num_clients
    images = rng.permutation(len(y))
    if not ask.samples_per_client:
        images = images[: len(y) - ask.held_out]  # the others are a public set of all classes
    counts = _client_by_client(ask, np.bincount(y[images], minlength=ask.num_classes), size, rng)
    owned = _deal(images, y[images], counts, rng)
    spare = np.setdiff1d(np.arange(len(y)), np.concatenate(owned))
    partition = _cut_as_perfed_ckt(ask, owned, spare, rng)
    return _check_trainers(ask, partition, "take fewer clients, or a larger samples-per-client")


def label_groups(ask: Request) -> Partition:
    """Groups with classes of their own, as in FedeRiCo: Sui et al., 2022, arXiv:2210.06597, section 4.1, appendix C, D.

    The classes are divided at random into G sets, their sizes differing by at most one. Training images alone are
    used: a random 10% of CIFAR-10, 15% of CIFAR-100 and, our choice, all of digits and 10% of any other dataset. Of
    Office-Home, which has no division into training and test images, all images are used. A group's clients share the
    images of its set of classes equally, at random. A client's images, in random order, are cut into 80% for training,
    rounded down, and the rest for test.
    """
    groups = in_groups(ask, as_clients(ask) | as_classes(ask))
    rng = ask.rng(4)
    order, sets, rest, amount = _class_sets(ask, rng)
    taken = _take_by_group(ask, sets, groups, amount)
    shares = (groups == np.arange(ask.num_groups)[:, None]) / np.bincount(groups)[:, None]  # (G, m)
    owned = _deal(order[taken], sets[taken], _apportioned(shares, sets[taken]), rng)
    return _cut(ask, owned, TRAIN_AND_TEST, np.concatenate([order[~taken], rest]), groups=groups)


def clustered_dirichlet(ask: Request) -> Partition:
    """Clusters of classes spread by Dir(alpha), as in FedEM: Marfoq et al., NeurIPS 2021, arXiv:2108.10252.

    Images, sets of classes and parts are those of `label_groups`. But the images of each set are spread over all
    clients by shares drawn from Dir(alpha), whatever their classes. There are no groups of clients, and a client may
    have no images. samples_per_client is a mean.
    """
    check_groups(ask, as_classes(ask))
    rng = ask.rng(4)
    order, sets, rest, amount = _class_sets(ask, rng)
    amount = _amount(ask, len(order), amount, "training and test", _too_few(ask, amount, len(order)))
    taken = np.arange(len(order)) < amount
    counts = _apportioned(_dirichlet_shares(ask, ask.num_groups, rng), sets[taken])
    owned = _deal(order[taken], sets[taken], counts, rng)
    return _check_trainers(ask, _cut(ask, owned, TRAIN_AND_TEST, np.concatenate([order[~taken], rest])))


# --- Steps of the functions above ---------------------------------------------------------------------


TRAIN_AND_TEST = np.array([[8, 8, 10]])  # tenths of a client's images: where those for training and validation end


def _class_sets(ask: Request, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Divide the classes into as many sets as there are groups.

    Returns
    -------
    dealt : ndarray, shape (n,)
        The images that may be dealt, in random order.
    numbers : ndarray, shape (n,)
        The number of each image's set of classes.
    others : ndarray
        The images that may not be dealt.
    count : int
        The number of images that are dealt where samples_per_client is 0.
    """
    set_of_class = np.empty(ask.num_classes, int)
    for number, classes in enumerate(np.array_split(rng.permutation(ask.num_classes), ask.num_groups)):
        set_of_class[classes] = number
    y = np.concatenate([ask.y_train, ask.y_test])
    available = len(y) if ask.dataset == "office-home" else len(ask.y_train)
    order = rng.permutation(available)
    amount = round(SUBSAMPLES.get(ask.dataset, OTHER_SUBSAMPLES) * available)
    return order, set_of_class[y[order]], np.arange(available, len(y)), amount


def _amount(ask: Request, available: int, amount: int, parts: str, too_few: str) -> int:
    """Return how many of the available images are dealt; `amount` where samples_per_client is 0."""
    m, size = ask.num_clients, ask.samples_per_client
    if not 0 <= size <= available // m:
        raise DataError(
            f"samples-per-client is {size}, allowed with {ask.partition}: 0 to {available // m}, as there are "
            f"{available} images for {parts} of {m} clients"
        )
    amount = m * size or amount
    if amount < m:
        raise DataError(too_few)
    return amount


def _amount_of_all(ask: Request, available: int) -> int:
    """Return how many of all images, training and test images together, are dealt; at most all but `held_out`."""
    return _amount(
        ask, available, available - ask.held_out, "training, validation and test",
        f"a public set of {ask.held_out} images leaves too few of all {available} for {ask.num_clients} clients: take "
        "a smaller public-size",
    )  # fmt: skip


def _take_by_group(ask: Request, sets: np.ndarray, groups: np.ndarray, amount: int) -> np.ndarray:
    """Return the mask (n,) of the images that are dealt; images are in random order, sets (n,) are their groups."""
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


def _too_few(ask: Request, amount: int, available: int) -> str:
    return (
        f"{ask.partition} takes {amount} of {available} images where samples-per-client is 0, too few for "
        f"{ask.num_clients} clients: set samples-per-client, or take fewer clients"
    )


def _dirichlet_shares(ask: Request, num_sets: int, rng: np.random.Generator) -> np.ndarray:
    """Return the share of every client in each set of classes, (sets, m)."""
    return rng.dirichlet(np.full(ask.num_clients, _checked_alpha(ask)), num_sets)


def _client_by_client(ask: Request, have: np.ndarray, size: int, rng: np.random.Generator) -> np.ndarray:
    """Draw `size` images' classes for each client, one client after the other, from a supply `have` (C,): (C, m).

    A client's q are gamma variates G_c(alpha) divided by their sum. As G(alpha) = G(alpha + 1) U^(1 / alpha) with U
    uniform, alpha log G is `powers` here: so q of any alpha, over any classes, is a softmax without underflow.
    """
    alpha, m = _checked_alpha(ask), ask.num_clients
    powers = alpha * np.log(rng.standard_gamma(alpha + 1, (m, len(have)))) - rng.standard_exponential((m, len(have)))
    left, counts = have.copy(), np.zeros((len(have), m), int)
    for client in range(m):
        while missing := size - counts[:, client].sum():
            there = np.flatnonzero(left)
            with np.errstate(over="ignore"):  # to -inf, whose share is 0
                shares = np.exp((powers[client, there] - powers[client, there].max()) / alpha)
            # Draws of classes beyond their last image are repeated, without these classes.
            drawn = np.minimum(rng.multinomial(missing, shares / shares.sum()), left[there])
            counts[there, client] += drawn
            left[there] -= drawn
    return counts


def _checked_alpha(ask: Request) -> float:
    """Return dirichlet_alpha; DataError where it is out of range."""
    if not 0 < ask.dirichlet_alpha < 1e100:  # above it, the sum over clients would overflow
        raise DataError(f"dirichlet-alpha is {ask.dirichlet_alpha}, allowed: above 0 and below 1e100")
    return ask.dirichlet_alpha


def apportion(shares: np.ndarray, amount: int) -> np.ndarray:
    """Divide amount by shares (m,), which sum to 1, into integers (m,), by the method of largest remainders."""
    quotas = shares * amount
    counts = np.floor(quotas).astype(int)
    counts[np.argsort(counts - quotas, kind="stable")[: amount - counts.sum()]] += 1
    return counts


def _apportioned(shares: np.ndarray, sets: np.ndarray) -> np.ndarray:
    """Divide all images, whose sets of classes are `sets` (n,), by shares (sets, m) into numbers (sets, m)."""
    return np.stack([apportion(share, int(np.count_nonzero(sets == number))) for number, share in enumerate(shares)])


def _deal(images: np.ndarray, sets: np.ndarray, counts: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """Deal to each client `counts` (sets, m) of the images (n,), in random order, whose sets of classes are `sets`."""
    m = counts.shape[1]
    owner = np.full(len(images), m)  # nobody's
    for number, of_clients in enumerate(counts):
        owner[np.flatnonzero(sets == number)[: of_clients.sum()]] = np.repeat(np.arange(m), of_clients)
    images = images[np.lexsort((rng.random(len(images)), owner))]  # a random order for each client's images
    return np.split(images, np.cumsum(np.bincount(owner, minlength=m + 1))[:-1])[:m]


def _cut_as_perfed_ckt(ask: Request, owned: list[np.ndarray], spare: np.ndarray, rng: np.random.Generator) -> Partition:
    """Cut each client's images into {0.1, 0.3 or 0.4}, 0.1 and 0.5 for training, validation and test."""
    m = len(owned)
    tenths = np.cumsum(np.column_stack([rng.choice([1, 3, 4], m), np.full((m, 2), [1, 5])]), axis=1)  # (m, 3)
    return _cut(ask, owned, tenths, spare, down=4)  # halves


def _cut(
    ask: Request, owned: list[np.ndarray], tenths: np.ndarray, spare: np.ndarray, down: int = 0, **seen: np.ndarray
) -> Partition:
    """Cut each client's images at `tenths`, (m, 3) or (1, 3), into training, validation and test images.

    The ends of the parts are in tenths, so that halves are exact. With `down` 0 all ends are rounded down; with 4 they
    are rounded to the nearest and halves down. So no client has an image for training and none for test.
    """
    tenths = np.resize(tenths, (len(owned), 3))
    cuts = [(ends * len(images) + down) // 10 for ends, images in zip(tenths, owned, strict=True)]
    train, validation, test, _ = zip(*map(np.split, owned, cuts), strict=True)
    return make_partition(ask, list(train), list(validation), list(test), spare, **seen)


def _check_trainers(ask: Request, partition: Partition, remedy: str = "") -> Partition:
    trainers = sum(len(images) > 0 for images in partition.train)
    if trainers < 2:
        larger = f"take a larger dirichlet-alpha (it is {ask.dirichlet_alpha}), other clients or more images"
        raise DataError(
            f"{trainers} of {ask.num_clients} clients have training images, at least 2 must: {remedy or larger}"
        )
    return partition
