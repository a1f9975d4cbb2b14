"""The partitions by name, and `divide`, which divides a dataset among clients by one of them.

flwr-datasets has IID, pathological and shard partitioners. But they take Hugging Face datasets, whose packages it
requires, and none of them has groups of clients. So the few lines that draw indices are here.

Partitions are in two files. Those in `drawn.py` fix how many images of each class a client has, and draw them. Those in
`dealt.py` deal all images out by shares. Where there are groups, clients are numbered by group: group g has the clients
i with i G // m = g.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kindred.extensions import Registry

from ..sources import DataError
from .dealt import apportion, clustered_dirichlet, dirichlet, dirichlet_clients, label_groups
from .drawn import draw, even, iid, pathological, permuted, practical, rotated
from .request import Partition, Request, Scheme, check_size

__all__ = ["PARTITIONS", "Partition", "Request", "Scheme", "apportion", "check_size", "divide", "draw", "even"]

PARTITIONS: Registry[Scheme] = Registry("kindred.partitions", Scheme, {
    "iid": Scheme("every client a uniform draw from all data", iid, ("with-replacement",)),
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
        There are more clients than images, the groups do not fit, or a class has too few images. In dirichlet,
        dirichlet-clients and clustered-dirichlet, fewer than 2 clients have training images.
    """
    ask = Request(partition, y_train, y_test, num_classes, **settings)
    if partition not in PARTITIONS:
        raise DataError(f"partition is {partition!r}, allowed: {', '.join(PARTITIONS)}")
    if not 1 <= ask.num_clients <= len(y_train):
        raise DataError(
            f"num-clients is {ask.num_clients}, allowed: 1 to {len(y_train)}, the number of training images"
        )
    return PARTITIONS[partition].divide(ask)
