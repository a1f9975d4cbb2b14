"""Ten clients with one interval of a sine curve each: FedeRiCo finds collaborators on neighbouring intervals.

    python examples/sine/sine.py [--seed N] [--draws N] [--noise SIGMA] [--temperature T] [--output FILE.png]

The example of FedeRiCo's paper (Sui et al., arXiv:2210.06597, Figure 1): each client fits a line to few noisy points
from its interval of the curve. Algorithm 1 is in `collaborate`. The library provides the known losses of others'
models, the draw of neighbours, the weights and the steps of Adam, as in the strategy.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from kindred.engine.optimizers import AdamStep
from kindred.federico import known_weights
from kindred.parts.federico_losses import Losses
from kindred.parts.neighbours import choose_neighbours

# The paper gives none of these. The noise's deviation is a third of the curve's amplitude.
CLIENTS, POINTS, NOISE = 10, 5, 0.3
NUM_NEIGHBOURS, EPSILON, BETA = 3, 0.3, 0.6  # the paper's
# Enough steps for clients alone to reach their least-squares lines, so that no gain comes from early stopping.
ROUNDS, LEARNING_RATE = 200, 0.1
ALONE = 20  # first rounds: as in the strategy, a client trains its model before it shares it

MIDDLES = np.arange(CLIENTS) + 0.5  # of the intervals: x is from 0 to CLIENTS, client k has [k, k + 1)


def curve(x: np.ndarray) -> np.ndarray:
    """Return the sine curve, with one period over all clients."""
    return np.sin(2 * np.pi * x / CLIENTS)


def draw(seed: int, noise: float) -> tuple[np.ndarray, np.ndarray]:
    """Draw inputs, uniform in each client's interval, and labels, (K, n) each."""
    rng = np.random.default_rng(seed)
    inputs = np.arange(CLIENTS)[:, None] + rng.random((CLIENTS, POINTS))
    return inputs, curve(inputs) + noise * rng.standard_normal(inputs.shape)


def features(x: np.ndarray) -> np.ndarray:
    """Features (K, n, 2) of inputs x (n,); a line is (slope, height in the middle of its owner's interval)."""
    off = x - MIDDLES[:, None]
    return np.stack([off, np.ones_like(off)], axis=-1)


def collaborate(
    inputs: np.ndarray, labels: np.ndarray, noise: float, num_neighbours: int, temperature: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """Run Algorithm 1; return lines (K, 2) and weights (K, K), whose rows sum to 1. 0 neighbours: training alone.

    A loss is the negative log-likelihood of the labels under normal noise, without its constant.
    """
    rng = np.random.default_rng(0)
    lines = 0.1 * rng.standard_normal((CLIENTS, 2))
    steps = [AdamStep(LEARNING_RATE) for _ in range(CLIENTS)]
    losses = [Losses() for _ in range(CLIENTS)]
    for number in range(ROUNDS):
        gradients = np.zeros_like(lines)
        for client, (x, y, table) in enumerate(zip(inputs, labels, losses)):
            others = [other for other in range(CLIENTS) if other != client]
            most = num_neighbours if number >= ALONE else 0
            drawn = choose_neighbours(table.averages(others), EPSILON, int(rng.integers(2**32)), most)
            owners = [client, *(others[i] for i in drawn)]  # k of them
            seen = features(x)[owners]  # (k, n, 2)
            off = np.einsum("knd,kd->kn", seen, lines[owners]) - y
            table.update(owners, (off**2).sum(axis=1) / (2 * noise**2), BETA)
            share_of = known_weights(table, temperature)
            shares = [share_of[owner] for owner in owners]
            gradients[owners] += np.einsum("k,kn,knd->kd", shares, off, seen) / noise**2
        for line, gradient, step in zip(lines, gradients, steps):
            step(line, gradient)
    weights = np.zeros((CLIENTS, CLIENTS))
    for row, table in zip(weights, losses):
        for owner, weight in known_weights(table, temperature).items():
            row[int(owner)] = weight
    return lines, weights


def mixtures(lines: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the weighted means of the lines, (K, 2), which are lines: slopes, and heights in each client's middle."""
    heights = np.einsum("ij,jid,jd->i", weights, features(MIDDLES), lines)
    return np.stack([weights @ lines[:, 0], heights], axis=-1)


def compare(seed: int, noise: float, temperature: float = 1.0) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return the lines (K, 2) with which clients predict, for each method, and FedeRiCo's weights (K, K)."""
    inputs, labels = draw(seed, noise)
    slope, height = np.polyfit(inputs.ravel(), labels.ravel(), 1)  # where gradient steps on all clients' data converge
    fedavg = np.stack([np.full(CLIENTS, slope), height + slope * MIDDLES], axis=-1)
    alone, _ = collaborate(inputs, labels, noise, 0)
    lines, weights = collaborate(inputs, labels, noise, NUM_NEIGHBOURS, temperature)
    return {"FedAvg": fedavg, "alone": alone, "FedeRiCo": mixtures(lines, weights)}, weights


def errors(lines: np.ndarray) -> np.ndarray:
    """Return the mean squared distance from the curve on each client's interval, (K,)."""
    off = (np.arange(100) + 0.5) / 100 - 0.5
    return ((lines[:, :1] * off + lines[:, 1:] - curve(MIDDLES[:, None] + off)) ** 2).mean(axis=1)


def by_distance(weights: np.ndarray) -> np.ndarray:
    """Sum weights (K, K) by distance of the line's owner in intervals, mean over clients: (K,), with sum 1."""
    apart = np.abs(np.subtract.outer(np.arange(CLIENTS), np.arange(CLIENTS)))
    return np.bincount(apart.ravel(), weights.ravel()) / CLIENTS


def picture(seed: int, noise: float, ways: dict[str, np.ndarray], weights: np.ndarray) -> Figure:
    """Draw the data and each method's predictions (left), and the weights of clients' lines (right)."""
    figure = Figure(figsize=(12, 4.8), dpi=150, layout=ConstrainedLayoutEngine(wspace=0.04), facecolor="white")
    left, right = figure.subplots(1, 2, width_ratios=(1.45, 1))
    x = np.linspace(0, CLIENTS, 401)
    left.plot(x, curve(x), color="#CC79A7", linewidth=5, alpha=0.45, label="curve")  # colours: Okabe and Ito's
    points = left.plot(*draw(seed, noise), "o", color="#56B4E9", markersize=5, markeredgecolor="white")
    points[0].set_label(f"data: {POINTS} noisy points each")
    ends = np.array([[-0.5], [0.5]])
    styles = (("#000000", ":", 2.2), ("#E69F00", "-", 1.3), ("#0072B2", "--", 2.4))
    for (way, lines), (colour, dash, width) in zip(ways.items(), styles):
        drawn = left.plot(MIDDLES + ends, lines[:, 1] + lines[:, 0] * ends, dash, color=colour, linewidth=width)
        drawn[0].set_label(f"{way}: squared error {errors(lines).mean():.3f}")
    left.vlines(np.arange(1, CLIENTS), 0, 1, transform=left.get_xaxis_transform(), color="#dddddd", linewidth=0.7)
    left.set(
        title="each client's line on its interval of the curve",
        xlabel="client",
        ylabel="output",
        xlim=(0, CLIENTS),
        xticks=MIDDLES,
        xticklabels=range(CLIENTS),
    )
    left.tick_params(axis="x", length=0)
    left.spines[["top", "right"]].set_visible(False)
    left.legend(frameon=False)

    image = right.imshow(weights, vmin=0)
    figure.colorbar(image, ax=right, shrink=0.85, pad=0.02, label="weight")
    for (row, column), weight in np.ndenumerate(weights):
        if weight >= 0.005:
            colour = "black" if weight > 0.6 * weights.max() else "white"
            right.text(column, row, f"{weight:.2f}", ha="center", va="center", fontsize=7.5, color=colour)
    right.set(
        title="FedeRiCo's weights",
        xlabel="client whose line is used",
        ylabel="client that predicts",
        xticks=range(CLIENTS),
        yticks=range(CLIENTS),
    )
    return figure


def print_table(title: str, rows: dict[str, np.ndarray]) -> None:
    """Print rows of errors, (draws, K) each."""
    print(f"{title:<40}mean over clients  worst client")
    for name, each in rows.items():
        print(f"    {name:<36}{each.mean():17.3f}{each.max(axis=1).mean():14.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw in the first table and the figure")
    parser.add_argument("--draws", type=int, default=20, help="number of draws for the means, with seeds 0, 1, ...")
    parser.add_argument("--noise", type=float, default=NOISE, help="standard deviation of the labels' noise")
    parser.add_argument("--temperature", type=float, default=1.0, help="divisor of FedeRiCo's losses")
    parser.add_argument("--output", metavar="FILE.png", help="file for the figure")
    given = parser.parse_args()
    for name, least in (("seed", 0), ("draws", 1), ("noise", 0.01), ("temperature", 0.01)):
        if not least <= getattr(given, name) < float("inf"):
            parser.error(f"--{name} is {getattr(given, name)}, allowed: {least} or more")
    if given.output and not Path(given.output).absolute().parent.is_dir():
        parser.error(f"--output is {given.output}, allowed: a file in an existing folder")

    ways, weights = compare(given.seed, given.noise, given.temperature)
    print_table(f"squared error, seed {given.seed}", {way: errors(lines)[None] for way, lines in ways.items()})
    if given.output:
        picture(given.seed, given.noise, ways, weights).savefig(given.output)

    drawn = [compare(seed, given.noise, given.temperature) for seed in range(given.draws)]
    every = {way: np.stack([errors(ways[way]) for ways, _ in drawn]) for way in ways}  # (draws, K) each
    print()
    print_table(f"mean over {given.draws} draws", every)
    nearer = every["FedeRiCo"] < every["alone"]  # (draws, K)
    better = every["FedeRiCo"].mean(axis=1) < every["alone"].mean(axis=1)
    print(f"FedeRiCo is better than alone in {better.sum()} of {given.draws} draws, for {nearer.mean():.0%} of clients")
    own, next_to, *others = np.mean([by_distance(weights) for _, weights in drawn], axis=0)
    print(
        f"weights: {own:.2f} own line, {next_to:.2f} next intervals, {others[0]:.2f} those after, "
        f"{sum(others[1:]):.2f} others"
    )


if __name__ == "__main__":
    main()
