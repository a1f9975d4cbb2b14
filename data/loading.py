"""The data of a run's clients, from its settings."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any

from .federation import Federation
from .partitions import divide
from .public import hold_out_size, public_images, public_source
from .sites import Sites
from .sources import DataError, load_images

KEYS = (  # settings that decide who has which images
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
    """Load the data of a run's clients: a dataset that is divided among them, or what sites have on their own machines.

    Parameters
    ----------
    run_config : mapping
        `dataset` decides; the other keys are those of `load_federation` or `Sites.of`.
    node_config : mapping, optional
        A site's own settings; by default the run's, as at the server.

    Raises
    ------
    DataError
        As in `load_federation` and `Sites.of`.
    """
    return Sites.of(run_config, node_config) if run_config["dataset"] == "sites" else load_federation(run_config)


def load_federation(run_config: Mapping[str, Any]) -> Federation:
    """The federation that a run config describes; the last ones asked for are kept.

    Parameters
    ----------
    run_config : mapping
        With the keys dataset, data-dir, partition, num-clients, num-groups, samples-per-client,
        with-replacement, dirichlet-alpha, public-data, public-size and seed.

    Returns
    -------
    Federation
        The same for the same settings, in every process.

    Raises
    ------
    DataError
        Settings that do not fit each other or the data, or data that cannot be read. What is wrong with the
        public set alone is said when it is asked for (`Federation.public_set`).
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
    """Let go of the federations that this process keeps, so that their files are read again."""
    _load.cache_clear()
