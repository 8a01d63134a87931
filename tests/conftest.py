"""What holds for the tests of all folders."""

from hypothesis import HealthCheck, settings

# Any machine will do, however slow or busy: no example has a time limit.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")
