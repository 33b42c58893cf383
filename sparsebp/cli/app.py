"""The commands, one a file. Importing this needs typer and rich; `sparsebp.cli.main.main` checks for them first."""

from sparsebp.cli.common import make_app
from sparsebp.cli.info import info, verify, warm_up
from sparsebp.cli.schedule import schedule_app
from sparsebp.cli.train import demo, prune, train, tune

app = make_app((train, tune, prune, demo, verify, warm_up, info), {"schedule": schedule_app})

__all__ = ["app"]
