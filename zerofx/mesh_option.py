"""The option ``mesh=``, checked: the axes that a user's ranks lie along."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, Literal, Union

from zerofx.errors import UsageError
from zerofx.scheduler.plan.mesh import AXES, Mesh

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

AUTO: Final = "auto"  # the fastest mesh of so many ranks

MeshLike = Union[Mesh, Mapping[str, int], "DeviceMesh", Literal["auto"]]

_NAMES = ", ".join(map(repr, AXES))


def mesh_of(given: object) -> Mesh | None:
    """A mesh from what a user gives: one, numbers of ranks by axis, or a ``DeviceMesh`` with axes of these names.

    Raises:
        UsageError: it has other axes, or lays ranks out in another order; says what it can be.
    """
    if given is None or isinstance(given, Mesh):
        return given
    sizes: Mapping[object, object] | None = given if isinstance(given, Mapping) else _sizes_of(given)
    if sizes is None:
        raise UsageError(
            f"expected mesh to be numbers of ranks by axis, such as {{'replicate': 2, 'shard': 4}}, a "
            f"torch.distributed.DeviceMesh with axes of these names, 'auto', or None, found "
            f"{repr(given) if isinstance(given, str) else type(given).__name__}"
        )
    unknown = [name for name in sizes if name not in AXES]
    if unknown:
        raise UsageError(
            f"expected axes of a mesh to be called {_NAMES}, outer to inner, found {', '.join(map(repr, unknown))}"
        )
    order = [name for name in sizes if name in AXES]
    if not isinstance(given, Mapping) and order != sorted(order, key=AXES.index):
        raise UsageError(
            f"expected the axes of a DeviceMesh to be among {_NAMES}, in this order, found "
            f"{', '.join(map(repr, order))}"
        )
    return Mesh(**{str(name): size for name, size in sizes.items()})  # type: ignore[arg-type]  # which Mesh checks


def mesh_for(asked: Mesh | None, num_ranks: int) -> Mesh:
    """The mesh of ``num_ranks`` ranks: the one that is asked for, or all of them along ``shard``.

    Raises:
        UsageError: the one that is asked for has another number of ranks.
    """
    if asked is None:
        return Mesh(shard=num_ranks)
    if asked.num_ranks != num_ranks:
        raise UsageError(
            f"expected a mesh of {num_ranks} rank(s), which is how many there are, found {asked}, which is "
            f"{asked.num_ranks}: give axes whose product is {num_ranks}"
        )
    return asked


def _sizes_of(given: object) -> Mapping[object, object] | None:
    """Numbers of ranks by axis of a ``DeviceMesh``; None where it is none.

    Raises:
        UsageError: its axes have no names, or its ranks are not all there are, in order.
    """
    import torch.distributed as dist  # which the command line does without

    if not dist.is_available():
        return None
    from torch.distributed.device_mesh import DeviceMesh

    if not isinstance(given, DeviceMesh):
        return None
    names, ranks = given.mesh_dim_names, given.mesh.flatten().tolist()
    if names is None:
        raise UsageError(
            f"expected a DeviceMesh with mesh_dim_names among {_NAMES}, found one whose axes have no names"
        )
    # A part of a mesh has other ranks elsewhere: what is not all there are is refused on all of them.
    if ranks != list(range(dist.get_world_size())):
        raise UsageError(
            f"expected a DeviceMesh of all ranks in order, the last axis innermost, as init_device_mesh makes it, "
            f"found ranks {ranks}"
        )
    return dict(zip(names, given.mesh.shape, strict=True))
