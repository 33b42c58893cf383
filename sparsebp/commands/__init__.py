"""The commands, one a file. Importing this needs typer and rich; `sparsebp.cli` checks for them first."""

from sparsebp.commands.bench import bench
from sparsebp.commands.common import make_app
from sparsebp.commands.demo import demo
from sparsebp.commands.info import info
from sparsebp.commands.prune import prune
from sparsebp.commands.schedule import schedule_app
from sparsebp.commands.train import train
from sparsebp.commands.tune import tune
from sparsebp.commands.verify import verify
from sparsebp.commands.warm_up import warm_up

app = make_app((train, tune, prune, demo, bench, verify, warm_up, info), {"schedule": schedule_app})

__all__ = ["app"]
