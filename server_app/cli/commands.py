"""The commands that `kindred` has beside those of `run`: importing a file adds its commands to `app`."""

from kindred.server_app.deployment import keys, server, site

from . import predict, report
from .common import app

__all__ = ["app", "keys", "predict", "report", "server", "site"]
