"""The version of this package, and the one version of Flower that it works with.

Flower's documented interfaces rarely change. The places below use undocumented ones; the test named beside each is the
first to fail when Flower changes it:

| what | where | test |
| --- | --- | --- |
| `TaskIdentity`, `Metadata._message_id`, `Run.create_empty` | engine/inline.py | test_conformance.py |
| `ErrorCode`, `SUPERLINK_NODE_ID` | engine/exchange.py, engine/transport.py | test_silence.py |
| `aggregate_metricrecords` | engine/metrics.py | test_rounds.py |
| `ApiErrorCode` | server_app/deployment/connection.py | test_site_connection.py |
| `node_auth_http_interceptor`, `public_key_to_bytes` | the same | the same |
| `InMemoryGrid` (whether a run is simulated) | engine/simulated_state.py | test_state.py |
| `load_app` | engine/workers.py, server_app/app.py, app_check.py, deployment/site_check.py | test_workers.py |
| `parse_config_args` | server_app/deployment/site_check.py | test_site_command.py |
| `flatten_dict` | server_app/app_check.py | test_app_check.py |
| `make_message`, fields of `Metadata` | engine/channel.py | test_workers.py |
| `HttpGrid._runtime_client`, `PullObjectRequest` | engine/transport.py | test_silent_sites.py |
| `trim_mean` | parts/aggregation.py | test_aggregation.py |
| `flower_superlink`, `flwr run`, `flwr list`, texts of the log | server_app/simulation.py | test_flower_process.py |
| the SuperLink's routes, headers, `authenticate_node` | server_app/deployment/guard.py | test_guard.py |
| the table `node` of the SuperLink's database | server_app/deployment/watch.py | test_live_machines.py |
| `sql_mixin` (how long a request waits for the database) | server_app/deployment/hooks.py | test_deployment.py |
| `subprocess_executor`, `start_client_internal`, `flwr_clientapp` | server_app/deployment/hooks.py | test_hooks.py |
"""

from __future__ import annotations

import functools
from importlib import metadata

DISTRIBUTION = "kindred-fl"
VERSION = metadata.version(DISTRIBUTION)
FLOWER = "1.41.0"


def mismatch(theirs: object, who: str, here: str) -> str | None:
    """Describe how the version of another machine differs from the one here; None if it is the same.

    Parameters
    ----------
    theirs : object
        The version that the other machine reported; None if it reported none, as versions before 0.2.0 do.
    who, here : str
        Names of the other machine and of this one for the message: "the server", "this client".
    """
    if theirs == VERSION:
        return None
    version = f"{DISTRIBUTION} {theirs}" if isinstance(theirs, str) else "a version before 0.2.0"
    return f"{who} has {version}, {here} {DISTRIBUTION} {VERSION}: install the same version on both machines"


@functools.cache
def check_flower() -> None:
    """Raise ImportError unless the installed Flower is the version that this package works with.

    Raises
    ------
    ImportError
        Another version is installed; the message, one line, says which, and what to do.
    """
    installed = metadata.version("flwr")
    if installed != FLOWER:
        raise ImportError(
            f"flwr is {installed}, allowed with {DISTRIBUTION} {VERSION}: {FLOWER}; install it with "
            f"pip install flwr=={FLOWER}"
        )
