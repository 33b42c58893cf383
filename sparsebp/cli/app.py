"""The commands, one a file. Importing this needs typer and rich; `sparsebp.cli.main.main` checks for them first."""

from sparsebp.cli.bench import bench
from sparsebp.cli.common import make_app
from sparsebp.cli.train import demo
from sparsebp.cli.info import info
from sparsebp.cli.train import prune
from sparsebp.cli.reproduce import reproduce
from sparsebp.cli.schedule import schedule_app
from sparsebp.cli.train import train
from sparsebp.cli.train import tune
from sparsebp.cli.info import verify
from sparsebp.cli.info import warm_up

app = make_app((train, tune, prune, demo, bench, reproduce, verify, warm_up, info), {"schedule": schedule_app})

__all__ = ["app"]
