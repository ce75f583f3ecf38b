"""The request for an evaluation: a step's forward alone, of parameters where training has them."""

from __future__ import annotations

from dataclasses import replace

from zerofx.capture.objective.evaluation import Evaluation
from zerofx.driver.prepared import Earlier, Request
from zerofx.ir.batch import Batch
from zerofx.option_table import defaults_for
from zerofx.options import CompileOptions
from zerofx.scheduler.plan.decisions import Locations


def request_to_evaluate(training: Request, batch: Batch, locations: Locations) -> Request:
    """The request for what a step that is asked for as ``training`` computes of a batch without training on it.

    What is gathered is sent exactly as it is, and what is only about gradients and updates is left out.
    """
    return replace(training, batch=batch, options=_options(training.options), locations=locations, fixed=None)


def untrained(earlier: Earlier) -> Earlier:
    """What the first step of a model has made, for an evaluation: the same buckets, of which none is trained."""
    return replace(earlier, layout=earlier.layout.freeze())


def _options(options: CompileOptions) -> CompileOptions:
    changed = defaults_for(CompileOptions, "evaluation") | {
        "objective": Evaluation(options.objective),
        "recompute": "none",
        "offload": "none",
        "tile": "none" if options.tile == "none" else "auto",
        "precision": replace(options.precision, reduce_dtype=None),
    }
    return replace(options, **changed)
