"""Pieces that several methods share."""
