"""Whether AddressSanitizer watches the tests, and how much they try without it.

What is tried by the thousand, at random, is all tried where AddressSanitizer sees every fault, or where
KVGRAPH_THOROUGH=1 is set; elsewhere a share of it, so that the default suite takes minutes.
"""

from __future__ import annotations

import os

ADDRESS = "libasan" in os.environ.get("LD_PRELOAD", "")
THOROUGH = ADDRESS or os.environ.get("KVGRAPH_THOROUGH") == "1"
SHARE = 1 if THOROUGH else 10  # one in so many
