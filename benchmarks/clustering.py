"""The server's step of PerFed-CKT: ratio of its time to scikit-learn's k-means on the same matrix.

    python -m benchmarks.clustering [REPEATS]

100 clients in 3 groups send float32 softmax outputs for 2000 public images, of 10 and of 100 classes. Both
implementations take the best of 10 starts with the same seed and return the means of the clusters. scikit-learn's runs
with all its threads, and with one thread, which is faster where other programs use the cores. Repetitions alternate;
ratios are of medians.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import numpy as np
from sklearn.cluster import KMeans
from sklearn.metrics import adjusted_rand_score
from threadpoolctl import threadpool_limits

from kindred import cluster_logits

CLIENTS, CLUSTERS, PUBLIC, SEED = 100, 3, 2000, 0


def softmax_outputs(classes: int) -> np.ndarray:
    """Return softmax outputs (m, P, N): scores of each group plus, of equal variance, scores of each client."""
    rng = np.random.default_rng(SEED)
    groups = rng.standard_normal((CLUSTERS, PUBLIC, classes), np.float32)
    logits = np.empty((CLIENTS, PUBLIC, classes), np.float32)
    for client, out in enumerate(logits):
        scores = 2 * (groups[client % CLUSTERS] + rng.standard_normal((PUBLIC, classes), np.float32))  # (P, N)
        out[:] = np.exp(scores - scores.max(axis=1, keepdims=True))
        out /= out.sum(axis=1, keepdims=True)
    return logits


def seconds(call: Callable[..., object], *arguments: object) -> float:
    started = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - started


def main(repeats: int) -> None:
    for classes in (10, 100):
        logits = softmax_outputs(classes)
        matrix = logits.reshape(CLIENTS, -1)  # (m, P N)
        means = KMeans(CLUSTERS, n_init=10, random_state=SEED)
        ours, theirs, one_thread = [], [], []
        for _ in range(repeats):
            ours.append(seconds(cluster_logits, logits, CLUSTERS, SEED))
            theirs.append(seconds(means.fit, matrix))
            with threadpool_limits(1):
                one_thread.append(seconds(means.fit, matrix))
        _, assignment = cluster_logits(logits, CLUSTERS, SEED)
        same = adjusted_rand_score(means.labels_, assignment) == 1
        print(
            f"{CLIENTS} clients, {PUBLIC} images, {classes} classes: cluster_logits {np.median(ours):.3f} s, "
            f"scikit-learn's KMeans {np.median(theirs):.3f} s, in one thread {np.median(one_thread):.3f} s"
        )
        print(
            f"time over scikit-learn's: {np.median(ours) / np.median(theirs):.2f}, "
            f"in one thread {np.median(ours) / np.median(one_thread):.2f}; "
            f"the same partition: {'yes' if same else 'no'}"
        )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 9)
