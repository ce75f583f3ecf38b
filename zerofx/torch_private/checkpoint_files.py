"""Files of ``torch.distributed.checkpoint``: apart, because it takes long to import and few steps read any."""

from torch.distributed.checkpoint.planner_helpers import (
    create_read_items_for_chunk_list as create_read_items_for_chunk_list,
)
