"""The work in Flower: its simulation with Ray, FedAvg, one actor per worker.

An actor keeps model and images from client to client, which is kinder to Flower than its
tutorials. Θ goes out and comes back as an ArrayRecord of the state dict, as they have it.
"""

import json
import os
from functools import lru_cache

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from round import PlainLoop

from peer.work import Clock, Setting, work

SETTING = "SSFL_PEER_SETTING"

client_app = ClientApp()


@lru_cache(1)
def resident() -> PlainLoop:
    """The actor's own model and images."""
    return work(Setting(**json.loads(os.environ[SETTING])))[2]


@client_app.train()  # type: ignore[untyped-decorator]
def train(message: Message, context: Context) -> Message:
    loop, client = resident(), int(context.node_config["partition-id"])
    loop.model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    loop.round = int(message.content["config"]["server-round"]) - 1
    loop.train(client)
    metrics = MetricRecord({"num-examples": loop.data.size(client)})
    arrays = ArrayRecord(loop.model.state_dict())
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


def play(setting: Setting) -> Clock:
    os.environ[SETTING] = json.dumps(setting.__dict__)  # actors inherit it
    _, _, loop = work(setting)
    clock = Clock(loop)
    server_app = ServerApp()

    @server_app.main()  # type: ignore[untyped-decorator]
    def main(grid: Grid, context: Context) -> None:
        strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=setting.clients)

        def between_rounds(round_: int, arrays: ArrayRecord) -> None:
            if round_:
                clock.end(arrays.to_torch_state_dict)
            clock.begin()

        strategy.start(
            grid,
            ArrayRecord(loop.weights),
            num_rounds=setting.rounds,
            evaluate_fn=between_rounds,
        )
        clock.note_peak()  # while the actors are still there

    run_simulation(
        server_app,
        client_app,
        num_supernodes=setting.clients,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": setting.workers, "num_gpus": 0},
        },
    )
    return clock
