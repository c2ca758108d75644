"""One thread for each test process: the networks of the tests are too small for two, and the tests share the cores."""

import os

# Set before torch is imported, and inherited by the commands that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
