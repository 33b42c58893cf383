"""Files of PyTorch's pipelines run on models with stages that have no weights."""

from __future__ import annotations

import numpy as np
import pytest

import sparsebp as sb
from sparsebp.core.errors import OptionError
from sparsebp.schedule import Action, Overlap, Schedule, builders, write_csv
from sparsebp.schedule.builders import build
from sparsebp.schedule.files import without_weights

X = np.random.default_rng(0).standard_normal((16, 6), dtype=np.float32)


def trained(schedule, transport=None) -> list[float]:
    rng = np.random.default_rng(1)
    layers = [sb.nn.ReLU(), sb.nn.Linear(6, 6, rng=rng), sb.nn.ReLU(), sb.nn.Linear(6, 3, rng=rng)]
    model = sb.nn.Sequential(*layers)
    trainer = sb.train.Trainer(model, sb.nn.CrossEntropyLoss(), sb.optim.SGD(model.parameters(), lr=0.1), accumulate=4,
                               schedule=schedule, transport=transport, rng=0)  # fmt: skip
    return trainer.fit((X, np.arange(16) % 3), epochs=2, batch_size=8).loss


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v", "dualpipe-v"])
def test_pytorchs_files_train_models_with_stages_without_weights(tmp_path, name):
    """Its files give every stage a W; here stages 0 and 2 have none."""
    schedule = build(name, workers=2, stages=4, microbatches=4)
    write_csv(schedule, tmp_path / "theirs.csv", torch=True)
    first, second = sb.run_ranks(2, lambda transport: trained(str(tmp_path / "theirs.csv"), transport))
    assert first == second
    np.testing.assert_allclose(first, trained("conventional"), rtol=1e-5)


def test_builders_of_packages_train_by_name(monkeypatch):
    class Point:
        name = "of-a-package"

        def load(self):
            return lambda *, workers, stages, microbatches: build(
                "zb-v", workers=workers, stages=stages, microbatches=microbatches
            )

    with pytest.raises(OptionError, match="Unknown schedule"):
        trained("of-a-package")
    monkeypatch.setattr(builders, "entry_points", lambda group: [Point()] * (group == "sparsebp.schedules"))
    try:
        first, second = sb.run_ranks(2, lambda transport: trained("of-a-package", transport))
        with pytest.raises(OptionError, match="of several workers"):
            trained("of-a-package")
    finally:
        del builders.BUILDERS["of-a-package"]
    assert first == second
    np.testing.assert_allclose(first, trained("conventional"), rtol=1e-5)


def test_stages_lose_their_w_s_and_u():
    schedule = build("dualpipe-v", workers=2, stages=4, microbatches=4)
    bare = without_weights(schedule, [1, 3])
    assert bare.graph.unweighted == {1, 3} and without_weights(bare, [1]) is bare
    assert Action(1, "I", 0) in bare and Action(1, "W", 0) not in bare and Action(0, "W", 0) in bare
    assert any(isinstance(cell, Overlap) and cell.backward.kind == "I" for lane in bare.lanes for cell in lane.cells)
    fused = without_weights(build("1f1b", workers=2, stages=4, microbatches=4, fusion="none"), [0])
    assert Action(0, "U") not in fused and Action(1, "U") in fused


def test_forwards_alone_do_not_train():
    forwards: Schedule = build("forward-only", workers=1, stages=4, microbatches=4)
    with pytest.raises(OptionError, match="forwards alone"):
        trained(forwards)
