"""Combination of models at a client, for FedFomo and Kindred; the server's is `ClientModels.combinations`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np


def combined(models: Sequence[Mapping[str, np.ndarray]], weights: np.ndarray) -> dict[str, np.ndarray]:
    """Return sum_n w_n theta_n for weights (k,) that sum to 1; a model of weight 0 is not read.

    Integer buffers are those of the first model, which is the client's own.
    """
    first, *others = np.flatnonzero(weights).tolist()
    sums = {}
    for name, own in models[0].items():
        sums[name] = own
        if np.issubdtype(own.dtype, np.floating):
            sums[name] = own.dtype.type(weights[first]) * models[first][name]
            for k in others:
                sums[name] += own.dtype.type(weights[k]) * models[k][name]
    return sums
