"""Personalised federated learning methods as Flower strategies.

Use a strategy in a ServerApp, in place of one of Flower's own:

    from kindred import HeurFedAMP

    strategy = HeurFedAMP(sigma=100, self_weight=0.2)
    result = strategy.start(grid, initial_arrays, num_rounds=10)
    models = strategy.client_models()  # one for each client

Run whole federations on this machine, as the commands `kindred run` and `kindred compare` do:

    import kindred

    result = kindred.run(method="heurfedamp", data="digits", clients=20)
    comparison = kindred.compare(methods=["heurfedamp", "fedavg", "local"], data="digits", seeds=[0, 1])

A name is imported when it is first used. The server half of a method therefore does not wait for PyTorch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .registry import REGISTRY, Method
from .versions import VERSION as __version__, check_flower

if TYPE_CHECKING:  # the names in `_HOMES`, for type checkers
    from .baselines.apfl import APFL as APFL
    from .baselines.clustered_fl import ClusteredFL as ClusteredFL
    from .baselines.ditto import Ditto as Ditto
    from .baselines.fedala import FedALA as FedALA
    from .baselines.fedavg import FedAvg as FedAvg, FedAvgFT as FedAvgFT, FedProx as FedProx, FedProxFT as FedProxFT
    from .baselines.feddf import FedDF as FedDF
    from .baselines.fedem import FedEM as FedEM
    from .baselines.fedfomo import FedFomo as FedFomo
    from .baselines.fedrep import FedRep as FedRep
    from .baselines.hypcluster import HypCluster as HypCluster
    from .baselines.local import Local as Local
    from .baselines.per_fedavg import PerFedAvg as PerFedAvg
    from .baselines.scaffold import SCAFFOLD as SCAFFOLD
    from .client.app import make_client_app as make_client_app
    from .client.models import MODELS as MODELS, make_model as make_model
    from .client.site import Site as Site
    from .engine.checkpoint import Checkpoints as Checkpoints, NotResumable as NotResumable
    from .engine.history import History as History
    from .engine.inline import InlineGrid as InlineGrid
    from .engine.roster import TooFewClients as TooFewClients
    from .engine.strategy import PersonalizedStrategy as PersonalizedStrategy
    from .engine.transport import WorkerDied as WorkerDied
    from .fedamp import (
        FedAMP as FedAMP,
        HeurFedAMP as HeurFedAMP,
        attention_weights as attention_weights,
        cosine_weights as cosine_weights,
    )
    from .federico import FedeRiCo as FedeRiCo, collaborator_weights as collaborator_weights
    from .kindred import Kindred as Kindred
    from .parts.mixture import Mixture as Mixture
    from .parts.neighbours import choose_neighbours as choose_neighbours
    from .perfed_ckt import (
        PerFedCKT as PerFedCKT,
        cluster_logits as cluster_logits,
        nearest_centroid as nearest_centroid,
    )

_HOMES = {
    "FedAMP": "fedamp",
    "HeurFedAMP": "fedamp",
    "attention_weights": "fedamp",
    "cosine_weights": "fedamp",
    "PerFedCKT": "perfed_ckt",
    "cluster_logits": "perfed_ckt",
    "nearest_centroid": "perfed_ckt",
    "FedeRiCo": "federico",
    "choose_neighbours": "parts.neighbours",
    "collaborator_weights": "federico",
    "Mixture": "parts.mixture",
    "Kindred": "kindred",
    "Local": "baselines.local",
    "FedAvg": "baselines.fedavg",
    "FedProx": "baselines.fedavg",
    "FedAvgFT": "baselines.fedavg",
    "FedProxFT": "baselines.fedavg",
    "SCAFFOLD": "baselines.scaffold",
    "APFL": "baselines.apfl",
    "Ditto": "baselines.ditto",
    "PerFedAvg": "baselines.per_fedavg",
    "FedRep": "baselines.fedrep",
    "FedALA": "baselines.fedala",
    "HypCluster": "baselines.hypcluster",
    "FedFomo": "baselines.fedfomo",
    "FedEM": "baselines.fedem",
    "ClusteredFL": "baselines.clustered_fl",
    "FedDF": "baselines.feddf",
    "PersonalizedStrategy": "engine.strategy",
    "TooFewClients": "engine.roster",
    "WorkerDied": "engine.transport",
    "Checkpoints": "engine.checkpoint",
    "NotResumable": "engine.checkpoint",
    "History": "engine.history",
    "Site": "client.site",
    "make_client_app": "client.app",
    "InlineGrid": "engine.inline",
    "MODELS": "client.models",
    "make_model": "client.models",
    "run": "server_app.api",
    "compare": "server_app.api",
}

__all__ = ["REGISTRY", "Method", "__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    check_flower()
    value = globals()[name] = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    return value
