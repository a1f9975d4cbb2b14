"""The server's step of HeurFedAMP: ratios of time to bare matrix products, and of peak memory to the models' size.

    python -m benchmarks.cloud_models [CLIENTS] [MILLIONS OF PARAMETERS]

Each client's cloud model is computed and released, as when it is sent. The bare products are W W^T and Xi W of the
same float32 matrices, W (m, d) and Xi (m, m), in one call each where memory allows; the second one is written into
allocated memory.
"""

from __future__ import annotations

import resource
import sys
import time

import numpy as np

from kindred import HeurFedAMP
from kindred.messages import to_record

REPEATS = 3


def peak() -> float:
    """Return the peak memory of this process so far, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def main(clients: int, size: int) -> None:
    baseline = peak()
    strategy = HeurFedAMP(sigma=100.0, self_weight=0.2)
    rng = np.random.default_rng(0)
    model = {"weight": rng.standard_normal(size, np.float32)}
    strategy.begin(to_record(model))
    strategy.models.reserve(clients)
    for client in range(clients):
        model["weight"] += 0.1 * rng.standard_normal(size, np.float32)
        strategy.models.put(client, model)
    everybody = range(clients)
    strategy.online = list(everybody)
    own_size = 4 * clients * size
    print(f"{clients} clients, {size / 1e6:g} million parameters each: {own_size / 1e9:.2f} GB of models")

    whole, weights_only = [], []
    for _ in range(REPEATS):
        started = time.perf_counter()
        _, xi = strategy.cloud_weights(2, everybody)
        weights_only.append(time.perf_counter() - started)
        for _ in strategy.models.combinations(xi, everybody):
            pass
        whole.append(time.perf_counter() - started)
    memory = (peak() - baseline) / own_size

    models = strategy.models._rows
    xi32 = xi.astype(np.float32)
    out = np.empty((clients, size), np.float32)
    out[:] = 0
    products = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        np.matmul(models, models.T)
        np.matmul(xi32, models, out=out)
        products.append(time.perf_counter() - started)

    print(
        f"weights {min(weights_only):.2f} s, weights and cloud models {min(whole):.2f} s, "
        f"bare products {min(products):.2f} s"
    )
    print(f"time over the bare products: {min(whole) / min(products):.2f}")
    print(f"peak memory over the models' size: {memory:.2f}")


if __name__ == "__main__":
    numbers = [float(argument) for argument in sys.argv[1:]]
    main(int(numbers[0]) if numbers else 100, int((numbers[1] if len(numbers) > 1 else 11) * 1e6))
