"""The methods by name: an entry for each. Nothing is imported until it is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

from .extensions import Registry

LOCAL_TRAINING = ".client.local_training:LocalTraining"


@dataclass(frozen=True)
class Method:
    """A method and where its two halves are.

    Attributes
    ----------
    strategy_path, client_path : str
        `.module:Class`, or elsewhere `package.module:Class`, of the server half and of the client half.
    title : str
        The method's name as papers write it.
    paper : str
        Where it comes from.
    travels : str
        What goes over the wire in a round.
    stays : str
        What a client keeps from round to round, if anything.
    settings : tuple of str
        The strategy's arguments that are the method's own, by name. Each may be set by its name; one that the
        application knows nothing else of has the type of its default.
    models_travel : bool
        Whether the server sees clients' models.
    mixed_networks : bool
        Whether clients may have networks that differ.
    needs_public_set : bool
        Whether unlabelled images are needed that all have.
    distils : bool
        Whether the server alone needs them, and the networks: its half takes `models`, `public` and `device`.
    any_client : bool
        Whether a client that only trains the model that it is sent can take part, though our half does more.
    """

    strategy_path: str
    title: str
    paper: str
    travels: str
    stays: str = ""
    settings: tuple[str, ...] = ()
    models_travel: bool = True
    mixed_networks: bool = False
    needs_public_set: bool = False
    distils: bool = False
    any_client: bool = False
    client_path: str = LOCAL_TRAINING

    @property
    def needs_our_client(self) -> bool:
        """Whether clients must be those of `make_client_app`.

        An ordinary one, which trains the model that it is sent, would fail, or take part in another method under this
        one's name. Where no model travels clients are known by their public set.
        """
        return self.models_travel and self.client_path != LOCAL_TRAINING and not self.any_client

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

REGISTRY: Registry[Method] = Registry(
    "kindred.methods",
    Method,
    {
        "fedamp": Method(
            ".fedamp:FedAMP",
            "FedAMP",
            "Huang et al., AAAI 2021, arXiv:2007.03797",
            _MODEL_BOTH_WAYS,
            settings=_FEDAMP,
        ),
        "heurfedamp": Method(
            ".fedamp:HeurFedAMP",
            "HeurFedAMP",
            "Huang et al., AAAI 2021, arXiv:2007.03797",
            _MODEL_BOTH_WAYS,
            settings=_FEDAMP,
        ),
        "perfed-ckt": Method(
            ".perfed_ckt:PerFedCKT",
            "PerFed-CKT",
            "Cho et al., 2021, arXiv:2109.08119",
            "class probabilities on public images, both ways",
            "its model",
            settings=(
                "num_clusters",
                "distill_weight",
                "local_steps",
                "public_batch_size",
                "warmup_rounds",
                "min_cluster_size",
                "logits_dtype",
            ),
            models_travel=False,
            mixed_networks=True,
            needs_public_set=True,
            client_path=".perfed_ckt:PerFedCKTClient",
        ),
        "federico": Method(
            ".federico:FedeRiCo",
            "FedeRiCo",
            "Sui et al., 2022, arXiv:2210.06597",
            "the client's and its neighbours' models, down; their weighted updates, up",
            "with relay, its losses",
            settings=(
                "num_neighbours",
                "epsilon",
                "beta",
                "likelihood",
                "temperature",
                "m_step",
                "optimizer",
                "learning_rate",
                "min_weight",
                "mixture",
                "mixture_threshold",
                "share_absent",
                "selection",
                "store",
            ),
            client_path=".federico:FedeRiCoClient",
        ),
        "kindred": Method(
            ".kindred:Kindred",
            "Kindred",
            "of this library: docs/kindred.md",
            "the model, both ways; in every second round two more to evaluate, down",
            "its last model",
            settings=("store",),
            any_client=True,
            client_path=".kindred:KindredClient",
        ),
        "local": Method(
            ".baselines.local:Local",
            "Local",
            "training alone",
            "the client's own model, both ways",
            settings=("store",),
        ),
        "fedavg": Method(
            ".baselines.fedavg:FedAvg",
            "FedAvg",
            "McMahan et al., AISTATS 2017, arXiv:1602.05629",
            _MODEL_BOTH_WAYS,
        ),
        "fedprox": Method(
            ".baselines.fedavg:FedProx",
            "FedProx",
            "Li et al., MLSys 2020, arXiv:1812.06127",
            _MODEL_BOTH_WAYS,
            settings=("proximal_mu",),
        ),
        "fedavg-ft": Method(
            ".baselines.fedavg:FedAvgFT",
            "FedAvg-FT",
            "Wang et al., 2019, arXiv:1910.10252",
            _MODEL_BOTH_WAYS,
            settings=("finetune_epochs",),
        ),
        "fedprox-ft": Method(
            ".baselines.fedavg:FedProxFT",
            "FedProx-FT",
            "Wang et al., 2019, arXiv:1910.10252",
            _MODEL_BOTH_WAYS,
            settings=("proximal_mu", "finetune_epochs"),
        ),
        "scaffold": Method(
            ".baselines.scaffold:SCAFFOLD",
            "SCAFFOLD",
            "Karimireddy et al., ICML 2020, arXiv:1910.06378",
            "the model and the control variate, both ways",
            "its control variate",
            settings=("sgd_learning_rate", "server_learning_rate"),
            client_path=".baselines.scaffold:SCAFFOLDClient",
        ),
        "apfl": Method(
            ".baselines.apfl:APFL",
            "APFL",
            "Deng et al., 2020, arXiv:2003.13461",
            _MODEL_BOTH_WAYS,
            "its local model, its share",
            settings=("sgd_learning_rate", "mixing_weight", "adapt_mixing"),
            client_path=".baselines.apfl:APFLClient",
        ),
        "ditto": Method(
            ".baselines.ditto:Ditto",
            "Ditto",
            "Li et al., ICML 2021, arXiv:2012.04221",
            _MODEL_BOTH_WAYS,
            "its personal model",
            settings=("ditto_lambda",),
            client_path=".baselines.ditto:DittoClient",
        ),
        "per-fedavg": Method(
            ".baselines.per_fedavg:PerFedAvg",
            "Per-FedAvg",
            "Fallah et al., NeurIPS 2020, arXiv:2002.07948",
            _MODEL_BOTH_WAYS,
            settings=("sgd_learning_rate", "adapt_learning_rate"),
            client_path=".baselines.per_fedavg:PerFedAvgClient",
        ),
        "clustered-fl": Method(
            ".baselines.clustered_fl:ClusteredFL",
            "Clustered FL",
            "Sattler et al., IEEE TNNLS 2021, arXiv:1910.01991",
            _MODEL_BOTH_WAYS,
            settings=("eps1", "eps2"),
        ),
        "hypcluster": Method(
            ".baselines.hypcluster:HypCluster",
            "HypCluster (IFCA)",
            "Mansour et al., 2020, arXiv:2002.10619; Ghosh et al., NeurIPS 2020, arXiv:2006.04088",
            "all clusters' models, down; the trained one, up",
            settings=("num_clusters",),
            client_path=".baselines.hypcluster:HypClusterClient",
        ),
        "fedfomo": Method(
            ".baselines.fedfomo:FedFomo",
            "FedFomo",
            "Zhang et al., ICLR 2021, arXiv:2012.08565",
            "the client's and others' models, down; its model and their weights, up",
            "the model that it last trained from",
            settings=("num_neighbours", "epsilon", "validation_share", "store"),
            client_path=".baselines.fedfomo:FedFomoClient",
        ),
        "fedem": Method(
            ".baselines.fedem:FedEM",
            "FedEM",
            "Marfoq et al., NeurIPS 2021, arXiv:2108.10252",
            "all components, both ways",
            "its shares of the components",
            settings=("num_components",),
            client_path=".baselines.fedem:FedEMClient",
        ),
        "feddf": Method(
            ".baselines.feddf:FedDF",
            "FedDF",
            "Lin et al., NeurIPS 2020, arXiv:2006.07242",
            _MODEL_BOTH_WAYS,
            settings=("distill_steps", "distill_learning_rate", "public_batch_size"),
            mixed_networks=True,
            needs_public_set=True,
            distils=True,
        ),
        "fedrep": Method(
            ".baselines.fedrep:FedRep",
            "FedRep",
            "Collins et al., ICML 2021, arXiv:2102.07078",
            "the body of the model, both ways",
            "the head of its model",
            settings=("head_layers", "head_epochs"),
            client_path=".baselines.fedrep:FedRepClient",
        ),
        "fedala": Method(
            ".baselines.fedala:FedALA",
            "FedALA",
            "Zhang et al., AAAI 2023, arXiv:2212.01197",
            _MODEL_BOTH_WAYS,
            "its model, the weights of its last layers",
            settings=("head_layers", "ala_share", "ala_learning_rate"),
            client_path=".baselines.fedala:FedALAClient",
        ),
    },
)
