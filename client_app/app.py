"""The ClientApp: this application's data and models for every method."""

from __future__ import annotations

import functools

from flwr.app import Context
from torch import nn

from data import load_federation
from strategies import Site, make_client_app, make_model
from strategies.client import ModelFactory, client_id


def load_site(context: Context) -> Site:
    """The part of the federation's data that is this client's, and the network of the run."""
    federation = load_federation(context.run_config)
    client = client_id(context)
    if not isinstance(client, int) or not 0 <= client < federation.num_clients:
        raise ValueError(f"client {client} has no data: the federation has clients 0 to {federation.num_clients - 1} "
                         "(num-clients)")
    x_train, y_train, x_test, y_test = federation.site_data(client)
    config = context.run_config
    model = _factory(str(config["model"]), federation.image_shape, federation.num_classes, int(config["seed"]))
    return Site(model=model, train=(x_train, y_train), test=(x_test, y_test))


@functools.lru_cache(maxsize=4)  # one object for all clients, so that they share one module
def _factory(name: str, image_shape: tuple[int, int, int], num_classes: int, seed: int) -> ModelFactory:
    def factory() -> nn.Module:
        return make_model(name, image_shape, num_classes, seed)

    return factory


app = make_client_app(load_site)
