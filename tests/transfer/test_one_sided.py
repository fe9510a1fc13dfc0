"""Transfer task for distributed/one-sided.

Two rollout workers stream records into the memory of a trainer. A record is a small tensor. The
trainer's window has room for SLOTS records of each worker, and a worker has many more than that.
You have a window with `put`, `signal`, `wait_signal` and `map_remote_tensor`, as in the lesson.

Write `Channel`, a queue from one worker to the trainer: `give(record)` for the worker, and `take()`
for the trainer. Several channels use one window, and each has a `base`, its first element there.

Right is: the trainer gets every record of each worker once, whole and in order, whatever the speed
of either side. What `take` returned stays as it is. A worker may run SLOTS records ahead, no more.
"""

import tempfile

import pytest
import torch
import torch.distributed as dist

from course.kit import report, run_ranks

SLOTS, WIDTH, RECORDS, TRAINER = 3, 4, 20, 2


class Window:
    """The lesson's window: data in shared files, a signal is a key in the job's store."""

    def __init__(self, folder: str, elements: int, rank: int, world: int) -> None:
        self.store, self.rank = dist.distributed_c10d._get_default_store(), rank
        self.sent, self.seen = [0] * world, [0] * world
        self.memory = [
            torch.from_file(f"{folder}/{peer}", shared=True, size=elements) for peer in range(world)
        ]

    def put(self, tensor: torch.Tensor, peer: int, offset: int) -> None:
        """Write into a peer's memory."""
        self.memory[peer][offset : offset + tensor.numel()] = tensor

    def map_remote_tensor(self, peer: int) -> torch.Tensor:
        """The peer's memory itself."""
        return self.memory[peer]

    def signal(self, peer: int) -> None:
        """Tell a peer something."""
        self.sent[peer] += 1
        self.store.set(f"signal {self.rank}>{peer} {self.sent[peer]}", "")

    def wait_signal(self, peer: int) -> None:
        """Wait for the peer's next signal."""
        self.seen[peer] += 1
        self.store.wait([f"signal {peer}>{self.rank} {self.seen[peer]}"])


# The solution.


class Channel:
    """A queue with SLOTS places, in the window of the reader."""

    def __init__(self, window: Window, writer: int, reader: int, base: int) -> None:
        self.window, self.writer, self.reader, self.base = window, writer, reader, base
        self.count = 0

    def place(self) -> int:
        """Where the next record lies; the places are used in turn."""
        self.count += 1
        return self.base + (self.count - 1) % SLOTS * WIDTH

    def give(self, record: torch.Tensor) -> None:
        """Called by the writer: waits where all places hold records that nobody took."""
        if self.count >= SLOTS:
            self.window.wait_signal(self.reader)  # one more place is free
        self.window.put(record, self.reader, self.place())
        self.window.signal(self.reader)

    def take(self) -> torch.Tensor:
        """Called by the reader: waits for a record, copies it, and only then frees its place."""
        self.window.wait_signal(self.writer)
        start = self.place()
        record = self.window.map_remote_tensor(self.reader)[start : start + WIDTH].clone()
        self.window.signal(self.writer)
        return record


# Wrong solutions.


class NaiveNoWait(Channel):
    """Orders the put with a signal, as in the lesson, but asks nobody whether the place is free."""

    def give(self, record: torch.Tensor) -> None:
        """Overwrites what was not read."""
        self.window.put(record, self.reader, self.place())
        self.window.signal(self.reader)


class NaiveView(Channel):
    """Frees the place, and hands out the place itself."""

    def take(self) -> torch.Tensor:
        """A view, not a copy."""
        self.window.wait_signal(self.writer)
        start = self.place()
        self.window.signal(self.writer)
        return self.window.map_remote_tensor(self.reader)[start : start + WIDTH]


class NaiveLockStep(Channel):
    """Waits for an answer after each record: right data, but it never runs ahead."""

    def give(self, record: torch.Tensor) -> None:
        """Uses one place at a time."""
        if self.count >= 1:
            self.window.wait_signal(self.reader)
        self.window.put(record, self.reader, self.place())
        self.window.signal(self.reader)


# The check.


class Watched(Window):
    """Says when this worker has done all that it can do before the trainer takes a record."""

    puts, told = 0, False

    def tell(self) -> None:
        """Let the trainer begin."""
        if not self.told and self.rank != TRAINER:
            self.told = True
            self.store.set(f"worker {self.rank} is ahead", str(self.puts))

    def put(self, tensor: torch.Tensor, peer: int, offset: int) -> None:
        """One put too many is done before anybody reads, so what it destroys is always seen."""
        super().put(tensor, peer, offset)
        self.puts += 1
        if self.puts > SLOTS:
            self.tell()

    def wait_signal(self, peer: int) -> None:
        """A worker that has to wait is as far ahead as it gets."""
        self.tell()
        super().wait_signal(peer)


def make_channel(kind: str, *arguments: object) -> Channel:
    """The channel class of that name."""
    kinds = (Channel, NaiveNoWait, NaiveView, NaiveLockStep)
    return {made.__name__: made for made in kinds}[kind](*arguments)


def stream(folder: str, kind: str) -> None:
    """Two workers give, the trainer takes from both in turn and looks at all of it at the end."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    window = Watched(folder, 2 * SLOTS * WIDTH, rank, 3)
    channels = [make_channel(kind, window, w, TRAINER, w * SLOTS * WIDTH) for w in range(2)]
    dist.barrier()  # the memory of all is there
    if rank == TRAINER:
        store = window.store
        ahead = [int(store.get(f"worker {worker} is ahead")) for worker in range(2)]
        taken = [[channel.take() for channel in channels] for _ in range(RECORDS)]
        report("taken", ahead=ahead, records=[[r.tolist() for r in pair] for pair in taken])
    else:
        for number in range(RECORDS):
            channels[rank].give(torch.full((WIDTH,), 100.0 * rank + number))
    dist.barrier()


def check_channel(kind: str) -> None:
    """Run the stream with a channel, and compare what arrived."""
    with tempfile.TemporaryDirectory(prefix="window-") as folder:
        run = run_ranks(stream, 3, folder=folder, kind=kind, quiet=True)
    taken = run.events("taken")[TRAINER]
    for number, pair in enumerate(taken["records"]):
        for worker, record in enumerate(pair):
            assert record == [100.0 * worker + number] * WIDTH, f"record {number} of {worker}"
    assert taken["ahead"] == [SLOTS, SLOTS], "a worker may run SLOTS records ahead, no more"


def test_every_record_arrives_once_and_in_order() -> None:
    """The solution passes."""
    check_channel("Channel")


@pytest.mark.parametrize(
    ("kind", "complaint"),
    [("NaiveNoWait", "record 0"), ("NaiveView", "record 0"), ("NaiveLockStep", "run SLOTS")],
)
def test_the_check_catches(kind: str, complaint: str) -> None:
    """Each wrong solution fails, for its own reason."""
    with pytest.raises(AssertionError, match=complaint):
        check_channel(kind)
