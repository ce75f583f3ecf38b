"""Traced updates give the bits of the real optimizers, whatever changes between steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.lib.optimizers import CASES, FUSED_CASES, CountingAdam, Lion, compare
from zerofx.errors import OptimizerError
from zerofx.optimizers import has_fused, run_program, scalar_state_names, trace_update


class Eager(torch.optim.Optimizer):
    """Makes its states when it is built."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        for p in self.param_groups[0]["params"]:
            self.state[p] = {"sum": torch.full_like(p, 0.5), "step": torch.tensor(0.0)}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # returns no loss
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state["step"] += 1
            state["sum"].addcmul_(p.grad, p.grad)
            p.addcdiv_(p.grad, state["sum"].sqrt(), value=-self.param_groups[0]["lr"] / state["step"].item())


def param() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.linspace(-1, 1, 12).reshape(3, 4))


@pytest.mark.parametrize("name", CASES)
def test_bits_agree_with_the_optimizer(name: str) -> None:
    compare(CASES[name])


@pytest.mark.parametrize("name", CASES)
def test_bits_agree_in_bfloat16(name: str) -> None:
    compare(CASES[name], dtype=torch.bfloat16)


@pytest.mark.parametrize("name", CASES)
def test_bits_agree_when_hyperparameters_change_branches(name: str) -> None:
    def change(group: dict[str, Any], step: int) -> None:
        if "weight_decay" in group and step in (4, 9):
            group["weight_decay"] = 0.0 if group["weight_decay"] else 0.2
        if "betas" in group and step == 6:
            group["betas"] = (0.8, 0.9)

    compare(CASES[name], change=change)


@pytest.mark.parametrize("name", FUSED_CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_bits_agree_with_the_fused_optimizer(name: str, dtype: torch.dtype) -> None:
    if not has_fused(CASES[name]([param()]), "cpu", dtype):
        pytest.skip("torch's kernel is wrong for this dtype")
    runner = compare(CASES[name], fused=True, dtype=dtype)
    assert runner.program is not None
    assert runner.program.tensor_scalars == (() if name.startswith("sgd") else ("step",))


def test_momentum_switched_on_and_off_keeps_the_buffer() -> None:
    def change(group: dict[str, Any], step: int) -> None:
        group["momentum"] = {0: 0.0, 3: 0.9, 6: 0.0, 9: 0.8}.get(step, group["momentum"])

    runner = compare(CASES["sgd"], change=change)
    assert runner.present == {"momentum_buffer"}


def test_radam_is_traced_once_a_side_of_its_switch() -> None:
    assert compare(CASES["radam"]).num_traces == 2


def test_adamw_is_traced_once() -> None:
    runner = compare(CASES["adamw"])
    assert runner.num_traces == 1
    assert runner.program is not None and not runner.program.first_step_only


def test_flags_are_guarded() -> None:
    optimizer = torch.optim.AdamW([param()])
    group = optimizer.param_groups[0]
    program = trace_update(optimizer, group)
    host, state = program.host(), program.new_scalar_states()
    assert host(group, state) is not None
    group["maximize"] = True
    assert host(group, state) is None
    assert state["step"] == 1
    with pytest.raises(OptimizerError, match="trace the update again"):
        run_program(program, torch.ones(3), torch.ones(3), program.new_states(3), state, group)


def test_tensors_among_the_hyperparameters_are_read_by_fused_kernels_alone() -> None:
    lr = torch.tensor(1e-2)
    optimizer = torch.optim.AdamW([param()], lr=lr, betas=(torch.tensor(0.9), torch.tensor(0.99)), foreach=False)
    with pytest.raises(OptimizerError, match=r"numbers among the hyperparameters of AdamW, found tensors in lr, betas"):
        trace_update(optimizer, optimizer.param_groups[0])
    program = trace_update(optimizer, optimizer.param_groups[0], fused=True)
    before, lr_before = program.host()(optimizer.param_groups[0], program.new_scalar_states()), float(lr)
    lr.fill_(0.5)
    after = program.host()(optimizer.param_groups[0], program.new_scalar_states())
    assert before is not None and after is not None
    assert [(a, b) for a, b in zip(before, after, strict=True) if a != b] == [(lr_before, 0.5)]


def test_resumed_state_decides_the_branch() -> None:
    optimizer = torch.optim.RAdam([param()])
    names = frozenset({"step", "exp_avg", "exp_avg_sq"})
    early = trace_update(optimizer, optimizer.param_groups[0], state_present=names, scalar_values={"step": 1.0})
    late = trace_update(optimizer, optimizer.param_groups[0], state_present=names, scalar_values={"step": 100.0})
    assert early.key != late.key
    assert early.key == trace_update(optimizer, optimizer.param_groups[0]).key
    assert late.host()(optimizer.param_groups[0], {"step": torch.tensor(2.0)}) is None
    assert late.host()(optimizer.param_groups[0], {"step": torch.tensor(200.0)}) is not None


def test_hooks_and_schedulers_do_not_fire_and_nothing_is_stepped() -> None:
    p = param()
    optimizer = torch.optim.AdamW([p])
    calls: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    before = p.detach().clone()
    trace_update(optimizer, optimizer.param_groups[0])
    assert not calls and not optimizer.state and torch.equal(p, before)
    assert scheduler.last_epoch == 0


def test_programs_of_equal_updates_have_equal_keys() -> None:
    groups = [{"params": [param()], "lr": 1e-3}, {"params": [param()], "lr": 1e-4}]
    optimizer = torch.optim.AdamW(groups)
    keys = {trace_update(optimizer, group).key for group in optimizer.param_groups}
    assert len(keys) == 1


def test_initial_values() -> None:
    adagrad = torch.optim.Adagrad([param()], initial_accumulator_value=0.25)
    (spec,) = trace_update(adagrad, adagrad.param_groups[0]).states
    assert (spec.name, spec.initial, spec.written_first) == ("sum", 0.25, False)
    nadam = torch.optim.NAdam([param()])
    scalars = {s.name: s.initial for s in trace_update(nadam, nadam.param_groups[0]).scalar_states}
    assert scalars == {"step": 0.0, "mu_product": 1.0}
    counting = CountingAdam([param()])
    program = trace_update(counting, counting.param_groups[0])
    assert {s.name: (s.dtype, s.initial) for s in program.scalar_states} == {
        "step": (None, 0),
        "decay": (torch.float32, 1.0),
    }
    rprop = torch.optim.Rprop([param()])
    program = trace_update(rprop, rprop.param_groups[0])
    assert program.first_step_only and [s.name for s in program.states if s.written_first] == ["step_size"]


def test_state_made_by_the_constructor() -> None:
    runner = compare(Eager)
    assert runner.num_traces == 1 and runner.present == {"sum", "step"}


def test_states_of_0_dim_parameters_are_told_apart_by_what_the_update_makes() -> None:
    temperature = torch.nn.Parameter(torch.tensor(1.0))
    adam = torch.optim.Adam([temperature])
    temperature.grad = torch.tensor(2.0)
    adam.step()
    assert scalar_state_names(adam, 0, dtype=torch.float32) == {"step"}
    eager = Eager([temperature, param()])
    assert [spec.name for spec in trace_update(eager, eager.param_groups[0]).states] == ["sum"]
    assert scalar_state_names(eager, 0, dtype=torch.float32) == {"step"}
    alone = Eager([temperature])
    with pytest.raises(OptimizerError, match="KeyError"):
        trace_update(alone, alone.param_groups[0])


def test_has_fused_is_for_the_very_class() -> None:
    class Mine(torch.optim.AdamW):
        pass

    assert has_fused(torch.optim.AdamW([param()]), "cpu", torch.float32)
    assert not has_fused(Mine([param()]), "cpu", torch.float32)
    assert not has_fused(torch.optim.RMSprop([param()]), "cpu", torch.float32)
    assert not has_fused(torch.optim.AdamW([param()]), "meta", torch.float32)
    assert not has_fused(torch.optim.SGD([param()]), "cpu", torch.bfloat16)
    assert has_fused(torch.optim.SGD([param()]), "cuda", torch.bfloat16)
    with pytest.raises(OptimizerError, match="Lion"):
        trace_update(Lion([param()]), {"lr": 1.0, "betas": (0.9, 0.9), "weight_decay": 0.0}, fused=True)


def test_low_precision_fused_sgd_can_be_traced_for_other_devices() -> None:
    optimizer = torch.optim.SGD([param()], lr=0.1, momentum=0.9)
    names = frozenset({"momentum_buffer"})
    program = trace_update(optimizer, optimizer.param_groups[0], state_present=names, dtype=torch.bfloat16, fused=True)
    assert [s.dtype for s in program.states] == [torch.bfloat16]


def test_fused_stays_close_to_the_single_tensor_update() -> None:
    optimizer = torch.optim.AdamW([param()])
    group = optimizer.param_groups[0]
    results = []
    for fused in (False, True):
        program = trace_update(optimizer, group, fused=fused)
        flat, states, scalars = torch.linspace(-1, 1, 37), program.new_states(37), program.new_scalar_states()
        for step in range(5):
            run_program(program, flat, torch.linspace(1, -1, 37) * (step + 1), states, scalars, group)
        results.append(flat)
    assert torch.allclose(results[0], results[1], rtol=0, atol=1e-6)
