"""Virtual time: an event heap, a fleet of unequal devices, and the driver that brings events to the core."""
