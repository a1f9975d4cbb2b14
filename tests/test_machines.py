"""Real machines: keys, the server, the sites; what bad input gets. The real thing is in test_deployment.py."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import ssl
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import typer
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_ssh_private_key
from flwr.cli.supernode.register import try_load_public_key
from flwr.common.config import parse_config_args
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from hypothesis import HealthCheck, given, settings, strategies as st
from sklearn.datasets import load_digits
from typer.testing import CliRunner

from kindred import InlineGrid
from kindred.client_app.app import app as client_app
from kindred.data import DataError, Sites
from kindred.engine.roster import REGISTERED, TooFewClients
from kindred.server_app.app import prepare
from kindred.server_app.cli.run import app
from kindred.server_app.deployment import (
    keys as keys_command,
    registration as site_registration,
    server as server_command,
    site as site_command,
    supernode,
)
from kindred.server_app.deployment.certificates import load_certificates
from kindred.server_app.deployment.connection import Link, clock_fault, faults
from kindred.server_app.deployment.processes import environment as process_environment
from kindred.server_app.deployment.server import check_server_keys
from kindred.server_app.deployment.site import client_id, node_config
from kindred.server_app.deployment.site_check import fit, read_run_config

from .machines import free_port, wait_until

IN_ANY_TIME = settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)


def kindred(*arguments: object, code: int = 0) -> str:
    """Run a command here; what it says, in which errors come last."""
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == code, result.output
    return result.stdout + result.stderr


def write_digits(path: Path, first: int = 0) -> Path:
    digits = load_digits()
    x, y = digits.images[first : first + 60].astype(np.float32) / 16, digits.target[first : first + 60]
    np.savez(path, x_train=x[:40], y_train=y[:40], x_test=x[40:], y_test=y[40:])
    return path


@pytest.fixture
def data(tmp_path) -> Path:
    return write_digits(tmp_path / "digits.npz")


# --- keys ---


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


def test_keys_of_the_server_and_of_sites(tmp_path) -> None:
    folder = tmp_path / "keys"
    said = kindred("keys", folder, "--server", "FL.example.org, 192.0.2.7,2001:db8::7", "--sites", "lyon,oslo")
    assert set(contents(folder)) == {
        "ca.crt", "ca.key", "server.crt", "server.key", "lyon.key", "lyon.pub", "oslo.key", "oslo.pub",
    }  # fmt: skip
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.glob("*.key")} == {0o600}
    for command in ("openssl req -x509", "ssh-keygen -t ecdsa -b 384", "fl.example.org", "ca.key is for further"):
        assert command in said

    ca, server = (x509.load_pem_x509_certificate((folder / f"{name}.crt").read_bytes()) for name in ("ca", "server"))
    server.verify_directly_issued_by(ca)
    for name, certificate in (("ca", ca), ("server", server)):
        key = load_pem_private_key((folder / f"{name}.key").read_bytes(), None)
        assert key.public_key() == certificate.public_key()
        assert isinstance(key.curve, ec.SECP384R1)
    assert ca.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert not server.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost", "fl.example.org"]
    assert names.get_values_for_type(x509.IPAddress) == [
        ip_address(text) for text in ("127.0.0.1", "::1", "192.0.2.7", "2001:db8::7")
    ]
    for site in ("lyon", "oslo"):
        key = load_ssh_private_key((folder / f"{site}.key").read_bytes(), None)
        assert isinstance(key.curve, ec.SECP384R1)
        assert try_load_public_key(folder / f"{site}.pub") == public_key_to_bytes(key.public_key())
        assert (folder / f"{site}.pub").read_text().endswith(f" {site}\n")


def test_a_second_call_adds_what_is_missing_and_changes_nothing(tmp_path) -> None:
    folder = tmp_path / "keys"
    kindred("keys", folder, "--server", "fl.example.org", "--sites", "lyon")
    (folder / "lyon.key").unlink()  # it has gone to the site
    before = contents(folder)
    kindred("keys", folder, "--server", "fl.example.org", "--sites", "lyon,oslo")
    after = contents(folder)
    assert after.keys() - before.keys() == {"oslo.key", "oslo.pub"}
    assert {name: after[name] for name in before} == before

    said = kindred("keys", folder, "--server", "other.example.org", code=2)
    assert "fl.example.org" in said
    assert "other.example.org" in said

    (folder / "ca.key").unlink()  # kept apart, which sites' keys do without
    kindred("keys", folder, "--sites", "porto")
    (folder / "server.crt").unlink()
    assert "ca.key is not there" in kindred("keys", folder, "--server", "fl.example.org", code=2)
    assert contents(folder).keys() == (after.keys() | {"porto.key", "porto.pub"}) - {"ca.key", "server.crt"}


def test_a_certificate_of_the_ca_is_made_again_with_its_key(tmp_path) -> None:
    folder = tmp_path / "keys"
    kindred("keys", folder, "--server", "fl.example.org")
    before = contents(folder)
    (folder / "ca.crt").unlink()
    kindred("keys", folder)
    after = contents(folder)
    assert {name for name in after if after[name] != before[name]} == {"ca.crt"}
    ca, server = (x509.load_pem_x509_certificate(after[f"{name}.crt"]) for name in ("ca", "server"))
    server.verify_directly_issued_by(ca)
    for name in ("ca.crt", "ca.key"):
        (folder / name).unlink()
    assert "ca.crt is not there, nor ca.key" in kindred("keys", folder, code=2)


@pytest.mark.parametrize("writes", range(6))
def test_a_call_that_is_cut_short_is_taken_up_by_the_next(writes, tmp_path, monkeypatch) -> None:
    folder, write, left = tmp_path / "keys", keys_command.write_file, [None] * writes
    arguments = ("keys", folder, "--server", "fl.example.org", "--sites", "lyon")

    def cut_short(path, content, mode=0o600):
        if not left:
            (folder / f".{path.stem}.1.partial{path.suffix}").write_bytes(content[:20])  # as a SIGKILL leaves it
            raise KeyboardInterrupt
        left.pop()
        write(path, content, mode)

    with monkeypatch.context() as patch:
        patch.setattr(keys_command, "write_file", cut_short)
        CliRunner().invoke(app, list(map(str, arguments)))
    before = contents(folder)
    assert len([name for name in before if "partial" not in name]) == writes
    kindred(*arguments)
    after = contents(folder)
    assert after.keys() == {"ca.crt", "ca.key", "server.crt", "server.key", "lyon.key", "lyon.pub"}
    assert all(after[name] == content for name, content in before.items() if "partial" not in name)
    check_server_keys(folder, "fl.example.org")
    key = load_ssh_private_key((folder / "lyon.key").read_bytes(), None)
    assert try_load_public_key(folder / "lyon.pub") == public_key_to_bytes(key.public_key())


def certificates(folder: Path) -> tuple[x509.Certificate, x509.Certificate]:
    return load_certificates(folder)  # checks that they belong together


ONE_DAY = timedelta(days=1)


def test_a_renewed_certificate_of_the_server_is_for_the_same_key_and_names_and_sites_need_nothing(
    tmp_path, monkeypatch
) -> None:
    folder = tmp_path / "keys"
    with monkeypatch.context() as patch:
        patch.setattr(keys_command, "SERVER_DAYS", 0)
        kindred("keys", folder, "--server", "fl.example.org,192.0.2.7", "--sites", "lyon")
    before, (_, old) = contents(folder), certificates(folder)
    said = kindred("keys", "renew", folder)
    after, (_, new) = contents(folder), certificates(folder)
    assert {name for name in before | after if before.get(name) != after.get(name)} == {"server.crt"}
    assert [each for each in new.extensions] == [each for each in old.extensions]
    assert new.subject == old.subject
    assert new.not_valid_after_utc - old.not_valid_after_utc > (keys_command.SERVER_DAYS - 1) * ONE_DAY
    check_server_keys(folder, "fl.example.org")
    assert f"made {folder}/server.crt, valid until {new.not_valid_after_utc:%Y-%m-%d}\n" in said
    assert "the server: start `kindred server` again" in said
    assert "the sites: nothing" in said


def test_the_certificate_of_the_ca_is_renewed_where_it_would_end_before_the_servers(tmp_path, monkeypatch) -> None:
    folder = tmp_path / "keys"
    with monkeypatch.context() as patch:
        patch.setattr(keys_command, "CA_DAYS", keys_command.SERVER_DAYS - 1)
        kindred("keys", folder, "--server", "fl.example.org", "--sites", "lyon")
    before, (old_ca, old) = contents(folder), certificates(folder)
    said = kindred("keys", "renew", folder)
    after, (new_ca, new) = contents(folder), certificates(folder)
    assert {name for name in before | after if before.get(name) != after.get(name)} == {"ca.crt", "server.crt"}
    assert [each for each in new_ca.extensions] == [each for each in old_ca.extensions]
    assert new_ca.not_valid_after_utc > new.not_valid_after_utc
    old.verify_directly_issued_by(new_ca)  # a site with either ca.crt gets on with either server.crt
    new.verify_directly_issued_by(old_ca)
    assert "copy server.crt and ca.crt into it first" in said
    until = f"{old_ca.not_valid_after_utc:%Y-%m-%d}"
    assert f"the sites: copy ca.crt to each, in place of its own, which is valid until {until}; then start " in said


@pytest.mark.parametrize("writes", range(2))
def test_a_renewal_that_is_cut_short_leaves_what_belongs_together(writes, tmp_path, monkeypatch) -> None:
    folder, write, left = tmp_path / "keys", keys_command.write_file, [None] * writes
    with monkeypatch.context() as patch:
        patch.setattr(keys_command, "CA_DAYS", 30)
        kindred("keys", folder, "--server", "fl.example.org")
    before = contents(folder)

    def cut_short(*arguments):
        if not left:
            raise KeyboardInterrupt
        left.pop()
        write(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(keys_command, "write_file", cut_short)
        CliRunner().invoke(app, ["keys", "renew", str(folder)])
    assert [name for name, content in contents(folder).items() if content != before[name]] == ["server.crt"][:writes]
    check_server_keys(folder, "fl.example.org")
    assert "the sites: copy ca.crt to each" in kindred("keys", "renew", folder)


# --- bad input ---


@pytest.fixture(scope="module")
def made_keys(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "keys"
    kindred("keys", folder, "--server", "fl.example.org", "--sites", "lyon")
    return folder


@pytest.fixture
def keys(tmp_path, made_keys) -> Path:
    """A copy that a test may change."""
    return shutil.copytree(made_keys, tmp_path / "keys")  # with the permissions


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("keys new", ["--server", "not given"]),
        ("keys new --server fl_example", ["--server", "fl_example"]),
        ("keys new --server 300.1.1.1", ["--server", "300.1.1.1"]),
        ("keys new --server 0.0.0.0", ["--server", "0.0.0.0"]),
        ("keys new --server localhost --sites ly/on", ["--sites", "ly/on", "letters"]),
        ("keys new --server localhost --sites .lyon", ["--sites", ".lyon", "letters"]),
        ("keys new --server localhost --sites ca", ["--sites", "ca"]),
        ("keys new --server localhost --sites lyon,Lyon", ["--sites", "lyon", "twice"]),
        ("keys open --server localhost", ["open", "chmod 700"]),
        ("keys renew nowhere", ["nowhere/server.crt", "No such file"]),
        ("keys renew KEYS --sites oslo", ["--sites", "renew DIR"]),
        ("keys KEYS KEYS", ["allowed: DIR, or renew DIR"]),
        ("keys digits.npz --server localhost", ["digits.npz", "folder"]),
        ("server --keys KEYS --insecure", ["--keys", "--insecure"]),
        ("server --host 0.0.0.0", ["--host", "0.0.0.0", "--keys"]),
        ("server --host fl.example.org", ["--host", "fl.example.org", "--keys"]),
        ("server --host a/b", ["--host", "a/b"]),
        ("server --port 0", ["--port", "0", "1 to 65535"]),
        ("server --port 70000", ["--port", "70000", "1 to 65535"]),
        ("server --keys nowhere", ["nowhere/ca.crt", "No such file"]),
        ("server --keys KEYS --host 192.0.2.9", ["server.crt", "192.0.2.9", "fl.example.org"]),
        ("server --port TAKEN --state state", ["--port", "TAKEN", "127.0.0.1"]),
        ("server --insecure --host 192.0.2.9 --state state", ["--port", "192.0.2.9"]),
        ("site ly/on --server localhost:1 --data-dir digits.npz", ["NAME", "ly/on", "letters"]),
        ("site lyon --server localhost --data-dir digits.npz", ["--server", "localhost", "HOST:PORT"]),
        ("site lyon --server localhost:70000 --data-dir digits.npz", ["--server", "70000", "65535"]),
        ("site lyon --server http://localhost:1 --data-dir digits.npz", ["--server", "http://localhost:1"]),
        ("site lyon --server fl.example.org:1 --data-dir digits.npz", ["--server", "fl.example.org", "--ca", "--key"]),
        ("site lyon --server localhost:1 --data-dir digits.npz --key KEYS/lyon.key", ["--ca", "not given"]),
        ("site lyon --server localhost:1 --data-dir digits.npz --insecure --ca KEYS/ca.crt", ["--insecure", "--ca"]),
        ("site lyon --server localhost:1 --data-dir digits.npz --ca KEYS/lyon.pub --key KEYS/lyon.key", ["lyon.pub"]),
        ("site lyon --server localhost:1 --data-dir digits.npz --ca KEYS/ca.crt --key KEYS/ca.key", ["ca.key"]),
        ("site lyon --server localhost:1 --data-dir digits.npz --ca KEYS/ca.crt --key lent.key", ["lent.key", "chmod"]),
        ("site lyon --server localhost:1 --data-dir nowhere", ["data-dir", "nowhere"]),
        ("site lyon --server localhost:1 --data-dir digits.npz --public-data nowhere", ["public-data", "nowhere"]),
        ("site lyon --server localhost:1 --data-dir digits.npz --public-data large.npz", ["1x9x9", "1x8x8"]),
        ("site lyon --server localhost:1 --data-dir digits.npz --threads 0", ["--threads", "0", str(os.cpu_count())]),
        ("site lyon --server localhost:1 --data-dir digits.npz --port 0", ["--port", "0", "1 to 65535"]),
        ("site lyon --server localhost:1 --data-dir digits.npz --state-dir digits.npz", ["digits.npz", "folder"]),
    ],
)
def test_bad_input_gets_one_line_and_code_2_and_starts_nothing(
    arguments, says, tmp_path, data, made_keys, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("something was started"))
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)
    (tmp_path / "lent.key").write_bytes((made_keys / "lyon.key").read_bytes())
    (tmp_path / "lent.key").chmod(0o644)
    np.savez(tmp_path / "large.npz", x=np.zeros((3, 9, 9), np.uint8))
    before = {path.name for path in tmp_path.iterdir()}
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        put = {"KEYS": str(made_keys), "TAKEN": port}
        result = CliRunner().invoke(app, re.sub("KEYS|TAKEN", lambda found: put[found[0]], arguments).split())
    assert result.exit_code == 2, result.output
    *warning, error = result.stderr.splitlines()
    assert all("without TLS" in line for line in warning)
    assert error.startswith("kindred: ")
    for word in says:
        assert put.get(word, word) in error
    assert {path.name for path in tmp_path.iterdir()} - before <= {"state"}


def test_server_keys_that_do_not_belong_together_are_refused(tmp_path, made_keys) -> None:
    def with_another(name: str, content: bytes) -> str:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        for path in made_keys.glob("*.*"):
            (folder / path.name).write_bytes(path.read_bytes())
        (folder / name).write_bytes(content)
        return kindred("server", "--keys", folder, "--state", tmp_path / "state", code=2)

    other = tmp_path / "other"
    kindred("keys", other, "--server", "fl.example.org")
    assert "not the key of server.crt" in with_another("server.key", (other / "server.key").read_bytes())
    assert "not signed by ca.crt" in with_another("ca.crt", (other / "ca.crt").read_bytes())
    assert "oslo.pub" in with_another("oslo.pub", b"no key")
    assert "server.key" in with_another("server.key", b"no key")


def test_a_certificate_that_is_over_is_refused(tmp_path, monkeypatch) -> None:
    folder = tmp_path / "keys"
    monkeypatch.setattr(keys_command, "SERVER_DAYS", 0)
    kindred("keys", folder, "--server", "fl.example.org")
    said = kindred("server", "--keys", folder, "--state", tmp_path / "state", code=2)
    assert "server.crt is valid from" in said
    assert f"`kindred keys renew {folder}`" in said


def test_a_site_refuses_a_ca_that_is_over(tmp_path, data, monkeypatch) -> None:
    folder = tmp_path / "keys"
    monkeypatch.setattr(keys_command, "CA_DAYS", 0)
    kindred("keys", folder, "--server", "fl.example.org", "--sites", "lyon")
    said = kindred(
        "site",
        "lyon",
        "--server",
        "localhost:1",
        "--data-dir",
        data,
        "--ca",
        folder / "ca.crt",
        "--key",
        folder / "lyon.key",
        "--check",
        code=2,
    )
    assert f"{folder}/ca.crt is valid from" in said
    assert "this machine's clock says" in said


# --- who can change or read keys ---


@pytest.mark.parametrize(
    ("name", "mode", "todo"),
    [
        (".", 0o777, "chmod go-w"), (".", 0o720, "chmod go-w"), ("lyon.pub", 0o646, "chmod go-w"),
        ("server.crt", 0o664, "chmod go-w"), ("server.key", 0o604, "chmod go="), ("ca.key", 0o640, "chmod go="),
        ("lyon.key", 0o602, "chmod go="), ("notes", 0o666, "chmod go-w"),
    ],
)  # fmt: skip
def test_keys_that_others_can_change_or_read_are_refused(name, mode, todo, keys, tmp_path) -> None:
    (keys / "notes").write_text("of the keys")
    check_server_keys(keys, "fl.example.org")  # all is well
    path = keys / name
    path.chmod(mode)
    said = kindred("server", "--keys", keys, "--state", tmp_path / "state", code=2)
    assert said.startswith(f"kindred: {path} has permissions {mode:04o}, allowed: ")
    assert said.endswith(f"; {todo} {path}\n")
    assert said.count("\n") == 1
    subprocess.run(shlex.split(said.rpartition("; ")[2]), check=True)
    check_server_keys(keys, "fl.example.org")


def give_away(path: Path, monkeypatch) -> None:
    """Have a file belong to another user: really where that is possible, else all files do."""
    if os.geteuid() == 0:
        os.chown(path, 4711, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 4711)


def test_keys_that_belong_to_somebody_else_are_refused(keys, tmp_path, monkeypatch) -> None:
    give_away(keys / "lyon.pub", monkeypatch)
    said = kindred("server", "--keys", keys, "--state", tmp_path / "state", code=2)
    assert re.match(r"kindred: \S+ belongs to user \d+, allowed: \d+, who runs this, or root; chown \d+ /", said)


@pytest.fixture
def registration(keys, tmp_path, monkeypatch):
    """What registers keys, but for Flower; `registered` has names, with those that runs knew of at that moment."""
    file = tmp_path / "registered.json"
    registered = []

    def register(paths, *_):
        registered.extend((path.stem, json.loads(file.read_text())) for path in paths)
        return []

    monkeypatch.setattr(site_registration, "register_sites", register)
    made = site_registration.Registration(keys, {REGISTERED: str(file)}, tmp_path, "mark")
    return SimpleNamespace(look=made.look, registered=registered, file=file)


def test_runs_know_the_names_of_keys_before_these_are_registered(registration, keys) -> None:
    assert json.loads(registration.file.read_text()) == ["lyon"]  # from the start
    registration.look()
    kindred("keys", keys, "--sites", "oslo,bergen")
    (keys / "lyon.pub").unlink()
    registration.look()
    assert registration.registered == [
        ("lyon", ["lyon"]), ("bergen", ["bergen", "lyon", "oslo"]), ("oslo", ["bergen", "lyon", "oslo"]),
    ]  # fmt: skip
    site_registration.Registration(keys, {REGISTERED: str(registration.file)}, keys, "mark")
    assert json.loads(registration.file.read_text()) == ["bergen", "lyon", "oslo"]  # as long as the database knows it


def test_no_key_is_taken_that_others_can_put_there_or_change(registration, keys, capsys, monkeypatch) -> None:
    registration.look()
    registration.registered.clear()
    keys.chmod(0o777)
    shutil.copy(keys / "lyon.pub", keys / "mallory.pub")
    (keys / "mallory.pub").write_text((keys / "lyon.pub").read_text() + "again\n")
    (keys / "mallory.pub").chmod(0o666)
    assert [registration.look(), registration.look()] == [True, True]
    assert re.fullmatch(
        rf"kindred: {keys} has permissions 0777, .*; until then no key is taken from it\n", capsys.readouterr().err
    )
    keys.chmod(0o700)
    registration.look()
    assert f"{keys}/mallory.pub has permissions 0666, " in capsys.readouterr().err
    assert json.loads(registration.file.read_text()) == ["lyon"]
    (keys / "mallory.pub").chmod(0o644)
    with monkeypatch.context() as patch:
        give_away(keys / "mallory.pub", patch)
        registration.look()
    assert "belongs to user" in capsys.readouterr().err
    assert registration.registered == []
    os.chown(keys / "mallory.pub", os.geteuid(), -1)
    registration.look()
    assert registration.registered == [("mallory", ["lyon", "mallory"])]


def run_server(monkeypatch, days: float, *arguments: object) -> tuple[dict[str, str], list[str]]:
    """Run a server without Flower for some days; the environment of its SuperLink, and warnings."""
    started, now = [], [1000.0]

    def start(command, settings, directory, mark, hook):
        started.append(process_environment(settings, mark))
        return SimpleNamespace(poll=lambda: 0 if now[0] > 1000 + days * server_command.DAY else None, returncode=0)

    def sleep(_):
        now[0] += server_command.DAY / 4

    with monkeypatch.context() as patch:
        patch.setattr(server_command, "start_process", start)
        patch.setattr(server_command, "_wait_until_it_answers", lambda *_: None)
        patch.setattr(site_registration, "register_sites", lambda *_: [])
        patch.setattr(server_command, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
        said = kindred("server", "--port", free_port(), *arguments, code=1)
    (environment,) = started
    return environment, [line for line in said.splitlines() if "valid until" in line]


def test_runs_are_told_where_the_names_of_keys_are_and_nothing_without_keys(keys, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("KINDRED_REGISTERED", "/of/another/server.json")
    state = tmp_path / "state"
    environment, _ = run_server(monkeypatch, 0, "--keys", keys, "--host", "127.0.0.1", "--state", state)
    assert environment["KINDRED_REGISTERED"] == str(state / "registered.json")
    assert json.loads((state / "registered.json").read_text()) == ["lyon"]
    environment, _ = run_server(monkeypatch, 0, "--insecure", "--state", state)
    assert "KINDRED_REGISTERED" not in environment


def test_a_server_warns_once_a_day_of_certificates_that_end_soon(tmp_path, monkeypatch) -> None:
    folder = tmp_path / "keys"
    with monkeypatch.context() as patch:
        patch.setattr(keys_command, "SERVER_DAYS", 59)
        kindred("keys", folder, "--server", "fl.example.org")
    _, warnings = run_server(monkeypatch, 2.5, "--keys", folder, "--state", tmp_path / "state")
    assert len(warnings) == 3
    pattern = rf"kindred: {folder}/server.crt is valid until 20\S+, for 58 more days: `kindred keys renew {folder}`"
    assert all(re.match(pattern, warning) for warning in warnings)
    kindred("keys", "renew", folder)
    assert run_server(monkeypatch, 2.5, "--keys", folder, "--state", tmp_path / "state")[1] == []


# --- what keeps a site from taking part ---


@contextmanager
def answering(
    keys: Path | None, behind: float = 0.0, health: int = 200, refusal: tuple[int, object] = (500, {})
) -> Iterator[int]:
    """A server whose clock is so many seconds behind, and that refuses to activate SuperNodes; its port."""

    class Handler(BaseHTTPRequestHandler):
        def date_time_string(self, timestamp=None):
            return formatdate(time.time() - behind, usegmt=True)

        def answer(self, status, content):
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(content).encode())

        def do_GET(self):
            self.answer(health if self.path == "/health" else 404, {})

        def do_POST(self):
            self.answer(*refusal)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("0.0.0.0", 0), Handler) as server:
        if keys:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(keys / "server.crt", keys / "server.key")
            server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server.server_port
        server.shutdown()


def link(keys: Path, port: int) -> Link:
    return Link("localhost", port, keys / "ca.crt", keys / "lyon.key")


@pytest.mark.parametrize(
    ("behind", "says"),
    [
        (0, None), (4, None), (-300, None),
        (12, r"about 1[123] s ahead of the server's"), (4000, r"about (3999|400[01]) s ahead of the server's"),
        (-315, r"about 31[456] s behind the server's"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("secure", [True, False])
def test_a_clock_that_flower_does_not_tolerate_is_named(behind, says, secure, made_keys) -> None:
    with answering(made_keys if secure else None, behind) as port:
        found = list(faults(link(made_keys, port) if secure else Link("localhost", port)))
    assert len(found) == (says is not None)
    for line in found:
        assert re.match(f"this machine's clock is {says}, allowed: up to 5 s ahead or 305 s behind; set it, ", line)


@IN_ANY_TIME
@given(st.floats(-1000, 1000), st.floats(0, 30), st.floats(0, 1), st.floats(0, 1))
def test_a_clock_is_called_wrong_only_if_it_is_and_right_only_if_it_may_be(ahead, travel, share, late) -> None:
    now, resolution = 1.7e9, 2.0
    sent, received = now + ahead - share * travel, now + ahead + (1 - share) * travel
    date = formatdate(now - late, usegmt=True)  # made anew once a second, and without fractions
    if -305 <= ahead <= 5:
        assert clock_fault(date, sent, received) is None
    elif not -305 - resolution - travel - 0.01 <= ahead <= 5 + resolution + travel + 0.01:
        assert f"s {'ahead of' if ahead > 0 else 'behind'} the server's" in clock_fault(date, sent, received)
    assert "allowed: up to 5 s ahead" in clock_fault(date, sent, received, refused=True)


def test_without_a_date_a_clock_is_wrong_where_the_server_refuses_what_was_signed_now() -> None:
    assert clock_fault("", 0, 1) is None
    assert "clock is not that of the server's" in clock_fault("", 0, 1, refused=True)


IN_USE = b"Exit Code: 305\nFailed to initialize the connection to the SuperLink.\n[code: 2004] Failed to activate Supe"


@pytest.mark.parametrize(
    ("refusal", "output", "says"),
    [
        ((412, {"code": 2004, "detail": "no"}), IN_USE, "the server does not know the key KEYS/lyon.key, or has w"),
        ((412, {"code": 2003, "detail": "no"}), IN_USE, "the key KEYS/lyon.key is in use by another SuperNode, or w"),
        ((412, {"code": 2003, "detail": "no"}), b"ERROR :      Exit Code: 604", None),  # it says itself what is wrong
        ((401, {"detail": "Invalid SuperNode authentication"}), b"", "this machine's clock is about "),
        ((404, {}), IN_USE, None),
        ((412, {"code": 2004, "detail": "no"}), None, None),  # nothing has ended yet
    ],
)
def test_what_the_server_says_of_a_key(refusal, output, says, made_keys) -> None:
    with answering(made_keys, refusal=refusal) as port:
        found = list(faults(link(made_keys, port), output))
    assert len(found) == (says is not None)
    for line in found:
        assert line.startswith(says.replace("KEYS", str(made_keys)))


def test_a_certificate_that_the_site_does_not_trust_is_named_with_the_reason(made_keys, keys, tmp_path) -> None:
    other = tmp_path / "other"
    kindred("keys", other, "--server", "localhost")
    with answering(other) as port:
        (line,) = faults(link(keys, port))
        assert f"localhost:{port} is not signed by the CA of {keys}/ca.crt (" in line
        (line,) = faults(Link("localhost", port))
        assert "does not answer without TLS" in line
        assert "needs --ca and --key" in line
    with answering(keys) as port:
        (line,) = faults(link(keys, port)._replace(host=ip_address("127.0.0.2")))
        assert f"127.0.0.2:{port} is not for this name (IP address mismatch" in line
        (keys / "ca.crt").write_text("half of")
        with pytest.raises(typer.Exit):
            list(faults(link(keys, port)))
    with answering(None) as port:
        (line,) = faults(link(made_keys, port))
        assert f"localhost:{port} does not speak TLS" in line
    with answering(made_keys, health=404) as port:
        (line,) = faults(link(made_keys, port))
        assert "answers with status 404" in line
    (line,) = faults(link(made_keys, free_port()))
    assert "cannot be reached (Connection refused), and is tried again" in line


@pytest.mark.parametrize(
    ("ca_days", "server_days", "says"),
    [
        (3650, 61, []),
        (3650, 30, [r"the certificate of localhost:\d+ is valid until \S+, for 29 more days: .*`kindred keys renew`"]),
        (59, 30, [r"\S+/ca.crt is valid until \S+, for 58 more days: take the ca", r"the certificate of localhost"]),
        (3650, 0, [r"the certificate of localhost:\d+ is not valid on \S+, the date .* \(certificate has expired\)"]),
        (0, 30, [r"\S+/ca.crt is valid from .*: take the ca.crt that the server has now"]),
    ],
)
def test_a_site_warns_of_certificates_that_end_soon_or_have(ca_days, server_days, says, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(keys_command, "CA_DAYS", ca_days)
    monkeypatch.setattr(keys_command, "SERVER_DAYS", server_days)
    kindred("keys", tmp_path / "keys", "--server", "fl.example.org", "--sites", "lyon")
    with answering(tmp_path / "keys") as port:
        found = list(faults(link(tmp_path / "keys", port)))
    assert len(found) == len(says)
    for line, pattern in zip(found, says):
        assert re.match(pattern, line)


def test_what_a_supernode_writes_is_passed_on_at_once_and_its_end_kept(capfdbinary, monkeypatch) -> None:
    monkeypatch.setattr(supernode, "KEPT", 6)
    code = (
        "from sys import stderr, stdin; stderr.write('first, no'); stderr.flush(); stdin.read(); "
        "stderr.write(' line\\nlast\\n')"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    output = supernode.Output(process.stderr)
    passed_on = []
    wait_until(lambda: passed_on.append(capfdbinary.readouterr().err) or b"".join(passed_on) == b"first, no", 20)
    process.stdin.close()
    output.join()
    process.wait()
    assert capfdbinary.readouterr().err == b" line\nlast\n"
    assert output.end == b"\nlast\n"


# --- a site that is only checked ---


def test_check_tells_what_the_server_learns_and_starts_nothing(tmp_path, data, made_keys, monkeypatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("something was started"))
    np.savez(tmp_path / "public.npz", x=np.zeros((30, 8, 8), np.float32))
    said = kindred(
        "site", "lyon", "--server", "fl.example.org:8000", "--data-dir", data, "--public-data", tmp_path / "public.npz",
        "--ca", made_keys / "ca.crt", "--key", made_keys / "lyon.key", "--state-dir", tmp_path / "state",
        "--threads", 1, "--port", 9123, "--no-share-model", "--report-weights", "--check",
    )  # fmt: skip
    assert "40 images of 1x8x8 to train on, 20 to test on, labels up to 9" in said
    assert "told to the server at first: the name lyon, 40 training samples, " in said
    assert "that no other site may have its model, which methods the run's program knows, with PerFed-CKT that " in said
    assert "it has 30 public images and their " in said
    command = said.splitlines()[-1]
    assert "OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 " in command
    assert "FLWR_TELEMETRY_ENABLED=0 " in command
    assert f"flower-supernode --superlink fl.example.org:8000 --root-certificates {made_keys}/ca.crt " in command
    assert f"--auth-supernode-private-key {made_keys}/lyon.key --host 127.0.0.1 --port 9123 --node-config " in command
    given = re.search("--node-config '(.*)'$", command)[1]
    assert parse_config_args([given]) == {
        "client-id": "lyon", "data-dir": str(data), "public-data": str(tmp_path / "public.npz"),
        "state-dir": str(tmp_path / "state"), "share-model": False, "report-weights": True,
    }  # fmt: skip
    assert not (tmp_path / "state").exists()


RUN = 'dataset="sites" image-shape="1x8x8" num-classes=10'


def site_for(run: str, data: Path, *options: object, code: int = 0) -> str:
    return kindred(
        "site",
        "lyon",
        "--server",
        "localhost:1",
        "--data-dir",
        data,
        "--insecure",
        "--run-config",
        run,
        *options,
        code=code,
    )


@pytest.mark.parametrize(
    ("run", "options", "says"),
    [
        (RUN, [], "heurfedamp with digits-cnn, 10 classes, 40 training samples"),
        (f'{RUN} strategy="fedem"', [], "fedem with digits-cnn, 10 classes, 40 training samples"),
        (f'{RUN} strategy="federico"', ["--no-share-model"], "federico with digits-cnn, 10 classes, 40 training"),
        (f'{RUN} strategy="feddf" public-data="/at/the/server.npz" public-size=500', [], "feddf with digits-cnn, "),
        (
            f'{RUN} strategy="perfed-ckt" model="digits-cnn,mcmahan-cnn"',
            ["--public-data", "public.npz"],
            "10 classes, 40 training samples, 30 public images",
        ),
    ],
)
def test_a_site_that_fits_a_run_is_told_so(run, options, says, data, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez("public.npz", x=np.zeros((30, 8, 8), np.float32))
    Path("run.toml").write_text(run.replace(" ", "\n"))
    for run_config in (run, "run.toml"):
        said = site_for(run_config, data, *options, "--check")
        assert "fits the run: " in said and says in said


@pytest.mark.parametrize(
    ("run", "options", "says"),
    [
        ('dataset="sites" image-shape="1x8x8" num-classes=5', [], ["does not fit", "labels go up to 9", "5 classes"]),
        ('dataset="sites" image-shape="1x28x28" num-classes=10', [], ["does not fit", "are 1x8x8, expected 1x28x28"]),
        ('dataset="sites" image-shape="1x8x8" class-names="a,b,c"', [], ["has a label 9", "class-names has 3 names"]),
        (f'{RUN} strategy="fedavg"', ["--no-share-model"], ["does not fit", "share-model is false", "fedavg mixes"]),
        (f'{RUN} strategy="kindred"', ["--no-share-model"], ["does not fit", "share-model is false", "kindred mixes"]),
        (f'{RUN} strategy="perfed-ckt"', [], ["does not fit", "public-data is not in the node config"]),
        (f'{RUN} strategy="perfed-ckt"', ["--public-data", "large.npz"], ["public-data", "1x9x9", "1x8x8"]),
        (f'{RUN} strategy="feddf"', [], ["would not begin", "public-data is 'auto'", "server's machine"]),
        (f'{RUN} model="digits-cnn,mcmahan-cnn"', [], ["would not begin", "model is", "one network"]),
        (f'{RUN} model="digits-cnm"', [], ["model is 'digits-cnm'", "digits-cnn"]),
        (f'{RUN} strategy="fedavgg"', [], ["strategy is 'fedavgg'"]),
        (f"{RUN} num-round=3", [], ["unknown setting num-round"]),
        ('dataset="sites" num-classes=10', [], ["would not begin", "image-shape is ''", "1x28x28"]),
        ('image-shape="1x8x8" num-classes=10', [], ["dataset is 'digits'", "sites"]),
        (f"{RUN} strategy=fedavg", [], ["--run-config", "quotation marks"]),
        ("fedavg", [], ["--run-config is 'fedavg'", ".toml", "key=value"]),
        ("nowhere.toml", [], ["--run-config is 'nowhere.toml'", "No such file"]),
        (RUN, ["--class-names", "a,b"], ["--class-names", "--run-config", "one of them"]),
    ],
)
@pytest.mark.parametrize("check", [["--check"], []], ids=["checked", "started"])
def test_a_site_that_does_not_fit_a_run_is_told_why_and_is_not_started(
    run, options, says, check, data, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("something was started"))
    np.savez("large.npz", x=np.zeros((3, 9, 9), np.uint8))
    *_, error = site_for(run, data, *options, *check, code=2).splitlines()
    assert error.startswith("kindred: ") and all(word in error for word in says), error


def test_a_site_that_fits_a_run_is_started_without_check(data, tmp_path, monkeypatch) -> None:
    started = []
    monkeypatch.setattr(site_command, "keep_running", lambda command, *_: started.append(command()))
    site_for(RUN, data, "--state-dir", tmp_path / "state")
    assert len(started) == 1


def test_what_is_found_before_a_run_is_what_the_server_would_say_in_it(data, tmp_path, caplog) -> None:
    """The same words from a strategy that meets the site."""
    run = read_run_config([f'{RUN} strategy="fedavg"'])
    node = {"client-id": "lyon", "data-dir": str(data), "share-model": False}
    grid = InlineGrid(client_app, 1, run.run_config())
    for context in grid._contexts.values():
        context.node_config = node
    strategy, initial_arrays = prepare(replace(run, min_available_clients=1), Sites.of(run.run_config()))
    with pytest.raises(TooFewClients):
        strategy.start(grid, initial_arrays, 1)
    with pytest.raises(DataError) as refused:
        fit(run, node)
    assert strategy.history.left_out == {"lyon": str(refused.value)}


@pytest.mark.parametrize(
    ("server", "options", "warned"),
    [
        ("localhost:1", [], "within this machine"),
        ("[::1]:1", ["--insecure"], "within this machine"),
        ("192.0.2.9:1", ["--insecure"], "FOR ALL TO READ"),
    ],
)
def test_without_tls_a_line_says_so(server, options, warned, data) -> None:
    result = CliRunner().invoke(app, ["site", "lyon", "--server", server, "--data-dir", str(data), *options, "--check"])
    assert result.exit_code == 0
    assert result.stderr.count("\n") == 1
    assert "without TLS" in result.stderr
    assert warned in result.stderr
    assert f"--superlink {shlex.quote(server)} --insecure" in result.stdout


TEXTS = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=20)


@IN_ANY_TIME
@given(st.dictionaries(st.sampled_from(["a", "b-c", "d"]), TEXTS | st.booleans() | st.integers(0, 2**62)))
def test_a_node_config_reads_back(values) -> None:
    assert parse_config_args([node_config(values)]) == values


def test_whole_numbers_are_numbers_to_the_server() -> None:
    assert [client_id(name) for name in ("0", "12", "012", "lyon", "1.5", "9" * 30)] == [
        0, 12, "012", "lyon", "1.5", "9" * 30,
    ]  # fmt: skip
