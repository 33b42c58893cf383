"""DATA: sequence data sets held in memory, and batches that are a function of (seed, epoch)."""

from sparsebp.data.bitstream import BitstreamDataset
from sparsebp.data.dataset import ArrayDataset, Dataset, epoch_order
from sparsebp.data.digits import load_digits

__all__ = ["ArrayDataset", "BitstreamDataset", "Dataset", "epoch_order", "load_digits"]
