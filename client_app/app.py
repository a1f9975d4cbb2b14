"""The ClientApp, which gives every method this application's data and models."""

from __future__ import annotations

import contextlib
import ctypes
import functools

from flwr.app import Context

from kindred import MODELS, REGISTRY, Site, make_client_app, make_model
from kindred.client.models import client_network
from kindred.client.site import LABELLED, STATE_DIR, ModelFactory, client_id, only_validates
from kindred.data import Federation, load_clients
from kindred.errors import Reportable


def load_site(context: Context) -> Site:
    """Load a client's data (its own, or its part of a divided dataset) and choose its network.

    A site uses the data that its operator has named, and the run's settings cannot name others.
    """
    if STATE_DIR in context.node_config and (dataset := context.run_config["dataset"]) != "sites":
        raise ValueError(Reportable(f"dataset is {dataset!r}, allowed at a site, which has its own data: 'sites'"))
    config, client = context.run_config, client_id(context)
    clients = load_clients(config, context.node_config)
    labelled = context.node_config.get(LABELLED)
    if isinstance(labelled, int) and isinstance(clients, Federation):
        data = clients.newcomer_data(client, labelled)
    else:
        data = clients.site_data(client)
    inputs = clients.task.inputs
    validates = only_validates(context.node_config)
    network = client_network(
        str(config["model"]),
        inputs.kind,
        inputs.shape,
        len((data.test if validates else data.train)[1]),
        clients.typical_size,
        int(config["seed"]),
        client,
    )
    method = REGISTRY[str(config["strategy"])]
    has_public_set = method.needs_public_set and not method.distils and not validates
    return Site(
        model=_factory(network, inputs.shape, clients.task.objective.num_outputs),
        train=data.train,
        test=data.test,
        validation=data.validation if len(data.validation[1]) else None,
        public=clients.public_set() if has_public_set else None,
        about=clients.task.to_metadata(network),
        objective=clients.task.objective,
    )


@functools.lru_cache(maxsize=len(MODELS))  # one object for all clients, so that they share one module
def _factory(name: str, shape: tuple[int, ...], num_outputs: int) -> ModelFactory:
    return functools.partial(make_model, name, shape, num_outputs)


def _keep_memory() -> None:
    """Make glibc keep large freed blocks: each batch needs them again, and new blocks cost zeroing their pages."""
    trim_threshold, mmap_threshold = -1, -3  # malloc.h
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        for parameter in (trim_threshold, mmap_threshold):
            ctypes.CDLL(None).mallopt(parameter, 1 << 30)


_keep_memory()
app = make_client_app(load_site)
