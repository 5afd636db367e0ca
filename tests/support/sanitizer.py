"""Whether AddressSanitizer watches the tests, which makes them several times slower.

Damaged files and requests are all tried there, where no fault goes unseen, and a share of them without it.
"""

from __future__ import annotations

import os

ADDRESS = "libasan" in os.environ.get("LD_PRELOAD", "")
SHARE = 1 if ADDRESS else 5  # one in so many
