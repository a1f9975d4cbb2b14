"""All commands of `kindred` except those in `run.py`: importing a file adds its commands to `app`."""

from kindred.server_app.deployment import keys, server, site

from . import check_app, predict, report, schema
from .common import app

__all__ = ["app", "check_app", "keys", "predict", "report", "schema", "server", "site"]
