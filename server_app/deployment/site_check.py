"""Whether a site can take part in a run, found before the run: by what the server and the site would say in it."""

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
from kindred.messages import CLIENT_ID, NETWORK, NUM_CLASSES, NUM_EXAMPLES, NUM_PUBLIC, PROBLEM
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
        They cannot be read, or are not those of a run that sites with data of their own take part in.
    """
    text = " ".join(given)
    try:
        settings = parse_config_args(list(given))
    except OSError as error:
        raise ConfigError(f"--run-config is {text!r}, which cannot be read ({error.strerror})") from None
    except Exception:  # Flower's, TOML's or of the encoding
        settings = {}
    if not settings:
        raise ConfigError(
            f"--run-config is {text!r}, allowed: a .toml file, or key=value as TOML has it, texts in "
            "quotation marks, separated by blanks"
        )
    config = Config.from_run_config(settings)
    if config.dataset != "sites":
        raise ConfigError(f"dataset is {config.dataset!r}, allowed where sites have data of their own: sites")
    return config


class _SitesAndServer(Sites):
    """The sites of a run whose server is another machine: its public images are not here, others stand for them."""

    def public_set(self) -> torch.Tensor:
        return torch.zeros(1, *self.image_shape)


def fit(config: Config, node_config: Mapping[str, Any]) -> str:
    """Have the run's strategy meet the site, as in the first round; a line about what the site is to the run.

    Parameters
    ----------
    config : Config
        The settings of the run.
    node_config : mapping
        What the site has set: its name, its data, whether it shares its model.

    Raises
    ------
    ConfigError
        Why the run would not begin.
    DataError
        Why the site would be left out.
    """
    elsewhere: dict[str, Any] = {"store": "memory", "public_size": 0}
    here = replace(config, **elsewhere)  # the server's own disk and public images are not here
    try:
        strategy, initial_arrays = prepare(here, _SitesAndServer.of(config.run_config()))
    except ValueError as error:
        raise ConfigError(f"the run would not begin: {error}") from None
    context = Context(
        run_id=0, node_id=0, node_config=dict(node_config), state=RecordDict(), run_config=config.run_config()
    )
    about = introduction_of(load_app(LOAD_SITE, ConfigError), context)
    if PROBLEM in about:
        raise DataError(about[PROBLEM])
    strategy.begin(initial_arrays)
    for reason in strategy.introduce({about[CLIENT_ID]: about}).values():
        raise DataError(reason)
    public = f", {about[NUM_PUBLIC]} public images" if NUM_PUBLIC in about else ""
    return (
        f"{config.strategy} with {about[NETWORK]}, {about[NUM_CLASSES]} classes, {about[NUM_EXAMPLES]} training "
        f"samples{public}"
    )
