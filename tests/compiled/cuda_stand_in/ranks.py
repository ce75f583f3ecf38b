"""Prints, for each of two CUDA devices, what ranks compare with each other or share, as JSON."""

from __future__ import annotations

import ctypes
import json
import sys

if __name__ == "__main__":
    ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)

    import torch
    from torch._subclasses import FakeTensorMode

    from tests.compiled.cuda_stand_in.model import plan
    from zerofx.codegen.region_facts import region_facts
    from zerofx.codegen.regions import regions_of
    from zerofx.ir.batch import Batch

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
    print(json.dumps(found))
