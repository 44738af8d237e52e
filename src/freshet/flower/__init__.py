"""Federations of real machines, on Flower: its SuperLink and SuperNodes carry the messages, the core decides.

Built on ``core.coordinator`` (server) and ``training.trip`` (device). Nothing here knows a simulation.
"""

import time

#: When this package was loaded: in the process of a trip, what comes before is Flower's and what follows is ours.
IMPORTED_AT = time.time()
