"""The ClientApp: this application's data and models for every method."""

from __future__ import annotations

import contextlib
import ctypes
import functools

from flwr.app import Context
from torch import nn

from data import load_federation
from strategies import MODELS, REGISTRY, Site, make_client_app, make_model
from strategies.client import ModelFactory, client_id
from strategies.messages import seed_for
from strategies.models import model_for_size, parse_models


def load_site(context: Context) -> Site:
    """The part of the federation's data that is this client's, and the network of the run."""
    federation = load_federation(context.run_config)
    client = client_id(context)
    if not isinstance(client, int) or not 0 <= client < federation.num_clients:
        raise ValueError(f"client {client} has no data: the federation has clients 0 to {federation.num_clients - 1} "
                         "(num-clients)")
    data = federation.site_data(client)
    config = context.run_config
    names, seed = parse_models(str(config["model"])), int(config["seed"])
    sizes = federation.train_sizes  # (m,)
    name = model_for_size(names, int(sizes[client]), float(sizes.mean()), seed_for(seed, client, "architecture"))
    return Site(
        model=_factory(name, federation.image_shape, federation.num_classes),
        train=data.train, test=data.test, validation=data.validation if len(data.validation[1]) else None,
        public=federation.public_set() if REGISTRY[str(config["strategy"])].needs_public_set else None,
    )


@functools.lru_cache(maxsize=len(MODELS))  # one object for all clients, so that they share one module
def _factory(name: str, image_shape: tuple[int, int, int], num_classes: int) -> ModelFactory:
    def factory() -> nn.Module:
        return make_model(name, image_shape, num_classes)

    return factory


def _keep_memory() -> None:
    """Have glibc keep large blocks that are freed: each batch needs them again, and new ones come in zeroed pages."""
    trim_threshold, mmap_threshold = -1, -3  # malloc.h
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        for parameter in (trim_threshold, mmap_threshold):
            ctypes.CDLL(None).mallopt(parameter, 1 << 30)


_keep_memory()
app = make_client_app(load_site)
