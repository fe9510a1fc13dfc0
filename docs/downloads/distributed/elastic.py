"""An elastic training loop: it goes on without the dead and takes in the new.

From the lesson "Grow back" of the course "PyTorch 2.14, hands-on". `Group`, `Elastic` and
`hand_over` are those of the lesson. `make_problem` and `samples` stand for your model and data.

Needs the environment that every launcher sets: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT. The
store must run at that address, apart from the ranks. `python elastic.py store` starts one.
Licence: Apache-2.0.
"""

import argparse
import importlib
import json
import os
import socket
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

ROWS = 16  # samples for each rank and step


class Group:
    """A process group whose connections can be made anew."""

    def __init__(self, timeout: float) -> None:
        self.store, rank, size = next(dist.rendezvous("env://"))
        came_before = self.store.add(f"came/{rank}", 1) > 1
        self.me = size + self.store.add("extra", 1) if came_before else rank
        limit = timedelta(seconds=timeout)
        dist.init_process_group(
            "gloo", store=self.store, rank=rank, world_size=size, timeout=limit,
            enable_reconfigure=True,
        )  # fmt: skip
        self.generation, self.members, self.admitted = 0, [], 0

    def rebuild(self, generation: int, candidates: list[int], enough: int) -> None:
        """Connect the candidates that answer. Ends this process if it is not among them."""
        alone = [dist._get_reconfigure_handle()]
        dist._reconfigure(1000 * generation + 1 + self.me, alone).wait()  # closes old sockets
        self.members = self.roll_call(generation, candidates, enough)
        self.generation = generation
        cards = [self.store.get(f"{generation}/card/{member}") for member in self.members]
        dist._reconfigure(1000 * generation, [card.decode() for card in cards]).wait()

    def roll_call(self, generation: int, candidates: list[int], enough: int) -> list[int]:
        """The members of this generation: the first complete list that reaches the store."""
        self.store.set(f"{generation}/card/{self.me}", dist._get_reconfigure_handle())
        present, end = [], time.monotonic() + 10.0
        while len(present) < enough and time.monotonic() < end:
            time.sleep(0.002)
            present = [m for m in candidates if self.store.check([f"{generation}/card/{m}"])]
        law = self.store.compare_set(f"{generation}/members", "", json.dumps(present))
        if self.me not in json.loads(law):
            raise SystemExit(f"member {self.me} came too late for generation {generation}")
        return json.loads(law)


class Elastic(Group):
    """A group that goes on without the dead and takes in the new."""

    def found(self, founders: int) -> None:
        """Called once by each of the first members."""
        self.rebuild(1, list(range(founders)), founders)

    def shrink(self) -> None:
        """After an error in a collective, outside of its except block."""
        self.rebuild(self.generation + 1, self.members, len(self.members) - 1)

    def knock(self) -> None:
        """Called by a newcomer, once it has loaded everything."""
        place = self.store.add("knocks", 1) - 1
        self.store.set(f"knock/{place}", str(self.me))

    def enter(self) -> None:
        """Called by a newcomer after its knock. Returns when it is a member."""
        *plan, self.admitted = json.loads(self.store.get(f"invitation/{self.me}"))  # waits
        self.rebuild(*plan)

    def grow(self) -> bool:
        """Called by all members between two steps. True if somebody was taken in."""
        newcomer = torch.tensor([-1])
        if dist.get_rank() == 0 and self.store.add("knocks", 0) > self.admitted:
            newcomer[0] = int(self.store.get(f"knock/{self.admitted}"))
        dist.broadcast(newcomer, group_src=0)  # all decide the same, at the same step
        if newcomer < 0:
            return False
        self.admitted += 1
        plan = [self.generation + 1, [*self.members, int(newcomer)], len(self.members) + 1]
        if dist.get_rank() == 0:
            self.store.set(f"invitation/{int(newcomer)}", json.dumps([*plan, self.admitted]))
        self.rebuild(*plan)
        return True


def hand_over(net: nn.Module, optimizer: torch.optim.Optimizer, at: dict[str, int]) -> None:
    """Give everybody the weights, optimizer state and progress `at` of the furthest member."""
    steps = [0] * dist.get_world_size()
    dist.all_gather_object(steps, at["step"], weights_only=True)
    state = [{"net": net.state_dict(), "optimizer": optimizer.state_dict(), "at": at}]
    dist.broadcast_object_list(state, group_src=steps.index(max(steps)), weights_only=True)
    net.load_state_dict(state[0]["net"])
    optimizer.load_state_dict(state[0]["optimizer"])
    at.update(state[0]["at"])


def make_problem() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A network and its optimizer: put yours here."""
    net = nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 1))
    return net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


def samples(first: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The samples with the numbers `first` to `first + ROWS - 1`, the same on every rank."""
    inputs = torch.randn(ROWS, 32, generator=torch.Generator().manual_seed(first))
    return inputs, inputs.sum(1, keepdim=True).tanh()


def warm_up(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One step without a peer: what is imported or built at first use, is there then."""
    net(samples(0)[0]).sum().backward()
    optimizer.step()
    importlib.import_module("torch.distributed.nn.functional")  # DDP imports it at first use


def train(steps: int, pause: float) -> None:
    """Train to `steps` steps, over losses and replacements."""
    warm_up(*make_problem())  # on a copy of its own: it leaves gradients and momentum behind
    net, optimizer = make_problem()
    group = Elastic(timeout=30.0)
    world_size = int(os.environ["WORLD_SIZE"])
    if group.me < world_size:
        group.found(world_size)
    else:  # this process takes the place of a dead one
        group.knock()
        group.enter()
    at, changed, lost = {"step": 0, "seen": 0}, True, False
    while at["step"] < steps:
        try:
            if lost:
                group.shrink()
            changed = changed or lost or group.grow()
            if changed:
                hand_over(net, optimizer, at)
                model, changed, lost = DistributedDataParallel(net), False, False
                print(f"member {group.me}: step {at['step']}, members {group.members}", flush=True)
            inputs, targets = samples(at["seen"] + ROWS * dist.get_rank())
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            at["seen"] += ROWS * dist.get_world_size()
            at["step"] += 1
            time.sleep(pause)
        except RuntimeError as error:
            print(f"member {group.me}: {str(error)[:120]}", flush=True)
            lost = True
    weights = float(sum(weight.detach().double().sum() for weight in net.parameters()))
    print(f"member {group.me}: done at step {at['step']}, weights {weights:.9f}", flush=True)
    group.store.add("done", 1)
    while group.store.add("done", 0) < len(group.members):
        time.sleep(0.05)
    os._exit(0)  # no Python shutdown: Gloo may still be busy


def serve_store() -> None:
    """Host the store at MASTER_ADDR:MASTER_PORT, on that address only, until this is ended."""
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    listener = socket.create_server(address)  # a plain TCPStore would listen on every address
    store = dist.TCPStore(
        *address, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    print("store at", store.host, store.port, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("role", choices=["store", "train"])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds of pretended work")
    options = parser.parse_args()
    if options.role == "store":
        serve_store()
    train(options.steps, options.pause)
