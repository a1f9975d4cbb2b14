"""Check which methods a Flower app's clients can take part in: one client runs a round of each in this process."""

from __future__ import annotations

import inspect
import logging
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.common.config import flatten_dict
from flwr.supercore.object_ref import load_app

from kindred import REGISTRY, FedAvg, PersonalizedStrategy
from kindred.engine.history import History
from kindred.engine.inline import InlineGrid
from kindred.engine.roster import TooFewClients
from kindred.messages import CONFIG, IDENTITY_QUERY, METHODS, VERSION_KEY, config_of, first_line, records_of
from kindred.registry import Method
from kindred.versions import VERSION

from .config import ConfigError

NODES = 10  # nodes that the app's ServerApp finds, and parts into which the client's data are divided; Flower's default
OURS = "needs a ClientApp of make_client_app"  # since its clients do more than train the model that they receive


class Finding(NamedTuple):
    """Result for a method: whether a client can take part, and why not, or a remark."""

    method: str
    takes_part: bool
    text: str


class _Found(BaseException):
    """The first training message of a ServerApp; no error, so that nobody on the way handles it."""

    def __init__(self, content: RecordDict) -> None:
        super().__init__()
        self.content = content


class _Probe(InlineGrid):
    """A Grid that ends a ServerApp at its first training message."""

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        kept = list(messages)
        for message in kept:
            if message.metadata.message_type.startswith(MessageType.TRAIN):
                raise _Found(message.content)
        return super().push_messages(kept)


def check_app(folder: Path) -> list[Finding]:
    """Run a client of the app in a folder for a round of each method that it may take part in.

    The model, the settings of training and the names of both are those of the first training message of the app's
    ServerApp.

    Parameters
    ----------
    folder : Path
        A Flower app: with a pyproject.toml that names its components.

    Returns
    -------
    list of Finding
        One for each method.

    Raises
    ------
    ConfigError
        There is no app, it cannot be loaded, or its ServerApp sends no training message.
    """
    components, run_config = _described(folder)
    with _quiet():
        server_app, client_app = (_loaded(components, name, folder) for name in ("serverapp", "clientapp"))
        message = _first_message(server_app, client_app, run_config, folder)
        arrays, config, names = _parts(message, folder)
        grid = InlineGrid(client_app, 1, run_config, [{"partition-id": 0, "num-partitions": NODES}])
        ours = METHODS in _introduction(grid)
        return [_finding(method, ours, grid, arrays, config, names) for method in REGISTRY.values()]


def _described(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the components and the run config in an app's pyproject.toml."""
    path = folder / "pyproject.toml"
    try:
        app = tomllib.loads(path.read_text(encoding="utf-8"))["tool"]["flwr"]["app"]
        return dict(app["components"]), flatten_dict(app.get("config", {}))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or first_line(str(error))
        raise ConfigError(f"{path} cannot be read ({reason}); give the folder of a Flower app") from None
    except (KeyError, TypeError):
        raise ConfigError(f"{path} has no [tool.flwr.app.components]; give the folder of a Flower app") from None


def _loaded(components: dict[str, Any], name: str, folder: Path) -> Any:
    if name not in components:
        raise ConfigError(f"{folder / 'pyproject.toml'} names no {name} in [tool.flwr.app.components]")
    try:
        return load_app(components[name], ConfigError, folder)
    except Exception as error:  # an app's modules may raise anything
        reason = first_line(f"{type(error).__name__}: {error}")
        raise ConfigError(f"the {name} {components[name]} of {folder} cannot be loaded ({reason})") from None


def _first_message(server_app: Any, client_app: Any, run_config: dict[str, Any], folder: Path) -> RecordDict:
    grid = _Probe(client_app, NODES, run_config)
    context = Context(
        run_id=grid.run.run_id, node_id=1, node_config={}, state=RecordDict(), run_config=dict(run_config)
    )
    try:
        with _found_at_start():
            server_app(grid=grid, context=context)
    except _Found as found:
        return found.content
    except Exception as error:
        reason = first_line(f"{type(error).__name__}: {error}")
        raise ConfigError(f"the ServerApp of {folder} fails before it asks a client to train ({reason})") from None
    raise ConfigError(f"the ServerApp of {folder} ends without asking a client to train")


@contextmanager
def _found_at_start() -> Iterator[None]:
    """Take the model and the settings that the ServerApp gives to a strategy of ours.

    The messages of some hold several models, or none.
    """
    start = PersonalizedStrategy.start
    signature = inspect.signature(start)

    def found(strategy: PersonalizedStrategy, *arguments: Any, **named: Any) -> None:
        given = signature.bind(strategy, *arguments, **named).arguments
        records = {strategy.arrayrecord_key: given["initial_arrays"]}
        raise _Found(RecordDict(records | {strategy.configrecord_key: given.get("train_config") or ConfigRecord()}))

    base: Any = PersonalizedStrategy
    base.start = found
    try:
        yield
    finally:
        base.start = start


def _parts(content: RecordDict, folder: Path) -> tuple[ArrayRecord, ConfigRecord, dict[str, str]]:
    """Return the model and the settings in a training message, and a strategy's arguments for their names."""
    arrays, configs = records_of(content, ArrayRecord), records_of(content, ConfigRecord)
    if len(arrays) != 1 or len(configs) > 1:
        raise ConfigError(
            f"a training message of {folder} has {len(arrays)} ArrayRecords and {len(configs)} ConfigRecords, allowed: "
            "1, and up to 1"
        )
    keys = {ArrayRecord: "arrayrecord_key", ConfigRecord: "configrecord_key"}
    names = {keys[type(record)]: name for name, record in content.items() if type(record) in keys}
    return arrays[0], configs[0] if configs else ConfigRecord(), names


def _introduction(grid: InlineGrid) -> dict[str, Any]:
    """Return what the client answers to the query for its name; empty if it does not know this query."""
    (node,) = grid.get_node_ids()
    (reply,) = grid.send_and_receive(
        [Message(RecordDict({CONFIG: ConfigRecord({VERSION_KEY: VERSION})}), node, IDENTITY_QUERY)]
    )
    return {} if reply.has_error() else config_of(reply.content)


def _finding(
    method: Method, ours: bool, grid: InlineGrid, arrays: ArrayRecord, config: ConfigRecord, names: dict[str, str]
) -> Finding:
    if method.needs_our_client and not ours:
        return Finding(method.name, False, OURS)
    tried: type[Any] = FedAvg if method.distils else method.strategy  # whose clients do the same
    try:
        strategy = tried(min_train_nodes=1, min_evaluate_nodes=1, min_available_nodes=1, **names)
        strategy.start(grid, arrays, 1, train_config=config, evaluate_config=config)
    except TooFewClients as error:
        return Finding(method.name, False, _reason(str(error), strategy.history))
    except Exception as error:
        return Finding(method.name, False, first_line(f"{type(error).__name__}: {error}"))
    needs = "its server also needs public samples and the networks" if method.distils else ""
    return Finding(method.name, True, needs or _remark(strategy.history))


def _reason(text: str, history: History) -> str:
    failed = [row["status"] for row in history.rows if row["status"] != "ok"]
    return next(iter([*history.left_out.values(), *failed]), text)


def _remark(history: History) -> str:
    """Return why a client that took part has no value of the headline metric; empty if it has one."""
    if history.last_values():
        return ""
    failed = [row["evaluate-status"] for row in history.rows if "evaluate-status" in row]
    return f"evaluation fails: {failed[0]}" if failed else history.unreported()


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep Flower's log lines of the trial rounds to itself: what failed is in the findings."""
    logger = logging.getLogger("flwr")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(before)
