"""Convolutional networks on images: MNIST, scikit-learn's digits, CIFAR-10; with pruning and retraining."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal, TypeAlias

from sparsebp.core.errors import OptionError
from sparsebp.data import Dataset, ImageDataset, load_cifar10, load_digit_images, load_mnist_images
from sparsebp.nn.pruning import PruneMethod
from sparsebp.recipes.config import CLASSES, Option, TrainConfig, chosen_samples

ImageTask: TypeAlias = Literal["mnist", "digits", "cifar10"]
ImageModel: TypeAlias = Literal["lenet5", "vgg11", "mobilenetv2", "densenet"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageConfig(TrainConfig):
    """A convolutional network.

    Attributes
    ----------
    task
        ``"mnist"`` (4 000 images for training), ``"digits"`` (scikit-learn's, scaled up; 1 497) or ``"cifar10"``.
    model
        ``"lenet5"`` (28×28, on CIFAR-10 32×32), ``"vgg11"``, ``"mobilenetv2"`` or ``"densenet"``
        (L = 40, k = 12; these on 32×32, three channels).
    width
        Factor on the channels of vgg11, mobilenetv2 and densenet.
    data
        Folder of CIFAR-10's binary version; the other tasks need none.
    prune
        Share of the weights to prune after the epochs of training, None for no pruning. What is pruned away is then
        retrained without; `backward` is that of the retraining, and the training before it is sequential, since
        transposed Jacobians of unpruned convolutions are too large to be scanned.
    prune_method
        See `sparsebp.prune`. The default keeps the same share of every layer: class-blind takes all of VGG-11's last
        layer at 97 %, since its weights are small beside those of the convolutions, and nothing can be retrained then.
    retrain_epochs, retrain_lr
        Epochs after pruning, with a learning-rate schedule of their own, and its rate; None for `lr`.
    """

    task: ImageTask
    model: ImageModel
    width: Annotated[float, Option("Images: factor on the channels, not of lenet5.", shown="1")] = 1.0
    data: Annotated[str | None, Option("cifar10: folder of the binary version.", shown=False)] = None
    prune: Annotated[
        float | None,
        Option("Images: share of the weights to prune after training, then retrain.", shown="none", positive=False),
    ] = None
    prune_method: Annotated[PruneMethod, Option("How to share that out over the layers", shown="class_uniform")] = (
        "class_uniform"
    )
    retrain_epochs: Annotated[int, Option("Epochs after pruning.", shown="as many as before; vgg11 8")] = 0
    retrain_lr: Annotated[float | None, Option("Learning rate after pruning.", shown="that before; vgg11 0.003")] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.schedule == "ooo" and self.backward != "bp":
            raise OptionError(
                "A scan computes all input gradients at once: nothing runs beside it, out of order",
                expected="backward='bp' with schedule='ooo'", got=repr(self.backward),
                remedy="Use schedule='conventional', or backward='bp'",
            )  # fmt: skip
        if self.prune is not None and not 0 <= self.prune < 1:
            raise OptionError(
                "The amount to prune is out of range", expected="a number from 0 to below 1", got=self.prune,
                remedy="Pass the share of the weights that is to go, 0.97 say",
            )  # fmt: skip
        if (self.task == "cifar10") != (self.data is not None):
            raise OptionError(
                "A folder of images belongs to cifar10 alone" if self.data else "CIFAR-10 is not part of any package",
                expected="no folder" if self.data else "the folder of its binary version",
                got=self.data or "none",
                remedy="Leave --data out" if self.data else "Unpack cifar-10-binary.tar.gz and pass --data FOLDER",
            )
        if self.model == "lenet5" and self.width != 1:
            raise OptionError("lenet5 has no width", expected="1", got=self.width, remedy="Leave --width out")

    @property
    def title(self) -> str:
        """Task, model and width."""
        width = "" if self.width == 1 else f" × {self.width:g}"
        return f"{self.task}: {self.model}{width}"

    def load_data(self) -> tuple[Dataset, Dataset]:
        """Return the training and the test set, in the size and channels that the model takes."""
        train, test = self._images()
        if self.samples is not None:
            train = train.take(chosen_samples(self.samples, len(train), self.seed))
        return train, test

    def _images(self) -> tuple[ImageDataset, ImageDataset]:
        if self.data is not None:
            return load_cifar10(self.data, dtype=self.dtype)
        load = load_mnist_images if self.task == "mnist" else load_digit_images
        channels, size = self.image
        return load(size=size, channels=channels, dtype=self.dtype)

    @property
    def image(self) -> tuple[int, int]:
        """Channels, and height and width, of the images."""
        return (1, 28) if self.model == "lenet5" and self.task != "cifar10" else (3, 32)

    def build_model(self) -> Any:
        """Return the network, for batches (B, C, H, W)."""
        from sparsebp import models

        channels, size = self.image
        options: dict[str, Any] = {"dtype": self.dtype, "rng": self.seed}
        if self.model == "lenet5":
            model = models.lenet5(channels, CLASSES, size=size, **options)
        else:
            model = getattr(models, self.model)(channels, CLASSES, width=self.width, **options)
        model.set_backward(self.backward)
        return model.to(self.device)

    def backward_of(self, model: Any, x: Any) -> dict[str, str]:
        """Return what the plans of the chain's stretches say."""
        state = model.state_dict()
        plans = model.scan_plans(model.forward(x)[1])
        model.load_state_dict(state)  # a forward in training mode moves running statistics
        if not plans:
            return {"algorithm": "bp", "reason": "layer by layer: no scan was asked for, or there is nothing to scan"}
        algorithms = dict.fromkeys(plan.algorithm for plan in plans)
        reasons = list(dict.fromkeys(plan.reason for plan in plans))
        more = f" And {len(reasons) - 2} more." if len(reasons) > 2 else ""
        return {"algorithm": ", ".join(algorithms), "reason": " ".join(reasons[:2]) + more}

    def same_on_resume(self) -> dict[str, Any]:
        """Leave the folder of the data out: it may move."""
        described = super().same_on_resume()
        del described["data"]
        if self.prune is not None:  # the retraining: what was pruned depends on the epochs before
            described["epochs"] = self.epochs
            if self.lr_schedule == "constant":
                del described["retrain_epochs"]
        return described

    def before_pruning(self) -> ImageConfig:
        """Return the configuration of the training before pruning."""
        return dataclasses.replace(
            self, backward="bp", prune=None, prune_method="class_uniform", retrain_epochs=0, retrain_lr=None
        )
