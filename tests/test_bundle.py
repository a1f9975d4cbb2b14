"""Apps with code of their own are refused by server and site, and other users of the server's machine start no run."""

from __future__ import annotations

import hashlib
import http.client
import io
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from flwr.cli.build import build_fab_from_disk, build_fab_from_files
from flwr.common.constant import FAB_MAX_SIZE

from kindred.server_app.deployment.bundle import ALLOWED, Refused, check_app, fault_of
from kindred.server_app.flower_app import COMPONENTS, toml, write_flower_app

from .background_commands import KINDRED, SCRIPTS, Machines, free_port, wait_until
from .deployment_commands import kindred, write_digits

ROOT = Path(__file__).resolve().parent.parent


def pyproject(**components: str) -> bytes:
    return f"""[project]
name = "probe"
version = "1.2.3"
[tool.flwr.app]
publisher = "eve"
fab-include = ["**/*"]
[tool.flwr.app.components]
{toml(COMPONENTS | components)}""".encode()


def bundle(files: dict[str, bytes] | None = None, **components: str) -> bytes:
    """An app as Flower packs it."""
    return build_fab_from_files({"pyproject.toml": pyproject(**components), **(files or {})})[0]


def zipped(*files: tuple[str, bytes]) -> bytes:
    """A bundle that Flower would not make."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, content in files:
            archive.writestr(name, content)
    return packed.getvalue()


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize("files", [{}, {"LICENSE": b"free", "README.md": b"# Read me", "more.md": b""}])
def test_an_app_without_code_may_run(files) -> None:
    assert fault_of(bundle(files)) is None


def test_the_app_that_the_server_writes_may_run(tmp_path) -> None:
    assert fault_of(build_fab_from_disk(write_flower_app(tmp_path))) is None


CODE = {
    "evil/client.py": b"", "kindred/__init__.py": b"", "sitecustomize.py": b"", "data.json": b"{}", "x.md/y.py": b"",
    "docs/x.md": b"", "pyproject.toml.py": b"",
}  # fmt: skip


@pytest.mark.parametrize("name", CODE)
def test_an_app_with_any_other_file_is_refused_by_name_and_hash(name) -> None:
    app = bundle({name: CODE[name]})
    start = f"the app eve/probe 1.2.3 (SHA-256 {sha256(app)}) is refused: it holds 1 other files, such as {name}, "
    assert fault_of(app).startswith(start)
    assert fault_of(app, [sha256(b"another")]).startswith(start)
    assert fault_of(app, [sha256(app)]) is None


@pytest.mark.parametrize(
    "components",
    [
        {"clientapp": "kindred.client_app.app:load_site"}, {"clientapp": "http.server:test"},
        {"serverapp": "kindred.client_app.app:app"}, {"agentapp": "kindred.client_app.app:app"},
    ],
)  # fmt: skip
def test_an_app_without_code_that_names_other_components_is_refused(components) -> None:
    app = bundle(**components)
    assert "is refused: its components are {" in fault_of(app)
    assert f"allowed: {COMPONENTS}" in fault_of(app)


def test_what_flower_would_read_in_another_way_or_not_at_all_is_refused() -> None:
    good = pyproject()
    assert fault_of(zipped(("pyproject.toml", good))) is None
    assert "two files of the same name" in fault_of(zipped(("pyproject.toml", good), ("pyproject.toml", good)))
    assert "such as ../README.md" in fault_of(zipped(("pyproject.toml", good), ("../README.md", b"")))
    large = bytes(FAB_MAX_SIZE + 1 - len(good))
    assert f"its files have {FAB_MAX_SIZE + 1} bytes, allowed" in fault_of(
        zipped(("pyproject.toml", good), ("README.md", large))
    )
    whole = bundle()
    damaged = [b"", whole[: len(whole) // 2], zipped(("README.md", b"")), zipped(("pyproject.toml", b"[")),
               zipped(("pyproject.toml", b"\xff")), zipped(("pyproject.toml", b"tool = 3"))]  # fmt: skip
    for app in damaged:
        assert re.fullmatch(rf"the app \? \(SHA-256 {sha256(app)}\) is refused: it cannot be read \(.*", fault_of(app))
    lines = zipped(("pyproject.toml", good.replace(b'"probe"', b'"a\\nkindred: all is well"')))
    assert "\n" not in fault_of(lines, claimed=("eve/a", "1", "b"))


def test_a_run_that_names_another_app_than_it_sends_is_refused(monkeypatch) -> None:
    app = bundle()
    check_app(app, ("eve/probe", "1.2.3", sha256(app)))
    monkeypatch.setenv(ALLOWED, sha256(app))
    for claimed in (
        ("eve/x", "1.2.3", sha256(app)),
        ("eve/probe", "1/../..", sha256(app)),
        ("eve/probe", "1.2.3", "0"),
    ):
        with pytest.raises(Refused, match=f"its run names another one: {re.escape(' '.join(claimed))}"):
            check_app(app, claimed)


def test_a_malformed_hash_ends_the_command() -> None:
    for command in (["server"], ["site", "lyon", "--server", "localhost:1", "--data-dir", "x"]):
        said = kindred(*command, "--allow-app", "DEADBEEF", code=2)
        assert "--allow-app is 'DEADBEEF', allowed: the SHA-256 that a refusal names" in said


# --- a real server with two sites; oslo allows one app ---

SERVER_CODE = """
import time
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()

@app.main()
def main(grid, context):
    while len(nodes := list(grid.get_node_ids())) < 2:
        time.sleep(0.5)
    messages = [Message(RecordDict(), dst_node_id=node, message_type="query.probe") for node in nodes]
    for reply in grid.send_and_receive(messages, timeout=60):
        said = f"ERROR {reply.error.code} {reply.error.reason}" if reply.has_error() else dict(reply.content["got"])
        print("REPLY", said, flush=True)
"""
CLIENT_CODE = """
import os
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()

@app.query("probe")
def probe(message, context):
    open(os.environ["FLWR_HOME"] + "/touched", "a").close()
    return Message(RecordDict({"got": ConfigRecord({"rows": "all"})}), reply_to=message)
"""
PROBE_SERVER, PROBE_CLIENT = "probe_server:app", "probe_client:app"


class Probed(Machines):
    """A server that carries out some apps, the site lyon that allows none of them, and oslo that allows one."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.state = folder / "server"
        self.importable = importable = folder / "importable"
        importable.mkdir()
        (importable / "probe_server.py").write_text(SERVER_CODE)
        (importable / "probe_client.py").write_text(CLIENT_CODE)
        empty = dict.fromkeys(("kindred/__init__.py", "kindred/client_app/__init__.py"), "")
        self.apps = {
            "with-code": self.write("with-code", {"evil.py": CLIENT_CODE}, clientapp="evil:app"),
            "own-kindred": self.write("own-kindred", empty | {"kindred/client_app/app.py": CLIENT_CODE}),
            "without-code": self.write("without-code", {}, clientapp=PROBE_CLIENT),
        }
        allowed = [word for app in self.apps.values() for word in ("--allow-app", sha256(build_fab_from_disk(app)))]
        self.port = free_port()
        path = f"PYTHONPATH={importable}"
        self.start("server", "env", path, KINDRED, "server", "--port", self.port, "--state", self.state, *allowed)
        self.wait_for("server", "the server is ready")
        for site, more in (("lyon", []), ("oslo", allowed[:2])):
            data = write_digits(folder / f"{site}.npz")
            self.start(site, "env", path, KINDRED, "site", site, "--server", f"localhost:{self.port}",
                       "--data-dir", data, "--state-dir", f"state-{site}", "--threads", 1, *more)  # fmt: skip
        for site in ("lyon", "oslo"):
            self.wait_for(site, "SuperNode ID: ")

    def write(self, name: str, code: dict[str, str], **components: str) -> Path:
        files = {"pyproject.toml": pyproject(**{"serverapp": PROBE_SERVER, **components}).decode(), **code}
        for file, text in files.items():
            (self.folder / name / file).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name / file).write_text(text)
        return self.folder / name

    def run(self, app: Path, *more: str) -> subprocess.CompletedProcess[str]:
        quiet = {"FLWR_HOME": str(self.state), "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
        command = [os.path.join(SCRIPTS, "flwr"), "run", str(app), "kindred", *more]
        path = {"PATH": os.pathsep.join([SCRIPTS, os.environ["PATH"]]), "PYTHONPATH": str(self.importable)}
        return subprocess.run(
            command, env=os.environ | quiet | path, text=True, timeout=120,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip


@pytest.fixture(scope="module")
def probed(tmp_path_factory) -> Iterator[Probed]:
    probed = Probed(tmp_path_factory.mktemp("probed"))
    try:
        yield probed
        assert probed.end() == dict.fromkeys(("server", "lyon", "oslo"), 0)
    finally:
        probed.kill()


@pytest.mark.deployment
@pytest.mark.parametrize("name", ["with-code", "own-kindred", "without-code"])
def test_a_site_refuses_what_it_has_not_installed_before_it_is_unpacked(probed, name) -> None:
    app = probed.apps[name]
    digest = sha256(build_fab_from_disk(app))
    said = probed.run(app, "--stream").stdout
    refusals = re.findall(rf"REPLY ERROR .*the app eve/probe 1\.2\.3 \(SHA-256 {digest}\) is refused: it", said)
    assert len(refusals) == (1 if name == "with-code" else 2), said
    assert ("REPLY {'rows': 'all'}" in said) == (name == "with-code"), said  # from oslo, which allows it
    line = f"the app eve/probe 1.2.3 (SHA-256 {digest}) is refused: it"
    probed.wait_for("lyon", f"kindred: {line}")
    state = probed.folder / "state-lyon"
    entries = [json.loads(each) for each in (state / "site-lyon.jsonl").read_text().splitlines()]
    assert [each["kind"] for each in entries if line in each["problem"]] == ["app"]
    wait_until(lambda: digest in (state / "site-lyon.html").read_text(), seconds=30)
    assert not list((state / "flower-lyon").glob("apps/*"))
    assert not (state / "flower-lyon" / "touched").exists()
    assert name != "with-code" or (probed.folder / "state-oslo" / "flower-oslo" / "touched").exists()


@pytest.mark.deployment
def test_flwr_run_of_a_clone_names_the_app_to_run(probed, tmp_path) -> None:
    clone = tmp_path / "kindred"
    for package in ("strategies", "data", "server_app", "client_app"):
        shutil.copytree(ROOT / package, clone / package)
    shutil.copy(ROOT / "pyproject.toml", clone)
    done = probed.run(clone)
    said = " ".join(re.sub(r"[│╭╮╰╯─]", " ", done.stdout).split())
    assert done.returncode == 1, said
    assert "is refused: it holds" in said
    assert f"run the app in {probed.state}/app" in said.replace(f"{probed.state} /app", f"{probed.state}/app"), said
    assert "kindred: the app kindred/kindred-fl" in probed.said("server")


ASK = """
import encodings.idna, http.client, os, sys  # all, while this user may read them
port, uid, claimed = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
os.setuid(uid)
asked = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
asked.request("POST", "/v1/control/list-runs", headers={"X-Forwarded-For": claimed} if claimed else {})
answer = asked.getresponse()
print(answer.status, answer.read().decode())
"""


@pytest.mark.deployment
@pytest.mark.skipif(os.geteuid() != 0 or sys.platform != "linux", reason="only root may become another user")
def test_another_user_of_the_server_s_machine_can_start_nothing(probed) -> None:
    def ask(uid: int, claimed: str = "") -> str:
        command = [sys.executable, "-c", ASK, str(probed.port), str(uid), claimed]
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout

    assert ask(0).startswith("415 ")  # it passed, and is no protobuf
    with closing(http.client.HTTPConnection("127.0.0.1", probed.port, timeout=10)) as ours:
        ours.request("GET", "/health")
        ours.getresponse().read()
        _, port = ours.sock.getsockname()
        for claimed in ("", "127.0.0.1", f"127.0.0.1:{port}"):
            said = ask(65534, claimed)
            assert said.startswith("403 "), said
            assert "allowed only to the user who runs the server (uid 0) and to root" in said
