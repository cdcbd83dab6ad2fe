"""The tests of this folder need the simulated device: `make test-pretended-cuda`."""

from __future__ import annotations

import sys

collect_ignore_glob = [] if "tests.pretended_cuda.plugin" in sys.modules else ["test_*.py"]
