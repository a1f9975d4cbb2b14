"""The methods by name: a line of registration for each. Nothing is imported until it is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

LOCAL_TRAINING = ".client:LocalTraining"


@dataclass(frozen=True)
class Method:
    """A method and where its two halves are.

    Attributes
    ----------
    strategy_path, client_path : str
        `.module:Class` of the server half and of the client half.
    title : str
        The method's name as papers write it.
    paper : str
        Where it comes from.
    travels : str
        What goes over the wire in a round.
    settings : tuple of str
        The strategy's arguments that are the method's own, by name.
    models_travel : bool
        Whether the server sees clients' models, which then must be alike.
    needs_public_set : bool
        Whether clients need unlabelled images that all have.
    """

    strategy_path: str
    title: str
    paper: str
    travels: str
    settings: tuple[str, ...] = ()
    models_travel: bool = True
    needs_public_set: bool = False
    client_path: str = LOCAL_TRAINING

    def strategy(self) -> type[Any]:
        """The server half, a `PersonalizedStrategy`."""
        return _load(self.strategy_path)

    def client(self) -> type[Any]:
        """The client half, with functions `train` and `evaluate` of a `Visit`."""
        return _load(self.client_path)


def _load(path: str) -> type[Any]:
    module, _, name = path.partition(":")
    return getattr(import_module(module, __package__), name)


_FEDAMP = ("sigma", "self_weight", "alpha", "alpha_decay", "alpha_decay_every", "lam", "store")
_MODEL_BOTH_WAYS = "the model, both ways"

REGISTRY: dict[str, Method] = {
    "fedamp": Method(
        ".fedamp:FedAMP", "FedAMP", "Huang et al., AAAI 2021, arXiv:2007.03797", _MODEL_BOTH_WAYS, _FEDAMP
    ),
    "heurfedamp": Method(
        ".fedamp:HeurFedAMP", "HeurFedAMP", "Huang et al., AAAI 2021, arXiv:2007.03797", _MODEL_BOTH_WAYS, _FEDAMP
    ),
    "perfed-ckt": Method(
        ".perfed_ckt:PerFedCKT",
        "PerFed-CKT",
        "Cho et al., 2021, arXiv:2109.08119",
        "class probabilities on public images, both ways",
        ("num_clusters", "distill_weight", "local_steps", "public_batch_size", "warmup_rounds", "min_cluster_size",
         "logits_dtype"),
        models_travel=False,
        needs_public_set=True,
        client_path=".perfed_ckt:CoDistillation",
    ),
    "federico": Method(
        ".federico:FedeRiCo",
        "FedeRiCo",
        "Sui et al., 2022, arXiv:2210.06597",
        "the client's and its neighbours' models, down; their weighted updates, up",
        ("num_neighbours", "epsilon", "beta", "likelihood", "temperature", "m_step", "optimizer", "learning_rate",
         "min_weight", "mixture", "mixture_threshold", "share_absent", "selection", "store"),
        client_path=".federico:Collaboration",
    ),
    "local": Method(
        ".baselines.local:Local", "Local", "training alone", "the client's own model, both ways", ("store",)
    ),
    "fedavg": Method(
        ".baselines.fedavg:FedAvg", "FedAvg", "McMahan et al., AISTATS 2017, arXiv:1602.05629", _MODEL_BOTH_WAYS
    ),
    "fedprox": Method(
        ".baselines.fedavg:FedProx",
        "FedProx",
        "Li et al., MLSys 2020, arXiv:1812.06127",
        _MODEL_BOTH_WAYS,
        ("proximal_mu",),
    ),
    "fedavg-ft": Method(
        ".baselines.fedavg:FedAvgFT",
        "FedAvg-FT",
        "Wang et al., 2019, arXiv:1910.10252",
        _MODEL_BOTH_WAYS,
        ("finetune_epochs",),
    ),
    "fedprox-ft": Method(
        ".baselines.fedavg:FedProxFT",
        "FedProx-FT",
        "Wang et al., 2019, arXiv:1910.10252",
        _MODEL_BOTH_WAYS,
        ("proximal_mu", "finetune_epochs"),
    ),
}
