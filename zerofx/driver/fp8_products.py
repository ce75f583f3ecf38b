"""Products in fp8: decided on rank 0, for each model once, and carried out in the captured step of each rank."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict

from zerofx.driver.captures import Captures
from zerofx.driver.prepared import Earlier, Request
from zerofx.errors import UsageError, notify
from zerofx.json_format import from_data
from zerofx.scheduler.plan.decisions import ProductDecision
from zerofx.scheduler.plan.plan import Plan
from zerofx.scheduler.search.fp8_products import ProductKey, decide_products
from zerofx.units import first_few


def choose_products(
    request: Request, captures: Captures, earlier: Earlier | None, everywhere: Callable[[str, Callable[[], str]], str]
) -> Captures:
    """The step of one rank with those products in fp8 that are faster so; ``captures`` where none may be.

    ``earlier`` as for ``prepare``, ``everywhere`` as for ``share_computation``.

    Raises:
        UsageError: the number of micro-batches is left to the plan.
    """
    recipe = request.options.precision.fp8
    if recipe is None:
        return captures
    if len(captures.candidates) > 1:
        raise UsageError(
            f"expected accumulate to be a number with products in fp8, which are chosen for the size of a micro-batch, "
            f"found accumulate={request.options.accumulate!r}: say how many micro-batches there are"
        )

    def decide() -> str:
        if isinstance(request.options.plan, Plan):
            decided = request.options.plan.products
        else:
            known = None if earlier is None else earlier.shared.in_fp8
            decided = decide_products(captures.rank_graph(captures.candidates[0]), request.machine, recipe, known)
        return json.dumps([asdict(decision) for decision in decided])

    decided = json.loads(everywhere("choose products in fp8", decide))
    products = tuple(from_data(ProductDecision, decision) for decision in decided)
    if request.verbose and earlier is None and not any(decision.in_fp8 for decision in products):
        reasons = first_few(dict.fromkeys(decision.reason for decision in products))
        notify(f"no product is taken in fp8: {reasons or 'there is none with a weight'}")
    return captures.multiply(products)


def products_in_fp8(plan: Plan) -> tuple[ProductKey, ...]:
    """The products of a plan that are in fp8, as all graphs of its model have them."""
    return tuple(dict.fromkeys((each.weight, each.gives) for each in plan.products if each.in_fp8))
