"""The partition by-client: each client has the samples that the data say are its own."""

from __future__ import annotations

import numpy as np

from ..files import DataError
from ..splits import draw_places
from .request import Partition, Request, make_partition


def by_client(ask: Request) -> Partition:
    """Give each client the samples that the data say are its own, in the order of the data.

    Clients with fewer than min_samples samples, for training and test together, are left out. If there are then more
    than num_clients, as many are drawn. They are numbered in the order of their names; names that are whole numbers are
    in the order of these. Where the data bring no test part, test_share of each client's samples is for test. If
    samples_per_client is not 0, each client keeps at most as many training samples; its test samples stay the same.
    """
    names, owned = _clients(ask)
    n = len(ask.y_train)
    train, test = [], []
    for number, (name, own) in enumerate(zip(names, owned, strict=True)):
        own_train, own_test = own[own < n], own[own >= n]
        if not len(ask.y_test):
            own_train, own_test = ask.split(own, ask.rng(2, number))
        for part, other, samples in (("training", "test", own_train), ("test", "training", own_test)):
            if not len(samples):
                raise DataError(f"client {name!r} has {len(own)} {other} samples and no {part} samples")
        if 0 < ask.samples_per_client < len(own_train):
            places, _ = draw_places(
                len(own_train), ask.samples_per_client, ask.rng(1, number), ask.classes_of(own_train)
            )
            own_train = own_train[places]
        train.append(own_train)
        test.append(own_test)
    spare = np.setdiff1d(np.arange(n + len(ask.y_test)), np.concatenate(train + test))
    nothing = [np.empty(0, int)] * len(names)
    return make_partition(ask, train, nothing, test, spare, names=tuple(names))


def _clients(ask: Request) -> tuple[list[str], list[np.ndarray]]:
    """Return the names of the clients that take part, and the samples of each."""
    if ask.clients_train is None:
        raise DataError(f"partition {ask.partition} needs data that say whose each sample is, {ask.dataset} do not")
    of_test = ask.clients_test if len(ask.y_test) and ask.clients_test is not None else ask.clients_train[:0]
    found, owner = np.unique(np.concatenate([ask.clients_train, of_test]), return_inverse=True)
    owned = np.split(np.argsort(owner, kind="stable"), np.cumsum(np.bincount(owner))[:-1])
    samples = dict(zip(found.tolist(), owned, strict=True))
    names = sorted(
        (name for name, own in samples.items() if len(own) >= ask.min_samples),
        key=lambda name: (not name.isdecimal(), int(name) if name.isdecimal() else 0, name),
    )
    if ask.num_clients > len(names):
        raise DataError(
            f"num-clients is {ask.num_clients}, allowed: up to {len(names)}, the clients in the data with at least "
            f"min-samples {ask.min_samples} samples (of {len(found)} clients)"
        )
    if ask.num_clients < len(names):
        chosen = np.sort(ask.rng(0).choice(len(names), ask.num_clients, replace=False))
        names = [names[place] for place in chosen.tolist()]
    return names, [samples[name] for name in names]
