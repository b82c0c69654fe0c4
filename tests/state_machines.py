"""Hypothesis settings for state machines: the same runs everywhere, however busy the machine is."""

from hypothesis import HealthCheck, settings

STEADY = settings(derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
