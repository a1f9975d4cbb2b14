"""Keys and certificates: how they are made, renewed and registered, and which are refused."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import shutil
import stat
import subprocess
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from types import SimpleNamespace

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_ssh_private_key
from flwr.cli.supernode.register import try_load_public_key
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from typer.testing import CliRunner

from kindred.engine.roster import REGISTERED
from kindred.server_app.cli.commands import app
from kindred.server_app.deployment import (
    keys as keys_command,
    registration as site_registration,
    server as server_command,
)
from kindred.server_app.deployment.certificates import load_certificates
from kindred.server_app.deployment.processes import environment as process_environment
from kindred.server_app.deployment.server import check_server_keys

from .background_commands import free_port
from .deployment_commands import data_fixture, keys_fixture, kindred, made_keys_fixture  # noqa: F401


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith(".")}


def test_git_takes_no_key_into_a_commit(tmp_path) -> None:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    said = kindred("keys", tmp_path / "keys", "--server", "fl.example.org", "--sites", "lyon")
    assert f"is in the git work tree {tmp_path}" in said
    taken = subprocess.run(
        ["git", "-C", tmp_path, "add", "--all", "--dry-run", "."], check=True, stdout=subprocess.PIPE
    )
    assert taken.stdout == b""


def test_keys_are_written_for_the_server_and_sites(tmp_path) -> None:
    folder = tmp_path / "keys"
    said = kindred("keys", folder, "--server", "FL.example.org, 192.0.2.7,2001:db8::7", "--sites", "lyon,oslo")
    assert set(contents(folder)) == {
        "ca.crt", "ca.key", "server.crt", "server.key", "lyon.key", "lyon.pub", "oslo.key", "oslo.pub",
    }  # fmt: skip
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.glob("*.key")} == {0o600}
    for command in ("openssl req -x509", "ssh-keygen -t ecdsa -b 384", "fl.example.org", "ca.key only signs further"):
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
    (folder / "lyon.key").unlink()  # it was moved to the site
    before = contents(folder)
    kindred("keys", folder, "--server", "fl.example.org", "--sites", "lyon,oslo")
    after = contents(folder)
    assert after.keys() - before.keys() == {"oslo.key", "oslo.pub"}
    assert {name: after[name] for name in before} == before

    said = kindred("keys", folder, "--server", "other.example.org", code=2)
    assert "fl.example.org" in said
    assert "other.example.org" in said

    (folder / "ca.key").unlink()  # stored elsewhere; sites' keys do not need it
    kindred("keys", folder, "--sites", "porto")
    (folder / "server.crt").unlink()
    assert "ca.key is missing" in kindred("keys", folder, "--server", "fl.example.org", code=2)
    assert contents(folder).keys() == (after.keys() | {"porto.key", "porto.pub"}) - {"ca.key", "server.crt"}


def test_a_lost_ca_certificate_is_renewed_with_the_same_key(tmp_path) -> None:
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
    assert "ca.crt is missing, and so is ca.key" in kindred("keys", folder, code=2)


@pytest.mark.parametrize("writes", range(6))
def test_an_interrupted_call_is_completed_by_the_next(writes, tmp_path, monkeypatch) -> None:
    folder, write, left = tmp_path / "keys", keys_command.write_or_end, [None] * writes
    arguments = ("keys", folder, "--server", "fl.example.org", "--sites", "lyon")

    def cut_short(path, content, mode=0o600):
        if not left:
            (folder / f".{path.stem}.1.partial{path.suffix}").write_bytes(content[:20])  # as a SIGKILL leaves it
            raise KeyboardInterrupt
        left.pop()
        write(path, content, mode)

    with monkeypatch.context() as patch:
        patch.setattr(keys_command, "write_or_end", cut_short)
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
    return load_certificates(folder)  # this checks that they belong together


ONE_DAY = timedelta(days=1)


def test_a_renewed_server_certificate_has_the_same_key_and_names_and_sites_need_no_change(
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
    assert "the server: restart `kindred server`" in said
    assert "the sites: nothing" in said


def test_the_ca_certificate_is_renewed_if_it_would_end_before_the_server_s(tmp_path, monkeypatch) -> None:
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
    old.verify_directly_issued_by(new_ca)  # a site with either ca.crt accepts either server.crt
    new.verify_directly_issued_by(old_ca)
    assert "copy server.crt and ca.crt into it first" in said
    until = f"{old_ca.not_valid_after_utc:%Y-%m-%d}"
    assert f"the sites: copy ca.crt to each, over its old one, which is valid until {until}; then restart " in said


@pytest.mark.parametrize("writes", range(2))
def test_an_interrupted_renewal_leaves_matching_files(writes, tmp_path, monkeypatch) -> None:
    folder, write, left = tmp_path / "keys", keys_command.write_or_end, [None] * writes
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
        patch.setattr(keys_command, "write_or_end", cut_short)
        CliRunner().invoke(app, ["keys", "renew", str(folder)])
    assert [name for name, content in contents(folder).items() if content != before[name]] == ["server.crt"][:writes]
    check_server_keys(folder, "fl.example.org")
    assert "the sites: copy ca.crt to each" in kindred("keys", "renew", folder)


def test_server_keys_that_do_not_match_are_refused(tmp_path, made_keys) -> None:
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


def test_an_expired_certificate_is_refused(tmp_path, monkeypatch) -> None:
    folder = tmp_path / "keys"
    monkeypatch.setattr(keys_command, "SERVER_DAYS", 0)
    kindred("keys", folder, "--server", "fl.example.org")
    said = kindred("server", "--keys", folder, "--state", tmp_path / "state", code=2)
    assert "server.crt is valid from" in said
    assert f"`kindred keys renew {folder}`" in said


def test_a_site_refuses_an_expired_ca(tmp_path, data, monkeypatch) -> None:
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
    check_server_keys(keys, "fl.example.org")  # accepted
    path = keys / name
    path.chmod(mode)
    said = kindred("server", "--keys", keys, "--state", tmp_path / "state", code=2)
    assert said.startswith(f"kindred: {path} has permissions {mode:04o}, allowed: ")
    assert said.endswith(f"; {todo} {path}\n")
    assert said.count("\n") == 1
    subprocess.run(shlex.split(said.rpartition("; ")[2]), check=True)
    check_server_keys(keys, "fl.example.org")


def give_away(path: Path, monkeypatch) -> None:
    """Give a file to another user; where that is impossible, report every file as another user's."""
    if os.geteuid() == 0:
        os.chown(path, 4711, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 4711)


def test_keys_of_another_user_are_refused(keys, tmp_path, monkeypatch) -> None:
    give_away(keys / "lyon.pub", monkeypatch)
    said = kindred("server", "--keys", keys, "--state", tmp_path / "state", code=2)
    assert re.match(r"kindred: \S+ belongs to user \d+, allowed: \d+, who runs this, or root; chown \d+ /", said)


@pytest.fixture
def registration(keys, tmp_path, monkeypatch):
    """The registration of keys without Flower; `registered` has names, with those that runs knew at that moment."""
    file = tmp_path / "registered.json"
    registered = []

    def register(paths, *_):
        registered.extend((path.stem, json.loads(file.read_text())) for path in paths)
        return []

    monkeypatch.setattr(site_registration, "register_sites", register)
    made = site_registration.Registration(keys, {REGISTERED: str(file)}, tmp_path, "mark")
    return SimpleNamespace(look=made.look, registered=registered, file=file)


def test_runs_know_the_names_of_keys_before_registration(registration, keys) -> None:
    assert json.loads(registration.file.read_text()) == ["lyon"]  # from the start
    registration.look()
    kindred("keys", keys, "--sites", "oslo,bergen")
    (keys / "lyon.pub").unlink()
    registration.look()
    assert registration.registered == [
        ("lyon", ["lyon"]), ("bergen", ["bergen", "lyon", "oslo"]), ("oslo", ["bergen", "lyon", "oslo"]),
    ]  # fmt: skip
    site_registration.Registration(keys, {REGISTERED: str(registration.file)}, keys, "mark")
    assert json.loads(registration.file.read_text()) == ["bergen", "lyon", "oslo"]  # while the database has it


def test_keys_that_others_can_add_or_change_are_not_registered(
    registration, keys, tmp_path, capsys, monkeypatch
) -> None:
    kindred("keys", tmp_path / "others", "--server", "localhost", "--sites", "mallory")
    capsys.readouterr()
    registration.look()
    registration.registered.clear()
    keys.chmod(0o777)
    shutil.copy(tmp_path / "others" / "mallory.pub", keys)
    (keys / "mallory.pub").chmod(0o666)
    assert [registration.look(), registration.look()] == [True, True]
    assert re.fullmatch(
        rf"kindred: {keys} has permissions 0777, .*; until that is fixed no key in it is registered\n",
        capsys.readouterr().err,
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


def full_disk(path, *_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_key_is_registered_once_the_disk_has_room(registration, keys, capsys, monkeypatch) -> None:
    registration.look()
    kindred("keys", keys, "--sites", "oslo")
    with monkeypatch.context() as patch:
        patch.setattr(site_registration, "write_file", full_disk)
        assert [registration.look(), registration.look()] == [False, False]
    said = capsys.readouterr().err
    assert said == (
        f"kindred: {registration.file} cannot be written (No space left on device); "
        "until it is no new key is registered\n"
    )
    assert registration.look()
    assert registration.registered == [("lyon", ["lyon"]), ("oslo", ["lyon", "oslo"])]


def test_a_second_key_of_a_name_is_registered_with_a_warning_that_the_first_is_valid(
    keys, tmp_path, monkeypatch, capsys
) -> None:
    def flwr(command, **_):
        names = command[5::2]
        return SimpleNamespace(
            stdout="".join(json.dumps([name, 0, "SuperNode 7"]) + "\n" for name in names), returncode=0
        )

    monkeypatch.setattr(site_registration.subprocess, "run", flwr)
    settings = {REGISTERED: str(tmp_path / "registered.json")}
    look = site_registration.Registration(keys, settings, tmp_path, "mark").look
    assert look() and capsys.readouterr().err == ""
    for known in (look, site_registration.Registration(keys, settings, tmp_path, "mark").look):  # also after a restart
        for suffix in (".key", ".pub"):
            (keys / f"lyon{suffix}").unlink()
        kindred("keys", keys, "--sites", "lyon")
        capsys.readouterr()
        assert known()
        said = capsys.readouterr()
        assert "lyon is registered as SuperNode 7" in said.out
        assert "lyon was registered with another key before, which stays valid unless it is withdrawn" in said.err


def test_a_second_name_of_a_key_is_not_registered(registration, keys, capsys) -> None:
    registration.look()
    (keys / "abba.pub").write_bytes((keys / "lyon.pub").read_bytes().strip() + b" a comment\n")
    assert [registration.look(), registration.look()] == [True, True]
    assert capsys.readouterr().err.count(f"{keys}/abba.pub holds the key of lyon, allowed: one name for each key") == 1
    assert json.loads(registration.file.read_text()) == ["lyon"]
    assert f"{keys}/lyon.pub holds the key of abba" in kindred("server", "--keys", keys, code=2)


def test_a_full_disk_ends_a_command_with_one_line(keys, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("kindred.server_app.deployment.files.write_file", full_disk)
    assert kindred("keys", tmp_path / "new", "--server", "localhost", code=2) == (
        f"kindred: {tmp_path}/new/ca.key cannot be written (No space left on device)\n"
    )
    said = kindred("server", "--keys", keys, "--port", free_port(), "--state", tmp_path / "state", code=2)
    assert said == f"kindred: {tmp_path}/state/config.toml cannot be written (No space left on device)\n"
    monkeypatch.undo()
    monkeypatch.setattr("kindred.server_app.deployment.server.write_flower_app", full_disk)
    said = kindred("server", "--keys", keys, "--port", free_port(), "--state", tmp_path / "state", code=2)
    assert said == f"kindred: {tmp_path}/state/app cannot be written (No space left on device)\n"


def run_server(monkeypatch, days: float, *arguments: object) -> tuple[dict[str, str], list[str]]:
    """Run a server without Flower for some days; return the environment of its SuperLink, and warnings."""
    started, now = [], [1000.0]

    def start(command, settings, directory, mark, hook):
        started.append(process_environment(settings, mark))
        return SimpleNamespace(
            poll=lambda: 0 if now[0] > 1000 + days * server_command.DAY else None, returncode=0, pid=os.getpid()
        )

    def sleep(_):
        now[0] += server_command.DAY / 4

    with monkeypatch.context() as patch:
        patch.setattr(server_command, "start_process", start)
        patch.setattr(server_command, "wait_until_it_answers", lambda *_: None)
        patch.setattr(site_registration, "register_sites", lambda *_: [])
        patch.setattr(server_command, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
        said = kindred("server", "--port", free_port(), *arguments, code=1)
    (environment,) = started
    return environment, [line for line in said.splitlines() if "valid until" in line]


def test_runs_receive_the_path_of_registered_names_only_with_keys(keys, tmp_path, monkeypatch) -> None:
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
    pattern = rf"kindred: {folder}/server.crt is valid until 20\S+, for 58 more days: run `kindred keys renew {folder}`"
    assert all(re.match(pattern, warning) for warning in warnings)
    kindred("keys", "renew", folder)
    assert run_server(monkeypatch, 2.5, "--keys", folder, "--state", tmp_path / "state")[1] == []
