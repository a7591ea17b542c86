"""Does a process take more and more memory? A slope that single peaks do not bend.

series = Series(); series.add(seconds, resident_bytes); series.per_hour      # None until it is long enough
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

EVERY_S = 10.0
WINDOW_S = 1800.0
SHORTEST_S = 600.0  # a model takes what its first requests need, once


@dataclass
class Series:
    """What one process had in the last half hour."""

    points: deque[tuple[float, int]] = field(default_factory=deque)

    def add(self, at_s: float, size: int) -> None:
        """One reading, in the order of time."""
        self.points.append((at_s, size))
        while at_s - self.points[0][0] > WINDOW_S:
            self.points.popleft()

    @property
    def per_hour(self) -> float | None:
        """Bytes an hour that it grows, by the medians of the first and of the last third.

        0 unless it grows (or shrinks) from each third to the next: what grew once and then stayed is no leak.
        """
        points = list(self.points)
        third = len(points) // 3
        if third < 2 or points[-1][0] - points[0][0] < SHORTEST_S:
            return None
        parts = (points[:third], points[third : 2 * third], points[-third:])
        (at_first, first), (_, middle), (at_last, last) = (
            (statistics.median(at for at, _ in part), statistics.median(size for _, size in part)) for part in parts
        )
        if (last - middle) * (middle - first) <= 0:
            return 0.0
        return (last - first) / (at_last - at_first) * 3600
