"""Transfer task for distributed/dtensor.

You have 32 measurements with 8 numbers each, and for each measurement the number of its group. An
operator of yours, `group_sums(values, groups, count)`, adds up the rows of each group. On four
ranks the measurements come split by rows, and the group numbers with them.

1. Write `sums_rule`, the rule that tells DTensor **every** split and sum of one mesh dimension that
   lets each rank work alone. There are three. Group numbers are never Partial.
2. Write `group_means(values, groups, count)` for DTensors. It must never gather measurements: with
   both split by rows, all that it sends is one all-reduce, of numbers per group.

Right is: values and gradients are those of the full tensors, for all placements of the values, on
four played ranks and on two real ones.
"""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor import distribute_tensor as distribute
from torch.distributed.tensor._ops.single_dim_strategy import (
    _ShardingPlaceholder,
    register_single_dim_strategy,
)
from torch.distributed.tensor.debug import CommDebugMode, _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from course.kit import report, run_ranks

GROUPS = 5


def define_operator() -> None:
    """Make `task::group_sums` known, with its derivative; once in each process."""
    if hasattr(torch.ops.task, "group_sums"):
        return

    @torch.library.custom_op("task::group_sums", mutates_args=())
    def group_sums(values: torch.Tensor, groups: torch.Tensor, count: int) -> torch.Tensor:
        return values.new_zeros(count, values.shape[1]).index_add(0, groups, values)

    @group_sums.register_fake
    def _(values: torch.Tensor, groups: torch.Tensor, count: int) -> torch.Tensor:
        return values.new_empty(count, values.shape[1])

    def keep(ctx, inputs, output) -> None:
        ctx.save_for_backward(inputs[1])

    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad.index_select(0, ctx.saved_tensors[0]), None, None

    group_sums.register_autograd(backward, setup_context=keep)


def sums_rule(op, args, kwargs) -> list[list]:
    """Rows of [sums, values, groups]."""
    return [
        [Partial(), _ShardingPlaceholder(0), _ShardingPlaceholder(0)],  # some measurements each
        [_ShardingPlaceholder(1), _ShardingPlaceholder(1), Replicate()],  # some columns each
        [Partial(), Partial(), Replicate()],  # a sum of sums
    ]


def naive_rule(op, args, kwargs) -> list[list]:
    """Wrong: a split by rows does not go through, since a group has members on all ranks."""
    split = _ShardingPlaceholder(0)
    return [[split, split, split], *sums_rule(op, args, kwargs)[1:]]


def short_rule(op, args, kwargs) -> list[list]:
    """Right, but it forgets two ways, so DTensor gathers where it need not."""
    return sums_rule(op, args, kwargs)[1:2]


def group_sums(values: torch.Tensor, groups: torch.Tensor, count: int) -> torch.Tensor:
    """The sum of the rows of each group."""
    return torch.ops.task.group_sums(values, groups, count)


def group_means(values: torch.Tensor, groups: torch.Tensor, count: int) -> torch.Tensor:
    """The mean of the rows of each group; zero where a group has no row."""
    with_ones = torch.nn.functional.pad(values, (0, 1), value=1.0)
    sums = group_sums(with_ones, groups, count)
    if isinstance(sums, DTensor):  # sums and sizes in one go
        sums = sums.redistribute(placements=[Replicate()])
    return sums[:, :-1] / sums[:, -1:].clamp(min=1)


def naive_means(values: torch.Tensor, groups: torch.Tensor, count: int) -> torch.Tensor:
    """Wrong: the mean of the ranks' means is not the mean, as the ranks' sizes differ."""
    if not isinstance(values, DTensor):
        return group_means(values, groups, count)
    values, groups = (x.redistribute(placements=[Shard(0)]) for x in (values, groups))
    mine = group_means(values.to_local(), groups.to_local(), count)
    return DTensor.from_local(mine, values.device_mesh, [Partial("avg")])


def whole(tensor: DTensor) -> torch.Tensor:
    """The full tensor. Raises AssertionError where played ranks do not agree on it."""
    full = tensor.full_tensor()
    return full.reconcile() if isinstance(full, LocalTensor) else full


def place(tensor: torch.Tensor, placement: Placement, mesh: DeviceMesh) -> DTensor:
    """A DTensor of `tensor`; if Partial, of uneven shares."""
    if placement.is_partial():
        rows = distribute(tensor + 3, mesh, [Shard(0)], src_data_rank=None)
        shares = rows.redistribute(mesh, [Partial()]).to_local() - 3 / mesh.size()
        return DTensor.from_local(shares, mesh, [Partial()])
    return distribute(tensor, mesh, [placement], src_data_rank=None)


def findings(function: Callable, rule: Callable, mesh: DeviceMesh, data: list) -> dict[str, list]:
    """For each pair of placements: is it right, and which collectives does it send?"""
    register_single_dim_strategy(torch.ops.task.group_sums.default)(rule)
    _clear_sharding_prop_cache()
    values, groups, upstream = data
    leaf = values.clone().requires_grad_()
    wanted = function(leaf, groups, GROUPS)
    (wanted_grad,) = torch.autograd.grad(wanted, leaf, upstream)
    found = {}
    for of_values in (Replicate(), Shard(0), Shard(1), Partial()):
        for of_groups in (Replicate(), Shard(0)):
            mine = place(values, of_values, mesh).detach().requires_grad_()
            with CommDebugMode() as counter:
                result = function(mine, place(groups, of_groups, mesh), GROUPS)
            whole_upstream = place(upstream, Replicate(), mesh)
            try:
                torch.testing.assert_close(whole(result), wanted.detach(), atol=1e-4, rtol=1e-4)
                total = (result.redistribute(mesh, [Replicate()]) * whole_upstream).sum()
                (grad,) = torch.autograd.grad(total, mine)
                torch.testing.assert_close(whole(grad), wanted_grad, atol=1e-4, rtol=1e-4)
                right = True
            except AssertionError:
                right = False
            sent = {str(op).split(".")[-1]: n for op, n in counter.get_comm_counts().items()}
            found[f"{of_values} {of_groups}"] = [right, sent]
    return found


def make_data() -> list[torch.Tensor]:
    """Values, group numbers (each rank has other group sizes), and an upstream gradient."""
    draw = torch.Generator().manual_seed(0)
    groups = torch.randint(0, GROUPS, (32,), generator=draw)
    return [torch.randn(32, 8, generator=draw), groups, torch.randn(GROUPS, 8, generator=draw)]


def played(function: Callable, rule: Callable, size: int = 4) -> dict[str, list]:
    """The findings of `size` ranks in this process."""
    define_operator()
    data = make_data()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        with LocalTensorMode(size):
            return findings(function, rule, init_device_mesh("cpu", (size,)), data)
    finally:
        dist.destroy_process_group()


def on_real_ranks() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    define_operator()
    mesh = init_device_mesh("cpu", (2,))
    for function in (group_sums, group_means):
        report(function.__name__, found=findings(function, sums_rule, mesh, make_data()))
    dist.destroy_process_group()


def check_right(found: dict[str, list]) -> None:
    """Raise AssertionError where some placements give wrong values or gradients."""
    wrong = [case for case, (right, _) in found.items() if not right]
    assert not wrong, f"wrong for {wrong}"


def check_free(found: dict[str, list]) -> None:
    """Raise AssertionError unless group_sums sends nothing wherever it need not."""
    must_send = {case for case, (_, sent) in found.items() if sent}
    assert must_send == MUST_SEND, f"these send: {must_send}"


# Columns or sums of values want all group numbers, and these come by rows.
MUST_SEND = {"S(1) S(0)", "P(sum) S(0)"}


def test_the_rule_is_right_and_sends_only_what_it_must():
    found = played(group_sums, sums_rule)
    check_right(found)
    check_free(found)


def test_the_means_take_one_all_reduce():
    found = played(group_means, sums_rule)
    check_right(found)
    assert found["S(0) S(0)"][1] == {"all_reduce": 1}


def test_real_ranks_find_the_same():
    run = run_ranks(on_real_ranks, 2, quiet=True)
    for function in (group_sums, group_means):
        events = run.events(function.__name__)
        assert len(events) == 2
        assert all(event["found"] == played(function, sums_rule, 2) for event in events.values())


def test_the_check_catches_a_rule_that_splits_the_groups():
    with pytest.raises(AssertionError, match="wrong for .*S"):
        check_right(played(group_sums, naive_rule))


def test_the_check_catches_a_rule_that_forgets_ways():
    found = played(group_sums, short_rule)
    check_right(found)
    with pytest.raises(AssertionError, match="these send"):
        check_free(found)


def test_the_check_catches_a_mean_of_means():
    with pytest.raises(AssertionError, match="wrong for"):
        check_right(played(naive_means, sums_rule))
