"""The data of a run's clients, loaded as its settings say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

from .federation import Federation
from .partitions import PARTITIONS, divide
from .public import hold_out_size, public_inputs, public_source
from .sites import Sites
from .sources import DATASETS, DataError, load_dataset

KEYS = (  # settings that decide which client has which samples
    "dataset",
    "data-dir",
    "partition",
    "num-clients",
    "num-groups",
    "samples-per-client",
    "with-replacement",
    "dirichlet-alpha",
    "min-samples",
    "test-share",
    "validation-share",
    "held-out-clients",
    "class-weights",
    "public-data",
    "public-size",
    "seed",
)

AUTO = "auto"
NATURAL_SHARE = 0.2


def load_clients(run_config: Mapping[str, Any], node_config: Mapping[str, Any] | None = None) -> Federation | Sites:
    """Load the data of a run's clients: a dataset divided among them, or the data on the sites' own machines.

    Parameters
    ----------
    run_config : mapping
        `dataset` decides which; the other keys are those of `load_federation` or `Sites.of`.
    node_config : mapping, optional
        A site's own settings; by default the run's, as at the server.

    Raises
    ------
    DataError
        As in `load_federation` and `Sites.of`.
    """
    if run_config["dataset"] != "sites":
        return load_federation(run_config)
    return Sites.of(run_config, node_config, validation_share(run_config))


def load_federation(run_config: Mapping[str, Any]) -> Federation:
    """Return the federation that a run config describes; the last two are cached.

    Parameters
    ----------
    run_config : mapping
        With the keys of `KEYS`, and the `settings` of the dataset's `Source`.

    Returns
    -------
    Federation
        The same settings give the same federation in every process.

    Raises
    ------
    DataError
        The settings do not fit each other or the data, or the data cannot be read. An error in the public set
        alone is raised by `Federation.public_set`.
    """
    names = (*(key.replace("-", "_") for key in KEYS), *_reading(run_config["dataset"]))
    given = {name: run_config[name.replace("_", "-")] for name in names}
    return _load(**(given | {"validation_share": validation_share(run_config)}))


def validation_share(run_config: Mapping[str, Any]) -> float:
    """Return the share of each client's training samples that is held out for validation.

    "auto" is a fifth for natural clients and real sites, and none for the papers' partitions.
    """
    if (share := run_config["validation-share"]) != AUTO:
        return float(share)
    return NATURAL_SHARE if run_config["dataset"] == "sites" or run_config["partition"] == "by-client" else 0.0


def _reading(dataset: str) -> list[str]:
    """Return the settings that say how a dataset is read, in snake_case; none if there is no such dataset."""
    return [key.replace("-", "_") for key in DATASETS[dataset].settings] if dataset in DATASETS else []


@lru_cache(maxsize=2)
def _load(
    *,
    dataset: str,
    data_dir: str,
    partition: str,
    num_clients: int,
    class_weights: str,
    public_data: str,
    public_size: int,
    seed: int,
    **options: Any,
) -> Federation:
    if public_size < 0:
        raise DataError(f"public-size is {public_size}, allowed: 0 or more")
    reading = {name: options[name] for name in _reading(dataset)}
    samples = load_dataset(dataset, data_dir, **reading)
    source = public_source(public_data, dataset)
    parts = divide(
        partition,
        samples.y_train,
        samples.y_test,
        samples.objective.num_outputs if samples.objective.has_classes else 0,
        dataset=dataset,
        num_clients=num_clients,
        held_out=hold_out_size(public_size, len(samples)) if source == dataset else 0,
        seed=seed,
        clients_train=samples.clients_train,
        clients_test=samples.clients_test,
        times=samples.times,
        **{name: value for name, value in options.items() if name.replace("_", "-") in KEYS},
    )
    # Datasets of a fixed number of classes are known ones, for which papers use such partitions.
    if PARTITIONS[partition].total and len(samples.x_test) and DATASETS[dataset].num_classes is None:
        anew = f"{partition} divides all samples anew, so that clients train on some that {dataset} has for test"
        samples = replace(samples, remarks=(*samples.remarks, anew))
    public = partial(
        public_inputs,
        source,
        dataset=dataset,
        data_dir=data_dir,
        kind=samples.kind,
        size=public_size,
        spare=parts.spare,
        seed=seed,
        settings=reading,
    )
    return Federation(samples, parts, f"{dataset}, {partition}, {num_clients} clients", public, class_weights)


def forget_federations() -> None:
    """Clear the cache of federations in this process, so that their files are read again."""
    _load.cache_clear()
