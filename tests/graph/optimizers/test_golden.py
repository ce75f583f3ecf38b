"""The text of a program, as people read it in the generated step."""

from __future__ import annotations

import torch

from zerofx.optimizers import trace_update

ADAMW_HOST = '''\
def adamw_scalars(group, state):
    """Scalars of one AdamW update; None if this update is for other options or another branch."""
    if group["amsgrad"] or group["maximize"] or not group["decoupled_weight_decay"]:
        return None
    weight_decay = float(group["weight_decay"])
    lr = float(group["lr"])
    beta1, beta2 = map(float, group["betas"])
    eps = float(group["eps"])
    if weight_decay == 0:
        return None
    new_step = state["step"] + 1
    step = new_step.item()
    bias_correction2 = 1 - beta2 ** step
    bias_correction2_sqrt = bias_correction2 ** 0.5
    bias_correction1 = 1 - beta1 ** step
    step_size = lr / bias_correction1
    state["step"].copy_(new_step)
    return (
        1 - lr * weight_decay,  # s0: mul_
        1 - beta1,  # s1: lerp_
        beta2,  # s2: mul_
        1 - beta2,  # s3: addcmul_
        bias_correction2_sqrt,  # s4: div
        eps,  # s5: add_
        -step_size,  # s6: addcdiv_
    )
'''

ADAMW_GRAPH = """\
param, grad, exp_avg, exp_avg_sq, s0, s1, s2, s3, s4, s5, s6
mul_ = aten.mul_.Tensor(param, s0)
lerp_ = aten.lerp_.Scalar(exp_avg, grad, s1)
mul__1 = aten.mul_.Tensor(exp_avg_sq, s2)
addcmul_ = aten.addcmul_.default(mul__1, grad, grad, value=s3)
sqrt = aten.sqrt.default(addcmul_)
div = aten.div.Tensor(sqrt, s4)
add_ = aten.add_.Tensor(div, s5)
addcdiv_ = aten.addcdiv_.default(mul_, lerp_, add_, value=s6)
"""

SGD_FIRST_GRAPH = """\
param, grad, momentum_buffer, s0
copy_ = aten.copy_.default(momentum_buffer, grad)
add_ = aten.add_.Tensor(param, copy_, alpha=s0)
"""

FUSED_ADAMW_GRAPH = """\
param, grad, exp_avg, exp_avg_sq, step, s0, s1, s2, s3, s4
_foreach_add_ = aten._foreach_add_.Scalar([step], 1)
_fused_adamw_ = aten._fused_adamw_.default([param], [grad], [exp_avg], [exp_avg_sq], [], [step], \
lr=s0, beta1=s1, beta2=s2, weight_decay=s3, eps=s4, amsgrad=False, maximize=False)
"""


def text(graph: torch.fx.Graph) -> str:
    lines = [", ".join(str(node.target) for node in graph.nodes if node.op == "placeholder")]
    for node in graph.nodes:
        if node.op == "call_function":
            arguments = [str(arg) for arg in node.args] + [f"{key}={value}" for key, value in node.kwargs.items()]
            lines.append(f"{node.name} = {node.target}({', '.join(arguments)})")
    return "\n".join(lines) + "\n"


def param() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(2, 2))


def test_adamw() -> None:
    optimizer = torch.optim.AdamW([param()])
    program = trace_update(optimizer, optimizer.param_groups[0])
    assert program.host_source == ADAMW_HOST
    assert text(program.graph) == ADAMW_GRAPH


def test_first_step_of_sgd_writes_the_momentum_buffer() -> None:
    optimizer = torch.optim.SGD([param()], lr=0.1, momentum=0.9)
    program = trace_update(optimizer, optimizer.param_groups[0])
    assert text(program.graph) == SGD_FIRST_GRAPH
    assert program.first_step_only and program.state_after == {"momentum_buffer"}


def test_fused_adamw() -> None:
    optimizer = torch.optim.AdamW([param()])
    program = trace_update(optimizer, optimizer.param_groups[0], fused=True)
    assert text(program.graph) == FUSED_ADAMW_GRAPH
