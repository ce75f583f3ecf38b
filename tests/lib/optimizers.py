"""The optimizers and options under test, and the drivers that step a real optimizer and the programs of its updates."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import torch

from zerofx.optimizers import ShadowOptimizer, StandIn, UpdateProgram, run_graph

LENGTH = 37
NUM_STEPS = 12


class Lion(torch.optim.Optimizer):
    """Sign of an interpolated momentum, written the way people write optimizers."""

    def __init__(
        self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # returns no loss
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                p.data.mul_(1 - group["lr"] * group["weight_decay"])
                state = self.state[p]
                if len(state) == 0:
                    state["exp_avg"] = torch.zeros_like(p)
                beta1, beta2 = group["betas"]
                update = state["exp_avg"] * beta1 + p.grad * (1 - beta1)
                p.add_(update.sign_(), alpha=-group["lr"])
                state["exp_avg"].mul_(beta2).add_(p.grad, alpha=1 - beta2)


class CountingAdam(torch.optim.Optimizer):
    """A Python step count, states that are replaced rather than updated, a 0-dim tensor as an operand, a warm-up."""

    def __init__(self, params: Any, lr: float = 1e-2, beta: float = 0.9, warmup: int = 4):
        super().__init__(params, {"lr": lr, "beta": beta, "warmup": warmup})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # returns no loss
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if "step" not in state:
                    state["step"] = 0
                    state["decay"] = torch.tensor(1.0)
                    state["square"] = torch.full(p.shape, 0.5, dtype=p.dtype)
                state["step"] += 1
                state["decay"] = state["decay"] * group["beta"]
                state["square"] = group["beta"] * state["square"] + (1 - group["beta"]) * p.grad**2
                update = p.grad / (state["square"] / (1 - state["decay"])).sqrt().clamp(min=1e-6)
                if state["step"] <= group["warmup"]:
                    update = update * (state["step"] / group["warmup"])
                p.data = p.data - group["lr"] * torch.where(update > 1, 1.0, update)


Make = Callable[[list[torch.Tensor]], torch.optim.Optimizer]
Run = Callable[..., None]  # what ``run_graph`` takes
o = torch.optim

CASES: dict[str, Make] = {
    "sgd": lambda p: o.SGD(p, lr=0.1),
    "sgd_decay_maximize": lambda p: o.SGD(p, lr=0.1, weight_decay=0.1, maximize=True),
    "sgd_momentum": lambda p: o.SGD(p, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "sgd_nesterov": lambda p: o.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: o.Adam(p, lr=1e-2),
    "adam_l2": lambda p: o.Adam(p, lr=1e-2, weight_decay=0.1, maximize=True),
    "adam_decoupled": lambda p: o.Adam(p, lr=1e-2, weight_decay=0.1, decoupled_weight_decay=True),
    "adam_amsgrad": lambda p: o.Adam(p, lr=1e-2, amsgrad=True),
    "adamw": lambda p: o.AdamW(p, lr=1e-2),
    "adamw_amsgrad": lambda p: o.AdamW(p, lr=1e-2, amsgrad=True, maximize=True),
    "adagrad": lambda p: o.Adagrad(p, lr=0.1),
    "adagrad_all": lambda p: o.Adagrad(
        p, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.3, weight_decay=0.1, maximize=True
    ),
    "rmsprop": lambda p: o.RMSprop(p),
    "rmsprop_all": lambda p: o.RMSprop(p, centered=True, momentum=0.9, weight_decay=0.1, maximize=True),
    "adamax": lambda p: o.Adamax(p),
    "adamax_all": lambda p: o.Adamax(p, weight_decay=0.1, maximize=True),
    "nadam": lambda p: o.NAdam(p),
    "nadam_l2": lambda p: o.NAdam(p, weight_decay=0.1, maximize=True, momentum_decay=0.1),
    "nadam_decoupled": lambda p: o.NAdam(p, weight_decay=0.1, decoupled_weight_decay=True),
    "radam": lambda p: o.RAdam(p),
    "radam_l2": lambda p: o.RAdam(p, weight_decay=0.1, maximize=True),
    "radam_decoupled": lambda p: o.RAdam(p, weight_decay=0.1, decoupled_weight_decay=True),
    "adadelta": lambda p: o.Adadelta(p, weight_decay=0.1, maximize=True),
    "asgd": lambda p: o.ASGD(p, weight_decay=0.1),
    "asgd_averaging": lambda p: o.ASGD(p, t0=3, lambd=0.1),
    "rprop": lambda p: o.Rprop(p, lr=0.1, maximize=True),
    "lion": lambda p: Lion(p, weight_decay=0.1),
    "counting_adam": lambda p: CountingAdam(p),
}
FUSED_CASES = [name for name in CASES if name.split("_")[0] in ("sgd", "adam", "adamw", "adagrad")]


def program_of(
    optimizer: torch.optim.Optimizer, *, dtype: torch.dtype = torch.float32, fused: bool = False
) -> UpdateProgram:
    """The update of the first group's parameters in the first step."""
    stand_in = StandIn(0, dtype, fused=fused)
    return ShadowOptimizer(optimizer).programs([stand_in])[stand_in.key]


class Runner:
    """Steps a flat buffer by the programs of an optimizer that is followed."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, param: torch.Tensor, *, fused: bool = False, run: Run = run_graph
    ) -> None:
        self.optimizer = optimizer
        self.shadow = ShadowOptimizer(optimizer)
        self.run = run
        self.param = param
        self.fused = fused
        self.states: dict[str, torch.Tensor] = {}
        self.scalars: dict[str, Any] = {}
        self.present: frozenset[str] = frozenset()
        self.programs: list[UpdateProgram] = []

    @property
    def stand_in(self) -> StandIn:
        dtypes = {name: value.dtype for name, value in self.states.items() if name in self.present}
        singles = {spec.name for program in self.programs for spec in program.tensor_scalars}
        flat = tuple(entry for entry in dtypes.items() if entry[0] not in singles)
        single = tuple(entry for entry in dtypes.items() if entry[0] in singles)
        return StandIn(0, self.param.dtype, flat, tuple(self.scalars.items()), single, self.fused)

    def step(self, grad: torch.Tensor) -> None:
        stand_in = self.stand_in
        program = self.shadow.programs([stand_in])[stand_in.key]
        coming = self.shadow.next_step([stand_in])
        update = coming.updates[stand_in.key]
        assert update.program is program
        if program not in self.programs:
            self.programs.append(program)
        new = program.new_states(len(self.param), self.param.device) | program.new_tensor_scalars(self.param.device)
        self.states = new | self.states
        self.run(program, self.param, grad, self.states, update.numbers)
        self.scalars, self.present = update.scalars, update.present
        for change in coming.changes:
            change.swap()


def compare(
    make: Make,
    *,
    dtype: torch.dtype = torch.float32,
    fused: bool = False,
    change: Callable[[dict[str, Any], int], None] = lambda group, step: None,
) -> Runner:
    """Step the real optimizer and the followed one side by side; every bit of parameter and state has to agree."""
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(LENGTH, generator=generator).to(dtype)
    real_param = start.clone().requires_grad_()
    real = make([real_param])
    for group in real.param_groups:
        if "foreach" in group:
            group["foreach"] = False
        if "fused" in group:
            group["fused"] = fused
    for state in real.state.values() if fused else ():
        state["step"] = state["step"].float()
    followed = make([torch.nn.Parameter(torch.randn(5, 3).to(dtype))])
    runner = Runner(followed, start.clone(), fused=fused)
    for step in range(NUM_STEPS):
        for optimizer in (real, followed):
            group = optimizer.param_groups[0]
            group["lr"] = group["lr"] * (0.9 if step % 2 else 1.05)
            change(group, step)
        grad = torch.randn(LENGTH, generator=generator).to(dtype)
        real_param.grad = grad.clone()
        real.step()
        runner.step(grad.clone())
        assert torch.equal(runner.param, real_param.detach()), f"parameter differs at step {step}"
        expected = real.state[real_param]
        assert set(expected) <= runner.present, (set(expected), runner.present)
        for name, value in expected.items():
            found = runner.states.get(name, runner.scalars.get(name))
            same = found == value
            if isinstance(found, torch.Tensor) and isinstance(value, torch.Tensor):
                same = torch.equal(found, value)
            assert same, f"{name} differs at step {step}: {found} {value}"
    assert not followed.state or all(not s or float(s["step"]) == 0 for s in followed.state.values())
    return runner


class Scaled(torch.optim.Optimizer):
    """Steps another optimizer on gradients divided by their norms, and has no states of its own."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.defaults = inner, inner.defaults
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()

    param_groups = property(lambda self: self.inner.param_groups)  # those of the other
    state = property(lambda self: self.inner.state)  # that of the other

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # returns no loss
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.div_(p.grad.norm() + 1)
        self.inner.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)


class SlowWeights(Scaled):
    """Steps another optimizer, and every third time draws the parameters to slow ones, as Lookahead does."""

    state: Any = None  # its own

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner)
        self.num_steps, self.state = 0, defaultdict(dict)
        for p in self._parameters():
            self.state[p]["slow"] = p.detach().clone()

    def _parameters(self) -> list[torch.Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # returns no loss
        self.inner.step()
        self.num_steps += 1
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for p in group["params"] if group["count"] % 3 == 0 else ():
                p.copy_(self.state[p]["slow"].lerp_(p, 0.5))

    def state_dict(self) -> dict[str, Any]:
        slow = [self.state[p]["slow"] for p in self._parameters()]
        return {"slow": slow, "inner": self.inner.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict["inner"])
        self.state = defaultdict(dict)
        for p, slow in zip(self._parameters(), state_dict["slow"], strict=True):
            self.state[p]["slow"] = slow.clone()
