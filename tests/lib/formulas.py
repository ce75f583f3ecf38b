"""Closed formulas of the field for GPT-like transformers: what traced graphs and plans are held against.

A layer is attention and an MLP four times as wide, each after a layer norm and with dropout. Values take two bytes,
dropout masks one. Bytes are exact where the formula is.

Sources: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2205.05198), sections 4
and 6 and appendix A; Rajbhandari et al., "ZeRO-Infinity" (2104.07857), sections 3 and 4; Griewank and Walther,
"Revolve" (2000), for ``reversal_steps``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from zerofx.errors import UsageError


@dataclass(frozen=True)
class Transformer:
    """Layers, hidden size, attention heads, sequence length in tokens, and size of the vocabulary (0: not counted)."""

    num_layers: int
    hidden: int
    heads: int
    sequence: int
    vocabulary: int = 0

    @property
    def num_parameters(self) -> int:
        """Parameters of the layers' matrices: 12 L h^2 (ZeRO-Infinity, equation 1)."""
        return 12 * self.num_layers * self.hidden**2

    @property
    def infinity_state_bytes(self) -> int:
        """Model states with Adam in mixed precision at 20 bytes a parameter (ZeRO-Infinity, equation 2).

        fp16 parameters and gradients, and fp32 parameters, momenta, variances and *gradients*: 240 L h^2. ``Plan.
        model_state_bytes`` counts 16, as ZeRO does.
        """
        return 20 * self.num_parameters

    def layer_bytes(
        self,
        batch: int,
        *,
        tensor_parallel: int = 1,
        sequence_parallel: bool = False,
        recompute: Literal["none", "selective", "full"] = "none",
    ) -> int:
        """Activation bytes that one layer keeps for backward on one rank (Korthikanti, table 2).

        Without parallelism sbh (34 + 5 a s / h), of which 10 sbh are not divided by tensor parallelism alone;
        ``"selective"`` computes softmax and its dropout again, which is the 5 a s^2 b; ``"full"`` keeps the input.
        """
        sbh = self.sequence * batch * self.hidden
        if recompute == "full":
            return 2 * sbh
        scores = 0 if recompute == "selective" else 5 * self.heads * self.sequence**2 * batch
        whole = 10 * sbh
        return (whole // tensor_parallel if sequence_parallel else whole) + (24 * sbh + scores) // tensor_parallel

    def checkpoint_bytes(self, batch: int, layers_between: int = 1) -> int:
        """All layers' inputs that are kept, one every ``layers_between`` layers (ZeRO-Infinity, equation 3)."""
        return 2 * batch * self.sequence * self.hidden * self.num_layers // layers_between

    def working_state_bytes(self) -> int:
        """The largest linear layer, parameter and gradient in fp16 (ZeRO-Infinity, equation 4): 4 h * 4 h."""
        return 4 * self.hidden * 4 * self.hidden

    def working_activation_bytes(self, batch: int, layers_between: int = 1) -> int:
        """Activations between two checkpoints (ZeRO-Infinity, equation 5), two bytes for each element that it counts.

        The equation prints b s c (16 h + 2 a s); the paper's table of sizes fits it only as a number of elements.
        """
        return 2 * batch * self.sequence * layers_between * (16 * self.hidden + 2 * self.heads * self.sequence)

    def model_flops(self, batch: int) -> float:
        """FLOPs of forward and backward: 72 B L s h^2 (1 + s / 6h + v / 12hL) (Korthikanti, appendix A)."""
        return self._flops(batch, 6)

    def hardware_flops(self, batch: int) -> float:
        """The same with attention's scores computed again (selective): s / 3h in the place of s / 6h."""
        return self._flops(batch, 3)

    def _flops(self, batch: int, divisor: int) -> float:
        h, s = self.hidden, self.sequence
        share = 1 + s / (divisor * h) + self.vocabulary / (12 * h * self.num_layers)
        return 72 * batch * self.num_layers * s * h**2 * share


def reversal_steps(length: int, snapshots: int) -> int:
    """Least forward steps that reverse a chain of ``length`` equal steps with room for ``snapshots`` states.

    The start of the chain is one of the states. With r the least number of sweeps for which C(c + r, c) >= l this is
    r l - C(c + r, c + 1) (binomial checkpointing).

    Raises:
        UsageError: one of the numbers is below 1.
    """
    if length < 1 or snapshots < 1:
        raise UsageError(f"expected a length and snapshots of at least 1, found {length} and {snapshots}")
    sweeps = 0
    while math.comb(snapshots + sweeps, snapshots) < length:
        sweeps += 1
    return sweeps * length - math.comb(snapshots + sweeps, snapshots + 1)


def bandwidth_efficiency(intensity: float, bandwidth: float, peak: float) -> float:
    """Fraction of `peak` FLOP/s that is left when data moves at `bandwidth` bytes/s without any overlap.

    `intensity` is FLOPs per byte moved: intensity * bandwidth / (intensity * bandwidth + peak).
    Source: ZeRO-Infinity, arXiv 2104.07857.
    """
    return intensity * bandwidth / (intensity * bandwidth + peak)
