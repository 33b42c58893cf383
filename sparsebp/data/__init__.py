"""DATA: data sets held in memory, sequences and images, and batches that are a function of (seed, epoch)."""

from sparsebp.data.dataset import BitstreamDataset
from sparsebp.data.dataset import load_cifar10
from sparsebp.data.dataset import ArrayDataset
from sparsebp.data.dataset import Dataset
from sparsebp.data.dataset import epoch_order
from sparsebp.data.dataset import load_digits
from sparsebp.data.dataset import ImageDataset
from sparsebp.data.dataset import load_digit_images
from sparsebp.data.dataset import load_mnist_images
from sparsebp.data.instruments import load_instruments
from sparsebp.data.instruments import synthetic_instruments

__all__ = [
    "ArrayDataset",
    "BitstreamDataset",
    "Dataset",
    "ImageDataset",
    "epoch_order",
    "load_cifar10",
    "load_digit_images",
    "load_digits",
    "load_instruments",
    "load_mnist_images",
    "synthetic_instruments",
]


def __dir__() -> list[str]:
    return sorted(__all__)
