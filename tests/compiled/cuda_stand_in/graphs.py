"""Prints, as JSON, what ranks compare with each other or share, for each of two CUDA devices; and graphs of models on
stand-ins for CUDA devices, next to those captured on the CPU for a GPU."""

from __future__ import annotations

import ctypes
import json
import sys

if __name__ == "__main__":
    ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)

    import torch
    import torch.nn.functional as F
    from torch import Tensor, nn
    from torch._subclasses import FakeTensorMode

    from tests.compiled.cuda_stand_in.model import TOKENS, Model, plan
    from zerofx.capture.for_gpu.gpu import AbsentGpu
    from zerofx.capture.trace import capture
    from zerofx.codegen.region_facts import region_facts
    from zerofx.codegen.regions import regions_of
    from zerofx.ir.batch import Batch

    class Pictures(nn.Module):
        """Convolutions, norms and dropout: kernels lay out results, and keep statistics, by the device."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, stride=2)
            self.norm, self.group = nn.LayerNorm(16), nn.GroupNorm(4, 16)
            self.head = nn.Linear(16, 10)

        def forward(self, images: Tensor, targets: Tensor) -> Tensor:
            x = self.group(self.second(F.relu(self.first(images))))
            x = F.dropout(self.norm(x.mean((2, 3))), 0.1)
            noise = torch.rand(x.shape, device=x.device, dtype=x.dtype)
            where = torch.ones((), device="cuda" if x.is_cuda else "cpu", dtype=x.dtype)
            return F.cross_entropy(self.head(x * noise + where), targets)

    found = []
    for index in (0, 1):
        planned = plan(index, stage=3, world_size=2)
        with FakeTensorMode():
            batch = Batch.from_call((torch.zeros(2, 3, device=f"cuda:{index}"),), {})
        regions = region_facts(regions_of(planned.lowered.instructions), with_updates=True)
        found.append(
            {
                "batch": batch.description(),
                "captured graph": planned.lowered.stages[0].text,
                "fingerprint of the graph": planned.plan.graph,
                "plan": planned.plan.decisions_hash(),
                "keys of regions": [region.key for region in regions],
                "emitted step": planned.lowered.emitted.source,
            }
        )

    texts = []
    for kind, shapes in (
        (Model, ((4, TOKENS), (4, TOKENS))),
        (Pictures, ((2, 3, 32, 32), (2,))),
    ):
        with torch.device("meta"):
            model = kind()
        is_text = kind is Model
        dtypes = (torch.long if is_text else torch.float32, torch.long)
        meta = Batch.from_call(
            tuple(torch.empty(s, dtype=d, device="meta") for s, d in zip(shapes, dtypes, strict=True)), {}
        )
        with FakeTensorMode():
            there = tuple(torch.zeros(s, dtype=d, device="cuda:0") for s, d in zip(shapes, dtypes, strict=True))
        on_gpu = capture(model, Batch.from_call(there, {}), compute_dtype=torch.bfloat16)
        for_gpu = capture(model, meta, compute_dtype=torch.bfloat16, gpu=AbsentGpu((9, 0)))
        texts.append([(step.text(), step.fingerprint()) for step in (on_gpu, for_gpu)])
    print(json.dumps({"of devices": found, "absent": texts}))
