"""How far a simulated step is from a measured one: its length, and when each action starts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isfinite

from sparsebp.core.arguments import check_number, shown
from sparsebp.core.errors import OptionError
from sparsebp.schedule.actions import Action, actions_of
from sparsebp.schedule.costs import Link
from sparsebp.schedule.simulation.simulate import Simulation


@dataclass(frozen=True)
class Errors:
    """What a simulation says, against what was measured.

    Attributes
    ----------
    makespan
        Relative error of the length of the step: simulated / measured - 1.
    starts
        For every action, by how much later it starts in the simulation, as a share of the measured length. Both begin
        with their first action.
    durations
        For every action, simulated / measured - 1 of its duration; infinite where something was simulated of what took
        no time, 0 where both took none.
    """

    makespan: float
    starts: Mapping[Action, float]
    durations: Mapping[Action, float]

    @property
    def mean_start(self) -> float:
        """The mean of the sizes of the errors of starts."""
        return sum(map(abs, self.starts.values())) / len(self.starts)

    @property
    def worst_start(self) -> Action:
        """The action whose start is farthest off, the first of equals."""
        return max(self.starts, key=lambda action: abs(self.starts[action]))


def compare(simulation: Simulation, spans: Iterable[tuple[Action, float, float]]) -> Errors:
    """Compare a simulated step with the measured one.

    Parameters
    ----------
    simulation
        Of one step.
    spans
        The same actions as measured: action, start, end, in seconds of one clock for all workers (`Span` of
        `sparsebp.runtime.measure`, say), in any order. The simulation's costs must be in seconds, too.

    Raises
    ------
    OptionError
        The simulation has several steps, an action is missing, foreign or there twice, a time is not finite, an action
        ends before it starts, or all of them took no time.
    """
    if simulation.steps != 1:
        raise OptionError("The simulation has several steps", expected="steps=1", got=simulation.steps,
                          remedy="Simulate and measure one step")  # fmt: skip
    measured = _checked(simulation, spans)
    simulated = {action: (event.start, event.end) for event in simulation.events for action in actions_of(event.cell)}
    begin, end = min(start for start, _ in measured.values()), max(end for _, end in measured.values())
    first, length = min(start for start, _ in simulated.values()), end - begin
    if length <= 0:
        raise OptionError("The measured step took no time", expected="a longer one", got=length,
                          remedy="Measure with a finer clock")  # fmt: skip
    starts = {action: ((simulated[action][0] - first) - (start - begin)) / length
              for action, (start, _) in measured.items()}  # fmt: skip
    durations = {action: _relative(simulated[action][1] - simulated[action][0], end - start)
                 for action, (start, end) in measured.items()}  # fmt: skip
    return Errors((simulation.makespan - first) / length - 1, starts, durations)


def _checked(simulation: Simulation, spans: Iterable[tuple[Action, float, float]]) -> dict[Action, tuple[float, float]]:
    wanted = set(simulation.schedule)
    measured: dict[Action, tuple[float, float]] = {}
    for action, start, end in spans:
        if action in measured or action not in wanted:
            raise OptionError("The measured step is another one", expected="every action of the schedule, once",
                              got=f"{action}{' twice' if action in measured else ''}",
                              remedy="Simulate the schedule that was measured")  # fmt: skip
        if not (isfinite(start) and isfinite(end) and start <= end):
            raise OptionError(f"The times of {action} cannot be", expected="a start, and an end that is no earlier",
                              got=f"{shown(start)} to {shown(end)}", remedy="Measure it again")  # fmt: skip
        measured[action] = float(start), float(end)
    if len(measured) < len(wanted):
        raise OptionError("The measured step is another one", expected=f"the {len(wanted)} actions of the schedule",
                          got=f"{len(measured)}, without {min(wanted - measured.keys(), key=str)}",
                          remedy="Simulate the schedule that was measured")  # fmt: skip
    return measured


def _relative(simulated: float, measured: float) -> float:
    if measured == 0:
        return 0.0 if simulated == 0 else float("inf")
    return simulated / measured - 1


def fit_link(transfers: Iterable[tuple[float, float]]) -> Link:
    """Return the link that fits measured transfers best: seconds = latency + bytes / bandwidth.

    Least squares of the relative errors, with neither latency nor bandwidth below 0; where seconds do not grow with the
    bytes, the bandwidth is infinite.

    Parameters
    ----------
    transfers
        Bytes and seconds of each, of two sizes at least; half the round trip of a ping-pong, say.

    Raises
    ------
    OptionError
        There are fewer than two sizes, or a number is negative, or a transfer took no time.
    """
    pairs = [(check_number("The bytes of a transfer", size, 0), check_number("The seconds of a transfer", seconds, 0))
             for size, seconds in transfers]  # fmt: skip
    if len({size for size, _ in pairs}) < 2 or any(seconds == 0 for _, seconds in pairs):
        raise OptionError("No link fits these transfers", expected="two sizes or more, and seconds above 0",
                          got=f"{len(pairs)} transfers", remedy="Measure more of them")  # fmt: skip
    # Of latency · a + slope · b = 1, where a = 1 / seconds and b = bytes / seconds.
    a, b = [1 / seconds for _, seconds in pairs], [size / seconds for size, seconds in pairs]
    aa, ab, bb = (sum(x * y for x, y in zip(*both, strict=True)) for both in ((a, a), (a, b), (b, b)))
    determinant = aa * bb - ab * ab
    latency, slope = (sum(a) * bb - sum(b) * ab) / determinant, (sum(b) * aa - sum(a) * ab) / determinant
    if latency < 0:
        latency, slope = 0.0, sum(b) / bb
    if slope <= 0:
        return Link(sum(a) / aa)
    return Link(latency, 1 / slope)
