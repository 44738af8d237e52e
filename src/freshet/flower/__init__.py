"""Federations of real machines, on Flower: its SuperLink and SuperNodes carry the messages, the core decides.

Built on ``core.coordinator`` (server) and ``training.trip`` (device). Nothing here knows a simulation.
"""
