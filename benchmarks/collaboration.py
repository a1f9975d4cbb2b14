"""The server's round of FedeRiCo: ratio of its time to copying the models that it has to move.

    python -m benchmarks.collaboration [CLIENTS] [MILLIONS OF PARAMETERS]

Every client has 3 neighbours. A round packs each client's own and its neighbours' models into a message, and receives
as many updates. The reference is to copy each of these models once, from memory to memory, which cannot be avoided.
Making the replies, which is the clients' part, is not counted. Repetitions alternate; ratios are of the shortest times.
"""

from __future__ import annotations

import sys
import time
from functools import partial

import numpy as np
from flwr.app import ConfigRecord, MetricRecord, RecordDict

from kindred import FedeRiCo
from kindred.engine.admission import admit
from kindred.messages import to_record

REPEATS = 5


def main(clients: int, size: int) -> None:
    rng = np.random.default_rng(0)
    strategy = FedeRiCo(num_neighbours=3)
    strategy.begin(to_record({"weight": rng.standard_normal(size, np.float32)}))
    everybody = list(range(clients))
    strategy.roster.nodes = {client: client for client in everybody}
    for client in everybody:
        strategy.models.put(client, {"weight": rng.standard_normal(size, np.float32)})
    update = {f"{place}/weight": rng.standard_normal(size, np.float32) for place in range(4)}
    reply = RecordDict(
        {
            "arrays": to_record(update),
            "metrics": MetricRecord({"num-examples": 100}),
            "config": ConfigRecord({"losses": [1.0, 1.1, 1.2, 1.3]}),
        }
    )
    moved = 4 * clients
    print(f"{clients} clients, {size / 1e6:g} million parameters each: {4 * clients * size / 1e9:.2f} GB of models")

    source, target = strategy.models._rows, np.zeros(size, np.float32)
    rounds, copies = [], []
    for server_round in range(1, REPEATS + 1):
        started = time.perf_counter()
        for receiver, record in strategy.outgoing(server_round, everybody):
            assert len(record) == 4
            RecordDict({"arrays": record, "config": ConfigRecord(strategy.round_config(server_round, receiver))})
        for client in everybody:
            strategy.history.add(
                {
                    "round": server_round,
                    "client": client,
                    "status": "ok",
                    "seconds": 0.0,
                    "bytes-down": 0,
                    "bytes-up": 0,
                }
            )
            admitted = admit(reply, "num-examples", partial(strategy.mismatch, client))
            strategy.inspect(client, admitted)
            strategy.take(client, admitted)
        strategy.end_round(server_round, everybody)
        rounds.append(time.perf_counter() - started)
        strategy.history.close_round(server_round, 0.0, strategy.personal)
        started = time.perf_counter()
        for number in range(2 * moved):
            np.copyto(target, source[number % clients])
        copies.append(time.perf_counter() - started)
    print(f"a round {min(rounds):.2f} s, copying {moved} models out and {moved} updates in {min(copies):.2f} s")
    print(f"time over the bare copying: {min(rounds) / min(copies):.2f}")


if __name__ == "__main__":
    numbers = [float(argument) for argument in sys.argv[1:]]
    main(int(numbers[0]) if numbers else 100, int((numbers[1] if len(numbers) > 1 else 2) * 1e6))
