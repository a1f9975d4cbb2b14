"""Clients in worker processes: the same bits, no copy left behind, and what happens when a process dies."""

from __future__ import annotations

import errno
import itertools
import logging
import math
import multiprocessing.shared_memory
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import numpy as np
import psutil
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MessageType, MetricRecord, RecordDict
from safetensors.numpy import load_file

from kindred.engine import channel as channel_module, workers
from kindred.engine.channel import AHEAD, Channel, NoSharedMemory
from kindred.engine.inline import identify
from kindred.engine.transport import pull, push
from kindred.engine.workers import WorkerGrid
from kindred.server_app import engines, machine
from kindred.server_app.app import run_in_workers, run_inline
from kindred.server_app.config import Config, ConfigError
from kindred.server_app.engines import Engine, workers_of
from kindred.server_app.machine import cpus
from kindred.server_app.run_files import read_summary

from .background_commands import HEEDING, KINDRED, PATIENCE, wait_until

CLIENTS = 5
SHARED = Path("/dev/shm")


@pytest.fixture(params=["fork", "spawn"])
def grid(request, monkeypatch) -> Iterator[WorkerGrid]:
    numbers = itertools.count()
    monkeypatch.setattr(workers.secrets, "token_hex", lambda size: f"{os.getpid()}x{next(numbers)}")
    grid = WorkerGrid("tests.worker_apps:app", CLIENTS, workers=2)
    grid._method = request.param
    yield grid
    processes = [worker.process for worker in grid._workers if worker.process]
    grid.close()
    assert not any(process.is_alive() for process in processes)
    assert not list(SHARED.glob(f"kindred-{os.getpid()}x*"))


def ask(grid: WorkerGrid, size: int, values: dict[int, float] | None = None) -> dict[int, object]:
    """Ask each client to train a vector of this size, and return the content of the replies, or errors, by client."""
    nodes = list(grid.get_node_ids())
    messages = []
    for client, node in enumerate(nodes):
        vector = np.full(size, (values or {}).get(client, 1.0), np.float32)
        content = RecordDict({"arrays": ArrayRecord({"w": Array(vector)})})
        messages.append(grid.create_message(content, MessageType.TRAIN, node, "1"))
    client_of = {message.metadata.dst_node_id: client for client, message in enumerate(messages)}
    found = {}
    for reply in grid.send_and_receive(messages, timeout=PATIENCE):
        found[client_of[reply.metadata.src_node_id]] = reply.error if reply.has_error() else reply.content
    return found


def values() -> dict[str, object]:
    """Return a value of each type that Flower's settings have."""
    numbers = {"whole": 2**63 - 1, "numbers": [0.1, -0.0, math.inf, np.float64(0.3)], "true": True}
    return numbers | {"bytes": b"\x00\xff", "several": [b"", b"a"], "text": "\u00fc\ud800", "empty": []}


@pytest.mark.parametrize("size", [3, 100_000])
def test_a_message_and_a_state_arrive_as_they_were_sent(size) -> None:
    ours, theirs = (
        Channel(end, f"sent-{os.getpid()}-{writes}", f"sent-{os.getpid()}-{reads}")
        for end, (writes, reads) in zip(multiprocessing.Pipe(), ("ab", "ba"))
    )
    vector, fortran = np.arange(size, dtype=np.float32), np.asfortranarray(np.ones((2, 3), np.int64))
    arrays = ArrayRecord({"w": Array(vector), "buffers/n": Array(fortran), "scalar": Array(np.array(2.0))})
    config, metrics = ConfigRecord(values()), MetricRecord({"loss": math.inf, "counts": [1, 2], "n": 7})
    content = RecordDict({"arrays": arrays, "config": config, "metrics": metrics, "last": ArrayRecord()})
    state = RecordDict({"kept": ArrayRecord({"v": Array(vector[:2])}), "settings": ConfigRecord({"b": b"1"})})
    identify(1)
    asked = Message(content, 5, MessageType.TRAIN, group_id="3")
    replies = Message(content, reply_to=asked), Message(Error(7, "why"), reply_to=asked)
    try:
        for message, with_state in zip((asked, *replies), (state, None, RecordDict())):
            ours.send(message, with_state)
            found, found_state = theirs.receive()
            assert found_state == with_state and (found_state is None) == (with_state is None)
            assert {**vars(found.metadata), "_delivered_at": ""} == {**vars(message.metadata), "_delivered_at": ""}
            assert found.has_error() == message.has_error() and found.has_content() == message.has_content()
            if message.has_error():
                assert (found.error.code, found.error.reason) == (7, "why")
            else:
                assert found.content == content and list(found.content) == list(content)
                assert repr(dict(found.content["config"])) == repr(values() | {"numbers": [0.1, -0.0, math.inf, 0.3]})
    finally:
        ours.free(), theirs.free()


@pytest.mark.parametrize("size", [3, 100_000])
def test_clients_work_in_several_processes_and_keep_their_context(grid, size) -> None:
    for times in range(3):
        found = ask(grid, size)
        assert sorted(found) == list(range(CLIENTS))
        for client, content in found.items():
            assert (content["arrays"]["w"].numpy() == 1 + client).all()
            assert content["metrics"]["asked"] == times
        processes = {content["metrics"]["process"] for content in found.values()}
        assert os.getpid() not in processes and len(processes) <= 2
    assert len(processes) == 2  # both have started by now


def test_blocks_of_shared_memory_are_kept_for_later_messages_of_any_size(grid) -> None:
    kept: dict[str, multiprocessing.shared_memory.SharedMemory] = {}
    for size in (100_000, 60_000, 200_000, 200_100, 5):
        found = ask(grid, size, {client: 10.0 * client + size for client in range(CLIENTS)})
        for client, content in found.items():
            assert content["arrays"]["w"].numpy().tolist() == [11 * client + size] * size
        channels = [worker.channel for worker in grid._workers if worker.channel]
        blocks = {name: block for channel in channels for name, block in channel._blocks.items()}
        assert 0 < len(blocks) <= 2 * 2 * AHEAD
        for name, block in kept.items():
            assert blocks[name] is block or block.size < 4 * size <= blocks[name].size
        kept = blocks


@pytest.mark.parametrize("kept", [False, True])
def test_no_block_is_left_of_an_answer_that_nobody_reads(grid, kept) -> None:
    nodes = list(grid.get_node_ids())
    if kept:
        ask(grid, 100_000)
    content = RecordDict({"arrays": ArrayRecord({"w": Array(np.ones(200_000, np.float32))})})  # larger blocks
    grid.push_messages([grid.create_message(content, MessageType.TRAIN, node, "1") for node in nodes[:2]])
    channels = [worker.channel for worker in grid._workers]
    for channel in channels:
        assert channel.connection.recv()[0] == logging.INFO  # a line of the log, before the answer
    wait_until(lambda: all(channel.connection.poll() for channel in channels))
    grid.close()
    assert not [name for channel in channels for name in channel._names if (SHARED / name).exists()]


def test_a_block_whose_making_was_interrupted_is_no_error() -> None:
    channel = Channel(multiprocessing.Pipe()[0], f"begun-{os.getpid()}-a", f"begun-{os.getpid()}-b")
    empty = SHARED / channel._names[-1]
    empty.touch()
    channel.free()
    empty.unlink()


def test_a_block_replaced_by_one_that_was_not_registered_is_freed_in_silence() -> None:
    code = (
        "from multiprocessing import Pipe, resource_tracker\n"
        "from multiprocessing.shared_memory import SharedMemory\n"
        "from kindred.engine.channel import Channel\n"
        f"channel = Channel(Pipe()[0], 'again-{os.getpid()}-a', 'again-{os.getpid()}-b')\n"
        "name = channel._names[0]\n"
        "for size in (10, 20):\n"
        "    block = SharedMemory(name, create=True, size=size)\n"
        "    channel._blocks.setdefault(name, block)\n"
        "    if size == 10: block.unlink()\n"
        "resource_tracker.unregister(block._name, 'shared_memory')\n"  # as if ended before it registered it
        "channel.free()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stderr) == (0, "")
    assert not list(SHARED.glob(f"again-{os.getpid()}-*"))


@pytest.mark.parametrize("owner", ["sends", "receives"])
def test_a_block_freed_but_still_registered_leaves_no_warning(owner) -> None:
    code = (
        "from multiprocessing import Pipe, resource_tracker\n"
        "from multiprocessing.shared_memory import SharedMemory\n"
        "from kindred.engine.channel import Channel\n"
        f"channel = Channel(Pipe()[0], 'freed-{os.getpid()}-sends', 'freed-{os.getpid()}-receives')\n"
        f"block = SharedMemory('freed-{os.getpid()}-{owner}1', create=True, size=10)\n"
        "block.unlink()\n"
        "resource_tracker.register(block._name, 'shared_memory')\n"  # as if Ctrl-C had come before it was unregistered
        "channel.free()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stderr) == (0, "")


def test_one_process_has_no_more_than_two_messages(monkeypatch) -> None:
    grid = WorkerGrid("tests.worker_apps:app", 8, workers=2)
    given: list[int] = []
    monkeypatch.setattr(
        grid, "_give", lambda worker, message: (given.append(worker.number), worker.given.append(message))
    )
    content = RecordDict({"arrays": ArrayRecord({"w": Array(np.ones(2, np.float32))})})
    grid.push_messages([grid.create_message(content, MessageType.TRAIN, node, "1") for node in grid.get_node_ids()])
    assert given == [0, 1, 0, 1] and len(grid._new) == 4
    for worker in grid._workers:  # all but one message answered
        worker.given.clear()
    grid._hand_out()
    assert given[4:] == [0, 1] and len(grid._new) == 2  # not more waiting than processes: nobody gets a second one


def test_a_client_s_error_is_its_answer(grid) -> None:
    found = ask(grid, 3, {2: -1.0})
    assert found[2].reason == "ValueError: a value is negative"
    assert all((found[client]["arrays"]["w"].numpy() == 1 + client).all() for client in (0, 1, 3, 4))


def test_a_process_that_dies_costs_one_answer_and_is_replaced(grid) -> None:
    found = ask(grid, 100_000, {3: float("nan")})
    assert found[3].reason == "the process that worked for it was killed by signal 9, most often for lack of memory"
    assert sorted(found) == list(range(CLIENTS))
    again = ask(grid, 100_000)
    assert all((again[client]["arrays"]["w"].numpy() == 1 + client).all() for client in range(CLIENTS))


def test_a_message_given_to_a_process_that_has_ended_is_given_again() -> None:
    """The process ends with a message that it has not answered, and gets another before this is noticed."""
    grid = WorkerGrid("tests.worker_apps:app", 3, workers=1)
    ask(grid, 3)
    (worker,) = grid._workers
    content = RecordDict({"arrays": ArrayRecord({"w": Array(np.ones(3, np.float32))})})
    first, *others = (
        grid.create_message(content, MessageType.TRAIN, node, str(number))
        for number, node in enumerate(grid.get_node_ids())
    )
    os.kill(worker.process.pid, signal.SIGSTOP)
    ids = list(grid.push_messages([first]))
    os.kill(worker.process.pid, signal.SIGKILL)
    worker.process.join()
    ids += grid.push_messages(others)
    assert [message.metadata.group_id for message in worker.given] == ["0", "1"]
    replies: dict[str, Message] = {}

    def all_arrived() -> bool:
        replies.update({reply.metadata.reply_to_message_id: reply for reply in grid.pull_messages(ids)})
        return len(replies) == 3

    wait_until(all_arrived)
    grid.close()
    assert "was killed by signal 9" in replies[ids[0]].error.reason
    assert [replies[each].content["metrics"]["asked"] for each in ids[1:]] == [1, 1]


def test_messages_of_an_exchange_that_has_ended_are_forgotten() -> None:
    """A process that hangs until the deadline is begun anew for the next exchange."""
    grid = WorkerGrid("tests.worker_apps:app", CLIENTS, workers=1)
    ask(grid, 3)
    (worker,) = grid._workers
    process = worker.process
    os.kill(process.pid, signal.SIGSTOP)
    content = RecordDict({"arrays": ArrayRecord({"w": Array(np.ones(3, np.float32))})})
    ids = [push(grid, grid.create_message(content, MessageType.TRAIN, node, "2")) for node in grid.get_node_ids()]
    now = time.monotonic()
    assert not list(pull(grid, ids, lambda: now, simulated=True))
    grid.forget(ids)
    assert not worker.given and not worker.waiting and not grid._new and not process.is_alive()
    found = ask(grid, 3)
    assert [found[client]["metrics"]["asked"] for client in range(CLIENTS)] == [1] * CLIENTS
    assert not grid._answers
    grid.close()


def test_a_process_that_is_being_started_is_not_ended() -> None:
    grid = WorkerGrid("tests.worker_apps:app", 2, workers=1)
    content = RecordDict({"arrays": ArrayRecord({"w": Array(np.ones(3, np.float32))})})
    ids = [push(grid, grid.create_message(content, MessageType.TRAIN, node, "1")) for node in grid.get_node_ids()]
    (worker,) = grid._workers
    process = worker.process
    grid.forget(ids)
    found = ask(grid, 3)
    assert worker.process is process
    assert [found[client]["metrics"]["asked"] for client in range(2)] == [1, 0]  # the other message had not been given
    grid.close()


def test_all_replies_that_have_arrived_at_the_deadline_are_used() -> None:
    grid = WorkerGrid("tests.worker_apps:app", 2, workers=1)
    ours, theirs = (Channel(end, *names) for end, names in zip(multiprocessing.Pipe(), (("a", "b"), ("b", "a"))))
    (worker,) = grid._workers
    worker.channel = ours
    worker.given += (grid.create_message(RecordDict(), MessageType.TRAIN, node, "1") for node in grid.get_node_ids())
    for number, message in enumerate(worker.given):
        message.metadata.__dict__["_message_id"] = str(number)
        theirs.connection.send((logging.INFO, "a line of the log"))
        theirs.send(Message(RecordDict(), reply_to=message), RecordDict())
    now = time.monotonic()
    assert sorted(dict(pull(grid, ["0", "1"], lambda: now, simulated=True))) == ["0", "1"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads what a process has mapped")
def test_a_forked_process_keeps_no_memory_of_others(monkeypatch) -> None:
    numbers = itertools.count()
    monkeypatch.setattr(workers.secrets, "token_hex", lambda size: f"map{next(numbers)}")
    grid = WorkerGrid("tests.worker_apps:app", 4, workers=2)
    ask(grid, 100_000)
    ended, other = grid._workers
    os.kill(ended.process.pid, signal.SIGKILL)
    ended.process.join()
    ask(grid, 100_000)
    ask(grid, 100_000)
    name = other.channel._names[0].rpartition("-")[0]
    mapped = Path(f"/proc/{ended.process.pid}/maps").read_text()
    assert "kindred-map" in mapped and name not in mapped
    grid.close()


def test_no_client_has_two_messages_at_work(monkeypatch) -> None:
    """The second one begins with the Context that the first one leaves."""
    grid = WorkerGrid("tests.worker_apps:app", 2, workers=2)
    monkeypatch.setattr(grid, "_give", lambda worker, message: worker.given.append(message))
    one, other = grid.get_node_ids()
    first, second, third = (
        grid.create_message(RecordDict(), MessageType.TRAIN, node, number)
        for node, number in ((one, "1"), (one, "2"), (other, "3"))
    )
    busy, idle = grid._workers
    busy.given.append(first)
    busy.waiting += [second, third]
    grid._hand_out()
    assert list(idle.given) == [third] and list(busy.waiting) == [second]
    busy.given.clear()
    grid._hand_out()
    assert list(busy.given) == [second]
    grid = WorkerGrid("tests.worker_apps:app", 1, workers=1)
    (node,) = grid.get_node_ids()
    content = RecordDict({"arrays": ArrayRecord({"w": Array(np.ones(3, np.float32))})})
    ids = [push(grid, grid.create_message(content, MessageType.TRAIN, node, "1")) for _ in range(3)]
    replies = dict(pull(grid, ids, lambda: math.inf, simulated=True))
    assert [replies[each].content["metrics"]["asked"] for each in ids] == [0, 1, 2]
    grid.close()


def test_a_grid_that_has_waited_itself_is_asked_again_at_once(monkeypatch) -> None:
    pauses: list[float] = []
    sleep = time.sleep
    monkeypatch.setattr(time, "sleep", pauses.append)

    class Waiting:
        def pull_messages(self, message_ids):
            sleep(0.1)
            return []

    end = time.monotonic() + 0.45
    assert not list(pull(Waiting(), ["1"], lambda: end, simulated=True))
    assert len(pauses) >= 3 and not any(pauses)


@pytest.fixture
def full(monkeypatch) -> Iterator[Callable[[bool], None]]:
    """Let there be no room for large blocks, in the process of the server or in others."""
    ours, allocate = os.getpid(), os.posix_fallocate
    monkeypatch.setattr(workers.secrets, "token_hex", lambda size: f"full{ours}")

    def fill(in_server: bool) -> None:
        def refuse(descriptor: int, offset: int, size: int) -> None:
            if size > 500_000 and (os.getpid() == ours) == in_server:
                raise OSError(errno.ENOSPC, "No space left on device")
            allocate(descriptor, offset, size)

        monkeypatch.setattr(os, "posix_fallocate", refuse)

    yield fill
    assert not list(SHARED.glob(f"kindred-full{ours}-*"))


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="this system cannot allocate memory in advance")
def test_without_room_in_shared_memory_a_line_says_so(full) -> None:
    """A container often has 64 MB. To write to memory that is not there would kill the process."""
    full(True)
    grid = WorkerGrid("tests.worker_apps:app", 1, workers=1)
    with pytest.raises(NoSharedMemory, match=r"a message of 0.8\d* MB does not fit .*: use fewer --workers"):
        ask(grid, 200_000)
    grid.close()


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="this system cannot allocate memory in advance")
def test_a_client_whose_reply_has_no_room_fails_alone_and_no_old_reply_is_read(full) -> None:
    full(False)
    grid = WorkerGrid("tests.worker_apps:grows", 1, workers=1)
    times = 0
    for size in (50_000, 60_000, 200_000, 50_000, 50_000, 40_000, 200_000, 50_000):
        (reply,) = ask(grid, size).values()
        if size == 200_000:
            assert "does not fit into the machine's shared memory" in reply.reason
        else:
            times += 1
            assert reply["arrays"]["w"].numpy().tolist() == [times] * size
    grid.close()


def test_processes_of_several_threads_are_not_forked() -> None:
    """A forked process hangs in PyTorch's threads if this one has used them."""
    methods = {
        threads: WorkerGrid("tests.worker_apps:app", 2, workers=2, threads=threads)._method for threads in (1, 2)
    }
    assert methods == {1: "fork" if sys.platform == "linux" else "spawn", 2: "spawn"}


def test_a_process_at_work_ends_at_once_with_that_of_the_server() -> None:
    code = (
        "import sys, time\n"
        "from flwr.app import RecordDict\n"
        "from kindred.engine.workers import WorkerGrid\n"
        "grid = WorkerGrid('tests.worker_apps:sleeping', 1, workers=1)\n"
        "(node,) = grid.get_node_ids()\n"
        "grid.push_messages([grid.create_message(RecordDict(), 'train', node, '1')])\n"
        "print(grid._workers[0].process.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        worker = psutil.Process(int(process.stdout.readline()))
        process.kill()
        gone, _ = psutil.wait_procs([worker], 20)
        assert gone or worker.status() == psutil.STATUS_ZOMBIE


def test_lines_of_a_process_s_log_reach_the_server_s(grid, caplog) -> None:
    with caplog.at_level(logging.INFO, logger="flwr"):
        logging.getLogger("flwr").addHandler(caplog.handler)
        ask(grid, 3)
        logging.getLogger("flwr").removeHandler(caplog.handler)
    assert {f"client {client} trains" for client in range(CLIENTS)} <= {
        record.getMessage() for record in caplog.records
    }


@pytest.mark.parametrize("end", ["sender", "receiver"])
def test_ctrl_c_at_any_line_of_a_transfer_lets_this_end_free_all_blocks(monkeypatch, end) -> None:
    (node,) = WorkerGrid("tests.worker_apps:app", 1, workers=1).get_node_ids()
    ignored: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    traced = {channel_module.__file__, multiprocessing.shared_memory.__file__}
    name = f"transfer-{os.getpid()}-"

    def transfer(sender: Channel, receiver: Channel) -> None:
        for size in (20_000, 40_000):
            content = RecordDict({"arrays": ArrayRecord({"w": Array(np.full(size, 7.0, np.float32))})})
            for _ in range(AHEAD):  # the blocks of the second size replace those of the first
                sender.send(Message(content, node, MessageType.TRAIN), RecordDict())
                message, _ = receiver.receive()
                assert message.content["arrays"]["w"].numpy().tolist() == [7.0] * size

    def interrupted(at: int) -> bool:
        """Transfer, with Ctrl-C at this line; False if there are fewer lines."""
        left = at

        def lines(frame: FrameType, event: str, _: object) -> Callable | None:
            nonlocal left
            callers = {each.f_code.co_name for each in (frame, frame.f_back) if each}
            if frame.f_code.co_filename not in traced or callers & {"__init__", "__del__"}:
                return None  # of __init__ there is a test above, and in __del__ Python ignores all exceptions
            left -= event == "line"
            if left == 0:
                raise KeyboardInterrupt
            return lines

        first, second = multiprocessing.Pipe()
        sender = Channel(first, f"{name}a", f"{name}b")
        receiver = Channel(second, f"{name}b", f"{name}a")
        ours = sender if end == "sender" else receiver
        before = sys.gettrace()
        sys.settrace(lines)
        try:
            transfer(sender, receiver)
        except KeyboardInterrupt:
            sys.settrace(before)
            ours.free()  # while the traceback keeps all local variables
            return True
        finally:
            sys.settrace(before)
        ours.free()
        return False

    at = next(at for at in itertools.count(1) if not interrupted(at))
    assert at > 100 and not ignored
    assert not list(SHARED.glob(f"{name}*"))


# --- Runs ---------------------------------------------------------------------------------------------

SMALL = {"num_clients": 5, "samples_per_client": 20, "num_rounds": 3, "local_epochs": 1}


@pytest.mark.parametrize("strategy", ["heurfedamp", "kindred", "apfl"])
def test_a_run_gives_the_same_bits_as_in_one_process(strategy, tmp_path) -> None:
    config = Config(strategy=strategy, partition="rotated", output_dir=str(tmp_path), checkpoint_every=0, **SMALL)
    one, two = run_inline(config).path, run_in_workers(config, 2).path
    assert read_summary(one)["metrics"] == read_summary(two)["metrics"]
    models = [{path.name: load_file(path) for path in (folder / "models").iterdir()} for folder in (one, two)]
    assert models[0].keys() == models[1].keys() and len(models[0]) == 5
    for name, arrays in models[0].items():
        assert all(values.tobytes() == models[1][name][key].tobytes() for key, values in arrays.items())


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", ["heurfedamp", "feddf"])
def test_processes_share_a_gpu(strategy, tmp_path) -> None:
    config = Config(strategy=strategy, partition="rotated", output_dir=str(tmp_path), device="cuda", **SMALL)
    share = Engine("local", gpus_per_client=0.5)
    assert workers_of(share, config) == min(2 * engines.gpus(), CLIENTS, cpus())
    together, alone = (
        read_summary(engines.execute(config, engine, print).results)["metrics"]["last"]["accuracy"]
        for engine in (share, Engine("inline"))
    )
    assert together == pytest.approx(alone, abs=0.05)


def test_with_one_worker_it_is_the_engine_of_this_process(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(workers, "WorkerGrid", None)
    config = Config(strategy="local", output_dir=str(tmp_path), **SMALL)
    assert read_summary(run_in_workers(config, 1).path)["strategy"] == "local"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_process_outlives_the_command(number, tmp_path) -> None:
    command = [sys.executable, "-c", HEEDING, KINDRED, "run", "--workers=2", "--clients=4", "--rounds=100000"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        next(line for line in process.stdout if line.startswith("round "))
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        process.communicate(timeout=PATIENCE)
    assert process.returncode == (130 if number == signal.SIGINT else -number)
    assert len(children) >= 2
    wait_until(lambda: not any(child.is_running() for child in children), seconds=10)


# --- How many -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("interrupt", "code"), [(KeyboardInterrupt, 130), (ZeroDivisionError, 1)])
def test_ctrl_c_ends_a_run_with_130_also_if_a_clean_up_fails_after_it(interrupt, code, monkeypatch) -> None:
    def write_a_file(*arguments: object) -> None:
        try:
            raise interrupt
        finally:
            raise ValueError("a file is open")  # as np.savez

    monkeypatch.setattr(engines, "run_in_workers", write_a_file)
    assert engines.execute(Config(num_clients=2), Engine("inline"), lambda line: None).code == code


def test_the_cpus_are_those_that_this_process_may_use(monkeypatch) -> None:
    assert 1 <= cpus() <= (os.cpu_count() or 1)
    monkeypatch.setenv("LOKY_MAX_CPU_COUNT", "1")
    assert cpus() == 1


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system cannot bind a process to CPUs")
def test_the_cpus_are_those_to_which_this_process_is_bound() -> None:
    usable = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(usable)})
    try:
        assert cpus() == 1
    finally:
        os.sched_setaffinity(0, usable)
    assert 1 <= cpus() <= len(usable)  # fewer in a container with a quota


def test_workers_are_bounded_by_cpus_clients_memory_and_request(monkeypatch, tmp_path) -> None:
    config = Config(**SMALL)
    monkeypatch.setattr(machine, "CONTAINER", tmp_path)  # none
    monkeypatch.setattr(engines, "cpus", lambda: 8)
    size = psutil.Process().memory_info().rss

    class Memory:
        available = 100 * size

    monkeypatch.setattr(psutil, "virtual_memory", lambda: Memory)
    assert workers_of(Engine("local"), config) == 5  # clients
    assert workers_of(Engine("local", cpus_per_client=4), config) == 2
    assert workers_of(Engine("local", workers=3), config) == 3
    assert workers_of(Engine("inline"), config) == 1
    Memory.available = int(1.5 * size)
    assert workers_of(Engine("local"), config) == 1


@pytest.mark.parametrize(
    ("limit", "workers"), [(str(5 * 10**9), 3), ("max", 5), (None, 5)], ids=["a limit", "no limit", "no container"]
)
def test_workers_are_bounded_by_the_memory_of_a_container(limit, workers, monkeypatch, tmp_path) -> None:
    class Memory:
        available, rss = 100 * 10**9, 10**9

    monkeypatch.setattr(engines, "cpus", lambda: 8)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: Memory)
    monkeypatch.setattr(psutil.Process, "memory_info", lambda _: Memory)
    monkeypatch.setattr(machine, "CONTAINER", tmp_path)
    if limit:
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "memory.current").write_text(f"{4 * 10**9}\n")  # 2.5e9 of which are files that can be dropped
        (tmp_path / "memory.stat").write_text(f"anon 1\ninactive_file {5 * 10**9 // 2}\n")
    assert workers_of(Engine("local"), Config(**SMALL)) == workers


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"name": "inline", "workers": 2}, "--workers is 2, allowed with engine inline: 0"),
        ({"name": "local", "workers": -1}, "--workers is -1, allowed: 0 or more"),
        ({"name": "car"}, "engine is 'car', allowed: local, inline, flower"),
    ],
)
def test_impossible_engines_are_refused(given, reason) -> None:
    with pytest.raises(ConfigError) as refused:
        Engine(**given)
    assert str(refused.value) == reason
