"""Three linear regressions, two of them similar: the gain of co-distillation from clusters.

    python examples/toy-regression/toy.py [--seed N] [--draws N] [--noise SIGMA] [--output FILE.png]

The toy example of PerFed-CKT (Cho et al., arXiv:2109.08119, Figure 1 and appendix E): the true model of client i is
theta + zeta_i, theta uniform in [-10, 10]^2, zeta_i from N(0, 2), N(0, 5) and N(0, 200), read as variances, as N(., .)
is in the paper's section 4. Private and public inputs are uniform in [-10, 10]^2, lambda is 50, and clients
send their models' predictions for the public inputs. As in section 4, clients start from their own least-squares fits.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from kindred import cluster_logits, nearest_centroid

VARIANCES = (2, 5, 200)  # of zeta_i
DISTILL_WEIGHT = 50  # lambda
# The paper gives none of these. Labels have a spread of about 50. With five samples and this noise, clients 0 and 1 are
# about as far from their true models alone as with clusters. Less noise favours training alone, more noise clusters.
SAMPLES, NOISE, PUBLIC = 5, 20.0, 100
# The curvature is about 2 (lambda + 1) 33, so steps must be small; ten of these reach the minimum of a round.
ROUNDS, STEPS, STEP_SIZE = 10, 10, 2e-4


def draw(seed: int, noise: float) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Draw true models (3, 2), inputs (3, n, 2), labels (3, n) and public inputs (P, 2)."""
    rng = np.random.default_rng(seed)
    true = rng.uniform(-10, 10, 2) + np.sqrt(VARIANCES)[:, None] * rng.standard_normal((3, 2))
    inputs = rng.uniform(-10, 10, (3, SAMPLES, 2))
    labels = np.einsum("knd,kd->kn", inputs, true) + noise * rng.standard_normal((3, SAMPLES))
    return true, inputs, labels, rng.uniform(-10, 10, (PUBLIC, 2))


def distil(
    models: np.ndarray, inputs: np.ndarray, labels: np.ndarray, public: np.ndarray, num_clusters: int
) -> tuple[np.ndarray, np.ndarray]:
    """Run PerFed-CKT with all samples in each step; return the models (3, 2) and the last round's clusters (3,)."""
    for _ in range(ROUNDS):
        logits = (models @ public.T)[:, :, None]  # (3, P, 1), all that the server receives
        centroids, clusters = cluster_logits(logits, num_clusters, seed=0)
        target = np.stack([centroids[nearest_centroid(own, centroids), :, 0] for own in logits])  # (3, P)
        for _ in range(STEPS):
            off = np.einsum("knd,kd->kn", inputs, models) - labels  # (3, n)
            private = 2 / SAMPLES * np.einsum("kn,knd->kd", off, inputs)
            distilled = 2 * DISTILL_WEIGHT / PUBLIC * (models @ public.T - target) @ public
            models = models - STEP_SIZE * (private + distilled)
    return models, clusters


def compare(seed: int, noise: float) -> tuple[np.ndarray, dict[str, np.ndarray], np.ndarray]:
    """Return the true models (3, 2), the final models (3, 2) of each method, and the clusters (3,)."""
    true, inputs, labels, public = draw(seed, noise)
    alone = np.stack([np.linalg.lstsq(x, y)[0] for x, y in zip(inputs, labels)])
    fedavg = np.broadcast_to(alone.mean(axis=0), alone.shape)  # for clients of equal size that train to convergence
    averaged, _ = distil(alone, inputs, labels, public, num_clusters=1)
    clustered, clusters = distil(alone, inputs, labels, public, num_clusters=2)
    models = {"alone": alone, "FedAvg": fedavg, "averaged, c = 1": averaged, "clustered, c = 2": clustered}
    return true, models, clusters


def distances(true: np.ndarray, models: dict[str, np.ndarray]) -> np.ndarray:
    """Return the distance of each method's final model from each client's true model, (4, 3)."""
    return np.stack([np.linalg.norm(each - true, axis=1) for each in models.values()])


def picture(true: np.ndarray, models: dict[str, np.ndarray]) -> Figure:
    """Draw the plane of models, a panel for each client: the true models, and the client's final model by method."""
    figure = Figure(figsize=(11, 3.8), dpi=150, layout="compressed", facecolor="white")
    styles = (("#0072B2", "o", 13), ("#000000", "X", 10), ("#D55E00", "s", 8), ("#009E73", "^", 9))  # Okabe and Ito's
    for client, axes in enumerate(figure.subplots(1, 3, sharex=True, sharey=True)):
        axes.plot(*np.delete(true, client, axis=0).T, "*", color="#bbbbbb", markersize=13, label="others' true models")
        axes.plot(*true[client], "*", color="#E69F00", markersize=16, label="true model")
        for (way, each), (colour, marker, size) in zip(models.items(), styles):
            axes.plot(*each[client], marker, color=colour, markersize=size, markeredgecolor="white", label=way)
        axes.set(title=f"client {client}", xlabel="first weight", aspect="equal")
        axes.margins(0.12)
        axes.grid(color="#dddddd", linewidth=0.7)
    figure.supylabel("second weight", fontsize="medium")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False)
    return figure


def print_table(title: str, rows: dict[str, np.ndarray]) -> None:
    print(f"{title:<40}client 0  client 1  client 2")
    for name, row in rows.items():
        print(f"    {name:<36}" + "  ".join(f"{number:8.2f}" for number in row))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw in the first table and the figure")
    parser.add_argument("--draws", type=int, default=100, help="number of draws for the means, with seeds 0, 1, ...")
    parser.add_argument("--noise", type=float, default=NOISE, help="standard deviation of the labels' noise")
    parser.add_argument("--output", metavar="FILE.png", help="file for the figure")
    given = parser.parse_args()
    for name, least in (("seed", 0), ("draws", 1), ("noise", 0)):
        if not least <= getattr(given, name) < float("inf"):
            parser.error(f"--{name} is {getattr(given, name)}, allowed: {least} or more")
    if given.output and not Path(given.output).absolute().parent.is_dir():
        parser.error(f"--output is {given.output}, allowed: a file in an existing folder")

    true, models, clusters = compare(given.seed, given.noise)
    print_table(f"distance from the true model, seed {given.seed}", dict(zip(models, distances(true, models))))
    print(f"clusters: {clusters.tolist()}\n")
    if given.output:
        picture(true, models).savefig(given.output)

    drawn = [compare(seed, given.noise) for seed in range(given.draws)]
    every = np.stack([distances(true, models) for true, models, _ in drawn])  # (draws, 4, 3)
    print_table(f"mean over {given.draws} draws", dict(zip(models, every.mean(axis=0))))
    nearer = 100 * (every[:, 3] < every[:, 2]).mean(axis=0)
    print_table("% of draws in which", {"c = 2 ends nearer than c = 1": nearer})
    together = sum(clusters.tolist() == [0, 0, 1] for _, _, clusters in drawn)
    print(f"clients 0 and 1 in one cluster, client 2 in the other: {together} of {given.draws} draws")


if __name__ == "__main__":
    main()
