"""Check before a run whether a site can take part, by what the server and the site would send in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flwr.app import Context, RecordDict
from flwr.common.config import parse_config_args
from flwr.supercore.object_ref import load_app

from kindred.client.app import introduction_of
from kindred.data import DataError, Sites
from kindred.lazy import lazy
from kindred.messages import (
    CLIENT_ID,
    NETWORK,
    NUM_CLASSES,
    NUM_EXAMPLES,
    NUM_PUBLIC,
    NUM_TEST_EXAMPLES,
    PROBLEM,
    VALIDATE_ONLY,
)
from kindred.server_app.app import prepare
from kindred.server_app.config import Config, ConfigError

if TYPE_CHECKING:
    import torch
else:
    torch = lazy("torch")

LOAD_SITE = "kindred.client_app.app:load_site"


def read_run_config(given: Sequence[str]) -> Config:
    """Read the settings of a run as `flwr run --run-config` does.

    Parameters
    ----------
    given : sequence of str
        The path of one TOML file, or texts such as 'dataset="sites" num-classes=10'.

    Raises
    ------
    ConfigError
        They cannot be read, or the run is not one for sites with their own data (dataset sites).
    """
    text = " ".join(given)
    try:
        settings = parse_config_args(list(given))
    except OSError as error:
        raise ConfigError(f"--run-config is {text!r}, which cannot be read ({error.strerror})") from None
    except Exception:  # an error of Flower, of TOML or of the encoding
        settings = {}
    if not settings:
        raise ConfigError(
            f"--run-config is {text!r}, allowed: a .toml file, or key=value as TOML has it, texts in "
            "quotation marks, separated by blanks"
        )
    config = Config.from_run_config(settings)
    if config.dataset != "sites":
        raise ConfigError(f"dataset is {config.dataset!r}, allowed if sites have their own data: sites")
    return config


class _SitesAndServer(Sites):
    """Sites of a run whose server is another machine; zeros replace the server's public samples."""

    def public_set(self) -> torch.Tensor:
        return self.task.inputs.zeros()


def fit(config: Config, node_config: Mapping[str, Any]) -> str:
    """Introduce the site to the run's strategy, as in the first round, and return a line about the two.

    Parameters
    ----------
    config : Config
        The settings of the run.
    node_config : mapping
        The site's own settings: its name, its data, whether it shares its model.

    Raises
    ------
    ConfigError
        The run could not start; the text says why.
    DataError
        The strategy would exclude the site; the text says why.
    """
    elsewhere: dict[str, Any] = {"store": "memory", "public_size": 0}
    if config.schema:
        if "schema" not in node_config:
            raise DataError(f"schema is {config.schema!r} in the run, and --schema is not given: the site needs it too")
        elsewhere["schema"] = node_config["schema"]
    here = replace(config, **elsewhere)  # the server's own disk, public samples and schema are not here
    try:
        sites = _SitesAndServer.of(here.run_config())
        strategy, initial_arrays = prepare(here, sites)
    except ValueError as error:
        raise ConfigError(f"the run cannot start: {error}") from None
    context = Context(
        run_id=0, node_id=0, node_config=dict(node_config), state=RecordDict(), run_config=config.run_config()
    )
    about = introduction_of(load_app(LOAD_SITE, ConfigError), context)
    if PROBLEM in about:
        raise DataError(about[PROBLEM])
    strategy.begin(initial_arrays)
    for reason in strategy.introduce_all({about[CLIENT_ID]: about}).values():
        raise DataError(reason)
    if VALIDATE_ONLY in about and strategy.general_model(str(about[NETWORK])) is None:
        raise DataError(f"its validate-only is true, and {config.strategy} has no global model")
    public = f", {about[NUM_PUBLIC]} public samples" if NUM_PUBLIC in about else ""
    what = "classes" if sites.task.objective.has_classes else "outputs"
    samples = (
        f"{about[NUM_TEST_EXAMPLES]} samples to evaluate on"
        if VALIDATE_ONLY in about
        else f"{about[NUM_EXAMPLES]} training samples"
    )
    return f"{config.strategy} with {about[NETWORK]}, {about[NUM_CLASSES]} {what}, {samples}{public}"
