"""A Flower grid that only pretends: sites are functions, and messages never leave the process."""

import json

from flwr.proto.node_pb2 import NodeInfo
from flwr.supercore.task_identity import TaskIdentity

from ssfl.comm.flower.communicator import FlowerCommunicator
from ssfl.comm.flower.recipe import shared_recipe


class PretendGrid:
    """Nodes by id, each a function from message to reply (or None: never)."""

    def __init__(self, **nodes):
        TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1
        self.nodes = {int(name[1:]): node for name, node in nodes.items()}
        self.activated = dict.fromkeys(self.nodes, "morning")
        self.names = {}
        self.replies, self.count, self.sent = {}, 0, []

    def get_nodes(self):
        return [
            NodeInfo(node_id=node, last_activated_at=when, name=self.names.get(node))
            for node, when in self.activated.items()
        ]

    def push_messages(self, messages):
        keys = []
        for message in messages:
            self.count += 1
            key = f"message-{self.count}"
            message.metadata.__dict__["_message_id"] = key
            self.sent.append(message)
            reply = self.nodes[message.metadata.dst_node_id](message)
            if reply is not None:
                self.replies[key] = reply
            keys.append(key)
        return keys

    def pull_messages(self, keys):
        return [self.replies.pop(key) for key in keys if key in self.replies]


RUN = "0123456789abcdef"

grids: list[PretendGrid] = []
"""What `connect` takes the sites from."""


def connect(config, folder, hosts):
    """The transport of a coordinator whose SuperLink is the last of `grids`."""
    recipe = json.dumps(shared_recipe(config))
    communicator = FlowerCommunicator(grids[-1], RUN, recipe, patience=5)
    communicator.gather(3)
    return communicator
