"""The settings of a run: the one place where each has its name, type, default, range and meaning.

A setting is written in kebab-case everywhere outside Python (`--set local-epochs=1`,
`flwr run . --run-config "local-epochs=1"`, [tool.flwr.app.config] in pyproject.toml) and in
snake_case inside. `python -m kindred.server_app.config` prints the table of docs/configuration.md.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from typing import Any

from kindred import REGISTRY
from kindred.client.models import MODELS, parse_models
from kindred.data import DATASETS, PARTITIONS
from kindred.extensions import Registry


class ConfigError(ValueError):
    """A setting that cannot be used; its text is one line that says what to change."""


def at_least(low: float) -> tuple[str, Callable[[Any], bool]]:
    return f"{low:g} or more", lambda value: value >= low


def above(low: float) -> tuple[str, Callable[[Any], bool]]:
    return f"more than {low:g}", lambda value: value > low


def a_share() -> tuple[str, Callable[[Any], bool]]:
    return "more than 0, at most 1", lambda value: 0 < value <= 1


def within(low: float, high: float) -> tuple[str, Callable[[Any], bool]]:
    return f"{low:g} to {high:g}", lambda value: low <= value <= high


def one_of(*names: str) -> tuple[str, Callable[[Any], bool]]:
    return "one of " + ", ".join(names), lambda value: value in names


def registered(registry: Registry, command: str) -> tuple[str, Callable[[Any], bool], str]:
    return *one_of(*registry), f"a name that `kindred {command}` lists"


ANY_TEXT = ("any text", lambda value: True)
TRUE_OR_FALSE = ("true or false", lambda value: True)


def _is_self_weight(value: Any) -> bool:
    return value in ("uniform", "none") or (isinstance(value, int | float) and 0 <= value <= 1)


def _is_quorum(value: float) -> bool:
    return 0 < value <= 1 or (value > 1 and value == int(value))


def _are_assignments(value: str) -> bool:
    return all(re.fullmatch(r"[\w-]+=\S+", word) for word in value.split())


def _are_models(value: str) -> bool:
    try:
        return bool(parse_models(value))
    except ValueError:
        return False


def setting(default: Any, allowed: tuple[str, Callable[[Any], bool], *tuple[str, ...]], meaning: str) -> Any:
    """A setting: what is allowed, in words, and whether a value is; in other words for the table, if it has others."""
    return field(default=default, metadata={"allowed": allowed, "meaning": meaning})


@dataclass(frozen=True, kw_only=True)
class Config:
    """Every setting of a run, checked.

    Raises
    ------
    ConfigError
        A value of another type than the default's, or out of its range.
    """

    strategy: str = setting("heurfedamp", registered(REGISTRY, "strategies"), "the method")
    seed: int = setting(0, at_least(0), "seed of everything random: data, sampling, models, batches")
    num_rounds: int = setting(15, at_least(1), "rounds of training")
    output_dir: str = setting("results", ANY_TEXT, "folder under which each run makes a folder of its own")
    resume: str = setting(
        "", ANY_TEXT, "folder of a run that was not finished, to go on with; all other settings must be its own"
    )
    checkpoint_every: int = setting(
        1, at_least(0), "rounds after which the state is saved, to go on from when the run is cut short; 0: never"
    )
    keep_checkpoints: int = setting(2, at_least(1), "how many of the last states are kept")

    dataset: str = setting("digits", registered(DATASETS, "datasets"), "the images")
    data_dir: str = setting("", ANY_TEXT, "folder (or .npz file) of the dataset; digits needs none")
    image_shape: str = setting("", ANY_TEXT, "sites: channels x height x width that every site's images have: 1x28x28")
    num_classes: int = setting(0, at_least(0), "sites: how many classes there are")
    class_names: str = setting("", ANY_TEXT, "sites: the classes in order, separated by commas, where data have names")
    input_mean: float = setting(0.5, within(-1e6, 1e6), "sites: taken off the images' numbers (bytes count as 0 to 1)")
    input_deviation: float = setting(0.5, above(0), "sites: what the images' numbers are then divided by")
    partition: str = setting("rotated", registered(PARTITIONS, "datasets"), "how clients' data differ")
    num_clients: int = setting(20, at_least(2), "clients among whom the data are divided")
    num_groups: int = setting(
        4,
        at_least(1),
        "groups of like clients, where the partition has groups and no sizes of its own; "
        "clustered-dirichlet: of classes",
    )
    samples_per_client: int = setting(
        0,
        at_least(0),
        "training images a client (dirichlet, label-groups, clustered-dirichlet: images for training and test, on "
        "average); 0: as the partition's paper says, else 40 for digits and at most 500 elsewhere",
    )
    with_replacement: bool = setting(
        False, TRUE_OR_FALSE, "draw images anew when a class is used up, instead of ending with an error"
    )

    dirichlet_alpha: float = setting(
        0.1,
        above(0),
        "dirichlet, clustered-dirichlet: concentration; the smaller, the more clients' shares of a "
        "class, or cluster, differ",
    )
    public_data: str = setting(
        "auto",
        ANY_TEXT,
        "PerFed-CKT: unlabelled images that all clients have; FedDF: that the server has: a dataset, or an .npz file "
        "with x; auto: images of the dataset that no client has, for cifar10 images of cifar100",
    )
    public_size: int = setting(
        0, at_least(0), "their number; 0: all of a file, else 2000, of the dataset itself a tenth of it at most"
    )

    model: str = setting(
        "auto",
        (
            f"auto, one of {', '.join(MODELS)}, or several separated by commas, smallest first",
            _are_models,
            "auto, a name that `kindred datasets` lists, or several separated by commas, smallest first",
        ),
        "the network; auto: the one for the images' size; of several, where models do not travel, the more images a "
        "client has the likelier it gets a larger one",
    )
    local_epochs: int = setting(5, at_least(0), "epochs of local training a round; 0: local-steps steps instead")
    local_steps: int = setting(
        50,
        at_least(1),
        "steps of local training a round, each on images drawn at random (tau): always with PerFed-CKT, else where "
        "local-epochs is 0",
    )
    batch_size: int = setting(10, at_least(1), "images a step")
    optimizer: str = setting("adam", one_of("adam", "sgd"), "local optimiser")
    learning_rate: float = setting(0.002, above(0), "step size of the local optimiser")
    momentum: float = setting(0.0, within(0, 1), "momentum of sgd")
    precision: str = setting(
        "float32", one_of("float32", "bfloat16"), "arithmetic of local training; bfloat16 by autocast"
    )
    device: str = setting(
        "auto", one_of("auto", "cpu", "cuda"), "where clients train; auto: the GPU where there is one"
    )

    fraction_train: float = setting(1.0, a_share(), "share of the clients that take part in a round, rounded down")
    min_train_clients: int = setting(2, at_least(1), "clients that take part in a round at the least")
    min_available_clients: int = setting(
        2,
        at_least(1),
        "clients that must be able to take part before a round starts, which waits for them; "
        "those that rest for their strikes count",
    )
    wait_timeout: float = setting(300.0, above(0), "seconds to wait for them before the run ends")
    round_timeout: float = setting(3600.0, above(0), "seconds after which a round ends with those who answered")
    quorum: float = setting(
        0.5,
        ("more than 0 and up to 1, or a whole number", _is_quorum),
        "real machines: clients that have answered, as a share of those asked (up to 1) or as a number, after which "
        "the others have only grace seconds more; 1: all",
    )
    grace: float = setting(600.0, at_least(0), "real machines: seconds that a round waits for others after its quorum")
    max_strikes: int = setting(
        3,
        at_least(0),
        "rounds in a row in which a client's reply was refused or did not come, after which it is left "
        "out for as many rounds; 0: never",
    )
    max_update_norm: float = setting(
        0.0,
        at_least(0),
        "L2 norm, over the parameters, above which a client's update is refused; 0: no bound. "
        "PerFed-CKT, whose clients send probabilities, has none",
    )
    max_empty_rounds: int = setting(5, at_least(1), "rounds in a row without a usable answer after which the run ends")

    store: str = setting(
        "memory",
        one_of("memory", "disk"),
        "FedAMP, HeurFedAMP, Local, FedeRiCo, FedFomo: where the server keeps all clients' models; disk: in a file in "
        "$XDG_STATE_HOME/kindred (~/.local/state/kindred), with memory for the clients of a round alone",
    )

    sigma: float = setting(100.0, above(0), "FedAMP: scale of the squared distance; HeurFedAMP: scale of the cosine")
    self_weight: float | str = setting(
        0.2,
        ("0 to 1, uniform (1 / clients online), or none (FedAMP: Eq. 5 as written)", _is_self_weight),
        "FedAMP, HeurFedAMP: share of a client's own model in its cloud model",
    )
    alpha: float = setting(
        1e4, above(0), "FedAMP, HeurFedAMP: step size of the collaboration; the proximal weight is lam / alpha"
    )
    alpha_decay: float = setting(0.1, a_share(), "factor on alpha every alpha-decay-every rounds")
    alpha_decay_every: int = setting(30, at_least(1), "rounds between two decays of alpha")
    lam: float = setting(1.0, at_least(0), "FedAMP, HeurFedAMP: weight of the collaboration term (lambda)")
    proximal_mu: float = setting(
        0.01,
        at_least(0),
        "FedProx, FedProx-FT: weight mu of the proximal term, mu/2 times the squared distance from the global model",
    )
    num_clusters: int = setting(
        3,
        at_least(1),
        "PerFed-CKT: clusters of clients (c); 1: all learn from the mean of all; HypCluster: models, "
        "of which each client takes the best",
    )
    distill_weight: float = setting(
        2.0, at_least(0), "PerFed-CKT: weight of the squared distance from the centroid's probabilities (lambda)"
    )
    public_batch_size: int = setting(128, at_least(1), "PerFed-CKT, FedDF: public images a step (b')")
    warmup_rounds: int = setting(
        0, at_least(0), "PerFed-CKT: rounds of training alone first; 0: a round in which untrained models speak"
    )
    min_cluster_size: int = setting(
        1, at_least(1), "PerFed-CKT: clients that a cluster must have; smaller ones are merged into the nearest"
    )
    logits_dtype: str = setting("float32", one_of("float32", "float16"), "PerFed-CKT: in which probabilities travel")
    num_neighbours: int = setting(
        3, at_least(0), "FedeRiCo, FedFomo: models of others that a client gets in a round (M); 0 is local training"
    )
    epsilon: float = setting(
        0.3, within(0, 1), "FedeRiCo, FedFomo: probability of a random neighbour instead of the best"
    )
    beta: float = setting(0.6, a_share(), "FedeRiCo: momentum of the moving average of losses; 1: the last alone")
    likelihood: str = setting(
        "mean",
        one_of("mean", "sum"),
        "FedeRiCo: the loss, over a client's samples, that weights go by; the paper's is the sum",
    )
    temperature: float = setting(1.0, at_least(1e-9), "FedeRiCo: weights are a softmax of the losses divided by it")
    m_step: str = setting(
        "epochs",
        one_of("epochs", "steps", "gradient"),
        "FedeRiCo: work on each model in a round: local-epochs epochs (where that is 0, local-steps steps), "
        "local-steps steps, or one gradient over all data, by which the server moves the model with optimizer",
    )
    min_weight: float = setting(
        0.001, within(0, 1), "FedeRiCo: updates with a smaller weight are neither computed nor sent"
    )
    mixture: str = setting(
        "probabilities", one_of("probabilities", "logits"), "FedeRiCo: what a client's prediction mixes"
    )
    mixture_threshold: float = setting(
        0.01, within(0, 1), "FedeRiCo: models with a smaller weight have no part in the prediction"
    )
    share_absent: bool = setting(
        True, TRUE_OR_FALSE, "FedeRiCo: whether models of clients that are not connected stay available to others"
    )
    selection: str = setting(
        "server",
        one_of("server", "relay"),
        "FedeRiCo: who holds the losses and chooses neighbours: the server, or each client, with the server as a relay",
    )
    finetune_epochs: int = setting(
        1, at_least(0), "FedAvg-FT, FedProx-FT: epochs by which a client tunes the global model for itself"
    )
    sgd_learning_rate: float = setting(
        0.05,
        above(0),
        "SCAFFOLD, APFL, Per-FedAvg: step size of the plain SGD that they are made of, whatever "
        "optimizer and learning-rate say",
    )
    server_learning_rate: float = setting(1.0, above(0), "SCAFFOLD: step size of the server (eta_g)")
    mixing_weight: float = setting(
        0.5, within(0, 1), "APFL: share of the client's own model in its personal one (alpha), at first"
    )
    adapt_mixing: bool = setting(True, TRUE_OR_FALSE, "APFL: whether clients learn that share")
    ditto_lambda: float = setting(
        1.0, at_least(0), "Ditto: weight of half the squared distance of the personal model from the global one"
    )
    adapt_learning_rate: float = setting(
        0.01, above(0), "Per-FedAvg: step size by which a client adapts the global model (alpha)"
    )
    eps1: float = setting(
        0.4, at_least(0), "Clustered FL: a cluster may be split once the norm of its mean update is below it"
    )
    eps2: float = setting(0.95, at_least(0), "Clustered FL: and the largest norm of an update in it is above this")
    validation_share: float = setting(
        0.2,
        ("more than 0, less than 1", lambda value: 0 < value < 1),
        "FedFomo: share of a client's training images by which it weighs models and does not train",
    )
    num_components: int = setting(3, at_least(1), "FedEM: models that each client mixes (M)")
    distill_steps: int = setting(
        200, at_least(0), "FedDF: steps by which the server distils the clients' models into one a round; 0 is FedAvg"
    )
    distill_learning_rate: float = setting(0.001, above(0), "FedDF: step size of Adam in them")
    head_layers: int = setting(
        1, at_least(1), "FedRep: last layers of the network, which stay at the client; FedALA: those that it mixes"
    )
    head_epochs: int = setting(5, at_least(0), "FedRep: epochs on the last layers, before local-epochs on the others")
    ala_share: float = setting(0.8, a_share(), "FedALA: share of the training images by which weights are learned (s)")
    ala_learning_rate: float = setting(1.0, above(0), "FedALA: step size of these weights (eta)")

    method_settings: str = setting(
        "",
        ("key=value, separated by blanks", _are_assignments),
        "settings of added methods that are not in this table; `--set key=value` puts them here",
    )

    def __post_init__(self) -> None:
        for spec in fields(self):
            _check(spec, getattr(self, spec.name))
        given = assigned(self.method_settings).keys()
        if given and (stray := given - _added_settings()):  # which imports what is installed
            known = ", ".join(_added_settings()) or "none"
            raise ConfigError(f"method-settings has {min(stray)}, allowed: settings of added methods, {known}")

    @classmethod
    def from_run_config(cls, run_config: Mapping[str, Any]) -> Config:
        """Read a run config with kebab-case keys; keys that are left out have their default.

        Settings of added methods may be among the keys: Flower, which knows the others alone, gets them in
        `method_settings`.

        Raises
        ------
        ConfigError
            An unknown key, a wrong type or a value out of range.
        """
        known = {kebab(spec.name): spec for spec in fields(cls)}
        values = {known[key].name: _as_declared(known[key], value) for key, value in run_config.items() if key in known}
        if added := {key: value for key, value in run_config.items() if key not in known}:
            if stray := added.keys() - _added_settings():
                raise ConfigError(f"unknown setting {min(stray)}; known: {', '.join((*known, *_added_settings()))}")
            both = assigned(values.get("method_settings", "")) | added
            values["method_settings"] = " ".join(f"{key}={both[key]}" for key in sorted(both))
        return cls(**values)

    def run_config(self) -> dict[str, Any]:
        """The settings as a Flower run config, kebab-case."""
        return {kebab(spec.name): getattr(self, spec.name) for spec in fields(self)}

    def settings(self) -> dict[str, Any]:
        """All settings by their names in kebab-case, those of added methods, as texts, among them."""
        return self.run_config() | assigned(self.method_settings)

    def absolute(self) -> Config:
        """The same, with paths that do not depend on the working directory."""

        def whole(path: str) -> str:
            return os.path.abspath(os.path.expanduser(path)) if path else ""

        return replace(
            self,
            data_dir=whole(self.data_dir),
            public_data=self.public_data if self.public_data in ("auto", *DATASETS) else whole(self.public_data),
            output_dir=whole(self.output_dir or "."),
        )


def kebab(name: str) -> str:
    return name.replace("_", "-")


def assigned(text: str) -> dict[str, str]:
    """Settings written as `method_settings` are."""
    return {key: value for key, _, value in (word.partition("=") for word in text.split())}


def _added_settings() -> list[str]:
    """The settings of all methods that are no fields of Config."""
    fields_of_config = {spec.name for spec in fields(Config)}
    names = (name for method in REGISTRY.values() for name in method.settings)
    return [kebab(name) for name in dict.fromkeys(names) if name not in fields_of_config]


def parse(text: str, kind: str) -> bool | int | float | str:
    """Read a value as the kind that its setting has; text that is none of the kind stays text."""
    if kind == "bool":
        return {"true": True, "false": False}.get(text.lower(), text)
    for read in {"int": (int,), "float": (float,), "float | str": (float,)}.get(kind, ()):
        try:
            return read(text)
        except ValueError:
            pass
    return text


def _as_declared(spec: Field, value: Any) -> Any:
    """Whole numbers stand for floats too: 1 is 1.0 where a float is asked for."""
    if "float" in str(spec.type) and type(value) is int:
        return float(value)
    return value


def _check(spec: Field, value: Any) -> None:
    allowed, holds, *_ = spec.metadata["allowed"]
    types = {"int": (int,), "float": (float,), "str": (str,), "bool": (bool,), "float | str": (float, str)}[
        str(spec.type)
    ]
    if type(value) not in types or (isinstance(value, float) and not math.isfinite(value)) or not holds(value):
        raise ConfigError(f"{kebab(spec.name)} is {value!r}, allowed: {allowed} ({spec.type})")


def table() -> str:
    """The settings as a Markdown table, a line each."""
    lines = ["| setting | type | default | allowed | meaning |", "|---|---|---|---|---|"]
    for spec in fields(Config):
        kind = str(spec.type).replace(" | ", " or ")
        default = json.dumps(spec.default)
        allowed, _, *in_the_table = spec.metadata["allowed"]
        meaning = spec.metadata["meaning"]
        lines.append(f"| `{kebab(spec.name)}` | {kind} | {default} | {(*in_the_table, allowed)[0]} | {meaning} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
