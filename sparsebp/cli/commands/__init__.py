"""The commands, one a file. Importing this needs typer and rich; `sparsebp.cli.main.main` checks for them first."""

from sparsebp.cli.commands.bench import bench
from sparsebp.cli.commands.common import make_app
from sparsebp.cli.commands.demo import demo
from sparsebp.cli.commands.info import info
from sparsebp.cli.commands.prune import prune
from sparsebp.cli.commands.reproduce import reproduce
from sparsebp.cli.commands.schedule import schedule_app
from sparsebp.cli.commands.train import train
from sparsebp.cli.commands.tune import tune
from sparsebp.cli.commands.verify import verify
from sparsebp.cli.commands.warm_up import warm_up

app = make_app((train, tune, prune, demo, bench, reproduce, verify, warm_up, info), {"schedule": schedule_app})

__all__ = ["app"]
