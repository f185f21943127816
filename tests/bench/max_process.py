"""MAX's operators, timed in its own environment: the other side of `protocol.py`. Argument: on how many processors."""

import os
import sys

from protocol import serve

if __name__ == "__main__":
    # Before MAX is loaded, which makes a thread for each.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(sys.argv[1])])
    from support.peer_max import FUNCTIONS, result

    serve(FUNCTIONS, result)
