"""Check before a run starts that it can work on this machine."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path

from kindred.client.state import default_root
from kindred.data import load_federation

from .app import check_data_and_models, make_strategy, needed_by
from .config import Config, ConfigError
from .engines import Engine
from .machine import cpus, gpus


def check(configs: Iterable[Config], engine: Engine) -> None:
    """Check that runs can work, before any of them starts.

    Raises
    ------
    ConfigError, DataError
        A run cannot work; the text says why.
    """
    for config in configs:
        check_machine(config, engine)
        check_method(config)


def check_machine(config: Config, engine: Engine) -> None:
    """Check the settings, for any method, against this machine; raise as `check` does."""
    for key, value in config.run_config().items():
        if isinstance(value, str) and re.search(r"[\x00-\x1f\x7f\ud800-\udfff]", value):
            raise ConfigError(f"{key} is {value!r}, allowed: text in UTF-8 without control characters")
        if isinstance(value, int) and value >= 2**63:
            raise ConfigError(f"{key} is {value}, allowed: less than 2^63")
    for key in ("min-train-clients", "min-available-clients"):
        if (least := config.run_config()[key]) > config.participants >= 2:  # fewer are refused with the data
            others = f" less held-out-clients, {config.held_out_clients}" if config.held_out_clients else ""
            raise ConfigError(f"{key} is {least}, allowed: at most num-clients{others}, which is {config.participants}")
    usable = cpus()
    if type(engine.cpus_per_client) is not int or not 1 <= engine.cpus_per_client <= usable:
        raise ConfigError(
            f"--cpus-per-client is {engine.cpus_per_client}, allowed: 1 to {usable}, the CPUs that this process may use"
        )
    most = usable // engine.cpus_per_client
    if type(engine.jobs) is not int or not 1 <= engine.jobs <= most:
        raise ConfigError(
            f"--jobs is {engine.jobs}, allowed: 1 to {most}, with {usable} CPUs and --cpus-per-client "
            f"{engine.cpus_per_client}"
        )
    _check_gpus(config, engine)
    if config.resume:
        check_folder(f"resume is {config.resume!r}", config.resume, "name a folder that can be written to")
    else:
        check_folder(f"output-dir is {config.output_dir!r}", config.output_dir, "name a folder that can be made")


def check_method(config: Config) -> None:
    """Check that the method can work with these data; raise as `check` does."""
    federation = load_federation(config.run_config())
    check_data_and_models(config, federation)
    make_strategy(config, **needed_by(config, federation))
    root = default_root()
    what = f"the folder of the clients' state is {str(root)!r}"
    check_folder(what, root, "set XDG_STATE_HOME to a folder that can be made")


def _check_gpus(config: Config, engine: Engine) -> None:
    if config.device != "cuda" and engine.gpus_per_client == 0:
        return
    asked = "device is 'cuda'" if config.device == "cuda" else f"--gpus-per-client is {engine.gpus_per_client:g}"
    here = gpus()
    if here == 0:
        raise ConfigError(f"{asked}, but PyTorch finds no GPU here, allowed: device cpu or auto, --gpus-per-client 0")
    if not (0 <= engine.gpus_per_client <= 1 or engine.gpus_per_client in range(here + 1)):
        raise ConfigError(
            f"--gpus-per-client is {engine.gpus_per_client:g}, allowed: 0 to 1, or a whole number up to "
            f"{here}, the GPUs of this machine"
        )
    if engine.name == "flower" and engine.gpus_per_client == 0:
        raise ConfigError(
            f"{asked}, but --gpus-per-client is 0: set the fraction of a GPU that a client gets, such as 0.25"
        )


def check_folder(what: str, folder: str | Path, remedy: str) -> None:
    """Raise ConfigError if a folder, or where it is missing its nearest parent, cannot be written to."""
    nearest = Path(folder)  # that exists
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    try:
        os.rmdir(tempfile.mkdtemp(dir=nearest))
    except OSError as error:
        raise ConfigError(f"{what}, but {nearest} cannot be written to ({error.strerror}); {remedy}") from None
