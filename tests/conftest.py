"""What every test shares: Hypothesis profiles, and an environment that reads and writes nothing of the user's."""

from __future__ import annotations

import os
from pathlib import Path

from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent

# Set before any test imports adjcomp, and inherited by the processes that tests start.
os.environ.setdefault("ADJCOMP_CACHE_DIR", str(ROOT / "build" / "test-cache"))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

# No deadline: the first example of a shape may compile a kernel or capture a model. Properties that need another number of
# examples than the profile's ask for a multiple of it: settings(max_examples=2 * settings().max_examples).
SLOW_IS_FINE = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
settings.register_profile("default", max_examples=10, deadline=None, suppress_health_check=SLOW_IS_FINE, print_blob=True)
settings.register_profile("fuzz", parent=settings.get_profile("default"), max_examples=2000)
settings.load_profile("default")
