"""Clients with the same mixture of classes and different amounts of data, drawn from Dir(dirichlet-alpha)."""

from __future__ import annotations

import numpy as np

from kindred.data.partitions import Partition, Request, Scheme, apportion, check_size, draw, even


def divide(ask: Request) -> Partition:
    """Draw samples-per-client images on average (0: an equal part of all), and equally many test images for all."""
    check_size(ask)
    m = ask.num_clients
    average = ask.samples_per_client or ask.have_train.min() * ask.num_classes // m  # enough of every class
    shares = ask.rng(0).dirichlet(np.full(m, ask.dirichlet_alpha))  # (m,)
    return draw(ask, even(ask, apportion(shares, m * average)), even(ask, np.full(m, len(ask.y_test) // m)))


AMOUNTS = Scheme(
    "classes uniform; amounts drawn from Dir(dirichlet-alpha): small is skewed, large is even", divide,
    settings=("dirichlet-alpha", "with-replacement"),
)  # fmt: skip
