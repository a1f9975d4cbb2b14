"""The methods by name. Everything else about a method is in its file, which is imported at the method's first use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .extensions import Registry
from .settings import Setting


@dataclass(frozen=True, kw_only=True)
class Method:
    """A method: its two halves and its properties. A method's file ends with it.

    Attributes
    ----------
    title : str
        The method's name as papers write it.
    paper : str
        The publication that introduced it.
    travels : str
        What clients and server exchange in a round.
    stays : str
        What a client keeps from round to round; empty if nothing.
    strategy : type
        The server half, a `PersonalizedStrategy`.
    client : type, optional
        The client half, with functions `train` and `evaluate` of a `Visit`; by default `LocalTraining`, which trains
        the model that it receives.
    settings : tuple of Setting
        The strategy's arguments that are the method's own.
    ignores : tuple of Setting
        Settings of local training that have no effect on the method.
    models_travel : bool
        Whether the server sees clients' models.
    mixed_networks : bool
        Whether clients may have different networks.
    needs_public_set : bool
        Whether the method needs a public set: unlabelled images that all clients have.
    distils : bool
        Whether only the server needs a public set, and the networks: the strategy takes `models`, `public` and
        `device`.
    any_client : bool
        Whether a client that only trains the received model can take part, although our client half does more.
    """

    title: str
    paper: str
    travels: str
    stays: str = ""
    strategy: type[Any]
    client: type[Any] | None = None
    settings: tuple[Setting, ...] = ()
    ignores: tuple[Setting, ...] = ()
    models_travel: bool = True
    mixed_networks: bool = False
    needs_public_set: bool = False
    distils: bool = False
    any_client: bool = False

    @property
    def name(self) -> str:
        """The strategy's name, under which the method is registered."""
        return self.strategy.name

    @property
    def needs_our_client(self) -> bool:
        """True if clients must be made by `make_client_app`.

        An ordinary client, which only trains the model that it receives, would fail, or would take part in a different
        method under this method's name. If no model travels, clients are recognised by their public set instead.
        """
        return self.models_travel and self.client is not None and not self.any_client

    def __contains__(self, name: object) -> bool:
        """Return whether the method has a setting of this name."""
        return any(setting.name == name for setting in self.settings)


MODEL_BOTH_WAYS = "the model, both ways"

REGISTRY: Registry[Method] = Registry(
    "kindred.methods",
    Method,
    {
        "fedamp": "kindred.fedamp:FEDAMP",
        "heurfedamp": "kindred.fedamp:HEURFEDAMP",
        "perfed-ckt": "kindred.perfed_ckt:METHOD",
        "federico": "kindred.federico:METHOD",
        "kindred": "kindred.kindred:METHOD",
        "local": "kindred.baselines.local:METHOD",
        "fedavg": "kindred.baselines.fedavg:FEDAVG",
        "fedprox": "kindred.baselines.fedavg:FEDPROX",
        "fedavg-ft": "kindred.baselines.fedavg:FEDAVG_FT",
        "fedprox-ft": "kindred.baselines.fedavg:FEDPROX_FT",
        "scaffold": "kindred.baselines.scaffold:METHOD",
        "apfl": "kindred.baselines.apfl:METHOD",
        "ditto": "kindred.baselines.ditto:METHOD",
        "per-fedavg": "kindred.baselines.per_fedavg:METHOD",
        "clustered-fl": "kindred.baselines.clustered_fl:METHOD",
        "hypcluster": "kindred.baselines.hypcluster:METHOD",
        "fedfomo": "kindred.baselines.fedfomo:METHOD",
        "fedem": "kindred.baselines.fedem:METHOD",
        "feddf": "kindred.baselines.feddf:METHOD",
        "fedrep": "kindred.baselines.fedrep:METHOD",
        "fedala": "kindred.baselines.fedala:METHOD",
    },
)
