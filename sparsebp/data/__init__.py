"""DATA: data sets held in memory, sequences and images, and batches that are a function of (seed, epoch)."""

from sparsebp.data.dataset import (
    ArrayDataset,
    BitstreamDataset,
    Dataset,
    ImageDataset,
    WithPositions,
    epoch_order,
    load_cifar10,
    load_digit_images,
    load_digits,
    load_mnist_images,
)
from sparsebp.data.instruments import load_instruments, synthetic_instruments

__all__ = [
    "ArrayDataset",
    "BitstreamDataset",
    "Dataset",
    "ImageDataset",
    "WithPositions",
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
