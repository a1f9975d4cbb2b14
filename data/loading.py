"""The data of a run's clients, loaded as its settings say."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any

from .federation import Federation
from .partitions import divide
from .public import hold_out_size, public_images, public_source
from .sites import Sites
from .sources import DataError, load_images

KEYS = (  # settings that decide which client has which images
    "dataset",
    "data-dir",
    "partition",
    "num-clients",
    "num-groups",
    "samples-per-client",
    "with-replacement",
    "dirichlet-alpha",
    "public-data",
    "public-size",
    "seed",
)


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
    return Sites.of(run_config, node_config) if run_config["dataset"] == "sites" else load_federation(run_config)


def load_federation(run_config: Mapping[str, Any]) -> Federation:
    """Return the federation that a run config describes; the last two are cached.

    Parameters
    ----------
    run_config : mapping
        With the keys dataset, data-dir, partition, num-clients, num-groups, samples-per-client,
        with-replacement, dirichlet-alpha, public-data, public-size and seed.

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
    return _load(**{key.replace("-", "_"): run_config[key] for key in KEYS})


@lru_cache(maxsize=2)
def _load(
    *,
    dataset: str,
    data_dir: str,
    partition: str,
    num_clients: int,
    public_data: str,
    public_size: int,
    seed: int,
    **options: Any,
) -> Federation:
    if public_size < 0:
        raise DataError(f"public-size is {public_size}, allowed: 0 or more")
    images = load_images(dataset, data_dir)
    source = public_source(public_data, dataset)
    parts = divide(
        partition,
        images.y_train,
        images.y_test,
        images.num_classes,
        dataset=dataset,
        num_clients=num_clients,
        held_out=hold_out_size(public_size, len(images)) if source == dataset else 0,
        seed=seed,
        **options,
    )
    public = partial(
        public_images, source, dataset=dataset, data_dir=data_dir, size=public_size, spare=parts.spare, seed=seed
    )
    return Federation(images, parts, f"{dataset}, {partition}, {num_clients} clients", public)


def forget_federations() -> None:
    """Clear the cache of federations in this process, so that their files are read again."""
    _load.cache_clear()
