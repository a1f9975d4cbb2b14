"""Clients' models that are computed on access."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from flwr.app import ArrayRecord

from kindred.messages import ClientId


class ComputedModels(Mapping[ClientId, ArrayRecord]):
    """A mapping from clients to models that are computed on access and not kept in memory.

    Parameters
    ----------
    clients : sequence of client ids
    compute : callable
        Given clients, yields their models one after the other.
    """

    def __init__(
        self, clients: Sequence[ClientId], compute: Callable[[Sequence[ClientId]], Iterator[ArrayRecord]]
    ) -> None:
        self._clients = clients
        self._compute = compute

    def __getitem__(self, client: ClientId) -> ArrayRecord:
        if client not in self._clients:
            raise KeyError(client)
        return next(self._compute([client]))

    def __iter__(self) -> Iterator[ClientId]:
        return iter(self._clients)

    def __len__(self) -> int:
        return len(self._clients)

    def items(self) -> Iterator[tuple[ClientId, ArrayRecord]]:  # type: ignore[override]
        """Compute all models together: fewer matrix products, and bit for bit the models of an evaluation of all."""
        return zip(self._clients, self._compute(self._clients), strict=False)
