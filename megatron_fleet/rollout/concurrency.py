"""How many episodes may play now, from what engines report (`rollout.episodes_in_flight=auto`). No Ray, no tasks, no
clock.

Time is counted in *turnovers*: one has passed when as many episodes have ended as may play, so that contexts of every
length have been in the engines. The number grows once per turnover, by the turnover's largest KV cache use, because the
use of episodes that have just begun tells little. It shrinks as soon as engines are overloaded, but again only when as
few play as are allowed: until then their load is still that of the old number. Running episodes are never cancelled.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from statistics import fmean

from megatron_fleet.rollout.engine_statistics import EngineStatistics

START = 32
"""Episodes for each engine at first. Decoding so few is still bound by the reading of the weights, on all GPUs: fewer
would leave an engine idle. More might not fit, and would be learnt to fit within a few turnovers."""
SOFT = 0.75
"""Share of the KV cache, as a mean of the engines, that growth aims at. The rest is for episodes that grow at the same
time, and for the prefixes of those that wait for a tool: vLLM counts these as free, but once they are overwritten the
next turn computes its whole prompt again."""
HARD = 0.9
"""Share of the KV cache above which the number shrinks. Between `SOFT` and `HARD` it stays, so that neither noise nor
the ages of episodes make it oscillate."""
QUEUE = 0.05
"""Requests waiting in an engine, as a share of those running, that count as a queue. Below it are those that arrived
during a step."""
CUT = 0.15
"""Share of the number that is taken away at most at once, and by a use above `HARD`: what leads from there to about
`SOFT`."""
SHARE_OF_ROOM = 0.5
"""Share of the room that the last turnover left which the next one takes: contexts and their mix vary, so that the same
number may need more."""
LARGEST_GROWTH = 3.0
"""Largest growth in a turnover, as a share of the number: from 32 to 512 episodes for each engine in two turnovers."""
CAREFUL_GROWTH = 0.05
"""The same after a turnover with an overload; each one without adds as much. So what overloads single engines, which
the mean use does not show, is approached slowly each time."""
NEAR = 0.95
"""Share of the most episodes that have played in a turnover from which the engines' load counts as that of this number.
When fewer play because no more are wanted, as at the end of a step, the load is that of few long episodes."""


@dataclass(slots=True)
class _Engine:
    """State of one engine.

    Attributes:
        use: share of its KV cache in use.
        queued: requests waited in it, at the last reading.
        excess: requests for which it had no memory. Those that wait while there is memory wait for computation, as many
            do after a weight update; fewer episodes would not make that faster.
        taken: by how much the number was lowered already for these.
    """

    serving: bool = True
    use: float = 0.0
    queued: bool = False
    excess: float = 0.0
    taken: float = 0.0

    @property
    def too_many(self) -> float:
        return max(0.0, self.excess - self.taken)

    def read(self, serving: bool, counts: EngineStatistics) -> None:
        self.serving, self.use = serving, counts.kv_usage / max(1, counts.steps)
        queued = counts.waiting > QUEUE * counts.running
        lasting, self.queued = queued and self.queued, queued
        # A weight update preempts all requests, too, so that their caches are computed with the new weights.
        self.excess = counts.preemptions if counts.most_kv_usage > HARD else 0.0
        if lasting and self.use > SOFT:
            self.excess = max(self.excess, counts.waiting / counts.steps)
        if not queued:
            self.taken = 0.0


class Concurrency:
    """Number of episodes that may play at once on engines of equal size."""

    def __init__(self, engines: Iterable[Hashable], sequences: int) -> None:
        """
        Args:
            engines: a key of each, such as its name; others may be added, and leave.
            sequences: those that one engine decodes together, which is the most that may play for each.
        """
        self._engines = {key: _Engine() for key in engines}
        self._most_each = float(sequences)
        self._each = float(min(START, sequences))
        self._growth = LARGEST_GROWTH
        self._ended, self._most_playing, self._peak = 0, 0, 0.0

    @property
    def allowed(self) -> int:
        """Episodes that may play now: in proportion to the engines that serve."""
        return max(1, int(self._each * self._serving))

    def add(self, engine: Hashable) -> None:
        """Count an engine from now on."""
        self._engines[engine] = _Engine()

    def remove(self, engine: Hashable) -> None:
        """Do not count an engine any more."""
        self._engines.pop(engine, None)

    def observe(
        self, engine: Hashable, serving: bool, counts: EngineStatistics, *, playing: int, waiting: int, ended: int
    ) -> None:
        """Take one engine's newest reading.

        Args:
            counts: what it counted since its last reading.
            playing: episodes that play now, on all engines.
            waiting: episodes that wait until they may play.
            ended: episodes that ended since the last call for any engine.
        """
        one = self._engines[engine]
        one.read(serving, counts)
        use = fmean(each.use for each in self._engines.values() if each.serving) if serving else 0.0
        self._ended += ended
        self._most_playing = max(self._most_playing, playing)
        self._peak = max(self._peak, use)
        held = min(self._each * self._serving, self._most_playing)
        too_many = CUT * held if use > HARD else min(one.too_many, CUT * held)
        if too_many and playing <= self.allowed and (waiting or playing >= NEAR * self._most_playing):
            self._each = max(1.0, (held - too_many) / self._serving)
            self._growth = CAREFUL_GROWTH
            one.taken += too_many
        elif not too_many and not one.excess and waiting and self._ended >= self.allowed:
            self._grow(playing)

    @property
    def _serving(self) -> int:
        """Engines that serve; while none does, all, as nothing can be played then and all are being replaced."""
        return sum(engine.serving for engine in self._engines.values()) or max(1, len(self._engines))

    def _grow(self, playing: int) -> None:
        """Begin the next turnover, with more episodes if the last one had room for them."""
        room = SHARE_OF_ROOM * (SOFT / max(self._peak, 0.01) - 1)
        if room > 0:
            self._each = min(self._most_each, self._each * (1 + min(room, self._growth)))
        self._growth = min(LARGEST_GROWTH, self._growth + CAREFUL_GROWTH)
        self._ended, self._most_playing, self._peak = 0, playing, 0.0
        for engine in self._engines.values():
            engine.taken = 0.0
