"""The server: an ordinary ServerApp with one line changed."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from safetensors.torch import save_file

from kindred import HeurFedAMP
from plug_in.task import make_net

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    torch.manual_seed(0)
    # Before: strategy = FedProx(proximal_mu=0.01)
    strategy = HeurFedAMP(sigma=100, self_weight=0.2)
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(make_net().state_dict()),
        train_config=ConfigRecord({"lr": context.run_config["lr"]}),
        num_rounds=context.run_config["num-rounds"],
    )

    folder = Path(context.run_config["models-dir"], str(context.run_id)).absolute()
    folder.mkdir(parents=True)
    for client, arrays in strategy.client_models().items():
        name = quote(str(client), safe="")  # an id that a client chooses could be a path
        save_file(arrays.to_torch_state_dict(), folder / f"{name}.safetensors")
    for client, accuracy in strategy.history.last_values().items():
        print(f"client {client}: eval_acc {accuracy:.3f}")
    print(f"mean eval_acc {strategy.history.rounds[-1]['accuracy']:.3f}; personal models in {folder}")
