"""What is sharded or offloaded has no memory between steps: using it is an error, and no crash.

The operations run in a process of their own, so that one that crashes is seen as such.
"""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gems.errors import GemsError
from gems.plans.plan import Plan
from gems.torch.tensors.released import form_of, is_released, release, restore
from gems.torch.trainer import Trainer
from gems.transport.protocol import Transport
from gems.transport.threads import run
from tests.exact import batches, plainly, same_state

L2L = {"stages": 2, "ranks": 1, "micro_batches": 2, "schedule": "l2l", "optimizer_step": "eager"}
PLANS = {
    "zero=3": Plan(stages=2, micro_batches=2, data=2, zero=3),
    "weights on the host": Plan(**L2L, offload="weights"),
    "weights on disk": Plan(**L2L, offload="weights:disk"),
    "weights on disk, zero=3": Plan(**L2L, data=2, zero=3, offload="weights:disk"),
    "optimizer on disk": Plan(stages=2, micro_batches=2, offload="optimizer:disk"),
    "optimizer on the host": Plan(stages=2, micro_batches=2, offload="optimizer"),
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(12, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)
    ).double()


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, 0.05)


def data() -> list[Any]:
    return batches((4, 3, 2, 2), 3, 3, torch.float64)


# What a user may do with a parameter, a model or an optimizer. `x` is a weight or a state tensor.
ON_TENSORS: dict[str, Callable[[Any], Any]] = {
    "add": lambda x: x + 1,
    "sum": lambda x: x.sum().item(),
    "clone": lambda x: x.detach().clone(),
    "data": lambda x: x.data.norm(),
    "write": lambda x: x.data.zero_(),
    "in place": lambda x: torch.no_grad()(lambda: x.fill_(1))(),
    "replace": lambda x: setattr(x, "data", torch.zeros(x.shape, dtype=x.dtype)),
    "copy from": lambda x: torch.empty(x.shape, dtype=x.dtype).copy_(x),
    "numpy": lambda x: x.detach().numpy().sum(),
    "list": lambda x: x.tolist(),
    "index": lambda x: x[0],
    "foreach": lambda x: torch._foreach_norm([x]),
    "operator": lambda x: torch.ops.aten.mul.Tensor(x, 2.0),
    "compare": lambda x: torch.equal(x, x),
    "to": lambda x: x.to(torch.float32),
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "save": lambda x: torch.save(x, io.BytesIO()),
    "vector": lambda x: nn.utils.parameters_to_vector([x]).sum(),
    "linear": lambda x: nn.functional.linear(torch.ones(x.shape[-1]).double(), x),
}
ON_MODELS: dict[str, Callable[[nn.Module], Any]] = {
    "forward": lambda m: m(torch.ones(1, 3, 2, 2).double()),
    "state_dict": lambda m: m.state_dict(),
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
}


def use(trainer: Trainer, held: list[Any]) -> None:
    """Everything that could crash. `held` are parameters from before the trainer was made."""
    found = [*held, *trainer.model.parameters()]
    found += [] if trainer.closed else trainer.parameters()
    assert trainer.optimizer is not None
    for group in trainer.optimizer.param_groups:
        found += group["params"]
    for state in trainer.optimizer.state.values():
        found += [x for x in state.values() if isinstance(x, torch.Tensor)]
    for x in found:
        assert repr(x) and f"{x}" and x.numel() == x.shape.numel() and hash(x) == id(x)
        assert torch.zeros_like(x).stride() == x.stride() and x.is_contiguous()
        assert torch.tensor(x).shape == x.shape  # which asks no class
        if is_released(x):
            assert not x.requires_grad or x.is_leaf
            for name, work in ON_TENSORS.items():
                rejected(name, lambda x=x, work=work: work(x))
    released = any(map(is_released, trainer.model.parameters()))
    for name, work in ON_MODELS.items() if released else ():
        rejected(name, lambda work=work: work(trainer.model))
    states = [x for state in trainer.optimizer.state.values() for x in state.values()]
    if any(map(is_released, states)):
        rejected("optimizer", lambda: copy.deepcopy(trainer.optimizer.state_dict()))


def rejected(name: str, work: Callable[[], Any]) -> None:
    try:
        work()
    except GemsError as error:
        assert "trainer." in str(error) and "not in memory" in str(error), (name, error)
    except RuntimeError as error:  # of a layer before, which is not on this rank
        assert name == "forward" and "meta" in str(error), (name, error)
    else:
        raise AssertionError(f"{name} was not rejected")


def rank(transport: Transport, plan: Plan, model: nn.Module) -> Any:
    held = list(model.parameters())
    loss = nn.functional.cross_entropy
    trainer = Trainer(
        model, loss, adam, torch.empty(2, 3, 2, 2).double(), plan, transport=transport
    )
    use(trainer, [])
    for x, y in data():
        trainer.step(x, y)
        use(trainer, [p for p in held if any(p is q for q in trainer.parameters())])
        states = [x for state in trainer.optimizer.state.values() for x in state.values()]
        assert any(map(is_released, [*trainer.parameters(), *states])), "nothing was tested"
    state = trainer.state_dict()
    use(trainer, [])
    trainer.predict(data()[0][0])
    use(trainer, [])
    trainer.close()
    use(trainer, [])
    return state


def main() -> None:
    for name, plan in PLANS.items():
        print(name, flush=True)
        model = network()  # once: ranks are threads, and threads share torch's generator

        def work(transport: Transport, plan: Plan = plan, model: nn.Module = model) -> Any:
            return rank(transport, plan, copy.deepcopy(model))

        expected = plainly(model, data(), plan.total, make=adam).state
        for state in run(plan.world, work):
            same_state(state, expected)
    print("done")


def test_using_what_has_no_memory_is_an_error_and_no_crash() -> None:
    program = f"import warnings; warnings.simplefilter('ignore'); import {__name__} as t; t.main()"
    command = [sys.executable, "-X", "faulthandler", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{done.returncode}: {done.stdout}\n{done.stderr[-3000:]}"
    assert done.stdout.split("\n") == [*PLANS, "done", ""]


# --- a tensor that is released --------------------------------------------------------------------


def test_it_says_what_it_is_and_what_to_do() -> None:
    p = nn.Parameter(torch.ones(2, 3))
    release(p, "parameter fc.weight", "is offloaded and not in memory between steps")
    assert str(p) == "<parameter fc.weight, (2, 3) of float32, is offloaded and not in memory " \
        "between steps>"  # fmt: skip
    with pytest.raises(
        GemsError, match=r"parameter fc\.weight is offloaded.*so add cannot read it"
    ):
        p + 1
    assert isinstance(p, nn.Parameter) and p.shape == (2, 3) and p.requires_grad


def test_it_is_the_same_tensor_again() -> None:
    class Own(nn.Parameter):
        """A user's own kind of parameter."""

    for p in (nn.Parameter(torch.rand(3, 2).t()), Own(torch.ones(2)), torch.arange(3)):
        kind, before, version, at = type(p), p.detach().clone(), p._version, p.data_ptr()
        release(p, "it", "is away")
        release(p, "it", "is away")  # twice is once
        assert form_of(p).data_ptr() == at
        restore(p)
        restore(p)
        assert type(p) is kind and torch.equal(p.detach(), before)
        assert (p._version, p.data_ptr()) == (version, at)


def test_backward_finds_what_forward_saved_of_it() -> None:
    p = nn.Parameter(torch.rand(3, 3, dtype=torch.float64))
    x = torch.rand(2, 3, dtype=torch.float64, requires_grad=True)
    y = (x @ p.t()).tanh() @ p
    memory = p.data.clone()
    storage = p.untyped_storage()
    release(p, "it", "is away")
    storage.resize_(0)
    storage.resize_(memory.nbytes)
    restore(p)
    p.data.copy_(memory)
    y.sum().backward()
    q = nn.Parameter(memory)
    ((x @ q.t()).tanh() @ q).sum().backward()
    assert p.grad is not None and q.grad is not None and torch.equal(p.grad, q.grad)


# --- views that a hook kept -----------------------------------------------------------------------


VIEWS: dict[str, Callable[[nn.Parameter], Any]] = {
    "view": lambda p: p.view(-1),
    "detached": lambda p: p.detach(),
    "data": lambda p: p.data[1:],
    "in a list": lambda p: [{"w": p.t()}],
}


def keep_views(plan: Plan) -> None:
    """Two steps with hooks that keep views of weights; each is used afterwards."""
    model = network()
    expected = plainly(model, data(), plan.total, make=adam).state

    def work(transport: Transport) -> Any:
        mine, kept = copy.deepcopy(model), []

        def hook(module: Any, args: Any) -> None:
            if module.weight.is_cpu and type(module.weight) is nn.Parameter:
                kept.extend((name, view(module.weight)) for name, view in VIEWS.items())

        for module in mine:
            if isinstance(module, nn.Linear):
                module.register_forward_pre_hook(hook)
        sample = torch.empty(2, 3, 2, 2).double()
        loss = nn.functional.cross_entropy
        trainer = Trainer(mine, loss, adam, sample, plan, transport=transport)
        for x, y in data():
            del kept[:-8]
            trainer.step(x, y)
            assert kept, "no hook ran"
            for name, view in kept:
                view = view[0]["w"] if isinstance(view, list) else view
                try:
                    view.sum().item()
                except GemsError as error:
                    assert "kept as a view of weights past the step; clone it" in str(error)
                else:
                    raise AssertionError(f"{name} was read")
        return trainer.state_dict()

    for state in run(plan.world, work):
        same_state(state, expected)


def kept_views() -> None:
    for name in ("zero=3", "weights on the host", "weights on disk"):
        print(name, flush=True)
        keep_views(PLANS[name])


def test_a_view_of_a_weight_that_a_hook_keeps_raises_after_the_step() -> None:
    """It was a crash, or numbers of what the memory was used for next."""
    program = f"import warnings; warnings.simplefilter('ignore'); import {__name__} as t;"
    command = [sys.executable, "-X", "faulthandler", "-c", f"{program} t.kept_views()"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{done.returncode}: {done.stdout}\n{done.stderr[-3000:]}"


# --- values that are weights ----------------------------------------------------------------------


class Handed(nn.Module):
    """A weight, or a view of one, leaves the stage that has it and is used by a later one."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 6), nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.rand(6))
        self.last, self.how = nn.Linear(6, 3), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x.flatten(1))
        if self.how == "view":
            handed = self.scale.view(1, -1)
        else:
            handed = self.scale[None] if self.how == "index" else self.scale.detach()
        return self.last(self.second(x).tanh() * handed)


@pytest.mark.parametrize("how", ["view", "index", "detach"])
@pytest.mark.parametrize(
    "plan",
    [
        Plan(stages=4, schedule="gpipe", micro_batches=2, offload="weights"),
        Plan(stages=4, schedule="gpipe", micro_batches=2, offload="weights:disk"),
        Plan(stages=4, schedule="gpipe", micro_batches=2, data=2, zero=3),
        Plan(stages=4, ranks=1, schedule="l2l", micro_batches=2, offload="weights"),
        Plan(stages=4, ranks=1, schedule="sequential", micro_batches=2, offload="weights:disk"),
    ],
    ids=("offload to the host", "offload to disk", "zero=3", "l2l", "sequential, to disk"),
)
def test_a_weight_that_is_sent_on_is_there_after_its_stage_has_dropped_it(
    plan: Plan, how: str
) -> None:
    torch.manual_seed(0)
    model = Handed(how).double()
    expected = plainly(model, data(), plan.total, make=adam)

    def work(transport: Transport) -> Any:
        loss, sample = nn.functional.cross_entropy, torch.empty(2, 3, 2, 2).double()
        trainer = Trainer(copy.deepcopy(model), loss, adam, sample, plan, transport=transport)
        losses = [trainer.step(x, y).loss for x, y in data()]
        assert trainer.predict(data()[0][0]) is not None
        return losses, trainer.state_dict()

    for losses, state in run(plan.world, work):
        assert losses == pytest.approx(expected.losses, rel=1e-10)
        same_state(state, expected.state)
