"""Images, and who has which of them: the data of a federation."""

from .federation import Federation, load_federation
from .partitions import PARTITIONS
from .picture import draw_partition
from .sources import DATASETS, DataError

__all__ = ["DATASETS", "PARTITIONS", "DataError", "Federation", "draw_partition", "load_federation"]
