"""Whether AddressSanitizer watches the tests, which makes them several times slower."""

from __future__ import annotations

import os

ADDRESS = "libasan" in os.environ.get("LD_PRELOAD", "")
