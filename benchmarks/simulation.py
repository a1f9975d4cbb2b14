"""Flower's simulation of a round over the same work in a bare PyTorch loop.

    python -m benchmarks.simulation [--data-dir DIR] [--rounds N]

20 clients, Fashion-MNIST practical non-IID with 300 samples a client, McMahan CNN, HeurFedAMP, 2 epochs a round
with batches of 100 and Adam. The simulation runs one-thread clients on all cores; the bare loop is one process
with all cores and does, for each client, the steps of torch.optim.Adam on the same batches and the same two
evaluations on the client's test data, nothing else. DIR holds Fashion-MNIST as for `kindred run --data-dir`.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

import numpy as np

from server_app.config import Config

CLIENTS, SAMPLES, EPOCHS, BATCH = 20, 300, 2, 100


def settings(data_dir: str, rounds: int, output_dir: str) -> Config:
    return Config(
        strategy="heurfedamp", dataset="fashion-mnist", data_dir=data_dir, partition="practical", num_clients=CLIENTS,
        samples_per_client=SAMPLES, model="mcmahan-cnn", num_rounds=rounds, local_epochs=EPOCHS, batch_size=BATCH,
        learning_rate=1e-3, output_dir=output_dir)


def simulated(config: Config) -> float:
    """Median seconds of a round after the first, in Flower's simulation engine."""
    from server_app.flower import run_simulation
    from server_app.results import read_table

    outcome = run_simulation(
        config.run_config(), app_dir=Path(__file__).parent.parent, num_clients=config.num_clients,
        on_line=lambda line: print("   ", line))
    if outcome.code:
        raise SystemExit(outcome.reason)
    folder = outcome.results
    return float(np.median([row["seconds"] for row in read_table(folder / "rounds.csv")][1:]))


def bare(config: Config, rounds: int) -> float:
    """Median seconds of a round after the first, in a plain loop."""
    import torch
    from torch.nn.functional import cross_entropy

    from data import load_federation
    from strategies import make_model

    torch.set_num_threads(os.cpu_count() or 1)
    federation = load_federation(config.run_config())
    sites = [federation.site_data(client) for client in range(CLIENTS)]
    models = [make_model(config.model, federation.image_shape, federation.num_classes, 0) for _ in sites]
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        for model, site in zip(models, sites):
            x, y = site.train
            evaluate(model, *site.test)
            optimizer = torch.optim.Adam(model.parameters(), lr=config.learning_rate)
            model.train()
            for _ in range(EPOCHS):
                for batch in torch.randperm(len(y)).split(BATCH):
                    optimizer.zero_grad()
                    cross_entropy(model(x[batch]), y[batch]).backward()
                    optimizer.step()
            evaluate(model, *site.test)
        seconds.append(time.perf_counter() - started)
    return float(np.median(seconds[1:]))


def evaluate(model, x, y) -> float:
    import torch

    model.eval()
    with torch.inference_mode():
        return float((model(x).argmax(1) == y).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", default="", help="folder of Fashion-MNIST (default: as of kindred run)")
    parser.add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = settings(arguments.data_dir and os.path.abspath(arguments.data_dir), arguments.rounds, folder)
        # The machine's speed drifts: the loop is timed before and after.
        before = bare(config, 3)
        simulation = simulated(config)
        after = bare(config, 3)
    print(f"a round in the simulation {simulation:.2f} s, in the bare loop {before:.2f} and {after:.2f} s")
    print(f"simulation over bare loop: {simulation / ((before + after) / 2):.2f}")


if __name__ == "__main__":
    main()
