"""Federations of real machines. Flower's SuperLink and SuperNodes carry the messages; the core decides.

Built on ``core.coordinator`` (server) and ``training.trip`` (device). Independent of the simulator.
"""

import time

#: When this package was imported. In the process of a trip, the time before is Flower's and the time after is ours.
IMPORTED_AT = time.time()
#: When the message of this process was taken from the SuperNode. Only a warm device knows (``freshet.flower.warm``).
TAKEN_AT: float | None = None
#: In a device's folder: the last run that the server has said to be over.
OVER_FILE = "over"
NEEDS_FLOWER = "deploying needs Flower, which is not installed; install it with: pip install 'freshet-fl[flower]'"
