"""Choice of the neighbours whose models a client of FedeRiCo or FedFomo receives."""

from __future__ import annotations

import numpy as np


def choose_neighbours(smoothed: np.ndarray, epsilon: float, seed: int, most: int | None = None) -> np.ndarray:
    """Return clients in the order of an epsilon-greedy choice; FedeRiCo, Algorithm 1, line 7.

    Each draw is without replacement: uniform with probability epsilon, otherwise the client with the highest weight,
    which has the lowest loss. Ties, such as models not yet received, are broken at random.

    Parameters
    ----------
    smoothed : ndarray, shape (k,)
        Lhat_ij of the other clients' models, 0 for models not yet received.
    epsilon : float
        0 to 1.
    seed : int
    most : int, optional
        Number of draws; all by default. The first draws do not depend on it.

    Returns
    -------
    ndarray of int, shape (min(k, most),)
        Indices in the order drawn: the first M are the neighbours, the next are spares for unavailable ones.
    """
    rng = np.random.default_rng(seed)
    shuffled = rng.permutation(len(smoothed))
    left = shuffled[np.argsort(np.asarray(smoothed)[shuffled], kind="stable")].tolist()  # best first
    explores = (rng.random(len(left)) < epsilon)[:most]
    anywhere = rng.random(len(left))[:most]
    return np.array(
        [left.pop(int(at * len(left)) if explore else 0) for explore, at in zip(explores, anywhere, strict=True)], int
    )
