# ---
# jupyter:
#   course:
#     title: Send tokens to experts on other ranks, and get their gradients back
#     summary: Build expert-parallel dispatch and combine, measure its balance, and swap TokenSwitch in.
#     minutes: 45
#     level: deeper
#     objectives:
#       - Dispatch tokens to experts on other ranks and combine the results, with gradients.
#       - Test that an expert-parallel layer equals the same layer on one rank.
#       - Read a load picture, and say what capacity and drops cost.
#       - Implement the TokenSwitch interface on Gloo, so that a GPU backend can take its place.
#       - Find out why a router behind TokenSwitch may never learn, and mend it.
#     prerequisites: []
#     job: {function: compare, ranks: 4}
#     features:
#       token-switch: stand-in
#     keypoints:
#       - First exchange how many tokens go where, then the tokens. The way back uses the same
#         numbers, swapped.
#       - The c10d all_to_all_single drops gradients. The functional one keeps them.
#       - A step lasts as long as its fullest expert. Look at the maximum, not at the mean.
#       - Capacity bounds the wait and drops tokens. A dropped token gets zeros from the layer.
#       - TokenSwitch is an abstract interface. Stock wheels have no GPU implementation behind it.
#       - TokenSwitch returns no gradient for the weights. Weight the results at home.
#     sources:
#       - title: PyTorch 2.14 release blog, TokenSwitch
#         url: https://pytorch.org/blog/pytorch-2-14-release-blog/
#       - title: "PR #177437, one of those behind TokenSwitch"
#         url: https://github.com/pytorch/pytorch/pull/177437
#       - title: "PR #181314, one of those behind TokenSwitch"
#         url: https://github.com/pytorch/pytorch/pull/181314
#       - title: "Switch Transformers, on capacity and balance"
#         url: https://arxiv.org/abs/2101.03961
#     moved_in_215: >-
#       Not compared: nothing here was run on 2.15. The interface is in a private module, and the
#       class in this lesson subclasses it, so a changed method shows up as an error in that cell.
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% tags=["setup"]
import os

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn

from course.kit import (
    GREY,
    INK,
    PALE_BLUE,
    PALE_ORANGE,
    expect_error,
    plot_style,
    report,
    run_ranks,
    show,
)

plot_style()

# %% [markdown]
# A **mixture of experts** (MoE) layer has many small networks, the experts, and a **router** that picks
# a few of them for each token. The layer has many weights and uses few of them at a time. The experts
# are spread over the ranks, so a token must travel to the rank of its expert and its result must travel
# back. The way there is called **dispatch**, the way back **combine**.
#
# PyTorch 2.14 brings an interface for this, `TokenSwitch`. Behind it, on NVIDIA GPUs, are kernels of
# NCCL. You build both ways yourself on Gloo first, then put your own code behind the real interface.
#
# > [!WARNING]
# > The release marks TokenSwitch **API Unstable**: it may change without a deprecation period. It lives
# > in a private module, `torch.distributed._token_switch`.

# %% [markdown]
# ## The problem: the gradient that stayed abroad
#
# The collective for the job is `all_to_all_single`: each rank cuts its tensor into pieces, one for each
# rank, and gets one piece from each. Try the one from `torch.distributed`. Two ranks exchange halves,
# and each calls `backward`.


# %%
def exchange_halves(functional_one: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mine = torch.full((4, 2), float(dist.get_rank()), requires_grad=True)
    if functional_one:
        received = functional.all_to_all_single(mine, [2, 2], [2, 2], dist.group.WORLD)
    else:
        received = torch.empty(4, 2)
        dist.all_to_all_single(received, mine, [2, 2], [2, 2])
    wait_for_me = received * 1.0  # uses the values, whichever way they came
    report("received", values=wait_for_me[:, 0].tolist(), has_gradient=wait_for_me.requires_grad)
    if wait_for_me.requires_grad:
        (received * (1.0 + dist.get_rank())).sum().backward()
        report("gradient", values=mine.grad[:, 0].tolist())
    dist.destroy_process_group()


run = run_ranks(exchange_halves, 2, functional_one=False, quiet=True)
for rank, event in run.events("received").items():
    print(f"rank {rank} received {event['values']}, gradient possible: {event['has_gradient']}")
    assert event["values"] == [0.0, 0.0, 1.0, 1.0] and not event["has_gradient"]

# %% [markdown]
# The values are right, and the result is cut off from what it came from. The sender's router and the
# layers before it would never learn. There is no error, because the result is a fresh tensor that you
# allocated.

# %% [markdown]
# ## The smallest thing that works
#
# The *functional* collectives (a private module, which DTensor and the compiler use) return a new
# tensor, and `all_to_all_single` among them has a backward: the same exchange with the sizes swapped.

# %%
run = run_ranks(exchange_halves, 2, functional_one=True, quiet=True)
for rank, event in run.events("gradient").items():
    print(f"rank {rank}: gradient of what it sent {event['values']}")
    assert event["values"] == [1.0, 1.0, 2.0, 2.0]

# %% [markdown]
# The first half of each tensor went to rank 0, which multiplied by 1, the second half to rank 1, which
# multiplied by 2. The gradients came home.

# %% [markdown]
# ## An MoE layer over ranks
#
# The expert is a small network. Each rank holds a few neighbouring ones: with 8 experts on 4 ranks,
# rank 1 has experts 2 and 3. The router is the same on all ranks.


# %%
class Router(nn.Module):
    """Picks `k` of `experts` for each token."""

    def __init__(self, width: int, experts: int, k: int) -> None:
        super().__init__()
        self.score, self.k = nn.Linear(width, experts, bias=False), k

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Expert numbers (tokens, k) and their weights (tokens, k), which sum to one."""
        scores, chosen = self.score(tokens).topk(self.k, dim=1)
        return chosen, scores.softmax(dim=1)


def make_layer(width: int = 16, experts: int = 8, k: int = 2) -> tuple[Router, nn.ModuleList]:
    """The router and all experts, the same on every rank."""
    torch.manual_seed(0)
    router = Router(width, experts, k)
    networks = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(experts)]
    return router, nn.ModuleList(networks)


# %% [markdown]
# First the layer on one rank, as the reference. Every choice of every token is one row of work:
# `token_of` says which token it is. Rows for the same expert are computed together.


# %%
def on_one_rank(router: Router, experts: nn.ModuleList, tokens: torch.Tensor) -> torch.Tensor:
    """The layer with all experts at hand."""
    chosen, weights = router(tokens)
    result = torch.zeros_like(tokens)
    for number, expert in enumerate(experts):
        token_of, slot = torch.where(chosen == number)
        result = result.index_add(
            0, token_of, weights[token_of, slot, None] * expert(tokens[token_of])
        )
    return result


# %% [markdown]
# Now over ranks. Five steps, each a few lines:
#
# 1. Sort the rows by expert, so that rows for one rank stand together.
# 2. Tell every rank how many rows come for each of its experts (`counts`).
# 3. Send the rows.
# 4. Compute, expert by expert.
# 5. Send the results back, with the sizes swapped, and add them up at home, weighted.


# %%
def over_ranks(router: Router, mine: nn.ModuleList, tokens: torch.Tensor) -> torch.Tensor:
    """The layer where this rank holds only the experts `mine`."""
    size, local = dist.get_world_size(), len(mine)
    chosen, weights = router(tokens)
    order = chosen.flatten().argsort(stable=True)  # 1
    token_of, weight_of = order // router.k, weights.flatten()[order]
    counts = torch.bincount(chosen.flatten(), minlength=size * local)
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts)  # 2: whole numbers need no gradient
    send = counts.view(size, local).sum(1).tolist()
    receive = arriving.view(size, local).sum(1).tolist()
    rows = functional.all_to_all_single(tokens[token_of], receive, send, dist.group.WORLD)  # 3
    expert_of = torch.arange(local).repeat(size).repeat_interleave(arriving)
    results = torch.zeros_like(rows)
    for number, expert in enumerate(mine):  # 4
        at = torch.where(expert_of == number)[0]
        results = results.index_copy(0, at, expert(rows[at]))
    back = functional.all_to_all_single(results, send, receive, dist.group.WORLD)  # 5
    return torch.zeros_like(tokens).index_add(0, token_of, weight_of[:, None] * back)


# %% [markdown]
# Is it right? Equal outputs are half of the answer: the gradients must agree as well, of the tokens, of
# the router and of the experts. Each of four ranks has its own tokens, and compares with the reference.


# %%
def compare() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    router, experts = make_layer()
    local = len(experts) // size
    mine = experts[rank * local : (rank + 1) * local]
    everybody = [
        torch.randn(32, 16, generator=torch.Generator().manual_seed(r)) for r in range(size)
    ]
    tokens = everybody[rank].requires_grad_()
    output = over_ranks(router, mine, tokens)
    output.square().sum().backward()
    found = [
        tokens.grad,
        *(p.grad for p in router.parameters()),
        *(p.grad for p in mine.parameters()),
    ]
    router_reference, all_experts = make_layer()
    own = tokens.detach().clone().requires_grad_()
    others = [t.detach() for r, t in enumerate(everybody) if r != rank]
    reference = on_one_rank(router_reference, all_experts, own)
    reference.square().sum().backward()
    wanted = [own.grad, *(p.grad.clone() for p in router_reference.parameters())]
    on_one_rank(router_reference, all_experts, torch.cat(others)).square().sum().backward()
    wanted += [p.grad for p in all_experts[rank * local : (rank + 1) * local].parameters()]
    same = [torch.allclose(a, b, atol=1e-4) for a, b in zip(found, wanted, strict=True)]
    report("same", output=torch.allclose(output, reference, atol=1e-5), gradients=all(same))
    dist.destroy_process_group()


run = run_ranks(compare, 4, quiet=True)
for rank, event in run.events("same").items():
    print(
        f"rank {rank}: output equal: {event['output']}, all gradients equal: {event['gradients']}"
    )
    assert event["output"] and event["gradients"]

# %% [markdown]
# An expert's gradient has the contributions of all ranks' tokens, since they came to it. So experts need
# **no** gradient averaging. The router, which exists on every rank, does: its gradient here holds this
# rank's tokens only. In DDP, leave the experts out.

# %% [markdown]
# ## Look inside: who has how much to do?
#
# All ranks wait for the fullest one. Count the rows of each expert, for a router fresh from its
# initialisation and tokens that resemble each other, as tokens of one text do.

# %%
router, experts = make_layer(experts=16)
torch.manual_seed(1)
text = torch.randn(512, 16) + 1.5 * torch.randn(16)  # all tokens share a direction
scattered = torch.randn(512, 16)
loads = {}
for name, tokens in {
    "tokens that share a direction": text,
    "independent tokens": scattered,
}.items():
    chosen, _ = router(tokens)
    loads[name] = torch.bincount(chosen.flatten(), minlength=16)
    mean, most = loads[name].float().mean(), loads[name].max()
    print(
        f"{name}: mean {mean:.0f} rows, fullest expert {most}: the step takes {most / mean:.1f} times"
    )
    assert loads[name].sum() == 2 * 512
skew = [(load.max() / load.float().mean()).item() for load in loads.values()]
assert skew[0] > 1.5 * skew[1]

# %%
fig, axes = plt.subplots(1, 2, figsize=(7.0, 2.9), sharey=True)
for ax, (name, load), colour, hatch in zip(
    axes, loads.items(), (PALE_ORANGE, PALE_BLUE), ("//", ""), strict=True
):
    ax.bar(range(16), load.tolist(), color=colour, hatch=hatch, edgecolor=INK)
    ax.axhline(load.sum().item() / 16, color=GREY, ls="--")
    ax.text(15.6, load.sum().item() / 16 + 6, "mean", color=GREY, ha="right", fontsize=9)
    ax.set(title=name, xlabel="expert", xticks=range(0, 16, 5))
axes[0].set_ylabel("rows of work")
show(
    fig,
    alt="Two bar charts of rows of work for 16 experts. On the left, for tokens that share a direction, "
    "a few experts have most of the rows and many have none. On the right the bars are near the mean.",
)

# %% [markdown]
# On the left most experts idle while a few work. Two cures are common: an extra loss that pushes the
# router towards balance, and a **capacity**, a limit on the rows that an expert takes. What is above the
# limit is dropped. The limit is usually given as a factor on the mean.

# %%
load = loads["tokens that share a direction"]
mean = load.sum() / 16
print("factor  rows an expert takes  dropped  empty places")
dropped_shares = []
for factor in (1.0, 1.5, 2.0, 4.0):
    capacity = int(factor * mean)
    dropped = (load - capacity).clamp(min=0).sum() / load.sum()
    empty = (capacity - load).clamp(min=0).sum() / (16 * capacity)
    dropped_shares.append(dropped.item())
    print(f"{factor:6} {capacity:21} {dropped:8.0%} {empty:12.0%}")
assert dropped_shares == sorted(dropped_shares, reverse=True) and dropped_shares[0] > 0.2

# %% [markdown]
# A small factor drops much. A large one leaves places empty, and if buffers have the size of the
# capacity, empty places travel too. A dropped row gives zero, so a token that lost all its rows leaves
# the layer as zeros. That is why an MoE layer stands beside a residual connection.

# %% [markdown]
# ## What TokenSwitch wraps
#
# `TokenSwitchNCCL` does steps 2, 3 and 5 in kernels of NCCL, without a trip of the counts to the CPU (our
# `tolist` waits for them). Ask the wheel for it:

# %% tags=["raises", "claim"] claim="text-token-switch-build"
from torch.distributed import _token_switch as token_switch

with expect_error(ImportError):
    token_switch.TokenSwitchNCCL(None, 8, 32, 64, 64)
print("built into this wheel:", hasattr(torch, "_nccl_ep"))
assert not hasattr(torch, "_nccl_ep")

# %% [markdown]
# The message asks for a package. The reason behind it is that `torch._nccl_ep`, the compiled part, is not
# in the official wheel. It needs a build of PyTorch with `USE_NCCL_EP=1`.
#
# But the class above it is an ordinary abstract class, and it is there:

# %%
print("you implement:", sorted(token_switch.TokenSwitch.__abstractmethods__))
print("you call:      create_routing, dispatch, combine")
assert token_switch.TokenSwitch.__abstractmethods__ == {"create_routing", "_dispatch", "_combine"}

# %% [markdown]
# So put Gloo behind it. The interface asks for fixed buffers: `dispatch` fills `max_recv_tokens` places
# and the rest stays zero. A token goes to a *rank* once, even if two of its experts live there. Its
# weights and expert numbers travel along. We mark an expert number that is not for this rank with -1.
# (How NCCL's kernels mark it is not visible here. This is our own choice.)


# %%
class GlooTokenSwitch(token_switch.TokenSwitch):
    """TokenSwitch over all_to_all_single: a stand-in for TokenSwitchNCCL, with its interface."""

    def __init__(self, experts: int, max_recv_tokens: int) -> None:
        self.local = experts // dist.get_world_size()
        self._max_recv_tokens_per_rank = max_recv_tokens  # the backward of combine reads this

    def create_routing(self, topk_idx, per_expert_token_counts=None):
        ranks = topk_idx // self.local
        to_rank = torch.stack([(ranks == r).any(1) for r in range(dist.get_world_size())])
        send = to_rank.sum(1)
        receive = torch.empty_like(send)
        dist.all_to_all_single(receive, send)
        rows = torch.where(to_rank)[1]  # token numbers, grouped by rank
        handle = {"rows": rows, "send": send.tolist(), "receive": receive.tolist()}
        return token_switch.Routing(handle, topk_idx)

    def exchange(self, tensor, handle):
        received = tensor.new_empty(sum(handle["receive"]), *tensor.shape[1:])
        dist.all_to_all_single(received, tensor, handle["receive"], handle["send"])
        return received

    def _dispatch(self, routing, tokens, weights, out_tokens, out_weights, out_idx):
        handle, count = routing.handle, sum(routing.handle["receive"])
        for source, out in (
            (tokens, out_tokens),
            (weights, out_weights),
            (routing.topk_idx, out_idx),
        ):
            out[:count] = self.exchange(source[handle["rows"]].contiguous(), handle)
        first = dist.get_rank() * self.local
        out_idx[(out_idx < first) | (out_idx >= first + self.local)] = -1
        out_idx[count:] = -1

    def _combine(self, routing, expert_tokens, out_tokens):
        handle, count = routing.handle, sum(routing.handle["receive"])
        back = expert_tokens.new_empty(sum(handle["send"]), *expert_tokens.shape[1:])
        results = expert_tokens[:count].contiguous()
        dist.all_to_all_single(back, results, handle["send"], handle["receive"])
        out_tokens.zero_().index_add_(0, handle["rows"], back)


# %% [markdown]
# The layer on top knows nothing of Gloo or NCCL. It gets a switch, and asks it to dispatch and combine.
# The weights that arrived with the tokens are applied where the experts are.


# %%
def through_switch(switch, router, mine, tokens, places: int) -> torch.Tensor:
    """The MoE layer on any TokenSwitch; `places` bounds the tokens that a rank receives."""
    chosen, weights = router(tokens)
    routing = switch.create_routing(chosen)
    rows, row_weights, row_experts = switch.dispatch(routing, tokens, weights, places)
    first = dist.get_rank() * len(mine)
    results = torch.zeros_like(rows)
    for number, expert in enumerate(mine):
        at, slot = torch.where(row_experts == first + number)
        results = results.index_add(0, at, row_weights[at, slot, None] * expert(rows[at]))
    return switch.combine(routing, results)


def compare_switch() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    router, experts = make_layer()
    local = len(experts) // size
    mine = experts[rank * local : (rank + 1) * local]
    tokens = torch.randn(32, 16, generator=torch.Generator().manual_seed(rank))
    switch = GlooTokenSwitch(len(experts), max_recv_tokens=32 * size)
    output = through_switch(switch, router, mine, tokens.requires_grad_(), 32 * size)
    output.square().sum().backward()
    reference = on_one_rank(*make_layer(), tokens)
    report("output", same=torch.allclose(output, reference, atol=1e-5))
    report("gradients", experts=mine[0][0].weight.grad is not None, router=router.score.weight.grad)
    dist.destroy_process_group()


run = run_ranks(compare_switch, 2, quiet=True)
for rank, event in run.events("output").items():
    gradients = run.events("gradients")[rank]
    print(f"rank {rank}: output equal {event['same']}; experts learn: {gradients['experts']}")
    print(f"        gradient of the router: {gradients['router']}")
    assert event["same"] and gradients["experts"] and gradients["router"] is None

# %% [markdown]
# ## Break it: a router that never learns
#
# Read the last line. The output is right, the experts learn, and the router has **no gradient at all**.
# The interface says so in its documentation: the weights are "routing metadata". They travel with the
# tokens, and no gradient travels back.
#
# > [!WARNING]
# > A model with such a router trains, and its loss falls, because the experts learn. The router stays
# > what it was at random. Check `router.score.weight.grad` once.
#
# In the last exercise you mend it, without a change to the interface.

# %% [markdown]
# ## On the real hardware
#
# On GPUs with a build that has `torch._nccl_ep`, only the switch changes. The layer stays. This cell was
# not run for this page.


# %% tags=["hardware"] hardware="cuda"
def switch_for(experts: int, tokens: int, width: int, dtype: torch.dtype):
    """A TokenSwitch for the default group: NCCL's on GPUs."""
    size = dist.get_world_size()
    token_bytes = width * torch.finfo(dtype).bits // 8
    group = dist.group.WORLD
    return token_switch.TokenSwitchNCCL(group, experts, tokens, tokens * size, token_bytes)


if hasattr(torch, "_nccl_ep") and "RANK" in os.environ:
    dist.init_process_group("nccl")
    print(switch_for(8, 32, 16, torch.bfloat16))
    dist.destroy_process_group()
else:
    print("skipped: needs NVIDIA GPUs, torchrun, and a PyTorch built with USE_NCCL_EP=1")

# %% [markdown] tags=["instructor"]
# Draw two ranks with two experts each and five tokens on the board, and let the room move the tokens
# before you show step 1. The sort by expert is what people find hard.
#
# Ask at the load picture: "Which number decides the time of the step?" Then: "What does a dropped token
# look like after the layer?" Common wrong answers: "an error", "its old value" (that needs the residual).
#
# Timing: problem and smallest 8 minutes, layer and test 14, load 8, TokenSwitch 15.

# %% [markdown]
# ## Your turn
#
# ### Exercise: what travels?
#
# Write `bytes_sent(chosen, rank, size, experts, width, once_per_rank)`: the bytes of float32 tokens that
# leave this rank for *other* ranks. `chosen` is (tokens, k). With `once_per_rank=False` count as
# `over_ranks` sends (each choice is a row), with `True` as `GlooTokenSwitch` does.


# %% tags=["exercise"] exercise="what-travels" difficulty=1 minutes=8
def bytes_sent(
    chosen: torch.Tensor, rank: int, size: int, experts: int, width: int, once_per_rank: bool
) -> int:
    """Bytes of float32 tokens that leave rank `rank` in the dispatch."""
    raise NotImplementedError


# %% [markdown] tags=["hint"]
# First turn expert numbers into rank numbers. A row that stays at home costs nothing.


# %% tags=["solution"]
def bytes_sent(
    chosen: torch.Tensor, rank: int, size: int, experts: int, width: int, once_per_rank: bool
) -> int:
    """Bytes of float32 tokens that leave rank `rank` in the dispatch."""
    targets = chosen // (experts // size)
    if once_per_rank:
        rows = sum(int((targets == other).any(1).sum()) for other in range(size) if other != rank)
    else:
        rows = int((targets != rank).sum())
    return rows * width * 4


# %% tags=["check"]
picks = torch.tensor([[0, 1], [2, 3], [0, 3], [2, 5], [6, 7]])  # 8 experts on 4 ranks
assert bytes_sent(picks, 0, 4, 8, 16, once_per_rank=False) == 7 * 64
assert bytes_sent(picks, 0, 4, 8, 16, once_per_rank=True) == 5 * 64
assert bytes_sent(picks, 1, 4, 8, 16, once_per_rank=True) == 4 * 64
assert bytes_sent(picks, 0, 1, 8, 16, once_per_rank=True) == 0
print("what-travels: correct")

# %% [markdown]
# ### Exercise: keep what fits
#
# Write `keep(chosen, capacity)`: a mask of the shape of `chosen` that says which choices an expert takes
# if it takes at most `capacity` rows. Who comes first is served: rows are in the order of the tokens, and
# within a token in the order of its choices. Do it without a Python loop over tokens.


# %% tags=["exercise"] exercise="keep-what-fits" difficulty=2 minutes=12
def keep(chosen: torch.Tensor, capacity: int) -> torch.Tensor:
    """Which choices (tokens, k) are within the capacity of their expert."""
    raise NotImplementedError


# %% [markdown] tags=["hint"]
# For each row, count how many rows *before it* chose the same expert. A one-hot matrix (rows, experts)
# and `cumsum` along the rows give that count.


# %% tags=["solution"]
def keep(chosen: torch.Tensor, capacity: int) -> torch.Tensor:
    """Which choices (tokens, k) are within the capacity of their expert."""
    one_hot = nn.functional.one_hot(chosen.flatten())
    place = (one_hot.cumsum(0) * one_hot).sum(1)  # 1 for the first row of an expert, 2 for the next
    return (place <= capacity).view_as(chosen)


# %% tags=["check"]
picks = torch.tensor([[0, 1], [0, 2], [0, 1], [1, 0]])
assert keep(picks, 2).tolist() == [[True, True], [True, True], [False, True], [False, False]]
assert keep(picks, 9).all() and keep(picks, 1).sum() == 3
many = torch.randint(0, 8, (1000, 2), generator=torch.Generator().manual_seed(3))
kept = torch.bincount(many[keep(many, 50)], minlength=8)
assert kept.max() == 50
print("keep-what-fits: correct")

# %% [markdown]
# The last exercise needs a switch that works without other ranks. Here is one, with the same interface.


# %%
class LocalTokenSwitch(token_switch.TokenSwitch):
    """TokenSwitch for one rank: every expert is at home."""

    def __init__(self, max_recv_tokens: int) -> None:
        self._max_recv_tokens_per_rank = max_recv_tokens

    def create_routing(self, topk_idx, per_expert_token_counts=None):
        return token_switch.Routing(None, topk_idx)

    def _dispatch(self, routing, tokens, weights, out_tokens, out_weights, out_idx):
        count = len(tokens)
        out_tokens[:count], out_weights[:count] = tokens, weights
        out_idx.fill_(-1)[:count] = routing.topk_idx

    def _combine(self, routing, expert_tokens, out_tokens):
        out_tokens.copy_(expert_tokens[: len(out_tokens)])


# %% [markdown]
# ### Exercise: a router that learns
#
# The layer below uses that switch as the lesson did, and its router gets no gradient. Rewrite the
# layer so that the router learns, and the output stays the same. You may dispatch and combine more
# than once. You may not change the switch. The columns of `row_experts` and of `row_weights` are in
# the order of the choices of each token, as you gave them.


# %% tags=["exercise"] exercise="router-learns" difficulty=3 minutes=15
def learning_layer(switch, router, experts, tokens, places: int) -> torch.Tensor:
    """The MoE layer on a TokenSwitch, with a gradient for the router."""
    chosen, weights = router(tokens)
    routing = switch.create_routing(chosen)
    rows, row_weights, row_experts = switch.dispatch(routing, tokens, weights, places)
    results = torch.zeros_like(rows)
    for number, expert in enumerate(experts):
        at, slot = torch.where(row_experts == number)
        results = results.index_add(0, at, row_weights[at, slot, None] * expert(rows[at]))
    return switch.combine(routing, results)


# %% [markdown] tags=["hint"]
# The weights have a gradient where they were made: at home. What would you have to get back from the
# switch so that you can multiply *after* `combine`? And why does one `combine` of a sum over both choices
# not give you that?


# %% tags=["solution"]
def learning_layer(switch, router, experts, tokens, places: int) -> torch.Tensor:
    """The MoE layer on a TokenSwitch, with a gradient for the router."""
    chosen, weights = router(tokens)
    output = torch.zeros_like(tokens)
    for choice in range(router.k):  # one trip a choice, so that results come back apart
        mine = chosen[:, choice : choice + 1].contiguous()
        routing = switch.create_routing(mine)
        ones = torch.ones_like(mine, dtype=tokens.dtype)
        rows, _, row_experts = switch.dispatch(routing, tokens, ones, places)
        results = torch.zeros_like(rows)
        for number, expert in enumerate(experts):
            at, _ = torch.where(row_experts == number)
            results = results.index_add(0, at, expert(rows[at]))
        output = output + weights[:, choice, None] * switch.combine(routing, results)
    return output


# %% tags=["check"]
router_check, experts_check = make_layer()
tokens_check = torch.randn(20, 16, generator=torch.Generator().manual_seed(7))
output = learning_layer(LocalTokenSwitch(24), router_check, experts_check, tokens_check, 24)
output.square().sum().backward()
router_wanted, experts_wanted = make_layer()
wanted = on_one_rank(router_wanted, experts_wanted, tokens_check)
wanted.square().sum().backward()
assert torch.allclose(output, wanted, atol=1e-5), "the output changed"
assert router_check.score.weight.grad is not None, "the router has no gradient"
assert torch.allclose(router_check.score.weight.grad, router_wanted.score.weight.grad, atol=1e-4)
assert torch.allclose(experts_check[3][0].weight.grad, experts_wanted[3][0].weight.grad, atol=1e-4)
print("router-learns: correct")

# %% [markdown]
# It costs one more trip. Where that is too much, send the gradient of the weights another way, or give
# the router its own loss.

# %% [markdown]
# ## Check yourself

# %% [markdown] tags=["quiz"]
# Why are the counts exchanged before the tokens?
#
# - [ ] Gloo demands it.
#   > It demands right sizes. Where they come from is your business.
# - [x] A rank must know how many rows come from each rank, to cut and to allocate.
#   > Each rank chose for itself. Only an exchange tells what the others chose.
# - [ ] To find the fullest expert.
#   > You could use them for that. The exchange needs them first.

# %% [markdown] tags=["quiz"]
# Experts are spread over ranks, and the whole model is wrapped in DDP, which averages all gradients.
# What happens to the experts?
#
# - [ ] Nothing: an average of equal gradients is the same.
#   > Rank 0's expert is another network than rank 1's.
# - [x] Gradients of *different* experts are averaged, and both learn the wrong thing.
#   > An expert's gradient is complete where it lives. Leave experts out of DDP.
# - [ ] DDP raises an error about shapes.
#   > The shapes are equal, so nobody complains.

# %% [markdown] tags=["quiz"]
# Sixteen experts have 64 rows on average, the fullest has 320. By how much could perfect balance shorten
# the expert part of the step?
#
# - [ ] Not at all: the number of rows stays the same.
#   > The sum does. The step waits for the maximum.
# - [x] To a fifth.
#   > 64 instead of 320 rows for the rank that everybody waits for.
# - [ ] By a factor of sixteen.
#   > That would be so if one expert had all the rows.

# %% [markdown] tags=["quiz"]
# You put TokenSwitch into your model. The loss falls, but less than before. What do you look at first?
#
# - [ ] The learning rate of the experts.
#   > Possible, but there is a known trap that you can rule out in one line.
# - [x] Whether the router's weights have a gradient.
#   > They have none if the weights are applied where the experts are.
# - [ ] Whether Gloo is slower than NCCL.
#   > That changes the time, not the loss.
