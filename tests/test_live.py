"""The page of runs at `kindred server`, and that of a site: their content, and who may read them."""

from __future__ import annotations

import http.client
import json
import os
import socket
import sqlite3
import ssl
import stat
import subprocess
import sys
import time
from contextlib import contextmanager

import psutil
import pytest
import typer
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict

from kindred import InlineGrid
from kindred.client import journal
from kindred.client_app.app import app as client_app
from kindred.engine.inline import identify
from kindred.engine.status import RUNS, Status
from kindred.messages import CONFIG, IDENTITY_QUERY, PROBLEM, REFUSAL_QUERY, VERSION_KEY
from kindred.server_app.app import run as run_app
from kindred.server_app.config import Config
from kindred.server_app.deployment import site_page
from kindred.server_app.deployment.site_page import SitePage
from kindred.server_app.deployment.watch import TOKEN_FILE, serve_runs
from kindred.server_app.report.live import (
    NEVER,
    OFFLINE,
    ONLINE,
    WITHDRAWN,
    Node,
    doing,
    has_ended,
    live_content,
    outcome,
)
from kindred.server_app.report.site import site_content
from kindred.versions import VERSION

from .background_commands import wait_until
from .deployment_commands import keys_fixture, kindred, made_keys_fixture  # noqa: F401
from .test_report import a_run, browser, data_of, opened  # noqa: F401
from .test_results import TWO_ROUNDS

RUNNING = {
    "state": "exchanges", "text": "round  3/10", "began": 1e9, "process": [os.getpid(), psutil.Process().create_time()],
    "nodes": {"lyon": "11", "oslo": "12"}, "taking-part": ["lyon", "oslo"], "validators": [],
    "left-out": {"porto": "images are 1x10x10"}, "excluded": {}, "refused": {"14": "its client id is eve"},
    "asked": {
        "lyon": {"kind": "trains", "at": 1e9}, "oslo": {"kind": "trains", "at": 1e9, "seconds": 2.0, "status": "ok"},
    },
}  # fmt: skip
NODES = [Node("11", "lyon", OFFLINE), Node("12", "oslo", ONLINE), Node("14", "", ONLINE), Node("9", "lyon", WITHDRAWN)]


# --- Content ------------------------------------------------------------------------------------------


def test_the_page_says_what_a_run_waits_for_and_where_each_site_stands() -> None:
    found = live_content(RUNNING, NODES, ["lyon", "oslo", "porto", "bergen"], left=70.0)
    assert found["doing"] == "round 3/10: lyon trains, oslo answered"
    assert (found["ended"], found["left"]) == (False, 70.0)
    assert found["sites"] == [
        ["SuperNode 14", ONLINE, "", "refused: its client id is eve"],
        ["bergen", NEVER, "", "does not take part now"],
        ["lyon", OFFLINE, "trains since 01:46:40 UTC", "takes part"],
        ["oslo", ONLINE, "answered after 2.0 s", "takes part"],
        ["porto", NEVER, "", "excluded: images are 1x10x10"],
    ]


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"state": "meets", "text": "2 of 3 sites to introduce themselves"},
         "waits for 2 of 3 sites to introduce themselves"),
        ({"state": "failed", "text": "too few clients"}, "the run has failed: too few clients"),
        ({"state": "finished"}, "the run is finished"),
        ({"state": "stopped"}, "the run was stopped"),
        ({"process": [os.getpid(), 1.0]},
         "the run has ended before its last round: it was stopped, or its process was killed"),
        ({"asked": {str(i): {"kind": "evaluates", "at": 0.0} for i in range(9)}},
         "round 3/10: 0, 1, 2, 3, 4, 5 and 3 more evaluate"),
        ({"asked": {"lyon": {"kind": "trains", "at": 0.0, "seconds": 1.0, "status": "refused: it is not finite"}}},
         "round 3/10: lyon gave no usable answer"),
    ],
)  # fmt: skip
def test_a_sentence_says_what_a_run_does(changed, says) -> None:
    assert doing(RUNNING | changed) == says


def test_a_run_replaces_its_status_when_something_changes(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv(RUNS, str(tmp_path / "runs"))
    seen = []
    written = Status.update
    monkeypatch.setattr(Status, "update", lambda self, **content: (written(self, **content), seen.append(
        json.loads((tmp_path / "runs" / "7.json").read_text()))))  # fmt: skip
    config = Config(num_clients=3, num_groups=1, num_rounds=2, samples_per_client=20, local_epochs=1,
                    output_dir=str(tmp_path / "results"))  # fmt: skip
    status = Status.of_run(7)
    with status.followed():
        folder = run_app(InlineGrid(client_app, 3, config.run_config()), config, status)
    said = [doing(content) for content in seen]
    for text in (
        "starts: reads its settings", "waits for 1 of 3 sites to introduce themselves",
        "the server prepares the next round", "round 1/2: 0, 1 and 2 train", "round 1/2: 1 and 2 train, 0 answered",
        "round 2/2: 0, 1 and 2 answered", "round 2/2 is over; the server computes and writes its results",
        "the run is finished",
    ):  # fmt: skip
        assert text in said
    assert seen[-1]["folder"] == str(folder.path)
    assert seen[-1]["taking-part"] == ["0", "1", "2"]
    with pytest.raises(ValueError), status.followed():
        raise ValueError("strategy is 'nonsense'\nallowed: ...")
    assert doing(seen[-1]) == "the run has failed: strategy is 'nonsense'"
    for end in (SystemExit(0), KeyboardInterrupt()):  # `flwr stop` ends the process by the first one
        with pytest.raises(type(end)), status.followed():
            raise end
        assert doing(seen[-1]) == "the run was stopped"


@pytest.mark.parametrize(("clients", "least", "most"), [(100, 100, 100), (101, 0, 10)])
def test_among_many_clients_not_every_reply_replaces_the_file(tmp_path, monkeypatch, clients, least, most) -> None:
    status = Status(tmp_path / "7.json")
    status.sent("round 1/2", dict.fromkeys(range(clients), "trains"))
    written = []
    monkeypatch.setattr("kindred.engine.status.write_bytes", lambda path, content, flush: written.append(content))
    for client in range(clients):
        status.answered(client, "ok")
    assert least <= len(written) <= most
    status.update(state="between rounds")
    assert all(each["status"] == "ok" for each in json.loads(written[-1])["asked"].values())


def test_a_run_whose_process_is_dead_and_not_yet_waited_for_has_ended() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        about = RUNNING | {"process": [process.pid, psutil.Process(process.pid).create_time()]}
        assert not has_ended(about)
        process.kill()
        wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE)
        assert has_ended(about)
        assert outcome(about) == "ended early"


# --- Who may read the page -------------------------------------------------------------------------------


def a_state(folder):
    """State folder of a server with two runs, the later one in progress."""
    state = folder / "server"
    (state / "runs").mkdir(parents=True)
    (state / "runs" / "5.json").write_text(json.dumps({"state": "failed", "text": "bad", "began": 1.0}))
    run = a_run(folder / "results", TWO_ROUNDS, **{"num-rounds": 10}).path
    (state / "runs" / "6.json").write_text(json.dumps(RUNNING | {"folder": str(run)}))
    (state / "registered.json").write_text('["lyon", "bergen"]')
    with sqlite3.connect(state / "superlink.db") as database:
        database.execute("create table node (node_id, name, status, online_until)")
        rows = [
            (-5, "lyon", "online", time.time() + 60),
            (12, "oslo", "online", 1.0),
            (13, "old", "unregistered", None),
        ]
        database.executemany("insert into node values (?, ?, ?, ?)", rows)
    database.close()
    return state


@contextmanager
def asking(server, context=None):
    def ask(path, method="GET", host=None, **headers):
        kind = http.client.HTTPSConnection if context else http.client.HTTPConnection
        connection = kind("localhost", server.server_port, timeout=10, **({"context": context} if context else {}))
        connection.putrequest(method, path, skip_host=True)
        connection.putheader("Host", host or f"localhost:{server.server_port}")
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        reply = connection.getresponse()
        return reply.status, dict(reply.getheaders()), reply.read()

    with server.serving():
        yield ask


def test_on_loopback_the_latest_run_and_every_earlier_one_have_a_page_and_nothing_else_has(tmp_path, capsys) -> None:
    state = a_state(tmp_path)
    with asking(serve_runs(state, "127.0.0.1", 0, None)) as ask:
        status, _, body = ask("/")
        found = data_of(body.decode())
        assert (status, found["kind"]) == (200, "run")
        assert found["left-out"] == [["porto", "images are 1x10x10"]]
        now = found["now"]
        assert now["doing"] == "round 3/10: lyon trains, oslo answered"
        assert [site[:2] for site in now["sites"]] == [
            ["bergen", NEVER], ["lyon", ONLINE], ["old", WITHDRAWN], ["oslo", OFFLINE], ["porto", NEVER],
        ]  # fmt: skip
        assert now["left"] == pytest.approx(8 / 2 * found["figures"]["seconds"])
        assert [run[0] for run in now["runs"]] == ["run 6", "run 5"]
        assert now["runs"][1][2:] == ["failed", "run/5/"]
        assert now["problems"] == []
        status, headers, body = ask("/data.json")
        assert json.loads(body)["now"] == now
        assert ask("/data.json", **{"If-None-Match": headers["ETag"]})[0] == 304
        earlier = json.loads(ask("/run/5/data.json")[2])
        assert (earlier["kind"], earlier["now"]["doing"]) == ("server", "the run has failed: bad")
        for path in ("/run/7/", "/run/5", "/run/../5/", "/../runs/6.json", "/runs/6.json", "/%2e%2e/",
                     "/watch-token", f"{state}/runs/6.json"):  # fmt: skip
            assert ask(path)[0] == 404, path
        assert [ask("/", method=method)[0] for method in ("HEAD", "POST", "PUT", "DELETE")] == [501] * 4
        assert ask("/", host="evil.example")[0] == 403
    assert "watch the runs at http://127.0.0.1:" in capsys.readouterr().out
    assert not (state / TOKEN_FILE).exists()


def test_beyond_loopback_a_request_needs_tls_and_the_token(tmp_path, keys, capsys) -> None:
    state = a_state(tmp_path)
    server = serve_runs(state, "0.0.0.0", 0, keys)
    token = (state / TOKEN_FILE).read_text()
    assert len(token) > 40
    assert stat.S_IMODE((state / TOKEN_FILE).stat().st_mode) == 0o600
    assert f"?token={token}" in capsys.readouterr().out
    context = ssl.create_default_context(cafile=keys / "ca.crt")
    with asking(server, context) as ask:
        for path in ("/", "/data.json", "/run/6/", "/nothing"):
            for given in ({}, {"Authorization": "Bearer x"}, {"Authorization": f"Basic {token}"},
                          {"Cookie": "kindred-token=x"}, {"Cookie": "kindred-token=\xff"}):  # fmt: skip
                status, headers, body = ask(path, **given)
                assert (status, headers["WWW-Authenticate"]) == (401, "Bearer")
                assert b"lyon" not in body
        assert ask("/?token=wrong")[0] == 401
        assert ask("/?token=")[0] == 401
        assert ask("/", **{"Authorization": f"Bearer {token}"})[0] == 200
        status, headers, body = ask(f"/run/5/?token={token}")
        assert (status, headers["Location"], body) == (303, "/run/5/", b"")
        cookie, *attributes = headers["Set-Cookie"].split("; ")
        assert {"Secure", "HttpOnly", "SameSite=Lax"} <= set(attributes)
        assert ask("/data.json", Cookie=cookie)[0] == 200
        assert ask(f"//evil.example/?token={token}")[1]["Location"] == "/"
        assert ask("/run/7/", Cookie=cookie)[0] == 404
        with socket.create_connection(("localhost", server.server_port), timeout=10) as plain:
            plain.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b"200" not in plain.recv(100)
        assert ask("/", Cookie=cookie)[0] == 200
    with asking(serve_runs(state, "0.0.0.0", 0, keys), context) as ask:  # the same token, not printed again
        assert token not in capsys.readouterr().out
        assert ask("/", Cookie=cookie)[0] == 200


@pytest.mark.parametrize("content", ["", "\n", "short"])
def test_a_token_that_can_be_guessed_is_bad_input(tmp_path, keys, capsys, content) -> None:
    state = a_state(tmp_path)
    (state / TOKEN_FILE).write_text(content)
    with pytest.raises(typer.Exit):
        serve_runs(state, "0.0.0.0", 0, keys)
    said = f"{state / TOKEN_FILE} holds {len(content.strip())} characters, allowed: 32 or more"
    assert said in capsys.readouterr().err


def test_an_address_for_others_without_keys_is_bad_input(keys) -> None:
    for address in ("0.0.0.0:8443", "fl.example.org:8443", "[::]:8443"):
        said = kindred("server", "--watch-address", address, code=2)
        assert said == f"kindred: --watch-address is {address!r}, which other machines can reach, allowed without " \
            "--keys: 127.0.0.1:PORT\n"  # fmt: skip
    assert "allowed: HOST:PORT" in kindred("server", "--watch-address", "8443", code=2)
    assert "other.example" in kindred("server", "--keys", keys, "--watch-address", "other.example:8443", code=2)


# --- The page of a site ----------------------------------------------------------------------------------


def answered(kind, reply=None, error=None, **config):
    """Have a site's ClientApp answer a message in a recorded function."""
    identify(1)
    content = RecordDict(
        {"config": ConfigRecord({"run": "0007", "method": "heurfedamp", "metric": "accuracy", **config})}
    )
    message = Message(content, 1, "train")
    message.metadata.__dict__["_message_id"] = "1"

    @journal.recorded(kind)
    def answer(message, context):
        if error:
            raise error
        return Message(reply or RecordDict(), reply_to=message)

    return answer(message, Context(7, 1, {}, RecordDict(), {}))


def test_the_journal_has_what_left_the_site_and_the_page_shows_it(tmp_path, monkeypatch) -> None:
    page = SitePage("lyon", tmp_path, {"lines": ["lyon: 60 images"], "classes": [["0", "3", "4"]]})
    answered("training")  # nothing names a journal
    assert not page.journal.exists()
    monkeypatch.setenv(journal.JOURNAL, str(page.journal))
    with page.kept():
        assert "no message has arrived yet" in data_of(page.path.read_text())["doing"]
        model = RecordDict({
            "arrays": ArrayRecord({}), "metrics": MetricRecord({"trained-accuracy": 0.5, "alone-accuracy": 0.25}),
        })  # fmt: skip
        answered("training", model, **{"server-round": 1})
        answered("evaluation", RecordDict({"metrics": MetricRecord({"accuracy": 0.75})}), **{"server-round": 2})
        with pytest.raises(ValueError):
            answered("training", error=ValueError("no room\nsecond line"), **{"server-round": 3})
        answered("notice", **{PROBLEM: "its update is not finite"})
        page.fault("localhost:8000 cannot be reached")
    assert stat.S_IMODE(page.journal.stat().st_mode) == stat.S_IMODE(page.path.stat().st_mode) == 0o600
    found = data_of(page.path.read_text())
    assert (found["kind"], found["messages-in-all"]) == ("site", 4)
    assert found["runs"] == [
        {"run": "7", "method": "heurfedamp", "rounds": [1, 2], "federated": [0.5, 0.75], "alone": [0.25, None]}
    ]
    assert [row[:3] for row in found["messages"]] == [
        ["–", "notice", "nothing"], ["3", "training", "the error's text"], ["2", "evaluation", "1 number"],
        ["1", "training", "2 numbers"],
    ]  # fmt: skip
    assert ["trained-accuracy", "number", "training", "1"] in found["names"]
    assert [fault[2] for fault in found["faults"]] == [
        "localhost:8000 cannot be reached", "the server says of this site: its update is not finite",
        "ValueError: no room",
    ]  # fmt: skip
    assert found["lines"] == ["lyon: 60 images"]


def test_an_entry_that_does_not_fit_on_the_disk_changes_nothing(tmp_path) -> None:
    """The process may write 80 bytes to a file, more than one entry and less than two."""
    code = f"""
import resource, signal
from kindred.client.journal import append
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (80, 80))
print([append({str(tmp_path / "journal")!r}, {{"problem": "no TLS"}}) for _ in range(3)])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[True, False, False]\n"
    assert json.loads((tmp_path / "journal").read_text())["problem"] == "no TLS"


def test_a_fault_while_the_disk_is_full_is_on_the_page_later_and_so_is_its_end(tmp_path, monkeypatch) -> None:
    page = SitePage("lyon", tmp_path, {"lines": [], "classes": []})
    with monkeypatch.context() as patch:
        patch.setattr(site_page, "append", lambda *_: False)
        page.fault("the disk has less than 100 MB left")
        before = time.time()
    page.write()
    assert journal_of(page)[0]["at"] < before
    assert data_of(page.path.read_text())["doing"] == "the disk has less than 100 MB left"
    page.fault("the disk has room again", over=True)
    page.write()
    content = data_of(page.path.read_text())
    assert content["doing"] == "the disk has room again"
    assert [text for _, _, text, _ in content["faults"]] == ["the disk has less than 100 MB left"]


def journal_of(page: SitePage) -> list[dict[str, object]]:
    return [json.loads(line) for line in page.journal.read_text().splitlines()]


def test_a_malformed_message_spoils_neither_the_journal_nor_the_page(tmp_path, monkeypatch) -> None:
    page = SitePage("lyon", tmp_path, {"lines": [], "classes": []})
    monkeypatch.setenv(journal.JOURNAL, str(page.journal))
    model = RecordDict({"metrics": MetricRecord({"trained-accuracy": 0.5})})
    for wrong in ({"metric": ["a", "b"]}, {"server-round": [1]}, {"server-round": b"x"}, {"run": "../../x"}, {}):
        answered("training", model, **{"server-round": 1, **wrong})
    page.write()
    found = data_of(page.path.read_text())
    assert found["messages-in-all"] == 5 and [each["run"] for each in found["runs"]] == ["7"]
    with open(page.journal, "a") as file:  # of an earlier version
        file.write(json.dumps({"at": 1.0, "kind": "training", "metric": ["a"], "value": 0.5, "run": "7"}) + "\n")
    page.write()  # does not raise


def test_the_client_app_records_its_introduction_and_refusals(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv(journal.JOURNAL, str(tmp_path / "journal"))
    config = Config(num_clients=2, num_groups=1).run_config()
    grid = InlineGrid(client_app, 2, config)
    for kind, entries in ((IDENTITY_QUERY, {VERSION_KEY: VERSION}), (REFUSAL_QUERY, {PROBLEM: "not used"})):
        node = next(iter(grid.get_node_ids()))
        list(grid.send_and_receive([Message(RecordDict({CONFIG: ConfigRecord(entries)}), node, kind)]))
    first, second = map(json.loads, (tmp_path / "journal").read_text().splitlines())
    assert first["kind"] == "introduction" and "num-examples" in first["texts"]
    assert second["problem"] == "the server says of this site: not used"


def test_a_site_without_messages_has_a_page() -> None:
    assert site_content("lyon", {"lines": [], "classes": []}, [])["runs"] == []


# --- In a browser ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1100, 390])
def test_the_page_of_the_runs_follows_the_status_and_fits(browser, tmp_path, width) -> None:  # noqa: F811
    state = a_state(tmp_path)
    server = serve_runs(state, "127.0.0.1", 0, None)
    with server.serving(), opened(browser, f"http://127.0.0.1:{server.server_port}/", width) as tab:
        assert tab.text_content("#doing") == "Round 3/10: lyon trains, oslo answered."
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        server.runs.problems = ["flower-superexec has ended"]
        tab.wait_for_selector("[role=alert]:has-text('Flower-superexec has ended.')")
        assert tab.locator("td", has_text="excluded: images are 1x10x10").count() == 1
        assert tab.locator("svg[aria-label^='Every client']").count() == 1
        path = state / "runs" / "6.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"state": "failed", "text": "<b>bad</b>"}))
        tab.wait_for_selector("text=The run has failed: <b>bad</b>.")
        assert tab.text_content("#state") == "Not finished: 2 of 10 rounds"
        tab.click("summary:has-text('All runs')")
        tab.click("a:has-text('run 5')")
        tab.wait_for_selector("text=The run has failed: bad.")


def test_the_page_of_a_site_is_loaded_again_while_the_site_runs_and_stays_open_where_it_was(
    browser, tmp_path, monkeypatch  # noqa: F811
) -> None:  # fmt: skip
    monkeypatch.setattr("kindred.server_app.report.site.RELOAD_SECONDS", 3.0)
    page = SitePage("lyon", tmp_path, {"lines": ["lyon: 60 images"], "classes": [["0", "3", "4"]]})
    entry = {"kind": "training", "method": "fedavg", "metric": "accuracy", "seconds": 1.0, "bytes-out": 10, "run": "1"}
    journal.append(page.journal, {**entry, "round": 1, "value": 0.5})
    page.write()
    with opened(browser, page.path.as_uri(), 1100) as tab:
        tab.click("summary >> nth=0")
        before = tab.evaluate("document.querySelector('details').open")
        page.fault("the certificate has ended")
        page.write()
        tab.wait_for_selector("text=The certificate has ended")
        page.write(running=False)
        tab.wait_for_selector("#state code:has-text('kindred site')")  # and is not loaded again
        assert tab.text_content("#state") == "kindred site has ended."
        assert tab.evaluate("document.querySelector('details').open") == before


@pytest.mark.parametrize("width", [1100, 390])
def test_the_page_of_a_site_compares_with_a_model_trained_alone_or_says_that_it_does_not(
    browser, tmp_path, width  # noqa: F811
) -> None:  # fmt: skip
    page = SitePage("lyon", tmp_path, {"lines": ["lyon: 60 images"], "classes": [["0", "3", "4"]]})
    entry = {"kind": "training", "method": "fedavg", "metric": "accuracy", "seconds": 1.0, "bytes-out": 10}
    for number in (1, 2):
        journal.append(page.journal, {**entry, "run": "1", "round": number, "value": 0.5})
        journal.append(page.journal, {**entry, "run": "2", "round": number, "value": 0.5, "alone": 0.25})
    page.fault("the certificate <b>has ended</b>")
    page.write()
    with opened(browser, page.path.as_uri(), width) as tab:
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        assert tab.locator("text=the two are not compared").count() == 1
        assert tab.locator("svg[aria-label*='trained alone']").count() == 1
        assert tab.locator("strong", has_text="The certificate <b>has ended</b>").count() >= 1
