"""The ClientApp: this application's data and models for every method."""

from __future__ import annotations

import contextlib
import ctypes
import functools

from flwr.app import Context
from torch import nn

from kindred import MODELS, REGISTRY, Site, make_client_app, make_model
from kindred.client.models import choose_model, model_for_size, parse_models
from kindred.client.site import ModelFactory, client_id
from kindred.data import Sites, load_federation
from kindred.messages import seed_for


def load_site(context: Context) -> Site:
    """The client's data, its own or its part of the federation's, and the network of the run."""
    config, client = context.run_config, client_id(context)
    method = REGISTRY[str(config["strategy"])]
    needs_public = method.needs_public_set and not method.distils
    public = None
    if config["dataset"] == "sites":
        federation = Sites.of(config)
        data = federation.site_data(context.node_config)
        typical = int(config["samples-per-client"])
        if needs_public:
            public = federation.public_set(context.node_config)
    else:
        federation = load_federation(config)
        if not isinstance(client, int) or not 0 <= client < federation.num_clients:
            raise ValueError(
                f"client {client} has no data: the federation has clients 0 to "
                f"{federation.num_clients - 1} (num-clients)"
            )
        data = federation.site_data(client)
        typical = float(federation.train_sizes.mean())
        if needs_public:
            public = federation.public_set()
    size = len(data.train[1])
    seed = seed_for(int(config["seed"]), client, "architecture")
    name = model_for_size(parse_models(str(config["model"])), size, typical or size, seed)
    name = choose_model(federation.image_shape) if name == "auto" else name
    return Site(
        model=_factory(name, federation.image_shape, federation.num_classes),
        train=data.train,
        test=data.test,
        validation=data.validation if len(data.validation[1]) else None,
        public=public,
        about=federation.task.to_metadata(name),
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
