"""The parts of the battery. Each module has ``measure(report, request)``; see `battery.registry` for what they need."""
