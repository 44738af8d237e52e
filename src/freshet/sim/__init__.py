"""Virtual time: an event heap, a fleet of unequal devices, and the driver that delivers events to the core."""
