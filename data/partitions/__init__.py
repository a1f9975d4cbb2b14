"""The partitions by name, and `divide`, which divides a dataset among clients by one of them.

flwr-datasets has IID, pathological and shard partitioners. But they take Hugging Face datasets, whose packages it
requires, and none of them has groups of clients. So the few lines that draw indices are here.

Partitions are in three files. Those in `drawn.py` fix how many images of each class a client has, and draw them. Those
in `dealt.py` deal all images out by shares. `by_client.py` divides nothing: the data say whose samples are. Where there
are groups, clients are numbered by group: group g has the clients i with i G // m = g.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from kindred.extensions import Registry

from ..files import DataError
from .by_client import by_client
from .dealt import apportion, clustered_dirichlet, dirichlet, dirichlet_clients, label_groups
from .drawn import draw, even, iid, pathological, permuted, practical, rotated
from .request import Partition, Request, Scheme, check_size

__all__ = ["PARTITIONS", "Partition", "Request", "Scheme", "apportion", "check_size", "divide", "draw", "even"]

PARTITIONS: Registry[Scheme] = Registry("kindred.partitions", Scheme, {
    "iid": Scheme("every client a uniform draw from all data", iid, ("with-replacement",), needs_classes=False),
    "pathological": Scheme(
        "two classes a client, drawn client by client, no groups", pathological, ("with-replacement",),
    ),
    "practical": Scheme(
        "groups of clients; 80% of a client's images from its group's classes, 20% from the others",
        practical, ("num-groups", "with-replacement"),
    ),
    "rotated": Scheme(
        "groups of clients, classes uniform; the images of group g turned by 90 g degrees, up to 4 groups",
        rotated, ("num-groups", "with-replacement"),
    ),
    "permuted": Scheme(
        "groups of clients, classes uniform; each group has the labels permuted in its own way",
        permuted, ("num-groups", "with-replacement"),
    ),
    "dirichlet": Scheme(
        "each class spread over the clients by Dir(dirichlet-alpha): small is skewed, large is even",
        dirichlet, ("dirichlet-alpha",), total=True,
    ),
    "dirichlet-clients": Scheme(
        "each client's mixture of classes drawn from Dir(dirichlet-alpha); all clients have equally many images",
        dirichlet_clients, ("dirichlet-alpha",), total=True,
    ),
    "label-groups": Scheme(
        "groups of clients; each group has classes of its own, and its clients images of these alone",
        label_groups, ("num-groups",), total=True,
    ),
    "clustered-dirichlet": Scheme(
        "classes in num-groups clusters, each spread over the clients by Dir(dirichlet-alpha)",
        clustered_dirichlet, ("num-groups", "dirichlet-alpha"), total=True,
    ),
    "by-client": Scheme(
        "the clients that the data have, each with its own samples; num-clients of those with min-samples or more",
        by_client, ("min-samples", "test-share"), needs_classes=False, splits=True,
    ),
})  # fmt: skip


def divide(partition: str, y_train: np.ndarray, y_test: np.ndarray, num_classes: int, **settings: Any) -> Partition:
    """Divide a dataset among clients.

    Parameters
    ----------
    partition, y_train, y_test, num_classes, **settings
        As in `Request`.

    Raises
    ------
    DataError
        There are more clients than samples, the groups do not fit, a class has too few images, there are no classes and
        the partition needs them, or it divides samples for training and test anew and these have times. In dirichlet,
        dirichlet-clients and clustered-dirichlet, fewer than 2 clients have training images.
    """
    ask = Request(partition, y_train, y_test, num_classes, **settings)
    if partition not in PARTITIONS:
        raise DataError(f"partition is {partition!r}, allowed: {', '.join(PARTITIONS)}")
    if not 1 <= ask.num_clients <= len(y_train):
        raise DataError(
            f"num-clients is {ask.num_clients}, allowed: up to {len(y_train)}, the number of training samples"
        )
    if ask.held_out_clients and not 0 < ask.held_out_clients <= ask.num_clients - 2:
        raise DataError(
            f"held-out-clients is {ask.held_out_clients}, allowed: 0 to {max(ask.num_clients - 2, 0)}, two fewer than "
            "num-clients"
        )
    scheme = PARTITIONS[partition]
    if scheme.needs_classes and not num_classes:
        others = ", ".join(name for name, each in PARTITIONS.items() if not each.needs_classes)
        raise DataError(f"partition {partition} needs classes, which {ask.dataset} has not here, allowed: {others}")
    if scheme.total and ask.times is not None:
        others = ", ".join(name for name, each in PARTITIONS.items() if not each.total)
        raise DataError(
            f"partition is {partition!r}, which divides earlier and later samples anew, and {ask.dataset} has times, "
            f"allowed: {others}; or no times"
        )
    found = scheme.divide(ask) if len(y_test) or scheme.splits else _divided_before(ask, scheme)
    if ask.validation_share:
        found = _with_validation(ask, found)
    return _newcomers_last(ask, found) if ask.held_out_clients else found


def _with_validation(ask: Request, found: Partition) -> Partition:
    """Hold out validation samples of the clients that have training samples and no validation samples."""
    parts = [
        (train, validation) if len(validation) or not len(train) else ask.hold_out(train, client)
        for client, (train, validation) in enumerate(zip(found.train, found.validation, strict=True))
    ]
    if not any(len(validation) for _, validation in parts):
        raise DataError(
            f"validation-share is {ask.validation_share}, and no client has more than 1 training sample of any class, "
            "so that none can be held out, allowed: 0, or more samples"
        )
    return replace(found, train=[train for train, _ in parts], validation=[validation for _, validation in parts])


def _newcomers_last(ask: Request, found: Partition) -> Partition:
    """Draw the clients that take no part, and number them after the others.

    Their training samples are in random order, and include those that would be for validation.
    """
    drawn = np.sort(ask.rng(8).choice(ask.num_clients, ask.held_out_clients, replace=False))
    order = np.concatenate([np.setdiff1d(np.arange(ask.num_clients), drawn), drawn])
    train, validation, test = (
        [part[client] for client in order] for part in (found.train, found.validation, found.test)
    )
    for place in range(ask.num_clients - ask.held_out_clients, ask.num_clients):
        own = np.concatenate([train[place], validation[place]])
        train[place] = ask.rng(8, int(order[place])).permutation(own)
        validation[place] = own[:0]
    return replace(
        found,
        train=train,
        validation=validation,
        test=test,
        groups=found.groups[order],
        quarter_turns=found.quarter_turns[order],
        label_maps=found.label_maps[order],
        names=tuple(found.names[client] for client in order) if found.names else (),
        newcomers=ask.held_out_clients,
    )


def _divided_before(ask: Request, scheme: Scheme) -> Partition:
    """Divide a dataset without test samples, of which a share is for test."""
    y_train = ask.y_train
    train, test = ask.split(np.arange(len(y_train)), ask.rng(6))
    clients = ask.clients_train
    found = scheme.divide(
        replace(
            ask,
            y_train=y_train[train],
            y_test=y_train[test],
            clients_train=None if clients is None else clients[train],
            clients_test=None if clients is None else clients[test],
            times=None,
        )
    )
    order = np.concatenate([train, test])  # of the indices in the partition that was found
    return replace(
        found,
        train=[order[own] for own in found.train],
        validation=[order[own] for own in found.validation],
        test=[order[own] for own in found.test],
        spare=order[found.spare],
    )
