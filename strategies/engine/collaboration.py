"""Collaboration: the shares of the clients' models in what each client receives, kept as few rows as they have.

With FedAvg every client receives the same mean, and one row describes it; with clusters there is a row for each. A
matrix of m x m numbers exists only where somebody asks for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kindred.messages import ClientId


@dataclass(frozen=True)
class Collaboration:
    """The shares of m clients' models in the model that each client received last, or predicts with.

    Client i's shares are own_i e_i + (1 - own_i) rows[which_i], e_i being the i-th unit vector.

    Attributes
    ----------
    clients : list of m client ids, in order
    rows : ndarray, shape (k, m)
        The different rows. They sum to 1, or are 0 if the server must not know them.
    which : ndarray of int, shape (m,)
        For each client the number of its row; of no meaning where `own` is 1.
    own : ndarray, shape (m,)
        For each client the share of its own model that is not in its row.
    """

    clients: list[ClientId]
    rows: np.ndarray
    which: np.ndarray
    own: np.ndarray

    @classmethod
    def alone(cls, clients: Sequence[ClientId]) -> Collaboration:
        """Return that of clients of which each has its own model alone."""
        return cls.by_row(clients, {}, {})

    @classmethod
    def of_all(cls, clients: Sequence[ClientId], samples: Mapping[ClientId, float]) -> Collaboration:
        """Return that of clients which all receive the same mean, in which clients count by their samples.

        Without a sample of one of these clients each has its own model alone.
        """
        return cls.by_row(clients, {0: samples}, dict.fromkeys(clients, 0))

    @classmethod
    def by_row(
        cls,
        clients: Sequence[ClientId],
        rows: Mapping[Any, Mapping[ClientId, float]],
        row_of: Mapping[ClientId, Any],
    ) -> Collaboration:
        """Return that of clients whose rows are proportional to given numbers.

        Parameters
        ----------
        clients : sequence of m client ids, in order
        rows : mapping
            name of the row -> client -> number of samples, or another weight, 0 or more. Other clients are left out.
        row_of : mapping
            client -> name of its row. A client without one, or whose row is 0, has its own model alone.
        """
        numbers = np.array([[row.get(client, 0.0) for client in clients] for row in rows.values()], float)
        numbers = numbers.reshape(len(rows), len(clients))  # (k, m)
        totals = numbers.sum(axis=1, keepdims=True)  # (k, 1)
        shares = np.divide(numbers, totals, out=np.zeros_like(numbers), where=totals > 0)
        place = {name: k for k, name in enumerate(rows)}
        which = np.array([place.get(row_of.get(client), -1) for client in clients], np.int64)  # (m,)
        known = np.append(totals[:, 0] > 0, False)[which]  # (m,); -1 is the last, False
        return cls(list(clients), shares, np.where(known, which, 0), np.where(known, 0.0, 1.0))

    @classmethod
    def of_matrix(cls, clients: Sequence[ClientId], weights: np.ndarray) -> Collaboration:
        """Return that of clients with a row each, (m, m)."""
        return cls(list(clients), np.asarray(weights), np.arange(len(clients)), np.zeros(len(clients)))

    def matrix(self) -> np.ndarray:
        """Return the shares as a matrix, shape (m, m)."""
        return self.rows_of(np.arange(len(self.clients)))

    def rows_of(self, places: np.ndarray) -> np.ndarray:
        """Return the rows of the matrix for the clients at these places (k,) of `clients`, shape (k, m)."""
        own = self.own[places]
        shares = np.zeros((len(places), len(self.clients)))
        if len(self.rows):
            shares += (1 - own)[:, None] * self.rows[self.which[places]]
        shares[np.arange(len(places)), places] += own
        return shares
