"""The settings of a run: its own are written here, those of a method in the method's file.

A setting is written in kebab-case everywhere outside Python (`--set local-epochs=1`,
`flwr run . --run-config "local-epochs=1"`, [tool.flwr.app.config] in pyproject.toml) and in
snake_case inside. settings_tables.py writes the settings into the documents and pyproject.toml.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from kindred import REGISTRY
from kindred.client.models import MODELS, parse_models
from kindred.data import DATASETS, PARTITIONS
from kindred.data.inputs import KINDS
from kindred.data.loading import AUTO, NATURAL_SHARE
from kindred.extensions import Registry
from kindred.metrics import METRICS
from kindred.objectives import MOST_OUTPUTS, OBJECTIVES
from kindred.parts.aggregation import AGGREGATION
from kindred.settings import (
    A_SHARE,
    ANY_TEXT,
    BATCH_SIZE,
    DEVICE,
    GRACE,
    LABEL_SMOOTHING,
    LEARNING_RATE,
    LOCAL_EPOCHS,
    LOCAL_STEPS,
    MAX_CLIENT_SHARE,
    MAX_EMPTY_ROUNDS,
    MAX_LOCAL_EPOCHS,
    MAX_STRIKES,
    MAX_UPDATE_NORM,
    MOMENTUM,
    OPTIMIZER,
    PRECISION,
    QUORUM,
    SAMPLING,
    SEED,
    SHADOW_LOCAL,
    STOP_AFTER,
    TRAINING,
    TRUE_OR_FALSE,
    WAIT_TIMEOUT,
    WEIGHT_DECAY,
    Range,
    Setting,
    above,
    between,
    kebab,
    meant_by,
    one_of,
    within,
)

OWN_DEFAULT = "default"
"""Default of a setting that several methods have with different defaults: each method uses its own."""


class ConfigError(ValueError):
    """Error about a setting that cannot be used; its text is one line that says what to change."""


def registered(registry: Registry[Any], command: str) -> Range:
    """Return the range of the names in a registry, which `kindred COMMAND` lists."""
    names = one_of(*registry)
    return Range(f"one of {names.words}", names.holds, f"a name that `kindred {command}` lists")


def _are_assignments(value: str) -> bool:
    return all(re.fullmatch(r"[\w-]+=\S+", word) for word in value.split())


def _are_models(value: str) -> bool:
    try:
        return bool(parse_models(value))
    except ValueError:
        return False


def setting(default: Any, allowed: Range, meaning: str) -> Any:
    """Return a field for a setting of the run itself; the setting has the field's name."""
    return of(Setting("", default, allowed, meaning))


def of(known: Setting, methods: Mapping[Setting, list[str]] | None = None) -> Any:
    """Return a field for a setting that is written elsewhere; for methods' settings with these methods' titles."""
    return field(default=known.default, metadata={"setting": known, "methods": methods or {known: []}})


def with_settings_of_methods(cls: type) -> type:
    """Add a field for each name among our own methods' settings, and put it before `method_settings`."""
    found: dict[str, dict[Setting, list[str]]] = {}
    for method in (REGISTRY[name] for name in REGISTRY.own):
        for each in method.settings:
            if each.name not in cls.__annotations__:
                found.setdefault(each.name, {}).setdefault(each, []).append(method.title)
    last = cls.__annotations__.pop("method_settings")
    for name, methods in found.items():
        known = shared(methods)
        cls.__annotations__[name] = known.kind
        setattr(cls, name, of(known, methods))
    cls.__annotations__["method_settings"] = last
    return cls


def shared(methods: Mapping[Setting, Sequence[str]]) -> Setting:
    """Return one setting for all of one name: it accepts what any method accepts; the method checks again.

    `methods` has the titles of the methods that have each.
    """
    settings = list(methods)
    if len(settings) == 1:
        return settings[0]
    defaults = {json.dumps(each.default) for each in settings}
    kinds = dict.fromkeys(kind for each in settings for kind in each.kind.split(" | "))
    titles: dict[str, list[str]] = {}
    for each, names in methods.items():
        titles.setdefault(each.allowed.words, []).extend(names)
    ranges = [f"{words} ({', '.join(names)})" for words, names in titles.items()] if len(titles) > 1 else [*titles]
    if len(defaults) > 1:
        kinds["str"] = None
        ranges.append(f"{OWN_DEFAULT}, which is the method's own")
    return Setting(
        settings[0].name,
        settings[0].default if len(defaults) == 1 else OWN_DEFAULT,
        Range("; ".join(ranges), lambda value: value == OWN_DEFAULT or any(_takes(each, value) for each in settings)),
        "",
        kind=" | ".join(kinds),
    )


def _takes(one: Setting, value: Any) -> bool:
    try:
        one.check(value)
    except ValueError:
        return False
    return True


@dataclass(frozen=True, kw_only=True)
@with_settings_of_methods
class Config:
    """Every setting of a run, checked.

    Raises
    ------
    ConfigError
        A value has another type than the default, or is out of its range.
    """

    strategy: str = setting("heurfedamp", registered(REGISTRY, "strategies"), "the method")
    seed: int = of(SEED)
    num_rounds: int = setting(15, within(1, 10**6), "rounds of training")
    output_dir: str = setting("results", ANY_TEXT, "folder in which each run makes its own folder")
    resume: str = setting(
        "", ANY_TEXT, "folder of an unfinished run to continue; all other settings must be those of that run"
    )
    checkpoint_every: int = setting(
        1, within(0, 10**6), "rounds between checkpoints, from which an interrupted run is resumed; 0: none"
    )
    keep_checkpoints: int = setting(2, within(1, 10**6), "number of the latest checkpoints that are kept")

    dataset: str = setting("digits", registered(DATASETS, "datasets"), "the dataset")
    data_dir: str = setting("", ANY_TEXT, "folder or file of the dataset; digits needs none")
    target: str = setting(
        "",
        ANY_TEXT,
        "csv: what is predicted: a column; columns of labels, separated by commas; or a comparison such as num>0",
    )
    client: str = setting("", ANY_TEXT, "csv: column that says whose a row is")
    time: str = setting(
        "", ANY_TEXT, "csv: column of numbers that says when a row was; a client's later rows are for test"
    )
    task: str = setting(
        "auto", Range(f"auto, {', '.join(OBJECTIVES)}", lambda value: value in ("auto", *OBJECTIVES)),
        "csv, npz: what is predicted; auto: what fits the target",
    )  # fmt: skip
    schema: str = setting(
        "", ANY_TEXT, "csv, sites: a schema.json of `kindred schema`, which decides columns, categories and target"
    )
    inputs: str = setting(
        "auto", one_of("auto", *KINDS),
        "npz: what x holds; auto: bytes are images, integers (n, length) tokens, other numbers (n, features) a table, "
        "(n, channels, time) signals, and (n, height, width, channels) images",
    )  # fmt: skip
    class_weights: str = setting(
        "",
        ANY_TEXT,
        "weights of the classes, or of labels that are true, in the loss: a number for each, separated by commas; "
        "balanced: all count the same; empty: none",
    )
    image_shape: str = setting("", ANY_TEXT, "sites: channels x height x width of every site's images: 1x28x28")
    num_classes: int = setting(0, within(0, MOST_OUTPUTS), "sites: number of classes")
    class_names: str = setting("", ANY_TEXT, "sites: class names in order, separated by commas, if data have names")
    input_mean: float = setting(
        0.5, within(-1e6, 1e6), "sites: subtracted from all input values (bytes count as 0 to 1)"
    )
    input_deviation: float = setting(0.5, above(0, 10**6), "sites: divisor of all input values after that")
    partition: str = setting("rotated", registered(PARTITIONS, "datasets"), "how clients' data differ")
    num_clients: int = setting(20, within(2, 10**6), "number of clients among which the data are divided")
    num_groups: int = setting(
        4,
        within(1, 10**6),
        "groups of similar clients, if the partition has groups without fixed sizes; "
        "clustered-dirichlet: groups of classes",
    )
    samples_per_client: int = setting(
        0,
        within(0, 10**9),
        "training samples per client (by-client: at most; dirichlet, dirichlet-clients, label-groups, "
        "clustered-dirichlet: mean number of samples for training and test together); 0: all with by-client, elsewhere "
        "as in the partition's paper, else 40 for digits and at most 500",
    )
    with_replacement: bool = setting(
        False, TRUE_OR_FALSE, "draw samples of a class again when all are used, instead of ending with an error"
    )

    dirichlet_alpha: float = setting(
        0.1,
        above(0, 10**6),
        "dirichlet, clustered-dirichlet: concentration; the smaller, the more the clients' shares of a class, or "
        "cluster, differ; dirichlet-clients: the fewer classes a client has",
    )
    min_samples: int = setting(
        10, within(2, 10**6), "by-client: least number of samples, for training and test together, of a client"
    )
    test_share: float = setting(
        0.3,
        between(0, 1),
        "fraction of the samples that is for test, of each client with by-client, if data do not say",
    )
    validation_share: float | str = of(
        Setting(
            "validation_share",
            AUTO,
            Range(
                f"{AUTO}; 0 or more, less than 1",
                lambda value: value == AUTO or (not isinstance(value, str) and 0 <= value < 1),
            ),
            "fraction of each client's training samples that is held out for validation, which selects the client's "
            f"model; {AUTO}: {NATURAL_SHARE} with by-client and at real sites, else 0; partitions that have validation "
            "samples keep these",
            kind="float | str",
        )
    )
    held_out_clients: int = setting(
        0,
        within(0, 10**6),
        "number of clients, drawn by seed, that take no part in a simulation; after the last round each is served with "
        "0, 5, 20 and all of its labelled training samples",
    )
    public_data: str = setting(
        "auto",
        ANY_TEXT,
        "unlabelled samples that all clients have (PerFed-CKT), or the server (FedDF): a dataset, or an .npz file "
        "with x; auto: samples of the dataset that no client has, for cifar10 images of cifar100",
    )
    public_size: int = setting(
        0,
        within(0, 10**6),
        "samples of public-data; 0: all of a file, else 2000, of the run's own dataset at most a tenth",
    )

    metric: str = setting(
        "auto",
        one_of("auto", *METRICS),
        "metric by which results are shown and compared, of those that the clients report; auto: accuracy, for numbers "
        "rmse",
    )
    model: str = setting(
        "auto",
        Range(
            f"auto, one of {', '.join(MODELS)}, or several separated by commas, smallest first",
            _are_models,
            "auto, a name that `kindred datasets` lists, or several separated by commas, smallest first",
        ),
        "the network; auto: the one for the inputs' kind and size; several (if models do not travel): the more samples "
        "a client has, the more likely it gets a larger one",
    )
    local_epochs: int = of(LOCAL_EPOCHS)
    max_local_epochs: int = of(MAX_LOCAL_EPOCHS)
    local_steps: int = of(LOCAL_STEPS)
    batch_size: int = of(BATCH_SIZE)
    optimizer: str = of(OPTIMIZER)
    learning_rate: float = of(LEARNING_RATE)
    momentum: float = of(MOMENTUM)
    weight_decay: float = of(WEIGHT_DECAY)
    label_smoothing: float = of(LABEL_SMOOTHING)
    precision: str = of(PRECISION)
    shadow_local: bool = of(SHADOW_LOCAL)
    device: str = of(DEVICE)

    fraction_train: float = setting(
        1.0,
        A_SHARE,
        "fraction of the clients that take part in a round, rounded down; clients that cannot take part, such as those "
        "without samples, count but are not drawn",
    )
    sampling: str = of(SAMPLING)
    min_train_clients: int = setting(2, within(1, 10**6), "least number of clients that take part in a round")
    min_available_clients: int = setting(
        2,
        within(1, 10**6),
        "clients that must be able to take part; a round waits for them before it starts; "
        "clients that pause because of their strikes count",
    )
    wait_timeout: float = of(WAIT_TIMEOUT)
    round_timeout: float = setting(3600.0, above(0, 10**7), "seconds after which a round ends with the replies so far")
    quorum: float = of(QUORUM)
    grace: float = of(GRACE)
    max_strikes: int = of(MAX_STRIKES)
    max_client_share: float = of(MAX_CLIENT_SHARE)
    max_update_norm: float | str = of(MAX_UPDATE_NORM)
    max_empty_rounds: int = of(MAX_EMPTY_ROUNDS)
    stop_after: int = of(STOP_AFTER)

    method_settings: str = setting(
        "",
        Range("key=value, separated by blanks", _are_assignments),
        "settings of added methods, which are not in this table; `--set key=value` puts them here",
    )

    @property
    def participants(self) -> int:
        """Number of clients that take part in a simulation."""
        return self.num_clients - self.held_out_clients

    if TYPE_CHECKING:  # the settings of methods

        def __getattr__(self, name: str) -> Any: ...

    def __post_init__(self) -> None:
        for each in fields(self):
            known = each.metadata["setting"]
            try:
                object.__setattr__(self, each.name, known.check(getattr(self, each.name), kebab(each.name)))
            except ValueError as error:
                raise ConfigError(f"{error} ({known.kind})") from None
        for key in assigned(self.method_settings):
            if key not in (added := added_settings()):  # imports the installed extensions
                known = ", ".join(added) or "none"
                raise ConfigError(f"method-settings has {key}, allowed: settings of added methods, {known}")

    @classmethod
    def from_run_config(cls, run_config: Mapping[str, Any]) -> Config:
        """Return the settings of a run config with kebab-case keys; missing keys have their default.

        The keys may include settings of added methods. Flower knows only the other settings, and gets these in
        `method_settings`.

        Raises
        ------
        ConfigError
            A key is unknown, a type is wrong or a value is out of range.
        """
        values = {SETTINGS[key].name: value for key, value in run_config.items() if key in SETTINGS}
        if others := {key: value for key, value in run_config.items() if key not in SETTINGS}:
            added = added_settings()
            if stray := others.keys() - added.keys():
                raise ConfigError(unknown_setting(min(stray), (*SETTINGS, *added)))
            both = assigned(values.get("method_settings", "")) | others
            values["method_settings"] = " ".join(f"{key}={both[key]}" for key in sorted(both))
        return cls(**values)

    def run_config(self) -> dict[str, Any]:
        """Return the settings as a Flower run config, kebab-case."""
        return {key: getattr(self, known.name) for key, known in SETTINGS.items()}

    def settings(self) -> dict[str, Any]:
        """Return all settings by their names in kebab-case, including those of added methods as texts."""
        return self.run_config() | assigned(self.method_settings)

    def own_settings(self) -> dict[str, Any]:
        """Return the method's own settings as arguments; an added method's only where they are given.

        Raises
        ------
        ConfigError
            The method does not accept a text of `method_settings`, or it has no mean to replace by `aggregation`.
        """
        if self.aggregation != AGGREGATION.default and AGGREGATION.name not in REGISTRY[self.strategy]:
            able = ", ".join(name for name in REGISTRY.own if AGGREGATION.name in REGISTRY[name])
            raise ConfigError(
                f"aggregation is {self.aggregation!r}, allowed with {self.strategy}: {AGGREGATION.default}; "
                f"methods with others: {able}"
            )
        own, texts = {}, assigned(self.method_settings)
        for each in REGISTRY[self.strategy].settings:
            if each.key not in SETTINGS:
                if each.key in texts:
                    own[each.name] = each.parse(texts[each.key])
            else:
                value = getattr(self, each.name)
                own[each.name] = each.default if value == OWN_DEFAULT else value
        return own

    def for_method(self, strategy: str) -> Config:
        """Return the same settings for another method; `aggregation` is the default where that method has no other."""
        other = replace(self, strategy=strategy, resume="")
        default: dict[str, Any] = {AGGREGATION.name: AGGREGATION.default}
        return other if AGGREGATION.name in REGISTRY[strategy] else replace(other, **default)

    def absolute(self) -> Config:
        """Return the same settings with paths that do not depend on the working directory."""

        def whole(path: str) -> str:
            return os.path.abspath(os.path.expanduser(path)) if path else ""

        return replace(
            self,
            data_dir=whole(self.data_dir),
            schema=whole(self.schema),
            public_data=self.public_data if self.public_data in ("auto", *DATASETS) else whole(self.public_data),
            output_dir=whole(self.output_dir or "."),
        )


SETTINGS: dict[str, Setting] = {
    kebab(each.name): replace(each.metadata["setting"], name=each.name) for each in fields(Config)
}
"""Every setting of a run by its name in kebab-case. If methods share a name: one that accepts all their values."""


def assigned(text: str) -> dict[str, str]:
    """Return key -> value of a text in the form of `method_settings`."""
    return {key: value for key, _, value in (word.partition("=") for word in text.split())}


def added_settings() -> dict[str, Setting]:
    """Return the methods' settings that are not fields of Config, by their names in kebab-case."""
    found = (each for method in REGISTRY.values() for each in method.settings)
    return {each.key: each for each in found if each.key not in SETTINGS}


def is_used_by(key: str, strategy: str) -> bool:
    """Return whether a method uses a setting: one of its own, or one that is no method's own and that it heeds."""
    if (method := REGISTRY.get(strategy)) is None:
        return True
    if key in {each.key for each in method.ignores}:
        return False
    if key in {each.key for each in (*method.settings, *TRAINING)}:
        return True
    of_methods = {kebab(each.name) for each in fields(Config) if any(each.metadata["methods"].values())}
    return key not in of_methods | added_settings().keys()


def unused(given: Collection[str], configs: Sequence[Config]) -> list[str]:
    """Return a line for each of these settings that no run uses: not its method, or not its dataset or partition."""
    strategies, datasets, partitions = (
        list(dict.fromkeys(getattr(config, what) for config in configs))
        for what in ("strategy", "dataset", "partition")
    )
    lines = [
        f"{_none_of(strategies)} {key}"
        for key in given
        if not any(is_used_by(key, strategy) for strategy in strategies)
    ]
    for registry, names, own in ((DATASETS, datasets, PARTITIONS), (PARTITIONS, partitions, DATASETS)):
        of_others = {key for each in own.values() for key in each.settings}  # of which the other registry decides
        of_some = {key for each in registry.values() for key in each.settings} - of_others
        used = {key for name in names for key in registry[name].settings}
        lines += [f"{_none_of(names)} {key}" for key in given if key in of_some - used]
    return lines


def _none_of(names: Sequence[str]) -> str:
    return f"{names[0]} does not use" if len(names) == 1 else f"none of {', '.join(names)} uses"


def unknown_setting(key: str, known: tuple[str, ...]) -> str:
    """Return the error text for a setting that does not exist."""
    meant = meant_by(key, known)
    return f"unknown setting {key}; " + (f"did you mean {meant}?" if meant else f"known: {', '.join(known)}")
