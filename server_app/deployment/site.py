"""`kindred site`: check the settings and the data of a site, then keep a SuperNode running.

It is a thin wrapper of `flower-supernode`, and prints its command. It adds checks before anything starts, one folder
for all that Flower writes, restarts of the SuperNode, a line that says why it cannot take part, and an end that leaves
no process.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from kindred.client.journal import JOURNAL
from kindred.client.site import MOST_WORK as MOST
from kindred.client.state import default_root
from kindred.lazy import lazy
from kindred.server_app.cli.common import app, end, option
from kindred.server_app.cli.display import displayed
from kindred.server_app.machine import cpus

from .addresses import LOOPBACK, check_port, is_loopback, parse_server, warn_of_no_tls, with_port
from .bundle import ALLOW_APP, allowed_apps
from .certificates import check_site_name, load_certificate, load_site_key, out_of_date
from .connection import Link
from .files import absolute_path, open_to_others, own_folder, refuse_open
from .processes import QUIET, show_command
from .supernode import keep_running, port_for_supernode

if TYPE_CHECKING:
    from kindred import data
    from kindred.data import public as public_images, sites
    from kindred.data.dataset import Dataset
    from kindred.server_app import checks, config

    from . import site_check, site_page
else:
    data, sites, public_images = lazy("kindred.data"), lazy("kindred.data.sites"), lazy("kindred.data.public")
    checks, config = lazy("kindred.server_app.checks"), lazy("kindred.server_app.config")
    site_check = lazy("kindred.server_app.deployment.site_check")
    site_page = lazy("kindred.server_app.deployment.site_page")


@app.command()
def site(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the site; a whole number counts as a number.")],
    server: Annotated[str, option("server", "HOST:PORT", "Address of the server.")],
    data_dir: Annotated[Path, option("data-dir", "PATH", "The site's data: .npz file, folder of images, or tables.")],
    schema: Annotated[
        Path | None, option("schema", "FILE", "The run's schema.json, the same at each site; tables need it.")
    ] = None,
    public_data: Annotated[
        Path | None, option("public-data", "FILE", "Unlabelled samples, the same at each site: an .npz file with x.")
    ] = None,
    ca: Annotated[Path | None, option("ca", "FILE", "The ca.crt of `kindred keys`.")] = None,
    key: Annotated[Path | None, option("key", "FILE", "The site's private key.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Use neither TLS nor authentication.")] = False,
    state_dir: Annotated[Path | None, option("state-dir", "DIR", "Folder for what the site keeps.")] = None,
    threads: Annotated[int | None, option("threads", "N", "CPU threads to compute with (default: all).")] = None,
    port: Annotated[int | None, option("port", "PORT", "Port that the SuperNode uses on this machine only.")] = None,
    no_share_model: Annotated[
        bool, typer.Option("--no-share-model", help="Do not let other sites receive this site's model; FedeRiCo.")
    ] = False,
    report_weights: Annotated[
        bool, typer.Option("--report-weights", help="Report the site's mixing weights to the server; FedeRiCo, FedEM.")
    ] = False,
    validate_only: Annotated[
        bool,
        typer.Option("--validate-only", help="Train nothing; evaluate the global model and report numbers alone."),
    ] = False,
    max_epochs: Annotated[
        int | None,
        option("max-epochs", "N", f"Most epochs that a message may ask for (default: {MOST['max-epochs']})."),
    ] = None,
    max_steps: Annotated[
        int | None, option("max-steps", "N", f"Most steps that a message may ask for (default: {MOST['max-steps']}).")
    ] = None,
    max_batch_size: Annotated[
        int | None,
        option("max-batch-size", "N", f"Most samples in a step of training (default: {MOST['max-batch-size']})."),
    ] = None,
    class_names: Annotated[
        str,
        option("class-names", "NAMES", "The run's class-names, to check data in which classes have names."),
    ] = "",
    run_config: Annotated[
        list[str] | None,
        option(
            "run-config",
            "FILE_OR_SETTINGS",
            "The settings of a run, as for `flwr run`, to check that the site fits it.",
        ),
    ] = None,
    allow_app: Annotated[list[str] | None, ALLOW_APP] = None,
    check: Annotated[bool, typer.Option("--check", help="Check and print, start nothing.")] = False,
) -> None:
    """Take part in runs as a site with its own data: check the data, then keep a SuperNode running."""
    allowed = allowed_apps(allow_app or ())
    check_site_name("NAME", name)
    host, superlink_port = parse_server(server)
    if insecure and (ca or key):
        end(2, "--insecure is given with --ca or --key, allowed: --insecure alone, or --ca and --key")
    if (ca is None) != (key is None):
        end(2, f"--{'key' if ca else 'ca'} is not given, allowed: --ca and --key together")
    if not (ca and key) and not insecure and not is_loopback(host):
        end(2, f"--server is {server!r}, another machine: give --ca FILE and --key FILE (or --insecure)")
    most = cpus()
    threads = most if threads is None else threads
    if not 1 <= threads <= most:
        end(2, f"--threads is {threads}, allowed: 1 to {most}, the CPUs that this process may use")
    if port is not None:
        check_port("--port", port)
    work = {"max-epochs": max_epochs, "max-steps": max_steps, "max-batch-size": max_batch_size}
    if wrong := [key for key, most in work.items() if most is not None and most < 1]:
        end(2, f"--{wrong[0]} is {work[wrong[0]]}, allowed: 1 or more")
    needless: dict[str, object] = {"--public-data": public_data, "--no-share-model": no_share_model}
    needless |= {"--report-weights": report_weights, **{f"--{key}": most for key, most in work.items()}}
    if validate_only and (given := [name for name, value in needless.items() if value]):
        end(2, f"--validate-only is given with {given[0]}, allowed: one of them; such a site has no model")
    node: dict[str, str | int | bool] = {"client-id": client_id(name)}
    node["data-dir"] = str(absolute_path(data_dir, "--data-dir"))
    if schema:
        node["schema"] = str(absolute_path(schema, "--schema"))
    if public_data:
        node["public-data"] = str(absolute_path(public_data, "--public-data"))
    state = absolute_path(state_dir or default_root(), "--state-dir")
    if os.path.isfile(state):
        end(2, f"--state-dir is {str(state)!r}, a file, allowed: a folder")
    node["state-dir"] = str(state)
    if no_share_model:
        node["share-model"] = False
    if report_weights:
        node["report-weights"] = True
    if validate_only:
        node["validate-only"] = True
    node |= {key: most for key, most in work.items() if most is not None}
    if ca and key:
        ca, key = absolute_path(ca, "--ca"), absolute_path(key, "--key")
        load_site_key(key)
        if doubt := out_of_date(ca, load_certificate(ca)) or open_to_others(ca) or open_to_others(key, private=True):
            end(2, doubt)
        proof = ["--root-certificates", str(ca), "--auth-supernode-private-key", str(key)]
    else:
        proof = ["--insecure"]
        warn_of_no_tls(host)
    run = _run_config(run_config, class_names) if run_config else None
    names = run.class_names if run else class_names
    if check and schema:
        _check_cells(node)
    about = _data_summary(name, node, [part.strip() for part in names.split(",") if part.strip()])
    print(*about["lines"], sep="\n", flush=True)
    if run:
        _check_fit(name, node, run)

    def command(port: int) -> list[str]:
        return [
            "flower-supernode",
            "--superlink",
            with_port(host, superlink_port),
            *proof,
            "--host",
            LOOPBACK[1],
            "--port",
            str(port),
            "--node-config",
            node_config(node),
        ]

    home = state / f"flower-{name}"
    settings = {
        "FLWR_HOME": str(home),
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",  # s; a poll costs some ms
        **QUIET,
        **allowed,
    }
    if check:
        try:
            checks.check_folder(f"--state-dir is {str(state)!r}", state, "name a folder that can be made")
        except config.ConfigError as error:
            end(2, str(error))
        if state.is_dir():
            refuse_open(state)
        show_command(command(port or 9094), settings)
        return
    with own_folder(state, alone=False), own_folder(home):
        page = site_page.SitePage(name, state, about)
        print(f"what happens here is shown by {page.path}: open it in a browser", flush=True)
        link = Link(host, superlink_port, ca, key)
        with page.kept():
            environment = settings | {JOURNAL: str(page.journal)}
            keep_running(lambda: command(port_for_supernode(port)), environment, home, link, page.fault)


def client_id(name: str) -> str | int:
    """Return the id of a site in its node config: the name, or the number that the name writes."""
    return int(name) if re.fullmatch(r"0|[1-9]\d{0,17}", name, re.ASCII) else name


def node_config(values: Mapping[str, str | int | bool]) -> str:
    """Return a node config as flower-supernode reads it: TOML in which no text may contain a quotation mark."""

    def text(value: str | int | bool) -> str:
        if isinstance(value, str):
            return '"' + value.replace("\\", "\\\\").replace('"', "\\u0022") + '"'
        return str(value).lower()

    return " ".join(f"{key}={text(value)}" for key, value in values.items())


def _check_cells(node: Mapping[str, Any]) -> None:
    """Print the first cells of a site's tables that do not fit the schema, and end the command if there are some."""
    try:
        task = data.Task.load(Path(node["schema"]))
        found = sites.misfits_of(node["data-dir"], task)
    except data.DataError as error:
        end(2, str(error))
    for misfit in found:
        print(misfit, flush=True)
    if found:
        end(2, f"--data-dir is {node['data-dir']!r}, where the cells above do not fit the schema; allowed: none")


def _data_summary(name: str, node: Mapping[str, Any], class_names: Sequence[str]) -> dict[str, Any]:
    """Check a site's data; return lines about them and what the server learns, and the samples of each class."""
    try:
        task = data.Task.load(Path(node["schema"])) if "schema" in node else None
        validates = bool(node.get("validate-only"))
        with displayed("reading the data", sys.stderr):
            site = sites.read_site(node["data-dir"], class_names, task, validates=validates)
            if not validates:
                sites.check_test_part(site, Path(node["data-dir"]))
            public = public_images.read_public(node["public-data"], site.kind) if "public-data" in node else None
    except data.DataError as error:
        end(2, str(error))
    if not validates and not len(site.x_test) and len(site) < 2:
        end(2, f"--data-dir is {node['data-dir']!r} with {len(site)} samples, allowed: 2 or more, as one is for test")
    reported = ""
    if public is not None:
        given, due = ("x".join(map(str, x.shape[1:])) for x in (public, site.x_train))
        if given != due:
            end(2, f"public-data has {site.kind} samples of {given}, the site's are {due}")
        reported = f", with PerFed-CKT that it has {len(public)} public samples and their fingerprint"
    held_out = f" ({len(site.x_train)}, less those held out for validation)" if len(site.x_test) else ""
    share = "other sites may" if node.get("share-model", True) else "no other site may"
    found: dict[str, Any] = {
        "lines": [*site.remarks, *sites.empty_cells(site), *sites.far_numbers(site), *_lacks(site, validates)],
        "classes": _classes(site),
    }
    if validates:
        found["lines"] += (
            f"{name}: {_described(site, validates)}\n"
            f"reported to the server at first: the name {name}, that it only validates, its number of samples "
            f"({len(site)}), the name and the number of outputs of the run's network, the kind of its target, a "
            "fingerprint of its task, the version of its kindred and which methods that supports; later, after each "
            "round: the number of samples, and the metrics and the loss of the global model on them\n"
            "not reported: any model or update; the site trains none, and refuses a message to train\n"
            f"stays here: the data in {node['data-dir']}; the site keeps no model"
        ).splitlines()
        return found
    found["lines"] += (
        f"{name}: {_described(site)}\n"
        f"reported to the server at first: the name {name}, the number of training samples{held_out}, the name and "
        f"the number of outputs of the run's network, the kind of its target, a fingerprint of its task, that {share} "
        f"receive its model, the version of its kindred and which methods that supports{reported}"
        "; later: what the method sends, see `kindred strategies`\n"
        f"stays here: the data in {node['data-dir']}, and what the site keeps in {node['state-dir']}"
    ).splitlines()
    return found


def _classes(site: Dataset) -> list[list[str]]:
    """Return each class of a site's samples, with its numbers of training and test samples; none without classes."""
    if not site.objective.has_classes or site.y_train.ndim > 1:
        return []
    names = site.objective.names
    counts = [np.bincount(y, minlength=1) for y in (site.y_train, site.y_test)]
    most = max(map(len, counts))
    train, test = (np.pad(each, (0, most - len(each))).tolist() for each in counts)
    rows = [[names[i] if i < len(names) else str(i), str(train[i]), str(test[i])] for i in range(most)]
    return [row for row in rows if row[1:] != ["0", "0"]]


def _lacks(site: Dataset, validates: bool) -> list[str]:
    """Return what a site's labelled samples do not allow: metrics, or a model selected on validation data."""
    found = []
    tested = np.concatenate([site.y_train, site.y_test]) if validates else site.y_test
    if site.objective.has_classes and len(tested) and len(np.unique(tested)) == 1:
        found.append("the test data have one class: AUROC, average precision and the like are not defined for them")
    kinds = len(np.unique(site.y_train)) if site.objective.has_classes else 1
    if not validates and len(site.y_train) <= kinds:
        found.append(
            "no training sample can be held out for validation, since each class keeps one: no model is selected here"
        )
    return found


def _described(site: Dataset, validates: bool = False) -> str:
    """Return the sizes of a site's data as text."""
    what = "rows" if site.kind == "table" else f"{site.kind}s" if site.kind != "tokens" else "sequences"
    text = f"{len(site) if validates else len(site.x_train)} {what} of {'x'.join(map(str, site.x_train.shape[1:]))}"
    text += (
        " to evaluate on"
        if validates
        else (
            f" to train on, {len(site.x_test)} to test on"
            if len(site.x_test)
            else ", the run's test-share of them to test on"
        )
    )
    if site.objective.has_classes:
        text += f", labels up to {max(int(y.max()) for y in (site.y_train, site.y_test) if len(y))}"
    return text


def _run_config(given: Sequence[str], class_names: str) -> config.Config:
    """Return the settings of the run that the site must fit; end the command if they cannot be read."""
    if class_names:
        end(2, "--class-names and --run-config are both given, allowed: one of them; the settings name the classes")
    try:
        return site_check.read_run_config(given)
    except config.ConfigError as error:
        end(2, str(error))


def _check_fit(name: str, node: Mapping[str, Any], run: config.Config) -> None:
    """Print that a site fits a run, or end the command with the reason why it does not."""
    try:
        with displayed("checking that the site fits the run", sys.stderr):
            fit = site_check.fit(run, node)
        print(f"fits the run: {fit}", flush=True)
    except config.ConfigError as error:
        end(2, str(error))
    except data.DataError as error:
        end(2, f"{name} does not fit the run: {' '.join(str(error).split())}")
