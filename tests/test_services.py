"""The files of containers and services: their commands are this program's, and reach only what they should."""

from __future__ import annotations

import configparser
import re
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
import yaml
from PIL import Image

from kindred.server_app.cli.commands import app

from .deployment_commands import kindred

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "examples" / "services"
COMPOSE: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text())
SITES = ["lyon", "oslo", "porto"]


def parsed(arguments: list[str]) -> dict[str, Any]:
    """Return the options of a command of `kindred`, which is not executed; an unknown option is an error."""
    command: Any = typer.main.get_command(app)
    name, *rest = arguments
    return command.commands[name].make_context(name, rest).params


def mounted(service: str, folder: Path) -> list[str]:
    """Return a service's command with paths in the container replaced by those in the folder of compose.yaml."""
    places = {
        inside: str(folder / outside)
        for outside, inside in (volume.split(":")[:2] for volume in COMPOSE["services"][service]["volumes"])
    }
    return [places.get(word, word) for word in COMPOSE["services"][service]["command"]]


def test_the_containers_keys_and_checks_of_sites_work_with_what_is_mounted(tmp_path) -> None:
    for part in ("train", "test"):
        for label in ("0", "1"):
            (tmp_path / "data" / "lyon" / part / label).mkdir(parents=True)
            for number in range(2):
                image = np.full((8, 8), 100 * int(label) + number + 10 * (part == "test"), np.uint8)
                Image.fromarray(image).save(tmp_path / "data" / "lyon" / part / label / f"{number}.png")
    (tmp_path / "keys").mkdir(mode=0o700)
    kindred(*mounted("keys", tmp_path))
    said = kindred(*mounted("lyon", tmp_path), "--check")
    assert "lyon: 4 images of 1x8x8 to train on, 4 to test on" in said
    assert (tmp_path / "keys" / "porto.key").exists()
    server = parsed(mounted("server", tmp_path))
    assert (server["keys"], server["host"]) == (str(tmp_path / "keys"), "0.0.0.0")


def test_sites_in_containers_differ_by_name_alone_and_have_nothing_of_another(tmp_path) -> None:
    services = COMPOSE["services"]
    assert list(services) == ["keys", "server", *SITES]
    for name in SITES:
        expected = yaml.safe_dump(services["lyon"], sort_keys=True).replace("lyon", name)
        assert yaml.safe_dump(services[name], sort_keys=True) == expected
        assert {volume.split(":")[0] for volume in services[name]["volumes"]} == {
            "./keys/ca.crt", f"./keys/{name}.key", f"./data/{name}", f"./state/{name}"
        }  # fmt: skip


@pytest.mark.parametrize("name", COMPOSE["services"])
def test_containers_have_no_rights_that_they_do_not_need(name) -> None:
    service = COMPOSE["services"][name]
    assert service["user"].startswith("${KINDRED_USER:?") and service["read_only"]
    assert service["cap_drop"] == ["ALL"] and "ports" not in service and "privileged" not in service
    assert COMPOSE["networks"]["default"] == {"internal": True}


def test_the_image_has_the_wheel_and_no_root() -> None:
    lines = [line for line in (FOLDER / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    commands = [line.split(maxsplit=1) for line in lines if line]
    installed = [text for word, text in commands if word == "RUN"]
    assert installed[0] == "pip wheel --no-cache-dir --no-deps --wheel-dir /wheel ."
    assert installed[1].startswith("pip install --no-cache-dir --constraint /wheel/constraints.txt /wheel/*.whl")
    assert (ROOT / "constraints.txt").exists()
    assert [text for word, text in commands if word in ("USER", "ENTRYPOINT")] == ["10001", '["kindred"]']


@pytest.mark.parametrize(("unit", "name"), [("kindred-server.service", "server"), ("kindred-site@.service", "site")])
def test_units_start_a_command_of_this_program_as_another_user(unit, name, tmp_path) -> None:
    text = (FOLDER / unit).read_text()
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment]
    parser.read_string(text)
    program, *arguments = shlex.split(parser["Service"]["ExecStart"])
    assert program == "/opt/kindred/bin/kindred" and arguments[0] == name
    assert parsed(arguments)
    assert parser["Service"]["User"] == "kindred" and parser["Service"]["NoNewPrivileges"] == "yes"
    if shutil.which("systemd-analyze"):
        here = f"{sysconfig.get_path('scripts')}/kindred"
        copy = tmp_path / unit.replace("@.", "@lyon.")
        copy.write_text(re.sub("^User=.*$", "User=root", text.replace(program, here), flags=re.M))
        done = subprocess.run(["systemd-analyze", "verify", copy], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
