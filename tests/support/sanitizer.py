"""Whether AddressSanitizer watches the tests."""

from __future__ import annotations

import os

ADDRESS = "libasan" in os.environ.get("LD_PRELOAD", "")
